"""Opening what ``inspect`` looks at: all that ``reshard`` reads, and adapters, which are no checkpoints to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.core.files import Place
from ckpttool.errors import IncompleteError, UnsupportedError
from ckpttool.formats.base import OpenOptions, StoredCheckpoint
from ckpttool.formats.registry import read_source

if TYPE_CHECKING:
    from ckpttool.checkpoint import Checkpoint
    from ckpttool.layout.family import Family

PEFT = "peft"
"""The format of an adapter that PEFT wrote; Paddle's are ``unified``."""
CONFIG = "adapter_config.json"


def read(path: Place, options: OpenOptions) -> StoredCheckpoint:
    """Index the headers of a checkpoint or of an adapter. Raises what ``read_source`` and ``read_adapter`` raise."""
    if path.name.startswith("adapter_model.") and (path.parent / CONFIG).is_file() and not options.format:
        path = path.parent
    try:
        return read_source(path, options.format, options.mesh)
    except (IncompleteError, UnsupportedError):
        if options.format or not (path / CONFIG).is_file():
            raise
    from ckpttool.adapters.read import read_stored

    return read_stored(path, PEFT)


def join(stored: StoredCheckpoint, path: Place, options: OpenOptions, family: Family | None = None) -> Checkpoint:
    """The checkpoint with its catalog. Raises LayoutError when no rule says how its ranks fit together."""
    from ckpttool.checkpoint import Checkpoint, assemble  # loads the layout rules, which most listings do not need

    if stored.format != PEFT or stored.recorded is None:
        return assemble(stored, path, options, family)
    from ckpttool.layout.family import no_family

    return Checkpoint(path, stored, no_family(), stored.recorded, list(stored.notes))
