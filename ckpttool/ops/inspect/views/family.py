"""``--suggest-family``: a family file to start from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpttool.answers.document import Message, Paragraph, Section
from ckpttool.errors import UsageError, plain
from ckpttool.ops.inspect.views.base import InspectedSource, ListingAnswer, View, flag

if TYPE_CHECKING:
    from ckpttool.ops.inspect.suggest import Suggestion


class FamilyView(View["FamilyAnswer"]):
    """Layout rules that suit the names of the tensors."""

    name = "family"
    whole = True
    suggest_family: bool = flag("--suggest-family", "Print a family file to start from, if no built-in family fits.")

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


class FamilyAnswer(ListingAnswer):
    """A family file, and how far it can be believed."""

    name = "family"
    suggestion: Suggestion

    def entries(self) -> int:
        return len(self.suggestion.doubts)

    def json(self) -> dict[str, Any]:
        return self.suggestion._asdict()

    def sections(self) -> list[Section]:
        """The file on stdout, to be redirected."""
        from ckpttool.ops.inspect.suggest import summary

        about = Message(f"note: {plain(summary(self.suggestion))}")
        return [Paragraph(self.suggestion.text.removesuffix("\n"), wrap=False, quiet=True), about]
