"""One more step of Paddle's AdamW from a unified checkpoint, and the powers of its betas after many.

``main`` takes JOB.json: ``{"checkpoint": ..., "gradients": ..., "out": ..., "betas": [...], "powers": [...]}``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from tests.peers.paddle_software import on_the_processor


def tensors(folder: Path, stem: str) -> dict[str, Any]:
    """What the files of a component hold, float32 all of it."""
    from safetensors.numpy import load_file

    return {k: v for f in sorted(folder.glob(f"{stem}-*.safetensors")) for k, v in load_file(f).items()}


def stepped(job: dict[str, Any]) -> dict[str, Any]:
    """The weights after one step with the given gradients."""
    folder = Path(job["checkpoint"])
    model, state = tensors(folder, "model"), tensors(folder, "optimizer")
    weights = {n: paddle.create_parameter(list(a.shape), "float32", name=n) for n, a in model.items()}
    beta1, beta2 = job["betas"]
    optimizer = paddle.optimizer.AdamW(
        job["lr"], beta1, beta2, job["eps"], parameters=list(weights.values()), weight_decay=job["decay"]
    )
    given = {}
    for key, array in state.items():
        name, _, accumulator = key.rpartition("/")
        given[f"{name}_{accumulator}"] = paddle.to_tensor(array)
    with np.load(job["gradients"]) as gradients:
        for name, weight in weights.items():
            weight.set_value(model[name])
            (weight * paddle.to_tensor(gradients[name])).sum().backward()  # a loss whose gradient that is
        optimizer.set_state_dict(given)
        optimizer.step()
    return {n: w.numpy() for n, w in weights.items()}


def powers(betas: list[float], steps: list[int]) -> dict[str, Any]:
    """What the kernels made of them, by the number of steps."""
    weight = paddle.create_parameter([2], "float32", name="counted")
    optimizer = paddle.optimizer.AdamW(0.0, *betas, parameters=[weight])
    out = {}
    for n in range(1, max(steps) + 1):
        weight.sum().backward()
        optimizer.step()
        optimizer.clear_grad()
        if n in steps:
            state = optimizer.state_dict()
            for accumulator in ("beta1_pow_acc_0", "beta2_pow_acc_0"):
                out[f"{accumulator} {n}"] = state[f"counted_{accumulator}"].numpy()
    return out


def main() -> None:
    """Write ``out`` (.npz)."""
    on_the_processor()
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    np.savez(job["out"], **(stepped(job) if "checkpoint" in job else powers(job["betas"], job["powers"])))
    print("CKPTTOOL", json.dumps({"out": job["out"]}), flush=True)  # noqa: T201
