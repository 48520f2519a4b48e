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
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple, TypeVar, overload

from ckpttool.core.dtypes import itemsize, lookup
from ckpttool.core.encodings import Contents, Encoding, Given
from ckpttool.errors import ConflictError

_T = TypeVar("_T")


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


class AssertEqual(NamedTuple):
    """``a`` and ``b`` hold the same bytes, or the source contradicts itself."""

    a: Block
    b: Block
    shape: tuple[int, ...]
    dtype: str
    what: str
    """Tensor name for the error."""
    b_dtype: str = ""
    """Dtype of ``b`` where it differs: its elements are rounded to ``dtype`` before they are compared."""
    tied: str = ""
    """Name of the tensor of ``b`` where it is another one, which the config ties to this one."""


TIED_HINT = (
    "to use one for both, drop the other with --remove-keys; to keep both, set"
    " tie_word_embeddings to false in the config.json of the source"
)
"""A hint for tied tensors that differ."""


class AssertPadding(NamedTuple):
    """``src`` holds padding: zeros, or copies of the row at ``like``."""

    src: Block
    shape: tuple[int, ...]
    dtype: str
    like: Block | None
    """The last true row (strides of the trailing axes only), or None when only zeros are right."""
    what: str


# -- computed tensors


class StoredOperand(NamedTuple):
    """An operand as it lies in files."""

    dtype: str
    shape: tuple[int, ...]
    copies: tuple[Copy, ...]
    """From sources to the row-major operand: ``dst.offset`` counts from its first byte, ``dst.file`` means nothing."""
    label: str
    """Tensor and checkpoint for errors."""


class Scaled(NamedTuple):
    """A quantized weight and its scales: element = code * scale of its block (* factor)."""

    weight: StoredOperand
    """The codes. Two 4-bit codes lie in a byte, the first in the low half; its dtype is U8 then."""
    scale: StoredOperand
    """One scale per block, row-major over the grid of blocks."""
    block: tuple[int, ...]
    """Elements per scale along each axis of the weight."""
    code: str = ""
    """dtype of a code where that of ``weight`` is another: F4 in bytes, F8_E4M3 in I8."""
    factor: StoredOperand | None = None
    """One number for the whole weight, by which all elements are multiplied besides."""
    divides: bool = False
    """They are divided by the factor."""


class LowRank(NamedTuple):
    """``factor * up @ down``, added to a box of a matrix. Both factors are 2-D."""

    up: StoredOperand
    """[rows, rank]"""
    down: StoredOperand
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
    """Columns of the matrix that the terms mean; the weight is that matrix row by row, whatever its shape."""
    dtype: str


class RowRun(NamedTuple):
    """Rows ``[start, stop)`` of the result are rows ``first, first + 1, ...`` of operand ``source``; zeros if -1."""

    start: int
    stop: int
    source: int
    first: int


class Gathered(NamedTuple):
    """Rows picked from operands with the same columns (a vocabulary in another order)."""

    sources: tuple[Operand, ...]
    shape: tuple[int, ...]
    runs: tuple[RowRun, ...]
    """Sorted, together all rows but those in ``means``."""
    means: tuple[tuple[int, tuple[tuple[int, int], ...]], ...] = ()
    """(row, ((source, its row), ...)): the row is the mean of others."""


Operand = StoredOperand | Scaled | Adapted | Gathered


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
    """Dtype of the result, which is computed in float32."""
    method: str
    """Name in ``ckpttool.kernels.merge.METHODS``."""
    models: tuple[Operand, ...]
    base: Operand | None
    parameters: tuple[tuple[tuple[str, float | int | bool], ...], ...]
    """Parameters of each model, sorted by name."""
    whole: tuple[tuple[str, float | int | bool], ...]
    """Parameters of the merge, sorted by name."""
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
    """How a weight is quantized: the arithmetic, without names."""

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
    """The dtype as stored: U8 for two F4 codes, and where the format keeps E8M0 scales as bytes."""
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


Step = Copy | Fill | AssertEqual | AssertPadding | Compute | Quantize


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file that is read, as it was when the plan was made; a change in between is an error."""

    path: str
    size: int
    tag: str
    encoding: Encoding | None = None
    """What its bytes are decoded to while they are read; offsets of blocks count decoded bytes then."""

    @property
    def contents(self) -> Contents:
        """What blocks are read from."""
        return self.encoding or self.path


@dataclass(frozen=True, slots=True)
class Output:
    """A file that is written."""

    name: str
    """Path relative to DST, with forward slashes."""
    size: int
    literals: Sequence[tuple[int, bytes]] = ()
    """(offset, bytes) runs that do not depend on tensor data, headers for example."""
    carried: str = ""
    """Path of a companion file whose bytes become this file (no units then); "" otherwise."""
    link: bool = False
    """Whether a carried file may share its bytes with the other one (a reflink or a hard link)."""
    tag: str = "0"
    """Tag of the companion file when this plan was made."""
    checksums: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Byte at which a stored tensor begins -> where the CRC-32 of its bytes is put (4 bytes, little-endian)."""
    shared: Sequence[tuple[int, int, tuple[int, ...]]] = ()
    """(first byte, bytes, the same) of runs that stored tensors share, with zeros between them."""

    @property
    def summed(self) -> bool:
        """Whether checksums of tensors are among its literal bytes."""
        return bool(self.checksums or self.shared)

    def __post_init__(self) -> None:
        """Raises ConflictError for a name that leads out of DST, whoever thought of it."""
        if "\0" in self.name or not {"", ".", ".."}.isdisjoint(self.name.split("/")):
            raise ConflictError(f"`{self.name}` is not a name of a file in the destination", where=self.carried or ())


class WrittenTensor(NamedTuple):
    """The place of one stored tensor of the output, as a manifest lists it."""

    name: str
    file: int
    offset: int
    nbytes: int


class Unit(NamedTuple):
    """Steps that are done together and journalled as one; the steps of one unit write only their own targets."""

    name: str
    steps: tuple[Step, ...]
    stored_tensors: tuple[WrittenTensor, ...] = ()
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


class Measure(NamedTuple):
    """Totals of a unit."""

    written: int
    """Bytes that it writes, computed tensors aside."""
    checked: int
    """Bytes that it only checks."""
    files: tuple[int, ...]
    """Outputs that it writes to."""
    computes: bool
    """Whether it has computed or quantized tensors."""


STEP, TARGET = 5, 3
"""Numbers of a packed step (form, file, offset, file, offset) and of a packed target (file, offset, bytes)."""


class Units(Sequence[Unit]):
    """The units of a plan, packed; a unit is made whenever it is asked for.

    A plan has a million steps of a few dozen forms; the form is what a step is, were it not for where its blocks begin.
    So a step is kept as five numbers: its form, and file and offset of its two blocks (zeros for one that it lacks).
    That is an eighth of the memory of its tuples.
    """

    __slots__ = ("_forms", "_known", "_packed")

    def __init__(self, units: Iterable[Unit] = ()) -> None:
        self._forms: list[Step] = []
        self._known: dict[Step, int] = {}
        self._packed: list[tuple[str, str | tuple[str, ...], array[int]]] = []
        """Name; what the targets are called (one name for all, or one for each); how many steps, the steps, the
        targets."""
        for unit in units:
            self.append(unit)

    @classmethod
    def of(cls, forms: list[Step], packed: list[tuple[str, str | tuple[str, ...], array[int]]]) -> Units:
        """Units that have been packed before."""
        units = cls()
        units._forms, units._packed = forms, packed
        units._known = {s: i for i, s in enumerate(forms) if not isinstance(s, Compute | Quantize)}
        return units

    def form(self, step: Step) -> int:
        """The number of a form: a step whose blocks begin at byte 0 of file 0."""
        if type(step) is Compute or type(step) is Quantize:  # no two are alike, and to hash one takes long
            self._forms.append(step)
            return len(self._forms) - 1
        known = self._known.get(step)
        if known is None:
            known = self._known[step] = len(self._forms)
            self._forms.append(step)
        return known

    def add(self, name: str, steps: array[int], labels: Sequence[str], targets: array[int]) -> None:
        """A unit of packed steps and targets; ``labels`` are what the targets are called."""
        one = labels[0] if labels and labels.count(labels[0]) == len(labels) else tuple(labels)
        self._packed.append((name, one, array("q", (len(steps) // STEP, *steps, *targets))))

    def append(self, unit: Unit) -> None:
        """Pack a unit."""
        steps, made = [n for s in unit.steps for n in self._pack(s)], unit.stored_tensors
        self.add(unit.name, array("q", steps), [t.name for t in made], array("q", [n for t in made for n in t[1:]]))

    def _pack(self, step: Step) -> tuple[int, int, int, int, int]:
        if isinstance(step, Copy | AssertEqual):
            a, b = step[:2]
            return (self.form(type(step)(_origin(a), _origin(b), *step[2:])), a.file, a.offset, b.file, b.offset)
        if isinstance(step, Fill):
            return (self.form(step._replace(dst=_origin(step.dst))), 0, 0, step.dst.file, step.dst.offset)
        if isinstance(step, AssertPadding):
            like = step.like and _origin(step.like)
            number = self.form(step._replace(src=_origin(step.src), like=like))
            return (number, step.src.file, step.src.offset, *(step.like[:2] if step.like else (0, 0)))
        return (self.form(step), 0, 0, 0, 0)

    def step(self, form: int, f: int, x: int, g: int, y: int) -> Step:
        """A packed step as it is."""
        step = self._forms[form]
        if isinstance(step, Copy | AssertEqual):
            (_, _, a), (_, _, b) = step[:2]
            return type(step)(Block(f, x, a), Block(g, y, b), *step[2:])
        if isinstance(step, Fill):
            return step._replace(dst=Block(g, y, step.dst.strides))
        if isinstance(step, AssertPadding):
            like = step.like and Block(g, y, step.like.strides)
            return step._replace(src=Block(f, x, step.src.strides), like=like)
        return step

    def computed(self, form: int) -> Compute | Quantize | None:
        """The step behind a form, where it is a tensor that is worked out."""
        step = self._forms[form]
        return step if isinstance(step, Compute | Quantize) else None

    def measure(self) -> Iterator[Measure]:
        """Measure each unit, without making any."""
        costs = [_cost(step) for step in self._forms]
        known: dict[tuple[int, ...], Measure] = {}  # most units are one step, of few forms to few files
        for _, _, numbers in self._packed:
            end = 1 + STEP * numbers[0]
            key = (*numbers[1:end:STEP], *numbers[4:end:STEP])
            found = known.get(key)
            if found is None:
                mine = [(*costs[form], file) for form, file in zip(key[: numbers[0]], key[numbers[0] :], strict=True)]
                files = tuple({file for written, _, _, file in mine if written is not None})
                written, checked = sum([w or 0 for w, _, _, _ in mine]), sum([c for _, c, _, _ in mine])
                found = Measure(written, checked, files, any(c for _, _, c, _ in mine))
                if numbers[0] == 1:
                    known[key] = found
            yield found

    def stored_tensors(self, at: int) -> tuple[WrittenTensor, ...]:
        """The tensors that one unit writes, without its steps."""
        _, labels, numbers = self._packed[at]
        ends = range(1 + STEP * numbers[0], len(numbers), TARGET)
        names = (labels,) * len(ends) if isinstance(labels, str) else labels
        return tuple([WrittenTensor(n, *numbers[i : i + TARGET]) for n, i in zip(names, ends, strict=True)])

    @property
    def forms(self) -> Sequence[Step]:
        """Forms by their numbers: steps whose blocks begin at byte 0 of file 0."""
        return self._forms

    def packed_steps(self, at: int) -> array[int]:
        """The steps of a unit, ``STEP`` numbers each."""
        numbers = self._packed[at][2]
        return numbers[1 : 1 + STEP * numbers[0]]

    @property
    def boxes(self) -> int:
        """Steps that move something."""
        moves = [type(step) is Copy for step in self._forms]
        return sum(moves[form] for _, _, numbers in self._packed for form in numbers[1 : 1 + STEP * numbers[0] : STEP])

    def lines(self) -> Iterator[bytes]:
        """All that decides what is written, for a digest."""
        for step in self._forms:
            yield repr(tuple(step)).encode(errors="backslashreplace")
        for name, _, numbers in self._packed:
            yield f"\n{name}\n".encode(errors="backslashreplace")
            yield numbers.tobytes()

    def __len__(self) -> int:
        return len(self._packed)

    @overload
    def __getitem__(self, at: int) -> Unit: ...
    @overload
    def __getitem__(self, at: slice) -> list[Unit]: ...
    def __getitem__(self, at: int | slice) -> Unit | list[Unit]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        name, _, numbers = self._packed[at]
        end = 1 + STEP * numbers[0]
        steps = tuple([self.step(*numbers[i : i + STEP]) for i in range(1, end, STEP)])
        return Unit(name, steps, self.stored_tensors(at))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Units) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Callable[..., Units], tuple[object, ...]]:
        """For another machine: what all units have of one kind behind each other, deflated, since it repeats itself."""
        names = [name for name, _, _ in self._packed]
        labels = {i: label for i, (name, label, _) in enumerate(self._packed) if label != name}
        text = "".join(names).encode(errors="surrogatepass")
        lengths = array(
            "I",
            [n for name, (_, _, numbers) in zip(names, self._packed, strict=True) for n in (len(name), len(numbers))],
        )
        numbers = b"".join([numbers for _, _, numbers in self._packed])
        return _unpacked, (self._forms, *[zlib.compress(b, 1) for b in (text, lengths, numbers)], labels)


def _unpacked(
    forms: list[Step], text: bytes, lengths: bytes, numbers: bytes, labels: Mapping[int, str | tuple[str, ...]]
) -> Units:
    """Restores the pickled state."""
    names = zlib.decompress(text).decode(errors="surrogatepass")
    sizes, every = array("I", zlib.decompress(lengths)), array("q", zlib.decompress(numbers))
    at = begin = 0
    packed: list[tuple[str, str | tuple[str, ...], array[int]]] = []
    for n, m in zip(sizes[::2], sizes[1::2], strict=True):
        name = names[at : at + n]
        packed.append((name, name, every[begin : begin + m]))
        at, begin = at + n, begin + m
    for i, label in labels.items():
        packed[i] = packed[i][0], label, packed[i][2]
    return Units.of(forms, packed)


def _cost(step: Step) -> tuple[int | None, int, bool]:
    """Bytes that a step writes, None where it writes none by itself; bytes that it checks; whether it computes."""
    if isinstance(step, Copy | Fill):
        dtype = step.dst_dtype if isinstance(step, Copy) else step.dtype
        return prod(step.shape) * lookup(dtype).bits // 8, 0, False
    if isinstance(step, AssertEqual | AssertPadding):
        return None, prod(step.shape) * lookup(step.dtype).bits // 8, False
    return None, 0, True


def _origin(block: Block) -> Block:
    """The block as it would lie at byte 0 of file 0."""
    return Block(0, 0, block.strides)


class Randomness(NamedTuple):
    """The source of the random numbers of computed tensors."""

    stream: str
    """``counter``: each number follows from (seed, tensor, model, element). ``mergekit``: torch's generator, which the
    tensors draw from one after the other."""
    seed: int
    order: tuple[tuple[str, int, tuple[bool, ...], str], ...] = ()
    """(tensor, elements, which models draw, dtype in which mergekit would work), for ``mergekit``."""


@dataclass(slots=True)
class Plan:
    """All steps; ``notes`` are sentences for the report (what was inferred, derived or dropped)."""

    sources: list[SourceFile]
    outputs: list[Output]
    units: Sequence[Unit]
    """``Units`` where they are many."""
    notes: list[str] = field(default_factory=list)
    ranks: list[list[int]] = field(default_factory=list)
    """Output file indices of each target rank, for the report."""
    randomness: Randomness | None = None

    def __repr__(self) -> str:
        """``<Plan: 39 units, 6 outputs, 441,211 bytes>``."""
        return f"<Plan: {len(self.units):,} units, {len(self.outputs):,} outputs, {self.bytes_written:,} bytes>"

    @property
    def bytes_written(self) -> int:
        return sum(o.size for o in self.outputs)

    @property
    def boxes(self) -> int:
        return self.packed().boxes

    def digest(self) -> str:
        """Hash of everything that decides the output's bytes; a resumed run must have the same one."""
        h = hashlib.sha256()
        for line in self._lines():
            h.update(line)
        return h.hexdigest()

    def _lines(self) -> Iterator[bytes]:
        # File names need not be UTF-8, and tensor names come from other people's headers.
        for s in self.sources:
            yield os.fsencode(f"source {s.contents} {s.size} {s.tag}\n")
            for part in s.encoding.parts if s.encoding is not None else ():
                if isinstance(part, Given):
                    yield f"given {part.start} {part.data}\n".encode()
        for o in self.outputs:
            yield os.fsencode(f"output {o.name} {o.size} {o.carried} {o.tag}{' link' if o.link else ''}\n")
            for offset, data in o.literals:
                yield f"{offset} ".encode() + data
        if self.randomness is not None:
            yield repr(tuple(self.randomness)).encode(errors="backslashreplace")
        yield from self.packed().lines()

    def packed(self) -> Units:
        """The units, packed."""
        return self.units if isinstance(self.units, Units) else Units(self.units)


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


def joined(things: Sequence[_T], links: Iterable[tuple[int, int]]) -> list[list[_T]]:
    """What belongs together, directly or through others, when ``links`` are pairs of positions that do; in order."""
    parent = list(range(len(things)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for a, b in links:
        parent[root(b)] = root(a)
    out: dict[int, list[_T]] = {}
    for i, thing in enumerate(things):
        out.setdefault(root(i), []).append(thing)
    return list(out.values())
