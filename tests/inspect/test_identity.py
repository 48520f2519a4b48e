"""The first line says what a checkpoint is, and counts parameters as their owners do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.ops.inspect.identity import family_name, parameters
from ckpttool.ops.inspect.listing import TensorRow
from tests.helpers.command import ckpttool, reshard
from tests.helpers.tensorfile import Raw, Tensors, origin, save_hf
from tests.inspect.models import CONFIG, FP8_CONFIG, fp8_llama, llama, shapes

FIXTURES = Path("fixtures")
PARAMETERS = sum(int(np.prod(s)) for s in shapes().values())


def identity(folder: Path, *options: object) -> dict[str, Any]:
    done = ckpttool("inspect", folder, "--json", *options)
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.out)["identity"]
    assert ckpttool("inspect", folder, *options).out.splitlines()[0] == found["headline"]
    return found


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "Qwen3-MoE"),
        ({"architectures": ["DeepseekV3ForCausalLM"]}, "DeepSeek-V3"),
        ({"architectures": ["DeepseekV32ForCausalLM"]}, "DeepSeek-V3.2"),
        ({"architectures": ["Qwen2_5_VLForConditionalGeneration"]}, "Qwen2.5-VL"),
        ({"architectures": ["Ernie4_5_MoeForCausalLM"]}, "ERNIE-4.5-MoE"),
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2"),
        ({"architectures": ["GptOssForCausalLM"]}, "GPT-OSS"),
        ({"architectures": ["PhiMoEForCausalLM"]}, "Phi-MoE"),
        ({"architectures": ["LlamaModel"], "model_type": "llama"}, "Llama"),
        ({"model_type": "qwen3_next"}, "Qwen3-Next"),
        ({"model_type": "gpt_neox"}, "GPT-NeoX"),
        ({"architectures": ["SomethingNewForCausalLM"]}, "SomethingNew"),
        ({"architectures": [5], "model_type": None}, ""),
        ({}, ""),
    ],
)
def test_families_are_spelled_as_their_makers_do(config: dict[str, Any], expected: str) -> None:
    assert family_name(config) == expected


def test_a_model_and_its_ranks_are_the_same(tmp_path: Path) -> None:
    save_hf(tmp_path / "model", llama(), CONFIG)
    reshard(tmp_path / "model", tmp_path / "tp2", "--to", "ranks", "--tp-out", 2)
    whole = identity(tmp_path / "model")
    assert whole["headline"] == f"Llama, 2 layers, {PARAMETERS:,} parameters, BF16"
    assert whole == identity(tmp_path / "tp2") == identity(tmp_path / "tp2", "--filter", "lm_head.weight")


def test_a_tied_head_that_is_stored_too_counts_once(tmp_path: Path) -> None:
    tensors = llama()
    save_hf(
        tmp_path,
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]},
        {**CONFIG, "tie_word_embeddings": True},
    )
    head = tensors["lm_head.weight"].bits.size
    assert identity(tmp_path)["parameters"] == PARAMETERS - head


def test_what_the_section_of_the_text_model_says_counts(tmp_path: Path) -> None:
    tensors = fp8_llama()
    config = {"model_type": "x", "text_config": {**FP8_CONFIG, "tie_word_embeddings": True}}
    save_hf(tmp_path, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, config)
    found = identity(tmp_path)
    head = tensors["lm_head.weight"].bits.size
    assert (found["parameters"], found["precision"]) == (PARAMETERS - head, "FP8, 8x8 blocks")
    checked = json.loads(ckpttool("inspect", tmp_path, "--check", "--json").out)
    assert "config-tied-copy" in {f["id"] for f in checked["findings"]}


def test_without_a_config_names_say_layers_and_experts(tmp_path: Path) -> None:
    names = [f"model.layers.{i}.mlp.experts.{e}.up_proj.weight" for i in range(3) for e in range(4)]
    save_hf(tmp_path, {n: origin(i, "F16", (2, 5)) for i, n in enumerate(names)}, None)
    assert identity(tmp_path)["headline"] == "Model of no known family, 3 layers, 4 experts, 120 parameters, F16"


def words(dtype: str, *shape: int) -> Raw:
    return origin(1, dtype, shape)


W = "model.layers.0.mlp.up_proj"
QUANTIZED: dict[str, tuple[dict[str, Any], Tensors, str]] = {
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 64},
        {f"{W}.qweight": words("I32", 128, 8), f"{W}.qzeros": words("I32", 2, 8), f"{W}.scales": words("F16", 2, 64)},
        "AWQ, 4 bits, groups of 64",
    ),
    "gptq": (
        {"quant_method": "gptq", "bits": 8, "group_size": -1},
        {f"{W}.qweight": words("I32", 32, 64), f"{W}.g_idx": words("I32", 128), f"{W}.scales": words("F16", 1, 64)},
        "GPTQ, 8 bits",
    ),
    "compressed-tensors": (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32, "strategy": "group"}}},
        },
        {
            f"{W}.weight_packed": words("I32", 64, 16),
            f"{W}.weight_scale": words("BF16", 64, 4),
            f"{W}.weight_shape": words("I64", 2),
        },
        "compressed-tensors, 4 bits, groups of 32",
    ),
    "bitsandbytes": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        {
            f"{W}.weight": words("U8", 4096, 1),
            f"{W}.weight.absmax": words("F32", 128),
            f"{W}.weight.quant_map": words("F32", 16),
            f"{W}.weight.quant_state.bitsandbytes__nf4": words("U8", 70),
        },
        "bitsandbytes NF4",
    ),
    "nvfp4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        {
            f"{W}.weight": words("U8", 64, 64),
            f"{W}.weight_scale": words("F8_E4M3", 64, 8),
            f"{W}.weight_scale_2": words("F32"),
            f"{W}.input_scale": words("F32"),
        },
        "NVFP4",
    ),
    "mxfp4": (
        {"quant_method": "mxfp4"},
        {f"{W}_blocks": words("U8", 64, 4, 16), f"{W}_scales": words("U8", 64, 4)},
        "MXFP4",
    ),
}


@pytest.mark.parametrize("method", QUANTIZED)
def test_codes_count_as_the_weights_that_they_stand_for(method: str, tmp_path: Path) -> None:
    said, tensors, precision = QUANTIZED[method]
    norm = {"model.norm.weight": origin(9, "BF16", (64,)), "position_ids": words("I64", 7)}
    save_hf(tmp_path, {**tensors, **norm}, {"model_type": "x", "quantization_config": said})
    found = identity(tmp_path)
    assert (found["parameters"], found["precision"]) == (64 * 128 + 64, precision)


def test_scales_of_fp8_are_no_parameters(tmp_path: Path) -> None:
    save_hf(tmp_path, fp8_llama(), FP8_CONFIG)
    found = identity(tmp_path)
    assert (found["parameters"], found["precision"]) == (PARAMETERS, "FP8, 8x8 blocks")


def test_a_weight_that_is_called_scale_is_one(tmp_path: Path) -> None:
    save_hf(
        tmp_path,
        {"norm.scale": origin(0, "BF16", (5,)), "logit_scale": origin(1, "F32", ()), "ids": words("I64", 3)},
        {},
    )
    assert identity(tmp_path)["parameters"] == 6


def test_training_state_is_told_and_not_counted() -> None:
    found = identity(FIXTURES / "paddle_zcc/ep2_tp2_sharding2_ema")
    assert found["parameters"] == 35232
    assert found["headline"].endswith("BF16, with master weights, optimizer state and EMA")


def test_an_adapter_of_paddle_says_its_rank() -> None:
    found = identity(FIXTURES / "paddle_unified/nlp_llama_lora_bf16_tp1")
    assert found["adapter"] == {
        "kind": "LoRA", "rank": 4, "alpha": 8, "base": None, "targets": ["down_proj", "o_proj", "q_proj"],
    }  # fmt: skip
    assert found["headline"].startswith("LoRA adapter, rank 4, alpha 8, for Llama, targets down_proj, o_proj, q_proj, ")


def test_ranks_without_rules_have_no_number_of_parameters(tmp_path: Path) -> None:
    save_hf(tmp_path / "model", llama(), CONFIG)
    reshard(tmp_path / "model", tmp_path / "tp2", "--to", "ranks", "--tp-out", 2)
    for r in range(2):
        old = tmp_path / "tp2" / f"rank-{r:05d}-of-00002.safetensors"
        data = old.read_bytes()
        old.unlink()
        (tmp_path / "tp2" / f"x_rank{r}.safetensors").write_bytes(data.replace(b"ckpttool", b"somebody"))
    (tmp_path / "tp2/config.json").write_text('{"model_type": "unheard_of"}')
    assert identity(tmp_path / "tp2", "--tp", 2)["parameters"] is None


@pytest.mark.parametrize(
    ("embedding", "head"),
    [
        ("model.embed_tokens.weight", "lm_head.weight"),
        ("embedding.word_embeddings.weight", "output_layer.weight"),
        ("transformer.wte.weight", "lm_head.weight"),
    ],
)
def test_a_head_that_is_tied_counts_once(embedding: str, head: str) -> None:
    rows = [TensorRow(n, "BF16", (7, 3), 42, 0, 0, 1) for n in (embedding, head, "model.norm.weight")]
    assert parameters(rows, {"tie_word_embeddings": True}) == {"BF16": 42}
    assert parameters(rows, {"tie_word_embeddings": False}) == {"BF16": 63}
    assert parameters(rows[1:], {"tie_word_embeddings": True}) == {"BF16": 42}
