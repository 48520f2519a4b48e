"""``--diff``: how SRC differs from another checkpoint."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from ckpttool.answers.document import BarCell, Message, Paragraph, PerMedium, Section, Table
from ckpttool.answers.fields import finite, number, pick
from ckpttool.errors import UsageError, plain
from ckpttool.ops.inspect.views.base import A_co, InspectedSource, ResultAnswer, View, ViewAnswer, flag, value

if TYPE_CHECKING:
    from ckpttool.core.files import AnyPlace, DataFile
    from ckpttool.ops.inspect.diff import DiffResult, Tolerance
    from ckpttool.ops.inspect.drift import Drifted


class ComparingView(View[A_co]):
    """What a view has that compares SRC with another checkpoint."""

    diff: AnyPlace | None = None
    second: str = ""
    """Another checkpoint of the run that SRC is, as ``diff`` is one: by name, step or path."""
    headers_only: bool = False
    atol: float | None = None
    rtol: float | None = None

    @property
    def tolerance(self) -> Tolerance | None:
        """How far elements may differ; None where they are compared bit for bit."""
        if self.atol is None and self.rtol is None:
            return None
        from ckpttool.ops.inspect.diff import Tolerance

        return Tolerance(self.atol or 0.0, self.rtol or 0.0)

    @property
    def compares_elements(self) -> bool:
        """Whether elements are compared, too."""
        return self.diff is not None and not self.headers_only

    def opened(self, src: AnyPlace) -> tuple[AnyPlace, Self]:
        from ckpttool.ops.inspect.runs import pick_save, sibling

        if not self.second:
            if self.diff is not None and (meant := sibling(src, self.diff)) is not None:
                raise UsageError(
                    "the source does not exist", where=str(self.diff), hint=f"--diff {shlex.quote(str(meant))}"
                )
            return src, self
        first, second = pick_save(src, str(self.diff)), pick_save(src, self.second)
        if first == second:
            raise UsageError(f"--diff names the same checkpoint twice: {self.diff}", where=str(first))
        return first, replace(self, diff=second, second="")

    @property
    def others(self) -> Sequence[AnyPlace]:
        return () if self.diff is None else (self.diff,)

    def refuse_filters(self) -> None:
        if self.diff is not None and (self.choice.dtypes or self.choice.min_size):
            raise UsageError("--dtype and --min-size do not apply to --diff", hint="use --filter")

    def compared(self, at: InspectedSource) -> DiffResult:
        """SRC and the other checkpoint. Raises what ``diff`` raises."""
        from ckpttool.ops.inspect.diff import diff

        return diff(
            at.src,
            self.others[0],
            at.options,
            at.progress,
            patterns=tuple(self.choice.patterns),
            values=self.compares_elements,
            tolerance=self.tolerance,
            only=tuple(self.choice.components),
            fleet=at.fleet,
        )


class DiffView(ComparingView["DiffAnswer"]):
    """Names, dtypes, shapes and values; without the values on request."""

    name = "diff"
    diff: AnyPlace | None = value("--diff", "B", "Compare all values with B; exit 3 when they differ.")
    headers_only: bool = flag("--headers-only", "With --diff: compare names, dtypes and shapes only.")
    values: bool = flag("--values", "With --check: also read the values; --diff reads them by default.")
    atol: float | None = value("--atol", "X", "With --diff: absolute tolerance, dtypes may differ.", float, least=0)
    rtol: float | None = value("--rtol", "X", "With --diff: tolerance relative to B.", float, least=0)
    check: bool = False

    @property
    def label(self) -> str:
        return "--diff"

    @property
    def asked(self) -> bool:
        return self.diff is not None

    @property
    def slow(self) -> bool:
        return True

    @property
    def reads_elements(self) -> bool:
        return self.compares_elements

    @property
    def outside_report(self) -> str:
        return ""

    def refuse(self, asked: Sequence[View[ViewAnswer]]) -> None:
        if self.second and self.diff is None:
            raise UsageError(
                f"unexpected argument `{self.second}`", hint=f"to compare: --diff {shlex.quote(self.second)}"
            )
        if self.diff == "":
            raise UsageError("--diff names no checkpoint", hint="is a variable of the shell not set?")
        if self.values and not (self.check or self.diff):
            raise UsageError("--values belongs to --check", hint="--stats, --show and --diff read values by themselves")
        if (self.atol is not None or self.rtol is not None or self.headers_only) and self.diff is None:
            raise UsageError("--atol, --rtol and --headers-only belong to --diff")
        if self.headers_only and self.tolerance is not None:
            raise UsageError("--headers-only compares no values: --atol and --rtol have no effect")
        if self.headers_only and self.values and not self.check:
            raise UsageError("--headers-only and --values contradict each other")

    def look(self, at: InspectedSource) -> DiffAnswer:
        return DiffAnswer(self.compared(at))


class DiffAnswer(ResultAnswer):
    """Every difference, and how far both are apart."""

    name = "diff"
    result: DiffResult

    @property
    def files(self) -> Sequence[DataFile]:
        from ckpttool.core.files import source_files

        return [f for side in (self.result.left, self.result.right) for f in source_files(side.stored.files)]

    def entries(self) -> int:
        return len(self.result.only_left) + len(self.result.only_right) + len(self.result.elements)

    def sections(self) -> Iterator[Section]:
        """The verdict and every difference. On a terminal the verdict is first, and the largest changes follow; a pipe
        gets all as a table, and the verdict on stderr.
        """
        said = self.result.verdict()
        verdict = "\n".join([str(said), *said.omitted])
        yield Paragraph(verdict, quiet=True, loud=False)
        below = Paragraph(verdict) if self.ok else Message(verdict)
        yield PerMedium(lambda: self._terminal(verdict), lambda: [*self._pipe(), below])

    def _kinds(self) -> list[tuple[str, str, str]]:
        """Kind, name and description of each difference that is not one of values."""
        result = self.result
        out = [("only in A", name, "") for name in result.only_left]
        out += [("only in B", name, "") for name in result.only_right]
        out += [("shape", m.name, f"{m.left} and {m.right}") for m in result.shapes]
        return out + [("dtype", m.name, f"{m.left} and {m.right}") for m in result.dtypes]

    def _pipe(self) -> list[Section]:
        rows = [(kind, plain(name), what, "", "") for kind, name, what in self._kinds()]
        for d in self.result.elements:
            at = ", ".join(map(str, d.first))
            gap = f", largest difference {d.max_abs:.9g}" if d.max_abs else ""
            what = f"{d.elements:,} of {d.total:,} elements, first at [{at}]{gap}"
            rows.append(("values", plain(d.name), what, number(d.relative), number(d.cosine)))
        columns = 5 if self.result.values else 3
        header = ("difference", "name", "what", "relative", "cosine")[:columns]
        return [Table(header, [r[:columns] for r in rows])] if rows else []

    def _terminal(self, verdict: str) -> Iterator[Section]:
        """Names that differ only in numbers on one line, with the largest relative change and the smallest cosine."""
        from ckpttool.core.tensor_names import fold

        yield Paragraph(verdict, wrap=True)
        alike: dict[tuple[str, str], list[str]] = {}
        for kind, name, what in self._kinds():
            alike.setdefault((kind, what), []).append(name)
        kinds = [(plain(n), f"{kind} {what}".strip()) for (kind, what), names in alike.items() for n, _ in fold(names)]
        yield from _largest(("name", "difference"), kinds, drop=())
        changed = self.result.elements
        rows = []
        # In the order of the largest in each, which comes first.
        for name, places in sorted(fold([d.name for d in changed]), key=lambda f: min(f[1])):
            mine = [changed[i] for i in places]
            cosine = min([d.cosine for d in mine if d.cosine is not None], default=None)
            n, total = sum(d.elements for d in mine), sum(d.total for d in mine)
            what = f"{n:,}" if n < 1000 and 100 * n < total else f"{100 * n / total:.3g} %"
            angle = "-" if cosine is None else f"{cosine:.6f}"
            if angle == "1.000000" and cosine != 1:
                angle = f"{cosine:.9f}"  # with the digits that tell it from 1
            rows.append((plain(name), number(changed[min(places)].relative, 4), angle, what))
        yield from _largest(("changed tensor", "relative", "cosine", "elements"), rows, ["elements"], (1, 2, 3))
        if (drift := self.result.drift) is not None:
            of = "" if drift.component == "model" else f" ({drift.component})"
            for title, found in ((f"layer{of}", drift.layers), (f"module{of}", drift.modules)):
                yield from _drifted(title, found)

    def json(self) -> dict[str, Any]:
        result = self.result
        opened = {
            side: {"path": str(source.path), "format": source.format, "mesh": source.mesh.to_json()}
            for side, source in (("left", result.left), ("right", result.right))
        }
        components = (
            "only_left_components=components_left only_right_components=components_right"
            " failed_components=components_failed"
        )
        elements = [
            {
                **pick(d, "name different=elements of=total first"),
                **{name: finite(number) for name, number in pick(d, "max_abs relative cosine").items()},
            }
            for d in result.elements
        ]
        return {
            **opened,
            "equal": result.equal,
            "values": result.values,
            "tolerance": None if result.tolerance is None else pick(result.tolerance, "atol rtol"),
            **pick(
                result,
                f"compared changed components=by_component {components} renamed only_left only_right",
            ),
            "shapes": [pick(m, "name left right") for m in result.shapes],
            "dtypes": [pick(m, "name left right") for m in result.dtypes],
            "elements": elements,
            "notes": result.notes,
            **({"drift": self._drift()} if result.values else {}),
        }

    def _drift(self) -> dict[str, Any] | None:
        """How far layers and modules are apart; None where nothing differs."""
        drift = self.result.drift
        if drift is None:
            return None
        lists = {"layers": drift.layers, "modules": drift.modules}
        return {"component": drift.component} | {
            key: [pick(d, "name tensors changed") | {"relative": finite(d.relative)} for d in found]
            for key, found in lists.items()
        }


MOST = 16
"""Rows of a table on a terminal; what has changed less is one line more."""


def _largest(
    header: Sequence[str], rows: Sequence[tuple[str | BarCell, ...]], drop: Sequence[str], right: Sequence[int] = ()
) -> Iterator[Section]:
    """A table of the first rows below an empty line, and how many more there are."""
    shown = rows[: MOST if len(rows) > MOST + 1 else None]
    if shown:
        yield Paragraph("")
        yield Table(header, shown, drop=drop, right=right)
    if len(shown) < len(rows):
        yield Paragraph(f"and {len(rows) - len(shown):,} more (--json lists all)")


def _drifted(title: str, found: Sequence[Drifted]) -> Iterator[Section]:
    """How far layers or modules are apart, the largest change first."""
    most = max((d.relative for d in found if d.relative is not None and math.isfinite(d.relative)), default=0.0)
    rows = []
    for d in found:
        share = 1.0 if d.relative == math.inf else (d.relative or 0) / most if most else 0.0
        rows.append((plain(d.name), number(d.relative, 4), BarCell(share), f"{d.changed:,} of {d.tensors:,}"))
    yield from _largest((title, "relative", "", "changed"), rows, ["changed"], (1, 3))
