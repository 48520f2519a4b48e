"""config.json of a merge: one model's, with what the merge has changed. And which of its small files stay behind."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ckpttool.formats.config import LAYERS, TIED
from ckpttool.ops.merge.layer_kinds import renumbered
from ckpttool.quant.config import without

TRAINING = re.compile(
    r"(?:rng_state.*\.pth|scheduler\.pd(?:params|opt)|scheduler\.pt|scaler\.(?:pdparams|pt)|training_args\.bin"
    r"|trainer_state\.(?:json|bin)|saved_signal.*|model_meta\.json|\..*\.done.*)"
)
"""Small files that say where a training run stood: with them beside it, a trainer would take a merged model for a
checkpoint to go on from, and count its steps from there."""


def merged_config(
    donor: Mapping[str, Any],
    *,
    layers: Sequence[int] | None = None,
    vocabulary: int | None = None,
    dequantised: bool = False,
    untied: bool = False,
) -> dict[str, Any]:
    """The donor's config for the output.

    ``layers`` are the donor's layer numbers in the order of the output, when slices have changed them: lists with
    one entry per layer (``layer_types``) follow, and fields that tell layers apart by number, as ``renumbered`` has
    it. ``vocabulary`` is the new number of tokens. ``untied``: head and embeddings were one tensor and are two.
    Raises UnsupportedError where ``renumbered`` does.
    """
    config = without(donor) if dequantised else dict(donor)
    text = config.get("text_config")
    parts = [config]
    if isinstance(text, dict):
        config["text_config"] = dict(text)
        parts.append(config["text_config"])
    for part in parts:
        if vocabulary is not None and "vocab_size" in part:
            part["vocab_size"] = vocabulary
        if layers is not None:
            _restack(part, layers)
        if untied and (part is config or TIED in part):
            part[TIED] = False
    return config


def _restack(config: dict[str, Any], layers: Sequence[int]) -> None:
    count = next((config[f] for f in LAYERS if isinstance(config.get(f), int)), None)
    numbered = renumbered(config, count, layers) if count else {}
    for name, value in config.items():
        if name == "mlp_only_layers":  # numbers of layers, however many these are
            continue
        if isinstance(value, list) and count and len(value) == count and max(layers, default=0) < count:
            config[name] = [value[i] for i in layers]
    for name in LAYERS:
        if name in config:
            config[name] = len(layers)
    config |= numbered
