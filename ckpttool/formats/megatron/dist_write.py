"""Writing dist_checkpointing (torch_dist), which Megatron Core loads in any mesh; the optimizer ``fully_reshardable``.

    DST/latest_checkpointed_iteration.txt    1000
    DST/iter_0001000/common.pt               arguments, counters, groups of the optimizer
    DST/iter_0001000/.metadata               which box of which tensor lies where
    DST/iter_0001000/__0_0.distcp            chunks: what the first rank holds
    DST/iter_0001000/metadata.json           last: with it the save is complete

The metadata says where the elements of each global tensor are, so the files need not be those of Megatron's ranks: a
box that several ranks hold is written once, and all stages of the pipeline are in them. Keys and global shapes are
what a loader checks:

    layers that are alike       decoder.layers.self_attention.linear_proj.weight        [layers, out, in]
    their experts               decoder.layers.mlp.experts.experts.linear_fc1.weight    [layers, experts, 2 x inner, in]
    layers that are not         decoder.layers.3.mlp.experts.experts.linear_fc1.weight  [experts, 2 x inner, in]
    multi-token prediction      mtp.layers.0.transformer_layer.self_attention...        always one by one

Sources: ``sharded_state_dict`` of megatron/core/transformer/transformer_block.py, transformer_layer.py, mlp.py,
moe/experts.py, multi_token_prediction.py, models/gpt/gpt_layer_specs.py, optimizer/distrib_optimizer.py and
optimizer/optimizer.py; dist_checkpointing/strategies/torch.py (Megatron Core 0.16.1).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from ckpttool.containers.pickle_write import Hole
from ckpttool.containers.torch_write import lay_out_torch
from ckpttool.core.catalog import RankTensor, RankTensors
from ckpttool.core.geometry import Box, whole
from ckpttool.core.mesh import Mesh
from ckpttool.core.optimizer_states import STEP
from ckpttool.core.words import count, some
from ckpttool.errors import ConflictError, UnsupportedError, UsageError
from ckpttool.formats import base
from ckpttool.formats.megatron.args import args_of
from ckpttool.formats.megatron.common_state import common, groups_of, iteration_of, own_args
from ckpttool.formats.megatron.dist_place import BACKEND, COMMON
from ckpttool.formats.megatron.groups import is_expert
from ckpttool.formats.megatron.names import LOCAL, TRANSFORMER_ENGINE, spelled, traits
from ckpttool.formats.megatron.run import POINTER
from ckpttool.formats.torch import METADATA, ChunkWriter, DcpTensor, Span, TensorChunks, write_metadata

_BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_EMBEDDING = "embedding.word_embeddings.weight"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_LOCAL_EXPERT = re.compile(r"\.mlp\.experts\.local_experts\.(\d+)\.")
_MODULE = re.compile(r"(?P<module>.*\.(?:linear_\w+|eh_proj|(?P<norm>\w*norm)))\.weight")
"""Modules with an extra state: linear layers, and norms of Transformer Engine, whose attention has one, too."""
_LAST_NORM = "decoder.final_layernorm"
_ATTENTION = re.compile(r"(?P<attention>.*\.self_attention\.)linear_proj\.weight")
_MASTERS, _PARAM = "master_weights", "param"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_SHARDING = "fully_reshardable"
_WIDENED = frozenset({"F32", "BF16", "F16"})
"""Dtypes of which every number is one of float32."""
_FLOATS = _WIDENED | {"F64"}
_MASTERS_MADE = "master weights that the source does not have are float32 of the model weights (exact)"


def write_dist(request: base.WriteRequest) -> base.FileLayout:
    """Files, sizes and literals of a save.

    Raises UnsupportedError for quantized weights, and for an optimizer that Megatron's distributed optimizer cannot go
    on from; UsageError where not all ranks are written.
    """
    _check(request)
    shapes = _padded(request)
    own = own_args(request)
    grouped = request.version != LOCAL and bool(own.get("moe_grouped_gemm", True))
    args = {**own, **args_of(request, _rows(shapes), grouped=grouped, dist=True)}
    keys = DistKeys.of(request, args, shapes)
    held = _WrittenState(request)
    save = _DistLayout(request.mesh, keys, shapes)
    for r, t in held.tensors():
        save.add(r, t)
    spans = save.finish()
    args["dist_ckpt_optim_fully_reshardable"] = True
    beside, notes = common(request, args, optimizer=bool(held.trained))
    if held.trained:
        groups = groups_of(
            request.training, {n: shapes[n] for n in held.trained}, experts_apart=keys.chained, args=args
        )
        of_each = [
            {"optimizer": {"param_groups": g}, "param_state_sharding_type": _SHARDING} for g in groups.optimizers
        ]
        beside["optimizer"] = dict(enumerate(of_each)) if keys.chained else of_each[0]
        notes += groups.notes
        if not keys.chained and any(map(is_expert, held.trained)):
            notes.append("the optimizer is that of runs with ep 1; for others write it with --ep-out 2 or more")
    notes += [*held.notes, *keys.notes]
    beside["content_metadata"] = {
        "distrib_optim_sharding_type": _SHARDING if held.trained else None,
        "singleton_local_shards": False,
    }
    folder = f"iter_{iteration_of(request):07d}/"
    laid = lay_out_torch(beside, "common")
    metadata = write_metadata(save.described, spans, None, save.files.names)
    files = [
        *save.files.out_files(folder),
        base.OutFile(folder + COMMON, laid.size, laid.literals),
        base.OutFile(folder + METADATA, len(metadata), ((0, metadata),)),
    ]
    said = json.dumps(_BACKEND).encode()
    files.append(base.OutFile(folder + BACKEND, len(said), ((0, said),)))
    rank_files = [[r] for r in range(request.mesh.world)]
    rank_files[0] += range(request.mesh.world, len(files))
    return base.FileLayout(
        files,
        save.files.places(),
        notes,
        rank_files,
        save.ranks,
        generated=((POINTER, str(iteration_of(request)).encode()),),
        label=keys.fqn,
        usage="torchrun pretrain_gpt.py --load {dst} --use-checkpoint-args"
        + _loads(optimizer=bool(held.trained), iteration=iteration_of(request)),
        mesh=request.requested,
    )


def _loads(*, optimizer: bool, iteration: int) -> str:
    """Options that load it: without them a model alone is asked for its optimizer."""
    if optimizer:
        return " --use-distributed-optimizer"
    return " --no-load-optim --no-load-rng" if iteration else " --finetune"


def _check(request: base.WriteRequest) -> None:
    """Raises UsageError for a choice of ranks, UnsupportedError for quantized weights and without a model."""
    if len(request.chosen) != request.mesh.world:
        raise UsageError(
            "--ranks-out has no effect with --to megatron-dist: the metadata of a save describes all of its files",
            hint="write all ranks; Megatron's own ranks read what they need of them",
        )
    if not any(t.component == "model" for t in request.ranks[0]):
        raise UnsupportedError(
            "a save of Megatron's holds the model, and the state of its optimizer beside it",
            hint="add --only model, or omit --only",
        )
    odd = next((t for t in request.ranks[0] if t.component == "model" and t.dtype not in _FLOATS), None)
    if odd is not None:
        raise UnsupportedError(
            f"`{odd.name}` is {odd.dtype}, and Megatron's checkpoints hold weights of 16 bits and more",
            where=odd.name,
            hint="dequantize it: --dequant bf16",
        )


def _padded(request: base.WriteRequest) -> dict[str, tuple[int, ...]]:
    """The shapes of whole parameters in the files: of the vocabulary with its padding, which every rank has alike."""
    out: dict[str, tuple[int, ...]] = {}
    for rank in request.ranks:
        for t in rank:
            if t.pads:
                out[t.name] = (t.shape[0] * request.mesh.tp, *t.shape[1:])
            elif t.component == "model" or t.state != STEP:
                out.setdefault(t.name, t.whole)
    return out


def _rows(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Rows of the vocabulary in the files; 0 where it is not written."""
    return next(iter(shapes.get(_EMBEDDING, (0,))), 0)


class KeyPlace(NamedTuple):
    """The place of a tensor in the save."""

    key: str
    at: tuple[int, ...]
    """Numbers of its layer and expert along the axes in front."""
    counts: tuple[int, ...]
    """How many of them there are."""


class DistKeys:
    """The keys of a model's tensors in a save."""

    def __init__(
        self, names: Iterable[str], *, layers: int, target: str, stacked: bool, chained: bool, notes: Sequence[str]
    ) -> None:
        self.layers, self.target, self.stacked, self.chained = layers, target, stacked, chained
        self.notes = notes
        self._places: dict[str, KeyPlace] = {}
        self.sparse, self.latent = traits(names)
        self.experts: dict[int, int] = {}
        """How many each layer has."""
        for name in names:
            layer, expert = _LAYER.match(name), _LOCAL_EXPERT.search(name)
            if layer and expert:
                at = int(layer[1])
                self.experts[at] = max(self.experts.get(at, 0), int(expert[1]) + 1)

    @classmethod
    def of(cls, request: base.WriteRequest, args: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> DistKeys:
        """The keys for the parameters of a request; ``args`` are those of the save."""
        numbers = {int(m[1]) for n in shapes if (m := _LAYER.match(n))}
        said = args.get("num_layers")
        layers = said if type(said) is int else len(numbers)
        # Where the arguments say of each layer whether it has experts, Megatron asks for each by its number.
        listed, differ = isinstance(args.get("moe_layer_freq"), list), _first_unlike(shapes, layers)
        notes = []
        if differ and not listed:
            notes.append(
                f"the layers differ ({differ}), so each has keys of its own, for which Megatron asks with"
                " hetereogenous_dist_checkpoint only"
            )
        return cls(
            shapes,
            layers=layers,
            target=request.version or TRANSFORMER_ENGINE,
            stacked=not differ and not listed,
            chained=request.requested.ep > 1 and any(map(is_expert, shapes)),
            notes=notes,
        )

    @property
    def places(self) -> Iterable[KeyPlace]:
        """Places of all parameters that were asked for."""
        return self._places.values()

    def place(self, name: str) -> KeyPlace:
        """The place of the parameter with a canonical name."""
        known = self._places.get(name)
        return known or self._places.setdefault(name, self._place(name))

    def _place(self, name: str) -> KeyPlace:
        m = _LAYER.match(name)
        layer = int(m[1]) if m else -1
        key = self._spelled(name)
        at: tuple[int, ...] = ()
        counts: tuple[int, ...] = ()
        if self.stacked and 0 <= layer < self.layers:
            key = _LAYER.sub("decoder.layers.", key, count=1)
            at, counts = (layer,), (self.layers,)
        if e := _LOCAL_EXPERT.search(key):
            key = _LOCAL_EXPERT.sub(".mlp.experts.experts.", key, count=1)
            at, counts = (*at, int(e[1])), (*counts, self.experts[layer])
        return KeyPlace(key, at, counts)

    def _spelled(self, name: str) -> str:
        if self.target != LOCAL:
            return spelled(name, target=TRANSFORMER_ENGINE, layers=self.layers, sparse=self.sparse, latent=self.latent)
        # The local spec has its norms where Transformer Engine would have them in dense layers, of experts as well
        # (``sharded_state_dict_keys_map``); with latent attention under their own names.
        return spelled(name, target=LOCAL if self.latent else TRANSFORMER_ENGINE, layers=self.layers)

    def fqn(self, t: RankTensor) -> str:
        """A tensor's name in the save."""
        key = self.place(t.name).key
        if t.component == "model":
            return key
        chain = f"chained_{int(is_expert(t.name))}." if self.chained else ""
        return f"{chain}optimizer.state.{_PARAM if t.component == _MASTERS else t.state}.{key}"


def _first_unlike(shapes: Mapping[str, tuple[int, ...]], layers: int) -> str:
    """The name of a tensor that one layer has and another one lacks, or otherwise; "" where all layers are alike."""
    by_layer: dict[int, set[tuple[str, tuple[int, ...]]]] = {}
    for name, shape in shapes.items():
        m = _LAYER.match(name)
        if m and int(m[1]) < layers:
            by_layer.setdefault(int(m[1]), set()).add((name[m.end() :], shape))
    if len(by_layer) < layers:
        return f"{len(by_layer)} of {layers} are here"
    first = by_layer.get(0, set())
    for number, own in sorted(by_layer.items()):
        if own != first:
            return f"{number}: {min(own ^ first)[0]}"
    return ""


class _WrittenState:
    """The tensors of the request that are written."""

    def __init__(self, request: base.WriteRequest) -> None:
        self._ranks = request.ranks
        dtypes: dict[str, str] = {}
        found: dict[tuple[str, str], dict[str, tuple[int, ...]]] = {}
        for rank in request.ranks:
            for t in rank:
                found.setdefault((t.component, t.state), {})[t.name] = t.whole
                if t.component == "model":
                    dtypes[t.name] = t.dtype
        states = {s: of for (c, s), of in found.items() if c == "optimizer" and s != STEP}
        self.trained = list(dict.fromkeys(n for of in states.values() for n in of))
        """Parameters of which there is the state of the optimizer."""
        for name in self.trained:
            _check_adam(name, {s: of[name] for s, of in states.items() if name in of})
        self._made = {*self.trained}.difference(found.get((_MASTERS, ""), ()))
        if lacking := [n for n in self.trained if n in self._made and dtypes.get(n) not in _WIDENED]:
            raise UnsupportedError(
                f"there is no master weight of `{lacking[0]}`, which Megatron's optimizer resumes from",
                hint="omit --only, or also name model and master_weights",
            )
        made = any(dtypes[n] != "F32" for n in self._made)
        self.notes = [_MASTERS_MADE] if made else []
        grouped = {n for g in (request.training.groups if request.training else ()) for n in g.parameters}
        if not self.trained and (_MASTERS, "") in found:
            self.notes.append("Megatron loads master weights together with the moments of Adam, and there are none")
        elif self.trained and (lacking := sorted((grouped & dtypes.keys()).difference(self.trained))):
            which = f"{count(len(lacking), 'parameter')} without state of the optimizer ({some(lacking)})"
            self.notes.append(f"{which}: Megatron only loads a run in which they are frozen")

    def tensors(self) -> Iterator[tuple[int, RankTensor]]:
        """(rank, tensor) of all that is written as tensors."""
        for r, rank in enumerate(self._ranks):
            for t in rank:
                if t.state != STEP:
                    yield r, t._replace(dtype="F32") if t.component == _MASTERS and t.dtype != "F32" else t
                if t.component == "model" and t.name in self._made:
                    yield r, t._replace(dtype="F32", component=_MASTERS)


def _check_adam(name: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises UnsupportedError for a state of other optimizers than Adam; ``shapes`` are those of a parameter."""
    lacks = [s for s in _MOMENTS if s not in shapes]
    odd = [s for s in shapes if shapes[s] != shapes[_MOMENTS[0]]] if not lacks else []
    if lacks or odd:
        raise UnsupportedError(
            f"Megatron's distributed optimizer is Adam, and `{name}` has "
            + (f"no `{lacks[0]}`" if lacks else f"`{odd[0]}`, which does not have its shape"),
            hint="omit the optimizer: --only model",
        )


class _OpenTensor:
    """A tensor of the save that is being laid out."""

    __slots__ = ("boxes", "chunks", "component", "dtype", "elements", "known", "shape")

    def __init__(self, t: RankTensor, shape: tuple[int, ...]) -> None:
        self.component, self.dtype, self.shape, self.elements = t.component, t.dtype, shape, 0
        self.boxes: list[tuple[int, Box]] = []
        self.chunks = TensorChunks(self.boxes)
        self.known: set[Box] = set()
        """Boxes that have been written."""


class _DistLayout:
    """The files of a save while they are laid out."""

    def __init__(self, mesh: Mesh, keys: DistKeys, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.mesh, self.keys, self.shapes = mesh, keys, shapes
        self.files = ChunkWriter(mesh.world)
        first = RankTensors()
        self.ranks = [first, *(RankTensors(share_index_with=first) for _ in range(mesh.world - 1))]
        self.described: dict[str, DcpTensor] = {}
        self._open: dict[str, _OpenTensor] = {}
        self._boxes: dict[Box, Box] = {}
        """Tensors are cut in few ways: each box is kept once."""
        self._cuts: dict[Box, tuple[tuple[Box, Box], ...]] = {}

    def add(self, r: int, t: RankTensor) -> None:
        """Lay out what a rank holds of a parameter, but for what ranks before it hold.

        Raises UnsupportedError where a tensor of the save would have two dtypes.
        """
        fqn, place, shape = self.keys.fqn(t), self.keys.place(t.name), self.shapes[t.name]
        tensor = self._open.get(fqn)
        if tensor is None:
            tensor = self._open[fqn] = _OpenTensor(t, (*place.counts, *shape))
        if tensor.dtype != t.dtype:
            raise UnsupportedError(
                f"`{fqn}` would hold tensors of {tensor.dtype} and {t.dtype}, and has one dtype",
                where=t.name,
                hint="make them alike: --dtype bf16",
            )
        for part, (box, cut) in enumerate(self._parts(r, t, shape)):
            outer = Box((*place.at, *box.start), (*(n + 1 for n in place.at), *box.stop))
            outer = self._boxes.setdefault(outer, outer)
            if outer in tensor.known:
                continue
            piece = cut._replace(part=part) if part else cut
            tensor.known.add(outer)
            tensor.elements += box.volume
            tensor.boxes.append((r, outer))
            tensor.chunks.put(*self.files.chunk(r, piece, outer.shape, fqn))
            self.ranks[r].append(piece)

    def _parts(self, r: int, t: RankTensor, shape: tuple[int, ...]) -> Iterator[tuple[Box, RankTensor]]:
        """(box of the whole parameter, what is written there) of each block that a rank holds."""
        if t.whole != shape:  # with its padding: the ranks have equal numbers of rows
            first = self.mesh.coords(r).tp * t.shape[0]
            yield Box((first, *(0 for _ in shape[1:])), (first + t.shape[0], *shape[1:])), t
            return
        for stored, logical in t.boxes:
            if stored.shape == t.shape:
                yield logical, t
                continue
            cut = self._cuts.get(logical)
            if cut is None:
                cut = self._cuts[logical] = ((whole(logical.shape), logical),)
            yield logical, t._replace(shape=logical.shape, boxes=cut)

    def finish(self) -> dict[str, Span]:
        """Places of the values that are not tensors. Raises ConflictError for parts that do not make up the whole.

        These are the extra states of modules, which hold FP8's history: a loader asks for them whether there is any or
        not. All of them are the same value, which says that there is none.
        """
        for fqn, tensor in self._open.items():
            if tensor.elements != prod(tensor.shape) and tensor.component != "model":
                raise UnsupportedError(
                    f"`{fqn}` holds the state of the optimizer for all layers, and some of them have none (frozen?)",
                    hint="omit the optimizer: --only model",
                )
            if tensor.elements != prod(tensor.shape):
                raise ConflictError(
                    f"of `{fqn}` {list(tensor.shape)}, {tensor.elements:,} of {prod(tensor.shape):,} elements are here",
                    hint="a layer or an expert is missing: omit --keep-keys and --remove-keys",
                )
            self.described[fqn] = DcpTensor(tensor.dtype, tensor.shape, tensor.chunks)
        self._open.clear()
        span = self.files.value([Hole("U8", (0,))])
        return dict.fromkeys(_extra_states(self.keys.places, self.keys.target), span)


def _extra_states(places: Iterable[KeyPlace], target: str) -> Iterator[str]:
    """Names of the extra states that any version of Megatron Core and Transformer Engine asks for."""
    for place in places:
        m, a = _MODULE.fullmatch(place.key), _ATTENTION.fullmatch(place.key)
        end = ".".join(map(str, place.at or (0,))) + "_" + ".".join(map(str, place.counts or (1,)))
        # The last norm is Transformer Engine's wherever that is installed.
        if m and (not m["norm"] or target != LOCAL or m["module"] == _LAST_NORM):
            yield f"{m['module']}._extra_state/shard_{end}"
        if a and target != LOCAL:
            yield f"{a['attention']}core_attention._extra_state/shard_{end}"
