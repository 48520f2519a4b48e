"""Which destination a place is. Another one is an addition: a module with ``destination(dst, single=...)``."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from ckpttool.errors import OutputError, UsageError
from ckpttool.execute.commit import LocalDestination
from ckpttool.execute.destination import Destination
from ckpttool.storage.place import Place

MODULES = {"hf": "hub", **dict.fromkeys(("s3", "gs", "az"), "objects")}
"""Scheme -> module beside this one, imported when there is something to write there."""


def destination_for(dst: Place, *, single: bool = False) -> Destination:
    """The destination that a place is. ``single``: DST is to be a file, the only output.

    Raises OutputError for places that cannot be written, UsageError when a package is missing.
    """
    if isinstance(dst, Path):
        return LocalDestination(dst, single=single)
    scheme = str(dst).partition(":")[0]
    if scheme not in MODULES:
        known = ", ".join(f"{s}://" for s in MODULES)
        raise OutputError(f"{scheme}: cannot be written", where=str(dst), hint=f"choose a directory, or one of {known}")
    try:
        module = import_module(f"ckpttool.execute.{MODULES[scheme]}")
    except ModuleNotFoundError as e:
        if e.name is None or e.name.partition(".")[0] == "ckpttool":
            raise
        hint = "pip install 'ckpttool[remote]'"
        raise UsageError(f"{scheme}:// needs a package that is not installed: {e.name}", hint=hint) from None
    found: Destination = module.destination(dst, single=single)
    return found
