"""DeepSpeed's universal checkpoints: those of its own converter are read, and what is written holds all that it has.

``fixtures/torch/deepspeed/universal_CASE`` are what ``ds_to_universal`` makes of the saves in test_deepspeed.py. The
engine itself loads what is written in tests/peers.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from ckpttool.checkpoint import open_checkpoint
from ckpttool.containers.torch_pickle import TorchTensor
from ckpttool.containers.torch_zip import read_torch
from ckpttool.core.geometry import contiguous_strides
from tests.helpers import tensorfile
from tests.helpers.command import ckpttool, refused, reshard
from tests.helpers.dcp import rows, write_save
from tests.helpers.torch_edit import edit
from tests.helpers.training_run import SHAPES, groups, names, save_run

CASES = Path("fixtures/torch/deepspeed")


def ranks(src: Path, dst: Path) -> tensorfile.Tensors:
    reshard(src, dst, "--to", "ranks", "--tp-out", 1)
    return tensorfile.read_all(dst)


@pytest.fixture
def universal(tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a fixture that may be damaged."""

    def copy(case: str) -> Path:
        return Path(shutil.copytree(CASES / f"universal_{case}", tmp_path / case))

    return copy


@pytest.mark.parametrize("case", ["z1", "z3"])
def test_what_the_converter_made_holds_what_it_was_made_of(case: str, tmp_path: Path) -> None:
    want = ranks(CASES / case, tmp_path / "zero")
    tensorfile.assert_same(ranks(CASES / f"universal_{case}", tmp_path / "universal"), want)
    theirs, ours = (open_checkpoint(CASES / name).stored.training for name in (case, f"universal_{case}"))
    assert theirs is not None
    assert theirs == ours


@pytest.mark.sample("z3", "ams", "bf16")
@pytest.mark.parametrize("case", ["z1", "z2", "z3", "ams", "bf16"])
def test_what_is_written_is_read_back(case: str, tmp_path: Path) -> None:
    reshard(CASES / case, tmp_path / "universal", "--to", "universal", "--verify")
    want = ranks(CASES / case, tmp_path / "zero")
    tensorfile.assert_same(ranks(tmp_path / "universal", tmp_path / "back"), want)
    theirs, ours = (open_checkpoint(p).stored.training for p in (CASES / case, tmp_path / "universal"))
    assert theirs is not None
    assert ours is not None
    assert [(set(g.parameters), dict(g.values)) for g in theirs.groups] == [
        (set(g.parameters), dict(g.values)) for g in ours.groups
    ]
    assert ours.step == 3
    assert {k: v for k, v in ours.plain.items() if k != "loss_scaler"} == theirs.plain


def test_the_files_are_those_that_every_stage_looks_for(tmp_path: Path) -> None:
    out = tmp_path / "out"
    reshard(CASES / "z1", out, "--to", "universal")
    tag = out / (out / "latest_universal").read_text()
    assert tag.name == "global_step3_universal"
    theirs = CASES / "universal_z1/global_step3_universal/zero"
    untrained = {Path(f"{name}/fp32.pt") for name in ("positions", "embed.weight", "blocks.1.up.bias")}
    assert {p.relative_to(tag / "zero") for p in tag.glob("zero/*/*.pt")} == {
        p.relative_to(theirs) for p in theirs.glob("*/*.pt")
    } - untrained
    for path in sorted(theirs.glob("*/*.pt")):
        if path.relative_to(theirs) not in untrained:
            mine, their = read_torch(tag / "zero" / path.relative_to(theirs)).value, read_torch(path).value
            if isinstance(mine, dict):
                assert mine.keys() == their.keys()
                assert mine["cat_dim"] == their["cat_dim"] == 0
                mine, their = mine["param"], their["param"]
            assert (mine.dtype, mine.shape) == (their.dtype, their.shape)
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        states = read_torch(tag / name).value
        for key in ("module", "param_shapes", "ds_version", "dp_world_size", "mp_world_size", "global_steps"):
            assert key in states
        assert states["lr_scheduler"]["last_epoch"] == 3
        assert states["epoch"] == 4
    state = read_torch(tag / "zero/optimizer_state.pt").value
    assert state["param_groups"][1]["betas"] == (0.8, 0.99)
    assert isinstance(state["optimizer_state_dict"]["state"][0]["step"], TorchTensor)
    assert len(state["optimizer_state_dict"]["param_groups"]) == 2


def test_float32_weights_are_their_own_masters(tmp_path: Path) -> None:
    out = tmp_path / "out"
    reshard(CASES / "z2", out, "--to", "universal")
    name = "embed.weight"
    held = read_torch(out / "global_step3_universal/zero" / name / "fp32.pt")
    place = held.place(held.value["param"], name, 0)
    data = Path(str(held.info.place)).read_bytes()[place.offset : place.offset + place.nbytes]
    assert data == tensorfile.read(CASES / "z2.safetensors")[name].bits.tobytes()


def test_a_model_alone_is_no_universal_checkpoint(tmp_path: Path) -> None:
    error = refused(Path("fixtures/hf_tiny_source"), tmp_path / "out", "--to", "universal")
    assert "the source has only a model" in error
    error = refused(CASES / "z1", tmp_path / "out", "--to", "universal", "--only", "optimizer")
    assert "there is no master weight of" in error


def test_names_that_are_no_names_of_directories_are_refused(tmp_path: Path) -> None:
    rename = "blocks.0.up.weight=../../up"
    assert "cannot be the name of a directory" in refused(
        CASES / "z1", tmp_path / "out", "--to", "universal", "--rename", rename
    )


def test_a_latest_that_names_no_save_is_refused(universal: Callable[[str], Path], tmp_path: Path) -> None:
    there = universal("z1")
    (there / "latest_universal").write_text("global_step9")
    error = refused(there, tmp_path / "out", "--to", "hf")
    assert "`latest_universal` names the save `global_step9`, which is not here" in error
    assert "saves: global_step3_universal" in error


def test_missing_files_are_named(universal: Callable[[str], Path], tmp_path: Path) -> None:
    there = universal("z1")
    zero = there / "global_step3_universal/zero"
    (zero / "head.weight/fp32.pt").unlink()
    assert "there is no fp32.pt of `head.weight`" in refused(there, tmp_path / "out", "--to", "hf")
    shutil.rmtree(zero / "head.weight")
    assert "there is no directory of 1 parameters: head.weight" in refused(there, tmp_path / "out", "--to", "hf")


def test_a_file_of_another_size_is_refused(universal: Callable[[str], Path], tmp_path: Path) -> None:
    there = universal("z3")
    path = there / "global_step3_universal/zero/blocks.0.up.weight/exp_avg.pt"
    shutil.copy(path.parent.parent / "blocks.0.up.bias/exp_avg.pt", path)
    error = refused(there, tmp_path / "out", "--to", "ranks", "--tp-out", 1)
    assert "`blocks.0.up.weight` is [11] in a file, and [11, 7] in `param_shapes`" in error


def test_a_save_and_its_conversion_in_one_directory_are_told_apart_by_from(
    universal: Callable[[str], Path], tmp_path: Path
) -> None:
    there = universal("z1")
    shutil.copytree(CASES / "z1", there, dirs_exist_ok=True)
    assert "deepspeed or universal" in refused(there, tmp_path / "out", "--to", "hf")
    reshard(there, tmp_path / "one", "--to", "hf", "--from", "deepspeed")
    reshard(there, tmp_path / "two", "--to", "hf", "--from", "universal")
    tensorfile.assert_same(tensorfile.read_all(tmp_path / "one"), tensorfile.read_all(tmp_path / "two"))


def test_steps_may_be_plain_numbers(universal: Callable[[str], Path], tmp_path: Path) -> None:
    there = universal("z1")
    want = ranks(CASES / "z1", tmp_path / "zero")
    for path in there.glob("global_step3_universal/zero/*/step.pt"):
        edit(path, lambda _: 3)
    tensorfile.assert_same(ranks(there, tmp_path / "out"), want)


def test_states_of_one_number_are_read_back(tmp_path: Path) -> None:
    """NAdam keeps `mu_product`, which has no axes."""
    names: dict[str, tuple[str, ...]] = {"model.a.weight": ("model", "a.weight")}
    names |= {f"optim.state.a.weight.{s}": ("optim", "state", "a.weight", s) for s in ("exp_avg", "mu_product")}
    described = {n: ("F32", *(((), [((), (), 0)]) if "mu" in n else ((6, 4), rows((6, 4), 2)))) for n in names}
    write_save(tmp_path / "save", described, {}, names)
    reshard(tmp_path / "save", tmp_path / "out", "--to", "universal", "--verify")
    assert ranks(tmp_path / "out", tmp_path / "back")["optimizer/a.weight/mu_product"][1].shape == ()


def _shaped(shape: tuple[int, ...], tensor: TorchTensor) -> dict[str, TorchTensor]:
    return {"param": tensor._replace(shape=shape, strides=contiguous_strides(shape))}


def test_parts_of_tensor_parallel_ranks_are_not_the_model(universal: Callable[[str], Path], tmp_path: Path) -> None:
    """The files below zero/ are joined; model states are those of each rank, and their weights only have a dtype."""
    there = universal("z3")
    tag = there / "global_step3_universal"
    whole = ranks(there, tmp_path / "whole")
    for rank in range(1, 3):
        (tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt").unlink()
    shutil.copy(tag / "zero_pp_rank_0_mp_rank_00_model_states.pt", tag / "mp_rank_00_model_states.pt")
    (tag / "zero_pp_rank_0_mp_rank_00_model_states.pt").rename(tag / "mp_rank_01_model_states.pt")
    # Flat tensors are those of stage 3, which has no tensor-parallel ranks.
    for path in tag.glob("zero/*/[fe]*.pt"):
        shape = whole[path.parent.name].bits.shape
        edit(path, partial(_shaped, shape))
    tensorfile.assert_same(ranks(there, tmp_path / "out"), whole)


@pytest.mark.parametrize("key", ["module", "param_shapes", "buffer_names", "ds_autoep_layers", "optimizer"])
def test_a_trainers_value_does_not_take_the_place_of_deepspeeds(key: str, tmp_path: Path) -> None:
    paths: dict[str, tuple[str | int, ...]] = {
        "model.w": ("model", "w"),
        "optimizer.state.w.exp_avg": ("optimizer", "state", "w", "exp_avg"),
    }
    one = dict.fromkeys(paths, ("F32", (2, 3), [((0, 0), (2, 3), 0)]))
    write_save(tmp_path / "src", one, {key: {"w": 5}}, {**paths, key: (key,)})
    done = reshard(tmp_path / "src", tmp_path / "dst", "--to", "universal")
    assert f"left out, because DeepSpeed calls its own values so: {key}" in done.err
    assert ckpttool("inspect", tmp_path / "dst", "--check").code == 0
    assert ranks(tmp_path / "dst", tmp_path / "ranks").keys() == ranks(tmp_path / "src", tmp_path / "same").keys()


def test_steps_that_only_the_optimizer_counted(tmp_path: Path) -> None:
    """They are the engine's: it would begin its schedule anew."""
    run = save_run(tmp_path / "run", names(), groups=groups((0.9, 0.95)))
    reshard(run, tmp_path / "out", "--to", "universal")
    states = read_torch(next((tmp_path / "out").rglob("mp_rank_00_model_states.pt"))).value
    assert states["global_steps"] == 7


def test_float32_weights_that_are_listed_among_the_masters(tmp_path: Path) -> None:
    """As Paddle's unified checkpoints do: they are the same, and are compared."""
    run = names(masters=False)
    listed = run | {f"master_weights/{n}": run[n] for n in SHAPES}
    source = save_run(tmp_path / "run", listed, groups=groups((0.9, 0.95)))
    reshard(source, tmp_path / "out", "--to", "universal", "--verify")
    reshard(tmp_path / "out", tmp_path / "back", "--to", "ranks", "--tp-out", 1)
    found = tensorfile.read(next((tmp_path / "back").glob("rank-*")))
    assert all(found[n].bits.tobytes() == run[n].tobytes() for n in SHAPES)
    name = next(iter(SHAPES))
    other = save_run(tmp_path / "other", listed | {f"master_weights/{name}": run[name] + 1}, groups=groups((0.9, 0.95)))
    assert "differ" in refused(other, tmp_path / "none", "--to", "universal")


def test_a_cast_of_what_was_shared_out(tmp_path: Path) -> None:
    """Only where DST stores weights as their masters alone it cannot be."""
    source, more = Path("fixtures/paddle_zcc/sharding2_v1"), ("--betas", "0.9,0.999", "--dtype", "f16")
    reshard(source, tmp_path / "out", "--to", "universal", *more)
    assert "stored as master weights only" in refused(source, tmp_path / "no", "--to", "hybrid", *more[2:], code=2)


@pytest.mark.parametrize("case", ["universal_z1", "universal_z3"])
def test_a_stray_file_of_a_tensor_parallel_rank_changes_no_shape(case: str, tmp_path: Path) -> None:
    """Files of stage 3 are flat, so shapes are those of the model states, whatever lies beside these."""
    there = tmp_path / "save"
    shutil.copytree(Path("fixtures/torch/deepspeed") / case, there)
    reshard(there, tmp_path / "before", "--to", "ranks", "--tp-out", 1)
    (states, *_) = sorted(there.glob("*/*mp_rank_00_model_states.pt"))
    shutil.copy(states, str(states).replace("mp_rank_00", "mp_rank_01"))
    reshard(there, tmp_path / "after", "--to", "ranks", "--tp-out", 1)
    tensorfile.assert_same(tensorfile.read_all(tmp_path / "after"), tensorfile.read_all(tmp_path / "before"))
