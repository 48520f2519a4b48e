"""Writing torch.distributed.checkpoint: the rows of each tensor over files, as FSDP2 leaves them over ranks.

Names and keys are those of ``torch.distributed.checkpoint.state_dict.get_state_dict``, so that ``dcp.load`` finds them
from any mesh.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

from ckpttool.core.catalog import RankTensor, RankTensors
from ckpttool.core.geometry import Box, whole
from ckpttool.core.words import some
from ckpttool.errors import ConflictError, UnsupportedError
from ckpttool.formats import base
from ckpttool.formats.torch.dcp_layout import ChunkWriter, TensorChunks
from ckpttool.formats.torch.dcp_metadata import DcpChunk, DcpTensor, Span, write_metadata
from ckpttool.formats.torch.dcp_names import KEYS, SaveKeys
from ckpttool.formats.torch.dcp_place import METADATA

Path = tuple[str | int, ...]
Boxes = tuple[tuple[Box, Box], ...]


def write_save(request: base.WriteRequest) -> base.FileLayout:
    """Files, sizes and literals of a save. Raises UnsupportedError for a dtype that torch does not have."""
    world = request.sharding
    keeps = request.source is not None and request.source.dialect == request.dialect
    own = request.native if isinstance(request.native, SaveKeys) and keeps else None
    keys = own or KEYS.get(request.dialect, SaveKeys())
    known = {t.name for t in request.ranks[0] if t.component == "optimizer"}
    for group in request.training.groups if request.training is not None else ():
        known.update(group.parameters)
    save = _DcpLayout(world, keys.for_parameters(known))
    for t in request.ranks[0]:
        save.add(t)
    notes = save.objects(request.training)
    files = save.files.out_files()
    save.sort()
    metadata = write_metadata(save.described, save.spans, save.paths, save.files.names)
    files.append(base.OutFile(METADATA, len(metadata), ((0, metadata),)))
    ranks: list[Sequence[RankTensor]] = [*save.ranks]
    rank_files = [[r] for r in range(world)]
    rank_files[0].append(world)
    return base.FileLayout(
        files, save.files.places(), notes, rank_files, ranks, label=save.fqn_of,
        usage="torch.distributed.checkpoint.load(state, checkpoint_id={text})",
    )  # fmt: skip


class _RowSplit(NamedTuple):
    """The boxes of tensors of one shape in the files."""

    boxes: tuple[tuple[int, Box], ...]
    """(file, box of the tensor that it holds)."""
    held: tuple[Boxes, ...]
    """The boxes of the logical tensor that each of these holds."""


class _DcpLayout:
    """The files of a save while they are laid out."""

    def __init__(self, world: int, keys: SaveKeys) -> None:
        self.world, self.keys = world, keys
        self.files = ChunkWriter(world)
        first = RankTensors()
        self.ranks = [first, *(RankTensors(share_index_with=first) for _ in range(world - 1))]
        self.described: dict[str, DcpTensor] = {}
        self.spans: dict[str, Span] = {}
        self.paths: dict[str, Path] = {}
        self._cuts: dict[tuple[tuple[int, ...], Boxes], _RowSplit] = {}

    def fqn_of(self, t: RankTensor) -> str:
        """A tensor's name in the save."""
        return ".".join(map(str, self.keys.tensor(t.component, t.name, t.state)))

    def add(self, t: RankTensor) -> None:
        fqn = self.fqn_of(t)
        if fqn in self.described:
            raise ConflictError(f"two tensors would be `{fqn}` in the save", hint="rename one: --rename OLD=NEW")
        cut = self._cuts.get((t.shape, t.boxes))
        if cut is None:
            found = tuple(_cut(t.shape, t.boxes, self.world))
            cut = _RowSplit(tuple([(file, box) for file, box, _ in found]), tuple([held for *_, held in found]))
            self._cuts[t.shape, t.boxes] = cut
        chunks = TensorChunks(cut.boxes)
        for (file, box), held in zip(cut.boxes, cut.held, strict=True):
            chunks.put(*self.files.chunk(file, t, box.shape, fqn))
            self.ranks[file].append(t._replace(shape=box.shape, boxes=held))
        self.described[fqn] = DcpTensor(t.dtype, t.shape, chunks)
        self.paths[fqn] = self.keys.tensor(t.component, t.name, t.state)

    def sort(self) -> None:
        """The model in the order of the source, where that tells which parameters have which numbers."""
        names = [".".join(map(str, self.keys.tensor("model", name, ""))) for name in self.keys.order]
        first = [n for n in names if n in self.described]
        self.described = {n: self.described[n] for n in first} | self.described
        self.paths = {n: self.paths[n] for n in first} | self.paths

    def objects(self, training: base.TrainingState | None) -> list[str]:
        """Add what a trainer resumes from beside tensors, to the first file; notes about what has no place."""
        left = []
        for path, value in self._objects(training) if training is not None else ():
            fqn = ".".join(map(str, path))
            try:
                if fqn in self.paths:
                    left.append(fqn)
                elif fqn in self.keys.numbers and type(value) in (bool, int, float):
                    dtype = self.keys.numbers[fqn]
                    span = self.files.number(dtype, value, fqn)
                    self.described[fqn] = DcpTensor(dtype, (), [DcpChunk(whole(()), span)])
                    self.paths[fqn] = path
                else:
                    self.spans[fqn] = self.files.value(value)
                    self.paths[fqn] = path
            except UnsupportedError:
                left.append(fqn)
        return [f"left out, because torch.save has no place for it: {some(left)}"] if left else []

    def _objects(self, training: base.TrainingState) -> Iterator[tuple[Path, Any]]:
        yield from self.keys.groups(training.groups)
        yield from ((self.keys.paths.get(name, (name,)), value) for name, value in training.plain.items())


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
