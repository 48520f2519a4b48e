"""Slices of models with several stacks of layers, and of BERT's: transformers loads what comes out, whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.helpers.command import ckpttool  # noqa: E402

SMALL: dict[str, dict[str, Any]] = {
    "T5ForConditionalGeneration": {
        "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4,
        "vocab_size": 96, "relative_attention_num_buckets": 8,
    },
    "BertForMaskedLM": {
        "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 96,
        "max_position_embeddings": 32,
    },
    "BartForConditionalGeneration": {
        "d_model": 32, "encoder_layers": 3, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 96, "max_position_embeddings": 32,
    },
}  # fmt: skip
CASES = [
    ("T5ForConditionalGeneration", "decoder", "num_decoder_layers"),
    ("BertForMaskedLM", "", "num_hidden_layers"),
    ("BartForConditionalGeneration", "encoder", "encoder_layers"),
]


@pytest.mark.parametrize(("name", "stack", "field"), CASES)
def test_stacked_layers_are_loaded(name: str, stack: str, field: str, tmp_path: Path) -> None:
    cls = getattr(transformers, name)
    for seed in (0, 1):
        torch.manual_seed(seed)
        cls(cls.config_class(**SMALL[name])).save_pretrained(tmp_path / f"m{seed}")
    said = f"stack: {stack}, " if stack else ""
    slices = [
        f"- {{{said}sources: [{{model: {tmp_path}/m{i}, layer_range: [{start}, {stop}]}}]}}\n"
        for i, start, stop in ((0, 1, 3), (1, 0, 2))
    ]
    recipe = tmp_path / "recipe.yml"
    recipe.write_text("merge_method: passthrough\nslices:\n" + "".join(slices), encoding="utf-8")
    done = ckpttool("merge", recipe, "-o", tmp_path / "out")
    assert done.code == 0, done.err
    model, info = cls.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert getattr(model.config, field) == 4
    if name.startswith("T5"):
        first = cls.from_pretrained(tmp_path / "m0").get_decoder().block[0].layer[0].SelfAttention
        bias = model.get_decoder().block[0].layer[0].SelfAttention.relative_attention_bias.weight
        assert torch.equal(bias, first.relative_attention_bias.weight)
