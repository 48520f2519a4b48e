"""Which kind of attention each layer has, as family and config.json say it."""

from __future__ import annotations

from typing import Any

import pytest

from ckpttool.errors import CkptError, ConflictError, LayoutError, UnsupportedError
from ckpttool.layout.cache import layer_kinds
from ckpttool.layout.family import find_family, load_family

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
SHORT = {
    FULL: "F", SLIDING: "S", LINEAR: "L", "chunked_attention": "C", "conv": "c", "moe": "-", "mlp": "-", "hybrid": "H",
    "indexed_attention": "I", "cross_attention": "x", "local_attention": "l",
}  # fmt: skip


KIMI = {"full_attn_layers": [4, 8], "kda_layers": [1, 2, 3, 5, 6, 7]}


def kinds(model_type: str, layers: int = 8, **fields: Any) -> str:
    """A letter for each layer."""
    config = {"model_type": model_type, "num_hidden_layers": layers, **fields}
    return "".join(SHORT[k] for k in layer_kinds(load_family(find_family(config) or "", config), config))


@pytest.mark.parametrize(
    ("model_type", "fields", "expected"),
    [
        ("llama", {}, "FFFFFFFF"),
        ("mistral", {}, "SSSSSSSS"),  # the window of its config class
        ("mistral", {"sliding_window": None}, "FFFFFFFF"),
        ("llama", {"sliding_window": 8, "use_sliding_window": False}, "FFFFFFFF"),
        ("llama", {"layer_types": [SLIDING, FULL] * 4}, "SFSFSFSF"),
        ("llama", {"layer_types": [SLIDING, "attention"] * 9}, "SFSFSFSF"),  # more than layers: for MTP
        ("gemma", {}, "FFFFFFFF"),
        ("gemma2", {}, "SFSFSFSF"),
        ("gemma3_text", {}, "SSSSSFSS"),
        ("gemma3_text", {"sliding_window_pattern": 3}, "SSFSSFSS"),
        ("gemma3n_text", {}, "SSSSFSSS"),
        ("gemma4_text", {"layer_types": [SLIDING] * 8}, "SSSSSSSF"),
        ("cohere2", {}, "SSSFSSSF"),
        ("cohere2", {"sliding_window_pattern": 2}, "SFSFSFSF"),
        ("olmo2", {}, "FFFFFFFF"),
        ("olmo3", {}, "SSSFSSSF"),
        ("exaone4", {}, "SSSFSSSF"),
        ("exaone4", {"sliding_window_pattern": "LLLG"}, "SSSFSSSF"),
        ("exaone4", {"sliding_window": None, "sliding_window_pattern": None}, "FFFFFFFF"),
        ("gpt_oss", {}, "SFSFSFSF"),
        ("smollm3", {"sliding_window": 8}, "FFFFFFFF"),
        ("smollm3", {"sliding_window": 8, "use_sliding_window": True}, "FFFSFFFS"),
        ("qwen2", {"sliding_window": 8, "max_window_layers": 6}, "FFFFFFFF"),
        ("qwen2", {"sliding_window": 8, "max_window_layers": 6, "use_sliding_window": True}, "FFFFFFSS"),
        ("qwen2_moe", {"use_sliding_window": True, "max_window_layers": 3}, "SFSFFFFF"),
        ("qwen3_next", {}, "LLLFLLLF"),
        ("qwen3_next", {"full_attention_interval": 2}, "LFLFLFLF"),
        ("llama4_text", {}, "CCCFCCCF"),
        ("llama4_text", {"no_rope_layers": [1, 0] * 4}, "CFCFCFCF"),
        ("jamba", {}, "LLLLFLLL"),
        ("jamba", {"attn_layer_period": 2, "attn_layer_offset": 1}, "LFLFLFLF"),
        ("bamba", {"attn_layer_indices": [2, 5]}, "LLFLLFLL"),
        ("lfm2", {"full_attn_idxs": [2, 5]}, "ccFccFcc"),
        ("nemotron_h", {"hybrid_override_pattern": "M-M*-ME*"}, "L-LF-L-F"),
        ("nemotron_h", {"layers_block_type": ["mamba", "moe", "attention", "mlp"] * 2}, "L-F-L-F-"),
        ("minimax", {"attn_type_list": [0, 0, 1, 1] * 2}, "LLFFLLFF"),
        ("granitemoehybrid", {"layer_types": ["mamba", "attention"] * 4}, "LFLFLFLF"),
        ("falcon_h1", {}, "HHHHHHHH"),
        ("kimi_linear", {"linear_attn_config": KIMI}, "LLLFLLLF"),
        ("mllama_text_model", {"cross_attention_layers": [3]}, "FFFxFFFF"),
        ("deepseek_v3", {}, "FFFFFFFF"),
        ("deepseek_v32", {}, "IIIIIIII"),
        ("gpt_neo", {"num_layers": 4, "attention_types": [[["global", "local"], 2]]}, "FlFl"),
    ],
)  # fmt: skip
def test_kinds_of_layers(model_type: str, fields: dict[str, Any], expected: str) -> None:
    assert kinds(model_type, **fields) == expected


def test_a_language_model_in_another_model() -> None:
    text = {"model_type": "cohere2", "num_hidden_layers": 8}
    assert kinds("aya_vision", text_config=text) == "SSSFSSSF"
    assert kinds("llava", text_config={**text, "model_type": "mistral"}) == "SSSSSSSS"


@pytest.mark.parametrize(
    ("model_type", "fields", "error", "what"),
    [
        ("llama", {"sliding_window": 4096}, UnsupportedError, "does not say what kind of attention each layer has"),
        ("cohere", {"sliding_window": 4096}, UnsupportedError, "does not say what kind of attention each layer has"),
        ("olmoe", {"sliding_window": 4096}, UnsupportedError, "does not say what kind of attention each layer has"),
        ("llama", {"layer_types": [FULL] * 7}, ConflictError, "it has 7 entries for 8 layers"),
        ("llama", {"layer_types": FULL}, ConflictError, "a list with a word for each layer"),
        ("cohere2", {"sliding_window_pattern": 0}, LayoutError, "nothing divides by it"),
        ("cohere2", {"sliding_window_pattern": "LLG"}, LayoutError, "'LLG', not a whole number"),
        ("qwen2", {"use_sliding_window": "false", "sliding_window": 8}, LayoutError, "neither true nor false"),
        ("nemotron_h", {"hybrid_override_pattern": "M-"}, LayoutError, "no element 2"),
        ("bert", {}, UnsupportedError, "family `bert` does not say what kinds of layers"),
    ],
)
def test_what_is_not_said_is_not_guessed(
    model_type: str, fields: dict[str, Any], error: type[CkptError], what: str
) -> None:
    with pytest.raises(error, match=what):
        kinds(model_type, **fields)
