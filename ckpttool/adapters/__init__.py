"""Low-rank adapters: what one says about itself, and what it changes in the tensors of a base model."""

from __future__ import annotations

from ckpttool.adapters.apply import InOut, adapt, combine
from ckpttool.adapters.base import Adapter, Change, Changes, LowRankTerm, Pair
from ckpttool.adapters.read import changed_parts, read_adapter

__all__ = [
    "Adapter",
    "Change",
    "Changes",
    "InOut",
    "LowRankTerm",
    "Pair",
    "adapt",
    "changed_parts",
    "combine",
    "read_adapter",
]
