"""Plans over real files for the executor's tests, and numpy's opinion of what they must write."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ckpttool.core.dtypes import itemsize, numpy_dtype
from ckpttool.core.plan import Block, Copy, Output, Plan, SourceFile, Unit, WrittenTensor, merged_axes

Array = np.ndarray[Any, np.dtype[Any]]


def row_major(shape: Sequence[int], item: int) -> tuple[int, ...]:
    strides = [item] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * shape[i + 1]
    return tuple(strides)


def source(path: Path, data: bytes) -> SourceFile:
    """A file of these bytes. One that is there already keeps its times, so that its plan stays the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_bytes() != data:
        path.write_bytes(data)
    st_ = path.stat()
    return SourceFile(str(path), st_.st_size, str(st_.st_mtime_ns))


def pattern(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


def expected(plan: Plan) -> dict[str, bytes]:
    """What the plan's copies and fills write, by numpy assignment on whole files."""
    files = [np.fromfile(s.path, np.uint8) for s in plan.sources]
    out = [np.zeros(o.size, np.uint8) for o in plan.outputs]
    for o, memory in zip(plan.outputs, out, strict=True):
        for offset, data in o.literals:
            memory[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
        if o.carried:
            memory[:] = np.fromfile(o.carried, np.uint8)
    for unit in plan.units:
        for s in unit.steps:
            if not isinstance(s, Copy) or 0 in s.shape:
                continue
            a: Array = np.ndarray(
                s.shape, numpy_dtype(s.src_dtype), files[s.src.file].data, s.src.offset, s.src.strides
            )
            b: Array = np.ndarray(s.shape, numpy_dtype(s.dst_dtype), out[s.dst.file].data, s.dst.offset, s.dst.strides)
            if s.src_dtype == s.dst_dtype:
                bits = f"u{a.itemsize}"
                b.view(bits)[...] = a.view(bits)
            else:
                with np.errstate(all="ignore"):
                    b[...] = a.astype(np.float32) if s.src_dtype == "F64" else a
    return {o.name: memory.tobytes() for o, memory in zip(plan.outputs, out, strict=True)}


def written(dst: Path, plan: Plan) -> dict[str, bytes]:
    return {o.name: (dst / o.name).read_bytes() for o in plan.outputs}


class Store:
    """Files in which tensors are laid one behind the other."""

    def __init__(self, files: int) -> None:
        self.sizes = [0] * files
        self.parts: list[list[tuple[int, bytes]]] = [[] for _ in range(files)]

    def add(self, file: int, gap: int, nbytes: int, data: bytes = b"") -> int:
        offset = self.sizes[file] + gap
        self.sizes[file] = offset + nbytes
        if data:
            self.parts[file].append((offset, data))
        return offset

    def contents(self, file: int) -> bytes:
        memory = bytearray(pattern(self.sizes[file], file))
        for offset, data in self.parts[file]:
            memory[offset : offset + len(data)] = data
        return bytes(memory)


def reshard(
    directory: Path,
    tensors: Sequence[tuple[tuple[int, ...], int | None]],
    sources: int,
    outputs: int,
    *,
    dtype: str = "BF16",
    dst_dtype: str = "",
    turned: bool = False,
) -> Plan:
    """Tensors of a shape, each cut evenly along an axis (None: replicated) over ``sources``, cut anew over ``outputs``.

    ``turned`` stores 2-D tensors transposed in the outputs.
    """
    dst_dtype = dst_dtype or dtype
    size, out_size = itemsize(dtype), itemsize(dst_dtype)
    have, want = Store(sources), Store(outputs)
    units = []
    for t, (shape, axis) in enumerate(tensors):
        values = pattern(prod(shape) * size, t + 100)
        whole: Array = np.frombuffer(values, f"u{size}").reshape(shape)
        places: list[list[tuple[list[int], list[int], int, int, tuple[int, ...]]]] = []
        for store, files, item in ((have, sources, size), (want, outputs, out_size)):
            side = []
            n = 1 if axis is None and store is have else files
            for f in range(n):
                start, stop = [0] * len(shape), list(shape)
                if axis is not None:
                    start[axis], stop[axis] = shape[axis] * f // files, shape[axis] * (f + 1) // files
                local = tuple([b - a for a, b in zip(start, stop, strict=True)])
                data = b""
                if store is have:
                    data = whole[tuple(slice(a, b) for a, b in zip(start, stop, strict=True))].tobytes()
                at = store.add(f, 8 if t % 2 else 0, prod(local) * item, data)
                strides = row_major(local, item)
                if turned and store is want and len(local) == 2:
                    strides = (item, local[0] * item)
                side.append((start, stop, f, at, strides))
            places.append(side)
        steps = []
        for start, stop, f, at, strides in places[0]:
            for start2, stop2, f2, at2, strides2 in places[1]:
                lo = [max(a, b) for a, b in zip(start, start2, strict=True)]
                hi = [min(a, b) for a, b in zip(stop, stop2, strict=True)]
                if any(a >= b for a, b in zip(lo, hi, strict=True)):
                    continue
                a = at + sum((x - y) * s for x, y, s in zip(lo, start, strides, strict=True))
                b = at2 + sum((x - y) * s for x, y, s in zip(lo, start2, strides2, strict=True))
                box, (ss, ds) = merged_axes([y - x for x, y in zip(lo, hi, strict=True)], strides, strides2)
                steps.append(Copy(Block(f, a, ss), Block(f2, b, ds), box, dtype, dst_dtype))
        targets = [
            WrittenTensor(f"t{t}", f, at, prod(b - a for a, b in zip(start, stop, strict=True)) * out_size)
            for start, stop, f, at, _ in places[1]
        ]
        units.append(Unit(f"t{t}", tuple(steps), tuple(targets)))
    found = [source(directory / f"rank_{f}.bin", have.contents(f)) for f in range(sources)]
    return Plan(found, [Output(f"rank_{f}.bin", n) for f, n in enumerate(want.sizes)], units)
