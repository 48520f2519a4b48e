"""torch.distributed.checkpoint: what torch and torchtitan wrote, and saves that are put together without torch."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ckpttool.checkpoint import Checkpoint, OpenOptions, open_checkpoint
from ckpttool.containers.torch_zip import TorchSlices, read_torch
from ckpttool.errors import CorruptError
from ckpttool.formats.base import ReadOptions
from ckpttool.formats.torch.dcp_metadata import read_metadata
from ckpttool.storage.place import open_file
from tests.helpers.command import refused, reshard
from tests.helpers.dcp import Boxes, rows, write_save

FIXTURES = Path("fixtures/dcp")
Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


def tensors(directory: Path) -> Tensors:
    """All of a directory's safetensors."""
    out: Tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        data = path.read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        for name, t in json.loads(data[8:begin]).items():
            if name != "__metadata__":
                a, b = t["data_offsets"]
                out[name] = t["dtype"], tuple(t["shape"]), data[begin + a : begin + b]
    return out


def checkpoint(path: Path, select: str = "") -> Checkpoint:
    return open_checkpoint(path, OpenOptions(mesh=ReadOptions(select=select)))


@pytest.mark.parametrize("name", ["uneven", "hsdp2x2_llama", "titan_llama3", "hf_mixtral"])
def test_models_that_torch_saved(name: str, tmp_path: Path) -> None:
    """Every box of HSDP, two axes cut, an axis cut twice, ranks that hold nothing, 0-d, empty; torchtitan's names."""
    options = ("--family", "llama") if name == "titan_llama3" else ()
    reshard(FIXTURES / name / "checkpoint", tmp_path / "out", "--to", "hf", *options)
    assert tensors(tmp_path / "out") == tensors(FIXTURES / name)


@pytest.mark.parametrize("name", ["hsdp2x2_llama", "titan_llama3"])
def test_states_that_torch_saved(name: str, tmp_path: Path) -> None:
    reshard(FIXTURES / name / "checkpoint", tmp_path / "out", "--to", "ranks", "--tp-out", 1)
    got, wanted = tensors(tmp_path / "out"), json.loads((FIXTURES / name / "state.json").read_text())
    states = {k: v for k, v in got.items() if k.startswith("optimizer/")}
    assert len(states) == sum(map(len, wanted.values()))
    for state, said in wanted.items():
        for parameter, (dtype, shape, digest) in {k: v for k, v in said.items() if state != "step"}.items():
            found = states[f"optimizer/{parameter}/{state}"]
            assert (found[0], list(found[1]), hashlib.sha256(found[2]).hexdigest()) == (dtype, shape, digest)


def test_what_a_trainer_resumes_from() -> None:
    """Groups of parameters, by number and flattened; numbers in tensors; what is left out has a name."""
    hsdp = checkpoint(FIXTURES / "hsdp2x2_llama" / "checkpoint")
    training = hsdp.stored.training
    assert training is not None
    (group,) = training.groups
    assert len(group.parameters) == 21
    assert group.values["betas"] == (0.9, 0.999)
    assert "params" not in group.values
    assert training.plain == {"step": 2, "lr": 1e-3, "note": "text"}
    assert any("skipped, not part of the model or its state: rng" in n for n in hsdp.notes)
    titan = checkpoint(FIXTURES / "titan_llama3" / "checkpoint").stored.training
    assert titan is not None
    (group,) = titan.groups
    assert group.values == {"lr": 1e-3, "betas": (0.9, 0.95)}
    assert len(group.parameters) == 21
    assert titan.plain == {"train_state.step": 5, "train_state.ntokens_seen": 320, "lr_scheduler.last_epoch": 5}


NAME = "model.layers.0.mlp.up_proj.weight"
HEAD = "lm_head.weight"


def saved(path: Path, names: Mapping[str, tuple[str | int, ...]], objects: Mapping[str, Any] | None = None) -> Path:
    """A save of [6, 4] tensors over four ranks under these paths."""
    paths = {**names, **{f: (f,) for f in objects or {}}}
    write_save(path, {f: ("F32", (6, 4), rows((6, 4), 4)) for f in names}, objects, paths)
    return path


def opened(path: Path, select: str = "") -> set[str]:
    return {str(k) for k in checkpoint(path, select).catalog.tensors}


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        ({f"model.{NAME}": ("model", NAME), f"model.{HEAD}": ("model", HEAD)}, {NAME, HEAD}),
        ({f"app.model.{NAME}": ("app", "model", NAME)}, {NAME}),
        ({NAME: (NAME,), HEAD: (HEAD,)}, {NAME, HEAD}),
        ({f"model.{NAME}": (f"model.{NAME}",), f"model.{HEAD}": (f"model.{HEAD}",)}, {NAME, HEAD}),
        (
            {
                f"app.model.{NAME}": ("app", "model", NAME),
                f"app.optim.state.{NAME}.exp_avg": ("app", "optim", f"state.{NAME}.exp_avg"),
            },
            {NAME, f"optimizer/{NAME}/exp_avg"},
        ),
        (
            {f"net.{NAME}": (f"net.{NAME}",), f"optimizer.state.{NAME}.exp_avg": (f"optimizer.state.{NAME}.exp_avg",)},
            {NAME, f"optimizer/{NAME}/exp_avg"},
        ),
        (
            {
                f"model._orig_mod.{NAME}": ("model", f"_orig_mod.{NAME}"),
                f"master_weights.{NAME}": ("master_weights", NAME),
                f"ema.{NAME}": ("ema", NAME),
                f"optimizer.state._orig_mod.{NAME}.exp_avg": ("optimizer", "state", f"_orig_mod.{NAME}", "exp_avg"),
            },
            {NAME, f"master_weights/{NAME}", f"ema/{NAME}", f"optimizer/{NAME}/exp_avg"},
        ),
        (
            {NAME: (NAME,), f"state.{NAME}.exp_avg": (f"state.{NAME}.exp_avg",)},
            {NAME, f"optimizer/{NAME}/exp_avg"},
        ),
        (
            {"state.encoder.weight": ("state.encoder.weight",), "head.weight": ("head.weight",)},
            {"state.encoder.weight", "head.weight"},
        ),
    ],
    ids=["nested", "app", "flat", "old, no paths", "flattened optimizer", "flat, prefix of the optimizer", "wrapped",
         "all without a prefix", "a module called state"],
)  # fmt: skip
def test_names(names: Mapping[str, tuple[str | int, ...]], wanted: set[str], tmp_path: Path) -> None:
    assert opened(saved(tmp_path / "save", names)) == wanted


def test_a_path_that_is_not_the_name_is_refused(tmp_path: Path) -> None:
    """torch joins the one to the other; a damaged one would give a state to another parameter, or to none."""
    with pytest.raises(CorruptError, match=r"the path of `model\.a` leads to `model\.b`"):
        opened(saved(tmp_path / "save", {"model.a": ("model", "b"), "model.c": ("model", "c")}))


def test_a_path_that_is_missing_is_refused(tmp_path: Path) -> None:
    """Without it a weight would not be one of the model, whose other weights have paths."""
    box = [((0,), (2,), 0)]
    write_save(tmp_path, dict.fromkeys(("model.a", "model.b"), ("F32", (2,), box)), paths={"model.a": ("model", "a")})
    with pytest.raises(CorruptError, match=r"no path of `model\.b`"):
        opened(tmp_path)


def test_several_models(tmp_path: Path) -> None:
    """None is guessed; the state of the other model's optimizer stays out."""
    names: dict[str, tuple[str | int, ...]] = {}
    for part in ("generator", "critic"):
        name = f"{part}.body.weight"
        names[f"{part}.{name}"] = (part, name)
        names[f"optim_{part}.state.{name}.exp_avg"] = (f"optim_{part}", "state", name, "exp_avg")
    path = saved(tmp_path / "save", names)
    error = refused(path, tmp_path / "out", "--to", "hf")
    assert "2 models: `generator`, `critic`" in error
    assert "--select generator" in error
    wanted = {"critic.body.weight", "optimizer/critic.body.weight/exp_avg"}
    assert opened(path, "critic") == wanted
    assert opened(path, ".") == set(names)
    assert "no tensors lie in `judge`" in refused(path, tmp_path / "out", "--to", "hf", "--select", "judge", code=2)


def test_a_step_that_is_a_number(tmp_path: Path) -> None:
    """State of a parameter that is no tensor becomes one."""
    names: dict[str, tuple[str | int, ...]] = {
        f"model.{NAME}": ("model", NAME),
        f"optimizer.state.{NAME}.exp_avg": ("optimizer", "state", NAME, "exp_avg"),
    }
    step = f"optimizer.state.{NAME}.step"
    saved(tmp_path / "save", names, {step: 7})
    paths = {**names, step: ("optimizer", "state", NAME, "step")}
    write_save(tmp_path / "save", {f: ("F32", (6, 4), rows((6, 4), 4)) for f in names}, {step: 7}, paths)
    reshard(tmp_path / "save", tmp_path / "out", "--to", "ranks", "--tp-out", 1)
    found = tensors(tmp_path / "out")[f"optimizer/{NAME}/step"]
    assert found == ("F32", (), b"\x00\x00\xe0\x40")


MODEL: dict[str, tuple[str | int, ...]] = {f"model.{NAME}": ("model", NAME)}


@pytest.mark.parametrize(
    ("value", "wanted"),
    [(3, ("F32", struct.pack("<f", 3))), (2**24 + 1, ("I64", struct.pack("<q", 2**24 + 1))),
     (0.1, ("F64", struct.pack("<d", 0.1))), (2**70 + 1, None)],
)  # fmt: skip
def test_numbers_that_are_state_are_exact(value: float, wanted: tuple[str, bytes] | None, tmp_path: Path) -> None:
    """They are float32 where that holds them."""
    names = {f"model.{NAME}": ("model", NAME), f"optimizer.state.{NAME}.rho": ("optimizer", "state", NAME, "rho")}
    described = {f"model.{NAME}": ("F32", (6, 4), rows((6, 4), 4))}
    write_save(tmp_path / "save", described, {f"optimizer.state.{NAME}.rho": value}, names)
    reshard(tmp_path / "save", tmp_path / "out", "--to", "ranks", "--tp-out", 1)
    found = tensors(tmp_path / "out").get(f"optimizer/{NAME}/rho")
    assert (found and (found[0], found[2])) == wanted


def test_an_optimizer_alone_without_a_prefix(tmp_path: Path) -> None:
    """It is no model, and what is written has the keys that the trainer looks for."""
    for name, states, group in (
        ("flattened", {f"state.{NAME}.exp_avg": (f"state.{NAME}.exp_avg",)}, f"param_groups.{NAME}.lr"),
        ("nested", {f"state.{NAME}.exp_avg": ("state", NAME, "exp_avg")}, "param_groups.0.lr"),
    ):
        path = tmp_path / name
        lr = (group,) if name == "flattened" else ("param_groups", 0, "lr")
        described = {f: ("F32", (6, 4), rows((6, 4), 4)) for f in states}
        write_save(path, described, {group: 0.5}, {**states, group: lr})
        assert opened(path) == {f"optimizer/{NAME}/exp_avg"}
        assert "only optimizer" in refused(path, tmp_path / "hf", "--to", "hf", code=2)
        reshard(path, tmp_path / f"{name}-out", "--to", "dcp")
        kept = {e.fqn: e.path for e in read_metadata(tmp_path / f"{name}-out" / ".metadata", lambda _: 0)}
        assert kept.items() >= {**states, group: lr}.items()


def test_an_optimizer_beside_numbers_alone(tmp_path: Path) -> None:
    """A counter is no model, which the state would have to belong to."""
    states = {f"optim.state.{NAME}.exp_avg": ("optim", "state", NAME, "exp_avg"), "epoch": ("epoch",)}
    described = {f: ("F32", (6, 4), rows((6, 4), 4)) if "." in f else ("F32", (), [((), (), 0)]) for f in states}
    write_save(tmp_path / "save", described, {}, states)
    assert opened(tmp_path / "save") == {f"optimizer/{NAME}/exp_avg"}


def test_parameters_that_are_numbered(tmp_path: Path) -> None:
    """They have the order of the state dict, whoever wrote which of them; what is written keeps the numbers."""
    model = {f"model.{n}": ("model", n) for n in ("b.weight", "a.weight", "c.weight")}
    states = {f"optim.state.{i}.exp_avg": ("optim", "state", str(i), "exp_avg") for i in range(2)}
    described = {f: ("F32", (6, 4), rows((6, 4), 4)) for f in sorted({**model, **states})}
    described["model.c.weight"] = ("F32", (2, 4), rows((2, 4), 1))
    params, step = "optim.param_groups.0.params", "optim.state.0.step"
    paths = {**model, **states, params: ("optim", "param_groups", 0, "params"), step: ("optim", "state", "0", "step")}
    write_save(tmp_path / "save", described, {params: [0, 1], step: 3}, paths)
    found = checkpoint(tmp_path / "save")
    wanted = {"b.weight", "a.weight", "c.weight", "optimizer/b.weight/exp_avg", "optimizer/a.weight/exp_avg"}
    assert {str(k) for k in found.catalog.tensors} == wanted | {"optimizer/b.weight/step"}
    assert found.stored.training is not None
    assert found.stored.training.groups[0].parameters == ("b.weight", "a.weight")
    reshard(tmp_path / "save", tmp_path / "out", "--to", "dcp")
    assert {e.fqn: e.path for e in read_metadata(tmp_path / "out" / ".metadata", lambda _: 0)} == paths

    described["model.c.weight"] = described["model.b.weight"]
    names = "optim.param_groups.0.param_names"
    said = {params: [0, 1], step: 3, names: ["c.weight", "a.weight"]}
    write_save(tmp_path / "named", described, said, {**paths, names: ("optim", "param_groups", 0, "param_names")})
    assert {"optimizer/c.weight/exp_avg", "optimizer/a.weight/exp_avg"} <= opened(tmp_path / "named")
    write_save(tmp_path / "doubt", described, {params: [0, 1], step: 3}, paths)
    assert opened(tmp_path / "doubt") == {"b.weight", "a.weight", "c.weight"}
    error = refused(tmp_path / "doubt", tmp_path / "no", "--to", "ranks", "--tp-out", 1)
    assert "nothing says whose state the optimizer has" in error
    reshard(tmp_path / "doubt", tmp_path / "only", "--to", "hf", "--only", "model")


def test_several_optimizers(tmp_path: Path) -> None:
    """Each keeps its parameters, groups and keys: those of Muon for matrices and of Adam for the rest."""
    paths: dict[str, tuple[str | int, ...]] = {f"model.{n}": ("model", n) for n in ("a.weight", "b.weight")}
    values: dict[str, Any] = {}
    for i, (name, state, lr) in enumerate((("a.weight", "momentum_buffer", 0.5), ("b.weight", "exp_avg", 0.25))):
        paths[f"optims.{i}.state.{name}.{state}"] = ("optims", i, "state", name, state)
        for key, value in (("lr", lr), ("params", [name]), ("param_names", [name])):
            paths[f"optims.{i}.param_groups.0.{key}"] = ("optims", i, "param_groups", 0, key)
            values[f"optims.{i}.param_groups.0.{key}"] = value
    described = {f: ("F32", (6, 4), rows((6, 4), 4)) for f in paths if f not in values}
    write_save(tmp_path / "save", described, values, paths)
    training = checkpoint(tmp_path / "save").stored.training
    assert training is not None
    assert [(g.parameters, g.values) for g in training.groups] == [
        (("a.weight",), {"lr": 0.5}),
        (("b.weight",), {"lr": 0.25}),
    ]
    reshard(tmp_path / "save", tmp_path / "out", "--to", "dcp")
    assert {e.fqn for e in read_metadata(tmp_path / "out" / ".metadata", lambda _: 0)} == paths.keys()
    assert checkpoint(tmp_path / "out").stored.training == training


def test_optimizers_of_several_models_with_the_same_names(tmp_path: Path) -> None:
    """What --select chooses is beside its optimizer; where it is not, the optimizer is refused and the model read."""
    paths: dict[str, tuple[str | int, ...]] = {}
    values: dict[str, Any] = {}
    for part, lr in (("actor", 0.5), ("critic", 0.25)):
        paths |= {f"{part}.model.a.weight": (part, "model", "a.weight")}
        paths |= {f"{part}.optim.state.a.weight.exp_avg": (part, "optim", "state", "a.weight", "exp_avg")}
        paths |= {f"{part}.optim.param_groups.0.lr": (part, "optim", "param_groups", 0, "lr")}
        values[f"{part}.optim.param_groups.0.lr"] = lr
    described = {f: ("F32", (6, 4), rows((6, 4), 4)) for f in paths if f not in values}
    write_save(tmp_path / "save", described, values, paths)
    for part, lr in (("actor", 0.5), ("critic", 0.25)):
        found = checkpoint(tmp_path / "save", f"{part}.model")
        assert {str(k) for k in found.catalog.tensors} == {"a.weight", "optimizer/a.weight/exp_avg"}
        assert found.stored.training is not None
        assert [g.values for g in found.stored.training.groups] == [{"lr": lr}]
    paths = {f: p for f, p in paths.items() if ".model." not in f} | {"net.a.weight": ("net", "a.weight")}
    described["net.a.weight"] = described["actor.model.a.weight"]
    described = {f: d for f, d in described.items() if f in paths}
    write_save(tmp_path / "doubt", described, values, paths)
    assert opened(tmp_path / "doubt") == {"a.weight"}
    assert "parameters of the same names" in refused(tmp_path / "doubt", tmp_path / "no", "--to", "ranks")


def test_runs_and_parts(tmp_path: Path) -> None:
    """The highest finished step of a run; several directories that are one save; a mark decides."""
    run = tmp_path / "run"
    for step in (9, 100, 20):
        saved(run / f"step-{step}", MODEL)
    (run / "step-200").mkdir()
    shutil.copy(run / "step-9" / "__0_0.distcp", run / "step-200")
    found = checkpoint(run)
    assert str(found.stored.root) == str(run / "step-100")
    assert any("step-100 is read, the highest number of 3 finished saves" in n for n in found.notes)
    (run / "latest").write_text("step-20\n")
    assert str(checkpoint(run).stored.root) == str(run / "step-20")
    (run / "latest").write_text("step-300")
    assert "latest names `step-300`" in refused(run, tmp_path / "out", "--to", "hf")
    trainer = tmp_path / "trainer" / "checkpoint-7"
    saved(trainer / "pytorch_model_fsdp_0", MODEL)
    saved(trainer / "optimizer_0", {f"optimizer.state.{NAME}.exp_avg": ("optimizer", "state", NAME, "exp_avg")})
    (trainer / "scheduler.pt").write_bytes(b"")
    assert opened(trainer) == opened(tmp_path / "trainer") == {NAME, f"optimizer/{NAME}/exp_avg"}
    saved(tmp_path / "two" / "best", MODEL)
    saved(tmp_path / "two" / "last", MODEL)
    assert "give the directory of one" in refused(tmp_path / "two", tmp_path / "out", "--to", "hf")
    saved(tmp_path / "apart" / "model", MODEL)
    saved(tmp_path / "apart" / "run" / "step-1", {"b": ("b",)})
    assert "there are 2 saves here" in refused(tmp_path / "apart", tmp_path / "out", "--to", "hf")
    saved(tmp_path / "mixed" / "step-1", MODEL)
    saved(tmp_path / "mixed" / "step-2", MODEL)
    saved(tmp_path / "mixed" / "best", MODEL)
    assert "there are 3 saves here" in refused(tmp_path / "mixed", tmp_path / "out", "--to", "hf")


def test_one_file_of_a_save(tmp_path: Path) -> None:
    save = saved(tmp_path / "save", MODEL)
    assert opened(save / ".metadata") == {NAME}
    error = refused(save / "__0_0.distcp", tmp_path / "out", "--to", "hf", code=2)
    assert f"give their directory: {save}" in error


def test_metadata_of_each_rank(tmp_path: Path) -> None:
    """A save without collectives: every rank says its own chunks."""
    parts = rows((6, 4), 3)
    whole = [((0,), (5,), r) for r in range(3)]
    for r in range(3):
        write_save(tmp_path / f"r{r}", {NAME: ("F32", (6, 4), [parts[r]]), "b": ("F32", (5,), [whole[r]])})
        (tmp_path / f"r{r}" / ".metadata").rename(tmp_path / f"r{r}" / f"__{r}.metadata")
        (tmp_path / "save").mkdir(exist_ok=True)
        for name in (f"__{r}.metadata", f"__{r}_0.distcp"):
            shutil.copy(tmp_path / f"r{r}" / name, tmp_path / "save")
    assert opened(tmp_path / "save") == {NAME, "b"}
    (tmp_path / "save" / "__1.metadata").unlink()
    assert "no file holds [2:4, 0:4]" in refused(tmp_path / "save", tmp_path / "out", "--to", "hf")


def broken(path: Path, boxes: Boxes, shape: tuple[int, ...] = (6, 4)) -> Path:
    write_save(path, {NAME: ("F32", shape, boxes)})
    return path


def test_chunks_that_do_not_fit(tmp_path: Path) -> None:
    out = tmp_path / "out"
    hole = broken(tmp_path / "hole", rows((6, 4), 3)[:2])
    assert "no file holds [4:6, 0:4]" in refused(hole, out, "--to", "hf")
    overlap = broken(tmp_path / "overlap", [((0, 0), (4, 4), 0), ((3, 0), (3, 4), 1)])
    assert "overlap" in refused(overlap, out, "--to", "hf")
    outside = broken(tmp_path / "outside", [((0, 0), (7, 4), 0)])
    assert "which is not inside" in refused(outside, out, "--to", "hf")
    missing = broken(tmp_path / "missing", rows((6, 4), 3))
    (missing / "__2_0.distcp").unlink()
    assert "__2_0.distcp is missing" in refused(missing, out, "--to", "hf")
    short = broken(tmp_path / "short", rows((6, 4), 3))
    data = (short / "__1_0.distcp").read_bytes()
    (short / "__1_0.distcp").write_bytes(data[:-1])
    assert "the file has" in refused(short, out, "--to", "hf")
    other = broken(tmp_path / "other", rows((6, 4), 3))
    shutil.copy(broken(tmp_path / "wide", rows((12, 2), 3), (12, 2)) / "__1_0.distcp", other)
    assert "and it is F32 [4, 2]" in refused(other, out, "--to", "hf")
    unfinished = broken(tmp_path / "unfinished", rows((6, 4), 3))
    (unfinished / ".metadata").rename(unfinished / ".metadata.tmp")
    assert "the save was not finished" in refused(unfinished, out, "--to", "hf")


def test_others_of_these_names(tmp_path: Path) -> None:
    """Megatron's directories have the same files; metadata of another class, or with a path, is refused."""
    save = broken(tmp_path / "save", rows((6, 4), 3))
    (save / "common.pt").write_bytes(b"")
    (save / "metadata.json").write_text("{}")
    assert "common.pt" in refused(save, tmp_path / "out", "--to", "hf")
    (save / "common.pt").unlink()
    data = (save / ".metadata").read_bytes()
    (save / ".metadata").write_bytes(data.replace(b"__0_0.distcp", b"../_0.distcp"))
    assert "../_0.distcp is missing" in refused(save, tmp_path / "out", "--to", "hf")
    (save / ".metadata").write_bytes(data.replace(b"torch.distributed", b"paper.distributed"))
    assert "not the metadata of torch.distributed.checkpoint" in refused(save, tmp_path / "out", "--to", "hf")


def test_transformed_chunks_are_refused(tmp_path: Path) -> None:
    save = broken(tmp_path / "save", rows((6, 4), 1))
    data = (save / ".metadata").read_bytes()
    word = b"\x8c\x06length\x94"
    assert data.count(word) == 1
    extra = b"\x8c\x15transform_descriptors](\x8c\x04zstde"
    (save / ".metadata").write_bytes(data.replace(word, extra + word))
    assert "compressed or transformed (zstd)" in refused(save, tmp_path / "out", "--to", "hf")


def test_sharded_safetensors(tmp_path: Path) -> None:
    """A rank in the middle is a gap in the numbers; the last one is told from the config."""
    shutil.copytree(FIXTURES / "hf_mixtral" / "checkpoint", tmp_path / "save")
    for f in (tmp_path / "save").glob("shard-00004-*"):
        f.unlink()
    assert "ranks are missing" in refused(tmp_path / "save", tmp_path / "out", "--to", "hf")
    for f in (tmp_path / "save").glob("shard-00002-*"):
        f.unlink()
    assert "1 of 3 rank files are missing: rank 1" in refused(tmp_path / "save", tmp_path / "out", "--to", "hf")


def test_slices_that_are_alike_are_read_once(tmp_path: Path) -> None:
    """What is remembered of a slice is what reading it says, wherever it lies and whatever its checksum is."""
    save = tmp_path / "save"
    write_save(
        save, {f"w{i}": (("F32", "BF16")[i % 2], (8, 4), rows((8, 4), 2)) for i in range(6)}, {"a": 1.5, "b": [2]}
    )
    data = bytearray((save / "__0_0.distcp").read_bytes())
    starts = [
        i
        for i in range(len(data))
        if data[i : i + 30].startswith(b"PK\x03\x04") and b"archive/data.pkl" in data[i : i + 60]
    ]
    ends = [*starts[1:], len(data)]
    at = data.index(b"archive/data/0", starts[2]) - 16
    data[at : at + 4] = b"\x12\x34\x56\x78"  # the checksum of another tensor
    (save / "x").write_bytes(data)
    slices, reads = TorchSlices(), []
    with open_file(save / "x") as file:
        for begin, end in zip(starts, ends, strict=True):
            before = len(slices._known)
            found = slices.read(file, begin, end)
            reads.append(len(slices._known) - before)
            alone = read_torch(save / "x", begin, end)
            assert (found.value, dict(found.storages)) == (alone.value, dict(alone.storages))
    assert reads == [1, 1, 0, 0, 0, 0, 1, 1]
