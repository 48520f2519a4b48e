"""``ckpttool reshard``: every option of what is written."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckpttool.cli import choices, options
from ckpttool.cli.values import open_options, recoding, run_options, target_of

ShardingOut = Annotated[
    int | None,
    typer.Option(
        "--sharding-out", metavar="N", min=1, help="Ranks that share the optimizer state of DST.", show_default=False
    ),
]
ShardingVersion = Annotated[
    str,
    typer.Option(
        "--sharding-version",
        metavar="v1|v2",
        help="How --sharding-out shares; default: v2.",
        show_default=False,
        autocompletion=choices.completes("v1", "v2"),
    ),
]
NativeNames = Annotated[
    bool, typer.Option("--native-names", help="Names as --target's own models have them, not those of SRC.")
]
Ema = Annotated[bool, typer.Option("--ema", help="Write the exponential moving average as the model.")]
Aoa = Annotated[
    Path | None,
    typer.Option("--aoa", metavar="FILE", help="Names and shapes by Paddle's AOA statements.", show_default=False),
]
Requant = Annotated[
    str,
    typer.Option(
        "--requant",
        metavar="RECIPE[:MxN]",
        help="Re-quantise the weights, as fp8-cast does: channel, block:64x128.",
        show_default=False,
        autocompletion=choices.completes(*choices.RECIPES),
    ),
]


def reshard(
    src: options.Src,
    dst: options.Dst,
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
    sharding_out: ShardingOut = None,
    sharding_version: ShardingVersion = "",
    ranks_out: options.RanksOut = "",
    from_: options.From = "",
    to: options.To = "",
    version: options.PaddleTarget = "",
    native_names: NativeNames = False,
    only: options.Only = None,
    ema: Ema = False,
    aoa: Aoa = None,
    rank_pattern: options.RankPattern = "",
    family: options.FamilyName = "",
    replicate: options.Replicate = None,
    split: options.Split = None,
    remove_keys: options.RemoveKeys = None,
    keep_keys: options.KeepKeys = None,
    rename: options.Rename = None,
    dtype: options.Dtype = "",
    dequant: options.Dequant = "",
    requant: Requant = "",
    fuse: options.Fuse = False,
    unfuse: options.Unfuse = False,
    max_shard_size: options.MaxShard = "",
    vocab_multiple: options.VocabMultiple = 1,
    dry_run: options.DryRun = False,
    force: options.Force = False,
    resume: options.Resume = False,
    verify: options.Verify = False,
    workers: options.Workers = None,
    memory: options.Memory = "64MiB",
    manifest: options.Manifest = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Write SRC for another number of ranks, in another format or under other names."""
    from ckpttool import report
    from ckpttool.ops.reshard import execute, prepare
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
        ranks_out=ranks_out,
        max_shard_size=max_shard_size,
        dtype=dtype,
        fuse=fuse,
        unfuse=unfuse,
        vocab_multiple=vocab_multiple,
        sharding_out=sharding_out,
        sharding_version=sharding_version,
        version=version,
        only=only,
        ema=ema,
        native_names=native_names,
        aoa=aoa,
    )
    run = run_options(memory=memory, workers=workers, force=force, resume=resume, manifest=manifest)
    selection = Selection(tuple(remove_keys or ()), tuple(keep_keys or ()), tuple(rename or ()))
    prepared = prepare(src, opened, target, selection, recoding(dequant, requant))
    if dry_run:
        report.show_plan(prepared, run, as_json=json, quiet=quiet)
        return
    result = execute(prepared, dst, run, report.progress(quiet=quiet or json), verify=verify)
    report.show_reshard(result, as_json=json, quiet=quiet, verbose=verbose)
