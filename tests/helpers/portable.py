"""A system without what only Linux has: ``pytest -p tests.helpers.portable`` runs any tests on it.

Calls of Python and of the C library are taken away, and so is /proc/self. In this process alone, not in those
that tests start.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from ckpttool.storage import system

OF_LINUX = (
    *("O_DIRECT", "RWF_DSYNC", "copy_file_range", "fdatasync", "memfd_create", "eventfd", "pidfd_open", "splice"),
    *("posix_fadvise", "posix_fallocate", "preadv", "pwritev", "sched_getaffinity", "sched_setaffinity"),
)
"""Names of the module ``os`` that macOS lacks, or may lack."""
OF_GLIBC = {"fallocate", "mallopt", "prctl", "renameat2", "sync_file_range"}


class Libc:
    """The C library without what only Linux's have."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        if name in OF_GLIBC:
            raise AttributeError(name)
        return getattr(self._real, name)


@contextlib.contextmanager
def elsewhere() -> Iterator[None]:
    """For as long as it lasts, this is another system."""
    libc, iterdir, listdir = Libc(system.libc()), Path.iterdir, os.listdir

    def hidden(path: object) -> None:
        if str(path).startswith("/proc/self/"):
            raise FileNotFoundError(2, "No such file or directory", str(path))

    def looks(path: Path) -> Any:
        hidden(path)
        return iterdir(path)

    def lists(path: Any = ".") -> Any:
        hidden(path)
        return listdir(path)

    with contextlib.ExitStack() as stack:
        for name in OF_LINUX:
            if hasattr(os, name):
                stack.enter_context(without(os, name))
        stack.enter_context(patch.object(system, "libc", lambda: libc))
        stack.enter_context(patch.object(sys, "platform", "darwin"))
        stack.enter_context(patch.object(Path, "iterdir", looks))
        stack.enter_context(patch.object(os, "listdir", lists))
        yield


@contextlib.contextmanager
def without(owner: Any, name: str) -> Iterator[None]:
    """An attribute taken away, and put back."""
    value = getattr(owner, name)
    delattr(owner, name)
    try:
        yield
    finally:
        setattr(owner, name, value)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Every test of this process."""
    with elsewhere():
        yield
