"""Plans over real files for the executor's tests, and numpy's opinion of what they must write."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from ckpttool.dtypes import itemsize, numpy_dtype
from ckpttool.plan import Block, Copy, Fill, Output, Plan, Source, Target, Unit, merged_axes

Array = np.ndarray[Any, np.dtype[Any]]


def row_major(shape: Sequence[int], item: int) -> tuple[int, ...]:
    strides = [item] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * shape[i + 1]
    return tuple(strides)


def source(path: Path, data: bytes) -> Source:
    """A file of these bytes. One that is there already keeps its times, so that its plan stays the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_bytes() != data:
        path.write_bytes(data)
    st_ = path.stat()
    return Source(str(path), st_.st_size, str(st_.st_mtime_ns))


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


def slabs(shape: Sequence[int], axis: int, cuts: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    edges = [0, *cuts, shape[axis]]
    for a, b in itertools.pairwise(edges):
        start, stop = [0] * len(shape), list(shape)
        start[axis], stop[axis] = a, b
        yield start, stop


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
            Target(f"t{t}", f, at, prod(b - a for a, b in zip(start, stop, strict=True)) * out_size)
            for start, stop, f, at, _ in places[1]
        ]
        units.append(Unit(f"t{t}", tuple(steps), tuple(targets)))
    found = [source(directory / f"rank_{f}.bin", have.contents(f)) for f in range(sources)]
    return Plan(found, [Output(f"rank_{f}.bin", n) for f, n in enumerate(want.sizes)], units)


# -- any plan


@st.composite
def recipes(draw: st.DrawFn) -> Callable[[Path], Plan]:
    """A function that writes random sources into a directory and returns a random plan over them."""
    casts = draw(st.booleans())
    dtype = draw(
        st.sampled_from(("BF16", "F16", "F32", "F64") if casts else ("U8", "I16", "BF16", "F32", "I64", "C64"))
    )
    dst_dtype = draw(st.sampled_from(("BF16", "F16", "F32", "F64"))) if casts else dtype
    size, out_size = itemsize(dtype), itemsize(dst_dtype)
    have, want = Store(draw(st.integers(1, 4))), Store(draw(st.integers(1, 4)))
    units: list[Unit] = []
    for t in range(draw(st.integers(1, 3))):
        shape = draw(st.lists(st.sampled_from((1, 2, 3, 5, 8, 13, 40)), max_size=4).map(tuple))
        steps: list[Copy | Fill] = []
        sides = []
        for store, item in ((have, size), (want, out_size)):
            files = len(store.sizes)
            axis = draw(st.integers(0, max(0, len(shape) - 1)))
            order = draw(st.permutations(range(len(shape)))) if draw(st.booleans()) else list(range(len(shape)))
            if shape:
                cuts = sorted(draw(st.lists(st.integers(0, shape[axis]), min_size=files - 1, max_size=files - 1)))
                boxes = list(slabs(shape, axis, cuts))
            else:
                boxes = [([], [])]
            side = []
            for f, (start, stop) in enumerate(boxes):
                local = [b - a for a, b in zip(start, stop, strict=True)]
                strides = [0] * len(shape)
                for axis_, stride in zip(order, row_major([local[i] for i in order], item), strict=True):
                    strides[axis_] = stride
                at = store.add(f, draw(st.sampled_from((0, 0, 1, 2, 7))) * item, prod(local) * item)
                side.append((start, stop, f, at, strides))
            sides.append(side)
        for start, stop, f, at, strides in sides[0]:
            for start2, stop2, f2, at2, strides2 in sides[1]:
                lo = [max(a, b) for a, b in zip(start, start2, strict=True)]
                hi = [min(a, b) for a, b in zip(stop, stop2, strict=True)]
                if any(a >= b for a, b in zip(lo, hi, strict=True)):
                    continue
                a = at + sum((x - y) * s for x, y, s in zip(lo, start, strides, strict=True))
                b = at2 + sum((x - y) * s for x, y, s in zip(lo, start2, strides2, strict=True))
                box, (ss, ds) = merged_axes([y - x for x, y in zip(lo, hi, strict=True)], strides, strides2)
                if draw(st.integers(0, 9)):
                    steps.append(Copy(Block(f, a, ss), Block(f2, b, ds), box, dtype, dst_dtype))
                else:
                    steps.append(Fill(Block(f2, b, ds), box, dst_dtype))
        targets = [
            Target(f"t{t}", f, at, prod(b - a for a, b in zip(start, stop, strict=True)) * out_size)
            for start, stop, f, at, _ in sides[1]
        ]
        half = len(steps) // 2 if draw(st.booleans()) else 0
        if half:  # two units that write to one stored tensor
            units += [Unit(f"t{t}a", tuple(steps[:half])), Unit(f"t{t}b", tuple(steps[half:]))]
        else:
            units.append(Unit(f"t{t}", tuple(steps), tuple(targets)))

    def make(directory: Path) -> Plan:
        found = [source(directory / f"s{f}", have.contents(f)) for f in range(len(have.sizes))]
        outputs = [Output(f"d{f}" if f else "sub/d0", n) for f, n in enumerate(want.sizes)]
        return Plan(found, outputs, units)

    return make
