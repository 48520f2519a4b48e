"""Small cases of what the random walk has found: configs that nest, stages that are uneven, one rank."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command import ckpttool, refused, reshard
from tests.helpers.families import LAYERS, MODELS, Model, quantized
from tests.helpers.tensorfile import assert_same, read, read_all, save_hf


def nested(config: dict[str, Any]) -> dict[str, Any]:
    """The same config with the model's fields in a ``text_config``."""
    outer = ("architectures", "model_type", "tie_word_embeddings")
    return {k: config[k] for k in outer if k in config} | {
        "text_config": {k: v for k, v in config.items() if k not in outer}
    }


def out_and_back(model: Model, at: Path, *options: object) -> Path:
    """A checkpoint in a format, which comes back as it was. Returns where the format's files are."""
    tensors = {n: r for n, r in model.tensors().items() if "inv_freq" not in n}
    save_hf(at / "src", tensors, model.config)
    reshard(at / "src", at / "out", *options, "--verify")
    reshard(at / "out", at / "back", "--to", "hf", "--verify")
    assert_same(read_all(at / "back"), tensors)
    return at / "out"


@pytest.mark.product(one_in=2)
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_trtllm_has_the_sizes_of_a_nested_config(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    out = out_and_back(replace(model, config=nested(model.config)), tmp_path, "--to", "trtllm", "--tp-out", 2)
    config = json.loads((out / "config.json").read_text())
    for field in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "vocab_size"):
        assert config[field] == model.config[field]
    assert config.get("moe", {}).get("num_experts") == model.config.get("num_local_experts")


def test_vllm_whole_experts_of_a_nested_config(tmp_path: Path) -> None:
    model = MODELS["qwen3_moe"]
    out_and_back(replace(model, config=nested(model.config)), tmp_path, "--to", "vllm", "--tp-out", 2, "--ep-out", 2)


def test_scales_of_fused_heads_are_no_rows_of_the_query(tmp_path: Path) -> None:
    """Blocks are rows of a grid; they are not counted against the columns of the output projection."""
    out_and_back(quantized(MODELS["llama"], 2), tmp_path, "--to", "vllm", "--tp-out", 1, "--pp-out", LAYERS)


def test_vllm_stores_a_tied_head_of_gpt_neox_once(tmp_path: Path) -> None:
    model = MODELS["gpt_neox"]
    shapes = {n: s for n, s in model.shapes.items() if n != "embed_out.weight"}
    config = {**model.config, "tie_word_embeddings": True}
    tied = replace(model, config=config, shapes=shapes)
    tensors = {n: r for n, r in tied.tensors().items() if not n.endswith(("attention.bias", "masked_bias", "inv_freq"))}
    save_hf(tmp_path / "src", tensors, config)
    reshard(tmp_path / "src", tmp_path / "out", "--to", "vllm", "--tp-out", 1, "--verify")
    held = read_all(tmp_path / "out")
    assert "lm_head.weight" in held
    assert "model.embed_in.weight" not in held
    reshard(tmp_path / "out", tmp_path / "back", "--to", "hf")
    assert_same(read_all(tmp_path / "back"), tensors)


@pytest.mark.product(one_in=2)
@pytest.mark.parametrize("target", ["vllm", "trtllm"])
def test_uneven_stages_stay_uneven(target: str, tmp_path: Path) -> None:
    """Neither format says how many layers a stage has; its ranks do."""
    layout = f"1,{LAYERS - 1}"
    assert LAYERS % 2
    options = ("--to", target, "--tp-out", 1, "--pp-out", 2, "--pp-layout", layout)
    out = out_and_back(MODELS["llama"], tmp_path, *options)
    reshard(out, tmp_path / "again", "--to", target)
    for path in out.glob("*.safetensors"):
        assert_same(read(tmp_path / "again" / path.name), read(path))


def test_trtllm_has_no_virtual_stages(tmp_path: Path) -> None:
    """A stage numbers its layers from 0: those of two chunks would be taken for neighbours."""
    model = MODELS["llama"]
    save_hf(tmp_path / "src", model.tensors(), model.config)
    options = ("--to", "trtllm", "--pp-out", 2, "--pp-layout", "1,1,1,0")
    err = refused(tmp_path / "src", tmp_path / "out", *options, code=2)
    assert "virtual stages" in err


def test_drop_keys_keeps_the_format_of_one_rank(tmp_path: Path) -> None:
    model = MODELS["qwen2"]
    save_hf(tmp_path / "src", model.tensors(), model.config)
    reshard(tmp_path / "src", tmp_path / "out", "--to", "vllm", "--tp-out", 1)
    done = ckpttool("drop-keys", tmp_path / "out", tmp_path / "less", "*.bias", "--verify")
    assert done.code == 0, done.err
    before, after = read_all(tmp_path / "out"), read_all(tmp_path / "less")
    assert_same(after, {n: t for n, t in before.items() if not n.endswith(".bias")})


def test_a_tied_embedding_that_is_whole_is_on_the_last_stage_too(tmp_path: Path) -> None:
    """Paddle keeps a vocabulary that tp does not divide whole; the last stage needs it as its head all the same."""
    model = MODELS["mistral"]
    assert model.config["tie_word_embeddings"]
    assert model.config["vocab_size"] % 2
    out = out_and_back(model, tmp_path, "--to", "hybrid", "--tp-out", 2, "--pp-out", LAYERS)
    for path in out.glob(f"model_state.tp*_pp{LAYERS - 1:02d}.pdparams"):
        assert b"embed_tokens.weight" in path.read_bytes()


@pytest.mark.product(one_in=2)
@pytest.mark.parametrize("nest", [False, True])
def test_a_square_head_of_paddlenlp_comes_back(nest: bool, tmp_path: Path) -> None:
    """It is [hidden, vocab] there, also under names that do not begin with the model's type."""
    model = MODELS["qwen3"]
    square = {"model.embed_tokens.weight": (48, 48), "lm_head.weight": (48, 48)}
    assert model.config["hidden_size"] == 48
    config = {**model.config, "vocab_size": 48, "tie_word_embeddings": False}
    model = replace(model, config=nested(config) if nest else config, shapes={**model.shapes, **square})
    out_and_back(model, tmp_path, "--to", "unified", "--target", "paddlenlp-3.0")


def test_a_head_of_paddlenlp_with_a_nested_config(tmp_path: Path) -> None:
    model = MODELS["qwen3"]
    out_and_back(replace(model, config=nested(model.config)), tmp_path, "--to", "unified", "--target", "paddlenlp-3.0")


def test_a_merge_of_trtllm_checkpoints_has_a_config_of_hugging_face(tmp_path: Path) -> None:
    model = MODELS["qwen2"]
    save_hf(tmp_path / "src", model.tensors(), model.config)
    for name in ("a", "b"):
        reshard(tmp_path / "src", tmp_path / name, "--to", "trtllm", "--tp-out", 2)
    done = ckpttool("merge", tmp_path / "a", tmp_path / "b", "--allow-nonfinite", "-o", tmp_path / "out")
    assert done.code == 0, done.err
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "qwen2"
    assert config["architectures"] == model.config["architectures"]
    reshard(tmp_path / "out", tmp_path / "again", "--to", "vllm", "--tp-out", 2)
