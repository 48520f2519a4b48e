"""A tiny model for megatron-core of sizes that divide by little, and what two runs of it hold, compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.peers.megatron_ranks import Held

TOKENS = [[1, 5, 7, 100, 3, 9, 22, 4, 90], [9, 8, 7, 6, 5, 4, 3, 2, 1]]


def config(folder: Path, **fields: Any) -> str:
    """A folder with the config.json of a tiny Llama of odd sizes, or of what ``fields`` make of it."""
    base = {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "hidden_size": 36,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "intermediate_size": 44,
        "vocab_size": 131,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(base | fields), encoding="utf-8")
    return str(folder)


def same(got: Held, want: Held) -> None:
    """Bit for bit, but for the padding of the vocabulary, which differs between meshes."""
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        rows = 131 if "embeddings" in name or "output_layer" in name else None
        assert torch.equal(
            got[name][:rows] if got[name].ndim else got[name], tensor[:rows] if tensor.ndim else tensor
        ), name
