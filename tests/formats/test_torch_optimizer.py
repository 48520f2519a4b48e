"""State of torch's optimizers, beside a model and inside of its file: given to the right parameters, or refused.

Every state holds numbers that say which parameter it is of, so one that went astray shows. tests/peers lets the
Trainer of transformers write such directories.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.containers.pickle_write import PickledCall
from ckpttool.formats.torch.optimizer import is_state_dict
from tests.helpers.command import ckpttool as command
from tests.helpers.command import refused, reshard
from tests.helpers.tensorfile import Raw, write
from tests.helpers.torch_save import torch_save

Array = np.ndarray[Any, np.dtype[Any]]
Shapes = dict[str, tuple[int, ...]]

H, V = 8, 11
NET: Shapes = {  # in the order of its modules; a head that is not trained, and a buffer
    "embed.weight": (V, H),
    "layers.0.up.weight": (H, H),
    "layers.0.up.bias": (H,),
    "layers.0.norm.weight": (H,),
    "layers.0.norm.bias": (H,),
    "layers.1.up.weight": (H, H),
    "layers.1.up.bias": (H,),
    "layers.1.norm.weight": (H,),
    "layers.1.norm.bias": (H,),
    "norm.running_mean": (H,),
    "head.weight": (V, H),
    "counter": (3,),
}
TRAINED = [n for n in NET if n not in ("head.weight", "norm.running_mean", "counter")]
DECAY = [n for n in TRAINED if len(NET[n]) > 1]
REST = [n for n in TRAINED if len(NET[n]) == 1]
ADAM = {"lr": 0.001, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def filled(shape: tuple[int, ...], seed: float) -> Array:
    return (seed + np.arange(np.prod(shape, dtype=int)) / 1000).astype("<f4").reshape(shape)


def model(shapes: Shapes = NET) -> dict[str, Array]:
    out = {n: filled(s, i) for i, (n, s) in enumerate(shapes.items())}
    return out | {n: np.arange(3) for n in out if n == "counter"}


def adam(name: str, shapes: Shapes = NET, step: Any = None) -> dict[str, Any]:
    """The state of a parameter, which it is known by."""
    at = 100 * (1 + [*shapes].index(name))
    step = np.array(7, "<f4") if step is None else step
    return {"step": step, "exp_avg": filled(shapes[name], at), "exp_avg_sq": filled(shapes[name], at + 50)}


def numbered(*groups: list[str], shapes: Shapes = NET, names: bool = False, step: Any = None) -> dict[str, Any]:
    """``Optimizer.state_dict()`` of parameters in groups."""
    order = [n for g in groups for n in g]
    return {
        "state": {i: adam(n, shapes, step) for i, n in enumerate(order)},
        "param_groups": [
            {**ADAM, "params": [order.index(n) for n in g], **({"param_names": [*g]} if names else {})} for g in groups
        ],
    }


def states(folder: Path) -> dict[str, Array]:
    """The optimizer in a single file of ranks."""
    data = (folder / "rank-00000-of-00001.safetensors").read_bytes()
    n = int.from_bytes(data[:8], "little")
    out = {}
    for name, t in json.loads(data[8 : 8 + n]).items():
        if name.startswith("optimizer/"):
            a, b = t["data_offsets"]
            assert t["dtype"] == "F32"
            out[name.removeprefix("optimizer/")] = np.frombuffer(data[8 + n + a : 8 + n + b], "<f4").reshape(t["shape"])
    return out


def record(folder: Path) -> dict[str, Any]:
    """What a file of ranks records for a trainer."""
    data = (folder / "rank-00000-of-00001.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    found: dict[str, Any] = json.loads(header["__metadata__"]["ckpttool"])["training"]
    return found


def right(folder: Path, names: list[str], shapes: Shapes = NET) -> None:
    found = states(folder)
    want = {f"{n}/{k}": v for n in names for k, v in adam(n, shapes).items()}
    assert found.keys() == want.keys()
    for key, value in want.items():
        assert np.array_equal(found[key], value), key


def carried(source: Path, out: Path, names: list[str], *options: str, shapes: Shapes = NET) -> None:
    reshard(source, out, "--to", "ranks", "--tp-out", 1, *options)
    right(out, names, shapes)


def directory(folder: Path, optimizer: Any, tensors: Mapping[str, Array] | None = None) -> Path:
    """A model in pytorch_model.bin, and an optimizer beside it."""
    torch_save(dict(tensors or model()), folder / "pytorch_model.bin")
    torch_save(optimizer, folder / "optimizer.pt")
    return folder


def safetensors(folder: Path, optimizer: Any, shapes: Shapes = NET) -> Path:
    """A model in model.safetensors, whose names are sorted."""
    tensors = {
        n: Raw("I64" if a.dtype == np.int64 else "F32", a.view(f"<u{a.itemsize}")) for n, a in model(shapes).items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "model.safetensors", dict(sorted(tensors.items())), {"format": "pt"})
    torch_save(optimizer, folder / "optimizer.pt")
    return folder


# -- whose state it is

EXPERTS, WIDTH = 3, 4
MOE_LAYER: Shapes = {
    "self_attn.q_proj.weight": (H, H),
    "mlp.experts.gate_up_proj": (EXPERTS, 2 * WIDTH, H),
    "mlp.experts.down_proj": (EXPERTS, H, WIDTH),
    "mlp.gate.weight": (EXPERTS, H),
    "input_layernorm.weight": (H,),
}
"""As transformers 5 has a layer of Qwen3 with experts in memory, in its order."""
MEMORY: Shapes = {
    "model.embed_tokens.weight": (V, H),
    **{f"model.layers.{i}.{n}": s for i in range(2) for n, s in MOE_LAYER.items()},
    "model.norm.weight": (H,),
}


@pytest.mark.parametrize("named", [False, True])
def test_all_experts_in_one_tensor_of_the_optimizer(named: bool, tmp_path: Path) -> None:
    """The model's files have a tensor for each expert: each gets its share of what the optimizer holds of all."""

    def published(tensors: dict[str, Array], state: str = "") -> dict[str, Array]:
        out: dict[str, Array] = {}
        for name, whole in tensors.items():
            stem, _, kind = name.rpartition(".")
            for e, one in enumerate(whole) if kind.endswith("_proj") else ():
                parts = {"gate_proj": one[:WIDTH], "up_proj": one[WIDTH:]} if "gate_up" in kind else {"down_proj": one}
                out |= {f"{stem}.{e}.{k}.weight{state}": np.ascontiguousarray(v) for k, v in parts.items()}
            if not kind.endswith("_proj"):
                out[f"{name}{state}"] = whole
        return out

    weights = published({n: filled(s, i) for i, (n, s) in enumerate(MEMORY.items())})
    decay = [n for n in MEMORY if len(MEMORY[n]) > 1]
    groups = [decay, [n for n in MEMORY if n not in decay]]
    src = tmp_path / "src"
    src.mkdir()
    write(src / "model.safetensors", {n: Raw("F32", a.view("<u4")) for n, a in sorted(weights.items())})
    torch_save(numbered(*groups, shapes=MEMORY, names=named), src / "optimizer.pt")
    (src / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "num_attention_heads": 1, "vocab_size": V}))
    reshard(src, tmp_path / "out", "--to", "ranks", "--tp-out", 1)
    found = states(tmp_path / "out")
    held = {n: adam(n, MEMORY) for n in MEMORY}
    want: dict[str, Array] = {}
    for key in ("exp_avg", "exp_avg_sq"):
        want |= published({n: s[key] for n, s in held.items()}, f"/{key}")
    want |= {f"{n}/step": np.array(7, "<f4") for n in weights}
    assert found.keys() == want.keys()
    for key, value in want.items():
        assert np.array_equal(found[key], value), key
    said = record(tmp_path / "out")["groups"]
    assert sorted(n for g in said for n in g["parameters"]) == sorted(weights)


def test_one_group_in_the_order_of_the_model(tmp_path: Path) -> None:
    """Frozen parameters and buffers have no number; the tensors that have one follow from shapes and their order."""
    carried(directory(tmp_path / "a", numbered(TRAINED)), tmp_path / "out", TRAINED)


def test_groups_of_a_trainer(tmp_path: Path) -> None:
    """With weight decay, and without for biases and norms: the numbers run through both."""
    source = directory(tmp_path / "a", numbered(DECAY, REST))
    carried(source, tmp_path / "out", TRAINED)
    groups = record(tmp_path / "out")["groups"]
    assert [g["parameters"] for g in groups] == [DECAY, REST]
    assert groups[0]["values"] == {**ADAM, "betas": [0.9, 0.95]}


def test_named_parameters_in_any_order(tmp_path: Path) -> None:
    upside_down = [REST[::-1], DECAY[::-1]]
    carried(safetensors(tmp_path / "a", numbered(*upside_down, names=True)), tmp_path / "out", TRAINED)
    carried(directory(tmp_path / "b", numbered(*upside_down, names=True)), tmp_path / "out_b", TRAINED)


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "app.model."])
def test_states_under_names(tmp_path: Path, prefix: str) -> None:
    """``get_optimizer_state_dict`` gives names, which may have what the trainer put around the model."""
    value = {
        "state": {prefix + n: adam(n) for n in reversed(TRAINED)},
        "param_groups": [{**ADAM, "params": [prefix + n for n in TRAINED]}],
    }
    carried(safetensors(tmp_path / "a", value), tmp_path / "out", TRAINED)
    assert record(tmp_path / "out")["groups"][0]["parameters"] == TRAINED


def test_the_flattened_form(tmp_path: Path) -> None:
    value = {f"state.{n}.{k}": v for n in TRAINED for k, v in adam(n).items()}
    value |= {f"param_groups.{n}.lr": 0.5 if n in DECAY else 0.25 for n in TRAINED}
    carried(safetensors(tmp_path / "a", value), tmp_path / "out", TRAINED)
    groups = record(tmp_path / "out")["groups"]
    assert [(g["parameters"], g["values"]) for g in groups] == [(DECAY, {"lr": 0.5}), (REST, {"lr": 0.25})]


def test_shapes_that_are_all_different_need_no_order(tmp_path: Path) -> None:
    shapes: Shapes = {"z.weight": (3, 4), "y.weight": (5, 4), "a.weight": (4,)}
    carried(
        safetensors(tmp_path / "a", numbered([*shapes], shapes=shapes), shapes),
        tmp_path / "out",
        [*shapes],
        shapes=shapes,
    )


def test_sorted_names_say_no_order(tmp_path: Path) -> None:
    """safetensors sort names; which of equal shapes is meant is nowhere, and nothing is guessed."""
    source = safetensors(tmp_path / "a", numbered(TRAINED))
    error = refused(source, tmp_path / "out", "--to", "ranks", "--tp-out", 1)
    assert "nothing says whose the state of number 0 is: it fits `embed.weight` and `head.weight`" in error
    assert "named parameters" in error
    assert "pytorch_model.bin" in error
    assert "--only model" in error
    refused(source, tmp_path / "out", "--to", "ranks", "--tp-out", 1, "--only", "optimizer")
    done = reshard(source, tmp_path / "out", "--to", "ranks", "--tp-out", 1, "--only", "model")
    assert "the optimizer (optimizer.pt) is not read" in done.err


def test_two_groups_that_could_be_exchanged(tmp_path: Path) -> None:
    """One group for each layer, of the same shapes: the order inside of groups does not say which layer is which."""
    layers = [[n for n in TRAINED if n.startswith(f"layers.{i}.")] for i in range(2)]
    error = refused(directory(tmp_path / "a", numbered(*layers)), tmp_path / "out", "--to", "ranks", "--tp-out", 1)
    assert "it fits `layers.0.up.weight` and `layers.1.up.weight`" in error


def test_a_frozen_parameter_that_could_be_any_of_two(tmp_path: Path) -> None:
    some_frozen = [n for n in TRAINED if n != "layers.0.norm.weight"]
    error = refused(directory(tmp_path / "a", numbered(some_frozen)), tmp_path / "out", "--to", "ranks", "--tp-out", 1)
    assert "nothing says whose" in error


def test_a_number_without_state(tmp_path: Path) -> None:
    """A parameter that had no gradient yet is in its group and has no state."""
    value = numbered(TRAINED)
    gone = TRAINED.index("layers.1.up.weight")
    del value["state"][gone]
    carried(directory(tmp_path / "a", value), tmp_path / "out", [n for n in TRAINED if n != TRAINED[gone]])


def test_state_of_another_model(tmp_path: Path) -> None:
    shapes = NET | {"layers.1.up.weight": (H + 1, H)}
    source = directory(tmp_path / "a", numbered(TRAINED), model(shapes))
    error = refused(source, tmp_path / "out", "--to", "ranks", "--tp-out", 1)
    assert "the optimizer has state [8, 8] for its parameter 5, and the model has no parameter left for it" in error
    named = directory(tmp_path / "b", numbered(TRAINED, names=True), model(shapes))
    error = refused(named, tmp_path / "out", "--to", "ranks", "--tp-out", 1)
    assert "the optimizer's state of `layers.1.up.weight` is [8, 8], and the parameter is [9, 8]" in error
    other = numbered(TRAINED, names=True)
    other["param_groups"][0]["param_names"][3] = "layers.7.norm.weight"
    error = refused(directory(tmp_path / "c", other), tmp_path / "out", "--to", "ranks", "--tp-out", 1)
    assert "the optimizer has state of `layers.7.norm.weight`, which is not among the model's tensors" in error


@pytest.mark.parametrize(
    ("names", "ordered"),
    [
        ([*NET], True),
        (["a.weight", "a.bias", "b.weight"], True),
        (["a.bias", "a.weight", "b.weight"], False),  # sorted, and a bias comes first
        (["b.bias", "b.weight", "a.weight"], False),
        (["b.0.x", "b.1.x", "a.0.x"], True),
        (["b.1.x", "b.0.x", "a.0.x"], False),
        (["b.0.x", "b.10.x", "b.2.x", "a.x"], False),
        (["b.0.up", "b.1.up", "b.0.down", "b.1.down", "a.x"], False),  # one kind after the other
        (["b.x", "a.x", "b.y"], False),
    ],
)
def test_what_may_be_the_order_of_modules(names: list[str], ordered: bool) -> None:
    assert is_state_dict(names) is ordered


def test_shards_of_one_tensor_are_no_order(tmp_path: Path) -> None:
    """A writer puts a tensor that is too large for a shard before those that came before it."""
    tensors = model()
    names = [*tensors]
    shards = [names[2:3], names[:2] + names[3:]]
    for i, part in enumerate(shards):
        torch_save({n: tensors[n] for n in part}, tmp_path / "a" / f"pytorch_model-{i + 1:05d}-of-00002.bin")
    torch_save(numbered(TRAINED), tmp_path / "a/optimizer.pt")
    refused(tmp_path / "a", tmp_path / "out", "--to", "ranks", "--tp-out", 1)


# -- kinds of optimizers


def test_states_by_their_names(tmp_path: Path) -> None:
    """SGD with momentum, AMSGrad and a scalar of NAdam's: whatever is of the parameter's shape, or one number."""
    value = {
        "state": {
            0: {"momentum_buffer": filled((3, 4), 1.0)},
            1: {"max_exp_avg_sq": filled((5,), 2.0), "mu_product": np.array(0.5, "<f4"), "step": 12},
            2: {"momentum_buffer": None},
        },
        "param_groups": [{"lr": 0.1, "params": [0, 1, 2]}],
    }
    shapes: Shapes = {"b.weight": (3, 4), "b.bias": (5,), "a.weight": (2, 2)}
    reshard(directory(tmp_path / "a", value, model(shapes)), tmp_path / "out", "--to", "ranks", "--tp-out", 1)
    found = states(tmp_path / "out")
    assert {n: a.shape for n, a in found.items()} == {
        "b.weight/momentum_buffer": (3, 4),
        "b.bias/max_exp_avg_sq": (5,),
        "b.bias/mu_product": (),
        "b.bias/step": (),
    }
    assert found["b.bias/step"] == 12  # a number of the pickle
    assert found["b.bias/mu_product"] == 0.5


@pytest.mark.parametrize("step", [7, 7.0, np.array([7], "<f4")])
def test_steps_of_older_files(tmp_path: Path, step: Any) -> None:
    carried(directory(tmp_path / "a", numbered(TRAINED, step=step)), tmp_path / "out", TRAINED, "--verify")


KINDS = {
    "Adafactor": ({"exp_avg_sq_row": filled((3,), 0.0), "exp_avg_sq_col": filled((4,), 0.0), "step": 1}, "Adafactor"),
    "8 bit": ({"state1": np.zeros((3, 4), "u1"), "qmap1": filled((256,), 0.0), "absmax1": filled((1,), 0.0)}, "8-bit"),
    "L-BFGS": ({"old_dirs": [filled((12,), 0.0)], "func_evals": 3}, "L-BFGS"),
    "text": ({"exp_avg": filled((3, 4), 0.0), "mode": "fast"}, "the state `mode` of `0` is of the type str"),
    "a class": ({"exp_avg": PickledCall("torchao.optim", "OptimState8bit", (1,))}, "type torchao.optim.OptimState8bit"),
    "two shapes": ({"exp_avg": filled((3, 4), 0.0), "other": filled((7, 2), 0.0)}, "have different shapes"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    state, why = KINDS[kind]
    value = {"state": {0: state}, "param_groups": [{"params": [0], "param_names": ["a.weight"]}]}
    source = directory(tmp_path / "a", value, model({"a.weight": (3, 4)}))
    assert why in refused(source, tmp_path / "out", "--to", "ranks", "--tp-out", 1)
    assert "note: the optimizer (optimizer.pt) is not read: " in command("inspect", source).err


# -- where it lies


def test_a_model_and_its_optimizer_in_one_file(tmp_path: Path) -> None:
    """The same program saved both, so that even names that are sorted are in the order of the model."""
    shapes: Shapes = {"a.x": (2, 2), "b.x": (2, 2), "c.x": (2, 2)}
    value = {
        "model": model(shapes),
        "optimizer": numbered([*shapes], shapes=shapes),
        "global_step": 7,
        "config": {"hidden": 8},
        "rng": np.zeros(4, "u1"),
    }
    path = torch_save(value, tmp_path / "step.pth")
    done = reshard(path, tmp_path / "out", "--to", "ranks", "--tp-out", 1, "--select", "model")
    right(tmp_path / "out", [*shapes], shapes)
    assert "note: read from `model`; left out: rng\n" in done.err
    said = record(tmp_path / "out")
    assert (said["step"], said["plain"], said["left"]) == (7, {"global_step": 7, "config": {"hidden": 8}}, ["rng"])


def test_several_optimizers_are_refused(tmp_path: Path) -> None:
    both = {"model": model(), "optimizer_d": numbered(TRAINED), "optimizer_g": numbered(TRAINED)}
    path = torch_save(both, tmp_path / "gan.pth")
    error = refused(path, tmp_path / "out", "--to", "ranks", "--tp-out", 1)
    assert "there are 2 optimizers: optimizer_d, optimizer_g" in error
    source = directory(tmp_path / "a", numbered(TRAINED))
    torch_save(numbered(TRAINED), source / "optimizer_1.bin")
    error = refused(source, tmp_path / "out", "--to", "ranks", "--tp-out", 1)
    assert "there are 2 optimizers: optimizer.pt, optimizer_1.bin" in error


def test_lists_of_optimizers_and_prefixes(tmp_path: Path) -> None:
    """As Lightning saves them."""
    tensors = {f"model.{n}": a for n, a in model().items()}
    value = {"state_dict": tensors, "optimizer_states": [numbered(TRAINED)], "lr_schedulers": [], "epoch": 3}
    reshard(torch_save(value, tmp_path / "last.ckpt"), tmp_path / "out", "--to", "ranks", "--tp-out", 1)
    assert {n.rpartition("/")[0] for n in states(tmp_path / "out")} == {f"model.{n}" for n in TRAINED}


def test_what_a_trainer_resumes_from(tmp_path: Path) -> None:
    source = directory(tmp_path / "a", numbered(DECAY, REST))
    torch_save({"base_lrs": [0.1], "last_epoch": 7, "lr_lambdas": [None]}, source / "scheduler.pt")
    torch_save({"x": np.zeros(3, "u1")}, source / "rng_state.pth")
    (source / "trainer_state.json").write_text(json.dumps({"global_step": 7, "epoch": 1.5}))
    reshard(source, tmp_path / "out", "--to", "ranks", "--tp-out", 1)
    said = record(tmp_path / "out")
    assert said["step"] == 7
    assert said["plain"] == {"lr_scheduler": {"base_lrs": [0.1], "last_epoch": 7, "lr_lambdas": [None]}}
    assert said["left"] == ["rng_state.pth"]


def test_a_model_alone_is_read_as_before(tmp_path: Path) -> None:
    """What holds no optimizer leaves it where it is, whatever is wrong with it."""
    plain = safetensors(tmp_path / "plain", numbered(DECAY, REST, names=True))
    for name, damage in {
        "cut": plain.joinpath("optimizer.pt").read_bytes()[:-200],
        "text": b"version https://git-lfs",
    }.items():
        source = safetensors(tmp_path / name, {})
        (source / "optimizer.pt").write_bytes(damage)
        done = reshard(source, tmp_path / f"{name}_out", "--to", "hf")
        assert "note: the optimizer (optimizer.pt) is not read:" in done.err
        assert command("inspect", source).code == 0
        refused(source, tmp_path / "no", "--to", "ranks", "--tp-out", 1)
    done = reshard(plain, tmp_path / "out", "--to", "hf")
    assert "note: optimizer left out: --to hf holds model\n" in done.err
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"model.safetensors"}
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "cut_out/model.safetensors").read_bytes()


def test_inspect_shows_it(tmp_path: Path) -> None:
    source = directory(tmp_path / "a", numbered(DECAY, REST))
    done = command("inspect", source)
    assert "with optimizer state" in done.out
    assert "each: exp_avg, exp_avg_sq, step" in done.out
    assert "optimizer/layers.1.norm.bias/exp_avg_sq\tF32\t[8]" in command("inspect", source, "--list").out
    assert command("inspect", source, "--check", "--values").code == 0
    assert "\noptimizer.pt\t" in command("inspect", source, "--files").out


def test_tensors_are_dropped_from_the_model_only(tmp_path: Path) -> None:
    """drop-keys keeps the files of the model; the optimizer beside them is left behind, as its file always was."""
    source = safetensors(tmp_path / "a", numbered(TRAINED, names=True))
    done = command("drop-keys", source, tmp_path / "out", "head.weight")
    assert done.code == 0, done.err
    assert "optimizer left out: hf holds model" in done.err
    assert "1 file rewritten, 0 unchanged, 0 deleted" in done.out
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"model.safetensors"}


def test_cut_over_ranks_and_back(tmp_path: Path) -> None:
    """The moments go where their parameter goes."""
    source = directory(tmp_path / "a", numbered(TRAINED))
    cut = tmp_path / "cut"
    reshard(source, cut, "--to", "ranks", "--tp-out", 2, "--split", "*=none", "--split", "layers.*.up.weight=0")
    carried(cut, tmp_path / "out", TRAINED)


def test_states_without_names_are_refused(tmp_path: Path) -> None:
    value = numbered(TRAINED)
    value["state"][0] = {5: value["state"][0]["exp_avg"]}
    error = refused(directory(tmp_path / "a", value), tmp_path / "out", "--to", "ranks", "--tp-out", 1)
    assert "a state of `0` has no name" in error
