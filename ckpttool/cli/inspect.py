"""``ckpttool inspect``: what to show, and of which tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckpttool.cli import choices, options
from ckpttool.cli.values import open_options
from ckpttool.ops.values import one_of, parse_size

List = Annotated[bool, typer.Option("--list", help="One tensor a line.")]
Files = Annotated[bool, typer.Option("--files", help="One file a line.")]
Ranks = Annotated[bool, typer.Option("--ranks", help="Draw which rank holds which box of which tensor.")]
Svg = Annotated[
    Path | None,
    typer.Option("--svg", metavar="FILE", help="With --ranks: also write the picture to FILE.", show_default=False),
]
Stats = Annotated[
    bool, typer.Option("--stats", help="Min, max, mean, std, amax, NaN, Inf, zeros and saturated FP8 of each tensor.")
]
Hist = Annotated[bool, typer.Option("--hist", help="A histogram of each tensor.")]
Hash = Annotated[bool, typer.Option("--hash", help="A checksum of each whole tensor, the same for every sharding.")]
Total = Annotated[
    bool,
    typer.Option("--total", help="With --hash: one digest of all tensors, the same for every format and sharding."),
]
Show = Annotated[
    list[str] | None,
    typer.Option(
        "--show", metavar="NAME[INDEX]", help="Elements: 'a.weight[:8, -1]', as in numpy.", show_default=False
    ),
]
Metadata = Annotated[bool, typer.Option("--metadata", help="Metadata in the files' headers.")]
Check = Annotated[
    bool, typer.Option("--check", help="Look for problems, and prove a manifest's checksums; exit 3 on an error.")
]
Diff = Annotated[
    Path | None,
    typer.Option("--diff", metavar="OTHER", help="Compare with OTHER; exit 3 when they differ.", show_default=False),
]
Values = Annotated[bool, typer.Option("--values", help="With --diff and --check: also read the elements.")]
Atol = Annotated[
    float | None,
    typer.Option(
        "--atol", metavar="X", min=0, help="With --diff: absolute tolerance, dtypes may differ.", show_default=False
    ),
]
Rtol = Annotated[
    float | None,
    typer.Option("--rtol", metavar="X", min=0, help="With --diff: tolerance relative to OTHER.", show_default=False),
]
Filter = Annotated[
    list[str] | None,
    typer.Option("--filter", metavar="PATTERN", help="Only these tensors: a glob or re:REGEX.", show_default=False),
]
Dtype = Annotated[
    list[str] | None,
    typer.Option(
        "--dtype",
        metavar="DTYPE",
        help="Only tensors of this dtype.",
        show_default=False,
        autocompletion=choices.completes(*choices.DTYPES),
    ),
]
MinSize = Annotated[
    str,
    typer.Option(
        "--min-size", metavar="SIZE", help="Only tensors at least this large, such as 1MB.", show_default=False
    ),
]
Sort = Annotated[
    str,
    typer.Option(
        "--sort",
        metavar="KEY",
        help="Order by name, size, offset or file.",
        autocompletion=choices.completes(*choices.ORDERS),
    ),
]
Depth = Annotated[
    int | None, typer.Option("--depth", min=1, metavar="N", help="Levels of the tree.", show_default=False)
]


def inspect(
    src: options.Src,
    list_: List = False,
    files: Files = False,
    ranks: Ranks = False,
    svg: Svg = None,
    stats: Stats = False,
    hist: Hist = False,
    hash_: Hash = False,
    total: Total = False,
    show: Show = None,
    metadata: Metadata = False,
    check: Check = False,
    diff: Diff = None,
    values: Values = False,
    atol: Atol = None,
    rtol: Rtol = None,
    filter_: Filter = None,
    only: options.Only = None,
    dtype: Dtype = None,
    min_size: MinSize = "",
    sort: Sort = "name",
    depth: Depth = None,
    tp: options.Tp = None,
    pp: options.Pp = None,
    ep: options.Ep = None,
    etp: options.Etp = None,
    sharding: options.Sharding = None,
    also: options.Also = None,
    from_: options.From = "",
    rank_pattern: options.RankPattern = "",
    family: options.FamilyName = "",
    replicate: options.Replicate = None,
    split: options.Split = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Show what is inside SRC: a tree of its tensors, or what the options ask for."""
    from ckpttool import report
    from ckpttool.ops.inspect.answer import InspectRequest
    from ckpttool.ops.inspect.answer import inspect as look
    from ckpttool.ops.inspect.listing import COMPONENTS, Choice

    opened = open_options(
        fmt=from_,
        tp=tp,
        pp=pp,
        ep=ep,
        etp=etp,
        rank_pattern=rank_pattern,
        family=family,
        replicate=replicate,
        split=split,
        sharding=sharding,
        also=also,
    )
    order = one_of(sort, "--sort", "name", "size", "offset", "file")
    components = tuple(one_of(c, "--only", *COMPONENTS) for c in only or ())
    smallest = parse_size(min_size, "--min-size") if min_size else 0
    question = InspectRequest(
        choice=Choice(tuple(filter_ or ()), tuple(dtype or ()), smallest, order, components),
        list=list_,
        files=files,
        ranks=ranks,
        metadata=metadata,
        show=tuple(show or ()),
        stats=stats,
        histogram=hist,
        digest=hash_,
        total=total,
        check=check,
        diff=diff,
        values=values,
        atol=atol,
        rtol=rtol,
        depth=depth,
        svg=svg,
    )
    answer = look(src, opened, question, report.progress(quiet=quiet or json) if question.reads_bytes else None)
    report.show_inspect(answer, as_json=json, quiet=quiet)
    if not answer.ok:
        raise typer.Exit(3)
