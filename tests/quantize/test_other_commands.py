"""Quantized weights in reshard and merge: scales travel, ``--dequant`` and ``--requant`` change what is stored."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.command import ckpttool, reshard
from tests.helpers.tensorfile import Tensors, assert_same, read_all, save_hf
from tests.quantize.judge import Case, dequantized, floats, quantized, stored
from tests.quantize.models import FIXTURES, LLAMA, cast, config_of, linear, llama, others, refused, sound

DEEPSEEK = FIXTURES / "deepseek_v3"
BLOCK = Case("block", "fp8", "F32")


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("bf16") / "src")


@pytest.fixture(scope="module")
def fp8(bf16: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Blocks of 16 x 16, which two ranks can share."""
    cast(bf16, out := tmp_path_factory.mktemp("fp8") / "src", "--block", "16x16")
    return out


def back_to_one(folder: Path, dst: Path) -> Tensors:
    reshard(folder, dst, "--to", "hf", "--tp-out", 1)
    return read_all(dst)


# -- reshard


@pytest.mark.parametrize("target", [["--tp-out", 2], ["--tp-out", 2, "--to", "ranks"], ["--max-shard-size", "20KB"]])
def test_scales_travel(target: list[object], fp8: Path, tmp_path: Path) -> None:
    reshard(fp8, tmp_path / "cut", *target, "--verify")
    if "--tp-out" in target:
        first = read_all(tmp_path / "cut", "*00000*")
        at = "model.layers.0.mlp.down_proj.weight"
        assert first[at].bits.shape == (64, 48)
        assert first[f"{at}_scale_inv"].bits.shape == (4, 3)
    assert_same(back_to_one(tmp_path / "cut", tmp_path / "one"), read_all(fp8))
    assert config_of(tmp_path / "one")["quantization_config"] == config_of(fp8)["quantization_config"]


@pytest.mark.parametrize("recipe", ["channel", "tensor", "mxfp8", "nvfp4"])
def test_other_recipes_travel_or_are_refused(recipe: str, bf16: Path, tmp_path: Path) -> None:
    """What cannot be cut for two ranks is refused, never quietly wrong."""
    cast(bf16, tmp_path / "fp8", "--recipe", recipe)
    done = ckpttool("reshard", tmp_path / "fp8", tmp_path / "two", "--tp-out", 2, "--verify")
    if done.code:
        assert done.err.count("error: ") == 1
        assert "hint: " in done.err
        assert not (tmp_path / "two").exists()
    else:
        assert_same(back_to_one(tmp_path / "two", tmp_path / "one"), read_all(tmp_path / "fp8"))


def test_a_cut_inside_a_block_is_refused(bf16: Path, tmp_path: Path) -> None:
    cast(bf16, tmp_path / "fp8", "--block", "32x32")
    error = refused("reshard", tmp_path / "fp8", tmp_path / "two", "--tp-out", 2)
    assert "falls inside a scale block of 32" in error
    assert (
        "hint: use --tp-out 1, or reshard with other scales (--requant block:16x16) or none (--dequant bf16)" in error
    )


def test_the_way_out_of_a_cut_inside_a_block(bf16: Path, tmp_path: Path) -> None:
    """--requant with smaller blocks, or --dequant."""
    cast(bf16, tmp_path / "fp8", "--block", "32x32")
    high = dequantized(read_all(tmp_path / "fp8"), (32, 32), dtype="F32")
    names = set(linear())
    expected: Tensors = {}
    for name, raw in high.items():
        expected |= quantized(BLOCK, name, raw, (16, 16)) if name in names else {name: raw}
    reshard(tmp_path / "fp8", tmp_path / "two", "--tp-out", 2, "--requant", "block:16x16", "--verify")
    assert_same(back_to_one(tmp_path / "two", tmp_path / "one"), expected)
    quant = config_of(tmp_path / "one")["quantization_config"]
    assert quant["weight_block_size"] == [16, 16]
    reshard(tmp_path / "fp8", tmp_path / "plain", "--tp-out", 2, "--dequant", "bf16", "--verify")
    assert_same(back_to_one(tmp_path / "plain", tmp_path / "back"), dequantized(read_all(tmp_path / "fp8"), (32, 32)))
    assert "quantization_config" not in config_of(tmp_path / "plain")


@pytest.mark.parametrize("requant", ["block:8x8", "channel"])
def test_the_way_out_where_projections_are_fused(bf16: Path, tmp_path: Path, requant: str) -> None:
    """The blocks that are fused and cut are those that --requant made, not the source's, which end inside a part."""
    cast(bf16, tmp_path / "fp8")
    to = ("--to", "vllm", "--tp-out", 2)
    error = refused("reshard", tmp_path / "fp8", tmp_path / "two", *to)
    assert "hint: write other scales (--requant channel), none (--dequant bf16), or a format that" in error
    reshard(tmp_path / "fp8", tmp_path / "two", *to, "--requant", requant, "--verify")
    recipe, _, block = requant.partition(":")
    sides = ("--block", block) if block else ()
    cast(tmp_path / "fp8", tmp_path / "again", "--recipe", recipe, *sides)
    reshard(tmp_path / "again", tmp_path / "expected", *to)
    found = {p.name: p.read_bytes() for p in (tmp_path / "two").glob("*.safetensors")}
    assert found == {p.name: p.read_bytes() for p in (tmp_path / "expected").glob("*.safetensors")}


@pytest.mark.sample("f16")
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_dequantized_on_the_way(dtype: str, tmp_path: Path) -> None:
    reshard(DEEPSEEK, tmp_path / "dst", "--dequant", dtype, "--verify")
    assert_same(read_all(tmp_path / "dst"), dequantized(read_all(DEEPSEEK), dtype=dtype.upper()))
    sound(tmp_path / "dst")


@pytest.mark.sample("deepseek", "ranks")
@pytest.mark.parametrize("to", ["deepseek", "vllm", "ranks"])
def test_dequantized_for_other_formats(to: str, tmp_path: Path) -> None:
    """The same as dequantizing first."""
    cast(DEEPSEEK, tmp_path / "plain", "--to", "bf16")
    words = ["--to", to, "--tp-out", 2]
    reshard(DEEPSEEK, tmp_path / "dst", *words, "--dequant", "bf16", "--verify")
    reshard(tmp_path / "plain", tmp_path / "expected", *words)
    found = {p.name: p.read_bytes() for p in (tmp_path / "dst").glob("*.safetensors")}
    assert found == {p.name: p.read_bytes() for p in (tmp_path / "expected").glob("*.safetensors")}


def test_quantized_on_the_way(bf16: Path, tmp_path: Path) -> None:
    """--requant is what quantize does."""
    reshard(bf16, tmp_path / "dst", "--requant", "channel", "--verify")
    cast(bf16, tmp_path / "expected", "--recipe", "channel")
    assert_same(read_all(tmp_path / "dst"), read_all(tmp_path / "expected"))
    names = ("quantization_config", "torch_dtype")
    one, other = config_of(tmp_path / "dst"), config_of(tmp_path / "expected")
    assert {n: one[n] for n in names} == {n: other[n] for n in names}


WRONG: list[tuple[list[object], str]] = [
    (["--dequant", "bf16", "--requant", "channel"], "--dequant and --requant exclude each other"),
    (["--requant", "block:"], "--requant `block:` has no block behind its colon"),
    (["--requant", "block:16"], "--requant `16` is not MxN"),
    (["--requant", "channel:16x16"], "--block has no effect"),
    (["--requant", "q8"], "unknown recipe `q8`"),
    (["--dequant", "fp8"], "--dequant fp8"),
]


@pytest.mark.parametrize(
    ("options", "words"), WRONG, ids=lambda x: " ".join(map(str, x)) if isinstance(x, list) else ""
)
def test_options_that_make_no_sense(options: list[object], words: str, fp8: Path, tmp_path: Path) -> None:
    done = ckpttool("reshard", fp8, tmp_path / "dst", *options)
    assert done.code in (1, 2)
    assert words in done.err or "are bf16, f16 or f32" in done.err
    assert not (tmp_path / "dst").exists()


def test_dtype_says_that_it_does_not_dequantize(bf16: Path, fp8: Path, tmp_path: Path) -> None:
    words = ("--to", "hf", "--dtype", "bf16")
    note = "7 quantized weights kept: --dtype does not change them, --dequant bf16 does"
    assert note in ckpttool("reshard", fp8, tmp_path / "kept", *words).err
    assert "quantized" not in ckpttool("reshard", bf16, tmp_path / "cast", *words).err
    assert "--dequant" not in ckpttool("reshard", fp8, tmp_path / "again", *words, "--requant", "channel").err


def test_nothing_to_dequantize(bf16: Path, tmp_path: Path) -> None:
    assert "nothing to dequantize" in refused("reshard", bf16, tmp_path / "dst", "--dequant", "bf16", code=2)


# -- merge


def merged(dst: Path, *arguments: object) -> Tensors:
    done = ckpttool("merge", *arguments, "-o", dst, "--verify")
    assert done.code == 0, done.err
    return read_all(dst)


def test_a_quantized_model_and_one_that_is_not(bf16: Path, fp8: Path, tmp_path: Path) -> None:
    """The average of the values, in the dtype that --dequant says."""
    tuned = {n: stored("BF16", floats(r) + np.float32(0.01)) for n, r in read_all(bf16).items()}
    save_hf(tmp_path / "tuned", tuned, LLAMA)
    values = dequantized(read_all(fp8), (16, 16), dtype="F32")
    for dequant in ("bf16", "f32"):
        rounded = {n: floats(stored("BF16" if r.dtype == "BF16" else "F32", floats(r))) for n, r in values.items()}
        found = merged(tmp_path / dequant, fp8, tmp_path / "tuned", "--dequant", dequant, "--dtype", "f32")
        assert found.keys() == tuned.keys()
        for name, raw in found.items():
            want = (rounded[name] + floats(tuned[name])) / np.float32(2)
            assert np.allclose(floats(raw), want, rtol=1e-6, atol=1e-7), name
        assert "quantization_config" not in config_of(tmp_path / dequant)


def test_dequant_needs_something_quantized(bf16: Path, tmp_path: Path) -> None:
    shutil.copytree(bf16, tmp_path / "other")
    done = ckpttool("merge", bf16, tmp_path / "other", "-o", tmp_path / "dst", "--dequant", "bf16")
    assert done.code == 2
    assert "no weight of the sources is quantized" in done.err


def test_shards_of_one_model(fp8: Path, tmp_path: Path) -> None:
    reshard(fp8, tmp_path / "cut", "--tp-out", 2)
    found = merged(tmp_path / "dst", tmp_path / "cut", "--dequant", "bf16")
    assert_same(found, dequantized(read_all(fp8), (16, 16)))
    assert "quantization_config" not in config_of(tmp_path / "dst")
    assert_same(merged(tmp_path / "codes", tmp_path / "cut"), read_all(fp8))


def test_two_quantized_models(fp8: Path, tmp_path: Path) -> None:
    """They are averaged by their values, never by their codes."""
    values = dequantized(read_all(fp8), (16, 16), dtype="F32")
    shutil.copytree(fp8, tmp_path / "other")
    found = merged(tmp_path / "dst", fp8, tmp_path / "other", "--dequant", "f32", "--dtype", "f32")
    for name, raw in found.items():
        assert np.array_equal(floats(raw), floats(values[name])), name
    assert others().keys() < found.keys()
    assert "quantization_config" not in config_of(tmp_path / "dst")


RECODED: dict[str, list[object]] = {
    "quantize": ["quantize", "{bf16}", "{dst}"],
    "quantize --to": ["quantize", "{fp8}", "{dst}", "--to", "bf16"],
    "reshard --dequant": ["reshard", "{fp8}", "{dst}", "--dequant", "bf16"],
    "reshard --requant": ["reshard", "{fp8}", "{dst}", "--requant", "channel"],
}


@pytest.mark.parametrize("command", RECODED)
def test_what_is_left_out_is_said_as_reshard_says_it(command: str, tmp_path: Path) -> None:
    """Of the head, a layer, and a layer of prediction."""
    copies = {n.replace(".0.", f".{i}."): r for i in (1, 2) for n, r in linear().items()}
    config = {**LLAMA, "num_hidden_layers": 2, "num_nextn_predict_layers": 1, "torch_dtype": "bfloat16"}
    save_hf(tmp_path / "bf16", linear() | copies | others(), config)
    cast(tmp_path / "bf16", tmp_path / "fp8")
    words = [
        str(w).format(bf16=tmp_path / "bf16", fp8=tmp_path / "fp8", dst=tmp_path / "dst") for w in RECODED[command]
    ]
    patterns = ("lm_head.*", "model.layers.1.*", "model.layers.2.*")
    options = [o for p in patterns for o in ("--remove-keys", p)]
    done = ckpttool(*words, *options)
    plain = reshard(tmp_path / "bf16", tmp_path / "plain", *options)
    notes = [line for line in plain.err.splitlines() if line.startswith("note: ") and "written as hf" not in line]
    assert len(notes) == 4, notes
    assert notes[1:] == [line for line in done.err.splitlines() if line.startswith("note: ") and line in notes[1:]]
    assert config_of(tmp_path / "dst")["num_nextn_predict_layers"] == 0
