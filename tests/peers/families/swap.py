"""Rank 0 and rank 1 exchanged: what a right cut does not notice.

The shares of a tensor-parallel cut are all alike: rank 1's heads, columns and groups may stand where rank 0's stood, if
that is done to every tensor that is cut. A model put together from exchanged files computes the same. It does not when
a tensor is cut on a wrong axis, through a head, or without its partner. Nothing of ckpttool is used here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

Tensors = dict[str, np.ndarray[Any, Any]]


def read(path: Path) -> tuple[Tensors, dict[str, str]]:
    """All tensors of a file, and its metadata."""
    with safe_open(path, framework="np") as f:
        return {n: f.get_tensor(n) for n in f.keys()}, f.metadata() or {}  # noqa: SIM118


def read_all(folder: Path) -> Tensors:
    """All tensors of a checkpoint in Hugging Face's form."""
    out: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        out |= read(path)[0]
    return out


def rank_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("rank-*.safetensors"))


def differing(folder: Path, a: int = 0, b: int = 1) -> list[str]:
    """Names of tensors of which two ranks hold different parts of one shape."""
    first, second = (read(rank_files(folder)[i])[0] for i in (a, b))
    return sorted(
        n for n, t in first.items() if n in second and t.shape == second[n].shape and t.tobytes() != second[n].tobytes()
    )


def swap(folder: Path, skip: Callable[[str], bool]) -> list[str]:
    """Exchange what ranks 0 and 1 hold, in place, but for tensors that ``skip`` names; returns the exchanged names."""
    paths = rank_files(folder)[:2]
    (first, about_first), (second, about_second) = (read(p) for p in paths)
    names = [n for n in differing(folder) if not skip(n)]
    for name in names:
        first[name], second[name] = second[name], first[name]
    save_file(first, paths[0], about_first)
    save_file(second, paths[1], about_second)
    return names


def same(a: Mapping[str, np.ndarray[Any, Any]], b: Mapping[str, np.ndarray[Any, Any]]) -> list[str]:
    """Names at which two checkpoints differ by a single byte, a shape or a dtype."""
    return sorted(
        n
        for n in a.keys() | b
        if n not in a
        or n not in b
        or a[n].dtype != b[n].dtype
        or a[n].shape != b[n].shape
        or a[n].tobytes() != b[n].tobytes()
    )


def contents(tensors: Mapping[str, np.ndarray[Any, Any]]) -> list[tuple[Any, ...]]:
    """What a checkpoint holds under whatever names."""
    return sorted((str(t.dtype), t.shape, t.tobytes()) for t in tensors.values())
