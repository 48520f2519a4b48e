"""MiniMax-M1: published names and fields of config.json, run by transformers' MiniMax, which is the same model.

How fast a head forgets is no tensor of the published files: it follows from the number of the head.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.peers.families.remote import REMOTE, Remote

SIZES = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 96, "num_local_experts": 8, "num_experts_per_tok": 8, "vocab_size": 272,
    "tie_word_embeddings": False,
}  # fmt: skip
SOFTMAX = [0, 1, 0]
"""``attn_type_list``: 1 is softmax attention, 0 lightning attention."""
BUFFERS = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")


def model() -> Any:
    import torch
    from transformers import MiniMaxConfig, MiniMaxForCausalLM

    torch.manual_seed(0)
    kinds = ["full_attention" if softmax else "linear_attention" for softmax in SOFTMAX]
    config = MiniMaxConfig(**SIZES, block_size=8, layer_types=kinds, attn_implementation="eager")
    return MiniMaxForCausalLM(config).float().eval()


def save(folder: Path) -> int:
    import torch
    from safetensors.torch import save_file

    tensors = {}
    for name, tensor in model().state_dict().items():
        value = torch.randn_like(tensor) * 0.2 + ("norm" in name)
        if name.endswith(BUFFERS):
            continue
        there = name.replace(".mlp.", ".block_sparse_moe.")
        for e in range(SIZES["num_local_experts"]) if ".experts." in name else ():
            at = there.rpartition(".")[0] + f".{e}."
            if name.endswith("gate_up_proj"):
                tensors[at + "w1.weight"], tensors[at + "w3.weight"] = (t.clone() for t in value[e].chunk(2))
            else:
                tensors[at + "w2.weight"] = value[e].clone()
        if ".experts." not in name:
            tensors[there] = value
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {
        **SIZES,
        "model_type": "minimax_m1",
        "architectures": ["MiniMaxM1ForCausalLM"],
        "attn_type_list": SOFTMAX,
        "shared_intermediate_size": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return sum(t.numel() for t in tensors.values())


def compute(folder: Path) -> Any:
    import torch
    from safetensors.torch import load_file

    t = {n: x for f in sorted(folder.glob("*.safetensors")) for n, x in load_file(f).items()}
    run = model()
    state = {}
    for name, tensor in run.state_dict().items():
        there = name.replace(".mlp.", ".block_sparse_moe.")
        if name.endswith(BUFFERS):
            state[name] = tensor
        elif ".experts." in name:
            at, _, kind = there.rpartition(".")
            parts = ("w1", "w3") if kind == "gate_up_proj" else ("w2",)
            experts = range(SIZES["num_local_experts"])
            state[name] = torch.stack([torch.cat([t[f"{at}.{e}.{p}.weight"] for p in parts]) for e in experts])
        else:
            state[name] = t[there]
    run.load_state_dict(state)
    with torch.no_grad():
        return run(torch.tensor([[3, 17, 81, 99, 250, 140, 2, 7, 55, 120]])).logits.flatten()


REMOTE["MiniMaxM1ForCausalLM"] = Remote("minimax_m1", save, compute)
