"""What each rank's file holds, compared with the numpy judge: a rule that is wrong both ways cannot pass here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.helpers.command import ckpttool, reshard
from tests.helpers.families import MODELS
from tests.helpers.judge import Grid, held, write_ranks
from tests.helpers.tensorfile import Raw, assert_same, read, read_all, save_hf

GRIDS = {
    "tp2": Grid(tp=2),
    "tp8": Grid(tp=8),
    "tp2 pp3 ep4": Grid(tp=2, pp=3, ep=4, etp=1),
    "tp4 pp2 ep2 virtual": Grid(tp=4, pp=2, ep=2, etp=2, layout=(1, 1, 1, 0)),
}


@pytest.mark.product
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", MODELS)
def test_ranks_hold_what_numpy_says(name: str, grid: str, tmp_path: Path) -> None:
    model = MODELS[name]
    want = GRIDS[grid] if model.moe else GRIDS[grid].dense()
    tensors = model.tensors()
    save_hf(tmp_path / "src", tensors, model.config)
    reshard(tmp_path / "src", tmp_path / "dst", "-q", *want.flags())
    for rank in range(want.world):
        found = read(tmp_path / "dst" / f"rank-{rank:05d}-of-{want.world:05d}.safetensors")
        assert_same(found, held(model, want, rank, tensors))


PATTERNS = {
    "tp8": "tp{tp:02d}/weights.safetensors",
    "tp2 pp3 ep4": "stage{pp}/ep_{ep:03d}.safetensors",  # tp follows from ep here: four ranks a stage, all in ep
    "tp4 pp2 ep2 virtual": "mp_rank_{tp:02d}_{pp:03d}.safetensors",
}


# The rules are those of the test above, for every model.
@pytest.mark.product(one_in=13)
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


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_doubles_are_rounded_once_whatever_writes_them(dtype: str, tmp_path: Path) -> None:
    """1 + 2^-8 (2^-11) is halfway; what float32 does not hold of the number above it decides."""
    half = 2.0 ** (-8 if dtype == "bf16" else -11)
    values = np.array([1 + half, 1 + half + 2.0**-40, 1 + half - 2.0**-40, 1 + 3 * half - 2.0**-40])
    wanted = [1.0, 1 + 2 * half, 1.0, 1 + 2 * half]
    source = save_hf(tmp_path / "src", {"a.weight": Raw("F64", values.view("<u8"))})
    reshard(source, tmp_path / "cast", "--dtype", dtype, "--verify")
    done = ckpttool("merge", source, "-o", tmp_path / "merged", "--method", "passthrough", "--dtype", dtype, "--verify")
    assert done.code == 0, done.err
    for folder in ("cast", "merged"):
        found = read_all(tmp_path / folder)["a.weight"].bits
        numbers = (found.astype("<u4") << 16).view("<f4") if dtype == "bf16" else found.view("<f2")
        assert numbers.tolist() == wanted, folder
