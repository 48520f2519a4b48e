"""Checkpoints of torch.distributed.checkpoint (DCP) as FSDP leaves them, against torch's own tools for them."""

from __future__ import annotations

import subprocess
from functools import partial
from pathlib import Path

from bench.measure import OURS, OUT, Job, Program, copy_of
from bench.models import Size, write_noise
from bench.setting import PYTHON, TOOL, Setting, made
from bench.torch_files import write_run

RANKS = 8
CONVERT = (PYTHON, "-m", "torch.distributed.checkpoint.format_utils")
SCRIPT = (PYTHON, "-m", "bench.peers.torch_dcp")
RUN_FILE, MODEL_FILE = "run.pt", "pytorch_model.bin"


def jobs(setting: Setting) -> list[Job]:
    """The model alone to one file; with the state of AdamW from one file, and to another number of ranks."""
    model, run = Size.of(setting.gb), Size.of(setting.gb / 5)  # 2 bytes of 10 are the model's
    work, trained = setting.work / f"dcp-{model.name}", setting.work / f"dcp-adamw-{run.name}"
    to_file, to_dcp = partial(_prepare_model, work, model), partial(_prepare_run, trained, run)
    dcp, file, ranks = work / "dcp", trained / RUN_FILE, trained / "dcp"
    one_file = ("--to", "torch-bin", "--max-shard-size", "1000GB")
    return [
        _job(
            setting, "DCP -> one file", dcp, to_file, one_file,
            Program("dcp_to_torch_save", (*CONVERT, "dcp_to_torch", str(dcp), OUT)),
        ),
        _job(
            setting, "one file -> DCP, AdamW", file, to_dcp, _written(RANKS),
            Program("torch_save_to_dcp", (*CONVERT, "torch_to_dcp", str(file), OUT)),
        ),
        _job(
            setting, "DCP -> 2 ranks, AdamW", ranks, to_dcp, _written(2),
            Program("torch DCP, FSDP", (*SCRIPT, "rows", str(ranks), OUT, "2")),
        ),
    ]  # fmt: skip


def _written(ranks: int) -> tuple[str, ...]:
    return "--to", "dcp", "--sharding-out", str(ranks)


def _job(
    setting: Setting, name: str, source: Path, prepare: partial[None], args: tuple[str, ...], peer: Program
) -> Job:
    programs = [Program(OURS, (TOOL, "reshard", str(source), OUT, "-q", *args)), copy_of(source)]
    return Job(
        f"reshard {name}",
        (source,),
        (*programs, peer) if setting.torch else tuple(programs),
        prepare,
        compare=_compare,
        of_copy=0.35,
        of_copy_cpu=0.5,
        times_as_fast=5,
    )


def _prepare_model(work: Path, size: Size) -> None:
    """A model of random bits in bf16, its rows over the ranks."""
    with made(work / "dcp") as missing:
        if missing:
            write_noise(work, "hf", size)
            _reshard(work / "hf", work / "dcp", *_written(RANKS))
            (work / "hf" / "model.safetensors").unlink()


def _prepare_run(work: Path, size: Size) -> None:
    """What FSDP2 saves of a run with AdamW: bf16 weights and float32 moments, in one file and over the ranks."""
    with made(work / "dcp") as missing:
        if missing:
            write_run(work / RUN_FILE, size.shape, size.layers)
            _reshard(work / RUN_FILE, work / "dcp", *_written(RANKS))


def _reshard(source: Path, out: Path, *args: str) -> None:
    subprocess.run([TOOL, "reshard", str(source), str(out), "-q", "--force", *args], check=True)


def _compare(ours: Path, theirs: Path, _peer: str) -> str:
    mine = ours / MODEL_FILE if (ours / MODEL_FILE).exists() else ours
    found = subprocess.run([*SCRIPT, "same", str(mine), str(theirs)], check=True, capture_output=True, text=True)
    return found.stdout.strip()
