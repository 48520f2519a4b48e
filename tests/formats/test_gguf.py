"""GGUF: what gguf-py wrote, and files made from the specification with unusual sizes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import gguf
from tests.helpers.command import refused, reshard
from tests.helpers.gguf import Blocks
from tests.helpers.tensorfile import Raw, Tensors, read

FIXTURE = Path(__file__).parents[2] / "fixtures" / "gguf"
HEADS, KV, HEAD, DIM, FFN, VOCAB, EXPERTS = 4, 2, 16, 32, 64, 37, 3
KEYS: dict[str, Any] = {
    "block_count": 1, "context_length": 64, "embedding_length": DIM, "feed_forward_length": FFN,
    "attention.head_count": HEADS, "attention.head_count_kv": KV, "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.key_length": HEAD, "rope.freq_base": 500000.0,
}  # fmt: skip
Files = dict[str, Raw | Blocks]


def keys(architecture: str = "llama", **more: Any) -> dict[str, Any]:
    own = {f"{architecture}.{k}": v for k, v in {**KEYS, **more}.items()}
    tokens = [f"<{i}>" for i in range(300)]  # an array that is not kept
    return {"general.architecture": architecture, **own, "tokenizer.ggml.tokens": tokens, "general.quantized": True}


def numbers(*shape: int, seed: int = 0) -> Raw:
    rng = np.random.default_rng(seed + sum(shape))
    return Raw("F32", rng.standard_normal(shape).astype(np.float32).view(np.uint32))


def blocks(*shape: int) -> Blocks:
    rng = np.random.default_rng(sum(shape))
    codes = rng.integers(-128, 128, shape).astype(np.int8)
    return Blocks(rng.standard_normal(codes.size // 32).astype(np.float16), codes)


def pairs(bits: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows as llama.cpp has them: neighbours turn together."""
    return bits.reshape(heads, 2, -1, *bits.shape[1:]).swapaxes(1, 2).reshape(bits.shape)


def model(*, tied: bool = False, experts: int = 0) -> tuple[Tensors, Files]:
    """(the model under published names, what the file holds)."""
    at, blk = "model.layers.0.", "blk.0."
    out: Tensors = {
        "model.embed_tokens.weight": numbers(VOCAB, DIM),
        f"{at}self_attn.q_proj.weight": numbers(HEADS * HEAD, DIM),
        f"{at}self_attn.k_proj.weight": numbers(KV * HEAD, DIM, seed=1),
        f"{at}self_attn.v_proj.weight": numbers(KV * HEAD, DIM, seed=2),
        f"{at}input_layernorm.weight": numbers(DIM),
        f"{at}post_attention_layernorm.weight": numbers(DIM, seed=1),
        "model.norm.weight": numbers(DIM, seed=2),
    }
    if not tied:
        out["lm_head.weight"] = numbers(VOCAB, DIM, seed=3)
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
        f"{at}self_attn.q_proj": f"{blk}attn_q", f"{at}self_attn.k_proj": f"{blk}attn_k",
        f"{at}self_attn.v_proj": f"{blk}attn_v", f"{at}input_layernorm": f"{blk}attn_norm",
        f"{at}post_attention_layernorm": f"{blk}ffn_norm",
    }  # fmt: skip
    files: Files = {f"{names[n.removesuffix('.weight')]}.weight": t for n, t in out.items()}
    for part, heads in (("q", HEADS), ("k", KV)):
        bits = out[f"{at}self_attn.{part}_proj.weight"].bits
        files[f"{blk}attn_{part}.weight"] = Raw("F32", pairs(bits, heads))
    coded = {f"{at}self_attn.o_proj.weight": (f"{blk}attn_output.weight", blocks(DIM, HEADS * HEAD))}
    if experts:
        moe = f"{at}block_sparse_moe."
        out[f"{moe}gate.weight"] = files[f"{blk}ffn_gate_inp.weight"] = numbers(experts, DIM)
        for ours, theirs, shape in (("w1", "gate", (FFN, DIM)), ("w3", "up", (FFN, DIM)), ("w2", "down", (DIM, FFN))):
            stack = files[f"{blk}ffn_{theirs}_exps.weight"] = blocks(experts, *shape)
            for e, bits in enumerate(gguf.values(stack).bits):
                out[f"{moe}experts.{e}.{ours}.weight"] = Raw("F32", bits)
    else:
        coded[f"{at}mlp.gate_proj.weight"] = (f"{blk}ffn_gate.weight", blocks(FFN, DIM))
        coded[f"{at}mlp.up_proj.weight"] = (f"{blk}ffn_up.weight", blocks(FFN, DIM))
        coded[f"{at}mlp.down_proj.weight"] = (f"{blk}ffn_down.weight", blocks(DIM, FFN))
    for name, (theirs, block) in coded.items():
        out[name], files[theirs] = gguf.values(block), block
    return out, files


def same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, t in expected.items():
        assert found[name].dtype == t.dtype
        np.testing.assert_array_equal(found[name].bits, t.bits, err_msg=name)


def joined(folder: Path) -> Tensors:
    return {n: t for f in sorted(folder.glob("*.safetensors")) for n, t in read(f).items()}


def test_what_gguf_py_wrote_is_read(tmp_path: Path) -> None:
    done = reshard(FIXTURE / "llama_q8_0", tmp_path / "hf", "--to", "hf", "--verify")
    assert "14 weights are Q8_0" in done.err
    same(joined(tmp_path / "hf"), read(FIXTURE / "llama_q8_0.safetensors"))


@pytest.mark.parametrize("experts", [0, EXPERTS])
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_is_read_without_config(experts: int, tied: bool, tmp_path: Path) -> None:
    expected, files = model(tied=tied, experts=experts)
    more: dict[str, Any] = {"expert_count": experts, "expert_used_count": 2} if experts else {}
    gguf.write(tmp_path / "a" / "m.gguf", keys("llama", **more), files)
    reshard(tmp_path / "a" / "m.gguf", tmp_path / "hf", "--to", "hf", "--verify")
    same(joined(tmp_path / "hf"), expected)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    wanted = {
        "model_type": "mixtral" if experts else "llama", "vocab_size": VOCAB, "head_dim": HEAD, "num_hidden_layers": 1,
        "num_key_value_heads": KV, "rms_norm_eps": 1e-6, "rope_theta": 500000.0, "tie_word_embeddings": tied,
    }  # fmt: skip
    assert {k: config.get(k) for k in wanted} == wanted


def test_codes_are_decoded_wherever_a_rank_begins(tmp_path: Path) -> None:
    """Rows of 64 are two blocks: a cut by columns begins within a row, another one in the middle of a block."""
    expected, files = model()
    gguf.write(tmp_path / "a" / "m.gguf", keys(), files)
    reshard(tmp_path / "a", tmp_path / "ranks", "--to", "ranks", "--tp-out", 2, "--verify")
    down = expected["model.layers.0.mlp.down_proj.weight"].bits
    for rank, file in enumerate(sorted((tmp_path / "ranks").glob("*.safetensors"))):
        found = read(file)["model.layers.0.mlp.down_proj.weight"].bits
        np.testing.assert_array_equal(found, down[:, rank * 32 : rank * 32 + 32])


def test_scales_that_are_no_numbers(tmp_path: Path) -> None:
    held = Blocks(np.array([np.inf, -np.inf, np.nan, 6e4], np.float16), np.tile(np.arange(-16, 16, dtype=np.int8), 4))
    gguf.write(tmp_path / "x.gguf", {"general.architecture": "x"}, {"a": held})
    reshard(tmp_path / "x.gguf", tmp_path / "hf", "--to", "hf", "--verify")
    same(joined(tmp_path / "hf"), {"a": gguf.values(held)})


def test_parts_are_one_model(tmp_path: Path) -> None:
    expected, files = model()
    half = dict(list(files.items())[:5])
    rest = {n: t for n, t in files.items() if n not in half}
    first = gguf.write(tmp_path / "a" / "m-00001-of-00002.gguf", keys(), half)
    gguf.write(tmp_path / "a" / "m-00002-of-00002.gguf", {"split.no": 1}, rest)
    reshard(tmp_path / "a", tmp_path / "hf", "--to", "hf")
    same(joined(tmp_path / "hf"), expected)
    assert "one part of a model" in refused(first, tmp_path / "x", "--to", "hf")
    (tmp_path / "a" / "m-00001-of-00002.gguf").unlink()
    assert "parts are missing: 1" in refused(tmp_path / "a", tmp_path / "x", "--to", "hf")


def test_names_of_other_architectures_are_kept(tmp_path: Path) -> None:
    _, files = model()
    gguf.write(tmp_path / "a" / "m.gguf", keys("falcon"), files)
    done = reshard(tmp_path / "a", tmp_path / "hf", "--to", "hf")
    assert "`falcon` are not known" in done.err
    assert joined(tmp_path / "hf").keys() == files.keys()


def test_config_beside_that_is_of_another_model(tmp_path: Path) -> None:
    shutil.copytree(FIXTURE / "llama_q8_0", tmp_path / "a")
    config = json.loads((tmp_path / "a" / "config.json").read_text()) | {"num_key_value_heads": 4}
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    said = refused(tmp_path / "a", tmp_path / "hf", "--to", "hf")
    assert "`num_key_value_heads` of config.json is 4, and the GGUF file says 2" in said


def test_config_beside_of_a_model_with_other_rows(tmp_path: Path) -> None:
    """Of the same sizes, but llama.cpp leaves the rows of a Qwen2 as they are."""
    _, files = model()
    gguf.write(tmp_path / "a" / "m.gguf", keys(), files)
    reshard(tmp_path / "a", tmp_path / "hf", "--to", "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "a" / "config.json").write_text(json.dumps(config | {"model_type": "mistral"}))
    reshard(tmp_path / "a", tmp_path / "mistral", "--to", "hf")
    (tmp_path / "a" / "config.json").write_text(json.dumps(config | {"model_type": "qwen2"}))
    said = refused(tmp_path / "a", tmp_path / "out", "--to", "hf")
    assert "`model_type` of config.json is qwen2, and the GGUF file is of a llama" in said


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"block_count": 3}, "the model has 3 layers, and of 2 there are no tensors: blk.1, blk.2"),
        ({"attention.key_length": 8}, "`blk.0.attn_q.weight` has 64 rows, and the keys of the file say 4 heads of 8"),
        ({"rope.dimension_count": 8}, "`llama.rope.dimension_count` is 8, and a head is 16 wide"),
    ],
)
def test_keys_of_another_model(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    _, files = model()
    gguf.write(tmp_path / "a" / "m.gguf", keys(**changed), files)
    assert said in refused(tmp_path / "a", tmp_path / "hf", "--to", "hf")


def test_experts_of_qwen3_are_weighed_as_llama_cpp_does(tmp_path: Path) -> None:
    """transformers does not make the weights of the chosen experts 1 together, where config.json does not say so."""
    _, files = model(experts=EXPERTS)
    norms: Files = {f"blk.0.attn_{part}_norm.weight": numbers(HEAD) for part in "qk"}
    sizes: dict[str, Any] = {"expert_used_count": 2, "expert_feed_forward_length": FFN}
    gguf.write(tmp_path / "a" / "m.gguf", keys("qwen3moe", **sizes), files | norms)
    assert "does not say `qwen3moe.expert_count`" in refused(tmp_path / "a", tmp_path / "out", "--to", "hf")
    gguf.write(tmp_path / "a" / "m.gguf", keys("qwen3moe", expert_count=EXPERTS, **sizes), files | norms)
    reshard(tmp_path / "a", tmp_path / "hf", "--to", "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["num_experts"], config["norm_topk_prob"]) == (EXPERTS, True)


def test_two_models_in_one_directory(tmp_path: Path) -> None:
    _, files = model()
    for name in ("a.gguf", "mmproj-a.gguf"):
        gguf.write(tmp_path / "d" / name, keys(), files)
    assert "there are 2 models here" in refused(tmp_path / "d", tmp_path / "hf", "--to", "hf")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"type": 12}, "is Q4_K: of quantized GGUF only Q8_0 is read"),
        ({"type": 99}, "has the unknown type 99"),
        ({"offset": 7}, "does not begin at a multiple of 32"),
        ({"offset": 1 << 30}, "and the file has"),
        ({"offset": 0}, "overlap"),
    ],
)
def test_tensors_that_lie(changed: dict[str, int], said: str, tmp_path: Path) -> None:
    _, files = model()
    gguf.write(tmp_path / "m.gguf", keys(), files, changed={"blk.0.attn_v.weight": changed})
    assert said in refused(tmp_path / "m.gguf", tmp_path / "hf", "--to", "hf")


def test_headers_that_lie(tmp_path: Path) -> None:
    _, files = model()
    whole = gguf.encode(keys(), files)
    path = tmp_path / "m.gguf"
    for content, said in (
        (b"GGUX" + whole[4:], "its first bytes are not GGUF"),
        (whole[:4] + whole[4:8][::-1] + whole[8:], "big-endian"),
        (whole[:8] + (1 << 40).to_bytes(8, "little") + whole[16:], "the header says 1,099,511,627,776 tensors"),
        (whole[:24] + (1 << 50).to_bytes(8, "little") + whole[32:], "a text of 1,125,899,906,842,624 bytes"),
        (gguf.encode(keys(), {"a": Raw("F32", np.empty((0, 1 << 60), np.uint32))}), "which is too large"),
        (whole[:500], "within its header"),
        (whole[:-8], "and the file has"),
        (gguf.encode({**keys(), "llama.block_count": "many"}, files), "`llama.block_count` is many"),
        (gguf.encode({"general.architecture": "llama"}, files), "does not say `llama.block_count`"),
    ):
        path.write_bytes(content)
        assert said in refused(path, tmp_path / "hf", "--to", "hf"), said
