"""A question about a model's size with all its options -> one report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import product
from typing import Any, NamedTuple

from ckpttool.answers.index_checks import explain_total
from ckpttool.checkpoint import OpenOptions
from ckpttool.core.files import AnyPlace
from ckpttool.core.mesh import Mesh, default_etp
from ckpttool.errors import CkptError, UsageError
from ckpttool.formats.hf import indexes_of
from ckpttool.layout.shapes import check_sizes
from ckpttool.ops.size.cache import KvCache, cache_of
from ckpttool.ops.size.devices import COMMON, Device
from ckpttool.ops.size.model import SizedModel, load
from ckpttool.ops.size.resident import RankLoads, partition, tensor_parallel_loads
from ckpttool.ops.size.stored import Applied, Disk, WantedRecipe, apply, on_disk
from ckpttool.ops.size.training import TrainingSetup, training_of
from ckpttool.storage.listing import list_source
from ckpttool.storage.place import parse_place

BY = ("class", "dtype", "module", "tensor")
"""Values of --by."""
NOT_MODELLED = ("activations", "CUDA graphs", "allocator fragmentation", "NCCL buffers")
"""Uses of a device's memory that no number here contains; what --utilization leaves is for them."""
_PASSED = {"--kv": "--kv bf16 or --kv fp8", "--gpu": "--gpu h100, or its memory: --gpu 80GB"}
"""Options that another needs, with values to choose from."""
UTILIZATION = 0.9
"""The default share of a device's memory for what is counted."""


@dataclass(frozen=True, slots=True)
class Question:
    """The options; None and "" are "not said"."""

    wanted: WantedRecipe = field(default_factory=WantedRecipe)
    config: AnyPlace | None = None
    mtp: bool = True
    max_shard_size: int | None = None
    tp: int | None = None
    pp: int | None = None
    ep: int | None = None
    etp: int | None = None
    pp_layout: tuple[int, ...] = ()
    vocab_pad: int | None = None
    kv: str = ""
    tokens: int | None = None
    batch: int | None = None
    max_model_len: int | None = None
    train: bool = False
    zero: int | None = None
    dp: int | None = None
    grad: str = ""
    master: str = ""
    moment: str = ""
    fp8_transposed: bool = False
    device: Device | None = None
    """The device whose memory must suffice; without a label where only its size is given."""
    utilization: float | None = None
    """Share of the device's memory for weights, cache and training states; the rest is for ``NOT_MODELLED``."""
    check_total_size: bool = False

    @property
    def per_rank(self) -> bool:
        """Whether anything asks for what a rank holds."""
        meshed = (self.tp, self.pp, self.ep, self.etp, self.pp_layout or None)
        return any(n is not None for n in meshed) or bool(self.kv or self.train or self.device)


@dataclass(frozen=True, slots=True)
class DeviceFit:
    """The most loaded rank against its share of the memory of a device."""

    rank: int
    needed: int
    memory: int
    """Bytes of the whole device."""
    utilization: float
    gpus: int
    """Devices of the deployment, or of one training run."""
    even: bool
    """Every rank needs as much."""
    tokens: int | None = None
    """Tokens whose keys and values fit into the memory left on that rank, in layers that keep all; None without --kv,
    and where no layer keeps any."""
    device: str = ""
    """Its label; "" where only its memory is given."""

    @property
    def budget(self) -> int:
        """Bytes of the device that the rank may use."""
        return budget(self.memory, self.utilization)

    @property
    def ok(self) -> bool:
        return self.needed <= self.budget


def budget(memory: int, utilization: float = UTILIZATION) -> int:
    """``utilization`` of ``memory`` in whole bytes: 0.9 is nine tenths, and not the nearest binary number."""
    return int(Fraction(str(utilization)) * memory)


class GpuChoice(NamedTuple):
    """A common GPU that has room, where no device was given."""

    device: Device
    gpus: int
    needed: int
    """Bytes on the most loaded of them."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """Options that make it fit, each of them added to those that were given or in place of them."""

    options: str
    needed: int
    """Bytes on the most loaded rank."""
    gpus: int
    """Devices of the deployment, or of one training run."""


@dataclass(frozen=True, slots=True)
class TotalSize:
    """The total of SRC's index, and the sum of its headers."""

    index: str
    said: int | float
    real: int
    why: str
    """A known mistake that gives what is said; ""."""

    @property
    def ok(self) -> bool:
        return self.said == self.real


@dataclass(slots=True)
class SizeReport:
    """The answer."""

    model: SizedModel
    applied: Applied
    disk: Disk
    ranks: RankLoads | None = None
    """None when no rank was asked for."""
    cache: KvCache | None = None
    training: TrainingSetup | None = None
    fit: DeviceFit | None = None
    remedies: list[Remedy] = field(default_factory=list)
    """Changes that would make it fit, where it does not."""
    choices: list[GpuChoice] = field(default_factory=list)
    """Where no device was given: common GPUs with room for the ranks, or, with no ranks either, for the weights."""
    needed: list[int] = field(default_factory=list)
    """Bytes that each rank needs: weights and cache, or the states of training; empty when no rank was asked for."""
    total_size: TotalSize | None = None
    not_modelled: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)

    @property
    def fits(self) -> bool | None:
        """Whether the device has room; None when none was given, or when nothing can be said about its memory."""
        return None if self.fit is None else self.fit.ok and not (self.ranks and self.ranks.misfits)

    @property
    def ok(self) -> bool:
        """It fits, it can be cut, and the index is right, as far as these were asked."""
        return not (
            (self.fit and not self.fit.ok)
            or (self.ranks and self.ranks.misfits)
            or (self.total_size and not self.total_size.ok)
        )


def answer(src: AnyPlace, options: OpenOptions, question: Question) -> SizeReport:
    """Work out the size of a model. Reads headers and config.json; raises a CkptError subclass."""
    _sensible(question)
    config = None if question.config is None else parse_place(question.config)
    model = load(parse_place(src), options, config, mtp=question.mtp)
    out = _sizes(model, question)
    if out.fit and not out.fit.ok:
        out.remedies = list(_remedies(out, question))
    return out


def _sizes(model: SizedModel, question: Question) -> SizeReport:
    applied = apply(model, question.wanted)
    if question.fp8_transposed and not applied.quantized:
        raise UsageError(f"--fp8-transposed has no effect with recipe {applied.recipe}", hint="--recipe block")
    out = SizeReport(model, applied, on_disk(model, applied, question.max_shard_size), notes=list(model.notes))
    more = out.disk.payload - applied.total.nbytes
    if more:
        out.notes.append(f"the files hold {more:,} bytes more than the tensors have: copies and padding of ranks")
    if question.check_total_size:
        out.total_size = _total_size(model)
    if question.per_rank:
        _ranks(out, question)
    elif not question.check_total_size:
        with suppress(CkptError):  # a config without the sizes that ranks need is sized as a whole
            out.choices = list(_gpus_for_weights(out))
    return out


def _sensible(question: Question) -> None:
    """Options that would do nothing are errors."""
    q = question
    words = {"--grad": q.grad, "--master": q.master, "--moment": q.moment, "--fp8-transposed": q.fp8_transposed}
    training = {"--zero": q.zero, "--dp": q.dp, **{option: value or None for option, value in words.items()}}
    needs: tuple[tuple[str, object, Mapping[str, object]], ...] = (
        ("--kv", q.kv, {"--tokens": q.tokens, "--batch": q.batch, "--max-model-len": q.max_model_len}),
        ("--train", q.train, training),
        ("--tp-out, --kv, --train, --gpu", q.per_rank, {"--vocab-pad": q.vocab_pad}),
        ("--gpu", q.device, {"--utilization": q.utilization}),
    )
    for needed, there, options in needs:
        for option, value in options.items():
            if value is not None and not there:
                hint = f"also pass {_PASSED.get(needed, needed)}"
                raise UsageError(f"{option} has no effect without {needed}", hint=hint)
    if q.utilization is not None and not 0 < q.utilization <= 1:
        raise UsageError(f"--utilization {q.utilization:g} is not a share", hint="more than 0, at most 1; default: 0.9")
    if q.kv and q.train:
        raise UsageError("--kv is for serving and --train for training", hint="run the command once for each")
    if q.tokens is None and (q.batch is not None or q.max_model_len is not None):
        option = "--batch" if q.batch is not None else "--max-model-len"
        raise UsageError(f"{option} has no effect without --tokens", hint="--tokens N: how many a sequence has")


def _mesh(out: SizeReport, q: Question) -> tuple[Mesh, bool]:
    """The mesh that is asked for (what is not said is as in SRC), and whether its etp is its tp."""
    source = out.model.checkpoint.mesh if out.model.checkpoint else Mesh()
    tp = q.tp or source.tp
    pp = q.pp or (len(q.pp_layout) if q.pp_layout else source.pp)
    layout = q.pp_layout or (source.layout if pp == source.pp else ())
    ep = q.ep or source.ep
    etp = q.etp or default_etp(source, tp, ep, ep_asked=q.ep is not None)
    if (q.ep or q.etp) and not out.model.family.has_experts:
        option = f"--ep-out {q.ep}" if q.ep else f"--etp-out {q.etp}"
        raise UsageError(f"{option} has no effect: the model has no experts", where=str(out.model.path))
    if q.ep and q.ep > 1 and not q.etp:
        out.notes.append(f"etp {etp}: with --ep-out experts are whole on their ranks; change it with --etp-out")
    return Mesh(tp, pp, ep, etp, layout), q.etp is None and ep == 1


def _ranks(out: SizeReport, q: Question) -> None:
    """Bytes, cache and fit of each rank."""
    model, applied = out.model, out.applied
    check_sizes(model.family, model.config)
    mesh, follows = _mesh(out, q)
    # Engines that serve want whole blocks on every rank; what trains quantizes its own share.
    ranks = partition(model, applied, mesh, q.vocab_pad or 64, blocks=not q.train, follows=follows)
    out.ranks = ranks
    if q.kv:
        out.cache = cache_of(model, q.kv, mesh, tokens=q.tokens or 0, batch=q.batch or 1, length=q.max_model_len or 0)
    if q.train and ranks.held:
        out.training = training_of(
            ranks.held,
            mesh,
            zero=1 if q.zero is None else q.zero,
            dp=q.dp or 1,
            gradient=q.grad or "fp32",
            master=q.master or "fp32",
            moment=q.moment or "fp32",
            transposed=q.fp8_transposed,
        )
    out.not_modelled = NOT_MODELLED
    if not ranks.held:
        return
    needed = out.needed = _needed(out)
    if q.device:
        share = UTILIZATION if q.utilization is None else q.utilization
        out.fit = _fit(out, q.device, share, mesh.world if not q.train else mesh.tp * mesh.pp * (q.dp or 1))
    elif not ranks.misfits:
        out.choices = [GpuChoice(d, len(needed), max(needed)) for d in COMMON if max(needed) <= budget(d.memory)]


def _gpus_for_weights(out: SizeReport) -> Iterator[GpuChoice]:
    """For each common GPU the fewest of 1, 2, 4, 8 or 16 that have room for the weights, cut by tensor parallelism."""
    check_sizes(out.model.family, out.model.config)
    loads = tensor_parallel_loads(out.model, out.applied, (1, 2, 4, 8, 16), 64)
    for device in COMMON:
        room = budget(device.memory)
        if found := next(((n, size) for n, size in loads.items() if size <= room), None):
            yield GpuChoice(device, *found)


def _remedies(out: SizeReport, question: Question) -> Iterator[Remedy]:
    """For each option that is enough by itself the mildest value that is; else the mildest that are enough together."""
    found = False
    ways = [tries for tries in _ways(out, question) if tries]
    for tries in ways:
        for changes in tries:
            if remedy := _remedy(out.model, question, changes):
                yield remedy
                found = found or "--tokens" not in changes
                break
    if found or not ways:
        return
    # Fewer tokens are the last resort: they are what is asked for.
    for others in product(*(tries for tries in ways[1:] if "--tokens" not in tries[0])):
        for more in ways[0]:
            changes = {**more, **{o: v for change in others for o, v in change.items()}}
            if remedy := _remedy(out.model, question, changes):
                yield remedy
                return


def _ways(out: SizeReport, q: Question) -> Iterator[list[dict[str, str | int]]]:
    """Changes of one option, mildest first; more ranks come first of all."""
    mesh = out.ranks.mesh if out.ranks else Mesh()
    yield [{"--tp-out": n} for n in (2, 4, 8, 16, 32, 64) if n > mesh.tp]
    if q.train:
        if (q.dp or 1) > 1:
            yield [{"--zero": n} for n in (2, 3) if n > (1 if q.zero is None else q.zero)]
        elif q.zero != 0:
            zero: dict[str, str | int] = {"--zero": 3} if q.zero is None else {}
            yield [{"--dp": n, **zero} for n in (2, 4, 8, 16, 32, 64, 128, 256, 512)]
        return
    if not q.wanted.options():
        bits = 16 if not out.applied.quantized else 8 if out.applied.recipe in ("tensor", "channel", "block") else 4
        yield [{"--recipe": r} for r, b in (("block", 8), ("nvfp4", 4.5), ("mxfp4", 4.25)) if b < bits]
    if q.kv == "bf16":
        yield [{"--kv": "fp8"}]
    room = (out.fit.tokens or 0) if out.fit else 0
    if q.tokens and not q.max_model_len and (n := room // (q.batch or 1)):
        yield [{"--tokens": n}]


_FIELDS = {"--tp-out": "tp", "--kv": "kv", "--tokens": "tokens", "--zero": "zero", "--dp": "dp"}


def _remedy(model: SizedModel, question: Question, changes: Mapping[str, str | int]) -> Remedy | None:
    """These changes, where they are possible and enough."""
    fields: dict[str, Any] = {_FIELDS[o]: v for o, v in changes.items() if o != "--recipe"}
    wanted = replace(question.wanted, recipe=str(changes.get("--recipe", question.wanted.recipe)))
    try:
        tried = _sizes(model, replace(question, wanted=wanted, check_total_size=False, **fields))
    except CkptError:
        return None
    if not tried.ok or tried.fit is None:
        return None
    return Remedy(" ".join(f"{o} {v}" for o, v in changes.items()), tried.fit.needed, tried.fit.gpus)


def _needed(out: SizeReport) -> list[int]:
    """Bytes by rank: weights and cache, or the states of training."""
    if out.training is not None:
        return [state.nbytes for state in out.training.held]
    assert out.ranks is not None  # noqa: S101 - the caller made them
    cache = out.cache
    stages = [at.pp for at in out.ranks.mesh.all_coords()]
    return [w.nbytes + (cache.needed(s) if cache else 0) for w, s in zip(out.ranks.held, stages, strict=True)]


def _fit(out: SizeReport, device: Device, utilization: float, gpus: int) -> DeviceFit:
    rooms = []
    if out.cache is not None and out.ranks is not None:
        memory, cache = budget(device.memory, utilization), out.cache
        for w, at in zip(out.ranks.held, out.ranks.mesh.all_coords(), strict=True):
            if token := sum(layer.token for layer in cache.kept[at.pp]):
                rooms.append(max(0, memory - w.nbytes - cache.states(at.pp)) // token)
    most = max(out.needed)
    return DeviceFit(
        out.needed.index(most),
        most,
        device.memory,
        utilization,
        gpus,
        even=min(out.needed) == most,
        tokens=min(rooms, default=None),
        device=device.label,
    )


def _total_size(model: SizedModel) -> TotalSize:
    """Compare the index with the headers. Raises UsageError when there is no index or no total in it."""
    source = model.checkpoint
    if source is None:
        raise UsageError("--check-total-size: SRC is a config, without files", where=str(model.path))
    listing = list_source(model.path)
    name = next(iter(indexes_of(listing)), "")
    if not name:
        raise UsageError("--check-total-size: SRC has no index", where=str(model.path))
    meta = listing.json(name).get("metadata")
    said = meta.get("total_size") if isinstance(meta, dict) else None
    if isinstance(said, bool) or not isinstance(said, int | float):
        raise UsageError("--check-total-size: the index says no total_size", where=str(listing.path(name)))
    real = sum(t.nbytes for t in source.tensors)
    why = explain_total(said, source.tensors, sum(f.size for f in source.files))
    return TotalSize(name, said, real, why)
