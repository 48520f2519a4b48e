"""One file of torch.save for each rank of FSDP, compared with what torch gathers of the same ranks (torch_fsdp)."""

from __future__ import annotations

import shutil
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest

import ckpttool
from ckpttool.checkpoint import open_checkpoint
from ckpttool.containers.pickle import Global, PickledObject
from ckpttool.containers.pickle_write import Hole, PickledCall
from ckpttool.containers.torch_pickle import Storage, TorchTensor
from ckpttool.containers.torch_write import lay_out_torch
from ckpttool.core.catalog import Key
from ckpttool.core.geometry import Box, whole
from ckpttool.errors import ConflictError, CorruptError, UnsupportedError
from ckpttool.formats.torch.numbered import AmbiguousNumber, deal, names_of
from ckpttool.formats.torch.placement import AxisPlacement, boxes_of, parts_of
from tests.formats.test_torch_bin import headers
from tests.helpers.command import ckpttool as command
from tests.helpers.command import refused, reshard
from tests.helpers.sample import some

FIXTURES = Path("fixtures/torch_fsdp")
CASES = {"uneven": 4, "tp_fsdp": 4, "fsdp1": 2}


def held(folder: Path) -> dict[str, Any]:
    return {name: t for path in folder.glob("*.safetensors") for name, t in headers(path).items()}


def copied(case: str, tmp_path: Path) -> Path:
    shutil.copytree(FIXTURES / case, tmp_path / case)
    return tmp_path / case


def write(path: Path, value: Any) -> None:
    """A file of torch.save whose tensors are zeros."""
    laid = lay_out_torch(value, path.stem)
    data = bytearray(laid.size)
    for at, literal in laid.literals:
        data[at : at + len(literal)] = literal
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("case", CASES)
def test_every_component_equals_what_torch_gathers(case: str, tmp_path: Path) -> None:
    done = reshard(FIXTURES / case, tmp_path / "out", "--to", "ranks", "--tp-out", 1)
    assert held(tmp_path / "out") == headers(FIXTURES / f"{case}.safetensors")
    assert "rng" in done.err


def test_boxes_of_uneven_rows() -> None:
    source = ckpttool.open(FIXTURES / "uneven").catalog
    embed = source[Key("embed.weight")]
    assert [(p.stored.rank, str(p.logical_box)) for p in embed.pieces] == [
        (0, "[0:4, 0:6]"), (1, "[4:8, 0:6]"), (2, "[8:12, 0:6]"), (3, "[12:13, 0:6]"),
    ]  # fmt: skip
    assert [(p.stored.rank, str(p.logical_box)) for p in source[Key("norm.weight")].pieces] == [
        (0, "[0:2]"), (1, "[2:4]"), (2, "[4:6]"),
    ]  # fmt: skip
    assert len(source[Key("freqs")].replicas) == 3
    assert len(source[Key("embed.weight", "optimizer", "step")].replicas) == 3


def test_strided_shards() -> None:
    source = ckpttool.open(FIXTURES / "tp_fsdp").catalog
    up = source[Key("layers.0.up.weight")]  # 10 rows: 5 for each of two TP ranks, of which FSDP gives 3 and 2
    assert {p.stored.rank: str(p.logical_box) for p in up.pieces} == {
        0: "[0:3, 0:6]", 1: "[5:8, 0:6]", 2: "[3:5, 0:6]", 3: "[8:10, 0:6]",
    }  # fmt: skip
    down = source[Key("layers.0.down.weight")]
    assert {p.stored.rank: str(p.logical_box) for p in down.pieces} == {
        0: "[0:3, 0:5]", 1: "[0:3, 5:10]", 2: "[3:6, 0:5]", 3: "[3:6, 5:10]",
    }  # fmt: skip


def test_what_a_trainer_resumes_from() -> None:
    training = open_checkpoint(FIXTURES / "uneven").stored.training
    assert training is not None
    (group,) = training.groups
    assert group.parameters == (
        "embed.weight", "layers.0.up.weight", "layers.0.up.bias", "layers.0.down.weight", "norm.weight", "norm.bias",
        "head.weight",
    )  # fmt: skip
    assert group.values["betas"] == (0.9, 0.999)
    assert training.plain == {"lr_scheduler": {"last_epoch": 2, "base_lrs": [0.01]}}
    assert training.left == ("rng",)


def test_a_step_of_verl(tmp_path: Path) -> None:
    """The model of a step is in actor/, its config.json in huggingface/."""
    actor = copied("uneven", tmp_path / "global_step_2").rename(tmp_path / "global_step_2" / "actor")
    (actor / "huggingface").mkdir()
    (actor / "huggingface" / "config.json").write_text('{"vocab_size": 13}', encoding="utf-8")
    (actor / "fsdp_config.json").write_text("{}", encoding="utf-8")
    done = reshard(tmp_path / "global_step_2", tmp_path / "out", "--to", "hf", "--only", "model", "-v")
    assert "actor/" in done.err
    assert "huggingface/" in done.err
    assert not (tmp_path / "out" / "fsdp_config.json").exists()
    assert (tmp_path / "out" / "config.json").is_file()
    shutil.copytree(actor.parent, tmp_path / "run" / "global_step_2")
    shutil.copytree(actor.parent, tmp_path / "run" / "global_step_10")
    mark = tmp_path / "run" / "latest_checkpointed_iteration.txt"
    mark.write_text("2\n", encoding="utf-8")
    assert "global_step_2 is read" in reshard(tmp_path / "run", tmp_path / "a", "--to", "hf").err
    mark.write_text("4\n", encoding="utf-8")
    assert "there is no such save" in refused(tmp_path / "run", tmp_path / "b", "--to", "hf")
    shutil.copytree(actor, actor.parent / "critic")
    assert "2 models" in refused(tmp_path / "global_step_2", tmp_path / "twice", "--to", "hf")


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    source = copied("uneven", tmp_path)
    (source / "optim_world_size_4_rank_2.pt").unlink()
    assert "rank 2" in refused(source, tmp_path / "out", "--to", "hf")
    for path in source.glob("optim*"):
        path.unlink()
    (source / "model_world_size_4_rank_3.pt").unlink()
    assert "1 of 4 rank files are missing: rank 3" in refused(source, tmp_path / "out", "--to", "hf")
    for path in source.glob("model*"):
        path.unlink()
    shutil.copy(FIXTURES / "uneven" / "optim_world_size_4_rank_2.pt", source)
    assert "the files of the model are missing" in refused(source, tmp_path / "out", "--to", "hf")


def test_ranks_that_disagree(tmp_path: Path) -> None:
    source = copied("uneven", tmp_path)
    shutil.copy(source / "model_world_size_4_rank_0.pt", source / "model_world_size_4_rank_3.pt")
    assert "no file holds [12:13, 0:6]" in refused(source, tmp_path / "out", "--to", "hf")
    shutil.copy(FIXTURES / "tp_fsdp" / "model_world_size_4_rank_3.pt", source)
    assert "overlap" in refused(source, tmp_path / "out", "--to", "hf")
    write(source / "model_world_size_4_rank_3.pt", {"freqs": Hole("F32", (4,))})
    assert "`freqs` is [3] in one file and [4] in another" in refused(source, tmp_path / "out", "--to", "hf")
    shutil.copy(FIXTURES / "fsdp1" / "model_world_size_2_rank_1.pt", source)
    assert "different numbers of ranks: 2, 4" in refused(source, tmp_path / "out", "--to", "hf")


def test_replicas_are_compared(tmp_path: Path) -> None:
    source = copied("uneven", tmp_path)
    path = source / "model_world_size_4_rank_1.pt"
    data = bytearray(path.read_bytes())
    at = data.index(b"\x00\x00\x80\x3f\x00\x00\x00\x40")  # freqs: 0, 1, 2
    data[at + 7] = 0x41
    path.write_bytes(bytes(data))
    assert "freqs" in refused(source, tmp_path / "out", "--to", "hf")


@pytest.mark.parametrize("name", ["model_world_size_2_rank_0.pt", "pytorch_model_fsdp_rank0.bin"])
def test_local_state_dicts_are_refused_by_name(name: str, tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    for rank in range(2):
        write(
            source / name.replace("rank_0", f"rank_{rank}").replace("rank0", f"rank{rank}"),
            {"_flat_param": Hole("F32", (84,))},
        )
    said = refused(source, tmp_path / "out", "--to", "hf")
    assert "local state dict of FSDP1" in said
    assert "SHARDED_STATE_DICT" in said


def test_state_of_flat_parameters_is_left_out(tmp_path: Path) -> None:
    """``optimizer.state_dict()`` of FSDP1 has FlatParameters, whatever the model was saved as."""
    source = copied("fsdp1", tmp_path)
    flat = {"step": Hole("F32", ()), "exp_avg": Hole("F32", (84,))}
    for path in source.glob("optim*"):
        write(path, {"state": {0: flat, 1: flat}, "param_groups": [{"params": [0, 1], "lr": 0.1}]})
    said = refused(source, tmp_path / "out", "--to", "ranks", "--tp-out", 1)
    assert "it is that of FlatParameters" in said
    assert "FSDP.optim_state_dict" in said
    done = reshard(source, tmp_path / "out", "--to", "hf")
    assert "the optimizer is not read" in done.err
    wanted = headers(FIXTURES / "fsdp1.safetensors")
    assert held(tmp_path / "out") == {n: t for n, t in wanted.items() if not n.startswith("optimizer/")}
    for path in source.glob("optim*"):
        write(path, {"unused": Hole("F32", (84,))})
    assert "not the state_dict of an optimizer" in refused(source, tmp_path / "again", "--to", "hf")


def test_steps_that_are_plain_numbers(tmp_path: Path) -> None:
    """torch before 1.12 counted in Python's integers."""
    source = tmp_path / "in"
    source.mkdir()
    write(source / "model_world_size_1_rank_0.pt", {"module.w": Hole("F32", (2, 3))})
    state = {"step": 7, "exp_avg": Hole("F32", (2, 3)), "what": "text"}
    groups = [{"params": [0], "lr": 0.1, "betas": (0.9, 0.99)}]
    write(source / "optim_world_size_1_rank_0.pt", {"state": {0: state}, "param_groups": groups})
    done = reshard(source, tmp_path / "out", "--to", "ranks", "--tp-out", 1)
    assert held(tmp_path / "out") == {
        "w": ("F32", (2, 3), bytes(24)),
        "optimizer/w/exp_avg": ("F32", (2, 3), bytes(24)),
        "optimizer/w/step": ("F32", (), b"\x00\x00\xe0\x40"),
    }
    assert "`module.`" in done.err
    assert "optimizer/w/what" in done.err


def test_a_full_state_dict_of_accelerate(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    write(source / "pytorch_model_fsdp.bin", {"w": Hole("F32", (2, 3))})
    reshard(source, tmp_path / "out", "--to", "hf")
    assert held(tmp_path / "out") == {"w": ("F32", (2, 3), bytes(24))}


def test_nothing_of_a_pickle_is_executed(tmp_path: Path) -> None:
    source = copied("fsdp1", tmp_path)
    write(source / "extra_state_world_size_2_rank_0.pt", {"hook": PickledCall("os", "system", ("touch canary",))})
    assert "os.system" in refused(source, tmp_path / "out", "--to", "hf")
    assert not Path("canary").exists()


def test_only_read(tmp_path: Path) -> None:
    assert "--to dcp" in refused(FIXTURES / "uneven", tmp_path / "out", "--to", "fsdp")
    assert command("inspect", FIXTURES / "tp_fsdp", "--check").code == 0


# -- boxes


def test_fsdp_on_top_of_tp_holds_what_each_tp_rank_has() -> None:
    """Whatever the sizes: a TP rank has its chunk, and FSDP's ranks chunks of that."""
    for rows, dp, tp, i, j in product(range(1, 14), range(2, 5), range(2, 4), range(4), range(3)):
        if i >= dp or j >= tp:
            continue
        at = (i, j)
        _, boxes = boxes_of((rows,), (dp, tp), at, (AxisPlacement(0, tp), AxisPlacement(0)))
        outer = -(-rows // tp)
        lo, hi = min(rows, at[1] * outer), min(rows, (at[1] + 1) * outer)
        inner = -(-(hi - lo) // dp)
        start, stop = min(hi, lo + at[0] * inner), min(hi, lo + (at[0] + 1) * inner)
        assert [b for _, b in boxes] == ([Box((start,), (stop,))] if start < stop else []), (rows, dp, tp, at)


def test_a_strided_shard_by_itself_has_several_boxes() -> None:
    """torch's own example: nine rows, split factor 2, four ranks."""
    placements = (AxisPlacement(0, 2),)
    found = [boxes_of((9,), (4,), (r,), placements) for r in range(4)]
    rows = [[i for _, b in boxes for i in range(b.start[0], b.stop[0])] for _, boxes in found]
    assert rows == [[0, 1, 5], [2, 3, 6], [4, 7], [8]]
    assert [str(a) for a, _ in found[0][1]] == ["[0:2]", "[2:3]"]


def test_left_to_right_unless_an_order_is_said() -> None:
    placements = (AxisPlacement(0), AxisPlacement(0))
    assert str(boxes_of((8,), (2, 2), (0, 1), placements)[1][0][1]) == "[2:4]"
    assert str(boxes_of((8,), (2, 2), (0, 1), placements, ((0, (1, 0)),))[1][0][1]) == "[4:6]"


# -- what other versions of torch write

LOCAL = TorchTensor("F32", Storage("F32", "0", 12), 0, (2, 3), (3, 1))


def dtensor(module: str, mesh: dict[str, Any], placements: list[PickledObject], local: Any = LOCAL) -> PickledObject:
    cls = Global(module, "DTensor")
    spec = {"mesh": PickledObject("x.DeviceMesh", mesh), "placements": tuple(placements), "tensor_meta": None}
    slots = {"_local_tensor": local, "_spec": PickledObject("x.DTensorSpec", spec)}
    arguments = (cls, Global("torch", "float32"), (4, 3), (3, 1), 0, None, None, False)
    return PickledObject(
        "torch._tensor._rebuild_from_type_v2",
        {"args": (Global("torch._utils", "_rebuild_wrapper_subclass"), cls, arguments, (None, slots))},
    )


def shard(dim: int, **more: Any) -> PickledObject:
    return PickledObject(
        "torch.distributed.tensor.placement_types." + ("_StridedShard" if more else "Shard"), {"dim": dim, **more}
    )


RANKS = TorchTensor("I64", Storage("I64", "1", 4), 0, (2, 2), (2, 1))
LAYOUTS: dict[str, dict[str, Any]] = {
    "2.1 to 2.9": {"mesh": RANKS, "_coordinate_on_dim": [1, 0], "_flatten_mesh_list": (0, 1, 2, 3)},
    "2.10": {
        "_layout": PickledObject("x._MeshLayout", {"shape": (2, 2), "stride": (2, 1)}),
        "_coordinate_on_dim": (1, 0),
    },
    "2.13": {
        "_layout": PickledObject(
            "x._MeshLayout",
            {"axes": tuple(PickledObject("x._FlatLayout", {"shape": (2,), "stride": (n,)}) for n in (2, 1))},
        ),
        "_coordinate_on_dim": (1, 0),
    },
}  # fmt: skip


@pytest.mark.parametrize("version", LAYOUTS)
@pytest.mark.parametrize("module", ["torch.distributed._tensor.api", "torch.distributed.tensor"])
def test_meshes_of_all_versions(version: str, module: str) -> None:
    placed = [shard(0), PickledObject("torch.distributed._tensor.placement_types.Replicate", {})]
    parts = parts_of(dtensor(module, LAYOUTS[version], placed), "w", "file")
    assert parts is not None
    (part,) = parts
    assert part.shape == (4, 3)
    assert part.boxes == ((whole((2, 3)), Box((2, 0), (4, 3))),)


def test_placements_that_hold_no_boxes_are_refused() -> None:
    mesh = LAYOUTS["2.10"]
    partial = PickledObject("torch.distributed.tensor.placement_types.Partial", {"reduce_op": "sum"})
    with pytest.raises(UnsupportedError, match="placed as Partial"):
        parts_of(dtensor("torch.distributed.tensor", mesh, [shard(0), partial]), "w", "file")
    with pytest.raises(ConflictError, match=r"holds \[2, 3\] of `w` \[4, 3\], its placements say \[1, 3\]"):
        parts_of(dtensor("torch.distributed.tensor", mesh, [shard(0), shard(0)]), "w", "file")
    with pytest.raises(UnsupportedError, match=r"before 2\.5"):
        parts_of(dtensor("torch.distributed._tensor.api", mesh, [shard(0), shard(0)]), "w", "file")
    with pytest.raises(UnsupportedError, match="not a plain tensor"):
        parts_of(dtensor("torch.distributed.tensor", mesh, [shard(0)], PickledObject("x.Float8", {})), "w", "file")
    for broken in ([shard(7), shard(0)], [shard(0)], [shard(0, split_factor=0), shard(0)]):
        with pytest.raises(CorruptError, match="not that of a DTensor"):
            parts_of(dtensor("torch.distributed.tensor", mesh, broken), "w", "file")


# -- numbers of parameters


def test_numbers_follow_the_model() -> None:
    model = [("a", (2, 2)), ("b", (2,)), ("c", (2, 2)), ("d", (2,))]
    assert names_of([[(0, (2, 2)), (1, (2,)), (2, None), (3, (2,))]], model, [0, 1, 3]) == dict(enumerate("abcd"))
    decayed, others = [(0, (2, 2)), (1, (2, 2))], [(2, (2,)), (3, (2,))]
    assert names_of([decayed, others], model, range(4)) == {0: "a", 1: "c", 2: "b", 3: "d"}
    assert names_of([decayed], model, [0, 1]) == {0: "a", 1: "c"}  # the others are frozen


def test_numbers_that_may_stand_for_two_are_not_guessed() -> None:
    model = [("a", (2, 2)), ("b", (2,)), ("c", (2, 2)), ("d", (2,))]
    assert names_of([[(0, (2, 2))]], model, [0]) is None
    assert names_of([[(0, (2, 2))], [(1, (2, 2))]], model, [0, 1]) is None
    assert names_of([[(0, (3,))]], model, [0]) is None
    assert names_of([[(i, None) for i in range(5)]], model, []) is None
    assert names_of([[(0, (2, 2)), (1, (2, 2)), (2, None)]], model, [0, 1]) == {0: "a", 1: "c", 2: "d"}
    assert names_of([[(0, (2, 2)), (1, None), (2, (2, 2))]], model, [0, 2]) == {0: "a", 1: "b", 2: "c"}
    assert names_of([[(0, None), (1, None)]], model, []) == {}  # without state, it need not be known
    assert deal([[(0, (2, 2)), (1, None)]], model, [1]) == AmbiguousNumber(1, None, "b", "d")
    assert deal([[(0, (3,))]], model, [0]) == AmbiguousNumber(0, (3,), "", "")
    many = [(f"p{i}", (2,)) for i in range(5000)]
    assert (
        names_of([[(i, (2,)) for i in range(2500)], [(i, (2,)) for i in range(2500, 5000)]], many, range(5000)) is None
    )


def test_a_name_is_given_only_where_every_way_gives_it() -> None:
    """Against all ways to deal a few parameters out to groups."""
    random = Random(7)  # noqa: S311 - the same cases in every run
    sure = 0
    for _ in range(some(2000, 60)):
        model = [(name, (random.randint(2, 3),)) for name in "abcdef"[: random.randint(2, 6)]]
        places = [random.randint(-1, 1) for _ in model]
        groups: list[list[tuple[int | str, tuple[int, ...] | None]]] = [[], []]
        for number, (g, (_, shape)) in enumerate(zip(places, model, strict=True)):
            if g >= 0:
                groups[g].append((number, shape if random.random() < 0.9 else None))
        held = {n for g in groups for n, shape in g if shape is not None}
        found = deal([g for g in groups if g], model, held)
        ways = []
        for deals in product((-1, 0, 1), repeat=len(model)):
            mine = [[m for m, d in zip(model, deals, strict=True) if d == g] for g in (0, 1)]
            if [len(m) for m in mine] != [len(g) for g in groups]:
                continue
            pairs = [pair for a, b in zip(mine, groups, strict=True) for pair in zip(a, b, strict=True)]
            if all(said in (None, shape) for (_, shape), (_, said) in pairs):
                ways.append({number: name for (name, _), (number, _) in pairs})
        if isinstance(found, dict):
            sure += bool(held)
            assert all(way[n] == found[n] for way in ways for n in held)
        else:
            assert not found.unfit
    assert sure > 5
