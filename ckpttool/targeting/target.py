"""What the output shall be, and what of that its format cannot do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ckpttool.checkpoint import Checkpoint
from ckpttool.dialects import dialect
from ckpttool.dtypes import CASTABLE, parse
from ckpttool.errors import UsageError
from ckpttool.formats.base import Writer
from ckpttool.layout.assemble import EXPERT
from ckpttool.targeting.components import WEIGHTS


@dataclass(frozen=True, slots=True)
class Target:
    """What DST shall be; None is "not said"."""

    format: str = ""
    tp: int | None = None
    pp: int | None = None
    ep: int | None = None
    etp: int | None = None
    pp_layout: tuple[int, ...] = ()
    ranks: tuple[int, ...] | None = None
    """Only these ranks are written."""
    max_shard_size: int | None = None
    dtype: str = ""
    fuse: bool = False
    unfuse: bool = False
    vocab_multiple: int = 1
    sharding: int | None = None
    """Ranks that share the optimizer state of one model-parallel rank."""
    sharding_version: str = ""
    version: str = ""
    """Of the software that shall read the output (--target)."""
    components: tuple[str, ...] = ()
    """Only these; () is all that the format can hold."""
    ema: bool = False
    """The exponential moving average is written as the model."""
    native_names: bool = False
    """Names as the models of ``version`` have them, not those of a Paddle source."""
    aoa: Path | None = None
    """A file of AOA statements that says which tensors are written."""

    def from_flags(self) -> dict[str, int]:
        return {k: v for k in ("tp", "pp", "ep", "etp") if (v := getattr(self, k)) is not None}


def castable(text: str) -> str:
    """The dtype that --dtype says, or "". Raises UsageError for one that takes more than a cast."""
    dtype = parse(text).name if text else ""
    if dtype and dtype not in CASTABLE:
        raise UsageError(
            f"--dtype {text} is not a cast: it needs scales",
            hint="cast to one of " + ", ".join(sorted(d.lower() for d in CASTABLE)),
        )
    return dtype


def check_target(target: Target, writer: Writer, source: Checkpoint) -> None:
    """Flags that mean nothing for this format or model are errors."""
    fmt, capabilities = writer.name, writer.capabilities
    family = source.family
    experts = family.has_experts or any(EXPERT.search(k.name) for k in source.catalog.tensors)
    if target.vocab_multiple > 1 and not (capabilities.sharded and capabilities.pad_vocab):
        raise UsageError(
            f"--vocab-multiple {target.vocab_multiple} pads cut embeddings, and --to {fmt} does not pad",
            hint="omit it, or use --to ranks",
        )
    if target.max_shard_size and not capabilities.shards:
        raise UsageError(
            f"--max-shard-size has no effect with --to {fmt}, which has one file for each rank",
            hint="omit it; more ranks make smaller files",
        )
    for flag in ("fuse", "unfuse"):
        if getattr(target, flag) and flag in capabilities.refused:
            raise UsageError(
                f"--{flag} is not possible with --to {fmt}, whose software reads one form of the model only",
                hint=f"omit it; --to hf or --to ranks can {flag}",
            )
    for name in ("ep", "etp"):
        if (getattr(target, name) or 1) > 1 and family.name != "none" and not experts:
            raise UsageError(
                f"--{name}-out {getattr(target, name)} has no effect: models of family `{family.name}` have no experts"
            )
    for flag, said in (("--sharding-out", target.sharding), ("--sharding-version", target.sharding_version)):
        if said and not capabilities.optimizer_shards:
            raise UsageError(
                f"{flag} {said} has no effect with --to {fmt}, which does not share out optimizer state",
                hint="omit it, or use --to hybrid, zcc or flex",
            )
    if target.native_names and not dialect(writer.dialect).versions:
        raise UsageError(f"--native-names has no effect with --to {fmt}", hint="omit it")
    sharding = target.sharding or source.stored.sharding
    if target.sharding_version and (sharding == 1 or not capabilities.sharding_versions):
        raise UsageError(
            f"--sharding-version {target.sharding_version} has no effect "
            + ("without --sharding-out 2 or more" if capabilities.sharding_versions else f"with --to {fmt}"),
            hint="omit it",
        )
    if target.dtype and capabilities.fp32_masters == "dropped" and sharding > 1:
        raise UsageError(
            f"--dtype {target.dtype} is not possible with sharding {sharding}: model weights are stored as master"
            " weights only, and read back in the model's own dtype",
            hint="write --to unified with --dtype, or --sharding-out 1",
        )
    if target.dtype and target.components and not set(target.components) & set(WEIGHTS):
        raise UsageError(
            f"--dtype {target.dtype} casts model weights, and --only leaves them out",
            hint="the state of an optimizer keeps its precision",
        )
    if target.sharding is not None and target.sharding < 1:
        raise UsageError(f"--sharding-out is {target.sharding}", hint="parallel sizes start at 1")
