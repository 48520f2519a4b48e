"""One file for each rank of FSDP: what is read of it and let go must not grow with the other ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ckpttool.checkpoint import OpenOptions
from ckpttool.ops.reshard import prepare
from ckpttool.targeting.target import Target
from tests.helpers.hollow_torch import bytecheckpoint, dense, fsdp
from tests.scale.test_growth import STEEPEST, counted, slope

SHAPES = dense(1, hidden=64, inner=128, kv=64, vocab=128)


@pytest.mark.thorough  # see test_deepspeed for what is always counted
@pytest.mark.parametrize("save", [fsdp, bytecheckpoint])
def test_calls_grow_as_the_ranks_do(save: Callable[..., None], tmp_path: Path) -> None:
    cost = []
    for ranks in (2, 4, 32):
        save(tmp_path / str(ranks), SHAPES, ranks)
        with counted() as count:
            prepare(tmp_path / str(ranks), OpenOptions(), Target(format="dcp", sharding=ranks))
        cost.append(count[0])
    assert slope(cost[1:], 8) <= STEEPEST, cost
