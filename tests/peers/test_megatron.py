"""megatron-core itself, on CPU: it loads what is written for it, and computes what transformers' model does.

What it saves is read, with the optimizer. Its own modules and those of Transformer Engine (tests/peers/megatron_cpu.py)
name, cut and order the parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.helpers.tiny_models import TOKENS, save_tiny, tiny_config
from tests.peers.megatron_ranks import Case, Held, load_and_run, make, resume
from tests.peers.rank_group import Group
from tests.peers.tool import reshard

pytestmark = pytest.mark.usefixtures("megatron")
TOLERANCE = 1e-5
"""Largest difference of any logit: kernels of other sizes, and sums over ranks, round otherwise."""
TRAINED = [[*row, 1] for row in TOKENS]


class Model(NamedTuple):
    """A variant of tests/helpers/tiny_models.py, and its fields that are changed."""

    variant: str
    fields: dict[str, Any]

    def save(self, folder: Path) -> Path:
        return save_tiny(self.variant, folder, **self.fields)

    @property
    def experts(self) -> bool:
        return "moe" in self.variant or self.variant in ("mixtral", "deepseek_v3", "gpt_oss")


LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0}
MODELS = {
    "llama": Model("llama", {"vocab_size": 251, "num_hidden_layers": 4}),
    "llama_biases_tied": Model("llama_tied", {}),
    "llama_one_group": Model(
        "llama", {"num_key_value_heads": 1, "rope_parameters": {**LLAMA3, "original_max_position_embeddings": 8192}}
    ),
    "mistral": Model("mistral", {"num_key_value_heads": 4}),
    "qwen2_tied": Model("qwen2", {"tie_word_embeddings": True, "vocab_size": 167}),
    "qwen3": Model("qwen3", {}),
    "qwen3_moe": Model("qwen3_moe", {"mlp_only_layers": [], "num_experts": 4}),
    "qwen3_moe_dense_first": Model("qwen3_moe", {"num_experts": 4}),
    "mixtral": Model("mixtral", {}),
    "deepseek_v3": Model("deepseek_v3", {"attention_bias": False}),
    "gpt_oss": Model(
        "gpt_oss", {"rope_parameters": {**YARN, "original_max_position_embeddings": 16, "truncate": False}}
    ),
    "glm4_moe": Model("glm4_moe", {}),
    "nemotron": Model("nemotron", {}),
    "gpt2": Model("gpt2", {}),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Checkpoints of transformers, by the model's name."""
    return cache(lambda name: MODELS[name].save(tmp_path_factory.mktemp(name)))


@cache
def expected(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    with torch.no_grad():
        out: torch.Tensor = model(torch.tensor(TOKENS), use_cache=False).logits
    assert out.std() > 0.5, "the logits say something"
    return out


def meshes(name: str) -> list[dict[str, Any]]:
    """tp 1, tp 2 and pp 2; experts are shared out with the second, in one of both ways."""
    cut: dict[str, Any] = {"tp": 2}
    if MODELS[name].experts:
        cut |= {"ep": 2, "etp": 1}
    return [{}, cut, {"pp": 2}]


def options(model: Model, mesh: dict[str, Any], te: bool) -> list[str]:
    """Of ckpttool, for a mesh."""
    whole = {"tp": 1, "pp": 1, **mesh}
    if model.experts:
        whole = {"ep": 1, "etp": whole["tp"], **whole}
    given = [text for key, n in whole.items() for text in (f"--{key}-out", str(n))]
    return [*given, "--target", "transformer_engine" if te else "local"]


@pytest.mark.parametrize("name", MODELS)
def test_it_loads_what_is_written(
    name: str, source: Callable[[str], Path], ranks: Callable[[int], Group], tmp_path: Path
) -> None:
    """Legacy files in their own mesh, torch_dist in others as well."""
    hf = source(name)
    want = expected(hf)
    for i, mesh in enumerate(meshes(name)):
        te, folder = i > 0, tmp_path / f"legacy{i}"
        reshard(hf, folder, "--to", "megatron", *options(MODELS[name], mesh, te))
        got = ranks(2).run(load_and_run, Case(str(hf), te=te, **mesh), str(folder), TOKENS)
        assert (got - want).abs().max() <= TOLERANCE, mesh
    for te, written in (True, meshes(name)[1]), (False, {}):
        folder = tmp_path / f"dist{te}"
        reshard(hf, folder, "--to", "megatron-dist", *options(MODELS[name], written, te))
        for mesh in meshes(name) if te else meshes(name)[1:2]:
            got = ranks(2).run(load_and_run, Case(str(hf), te=te, **mesh), str(folder), TOKENS)
            assert (got - want).abs().max() <= TOLERANCE, mesh


class Run(NamedTuple):
    """A model of MODELS, how it is trained and saved."""

    name: str
    form: str
    sharding: str = ""
    metadata: dict[str, Any] = {}  # noqa: RUF012  never changed
    case: dict[str, Any] = {}  # noqa: RUF012

    def go(self, hf: Path, folder: Path, rank: Group, steps: int = 0) -> tuple[torch.Tensor, Held]:
        args = (Case(str(hf), **self.case), TRAINED, str(folder), self.form, self.sharding, steps)
        done: tuple[torch.Tensor, Held] = rank.run(make, *args, **self.metadata)
        return done


SAVED = {
    "interleaved": Run("llama", "legacy", case={"pp": 2, "vp": 2, "te": True}),
    "uneven": Run("llama", "legacy", case={"pp": 2, "transformer": {"num_layers_in_first_pipeline_stage": 1}}),
    "less_than_a_group": Run("llama_one_group", "legacy", case={"tp": 2, "te": True}),
    "biases_tied": Run("llama_biases_tied", "dist", case={"tp": 2, "te": True}),
    "tied_in_stages": Run("qwen2_tied", "legacy", case={"pp": 2}),
    "stages": Run("qwen3", "dist", case={"pp": 2}),
    "experts": Run("qwen3_moe", "legacy", case={"tp": 2, "ep": 2, "etp": 1, "te": True}),
    "experts_cut": Run("mixtral", "dist", case={"tp": 2, "te": True}),
    "experts_one_by_one": Run("mixtral", "dist", "", {"singleton_local_shards": True}, {"ep": 2}),
    "dense_first": Run("qwen3_moe_dense_first", "legacy", case={"pp": 2}),
    "latent": Run("deepseek_v3", "dist", case={"tp": 2, "ep": 2, "etp": 1, "te": True}),
    "latent_cut": Run("deepseek_v3", "legacy", case={"tp": 2}),
    "gpt_oss": Run("gpt_oss", "dist", case={"tp": 2, "ep": 2, "etp": 1, "te": True}),
    "gpt_oss_local": Run("gpt_oss", "legacy", case={"tp": 2, "etp": 1}),
    "glm4_moe": Run("glm4_moe", "dist", case={"ep": 2}),
    "nemotron": Run("nemotron", "legacy", case={"tp": 2, "te": True}),
    "gpt2": Run("gpt2", "dist", case={"tp": 2}),
}


@pytest.mark.parametrize("name", SAVED)
def test_what_it_saves_computes_the_same(
    name: str, source: Callable[[str], Path], ranks: Callable[[int], Group], tmp_path: Path
) -> None:
    """Without a config.json: its own arguments have to do."""
    run = SAVED[name]
    want, _ = run.go(source(run.name), tmp_path / "save", ranks(2))
    reshard(tmp_path / "save", tmp_path / "hf", "--to", "hf")
    assert (expected(tmp_path / "hf") - want).abs().max() <= TOLERANCE


TRAINS = {"dtype": "bfloat16", "optimizer": "distributed"}
FULL = "fully_reshardable"
RESUMED: dict[str, tuple[Run, str, dict[str, Any]]] = {
    "llama": (Run("llama", "legacy", case={**TRAINS, "tp": 2}), "megatron", {"pp": 2}),
    "buckets": (
        Run(
            "llama",
            "dist",
            "dp_reshardable",
            case={**TRAINS, "te": True, "ddp": {"overlap_grad_reduce": True, "bucket_size": 9000}},
        ),
        "megatron",
        {"tp": 2},
    ),
    "tied": (Run("qwen2_tied", "dist", FULL, case={**TRAINS, "pp": 2}), "megatron", {"pp": 2}),
    "interleaved": (Run("llama", "legacy", case={**TRAINS, "pp": 2, "vp": 2, "te": True}), "megatron-dist", {"tp": 2}),
    "experts": (
        Run("qwen3_moe", "legacy", case={**TRAINS, "tp": 2, "ep": 2, "etp": 1, "te": True}),
        "megatron-dist",
        {"pp": 2},
    ),
    "experts_dist": (
        Run("glm4_moe", "dist", "dp_reshardable", case={**TRAINS, "ep": 2, "te": True}),
        "megatron",
        {"tp": 2, "ep": 2, "etp": 1},
    ),
    "experts_among_others": (
        Run("glm4_moe", "dist", "dp_reshardable", case={**TRAINS, "te": True}),
        "megatron",
        {"ep": 2, "etp": 1},
    ),
    "experts_cut_among_others": (
        Run("mixtral", "dist", "dp_reshardable", case={**TRAINS, "tp": 2, "te": True}),
        "megatron",
        {"pp": 2},
    ),
    "experts_one_by_one_in_stages": (
        Run("qwen3_moe", "dist", "dp_reshardable", case={**TRAINS, "pp": 2}),
        "megatron",
        {"tp": 2},
    ),
    "latent": (Run("deepseek_v3", "dist", FULL, case={**TRAINS, "tp": 2, "te": True}), "megatron", {"tp": 2}),
    "plain": (
        Run("gpt2", "legacy", case={"dtype": "bfloat16", "optimizer": "plain", "tp": 2}),
        "megatron-dist",
        {"pp": 2},
    ),
    "float32": (Run("qwen3", "dist", FULL, case={"optimizer": "distributed", "tp": 2}), "megatron", {"pp": 2}),
}
"""How it was trained, what ckpttool makes of it and the mesh that goes on."""


@pytest.mark.parametrize("name", RESUMED)
def test_it_goes_on_from_what_is_written(
    name: str, source: Callable[[str], Path], ranks: Callable[[int], Group], tmp_path: Path
) -> None:
    """With the same parameters, masters, moments and steps."""
    run, to, mesh = RESUMED[name]
    hf = source(run.name)
    _, want = run.go(hf, tmp_path / "save", ranks(2), steps=2)
    te = run.case.get("te", False)
    reshard(tmp_path / "save", tmp_path / "out", "--to", to, *options(MODELS[run.name], mesh, te))
    how = {"te": te, "dtype": run.case.get("dtype", "float32"), "optimizer": "distributed", **mesh}
    got, _ = ranks(2).run(resume, Case(str(hf), **how), str(tmp_path / "out"), TRAINED)
    assert got.keys() == want.keys()
    rows = tiny_config(MODELS[run.name].variant, **MODELS[run.name].fields).vocab_size
    for key, tensor in want.items():
        if "word_embeddings" in key or "output_layer" in key:  # their padding differs between meshes
            assert torch.equal(got[key].reshape(-1)[: rows * 64], tensor.reshape(-1)[: rows * 64]), key
        else:
            assert torch.equal(got[key], tensor), key


def test_what_is_wrong_is_noticed(source: Callable[[str], Path], ranks: Callable[[int], Group], tmp_path: Path) -> None:
    """Two heads of queries that stand in for each other, and a tensor that is not there."""
    hf = source("llama")
    reshard(hf, tmp_path / "save", "--to", "megatron", *options(MODELS["llama"], {}, te=True))
    (file,) = (tmp_path / "save").rglob("model_optim_rng.pt")
    state = torch.load(file, weights_only=False)
    heads = state["model"]["decoder.layers.0.self_attention.linear_qkv.weight"].view(2, 4, 24, 64)[:, :2]
    heads.copy_(heads.flip(1).clone())
    torch.save(state, file)
    case, folder = Case(str(hf), te=True), str(tmp_path / "save")
    got = ranks(1).run(load_and_run, case, folder, TOKENS)
    assert (got - expected(hf)).abs().max() > 100 * TOLERANCE
    del state["model"]["decoder.final_layernorm.weight"]
    torch.save(state, file)
    with pytest.raises(RuntimeError, match=r"differ in \['decoder.final_layernorm.weight'\]"):
        ranks(1).run(load_and_run, case, folder, TOKENS)
