"""``ckpttool merge``: a recipe in a file, a recipe in options, or no recipe and the shards of one model."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ckpttool.cli import choices, options
from ckpttool.cli.options import argument, flag, value
from ckpttool.cli.values import precision, recoding
from ckpttool.core.words import one_of
from ckpttool.errors import UsageError


def _list_methods(asked: bool) -> None:
    if asked:
        from ckpttool.report.merge import methods_document
        from ckpttool.report.render import show

        show(methods_document(), as_json="--json" in sys.argv)
        raise typer.Exit


@dataclass
class HowToMerge:
    """The recipe in options, and what is done about models that differ."""

    method: Annotated[
        str,
        value("--method", "NAME", "Method; default: linear with --weights, else average.", choices.METHODS),
    ] = ""
    weights: Annotated[str, value("--weights", "W,W,...", "One weight per source, or per adapter of one source.")] = ""
    base: Annotated[str, value("--base", "PATH", "The model that the others were trained from.")] = ""
    param: Annotated[
        list[str] | None,
        value("--param", "NAME=VALUE", "Parameter of the method; A,B,...: one per source."),
    ] = None
    seed: Annotated[int, value("--seed", "N", "Seed of random methods.", min=0)] = 0
    rng: Annotated[
        str,
        value(
            "--rng",
            "STREAM",
            "counter, or mergekit for its random numbers.",
            ("counter", "mergekit"),
        ),
    ] = "counter"
    missing: Annotated[
        str,
        value(
            "--missing",
            "base|skip",
            "Tensors that a source lacks: base's, or none.",
            ("base", "skip"),
        ),
    ] = ""
    vocab: Annotated[
        str,
        value(
            "--vocab",
            "min|max|base",
            "Rows of embeddings, if sources differ.",
            ("min", "max", "base"),
        ),
    ] = ""
    allow_nonfinite: Annotated[bool, flag("--allow-nonfinite", "Accept NaN and infinities.")] = False
    card: Annotated[bool, flag("--card", "Write a model card (README.md).")] = False
    report: Annotated[
        Path | None,
        value("--report", "FILE", "Write an HTML report: distances to the sources."),
    ] = None
    list_methods: Annotated[
        bool,
        typer.Option(
            "--list-methods",
            callback=_list_methods,
            is_eager=True,
            hidden=True,
            help="Print the methods with their parameters, and end.",
        ),
    ] = False


@dataclass
class MergeFlags(options.RunFlags):
    """How a run goes."""

    verify: Annotated[bool, flag("--verify", "Merge again and compare every element with DST.")] = False


@options.grouped
def merge(
    *,
    sources: Annotated[
        list[str],
        argument(
            "SOURCE...",
            "Checkpoints (PATH or PATH+ADAPTER), or a recipe (mergekit YAML, Paddle JSON).",
        ),
    ],
    output: Annotated[str, value("-o --output", "DST", "Directory or URL to write; must not exist.")],
    how: HowToMerge,
    source: Annotated[options.SourceOptions, options.without("sharding", "also", "part", "etp", "rank_pattern")],
    out: Annotated[options.TargetOptions, options.without("pp_layout")],
    flags: MergeFlags,
    shown: options.OutputFlags,
    verbose: options.Verbose = False,
) -> None:
    """Merge several models into one, or the shards of one into whole tensors."""
    from ckpttool.ops.merge import MergeOptions, execute, prepare, prepare_one
    from ckpttool.recipe.flags import asked
    from ckpttool.recipe.read import is_recipe
    from ckpttool.report import merge as report
    from ckpttool.report.render import show

    opened, target, run = source.open_options(flags.pipeline_parts()), out.target(), flags.options()
    selection = out.selection()
    choices = MergeOptions(
        one_of(how.missing, "--missing", "base", "skip"),
        one_of(how.vocab, "--vocab", "min", "max", "base"),
        how.allow_nonfinite,
        how.seed,
        one_of(how.rng, "--rng", "counter", "mergekit"),
        how.card,
        precision(out.dequant, "--dequant"),
    )
    if is_recipe(sources) and (how.method or how.weights or how.base or how.param):
        raise UsageError(
            "a recipe already sets method, weights, base and parameters",
            hint="drop --method, --weights, --base and --param, or name the checkpoints themselves",
        )
    recipe = asked(sources, method=how.method, weights=how.weights, base=how.base, params=how.param or ())
    if recipe is None:
        prepared = prepare_one(sources[0], opened, target, selection, choices, recoding(out.dequant, ""))
    else:
        prepared = prepare(recipe, opened, target, selection, choices)
    if how.report is not None:
        report.check_report(prepared, output, run, how.report)
    if flags.dry_run:
        show(report.plan_document(prepared, run, output), as_json=shown.json, quiet=shown.quiet)
        return
    measure = how.report is not None
    result = execute(prepared, output, run, shown.progress(flags), verify=flags.verify, measure=measure)
    if how.report is not None:
        report.write_report(result, how.report)
    show(report.document(result, verbose=verbose, page=how.report), as_json=shown.json, quiet=shown.quiet)
