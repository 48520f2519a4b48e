"""Arguments brought to one form. An impossible value raises a UsageError that names the argument."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from operator import index
from typing import Any, SupportsIndex, overload

from ckpttool.core.mesh import MAX_WORLD
from ckpttool.core.words import parse_betas, parse_numbers, parse_sides, parse_size
from ckpttool.errors import UsageError
from ckpttool.execute.options import Member
from ckpttool.execute.parts.launchers import membership


def several(said: str | Iterable[str], name: str) -> tuple[str, ...]:
    """Strings; a single string is one pattern, not its letters."""
    found = (said,) if isinstance(said, str) else tuple(said)
    for one in found:
        if not isinstance(one, str):
            raise UsageError(f"{name} contains {one!r}, which is not a string", hint="pass strings")
    return found


@overload
def whole(said: SupportsIndex | float, name: str, least: int = 1) -> int: ...
@overload
def whole(said: SupportsIndex | float | None, name: str, least: int = 1) -> int | None: ...
def whole(said: SupportsIndex | float | None, name: str, least: int = 1) -> int | None:
    """A number of at least ``least``; 8e9 and numpy's integers are whole, too."""
    if said is None:
        return None
    found = None
    if isinstance(said, float):
        found = int(said) if said.is_integer() else None
    elif not isinstance(said, bool | str):
        with suppress(TypeError):
            found = index(said)
    if found is None:
        raise UsageError(f"{name} is {said!r}", hint="pass a whole number")
    if found < least:
        raise UsageError(f"{name} is {found}", hint=f"minimum: {least:,}")
    return found


def counts(**said: SupportsIndex | float | None) -> dict[str, Any]:
    """Numbers of at least 1 under the names of their arguments; None stays None."""
    return {name: whole(n, name) for name, n in said.items()}


def wholes(said: int | Iterable[int], name: str, least: int = 1) -> tuple[int, ...]:
    """Numbers, or a single one."""
    return tuple([whole(n, name, least) for n in (said if isinstance(said, Iterable) else (said,))])


@overload
def nbytes(said: float | str, name: str, least: int = 1) -> int: ...
@overload
def nbytes(said: float | str | None, name: str, least: int = 1) -> int | None: ...
def nbytes(said: float | str | None, name: str, least: int = 1) -> int | None:
    """Bytes: a number, or a size such as ``5GB``."""
    return whole(parse_size(said, name) if isinstance(said, str) else said, name, least)


def member(said: str | Sequence[int] | None) -> Member | None:
    """Which of how many processes this is: ``(3, 8)``, ``"3/8"``, or ``"auto"`` as --part has it."""
    if said is None:
        return None
    if not isinstance(said, str):
        numbers = wholes(said, "part")
        if len(numbers) != 2:
            raise UsageError(f"part is {said!r}", hint="pass the number of the part and the count of parts: (3, 8)")
        said = f"{numbers[0]}/{numbers[1]}"
    return membership(said, os.environ).member


def pair_of_betas(said: str | Iterable[float] | None) -> tuple[float, float] | None:
    """The two betas of Adam: ``(0.9, 0.999)`` or ``"0.9,0.999"``."""
    if isinstance(said, str):
        return parse_betas(said, "betas")
    if said is None:
        return None
    try:
        first, second = map(float, said)
    except (TypeError, ValueError):
        first = second = -1.0
    if not (0 <= first < 1 and 0 <= second < 1):
        raise UsageError(f"betas is {said!r}", hint="pass two numbers from 0 to below 1: (0.9, 0.999)")
    return first, second


def layers(said: str | int | Iterable[int]) -> tuple[int, ...]:
    """Layers of each pipeline stage: ``(10, 11, 11)`` or ``"10,11,11"``."""
    return parse_numbers(said, "pp_layout", MAX_WORLD) if isinstance(said, str) else wholes(said, "pp_layout", 0)


def some_ranks(said: str | int | Iterable[int] | None) -> tuple[int, ...] | None:
    """Ranks: ``[0, 1, 7]`` or ``"0-3,7"``."""
    if isinstance(said, str):
        return parse_numbers(said, "ranks", MAX_WORLD, runs=True)
    return None if said is None else wholes(said, "ranks", 0)


def sides(said: str | int | Iterable[int] | None) -> tuple[int, int] | None:
    """Rows and columns of a block: ``(128, 128)`` or ``"128x128"``."""
    if isinstance(said, str):
        return parse_sides(said, "block")
    found = () if said is None else wholes(said, "block")
    if said is not None and len(found) != 2:
        raise UsageError(f"block is {said!r}", hint="pass rows and columns: (128, 128)")
    return (found[0], found[1]) if found else None
