"""What the walk takes each layer for, against the config classes of transformers."""

from __future__ import annotations

from random import Random

import pytest

from tests.walk import numbered

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("kind", sorted({*numbered.ARCHITECTURES} - {"deepseek_v3", "ernie4_5_moe"}))
def test_layers_are_what_transformers_takes_them_for(kind: str) -> None:
    for seed in range(20):
        said = numbered.config(kind, 3 + seed % 5, Random(seed))  # noqa: S311
        said["eos_token_id"] = 1
        fields = {k: v for k, v in said.items() if k not in ("architectures", "dtype", "model_type", "hidden_size")}
        config = transformers.AutoConfig.for_model(kind, **fields)
        listed = config.layers_block_type if kind in ("bamba", "nemotron_h", "jamba") else config.layer_types
        names = {"attention": "full_attention", "mamba": "linear_attention"}
        assert [k[0] for k in numbered.kinds(said)] == [names.get(x, x) for x in listed], said
