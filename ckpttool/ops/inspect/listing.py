"""The tensors of a source: read from headers, chosen by name, dtype and size, sorted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.containers.safetensors import read_header
from ckpttool.core.catalog import SHARDED, Catalog, StoredTensor, in_order, is_derived
from ckpttool.core.dtypes import find, nbytes
from ckpttool.core.files import AnyPlace, DataFile, Place, source_files
from ckpttool.core.mesh import Mesh
from ckpttool.core.patterns import matching
from ckpttool.core.tensor_names import natural_order
from ckpttool.errors import LayoutError, UsageError
from ckpttool.formats.base import OpenOptions, StoredCheckpoint
from ckpttool.formats.paddle import PARAMS
from ckpttool.ops.inspect.source import join, read
from ckpttool.storage.place import name_below, parse_place

if TYPE_CHECKING:
    from ckpttool.checkpoint import Checkpoint

SORTS = ("name", "size", "offset", "file")


class TensorRow(NamedTuple):
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
    component: str = "model"
    state: str = ""
    """Of an optimizer."""
    derived: bool = False
    """Has no bytes of its own: a model weight that is read from its master weight, and rounded."""

    @property
    def parameter(self) -> str:
        """What the tensor belongs to; its own name for a model weight."""
        if self.component == "model":
            return self.name
        return self.name[len(self.component) + 1 : -len(self.state) - 1 if self.state else None]


class DtypeTotal(NamedTuple):
    """Everything of one dtype."""

    dtype: str
    tensors: int
    elements: int
    nbytes: int


class ComponentTotal(NamedTuple):
    """Everything of one component."""

    component: str
    dtypes: tuple[str, ...]
    """Most bytes first."""
    tensors: int
    elements: int
    nbytes: int
    """Of whole tensors as they are read, derived ones included."""
    derived: int
    """Tensors without bytes of their own."""


@dataclass(frozen=True, slots=True)
class TensorChoice:
    """Which tensors to list, and in which order."""

    patterns: Sequence[str] = ()
    dtypes: Sequence[str] = ()
    min_size: int = 0
    sort: str = ""
    """One of SORTS; "" keeps the order of the files."""
    components: Sequence[str] = ()
    """Only these; () is all."""


@dataclass(slots=True)
class TensorListing:
    """What ``inspect`` knows without reading tensor data."""

    path: Place
    stored: StoredCheckpoint
    rows: list[TensorRow]
    """The chosen tensors."""
    tensors: int
    """All tensors, chosen or not."""
    logical: bool
    """Rows are whole tensors; False when no layout rule says how ranks' tensors fit together and each is listed."""
    notes: list[str]
    options: OpenOptions
    every: Sequence[TensorRow] = ()
    """All tensors, chosen or not."""
    _checkpoint: Checkpoint | None = None

    @property
    def files(self) -> list[DataFile]:
        """Files of the source, each once."""
        return source_files(self.stored.files)

    @property
    def format(self) -> str:
        return self.stored.format

    @property
    def mesh(self) -> Mesh:
        return self.stored.mesh

    @property
    def nbytes(self) -> int:
        """Bytes of the chosen tensors; those that two of them share are counted once."""
        masters = {r.parameter for r in self.rows if r.component == "master_weights"}
        return sum([r[3] for r in self.rows if not (r[9] and r[0] in masters)])

    @property
    def components(self) -> list[str]:
        """Components of the chosen tensors, in the order in which they are written."""
        return in_order({r[7] for r in self.rows})

    def checkpoint(self) -> Checkpoint:
        """The checkpoint with its catalog. Raises LayoutError when no rule says how its ranks fit together."""
        if self._checkpoint is None:
            self._checkpoint = join(self.stored, self.path, self.options)
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

    def component_totals(self) -> list[ComponentTotal]:
        """The chosen tensors by component, in the order in which these are written."""
        found: dict[str, Counter[str]] = {c: Counter() for c in self.components}
        sums = {c: [0, 0, 0, 0] for c in found}
        for (dtype, shape, size, component, derived), n in Counter(map(itemgetter(1, 2, 3, 7, 9), self.rows)).items():
            found[component][dtype] += n * size
            sums[component] = [a + n * b for a, b in zip(sums[component], (1, prod(shape), size, derived), strict=True)]
        return [ComponentTotal(c, tuple(d for d, _ in dtypes.most_common()), *sums[c]) for c, dtypes in found.items()]


def list_tensors(
    src: AnyPlace, options: OpenOptions | None = None, choice: TensorChoice | None = None, *, stored_too: bool = True
) -> TensorListing:
    """List a source. Raises what ``open_checkpoint`` raises, and UsageError for a choice that leaves nothing.

    With ``stored_too``, ranks whose tensors no rule can put together are listed as they are stored.
    """
    path, choice, options = parse_place(src), choice or TensorChoice(), options or OpenOptions()
    stored = read(path, options)
    listing = TensorListing(path, stored, [], 0, logical=True, notes=list(stored.notes), options=options)
    if stored.plain and not (options.family or options.replicate or options.split):
        rows = [TensorRow(t[0], t[1], t[2], _size(t[1], t[2]), t[3], t[4], 1) for t in stored.tensors]
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
    listing.tensors, listing.every = len(rows), rows
    listing.rows = choose(rows, choice, path)
    return listing


@lru_cache(maxsize=65536)
def _size(dtype: str, shape: tuple[int, ...]) -> int:
    return nbytes(dtype, prod(shape))


def _distinct(tensors: Iterable[StoredTensor]) -> list[TensorRow]:
    """One row for the ranks that store a tensor of one name, dtype and shape."""
    found: dict[tuple[str, str, tuple[int, ...]], list[StoredTensor]] = {}
    for t in tensors:
        found.setdefault((t.name, t.dtype, t.shape), []).append(t)
    return [
        TensorRow(name, dtype, shape, _size(dtype, shape), same[0].file, same[0].offset, len(same))
        for (name, dtype, shape), same in found.items()
    ]


def logical_rows(catalog: Catalog) -> list[TensorRow]:
    """A row for each logical tensor."""
    out = []
    known = {f.place: i for i, f in enumerate(source_files(catalog.files))}
    places = [*(known[f.place] for f in catalog.files), -1]  # an empty tensor is in file -1
    for key, t in catalog.tensors.items():
        file, offset = (t.pieces[0].stored.file, t.pieces[0].stored.offset) if t.pieces else (-1, 0)
        place, pieces, derived = places[file], len(t.pieces) + len(t.replicas), is_derived(catalog, key)
        out.append(
            TensorRow(str(key), t.dtype, t.shape, t.nbytes, place, offset, pieces, key.component, key.state, derived)
        )
    return out


def check_components(wanted: Iterable[str], have: Iterable[str], path: Place) -> None:
    """Raises UsageError for a component of --only that is not there."""
    there = in_order(set(have))
    for c in wanted:
        if c not in there:
            raise UsageError(f"--only {c}: the source has no {c}", where=str(path), hint="it has " + ", ".join(there))


def wanted_names(patterns: Sequence[str], names: Mapping[str, str]) -> set[str]:
    """The names that --filter means; ``names`` are those of tensors with that of the parameter of each.

    A pattern may mean a tensor or a parameter: ``lm_head.weight`` is it in every component, as in drop-keys.
    """
    found = matching(patterns, {*names, *names.values()}, option="--filter")
    return {n for n, parameter in names.items() if n in found or parameter in found}


def choose(rows: list[TensorRow], choice: TensorChoice, path: Place = Path()) -> list[TensorRow]:
    """Filter and sort. Raises UsageError when a pattern, a component, a dtype or a size matches nothing."""
    if choice.components:
        check_components(choice.components, {r.component for r in rows}, path)
        rows = [r for r in rows if r.component in choice.components]
    if choice.patterns:
        wanted = wanted_names(choice.patterns, {r.name: r.parameter for r in rows})
        rows = [r for r in rows if r.name in wanted]
    if choice.dtypes:
        names = {d: dtype.name if (dtype := find(d)) else "" for d in choice.dtypes}
        there = "dtypes here: " + ", ".join(sorted({r.dtype for r in rows}))
        if unknown := [d for d, name in names.items() if not name]:
            raise UsageError(f"--dtype: unknown dtype `{unknown[0]}`", hint=there)
        rows = [r for r in rows if r.dtype in names.values()]
        if not rows:
            raise UsageError(f"--dtype {', '.join(choice.dtypes)} matches no tensor", hint=there)
    if choice.min_size:
        largest = max((r.nbytes for r in rows), default=0)
        rows = [r for r in rows if r.nbytes >= choice.min_size]
        if not rows:
            raise UsageError("--min-size leaves no tensor", hint=f"the largest has {largest:,} bytes")
    return sort(rows, choice.sort)


def sort(rows: list[TensorRow], by: str) -> list[TensorRow]:
    """By name (numbers as numbers), size (largest first), place in the files, or file."""
    if by == "name":
        out = [rows[i] for i in natural_order([r.name for r in rows])]
        found = {r[7] for r in out}
        if len(found) < 2:
            return out
        order = {c: i for i, c in enumerate(in_order(found))}
        return sorted(out, key=lambda r: order[r.component])
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


def file_rows(listing: TensorListing) -> list[FileRow]:
    """The data files of a source, in reading order."""
    stored, files = listing.stored, listing.files
    out = [FileRow(relative(f.place, stored.root), f.size) for f in files]
    place = {f.place: i for i, f in enumerate(files)}
    ranks: list[set[int]] = [set() for _ in out]
    holders = holders_of(stored)
    for t in runs(stored):
        at = place[stored.files[t.file].place]
        ranks[at].add(holders.rank(t))
        out[at].tensors += 1
        out[at].data += _size(t.dtype, t.shape)
    if any(f.encoding and ".safetensors" in f.place.name for f in stored.files):
        # Codes and scales are in the files, and not the moments that they were decoded to.
        for f, row in zip(files, out, strict=True):
            held = read_header(f.place).tensors
            row.tensors, row.data = len(held), sum(t.nbytes for t in held)
    for row, found in zip(out, ranks, strict=True):
        row.ranks = sorted(found)
    return out


def runs(stored: StoredCheckpoint) -> list[StoredTensor]:
    """What the files hold, every run of bytes once: shards instead of what they make up, nothing for derived tensors.

    Tensors that are cut into blocks (flattened shards of flex) are as many runs.
    """
    if not stored.shards and all(t.component == "model" for t in stored.tensors):
        return stored.tensors  # nothing is there twice
    out: dict[tuple[int, int, int], StoredTensor] = {}
    # Master weights come before the model weights that are derived from them, so that the run has the stored dtype.
    for t in sorted(stored.tensors, key=lambda t: t.component == "model"):
        for run in [s.stored for s in stored.shards[t.offset]] if t.file == SHARDED else (t,):
            out.setdefault((run.file, run.offset, run.nbytes), run)
    return list(out.values())


@dataclass(slots=True)
class Holders:
    """Which rank each file belongs to, for formats whose readers number model-parallel ranks only."""

    world: int
    text: str
    """The sizes, as the mesh line of a drawing has them."""
    ranks: Mapping[int, int] = field(default_factory=dict)
    """By file; what is not in it is of the rank that the stored tensor says."""

    def rank(self, stored: StoredTensor) -> int:
        return self.ranks.get(stored.file, stored.rank)


def holders_of(stored: StoredCheckpoint) -> Holders:
    """The ranks of a checkpoint.

    Ranks that share optimizer state are told apart by the names of their files (``optimizer.tp01_shard03.pdopt``);
    they are numbered as Paddle does, data (the experts' ``moe``) over pipeline over sharding over tensor parallel.
    """
    mesh = mesh_text(stored)
    found = _coordinates(stored)
    if not found:
        # The files of a flex checkpoint are numbered by rank, and its mesh is not told.
        world = max(stored.mesh.world, 1 + max((t.rank for t in stored.tensors), default=0))
        return Holders(world, mesh if world == stored.mesh.world else "as its metadata says")
    axes = ("moe", "pp", "shard", "tp")
    sizes = {a: 1 + max(c.get(a, 0) for c in found.values()) for a in axes}
    ranks = {}
    for i, c in found.items():
        ranks[i] = 0
        for a in axes:
            ranks[i] = ranks[i] * sizes[a] + c.get(a, 0)
    return Holders(prod(sizes.values()), mesh, ranks)


def _coordinates(stored: StoredCheckpoint) -> dict[int, dict[str, int]]:
    """By file, the coordinates of the rank in its name."""
    if stored.plain:
        return {}
    from ckpttool.dialects import dialect  # loads the family files

    named = dialect(stored.dialect).coordinates
    return {i: found for i, f in enumerate(stored.files) if (found := named(f.place.name))}


def sharding_of(stored: StoredCheckpoint) -> int:
    """Ranks that share optimizer state; those that wrote files of their own where they shared out whole tensors."""
    return max([stored.sharding, *(1 + c.get("shard", 0) for c in _coordinates(stored).values())])


def mesh_text(stored: StoredCheckpoint) -> str:
    """``tp 2, pp 2, sharding 4``: the sizes of the ranks that wrote a checkpoint."""
    sharding = sharding_of(stored)
    parts = [str(stored.mesh)] if stored.mesh.world > 1 or not (sharding > 1 or stored.cut) else []
    if sharding > 1:
        parts.append(f"sharding {sharding}")
    if stored.cut:
        meshes = {str(m): ", ".join(c for c, other in stored.cut.items() if other == m) for m in stored.cut.values()}
        parts += [f"{mesh} ({components})" for mesh, components in meshes.items()]
    return ", ".join(parts)


def is_safetensors(path: Place) -> bool:
    """Whether a data file of a source is one; what is pickled has names of its own (and those may lie, too)."""
    if ".safetensors" in path.name:
        return True
    if path.name.endswith(PARAMS):
        return False
    from ckpttool.storage.identify import sniff

    return sniff(path) not in ("pickle", "torch")


def relative(path: Place, root: Place) -> str:
    """The name of a file as listings show it."""
    return name_below(path, root) or str(path)
