"""What tensor names say of layers and modules."""

from __future__ import annotations

import pytest

from ckpttool.core.tensor_names import locate


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model.layers.3.mlp.experts.7.up_proj.weight", ("model.layers", 3, "mlp.experts.up_proj")),
        ("model.layers.12.self_attn.q_proj.bias", ("model.layers", 12, "self_attn.q_proj.bias")),
        ("lm_head.weight", ("", None, "lm_head")),
        ("model.norm.weight", ("", None, "model.norm")),
        ("encoder.block.0.layer.1.DenseReluDense.wi.weight", ("encoder.block", 0, "layer.DenseReluDense.wi")),
        ("layers.12.weight", ("layers", 12, "weight")),
        ("weight", ("", None, "weight")),
        ("model.conv1.weight", ("", None, "model.conv1")),
    ],
)
def test_locate(name: str, said: tuple[str, int | None, str]) -> None:
    assert locate(name) == said
