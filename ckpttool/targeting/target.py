"""What the output shall be, and what of that its format cannot do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ckpttool.checkpoint import Checkpoint
from ckpttool.core.dtypes import CASTABLE, find
from ckpttool.core.files import Place
from ckpttool.core.mesh import Mesh
from ckpttool.dialects import Dialect, NamingContext, dialect
from ckpttool.errors import UsageError
from ckpttool.formats.base import Capabilities, VersionedShards, Writer
from ckpttool.layout.assemble import EXPERT

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
    vocab_multiple: int | None = None
    sharding: int | None = None
    """Ranks that share the optimizer state of one model-parallel rank."""
    sharding_version: str = ""
    version: str = ""
    """Version of the software that will read the output (--target)."""
    components: tuple[str, ...] = ()
    """Only these; () is all that the format can hold."""
    ema: bool = False
    """The exponential moving average is written as the model."""
    masters: bool = False
    """The master weights are written as the model."""
    native_names: bool = False
    """Names as the models of ``version`` have them, not those of a Paddle source."""
    aoa: Place | None = None
    """A file of AOA statements that says which tensors are written."""
    betas: tuple[float, float] | None = None
    """Adam's betas, where SRC does not record them."""

    def from_flags(self) -> dict[str, int]:
        return {k: v for k in ("tp", "pp", "ep", "etp") if (v := getattr(self, k)) is not None}

    def resumes(self, capabilities: Capabilities) -> bool:
        """Whether the output must hold the optimizer, if there is one: a run continues from it."""
        wanted = self.components or capabilities.components
        return "optimizer" in {*wanted} & {*capabilities.components}


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
    """The dtype that --dtype names, or "". Raises UsageError for an unknown one, and for one that needs scales."""
    found = find(text)
    if text and (found is None or found.name not in CASTABLE):
        raise UsageError(
            f"--dtype {text} is not a cast: it needs scales" if found else f"--dtype: unknown dtype `{text}`",
            hint="cast to one of " + ", ".join(sorted(d.lower() for d in CASTABLE)),
        )
    return found.name if found else ""


def check_target(target: Target, writer: Writer, source: Checkpoint) -> None:
    """Raises UsageError for the first flag that means nothing for this format or model."""
    for what, hint in _refusals(target, writer, source):
        raise UsageError(what, hint=hint)


def _refusals(target: Target, writer: Writer, source: Checkpoint) -> Iterator[tuple[str, str | None]]:
    """(what is wrong, what to do) of every flag that format or model have no use for."""
    to, can, family = f"--to {writer.name}", writer.capabilities, source.family
    sharding = target.sharding or source.stored.sharding
    if (n := target.vocab_multiple or 1) > 1 and not (can.sharded and can.pad_vocab):
        yield f"--vocab-multiple {n} pads cut embeddings, and {to} does not pad", "omit it, or use --to ranks"
    if target.max_shard_size and not can.shards:
        what = f"--max-shard-size has no effect with {to}, which has one file for each rank"
        yield what, "omit it; more ranks make smaller files"
    for flag in can.refused:
        if getattr(target, flag):
            what = f"--{flag} is not possible with {to}, whose software reads one form of the model only"
            yield what, f"omit it; --to hf or --to ranks can {flag}"
    for flag in ("ep", "etp"):
        if (n := getattr(target, flag) or 1) > 1 and family.name != "none" and not _has_experts(source):
            yield f"--{flag}-out {n} has no effect: models of family `{family.name}` have no experts", None
    if target.sharding and not can.optimizer_shards:
        what = f"--sharding-out {target.sharding} has no effect with {to}, which does not share out optimizer state"
        yield what, "omit it, or use --to hybrid, zcc or flex"
    if target.betas is not None and "optimizer" not in can.components:
        yield f"--betas has no effect with {to}, which holds no optimizer", "omit it"
    if target.native_names and not dialect(writer.dialect).versions:
        yield f"--native-names has no effect with {to}", "omit it"
    if target.sharding_version and (sharding == 1 or not isinstance(writer, VersionedShards)):
        why = "without --sharding-out 2 or more" if isinstance(writer, VersionedShards) else f"with {to}"
        asked = f"--sharding-out {sharding}:{target.sharding_version}"
        yield f"{asked}: {target.sharding_version} has no effect {why}", "omit it"
    shared = can.optimizer_shards and sharding > 1
    if (
        _changes_dtypes(source, target.dtype)
        and can.fp32_masters == "dropped"
        and shared
        and not _masters_itself(source)
    ):
        what = f"--dtype {target.dtype} is not possible with sharding {sharding}: model weights are stored as master"
        what += " weights only, and read back in the model's own dtype"
        yield what, "write --to unified with --dtype, or --sharding-out 1"
    if target.dtype and target.components and not set(target.components) & set(WEIGHTS):
        what = f"--dtype {target.dtype} casts model weights, and --only leaves them out"
        yield what, "the state of an optimizer keeps its precision"
    if target.sharding is not None and target.sharding < 1:
        yield f"--sharding-out is {target.sharding}", "parallel sizes start at 1"


def _changes_dtypes(source: Checkpoint, dtype: str) -> bool:
    """Whether --dtype casts any weight of the source."""
    dtypes = {t.dtype for k, t in source.catalog.tensors.items() if k.component in WEIGHTS and t.dtype in CASTABLE}
    return bool(dtype) and dtypes != {castable(dtype)}


def _masters_itself(source: Checkpoint) -> bool:
    """Whether the model is float32 and what its optimizer works on: masters are made of it where it is cast."""
    dtypes = {t.dtype for k, t in source.catalog.tensors.items() if k.component == "model"}
    return dtypes == {"F32"} and "optimizer" in source.components and "master_weights" not in source.components


def _has_experts(source: Checkpoint) -> bool:
    return source.family.has_experts or any(EXPERT.search(k.name) for k in source.catalog.tensors)
