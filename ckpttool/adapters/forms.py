"""Translate changes of tensors in memory to changes of those in the files.

transformers 5 stacks experts and joins their gate and up projections; a renamed module is one that has one share.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from math import prod

from ckpttool.adapters.base import Change, Changes, LowRankTerm
from ckpttool.errors import UnsupportedError
from ckpttool.formats.base import ModelForm, TensorShare
from ckpttool.planning.relate import take


def in_files(changes: Changes, form: ModelForm, where: str) -> Changes:
    """The same changes, of the tensors in the files.

    Raises UnsupportedError for one that was trained as a whole and lies in several.
    """
    table: dict[str, Change] = {}
    for name, change in changes.table.items():
        shares = form.shares[name]
        if len(shares) == 1 and shares[0].shape == form.shapes[name]:
            table[shares[0].name] = change
            continue
        if change.whole is not None:
            raise UnsupportedError(
                f"`{change.whole.name}` replaces `{name}`, which is {len(shares)} tensors in the base",
                where=where,
                hint="merge this adapter with PEFT",
            )
        for at, terms in _split(change.terms, form.shapes[name], shares).items():
            before = table.get(shares[at].name, Change())
            table[shares[at].name] = Change((*before.terms, *terms))
    return Changes(table, changes.notes)


def _split(
    terms: Sequence[LowRankTerm], shape: tuple[int, ...], shares: Sequence[TensorShare]
) -> dict[int, list[LowRankTerm]]:
    """The terms of a tensor [..., columns] by the shares of it, which have all columns and follow each other."""
    rows = [prod(s.shape[:-1]) for s in shares]
    stops = list(accumulate(rows))
    starts = [stop - n for stop, n in zip(stops, rows, strict=True)]
    steps = [prod(shape[i + 1 : -1]) for i in range(len(shape) - 1)]
    found = [sum(a * n for a, n in zip(s.start, steps, strict=False)) for s in shares]
    if found != starts or stops[-1] != prod(shape[:-1]) or any(s.shape[-1] != shape[-1] for s in shares):
        raise AssertionError(f"{[s.name for s in shares[:3]]} do not follow each other")
    out: dict[int, list[LowRankTerm]] = {}
    for t in terms:
        first, last = t.row, t.row + t.up.shape[0]
        at = bisect_right(starts, first) - 1
        while at < len(shares) and starts[at] < last:
            low, high = max(first, starts[at]), min(last, stops[at])
            up = take(t.up.name, t.up, 0, low - first, high - first) if high - low < last - first else t.up
            out.setdefault(at, []).append(t._replace(up=up, row=low - starts[at]))
            at += 1
    return out
