"""Every view, in the order in which ``--help`` lists their options; from options to a view, and to its answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

from ckpttool.errors import CorruptError, UsageError
from ckpttool.ops.inspect.views.base import A_co, InspectedSource, View, ViewAnswer
from ckpttool.ops.inspect.views.check import CheckView
from ckpttool.ops.inspect.views.diff import DiffView
from ckpttool.ops.inspect.views.family import FamilyView
from ckpttool.ops.inspect.views.files import FilesView
from ckpttool.ops.inspect.views.header import HeaderView, SetHeaderView
from ckpttool.ops.inspect.views.imports import ImportsView
from ckpttool.ops.inspect.views.index import IndexView
from ckpttool.ops.inspect.views.list import ListView
from ckpttool.ops.inspect.views.metadata import MetadataView
from ckpttool.ops.inspect.views.page import PageView
from ckpttool.ops.inspect.views.ranks import RanksView
from ckpttool.ops.inspect.views.runs import RunView
from ckpttool.ops.inspect.views.show import ShowView
from ckpttool.ops.inspect.views.tree import TreeView
from ckpttool.ops.inspect.views.values import ValuesView

if TYPE_CHECKING:
    from pathlib import Path

    from ckpttool.core.files import AnyPlace
    from ckpttool.execute import Progress
    from ckpttool.formats.base import OpenOptions
    from ckpttool.ops.inspect.listing import TensorChoice

VIEWS: tuple[type[View[ViewAnswer]], ...] = (
    RunView,
    ListView,
    FilesView,
    RanksView,
    ValuesView,
    ShowView,
    MetadataView,
    HeaderView,
    SetHeaderView,
    IndexView,
    ImportsView,
    FamilyView,
    CheckView,
    DiffView,
    TreeView,
    PageView,
)


@overload
def chosen(choice: TensorChoice, *, html: Path, on: str = "", **given: Any) -> PageView: ...
@overload
def chosen(choice: TensorChoice, *, on: str = "", **given: Any) -> View[ViewAnswer]: ...
def chosen(choice: TensorChoice, *, on: str = "", **given: Any) -> View[ViewAnswer]:
    """The view that the given options ask for, by the names of their fields; the tree for none.

    Raises UsageError for options that contradict each other, or do nothing.
    """
    views = {cls: cls.filled({"choice": choice, **given}) for cls in VIEWS}
    page = views[PageView]
    asked = [v for v in views.values() if v.asked and v is not page]
    if page.asked:
        if outside := [v.outside_report for v in views.values() if v is not page and v.outside_report]:
            raise UsageError(
                f"{outside[0]} is not part of a report",
                hint="--html goes with --stats, --check, --diff and their options",
            )
        asked = [page]
    elif len(asked) > 1:
        together = not any(v.outside_report for v in asked)
        raise UsageError(
            f"{' and '.join(v.label for v in asked)} cannot be combined",
            hint="use one at a time" + (", or put both in a report: --html FILE" if together else ""),
        )
    for view in views.values():
        view.refuse(asked)
    if on and not any(v.reads_elements for v in views.values()):
        raise UsageError("--on needs a view that reads values", hint="use --stats, --hist, --hash, --check or --diff")
    view = asked[0] if asked else views[TreeView]
    view.refuse_filters()
    return view


def look(view: View[A_co], src: AnyPlace, options: OpenOptions, progress: Progress | None = None, on: str = "") -> A_co:
    """The answer of a view, if what was looked at has stayed the same meanwhile. ``on`` is the engine that reads
    elements, "" for this machine.

    Raises CorruptError when it has changed, and what ``View.look`` raises.
    """
    from ckpttool.storage.place import number, parse_place, read_each

    src, view = view.opened(src)
    roots = [] if view.writes else [parse_place(p) for p in (src, *view.others)]
    before = [number(p) for p in roots]
    if on:
        from ckpttool.execute.machines.each import machines

        with machines(on) as fleet:
            answer = view.look(InspectedSource(src, options, progress, fleet))
    else:
        answer = view.look(InspectedSource(src, options, progress, None))
    changed = [p for p, was in zip(roots, before, strict=True) if number(p) != was]
    files = list(answer.files)
    same = read_each(lambda _, file: file.is_unchanged(), [f.place for f in files], files)
    changed += [f.place for f, unchanged in zip(files, same, strict=True) if not unchanged]
    if changed:
        raise CorruptError("a source has changed while it was read", where=str(changed[0]), hint="repeat the command")
    return answer
