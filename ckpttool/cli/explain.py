"""``ckpttool explain``: what a class of errors, a finding or a merge method is, without a network."""

from __future__ import annotations

from typing import Annotated

from ckpttool.cli import options
from ckpttool.cli.options import argument, flag


@options.grouped
def explain(
    *,
    name: Annotated[
        str,
        argument(
            "NAME",
            "A class of errors (layout), a finding (no-index), a merge method (slerp), or methods.",
        ),
    ] = "",
    json: Annotated[bool, flag("--json", "Print the result as JSON.")] = False,
) -> None:
    """Explain a class of errors, a finding of a check or a merge method."""
    from ckpttool.report.explained import document
    from ckpttool.report.render import show

    show(document(name), as_json=json)
