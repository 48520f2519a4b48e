"""Sums that have the bits of torch's: float32 values added up in the order in which torch adds them on one thread.

torch 2.13 sums a contiguous tensor, whatever its shape, as one row (``vectorized_inner_sum``, ``row_sum`` and
``multi_row_sum`` in aten/src/ATen/native/cpu/SumKernel.cpp). The row is taken as lines of 4 vectors. Lines are added
into a first register; after ``step`` lines it is added into a second one and begins anew, the second into a third after
``step`` of those, the third into a fourth. ``step`` is 2^max(4, c // 4) for c = ceil(log2(lines of the row)). The end:

    line    the first register plus the second, plus the third, plus the fourth
    vector  the line's first vector, plus the whole vectors left over, one by one, plus the line's other three
    sum     0 plus the elements left over, one by one, plus the lanes of the vector, one by one

A sum is fed piece by piece, and keeps less than a line of what it was fed.
"""

from __future__ import annotations

import numpy as np

from ckpttool.kernels.merge.base import Array

LANES = 8
"""Floats of a vector of torch's sum on x86-64.

With AVX-512, too: what torch registers with ``REGISTER_DISPATCH`` is not compiled for that (DispatchStub.h). And where
there is no AVX2, a vector is as long.
"""

_VECTORS = 4
_LEVELS = 4


class CascadeSum:
    """``torch.sum`` of ``size`` float32 values, bit for bit, on one thread."""

    def __init__(self, size: int, lanes: int = LANES) -> None:
        self._lanes = lanes if size >= lanes else 1  # torch adds what is shorter than a vector as vectors of one float
        self._line = _VECTORS * self._lanes
        lines = size // self._line
        self._step = 1 << max(4, (lines - 1).bit_length() // _LEVELS)
        self._missing = size
        self._sums = np.zeros((_LEVELS, self._line), np.float32)
        self._counts = [0] * _LEVELS
        self._rest = np.empty(0, np.float32)

    def add(self, values: Array) -> None:
        """Take the next values, float32, of one dimension, as many as there are."""
        self._missing -= len(values)
        if len(self._rest):
            more = self._line - len(self._rest)
            self._rest = np.concatenate([self._rest, values[:more]])
            values = values[more:]
            if len(self._rest) < self._line:
                return
            self._feed(0, self._rest[None])
        whole = len(values) // self._line * self._line
        if whole:
            self._feed(0, values[:whole].reshape(-1, self._line))
        self._rest = values[whole:].copy()

    def result(self) -> np.float32:
        """The sum, once all values are added."""
        if self._missing:
            raise ValueError(f"{self._missing} of the values are still missing")
        line = _added(self._sums[0], self._sums[1:]).reshape(_VECTORS, self._lanes)
        whole = len(self._rest) // self._lanes * self._lanes
        vector = _added(line[0], self._rest[:whole].reshape(-1, self._lanes))
        vector = _added(vector, line[1:])
        ends = np.concatenate([self._rest[whole:], vector])
        total: np.float32 = _added(np.zeros(1, np.float32), ends[:, None])[0]
        return total

    def _feed(self, level: int, lines: Array) -> None:
        """Add lines into a register, which spills into the next one whenever it has taken ``step`` of them."""
        if level == _LEVELS - 1:
            self._sums[level] = _added(self._sums[level], lines)
            return
        if self._counts[level]:
            more = self._step - self._counts[level]
            self._take(level, lines[:more])
            lines = lines[more:]
        whole = len(lines) // self._step
        if whole:
            batches = lines[: whole * self._step].reshape(whole, self._step, self._line)
            self._feed(level + 1, _added(np.zeros((whole, self._line), np.float32), batches.swapaxes(0, 1)))
        self._take(level, lines[whole * self._step :])

    def _take(self, level: int, lines: Array) -> None:
        """Add lines into a register that has room for them."""
        if not len(lines):
            return
        self._sums[level] = _added(self._sums[level], lines)
        self._counts[level] += len(lines)
        if self._counts[level] == self._step:
            spilt = self._sums[level].copy()
            self._sums[level], self._counts[level] = 0, 0
            self._feed(level + 1, spilt[None])


def _added(start: Array, rows: Array) -> Array:
    """``start`` plus each of the rows, one after the other.

    A loop, because numpy's own reductions promise no order.
    """
    total = start.copy()
    for row in rows:
        np.add(total, row, out=total)
    return total
