"""``ckpttool fp8-cast``: how to quantise, or with --to what to dequantise to."""

from __future__ import annotations

from typing import Annotated

import typer

from ckpttool.cli import choices, options
from ckpttool.cli.values import open_options, precision, run_options, sides
from ckpttool.errors import UsageError
from ckpttool.ops.values import parse_size
from ckpttool.words import either

Recipe = Annotated[
    str,
    typer.Option(
        "--recipe",
        metavar="RECIPE",
        help=f"How to quantise: {either(choices.RECIPES)}; default: block.",
        show_default=False,
        autocompletion=choices.completes(*choices.RECIPES),
    ),
]
To = Annotated[
    str,
    typer.Option(
        "--to",
        metavar="DTYPE",
        help=f"Dequantise instead: {either(choices.PRECISIONS)}.",
        show_default=False,
        autocompletion=choices.completes(*choices.PRECISIONS),
    ),
]
CodeDtype = Annotated[
    str,
    typer.Option(
        "--code",
        metavar="DTYPE",
        help="Element dtype: e4m3 or e5m2.",
        show_default=False,
        autocompletion=choices.completes(*choices.CODES),
    ),
]
PowersOfTwo = Annotated[bool, typer.Option("--pow2", help="Scales are powers of two, whatever their dtype.")]
KeepPreset = Annotated[
    str,
    typer.Option(
        "--keep-preset",
        metavar="NAME",
        help=f"Which layers stay in high precision: {either(choices.PRESETS)}.",
        autocompletion=choices.completes(*choices.PRESETS),
    ),
]


def fp8_cast(
    src: options.Src,
    dst: options.Dst,
    recipe: Recipe = "",
    to: To = "",
    block: options.BlockSides = "",
    scale_dtype: options.ScaleDtype = "",
    quant_method: options.QuantMethod = "",
    code: CodeDtype = "",
    pow2: PowersOfTwo = False,
    edge: options.Edge = "",
    keep: options.KeepHigh = None,
    include: options.Include = None,
    keep_preset: KeepPreset = "hf-default",
    max_shard_size: options.MaxShard = "",
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
    remove_keys: options.RemoveKeys = None,
    keep_keys: options.KeepKeys = None,
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
    """Write SRC with its weights quantised (FP8, MXFP4, NVFP4), or dequantised with --to."""
    from ckpttool import report
    from ckpttool.ops.fp8_cast import prepare
    from ckpttool.ops.reshard import execute
    from ckpttool.quant.keep import Keep
    from ckpttool.quant.scheme import scheme
    from ckpttool.targeting.recode import Recoding
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
    if to:
        said = [
            option
            for option, value in (
                ("--recipe", recipe),
                ("--block", block),
                ("--scale-dtype", scale_dtype),
                ("--quant-method", quant_method),
                ("--code", code),
                ("--pow2", pow2),
                ("--edge", edge),
                ("--keep", keep),
                ("--include", include),
                ("--keep-preset", keep_preset != "hf-default"),
            )
            if value
        ]
        if said:
            raise UsageError(f"{said[0]} is for quantising, and --to {to} dequantises", hint="drop one of them")
        recoding = Recoding(None, precision(to, "--to"))
    else:
        wanted = scheme(
            recipe or "block",
            method=quant_method,
            block=sides(block, "--block"),
            scale_dtype=scale_dtype,
            code=code,
            edge=edge,
            powers=pow2,
        )
        recoding = Recoding(wanted, keep=Keep(keep_preset, tuple(keep or ()), tuple(include or ())))
    run = run_options(memory=memory, workers=workers, force=force, resume=resume, manifest=manifest)
    selection = Selection(tuple(remove_keys or ()), tuple(keep_keys or ()))
    limit = parse_size(max_shard_size, "--max-shard-size") if max_shard_size else None
    prepared = prepare(src, opened, recoding, selection, max_shard_size=limit)
    if dry_run:
        report.show_cast_plan(prepared, run, as_json=json, quiet=quiet)
        return
    result = execute(prepared, dst, run, report.progress(quiet=quiet or json), verify=verify)
    report.show_cast(result, as_json=json, quiet=quiet)
