"""Copies seen as boxes of a row-major array: the part of a copy that a stretch of the array takes part in.

A computed tensor is worked out stretch by stretch. Its operands come from copies *into* the row-major tensor, its
result goes out through copies *from* it; ``clip`` cuts either to the stretch that is wanted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ckpttool.core.dtypes import itemsize, numpy_dtype
from ckpttool.core.plan import Block, Copy
from ckpttool.errors import VerifyError
from ckpttool.execute.blocks import Mover
from ckpttool.execute.files import SECTOR, UNCACHED_FROM, span
from ckpttool.execute.permute import Array, store
from ckpttool.execute.reader import Bytes, offsets, read_block
from ckpttool.kernels.cast import cast

_BLOCK = 1 << 20
"""Bytes that are read in one go where they are not read to their place."""


def clip(copy: Copy, lo: int, hi: int, *, inner: str) -> Iterator[Copy]:
    """The parts of ``copy`` whose bytes of the array lie in ``[lo, hi)``; ``inner`` ("src" or "dst") is its side.

    On that side every axis must step over all that the axes behind it reach, as in any box of a row-major array; no
    element lies across a bound.
    """
    mine, other = (copy.src, copy.dst) if inner == "src" else (copy.dst, copy.src)
    size = itemsize(copy.src_dtype if inner == "src" else copy.dst_dtype)
    axes = sorted(zip(copy.shape, mine.strides, other.strides, strict=True), key=lambda axis: -axis[1])
    for shape, at, outer_at in _clip(axes, mine.offset, other.offset, size, lo, hi):
        kept = axes[len(axes) - len(shape) :]
        a = Block(mine.file, at, tuple([s for _, s, _ in kept]))
        b = Block(other.file, outer_at, tuple([s for _, _, s in kept]))
        src, dst = (a, b) if inner == "src" else (b, a)
        yield Copy(src, dst, shape, copy.src_dtype, copy.dst_dtype)


def _clip(
    axes: Sequence[tuple[int, int, int]], at: int, other: int, size: int, lo: int, hi: int
) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """(shape of the last axes, offset inside, offset outside) of the boxes that make up the part."""
    if not axes:
        if lo <= at < hi:
            yield (), at, other
        return
    n, step, over = axes[0]
    reach = size + sum([(m - 1) * s for m, s, _ in axes[1:]])
    first = max(0, (lo - at - reach) // step + 1)  # the first index that ends behind lo
    last = min(n, -((at - hi) // step))  # the first one that begins at hi or behind
    whole = max(first, -((at - lo) // step)), min(last, (hi - at - reach) // step + 1)
    if whole[0] >= whole[1]:
        whole = (last, last)
    for i in range(first, whole[0]):
        yield from _clip(axes[1:], at + i * step, other + i * over, size, lo, hi)
    if whole[0] < whole[1]:
        shape = (whole[1] - whole[0], *[m for m, _, _ in axes[1:]])
        yield shape, at + whole[0] * step, other + whole[0] * over
    for i in range(whole[1], last):
        yield from _clip(axes[1:], at + i * step, other + i * over, size, lo, hi)


def is_run(shape: Sequence[int], strides: Sequence[int], size: int) -> bool:
    """Whether a block is one run of bytes, in order."""
    for n, s in zip(reversed(shape), reversed(strides), strict=True):
        if n != 1 and s != size:
            return False
        size *= n
    return True


def gather(carrier: Mover, copies: Sequence[Copy], lo: int, hi: int, buffer: Bytes, *, once: bool) -> None:
    """Read bytes ``[lo, hi)`` of an operand into ``buffer``; elements stored in another dtype are cast to its own."""
    for copy in copies:
        size = itemsize(copy.dst_dtype)
        same = copy.src_dtype == copy.dst_dtype
        if same and len(copy.shape) == 1 and copy.src.strides[0] == copy.dst.strides[0] == size:
            a, b = max(lo, copy.dst.offset), min(hi, copy.dst.offset + copy.shape[0] * size)
            if a < b:
                part = buffer[a - lo : b - lo].data
                carrier.read(copy.src.file, copy.src.offset + a - copy.dst.offset, (part,), once=once)
            continue
        for c in clip(copy, lo, hi, inner="dst"):
            if same and is_run(c.shape, c.src.strides, size) and is_run(c.shape, c.dst.strides, size):
                n = size * int(np.prod(c.shape, dtype=np.int64))
                at = c.dst.offset - lo
                carrier.read(c.src.file, c.src.offset, (buffer[at : at + n].data,), once=once)
                continue
            for d in _bounded(c):
                _gather_block(carrier, d, lo, buffer, once=once)


def _gather_block(carrier: Mover, c: Copy, lo: int, buffer: Bytes, *, once: bool) -> None:
    """Read a block by way of another one, which takes its bytes as they are stored."""
    kinds = numpy_dtype(c.src_dtype), numpy_dtype(c.dst_dtype)
    if is_run(c.shape, c.src.strides, kinds[0].itemsize):
        block: Array = np.empty(c.shape, kinds[0])
        carrier.read(c.src.file, c.src.offset, (block.reshape(-1).view(np.uint8).data,), once=once)
    else:
        path = carrier.sources[c.src.file]
        block = read_block(path, c.src.offset, c.src.strides, c.shape, c.src_dtype, files=carrier.pool)
        carrier.bytes_read += block.nbytes
    target: Array = np.ndarray(c.shape, kinds[1], buffer.data, c.dst.offset - lo, c.dst.strides)
    store(block, target)


def _bounded(c: Copy) -> Iterator[Copy]:
    """A copy in pieces of at most ``_BLOCK`` bytes, along the axis that takes the longest steps in the source.

    Runs of the source stay as long as they are, and what is read by way of another block takes little memory.
    """
    size = itemsize(c.src_dtype)
    nbytes = size * int(np.prod(c.shape, dtype=np.int64))
    if nbytes <= _BLOCK or not c.shape:
        yield c
        return
    axis = max(range(len(c.shape)), key=lambda i: c.src.strides[i] if c.shape[i] > 1 else -1)
    n = c.shape[axis]
    step = max(1, n * _BLOCK // nbytes)
    for at in range(0, n, step):
        shape = (*c.shape[:axis], min(step, n - at), *c.shape[axis + 1 :])
        src = c.src._replace(offset=c.src.offset + at * c.src.strides[axis])
        dst = c.dst._replace(offset=c.dst.offset + at * c.dst.strides[axis])
        yield c._replace(src=src, dst=dst, shape=shape)


def is_turned(copies: Sequence[Copy]) -> bool:
    """Whether the elements that follow each other in an operand lie apart in the files: a stored transpose, say."""
    for c in copies:
        last = max(range(len(c.shape)), key=lambda i: -c.dst.strides[i] if c.shape[i] > 1 else -(1 << 62))
        if any(n > 1 and abs(s) < abs(c.src.strides[last]) for n, s in zip(c.shape, c.src.strides, strict=True)):
            return True
    return False


Emit = Callable[[Mover, Sequence[Copy], int, int, Bytes], None]
"""Does something with bytes ``[lo, hi)`` of a result: ``scatter`` or ``compare``."""


def scatter(carrier: Mover, copies: Sequence[Copy], lo: int, hi: int, buffer: Bytes) -> None:
    """Write bytes ``[lo, hi)`` of a result, which lie in ``buffer``, to where the copies say."""
    for file, offset, run, scattered in _runs(copies, lo, hi, buffer):
        carrier.write(file, offset, run, scattered=scattered)


def compare(carrier: Mover, copies: Sequence[Copy], lo: int, hi: int, buffer: Bytes) -> None:
    """Read back what ``scatter`` has written. Raises VerifyError where it is something else."""
    for file, offset, run, _ in _runs(copies, lo, hi, buffer):
        held = np.empty(run.nbytes, np.uint8)
        carrier.read_back(file, offset, held.data)
        if held.data != run:
            raise VerifyError("bytes differ", where=f"{carrier.outputs[file]} {span(offset, run.nbytes)}")


def _runs(copies: Sequence[Copy], lo: int, hi: int, buffer: Bytes) -> Iterator[tuple[int, int, memoryview, bool]]:
    """(output, offset, bytes, whether others will share their pages) of what the copies write."""
    for copy in copies:
        for c in clip(copy, lo, hi, inner="src"):
            kinds = numpy_dtype(c.src_dtype), numpy_dtype(c.dst_dtype)
            block: Array = np.ndarray(c.shape, kinds[0], buffer.data, c.src.offset - lo, c.src.strides)
            order = sorted(range(len(c.shape)), key=lambda i: -c.dst.strides[i])
            block = block.transpose(order)
            strides = tuple([c.dst.strides[i] for i in order])
            if c.src_dtype != c.dst_dtype:
                turned = np.empty(block.shape, kinds[1])
                cast(block, turned)
                block = turned
            block = np.ascontiguousarray(block)
            k, run = block.ndim, block.itemsize
            while k and (block.shape[k - 1] == 1 or strides[k - 1] == run):
                run *= block.shape[k - 1]
                k -= 1
            view = block.reshape(-1).view(np.uint8).data
            at = 0
            for start in offsets(block.shape[:k], strides[:k]):
                yield c.dst.file, c.dst.offset + start, view[at : at + run], run < view.nbytes
                at += run


def as_in_file(memory: Bytes, outputs: Sequence[Copy], at: int) -> Bytes:
    """``memory`` from where on byte ``at`` of a result can be written directly; it has a sector to spare."""
    if not outputs:
        return memory
    first = outputs[0]
    start = (first.dst.offset - first.src.offset + at - memory.ctypes.data) % SECTOR
    return memory[start if start % itemsize(first.src_dtype) == 0 else 0 :]


Seen = Callable[[int, int], None]
"""Is told how many elements the passes over a tensor have seen, and of how many. Methods may take another number of
passes than they are known to, so the count may stand still and may jump; it never goes back."""


def unseen(_elements: int, _of: int) -> None:
    """No-op progress callback."""


class WriteBehind:
    """Writes one stretch of a result while the next one is worked out; a direct write would only be waited for."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._thread: threading.Thread | None = None
        self._failed: list[BaseException] = []

    def now(self, carrier: Mover, outputs: Sequence[Copy], lo: int, hi: int, memory: Bytes) -> None:
        """Write ``memory`` before anything else is done."""
        self.wait()
        self._emit(carrier, outputs, lo, hi, memory)

    def start(self, carrier: Mover, outputs: Sequence[Copy], lo: int, hi: int, memory: Bytes) -> None:
        """Begin to write ``memory``, which is in use until the next call has returned."""
        if memory.nbytes < UNCACHED_FROM:
            self.now(carrier, outputs, lo, hi, memory)
            return
        self.wait()

        def write() -> None:
            try:
                self._emit(carrier, outputs, lo, hi, memory)
            except BaseException as e:  # noqa: BLE001 - raised again by whoever waits
                self._failed.append(e)

        self._thread = threading.Thread(target=write, name="behind", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until everything is written. Raises what writing raised."""
        self.end()
        if self._failed:
            raise self._failed.pop()

    def end(self) -> None:
        """Until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
