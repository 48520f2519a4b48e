"""What the output shall be, and what of that its format cannot do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ckpttool.checkpoint import Checkpoint
from ckpttool.dialects import Dialect, NamingContext, dialect
from ckpttool.dtypes import CASTABLE, parse
from ckpttool.errors import UsageError
from ckpttool.formats.base import Writer
from ckpttool.layout.assemble import EXPERT
from ckpttool.mesh import Mesh

WEIGHTS = ("model", "adapter")
"""Components that --dtype casts; optimizers keep their own precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(frozen=True, slots=True)
class Goal:
    """What the flags, the source and the format decide together."""

    target: Target
    writer: Writer
    mesh: Mesh
    requested: Mesh
    """What the flags ask for; the format may hold another one."""
    dtype: str
    """What --dtype casts to, or ""."""
    dialect: Dialect
    context: NamingContext
    """How the dialect names the model."""


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
    """Raises UsageError for the first flag that means nothing for this format or model."""
    for wrong, what, hint in _refusals(target, writer, source):
        if wrong:
            raise UsageError(what, hint=hint)


def _refusals(target: Target, writer: Writer, source: Checkpoint) -> Iterator[tuple[object, str, str | None]]:
    """(whether it is so, what is wrong, what to do) of every flag whose use depends on format or model."""
    to, can, family = f"--to {writer.name}", writer.capabilities, source.family
    sharding = target.sharding or source.stored.sharding
    yield (
        target.vocab_multiple > 1 and not (can.sharded and can.pad_vocab),
        f"--vocab-multiple {target.vocab_multiple} pads cut embeddings, and {to} does not pad",
        "omit it, or use --to ranks",
    )
    yield (
        target.max_shard_size and not can.shards,
        f"--max-shard-size has no effect with {to}, which has one file for each rank",
        "omit it; more ranks make smaller files",
    )
    for flag in ("fuse", "unfuse"):
        yield (
            getattr(target, flag) and flag in can.refused,
            f"--{flag} is not possible with {to}, whose software reads one form of the model only",
            f"omit it; --to hf or --to ranks can {flag}",
        )
    for size in ("ep", "etp"):
        ways = getattr(target, size) or 1
        yield (
            ways > 1 and family.name != "none" and not _has_experts(source),
            f"--{size}-out {ways} has no effect: models of family `{family.name}` have no experts",
            None,
        )
    for flag, asked in (("--sharding-out", target.sharding), ("--sharding-version", target.sharding_version)):
        yield (
            asked and not can.optimizer_shards,
            f"{flag} {asked} has no effect with {to}, which does not share out optimizer state",
            "omit it, or use --to hybrid, zcc or flex",
        )
    yield (
        target.native_names and not dialect(writer.dialect).versions,
        f"--native-names has no effect with {to}",
        "omit it",
    )
    yield (
        target.sharding_version and (sharding == 1 or not can.sharding_versions),
        f"--sharding-version {target.sharding_version} has no effect "
        + ("without --sharding-out 2 or more" if can.sharding_versions else f"with {to}"),
        "omit it",
    )
    yield (
        target.dtype and can.fp32_masters == "dropped" and sharding > 1,
        (
            f"--dtype {target.dtype} is not possible with sharding {sharding}: model weights are stored as master"
            " weights only, and read back in the model's own dtype"
        ),
        "write --to unified with --dtype, or --sharding-out 1",
    )
    yield (
        target.dtype and target.components and not set(target.components) & set(WEIGHTS),
        f"--dtype {target.dtype} casts model weights, and --only leaves them out",
        "the state of an optimizer keeps its precision",
    )
    yield (
        target.sharding is not None and target.sharding < 1,
        f"--sharding-out is {target.sharding}",
        "parallel sizes start at 1",
    )


def _has_experts(source: Checkpoint) -> bool:
    return source.family.has_experts or any(EXPERT.search(k.name) for k in source.catalog.tensors)
