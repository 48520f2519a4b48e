"""Reshard, convert, merge and inspect large-model checkpoints by moving byte ranges.

The Python API is loaded on first use, so that importing the package, and with it ``ckpttool --help``, stays instant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpttool.version import __version__

if TYPE_CHECKING:
    from ckpttool.api import (
        Checkpoint,
        CheckResult,
        Conversion,
        DiffResult,
        Dropping,
        Finding,
        Merging,
        Plan,
        Report,
        Resharding,
        Size,
        Written,
        check,
        convert,
        diff,
        drop_keys,
        make_report,
        merge,
        size,
    )
    from ckpttool.api import open_ as open  # noqa: A004 - ckpttool.open() is the front door
    from ckpttool.errors import CkptError

__all__ = [
    "CheckResult",
    "Checkpoint",
    "CkptError",
    "Conversion",
    "DiffResult",
    "Dropping",
    "Finding",
    "Merging",
    "Plan",
    "Report",
    "Resharding",
    "Size",
    "Written",
    "__version__",
    "check",
    "convert",
    "diff",
    "drop_keys",
    "make_report",
    "merge",
    "open",
    "size",
]


def __getattr__(name: str) -> Any:
    if name == "CkptError":
        from ckpttool.errors import CkptError

        return CkptError
    if name in __all__:
        from ckpttool import api

        return getattr(api, "open_" if name == "open" else name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
