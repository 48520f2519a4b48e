"""All that a checkpoint stores -> its catalog: each component is assembled by itself, then shards are joined."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ckpttool.containers.safetensors import MAX_NAME
from ckpttool.core.catalog import Catalog, Key, LogicalTensor, Piece, StoredTensor
from ckpttool.core.mesh import Mesh
from ckpttool.errors import CkptError, UnsupportedError
from ckpttool.formats.base import Capabilities, OpenOptions, StoredCheckpoint
from ckpttool.layout.assemble import EXPERT, LAYER, Assembler, whole_catalog
from ckpttool.layout.family import Family, pick_family
from ckpttool.layout.rules import PartitionContext
from ckpttool.layout.shards import join_shards
from ckpttool.layout.statements import Transform

FoundWhole = Callable[[Family, PartitionContext, Mapping[str, tuple[int, ...]], list[StoredTensor]], tuple[str, ...]]
"""Patterns of the tensors that are whole on every rank, of a save that does not record what is cut: given the rules,
the shapes of whole model weights, and the tensors."""


def family_of(stored: StoredCheckpoint, options: OpenOptions, where: str, family: Family | None = None) -> Family:
    """The family of a checkpoint, with the rules of the flags; ``family`` where it is known already.

    Raises UnsupportedError (no such family, numbers that no model has) and UsageError (a malformed rule).
    """
    family = family or pick_family(options.family, stored.family, stored.config)
    _check_numbers(stored, family, where)
    if options.replicate or options.split:
        family = family.with_overrides(options.replicate, options.split)
    return family


def catalog_of(
    stored: StoredCheckpoint, family: Family, ops: tuple[Transform, ...], capabilities: Capabilities, where: str,
    *, copies: bool, whole_alone: bool, found_whole: FoundWhole,
) -> tuple[Catalog, list[str]]:  # fmt: skip
    """The catalog of what a format has read, and notes on what was inferred; ``ops`` lead from Hugging Face's names to
    those of the tensors. The mesh of ``stored`` gets the layers of each stage where only the tensors say them.

    ``whole_alone``: a single rank holds whole tensors, and with ``copies`` several of its files may hold the same one.
    Raises LayoutError, ConflictError and IncompleteError as ``Assembler`` does.
    """
    notes: list[str] = []
    if stored.recorded is not None:
        catalog = stored.recorded
    else:
        catalog = Catalog(stored.files, {})
        for component, tensors in _by_component(stored.tensors).items():
            mesh = stored.cut.get(component[0], stored.mesh)
            if mesh.world == 1 and whole_alone:
                catalog.tensors |= whole_catalog(stored.files, tensors, copies=copies).tensors
                continue
            rules = family.with_whole(stored.whole)
            cutting = PartitionContext(mesh, family.sizes, optional=family.guards(), pad_vocab=capabilities.pad_vocab)
            wholes = {k.name: t.shape for k, t in catalog.tensors.items() if k.component in ("model", "adapter")}
            if not stored.records_cuts:
                rules = rules.with_whole(found_whole(rules, cutting, wholes, tensors))
            assembler = Assembler(
                stored.files,
                rules,
                ops,
                cutting,
                stored.config,
                capabilities.local_layers,
                free_padding=capabilities.free_padding,
                wholes=wholes,
                root=str(stored.root),
            )
            try:
                found = assembler.run(tensors)
            except CkptError as e:
                e.where = (*e.where, f"while reading {where} as {stored.format} ({mesh})")
                raise
            for t in found:
                t.key = Key(t.key.name, *component)
                catalog.tensors[t.key] = t
            notes += [n for n in assembler.notes if n not in notes]
        catalog = join_shards(catalog, stored.shards)
    stored.mesh = _with_uneven_stages(catalog, stored.mesh, family.size("layers") or 0)
    for key, dtype in stored.dtypes.items():
        if key in catalog.tensors:
            catalog.tensors[key].dtype = dtype
    return catalog, [*notes, *_tie(catalog, family.ties)]


def _tie(catalog: Catalog, ties: Mapping[str, str]) -> list[str]:
    """Take a head for the embedding that it is tied to, where it is not stored, or has the same bytes (a note)."""
    notes = []
    for copy, owner in ties.items():
        head, embedding = catalog.tensors.get(Key(copy)), catalog.tensors.get(Key(owner))
        if head and embedding and _bytes_of(head) == _bytes_of(embedding):
            notes.append(f"`{copy}` has the bytes of `{owner}`, to which it is tied; read once")
            del catalog.tensors[Key(copy)]
    names = {k.name for k in catalog.tensors}
    catalog.aliases = {Key(c): Key(o) for c, o in ties.items() if c not in names and o in names}
    return notes


def _by_component(tensors: Sequence[StoredTensor]) -> dict[tuple[str, str], list[StoredTensor]]:
    """Tensors by (component, state); each is assembled by itself, because names repeat from one to the next."""
    out: dict[tuple[str, str], list[StoredTensor]] = {}
    for t in tensors:
        out.setdefault((t.component, t.state), []).append(t)
    return out


def _bytes_of(tensor: LogicalTensor) -> list[Piece]:
    """The pieces that hold its elements, whatever the stored tensors are called: formats with views may store two in
    one place."""
    return [p._replace(stored=p.stored._replace(name="")) for p in tensor.pieces]


def _with_uneven_stages(catalog: Catalog, mesh: Mesh, layers: int) -> Mesh:
    """The mesh with the layers of each stage, where they do not divide and only the ranks' tensors say them."""
    if mesh.pp == 1 or mesh.layout or layers % mesh.pp == 0:
        return mesh
    stages: dict[int, set[int]] = {}
    for key, t in catalog.tensors.items():
        if m := LAYER.search(key.name):
            stages.setdefault(int(m[1]), set()).update(p.stored.rank // mesh.width for p in t.pieces)
    runs: list[list[int]] = []
    for layer in range(layers):
        if len(found := stages.get(layer, set())) != 1:
            return mesh
        (stage,) = found
        if not runs or runs[-1][0] != stage:
            runs.append([stage, 0])
        runs[-1][1] += 1
    if len(runs) % mesh.pp or any(stage != i % mesh.pp for i, (stage, _) in enumerate(runs)):
        return mesh
    return mesh.with_layout([n for _, n in runs])


MOST = 1 << 20
"""Layers, and experts of a layer. A name or a config may say any number, and there are tables of all of them."""
_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)


def _check_numbers(stored: StoredCheckpoint, family: Family, where: str) -> None:
    """Raises UnsupportedError for names that are too long, and for more layers or experts than any model has."""
    names = [t.name for t in stored.tensors] if stored.recorded is None else [k.name for k in stored.recorded.tensors]
    longest = max(map(len, names), default=0)
    if longest > MAX_NAME:
        raise UnsupportedError(f"the name of a tensor has {longest:,} characters: {MAX_NAME} at most", where=where)
    # A look at all names together is quick, and nearly always enough.
    text = "\n".join(names)
    suspects = () if text.isascii() and b"0" * len(str(MOST)) not in text.encode().translate(_ZEROS) else names
    for what, numbered in (("layers", LAYER), ("experts", EXPERT)):
        count, place = family.size(what) or 0, "config.json"
        for name in suspects:
            if (m := numbered.search(name)) and int(m[1]) >= count:
                count, place = int(m[1]) + 1, name
        if count > MOST:
            raise UnsupportedError(f"{count:,} {what} are more than any model has", where=[where, place])
