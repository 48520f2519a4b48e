"""Codes, scales, names and configs of every recipe, against plain numpy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.tensorfile import Raw, Tensors, assert_same, read_all, save_hf
from tests.quantize.judge import CASES, Case, dequantized, quantized, together
from tests.quantize.models import FORMATS, cast, config_of, linear, llama, others, refused, sound

Source = Callable[[str], Path]
BLOCK = (32, 32)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    made: dict[str, Path] = {}

    def find(dtype: str) -> Path:
        if dtype not in made:
            made[dtype] = llama(tmp_path_factory.mktemp(dtype) / "src", dtype)
        return made[dtype]

    return find


def expected(case: Case, dtype: str, block: tuple[int, int]) -> Tensors:
    out, weights = others(dtype), linear(dtype)
    most = together(weights)
    for name, raw in weights.items():
        out |= quantized(case, name, raw, block, most[name])
    return out


def sides(case: Case) -> list[object]:
    return ["--block", "32x32"] if case.recipe == "block" else []


OTHER_DTYPES = [
    (Case("channel", "compressed-tensors", "BF16"), "F32"),
    (Case("channel", "compressed-tensors", "F16"), "F16"),
    (Case("block", "fp8", "F32"), "F16"),
    (Case("nvfp4", "compressed-tensors", ""), "F16"),
    (Case("nvfp4", "compressed-tensors", ""), "F32"),
    (Case("nvfp4", "modelopt", ""), "F32"),
    (Case("mxfp4", "compressed-tensors", ""), "F16"),
]


@pytest.mark.sample(
    "--recipe tensor --quant-method fp8 --scale-dtype F32-BF16",
    "--recipe tensor --quant-method modelopt --scale-dtype F32-BF16",
    "--recipe channel --quant-method fbgemm_fp8 --scale-dtype F32-BF16",
    "--recipe block --quant-method fp8 --scale-dtype F8_E8M0-BF16",
    "--recipe block --quant-method fp8 --scale-dtype F32:pow2-BF16",
    "--recipe mxfp8 --quant-method compressed-tensors-BF16",
    "--recipe nvfp4 --quant-method modelopt-BF16",
    "--recipe channel --quant-method compressed-tensors --scale-dtype F16-F16",
    "--recipe nvfp4 --quant-method compressed-tensors-F32",
    "--recipe mxfp4 --quant-method compressed-tensors-F16",
)
@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((c, "BF16") for c in CASES), *OTHER_DTYPES],
    ids=lambda x: " ".join(map(str, x.options)) if isinstance(x, Case) else x,
)
def test_bytes(case: Case, dtype: str, source: Source, tmp_path: Path) -> None:
    cast(source(dtype), tmp_path / "dst", *case.options, *sides(case))
    written = read_all(tmp_path / "dst")
    assert_same(written, expected(case, dtype, BLOCK))
    cast(tmp_path / "dst", tmp_path / "back", "--to", "bf16")
    kept = others(dtype)
    back = read_all(tmp_path / "back")
    assert_same(back, dequantized(written, BLOCK) | kept)
    config = config_of(tmp_path / "back")
    assert "quantization_config" not in config
    assert config["torch_dtype"] == "bfloat16"
    assert {p.name for p in (tmp_path / "back").iterdir()} == {"config.json", "model.safetensors"}


@pytest.mark.product(one_in=2)
@pytest.mark.parametrize("case", CASES, ids=lambda c: " ".join(map(str, c.options)))
def test_config_says_what_was_made(case: Case, source: Source, tmp_path: Path) -> None:
    keep = "model.layers.0.self_attn.k_proj.weight"
    cast(source("BF16"), tmp_path / "dst", *case.options, *sides(case), "--keep", keep)
    sound(tmp_path / "dst")
    config = config_of(tmp_path / "dst")
    quant = config["quantization_config"]
    assert config["torch_dtype"] == "bfloat16"
    assert quant["quant_method"] == case.method
    field = {"fp8": "modules_to_not_convert", "fbgemm_fp8": "modules_to_not_convert"}.get(case.method, "ignore")
    high = {"lm_head", "model.embed_tokens", "model.layers.0.self_attn.k_proj"}
    assert set(quant[field]) == high
    own = tmp_path / "dst" / "hf_quant_config.json"
    assert own.is_file() == (case.method == "modelopt")
    if case.method == "fp8":
        assert quant["weight_block_size"] == ([32, 32] if case.recipe == "block" else None)
        assert quant["fmt"] == ("e5m2" if case.code == "F8_E5M2" else "e4m3")
        assert quant.get("scale_fmt") == ("ue8m0" if case.powers else None)
        assert quant["activation_scheme"] == "dynamic"
    elif case.method == "compressed-tensors":
        group = quant["config_groups"]["group_0"]["weights"]
        assert group["num_bits"] == (4 if "4" in case.recipe else 8)
        strategy = {"nvfp4": "tensor_group", "mxfp8": "group", "mxfp4": "group"}.get(case.recipe, case.recipe)
        assert group["strategy"] == strategy
        assert group.get("block_structure") == ([32, 32] if case.recipe == "block" else None)
    elif case.method == "modelopt":
        said = json.loads(own.read_text())["quantization"]
        assert said["quant_algo"] == quant["quant_algo"] == {"tensor": "FP8", "nvfp4": "W4A16_NVFP4"}[case.recipe]
        assert set(said["exclude_modules"]) == high


def test_what_is_usual() -> None:
    """Without --quant-method and --scale-dtype."""
    usual = {c.recipe: c for c in reversed(CASES)}
    assert {r: (c.method, c.scale) for r, c in usual.items()} == {
        "tensor": ("compressed-tensors", "BF16"),
        "channel": ("compressed-tensors", "BF16"),
        "block": ("fp8", "F32"),
        "mxfp8": ("compressed-tensors", ""),
        "nvfp4": ("compressed-tensors", ""),
        "mxfp4": ("compressed-tensors", ""),
    }


@pytest.mark.parametrize("recipe", ["", "tensor", "channel", "block", "mxfp8", "nvfp4", "mxfp4"])
def test_the_usual_options_may_be_left_away(recipe: str, source: Source, tmp_path: Path) -> None:
    case = next(c for c in CASES if c.recipe == (recipe or "block"))
    cast(source("BF16"), tmp_path / "dst", *(["--recipe", recipe] if recipe else []))
    assert_same(read_all(tmp_path / "dst"), expected(case, "BF16", (128, 128)))


@pytest.mark.parametrize("name", ["ct_fp8_block", "ct_fp8_dynamic", "ct_mxfp8"])
def test_the_bytes_of_llm_compressor(name: str, tmp_path: Path) -> None:
    """It wrote these files from ``bf16_src``. MXFP8 differs where a magnitude is 1.75 times a power of two."""
    recipe = {"ct_fp8_block": "block", "ct_fp8_dynamic": "channel", "ct_mxfp8": "mxfp8"}[name]
    cast(FORMATS / "bf16_src", tmp_path / "dst", "--recipe", recipe, "--quant-method", "compressed-tensors")
    ours, theirs = read_all(tmp_path / "dst"), read_all(FORMATS / name)
    if recipe == "mxfp8":
        for n, raw in theirs.items():
            if n.endswith("_scale"):
                apart = raw.bits.astype(int) - ours[n].bits
                assert set(np.unique(apart)) <= {0, 1}
                same = np.repeat(apart == 0, 32, 1)
                w = n.removesuffix("_scale")
                assert 0.95 < same.mean() <= 1
                assert np.array_equal(ours[w].bits[same], theirs[w].bits[same])
        return
    assert_same(ours, theirs)


@pytest.mark.parametrize("method", ["compressed-tensors", "modelopt"])
def test_what_engines_hold_as_one_has_one_factor(method: str, source: Source, tmp_path: Path) -> None:
    cast(source("BF16"), tmp_path / "dst", "--recipe", "nvfp4", "--quant-method", method)
    suffix = "weight_scale_2" if method == "modelopt" else "weight_global_scale"
    factors = {n.split(".")[-2]: r.bits.item() for n, r in read_all(tmp_path / "dst").items() if n.endswith(suffix)}
    assert factors["q_proj"] == factors["k_proj"] == factors["v_proj"]
    assert factors["gate_proj"] == factors["up_proj"]


def test_edges(tmp_path: Path) -> None:
    """Partly filled blocks are stored, skipped or refused."""
    shape = (130, 200)
    rng = np.random.default_rng(0)
    odd = Raw("BF16", rng.integers(0x3C00, 0x3E00, shape, np.uint16))
    whole = Raw("BF16", rng.integers(0x3C00, 0x3E00, (128, 256), np.uint16))
    state = {"a.odd_proj.weight": odd, "a.whole_proj.weight": whole}
    save_hf(tmp_path / "src", state, {"architectures": ["X"]})
    case = CASES[7]
    cast(tmp_path / "src", tmp_path / "ceil")
    made = {n: quantized(case, n, raw, (128, 128)) for n, raw in state.items()}
    assert made["a.odd_proj.weight"]["a.odd_proj.weight_scale_inv"].bits.shape == (2, 2)
    assert_same(read_all(tmp_path / "ceil"), made["a.odd_proj.weight"] | made["a.whole_proj.weight"])
    assert "--edge skip" in cast(tmp_path / "src", tmp_path / "skip", "--edge", "skip").err
    assert_same(read_all(tmp_path / "skip"), {"a.odd_proj.weight": odd} | made["a.whole_proj.weight"])
    assert config_of(tmp_path / "skip")["quantization_config"]["modules_to_not_convert"] == ["a.odd_proj"]
    error = refused("quantize", tmp_path / "src", tmp_path / "dst", "--edge", "error")
    assert "`a.odd_proj.weight` [130, 200] is not a multiple of blocks of 128x128" in error
    assert "hint: --edge ceil" in error


def test_many_files(tmp_path: Path) -> None:
    """The same tensors as in one file, an index that adds up."""
    llama(tmp_path / "src")
    cast(tmp_path / "src", tmp_path / "one")
    cast(tmp_path / "src", tmp_path / "many", "--max-shard-size", "20KB", "--verify")
    files = sorted(p.name for p in (tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 2
    tensors = read_all(tmp_path / "many")
    assert_same(tensors, read_all(tmp_path / "one"))
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.bits.nbytes for t in tensors.values())
    assert sorted(set(index["weight_map"].values())) == files
    sound(tmp_path / "many")
