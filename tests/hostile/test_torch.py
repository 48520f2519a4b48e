"""Hostile checkpoints of torch's world: pickles that call in every file of every format, paths and names that lead
elsewhere, sizes and numbers of ranks that cannot be, links, zips that grow.

What damaged files are is in tests/fuzz; files of torch.save alone are in tests/formats/test_torch_bin.py.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.containers.pickle import Global
from ckpttool.containers.pickle_write import Hole, Instance, Pairs, PickledCall, Stateful, plain_pickle
from tests.fuzz.damage_torch import members, with_pickle, zipped
from tests.fuzz.harness import watched
from tests.helpers.command import ckpttool, reshard
from tests.helpers.dcp import write_save
from tests.helpers.loose_pickle import Single, loose, loose_torch
from tests.helpers.tensorfile import header
from tests.helpers.torch_edit import edit
from tests.helpers.torch_save import torch_save
from tests.hostile.court import SAMPLE, SECRET, Court
from tests.hostile.test_pickles import BAITS

FIXTURES = Path(__file__).parents[2] / "fixtures"
UNIVERSAL = "global_step3_universal"
WEIGHT = np.arange(6, dtype="<f4").reshape(2, 3)

LOOK: tuple[Callable[[Court], list[object]], ...] = (
    lambda c: ["inspect", c.src, "--list", "--json"],
    lambda c: ["inspect", c.src, "--check"],
)
TARGETS = ("ranks", "universal", "dcp")
"""Formats that hold an optimizer, one with a directory for each parameter."""


def judge(court: Court) -> list[int]:
    """The exit codes of looking at the source, and of writing it in several formats."""
    with watched():
        written = [("reshard", court.src, court.dst, "--to", to, "--workers", 1) for to in TARGETS]
        return [court.run(*line).code for line in (*(look(court) for look in LOOK), *written)]


def copy(court: Court, fixture: str) -> Path:
    """The source is a fixture."""
    shutil.copytree(FIXTURES / fixture, court.src, dirs_exist_ok=True)
    return court.src


# -- what runs

FILES = (
    ("dcp/uneven/checkpoint", ".metadata"),
    ("dcp/uneven/checkpoint", "__0_0.distcp"),
    ("megatron/dist/qwen2_buckets", "iter_0000005/.metadata"),
    ("megatron/dist/qwen2_buckets", "iter_0000005/common.pt"),
    ("megatron/dist/qwen2_buckets", "iter_0000005/__1_0.distcp"),
    ("torch_fsdp/uneven", "model_world_size_4_rank_1.pt"),
    ("torch_fsdp/uneven", "optim_world_size_4_rank_0.pt"),
    ("torch_fsdp/uneven", "extra_state_world_size_4_rank_0.pt"),
    ("torch/deepspeed/z3", "global_step3/zero_pp_rank_0_mp_rank_00_model_states.pt"),
    ("torch/deepspeed/z3", "global_step3/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    ("torch/deepspeed/z1", "global_step3/mp_rank_00_model_states.pt"),
    ("torch/deepspeed/universal_z1", f"{UNIVERSAL}/mp_rank_00_model_states.pt"),
    ("torch/deepspeed/universal_z1", f"{UNIVERSAL}/zero/head.weight/fp32.pt"),
    ("torch/deepspeed/universal_z1", f"{UNIVERSAL}/zero/head.weight/step.pt"),
    ("torch/deepspeed/universal_z1", f"{UNIVERSAL}/zero/optimizer_state.pt"),
    ("bytecheckpoint/fsdp2", "model/.metadata"),
    ("bytecheckpoint/fsdp2", "optimizer/.metadata"),
    ("megatron/dist/llama_tp2/iter_0000005", ".metadata"),
    ("megatron/dist/llama_tp2/iter_0000005", "common.pt"),
    ("megatron/dist/llama_tp2/iter_0000005", "__0_0.distcp"),
    ("megatron/legacy/qwen3_moe_tp2_ep2", "iter_0000005/mp_rank_00_000/model_optim_rng.pt"),
    ("megatron/legacy/qwen3_moe_tp2_ep2", "iter_0000005/mp_rank_00_000/distrib_optim.pt"),
    ("megatron/nemo/ranks", "mp_rank_01/model_weights.ckpt"),
)
TORCH_BAITS = {
    "getattr": b"\x80\x04cbuiltins\ngetattr\n(cbuiltins\n__import__\nV__call__\ntR(Vos\ntR.",
    "torch.load": b"\x80\x04ctorch\nload\n(X\x06\x00\x00\x00CANARYtR.",
    "torch.save": b"\x80\x04ctorch\nsave\n(K\x01X\x06\x00\x00\x00CANARYtR.",
    "torch.hub": b"\x80\x04ctorch.hub\nload\n(X\x06\x00\x00\x00CANARYtR.",
    "load_library": b"\x80\x04ctorch._ops\nload_library\n(X\x06\x00\x00\x00CANARYtR.",
    "cpp_extension": b"\x80\x04ctorch.utils.cpp_extension\nload_inline\n(X\x06\x00\x00\x00CANARYtR.",
    "numpy.save": b"\x80\x04cnumpy\nsave\n(X\x06\x00\x00\x00CANARYK\x01tR.",
    "runstring": b"\x80\x04cnumpy.testing._private.utils\nrunstring\n(X\x06\x00\x00\x00CANARY}tR.",
    "extension": b"\x80\x04\x82\x01.",
    "of itself": b"\x80\x04]q\x00h\x00a.",
    "dict of itself": b"\x80\x04}q\x00X\x01\x00\x00\x00ah\x00s.",
    "doubling": b"\x80\x04)" + b"2\x86" * 300 + b".",
}
_INSIDE = ("REDUCE", "BUILD", "eval", "nested", "a memo of 2^31", "names that steer")


@pytest.mark.product(one_in=60)
@pytest.mark.parametrize("bait", [*_INSIDE, *TORCH_BAITS])
@pytest.mark.parametrize(("fixture", "name"), FILES, ids=[f"{f}/{n}" for f, n in FILES])
def test_nothing_runs(fixture: str, name: str, bait: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    court = Court(tmp_path)
    path = copy(court, fixture) / name
    data = (BAITS | TORCH_BAITS)[bait]
    path.write_bytes(with_pickle(path.read_bytes(), data) if path.suffix == ".pt" else data)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    judge(court)
    assert not any(work.iterdir())
    assert not [*tmp_path.rglob("CANARY")]


# -- names and paths


def trained(court: Court, name: str, state: str = "exp_avg") -> None:
    """A save of one parameter with one state."""
    fqns = {f"model.{name}": ("model", name), f"optimizer.state.{name}.{state}": ("optimizer", "state", name, state)}
    write_save(court.src, dict.fromkeys(fqns, ("F32", (2, 3), [((0, 0), (2, 3), 0)])), {}, fqns)


ODD = (
    "..",
    ".",
    "a/b",
    "../../x",
    "/etc/x",
    "x\0",
    "\n",
    "\x1b[2J",
    "x" * 300,
    "é" * 200,
    "\ud800",
    "optimizer_state.pt",
)


@SAMPLE
@pytest.mark.parametrize("name", ["", *ODD, "latest_universal", "-rf", "~", "a\\..\\b", "C:\\x"])
def test_names_of_parameters(name: str, tmp_path: Path) -> None:
    """They are names of directories in a universal checkpoint, and carried as they are everywhere else."""
    court = Court(tmp_path)
    trained(court, name)
    judge(court)


@pytest.mark.parametrize("name", ["..", "a/b", "\0", "é" * 200, "\ud800", "optimizer_state.pt"])
def test_no_directory_of_a_universal_checkpoint(name: str, tmp_path: Path) -> None:
    court = Court(tmp_path)
    trained(court, name)
    done = court.run("reshard", court.src, court.dst, "--to", "universal")
    assert done.code == 1
    assert "cannot be the name of a directory" in done.err


@pytest.mark.parametrize("state", ["fp32", "a/b", "\0", "x" * 254])
def test_no_file_of_a_universal_checkpoint(state: str, tmp_path: Path) -> None:
    """fp32.pt is that of the master weights."""
    court = Court(tmp_path)
    trained(court, "w", state)
    done = court.run("reshard", court.src, court.dst, "--to", "universal")
    assert done.code == 1
    assert "cannot be the name of a file" in done.err


_METADATA = "torch.distributed.checkpoint.metadata"


def size(*numbers: Any) -> PickledCall:
    return PickledCall("torch", "Size", (numbers,))


def metadata(court: Court, place: tuple[Any, Any, Any], shape: tuple[Any, ...], *chunks: tuple[Any, Any]) -> None:
    """A save of one tensor, of which all chunks are at one place."""
    write_save(court.src, {"model.w": ("F32", (2, 3), [((0, 0), (2, 3), 0)])})
    layout = PickledCall("torch.serialization", "_get_layout", ("torch.strided",))
    order = PickledCall(_METADATA, "_MEM_FORMAT_ENCODING", (0,))
    said = [Instance(_METADATA, "ChunkStorageMetadata", {"offsets": size(*a), "sizes": size(*n)}) for a, n in chunks]
    tensor = {
        "properties": Stateful(
            _METADATA, "TensorProperties", (Global("torch", "float32"), layout, False, order, False)
        ),
        "size": size(*shape),
        "chunks": said,
    }
    indices = [Instance(_METADATA, "MetadataIndex", {"fqn": "model.w", "offset": size(*a)}) for a, _ in chunks]
    info = dict(zip(("relative_path", "offset", "length"), place, strict=True))
    held = Instance("torch.distributed.checkpoint.filesystem", "_StorageInfo", info)
    fields = {
        "state_dict_metadata": {"model.w": Instance(_METADATA, "TensorStorageMetadata", tensor)},
        "planner_data": {"model.w": ("model", "w")},
        "storage_data": Pairs(lambda: [(i, held) for i in indices]),
        "version": "1.0.0",
    }
    (court.src / ".metadata").write_bytes(plain_pickle(Instance(_METADATA, "Metadata", fields)))


WHOLE = ((2, 3), ((0, 0), (2, 3)))


def test_the_hostile_metadata_is_read_when_nothing_is_wrong(tmp_path: Path) -> None:
    court = Court(tmp_path)
    write_save(court.src, {"model.w": ("F32", (2, 3), [((0, 0), (2, 3), 0)])})
    length = (court.src / "__0_0.distcp").stat().st_size
    metadata(court, ("__0_0.distcp", 0, length), *WHOLE)
    assert court.run("inspect", court.src, "--check").code == 0


@SAMPLE
@pytest.mark.parametrize(
    "path",
    ["../stranger/id_rsa", "/etc/passwd", "..", ".", "", "\0", "x\0y", "./__0_0.distcp", "x" * 5000, "\ud800", "~"],
)
def test_paths_in_storage_data(path: str, tmp_path: Path) -> None:
    court = Court(tmp_path)
    metadata(court, (path, 0, len(SECRET)), *WHOLE)
    assert not {0} & {*judge(court)}


@SAMPLE
@pytest.mark.parametrize(
    ("offset", "length"),
    [(-1, 100), (0, -1), (1 << 62, 100), (0, 1 << 62), (10**30, 5), (0, 10**30), (0.0, 100), (True, 100), (0, 0)],
)
def test_places_that_cannot_be(offset: Any, length: Any, tmp_path: Path) -> None:
    court = Court(tmp_path)
    metadata(court, ("__0_0.distcp", offset, length), *WHOLE)
    assert not {0} & {*judge(court)}


@SAMPLE
@pytest.mark.parametrize(
    ("shape", "chunks"),
    [
        ((1 << 40, 3), [((0, 0), (2, 3))]),
        ((1 << 40, 1 << 40), [((0, 0), (1 << 40, 1 << 40))]),
        ((10**30,), [((0,), (10**30,))]),
        ((-2, -3), [((0, 0), (-2, -3))]),
        ((2, 3), [((-2, 0), (2, 3))]),
        ((2, 3), [((0, -1), (2, 4))]),
        ((2, 3), [((0, 0), (1 << 63, 3))]),
        ((2, 3), [((0, 0), (2, 3, 1))]),
        ((2, 3), [((0,), (2, 3))]),
        ((2, 3), []),
        ((2, 3), [((0, 0), (2, 3)), ((1, 0), (1, 3))]),
        ((2.0, 3), [((0, 0), (2, 3))]),
        ((True, 3), [((0, 0), (1, 3))]),
        ((1,) * 5000, [((0,) * 5000, (1,) * 5000)]),
    ],
)
def test_chunks_that_cannot_be(shape: Any, chunks: Any, tmp_path: Path) -> None:
    court = Court(tmp_path)
    write_save(court.src, {"model.w": ("F32", (2, 3), [((0, 0), (2, 3), 0)])})
    length = (court.src / "__0_0.distcp").stat().st_size
    metadata(court, ("__0_0.distcp", 0, length), shape, *chunks)
    assert not {0} & {*judge(court)}


@SAMPLE
@pytest.mark.parametrize(
    "tag",
    ["../stranger", "..", ".", "/etc", "/", "", "a/b", "TAG\0", "\x1b[2J", "x" * 5000, "TAG\nx", "../src/TAG", "~"],
)
@pytest.mark.parametrize("fixture", ["z3", "universal_z1"])
def test_latest_leads_nowhere_else(fixture: str, tag: str, tmp_path: Path) -> None:
    court = Court(tmp_path)
    copy(court, f"torch/deepspeed/{fixture}")
    name = "latest_universal" if fixture.startswith("universal") else "latest"
    (court.src / name).write_text(tag.replace("TAG", UNIVERSAL if "_" in name else "global_step3"))
    assert not {0} & {*judge(court)}


@SAMPLE
@pytest.mark.parametrize(
    ("place", "target"),
    [
        ("zero", "../../stranger"),
        ("zero/head.weight", "../../../stranger"),
        ("zero/head.weight/fp32.pt", "../../../../stranger/id_rsa"),
        ("zero/head.weight/more.pt", "../../../../stranger/id_rsa"),
        ("zero/loop", "."),
        ("zero/head.weight/fp32.pt", ""),
        ("zero/head.weight/more.pt", ""),
    ],
)
def test_links_and_pipes(place: str, target: str, tmp_path: Path) -> None:
    """A pipe is never waited for; a link may be followed, and what is there is no file of torch.save."""
    court = Court(tmp_path)
    path = copy(court, "torch/deepspeed/universal_z1") / UNIVERSAL / place
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if target:
        path.symlink_to(target)
    else:
        os.mkfifo(path)
    assert not {0} & {*judge(court)} or place.endswith("more.pt"), "only what is no file is no state"


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "config.json"])
def test_pipes_are_not_looked_into_for_imports(name: str, tmp_path: Path) -> None:
    court = Court(tmp_path)
    path = copy(court, "dcp/uneven/checkpoint") / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with watched():
        court.run("inspect", court.src, "--imports")


# -- numbers


def tensors_on(mesh: tuple[Any, ...], at: Any, *placements: Instance, shape: Any = (2, 3), held: Any = (2, 3)) -> Any:
    """A DTensor of a hostile description."""
    tensor = "torch.distributed.tensor"
    layout = Instance("torch.distributed._mesh_layout", "_MeshLayout", {"shape": mesh, "stride": (1,) * len(mesh)})
    device = {"_layout": layout, "_coordinate_on_dim": at, "_device_type": "cpu"}
    spec = {"mesh": Instance("torch.distributed.device_mesh", "DeviceMesh", device), "placements": placements}
    local = {"_local_tensor": Hole("F32", held), "_spec": Instance(f"{tensor}._dtensor_spec", "DTensorSpec", spec)}
    cls = Global(tensor, "DTensor")
    made = (cls, Global("torch", "float32"), size(*shape), (1,) * len(shape), 0)
    wrapper = Global("torch._utils", "_rebuild_wrapper_subclass")
    return PickledCall("torch._tensor", "_rebuild_from_type_v2", (wrapper, cls, made, (None, local)))


def shard(dim: Any, split: Any = None) -> Instance:
    place = "torch.distributed.tensor.placement_types"
    strided = {"dim": dim, "split_factor": split}
    return Instance(place, "Shard", {"dim": dim}) if split is None else Instance(place, "_StridedShard", strided)


@SAMPLE
@pytest.mark.parametrize(
    "value",
    [
        tensors_on((10**12,), (0,), shard(0)),
        tensors_on((1 << 47, 1 << 47), (0, 0), shard(0), shard(0)),
        tensors_on((10**30,), (0,), shard(0)),
        tensors_on((-1,), (0,), shard(0)),
        tensors_on((2,), (10**12,), shard(0)),
        tensors_on((2,), (-1,), shard(0)),
        tensors_on((1,), (0,), shard(10**30)),
        tensors_on((1,), (0,), shard(-1)),
        tensors_on((1,), (0,), shard(0, 10**30)),
        tensors_on((1 << 20,), (0,), shard(0, 1 << 19), shape=(1 << 40,), held=(1 << 19,)),
        tensors_on((1, 1), (0, 0), shard(0, 1 << 19), shard(0, 1 << 19), shape=(1 << 40,), held=(1 << 19,)),
        tensors_on((1,), (0,), shard(0), shape=(1 << 47, 1 << 47)),
        tensors_on((1,), (0,), shard(0), shape=(1,) * 3000),
    ],
)
def test_meshes_of_any_size(value: Any, tmp_path: Path) -> None:
    """No list is made of as many ranks as a mesh says that it has."""
    court = Court(tmp_path)
    (court.src / "model_world_size_1_rank_0.pt").write_bytes(loose_torch({"w": value}))
    assert not {0} & {*judge(court)}


@SAMPLE
@pytest.mark.parametrize(
    "name",
    [
        *("model_world_size_999999999_rank_0.pt", "model_world_size_4_rank_999999999.pt"),
        *("bf16_zero_pp_rank_999999999999_mp_rank_00_optim_states.pt", "consolidated.999999999.pth"),
        *("zero_pp_rank_" + "9" * 200 + "_mp_rank_00_model_states.pt", "__99999999999999.metadata"),
        *("shard-99999-model-99999-of-99999.safetensors", "pytorch_model-00001-of-99999.bin"),
    ],
)
def test_ranks_of_any_number(name: str, tmp_path: Path) -> None:
    court = Court(tmp_path)
    torch_save({"w": WEIGHT}, court.src / name)
    (court.src / "params.json").write_text('{"dim": 4, "n_layers": 1, "n_heads": 2}')
    assert not {0} & {*judge(court)}


STEPS = (math.nan, math.inf, -math.inf, 1e300, -1.0, 3.5, 10**400, 1 << 63, 2**31, None, "3", [3])


@SAMPLE
@pytest.mark.parametrize("step", STEPS, ids=[str(s)[:8] for s in STEPS])
def test_steps(step: Any, tmp_path: Path) -> None:
    """In an optimizer beside a model, in a universal checkpoint, and on the way to Paddle's powers of beta."""
    court = Court(tmp_path)
    torch_save({"a": WEIGHT}, court.src / "pytorch_model.bin")
    group = {"lr": 0.1, "params": [0], "param_names": ["a"], "betas": (0.9, 0.999)}
    torch_save({"state": {0: {"step": step, "exp_avg": WEIGHT}}, "param_groups": [group]}, court.src / "optimizer.pt")
    judge(court)
    code = court.run("reshard", court.src, court.dst, "--to", "flex", "--only", "optimizer").code
    assert code or step in (None, 1e300, 1 << 63, 2**31)  # after so many steps the powers are zero
    shutil.rmtree(court.src)
    for path in copy(court, "torch/deepspeed/universal_z1").glob("*/zero/*/step.pt"):
        torch_save(np.array(step, "<f4") if type(step) is float and abs(step) < 1e9 else step, path)
    judge(court)
    court.run("reshard", court.src, court.dst, "--to", "flex")


@pytest.mark.parametrize("step", [math.nan, math.inf])
def test_a_step_that_is_no_number_has_no_powers(step: float, tmp_path: Path) -> None:
    court = Court(tmp_path)
    for path in copy(court, "torch/deepspeed/universal_z1").glob("*/zero/*/step.pt"):
        torch_save(np.array(step, "<f4"), path)
    done = court.run("reshard", court.src, court.dst, "--to", "flex")
    assert done.code == 1
    assert "is not a number of steps" in done.err


OPTIMIZERS: tuple[dict[str, Any], ...] = (
    {"state": {0: {"exp_avg": WEIGHT}}, "param_groups": [{"params": [10**12]}]},
    {"state": {}, "param_groups": [{"params": list(range(10_000))}]},
    {"state": {0: {"../../x": WEIGHT}}, "param_groups": [{"params": [0]}]},
    {"state": {0: {5: WEIGHT}}, "param_groups": [{"params": [0]}]},
    {"state": {0: {"exp_avg": WEIGHT}}, "param_groups": [{"params": [0], "param_names": ["../../a"]}]},
    {"state": {0: {"exp_avg": WEIGHT}}, "param_groups": [{"params": [0], "param_names": "a"}]},
    {"state": {0: {"exp_avg": WEIGHT}}, "param_groups": [{"params": [0], "betas": (math.inf, 10**400)}]},
    {"state": {0: {"exp_avg": WEIGHT}}, "param_groups": [{"params": [0], "betas": ("a", None)}]},
)


@pytest.mark.product(one_in=2)
@pytest.mark.parametrize("number", range(len(OPTIMIZERS)))
def test_optimizers(number: int, tmp_path: Path) -> None:
    court = Court(tmp_path)
    torch_save({"a": WEIGHT}, court.src / "pytorch_model.bin")
    torch_save(OPTIMIZERS[number], court.src / "optimizer.pt")
    judge(court)
    court.run("reshard", court.src, court.dst, "--to", "flex", "--only", "optimizer")


FIELDS: tuple[tuple[str, tuple[str, ...], tuple[Any, ...]], ...] = (
    ("optim", ("partition_count",), (10**12, -1, 0, 10**400, "3", [3, 10**12], math.nan)),
    ("optim", ("group_paddings",), ([10**12, 0], [-1, 0], [1 << 70, 0], None, "x", [[1]])),
    ("optim", ("param_alignment_paddings",), ([[10**12] * 20] * 2, [[-5] * 20] * 2, None, [["a"]], {})),
    ("optim", ("base_optimizer_state",), (None, 5, [], {"state": 5}, {"state": {0: 5}, "param_groups": 5})),
    (
        "model",
        ("param_shapes",),
        ([{"a": (1 << 40, 1 << 40)}], [{"a": (-1,)}], [{"../../x": (2, 3)}], 5, [{}] * 10_000),
    ),
    ("model", ("module",), (None, 5, [], {}, "x")),
    ("model", ("shared_params",), ({"a": "b"}, 5, [[]], {5: 5})),
    ("model", ("global_steps",), (10**400, -1, math.nan, "x")),
)


@SAMPLE
@pytest.mark.parametrize("fixture", ["z1", "universal_z1"])
@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [(kind, *path, v) for kind, path, values in FIELDS for v in values],
)
def test_fields_of_deepspeed(kind: str, field: str, value: Any, fixture: str, tmp_path: Path) -> None:
    court = Court(tmp_path)

    def change(held: Any) -> None:
        (held["optimizer_state_dict"] if kind == "optim" else held)[field] = value

    for path in copy(court, f"torch/deepspeed/{fixture}").glob(f"*/*{kind}_states.pt"):
        edit(path, change)
    codes = judge(court)
    assert field != "module" or value == {} or 0 not in codes, "weights without a model"


@SAMPLE
@pytest.mark.parametrize(
    "field", ["dim", "n_layers", "n_heads", "n_kv_heads", "norm_eps", "vocab_size", "head_dim", "moe"]
)
@pytest.mark.parametrize(
    "value", [0, -1, 10**12, 10**400, math.nan, "x", [], {"num_experts": 10**12}, "../../x", "\x1b[2J"]
)
def test_params_json(field: str, value: Any, tmp_path: Path) -> None:
    court = Court(tmp_path)
    court.src.rmdir()
    reshard(FIXTURES / "merge/inputs/base", court.src, "--to", "meta", "--tp-out", 2, "-q")
    path = court.src / "params.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    judge(court)


_BYTE = "bytecheckpoint.checkpointer.meta_type"


HOSTILE: dict[str, tuple[Any, ...]] = {
    "all_tensor_metadata": (5, "x", [1], {"a": b"x"}, b"x"),
    "planner_data": (5, "x", [1], {5: 5}, {"w": ()}, {"w": ("v",)}),
    "storage_data": (None, 5, [1], {"a": 5}),
    "state_dict_metadata": (None, 5, [1], {"a": 5}, {5: 5}),
    "offset": ((-1, 0), (1 << 70, 0), (0,), ("a",), [0, 0], {}, None),
    "fqn": ([1], None, {}, 5, "../../x"),
    "form": (b"", b"\x80\x02N.", BAITS["REDUCE"], b"\x80\x02]q\x00h\x00a.", b"(" * 100_000),
}


@SAMPLE
@pytest.mark.parametrize("part", ["model", "optimizer"])
@pytest.mark.parametrize(("field", "value"), [(field, v) for field, values in HOSTILE.items() for v in values])
def test_metadata_of_bytecheckpoint(part: str, field: str, value: Any, tmp_path: Path) -> None:
    court = Court(tmp_path)
    for folder, keys in (("model", ("w",)), ("optimizer", ("state", "w", "exp_avg"))):
        fqn = ".".join(keys)
        hostile = {field: value} if folder == part else {}
        layout = PickledCall("torch.serialization", "_get_layout", ("torch.strided",))
        state = (Global("torch", "float32"), layout, False, PickledCall(_METADATA, "_MEM_FORMAT_ENCODING", (0,)), False)
        chunk = Instance(_METADATA, "ChunkStorageMetadata", {"offsets": size(0, 0), "sizes": size(2, 3)})
        properties = Stateful(_METADATA, "TensorProperties", state)
        tensor = Instance(
            _METADATA,
            "TensorStorageMetadata",
            {"properties": properties, "size": size(2, 3), "chunks": [chunk]},
        )
        info = {"relative_path": "__0_0.distcp", "offset": 0, "length": 24}
        own = {"fqn": hostile.get("fqn", fqn), "offset": hostile.get("offset", size(0, 0)), "index": 0}
        fields = {
            "state_dict_metadata": {fqn: tensor},
            "planner_data": {fqn: keys},
            "storage_data": (
                Instance(_METADATA, "MetadataIndex", {"fqn": fqn, "offset": size(0, 0), "index": 0}),
                Instance("torch.distributed.checkpoint.filesystem", "_StorageInfo", info),
            ),
            "all_tensor_metadata": (
                Instance(_METADATA, "MetadataIndex", own),
                hostile.get("form", loose(Hole("F32", (2, 3)))),
            ),
        } | {k: v for k, v in hostile.items() if k not in ("fqn", "offset", "form")}
        (court.src / folder).mkdir()
        (court.src / folder / ".metadata").write_bytes(loose(Instance(_BYTE, "Metadata", _pairs(fields))))
        (court.src / folder / "__0_0.distcp").write_bytes(bytes(24))
    judge(court)


def _pairs(fields: dict[str, Any]) -> dict[str, Any]:
    """A pair of an instance and a value is a dict of one."""
    return {k: Single(v) if type(v) is tuple else v for k, v in fields.items()}


# -- zips that grow


def test_no_zip_grows(tmp_path: Path) -> None:
    """16 MB of zeros in a few kilobytes: refused by name, wherever they are."""
    court = Court(tmp_path)
    found = members(torch_save({"w": np.zeros((2048, 2048), "<f4")}, tmp_path / "large.bin").read_bytes())
    (tmp_path / "large.bin").unlink()
    small = zipped(found, deflated=next(n for n, _ in found if n.endswith("data/0")))
    assert len(small) < 200_000
    (court.src / "pytorch_model.bin").write_bytes(small)
    with watched():
        done = court.run("reshard", court.src, court.dst, "--to", "hf")
    assert done.code == 1
    assert "is compressed (deflated)" in done.err
    for name in ("optimizer.pt", "scheduler.pt"):
        shutil.rmtree(court.src)
        torch_save({"w": WEIGHT}, court.src / "pytorch_model.bin")
        (court.src / name).write_bytes(small)
        with watched():
            assert court.run("reshard", court.src, court.dst, "--to", "hf").code == 0
    shutil.rmtree(court.src)
    (copy(court, "torch/deepspeed/universal_z1") / UNIVERSAL / "zero/head.weight/fp32.pt").write_bytes(small)
    assert not {0} & {*judge(court)}


def test_a_model_is_whole_whatever_lies_beside_it(tmp_path: Path) -> None:
    court = Court(tmp_path)
    torch_save({"a": WEIGHT}, court.src / "pytorch_model.bin")
    (court.src / "optimizer.pt").write_bytes(BAITS["REDUCE"])
    reshard(court.src, court.dst, "--to", "hf")
    assert header(court.dst / "model.safetensors").keys() - {"__metadata__"} == {"a"}


def test_the_hostile_bytecheckpoint_is_read_when_nothing_is_wrong(tmp_path: Path) -> None:
    test_metadata_of_bytecheckpoint("model", "nothing", 0, tmp_path)
    assert ckpttool("inspect", tmp_path / "src", "--check").code == 0
