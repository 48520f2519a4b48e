"""Errors as plain data, to be sent between processes."""

from __future__ import annotations

import traceback
from typing import Any

from ckpttool import errors
from ckpttool.errors import CkptError
from ckpttool.execute.files import SourceReadError

_KINDS: dict[str, type[CkptError]] = {
    c.__name__: c for c in (*vars(errors).values(), SourceReadError) if isinstance(c, type) and issubclass(c, CkptError)
}


def error_to_data(error: BaseException) -> list[Any]:
    """An error as plain data; for an unexpected one, its traceback."""
    if isinstance(error, CkptError):
        kind = next(c.__name__ for c in type(error).__mro__ if c.__name__ in _KINDS)  # a subclass may be of one storage
        return [kind, error.what, list(error.where), error.hint, error.finding]
    return ["", "".join(traceback.format_exception(error)), [], None, ""]


def error_from_data(said: list[Any], *, whose: str) -> Exception:
    """The error that ``error_to_data`` was given; ``whose`` is where an unexpected one came up."""
    kind, what, where, hint, finding = said
    if kind not in _KINDS:
        return RuntimeError(f"in {whose}:\n{what}")
    return _KINDS[kind](what, where=where, hint=hint, finding=finding)


def on_node(error: Exception, node: str) -> Exception:
    """The error, with the machine where it came up as the last line of ``where``."""
    if isinstance(error, CkptError):
        error.where = (*error.where, f"on {node}")
        return error
    return RuntimeError(f"on {node}: {error}")
