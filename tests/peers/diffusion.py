"""Tiny diffusion transformers of diffusers, random weights, and inputs for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch

Inputs = Callable[[], dict[str, Any]]
_SIZES: dict[str, Any] = {"num_layers": 2, "num_attention_heads": 4}


def flux() -> Any:
    return diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_single_layers=2, attention_head_dim=16, joint_attention_dim=32,
        pooled_projection_dim=24, axes_dims_rope=[4, 4, 8], guidance_embeds=True, **_SIZES,
    )  # fmt: skip


def _flux2() -> Any:
    return diffusers.Flux2Transformer2DModel(
        patch_size=1, in_channels=4, num_single_layers=2, attention_head_dim=16, joint_attention_dim=24,
        timestep_guidance_channels=8, axes_dims_rope=(4, 4, 4, 4), **_SIZES,
    )  # fmt: skip


def _chroma() -> Any:
    return diffusers.ChromaTransformer2DModel(
        in_channels=4, num_single_layers=2, attention_head_dim=16, joint_attention_dim=32, axes_dims_rope=(4, 4, 8),
        approximator_num_channels=8, approximator_hidden_dim=32, approximator_layers=2, **_SIZES,
    )  # fmt: skip


def _hunyuan() -> Any:
    return diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, attention_head_dim=12, num_single_layers=2, num_refiner_layers=1, patch_size=2,
        text_embed_dim=16, pooled_projection_dim=8, rope_axes_dim=(4, 4, 4), **_SIZES,
    )  # fmt: skip


def _z_image() -> Any:
    return diffusers.ZImageTransformer2DModel(
        in_channels=4, dim=48, n_layers=2, n_refiner_layers=1, n_heads=4, n_kv_heads=4, cap_feat_dim=16,
        axes_dims=[4, 4, 4], axes_lens=[64, 64, 64],
    )  # fmt: skip


def _sd3() -> Any:
    return diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, attention_head_dim=8, joint_attention_dim=40, out_channels=4,
        caption_projection_dim=32, pooled_projection_dim=24, pos_embed_max_size=8, dual_attention_layers=(0,),
        qk_norm="rms_norm", **_SIZES,
    )  # fmt: skip


def _qwen() -> Any:
    return diffusers.QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, attention_head_dim=16, joint_attention_dim=24,
        axes_dims_rope=(4, 4, 8), **_SIZES,
    )  # fmt: skip


def _wan() -> Any:
    return diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, ffn_dim=32,
        image_dim=20, added_kv_proj_dim=48, **_SIZES,
    )  # fmt: skip


def _tokens(width: int, ids: int) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(1, 16, 4),
        "encoder_hidden_states": torch.randn(1, 6, width),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.randn(16, ids),
        "txt_ids": torch.randn(6, ids),
        "guidance": torch.tensor([3.5]),
    }


def _mask() -> dict[str, Any]:
    return {"attention_mask": torch.ones(1, 22, dtype=torch.bool)}


MODELS: dict[str, tuple[Callable[[], Any], Inputs]] = {
    "chroma": (_chroma, lambda: {k: v for k, v in (_tokens(32, 3) | _mask()).items() if k != "guidance"}),
    "hunyuan_video": (
        _hunyuan,
        lambda: {
            "hidden_states": torch.randn(1, 4, 2, 8, 8),
            "timestep": torch.tensor([500]),
            "encoder_hidden_states": torch.randn(1, 6, 16),
            "encoder_attention_mask": torch.ones(1, 6),
            "pooled_projections": torch.randn(1, 8),
            "guidance": torch.tensor([3.5]),
        },
    ),
    "z_image": (
        _z_image,
        lambda: {"x": [torch.randn(4, 1, 8, 8)], "t": torch.tensor([0.5]), "cap_feats": [torch.randn(32, 16)]},
    ),
    "flux": (flux, lambda: {**_tokens(32, 3), "pooled_projections": torch.randn(1, 24)}),
    "flux2": (_flux2, lambda: _tokens(24, 4)),
    "sd3": (
        _sd3,
        lambda: {
            "hidden_states": torch.randn(1, 4, 8, 8),
            "encoder_hidden_states": torch.randn(1, 6, 40),
            "pooled_projections": torch.randn(1, 24),
            "timestep": torch.tensor([500]),
        },
    ),
    "qwen_image": (
        _qwen,
        lambda: {
            "hidden_states": torch.randn(1, 16, 16),
            "encoder_hidden_states": torch.randn(1, 6, 24),
            "encoder_hidden_states_mask": torch.ones(1, 6, dtype=torch.bool),
            "timestep": torch.tensor([0.5]),
            "img_shapes": [[(1, 4, 4)]],
        },
    ),
    "wan": (
        _wan,
        lambda: {
            "hidden_states": torch.randn(1, 4, 2, 8, 8),
            "encoder_hidden_states": torch.randn(1, 512, 16),  # the model takes what is beyond these for the image
            "encoder_hidden_states_image": torch.randn(1, 5, 20),
            "timestep": torch.tensor([500]),
        },
    ),
}


def filled(make: Callable[[], Any], seed: int = 0) -> Any:
    """The model with weights that are not those of its start, of which some are zeros."""
    torch.manual_seed(seed)
    model = make().eval()
    for p in model.parameters():
        p.data = torch.randn_like(p) * 0.1 + (p.data if p.ndim == 1 else 0)
    return model


def computed(model: Any, name: str) -> Any:
    """What a model gives for its inputs, which are the same each time."""
    torch.manual_seed(1)
    given = MODELS[name][1]()
    with torch.no_grad():
        (out,) = model(**given, return_dict=False)
    return out[0] if isinstance(out, list) else out
