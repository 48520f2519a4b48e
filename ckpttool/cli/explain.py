"""``ckpttool explain``: what a class of errors or a finding means, without a network."""

from __future__ import annotations

from typing import Annotated

from ckpttool.cli import options
from ckpttool.cli.options import argument, flag


@options.grouped
def explain(
    *,
    name: Annotated[
        str, argument("NAME", "A class of errors, such as layout, or a finding; all are listed without.")
    ] = "",
    json: Annotated[bool, flag("--json", "Print the result as JSON.")] = False,
) -> None:
    """Explain a class of errors, or a finding of a check: what it means, and what to do."""
    from ckpttool.report.explained import explain as text_of
    from ckpttool.report.explained import listed
    from ckpttool.report.tables import width
    from ckpttool.report.text import dump, on_terminal, write

    columns = width() if on_terminal() and not json else 0
    text = text_of(name, columns) if name else listed(columns)
    if json:
        dump({"schema": "ckpttool.explain/1", "name": name or None, "text": text})
    else:
        write(text)
