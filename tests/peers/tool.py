"""The command line, in this process: what is judged here are the files."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.command import ckpttool


def run(command: str, src: Path, dst: Path, *options: str | int | Path) -> str:
    """``ckpttool COMMAND``; fails with what it said. Returns stdout."""
    done = ckpttool(command, src, dst, *options)
    assert done.code == 0, done.err
    return done.out


def reshard(src: Path, dst: Path, *options: str | int | Path) -> str:
    """``ckpttool reshard``."""
    return run("reshard", src, dst, *options)


def quantize(src: Path, dst: Path, *options: str | int | Path) -> str:
    """``ckpttool quantize``."""
    return run("quantize", src, dst, *options)
