"""Inputs for any tiny model, and what it computes of them."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

LENGTH = 24


def inputs(model: Any) -> dict[str, Any]:
    """Random inputs of the model's own kind: two sentences, and what else it cannot do without."""
    import torch

    draw = torch.Generator().manual_seed(5)
    accepted = inspect.signature(model.forward).parameters
    tokens = torch.randint(100, 270, (2, LENGTH), generator=draw)
    config = model.config
    out: dict[str, Any] = {}
    main = getattr(model, "main_input_name", "input_ids")
    if main == "input_features" or ("input_features" in accepted and "input_ids" not in accepted):
        frames = 2 * int(getattr(config, "max_source_positions", LENGTH))
        mels = int(getattr(config, "num_mel_bins", 0) or getattr(config, "input_feat_per_channel", 8))
        shape = (2, frames, mels) if "speech_to_text" in config.model_type else (2, mels, frames)
        out["input_features"] = torch.randn(shape, generator=draw)
    elif "input_ids" in accepted:
        out["input_ids"] = tokens
    if config.is_encoder_decoder and "decoder_input_ids" in accepted:
        out["decoder_input_ids"] = torch.randint(100, 270, (2, LENGTH), generator=draw)
    vision = getattr(config, "vision_config", None)
    if (
        vision is not None
        and "pixel_values" in accepted
        and hasattr(config, "text_config")
        and "ForCond" not in type(model).__name__
    ):
        size = getattr(vision, "image_size", 32)
        out["pixel_values"] = torch.randn(2, getattr(vision, "num_channels", 3), size, size, generator=draw)
    if "use_cache" in accepted:
        out["use_cache"] = False
    return out


def load(cls: type, folder: Path) -> Any:
    """The model of a checkpoint, in float32, computing plainly."""
    import torch

    model, info = cls.from_pretrained(  # type: ignore[attr-defined]
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
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
    if logits is not None:
        return logits.flatten()
    floats = [t for t in found.to_tuple() if isinstance(t, torch.Tensor) and t.is_floating_point()]
    return torch.cat([t.flatten() for t in floats])


def difference(a: Any, b: Any) -> float:
    """Largest difference, beside the largest number."""
    return float((a - b).abs().max() / max(1.0, float(a.abs().max())))
