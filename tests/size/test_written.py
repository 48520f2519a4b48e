"""What size foretells is what quantize writes, to the byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.command import ckpttool

FIXTURES = Path(__file__).parents[2] / "fixtures"
SOURCES = [
    "deepseek_v3",
    "deepseek_v3_mp2",
    "hf_tiny_source",
    *sorted(str(p.relative_to(FIXTURES)) for p in (FIXTURES / "fp8" / "formats").iterdir()),
]
RECIPES = ("channel", "tensor", "block --block 64x64", "mxfp8")
OPTIONS = ("", "--keep-preset none", "--keep-preset none --max-shard-size 30KB", "--include *embed_tokens*")


@pytest.mark.sample(
    "deepseek_v3_mp2-block --block 64x64",
    "fp8/formats/bf16_src-channel",
    "fp8/formats/ct_mxfp8-tensor",
    "fp8/formats/deepseek_fp8-mxfp8",
    "fp8/formats/per_tensor_static-block --block 64x64",
)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("source", SOURCES)
def test_sizes(tmp_path: Path, source: str, recipe: str) -> None:
    # Every source and every recipe meets all options, though not every pair of them does.
    turn = (SOURCES.index(source) + RECIPES.index(recipe)) % 2
    for number, options in enumerate(OPTIONS[turn::2]):
        out = tmp_path / str(number)
        asked = ["--recipe", *recipe.split(), *options.split()]
        done = ckpttool("quantize", FIXTURES / source, out, *asked)
        said = ckpttool("size", FIXTURES / source, *asked, "--json")
        assert said.code == done.code, (said.err, done.err)
        if done.code:
            assert said.err == done.err
            continue
        disk = json.loads(said.out)["disk"]
        files = [f.stat().st_size for f in out.glob("*.safetensors")]
        index = out / "model.safetensors.index.json"
        assert not disk["real"]
        assert (disk["files"], disk["bytes"]) == (len(files), sum(files))
        assert disk["index"] == (index.stat().st_size if len(files) > 1 else 0)
        if len(files) > 1:
            assert disk["payload"] == json.loads(index.read_text())["metadata"]["total_size"]


def test_what_a_quantized_source_has_in_high_precision_stays_so() -> None:
    asked = ("--recipe", "channel", "--keep-preset", "none")
    data = json.loads(ckpttool("size", FIXTURES / "deepseek_v3", *asked, "--json").out)
    assert data["bytes"] == data["disk"]["payload"]
    assert data["disk"]["bytes"] == 817_488
    assert data["recipe"]["kept"]["source"] > 0


@pytest.mark.parametrize("options", ["--keep *", "--keep-preset experts-only", "--edge skip --block 4096x4096"])
def test_nothing_to_quantize(tmp_path: Path, options: str) -> None:
    source = FIXTURES / "hf_tiny_source"
    done = ckpttool("quantize", source, tmp_path / "out", *options.split())
    said = ckpttool("size", source, *options.split())
    assert (done.code, said.code, said.out) == (2, 2, "")
    what = "error: nothing to quantize: every tensor stays as it is\n"
    assert done.err.startswith(what)
    assert said.err.startswith(what)
