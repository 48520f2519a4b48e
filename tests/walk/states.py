"""What Paddle's files hold of an optimizer: read whole, and compared with moments that say where they belong.

A moment lies as its weight does: it is made, turned, fused and cut like it. So a kind of state is a model of its own,
with the same table of names, whose elements are the states.
"""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

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
    kinds: dict[str, Model] = {k: replace(model, tensors={}) for k in KINDS}
    for ident, (name, tensor) in enumerate(model.tensors.items()):
        tied = name == model.output and model.tied
        if tensor.derived or "e_score_correction" in name or tensor.layer in frozen or tied:
            continue
        for at, kind in enumerate(MOMENTS):
            raw = made(700 * (at + 1) + ident, "F32", tensor.raw.bits.shape)
            kinds[kind].tensors[name] = replace(tensor, raw=raw)
        kinds["master"].tensors[name] = replace(tensor, raw=_master(tensor.raw, ident))
    return Optimizer(kinds, r.choice([1, 2, 7, 40, 137]), r.choice([(0.9, 0.999), (0.9, 0.95)]))


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


def add_unified(path: Path, optimizer: Optimizer, table: Table) -> None:
    """Beside a model that lies there: the optimizer and the masters, in two files and their indices."""
    states: dict[str, Raw] = {}
    for kind in MOMENTS:
        for name, raw in whole(optimizer.kinds[kind], optimizer.table(kind, table)).items():
            states[f"{name}/{kind}"] = raw
    for name in optimizer.table(MOMENTS[0], table):
        for kind in POWERS:
            states[f"{name}/{kind}"] = Raw("F32", optimizer.power(kind).view("<u4"))
    _file(path, "optimizer", states, {"master_weights": True})
    _file(path, "master_weights", whole(optimizer.kinds["master"], optimizer.table("master", table)), {})


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
                    if low:
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
    if format_ == "unified":
        _unified(path, optimizer, model, table)
    elif format_ == "flex":
        _flex(path, optimizer, model, table, grid)
    else:
        _hybrid(path, optimizer, model, table, grid)


def _tied(model: Model, name: str) -> bool:
    """Whether it is a second name of the embedding, under which its state may lie, or lie once more."""
    return model.tied and name in (model.output, "lm_head.weight")


def _compare(where: str, found: dict[str, Array], wanted: Mapping[str, Raw], model: Model, optional: set[str]) -> None:
    """Arrays of float32. A tied weight's may lie under either name, or both."""
    found = dict(found)
    embedding = next((n for n in wanted if n.endswith("embed_tokens.weight") and ".layers." not in n), "")
    for name in [n for n in found if _tied(model, n)]:
        array = found.pop(name)
        found.setdefault(embedding, array)
        if array.tobytes() != found[embedding].tobytes():
            raise Wrong(f"{where}: the state of the tied head is not that of the embedding")
    missing = wanted.keys() - found.keys() - optional
    extra = found.keys() - wanted.keys()
    if missing or extra:
        raise Wrong(f"{where}: missing {sorted(missing)[:4]}, unexpected {sorted(extra)[:4]}")
    for name, array in found.items():
        want = wanted[name].bits.view("<f4")
        if array.dtype != np.float32 or array.shape != want.shape:
            raise Wrong(f"{where}: `{name}` is {array.dtype} {array.shape}, must be F32 {want.shape}")
        if array.tobytes() != np.ascontiguousarray(want).tobytes():
            different = np.argwhere(np.ascontiguousarray(array).view("<u4") != want.view("<u4"))
            raise Wrong(f"{where}: `{name}` has other bits in {len(different)} of {want.size} elements")


def _powers(where: str, optimizer: Optimizer, kind: str, names: Mapping[str, Raw], found: dict[str, Array]) -> None:
    for name, array in found.items():
        want = optimizer.power(kind)
        if array.dtype != np.float32 or array.tobytes() != want.tobytes() or array.shape != (1,):
            raise Wrong(f"{where}: {kind} of `{name}` is {array} {array.shape}, must be {want}")
    missing = {n for n in names if n not in found}
    if missing:
        raise Wrong(f"{where}: no {kind} of {sorted(missing)[:4]}")


def _of_kind(
    where: str,
    optimizer: Optimizer,
    model: Model,
    table: Table,
    kind: str,
    found: dict[str, Array],
    wanted: Mapping[str, Raw],
) -> None:
    if kind == "master":
        extra = {n: a for n, a in found.items() if n in table and n not in wanted and not _tied(model, n)}
        for name, array in extra.items():  # of what has no state: the weight itself, as Paddle's loaders want it
            found.pop(name)
            exact = cast(whole(model, {name: table[name]})[name], "F32")
            if array.size == exact.bits.size and array.tobytes() != exact.bits.tobytes():
                raise Wrong(f"{where}: the master of `{name}` is not the weight")
        optional = {n for n in wanted if not _low(model, table, n)}
    else:
        optional = set()
    _compare(f"{where}, {kind}", found, wanted, model, optional)


def _unified(path: Path, optimizer: Optimizer, model: Model, table: Table) -> None:
    found: dict[str, dict[str, Array]] = {k: {} for k in (*KINDS, *POWERS)}
    for file in sorted(path.glob("optimizer-*.safetensors")):
        for name, raw in read(file).items():
            parameter, _, kind = name.rpartition("/")
            if kind not in found or parameter in found[kind]:
                raise Wrong(f"{file.name}: `{name}`")
            found[kind][parameter] = raw.bits.view("<f4")
    for file in sorted(path.glob("master_weights-*.safetensors")):
        for name, raw in read(file).items():
            found["master"][name] = raw.bits.view("<f4")
    _all(
        found,
        "unified",
        optimizer,
        model,
        table,
        lambda kind: whole(optimizer.kinds[kind], optimizer.table(kind, table)),
    )


def _all(found, where, optimizer, model, table, wanted_of) -> None:  # type: ignore[no-untyped-def]
    for kind in KINDS:
        wanted = wanted_of(kind)
        if kind == MOMENTS[0]:
            names = dict(wanted)
            for power in POWERS:
                have = found[power]
                for n in [n for n in have if _tied(model, n)]:
                    embedding = next(
                        (x for x in wanted if x.endswith("embed_tokens.weight") and ".layers." not in x), ""
                    )
                    if embedding not in have:
                        names.pop(embedding, None)
                _powers(where, optimizer, power, names, have)
        _of_kind(where, optimizer, model, table, kind, found[kind], wanted)


def _flex(path: Path, optimizer: Optimizer, model: Model, table: Table, grid: Grid) -> None:
    found: dict[str, dict[str, Array]] = {k: {} for k in (*KINDS, *POWERS)}
    for key, array in flex_folder(path / "optimizer_state").items():
        name, _, kind = key.rpartition(".")
        if kind not in found:
            raise Wrong(f"flex: {key}")
        found[kind][name] = array
    if (path / "master_weight/0.metadata").exists():
        for key, array in flex_folder(path / "master_weight").items():
            found["master"][key.removesuffix(".w_0")] = array

    def wanted(kind: str) -> dict[str, Raw]:
        return flex_wanted(optimizer.kinds[kind], optimizer.table(kind, table), grid)

    _all(found, "flex", optimizer, model, table, wanted)


def _hybrid(path: Path, optimizer: Optimizer, model: Model, table: Table, grid: Grid) -> None:
    meta = path / "model_meta.json"
    said = json.loads(meta.read_text(encoding="utf-8")) if meta.exists() else {}
    degrees = said.get("parallel_config", {})
    shards, across = degrees.get("sharding_degree", 1), max(1, grid.ep // grid.tp)
    for stage in range(grid.pp):
        for tp in range(grid.tp):
            for first in range(across):
                ep = first * grid.tp + tp if grid.ep > 1 else 0
                seat = Seat(stage, tp, ep, 0 if grid.ep > 1 or grid.etp == 1 else tp)
                key = f"tp{tp:02d}_pp{stage:02d}" + (f"_ep{ep:02d}" if grid.ep > 1 else "")
                static = said["sharding_metas"][key]["structure_name_mapping"] if said else None
                where = f"hybrid {key} of {grid}, {shards} shards"
                files = [suffix_of(grid, seat, s, shards) for s in range(shards)]
                experts = [s for s in range(shards) if s % across == first]
                found = _joined(path, files, experts, static, model, table)

                def wanted(kind: str, seat: Seat = seat) -> dict[str, Raw]:
                    shadow = optimizer.kinds[kind]
                    return held_at(shadow, optimizer.table(kind, table), grid, seat, HABIT)

                shapes = held_at(model, table, grid, seat, HABIT)
                for kind in KINDS:
                    for name, array in found[kind].items():
                        if name in shapes:
                            found[kind][name] = _whole(where, name, array, shapes[name].bits.shape)
                _all(found, where, optimizer, model, table, wanted)


def _whole(where: str, name: str, array: Array, shape: tuple[int, ...]) -> Array:
    size = int(np.prod(shape))
    if array.size < size or array.ravel()[size:].any():
        raise Wrong(f"{where}: `{name}` has {array.size} elements, must have {size} and zeros")
    return array.ravel()[:size].reshape(shape)


def _joined(
    path: Path, files: list[str], experts: list[int], static: Mapping[str, str] | None, model: Model, table: Table
) -> dict[str, dict[str, Array]]:
    """By kind and structured name: the runs of all shards, or those of the ranks that have these experts."""
    found: dict[str, dict[str, Array]] = {k: {} for k in (*KINDS, *POWERS)}
    for shard, suffix in enumerate(files):
        file = _path(path, "optimizer", suffix, "pdopt")
        if not file.exists():
            raise Wrong(f"{file.name} is missing")
        state = load(file)
        names = static or load(_path(path, "model_state", suffix, "pdparams"))["StructuredToParameterName@@"]
        by_static: dict[str, list[str]] = {}
        for structured, name in names.items():
            by_static.setdefault(name, []).append(structured)
        masters = state.pop("master_weights", {})
        state.pop("LR_Scheduler", None)
        entries = [(n, "master", plain(v)) for n, v in masters.items()]
        for key, value in state.items():
            kind = next((k for k in (*MOMENTS, *POWERS) if key.endswith("_" + k)), None)
            if kind is None:
                raise Wrong(f"{file.name}: {key}")
            entries.append((key.removesuffix("_" + kind).removesuffix(_MASTER), kind, plain(value)))
        for name, kind, array in entries:
            for structured in by_static.get(name, []):
                expert = structured in table and model.tensors[leaves(table[structured])[0]].expert >= 0
                if expert and shard not in experts:
                    continue
                have = found[kind].get(structured)
                if kind in POWERS:
                    if have is not None and have.tobytes() != array.tobytes():
                        raise Wrong(f"{file.name}: {kind} of {structured} differs between shards")
                    found[kind][structured] = array
                else:
                    found[kind][structured] = array if have is None else np.concatenate([have.ravel(), array.ravel()])
            if name not in by_static and shard in experts:
                raise Wrong(f"{file.name}: nothing is called {name}")
    return found
