"""What trainers of torch save on many ranks, on hardly any disk: true pickles, and storages that are holes.

Pickles are made by Python's own pickler from stand-ins for torch's classes, so that they share and remember what those
of torch do. torch is neither needed nor imported.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

from ckpttool.containers.torch_write import _ZipLayout
from ckpttool.core.dtypes import itemsize, nbytes
from ckpttool.core.geometry import contiguous_strides

Shapes = Mapping[str, tuple[int, ...]]

_MODULES: dict[str, ModuleType] = {}
_STORAGES = {"F32": "FloatStorage", "BF16": "BFloat16Storage"}


def _named(module: str, name: str, value: Any = None) -> Any:
    """A class (or ``value``) that pickles as MODULE.NAME."""
    for i in range(1, module.count(".") + 2):
        part = ".".join(module.split(".")[:i])
        _MODULES.setdefault(part, ModuleType(part))
    made = type(name, (), {}) if value is None else value
    made.__module__ = module
    if isinstance(made, type) or callable(made):
        made.__qualname__ = made.__name__ = name
    setattr(_MODULES[module], name, made)
    return made


class _Value:
    """One of torch's constants."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> str:
        return self.name


def _call(module: str, name: str) -> Callable[..., Any]:
    def function(*_: Any) -> None: ...

    return _named(module, name, function)  # type: ignore[no-any-return]


_CLASSES = {name: _named("torch", name) for name in _STORAGES.values()}
_DTYPES = {d: _named("torch", n, _Value(n)) for d, n in (("F32", "float32"), ("BF16", "bfloat16"))}
_REBUILD = _call("torch._utils", "_rebuild_tensor_v2")
_FROM_TYPE = _call("torch._tensor", "_rebuild_from_type_v2")
_WRAPPER = _call("torch._utils", "_rebuild_wrapper_subclass")
_LAYOUT = _call("torch.serialization", "_get_layout")
_DEVICE = _call("torch", "device")
_SIZE = _call("torch", "Size")


class _Called:
    """What a function makes of arguments."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.reduced = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.reduced


class _Storage:
    def __init__(self, dtype: str, elements: int) -> None:
        self.dtype, self.elements = dtype, elements


def tensor(dtype: str, shape: tuple[int, ...]) -> Any:
    """A tensor in a storage of its own."""
    strides = contiguous_strides(shape)
    return _Called(_REBUILD, _Storage(dtype, prod(shape)), 0, shape, strides, False, OrderedDict())


_STRIDED, _CPU = _Called(_LAYOUT, "torch.strided"), _Called(_DEVICE, "cpu")


def _subclass(kind: Any, dtype: str, shape: tuple[int, ...], state: Any) -> Any:
    size = (kind, _DTYPES[dtype], shape, contiguous_strides(shape), 0, _STRIDED, _CPU, False)
    return _Called(_FROM_TYPE, _WRAPPER, kind, size, state)


def _instance(kind: Any, fields: Mapping[str, Any]) -> Any:
    made = kind()
    made.__dict__.update(fields)
    return made


def _slotted(kind: Any, fields: Mapping[str, Any]) -> Any:
    """Of a class with slots."""
    return _instance(kind, {"state": (None, fields)})


class _Stateful:
    """An object that says its state itself."""

    state: Any

    def __reduce_ex__(self, protocol: Any) -> Any:
        return copyreg.__newobj__, (type(self),), self.state  # type: ignore[attr-defined]


def _stateful(module: str, name: str) -> Any:
    return _named(module, name, type(name, (_Stateful,), {}))


@contextmanager
def _imported() -> Iterator[None]:
    """The stand-ins under torch's names, in place of those that are there."""
    before = {n: sys.modules[n] for n in _MODULES if n in sys.modules}
    sys.modules.update(_MODULES)
    try:
        yield
    finally:
        for n in _MODULES:
            del sys.modules[n]
        sys.modules.update(before)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, protocol: int = 2) -> None:
        super().__init__(file, protocol)
        self.storages: dict[int, tuple[str, _Storage]] = {}

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is not _Storage:
            return None
        key = self.storages.setdefault(id(obj), (str(len(self.storages)), obj))[0]
        return ("storage", _CLASSES[_STORAGES[obj.dtype]], key, "cpu", obj.elements)


def saved(path: Path, value: Any) -> None:
    """``torch.save`` of a value whose tensors are holes."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    with _imported():
        pickler.dump(value)
    zip_ = _ZipLayout("archive")
    zip_.put("data.pkl", file.getvalue())
    zip_.put("byteorder", b"little")
    for key, storage in pickler.storages.values():
        zip_.member(f"data/{key}", nbytes(storage.dtype, storage.elements))
    zip_.put("version", b"3\n")
    laid = zip_.close({})
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as f:
        f.truncate(laid.size)
        for at, data in laid.literals:
            f.seek(at)
            f.write(data)


def dense(layers: int, hidden: int = 8192, inner: int = 28672, kv: int = 1024, vocab: int = 128256) -> Shapes:
    """The parameters of a Llama; those of 70B where nothing else is said."""
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(layers):
        rows = (("q", hidden), ("k", kv), ("v", kv), ("o", hidden))
        out |= {f"model.layers.{i}.self_attn.{n}_proj.weight": (rows_, hidden) for n, rows_ in rows}
        out |= {f"model.layers.{i}.mlp.{n}_proj.weight": (inner, hidden) for n in ("gate", "up")}
        out[f"model.layers.{i}.mlp.down_proj.weight"] = (hidden, inner)
        out |= {f"model.layers.{i}.{n}_layernorm.weight": (hidden,) for n in ("input", "post_attention")}
    return {**out, "model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


# -- DeepSpeed

_FRAGMENT = _named("deepspeed.utils.tensor_fragment", "fragment_address")
_SCALER = _named("deepspeed.runtime.fp16.loss_scaler", "LossScaler")
_CONFIG = {
    "train_batch_size": 1024,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8},
}


def _states(lengths: Sequence[int], count: int) -> dict[str, Any]:
    """The state of an optimizer of as many flat vectors."""
    state = {
        i: {"step": tensor("F32", ()), "exp_avg": tensor("F32", (n,)), "exp_avg_sq": tensor("F32", (n,))}
        for i, n in enumerate(lengths)
    }
    group = {"lr": 1e-5, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "params": list(range(count))}
    return {"state": state, "param_groups": [group]}


def zero3(root: Path, shapes: Shapes, ranks: int, sub_group: int = 10**9) -> None:
    """A save of ZeRO stage 3."""
    save = root / "global_step100"
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    held = 0
    for name, shape in shapes.items():
        part = -(-prod(shape) // ranks)
        if held and held + part > sub_group:
            groups.append({})
            held = 0
        groups[-1][name] = shape
        held += part
    lengths = [sum(-(-prod(s) // ranks) for s in g.values()) for g in groups]
    for rank in range(ranks):
        state = {
            "zero_stage": 3,
            "loss_scaler": _instance(_SCALER, {"cur_scale": 1.0, "dynamic": False}),
            "dynamic_loss_scale": False,
            "overflow": False,
            "partition_count": ranks,
            "optimizer_state_dict": _states(lengths, len(lengths)),
            "fp32_flat_groups": [tensor("F32", (n,)) for n in lengths],
        }
        value = {"optimizer_state_dict": state, "ds_config": _CONFIG, "ds_version": "0.19.8"}
        saved(save / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", value)
        sizes = [OrderedDict((n, _Called(_SIZE, s)) for n, s in g.items()) for g in groups]
        module = OrderedDict((n, tensor("BF16", (0,))) for n in shapes)
        saved(save / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", _model_states(module, sizes, ranks))
    (root / "latest").write_text(save.name)


def _model_states(module: Any, shapes: Any, ranks: int) -> dict[str, Any]:
    return {
        "module": module,
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": shapes,
        "frozen_param_shapes": None,
        "shared_params": {},
        "frozen_param_fragments": None,
        "lr_scheduler": None,
        "skipped_steps": 0,
        "global_steps": 100,
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "ds_config": _CONFIG,
        "ds_version": "0.19.8",
    }


def zero12(root: Path, shapes: Shapes, ranks: int, stage: int = 1) -> None:
    """A save of ZeRO stages 1 and 2: parameters with and without weight decay are two groups."""
    save = root / "global_step100"
    groups = [{n: s for n, s in shapes.items() if (len(s) > 1) == wide} for wide in (True, False)]
    totals = [sum(map(prod, g.values())) for g in groups]
    parts = [-(-t // ranks) for t in totals]
    for rank in range(ranks):
        lo = [rank * p for p in parts]
        held = [max(0, min(t, a + p) - a) for a, p, t in zip(lo, parts, totals, strict=True)]
        tables = [_fragments(g, a, a + n) for g, a, n in zip(groups, lo, held, strict=True)]
        state = {
            "loss_scaler": _instance(_SCALER, {"cur_scale": 1.0, "dynamic": False}),
            "dynamic_loss_scale": False,
            "overflow": False,
            "clip_grad": 1.0,
            "base_optimizer_state": _states(parts, 2),
            "single_partition_of_fp32_groups": [tensor("F32", (n,)) for n in parts],
            "zero_stage": stage,
            "group_paddings": [p - n for p, n in zip(parts, held, strict=True)],
            "partition_count": [ranks, ranks],
            "ds_version": "0.19.8",
            "param_slice_mappings": tables,
        }
        value = {"optimizer_state_dict": state, "ds_config": _CONFIG, "ds_version": "0.19.8"}
        saved(save / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", value)
    sizes = [OrderedDict((n, _Called(_SIZE, s)) for n, s in g.items()) for g in groups]
    module = OrderedDict((n, tensor("BF16", s)) for n, s in shapes.items())
    saved(save / "mp_rank_00_model_states.pt", _model_states(module, sizes, ranks))
    (root / "latest").write_text(save.name)


def _fragments(group: Shapes, lo: int, hi: int) -> Any:
    out, at = OrderedDict(), 0
    for name, shape in group.items():
        first, last = max(lo, at), min(hi, at + prod(shape))
        if first < last:
            out[name] = _instance(_FRAGMENT, {"numel": last - first, "start": first - lo})
        at += prod(shape)
    return out


# -- FSDP

_DTENSOR = _named("torch.distributed.tensor", "DTensor")
_SPEC = _named("torch.distributed.tensor._dtensor_spec", "DTensorSpec")
_META = _named("torch.distributed.tensor._dtensor_spec", "TensorMeta")
_MESH = _named("torch.distributed.device_mesh", "DeviceMesh")
_AXES = _named("torch.distributed._mesh_layout", "_MeshLayout")
_FLAT = _named("torch.distributed._mesh_layout", "_FlatLayout")
_SHARD_OF = _named("torch.distributed.tensor.placement_types", "Shard")
_SHARDED = _named("torch.distributed._shard.sharded_tensor.api", "ShardedTensor")
_SHARD = _stateful("torch.distributed._shard.sharded_tensor.shard", "Shard")
_PLACE = _stateful("torch.distributed._shard.metadata", "ShardMetadata")
_REMOTE = _named("torch.distributed.remote_device", "_remote_device")
_SHARDS = _named("torch.distributed._shard.sharded_tensor.metadata", "ShardedTensorMetadata")
_SHARDING = _named("torch.distributed._shard.sharding_spec.api", "EnumerableShardingSpec")


def _rows(n: int, ranks: int, rank: int) -> tuple[int, int]:
    each = -(-n // ranks)
    return min(n, rank * each), min(n, (rank + 1) * each)


def _dtensors(ranks: int, rank: int) -> Callable[[str, tuple[int, ...]], Any]:
    """Makes the DTensors of a rank, which share their mesh."""
    mesh = _instance(
        _MESH,
        {
            "_device_type": "cuda",
            "_layout": _instance(_AXES, {"axes": (_instance(_FLAT, {"shape": (ranks,), "stride": (1,)}),)}),
            "_mesh_dim_names": ("fsdp",),
            "_flatten_rank_map": tuple(range(ranks)),
            "_rank": rank,
            "_coordinate_on_dim": (rank,),
        },
    )

    def make(dtype: str, shape: tuple[int, ...]) -> Any:
        lo, hi = _rows(shape[0], ranks, rank)
        strides = contiguous_strides(shape)
        spec = _instance(
            _SPEC,
            {
                "mesh": mesh,
                "placements": (_instance(_SHARD_OF, {"dim": 0}),),
                "tensor_meta": _instance(_META, {"shape": _Called(_SIZE, shape), "stride": strides}),
                "shard_order": ((0, (0,)),),
            },
        )
        return _subclass(
            _DTENSOR, dtype, shape, (None, {"_local_tensor": tensor(dtype, (hi - lo, *shape[1:])), "_spec": spec})
        )

    return make


def _sharded(ranks: int, rank: int) -> Callable[[str, tuple[int, ...]], Any]:
    """Makes the ShardedTensors of a rank: each lists the shards of all ranks."""

    def place(shape: tuple[int, ...], of: int) -> Any:
        lo, hi = _rows(shape[0], ranks, of)
        rest = [0] * (len(shape) - 1)
        device = _instance(_REMOTE, {"_worker_name": None, "_rank": of, "_device": _Called(_DEVICE, "cpu")})
        fields = {"shard_offsets": [lo, *rest], "shard_sizes": [hi - lo, *shape[1:]], "placement": device}
        return _slotted(_PLACE, fields)

    def make(dtype: str, shape: tuple[int, ...]) -> Any:
        lo, hi = _rows(shape[0], ranks, rank)
        local = tensor(dtype, (hi - lo, *shape[1:]))
        shards = [_slotted(_SHARD, {"tensor": local, "metadata": place(shape, rank)})]
        places = [place(shape, of) for of in range(ranks) if _rows(shape[0], ranks, of)[0] < shape[0]]
        metadata = _instance(_SHARDS, {"shards_metadata": places, "size": _Called(_SIZE, shape)})
        spec = _instance(_SHARDING, {"shards": places})
        return _subclass(_SHARDED, dtype, shape, (shards if lo < hi else [], metadata, None, spec, False))

    return make


def fsdp(root: Path, shapes: Shapes, ranks: int, *, sharded: bool = False, optimizer: bool = True) -> None:
    """The files of verl's: DTensors, or with ``sharded`` ShardedTensors."""
    for rank in range(ranks):
        make = (_sharded if sharded else _dtensors)(ranks, rank)
        saved(
            root / f"model_world_size_{ranks}_rank_{rank}.pt",
            OrderedDict((n, make("BF16", s)) for n, s in shapes.items()),
        )
        if optimizer:
            state = {
                n: {"step": tensor("F32", ()), "exp_avg": make("F32", s), "exp_avg_sq": make("F32", s)}
                for n, s in shapes.items()
            }
            group = {"lr": 1e-5, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "params": list(shapes)}
            saved(root / f"optim_world_size_{ranks}_rank_{rank}.pt", {"state": state, "param_groups": [group]})


# -- ByteCheckpoint

_BYTES = "bytecheckpoint.checkpointer.meta_type"
_BYTES_METADATA = _named(_BYTES, "Metadata")
_DCP = "torch.distributed.checkpoint.metadata"
_TENSOR = _named(_DCP, "TensorStorageMetadata")
_CHUNK = _named(_DCP, "ChunkStorageMetadata")
_INDEX = _named(_DCP, "MetadataIndex")
_PROPERTIES = _stateful(_DCP, "TensorProperties")
_ENCODING = _call(_DCP, "_MEM_FORMAT_ENCODING")
_INFO = _named("torch.distributed.checkpoint.filesystem", "_StorageInfo")


def bytecheckpoint(root: Path, shapes: Shapes, ranks: int) -> None:
    """The model alone."""
    folder = root / "model"
    folder.mkdir(parents=True)
    described, storage, tensors, ends = {}, {}, {}, [0] * ranks
    properties = _instance(_PROPERTIES, {"state": (_DTYPES["BF16"], _STRIDED, False, _Called(_ENCODING, 0), False)})
    for name, shape in shapes.items():
        chunks = []
        for rank in range(ranks):
            lo, hi = _rows(shape[0], ranks, rank)
            if lo == hi:
                continue
            size, offset = (hi - lo, *shape[1:]), (lo, *(0 for _ in shape[1:]))
            chunks.append(_instance(_CHUNK, {"offsets": _Called(_SIZE, offset), "sizes": _Called(_SIZE, size)}))
            index = _instance(_INDEX, {"fqn": name, "offset": _Called(_SIZE, offset), "index": None})
            n = prod(size) * itemsize("BF16")
            storage[index] = _instance(
                _INFO, {"relative_path": f"__{rank}_0.distcp", "offset": ends[rank], "length": n}
            )
            ends[rank] += n
            file = io.BytesIO()
            with _imported():
                _Pickler(file).dump(tensor("BF16", size))
            tensors[index] = file.getvalue()
        described[name] = _instance(
            _TENSOR, {"properties": properties, "size": _Called(_SIZE, shape), "chunks": chunks}
        )
    fields = {"state_dict_metadata": described, "planner_data": {n: (n,) for n in shapes}, "storage_data": storage}
    value = _instance(_BYTES_METADATA, {**fields, "all_tensor_metadata": tensors, "user_defined_dict": {}})
    with _imported(), (folder / ".metadata").open("wb") as f:
        pickle.Pickler(f, 4).dump(value)
    for rank, end in enumerate(ends):
        with (folder / f"__{rank}_0.distcp").open("wb") as f:
            f.truncate(end)


# -- Megatron Core

_SAVE_METADATA = _named(_DCP, "Metadata")
_BYTES_STORAGE = _named(_DCP, "BytesStorageMetadata")


def deepseek_keys(
    layers: int = 61, dense_layers: int = 3, experts: int = 256, hidden: int = 7168, vocab: int = 129280
) -> dict[str, tuple[tuple[int, ...], int, int, int]]:
    """key -> (shape, axes of experts, chunks along the next axis, layer) of DeepSeek-V3 as Megatron Core saves it."""
    latent: tuple[tuple[str, tuple[int, ...]], ...] = (
        ("input_layernorm", (hidden,)),
        ("self_attention.linear_proj", (hidden, 16384)),
        ("self_attention.linear_q_down_proj", (1536, hidden)),
        ("self_attention.linear_q_up_proj", (24576, 1536)),
        ("self_attention.linear_q_up_proj.layer_norm", (1536,)),
        ("self_attention.linear_kv_down_proj", (576, hidden)),
        ("self_attention.linear_kv_up_proj", (32768, 512)),
        ("self_attention.linear_kv_up_proj.layer_norm", (512,)),
    )
    out: dict[str, tuple[tuple[int, ...], int, int, int]] = {}

    def put(layer: int, name: str, shape: tuple[int, ...], fronts: int = 0, cuts: int = 1) -> None:
        out[f"decoder.layers.{layer}.{name}"] = shape, fronts, cuts, layer

    out["embedding.word_embeddings.weight"] = (vocab, hidden), 0, 1, 0
    for i in range(layers):
        for name, shape in latent:
            put(i, f"{name}_weight" if name.endswith("layer_norm") else f"{name}.weight", shape)
        if i < dense_layers:
            put(i, "mlp.linear_fc1.layer_norm_weight", (hidden,))
            put(i, "mlp.linear_fc1.weight", (36864, hidden), 0, 2)
            put(i, "mlp.linear_fc2.weight", (hidden, 18432))
            continue
        put(i, "pre_mlp_layernorm.weight", (hidden,))
        put(i, "mlp.router.weight", (experts, hidden))
        put(i, "mlp.router.expert_bias", (experts,))
        put(i, "mlp.experts.experts.linear_fc1.weight", (experts, 4096, hidden), 1, 2)
        put(i, "mlp.experts.experts.linear_fc2.weight", (experts, hidden, 2048), 1)
        put(i, "mlp.shared_experts.linear_fc1.weight", (4096, hidden), 0, 2)
        put(i, "mlp.shared_experts.linear_fc2.weight", (hidden, 2048))
    out["decoder.final_layernorm.weight"] = (hidden,), 0, 1, layers - 1
    out["output_layer.weight"] = (vocab, hidden), 0, 1, layers - 1
    return out


_NAMESPACE = _named("argparse", "Namespace")
DEEPSEEK_ARGS = {
    "num_layers": 61,
    "hidden_size": 7168,
    "ffn_hidden_size": 18432,
    "num_attention_heads": 128,
    "num_query_groups": 128,
    "kv_channels": 128,
    "multi_latent_attention": True,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "rope_type": "yarn",
    "rotary_scaling_factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "max_position_embeddings": 163840,
    "position_embedding_type": "rope",
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "swiglu": True,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-6,
    "add_bias_linear": False,
    "qk_layernorm": True,
    "untie_embeddings_and_output_weights": True,
    "vocab_size": 129280,
    "padded_vocab_size": 129280,
    "bf16": True,
    "num_experts": 256,
    "moe_ffn_hidden_size": 2048,
    "moe_shared_expert_intermediate_size": 2048,
    "moe_layer_freq": [0] * 3 + [1] * 58,
    "moe_router_topk": 8,
    "moe_router_num_groups": 8,
    "moe_router_group_topk": 4,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_pre_softmax": True,
    "moe_grouped_gemm": True,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 16,
    "expert_model_parallel_size": 64,
    "expert_tensor_parallel_size": 1,
    "transformer_impl": "transformer_engine",
    "iteration": 1000,
}
"""Arguments of Megatron-LM for such a model, trained on pp 16, ep 64."""


def torch_dist(
    root: Path,
    keys: Mapping[str, tuple[tuple[int, ...], int, int, int]],
    args: Mapping[str, Any] = DEEPSEEK_ARGS,
    *,
    optimizer: bool = False,
) -> None:
    """A save of dist_checkpointing by as many ranks as pp x ep, with FP8's history as entries of their own."""
    pp, ep, layers = args["pipeline_model_parallel_size"], args["expert_model_parallel_size"], args["num_layers"]
    save = root / "iter_0001000"
    save.mkdir(parents=True)
    described: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    ends = [0] * (pp * ep)
    known: dict[tuple[str, tuple[int, ...]], tuple[int, list[tuple[int, bytes]]]] = {}
    files = [(save / f"__{r}_0.distcp").open("wb") for r in range(pp * ep)]

    def chunk(rank: int, dtype: str, shape: tuple[int, ...]) -> Any:
        if (dtype, shape) not in known:
            saved(save / "chunk", tensor(dtype, shape))
            known[dtype, shape] = _literals(save / "chunk", nbytes(dtype, prod(shape)))
            (save / "chunk").unlink()
        size, literals = known[dtype, shape]
        for at, data in literals:
            files[rank].seek(ends[rank] + at)
            files[rank].write(data)
        fields = {
            "relative_path": f"__{rank}_0.distcp",
            "offset": ends[rank],
            "length": size,
            "transform_descriptors": None,
        }
        ends[rank] += size
        return _instance(_INFO, fields)

    def put(fqn: str, dtype: str, key: str) -> None:
        shape, fronts, cuts, layer = keys[key]
        stage = layer * pp // layers
        chunks = []
        each = (*[1] * fronts, shape[fronts] // cuts, *shape[fronts + 1 :])
        for e in range(shape[0] if fronts else 1):
            rank = stage * ep + (e * ep // shape[0] if fronts else len(described) % ep)
            for c in range(cuts):
                offset = (*[e] * fronts, c * each[fronts], *[0] * (len(shape) - fronts - 1))
                chunks.append(_instance(_CHUNK, {"offsets": _Called(_SIZE, offset), "sizes": _Called(_SIZE, each)}))
                index = _instance(_INDEX, {"fqn": fqn, "offset": _Called(_SIZE, offset), "index": None})
                storage[index] = chunk(rank, dtype, each)
        state = (_DTYPES[dtype], _STRIDED, False, _Called(_ENCODING, 0), False)
        fields = {"properties": _instance(_PROPERTIES, {"state": state}), "size": _Called(_SIZE, shape)}
        described[fqn] = _instance(_TENSOR, {**fields, "chunks": chunks})

    def extra(key: str) -> None:
        shape, fronts, _, layer = keys[key]
        for e in range(shape[0] if fronts else 1):
            fqn = f"{key.removesuffix('weight')}_extra_state/shard_{e}_{shape[0] if fronts else 1}"
            rank = layer * pp // layers * ep + (e * ep // shape[0] if fronts else 0)
            described[fqn] = _instance(_BYTES_STORAGE, {})
            index = _instance(_INDEX, {"fqn": fqn, "offset": None, "index": None})
            storage[index] = chunk(rank, "F32", (1,))

    for key in keys:
        put(key, "F32" if key.endswith("expert_bias") else "BF16", key)
        if "linear_" in key and key.endswith(".weight"):
            extra(key)
    for key in keys if optimizer else ():
        chain = 1 if ".experts.experts." in key else 0
        for state in ("param", "exp_avg", "exp_avg_sq") if not key.endswith("expert_bias") else ():
            put(f"chained_{chain}.optimizer.state.{state}.{key}", "F32", key)
    for f, end in zip(files, ends, strict=True):
        f.truncate(end)
        f.close()
    fields = {"state_dict_metadata": described, "planner_data": None, "storage_data": storage}
    value = _instance(_SAVE_METADATA, {**fields, "storage_meta": None, "version": "1.0.0"})
    with _imported(), (save / ".metadata").open("wb") as f:
        pickle.Pickler(f, 4).dump(value)
    group = {"lr": 1e-5, "betas": (0.9, 0.95), "eps": 1e-8, "wd_mult": 1.0, "step": 1000}
    groups = [{**group, "wd_mult": wd, "is_expert_parallel": e} for e in (False, True) for wd in (1.0, 0.0)]
    common: dict[str, Any] = {
        "args": _instance(_NAMESPACE, args),
        "iteration": 1000,
        "content_metadata": {"distrib_optim_sharding_type": "fully_reshardable"},
    }
    if optimizer:
        common["optimizer"] = {i: {"optimizer": {"param_groups": groups[2 * i : 2 * i + 2]}} for i in (0, 1)}
    saved(save / "common.pt", common)
    (save / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (root / "latest_checkpointed_iteration.txt").write_text("1000")


def _literals(path: Path, hole: int) -> tuple[int, list[tuple[int, bytes]]]:
    """(bytes, what of them is not zero) of a file with one storage."""
    size = path.stat().st_size
    with path.open("rb") as f:
        head = f.read(min(size, 4096)) if hole > 1 << 16 else f.read()
        f.seek(max(0, size - 4096))
        tail = f.read() if hole > 1 << 16 else b""
    return size, [(0, head), (size - len(tail), tail)] if tail else [(0, head)]


_NOT = (
    *("multi_latent_attention", "rope_type", "moe_shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank"),
    *("moe_router_num_groups", "moe_router_group_topk", "moe_router_topk_scaling_factor", "rotary_scaling_factor"),
    *("moe_router_score_function", "moe_router_enable_expert_bias"),
)
_QWEN3_MOE = {
    **{n: v for n, v in DEEPSEEK_ARGS.items() if n not in _NOT},
    "num_attention_heads": 8,
    "num_query_groups": 8,
    "moe_layer_freq": 1,
    "vocab_size": 1024,
    "padded_vocab_size": 1024,
    "overlap_grad_reduce": False,
}


def megatron_ranks(
    root: Path, tp: int, pp: int, ep: int, etp: int, layers: int, experts: int, hidden: int = 64, inner: int = 64
) -> None:
    """A save of Megatron-LM's own form, of a Qwen3 with experts: a directory for each rank, with its optimizer."""
    args: dict[str, Any] = {
        **_QWEN3_MOE,
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": inner,
        "moe_ffn_hidden_size": inner,
        "num_experts": experts,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp,
    }
    for stage in range(pp):
        shapes = _of_stage(args, stage)
        for i in range(max(tp, ep * etp)):
            folder = f"mp_rank_{i % tp:02d}" + (f"_{stage:03d}" if pp > 1 else "")
            at = root / "iter_0000100" / (folder + (f"_{i // etp % ep:03d}" if ep > 1 else ""))
            model = OrderedDict((n, tensor("BF16", s)) for n, s in shapes.items())
            spread = [False, True] if ep > 1 else [False]
            value = {
                "args": _instance(_NAMESPACE, args),
                "iteration": 100,
                "model": model,
                "optimizer": [{"optimizer": {"param_groups": [_group(w, x) for w in (1.0, 0.0)]}} for x in spread],
            }
            saved(at / "model_optim_rng.pt", value)
            held = [[s for n, s in shapes.items() if ep == 1 or (".experts." in n) == x] for x in spread]
            saved(
                at / "distrib_optim.pt", [_flat(s) if x or i < tp else None for x, s in zip(spread, held, strict=True)]
            )
    (root / "latest_checkpointed_iteration.txt").write_text("100")


def _of_stage(args: Mapping[str, Any], stage: int) -> Shapes:
    """What each rank of a stage of the pipeline holds."""
    tp, pp, hidden, inner = (args[n] for n in (*_SIZES, "hidden_size", "moe_ffn_hidden_size"))
    ep, etp = args["expert_model_parallel_size"], args["expert_tensor_parallel_size"]
    table = (args["padded_vocab_size"] // tp, hidden)
    out: dict[str, tuple[int, ...]] = {} if stage else {"embedding.word_embeddings.weight": table}
    for i in range(args["num_layers"] // pp):
        b = f"decoder.layers.{i}."
        out |= {f"{b}{n}_layernorm.weight": (hidden,) for n in ("input", "pre_mlp")}
        out |= {f"{b}self_attention.{n}_layernorm.weight": (128,) for n in "qk"}
        out[b + "self_attention.linear_qkv.weight"] = (8 * 3 * 128 // tp, hidden)
        out[b + "self_attention.linear_proj.weight"] = (hidden, 8 * 128 // tp)
        out[b + "mlp.router.weight"] = (args["num_experts"], hidden)
        for e in range(args["num_experts"] // ep):
            out[f"{b}mlp.experts.local_experts.{e}.linear_fc1.weight"] = (2 * inner // etp, hidden)
            out[f"{b}mlp.experts.local_experts.{e}.linear_fc2.weight"] = (hidden, inner // etp)
    last = {"decoder.final_layernorm.weight": (hidden,), "output_layer.weight": table}
    return {**out, **last} if stage == pp - 1 else out


_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size")


def _group(decay: float, spread: bool) -> dict[str, Any]:
    return {"wd_mult": decay, "is_expert_parallel": spread, "lr": 1e-5, "betas": (0.9, 0.95), "eps": 1e-8, "step": 100}


def _flat(shapes: Sequence[tuple[int, ...]]) -> dict[Any, Any]:
    """A buffer of the distributed optimizer."""
    total = 0
    for shape in reversed(shapes):
        total += -total % 64 + prod(shape)
    state = {n: tensor("F32", (total,)) for n in ("param", "exp_avg", "exp_avg_sq")}
    return {0: {(_DTYPES["BF16"], _DTYPES["F32"]): {**state, "numel_unpadded": total}}, "buckets_coalesced": True}
