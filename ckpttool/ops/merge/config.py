"""config.json of a merge: one model's, with what the merge has changed. And which of its small files stay behind."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ckpttool.errors import UnsupportedError
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
    stacks: Mapping[str, Sequence[int]] | None = None,
    dequantised: bool = False,
    untied: bool = False,
) -> dict[str, Any]:
    """The donor's config for the output.

    ``layers`` are the donor's layer numbers in the order of the output, when slices have changed them: lists with
    one entry per layer (``layer_types``) follow, and fields that tell layers apart by number, as ``renumbered`` has
    it. ``stacks`` are the same of a model with several stacks of layers, by what names in each begin with.
    ``untied``: head and embeddings were one tensor and are two.
    Raises UnsupportedError where ``renumbered`` does, and for a stack whose layers no field of the config counts.
    """
    config = without(donor) if dequantised else dict(donor)
    text = config.get("text_config")
    parts = [config]
    if isinstance(text, dict):
        config["text_config"] = dict(text)
        parts.append(config["text_config"])
    for part in parts:
        if layers is not None:
            _restack(part, layers)
        if untied and (part is config or TIED in part):
            part[TIED] = False
    for stack, numbers in (stacks or {}).items():
        _restack_one(config, stack, numbers)
    return config


_PARTS = {
    "vision_config": re.compile("visi|visual|image|patch"),
    "audio_config": re.compile("audio|speech"),
    "text_config": re.compile("text|language|llm"),
    "llm_config": re.compile("text|language|llm"),
    "encoder": re.compile(r"(?<![^.])encoder\."),
    "decoder": re.compile(r"(?<![^.])decoder\."),
}
"""Parts of config.json, and what the stacks are called that they are about."""
_COUNTS = {
    "encoder": ("encoder_layers", "num_encoder_layers", *LAYERS),
    "decoder": ("decoder_layers", "num_decoder_layers"),
    "": LAYERS,
}
"""Fields of the whole that count the layers of a stack. Transformers saves those of an encoder as the model's, too."""


def _restack_one(config: dict[str, Any], stack: str, layers: Sequence[int]) -> None:
    """Bring the fields in line that are about one stack. Raises UnsupportedError where there are none."""
    for name, words in _PARTS.items():
        part = config.get(name)
        if isinstance(part, dict) and words.search(stack):
            config[name] = part = dict(part)
            counted = [f for f in (*LAYERS, "depth", "encoder_layers") if isinstance(part.get(f), int)]
            if counted:
                _restack(part, layers)
                part |= dict.fromkeys(counted, len(layers))
                return
    if config.get("num_decoder_layers") is None and isinstance(config.get("num_layers"), int) and "coder." in stack:
        config["num_decoder_layers"] = config["num_layers"]  # what T5 takes for granted
    tower = any(_PARTS[name].search(stack) for name in ("vision_config", "audio_config"))
    fields = () if tower else next(f for word, f in _COUNTS.items() if word in stack)
    counted = [f for f in fields if isinstance(config.get(f), int)]
    if not counted:
        raise UnsupportedError(
            f"no field of config.json is known to count the layers of `{stack}`, of which there are {len(layers)} now",
            hint="merge this stack whole, with `models`",
        )
    if fields is LAYERS:
        _restack(config, layers)
    config |= {f: len(layers) for f in counted if config[f] == config[counted[0]]}


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
