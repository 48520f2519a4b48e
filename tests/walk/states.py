"""What Paddle's files hold of an optimizer: read whole, and compared with moments that say where they belong.

A moment lies as its weight does: it is made, turned, fused and cut like it. So a kind of state is a model of its own,
with the same table of names, whose elements are the states.
"""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from tests.walk.bits import Array, Raw, Wrong, cast, made, read, write
from tests.walk.forms import leaves
from tests.walk.models import Model
from tests.walk.names import Table
from tests.walk.paddle import HABIT, flex_folder, flex_wanted, load, plain, suffix_of
from tests.walk.ranks import Grid, Seat, held_at, whole

MOMENTS = ("moment1_0", "moment2_0")
POWERS = ("beta1_pow_acc_0", "beta2_pow_acc_0")
KINDS = (*MOMENTS, "master")
_MASTER = "_fp32_master_0"


@dataclass(frozen=True)
class Optimizer:
    """Of a model: one of the same names for each kind of state, and how often it has stepped."""

    kinds: Mapping[str, Model]
    steps: int
    betas: tuple[float, float]
    masters: bool = True
    """Whether there are masters; else they are the weights."""
    by_head: bool = False
    """Whether the state of tied embeddings lies under the name of the head."""

    def power(self, kind: str) -> Array:
        """Paddle multiplies in float32, once in each step."""
        beta = np.float32(self.betas[POWERS.index(kind)])
        now = beta
        for _ in range(self.steps):
            now = np.float32(now * beta)
        return np.array([now], np.float32)

    def table(self, kind: str, table: Table) -> Table:
        """Stored names of what has this state. Raises Wrong where a part of one has none."""
        there = self.kinds[kind].tensors
        out = {}
        for name, form in table.items():
            have = [leaf in there for leaf in leaves(form)]
            if any(have) and not all(have):
                raise Wrong(f"`{name}` is made of parameters with and without state")
            if all(have):
                out[name] = form
        return out


def train(model: Model, r: Random) -> Optimizer:
    """States that say where they belong; masters round to their weights. Buffers have none, nor have frozen layers."""
    frozen = {r.randrange(model.layers)} if model.layers > 1 and r.random() < 0.2 else set()
    if frozen:
        model.traits.add("frozen layer")
    masters = r.random() < 0.8
    if not masters:
        model.traits.add("no masters")
    kinds: dict[str, Model] = {k: replace(model, tensors={}) for k in KINDS}
    for ident, (name, tensor) in enumerate(model.tensors.items()):
        tied = name == model.output and model.tied
        if tensor.derived or "e_score_correction" in name or tensor.layer in frozen or tied:
            continue
        for at, kind in enumerate(MOMENTS):
            raw = made(700 * (at + 1) + ident, "F32", tensor.raw.bits.shape)
            kinds[kind].tensors[name] = replace(tensor, raw=raw)
        raw = _master(tensor.raw, ident) if masters else cast(tensor.raw, "F32")
        kinds["master"].tensors[name] = replace(tensor, raw=raw)
    betas = r.choice([(0.9, 0.999), (0.9, 0.95)])
    return Optimizer(kinds, r.choice([1, 2, 7, 40, 137]), betas, masters, r.random() < 0.5)


def _master(raw: Raw, ident: int) -> Raw:
    """A float32 that rounds to the weight, and is not the weight."""
    if raw.dtype == "F32":
        return raw
    exact = cast(raw, "F32")
    place = (np.arange(raw.bits.size, dtype=np.uint32) * np.uint32(7) + np.uint32(ident)) % np.uint32(4000)
    bits = exact.bits + place.reshape(raw.bits.shape).astype("<u4")
    # A number of F16 below 2**-14 has fewer bits, and zero has none.
    small = (exact.bits & np.uint32(0x7FFFFFFF)) < np.uint32(0x38800000)
    return Raw("F32", np.where(small, exact.bits, bits).astype("<u4"))


# -- writing


def add_unified(path: Path, optimizer: Optimizer, model: Model, table: Table) -> None:
    """Beside a model that lies there: the optimizer and the masters, in two files and their indices."""
    states: dict[str, Raw] = {}
    called = {n: n for n in table}
    if optimizer.by_head and model.tied and "lm_head.weight" in table:
        called |= {n: "lm_head.weight" for n, form in table.items() if leaves(form) == [model.embedding]}
    for kind in MOMENTS:
        for name, raw in whole(optimizer.kinds[kind], optimizer.table(kind, table)).items():
            states[f"{called[name]}/{kind}"] = raw
    for name in optimizer.table(MOMENTS[0], table):
        for kind in POWERS:
            states[f"{called[name]}/{kind}"] = Raw("F32", optimizer.power(kind).view("<u4"))
    _file(path, "optimizer", states, {"master_weights": optimizer.masters})
    if optimizer.masters:
        masters = whole(optimizer.kinds["master"], optimizer.table("master", table))
        _file(path, "master_weights", {called[n]: raw for n, raw in masters.items()}, {})


def _file(path: Path, stem: str, tensors: Mapping[str, Raw], said: Mapping[str, object]) -> None:
    name = f"{stem}-00001-of-00001.safetensors"
    write(path / name, tensors)
    total = sum(t.bits.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": total, **said}, "weight_map": dict.fromkeys(tensors, name)}
    (path / f"{stem}.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def add_hybrid(path: Path, optimizer: Optimizer, model: Model, table: Table, grid: Grid) -> None:
    """Beside a model of ranks without sharding: the optimizer of each rank."""
    for rank in range(grid.world):
        seat = Seat.of(grid, rank)
        suffix = suffix_of(grid, seat, 0, 1)
        static = load(_path(path, "model_state", suffix, "pdparams"))["StructuredToParameterName@@"]
        out: dict[str, object] = {}
        masters: dict[str, object] = {}
        for kind in KINDS:
            shadow = optimizer.kinds[kind]
            for name, raw in held_at(shadow, optimizer.table(kind, table), grid, seat, HABIT).items():
                low = _low(model, table, name)
                full = static[name] + _MASTER * low
                array = raw.bits.view("<f4")
                if kind == "master":
                    if low and optimizer.masters:
                        masters[static[name]] = (full, array)
                    continue
                out[f"{full}_{kind}"] = (f"{full}_{kind}", array)
                if kind == MOMENTS[0]:
                    out |= {f"{full}_{p}": (f"{full}_{p}", optimizer.power(p)) for p in POWERS}
        out["master_weights"] = masters
        out["LR_Scheduler"] = {"last_epoch": optimizer.steps, "last_lr": 0.5}
        _path(path, "optimizer", suffix, "pdopt").write_bytes(pickle.dumps(out, 4))


def _low(model: Model, table: Table, name: str) -> bool:
    """Whether a weight is of 16 bits, so that it has a master."""
    return model.tensors[leaves(table[name])[0]].raw.dtype != "F32"


def _path(path: Path, stem: str, suffix: str, ending: str) -> Path:
    return path / (f"{stem}.{suffix}.{ending}" if suffix else f"{stem}.{ending}")


# -- judging


def judge_states(path: Path, format_: str, optimizer: Optimizer, model: Model, table: Table, grid: Grid) -> None:
    """Raises Wrong unless every state is what it must be, the masters among them, and there is no other."""
    judge = _Judge(format_, optimizer, model, table)
    if format_ == "unified":
        _unified(path, judge)
    elif format_ == "flex":
        _flex(path, judge, grid)
    else:
        _hybrid(path, judge, grid)


def _nothing() -> dict[str, dict[str, Array]]:
    """By kind and name: what is found."""
    return {kind: {} for kind in (*KINDS, *POWERS)}


@dataclass(frozen=True)
class _Judge:
    """Compares what lies in one place with what must be there."""

    where: str
    optimizer: Optimizer
    model: Model
    table: Table

    def tied(self, name: str) -> bool:
        """Whether it is a second name of the embedding, under which its state may lie, or lie once more."""
        return self.model.tied and name in (self.model.output, "lm_head.weight")

    def low(self, name: str) -> bool:
        """Whether a weight is of 16 bits, so that it has a master."""
        return _low(self.model, self.table, name)

    def run(self, found: Mapping[str, dict[str, Array]], wanted_of: Callable[[str], dict[str, Raw]]) -> None:
        """Raises Wrong. Arrays are float32, whole, and named as the weights are."""
        for kind in KINDS:
            wanted = wanted_of(kind)
            have = self._once(found[kind], wanted)
            if kind == "master":
                have = self._masters(have, wanted)
                needed = self.optimizer.masters
                self._compare(kind, have, {n: w for n, w in wanted.items() if n in have or (needed and self.low(n))})
            else:
                self._compare(kind, have, wanted)
            if kind == MOMENTS[0]:
                for power in POWERS:
                    one = Raw("F32", self.optimizer.power(power).view("<u4"))
                    self._compare(power, self._once(found[power], wanted), dict.fromkeys(wanted, one))

    def _once(self, found: Mapping[str, Array], wanted: Mapping[str, Raw]) -> dict[str, Array]:
        """A tied weight's state under the embedding's name."""
        out = {n: a for n, a in found.items() if not self.tied(n)}
        embedding = next((n for n in wanted if n.endswith("embed_tokens.weight") and ".layers." not in n), "")
        for name, array in found.items():
            if self.tied(name) and out.setdefault(embedding, array).tobytes() != array.tobytes():
                raise Wrong(f"{self.where}: the state of `{name}` is not that of the embedding")
        return out

    def _masters(self, found: dict[str, Array], wanted: Mapping[str, Raw]) -> dict[str, Array]:
        """Without those of parameters that have no state: such a master is the weight."""
        for name in [n for n in found if n in self.table and n not in wanted]:
            exact = cast(whole(self.model, {name: self.table[name]})[name], "F32")
            array = found.pop(name)
            if array.size == exact.bits.size and array.tobytes() != np.ascontiguousarray(exact.bits).tobytes():
                raise Wrong(f"{self.where}: the master of `{name}` is not the weight")
        return found

    def _compare(self, kind: str, found: Mapping[str, Array], wanted: Mapping[str, Raw]) -> None:
        where = f"{self.where}, {kind}"
        missing, extra = wanted.keys() - found.keys(), found.keys() - wanted.keys()
        if missing or extra:
            raise Wrong(f"{where}: missing {sorted(missing)[:4]}, unexpected {sorted(extra)[:4]}")
        for name, array in found.items():
            want = np.ascontiguousarray(wanted[name].bits)
            if array.dtype != np.float32 or array.shape != want.shape:
                raise Wrong(f"{where}: `{name}` is {array.dtype} {array.shape}, must be F32 {want.shape}")
            if different := int((np.ascontiguousarray(array).view("<u4") != want.view("<u4")).sum()):
                raise Wrong(f"{where}: `{name}` has other bits in {different} of {want.size} elements")


def _unified(path: Path, judge: _Judge) -> None:
    found = _nothing()
    for file in sorted(path.glob("optimizer-*.safetensors")):
        for name, raw in read(file).items():
            parameter, _, kind = name.rpartition("/")
            if kind not in found or parameter in found[kind]:
                raise Wrong(f"{file.name}: `{name}`")
            found[kind][parameter] = raw.bits.view("<f4")
    for file in sorted(path.glob("master_weights-*.safetensors")):
        for name, raw in read(file).items():
            found["master"][name] = raw.bits.view("<f4")
    optimizer = judge.optimizer
    judge.run(found, lambda kind: whole(optimizer.kinds[kind], optimizer.table(kind, judge.table)))


def _flex(path: Path, judge: _Judge, grid: Grid) -> None:
    found = _nothing()
    for key, array in flex_folder(path / "optimizer_state").items():
        name, _, kind = key.rpartition(".")
        if kind not in found:
            raise Wrong(f"flex: {key}")
        found[kind][name] = array
    if (path / "master_weight/0.metadata").exists():
        for key, array in flex_folder(path / "master_weight").items():
            found["master"][key.removesuffix(".w_0")] = array
    optimizer = judge.optimizer
    judge.run(found, lambda kind: flex_wanted(optimizer.kinds[kind], optimizer.table(kind, judge.table), grid))


def _hybrid(path: Path, judge: _Judge, grid: Grid) -> None:
    meta = path / "model_meta.json"
    said = json.loads(meta.read_text(encoding="utf-8")) if meta.exists() else {}
    shards = said.get("parallel_config", {}).get("sharding_degree", 1)
    across = max(1, grid.ep // grid.tp)
    for stage, tp, first in itertools.product(range(grid.pp), range(grid.tp), range(across)):
        ep = first * grid.tp + tp if grid.ep > 1 else 0
        seat = Seat(stage, tp, ep, 0 if grid.ep > 1 or grid.etp == 1 else tp)
        key = f"tp{tp:02d}_pp{stage:02d}" + (f"_ep{ep:02d}" if grid.ep > 1 else "")
        names = [_names(said, stage, tp, grid, s % across) for s in range(shards)] if said else None
        here = replace(judge, where=f"hybrid {key} of {grid}, {shards} shards")
        files = [suffix_of(grid, seat, s, shards) for s in range(shards)]
        found = _joined(path, files, [s for s in range(shards) if s % across == first], names, judge)
        shapes = {n: w.bits.shape for n, w in held_at(judge.model, judge.table, grid, seat, HABIT).items()}
        for kind in KINDS:
            for name in found[kind].keys() & shapes.keys():
                found[kind][name] = _filled(here.where, name, found[kind][name], shapes[name])
        here.run(found, partial(_share, judge.optimizer, judge.table, grid, seat))


def _names(said: dict[str, Any], stage: int, tp: int, grid: Grid, first: int) -> dict[str, str]:
    """Of a rank's parameters, which are numbered with the experts that it has."""
    key = f"tp{tp:02d}_pp{stage:02d}" + (f"_ep{first * grid.tp + tp:02d}" if grid.ep > 1 else "")
    names: dict[str, str] = said["sharding_metas"][key]["structure_name_mapping"]
    return names


def _share(optimizer: Optimizer, table: Table, grid: Grid, seat: Seat, kind: str) -> dict[str, Raw]:
    return held_at(optimizer.kinds[kind], optimizer.table(kind, table), grid, seat, HABIT)


def _filled(where: str, name: str, array: Array, shape: tuple[int, ...]) -> Array:
    """The runs of all shards as one share; behind it are zeros."""
    size = int(np.prod(shape))
    if array.size < size or array.ravel()[size:].any():
        raise Wrong(f"{where}: `{name}` has {array.size} elements, must have {size} and zeros")
    return array.ravel()[:size].reshape(shape)


def _joined(
    path: Path, files: list[str], experts: list[int], names: list[dict[str, str]] | None, judge: _Judge
) -> dict[str, dict[str, Array]]:
    """By kind and structured name: the runs of all shards, or those of the ranks that have these experts."""
    found = _nothing()
    for shard, suffix in enumerate(files):
        file = _path(path, "optimizer", suffix, "pdopt")
        if not file.exists():
            raise Wrong(f"{file.name} is missing")
        known = (
            names[shard]
            if names
            else load(_path(path, "model_state", suffix, "pdparams"))["StructuredToParameterName@@"]
        )
        called: dict[str, list[str]] = {}
        for structured, static in known.items():
            called.setdefault(static, []).append(structured)
        for static, kind, array in _entries(file):
            if static not in called:
                raise Wrong(f"{file.name}: nothing is called {static}")
            for name in called.get(static, []):
                form = judge.table.get(name)
                if form and judge.model.tensors[leaves(form)[0]].expert >= 0 and shard not in experts:
                    continue
                before = found[kind].get(name)
                if kind not in POWERS:
                    found[kind][name] = array if before is None else np.concatenate([before.ravel(), array.ravel()])
                elif before is not None and before.tobytes() != array.tobytes():
                    raise Wrong(f"{file.name}: {kind} of {name} differs between shards")
                else:
                    found[kind][name] = array
    return found


def _entries(file: Path) -> Iterator[tuple[str, str, Array]]:
    """(parameter, kind, array) of a .pdopt."""
    state = load(file)
    for static, value in state.pop("master_weights", {}).items():
        yield static, "master", plain(value)
    state.pop("LR_Scheduler", None)
    for key, value in state.items():
        kind = next((k for k in (*MOMENTS, *POWERS) if key.endswith("_" + k)), None)
        if kind is None:
            raise Wrong(f"{file.name}: {key}")
        yield key.removesuffix("_" + kind).removesuffix(_MASTER), kind, plain(value)
