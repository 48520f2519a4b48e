"""The command line, as a user starts it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def run(command: str, src: Path, dst: Path, *options: str | int | Path) -> str:
    """``ckpttool COMMAND``; fails with what it said. Returns stdout."""
    line = [sys.executable, "-m", "ckpttool", command, str(src), str(dst), *map(str, options)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def reshard(src: Path, dst: Path, *options: str | int | Path) -> str:
    """``ckpttool reshard``."""
    return run("reshard", src, dst, *options)


def fp8_cast(src: Path, dst: Path, *options: str | int | Path) -> str:
    """``ckpttool fp8-cast``."""
    return run("fp8-cast", src, dst, *options)
