"""What is quantized already, and where weights come from: formats, ranks, shards, packed codes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.helpers.command import ckpttool, reshard
from tests.helpers.tensorfile import Raw, Tensors, assert_same, read_all, save_hf
from tests.quantize.judge import (
    CASES,
    Case,
    dequantized,
    exponents,
    floats,
    grown,
    halves,
    quantized,
    stored,
)
from tests.quantize.models import (
    FIXTURES,
    FORMATS,
    LLAMA,
    cast,
    config_of,
    linear,
    llama,
    others,
    refused,
    sound,
    weight,
)

BLOCK = CASES[7]
"""What is usual."""


# -- files that others wrote


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("ct_fp8_block", "BF16"),
        ("ct_fp8_dynamic", "BF16"),
        ("ct_mxfp8", "BF16"),
        ("per_tensor_static", "BF16"),
        ("deepseek_fp8", "BF16"),
        ("deepseek_fp8", "F32"),
        ("deepseek_fp8", "F16"),
    ],
)
def test_dequantized(name: str, dtype: str, tmp_path: Path) -> None:
    """In ``deepseek_fp8`` every scale lies in another shard than its weight, and rows and columns have edges."""
    cast(FORMATS / name, tmp_path / "dst", "--to", dtype, "--verify")
    source = read_all(FORMATS / name)
    assert any(r.dtype == "F8_E4M3" for r in source.values())
    assert_same(read_all(tmp_path / "dst"), dequantized(source, dtype=dtype))
    there = tmp_path / "dst" / "config.json"
    assert not there.exists() or "quantization_config" not in config_of(there.parent)  # one says nothing else
    assert not (tmp_path / "dst" / "hf_quant_config.json").exists()
    sound(tmp_path / "dst")


def test_scales_of_activations_are_left_out(tmp_path: Path) -> None:
    done = cast(FORMATS / "per_tensor_static", tmp_path / "dst", "--to", "bf16")
    assert "note: 2 scales of activations or caches are left out" in done.err


@pytest.mark.product(one_in=2)
@pytest.mark.parametrize(
    ("name", "case"),
    [("ct_fp8_dynamic", CASES[7]), *(("deepseek_fp8", CASES[i]) for i in (0, 4, 12, 13, 14, 16))],
    ids=lambda x: x if isinstance(x, str) else x.recipe,
)
def test_quantized_anew(name: str, case: Case, tmp_path: Path) -> None:
    """From the float32 values that the codes stand for, not rounded to BF16 in between."""
    source = read_all(FORMATS / name)
    odd = [] if case.recipe in ("tensor", "channel", "block") or "deepseek" not in name else ["--keep", "*odd_proj*"]
    cast(FORMATS / name, tmp_path / "dst", *case.options, *odd)
    high = dequantized(source, dtype="F32")
    before = dequantized(source)
    expected: Tensors = {}
    for n, raw in high.items():
        if n in source and source[n].dtype != "F8_E4M3":
            expected[n] = raw
        elif odd and "odd_proj" in n:
            expected[n] = before[n]
        else:
            expected |= quantized(case, n, raw, (128, 128))
    assert_same(read_all(tmp_path / "dst"), expected)


def test_what_has_the_form_already_is_copied(tmp_path: Path) -> None:
    done = cast(FORMATS / "deepseek_fp8", tmp_path / "dst", "--recipe", "block", "--verify")
    assert "3 weights already in this form" in done.err
    assert_same(read_all(tmp_path / "dst"), read_all(FORMATS / "deepseek_fp8"))
    for method, recipe in (("modelopt", "tensor"), ("modelopt", "nvfp4"), ("compressed-tensors", "mxfp4")):
        words = ["--recipe", recipe, "--quant-method", method, "--keep", "*gate.weight"]
        cast(FORMATS / "bf16_src", tmp_path / recipe, *words)
        assert "2 weights already in this form" in cast(tmp_path / recipe, tmp_path / f"{recipe}2", *words[:4]).err
        assert_same(read_all(tmp_path / f"{recipe}2"), read_all(tmp_path / recipe))
    answer = json.loads(cast(FORMATS / "deepseek_fp8", tmp_path / "again", "--json", "--edge", "ceil").out)
    assert (answer["same"], answer["quantized"], answer["dequantized"]) == (3, 0, 0)


# -- formats of ranks


def whole(tmp_path: Path, source: Path, *options: object) -> Path:
    """The same checkpoint as one in Hugging Face's files."""
    reshard(source, tmp_path / "whole", "--to", "hf", "--tp-out", 1, *options)
    return tmp_path / "whole"


SOURCES = {
    "llama_tp8": ("channel", "block"),
    "vllm_sharded_tp2": ("nvfp4",),
    "paddle_unified/nlp_llama_bf16_tp2_ignore_merge": ("block",),
    "paddle_unified/nlp_llamafused_bf16_tp2": ("channel",),
    "paddle_zcc/ep2_tp2_sharding2_ema": ("nvfp4", "tensor"),
}


@pytest.mark.sample("vllm_sharded_tp2", "paddle_unified/nlp_llama_bf16_tp2_ignore_merge")
@pytest.mark.parametrize("name", SOURCES)
def test_ranks_give_what_the_whole_gives(name: str, tmp_path: Path) -> None:
    """Also where weights lie [in, out], fused, cut, or only as master weights."""
    source = FIXTURES / name
    one_file = whole(tmp_path, source)
    for recipe in SOURCES[name]:
        ranks, wanted = tmp_path / f"ranks {recipe}", tmp_path / f"whole {recipe}"
        narrow = ["--keep", "*.down_proj.*"] if recipe == "nvfp4" and "zcc" in name else []
        cast(source, ranks, "--recipe", recipe, "--verify", *narrow)
        cast(one_file, wanted, "--recipe", recipe, *narrow)
        assert any(r.dtype in ("F8_E4M3", "U8") for r in read_all(wanted).values())
        assert_same(read_all(ranks), read_all(wanted))
        one, other = (config_of(folder)["quantization_config"] for folder in (ranks, wanted))
        for quant in (one, other):  # modules are named in the order of the source
            for field in {"ignore", "modules_to_not_convert"} & quant.keys():
                quant[field] = sorted(quant[field])
        assert one == other, recipe


def test_deepseeks_own_files(tmp_path: Path) -> None:
    """FP8 already, two ranks, ``scale`` instead of ``weight_scale_inv``."""
    cast(FIXTURES / "deepseek_v3_mp2", tmp_path / "mp2", "--to", "bf16", "--family", "deepseek", "--verify")
    cast(FIXTURES / "deepseek_v3", tmp_path / "hf", "--to", "bf16")
    found, wanted = read_all(tmp_path / "mp2"), read_all(tmp_path / "hf")
    assert_same(wanted, dequantized(read_all(FIXTURES / "deepseek_v3")))
    assert found
    for name, raw in found.items():
        if name in wanted:
            assert_same({name: raw}, {name: wanted[name]})


# -- packed codes


def gpt_oss(folder: Path) -> tuple[Path, Tensors]:
    """Experts as [E, in, out], and the weights of attention that stay."""
    config = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "vocab_size": 40,
        "torch_dtype": "bfloat16",
    }
    at = "model.layers.0.mlp."
    tensors = {n: r for n, r in linear().items() if ".mlp." not in n} | others()
    tensors |= {
        f"{at}router.weight": weight(1, (2, 64)),
        f"{at}experts.gate_up_proj": weight(2, (2, 64, 192)),
        f"{at}experts.gate_up_proj_bias": stored("BF16", np.ones((2, 192))),
        f"{at}experts.down_proj": weight(3, (2, 96, 64)),
        f"{at}experts.down_proj_bias": stored("BF16", np.ones((2, 64))),
    }
    return save_hf(folder, tensors, config), tensors


def test_gpt_oss_both_ways(tmp_path: Path) -> None:
    source, tensors = gpt_oss(tmp_path / "src")
    cast(source, tmp_path / "dst", "--recipe", "mxfp4", "--verify")
    sound(tmp_path / "dst")
    found = read_all(tmp_path / "dst")
    case = CASES[-1]
    expected: Tensors = {}
    back: Tensors = {}
    for name, raw in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            expected[name] = back[name] = raw
            continue
        e, k, n = raw.bits.shape
        turned = raw.bits.swapaxes(1, 2)
        each = [quantized(case, "x.weight", Raw("BF16", np.ascontiguousarray(w)), (1, 32)) for w in turned]
        blocks = np.stack([t["x.weight_packed"].bits for t in each]).reshape(e, n, k // 32, 16)
        scales = np.stack([t["x.weight_scale"].bits for t in each])
        expected |= {f"{name}_blocks": Raw("U8", blocks), f"{name}_scales": Raw("U8", scales)}
        values = halves(blocks.reshape(e, n, k // 2)) * grown(exponents(Raw("U8", scales)), (1, 32), (e, n, k))
        back[name] = stored("BF16", values.swapaxes(1, 2))
    assert_same(found, expected)
    quant = config_of(tmp_path / "dst")["quantization_config"]
    assert quant["quant_method"] == "mxfp4"
    assert "model.layers.0.self_attn.q_proj" in quant["modules_to_not_convert"]
    cast(tmp_path / "dst", tmp_path / "back", "--to", "bf16", "--verify")
    assert_same(read_all(tmp_path / "back"), back)
    cast(tmp_path / "back", tmp_path / "again", "--recipe", "mxfp4")
    assert_same(without_minus_zero(read_all(tmp_path / "again")), without_minus_zero(expected))


def without_minus_zero(tensors: Tensors) -> Tensors:
    """F4 codes of -0 are what is left of small numbers; rounded once more, -0 is 0."""
    out = dict(tensors)
    for name, raw in tensors.items():
        if name.endswith("_blocks"):
            low, high = raw.bits & 15, raw.bits >> 4
            out[name] = Raw("U8", np.where(low == 8, 0, low) | np.where(high == 8, 0, high) << 4)
    return out


def test_deepseek_v4_packs_experts_as_signed_bytes(tmp_path: Path) -> None:
    """I8 with two F4 codes and E8M0 for 32 of them, beside FP8 with E8M0 for 128 x 128; all scales are ``.scale``."""
    rng = np.random.default_rng(0)
    tensors = {
        "layers.0.ffn.experts.0.w1.weight": Raw("I8", rng.integers(0, 256, (64, 64), np.uint8)),
        "layers.0.ffn.experts.0.w1.scale": Raw("F8_E8M0", rng.integers(110, 120, (64, 4), np.uint8)),
        "layers.0.attn.wq_a.weight": Raw("F8_E4M3", rng.integers(0, 0x7F, (130, 200), np.uint8)),
        "layers.0.attn.wq_a.scale": Raw("F8_E8M0", rng.integers(110, 120, (2, 2), np.uint8)),
        "layers.0.attn_norm.weight": stored("BF16", np.ones(64)),
    }
    quant = {"quant_method": "fp8", "scale_fmt": "ue8m0", "expert_dtype": "fp4", "weight_block_size": [128, 128]}
    save_hf(tmp_path / "src", tensors, {"architectures": ["X"], "quantization_config": quant})
    cast(tmp_path / "src", tmp_path / "dst", "--to", "bf16", "--verify")
    assert_same(read_all(tmp_path / "dst"), dequantized(tensors))


def test_codes_that_were_only_cast(tmp_path: Path) -> None:
    """Without any scales the codes are the values."""
    rng = np.random.default_rng(0)
    a = rng.integers(0, 0x7F, (64, 64), np.uint8) | rng.integers(0, 2, (64, 64), np.uint8) << 7
    tensors = {"a.weight": Raw("F8_E4M3", a), "b.weight": Raw("F8_E5M2", a & 0xFB), "c.weight": stored("BF16", a[0])}
    save_hf(tmp_path / "src", tensors, {"architectures": ["X"]})
    cast(tmp_path / "src", tmp_path / "dst", "--to", "bf16")
    assert_same(read_all(tmp_path / "dst"), {n: stored("BF16", floats(r)) for n, r in tensors.items()})


def test_bytes_that_hold_fp8(tmp_path: Path) -> None:
    """I8 with E8M0 scales for whole blocks is FP8 in bytes; I8 with float scales and no block is not guessed at."""
    codes = np.random.default_rng(0).integers(0, 0x7F, (128, 128), np.uint8)
    quant = {"quant_method": "fp8", "weight_block_size": [64, 64]}
    tensors = {"a.weight": Raw("I8", codes), "a.weight_scale_inv": stored("F32", np.full((2, 2), 0.5))}
    save_hf(tmp_path / "src", tensors, {"architectures": ["X"], "quantization_config": quant})
    cast(tmp_path / "src", tmp_path / "dst", "--to", "bf16")
    assert_same(
        read_all(tmp_path / "dst"), {"a.weight": stored("BF16", codes.view(ml_dtypes.float8_e4m3fn).astype(float) / 2)}
    )
    tensors = {"a.weight": Raw("I8", codes), "a.weight_scale": stored("F32", np.ones((128, 1)))}
    save_hf(tmp_path / "int", tensors, {"architectures": ["X"]})
    assert "integers" in refused("quantize", tmp_path / "int", tmp_path / "no", "--to", "bf16")


# -- what is not there


def test_a_missing_scale_is_named(tmp_path: Path) -> None:
    tensors = read_all(FORMATS / "deepseek_fp8")
    del tensors["model.layers.0.mlp.up_proj.weight_scale_inv"]
    save_hf(tmp_path / "src", tensors, config_of(FORMATS / "deepseek_fp8"))
    for options in (["--to", "bf16"], ["--recipe", "channel"]):
        error = refused("quantize", tmp_path / "src", tmp_path / "dst", *options)
        assert "`model.layers.0.mlp.up_proj.weight` has no scales" in error


def test_scales_that_fit_no_block(tmp_path: Path) -> None:
    tensors = read_all(FORMATS / "deepseek_fp8")
    tensors["model.layers.0.mlp.up_proj.weight_scale_inv"] = stored("F32", np.ones((7, 9)))
    save_hf(tmp_path / "src", tensors, config_of(FORMATS / "deepseek_fp8"))
    error = refused("quantize", tmp_path / "src", tmp_path / "dst", "--to", "bf16")
    assert "model.layers.0.mlp.up_proj.weight_scale_inv" in error


def test_a_missing_shard(tmp_path: Path) -> None:
    shutil.copytree(FORMATS / "deepseek_fp8", tmp_path / "src")
    (tmp_path / "src" / "model-00002-of-00002.safetensors").unlink()
    refused("quantize", tmp_path / "src", tmp_path / "dst", "--to", "bf16")


@pytest.mark.parametrize(
    ("recipe", "value"),
    [
        ("tensor", np.nan),
        ("channel", -np.inf),
        ("block", np.inf),
        ("block", np.nan),
        ("mxfp8", np.inf),
        ("nvfp4", np.nan),
        ("mxfp4", -np.inf),
    ],
)
def test_what_is_not_finite_is_refused(recipe: str, value: float, tmp_path: Path) -> None:
    tensors = linear() | others()
    name = "model.layers.0.mlp.down_proj.weight"
    bad = floats(tensors[name])
    bad[40, 70] = value
    tensors[name] = stored("BF16", bad)
    save_hf(tmp_path / "src", tensors, LLAMA)
    error = refused("quantize", tmp_path / "src", tmp_path / "dst", "--recipe", recipe)
    assert f"`{name}`" in error
    assert "40, 70" in error


def test_nothing_to_do(tmp_path: Path) -> None:
    source = llama(tmp_path / "src")
    error = refused("quantize", source, tmp_path / "dst", "--to", "bf16", code=2)
    assert "nothing to dequantize" in error
    error = refused("quantize", source, tmp_path / "dst", "--keep", "*", code=2)
    assert "nothing to quantize" in error
    assert "9 by --keep" in error


# -- options


def test_what_stays(tmp_path: Path) -> None:
    source = llama(tmp_path / "src")

    def coded(*options: object) -> set[str]:
        shutil.rmtree(tmp_path / "dst", ignore_errors=True)
        cast(source, tmp_path / "dst", *options)
        return {n for n, r in read_all(tmp_path / "dst").items() if r.dtype == "F8_E4M3"}

    linears = set(linear())
    ends = {"lm_head.weight", "model.embed_tokens.weight"}
    assert coded() == coded("--keep-preset", "deepseek") == linears
    assert coded("--keep-preset", "none") == linears | ends
    assert coded("--include", "lm_head.weight") == linears | {"lm_head.weight"}
    assert coded("--keep", "*.self_attn.*") == {n for n in linears if ".mlp." in n}
    assert coded("--keep", "re:_proj", "--include", "*.q_proj.*") == {n for n in linears if ".q_proj." in n}
    assert coded("--keep-preset", "none", "--keep", "*embed*") == linears | {"lm_head.weight"}
    assert coded("--remove-keys", "*.mlp.*") == {n for n in linears if ".self_attn." in n}


def test_experts_only(tmp_path: Path) -> None:
    cast(FIXTURES / "vllm" / "qwen3_moe", tmp_path / "dst", "--keep-preset", "experts-only", "--verify")
    for name, raw in read_all(tmp_path / "dst").items():
        assert (raw.dtype == "F8_E4M3") == (".experts." in name and name.endswith(".weight")), name
    assert not any("experts" in n for n in config_of(tmp_path / "dst")["quantization_config"]["modules_to_not_convert"])


def test_kept_experts_are_named_as_one_module(tmp_path: Path) -> None:
    """transformers has one module for all experts of a layer."""
    cast(FIXTURES / "vllm" / "qwen3_moe", tmp_path / "dst", "--keep", "*.layers.1.mlp.*")
    kept = config_of(tmp_path / "dst")["quantization_config"]["modules_to_not_convert"]
    assert "model.layers.1.mlp.experts" in kept
    assert "model.layers.0.mlp.experts" not in kept


WRONG: list[tuple[list[object], str]] = [
    (["--to", "fp8"], "--to fp8"),
    (["--to", "bf16", "--recipe", "block"], "--recipe is for quantizing, and --to bf16 dequantizes"),
    (["--to", "bf16", "--keep", "*"], "--keep is for quantizing"),
    (["--to", "bf16", "--scale-dtype", "pow2"], "--scale-dtype is for quantizing"),
    (["--scale-dtype", "f32:pow3"], "f32:pow2 for powers of two"),
    (["--recipe", "int8"], "unknown recipe `int8`"),
    (["--recipe", "channel", "--block", "32x32"], "--block has no effect with recipe channel"),
    (["--block", "32"], "--block `32` is not MxN"),
    (["--block", "0x32"], "--block `0x32` is not MxN"),
    (["--quant-method", "awq"], "--quant-method awq has no block recipe"),
    (["--recipe", "channel", "--quant-method", "fp8"], "--quant-method fp8 has no channel recipe"),
    (["--recipe", "mxfp8", "--scale-dtype", "f32"], "the scales of mxfp8 are F8_E8M0"),
    (["--recipe", "mxfp4", "--edge", "ceil"], "mxfp4 has no partly filled groups"),
    (["--recipe", "tensor", "--quant-method", "modelopt", "--scale-dtype", "bf16"], "has no BF16 scales"),
    (["--code", "e5m2", "--quant-method", "compressed-tensors"], "supports only E4M3 codes"),
    (["--code", "bf16"], "codes of block are F8_E4M3 or F8_E5M2"),
    (["--edge", "round"], "--edge is round"),
    (["--keep", "*.q_prj.*"], "--keep `*.q_prj.*` matches no tensor"),
    (["--include", "lm_hed.weight"], "--include `lm_hed.weight` matches no tensor"),
    (["--keep-preset", "all"], "unknown preset `all`"),
    (["--remove-keys", "nothing"], "matches no tensor"),
]


@pytest.mark.parametrize(
    ("options", "words"), WRONG, ids=lambda x: " ".join(map(str, x)) if isinstance(x, list) else ""
)
def test_options_that_make_no_sense(options: list[object], words: str, tmp_path: Path) -> None:
    assert words in refused("quantize", llama(tmp_path / "src"), tmp_path / "dst", *options, code=2)


def test_typos_get_the_nearest_name(tmp_path: Path) -> None:
    error = refused("quantize", llama(tmp_path / "src"), tmp_path / "dst", "--include", "lm_hed.weight", code=2)
    assert "did you mean `lm_head.weight`?" in error


@pytest.mark.parametrize(("recipe", "group"), [("mxfp8", 32), ("nvfp4", 16), ("mxfp4", 32)])
def test_groups_that_do_not_divide(recipe: str, group: int, tmp_path: Path) -> None:
    tensors = linear() | others() | {"model.layers.0.mlp.down_proj.weight": weight(1, (64, 104))}
    save_hf(tmp_path / "src", tensors, LLAMA | {"intermediate_size": 104})
    error = refused("quantize", tmp_path / "src", tmp_path / "dst", "--recipe", recipe)
    assert f"`model.layers.0.mlp.down_proj.weight` [64, 104] has 104 columns, not a multiple of {group}" in error
    assert "hint: --keep 'model.layers.0.mlp.down_proj.weight'" in error
    cast(tmp_path / "src", tmp_path / "dst", "--recipe", recipe, "--keep", "*.down_proj.*")


def test_experts_in_one_tensor(tmp_path: Path) -> None:
    """Blocks as transformers names them; no other software has a name for their scales."""
    raw = weight(0, (3, 96, 64))
    config: dict[str, Any] = {"architectures": ["X"]}
    save_hf(tmp_path / "src", {"model.layers.0.mlp.experts.gate_up_proj": raw}, config)
    cast(tmp_path / "src", tmp_path / "dst", "--block", "32x32", "--verify")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    each = [quantized(BLOCK, "x.weight", Raw("BF16", w), (32, 32)) for w in raw.bits]
    expected = {
        name: Raw("F8_E4M3", np.stack([t["x.weight"].bits for t in each])),
        f"{name}_scale_inv": Raw("F32", np.stack([t["x.weight_scale_inv"].bits for t in each])),
    }
    assert_same(read_all(tmp_path / "dst"), expected)
    cast(tmp_path / "dst", tmp_path / "back", "--to", "bf16")
    values = floats(expected[name]) * grown(floats(expected[f"{name}_scale_inv"]), (32, 32), raw.bits.shape)
    assert_same(read_all(tmp_path / "back"), {name: stored("BF16", values)})
    for recipe in ("tensor", "channel", "mxfp8"):
        error = refused("quantize", tmp_path / "src", tmp_path / "no", "--recipe", recipe)
        assert f"`{name}` [3, 96, 64] holds all experts" in error


def test_existing_destination(tmp_path: Path) -> None:
    source = llama(tmp_path / "src")
    cast(source, tmp_path / "dst")
    done = ckpttool("quantize", source, tmp_path / "dst")
    assert done.code == 1
    assert "--force" in done.err
    cast(source, tmp_path / "dst", "--recipe", "tensor", "--force")
    assert config_of(tmp_path / "dst")["quantization_config"]["quant_method"] == "compressed-tensors"


def test_blocks_that_only_a_section_of_the_config_names(tmp_path: Path) -> None:
    """96 rows have two scales in blocks of 64, and in blocks of 48 as well."""
    codes = Raw("F8_E4M3", np.full((96, 64), 0x38, np.uint8))
    scales = Raw("F32", np.array([[1.0], [2.0]], np.float32).view(np.uint32))
    quantization = {"quant_method": "fp8", "weight_block_size": [64, 64]}
    config = {"text_config": {"quantization_config": quantization, "model_type": "x"}}
    save_hf(tmp_path / "src", {"a.weight": codes, "a.weight_scale_inv": scales}, config)
    cast(tmp_path / "src", tmp_path / "dst", "--to", "bf16", "--verify")
    found = floats(read_all(tmp_path / "dst")["a.weight"])
    np.testing.assert_array_equal(found[:, 0], [1.0] * 64 + [2.0] * 32)
    assert config_of(tmp_path / "dst")["text_config"] == {"model_type": "x"}
