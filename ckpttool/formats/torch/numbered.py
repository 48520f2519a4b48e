"""Parameters by their numbers in an optimizer, where the model is known in its own order.

An optimizer counts its parameters through its groups. Each group has them in the order of the model, but which of them
it has (those that decay, those that are trained) nobody says. So each number has a first parameter that it may be, and
a last one: where these are one, that is it, and it is gone for the numbers of other groups.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from ckpttool.core.words import count

Shape = tuple[int, ...]
Number = int | str
Groups = Sequence[Sequence[tuple[Number, Shape | None]]]
"""The numbers of each group, with the shape of the state; None where there is none, or it does not tell."""


class AmbiguousNumber(NamedTuple):
    """A number that may be either of two parameters, as far as can be known, or none of them."""

    number: Number
    shape: Shape | None
    first: str
    last: str

    @property
    def unfit(self) -> bool:
        """Whether no parameter is left for it."""
        return not self.first


def deal(
    groups: Groups, model: Sequence[tuple[str, Shape]], held: Collection[Number]
) -> dict[Number, str] | AmbiguousNumber:
    """The only way to give each group parameters in their order that have its shapes, and none to two numbers.

    ``model`` are names and shapes in the model's order. Numbers that are not ``held`` have no state, and need not be
    sure: the result may lack them.
    """
    sure: dict[Number, str] = {}
    while True:
        before, doubt = len(sure), None
        for group in groups:
            own = {n for n, _ in group}
            gone = {name for n, name in sure.items() if n not in own}
            free = [c for c in model if c[0] not in gone]
            first = _fill(group, free)
            last = _fill(group[::-1], free[::-1])
            if isinstance(first, AmbiguousNumber) or isinstance(last, AmbiguousNumber):
                return first if isinstance(first, AmbiguousNumber) else AmbiguousNumber(*group[0], "", "")
            for (n, shape), a, b in zip(group, first, last[::-1], strict=True):
                if a == b:
                    sure[n] = a
                elif n in held:
                    doubt = doubt or AmbiguousNumber(n, shape, a, b)
        if len(sure) == before:
            return doubt or sure


def names_of(groups: Groups, model: Sequence[tuple[str, Shape]], held: Collection[Number]) -> dict[Number, str] | None:
    """``deal``, or None where a number that has state cannot be assigned for sure."""
    found = deal(groups, model, held)
    return None if isinstance(found, AmbiguousNumber) or not found.keys() >= {*held} else found


def unknown(numbers: Iterable[Number], names: Collection[Number], *, kept: str = "they are in no group") -> list[str]:
    """A note about numbers of an optimizer that are not in ``names``: without state, they may be several parameters.

    [] when there are none. ``kept``: what becomes of them, for the note.
    """
    lost = [n for n in numbers if n not in names]
    if not lost:
        return []
    which = count(len(lost), "parameter")
    return [
        f"the optimizer has numbers for {which} without state, and the save does not record which these are: {kept}"
    ]


def _fill(
    group: Sequence[tuple[Number, Shape | None]], free: Iterable[tuple[str, Shape]]
) -> list[str] | AmbiguousNumber:
    """For each number the first parameter that has its shape, behind that of the number before it."""
    out = []
    rest = iter(free)
    for number, shape in group:
        found = next((name for name, own in rest if shape in (None, own)), None)
        if found is None:
            return AmbiguousNumber(number, shape, "", "")
        out.append(found)
    return out
