"""The tree: names with numbers collapsed, what ``inspect`` shows without another option."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ckpttool.answers.document import Section
from ckpttool.errors import CkptError, UsageError
from ckpttool.ops.inspect.views.base import InspectedSource, ListingAnswer, View, ViewAnswer, narrows, value

if TYPE_CHECKING:
    from ckpttool.core.files import AnyPlace
    from ckpttool.ops.inspect.listing import TensorRow
    from ckpttool.ops.inspect.tree import Summed, TreeLine, TreeNode
    from ckpttool.ops.inspect.views.runs import RunAnswer


class TreeView(View["TreeAnswer | RunAnswer"]):
    """A line for each kind of tensor; of a directory of several checkpoints which ones there are."""

    name = "tree"
    depth: int | None = value("--depth", "N", "Levels of the tree.", int, least=1)

    @property
    def asked(self) -> bool:
        return False  # it is shown where nothing is asked for

    @property
    def outside_report(self) -> str:
        return "" if self.depth is None else "--depth"

    def refuse(self, asked: Sequence[View[ViewAnswer]]) -> None:
        if self.depth is not None and asked:
            raise UsageError(f"--depth belongs to the tree, not to {asked[0].label}")

    def look(self, at: InspectedSource) -> TreeAnswer | RunAnswer:
        from ckpttool.ops.inspect.code import code_note
        from ckpttool.ops.inspect.runs import other_saves
        from ckpttool.storage.listing import list_source
        from ckpttool.storage.place import parse_place

        try:
            listing = at.tensors(replace(self.choice, sort=""), stored_too=True)  # the tree has an order of its own
        except CkptError as e:
            plain = self.depth is None and not narrows(self.choice) and not self.choice.components
            if not plain or not is_run(e, at.src):
                raise
            from ckpttool.ops.inspect.views.runs import RunAnswer

            return RunAnswer.of(at)
        listing.notes = [*listing.notes, *other_saves(listing.path, listing.files)]
        read = {*(f.place for f in listing.files), *listing.stored.indexes}
        note = code_note(list_source(parse_place(at.src)), read)
        listing.notes = [*listing.notes, note] if note else listing.notes
        return TreeAnswer(listing, self.depth)


def is_run(failure: CkptError, src: AnyPlace) -> bool:
    """Whether SRC cannot be opened because it is a directory of several checkpoints."""
    from ckpttool.formats.runs import RunError

    return isinstance(failure, RunError) or _holds_saves(src)


def _holds_saves(src: AnyPlace) -> bool:
    """Whether what cannot be read as one checkpoint is a directory of several, and has no tensors itself."""
    from ckpttool.formats.runs import named_saves, step_of
    from ckpttool.storage.listing import WEIGHTS, list_source
    from ckpttool.storage.place import parse_place

    try:
        source = list_source(parse_place(src))
    except CkptError:
        return False
    own = any(n.endswith(WEIGHTS) and step_of(n) is None for n in source.names)
    return not source.single and not own and len(named_saves(source)) > 1


class TreeAnswer(ListingAnswer):
    """A tree for each component."""

    name = "tree"
    depth: int | None

    @cached_property
    def trees(self) -> dict[str, tuple[str, Sequence[TensorRow | Summed]]]:
        """By component, the mark that all of its tensors have, and these."""
        from ckpttool.ops.inspect.tree import by_component

        return by_component(self.listing.rows)

    @cached_property
    def roots(self) -> dict[str, TreeNode]:
        """By component."""
        from ckpttool.ops.inspect.tree import collapse

        return {component: collapse(rows) for component, (_, rows) in self.trees.items()}

    @cached_property
    def lines(self) -> dict[str, list[TreeLine]]:
        """By component."""
        from ckpttool.ops.inspect.tree import lines

        return {component: lines(root, self.depth) for component, root in self.roots.items()}

    def entries(self) -> int:
        return sum(map(len, self.lines.values()))

    def sections(self) -> list[Section]:
        return [TreeDrawing(self, quiet=True)]

    def json(self) -> dict[str, Any]:
        found = [
            {
                "name": line.name,
                "component": component,
                "depth": line.depth,
                "tensors": line.times * line.node.count,
                "elements": line.times * line.node.elements,
                "bytes": line.times * line.node.nbytes,
                **({"dtype": line.node.dtype, "shape": list(line.node.shape)} if line.node.dtype else {}),
                **_mark_json(component, line.node.dtype and (line.node.mark or self.trees[component][0])),
            }
            for component, of in self.lines.items()
            for line in of
        ]
        return {"tree": found}


@dataclass(eq=False, repr=False)
class TreeDrawing(Section):
    """What the checkpoint is, and its tree below."""

    answer: TreeAnswer


def _mark_json(component: str, mark: str) -> dict[str, Any]:
    """What a leaf's mark is, for programs."""
    if not mark:
        return {}
    return {"states": mark.split(", ")} if component == "optimizer" else {"derived": True}
