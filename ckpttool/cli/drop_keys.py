"""``ckpttool drop-keys``: what to leave out."""

from __future__ import annotations

import os
from typing import Annotated

from ckpttool.cli import options
from ckpttool.cli.options import argument, flag
from ckpttool.errors import UsageError


@options.grouped
def drop_keys(
    *,
    src: options.Src,
    dst: options.Dst,
    patterns: Annotated[list[str] | None, argument("PATTERN...", "Tensors to omit: globs or re:REGEX.")] = None,
    link: Annotated[bool, flag("--link", "Link files that do not change instead of copying.")] = False,
    source: Annotated[
        options.SourceOptions, options.without("etp", "sharding", "also", "select", "rank_pattern", "split", "part")
    ],
    keep_keys: options.KeepKeys = None,
    flags: options.RunFlags,
    shown: options.OutputFlags,
) -> None:
    """Write a checkpoint without some of its tensors; files that lose none do not change."""
    from ckpttool.ops.drop_keys import prepare
    from ckpttool.ops.reshard import execute
    from ckpttool.report import drop_keys as report
    from ckpttool.report.render import show
    from ckpttool.targeting.select import Selection

    opened, run = source.open_options(flags.pipeline_parts()), flags.options()
    for name, text in (("SRC", src), ("DST", dst)):
        if set(text) & set("*?[{") and "/" not in text and not os.path.lexists(text):
            raise UsageError(
                f"`{text}` looks like a pattern, and stands where {name} does",
                hint=f"ckpttool drop-keys SRC DST PATTERN...; if it is a directory: ./{text}",
            )
    prepared = prepare(src, opened, Selection(tuple(patterns or ()), tuple(keep_keys or ())), link=link)
    if flags.dry_run:
        show(report.plan_document(prepared, dst), as_json=shown.json, quiet=shown.quiet)
        return
    result = execute(prepared.target, dst, run, shown.progress(flags), verify=flags.verify)
    show(report.document(prepared, result), as_json=shown.json, quiet=shown.quiet)
