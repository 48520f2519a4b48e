"""Saves of Megatron Core's dist_checkpointing, read as the run that wrote them held its tensors.

``fixtures/megatron/dist/CASE`` are saves by Megatron Core; CASE.safetensors is the model that was put in, CASE.json
dtype, shape and sha256 of the master weights and moments.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from ckpttool.checkpoint import open_checkpoint
from tests.helpers import tensorfile
from tests.helpers.command import ckpttool, refused, reshard

CASES = Path("fixtures/megatron/dist")
LLAMA = CASES / "llama_tp2"
PLACES = "iter_0000005"


def assert_state(found: tensorfile.Tensors, case: str) -> None:
    """The master weights, moments and steps that the run held."""
    want = json.loads((CASES / f"{case}.json").read_text())
    wanted = {}
    for component, of in want.items():
        for name, (dtype, shape, digest) in of.items() if isinstance(of, dict) else ():
            full = f"{component}/{name}" if component == "master_weights" else f"optimizer/{name}/{component}"
            wanted[full] = dtype, tuple(shape), digest
    have = {
        k: (t.dtype, t.bits.shape, hashlib.sha256(t.bits.tobytes()).hexdigest())
        for k, t in found.items()
        if "/" in k and not k.endswith("/step")
    }
    assert have == wanted
    steps = {k: t for k, t in found.items() if k.endswith("/step")}
    assert {k.split("/")[1] for k in steps} == {k.split("/")[1] for k in wanted}
    assert {(t.dtype, t.bits.shape, float(t.bits.view("<f4"))) for t in steps.values()} == {("F32", (), 1.0)}


def ranks(src: Path, dst: Path) -> tensorfile.Tensors:
    reshard(src, dst, "--to", "ranks", "--tp-out", 1)
    return tensorfile.read_all(dst)


@pytest.mark.parametrize("case", ["llama_tp2"])
def test_what_the_run_held(case: str, tmp_path: Path) -> None:
    found = ranks(CASES / case, tmp_path / "out")
    model = {k: t for k, t in found.items() if "/" not in k}
    tensorfile.assert_same(model, tensorfile.read(CASES / f"{case}.safetensors"))
    assert_state(found, case)


def test_the_directory_of_the_save_is_enough(tmp_path: Path) -> None:
    reshard(LLAMA / PLACES, tmp_path / "out", "--to", "hf", "--only", "model")
    tensorfile.assert_same(tensorfile.read_all(tmp_path / "out"), tensorfile.read(CASES / "llama_tp2.safetensors"))


def test_canonical_names_and_true_shapes() -> None:
    """Layers lie one behind the other in the files; the vocabulary is padded to 160 rows."""
    catalog = open_checkpoint(LLAMA).catalog
    names = [k.name for k in catalog.tensors if k.component == "model"]
    assert names[0] == "embedding.word_embeddings.weight"
    assert names[1:7] == [
        f"decoder.layers.0.{n}.weight"
        for n in (
            "input_layernorm",
            "self_attention.linear_proj",
            "self_attention.linear_qkv",
            "pre_mlp_layernorm",
            "mlp.linear_fc1",
            "mlp.linear_fc2",
        )
    ]
    embedding = next(t for t in catalog if t.key.name == names[0])
    assert embedding.shape == (131, 32)
    held = sorted((p.logical_box.start[0], p.stored.shape, p.stored_box.shape) for p in embedding.pieces)
    assert held == [(0, (80, 32), (80, 32)), (80, (80, 32), (51, 32))]
    assert [(p.stored_box.start, p.free) for p in embedding.pads] == [((51, 0), True)]


def test_training() -> None:
    training = open_checkpoint(LLAMA).stored.training
    assert training is not None
    decayed, others = training.groups
    assert {n.rpartition(".")[0].rpartition(".")[2] for n in others.parameters} == {
        "final_layernorm", "input_layernorm", "pre_mlp_layernorm",
    }  # fmt: skip
    assert len(decayed.parameters) + len(others.parameters) == 15
    assert (decayed.values["lr"], decayed.values["betas"], others.values["wd_mult"]) == (0.001, (0.9, 0.999), 0.0)
    assert training.plain == {
        "iteration": 5,
        "num_floating_point_operations_so_far": 0,
        "opt_param_scheduler": {"max_lr": 0.001, "num_steps": 320},
        "consumed_train_samples": 320,
    }


def test_a_save_without_metadata_was_not_finished(tmp_path: Path) -> None:
    save = Path(shutil.copytree(LLAMA, tmp_path / "save"))
    (save / PLACES / ".metadata").unlink()
    assert ".metadata is missing" in refused(save, tmp_path / "out", "--to", "hf")


def test_a_mark_that_leads_nowhere(tmp_path: Path) -> None:
    save = Path(shutil.copytree(LLAMA, tmp_path / "save"))
    (save / "latest_checkpointed_iteration.txt").write_text("7")
    assert "`7`, which is not here" in refused(save, tmp_path / "out", "--to", "hf")


def test_one_of_the_files_is_no_checkpoint(tmp_path: Path) -> None:
    for name in ("common.pt", "__0_0.distcp"):
        assert "give their directory" in refused(LLAMA / PLACES / name, tmp_path / "out", "--to", "hf", code=2)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    save = Path(shutil.copytree(LLAMA, tmp_path / "save"))
    (save / PLACES / "__1_0.distcp").unlink()
    assert "__1_0.distcp is missing" in refused(save, tmp_path / "out", "--to", "hf")


def test_inspect_finds_nothing_wrong() -> None:
    done = ckpttool("inspect", LLAMA, "--check")
    assert done.code == 0, done.err
