"""Which way round Paddle's weights lie, by what config.json says; the sizes may be those of ``text_config``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckpttool.dialects.paddle import head_in_out
from ckpttool.formats.paddle.config import config_dtype, expected_side
from ckpttool.layout.family import load_family
from tests.helpers.command import reshard
from tests.helpers.families import MODELS, H, V
from tests.helpers.tensorfile import read_all, save_hf

SIZES: dict[str, Any] = {"hidden_size": 48, "vocab_size": 130, "torch_dtype": "bfloat16"}
PLACES = [SIZES, {"model_type": "x", "text_config": SIZES}, {"hidden_size": None, "text_config": SIZES}]


@pytest.mark.parametrize("config", PLACES)
def test_sizes_tell(config: dict[str, Any]) -> None:
    for prefix in ("model", "llama"):
        for tied in (True, False):
            assert head_in_out((48, 130), prefix, config, tied=tied)
            assert head_in_out((48, 65), prefix, config, tied=tied)
            assert not head_in_out((130, 48), prefix, config, tied=tied)
    assert expected_side("model.layers.0.mlp.down_proj.weight", config) == (None, 48)
    assert expected_side("model.layers.0.self_attn.q_proj.weight", config) == (48, None)
    assert config_dtype(config) == "BF16"


def test_where_sizes_do_not_tell_names_and_writer_do() -> None:
    for config in ({}, {"hidden_size": 48, "text_config": []}, {"hidden_size": True, "vocab_size": 130}):
        assert head_in_out((48, 48), "llama", config, tied=False)
        assert not head_in_out((48, 48), "llama", config, tied=True)
        assert not head_in_out((48, 48), "model", config, tied=False)
        assert head_in_out((48, 48), "model", {**config, "paddlenlp_version": "3.0.0"}, tied=False)
        assert expected_side("model.layers.0.mlp.down_proj.weight", config)[0] is None


@pytest.mark.parametrize(
    ("said", "tied"),
    [
        ({}, True),
        ({"tie_word_embeddings": False}, False),
        ({"text_config": {"tie_word_embeddings": False}}, False),
        ({"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": False}}, True),
    ],
)
def test_tied_in_the_text_config(said: dict[str, Any], *, tied: bool) -> None:
    assert load_family("gemma", {**SIZES, **said}).tied is tied


@pytest.mark.parametrize(
    ("family", "embedding"), [("gpt_neox", "gpt_neox.embed_in.weight"), ("llama", "embed_tokens.weight")]
)
def test_embeddings_lie_as_everywhere(family: str, embedding: str, tmp_path: Path) -> None:
    """Paddle's Embedding is [tokens, hidden] like torch's; only linear weights are the other way round."""
    model = MODELS[family]
    save_hf(tmp_path / "src", model.tensors(), model.config)
    reshard(tmp_path / "src", tmp_path / "dst", "--to", "unified", "-q")
    written = {n: r for n, r in read_all(tmp_path / "dst").items() if n.endswith(embedding)}
    assert [r.bits.shape for r in written.values()] == [(V, H)]
