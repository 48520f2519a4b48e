"""DeepSeek-V3 as Megatron Core saves it has 45,000 chunks, and 30,000 entries that are no tensors."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from ckpttool.checkpoint import OpenOptions, open_checkpoint
from ckpttool.ops.reshard import prepare
from ckpttool.targeting.target import Target
from tests.helpers.hollow_torch import DEEPSEEK_ARGS, deepseek_keys, torch_dist
from tests.scale.test_growth import STEEPEST, counted, slope

LAYERS = 5
TARGETS = (Target(format="hf"), Target(format="ranks", tp=8, ep=8))


def save(path: Path, experts: int) -> Path:
    """Two layers without experts and three with: their shapes are true, and the files hold nothing but heads."""
    args: dict[str, Any] = {
        **DEEPSEEK_ARGS,
        "num_layers": LAYERS,
        "num_experts": experts,
        "moe_layer_freq": [0, 0, 1, 1, 1],
        "pipeline_model_parallel_size": 2,
        "expert_model_parallel_size": 8,
    }
    torch_dist(path, deepseek_keys(LAYERS, 2, experts), args)
    return path


@pytest.mark.thorough  # files of a large model
def test_every_chunk_is_a_piece(tmp_path: Path) -> None:
    """Two chunks of gate and up for each expert, one of down."""
    catalog = open_checkpoint(save(tmp_path / "save", 8)).catalog
    routed = [t for t in catalog if ".local_experts." in t.key.name]
    assert len(routed) == 3 * 8 * 2
    assert sum(len(t.pieces) for t in routed) == 3 * 8 * 3


@pytest.mark.thorough  # calls of plans
def test_calls_grow_as_the_experts_do(tmp_path: Path) -> None:
    cost: list[int] = []
    for experts in (8, 64, 512):
        path = save(tmp_path / str(experts), experts)
        with counted() as count:
            for target in TARGETS:
                prepare(path, OpenOptions(), target)
        cost.append(count[0])
    assert slope(cost[1:], 8) <= STEEPEST, cost


@pytest.mark.thorough  # the memory of a catalog
def test_memory_of_a_chunk(tmp_path: Path) -> None:
    """All of DeepSeek-V3 stays below 300 MB."""
    path = save(tmp_path / "save", 256)
    open_checkpoint(path)
    tracemalloc.start()
    catalog = open_checkpoint(path).catalog
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    chunks = sum(len(t.pieces) for t in catalog)
    assert peak < 4_000 * chunks, peak / chunks
