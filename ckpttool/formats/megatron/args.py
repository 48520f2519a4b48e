"""Megatron's arguments, which lie in every checkpoint, and config.json in Hugging Face's fields.

Source: megatron/training/arguments.py and checkpointing.py (``load_args_from_checkpoint``) of Megatron-LM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpttool.containers.pickle import Global, PickledObject, printable
from ckpttool.core.mesh import Mesh
from ckpttool.errors import CkptError, ConflictError, UnsupportedError
from ckpttool.formats import base
from ckpttool.formats.config import EXPERTS, LAYERS, config_fields, missing_config, ties_head, whole_number
from ckpttool.formats.megatron.fields import Fields, shown
from ckpttool.formats.megatron.models import ModelKind, kind_named, kind_of, refuse_others
from ckpttool.formats.megatron.names import LOCAL, TRANSFORMER_ENGINE
from ckpttool.storage.listing import Listing

ARGS, CONFIG = "args.", "config.json: "
MULTIPLE = 128
"""Megatron's own --make-vocab-size-divisible-by."""
_UNREAD: dict[str, tuple[str, Any]] = {
    "norm_epsilon": ("--norm-epsilon", 1e-5),
    "qk_layernorm": ("--qk-layernorm", False),
    "layernorm_zero_centered_gamma": ("--apply-layernorm-1p", False),
    "use_rope_scaling": ("--use-rope-scaling", False),
    "rope_scaling_factor": ("--rope-scaling-factor", 8.0),
    "rotary_seq_len_interpolation_factor": ("--rotary-seq-len-interpolation-factor", None),
    "rope_type": ("--rope-type", None),
    "rotary_scaling_factor": ("--rotary-scaling-factor", 1.0),
    "yarn_original_max_position_embeddings": ("--yarn-original-max-position-embeddings", None),
    "yarn_beta_fast": ("--yarn-beta-fast", None),
    "yarn_beta_slow": ("--yarn-beta-slow", None),
    "yarn_correction_range_round_to_int": ("--no-yarn-correction-range-round-to-int", True),
    "mscale": ("--mscale", 1.0),
    "mscale_all_dim": ("--mscale-all-dim", 0.0),
    "multi_latent_attention": ("--multi-latent-attention", False),
    "q_lora_rank": ("--q-lora-rank", None),
    "kv_lora_rank": ("--kv-lora-rank", 32),
    "qk_head_dim": ("--qk-head-dim", 128),
    "qk_pos_emb_head_dim": ("--qk-pos-emb-head-dim", 64),
    "v_head_dim": ("--v-head-dim", 128),
    "moe_router_dtype": ("--moe-router-dtype", None),
    "moe_router_num_groups": ("--moe-router-num-groups", None),
    "moe_router_group_topk": ("--moe-router-group-topk", None),
    "moe_shared_expert_gate": ("--moe-shared-expert-gate", False),
    "quick_geglu": ("--quick-geglu", False),
    "glu_linear_offset": ("--glu-linear-offset", 0.0),
    "activation_func_clamp_value": ("--activation-func-clamp-value", None),
    "softmax_type": ("--softmax-type", "vanilla"),
    "window_size": ("--window-size", None),
    "window_attn_skip_freq": ("--window-attn-skip-freq", None),
    "apply_rope_fusion": ("--no-rope-fusion", True),
    "bias_gelu_fusion": ("--no-bias-gelu-fusion", True),
}
"""Arguments of a model that ``load_args_from_checkpoint`` leaves as they are: the option, and what is meant without."""
_STRUCTURE = (
    *("swiglu", "squared_relu", "quick_geglu", "normalization", "qk_layernorm"),
    *("position_embedding_type", "rotary_interleaved", "multi_latent_attention"),
)
"""Arguments by which models differ that have the same sizes."""
_BIASES = ("add_qkv_bias", "add_bias_linear")
"""Either gives the queries, keys and values biases."""
_TORCH = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def plain_args(value: Any) -> dict[str, Any]:
    """The arguments of a save; {} where it has none."""
    return dict(value.fields) if isinstance(value, PickledObject) and value.cls == "argparse.Namespace" else {}


def model_config(listing: Listing, args: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """config.json of a save, in Hugging Face's fields, and notes: the file in ``listing``, else made of ``args``; {}
    where there is neither.

    Raises ConflictError where the file and the arguments contradict each other, UnsupportedError for arguments of a
    model that Hugging Face's code would compute otherwise, CorruptError for values of a wrong kind.
    """
    config, a = listing.json("config.json"), Fields(args, ARGS)
    if config and args:
        kind = kind_named(str(config_fields(config).get("model_type", "")))
        _check_sizes(config, a, str(listing.path("config.json")))
        if kind is not None:
            refuse_others(a, kind.translates)
            _check_kind(kind, config, a, str(listing.path("config.json")))
    if config or not args:
        return config, []
    notes = []
    kind = kind_of(a)
    made = kind.config(a)
    if "vocab_size" not in a:
        rows = made["vocab_size"]
        notes.append(f"`args.vocab_size` is not there: all {rows} rows of the padded vocabulary are taken for tokens")
    dtype = args.get("params_dtype")
    if isinstance(dtype, Global) and dtype.module == "torch" and dtype.name in _TORCH.values():
        made["torch_dtype"] = dtype.name
    notes.append(f"config.json is missing: generated one for {kind.architecture} from Megatron's arguments")
    return made, notes


def _check_sizes(config: Mapping[str, Any], a: Fields, where: str) -> None:
    """Raises ConflictError where config.json and the arguments give different sizes."""
    pairs: dict[str, tuple[str, ...]] = {
        "num_layers": LAYERS,
        "hidden_size": ("hidden_size", "n_embd"),
        "num_attention_heads": ("num_attention_heads", "n_head"),
        "num_experts": EXPERTS,
        "moe_ffn_hidden_size": ("moe_intermediate_size",),
    }
    if not a.whole("num_experts"):
        pairs["ffn_hidden_size"] = ("intermediate_size", "n_inner")
        pairs.pop("moe_ffn_hidden_size")
    if whole_number(config, "kv_lora_rank") is None:
        pairs["kv_channels"] = ("head_dim",)
        if a.flag("group_query_attention"):
            pairs["num_query_groups"] = ("num_key_value_heads",)
    else:
        pairs["kv_lora_rank"] = ("kv_lora_rank",)
        if not a.flag("multi_latent_attention"):
            pairs.pop("kv_lora_rank")  # Megatron's default, which means nothing
    for name, fields in pairs.items():
        here, there = a.whole(name), whole_number(config, *fields)
        if here is not None and there is not None and here != there:
            field = next(f for f in fields if whole_number(config, f) is not None)
            raise _conflict(a, name, f"`{field}` of config.json is {there}", where)
    rows, padded = whole_number(config, "vocab_size"), a.whole("padded_vocab_size")
    if rows is not None and padded is not None and rows > padded:
        raise _conflict(a, "padded_vocab_size", f"`vocab_size` of config.json is {rows}", where)


def _check_kind(kind: ModelKind, config: Mapping[str, Any], a: Fields, where: str) -> None:
    """Raises ConflictError where config.json is of a model that has other tensors, or computes otherwise with them."""
    try:
        meant = kind.args(Fields(config_fields(config), CONFIG))
    except CkptError:
        return  # only who writes Megatron's files needs them all
    other = f"a {printable(str(config_fields(config).get('model_type')), 40)} as config.json describes it has"
    for name in _STRUCTURE:
        here, there = a.values.get(name), meant.get(name)
        if here is not None and there is not None and here != there:
            raise _conflict(a, name, f"{other} {shown(there)} there", where)
    if "num_experts" in a.values and bool(a.values["num_experts"]) != bool(meant.get("num_experts")):
        raise _conflict(a, "num_experts", f"{other} {meant.get('num_experts')}", where)
    if all(n in a.values for n in _BIASES) and any(map(a.flag, _BIASES)) != any(map(meant.get, _BIASES)):
        name = next((n for n in _BIASES if a.flag(n)), _BIASES[0])
        raise _conflict(a, name, f"{other} {shown(meant.get(name))} there", where)


def _conflict(a: Fields, name: str, other: str, where: str) -> ConflictError:
    hint = "put the config.json of this model there, or remove it"
    return ConflictError(f"{a.shown(name)}, and {other}", where=where, hint=hint)


def args_of(request: base.WriteRequest, rows: int, *, grouped: bool = False, dist: bool = False) -> dict[str, Any]:
    """The arguments of the model and the mesh that ``request`` describes.

    ``rows`` are those of the padded vocabulary. ``grouped``: experts have the names of TEGroupedMLP. ``dist``:
    torch_dist.
    What ``load_args_from_checkpoint`` reads, and plain values only. Raises UnsupportedError for a model or a mesh that
    Megatron does not compute, LayoutError without config.json.
    """
    config = config_fields(request.config)
    if not config:
        raise missing_config("Megatron's arguments are made from it", request.source and request.source.root)
    c = Fields(config, CONFIG)
    kind = kind_named(str(config.get("model_type", "")))
    if kind is None:
        raise c.no("model_type", "Megatron's arguments for such a model are not known")
    mesh = request.requested
    model = kind.args(c)
    _check_mesh(model, mesh)
    vocab = c.whole("vocab_size", least=1) or rows
    version = request.version or TRANSFORMER_ENGINE
    return {
        **model,
        "mtp_num_layers": _prediction_layers(request) or None,
        "untie_embeddings_and_output_weights": not _tied(request, default=kind.tied),
        "vocab_size": vocab,
        "padded_vocab_size": rows,
        "make_vocab_size_divisible_by": _multiple(vocab, rows, mesh.tp),
        **_precision(request, config),
        **_parallel(mesh),
        "moe_grouped_gemm": grouped and bool(model["num_experts"]),
        "transformer_impl": version,
        "use_mcore_models": True,
        "no_persist_layer_norm": version == LOCAL,
        "ckpt_format": "torch_dist" if dist else "torch",
        "use_dist_ckpt": dist,
        "use_distributed_optimizer": any(t.component == "optimizer" for ts in request.ranks for t in ts),
        **_progress(request.training),
    }


def options(args: Mapping[str, Any]) -> list[str]:
    """The options that a run needs besides --use-checkpoint-args to be of the model that ``args`` describe."""
    out = []
    for name, (option, default) in _UNREAD.items():
        value = args.get(name, default)
        if value is None or value == default:
            continue
        if isinstance(value, (list, tuple)):
            many = ",".join(map(str, value))
            out.append(f"{option} {many if name == 'window_size' else f'[{many}]'}")
        else:
            out.append(option if isinstance(value, bool) else f"{option} {value}")
    return out


def _prediction_layers(request: base.WriteRequest) -> int:
    """Layers of multi-token prediction among the tensors: config.json may speak of some that nobody saved."""
    return len({t.name for ts in request.ranks for t in ts if t.name.endswith(".eh_proj.weight")})


def _tied(request: base.WriteRequest, *, default: bool) -> bool:
    """Whether the head is the embedding; with several stages there is a copy of it all the same."""
    said = ties_head(request.config)
    if said is not None:
        return said
    names = {t.name for ts in request.ranks for t in ts if t.component == "model"}
    return default or bool(names and request.complete and "output_layer.weight" not in names)


def _multiple(vocab: int, rows: int, tp: int) -> int:
    """--make-vocab-size-divisible-by that makes ``rows`` of ``vocab``."""
    for n in (MULTIPLE, *(1 << i for i in range(16, -1, -1))):
        if -(-vocab // (n * tp)) * n * tp == rows:
            return n
    return max(rows // tp, 1)


def _precision(request: base.WriteRequest, config: Mapping[str, Any]) -> dict[str, Any]:
    found = {t.dtype for ts in request.ranks for t in ts if t.component == "model"} & set(_TORCH)
    said = _TORCH.get(request.dtype) or str(config.get("torch_dtype") or config.get("dtype") or "")
    half = next((d for d in ("BF16", "F16") if d in found), "F32" if found else "")
    name = _TORCH.get(half) or (said if said in _TORCH.values() else "float32")
    dtype = Global("torch", name)
    return {"params_dtype": dtype, "bf16": name == "bfloat16", "fp16": name == "float16"}


def _parallel(mesh: Mesh) -> dict[str, Any]:
    stages = mesh.layout
    out: dict[str, Any] = {
        "tensor_model_parallel_size": mesh.tp,
        "pipeline_model_parallel_size": mesh.pp,
        "transformer_pipeline_model_parallel_size": mesh.pp,
        "virtual_pipeline_model_parallel_size": None,
        "num_layers_per_virtual_pipeline_stage": None,
        "context_parallel_size": 1,
        "expert_model_parallel_size": mesh.ep,
        "expert_tensor_parallel_size": mesh.etp,
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
        "pipeline_model_parallel_layout": None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
        "world_size": mesh.world,
        "data_parallel_size": max(mesh.world // (mesh.tp * mesh.pp), 1),
        "rank": 0,
    }
    turns = len(stages) // mesh.pp if stages else 1
    uneven = len(set(stages)) > 1
    if turns > 1:
        out["virtual_pipeline_model_parallel_size"] = turns
        out["num_layers_per_virtual_pipeline_stage"] = None if uneven else stages[0]
    if uneven and turns == 1 and len(set(stages[1:-1])) <= 1:
        out |= {"decoder_first_pipeline_num_layers": stages[0], "decoder_last_pipeline_num_layers": stages[-1]}
    elif uneven:
        texts = ["t" * n for n in stages]
        out["pipeline_model_parallel_layout"] = "|".join(["E" + texts[0], *texts[1:-1], texts[-1] + "L"])
    return out


def _check_mesh(model: Mapping[str, Any], mesh: Mesh) -> None:
    """Raises UnsupportedError for ranks among which Megatron does not share out the heads."""
    heads, groups, tp = model["num_attention_heads"], model["num_query_groups"], mesh.tp
    if heads % tp:
        raise UnsupportedError(
            f"{heads} heads cannot be split evenly across {tp} ranks", hint="choose another --tp-out"
        )
    if groups % tp and tp % groups:
        raise UnsupportedError(
            f"Megatron does not share {groups} key/value heads among {tp} ranks: neither is a multiple of the other",
            hint="choose another --tp-out",
        )


def _progress(training: base.TrainingState | None) -> dict[str, Any]:
    """How far the training is."""
    plain = training.plain if training else {}
    out: dict[str, Any] = {"iteration": 0, "consumed_train_samples": 0, "consumed_valid_samples": 0}
    if training and training.step:
        out["iteration"] = training.step
    for name in out:
        if type(got := plain.get(name)) is int:
            out[name] = got
    return out
