"""Writing torch.distributed.checkpoint: the rows of each tensor over files, as FSDP2 leaves them over ranks.

Names and keys are those of ``torch.distributed.checkpoint.state_dict.get_state_dict``, so that ``dcp.load`` finds them
from any mesh. Chunks of one dtype and shape are the same file of torch.save, but for their elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple
from zlib import crc32

from ckpttool.catalog import RankTensor, RankTensors
from ckpttool.containers.pickle_write import Hole
from ckpttool.containers.torch_write import TorchLayout, lay_out_torch
from ckpttool.dtypes import numpy_dtype
from ckpttool.errors import UnsupportedError
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
        base.OutFile(name, size, literals, checksums)
        for name, size, literals, checksums in zip(names, save.sizes, save.literals, save.checksums, strict=True)
    ]
    metadata = write_metadata(save.described, save.spans, save.paths, names)
    files.append(base.OutFile(METADATA, len(metadata), ((0, metadata),)))
    ranks: list[Sequence[RankTensor]] = [*save.ranks]
    rank_files = [[r] for r in range(world)]
    rank_files[0].append(world)
    return base.FileLayout(
        files, save.places, notes, rank_files, ranks, label=save.fqn_of,
        usage="python -m torch.distributed.checkpoint.format_utils dcp_to_torch {dst} model.pt",
    )  # fmt: skip


class _Slice(NamedTuple):
    """The bytes of a chunk without its elements."""

    size: int
    literals: tuple[tuple[int, bytes], ...]
    data: int
    """Where the elements begin."""
    checksums: tuple[int, ...]


class _Save:
    """What has been laid out so far, by file."""

    def __init__(self, world: int, keys: SaveKeys) -> None:
        self.world, self.keys = world, keys
        self.sizes = [0] * world
        self.literals: list[list[tuple[int, bytes]]] = [[] for _ in range(world)]
        self.checksums: list[dict[int, tuple[int, ...]]] = [{} for _ in range(world)]
        self.places: list[dict[str, tuple[int, int]]] = [{} for _ in range(world)]
        first = RankTensors()
        self.ranks = [first, *(RankTensors(share_index_with=first) for _ in range(world - 1))]
        self.described: dict[str, Described] = {}
        self.spans: dict[str, Span] = {}
        self.paths: dict[str, Path] = {}
        self._slices: dict[tuple[str, tuple[int, ...]], _Slice] = {}

    def fqn_of(self, t: RankTensor) -> str:
        """What a tensor is called in the save."""
        return ".".join(map(str, self.keys.tensor(t.component, t.name, t.state)))

    def add(self, t: RankTensor) -> None:
        fqn, slot, chunks = self.fqn_of(t), t.slot, []
        for file, (box, boxes) in _cut(t.shape, t.boxes, self.world):
            chunk = t._replace(shape=box.shape, boxes=boxes)
            slice_ = self._slice(t.dtype, box.shape, fqn)
            at = self._put(file, slice_.literals)
            self.places[file][slot] = (file, at + slice_.data)
            if slice_.checksums:
                self.checksums[file][at + slice_.data] = tuple([at + c for c in slice_.checksums])
            self.ranks[file].append(chunk)
            chunks.append(Chunk(box, (file, at, slice_.size)))
        self.described[fqn] = Described(t.dtype, t.shape, chunks)
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
                    self.spans[fqn] = (0, self._put(0, _joined(laid)), laid.size)
                    self.paths[fqn] = path
            except UnsupportedError:
                left.append(fqn)
        return [f"left out, because torch.save has no place for it: {some(left)}"] if left else []

    def _number(self, fqn: str, path: Path, value: float) -> None:
        """A tensor of one number, whose bytes are known."""
        import numpy as np

        dtype = self.keys.numbers[fqn]
        data = np.array(value, numpy_dtype(dtype)).tobytes()
        slice_ = self._slice(dtype, (), fqn)
        content = bytearray(slice_.size + -slice_.size % _ALIGNMENT)
        for at, literal in (*slice_.literals, (slice_.data, data)):
            content[at : at + len(literal)] = literal
        for at in slice_.checksums:
            content[at : at + 4] = crc32(data).to_bytes(4, "little")
        begin = self._put(0, ((0, bytes(content)),))
        self.described[fqn] = Described(dtype, (), [Chunk(whole(()), (0, begin, slice_.size))])
        self.paths[fqn] = path

    def _objects(self, training: base.Training) -> Iterator[tuple[Path, Any]]:
        yield from self.keys.groups(training.groups)
        yield from ((self.keys.paths.get(name, (name,)), value) for name, value in training.plain.items())

    def _put(self, file: int, literals: tuple[tuple[int, bytes], ...]) -> int:
        """Place a slice, which is padded, in a file."""
        at = self.sizes[file]
        self.literals[file] += [(at + begin, data) for begin, data in literals]
        self.sizes[file] = at + literals[-1][0] + len(literals[-1][1])
        return at

    def _slice(self, dtype: str, shape: tuple[int, ...], name: str) -> _Slice:
        found = self._slices.get((dtype, shape))
        if found is None:
            try:
                laid = lay_out_torch(Hole(dtype, shape), _TOP)
            except UnsupportedError as e:
                raise UnsupportedError(
                    f"tensor `{name}` is {dtype}, which torch does not have", where=name, hint=e.hint
                ) from None
            data = laid.offsets[()]
            found = _Slice(laid.size, _joined(laid), data, laid.checksums.get(data, ()))
            self._slices[dtype, shape] = found
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


def _cut(shape: tuple[int, ...], boxes: Boxes, world: int) -> Iterator[tuple[int, tuple[Box, Boxes]]]:
    """(file, (box of the tensor that it holds, what that is of the logical tensor))."""
    if not shape:
        yield 0, (whole(shape), boxes)
        return
    for file, first, stop in _rows(shape[0], world):
        box = Box((first, *(0 for _ in shape[1:])), (stop, *shape[1:]))
        held = []
        for stored, logical in boxes:
            common = stored.intersect(box)
            if common is not None:
                at = common.relative_to(box.start)
                held.append((at, common.relative_to(stored.start).shift(logical.start)))
        yield file, (box, tuple(held))
