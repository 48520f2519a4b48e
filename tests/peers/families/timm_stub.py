"""Towers of timm, which is not installed: one small convolution stands for them, as no text goes through it."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any


@cache
def install() -> None:
    """From now on transformers' wrapper of timm's models can be made."""
    import torch
    import transformers

    made = importlib.import_module("transformers.models.timm_wrapper.modeling_timm_wrapper")
    if not hasattr(made, "timm"):

        def create(*_: Any, **__: Any) -> Any:
            tower = torch.nn.Module()
            tower.conv_stem = torch.nn.Conv2d(3, 8, 3)
            return tower

        made._create_timm_model_with_error_handling = create  # type: ignore[attr-defined]
        made.requires_backends = lambda *_: None  # type: ignore[attr-defined]
        for module in (transformers, importlib.import_module("transformers.models.timm_wrapper")):
            setattr(module, "TimmWrapperModel", made.TimmWrapperModel)  # noqa: B010 - it is no attribute of its type
