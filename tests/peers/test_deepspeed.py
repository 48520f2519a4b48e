"""DeepSpeed itself, on CPU: its saves are read as its engine says, and ``load_universal`` goes on from what is written.

What the engine holds after a load is compared bit for bit, and so is what it holds after one more step, with the run
that was not converted.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.command import refused, reshard
from tests.peers import dcp_ranks, moe_ranks
from tests.peers.deepspeed_side import train
from tests.peers.rank_group import Group
from tests.peers.rank_training import Held
from tests.peers.test_torch_bin import same


class Case(NamedTuple):
    """How a run was made, and which other stages and numbers of ranks go on from it."""

    world: int
    made: dict[str, Any]
    others: list[tuple[int, int]]


GROUPS = {"groups": True, "frozen": True, "schedule": True}
CASES = {
    "z1": Case(3, {"stage": 1, **GROUPS, "zero": {"parameter_alignment": True}}, [(2, 2), (3, 1)]),
    "bf16": Case(2, {"stage": 1, "tied": True, "config": {"data_types": {"grad_accum_dtype": "fp32"}}}, [(3, 3)]),
    "z2": Case(2, {"stage": 2, "precision": "fp32", "zero": {"elastic_checkpoint": True}}, [(1, 4), (3, 2)]),
    "z3": Case(4, {"stage": 3, "frozen": True, "zero": {"sub_group_size": 40}}, [(3, 1), (1, 2)]),
    "z3_tied": Case(2, {"stage": 3, "tied": True}, [(2, 3)]),
}


class Saved(NamedTuple):
    case: Case
    folder: Path
    held: Held
    after: Held
    """One step later."""


@pytest.fixture(scope="module", params=CASES)
def saved(request: pytest.FixtureRequest, ranks: Callable[[int], Group], tmp_path_factory: Any) -> Saved:
    case, folder = CASES[request.param], tmp_path_factory.mktemp("save")
    held, after = ranks(case.world).run(train, case.made, str(folder))
    assert any(not torch.equal(after[k], held[k]) for k in held)
    return Saved(case, folder, held, after)


def test_a_save_is_read_as_the_engine_says(saved: Saved, tmp_path: Path) -> None:
    reshard(saved.folder, tmp_path / "out", "--to", "ranks", "--tp-out", 1)
    got = load_file(tmp_path / "out" / "rank-00000-of-00001.safetensors")
    # The engine answers for a tie twice.
    once = {k: v for k, v in saved.held.items() if k in got or "head.weight" not in k}
    same({k: v for k, v in got.items() if not k.endswith("/step")}, once)


def test_every_stage_goes_on_from_what_is_written(saved: Saved, ranks: Callable[[int], Group], tmp_path: Path) -> None:
    reshard(saved.folder, tmp_path / "universal", "--to", "universal", "--verify")
    # Without their sub-groups: DeepSpeed 0.19.8 gives all of them one step, which each counts up.
    made = {**saved.case.made, "zero": {}}
    made["config"] = {**made.get("config", {}), "checkpoint": {"load_universal": True}}
    for stage, world in [(made["stage"], saved.case.world), *saved.case.others]:
        held, after = ranks(world).run(train, {**made, "stage": stage}, "", str(tmp_path / "universal"))
        same(held, saved.held)
        if stage < 3 or "groups" not in made:  # stage 3 gives all groups the values of the first
            same(after, saved.after)


@pytest.mark.parametrize(("saved", "worlds"), [("z1", [1, 4]), ("z2", [2]), ("z3", [2])], indirect=["saved"])
def test_fsdp2_goes_on_from_dcp(saved: Saved, worlds: list[int], ranks: Callable[[int], Group], tmp_path: Path) -> None:
    """With the masters as parameters."""
    reshard(saved.folder, tmp_path / "dcp", "--to", "dcp", "--sharding-out", 3)
    made = saved.case.made
    case = {key: key in made for key in ("frozen", "groups")}
    told = {"masters": made.get("precision") != "fp32", "known": "elastic_checkpoint" not in made["zero"]}
    for world in worlds:
        weights, *runs = ranks(world).run(dcp_ranks.resume, str(tmp_path / "dcp"), case, **told)
        same({k: v.to(saved.held[k].dtype) for k, v in weights.items()}, {k: saved.held[k] for k in weights})
        for got, want in zip(runs, (saved.held, saved.after), strict=True):
            wide = {k: v.to(got[k].dtype) for k, v in want.items() if k in got}
            wide |= {k.removeprefix("master_weights/"): v for k, v in want.items() if k.startswith("master_weights/")}
            same({k: v for k, v in got.items() if not k.endswith("/step")}, wide)


def test_what_zero_to_fp32_gives_is_the_masters(tmp_path: Path) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    source = Path("fixtures/torch/deepspeed/rr")
    want = get_fp32_state_dict_from_zero_checkpoint(str(source))
    reshard(source, tmp_path / "out", "--to", "ranks", "--tp-out", 1, "--only", "master_weights")
    got = {k: v for f in (tmp_path / "out").glob("*.safetensors") for k, v in load_file(f).items()}
    assert len(got) == 12
    for name, master in got.items():
        assert (master == want[name.removeprefix("master_weights/")]).all(), name


SAME_TYPE = {"data_types": {"grad_accum_dtype": "bf16"}}
WITHOUT_ZERO: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32", **GROUPS},
    "bf16": {"config": SAME_TYPE, **GROUPS},
    "bf16_tied": {"config": SAME_TYPE, "tied": True},
    "fused": {"config": SAME_TYPE, "fused": True},
}


@pytest.mark.parametrize("name", WITHOUT_ZERO)
def test_a_save_without_zero(name: str, ranks: Callable[[int], Group], tmp_path: Path) -> None:
    """Its optimizer has numbers, or one vector; masters and moments are those that the optimizer itself has."""
    held, _ = ranks(2).run(train, {"stage": 0, **WITHOUT_ZERO[name]}, str(tmp_path / "run"))
    reshard(tmp_path / "run", tmp_path / "out", "--to", "ranks", "--tp-out", 1)
    got = load_file(tmp_path / "out" / "rank-00000-of-00001.safetensors")
    assert any(n.startswith("optimizer/") for n in got)
    once = {k: v for k, v in held.items() if k in got or "head.weight" not in k}
    same(got, once)


def test_vectors_of_several_groups_are_left_out(ranks: Callable[[int], Group], tmp_path: Path) -> None:
    case = {"stage": 0, "config": SAME_TYPE, "fused": True, "groups": True}
    ranks(2).run(train, case, str(tmp_path / "run"))
    error = refused(tmp_path / "run", tmp_path / "out", "--to", "ranks", "--tp-out", 1)
    assert "the save does not record which of the parameters are in the vectors of its groups" in error
    assert "is not read: the save does not record" in reshard(tmp_path / "run", tmp_path / "out", "--to", "hf").err


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_optimizer_on_the_cpu(stage: int, ranks: Callable[[int], Group], tmp_path: Path) -> None:
    """ZeRO-Offload saves the same."""
    zero = {"offload_optimizer": {"device": "cpu"}}
    held, _ = ranks(2).run(train, {"stage": stage, "zero": zero, **GROUPS}, str(tmp_path / "run"))
    reshard(tmp_path / "run", tmp_path / "out", "--to", "ranks", "--tp-out", 1)
    got = load_file(tmp_path / "out" / "rank-00000-of-00001.safetensors")
    same({k: v for k, v in got.items() if not k.endswith("/step")}, held)


# -- experts


@pytest.mark.parametrize(("stage", "world", "ep"), [(0, 2, 2), (1, 2, 1), (1, 4, 2), (2, 2, 1), (2, 2, 2)])
def test_experts(stage: int, world: int, ep: int, ranks: Callable[[int], Group], tmp_path: Path) -> None:
    """All experts under their numbers among all; where each rank has all of them, the optimizer, too."""
    case = {"stage": stage, "ep": ep, "residual": ep == 2}
    want = ranks(world).run(moe_ranks.save, case, str(tmp_path / "save"))
    model = {n: t for n, t in want.items() if "/" not in n}
    reshard(tmp_path / "save", tmp_path / "hf", "--to", "hf", "--verify")
    same(load_file(tmp_path / "hf/model.safetensors"), model)
    if not stage or ep > 1:
        error = refused(tmp_path / "save", tmp_path / "whole", "--to", "universal")
        assert "the state of the experts" in error or "without ZeRO" in error or "expert parallelism" in error
        return
    reshard(tmp_path / "save", tmp_path / "whole", "--to", "ranks", "--tp-out", 1)
    got = {n: t for path in (tmp_path / "whole").glob("*.safetensors") for n, t in load_file(path).items()}
    same({n: t for n, t in got.items() if not n.endswith("/step")}, want)
    assert len(want) > 3 * len(model)
