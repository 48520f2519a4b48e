"""Unusual models of every family: config, and tensors under the names of one tensor for each projection.

What a rank of tensor parallelism holds of a tensor is a property of what the tensor does in the model, and is noted
where it is made: output features, input features, key/value heads, rows of the vocabulary, or all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from tests.walk.bits import Raw, made


@dataclass(frozen=True)
class Cut:
    """How a tensor lies over tensor-parallel ranks."""

    kind: str = "whole"
    """whole, vocab (padded), split, or heads: with fewer of them than ranks, neighbours hold the same one."""
    axis: int = 0
    units: int = 0
    """Into how many equal pieces the axis may fall; 0: its elements."""
    block: int = 1
    """Of a weight with a grid of scales: elements that one scale covers."""


@dataclass(frozen=True)
class Tensor:
    """One of the model."""

    raw: Raw
    cut: Cut
    place: str
    """first, layer or last."""
    layer: int = -1
    expert: int = -1
    derived: bool = False
    """A buffer that engines make themselves."""


@dataclass
class Model:
    """One model."""

    family: str
    kind: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    layers: int
    heads: int
    kv: int
    head: int
    """Elements of a head; of the values in latent attention."""
    vocab: int
    experts: int
    tie: str
    """no, absent (tied, not stored), equal (tied, stored), differs (said to be tied, and stored with other values)."""
    traits: set[str] = field(default_factory=set)
    """What is unusual about it, for the count of what was drawn."""

    @property
    def tied(self) -> bool:
        """As the config has it."""
        return self.tie != "no"

    @property
    def embedding(self) -> str:
        return {"gpt2": "transformer.wte.weight", "gpt_neox": "gpt_neox.embed_in.weight"}.get(
            self.family, "model.embed_tokens.weight"
        )

    @property
    def output(self) -> str:
        return "embed_out.weight" if self.family == "gpt_neox" else "lm_head.weight"


KINDS = {
    "llama": ("llama", "LlamaForCausalLM"),
    "mistral": ("llama", "MistralForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma": ("gemma", "GemmaForCausalLM"),
    "gemma2": ("gemma", "Gemma2ForCausalLM"),
    "gemma3_text": ("gemma", "Gemma3ForCausalLM"),
    "ernie4_5": ("ernie4_5", "Ernie4_5ForCausalLM"),
    "phi3": ("phi3", "Phi3ForCausalLM"),
    "gpt2": ("gpt2", "GPT2LMHeadModel"),
    "gpt_neox": ("gpt_neox", "GPTNeoXForCausalLM"),
    "mixtral": ("mixtral", "MixtralForCausalLM"),
    "qwen2_moe": ("qwen2_moe", "Qwen2MoeForCausalLM"),
    "qwen3_moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "glm4_moe": ("glm4_moe", "Glm4MoeForCausalLM"),
    "ernie4_5_moe": ("ernie4_5_moe", "Ernie4_5_MoeForCausalLM"),
    "deepseek_v2": ("deepseek", "DeepseekV2ForCausalLM"),
    "deepseek_v3": ("deepseek", "DeepseekV3ForCausalLM"),
    "deepseek_v32": ("deepseek", "DeepseekV32ForCausalLM"),
    "gpt_oss": ("gpt_oss", "GptOssForCausalLM"),
}
"""model_type: (family, architecture)."""

_EXPERT_FIELD = {
    "mixtral": "num_local_experts",
    "qwen2_moe": "num_experts",
    "qwen3_moe": "num_experts",
    "glm4_moe": "n_routed_experts",
    "ernie4_5_moe": "moe_num_experts",
    "deepseek": "n_routed_experts",
    "gpt_oss": "num_local_experts",
}
_TIED_BY_DEFAULT = ("gemma", "ernie4_5", "ernie4_5_moe", "gpt2")
_HEAD_DIM = {"qwen3": 128, "gemma": 256, "ernie4_5": 128, "gpt_oss": 64}
"""What transformers takes for head_dim when the config does not say; hidden / heads elsewhere."""
_DTYPES = (("BF16", 6), ("F16", 2), ("F32", 3))
_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


class _Making:
    """A model under construction."""

    def __init__(self, r: Random, kind: str) -> None:
        self.r = r
        self.kind = kind
        self.family, self.architecture = KINDS[kind]
        self.tensors: dict[str, Tensor] = {}
        self.traits: set[str] = set()
        self.prefix = ""
        self.place = "first"
        self.layer = -1
        base = self.pick(_DTYPES)
        self.dtypes = dict.fromkeys(("linear", "norm", "embed", "bias", "router", "f32"), base)
        self.dtypes["f32"] = "F32"
        self.main = base
        if r.random() < 0.25:
            self.traits.add("mixed dtypes")
            for what in r.sample(["norm", "embed", "bias", "router"], 2):
                self.dtypes[what] = self.pick(_DTYPES)
        self.block = 0
        """Side of the blocks of FP8 weights; 0: no FP8."""

    def pick(self, weighted: tuple[tuple[Any, int], ...]) -> Any:
        return self.r.choices([x for x, _ in weighted], [n for _, n in weighted])[0]

    def chance(self, p: float) -> bool:
        return self.r.random() < p

    def add(
        self,
        name: str,
        shape: tuple[int, ...],
        cut: Cut | None = None,
        what: str = "linear",
        expert: int = -1,
        *,
        derived: bool = False,
    ) -> None:
        cut = cut or Cut()
        name = self.prefix + name
        fp8 = self.block and what == "linear" and len(shape) == 2 and name.endswith(".weight")
        dtype = "F8_E4M3" if fp8 else self.dtypes[what]
        if fp8:
            cut = Cut(cut.kind, cut.axis, cut.units, self.block)
        raw = made(len(self.tensors) + 1, dtype, shape)
        self.tensors[name] = Tensor(raw, cut, self.place, self.layer, expert, derived)
        if fp8:
            grid = tuple(-(-n // self.block) for n in shape)
            scales = made(len(self.tensors) + 1, "F32", grid)
            scale_cut = Cut(cut.kind, cut.axis, cut.units)
            self.tensors[name + "_scale_inv"] = Tensor(scales, scale_cut, self.place, self.layer, expert)

    def linear(
        self,
        name: str,
        out: int,
        inn: int,
        cut: Cut | None = None,
        *,
        bias: bool = False,
        what: str = "linear",
        expert: int = -1,
    ) -> None:
        """A weight, and its bias, which is whole where the input is cut."""
        self.add(name + ".weight", (out, inn), cut, what, expert)
        if bias:
            self.add(name + ".bias", (out,), cut if cut and cut.axis == 0 else None, "bias", expert)


def build(seed: int, kind: str = "") -> Model:
    """The model of a seed."""
    r = Random(f"model {seed}")  # noqa: S311  # chance that can be repeated is what is wanted
    kind = kind or r.choice(list(KINDS))
    m = _Making(r, kind)
    family = m.family
    heads = m.pick(((1, 1), (2, 3), (3, 1), (4, 5), (6, 2), (8, 4)))
    kv = r.choice([n for n in range(1, heads + 1) if heads % n == 0])
    head = r.choice([2, 4, 6, 8])
    alike = family in ("gpt2", "gpt_neox") or m.chance(0.4)
    if family in ("gpt2", "gpt_neox"):
        kv = heads
    hidden = heads * head if alike else r.choice([10, 12, 16, 20, 24, 32])
    if not alike:
        m.traits.add("head_dim apart")
    if kv == 1 and heads > 1:
        m.traits.add("one kv head")
    inner = r.choice([4, 6, 8, 12, 16, 24])
    vocab = r.choice([5, 7, 16, 23, 31, 32, 37, 48, 61, 64, 67])
    if vocab % 2:
        m.traits.add("odd vocabulary")
    layers = m.pick(((1, 2), (2, 4), (3, 2), (4, 2)))
    tie = m.pick((("no", 8), ("absent", 6), ("equal", 3), ("differs", 1)))
    m.traits.add(f"tie {tie}")
    config: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 16,
    }
    default = _HEAD_DIM.get(family, hidden // heads if hidden % heads == 0 else 0)
    if default != head or m.chance(0.3):
        if m.chance(0.15):
            m.traits.add("head_dim unsaid")
        else:
            config["head_dim"] = head
    if kv == heads and m.chance(0.3):
        del config["num_key_value_heads"]
        m.traits.add("kv heads unsaid")
    if family in ("llama", "qwen3", "mixtral", "qwen3_moe", "glm4_moe", "deepseek") and m.chance(0.2):
        m.block = r.choice([2, 4, 8])
        m.traits.add("fp8 blocks")
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [m.block, m.block],
        }
    experts = 0
    if family in _EXPERT_FIELD:
        experts = r.choice([2, 3, 4, 4, 5, 6, 8])
        config[_EXPERT_FIELD[family]] = experts
        config["num_experts_per_tok"] = 2
        if experts % 2:
            m.traits.add("odd experts")
    model = Model(family, kind, config, m.tensors, layers, heads, kv, head, vocab, experts, tie, m.traits)
    _FAMILIES.get(family, _decoder)(m, model)
    _tie(m, model)
    _finish(m, model)
    return model


def untied(model: Model) -> Model:
    """With a config that says that output and input embedding are two."""
    config = {**model.config, "tie_word_embeddings": False}
    if "tie_word_embeddings" in config.get("text_config", {}):
        config["text_config"] = {**config["text_config"], "tie_word_embeddings": False}
    return replace(model, config=config, tie="no")


def _first(m: _Making, model: Model) -> None:
    m.add("model.embed_tokens.weight", (model.vocab, model.config["hidden_size"]), Cut("vocab"), "embed")


def _last(m: _Making, model: Model) -> None:
    hidden = model.config["hidden_size"]
    m.prefix, m.place, m.layer = "", "last", -1
    m.add("model.norm.weight", (hidden,), what="norm")
    if model.tie != "absent":
        m.add("lm_head.weight", (model.vocab, hidden), Cut("vocab"), "embed")


def _layers(m: _Making, count: int, prefix: str = "model.layers.") -> Iterator[int]:
    for layer in range(count):
        m.prefix, m.place, m.layer = f"{prefix}{layer}.", "layer", layer
        yield layer
    m.prefix, m.layer = "", -1


def _attention(m: _Making, model: Model, *, qkv: bool = False, out: bool = False, norms: bool = False) -> None:
    hidden, head = model.config["hidden_size"], model.head
    m.linear("self_attn.q_proj", model.heads * head, hidden, Cut("split", 0, model.heads), bias=qkv)
    for x in "kv":
        m.linear(f"self_attn.{x}_proj", model.kv * head, hidden, Cut("heads", 0, model.kv), bias=qkv)
    m.linear("self_attn.o_proj", hidden, model.heads * head, Cut("split", 1, model.heads), bias=out)
    if norms:
        m.add("self_attn.q_norm.weight", (head,), what="norm")
        m.add("self_attn.k_norm.weight", (head,), what="norm")


def _mlp(m: _Making, hidden: int, inner: int, stem: str = "mlp", *, bias: bool = False, expert: int = -1) -> None:
    for x in ("gate", "up"):
        m.linear(f"{stem}.{x}_proj", inner, hidden, Cut("split", 0), bias=bias, expert=expert)
    m.linear(f"{stem}.down_proj", hidden, inner, Cut("split", 1), bias=bias, expert=expert)


def _norms(m: _Making, model: Model, *more: str) -> None:
    for name in ("input_layernorm", "post_attention_layernorm", *more):
        m.add(f"{name}.weight", (model.config["hidden_size"],), what="norm")


def _flag(m: _Making, model: Model, name: str, p: float = 0.4) -> bool:
    """A field that is true with this chance, and not said otherwise."""
    if m.chance(p):
        model.config[name] = True
        m.traits.add(name)
        return True
    return False


def _decoder(m: _Making, model: Model) -> None:
    """Llama, Mistral, Qwen2, Qwen3, Gemma, ERNIE 4.5 and Phi-3."""
    kind = model.kind
    hidden, inner = model.config["hidden_size"], model.config["intermediate_size"]
    qkv = kind == "qwen2" or (kind in ("llama", "qwen3", "ernie4_5", "gemma") and _flag(
        m, model, "use_bias" if kind == "ernie4_5" else "attention_bias"
    ))  # fmt: skip
    mlp = (kind == "llama" and _flag(m, model, "mlp_bias")) or (kind == "ernie4_5" and qkv)
    four = kind in ("gemma2", "gemma3_text")
    buffers = kind == "llama" and m.chance(0.15)
    _first(m, model)
    for _ in _layers(m, model.layers):
        _attention(m, model, qkv=qkv, out=qkv and kind != "qwen2", norms=kind in ("qwen3", "gemma3_text"))
        if buffers:
            m.add("self_attn.rotary_emb.inv_freq", (max(1, model.head // 2),), what="f32", derived=True)
            m.traits.add("derived buffers")
        _mlp(m, hidden, inner, bias=mlp)
        _norms(m, model, *(("pre_feedforward_layernorm", "post_feedforward_layernorm") if four else ()))
    _last(m, model)


def _gpt2(m: _Making, model: Model) -> None:
    hidden, inner = model.config["hidden_size"], model.config["intermediate_size"]
    for field_ in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"):
        model.config.pop(field_, None)
    model.config.pop("num_key_value_heads", None)
    model.config |= {
        "n_embd": hidden,
        "n_layer": model.layers,
        "n_head": model.heads,
        "n_positions": 9,
        "n_inner": inner,
    }
    masks = m.chance(0.3)
    m.add("transformer.wte.weight", (model.vocab, hidden), Cut("vocab"), "embed")
    m.add("transformer.wpe.weight", (9, hidden), what="embed")
    for _ in _layers(m, model.layers, "transformer.h."):
        for norm in ("ln_1", "ln_2"):
            m.add(f"{norm}.weight", (hidden,), what="norm")
            m.add(f"{norm}.bias", (hidden,), what="norm")
        if masks:
            m.add("attn.bias", (1, 1, 9, 9), what="f32", derived=True)
            m.traits.add("derived buffers")
        for x in "qkv":
            m.linear(f"attn.{x}_proj", hidden, hidden, Cut("split", 0, model.heads), bias=True)
        m.linear("attn.c_proj", hidden, hidden, Cut("split", 1, model.heads), bias=True)
        m.linear("mlp.c_fc", inner, hidden, Cut("split", 0), bias=True)
        m.linear("mlp.c_proj", hidden, inner, Cut("split", 1), bias=True)
    m.place = "last"
    m.add("transformer.ln_f.weight", (hidden,), what="norm")
    m.add("transformer.ln_f.bias", (hidden,), what="norm")
    if model.tie != "absent":
        m.add("lm_head.weight", (model.vocab, hidden), Cut("vocab"), "embed")


def _gpt_neox(m: _Making, model: Model) -> None:
    hidden, inner = model.config["hidden_size"], model.config["intermediate_size"]
    model.config.pop("num_key_value_heads", None)
    bias = not m.chance(0.2)
    if not bias:
        model.config["attention_bias"] = False
    m.add("gpt_neox.embed_in.weight", (model.vocab, hidden), Cut("vocab"), "embed")
    for _ in _layers(m, model.layers, "gpt_neox.layers."):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            m.add(f"{norm}.weight", (hidden,), what="norm")
            m.add(f"{norm}.bias", (hidden,), what="norm")
        for x in "qkv":
            m.linear(f"attention.{x}_proj", hidden, hidden, Cut("split", 0, model.heads), bias=bias)
        m.linear("attention.dense", hidden, hidden, Cut("split", 1, model.heads), bias=bias)
        m.linear("mlp.dense_h_to_4h", inner, hidden, Cut("split", 0), bias=True)
        m.linear("mlp.dense_4h_to_h", hidden, inner, Cut("split", 1), bias=True)
    m.place = "last"
    m.add("gpt_neox.final_layer_norm.weight", (hidden,), what="norm")
    m.add("gpt_neox.final_layer_norm.bias", (hidden,), what="norm")
    if model.tie != "absent":
        m.add("embed_out.weight", (model.vocab, hidden), Cut("vocab"), "embed")


def _router(m: _Making, name: str, experts: int, hidden: int, what: str = "router") -> None:
    m.add(name, (experts, hidden), what=what)


def _mixtral(m: _Making, model: Model) -> None:
    hidden, inner = model.config["hidden_size"], model.config["intermediate_size"]
    _first(m, model)
    for _ in _layers(m, model.layers):
        _attention(m, model)
        _router(m, "block_sparse_moe.gate.weight", model.experts, hidden)
        for e in range(model.experts):
            stem = f"block_sparse_moe.experts.{e}"
            for x, rows, columns, axis in (
                ("w1", inner, hidden, 0),
                ("w2", hidden, inner, 1),
                ("w3", inner, hidden, 0),
            ):
                m.linear(f"{stem}.{x}", rows, columns, Cut("split", axis), expert=e)
        _norms(m, model)
    _last(m, model)


def _qwen_moe(m: _Making, model: Model) -> None:
    hidden, inner = model.config["hidden_size"], model.config["intermediate_size"]
    old = model.kind == "qwen2_moe"
    small = m.r.choice([4, 6, 8, 12])
    model.config["moe_intermediate_size"] = small
    dense = [n for n in range(model.layers) if m.chance(0.25)]
    if dense:
        model.config["mlp_only_layers"] = dense
    shared = m.r.choice([4, 6, 8])
    qkv = True
    if old:
        model.config["shared_expert_intermediate_size"] = shared
        if m.chance(0.2):
            qkv = model.config["qkv_bias"] = False
    else:
        qkv = _flag(m, model, "attention_bias")
    _first(m, model)
    for layer in _layers(m, model.layers):
        _attention(m, model, qkv=qkv, out=qkv and not old, norms=not old)
        if layer in dense:
            _mlp(m, hidden, inner)
        else:
            _router(m, "mlp.gate.weight", model.experts, hidden)
            for e in range(model.experts):
                _mlp(m, hidden, small, f"mlp.experts.{e}", expert=e)
            if old:
                _mlp(m, hidden, shared, "mlp.shared_expert")
                m.add("mlp.shared_expert_gate.weight", (1, hidden), what="router")
        _norms(m, model)
    _last(m, model)


def _next_tokens(m: _Making, model: Model) -> None:
    """What a layer for multi-token prediction has beside its decoder layer."""
    hidden = model.config["hidden_size"]
    m.add("enorm.weight", (hidden,), what="norm")
    m.add("hnorm.weight", (hidden,), what="norm")
    m.add("eh_proj.weight", (hidden, 2 * hidden), what="embed")
    m.add("embed_tokens.weight", (model.vocab, hidden), Cut("vocab"), "embed")
    m.add("shared_head.norm.weight", (hidden,), what="norm")
    m.add("shared_head.head.weight", (model.vocab, hidden), Cut("vocab"), "embed")


def _glm(m: _Making, model: Model) -> None:
    hidden, inner = model.config["hidden_size"], model.config["intermediate_size"]
    small, shared = m.r.choice([4, 6, 8, 12]), m.r.choice([0, 1, 2])
    dense = min(m.r.choice([0, 1, 1, 2]), model.layers)
    mtp = m.r.choice([0, 0, 1])
    qkv, norms = _flag(m, model, "attention_bias"), _flag(m, model, "use_qk_norm")
    model.config |= {
        "moe_intermediate_size": small,
        "n_shared_experts": shared,
        "first_k_dense_replace": dense,
        "num_nextn_predict_layers": mtp,
    }
    _first(m, model)
    for layer in _layers(m, model.layers + mtp):
        _attention(m, model, qkv=qkv, norms=norms)
        if layer < dense:
            _mlp(m, hidden, inner)
        else:
            _router(m, "mlp.gate.weight", model.experts, hidden)
            m.add("mlp.gate.e_score_correction_bias", (model.experts,), what="f32")
            for e in range(model.experts):
                _mlp(m, hidden, small, f"mlp.experts.{e}", expert=e)
            if shared:
                _mlp(m, hidden, small * shared, "mlp.shared_experts")
        _norms(m, model)
        if layer >= model.layers:
            m.traits.add("mtp layer")
            _next_tokens(m, model)
    _last(m, model)


def _ernie_moe(m: _Making, model: Model) -> None:
    hidden, inner = model.config["hidden_size"], model.config["intermediate_size"]
    small, shared = m.r.choice([4, 6, 8, 12]), m.r.choice([0, 1, 2])
    start, mtp = m.r.choice([0, 1, 1]), m.r.choice([0, 0, 1])
    bias = _flag(m, model, "use_bias", 0.3)
    model.config |= {
        "moe_intermediate_size": small,
        "moe_num_shared_experts": shared,
        "moe_layer_start_index": start,
        "num_nextn_predict_layers": mtp,
    }
    del model.config["num_experts_per_tok"]
    model.config["moe_k"] = 2
    _first(m, model)
    for layer in _layers(m, model.layers):
        _attention(m, model, qkv=bias, out=bias)
        if layer < start:
            _mlp(m, hidden, inner, bias=bias)
        else:
            _router(m, "mlp.gate.weight", model.experts, hidden, "f32")
            m.add("mlp.moe_statics.e_score_correction_bias", (1, model.experts), what="f32")
            for e in range(model.experts):
                _mlp(m, hidden, small, f"mlp.experts.{e}", expert=e)
            if shared:
                _mlp(m, hidden, small * shared, "mlp.shared_experts", bias=bias)
        _norms(m, model)
    _last(m, model)
    if mtp:
        m.traits.add("mtp layer")
        m.prefix, m.place = "model.mtp_block.0.", "last"
        _attention(m, model, qkv=bias, out=bias)
        _mlp(m, hidden, inner, bias=bias)
        _norms(m, model)
        m.prefix = "model."
        m.add("mtp_emb_norm.0.weight", (hidden,), what="norm")
        m.add("mtp_hidden_norm.0.weight", (hidden,), what="norm")
        m.add("mtp_linear_proj.0.weight", (hidden, 2 * hidden), what="embed")
        m.prefix = ""


def _deepseek(m: _Making, model: Model) -> None:
    config, heads = model.config, model.heads
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    for name in ("head_dim", "num_key_value_heads"):
        config.pop(name, None)
    m.traits -= {"head_dim apart", "head_dim unsaid", "one kv head", "kv heads unsaid"}
    v2, v32 = model.kind == "deepseek_v2", model.kind == "deepseek_v32"
    q = m.r.choice([6, 8]) if v32 else m.r.choice([0, 6, 8])
    latent, nope, rope, value = m.r.choice([6, 8, 12]), m.r.choice([2, 4]), 2, m.r.choice([2, 4, 6])
    small, shared = m.r.choice([4, 6, 8, 12]), m.r.choice([0, 1, 2])
    dense, mtp = min(m.r.choice([0, 1, 1, 2]), model.layers), m.r.choice([0, 0, 1])
    bias = _flag(m, model, "attention_bias", 0.2)
    config |= {
        "q_lora_rank": q or None,
        "kv_lora_rank": latent,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
        "moe_intermediate_size": small,
        "n_shared_experts": shared or None,
        "first_k_dense_replace": dense,
        "num_nextn_predict_layers": mtp,
    }
    config["num_key_value_heads"] = heads
    if v32:
        config |= {"index_n_heads": 2, "index_head_dim": 4, "index_topk": 4}
    by_heads = Cut("split", 0, heads)
    _first(m, model)
    for layer in _layers(m, model.layers + mtp):
        if q:
            m.linear("self_attn.q_a_proj", q, hidden, bias=bias)
            m.add("self_attn.q_a_layernorm.weight", (q,), what="norm")
            m.linear("self_attn.q_b_proj", heads * (nope + rope), q, by_heads)
        else:
            m.linear("self_attn.q_proj", heads * (nope + rope), hidden, by_heads)
        m.linear("self_attn.kv_a_proj_with_mqa", latent + rope, hidden, bias=bias)
        m.add("self_attn.kv_a_layernorm.weight", (latent,), what="norm")
        m.linear("self_attn.kv_b_proj", heads * (nope + value), latent, by_heads)
        m.linear("self_attn.o_proj", hidden, heads * value, Cut("split", 1, heads), bias=bias)
        if v32:
            m.linear("self_attn.indexer.wq_b", 8, q)
            m.linear("self_attn.indexer.wk", 4, hidden)
            m.add("self_attn.indexer.k_norm.weight", (4,), what="f32")
            m.add("self_attn.indexer.k_norm.bias", (4,), what="f32")
            m.add("self_attn.indexer.weights_proj.weight", (2, hidden), what="router")
        if layer < dense:
            _mlp(m, hidden, inner)
        else:
            _router(m, "mlp.gate.weight", model.experts, hidden)
            if not v2:
                m.add("mlp.gate.e_score_correction_bias", (model.experts,), what="f32")
            for e in range(model.experts):
                _mlp(m, hidden, small, f"mlp.experts.{e}", expert=e)
            if shared:
                _mlp(m, hidden, small * shared, "mlp.shared_experts")
        _norms(m, model)
        if layer >= model.layers:
            m.traits.add("mtp layer")
            _next_tokens(m, model)
    _last(m, model)


def _gpt_oss(m: _Making, model: Model) -> None:
    hidden, inner = model.config["hidden_size"], model.config["intermediate_size"]
    _first(m, model)
    for _ in _layers(m, model.layers):
        m.add("self_attn.sinks", (model.heads,), Cut("split", 0, model.heads), "bias")
        _attention(m, model, qkv=True, out=True)
        m.linear("mlp.router", model.experts, hidden, bias=True, what="router")
        for e in range(model.experts):
            _mlp(m, hidden, inner, f"mlp.experts.{e}", bias=True, expert=e)
        _norms(m, model)
    _last(m, model)


_FAMILIES = {
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen_moe,
    "qwen3_moe": _qwen_moe,
    "glm4_moe": _glm,
    "ernie4_5_moe": _ernie_moe,
    "deepseek": _deepseek,
    "gpt_oss": _gpt_oss,
}


def _tie(m: _Making, model: Model) -> None:
    """Output and input embedding are one, or not."""
    if model.tied != (model.family in _TIED_BY_DEFAULT) or m.chance(0.6):
        model.config["tie_word_embeddings"] = model.tied
    if model.tie == "equal":
        head, owner = model.tensors[model.output], model.tensors[model.embedding]
        model.tensors[model.output] = Tensor(owner.raw, head.cut, head.place)


def _finish(m: _Making, model: Model) -> None:
    """Where the fields of the config stand."""
    named = {"architectures": [m.architecture], "model_type": model.kind}
    dtype = {m.r.choice(["torch_dtype", "dtype"]): _NAMES[m.main]}
    if m.chance(0.12):
        m.traits.add("nested text_config")
        quantized = model.config.pop("quantization_config", None)
        tied = (
            {"tie_word_embeddings": model.config["tie_word_embeddings"]}
            if "tie_word_embeddings" in model.config
            else {}
        )
        inner = {**model.config, "model_type": model.kind, **dtype}
        model.config = {**named, **dtype, **tied, "text_config": inner}
        if quantized:
            model.config["quantization_config"] = quantized
    else:
        model.config = {**named, **model.config, **dtype}
