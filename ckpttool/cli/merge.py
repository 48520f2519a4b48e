"""``ckpttool merge``: a recipe in a file, a recipe in options, or no recipe and the shards of one model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ckpttool.cli import choices, options
from ckpttool.cli.values import open_options, precision, recoding, run_options, target_of
from ckpttool.errors import UsageError
from ckpttool.ops.values import one_of

Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCE...",
        help="Checkpoints (PATH or PATH+ADAPTER), or one recipe: mergekit's YAML or Paddle's merge_config.json.",
        show_default=False,
    ),
]
Output = Annotated[
    Path,
    typer.Option(
        "-o", "--output", metavar="DST", readable=False, help="Directory to write; must not exist.", show_default=False
    ),
]
MethodName = Annotated[
    str,
    typer.Option(
        "--method",
        metavar="NAME",
        help="Merge method; default: linear with --weights, else average.",
        show_default=False,
        autocompletion=choices.completes(*choices.METHODS),
    ),
]
Weights = Annotated[
    str,
    typer.Option(
        "--weights",
        metavar="W,W,...",
        help="One weight for each source, or for each adapter of a single one.",
        show_default=False,
    ),
]
Base = Annotated[
    str, typer.Option("--base", metavar="PATH", help="The model that the others started from.", show_default=False)
]
Param = Annotated[
    list[str] | None,
    typer.Option(
        "--param",
        metavar="NAME=VALUE",
        help="A parameter of the method; NAME=A,B,... gives one value to each source.",
        show_default=False,
    ),
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Seed of methods that draw random numbers.")]
Rng = Annotated[
    str,
    typer.Option(
        "--rng",
        metavar="STREAM",
        help="counter: reproducible whatever else is merged; mergekit: its draws, bit for bit.",
        autocompletion=choices.completes("counter", "mergekit"),
    ),
]
Missing = Annotated[
    str,
    typer.Option(
        "--missing",
        metavar="base|skip",
        help="Tensors that not all sources have: take the base's, or leave them out.",
        show_default=False,
        autocompletion=choices.completes("base", "skip"),
    ),
]
Vocab = Annotated[
    str,
    typer.Option(
        "--vocab",
        metavar="min|max|base",
        help="Rows of embeddings when the sources have different numbers of them.",
        show_default=False,
        autocompletion=choices.completes("min", "max", "base"),
    ),
]
AllowNonfinite = Annotated[
    bool, typer.Option("--allow-nonfinite", help="Write NaN and infinities instead of refusing them.")
]
Card = Annotated[bool, typer.Option("--card", help="Add a section about the merge to README.md of DST.")]


def _list_methods(asked: bool) -> None:
    if asked:
        from ckpttool import report

        report.show_methods(as_json="--json" in sys.argv)
        raise typer.Exit


ListMethods = Annotated[
    bool,
    typer.Option(
        "--list-methods",
        callback=_list_methods,
        is_eager=True,
        help="Print the methods with their parameters, and end.",
    ),
]
Verify = Annotated[
    bool,
    typer.Option("--verify", help="Merge once more and compare with what was written; exit 3 if not equal."),
]


def merge(
    sources: Sources,
    output: Output,
    method: MethodName = "",
    list_methods: ListMethods = False,  # noqa: ARG001 - its callback answers
    weights: Weights = "",
    base: Base = "",
    param: Param = None,
    seed: Seed = 0,
    rng: Rng = "counter",
    missing: Missing = "",
    vocab: Vocab = "",
    allow_nonfinite: AllowNonfinite = False,
    card: Card = False,
    tp: options.Tp = None,
    pp: options.Pp = None,
    ep: options.Ep = None,
    etp: options.Etp = None,
    tp_out: options.TpOut = None,
    pp_out: options.PpOut = None,
    ep_out: options.EpOut = None,
    etp_out: options.EtpOut = None,
    pp_layout: options.PpLayout = "",
    ranks_out: options.RanksOut = "",
    from_: options.From = "",
    to: options.To = "",
    version: options.PaddleTarget = "",
    rank_pattern: options.RankPattern = "",
    family: options.FamilyName = "",
    replicate: options.Replicate = None,
    split: options.Split = None,
    remove_keys: options.RemoveKeys = None,
    keep_keys: options.KeepKeys = None,
    rename: options.Rename = None,
    dtype: options.Dtype = "",
    dequant: options.Dequant = "",
    fuse: options.Fuse = False,
    unfuse: options.Unfuse = False,
    max_shard_size: options.MaxShard = "",
    vocab_multiple: options.VocabMultiple = 1,
    dry_run: options.DryRun = False,
    force: options.Force = False,
    resume: options.Resume = False,
    verify: Verify = False,
    workers: options.Workers = None,
    memory: options.Memory = "64MiB",
    manifest: options.Manifest = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Write one checkpoint out of several, or out of the shards of one."""
    from ckpttool import report
    from ckpttool.ops.merge import MergeOptions, execute, prepare, prepare_one
    from ckpttool.recipe.flags import adapted, recipe_of
    from ckpttool.recipe.read import is_recipe, read_recipe
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
        version=version,
    )
    run = run_options(memory=memory, workers=workers, force=force, resume=resume, manifest=manifest)
    selection = Selection(tuple(remove_keys or ()), tuple(keep_keys or ()), tuple(rename or ()))
    choices = MergeOptions(
        one_of(missing, "--missing", "base", "skip"),
        one_of(vocab, "--vocab", "min", "max", "base"),
        allow_nonfinite,
        seed,
        one_of(rng, "--rng", "counter", "mergekit"),
        card,
        precision(dequant, "--dequant"),
    )
    said = bool(method or weights or base or param)
    if is_recipe(sources):
        if said:
            raise UsageError(
                "a recipe already sets method, weights, base and parameters",
                hint="drop --method, --weights, --base and --param, or name the checkpoints themselves",
            )
        recipe = read_recipe(sources[0])
        prepared = prepare(recipe, opened, target, selection, choices)
    elif len(sources) == 1 and not said and "+" not in sources[0]:
        prepared = prepare_one(sources[0], opened, target, selection, recoding(dequant, ""))
    elif len(sources) == 1 and not (method or base or param):
        prepared = prepare(adapted(sources[0], weights), opened, target, selection, choices)
    else:
        recipe = recipe_of(
            sources,
            method=method or ("linear" if weights else "average"),
            weights=weights,
            base=base,
            params=param or (),
        )
        prepared = prepare(recipe, opened, target, selection, choices)
    if dry_run:
        report.show_merge_plan(prepared, run, as_json=json, quiet=quiet)
        return
    result = execute(prepared, output, run, report.progress(quiet=quiet or json), verify=verify)
    report.show_merge(result, as_json=json, quiet=quiet, verbose=verbose)
