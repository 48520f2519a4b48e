"""What a run keeps that is no tensor, through every format that holds the state of training: it comes out, or is named.

Runs are put down by hand, with an optimizer that has state, none yet or none at all, and parameters without state. What
comes out is what the format's own reader says of it; tests/peers lets the frameworks load it.
"""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from ckpttool.checkpoint import open_checkpoint
from ckpttool.formats.base import TrainingState
from ckpttool.formats.registry import WRITERS
from ckpttool.formats.torch.dcp_metadata import DcpTensor, read_metadata
from tests.helpers.command import Done, ckpttool, reshard
from tests.helpers.dcp import rows, write_save
from tests.helpers.torch_load import torch_load
from tests.helpers.torch_save import torch_save
from tests.helpers.training_run import groups, names, save_run

FROZEN = "model.norm.weight"
"""A parameter without state: no gradient came to it, or it is not trained."""
ADAM: Any = {"lr": 0.5, "betas": [0.9, 0.95], "eps": 1e-8}
SGD: Any = {"lr": 0.5, "momentum": 0, "dampening": 0, "nesterov": False}
PLAIN: dict[str, Any] = {
    "lr_scheduler": {"base_lrs": [0.5], "last_epoch": 7},
    "iteration": 7,
    "consumed_train_samples": 56,
    "position": {"shard": 3, "offset": [1, 2]},
}


class Run(NamedTuple):
    """What a run has beside its weights."""

    values: dict[str, Any] | None
    """Of its groups; None where there is no optimizer."""
    states: bool = False
    masters: bool = False
    left: tuple[str, ...] = ()
    """Parameters in no group."""
    stateless: tuple[str, ...] = ()
    step: int | None = 7


RUNS = {
    "trained": Run(ADAM, states=True),
    "trained-bf16": Run(ADAM, states=True, masters=True),
    "ungraded": Run(ADAM, states=True, stateless=(FROZEN,)),
    "frozen": Run(ADAM, states=True, left=(FROZEN,), stateless=(FROZEN,)),
    "before-a-step": Run(ADAM, step=0),
    "sgd": Run(SGD),
    "sgd-bf16": Run(SGD, masters=True),
    "no-optimizer": Run(None),
}
TARGETS = [n for n, w in WRITERS.items() if "optimizer" in w.capabilities.components]
ONE = ("--tp-out", 1, "--pp-out", 1)


def put_down(name: str, folder: Path) -> Path:
    run = RUNS[name]
    tensors = names(masters=run.masters)
    gone = [
        n for n in tensors if n.startswith("optimizer/") and not (run.states and n.split("/")[1] not in run.stateless)
    ]
    for n in gone:
        del tensors[n]
    of: list[dict[str, Any]] = []
    for group in groups((0.9, 0.95)) if run.values is not None else []:
        own = [n for n in group["parameters"] if n not in run.left]
        decay = group["values"]["weight_decay"]
        of.append({"parameters": own, "values": {**(run.values or {}), "weight_decay": decay}})
    return save_run(folder, tensors, groups=of, plain=PLAIN, step=run.step)


def training(folder: Path) -> TrainingState:
    return open_checkpoint(folder).stored.training or TrainingState()


def by_parameter(said: TrainingState) -> dict[str, Mapping[str, Any]]:
    return {n: {k: v for k, v in g.values.items() if k != "step"} for g in said.groups for n in g.parameters}


def named(word: str, notes: str) -> bool:
    return any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", line) for line in notes.splitlines() if "note:" in line)


def lost(src: TrainingState, out: TrainingState, notes: str, *, counted: bool) -> list[str]:
    """What was in ``src`` and is neither in ``out`` nor in a note; ``counted``: the state has steps."""
    found = []
    have = out.plain
    for key, value in src.plain.items():
        if have.get(key) != value and not named(key, notes):
            found.append(key)
    theirs = by_parameter(out)
    for name, values in by_parameter(src).items():
        if name not in theirs and "without state of the optimizer" in notes:
            continue
        for key, value in values.items():
            got = theirs.get(name, {}).get(key)
            got = list(got) if isinstance(got, tuple) else got
            same = (
                list(got) == list(value)
                if isinstance(value, (list, tuple)) and isinstance(got, (list, tuple))
                else got == value
            )
            if not same and not named("param_groups", notes):
                found.append(f"{name}: {key} {value} {got}")
    steps = {out.step, have.get("iteration"), *[v.get("last_epoch") for k, v in have.items() if k == "LR_Scheduler"]}
    if src.step and not counted and src.step not in steps and not named("iteration", notes):
        found.append("step")
    return found


def refused_at(name: str, to: str) -> str:
    """Why such a run cannot go there; "" where it can."""
    run = RUNS[name]
    if to == "universal" and run.values is None:
        return "the source has only a model"
    if to == "megatron" and run.masters and not run.states:
        return "Megatron keeps master weights together with the moments"
    return "some of them have none" if to == "megatron" and run.stateless else ""


def options(to: str) -> list[object]:
    sharded = WRITERS[to].capabilities.sharded
    return ["--to", to, *(ONE if sharded else ()), *(("--sharding-out", 2) if to == "zcc" else ()), "--verify"]


def moved(src: Path, dst: Path, to: str, *more: object) -> Done:
    """A conversion, with --unfuse where a parameter without state would be joined with one that has some."""
    done = ckpttool("reshard", src, dst, *options(to), *more)
    return ckpttool("reshard", src, dst, *options(to), *more, "--unfuse") if "--unfuse" in done.err else done


def in_ranks(src: Path, dst: Path, to: str, name: str) -> TrainingState:
    """What a checkpoint holds, under the names of Hugging Face."""
    paddle = WRITERS[to].capabilities.states == "paddle" and RUNS[name].states
    reshard(src, dst, "--to", "ranks", *ONE, *(("--betas", "0.9,0.95") if paddle else ()))
    return training(dst)


@pytest.mark.sample("sgd-dcp", "no-optimizer-megatron", "before-a-step-universal", "sgd-bf16-hybrid", "ungraded-flex")
@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("name", RUNS)
def test_it_comes_out_or_is_named(name: str, to: str, tmp_path: Path) -> None:
    src, states = put_down(name, tmp_path / "src"), RUNS[name].states
    done = moved(src, tmp_path / "out", to)
    if why := refused_at(name, to):
        assert done.code == 1
        assert why in done.err
        return
    assert done.code == 0, done.err
    out = in_ranks(tmp_path / "out", tmp_path / "back", to, name)
    assert lost(training(src), out, done.err, counted=states) == []


@pytest.mark.sample("sgd-dcp-universal", "before-a-step-universal-dcp", "no-optimizer-megatron-megatron-dist")
@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("by", [n for n in TARGETS if n != "ranks"])
@pytest.mark.parametrize("name", RUNS)
def test_two_moves(name: str, by: str, to: str, tmp_path: Path) -> None:
    """A save of each format, whatever it could hold of a run, to each format."""
    if refused_at(name, by):
        return
    run = RUNS[name]
    assert moved(put_down(name, tmp_path / "src"), tmp_path / "mid", by).code == 0
    src = in_ranks(tmp_path / "mid", tmp_path / "mid-ranks", by, name)
    other = WRITERS[by].capabilities.states == "paddle" != WRITERS[to].capabilities.states
    betas = ("--betas", "0.9,0.95") if run.states and other else ()
    done = moved(tmp_path / "mid", tmp_path / "out", to, *betas)
    if done.code and (refused_at(name, to) or to == "universal"):
        return
    assert done.code == 0, done.err
    out = in_ranks(tmp_path / "out", tmp_path / "back", to, name)
    assert lost(src, out, done.err, counted=run.states) == []


# -- saves of torch.distributed.checkpoint, which go on under the keys that they have

MODEL = {"embed.weight": (6, 4), "b.weight": (4, 6), "b.bias": (4,), "a.weight": (4, 4), "norm.weight": (4,)}
GROUPS = [("embed.weight", "b.weight", "a.weight"), ("b.bias", "norm.weight")]
Keyed = dict[tuple[str | int, ...], Any]
BESIDE: Keyed = {("scheduler", "last_epoch"): 7, ("loader", "state", 0, "position"): [1, 2], ("step",): 7}


def optimizer(form: str, prefix: str, held: Collection[str]) -> tuple[Keyed, Keyed]:
    """(tensors, other values) of one that has state of some parameters, as torch's ways to save it nest them."""
    numbers = {name: i for i, name in enumerate(n for g in GROUPS for n in g)}
    tensors: Keyed = {}
    values: Keyed = {}
    for name in held:
        key = str(numbers[name]) if form in ("numbered", "listed") else name
        flat = (prefix, f"state.{name}.momentum_buffer")
        tensors[flat if form == "flattened" else (prefix, "state", key, "momentum_buffer")] = MODEL[name]
    said = [{**SGD, "weight_decay": 0.1 * i, "params": [numbers[n] for n in g]} for i, g in enumerate(GROUPS)]
    if form == "listed":
        values[prefix, "param_groups"] = said
        return tensors, values
    for i, (group, own) in enumerate(zip(said, GROUPS, strict=True)):
        if form == "named":
            group["params"] = list(own)
        for key, value in group.items():
            if form == "flattened":
                values |= {(prefix, f"param_groups.{n}.{key}"): value for n in own if key != "params"}
            else:
                values[prefix, "param_groups", i, key] = value
    return tensors, values


def save_dcp(path: Path, tensors: Keyed, values: Keyed) -> Path:
    """A save of a model, with these tensors and values beside it."""
    every = {("model", name): shape for name, shape in MODEL.items()} | tensors
    fqn = {keys: ".".join(map(str, keys)) for keys in (*every, *values)}
    described = {fqn[keys]: ("F32", shape, rows(shape, 2)) for keys, shape in every.items()}
    write_save(path, described, {fqn[keys]: v for keys, v in values.items()}, {f: keys for keys, f in fqn.items()})
    return path


def kept(save: Path) -> dict[str, tuple[Any, Any]]:
    """(keys, value) of all that is no tensor, as torch.load has them."""
    files: list[str] = []

    def number(name: str) -> int:
        files.append(name)
        return len(files) - 1

    out = {}
    for e in [*read_metadata(save / ".metadata", number)]:
        if not isinstance(e.value, DcpTensor):
            file, begin, size = e.value
            out[e.fqn] = e.path, torch_load(io.BytesIO((save / files[file]).read_bytes()[begin : begin + size]))
    return out


@pytest.mark.parametrize("prefix", ["optimizer", "optim"])
@pytest.mark.parametrize("held", [(), ("embed.weight", "b.bias"), tuple(MODEL)], ids=["none", "some", "all"])
@pytest.mark.parametrize("form", ["named", "numbered", "flattened", "listed", "no optimizer"])
def test_dcp_keeps_all_its_values(form: str, held: Collection[str], prefix: str, tmp_path: Path) -> None:
    tensors, values = ({}, {}) if form == "no optimizer" else optimizer(form, prefix, held)
    if form in ("numbered", "listed") and len(held) == 2:
        tensors |= optimizer(form, prefix, ("norm.weight",))[0]  # or it fits b.bias as well
    save_dcp(tmp_path / "src", tensors, {**BESIDE, **values})
    done = reshard(tmp_path / "src", tmp_path / "out", "--to", "dcp", "--sharding-out", 3, "--verify")
    assert "left out" not in done.err
    assert kept(tmp_path / "out") == kept(tmp_path / "src")


@pytest.mark.parametrize("form", ["named", "numbered", "flattened", "listed"])
def test_dcp_says_the_groups_of_parameters_without_state(form: str, tmp_path: Path) -> None:
    """To another format: where shapes tell whose the state is, the rest of a group follows."""
    held = ("embed.weight", "b.weight", "b.bias", "norm.weight")
    save_dcp(tmp_path / "src", *optimizer(form, "optimizer", held))
    reshard(tmp_path / "src", tmp_path / "out", "--to", "ranks", "--tp-out", 1)
    found = by_parameter(training(tmp_path / "out"))
    assert {n: v["weight_decay"] for n, v in found.items()} == {n: 0.1 * i for i, g in enumerate(GROUPS) for n in g}


def test_numbers_that_nothing_explains(tmp_path: Path) -> None:
    """Two groups without any state: which parameters they have is not known, and a note says so."""
    save_dcp(tmp_path / "src", {}, optimizer("numbered", "optimizer", ())[1])
    done = reshard(tmp_path / "src", tmp_path / "out", "--to", "ranks", "--tp-out", 1)
    assert (
        "the optimizer has numbers for 5 parameters without state, and the save does not record which these are"
        in done.err
    )
    assert [g.values["weight_decay"] for g in training(tmp_path / "out").groups] == [0, 0.1]


# -- files of torch.save


@pytest.mark.parametrize("where", ["beside", "inside"])
@pytest.mark.parametrize("form", ["named", "numbered", "flattened", "without an optimizer"])
def test_a_file_of_torch(form: str, where: str, tmp_path: Path) -> None:
    model = {n: np.zeros(shape, np.float32) for n, shape in MODEL.items()}
    group = {**SGD, "weight_decay": 0.5}
    value: Any = {"state": {}, "param_groups": [{**group, "params": [*range(len(MODEL))]}]}
    if form == "named":
        value["param_groups"][0]["param_names"] = [*MODEL]
    if form == "flattened":
        value = {f"param_groups.{n}.{k}": v for n in MODEL for k, v in group.items()}
    schedule = {"last_epoch": 7, "base_lrs": [0.5]}
    (tmp_path / "src").mkdir()
    if where == "inside":
        optimizers = {} if form.startswith("without") else {"optimizer": value}
        src = torch_save({"model": model, **optimizers, "lr_scheduler": schedule, "step": 7}, tmp_path / "src/a.pt")
    else:
        src = torch_save(model, tmp_path / "src/pytorch_model.bin").parent
        torch_save(schedule, src / "scheduler.pt")
        (src / "trainer_state.json").write_text('{"global_step": 7}')
        if not form.startswith("without"):
            torch_save(value, src / "optimizer.pt")
    for to in ("ranks", "dcp", "flex", "hf"):
        done = reshard(src, tmp_path / to, "--to", to, *(("--tp-out", 1) if to in ("ranks", "flex") else ()))
        said = training(tmp_path / to)
        if to in ("ranks", "dcp"):
            assert said.plain.get("lr_scheduler") == schedule or named("lr_scheduler", done.err)
            assert by_parameter(said) == ({} if form.startswith("without") else dict.fromkeys(MODEL, group))
        else:
            assert named("lr_scheduler", done.err)
            assert form.startswith("without") or named("param_groups", done.err)


def test_quantized_weights_are_no_run(tmp_path: Path) -> None:
    done = ckpttool("quantize", put_down("sgd", tmp_path / "src"), tmp_path / "out")
    assert done.code == 0, done.err
    assert all(named(word, done.err) for word in ("param_groups", *PLAIN))
