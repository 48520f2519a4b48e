"""Trainers of Paddle, started from here: a job's ranks, and what they hold put together under published names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.peers import paddle_side
from tests.peers.resume import task
from tests.peers.resume.held import Bits, Digests, Ran, digests, named, unrounded
from tests.peers.resume.paddle_names import published
from tests.peers.resume.task import Job

MOMENTS = {"exp_avg": "moment1_0", "exp_avg_sq": "moment2_0"}
POWERS = ("beta1_pow_acc_0", "beta2_pow_acc_0")


@dataclass(frozen=True)
class Way:
    """How a trainer runs: its ranks, and the format that it saves or loads."""

    format: str
    """save_checkpoint_format of PaddleFormers; sharding_io and unified_checkpoint are in PaddleNLP, too."""
    tp: int = 1
    sharding: int = 1


def run(job: Job, software: str, way: Way, folder: Path) -> Ran:
    folder.mkdir(parents=True)
    argument = folder / "job.json"
    # Version 2 of sharding, which shares out elements and not parameters, is for bfloat16 alone.
    mesh = {"tp": way.tp, "sharding": way.sharding, "version": "v2" if job.bf16 else "v1"}
    argument.write_text(job.text(**mesh, format=way.format, out=str(folder / "held")), encoding="utf-8")
    ranks = way.tp * way.sharding
    told = _started(argument, software, ranks)

    def held(when: str) -> Digests:
        return _held([paddle_side.load(folder / f"held.{when}.rank{r}.npz") for r in range(ranks)], job.model, way)

    counters = {k: told[k] for k in ("global_step", "lr_step")}
    return Ran(held("begun"), held("saved") if job.save else {}, told["losses"], counters)


def _started(argument: Path, software: str, ranks: int) -> Any:
    """What the first rank told. Paddle's ranks sometimes call each other before the other one listens."""
    for last in (False, True):
        try:
            return paddle_side.start("tests.peers.resume.paddle_train", argument, software, ranks)[0][0]
        except RuntimeError as e:
            if last or "Connection refused" not in str(e):
                raise
    raise AssertionError


def saved_in(folder: Path) -> Path:
    """The checkpoint below a trainer's output."""
    return folder / f"checkpoint-{task.STEPS}"


def _held(ranks: Sequence[Mapping[str, Bits]], model: str, way: Way) -> Digests:
    out: dict[str, Bits] = {}
    for key in ranks[0]:
        kind, _, name = key.partition("/")
        if kind == "model":
            out |= _parameter(name, ranks, model, way)
    if wrong := unrounded(out):
        raise RuntimeError(f"weights are not their masters: {wrong[:3]}")
    return digests(out)


def _parameter(name: str, ranks: Sequence[Mapping[str, Bits]], model: str, way: Way) -> dict[str, Bits]:
    places = [ranks[i :: way.tp] for i in range(way.tp)]  # what shares the state of a tensor-parallel place
    weights = [place[0][f"model/{name}"] for place in places]

    def state(key: str) -> list[Bits] | None:
        if not any(key in one for one in ranks):
            return None
        return [_joined(place, key, w.shape) for place, w in zip(places, weights, strict=True)]

    masters = state(f"master_weights/{name}")
    if masters is not None and weights[0].dtype == np.float32:  # unified checkpoints list them again
        if not all(np.array_equal(m, w) for m, w in zip(masters, weights, strict=True)):
            raise RuntimeError(f"{name} is float32 and not its master")
        masters = None
    moments = {kind: state(f"optimizer/{name}/{theirs}") for kind, theirs in MOMENTS.items()}
    have = {kind: published(name, parts, model) for kind, parts in moments.items() if parts is not None}
    full = published(name, weights if masters is None else masters, model)
    apart = None if masters is None else published(name, weights, model)
    powers = [f"optimizer/{name}/{p}" for p in POWERS] if have else []
    steps = _steps([next(one[k] for one in ranks if k in one) for k in powers]) if have else 0.0
    out: dict[str, Bits] = {}
    for n, array in full.items():
        lower = None if apart is None else apart[n]
        out |= named(n, array, lower, {k: v[n] for k, v in have.items()}, steps, lambda n, v: {n: v})
    return out


def _joined(ranks: Sequence[Mapping[str, Bits]], key: str, shape: tuple[int, ...]) -> Bits:
    """A state of which one rank has all, or each a slice of the elements with padding behind the last."""
    parts = [one[key] for one in ranks if key in one]
    if parts[0].shape == shape:
        if not all(np.array_equal(p, parts[0]) for p in parts):
            raise RuntimeError(f"ranks differ in {key}")
        return parts[0]
    flat = np.concatenate([p.reshape(-1) for p in parts])
    size = int(np.prod(shape))
    if flat[size:].any():
        raise RuntimeError(f"{key} has padding that is not zero")
    return flat[:size].reshape(shape)


def _steps(powers: Sequence[Any]) -> float:
    """How often Paddle's kernels multiplied both betas, in float32."""
    for n in range(1000):
        if all(_power(beta, n) == p.reshape(()) for beta, p in zip(task.BETAS, powers, strict=True)):
            return float(n)
    raise RuntimeError(f"no number of steps gives the powers {powers}")


def _power(beta: float, steps: int) -> Any:
    out = np.float32(beta)
    for _ in range(steps):
        out *= np.float32(beta)
    return out
