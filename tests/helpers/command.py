"""Running the command line inside the test process, through what the console script calls."""

from __future__ import annotations

import contextlib
import gc
import io
import re
import sys
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from ckpttool.cli.app import main


class Done(NamedTuple):
    """What a run left behind."""

    code: int
    out: str
    err: str


class Terminal(io.StringIO):
    """A stream that a person reads."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


_TAGS = {
    "1;31": "red", "32": "green", "33": "yellow", "35": "magenta", "36": "cyan", "94": "blue", "1": "b", "2": "dim",
}  # fmt: skip
ESCAPE = re.compile(r"\x1b\[([0-9;]+)m")


def tagged(text: str) -> str:
    """The text with colours as ``<red>text</>``."""
    return ESCAPE.sub(lambda m: "</>" if m[1] == "0" else f"<{_TAGS[m[1]]}>", text)


def ckpttool(*arguments: object, merged: bool = False, terminal: bool = False) -> Done:
    """Run with these arguments. An exception that ``main`` does not turn into an exit code passes through.

    ``merged``: ``out`` holds both streams, as they were written. ``terminal``: the same on a terminal.
    """
    out = Terminal() if terminal else io.StringIO()
    merged = merged or terminal
    err = out if merged else io.StringIO()
    collecting = gc.isenabled()
    code = 0
    try:
        with (
            patch.object(sys, "argv", ["ckpttool", *map(str, arguments)]),
            patch.object(sys.modules["__main__"], "__package__", None),  # or usage would be of `python -m pytest`
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    finally:
        if collecting:
            gc.enable()  # the command line switches it off for its own process
    return Done(code, out.getvalue(), err.getvalue())


def reshard(src: Path | str, dst: Path | str, *options: object) -> Done:
    """``ckpttool reshard``, which must succeed."""
    done = ckpttool("reshard", src, dst, *options)
    assert done.code == 0, f"ckpttool reshard {src} {dst} {' '.join(map(str, options))}\n{done.err}"
    return done


def refused(src: Path | str, dst: Path | str, *options: object, code: int = 1) -> str:
    """``ckpttool reshard``, which must fail with ``code``, one clear error and nothing left. Returns that error."""
    dst = Path(dst)
    before = dst.exists()
    done = ckpttool("reshard", src, dst, *options)
    assert done.code == code, (done.code, done.err)
    assert done.out == ""
    assert done.err.count("error: ") == 1, done.err
    assert "Traceback" not in done.err
    assert before or not dst.exists()
    assert not dst.with_name(dst.name + ".partial").exists()
    return done.err[done.err.index("error: ") :]
