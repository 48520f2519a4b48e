"""``--imports``: what pickles would import when somebody loads them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ckpttool.answers.document import Paragraph, Section, Table
from ckpttool.answers.fields import pick
from ckpttool.core.words import count
from ckpttool.errors import plain
from ckpttool.ops.inspect.views.base import InspectedSource, ResultAnswer, View, flag

if TYPE_CHECKING:
    from ckpttool.answers.findings import Import, ImportsResult


class ImportsView(View["ImportsAnswer"]):
    """Globals that pickles name, and whether they are dangerous."""

    name = "imports"
    whole = True
    imports: bool = flag("--imports", "What the pickles in SRC would import; exit 3 when one is dangerous.")

    def look(self, at: InspectedSource) -> ImportsAnswer:
        from ckpttool.ops.inspect.imports import list_imports

        return ImportsAnswer(list_imports(at.src))


class ImportsAnswer(ResultAnswer):
    """Globals by file."""

    name = "imports"
    result: ImportsResult

    def entries(self) -> int:
        return len(self.result.found)

    def json(self) -> dict[str, Any]:
        found = [pick(i, "file member? offset global=name times verdict") for i in self.result.found]
        return {"path": str(self.result.path), **pick(self.result, "ok files notes"), "imports": found}

    def sections(self) -> Iterator[Section]:
        """Dangerous ones first; those that several files name are one line."""
        from ckpttool.answers.findings import DANGEROUS, INERT, REFUSED

        order, result = (DANGEROUS, REFUSED, INERT), self.result
        together: dict[tuple[str, str], list[Import]] = {}
        for i in result.found:
            together.setdefault((i.verdict, i.name), []).append(i)
        rows = []
        for (verdict, name), same in sorted(together.items(), key=lambda item: order.index(item[0][0])):
            place = ":".join([same[0].file, *filter(None, [same[0].member]), str(same[0].offset)])
            more = f" and {len(same) - 1:,} more" if len(same) > 1 else ""
            rows.append((verdict, plain(name), sum(i.times for i in same), plain(place) + more))
        if rows:
            yield Table(("verdict", "global", "times", "where"), rows, names=3, quiet=True)
        sums = [f"{sum(v == verdict for v, _ in together):,} {verdict}" for verdict in order]
        yield Paragraph(f"{plain(str(result.path))}: {count(result.files, 'pickle')}, {', '.join(sums)}")
