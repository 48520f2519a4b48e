"""Opening a checkpoint: format, mesh, family and layout become one catalog.

``open_checkpoint`` is the front door of every command and of the Python API. It reads headers and small JSON files,
never tensor data (copies of one file in two directories are compared, though).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpttool.core.catalog import Catalog
from ckpttool.core.files import AnyPlace, Place
from ckpttool.core.mesh import Mesh
from ckpttool.dialects import Dialect, dialect, recognize
from ckpttool.errors import ConflictError, IncompleteError, UsageError
from ckpttool.formats.base import Capabilities, ChecksItself, OpenOptions, StoredCheckpoint, check_mesh
from ckpttool.formats.parts import parts_of
from ckpttool.formats.registry import read_source, reader
from ckpttool.layout.components import catalog_of, family_of
from ckpttool.layout.family import Family
from ckpttool.layout.modules import model_forms
from ckpttool.layout.statements import Rename, Transform, inverse
from ckpttool.layout.unknown import sizes_from
from ckpttool.storage.place import parse_place

__all__ = ["Checkpoint", "OpenOptions", "assemble", "open_checkpoint"]


@dataclass(slots=True)
class Checkpoint:
    """An opened checkpoint."""

    path: Place
    stored: StoredCheckpoint
    family: Family
    """The family's rules; none (``name == "none"``) when none is known and none was needed."""
    catalog: Catalog
    notes: list[str]
    ops: tuple[Transform, ...] = ()
    """Statements that lead from Hugging Face names to the names of this checkpoint."""

    @property
    def format(self) -> str:
        return self.stored.format

    @property
    def capabilities(self) -> Capabilities:
        """The abilities of its format."""
        return reader(self.stored.format).capabilities

    @property
    def is_program(self) -> bool:
        """Whether these are the parameters of a program, which needs each of them."""
        return isinstance(reader(self.stored.format), ChecksItself)

    @property
    def mesh(self) -> Mesh:
        return self.stored.mesh

    @property
    def dialect(self) -> Dialect:
        """The software whose names, orientation and fusions the tensors have."""
        return dialect(self.stored.dialect)

    @property
    def config(self) -> dict[str, Any]:
        return self.stored.config

    def published(self, name: str) -> str:
        """The name that Hugging Face's checkpoints have for a tensor."""
        for op in inverse(self.ops):
            if isinstance(op, Rename):
                name = op.forward(name)
        return name

    @property
    def components(self) -> tuple[str, ...]:
        """Those that it has, in the order in which it names them first."""
        return tuple(dict.fromkeys(k.component for k in self.catalog.tensors))


def open_checkpoint(path: AnyPlace, options: OpenOptions | None = None) -> Checkpoint:
    """Index a checkpoint.

    Raises UsageError (no such path or flag, one file of several), IncompleteError (a file is missing), CorruptError (a
    header is wrong), ConflictError (flags, config and files disagree), LayoutError (a tensor has no rule),
    UnsupportedError.
    """
    options, place = options or OpenOptions(), parse_place(path)
    stored = read_source(place, options.format, options.mesh, complete=True)
    if stored.mesh.world == 1 and not stored.cut:
        check_mesh(stored.format, {"tp": 1, "pp": 1, "ep": 1, "etp": 1}, options.mesh, place)
    return assemble(stored, place, options)


def assemble(stored: StoredCheckpoint, root: Place, options: OpenOptions, family: Family | None = None) -> Checkpoint:
    """The second half of opening: family and layout turn stored tensors into the catalog. Raises as above.

    ``family`` is for callers that have one already.
    """
    if parts_of(stored) is not None and (options.family or options.replicate or options.split):
        raise UsageError(
            "--family and --split are for one model, and this is a directory of several",
            where=str(root),
            hint="give one part of it as SRC",
        )
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
            hint="drop --sharding: it is read from the checkpoint. What is written is --sharding-out",
        )
    family = family_of(stored, options, str(root), family)
    with sizes_from(stored.config, str(root)):
        return _assembled(stored, root, family, capabilities)


def _assembled(stored: StoredCheckpoint, root: Place, family: Family, capabilities: Capabilities) -> Checkpoint:
    if stored.unnamed is not None:
        stored.unnamed(model_forms(family, {t.name: t.shape for t in stored.tensors if t.component == "model"}))
    said, context, ops = recognize(stored, family)
    catalog, notes = catalog_of(
        stored, family, ops, capabilities, str(root), copies=not said.published, whole_alone=said.whole_alone,
        found_whole=lambda rules, *held: said.found_whole(context._replace(family=rules), ops, *held),
    )  # fmt: skip
    return Checkpoint(root, stored, family, catalog, [*_notes(root), *stored.notes, *notes], ops)


def _notes(root: Place) -> list[str]:
    note = "" if isinstance(root, Path) else root.note()
    return [note] if note else []


def refuse_empty(checkpoint: Checkpoint) -> None:
    """Raises IncompleteError for a checkpoint without a single tensor."""
    if not checkpoint.catalog.tensors:
        raise IncompleteError(
            "the checkpoint holds no tensors",
            where=str(checkpoint.path),
            hint="its files have headers and nothing else: save or fetch it again",
        )
