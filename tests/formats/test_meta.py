"""Meta's and Mistral's own files: every way in which they are cut, by numpy from the definition, there and back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.formats.torch.meta_llama4 import expert_rows
from ckpttool.formats.torch.meta_numbers import hidden_rows
from ckpttool.formats.torch.meta_params import params_of
from tests.helpers.command import ckpttool as command
from tests.helpers.command import refused, reshard
from tests.helpers.tensorfile import Raw, Tensors, origin, read, write

HEADS, KV, HEAD, FFN, VOCAB, LAYERS, EXPERTS = 8, 2, 6, 40, 24, 2, 3
DIM = HEADS * HEAD
PARAMS: dict[str, Any] = {
    "dim": DIM, "n_layers": LAYERS, "n_heads": HEADS, "n_kv_heads": KV, "vocab_size": VOCAB, "multiple_of": 8,
    "ffn_dim_multiplier": 0.3, "norm_eps": 1e-5, "rope_theta": 500000.0,
}  # fmt: skip
MISTRAL: dict[str, Any] = {
    "dim": DIM, "n_layers": LAYERS, "head_dim": 10, "hidden_dim": FFN, "n_heads": HEADS, "n_kv_heads": KV,
    "norm_eps": 1e-5, "vocab_size": VOCAB, "rope_theta": 1000000.0,
}  # fmt: skip
COLUMNS = ("attention.wo.weight", "feed_forward.w2.weight")
ROWS = ("output.weight", "w1.weight", "w3.weight", "wq.weight", "wk.weight", "wv.weight")
NAMES = {
    "model.layers": "layers",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "block_sparse_moe": "feed_forward",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
}


def published(head: int = HEAD, *, experts: int = 0, tied: bool = False) -> Tensors:
    """The model as Hugging Face has it."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, DIM)}
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        for part, heads in (("q", HEADS), ("k", KV), ("v", KV)):
            shapes[f"{at}self_attn.{part}_proj.weight"] = (heads * head, DIM)
        shapes[f"{at}self_attn.o_proj.weight"] = (DIM, HEADS * head)
        if experts:
            shapes[f"{at}block_sparse_moe.gate.weight"] = (experts, DIM)
        for e in range(experts):
            for w, shape in (("w1", (FFN, DIM)), ("w2", (DIM, FFN)), ("w3", (FFN, DIM))):
                shapes[f"{at}block_sparse_moe.experts.{e}.{w}.weight"] = shape
        if not experts:
            shapes |= {f"{at}mlp.{p}_proj.weight": (FFN, DIM) for p in ("gate", "up")}
            shapes[f"{at}mlp.down_proj.weight"] = (DIM, FFN)
        shapes |= {f"{at}{n}_layernorm.weight": (DIM,) for n in ("input", "post_attention")}
    shapes["model.norm.weight"] = (DIM,)
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, DIM)
    return {n: origin(i + 1, "BF16", s) for i, (n, s) in enumerate(shapes.items())}


def meta(tensors: Tensors, head: int = HEAD) -> Tensors:
    """The same as Meta has it: element 2i of a head is turned with 2i + 1, in place of i with i + d/2."""
    out = {}
    for published_name, raw in tensors.items():
        name, bits = published_name, raw.bits
        for part, heads in (("q_proj", HEADS), ("k_proj", KV)):
            if part in name:
                bits = bits.reshape(heads, 2, head // 2, -1).swapaxes(1, 2).reshape(bits.shape)
        for old, new in NAMES.items():
            name = name.replace(f"{old}.", f"{new}.")
        out[name] = Raw(raw.dtype, bits)
    return out


def of_rank(tensors: Tensors, rank: int, world: int, *, columns: bool) -> Tensors:
    """What ColumnParallelLinear, RowParallelLinear and the two kinds of embeddings hold."""

    def held(name: str, a: Any) -> Any:
        if name.endswith(("wk.weight", "wv.weight")) and world > KV:
            return np.split(a, KV)[rank * KV // world]
        if name.endswith(ROWS) or (name == "tok_embeddings.weight" and not columns):
            return np.split(a, world)[rank]
        if name.endswith(COLUMNS) or name == "tok_embeddings.weight":
            return np.split(a, world, 1)[rank]
        return a

    return {n: Raw(t.dtype, np.ascontiguousarray(held(n, t.bits))) for n, t in tensors.items()}


def saved(src: Path, files: Mapping[str, Tensors], params: Mapping[str, Any] | None = PARAMS) -> Path:
    """Files of torch.save, and params.json."""
    for name, tensors in files.items():
        write(src.with_name("flat") / "model.safetensors", tensors)
        reshard(src.with_name("flat"), src.with_name("bin"), "--to", "torch-bin", "--force", "-q")
        src.mkdir(exist_ok=True)
        shutil.copy(src.with_name("bin") / "pytorch_model.bin", src / name)
    if params is not None:
        (src / "params.json").write_text(json.dumps(params))
    return src


def ranks(world: int, *, columns: bool = False, more: Tensors | None = None) -> dict[str, Tensors]:
    whole = meta(published()) | (more or {})
    return {f"consolidated.{r:02d}.pth": of_rank(whole, r, world, columns=columns) for r in range(world)}


def equal(got: Tensors, want: Tensors) -> None:
    assert got.keys() == want.keys()
    for name, raw in want.items():
        assert got[name].dtype == raw.dtype
        np.testing.assert_array_equal(got[name].bits, raw.bits, err_msg=name)


def loaded(path: Path, tmp: Path) -> Tensors:
    """The tensors of one file of torch.save, as they are."""
    reshard(path, tmp, "--from", "torch-bin", "--to", "hf", "--family", "none", "-q")
    return read(tmp / "model.safetensors")


@pytest.mark.parametrize(("world", "columns"), [(1, False), (2, False), (4, False), (2, True)])
def test_metas_ranks_are_put_together(world: int, columns: bool, tmp_path: Path) -> None:
    """One key/value head on two ranks each with 4; embeddings cut by rows (Llama 3) and by columns (Llama 2)."""
    freqs = Raw("F32", np.arange(HEAD // 2, dtype="<u4"))
    src = saved(tmp_path / "src", ranks(world, columns=columns, more={"rope.freqs": freqs}))
    (src / "tokenizer.model").write_bytes(b"words")
    (src / "checklist.chk").write_bytes(b"sums")
    done = reshard(src, tmp_path / "out", "--to", "hf", "--verify")
    equal(read(tmp_path / "out/model.safetensors"), published())
    assert "rope.freqs" in done.err
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors", "tokenizer.model"}
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config == {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": DIM, "intermediate_size": FFN,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": HEAD,
        "vocab_size": VOCAB, "hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "rope_theta": 500000.0, "max_position_embeddings": 8192,
    }  # fmt: skip
    # The mesh stays, and so does the way in which the embedding is cut.
    reshard(src, tmp_path / "again", "--to", "meta")
    for rank, (name, tensors) in enumerate(ranks(world, columns=columns, more={"rope.freqs": freqs}).items()):
        got = loaded(tmp_path / "again" / name, tmp_path / f"rank{rank}")
        equal(got, tensors)


@pytest.mark.parametrize(("world", "target"), [(1, ""), (2, "llama3"), (4, ""), (2, "llama2")])
def test_metas_ranks_are_written(world: int, target: str, tmp_path: Path) -> None:
    write(tmp_path / "hf/model.safetensors", published())
    config = {
        "model_type": "llama", "hidden_size": DIM, "intermediate_size": FFN, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KV, "vocab_size": VOCAB, "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }  # fmt: skip
    (tmp_path / "hf/config.json").write_text(json.dumps(config))
    options = ("--target", target) if target else ()
    reshard(tmp_path / "hf", tmp_path / "out", "--to", "meta", "--tp-out", world, "--verify", *options)
    want = ranks(world, columns=target == "llama2")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"params.json", *want}
    for rank, (name, tensors) in enumerate(want.items()):
        equal(loaded(tmp_path / "out" / name, tmp_path / f"rank{rank}"), tensors)
    params = json.loads((tmp_path / "out/params.json").read_text())
    assert hidden_rows(DIM, params.pop("multiple_of"), params.pop("ffn_dim_multiplier")) == FFN
    assert params == {
        "dim": DIM, "n_layers": LAYERS, "n_heads": HEADS, "n_kv_heads": KV, "vocab_size": VOCAB, "norm_eps": 1e-6,
        "rope_theta": 5e5, "use_scaled_rope": True,
    }  # fmt: skip
    reshard(tmp_path / "out", tmp_path / "back", "--to", "hf")
    equal(read(tmp_path / "back/model.safetensors"), published())
    scaling = json.loads((tmp_path / "back/config.json").read_text())["rope_scaling"]
    assert scaling == {k: v for k, v in config["rope_parameters"].items() if k != "rope_theta"}  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["consolidated.safetensors", "consolidated.00.pth"])
def test_mistrals_files(name: str, tmp_path: Path) -> None:
    """Heads of another size than dim / n_heads, a tied head, and a window."""
    tensors = meta(published(10, tied=True), 10)
    src = saved(tmp_path / "src", {name: tensors} if name.endswith("pth") else {}, None)
    if name.endswith("safetensors"):
        write(src / name, tensors)
    (src / "params.json").write_text(json.dumps({**MISTRAL, "sliding_window": "4096"}))
    reshard(src, tmp_path / "out", "--to", "hf", "--verify")
    equal(read(tmp_path / "out/model.safetensors"), published(10, tied=True))
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["model_type"], config["head_dim"], config["sliding_window"]) == ("mistral", 10, 4096)
    assert config["tie_word_embeddings"] is True
    reshard(tmp_path / "out", tmp_path / "meta", "--to", "meta")
    params = json.loads((tmp_path / "meta/params.json").read_text())
    assert params == {**MISTRAL, "sliding_window": 4096}
    assert "output.weight" in loaded(tmp_path / "meta/consolidated.00.pth", tmp_path / "one")


def test_mixtrals_files(tmp_path: Path) -> None:
    want = published(experts=EXPERTS)
    whole = list(meta(want).items())
    params = {**MISTRAL, "head_dim": HEAD, "moe": {"num_experts": EXPERTS, "num_experts_per_tok": 2}}
    src = tmp_path / "src"
    for i, part in enumerate((whole[:9], whole[9:])):
        write(src / f"consolidated-{i + 1:05d}-of-00002.safetensors", dict(part))
    (src / "params.json").write_text(json.dumps(params))
    (src / "consolidated.safetensors.index.json").write_text("{}")
    reshard(src, tmp_path / "out", "--to", "hf", "--verify")
    equal(read(tmp_path / "out/model.safetensors"), want)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["num_local_experts"], config["num_experts_per_tok"]) == (EXPERTS, 2)
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors"}
    reshard(tmp_path / "out", tmp_path / "meta", "--to", "meta")
    equal(loaded(tmp_path / "meta/consolidated.00.pth", tmp_path / "one"), meta(want))


def test_mistrals_files_beside_published_ones(tmp_path: Path) -> None:
    """As on the hub: the published form is read."""
    write(tmp_path / "src/model.safetensors", published())
    write(tmp_path / "src/consolidated.safetensors", meta(published()))
    (tmp_path / "src/params.json").write_text(json.dumps(MISTRAL))
    done = command("inspect", tmp_path / "src")
    assert done.code == 0, done.err
    assert ": hf, 1 file" in done.out


def test_one_ranks_file_is_no_model(tmp_path: Path) -> None:
    src = saved(tmp_path / "src", ranks(2))
    error = refused(src / "consolidated.01.pth", tmp_path / "out", code=2)
    assert "this is one of the 2 files of a checkpoint" in error
    assert f"give their directory: {src}; or --from torch-bin, which takes the tensors of this file" in error
    reshard(src / "consolidated.01.pth", tmp_path / "out", "--from", "torch-bin", "--to", "hf")
    equal(read(tmp_path / "out/model.safetensors"), ranks(2)["consolidated.01.pth"])


def test_files_that_are_not_all_there(tmp_path: Path) -> None:
    src = saved(tmp_path / "src", ranks(4))
    (src / "consolidated.03.pth").rename(tmp_path / "last")
    (src / "consolidated.02.pth").rename(tmp_path / "third")
    error = refused(src, tmp_path / "out")
    assert (
        "the query projections of these files have 24 rows, and params.json says 48: 4 files would hold them" in error
    )
    (tmp_path / "last").rename(src / "consolidated.03.pth")
    assert "1 of 4 rank files are missing: rank 2" in refused(src, tmp_path / "out")
    (tmp_path / "third").rename(src / "consolidated.02.pth")
    (src / "params.json").unlink()
    assert "there is no params.json beside the weights" in refused(src, tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dim": 40}, "embedding of these files is 24 x 48, and params.json says 24 x 40"),
        ({"vocab_size": 32000}, "embedding of these files is 24 x 48, and params.json says 32000 x 48"),
        ({"n_heads": 4}, "the key projections of these files have 12 rows, and params.json says 24: 2 heads of 12"),
        ({"n_kv_heads": 4}, "the key projections of these files have 12 rows, and params.json says 24: 4 heads of 6"),
        ({"n_heads": 16, "head_dim": 6}, "have 48 rows, and params.json says 96: 4 files would hold them"),
        ({"n_layers": None}, "`n_layers` is not in params.json"),
        ({"n_heads": "8"}, "`n_heads` in params.json is not a positive whole number: 8"),
        ({"rope_theta": [1]}, "`rope_theta` in params.json is not a positive number: [1]"),
        ({"norm_eps": True}, "`norm_eps` in params.json is not a positive number: True"),
        ({"hidden_dim": FFN, "sliding_window": [1]}, "`sliding_window` in params.json is not a positive whole number"),
        ({"max_position_embeddings": "8k"}, "`max_position_embeddings` in params.json is not a positive whole number"),
        ({"moe": {"num_experts": 2}, "hidden_dim": FFN}, "`num_experts_per_tok` is not in params.json"),
        ({"moe_args": {"num_experts": 16}}, "layers none of these files have experts, and by params.json 0, 1 have"),
        ({"use_qk_norm": True, "moe_args": {"top_p": 1}}, "a Llama 4 of a kind that is not known: moe_args.top_p"),
        ({"use_qk_norm": True, "quantization_args": {"scheme": "int4"}}, "kind that is not known: quantization_args"),
        ({"vision_chunk_size": 448}, "a kind that is not known: vision_chunk_size"),
        ({"quantization_args": {"scheme": "int4"}}, "a kind that is not known: quantization_args"),
    ],
)
def test_params_that_contradict_the_files(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    if "dim" in change:
        change = {**change, "head_dim": HEAD}
    src = saved(tmp_path / "src", ranks(2), {**PARAMS, **change})
    assert says in refused(src, tmp_path / "out")


def test_a_vocabulary_that_params_do_not_say(tmp_path: Path) -> None:
    """Llama 2's have -1."""
    src = saved(tmp_path / "src", ranks(2, columns=True), {**PARAMS, "vocab_size": -1})
    reshard(src, tmp_path / "out", "--to", "hf")
    assert json.loads((tmp_path / "out/config.json").read_text())["vocab_size"] == VOCAB


def test_ranks_that_hold_different_copies(tmp_path: Path) -> None:
    """Four ranks, two heads: tiled in place of repeated, ranks 1 and 2 hold each other's head."""
    files = ranks(4)
    for name in [n for n in files["consolidated.01.pth"] if n.endswith(("wk.weight", "wv.weight"))]:
        one, two = files["consolidated.01.pth"], files["consolidated.02.pth"]
        one[name], two[name] = two[name], one[name]
    error = refused(saved(tmp_path / "src", files), tmp_path / "out", "--to", "hf")
    assert "consolidated.00.pth" in error
    assert "consolidated.01.pth" in error


LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2,
    "num_attention_heads": 8, "vocab_size": 24,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"head_dim": 16}, "a head has 64 / 8 elements, and here it has 16"),
        ({"attention_bias": True}, "Meta's software has no biases"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 8.0}}, "in the way of Llama 3.1 only"),
        ({"model_type": "mistral", "rope_scaling": {"type": "linear"}}, "mistral-inference does not scale"),
        ({"intermediate_size": None}, "config.json does not say intermediate_size"),
    ],
)
def test_models_that_metas_software_cannot_be(change: dict[str, Any], says: str) -> None:
    with pytest.raises(Exception, match=says):
        params_of({**LLAMA, **change})


@pytest.mark.parametrize("rows", [1, 7, 176, 1000, 8191, 14336, 28672])
@pytest.mark.parametrize("dim", [33, 64, 4096])
def test_the_rows_of_an_mlp_are_those_that_metas_software_works_out(dim: int, rows: int) -> None:
    params = params_of({**LLAMA, "hidden_size": dim, "head_dim": dim / 8, "intermediate_size": rows})
    assert hidden_rows(dim, params["multiple_of"], params.get("ffn_dim_multiplier")) == rows


def test_only_tensor_parallel_ranks_are_written(tmp_path: Path) -> None:
    src = saved(tmp_path / "src", ranks(1))
    assert "--pp-out 2 cannot be used with --to meta" in refused(src, tmp_path / "out", "--pp-out", 2, code=2)
    assert "cannot be cut for tp 5" in refused(src, tmp_path / "out", "--tp-out", 5)


LLAMA4: dict[str, Any] = {
    "model_type": "llama4_text", "hidden_size": DIM, "intermediate_size": 16, "intermediate_size_mlp": FFN,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": HEAD,
    "vocab_size": VOCAB, "num_local_experts": EXPERTS, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2,
    "no_rope_layers": [1, 1], "use_qk_norm": True, "rope_theta": 5e5, "tie_word_embeddings": False,
}  # fmt: skip


def llama4() -> Tensors:
    """As Hugging Face has it: one layer without experts, and one with them."""
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (VOCAB, DIM))
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        shapes |= {f"{at}self_attn.{p}_proj.weight": (n * HEAD, DIM) for p, n in (("q", HEADS), ("k", KV), ("v", KV))}
        shapes[f"{at}self_attn.o_proj.weight"] = (DIM, DIM)
        mlp, wide = (f"{at}feed_forward.shared_expert.", 16) if i else (f"{at}feed_forward.", FFN)
        shapes |= {f"{mlp}gate_proj.weight": (wide, DIM), f"{mlp}up_proj.weight": (wide, DIM)}
        shapes[f"{mlp}down_proj.weight"] = (DIM, wide)
        shapes |= {f"{at}{n}_layernorm.weight": (DIM,) for n in ("input", "post_attention")}
    shapes |= {
        "model.layers.1.feed_forward.experts.gate_up_proj": (EXPERTS, DIM, 32),
        "model.layers.1.feed_forward.experts.down_proj": (EXPERTS, 16, DIM),
        "model.layers.1.feed_forward.router.weight": (EXPERTS, DIM),
        "model.norm.weight": (DIM,),
    }
    return {n: origin(i + 1, "BF16", s) for i, (n, s) in enumerate(shapes.items())}


@pytest.mark.parametrize("world", [1, 2])
def test_the_experts_of_llama_4(world: int, tmp_path: Path) -> None:
    """A rank has its share of the first expert, then of the second one; gate and up are two tensors."""
    want = llama4()
    write(tmp_path / "hf/model.safetensors", want)
    (tmp_path / "hf/config.json").write_text(json.dumps(LLAMA4))
    reshard(tmp_path / "hf", tmp_path / "meta", "--to", "meta", "--tp-out", world, "--verify")
    experts = "model.layers.1.feed_forward.experts."
    gate, up = np.split(want[f"{experts}gate_up_proj"].bits, 2, 2)
    down = want[f"{experts}down_proj"].bits
    q, k, v = (want[f"model.layers.0.self_attn.{p}_proj.weight"].bits for p in "qkv")
    for rank in range(world):
        got = loaded(tmp_path / f"meta/consolidated.{rank:02d}.pth", tmp_path / f"rank{rank}")

        def mine(whole: Any, axis: int, rank: int = rank) -> Any:
            return np.split(whole, world, axis)[rank]

        at = "layers.1.feed_forward."
        for name, whole, axis in (("in_eD_F", gate, 2), ("swiglu_eD_F", up, 2), ("out_eF_D", down, 1)):
            held = mine(whole, axis)
            np.testing.assert_array_equal(got[f"{at}experts.moe_w_{name}"].bits, held.reshape(-1, held.shape[2]))
        router = want["model.layers.1.feed_forward.router.weight"].bits.T
        np.testing.assert_array_equal(got[f"{at}router_DE"].bits, router)
        fused = np.concatenate([mine(part, 0) for part in (q, k, v)])
        np.testing.assert_array_equal(got["layers.0.attention.wqkv.weight"].bits, fused)
    reshard(tmp_path / "meta", tmp_path / "back", "--to", "hf")
    equal(read(tmp_path / "back/model.safetensors"), want)
    config = json.loads((tmp_path / "back/config.json").read_text())
    same = ("hidden_size", "intermediate_size", "intermediate_size_mlp", "num_local_experts", "no_rope_layers")
    assert {k: config[k] for k in same} == {k: LLAMA4[k] for k in same}
    assert config["moe_layers"] == [1]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"no_rope_layers": [0, 1]}, "every n-th layer has no positions"),
        ({"moe_layers": [0], "num_hidden_layers": 4, "no_rope_layers": [1] * 4}, "every n-th layer has experts"),
        ({"tie_word_embeddings": True}, "does not tie the head"),
        ({"attention_bias": True}, "has no biases"),
        ({"head_dim": 16}, "a head has 48 / 8 elements"),
        ({"model_type": "llama4"}, "does not say hidden_size, intermediate_size"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "in the way of Llama 3.1 only"),
    ],
)
def test_models_that_metas_llama_4_cannot_be(change: dict[str, Any], says: str) -> None:
    with pytest.raises(Exception, match=says):
        params_of({**LLAMA4, **change})


@pytest.mark.parametrize(("dense", "routed"), [(16384, 8192), (16384, 16384), (40, 16), (1000, 24), (96, 40)])
def test_the_rows_of_llama_4s_experts_are_those_that_metas_software_works_out(dense: int, routed: int) -> None:
    params = params_of({**LLAMA4, "intermediate_size_mlp": dense, "intermediate_size": routed})
    assert hidden_rows(DIM, params["multiple_of"], params["ffn_dim_multiplier"]) == dense
    assert expert_rows(DIM, params, params) == routed
