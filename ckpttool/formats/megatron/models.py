"""The kinds of models: which arguments of Megatron make which model of Hugging Face, one class for each.

``config`` says what config.json such arguments amount to, ``args`` the way back. Both refuse by name what the other
side would compute otherwise.

Sources: megatron/training/arguments.py, argument_utils.py (``core_transformer_config_from_args``) of Megatron-LM,
megatron/core/transformer/{mlp,attention,multi_latent_attention}.py and transformer/moe/{router,moe_utils}.py of
Megatron Core 0.16; the models of transformers 5.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any, ClassVar

from ckpttool.errors import CorruptError, UnsupportedError
from ckpttool.formats.megatron.fields import Fields, shown
from ckpttool.formats.megatron.rotary import is_rotary, rope_args, rope_of

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "activation_func_clamp_value": (),
    "apply_layernorm_1p": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "attention_output_gate": (False,),
    "enable_mhc_connections": (False,),
    "experimental_attention_variant": (),
    "glu_linear_offset": (0,),
    "heterogeneous_layers_config_encoded_json": (),
    "heterogeneous_layers_config_path": (),
    "hybrid_layer_pattern": (),
    "hybrid_override_pattern": (),
    "is_hybrid_model": (False,),
    "layernorm_zero_centered_gamma": (False,),
    "linear_attention_freq": (),
    "mla_down_proj_fusion": (False,),
    "moe_apply_probs_on_input": (False,),
    "moe_latent_size": (),
    "moe_mlp_glu_interleave_size": (),
    "moe_router_force_biased": (),
    "moe_router_force_load_balancing": (False,),
    "moe_router_group_topk": (),
    "moe_router_load_balancing_type": ("none", "aux_loss", "seq_aux_loss", "global_aux_loss"),
    "moe_router_num_groups": (),
    "moe_router_topk_limited_devices": (),
    "moe_router_topk_scaling_factor": (1,),
    "moe_shared_expert_gate": (False,),
    "moe_shared_expert_glu_interleave_size": (),
    "moe_shared_expert_intermediate_size": (0,),
    "moe_single_grouped_bias": (False,),
    "moe_single_grouped_weight": (False,),
    "mrope_section": (),
    "mtp_hybrid_override_pattern": (),
    "mtp_num_layers": (0,),
    "mtp_use_repeated_layer": (False,),
    "multi_latent_attention": (False,),
    "no_rope_freq": (),
    "qk_l2_norm": (False,),
    "quick_geglu": (False,),
    "rotary_interleaved": (False,),
    "softmax_scale": (),
    "softmax_type": ("vanilla",),
    "squared_relu": (False,),
    "use_grouped_gemm_for_dense_mlp": (False,),
    "use_grouped_gemm_for_shared_expert": (False,),
    "use_mup": (False,),
    "window_attn_skip_freq": (),
    "window_size": (),
}
"""Arguments that change what a model computes, or how its tensors lie: values with which they do not, besides None."""


class ModelKind:
    """A kind of model; these answers are those of a dense one with RMSNorm, SwiGLU and rotary positions."""

    model_type: ClassVar = ""
    architecture: ClassVar = ""
    translates: ClassVar[frozenset[str]] = frozenset()
    """Arguments of NEUTRAL that it looks at itself."""
    latent: ClassVar = False
    tied: ClassVar = False
    """Whether the head is the embedding where config.json does not say it."""
    partial: ClassVar = False
    """Hugging Face's code can turn a part of each head."""
    share: ClassVar = 1.0
    """The part of each head that its code rotates when config.json does not say it."""
    norm: ClassVar = "RMSNorm"
    eps: ClassVar = "rms_norm_eps"
    act: ClassVar = "silu"
    acts: ClassVar[tuple[str, ...]] = ("silu",)
    defaults: ClassVar[dict[str, Any]] = {}
    """Defaults of transformers for fields that config.json lacks, where other kinds have others."""
    mlp: ClassVar[dict[str, bool]] = {"swiglu": True, "squared_relu": False, "quick_geglu": False}
    """The arguments that choose the activation."""

    # -- from arguments

    def config(self, a: Fields) -> dict[str, Any]:
        """config.json."""
        refuse_others(a, self.translates)
        hidden, heads = a.size("hidden_size"), a.size("num_attention_heads")
        layers = a.size("num_layers")
        groups = a.whole("num_query_groups", least=1) if a.flag("group_query_attention") else None
        check_norm(a, self.norm)
        eps = next((e for n in ("norm_epsilon", "layernorm_epsilon") if (e := a.number(n)) is not None), 1e-5)
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "hidden_size": hidden,
            "intermediate_size": a.size("ffn_hidden_size"),
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": groups or heads,
            "head_dim": a.whole("kv_channels", least=1) or hidden // heads,
            "hidden_act": self.act,
            self.eps: eps,
            "vocab_size": vocab_of(a),
            "max_position_embeddings": a.whole("max_position_embeddings", least=1) or a.size("seq_length"),
            "tie_word_embeddings": not _needed_flag(a, "untie_embeddings_and_output_weights"),
            **self.positions(a),
            **self.own_config(a, layers),
        }

    def positions(self, a: Fields) -> dict[str, Any]:
        """Its positions."""
        if not is_rotary(a):
            raise a.no("position_embedding_type", f"a model like this one ({self.model_type}) has rotary positions")
        return rope_of(a, latent=self.latent, partial=self.partial)

    def own_config(self, a: Fields, layers: int) -> dict[str, Any]:
        """The config fields that only this kind has."""
        refuse_biases(a, self.model_type)
        return {}

    # -- from config.json

    def args(self, c: Fields) -> dict[str, Any]:
        """The model's arguments, without those of the mesh and the vocabulary's padding."""
        c = Fields({"rms_norm_eps": 1e-6, **self.defaults, **c.values}, c.called)
        hidden, heads, layers = c.size("hidden_size"), c.size("num_attention_heads"), c.size("num_hidden_layers")
        groups = heads if self.latent else c.whole("num_key_value_heads", least=1) or heads
        act = c.text("hidden_act") or c.text("hidden_activation") or self.act
        if act not in self.acts:
            raise c.no("hidden_act", f"Megatron computes {' or '.join(self.acts)} for such a model")
        eps = c.number(self.eps)
        positions = c.whole("max_position_embeddings", least=1) or 2048
        return {
            "num_layers": layers,
            "encoder_num_layers": layers,
            "hidden_size": hidden,
            "ffn_hidden_size": self.width(c),
            "num_attention_heads": heads,
            "group_query_attention": groups != heads,
            "num_query_groups": groups,
            "kv_channels": c.whole("head_dim", least=1) or hidden // heads,
            "max_position_embeddings": positions,
            "seq_length": positions,
            "encoder_seq_length": positions,
            "normalization": self.norm,
            "norm_epsilon": 1e-5 if eps is None else eps,
            "layernorm_epsilon": 1e-5 if eps is None else eps,
            "apply_layernorm_1p": False,
            "layernorm_zero_centered_gamma": False,
            "apply_query_key_layer_scaling": False,
            "qk_layernorm": False,
            "add_bias_linear": False,
            "add_qkv_bias": False,
            **self.mlp,
            "openai_gelu": False,
            "multi_latent_attention": self.latent,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "num_experts": None,
            "mtp_num_layers": None,
            **self.position_args(c),
            **self.own_args(c, layers),
        }

    def width(self, c: Fields) -> int:
        """Rows of the gate of a dense layer."""
        return c.size("intermediate_size")

    def position_args(self, c: Fields) -> dict[str, Any]:
        return rope_args(c, latent=self.latent, default_share=self.share)

    def own_args(self, c: Fields, layers: int) -> dict[str, Any]:
        """The arguments that only this kind has. Raises UnsupportedError for what Megatron does not compute."""
        refuse_window(c)
        return {}


def refuse_others(a: Fields, translated: frozenset[str]) -> None:
    """Raises UnsupportedError for an argument that has an effect that config.json cannot say."""
    for name, fine in NEUTRAL.items():
        value = a.values.get(name)
        if name in translated or value is None:
            continue
        values = value if isinstance(value, (list, tuple)) and value else [value]
        if not all(isinstance(v, (bool, int, float, str)) and v in fine for v in values):
            raise a.no(name, "Hugging Face's code of this model does not compute that")


def check_norm(a: Fields, kind: str) -> None:
    """Raises UnsupportedError for a model with another norm."""
    said = a.text("normalization")
    if said is None:
        raise a.missing("normalization")
    if said != kind:
        raise a.no("normalization", f"a model like this one has {kind}")


def refuse_biases(a: Fields, model: str, *, qkv: bool = True) -> None:
    """Raises UnsupportedError for biases of linear layers."""
    for name in ("add_bias_linear", *(("add_qkv_bias",) if qkv else ())):
        if a.flag(name, default=name == "add_bias_linear"):
            raise a.no(name, f"Hugging Face's code of {model} has no such biases")


def refuse_window(c: Fields) -> None:
    """Raises UnsupportedError for attention to a window of the last positions."""
    if c.flag("use_sliding_window"):
        raise c.no("use_sliding_window", "Megatron's layers with a window are others")


def _needed_flag(a: Fields, name: str) -> bool:
    if name not in a:
        raise a.missing(name)
    return a.flag(name)


NULL_TOKENIZER = "NullTokenizer"
"""Until 2025 it had one token more than ``vocab_size`` says; converters take it. A row too many is one of padding."""


def vocab_of(a: Fields) -> int:
    """True rows of the vocabulary, else the padded ones."""
    true, padded = a.whole("vocab_size", least=1), a.whole("padded_vocab_size", least=1)
    if true and padded and true > padded:
        raise CorruptError(f"{a.shown('vocab_size')}, and {a.shown('padded_vocab_size')}, which is less")
    if not (true or padded):
        raise a.missing("padded_vocab_size")
    if true and a.text("tokenizer_type") == NULL_TOKENIZER:
        return min(true + 1, padded or true + 1)
    return true or padded or 0


# -- windows


def window_of(a: Fields) -> int | None:
    """Positions that a query attends to, itself among them; None for all. Megatron counts those to the left."""
    got = a.numbers("window_size", 2)
    if got is None:
        return None
    if got[0] < 0 or got[1] not in (0, -1):
        raise a.no("window_size", "such a window has no counterpart in Hugging Face's code")
    return got[0] + 1


def window_args(c: Fields, missing: int = 0) -> dict[str, Any]:
    """The same, of config.json; ``missing``: the window that transformers takes where nothing is said."""
    window = c.whole("sliding_window", least=1) if "sliding_window" in c.values else missing
    return {"window_size": (window - 1, 0), "window_attn_skip_freq": None} if window else {}


# -- dense models


class Llama(ModelKind):
    """Llama; Mistral is one with a window."""

    model_type = "llama"
    architecture = "LlamaForCausalLM"

    def own_config(self, a: Fields, layers: int) -> dict[str, Any]:
        biases = a.flag("add_bias_linear", default=True)
        return {"attention_bias": biases, "mlp_bias": biases}

    def own_args(self, c: Fields, layers: int) -> dict[str, Any]:
        attention, mlp = c.flag("attention_bias"), c.flag("mlp_bias")
        if attention != mlp:
            raise c.no(
                "attention_bias" if attention else "mlp_bias", "Megatron has biases in all linear layers or none"
            )
        return {"add_bias_linear": attention}


class Mistral(ModelKind):
    """A Llama with a window; without one Megatron's arguments are a Llama's."""

    model_type = "mistral"
    architecture = "MistralForCausalLM"
    translates = frozenset({"window_size"})

    def own_config(self, a: Fields, layers: int) -> dict[str, Any]:
        return super().own_config(a, layers) | {"sliding_window": window_of(a)}

    def own_args(self, c: Fields, layers: int) -> dict[str, Any]:
        return window_args(c, 4096)


class Phi3(ModelKind):
    """Its tensors are joined in another way; Megatron's arguments are a Llama's, unless only a part of a head turns."""

    model_type = "phi3"
    architecture = "Phi3ForCausalLM"
    defaults: ClassVar = {"rms_norm_eps": 1e-5}
    translates = frozenset({"window_size"})
    partial = True

    def own_config(self, a: Fields, layers: int) -> dict[str, Any]:
        # Transformers' own padding token is one that a vocabulary may not have.
        return super().own_config(a, layers) | {"sliding_window": window_of(a), "pad_token_id": None}

    def own_args(self, c: Fields, layers: int) -> dict[str, Any]:
        return window_args(c)


class Qwen2(ModelKind):
    """Biases of queries, keys and values only."""

    model_type = "qwen2"
    architecture = "Qwen2ForCausalLM"

    def own_config(self, a: Fields, layers: int) -> dict[str, Any]:
        refuse_biases(a, self.model_type, qkv=False)
        return {"use_sliding_window": False}

    def own_args(self, c: Fields, layers: int) -> dict[str, Any]:
        refuse_window(c)
        return {"add_qkv_bias": True}


class Qwen3(ModelKind):
    """Norms of each query and key."""

    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
    defaults: ClassVar = {"head_dim": 128}

    def own_config(self, a: Fields, layers: int) -> dict[str, Any]:
        refuse_biases(a, self.model_type)
        return {"attention_bias": False, "use_sliding_window": False}

    def own_args(self, c: Fields, layers: int) -> dict[str, Any]:
        refuse_window(c)
        if c.flag("attention_bias"):
            raise c.no("attention_bias", "Megatron has biases in all linear layers or none")
        return {"qk_layernorm": True}


class Ernie(ModelKind):
    """A Llama in which neighbours turn."""

    model_type = "ernie4_5"
    architecture = "Ernie4_5ForCausalLM"
    tied = True
    translates = frozenset({"rotary_interleaved"})
    defaults: ClassVar = {"rms_norm_eps": 1e-5, "head_dim": 128}

    def own_config(self, a: Fields, layers: int) -> dict[str, Any]:
        if not a.flag("rotary_interleaved"):
            raise a.no("rotary_interleaved", "in Hugging Face's code of ernie4_5 neighbours turn")
        return {"use_bias": a.flag("add_bias_linear", default=True)}

    def own_args(self, c: Fields, layers: int) -> dict[str, Any]:
        return {"rotary_interleaved": True, "add_bias_linear": c.flag("use_bias")}


class Nemotron(ModelKind):
    """Nemotron-3 and -4, Minitron: norms that count from 1, squared ReLU."""

    model_type = "nemotron"
    architecture = "NemotronForCausalLM"
    translates = frozenset({"apply_layernorm_1p", "layernorm_zero_centered_gamma", "squared_relu"})
    partial = True
    share = 0.5
    norm = "LayerNorm"
    eps = "norm_eps"
    act = "relu2"
    acts = ("relu2",)
    mlp: ClassVar = {"swiglu": False, "squared_relu": True, "quick_geglu": False}

    def own_config(self, a: Fields, layers: int) -> dict[str, Any]:
        if not (a.flag("apply_layernorm_1p") or a.flag("layernorm_zero_centered_gamma")):
            raise a.no("apply_layernorm_1p", "the norms of Hugging Face's code of nemotron count from 1")
        biases = a.flag("add_bias_linear", default=True)
        return {"attention_bias": biases, "mlp_bias": biases}

    def own_args(self, c: Fields, layers: int) -> dict[str, Any]:
        return {**Llama().own_args(c, layers), "apply_layernorm_1p": True, "layernorm_zero_centered_gamma": True}


_GELUS = {"gelu": False, "gelu_new": True, "gelu_fast": True, "gelu_pytorch_tanh": True}
"""Names of activations, and whether it is the approximation by tanh, which Megatron's fused kernel has."""


def _gelu(a: Fields) -> bool:
    """Whether it is the approximation."""
    fused = a.flag("bias_gelu_fusion", default=True)
    if a.flag("openai_gelu") and not fused:
        raise a.no("openai_gelu", "which GELU Megatron computes depends on its version")
    return fused


class Gpt(ModelKind):
    """Megatron's own GPT is Hugging Face's GPT-2."""

    model_type = "gpt2"
    architecture = "GPT2LMHeadModel"
    tied = True
    norm = "LayerNorm"
    eps = "layer_norm_epsilon"
    act = "gelu_new"
    acts = tuple(_GELUS)
    mlp: ClassVar = {"swiglu": False, "squared_relu": False, "quick_geglu": False}

    def config(self, a: Fields) -> dict[str, Any]:
        plain = super().config(a)
        heads, width = plain["num_attention_heads"], plain["hidden_size"]
        if plain["num_key_value_heads"] != heads:
            raise a.no("num_query_groups", "the heads of gpt2 do not share their keys")
        if plain["head_dim"] * heads != width:
            raise a.no("kv_channels", "the heads of gpt2 are together as wide as its hidden size")
        return {
            "architectures": plain["architectures"],
            "model_type": self.model_type,
            "n_embd": width,
            "n_layer": plain["num_hidden_layers"],
            "n_head": heads,
            "n_inner": plain["intermediate_size"],
            "n_positions": plain["max_position_embeddings"],
            "activation_function": "gelu_new" if _gelu(a) else "gelu",
            **{k: plain[k] for k in (self.eps, "vocab_size", "tie_word_embeddings")},
        }

    def positions(self, a: Fields) -> dict[str, Any]:
        if is_rotary(a) or not a.flag("add_position_embedding", default=True):
            raise a.no("position_embedding_type", "the positions of gpt2 are learned")
        return {}

    def own_config(self, a: Fields, layers: int) -> dict[str, Any]:
        if not a.flag("add_bias_linear", default=True):
            raise a.no("add_bias_linear", "all linear layers of gpt2 have biases")
        return {}

    def args(self, c: Fields) -> dict[str, Any]:
        names = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
        names |= {"n_positions": "max_position_embeddings", "activation_function": "hidden_act"}
        inner = c.whole("n_inner", least=1)
        plain = {"intermediate_size": inner or 4 * (c.whole("n_embd") or c.size("hidden_size"))}
        plain |= {new: c.values[old] for old, new in names.items() if old in c}
        full = Fields({"hidden_act": "gelu_new", "max_position_embeddings": 1024, **c.values, **plain}, c.called)
        if full.flag("scale_attn_by_inverse_layer_idx") or not full.flag("scale_attn_weights", default=True):
            raise UnsupportedError("Megatron does not scale attention by layers (`scale_attn_by_inverse_layer_idx`)")
        return super().args(full)

    def position_args(self, c: Fields) -> dict[str, Any]:
        return {
            "position_embedding_type": "learned_absolute",
            "use_rotary_position_embeddings": False,
            "add_position_embedding": True,
        }

    def own_args(self, c: Fields, layers: int) -> dict[str, Any]:
        return {"add_bias_linear": True, "bias_gelu_fusion": _GELUS[c.text("hidden_act") or "gelu_new"]}


class GptNeoX(ModelKind):
    """A GPT with rotary positions. Pythia computes attention and MLP side by side, which Megatron does not."""

    model_type = "gpt_neox"
    architecture = "GPTNeoXForCausalLM"
    partial = True
    share = 0.25
    norm = "LayerNorm"
    eps = "layer_norm_eps"
    act = "gelu_new"
    acts = tuple(_GELUS)
    mlp: ClassVar = Gpt.mlp

    def own_config(self, a: Fields, layers: int) -> dict[str, Any]:
        if not a.flag("add_bias_linear", default=True):
            raise a.no("add_bias_linear", "all linear layers of gpt_neox have biases")
        if a.flag("group_query_attention") and a.size("num_query_groups") != a.size("num_attention_heads"):
            raise a.no("num_query_groups", "the heads of gpt_neox do not share their keys")
        if (a.whole("kv_channels") or 0) * a.size("num_attention_heads") not in (0, a.size("hidden_size")):
            raise a.no("kv_channels", "the heads of gpt_neox are together as wide as its hidden size")
        rope = self.positions(a)
        return {
            "use_parallel_residual": False,
            "hidden_act": "gelu_new" if _gelu(a) else "gelu",
            "rotary_pct": rope["partial_rotary_factor"],
        }

    def own_args(self, c: Fields, layers: int) -> dict[str, Any]:
        if c.flag("use_parallel_residual", default=True):
            raise c.no("use_parallel_residual", "Megatron computes attention and MLP one after the other")
        if not c.flag("attention_bias", default=True):
            raise c.no("attention_bias", "Megatron has biases in all linear layers or none")
        return {"add_bias_linear": True, "bias_gelu_fusion": _GELUS[c.text("hidden_act") or "gelu"]}


# -- experts


def sparse_layers(a: Fields, layers: int) -> list[int]:
    """1 for each layer with experts, else 0: of ``moe_layer_freq``, which is a number, a list, or text of a list."""
    value: Any = a.values.get("moe_layer_freq")
    if isinstance(value, str):
        value = _sum_of_lists(a, value)
    if value is None:
        value = 1
    if type(value) is int and value > 0:
        return [int(i % value == 0) for i in range(layers)]
    fine = isinstance(value, (list, tuple)) and len(value) == layers and all(v in (0, 1) for v in value)
    if not fine:
        raise a.wrong("moe_layer_freq", f"a number, or 0 or 1 for each of {layers} layers")
    return [int(v) for v in value]


def _sum_of_lists(a: Fields, text: str) -> Any:
    """``([0]*3+[1]*58)``, as Megatron's command line takes it: numbers, lists, + and *."""

    def value(node: ast.AST) -> Any:
        if isinstance(node, ast.Constant) and type(node.value) is int and 0 <= node.value <= most:
            return node.value
        if isinstance(node, ast.List) and len(node.elts) <= most:
            return [value(e) for e in node.elts]
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
            left, right = value(node.left), value(node.right)
            out: list[Any] | None = None
            if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
                out = left + right
            elif isinstance(node.op, ast.Mult) and isinstance(left, list) and type(right) is int:
                out = left * right if len(left) * right <= most else None
            elif isinstance(node.op, ast.Mult) and type(left) is int and isinstance(right, list):
                out = right * left if len(right) * left <= most else None
            if out is not None and len(out) <= most:
                return out
        raise a.wrong("moe_layer_freq", "a number or a list of 0 and 1")

    most = 100_000
    try:
        tree = ast.parse(text.strip(), mode="eval") if len(text) <= most else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        tree = None
    if tree is None:
        raise a.wrong("moe_layer_freq", "a number or a list of 0 and 1")
    try:
        return value(tree.body)
    except RecursionError:
        raise a.wrong("moe_layer_freq", "a number or a list of 0 and 1") from None


def _frequency(sparse: Sequence[bool]) -> int | list[int]:
    """``moe_layer_freq`` of layers."""
    return 1 if all(sparse) else [int(s) for s in sparse]


def expert_width(a: Fields) -> int:
    """Rows of the gate of an expert."""
    return a.whole("moe_ffn_hidden_size", least=1) or a.size("ffn_hidden_size")


def topk(a: Fields) -> int:
    """Experts for each token."""
    return a.whole("moe_router_topk", least=1) or 2


def check_router(a: Fields, *, function: str, before: bool | None) -> None:
    """Raises UnsupportedError for another router than one with this function and, where ``before`` is given, one that
    takes it of all experts (and not of the chosen ones)."""
    said = a.text("moe_router_score_function") or "softmax"
    if said != function:
        raise a.no("moe_router_score_function", f"a model like this one has {function}")
    if before is not None and a.flag("moe_router_pre_softmax") != before:
        raise a.no("moe_router_pre_softmax", "Hugging Face's code of this model weighs its experts otherwise")


def moe_args(experts: int, chosen: int, width: int, frequency: int | list[int], **more: Any) -> dict[str, Any]:
    """The arguments of all models with experts."""
    return {
        "num_experts": experts,
        "moe_router_topk": chosen,
        "moe_ffn_hidden_size": width,
        "moe_layer_freq": frequency,
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": False,
        "moe_router_topk_scaling_factor": None,
        "moe_router_enable_expert_bias": False,
        "moe_router_num_groups": None,
        "moe_router_group_topk": None,
        "moe_shared_expert_intermediate_size": None,
        "moe_shared_expert_gate": False,
        **more,
    }


def check_weights(c: Fields, *, before: bool) -> None:
    """Raises UnsupportedError for one expert for each token, which Megatron weighs by its share of all experts only."""
    if c.whole("num_experts_per_tok") == 1 and not before:
        raise c.no("num_experts_per_tok", "Megatron does not weigh one expert for each token so")


def experts_of(c: Fields, *names: str) -> int:
    """The number of experts under one of these names."""
    return next((n for name in names if (n := c.whole(name, least=1))), None) or c.size(names[0])


class Mixtral(ModelKind):
    """Experts in all layers."""

    model_type = "mixtral"
    architecture = "MixtralForCausalLM"
    defaults: ClassVar = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8, "num_experts_per_tok": 2}
    translates = frozenset({"window_size"})

    def own_config(self, a: Fields, layers: int) -> dict[str, Any]:
        refuse_biases(a, self.model_type)
        check_router(a, function="softmax", before=False)
        if not all(sparse_layers(a, layers)):
            raise a.no("moe_layer_freq", "all layers of mixtral have experts")
        return {
            "intermediate_size": expert_width(a),
            "num_local_experts": a.size("num_experts"),
            "num_experts_per_tok": topk(a),
            "sliding_window": window_of(a),
        }

    def own_args(self, c: Fields, layers: int) -> dict[str, Any]:
        check_weights(c, before=False)
        width, chosen = c.size("intermediate_size"), c.whole("num_experts_per_tok", least=1) or 2
        return moe_args(experts_of(c, "num_local_experts"), chosen, width, 1) | window_args(c)


class Qwen3Moe(Qwen3):
    """Qwen3 with experts."""

    model_type = "qwen3_moe"
    architecture = "Qwen3MoeForCausalLM"
    defaults: ClassVar = {"num_experts_per_tok": 8, "num_key_value_heads": 4}

    def own_config(self, a: Fields, layers: int) -> dict[str, Any]:
        check_router(a, function="softmax", before=None)
        dense = [i for i, has in enumerate(sparse_layers(a, layers)) if not has]
        return {
            **super().own_config(a, layers),
            "num_experts": a.size("num_experts"),
            "num_experts_per_tok": topk(a),
            "moe_intermediate_size": expert_width(a),
            "norm_topk_prob": not a.flag("moe_router_pre_softmax"),
            "decoder_sparse_step": 1,
            "mlp_only_layers": dense,
        }

    def own_args(self, c: Fields, layers: int) -> dict[str, Any]:
        step, width = c.whole("decoder_sparse_step", least=1) or 1, c.size("moe_intermediate_size")
        dense = c.values.get("mlp_only_layers") or []
        if not isinstance(dense, list):
            raise c.wrong("mlp_only_layers", "a list of layers")
        sparse = [i not in dense and (i + 1) % step == 0 for i in range(layers)]
        chosen, experts = c.size("num_experts_per_tok"), experts_of(c, "num_experts", "num_local_experts")
        before = not c.flag("norm_topk_prob")
        check_weights(c, before=before)
        router = moe_args(experts, chosen, width, _frequency(sparse), moe_router_pre_softmax=before)
        return self.attention_args(c, layers) | router

    def attention_args(self, c: Fields, layers: int) -> dict[str, Any]:
        return super().own_args(c, layers)


class Qwen2Moe(Qwen3Moe):
    """One shared expert, with a gate."""

    model_type = "qwen2_moe"
    architecture = "Qwen2MoeForCausalLM"
    defaults: ClassVar = {"num_experts_per_tok": 4, "num_key_value_heads": 16}
    translates = frozenset({"moe_shared_expert_gate", "moe_shared_expert_intermediate_size"})

    def own_config(self, a: Fields, layers: int) -> dict[str, Any]:
        plain = Fields({**a.values, "add_qkv_bias": False}, a.called)
        return {
            **super().own_config(plain, layers),
            "qkv_bias": a.flag("add_qkv_bias"),
            "shared_expert_intermediate_size": a.size("moe_shared_expert_intermediate_size"),
        }

    def own_args(self, c: Fields, layers: int) -> dict[str, Any]:
        shared = c.size("shared_expert_intermediate_size")
        more = {"moe_shared_expert_intermediate_size": shared, "moe_shared_expert_gate": True}
        return super().own_args(c, layers) | more

    def attention_args(self, c: Fields, layers: int) -> dict[str, Any]:
        refuse_window(c)
        return {"add_qkv_bias": c.flag("qkv_bias", default=True)}


_ROUTED = frozenset({
    "moe_router_group_topk",
    "moe_router_num_groups",
    "moe_router_topk_scaling_factor",
    "moe_shared_expert_intermediate_size",
    "mtp_num_layers",
})  # fmt: skip


def routed_config(a: Fields, layers: int, per_group: int) -> dict[str, Any]:
    """The config fields of DeepSeek and GLM: first layers without experts, groups of experts, shared ones.

    ``per_group``: how many experts of a group Hugging Face's code ranks it by.
    """
    sparse = sparse_layers(a, layers)
    first = sparse.index(1) if 1 in sparse else layers
    if not all(sparse[first:]):
        raise a.no("moe_layer_freq", "layers without experts come first in such a model")
    width, shared, chosen = expert_width(a), a.whole("moe_shared_expert_intermediate_size") or 0, topk(a)
    if shared % width:
        raise a.no("moe_shared_expert_intermediate_size", f"it is not a multiple of an expert's width ({width})")
    groups, allowed = a.whole("moe_router_num_groups", least=1), a.whole("moe_router_group_topk", least=1)
    if allowed is None or groups is None:
        groups = allowed = 1
    elif chosen // allowed != per_group:
        raise a.no("moe_router_group_topk", f"Hugging Face's code ranks a group by its best {per_group} experts")
    scale = a.number("moe_router_topk_scaling_factor")
    return {
        "n_routed_experts": a.size("num_experts"),
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": width,
        "n_shared_experts": shared // width,
        "first_k_dense_replace": first,
        "n_group": groups,
        "topk_group": allowed,
        "routed_scaling_factor": scale or 1.0,
        "num_nextn_predict_layers": a.whole("mtp_num_layers") or 0,
    }


def routed_args(c: Fields, layers: int, *, first: int, shared: int, per_group: int) -> dict[str, Any]:
    """The way back; ``first`` and ``shared`` are what is meant where config.json does not say it."""
    width, chosen, experts = c.size("moe_intermediate_size"), c.size("num_experts_per_tok"), c.size("n_routed_experts")
    if (c.whole("moe_layer_freq") or 1) != 1:
        raise c.no("moe_layer_freq", "Hugging Face's code does not read it")
    kinds = c.values.get("mlp_layer_types")
    dense = c.whole("first_k_dense_replace")
    sparse = [i >= (first if dense is None else dense) for i in range(layers)]
    if isinstance(kinds, list) and kinds:
        sparse = [k == "sparse" for k in kinds[:layers]]
    groups, allowed = c.whole("n_group") or 1, c.whole("topk_group") or 1
    limited = allowed < groups
    if limited and chosen // allowed != per_group:
        raise c.no("topk_group", f"Megatron ranks a group by its best {chosen // allowed} experts")
    many = c.whole("n_shared_experts")
    width_shared = width * (shared if many is None and "n_shared_experts" not in c.values else many or 0)
    scale = c.number("routed_scaling_factor")
    mtp = c.whole("num_nextn_predict_layers")
    return moe_args(
        experts, chosen, width, _frequency(sparse),
        moe_router_dtype="fp32",  # as in Hugging Face's code
        moe_router_num_groups=groups if limited else None,
        moe_router_group_topk=allowed if limited else None,
        moe_router_topk_scaling_factor=scale if scale not in (None, 1.0) else None,
        moe_shared_expert_intermediate_size=width_shared or None,
        mtp_num_layers=(mtp if mtp is not None else c.whole("num_mtp_layers")) or None,
    )  # fmt: skip


def sigmoid_args(c: Fields) -> dict[str, Any]:
    """The router of DeepSeek-V3 and GLM-4.5."""
    if not c.flag("norm_topk_prob", default=True) or (c.whole("num_experts_per_tok") or 2) < 2:
        raise c.no("norm_topk_prob", "Megatron's sigmoid router weighs the chosen experts by their share")
    return {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}


def check_sigmoid(a: Fields) -> None:
    """Raises UnsupportedError for another router than theirs."""
    check_router(a, function="sigmoid", before=None)
    if not a.flag("moe_router_enable_expert_bias"):
        raise a.no("moe_router_enable_expert_bias", "a model like this one has a bias for each expert")
    if topk(a) < 2:
        raise a.no("moe_router_topk", "Hugging Face's code weighs one expert otherwise")


class Latent(ModelKind):
    """DeepSeek's multi-latent attention."""

    latent = True
    translates = _ROUTED | {"multi_latent_attention"}

    def own_config(self, a: Fields, layers: int) -> dict[str, Any]:
        refuse_biases(a, self.model_type)
        if not a.flag("qk_layernorm"):
            raise a.no("qk_layernorm", "the latents of such a model are normalised")
        nope, rope = a.size("qk_head_dim"), a.size("qk_pos_emb_head_dim")
        return {
            "attention_bias": False,
            "num_key_value_heads": a.size("num_attention_heads"),
            "head_dim": rope,
            "q_lora_rank": a.whole("q_lora_rank", least=1),
            "kv_lora_rank": a.size("kv_lora_rank"),
            "qk_nope_head_dim": nope,
            "qk_rope_head_dim": rope,
            "v_head_dim": a.size("v_head_dim"),
        }

    def own_args(self, c: Fields, layers: int) -> dict[str, Any]:
        for name in ("attention_bias", "mlp_bias"):
            if c.flag(name):
                raise c.no(name, "Megatron's multi-latent attention has no biases")
        if not c.flag("rope_interleave", default=True):
            raise c.no("rope_interleave", "Megatron turns neighbours in each head")
        rank = c.whole("q_lora_rank") if "q_lora_rank" in c.values else 1536
        return {
            "qk_layernorm": True,
            "group_query_attention": False,
            "q_lora_rank": rank or None,
            "kv_lora_rank": c.size("kv_lora_rank"),
            "qk_head_dim": c.size("qk_nope_head_dim"),
            "qk_pos_emb_head_dim": c.size("qk_rope_head_dim"),
            "v_head_dim": c.size("v_head_dim"),
            "kv_channels": c.size("v_head_dim"),
        }


class DeepseekV2(Latent):
    """A softmax router."""

    model_type = "deepseek_v2"
    architecture = "DeepseekV2ForCausalLM"
    translates = Latent.translates - {"mtp_num_layers"}

    def own_config(self, a: Fields, layers: int) -> dict[str, Any]:
        check_router(a, function="softmax", before=True)
        if a.flag("moe_router_enable_expert_bias"):
            raise a.no("moe_router_enable_expert_bias", "the router of deepseek_v2 has no bias")
        routed = routed_config(a, layers, 1)
        routed.pop("num_nextn_predict_layers")
        method = "group_limited_greedy" if routed["n_group"] > 1 else "greedy"
        return super().own_config(a, layers) | routed | {"topk_method": method, "norm_topk_prob": False}

    def own_args(self, c: Fields, layers: int) -> dict[str, Any]:
        if c.flag("norm_topk_prob"):
            raise c.no("norm_topk_prob", "the router of deepseek_v2 does not do so in Megatron")
        free = (c.text("topk_method") or "greedy") == "greedy"
        plain = Fields({**c.values, "n_group": 1, "topk_group": 1}, c.called) if free else c
        routed = routed_args(plain, layers, first=0, shared=2, per_group=1)
        return super().own_args(c, layers) | routed | {"moe_router_pre_softmax": True}


class DeepseekV3(Latent):
    """A sigmoid router, groups of experts."""

    model_type = "deepseek_v3"
    architecture = "DeepseekV3ForCausalLM"
    defaults: ClassVar = {"num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5}

    def own_config(self, a: Fields, layers: int) -> dict[str, Any]:
        check_sigmoid(a)
        more = {"norm_topk_prob": True, "rope_interleave": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
        return super().own_config(a, layers) | routed_config(a, layers, 2) | more

    def own_args(self, c: Fields, layers: int) -> dict[str, Any]:
        routed = routed_args(c, layers, first=3, shared=1, per_group=2)
        return super().own_args(c, layers) | routed | sigmoid_args(c)


class Glm4Moe(ModelKind):
    """The router of DeepSeek-V3; a half of each head turns."""

    model_type = "glm4_moe"
    architecture = "Glm4MoeForCausalLM"
    defaults: ClassVar = {"rms_norm_eps": 1e-5, "num_experts_per_tok": 8, "num_key_value_heads": 8}
    translates = _ROUTED
    partial = True
    share = 0.5

    def own_config(self, a: Fields, layers: int) -> dict[str, Any]:
        refuse_biases(a, self.model_type, qkv=False)
        check_sigmoid(a)
        own = {"attention_bias": a.flag("add_qkv_bias"), "use_qk_norm": a.flag("qk_layernorm"), "norm_topk_prob": True}
        return own | routed_config(a, layers, 2)

    def own_args(self, c: Fields, layers: int) -> dict[str, Any]:
        own = {"add_qkv_bias": c.flag("attention_bias"), "qk_layernorm": c.flag("use_qk_norm")}
        return own | routed_args(c, layers, first=1, shared=1, per_group=2) | sigmoid_args(c)


class GptOss(ModelKind):
    """Gated by a sigmoid of 1.702 x, clamped at 7; sinks; every second layer has a window."""

    model_type = "gpt_oss"
    architecture = "GptOssForCausalLM"
    defaults: ClassVar = {
        "rms_norm_eps": 1e-5, "rope_theta": 150_000.0, "num_experts_per_tok": 4, "num_key_value_heads": 8,
        "head_dim": 64,
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                         "original_max_position_embeddings": 4096},
    }  # fmt: skip
    translates = frozenset({
        "activation_func_clamp_value", "glu_linear_offset", "quick_geglu", "softmax_type", "window_attn_skip_freq",
        "window_size",
    })  # fmt: skip
    mlp: ClassVar = {"swiglu": False, "squared_relu": False, "quick_geglu": True}
    own: ClassVar[dict[str, Any]] = {
        "softmax_type": "learnable",
        "quick_geglu": True,
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": 7.0,
        "add_bias_linear": True,
    }
    """The arguments that it cannot be without."""

    def positions(self, a: Fields) -> dict[str, Any]:
        # Without a word on scaling transformers takes that of the published models.
        return {"rope_scaling": {"rope_type": "default"}, **super().positions(a)}

    def own_config(self, a: Fields, layers: int) -> dict[str, Any]:
        for name, value in self.own.items():
            if a.values.get(name) != value:
                raise a.no(name, f"gpt_oss has {shown(value)}")
        check_router(a, function="softmax", before=False)
        if a.flag("qk_layernorm"):
            raise a.no("qk_layernorm", "queries and keys of gpt_oss have no norms")
        if not all(sparse_layers(a, layers)):
            raise a.no("moe_layer_freq", "all layers of gpt_oss have experts")
        window = window_of(a)
        every = a.values.get("window_attn_skip_freq")
        if type(every) is int and every > 0:
            near = [(i + 1) % every != 0 for i in range(layers)]
        else:
            near = [bool(n) for n in a.numbers("window_attn_skip_freq", layers) or [1] * layers]
        kinds = ["sliding_attention" if n and window else "full_attention" for n in near]
        return {
            "attention_bias": True,
            "intermediate_size": expert_width(a),
            "num_local_experts": a.size("num_experts"),
            "num_experts_per_tok": topk(a),
            "swiglu_limit": 7.0,
            "sliding_window": window,
            "layer_types": kinds,
        }

    def own_args(self, c: Fields, layers: int) -> dict[str, Any]:
        if not c.flag("attention_bias", default=True):
            raise c.no("attention_bias", "Megatron has biases in all linear layers or none")
        for name, value in (("swiglu_limit", 7.0), ("swiglu_alpha", 1.702)):
            if c.number(name) not in (None, value):
                raise c.no(name, f"Megatron's gpt-oss has {value}")
        check_weights(c, before=False)
        width, chosen = c.size("intermediate_size"), c.whole("num_experts_per_tok", least=1) or 4
        kinds = c.values.get("layer_types") or [
            "full_attention" if i % 2 else "sliding_attention" for i in range(layers)
        ]
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise c.wrong("layer_types", f"a list of {layers} kinds")
        near = [int(k == "sliding_attention") for k in kinds]
        every: Any = 2 if near == [1 - i % 2 for i in range(layers)] else near
        own = {**self.own, **moe_args(experts_of(c, "num_local_experts", "num_experts"), chosen, width, 1)}
        window = window_args(c, 128) if any(near) else {}
        return own | window | ({"window_attn_skip_freq": every} if window else {})


KINDS: tuple[ModelKind, ...] = (
    Llama(), Mistral(), Phi3(), Qwen2(), Qwen3(), Ernie(), Nemotron(), Gpt(), GptNeoX(), Mixtral(), Qwen3Moe(),
    Qwen2Moe(),
    DeepseekV2(), DeepseekV3(), Glm4Moe(), GptOss(),
)  # fmt: skip
_BY_TYPE = {k.model_type: k for k in KINDS}


def kind_named(model_type: str) -> ModelKind | None:
    """The kind of a ``model_type`` of config.json."""
    return _BY_TYPE.get(model_type)


def kind_of(a: Fields) -> ModelKind:
    """The kind that a model with these arguments is. Raises UnsupportedError where it is none that is known."""
    return _BY_TYPE[_sparse_type(a) if a.whole("num_experts") else _dense_type(a)]


def _sparse_type(a: Fields) -> str:
    sigmoid = a.text("moe_router_score_function") == "sigmoid"
    if a.flag("multi_latent_attention"):
        return "deepseek_v3" if sigmoid else "deepseek_v2"
    if a.flag("quick_geglu") or a.values.get("softmax_type") == "learnable":
        return "gpt_oss"
    if not a.flag("swiglu"):
        raise a.no("swiglu", "experts without a gate have no counterpart in Hugging Face's code")
    if sigmoid:
        return "glm4_moe"
    if a.flag("moe_shared_expert_gate"):
        return "qwen2_moe"
    return "qwen3_moe" if a.flag("qk_layernorm") else "mixtral"


def _dense_type(a: Fields) -> str:
    if a.flag("multi_latent_attention"):
        raise a.no("multi_latent_attention", "a model without experts that has it is not known")
    if a.flag("swiglu"):
        if a.flag("qk_layernorm"):
            return "qwen3"
        if a.flag("add_qkv_bias") and not a.flag("add_bias_linear", default=True):
            return "qwen2"
        if a.flag("rotary_interleaved"):
            return "ernie4_5"
        if a.number("rotary_percent") not in (None, 1.0):
            return "phi3"
        return "mistral" if "window_size" in a else "llama"
    if "swiglu" not in a:
        raise a.missing("swiglu")
    if a.flag("qk_layernorm"):
        raise a.no("qk_layernorm", "such a model with GELU is not known")
    if a.flag("squared_relu"):
        return "nemotron"
    return "gpt_neox" if is_rotary(a) else "gpt2"
