"""``--ranks``: which rank holds which box of which tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpttool.answers.document import Section
from ckpttool.answers.fields import pick
from ckpttool.errors import UsageError
from ckpttool.ops.inspect.views.base import InspectedSource, ListingAnswer, View, ViewAnswer, flag, value

if TYPE_CHECKING:
    from ckpttool.ops.inspect.holdings import Layout


class RanksView(View["RanksAnswer"]):
    """The layout over ranks, as text and as pictures."""

    name = "ranks"
    ranks: bool = flag("--ranks", "Draw which rank holds which box of which tensor.")
    svg: Path | None = value(
        "--svg", "FILE", "With --ranks: also draw it, to FILE and where it needs more pages FILE-2, FILE-3, ...", Path
    )

    def refuse(self, asked: Sequence[View[ViewAnswer]]) -> None:
        if self.svg is not None and not self.ranks:
            raise UsageError("--svg belongs to --ranks")

    def look(self, at: InspectedSource) -> RanksAnswer:
        from ckpttool.ops.inspect.holdings import layout_of

        listing = at.tensors(self.choice)
        return RanksAnswer(listing, layout_of(listing), self.svg)


class RanksAnswer(ListingAnswer):
    """The layout over ranks."""

    name = "ranks"
    layout: Layout
    svg: Path | None
    """The file for a picture of it."""

    def entries(self) -> int:
        return len(self.layout.holdings)

    def sections(self) -> list[Section]:
        return [LayoutDrawing(self.layout, quiet=True)]

    def json(self) -> dict[str, Any]:
        holdings = [
            {
                **pick(h, "name dtype shape tensors=count padding"),
                "groups": [
                    {
                        **pick(g, "which=label tensors=count"),
                        "held": [{**pick(b.box, "start stop"), "ranks": b.ranks} for b in g.held],
                    }
                    for g in h.groups
                ],
            }
            for h in self.layout.holdings
        ]
        rank_bytes = {str(r): n for r, n in self.layout.bytes_of_rank.items()}
        return {"rank_bytes": rank_bytes, "holdings": holdings}


@dataclass(eq=False, repr=False)
class LayoutDrawing(Section):
    """A layout over ranks, drawn with characters."""

    layout: Layout
