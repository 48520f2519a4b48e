"""Reshard, convert and inspect large-model checkpoints by moving byte ranges.

The Python API (``open``, ``Checkpoint``, ``Resharding``) is loaded on first use, so that importing the package, and
with it ``ckpttool --help``, stays instant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpttool.api import Checkpoint, Resharding
    from ckpttool.api import open_ as open  # noqa: A004 - ckpttool.open() is the front door
    from ckpttool.errors import CkptError

__version__ = "0.1.0"
__all__ = ["Checkpoint", "CkptError", "Resharding", "__version__", "open"]


def __getattr__(name: str) -> Any:
    if name == "CkptError":
        from ckpttool.errors import CkptError

        return CkptError
    if name in ("open", "Checkpoint", "Resharding"):
        from ckpttool import api

        return getattr(api, "open_" if name == "open" else name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
