"""Starts the ranks of ``rank_model.py``: one group of processes for all jobs of a number of ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.peers.rank_model import Job, write_jobs

ROOT = Path(__file__).parents[2]
LIMIT = 400
"""Seconds for all jobs of a group."""


def run_group(world: int, jobs: list[Job], folder: Path) -> None:
    """Run jobs on ``world`` ranks. What each gives lies in ``folder`` afterwards, see ``logits_of``."""
    write_jobs(jobs, folder)
    ranks = []
    for rank in range(world):
        log = (folder / f"rank{rank}.log").open("w", encoding="utf-8")
        command = [sys.executable, "-m", "tests.peers.rank_model", str(rank), str(world), str(folder)]
        ranks.append(subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log))
        log.close()
    try:
        codes = [p.wait(LIMIT) for p in ranks]
    finally:
        for p in ranks:
            p.kill()
    if any(codes):
        logs = "\n".join((folder / f"rank{r}.log").read_text(encoding="utf-8")[-3000:] for r in range(world))
        raise RuntimeError(f"the ranks ended with {codes}\n{logs}")


def logits_of(name: str, folder: Path) -> Any:
    """The logits of a job. Raises RuntimeError with what its ranks said when it has none."""
    from safetensors.torch import load_file

    path = folder / f"{name}.logits"
    if not path.exists():
        errors = [p.read_text(encoding="utf-8") for p in sorted(folder.glob(f"{name}.error*"))]
        raise RuntimeError(f"{name} did not run:\n" + "\n".join(errors or ["no rank said why"]))
    return load_file(path)["logits"]
