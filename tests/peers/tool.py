"""The command line, as a user starts it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def reshard(src: Path, dst: Path, *options: str | int | Path) -> str:
    """``ckpttool reshard``; fails with what it said. Returns stdout."""
    command = [sys.executable, "-m", "ckpttool", "reshard", str(src), str(dst), *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
