"""ByteCheckpoint's directories, as ranks of DDP and FSDP2 wrote them: the model is what its own merge gives."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

import ckpttool
from ckpttool.checkpoint import open_checkpoint
from tests.formats.test_torch_bin import headers
from tests.helpers.command import ckpttool as command
from tests.helpers.command import refused, reshard

DDP = Path("fixtures/bytecheckpoint/ddp2")
WEIGHT = b"K\x20K\x10\x86q\x06K\x10K\x01\x86"
"""Shape and strides of module.0.weight, as its description has them."""
MODEL = headers(DDP.with_suffix(".safetensors"))


def copied(tmp_path: Path) -> Path:
    shutil.copytree(DDP, tmp_path / "in")
    return tmp_path / "in"


def held(folder: Path) -> dict[str, Any]:
    return {name: t for path in folder.glob("*.safetensors") for name, t in headers(path).items()}


def exchange(path: Path, old: bytes, new: bytes, times: int = 1) -> None:
    data = path.read_bytes()
    assert data.count(old) >= times
    path.write_bytes(data.replace(old, new, times))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("ranks") / "out"
    reshard(DDP, out, "--to", "ranks", "--tp-out", 1)
    return held(out)


def test_the_model_equals_its_own_merge(whole: dict[str, Any]) -> None:
    assert {n: t for n, t in whole.items() if not n.startswith("optimizer/")} == MODEL


def test_the_state_is_that_of_the_numbered_parameters(whole: dict[str, Any]) -> None:
    """In optimizer/__0_0.distcp the elements lie one behind the other, by the order of the model's state dict."""
    data = (DDP / "optimizer" / "__0_0.distcp").read_bytes()
    at = 1517  # param_groups, a file of torch.save
    for name in ("module.0.weight", "module.0.bias", "module.1.weight", "module.1.bias"):
        shape = MODEL[name][1]
        assert whole[f"optimizer/{name}/step"] == ("F32", (), data[at : at + 4])
        at += 4
        for state in ("exp_avg", "exp_avg_sq"):
            n = len(MODEL[name][2])
            assert whole[f"optimizer/{name}/{state}"] == ("F32", shape, data[at : at + n])
            at += n
    assert at == len(data)
    assert struct.unpack("<f", whole["optimizer/module.0.weight/step"][2])[0] >= 1


def test_uneven_boxes_of_fsdp2_and_named_state(tmp_path: Path) -> None:
    """Three ranks; compared with what torch gathered of them."""
    source = DDP.parent / "fsdp2"
    reshard(source, tmp_path / "out", "--to", "ranks", "--tp-out", 1)
    assert held(tmp_path / "out") == headers(source.with_suffix(".safetensors"))
    pieces = ckpttool.open(source).catalog["embed.weight"].pieces
    assert [str(p.logical_box) for p in pieces] == ["[0:5, 0:6]", "[5:10, 0:6]", "[10:13, 0:6]"]


def test_groups_are_carried() -> None:
    training = open_checkpoint(DDP).stored.training
    assert training is not None
    (group,) = training.groups
    assert group.parameters == ("module.0.weight", "module.0.bias", "module.1.weight", "module.1.bias")
    assert group.values["betas"] == (0.9, 0.999)


def test_a_run_is_read_at_its_mark(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (2, 10):
        shutil.copytree(DDP, run / f"global_step_{step}")
    (run / "latest_checkpointed_iteration.txt").write_text("2", encoding="utf-8")
    assert "global_step_2 is read" in reshard(run, tmp_path / "a", "--to", "hf").err
    (run / "latest_checkpointed_iteration.txt").unlink()
    assert "global_step_10 is read" in reshard(run, tmp_path / "b", "--to", "hf").err
    assert held(tmp_path / "b") == MODEL
    (run / "latest_checkpointed_iteration.txt").write_text("3", encoding="utf-8")
    assert "there is no such save" in refused(run, tmp_path / "c", "--to", "hf")


def test_one_of_its_directories_is_enough(tmp_path: Path) -> None:
    reshard(DDP / "model", tmp_path / "out", "--to", "hf")
    assert held(tmp_path / "out") == MODEL


def test_what_else_a_rank_saved(tmp_path: Path) -> None:
    source = copied(tmp_path)
    (source / "extra_state").mkdir()
    shutil.copy("fixtures/torch_fsdp/uneven/extra_state_world_size_4_rank_0.pt", source / "extra_state")
    (source / "extra_state" / "extra_state_world_size_4_rank_0.pt").rename(
        source / "extra_state" / "extra_state_rank_0.pt"
    )
    training = open_checkpoint(source).stored.training
    assert training is not None
    assert training.plain == {"lr_scheduler": {"last_epoch": 2, "base_lrs": [0.01]}}
    assert training.left == ("rng",)


def test_missing_and_short_files(tmp_path: Path) -> None:
    source = copied(tmp_path)
    path = source / "model" / "__0_0.distcp"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    assert "the file has 3,231" in refused(source, tmp_path / "out", "--to", "hf")
    path.unlink()
    assert "__0_0.distcp is missing" in refused(source, tmp_path / "out", "--to", "hf")


def test_descriptions_that_contradict_the_metadata(tmp_path: Path) -> None:
    source = copied(tmp_path)
    exchange(source / "model" / ".metadata", WEIGHT, b"K\x10K\x20\x86q\x06K\x20K\x01\x86")
    said = refused(source, tmp_path / "out", "--to", "hf")
    assert "`module.0.weight` is F32 [32, 16] by its box, and F32 [16, 32] by the description" in said


def test_transposed_chunks(tmp_path: Path) -> None:
    """The description of a chunk has its strides: columns first here."""
    source = copied(tmp_path)
    exchange(source / "model" / ".metadata", WEIGHT, b"K\x20K\x10\x86q\x06K\x01K\x20\x86")
    catalog = ckpttool.open(source).catalog
    assert catalog["module.0.weight"].pieces[0].stored.strides == (1, 32)
    assert catalog["module.1.weight"].pieces[0].stored.strides is None


def test_numbers_that_may_be_either_are_refused(tmp_path: Path) -> None:
    """Two tensors of the model have the shape of each parameter of the optimizer."""
    source = copied(tmp_path)
    shutil.rmtree(source / "model")
    shutil.copytree(source / "optimizer", source / "model")
    assert "the optimizer is not read" in command("inspect", source).err
    assert "leave more than one order" in refused(source, tmp_path / "out", "--to", "ranks", "--tp-out", 1)
    reshard(source, tmp_path / "out", "--to", "ranks", "--tp-out", 1, "--only", "model")


def test_only_read(tmp_path: Path) -> None:
    assert "--to dcp" in refused(DDP, tmp_path / "out", "--to", "bytecheckpoint")
    assert command("inspect", DDP, "--check").code == 0


@pytest.mark.parametrize("part", ["model", "optimizer"])
@pytest.mark.parametrize("lost", [False, True])
def test_a_component_whose_metadata_is_damaged_is_not_left_out(part: str, lost: bool, tmp_path: Path) -> None:
    """Found by fuzzing: a save without its optimizer was read where its metadata was no longer ByteCheckpoint's."""
    path = copied(tmp_path) / part / ".metadata"
    if lost:
        path.unlink()
    else:
        exchange(path, b"meta_type", b"metatypes")
    refused(tmp_path / "in", tmp_path / "out", "--to", "hf")
    error = refused(tmp_path / "in", tmp_path / "out", "--to", "hf", "--from", "bytecheckpoint")
    assert ("the save was not finished" if lost else "this is not the metadata") in error


def test_a_state_whose_keys_nothing_says_is_refused(tmp_path: Path) -> None:
    path = copied(tmp_path) / "optimizer" / ".metadata"
    data = path.read_bytes()
    at = data.rindex(b"state.1.exp_avg_sq")
    path.write_bytes(data[:at] + b"stale" + data[at + 5 :])
    refused(tmp_path / "in", tmp_path / "out", "--to", "hf")
