"""``ckpttool drop-keys``: what to leave out, and a target as reshard has it."""

from __future__ import annotations

from typing import Annotated

import typer

from ckpttool.cli import options
from ckpttool.cli.values import open_options, run_options, target_of
from ckpttool.errors import UsageError

Patterns = Annotated[
    list[str] | None,
    typer.Argument(metavar="PATTERN...", help="Tensors to leave out: globs or re:REGEX.", show_default=False),
]
Link = Annotated[
    bool, typer.Option("--link", help="Reflink or hard-link files that do not change, instead of copying them.")
]


def drop_keys(
    src: options.Src,
    dst: options.Dst,
    patterns: Patterns = None,
    keep_keys: options.KeepKeys = None,
    link: Link = False,
    tp: options.Tp = None,
    pp: options.Pp = None,
    ep: options.Ep = None,
    etp: options.Etp = None,
    sharding: options.Sharding = None,
    also: options.Also = None,
    tp_out: options.TpOut = None,
    pp_out: options.PpOut = None,
    ep_out: options.EpOut = None,
    etp_out: options.EtpOut = None,
    pp_layout: options.PpLayout = "",
    from_: options.From = "",
    to: options.To = "",
    rank_pattern: options.RankPattern = "",
    family: options.FamilyName = "",
    replicate: options.Replicate = None,
    split: options.Split = None,
    rename: options.Rename = None,
    dtype: options.Dtype = "",
    max_shard_size: options.MaxShard = "",
    dry_run: options.DryRun = False,
    force: options.Force = False,
    resume: options.Resume = False,
    verify: options.Verify = False,
    workers: options.Workers = None,
    memory: options.Memory = "64MiB",
    manifest: options.Manifest = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Write SRC without some of its tensors; files that lose none stay as they are."""
    from ckpttool import report
    from ckpttool.ops.drop_keys import prepare
    from ckpttool.ops.reshard import execute
    from ckpttool.targeting.select import Selection

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
    target = target_of(
        to=to,
        tp_out=tp_out,
        pp_out=pp_out,
        ep_out=ep_out,
        etp_out=etp_out,
        pp_layout=pp_layout,
        ranks_out="",
        max_shard_size=max_shard_size,
        dtype=dtype,
        fuse=False,
        unfuse=False,
        vocab_multiple=1,
    )
    run = run_options(memory=memory, workers=workers, force=force, resume=resume, manifest=manifest)
    for path in (src, dst):
        if set(path.name) & set("*?[{") and "/" not in str(path) and not path.exists():
            raise UsageError(
                f"`{path}` looks like a pattern, and stands where {'SRC' if path is src else 'DST'} does",
                hint=f"ckpttool drop-keys SRC DST PATTERN...; if it is a directory: {path.absolute()}",
            )
    selection = Selection(tuple(patterns or ()), tuple(keep_keys or ()), tuple(rename or ()))
    prepared = prepare(src, opened, selection, target, link=link)
    if dry_run:
        report.show_drop_plan(prepared, as_json=json, quiet=quiet)
        return
    result = execute(prepared.target, dst, run, report.progress(quiet=quiet or json), verify=verify)
    report.show_drop(prepared, result, as_json=json, quiet=quiet)
