"""``ckpttool inspect``: what to show, and of which tensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ckpttool.cli import choices, options
from ckpttool.cli.options import bytes_of, flag, number, value
from ckpttool.cli.process import reader_may_leave
from ckpttool.core.words import one_of
from ckpttool.errors import UsageError


@dataclass
class Views:
    """What to show; under the names that InspectRequest has for it."""

    checkpoints: Annotated[
        bool, flag("--checkpoints", "List the checkpoints of a run: step, size, format, complete or not.")
    ] = False
    list_: Annotated[bool, flag("--list", "One tensor a line.")] = False
    files: Annotated[bool, flag("--files", "One file a line.")] = False
    ranks: Annotated[bool, flag("--ranks", "Draw which rank holds which box of which tensor.")] = False
    svg: Annotated[
        Path | None,
        value("--svg", "FILE", "With --ranks: also draw it, to FILE and where it needs more pages FILE-2, FILE-3, ..."),
    ] = None
    stats: Annotated[
        bool, flag("--stats", "Min, max, mean, std, amax, NaN, Inf, zeros and saturated FP8 of each tensor.")
    ] = False
    histogram: Annotated[bool, flag("--hist", "A histogram of each tensor.")] = False
    digest: Annotated[bool, flag("--hash", "A checksum of each whole tensor, the same for every sharding.")] = False
    total: Annotated[
        bool, flag("--total", "With --hash: one digest of all tensors, the same for every format and sharding.")
    ] = False
    show: Annotated[list[str] | None, value("--show", "NAME[INDEX]", "Elements: 'a.weight[:8, -1]', as in numpy.")] = (
        None
    )
    metadata: Annotated[bool, flag("--metadata", "Metadata in the files' headers.")] = False
    imports: Annotated[
        bool, flag("--imports", "What the pickles in SRC would import; exit 3 when one is dangerous.")
    ] = False
    suggest_family: Annotated[
        bool, flag("--suggest-family", "Print a family file to start from, for a model that none is for.")
    ] = False
    check: Annotated[
        bool, flag("--check", "Look for problems, and prove a manifest's checksums; exit 3 on an error.")
    ] = False
    findings: Annotated[
        list[str] | None,
        value(
            "--findings",
            "KIND[=FILE]",
            "With --check: write the findings as sarif, junit, gitlab (Code Quality) or github (annotations).",
            choices.FINDINGS,
        ),
    ] = None
    diff: Annotated[str | None, value("--diff", "OTHER", "Compare with OTHER; exit 3 when they differ.")] = None
    values: Annotated[bool, flag("--values", "With --diff and --check: also read the elements.")] = False
    atol: Annotated[
        float | None, value("--atol", "X", "With --diff: absolute tolerance, dtypes may differ.", min=0)
    ] = None
    rtol: Annotated[float | None, value("--rtol", "X", "With --diff: tolerance relative to OTHER.", min=0)] = None
    depth: Annotated[int | None, number("--depth", "Levels of the tree.")] = None
    html: Annotated[
        Path | None,
        value("--html", "FILE", "Write a report to FILE: one page, also with --stats, --check and --diff."),
    ] = None


@options.grouped
def inspect(
    *,
    src: options.Src,
    second: Annotated[
        str, options.argument("SECOND", "With --diff FIRST, where SRC is a run: compare two of its checkpoints.")
    ] = "",
    view: Views,
    filter_: Annotated[
        list[str] | None, value("--filter", "PATTERN", "Only these tensors: a glob or re:REGEX.")
    ] = None,
    only: options.Only = None,
    dtype: Annotated[list[str] | None, value("--dtype", "DTYPE", "Only tensors of this dtype.", choices.DTYPES)] = None,
    min_size: Annotated[str, value("--min-size", "SIZE", "Only tensors at least this large, such as 1MB.")] = "",
    sort: Annotated[str, value("--sort", "KEY", "Order by name, size, offset or file.", choices.ORDERS)] = "name",
    on: options.On = "",
    source: options.SourceOptions,
    shown: options.OutputFlags,
) -> None:
    """Show what is inside SRC: a tree of its tensors, or what the options ask for."""
    from ckpttool.core.catalog import COMPONENTS
    from ckpttool.ops.inspect.answer import InspectRequest
    from ckpttool.ops.inspect.answer import inspect as look
    from ckpttool.ops.inspect.listing import Choice
    from ckpttool.report import inspect as report
    from ckpttool.report.findings import parsed

    opened = source.open_options()
    files = parsed(view.findings or ())
    if files and shown.json and any(file is None for _, file in files):
        raise UsageError("--json and --findings both write to stdout", hint="name a file: --findings KIND=FILE")
    order = one_of(sort, "--sort", "name", "size", "offset", "file")
    components = tuple(one_of(c, "--only", *COMPONENTS) for c in only or ())
    smallest = bytes_of(min_size, "--min-size") or 0
    choice = Choice(tuple(filter_ or ()), tuple(dtype or ()), smallest, order, components)
    asked = {name.rstrip("_"): said for name, said in vars(view).items() if name != "findings"}
    asked |= {"show": tuple(view.show or ()), "findings": bool(files)}
    question = InspectRequest(choice, **asked, second=second, on=on)
    watch = shown.progress() if question.reads_bytes else None
    if question.html is not None:
        from ckpttool.ops.inspect.answer import everything
        from ckpttool.report.survey import check_page, show_survey

        check_page(question.html)
        found = everything(src, opened, question, watch)
        code = 0 if found.ok else 3
        with reader_may_leave():
            code = show_survey(found, question.html, as_json=shown.json, quiet=shown.quiet, findings=files)
    else:
        answer = look(src, opened, question, watch)
        with reader_may_leave():
            report.show_inspect(answer, as_json=shown.json, quiet=shown.quiet, findings=files)
        code = 0 if answer.ok else 3
    if code:
        raise typer.Exit(code)
