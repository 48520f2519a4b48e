"""``ckpttool help``: all options of a command."""

from __future__ import annotations

from typing import Annotated

import typer

from ckpttool.cli.help import ALIASES
from ckpttool.cli.mistakes import no_such_command
from ckpttool.cli.options import argument


def help_(
    context: typer.Context,
    commands: Annotated[
        list[str] | None, argument("COMMAND...", "Commands, such as reshard; default: a list of all.")
    ] = None,
) -> None:
    """Show all options of a command, as its --help does."""
    whole = context.find_root()
    known = whole.command.commands  # type: ignore[attr-defined]
    if not commands:
        typer.echo(whole.get_help())
    for word in commands or ():
        name = ALIASES.get(word, word).partition(" ")[0]
        if name not in known:
            raise no_such_command(word, whole.command)
        with known[name].make_context(name, [], parent=whole, resilient_parsing=True) as asked:
            typer.echo(asked.get_help())
