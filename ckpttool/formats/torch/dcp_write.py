"""Writing torch.distributed.checkpoint: the rows of each tensor over files, as FSDP2 leaves them over ranks.

Names and keys are those of ``torch.distributed.checkpoint.state_dict.get_state_dict``, so that ``dcp.load`` finds them
from any mesh. Chunks of one dtype and shape are the same file of torch.save, but for their elements.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, overload
from zlib import crc32

from ckpttool.catalog import RankTensor, RankTensors
from ckpttool.containers.pickle_write import Hole
from ckpttool.containers.torch_write import TorchLayout, lay_out_torch
from ckpttool.dtypes import numpy_dtype
from ckpttool.errors import ConflictError, UnsupportedError
from ckpttool.formats import base
from ckpttool.formats.torch.dcp_metadata import Chunk, Described, Span, write_metadata
from ckpttool.formats.torch.dcp_names import KEYS, SaveKeys
from ckpttool.formats.torch.dcp_place import METADATA
from ckpttool.geometry import Box, whole
from ckpttool.words import some

_TOP = "archive"
_ALIGNMENT = 64
Path = tuple[str | int, ...]
Boxes = tuple[tuple[Box, Box], ...]


def write_save(request: base.WriteRequest) -> base.FileLayout:
    """Files, sizes and literals of a save. Raises UnsupportedError for a dtype that torch does not have."""
    world = request.sharding
    keeps = request.source is not None and request.source.dialect == request.dialect
    own = request.native if isinstance(request.native, SaveKeys) and keeps else None
    keys = own or KEYS.get(request.dialect, SaveKeys())
    save = _Save(world, keys.for_parameters({t.name for t in request.ranks[0] if t.component == "optimizer"}))
    for t in request.ranks[0]:
        save.add(t)
    notes = save.objects(request.training)
    names = [f"__{r}_0.distcp" for r in range(world)]
    files = [
        base.OutFile(name, file.size, _Literals(file), _Checksums(file))
        for name, file in zip(names, save.files, strict=True)
    ]
    metadata = write_metadata(save.described, save.spans, save.paths, names)
    files.append(base.OutFile(METADATA, len(metadata), ((0, metadata),)))
    ranks: list[Sequence[RankTensor]] = [*save.ranks]
    places = [_Places(r, file, save.slots) for r, file in enumerate(save.files)]
    rank_files = [[r] for r in range(world)]
    rank_files[0].append(world)
    return base.FileLayout(
        files, places, notes, rank_files, ranks, label=save.fqn_of,
        usage="python -m torch.distributed.checkpoint.format_utils dcp_to_torch {dst} model.pt",
    )  # fmt: skip


class _Slice(NamedTuple):
    """The bytes of a chunk without its elements."""

    size: int
    literals: tuple[tuple[int, bytes], ...]
    data: int
    """Where the elements begin."""
    checksums: tuple[int, ...]


class _File:
    """A file that is being laid out, packed: there may be a hundred chunks in each of a thousand files."""

    __slots__ = ("at", "owners", "size", "slices", "tensors", "which")

    def __init__(self, slices: list[_Slice]) -> None:
        self.size = 0
        self.slices = slices
        """Of all files."""
        self.which = array("I")
        """Of each slice of the file: which one it is."""
        self.at = array("q")
        """Where it begins."""
        self.tensors = array("I")
        """Numbers of the tensors that the file holds, ascending."""
        self.owners = array("I")
        """Of each of these: its slice of the file."""

    def put(self, which: int) -> int:
        """Place a slice, which is padded; where it begins."""
        at = self.size
        self.which.append(which)
        self.at.append(at)
        begin, data = self.slices[which].literals[-1]
        self.size = at + begin + len(data)
        return at

    def own(self, tensor: int) -> None:
        """The slice that was placed last holds elements of a tensor."""
        self.tensors.append(tensor)
        self.owners.append(len(self.at) - 1)

    def data(self, i: int) -> int:
        """Where the elements of a slice begin."""
        return self.at[i] + self.slices[self.which[i]].data


class _Literals(Sequence[tuple[int, bytes]]):
    """The literal bytes of a file."""

    def __init__(self, file: _File) -> None:
        self._file = file

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        slices = self._file.slices
        for at, which in zip(self._file.at, self._file.which, strict=True):
            for begin, data in slices[which].literals:
                yield at + begin, data

    def __len__(self) -> int:
        return sum(len(self._file.slices[which].literals) for which in self._file.which)

    @overload
    def __getitem__(self, at: int) -> tuple[int, bytes]: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[tuple[int, bytes]]: ...
    def __getitem__(self, at: int | slice) -> tuple[int, bytes] | Sequence[tuple[int, bytes]]:
        return list(self)[at]


class _Checksums(Mapping[int, tuple[int, ...]]):
    """``OutFile.checksums`` of a file."""

    def __init__(self, file: _File) -> None:
        self._file = file

    def __iter__(self) -> Iterator[int]:
        file = self._file
        return (file.data(i) for i in file.owners if file.slices[file.which[i]].checksums)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, data: int) -> tuple[int, ...]:
        file = self._file
        i = bisect_left(range(len(file.at)), data, key=file.data)
        sums = file.slices[file.which[i]].checksums if i < len(file.at) and file.data(i) == data else ()
        if not sums:
            raise KeyError(data)
        return tuple([file.at[i] + c for c in sums])


class _Places(Mapping[str, tuple[int, int]]):
    """Where the tensors of a file begin."""

    def __init__(self, number: int, file: _File, slots: Mapping[str, int]) -> None:
        self._number, self._file, self._slots = number, file, slots

    def __iter__(self) -> Iterator[str]:
        return (slot for slot in self._slots if slot in self)

    def __len__(self) -> int:
        return len(self._file.tensors)

    def __getitem__(self, slot: str) -> tuple[int, int]:
        tensor, held = self._slots[slot], self._file.tensors
        i = bisect_left(held, tensor)
        if i == len(held) or held[i] != tensor:
            raise KeyError(slot)
        return self._number, self._file.data(self._file.owners[i])


class _Chunks(Sequence[Chunk]):
    """The chunks of a tensor, packed likewise."""

    def __init__(self, boxes: Sequence[tuple[int, Box]], at: array[int], sizes: array[int]) -> None:
        self._boxes, self._at, self._sizes = boxes, at, sizes

    def __len__(self) -> int:
        return len(self._boxes)

    @overload
    def __getitem__(self, at: int) -> Chunk: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Chunk]: ...
    def __getitem__(self, at: int | slice) -> Chunk | Sequence[Chunk]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        file, box = self._boxes[at]
        return Chunk(box, (file, self._at[at], self._sizes[at]))


class _Cut(NamedTuple):
    """How tensors of one shape lie in the files."""

    boxes: tuple[tuple[int, Box], ...]
    """(file, box of the tensor that it holds)."""
    held: tuple[Boxes, ...]
    """What each of these is of the logical tensor."""


class _Save:
    """What has been laid out so far, by file."""

    def __init__(self, world: int, keys: SaveKeys) -> None:
        self.world, self.keys = world, keys
        self.slices: list[_Slice] = []
        self.files = [_File(self.slices) for _ in range(world)]
        self.slots: dict[str, int] = {}
        """Numbers of tensors."""
        first = RankTensors()
        self.ranks = [first, *(RankTensors(share_index_with=first) for _ in range(world - 1))]
        self.described: dict[str, Described] = {}
        self.spans: dict[str, Span] = {}
        self.paths: dict[str, Path] = {}
        self._known: dict[tuple[str, tuple[int, ...]], int] = {}
        """Dtype and shape -> slice."""
        self._cuts: dict[tuple[tuple[int, ...], Boxes], _Cut] = {}

    def fqn_of(self, t: RankTensor) -> str:
        """What a tensor is called in the save."""
        return ".".join(map(str, self.keys.tensor(t.component, t.name, t.state)))

    def add(self, t: RankTensor) -> None:
        fqn = self.fqn_of(t)
        if fqn in self.described:
            raise ConflictError(f"two tensors would be `{fqn}` in the save", hint="rename one: --rename OLD=NEW")
        number = self.slots.setdefault(t.slot, len(self.slots))
        cut = self._cuts.get((t.shape, t.boxes))
        if cut is None:
            found = tuple(_cut(t.shape, t.boxes, self.world))
            cut = _Cut(tuple([(file, box) for file, box, _ in found]), tuple([held for *_, held in found]))
            self._cuts[t.shape, t.boxes] = cut
        places, sizes = array("q"), array("q")
        for (file, box), held in zip(cut.boxes, cut.held, strict=True):
            shape = box.shape
            which = self._slice(t.dtype, shape, fqn)
            places.append(self.files[file].put(which))
            sizes.append(self.slices[which].size)
            self.files[file].own(number)
            self.ranks[file].append(t._replace(shape=shape, boxes=held))
        self.described[fqn] = Described(t.dtype, t.shape, _Chunks(cut.boxes, places, sizes))
        self.paths[fqn] = self.keys.tensor(t.component, t.name, t.state)

    def objects(self, training: base.Training | None) -> list[str]:
        """Add what a trainer resumes from beside tensors, to the first file; notes about what has no place."""
        left = []
        for path, value in self._objects(training) if training is not None else ():
            fqn = ".".join(map(str, path))
            try:
                if fqn in self.paths:
                    left.append(fqn)
                elif fqn in self.keys.numbers and type(value) in (bool, int, float):
                    self._number(fqn, path, value)
                else:
                    laid = lay_out_torch(value, _TOP)
                    self.spans[fqn] = (0, self._put(_Slice(laid.size, _joined(laid), 0, ())), laid.size)
                    self.paths[fqn] = path
            except UnsupportedError:
                left.append(fqn)
        return [f"left out, because torch.save has no place for it: {some(left)}"] if left else []

    def _number(self, fqn: str, path: Path, value: float) -> None:
        """A tensor of one number, whose bytes are known."""
        import numpy as np

        dtype = self.keys.numbers[fqn]
        data = np.array(value, numpy_dtype(dtype)).tobytes()
        slice_ = self.slices[self._slice(dtype, (), fqn)]
        content = bytearray(slice_.size + -slice_.size % _ALIGNMENT)
        for at, literal in (*slice_.literals, (slice_.data, data)):
            content[at : at + len(literal)] = literal
        for at in slice_.checksums:
            content[at : at + 4] = crc32(data).to_bytes(4, "little")
        begin = self._put(slice_._replace(literals=((0, bytes(content)),), checksums=()))
        self.described[fqn] = Described(dtype, (), [Chunk(whole(()), (0, begin, slice_.size))])
        self.paths[fqn] = path

    def _objects(self, training: base.Training) -> Iterator[tuple[Path, Any]]:
        yield from self.keys.groups(training.groups)
        yield from ((self.keys.paths.get(name, (name,)), value) for name, value in training.plain.items())

    def _put(self, slice_: _Slice) -> int:
        """Place a slice that there is once in the first file."""
        self.slices.append(slice_)
        return self.files[0].put(len(self.slices) - 1)

    def _slice(self, dtype: str, shape: tuple[int, ...], name: str) -> int:
        found = self._known.get((dtype, shape))
        if found is None:
            try:
                laid = lay_out_torch(Hole(dtype, shape), _TOP)
            except UnsupportedError as e:
                raise UnsupportedError(
                    f"tensor `{name}` is {dtype}, which torch does not have", where=name, hint=e.hint
                ) from None
            data = laid.offsets[()]
            found = self._known[dtype, shape] = len(self.slices)
            self.slices.append(_Slice(laid.size, _joined(laid), data, laid.checksums.get(data, ())))
        return found


def _joined(laid: TorchLayout) -> tuple[tuple[int, bytes], ...]:
    """Its literal bytes in few runs, the last one padded: what comes next is aligned, and so are its elements."""
    out: list[tuple[int, bytearray]] = []
    for at, data in (*laid.literals, (laid.size, bytes(-laid.size % _ALIGNMENT))):
        if out and out[-1][0] + len(out[-1][1]) == at:
            out[-1][1].extend(data)
        else:
            out.append((at, bytearray(data)))
    return tuple([(at, bytes(data)) for at, data in out])


@cache
def _rows(count: int, world: int) -> tuple[tuple[int, int, int], ...]:
    """(file, first row, last + 1) as FSDP2 has them: the last files may have fewer rows, or none."""
    each = -(-count // world)
    spans = [(r, min(r * each, count), min((r + 1) * each, count)) for r in range(world)]
    return tuple([s for s in spans if s[1] < s[2]]) or ((0, 0, 0),)


def _cut(shape: tuple[int, ...], boxes: Boxes, world: int) -> Iterator[tuple[int, Box, Boxes]]:
    """(file, box of the tensor that it holds, what that is of the logical tensor)."""
    if not shape:
        yield 0, whole(shape), boxes
        return
    for file, first, stop in _rows(shape[0], world):
        box = Box((first, *(0 for _ in shape[1:])), (stop, *shape[1:]))
        held = []
        for stored, logical in boxes:
            common = stored.intersect(box)
            if common is not None:
                at = common.relative_to(box.start)
                held.append((at, common.relative_to(stored.start).shift(logical.start)))
        yield file, box, tuple(held)
