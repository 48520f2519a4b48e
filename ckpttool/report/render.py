"""Prints documents: as JSON, as text on a terminal, or as text and tab-separated values in a pipe."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from functools import singledispatch

from ckpttool.answers.document import BarCell, Document, Message, Overview, Paragraph, PerMedium, Section, Table
from ckpttool.report import text
from ckpttool.report.meters import bar
from ckpttool.report.style import BOLD, coloured, styled
from ckpttool.report.tables import table


def show(document: Document, *, as_json: bool = False, quiet: bool = False) -> None:
    """Print a document; with ``quiet`` only the sections that are meant for that.

    Raises OSError when stdout cannot be written, except for a document of files that have been written.
    """
    with text.of_a_result() if document.of_files else contextlib.nullcontext():
        if as_json:
            text.dump(dict(document.json()), entries=document.entries)
            return
        if not quiet:
            text.notes(document.notes)
        show_sections(document.sections(), quiet=quiet)


def show_sections(sections: Iterable[Section], *, quiet: bool = False) -> None:
    """Print each as soon as it is made."""
    for section in sections:
        if section.quiet if quiet else section.loud:
            _show(section)


@singledispatch
def _show(section: Section) -> None:
    raise TypeError(section)


draws = _show.register
"""Decorates a function that prints another kind of section."""


@_show.register
def _show_paragraph(section: Paragraph) -> None:
    lines = section.text.split("\n")
    if section.wrap and text.on_terminal():
        lines = [text.fold(line, section.hang) for line in lines]
    text.write("\n".join(lines) + "\n")


@_show.register
def _show_message(section: Message) -> None:
    sys.stdout.flush()
    text.message(section.text)


@_show.register
def _show_overview(section: Overview) -> None:
    if not text.on_terminal():
        for label, line in section.rows:
            text.message(f"{label or ' ' * 6:6}  {line}".rstrip())
        return
    most, bold = max(len(label) for label, _ in section.rows), coloured(sys.stdout)
    for label, line in section.rows:
        hang = most + 2 + len(line) - len(line.lstrip()) + 2
        first, *more = text.fold(f"{label:{most}}  {line}".rstrip(), hang).split("\n")
        shown = styled(label, BOLD) + first[len(label) :] if bold else first
        text.write("\n".join([shown, *more]) + "\n")
    text.write("\n")


@_show.register
def _show_table(section: Table) -> None:
    drawn = text.on_terminal()
    bars = {i for row in section.rows for i, cell in enumerate(row) if isinstance(cell, BarCell)}
    keep = [i for i in range(len(section.header)) if drawn or i not in bars]
    header = [section.header[i] for i in keep]
    rows = [[bar(c.share, c.longest) if isinstance(c := row[i], BarCell) else c for i in keep] for row in section.rows]
    place = {i: at for at, i in enumerate(keep)}
    right = {place[i] for i in section.right if i in place}
    if drawn or section.tabs:
        table(header, rows, names=place[section.names], drop=section.drop, right=right, sizes=section.tabs)
        return
    right |= {i for row in rows for i, cell in enumerate(row) if isinstance(cell, int)}
    text.put(text.aligned([header, *(list(map(text.cell, row)) for row in rows)], right=right), sys.stdout)


@_show.register
def _show_per_medium(section: PerMedium) -> None:
    show_sections(section.terminal() if text.on_terminal() else section.pipe())
