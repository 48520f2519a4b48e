"""What every writer promises: the same bytes whatever happens, bounded memory, a report, a proof."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.errors import OutputError
from ckpttool.execute import quantize, strided
from tests.helpers.command import ckpttool
from tests.helpers.tensorfile import Raw, Tensors, assert_same, read_all, save_hf
from tests.quantize.judge import CASES, Case, quantized
from tests.quantize.models import FORMATS, ROOT, cast, linear, llama, refused

RECIPES = ("tensor", "channel", "block", "mxfp8", "nvfp4", "mxfp4")


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


# -- the same bytes


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights larger than a buffer of 4 MiB allows at once, of long and of many rows."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0x3C00, 0x3E00, 2_560_000, np.uint16) | rng.integers(0, 2, 2_560_000, np.uint16) << 15
    tensors = {
        "a.wide_proj.weight": Raw("BF16", bits.reshape(160, 16000)),
        "a.tall_proj.weight": Raw("BF16", bits.reshape(16000, 160)),
    }
    return save_hf(tmp_path_factory.mktemp("wide") / "src", tensors, {"architectures": ["X"]})


@pytest.mark.sample("tensor", "nvfp4")
@pytest.mark.parametrize("recipe", ["tensor", "block", "nvfp4"])
def test_memory_and_workers_change_nothing(recipe: str, wide: Path, tmp_path: Path) -> None:
    cast(wide, tmp_path / "a", "--recipe", recipe, "--workers", 1, "--memory", "256MiB")
    cast(wide, tmp_path / "b", "--recipe", recipe, "--workers", 3, "--memory", "4MiB")
    assert files(tmp_path / "a") == files(tmp_path / "b")
    if recipe == "tensor":
        return
    cast(tmp_path / "a", tmp_path / "c", "--to", "bf16", "--workers", 1, "--memory", "256MiB")
    cast(tmp_path / "b", tmp_path / "d", "--to", "bf16", "--workers", 2, "--memory", "4MiB")
    assert files(tmp_path / "c") == files(tmp_path / "d")


def test_large_weights_are_rounded_as_small_ones_are(wide: Path, tmp_path: Path) -> None:
    cast(wide, tmp_path / "dst", "--memory", "4MiB")
    expected: Tensors = {}
    for name, raw in read_all(wide).items():
        expected |= quantized(Case("block", "fp8", "F32"), name, raw, (128, 128))
    assert_same(read_all(tmp_path / "dst"), expected)


# A sparse tensor of 72 MB is the source; what the interpreter and numpy take is measured before.
SCRIPT = """
import resource, sys
from ckpttool.checkpoint import OpenOptions
from ckpttool.execute import NoProgress, RunOptions
from ckpttool.ops import quantize, reshard
from ckpttool.targeting.recode import Recoding
from ckpttool.quant.scheme import scheme
src, dst, recipe = sys.argv[1:]
prepared = quantize.prepare(src, OpenOptions(), Recoding(scheme(recipe)), reshard.Selection())
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
result = reshard.execute(prepared, dst, RunOptions(memory=16 << 20, workers=2), NoProgress())
kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
print(before, max(resource.getrusage(k).ru_maxrss for k in kinds))
"""


@pytest.mark.thorough  # execute/test_memory
def test_one_huge_tensor(tmp_path: Path) -> None:
    """NVFP4 goes through it twice."""
    shape = [6000, 6000]
    header = json.dumps({"a.b_proj.weight": {"dtype": "BF16", "shape": shape, "data_offsets": [0, 72_000_000]}})
    (tmp_path / "src").mkdir()
    with (tmp_path / "src" / "model.safetensors").open("wb") as f:
        f.write(len(header).to_bytes(8, "little") + header.encode())
        f.truncate(8 + len(header) + 72_000_000)
        f.seek(8 + len(header) + 1234)
        f.write(b"\x80\x3f")  # 1.0
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "src"), str(tmp_path / "dst"), "nvfp4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    before, most = map(int, done.stdout.split())
    assert most - before <= (16 + 24) << 10  # KiB


# -- interruptions


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough that a cast takes a while: 16 weights of 1 MB."""
    rng = np.random.default_rng(1)
    bits = rng.integers(0x3C00, 0x3E00, (16, 512, 1024), np.uint16)
    tensors = {f"model.layers.{i}.a_proj.weight": Raw("BF16", b) for i, b in enumerate(bits)}
    return save_hf(tmp_path_factory.mktemp("many") / "src", tensors, {"architectures": ["X"]})


def killed(wait: float, *arguments: object) -> int:
    """Run until the output begins to be written, then a little longer, then ``kill -9``."""
    command = [sys.executable, "-m", "ckpttool", *map(str, arguments)]
    dst = Path(command[5])
    partial = dst.with_name(dst.name + ".partial")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as tool:
        while tool.poll() is None and not any(partial.glob("*.safetensors*")):
            time.sleep(0.005)
        time.sleep(wait)
        tool.send_signal(signal.SIGKILL)
    return tool.returncode


@pytest.mark.thorough  # killing: torture kills every command; going on inside a tensor: execute/test_quantize
@pytest.mark.parametrize(("recipe", "wait"), [("block", 0.02), ("nvfp4", 0.1)])
def test_killed_and_resumed(recipe: str, wait: float, many: Path, tmp_path: Path) -> None:
    words = (many, tmp_path / "dst", "--recipe", recipe, "--workers", 2, "--max-shard-size", "2MB", "--manifest")
    code = killed(wait, "quantize", *words)
    if not (tmp_path / "dst").exists():  # else it was killed between the rename and its end
        assert code == -signal.SIGKILL
        cast(*words[:2], *words[2:], "--resume")
    cast(many, tmp_path / "clean", *words[2:])
    assert files(tmp_path / "dst") == files(tmp_path / "clean")


def test_only_the_same_cast_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = llama(tmp_path / "src")
    real, calls = strided.scatter, itertools.count()

    def scatter(*arguments: Any) -> None:
        if next(calls) == 3:
            raise OutputError("the disk is gone")
        real(*arguments)

    monkeypatch.setattr(quantize, "scatter", scatter)
    assert ckpttool("quantize", source, tmp_path / "dst", "--recipe", "block").code == 1
    monkeypatch.setattr(quantize, "scatter", real)
    partial = files(tmp_path / "dst.partial")
    done = ckpttool("quantize", source, tmp_path / "dst", "--recipe", "channel", "--resume")
    assert done.code == 1
    assert "error: the interrupted run had a different plan" in done.err
    assert not (tmp_path / "dst").exists()
    assert files(tmp_path / "dst.partial") == partial
    cast(source, tmp_path / "dst", "--recipe", "block", "--resume")


# -- reports and proofs


def test_dry_run(tmp_path: Path) -> None:
    source = llama(tmp_path / "src")
    done = cast(source, tmp_path / "dst", "--recipe", "nvfp4", "--dry-run", "--json")
    plan: dict[str, Any] = json.loads(done.out)
    assert not (tmp_path / "dst").exists()
    assert plan["schema"] == "ckpttool.quantize-plan/1"
    assert (plan["quantized"], plan["dequantized"], plan["same"]) == (7, 0, 0)
    assert plan["kept"] == {"vector": 3, "preset": 2}
    result = json.loads(cast(source, tmp_path / "dst", "--recipe", "nvfp4", "--json").out)
    assert result["schema"] == "ckpttool.quantize/1"
    assert result["files"] == plan["files"]
    assert {f["name"]: f["bytes"] for f in plan["files"]} == {n: len(b) for n, b in files(tmp_path / "dst").items()}
    assert plan["tensor_bytes"] == sum(r.bits.nbytes for r in read_all(tmp_path / "dst").values())
    assert plan["source_bytes"] == (source / "model.safetensors").stat().st_size
    text = cast(source, tmp_path / "x", "--recipe", "nvfp4", "--dry-run")
    assert "7 weights quantized (nvfp4, F8_E4M3 scales); files: " in text.err


@pytest.mark.product(one_in=2)
@pytest.mark.parametrize("recipe", [*RECIPES, ""])
def test_verify_works_everything_out_again(recipe: str, tmp_path: Path) -> None:
    source = llama(tmp_path / "src") if recipe else FORMATS / "deepseek_fp8"
    how = ["--recipe", recipe] if recipe else ["--to", "bf16"]
    done = cast(source, tmp_path / "dst", *how, "--verify")
    assert "verified: every tensor was recomputed and matches" in done.out


def test_a_manifest_proves_every_tensor(tmp_path: Path) -> None:
    source = llama(tmp_path / "src")
    cast(source, tmp_path / "dst", "--manifest")
    done = ckpttool("inspect", tmp_path / "dst", "--check", "--json")
    assert done.code == 0, done.out
    path = tmp_path / "dst" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1000] ^= 1
    path.write_bytes(data)
    assert ckpttool("inspect", tmp_path / "dst", "--check").code == 3


def test_quiet_says_nothing(tmp_path: Path) -> None:
    done = cast(llama(tmp_path / "src"), tmp_path / "dst", "--quiet")
    assert (done.out, done.err) == ("", "")


def test_nothing_is_left_of_what_fails_late(tmp_path: Path) -> None:
    """The infinity is in the last weight."""
    tensors = dict(linear())
    bad = tensors["model.layers.0.mlp.down_proj.weight"].bits.copy()
    bad[-1, -1] = 0x7F80
    tensors["model.layers.0.mlp.down_proj.weight"] = Raw("BF16", bad)
    save_hf(tmp_path / "src", tensors, {"architectures": ["X"]})
    error = refused("quantize", tmp_path / "src", tmp_path / "dst", "--recipe", "nvfp4", "--max-shard-size", "10KB")
    assert "`model.layers.0.mlp.down_proj.weight`" in error
    assert "63, 95" in error


def test_codes_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    tensors = read_all(FORMATS / "deepseek_fp8")
    name = "model.layers.0.mlp.up_proj.weight"
    bits = tensors[name].bits.copy()
    bits[3, 5] = 0x7F
    tensors[name] = Raw("F8_E4M3", bits)
    save_hf(tmp_path / "src", tensors, json.loads((FORMATS / "deepseek_fp8" / "config.json").read_text()))
    for options in (["--to", "bf16"], ["--recipe", "channel"]):
        assert f"`{name}`" in refused("quantize", tmp_path / "src", tmp_path / "dst", *options)


# -- size


@pytest.mark.product(one_in=2)
@pytest.mark.parametrize(
    "case", [c for c in CASES if not c.powers and c.code == "F8_E4M3"], ids=lambda c: " ".join(map(str, c.options))
)
def test_size_foretells_every_byte(case: Case, tmp_path: Path) -> None:
    """In one file, and with several and an index."""
    source = llama(tmp_path / "src")
    limit = ["--max-shard-size", "20KB"] if case.recipe == "block" else []
    block = ["--block", "32x32"] if case.recipe == "block" else []
    told = ckpttool("size", source, *case.options, *block, *limit, "--json")
    assert told.code == 0, told.err
    answer: dict[str, Any] = json.loads(told.out)
    cast(source, tmp_path / "dst", *case.options, *block, *limit)
    tensors = read_all(tmp_path / "dst")
    assert answer["bytes"] == sum(r.bits.nbytes for r in tensors.values())
    assert answer["tensors_stored"] == len(tensors)
    by_dtype = {
        d: sum(r.bits.nbytes for r in tensors.values() if r.dtype == d) for d in {r.dtype for r in tensors.values()}
    }
    assert {d: v["bytes"] for d, v in answer["dtypes"].items()} == by_dtype
    sizes = [p.stat().st_size for p in (tmp_path / "dst").glob("*.safetensors")]
    assert (answer["disk"]["files"], answer["disk"]["bytes"]) == (len(sizes), sum(sizes))
    index = tmp_path / "dst" / "model.safetensors.index.json"
    assert answer["disk"]["index"] == (index.stat().st_size if index.exists() else 0)
