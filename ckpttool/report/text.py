"""Sizes, tables and JSON, and the difference between a terminal and a pipe."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TextIO

from ckpttool.core.words import ranges, short
from ckpttool.errors import UNSEEN, plain, unprinted
from ckpttool.report import status
from ckpttool.report.style import painted, styled

_UNSEEN = re.compile(f"[{UNSEEN}]")
_LABEL = re.compile(r"(?P<hint> *hint: )|(?:error|warning|note)(?: [\w-]+)*: |  --> | {6}(?=\S)")
_WORD = re.compile(
    r"( *)((?:--[\w-]+[ =][\w'/{*][^ `]*|`[^`]*`|(?<!\S)'[^']*'|ckpttool [^`]+$"
    r"|\[[\d, ]*\]|\b\d[\d.,]* (?:bytes?|[kMGTP]i?B)\b|\S)+)"
)
"""Spaces, and what stays on one line: a word, what is in backticks or quotes, a shape, a number with its unit, an
option with its value."""
_COMMAND = re.compile(r" *(?:\$ |next: |hint: (?:-(?!.*[;:] )|pip |\w+=))")
"""What a line begins with that can be pasted."""

COMPACT_FROM = 2000
"""Entries from which JSON is written without line breaks: indenting takes longer than finding the data."""


def exact(n: int) -> str:
    """``688,574,839,360 bytes (688.57 GB)``, for --verbose; small numbers stand alone."""
    return short(n) if n < 1000 else f"{n:,} bytes ({short(n)})"


def width() -> int:
    """Columns of the terminal."""
    return shutil.get_terminal_size((80, 24)).columns


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
    """Print prose with its colours; a name that the terminal's encoding does not have is written with escapes."""
    stream = to or sys.stdout
    put(painted(text, stream), stream)


def put(text: str, stream: TextIO) -> None:
    """Print what has its colours, or is for programs."""
    status.clear()
    try:
        stream.write(text)
    except UnicodeEncodeError:
        encoding = stream.encoding or "ascii"
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))


def message(text: str) -> None:
    """A line on stderr. That it cannot be written (a full disk for logs, no reader) is no reason to stop."""
    shown = text if not sys.stderr.isatty() else "\n".join(fold(line) for line in text.split("\n"))
    with contextlib.suppress(OSError):
        write(shown + "\n", sys.stderr)


def fold(line: str, hang: int = 2) -> str:
    """A line that is too long for the terminal, broken between words: below its label's text, or after ``hang``
    columns.

    What can be pasted stays whole: what is in backticks or quotes, a shell's line, and a hint that is a command. A word
    that alone is longer than a line stays whole, too.
    """
    columns = width()
    if columns_of(line) <= columns or _COMMAND.match(line):
        return line
    label = _LABEL.match(line)
    start = label.end() if label else 0
    words = _WORD.findall(line, start)
    most = max(columns_of(word) for _, word in words)
    hang = start or hang
    below = " " * (hang if hang + most <= columns else min(hang, 2))
    lines = [line[:start]]
    for spaces, word in words:
        if lines[-1].strip() and columns_of(lines[-1] + spaces + word) > columns:
            lines.append(below + word)
        else:
            lines[-1] += spaces + word
    return "\n".join(map(str.rstrip, lines))


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


def aligned(
    rows: Sequence[Sequence[str]],
    right: Iterable[int] = (),
    *,
    indent: str = "",
    colour: Callable[[int, int, str], str] | None = None,
) -> str:
    """Rows as columns two spaces apart. ``colour``: from numbers of row and column and a text to ANSI codes."""
    if not rows:
        return ""
    right = set(right)
    widths = [max(columns_of(row[i]) for row in rows if i < len(row)) for i in range(max(map(len, rows)))]
    out = []
    for number, row in enumerate(rows):
        filled = [i for i, cell in enumerate(row) if cell.strip()]
        line = indent
        for i, cell in enumerate(row[: filled[-1] + 1 if filled else 0]):
            spaces = " " * (widths[i] - columns_of(cell))
            shown = styled(cell, colour(number, i, cell)) if colour else cell
            line += ("  " if i else "") + (spaces + shown if i in right else shown + spaces)
        out.append(line.rstrip())
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
    put(text + "\n", sys.stdout)
