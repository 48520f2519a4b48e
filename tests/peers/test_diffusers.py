"""Pipelines of diffusers: what is written is loaded by diffusers itself, and cut models give the same outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

diffusers = pytest.importorskip("diffusers")
torch = pytest.importorskip("torch")

from safetensors import safe_open  # noqa: E402 - behind the libraries that may lack
from safetensors.torch import load_file, save_file  # noqa: E402

from tests.helpers.command import ckpttool, reshard  # noqa: E402

Inputs = Callable[[], dict[str, Any]]
_SIZES: dict[str, Any] = {"num_layers": 2, "num_attention_heads": 4}


def _flux() -> Any:
    return diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_single_layers=2, attention_head_dim=16, joint_attention_dim=32,
        pooled_projection_dim=24, axes_dims_rope=[4, 4, 8], guidance_embeds=True, **_SIZES,
    )  # fmt: skip


def _flux2() -> Any:
    return diffusers.Flux2Transformer2DModel(
        patch_size=1, in_channels=4, num_single_layers=2, attention_head_dim=16, joint_attention_dim=24,
        timestep_guidance_channels=8, axes_dims_rope=(4, 4, 4, 4), **_SIZES,
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


MODELS: dict[str, tuple[Callable[[], Any], Inputs]] = {
    "flux": (_flux, lambda: {**_tokens(32, 3), "pooled_projections": torch.randn(1, 24)}),
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
            "encoder_hidden_states": torch.randn(1, 6, 16),
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


def weights(folder: Path) -> dict[str, Any]:
    return {n: t for f in sorted(folder.glob("*.safetensors")) for n, t in load_file(f).items()}


def exchanged(folder: Path) -> None:
    """Rank 0 becomes rank 1 and the other way round."""
    first, second = sorted(folder.glob("rank-*.safetensors"))[:2]
    held = [load_file(f) for f in (second, first)]
    for path, tensors in zip((first, second), held, strict=True):
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        save_file(tensors, path, metadata=metadata)


@pytest.mark.parametrize("name", MODELS)
def test_ranks_are_units_of_the_model_that_are_all_alike(tmp_path: Path, name: str) -> None:
    """A cut that tears what belongs together, or leaves a partner whole, shows when the ranks are exchanged."""
    make, inputs = MODELS[name]
    model = filled(make)
    model.save_pretrained(tmp_path / "hf")
    reshard(tmp_path / "hf", tmp_path / "cut", "--tp-out", 2, "--verify")
    reshard(tmp_path / "cut", tmp_path / "back", "--to", "hf")
    before, after = weights(tmp_path / "hf"), weights(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) for n in before)
    exchanged(tmp_path / "cut")
    reshard(tmp_path / "cut", tmp_path / "other", "--to", "hf")
    moved = weights(tmp_path / "other")
    assert sum(not torch.equal(before[n], moved[n]) for n in before) > 20
    torch.manual_seed(1)
    given = inputs()
    with torch.no_grad():
        wanted = model(**given, return_dict=False)[0]
        model.load_state_dict(moved)
        found = model(**given, return_dict=False)[0]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def parts() -> Iterator[tuple[str, Any]]:
    from transformers import CLIPTextConfig, CLIPTextModel

    yield "transformer", filled(_flux)
    yield "vae", diffusers.AutoencoderKL(block_out_channels=(4,), latent_channels=1, norm_num_groups=1)
    yield (
        "text_encoder",
        CLIPTextModel(
            CLIPTextConfig(
                vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
            )
        ),
    )


def test_a_pipeline_that_was_written_is_loaded(tmp_path: Path) -> None:
    lacking = dict.fromkeys(("tokenizer", "tokenizer_2", "text_encoder_2", "image_encoder", "feature_extractor"))
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    given = dict(parts())
    pipeline = diffusers.FluxPipeline(
        scheduler=scheduler, **{n: lacking[n] for n in ("tokenizer", "tokenizer_2", "text_encoder_2")}, **given
    )
    pipeline.save_pretrained(tmp_path / "src")
    reshard(tmp_path / "src", tmp_path / "dst", "--dtype", "bf16", "--max-shard-size", "300kB", "--verify")
    assert len(list((tmp_path / "dst" / "transformer").glob("diffusion_pytorch_model-*.safetensors"))) > 1
    loaded = diffusers.FluxPipeline.from_pretrained(tmp_path / "dst", dtype=torch.bfloat16, **lacking)
    for name, model in given.items():
        wanted, found = model.state_dict(), getattr(loaded, name).state_dict()
        assert wanted.keys() == found.keys()
        assert all(torch.equal(wanted[n].to(torch.bfloat16), found[n]) for n in wanted), name
    done = ckpttool("reshard", tmp_path / "src", tmp_path / "one", "--part", "vae", "--dtype", "f16")
    assert done.code == 0, done.err
    assert diffusers.FluxPipeline.from_pretrained(tmp_path / "one", **lacking).transformer.dtype == torch.float32
