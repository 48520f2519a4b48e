"""Megatron's arguments and config.json, one made from the other; what one of them cannot say is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import ckpttool
from ckpttool.containers.pickle import Global, PickledObject
from ckpttool.containers.torch_zip import read_torch
from ckpttool.errors import CkptError, ConflictError, CorruptError, IncompleteError, UnsupportedError
from ckpttool.formats.megatron.args import model_config, options, plain_args
from ckpttool.formats.megatron.fields import Fields
from ckpttool.formats.megatron.models import KINDS, NEUTRAL, kind_named, kind_of, sparse_layers
from ckpttool.storage.listing import Listing, list_source
from tests.helpers.tensorfile import origin, save_hf
from tests.helpers.tiny_names import family_lists

TESTS = Path(__file__).parents[1]
YARN = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256, "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
    "topk_method": "noaux_tc", "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
    "norm_topk_prob": True, "scoring_func": "sigmoid", "num_nextn_predict_layers": 1, "hidden_act": "silu",
    "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "rope_theta": 10000, "attention_bias": False,
    "tie_word_embeddings": False, "rope_scaling": {**YARN, "original_max_position_embeddings": 4096},
}  # fmt: skip
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 8192,
    "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
    "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192},
}  # fmt: skip
GLM: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "vocab_size": 151552, "hidden_size": 5120,
    "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 92, "num_attention_heads": 96,
    "num_key_value_heads": 8, "head_dim": 128, "n_shared_experts": 1, "n_routed_experts": 160, "n_group": 1,
    "topk_group": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1, "use_qk_norm": True, "attention_bias": True,
    "partial_rotary_factor": 0.5, "rope_theta": 1000000, "rope_scaling": None, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880,
    "intermediate_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8,
    "head_dim": 64, "num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128, "swiglu_limit": 7.0,
    "layer_types": ["sliding_attention", "full_attention"] * 18, "attention_bias": True, "hidden_act": "silu",
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 150000, "tie_word_embeddings": False,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                     "original_max_position_embeddings": 4096},
}  # fmt: skip
NEMOTRON: dict[str, Any] = {
    "architectures": ["NemotronForCausalLM"], "model_type": "nemotron", "vocab_size": 256000, "hidden_size": 18432,
    "intermediate_size": 73728, "num_hidden_layers": 96, "num_attention_heads": 96, "num_key_value_heads": 8,
    "head_dim": 192, "hidden_act": "relu2", "max_position_embeddings": 4096, "norm_eps": 1e-5, "rope_theta": 10000,
    "partial_rotary_factor": 0.5, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
}  # fmt: skip
MISTRAL: dict[str, Any] = {
    **{k: v for k, v in LLAMA.items() if k not in ("attention_bias", "mlp_bias", "rope_scaling")},
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 4096,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12,
    "n_positions": 1024, "vocab_size": 50257, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new",
    "tie_word_embeddings": True,
}  # fmt: skip
PHI3: dict[str, Any] = {
    **{k: v for k, v in LLAMA.items() if k not in ("attention_bias", "mlp_bias", "rope_scaling")},
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "partial_rotary_factor": 0.75,
}  # fmt: skip
NEOX: dict[str, Any] = {
    "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "vocab_size": 50432, "hidden_size": 768,
    "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12, "hidden_act": "gelu",
    "max_position_embeddings": 2048, "layer_norm_eps": 1e-5, "rotary_pct": 0.25, "use_parallel_residual": False,
    "tie_word_embeddings": False,
}  # fmt: skip
OWN = {
    "Llama-3.1-70B": LLAMA, "Mistral-7B-v0.1": MISTRAL, "DeepSeek-V3": DEEPSEEK, "GLM-4.5": GLM, "gpt-oss": GPT_OSS,
    "Nemotron-4-340B": NEMOTRON, "gpt2": GPT2, "Phi-4-mini": PHI3, "gpt-neox": NEOX,
    "linear": {**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "new form": {**{k: v for k, v in LLAMA.items() if "rope" not in k}, "head_dim": 72,
                 "rope_parameters": {**LLAMA["rope_scaling"], "rope_theta": 5e5}},
    "biases": {**LLAMA, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 64},
    "V2-Lite": {
        **{k: v for k, v in DEEPSEEK.items() if k not in ("scoring_func", "num_nextn_predict_layers")},
        "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "q_lora_rank": None,
        "topk_method": "greedy", "norm_topk_prob": False, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    },
    "no groups": {**DEEPSEEK, "n_group": 1, "topk_group": 1, "rope_scaling": None, "num_nextn_predict_layers": 0},
    "mscale": {**DEEPSEEK, "rope_scaling": {**DEEPSEEK["rope_scaling"], "mscale": 0.707, "mscale_all_dim": 0.707}},
    "Qwen3-235B": {
        **{k: v for k, v in LLAMA.items() if k not in ("mlp_bias", "rope_scaling")}, "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "moe_intermediate_size": 1536, "head_dim": 128, "mlp_only_layers": [], "decoder_sparse_step": 1,
    },
    "Qwen2-MoE": {
        **{k: v for k, v in LLAMA.items() if k not in ("mlp_bias", "rope_scaling", "attention_bias")},
        "model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"], "num_experts": 60, "qkv_bias": True,
        "num_experts_per_tok": 4, "norm_topk_prob": False, "moe_intermediate_size": 1408, "mlp_only_layers": [0, 3],
        "shared_expert_intermediate_size": 5632,
    },
}  # fmt: skip


def configs() -> dict[str, dict[str, Any]]:
    """Published ones of the repository's tests, and those above."""
    files = [TESTS / "size/data/configs.json", TESTS / "layout/data/shapes/published.json"]
    out = {n: v.get("config", v) for f in files for n, v in json.loads(f.read_text(encoding="utf-8")).items()}
    known = {n: c for n, c in out.items() if kind_named(c.get("model_type", ""))}
    for name in ("DeepSeek-V2", "DeepSeek-V2-Lite"):
        known[name] |= {"num_experts_per_tok": 6, "topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3}
    return known | OWN


REFUSED = {
    "gpt-neox-20b": "use_parallel_residual",
    "DeepSeek-V2": "topk_group",
    "DeepSeek-V2-Lite": "topk_group",
}
"""What Megatron does not compute, by the field that says so."""
NAMES = {"phi3": "llama", "mistral": "llama"}
"""Kinds of which Megatron's arguments are another's (a Mistral without a window)."""


def args_of(config: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Of a save of such a model."""
    kind = kind_named(config["model_type"])
    assert kind is not None
    tied = config.get("tie_word_embeddings", config["model_type"] == "gpt2")
    made = kind.args(Fields(config, "config.json: "))
    return {**made, "untie_embeddings_and_output_weights": not tied, "vocab_size": config["vocab_size"], **more}


def config_of(args: dict[str, Any]) -> dict[str, Any]:
    a = Fields(args, "args.")
    return kind_of(a).config(a)


@pytest.mark.parametrize("name", configs())
def test_a_published_config_comes_back(name: str) -> None:
    config = configs()[name]
    if field := REFUSED.get(name):
        with pytest.raises(UnsupportedError, match=field):
            args_of(config)
        return
    args = args_of(config)
    got = config_of(args)
    same = got["model_type"] == config["model_type"]
    assert same or got["model_type"] == NAMES[config["model_type"]]
    skip = {
        "rope_scaling",
        "rope_parameters",
        "quantization_config",
        *(() if same else ("architectures", "model_type")),
    }
    said = {k: v for k, v in config.items() if v is not None and k not in skip}
    assert {k: got.get(k) for k in said if k in got} == {k: v for k, v in said.items() if k in got}
    assert set(said) - set(got) <= {"swiglu_limit", "sliding_window", "torch_dtype"}
    assert args_of(got) == args


@pytest.mark.parametrize("name", [n for n, c in OWN.items() if c.get("rope_scaling")])
def test_scaled_positions_come_back(name: str) -> None:
    want = dict(OWN[name]["rope_scaling"])
    want["rope_type"] = want.pop("type", None) or want["rope_type"]
    assert config_of(args_of(OWN[name]))["rope_scaling"] == want


def test_yarn_that_scales_by_one_number_only() -> None:
    scaling = {**DEEPSEEK["rope_scaling"], "mscale_all_dim": 0.0, "mscale": 0.5}
    args = args_of(DEEPSEEK) | {"mscale": 0.5, "mscale_all_dim": 0.0}
    got = config_of(args)["rope_scaling"]
    assert got["attention_factor"] == pytest.approx(0.1 * 0.5 * 3.6888794541139363 + 1.0)
    assert got["mscale_all_dim"] == 0.0
    assert "mscale" not in got
    back = args_of({**DEEPSEEK, "rope_scaling": got})
    assert back["mscale"] == pytest.approx(scaling["mscale"])


OTHER: dict[str, Any] = {
    "moe_router_load_balancing_type": ["aux_loss", "sinkhorn"],
    "softmax_type": "off-by-one",
    "moe_router_topk_scaling_factor": 2.5,
    "glu_linear_offset": 1.0,
    "window_size": "everything",
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_what_config_json_cannot_say_is_refused(name: str) -> None:
    """Each argument, of each kind of model that does not translate it."""
    value = OTHER.get(name, True if NEUTRAL[name] == (False,) else 3)
    choosing = {"quick_geglu", "squared_relu", "multi_latent_attention", "softmax_type", "window_size"}
    for config in OWN.values():
        kind = kind_named(config["model_type"])
        assert kind is not None
        if name in kind.translates or name in choosing:
            continue
        plain = args_of(config)
        config_of(plain | {name: None} | dict.fromkeys(NEUTRAL.keys() - kind.translates - plain.keys()))
        with pytest.raises(UnsupportedError, match=f"args.{name}"):
            kind.config(Fields(plain | {name: value}, "args."))


@pytest.mark.parametrize(
    ("base", "changes", "name"),
    [
        (OWN["Qwen3-235B"], {"rotary_percent": 0.5}, "rotary_percent"),
        (LLAMA, {"normalization": "LayerNorm"}, "normalization"),
        (LLAMA, {"position_embedding_type": "relative"}, "position_embedding_type"),
        (LLAMA, {"window_size": (10, 3)}, "window_size"),
        (NEMOTRON, {"apply_layernorm_1p": False, "layernorm_zero_centered_gamma": False}, "apply_layernorm_1p"),
        (OWN["Qwen3-235B"], {"add_qkv_bias": True}, "add_qkv_bias"),
        (OWN["Qwen3-235B"], {"qk_layernorm": False, "moe_router_pre_softmax": True}, "moe_router_pre_softmax"),
        (DEEPSEEK, {"qk_layernorm": False}, "qk_layernorm"),
        (DEEPSEEK, {"moe_router_enable_expert_bias": False}, "moe_router_enable_expert_bias"),
        (DEEPSEEK, {"moe_router_group_topk": 2}, "moe_router_group_topk"),
        (DEEPSEEK, {"moe_layer_freq": [0, 1, 0] + [1] * 58}, "moe_layer_freq"),
        (DEEPSEEK, {"moe_shared_expert_intermediate_size": 2049}, "moe_shared_expert_intermediate_size"),
        (DEEPSEEK, {"num_experts": None}, "multi_latent_attention"),
        (GPT_OSS, {"activation_func_clamp_value": 5.0}, "activation_func_clamp_value"),
        (GPT_OSS, {"glu_linear_offset": 0.0}, "glu_linear_offset"),
        (GPT2, {"add_bias_linear": False}, "add_bias_linear"),
        (GPT2, {"num_query_groups": 3, "group_query_attention": True}, "num_query_groups"),
        (GPT2, {"openai_gelu": True, "bias_gelu_fusion": False}, "openai_gelu"),
    ],
)
def test_a_model_that_hugging_face_has_not(base: dict[str, Any], changes: dict[str, Any], name: str) -> None:
    with pytest.raises(UnsupportedError, match=name):
        config_of(args_of(base) | changes)


@pytest.mark.parametrize(
    ("base", "changes", "name"),
    [
        (LLAMA, {"attention_bias": True}, "attention_bias"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act"),
        (LLAMA, {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        (LLAMA, {"rope_scaling": {**LLAMA["rope_scaling"], "high_freq_factor": 8.0}}, "high_freq_factor"),
        (LLAMA, {"rope_scaling": {"type": "linear", "factor": 1.5}}, "factor"),
        (OWN["Qwen3-235B"], {"use_sliding_window": True}, "use_sliding_window"),
        (OWN["Qwen3-235B"], {"num_experts_per_tok": 1}, "num_experts_per_tok"),
        (DEEPSEEK, {"norm_topk_prob": False}, "norm_topk_prob"),
        (DEEPSEEK, {"attention_bias": True}, "attention_bias"),
        (DEEPSEEK, {"rope_interleave": False}, "rope_interleave"),
        (DEEPSEEK, {"topk_group": 2}, "topk_group"),
        (GPT_OSS, {"swiglu_limit": 5.0}, "swiglu_limit"),
        (NEOX, {"use_parallel_residual": True}, "use_parallel_residual"),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ],
)
def test_a_model_that_megatron_has_not(base: dict[str, Any], changes: dict[str, Any], name: str) -> None:
    with pytest.raises(UnsupportedError, match=name):
        args_of({**base, **changes})


@pytest.mark.parametrize(
    "name",
    ["num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "swiglu", "normalization", "vocab_size"],
)
def test_what_decides_is_asked_for(name: str) -> None:
    """Also where there is a Namespace without it, as older releases had."""
    args = {k: v for k, v in args_of(LLAMA).items() if k != name}
    with pytest.raises(IncompleteError, match="vocab_size" if name == "vocab_size" else name) as e:
        config_of(args)
    assert "config.json" in str(e.value)


def test_yarn_of_old_releases_is_asked_for() -> None:
    """Before 0.13 other arguments meant the positions that the model was trained for."""
    args = {k: v for k, v in args_of(DEEPSEEK).items() if k != "original_max_position_embeddings"}
    with pytest.raises(IncompleteError, match="original_max_position_embeddings"):
        config_of(args)
    assert "rope_scaling" not in config_of(args | {"rotary_scaling_factor": 1.0})
    args = {k: v for k, v in args_of(GPT_OSS).items() if k != "yarn_original_max_position_embeddings"}
    with pytest.raises(IncompleteError, match="yarn_original_max_position_embeddings"):
        config_of(args)


HOSTILE = [
    "80",
    -1,
    0,
    10**30,
    3.5,
    float("nan"),
    True,
    [80],
    {},
    PickledObject("os.system", {}),
    Global("os", "system"),
]


@pytest.mark.parametrize("value", HOSTILE, ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("name", ["num_layers", "kv_channels", "num_query_groups", "rotary_base", "norm_epsilon"])
def test_values_of_a_wrong_kind(name: str, value: Any) -> None:
    args = args_of(LLAMA) | {"group_query_attention": True, name: value}
    if name in ("rotary_base", "norm_epsilon") and type(value) in (int, float) and abs(value) < 1e9:
        config_of(args)
        return
    with pytest.raises(CorruptError, match=f"args.{name}") as e:
        config_of(args)
    assert len(str(e.value)) < 200


@pytest.mark.parametrize("name", ["swiglu", "untie_embeddings_and_output_weights", "normalization", "moe_layer_freq"])
def test_hostile_flags_and_texts(name: str) -> None:
    for value in ("x" * 10_000, 7.5, [1], PickledObject("builtins.eval", {})):
        with pytest.raises(CkptError) as e:
            config_of(args_of(OWN["Qwen3-235B"]) | {name: value})
        assert len(str(e.value)) < 300


@pytest.mark.parametrize(
    ("said", "layers"),
    [
        (1, [1, 1, 1, 1]),
        (2, [1, 0, 1, 0]),
        (None, [1, 1, 1, 1]),
        ([0, 1, 1, 1], [0, 1, 1, 1]),
        ("[0]*1+[1]*3", [0, 1, 1, 1]),
        ("([0]+[1])*2", [0, 1, 0, 1]),
        ("2*[0,1]", [0, 1, 0, 1]),
        ("1", [1, 1, 1, 1]),
    ],
)
def test_which_layers_have_experts(said: Any, layers: list[int]) -> None:
    assert sparse_layers(Fields({"moe_layer_freq": said}, "args."), 4) == layers


@pytest.mark.parametrize(
    "said",
    [
        "[0]*99999999999",
        "[[0]*9999]*9999",
        "__import__('os')",
        "[1]*4+",
        "9**9**9",
        "[0,1,2,1]",
        "(" * 5000,
        0,
        -1,
        [1],
        1.5,
    ],
)
def test_texts_are_not_evaluated(said: Any) -> None:
    with pytest.raises(CorruptError, match="moe_layer_freq"):
        sparse_layers(Fields({"moe_layer_freq": said}, "args."), 4)


# -- beside a save


def beside(folder: Path, config: dict[str, Any] | None) -> Listing:
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return list_source(folder)


def test_the_file_beside_the_save_wins(tmp_path: Path) -> None:
    config = {**LLAMA, "rms_norm_eps": 1e-6, "rope_theta": 1.0}
    assert model_config(beside(tmp_path, config), args_of(LLAMA, padded_vocab_size=128256)) == (config, [])
    assert model_config(beside(tmp_path, config), {}) == (config, [])


def test_without_either_nothing_is_known(tmp_path: Path) -> None:
    assert model_config(beside(tmp_path, None), {}) == ({}, [])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_layers", 79), ("hidden_size", 8191), ("num_attention_heads", 32), ("ffn_hidden_size", 1),
        ("num_query_groups", 4), ("num_experts", 8), ("padded_vocab_size", 128000),
    ],
)  # fmt: skip
def test_sizes_that_contradict_each_other(tmp_path: Path, name: str, value: int) -> None:
    config = {**LLAMA, "num_experts": 4} if name == "num_experts" else LLAMA
    args = args_of(LLAMA, padded_vocab_size=128256) | {name: value}
    with pytest.raises(ConflictError, match=name) as e:
        model_config(beside(tmp_path, config), args)
    assert "config.json" in str(e.value)


def test_arguments_that_the_file_cannot_outdo(tmp_path: Path) -> None:
    """The weights were trained with them, whatever the file says."""
    with pytest.raises(UnsupportedError, match="rotary_interleaved"):
        model_config(beside(tmp_path, LLAMA), args_of(LLAMA) | {"rotary_interleaved": True})


def test_how_many_rows_are_true(tmp_path: Path) -> None:
    folder = beside(tmp_path, None)
    args = args_of(LLAMA, padded_vocab_size=131072, params_dtype=Global("torch", "bfloat16"))
    config, _ = model_config(folder, args)
    assert (config["vocab_size"], config["torch_dtype"]) == (128256, "bfloat16")
    config, notes = model_config(folder, args | {"vocab_size": None})
    assert config["vocab_size"] == 131072
    assert any("131072" in n for n in notes)
    with pytest.raises(CorruptError, match="padded_vocab_size"):
        model_config(folder, args | {"vocab_size": 131073})


def test_what_a_pickle_holds() -> None:
    assert plain_args(PickledObject("argparse.Namespace", {"num_layers": 3})) == {"num_layers": 3}
    for value in (None, {"num_layers": 3}, PickledObject("os.environ", {"num_layers": 3}), 7):
        assert plain_args(value) == {}


def test_every_kind_is_tried() -> None:
    assert {k.model_type for k in KINDS} <= {c["model_type"] for c in configs().values()}


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("gpt2", []),
        ("Llama-3.1-70B", ["--use-rope-scaling"]),
        ("Mistral-7B-v0.1", ["--window-size 4095,0"]),
        ("no groups", ["--norm-epsilon 1e-06", "--no-rope-fusion", "--rope-type rope", "--q-lora-rank 1536"]),
        ("DeepSeek-V3", ["--rotary-scaling-factor 40.0", "--mscale-all-dim 1.0", "--moe-router-group-topk 4"]),
        ("gpt-oss", ["--softmax-type learnable", "--window-attn-skip-freq 2", "--quick-geglu"]),
        ("Nemotron-4-340B", ["--apply-layernorm-1p"]),
        ("Qwen2-MoE", ["--moe-shared-expert-gate"]),
    ],
)
def test_what_checkpoint_args_leave_out(name: str, needed: list[str]) -> None:
    """Tried with Megatron-LM of August 2026: with these its arguments are those of the save."""
    got = options(args_of(OWN[name]))
    assert set(needed) <= set(got)
    assert got or not needed
    assert not [o for o in got if o.endswith(("None", "False", "True"))]


def test_lists_are_spelled_as_the_command_line_takes_them() -> None:
    said = args_of({**GPT_OSS, "layer_types": ["full_attention", "sliding_attention"] * 18})
    assert f"--window-attn-skip-freq [{','.join(['0,1'] * 18)}]" in options(said)


def test_yarn_stays_yarn() -> None:
    """Megatron takes ``use_rotary_position_embeddings`` for plain rotary positions, whatever else is said."""
    said = args_of(GPT_OSS)
    assert (said["position_embedding_type"], said["use_rotary_position_embeddings"]) == ("yarn", False)


@pytest.mark.parametrize(("said", "untied"), [(None, False), (True, False), (False, True)])
def test_a_head_that_config_json_says_nothing_about(said: bool | None, untied: bool, tmp_path: Path) -> None:
    """GPT-2's is the embedding, of which the last stage has a copy."""
    variant = "gpt2_untied" if said is False else "gpt2"
    listed = family_lists("gpt2")[variant]
    config = {k: v for k, v in listed.config.items() if k != "tie_word_embeddings"}
    tensors = {n: origin(i, "BF16", tuple(s)) for i, (n, s) in enumerate(listed.tensors.items())}
    save_hf(tmp_path / "hf", tensors, config if said is None else {**config, "tie_word_embeddings": said})
    ckpttool.open(tmp_path / "hf").reshard(to="megatron", pp=2).run(tmp_path / "out")
    (last,) = (tmp_path / "out").rglob("mp_rank_00_001/model_optim_rng.pt")
    read = read_torch(last).value
    assert "output_layer.weight" in read["model"]
    assert plain_args(read["args"])["untie_embeddings_and_output_weights"] is untied


def test_a_window_that_config_json_leaves_out() -> None:
    """transformers takes one all the same; null is none."""
    for config, window, more in ((MISTRAL, 4095, None), (GPT_OSS, 127, 2)):
        missing = args_of({k: v for k, v in config.items() if k not in ("sliding_window", "layer_types")})
        assert (tuple(missing["window_size"]), missing["window_attn_skip_freq"]) == ((window, 0), more)
        assert "window_size" not in args_of({**config, "sliding_window": None})
