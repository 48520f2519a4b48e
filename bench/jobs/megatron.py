"""Megatron's torch_dist over eight tensor-parallel ranks to Hugging Face and back, against megatron-core itself."""

from __future__ import annotations

import json
import subprocess
from functools import partial
from pathlib import Path

from bench.measure import OURS, OUT, Job, Program, copy_of
from bench.models import Size, write_noise
from bench.setting import PYTHON, TOOL, Setting, differing, made

SCRIPT = (PYTHON, "-m", "bench.peers.megatron_core")
TO_HF = ("--to", "hf", "--max-shard-size", "1000GB")
TO_MEGATRON = ("--to", "megatron-dist", "--tp-out", "8")


def jobs(setting: Setting) -> list[Job]:
    """The model alone, in both directions."""
    size = Size.of(setting.gb)
    work = setting.work / f"megatron-{size.name}"
    prepare = partial(_prepare, work, size, setting.megatron)
    core = (*SCRIPT, str(work / "core"))
    ways = (
        ("TP8 -> HF", work / "tp8", TO_HF, "to-hf", _compare_files),
        ("HF -> TP8", work / "hf", TO_MEGATRON, "from-hf", partial(_compare, core)),
    )
    out = []
    for name, source, args, command, compare in ways:
        programs = [Program(OURS, (TOOL, "reshard", str(source), OUT, "-q", *args)), copy_of(source)]
        if setting.megatron:
            programs.append(Program("megatron-core", (*core, command, str(source), OUT)))
        out.append(
            Job(
                f"reshard Megatron {name}",
                (source,),
                tuple(programs),
                prepare,
                compare=compare,
                of_copy=0.35,
                of_copy_cpu=0.5,
                times_as_fast=5,
            )
        )
    return out


def _prepare(work: Path, size: Size, core: bool) -> None:  # noqa: FBT001 - bound beside the others
    """A model of random bits in bf16, as one file and over eight ranks, and megatron-core for CPU."""
    with made(work / "tp8") as missing:
        if missing:
            write_noise(work, "hf", size)
            more = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
            config = work / "hf" / "config.json"
            config.write_text(json.dumps(json.loads(config.read_text()) | more))
            subprocess.run(
                [TOOL, "reshard", str(work / "hf"), str(work / "tp8"), "-q", "--force", *TO_MEGATRON], check=True
            )
            if core:
                subprocess.run([*SCRIPT, str(work / "core"), "patch"], check=True)


def _compare_files(ours: Path, theirs: Path, _peer: str) -> str:
    return differing(ours, theirs)


def _compare(core: tuple[str, ...], ours: Path, theirs: Path, _peer: str) -> str:
    found = subprocess.run([*core, "same", str(ours), str(theirs)], check=True, capture_output=True, text=True)
    return found.stdout.strip()
