"""From a question to its answer: which part of ``inspect`` looks at what.

Only the part that is asked for is imported, because listing a checkpoint is done before numpy would be loaded.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeVar

from ckpttool.containers.safetensors import read_header
from ckpttool.core.files import AnyPlace, source_files
from ckpttool.core.words import count
from ckpttool.errors import CkptError, CorruptError, UsageError
from ckpttool.formats.base import OpenOptions
from ckpttool.formats.parts import parts_of
from ckpttool.formats.runs import RunError, named_saves, step_of
from ckpttool.ops.inspect.listing import Choice, FileRow, Listing, file_rows, is_safetensors, list_tensors, relative
from ckpttool.storage.listing import WEIGHTS, list_source
from ckpttool.storage.place import number, parse_place, read_each

if TYPE_CHECKING:
    from ckpttool.answers.findings import CheckResult, ImportsResult
    from ckpttool.execute import Progress
    from ckpttool.execute.fleets.base import Fleet
    from ckpttool.ops.inspect.diff import DiffResult, Tolerance
    from ckpttool.ops.inspect.holdings import Layout
    from ckpttool.ops.inspect.runs import RunListing
    from ckpttool.ops.inspect.suggest import Suggestion
    from ckpttool.ops.inspect.survey import Survey
    from ckpttool.ops.inspect.total import Total
    from ckpttool.ops.inspect.values import Slice, Values

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class InspectRequest:
    """What to show; exactly one of the views, or none for the tree."""

    choice: Choice = field(default_factory=Choice)
    checkpoints: bool = False
    """Of a run: those that lie in SRC, even if SRC can be read as one."""
    list: bool = False
    files: bool = False
    ranks: bool = False
    metadata: bool = False
    show: tuple[str, ...] = ()
    stats: bool = False
    histogram: bool = False
    digest: bool = False
    total: bool = False
    """With ``digest``: one for everything."""
    imports: bool = False
    suggest_family: bool = False
    check: bool = False
    findings: bool = False
    """With ``check``: they are written in other forms, too."""
    diff: AnyPlace | None = None
    second: str = ""
    """With ``diff``: both are checkpoints of the run that SRC is, by name, step or path."""
    values: bool = False
    """With ``diff`` and ``check``."""
    atol: float | None = None
    rtol: float | None = None
    depth: int | None = None
    svg: Path | None = None
    html: Path | None = None
    """Everything in one report; what else is asked is part of it."""
    on: str = ""
    """Who reads the elements: "" is this machine."""

    @property
    def tolerance(self) -> Tolerance | None:
        """Of a comparison; None for one bit for bit."""
        if self.atol is None and self.rtol is None:
            return None
        from ckpttool.ops.inspect.diff import Tolerance

        return Tolerance(self.atol or 0.0, self.rtol or 0.0)

    @property
    def reads_values(self) -> bool:
        """Statistics, histogram and checksum are one view: they read the same elements."""
        return self.stats or self.histogram or self.digest

    @property
    def is_plain(self) -> bool:
        """Whether nothing is asked for: what SRC is, it will see."""
        return self == InspectRequest(Choice(sort=self.choice.sort))

    @property
    def reads_bytes(self) -> bool:
        """Whether it can take long."""
        return self.reads_values or self.check or self.diff is not None


@dataclass(frozen=True, slots=True)
class View:
    """What is seen of one checkpoint."""

    question: InspectRequest
    listing: Listing
    ok: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class TensorListing(View):
    """Headers only: the tree, the list, the files or their metadata."""

    files: tuple[FileRow, ...] = ()
    metadata: dict[str, dict[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LayoutView(View):
    """Who holds what."""

    layout: Layout


@dataclass(frozen=True, slots=True)
class TensorStats(View):
    """Statistics, histograms, checksums."""

    values: tuple[Values, ...]


@dataclass(frozen=True, slots=True)
class Totalled(View):
    """One digest of everything."""

    total: Total


@dataclass(frozen=True, slots=True)
class Suggested(View):
    """A family file to start from."""

    suggestion: Suggestion


@dataclass(frozen=True, slots=True)
class TensorSlices(View):
    """Elements."""

    slices: tuple[Slice, ...]


def inspect(
    src: AnyPlace, options: OpenOptions, question: InspectRequest, progress: Progress | None = None
) -> View | ImportsResult | CheckResult | DiffResult | RunListing:
    """Look into ``src``. ``ok`` of the answer is False when a check found an error, a pickle is dangerous or two
    checkpoints differ.

    Raises UsageError for a question that makes no sense, CorruptError when what is looked at changes meanwhile, and
    what ``open_checkpoint`` raises.
    """
    return _watched(_answer, src, options, question, progress)


def everything(
    src: AnyPlace, options: OpenOptions, question: InspectRequest, progress: Progress | None = None
) -> Survey:
    """What a report shows of ``src``; the parts that read elements are those that ``question`` asks for.

    Raises what ``inspect`` raises; see ``survey`` for errors that are part of the answer.
    """
    return _watched(_survey, src, options, question, progress)


def _watched(
    ask: Callable[[AnyPlace, OpenOptions, InspectRequest, Progress | None, Fleet | None], _Answer],
    src: AnyPlace,
    options: OpenOptions,
    question: InspectRequest,
    progress: Progress | None,
) -> _Answer:
    """The answer to a sensible question, if what was looked at has stayed the same meanwhile."""
    _sensible(question)
    if question.second:
        from ckpttool.ops.inspect.runs import pick

        first, second = pick(src, str(question.diff)), pick(src, question.second)
        if first == second:
            raise UsageError(f"--diff names one checkpoint twice: {question.diff}", where=str(first))
        src, question = first, replace(question, diff=second, second="")
    roots = [parse_place(p) for p in (src, question.diff) if p is not None]
    before = [number(p) for p in roots]
    if question.on:
        from ckpttool.execute.machines.each import machines

        with machines(question.on) as fleet:
            answer = ask(src, options, question, progress, fleet)
    else:
        answer = ask(src, options, question, progress, None)
    # A View and a Survey have a listing; a Survey may have a DiffResult. Their modules are loaded only where needed.
    listing: Listing | None = getattr(answer, "listing", None)
    files = list(listing.files) if listing is not None else []
    for side in ("left", "right"):
        checkpoint = getattr(getattr(answer, "diff", None) or answer, side, None)
        files += source_files(checkpoint.stored.files) if checkpoint is not None else []
    changed = [p for p, was in zip(roots, before, strict=True) if number(p) != was]
    same = read_each(lambda _, file: file.is_unchanged(), [f.place for f in files], files)
    changed += [f.place for f, unchanged in zip(files, same, strict=True) if not unchanged]
    if changed:
        raise CorruptError("a source has changed while it was read", where=str(changed[0]), hint="repeat the command")
    return answer


def _survey(
    src: AnyPlace, options: OpenOptions, question: InspectRequest, progress: Progress | None, fleet: Fleet | None
) -> Survey:
    from ckpttool.execute import NoProgress
    from ckpttool.ops.inspect.survey import Wish, survey

    wish = Wish(
        question.choice,
        stats=question.stats or question.histogram,
        check=question.check,
        check_values=question.check and question.values,
        diff=question.diff,
        diff_values=question.values,
        tolerance=question.tolerance,
    )
    return survey(src, options, wish, progress or NoProgress(), fleet)


def _answer(
    src: AnyPlace,
    options: OpenOptions,
    question: InspectRequest,
    progress: Progress | None,
    fleet: Fleet | None,
) -> View | ImportsResult | CheckResult | DiffResult | RunListing:
    if question.checkpoints:
        from ckpttool.ops.inspect.runs import list_run

        return list_run(src, options)
    if question.imports:
        from ckpttool.ops.inspect.imports import list_imports

        return list_imports(src)
    if question.check:
        from ckpttool.execute import NoProgress
        from ckpttool.ops.inspect.check import check

        only = tuple(question.choice.components)
        return check(src, options, progress or NoProgress(), values=question.values, only=only, fleet=fleet)
    if question.diff is not None:
        from ckpttool.execute import NoProgress
        from ckpttool.ops.inspect.diff import diff

        patterns = tuple(question.choice.patterns)
        return diff(
            src,
            question.diff,
            options,
            progress or NoProgress(),
            patterns=patterns,
            values=question.values or question.tolerance is not None,
            tolerance=question.tolerance,
            only=tuple(question.choice.components),
            fleet=fleet,
        )
    if question.show:
        from ckpttool.ops.inspect.values import show

        listing = list_tensors(src, options)
        return TensorSlices(question, listing, tuple(show(listing, question.show)))
    if question.suggest_family:
        from ckpttool.ops.inspect.suggest import suggest

        listing = list_tensors(src, options, stored_too=False)
        if (parts := parts_of(listing.stored)) is not None:
            names = ", ".join(p.name for p in parts.chosen)
            raise UsageError(
                f"a family is for one model, and SRC has several parts: {names}",
                where=str(listing.path),
                hint=f"give one: {parts.chosen[0].place}",
            )
        shapes = {r.name: r.shape for r in listing.rows if r.component == "model"}
        return Suggested(question, listing, suggest(shapes, listing.stored.config))
    if question.ranks:
        from ckpttool.ops.inspect.holdings import layout_of

        listing = list_tensors(src, options, question.choice, stored_too=False)
        return LayoutView(question, listing, layout_of(listing))
    if question.reads_values:
        from ckpttool.execute import NoProgress
        from ckpttool.ops.inspect.total import total
        from ckpttool.ops.inspect.values import Wanted, measure

        listing, watch = list_tensors(src, options, question.choice, stored_too=False), progress or NoProgress()
        if question.total:
            return Totalled(question, listing, total(listing, watch, fleet))
        wanted = Wanted(question.stats, question.histogram, question.digest)
        return TensorStats(question, listing, tuple(measure(listing, wanted, watch, fleet)))
    return _listed(src, options, question)


def _listed(src: AnyPlace, options: OpenOptions, question: InspectRequest) -> View | RunListing:
    """What headers say: of one checkpoint, or of a directory of several which ones there are."""
    choice = question.choice if question.list else replace(question.choice, sort="")  # the tree has an order of its own
    try:
        listing = list_tensors(src, options, choice)
    except CkptError as e:
        if not question.is_plain or not (isinstance(e, RunError) or _holds_saves(src)):
            raise
        from ckpttool.ops.inspect.runs import list_run

        return list_run(src, options)
    if not (question.list or question.files or question.metadata):
        if beside := _other_saves(listing):
            listing.notes = [*listing.notes, beside]
        from ckpttool.ops.inspect.code import code_note

        read = {*(f.place for f in listing.files), *listing.stored.indexes}
        note = code_note(list_source(parse_place(src)), read)
        listing.notes = [*listing.notes, note] if note else listing.notes
    files = tuple(file_rows(listing)) if question.files else ()
    return TensorListing(question, listing, files, _metadata(listing) if question.metadata else {})


def _holds_saves(src: AnyPlace) -> bool:
    """Whether what cannot be read as one checkpoint is a directory of several, and has no tensors itself."""
    try:
        source = list_source(parse_place(src))
    except CkptError:
        return False
    own = any(n.endswith(WEIGHTS) and step_of(n) is None for n in source.names)
    return not source.single and not own and len(named_saves(source)) > 1


def _other_saves(listing: Listing) -> str:
    """A note where SRC is one of several checkpoints of a run, or has some in its directories; "" elsewhere."""
    source = list_source(listing.path)
    saves = [] if source.single else named_saves(source)
    own = any(f.place.parent == source.root for f in listing.files)
    if len(saves) + own < 2:
        return ""
    lie = "lies" if len(saves) == 1 else "lie"
    return f"{count(len(saves), 'checkpoint')} of a run {lie} here: --checkpoints lists them"


def _sensible(question: InspectRequest) -> None:
    """Options that contradict each other, or do nothing."""
    views = {
        "--checkpoints": question.checkpoints,
        "--list": question.list,
        "--files": question.files,
        "--ranks": question.ranks,
        "--metadata": question.metadata,
        "--show": bool(question.show),
        "--stats, --hist and --hash": question.reads_values,
        "--imports": question.imports,
        "--suggest-family": question.suggest_family,
        "--check": question.check,
        "--diff": question.diff is not None,
    }
    if question.html is not None:
        views = _beside_a_report(question, views)
    chosen = [name for name, said in views.items() if said]
    if len(chosen) > 1:
        raise UsageError(
            f"{' and '.join(chosen)} are different questions",
            hint="ask one at a time, or all in a report: --html FILE" if _reported(question) else "ask one at a time",
        )
    if question.total and (not question.digest or question.stats or question.histogram):
        raise UsageError("--total belongs to --hash alone", hint="`--hash --total`")
    if question.total and (question.choice.patterns or question.choice.dtypes or question.choice.min_size):
        raise UsageError("--total is of everything; filters do not apply", hint="--only chooses components")
    if question.second and question.diff is None:
        raise UsageError(
            f"there is more than inspect takes: {question.second}",
            hint=f"to compare: --diff {shlex.quote(question.second)}",
        )
    if question.diff == "":
        raise UsageError("--diff names no checkpoint", hint="is a variable of the shell not set?")
    if question.values and not (question.check or question.diff):
        raise UsageError("--values belongs to --diff and --check", hint="--stats and --show read values by themselves")
    if question.findings and not question.check:
        raise UsageError("--findings belongs to --check")
    if (question.atol is not None or question.rtol is not None) and question.diff is None:
        raise UsageError("--atol and --rtol belong to --diff")
    compares = question.diff is not None and (question.values or question.atol is not None or question.rtol is not None)
    if question.on and not (question.reads_values or question.check or compares):
        raise UsageError(
            "--on is for what reads elements", hint="--stats, --hist, --hash, --check, and --diff with --values"
        )
    if question.svg is not None and not question.ranks:
        raise UsageError("--svg belongs to --ranks")
    if question.depth is not None and chosen:
        raise UsageError(f"--depth belongs to the tree, not to {chosen[0]}")
    _sensible_choice(question, chosen)


def _reported(question: InspectRequest) -> bool:
    """Whether a report has room for all that is asked."""
    others = (question.list, question.files, question.ranks, question.metadata, question.show, question.digest)
    return not (any(others) or question.imports or question.suggest_family)


def _beside_a_report(question: InspectRequest, views: dict[str, bool]) -> dict[str, bool]:
    """The views without those that are parts of a report. Raises UsageError for one that is not."""
    parts = {"--stats, --hist and --hash", "--check", "--diff"}
    other = [name for name, said in views.items() if said and name not in parts]
    other += ["--hash"] * question.digest + ["--depth"] * (question.depth is not None)
    if other:
        raise UsageError(
            f"{other[0]} is not part of a report", hint="--html goes with --stats, --check, --diff and their options"
        )
    return {}


def _sensible_choice(question: InspectRequest, chosen: Sequence[str]) -> None:
    """Filters that contradict what is asked, or do nothing."""
    choice, report = question.choice, question.html is not None
    if question.checkpoints and (choice.components or choice.patterns or choice.dtypes or choice.min_size):
        raise UsageError("--checkpoints is about whole checkpoints; filters do not apply")
    if choice.components and (question.show or question.files or question.metadata or question.imports):
        raise UsageError(
            f"--only does not apply to {chosen[0]}", hint="--list --only COMPONENT shows which files it lies in"
        )
    if choice.components and question.check and not question.values and not report:
        raise UsageError("--only with --check says whose elements --values reads", hint="add --values")
    whole = question.check and not report
    if (whole or question.show or question.files or question.metadata or question.imports) and (
        choice.patterns or choice.dtypes or choice.min_size
    ):
        raise UsageError(f"{chosen[0]} looks at a whole checkpoint or at what it names; filters do not apply")
    if question.diff is not None and (choice.dtypes or choice.min_size):
        raise UsageError("--dtype and --min-size do not apply to --diff", hint="use --filter")


def _metadata(listing: Listing) -> dict[str, dict[str, str]]:
    """``__metadata__`` of each file; a pickle has none."""
    return {
        relative(f.place, listing.stored.root): read_header(f.place).metadata if is_safetensors(f.place) else {}
        for f in listing.files
    }
