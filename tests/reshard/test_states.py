"""Optimizer state from torch's words into Paddle's and back, against powers that numpy multiplies one by one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ckpttool.checkpoint import OpenOptions
from ckpttool.containers.paddle_pickle import read_pickle
from ckpttool.core.optimizer_states import BETA_POWERS
from ckpttool.formats.ranks import RankFiles
from ckpttool.ops.reshard import prepare
from ckpttool.targeting import states
from ckpttool.targeting.target import Target
from tests.helpers.command import ckpttool, refused, reshard
from tests.helpers.paddle import Array, read_folder
from tests.helpers.tensorfile import header, read
from tests.helpers.training_run import CONFIG, NAMES, SHAPES, groups, names, save_run

FIXTURES = Path(__file__).parents[2] / "fixtures"
PADDLE_NAMES = {"exp_avg": "moment1_0", "exp_avg_sq": "moment2_0"}
LINEAR = re.compile(r"_proj\.weight$")


def multiplied(beta: float, steps: int, kind: Any = np.float32) -> Any:
    """beta times beta, ``steps`` times, as a kernel that steps would."""
    with np.errstate(under="ignore"):
        power = kind(beta)
        for _ in range(steps):
            power = kind(power * kind(beta))
    return power


def of_ranks(folder: Path) -> dict[str, Array]:
    """What the one file of a mesh of one rank holds."""
    (path,) = folder.glob("rank-*.safetensors")
    return {n: raw.bits.view(NAMES[raw.dtype]) for n, raw in read(path).items()}


def training(folder: Path) -> Any:
    """What the first file says for a trainer."""
    found = json.loads(header(min(folder.glob("rank-*")))["__metadata__"]["ckpttool"])
    return found.get("training")


def same(a: Array, b: Array) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.fixture
def torch_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """``ranks`` as a format of torch."""
    monkeypatch.setattr(RankFiles, "capabilities", RankFiles.capabilities._replace(states="torch"))


@pytest.mark.parametrize("beta", [0.9, 0.999, 0.95, 0.8, 0.5, 0.25, 0.1, 0.0])
def test_powers_are_those_of_a_loop(beta: float) -> None:
    powers = states.Powers(beta, "F32")
    power = np.float32(beta)
    with np.errstate(under="ignore"):
        for n in range(2500):
            assert powers.after(n).tobytes() == power.tobytes(), n
            power = np.float32(power * np.float32(beta))


@pytest.mark.parametrize(("beta", "told"), [(0.9, 945), (0.95, 1900), (0.999, 84_000), (0.9999, 300_000)])
def test_a_power_tells_its_step(beta: float, told: int) -> None:
    """As long as it goes on changing; afterwards it tells that there were many."""
    powers = states.Powers(beta, "F32")
    for n in (0, 1, 2, 10, 500, told):
        assert powers.steps(float(powers.after(n))) == (n, n)
    first, last = powers.steps(float(powers.after(2_000_000))) or (0, 0)
    assert last == float("inf")
    assert told < first
    assert powers.after(first).tobytes() == powers.after(2_000_000).tobytes() != powers.after(first - 1).tobytes()
    assert powers.steps(0.0) is not None  # of a device without numbers that small
    assert powers.steps(0.123456789) is None


@pytest.mark.usefixtures("torch_words")
@pytest.mark.product
@pytest.mark.parametrize("fmt", ["unified", "flex", "hybrid", "zcc"])
@pytest.mark.parametrize("masters", [True, False], ids=["bf16", "f32"])
def test_torch_to_paddle_and_back(fmt: str, masters: bool, tmp_path: Path) -> None:
    """Through each of Paddle's formats, cut and shared out, everything comes back: steps differ by parameter."""
    tensors = names(step={"lm_head.weight": 3, "model.norm.weight": 0}, masters=masters)
    config = {**CONFIG, "torch_dtype": "bfloat16" if masters else "float32"}
    run = save_run(tmp_path / "run", tensors, groups=groups((0.9, 0.95)), config=config)
    cut = () if fmt == "unified" else ("--tp-out", 2, "--sharding-out", 2)
    reshard(run, tmp_path / "paddle", "--to", fmt, *cut, "--verify")
    back = ("--to", "ranks", "--tp-out", 1, "--betas", "0.9,0.95")
    reshard(tmp_path / "paddle", tmp_path / "back", *back, "--verify")
    names_back = ckpttool("reshard", tmp_path / "back", tmp_path / "hf", "--to", "hf")
    assert names_back.code == 0, names_back.err
    found = of_ranks(tmp_path / "back")
    for key, array in tensors.items():
        # Names and orientation are still Paddle's.
        component, _, rest = key.partition("/")
        name = rest.rpartition("/")[0] if component == "optimizer" else rest or key
        theirs = key.replace("model.", "llama.") if f"llama.{name[6:]}" in found else key
        want = array.T if LINEAR.search(name) and array.ndim == 2 else array
        assert same(np.ascontiguousarray(found[theirs]).reshape(want.shape), np.array(want)), key
    kept = {k for k in found if not k.startswith("master_weights/")}
    assert len(kept) == len([k for k in tensors if not k.startswith("master_weights/")])


def test_what_paddle_reads(tmp_path: Path) -> None:
    """The unified files: [1] float32 powers, moments under Paddle's names, orientation as of the weights."""
    tensors = names(step={"lm_head.weight": 1000})
    run = save_run(tmp_path / "run", tensors, groups=groups((0.9, 0.999), (0.8, 0.95)))
    done = reshard(run, tmp_path / "out", "--to", "unified", "--target", "paddlenlp-3.0", "--verify")
    assert "the optimizer has taken 7 steps with 20 parameters, and 1,000 with 1 (lm_head.weight)" in done.err
    assert "optimizer left out" not in done.err
    found = read_folder(tmp_path / "out", "optimizer-*.safetensors")
    assert len(found) == 4 * len(SHAPES)
    for name, shape in SHAPES.items():
        theirs = name.replace("model.", "llama.")
        steps = 1000 if name == "lm_head.weight" else 7
        for state, beta in zip(BETA_POWERS, (0.9, 0.999) if len(shape) == 2 else (0.8, 0.95), strict=True):
            assert same(found[f"{theirs}/{state}"], np.array([multiplied(beta, steps)])), name
        for ours, state in PADDLE_NAMES.items():
            want = tensors[f"optimizer/{name}/{ours}"]
            turned = LINEAR.search(name) or name == "lm_head.weight"
            assert same(found[f"{theirs}/{state}"], np.ascontiguousarray(want.T) if turned else want), name


def test_betas_are_needed_and_told(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", names())
    text = refused(run, tmp_path / "out", "--to", "unified")
    assert "the checkpoint does not say the betas of Adam" in text
    assert "--betas 0.9,0.999; or omit the optimizer with --only model" in text
    reshard(run, tmp_path / "given", "--to", "unified", "--betas", "0.9,0.98", "--verify")
    found = read_folder(tmp_path / "given", "optimizer-*.safetensors")
    assert found["model.norm.weight/beta2_pow_acc_0"] == [multiplied(0.98, 7)]
    reshard(run, tmp_path / "weights", "--to", "unified", "--only", "model", "--only", "master_weights")
    assert not list((tmp_path / "weights").glob("optimizer*"))


@pytest.mark.parametrize("to", [("unified",), ("flex",), ("hybrid",), ("zcc", "--sharding-out", "2")])
def test_what_paddle_has_no_place_for(to: tuple[str, ...], tmp_path: Path) -> None:
    plain, left = {"lr_scheduler": {"last_epoch": 7}}, ["rng_state"]
    run = save_run(tmp_path / "run", names(), groups=groups((0.9, 0.95)), step=7, plain=plain, left=left)
    said = reshard(run, tmp_path / "out", "--to", *to).err
    assert "note: param_groups, lr_scheduler, rng_state left out: Paddle's trainers take them from their own" in said
    bare = save_run(tmp_path / "bare", names())
    assert "left out" not in reshard(bare, tmp_path / "quiet", "--to", *to, "--betas", "0.9,0.95").err


def test_betas_that_contradict(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", names(), groups=groups((0.9, 0.95)))
    text = refused(run, tmp_path / "out", "--to", "unified", "--betas", "0.9,0.999")
    assert "--betas 0.9,0.999 contradicts the checkpoint, whose optimizer has 0.9,0.95" in text
    assert "drop --betas" in text
    reshard(run, tmp_path / "out", "--to", "unified", "--betas", "0.9,0.95")


@pytest.mark.parametrize("text", ["0.9", "0.9,1", "0.9,0.99,0.999", "a,b", "-0.1,0.9", "nan,0.9"])
def test_what_are_no_betas(text: str, tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", names())
    assert f"--betas `{text}` is not two numbers" in refused(
        run, tmp_path / "out", "--to", "unified", f"--betas={text}", code=2
    )


def test_betas_have_no_effect_on_weights_alone(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", names())
    text = refused(run, tmp_path / "out", "--to", "hf", "--betas", "0.9,0.95", code=2)
    assert "--betas has no effect with --to hf, which holds no optimizer" in text


@pytest.mark.parametrize("step", [3.5, -1.0])
def test_a_step_that_is_none(step: float, tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", names(step={"model.norm.weight": step}), groups=groups((0.9, 0.95)))
    text = refused(run, tmp_path / "out", "--to", "unified")
    assert f"`optimizer/model.norm.weight/step` is {step}, which is not a number of steps" in text


@pytest.mark.usefixtures("torch_words")
@pytest.mark.sample("86000")
@pytest.mark.parametrize("steps", [944, 20_000, 86_000])
def test_one_power_that_still_tells_is_enough(steps: int, tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", names(step=steps), groups=groups((0.9, 0.999)))
    reshard(run, tmp_path / "paddle", "--to", "unified", "--verify")
    reshard(tmp_path / "paddle", tmp_path / "back", "--to", "ranks", "--betas", "0.9,0.999", "--verify")
    assert {float(a) for n, a in of_ranks(tmp_path / "back").items() if n.endswith("/step")} == {steps}


@pytest.mark.usefixtures("torch_words")
def test_powers_that_tell_nothing_any_more(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", names(step=5000), groups=groups((0.9, 0.95)))
    reshard(run, tmp_path / "paddle", "--to", "unified", "--verify")
    text = refused(tmp_path / "paddle", tmp_path / "back", "--to", "ranks", "--betas", "0.9,0.95")
    assert "have become too small to tell the step: it is 1," in text
    assert "omit the optimizer with --only model --only master_weights" in text
    # What the trainer says decides, where the powers allow it, and only there.
    (tmp_path / "paddle/trainer_state.json").write_text('{"global_step": 5000}')
    reshard(tmp_path / "paddle", tmp_path / "back", "--to", "ranks", "--betas", "0.9,0.95", "--verify")
    assert {float(a) for n, a in of_ranks(tmp_path / "back").items() if n.endswith("/step")} == {5000}
    (tmp_path / "paddle/trainer_state.json").write_text('{"global_step": 500}')
    refused(tmp_path / "paddle", tmp_path / "again", "--to", "ranks", "--betas", "0.9,0.95")


@pytest.mark.usefixtures("torch_words")
def test_betas_of_another_run(tmp_path: Path) -> None:
    """The error knows which betas they are, where these are usual ones."""
    run = save_run(tmp_path / "run", names(step=123), groups=groups((0.9, 0.95)))
    reshard(run, tmp_path / "paddle", "--to", "unified")
    wrong = refused(tmp_path / "paddle", tmp_path / "back", "--to", "ranks", "--betas", "0.9,0.999")
    assert "are not those of betas 0.9,0.999 after any number of steps" in wrong
    for text in (wrong, refused(tmp_path / "paddle", tmp_path / "back", "--to", "ranks")):
        assert "pass --betas 0.9,0.95, which fits 123 steps" in text


SAVED = ("paddle_unified/nlp_llamafused_bf16_tp2", "paddle_unified/nlp_qwen2moe_bf16_tp2", "paddle_zcc/nlp_tp2")


@pytest.mark.usefixtures("torch_words")
@pytest.mark.product(one_in=2)
@pytest.mark.parametrize("name", SAVED)
def test_what_trainers_of_paddle_saved(name: str, tmp_path: Path) -> None:
    """Two steps with the usual betas, by the powers alone."""
    one = ("--to", "ranks", "--tp-out", 1, "--pp-out", 1, "--ep-out", 1)
    text = refused(FIXTURES / name, tmp_path / "out", *one)
    assert "pass --betas 0.9,0.999, which fits 2 steps" in text
    reshard(FIXTURES / name, tmp_path / "out", *one, "--betas", "0.9,0.999", "--verify")
    found = of_ranks(tmp_path / "out")
    steps = {n: a for n, a in found.items() if n.endswith("/step")}
    assert len(steps) == len([n for n in found if n.endswith("/exp_avg")]) > 10
    assert all(same(a, np.array(2, np.float32)) for a in steps.values())


def test_other_states(tmp_path: Path) -> None:
    """AMSGrad has names; what Paddle has no name for is left out, and a note says so."""
    tensors = names()
    for name, shape in SHAPES.items():
        tensors[f"optimizer/{name}/max_exp_avg_sq"] = np.full(shape, 2, np.float32)
    tensors["optimizer/model.norm.weight/prev_grad"] = np.full((8,), 4, np.float32)
    run = save_run(tmp_path / "run", tensors, groups=groups((0.9, 0.95)))
    done = reshard(run, tmp_path / "out", "--to", "flex", "--verify", "-v")
    assert "Paddle's optimizers have no such state: optimizer/model.norm.weight/prev_grad" in done.err + done.out
    listed = ckpttool("inspect", tmp_path / "out", "--list").out
    assert "optimizer/model.norm.weight/moment2_max_0" in listed
    assert "prev_grad" not in listed


SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "dampening": 0}
OTHERS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "sgd": (SGD, ["momentum_buffer"]),
    "sgd, counted": (SGD, ["momentum_buffer", "step"]),
    "sgd, of which nothing is said": ({}, ["momentum_buffer"]),
    "adagrad": ({"lr_decay": 0}, ["step", "sum"]),
    "adamax": ({"betas": [0.9, 0.999]}, ["exp_avg", "exp_inf", "step"]),
    "lion": ({"betas": [0.9, 0.99]}, ["exp_avg"]),
    "muon": ({"momentum": 0.95, "ns_steps": 5}, ["momentum_buffer"]),
    "rmsprop": ({"alpha": 0.99}, ["momentum_buffer", "square_avg", "step"]),
}


@pytest.mark.sample("sgd", "sgd, of which nothing is said", "adamax", "muon")
@pytest.mark.parametrize("kind", OTHERS)
def test_optimizers_that_are_not_adam(kind: str, tmp_path: Path) -> None:
    """Only what means the same is given a name of Paddle's; nobody is asked for betas that no one has."""
    values, states = OTHERS[kind]
    tensors = {n: a for n, a in names().items() if not n.startswith("optimizer/")}
    for name, shape in SHAPES.items():
        for state in states:
            tensors[f"optimizer/{name}/{state}"] = np.full(() if state == "step" else shape, 2, np.float32)
    run = save_run(tmp_path / "run", tensors, groups=[{"parameters": list(SHAPES), "values": values}])
    done = reshard(run, tmp_path / "out", "--to", "flex", "--verify")
    sgd = kind.startswith("sgd")
    left = [s for s in states if not sgd or s == "step"]
    listed = ckpttool("inspect", tmp_path / "out", "--list").out
    assert ("optimizer/" in listed) == ("/velocity_0" in listed) == sgd
    assert ("Paddle's optimizers have no such state: " in done.err) == bool(left)
    # Formats of torch have all of it.
    reshard(run, tmp_path / "dcp", "--to", "dcp", "--verify")
    listed = ckpttool("inspect", tmp_path / "dcp", "--list").out
    assert all(f"optimizer/lm_head.weight/{s}\t" in listed for s in states)


@pytest.mark.usefixtures("torch_words")
@pytest.mark.sample("-1")
@pytest.mark.parametrize("off", [1, -1])
def test_verify_finds_a_wrong_power(off: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways; what is compared does not go through the powers that were worked out."""
    run = save_run(tmp_path / "run", names(step=400), groups=groups((0.9, 0.999)))
    reshard(run, tmp_path / "right", "--to", "unified")
    after, steps = states.Powers.after, states.Powers.steps

    def moved(self: states.Powers, power: float) -> tuple[int, float] | None:
        found = steps(self, power)
        return found and (found[0] + off, found[1] + off)

    monkeypatch.setattr(states.Powers, "after", lambda self, n: after(self, n + off))
    monkeypatch.setattr(states.Powers, "steps", moved)
    text = refused(run, tmp_path / "wrong", "--to", "unified", "--verify", code=3)
    assert "_pow_acc_0` is" in text
    text = refused(tmp_path / "right", tmp_path / "wrong", "--to", "ranks", "--betas", "0.9,0.999", "--verify", code=3)
    assert f"/step` is {400 + off}.0 in the output" in text


def test_resume_knows_the_betas(tmp_path: Path) -> None:
    """What was worked out with other betas is another plan."""

    run = save_run(tmp_path / "run", names())
    digests = {
        prepare(run, OpenOptions(), Target(format="unified", betas=b)).plan.digest()
        for b in ((0.9, 0.95), (0.9, 0.999), (0.9, 0.95))
    }
    assert len(digests) == 2


@pytest.mark.usefixtures("torch_words")
def test_a_parameter_of_one_element(tmp_path: Path) -> None:
    """Its step is not its one element."""
    tensors = names()
    for key in [k for k in tensors if "model.norm.weight" in k]:
        tensors[key.replace("model.norm.weight", "gate.scale")] = tensors[key].reshape(-1)[:1].copy()
    tensors["optimizer/gate.scale/step"] = np.array(9, np.float32)
    run = save_run(
        tmp_path / "run", tensors, groups=[{"parameters": [*SHAPES, "gate.scale"], "values": {"betas": [0.9, 0.95]}}]
    )
    reshard(run, tmp_path / "copy", "--to", "ranks", "--verify")
    assert of_ranks(tmp_path / "copy")["optimizer/gate.scale/step"].shape == ()


def test_groups_get_the_names_of_the_output(tmp_path: Path) -> None:
    """Renamed, fused, without what is removed; in the order of the optimizer."""
    plain = {"lr_scheduler": {"last_epoch": 7}}
    run = save_run(tmp_path / "run", names(), groups=groups((0.9, 0.95)), step=7, plain=plain)
    rename = ("--rename", "model.norm.weight=final.weight")
    reshard(run, tmp_path / "out", "--to", "ranks", "--fuse", "--remove-keys", "lm_head.weight", *rename, "--verify")
    said = training(tmp_path / "out")
    assert [g["values"]["weight_decay"] for g in said["groups"]] == [0.1, 0.0]
    assert said["step"] == 7
    assert said["plain"] == plain
    matrices, rest = (g["parameters"] for g in said["groups"])
    assert matrices[0] == "model.embed_tokens.weight"
    assert "lm_head.weight" not in matrices
    assert rest[-1] == "final.weight"
    stored = of_ranks(tmp_path / "out")
    assert {*matrices, *rest} == {n for n in stored if not n.startswith(("optimizer/", "master_weights/"))}
    assert any("qkv" in n for n in matrices)


def test_groups_that_cannot_be_joined(tmp_path: Path) -> None:
    parts = groups((0.9, 0.95))
    key = "model.layers.1.self_attn.k_proj.weight"
    parts[0]["parameters"].remove(key)
    run = save_run(tmp_path / "run", names(), groups=[*parts, {"parameters": [key], "values": {"lr": 1e-5}}])
    text = refused(run, tmp_path / "out", "--to", "ranks", "--fuse")
    assert "made of tensors that the optimizer treats differently: " in text
    assert key in text
    assert "--unfuse" in text
    reshard(run, tmp_path / "out", "--to", "ranks", "--fuse", "--only", "model")
    assert training(tmp_path / "out") is None


def test_steps_that_cannot_be_joined(tmp_path: Path) -> None:
    step = {"model.layers.1.self_attn.k_proj.weight": 8}
    run = save_run(tmp_path / "run", names(step=step), groups=groups((0.9, 0.95)))
    text = refused(run, tmp_path / "out", "--to", "ranks", "--fuse")
    assert "self_attn.q_proj.weight/step` differ, first at element 0: 7.0 and 8.0" in text


def test_betas_that_are_given_are_kept(tmp_path: Path) -> None:
    """--betas of a source that has no groups: a reader of the output need not be told again."""
    run = save_run(tmp_path / "run", names())
    reshard(run, tmp_path / "paddle", "--to", "unified", "--betas", "0.9,0.98")
    reshard(tmp_path / "paddle", tmp_path / "kept", "--to", "ranks", "--tp-out", 2, "--betas", "0.9,0.98", "--verify")
    (group,) = training(tmp_path / "kept")["groups"]
    assert group["values"] == {"betas": [0.9, 0.98]}
    assert len(group["parameters"]) == len(SHAPES)
    reshard(tmp_path / "kept", tmp_path / "again", "--to", "unified", "--tp-out", 1, "--verify")
    for a in (tmp_path / "paddle").glob("*.safetensors"):
        assert a.read_bytes() == (tmp_path / "again" / a.name).read_bytes()


def test_betas_complete_the_groups(tmp_path: Path) -> None:
    """A group that says other values gets them; one of another optimizer, which counts no steps, does not."""
    tensors = {n: a for n, a in names().items() if n != "optimizer/lm_head.weight/step"}
    parts = [
        {"parameters": [n for n in SHAPES if n != "lm_head.weight"], "values": {"lr": 0.5}},
        {"parameters": ["lm_head.weight"], "values": {"momentum": 0.9}},
    ]
    run = save_run(tmp_path / "run", tensors, groups=parts)
    reshard(run, tmp_path / "out", "--to", "ranks", "--tp-out", 2, "--betas", "0.9,0.98")
    first, second = training(tmp_path / "out")["groups"]
    assert first["values"] == {"lr": 0.5, "betas": [0.9, 0.98]}
    assert second == {"parameters": ["lm_head.weight"], "values": {"momentum": 0.9}}


@pytest.mark.sample("mesh1", "mesh3")
@pytest.mark.parametrize("mesh", [(), ("--tp-out", 2), ("--tp-out", 2, "--pp-out", 2), ("--tp-out", 4, "--fuse")])
def test_ranks_hold_every_component(mesh: tuple[object, ...], tmp_path: Path) -> None:
    """Cut and put together again, bit for bit, with what a trainer needs."""
    tensors = names(step={"lm_head.weight": 3})
    del tensors["optimizer/lm_head.weight/exp_avg"]
    for name in SHAPES:
        tensors[f"ema/{name}"] = tensors[f"master_weights/{name}"] * 2
    left = ["rng_state"]
    run = save_run(tmp_path / "run", tensors, groups=groups((0.9, 0.95)), step=7, left=left)
    reshard(run, tmp_path / "cut", "--to", "ranks", *mesh, "--verify")
    for path in (tmp_path / "cut").glob("rank-*"):
        record = json.loads(header(path)["__metadata__"]["ckpttool"])
        assert record["version"] == 2
        entries = record["tensors"]
        for n in read(path):
            component, _, rest = n.partition("/")
            if component in ("optimizer", "master_weights", "ema"):
                assert entries[n]["component"] == component
                assert entries[n].get("state", "") == (rest.rpartition("/")[2] if component == "optimizer" else "")
    unfuse = ("--unfuse",) if "--fuse" in mesh else ()
    reshard(tmp_path / "cut", tmp_path / "back", "--to", "ranks", "--tp-out", 1, "--pp-out", 1, *unfuse, "--verify")
    found = of_ranks(tmp_path / "back")
    assert found.keys() == tensors.keys()
    for name, array in tensors.items():
        assert same(found[name], array), name
    said = training(tmp_path / "back")
    assert said["left"] == left
    assert [[*g["parameters"]] for g in said["groups"]] == [g["parameters"] for g in groups((0.9, 0.95))]


def test_a_manifest_names_every_component(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", names(), groups=groups((0.9, 0.95)))
    reshard(run, tmp_path / "cut", "--to", "ranks", "--tp-out", 2, "--manifest")
    sound = ckpttool("inspect", tmp_path / "cut", "--check", "--values")
    assert sound.code == 0, sound.err + sound.out
    path = min((tmp_path / "cut").glob("rank-*"))
    with path.open("r+b") as f:
        f.seek(8 + int.from_bytes(path.read_bytes()[:8], "little"))
        at = header(path)["optimizer/model.norm.weight/exp_avg_sq"]["data_offsets"][0]
        f.seek(at, 1)
        f.write(b"\x01")
    broken = ckpttool("inspect", tmp_path / "cut", "--check")
    assert broken.code == 3
    assert "tensor `optimizer/model.norm.weight/exp_avg_sq` has changed since it was written" in broken.err + broken.out


def test_ranks_of_weights_alone_stay_what_they_were(tmp_path: Path) -> None:
    """Version 1, so that what is written for weights is read by whatever read it before."""
    run = save_run(tmp_path / "run", names())
    reshard(run, tmp_path / "out", "--to", "ranks", "--only", "model", "--tp-out", 2)
    for path in (tmp_path / "out").glob("rank-*"):
        record = json.loads(header(path)["__metadata__"]["ckpttool"])
        assert record["version"] == 1
        assert "training" not in record
        assert all("component" not in e for e in record["tensors"].values())


@pytest.mark.parametrize(
    "entry",
    [
        {"component": "optimiser"},
        {"component": "optimizer", "state": "step"},
        {"component": 3},
        {"key": "x"},
        7,
    ],
)
def test_a_record_that_contradicts_a_name(entry: Any, tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", names())
    path = next(run.glob("rank-*"))
    name = "optimizer/model.norm.weight/exp_avg"
    data, size = path.read_bytes(), len(json.dumps(header(path)).encode())
    head = header(path)
    record = json.loads(head["__metadata__"]["ckpttool"])
    record["tensors"][name] = {**record["tensors"][name], **entry} if isinstance(entry, dict) else entry
    head["__metadata__"]["ckpttool"] = json.dumps(record)
    text = json.dumps(head).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    assert f"the record of tensor `{name}` is not valid" in refused(run, tmp_path / "out", "--to", "hf")


def test_bfloat16_moments_stay(tmp_path: Path) -> None:
    """Pure bfloat16 training has no masters, and moments of its own dtype."""
    tensors = {n: a.astype(ml_dtypes.bfloat16) if a.ndim else a for n, a in names(masters=False).items()}
    run = save_run(tmp_path / "run", tensors, groups=groups((0.9, 0.95)))
    reshard(run, tmp_path / "out", "--to", "unified", "--verify")
    assert not list((tmp_path / "out").glob("master_weights*"))
    index = json.loads((tmp_path / "out/optimizer.safetensors.index.json").read_text())
    assert index["master_weights"] is False
    found = read_folder(tmp_path / "out", "optimizer-*.safetensors")
    assert found["model.norm.weight/moment1_0"].dtype == ml_dtypes.bfloat16
    assert found["model.norm.weight/beta1_pow_acc_0"].dtype == np.float32


def test_beside_weights_that_are_worked_out(tmp_path: Path) -> None:
    """Weights come out of codes and steps become powers in one run; each is in no file of the source."""
    run = save_run(tmp_path / "run", names(), groups=groups((0.9, 0.95)))
    reshard(run, tmp_path / "fp8", "--to", "ranks", "--tp-out", 1, "--requant", "channel")
    reshard(tmp_path / "fp8", tmp_path / "both", "--to", "unified", "--dequant", "bf16", "--verify")
    reshard(run, tmp_path / "state", "--to", "unified")
    reshard(tmp_path / "fp8", tmp_path / "weights", "--to", "hf", "--dequant", "bf16")
    reshard(tmp_path / "weights", tmp_path / "weights_unified", "--to", "unified")
    (optimizer,) = (tmp_path / "both").glob("optimizer-*.safetensors")
    assert optimizer.read_bytes() == (tmp_path / "state" / optimizer.name).read_bytes()
    found, want = (read_folder(tmp_path / p, "model-*.safetensors") for p in ("both", "weights_unified"))
    assert found.keys() == want.keys() == SHAPES.keys()
    assert all(same(found[n], want[n]) for n in want)


def test_a_step_of_integers(tmp_path: Path) -> None:
    """As some optimizers count; 16,777,217 is more than float32 counts to."""
    tensors = names()
    for name in SHAPES:
        tensors[f"optimizer/{name}/step"] = np.array([12], np.int64)
    tensors["optimizer/lm_head.weight/step"] = np.array(16_777_217, np.int64)
    run = save_run(tmp_path / "run", tensors, groups=groups((0.9, 0.95)))
    reshard(run, tmp_path / "out", "--to", "unified", "--verify")
    found = read_folder(tmp_path / "out", "optimizer-*.safetensors")
    assert same(found["model.norm.weight/beta1_pow_acc_0"], np.array([multiplied(0.9, 12)]))
    assert same(found["lm_head.weight/beta1_pow_acc_0"], np.array([multiplied(0.9, 3000)]))


def test_copies_of_a_step_that_differ(tmp_path: Path) -> None:
    """Two ranks of tensor parallelism have each counted; what they counted must be the same."""
    run = save_run(tmp_path / "run", names(), groups=groups((0.9, 0.95)))
    reshard(run, tmp_path / "cut", "--to", "ranks", "--tp-out", 2)
    path = max((tmp_path / "cut").glob("rank-*"))
    head = header(path)
    at = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    at += head["optimizer/model.norm.weight/step"]["data_offsets"][0]
    with path.open("r+b") as f:
        f.seek(at)
        f.write(np.float32(8).tobytes())
    text = refused(tmp_path / "cut", tmp_path / "out", "--to", "unified", "--tp-out", 1)
    assert "`optimizer/model.norm.weight/step` is different on different ranks" in text


def test_states_of_other_shapes_are_refused(tmp_path: Path) -> None:
    """Adafactor has one number for each row, and one for each column."""
    tensors = names() | {"optimizer/lm_head.weight/row_var": np.ones((20, 1), np.float32)}
    run = save_run(tmp_path / "run", tensors, groups=groups((0.9, 0.95)))
    text = refused(run, tmp_path / "out", "--to", "dcp")
    assert "`optimizer/lm_head.weight/row_var` is [20, 1], its parameter is [20, 8]" in text
    assert "omit it with --only model" in text
    reshard(run, tmp_path / "out", "--to", "dcp", "--only", "model")


@pytest.mark.parametrize("to", ["flex", "hybrid", "unified", "ranks"])
def test_a_run_of_float32_goes_on_in_bfloat16(to: str, tmp_path: Path) -> None:
    """What its optimizer works on is in the masters then, every bit of it."""
    tensors = names(masters=False)
    config = {**CONFIG, "torch_dtype": "float32"}
    run = save_run(tmp_path / "run", tensors, groups=groups((0.9, 0.95)), config=config)
    cut = ("--tp-out", 1, *(("--sharding-out", 2) if to in ("flex", "hybrid") else ()))
    done = reshard(run, tmp_path / "out", "--to", to, *cut, "--dtype", "bf16", "--verify")
    assert "master_weights: the source's own F32 weights, which the model has rounded to bf16" in done.err
    reshard(tmp_path / "out", tmp_path / "back", "--to", "ranks", "--tp-out", 1)
    found = of_ranks(tmp_path / "back")
    for name in SHAPES:
        theirs = name if name in found else name.replace("model.", "llama.")
        want = np.ascontiguousarray(tensors[name].T) if to != "ranks" and LINEAR.search(name) else tensors[name]
        assert same(found[f"master_weights/{theirs}"], want), name
        assert same(found[theirs], want.astype(ml_dtypes.bfloat16)), name


@pytest.mark.parametrize("more", [("--only", "model"), ("--only", "model", "--only", "optimizer")])
def test_masters_are_made_for_nobody(more: tuple[str, ...], tmp_path: Path) -> None:
    """Who says what to write gets that."""
    run = save_run(tmp_path / "run", names(masters=False), groups=groups((0.9, 0.95)))
    reshard(run, tmp_path / "out", "--to", "flex", "--dtype", "bf16", *more)
    assert not (tmp_path / "out" / "master_weight" / "0_0.distcp").exists()


def test_a_trainer_of_float32_finds_the_record_of_its_masters(tmp_path: Path) -> None:
    """PaddleFormers lists that folder before it resumes; it saves one without anything in it."""
    run = save_run(tmp_path / "run", names(masters=False), groups=groups((0.9, 0.95)))
    reshard(run, tmp_path / "out", "--to", "flex", "--verify")
    assert [p.name for p in (tmp_path / "out" / "master_weight").iterdir()] == ["0.metadata"]
    reshard(run, tmp_path / "model", "--to", "flex", "--only", "model")
    assert not (tmp_path / "model" / "master_weight").exists()


@pytest.mark.parametrize(("rates", "told"), [((0.5, 0.5), True), ((0.5, 0.25), False)])
def test_a_step_and_a_rate_are_a_schedule(rates: tuple[float, float], told: bool, tmp_path: Path) -> None:
    """No trainer of Paddle resumes without; where parameters have several rates nobody knows Paddle's one."""
    grouped = groups((0.9, 0.95))
    for group, rate in zip(grouped, rates, strict=True):
        group["values"]["lr"] = rate
    run = save_run(tmp_path / "run", names(), groups=grouped)
    for to in ("unified", "flex", "hybrid"):
        reshard(run, tmp_path / to, "--to", to, "--tp-out", 1)
        file = tmp_path / to / "scheduler.pdparams"
        assert file.exists() == told
        if told:
            assert read_pickle(file) == {"last_epoch": 7, "last_lr": 0.5}
    uneven = save_run(tmp_path / "uneven", names(step={"lm_head.weight": 3}), groups=groups((0.9, 0.95)))
    reshard(uneven, tmp_path / "out", "--to", "unified", "--tp-out", 1)
    assert not (tmp_path / "out" / "scheduler.pdparams").exists()


MOE = {
    **{k: v for k, v in CONFIG.items() if k not in ("architectures", "model_type")},
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 1, "num_experts": 2,
    "num_experts_per_tok": 1, "moe_intermediate_size": 12, "head_dim": 2, "decoder_sparse_step": 1,
}  # fmt: skip
ROUTER = "model.layers.0.mlp.gate.weight"


@pytest.mark.product
@pytest.mark.parametrize("masters", [True, False], ids=["bf16", "f32"])
@pytest.mark.parametrize(
    ("to", "target"),
    [
        ("flex", "paddleformers-1.2"), ("hybrid", "paddleformers-1.2"), ("unified", "paddleformers-0.4"),
        ("unified", "paddlenlp-3.0"), ("hybrid", "paddlenlp-3.0"),
    ],
)  # fmt: skip
def test_routers_that_paddleformers_keeps_in_float32(target: str, to: str, masters: bool, tmp_path: Path) -> None:
    """The router is what its master was, and has no other: the trainer asks for none, and would not read it."""
    rng = np.random.default_rng(4)
    made: dict[str, Array] = {}
    sizes: dict[str, tuple[int, ...]] = {ROUTER: (2, 8), "model.embed_tokens.weight": (20, 8)}
    for name, shape in sizes.items():
        master = rng.standard_normal(shape).astype("f4")
        made[name] = master.astype(ml_dtypes.bfloat16) if masters else master
        made |= {f"master_weights/{name}": master} if masters else {}
        made |= {f"optimizer/{name}/{s}": rng.random(shape).astype("f4") for s in PADDLE_NAMES}
        made[f"optimizer/{name}/step"] = np.array(7, np.float32)
    group = [{"parameters": list(sizes), "values": {"lr": 1e-3, "betas": [0.9, 0.95]}}]
    config = {**MOE, "torch_dtype": "bfloat16" if masters else "float32"}
    run = save_run(tmp_path / "run", made, groups=group, config=config)
    more = ("--target", target) if to != "flex" else ()
    cast = () if masters else ("--dtype", "bf16")
    done = reshard(run, tmp_path / "out", "--to", to, "--tp-out", 1, *more, *cast, "--verify")
    reshard(tmp_path / "out", tmp_path / "back", "--to", "ranks", "--tp-out", 1)
    found = {k.replace("qwen3_moe.", "model."): v for k, v in of_ranks(tmp_path / "back").items()}
    want = made[f"master_weights/{ROUTER}" if masters else ROUTER]
    single = target != "paddlenlp-3.0"
    become = "are also" if to == "unified" else "become"
    note = f"1 float32 master weight {become} the model's weights, which the trainer keeps in float32: {ROUTER}"
    assert (note in done.err.replace("qwen3_moe.layers", "model.layers")) == single
    assert found[ROUTER].dtype == (np.float32 if single else ml_dtypes.bfloat16)
    if single:
        assert same(found[ROUTER], np.ascontiguousarray(want.T))
        assert (f"master_weights/{ROUTER}" in found) == (to == "unified")
    else:
        assert same(found[f"master_weights/{ROUTER}"], np.ascontiguousarray(want.T))
    assert found["model.embed_tokens.weight"].dtype == ml_dtypes.bfloat16
    assert "master_weights/model.embed_tokens.weight" in found


def moe_run(folder: Path, **changes: Array) -> Path:
    """A bfloat16 router and its float32 master, with the state of Adam; ``changes`` by component."""
    master = np.random.default_rng(5).standard_normal((2, 8)).astype("f4")
    made: dict[str, Array] = {ROUTER: master.astype(ml_dtypes.bfloat16), f"master_weights/{ROUTER}": master}
    made |= {f"optimizer/{ROUTER}/{s}": np.ones((2, 8), np.float32) for s in PADDLE_NAMES}
    made[f"optimizer/{ROUTER}/step"] = np.array(7, np.float32)
    made |= {f"{c}/{ROUTER}" if c != "model" else ROUTER: a for c, a in changes.items()}
    group = [{"parameters": [ROUTER], "values": {"lr": 1e-3, "betas": [0.9, 0.95]}}]
    return save_run(folder, made, groups=group, config={**MOE, "torch_dtype": "bfloat16"})


@pytest.mark.parametrize("to", ["unified", "flex"])
def test_a_router_is_not_left_out_for_a_master_that_is_another(to: str, tmp_path: Path) -> None:
    """Only one of them is written: they must be one."""
    run = moe_run(tmp_path / "run", model=np.full((2, 8), 3.0, ml_dtypes.bfloat16))
    assert f"`{ROUTER}`" in refused(run, tmp_path / "out", "--to", to, "--tp-out", 1)
    assert not (tmp_path / "out").exists()


def test_a_router_without_a_master_is_widened(tmp_path: Path) -> None:
    """As the trainer does that loads it; a note says so."""
    run = moe_run(tmp_path / "run")
    done = reshard(run, tmp_path / "out", "--to", "flex", "--tp-out", 1, "--only", "model", "--only", "optimizer")
    assert f"weights widened to float32, in which the trainer keeps them: {ROUTER}" in done.err
    reshard(tmp_path / "out", tmp_path / "back", "--to", "ranks", "--tp-out", 1)
    found = of_ranks(tmp_path / "back")[ROUTER]
    assert found.dtype == np.float32
    assert same(found, np.ascontiguousarray(of_ranks(run)[ROUTER].astype("f4").T))
