"""Tables of views over arrays, and what a view holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ckpttool.aoa import Statement, apply_aoa, parse_aoa
from ckpttool.core.catalog import Key, LogicalTensor, Piece, StoredTensor
from ckpttool.core.geometry import Box
from ckpttool.planning.relate import NONE, DerivedTensor, TensorTable

Array = np.ndarray[Any, np.dtype[Any]]
RULES = Path(__file__).parents[2] / "fixtures" / "aoa_rules_pf12.json"


def tensor(name: str, shape: tuple[int, ...], dtype: str = "F32", cut: tuple[int, int] | None = None) -> LogicalTensor:
    """A logical tensor of no file; ``cut`` = (axis, ranks) says what its ranks hold."""
    axis, ranks = cut or (0, 1)
    pieces = []
    for rank in range(ranks) if shape else ():
        n = shape[axis] // ranks
        start = tuple(rank * n if i == axis else 0 for i in range(len(shape)))
        stop = tuple((rank + 1) * n if i == axis else s for i, s in enumerate(shape))
        local = tuple(b - a for a, b in zip(start, stop, strict=True))
        stored = StoredTensor(name, dtype, local, 0, 0, rank)
        pieces.append(Piece(stored, Box((0,) * len(shape), local), Box(start, stop)))
    return LogicalTensor(Key(name), dtype, shape, tuple(pieces))


def table(
    sources: Mapping[str, Array],
    dtype: str | Mapping[str, str] = "F32",
    cuts: Mapping[str, tuple[int, int]] | None = None,
) -> TensorTable:
    """A view for each array. ``dtype`` is one for all, or by name for some."""
    kinds = {} if isinstance(dtype, str) else dtype
    other = dtype if isinstance(dtype, str) else "F32"
    views = {}
    for name, a in sources.items():
        kind = kinds.get(name, other)
        views[name] = DerivedTensor(name, kind, a.shape, tensor(name, a.shape, kind, (cuts or {}).get(name)))
    return TensorTable(views)


def value(view: DerivedTensor, sources: Mapping[str, Array]) -> Array:
    """What a view holds; every element must come from one part."""
    out = np.full(view.shape, np.nan)
    hits = np.zeros(view.shape, int)
    for p in view.parts:
        source = sources[p.source.key.name]
        steps = np.indices(p.size, sparse=True)
        there = tuple(f + s * k for f, s, k in zip(p.first, p.step, steps, strict=True))
        here: list[Any] = list(p.origin)
        for k, axis, stride in zip(steps, p.axes, p.stride, strict=True):
            if axis != NONE:
                here[axis] = here[axis] + k * stride
        out[there] = source[tuple(here)]
        hits[there] += 1
    assert (hits == 1).all()
    return out


def values(views: TensorTable, sources: Mapping[str, Array]) -> dict[str, Array]:
    return {v.name: value(v, sources) for v in views}


def run(text: str, sources: Mapping[str, Array]) -> dict[str, Any]:
    """What AOA text makes of arrays, as nested lists."""
    out = apply_aoa(table(sources), parse_aoa(text))
    return {k: v.tolist() for k, v in values(out, sources).items()}


def count(*shape: int, start: int = 0) -> Array:
    """An array in which every element is another number."""
    return np.arange(start, start + int(np.prod(shape)), dtype=np.float64).reshape(shape)


def rules(name: str, direction: str) -> list[Statement]:
    """Statements of paddleformers 1.2.0, as it generates them for a tiny config."""
    text = json.loads(RULES.read_text(encoding="utf-8"))[name][direction]
    return parse_aoa(json.dumps(text), f"{name}/{direction}")
