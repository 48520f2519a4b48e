"""``ckpttool inspect``: what to show, and of which tensors."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated, Any

from ckpttool.cli import choices, options
from ckpttool.cli.options import argument, bytes_of, value
from ckpttool.cli.views import Filter, components, show_view, view_options
from ckpttool.core.words import one_of
from ckpttool.errors import UsageError
from ckpttool.ops.inspect.views.registry import VIEWS

if TYPE_CHECKING:
    InspectFlags = Any
else:
    # What diff and check have is accepted here, too.
    _THERE = ("values", "headers_only", "atol", "rtol", "findings")
    InspectFlags = view_options(
        {name: option for view in VIEWS for name, option in view.options().items()}, hidden=_THERE
    )


@options.grouped
def inspect(
    *,
    src: options.Src,
    second: Annotated[str, argument("SECOND", "With --diff FIRST: another checkpoint of the run SRC.")] = "",
    view: InspectFlags,
    filter_: Filter = None,
    only: options.Only = None,
    dtype: Annotated[list[str] | None, value("--dtype", "DTYPE", "Only tensors of this dtype.", choices.DTYPES)] = None,
    min_size: Annotated[str, value("--min-size", "SIZE", "Only tensors of at least this size, such as 1MB.")] = "",
    sort: Annotated[str, value("--sort", "KEY", "Order by name, size, offset or file.", choices.ORDERS)] = "name",
    on: options.On = "",
    source: options.SourceOptions,
    shown: options.OutputFlags,
) -> None:
    """Show what is inside a checkpoint: a tree of its tensors, or what the options ask for."""
    from ckpttool.ops.inspect.listing import TensorChoice

    if second and view.given().get("diff") is None:
        raise UsageError(
            f"unexpected argument `{second}`",
            hint=f"to compare: `ckpttool diff {shlex.quote(src)} {shlex.quote(second)}`",
        )
    order = one_of(sort, "--sort", "name", "size", "offset", "file")
    smallest = bytes_of(min_size, "--min-size") or 0
    choice = TensorChoice(tuple(filter_ or ()), tuple(dtype or ()), smallest, order, components(only))
    show_view(src, choice, {**view.given(), "second": second}, on=on, source=source, shown=shown)
