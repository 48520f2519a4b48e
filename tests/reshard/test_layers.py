"""Models whose layers have different sizes, from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.helpers.command import ckpttool, refused, reshard

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 2,
    "vocab_size": 8,
    "dtype": "float32",
    "per_layer_config": {"01": {"num_key_value_heads": 1, "intermediate_size": 16}},
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A Llama whose second layer has one key head and a wider MLP, as transformers 5 saves it."""
    tensors = {"model.embed_tokens.weight": (8, 8), "model.norm.weight": (8,), "lm_head.weight": (8, 8)}
    for i, (keys, inner) in enumerate([(8, 8), (2, 16)]):
        at = f"model.layers.{i}."
        tensors |= {f"{at}self_attn.{n}_proj.weight": (8, 8) for n in "qo"}
        tensors |= {f"{at}self_attn.{n}_proj.weight": (keys, 8) for n in "kv"}
        tensors |= {f"{at}mlp.{n}_proj.weight": (inner, 8) for n in ("gate", "up")}
        tensors |= {f"{at}mlp.down_proj.weight": (8, inner)}
        tensors |= {f"{at}{n}_layernorm.weight": (8,) for n in ("input", "post_attention")}
    path = tmp_path / "src"
    path.mkdir()
    draw = np.random.default_rng(0)
    save_file({n: draw.standard_normal(s, np.float32) for n, s in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.mark.parametrize("options", [("--to", "ranks"), ("--to", "vllm"), ("--to", "ranks", "--fuse")], ids=str)
def test_every_layer_has_its_own_heads(model: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    reshard(model, tmp_path / "cut", *options, "--tp-out", "4", "--verify")
    reshard(tmp_path / "cut", tmp_path / "back", "--to", "hf", "--verify")
    here = load_file(model / "model.safetensors")
    there = {n: t for file in (tmp_path / "back").glob("*.safetensors") for n, t in load_file(file).items()}
    assert here.keys() == there.keys()
    for name, whole in here.items():
        np.testing.assert_array_equal(there[name], whole)


def test_the_one_key_head_of_a_layer_is_on_every_rank(model: Path, tmp_path: Path) -> None:
    reshard(model, tmp_path / "cut", "--to", "ranks", "--tp-out", "4")
    whole = load_file(model / "model.safetensors")
    for layer, rows in (0, 2), (1, 0):
        name = f"model.layers.{layer}.self_attn.k_proj.weight"
        for rank, file in enumerate(sorted((tmp_path / "cut").glob("*.safetensors"))):
            np.testing.assert_array_equal(load_file(file)[name], whole[name][rank * rows :][:2])


def test_the_size_of_the_config_is_that_of_the_file(model: Path) -> None:
    found = [ckpttool("size", path, "--recipe", "bf16", "--json") for path in (model, model / "config.json")]
    assert [done.code for done in found] == [0, 0], found[1].err
    stored, declared = (json.loads(done.out) for done in found)
    assert stored["parameters"] == declared["parameters"]


@pytest.mark.parametrize("target", ["trtllm", "megatron", "meta"])
def test_formats_with_a_config_of_their_own_cannot_say_it(model: Path, tmp_path: Path, target: str) -> None:
    said = refused(model, tmp_path / "dst", "--to", target, code=1)
    assert "layers of the model differ (`per_layer_config` of config.json)" in said
