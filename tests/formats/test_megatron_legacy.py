"""Megatron-LM's own checkpoints, a directory for each rank, read as the run that wrote them held its tensors.

``fixtures/megatron/legacy/CASE`` are saves by Megatron Core; CASE.safetensors is the model that was put in, CASE.json
dtype, shape and sha256 of the master weights and moments.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpttool.checkpoint import open_checkpoint
from ckpttool.errors import CkptError, ConflictError, IncompleteError, UnsupportedError, UsageError
from ckpttool.formats.base import TrainingState
from ckpttool.formats.megatron import buffers
from ckpttool.formats.megatron.legacy_ranks import directories, grid_of
from tests.helpers import tensorfile
from tests.helpers.command import ckpttool, refused, reshard
from tests.helpers.torch_edit import edit

CASES = Path("fixtures/megatron/legacy")
STAGES = CASES / "llama_pp2_vp2"
EXPERTS = CASES / "qwen3_moe_tp2_ep2"
PLAIN = CASES / "qwen3_tp2_plain"
ETP = CASES / "qwen3_moe_etp2"
TE = CASES / "qwen3_moe_te_ep2"
GROUPED = CASES / "qwen3_moe_grouped"
TIED = CASES / "qwen2_pp2_tied"
SAVE = "iter_0000005"
MODEL, OPTIMIZER = "model_optim_rng.pt", "distrib_optim.pt"


def held(src: Path, dst: Path) -> tensorfile.Tensors:
    """Everything in a checkpoint, under Hugging Face's names."""
    reshard(src, dst, "--to", "ranks", "--tp-out", 1, "--pp-out", 1, "--ep-out", 1)
    return tensorfile.read_all(dst)


def assert_held(found: tensorfile.Tensors, case: str) -> None:
    """The model, master weights, moments and steps that the run had."""
    model = {k: t for k, t in found.items() if "/" not in k}
    tensorfile.assert_same(model, tensorfile.read(CASES / f"{case}.safetensors"))
    said = json.loads((CASES / f"{case}.json").read_text())
    wanted = {f"master_weights/{n}": v for n, v in said["master_weights"].items()}
    wanted |= {f"optimizer/{n}/{s}": v for s in ("exp_avg", "exp_avg_sq") for n, v in said[s].items()}
    have = {
        k: [t.dtype, list(t.bits.shape), hashlib.sha256(t.bits.tobytes()).hexdigest()]
        for k, t in found.items()
        if "/" in k and not k.endswith("/step")
    }
    assert have == wanted
    steps = {k: float(t.bits.view("<f4")) for k, t in found.items() if k.endswith("/step") and t.bits.shape == ()}
    assert steps == {f"optimizer/{n}/step": v for n, v in said["step"].items()}


def copy_of(src: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(src, tmp_path / "run"))


def edit_all(run: Path, change: Callable[[Any], Any], name: str = MODEL) -> None:
    for path in sorted(run.glob(f"*/mp_rank_*/{name}")):
        edit(path, change)


def assert_model(run: Path, case: Path, tmp_path: Path) -> None:
    reshard(run, tmp_path / "hf", "--to", "hf", "--only", "model")
    tensorfile.assert_same(tensorfile.read_all(tmp_path / "hf"), tensorfile.read(case.with_suffix(".safetensors")))


# -- what a run held


@pytest.mark.parametrize(
    "case",
    [STAGES, PLAIN, TIED, GROUPED, *(pytest.param(c, marks=pytest.mark.thorough) for c in (EXPERTS, TE))],
    ids=lambda case: case.name,
)
def test_what_the_run_held(case: Path, tmp_path: Path) -> None:
    """Interleaved stages; state by numbers, and masters beside it; a head that is a copy of the embedding; experts in
    two tensors (GroupedMLP), one by one, and as Transformer Engine has them, with an optimizer of their own.
    """
    assert_held(held(case, tmp_path / "out"), case.name)


def test_experts_cut_over_tensor_parallel_ranks(tmp_path: Path) -> None:
    assert_model(ETP, ETP, tmp_path)
    assert str(open_checkpoint(ETP).stored.mesh) == "tp 2"


def test_the_mesh_and_the_place_of_experts() -> None:
    """With tp 2, ep 2 and etp 1 there are two files, and dense tensors are in both."""
    stored = open_checkpoint(EXPERTS).stored
    assert str(stored.mesh) == "tp 2, ep 2, etp 1"
    assert stored.version == "local"
    ranks: dict[str, set[int]] = {}
    for t in stored.tensors:
        if t.component == "model":
            ranks.setdefault(t.name, set()).add(t.rank)
    assert ranks["decoder.layers.0.mlp.router.weight"] == {0, 1}
    assert ranks["decoder.layers.1.mlp.experts.local_experts.0.linear_fc1.weight"] == {0}
    assert ranks["decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight"] == {1}


def test_layers_of_interleaved_stages() -> None:
    stored = open_checkpoint(STAGES).stored
    assert (stored.mesh.pp, stored.mesh.layout) == (2, (1, 1, 1, 1))
    first = {t.name.split(".")[2] for t in stored.tensors if t.name.startswith("decoder.layers.") and not t.rank}
    assert first == {"0", "2"}


def test_what_training_goes_on_from() -> None:
    stored = open_checkpoint(EXPERTS).stored
    training = stored.training
    assert training is not None
    assert training.step == 2
    assert training.plain["iteration"] == 5
    assert training.plain["opt_param_scheduler"]
    weights, vectors, experts = sorted(
        training.groups, key=lambda g: (g.values["is_expert_parallel"], -g.values["wd_mult"])
    )
    assert "output_layer.weight" in weights.parameters
    assert "decoder.layers.0.mlp.router.weight" in weights.parameters
    assert "decoder.layers.0.self_attention.q_layernorm.weight" in vectors.parameters
    assert {n for n in experts.parameters if ".layers.0." in n} == {
        f"decoder.layers.0.mlp.experts.local_experts.{e}.linear_fc{i}.weight" for e in range(4) for i in (1, 2)
    }
    assert {"lr", "betas", "weight_decay"} <= set(weights.values)
    assert not {"params", "step"} & set(weights.values)


# -- which save


def test_the_directory_of_a_save_and_a_release(tmp_path: Path) -> None:
    assert open_checkpoint(EXPERTS / SAVE).stored.config
    run = copy_of(ETP, tmp_path)
    (run / SAVE).rename(run / "release")
    (run / "latest_checkpointed_iteration.txt").write_text("release\n")
    assert_model(run, ETP, tmp_path)


def test_a_mark_that_leads_nowhere_or_is_missing(tmp_path: Path) -> None:
    run = copy_of(ETP, tmp_path)
    mark = run / "latest_checkpointed_iteration.txt"
    mark.write_text("10")
    error = refused(run, tmp_path / "out", "--to", "hf")
    assert f"{mark.name} names `10`, which is not here" in error
    assert f"give the directory of a save: {run / SAVE}" in error
    shutil.copytree(run / SAVE, run / "iter_0000010")
    note = open_checkpoint(run).stored.notes[0]
    assert note == f"`{mark.name}` names the save: iter_0000010; {SAVE} is here too"
    mark.unlink()
    assert "iter_0000010 is read, the last of 2 saves" in open_checkpoint(run).stored.notes[0]


def test_one_rank_of_several() -> None:
    rank = EXPERTS / SAVE / "mp_rank_01_001"
    for src in (rank, rank / MODEL, rank / OPTIMIZER):
        done = ckpttool("inspect", src)
        assert done.code == 2
        assert f"hint: pass the directory of all ranks: {EXPERTS / SAVE}" in done.err
        assert ("--from torch-bin" in done.err) == (src != rank)
    assert ckpttool("inspect", rank / MODEL, "--from", "torch-bin").code == 0


def test_the_null_tokenizer_has_one_token_more(tmp_path: Path) -> None:
    """And what is written says the true number, so that it does not grow."""
    run = copy_of(EXPERTS, tmp_path)
    edit_all(run, lambda v: v["args"].fields.update(vocab_size=112, tokenizer_type="NullTokenizer"))
    assert_model(run, EXPERTS, tmp_path)
    reshard(run, tmp_path / "again", "--to", "megatron", "--tp-out", 1, "--ep-out", 1, "--only", "model")
    (tmp_path / "again" / "config.json").unlink()
    assert open_checkpoint(tmp_path / "again").stored.config["vocab_size"] == 113


# -- without arguments


def test_a_save_without_arguments(tmp_path: Path) -> None:
    """The names of directories say the mesh, the shapes of experts how many ranks cut one."""
    run = copy_of(ETP, tmp_path)
    edit_all(run, lambda v: v.pop("args") and None)
    assert_model(run, ETP, tmp_path)
    (run / "config.json").unlink()
    assert "config.json" in refused(run, tmp_path / "out", "--to", "hf")


def test_the_second_number_without_arguments(tmp_path: Path) -> None:
    """A stage, unless every rank has the embedding."""
    for case, mesh in ((STAGES, "tp 1, pp 2, layers 1,1,1,1"), (EXPERTS, "tp 2, ep 2, etp 1")):
        run = copy_of(case, tmp_path / case.name)
        (run / "config.json").write_text(json.dumps(open_checkpoint(case).stored.config))
        edit_all(run, lambda v: v.pop("args") and None)
        assert str(open_checkpoint(run).stored.mesh) == mesh


# -- other spellings


def test_names_of_transformer_engine() -> None:
    """Norms inside of projections, experts in grouped layers."""
    theirs, ours = open_checkpoint(TE).stored, open_checkpoint(EXPERTS).stored
    assert (theirs.version, ours.version) == ("transformer_engine", "local")
    assert {(t.key, t.rank, t.shape) for t in theirs.tensors} == {(t.key, t.rank, t.shape) for t in ours.tensors}


def test_experts_in_two_tensors() -> None:
    """GroupedMLP: [hidden, experts x ffn] and [experts x ffn, hidden], each expert a run of the elements and turned."""
    first, *_ = [t for t in open_checkpoint(GROUPED).stored.tensors if ".local_experts.1.linear_fc1." in t.name]
    second, *_ = [t for t in open_checkpoint(GROUPED).stored.tensors if ".local_experts.1.linear_fc2." in t.name]
    assert (first.shape, first.strides) == ((20, 12), (1, 20))
    assert (second.shape, second.strides) == ((12, 10), (1, 12))


# -- what does not fit together


def test_missing_ranks(tmp_path: Path) -> None:
    run = copy_of(EXPERTS, tmp_path)
    shutil.rmtree(run / SAVE / "mp_rank_01_001")
    error = refused(run, tmp_path / "out", "--to", "hf")
    assert "1 directory is missing: mp_rank_01_001" in error
    assert "rank-missing" in ckpttool("inspect", "--check", run).out
    (run / SAVE / "mp_rank_01_001").mkdir()
    assert f"1 directory has no {MODEL}: mp_rank_01_001" in refused(run, tmp_path / "out", "--to", "hf")


def test_ranks_of_two_saves(tmp_path: Path) -> None:
    run = copy_of(ETP, tmp_path)
    edit(run / SAVE / "mp_rank_01" / MODEL, lambda v: v.update(iteration=6))
    assert "ranks disagree: iteration is 5 in one file, 6 in another" in refused(run, tmp_path / "out", "--to", "hf")
    shutil.copytree(run / SAVE / "mp_rank_01", run / SAVE / "mp_rank_02")
    assert "1 directory cannot be of this save: mp_rank_02" in refused(run, tmp_path / "out", "--to", "hf")
    shutil.copytree(run / SAVE / "mp_rank_01", run / SAVE / "mp_rank_01_001")
    assert "two saves lie in one directory" in refused(run, tmp_path / "out", "--to", "hf")


def as_trained(run: Path, *, world: int = 4, **more: Any) -> None:
    """Each rank's own arguments, as Megatron-LM saves them, of a run with the ranks of its mesh."""
    for rank, path in enumerate(sorted((run / SAVE).glob(f"mp_rank_*/{MODEL}"))):
        edit(path, lambda v, rank=rank: v["args"].fields.update(rank=rank, world_size=world, **more))  # type: ignore[misc]


def test_the_file_of_another_rank(tmp_path: Path) -> None:
    """Halves of two ranks that are exchanged, or the same one twice: all shapes fit."""
    run = copy_of(ETP, tmp_path)
    as_trained(run)
    reshard(run, tmp_path / "hf", "--to", "hf")
    first, second, aside = run / SAVE / "mp_rank_00", run / SAVE / "mp_rank_01", run / "aside"
    first.rename(aside)
    second.rename(first)
    aside.rename(second)
    error = refused(run, tmp_path / "out", "--to", "hf")
    assert "the file of tensor-parallel rank 0 was saved by rank 1 of the run, which is tensor-parallel rank 1" in error
    assert "ranks-differ" in ckpttool("inspect", "--check", run).out
    shutil.rmtree(second)
    shutil.copytree(first, second)
    assert "the file of tensor-parallel rank 0 was saved by rank 1" in refused(run, tmp_path / "out", "--to", "hf")


def test_the_file_of_another_stage(tmp_path: Path) -> None:
    """With --use-tp-pp-dp-mapping the ranks of a stage are not one behind the other."""
    run = copy_of(STAGES, tmp_path)
    as_trained(run, world=2)
    reshard(run, tmp_path / "hf", "--to", "hf")
    as_trained(run, use_tp_pp_dp_mapping=True)
    reshard(run, tmp_path / "mapped", "--to", "hf")
    as_trained(run, use_tp_pp_dp_mapping=False)
    assert "the file of pipeline stage 1 was saved by rank 1 of the run" in refused(run, tmp_path / "out", "--to", "hf")


def test_all_files_by_one_rank(tmp_path: Path) -> None:
    """A converter writes those of all ranks, and has no random numbers."""
    run = copy_of(ETP, tmp_path)
    edit_all(run, lambda v: v["args"].fields.update(rank=0))
    assert "the file of tensor-parallel rank 1 was saved by rank 0" in refused(run, tmp_path / "out", "--to", "hf")
    edit_all(run, lambda v: {k: x for k, x in v.items() if k != "rng_state"})
    reshard(run, tmp_path / "hf", "--to", "hf")


@pytest.mark.parametrize(
    ("case", "name", "said"),
    [
        (PLAIN, "qk_layernorm", "is True, and a llama as config.json describes it has False there"),
        (TIED, "add_qkv_bias", "is True, and a llama as config.json describes it has False there"),
    ],
)
def test_config_beside_of_a_model_with_the_same_sizes(case: Path, name: str, said: str, tmp_path: Path) -> None:
    run = copy_of(case, tmp_path)
    edit_all(run, lambda v: v["args"].fields.update({name: True, "add_bias_linear": False}))
    reshard(run, tmp_path / "hf", "--to", "hf", "--only", "model")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config))
    reshard(run, tmp_path / "same", "--to", "hf", "--only", "model")
    (run / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    assert f"`args.{name}` {said}" in refused(run, tmp_path / "out", "--to", "hf", "--only", "model")


def test_a_directory_of_another_iteration(tmp_path: Path) -> None:
    run = copy_of(ETP, tmp_path)
    (run / SAVE).rename(run / "iter_0000009")
    notes = open_checkpoint(run / "iter_0000009").stored.notes
    assert "the directory is called iter_0000009, and its files are of iteration 5" in notes


def test_a_layer_that_no_rank_has(tmp_path: Path) -> None:
    run = copy_of(ETP, tmp_path)
    edit_all(run, lambda v: v.update(model={k: t for k, t in v["model"].items() if ".layers.0." not in k}))
    assert "has nothing of layer 0 of its 2" in refused(run, tmp_path / "out", "--to", "hf")


def test_copies_that_differ(tmp_path: Path) -> None:
    """A norm is on every rank."""
    run = copy_of(ETP, tmp_path)

    def change(value: Any) -> None:
        model = value["model"]
        model["decoder.final_layernorm.weight"] = model["decoder.layers.0.input_layernorm.weight"]._replace(offset=0)
        model["decoder.final_layernorm.weight"] = model["decoder.layers.0.mlp.router.weight"]._replace(
            shape=(32,), strides=(1,)
        )

    edit(run / SAVE / "mp_rank_01" / MODEL, change)
    assert "decoder.final_layernorm.weight" in refused(run, tmp_path / "out", "--to", "hf")


def test_flags_that_contradict() -> None:
    for flags in (("--tp", 4), ("--pp", 2), ("--etp", 1), ("--ep", 2)):
        done = ckpttool("inspect", ETP, *flags)
        assert done.code == 1
        assert f"{flags[0]} {flags[1]} contradicts the checkpoint" in done.err


def test_numbers_of_layers_and_experts(tmp_path: Path) -> None:
    run = copy_of(ETP, tmp_path)
    (run / "config.json").unlink()
    edit_all(run, lambda v: v["args"].fields.update(num_layers=3))
    assert "the files hold 2 layers, their arguments say 3" in refused(run, tmp_path / "out", "--to", "hf")
    edit_all(run, lambda v: v["args"].fields.update(num_layers=2, num_experts=5))
    assert "a rank holds" in refused(run, tmp_path / "out", "--to", "hf")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda v: v.update(model={"language_model": {"encoder": {}}}), "before Megatron Core"),
        (lambda v: v.update(model0=v.pop("model"), model2={}), "chunks of the model are missing"),
        (lambda v: v.pop("model") and None, "holds no `model`"),
        (lambda v: v.update(model=5), "not a dict of tensors"),
        (lambda _: [], "holds no dict"),
    ],
)
def test_files_that_are_something_else(change: Callable[[Any], Any], words: str, tmp_path: Path) -> None:
    run = copy_of(ETP, tmp_path)
    edit_all(run, change)
    assert words in refused(run, tmp_path / "out", "--to", "hf")


def test_a_file_that_is_cut_off(tmp_path: Path) -> None:
    run = copy_of(EXPERTS, tmp_path)
    for name in (MODEL, OPTIMIZER):
        path = run / SAVE / "mp_rank_01_001" / name
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2])
        assert "cut off" in refused(run, tmp_path / "out", "--to", "hf")
        path.write_bytes(data)


def test_files_from_before_2024(tmp_path: Path) -> None:
    run = copy_of(ETP, tmp_path)
    for path in run.glob(f"*/*/{MODEL}"):
        path.rename(path.with_name("model_rng.pt"))
    assert "the save has model_rng.pt in place of" in refused(run, tmp_path / "out", "--to", "hf")


# -- the optimizer


def assert_left_out(run: Path, words: str, tmp_path: Path) -> None:
    """The model is read, and the optimizer is refused with these words."""
    assert words in refused(run, tmp_path / "out", "--to", "ranks", "--tp-out", 1, "--only", "optimizer")
    done = reshard(run, tmp_path / "hf", "--to", "hf")
    assert "the optimizer is left out" in done.err


def _buffers(value: Any) -> list[dict[str, Any]]:
    entries = value if isinstance(value, list) else [value]
    return [s for e in entries if e for k, b in e.items() if k != "buckets_coalesced" for s in b.values()]


def test_a_buffer_of_another_size(tmp_path: Path) -> None:
    """One element more or less would put every parameter elsewhere."""
    run = copy_of(STAGES, tmp_path)

    def change(value: Any) -> None:
        for state in _buffers(value):
            for name in ("param", "exp_avg", "exp_avg_sq"):
                t = state[name]
                state[name] = t._replace(shape=(t.shape[0] - 1,))

    edit_all(run, change, OPTIMIZER)
    assert_left_out(run, "elements does not fit", tmp_path)


def test_buffers_of_old_and_of_other_kinds(tmp_path: Path) -> None:
    run = copy_of(STAGES, tmp_path)
    edit_all(run, lambda v: v.pop("buckets_coalesced") and None, OPTIMIZER)
    assert_left_out(run, "the form from before April 2024", tmp_path)
    edit_all(run, lambda v: {0: v[0], "buckets_coalesced": True}, OPTIMIZER)
    shutil.rmtree(tmp_path / "hf")
    assert_left_out(run, "it has 1 buffers, the rank's parameters fill 2", tmp_path)


def test_state_that_is_missing(tmp_path: Path) -> None:
    run = copy_of(EXPERTS, tmp_path)
    (run / SAVE / "mp_rank_01_001" / OPTIMIZER).unlink()
    error = refused(run, tmp_path / "out", "--to", "hf")
    assert f"1 rank has no {OPTIMIZER}" in error
    assert str(run / SAVE / "mp_rank_01_001") in error
    (run / SAVE / "mp_rank_00_000" / OPTIMIZER).unlink()
    assert_left_out(run, f"its state lies in {OPTIMIZER}, which is missing", tmp_path)


def test_an_optimizer_for_the_first_chunk(tmp_path: Path) -> None:
    """--overlap-param-gather-with-optimizer-step: the first of several optimizers has the first chunk alone."""
    run = copy_of(STAGES, tmp_path)
    edit_all(run, lambda v: [{0: v[i], "buckets_coalesced": True} for i in (0, 1)], OPTIMIZER)
    edit_all(run, lambda v: v.update(optimizer=[v["optimizer"], {**v["optimizer"], "grad_scaler": {"scale": 2.0}}]))
    assert_held(held(run, tmp_path / "out"), STAGES.name)
    assert "the scale of the loss (`grad_scaler`, of float16 training) is left out" in open_checkpoint(run).stored.notes


def test_steps_and_learning_rates_that_differ(tmp_path: Path) -> None:
    run = copy_of(STAGES, tmp_path)
    path = run / SAVE / "mp_rank_00_001" / MODEL
    edit(path, lambda v: v["optimizer"]["optimizer"]["param_groups"][0].update(lr=0.5))
    assert "ranks disagree: `lr` of a group of the optimizer" in refused(run, tmp_path / "out", "--to", "hf")
    shutil.copy(STAGES / SAVE / "mp_rank_00_001" / MODEL, path)
    edit(path, lambda v: [g.update(step=3.0) for g in v["optimizer"]["optimizer"]["param_groups"]] and None)
    assert "their optimizers took 2 and 3 steps" in refused(run, tmp_path / "out", "--to", "hf")


def test_steps_of_groups_that_differ(tmp_path: Path) -> None:
    run = copy_of(STAGES, tmp_path)
    edit_all(run, lambda v: v["optimizer"]["optimizer"]["param_groups"][0].update(step=3.0))
    assert_left_out(run, "its groups took 3 and 2 steps", tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda groups: groups[0]["params"].pop(),  # one fewer
        lambda groups: [g.update(wd_mult=0.5) for g in groups],  # not Megatron's rule
    ],
)
def test_numbers_that_name_no_parameters(change: Callable[[Any], Any], tmp_path: Path) -> None:
    run = copy_of(PLAIN, tmp_path)
    edit_all(run, lambda v: change(v["optimizer"]["optimizer"]["param_groups"]) and None)
    assert_left_out(run, "the save does not record which parameters its numbers are", tmp_path)


@pytest.mark.parametrize(
    ("frozen", "known"), [("word_embeddings", True), (r"layers\.0\..*linear_proj", True), (r"layers\.0\.", False)]
)
def test_frozen_parameters_have_no_number(frozen: str, known: bool, tmp_path: Path) -> None:
    """The order of a group and the shapes of its states say which are missing; else nothing is guessed."""
    before = open_checkpoint(PLAIN)
    run = copy_of(PLAIN, tmp_path)

    def freeze(value: Any) -> None:
        whole = value["optimizer"]
        groups, state = whole["optimizer"]["param_groups"], whole["optimizer"]["state"]
        of = next(i for i, g in enumerate(groups) if g["wd_mult"])
        decayed = [n for n, a in value["model"].items() if len(getattr(a, "shape", ())) > 1]
        assert len(decayed) == len(groups[of]["params"])
        for at in reversed([i for i, n in enumerate(decayed) if re.search(frozen, n)]):
            del state[groups[of]["params"].pop(at)], whole["fp32_from_fp16_params"][of][at]
        order = {n: i for i, n in enumerate(n for g in groups for n in g["params"])}
        whole["optimizer"]["state"] = {order[n]: s for n, s in state.items()}
        for g in groups:
            g["params"] = [order[n] for n in g["params"]]

    edit_all(run, freeze)
    if not known:
        assert_left_out(run, "some are frozen, and their shapes do not tell which", tmp_path)
        return
    found = open_checkpoint(run)
    gone = {k for k in before.catalog.tensors if k not in found.catalog.tensors}
    assert gone
    assert gone == {k for k in before.catalog.tensors if k.component != "model" and re.search(frozen, k.name)}
    held = {n for g in (found.stored.training or TrainingState()).groups for n in g.parameters}
    assert held == {k.name for k in before.catalog.tensors if k.component == "model"} - {k.name for k in gone}
    reshard(PLAIN, tmp_path / "a", "--to", "ranks", "--tp-out", 1)
    reshard(run, tmp_path / "b", "--to", "ranks", "--tp-out", 1)
    a, b = (tensorfile.read_all(tmp_path / n, "rank-*") for n in "ab")
    tensorfile.assert_same(b, {n: raw for n, raw in a.items() if n in b})


def test_norms_that_decay_like_all_others(tmp_path: Path) -> None:
    """A run that overrides Megatron's rule has one group, and its values must not become Megatron's defaults."""
    run = copy_of(STAGES, tmp_path)

    def one(value: Any) -> None:
        groups = value["optimizer"]["optimizer"]["param_groups"]
        groups[:] = [g | {"betas": (0.9, 0.95)} for g in groups if g["wd_mult"]]

    edit_all(run, one)
    training = open_checkpoint(run).stored.training
    assert training is not None
    (group,) = training.groups
    assert group.values["betas"] == (0.9, 0.95)
    assert any("layernorm" in n for n in group.parameters)


def test_numbers_with_other_shapes(tmp_path: Path) -> None:
    run = copy_of(PLAIN, tmp_path)

    def swap(value: Any) -> None:
        state = value["optimizer"]["optimizer"]["state"]
        state[0], state[1] = state[1], state[0]

    edit_all(run, swap)
    assert_left_out(run, "of what should be `", tmp_path)


# -- the layout of buffers


def test_buckets_begin_anew() -> None:
    """From the back; a bucket ends with the parameter that fills it, and the next one begins right behind."""
    parameters = [("a", (70,)), ("b", (10, 10)), ("c", (64,)), ("d", (3,))]
    assert buffers.offsets(parameters) == ({"d": 0, "c": 64, "b": 128, "a": 256}, 326)
    assert buffers.offsets(parameters, size=60) == ({"d": 0, "c": 64, "b": 128, "a": 228}, 298)
    assert buffers.offsets(parameters, alone={"d"}) == ({"d": 0, "c": 3, "b": 67, "a": 195}, 265)
    assert buffers.offsets(parameters, alone={"b"}) == ({"d": 0, "c": 64, "b": 128, "a": 228}, 298)
    assert buffers.offsets(parameters, alignment=1) == ({"d": 0, "c": 3, "b": 67, "a": 167}, 237)


def test_the_size_says_the_buckets() -> None:
    parameters = [("a", (70,)), ("b", (10, 10)), ("c", (64,)), ("d", (3,))]
    for size in (None, 1, 60, 128, 200):
        at, total = buffers.offsets(parameters, size=size)
        assert buffers.fit(parameters, total) == buffers.BufferFit(at, False, 326)
    assert not buffers.fit(parameters, 300).offsets


def test_two_ways_that_fit_are_refused() -> None:
    """The gap behind either of two equal parameters may be the one that a bucket's end left out."""
    parameters = [("a", (64,)), ("b", (100,)), ("c", (100,)), ("d", (36,))]
    one, total = buffers.offsets(parameters, size=136)
    assert buffers.fit(parameters, total) == buffers.BufferFit({}, True, 384)
    found = buffers.fit([("a", (100,)), ("b", (36,)), ("c", (100,))], 100 + 36 + 100 + 28, alone=[{"c"}, {"b"}])
    assert (found.several, dict(found.offsets)) == (True, {})
    said = buffers.fit(parameters, total, sizes=(136,))
    assert said.offsets == one


# -- which ranks


def grid(*names: str, **said: int) -> dict[str, int]:
    return grid_of(directories(names), said, Path("run")).ranks


def test_ranks_of_directories() -> None:
    assert grid("mp_rank_00", "mp_rank_01") == {"mp_rank_00": 0, "mp_rank_01": 1}
    stages = [f"mp_rank_{t:02d}_{p:03d}" for t in range(2) for p in range(2)]
    assert grid(*stages, tp=2, pp=2, ep=1) == dict(zip(stages, (0, 2, 1, 3), strict=True))
    folded = ["mp_rank_00_000", "mp_rank_01_001", "mp_rank_02_000", "mp_rank_03_001"]
    assert grid(*folded, tp=4, ep=2, etp=1) == {n: i for i, n in enumerate(folded)}
    crossed = [f"mp_rank_{t:02d}_{e:03d}" for t in range(2) for e in range(2)]
    assert grid(*crossed, tp=2, ep=2, etp=2) == dict(zip(crossed, (0, 2, 1, 3), strict=True))


def test_ranks_that_hold_the_same_are_enough() -> None:
    """tp 2 and ep 3 fold over six ranks, and three of them write all there is."""
    assert grid("mp_rank_00_000", "mp_rank_01_001", "mp_rank_00_002", tp=2, ep=3, etp=1) == {
        "mp_rank_00_000": 0,
        "mp_rank_01_001": 1,
        "mp_rank_00_002": 2,
    }


def test_meshes_that_cannot_be() -> None:
    cases: list[tuple[type[CkptError], tuple[str, ...], dict[str, int]]] = [
        (UnsupportedError, ("mp_rank_00_000", "mp_rank_00_001"), {"tp": 1, "ep": 2, "etp": 2}),
        (IncompleteError, ("mp_rank_00", "mp_rank_02"), {}),
        (IncompleteError, ("mp_rank_99999",), {}),
        (ConflictError, ("mp_rank_00_000", "mp_rank_01_000"), {"tp": 2, "pp": 1, "ep": 1}),
        (ConflictError, ("mp_rank_00", "mp_rank_01"), {"tp": 1}),
    ]
    for error, names, said in cases:
        with pytest.raises(error):
            grid(*names, **said)
    with pytest.raises(UsageError, match="how many ranks cut an expert"):
        grid_of(directories(["mp_rank_00", "mp_rank_01"]), {}, Path("run"), (1, 2))
    assert grid_of(directories(["mp_rank_00", "mp_rank_01"]), {}, Path("run"), (1,)).etp == 1
