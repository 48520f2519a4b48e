"""A ZeRO-3 checkpoint of DeepSpeed to Hugging Face, against DeepSpeed's own ``zero_to_fp32.py``."""

from __future__ import annotations

import subprocess
from functools import partial
from pathlib import Path

from bench.measure import OURS, OUT, Job, Program, copy_of
from bench.models import Size
from bench.setting import PYTHON, TOOL, Setting, differing, made
from bench.torch_files import write_zero3

RANKS = 8
ONE_FILE = "1000GB"
ARGS = ("--to", "hf", "--dtype", "f32", "--max-shard-size", ONE_FILE)


def jobs(setting: Setting) -> list[Job]:
    """One: float32 weights, which are the master weights."""
    size = Size.of(setting.gb / 3 / 2)
    source = setting.work / f"zero3-{size.name}"
    programs = [Program(OURS, (TOOL, "reshard", str(source / "save"), OUT, "-q", *ARGS)), copy_of(source / "same")]
    if setting.deepspeed:
        command = ("deepspeed.utils.zero_to_fp32", str(source / "save"), OUT)
        flags = ("--safe_serialization", "--max_shard_size", ONE_FILE)
        programs.append(Program("zero_to_fp32", (PYTHON, "-m", *command, *flags)))
    return [
        Job(
            "ZeRO-3 -> one file",
            (source,),
            tuple(programs),
            partial(_prepare, source, size),
            compare=_compare,
            of_copy=0.35,
            of_copy_cpu=0.5,
            times_as_fast=5,
        )
    ]


def _prepare(folder: Path, size: Size) -> None:
    """The save, and a file of as many bytes as are moved: cp has no use for the moments."""
    with made(folder) as missing:
        if missing:
            write_zero3(folder / "save", size.shape, size.layers, RANKS)
            subprocess.run(
                [TOOL, "reshard", str(folder / "save"), str(folder / "same"), "-q", "--force", *ARGS], check=True
            )


def _compare(ours: Path, theirs: Path, _peer: str) -> str:
    return differing(ours, theirs)
