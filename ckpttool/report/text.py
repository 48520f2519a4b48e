"""Sizes, tables and JSON, and the difference between a terminal and a pipe."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from ckpttool.answers.fields import pick as pick  # noqa: PLC0414 - the renderers import both from here
from ckpttool.answers.fields import shape as shape  # noqa: PLC0414
from ckpttool.core.words import ranges, short
from ckpttool.errors import UNSEEN, plain, unprinted
from ckpttool.report.style import painted

if TYPE_CHECKING:
    from ckpttool.core.plan import Plan
    from ckpttool.execute import RunOptions, RunResult

_UNSEEN = re.compile(f"[{UNSEEN}]")
_LABEL = re.compile(r"(?P<hint> *hint: )|(?:error|warning|note)(?: [\w-]+)*: |  --> | {6}(?=\S)")
_WORD = re.compile(r"(?:`[^`]*`|(?<!\S)'[^']*'|\S)+")
_OPTION = re.compile(r"(?<!\S)[('\"]*--?\w")

COMPACT_FROM = 2000
"""Entries from which JSON is written without line breaks: indenting takes longer than finding the data."""


def size(n: int) -> str:
    """``688,574,839,360 bytes (688.57 GB)``; small numbers stand alone."""
    return short(n) if n < 1000 else f"{n:,} bytes ({short(n)})"


def times(run: RunResult) -> str:
    """``; planned in 0.2 s, written in 3.1 s at 1.20 GB/s, verified in 2.0 s``; "" for what took less than a second."""
    if run.plan_seconds + run.seconds < 1:
        return ""
    rate = f" at {short(round(run.bytes_written / run.write_seconds))}/s" if run.bytes_written else ""
    said = f"; planned in {run.plan_seconds:.1f} s, written in {run.write_seconds:.1f} s{rate}"
    return said + (f", verified in {run.verify_seconds:.1f} s" if run.verify_seconds else "")


def done(run: RunResult) -> dict[str, Any]:
    """What JSON says of every run; the phases in seconds."""
    took = {"plan": run.plan_seconds, "write": run.write_seconds, "verify": run.verify_seconds}
    at = run.standing
    return {
        **({} if at is None else {"part": at.member.number, "of": at.member.of, **pick(at, "committed waiting_for")}),
        **pick(run, "bytes_written bytes_resumed=bytes_skipped"),
        "seconds": round(run.seconds, 6),
        "phases": {name: round(seconds, 6) for name, seconds in took.items()},
    }


def show_waiting(dst: str, run: RunResult) -> bool:
    """Say that this process has done its part, and for whom DST waits. False where DST is complete."""
    at = run.standing
    if at is None or at.committed:
        return False
    left = f"waiting for {'part' if len(at.waiting_for) == 1 else 'parts'} {ranks(at.waiting_for)}"
    if not at.waiting_for:
        left = "all parts are done, and another process completes it"
    write(f"{plain(dst)}: {at.member} is done{times(run)}; {left}\n")
    return True


def share_of(plan: Plan, run: RunOptions) -> dict[str, int]:
    """For JSON, what this process would do of a plan, where it does one part of it."""
    if run.member is None:
        return {}
    from ckpttool.execute.machines.shares import cut
    from ckpttool.execute.schedule import schedule

    tasks = schedule(plan, ["manifest"] * run.manifest)
    own = cut(plan, tasks, run.member.of)[run.member.number - 1]
    return {
        "part": run.member.number,
        "of": run.member.of,
        "part_bytes": sum([p.nbytes for t in own for p in tasks[t].parts]),
    }


def share_line(plan: Plan, run: RunOptions) -> str:
    """The same for people; "" where it does all."""
    share = share_of(plan, run)
    return f"{run.member}: {short(share['part_bytes'])} of {short(plan.bytes_written)} to write" if share else ""


def overview(rows: Sequence[tuple[str, str]]) -> None:
    """What a run is going to do, a label and a line each: on stdout for a person, elsewhere on stderr."""
    if on_terminal():
        write(aligned(rows) + "\n")
        return
    for label, line in rows:
        message(f"{label or ' ' * 6:6}  {line}".rstrip())


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


def next_step(line: str) -> None:
    """How to use a result, below everything else that is said of it."""
    if line:
        sys.stdout.flush()
        message(f"next: {plain(line)}")


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
