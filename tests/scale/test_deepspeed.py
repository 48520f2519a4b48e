"""Each of a thousand ranks has a run of each parameter and of each of its moments: a million of them are common."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path

import pytest

from ckpttool.checkpoint import OpenOptions, open_checkpoint
from ckpttool.ops.reshard import prepare
from ckpttool.targeting.target import Target
from tests.helpers.hollow_torch import dense, zero3
from tests.scale.test_growth import STEEPEST, counted, slope

SHAPES = dense(1, hidden=64, inner=128, kv=64, vocab=128)


@pytest.mark.thorough  # bench/scale.py measures it, tests/unit/test_shards.py sees the packing
def test_what_is_kept_of_a_run(tmp_path: Path) -> None:
    """A byte offset, and no objects: so 70 billion parameters of 1,024 ranks stay below 300 MB."""
    kept = []
    for ranks in (2, 16):
        zero3(tmp_path / str(ranks), SHAPES, ranks)
        open_checkpoint(tmp_path / str(ranks))
        gc.collect()
        tracemalloc.start()
        held = open_checkpoint(tmp_path / str(ranks)).catalog.tensors
        gc.collect()
        kept.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        assert len(held) == 5 * len(SHAPES)
    files = 14 * 1_000
    assert kept[1] - kept[0] - files < 60 * 14 * 3 * len(SHAPES), kept


@pytest.mark.thorough  # what is kept of a run
def test_calls_grow_as_the_ranks_do(tmp_path: Path) -> None:
    cost = []
    for ranks in (2, 8, 64):
        zero3(tmp_path / str(ranks), SHAPES, ranks)
        with counted() as count:
            prepare(tmp_path / str(ranks), OpenOptions(), Target(format="universal"))
        cost.append(count[0])
    assert slope(cost[1:], 8) <= STEEPEST, cost
