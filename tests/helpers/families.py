"""A small model of every family: names as published, shapes that tp 8 can cut, and what makes each family special.

Eight query heads share two key/value heads, the vocabulary does not divide, six experts do not divide by four, and no
two dimensions have the same length, so an axis taken for another shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.helpers.tensorfile import Tensors, origin

H, A, K, D = 48, 8, 2, 10
"""Hidden size, query heads, key/value heads, elements of a head."""
V, POSITIONS = 259, 40
I, M, S, E = 64, 16, 32, 6  # noqa: E741
"""Widths of the MLP, of an expert and of the shared experts; number of experts."""
LATENT, NOPE, ROPE, VALUE = 12, 16, 16, 16
"""Of latent attention: the common latent, and a head's parts."""
LAYERS = 3
LAYER = "model.layers.{}."

Shape = tuple[int, ...]
Entries = Iterator[tuple[str, Shape]]


@dataclass(frozen=True)
class Model:
    """A checkpoint as its owners publish it."""

    name: str
    family: str
    config: dict[str, Any]
    shapes: dict[str, Shape]
    dtypes: dict[str, str] = field(default_factory=dict)
    """By ending of a name; BF16 otherwise."""
    moe: bool = False
    ranks: tuple[int, int, int] = (8, 2, 4)
    """Sizes of tp that this model can be cut for."""

    def dtype(self, name: str) -> str:
        return next((d for end, d in self.dtypes.items() if name.endswith(end)), "BF16")

    def tensors(self) -> Tensors:
        """Every element encodes its origin."""
        return {n: origin(i + 1, self.dtype(n), shape) for i, (n, shape) in enumerate(self.shapes.items())}


def _weights(at: str, parts: Mapping[str, Shape], *, bias: tuple[str, ...] = ()) -> Entries:
    for part, shape in parts.items():
        yield f"{at}{part}.weight", shape
        if part in bias:
            yield f"{at}{part}.bias", shape[:1]


def _attention(at: str, *, bias: tuple[str, ...] = (), norms: bool = False, kv: int = K) -> Entries:
    yield from _weights(
        at + "self_attn.",
        {"q_proj": (A * D, H), "k_proj": (kv * D, H), "v_proj": (kv * D, H), "o_proj": (H, A * D)},
        bias=bias,
    )
    if norms:
        yield from _weights(at + "self_attn.", {"q_norm": (D,), "k_norm": (D,)})


def _latent(at: str, *, lora: int, indexer: bool = False) -> Entries:
    parts: dict[str, Shape] = {"q_proj": (A * (NOPE + ROPE), H)}
    if lora:
        parts = {"q_a_proj": (lora, H), "q_a_layernorm": (lora,), "q_b_proj": (A * (NOPE + ROPE), lora)}
    parts |= {
        "kv_a_proj_with_mqa": (LATENT + ROPE, H),
        "kv_a_layernorm": (LATENT,),
        "kv_b_proj": (A * (NOPE + VALUE), LATENT),
        "o_proj": (H, A * VALUE),
    }
    yield from _weights(at + "self_attn.", parts)
    if indexer:
        yield from _weights(
            at + "self_attn.indexer.",
            {"wq_b": (4 * 6, lora), "wk": (6, H), "k_norm": (6,), "weights_proj": (4, H)},
            bias=("k_norm",),
        )


def _mlp(at: str, width: int, *, bias: tuple[str, ...] = ()) -> Entries:
    yield from _weights(at, {"gate_proj": (width, H), "up_proj": (width, H), "down_proj": (H, width)}, bias=bias)


def _experts(at: str, *, grouped: bool = False) -> Entries:
    if grouped:
        yield at + "experts.gate_up_proj", (E, 2 * M, H)
        yield at + "experts.down_proj", (E, H, M)
        return
    for e in range(E):
        yield from _mlp(f"{at}experts.{e}.", M)


def _norms(at: str, *more: str) -> Entries:
    yield from _weights(at, dict.fromkeys(("input_layernorm", "post_attention_layernorm", *more), (H,)))


def _ends(*, tied: bool) -> tuple[Entries, Entries]:
    last = {"model.norm": (H,)} | ({} if tied else {"lm_head": (V, H)})
    return _weights("", {"model.embed_tokens": (V, H)}), _weights("", last)


def _config(model_type: str, architecture: str, *, tied: bool = False, **more: object) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": H,
        "num_attention_heads": A,
        "num_key_value_heads": K,
        "head_dim": D,
        "intermediate_size": I,
        "num_hidden_layers": LAYERS,
        "vocab_size": V,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        **more,
    }


def _model(
    name: str,
    family: str,
    config: dict[str, Any],
    layers: list[list[Entries]],
    more: dict[str, Shape] | None = None,
    **fields: Any,
) -> Model:
    """A model with the usual embedding, final norm and head around its layers."""
    first, last = _ends(tied=config["tie_word_embeddings"])
    shapes = dict(first)
    for layer in layers:
        for entries in layer:
            shapes |= dict(entries)
    return Model(name, family, config, shapes | dict(last) | (more or {}), **fields)


def _plain(name: str, family: str, architecture: str, **options: Any) -> Model:
    """A dense model: attention, MLP, norms."""
    attention, norms, mlp_bias = options.get("attention", {}), options.get("norms", ()), options.get("mlp_bias", ())
    layers = [
        [
            _attention(at, **attention),
            _mlp(at + "mlp.", I, bias=mlp_bias),
            _norms(at, *norms),
        ]
        for at in map(LAYER.format, range(LAYERS))
    ]
    config = _config(name, architecture, tied=options.get("tied", False), **options.get("config", {}))
    more = {n: s for i in range(LAYERS) for n, s in options.get("more", {}).items() for n in [n.format(i)]}
    return _model(options.get("label", name), family, config, layers, more, dtypes={"inv_freq": "F32"})


def _mixture(name: str, architecture: str, *, grouped: bool = False, **config: int) -> Model:
    """A dense first layer, then experts; what else a family has is told by its name."""
    shared = {"qwen2_moe": "shared_expert.", "glm4_moe": "shared_experts.", "ernie4_5_moe": "shared_experts."}.get(name)
    attention: dict[str, Any] = {"norms": name in ("qwen3_moe", "glm4_moe")}
    if name in ("qwen2_moe", "glm4_moe"):
        attention["bias"] = ("q_proj", "k_proj", "v_proj")
    router = {"ernie4_5_moe": "mlp.moe_statics.e_score_correction_bias", "glm4_moe": "mlp.gate.e_score_correction_bias"}
    layers: list[list[Entries]] = []
    count = LAYERS + (name == "glm4_moe")
    for i in range(count):
        at = LAYER.format(i)
        layer = [_attention(at, **attention), _norms(at)]
        if i == 0:
            layer.append(_mlp(at + "mlp.", I))
        else:
            layer += [_weights(at + "mlp.", {"gate": (E, H)}), _experts(at + "mlp.", grouped=grouped)]
            if shared:
                layer.append(_mlp(at + "mlp." + shared, S))
            if name == "qwen2_moe":
                layer.append(_weights(at + "mlp.", {"shared_expert_gate": (1, H)}))
            if name in router:
                layer.append(iter([(at + router[name], (1, E) if name == "ernie4_5_moe" else (E,))]))
        if i == LAYERS:
            layer.append(_prediction(at))
        layers.append(layer)
    more: dict[str, Shape] = {}
    if name == "ernie4_5_moe":
        block = "model.mtp_block.0."
        more = dict([*_attention(block), *_mlp(block + "mlp.", I), *_norms(block)])
        more |= {"model.mtp_emb_norm.0.weight": (H,), "model.mtp_hidden_norm.0.weight": (H,)}
        more |= {"model.mtp_linear_proj.0.weight": (H, 2 * H)}
    return _model(
        name + ("@transformers" if grouped else ""),
        name,
        {**_config(name, architecture, moe_intermediate_size=M, num_experts_per_tok=2), **config},
        layers,
        more,
        dtypes={"e_score_correction_bias": "F32", "mlp.gate.weight": "F32" if name == "ernie4_5_moe" else "BF16"},
        moe=True,
    )


def _prediction(at: str) -> Entries:
    """What a multi-token-prediction layer has besides a layer's own tensors."""
    yield from _weights(
        at,
        {
            "eh_proj": (H, 2 * H),
            "enorm": (H,),
            "hnorm": (H,),
            "shared_head.norm": (H,),
            "shared_head.head": (V, H),
            "embed_tokens": (V, H),
        },
    )


def _mixtral() -> Model:
    layers: list[list[Entries]] = []
    for at in map(LAYER.format, range(LAYERS)):
        moe = at + "block_sparse_moe."
        layers.append([_attention(at), _norms(at), _weights(moe, {"gate": (E, H)})])
        for e in range(E):
            layers[-1].append(_weights(f"{moe}experts.{e}.", {"w1": (I, H), "w3": (I, H), "w2": (H, I)}))
    config = _config("mixtral", "MixtralForCausalLM", num_local_experts=E, num_experts_per_tok=2)
    return _model("mixtral", "mixtral", config, layers, moe=True)


def _deepseek(version: str, *, fp8: bool = False) -> Model:
    lora = 0 if version == "v2" else 16
    layers: list[list[Entries]] = []
    for i in range(LAYERS + (version != "v2")):
        at = LAYER.format(i)
        layer = [_latent(at, lora=lora, indexer=version == "v32"), _norms(at)]
        if i == 0:
            layer.append(_mlp(at + "mlp.", 8 * I if fp8 else I))
        else:
            # With blocks of 16, widths must let eight ranks cut between blocks.
            width, shared = (8 * M, 8 * S) if fp8 else (M, S)
            layer.append(_weights(at + "mlp.", {"gate": (E, H)}))
            layer += [_mlp(f"{at}mlp.experts.{e}.", width) for e in range(E)]
            layer.append(_mlp(at + "mlp.shared_experts.", shared))
            if version != "v2":
                layer.append(iter([(at + "mlp.gate.e_score_correction_bias", (E,))]))
        if i == LAYERS:
            layer.append(_prediction(at))
        layers.append(layer)
    config = _config(
        f"deepseek_{version}",
        f"Deepseek{version.upper()}ForCausalLM",
        n_routed_experts=E,
        n_shared_experts=2,
        first_k_dense_replace=1,
        q_lora_rank=lora or None,
        kv_lora_rank=LATENT,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE,
        v_head_dim=VALUE,
        num_nextn_predict_layers=int(version != "v2"),
    )
    if version == "v32":
        config |= {"index_n_heads": 4, "index_head_dim": 6}
    dtypes = {"e_score_correction_bias": "F32", "indexer.k_norm.weight": "F32", "indexer.k_norm.bias": "F32"}
    model = _model(f"deepseek_{version}", "deepseek", config, layers, dtypes=dtypes, moe=True)
    return quantized(model, 16) if fp8 else model


def quantized(model: Model, block: int) -> Model:
    """The same with FP8 weights and a scale for every block, as DeepSeek publishes."""
    shapes: dict[str, Shape] = {}
    dtypes = {"weight_scale_inv": "F32", **model.dtypes}
    for name, shape in model.shapes.items():
        shapes[name] = shape
        if name.endswith(("_proj.weight", "_mqa.weight")) and not name.endswith(
            ("eh_proj.weight", "weights_proj.weight")
        ):
            shapes[name + "_scale_inv"] = tuple(-(-n // block) for n in shape)
            dtypes[name] = "F8_E4M3"
    config = {**model.config, "quantization_config": {"quant_method": "fp8", "weight_block_size": [block, block]}}
    return Model(model.name + "_fp8", model.family, config, shapes, dtypes, model.moe, model.ranks)


def _llama4() -> Model:
    """Layers without experts and with some; the tower for images, whose tensors are none of a layer."""
    layers: list[list[Entries]] = []
    for i in range(LAYERS):
        at = LAYER.format(i)
        layer = [_attention(at), _norms(at)]
        if i % 2 == 0:
            layer.append(_mlp(at + "feed_forward.", I))
        else:
            experts = {"gate_up_proj": (E, H, 2 * M), "down_proj": (E, M, H)}
            layer += [
                iter([(f"{at}feed_forward.experts.{n}", s) for n, s in experts.items()]),
                _weights(at + "feed_forward.", {"router": (E, H)}),
                _mlp(at + "feed_forward.shared_expert.", M),
            ]
        layers.append(layer)
    block = "vision_model.model.layers.0."
    tower = dict(_weights(block + "self_attn.", dict.fromkeys((*_QKV, "o_proj"), (H, H)), bias=(*_QKV, "o_proj")))
    tower |= dict(_weights(block + "mlp.", {"fc1": (I, H), "fc2": (H, I)}, bias=("fc1", "fc2")))
    tower |= {"vision_model.class_embedding": (H,), "multi_modal_projector.linear_1.weight": (H, H)}
    config = _config("llama4", "Llama4ForConditionalGeneration", num_local_experts=E)
    return _model("llama4", "llama4", config, layers, tower, moe=True)


def _gpt_oss(*, mxfp4: bool = False) -> Model:
    width = 256  # eight blocks of 32
    hidden = 64  # two
    layers: list[list[Entries]] = []
    for at in map(LAYER.format, range(LAYERS)):
        experts: dict[str, Shape] = {
            "gate_up_proj_bias": (E, 2 * width),
            "down_proj_bias": (E, hidden),
        }
        if mxfp4:
            experts |= {
                "gate_up_proj_blocks": (E, 2 * width, hidden // 32, 16),
                "gate_up_proj_scales": (E, 2 * width, hidden // 32),
                "down_proj_blocks": (E, hidden, width // 32, 16),
                "down_proj_scales": (E, hidden, width // 32),
            }
        else:
            experts |= {"gate_up_proj": (E, hidden, 2 * width), "down_proj": (E, width, hidden)}
        layers.append(
            [
                _attention(at, bias=("q_proj", "k_proj", "v_proj", "o_proj")),
                iter([(at + "self_attn.sinks", (A,))]),
                _weights(at + "mlp.", {"router": (E, H)}, bias=("router",)),
                iter([(f"{at}mlp.experts.{n}", s) for n, s in experts.items()]),
                _norms(at),
            ]
        )
    config = _config("gpt_oss", "GptOssForCausalLM", num_local_experts=E)
    config["intermediate_size"] = width
    name = "gpt_oss_mxfp4" if mxfp4 else "gpt_oss"
    return _model(name, "gpt_oss", config, layers, dtypes={"_blocks": "U8", "_scales": "U8"}, moe=True)


def _phi3() -> Model:
    layers = [
        [
            _weights(
                at,
                {
                    "self_attn.qkv_proj": ((A + 2 * K) * D, H),
                    "self_attn.o_proj": (H, A * D),
                    "mlp.gate_up_proj": (2 * I, H),
                    "mlp.down_proj": (H, I),
                },
            ),
            _norms(at),
        ]
        for at in map(LAYER.format, range(LAYERS))
    ]
    return _model("phi3", "phi3", _config("phi3", "Phi3ForCausalLM"), layers)


def _gpt_neox() -> Model:
    shapes: dict[str, Shape] = {"gpt_neox.embed_in.weight": (V, H)}
    for i in range(LAYERS):
        at = f"gpt_neox.layers.{i}."
        parts = {
            "input_layernorm": (H,),
            "post_attention_layernorm": (H,),
            "attention.query_key_value": (A * 3 * D, H),
            "attention.dense": (H, A * D),
            "mlp.dense_h_to_4h": (I, H),
            "mlp.dense_4h_to_h": (H, I),
        }
        shapes |= dict(_weights(at, parts, bias=tuple(parts)))
        shapes |= {at + "attention.bias": (1, 1, POSITIONS, POSITIONS), at + "attention.masked_bias": ()}
        shapes |= {at + "attention.rotary_emb.inv_freq": (2,)}
    shapes |= {
        "gpt_neox.final_layer_norm.weight": (H,),
        "gpt_neox.final_layer_norm.bias": (H,),
        "embed_out.weight": (V, H),
    }
    config = _config("gpt_neox", "GPTNeoXForCausalLM")
    del config["num_key_value_heads"]
    dtypes = {"attention.bias": "BOOL", "masked_bias": "F32", "inv_freq": "F32"}
    return Model("gpt_neox", "gpt_neox", config, shapes, dtypes)


def _nemotron() -> Model:
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (V, H)}
    for i in range(LAYERS):
        at = LAYER.format(i)
        norms = ("input_layernorm", "post_attention_layernorm")
        shapes |= dict(_attention(at)) | dict(_weights(at, {"mlp.up_proj": (I, H), "mlp.down_proj": (H, I)}))
        shapes |= dict(_weights(at, dict.fromkeys(norms, (H,)), bias=norms))
    shapes |= dict(_weights("", {"model.norm": (H,), "lm_head": (V, H)}, bias=("model.norm",)))
    return Model("nemotron", "nemotron", _config("nemotron", "NemotronForCausalLM"), shapes)


def _gpt2(*, prefix: str) -> Model:
    shapes: dict[str, Shape] = {prefix + "wte.weight": (V, H), prefix + "wpe.weight": (POSITIONS, H)}
    for i in range(LAYERS):
        at = f"{prefix}h.{i}."
        for part, shape in {
            "ln_1": (H,),
            "attn.c_attn": (H, 3 * A * D),
            "attn.c_proj": (A * D, H),
            "ln_2": (H,),
            "mlp.c_fc": (H, I),
            "mlp.c_proj": (I, H),
        }.items():
            shapes |= {f"{at}{part}.weight": shape, f"{at}{part}.bias": shape[-1:]}
        if not prefix:
            shapes[at + "attn.bias"] = (1, 1, POSITIONS, POSITIONS)
    shapes |= {prefix + "ln_f.weight": (H,), prefix + "ln_f.bias": (H,)}
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": H,
        "n_head": A,
        "n_inner": I,
        "n_layer": LAYERS,
        "n_positions": POSITIONS,
        "vocab_size": V,
        "tie_word_embeddings": True,
    }
    return Model("gpt2" if prefix else "gpt2_published", "gpt2", config, shapes, {"attn.bias": "U8"})


_QKV = ("q_proj", "k_proj", "v_proj")
_FOUR_NORMS = ("pre_feedforward_layernorm", "post_feedforward_layernorm")

MODELS = {
    m.name: m
    for m in (
        _plain(
            "llama",
            "llama",
            "LlamaForCausalLM",
            attention={"bias": (*_QKV, "o_proj")},
            mlp_bias=("gate_proj", "up_proj", "down_proj"),
            more={LAYER + "self_attn.rotary_emb.inv_freq": (D // 2,)},
        ),
        _plain("mistral", "llama", "MistralForCausalLM", tied=True),
        _plain("qwen2", "qwen2", "Qwen2ForCausalLM", attention={"bias": _QKV}, tied=True),
        _plain("qwen3", "qwen3", "Qwen3ForCausalLM", attention={"norms": True}),
        _plain("gemma", "gemma", "GemmaForCausalLM", attention={"kv": 1}, config={"num_key_value_heads": 1}, tied=True),
        _plain("gemma2", "gemma", "Gemma2ForCausalLM", norms=_FOUR_NORMS, tied=True),
        _plain("gemma3_text", "gemma", "Gemma3ForCausalLM", attention={"norms": True}, norms=_FOUR_NORMS, tied=True),
        _plain("ernie4_5", "ernie4_5", "Ernie4_5ForCausalLM", tied=True),
        _phi3(),
        _nemotron(),
        _gpt_neox(),
        _gpt2(prefix="transformer."),
        _gpt2(prefix=""),
        _mixture("qwen2_moe", "Qwen2MoeForCausalLM", num_experts=E),
        _mixture("qwen3_moe", "Qwen3MoeForCausalLM", num_experts=E),
        _mixture("qwen3_moe", "Qwen3MoeForCausalLM", grouped=True, num_local_experts=E),
        _mixture(
            "glm4_moe", "Glm4MoeForCausalLM", n_routed_experts=E, n_shared_experts=S // M, num_nextn_predict_layers=1
        ),
        _mixture("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", moe_num_experts=E),
        _mixtral(),
        _deepseek("v2"),
        _deepseek("v3"),
        _deepseek("v3", fp8=True),
        _deepseek("v32"),
        _llama4(),
        _gpt_oss(),
        _gpt_oss(mxfp4=True),
    )
}
"""By name."""
