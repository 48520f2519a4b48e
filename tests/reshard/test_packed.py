"""Packed integers (GPTQ, AWQ, compressed-tensors): what a rank dequantizes is its share of what the whole dequantizes.

The words are unpacked by tests/helpers/packed.py, which knows nothing of layouts; the shares are cut from the floats.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.command import ckpttool, refused, reshard
from tests.helpers.packed import GROUP, KINDS, Kind, packed, unpacked
from tests.helpers.tensorfile import Array, Raw, Tensors, assert_same, read, read_all, save_hf

HIDDEN, HEADS, KV, HEAD_DIM, INTER, VOCAB = 96, 4, 2, 32, 192, 259
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "num_hidden_layers": 1,
    "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": HEAD_DIM, "intermediate_size": INTER,
    "vocab_size": VOCAB, "attention_bias": True, "tie_word_embeddings": False, "torch_dtype": "float16",
}  # fmt: skip
LINEARS = {
    "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN), "self_attn.k_proj": (KV * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (KV * HEAD_DIM, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    "mlp.gate_proj": (INTER, HIDDEN), "mlp.up_proj": (INTER, HIDDEN), "mlp.down_proj": (HIDDEN, INTER),
}  # fmt: skip
ROWS = ("o_proj", "down_proj", "w2")


def floats(rng: np.random.Generator, *shape: int) -> Raw:
    return Raw("F16", rng.normal(size=shape).astype("<f2").view("<u2"))


def model(kind: Kind) -> Tensors:
    return dict(_model(kind))


@cache
def _model(kind: Kind) -> Tensors:
    rng = np.random.default_rng(7)
    out = {"model.embed_tokens.weight": floats(rng, VOCAB, HIDDEN), "lm_head.weight": floats(rng, VOCAB, HIDDEN)}
    out["model.norm.weight"] = floats(rng, HIDDEN)
    at = "model.layers.0."
    for norm in ("input_layernorm", "post_attention_layernorm"):
        out[f"{at}{norm}.weight"] = floats(rng, HIDDEN)
    # Whoever quantizes query, key and value orders the inputs by the same activations.
    same = rng.permutation(np.arange(HIDDEN) // GROUP) if kind.act_order else None
    for name, (n, k) in LINEARS.items():
        groups = same if k == HIDDEN else None
        out |= {f"{at}{name}.{end}": raw for end, raw in packed(kind, n, k, rng, groups).items()}
        if "self_attn" in name:
            out[f"{at}{name}.bias"] = floats(rng, n)
    return out


@pytest.fixture(scope="module", params=KINDS, ids=str)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Kind, Path]:
    kind: Kind = request.param
    folder = tmp_path_factory.mktemp(str(kind))
    return kind, save_hf(folder, model(kind), CONFIG | {"quantization_config": kind.config})


def modules(kind: Kind, tensors: Tensors) -> dict[str, Array]:
    """Every packed module, dequantized."""
    found: dict[str, Tensors] = {}
    end = ".weight_packed" if kind.name == "compressed" else ".qweight"
    for name in tensors:
        if name.endswith(end):
            stem = name.removesuffix(end)
            found[stem] = {n[len(stem) + 1 :]: raw for n, raw in tensors.items() if n.startswith(stem + ".")}
    return {stem: unpacked(kind, parts) for stem, parts in found.items()}


def share(name: str, weight: Array, tp: int, rank: int) -> Array:
    """What a rank computes with."""
    if name.endswith(ROWS):
        return np.split(weight, tp, axis=1)[rank]
    if name.endswith(("k_proj", "v_proj")):
        return np.split(weight, KV, axis=0)[rank * KV // tp] if tp > KV else np.split(weight, tp, axis=0)[rank]
    return np.split(weight, tp, axis=0)[rank]


@pytest.mark.sample(
    "gptq-2-channel-4",
    "awq-4-2",
    "awq-4-channel-2",
    "compressed-4-4",
    "compressed-8-channel-sym-2",
    "compressed-4-act-4",
)
@pytest.mark.parametrize("tp", [2, 4])
def test_a_rank_dequantizes_its_share(saved: tuple[Kind, Path], tp: int, tmp_path: Path) -> None:
    kind, source = saved
    whole = modules(kind, read_all(source))
    reshard(source, tmp_path / "cut", "--to", "ranks", "--tp-out", tp, "--verify")
    for rank, path in enumerate(sorted((tmp_path / "cut").glob("*.safetensors"))):
        found = modules(kind, read(path))
        assert found.keys() == whole.keys()
        for name, weight in whole.items():
            np.testing.assert_array_equal(found[name], share(name, weight, tp, rank), err_msg=f"{name} of {rank}")
    reshard(tmp_path / "cut", tmp_path / "back", "--to", "hf", "--tp-out", 1, "--verify")
    assert_same(read_all(tmp_path / "back"), read_all(source))


@pytest.mark.product(one_in=3)
@pytest.mark.parametrize("tp", [2, 4])
def test_vllm_has_the_parts_in_one(saved: tuple[Kind, Path], tp: int, tmp_path: Path) -> None:
    kind, source = saved
    whole = modules(kind, read_all(source))
    reshard(source, tmp_path / "out", "--to", "vllm", "--tp-out", tp, "--verify")
    for rank in range(tp):
        held: Tensors = {}
        for path in (tmp_path / "out").glob(f"model-rank-{rank}-part-*.safetensors"):
            held |= read(path)
        found = modules(kind, held)
        at = "model.layers.0."
        for fused, parts in (("self_attn.qkv_proj", "qkv"), ("mlp.gate_up_proj", ("gate", "up"))):
            block = at + fused.partition(".")[0]
            names = [f"{block}.{p}_proj" for p in parts]
            wanted = np.concatenate([share(n, whole[n], tp, rank) for n in names])
            np.testing.assert_array_equal(found[at + fused], wanted, err_msg=f"{fused} of {rank}")
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            np.testing.assert_array_equal(found[at + name], share(name, whole[at + name], tp, rank))
    if kind.name == "compressed":
        text = refused(tmp_path / "out", tmp_path / "back", "--to", "hf", "--tp-out", 1)
        assert "weight_shape` is the shape of the fused weight" in text
    else:
        reshard(tmp_path / "out", tmp_path / "back", "--to", "hf", "--tp-out", 1, "--verify")
        assert_same(read_all(tmp_path / "back"), read_all(source))


def bits(dtype: str, values: Array) -> Raw:
    return Raw(dtype, np.ascontiguousarray(values))


def bnb(four: bool) -> tuple[Tensors, dict[str, Any]]:
    """As transformers saves bitsandbytes models; the biases and norms of a Llama beside them."""
    out = {n: raw for n, raw in model(KINDS[0]).items() if n.rpartition(".")[2] in ("weight", "bias")}
    rng = np.random.default_rng(3)
    for name, (n, k) in LINEARS.items():
        at = f"model.layers.0.{name}.weight"
        if four:
            out[at] = bits("U8", rng.integers(0, 256, (n * k // 2, 1)).astype("u1"))
            out[f"{at}.absmax"] = bits("U8", rng.integers(0, 256, n * k // 64).astype("u1"))
            out[f"{at}.quant_map"] = bits("F32", rng.integers(0, 99, 16).astype("<u4"))
            out[f"{at}.nested_absmax"] = bits("F32", rng.integers(0, 99, 1).astype("<u4"))
            out[f"{at}.quant_state.bitsandbytes__nf4"] = bits("U8", rng.integers(0, 256, 90).astype("u1"))
        else:
            out[at] = bits("I8", rng.integers(0, 256, (n, k)).astype("u1"))
            out[f"model.layers.0.{name}.SCB"] = bits("F32", rng.integers(0, 99, n).astype("<u4"))
            out[f"model.layers.0.{name}.weight_format"] = bits("U8", np.array(0, "u1"))
    return out, {"quant_method": "bitsandbytes", "load_in_4bit": four, "load_in_8bit": not four}


def unknown(**changes: object) -> tuple[Tensors, dict[str, Any]]:
    """A GPTQ or AWQ model whose config says something that is not known."""
    kind = KINDS[4] if changes.get("quant_method") == "awq" else KINDS[0]
    return model(kind), {k: v for k, v in (kind.config | changes).items() if v is not None}


REFUSED = {
    "bnb-4bit": (*bnb(four=True), "bitsandbytes 4-bit weights cannot be cut: their bytes are flattened"),
    "bnb-8bit": (*bnb(four=False), "bitsandbytes 8-bit weights cannot be cut"),
    "gptq-3bit": (*unknown(bits=3), "GPTQ weights cannot be cut: with `bits` 3"),
    "gptq-marlin": (*unknown(checkpoint_format="marlin"), "GPTQ weights cannot be cut: `checkpoint_format` marlin"),
    "gptq-group": (*unknown(group_size=None), "GPTQ weights cannot be cut: `group_size` None"),
    "awq-gemv": (*unknown(quant_method="awq", version="gemv"), "AWQ weights cannot be cut: `version` gemv"),
    "unsaid": (*unknown(quant_method=None), "packed integer weights cannot be cut: no quantization_config"),
    "hqq": (*unknown(quant_method="hqq"), "hqq weights cannot be cut"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_refused_by_name(name: str, tmp_path: Path) -> None:
    tensors, quant, message = REFUSED[name]
    source = save_hf(tmp_path / "src", tensors, CONFIG | {"quantization_config": quant})
    assert message in refused(source, tmp_path / "cut", "--to", "ranks", "--tp-out", 2)
    fused = refused(source, tmp_path / "fused", "--to", "vllm", "--tp-out", 1)
    assert message.replace("cut", "fused or taken apart", 1) in fused
    reshard(source, tmp_path / "copy", "--to", "hf", "--verify")
    assert_same(read_all(tmp_path / "copy"), tensors)
    # And when ranks of it lie there already
    for rank in range(2):
        (tmp_path / "ranks").mkdir(exist_ok=True)
        (tmp_path / "ranks" / f"model_{rank}.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    (tmp_path / "ranks" / "config.json").write_bytes((source / "config.json").read_bytes())
    options = ("--rank-pattern", "model_{rank}.safetensors", "--tp", 2, "--tp-out", 1, "--to", "hf")
    assert message in refused(tmp_path / "ranks", tmp_path / "joined", *options)


def saved_as(kind: Kind, folder: Path, **config: object) -> Path:
    return save_hf(folder, model(kind), CONFIG | {"quantization_config": kind.config} | config)


def test_a_cut_inside_a_word_or_a_group_says_what_would_work(tmp_path: Path) -> None:
    # 192 inputs of down_proj by 8 are 24: three words of 8, and one group and a half.
    source = saved_as(Kind("gptq", 4), tmp_path / "src", num_attention_heads=8, head_dim=16)
    text = refused(source, tmp_path / "out", "--to", "ranks", "--tp-out", 8)
    assert "falls inside a packed word or a group of 16" in text
    assert "use --tp-out 1, 2 or 4" in text


def test_a_group_size_that_is_not_the_tensors_is_refused(tmp_path: Path) -> None:
    kind = Kind("gptq", 4)
    source = save_hf(tmp_path / "src", model(kind), CONFIG | {"quantization_config": kind.config | {"group_size": 32}})
    assert "does not fit" in refused(source, tmp_path / "out", "--to", "ranks", "--tp-out", 2)
    found = ckpttool("inspect", source, "--check")
    assert found.code == 3
    assert "scale-shape" in found.out


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_check_finds_nothing(kind: Kind, tmp_path: Path) -> None:
    found = ckpttool("inspect", saved_as(kind, tmp_path / "src"), "--check")
    assert found.code == 0, found.out + found.err
    assert "scale-" not in found.out


def test_query_key_and_value_must_group_their_inputs_alike(tmp_path: Path) -> None:
    kind = Kind("gptq", 4, act_order=True)
    tensors = model(kind)
    name = "model.layers.0.self_attn.k_proj.g_idx"
    tensors[name] = Raw("I32", tensors[name].bits[::-1].copy())
    source = save_hf(tmp_path / "src", tensors, CONFIG | {"quantization_config": kind.config})
    assert "g_idx" in refused(source, tmp_path / "out", "--to", "vllm", "--tp-out", 2)
    reshard(source, tmp_path / "cut", "--to", "ranks", "--tp-out", 2, "--verify")


def test_scales_of_packed_weights_are_not_cast(tmp_path: Path) -> None:
    kind = Kind("awq", 4)
    source = saved_as(kind, tmp_path / "src")
    reshard(source, tmp_path / "out", "--to", "ranks", "--tp-out", 2, "--dtype", "bf16", "--verify")
    held = read(min((tmp_path / "out").glob("*.safetensors")))
    assert held["model.layers.0.self_attn.q_proj.scales"].dtype == "F16"
    assert held["model.layers.0.self_attn.q_proj.bias"].dtype == "BF16"


PACKED = {
    "bnb-4bit": bnb(four=True),
    "bnb-8bit": bnb(four=False),
    **{str(kind): (model(kind), kind.config) for kind in (KINDS[0], KINDS[4], KINDS[6])},
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_integers_are_neither_merged_nor_quantized(name: str, tmp_path: Path) -> None:
    tensors, quant = PACKED[name]
    source = save_hf(tmp_path / "src", tensors, CONFIG | {"quantization_config": quant})
    other = save_hf(tmp_path / "other", tensors, CONFIG | {"quantization_config": quant})
    for command in (
        ("merge", source, other, "-o", tmp_path / "out"),
        ("quantize", source, tmp_path / "out"),
        ("quantize", source, tmp_path / "out", "--to", "bf16"),
        ("reshard", source, tmp_path / "out", "--dequant", "bf16"),
    ):
        done = ckpttool(*command)
        assert done.code == 1, (command, done.err)
        assert "packed integers" in done.err
        assert not (tmp_path / "out").exists()
    size = ckpttool("size", source, "--json")
    assert size.code == 0, size.err
    stored = (source / "model.safetensors").stat().st_size
    assert str(stored) in size.out


@pytest.mark.parametrize("to", ["trtllm", "unified", "deepseek"])
def test_others_have_no_packed_integers(to: str, tmp_path: Path) -> None:
    text = refused(saved_as(KINDS[0], tmp_path / "src"), tmp_path / "out", "--to", to, "--tp-out", 2)
    assert "GPTQ" in text


def moe(kind: Kind) -> tuple[Tensors, dict[str, Any]]:
    rng = np.random.default_rng(11)
    out = {n: raw for n, raw in model(kind).items() if ".mlp." not in n and ".bias" not in n}
    at = "model.layers.0.block_sparse_moe."
    out[f"{at}gate.weight"] = floats(rng, 4, HIDDEN)
    for expert in range(4):
        for name, (n, k) in {"w1": (INTER, HIDDEN), "w2": (HIDDEN, INTER), "w3": (INTER, HIDDEN)}.items():
            out |= {f"{at}experts.{expert}.{name}.{end}": raw for end, raw in packed(kind, n, k, rng).items()}
    config = CONFIG | {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4,
        "num_experts_per_tok": 2, "attention_bias": False, "quantization_config": kind.config,
    }  # fmt: skip
    return out, config


@pytest.mark.product(one_in=2)
@pytest.mark.parametrize("kind", [KINDS[0], KINDS[3], KINDS[4], KINDS[9]], ids=str)
def test_experts_are_cut_alike(kind: Kind, tmp_path: Path) -> None:
    tensors, config = moe(kind)
    source = save_hf(tmp_path / "src", tensors, config)
    whole = modules(kind, tensors)
    options = ("--to", "ranks", "--tp-out", 2, "--ep-out", 2, "--etp-out", 2, "--verify")
    reshard(source, tmp_path / "cut", *options)
    seen = set()
    for path in sorted((tmp_path / "cut").glob("*.safetensors")):
        for name, weight in modules(kind, read(path)).items():
            ways = [i for i in range(2) if np.array_equal(weight, share(name, whole[name], 2, i))]
            assert len(ways) == 1, name
            seen.add((name, ways[0]))
    assert len(seen) == 2 * len(whole)
    reshard(tmp_path / "cut", tmp_path / "back", "--to", "hf", "--tp-out", 1, "--ep-out", 1, "--etp-out", 1)
    assert_same(read_all(tmp_path / "back"), tensors)
    assert "stacked" in refused(source, tmp_path / "vllm", "--to", "vllm", "--tp-out", 2)


def test_files_without_packed_weights_are_left_alone(tmp_path: Path) -> None:
    """Patterns see packed tensors as any others where nothing is cut."""
    source = saved_as(KINDS[0], tmp_path / "src")
    done = ckpttool("drop-keys", source, tmp_path / "out", "*.o_proj.*")
    assert done.code == 0, done.err
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == json.loads(
        (source / "config.json").read_text()
    )
    assert_same(read_all(tmp_path / "out"), {n: r for n, r in model(KINDS[0]).items() if ".o_proj." not in n})


@pytest.mark.product(one_in=3)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_size_counts_what_the_ranks_hold(kind: Kind, tmp_path: Path) -> None:
    source = saved_as(kind, tmp_path / "src")
    done = ckpttool("size", source, "--tp-out", 2, "--vocab-pad", 2, "--json")
    assert done.code == 0, done.err
    report = json.loads(done.out)
    reshard(source, tmp_path / "cut", "--to", "ranks", "--tp-out", 2)
    payload = [
        sum(raw.bits.nbytes for raw in read(p).values()) for p in sorted((tmp_path / "cut").glob("*.safetensors"))
    ]
    (group,) = report["ranks"]["groups"]
    assert [group["bytes"]] * 2 == payload
    assert report["recipe"]["quantized"]
    high = sum(raw.bits.size for name, raw in model(kind).items() if name.endswith((".weight", ".bias")))
    assert report["parameters"] == high + sum(n * k for n, k in LINEARS.values())


def test_size_says_why_flattened_bytes_cannot_be_cut(tmp_path: Path) -> None:
    tensors, quant = bnb(four=True)
    source = save_hf(tmp_path / "src", tensors, CONFIG | {"quantization_config": quant})
    done = ckpttool("size", source, "--tp-out", 2)
    assert done.code == 3
    assert "their bytes are flattened" in done.out
    assert "possible: --tp-out 1\n" in done.out
    assert "142,528 parameters" in done.out
