"""Opening a checkpoint: format, mesh, family and layout become one catalog.

``open_checkpoint`` is the front door of every command and of the Python API. It reads headers and small JSON files,
never tensor data (copies of one file in two directories are compared, though).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpttool.catalog import Catalog, Key, LogicalTensor, Piece, StoredTensor
from ckpttool.containers.safetensors import MAX_NAME
from ckpttool.dialects import Dialect, NamingContext, dialect
from ckpttool.errors import CkptError, ConflictError, IncompleteError, UnsupportedError, UsageError
from ckpttool.formats.base import Capabilities, OpenOptions, StoredCheckpoint
from ckpttool.formats.registry import read_source, reader, refuse_part
from ckpttool.layout.assemble import EXPERT, LAYER, Assembler, whole_catalog
from ckpttool.layout.family import Family, Transform, family_names, find_family, load_family, no_family
from ckpttool.layout.rules import PartitionContext
from ckpttool.layout.shards import join_shards
from ckpttool.mesh import Mesh
from ckpttool.storage.place import Place, parse_place

__all__ = ["Checkpoint", "OpenOptions", "assemble", "open_checkpoint", "pick_family"]


@dataclass(slots=True)
class Checkpoint:
    """An opened checkpoint."""

    path: Place
    stored: StoredCheckpoint
    family: Family
    """Without rules (``name == "none"``) when none is known and none was needed."""
    catalog: Catalog
    notes: list[str]
    ops: tuple[Transform, ...] = ()
    """Statements that lead from Hugging Face names to the names of this checkpoint."""

    @property
    def format(self) -> str:
        return self.stored.format

    @property
    def capabilities(self) -> Capabilities:
        """Of its format."""
        return reader(self.stored.format).capabilities

    @property
    def mesh(self) -> Mesh:
        return self.stored.mesh

    @property
    def dialect(self) -> Dialect:
        """Whose names, orientation and fusions its tensors have."""
        return dialect(self.stored.dialect)

    @property
    def config(self) -> dict[str, Any]:
        return self.stored.config

    @property
    def components(self) -> tuple[str, ...]:
        """Those that it has, in the order in which it names them first."""
        return tuple(dict.fromkeys(k.component for k in self.catalog.tensors))


def pick_family(name: str, recorded: str, config: Mapping[str, Any]) -> Family:
    """The named family, else the recorded one, else the one that the config names, else one without rules.

    A recorded name that is not known is that of a user's file. Raises UnsupportedError for an unknown ``name``.
    """
    chosen = name or (recorded if recorded in family_names() else "") or find_family(config)
    return load_family(chosen, config) if chosen and chosen != "none" else no_family()


def open_checkpoint(path: str | Place, options: OpenOptions | None = None) -> Checkpoint:
    """Index a checkpoint.

    Raises UsageError (no such path or flag, one file of several), IncompleteError (a file is missing), CorruptError (a
    header is wrong), ConflictError (flags, config and files disagree), LayoutError (a tensor has no rule),
    UnsupportedError.
    """
    options = options or OpenOptions()
    if not options.format and not options.mesh.rank_pattern:
        refuse_part(parse_place(path))
    return assemble(read_source(parse_place(path), options.format, options.mesh), parse_place(path), options)


def assemble(stored: StoredCheckpoint, root: Place, options: OpenOptions, family: Family | None = None) -> Checkpoint:
    """The second half of opening: family and layout turn stored tensors into the catalog. Raises as above.

    ``family`` is for callers that have one already.
    """
    notes = list(stored.notes)
    family = family or pick_family(options.family, stored.family, stored.config)
    _check_numbers(stored, family, str(root))
    if options.replicate or options.split:
        family = family.with_overrides(options.replicate, options.split)
    capabilities = reader(stored.format).capabilities
    if options.mesh.more and not capabilities.multi_directory:
        raise UsageError(
            f"--also names a further directory, and a {stored.format} checkpoint lies in one",
            where=str(options.mesh.more[0]),
        )
    if options.mesh.sharding not in (None, stored.sharding):
        raise ConflictError(
            f"--sharding {options.mesh.sharding} contradicts the checkpoint: its optimizer state is shared by"
            f" {stored.sharding} rank{'s' if stored.sharding > 1 else ''}",
            where=str(root),
            hint="drop --sharding: it is read from the checkpoint",
        )
    said = dialect(stored.dialect)
    if said.published and stored.recorded is None:
        stored.dialect, stored.fused = said.form(family, (t.name for t in stored.tensors))
    context = NamingContext(family, stored.config, stored.mesh, stored.fused)
    ops = dialect(stored.dialect).detect(context, lambda: _shapes(stored))
    if stored.recorded is not None:
        catalog = stored.recorded
    else:
        catalog = Catalog(stored.files, {})
        for component, tensors in _by_component(stored.tensors).items():
            mesh = stored.cut.get(component[0], stored.mesh)
            if mesh.world == 1 and said.whole_alone:
                catalog.tensors |= whole_catalog(stored.files, tensors, copies=not said.published).tensors
                continue
            rules = family.with_whole(stored.whole)
            cutting = PartitionContext(mesh, family.sizes, optional=family.guards(), pad_vocab=capabilities.pad_vocab)
            wholes = {k.name: t.shape for k, t in catalog.tensors.items() if k.component in ("model", "adapter")}
            if not stored.records_cuts:
                found_whole = said.found_whole(context._replace(family=rules), ops, cutting, wholes, tensors)
                rules = rules.with_whole(found_whole)
            assembler = Assembler(
                stored.files, rules, ops, cutting, stored.config, capabilities.local_layers, wholes=wholes
            )
            try:
                found = assembler.run(tensors)
            except CkptError as e:
                e.where = (*e.where, f"while reading {root} as {stored.format} ({mesh})")
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
    tied = family.tied
    head, embedding = (catalog.tensors.get(Key(n)) for n in ("lm_head.weight", "model.embed_tokens.weight"))
    if tied and head and embedding and _bytes_of(head) == _bytes_of(embedding):
        notes.append("`lm_head.weight` has the bytes of `model.embed_tokens.weight`, to which it is tied; read once")
        del catalog.tensors[head.key]
    names = {k.name for k in catalog.tensors}
    if tied and "lm_head.weight" not in names and "model.embed_tokens.weight" in names:
        catalog.aliases = {Key("lm_head.weight"): Key("model.embed_tokens.weight")}
    return Checkpoint(root, stored, family, catalog, notes, ops)


def _bytes_of(tensor: LogicalTensor) -> list[Piece]:
    """Where its elements lie, whatever the stored tensors are called: formats with views may store two in one place."""
    return [p._replace(stored=p.stored._replace(name="")) for p in tensor.pieces]


def refuse_empty(checkpoint: Checkpoint) -> None:
    """Raises IncompleteError for a checkpoint without a single tensor."""
    if not checkpoint.catalog.tensors:
        raise IncompleteError(
            "the checkpoint holds no tensors",
            where=str(checkpoint.path),
            hint="its files have headers and nothing else: save or fetch it again",
        )


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


def _by_component(tensors: Sequence[StoredTensor]) -> dict[tuple[str, str], list[StoredTensor]]:
    """Tensors by (component, state); each is assembled by itself, because names repeat from one to the next."""
    out: dict[tuple[str, str], list[StoredTensor]] = {}
    for t in tensors:
        out.setdefault((t.component, t.state), []).append(t)
    return out


def _shapes(stored: StoredCheckpoint) -> dict[str, tuple[int, ...]]:
    """A shape for each parameter, as a rank holds it; a scalar of the optimizer only where there is nothing else."""
    if stored.recorded is not None:
        return {t.key.name: t.shape for t in sorted(stored.recorded, key=lambda t: len(t.shape))}
    return {t.name: t.shape for t in sorted(stored.tensors, key=lambda t: (t.component == "model", len(t.shape)))}
