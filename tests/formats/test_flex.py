"""Paddle's flex_checkpoint: real saves against their truth, saves pickled by Python itself, and what is written."""

from __future__ import annotations

import json
import pickle
import shutil
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, make_dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from ckpttool.core.catalog import Catalog, Key, Piece, RankTensor
from ckpttool.core.dtypes import numpy_dtype
from ckpttool.core.geometry import Box, whole
from ckpttool.core.mesh import Mesh
from ckpttool.errors import CkptError, ConflictError, CorruptError, IncompleteError, UnsupportedError, UsageError
from ckpttool.formats.base import FileLayout, ReadOptions, StoredCheckpoint, WriteRequest
from ckpttool.formats.paddle.flex import Flex, keys_of
from ckpttool.storage.listing import list_source
from ckpttool.storage.place import read_all
from tests.helpers.command import reshard

FIXTURES = Path(__file__).parents[2] / "fixtures" / "paddle_flex"
NEW = "paddle.distributed.flex_checkpoint.dcp.metadata"
OLD = "paddle.distributed.checkpoint.metadata"
Array = np.ndarray[Any, Any]
BF16 = np.dtype(ml_dtypes.bfloat16)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)


# -- Paddle's classes, for Python's own pickle

FIELDS = {
    "LocalTensorMetadata": "global_offset local_shape dtype global_shape is_flattened flattened_range",
    "LocalTensorIndex": "tensor_key global_offset is_flattened flattened_range replica_id local_shape",
    "Metadata": "state_dict_metadata storage_metadata flat_mapping",
}
EARLY_FIELDS = FIELDS | {
    "LocalTensorMetadata": "global_offset local_shape",
    "LocalTensorIndex": "tensor_key global_offset",
}


@contextmanager
def classes(module: str = NEW) -> Iterator[types.ModuleType]:
    """The module of Paddle's three classes, while it lasts."""
    parts = module.split(".")
    names = [".".join(parts[: i + 1]) for i in range(len(parts))]
    before = {n: sys.modules.get(n) for n in names}
    made = {n: types.ModuleType(n) for n in names}
    out = made[module]
    for name, fields in (FIELDS if module == NEW else EARLY_FIELDS).items():
        cls = make_dataclass(name, [(f, Any, None) for f in fields.split()], frozen=name != "Metadata")
        cls.__module__ = module
        setattr(out, name, cls)
    sys.modules.update(made)
    try:
        yield out
    finally:
        for n, m in before.items():
            if m is None:
                del sys.modules[n]
            else:
                sys.modules[n] = m


@dataclass
class Block:
    """What a rank saves under one key."""

    data: Array
    whole: tuple[int, ...] | None = None
    offset: tuple[int, ...] | None = None
    run: Any = None
    """(start, stop) of the flattened block, or what shall stand in its place."""
    shape: tuple[int, ...] | None = None
    """Of the block."""
    dtype: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    """Fields of the entry that are replaced."""


def cut(full: Array, start: Sequence[int], stop: Sequence[int], run: Any = None) -> Block:
    """A block of a tensor, or elements of it."""
    local = np.array(full[tuple(slice(a, b) for a, b in zip(start, stop, strict=True))], order="C")
    flat = local.reshape(-1)[run[0] : run[1]] if run is not None else local
    return Block(flat, full.shape, tuple(start), run, local.shape)


def one(full: Array) -> Block:
    return cut(full, (0,) * full.ndim, full.shape)


def pickled(a: Array) -> Array:
    """As Paddle hands it to pickle."""
    return a.view({BF16: "u2", FP8: "i1"}.get(a.dtype, a.dtype))


def save(
    directory: Path, ranks: Sequence[Mapping[str, Block]], *, module: str = NEW, safetensors: bool = False, id_: int = 0
) -> Path:
    """What ``paddle.distributed.save_state_dict`` leaves, written by pickle (or the safetensors library)."""
    directory.mkdir(parents=True, exist_ok=True)
    entries: dict[str, list[Any]] = {}
    storage = {}
    with classes(module) as paddle:
        for rank, held in enumerate(ranks):
            name = f"{rank}_{id_}." + ("safetensors" if safetensors else "distcp")
            for key, b in held.items():
                shape = b.shape if b.shape is not None else b.data.shape
                offset = b.offset if b.offset is not None else (0,) * len(shape)
                flat = b.run is not None
                fields = {
                    "global_offset": offset,
                    "local_shape": shape,
                    "dtype": b.dtype or str(b.data.dtype),
                    "global_shape": b.whole if b.whole is not None else b.data.shape,
                    "is_flattened": flat,
                    "flattened_range": b.run,
                } | b.extra
                names = {n: t.split() for n, t in (FIELDS if module == NEW else EARLY_FIELDS).items()}
                entry = paddle.LocalTensorMetadata(**{k: fields[k] for k in names["LocalTensorMetadata"]})
                fields |= {"tensor_key": key, "replica_id": None}
                place = paddle.LocalTensorIndex(**{k: fields[k] for k in names["LocalTensorIndex"]})
                entries.setdefault(key, []).append(entry)
                storage[place] = name
            data = {k: pickled(b.data) if not safetensors else b.data for k, b in held.items()}
            if safetensors:
                save_file(data, directory / name)
            else:
                (directory / name).write_bytes(
                    pickle.dumps(data | {"StructuredToParameterName@@": dict.fromkeys(data, "t")}, 4)
                )
        meta = paddle.Metadata(entries, storage, {k: (k,) for k in entries})
        (directory / f"{id_}.metadata").write_bytes(pickle.dumps(meta, 4))
    return directory


# -- reading


def index(path: Path, **said: Any) -> StoredCheckpoint:
    return Flex().read(list_source(path), ReadOptions(**said))


def catalog(path: Path, **said: Any) -> Catalog:
    found = index(path, **said).recorded
    assert found is not None
    return found


def value(found: Catalog, key: Key) -> Array:
    """A tensor's elements, from its pieces; every replica is compared."""
    t = found.tensors[key]
    out = np.zeros(t.shape, numpy_dtype(t.dtype))
    for p in t.pieces:
        out[_slices(p.logical_box)] = _elements(found, p)
    for p in t.replicas:
        assert out[_slices(p.logical_box)].tobytes() == _elements(found, p).tobytes()
    return out


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


def _elements(found: Catalog, p: Piece) -> Array:
    s = p.stored
    dtype = numpy_dtype(s.dtype)
    raw = read_all(found.files[s.file].place)
    strides = [n * dtype.itemsize for n in s.element_strides]
    whole_ = np.ndarray(s.shape, dtype, raw, s.offset, strides)
    return np.array(whole_[_slices(p.stored_box)], order="C")


def values(path: Path, **said: Any) -> dict[Key, Array]:
    found = catalog(path, **said)
    return {k: value(found, k) for k in found.tensors}


def assert_equal(found: Mapping[Any, Array], expected: Mapping[Any, Array]) -> None:
    assert found.keys() == expected.keys()
    for k, a in found.items():
        assert a.shape == expected[k].shape, k
        assert a.tobytes() == expected[k].tobytes(), k


@pytest.mark.parametrize("name", ["tp2_dp2", "tp2_dp2_replicas", "dist_tensor"])
def test_saves_of_paddle_hold_what_was_saved(name: str) -> None:
    """Unaligned flattened ranges, uneven rows, bf16, fp16, fp8, int64, replicas, tensors shared out over files."""
    with np.load(FIXTURES / f"{name.removesuffix('_replicas')}.expected.npz") as truth:
        expected = {Key(k): truth[k] for k in truth.files}
    found = values(FIXTURES / name, raw=True)
    assert_equal(found, expected)
    if name != "dist_tensor":
        dtypes = json.loads((FIXTURES / "tp2_dp2.expected_dtypes.json").read_text())
        assert {k.name: str(a.dtype) for k, a in found.items()} == dtypes


def test_keys_become_parameters_and_their_states() -> None:
    raw, named = values(FIXTURES / "tp2_dp2", raw=True), values(FIXTURES / "tp2_dp2")
    parameter = "layers.0.mlp.down_proj.weight"
    for suffix, key in {
        "": Key(parameter),
        ".w_0": Key(parameter, "master_weights"),
        ".moment1_0": Key(parameter, "optimizer", "moment1_0"),
        ".beta2_pow_acc_0": Key(parameter, "optimizer", "beta2_pow_acc_0"),
    }.items():
        assert named[key].tobytes() == raw[Key(parameter + suffix)].tobytes()
    assert len(named) == len(raw)


def test_replicas_are_found() -> None:
    found = catalog(FIXTURES / "tp2_dp2_replicas")
    assert len(found["layers.0.input_layernorm.weight"].replicas) == 3
    assert not catalog(FIXTURES / "tp2_dp2")["layers.0.input_layernorm.weight"].replicas


@pytest.mark.parametrize(
    ("component", "keys", "expected"),
    [
        ("", "a.weight a.weight.w_0", ["a.weight", "master_weights/a.weight"]),
        ("", "a.w_0 a.b_0", ["a.w_0", "a.b_0"]),
        ("", "linear_0.w_0 linear_0.w_0.moment1_0", ["linear_0.w_0", "optimizer/linear_0.w_0/moment1_0"]),
        ("", "a.w_0 a.moment1_0", ["master_weights/a", "optimizer/a/moment1_0"]),
        ("", "a.moment1_0", ["a.moment1_0"]),
        ("", "w_0", ["w_0"]),
        ("model", "a.weight a.weight.w_0", ["a.weight", "a.weight.w_0"]),
        ("master_weights", "a.w_0", ["master_weights/a"]),
        ("ema", "a.w_0 gate.weight", ["ema/a", "ema/gate.weight"]),
        ("optimizer", "a.velocity_0 a.momentum_0", ["optimizer/a/velocity_0", "optimizer/a/momentum_0"]),
    ],
)
def test_what_a_key_is(component: str, keys: str, expected: list[str]) -> None:
    """A parameter may be called like a state, so a name alone is not enough where nothing but names tells."""
    assert [str(k) for k in keys_of(component, dict.fromkeys(keys.split())).values()] == expected


RNG = np.random.default_rng(5)


def normal(*shape: int) -> Array:
    return np.asarray(RNG.standard_normal(shape), np.float32)


W = normal(6, 8)
B = normal(5)


@pytest.mark.parametrize("safetensors", [False, True])
def test_small_and_odd_tensors(tmp_path: Path, safetensors: bool) -> None:
    tensors: dict[str, Array] = {
        "scalar": np.array(3, np.float32),
        "empty": np.zeros((0, 4), np.float32),
        "bool": np.array([True, False]),
        "int": np.arange(3),
        "half": W.astype(np.float16),
        "double": W.astype(np.float64),
        "complex": W.astype(np.complex64),
    }
    if not safetensors:  # the numpy binding of safetensors has neither
        tensors |= {"bf16": W.astype(BF16), "fp8": W.astype(FP8)}
    save(tmp_path / "a", [{k: one(v) for k, v in tensors.items()}], safetensors=safetensors)
    found = values(tmp_path / "a")
    assert_equal(found, {Key(k): v for k, v in tensors.items()})
    assert {k.name: str(v.dtype) for k, v in found.items()} == {k: str(v.dtype) for k, v in tensors.items()}


@pytest.mark.parametrize("integer", [int, np.int64])
def test_flattened_ranges(tmp_path: Path, integer: type) -> None:
    """Of a block of columns, in pieces that begin and end within rows."""
    held = [{"w": cut(W, (0, 0), (6, 4))}]
    for a, b in [(0, 5), (5, 6), (6, 24)]:
        held.append({"w": replace(cut(W, (0, 4), (6, 8), (a, b)), run=(integer(a), integer(b)))})
    save(tmp_path / "a", held)
    assert_equal(values(tmp_path / "a"), {Key("w"): W})


def test_column_major_arrays(tmp_path: Path) -> None:
    save(tmp_path / "a", [{"w": Block(np.asfortranarray(W))}])
    assert values(tmp_path / "a")[Key("w")].tobytes() == W.tobytes()


def test_early_metadata(tmp_path: Path) -> None:
    """Paddle 3.0: another module, no dtype and no shape of the whole."""
    save(
        tmp_path / "a",
        [{"w": cut(W, (0, 0), (3, 8))}, {"w": cut(W, (3, 0), (6, 8)), "h": one(W.astype(BF16))}],
        module=OLD,
    )
    stored = index(tmp_path / "a")
    assert_equal(values(tmp_path / "a"), {Key("w"): W, Key("h"): W.astype(BF16)})
    assert any("does not say how large" in n for n in stored.notes)


def test_a_metadata_file_stands_for_its_directory() -> None:
    stored = Flex().read(list_source(FIXTURES / "tp2_dp2" / "0.metadata"), ReadOptions())
    assert stored.recorded is not None
    assert len(stored.recorded) == len(catalog(FIXTURES / "tp2_dp2"))


def test_directories_of_several_nodes(tmp_path: Path) -> None:
    save(tmp_path / "a", [{"w": cut(W, (0, 0), (3, 8))}, {"w": cut(W, (3, 0), (6, 8))}])
    node = tmp_path / "node1"
    node.mkdir()
    (tmp_path / "a" / "1_0.distcp").rename(node / "1_0.distcp")
    with pytest.raises(IncompleteError, match=r"1_0\.distcp"):
        index(tmp_path / "a")
    found = catalog(tmp_path / "a", more=(node,))
    assert value(found, Key("w")).tobytes() == W.tobytes()
    shutil.copy(tmp_path / "a" / "0.metadata", node)
    catalog(tmp_path / "a", more=(node,))
    save(tmp_path / "b", [{"v": one(W)}])
    shutil.copy(tmp_path / "b" / "0.metadata", node)
    with pytest.raises(ConflictError, match="metadata of two directories differ"):
        index(tmp_path / "a", more=(node,))


# -- a trainer's directory

Q, GU, NORM, GATE = "model.q_proj.weight", "model.mlp.up_gate_proj.weight", "model.norm.weight", "model.gate.weight"
FULL = {
    Q: normal(8, 6),
    GU: normal(8, 12),
    NORM: normal(8),
}
GATE_W = normal(8, 4)


def halves(full: Array, tp: int) -> Array:
    """A fused gate and up as Paddle's coordinates have it: [g0 u0 g1 u1]."""
    g, u = np.split(full, 2, -1)
    return np.concatenate([x for i in range(tp) for x in (np.split(g, tp, -1)[i], np.split(u, tp, -1)[i])], -1)


def trainer(root: Path, *, config: Mapping[str, Any] | None = None, meta: bool = True) -> Path:
    """bf16 weights at tp 2 and sharding 2, as zero-cost checkpoints lie on disk."""
    root.mkdir(parents=True)
    ranks: dict[str, list[dict[str, Block]]] = {s: [{} for _ in range(4)] for s in ("master", "moment", "ema")}
    for name, a in FULL.items():
        for part, factor, suffix in (("master", 1, "w_0"), ("moment", 2, "moment1_0"), ("ema", 3, "w_0")):
            whole_ = halves(a, 2) * factor if name == GU else a * factor
            for tp in range(2):
                n = whole_.shape[-1] // 2 if whole_.ndim > 1 else 0
                start = (0, tp * n) if n else (0,)
                stop = (whole_.shape[0], (tp + 1) * n) if n else whole_.shape
                if not n and tp:
                    continue
                size = prod(b - a for a, b in zip(start, stop, strict=True))
                for s, run in enumerate([(0, size // 3), (size // 3, size)]):
                    ranks[part][2 * s + tp][f"{name}.{suffix}"] = cut(whole_, start, stop, run)
    ranks["moment"][0][f"{Q}.beta1_pow_acc_0"] = one(np.array([0.9], np.float32))
    ranks["ema"][0][GATE] = one(GATE_W * 3)
    save(root / "model_state", [{GATE: one(GATE_W)}, {}])
    save(root / "master_weight", ranks["master"])
    save(root / "optimizer_state", ranks["moment"])
    save(root / "ema_state", ranks["ema"])
    if config is not None:
        (root / "config.json").write_text(json.dumps(config))
    if meta:
        entries = {n: [list(a.shape), 16, True, False] for n, a in FULL.items()} | {GATE: [[8, 4], 10, False, False]}
        (root / "model_meta.json").write_text(json.dumps({"sharding_metas": {"tp00_pp00": {"param_meta": entries}}}))
    (root / "saved_signal_0").write_text("1")
    return root


def test_a_trainers_directory(tmp_path: Path) -> None:
    stored = index(trainer(tmp_path / "a", config={"model_type": "x"}))
    assert stored.recorded is not None
    expected = {Key(GATE): GATE_W, Key(GATE, "ema"): GATE_W * 3}
    for name, a in FULL.items():
        # The model is the elements of the master weights; what they are rounded to stands beside the catalog.
        expected |= {Key(name): a, Key(name, "master_weights"): a, Key(name, "ema"): a * 3}
        expected[Key(name, "optimizer", "moment1_0")] = a * 2
    expected[Key(Q, "optimizer", "beta1_pow_acc_0")] = np.array([0.9], np.float32)
    found = {k: value(stored.recorded, k) for k in stored.recorded.tensors}
    assert_equal(found, expected)
    assert stored.dtypes == {Key(n): "BF16" for n in FULL}
    assert stored.dialect == "paddle"
    assert not stored.companions
    assert any("up_gate_proj" in n for n in stored.notes)


def test_without_a_config_fused_tensors_keep_their_coordinates(tmp_path: Path) -> None:
    found = values(trainer(tmp_path / "a"))
    assert found[Key(GU, "master_weights")].tobytes() == halves(FULL[GU], 2).tobytes()


def test_dtype_of_the_model_comes_from_the_config(tmp_path: Path) -> None:
    stored = index(trainer(tmp_path / "a", config={"torch_dtype": "float16"}, meta=False))
    assert stored.dtypes == {Key(n): "F16" for n in FULL}


def test_without_a_dtype_there_is_no_model(tmp_path: Path) -> None:
    stored = index(trainer(tmp_path / "a", meta=False))
    assert stored.recorded is not None
    assert {k.name for k in stored.recorded.tensors if k.component == "model"} == {GATE}
    assert any("without them" in n for n in stored.notes)


def test_frozen_parameters_are_named(tmp_path: Path) -> None:
    root = trainer(tmp_path / "a")
    meta = json.loads((root / "model_meta.json").read_text())
    meta["sharding_metas"]["tp00_pp00"]["param_meta"]["model.frozen.weight"] = [[1], 16, False, False]
    (root / "model_meta.json").write_text(json.dumps(meta))
    assert any("`model.frozen.weight`" in n for n in index(root).notes)


def test_one_of_a_trainers_directories(tmp_path: Path) -> None:
    root = trainer(tmp_path / "a", config={"model_type": "x"})
    found = values(root / "ema_state")
    assert_equal(found, {Key(GATE, "ema"): GATE_W * 3} | {Key(n, "ema"): a * 3 for n, a in FULL.items()})
    raw = values(root / "master_weight", raw=True)
    assert raw[Key(f"{GU}.w_0")].tobytes() == halves(FULL[GU], 2).tobytes()


def test_raw_names_of_a_trainers_directory_clash(tmp_path: Path) -> None:
    with pytest.raises(ConflictError, match=r"two tensors are `model\.q_proj\.weight\.w_0`"):
        index(trainer(tmp_path / "a"), raw=True)


def test_detection(tmp_path: Path) -> None:
    flex = Flex()
    assert flex.detect(list_source(FIXTURES / "tp2_dp2")) == 2
    assert flex.detect(list_source(trainer(tmp_path / "a"))) == 2
    assert flex.detect(list_source(tmp_path)) == 0
    hf = tmp_path / "hf"
    hf.mkdir()
    save_file({"w": W}, hf / "model.safetensors")
    (hf / "flex-ckpt.auto_generated.metadata").write_bytes(b"")
    assert flex.detect(list_source(hf)) == 0


# -- what Paddle takes, and should not


def refused(path: Path, error: type[CkptError], *words: str, **said: Any) -> None:
    with pytest.raises(error) as e:
        index(path, **said)
    for word in words:
        assert word in e.value.render()


TOP, LOW = cut(W, (0, 0), (3, 8)), cut(W, (3, 0), (6, 8))


def test_a_missing_file(tmp_path: Path) -> None:
    save(tmp_path / "a", [{"w": TOP}, {"w": LOW}])
    (tmp_path / "a" / "1_0.distcp").unlink()
    refused(tmp_path / "a", IncompleteError, "1 of 2 files", "1_0.distcp")


@pytest.mark.parametrize("lost", [TOP, LOW])
def test_a_missing_shard(tmp_path: Path, lost: Block) -> None:
    """Paddle makes a smaller tensor of this, or zeros."""
    save(tmp_path / "a", [{"w": LOW if lost is TOP else TOP}])
    where = "[0:3, 0:8]" if lost is TOP else "[3:6, 0:8]"
    refused(tmp_path / "a", IncompleteError, "no file holds", where, "`w`", "0.metadata")


def test_a_missing_run_of_a_flattened_block(tmp_path: Path) -> None:
    save(tmp_path / "a", [{"w": cut(W, (0, 0), (6, 8), (0, 20))}, {"w": cut(W, (0, 0), (6, 8), (21, 48))}])
    refused(tmp_path / "a", IncompleteError, "no file holds [2:3, 4:5]")


def test_a_second_save_into_the_directory(tmp_path: Path) -> None:
    """Paddle overwrites the files and keeps the first metadata."""
    save(tmp_path / "a", [{"w": one(W)}])
    save(tmp_path / "b", [{"w": one(W[:4])}])
    shutil.copy(tmp_path / "b" / "0_0.distcp", tmp_path / "a")
    refused(tmp_path / "a", ConflictError, "[4, 8] in its file and [6, 8] in the metadata", "two saves")
    save(tmp_path / "b", [{"w": one(W), "new": one(B)}])
    shutil.copy(tmp_path / "b" / "0_0.distcp", tmp_path / "a")
    refused(tmp_path / "a", ConflictError, "1 tensors that the metadata does not place there", "`new`")
    save(tmp_path / "b", [{"new": one(B)}])
    shutil.copy(tmp_path / "b" / "0_0.distcp", tmp_path / "a")
    refused(tmp_path / "a", ConflictError, "`new`")
    save(tmp_path / "b", [{}])
    shutil.copy(tmp_path / "b" / "0_0.distcp", tmp_path / "a")
    refused(tmp_path / "a", IncompleteError, "lacks 1 of the 1 tensors", "`w`")


def test_files_of_more_ranks_than_the_metadata_knows(tmp_path: Path) -> None:
    save(tmp_path / "a", [{"w": one(W)}])
    save(tmp_path / "b", [{}, {}])
    shutil.copy(tmp_path / "b" / "1_0.distcp", tmp_path / "a")
    assert len(index(tmp_path / "a").files) == 1  # a rank whose tensors others have
    save(tmp_path / "b", [{}, {"w": one(W)}])
    shutil.copy(tmp_path / "b" / "1_0.distcp", tmp_path / "a")
    refused(tmp_path / "a", ConflictError, "1_0.distcp", "`w`")


def test_two_metadata_files(tmp_path: Path) -> None:
    save(tmp_path / "a", [{"w": one(W)}])
    save(tmp_path / "a", [{"w": one(W)}], id_=11)
    refused(tmp_path / "a", ConflictError, "2 saves", "0.metadata, 11.metadata")


def test_no_metadata(tmp_path: Path) -> None:
    root = trainer(tmp_path / "a")
    (root / "master_weight" / "0.metadata").unlink()
    refused(root, IncompleteError, "there is no 0.metadata", "master_weight")


def test_a_truncated_file(tmp_path: Path) -> None:
    save(tmp_path / "a", [{"w": one(W)}])
    path = tmp_path / "a" / "0_0.distcp"
    path.write_bytes(path.read_bytes()[:-100])
    refused(tmp_path / "a", CkptError, "0_0.distcp")
    path = tmp_path / "a" / "0.metadata"
    path.write_bytes(path.read_bytes()[:-100])
    refused(tmp_path / "a", CkptError, "0.metadata")


def test_shards_of_two_dtypes(tmp_path: Path) -> None:
    save(tmp_path / "a", [{"w": TOP}, {"w": replace(LOW, data=LOW.data.astype(np.float16))}])
    refused(tmp_path / "a", ConflictError, "F32 in one file and F16 in another", "0_0.distcp", "1_0.distcp")


def test_a_file_of_another_dtype(tmp_path: Path) -> None:
    save(tmp_path / "a", [{"w": replace(one(W.astype(np.float16)), dtype="bfloat16")}])
    refused(tmp_path / "a", ConflictError, "F16 in its file and BF16 in the metadata")


def test_two_shapes_of_the_whole(tmp_path: Path) -> None:
    save(tmp_path / "a", [{"w": TOP}, {"w": replace(LOW, whole=(7, 8))}])
    refused(tmp_path / "a", ConflictError, "[6, 8]", "[7, 8]", "0_0.distcp", "1_0.distcp")


def test_overlapping_shards(tmp_path: Path) -> None:
    save(tmp_path / "a", [{"w": TOP}, {"w": cut(W, (2, 0), (6, 8))}])
    refused(tmp_path / "a", ConflictError, "overlap without being equal")


def test_flattened_replicas_that_are_cut_differently(tmp_path: Path) -> None:
    a, b = (0, 0), (6, 8)
    save(tmp_path / "a", [{"w": cut(W, a, b, (0, 20))}, {"w": cut(W, a, b, (20, 48))}, {"w": cut(W, a, b, (0, 30))}])
    refused(tmp_path / "a", ConflictError, "elements 0 to 20", "elements 0 to 30", "cut at the same elements")


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"global_offset": (0,)}, "different numbers of axes"),
        ({"global_offset": (4, 0)}, "lies outside tensor `w` [6, 8]"),
        ({"global_offset": (-1, 0)}, "negative global_offset"),
        ({"global_offset": "xy"}, "no valid global_offset"),
        ({"is_flattened": True, "flattened_range": (0, 99)}, "flattened range 0:99"),
        ({"is_flattened": True, "flattened_range": (5, 4)}, "flattened range 5:4"),
        ({"is_flattened": True}, "no valid flattened_range"),
        ({"is_flattened": True, "flattened_range": (0, 20)}, "[6, 8] in its file and [20] in the metadata"),
        ({"dtype": 7}, "the dtype of `w` is not a name"),
        ({"dtype": "pstring"}, "unknown dtype `pstring`"),
    ],
)
def test_entries_that_cannot_be(tmp_path: Path, extra: dict[str, Any], words: str) -> None:
    save(tmp_path / "a", [{"w": replace(one(W), extra=extra)}])
    refused(tmp_path / "a", CkptError, words)


def test_tables_that_do_not_join(tmp_path: Path) -> None:
    path = save(tmp_path / "a", [{"w": TOP}, {"w": LOW}]) / "0.metadata"
    good = path.read_bytes()
    with classes() as paddle:

        def changed(edit: Any) -> None:
            meta = pickle.loads(good)  # noqa: S301  # written above
            edit(meta)
            path.write_bytes(pickle.dumps(meta, 4))

        def unplaced(meta: Any) -> None:
            meta.storage_metadata.popitem()

        def unknown(meta: Any) -> None:
            meta.storage_metadata[paddle.LocalTensorIndex("w", (1, 0), False, None, None, (3, 8))] = "1_0.distcp"

        def outside(meta: Any) -> None:
            meta.storage_metadata = dict.fromkeys(meta.storage_metadata, "../0_0.distcp")

        def twice(meta: Any) -> None:
            meta.storage_metadata = dict.fromkeys(meta.storage_metadata, "0_0.distcp")

        changed(unplaced)
        refused(tmp_path / "a", IncompleteError, "names no file for [3:6, 0:8] of `w`")
        changed(unknown)
        refused(tmp_path / "a", CorruptError, "at [1, 0]")
        changed(outside)
        refused(tmp_path / "a", CorruptError, "'../0_0.distcp'")
        changed(twice)
        refused(tmp_path / "a", CorruptError, "two blocks of `w` in 0_0.distcp")
    path.write_bytes(pickle.dumps({"a": 1}, 4))
    refused(tmp_path / "a", CorruptError, "not the metadata of a flex checkpoint")


def test_a_fused_shard_without_halves(tmp_path: Path) -> None:
    full = np.zeros((2, 6), np.float32)
    save(tmp_path / "a", [{GU: cut(full, (0, 0), (2, 3))}, {GU: cut(full, (0, 3), (2, 6))}])
    (tmp_path / "a" / "config.json").write_text('{"model_type": "x"}')
    refused(tmp_path / "a", UnsupportedError, "no two equal halves")


def test_a_save_beside_a_trainers(tmp_path: Path) -> None:
    save(trainer(tmp_path / "a"), [{"w": one(W)}])
    refused(tmp_path / "a", ConflictError, "a save of its own and those of a trainer")


# -- writing

SOURCE: dict[Key, Array] = {
    Key("embed.weight"): normal(8, 4).astype(BF16),
    Key(Q): normal(4, 8).astype(BF16),
    Key(GU): normal(4, 16).astype(BF16),
    Key(NORM): normal(8).astype(BF16),
    Key("fp8.weight"): normal(4, 8).astype(FP8),
    Key(GATE): normal(4, 6),
    Key("ids"): np.arange(7),
    Key("scalar"): np.array(2, np.float32),
    Key("empty"): np.zeros((0, 3), np.float32),
}
for _name in ("embed.weight", Q, GU, NORM):
    _shape = SOURCE[Key(_name)].shape
    SOURCE[Key(_name, "master_weights")] = normal(*_shape)
    SOURCE[Key(_name, "ema")] = normal(*_shape)
    SOURCE[Key(_name, "optimizer", "moment1_0")] = normal(*_shape)
    SOURCE[Key(_name, "optimizer", "beta1_pow_acc_0")] = normal(1)
SOURCE[Key(GATE, "ema")] = normal(4, 6)
AXES = {"embed.weight": 0, Q: 1, GU: 1, "fp8.weight": 0}


def rank_tensors(tp: int, ways: int) -> list[RankTensor]:
    """What tensor-parallel rank ``tp`` of ``ways`` stores."""
    out = []
    for key, a in SOURCE.items():
        axis = AXES.get(key.name) if a.ndim > 1 else None
        boxes: tuple[tuple[Box, Box], ...] = ((whole(a.shape), whole(a.shape)),)
        shape = a.shape
        if axis is not None:
            n = a.shape[axis] // ways
            shape = (*a.shape[:axis], n, *a.shape[axis + 1 :])
            parts = 2 if key.name == GU else 1
            n //= parts
            boxes = tuple(
                (_slab(shape, axis, p * n, n), _slab(a.shape, axis, p * a.shape[axis] // parts + tp * n, n))
                for p in range(parts)
            )
        dtype = {"bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float32": "F32", "int64": "I64"}[str(a.dtype)]
        out.append(RankTensor(key.name, dtype, shape, str(key), a.shape, boxes, (), key.component, key.state))
    return out


def _slab(shape: tuple[int, ...], axis: int, start: int, n: int) -> Box:
    return Box(
        tuple(start if i == axis else 0 for i in range(len(shape))),
        tuple(start + n if i == axis else s for i, s in enumerate(shape)),
    )


def request(tp: int, sharding: int = 1, *, pp: int = 1, config: Mapping[str, Any] | None = None) -> WriteRequest:
    mesh = Mesh(tp, pp)
    ranks: list[list[RankTensor]] = [rank_tensors(r % tp, tp) for r in range(mesh.world)]
    for stage in range(pp):  # every stage has some of the tensors
        for r in range(stage * tp, stage * tp + tp):
            ranks[r] = [t for i, t in enumerate(ranks[r]) if i % pp == stage]
    return WriteRequest(
        ranks=ranks, chosen=tuple(range(mesh.world)), mesh=mesh, config=dict(config or {}), sharding=sharding
    )


def written(root: Path, asked: WriteRequest) -> FileLayout:
    """Write a skeleton and what belongs into it, box by box."""
    file_layout = Flex().write(asked)
    if file_layout.config:
        root.mkdir(parents=True, exist_ok=True)
        (root / "config.json").write_text(json.dumps(file_layout.config))
    data = [bytearray(f.size) for f in file_layout.files]
    for f, b in zip(file_layout.files, data, strict=True):
        for at, literal in f.literals:
            b[at : at + len(literal)] = literal
    arrays = {str(k): a for k, a in SOURCE.items()}
    assert file_layout.ranks is not None
    for rank, tensors in enumerate(file_layout.ranks):
        for t in tensors:
            local = np.zeros(t.shape, arrays[t.key].dtype)
            for inner, outer in t.boxes:
                local[_slices(inner)] = arrays[t.key][_slices(outer)]
            file, at = file_layout.places[rank][t.slot]
            assert file in file_layout.rank_files[rank]
            assert not any(data[file][at : at + local.nbytes])
            data[file][at : at + local.nbytes] = local.tobytes()
    for f, b in zip(file_layout.files, data, strict=True):
        path = root / f.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b)
    return file_layout


def unpickled(directory: Path) -> tuple[Any, dict[str, Any]]:
    """The metadata and the arrays of every file, by Python's own pickle."""
    with classes():
        meta = pickle.loads((directory / "0.metadata").read_bytes())  # noqa: S301  # written here
    return meta, {p.name: pickle.loads(p.read_bytes()) for p in directory.glob("*.distcp")}  # noqa: S301  # the same


def by_paddles_rules(directory: Path) -> dict[str, Array]:
    """Whole tensors in Paddle's coordinates: entries and index joined, each element written once."""
    meta, files = unpickled(directory)
    out = {}
    for key, entries in meta.state_dict_metadata.items():
        full = np.zeros(entries[0].global_shape, entries[0].dtype if entries[0].dtype != "bool" else np.bool_)
        seen = np.zeros(full.shape, np.int64)
        for e in entries:
            (name,) = [
                f
                for i, f in meta.storage_metadata.items()
                if (i.tensor_key, i.global_offset, i.flattened_range, i.local_shape)
                == (key, e.global_offset, e.flattened_range, e.local_shape)
            ]
            where = tuple(slice(a, a + n) for a, n in zip(e.global_offset, e.local_shape, strict=True))
            flat = np.arange(full.size).reshape(full.shape)[where].reshape(-1)
            if e.is_flattened:
                flat = flat[slice(*e.flattened_range)]
                assert files[name][key].shape == (len(flat),)
            else:
                assert files[name][key].shape == e.local_shape
            full.reshape(-1)[flat] = files[name][key].reshape(-1).view(full.dtype)
            seen.reshape(-1)[flat] += 1
        assert (seen == 1).all()
        assert meta.flat_mapping[key] == (key,)
        out[key] = full
    for name, held in files.items():
        keys = {i.tensor_key for i, f in meta.storage_metadata.items() if f == name}
        assert held.pop("StructuredToParameterName@@").keys() == keys == held.keys()
    return out


def expected_files(tp: int) -> dict[str, dict[str, Array]]:
    out: dict[str, dict[str, Array]] = {d: {} for d in ("model_state", "master_weight", "optimizer_state", "ema_state")}
    for key, a in SOURCE.items():
        full = halves(a, tp) if key.name == GU and a.ndim > 1 else a
        if key.component == "model":
            out["model_state"][key.name] = full
        elif key.component == "master_weights":
            out["master_weight"][f"{key.name}.w_0"] = full
        elif key.component == "ema":
            out["ema_state"][key.name if key.name == GATE else f"{key.name}.w_0"] = full
        else:
            out["optimizer_state"][f"{key.name}.{key.state}"] = full
    return out


@pytest.mark.parametrize(
    ("tp", "sharding", "pp"), [(1, 1, 1), (2, 1, 1), (4, 1, 1), (2, 2, 1), (1, 3, 1), (4, 8, 1), (2, 3, 2)]
)
def test_what_is_written_is_right_by_paddles_rules(tmp_path: Path, tp: int, sharding: int, pp: int) -> None:
    written(tmp_path / "a", request(tp, sharding, pp=pp))
    for directory, expected in expected_files(tp).items():
        assert_equal(by_paddles_rules(tmp_path / "a" / directory), expected)


@pytest.mark.parametrize("config", [None, {"model_type": "x"}])
@pytest.mark.parametrize(("tp", "sharding", "pp"), [(1, 1, 1), (2, 1, 1), (4, 2, 1), (2, 3, 2)])
def test_what_is_written_is_read_back(
    tmp_path: Path, tp: int, sharding: int, pp: int, config: dict[str, str] | None
) -> None:
    """Fused tensors too, with or without a config: where they belong is recorded."""
    asked = request(tp, sharding, pp=pp, config=config)
    written(tmp_path / "a", asked)
    found = values(tmp_path / "a")
    assert_equal(found, SOURCE)
    assert {k: str(a.dtype) for k, a in found.items()} == {k: str(a.dtype) for k, a in SOURCE.items()}


def test_a_fused_name_that_is_cut_plainly_is_read_back_so(tmp_path: Path) -> None:
    asked = request(2, config={"model_type": "x"})
    half = SOURCE[Key(GU)].shape[1] // 2
    ranks = [list(held) for held in asked.ranks]
    asked = replace(asked, ranks=ranks)
    for rank, held in enumerate(ranks):
        for i, t in enumerate(held):
            if t.name == GU and len(t.whole) > 1:
                held[i] = t._replace(boxes=((whole(t.shape), _slab(t.whole, 1, rank * half, half)),))
    written(tmp_path / "a", asked)
    assert_equal(values(tmp_path / "a"), SOURCE)


def test_ranks_are_numbered_as_paddle_does(tmp_path: Path) -> None:
    written(tmp_path / "a", request(2, 2, pp=2))
    # Rank (stage * sharding + share) * tp + place; the model is with the first share.
    assert {p.name for p in (tmp_path / "a" / "model_state").glob("*.distcp")} <= {
        f"{r}_0.distcp" for r in (0, 1, 4, 5)
    }
    assert {p.name for p in (tmp_path / "a" / "master_weight").glob("*.distcp")} <= {f"{r}_0.distcp" for r in range(8)}
    assert (tmp_path / "a" / "master_weight" / "7_0.distcp").exists()


def test_sharding_is_even_in_whole_rows(tmp_path: Path) -> None:
    """Paddle 3.3.1 reads other runs wrongly where a neighbour is a box."""
    written(tmp_path / "a", request(2, 4))
    meta, files = unpickled(tmp_path / "a" / "master_weight")
    sizes = [sum(a.size for k, a in f.items() if "@@" not in k) for _, f in sorted(files.items())]
    assert len(sizes) == 8
    longest = max(prod(e.local_shape[1:]) for held in meta.state_dict_metadata.values() for e in held)
    for tp in range(2):
        assert max(sizes[tp::2]) - min(sizes[tp::2]) <= 2 * longest
    for held in meta.state_dict_metadata.values():
        for e in held:
            assert not any(n % prod(e.local_shape[1:]) for n in e.flattened_range)


def test_the_same_request_makes_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        written(tmp_path / name, request(2, 3))
    files = sorted(p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*") if p.is_file())
    assert [(tmp_path / "a" / f).read_bytes() for f in files] == [(tmp_path / "b" / f).read_bytes() for f in files]


def test_replicas_are_written_once(tmp_path: Path) -> None:
    written(tmp_path / "a", request(4))
    _, files = unpickled(tmp_path / "a" / "model_state")
    assert [n for n, f in sorted(files.items()) if NORM in f] == ["0_0.distcp"]


def test_files_of_the_trainer_stay_behind(tmp_path: Path) -> None:
    source = StoredCheckpoint(
        "hf", tmp_path, [], [], Mesh(), companions=("model_meta.json", "tokenizer.json", "saved_signal_3")
    )
    assert Flex().write(replace(request(1), source=source)).dropped == ("model_meta.json", "saved_signal_3")


def test_what_cannot_be_written() -> None:
    asked = replace(request(2), chosen=(1,))
    with pytest.raises(UsageError, match="--ranks-out"):
        Flex().write(asked)
    asked = request(1)
    asked = replace(asked, ranks=[[asked.ranks[0][0]._replace(dtype="U16")]])
    with pytest.raises(UnsupportedError, match="U16"):
        Flex().write(asked)
    asked = request(1)
    asked = replace(asked, ranks=[[asked.ranks[0][0]._replace(shape=(9, 4))]])
    with pytest.raises(UnsupportedError, match="padded"):
        Flex().write(asked)


def test_the_mesh_of_a_target() -> None:
    flex = Flex()
    assert flex.target_mesh(Mesh(4, 1, 2, 4), {"ep": 2}) == Mesh(4, 1, 2, 1)
    assert flex.target_mesh(Mesh(4, 1, 2, 4), {"ep": 2, "etp": 4}) == Mesh(4, 1, 2, 4)
    assert flex.target_mesh(Mesh(4, 2), {}) == Mesh(4, 2, 1, 4)


def test_the_command_writes_and_reads_it(tmp_path: Path) -> None:
    """Real files all the way: a save of Paddle, then a published model for two ranks and back."""
    reshard(FIXTURES / "tp2_dp2", tmp_path / "a", "--to", "flex", "--verify")
    assert_equal(values(tmp_path / "a"), values(FIXTURES / "tp2_dp2"))
    published = FIXTURES.parent / "hf_tiny_source"
    reshard(published, tmp_path / "b", "--to", "flex", "--tp-out", "2", "--verify")
    reshard(tmp_path / "b", tmp_path / "c", "--to", "hf", "--verify")
    assert (tmp_path / "c" / "model.safetensors").read_bytes() == (published / "model.safetensors").read_bytes()


def test_a_published_model_gets_the_names_of_the_version_that_saves_flex(tmp_path: Path) -> None:
    """paddleformers 1.2, which alone saves flex checkpoints, holds Qwen2 fused: its trainer skips other names."""
    import ckpttool

    saved = FIXTURES.parent / "paddle_unified/pf12_qwen2tied_bf16_tp1"
    reshard(saved, tmp_path / "hf", "--to", "hf")
    reshard(tmp_path / "hf", tmp_path / "flex", "--to", "flex", "--verify")
    written, expected = ckpttool.open(tmp_path / "flex"), ckpttool.open(saved)
    assert set(written) == {n for n in expected if not n.startswith(("optimizer/", "master_weights/"))}
    assert any("qkv_proj" in name for name in written)
    assert all(np.array_equal(written.read(n), expected.read(n)) for n in written)


def test_protocol_2_payloads_are_decoded(tmp_path: Path) -> None:
    """Their offsets count decoded bytes, not those of the file that the metadata names."""
    import pickle
    import shutil

    import ckpttool

    source = next(p for p in sorted(FIXTURES.iterdir()) if p.is_dir() and "dist" in p.name)
    src = tmp_path / "src"
    shutil.copytree(source, src)
    for path in src.glob("*.distcp"):
        path.write_bytes(pickle.dumps(pickle.loads(path.read_bytes()), 2))  # noqa: S301 - a fixture
    a, b = ckpttool.open(source), ckpttool.open(src)
    assert list(a) == list(b)
    assert all(np.array_equal(a.read(n), b.read(n)) for n in a)


def test_payloads_without_their_metadata(tmp_path: Path) -> None:
    import shutil

    import ckpttool
    from ckpttool.errors import IncompleteError

    source = next(p for p in sorted(FIXTURES.iterdir()) if p.is_dir() and "dist" in p.name)
    for path in source.glob("*.distcp"):
        shutil.copy(path, tmp_path)
    with pytest.raises(IncompleteError, match=r"no 0\.metadata"):
        ckpttool.open(tmp_path)
