"""``--suggest-family``: a family file to start from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpttool.answers.document import Document, Message, Paragraph, Section
from ckpttool.errors import UsageError, plain
from ckpttool.ops.inspect.views.base import InspectedSource, ListingAnswer, View, flag

if TYPE_CHECKING:
    from ckpttool.ops.inspect.suggest import Suggestion


@dataclass(frozen=True, kw_only=True)
class FamilyView(View):
    """Layout rules that suit the names of the tensors."""

    name = "family"
    whole = True
    suggest_family: bool = flag("--suggest-family", "Print a family file to start from, for a model that none is for.")

    def look(self, at: InspectedSource) -> FamilyAnswer:
        from ckpttool.formats.parts import parts_of
        from ckpttool.ops.inspect.suggest import suggest

        listing = at.tensors()
        if (parts := parts_of(listing.stored)) is not None:
            names = ", ".join(p.name for p in parts.chosen)
            raise UsageError(
                f"a family is for one model, and SRC has several parts: {names}",
                where=str(listing.path),
                hint=f"give one: {parts.chosen[0].place}",
            )
        shapes = {r.name: r.shape for r in listing.rows if r.component == "model"}
        return FamilyAnswer(listing, suggest(shapes, listing.stored.config))


@dataclass(frozen=True)
class FamilyAnswer(ListingAnswer):
    """A family file, and how far it can be believed."""

    name = "family"
    suggestion: Suggestion

    def document(self) -> Document:
        return self.shown(self.suggestion._asdict, self._sections, len(self.suggestion.doubts))

    def _sections(self) -> list[Section]:
        """The file on stdout, to be redirected."""
        from ckpttool.ops.inspect.suggest import summary

        about = Message(f"note: {plain(summary(self.suggestion))}")
        return [Paragraph(self.suggestion.text.removesuffix("\n"), quiet=True), about]
