"""A plan: every step that writes the output, complete before a byte is written. Pure, no I/O.

    Plan
      sources   files that are read, with the size and time they had when planned
      outputs   files that are written: name, exact size, literal bytes (headers), or a companion carried over
      units     the work, in order; a unit is the smallest thing that is scheduled, journalled and resumed
        Copy    a strided block of a source -> a strided block of an output (a cast when the dtypes differ)
        Fill    a constant into a strided block of an output (padding)
        Same    two strided blocks of sources must be equal (replicas)
        Padding a strided block of a source must be padding (zeros, or copies of the row before it)
        Compute a tensor that is worked out from operands, and the Copies that put it where the output wants it
        Quantize a tensor that is rounded to codes with a scale for each block; likewise, for codes and scales

A block is (file, byte offset, byte stride per axis); the shape belongs to the step. Boxes, never byte runs: a
row-parallel cut of a 70B model is a thousand boxes but ten million runs.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from ckpttool.dtypes import itemsize, lookup


class Block(NamedTuple):
    """A strided N-d block in a file."""

    file: int
    """Index into ``Plan.sources`` or ``Plan.outputs``."""
    offset: int
    """Byte of the first element."""
    strides: tuple[int, ...]
    """Bytes from one element to the next, per axis of the step's shape; never negative."""


class Copy(NamedTuple):
    """Move ``shape`` elements from ``src`` to ``dst``; cast when the dtypes differ."""

    src: Block
    dst: Block
    shape: tuple[int, ...]
    src_dtype: str
    dst_dtype: str


class Fill(NamedTuple):
    """Write zeros to ``dst``."""

    dst: Block
    shape: tuple[int, ...]
    dtype: str


class Same(NamedTuple):
    """``a`` and ``b`` hold the same bytes, or the source contradicts itself."""

    a: Block
    b: Block
    shape: tuple[int, ...]
    dtype: str
    what: str
    """Tensor name for the error."""
    b_dtype: str = ""
    """Of ``b`` where it is another: its elements are rounded to ``dtype`` before they are compared."""


class Padding(NamedTuple):
    """``src`` holds padding: zeros, or copies of the row at ``like``."""

    src: Block
    shape: tuple[int, ...]
    dtype: str
    like: Block | None
    """The last true row (strides of the trailing axes only), or None when only zeros are right."""
    what: str


# -- computed tensors


class Stored(NamedTuple):
    """An operand as it lies in files."""

    dtype: str
    shape: tuple[int, ...]
    copies: tuple[Copy, ...]
    """From sources to the row-major operand: ``dst.offset`` counts from its first byte, ``dst.file`` means nothing."""
    label: str
    """Tensor and checkpoint for errors."""


class Scaled(NamedTuple):
    """A quantised weight and its scales: element = code * scale of its block (* factor)."""

    weight: Stored
    """The codes. Two 4-bit codes lie in a byte, the first in the low half; its dtype is U8 then."""
    scale: Stored
    """One scale per block, row-major over the grid of blocks."""
    block: tuple[int, ...]
    """Elements per scale along each axis of the weight."""
    code: str = ""
    """dtype of a code where that of ``weight`` is another: F4 in bytes, F8_E4M3 in I8."""
    factor: Stored | None = None
    """One number for the whole weight, by which all elements are multiplied besides."""
    divides: bool = False
    """They are divided by the factor."""


class LowRank(NamedTuple):
    """``factor * up @ down``, added to a box of a matrix. Both factors are 2-D."""

    up: Stored
    """[rows, rank]"""
    down: Stored
    """[rank, columns]"""
    factor: float
    row: int = 0
    """First row of the box."""
    column: int = 0
    """First column of the box."""


class Adapted(NamedTuple):
    """A weight with its low-rank adapters added in float32, rounded to ``dtype``."""

    weight: Operand
    terms: tuple[LowRank, ...]
    columns: int
    """Of the matrix that the terms mean; the weight is that matrix row by row, whatever its shape."""
    dtype: str


class Run(NamedTuple):
    """Rows ``[start, stop)`` of the result are rows ``first, first + 1, ...`` of operand ``source``; zeros if -1."""

    start: int
    stop: int
    source: int
    first: int


class Gathered(NamedTuple):
    """Rows picked from operands with the same columns (a vocabulary in another order)."""

    sources: tuple[Operand, ...]
    shape: tuple[int, ...]
    runs: tuple[Run, ...]
    """Sorted, together all rows but those in ``means``."""
    means: tuple[tuple[int, tuple[tuple[int, int], ...]], ...] = ()
    """(row, ((source, its row), ...)): the row is the mean of others."""


Operand = Stored | Scaled | Adapted | Gathered


def shape_of(operand: Operand) -> tuple[int, ...]:
    """Shape of the tensor that an operand gives."""
    if isinstance(operand, Scaled):
        shape = operand.weight.shape
        return (*shape[:-1], 2 * shape[-1]) if operand.code == "F4" else shape
    return shape_of(operand.weight) if isinstance(operand, Adapted) else operand.shape


class Compute(NamedTuple):
    """A tensor that is worked out block by block, row-major, by a merge method."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Of the result, which is worked out in float32."""
    method: str
    """Name in ``ckpttool.kernels.merge.METHODS``."""
    models: tuple[Operand, ...]
    base: Operand | None
    parameters: tuple[tuple[tuple[str, float | int | bool], ...], ...]
    """Of each model, sorted by name."""
    whole: tuple[tuple[str, float | int | bool], ...]
    """Of the merge, sorted by name."""
    base_at: int | None
    """Place of the base in the recipe's list of models."""
    finite: bool = True
    """NaN or an infinity in the result is an error."""
    outputs: tuple[Copy, ...] = ()
    """From the row-major result (``src.offset`` counts from its first byte) to outputs."""

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The models, then the base if there is one."""
        return self.models if self.base is None else (*self.models, self.base)


class Rounding(NamedTuple):
    """How a weight is quantised: the arithmetic, without names."""

    scheme: str
    """Name in ``ckpttool.kernels.quantize.SCHEMES``: tensor, channel, block, mxfp8, nvfp4, mxfp4."""
    code: str
    """dtype of a code: F8_E4M3, F8_E5M2 or F4."""
    scale: str
    """dtype in which a scale is worked out and stored: F32, BF16, F8_E8M0 or (nvfp4) F8_E4M3."""
    block: tuple[int, int]
    """Elements per scale along the last two axes; 0 is all of the axis."""
    powers: bool = False
    """Scales are powers of two, rounded up, whatever dtype they are stored in."""
    divides: bool = True
    """The factor of nvfp4 is one by which elements are divided (compressed-tensors), not multiplied (ModelOpt)."""


class Result(NamedTuple):
    """One tensor that a Quantize makes."""

    role: str
    """``codes``, ``scales`` or ``factor``."""
    dtype: str
    """As stored: U8 for two F4 codes, and where the format keeps E8M0 scales as bytes."""
    shape: tuple[int, ...]
    outputs: tuple[Copy, ...] = ()
    """From the row-major result (``src.offset`` counts from its first byte) to outputs."""


class Quantize(NamedTuple):
    """A weight that is rounded to codes, with a scale for each block of it."""

    name: str
    shape: tuple[int, ...]
    """[..., rows, columns] of the weight; blocks lie over the last two axes."""
    operand: Operand
    rounding: Rounding
    results: tuple[Result, ...]
    beside: tuple[Operand, ...] = ()
    """Weights that share their factor with this one, because engines hold them as one: q, k and v."""

    @property
    def operands(self) -> tuple[Operand, ...]:
        """What is read."""
        return (self.operand,)

    @property
    def outputs(self) -> tuple[Copy, ...]:
        """What is written, of all results."""
        return tuple([c for r in self.results for c in r.outputs])


Step = Copy | Fill | Same | Padding | Compute | Quantize


@dataclass(frozen=True, slots=True)
class Source:
    """A file that is read, as it was when the plan was made; a change in between is an error."""

    path: str
    size: int
    mtime_ns: int
    label: str = ""
    """Stands for the path in the digest, where that is another in every run."""


@dataclass(frozen=True, slots=True)
class Output:
    """A file that is written."""

    name: str
    """Path relative to DST, with forward slashes."""
    size: int
    literals: tuple[tuple[int, bytes], ...] = ()
    """(offset, bytes) runs that do not depend on tensor data, headers for example."""
    carried: str = ""
    """Path of a companion file whose bytes become this file (no units then); "" otherwise."""
    link: bool = False
    """Whether a carried file may share its bytes with the other one (a reflink or a hard link)."""


class Target(NamedTuple):
    """Where one stored tensor of the output lies; what a manifest lists."""

    name: str
    file: int
    offset: int
    nbytes: int


class Unit(NamedTuple):
    """Steps that are done together and journalled as one; the steps of one unit write only their own targets."""

    name: str
    steps: tuple[Step, ...]
    targets: tuple[Target, ...] = ()
    """Stored tensors that this unit, and no other, writes completely."""

    @property
    def written(self) -> int:
        """Bytes that the unit writes."""
        total = 0
        for s in self.steps:
            if type(s) is Copy:
                total += prod(s.shape) * lookup(s.dst_dtype).bits // 8
            elif type(s) is Fill:
                total += prod(s.shape) * itemsize(s.dtype)
            elif type(s) is Compute or type(s) is Quantize:
                total += sum(prod(c.shape) * lookup(c.dst_dtype).bits // 8 for c in s.outputs)
        return total


class Randomness(NamedTuple):
    """Where the random numbers of computed tensors come from."""

    stream: str
    """``counter``: each number follows from (seed, tensor, model, element). ``mergekit``: torch's generator, which the
    tensors draw from one after the other."""
    seed: int
    order: tuple[tuple[str, int, tuple[bool, ...], str], ...] = ()
    """(tensor, elements, which models draw, dtype in which mergekit would work), for ``mergekit``."""


@dataclass(slots=True)
class Plan:
    """All steps; ``notes`` are sentences for the report (what was inferred, derived or dropped)."""

    sources: list[Source]
    outputs: list[Output]
    units: list[Unit]
    notes: list[str] = field(default_factory=list)
    ranks: list[list[int]] = field(default_factory=list)
    """Output file indices of each target rank, for the report."""
    randomness: Randomness | None = None

    @property
    def bytes_written(self) -> int:
        return sum(o.size for o in self.outputs)

    @property
    def boxes(self) -> int:
        return sum(1 for u in self.units for s in u.steps if type(s) is Copy)

    def digest(self) -> str:
        """Hash of everything that decides the output's bytes; a resumed run must have the same one."""
        h = hashlib.sha256()
        for line in self._lines():
            h.update(line)
        return h.hexdigest()

    def _lines(self) -> Iterator[bytes]:
        # File names need not be UTF-8, and tensor names come from other people's headers.
        for s in self.sources:
            yield os.fsencode(f"source {s.label or s.path} {s.size} {s.mtime_ns}\n")
        for o in self.outputs:
            yield os.fsencode(f"output {o.name} {o.size} {o.carried}{' link' if o.link else ''}\n")
            for offset, data in o.literals:
                yield f"{offset} ".encode() + data
        if self.randomness is not None:
            yield repr(tuple(self.randomness)).encode(errors="backslashreplace")
        for u in self.units:
            yield f"{u.name}\n".encode(errors="backslashreplace")
            yield from (repr(tuple(s)).encode(errors="backslashreplace") for s in u.steps)


def merged_axes(shape: Sequence[int], *strides: Sequence[int]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Drop axes of one element and join neighbours that are contiguous in every block.

    Returns (shape, one stride tuple per block). Steps are stored in this form, so an executor sees the fewest loops.
    """
    dims: list[tuple[int, tuple[int, ...]]] = []
    for n, step in zip(shape, zip(*strides, strict=True), strict=True):
        if n == 1:
            continue
        if dims and all(outer == inner * n for outer, inner in zip(dims[-1][1], step, strict=True)):
            dims[-1] = (dims[-1][0] * n, step)
        else:
            dims.append((n, step))
    return tuple([n for n, _ in dims]), [tuple([d[1][i] for d in dims]) for i in range(len(strides))]
