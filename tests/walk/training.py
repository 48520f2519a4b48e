"""A chain of trainers: an optimizer through Paddle's formats and torch's, judged in Paddle's."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from random import Random

from tests.walk import chain, names, paddle, states
from tests.walk.bits import Wrong, cast
from tests.walk.chain import EITHER, WORKS, Step, Told
from tests.walk.judge import PADDLE, State, judge
from tests.walk.models import build
from tests.walk.names import Style, Unclear
from tests.walk.ranks import Grid

BETWEEN = ("dcp", "universal", "megatron", "megatron-dist")
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
    for i in range(r.randint(3, 6)):
        step = _first(r, state, optimizer) if not state.optimizer else _next(r, state, optimizer)
        if step is None:
            continue
        dst = folder / f"s{i + 1}"
        try:
            worked = _take(step, src, dst, r, told)
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
            src, state = dst, replace(step.state, stripped=False)
            meta = src / "model_meta.json"
            if meta.exists() and r.random() < 0.15:
                meta.unlink()
                told.log.append(f"rm {src.name}/{meta.name}")
                state = replace(state, stripped=True)
    return told


def _take(step: Step, src: Path, dst: Path, r: Random, told: Told) -> bool:
    """Whether the command has worked. Raises Wrong."""
    ended = chain.execute(step, src, dst, src.parent, r, told)
    if not chain.weigh(step, ended, told):
        return False
    if step.state.optimizer:
        step.state = _single(step.state)
    if step.state.format in PADDLE:
        judge(dst, step.state)
    return True


def _single(state: State) -> State:
    """PaddleFormers' trainers keep Qwen's routers in float32: a router is its master then, and has no other."""
    model, optimizer = state.model, state.optimizer
    assert optimizer
    formers = state.format == "flex" or (state.format in PADDLE and state.target.startswith("paddleformers"))
    if not formers or model.kind not in _SINGLE:
        return state
    masters = optimizer.kinds["master"].tensors
    tensors = dict(model.tensors)
    for name, t in model.tensors.items():
        if name.endswith(".mlp.gate.weight"):
            tensors[name] = masters.get(name) or replace(t, raw=cast(t.raw, "F32"))
    return replace(state, model=replace(model, tensors=tensors))


def _add(path: Path, state: State) -> None:
    assert state.optimizer
    if state.format == "unified":
        states.add_unified(path, state.optimizer, state.model, state.table)
    else:
        states.add_hybrid(path, state.optimizer, state.model, state.table, state.grid)


def _first(r: Random, state: State, optimizer: states.Optimizer) -> Step | None:
    """To where an optimizer can be put beside the model; None where chance does not find it."""
    for _ in range(20):
        step = chain.to_paddle(r, state)
        if step is None or step.expect != WORKS or step.state.grid.ep > 1 or step.state.shards > 1:
            continue
        if step.state.format != "flex" and _made(step.state, optimizer):
            return step
    return None


def _next(r: Random, state: State, optimizer: states.Optimizer) -> Step | None:
    if r.random() < 0.3 and state.format not in BETWEEN:
        return _to_torch(r, state)
    step = chain.to_paddle(r, state)
    if step is None:
        return None
    if not _made(step.state, optimizer):
        step.expect, step.why = EITHER, "a fused weight has a state in a part"
    if step.state.shards > 1 and step.state.format == "hybrid" and r.random() < 0.2:
        step.words[step.words.index("hybrid")] = "zcc"
    if state.format in BETWEEN and step.expect == WORKS:
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
    format_ = r.choice(BETWEEN)
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
    if format_.startswith("megatron") and state.model.tied:
        table = names.once(state.model, table)
    new = replace(
        state, table=table, format=format_, naming="hf", style=Style(), grid=grid, shards=1, config_kept=False
    )
    return Step(words, new, EITHER)
