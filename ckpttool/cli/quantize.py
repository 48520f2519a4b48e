"""``ckpttool quantize``: how to quantize, or with --to what to dequantize to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ckpttool.cli import choices, options
from ckpttool.cli.options import bytes_of, value
from ckpttool.cli.values import powers_of_two, precision, sides
from ckpttool.core.words import either
from ckpttool.errors import UsageError


@dataclass
class CastOptions(options.QuantOptions):
    """How weights are quantized."""

    code: Annotated[str, value("--code", "DTYPE", "Element dtype: e4m3 or e5m2.", choices.CODES)] = ""
    keep_preset: options.KeepPreset = "hf-default"


_ALL = ["recipe", "block", "scale_dtype", "quant_method", "code", "edge", "keep", "include", "keep_preset"]


@options.grouped
def quantize(
    *,
    src: options.Src,
    dst: options.Dst,
    to: Annotated[str, value("--to", "DTYPE", f"Dequantize to {either(choices.PRECISIONS)}.", choices.PRECISIONS)] = "",
    how: CastOptions,
    max_shard_size: options.MaxShard = "",
    source: Annotated[
        options.SourceOptions, options.without("etp", "sharding", "also", "rank_pattern", "split", "part")
    ],
    remove_keys: options.RemoveKeys = None,
    keep_keys: options.KeepKeys = None,
    flags: options.RunFlags,
    shown: options.OutputFlags,
) -> None:
    """Quantize weights to FP8, MXFP4 or NVFP4; with --to, dequantize them."""
    from ckpttool.ops.quantize import prepare
    from ckpttool.ops.reshard import execute
    from ckpttool.quant.keep import Keep
    from ckpttool.quant.scheme import scheme
    from ckpttool.report import quantize as report
    from ckpttool.report.render import show
    from ckpttool.targeting.recode import Recoding
    from ckpttool.targeting.select import Selection

    opened = source.open_options(flags.pipeline_parts())
    if to:
        given = [name for name in _ALL if getattr(how, name) != getattr(CastOptions, name)]
        if given:
            option = f"--{given[0].replace('_', '-')}"
            raise UsageError(f"{option} is for quantizing, and --to {to} dequantizes", hint="drop one of them")
        recoding = Recoding(None, precision(to, "--to"))
    else:
        scales, powers = powers_of_two(how.scale_dtype)
        wanted = scheme(
            how.recipe or "block",
            method=how.quant_method,
            block=sides(how.block, "--block"),
            scale_dtype=scales,
            code=how.code,
            edge=how.edge,
            powers=powers,
        )
        recoding = Recoding(wanted, keep=Keep(how.keep_preset, tuple(how.keep or ()), tuple(how.include or ())))
    run = flags.options()
    selection = Selection(tuple(remove_keys or ()), tuple(keep_keys or ()))
    prepared = prepare(src, opened, recoding, selection, max_shard_size=bytes_of(max_shard_size))
    if flags.dry_run:
        show(report.plan_document(prepared, run, dst), as_json=shown.json, quiet=shown.quiet)
        return
    result = execute(prepared, dst, run, shown.progress(flags), verify=flags.verify)
    show(report.document(result), as_json=shown.json, quiet=shown.quiet)
