"""``--stats``, ``--hist`` and ``--hash``: what the elements of tensors say. One view: they read the same elements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpttool.answers.document import Message, Paragraph, PerMedium, Section, Table
from ckpttool.answers.fields import finite, number, pick, shape
from ckpttool.core.words import count
from ckpttool.errors import UsageError, plain
from ckpttool.ops.inspect.views.base import InspectedSource, ListingAnswer, View, ViewAnswer, flag, narrows

if TYPE_CHECKING:
    from ckpttool.ops.inspect.total import TotalDigest
    from ckpttool.ops.inspect.values import Values, WantedValues

MOST = 30
"""Tensors that have a line each, on a terminal too."""


class ValuesView(View["ValuesAnswer | TotalAnswer"]):
    """Statistics, histograms and checksums of each tensor; or one digest of all."""

    name = "values"
    stats: bool = flag("--stats", "Min, max, mean, std, amax, NaN, Inf, zeros and saturated FP8 of each tensor.")
    histogram: bool = flag("--hist", "A histogram of each tensor.")
    digest: bool = flag("--hash", "A checksum of each whole tensor, the same for every sharding.")
    total: bool = flag("--total", "With --hash: one digest of all tensors, the same for every format and sharding.")

    @property
    def label(self) -> str:
        return "--stats, --hist and --hash"

    @property
    def asked(self) -> bool:
        return self.stats or self.histogram or self.digest

    @property
    def slow(self) -> bool:
        return True

    @property
    def reads_elements(self) -> bool:
        return self.asked

    @property
    def outside_report(self) -> str:
        return "--hash" if self.digest else ""

    def refuse(self, asked: Sequence[View[ViewAnswer]]) -> None:
        if self.total and (not self.digest or self.stats or self.histogram):
            raise UsageError("--total belongs to --hash alone", hint="`--hash --total`")
        if self.total and narrows(self.choice):
            raise UsageError("--total covers all tensors and does not take filters", hint="--only selects components")

    def look(self, at: InspectedSource) -> ValuesAnswer | TotalAnswer:
        listing = at.tensors(self.choice)
        if self.total:
            from ckpttool.ops.inspect.total import total

            return TotalAnswer(listing, total(listing, at.progress, at.fleet))
        from ckpttool.ops.inspect.values import WantedValues, measure

        wanted = WantedValues(self.stats, self.histogram, self.digest)
        return ValuesAnswer(listing, wanted, measure(listing, wanted, at.progress, at.fleet))


class ValuesAnswer(ListingAnswer):
    """Statistics, histograms and checksums, in the order of the listing."""

    name = "values"
    wanted: WantedValues
    values: Sequence[Values]

    def entries(self) -> int:
        return len(self.values)

    def sections(self) -> Iterator[Section]:
        stats, digests = self.wanted.stats, self.wanted.digest
        if stats or digests:
            folded = stats and not digests and len(self.values) > MOST and any(v.stats is not None for v in self.values)
            drawn: list[Section] = [FoldedStats(self.values), Message(self._on_lines())] if folded else []
            yield PerMedium(lambda: drawn[:1] or [self._table(4)], lambda: [self._table(9)], quiet=True)
            yield PerMedium(lambda: drawn[1:], list)
        if self.wanted.histogram:
            yield from (HistogramBars(v, quiet=True) for v in self.values)

    def _on_lines(self) -> str:
        from ckpttool.core.tensor_names import fold

        of = f"{count(len(self.values), 'tensor')} on {count(len(fold([v.row.name for v in self.values])), 'line')}"
        return f"note: {of}: --filter chooses, and in a pipe (| less -S) each has a line"

    def _table(self, digits: int) -> Table:
        stats, digests = self.wanted.stats, self.wanted.digest
        header = ["name", "dtype", "shape"]
        header += ["min", "max", "mean", "std", "amax", "nan", "inf", "zeros", "saturated"] if stats else []
        header += ["digest"] if digests else []
        rows = []
        for v in self.values:
            row: list[str | int] = [plain(v.row.name), v.row.dtype, shape(v.row.shape)]
            if stats and (s := v.stats) is not None:
                row += [number(n, digits) for n in (s.minimum, s.maximum, s.mean, s.std, s.amax)]
                row += [s.nan, s.inf, s.zeros, "-" if s.saturated is None else s.saturated]
            elif stats:
                row += ["-"] * 9
            rows.append([*row, v.digest or "-"] if digests else row)
        drop = ["saturated"] if stats and all(v.stats is None or v.stats.saturated is None for v in self.values) else []
        drop += ["shape", "amax", "dtype", "zeros", "saturated", "mean"] if stats else ["shape", "dtype"]
        drop += ["std", "max", "min"] if stats and digests else []
        return Table(header, rows, drop=list(dict.fromkeys(drop)), right=range(3, 8) if stats else ())

    def json(self) -> dict[str, Any]:
        found = []
        for v in self.values:
            entry = pick(v.row, "name dtype shape")
            if v.stats is not None:
                names = "elements min=minimum max=maximum mean std amax nan inf zeros saturated"
                entry["stats"] = {key: finite(n) for key, n in pick(v.stats, names).items()}
            if v.histogram is not None:
                entry["histogram"] = pick(v.histogram, "edges counts")
            if v.digest is not None:
                entry["digest"] = v.digest
            found.append(entry)
        return {"list": found}


@dataclass(eq=False, repr=False)
class FoldedStats(Section):
    """Statistics of tensors that differ only in the numbers of their names on one line."""

    values: Sequence[Values]


@dataclass(eq=False, repr=False)
class HistogramBars(Section):
    """The histogram of a tensor."""

    values: Values


class TotalAnswer(ListingAnswer):
    """One digest of everything."""

    name = "total"
    total: TotalDigest

    def entries(self) -> int:
        return len(self.total.lines)

    def sections(self) -> Iterator[Section]:
        of = f"note: the digest is of {count(len(self.total.lines), 'tensor')}: {', '.join(self.listing.components)}"
        yield Message(plain(of))
        yield Paragraph(self.total.digest, quiet=True)

    def json(self) -> dict[str, Any]:
        found = [
            {"name": name, "dtype": dtype, "shape": [int(n) for n in dims.split(",") if n], "digest": digest}
            for name, dtype, dims, digest in (line.rsplit("\t", 3) for line in self.total.lines)
        ]
        return {"digest": self.total.digest, "list": found}
