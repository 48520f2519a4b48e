"""config.json of a merge: one model's, with what the merge has changed. And which of its small files stay behind."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ckpttool.formats.config import TIED
from ckpttool.quant.config import without

TRAINING = re.compile(
    r"(?:rng_state.*\.pth|scheduler\.pd(?:params|opt)|scheduler\.pt|scaler\.(?:pdparams|pt)|training_args\.bin"
    r"|trainer_state\.(?:json|bin)|saved_signal.*|model_meta\.json|\..*\.done.*)"
)
"""Small files that say where a training run stood: with them beside it, a trainer would take a merged model for a
checkpoint to go on from, and count its steps from there."""


def merged_config(donor: Mapping[str, Any], *, dequantized: bool = False, untied: bool = False) -> dict[str, Any]:
    """The donor's config for the output. ``untied``: head and embeddings were one tensor and are two."""
    config = without(donor) if dequantized else dict(donor)
    if not untied:
        return config
    config[TIED] = False
    text = config.get("text_config")
    if isinstance(text, dict) and TIED in text:
        config["text_config"] = {**text, TIED: False}
    return config
