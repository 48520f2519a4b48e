"""``ckpttool explain``: what a class of errors or a finding means, without a network."""

from __future__ import annotations

from typing import Annotated

from ckpttool.cli import options
from ckpttool.cli.options import argument, flag


@options.grouped
def explain(
    *,
    name: Annotated[str, argument("NAME", "A class of errors, such as layout, or a finding; default: a list.")] = "",
    json: Annotated[bool, flag("--json", "Print the result as JSON.")] = False,
) -> None:
    """Explain a class of errors, or a finding of a check: what it means, and what to do."""
    from ckpttool.report.explained import document
    from ckpttool.report.render import show

    show(document(name), as_json=json)
