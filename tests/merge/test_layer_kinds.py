"""Slices of models whose layers are of two kinds, told apart in config.json by their numbers."""

from __future__ import annotations

from typing import Any

import pytest

from ckpttool.errors import UnsupportedError
from ckpttool.ops.merge.config import merged_config

DEEPSEEK = {"first_k_dense_replace": 2}
QWEN = {"mlp_only_layers": [0, 3], "decoder_sparse_step": 1}
STEP = {"mlp_only_layers": [], "decoder_sparse_step": 2}
ERNIE = {"moe_layer_start_index": 1, "moe_layer_end_index": 3, "moe_layer_interval": 1}
WINDOW = {"use_sliding_window": True, "max_window_layers": 2}

CASES: list[tuple[dict[str, Any], list[int], dict[str, Any]]] = [
    (DEEPSEEK, [0, 1, 2, 3, 3], DEEPSEEK),
    (DEEPSEEK, [2, 3], {"first_k_dense_replace": 0}),
    (DEEPSEEK, [0, 2, 3], {"first_k_dense_replace": 1}),
    (DEEPSEEK, [0, 1, 0, 1, 2], {"first_k_dense_replace": 4}),
    ({"first_k_dense_replace": 1, "moe_layer_freq": 1}, [1, 2], {"first_k_dense_replace": 0, "moe_layer_freq": 1}),
    (QWEN, [0, 1], QWEN),
    (QWEN, [2, 3, 0, 1], {"mlp_only_layers": [1, 2], "decoder_sparse_step": 1}),
    (STEP, [0, 1, 0, 1, 2, 3], STEP),
    (STEP, [1, 2, 3], {"mlp_only_layers": [1], "decoder_sparse_step": 1}),
    (ERNIE, [2, 3], {"moe_layer_start_index": 0, "moe_layer_end_index": 1, "moe_layer_interval": 1}),
    (ERNIE, [0, 1, 2, 1, 2, 3], {"moe_layer_start_index": 1, "moe_layer_end_index": 5, "moe_layer_interval": 1}),
    ({**ERNIE, "moe_layer_end_index": -1}, [0, 3], {**ERNIE, "moe_layer_end_index": -1}),
    (WINDOW, [2, 3], {"use_sliding_window": True, "max_window_layers": 0}),
    ({**WINDOW, "use_sliding_window": False}, [2, 0], {**WINDOW, "use_sliding_window": False}),
]  # fmt: skip


@pytest.mark.parametrize(("said", "layers", "expected"), CASES)
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "text_config"])
def test_the_config_says_what_each_layer_is(
    said: dict[str, Any], layers: list[int], expected: dict[str, Any], nested: bool
) -> None:
    """A loader fills layers of the other kind with random numbers."""
    fields = {"num_hidden_layers": 4, **said}
    config = merged_config({"text_config": fields} if nested else fields, layers=layers)
    assert (config["text_config"] if nested else config) == {"num_hidden_layers": len(layers), **expected}


@pytest.mark.parametrize(
    ("said", "layers"), [(DEEPSEEK, [0, 1, 2, 1, 2, 3]), (ERNIE, [2, 3, 0, 1]), (WINDOW, [2, 3, 0, 1])]
)
def test_an_order_that_no_config_says(said: dict[str, Any], layers: list[int]) -> None:
    with pytest.raises(UnsupportedError, match=r"of config.json cannot say: layers"):
        merged_config({"num_hidden_layers": 4, **said}, layers=layers)


def test_numbers_of_layers_are_not_a_list_of_layers() -> None:
    """As many as there are layers."""
    config = {"num_hidden_layers": 2, "mlp_only_layers": [1, 0], "decoder_sparse_step": 1}
    assert merged_config(config, layers=[0])["mlp_only_layers"] == [1, 0]


@pytest.mark.parametrize(
    ("config", "stack", "changed"),
    [
        ({"num_layers": 6, "num_decoder_layers": 6}, "decoder.block.", {"num_decoder_layers": 2}),
        ({"num_layers": 6}, "encoder.block.", {"num_layers": 2, "num_decoder_layers": 6}),
        ({"num_layers": 6}, "decoder.block.", {"num_decoder_layers": 2}),
        (
            {"encoder_layers": 6, "num_hidden_layers": 6, "decoder_layers": 6},
            "model.encoder.layers.",
            {"encoder_layers": 2, "num_hidden_layers": 2},
        ),
        (
            {"encoder_layers": 6, "num_hidden_layers": 6, "decoder_layers": 6},
            "model.decoder.layers.",
            {"decoder_layers": 2},
        ),
        (
            {"text_config": {"num_hidden_layers": 6}, "vision_config": {"depth": 9}},
            "model.visual.blocks.",
            {"vision_config": {"depth": 2}},
        ),
        (
            {"text_config": {"num_hidden_layers": 3, "layer_types": ["a", "b", "c"]}, "vision_config": {"depth": 9}},
            "model.language_model.layers.",
            {"text_config": {"num_hidden_layers": 2, "layer_types": ["c", "a"]}},
        ),
        ({"num_hidden_layers": 6, "vision_config": {"depth": 9}}, "model.layers.", {"num_hidden_layers": 2}),
    ],
)
def test_one_stack_of_several(config: dict[str, Any], stack: str, changed: dict[str, Any]) -> None:
    assert merged_config(config, stacks={stack: [2, 0]}) == {**config, **changed}


def test_a_stack_that_no_field_counts() -> None:
    with pytest.raises(UnsupportedError, match=r"count the layers of `visual\.blocks\.`"):
        merged_config({"num_hidden_layers": 6}, stacks={"visual.blocks.": [2, 0]})
