"""Which tensors are written, by the patterns of the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpttool.core.notes import Note
from ckpttool.core.patterns import matching
from ckpttool.core.words import count, short
from ckpttool.errors import UsageError
from ckpttool.planning.relate import TensorTable, keep


@dataclass(frozen=True, slots=True)
class Selection:
    """Which tensors, and under which names."""

    remove: Sequence[str] = ()
    keep: Sequence[str] = ()
    rename: Sequence[str] = ()


def select(
    views: TensorTable, selection: Selection, notes: list[str], *, option: str = "--remove-keys"
) -> tuple[TensorTable, tuple[int, int]]:
    """The views that are kept, and (tensors, bytes) of those that are not.

    Raises UsageError for a pattern without a match, and when nothing would be left.
    """
    names = set(views.table)
    wanted = set(names)
    if selection.keep:
        wanted = matching(selection.keep, names, option="--keep-keys")
    if selection.remove:
        wanted -= matching(selection.remove, names, option=option)
    gone = [views.table[n] for n in views.table if n not in wanted]
    if not wanted:
        raise UsageError(
            "no tensor is left: the patterns remove all of them",
            hint="* matches every name; narrower patterns, or --keep-keys with what is to stay",
        )
    if gone:
        removed = len(gone), sum(v.nbytes for v in gone)
        notes.append(removal_note(removed))
        return keep(views, wanted), removed
    return views, (0, 0)


def removal_note(removed: tuple[int, int]) -> Note:
    """The note about (tensors, bytes) that are not in the output."""
    return Note("removed", f"{count(removed[0], 'tensor')} left out, {short(removed[1])}")
