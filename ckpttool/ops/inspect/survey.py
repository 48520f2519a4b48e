"""Everything that a report shows of one checkpoint, gathered once.

The structural check is always part of it, because it reads headers only; elements are read where statistics, values or
the checksums of a check, or those of a comparison are asked for. What cannot be found out leaves its place empty: a
broken checkpoint has findings, and no tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from ckpttool.answers.findings import CheckResult
from ckpttool.core.catalog import LogicalTensor
from ckpttool.core.files import AnyPlace, Place
from ckpttool.core.words import ranges
from ckpttool.errors import AccessError, CkptError, UsageError
from ckpttool.execute import Progress
from ckpttool.formats.base import OpenOptions
from ckpttool.ops.inspect.check import check
from ckpttool.ops.inspect.diff import DiffResult, Tolerance, diff
from ckpttool.ops.inspect.holdings import Layout, layout_of
from ckpttool.ops.inspect.listing import Choice, Holders, Listing, holders_of, list_tensors
from ckpttool.ops.inspect.values import Values, Wanted, measure
from ckpttool.storage.place import parse_place

if TYPE_CHECKING:
    from ckpttool.execute.fleets.base import Fleet

_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True)
class Wish:
    """What a report is to show beside what headers say."""

    choice: Choice = field(default_factory=Choice)
    """Of tensors; the check is always of everything."""
    stats: bool = False
    """Statistics, and a histogram of each tensor."""
    check: bool = False
    """Checksums of a manifest, too."""
    check_values: bool = False
    """Elements, too."""
    diff: AnyPlace | None = None
    """What to compare with."""
    diff_values: bool = False
    """Elements, too."""
    tolerance: Tolerance | None = None


@dataclass(slots=True)
class Survey:
    """What is known of a checkpoint; None for what was not asked, and for what could not be found out."""

    wish: Wish
    path: Place
    check: CheckResult
    listing: Listing | None = None
    layout: Layout | None = None
    """Who holds what, where there are several ranks."""
    holders: tuple[str, ...] = ()
    """For each tensor of the listing, the ranks that hold some of it; () where there is one rank."""
    values: tuple[Values, ...] = ()
    """Statistics and histogram of each tensor of the listing; () where they were not asked for."""
    diff: DiffResult | None = None
    failures: list[CkptError] = field(default_factory=list)
    """Why something is not there that was asked for."""

    @property
    def ok(self) -> bool:
        """Whether what was asked, of a check and a comparison, has the answer "yes"."""
        sound = not self.wish.check or self.check.ok
        return sound and (self.diff is None or self.diff.ok)


def survey(src: AnyPlace, options: OpenOptions, wish: Wish, progress: Progress, fleet: Fleet | None = None) -> Survey:
    """Look at everything. Raises UsageError and AccessError as the parts do; other errors are in the answer, unless
    they leave nothing to show."""
    path = parse_place(src)
    only = tuple(wish.choice.components)
    found = check(src, options, progress, values=wish.check_values, only=only, fleet=fleet, sums=wish.check)
    out = Survey(wish, path, found)
    out.listing = _tried(out, lambda: list_tensors(src, options, replace(wish.choice, sort="name")))
    listing = out.listing
    if listing is not None:
        if listing.logical and (holders := holders_of(listing.stored)).world > 1:
            out.holders = _held(listing, holders)
            out.layout = _tried(out, lambda: layout_of(listing))
        if wish.stats:
            wanted = Wanted(stats=True, histogram=True)
            out.values = _tried(out, lambda: tuple(measure(listing, wanted, progress, fleet))) or ()
        if (other := wish.diff) is not None:
            out.diff = _tried(out, lambda: _compare(src, other, options, wish, progress, fleet))
    elif found.ok or not found.checked.get("file"):
        raise out.failures[0]
    return out


def _tried(out: Survey, what: Callable[[], _Found]) -> _Found | None:
    """What there is to find; None, and the reason in ``out``, where it cannot be found out."""
    try:
        return what()
    except (UsageError, AccessError):
        raise
    except CkptError as e:
        out.failures.append(e)
        return None


def _compare(
    src: AnyPlace, other: AnyPlace, options: OpenOptions, wish: Wish, progress: Progress, fleet: Fleet | None
) -> DiffResult:
    return diff(
        src,
        other,
        options,
        progress,
        patterns=tuple(wish.choice.patterns),
        values=wish.diff_values or wish.tolerance is not None,
        tolerance=wish.tolerance,
        only=tuple(wish.choice.components),
        fleet=fleet,
    )


def _held(listing: Listing, holders: Holders) -> tuple[str, ...]:
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
