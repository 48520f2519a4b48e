"""``ckpttool reshard``: every option of what is written."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from ckpttool.cli import choices, options
from ckpttool.cli.options import flag, number, value
from ckpttool.cli.values import place, recoding
from ckpttool.core.words import one_of

if TYPE_CHECKING:
    from ckpttool.targeting.target import Target


@dataclass
class ReshardOptions(options.NewTargetOptions):
    """What DST holds, and how it is written."""

    sharding_out: Annotated[int | None, number("--sharding-out", "Ranks that share the optimizer state of DST.")] = None
    sharding_version: Annotated[
        str, value("--sharding-version", "v1|v2", "How --sharding-out shares; default: v2.", ("v1", "v2"))
    ] = ""
    native_names: Annotated[
        bool, flag("--native-names", "Names as --target's own models have them, not those of SRC.")
    ] = False
    only: options.Only = None
    ema: Annotated[bool, flag("--ema", "Write the exponential moving average as the model.")] = False
    masters: Annotated[bool, flag("--masters", "Write the float32 master weights as the model.")] = False
    aoa: Annotated[str | None, value("--aoa", "FILE", "Names and shapes by Paddle's AOA statements.")] = None
    requant: Annotated[
        str,
        value(
            "--requant",
            "RECIPE[:MxN]",
            "Re-quantize the weights, as fp8-cast does: channel, block:64x128.",
            choices.RECIPES,
        ),
    ] = ""

    def target(self) -> Target:
        """What they say together."""
        from ckpttool.core.catalog import COMPONENTS

        return replace(
            super().target(),
            sharding=self.sharding_out,
            sharding_version=one_of(self.sharding_version, "--sharding-version", "v1", "v2"),
            components=tuple(one_of(c, "--only", *COMPONENTS) for c in self.only or ()),
            ema=self.ema,
            masters=self.masters,
            native_names=self.native_names,
            aoa=place(self.aoa),
        )


@options.grouped
def reshard(
    *,
    src: options.Src,
    dst: options.Dst,
    source: options.SharedSource,
    out: ReshardOptions,
    flags: options.RunFlags,
    shown: options.OutputFlags,
    verbose: options.Verbose = False,
) -> None:
    """Write SRC for another number of ranks, in another format or under other names."""
    from ckpttool.ops.reshard import execute, prepare
    from ckpttool.report import reshard as report
    from ckpttool.report.render import show

    opened, target, run = source.open_options(flags.pipeline_parts()), out.target(), flags.options()
    prepared = prepare(src, opened, target, out.selection(out.remove_keys), recoding(out.dequant, out.requant))
    if flags.dry_run:
        show(report.plan_document(prepared, run, dst), as_json=shown.json, quiet=shown.quiet)
        return
    result = execute(prepared, dst, run, shown.progress(flags), verify=flags.verify)
    show(report.document(result, verbose=verbose), as_json=shown.json, quiet=shown.quiet)
