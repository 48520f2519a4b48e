"""What a task of a launcher runs, in the Python of the tests and with the code beside them."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CKPTTOOL = (sys.executable, "-m", "ckpttool")
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--no-python")

WHO = """
import json, os
from ckpttool.errors import UsageError
from ckpttool.execute.parts.launchers import membership
try:
    found = membership(os.environ["SAID"], os.environ)
    print(json.dumps(["part", found.member.number, found.member.of, found.source.partition(":")[0]]), flush=True)
except UsageError as e:
    print(json.dumps(["refused", str(e)]), flush=True)
"""
"""Prints which part a process has, or why it has none."""


def needs_mpi() -> None:
    """Skip a test where there is no MPI."""
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun: apt-get install openmpi-bin")


def environment(**more: str) -> dict[str, str]:
    """As the tests have it, without what a launcher around the tests has set."""
    launched = ("SLURM_", "OMPI_", "PMI", "TORCHELASTIC_", "GROUP_", "ROLE_", "LOCAL_", "JOB_COMPLETION")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(launched) and k not in {"RANK", "WORLD_SIZE"}}
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}"
    return kept | {"PYTHONPATH": str(ROOT), "PATH": path, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", **more}
