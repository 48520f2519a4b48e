"""What merges and statistics compute, in short: run on two processors, or on one that hides what it can, it prints the
same.

python -m tests.merge.processors
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from importlib import import_module
from typing import Any

import numpy as np

from ckpttool.kernels.merge import METHODS
from ckpttool.kernels.merge.base import Array
from ckpttool.kernels.merge.draws import CounterDraws
from ckpttool.kernels.portable import Factor, arccosine, logarithm, sine_cosine, softmax
from ckpttool.kernels.stats import Distance, collector
from tests.merge.driver import run_method

SHAPES = [(), (1,), (7,), (9,), (127,), (4097,), (129, 127), (37, 131), (5, 7, 9), (70_001,)]
"""Vectors of processors are 4 to 16 floats long, and BLAS unrolls its loops: no length is a multiple of these."""

VARIANTS: dict[str, list[dict[str, Any]]] = {
    "slerp": [{"t": 0.3}],
    "nuslerp": [{}, {"nuslerp_flatten": False}, {"nuslerp_flatten": False, "nuslerp_row_wise": True}],
    "model_stock": [{}, {"filter_wise": True}],
    "nearswap": [{"t": 0.01}],
    "ema": [{"decay": 0.7}],
    "sce": [{}, {"select_topk": 0.3}],
}


def older() -> dict[str, str]:
    """The environment in which numpy and its BLAS take this processor for the oldest that they know."""
    umath: Any = import_module("numpy._core._multiarray_umath")
    own = [f for f in umath.__cpu_dispatch__ if umath.__cpu_features__.get(f)]
    return os.environ | {"OPENBLAS_CORETYPE": "Prescott", "NPY_DISABLE_CPU_FEATURES": " ".join(own)}


def numbers(size: int, part: int) -> Array:
    """Numbers between -1/2 and 1/2 that take nothing but integers to make: float64 (SplitMix64)."""
    z = (np.arange(size, dtype=np.uint64) + np.uint64(1 + (part << 32))) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    found: Array = ((z ^ (z >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53 - 0.5
    return found


def models(shape: tuple[int, ...]) -> list[Array]:
    """A base and three models near it."""
    size = int(np.prod(shape, dtype=np.int64))
    base, *steps = (numbers(size, part) for part in range(4))
    return [x.astype(np.float32).reshape(shape) for x in (base, *(base + 0.1 * s * np.abs(s) for s in steps))]


def of_methods() -> dict[str, str]:
    """The digest of what each method makes of all shapes."""
    found = {}
    sources = [models(shape) for shape in SHAPES]
    for name, method in METHODS.items():
        count = min(3, method.models[1] or 3)
        defaults = {"weight": 0.4, "density": 0.6}
        given = [
            {k: defaults.get(k, p.default) for k, p in method.per_model.items()} | {"weight": 0.4 + 0.1 * i}
            for i in range(count)
        ]
        for i, whole in enumerate(VARIANTS.get(name, [{}])):
            said = hashlib.sha256()
            for base, *others in sources:
                based = base if method.base == "needed" or (method.base == "allowed" and i == 0) else None
                result = run_method(
                    method,
                    others[:count],
                    based,
                    per_model=given,
                    whole={"rescale": True} | whole,
                    draws=CounterDraws(3, name),
                )
                said.update(result.tobytes())
            found[f"{name}, {whole}"] = said.hexdigest()
    return found


def of_parts() -> dict[str, str]:
    """The digests of what float32 results hide the last bits of, and of products with an adapter's factors."""
    x = numbers(10_001, 5)
    rows = (20 * x).astype(np.float32).reshape(73, 137)
    found = {
        "sine": np.stack(sine_cosine(40 * x)),
        "arccosine": arccosine(2 * x),
        "softmax": softmax(rows),
        "logarithm": logarithm(x * x + 1e-8),
    }
    for rank in (1, 7, 16, 300):
        left, right = numbers(129 * rank, 6).reshape(129, rank), numbers(127 * rank, 7).reshape(rank, 127)
        found[f"rank {rank}"] = Factor(right.astype(np.float32)).product(left.astype(np.float32))
    return {k: hashlib.sha256(v.tobytes()).hexdigest() for k, v in found.items()}


def of_statistics() -> dict[str, str]:
    """What is said of tensors of each kind, and of the distance between two."""
    found = {}
    x, y = numbers(40_004, 10), numbers(40_004, 11)
    for dtype, kind in {"F16": "f2", "F32": "f4", "F64": "f8", "C64": "c8"}.items():
        one, other = ((v + 1j * v[::-1] if kind == "c8" else v).astype(kind) for v in (x, y))
        known, apart = collector(dtype), Distance()
        for block in (slice(0, 10_001), slice(10_001, None)):
            known.add(one[block])
            apart.add(one[block], other[block])
            apart.add_right(one[block])
        found[dtype] = repr((known.stats(), apart.gap2, apart.norm2, apart.relative, apart.cosine))
    return found


def of_libraries() -> dict[str, str]:
    """The digest of what is another number with other kernels of BLAS, if there are any."""
    a, b = (numbers(10_001, part).astype(np.float32) for part in (8, 9))
    return {"BLAS": hashlib.sha256(np.dot(a, b).tobytes()).hexdigest()}


def everything() -> dict[str, str]:
    with np.errstate(all="ignore"):
        return of_methods() | of_parts() | of_statistics() | of_libraries()


if __name__ == "__main__":
    json.dump(everything(), sys.stdout)
