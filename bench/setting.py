"""What the jobs are made from: where they work, how much they move, and which peers there are."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ckpttool.containers.safetensors import read_header

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / "bench" / "peers"
PYTHON = sys.executable
TOOL = str(Path(sys.executable).with_name("ckpttool"))


@dataclass(frozen=True, slots=True)
class Setting:
    """One run of the benchmark."""

    work: Path
    gb: float
    """Of the checkpoint that is resharded; of a model that is merged, and of every other source, a third."""
    torch: bool = False
    deepspeed: bool = False
    megatron: bool = False
    """Whether the packages of these names are installed beside ckpttool."""
    mergekit: str = ""
    """Path of mergekit-yaml, "" where there is none."""
    paddle: str = ""
    """Path of an interpreter that has paddlepaddle, "" where there is none."""


@contextmanager
def made(path: Path) -> Iterator[bool]:
    """Whether ``path`` is still to be made; it counts as made when the block has ended well."""
    mark = path.with_name(path.name + ".complete")
    if mark.exists():
        yield False
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    yield True
    mark.touch()


def differing(ours: Path, theirs: Path) -> str:
    """How the tensors of two directories of safetensors differ, file by file where there are as many: "" when equal."""
    a, b = (_located(p) for p in (ours, theirs))
    if a.keys() != b.keys():
        return "other tensors"
    wrong = total = 0
    for key in a:
        (path, at, nbytes), (other, start, length) = a[key], b[key]
        if nbytes != length:
            return f"{key} has another size"
        with path.open("rb") as f, other.open("rb") as g:
            f.seek(at)
            g.seek(start)
            for n in range(0, nbytes, 8 << 20):
                size = min(8 << 20, nbytes - n)
                x, y = f.read(size), g.read(size)
                total += size
                if x != y:
                    wrong += int(np.count_nonzero(np.frombuffer(x, np.uint8) != np.frombuffer(y, np.uint8)))
    return f"{wrong / total:.2%} of the bytes differ" if wrong else ""


def _located(folder: Path) -> dict[tuple[int, str], tuple[Path, int, int]]:
    """(rank, name) -> (file, offset, bytes). Files with the same names in them are ranks, others are shards of one."""
    found: dict[tuple[int, str], tuple[Path, int, int]] = {}
    for path in sorted(folder.glob("*.safetensors"), key=lambda p: (len(p.name), p.name)):
        for t in read_header(path).tensors:
            rank = 0
            while (rank, t.name) in found:
                rank += 1
            found[rank, t.name] = path, t.offset, t.nbytes
    return found
