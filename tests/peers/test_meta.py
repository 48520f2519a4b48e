"""Meta's own files, judged by logits: Meta's attention, written here from its definition, and transformers' models.

The pairs of a head's elements are complex numbers that positions turn. Files are written and read by torch itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.tiny_models import TOKENS
from tests.peers.tool import reshard

HEADS, KV, HEAD, DIM, FFN, VOCAB, LAYERS = 6, 2, 8, 48, 72, 128, 2
PARAMS: dict[str, Any] = {
    "dim": DIM, "n_layers": LAYERS, "n_heads": HEADS, "n_kv_heads": KV, "vocab_size": VOCAB, "multiple_of": 8,
    "ffn_dim_multiplier": 0.56, "norm_eps": 1e-5, "rope_theta": 10000.0,
}  # fmt: skip
TOLERANCE = 1e-5
CUT = {"wo": 1, "w2": 1, "wq": 0, "wk": 0, "wv": 0, "w1": 0, "w3": 0, "output": 0}
"""The axis along which Meta's ColumnParallelLinear and RowParallelLinear cut."""


def random_model(head: int = HEAD, experts: int = 0) -> dict[str, Any]:
    import torch

    torch.manual_seed(7)
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (VOCAB, DIM)}
    for i in range(LAYERS):
        at = f"layers.{i}."
        shapes |= {f"{at}attention.w{c}.weight": (n * head, DIM) for c, n in (("q", HEADS), ("k", KV), ("v", KV))}
        shapes[f"{at}attention.wo.weight"] = (DIM, HEADS * head)
        mlps = [f"{at}feed_forward.experts.{e}." for e in range(experts)] or [f"{at}feed_forward."]
        for mlp in mlps:
            shapes |= {f"{mlp}w1.weight": (FFN, DIM), f"{mlp}w2.weight": (DIM, FFN), f"{mlp}w3.weight": (FFN, DIM)}
        if experts:
            shapes[f"{at}feed_forward.gate.weight"] = (experts, DIM)
        shapes |= {f"{at}attention_norm.weight": (DIM,), f"{at}ffn_norm.weight": (DIM,)}
    shapes |= {"norm.weight": (DIM,), "output.weight": (VOCAB, DIM)}
    return {n: torch.randn(s) * 0.2 + (1.0 if len(s) == 1 else 0.0) for n, s in shapes.items()}


def logits(weights: dict[str, Any], theta: float, experts: int = 0) -> Any:
    """What Meta's model (and Mistral's) computes."""
    import torch
    from torch.nn.functional import silu

    def normed(x: Any, name: str) -> Any:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weights[name]

    def linear(x: Any, name: str) -> Any:
        return x @ weights[name].T

    def mlp(x: Any, at: str) -> Any:
        return linear(silu(linear(x, f"{at}w1.weight")) * linear(x, f"{at}w3.weight"), f"{at}w2.weight")

    tokens = torch.tensor(TOKENS) % VOCAB
    batch, length = tokens.shape
    x = weights["tok_embeddings.weight"][tokens]
    for i in range(LAYERS):
        at = f"layers.{i}."
        h = normed(x, f"{at}attention_norm.weight")
        q, k, v = (
            linear(h, f"{at}attention.w{c}.weight").view(batch, length, n, -1)
            for c, n in (("q", HEADS), ("k", KV), ("v", KV))
        )
        size = q.shape[-1]
        speed = theta ** (-torch.arange(0, size, 2).float() / size)
        turn = torch.polar(torch.ones(length, size // 2), torch.arange(length).float()[:, None] * speed)
        q, k = (
            torch.view_as_real(torch.view_as_complex(t.reshape(*t.shape[:-1], -1, 2)) * turn[:, None]).flatten(3)
            for t in (q, k)
        )
        k, v = (t.repeat_interleave(HEADS // KV, 2) for t in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / size**0.5
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf).softmax(-1)
        mixed = torch.einsum("bhqk,bkhd->bqhd", scores, v).flatten(2)
        x = x + linear(mixed, f"{at}attention.wo.weight")
        h = normed(x, f"{at}ffn_norm.weight")
        if not experts:
            x = x + mlp(h, f"{at}feed_forward.")
            continue
        best, chosen = linear(h, f"{at}feed_forward.gate.weight").topk(2)
        share = best.softmax(-1)
        for e in range(experts):
            of_expert = (share * (chosen == e)).sum(-1, keepdim=True)
            x = x + of_expert * mlp(h, f"{at}feed_forward.experts.{e}.")
    return linear(normed(x, "norm.weight"), "output.weight")


def of_transformers(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.no_grad():
        return model(torch.tensor(TOKENS) % VOCAB, use_cache=False).logits


def axis(name: str, *, columns: bool) -> int | None:
    """The axis along which a tensor is cut."""
    if name.startswith("tok_embeddings"):
        return 1 if columns else 0
    return CUT.get(name.split(".")[-2])


def save(folder: Path, weights: dict[str, Any], params: dict[str, Any], world: int, *, columns: bool = False) -> None:
    """As Meta publishes it; torch itself writes the files."""
    import torch

    folder.mkdir()
    (folder / "params.json").write_text(json.dumps(params))
    for rank in range(world):
        mine = {
            n: t if (a := axis(n, columns=columns)) is None else t.chunk(world, a)[rank].clone()
            for n, t in weights.items()
        }
        torch.save({**mine, "rope.freqs": torch.ones(HEAD // 2)}, folder / f"consolidated.{rank:02d}.pth")


@pytest.mark.parametrize(("world", "columns"), [(1, False), (2, False), (2, True)])
def test_metas_files_become_a_model_with_the_same_logits(world: int, columns: bool, tmp_path: Path) -> None:
    weights = random_model()
    save(tmp_path / "src", weights, PARAMS, world, columns=columns)
    reshard(tmp_path / "src", tmp_path / "hf", "--to", "hf")
    want = logits(weights, 10000.0)
    assert (of_transformers(tmp_path / "hf") - want).abs().max() < TOLERANCE
    # Rows that stay in Meta's order make another model: the comparison sees it.
    swapped = {n: t.view(-1, HEAD // 2, 2, DIM).transpose(1, 2).reshape(t.shape) if ".wq." in n else t
               for n, t in weights.items()}  # fmt: skip
    assert (logits(swapped, 10000.0) - want).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("experts", [0, 4])
def test_mistrals_files_become_a_model_with_the_same_logits(experts: int, tmp_path: Path) -> None:
    weights = random_model(head=10, experts=experts)
    params = {k: v for k, v in PARAMS.items() if k not in ("multiple_of", "ffn_dim_multiplier")}
    params |= {"head_dim": 10, "hidden_dim": FFN, "rope_theta": 1e6}
    if experts:
        params["moe"] = {"num_experts": experts, "num_experts_per_tok": 2}
    save(tmp_path / "src", weights, params, 1)
    reshard(tmp_path / "src", tmp_path / "hf", "--to", "hf")
    assert (of_transformers(tmp_path / "hf") - logits(weights, 1e6, experts)).abs().max() < TOLERANCE


@pytest.mark.parametrize("target", ["llama2", "llama3"])
def test_a_model_of_transformers_becomes_metas_files(target: str, tmp_path: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=DIM, intermediate_size=FFN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KV, vocab_size=VOCAB, rms_norm_eps=1e-5, tie_word_embeddings=False,
        initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "hf")
    reshard(tmp_path / "hf", tmp_path / "meta", "--to", "meta", "--tp-out", 2, "--target", target)
    ranks = [torch.load(tmp_path / f"meta/consolidated.{r:02d}.pth", weights_only=True) for r in range(2)]
    weights = {}
    for name, first in ranks[0].items():
        cut = axis(name, columns=target == "llama2")
        weights[name] = first if cut is None else torch.cat([r[name] for r in ranks], cut)
    assert weights["tok_embeddings.weight"].shape == (VOCAB, DIM)
    assert (of_transformers(tmp_path / "hf") - logits(weights, 10000.0)).abs().max() < TOLERANCE
