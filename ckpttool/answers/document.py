"""What a command says about its answer: one object for programs, and sections for people.

A module of ``report`` makes the ``Document`` of an answer; ``report.render.show`` prints it on a terminal, in a pipe or
as JSON. A document says what there is to see and never where it is printed. Both halves are made only when they are
asked for, because either may list a hundred thousand tensors.

The classes are never compared or printed: without these methods, every command starts three milliseconds earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False, repr=False)
class BarCell:
    """A cell of a table that is drawn as a bar; a column of them is on terminals only."""

    share: float | None
    """0 to 1, of the longest bar."""
    longest: int = 16
    """Characters of the longest bar."""


DocumentCell = str | int | BarCell
"""Text is printed as it is: names of tensors and files go through ``errors.plain`` first. Whole numbers have commas on
terminals and are aligned to the right."""


@dataclass(eq=False, repr=False)
class Section:
    """A part of a document."""

    quiet: bool = field(default=False, kw_only=True)
    """Printed with --quiet, too."""
    loud: bool = field(default=True, kw_only=True)
    """Printed without --quiet; False for what --quiet has in place of another section."""


@dataclass(eq=False, repr=False)
class Paragraph(Section):
    """Lines on stdout, without the last line's end."""

    text: str
    wrap: bool = True
    """Lines that are too long for a terminal are broken between words; False for what a file may be made of."""
    hang: int = 2
    """Columns before the second and the following lines of prose."""


@dataclass(eq=False, repr=False)
class Message(Section):
    """Lines about the answer, on stderr. What was printed on stdout before them is flushed."""

    text: str


@dataclass(eq=False, repr=False)
class Overview(Section):
    """Labels and values above a table: on a terminal on stdout, elsewhere on stderr."""

    rows: Sequence[tuple[str, str]]
    """A label is empty where a row continues the one above."""


@dataclass(eq=False, repr=False)
class Table(Section):
    """Rows below a header: fitted to a terminal, tab-separated values in a pipe.

    Whole numbers in a column whose title ends with ``bytes`` are exact in a pipe, and sizes (``1.20 GB``) on a
    terminal.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[DocumentCell]]
    names: int = 0
    """The column of names, which lose their middles where a terminal is narrow."""
    drop: Sequence[str] = ()
    """Columns that a narrow terminal loses, the first of them first."""
    right: Iterable[int] = ()
    """Columns of text that are aligned to the right, besides those of numbers."""
    tabs: bool = True
    """Whether a pipe gets tab-separated values; else the same columns as a wide terminal."""


@dataclass(eq=False, repr=False)
class PerMedium(Section):
    """Two forms of one part: a short one for a terminal, a complete one for a pipe."""

    terminal: Callable[[], Iterable[Section]]
    pipe: Callable[[], Iterable[Section]]


def _nothing() -> Iterable[Section]:
    return ()


@dataclass(eq=False, repr=False)
class Document:
    """Everything that a command prints about an answer."""

    json: Callable[[], Mapping[str, Any]]
    """What ``--json`` prints: an object that begins with ``schema``."""
    sections: Callable[[], Iterable[Section]] = _nothing
    """For people, in the order in which they are printed."""
    notes: Sequence[str] = ()
    """What was inferred or left out: on stderr before the sections; not with --quiet or --json."""
    entries: int = 0
    """About how many entries the JSON has: many are printed without line breaks."""
    of_files: bool = False
    """It is about files that have been written: that it cannot be printed is only a warning."""
