"""The rules that paddleformers 1.2.0 generates for nine models, from Hugging Face names and back."""

from __future__ import annotations

import json

import numpy as np
import pytest

from ckpttool.aoa import Statement, apply_aoa
from ckpttool.errors import UnsupportedError, UsageError
from ckpttool.layout.rules import CutSize
from tests.helpers.aoa import RULES, Array, rules, table, values

HIDDEN, HEADS, HEAD, FFN, VOCAB, LAYERS, EXPERTS = 16, 4, 4, 24, 40, 2, 2
ALL = list(json.loads(RULES.read_text(encoding="utf-8")))

# `_ -> name` asks for the value that a new model has; a checkpoint has no such thing.
REFUSED = {
    "_ -> model.rotary_emb.inv_freq": "GptOss: computed by the model, in no checkpoint",
    "_ -> model.rotary_emb.original_inv_freq": "GptOss: computed by the model, in no checkpoint",
}


def model(name: str) -> dict[str, Array]:
    """Random arrays with the names and shapes that Hugging Face has for a family's tiny config."""
    family, variant = name.split("/")
    kv = 1 if variant == "kv1" else 2
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}

    def add(prefix: str, sizes: dict[str, tuple[int, ...]]) -> None:
        shapes.update({f"{prefix}.{n}": s for n, s in sizes.items()})

    def mlp(prefix: str, width: int = FFN) -> None:
        add(
            prefix,
            {
                "gate_proj.weight": (width, HIDDEN),
                "up_proj.weight": (width, HIDDEN),
                "down_proj.weight": (HIDDEN, width),
            },
        )

    def block(prefix: str, *, moe: bool) -> None:
        add(prefix, {"input_layernorm.weight": (HIDDEN,), "post_attention_layernorm.weight": (HIDDEN,)})
        q, k, attention = HEADS * HEAD, kv * HEAD, f"{prefix}.self_attn"
        add(attention, {"o_proj.weight": (HIDDEN, q)})
        if family == "Phi3":
            add(attention, {"qkv_proj.weight": (q + 2 * k, HIDDEN)})
            add(f"{prefix}.mlp", {"gate_up_proj.weight": (2 * FFN, HIDDEN), "down_proj.weight": (HIDDEN, FFN)})
            return
        add(attention, {"q_proj.weight": (q, HIDDEN), "k_proj.weight": (k, HIDDEN), "v_proj.weight": (k, HIDDEN)})
        if family in ("Qwen2", "Qwen2Moe", "GptOss"):
            add(attention, {"q_proj.bias": (q,), "k_proj.bias": (k,), "v_proj.bias": (k,)})
        if family == "Qwen3":
            add(attention, {"q_norm.weight": (HEAD,), "k_norm.weight": (HEAD,)})
        if family == "GptOss":
            add(attention, {"o_proj.bias": (HIDDEN,), "sinks": (HEADS,)})
            add(f"{prefix}.mlp.router", {"weight": (EXPERTS, HIDDEN), "bias": (EXPERTS,)})
            add(
                f"{prefix}.mlp.experts",
                {
                    "gate_up_proj": (EXPERTS, HIDDEN, 2 * FFN),
                    "down_proj": (EXPERTS, FFN, HIDDEN),
                    "gate_up_proj_bias": (EXPERTS, 2 * FFN),
                    "down_proj_bias": (EXPERTS, HIDDEN),
                },
            )
            return
        if not moe:
            mlp(f"{prefix}.mlp")
            return
        add(f"{prefix}.mlp", {"gate.weight": (EXPERTS, HIDDEN)})
        for e in range(EXPERTS):
            mlp(f"{prefix}.mlp.experts.{e}", 12)
        if family == "Qwen2Moe":
            mlp(f"{prefix}.mlp.shared_expert")
            add(f"{prefix}.mlp", {"shared_expert_gate.weight": (1, HIDDEN)})
        else:
            mlp(f"{prefix}.mlp.shared_experts")
            add(f"{prefix}.mlp.moe_statics", {"e_score_correction_bias": (1, EXPERTS)})

    for i in range(LAYERS):
        block(f"model.layers.{i}", moe=family == "Qwen2Moe" or (family == "Ernie4_5_Moe" and i > 0))
    if family == "Ernie4_5_Moe":
        block("model.mtp_block.0", moe=False)
        shapes["model.mtp_emb_norm.0.weight"] = shapes["model.mtp_hidden_norm.0.weight"] = (HIDDEN,)
        shapes["model.mtp_linear_proj.0.weight"] = (HIDDEN, 2 * HIDDEN)
    if variant != "tied":
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    rng = np.random.default_rng(len(name))
    return {n: rng.standard_normal(s) for n, s in shapes.items()}


def supported(statements: list[Statement]) -> list[Statement]:
    return [s for s in statements if s.text not in REFUSED]


def converted(name: str) -> dict[str, Array]:
    source = model(name)
    return values(apply_aoa(table(source, "BF16"), supported(rules(name, "load"))), source)


@pytest.mark.sample(
    "Llama/plain",
    "Qwen2/kv1",
    "Qwen3/tied",
    "Qwen2Moe/plain",
    "Ernie4_5/tied",
    "Ernie4_5_Moe/tied",
    "Phi3/plain",
)
@pytest.mark.parametrize("name", ALL)
def test_there_and_back(name: str) -> None:
    source = model(name)
    paddle = converted(name)
    back = apply_aoa(table(paddle, "BF16"), rules(name, "save"))
    got = values(back, paddle)
    if name.split("/")[1] == "tied" and "lm_head.weight" in got:
        assert (got.pop("lm_head.weight") == source["model.embed_tokens.weight"]).all()
    assert sorted(got) == sorted(source)
    for tensor, expected in source.items():
        assert got[tensor].shape == expected.shape, tensor
        assert (got[tensor] == expected).all(), tensor


@pytest.mark.parametrize("name", [n for n in ALL if n.split("/")[0] in ("Qwen2", "Qwen2Moe", "Ernie4_5_Moe")])
def test_layout_of_paddle(name: str) -> None:
    """The fused tensors, put together once more by hand."""
    source, paddle = model(name), converted(name)
    kv = 1 if name.endswith("kv1") else 2
    q, k, v = (source[f"model.layers.0.self_attn.{p}_proj.weight"].T for p in "qkv")
    groups = [np.split(x, kv, 1) for x in (q, k, v)]
    qkv = np.concatenate([part[g] for g in range(kv) for part in groups], 1)
    assert (paddle["model.layers.0.self_attn.qkv_proj.weight"] == qkv).all()
    expert = "model.layers.1.mlp.experts.1" if "Moe" in name else "model.layers.1.mlp"
    ffn = np.concatenate([source[f"{expert}.{p}_proj.weight"].T for p in ("gate", "up")], 1)
    assert (paddle[f"{expert}.up_gate_proj.weight"] == ffn).all()
    assert (
        paddle["model.layers.1.self_attn.o_proj.weight"] == source["model.layers.1.self_attn.o_proj.weight"].T
    ).all()


def test_routers_are_cast() -> None:
    source = model("Qwen2Moe/plain")
    out = apply_aoa(table(source, "BF16"), rules("Qwen2Moe/plain", "load"))
    assert {n for n, v in out.table.items() if v.dtype == "F32"} == {
        f"model.layers.{i}.mlp.{g}.weight" for i in range(LAYERS) for g in ("gate", "shared_expert_gate")
    }


def test_initial_values_are_refused() -> None:
    texts = {s.text for name in ALL for d in ("load", "save") for s in rules(name, d)}
    assert {t for t in texts if t.startswith("_ ->")} == set(REFUSED)
    for text in REFUSED:
        bad = [s for s in rules("GptOss/plain", "load") if s.text == text]
        with pytest.raises(UnsupportedError, match="would need a value"):
            apply_aoa(table(model("GptOss/plain")), bad)


def test_model_without_mtp_has_no_use_for_mtp_rules() -> None:
    source = {n: a for n, a in model("Ernie4_5_Moe/plain").items() if "mtp" not in n}
    with pytest.raises(UsageError, match="no tensor matches `model"):
        apply_aoa(table(source), rules("Ernie4_5_Moe/plain", "load"))


def test_heads_of_the_config() -> None:
    sizes = {"heads": CutSize(4), "kv_heads": CutSize(2, shared=True)}
    apply_aoa(table(model("Qwen2/plain")), rules("Qwen2/plain", "load"), sizes=sizes)
