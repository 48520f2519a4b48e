"""``--html``: a report of one checkpoint, with everything in it that is asked for.

The structural check is always part of it, because it reads headers only; elements are read where statistics, values or
the checksums of a check, or those of a comparison are asked for. What cannot be found out leaves its place empty: a
broken checkpoint has findings, and no tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ckpttool.core.words import count, ranges
from ckpttool.errors import AccessError, CkptError, UsageError
from ckpttool.ops.inspect.views.base import InspectedSource, ViewAnswer, value
from ckpttool.ops.inspect.views.diff import ComparingView, DiffAnswer
from ckpttool.ops.inspect.views.tree import is_run

if TYPE_CHECKING:
    from ckpttool.answers.findings import CheckResult
    from ckpttool.core.catalog import LogicalTensor
    from ckpttool.core.files import DataFile, Place
    from ckpttool.ops.inspect.diff import DiffResult
    from ckpttool.ops.inspect.history import Pairs, RunHistory
    from ckpttool.ops.inspect.holdings import Layout
    from ckpttool.ops.inspect.listing import Holders, TensorListing
    from ckpttool.ops.inspect.runs import RunListing
    from ckpttool.ops.inspect.values import Values

T = TypeVar("T")


class PageView(ComparingView["ReportContents | RunContents"]):
    """What headers show, and the parts that read elements as far as they are asked for."""

    name = "report"
    html: Path | None = value(
        "--html", "FILE", "Write a report to FILE: one page, also with --stats, --check and --diff.", Path
    )
    stats: bool = False
    histogram: bool = False
    values: bool = False
    checkpoints: bool = False
    """SRC is a run, even if it can be read as one checkpoint."""
    check: bool = False
    """Checksums of a manifest, too; the check of headers is always part of a report."""
    findings: tuple[str, ...] = ()

    @property
    def measures(self) -> bool:
        """Whether it has statistics, and a histogram of each tensor."""
        return self.stats or self.histogram

    @property
    def checks_elements(self) -> bool:
        """Whether the check reads elements, too."""
        return self.check and self.values

    @property
    def slow(self) -> bool:
        return self.measures or self.check or self.diff is not None

    def look(self, at: InspectedSource) -> ReportContents | RunContents:
        """What is known of SRC, a checkpoint or a run. Raises UsageError and AccessError as the parts do."""
        if self.checkpoints:
            return self._of_run(at)
        try:
            listing = at.tensors(replace(self.choice, sort="name"), stored_too=True)
        except CkptError as e:
            if self.diff is None and is_run(e, at.src):
                return self._of_run(at)
            if isinstance(e, UsageError | AccessError):
                raise
            return self._of_checkpoint(at, None, [e])
        return self._of_checkpoint(at, listing, [])

    def _of_run(self, at: InspectedSource) -> RunContents:
        from ckpttool.ops.inspect.history import read_history
        from ckpttool.ops.inspect.runs import list_run

        if self.check:
            raise UsageError("--check is about one checkpoint, and SRC is a run", where=str(at.src), hint="name one")
        out = RunContents(self, list_run(at.src, at.options))
        if self.measures:
            out.history = read_history(out.run, at.options, self.choice, at.progress, at.fleet)
        return out

    def _of_checkpoint(
        self, at: InspectedSource, listing: TensorListing | None, failures: list[CkptError]
    ) -> ReportContents:
        """Raises UsageError and AccessError as the parts do; other errors are in the answer, unless they leave nothing
        to show.
        """
        from ckpttool.ops.inspect.check import check
        from ckpttool.ops.inspect.holdings import layout_of
        from ckpttool.ops.inspect.listing import holders_of
        from ckpttool.storage.place import parse_place

        only, values = tuple(self.choice.components), self.checks_elements
        found = check(at.src, at.options, at.progress, values=values, only=only, fleet=at.fleet, sums=self.check)
        out = ReportContents(self, parse_place(at.src), found, failures, listing)
        if listing is None:
            if found.ok or not found.checked.get("file"):
                raise out.failures[0]
            return out
        if listing.logical and (holders := holders_of(listing.stored)).world > 1:
            out.holders = _ranks_of_rows(listing, holders)
            out.layout = out.tried(lambda: layout_of(listing))
        if self.measures:
            from ckpttool.ops.inspect.values import WantedValues, measure

            wanted = WantedValues(stats=True, histogram=True)
            out.values = tuple(out.tried(lambda: measure(listing, wanted, at.progress, at.fleet)) or ())
        if self.diff is not None:
            from ckpttool.ops.inspect.history import changed_pairs

            out.diff = compared = out.tried(lambda: self.compared(at))
            if compared is not None and compared.elements:
                out.pairs = out.tried(lambda: changed_pairs(compared, at.progress, at.fleet))
        return out


class ReportContents(ViewAnswer):
    """What a page shows of a checkpoint; None for what was not asked, and for what could not be found out."""

    name = "report"
    view: PageView
    path: Place
    check: CheckResult
    failures: list[CkptError]
    """Why something is not there that was asked for."""
    listing: TensorListing | None = None
    layout: Layout | None = None
    """Which ranks hold what, where there are several."""
    holders: tuple[str, ...] = ()
    """For each tensor of the listing, the ranks that hold some of it; () where there is one rank."""
    values: tuple[Values, ...] = ()
    """Statistics and histogram of each tensor of the listing; () where they were not asked for."""
    diff: DiffResult | None = None
    pairs: Pairs | None = None
    """Histograms of SRC and of the other checkpoint, of the tensors that changed most."""

    @property
    def ok(self) -> bool:
        """Whether what was asked, of a check and a comparison, has the answer "yes"."""
        sound = not self.view.check or self.check.ok
        return sound and (self.diff is None or self.diff.ok)

    @property
    def other(self) -> str:
        """What the page calls the checkpoint that this one is compared with."""
        from ckpttool.storage.place import resolved

        return "" if self.diff is None else resolved(self.diff.right.path).name or str(self.diff.right.path)

    @property
    def notes(self) -> Sequence[str]:
        listing, diff = self.listing, self.diff
        out = [*self.check.notes, *(listing.notes if listing is not None else ()), *(diff.notes if diff else ())]
        if diff:
            out += diff.verdict("this checkpoint", self.other).omitted
        if self.values and (bare := sum(v.stats is None for v in self.values)):
            out.append(f"no statistics of {count(bare, 'tensor')}: elements smaller than a byte")
        return list(dict.fromkeys(out))

    @property
    def files(self) -> Sequence[DataFile]:
        own = self.listing.files if self.listing is not None else []
        return [*own, *(DiffAnswer(self.diff).files if self.diff is not None else ())]

    def tried(self, part: Callable[[], T]) -> T | None:
        """A part of it; None, and the reason in ``failures``, where it cannot be found out."""
        try:
            return part()
        except (UsageError, AccessError):
            raise
        except CkptError as e:
            self.failures.append(e)
            return None


class RunContents(ViewAnswer):
    """What a page shows of a run."""

    name = "run"
    view: PageView
    run: RunListing
    history: RunHistory | None = None
    """What was read of its checkpoints; None where it was not asked for."""

    @property
    def notes(self) -> Sequence[str]:
        return [*self.run.notes, *(self.history.notes if self.history else ())]


def _ranks_of_rows(listing: TensorListing, holders: Holders) -> tuple[str, ...]:
    tensors = {str(t.key): t for t in listing.checkpoint().catalog}
    known: dict[frozenset[int], str] = {}
    out = []
    for row in listing.rows:
        ranks = _ranks(tensors[row.name], holders)
        text = known.get(ranks)
        if text is None:
            text = known[ranks] = ranges(sorted(ranks), "-")
        out.append(text)
    return tuple(out)


def _ranks(tensor: LogicalTensor, holders: Holders) -> frozenset[int]:
    return frozenset(holders.rank(p.stored) for p in (*tensor.pieces, *tensor.replicas))
