"""Tensors gathered by layer and module, and how their values are joined."""

from __future__ import annotations

import math

from ckpttool.answers.by_layer import LayerRow, by_layer, largest, norm, relative, share, smallest

NAMES = [
    "lm_head.weight",
    "model.embed_tokens.weight",
    "model.layers.10.mlp.up_proj.weight",
    "model.layers.2.mlp.experts.0.up_proj.weight",
    "model.layers.2.mlp.experts.1.up_proj.weight",
    "model.layers.2.mlp.up_proj.bias",
]


def test_rows_are_layers_in_order_and_experts_are_one_module() -> None:
    found = by_layer(NAMES)
    assert found.rows == (LayerRow("", None), LayerRow("model.layers", 2), LayerRow("model.layers", 10))
    assert found.labels == ("outside layers", "layer 2", "layer 10")
    modules = ("lm_head", "model.embed_tokens", "mlp.up_proj", "mlp.experts.up_proj", "mlp.up_proj.bias")
    assert found.modules == modules
    assert found.cells == {(0, 0): [0], (0, 1): [1], (1, 3): [3, 4], (1, 4): [5], (2, 2): [2]}


def test_stacks_stay_apart() -> None:
    found = by_layer(["encoder.layers.0.w", "encoder.layers.1.w", "decoder.layers.0.w"])
    assert found.labels == ("encoder.layers.0", "encoder.layers.1", "decoder.layers.0")
    assert found.by_row(largest([1, 2, 4])) == [1, 2, 4]


def test_values_are_joined_by_layer_and_module() -> None:
    found, values = by_layer(NAMES), [1.0, 2.0, 4.0, 8.0, 16.0, None]
    assert found.by_row(largest(values)) == [2, 16, 4]
    assert found.grid(largest(values)) == [
        [1, 2, None, None, None],
        [None, None, None, 16, None],
        [None, None, 4, None, None],
    ]
    assert found.by_row(smallest(values)) == [1, 8, 4]


def test_norms_shares_and_changes() -> None:
    found = by_layer(["h.0.a", "h.0.b", "h.1.a"])
    assert found.by_row(norm([3.0, 4.0, 1e200])) == [5.0, 1e200]  # squares would overflow
    assert found.by_row(share([1, 2, None], [10, 20, 5])) == [0.1, None]
    assert found.by_row(relative([9.0, 16.0, None], [50.0, 50.0, 1.0])) == [0.5, None]
    assert found.grid(relative([0.0, 1.0, 0.0], [0.0, 0.0, 4.0])) == [[0, math.inf], [0, None]]


def test_no_names() -> None:
    found = by_layer([])
    assert (found.rows, found.modules, found.grid(largest([]))) == ((), (), [])


def test_hostile_names() -> None:
    names = ["", ".", "0", "layers.0", "layers.99999999999999999999.w", "a\n.0.b", "a.0.0.0.", "a." + "1." * 50 + "b"]
    found = by_layer(names)
    assert sorted(i for at in found.cells.values() for i in at) == list(range(len(names)))
    assert len(found.grid(largest([1.0] * len(names)))) == len(found.labels)
