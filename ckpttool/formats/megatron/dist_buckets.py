"""The optimizer's state as flat buffers: ``dp_reshardable``, once called ``fully_sharded_bucket_space``.

    optimizer.distributed.dp_group_idx_G.gbuf_idx_B.dtype_(torch.bfloat16, torch.float32).bucket_idx_K.exp_avg

G counts the model-parallel ranks, tensor-parallel ones first, then (for experts) expert-parallel ones, then stages.
Experts have an optimizer and buffers of their own with expert parallelism; without, they lie among the others. A buffer
holds the parameters of one rank, one dtype and one interleaved stage in the reverse of the model's order, and is cut
into buckets. No file says which parameter lies where. What a rank has of a parameter is what the chunks of the model
show; how many layers a stage has, what its buffers can hold. Then every parameter must begin and end where a chunk
does, for each rank wrote its part of each parameter as a chunk of its own.
Source: megatron/core/optimizer/distrib_optimizer.py, distributed/param_and_grad_buffer.py and parallel_state.py.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise, product
from math import gcd
from operator import itemgetter
from typing import Any, NamedTuple

from ckpttool.containers.pickle import Global, printable
from ckpttool.containers.torch_pickle import TorchTensor
from ckpttool.core.catalog import StoredTensor
from ckpttool.core.dtypes import itemsize
from ckpttool.core.geometry import Box, from_flat
from ckpttool.errors import CorruptError, UnsupportedError
from ckpttool.formats.megatron.buffers import ALIGNMENT
from ckpttool.formats.megatron.dist_names import DistTensor
from ckpttool.formats.megatron.groups import is_expert
from ckpttool.formats.megatron.names import LOCAL, TARGETS, spelled, traits
from ckpttool.formats.megatron.order import in_model_order, is_parameter

_BUCKET = re.compile(
    r"(?:chained_(?P<chain>\d{1,3})\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d{1,7})\.gbuf_idx_(?P<buffer>\d{1,5})"
    r"\.dtype_\(torch\.(?P<dtype>\w+), [^)]*\)\.bucket_idx_(?P<bucket>\d{1,5})\.(?P<state>\w+)"
)
_OWNER = re.compile(r"(?:chained_(?P<chain>\d{1,3})\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d{1,7})\.")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")
_HEAD, _EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"
_HINT = "save it once more with --dist-ckpt-optim-fully-reshardable, or omit the optimizer with --only model"

BucketSlice = tuple[str, str, Box, StoredTensor]
"""(state, parameter, box of the whole parameter, what holds it)."""


class SavedBucket(NamedTuple):
    """A run of parameters of one rank."""

    elements: int
    states: dict[str, list[tuple[int, StoredTensor]]]
    """State -> (first element, a part) of each chunk."""
    joined: bool = False
    """All ranks' parts were put together before they were saved, so that chunks say nothing."""

    @property
    def bounds(self) -> frozenset[int]:
        """Starts of the chunks, and the end."""
        chunks = next(iter(self.states.values()), [])
        return frozenset([at for at, _ in chunks] + [self.elements])


class Sizes(NamedTuple):
    """Parallel sizes of the mesh that trained."""

    tp: int
    pp: int
    ep: int
    etp: int


class ModelParameters(NamedTuple):
    """The parameters of the model, and how the save cuts them."""

    shapes: Mapping[str, tuple[int, ...]]
    """Shapes by canonical name."""
    dtypes: Mapping[str, str]
    """torch's names."""
    boxes: Mapping[str, Sequence[Box]]
    """The boxes of each parameter's chunks, in order."""
    layers: int


def sizes_of(args: Mapping[str, Any]) -> Sizes:
    """Raises UnsupportedError where the arguments do not say them."""
    tp, pp, ep, etp = (
        args.get(f"{kind}_parallel_size", 0)
        for kind in ("tensor_model", "pipeline_model", "expert_model", "expert_tensor")
    )
    ep, etp = ep or 1, etp or tp
    if any(type(n) is not int or n < 1 for n in (tp, pp, ep, etp)):
        raise UnsupportedError(
            "the optimizer's state lies in flat buffers of ranks, and no `args` say how many ranks there were",
            hint=_HINT,
        )
    return Sizes(tp, pp, ep, etp)


def is_grouped(args: Mapping[str, Any]) -> bool:
    """Whether the experts are those of TEGroupedMLP. Raises UnsupportedError for those of the old GroupedMLP, whose
    weights lie transposed."""
    if not args.get("moe_grouped_gemm"):
        return False
    if args.get("moe_use_legacy_grouped_gemm") or args.get("transformer_impl") == LOCAL:
        raise UnsupportedError("the optimizer's state has the experts of GroupedMLP, which lie transposed", hint=_HINT)
    return True


Buffers = dict[tuple[int, int], dict[int, tuple[str, dict[int, SavedBucket]]]]
"""(number of the optimizer, group) -> number of the buffer -> (dtype, its buckets by number)."""


def buffers_of(flat: Mapping[str, DistTensor]) -> Buffers:
    """The buckets of all ranks. Raises UnsupportedError for a key of another kind, CorruptError for chunks that leave
    elements out."""
    out: Buffers = {}
    for fqn, held in flat.items():
        m = _BUCKET.fullmatch(fqn)
        if m is None or len(held.shape) != 1:
            raise UnsupportedError(f"the optimizer has state of an unknown kind: `{printable(fqn)}`", hint=_HINT)
        owner = int(m["chain"] or 0), int(m["group"])
        dtype, buckets = out.setdefault(owner, {}).setdefault(int(m["buffer"]), (m["dtype"], {}))
        bucket = buckets.setdefault(int(m["bucket"]), SavedBucket(held.shape[0], {}))
        chunks = sorted((box.start[0], stored) for box, stored in held.chunks)
        ends = [0, *(at + stored.shape[0] for at, stored in chunks)]
        if (
            bucket.elements != held.shape[0]
            or ends != [*(at for at, _ in chunks), held.shape[0]]
            or dtype != m["dtype"]
        ):
            raise CorruptError(f"the chunks of `{printable(fqn)}` are not one run of {held.shape[0]:,} elements")
        bucket.states[m["state"]] = chunks
    return out


def put_joined(buffers: Buffers, fqn: str, value: Any, place: Callable[[TorchTensor], StoredTensor]) -> None:
    """Add what ``dp_zero_gather_scatter`` saves of a group: {buffer: {dtypes: {state: the whole buffer}}}.

    Raises CorruptError for another value.
    """
    m = _OWNER.match(fqn)
    if m is None or not isinstance(value, dict):
        raise CorruptError(f"`{printable(fqn)}` does not hold the buffers of an optimizer")
    own = buffers.setdefault((int(m["chain"] or 0), int(m["group"])), {})
    for number, of in value.items():
        if type(number) is not int or not isinstance(of, dict):
            continue
        for dtypes, states in of.items():
            tensors = (
                {k: v for k, v in states.items() if isinstance(v, TorchTensor)} if isinstance(states, dict) else {}
            )
            lengths = {t.shape for t in tensors.values()}
            first = dtypes[0] if isinstance(dtypes, tuple) and dtypes else None
            if len(lengths) != 1 or len(next(iter(lengths))) != 1 or not isinstance(first, Global):
                raise CorruptError(f"`{printable(fqn)}` does not hold flat states of one length")
            held = {k: [(0, place(t))] for k, t in tensors.items()}
            own[number] = first.name, {0: SavedBucket(lengths.pop()[0], held, joined=True)}


class _BucketParameter(NamedTuple):
    name: str
    boxes: tuple[Box, ...]
    """The boxes that the rank has, one behind the other; () for a copy of what another stage has."""
    elements: int


_Stage = list[dict[str, list[SavedBucket]]]
"""The buffers of a rank by dtype, of each interleaved stage."""
_Placed = list[tuple[_BucketParameter, SavedBucket, int]]
"""(parameter, its bucket, its first element there)."""


class _NoFitError(Exception):
    """The parameters do not lie in the buffers in this order."""


class Placer:
    """Finds the parameters in the buffers of all ranks."""

    def __init__(self, buffers: Buffers, model: ModelParameters, sizes: Sizes, target: str, *, grouped: bool) -> None:
        self.buffers, self.model, self.sizes = buffers, model, sizes
        self.targets = (target,) if target in TARGETS else TARGETS
        self.grouped = grouped
        self.sparse, self.latent = traits(model.shapes)
        self.layers: list[list[str]] = [[] for _ in range(model.layers)]
        self.before: list[str] = []
        self.behind: list[str] = []
        """Parameters of each layer, before the layers and behind them."""
        for n in filter(is_parameter, model.shapes):
            m = _LAYER.match(n)
            if m and int(m[1]) < model.layers:
                self.layers[int(m[1])].append(n)
            else:
                (self.before if n.startswith("embedding.") else self.behind).append(n)
        self.experts = 1 + max((int(m[1]) for n in model.shapes if (m := _EXPERT.search(n))), default=-1)
        self.apart = any(optimizer for optimizer, _ in buffers)
        """Whether experts have an optimizer and buffers of their own: not where no rank has others than the rest."""

    def run(self) -> list[BucketSlice]:
        """All state. Raises UnsupportedError where no order fits, or several do."""
        tp, pp, ep, etp = self.sizes
        want = {(0, g) for g in range(tp * pp)} | {(1, g) for g in range(pp * ep * etp) if self.experts}
        ragged = self.experts % ep != 0
        if not {(0, g) for g in range(tp * pp)} <= self.buffers.keys() <= want or ragged:
            raise _refusal("its groups of ranks are not those of the mesh in `args`")
        found: list[list[BucketSlice]] = []
        why = ""
        for target in self.targets:
            try:
                found.append(list(self._placed(target)))
            except _NoFitError as e:
                why = str(e)
        if not found:
            raise _refusal(why)
        if any(f != found[0] for f in found):
            raise _refusal("the order of Transformer Engine's modules fits, and so does that of the local spec")
        return found[0]

    def _placed(self, target: str) -> Iterator[BucketSlice]:
        tp, pp, ep, etp = self.sizes
        dense = {g: _stages(self.buffers[0, g]) for g in range(tp * pp)}
        turns = len(dense[0])
        if any(len(s) != turns for s in dense.values()):
            raise _NoFitError("ranks have different numbers of buffers")
        at = 0
        experts: list[list[list[str]]] = [[] for _ in range(pp)]
        for turn, stage in product(range(turns), range(pp)):
            last = (turn, stage) == (turns - 1, pp - 1)
            names, at = self._layers_of(target, dense[stage * tp][turn], at, last=last)
            for rank in range(tp):
                for placed in self._fitted(target, names, dense[stage * tp + rank][turn], rank):
                    yield from _found(placed)
            routed = [n for layer in names.layers for n in layer if is_expert(n)]
            if routed and self.apart:
                experts[stage].append(routed)
        for stage, e, x in product(range(pp), range(ep), range(etp)):
            held = _stages(self.buffers.get((1, (stage * ep + e) * etp + x), {}))
            if len(held) != len(experts[stage]):
                raise _NoFitError(f"stage {stage} has {len(held)} buffers of experts, not {len(experts[stage])}")
            share = self.experts // ep
            for routed, buffers in zip(experts[stage], held, strict=True):
                own = [n for n in routed if (m := _EXPERT.search(n)) and int(m[1]) // share == e]
                for placed in self._fitted(target, _BucketOrder((), [own], ()), buffers, x, experts=True):
                    yield from _found(placed)

    def _layers_of(
        self, target: str, buffers: dict[str, list[SavedBucket]], at: int, *, last: bool
    ) -> tuple[_BucketOrder, int]:
        """The parameters in the buffers of a stage whose first layer is ``at``, and the layer after them."""
        before = self.before if at == 0 else []
        room = sum(b.elements for of in buffers.values() for b in of)
        for stop in [len(self.layers)] if last else range(at, len(self.layers) + 1):
            names = _BucketOrder(before, self.layers[at:stop], [])
            if not last and self._elements(names) > room:
                break
            for copies in self._copies(at) if last else [()]:
                names = _BucketOrder(before, self.layers[at:stop], [*self.behind] if last else [], copies)
                with suppress(_NoFitError):
                    list(self._fitted(target, names, buffers, 0))
                    return names, stop
        raise _NoFitError(f"no number of layers from layer {at} on fits the buffers of their stage, {room:,} elements")

    def _copies(self, at: int) -> list[tuple[str, ...]]:
        """The copies of the embedding that the last stage may have: as the head that is tied to it, or for multi-token
        prediction."""
        if self.sizes.pp == 1:
            return [()]
        tied = (_HEAD,) if _HEAD not in self.model.shapes else ()
        return [tied, (*tied, _EMBEDDING)] if at else [tied]

    def _elements(self, names: _BucketOrder) -> int:
        return sum([p.elements for p in self._parameters(self.targets[0], names, 0, experts=False)])

    def _parameters(self, target: str, names: _BucketOrder, rank: int, *, experts: bool) -> list[_BucketParameter]:
        """A rank's parameters in the order of ``named_parameters()``."""
        held = [n for n in names.all if not self.apart or is_expert(n) == experts]
        called = {
            spelled(
                n, target=target, layers=self.model.layers, sparse=self.sparse, latent=self.latent, grouped=self.grouped
            ): n
            for n in held
        }
        called |= {n: n for n in names.copies}
        out = []
        for s in in_model_order(called):
            name = called[s]
            boxes = self._share(_EMBEDDING if name in names.copies else name, rank, experts=experts)
            out.append(_BucketParameter(name, () if name in names.copies else boxes, sum([b.volume for b in boxes])))
        return out

    def _share(self, name: str, rank: int, *, experts: bool) -> tuple[Box, ...]:
        """The boxes of a parameter that a tensor-parallel rank has: each chunk of the model's is one rank's, or half of
        it."""
        boxes, ranks = self.model.boxes[name], self.sizes.etp if experts else self.sizes.tp
        own = tuple(boxes if len(boxes) == 1 else boxes[rank::ranks])
        even = len(boxes) == 1 or len(boxes) % ranks == 0
        if not even or any((a.start[1:], a.stop[1:]) != (b.start[1:], b.stop[1:]) for a, b in pairwise(own)):
            raise _NoFitError(f"`{name}` is not cut as tensor parallelism over {ranks} ranks does")
        return own

    def _fitted(
        self,
        target: str,
        names: _BucketOrder,
        buffers: dict[str, list[SavedBucket]],
        rank: int,
        *,
        experts: bool = False,
    ) -> Iterator[_Placed]:
        """Places of a rank's parameters, for each dtype. Raises _NoFitError."""
        by_dtype: dict[str, list[_BucketParameter]] = {}
        for p in self._parameters(target, names, rank, experts=experts):
            by_dtype.setdefault(self.model.dtypes[_EMBEDDING if p.name in names.copies else p.name], []).append(p)
        if by_dtype.keys() != buffers.keys():
            raise _NoFitError("the buffers are of other dtypes than the model's tensors")
        for dtype, parameters in by_dtype.items():
            placed = _in_buckets(parameters, buffers[dtype], ALIGNMENT) or _in_buckets(parameters, buffers[dtype], 1)
            if placed is None:
                raise _NoFitError("their sizes do not add up")
            yield placed


class _BucketOrder(NamedTuple):
    before: Sequence[str]
    layers: Sequence[Sequence[str]]
    behind: Sequence[str]
    copies: Sequence[str] = ()
    """Names of tensors that are copies of the embedding."""

    @property
    def all(self) -> list[str]:
        return [*self.before, *(n for layer in self.layers for n in layer), *self.behind]


def _refusal(why: str) -> UnsupportedError:
    return UnsupportedError(f"nothing says where the parameters lie in the optimizer's flat buffers: {why}", hint=_HINT)


def _stages(buffers: Mapping[int, tuple[str, Mapping[int, SavedBucket]]]) -> _Stage:
    """The buffers of each interleaved stage: its dtypes come one after the other, and then those of the next stage."""
    out: _Stage = []
    for _, (dtype, buckets) in sorted(buffers.items()):
        if not out or dtype in out[-1]:
            out.append({})
        if sorted(buckets) != [*range(len(buckets))]:
            raise _NoFitError("a bucket is missing")
        out[-1][dtype] = [buckets[i] for i in range(len(buckets))]
    return out


def _in_buckets(
    parameters: Sequence[_BucketParameter], buckets: Sequence[SavedBucket], alignment: int
) -> _Placed | None:
    """The parameters, the last one first, each at a multiple of ``alignment``; None where they do not fit."""
    out: _Placed = []
    k = at = 0
    for p in reversed(parameters):
        end = at
        at += -at % alignment
        if at + p.elements > buckets[k].elements:
            if buckets[k].elements not in (at, end) or k + 1 == len(buckets):
                return None
            k, at = k + 1, 0
            if p.elements > buckets[k].elements:
                return None
        out.append((p, buckets[k], at))
        at += p.elements
    fits = k + 1 == len(buckets) and at == buckets[k].elements
    return out if fits and all(b.joined or _bounds_fit(out, b) for b in buckets) else None


def _bounds_fit(placed: _Placed, bucket: SavedBucket) -> bool:
    """Whether the chunks of a bucket begin and end with its parameters, but where the next data-parallel rank begins:
    all of these have parts of the same length."""
    bounds = bucket.bounds
    spans = [(at, at + p.elements) for p, b, at in placed if b is bucket]
    if any(a not in bounds or z not in bounds for a, z in spans):
        return False
    starts = sorted(spans)
    inside = [n for n in bounds if (i := bisect_left(starts, (n, 0))) and starts[i - 1][0] < n < starts[i - 1][1]]
    step = gcd(*inside)
    return not step or all(n in bounds for n in range(0, bucket.elements, step))


def _found(placed: _Placed) -> Iterator[BucketSlice]:
    """The stored tensor of each box of the parameters."""
    for p, bucket, begin in placed:
        at = begin
        for box in p.boxes:
            end = at + box.volume
            for state, chunks in bucket.states.items():
                for i in range(bisect_right(chunks, at, key=itemgetter(0)) - 1, len(chunks)):
                    start, stored = chunks[i]
                    if start >= end:
                        break
                    lo, hi = max(at, start), min(end, start + stored.shape[0])
                    offset, item = stored.offset + (lo - start) * itemsize(stored.dtype), itemsize(stored.dtype)
                    for part in from_flat(lo - at, hi - at, box.shape):
                        yield state, p.name, part.shift(box.start), stored._replace(shape=part.shape, offset=offset)
                        offset += part.volume * item
            at = end
