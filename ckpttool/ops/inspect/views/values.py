"""``--stats``, ``--hist`` and ``--hash``: what the elements of tensors say. One view: they read the same elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpttool.answers.fields import finite, pick
from ckpttool.errors import UsageError
from ckpttool.ops.inspect.views.base import ListingAnswer, Subject, View, flag, narrows

if TYPE_CHECKING:
    from ckpttool.ops.inspect.total import Total
    from ckpttool.ops.inspect.values import Values, Wanted


@dataclass(frozen=True, kw_only=True)
class ValuesView(View):
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

    def refuse(self, asked: Sequence[View]) -> None:
        if self.total and (not self.digest or self.stats or self.histogram):
            raise UsageError("--total belongs to --hash alone", hint="`--hash --total`")
        if self.total and narrows(self.choice):
            raise UsageError("--total is of everything; filters do not apply", hint="--only chooses components")

    def look(self, at: Subject) -> ValuesAnswer | TotalAnswer:
        listing = at.tensors(self.choice)
        if self.total:
            from ckpttool.ops.inspect.total import total

            return TotalAnswer(listing, total(listing, at.progress, at.fleet))
        from ckpttool.ops.inspect.values import Wanted, measure

        wanted = Wanted(self.stats, self.histogram, self.digest)
        return ValuesAnswer(listing, wanted, measure(listing, wanted, at.progress, at.fleet))


@dataclass(frozen=True)
class ValuesAnswer(ListingAnswer):
    """Statistics, histograms and checksums, in the order of the listing."""

    name = "values"
    wanted: Wanted
    values: Sequence[Values]

    def json(self) -> tuple[dict[str, Any], int]:
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
        return {**self.head(), "list": found}, len(found)


@dataclass(frozen=True)
class TotalAnswer(ListingAnswer):
    """One digest of everything."""

    name = "total"
    total: Total

    def json(self) -> tuple[dict[str, Any], int]:
        found = [
            {"name": name, "dtype": dtype, "shape": [int(n) for n in dims.split(",") if n], "digest": digest}
            for name, dtype, dims, digest in (line.rsplit("\t", 3) for line in self.total.lines)
        ]
        return {**self.head(), "digest": self.total.digest, "list": found}, len(found)
