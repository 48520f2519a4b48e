"""The catalog: what a checkpoint holds, as logical tensors and the byte ranges that make them up.

    Catalog
      files       DataFile: place, size, tag of every file that holds tensor bytes
      tensors     LogicalTensor by key: the whole tensor as a one-rank model would hold it (dtype, global shape)
        pieces    Piece: "this box of that stored tensor is that box of this logical tensor"
          stored  StoredTensor: what one file holds: name, dtype, shape, (file, byte offset), strides, rank

Formats make stored tensors, layout makes pieces, everything after that only sees boxes.
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple, TypeVar, overload

from ckpttool.core.dtypes import nbytes
from ckpttool.core.files import DataFile
from ckpttool.core.geometry import Box, BoxIndex, contiguous_strides, first_overlap, uncovered, whole
from ckpttool.core.words import count
from ckpttool.errors import ConflictError, IncompleteError


class Key(NamedTuple):
    """The identity of a logical tensor: the same name in two components is two tensors."""

    name: str
    component: str = "model"
    state: str = ""

    def __str__(self) -> str:
        if self.component == "model":
            return self.name
        return f"{self.component}/{self.name}" + (f"/{self.state}" if self.state else "")


class StoredTensor(NamedTuple):
    """A tensor as one file stores it, under one name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int
    """Index into ``Catalog.files``."""
    offset: int
    """Byte of the first element in that file."""
    rank: int = 0
    strides: tuple[int, ...] | None = None
    """Elements from one to the next per axis; None is row-major."""
    component: str = "model"
    state: str = ""
    """State of an optimizer: ``moment1_0`` and so on. ``name`` is that of the parameter in every component."""

    @property
    def key(self) -> Key:
        return Key(self.name, self.component, self.state)

    @property
    def nbytes(self) -> int:
        return nbytes(self.dtype, prod(self.shape), where=self.name)

    @property
    def element_strides(self) -> tuple[int, ...]:
        return contiguous_strides(self.shape) if self.strides is None else self.strides


COMPONENTS = ("model", "adapter", "master_weights", "optimizer", "ema")
"""All that a checkpoint can hold of a parameter, in the order in which they are written."""

SHARDED = -1
"""``StoredTensor.file`` of a rank's tensor that no file holds in one run: ``offset`` then is its index into the
``shards`` of the stored checkpoint."""


SHAPE_FROM_RULES = (-1,)
"""Shape of an ``SHARDED`` tensor that its files do not tell: what the rules give the rank of the model's tensor."""


class FlatShard(NamedTuple):
    """Elements ``[start, start + n)`` of a rank's row-major tensor, n being the length of ``stored`` (1-D).

    What lies beyond the tensor's last element is padding.
    """

    start: int
    stored: StoredTensor


class Piece(NamedTuple):
    """``stored_box`` of ``stored`` is ``logical_box`` of the logical tensor; both boxes have the same shape."""

    stored: StoredTensor
    stored_box: Box
    logical_box: Box


_T = TypeVar("_T")


class _Alike(Sequence[_T]):
    """Parts of one tensor whose stored tensors differ in shape and place only, packed; each is made when asked for.

    A thousand ranks that share an optimizer have a million parts, which would be a gigabyte.
    """

    __slots__ = ("files", "like", "offsets")

    def __init__(self, like: StoredTensor, files: tuple[int, ...], offsets: array[int]) -> None:
        self.like = like
        """The fields that they share."""
        self.files, self.offsets = files, offsets

    def stored(self, at: int, shape: tuple[int, ...]) -> StoredTensor:
        """One of the stored tensors."""
        name, dtype, *_, rank, _, component, state = self.like
        return StoredTensor(name, dtype, shape, self.files[at], self.offsets[at], rank, None, component, state)

    @abstractmethod
    def one(self, at: int) -> _T:
        """One of the parts."""

    def __len__(self) -> int:
        return len(self.files)

    def __iter__(self) -> Iterator[_T]:
        return map(self.one, range(len(self.files)))

    @overload
    def __getitem__(self, at: int) -> _T: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[_T]: ...
    def __getitem__(self, at: int | slice) -> _T | Sequence[_T]:
        here = range(len(self.files))[at]
        return self.one(here) if isinstance(here, int) else tuple([self.one(i) for i in here])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]


class FlatShards(_Alike[FlatShard]):
    """Shards of one tensor."""

    __slots__ = ("spans",)

    def __init__(
        self, like: StoredTensor, files: tuple[int, ...], offsets: array[int], spans: tuple[tuple[int, int], ...]
    ) -> None:
        super().__init__(like, files, offsets)
        self.spans = spans
        """(start, elements) of each."""

    def one(self, at: int) -> FlatShard:
        start, n = self.spans[at]
        return FlatShard(start, self.stored(at, (n,)))


class Pieces(_Alike[Piece]):
    """Pieces of one tensor, each the whole of a stored tensor."""

    __slots__ = ("boxes",)

    def __init__(
        self, like: StoredTensor, files: tuple[int, ...], offsets: array[int], boxes: tuple[tuple[Box, Box], ...]
    ) -> None:
        super().__init__(like, files, offsets)
        self.boxes = boxes
        """The boxes of each piece; tensors that are cut alike share them."""

    def one(self, at: int) -> Piece:
        local, box = self.boxes[at]
        return Piece(self.stored(at, local.stop), local, box)


def packed_shards(found: Sequence[FlatShard]) -> Sequence[FlatShard]:
    """The same, packed where they are alike."""
    like = found[0].stored
    common = (*like[:2], *like[5:])
    if any((*t[:2], *t[5:]) != common for _, t in found) or like.strides is not None:
        return tuple(found)
    files, spans = tuple([t.file for _, t in found]), tuple([(start, t.shape[0]) for start, t in found])
    return FlatShards(like, _shared(files), array("q", [t.offset for _, t in found]), _shared(spans))


@lru_cache(maxsize=1024)
def _shared(value: tuple[_T, ...]) -> tuple[_T, ...]:
    """One object for equal ones."""
    return value


class Pad(NamedTuple):
    """``stored_box`` of ``stored`` is padding of no logical tensor; the row before it may have been copied."""

    stored: StoredTensor
    stored_box: Box
    free: bool = False
    """It may hold anything, so nothing is checked."""


class RankTensor(NamedTuple):
    """The share of a logical tensor that one rank of a target stores."""

    name: str
    """The name in the rank's file; layers may be numbered locally."""
    dtype: str
    shape: tuple[int, ...]
    """Shape of the stored tensor, padding included."""
    key: str
    """The logical tensor, as ``str(Key)``: for model weights their name."""
    whole: tuple[int, ...]
    """Shape of the logical tensor."""
    boxes: tuple[tuple[Box, Box], ...]
    """(box in the stored tensor, box in the logical tensor)."""
    pads: tuple[Box, ...] = ()
    """Boxes of the stored tensor that are padding."""
    component: str = "model"
    state: str = ""
    part: int = 0
    """Number of the block, for a tensor that a format stores as several blocks one behind the other."""
    expert: bool = False
    """Belongs to some of the ranks only because they hold different experts."""

    @property
    def slot(self) -> str:
        """What the tensor is called among all that its rank stores; ``name`` alone says it for model weights."""
        if self.component == "model" and not self.part:
            return self.name
        return f"{self.component}:{self.name}/{self.state}#{self.part}"


class RankTensors(Sequence[RankTensor]):
    """What a rank stores, packed; each is made whenever it is asked for.

    Tensor-parallel ranks store the same tensors, and cut them in a few ways. So each is kept as two numbers: which one
    it is, and how it is cut. ``share_index_with`` is what another rank stores: the two then number alike.
    """

    __slots__ = ("_cuts", "_numbers", "_packed", "_what")

    def __init__(self, tensors: Iterable[RankTensor] = (), share_index_with: RankTensors | None = None) -> None:
        self._what: list[tuple[Any, ...]] = []
        self._cuts: list[tuple[Any, ...]] = []
        self._numbers: dict[tuple[Any, ...], int] = {}
        if (other := share_index_with) is not None:
            self._what, self._cuts, self._numbers = other._what, other._cuts, other._numbers  # noqa: SLF001
        self._packed = array("I")
        for t in tensors:
            self.append(t)

    def append(self, t: RankTensor) -> None:
        """Add a tensor behind the others."""
        name, dtype, shape, key, full, boxes, pads, *rest = t
        what = (name, dtype, key, full, *rest)
        number = self._numbers.get(what)
        if number is None:
            number = self._numbers[what] = len(self._what)
            self._what.append(what)
        # By identity, which takes no time: ``_cuts`` keeps them. Equal ones that are not the same only take more room.
        cut = (shape, id(boxes), id(pads))
        how = self._numbers.get(cut)
        if how is None:
            how = self._numbers[cut] = len(self._cuts)
            self._cuts.append((shape, boxes, pads))
        self._packed.append(number)
        self._packed.append(how)

    def _of(self, number: int, how: int) -> RankTensor:
        name, dtype, key, full, *rest = self._what[number]
        shape, boxes, pads = self._cuts[how]
        return RankTensor(name, dtype, shape, key, full, boxes, pads, *rest)

    def __len__(self) -> int:
        return len(self._packed) // 2

    def __iter__(self) -> Iterator[RankTensor]:
        packed = iter(self._packed)
        return map(self._of, packed, packed)

    @overload
    def __getitem__(self, at: int) -> RankTensor: ...
    @overload
    def __getitem__(self, at: slice) -> list[RankTensor]: ...
    def __getitem__(self, at: int | slice) -> RankTensor | list[RankTensor]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        at = range(len(self))[at]
        return self._of(self._packed[2 * at], self._packed[2 * at + 1])


_FEW = 16
"""Fewer pieces than this are looked at one by one."""


@dataclass(slots=True)
class LogicalTensor:
    """A whole tensor. ``pieces`` (none for an empty one) cover it without overlap; ``replicas`` repeat their boxes."""

    key: Key
    dtype: str
    shape: tuple[int, ...]
    pieces: Sequence[Piece]
    replicas: tuple[Piece, ...] = ()
    pads: tuple[Pad, ...] = ()
    _index: BoxIndex | None = field(default=None, init=False, repr=False, compare=False)

    def near(self, box: Box) -> Iterable[tuple[int, Piece]]:
        """Number and piece of all that share elements with ``box``, and of some that do not."""
        pieces = self.pieces
        if len(pieces) < _FEW:
            return enumerate(pieces)
        if self._index is None:
            self._index = BoxIndex([p.logical_box for p in pieces])
        return [(i, pieces[i]) for i in self._index.near(box)]

    def __repr__(self) -> str:
        """``<LogicalTensor lm_head.weight: BF16 [259, 64], 8 pieces>``."""
        pieces = count(len(self.pieces), "piece")
        return f"<LogicalTensor {self.key}: {self.dtype} {list(self.shape)}, {pieces}>"

    @property
    def nbytes(self) -> int:
        return nbytes(self.dtype, prod(self.shape), where=str(self.key))

    @property
    def box(self) -> Box:
        return whole(self.shape)


def whole_tensor(stored: StoredTensor, key: Key) -> LogicalTensor:
    """The common case: one stored tensor is the whole logical tensor."""
    box = whole(stored.shape)
    return LogicalTensor(key, stored.dtype, stored.shape, (Piece(stored, box, box),))


def logical_tensor(
    key: Key, shape: tuple[int, ...], pieces: Iterable[Piece], pads: Iterable[Pad] = (), *, files: list[DataFile]
) -> LogicalTensor:
    """Put pieces together: equal boxes become replicas of the first, the rest must tile the tensor.

    Raises ConflictError for different dtypes or partial overlaps, IncompleteError for a hole; both name the files.
    """
    pieces = list(pieces)
    dtype = pieces[0].stored.dtype if pieces else "U8"
    for p in pieces:
        if p.stored.dtype != dtype:
            raise ConflictError(
                f"tensor `{key}` is {dtype} in one file and {p.stored.dtype} in another",
                where=[_place(pieces[0].stored, files), _place(p.stored, files)],
            )
    tiling = _tiling(shape, tuple([p.logical_box for p in pieces]))
    unique = [pieces[i] for i in tiling.first]
    if tiling.clash is not None:
        a, b = pieces[tiling.clash[0]], pieces[tiling.clash[1]]
        raise ConflictError(
            f"two pieces of tensor `{key}` overlap without being equal: {a.logical_box} and {b.logical_box}",
            where=[_place(a.stored, files), _place(b.stored, files)],
            hint="the sizes given for the source (--tp, --ep, ...) or its family are probably wrong",
        )
    if tiling.hole is not None:
        raise IncompleteError(
            f"no file holds {tiling.hole} of tensor `{key}` {list(shape)}",
            where=[_place(p.stored, files) for p in unique[:3]],
            hint="a rank's file is missing, or the sizes given for the source (--tp, --pp, --ep) are too large",
        )
    return LogicalTensor(key, dtype, shape, tuple(unique), tuple([pieces[i] for i in tiling.again]), tuple(pads))


class _Tiling(NamedTuple):
    """How boxes cover a tensor. Numbers are positions among the boxes."""

    first: tuple[int, ...]
    """The first of each that are equal; empty boxes are left out."""
    again: tuple[int, ...]
    """The others."""
    clash: tuple[int, int] | None
    """Two that overlap without being equal."""
    hole: Box | None


@lru_cache(maxsize=4096)
def _tiling(shape: tuple[int, ...], boxes: tuple[Box, ...]) -> _Tiling:
    """How boxes cover a tensor. Cached: the tensors of a checkpoint are cut in few ways."""
    seen: dict[Box, int] = {}
    again = []
    for i, box in enumerate(boxes):
        if box.volume and seen.setdefault(box, i) != i:
            again.append(i)
    first = tuple(seen.values())
    unique = list(seen)
    clash = first_overlap(unique) if len(unique) > 1 else None
    if clash is not None:
        return _Tiling(first, tuple(again), (first[clash[0]], first[clash[1]]), None)
    return _Tiling(first, tuple(again), None, uncovered(shape, unique))


def _place(stored: StoredTensor, files: list[DataFile]) -> str:
    end = stored.offset + stored.nbytes
    return f"{files[stored.file].place} [bytes {stored.offset:,}..{end:,}) `{stored.name}` {list(stored.shape)}"


@dataclass(slots=True)
class Catalog:
    """The logical tensors of a checkpoint, in reading order."""

    files: list[DataFile]
    tensors: dict[Key, LogicalTensor]
    aliases: Mapping[Key, Key] = field(default_factory=dict)
    """Names that share another tensor's elements without being stored (tied embeddings): alias -> owner."""

    def __repr__(self) -> str:
        """``<Catalog: 39 tensors in 8 files>``."""
        return f"<Catalog: {len(self.tensors):,} tensors in {len(self.files):,} files>"

    def __iter__(self) -> Iterator[LogicalTensor]:
        return iter(self.tensors.values())

    def __len__(self) -> int:
        return len(self.tensors)

    def __getitem__(self, name: str | Key) -> LogicalTensor:
        return self.tensors[Key(name) if isinstance(name, str) else name]

    def place(self, stored: StoredTensor) -> str:
        """``file [bytes a..b) `name` [shape]`` for an error's ``where``."""
        return _place(stored, self.files)

    def shifted(self, by: int) -> Catalog:
        """The same with ``by`` added to every file number, for a table of files that several catalogs share."""
        if not by:
            return self

        def piece(p: Piece) -> Piece:
            return p._replace(stored=p.stored._replace(file=p.stored.file + by))

        tensors = {
            t.key: LogicalTensor(
                t.key,
                t.dtype,
                t.shape,
                tuple([piece(p) for p in t.pieces]),
                tuple([piece(p) for p in t.replicas]),
                tuple([p._replace(stored=p.stored._replace(file=p.stored.file + by)) for p in t.pads]),
            )
            for t in self
        }
        return Catalog(self.files, tensors, self.aliases)

    @property
    def nbytes(self) -> int:
        """Bytes of all logical tensors, each counted once."""
        return sum(t.nbytes for t in self)


def is_derived(catalog: Catalog, key: Key) -> bool:
    """Whether the tensor is a model weight that its master weight stands for: the same bytes under another key."""
    if key.component != "model":
        return False
    master = catalog.tensors.get(Key(key.name, "master_weights"))
    if master is None or not master.pieces:
        return False
    mine = catalog.tensors[key].pieces
    return bool(mine) and mine[0].stored[3:5] == master.pieces[0].stored[3:5]  # file and offset


def in_order(components: Iterable[str]) -> list[str]:
    """Components in the order in which checkpoints are written, unknown ones last."""
    order = {c: i for i, c in enumerate(COMPONENTS)}
    return sorted(components, key=lambda c: (order.get(c, len(order)), c))
