"""A sample of ``python -m tests.torture.members``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.thorough  # tests/execute/test_members.py ends parts of one process at each step
@pytest.mark.parametrize("kind", ["calls", "full", "crowd"])
def test_a_sample(kind: str) -> None:
    words = ["--kind", kind, "--only", "reshard --to dcp", "--every", "40", "--rounds", "1", "--jobs", "1"]
    command = [sys.executable, "-m", "tests.torture.members", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=300)
    if done.returncode == 2:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    runs, killed, failed, ended = (int(n.replace(",", "")) for n in done.stdout.splitlines()[1].split()[-5:-1])
    assert runs == killed + failed + ended
    assert runs > 3
