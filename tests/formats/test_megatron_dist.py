"""Saves of Megatron Core's dist_checkpointing, read as the run that wrote them held its tensors.

``fixtures/megatron/dist/CASE`` are saves by Megatron Core; CASE.safetensors is the model that was put in, CASE.json
dtype, shape and sha256 of the master weights and moments.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.checkpoint import open_checkpoint
from ckpttool.containers.pickle_write import Hole
from tests.helpers import megatron, tensorfile
from tests.helpers.command import ckpttool, refused, reshard
from tests.helpers.torch_edit import edit

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


@pytest.mark.parametrize("case", ["llama_tp2", "qwen2_buckets", "deepseek_v3"])
def test_what_the_run_held(case: str, tmp_path: Path) -> None:
    found = ranks(CASES / case, tmp_path / "out")
    model = {k: t for k, t in found.items() if "/" not in k}
    tensorfile.assert_same(model, tensorfile.read(CASES / f"{case}.safetensors"))
    if case != "deepseek_v3":
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


@pytest.mark.parametrize("chained", [False, True])
def test_the_scale_of_the_loss_is_left_out(chained: bool, tmp_path: Path) -> None:
    """And nothing with it: groups and steps are beside it."""

    def scaled(common: Any) -> None:
        optimizer = {**common["optimizer"], "grad_scaler": {"scale": Hole("F32", (1,)), "growth_tracker": 2}}
        common["optimizer"] = {0: optimizer} if chained else optimizer

    save = Path(shutil.copytree(LLAMA, tmp_path / "save"))
    edit(save / PLACES / "common.pt", scaled)
    plain, stored = open_checkpoint(LLAMA).stored, open_checkpoint(save).stored
    assert {*stored.notes} - {*plain.notes} == {
        "the scale of the loss (`grad_scaler`, of float16 training) is left out"
    }
    assert stored.training == plain.training
    assert len(stored.tensors) == len(plain.tensors)


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


@pytest.mark.parametrize("said", [1, 3])
def test_layers_of_another_number(said: int, tmp_path: Path) -> None:
    """All shapes fit, and config.json would have been made of what is wrong."""
    save = Path(shutil.copytree(LLAMA, tmp_path / "save"))
    edit(save / PLACES / "common.pt", lambda v: v["args"].fields.update(num_layers=said))
    assert f"and the model's configuration says {said}" in refused(save, tmp_path / "out", "--to", "hf")


def test_common_values_of_another_iteration(tmp_path: Path) -> None:
    """The steps of the optimizer are among them."""
    save = Path(shutil.copytree(LLAMA, tmp_path / "save"))
    said = "the directory is called iter_0000005, and its files are of iteration 9"
    assert said not in open_checkpoint(save).stored.notes
    edit(save / PLACES / "common.pt", lambda v: v.update(iteration=9))
    assert said in open_checkpoint(save).stored.notes


def test_experts_of_another_number(tmp_path: Path) -> None:
    save = Path(shutil.copytree(CASES / "deepseek_v3", tmp_path / "save"))
    config = json.loads((save / "config.json").read_text()) | {"n_routed_experts": 2}
    (save / "config.json").write_text(json.dumps(config))
    edit(save / PLACES / "common.pt", lambda v: v["args"].fields.update(num_experts=2))
    assert "does not fit the number of experts" in refused(save, tmp_path / "out", "--to", "hf")


def test_inspect_finds_nothing_wrong() -> None:
    done = ckpttool("inspect", LLAMA, "--check")
    assert done.code == 0, done.err


GROUPS = {"param_groups": [{"lr": 0.1, "wd_mult": 1.0, "step": 4}, {"lr": 0.1, "wd_mult": 0.0, "step": 4}]}
FULL = {"optimizer": {"optimizer": GROUPS}, "content_metadata": {"distrib_optim_sharding_type": "fully_reshardable"}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tensorfile.Tensors:
    """What a save holds whose optimizer has the shapes of the model."""
    path = tmp_path_factory.mktemp("megatron")
    save = megatron.Save(path / "save")
    model = megatron.model()
    save.sharded("", model, 1)
    for state, arrays in megatron.states(model).items():
        save.sharded(f"optimizer.state.{state}.", arrays, 1)
    return ranks(save.write(FULL), path / "out")


@pytest.mark.product
@pytest.mark.parametrize("dp", [1, 3])
@pytest.mark.parametrize("tp", [1, 2])
def test_state_in_runs_of_what_ranks_had(tp: int, dp: int, tmp_path: Path, whole: tensorfile.Tensors) -> None:
    """fully_sharded_model_space, of Megatron Core before 0.14."""
    save, model = megatron.Save(tmp_path / "save"), megatron.model()
    save.sharded("", model, tp)
    for state, arrays in megatron.states(model).items():
        name = "fp32_param" if state == "param" else state
        megatron.flattened(save, f"optimizer.state.{name}.", arrays, tp, dp)
    tensorfile.assert_same(ranks(save.write(FULL), tmp_path / "out"), whole)


def buckets(
    path: Path, tp: int, pp: int, dp: int, *, spec: str = "local", said: str | None = None, turns: int = 1
) -> Path:
    """A save whose optimizer lies in flat buffers of ranks; ``turns`` are interleaved stages."""
    save, model = megatron.Save(path), megatron.model()
    save.sharded("", model, tp)
    order = megatron.TE_ORDER if spec == "transformer_engine" else range(len(megatron.LAYER))
    owners = [(turn, stage) for turn in range(turns) for stage in range(pp)]
    stages = [[i for i in range(3) if i * len(owners) // 3 == n] for n in range(len(owners))]
    for state, arrays in megatron.states(model).items():
        for (turn, stage), layers in zip(owners, stages, strict=True):
            for rank in range(tp):
                own = []
                names: list[tuple[str, tuple[int, ...]]] = (
                    [(megatron.ENDS[0], ())] if (turn, stage) == owners[0] else []
                )
                names += [(f"decoder.layers.{megatron.LAYER[j][0]}", (i,)) for i in layers for j in order]
                names += [(n, ()) for n in megatron.ENDS[1:]] if (turn, stage) == owners[-1] else []
                for key, at in names:
                    one = arrays[key][at]
                    own.append(np.concatenate([one[b].reshape(-1) for b in megatron.parts(key, one.shape, tp)[rank]]))
                elements, chunks = megatron.bucket(own, dp)
                place = f"dp_group_idx_{stage * tp + rank}.gbuf_idx_{turn}"
                dtypes = "dtype_(torch.float16, torch.float32)"
                save.tensor(f"optimizer.distributed.{place}.{dtypes}.bucket_idx_0.{state}", (elements,), chunks)
    for group in range(tp * pp):
        save.object(f"optimizer.distributed.dp_group_idx_{group}.optimizer/shard_0_1", GROUPS)
    common = {"content_metadata": {"distrib_optim_sharding_type": "dp_reshardable"}}
    sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "transformer_impl": said or spec}
    return save.write(common, megatron.ARGS | sizes)


@pytest.mark.parametrize(
    ("tp", "pp", "dp", "turns", "spec"),
    [
        (1, 1, 1, 1, "local"),
        (2, 2, 3, 1, "local"),
        (1, 3, 2, 1, "transformer_engine"),
        (2, 1, 2, 3, "transformer_engine"),
    ],
)
def test_state_in_flat_buffers(
    tp: int, pp: int, dp: int, turns: int, spec: str, tmp_path: Path, whole: tensorfile.Tensors
) -> None:
    save = buckets(tmp_path / "save", tp, pp, dp, spec=spec, turns=turns)
    tensorfile.assert_same(ranks(save, tmp_path / "out"), whole)


def test_an_order_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    """Where parameters begin and end is where chunks do, so another order of modules does not go unnoticed."""
    save = buckets(tmp_path / "save", 1, 1, 2, spec="transformer_engine", said="local")
    error = refused(save, tmp_path / "out", "--to", "ranks", "--tp-out", 1, "--only", "optimizer")
    assert "nothing says where the parameters lie" in error
    reshard(save, tmp_path / "model", "--to", "hf", "--only", "model")


def test_the_order_that_fits_is_taken_where_nothing_says_it(tmp_path: Path, whole: tensorfile.Tensors) -> None:
    save = buckets(tmp_path / "save", 1, 1, 2, spec="transformer_engine", said="unknown")
    tensorfile.assert_same(ranks(save, tmp_path / "out"), whole)


def test_saves_of_fsdp_hold_everything_in_chunks(tmp_path: Path, whole: tensorfile.Tensors) -> None:
    """fsdp_dtensor: layers apart, halves of fused tensors apart, arguments and steps among the chunks."""
    save, model = megatron.Save(tmp_path / "run/iter_0000100"), megatron.model()

    def put(fqn: str, key: str, front: tuple[int, ...], array: megatron.Array) -> None:
        layer = key.replace("decoder.layers.", f"decoder.layers.{front[0]}.") if front else key
        halves = np.split(array, 2) if layer.endswith("linear_fc1.weight") else [array]
        for half, one in zip(("_w", "_v") if len(halves) == 2 else ("",), halves, strict=True):
            rows = [((0, *[0] * (one.ndim - 1)), one[:3]), ((3, *[0] * (one.ndim - 1)), one[3:])]
            save.tensor(fqn.format(layer + half), one.shape, rows)

    for key, array in model.items():
        for front, one in megatron.layers_of(key, array):
            put("model.module.{}", key, front, one)
    states = megatron.states(model)
    for name, state in (("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq"), ("fp32_param", "param")):
        for key, array in states[state].items():
            for front, one in megatron.layers_of(key, array):
                put("optimizer.state.module.{}." + name, key, front, one)
    for key in ("embedding.word_embeddings.weight", "decoder.final_layernorm.weight"):
        save.described[f"optimizer.state.module.{key}.step"] = megatron.number(save, 4.0)
    save.objects["args"] = save.put_object(megatron.namespace(megatron.ARGS))
    path = save.write()
    for name in ("common.pt", "metadata.json"):
        (path / name).unlink()
    (tmp_path / "run/latest_checkpointed_iteration.txt").write_text("100")
    for source in (path, path.parent):
        tensorfile.assert_same(ranks(source, tmp_path / f"out-{source.name}"), whole)
