"""Tensors that a recipe leaves in high precision.

What everybody keeps: vectors (norms, biases), embeddings and output heads, routers, convolutions, vision towers. What
published models keep besides is in the presets: DeepSeek quantizes its latent projections and shared experts and keeps
``eh_proj`` and the indexer's ``weights_proj``, which the element counts of its files prove.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ckpttool.core.dtypes import CASTABLE
from ckpttool.core.patterns import bounded, compile_pattern, pattern_hint
from ckpttool.core.words import count
from ckpttool.errors import UsageError
from ckpttool.layout.names import split_numbers
from ckpttool.quant.scheme import Form, Scheme, forms

_END = r"(?:\.#)*(?:\.weight)?$"


def _module(*words: str) -> tuple[str, ...]:
    """Patterns for modules with these names: the last of a tensor's name, numbers aside."""
    return tuple(rf"re:(?:^|\.)(?:{w}){_END}" for w in words)


def _around(*words: str) -> tuple[str, ...]:
    """Patterns for modules in whose name, or in that of the module right around them, there is one of these words.

    Not further out: a whole model may be called ``roberta_prelayernorm``.
    """
    return tuple(rf"re:(?:^|\.)[^.]*{w}[^.]*(?:\.#)*(?:\.[^.]+)?{_END}" for w in words)


_TOKENS = (
    *_around("embed"),
    *_module(
        "w[tp]e",
        r"(?:\w+_)?emb",
        "shared",
        "relative_attention_bias",
        "bias_values",
        r"\w+_token",
        r"transformer\.w",
        r"\w*codebook\w*",
    ),
)
_HEADS = _module("lm_head", "output_layer", "head", "embed_out", "score", "classifier", "qa_outputs")
_EMBEDDINGS = (*_TOKENS, *_HEADS, *_around("lm_head", "output_layer"))
_ROUTERS = (*_module("gate", r"gate\.wg", r"\w*shared_expert_gate"), *_around("router"))
_NORMS = _around("norm")
_DEEPSEEK = _module("eh_proj", r"indexer\.weights_proj")
_TOWERS = (r"re:(?:^|\.)(?!visual_bert\.)[^.]*(?:visual|vision)", r"re:(?:^|\.)embed_tokens_extend\.")
_OTHERS = (*_NORMS, *_around("conv"), *_TOWERS, *_DEEPSEEK)

PRESETS: dict[str, tuple[str, ...]] = {
    "deepseek": (*_around("embed_tokens", "lm_head"), *_module(r"shared_head\.head"), *_ROUTERS, *_NORMS, *_DEEPSEEK),
    "hf-default": (*_EMBEDDINGS, *_ROUTERS, *_OTHERS),
    "experts-only": (r"re:^(?!.*\.experts\.)", *_EMBEDDINGS, *_ROUTERS, *_OTHERS),
    "none": (),
}
"""Patterns of tensors that stay as they are, for names whose numbers are ``#``."""


_IN_OUT = ("openai-gpt", "imagegpt", "decision_transformer", "clvp", "clvp_decoder")
"""Model types without a family whose attention and MLP are Conv1D, as GPT-2's are: stored [in, out]."""


def is_conv1d(config: Mapping[str, Any], name: str) -> bool:
    """Whether a weight is one of transformers' Conv1D, in models of no family."""
    module = name.removesuffix(".weight").rpartition(".")[2]
    return config.get("model_type") in _IN_OUT and module in ("c_attn", "c_proj", "c_fc", "q_attn")


class Weight(NamedTuple):
    """A tensor in high precision, as a recipe sees it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    in_out: bool = False
    """Stored [..., in, out]."""


class Treated(NamedTuple):
    """The treatment of a tensor under a recipe."""

    weight: Weight
    forms: tuple[Form, ...]
    """() where it stays as it is."""
    why: str = ""
    """Reason to stay: ``vector``, ``no Linear``, ``--keep``, ``preset``, ``source`` (that has it so), ..."""


@dataclass(slots=True)
class Keep:
    """Decides, tensor by tensor."""

    preset: str = "hf-default"
    keep: Sequence[str] = ()
    include: Sequence[str] = ()
    ignored: Collection[str] = ()
    """Modules that the source's config names as not quantized."""
    among: Collection[str] | None = None
    """The weights that are quantized in a source that is; what it has in high precision stays so."""
    _preset: re.Pattern[str] | None = None
    _known: dict[str, bool] = field(default_factory=dict)
    """The preset's answer by the name without its numbers: no preset has any."""
    _modules: frozenset[str] = frozenset()
    _patterns: tuple[str, ...] = ()
    """``ignored``, which has hundreds of entries in models with experts, in those that are plain names and others."""

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise UsageError(f"unknown preset `{self.preset}`", hint="presets: " + ", ".join(PRESETS))
        for p in (*self.keep, *self.include):
            compile_pattern(p)
        self._patterns = tuple(p for p in self.ignored if p.startswith("re:") or "*" in p)
        self._modules = frozenset(self.ignored) - set(self._patterns)
        if patterns := PRESETS[self.preset]:
            self._preset = re.compile("|".join(compile_pattern(p).pattern for p in patterns))

    def check(self, names: Collection[str]) -> None:
        """A pattern that matches nothing is a typo. Raises UsageError."""
        for option, patterns in (("--keep", self.keep), ("--include", self.include)):
            for p in patterns:
                regex = compile_pattern(p)
                with bounded(f"{option} {p}"):
                    found = any(regex.search(n) for n in names)
                if not found:
                    raise UsageError(f"{option} `{p}` matches no tensor", hint=pattern_hint(p, names))

    def why(self, w: Weight) -> str:
        """The reason to keep the tensor as it is; "" to quantize it."""
        if len(w.shape) < 2:
            return "vector"
        if w.dtype not in CASTABLE:
            return "no float"
        experts = len(w.shape) == 3 and "experts" in w.name
        if not (len(w.shape) == 2 and w.name.endswith(".weight")) and not (experts and "bias" not in w.name):
            return "no Linear"
        if w.in_out and not experts:
            return "no Linear"  # GPT-2's Conv1D, which no quantized model replaces
        if 0 in w.shape:
            return "empty"
        if any(compile_pattern(p).search(w.name) for p in self.include):
            return ""
        if any(compile_pattern(p).search(w.name) for p in self.keep):
            return "--keep"
        if self._in_preset(w.name):
            return "preset"
        if self.among is not None and w.name not in self.among:
            return "source"
        module = w.name.removesuffix(".weight")
        return "config" if self._is_ignored(module) else ""

    def _is_ignored(self, module: str) -> bool:
        """Whether an entry of the config's list means this module: itself, something around it, or its last names."""
        parts = module.split(".")
        return any(
            ".".join(parts[:i]) in self._modules or ".".join(parts[i - 1 :]) in self._modules
            for i in range(1, len(parts) + 1)
        ) or any(compile_pattern(p).search(module) for p in self._patterns)

    def _in_preset(self, name: str) -> bool:
        if self._preset is None:
            return False
        template = split_numbers(name)[0]
        if template not in self._known:
            self._known[template] = self._preset.search(name) is not None
        return self._known[template]


_REASONS = {"no Linear": "not Linear", "no float": "not floating-point", "source": "as in the source", "empty": "empty"}
"""Reasons of ``Treated.why`` in words. Vectors are counted as such, and what presets and options keep as "by" these."""


def kept_words(kept: Mapping[str, int]) -> str:
    """``7 tensors kept in high precision: 5 vectors, 2 by preset``, most first. ``kept`` is reason -> tensors."""
    each = [
        count(n, "vector") if why == "vector" else f"{n:,} {_REASONS.get(why, f'by {why}')}"
        for why, n in sorted(kept.items(), key=lambda item: -item[1])
    ]
    return f"{count(sum(kept.values()), 'tensor')} kept in high precision: {', '.join(each)}"


def for_family(keep: Keep, scheme: Scheme | None, weights: Collection[Weight]) -> Keep:
    """The usual preset of a model with gpt-oss's experts, of which nobody reads MXFP4 weights beside the experts."""
    blocks = scheme is not None and scheme.recipe == "mxfp4" and any(w.in_out and len(w.shape) == 3 for w in weights)
    return replace(keep, preset="experts-only", _known={}) if blocks and keep.preset == "hf-default" else keep


def treat(weights: Iterable[Weight], scheme: Scheme | None, keep: Keep) -> list[Treated]:
    """The treatment of each tensor; ``scheme`` None is "all stay". Raises LayoutError as ``forms`` does."""
    weights = list(weights)
    if scheme is None:
        return [Treated(w, (), "no recipe") for w in weights]
    with bounded("--keep and --include, or the modules that config.json does not quantize", len(weights)):
        reasons = [keep.why(w) for w in weights]
    out = []
    skips = scheme.edge == "skip" and scheme.recipe == "block"
    for w, reason in zip(weights, reasons, strict=True):
        ragged = skips and not reason and any(n % b for n, b in zip(w.shape[-2:], scheme.block, strict=True))
        why = "--edge skip" if ragged else reason
        out.append(Treated(w, () if why else forms(scheme, w.name, w.shape, in_out=w.in_out), why))
    return out
