"""Diffusion transformers of diffusers, whose config.json has a `_class_name`; their output stands for the logits."""

from __future__ import annotations

import importlib.util
import json
from functools import partial
from pathlib import Path
from typing import Any

from tests.peers.families.remote import REMOTE, Remote

CLASSES = {
    "chroma": "ChromaTransformer2DModel",
    "flux": "FluxTransformer2DModel",
    "flux2": "Flux2Transformer2DModel",
    "hunyuan_video": "HunyuanVideoTransformer3DModel",
    "qwen_image": "QwenImageTransformer2DModel",
    "sd3": "SD3Transformer2DModel",
    "wan": "WanTransformer3DModel",
    "z_image": "ZImageTransformer2DModel",
}
"""By the name of the family, which stands where others have a model type."""


def save(name: str, folder: Path) -> int:
    from tests.peers.diffusion import MODELS, filled

    model = filled(MODELS[name][0])
    model.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), "torch_dtype": "float32"}))
    return sum(p.numel() for p in model.parameters())


def compute(name: str, folder: Path) -> Any:
    from safetensors.torch import load_file

    from tests.peers.diffusion import MODELS, computed

    model = MODELS[name][0]().eval()
    model.load_state_dict({n: t for f in sorted(folder.glob("*.safetensors")) for n, t in load_file(f).items()})
    return computed(model, name).flatten()[None]


if importlib.util.find_spec("diffusers"):
    REMOTE.update({c: Remote(n, partial(save, n), partial(compute, n)) for n, c in CLASSES.items()})
