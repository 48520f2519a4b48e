"""Sizes of public models: what was published for them, and what follows from their shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckpttool.containers.safetensors import layout_file
from ckpttool.core.mesh import Mesh
from ckpttool.ops.size.stored import Applied, WantedRecipe, apply, on_disk
from tests.helpers.command import ckpttool
from tests.size.models import CONFIGS, GOLDEN, RECIPES, applied, model, model_of, ranks, write_config


def numbers(found: Applied) -> dict[str, int]:
    """What golden.json gives of a model, as we have it."""
    return {
        **{d: t.elements for d, t in found.dtypes.items()},
        "total_elems": found.total.elements,
        "bytes_derived": found.total.nbytes,
        "total_size": found.total.nbytes,
        "tensors": found.total.tensors,
        "tensors_derived": found.total.tensors,
        "logical_params": found.total.parameters,
        "elems_unpacked_plus_scales": found.unpacked(),
    }


PUBLISHED = [e for e in GOLDEN if e.get("recipe") in RECIPES]


@pytest.mark.sample(
    "deepseek-ai/DeepSeek-V3.2",
    "Qwen/Qwen3-30B-A3B-Instruct-2507-FP8",
    "Llama-3.x-70B",
    "openai/gpt-oss-20b",
    "openai/gpt-oss-120b",
)
@pytest.mark.parametrize("entry", PUBLISHED, ids=[e["model"].split()[0] for e in PUBLISHED])
def test_published(entry: dict[str, Any]) -> None:
    name, _, minus = entry["cfg"].partition(" minus")
    found = numbers(applied(name, RECIPES[entry["recipe"]], mtp=not minus))
    wanted = {k: v for k, v in entry.items() if k in found}
    assert wanted
    assert {k: found[k] for k in wanted} == wanted


BF16 = next(e["elems"] for e in GOLDEN if "elems" in e)


@pytest.mark.product(one_in=2)
@pytest.mark.parametrize("name", BF16)
def test_parameters(name: str) -> None:
    total = applied(name, WantedRecipe("bf16")).total
    assert total.elements == total.parameters == BF16[name]
    assert total.nbytes == 2 * BF16[name]


TENSOR_F32 = WantedRecipe("tensor", method="modelopt", static=True)
EXAMPLES = [
    ("Llama-3-8B", WantedRecipe("bf16"), 16_060_522_496),
    ("Llama-3-8B", TENSOR_F32, 9_081_202_432),
    ("Llama-3-8B", WantedRecipe("channel"), 9_083_953_152),
    ("Llama-3-8B", WantedRecipe("block"), 9_082_904_576),
    ("Llama-3-8B", WantedRecipe("mxfp8"), 9_299_304_448),
    ("Llama-3-70B", WantedRecipe("channel", scale_dtype="bf16"), 72_669_806_592),
    ("Mixtral-8x7B", TENSOR_F32, 46_966_258_688),
    ("Mixtral-8x7B", WantedRecipe("block"), 46_977_589_248),
    ("Qwen3-30B-A3B", WantedRecipe("block", scale_dtype="bf16"), 31_170_895_872),
    ("Qwen3-235B-A22B", WantedRecipe("block", scale_dtype="bf16"), 236_416_915_456),
    ("Qwen3-Coder-480B-A35B", WantedRecipe("block", scale_dtype="bf16"), 482_141_974_528),
    ("DeepSeek-V3", WantedRecipe("block", scale_dtype="f32"), 688_574_839_360),
    ("gpt-oss-20b", WantedRecipe("as-is"), 13_761_264_768),
    ("gpt-oss-120b", WantedRecipe("as-is"), 65_248_815_744),
]


@pytest.mark.parametrize(("name", "wanted", "size"), EXAMPLES, ids=[f"{n}-{w.recipe}" for n, w, _ in EXAMPLES])
def test_bytes(name: str, wanted: WantedRecipe, size: int) -> None:
    assert applied(name, wanted).total.nbytes == size


def test_stored_elements_of_the_qwen_coder() -> None:
    assert applied("Qwen3-Coder-480B-A35B", RECIPES["block128_bf16"]).total.elements == 480_184_064_000


def test_nvfp4_has_half_bytes_group_scales_and_a_factor() -> None:
    plain = applied("Llama-3-8B", WantedRecipe("bf16"))
    found = applied("Llama-3-8B", WantedRecipe("nvfp4", method="modelopt"))
    linear, weights = 6_979_321_856, 224
    assert found.total.nbytes == plain.total.nbytes - 2 * linear + linear // 2 + linear // 16 + 4 * weights
    assert found.total.parameters == plain.total.parameters
    assert found.unpacked() == plain.total.elements + linear // 16 + weights


GLM = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "hidden_size": 5120,
    "num_hidden_layers": 92,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "vocab_size": 151552,
    "attention_bias": True,
    "use_qk_norm": True,
    "num_nextn_predict_layers": 1,
}


@pytest.mark.thorough  # test_published has others as large
def test_glm_4_7_fp8() -> None:
    assert apply(model_of(GLM), WantedRecipe("channel")).total.elements == 358_458_391_872


@pytest.mark.thorough  # the scheme and the sizes: test_published
def test_deepseek_r1_nvfp4() -> None:
    # NVIDIA quantized the MLPs of the layers before the prediction layer. The Hub counts no 0-d tensors.
    keep = ("*self_attn*", "*.layers.61.*")
    found = applied("DeepSeek-V3", WantedRecipe("nvfp4", method="modelopt", static=True, keep=keep))
    lone = sum(len(g.names) for g in found.groups for h in g.held if h.shape == ())
    assert found.total.elements - lone == 396_767_013_632
    assert round(found.total.nbytes / 1e9, 1) == 423.6


@pytest.mark.thorough  # test_ranks has smaller models
def test_a_rank_of_deepseek_r1() -> None:
    # HabanaAI/vllm-fork #809 logs 79.41 GiB.
    entry = next(e for e in GOLDEN if "per_rank_bytes_derived" in e)
    held = ranks("DeepSeek-V3", Mesh(tp=8, etp=8), mtp=False).held
    assert {w.nbytes for w in held} == {entry["per_rank_bytes_derived"]}
    assert abs(held[0].nbytes / 2**30 / entry["measured_GiB"] - 1) < 0.002


def test_header_of_a_published_shard() -> None:
    # Qwen3-8B was saved by transformers in its own order and with its own limit, so its first shard is made by name.
    entry = next(e for e in GOLDEN if e["model"].startswith("Qwen/Qwen3-8B "))
    found = applied("Qwen3-8B", WantedRecipe("bf16"))
    assert (found.total.nbytes, found.total.tensors) == (entry["total_size"], entry["tensors"])
    first = [f"model.layers.{n}." for n in range(7)]
    first += ["model.embed_tokens.", *(f"model.layers.7.self_attn.{x}_proj." for x in "qkv")]
    shard = [(r.name, r.dtype, r.shape) for r in found.rows() if r.name.startswith(tuple(first))]
    header, _, size = layout_file(shard, {"format": "pt"})
    wanted = entry["shard1"]
    assert (len(shard), len(header) - 8, size) == (wanted["tensors"], wanted["header_bytes"], wanted["file_bytes"])


def test_tensors_of_deepseek_v3() -> None:
    assert applied("DeepSeek-V3", RECIPES["block128_f32"]).total.tensors == 91_991


@pytest.mark.thorough
def test_the_whole_of_deepseek_v3_on_the_command_line(tmp_path: Path) -> None:
    options = ("--recipe", "block", "--scale-dtype", "f32")
    done = ckpttool("size", write_config(tmp_path, "DeepSeek-V3"), *options, "--json")
    assert done.code == 0, done.err
    data = json.loads(done.out)
    assert data["bytes"] == data["disk"]["payload"] == 688_574_839_360
    published = next(e["weight_files_bytes_published"] for e in GOLDEN if "weight_files_bytes_published" in e)
    assert abs(data["disk"]["bytes"] / published - 1) < 1e-6
    assert data["tensors_stored"] == 91_991


def test_headers_are_those_of_the_library(tmp_path: Path) -> None:
    config = CONFIGS["Llama-3-8B"] | {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 100,
        "torch_dtype": "float32",
    }
    made = model_of(config)
    found = apply(made, WantedRecipe("bf16"))
    tensors = {r.name: np.zeros(r.shape, "float32") for r in found.rows()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    disk = on_disk(made, found, None)
    assert (tmp_path / "model.safetensors").stat().st_size == disk.size
    assert disk.payload == found.total.nbytes
    assert (disk.files, disk.index, disk.real) == (1, 0, False)


def test_a_config_has_no_files_of_its_own() -> None:
    name = "Llama-3-8B"
    disk = on_disk(model(name), applied(name, WantedRecipe("as-is")), None)
    assert not disk.real
    assert disk.files == 4
