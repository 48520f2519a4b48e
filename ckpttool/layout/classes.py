"""Output heads by the names of transformers' classes: ``Qwen3Model`` is ``Qwen3ForCausalLM`` without its output head,
and ``Qwen3ForSequenceClassification`` has another one in its place.

Sources: transformers' modeling_layers.py (GenericForSequenceClassification, GenericForTokenClassification), and the
classes of single models that do not derive from them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

_CAUSAL = ("ForCausalLM", "LMHeadModel")
_BASE = "Model"
_SEQUENCES = "ForSequenceClassification"
_TOKENS = "ForTokenClassification"
_CLASS = re.compile(r"(?P<stem>\w+?)(?P<kind>ForCausalLM|LMHeadModel|Model|For[A-Z]\w+)")
_UNLIKE = frozenset({"CTRL", "ModernBertDecoder", "XLNet"})
"""Their classifiers have other heads."""
_CLASSIFIER = frozenset({"BioGpt", "Bloom", "Falcon", "GPT2", "GPTBigCode", "GPTNeo", "GPTNeoX", "Mpt"})
"""Their heads for tokens are called so; those of others ``score``."""


class ClassHead(NamedTuple):
    """The module that a model has in place of an output head."""

    name: str
    """Name of the module; "" is none at all."""
    bias: bool = False


def causal_classes(architecture: str) -> tuple[str, ...]:
    """The language models with the same base as this class; () for a name that says nothing."""
    m = _CLASS.fullmatch(architecture)
    return tuple(m["stem"] + kind for kind in _CAUSAL) if m else ()


def other_head(config: Mapping[str, Any], known: Collection[str]) -> ClassHead | None:
    """The head of the class that a config names, where it is not that of a language model.

    None where it is, or where nothing is known of it. ``known`` are the classes of the family, of which all must be
    language models that are decoders alone.
    """
    said = config.get("architectures")
    m = _CLASS.fullmatch(str(said[0])) if isinstance(said, list) and said else None
    if m is None or not {m["stem"] + kind for kind in _CAUSAL} & set(known):
        return None
    if not all(c.endswith((*_CAUSAL, _BASE)) for c in known):
        return None
    if m["kind"] == _BASE:
        return ClassHead("")
    if m["stem"] in _UNLIKE:
        return None
    if m["kind"] == _SEQUENCES:
        return ClassHead("score")
    return ClassHead("classifier" if m["stem"] in _CLASSIFIER else "score", bias=True) if m["kind"] == _TOKENS else None
