"""``ckpttool doctor``: what can be done here."""

from __future__ import annotations

from typing import Annotated

import typer

from ckpttool.cli import options
from ckpttool.cli.options import argument, flag
from ckpttool.cli.process import reader_may_leave


@options.grouped
def doctor(
    *,
    path: Annotated[str, argument("PATH", "Where you want to read or write; default: here.")] = ".",
    online: Annotated[bool, flag("--online", "Also test the network: PATH, logins.")] = False,
    shown: options.OutputFlags,
) -> None:
    """Show what works here, what is slow and what is missing: disk, memory, cores, packages, logins."""
    from ckpttool.ops.doctor import examine
    from ckpttool.report.doctor import document
    from ckpttool.report.render import show

    health = examine(path, online=online)
    with reader_may_leave():
        show(document(health, problems=shown.quiet), as_json=shown.json)
    if not health.ok:
        raise typer.Exit(3)
