"""The views of ``inspect`` as commands: their options for Typer, and their answer on stdout.

``inspect`` has the options of all views. ``diff`` and ``check`` are commands of one view each: they have its options,
without the one that asks for it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, make_dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpttool.cli import options
from ckpttool.cli.options import flag, value
from ckpttool.cli.process import reader_may_leave

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpttool.ops.inspect.listing import TensorChoice
    from ckpttool.ops.inspect.views.base import View, ViewOption

Filter = Annotated[list[str] | None, value("--filter", "PATTERN", "Only these tensors: a glob or re:REGEX.")]


@dataclass
class ViewFlags:
    """Options of views, by the names of their fields."""

    def given(self) -> dict[str, Any]:
        """What the command line says of them."""
        return {name: tuple(v) if isinstance(v, list) else v for name, v in vars(self).items() if v is not None}


def view_options(found: Mapping[str, ViewOption], *, hidden: tuple[str, ...] = ()) -> Any:
    """A group of options of views; the ``hidden`` ones are accepted, and not listed."""
    members = [
        (name, _annotated(option, hidden=name in hidden), field(default=False if option.kind is bool else None))
        for name, option in found.items()
    ]
    return make_dataclass("FlagsOfViews", members, bases=(ViewFlags,))


def single(view: type[View[Any]]) -> dict[str, ViewOption]:
    """The options of a view for a command of its own: without the one that asks for the view, and with a help that
    does not begin with ``With --check:``.
    """
    _, *others = view.options().items()
    return {name: option._replace(about=_alone(option.about)) for name, option in others}


def _alone(about: str) -> str:
    """Help without the option that the command stands for."""
    text = re.sub(r"^With --[^:]*: ", "", about)
    return text[:1].upper() + text[1:]


def _annotated(option: ViewOption, *, hidden: bool) -> Any:
    """An option of a view as Typer takes it."""
    if option.kind is bool:
        return Annotated[bool, flag(option.name, option.about, hidden=hidden)]
    more = {} if option.least is None else {"min": option.least}
    kind = list[str] if option.kind is tuple else option.kind
    found = value(option.name, option.metavar, option.about, option.values, hidden=hidden, **more)
    return Annotated[kind | None, found]


def components(only: list[str] | None) -> tuple[str, ...]:
    """What --only says. Raises UsageError for a component that does not exist."""
    from ckpttool.core.catalog import COMPONENTS
    from ckpttool.core.words import one_of

    return tuple(one_of(c, "--only", *COMPONENTS) for c in only or ())


def show_view(
    src: str,
    choice: TensorChoice,
    given: Mapping[str, Any],
    *,
    on: str,
    source: options.SourceOptions,
    shown: options.OutputFlags,
) -> None:
    """Look at SRC as the given options of views say, and print the answer. Exits with 3 where the answer is no."""
    from ckpttool.ops.inspect.views.registry import chosen, look
    from ckpttool.report.inspect import prepare, show_answer

    opened = source.open_options()
    asked = chosen(choice, **given, on=on)
    prepare(asked, as_json=shown.json)
    answer = look(asked, src, opened, shown.progress() if asked.slow else None, on)
    code = 0 if answer.ok else 3
    with reader_may_leave():
        code = show_answer(answer, as_json=shown.json, quiet=shown.quiet)
    if code:
        raise typer.Exit(code)
