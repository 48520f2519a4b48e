"""The model that megatron-core makes of ckpttool's arguments computes what transformers' model of the config does.

So does transformers' model of the config that ckpttool makes of these arguments. Weights go through the naming of the
family, without files.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from ckpttool.dialects.family import FamilyDialect
from ckpttool.formats.megatron.fields import Fields
from ckpttool.formats.megatron.models import kind_named, kind_of
from ckpttool.layout.family import find_family, load_family
from ckpttool.planning.relate import apply_transforms, identity
from tests.helpers.arrays import catalog_of, materialise
from tests.helpers.tiny_models import TOKENS, save_tiny
from tests.peers.megatron_ranks import Case, _mesh
from tests.peers.rank_group import Group

pytestmark = pytest.mark.usefixtures("megatron")

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16}
LATENT_YARN = {**YARN, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 8192
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
ROUTED = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "attention_bias": False}
# variant of tests/helpers/tiny_models.py, and its fields that are changed
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama_tied", {}),
    ("llama", {"num_key_value_heads": 1, "rope_parameters": LLAMA3}),
    ("llama", {"num_key_value_heads": 4, "rope_parameters": {**PLAIN, "rope_type": "linear", "factor": 4.0}}),
    ("llama", {"rope_parameters": {**YARN, "mscale": 0.5, "mscale_all_dim": 0.8}, "rms_norm_eps": 1e-3}),
    ("mistral", {}),
    ("mistral", {"sliding_window": 3}),
    ("phi3", {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}}),
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True, "rope_parameters": {**PLAIN, "rope_theta": 1e6}}),
    ("qwen3", {}),
    ("qwen3", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    ("qwen3_moe", {"norm_topk_prob": True}),
    ("qwen3_moe", {"norm_topk_prob": False, "mlp_only_layers": []}),
    ("qwen2_moe", {"norm_topk_prob": True}),
    ("qwen2_moe", {"norm_topk_prob": False, "qkv_bias": False, "mlp_only_layers": []}),
    ("mixtral", {}),
    ("mixtral", {"sliding_window": 4, "head_dim": 24, "num_experts_per_tok": 3}),
    ("deepseek_v2", {"mlp_bias": False, "topk_method": "greedy"}),
    (
        "deepseek_v2_lite",
        {"mlp_bias": False, "topk_group": 1, "num_experts_per_tok": 1, "rope_parameters": LATENT_YARN},
    ),
    ("deepseek_v3", ROUTED),
    ("deepseek_v3", {**ROUTED, "q_lora_rank": None, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1}),
    ("deepseek_v3", {**ROUTED, "rope_parameters": LATENT_YARN, "routed_scaling_factor": 1.0, "n_shared_experts": 1}),
    ("glm4_moe", {}),
    ("glm4_moe", {"attention_bias": False, "use_qk_norm": False, "rope_parameters": PLAIN, **ROUTED}),
    ("gpt_oss", {"sliding_window": 4, "rope_parameters": {**YARN, "truncate": False}}),
    ("gpt_oss", {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 3}),
    ("ernie4_5", {}),
    ("ernie4_5", {"use_bias": False, "tie_word_embeddings": True}),
    ("nemotron", {}),
    ("nemotron_tied", {}),
    ("gpt2", {}),
    ("gpt2", {"activation_function": "gelu", "tie_word_embeddings": False, "n_inner": None}),
    ("gpt_neox", {"use_parallel_residual": False}),
    ("gpt_neox", {"use_parallel_residual": False, "hidden_act": "gelu_new", "tie_word_embeddings": True}),
]


@pytest.mark.parametrize(
    ("variant", "fields"), CASES, ids=lambda v: v if isinstance(v, str) else " ".join(v) or "plain"
)
def test_logits(variant: str, fields: dict[str, Any], ranks: Callable[[int], Group], tmp_path: Path) -> None:
    from safetensors.numpy import load_file
    from transformers import AutoModelForCausalLM

    source = save_tiny(variant, tmp_path / "hf", **fields)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    kind = kind_named(config["model_type"])
    assert kind is not None
    tied = bool(config["tie_word_embeddings"])
    args = {
        **kind.args(Fields(config, "config.json: ")),
        "mtp_num_layers": None,  # transformers' model has none, whatever its config says
        "vocab_size": config["vocab_size"],
        "untie_embeddings_and_output_weights": not tied,
    }
    named = of_megatron(load_file(source / "model.safetensors"), config)
    # gpt-oss as it is run here; every other attention is the same in eager mode
    options: Any = {"attn_implementation": "eager", "dtype": torch.float32, "experts_implementation": "eager"}
    want = of_transformers(AutoModelForCausalLM.from_pretrained(source, **options))
    got = torch.from_numpy(ranks(1).run(compute, args, named, TOKENS))
    assert want.abs().max() > 0.1
    assert (got - want).abs().max() < 2e-5 * max(1.0, float(want.abs().max()))
    back = kind_of(Fields(args, "args.")).config(Fields(args, "args."))
    if back["model_type"] == config["model_type"]:
        (source / "config.json").write_text(json.dumps(back), encoding="utf-8")
        again = of_transformers(AutoModelForCausalLM.from_pretrained(source, **options))
        assert (again - want).abs().max() < 1e-6 * max(1.0, float(want.abs().max()))
    else:
        assert (config["model_type"], back["model_type"]) in {("mistral", "llama"), ("phi3", "llama")}


def of_transformers(model: Any) -> torch.Tensor:
    with torch.no_grad():
        out = model.eval()(torch.tensor(TOKENS)).logits
    assert isinstance(out, torch.Tensor)
    return out


def of_megatron(tensors: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """The tensors of a model under Megatron's names."""
    family = load_family(find_family(config) or "", config)
    catalog, arrays = catalog_of({n: t.shape for n, t in tensors.items()})
    views = apply_transforms(identity(catalog), FamilyDialect("megatron").statements(family), family)
    flat = np.concatenate([t.reshape(-1) for t in tensors.values()])
    return {v.name: flat[materialise(v, arrays)] for v in views}


def compute(args: dict[str, Any], tensors: dict[str, Any], tokens: list[list[int]]) -> Any:
    """Logits of megatron-core, of a model built as Megatron-LM builds it of its arguments."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import gpt_layer_specs as specs

    _mesh(Case(""))
    config = transformer_config(args)
    norm = config.normalization
    if config.num_moe_experts:
        spec = specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=norm)
    else:
        spec = specs.get_gpt_layer_local_spec(
            qk_layernorm=config.qk_layernorm, multi_latent_attention=args["multi_latent_attention"], normalization=norm
        )
    rotary = args["position_embedding_type"] != "learned_absolute"
    model = GPTModel(
        config,
        spec,
        args["vocab_size"],
        args["max_position_embeddings"],
        position_embedding_type=args["position_embedding_type"],
        share_embeddings_and_output_weights=not args["untie_embeddings_and_output_weights"],
        rotary_percent=args.get("rotary_percent", 1.0),
        rotary_base=args.get("rotary_base", 10000),
        rope_scaling=args.get("use_rope_scaling", False),
        rope_scaling_factor=args.get("rope_scaling_factor", 8.0),
        seq_len_interpolation_factor=args.get("rotary_seq_len_interpolation_factor") if rotary else None,
        parallel_output=False,
    )
    there = dict([*model.named_parameters(), *model.named_buffers()])
    there = {n: t for n, t in there.items() if n in model.state_dict()}
    assert there.keys() == tensors.keys(), there.keys() ^ tensors.keys()
    with torch.no_grad():
        for name, tensor in there.items():
            assert tuple(tensor.shape) == tensors[name].shape, name
            one = 1 if args["layernorm_zero_centered_gamma"] and "norm" in name and name.endswith("weight") else 0
            tensor.copy_(torch.from_numpy(tensors[name]) + one)
        ids = torch.tensor(tokens)
        positions = torch.arange(ids.shape[1])[None].expand_as(ids)
        future = torch.ones(1, 1, ids.shape[1], ids.shape[1]).tril() < 0.5
        return model.eval()(ids, positions, future).numpy()


def transformer_config(args: dict[str, Any]) -> Any:
    """What ``core_transformer_config_from_args`` of Megatron-LM makes of arguments."""
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    cls = MLATransformerConfig if args["multi_latent_attention"] else TransformerConfig
    fields: dict[str, Any] = {f.name: args[f.name] for f in dataclasses.fields(cls) if f.name in args}
    fields["num_moe_experts"] = args["num_experts"]
    fields["num_query_groups"] = args["num_query_groups"] if args["group_query_attention"] else None
    if args["swiglu"]:
        fields |= {"activation_func": functional.silu, "gated_linear_unit": True}
    elif args["quick_geglu"]:
        fields |= {"activation_func": quick_gelu, "gated_linear_unit": True}
    elif args["squared_relu"]:
        fields["activation_func"] = lambda x: functional.relu(x).square()
    else:
        fields["bias_activation_fusion"] = args.get("bias_gelu_fusion", True)
    fields |= {
        "layernorm_zero_centered_gamma": False,  # torch's norms have none: it is added to the weights
        "use_cpu_initialization": True,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "allgather",
    }
    out = cls(**fields)
    if args["position_embedding_type"] == "yarn" and not args["multi_latent_attention"]:
        names = {f"yarn_{n}": f"yarn_{n}" for n in ("original_max_position_embeddings", "beta_fast", "beta_slow")}
        names |= {f"yarn_{n}": n for n in ("rotary_scaling_factor", "mscale", "mscale_all_dim")}
        names["yarn_correction_range_round_to_int"] = "yarn_correction_range_round_to_int"
        for name, argument in names.items():
            setattr(out, name, args[argument])
    return out
