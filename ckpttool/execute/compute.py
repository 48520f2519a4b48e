"""Working out a tensor: a merge method's passes over its operands, and the result on its way to the output.

One worker does one tensor, chunk by chunk, in order. What a method keeps between its passes is in the method; what is
held here is a chunk of every operand and a stretch of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ckpttool.core.dtypes import numpy_dtype
from ckpttool.core.plan import Compute, Operand, Scaled, StoredOperand
from ckpttool.errors import CorruptError, UsageError
from ckpttool.execute.blocks import Mover
from ckpttool.execute.files import SECTOR
from ckpttool.execute.operands import OperandBuffer, OperandReader, StoredReader, reader
from ckpttool.execute.permute import Array
from ckpttool.execute.strided import Emit, Seen, WriteBehind, as_in_file, scatter, unseen
from ckpttool.kernels.cast import cast
from ckpttool.kernels.merge import METHODS
from ckpttool.kernels.merge.base import CHUNK, Draws, MergeTensor, Method, Pass

if TYPE_CHECKING:
    from ckpttool.kernels.merge.measure import Measured

STRETCH = 2 << 20
"""Bytes of a result that are written in one go."""

PART = 8 << 20
"""Elements of a part, which is recorded as finished by itself."""

_OWN_BUFFERS = 12
"""Operands beyond this many share one buffer for what is read."""

_Found = TypeVar("_Found")


def step_of(compute: Compute) -> int:
    """Elements of a chunk: a constant, or as many whole rows as that has room for."""
    if not METHODS[compute.method].rows:
        return CHUNK
    columns = compute.shape[-1] if compute.shape else 1
    return max(CHUNK // max(columns, 1), 1) * columns


def part_elements(compute: Compute) -> int:
    """Elements of a part: whole chunks."""
    step = step_of(compute)
    return max(PART // step, 1) * step


def parts_of(compute: Compute) -> int:
    """Number of parts of a computed tensor."""
    return max(1, -(-prod(compute.shape) // part_elements(compute)))


class _Arrays:
    """Arrays by purpose, kept from tensor to tensor: memory that is given back is not always there for others."""

    def __init__(self) -> None:
        self._found: dict[object, Array] = {}
        self._buffers: list[OperandBuffer] = []

    def take(self, key: object, size: int, dtype: Any = np.float32) -> Array:
        """An array of ``size`` elements, with whatever was in it."""
        found = self._found.get(key)
        if found is None or found.dtype != dtype or found.size < size:
            found = self._found[key] = np.empty(size, dtype)
        return found[:size]

    def buffers(self) -> Iterator[OperandBuffer]:
        """Places for raw elements, the same ones for every tensor."""
        for buffer in self._buffers:
            buffer.holds = None
            yield buffer
        while True:
            self._buffers.append(OperandBuffer())
            yield self._buffers[-1]


class _OperandChunk:
    """See ``ckpttool.kernels.merge.base.Chunk``."""

    def __init__(
        self, readers: list[OperandReader], base: OperandReader | None, step: int, arrays: _Arrays, *, shared: bool
    ) -> None:
        self.start = self.stop = 0
        self.last = False
        self._readers = readers
        self._base = base
        self.readers = readers if base is None else [*readers, base]
        self._step = step
        self._shared = shared
        self._arrays = arrays

    def _array(self, key: object, dtype: Any = np.float32) -> Array:
        return self._arrays.take(key, self._step, dtype)[: self.stop - self.start]

    def pass_over(self, lo: int, hi: int) -> None:
        """Read a stretch that is not worked out again, for the operands' hashes."""
        for r in self.readers:
            r.pass_over(lo, hi)

    def model(self, i: int) -> Array:
        out = self._array("model" if self._shared else i)
        self._readers[i].read(self.start, self.stop, out, last=self.last)
        return out

    def base(self) -> Array:
        out = self._array("base")
        if self._base is None:
            out[...] = 0
        else:
            self._base.read(self.start, self.stop, out, last=self.last)
        return out

    def delta(self, i: int) -> Array:
        out = self.model(i)
        if self._base is not None:
            np.subtract(out, self.base(), out=out)
        return out

    def scratch(self, i: int, dtype: Any = np.float32) -> Array:
        return self._array(("scratch", i, np.dtype(dtype)), dtype)


@dataclass(slots=True)
class TensorComputer:
    """Works out tensors through one ``Mover``."""

    carrier: Mover
    memory: int
    draws: Callable[[Compute], Draws]
    emit: Emit | None = None
    """What becomes of a stretch of the result, by default it is written; see ``scatter``."""
    _arrays: _Arrays = field(default_factory=_Arrays)

    def run(self, compute: Compute, done: Collection[int], seen: Seen = unseen) -> Iterator[int | dict[str, str]]:
        """Work out one tensor; parts in ``done`` are written already.

        Yields the number of each part that is written, and at last the hashes of the operands by position.
        Raises CorruptError for a result that is not finite.
        """
        method = METHODS[compute.method]
        size = prod(compute.shape)
        step = min(step_of(compute), max(size, 1))
        count = len(compute.operands)
        self._check_memory(compute, method, step)
        buffers = self._arrays.buffers()
        shared = next(buffers) if count > _OWN_BUFFERS else None
        readers = [reader(o, self.carrier, lambda: shared or next(buffers)) for o in compute.operands]
        models = readers[: len(compute.models)]
        base = readers[-1] if compute.base is not None else None
        chunk = _OperandChunk(models, base, step, self._arrays, shared=shared is not None and method.one_at_a_time)
        first = readers[0]
        fill: Callable[[int, int, Array], None]
        if isinstance(first, StoredReader) and _passes_through(compute):
            before, fill = 0, partial(first.read, last=True)
        else:
            before = size * method.passes(dict(compute.whole), len(models))
            fill = self._passes(compute, method, chunk, step, lambda at: seen(min(at, before), before + size))
        yield from self._write(compute, chunk, step, done, fill, lambda at: seen(before + at, before + size))
        yield {str(i): digest for i, r in enumerate(readers) if (digest := r.digest(size)) is not None}

    def measure(self, compute: Compute, result: Operand, seen: Seen = unseen) -> Measured:
        """What can be said of a tensor that was worked out, when ``result`` reads it as it was written."""
        from ckpttool.kernels.merge.measure import measured  # which no merge needs

        method = METHODS[compute.method]
        size = prod(compute.shape)
        step = min(step_of(compute), max(size, 1))
        self._check_memory(compute, method, step)
        operands = [*compute.models, result, *([] if compute.base is None else [compute.base])]
        buffers = self._arrays.buffers()
        shared = next(buffers) if len(operands) > _OWN_BUFFERS else None
        readers = [reader(o, self.carrier, lambda: shared or next(buffers)) for o in operands]
        base = readers.pop() if compute.base is not None else None
        chunk = _OperandChunk(readers, base, step, self._arrays, shared=shared is not None and method.one_at_a_time)
        most = size * (1 + (method.passes(dict(compute.whole), len(compute.models)) if method.parts is not None else 0))
        program = measured(self._tensor(compute), method)
        return self._look(program, chunk, size, step, lambda at: seen(min(at, most), most))

    def _check_memory(self, compute: Compute, method: Method, step: int) -> None:
        arrays = len(compute.operands) if not method.one_at_a_time else min(len(compute.operands), _OWN_BUFFERS)
        need = (arrays + 8) * step * 6
        if arrays > _OWN_BUFFERS and need > self.memory:
            raise UsageError(
                f"{compute.method} of {len(compute.models)} models needs {need:,} bytes of memory for each worker",
                hint=f"raise --memory to {need * 2 >> 20}MiB, or give fewer --workers",
            )

    def _passes(
        self, compute: Compute, method: Method, chunk: _OperandChunk, step: int, seen: Callable[[int], None]
    ) -> Callable[[int, int, Array], None]:
        """Let the method see the tensor as often as it wants; returns what puts a chunk of the result into an array."""
        combine = self._look(method.program(self._tensor(compute)), chunk, prod(compute.shape), step, seen)
        chunk.last = True
        result = self._arrays.take("result", step)

        def fill(lo: int, hi: int, out: Array) -> None:
            chunk.start, chunk.stop = lo, hi
            mine = out if out.dtype == np.float32 else result[: hi - lo]
            with np.errstate(all="ignore"):
                combine(chunk, mine)
            if mine is not out:
                cast(mine, out)

        return fill

    def _tensor(self, compute: Compute) -> MergeTensor:
        return MergeTensor(
            compute.name,
            compute.shape,
            tuple([dict(p) for p in compute.parameters]),
            dict(compute.whole),
            compute.base is not None,
            self.draws(compute),
            compute.base_at,
        )

    def _look(
        self,
        program: Generator[Pass, None, _Found],
        chunk: _OperandChunk,
        size: int,
        step: int,
        seen: Callable[[int], None],
    ) -> _Found:
        """Let a program see the tensor as often as it wants; gives what it returns."""
        before = 0
        with np.errstate(all="ignore"):
            while True:
                try:
                    see = next(program)
                except StopIteration as end:
                    found: _Found = end.value
                    return found
                for lo in range(0, size, step):
                    chunk.start, chunk.stop = lo, min(lo + step, size)
                    see(chunk)
                    seen(before + chunk.stop)
                before += size

    def _write(
        self,
        compute: Compute,
        chunk: _OperandChunk,
        step: int,
        done: Collection[int],
        fill: Callable[[int, int, Array], None],
        seen: Callable[[int], None],
    ) -> Iterator[int]:
        """The last pass: a stretch of the result at a time."""
        size = prod(compute.shape)
        kind = numpy_dtype(compute.dtype)
        budget = max(step * kind.itemsize, min(STRETCH, self.memory // 4))
        stretch = max(1, budget // (step * kind.itemsize)) * step
        most = min(stretch, max(size, 1)) * kind.itemsize
        # One is filled while the other is written.
        held = [self._arrays.take(("stretch", i), most + SECTOR, np.uint8) for i in range(1 + (size > stretch))]
        each = part_elements(compute)
        writing = WriteBehind(self.emit or scatter)
        turn = 0
        try:
            for number in range(parts_of(compute)):
                begin, end = number * each, min((number + 1) * each, size)
                for lo in range(begin, end, stretch):
                    hi = min(lo + stretch, end)
                    at, stop = lo * kind.itemsize, hi * kind.itemsize
                    turn = (turn + 1) % len(held)
                    memory = as_in_file(held[turn], compute.outputs, at)[: stop - at]
                    out: Array = memory.view(kind)
                    for a in range(lo, hi, step):
                        b = min(a + step, hi)
                        seen(a)
                        if number in done:
                            chunk.pass_over(a, b)
                            continue
                        part = out[a - lo : b - lo]
                        fill(a, b, part)
                        if compute.finite and not _is_finite(part):
                            raise self._not_finite(compute, chunk, a, part)
                    if number not in done:
                        writing.start(self.carrier, compute.outputs, at, stop, memory)
                if number not in done:
                    writing.wait()
                    yield number
        finally:
            writing.end()

    def _not_finite(self, compute: Compute, chunk: _OperandChunk, start: int, out: Array) -> CorruptError:
        """Say where, and which source brought it."""
        bad = int(np.flatnonzero(~np.isfinite(out.astype(np.float32)))[0])
        at = np.unravel_index(start + bad, compute.shape) if compute.shape else ()
        where = []
        readers = chunk.readers
        value = np.empty(1, np.float32)
        for r in readers:
            r.read(start + bad, start + bad + 1, value, last=False)
            if not np.isfinite(value[0]):
                where.append(f"{r.label} holds {value[0]} there")
        if not where:
            where = [f"{r.label} is finite there" for r in readers]
        place = ", ".join(str(int(i)) for i in at)
        if compute.method == "passthrough" and isinstance(compute.operands[0], Scaled):
            return CorruptError(
                f"`{compute.name}` is {out[bad]} at [{place}] when it is dequantized",
                where=readers[0].label,
                hint=f"a code or a scale of it is not finite, or too large for {compute.dtype}",
            )
        return CorruptError(
            f"the merged `{compute.name}` is {out[bad]} at [{place}]",
            where=where,
            hint="--allow-nonfinite writes it anyway",
        )


def _passes_through(compute: Compute) -> bool:
    """A tensor that is only copied: its bytes are moved, whatever they mean; and one that is copied with fewer bits,
    which by way of the operands' float32 would be rounded twice."""
    first = compute.models[0]
    if (
        compute.method != "passthrough"
        or dict(compute.parameters[0]).get("scale") != 1
        or not isinstance(first, StoredOperand)
    ):
        return False
    return first.dtype == compute.dtype or (first.dtype == "F64" and compute.dtype in ("F16", "BF16"))


_EXPONENTS: dict[str, tuple[Any, int]] = {
    "bfloat16": (np.uint16, 0x7F80),
    "float16": (np.uint16, 0x7C00),
    "float32": (np.uint32, 0x7F800000),
}


def _is_finite(a: Array) -> bool:
    """Whether no exponent is all ones. Numbers that are no floats of 16 bits or more always are finite."""
    kind = _EXPONENTS.get(a.dtype.name)
    if kind is None:
        return a.dtype != np.float64 or bool(np.isfinite(a).all())
    bits, mask = kind
    return not a.size or int(np.bitwise_and(a.view(bits), bits(mask)).max()) != mask
