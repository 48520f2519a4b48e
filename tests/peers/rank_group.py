"""Starts the ranks of ``rank_model.py``: one group of processes for all jobs of a number of ranks."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

from tests.peers.rank_model import Job, main

LIMIT = 400
"""Seconds for all jobs of a group."""


def run_group(world: int, jobs: list[Job], folder: Path) -> None:
    """Run jobs on ``world`` ranks. What each gives lies in ``folder`` afterwards, see ``logits_of``."""
    # Forks: importing torch and transformers takes longer than all jobs of a rank.
    start = multiprocessing.get_context("fork").Process
    ranks = [start(target=_rank, args=(rank, world, folder, jobs)) for rank in range(world)]
    for p in ranks:
        p.start()
    end = time.monotonic() + LIMIT
    for p in ranks:
        p.join(end - time.monotonic())
    codes = [p.exitcode for p in ranks]
    for p in ranks:
        p.kill()
        p.join()
    if any(codes) or None in codes:
        logs = "\n".join((folder / f"rank{r}.log").read_text(encoding="utf-8")[-3000:] for r in range(world))
        raise RuntimeError(f"the ranks ended with {codes}\n{logs}")


def _rank(rank: int, world: int, folder: Path, jobs: list[Job]) -> None:
    sys.stdout = sys.stderr = (folder / f"rank{rank}.log").open("w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), 1)
    os.dup2(sys.stderr.fileno(), 2)
    main(rank, world, folder, jobs)


def logits_of(name: str, folder: Path) -> Any:
    """The logits of a job. Raises RuntimeError with what its ranks said when it has none."""
    from safetensors.torch import load_file

    path = folder / f"{name}.logits"
    if not path.exists():
        errors = [p.read_text(encoding="utf-8") for p in sorted(folder.glob(f"{name}.error*"))]
        raise RuntimeError(f"{name} did not run:\n" + "\n".join(errors or ["no rank said why"]))
    return load_file(path)["logits"]
