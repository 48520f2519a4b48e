"""--to megatron-dist: read back by Python's own unpickler. tests/peers lets megatron-core itself load it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.formats.test_megatron_legacy_write import LLAMA, QWEN3_MOE, E, V, fused, model, run, same
from tests.helpers.command import refused, reshard
from tests.helpers.dist_checkpoint import Saved, read_dist
from tests.helpers.paddle import Array
from tests.helpers.tensorfile import Raw, save_hf
from tests.helpers.torch_load import torch_load
from tests.helpers.training_run import names, save_run

FIXTURES = Path(__file__).parents[2] / "fixtures"
BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def saved(dst: Path, step: int = 0) -> tuple[Saved, dict[str, Any]]:
    """What a save holds, and its common.pt."""
    assert (dst / "latest_checkpointed_iteration.txt").read_text() == str(step)
    folder = dst / f"iter_{step:07d}"
    assert json.loads((folder / "metadata.json").read_text()) == BACKEND
    found = read_dist(folder)
    assert found.planner is None
    return found, torch_load(folder / "common.pt")


def stacked(held: dict[str, Array], layers: int) -> dict[str, Array]:
    """{key: global tensor} of canonical names, where all layers are alike and have the names of the local spec."""
    out: dict[str, Array] = {}
    inside = sorted({n.split(".", 3)[3] for n in held if n.startswith("decoder.layers.")})
    for name in inside:
        if ".local_experts." not in name:
            out[f"decoder.layers.{name}"] = np.stack([held[f"decoder.layers.{i}.{name}"] for i in range(layers)])
        elif ".local_experts.0." in name:
            each = [
                np.stack([held[f"decoder.layers.{i}.{name.replace('.0.', f'.{e}.')}"] for e in range(E)])
                for i in range(layers)
            ]
            out[f"decoder.layers.{name.replace('local_experts.0.', 'experts.')}"] = np.stack(each)
    return out | {n: a for n, a in held.items() if not n.startswith("decoder.layers.")}


def normed(held: dict[str, Array], *, experts: bool = False) -> dict[str, Array]:
    """The same with norms where Transformer Engine has them; with ``experts`` that after attention stays."""
    names = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    if not experts:
        names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    out = {}
    for name, array in held.items():
        for ours, theirs in names.items():
            name = name.replace(f"decoder.layers.{ours}", f"decoder.layers.{theirs}")  # noqa: PLW2901
        out[name] = array
    return out


@pytest.mark.sample("llama-local", "qwen3_moe-transformer_engine")
@pytest.mark.parametrize("target", ["transformer_engine", "local"])
@pytest.mark.parametrize("config", [LLAMA, QWEN3_MOE], ids=["llama", "qwen3_moe"])
def test_a_model(config: dict[str, Any], target: str, tmp_path: Path) -> None:
    src, held = model(tmp_path / "hf", config)
    moe = config is QWEN3_MOE
    mesh = ("--tp-out", 2, "--ep-out", 4, "--etp-out", 1) if moe else ("--tp-out", 2, "--pp-out", 2)
    mesh = (*mesh, "--vocab-multiple", 64, "--target", target)
    done = reshard(src, tmp_path / "out", "--to", "megatron-dist", *mesh, "--verify")
    assert "--use-checkpoint-args --finetune" in done.err
    found, common = saved(tmp_path / "out")
    layers = config["num_hidden_layers"]
    wanted = stacked(fused(held, config), layers)
    # The local spec has the norms of both kinds of layers where Transformer Engine has those of dense ones.
    same(found.tensors, normed(wanted, experts=moe and target == "transformer_engine"))
    args = vars(common["args"])
    assert (args["num_layers"], args["vocab_size"], args["padded_vocab_size"]) == (layers, V, 128)
    assert (args["tensor_model_parallel_size"], args["pipeline_model_parallel_size"]) == (2, 1 if moe else 2)
    assert (args["no_save_optim"], args["no_save_rng"], args["transformer_impl"]) == (True, True, target)
    assert common["content_metadata"]["distrib_optim_sharding_type"] is None
    assert (common["checkpoint_version"], common["iteration"], "optimizer" in common) == (3.0, 0, False)


def test_what_several_ranks_hold_is_written_once(tmp_path: Path) -> None:
    """In the file of the first of them (``read_dist`` sees to it that no element is there twice)."""
    src, _ = model(tmp_path / "hf", QWEN3_MOE)
    reshard(src, tmp_path / "out", "--to", "megatron-dist", "--tp-out", 2, "--ep-out", 4, "--etp-out", 1)
    files = saved(tmp_path / "out")[0].files
    assert sorted(files) == [f"__{r}_0.distcp" for r in range(4)]
    experts = {f"decoder.layers.mlp.experts.experts.linear_fc{i}.weight" for i in (1, 2)}
    assert all(experts <= held for held in files.values())
    assert "decoder.layers.mlp.router.weight" in files["__0_0.distcp"]
    cut = {n for n in files["__1_0.distcp"] if n not in experts}
    assert cut == {"embedding.word_embeddings.weight", "output_layer.weight"} | {
        f"decoder.layers.self_attention.linear_{n}.weight" for n in ("qkv", "proj")
    }
    assert files["__2_0.distcp"] == files["__3_0.distcp"] == experts


@pytest.mark.sample("transformer_engine")
@pytest.mark.parametrize("target", ["transformer_engine", "local"])
def test_modules_find_their_extra_state(target: str, tmp_path: Path) -> None:
    src, _ = model(tmp_path / "hf", QWEN3_MOE)
    reshard(src, tmp_path / "out", "--to", "megatron-dist", "--target", target)
    objects = saved(tmp_path / "out")[0].objects
    layer = ["self_attention.linear_qkv", "self_attention.linear_proj"]
    if target == "transformer_engine":
        layer += ["self_attention.core_attention", "pre_mlp_layernorm"]
        layer += ["self_attention.q_layernorm", "self_attention.k_layernorm"]
    wanted = {f"decoder.layers.{n}._extra_state/shard_{i}_2" for n in layer for i in range(2)}
    for n in (1, 2):
        experts = f"decoder.layers.mlp.experts.experts.linear_fc{n}._extra_state/shard"
        wanted |= {f"{experts}_{i}.{e}_2.{E}" for i in range(2) for e in range(E)}
    assert objects.keys() == wanted | {"decoder.final_layernorm._extra_state/shard_0_1"}
    for value in objects.values():
        assert [a.shape for a in value] == [(0,)]


def test_layers_that_differ_are_apart(tmp_path: Path) -> None:
    """DeepSeek-V3: the first layer has no experts, the second one has; keys as Megatron Core itself has them."""
    src = FIXTURES / "megatron/dist/deepseek_v3"
    truth = read_dist(next((src / "checkpoint" if (src / "checkpoint").is_dir() else src).glob("iter_*")))
    reshard(src, tmp_path / "out", "--to", "megatron-dist", "--target", "local", "--vocab-multiple", 16)
    found = read_dist(next((tmp_path / "out").glob("iter_*")))
    same(found.tensors, truth.tensors)
    assert found.objects.keys() == truth.objects.keys() | {"decoder.final_layernorm._extra_state/shard_0_1"}
    reshard(src, tmp_path / "te", "--to", "megatron-dist", "--target", "transformer_engine")
    keys = read_dist(next((tmp_path / "te").glob("iter_*"))).tensors.keys()
    moved = {
        "decoder.layers.0.pre_mlp_layernorm.weight": "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
        **{
            f"decoder.layers.{i}.self_attention.{n}_layernorm.weight": (
                f"decoder.layers.{i}.self_attention.linear_{n}_up_proj.layer_norm_weight"
            )
            for i in range(2)
            for n in ("q", "kv")
        },
    }
    assert keys == {moved.get(n, n) for n in truth.tensors}


def _id(value: Any) -> str:
    return str(value["model_type"] if isinstance(value, dict) else value)


@pytest.mark.sample("llama-1", "qwen3_moe-2")
@pytest.mark.parametrize(("config", "ep"), [(LLAMA, 1), (QWEN3_MOE, 1), (QWEN3_MOE, 2)], ids=_id)
def test_the_optimizer(config: dict[str, Any], ep: int, tmp_path: Path) -> None:
    """Experts have an optimizer of their own where they are shared out."""
    moe = config is QWEN3_MOE
    held = run(tmp_path / "run", config)
    mesh = (
        "--tp-out",
        2,
        "--vocab-multiple",
        64,
        "--target",
        "local",
        *(("--ep-out", ep, "--etp-out", 1) if moe else ()),
    )
    done = reshard(tmp_path / "run", tmp_path / "out", "--to", "megatron-dist", *mesh, "--verify")
    found, common = saved(tmp_path / "out", 7)
    layers = config["num_hidden_layers"]
    wanted = normed(stacked(fused(held["model"], config), layers))
    for part in ("param", "exp_avg", "exp_avg_sq"):
        for key, array in normed(stacked(fused(held[part], config), layers)).items():
            chain = f"chained_{int('.experts.' in key)}." if ep > 1 else ""
            wanted[f"{chain}optimizer.state.{part}.{key}"] = array
    same(found.tensors, wanted)
    optimizers = [common["optimizer"][i] for i in range(2)] if ep > 1 else [common["optimizer"]]
    assert all(o["param_state_sharding_type"] == "fully_reshardable" for o in optimizers)
    groups = [o["optimizer"]["param_groups"] for o in optimizers]
    kinds = [[(g["is_expert_parallel"], g["wd_mult"], g["step"]) for g in of] for of in groups]
    dense = [(False, 1.0, 7), (False, 0.0, 7)]
    assert kinds == ([dense, [(True, 1.0, 7)]] if ep > 1 else [dense])
    for group in [g for of in groups for g in of]:
        assert (group["lr"], group["betas"], group["eps"]) == (5e-4, (0.9, 0.95), 1e-6)
        assert "params" not in group
        assert "max_lr" not in group  # the run's own --lr is
    assert common["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"
    assert vars(common["args"])["no_save_optim"] is False
    assert common["opt_param_scheduler"]["max_lr"] is None
    assert "--override-opt-param-scheduler" in done.err
    assert ("ep 1" in done.err) == (moe and ep == 1)


def test_parameters_without_masters_are_their_own(tmp_path: Path) -> None:
    held = run(tmp_path / "run", LLAMA, masters=False)
    done = reshard(tmp_path / "run", tmp_path / "out", "--to", "megatron-dist", "--verify")
    assert "float32 of the model weights (exact)" in done.err
    found = saved(tmp_path / "out", 7)[0].tensors
    wanted = normed(stacked(fused(held["param"], LLAMA), 4))
    same({n: found[f"optimizer.state.param.{n}"] for n in wanted}, wanted)


def test_a_float32_model_is_its_own_master(tmp_path: Path) -> None:
    held = run(tmp_path / "run", LLAMA)
    reshard(
        tmp_path / "run",
        tmp_path / "out",
        "--to",
        "megatron-dist",
        "--dtype",
        "f32",
        "--only",
        "model",
        "--only",
        "optimizer",
    )
    found = saved(tmp_path / "out", 7)[0].tensors
    wide = {n: a.astype(np.float32) for n, a in held["model"].items()}
    for name, array in normed(stacked(fused(wide, LLAMA), 4)).items():
        same({n: found[n] for n in (name, f"optimizer.state.param.{name}")},
             {name: array, f"optimizer.state.param.{name}": array})  # fmt: skip


def test_megatron_to_megatron_keeps_what_a_run_has(tmp_path: Path) -> None:
    src = FIXTURES / "megatron/dist/llama_tp2"
    reshard(src, tmp_path / "out", "--to", "megatron-dist", "--vocab-multiple", 80, "--verify")
    truth, common = read_dist(next(src.glob("iter_*"))), torch_load(next(src.glob("iter_*")) / "common.pt")
    found, ours = saved(tmp_path / "out", 5)
    rows = 131
    for name, array in truth.tensors.items():
        table = name.endswith(("word_embeddings.weight", "output_layer.weight"))
        same({name: found.tensors[name][: rows if table else None]}, {name: array[: rows if table else None]})
    assert found.tensors.keys() == truth.tensors.keys()
    assert ours["opt_param_scheduler"] == common["opt_param_scheduler"]
    assert vars(ours["args"])["consumed_train_samples"] == vars(common["args"])["consumed_train_samples"] == 320
    groups = (common["optimizer"]["optimizer"]["param_groups"], ours["optimizer"]["optimizer"]["param_groups"])
    for theirs, mine in zip(*groups, strict=True):
        assert {k: mine[k] for k in theirs} == theirs


@pytest.mark.thorough
def test_the_same_save_is_the_same_bytes(tmp_path: Path) -> None:
    run(tmp_path / "run", LLAMA)
    for name in "ab":
        reshard(tmp_path / "run", tmp_path / name, "--to", "megatron-dist", "--tp-out", 2)
    files = sorted(p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*") if p.is_file())
    assert len(files) == 7
    for path in files:
        assert (tmp_path / "a" / path).read_bytes() == (tmp_path / "b" / path).read_bytes()


def test_what_is_refused(tmp_path: Path) -> None:
    src, held = model(tmp_path / "hf")
    error = refused(src, tmp_path / "x", "--to", "megatron-dist", "--tp-out", 2, "--ranks-out", 1, code=2)
    assert "the metadata of a save describes all of its files" in error
    steps = {"model.norm.weight": 3}
    run(tmp_path / "run", LLAMA, steps=steps)
    error = refused(tmp_path / "run", tmp_path / "x", "--to", "megatron-dist")
    assert "they differ: 7 of `embedding.word_embeddings.weight`, 3 of `decoder.final_layernorm.weight`" in error
    fp8 = {n: Raw("BF16", a.view(np.uint16)) for n, a in held.items()}
    name = "model.layers.0.mlp.down_proj.weight"
    fp8[name] = Raw("F8_E4M3", np.zeros(held[name].shape, np.uint8))
    error = refused(save_hf(tmp_path / "fp8", fp8, LLAMA), tmp_path / "x", "--to", "megatron-dist")
    assert "--dequant bf16" in error
    some = {n: Raw("BF16", a.view(np.uint16)) for n, a in held.items() if "layers.3." not in n}
    less = save_hf(tmp_path / "less", some, LLAMA)
    done = reshard(less, tmp_path / "less_out", "--to", "megatron-dist")
    assert "the layers differ (3 of 4 are here)" in done.err


@pytest.mark.parametrize("lost", ["exp_avg_sq", "model"])
def test_an_optimizer_that_cannot_go_on_is_refused(lost: str, tmp_path: Path) -> None:
    held = names()
    if lost == "exp_avg_sq":
        del held["optimizer/lm_head.weight/exp_avg_sq"]
        words = "is Adam, and `output_layer.weight` has no `exp_avg_sq`"
        more: tuple[str, ...] = ()
    else:
        words, more = "holds the model, and the state of its optimizer", ("--only", "optimizer")
    error = refused(save_run(tmp_path / "run", held), tmp_path / "x", "--to", "megatron-dist", *more)
    assert words in error
