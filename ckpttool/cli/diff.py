"""``ckpttool diff``: how two checkpoints differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from ckpttool.cli import options
from ckpttool.cli.options import argument
from ckpttool.cli.views import Filter, components, show_view, single, view_options
from ckpttool.ops.inspect.views.diff import DiffView
from ckpttool.ops.inspect.views.page import PageView

if TYPE_CHECKING:
    DiffFlags = Any
else:
    _HTML = PageView.options()["html"]._replace(about="Write an HTML report to FILE.")
    DiffFlags = view_options(single(DiffView) | {"html": _HTML}, hidden=("values",))


@options.grouped
def diff(
    *,
    src: Annotated[str, argument("A", "Directory, file or URL of a checkpoint.")],
    other: Annotated[str, argument("B", "The checkpoint to compare it with; formats and sharding may differ.")],
    view: DiffFlags,
    filter_: Filter = None,
    only: options.Only = None,
    on: options.On = "",
    source: options.SourceOptions,
    shown: options.OutputFlags,
) -> None:
    """Compare two checkpoints: names, dtypes, shapes and values. Exit 3 when they differ."""
    from ckpttool.ops.inspect.listing import TensorChoice

    choice = TensorChoice(tuple(filter_ or ()), components=components(only))
    show_view(src, choice, {**view.given(), "diff": other}, on=on, source=source, shown=shown)
