"""``ckpttool inspect``: what to show, and of which tensors."""

from __future__ import annotations

from dataclasses import field, make_dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpttool.cli import choices, options
from ckpttool.cli.options import bytes_of, flag, value
from ckpttool.cli.process import reader_may_leave
from ckpttool.core.words import one_of
from ckpttool.ops.inspect.views.base import ViewOption
from ckpttool.ops.inspect.views.registry import VIEWS, chosen, look


def _annotated(option: ViewOption) -> Any:
    """An option of a view as Typer takes it."""
    if option.kind is bool:
        return Annotated[bool, flag(option.name, option.about)]
    more = {} if option.least is None else {"min": option.least}
    kind = list[str] if option.kind is tuple else option.kind
    return Annotated[kind | None, value(option.name, option.metavar, option.about, option.values, **more)]


if TYPE_CHECKING:
    ViewOptions = Any
else:
    ViewOptions = make_dataclass(
        "ViewOptions",
        [
            (name, _annotated(option), field(default=False if option.kind is bool else None))
            for view in VIEWS
            for name, option in view.options().items()
        ],
    )


@options.grouped
def inspect(
    *,
    src: options.Src,
    second: Annotated[
        str, options.argument("SECOND", "With --diff FIRST, where SRC is a run: compare two of its checkpoints.")
    ] = "",
    view: ViewOptions,
    filter_: Annotated[
        list[str] | None, value("--filter", "PATTERN", "Only these tensors: a glob or re:REGEX.")
    ] = None,
    only: options.Only = None,
    dtype: Annotated[list[str] | None, value("--dtype", "DTYPE", "Only tensors of this dtype.", choices.DTYPES)] = None,
    min_size: Annotated[str, value("--min-size", "SIZE", "Only tensors at least this large, such as 1MB.")] = "",
    sort: Annotated[str, value("--sort", "KEY", "Order by name, size, offset or file.", choices.ORDERS)] = "name",
    on: options.On = "",
    source: options.SourceOptions,
    shown: options.OutputFlags,
) -> None:
    """Show what is inside SRC: a tree of its tensors, or what the options ask for."""
    from ckpttool.core.catalog import COMPONENTS
    from ckpttool.ops.inspect.listing import TensorChoice
    from ckpttool.report.inspect import prepare, show_answer

    opened = source.open_options()
    order = one_of(sort, "--sort", "name", "size", "offset", "file")
    components = tuple(one_of(c, "--only", *COMPONENTS) for c in only or ())
    smallest = bytes_of(min_size, "--min-size") or 0
    choice = TensorChoice(tuple(filter_ or ()), tuple(dtype or ()), smallest, order, components)
    given = {name: tuple(v) if isinstance(v, list) else v for name, v in vars(view).items() if v is not None}
    asked = chosen(choice, **given, second=second, on=on)
    prepare(asked, as_json=shown.json)
    answer = look(asked, src, opened, shown.progress() if asked.slow else None, on)
    code = 0 if answer.ok else 3
    with reader_may_leave():
        code = show_answer(answer, as_json=shown.json, quiet=shown.quiet)
    if code:
        raise typer.Exit(code)
