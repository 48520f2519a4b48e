"""Diffusion transformers: what each rank holds, against the plans of diffusers written down once more."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.layout.family import load_family, pick_family
from ckpttool.layout.shapes import declared_tensors
from tests.helpers.command import ckpttool, refused, reshard
from tests.helpers.tensorfile import Array, Raw, Tensors, assert_same, origin, read, read_all, write

BLOCKS = {"num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 8, "patch_size": 2, "in_channels": 4}
FLUX = {**BLOCKS, "num_single_layers": 1, "joint_attention_dim": 12, "pooled_projection_dim": 6}
CONFIGS: dict[str, dict[str, Any]] = {
    "flux": {"_class_name": "FluxTransformer2DModel", **FLUX, "guidance_embeds": True},
    "flux2": {"_class_name": "Flux2Transformer2DModel", **FLUX, "mlp_ratio": 3.0, "timestep_guidance_channels": 8},
    "chroma": {
        "_class_name": "ChromaTransformer2DModel", **BLOCKS, "num_single_layers": 1, "joint_attention_dim": 12,
        "approximator_num_channels": 6, "approximator_hidden_dim": 10, "approximator_layers": 2,
    },
    "hunyuan_video": {
        "_class_name": "HunyuanVideoTransformer3DModel", **BLOCKS, "num_single_layers": 1, "num_refiner_layers": 1,
        "text_embed_dim": 12, "pooled_projection_dim": 6, "out_channels": 4, "mlp_ratio": 4.0,
    },
    "sd3": {
        "_class_name": "SD3Transformer2DModel", **BLOCKS, "joint_attention_dim": 12, "pooled_projection_dim": 6,
        "caption_projection_dim": 32, "out_channels": 4, "pos_embed_max_size": 4, "qk_norm": "rms_norm",
        "dual_attention_layers": [0],
    },
    "qwen_image": {"_class_name": "QwenImageTransformer2DModel", **BLOCKS, "joint_attention_dim": 12},
    "wan": {
        "_class_name": "WanTransformer3DModel", **BLOCKS, "patch_size": [1, 2, 2], "out_channels": 4, "text_dim": 12,
        "ffn_dim": 24, "image_dim": 10, "added_kv_proj_dim": 32,
    },
}  # fmt: skip
INNER = 32
PUBLISHED: list[tuple[dict[str, Any], int]] = [
    # total_size of diffusion_pytorch_model.safetensors.index.json, bfloat16 (model cards of exo name both)
    (
        {
            "_class_name": "FluxTransformer2DModel", "attention_head_dim": 128, "guidance_embeds": True,
            "in_channels": 64, "joint_attention_dim": 4096, "num_attention_heads": 24, "num_layers": 19,
            "num_single_layers": 38, "patch_size": 1, "pooled_projection_dim": 768,
        },
        23_802_816_640,
    ),
    (
        {
            "_class_name": "QwenImageTransformer2DModel", "attention_head_dim": 128, "in_channels": 64,
            "joint_attention_dim": 3584, "num_attention_heads": 24, "num_layers": 60, "out_channels": 16,
            "patch_size": 2,
        },
        40_860_802_176,
    ),
]  # fmt: skip

COLUMN = r"\.(to_[qkv]|add_[qkv]_proj|proj_mlp|net\.0\.proj)\.(weight|bias)\Z"
ROW = r"\.(to_out\.0|to_add_out|net\.2|linear_out)\.weight\Z"


def checkpoint(folder: Path, family: str) -> Tensors:
    config = CONFIGS[family]
    declared = declared_tensors(pick_family("", "", config), config)
    held = {t.name: origin(i, "F32", t.shape) for i, t in enumerate(declared)}
    write(folder / "diffusion_pytorch_model.safetensors", held, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return held


def share(name: str, whole: Array, rank: int, ranks: int) -> Array:
    """What diffusers' plan gives a rank: ``colwise``, ``rowwise``, or a share of each block."""

    def blocks(axis: int, *sizes: int) -> Array:
        parts = np.split(whole, np.cumsum(sizes)[:-1], axis)
        return np.concatenate([np.split(p, ranks, axis)[rank] for p in parts], axis)

    if re.search(r"single.*\.to_qkv_mlp_proj\.weight\Z", name):
        return blocks(0, INNER, INNER, INNER, 3 * INNER, 3 * INNER)
    if re.search(r"\.linear_in\.weight\Z", name):
        return blocks(0, 3 * INNER, 3 * INNER)
    if re.search(r"\Asingle.*\.(proj_out|to_out)\.weight\Z", name):
        return blocks(1, INNER, whole.shape[1] - INNER)
    if name.startswith(("condition_embedder", "context_embedder")):
        return whole
    if re.search(COLUMN, name):
        return blocks(0, whole.shape[0])
    if re.search(ROW, name):
        return blocks(1, whole.shape[1])
    if re.search(r"\Ablocks\.\d+\.attn\d\.norm", name):  # over all heads, as vLLM-Omni cuts it
        return blocks(0, whole.shape[0])
    return whole


@pytest.mark.sample("flux", "flux2", "wan")
@pytest.mark.parametrize("family", CONFIGS)
def test_ranks_hold_what_the_plan_of_diffusers_gives_them(tmp_path: Path, family: str) -> None:
    held = checkpoint(tmp_path / "src", family)
    assert pick_family("", "", CONFIGS[family]).name == family
    reshard(tmp_path / "src", tmp_path / "cut", "--tp-out", 2)
    for rank in range(2):
        wanted = {n: Raw(t.dtype, share(n, t.bits, rank, 2)) for n, t in held.items()}
        assert_same(read(tmp_path / "cut" / f"rank-{rank:05d}-of-00002.safetensors"), wanted)
    reshard(tmp_path / "cut", tmp_path / "back", "--to", "hf", "--verify")
    assert_same(read_all(tmp_path / "back"), held)


@pytest.mark.sample("flux", "sd3")
@pytest.mark.parametrize("family", CONFIGS)
def test_no_head_is_torn_and_there_are_no_stages(tmp_path: Path, family: str) -> None:
    checkpoint(tmp_path / "src", family)
    refused(tmp_path / "src", tmp_path / "dst", "--tp-out", 8)
    assert "every block reads" in refused(tmp_path / "src", tmp_path / "dst", "--pp-out", 2)


def test_files_come_back_under_the_names_that_diffusers_looks_for(tmp_path: Path) -> None:
    checkpoint(tmp_path / "src", "wan")
    reshard(tmp_path / "src", tmp_path / "cut", "--tp-out", 2)
    reshard(tmp_path / "cut", tmp_path / "back", "--to", "hf")
    assert (tmp_path / "back" / "diffusion_pytorch_model.safetensors").is_file()


@pytest.mark.parametrize(("config", "size"), PUBLISHED, ids=[c["_class_name"] for c, _ in PUBLISHED])
def test_sizes_of_published_models(tmp_path: Path, config: dict[str, Any], size: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = ckpttool("size", tmp_path / "config.json", "--recipe", "as-is", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["bytes"] == size


def test_a_ratio_that_is_no_whole_number_is_refused(tmp_path: Path) -> None:
    config = {**CONFIGS["flux2"], "mlp_ratio": 2.5}
    held = checkpoint(tmp_path / "src", "flux2")
    assert held
    (tmp_path / "src" / "config.json").write_text(json.dumps(config))
    assert "ff" in refused(tmp_path / "src", tmp_path / "dst", "--tp-out", 2)
    assert load_family("flux2", config).name == "flux2"
