"""DeepSpeed's own saves of every ZeRO stage, read as the live engine says what it holds.

``fixtures/torch/deepspeed/CASE`` are saves of a small model of odd sizes; CASE.safetensors is what the engine answered
(``safe_get_full_fp32_param``, ``safe_get_full_optimizer_state``) after it had saved.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.checkpoint import open_checkpoint
from tests.helpers import tensorfile
from tests.helpers.command import ckpttool as command
from tests.helpers.command import refused, reshard
from tests.helpers.torch_edit import edit
from tests.helpers.torch_save import torch_save

CASES = Path("fixtures/torch/deepspeed")
ALL = ("z1", "z2", "z3", "z3sgd", "bf16", "ams")
TIED = "head.weight"
STATES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")


@pytest.fixture
def save(tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a fixture that may be damaged."""

    def copy(case: str) -> Path:
        return Path(shutil.copytree(CASES / case, tmp_path / case))

    return copy


def ranks(src: Path, dst: Path, *options: object) -> tensorfile.Tensors:
    reshard(src, dst, "--to", "ranks", "--tp-out", 1, *options)
    return tensorfile.read_all(dst)


def optim(save: Path, rank: int) -> Path:
    (found,) = save.glob(f"global_step3/*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return found


def edited(save: Path, change: Callable[[Any], None], *, model: bool = False) -> None:
    """Change the optimizer's state of every rank, or all model states."""

    def inner(value: dict[str, Any]) -> None:
        value["optimizer_state_dict"].pop("param_slice_mappings", None)  # of a class
        change(value["optimizer_state_dict"])

    for path in save.glob("global_step3/*" + ("_model_states.pt" if model else "_optim_states.pt")):
        edit(path, change if model else inner)


@pytest.mark.parametrize("case", ALL)
def test_every_component_is_what_the_engine_holds(case: str, tmp_path: Path) -> None:
    got, want = ranks(CASES / case, tmp_path / "out"), tensorfile.read(CASES / f"{case}.safetensors")
    steps = {k: v for k, v in got.items() if k.endswith("/step")}
    # The engine answers for both names of a tied parameter; the optimizer has it once.
    tied = {k for k in want if TIED in k and k != TIED} if f"optimizer/{TIED}/exp_avg" not in got else set()
    tied &= want.keys() - got.keys()
    assert not tied or case in ("z2", "z3", "bf16")
    tensorfile.assert_same(
        {k: v for k, v in got.items() if k not in steps}, {k: want[k] for k in want if k not in tied}
    )
    if case != "z3sgd":
        trained = {k.split("/")[1] for k in got if k.endswith("/exp_avg")}
        assert {k.split("/")[1] for k in steps} == trained
        assert {(v.dtype, v.bits.shape, float(v.bits.view("<f4"))) for v in steps.values()} == {("F32", (), 3.0)}


def test_parameters_dealt_out_in_turn_lie_in_the_order_of_their_shapes(tmp_path: Path) -> None:
    got, want = ranks(CASES / "rr", tmp_path / "out"), tensorfile.read(CASES / "rr.safetensors")
    tensorfile.assert_same({k: v for k, v in got.items() if "/" not in k}, want)
    trained = [k.removeprefix("master_weights/") for k in got if k.startswith("master_weights/")]
    assert len(trained) == 12
    rounds_to(got, want, trained)


def rounds_to(got: tensorfile.Tensors, want: tensorfile.Tensors, names: Iterable[str]) -> None:
    """The model is the masters rounded to nearest even."""
    for name in names:
        bits = got[f"master_weights/{name}"].bits.astype("u8")
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        assert np.array_equal(rounded.astype("<u2"), want[name].bits), name


def test_groups_schedule_and_client_state_are_carried() -> None:
    training = open_checkpoint(CASES / "z1").stored.training
    assert training is not None
    assert training.step == 3
    assert [len(g.parameters) for g in training.groups] == [5, 7]
    assert training.betas("blocks.0.up.weight") == (0.9, 0.999)
    assert training.betas("blocks.0.norm.weight") == (0.8, 0.99)
    assert training.groups[0].values["weight_decay"] == 0.1
    assert training.plain["epoch"] == 4
    assert training.plain["seen"] == [1, 2]
    assert training.plain["lr_scheduler"]["last_epoch"] == 3
    assert training.left == ("odd",)


def test_sub_groups_belong_to_their_group() -> None:
    training = open_checkpoint(CASES / "z3").stored.training
    assert training is not None
    assert [len(g.parameters) for g in training.groups] == [5, 8]
    assert training.betas("blocks.1.norm.bias") == (0.8, 0.99)


def test_without_zero_the_order_of_the_model_says_whose_state_it_is(tmp_path: Path) -> None:
    """The file holds the model, and masters and moments under numbers; masters round to the model's weights."""
    reshard(CASES / "z0", tmp_path / "out", "--to", "ranks", "--tp-out", 1)
    want = tensorfile.read(CASES / "z0.safetensors")
    got = tensorfile.read_all(tmp_path / "out")
    trained = {n.removeprefix("master_weights/") for n in want if "/" in n}
    names = {f"optimizer/{n}/{k}" for n in trained for k in ("exp_avg", "exp_avg_sq", "step")}
    assert got.keys() == want.keys() | names
    tensorfile.assert_same(
        {n: t for n, t in got.items() if "/" not in n}, {n: t for n, t in want.items() if "/" not in n}
    )
    rounds_to(got, want, trained)
    shapes = {n: got[f"optimizer/{n}/exp_avg"].bits.shape for n in trained}
    assert shapes == {n: want[n].bits.shape for n in trained}
    training = open_checkpoint(CASES / "z0").stored.training
    assert training is not None
    assert sorted(n for g in training.groups for n in g.parameters) == sorted(trained)


@pytest.mark.parametrize("second", [False, True])
def test_vectors_of_a_fused_optimizer(second: bool, tmp_path: Path) -> None:
    """FP16_Optimizer has one vector for each group: it is taken apart where one group has all parameters."""
    shapes = {"embed.weight": (3, 2), "up.weight": (2, 2), "up.bias": (2,), "running_mean": (2,)}
    weights = {n: np.full(s, i, "<f4") for i, (n, s) in enumerate(shapes.items())}
    vectors = {k: np.arange(12, dtype="<f4") + 100 * i for i, k in enumerate(("", "exp_avg", "exp_avg_sq"))}
    state = {k: v for k, v in vectors.items() if k} | {"step": 5}
    groups = [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0]}, *([{"lr": 0.2, "params": [1]}] if second else [])]
    optimizer = {
        "dynamic_loss_scale": True, "cur_scale": 1024.0, "cur_iter": 5, "clip_grad": 1.0,
        "optimizer_state_dict": {"state": {0: state}, "param_groups": groups},
        "fp32_groups_flat": [vectors[""], *([vectors[""][:0]] if second else [])],
    }  # fmt: skip
    value = {"module": weights, "buffer_names": ["running_mean"], "optimizer": optimizer, "global_steps": 5}
    (tmp_path / "run/global_step5").mkdir(parents=True)
    torch_save(value, tmp_path / "run/global_step5/mp_rank_00_model_states.pt")
    (tmp_path / "run/latest").write_text("global_step5")
    if second:
        said = "the save does not record which of the parameters are in the vectors of its groups"
        assert said in refused(tmp_path / "run", tmp_path / "out", "--to", "ranks", "--tp-out", 1)
        assert said in reshard(tmp_path / "run", tmp_path / "out", "--to", "hf").err
        return
    got = ranks(tmp_path / "run", tmp_path / "out")
    at = 0
    for name in ("embed.weight", "up.weight", "up.bias"):
        size = weights[name].size
        for key, vector in vectors.items():
            found = got[f"optimizer/{name}/{key}" if key else f"master_weights/{name}"].bits.view("<f4")
            np.testing.assert_array_equal(found, vector[at : at + size].reshape(shapes[name]))
        assert float(got[f"optimizer/{name}/step"].bits.view("<f4")) == 5
        at += size
    assert not any("/" in n for n in got if "running_mean" in n)
    training = open_checkpoint(tmp_path / "run").stored.training
    assert training is not None
    assert training.plain["loss_scaler"]["cur_scale"] == 1024.0
    assert training.betas("up.bias") == (0.9, 0.95)


@pytest.mark.parametrize("case", ["ams", "z2"])
def test_what_older_versions_do_not_say_is_not_needed(save: Callable[[str], Path], tmp_path: Path, case: str) -> None:
    old = save(case)

    def forget(state: dict[str, Any]) -> None:
        del state["param_alignment_paddings"]
        if case == "z2":  # elastic: saved without padding
            del state["group_paddings"]

    edited(old, forget)
    reshard(CASES / case, tmp_path / "new", "--to", "ranks", "--tp-out", 1)
    tensorfile.assert_same(ranks(old, tmp_path / "out"), tensorfile.read_all(tmp_path / "new"))


def test_a_step_that_is_a_plain_number_is_read(save: Callable[[str], Path], tmp_path: Path) -> None:
    there = save("ams")

    def plain(state: dict[str, Any]) -> None:
        for number, held in state["base_optimizer_state"]["state"].items():
            held["step"] = 3 + number

    edited(there, plain)
    got = ranks(there, tmp_path / "out")
    assert got["optimizer/embed.weight/step"].bits.view("<f4") == 3.0


def test_a_step_in_the_groups_is_read(save: Callable[[str], Path], tmp_path: Path) -> None:
    there = save("ams")

    def fused(state: dict[str, Any]) -> None:
        for held in state["base_optimizer_state"]["state"].values():
            del held["step"]
        for group in state["base_optimizer_state"]["param_groups"]:
            group["step"] = 7

    edited(there, fused)
    got = ranks(there, tmp_path / "out")
    assert got["optimizer/embed.weight/step"].bits.view("<f4") == 7.0
    assert got["optimizer/head.weight/step"].bits.shape == ()


def test_shapes_of_groups_fit_vectors_of_sub_groups(save: Callable[[str], Path], tmp_path: Path) -> None:
    there = save("z3")

    def join(value: dict[str, Any]) -> None:
        value["param_shapes"] = [{k: v for group in value["param_shapes"] for k, v in group.items()}]

    edited(there, join, model=True)
    reshard(CASES / "z3", tmp_path / "new", "--to", "ranks", "--tp-out", 1)
    tensorfile.assert_same(ranks(there, tmp_path / "out"), tensorfile.read_all(tmp_path / "new"))


def test_state_of_another_size_is_left_out_by_name(save: Callable[[str], Path], tmp_path: Path) -> None:
    there = save("ams")

    def odd(state: dict[str, Any]) -> None:
        for held in state["base_optimizer_state"]["state"].values():
            held["worker_error"] = held.pop("max_exp_avg_sq")._replace(shape=(5,))

    edited(there, odd)
    done = reshard(there, tmp_path / "out", "--to", "ranks", "--tp-out", 1)
    assert "worker_error" in done.err
    assert "optimizer/embed.weight/exp_avg" in tensorfile.read_all(tmp_path / "out")


# -- which save


def test_the_directory_of_a_save_is_a_source(tmp_path: Path) -> None:
    want = ranks(CASES / "z3", tmp_path / "above")
    tensorfile.assert_same(ranks(CASES / "z3/global_step3", tmp_path / "out"), want)


def test_a_latest_that_names_no_save_is_refused_with_the_candidates(
    save: Callable[[str], Path], tmp_path: Path
) -> None:
    there = save("z2")
    shutil.copytree(there / "global_step3", there / "global_step12")
    (there / "latest").write_text("global_step9")
    error = refused(there, tmp_path / "out", "--to", "hf")
    assert "`latest` names the save `global_step9`, which is not here" in error
    assert "saves: global_step3, global_step12" in error
    (there / "latest").write_text("../z2/global_step3")
    assert "`latest` names the save ``" in refused(there, tmp_path / "out", "--to", "hf")


def test_without_latest_one_save_is_taken_and_several_are_not(save: Callable[[str], Path], tmp_path: Path) -> None:
    there = save("z2")
    (there / "latest").unlink()
    assert "the only save is global_step3" in reshard(there, tmp_path / "out", "--to", "hf").err
    shutil.copytree(there / "global_step3", there / "global_step12")
    assert "there are 2 saves, and no file `latest`" in refused(there, tmp_path / "other", "--to", "hf")


def test_latest_counts_and_others_are_named(save: Callable[[str], Path], tmp_path: Path) -> None:
    there = save("z2")
    shutil.copytree(there / "global_step3", there / "global_step12")
    done = reshard(there, tmp_path / "out", "--to", "hf")
    assert "`latest` names the save: global_step3; global_step12 is here too" in done.err


def test_published_weights_beside_a_save_are_the_model(save: Callable[[str], Path]) -> None:
    there = save("z2")
    shutil.copy("fixtures/llama_tp8/config.json", there / "config.json")
    one = {"only": tensorfile.origin(1, "F32", (2, 3))}
    tensorfile.write(there / "model.safetensors", one, {"format": "pt"})
    assert command("inspect", there, "--list").out.count("only") == 1
    assert "blocks.0.up.weight" in command("inspect", there, "--list", "--from", "deepspeed").out


# -- damage


@pytest.mark.parametrize(("case", "rank"), [("z1", 1), ("z3", 2), ("z3", 0)])
def test_a_missing_rank_is_named(save: Callable[[str], Path], tmp_path: Path, case: str, rank: int) -> None:
    there = save(case)
    optim(there, rank).unlink()
    error = refused(there, tmp_path / "out", "--to", "hf")
    assert "missing" in error
    assert f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" in error


def test_missing_model_states_are_named(save: Callable[[str], Path], tmp_path: Path) -> None:
    there = save("z3")
    (there / "global_step3/zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    error = refused(there, tmp_path / "out", "--to", "hf")
    assert "1 file is missing: zero_pp_rank_1_mp_rank_00_model_states.pt" in error


def test_ranks_of_a_larger_save_are_refused(save: Callable[[str], Path], tmp_path: Path) -> None:
    there = save("z2")
    shutil.copy(optim(there, 1), str(optim(there, 1)).replace("rank_1_", "rank_2_"))
    assert "optimizer files of 3 ranks, but they say that there are 2" in refused(there, tmp_path / "out", "--to", "hf")


def test_ranks_that_changed_places_are_refused(save: Callable[[str], Path], tmp_path: Path) -> None:
    there = save("z1")
    first, second = optim(there, 0), optim(there, 1)
    aside = first.rename(tmp_path / "aside")
    second.rename(first)
    aside.rename(second)
    error = refused(there, tmp_path / "out", "--to", "hf")
    assert "`param_slice_mappings` puts `" in error


@pytest.mark.parametrize("options", [("--to", "hf"), ("--to", "universal"), ("--to", "hf", "--only", "model")])
@pytest.mark.parametrize("case", ["z1", "z2", "z3", "bf16", "z3sgd"])
def test_ranks_of_different_steps_are_refused(
    save: Callable[[str], Path], tmp_path: Path, case: str, options: tuple[str, ...]
) -> None:
    """As when the files of one node are those of another save; the file of each rank says how many steps it is of."""
    there = save(case)

    def later(value: dict[str, Any]) -> None:
        state = value["optimizer_state_dict"]
        state.pop("param_slice_mappings", None)
        inner = state.get("base_optimizer_state") or state["optimizer_state_dict"]
        for held in inner if isinstance(inner, list) else inner["state"].values():
            held["step"] = 4

    for rank in (0, 1) if case == "z3sgd" else (1,):  # SGD counts no steps: both say it
        edit(optim(there, rank), later if rank else lambda value: _counting(value, 3))
    error = refused(there, tmp_path / "out", *options)
    assert "a rank's optimizer has taken 3 steps, another's 4" in error
    assert "rank_1_mp_rank_00_optim_states.pt" in error
    assert "[ranks-differ]" in command("inspect", there, "--check").out


def _counting(value: dict[str, Any], steps: int) -> None:
    value["optimizer_state_dict"].pop("param_slice_mappings", None)
    for held in value["optimizer_state_dict"]["optimizer_state_dict"]["state"].values():
        held["step"] = steps


@pytest.mark.parametrize("case", ["z1", "z2", "z3", "bf16"])
def test_model_states_of_another_step_are_noted(save: Callable[[str], Path], tmp_path: Path, case: str) -> None:
    there = save(case)

    def later(value: dict[str, Any]) -> None:
        value["global_steps"] = 9

    said = "the model states are of step 9, and the optimizer has taken 3"
    assert said not in reshard(there, tmp_path / "before", "--to", "hf").err
    edited(there, later, model=True)
    assert said in reshard(there, tmp_path / "out", "--to", "hf").err
    edited(there, lambda value: value.update(skipped_steps=6), model=True)
    assert said not in reshard(there, tmp_path / "skipped", "--to", "hf").err


@pytest.mark.parametrize("case", ["z1", "z2", "z3", "bf16"])
def test_elements_that_do_not_fit_are_never_shifted(save: Callable[[str], Path], tmp_path: Path, case: str) -> None:
    there = save(case)

    def larger(value: dict[str, Any]) -> None:
        group = value["param_shapes"][0]
        name = next(n for n, shape in group.items() if len(shape) == 2)
        group[name] = (group[name][0], group[name][1] + 1)
        value["module"].pop(name)

    edited(there, larger, model=True)
    error = refused(there, tmp_path / "out", "--to", "hf")
    assert "elements" in error or "param_slice_mappings" in error


def test_a_vector_that_was_cut_short_is_refused(save: Callable[[str], Path], tmp_path: Path) -> None:
    there = save("z3")

    def shorter(value: dict[str, Any]) -> None:
        flats = value["optimizer_state_dict"]["fp32_flat_groups"]
        flats[0] = flats[0]._replace(shape=(flats[0].shape[0] - 1,))

    edit(optim(there, 1), shorter)
    assert "the rank holds" in refused(there, tmp_path / "out", "--to", "hf")


def test_state_that_one_rank_lacks_is_refused(save: Callable[[str], Path], tmp_path: Path) -> None:
    there = save("z3")

    def lose(value: dict[str, Any]) -> None:
        del value["optimizer_state_dict"]["optimizer_state_dict"]["state"][0]["exp_avg"]

    edit(optim(there, 1), lose)
    assert "`exp_avg` of a group of parameters is missing" in refused(
        there, tmp_path / "o", "--to", "ranks", "--tp-out", 1
    )


def test_a_weight_of_another_shape_is_refused(save: Callable[[str], Path], tmp_path: Path) -> None:
    there = save("ams")

    def turn(value: dict[str, Any]) -> None:
        held = value["module"]["head.weight"]
        value["module"]["head.weight"] = held._replace(shape=(91,), strides=(1,))

    edited(there, turn, model=True)
    assert "`head.weight` is [91] in `module`, and [13, 7] in the optimizer" in refused(
        there, tmp_path / "o", "--to", "hf"
    )


def test_a_parameter_that_no_file_holds_is_named(save: Callable[[str], Path], tmp_path: Path) -> None:
    there = save("z3sgd")

    def unfreeze(value: dict[str, Any]) -> None:
        value["frozen_param_shapes"].pop("embed.weight")

    edited(there, unfreeze, model=True)
    assert "1 parameter of `module` is in no file: embed.weight" in refused(there, tmp_path / "out", "--to", "hf")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("layer_0_expert_1_mp_rank_01_model_states.pt", "several tensor-parallel ranks"),
        ("layer_03-model_00-model_states.pt", "a pipeline of DeepSpeed"),
        ("layer_03-model_states.pt", "a pipeline of DeepSpeed"),
        ("mp_rank_01_model_states.pt", "several tensor-parallel ranks"),
        ("bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt", "several tensor-parallel ranks"),
    ],
)
def test_other_parallelism_is_refused_by_name(
    save: Callable[[str], Path], tmp_path: Path, name: str, said: str
) -> None:
    there = save("z2")
    (there / "global_step3" / name).write_bytes(b"")
    assert said in refused(there, tmp_path / "out", "--to", "hf")


def test_groups_of_different_numbers_of_ranks_are_refused(save: Callable[[str], Path], tmp_path: Path) -> None:
    there = save("z1")
    edited(there, lambda state: state["partition_count"].__setitem__(1, 1))
    assert "expert parallelism" in refused(there, tmp_path / "out", "--to", "hf")


# -- experts


def test_the_experts_of_all_ranks_are_read(tmp_path: Path) -> None:
    """Each is in a file of its own; the optimizer is named, and left out."""
    done = reshard(CASES / "moe", tmp_path / "out", "--to", "hf", "--verify")
    tensorfile.assert_same(tensorfile.read_all(tmp_path / "out"), tensorfile.read(CASES / "moe.safetensors"))
    said = "its state of the experts lies on several ranks (expert parallelism), and no file says whose it is"
    assert f"the optimizer (of a model with experts) is not read: {said}" in done.err
    assert said in refused(CASES / "moe", tmp_path / "whole", "--to", "universal")
    assert said in refused(CASES / "moe", tmp_path / "masters", "--to", "ranks", "--only", "master_weights")
    reshard(CASES / "moe", tmp_path / "model", "--to", "dcp", "--only", "model", "--verify")


def test_without_zero_the_optimizer_of_experts_is_not_read(save: Callable[[str], Path], tmp_path: Path) -> None:
    there = save("moe")
    for path in there.glob("global_step3/*zero_pp_rank_*"):
        path.unlink()
    torch_save(
        {"optimizer": {"state": {}, "param_groups": []}}, there / "global_step3/expp_rank_0_mp_rank_00_optim_states.pt"
    )
    done = reshard(there, tmp_path / "out", "--to", "hf")
    assert "without ZeRO it has numbers in place of the names" in done.err
    tensorfile.assert_same(tensorfile.read_all(tmp_path / "out"), tensorfile.read(CASES / "moe.safetensors"))


def test_experts_that_are_missing_or_twice_are_refused(save: Callable[[str], Path], tmp_path: Path) -> None:
    there = save("moe")
    last, first = (there / f"global_step3/layer_1_expert_{i}_mp_rank_00_model_states.pt" for i in (3, 0))
    last.rename(tmp_path / "kept")
    error = refused(there, tmp_path / "out", "--to", "hf")
    assert "1 file of experts is missing: layer_1_expert_3_mp_rank_00_model_states.pt" in error
    shutil.copy(first, last)
    error = refused(there, tmp_path / "out", "--to", "hf")
    assert "`layers.1.deepspeed_moe.experts.deepspeed_experts.0.0.weight` is in two files" in error
    for path in there.glob("global_step3/layer_*"):
        path.unlink()
    assert "fetch the files of the experts" in refused(there, tmp_path / "out", "--to", "hf")
    for path in there.glob("global_step3/*_optim_states.pt"):
        path.unlink()
    assert "8 files of experts are missing" in refused(there, tmp_path / "out", "--to", "hf")


def test_state_on_nvme_is_refused(save: Callable[[str], Path], tmp_path: Path) -> None:
    there = save("z3")

    def swap(state: dict[str, Any]) -> None:
        state["fp32_flat_groups"] = [t._replace(shape=(0,)) for t in state["fp32_flat_groups"]]

    edited(there, swap)
    assert "is on NVMe" in refused(there, tmp_path / "out", "--to", "hf")


def test_groups_of_mics_are_refused(save: Callable[[str], Path], tmp_path: Path) -> None:
    there = save("z3")
    for path in there.glob("global_step3/*_optim_states.pt"):
        edit(path, lambda value: value.update(ds_config={"zero_optimization": {"stage": 3, "mics_shard_size": 1}}))
    assert "within groups of 1 ranks (MiCS)" in refused(there, tmp_path / "out", "--to", "hf")


def test_wrappers_in_front_of_names_are_left_out(save: Callable[[str], Path], tmp_path: Path) -> None:
    there = save("z3")

    def wrap(value: dict[str, Any]) -> None:
        value["module"] = {f"module.{k}": v for k, v in value["module"].items()}
        value["param_shapes"] = [{f"module.{k}": v for k, v in group.items()} for group in value["param_shapes"]]
        value["shared_params"] = {f"module.{k}": f"module.{v}" for k, v in value["shared_params"].items()}
        value["buffer_names"] = [f"module.{n}" for n in value["buffer_names"]]

    edited(there, wrap, model=True)
    want = ranks(CASES / "z3", tmp_path / "plain")
    tensorfile.assert_same(ranks(there, tmp_path / "out"), want)
    training = open_checkpoint(there).stored.training
    assert training is not None
    assert "blocks.0.up.weight" in training.groups[0].parameters


@pytest.mark.product(one_in=2)
@pytest.mark.parametrize("odd", [5, "text", [[]], [None], {}, -1, 10**400, [{"params": 3}]])
@pytest.mark.parametrize(
    "key", ["partition_count", "group_paddings", "param_alignment_paddings", "base_optimizer_state"]
)
def test_values_of_other_types_end_in_an_error_or_are_not_needed(
    save: Callable[[str], Path], tmp_path: Path, key: str, odd: Any
) -> None:
    there = save("ams")
    edited(there, lambda state: state.__setitem__(key, odd))
    done = command("reshard", there, tmp_path / "out", "--to", "ranks", "--tp-out", 1)
    assert done.code in (0, 1), done.err
    assert done.code == 0 or done.err.count("error: ") == 1
    if done.code == 0:  # what is written is what was saved
        want = tensorfile.read(CASES / "ams.safetensors")
        for name, tensor in tensorfile.read_all(tmp_path / "out").items():
            if name in want:
                tensorfile.assert_same({name: tensor}, {name: want[name]})


def test_a_step_beyond_what_is_counted_is_refused(save: Callable[[str], Path], tmp_path: Path) -> None:
    there = save("ams")
    edited(there, lambda state: state["base_optimizer_state"]["state"][0].__setitem__("step", 10**400))
    assert "the step is 1000000" in refused(there, tmp_path / "out", "--to", "ranks", "--tp-out", 1)
