"""Sizes, tables and JSON, and the difference between a terminal and a pipe."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TextIO

from ckpttool.core.words import ranges, short
from ckpttool.errors import UNSEEN, plain, unprinted
from ckpttool.report.style import painted

_UNSEEN = re.compile(f"[{UNSEEN}]")
_LABEL = re.compile(r"(?P<hint> *hint: )|(?:error|warning|note)(?: [\w-]+)*: |  --> | {6}(?=\S)")
_WORD = re.compile(r"(?:`[^`]*`|(?<!\S)'[^']*'|\S)+")
_OPTION = re.compile(r"(?<!\S)[('\"]*--?\w")

COMPACT_FROM = 2000
"""Entries from which JSON is written without line breaks: indenting takes longer than finding the data."""


def size(n: int) -> str:
    """``688,574,839,360 bytes (688.57 GB)``; small numbers stand alone."""
    return short(n) if n < 1000 else f"{n:,} bytes ({short(n)})"


def cell(value: str | int) -> str:
    """Whole numbers with commas between thousands."""
    return f"{value:,}" if isinstance(value, int) else value


def ranks(numbers: Sequence[int]) -> str:
    """``0-3,7``."""
    return ranges(numbers, "-")


def on_terminal() -> bool:
    """Whether a person reads stdout as it is written."""
    return sys.stdout.isatty()


def write(text: str, to: TextIO | None = None) -> None:
    """Print; a name that the terminal's encoding does not have is written with escapes."""
    stream = to or sys.stdout
    try:
        stream.write(painted(text, stream))
    except UnicodeEncodeError:
        encoding = stream.encoding or "ascii"
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))


def message(text: str) -> None:
    """A line on stderr. That it cannot be written (a full disk for logs, no reader) is no reason to stop."""
    with contextlib.suppress(OSError):
        write("\n".join(map(_folded, text.split("\n"))) + "\n", sys.stderr)


def _folded(line: str) -> str:
    """On a terminal, a line that is too long for it broken between words, below its label's text.

    What can be pasted stays whole: what is in backticks or quotes, and a hint with options.
    """
    columns = shutil.get_terminal_size().columns
    if len(line) <= columns or not sys.stderr.isatty():
        return line
    label = _LABEL.match(line)
    if label is None or (label["hint"] and _OPTION.search(re.sub("`[^`]*`", "", line))):
        return line
    first, *words = _WORD.findall(line, label.end())
    out = [label[0] + first]
    for word in words:
        if len(out[-1]) + 1 + len(word) > columns:
            out.append(" " * len(label[0]) + word)
        else:
            out[-1] += " " + word
    return "\n".join(out)


@contextlib.contextmanager
def of_a_result() -> Iterator[None]:
    """What is printed about files that are written. That it cannot be is a warning: the exit code speaks of the files.

    Nothing is said where the reader has gone (`| head`).
    """
    try:
        yield
        sys.stdout.flush()
    except OSError as e:
        if e.filename is not None:
            raise
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
        if why := unprinted(e):
            message(f"warning: the output is complete, but ckpttool {why}")


def notes(lines: Iterable[str]) -> None:
    """What was inferred or left out, on stderr."""
    for line in lines:
        message(f"note: {plain(line)}")


def columns_of(text: str) -> int:
    """Columns of a terminal that a text takes: two for each wide character (Chinese, Japanese, Korean, emoji), none for
    what is put on another one."""
    if text.isascii():
        return len(text)
    import unicodedata

    wide = sum([unicodedata.east_asian_width(c) in "WF" for c in text])
    return len(text) + wide - sum([unicodedata.category(c) in ("Mn", "Me", "Cf") for c in text])


def aligned(rows: Sequence[Sequence[str]], right: Iterable[int] = (), *, indent: str = "") -> str:
    """Rows as columns two spaces apart."""
    if not rows:
        return ""
    right = set(right)
    widths = [max(columns_of(row[i]) for row in rows if i < len(row)) for i in range(max(map(len, rows)))]
    out = []
    for row in rows:
        spaces = [" " * (widths[i] - columns_of(cell)) for i, cell in enumerate(row)]
        cells = [s + cell if i in right else cell + s for i, (cell, s) in enumerate(zip(row, spaces, strict=True))]
        out.append(indent + "  ".join(cells).rstrip())
    return "\n".join(out) + "\n"


def dump(data: dict[str, Any], *, entries: int = 0) -> None:
    """Print JSON. ``entries`` is about how many there are."""
    # Escapes of JSON, not those of ``write``, where the encoding does not have a character.
    ascii_only = (sys.stdout.encoding or "utf-8").lower().replace("-", "") != "utf8"
    if entries >= COMPACT_FROM:
        text = json.dumps(data, ensure_ascii=ascii_only, allow_nan=False, separators=(",", ":"))
    else:
        text = json.dumps(data, ensure_ascii=ascii_only, allow_nan=False, indent=2)
    # JSON escapes no more than it must, and terminals obey more than that.
    if not text.isascii() or "\x7f" in text:
        text = _UNSEEN.sub(lambda m: f"\\u{ord(m[0]):04x}", text)
    write(text + "\n")
