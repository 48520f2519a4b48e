"""Architectures that transformers does not have, or whose published files it does not read: their names, and a forward.

Each is judged like the others (``python -m tests.peers.families --only remote``). A maker writes a tiny checkpoint with
the names and the config.json of the published ones; ``compute`` gives the logits of such a checkpoint: with a small
forward of its own, or with a model of transformers that is the same mathematically.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Remote:
    """How such an architecture is made and run."""

    model_type: str
    """As in the published config.json; another name where that has none."""
    save: Callable[[Path], int]
    """Writes config.json and model.safetensors (float32, seeded, no weight all ones); returns the parameters."""
    compute: Callable[[Path], Any]
    """The logits of a checkpoint, as one row of numbers."""


REMOTE: dict[str, Remote] = {}
"""By class, the `architectures` of config.json."""

from tests.peers.families import (  # noqa: E402 - they fill the table
    remote_diffusion,  # noqa: F401
    remote_minimax,  # noqa: F401
    remote_text,  # noqa: F401
    remote_towers,  # noqa: F401
)
