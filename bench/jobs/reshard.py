"""Another number of tensor-parallel ranks, against the torch script that people write and torch's own checkpoints."""

from __future__ import annotations

import subprocess
from functools import partial
from pathlib import Path

from bench.measure import OURS, OUT, Job, Program, copy_of
from bench.models import Size, write_noise
from bench.setting import PEERS, PYTHON, TOOL, Setting, differing, made

SCRIPT = str(PEERS / "torch_reshard.py")
DCP = (PYTHON, "-m", "bench.peers.torch_dcp")
ONE_FILE = ("--tp-out", "1", "--to", "hf", "--max-shard-size", "1000GB")
SOURCES: dict[str, tuple[str, ...]] = {
    "tp8": ("--tp-out", "8"),
    "tp8_fused": ("--tp-out", "8", "--fuse"),
    "tp8_column": ("--tp-out", "8", "--split", "*=0"),
    "tp8_row": ("--tp-out", "8", "--split", "*.weight=1", "--remove-keys", "*norm*"),
}
"""How each is made of the model."""


def jobs(setting: Setting) -> list[Job]:
    """The usual mixture of cuts in three directions, warm and cold; then fused, column and row cuts by themselves."""
    usual = [
        ("TP8 -> TP2", "tp8", ("--tp-out", "2"), 2),
        ("TP1 -> TP8", "hf", ("--tp-out", "8"), 8),
        ("TP8 -> one file", "tp8", ONE_FILE, 1),
    ]
    single = [
        ("TP8 -> TP2, fused", "tp8_fused", ("--tp-out", "2")),
        ("TP8 -> TP2, all column", "tp8_column", ("--tp-out", "2", "--split", "*=0")),
        ("TP8 -> TP2, all row", "tp8_row", ("--tp-out", "2", "--split", "*.weight=1")),
    ]
    out = [_job(setting, name, source, args, ranks) for name, source, args, ranks in usual]
    out += [_job(setting, name, source, args) for name, source, args in single]
    return out + [_job(setting, f"{name}, cold", source, args, cold=True) for name, source, args, _ in usual]


def _job(
    setting: Setting, name: str, source: str, args: tuple[str, ...], script_ranks: int = 0, *, cold: bool = False
) -> Job:
    size = Size.of(setting.gb)
    work = setting.work / f"reshard-{size.name}"
    path = work / source
    programs = [Program(OURS, (TOOL, "reshard", str(path), OUT, "-q", *args)), copy_of(path)]
    prepare = partial(prepare_sources, work, size, (source,))
    if script_ranks and setting.torch:
        programs.append(Program("torch script", (PYTHON, SCRIPT, str(path), OUT, str(script_ranks))))
        if source == "tp8" and script_ranks == 2:
            programs.append(Program("torch DCP", (*DCP, "reshard", str(work / "dcp8"), OUT, "2")))
            prepare = partial(prepare_sources, work, size, (source, "dcp8"))
    return Job(
        f"reshard {name}",
        (path, work / "dcp8") if any(p.name == "torch DCP" for p in programs) else (path,),
        tuple(programs),
        prepare,
        compare=compare_outputs,
        of_copy=0.7 if cold else 0.35,
        of_copy_cpu=None if cold else 0.5,
        cold=cold,
    )


def prepare_sources(work: Path, size: Size, sources: tuple[str, ...]) -> None:
    """Make the model, and these of it."""
    with made(work / "hf") as missing:
        if missing:
            write_noise(work, "hf", size)
    for name in sources:
        with made(work / name) as missing:
            if not missing:
                continue
            if name == "dcp8":
                command = [*DCP, "save", str(work / "tp8"), str(work / name), "8"]
            else:
                command = [TOOL, "reshard", str(work / "hf"), str(work / name), "-q", "--force", *SOURCES[name]]
            subprocess.run(command, check=True)


def compare_outputs(ours: Path, theirs: Path, peer: str) -> str:
    """How a peer's output differs from ours."""
    if peer != "torch DCP":
        return differing(ours, theirs)
    found = subprocess.run([*DCP, "compare", str(ours), str(theirs)], check=True, capture_output=True, text=True)
    return found.stdout.strip()
