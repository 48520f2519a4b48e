"""What the shrinking of a config cannot know: fields of single model types."""

from __future__ import annotations

from typing import Any

PLAIN_HEADS: frozenset[str] = frozenset()
"""Models that need hidden = heads x head_dim."""

SETTINGS: dict[str, dict[str, Any]] = {
    "fsmt": {"src_vocab_size": 272, "tgt_vocab_size": 272},
}
"""By model type; ``a.b`` is a field of a sub-config, ``...`` leaves a field to the class."""
