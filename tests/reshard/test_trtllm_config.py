"""What TensorRT-LLM's config.json says of a model, to there and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckpttool.errors import UnsupportedError
from ckpttool.formats.engines.trtllm import from_hugging_face, to_hugging_face
from tests.helpers.command import reshard

FIXTURE = Path(__file__).parents[2] / "fixtures/llama_tp8"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def built(src: Path, dst: Path, fields: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The configs of ``--to trtllm`` and of the way back, for a model whose config has these fields."""
    reshard(FIXTURE, src, "--to", "hf")
    config = json.loads((src / "config.json").read_text())
    for key in ("rope_theta", "rope_scaling", "rope_parameters"):
        config.pop(key, None)
    (src / "config.json").write_text(json.dumps({**config, **fields}))
    reshard(src, dst, "--to", "trtllm", "--tp-out", "2")
    reshard(dst, dst.with_name("back"), "--to", "hf")
    theirs, back = (json.loads((d / "config.json").read_text()) for d in (dst, dst.with_name("back")))
    return theirs, back


@pytest.mark.product
@pytest.mark.parametrize("scaling", [None, LLAMA3], ids=["plain", "llama3"])
@pytest.mark.parametrize("new", [False, True], ids=["rope_theta", "rope_parameters"])
def test_rotary_base(tmp_path: Path, scaling: dict[str, Any] | None, new: bool) -> None:
    """transformers 5 keeps base and scaling in ``rope_parameters``; TensorRT-LLM would take 10,000 for a base that is
    not there."""
    fields: dict[str, Any]
    if new:
        fields = {"rope_parameters": {"rope_theta": 500000.0, **(scaling or {"rope_type": "default"})}}
    else:
        fields = {"rope_theta": 500000.0, **({"rope_scaling": scaling} if scaling else {})}
    theirs, back = built(tmp_path / "src", tmp_path / "dst", fields)
    assert theirs["rotary_base"] == 500000.0
    assert theirs.get("rotary_scaling") == scaling
    assert back["rope_theta"] == 500000.0
    assert back.get("rope_scaling") == scaling


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_biases(model_type: str) -> None:
    """A loader that is not told of biases leaves them out."""
    ours = {"model_type": model_type, "num_attention_heads": 4, "hidden_size": 16, "mlp_bias": True}
    theirs = from_hugging_face({**ours, "attention_bias": True})
    assert theirs["attn_bias"] is theirs["mlp_bias"] is True
    back = to_hugging_face(theirs)
    assert back["attention_bias"] is back["mlp_bias"] is True
    assert "attn_bias" not in from_hugging_face(ours) or model_type == "qwen2"


@pytest.mark.parametrize("window", [None, 2048])
def test_a_window_of_mistral(window: int | None) -> None:
    """transformers takes 4,096 where nothing is said."""
    ours = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}
    assert to_hugging_face(from_hugging_face({**ours, "num_attention_heads": 4}))["sliding_window"] == window


def test_a_window_that_nothing_is_said_of() -> None:
    assert from_hugging_face({"model_type": "mistral", "num_attention_heads": 4})["sliding_window"] == 4096


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8},
        {"model_type": "mixtral", "sliding_window": 8},
        {"model_type": "llama", "layer_types": ["sliding_attention"]},
    ],
)
def test_windows_that_the_config_cannot_say(fields: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="cannot say that layers have a window"):
        from_hugging_face({"num_attention_heads": 4, **fields})
    from_hugging_face(
        {"model_type": "qwen2", "num_attention_heads": 4, "sliding_window": 8, "use_sliding_window": False}
    )
