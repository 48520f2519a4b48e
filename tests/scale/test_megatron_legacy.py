"""Megatron-LM's own saves have a directory for each rank: what is read of one must not grow with the others."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from ckpttool.checkpoint import OpenOptions, open_checkpoint
from ckpttool.ops.reshard import prepare
from ckpttool.targeting.target import Target
from tests.helpers.hollow_torch import megatron_ranks
from tests.scale.test_growth import STEEPEST, counted, slope

MESHES = ((2, 1, 2, 1), (2, 2, 2, 2), (4, 4, 2, 4))
"""tp, pp, ep, etp: of 2, 8 and 32 ranks."""


@pytest.mark.thorough  # calls of plans
def test_calls_grow_as_the_ranks_do(tmp_path: Path) -> None:
    cost = []
    for tp, pp, ep, etp in MESHES:
        path = tmp_path / f"{tp}{pp}{ep}{etp}"
        megatron_ranks(path, tp, pp, ep, etp, layers=4 * pp, experts=8)
        with counted() as count:
            prepare(path, OpenOptions(), Target(format="dcp", sharding=4))
        cost.append(count[0])
    assert slope(cost[1:], 4) <= STEEPEST, cost


@pytest.mark.thorough  # the memory of a catalog
def test_memory_of_a_tensor(tmp_path: Path) -> None:
    """1,024 files of ranks stay below 200 MB, with the optimizer."""
    megatron_ranks(tmp_path / "save", 4, 4, 4, 4, layers=16, experts=32)
    open_checkpoint(tmp_path / "save")
    tracemalloc.start()
    checkpoint = open_checkpoint(tmp_path / "save")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    stored = len(checkpoint.stored.tensors)
    assert stored > 15_000
    assert peak < 900 * stored, peak / stored
