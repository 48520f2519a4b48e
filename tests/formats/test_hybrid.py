"""Reading Paddle's hybrid-parallel checkpoints: every tensor bit for bit, and every refusal.

``Save`` writes tiny checkpoints as Paddle's trainers lay them out, from one state whatever the parallel sizes, with
numpy and pickle only; ``logical`` puts what was read together again with the axes that ``Save`` cut. One checkpoint
that a trainer wrote is held against the digests of a run in one process.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.containers.paddle_pickle import PaddleFile, read_paddle
from ckpttool.core.catalog import SHARDED, Key, StoredTensor
from ckpttool.core.mesh import Mesh
from ckpttool.errors import CkptError, ConflictError, CorruptError, IncompleteError, UnsupportedError
from ckpttool.formats.base import ReadOptions, StoredCheckpoint
from ckpttool.formats.paddle.hybrid import Hybrid, ZeroCost
from ckpttool.formats.paddle.hybrid_names import (
    HybridNames,
    Suffix,
    cell_key,
    file_name,
    parse_file_name,
    parse_meta,
    parse_suffix,
    suffix,
)
from ckpttool.storage.listing import list_source
from ckpttool.storage.place import local_path
from tests.helpers.tensorfile import Raw
from tests.helpers.tensorfile import write as write_file

Bits = np.ndarray[Any, np.dtype[Any]]

FIXTURES = Path(__file__).parents[2] / "fixtures" / "paddle_zcc"
STATES = ("moment1_0", "moment2_0", "beta1_pow_acc_0", "beta2_pow_acc_0")
STRUCTURED = "StructuredToParameterName@@"
WIDTH: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<u4"),
    "BF16": np.dtype("<u2"),
    "F8_E4M3": np.dtype("u1"),
    "F8_E5M2": np.dtype("u1"),
}
PHI = {"F32": 10, "BF16": 16}


# -- a trainer's files


class Tensor:
    """Pickled as Paddle pickles a tensor: a call of ``tuple`` with its name and an array."""

    def __init__(self, pair: tuple[str, Bits]) -> None:
        self.pair = pair

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (self.pair,)


def dump(content: Any) -> bytes:
    def tensors(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: tensors(v) for k, v in value.items()}
        return Tensor(value) if isinstance(value, tuple) else value

    return pickle.dumps(tensors(content), protocol=4)


def rounded(bits: Bits) -> Bits:
    """float32 to bfloat16, ties to even."""
    return ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


@cache
def state_of(name: str, kind: str, shape: tuple[int, ...]) -> Bits:
    seed = int.from_bytes(hashlib.sha256(f"{name}/{kind}".encode()).digest()[:4], "little")
    made = np.random.default_rng(seed).standard_normal(shape).astype("<f4").view("<u4")
    made.flags.writeable = False  # the ranks share it
    return made


@dataclass
class Param:
    name: str
    shape: tuple[int, ...]
    axis: int | None = None
    """Tensor parallelism cuts this one."""
    dtype: str = "BF16"
    expert: int | None = None
    """Global id."""


def model(layers: int, experts: int, expert_axis: int | None = None) -> list[list[Param]]:
    """Parameters before, of each of, and after the layers.

    With two shards, the norm of layer 1 lies across their border: the first has all of it, the second its padding.
    """
    out = [[Param("model.embed_tokens.weight", (12, 6), 0)]]
    for i in range(layers):
        at = f"model.layers.{i}"
        layer = [
            Param(f"{at}.input_layernorm.weight", (128,)),
            Param(f"{at}.self_attn.q_proj.weight", (6, 24), 1),
            Param(f"{at}.self_attn.o_proj.weight", (24, 6), 0),
        ]
        for j in range(experts):
            layer.append(Param(f"{at}.mlp.experts.{j}.down_proj.weight", (6, 7), expert_axis, expert=j))
        if experts:
            layer.append(Param(f"{at}.mlp.gate.weight", (6, experts), dtype="F32"))
        out.append(layer)
    return [*out, [Param("model.norm.weight", (128,)), Param("lm_head.weight", (12, 6), 0)]]


@dataclass
class Save:
    """The sizes of one run; ``write`` makes its files."""

    mp: int = 1
    pp: int = 1
    shards: int = 1
    ep: int = 1
    moe: int = 1
    version: str = "v2"
    meta: bool = True
    local_ids: bool = True
    experts: int = 0
    ema: bool = False
    expert_axis: int | None = None
    frozen: tuple[str, ...] = ()
    truth: dict[Key, Bits] = field(default_factory=dict)
    axes: dict[str, int | None] = field(default_factory=dict)

    @property
    def ds(self) -> int:
        return max(1, self.ep // self.mp)

    def stage(self, pp: int) -> list[Param]:
        parts = model(2 * self.pp, self.experts, self.expert_axis)
        own = parts[1 + 2 * pp : 3 + 2 * pp]
        own = [*(parts[:1] if pp == 0 else []), *own, *(parts[-1:] if pp == self.pp - 1 else [])]
        return [p for part in own for p in part]

    def cell(self, pp: int, ep: int) -> list[tuple[Param, str, str]]:
        """(parameter, its name in the files, its tname) of one rank."""
        each = self.experts // max(self.ep, self.moe)
        out: list[tuple[Param, str, str]] = []
        for p in self.stage(pp):
            name = p.name
            if p.expert is not None:
                if p.expert // each != ep:
                    continue
                if self.local_ids:
                    name = name.replace(f"experts.{p.expert}.", f"experts.{p.expert - ep * each}.")
            out.append((p, name, f"linear_{len(out)}.w_0"))
        return out

    def part(self, p: Param, bits: Bits, tp: int) -> Bits:
        if p.axis is None or self.mp == 1:
            return bits
        return np.ascontiguousarray(np.split(bits, self.mp, p.axis)[tp])

    def held(self, p: Param, bits: Bits, order: list[tuple[int, int, int]], index: int, rank: int) -> Bits | None:
        """What a rank of a sharding group keeps of a parameter; ``order``: (numel, padded, first) in a buffer."""
        ranks = self.shards if p.expert is None or self.ep == 1 else self.shards // self.ds
        if ranks == 1:
            return bits
        if self.version == "v1":
            return bits if index % ranks == rank else None
        total = sum(padded for _, padded, _ in order)
        numel, padded, first = order[index]
        a, b = max(first, rank * total // ranks), min(first + padded, (rank + 1) * total // ranks)
        if a >= b:
            return None
        flat = np.zeros(padded, bits.dtype)
        flat[:numel] = bits.ravel()
        return flat[a - first : b - first]

    def write(self, root: Path, change: Callable[[str, dict[str, Any]], None] | None = None) -> Path:
        root.mkdir(parents=True, exist_ok=True)
        for pp in range(self.pp):
            for tp in range(self.mp):
                for shard in range(self.shards):
                    for moe in range(self.moe):
                        ep = shard % self.ds * self.mp + tp if self.ep > 1 else moe
                        self._rank(root, pp, tp, shard, moe, ep, change)
        config = {"model_type": "llama", "vocab_size": 12, "hidden_size": 6, "torch_dtype": "bfloat16"}
        (root / "config.json").write_text(json.dumps(config))
        if self.meta:
            (root / "model_meta.json").write_text(json.dumps(self._meta()))
        return root

    def _rank(self, root: Path, pp: int, tp: int, shard: int, moe: int, ep: int, change: Any) -> None:
        weights: dict[str, Any] = {}
        optimizer: dict[str, Any] = {}
        masters: dict[str, Any] = {}
        averages: dict[str, Any] = {}
        average_masters: dict[str, Any] = {}
        structured: dict[str, str] = {}
        cell = self.cell(pp, ep)
        for p, name, tname in cell:
            self.axes[p.name] = p.axis
            structured[name] = tname
            expert = p.expert is not None
            if moe and not expert:
                continue
            same = [q for q, _, _ in cell if (q.expert is not None) == expert and q.dtype == p.dtype]
            group = self.shards // self.ds if expert and self.ep > 1 else self.shards
            order, first = [], 0
            for q in same:
                numel = q_size = int(np.prod(self.part(q, np.zeros(q.shape, "u1"), tp).shape))
                unit = (128 if p.dtype == "BF16" else 64) * group
                padded = -(-q_size // unit) * unit
                order.append((numel, padded, first))
                first += padded
            index, rank = [q.name for q in same].index(p.name), shard // self.ds if expert and self.ep > 1 else shard

            def slot(kind: str, p: Param = p, order: Any = order, index: int = index, rank: int = rank) -> Bits | None:
                whole = state_of(p.name, kind, p.shape)
                return self.held(p, self.part(p, whole, tp), order, index, rank)

            value = state_of(p.name, "master", p.shape)
            if p.dtype == "F32":
                self.truth[Key(p.name)] = value
                if shard == index % self.shards or not self.meta:
                    weights[name] = self.part(p, value, tp).view("<f4")
            else:
                self.truth[Key(p.name)] = rounded(value)
                if not self.meta and (shard == 0 or self.ep > 1):
                    weights[name] = self.part(p, rounded(value), tp)
                if p.name in self.frozen:
                    continue
                self.truth[Key(p.name, "master_weights")] = value
                if (held := slot("master")) is not None:
                    masters[tname] = (tname + "_fp32_master_0", held.view("<f4"))
            stem = tname + ("_fp32_master_0" if p.dtype == "BF16" else "")
            for state in STATES:
                key = Key(p.name, "optimizer", state)
                if "pow" in state:
                    self.truth[key] = np.array([0.81], "<f4").view("<u4")
                    if slot("moment1_0") is not None:
                        optimizer[f"{stem}_{state}"] = (f"{stem}_{state}", self.truth[key].view("<f4"))
                    continue
                self.truth[key] = state_of(p.name, state, p.shape)
                if (held := slot(state)) is not None:
                    optimizer[f"{stem}_{state}"] = (f"{stem}_{state}", held.view("<f4"))
            if self.ema:
                self.truth[Key(p.name, "ema")] = state_of(p.name, "ema", p.shape)
                if p.dtype == "F32":
                    if shard == index % self.shards:
                        averages[name] = (tname, self.part(p, self.truth[Key(p.name, "ema")], tp).view("<f4"))
                elif (held := slot("ema")) is not None:
                    average_masters[tname] = (tname + "_fp32_master_0", held.view("<f4"))
        if not self.meta:
            weights[STRUCTURED] = structured
        else:
            weights[STRUCTURED] = {n: structured[n] for n in weights}
        optimizer |= {"master_weights": masters, "LR_Scheduler": {"last_epoch": 2, "last_lr": 0.5}}
        ranks = {"tp": (tp, self.mp), "pp": (pp, self.pp), "shard": (shard, self.shards), "moe": (moe, self.moe)}
        files = {"optimizer": optimizer}
        if self.ema:
            files["ema"] = {**averages, "master_weights": average_masters}
        if self.meta or shard == 0 or self.ep > 1:
            files["model_state"] = weights
        for kind, content in files.items():
            own = dict(ranks)
            if kind == "model_state" and not self.meta:
                own |= {"shard": (0, 1), "ep": (ep, self.ep)}
            text = ".".join(t for t in (kind, suffix(**own)) if t)
            if change:
                change(text, content)
            ext = "pdparams" if kind == "model_state" else "pdopt"
            (root / f"{text}.{ext}").write_bytes(dump(content))

    def _meta(self) -> dict[str, Any]:
        metas: dict[str, Any] = {}
        for pp in range(self.pp):
            for tp in range(self.mp):
                for d in range(self.ds):
                    ep = d * self.mp + tp if self.ep > 1 else 0
                    cells = [self.cell(pp, m) for m in range(self.moe)] if self.moe > 1 else [self.cell(pp, ep)]
                    metas[cell_key(tp, pp, ep if self.ep > 1 else None)] = {
                        "param2rank": {},
                        "structure_name_mapping": {n: t for cell in cells for _, n, t in cell},
                        "param_meta": {
                            n: [
                                list(self.part(p, np.zeros(p.shape, "u1"), tp).shape),
                                PHI[p.dtype],
                                p.axis is not None and self.mp > 1,
                                p.expert is not None,
                            ]
                            for cell in cells
                            for p, n, _ in cell
                        },
                        "sharding_strategy": f"Sharding{self.version.upper()}",
                        "enable_overlap": False,
                    }
        sizes = {"pp_degree": self.pp, "mp_degree": self.mp, "sharding_degree": self.shards, "ep_degree": self.ep}
        moe = self.shards // self.ds if self.ep > 1 else 0
        return {"parallel_config": {**sizes, "moe_sharding_degree": moe}, "sharding_metas": metas}


# -- what was read, put together


def bits_of(ck: StoredCheckpoint, t: StoredTensor) -> Bits:
    if t.file == SHARDED:
        flat = []
        at = 0
        for shard in ck.shards[t.offset]:
            assert shard.start == at
            assert shard.stored.key == t.key
            flat.append(bits_of(ck, shard.stored))
            at += flat[-1].size
        whole = np.concatenate(flat)
        size = int(np.prod(t.shape))
        assert not whole[size:].any(), "padding is zero"
        return whole[:size].reshape(t.shape)
    width = WIDTH[t.dtype]
    run = np.fromfile(local_path(ck.files[t.file].place), width, int(np.prod(t.shape)), offset=t.offset)
    if t.strides is None:
        return run.reshape(t.shape)
    return np.lib.stride_tricks.as_strided(run, t.shape, [s * width.itemsize for s in t.strides])


def logical(ck: StoredCheckpoint, axis_of: Callable[[str], int | None]) -> dict[Key, Bits]:
    """Every logical tensor; copies must be equal."""
    coords = list(ck.mesh.all_coords())
    parts: dict[Key, dict[int, Bits]] = {}
    for t in ck.tensors:
        bits = bits_of(ck, t)
        if t.key in ck.dtypes:
            assert ck.dtypes[t.key] == "BF16"
            bits = rounded(bits)
        axis = None if bits.shape == (1,) else axis_of(t.name)
        tp = coords[t.rank].tp if axis is not None else 0
        assert tp == coords[t.rank].etp or axis is None or "experts" not in t.name
        known = parts.setdefault(t.key, {}).setdefault(tp, bits)
        assert np.array_equal(known, bits), f"{t.key}: copies differ"
    out = {}
    for key, by_tp in parts.items():
        axis = axis_of(key.name)
        cut = [by_tp[i] for i in sorted(by_tp)]
        out[key] = cut[0] if axis is None or len(cut) == 1 else np.concatenate(cut, axis)
    return out


def read(root: Path, options: ReadOptions | None = None) -> StoredCheckpoint:
    listing = list_source(root)
    formats = [f for f in (Hybrid(), ZeroCost()) if f.detect(listing)]
    assert len(formats) == 1
    return formats[0].read(listing, options or ReadOptions())


def assert_same(got: Mapping[Key, Bits], want: Mapping[Key, Bits]) -> None:
    assert set(got) == set(want)
    for key, bits in want.items():
        assert got[key].shape == bits.shape, str(key)
        assert np.array_equal(got[key], bits), str(key)


SAVES = {
    "single": Save(meta=False),
    "tp2": Save(mp=2, meta=False),
    "tp2 pp2": Save(mp=2, pp=2, meta=False),
    "classic, optimizer shared out": Save(mp=2, shards=2, meta=False),
    "classic, v1": Save(shards=2, version="v1", meta=False),
    "v2": Save(shards=2),
    "v1": Save(shards=3, version="v1"),
    "v2 over many": Save(shards=12),
    "tp2 v2": Save(mp=2, shards=2),
    "pp2 v2": Save(pp=2, shards=2),
    "tp2 pp3 v1": Save(mp=2, pp=3, shards=2, version="v1"),
    "ep2 local": Save(shards=2, ep=2, experts=4),
    "ep2 global, moe sharding 2": Save(shards=4, ep=2, experts=4, local_ids=False),
    "ep4 tp2 pp2": Save(mp=2, pp=2, shards=4, ep=4, experts=8),
    "dp-moe": Save(shards=2, moe=2, experts=4, local_ids=False),
    "dp-moe local": Save(shards=2, moe=2, experts=4),
    "dp-moe tp2": Save(mp=2, shards=2, moe=2, experts=4, local_ids=False),
    "dp-moe tp2, cut experts": Save(mp=2, shards=2, moe=2, experts=4, expert_axis=0),
    "classic dp-moe": Save(moe=2, experts=4, meta=False),
    "classic ep2": Save(shards=2, ep=2, experts=4, meta=False),
    "classic ep4 tp2": Save(mp=2, shards=2, ep=4, experts=4, meta=False, local_ids=False),
    "ema": Save(shards=2, ema=True),
    "ema ep2 tp2": Save(mp=2, shards=2, ep=2, experts=4, ema=True),
    "ema dp-moe": Save(shards=2, moe=2, experts=4, local_ids=False, ema=True),
}


@pytest.mark.product(one_in=2)
@pytest.mark.parametrize("name", SAVES)
def test_every_tensor_is_read_bit_for_bit(name: str, tmp_path: Path) -> None:
    save = SAVES[name]
    ck = read(save.write(tmp_path))
    assert ck.format == ("zcc" if save.ema else "hybrid")
    assert (ck.mesh.tp, ck.mesh.pp, ck.mesh.ep) == (save.mp, save.pp, max(save.ep, save.moe))
    assert ck.sharding == save.shards
    assert_same(logical(ck, save.axes.__getitem__), save.truth)


def test_one_rank_of_two_is_not_a_model(tmp_path: Path) -> None:
    """Only rank 0 is there: its name and config.json say that there are more."""
    half = tmp_path / "half"
    shutil.copytree(FIXTURES / "nlp_tp2", half)
    (half / "model_meta.json").unlink(missing_ok=True)
    for file in half.glob("*.tp01.*"):
        file.unlink()
    with pytest.raises(IncompleteError, match=r"files are missing: model_state\.tp01\.pdparams"):
        Hybrid().read(list_source(half), ReadOptions())


def test_a_trainer_s_checkpoint_is_that_of_a_run_in_one_process() -> None:
    ck = read(FIXTURES / "ep2_tp2_sharding2_ema")
    assert ck.format == "zcc"
    assert ck.mesh == Mesh(tp=2, ep=2, etp=1)
    assert ck.notes == ["model weights are master_weights rounded to BF16"]

    def axis(name: str) -> int | None:
        if "experts" in name or "norm" in name or "mlp.gate." in name:
            return None
        return 0 if any(w in name for w in ("embed", "lm_head", "o_proj", "down_proj")) else 1

    got: dict[str, dict[str, Any]] = {}
    for key, bits in logical(ck, axis).items():
        digest = hashlib.sha256(bits.tobytes()).hexdigest()[:16]
        dtype = "BF16" if bits.itemsize == 2 else "F32"
        where = "/".join(p for p in (key.component, key.state) if p)
        got.setdefault(key.name, {})[where] = [dtype, list(bits.shape), digest]
    assert got == json.loads((FIXTURES / "expected.json").read_text())


# -- what is said beside the tensors


def test_what_only_the_writer_needs_is_kept(tmp_path: Path) -> None:
    save = Save(mp=2, shards=2, ep=2, experts=4)
    native = read(save.write(tmp_path)).native
    assert isinstance(native, HybridNames)
    assert (native.mp, native.sharding, native.ep, native.moe_sharding) == (2, 2, 2, 2)
    assert (native.strategy, native.has_meta, native.local_experts) == ("ShardingV2", True, True)
    assert native.schedule == {"last_epoch": 2, "last_lr": 0.5}
    assert list(native.cells) == [(0, 0, 0), (0, 1, 1)]
    assert list(native.tables) == [(0, 0), (0, 1)]
    experts = [n for n in native.tables[0, 1] if "experts" in n]
    assert experts == [f"model.layers.{i}.mlp.experts.{j}.down_proj.weight" for i in (0, 1) for j in (2, 3)]
    params = native.cells[0, 1, 1].params
    assert params["model.embed_tokens.weight"].shape == (6, 6)
    assert params[experts[0]].no_sync
    order = [n for _, n, _ in save.cell(0, 0)]
    assert list(native.cells[0, 0, 0].names) == order


def test_tensors_come_in_the_order_of_the_model(tmp_path: Path) -> None:
    ck = read(Save(shards=2, version="v1").write(tmp_path))
    names = list(dict.fromkeys(t.name for t in ck.tensors if t.component == "model"))
    assert names == [p.name for p in Save().stage(0)]
    assert list(dict.fromkeys(t.component for t in ck.tensors)) == ["model", "master_weights", "optimizer"]


def test_the_names_of_tensors_that_are_not_cut_follow_the_meta(tmp_path: Path) -> None:
    ck = read(Save(mp=2, shards=2).write(tmp_path))
    assert set(ck.whole) == {r"re:\Amodel\.layers\.\d+\.input_layernorm\.weight\Z", r"re:\Amodel\.norm\.weight\Z"}


def test_experts_are_not_cut_where_expert_ranks_hold_them(tmp_path: Path) -> None:
    experts = r"re:\Amodel\.layers\.\d+\.mlp\.experts\.\d+\.down_proj\.weight\Z"
    for meta in (True, False):
        save = Save(mp=2, shards=2, ep=2, experts=4, meta=meta)
        assert experts in read(save.write(tmp_path / f"ep {meta}")).whole
    cut = Save(mp=2, shards=2, moe=2, experts=4, expert_axis=0).write(tmp_path / "dp")
    assert experts not in read(cut).whole
    assert read(cut).mesh.etp == 2


def test_without_tensor_parallelism_nothing_is_cut(tmp_path: Path) -> None:
    for meta in (True, False):
        ck = read(Save(pp=2, shards=2, meta=meta).write(tmp_path / f"pp {meta}"))
        assert all(any(re.search(p[3:], t.name) for p in ck.whole) for t in ck.tensors)
    assert read(Save(shards=2).write(tmp_path / "one")).whole == ()


@pytest.mark.parametrize("local", [False, True])
def test_how_experts_are_numbered_is_kept(local: bool, tmp_path: Path) -> None:
    for i, save in enumerate((Save(shards=2, ep=2, experts=4), Save(shards=2, moe=2, experts=4))):
        save.local_ids = local
        assert read(save.write(tmp_path / str(i))).native.local_experts is local


def test_a_name_that_is_cut_in_one_layer_only_is_said_exactly(tmp_path: Path) -> None:
    root = Save(mp=2, shards=2).write(tmp_path)
    edit_meta(root, lambda m: m["param_meta"]["model.layers.1.input_layernorm.weight"].__setitem__(2, True))
    ck = read(root)
    assert r"re:\Amodel\.layers\.0\.input_layernorm\.weight\Z" in ck.whole
    assert not any(r"\d+" in p for p in ck.whole)


def test_only_meta_records_what_is_cut(tmp_path: Path) -> None:
    assert read(Save(mp=2, shards=2).write(tmp_path / "meta")).records_cuts
    assert read(Save(pp=2, meta=False).write(tmp_path / "stages")).records_cuts
    ck = read(Save(mp=2, meta=False).write(tmp_path / "classic"))
    assert (ck.records_cuts, ck.whole) == (False, ())


def test_files_of_the_trainer_are_companions(tmp_path: Path) -> None:
    root = Save(shards=2).write(tmp_path)
    own = ["rng_state_0.pth", "saved_signal_0", "scheduler.pdparams", "trainer_state.bin", "training_args.bin"]
    for name in [*own, "tokenizer.json", "stray.bin", "pytorch_model.bin"]:
        (root / name).write_bytes(b"1")
    assert read(root).companions == (*own[:3], "tokenizer.json", *own[3:])


def test_a_power_that_shards_disagree_on_is_given_twice(tmp_path: Path) -> None:
    def change(name: str, content: dict[str, Any]) -> None:
        for key in content:
            if "beta1_pow" in key and name.endswith("shard01"):
                content[key] = (key, np.array([0.5], "<f4"))

    ck = read(Save(shards=12).write(tmp_path, change))
    key = Key("model.layers.0.self_attn.q_proj.weight", "optimizer", "beta1_pow_acc_0")
    copies = [t for t in ck.tensors if t.key == key]
    assert len(copies) > 1
    assert {t.rank for t in copies} == {0}


def test_uneven_stages_are_a_layout(tmp_path: Path) -> None:
    root = Save(pp=2, shards=2).write(tmp_path)
    (root / "config.json").write_text(json.dumps({"num_hidden_layers": 4}))
    assert read(root).mesh.layout == ()
    meta = json.loads((root / "model_meta.json").read_text())
    moved = meta["sharding_metas"]["tp00_pp01"]
    for part in ("structure_name_mapping", "param_meta"):
        moved[part] = {k: v for k, v in moved[part].items() if "layers.3" not in k}
    (root / "model_meta.json").write_text(json.dumps(meta))
    (root / "config.json").write_text(json.dumps({"num_hidden_layers": 3}))
    for path in root.glob("optimizer.pp01*"):
        content = pickle.loads(path.read_bytes())  # noqa: S301 - written by this test
        kept = moved["structure_name_mapping"].values()
        content["master_weights"] = {k: v for k, v in content["master_weights"].items() if k in kept}
        content = {
            k: v for k, v in content.items() if not k.startswith("linear") or k.split(".w_0")[0] + ".w_0" in kept
        }
        path.write_bytes(dump(content))
    assert read(root).mesh.layout == (2, 1)


def test_tied_weights_are_saved_under_their_first_name(tmp_path: Path) -> None:
    root = Save(shards=2).write(tmp_path)

    def tie(meta: dict[str, Any]) -> None:
        meta["structure_name_mapping"]["tied.weight"] = meta["structure_name_mapping"]["model.embed_tokens.weight"]
        meta["param_meta"]["tied.weight"] = meta["param_meta"]["model.embed_tokens.weight"]

    edit_meta(root, tie)
    assert "tied.weight" not in {t.name for t in read(root).tensors}


def test_float8_weights_are_int8_in_the_files(tmp_path: Path) -> None:
    value = np.arange(128, dtype="i1")

    def change(name: str, content: dict[str, Any]) -> None:
        if name == "model_state.shard00":
            content["model.norm.weight"] = value

    root = Save(shards=2, frozen=("model.norm.weight",)).write(tmp_path, change)
    edit_meta(root, lambda m: m["param_meta"]["model.norm.weight"].__setitem__(1, 18))
    t = next(t for t in read(root).tensors if t.name == "model.norm.weight" and t.component == "model")
    assert t.dtype == "F8_E5M2"


def test_column_major_arrays_have_strides(tmp_path: Path) -> None:
    want: list[Bits] = []

    def change(name: str, content: dict[str, Any]) -> None:
        if name == "model_state":
            want.append(content["lm_head.weight"])
            content["lm_head.weight"] = np.asfortranarray(content["lm_head.weight"])

    ck = read(Save(meta=False).write(tmp_path, change))
    t = next(t for t in ck.tensors if t.key == Key("lm_head.weight"))
    assert t.strides == (1, 12)
    assert np.array_equal(bits_of(ck, t), want[0])


def test_weights_that_save_to_hf_wrote_are_turned_back(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    root = Save(shards=2, frozen=(name,)).write(tmp_path)
    for path in root.glob("model_state*"):
        path.unlink()
    bits = rounded(state_of(name, "master", (6, 24)))
    write_file(root / "model.shard00.safetensors", {name: Raw("BF16", np.ascontiguousarray(bits.T))})
    write_file(root / "model.shard01.safetensors", {})
    (root / "config.json").write_text(json.dumps({"paddleformers_version": "1.2.0"}))
    ck = read(root)
    t = next(t for t in ck.tensors if t.key == Key(name))
    assert np.array_equal(bits_of(ck, t), bits)


def test_pickles_without_paddle_s_own_tuples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pairs(path: Path) -> PaddleFile:
        file = read_paddle(path)
        if path.suffix == ".pdparams":
            return file
        masters = {k: (k, a) for k, a in file.other["master_weights"].items()}
        other = {**file.other, **{k: (k, a) for k, a in file.tensors.items()}, "master_weights": masters}
        return file._replace(tensors={}, other=other)

    save = Save(shards=2)
    root = save.write(tmp_path)
    monkeypatch.setattr("ckpttool.formats.paddle.hybrid.read_paddle", pairs)
    assert_same(logical(read(root), save.axes.__getitem__), save.truth)


def test_tensors_that_paddle_cut_because_of_their_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def halves(path: Path) -> PaddleFile:
        file = read_paddle(path)
        cut = {}
        for key, a in file.tensors.items():
            n = a.nbytes // 2
            size = int(np.prod(a.shape)) // 2
            parts = (a._replace(shape=(size,), nbytes=n), a._replace(shape=(size,), nbytes=n, offset=a.offset + n))
            cut[key] = parts
        whole = {k: a for k, a in file.tensors.items() if len(a.shape) != 2}
        return file._replace(tensors=whole, chunks={k: p for k, p in cut.items() if k not in whole})

    save = Save(shards=3, experts=1)
    root = save.write(tmp_path / "meta")
    monkeypatch.setattr("ckpttool.formats.paddle.hybrid.read_paddle", halves)
    assert_same(logical(read(root), save.axes.__getitem__), save.truth)
    refused(UnsupportedError, "in 2 parts, and nothing says its shape", Save(meta=False).write(tmp_path / "classic"))


def test_a_file_alone_is_read(tmp_path: Path) -> None:
    root = Save(meta=False).write(tmp_path)
    listing = list_source(root / "model_state.pdparams")
    assert Hybrid().detect(listing) == 2
    ck = Hybrid().read(listing, ReadOptions())
    assert {t.component for t in ck.tensors} == {"model"}
    assert ck.companions == ()


def test_hybrid_leaves_averages_alone_and_says_so(tmp_path: Path) -> None:
    root = Save(shards=2, ema=True).write(tmp_path)
    ck = Hybrid().read(list_source(root), ReadOptions())
    assert not any(t.component == "ema" for t in ck.tensors)
    assert any("--from zcc" in n for n in ck.notes)


# -- detection and names


@pytest.mark.parametrize(
    ("names", "hybrid", "zcc"),
    [
        (["model_state.tp00.pdparams"], 2, 0),
        (["model_state.pdparams", "optimizer.pdopt"], 2, 0),
        (["optimizer.tp00_shard01.pdopt"], 2, 0),
        (["optimizer.shard01.pdopt", "ema.shard01.pdopt"], 0, 2),
        (["model-00001-of-00002.safetensors", "optimizer.pdopt"], 1, 0),
        (["model.safetensors", "optimizer.pdopt"], 1, 0),
        (["model.safetensors"], 0, 0),
        (["scheduler.pdparams", "config.json"], 0, 0),
        (["model.shard00.safetensors"], 0, 0),
    ],
)
def test_detection(names: list[str], hybrid: int, zcc: int, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).touch()
    listing = list_source(tmp_path)
    assert (Hybrid().detect(listing), ZeroCost().detect(listing)) == (hybrid, zcc)


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("", Suffix()),
        ("tp01_pp00_shard03_moe00", Suffix(1, 0, 3, 0)),
        ("pp02", Suffix(pp=2)),
        ("tp00_shard123", Suffix(0, shard=123)),
        ("tp01_moe_sharding02", Suffix(1, ep=2)),
    ],
)
def test_suffixes_are_read_as_written(text: str, ranks: Suffix) -> None:
    assert parse_suffix(text) == ranks
    assert str(ranks) == text
    for kind in ("model_state", "optimizer", "ema"):
        assert parse_file_name(file_name(kind, ranks)) == (kind, ranks)


@pytest.mark.parametrize(
    "text", ["tp0", "tp010", "pp00_tp00", "_tp00", "tp00_", "tp00pp00", "dp00", "shard00_", "tp00-0"]
)
def test_other_suffixes_are_not_known(text: str) -> None:
    assert parse_suffix(text) is None
    assert parse_file_name(f"optimizer.{text}.pdopt") == ("optimizer", None)


def test_degrees_above_one_are_in_the_suffix() -> None:
    assert suffix(tp=(1, 2), pp=(0, 1), shard=(10, 16)) == "tp01_shard10"


@pytest.mark.parametrize("nlp", [False, True])
def test_model_meta_is_written_as_it_was_read(nlp: bool) -> None:
    data = json.loads((FIXTURES / "ep2_tp2_sharding2_ema" / "model_meta.json").read_text())
    if nlp:
        data["parallel_config"] = {"pp_degree": 1, "mp_degree": 2, "sharding_degree": 2, "vpp_degree": 1}
        for cell in data["sharding_metas"].values():
            del cell["param_meta_keys"]
            cell["param_meta"] = {k: v[:3] for k, v in cell["param_meta"].items()}
    meta = parse_meta(data, "")
    assert meta.nlp is nlp
    assert meta.to_json() == data


def test_dtype_numbers_of_older_writers(tmp_path: Path) -> None:
    root = Save(shards=2).write(tmp_path)
    edit_meta(root, lambda m: m["param_meta"]["model.norm.weight"].__setitem__(1, 22))
    assert read(root).dtypes[Key("model.norm.weight")] == "BF16"


def test_targets() -> None:
    assert Hybrid().dialect == ZeroCost().dialect == "paddle"
    assert Hybrid().target_mesh(Mesh(tp=2, pp=2, etp=2), {}) == Mesh(tp=2, pp=2, etp=2)
    assert Hybrid().target_mesh(Mesh(tp=2, ep=4, etp=2), {}) == Mesh(tp=2, ep=4, etp=1)
    with pytest.raises(ConflictError, match="ep 3 is not a multiple of tp 2"):
        Hybrid().target_mesh(Mesh(tp=2, ep=3), {})


# -- several directories


def scatter(root: Path, other: Path) -> None:
    other.mkdir()
    for path in root.glob("*shard01*"):
        shutil.move(path, other / path.name)


def test_a_save_over_several_nodes(tmp_path: Path) -> None:
    save = Save(mp=2, shards=2)
    root = save.write(tmp_path / "a")
    scatter(root, tmp_path / "b")
    shutil.copy(root / "model_meta.json", tmp_path / "b")
    ck = read(root, ReadOptions(more=(tmp_path / "b",)))
    assert_same(logical(ck, save.axes.__getitem__), save.truth)


def test_a_file_that_differs_between_directories(tmp_path: Path) -> None:
    root = Save(shards=2).write(tmp_path / "a")
    scatter(root, tmp_path / "b")
    (tmp_path / "b" / "optimizer.shard00.pdopt").write_bytes(b"other")
    with pytest.raises(ConflictError, match=r"optimizer\.shard00\.pdopt is in two directories"):
        read(root, ReadOptions(more=(tmp_path / "b",)))


# -- refusals


def edit_meta(root: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change every cell of model_meta.json."""
    path = root / "model_meta.json"
    meta = json.loads(path.read_text())
    for cell in meta["sharding_metas"].values():
        change(cell)
    path.write_text(json.dumps(meta))


def edit_sizes(root: Path, **sizes: Any) -> None:
    path = root / "model_meta.json"
    meta = json.loads(path.read_text())
    meta["parallel_config"] |= sizes
    path.write_text(json.dumps(meta))


def edit_file(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = pickle.loads(path.read_bytes())  # noqa: S301 - written by this test
    change(content)
    path.write_bytes(dump(content))


def refused(kind: type[CkptError], text: str, root: Path, options: ReadOptions | None = None) -> CkptError:
    with pytest.raises(kind, match=text) as caught:
        read(root, options)
    assert caught.value.where, "an error says where"
    return caught.value


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """tp 2, two shards."""
    return Save(mp=2, shards=2).write(tmp_path)


@pytest.mark.parametrize(
    "name", ["optimizer.tp00_shard01.pdopt", "optimizer.tp01_shard00.pdopt", "model_state.tp01_shard01.pdparams"]
)
def test_a_missing_file_is_named(name: str, saved: Path) -> None:
    (saved / name).unlink()
    error = refused(IncompleteError, name.replace(".", r"\."), saved)
    assert "several nodes" in (error.hint or "")


def test_missing_ranks_are_named_without_a_meta(tmp_path: Path) -> None:
    root = Save(mp=2, pp=2, meta=False).write(tmp_path)
    (root / "optimizer.tp00_pp01.pdopt").unlink()
    refused(IncompleteError, r"1 file is missing: optimizer\.tp00_pp01\.pdopt", root)


def test_the_config_says_how_many_there_were(tmp_path: Path) -> None:
    root = Save(mp=2, meta=False).write(tmp_path)
    (root / "config.json").write_text(json.dumps({"tensor_parallel_degree": 4}))
    refused(IncompleteError, r"4 files are missing: model_state\.tp02\.pdparams", root)


def test_more_files_than_the_meta_says(saved: Path) -> None:
    shutil.copy(saved / "optimizer.tp00_shard01.pdopt", saved / "optimizer.tp00_shard02.pdopt")
    refused(ConflictError, "there are files of shard02, but model_meta.json says sharding 2", saved)


def test_two_checkpoints_in_one_place(saved: Path) -> None:
    shutil.copy(saved / "optimizer.tp00_shard01.pdopt", saved / "optimizer.pdopt")
    refused(ConflictError, "two checkpoints", saved)


def test_ranks_of_an_unknown_kind(saved: Path) -> None:
    (saved / "optimizer.tp00_cp01.pdopt").touch()
    refused(UnsupportedError, "the ranks in the name", saved)


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(IncompleteError, match="there are no model_state"):
        Hybrid().read(list_source(tmp_path), ReadOptions())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (ReadOptions(tp=4), "--tp 4 contradicts"),
        (ReadOptions(pp=2), "--pp 2 contradicts"),
        (ReadOptions(ep=2), "--ep 2 contradicts"),
        (ReadOptions(sharding=4), "shared out over 2 ranks, not 4"),
    ],
)
def test_flags_that_contradict(options: ReadOptions, text: str, saved: Path) -> None:
    refused(ConflictError, text, saved, options)


def test_frozen_parameters_are_named(tmp_path: Path) -> None:
    root = Save(shards=2, frozen=("model.norm.weight",)).write(tmp_path)
    error = refused(IncompleteError, r"1 parameter of model_meta\.json is in no file", root)
    assert "model.norm.weight" in error.where
    assert "freeze" in (error.hint or "")


def test_weights_without_the_optimizer(saved: Path) -> None:
    for path in saved.glob("optimizer*"):
        path.unlink()
    error = refused(IncompleteError, "are in no file", saved)
    assert "optimizer.*.pdopt files are needed" in (error.hint or "")


@pytest.mark.parametrize("key", ["linear_1.w_0_lr_ratio_0", "linear_1.w_0_fp32_master_0_moment1_0.SCALE_VALUE"])
def test_an_unknown_state(key: str, saved: Path) -> None:
    edit_file(saved / "optimizer.tp00_shard00.pdopt", lambda c: c.update({key: (key, np.zeros(1, "<f4"))}))
    refused(UnsupportedError, "is not a state of an optimizer", saved)


def test_a_parameter_that_the_meta_lacks(saved: Path) -> None:
    key = "conv_0.w_0_moment1_0"
    edit_file(saved / "optimizer.tp00_shard00.pdopt", lambda c: c.update({key: (key, np.zeros(1, "<f4"))}))
    refused(ConflictError, r"`conv_0\.w_0`, which is the name of no parameter", saved)


def test_a_weight_that_the_meta_lacks(saved: Path) -> None:
    edit_file(saved / "model_state.tp00_shard00.pdparams", lambda c: c.update({"head.weight": np.zeros(3, "<f4")}))
    refused(ConflictError, r"`head\.weight` is in a file, but model_meta\.json does not list it", saved)


def test_an_optimizer_without_names(tmp_path: Path) -> None:
    root = Save(shards=2).write(tmp_path)
    (root / "model_meta.json").unlink()
    error = refused(IncompleteError, "the save does not record which tensor", root)
    assert "model_meta.json" in (error.hint or "")


def test_slices_without_a_shape(tmp_path: Path) -> None:
    root = Save(shards=2, meta=False).write(tmp_path)
    edit_file(root / "model_state.pdparams", lambda c: c.pop("lm_head.weight"))
    refused(IncompleteError, r"the shape of `lm_head\.weight` is not known", root)


def cut(by: Callable[[Bits], Bits], shard: str) -> Callable[[str, dict[str, Any]], None]:
    """Change what a shard has of the embedding's first moment."""

    def change(name: str, content: dict[str, Any]) -> None:
        key = "linear_0.w_0_fp32_master_0_moment1_0"
        if name.endswith(shard) and key in content:
            content[key] = (key, by(content[key][1]))

    return change


@pytest.mark.parametrize(
    ("by", "kind", "text"),
    [
        (lambda a: a[:50], IncompleteError, r"have 50 of its 72 elements"),
        (lambda a: np.tile(a, 9), ConflictError, r"more than it and its padding"),
        (lambda a: a[:72].reshape(6, 12), ConflictError, r"is \[6, 12\] in a file, not \[12, 6\]"),
    ],
)
def test_slices_of_a_wrong_length(by: Callable[[Bits], Bits], kind: type[CkptError], text: str, tmp_path: Path) -> None:
    error = refused(kind, text, Save(shards=2).write(tmp_path, cut(by, "shard00")))
    assert "model_meta.json" in (error.hint or "")


def test_slices_where_v1_has_whole_tensors(tmp_path: Path) -> None:
    root = Save(shards=2, version="v1").write(tmp_path, cut(np.ravel, "shard00"))
    refused(ConflictError, r"is \[72\] in a file, not \[12, 6\]", root)


def test_a_power_that_is_no_number(saved: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        key = next(k for k in content if k.endswith("beta1_pow_acc_0"))
        content[key] = (key, np.zeros(2, "<f4"))

    edit_file(saved / "optimizer.tp00_shard00.pdopt", change)
    refused(ConflictError, r"beta1_pow_acc_0` is \[2\] in a file, not \[1\]", saved)


def test_a_weight_of_another_dtype(saved: Path) -> None:
    name = "model.norm.weight"
    edit_file(saved / "model_state.tp00_shard00.pdparams", lambda c: c.update({name: np.zeros(128, "<f4")}))
    refused(ConflictError, r"`model\.norm\.weight` is F32 in a file, and BF16 by model_meta\.json", saved)


def test_a_weight_of_another_dtype_in_safetensors(saved: Path) -> None:
    for path in saved.glob("model_state*"):
        path.unlink()
    for tp in (0, 1):
        tensors = {"model.norm.weight": Raw("F32", np.zeros(128, "<u4"))}
        write_file(saved / f"model.tp0{tp}_shard00.safetensors", tensors)
        write_file(saved / f"model.tp0{tp}_shard01.safetensors", {})
    refused(ConflictError, r"`model\.norm\.weight` is F32 in a file, and BF16 by model_meta\.json", saved)


def test_master_weights_that_are_no_dict(saved: Path) -> None:
    edit_file(saved / "optimizer.tp00_shard00.pdopt", lambda c: c.update({"master_weights": {"linear_0.w_0": 3}}))
    refused(CorruptError, "master_weights: `linear_0.w_0` is not a tensor", saved)
    edit_file(saved / "optimizer.tp00_shard00.pdopt", lambda c: c.update({"master_weights": 3}))
    refused(CorruptError, "master_weights is not a dict of tensors", saved)


def test_a_truncated_file(saved: Path) -> None:
    path = saved / "optimizer.tp01_shard01.pdopt"
    path.write_bytes(path.read_bytes()[:-40])
    assert str(path) in refused(CkptError, "cut|end|truncated|short", saved).where[0]


def test_tensors_in_unknown_places(saved: Path) -> None:
    edit_file(saved / "optimizer.tp00_shard00.pdopt", lambda c: c.update({"muon": {"a": [np.zeros(2, "<f4")]}}))
    refused(UnsupportedError, "there are tensors inside `muon`", saved)


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"mp_degree": 0}, r"parallel_config\.mp_degree is 0"),
        ({"pp_degree": "2"}, r"parallel_config\.pp_degree is '2'"),
        ({"sharding_degree": None}, r"parallel_config\.sharding_degree is None"),
        ({"ep_degree": -1}, r"parallel_config\.ep_degree is -1"),
    ],
)
def test_sizes_that_are_none(sizes: dict[str, Any], text: str, saved: Path) -> None:
    edit_sizes(saved, **sizes)
    refused(CorruptError, text, saved)


@pytest.mark.parametrize("text", ["[]", "{", "{}", '{"parallel_config": {}, "sharding_metas": []}'])
def test_a_meta_that_is_none(text: str, saved: Path) -> None:
    (saved / "model_meta.json").write_text(text)
    refused(CorruptError, r"model_meta\.json", saved)


@pytest.mark.parametrize(
    ("cell", "kind", "text"),
    [
        ({"structure_name_mapping": None}, CorruptError, "has no structure_name_mapping"),
        ({"structure_name_mapping": {"a": 1}}, CorruptError, "holds something that is not a name"),
        ({"param_meta": {"a": [[1], 10]}}, CorruptError, r"is not \[shape, dtype"),
        ({"param_meta": {"a": [["1"], 10, False]}}, CorruptError, "the shape of `a`"),
        ({"param_meta": {"a": [[1], 99, False]}}, UnsupportedError, "has dtype 99"),
        ({"param_meta": {"a": [[1], True, False]}}, UnsupportedError, "has dtype True"),
    ],
)
def test_a_cell_that_is_none(cell: dict[str, Any], kind: type[CkptError], text: str, saved: Path) -> None:
    edit_meta(saved, lambda c: c.update(cell))
    refused(kind, text, saved)


def test_a_cell_that_the_meta_lacks(saved: Path) -> None:
    path = saved / "model_meta.json"
    meta = json.loads(path.read_text())
    del meta["sharding_metas"]["tp01_pp00"]
    path.write_text(json.dumps(meta))
    refused(IncompleteError, r"model_meta\.json has no entry tp01_pp00", saved)


def test_cells_of_one_rank_that_disagree(tmp_path: Path) -> None:
    root = Save(shards=2, ep=2, experts=4).write(tmp_path)
    path = root / "model_meta.json"
    meta = json.loads(path.read_text())
    meta["sharding_metas"]["tp00_pp00_ep01"]["param_meta"]["model.norm.weight"][0] = [64]
    path.write_text(json.dumps(meta))
    refused(ConflictError, r"gives `model\.norm\.weight` the shapes \[128\] and \[64\]", root)


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"ep_degree": 3}, "cannot be together"),
        ({"ep_degree": 8}, "cannot be together"),
    ],
)
def test_expert_ranks_that_do_not_fit(sizes: dict[str, Any], text: str, saved: Path) -> None:
    edit_sizes(saved, **sizes)
    refused(ConflictError, text, saved)


def test_experts_over_two_kinds_of_ranks(tmp_path: Path) -> None:
    root = Save(shards=2, moe=2, experts=4).write(tmp_path)
    edit_sizes(root, ep_degree=2)
    refused(ConflictError, "files are named _moeNN, which ep 2", root)


def test_experts_of_other_data_parallel_ranks(tmp_path: Path) -> None:
    root = Save(shards=2, moe=2, experts=4, local_ids=False).write(tmp_path)

    def add(meta: dict[str, Any]) -> None:
        name = "model.layers.0.mlp.experts.9.down_proj.weight"
        twin = "model.layers.0.mlp.experts.0.down_proj.weight"
        for part in ("structure_name_mapping", "param_meta"):
            meta[part][name] = meta[part][twin]

    edit_meta(root, add)
    refused(ConflictError, r"has 3 experts for `linear_\d+\.w_0`", root)


def test_safetensors_beside_an_optimizer_without_names(tmp_path: Path) -> None:
    root = Save(meta=False).write(tmp_path)
    (root / "model_state.pdparams").unlink()
    write_file(root / "model.safetensors", {"lm_head.weight": Raw("F32", np.zeros((12, 6), "<u4"))})
    error = refused(IncompleteError, "the save does not record which parameter", root)
    assert "--from hf" in (error.hint or "")
