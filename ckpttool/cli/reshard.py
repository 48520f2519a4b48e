"""``ckpttool reshard``: every option of what is written."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from ckpttool.cli import choices, options
from ckpttool.cli.options import flag, value
from ckpttool.cli.values import numbers, place, recoding
from ckpttool.core.words import one_of, parse_betas
from ckpttool.errors import UsageError

if TYPE_CHECKING:
    from ckpttool.targeting.target import Target


@dataclass
class ReshardOptions(options.TargetOptions):
    """What DST holds, and how it is written."""

    sharding_out: Annotated[
        str, value("--sharding-out", "N[:v1|v2]", "Shards of DST's optimizer state; Paddle: v1 or v2.")
    ] = ""
    ranks_out: Annotated[str, value("--ranks-out", "0-3,7", "Write only these ranks of DST.")] = ""
    native_names: Annotated[bool, flag("--native-names", "Names as the models of --target have them.")] = False
    fuse: Annotated[bool | None, flag("--fuse/--unfuse", "Fuse qkv and gate_up, or take them apart.")] = None
    betas: Annotated[str, value("--betas", "B1,B2", "Adam's betas, if SRC lacks them: 0.9,0.999.")] = ""
    only: options.Only = None
    ema: Annotated[bool, flag("--ema", "Write the moving average as the model.")] = False
    masters: Annotated[bool, flag("--masters", "Write the float32 master weights as the model.")] = False
    aoa: Annotated[str | None, value("--aoa", "FILE", "Names and shapes by Paddle's AOA statements.")] = None
    requant: Annotated[
        str,
        value(
            "--requant",
            "RECIPE[:MxN]",
            "Re-quantize: channel, block:64x128, ...",
            choices.RECIPES,
        ),
    ] = ""

    def target(self) -> Target:
        """What they say together."""
        from ckpttool.core.catalog import COMPONENTS

        count, colon, version = self.sharding_out.partition(":")
        if self.sharding_out and (not count.isdigit() or int(count) < 1 or (colon and not version)):
            raise UsageError(f"--sharding-out is `{self.sharding_out}`", hint="--sharding-out 4, or 4:v1")
        return replace(
            super().target(),
            ranks=numbers(self.ranks_out, "--ranks-out", runs=True) if self.ranks_out else None,
            fuse=self.fuse is True,
            unfuse=self.fuse is False,
            betas=parse_betas(self.betas, "--betas") if self.betas else None,
            sharding=int(count) if count else None,
            sharding_version=one_of(version, "--sharding-out N", "v1", "v2"),
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
    """Change a checkpoint's parallelism, format, names or dtypes."""
    from ckpttool.ops.reshard import execute, prepare
    from ckpttool.report import reshard as report
    from ckpttool.report.render import show

    opened, target, run = source.open_options(flags.pipeline_parts()), out.target(), flags.options()
    prepared = prepare(src, opened, target, out.selection(), recoding(out.dequant, out.requant))
    if flags.dry_run:
        show(report.plan_document(prepared, run, dst), as_json=shown.json, quiet=shown.quiet)
        return
    result = execute(prepared, dst, run, shown.progress(flags), verify=flags.verify)
    show(report.document(result, verbose=verbose), as_json=shown.json, quiet=shown.quiet)
