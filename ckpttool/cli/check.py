"""``ckpttool check``: whether a checkpoint is sound."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpttool.cli import options
from ckpttool.cli.views import components, show_view, single, view_options
from ckpttool.ops.inspect.views.check import CheckView
from ckpttool.ops.inspect.views.diff import DiffView
from ckpttool.ops.inspect.views.page import PageView

if TYPE_CHECKING:
    CheckFlags = Any
else:
    CheckFlags = view_options(
        {
            "values": DiffView.options()["values"]._replace(about="Also read every element: NaN, zeros, ..."),
            **single(CheckView),
            "html": PageView.options()["html"]._replace(about="Write an HTML report to FILE."),
        }
    )


@options.grouped
def check(
    *,
    src: options.Src,
    view: CheckFlags,
    only: options.Only = None,
    on: options.On = "",
    source: options.SourceOptions,
    shown: options.OutputFlags,
) -> None:
    """Look for problems: files, index, shapes, config, checksums. Exit 3 when an error is found."""
    from ckpttool.ops.inspect.listing import TensorChoice

    choice = TensorChoice(components=components(only))
    show_view(src, choice, {**view.given(), "check": True}, on=on, source=source, shown=shown)
