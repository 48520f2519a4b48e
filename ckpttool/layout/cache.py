"""The state that a model's layers keep of the tokens they have read: ``cache:`` of a family file, for one config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ckpttool.core.dtypes import DTYPES, nbytes
from ckpttool.core.words import count
from ckpttool.errors import ConflictError, LayoutError, UnsupportedError
from ckpttool.layout.expressions import Refused, Value
from ckpttool.layout.family import Family
from ckpttool.layout.shapes import config_dtype
from ckpttool.layout.sizes import HINT, Default, DefaultSpec, Scope, shown
from ckpttool.layout.spec import CacheSpec

UNKNOWN = "unknown"
"""The value of ``kinds`` where the config does not tell."""
FULL = "full_attention"
_KEEP_ALL = frozenset({FULL, "local_attention", "indexed_attention", "hybrid"})
"""Kinds of layers that keep something of every token. A local layer looks back only so far, and keeps all the same."""
_KEEP_WINDOW = frozenset({"sliding_attention", "chunked_attention", "hybrid_sliding"})
_KEEP_STATE = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})
_KEEP_NOTHING = frozenset({"mlp", "moe"})
_KNOWN = _KEEP_ALL | _KEEP_WINDOW | _KEEP_STATE | _KEEP_NOTHING
_LARGEST = 1 << 48
"""More elements than a layer keeps of a token or a sequence."""
_DEFAULTS: dict[str, Default] = {
    "sliding_window": DefaultSpec(missing=0, none=0),
    "use_sliding_window": DefaultSpec(missing=True, none=True),
    "head_dim": DefaultSpec(missing="hidden_size // heads", none="hidden_size // heads"),
    "v_head_dim": "head_dim",
    "kv_lora_rank": DefaultSpec(missing=0, none=0),
    "indexer_types": DefaultSpec(missing="index_topk_pattern", none="index_topk_pattern"),
    "index_topk_pattern": DefaultSpec(missing=[], none=[]),
    "index_topk_freq": 1,
    "index_skip_topk_offset": 2,
    "kv_heads": "num_key_value_heads",
    "num_key_value_heads": "heads",
}
"""Defaults of fields, where a family has no others."""
_NAMES = {
    "indexes": (
        "indexer_types[layer] in ['full', 'F'] if indexer_types"
        " else layer < index_skip_topk_offset or (layer - index_skip_topk_offset + 1) % index_topk_freq == 0"
    ),
}
"""Words with a meaning by default; ``indexes``: whether a layer with an indexer has keys of its own."""
_TELLING = (
    "global_head_dim", "num_global_key_value_heads", "num_kv_shared_layers", "kv_source_layers", "use_cla",
    "cross_attention_layers", "attention_other_setting", "swa_head_dim", "swa_v_head_dim", "swa_num_key_value_heads",
    "swa_kv_lora_rank", "swa_qk_rope_head_dim", "index_head_dim", "full_attention_interval", "attn_type_list",
    "attn_layer_period", "attn_layer_indices", "full_attn_idxs", "layers_block_type", "hybrid_override_pattern",
    "block_types", "attention_chunk_size",
)  # fmt: skip
"""Fields of models whose layers differ, or keep something else; a family that does not read them is not theirs."""
_OF_STATES = ("mamba", "ssm", "linear_", "recurrent", "lru_", "short_conv", "conv_L_cache", "rwkv", "hybrid_override")
"""Starts of fields of models with layers that keep a state."""
_WORDS = {
    "attention": "full_attention",
    "mamba": "linear_attention",
    "deepseek_sparse_attention": "indexed_attention",
    "qwen_sparse_attention": "indexed_attention",
}
"""Older words of transformers' for the same kinds."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The state that one layer keeps on one rank."""

    kind: str
    tokens: Mapping[str, int]
    """Elements for each token, by what they are; {} of a layer that keeps none."""
    attentions: int
    """How many keep so much."""
    window: int
    """For how many tokens; 0 is all."""
    state: int
    """Bytes for each sequence."""


class CacheScope(Scope):
    """The meaning of the section's words; errors name the line."""

    def __init__(self, family: Family, spec: CacheSpec, config: Mapping[str, Any]) -> None:
        own = family.vocabulary
        defaults = _DEFAULTS | dict(own.defaults) | spec.defaults
        names = _NAMES | dict(own.names) | {"window": spec.window} | spec.names
        super().__init__(replace(own, names=names, defaults=defaults), family.spec.places(config), family.sizes)
        self.family = family
        self.kinds: list[str] = []

    def meaning(self, name: str) -> Value:
        return self.kinds[self.layer("kind")] if name == "kind" else super().meaning(name)

    def _kind(self, name: str) -> type | None:
        """Fields may be something else than their default: ``LLLG`` for 4. What cannot use it refuses it."""
        return None

    def value(self, text: str, path: str) -> Value:
        """The value of an expression of the section. Raises LayoutError naming file, key and expression."""
        try:
            return self.work_out(text)
        except Refused as e:
            at = [f"{self.family.origin}: cache: {path}: `{text}`", *e.through]
            if read := self.read(text):
                at.append("config.json: " + ", ".join(f"`{name}` is {shown(value)}" for name, value in read.items()))
            raise LayoutError(e.why, where=at, hint=e.hint) from None
        except RecursionError:
            raise LayoutError("this expression is too deep", where=f"{self.family.origin}: cache: {path}") from None

    def count(self, text: int | str, path: str) -> int:
        """An expression that counts something. Raises LayoutError for what is no such number."""
        got = self.value(text, path) if isinstance(text, str) else text
        if type(got) is int and 0 <= got < _LARGEST:
            return got
        where = [f"{self.family.origin}: cache: {path}: `{text}`"]
        if read := self.read(str(text)):
            where.append("config.json: " + ", ".join(f"`{name}` is {shown(value)}" for name, value in read.items()))
        raise LayoutError(f"this comes to {got!r}, which is not a count", where=where, hint=HINT)


def cache_spec(family: Family) -> CacheSpec:
    """Raises UnsupportedError where the family does not say what its layers keep."""
    if family.spec.cache is None:
        raise UnsupportedError(
            f"family `{family.name}` does not say what kinds of layers a model has and what they keep",
            where=family.origin or (),
            hint="add a `cache:` section to a file given with --family",
        )
    return family.spec.cache


def layer_kinds(family: Family, config: Mapping[str, Any]) -> list[str]:
    """The kind of each layer, in transformers' words: ``full_attention``, ``sliding_attention``, ``linear_attention``.

    Raises UnsupportedError where family or config do not say it, ConflictError for a list of the config that has no
    word for each layer, LayoutError for another field that cannot be.
    """
    spec = cache_spec(family)
    return kinds_in(CacheScope(family, spec, config), spec)


def kinds_in(scope: CacheScope, spec: CacheSpec) -> list[str]:
    """The same in a scope."""
    family = scope.family
    layers = family.size("layers")
    if layers is None:
        raise UnsupportedError(
            "the config does not say how many layers the model has",
            where=family.origin,
            hint="give the complete config.json of the model",
        )
    said = _listed(scope, spec, layers)
    if said is None:
        said = []
        for layer in range(layers):
            scope.enter(layer)
            said.append(str(scope.value(spec.kinds, "kinds")))
        scope.enter(None)
    words = _WORDS | spec.words
    kinds = [words.get(word, word) for word in said]
    if UNKNOWN in kinds:
        read = ", ".join(f"`{n}` is {shown(v)}" for n, v in scope.read(spec.kinds).items() if v)
        raise UnsupportedError(
            f"config.json does not say what kind of attention each layer has, and family `{family.name}` does not know",
            where=[f"{family.origin}: cache: kinds", *([f"config.json: {read}"] if read else [])],
            hint="add `layer_types` to config.json, with a word for each layer: sliding_attention or full_attention",
        )
    return kinds


def _listed(scope: CacheScope, spec: CacheSpec, layers: int) -> list[str] | None:
    """A word for each layer, as a field of the config lists them; None where none does."""
    for name in spec.listed:
        said = next((v for v in scope.values(name) if v is not None), None)
        if said is None:
            continue
        if not isinstance(said, list) or not all(isinstance(word, str) for word in said):
            what = "a list with a word for each layer"
        elif len(said) < layers:
            what = f"long enough: it has {len(said)} entries for {layers} layers"
        else:
            return said[:layers]
        raise ConflictError(
            f"`{name}` of config.json is {shown(said)}, not {what}", where=scope.family.origin, hint=HINT
        )
    return None


def kept_layers(family: Family, config: Mapping[str, Any], *, tp: int, fp8: bool = False) -> list[LayerCache]:
    """The state that each layer keeps on one of ``tp`` ranks; ``fp8``: in which keys and values are.

    Raises what ``layer_kinds`` raises, and UnsupportedError for layers of which it is not known what they keep.
    """
    spec = cache_spec(family)
    scope = CacheScope(family, spec, config)
    scope.given["fp8"] = int(fp8)
    if scope.skips:
        raise _not_known(scope, "some layers lack modules (`skip` in `per_layer_config` of config.json)")
    for condition, why in spec.refuse.items():
        if scope.value(condition, "refuse"):
            raise _not_known(scope, why)
    scope.kinds = kinds_in(scope, spec)
    if strange := next((k for k in scope.kinds if k not in _KNOWN), ""):
        raise _not_known(scope, f"{count(scope.kinds.count(strange), 'layer')} of kind `{strange}`")
    _check_known(scope, spec)
    out = []
    for layer, kind in enumerate(scope.kinds):
        scope.enter(layer)
        out.append(_kept(scope, spec, kind, tp, config_dtype(scope.places)))
    scope.enter(None)
    return out


def _check_known(scope: CacheScope, spec: CacheSpec) -> None:
    """Raises UnsupportedError for kinds of layers, or fields of the config, of which the family says nothing."""
    if not spec.state:
        if kind := next((k for k in scope.kinds if k in _KEEP_STATE), ""):
            raise _not_known(
                scope, f"{count(scope.kinds.count(kind), 'layer')} of kind `{kind}`, of whose state nothing is said"
            )
        if field := next((k for p in scope.places for k in p if k.startswith(_OF_STATES) and p[k]), ""):
            raise _not_known(scope, f"some layers keep a state (`{field}`), and which do is not said")
    if "indexed_attention" in scope.kinds and "indexer" not in str(spec.tokens):
        raise _not_known(scope, "layers have an indexer, of whose keys nothing is said")
    texts = [spec.kinds, spec.window, spec.borrowed, *spec.refuse, *_texts(spec.tokens), *_texts(spec.state)]
    read = {name for text in texts for name in scope.read(text)} | {*spec.listed}
    if field := next((f for f in _TELLING if f not in read and any(scope.values(f))), ""):
        raise _not_known(scope, f"the config has `{field}`, of which the family knows nothing")


def _texts(tree: Mapping[str, Any]) -> Iterator[str]:
    """The expressions of lines."""
    for key, said in tree.items():
        if key.startswith("if "):
            yield key[3:]
            yield from _texts(said)
        else:
            yield from (str(size) for size in (said["shape"] if isinstance(said, dict) else said))


def _kept(scope: CacheScope, spec: CacheSpec, kind: str, tp: int, dtype: str) -> LayerCache:
    tokens: dict[str, int] = {}
    window = state = 0
    if kind in _KEEP_ALL | _KEEP_WINDOW and not scope.value(spec.borrowed, "borrowed"):
        tokens = {name: elements for name, elements, _ in _entries(scope, spec.tokens, "tokens", tp)}
    if kind in _KEEP_WINDOW:
        window = scope.count(spec.window, "window")
    if kind in _KEEP_STATE:
        found = _entries(scope, spec.state, "state", tp)
        state = sum(nbytes(own or dtype, elements) for _, elements, own in found)
    return LayerCache(kind, tokens, spec.attentions, window, state)


def _entries(scope: CacheScope, tree: Mapping[str, Any], path: str, tp: int) -> Iterator[tuple[str, int, str]]:
    """Name, elements on a rank and dtype of each line whose conditions hold; "" is the dtype of the model."""
    for key, said in tree.items():
        here = f"{path}: {key}"
        if key.startswith("if ") and isinstance(said, dict):
            if scope.value(key[3:], here):
                yield from _entries(scope, said, here, tp)
            continue
        shape, dtype = (said.get("shape"), said.get("dtype", "")) if isinstance(said, dict) else (said, "")
        if not isinstance(shape, list) or not shape or not (dtype == "" or dtype in DTYPES):
            raise LayoutError("this needs a list of sizes", where=f"{scope.family.origin}: cache: {here}")
        shared, *rest = (scope.count(size, here) for size in shape)
        yield key, -(-shared // tp) * prod(rest), dtype  # a rank has at least one, be it another's, too


def _not_known(scope: CacheScope, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"it is not known how much the layers of this model keep: {why}", where=scope.family.origin, hint="drop --kv"
    )
