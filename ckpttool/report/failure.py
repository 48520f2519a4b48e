"""What went wrong, for programs on stdout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.report.text import dump

if TYPE_CHECKING:
    from ckpttool.errors import CkptError

SCHEMA = "ckpttool.error/1"


def show_failure(error: CkptError, *, kind: str, exit_code: int, page: str) -> None:
    """``--json`` of a command that fails: the parts of the error, and the exit code of the process. ``page`` is what
    ``ckpttool explain`` explains it by."""
    parts = {"kind": kind, "message": error.what, "where": list(error.where), "hint": error.hint, "page": page or None}
    dump({"schema": SCHEMA, "error": parts, "exit_code": exit_code})
