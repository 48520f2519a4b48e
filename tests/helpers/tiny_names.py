"""Names and shapes of what checkpoints of every family hold: ``tests/layout/data/<family>.json``.

Most lists are what transformers writes for the tiny models; to these come tensors that published files hold and
transformers does not write (scale grids, multi-token prediction, MXFP4 blocks, buffers), with shapes as their owners'
loaders expect them. ``python -m tests.helpers.tiny_names`` writes the files anew, tests/peers/test_names.py shows
that they are still what transformers writes.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers.tiny_models import VARIANTS, save_tiny, tiny_config

DATA = Path(__file__).parents[1] / "layout" / "data"
BLOCK = 128
"""Elements that share a scale, along both axes."""

Shapes = dict[str, list[int]]


@dataclass(frozen=True)
class Listed:
    """What one checkpoint holds."""

    config: dict[str, Any]
    tensors: Shapes


def family_lists(family: str) -> dict[str, Listed]:
    """The lists of a family as the repository has them, by variant."""
    data = json.loads((DATA / f"{family}.json").read_text(encoding="utf-8"))
    return {name: Listed(one["config"], one["tensors"]) for name, one in data.items()}


def all_lists() -> dict[tuple[str, str], Listed]:
    """Every list, by family and variant."""
    return {(p.stem, v): listed for p in sorted(DATA.glob("*.json")) for v, listed in family_lists(p.stem).items()}


def saved_shapes(folder: Path) -> Shapes:
    """Names and shapes in a checkpoint of one file, in the order of the file."""
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", framework="np") as f:
        return {name: list(f.get_slice(name).get_shape()) for name in f.keys()}  # noqa: SIM118


def transformers_lists() -> dict[str, Listed]:
    """What transformers writes for each variant, as published and (``@transformers``) as its modules are named."""
    out: dict[str, Listed] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for variant in VARIANTS:
            for suffix, published in (("", True), ("@transformers", False)):
                folder = save_tiny(variant, Path(scratch, variant + suffix), published=published)
                config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
                listed = Listed(_sizes(config), saved_shapes(folder))
                if published or listed.tensors != out[variant].tensors:
                    out[variant + suffix] = listed
    return out


_COUNTS = ("num_", "n_", "moe_num", "index_")
_LENGTHS = ("_size", "_rank", "_dim")


def _sizes(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of a config that say what the model is and how large; the others change with every version."""
    known = {"architectures", "model_type", "tie_word_embeddings"}
    return {
        k: v
        for k, v in sorted(config.items())
        if k in known or (type(v) is int and (k.startswith(_COUNTS) or k.endswith(_LENGTHS)))
    }


_LINEAR = tuple(f"{n}.weight" for n in ("_proj", "with_mqa", ".wq_b", ".wk", ".w1", ".w2", ".w3"))


def _scales(tensors: Shapes) -> Shapes:
    """The published list of an FP8 model: a scale grid behind every Linear of the layers."""
    out: Shapes = {}
    for name, shape in tensors.items():
        out[name] = shape
        linear = name.endswith(_LINEAR)
        if linear and "weights_proj" not in name and "eh_proj" not in name:
            out[f"{name}_scale_inv"] = [-(-n // BLOCK) for n in shape]
    return out


def _prediction_layer(tensors: Shapes, layers: int, hidden: int, vocab: int) -> Shapes:
    """The multi-token-prediction layer of DeepSeek-V3 and GLM-4.5: a layer as the last one, and six tensors more."""
    last = f"model.layers.{layers - 1}."
    here = f"model.layers.{layers}."
    out = {here + n.removeprefix(last): s for n, s in tensors.items() if n.startswith(last)}
    out |= {f"{here}{n}.weight": [hidden] for n in ("enorm", "hnorm", "shared_head.norm")}
    out |= {f"{here}{n}.weight": [vocab, hidden] for n in ("embed_tokens", "shared_head.head")}
    return out | {f"{here}eh_proj.weight": [hidden, 2 * hidden]}


_FP8_SIZES = {"hidden_size": 128, "intermediate_size": 512, "moe_intermediate_size": 512, "vocab_size": 256}
"""Large enough for blocks of 128 that four ranks can share."""
_FP8: dict[str, dict[str, int]] = {
    "ernie4_5_moe": {"moe_num_experts": 4},
    "glm4_moe": {"n_routed_experts": 4},
    "mixtral": {"num_local_experts": 4},
    "qwen2": {},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 512},
    "qwen3_moe": {"num_experts": 4},
}


def _fp8(variant: str, **sizes: int) -> Listed:
    """The published FP8 model of a variant."""
    return Listed(_fp8_config(variant, **sizes), _scales(_written(variant, **sizes)))


def _fp8_config(variant: str, **sizes: int) -> dict[str, Any]:
    return {
        **_sizes(tiny_config(variant, **sizes).to_dict()),
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]},
    }


def _deepseek_fp8(variant: str) -> Listed:
    """DeepSeek's own, with the multi-token-prediction layer."""
    sizes = {
        **_FP8_SIZES,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 4,
        "num_nextn_predict_layers": 1,
    }
    tensors = _written(variant, **sizes)
    return Listed(_fp8_config(variant, **sizes), _scales(tensors | _prediction_layer(tensors, 2, 128, 256)))


def _written(variant: str, **overrides: Any) -> Shapes:
    """Names and shapes as published, of a model with other sizes than the tiny one."""
    with tempfile.TemporaryDirectory() as scratch:
        return saved_shapes(save_tiny(variant, Path(scratch), dtype="bfloat16", **overrides))


def _mxfp4(tensors: Shapes) -> Shapes:
    """Experts of gpt-oss as published: blocks of 32 inputs, [experts, out, in / 32, 16 bytes], and their scales."""
    out: Shapes = {}
    for name, shape in tensors.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, width, rows = shape
            out[f"{name}_blocks"] = [experts, rows, width // 32, 16]
            out[f"{name}_scales"] = [experts, rows, width // 32]
        else:
            out[name] = shape
    return out


def _published_gpt2(tensors: Shapes) -> Shapes:
    """openai-community/gpt2: no prefix, and the causal mask of every layer."""
    out = {n.removeprefix("transformer."): s for n, s in tensors.items()}
    masks: Shapes = {f"h.{i}.attn.bias": [1, 1, 128, 128] for i in range(2)}
    return out | masks | {f"h.{i}.attn.masked_bias": [] for i in range(2)}


def _published_gpt_neox(tensors: Shapes) -> Shapes:
    """EleutherAI's files: the causal mask and the rotary frequencies of every layer."""
    out = dict(tensors)
    for i in range(2):
        at = f"gpt_neox.layers.{i}.attention."
        out |= {f"{at}bias": [1, 1, 128, 128], f"{at}masked_bias": [], f"{at}rotary_emb.inv_freq": [2]}
    return out


def _ernie_prediction(tensors: Shapes) -> Shapes:
    """The prediction block of ERNIE 4.5: a dense layer outside the numbered ones."""
    out = dict(tensors)
    first = "model.layers.0."
    out |= {f"model.mtp_block.0.{n.removeprefix(first)}": s for n, s in tensors.items() if n.startswith(first)}
    out |= {f"model.{n}.0.weight": [64] for n in ("mtp_emb_norm", "mtp_hidden_norm")}
    return out | {"model.mtp_linear_proj.0.weight": [64, 128], "model.mtp_linear_proj.0.bias": [64]}


def _per_channel(tensors: Shapes) -> Shapes:
    """FP8 with one scale for each output, as compressed-tensors writes it; the last layer has one for its inputs."""
    out: Shapes = {}
    for name, shape in tensors.items():
        out[name] = shape
        if name.endswith("_proj.weight"):
            out[f"{name}_scale"] = [shape[0], 1]
    return out | {"model.layers.1.mlp.down_proj.input_scale": [1]}


def _llama4() -> dict[str, Listed]:
    """With and without the tower for images; every second layer has experts."""
    from transformers import Llama4Config, Llama4ForCausalLM, Llama4ForConditionalGeneration, Llama4TextConfig

    text = {**_LLAMA4, "pad_token_id": None}
    tower = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 128,
             "vision_output_dim": 48, "image_size": 28, "patch_size": 14, "projector_input_dim": 48,
             "projector_output_dim": 48}  # fmt: skip
    models: dict[str, Any] = {
        "llama4_text": Llama4ForCausalLM(Llama4TextConfig(**text)),
        "llama4": Llama4ForConditionalGeneration(Llama4Config(text_config=text, vision_config=tower)),
    }
    out = {}
    for name, model in models.items():
        with tempfile.TemporaryDirectory() as scratch:
            model.save_pretrained(scratch)
            config = json.loads(Path(scratch, "config.json").read_text(encoding="utf-8"))
            inner = {"text_config": _sizes(config["text_config"])} if "text_config" in config else {}
            out[name] = Listed(_sizes(config) | inner, saved_shapes(Path(scratch)))
    return out


_LLAMA4 = {
    "hidden_size": 64, "intermediate_size": 48, "intermediate_size_mlp": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "num_local_experts": 4, "vocab_size": 160,
    "interleave_moe_layer_step": 2,
}  # fmt: skip


def expected_lists() -> dict[str, dict[str, Listed]]:
    """All lists by family and variant, made anew."""
    made = transformers_lists()
    out: dict[str, dict[str, Listed]] = {}
    for name, listed in made.items():
        out.setdefault(_family(name), {})[name] = listed

    def derive(family: str, variant: str, base: str, tensors: Shapes, **fields: Any) -> None:
        out[family][variant] = Listed({**made[base].config, **fields}, tensors)

    inv_freq: Shapes = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": [12] for i in range(2)}
    derive("llama", "llama_1", "llama", made["llama"].tensors | inv_freq)
    derive("llama", "llama_per_channel", "llama", _per_channel(made["llama"].tensors))
    blocks = _mxfp4(_written("gpt_oss", intermediate_size=256))
    derive("gpt_oss", "gpt_oss_mxfp4", "gpt_oss", blocks, intermediate_size=256)
    glm = made["glm4_moe"].tensors
    derive("glm4_moe", "glm4_moe_mtp", "glm4_moe", glm | _prediction_layer(glm, 2, 64, 160))
    derive("ernie4_5_moe", "ernie4_5_moe_mtp", "ernie4_5_moe", _ernie_prediction(made["ernie4_5_moe"].tensors))
    untied: dict[str, Any] = {"tie_word_embeddings": False}
    derive("gemma", "gemma_untied", "gemma", made["gemma"].tensors | {"lm_head.weight": [160, 64]}, **untied)
    derive("gpt2", "gpt2_untied", "gpt2", made["gpt2"].tensors | {"lm_head.weight": [157, 64]}, **untied)
    derive("gpt2", "gpt2_published", "gpt2", _published_gpt2(made["gpt2"].tensors))
    derive("gpt_neox", "gpt_neox_published", "gpt_neox", _published_gpt_neox(made["gpt_neox"].tensors))
    for family, sizes in _FP8.items():
        out[family][f"{family}_fp8"] = _fp8(family, **_FP8_SIZES, head_dim=128, **sizes)
    out |= {name: {name: listed} for name, listed in _llama4().items()}
    v3 = made["deepseek_v3"].tensors
    derive("deepseek", "deepseek_v3_mtp", "deepseek_v3", v3 | _prediction_layer(v3, 2, 64, 160))
    out["deepseek"]["deepseek_v3_fp8"] = _deepseek_fp8("deepseek_v3")
    out["deepseek"]["deepseek_v32_fp8"] = _deepseek_fp8("deepseek_v32")
    return out


def _family(variant: str) -> str:
    model_type = VARIANTS[variant.partition("@")[0]].model_type
    for start, family in (("deepseek", "deepseek"), ("gemma", "gemma"), ("mistral", "llama")):
        if model_type.startswith(start):
            return family
    return model_type


def render(lists: dict[str, Listed]) -> str:
    """JSON with one tensor a line."""
    out = []
    for variant, listed in lists.items():
        config = json.dumps(listed.config)
        rows = ",\n".join(f"   {json.dumps(n)}: {json.dumps(s)}" for n, s in sorted(listed.tensors.items()))
        out.append(f' {json.dumps(variant)}: {{\n  "config": {config},\n  "tensors": {{\n{rows}\n  }}\n }}')
    return "{\n" + ",\n".join(out) + "\n}\n"


def main() -> None:
    """Write the files anew."""
    for family, lists in expected_lists().items():
        (DATA / f"{family}.json").write_text(render(lists), encoding="utf-8")


if __name__ == "__main__":
    main()
