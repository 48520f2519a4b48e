"""How a command ends that fails: one clear error on stderr, and with --json the same as an object on stdout."""

from __future__ import annotations

import contextlib
import sys

import typer

from ckpttool.errors import CkptError


def failed(error: CkptError, *, kind: str = "", code: int | None = None, text: str = "") -> typer.Exit:
    """Print the error, and return the exit for it. ``kind``, ``code`` and ``text`` are the error's own by default."""
    from ckpttool.report.text import dump, message

    code = error.exit_code if code is None else code
    with contextlib.suppress(OSError):  # nobody may be there to read it; the exit code is
        message(text or error.render())
        page = _page(error) if not kind else ""
        if page and sys.stderr.isatty():
            message(f"more: ckpttool explain {page}")
        if _asked_for_json():
            about = {"kind": kind or _kind(error), "message": error.what}
            parts = {**about, "where": list(error.where), "hint": error.hint, "page": page or None}
            dump({"schema": "ckpttool.error/1", "error": parts, "exit_code": code})
            sys.stdout.flush()
    return typer.Exit(code)


def _kind(error: CkptError) -> str:
    """``corrupt`` for a CorruptError and all that are one."""
    known = next(c for c in type(error).__mro__ if c.__module__ == CkptError.__module__)
    return known.__name__.removesuffix("Error").lower()


def _page(error: CkptError) -> str:
    """What ``ckpttool explain`` calls the error; "" for one that no page is about."""
    return "" if type(error) is CkptError else _kind(error)


def _asked_for_json() -> bool:
    """Whether the command line has --json. It may not be readable otherwise."""
    words = sys.argv[1:]
    return "--json" in (words[: words.index("--")] if "--" in words else words)
