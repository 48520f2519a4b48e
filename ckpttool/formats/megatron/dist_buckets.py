"""The optimizer's state as flat buffers (``dp_reshardable``, ``fully_sharded_bucket_space``, ``dp_zero_gather_scatter``).

    optimizer.distributed.dp_group_idx_G.gbuf_idx_B.dtype_(torch.bfloat16, torch.float32).bucket_idx_K.exp_avg

G counts the model-parallel ranks, tensor-parallel ones first, then (for experts) expert-parallel ones, then stages. A
buffer holds the parameters of one rank, one dtype and one interleaved stage in the reverse of the model's order, and is
cut into buckets. No file says which parameter lies where. What a rank has of a parameter is what the chunks of the
model show; how many layers a stage has, what its buffers can hold. Then every parameter must begin and end where a
chunk does, for each rank wrote its part of each parameter as a chunk of its own.
Source: megatron/core/optimizer/distrib_optimizer.py, distributed/param_and_grad_buffer.py and parallel_state.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import gcd
from typing import Any, NamedTuple

from ckpttool.catalog import StoredTensor
from ckpttool.containers.pickle import printable
from ckpttool.dtypes import itemsize
from ckpttool.errors import CorruptError, UnsupportedError
from ckpttool.formats.megatron.buffers import ALIGNMENT
from ckpttool.formats.megatron.dist_names import Held
from ckpttool.formats.megatron.groups import is_expert
from ckpttool.formats.megatron.names import TARGETS, spelled, traits
from ckpttool.formats.megatron.order import in_model_order, is_parameter
from ckpttool.geometry import Box, from_flat

_BUCKET = re.compile(
    r"(?:chained_(?P<chain>\d{1,3})\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d{1,7})\.gbuf_idx_(?P<buffer>\d{1,5})"
    r"\.dtype_\(torch\.(?P<dtype>\w+), [^)]*\)\.bucket_idx_(?P<bucket>\d{1,5})\.(?P<state>\w+)"
)
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")
_HEAD, _EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"
_HINT = "save it once more with --dist-ckpt-optim-fully-reshardable, or leave the optimizer out with --only model"

Found = tuple[str, str, Box, StoredTensor]
"""(state, parameter, box of the whole parameter, what holds it)."""


class Bucket(NamedTuple):
    """A run of parameters of one rank."""

    elements: int
    states: dict[str, list[tuple[int, StoredTensor]]]
    """State -> (first element, a part) of each chunk."""

    @property
    def bounds(self) -> frozenset[int]:
        """Where chunks begin, and the end."""
        chunks = next(iter(self.states.values()), [])
        return frozenset([at for at, _ in chunks] + [self.elements])


class Sizes(NamedTuple):
    """Of the mesh that trained."""

    tp: int
    pp: int
    ep: int
    etp: int


class Model(NamedTuple):
    """The parameters of the model, and how the save cuts them."""

    shapes: Mapping[str, tuple[int, ...]]
    """By canonical name."""
    dtypes: Mapping[str, str]
    """torch's names."""
    boxes: Mapping[str, Sequence[Box]]
    """Of each, those that the chunks are, in order."""
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
            "the optimizer's state lies in flat buffers of ranks, and no `args` say how many ranks there were", hint=_HINT
        )
    return Sizes(tp, pp, ep, etp)


Buffers = dict[tuple[int, int], dict[int, tuple[str, dict[int, Bucket]]]]
"""(number of the optimizer, group) -> number of the buffer -> (dtype, its buckets by number)."""


def buffers_of(flat: Mapping[str, Held]) -> Buffers:
    """The buckets of all ranks. Raises UnsupportedError for a key of another kind, CorruptError for chunks that leave
    elements out."""
    out: Buffers = {}
    for fqn, held in flat.items():
        m = _BUCKET.fullmatch(fqn)
        if m is None or len(held.shape) != 1:
            raise UnsupportedError(f"the optimizer has state of an unknown kind: `{printable(fqn)}`", hint=_HINT)
        owner = int(m["chain"] or 0), int(m["group"])
        dtype, buckets = out.setdefault(owner, {}).setdefault(int(m["buffer"]), (m["dtype"], {}))
        bucket = buckets.setdefault(int(m["bucket"]), Bucket(held.shape[0], {}))
        chunks = sorted((box.start[0], stored) for box, stored in held.chunks)
        ends = [0, *(at + stored.shape[0] for at, stored in chunks)]
        if bucket.elements != held.shape[0] or ends != [*(at for at, _ in chunks), held.shape[0]] or dtype != m["dtype"]:
            raise CorruptError(f"the chunks of `{printable(fqn)}` are not one run of {held.shape[0]:,} elements")
        bucket.states[m["state"]] = chunks
    return out


class _Parameter(NamedTuple):
    name: str
    boxes: tuple[Box, ...]
    """What the rank has, one behind the other; () for a copy of what another stage has."""
    elements: int


class Placer:
    """Finds the parameters in the buffers of all ranks."""

    def __init__(self, buffers: Buffers, model: Model, sizes: Sizes, target: str, *, grouped: bool) -> None:
        self.buffers, self.model, self.sizes = buffers, model, sizes
        self.targets = (target,) if target in TARGETS else TARGETS
        self.grouped = grouped
        self.sparse, self.latent = traits(model.shapes)
        self.chains = 1 + max(chain for chain, _ in buffers)
        names = [n for n in model.shapes if is_parameter(n)]
        self.by_layer: dict[int, list[str]] = {}
        self.ends: tuple[list[str], list[str]] = ([], [])
        """Before the layers, and after them."""
        for n in names:
            m = _LAYER.match(n)
            if m and int(m[1]) < model.layers:
                self.by_layer.setdefault(int(m[1]), []).append(n)
            else:
                self.ends[not n.startswith("embedding.")].append(n)

    def run(self) -> Iterator[Found]:
        """All state. Raises UnsupportedError where no order fits, or several do."""
        experts = any(is_expert(n) for n in self.model.shapes)
        groups = self.sizes.tp * self.sizes.pp, self.sizes.pp * self.sizes.ep * self.sizes.etp
        want = {(0, g) for g in range(groups[0])} | {(1, g) for g in range(groups[1]) if experts}
        if self.chains != 1 + experts or (odd := self.buffers.keys() - want):
            raise self.refuse("its optimizers and groups are not those of the mesh in `args`")
        found: list[tuple[str, list[Found]]] = []
        for target in self.targets:
            try:
                found.append((target, list(self.placed(target))))
            except _NoFitError as e:
                why = e
        if not found:
            raise self.refuse(str(why))
        if len(found) > 1 and found[0][1] != found[1][1]:
            raise self.refuse("the order of Transformer Engine's modules fits, and so does that of the local spec")
        yield from found[0][1]

    def refuse(self, why: str) -> UnsupportedError:
        return UnsupportedError(f"nothing says where the parameters lie in the optimizer's flat buffers: {why}", hint=_HINT)
