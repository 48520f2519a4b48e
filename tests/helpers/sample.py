"""How much is tried of what could be: a sample in `make test`, everything in `make test-all` (pytest's ``--all``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar
from zlib import crc32

import pytest

T = TypeVar("T")

everything = False
"""Whether everything is asked for. Said by tests/conftest.py before it collects any test."""


def examples(count: int) -> int:
    """How many examples of a property to try, where Hypothesis' 100 are not what fits."""
    return count if everything else max(8, count // 10)


def some(every: T, sample: T) -> T:
    """What to go through, for tests that have no product of cases."""
    return every if everything else sample


def covering(cases: Sequence[pytest.Function]) -> set[pytest.Function]:
    """Cases of one test that together meet every value of every argument. The same ones in every run."""
    values = {case: {(name, _key(value)) for name, value in case.callspec.params.items()} for case in cases}
    missing = set().union(*values.values())
    # In an order without a pattern, or the first value of one list would meet nearly all of another.
    shuffled = sorted(cases, key=lambda case: crc32(case.nodeid.encode()))
    chosen = set()
    while missing:
        best = max(shuffled, key=lambda case: len(values[case] & missing))
        chosen.add(best)
        missing -= values[best]
    return chosen


def _key(value: object) -> object:
    """Tells values of a list apart; those that cannot be hashed by being the same object."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value
