"""What each rank's file holds, compared with the numpy judge: a rule that is wrong both ways cannot pass here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.command import reshard
from tests.helpers.families import MODELS
from tests.helpers.judge import Grid, held, write_ranks
from tests.helpers.tensorfile import assert_same, read, read_all, save_hf

GRIDS = {
    "tp2": Grid(tp=2),
    "tp8": Grid(tp=8),
    "tp2 pp3 ep4": Grid(tp=2, pp=3, ep=4, etp=1),
    "tp4 pp2 ep2 virtual": Grid(tp=4, pp=2, ep=2, etp=2, layout=(1, 1, 1, 0)),
}


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", MODELS)
def test_ranks_hold_what_numpy_says(name: str, grid: str, tmp_path: Path) -> None:
    model = MODELS[name]
    want = GRIDS[grid] if model.moe else GRIDS[grid].dense()
    save_hf(tmp_path / "src", model.tensors(), model.config)
    reshard(tmp_path / "src", tmp_path / "dst", "-q", *want.flags())
    for rank in range(want.world):
        found = read(tmp_path / "dst" / f"rank-{rank:05d}-of-{want.world:05d}.safetensors")
        assert_same(found, held(model, want, rank))


PATTERNS = {
    "tp8": "tp{tp:02d}/weights.safetensors",
    "tp2 pp3 ep4": "stage{pp}/ep_{ep:03d}.safetensors",  # tp follows from ep here: four ranks a stage, all in ep
    "tp4 pp2 ep2 virtual": "mp_rank_{tp:02d}_{pp:03d}.safetensors",
}


@pytest.mark.parametrize("grid", PATTERNS)
@pytest.mark.parametrize("name", MODELS)
def test_ranks_cut_by_numpy_are_put_together(name: str, grid: str, tmp_path: Path) -> None:
    """Files of another tool: no metadata, what is where must follow from names, config and flags."""
    model = MODELS[name]
    given = GRIDS[grid] if model.moe else GRIDS[grid].dense()
    pattern = PATTERNS[grid] if given.ep == GRIDS[grid].ep else PATTERNS[grid].replace("{ep:03d}", "{tp}")
    write_ranks(tmp_path / "src", model, given, pattern)
    reshard(tmp_path / "src", tmp_path / "dst", "-q", "--to", "hf", "--rank-pattern", pattern, *given.flags(""))
    assert_same(read_all(tmp_path / "dst"), model.tensors())
