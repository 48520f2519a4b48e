"""The state of torch's AdamW as Paddle's: its kernels make the same powers, and its next step is torch's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpttool.targeting.states import Powers
from tests.helpers.training_run import CONFIG, SHAPES, save_run
from tests.peers import paddle_side
from tests.peers.paddle_side import Bits
from tests.peers.tool import reshard

BETAS, LR, EPS, DECAY = (0.9, 0.95), 1e-2, 1e-8, 0.1


def in_paddle(folder: Path, job: dict[str, Any]) -> dict[str, Bits]:
    path = folder / "job.json"
    path.write_text(json.dumps({"out": str(folder / "out.npz"), **job}), encoding="utf-8")
    paddle_side.start("tests.peers.paddle_step", path)
    return paddle_side.load(folder / "out.npz")


def paddle_name(name: str) -> str:
    """In paddlenlp's Llama."""
    return name.replace("model.", "llama.")


def turned(name: str, array: Any) -> Any:
    """As paddlenlp keeps it: linear weights [in, out]."""
    return array.T if name.endswith("_proj.weight") or name == "lm_head.weight" else array


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.85, 0.95)])
def test_powers_are_those_of_the_kernels(betas: tuple[float, float], tmp_path: Path) -> None:
    """Down to numbers below the normal ones, and to where they stop."""
    steps = [1, 2, 3, 10, 100, 500, 537, 829, 850, 1000, 1700, 2000]
    told = in_paddle(tmp_path, {"betas": betas, "powers": steps})
    for beta, name in zip(betas, ("beta1_pow_acc_0", "beta2_pow_acc_0"), strict=True):
        known = Powers(beta, "F32")
        for n in steps:
            power = told[f"{name} {n}"]
            assert power.shape == (1,)
            assert known.after(n).tobytes() == power.tobytes(), (name, n)
            first, last = known.steps(float(power[0])) or (1, 0)
            assert first <= n <= last


@pytest.mark.parametrize("steps", [1, 6])
def test_next_step_is_that_of_torch(steps: int, tmp_path: Path) -> None:
    """A power that is off by one step would change early steps by many percent."""
    rng = np.random.default_rng(3)
    weights = {n: torch.nn.Parameter(torch.from_numpy(rng.standard_normal(s).astype("f4"))) for n, s in SHAPES.items()}
    optimizer = torch.optim.AdamW([*weights.values()], lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    run: dict[str, Any] = {}
    gradients = {}
    for step in range(steps + 1):
        for name, weight in weights.items():
            gradients[name] = rng.standard_normal(weight.shape).astype("f4")
            weight.grad = torch.from_numpy(gradients[name])
        if step == steps:
            for name, weight in weights.items():
                run[name] = weight.detach().numpy().copy()
                for state, value in optimizer.state[weight].items():
                    run[f"optimizer/{name}/{state}"] = np.array(value.numpy())
        optimizer.step()
    group = {"parameters": list(SHAPES), "values": {"lr": LR, "betas": list(BETAS)}}
    source = save_run(tmp_path / "run", run, groups=[group], config={**CONFIG, "torch_dtype": "float32"})
    reshard(source, tmp_path / "unified", "--to", "unified", "--target", "paddlenlp-3.0", "--verify")
    theirs: dict[str, Any] = {paddle_name(n): turned(n, g) for n, g in gradients.items()}
    np.savez(tmp_path / "gradients.npz", **theirs)
    job = {"checkpoint": str(tmp_path / "unified"), "gradients": str(tmp_path / "gradients.npz"), "betas": BETAS}
    told = in_paddle(tmp_path, {**job, "lr": LR, "eps": EPS, "decay": DECAY})
    assert len(told) == len(SHAPES)
    for name, weight in weights.items():
        want = turned(name, weight.detach().numpy())
        np.testing.assert_allclose(told[paddle_name(name)], want, rtol=2e-6, atol=2e-7, err_msg=name)
