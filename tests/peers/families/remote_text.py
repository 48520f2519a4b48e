"""Text models that bring code of their own from the Hub: made with the published names, and run by one plain decoder.

A model says where a layer's queries, keys, values and MLPs are among its tensors (``View``); what all of them compute
is the same: attention with rotary embeddings in groups of queries, then a gated MLP, a norm before each.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.peers.families.remote import REMOTE, Remote

if TYPE_CHECKING:
    import torch

    Tensors = Mapping[str, torch.Tensor]

HIDDEN, HEADS, KV, HEAD, INNER, VOCAB, EXPERTS = 64, 8, 2, 16, 96, 272, 8
Shapes = dict[str, tuple[int, ...]]
SIZES = {
    "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": HEADS, "num_key_value_heads": KV,
    "head_dim": HEAD, "intermediate_size": INNER, "vocab_size": VOCAB, "tie_word_embeddings": False,
}  # fmt: skip


@dataclass
class Layer:
    """A layer as the decoder takes it; [] and None is a part that is not there."""

    norms: Sequence[torch.Tensor]
    """Before the attention and before the MLPs."""
    qkv: Sequence[torch.Tensor]
    """What the three make of an input: weights [out, in]."""
    biases: Sequence[torch.Tensor]
    out: torch.Tensor | None
    mlps: Sequence[Sequence[torch.Tensor]]
    """Gate, up and down of those that all tokens pass."""
    router: torch.Tensor | None = None
    experts: Sequence[Sequence[torch.Tensor]] = ()
    query_norms: Sequence[torch.Tensor] = ()
    """Of each head's queries and keys."""
    low_rank: Sequence[torch.Tensor] = ()
    """Norm and second factor of the queries."""


View = Callable[["Tensors", int], Layer]
"""The parts of layer N."""


@dataclass(frozen=True)
class Made:
    """One architecture."""

    model_type: str
    fields: Mapping[str, Any]
    layer: Callable[[int], Shapes]
    """Names and shapes of a layer's tensors, without what all names begin with."""
    view: View
    prefix: str = "model.layers.{}."
    outside: tuple[str, str, str] = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    buffers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def save(cls: str, made: Made, folder: Path) -> int:
    import numpy as np
    from safetensors.numpy import save_file

    config = {**SIZES, **made.fields, "model_type": made.model_type, "architectures": [cls]}
    embedding, norm, head = made.outside
    shapes: Shapes = {embedding: (VOCAB, HIDDEN), norm: (HIDDEN,), head: (VOCAB, HIDDEN), **made.buffers}
    for i in range(config.get("num_hidden_layers", 2)):
        shapes |= {made.prefix.format(i) + n: s for n, s in made.layer(i).items()}
    random = np.random.default_rng(0)
    tensors = {n: random.standard_normal(s, dtype=np.float32) * 0.2 + ("norm" in n) for n, s in shapes.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return sum(t.size for t in tensors.values())


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def glu(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    import torch

    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def attend(x: torch.Tensor, layer: Layer, out: torch.Tensor) -> torch.Tensor:
    import torch

    tokens = x.shape[0]
    made = [x @ w.T for w in layer.qkv]
    if layer.low_rank:
        norm, second = layer.low_rank
        made[0] = rms(made[0], norm) @ second.T
    made = [m + b for m, b in zip(made, layer.biases, strict=True)] if layer.biases else made
    q, k, v = (m.view(tokens, -1, HEAD).transpose(0, 1) for m in made)
    if layer.query_norms:
        q, k = (rms(m, n) for m, n in zip((q, k), layer.query_norms, strict=True))
    turn = torch.arange(tokens)[:, None] / 10 ** torch.linspace(0, 2, HEAD // 2)
    cos, sin = torch.cos(turn).repeat(1, 2), torch.sin(turn).repeat(1, 2)
    q, k = (m * cos + torch.cat([-m[..., HEAD // 2 :], m[..., : HEAD // 2]], -1) * sin for m in (q, k))
    k, v = (m.repeat_interleave(HEADS // m.shape[0], 0) for m in (k, v))
    mask = torch.full((tokens, tokens), float("-inf")).triu(1)
    got = (q @ k.transpose(1, 2) / HEAD**0.5 + mask).softmax(-1) @ v
    together: torch.Tensor = got.transpose(0, 1).reshape(tokens, -1) @ out.T
    return together


def compute(made: Made, folder: Path) -> Any:
    import torch
    from safetensors.torch import load_file

    t = {n: x for f in sorted(folder.glob("*.safetensors")) for n, x in load_file(f).items()}
    embedding, norm, head = made.outside
    x = t[embedding][torch.tensor([3, 17, 81, 99, 250, 140, 2, 7, 55, 120])]
    count = {**SIZES, **made.fields}["num_hidden_layers"]
    for i in range(count):
        layer = made.view(t, i)
        if layer.out is not None:
            x = x + attend(rms(x, layer.norms[0]), layer, layer.out)
        h = rms(x, layer.norms[-1])
        if layer.router is not None:
            weights = (h @ layer.router.T).softmax(-1)
            x = x + sum(weights[:, e : e + 1] * glu(h, *parts) for e, parts in enumerate(layer.experts))
        for parts in layer.mlps:
            x = x + glu(h, *parts)
    return (rms(x, t[norm]) @ t[head].T).flatten()


# The architectures


def named(t: Tensors, at: str, *names: str) -> list[torch.Tensor]:
    return [t[at + n] for n in names if at + n in t]


LLAMA_NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
MLP = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")


def mlp_shapes(at: str, inner: int = INNER) -> Shapes:
    gate, up, down = MLP
    return {at + gate: (inner, HIDDEN), at + up: (inner, HIDDEN), at + down: (HIDDEN, inner)}


def norm_shapes(*names: str) -> Shapes:
    return dict.fromkeys(names, (HIDDEN,))


def internlm2(_: int) -> Shapes:
    return {
        "attention.wqkv.weight": ((HEADS + 2 * KV) * HEAD, HIDDEN),
        "attention.wo.weight": (HIDDEN, HEADS * HEAD),
        "feed_forward.w1.weight": (INNER, HIDDEN),
        "feed_forward.w3.weight": (INNER, HIDDEN),
        "feed_forward.w2.weight": (HIDDEN, INNER),
        **norm_shapes("attention_norm.weight", "ffn_norm.weight"),
    }


def internlm2_view(t: Tensors, i: int) -> Layer:
    at = f"model.layers.{i}."
    groups = t[at + "attention.wqkv.weight"].view(KV, -1, HEAD, HIDDEN)
    qkv = [part.reshape(-1, HIDDEN) for part in (groups[:, :-2], groups[:, -2], groups[:, -1])]
    ffn = named(t, at + "feed_forward.", "w1.weight", "w3.weight", "w2.weight")
    norms = named(t, at, "attention_norm.weight", "ffn_norm.weight")
    return Layer(norms, qkv, (), t[at + "attention.wo.weight"], [ffn])


def baichuan(_: int) -> Shapes:
    attention = {
        "self_attn.W_pack.weight": (3 * HEADS * HEAD, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
    }
    return {**attention, **mlp_shapes("mlp."), **norm_shapes(*LLAMA_NORMS)}


def baichuan_view(t: Tensors, i: int) -> Layer:
    at = f"model.layers.{i}."
    qkv = t[at + "self_attn.W_pack.weight"].chunk(3)
    return Layer(named(t, at, *LLAMA_NORMS), qkv, (), t[at + "self_attn.o_proj.weight"], [named(t, at + "mlp.", *MLP)])


def chatglm(_: int) -> Shapes:
    rows = (HEADS + 2 * KV) * HEAD
    return {
        "self_attention.query_key_value.weight": (rows, HIDDEN),
        "self_attention.query_key_value.bias": (rows,),
        "self_attention.dense.weight": (HIDDEN, HEADS * HEAD),
        "mlp.dense_h_to_4h.weight": (2 * INNER, HIDDEN),
        "mlp.dense_4h_to_h.weight": (HIDDEN, INNER),
        **norm_shapes(*LLAMA_NORMS),
    }


def chatglm_view(t: Tensors, i: int) -> Layer:
    at = f"transformer.encoder.layers.{i}."
    rows = [HEADS * HEAD, KV * HEAD, KV * HEAD]
    qkv, biases = (t[f"{at}self_attention.query_key_value.{k}"].split(rows) for k in ("weight", "bias"))  # type: ignore[no-untyped-call]
    mlp = [*t[at + "mlp.dense_h_to_4h.weight"].chunk(2), t[at + "mlp.dense_4h_to_h.weight"]]
    return Layer(named(t, at, *LLAMA_NORMS), qkv, biases, t[at + "self_attention.dense.weight"], [mlp])


def apart(at: str, kv: int, *, bias: bool = False) -> Shapes:
    """Queries, keys and values of their own."""
    rows = {"q": HEADS * HEAD, "k": kv * HEAD, "v": kv * HEAD}
    out: Shapes = {f"{at}{n}_proj.weight": (r, HIDDEN) for n, r in rows.items()}
    return out | {f"{at}{n}_proj.bias": (r,) for n, r in rows.items() if bias}


def apart_view(t: Tensors, at: str, out: str, norms: Sequence[torch.Tensor], mlp: Sequence[torch.Tensor]) -> Layer:
    weights = named(t, at, *(f"{n}_proj.weight" for n in "qkv"))
    biases = named(t, at, *(f"{n}_proj.bias" for n in "qkv"))
    return Layer(norms, weights, biases, t.get(at + out), [mlp] if mlp else [])


def mimo(_: int) -> Shapes:
    attention = {**apart("self_attn.", KV, bias=True), "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD)}
    return {**attention, **mlp_shapes("mlp."), **norm_shapes(*LLAMA_NORMS)}


def llama_view(t: Tensors, i: int) -> Layer:
    at = f"model.layers.{i}."
    mlp = named(t, at + "mlp.", *MLP)
    return apart_view(t, at + "self_attn.", "o_proj.weight", named(t, at, *LLAMA_NORMS), mlp)


def exaone(_: int) -> Shapes:
    return {
        **apart("attn.attention.", KV),
        "attn.attention.out_proj.weight": (HIDDEN, HEADS * HEAD),
        "mlp.c_fc_0.weight": (INNER, HIDDEN),
        "mlp.c_fc_1.weight": (INNER, HIDDEN),
        "mlp.c_proj.weight": (HIDDEN, INNER),
        **norm_shapes("ln_1.weight", "ln_2.weight"),
    }


def exaone_view(t: Tensors, i: int) -> Layer:
    at = f"transformer.h.{i}."
    mlp = named(t, at + "mlp.", "c_fc_0.weight", "c_fc_1.weight", "c_proj.weight")
    norms = named(t, at, "ln_1.weight", "ln_2.weight")
    return apart_view(t, at + "attn.attention.", "out_proj.weight", norms, mlp)


DECI = [(2, 96), (0, 48), (8, 0), (4, 160)]
"""Key/value heads and width of the MLP of each layer; 0 is a part that is left out."""


def deci(i: int) -> Shapes:
    kv, inner = DECI[i]
    out: Shapes = {}
    if kv:
        out |= {
            **apart("self_attn.", kv),
            "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
            **norm_shapes(LLAMA_NORMS[0]),
        }
    return out | ({**mlp_shapes("mlp.", inner), **norm_shapes(LLAMA_NORMS[1])} if inner else {})


DECI_BLOCKS = [
    {"attention": {"n_heads_in_group": HEADS // kv if kv else None, "no_op": not kv}, "ffn": {"no_op": not inner}}
    for kv, inner in DECI
]


def bailing(i: int) -> Shapes:
    out: Shapes = {
        "attention.query_key_value.weight": ((HEADS + 2 * KV) * HEAD, HIDDEN),
        "attention.dense.weight": (HIDDEN, HEADS * HEAD),
        "attention.query_layernorm.weight": (HEAD,),
        "attention.key_layernorm.weight": (HEAD,),
        **norm_shapes(*LLAMA_NORMS),
    }
    if i == 0:
        return out | mlp_shapes("mlp.")
    for e in range(EXPERTS):
        out |= mlp_shapes(f"mlp.experts.{e}.", 32)
    router = {"mlp.gate.weight": (EXPERTS, HIDDEN), "mlp.gate.expert_bias": (EXPERTS,)}
    return {**out, **mlp_shapes("mlp.shared_experts.", 64), **router}


def bailing_view(t: Tensors, i: int) -> Layer:
    at = f"model.layers.{i}."
    qkv = t[at + "attention.query_key_value.weight"].split([HEADS * HEAD, KV * HEAD, KV * HEAD])  # type: ignore[no-untyped-call]
    mlp = named(t, at + "mlp." if i == 0 else at + "mlp.shared_experts.", *MLP)
    layer = Layer(named(t, at, *LLAMA_NORMS), qkv, (), t[at + "attention.dense.weight"], [mlp])
    layer.query_norms = named(t, at + "attention.", "query_layernorm.weight", "key_layernorm.weight")
    if i:
        layer.router = t[at + "mlp.gate.weight"]
        layer.experts = [named(t, f"{at}mlp.experts.{e}.", *MLP) for e in range(EXPERTS)]
    return layer


def step3(i: int) -> Shapes:
    out: Shapes = {
        "self_attn.q_proj.weight": (32, HIDDEN),
        "self_attn.k_proj.weight": (HEAD, HIDDEN),
        "self_attn.v_proj.weight": (HEAD, HIDDEN),
        "self_attn.inter_norm.weight": (32,),
        "self_attn.wq.weight": (HEADS * HEAD, 32),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
        **norm_shapes(*LLAMA_NORMS),
    }
    if i == 0:
        return out | mlp_shapes("mlp.")
    experts: Shapes = {f"moe.{n}": (EXPERTS, *s) for n, s in mlp_shapes("", 32).items()}
    return {**out, **experts, "moe.gate.weight": (EXPERTS, HIDDEN), **mlp_shapes("share_expert.", 48)}


def step3_view(t: Tensors, i: int) -> Layer:
    at = f"model.layers.{i}."
    layer = apart_view(t, at + "self_attn.", "o_proj.weight", named(t, at, *LLAMA_NORMS), ())
    layer.low_rank = named(t, at + "self_attn.", "inter_norm.weight", "wq.weight")
    layer.mlps = [named(t, at + ("share_expert." if i else "mlp."), *MLP)]
    if i:
        layer.router = t[at + "moe.gate.weight"]
        layer.experts = list(zip(*named(t, at + "moe.", *MLP), strict=True))
    return layer


BAILING = {
    "num_experts": EXPERTS, "num_experts_per_tok": 2, "num_shared_experts": 2, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1, "use_qk_norm": True, "moe_router_enable_expert_bias": True, "norm_head": False,
}  # fmt: skip
STEP3 = {
    "share_q_dim": 32, "moe_num_experts": EXPERTS, "moe_top_k": 2, "moe_intermediate_size": 32, "share_expert_dim": 48,
    "moe_layers_enum": "1", "num_attention_groups": 1, "num_key_value_heads": None,
}  # fmt: skip
CHATGLM = {
    "num_hidden_layers": 2, "num_layers": 2, "multi_query_attention": True, "multi_query_group_num": KV,
    "kv_channels": HEAD, "ffn_hidden_size": INNER, "padded_vocab_size": VOCAB, "add_qkv_bias": True,
}  # fmt: skip
GLM_OUTSIDE = (
    "transformer.embedding.word_embeddings.weight",
    "transformer.encoder.final_layernorm.weight",
    "transformer.output_layer.weight",
)
INTERNLM_OUTSIDE = ("model.tok_embeddings.weight", "model.norm.weight", "output.weight")
LING_OUTSIDE = ("model.word_embeddings.weight", "model.norm.weight", "lm_head.weight")
EXAONE_OUTSIDE = ("transformer.wte.weight", "transformer.ln_f.weight", "lm_head.weight")
LAYERS = {"num_hidden_layers": 4, "num_key_value_heads": None, "intermediate_size": None, "block_configs": DECI_BLOCKS}

MADE = {
    "InternLM2ForCausalLM": Made("internlm2", {}, internlm2, internlm2_view, outside=INTERNLM_OUTSIDE),
    "BaichuanForCausalLM": Made("baichuan", {"num_key_value_heads": None}, baichuan, baichuan_view),
    "ChatGLMModel": Made(
        "chatglm",
        CHATGLM,
        chatglm,
        chatglm_view,
        "transformer.encoder.layers.{}.",
        GLM_OUTSIDE,
        {"transformer.rotary_pos_emb.inv_freq": (HEAD // 4,)},
    ),
    "MiMoForCausalLM": Made("mimo", {}, mimo, llama_view),
    "ExaoneForCausalLM": Made("exaone", {"num_layers": 2}, exaone, exaone_view, "transformer.h.{}.", EXAONE_OUTSIDE),
    "DeciLMForCausalLM": Made("nemotron-nas", LAYERS, deci, llama_view),
    "BailingMoeForCausalLM": Made("bailing_moe", BAILING, bailing, bailing_view, outside=LING_OUTSIDE),
    "BailingMoeV2ForCausalLM": Made("bailing_moe", BAILING, bailing, bailing_view, outside=LING_OUTSIDE),
    "Step3TextForCausalLM": Made("step3_text", STEP3, step3, step3_view),
}
REMOTE.update({c: Remote(made.model_type, partial(save, c, made), partial(compute, made)) for c, made in MADE.items()})
