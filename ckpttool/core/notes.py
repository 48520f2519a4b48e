"""Sentences for the user about what was inferred, derived or left out. Pure."""

from __future__ import annotations

from typing import Literal, Self

NoteKind = Literal["derived weights", "lacking", "removed"]
"""Model weights that are rounded master weights; tensors that a loader may miss; tensors that patterns removed."""


class Note(str):
    """A note with a kind, for code that keeps or drops it; other notes are plain strings. No code parses the text."""

    __slots__ = ("kind",)
    kind: NoteKind

    def __new__(cls, kind: NoteKind, text: str) -> Self:
        """``text`` is all that users see of it."""
        self = super().__new__(cls, text)
        self.kind = kind
        return self

    def __getnewargs__(self) -> tuple[NoteKind, str]:  # type: ignore[override]
        """Supports copies and pickles."""
        return self.kind, str(self)


def is_kind(note: str, kind: NoteKind) -> bool:
    """Whether it is a note of this kind."""
    return isinstance(note, Note) and note.kind == kind
