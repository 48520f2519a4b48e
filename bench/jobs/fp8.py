"""Casts to FP8 and back, against the torch script that people write: whole tensors, and 128 rows at a time."""

from __future__ import annotations

import subprocess
from functools import partial
from math import prod
from pathlib import Path

import numpy as np

from bench.measure import OURS, OUT, Job, Program, copy_of
from bench.setting import PEERS, PYTHON, TOOL, Setting, differing, made
from ckpttool.containers.safetensors import layout_file
from ckpttool.core.dtypes import numpy_dtype

SCRIPT = str(PEERS / "torch_fp8.py")
SHAPE = (8192, 7168)


def jobs(setting: Setting) -> list[Job]:
    """One recipe and the way back; the other recipes when they are asked for."""
    count = max(1, round(setting.gb / 3 * 1e9 / (2 * prod(SHAPE))))
    work = setting.work / f"fp8-{count}"
    some = [
        ("block", "bf16", ("--recipe", "block"), "block"),
        ("block, back to bf16", "fp8", ("--to", "bf16"), "dequantize"),
        ("channel", "bf16", ("--recipe", "channel"), "channel"),
        *[(r, "bf16", ("--recipe", r), "") for r in ("tensor", "mxfp8", "mxfp4", "nvfp4")],
    ]
    out = []
    for name, source, args, script in some:
        path = work / source
        programs = [Program(OURS, (TOOL, "quantize", str(path), OUT, *args, "-q")), copy_of(path)]
        if script and setting.torch:
            command = (PYTHON, SCRIPT, script, str(path), OUT)
            programs += [Program("torch script", command), Program("torch script, 128 rows", (*command, "--panels"))]
        prepare = partial(_prepare, work, source, count)
        usual = name.startswith("block")
        out.append(Job(f"fp8 {name}", (path,), tuple(programs), prepare, _compare, usual=usual))
    return out


def _prepare(work: Path, source: str, count: int) -> None:
    """``bf16``: weights with some large elements. ``fp8``: what blocks make of them."""
    with made(work / "bf16") as missing:
        if missing:
            _write(work / "bf16", count)
    if source == "fp8":
        with made(work / "fp8") as missing:
            if missing:
                subprocess.run([TOOL, "quantize", str(work / "bf16"), str(work / "fp8"), "-q", "--force"], check=True)


def _write(folder: Path, count: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(count)]
    head, offsets, size = layout_file([(n, "BF16", SHAPE) for n in names], {"format": "pt"})
    with (folder / "model.safetensors").open("wb") as f:
        f.write(head)
        f.truncate(size)
        for i, offset in enumerate(offsets.values()):
            rng = np.random.default_rng(i)
            x = rng.standard_normal(SHAPE, dtype=np.float32) * np.float32(0.02)
            x[rng.random(SHAPE, dtype=np.float32) < 1e-4] *= 30
            f.seek(offset)
            f.write(x.astype(numpy_dtype("BF16")).tobytes())


def _compare(ours: Path, theirs: Path, _peer: str) -> str:
    return differing(ours, theirs)
