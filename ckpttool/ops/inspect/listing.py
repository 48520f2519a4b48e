"""The tensors of a source: read from headers, chosen by name, dtype and size, sorted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.catalog import Catalog, DataFile, StoredTensor
from ckpttool.dtypes import nbytes, parse
from ckpttool.errors import LayoutError, UsageError
from ckpttool.formats.base import OpenOptions, StoredCheckpoint
from ckpttool.formats.registry import read_source
from ckpttool.mesh import Mesh
from ckpttool.ops.inspect.names import natural_order
from ckpttool.select import matching

if TYPE_CHECKING:
    from ckpttool.checkpoint import Checkpoint

SORTS = ("name", "size", "offset", "file")


class Row(NamedTuple):
    """One tensor of a listing."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: int
    """Index of the (first) file that holds it; -1 when it is empty and in none."""
    offset: int
    """Byte of its first piece in that file."""
    pieces: int
    """Stored tensors that make it up, copies included."""


class DtypeTotal(NamedTuple):
    """Everything of one dtype."""

    dtype: str
    tensors: int
    elements: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Choice:
    """Which tensors to list, and in which order."""

    patterns: Sequence[str] = ()
    dtypes: Sequence[str] = ()
    min_size: int = 0
    sort: str = ""
    """One of SORTS; "" keeps the order of the files."""


@dataclass(slots=True)
class Listing:
    """What ``inspect`` knows without reading tensor data."""

    path: Path
    stored: StoredCheckpoint
    rows: list[Row]
    """The chosen tensors."""
    tensors: int
    """All tensors, chosen or not."""
    logical: bool
    """Rows are whole tensors; False when no layout rule says how ranks' tensors fit together and each is listed."""
    notes: list[str]
    options: OpenOptions
    _checkpoint: Checkpoint | None = None

    @property
    def files(self) -> list[DataFile]:
        return self.stored.files

    @property
    def format(self) -> str:
        return self.stored.format

    @property
    def mesh(self) -> Mesh:
        return self.stored.mesh

    @property
    def nbytes(self) -> int:
        """Bytes of the chosen tensors."""
        return sum(r.nbytes for r in self.rows)

    def checkpoint(self) -> Checkpoint:
        """The checkpoint with its catalog. Raises LayoutError when no rule says how its ranks fit together."""
        if self._checkpoint is None:
            self._checkpoint = _assemble(self.stored, self.path, self.options)
        return self._checkpoint

    def totals(self) -> list[DtypeTotal]:
        """The chosen tensors by dtype, most bytes first."""
        found: dict[str, list[int]] = {}
        for (dtype, shape, size), n in Counter(map(itemgetter(1, 2, 3), self.rows)).items():
            t = found.setdefault(dtype, [0, 0, 0])
            t[0] += n
            t[1] += n * prod(shape)
            t[2] += n * size
        out = [DtypeTotal(d, *t) for d, t in found.items()]
        return sorted(out, key=lambda t: (-t.nbytes, t.dtype))


def list_tensors(
    src: str | Path, options: OpenOptions | None = None, choice: Choice | None = None, *, stored_too: bool = True
) -> Listing:
    """List a source. Raises what ``open_checkpoint`` raises, and UsageError for a choice that leaves nothing.

    With ``stored_too``, ranks whose tensors no rule can put together are listed as they are stored.
    """
    path, choice, options = Path(src), choice or Choice(), options or OpenOptions()
    stored = read_source(path, options.format, options.mesh)
    listing = Listing(path, stored, [], 0, logical=True, notes=list(stored.notes), options=options)
    if stored.mesh.world == 1 and stored.naming == "hf" and stored.recorded is None and not _rules(options):
        rows = _stored_rows(stored.tensors)
    else:
        try:
            checkpoint = listing.checkpoint()
        except LayoutError as e:
            if not stored_too:
                raise
            rows = _distinct(stored.tensors)
            listing.logical = False
            listing.notes.append(f"names and shapes are those that each rank stores: {e.what}")
            if e.hint:
                listing.notes.append(e.hint)
        else:
            rows = logical_rows(checkpoint.catalog)
            listing.notes = list(checkpoint.notes)
    listing.tensors = len(rows)
    listing.rows = choose(rows, choice)
    return listing


def _rules(options: OpenOptions) -> bool:
    return bool(options.family or options.replicate or options.split)


def _assemble(stored: StoredCheckpoint, path: Path, options: OpenOptions) -> Checkpoint:
    from ckpttool.checkpoint import assemble  # loads the layout rules, which most listings do not need

    return assemble(stored, path, options)


@lru_cache(maxsize=65536)
def _size(dtype: str, shape: tuple[int, ...]) -> int:
    return nbytes(dtype, prod(shape))


def _stored_rows(tensors: Iterable[StoredTensor]) -> list[Row]:
    return [Row(t[0], t[1], t[2], _size(t[1], t[2]), t[3], t[4], 1) for t in tensors]


def _distinct(tensors: Iterable[StoredTensor]) -> list[Row]:
    """One row for the ranks that store a tensor of one name, dtype and shape."""
    found: dict[tuple[str, str, tuple[int, ...]], list[StoredTensor]] = {}
    for t in tensors:
        found.setdefault((t.name, t.dtype, t.shape), []).append(t)
    return [
        Row(name, dtype, shape, _size(dtype, shape), same[0].file, same[0].offset, len(same))
        for (name, dtype, shape), same in found.items()
    ]


def logical_rows(catalog: Catalog) -> list[Row]:
    """A row for each logical tensor."""
    out = []
    for key, t in catalog.tensors.items():
        file, offset = (t.pieces[0].stored.file, t.pieces[0].stored.offset) if t.pieces else (-1, 0)
        out.append(Row(str(key), t.dtype, t.shape, t.nbytes, file, offset, len(t.pieces) + len(t.replicas)))
    return out


def choose(rows: list[Row], choice: Choice) -> list[Row]:
    """Filter and sort. Raises UsageError when a pattern, a dtype or a size matches nothing."""
    if choice.patterns:
        wanted = matching(choice.patterns, {r.name for r in rows}, option="--filter")
        rows = [r for r in rows if r.name in wanted]
    if choice.dtypes:
        names = {parse(d).name for d in choice.dtypes}
        there = {r.dtype for r in rows}
        rows = [r for r in rows if r.dtype in names]
        if not rows:
            raise UsageError(
                f"--dtype {', '.join(choice.dtypes)} matches no tensor",
                hint="dtypes here: " + ", ".join(sorted(there)),
            )
    if choice.min_size:
        largest = max((r.nbytes for r in rows), default=0)
        rows = [r for r in rows if r.nbytes >= choice.min_size]
        if not rows:
            raise UsageError("--min-size leaves no tensor", hint=f"the largest has {largest:,} bytes")
    return sort(rows, choice.sort)


def sort(rows: list[Row], by: str) -> list[Row]:
    """By name (numbers as numbers), size (largest first), place in the files, or file."""
    if by == "name":
        return [rows[i] for i in natural_order([r.name for r in rows])]
    if by == "size":
        return sorted(sort(rows, "name"), key=attrgetter("nbytes"), reverse=True)
    if by == "offset":
        return sorted(rows, key=attrgetter("file", "offset"))
    if by == "file":
        return sorted(sort(rows, "name"), key=attrgetter("file"))
    if by:
        raise UsageError(f"--sort `{by}` is not known", hint="sort by " + ", ".join(SORTS))
    return rows


@dataclass(slots=True)
class FileRow:
    """One file of a listing."""

    name: str
    nbytes: int
    ranks: list[int] = field(default_factory=list)
    tensors: int = 0
    data: int = 0
    """Bytes of tensors in it."""
    metadata: dict[str, Any] = field(default_factory=dict)


def file_rows(listing: Listing) -> list[FileRow]:
    """The data files of a source, in reading order."""
    root = listing.stored.root
    out = [FileRow(relative(f.path, root), f.size) for f in listing.files]
    ranks: list[set[int]] = [set() for _ in out]
    for t in listing.stored.tensors:
        row = out[t.file]
        row.tensors += 1
        row.data += _size(t.dtype, t.shape)
        ranks[t.file].add(t.rank)
    for row, found in zip(out, ranks, strict=True):
        row.ranks = sorted(found)
    return out


def relative(path: Path, root: Path) -> str:
    """The name of a file as listings show it."""
    try:
        return path.relative_to(root).as_posix()
    except ValueError:
        return str(path)
