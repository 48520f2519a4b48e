"""Bytes of keys and values for a number of tokens.

Grouped-query attention keeps two vectors for each key/value head of a rank; a rank has at least one head. Latent
attention (DeepSeek) keeps one latent and one rotary key for all heads, whole on every rank. A layer with a sliding
window needs no more than its window; engines may reserve the whole length for it all the same, which is given besides.

Sources: vLLM's mla_attention.py (656 bytes a token and layer of ``fp8_ds_mla``: 512 codes, 4 F32 scales, 64 BF16),
configuration classes of transformers (which layers slide), hf-mem #60 (what engines reserve).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpttool.errors import ConflictError, UnsupportedError, UsageError
from ckpttool.layout.family import Family
from ckpttool.mesh import Mesh
from ckpttool.ops.fp8_size.model import Model

KINDS = ("bf16", "fp8", "fp8_ds_mla")
"""What --kv may say."""
DS_MLA = 656
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"

_OF_CACHE = (
    "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "kv_lora_rank", "qk_rope_head_dim",
    "sliding_window", "skip",
)  # fmt: skip
"""Fields on which the size of a layer's cache depends."""
_WIDTHS = ("v_head_dim", "global_head_dim", "swa_head_dim", "swa_v_head_dim")
"""Widths that some heads have in place of ``head_dim``."""
_SHARING = ("num_kv_shared_layers", "cross_attention_layers", "attention_other_setting")
"""Layers that have no keys and values of their own, or other ones."""
_STATEFUL = ("mamba", "ssm", "linear_", "recurrent", "lru_", "short_conv", "conv_L_cache", "rwkv", "hybrid_override")
"""Starts of config fields of models with layers that keep a state of constant size."""


@dataclass(frozen=True, slots=True)
class Cache:
    """Keys and values on one rank of each pipeline stage."""

    dtype: str
    """One of ``KINDS``."""
    latent: bool
    per_layer: int
    """Bytes of a token in one layer."""
    tokens: int
    """Of a sequence; 0 when not said."""
    batch: int
    length: int
    """For which an engine reserves memory; 0 when not said."""
    window: int
    """0 when no layer slides."""
    stages: tuple[tuple[int, int], ...]
    """Per pipeline stage: layers that keep all, layers that keep the window."""
    unknown: Mapping[str, int]
    """Layers that are not modelled, by what the config calls them."""

    @property
    def layers(self) -> int:
        return sum(a + b for a, b in self.stages)

    @property
    def per_token(self) -> int:
        """Bytes of a token in all layers of the model, as long as no window is full."""
        return self.layers * self.per_layer

    def used(self, stage: int) -> int:
        """Bytes on a rank of this stage for the tokens asked for."""
        full, sliding = self.stages[stage]
        held = full * self.tokens + sliding * (min(self.tokens, self.window) if self.window else self.tokens)
        return held * self.per_layer * self.batch

    def reserved(self, stage: int) -> int:
        """Bytes on a rank of this stage when every layer gets the whole length."""
        return sum(self.stages[stage]) * (self.length or self.tokens) * self.per_layer * self.batch

    def needed(self, stage: int) -> int:
        """What must fit: what is reserved where a length is said, else what the tokens use."""
        return self.reserved(stage) if self.length else self.used(stage)


def cache_of(model: Model, dtype: str, mesh: Mesh, *, tokens: int, batch: int, length: int) -> Cache:
    """The cache of a model; 0 tokens or length is "not said".

    Raises UsageError for a dtype that the model cannot have, UnsupportedError when the config does not say what its
    layers keep, ConflictError for a field that has a value which it cannot have.
    """
    if dtype not in KINDS:
        raise UsageError(f"--kv `{dtype}` is not known", hint="one of " + ", ".join(KINDS))
    if length and length < tokens:
        raise UsageError(f"--max-model-len {length} is less than --tokens {tokens}")
    config = _Fields(model)
    if uneven := _uneven(config, model.family):
        raise UnsupportedError(f"{uneven}: such a cache is not modelled", where=str(model.path), hint="drop --kv")
    size = 2 if dtype == "bf16" else 1
    latent = config.number("kv_lora_rank", least=0)
    if latent:
        per_layer = DS_MLA if dtype == "fp8_ds_mla" else (latent + config.need("qk_rope_head_dim")) * size
        if dtype == "fp8_ds_mla" and (latent, config.number("qk_rope_head_dim")) != (512, 64):
            raise UsageError("--kv fp8_ds_mla is for latents of 512 with rotary keys of 64", where=str(model.path))
    elif dtype == "fp8_ds_mla":
        raise UsageError("--kv fp8_ds_mla: the model has no latent attention (MLA)", hint="--kv fp8")
    else:
        heads = config.number("num_attention_heads") or config.number("n_head") or model.family.size("heads")
        heads = heads or config.need("num_attention_heads")
        groups = model.family.size("kv_heads") or config.number("num_key_value_heads") or heads
        head_dim = config.number("head_dim")
        if not head_dim:
            head_dim = (config.number("hidden_size") or config.need("n_embd")) // heads
        per_layer = 2 * max(1, -(-groups // mesh.tp)) * head_dim * size
    layers = model.family.size("layers") or config.need("num_hidden_layers")
    kinds = _layer_kinds(config, layers)
    window = config.number("sliding_window", least=0)
    if not window and config.model_type == "gpt_oss" and not config.has("sliding_window"):
        window = 128
    if SLIDING in kinds and not window and config.has("sliding_window"):
        # null: layers that slide have no window.
        kinds = [FULL if k == SLIDING else k for k in kinds]
    kinds = [SLIDING if k == CHUNKED else k for k in kinds]
    if SLIDING in kinds and not window:
        raise UnsupportedError(
            "the config has layers with sliding windows and no `sliding_window`", where=str(model.path)
        )
    counts = tuple(
        (sum(kinds[n] == FULL for n in numbers), sum(kinds[n] == SLIDING for n in numbers))
        for numbers in mesh.stage_layers(layers)
    )
    unknown = Counter(kind for kind in kinds if kind not in (FULL, SLIDING))
    return Cache(
        dtype, bool(latent), per_layer, tokens, batch, length, window if SLIDING in kinds else 0, counts, unknown
    )


def _uneven(config: _Fields, family: Family) -> str:
    """Why keys and values are not those of heads that are alike in all layers; "" where they are."""
    if exception := next((n for n in config.exceptions() if n in _OF_CACHE), ""):
        return f"`{exception}` differs from layer to layer (`per_layer_config`)"
    if family.varies("heads") or family.varies("kv_heads"):
        return "the number of heads differs from layer to layer"
    width = config.get("head_dim")
    for name in _WIDTHS:
        other = config.get(name)
        if other is not None and other != width and not (name == "v_head_dim" and config.get("kv_lora_rank")):
            return f"`{name}` is {other}, and `head_dim` {width}"
    return next((f"the model has `{name}`" for name in _SHARING if config.get(name)), "")


class _Fields:
    """Fields of the config, or of its part about text."""

    def __init__(self, model: Model) -> None:
        self._path = model.path
        self.places = model.family.spec.places(model.config)
        self.model_type = str(self.get("model_type") or "")

    def get(self, name: str) -> Any:
        return next((p[name] for p in self.places if p.get(name) is not None), None)

    def has(self, name: str) -> bool:
        """Whether the config has it, be it null."""
        return any(name in p for p in self.places)

    def exceptions(self) -> list[str]:
        """Fields that are something else in some layers."""
        said = [p["per_layer_config"] for p in self.places if isinstance(p.get("per_layer_config"), Mapping)]
        return [n for layers in said for fields in layers.values() if isinstance(fields, Mapping) for n in fields]

    def wrong(self, name: str, what: str) -> ConflictError:
        text = json.dumps(self.get(name), default=repr)
        return ConflictError(
            f"`{name}` of config.json is {text if len(text) <= 60 else text[:57] + '...'}, not {what}",
            where=str(self._path),
            hint="correct it in config.json, as the authors of the model publish it; or drop --kv",
        )

    def number(self, name: str, *, least: int = 1) -> int:
        """0 when the config does not have it. Raises ConflictError for what is no such number."""
        found = self.get(name)
        if found is None:
            return 0
        if type(found) is not int or found < least:
            raise self.wrong(name, f"a whole number from {least} on")
        return found

    def flag(self, name: str) -> bool | None:
        """None when the config does not have it."""
        found = self.get(name)
        if found is not None and not isinstance(found, bool):
            raise self.wrong(name, "true or false")
        return found

    def need(self, name: str) -> int:
        found = self.number(name)
        if not found:
            raise UnsupportedError(
                f"the config does not say `{name}`, so the size of the KV cache is not known",
                where=str(self._path),
                hint="give the whole config.json: --config FILE",
            )
        return found


def _layer_kinds(config: _Fields, layers: int) -> list[str]:
    """What each layer keeps: all, a window, or something that is not modelled."""
    said = config.get("layer_types")
    if said is not None:
        if not isinstance(said, list) or not all(isinstance(k, str) for k in said):
            raise config.wrong("layer_types", "a list of texts, one for each layer")
        if len(said) < layers:
            raise config.wrong("layer_types", f"long enough: it has {len(said)} entries for {layers} layers")
        return [FULL if k == "attention" else k for k in said[:layers]]
    if every := config.number("full_attention_interval"):
        return [FULL if (n + 1) % every == 0 else "linear_attention" for n in range(layers)]
    if (types := config.get("attn_type_list")) is not None:
        # MiniMax: 1 is softmax attention, 0 lightning attention.
        if not isinstance(types, list) or len(types) < layers or not all(t in (0, 1) for t in types):
            raise config.wrong("attn_type_list", "a list of 0 and 1, one for each layer")
        return [FULL if t else "linear_attention" for t in types[:layers]]
    other = [k for p in config.places for k in p if k.startswith(_STATEFUL) and p[k] not in (None, False)]
    if other:
        raise UnsupportedError(
            f"the model has layers that keep a state instead of keys and values (`{other[0]}`), and the config does not"
            " say which: their cache is not modelled",
            hint="drop --kv",
        )
    window = config.number("sliding_window", least=0)
    model_type = config.model_type
    if model_type in ("gpt_oss", "gemma2"):
        return [FULL if n % 2 else SLIDING for n in range(layers)]
    if model_type.startswith("gemma3"):
        every = config.number("sliding_window_pattern") or 6
        return [SLIDING if (n + 1) % every else FULL for n in range(layers)]
    slides = config.flag("use_sliding_window")
    if not window or slides is False:
        return [FULL] * layers
    if model_type.startswith("qwen"):
        # Qwen slides only where it is asked to, and not in its first layers.
        first = config.number("max_window_layers", least=0) if slides else layers
        return [SLIDING if n >= first else FULL for n in range(layers)]
    return [SLIDING] * layers
