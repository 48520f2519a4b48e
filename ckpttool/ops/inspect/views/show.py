"""``--show``: elements of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpttool.answers.document import Section
from ckpttool.answers.fields import finite, pick
from ckpttool.ops.inspect.views.base import InspectedSource, ListingAnswer, View, value

if TYPE_CHECKING:
    from ckpttool.ops.inspect.values import TensorSlice


class ShowView(View["ShowAnswer"]):
    """Some elements of the tensors that it names."""

    name = "show"
    whole = True
    show: tuple[str, ...] = value("--show", "NAME[INDEX]", "Elements: 'a.weight[:8, -1]', as in numpy.", tuple)

    def look(self, at: InspectedSource) -> ShowAnswer:
        from ckpttool.ops.inspect.values import show

        listing = at.tensors(stored_too=True)
        return ShowAnswer(listing, show(listing, self.show))


class ShowAnswer(ListingAnswer):
    """Elements, in the order in which they were asked for."""

    name = "show"
    slices: Sequence[TensorSlice]

    def entries(self) -> int:
        return sum(s.values.size for s in self.slices)

    def json(self) -> dict[str, Any]:
        return {"list": list(map(_json, self.slices))}

    def sections(self) -> list[Section]:
        return [Elements(s, quiet=True) for s in self.slices]


@dataclass(eq=False, repr=False)
class Elements(Section):
    """Elements of a tensor, all of them up to a thousand."""

    slice: TensorSlice


def _json(found: TensorSlice) -> dict[str, Any]:
    shape, values = found.values.shape, _nested(found.printable.tolist())
    return {**pick(found, "name dtype shape index"), "shown_shape": shape, "values": values}


def _nested(value: Any) -> Any:
    if isinstance(value, list):
        return [_nested(v) for v in value]
    if isinstance(value, complex):
        return [finite(value.real), finite(value.imag)]
    return finite(value)
