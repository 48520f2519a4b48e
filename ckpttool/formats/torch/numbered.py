"""Which parameter each number of an optimizer stands for, where the model is known in its own order.

An optimizer counts its parameters through its groups. Each group has them in the order of the model, but which of them
it has (those that decay, those that are trained) nobody says. So every way to deal the model's parameters out to the
groups is looked at: where the shapes leave one, that is it, and where they leave two, nothing is known.
"""

from __future__ import annotations

from collections.abc import Sequence

Shape = tuple[int, ...]
Number = int | str

_MOST = 1 << 18
"""Steps that are looked at; two groups whose shapes tell nothing have one for each pair of parameters."""


def names_of(
    groups: Sequence[Sequence[tuple[Number, Shape | None]]], model: Sequence[tuple[str, Shape]]
) -> dict[Number, str] | None:
    """The name of each number, or None where no way fits or several do.

    ``groups`` have numbers and shapes (None: without state, so any), ``model`` names and shapes in the model's order.
    """
    free = len(model) - sum(map(len, groups))
    if free < 0:
        return None
    # How many of each group are dealt out -> in how many ways (2 is "several"), and the last step there.
    ways: dict[tuple[int, ...], int] = {(0,) * len(groups): 1}
    steps: list[dict[tuple[int, ...], int]] = []
    looked_at = 0
    for at, (_, shape) in enumerate(model):
        ahead: dict[tuple[int, ...], int] = {}
        step: dict[tuple[int, ...], int] = {}
        for done, count in ways.items():
            options = [(g, n) for g, n in enumerate(done) if n < len(groups[g]) and groups[g][n][1] in (None, shape)]
            if at - sum(done) < free:
                options.append((-1, 0))
            for g, _ in options:
                after = done if g < 0 else (*done[:g], done[g] + 1, *done[g + 1 :])
                ahead[after] = min(2, ahead.get(after, 0) + count)
                step[after] = g
        looked_at += len(ahead)
        if not ahead or looked_at > _MOST:
            return None
        ways = ahead
        steps.append(step)
    done = tuple(map(len, groups))
    if ways.get(done) != 1:
        return None
    names: dict[Number, str] = {}
    for (name, _), step in zip(reversed(model), reversed(steps), strict=True):
        g = step[done]
        if g >= 0:
            done = (*done[:g], done[g] - 1, *done[g + 1 :])
            names[groups[g][done[g]][0]] = name
    return names
