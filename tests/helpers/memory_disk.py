"""Where files lie that need not survive a power cut: a disk takes longer to write and delete them than their test."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

MEMORY_DISK = Path("/dev/shm")  # noqa: S108 - whoever writes there makes a directory of its own
ROOM = 4 << 30
"""Bytes that must be free on it; the tests need some hundred MB at a time."""


def memory_disk() -> Path | None:
    """The memory disk; None where there is none, it lacks room, or TMPDIR names another place."""
    if "TMPDIR" in os.environ or not os.access(MEMORY_DISK, os.W_OK):
        return None
    return MEMORY_DISK if shutil.disk_usage(MEMORY_DISK).free >= ROOM else None
