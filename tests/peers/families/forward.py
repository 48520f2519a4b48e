"""Inputs for any tiny model, and what it computes of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

LENGTH = 24
FORBIDDEN = 1e20
"""Logits below minus that are of tokens that a model must not say; beside them all others would be equal."""


def _draw() -> Any:
    import torch

    return torch.Generator().manual_seed(5)


def _random(*shape: int) -> Any:
    import torch

    return torch.randn(shape, generator=_draw())


def _tokens(length: int = LENGTH) -> Any:
    """Two sentences of plain words: the special tokens of tiny models have small numbers."""
    import torch

    return torch.randint(100, 270, (2, length), generator=_draw())


def _text_and_image(config: Any) -> dict[str, Any]:
    return {"input_ids": _tokens(), "pixel_values": _image(config)}


def _image(config: Any) -> Any:
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", 32)
    return _random(2, getattr(vision, "num_channels", 3), size, size)


def _sound(config: Any) -> dict[str, Any]:
    for part in (config, *(getattr(config, n, None) for n in ("audio_config", "encoder_config", "encoder"))):
        mels = getattr(part, "num_mel_bins", None) or getattr(part, "input_feat_per_channel", None)
        if mels:
            frames = 2 * int(getattr(part, "max_source_positions", LENGTH))
            shape = (frames, mels) if config.model_type in FRAMES_FIRST else (mels, frames)
            return {"input_features": _random(2, *shape)}
    return {"input_values": _random(2, 1600)}


FRAMES_FIRST = frozenset({"speech_to_text", "canary", "cohere_asr", "seamless_m4t", "seamless_m4t_v2"})
"""Speech models whose features are [frames, mels]."""


def _querying(config: Any) -> dict[str, Any]:
    import torch

    found = _text_and_image(config)
    token = getattr(config, "image_token_id", None) or getattr(config, "image_token_index", 0)
    found["input_ids"][:, : config.num_query_tokens] = token or config.video_token_index
    found["qformer_input_ids"] = _tokens(8)
    return found | {"attention_mask": torch.ones_like(found["input_ids"])}


def _patches(config: Any) -> dict[str, Any]:
    import torch

    vision = config.vision_config
    return {
        "input_ids": _tokens(),
        "pixel_values": _random(2, 16, 3 * vision.patch_size**2),
        "pixel_attention_mask": torch.ones(2, 16, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4], [4, 4]]),
    }


def _tiles(config: Any) -> dict[str, Any]:
    import torch

    vision = config.vision_config
    tiles = vision.max_num_tiles
    return {
        "input_ids": _tokens(),
        "pixel_values": _random(2, 1, tiles, vision.num_channels, vision.image_size, vision.image_size),
        "aspect_ratio_ids": torch.full((2, 1), 6),
        "aspect_ratio_mask": torch.ones(2, 1, tiles, dtype=torch.long),
        "cross_attention_mask": torch.ones(2, LENGTH, 1, tiles, dtype=torch.long),
    }


def _moving(config: Any) -> dict[str, Any]:
    return {
        "state": _random(2, config.max_state_dim),
        "noise": _random(2, config.chunk_size, config.max_action_dim),
        "timestep": _random(2).abs(),
        "input_ids": _tokens(),
        "pixel_values": _image(config.vlm_config).unsqueeze(1),
        "pixel_attention_mask": _random(2, 1) < 100,
    }


def _features_or_text(config: Any) -> dict[str, Any]:
    return {"input_ids": _tokens(), "input_features": _random(2, 32, config.feature_projection_input_dim)}


def _spoken(config: Any) -> dict[str, Any]:
    audio = config.audio_config
    per_token = getattr(config, "audio_length_per_tok", 8)
    return {"input_ids": _tokens(), "input_features": _random(2, audio.num_mel_bins, LENGTH * per_token)}


def _boxes(config: Any) -> dict[str, Any]:
    import torch

    corner = torch.randint(0, 60, (2, LENGTH, 2), generator=_draw())
    size = config.max_2d_position_embeddings
    return {
        "input_ids": _tokens(),
        "bbox": torch.cat([corner, corner + 30], -1) / size,
        "decoder_input_ids": _tokens(),
    }


def _kosmos(config: Any) -> dict[str, Any]:
    import torch

    mask = torch.zeros(2, LENGTH, dtype=torch.long)
    mask[:, : config.latent_query_num] = 1
    return _text_and_image(config) | {"image_embeds_position_mask": mask}


EXTRA: dict[str, Callable[[Any], dict[str, Any]]] = {
    "blip": _text_and_image,
    "blip-2": _querying,
    "instructblip": _querying,
    "instructblipvideo": lambda c: _querying(c) | {"pixel_values": _image(c).unsqueeze(1)},
    "idefics": lambda c: {
        "input_ids": _tokens(),
        "pixel_values": _image(c).unsqueeze(1),
        "image_attention_mask": _tokens().unsqueeze(-1).clamp(max=1),
    },
    "mllama": _tiles,
    "pi0": _moving,
    "seamless_m4t": _features_or_text,
    "seamless_m4t_v2": _features_or_text,
    "siglip2": _patches,
    "voxtral_realtime": _spoken,
    "pp_formulanet": lambda c: {"pixel_values": _image(c), "decoder_input_ids": _tokens()},
    "kyutai_speech_to_text": lambda c: {"input_ids": _tokens((c.num_codebooks + 1) * 8).view(2, 8, -1).remainder(30)},
    "kosmos-2": _kosmos,
    "udop": _boxes,
    "vision-encoder-decoder": lambda c: {
        "pixel_values": _image(c.encoder),
        "decoder_input_ids": _tokens(),
    },
    "pix2struct": lambda c: {
        "flattened_patches": _random(2, 16, 2 + c.vision_config.patch_embed_hidden_size).abs().round(),
        "decoder_input_ids": _tokens(),
    },
    "musicgen": lambda c: {"input_ids": _tokens(LENGTH).repeat(c.num_codebooks, 1)[:, :8].remainder(60)},
    "musicgen_decoder": lambda c: {"input_ids": _tokens().repeat(c.num_codebooks, 1).remainder(60)},
    "musicgen_melody_decoder": lambda c: {"input_ids": _tokens().repeat(c.num_codebooks, 1).remainder(60)},
    "modernvbert": lambda _: {"input_ids": _tokens()},
    "ultravbert": lambda _: {"input_ids": _tokens()},
}
"""By model type: inputs that cannot be told from the signature."""


def inputs(model: Any) -> dict[str, Any]:
    """Random inputs of the model's own kind: two sentences, and what else it cannot do without."""
    config = model.config
    accepted = inspect.signature(model.forward).parameters
    out: dict[str, Any] = {}
    if config.model_type in EXTRA:
        out = EXTRA[config.model_type](config)
    elif "input_ids" in accepted and "logits_per_image" in (inspect.getsource(type(model)) or ""):
        out = _text_and_image(config)
    elif "input_ids" in accepted:
        out["input_ids"] = _tokens()
    elif "pixel_values" in accepted:
        out["pixel_values"] = _image(config)
    else:
        out = _sound(config)
    if config.is_encoder_decoder and "decoder_input_ids" in accepted:
        out.setdefault("decoder_input_ids", _tokens())
    if "Classification" in type(model).__name__:
        out = {k: v[:1] for k, v in out.items()}  # of several it looks for the padding
    if "use_cache" in accepted:
        out["use_cache"] = False
    return {k: v for k, v in out.items() if k in accepted}


def runnable(model: Any) -> Any:
    """The part that has a forward: of models that also speak, the one that thinks."""
    return getattr(model, "thinker", model)


def load(cls: type, folder: Path) -> Any:
    """The model of a checkpoint, in float32, computing plainly."""
    import torch
    from transformers import PreTrainedModel

    # Not that of the class: Qwen2.5-Omni's looks for a file of voices.
    model, info = PreTrainedModel.from_pretrained.__func__(
        cls, folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(kind):
            raise AssertionError(f"transformers loads it with {kind}: {sorted(map(str, info[kind]))[:3]}")
    return model.eval()


def compute(model: Any, given: dict[str, Any]) -> Any:
    """The logits, or all that the model gives, as one row of numbers."""
    import torch

    torch.manual_seed(0)
    with torch.no_grad():
        found = model(**given)
    logits = getattr(found, "logits", None)
    floats = [t for t in found.to_tuple() if isinstance(t, torch.Tensor) and t.is_floating_point()]
    row = logits.flatten() if logits is not None else torch.cat([t.flatten() for t in floats])
    return row.where(row.abs() < FORBIDDEN, 0.0)


def difference(a: Any, b: Any) -> float:
    """Largest difference, beside the largest number."""
    return float((a - b).abs().max() / max(1.0, float(a.abs().max())))
