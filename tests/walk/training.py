"""A chain of trainers: an optimizer through Paddle's formats and torch's, judged in Paddle's."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from random import Random

from tests.walk import chain, names, paddle, states
from tests.walk.bits import Wrong
from tests.walk.chain import EITHER, WORKS, Step, Told
from tests.walk.judge import PADDLE, State, judge
from tests.walk.models import build
from tests.walk.names import Style, Unclear
from tests.walk.ranks import Grid

_BETWEEN = ("dcp", "universal", "megatron", "megatron-dist")
"""Formats of torch's trainers, which the next of Paddle's judges."""

_SINGLE = ("qwen2_moe", "qwen3_moe")
"""Models whose routers PaddleFormers' trainers keep in float32."""


def walk_training(seed: int, folder: Path) -> Told:
    """Walk one chain in an empty folder."""
    told = Told(seed)
    r = Random(f"training {seed}")  # noqa: S311  # chance that can be repeated is what is wanted
    model = build(r.randrange(1 << 30))
    while "fp8 blocks" in model.traits or model.tie == "differs" or not paddle.judged(model, Grid()):
        model = build(r.randrange(1 << 30))
    state = State(model, names.hugging_face(model, names.plain(model), Style()))
    chain.write_source(folder / "s0", model, state, r)
    optimizer = states.train(model, r)
    told.traits.update([model.kind, *model.traits])
    told.log.append(f"# {model.kind}, {', '.join(sorted(model.traits))}\n# {json.dumps(model.config)}")
    src = folder / "s0"
    steps = r.randint(2, 5)
    for i in range(steps + 1):
        step = _draw(r, state, optimizer, last=i == steps)
        if step is None:
            continue
        dst = folder / f"s{i + 1}"
        try:
            ended = chain.execute(step, src, dst, folder, r, told)
            worked = chain.weigh(step, ended, told)
            if worked and state.optimizer:
                step.state = _single(step.state)
            if worked and step.state.format in PADDLE:
                judge(dst, step.state)
            if worked and not state.optimizer:
                step.state = replace(step.state, optimizer=optimizer)
                _add(dst, step.state)
                told.log.append(f"# {dst.name} gets an optimizer of {optimizer.steps} steps, betas {optimizer.betas}")
        except Wrong as e:
            told.wrong = str(e)
            return told
        except (KeyError, ValueError, OSError) as e:  # what the judge did not find at all
            told.wrong = f"{type(e).__name__}: {e}"
            return told
        if worked:
            told.pairs[model.family, f"{step.state.format}+"] += 1
            shutil.rmtree(src)
            src, state = dst, step.state
    return told


def _single(state: State) -> State:
    """PaddleFormers' trainers keep Qwen's routers in float32: a router is its master then, and has no other."""
    model, optimizer = state.model, state.optimizer
    assert optimizer
    if state.format not in PADDLE or not state.target.startswith("paddleformers") or model.kind not in _SINGLE:
        return state
    masters = optimizer.kinds["master"].tensors
    tensors = {n: t for n, t in masters.items() if n.endswith(".mlp.gate.weight")}
    return replace(state, model=replace(model, tensors={**model.tensors, **tensors}))


def _add(path: Path, state: State) -> None:
    assert state.optimizer
    if state.format == "unified":
        states.add_unified(path, state.optimizer, state.table)
    else:
        states.add_hybrid(path, state.optimizer, state.model, state.table, state.grid)


def _draw(r: Random, state: State, optimizer: states.Optimizer, *, last: bool) -> Step | None:
    if not state.optimizer:
        step = chain.to_paddle(r, state)
        plain = step and step.expect == WORKS and step.state.grid.ep == 1
        if step is None or not plain or step.state.format == "flex" or step.state.shards > 1:
            return None
        return step if _made(step.state, optimizer) else None
    if not last and r.random() < 0.35:
        return _to_torch(r, state)
    step = chain.to_paddle(r, state)
    if step is None:
        return None
    if not _made(step.state, optimizer):
        step.expect, step.why = EITHER, "a fused weight has a state in a part"
    if step.state.shards > 1 and step.state.format == "hybrid" and r.random() < 0.2:
        step.words[step.words.index("hybrid")] = "zcc"
    if state.format in _BETWEEN and step.expect == WORKS:
        step.expect = EITHER
    return step


def _made(state: State, optimizer: states.Optimizer) -> bool:
    """Whether every stored tensor has a state or has none."""
    try:
        return bool(optimizer.table(states.MOMENTS[0], state.table))
    except Wrong:
        return False


def _to_torch(r: Random, state: State) -> Step | None:
    assert state.optimizer
    format_ = r.choice(_BETWEEN)
    words = ["--to", format_]
    if state.naming == "paddle":
        words += ["--betas", "{},{}".format(*state.optimizer.betas)]
    grid = Grid()
    if format_ == "dcp":
        words += ["--sharding-out", str(r.choice([1, 2, 3]))]
    elif format_.startswith("megatron"):
        if state.model.traits & {"mtp layer", "derived buffers"}:
            return None
        tp = r.choice([n for n in (1, 2, 4) if state.model.heads % n == 0])
        words += ["--tp-out", str(tp), "--pp-out", str(r.choice([n for n in (1, 2) if state.model.layers % n == 0]))]
    try:
        table = state.named("hf", Style())
    except Unclear:
        return None
    new = replace(
        state, table=table, format=format_, naming="hf", style=Style(), grid=grid, shards=1, config_kept=False
    )
    return Step(words, new, EITHER)
