"""One rank of megatron-core (tests/peers/megatron_cpu.py): a GPTModel of any mesh, its optimizer, and both formats.

What Megatron-LM's training scripts do around megatron-core (names of files, ``common.pt``, the order of loading) is
done here as they do it. Functions that take a ``Case`` are jobs for all ranks of tests/peers/rank_group.py.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import re
import warnings
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.peers.megatron_models import arguments, told
from tests.peers.transformer_engine_cpu import Norm

Held = dict[str, torch.Tensor]
"""Full tensors under Megatron's names with global numbers: ``decoder.layers.3.mlp.linear_fc1.weight``.

Of an optimizer ``master_weights/NAME`` and ``optimizer/exp_avg/NAME``, ``optimizer/exp_avg_sq/NAME``,
``optimizer/step/NAME``."""


@dataclass(frozen=True)
class Case:
    """How a model is trained; ``config`` is the folder of a config.json. As many data-parallel ranks as are left."""

    config: str
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    """As many as ``tp`` where it is None, as in Megatron-LM."""
    vp: int | None = None
    """Stages on each pipeline rank, where they are interleaved."""
    dtype: str = "float32"
    multiple: int = 128
    """make_vocab_size_divisible_by."""
    optimizer: str = ""
    """"", "distributed", or "plain" (every data-parallel rank has all)."""
    transformer: dict[str, Any] = field(default_factory=dict)
    """More fields of TransformerConfig; mtp_num_layers among them."""
    ddp: dict[str, Any] = field(default_factory=dict)
    adam: dict[str, Any] = field(default_factory=dict)
    """More fields of OptimizerConfig."""
    overrides: dict[Any, Any] | None = None
    """Of these by parameter; None as Megatron has them: norms and biases do not decay."""
    seed: int = 0
    te: bool = False
    """Of Transformer Engine's modules, and not of megatron-core's own."""


class Trainer:
    """What one rank has in memory. ``models`` are its stages, ``wrapped`` the same for training."""

    models: list[Any]
    wrapped: list[Any]
    optimizer: Any
    schedule: Any
    args: Any
    """What it saves."""
    saved_args: Any = None
    """What the loaded save has."""
    iteration: int

    def __init__(self, case: Case) -> None:
        from megatron.core.transformer import MLATransformerConfig, TransformerConfig

        _mesh(case)
        self.case, self.iteration = case, 0
        self.hf = json.loads(Path(case.config, "config.json").read_text(encoding="utf-8"))
        self.told = told(self.hf)
        dtype = getattr(torch, case.dtype)
        fields = {
            **self.told.transformer,
            "tensor_model_parallel_size": case.tp,
            "pipeline_model_parallel_size": case.pp,
            "virtual_pipeline_model_parallel_size": case.vp,
            "expert_model_parallel_size": case.ep,
            "expert_tensor_parallel_size": case.etp,
            "params_dtype": dtype,
            "pipeline_dtype": dtype,
            "bf16": case.dtype == "bfloat16",
            "use_cpu_initialization": True,
            "gradient_accumulation_fusion": False,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "deallocate_pipeline_outputs": False,
            "sequence_parallel": case.te and case.tp > 1,  # experts are trained only so
            "moe_grouped_gemm": case.te,
            "layernorm_zero_centered_gamma": case.te and self.hf["model_type"] == "nemotron",
            **case.transformer,
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.config = (MLATransformerConfig if self.told.mla else TransformerConfig)(**fields)
            for name, value in self.told.yarn.items():
                setattr(self.config, name, value)
            unit = case.multiple * case.tp
            self.padded = -(-self.hf["vocab_size"] // unit) * unit
            self.models = [_gpt(self, stage).to(dtype) for stage in range(case.vp or 1)]
        self.args = _args(self, fields)
        _fill(self)
        self.wrapped, self.optimizer, self.schedule = self.models, None, None
        if case.optimizer:
            _train(self)


def _args(made: Trainer, fields: dict[str, Any]) -> Any:
    case, parallel = made.case, {}
    for end in ("first", "last"):
        parallel[f"decoder_{end}_pipeline_num_layers"] = fields.get(f"num_layers_in_{end}_pipeline_stage")
    for kind in ("tensor_model", "pipeline_model", "virtual_pipeline_model", "expert_model", "expert_tensor"):
        parallel[f"{kind}_parallel_size"] = fields[f"{kind}_parallel_size"]
    return arguments(
        made.hf,
        made.told,
        {k: getattr(made.config, k) for k in fields},
        made.padded,
        **parallel,
        context_parallel_size=1,
        world_size=dist.get_world_size(),
        data_parallel_size=dist.get_world_size() // case.tp // case.pp,
        make_vocab_size_divisible_by=case.multiple,
        params_dtype=fields["params_dtype"],
        bf16=case.dtype == "bfloat16",
        fp16=False,
        transformer_impl="transformer_engine" if case.te else "local",
        sequence_parallel=fields["sequence_parallel"],
        use_distributed_optimizer=case.optimizer == "distributed",
        optimizer="adam",
        no_save_optim=None,
        no_save_rng=None,
        iteration=0,
        consumed_train_samples=0,
        consumed_valid_samples=0,
    )


_meshes: dict[Any, dict[str, Any]] = {}
"""What megatron-core keeps of each mesh that was made: making all its groups once more takes longer than most jobs."""


def _mesh(case: Case) -> None:
    from megatron.core import parallel_state as ps

    def kept() -> dict[str, Any]:
        return {k: v for k, v in vars(ps).items() if re.fullmatch(r"_[A-Z_]+", k)}

    if not _meshes:
        # Its writer of torch_dist forks, which ranks of multiprocessing may not unless they say so.
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
        _meshes[None] = kept()
    want = (case.tp, case.pp, case.vp, case.ep, case.etp)
    if want not in _meshes:
        vars(ps).update(_meshes[None])
        ps.initialize_model_parallel(
            case.tp, case.pp, case.vp, expert_model_parallel_size=case.ep, expert_tensor_parallel_size=case.etp
        )
        _meshes[want] = kept()
    vars(ps).update(_meshes[want])


def _gpt(made: Trainer, stage: int) -> Any:
    from megatron.core import parallel_state as ps
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import gpt_layer_specs as specs

    config, vp = made.config, stage if made.case.vp else None
    te = made.case.te
    norm: dict[str, Any] = {} if te else {"normalization": config.normalization}
    if config.num_moe_experts:
        spec = specs.get_gpt_decoder_block_spec(
            config, use_transformer_engine=te, normalization=config.normalization, vp_stage=vp
        )
    else:
        make = specs.get_gpt_layer_with_transformer_engine_spec if te else specs.get_gpt_layer_local_spec
        spec = make(qk_layernorm=config.qk_layernorm, multi_latent_attention=made.told.mla, **norm)
    mtp = None
    if config.mtp_num_layers:
        layers = spec
        if config.num_moe_experts:
            layers = specs.get_gpt_decoder_layer_specs(config, te, normalization=config.normalization)[-1]
        mtp = specs.get_gpt_mtp_block_spec(config, layers, use_transformer_engine=te, vp_stage=vp)
    return GPTModel(
        config,
        spec,
        made.padded,
        made.hf.get("max_position_embeddings") or made.hf["n_positions"],
        pre_process=ps.is_pipeline_first_stage(ignore_virtual=vp is None, vp_stage=vp),
        post_process=ps.is_pipeline_last_stage(ignore_virtual=vp is None, vp_stage=vp),
        parallel_output=True,
        mtp_block_spec=mtp,
        vp_stage=vp,
        **made.told.gpt,
    )


def _fill(made: Trainer) -> None:
    """Random values, of norms and biases, too. By the name: megatron-core's experts are the same on every rank."""
    for tensor, place in places(made):
        seed = zlib.crc32(f"{made.case.seed}/{place.name}/{place.index}".encode())
        values = torch.randn(place.shape, generator=torch.Generator().manual_seed(seed))
        norm = place.name.endswith(("norm.weight", "layernorm.weight")) and not made.args.apply_layernorm_1p
        with torch.no_grad():
            tensor.copy_(values * 0.15 + norm)


def _train(made: Trainer) -> None:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    sharded = made.case.optimizer == "distributed"
    ddp = DistributedDataParallelConfig(
        **{"use_distributed_optimizer": sharded, "grad_reduce_in_fp32": True, **made.case.ddp}
    )
    made.wrapped = [
        DistributedDataParallel(made.config, ddp, model, disable_bucketing=i > 0 or not ddp.overlap_grad_reduce)
        for i, model in enumerate(made.models)
    ]
    adam: dict[str, Any] = {
        "optimizer": "adam",
        "lr": 1e-3,
        "min_lr": 1e-4,
        "weight_decay": 0.1,
        "clip_grad": 0.0,
        "bf16": made.config.bf16,
        "params_dtype": made.config.params_dtype,
        "use_distributed_optimizer": sharded,
    }
    adam |= made.case.adam
    made.optimizer = get_megatron_optimizer(OptimizerConfig(**adam), made.wrapped, made.case.overrides)
    decay = {"start_wd": adam["weight_decay"], "end_wd": adam["weight_decay"]}
    made.schedule = OptimizerParamScheduler(
        made.optimizer, init_lr=0.0, max_lr=adam["lr"], min_lr=adam["min_lr"], lr_warmup_steps=0, lr_decay_steps=1000,
        lr_decay_style="linear", **decay, wd_incr_steps=1000, wd_incr_style="constant",
    )  # fmt: skip
    made.config.finalize_model_grads_func = finalize_model_grads
    made.config.no_sync_func = [m.no_sync for m in made.wrapped] if ddp.overlap_grad_reduce else None
    if made.config.no_sync_func and len(made.wrapped) == 1:
        made.config.no_sync_func = made.config.no_sync_func[0]


def iteration_of(folder: str | Path) -> Path:
    """The newest iteration of a save."""
    tracker = Path(folder, "latest_checkpointed_iteration.txt")
    if not tracker.exists():
        return Path(folder)
    text = tracker.read_text(encoding="utf-8").strip()
    return Path(folder, text if text == "release" else f"iter_{int(text):07d}")


def _legacy_place(case: Case, folder: Path) -> Path:
    from megatron.core import parallel_state as ps

    name = f"mp_rank_{ps.get_tensor_model_parallel_rank():02d}"
    name += f"_{ps.get_pipeline_model_parallel_rank():03d}" * (case.pp > 1)
    name += f"_{ps.get_expert_model_parallel_rank():03d}" * (case.ep > 1)
    return folder / name


def _chunk_key(made: Trainer, i: int) -> str:
    return f"model{i}" if len(made.models) > 1 else "model"


def _metadata(sharding: str, **more: Any) -> dict[str, Any]:
    from megatron.core import parallel_state as ps

    kind = {"distrib_optim_sharding_type": sharding} if sharding else {}
    if sharding == "fully_reshardable":
        kind["distrib_optim_fully_reshardable_mem_efficient"] = False  # type: ignore[assignment]
    group = ps.get_data_parallel_group(with_context_parallel=True)
    return {**kind, "singleton_local_shards": False, "chained_optim_avoid_prefix": True, **more, "dp_cp_group": group}


def save(made: Trainer, folder: str, form: str, sharding: str = "dp_reshardable", **metadata: Any) -> None:
    """As ``--ckpt-format torch`` (``form`` legacy) and ``torch_dist`` do; ``sharding`` and ``metadata`` for torch_dist.

    ``sharding`` is ``distrib_optim_sharding_type``; ``metadata`` what else there is of the kind.
    """
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as ps

    place = Path(folder) / f"iter_{made.iteration:07d}"
    args = made.args
    args.iteration, args.ckpt_format = made.iteration, {"legacy": "torch", "dist": "torch_dist"}[form]
    args.use_dist_ckpt = form == "dist"
    args.dist_ckpt_optim_fully_reshardable = sharding == "fully_reshardable"
    state: dict[str, Any] = {"args": args, "checkpoint_version": 3.0, "iteration": made.iteration}
    meta = _metadata(sharding if made.case.optimizer == "distributed" else "", **metadata)
    for i, model in enumerate(made.models):
        whole = model.sharded_state_dict(metadata=meta) if form == "dist" else model.state_dict_for_save_checkpoint()
        state[_chunk_key(made, i)] = whole
    if made.optimizer is not None:
        if form == "dist":
            state["optimizer"] = made.optimizer.sharded_state_dict(state, metadata=meta)
        else:
            state["optimizer"] = made.optimizer.state_dict()
        state["opt_param_scheduler"] = made.schedule.state_dict()
    state["num_floating_point_operations_so_far"] = 0
    if form == "dist":
        if dist.get_rank() == 0:
            place.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        content = {k: v for k, v in meta.items() if k != "dp_cp_group"}
        dist_checkpointing.save(state, str(place), content_metadata=content)
    else:
        state["rng_state"] = [{"torch_rng_state": torch.get_rng_state()[:16].clone(), "rng_tracker_states": {}}]
        place = _legacy_place(made.case, place)
        place.mkdir(parents=True, exist_ok=True)
        if made.case.optimizer == "distributed":
            made.optimizer.save_parameter_state(str(place / "distrib_optim.pt"))
        if 0 in (ps.get_data_parallel_rank(), ps.get_expert_data_parallel_rank()):
            torch.save(state, place / "model_optim_rng.pt")
    dist.barrier()
    if dist.get_rank() == 0:
        Path(folder, "latest_checkpointed_iteration.txt").write_text(str(made.iteration), encoding="utf-8")


def load(made: Trainer, folder: str) -> None:
    """Load a save of either format, with the optimizer where this run has one.

    Strictly: whatever the model has must be there, and nothing else; Megatron-LM lets a torch_dist save hold more.
    Raises what megatron-core raises.
    """
    place = iteration_of(folder)
    state = _load_dist(made, place) if (place / "metadata.json").exists() else _load_legacy(made, place)
    made.iteration = state["iteration"]
    for i, model in enumerate(made.models):
        missing, unexpected = model.load_state_dict(state[_chunk_key(made, i)], strict=False)
        wrong = [k for k in [*missing, *unexpected] if not k.endswith("_extra_state")]
        if wrong:
            raise ValueError(f"the model and the save differ in {wrong}")
    if made.optimizer is not None:
        made.optimizer.load_state_dict(state["optimizer"])
        if made.case.optimizer == "distributed" and not (place / "metadata.json").exists():
            with torch.no_grad():  # which megatron-core leaves out for models of float32
                made.optimizer.load_parameter_state(str(_legacy_place(made.case, place) / "distrib_optim.pt"))
        made.schedule.load_state_dict(state["opt_param_scheduler"])
    made.saved_args = state.get("args")


def _load_legacy(made: Trainer, place: Path) -> dict[str, Any]:
    state = torch.load(_legacy_place(made.case, place) / "model_optim_rng.pt", map_location="cpu", weights_only=False)
    assert isinstance(state, dict)
    keys = {k for k in state if k.startswith("model")}
    assert keys == {_chunk_key(made, i) for i in range(len(made.models))}, keys
    return state


def _load_dist(made: Trainer, place: Path) -> dict[str, Any]:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    meta = dict(dist_checkpointing.load_content_metadata(str(place)) or {})
    meta |= {"dp_cp_group": _metadata("")["dp_cp_group"]}
    common = dist_checkpointing.load_common_state_dict(str(place))
    state: dict[str, Any] = {
        _chunk_key(made, i): m.sharded_state_dict(metadata=meta) for i, m in enumerate(made.models)
    }
    if made.optimizer is not None:
        state["optimizer"] = made.optimizer.sharded_state_dict(state, is_loading=True, metadata=meta)
    loaded, unasked, lacking = dist_checkpointing.load(state, str(place), strict=StrictHandling.RETURN_ALL)
    # Which modules have an extra state depends on the versions of Megatron Core and Transformer Engine.
    own = ("optimizer.", "chained_") if made.optimizer is None else ()
    unasked = {k for k in unasked if not k.startswith(own) and not k.endswith("._extra_state")}
    if unasked or lacking:
        raise ValueError(f"the model has none of {sorted(unasked)}, and the save has none of {sorted(lacking)}")
    whole: dict[str, Any] = common | loaded
    return whole


def logits(made: Trainer, tokens: list[list[int]]) -> torch.Tensor | None:
    """[batch, sequence, vocabulary without its padding], on rank 0; through all stages in their order.

    With Transformer Engine's modules the length of a row has to divide by ``tp``.
    """
    from megatron.core import parallel_state as ps
    from megatron.core import tensor_parallel

    ids = torch.tensor(tokens)
    positions = torch.arange(ids.shape[1])[None].expand_as(ids)
    future = torch.ones(1, 1, ids.shape[1], ids.shape[1]).tril() < 0.5
    here, stages = ps.get_pipeline_model_parallel_rank(), made.case.pp
    length = ids.shape[1] // (made.case.tp if made.config.sequence_parallel else 1)
    hidden = torch.empty(length, ids.shape[0], made.config.hidden_size, dtype=made.config.params_dtype)
    at = dist.get_process_group_ranks(ps.get_pipeline_model_parallel_group())
    out = None
    with torch.no_grad(), _as_it_computes(made):
        for model in made.models:
            model.eval()
            if model.pre_process:
                given = None
            else:
                dist.recv(hidden, at[(here - 1) % stages])
                given = hidden.clone()
            model.set_input_tensor(given)
            out = model(ids, positions, future)
            if not model.post_process:
                dist.send(out.contiguous(), at[(here + 1) % stages])
        if made.models[-1].post_process:
            assert out is not None
            out = tensor_parallel.gather_from_tensor_model_parallel_region(out)[
                ..., : made.hf["vocab_size"]
            ].contiguous()
    last = at[-1]
    if stages > 1 and ps.get_tensor_model_parallel_rank() == 0 and ps.get_data_parallel_rank() == 0:
        shape = (*ids.shape, made.hf["vocab_size"])
        if dist.get_rank() == last:
            assert out is not None
            dist.send(out, 0)
        elif dist.get_rank() == 0:
            out = torch.empty(shape, dtype=made.config.params_dtype)
            dist.recv(out, last)
    dist.barrier()
    return out if dist.get_rank() == 0 else None


@contextlib.contextmanager
def _as_it_computes(made: Trainer) -> Iterator[None]:
    """Norms that add 1 to their weight (layernorm_zero_centered_gamma) do so here; torch's cannot."""
    changed = made.args.apply_layernorm_1p and not made.case.te
    modules = [m for model in made.models for m in model.modules()] if changed else []
    norms = [m for m in modules if isinstance(m, torch.nn.LayerNorm | Norm)]
    stored = [norm.weight.data for norm in norms]
    for norm in norms:
        norm.weight.data = norm.weight.data + 1
    yield
    for norm, weight in zip(norms, stored, strict=True):
        norm.weight.data = weight


@dataclass(frozen=True)
class Place:
    """A tensor of one rank: part ``index`` of ``ways`` along ``axis`` of the full one, in each of its ``halves``."""

    name: str
    shape: tuple[int, ...]
    index: int
    ways: int
    axis: int
    halves: int


FUSED = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
"""Transformer Engine's norms are part of the layer behind them."""


def places(made: Trainer) -> Iterator[tuple[torch.Tensor, Place]]:
    """The parameters and buffers of this rank under global names; what it has for others alone comes last.

    Those are the embedding's copies for the output and for multi-token prediction, under the embedding's name.
    """
    copies = []
    for model in made.models:
        kept = set(model.state_dict())
        for local, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if local not in kept:
                continue
            place = _place(made, _global(made, model, local), tensor)
            tied = local == "output_layer.weight" and not made.args.untie_embeddings_and_output_weights
            if tied or (local.startswith("embedding.") and not model.pre_process):
                copies.append((tensor, _place(made, "embedding.word_embeddings.weight" if tied else local, tensor)))
            else:
                yield tensor, place
    yield from copies


def _global(made: Trainer, model: Any, local: str) -> str:
    """The name of a tensor in the whole model, as megatron-core's own modules have it."""
    from megatron.core import parallel_state as ps

    for fused, plain in FUSED.items():
        local = local.replace(fused, plain)
    grouped = re.fullmatch(r"(.*\.experts)\.(linear_fc[12])\.(weight|bias)(\d+)", local)
    if grouped:
        local = f"{grouped[1]}.local_experts.{grouped[4]}.{grouped[2]}.{grouped[3]}"
    parts = local.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(model.decoder.layers[int(parts[2])].layer_number - 1)
    if "local_experts" in parts:
        at = parts.index("local_experts") + 1
        before = (made.config.num_moe_experts or 0) // made.case.ep * ps.get_expert_model_parallel_rank()
        parts[at] = str(int(parts[at]) + before)
    return ".".join(parts)


def _place(made: Trainer, name: str, tensor: Any) -> Place:
    from megatron.core import parallel_state as ps

    experts = ".local_experts." in name
    index = ps.get_expert_tensor_parallel_rank() if experts else ps.get_tensor_model_parallel_rank()
    ways = ps.get_expert_tensor_parallel_world_size() if experts else ps.get_tensor_model_parallel_world_size()
    cut, axis = getattr(tensor, "tensor_model_parallel", False), max(getattr(tensor, "partition_dim", 0), 0)
    if experts:  # not all of them are told that they are parts
        cut, axis = not name.endswith("linear_fc2.bias"), int(name.endswith("linear_fc2.weight"))
    elif name.endswith("softmax_offset"):  # neither is this
        cut, axis = True, 0
    halves = 2 if ".linear_fc1." in name and made.config.gated_linear_unit else 1
    if not cut:
        index, ways = 0, 1
    return Place(name, tuple(tensor.shape), index, ways, axis, halves)


@dataclass(frozen=True)
class _Piece:
    """Values of a component ("" is the model) from ``start`` in the flattened tensor of one rank."""

    place: Place
    component: str
    values: torch.Tensor
    start: int = 0


def _chained(made: Trainer) -> list[Any]:
    """The optimizers of a rank: with experts there are two."""
    chained: list[Any] = getattr(made.optimizer, "chained_optimizers", [made.optimizer] if made.optimizer else [])
    return chained


def held(made: Trainer) -> Held:
    """What all ranks together hold, on rank 0; empty on others. What several hold must be the same."""
    there = list(places(made))
    named = {id(tensor): place for tensor, place in there}
    pieces = [_Piece(place, "", tensor.detach().reshape(-1).clone()) for tensor, place in there]
    for sub in _chained(made):
        for param, state, start in states(sub):
            pieces += _components(named[id(param)], param, state, start)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, pieces)
    return _joined([p for pieces in everyone for p in pieces]) if dist.get_rank() == 0 else {}


def states(optimizer: Any) -> Iterator[tuple[torch.Tensor, dict[str, Any], int]]:
    """For each parameter of one optimizer: ``param`` (its master), the moments and the step, and where they begin."""
    groups = {id(p): g for g in optimizer.optimizer.param_groups for p in g["params"]}
    if hasattr(optimizer, "model_param_group_index_map"):
        for param, (group, order) in optimizer.model_param_group_index_map.items():
            main = optimizer.optimizer.param_groups[group]["params"][order]
            start = optimizer._get_model_param_range_map(param)["param"].start
            step = {"step": groups[id(main)]["step"]}
            yield param, step | optimizer._get_main_param_and_optimizer_states(param), start
        return
    pairs = [(p, p) for group in optimizer.optimizer.param_groups for p in group["params"]]
    if hasattr(optimizer, "fp32_from_float16_groups"):
        mixed = zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True)
        pairs = [pair for models, mains in mixed for pair in zip(models, mains, strict=True)]
        pairs += [(p, p) for group in optimizer.fp32_from_fp32_groups for p in group]
    for param, main in pairs:
        yield param, {"step": groups[id(main)]["step"], "param": main, **optimizer.optimizer.state[main]}, 0


def _components(place: Place, param: torch.Tensor, state: Mapping[str, Any], start: int) -> Iterator[_Piece]:
    for key, values in state.items():
        if key == "step":
            scalar = Place(place.name, (), 0, 1, 0, 1)
            yield _Piece(scalar, "optimizer/step/", torch.tensor([float(values)]))
        elif key != "param" or param.dtype != torch.float32:
            component = "master_weights/" if key == "param" else f"optimizer/{key}/"
            yield _Piece(place, component, values.detach().reshape(-1).clone(), start)


def _joined(pieces: list[_Piece]) -> Held:
    parts: dict[str, dict[int, tuple[Place, torch.Tensor, torch.Tensor]]] = {}
    for p in pieces:
        size = torch.Size(p.place.shape).numel()
        new = (p.place, torch.zeros(size, dtype=p.values.dtype), torch.zeros(size, dtype=torch.bool))
        _, flat, seen = parts.setdefault(p.component + p.place.name, {}).setdefault(p.place.index, new)
        inside = slice(p.start, p.start + p.values.numel())
        again = seen[inside]
        if not torch.equal(flat[inside][again], p.values[again]):
            raise ValueError(f"ranks differ in {p.component}{p.place.name}")
        flat[inside], seen[inside] = p.values, True
    out: Held = {}
    for name, locals_ in parts.items():
        place = locals_[0][0]
        whole = [locals_[i] for i in range(place.ways)]
        if not all(bool(seen.all()) for _, _, seen in whole):
            raise ValueError(f"no rank holds all of {name}")
        tensors = [flat.reshape(place.shape) for _, flat, _ in whole]
        halves = (
            zip(*(t.chunk(place.halves, place.axis) for t in tensors), strict=True) if place.ways > 1 else [tensors]
        )
        out[name] = torch.cat([t for half in halves for t in half], place.axis) if place.shape else tensors[0]
    return out


def train(made: Trainer, tokens: list[list[int]], steps: int = 1) -> list[float]:
    """Steps of Megatron's own schedule on a batch (one row for each micro batch; the same for all data-parallel ranks).

    Returns the losses, on every rank of the last stage.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    ids = torch.tensor(tokens)
    length = ids.shape[1] - 1
    losses: list[float] = []

    def forward(batches: Iterator[torch.Tensor], model: Any) -> Any:
        row = next(batches)
        future = torch.ones(1, 1, length, length).tril() < 0.5
        out = model(row[:, :-1], torch.arange(length)[None], future, labels=row[:, 1:])
        return out, lambda t: (t.float().mean(), {"loss": t.detach().float().mean()})

    for _ in range(steps):
        for model in made.wrapped:
            model.train()
            model.zero_grad_buffer()
        made.optimizer.zero_grad()
        feeds = [iter(torch.split(ids, 1)) for _ in made.wrapped]
        done = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=feeds if len(feeds) > 1 else feeds[0],
            model=made.wrapped if len(made.wrapped) > 1 else made.wrapped[0],
            num_microbatches=len(ids),
            seq_length=length,
            micro_batch_size=1,
        )
        worked, _, _ = made.optimizer.step()
        assert worked
        made.schedule.step(increment=len(ids))
        made.iteration += 1
        made.args.consumed_train_samples += len(ids)
        if done:
            losses.append(float(torch.stack([d["loss"] for d in done]).mean()))
    return losses


# Jobs


def load_and_run(case: Case, folder: str, tokens: list[list[int]]) -> torch.Tensor | None:
    """The logits of a save, on rank 0."""
    made = Trainer(case)
    load(made, folder)
    return logits(made, tokens)


def make(
    case: Case, tokens: list[list[int]], folder: str = "", form: str = "legacy", sharding: str = "dp_reshardable",
    steps: int = 0, **metadata: Any,
) -> tuple[torch.Tensor | None, Held]:  # fmt: skip
    """Train a random model for some steps and save it. The logits of all but the last token, and what is held."""
    made = Trainer(case)
    if steps:
        train(made, tokens, steps)
    if folder:
        save(made, folder, form, sharding, **metadata)
    return logits(made, [row[:-1] for row in tokens]), held(made)


def resume(case: Case, folder: str, tokens: list[list[int]], steps: int = 0) -> tuple[Held, Held]:
    """What a run holds that goes on from a save, and what it holds some steps later; on rank 0."""
    made = Trainer(case)
    load(made, folder)
    before = held(made)
    if steps:
        train(made, tokens, steps)
    return before, held(made)


def about(case: Case) -> dict[str, Any]:
    """A case as JSON has it."""
    return asdict(case)
