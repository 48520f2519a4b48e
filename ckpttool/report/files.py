"""Reports and pictures in files of their own, beside what is printed."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from ckpttool.errors import OutputError
from ckpttool.storage import system


def refuse_others(path: Path, what: str, begins: str) -> None:
    """Raises OutputError for a file that is there and is of another kind, such as one of the source's: what ``save``
    may replace is empty or begins with ``begins``, in capitals or not.
    """
    try:
        if not path.is_file() or not path.stat().st_size:
            return
        with path.open("rb") as f:
            found = f.read(len(begins.encode()))
    except OSError as e:
        raise OutputError(f"{what} cannot be written: {e.strerror}", where=str(path)) from None
    if found.lower() != begins.encode().lower():
        kind = what.removeprefix("the ")
        other = "holds something else" if kind.endswith("s") else f"is not a {kind}"
        raise OutputError(f"{what} would replace a file that {other}", where=str(path), hint="choose another name")


def check_place(path: Path, what: str, begins: str, *, appears: Path | None = None) -> None:
    """See, before long work begins, whether ``save`` may succeed; ``appears`` is a directory that will be there by
    then. Raises OutputError.
    """
    if "://" in str(path) or ":/" in str(path).split("/", 1)[0] + "/":
        raise OutputError(f"{what} is written on this machine", where=str(path), hint="name a file here")
    longest = system.longest_name(path.parent)
    if len(os.fsencode(path.name)) > longest:
        raise OutputError(f"{what} cannot be written: its name is longer than {longest} bytes", where=str(path))
    if path.is_dir() or path == appears:
        raise OutputError(f"{what} cannot be written: there is a directory of this name", where=str(path))
    refuse_others(path, what, begins)
    if path.exists() or (appears is not None and path.parent.absolute() == appears.absolute()):
        return
    if not path.parent.is_dir():
        raise OutputError(f"{what} cannot be written: there is no such directory", where=str(path.parent))
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise OutputError(f"{what} cannot be written: the directory may not be written", where=str(path.parent))


def save(path: Path, content: str, what: str, begins: str) -> None:
    """Write ``content`` to ``path`` as UTF-8; ``what`` is what messages call it: "the picture".

    A file that is there is replaced as a whole, and stays as it was when that fails, or when it does not begin with
    ``begins``, as all files of this kind do: it may be the checkpoint's. What is no regular file
    (``/dev/stdout``, a pipe, a link) is written to. Raises OutputError.
    """
    refuse_others(path, what, begins)
    try:
        if path.is_symlink() or (path.exists() and not path.is_file()):
            path.write_text(content, encoding="utf-8", errors="backslashreplace")
            return
        making = system.beside(path, ".", f".{secrets.token_hex(4)}")
        try:
            with making.open("x", encoding="utf-8", errors="backslashreplace") as f:
                f.write(content)
            making.replace(path)
        except BaseException:
            making.unlink(missing_ok=True)
            raise
    except OSError as e:
        raise OutputError(f"{what} cannot be written: {e.strerror}", where=str(path)) from None
