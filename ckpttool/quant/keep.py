"""Which tensors a recipe leaves in high precision.

What everybody keeps: vectors (norms, biases), embeddings and output heads, routers, convolutions, vision towers. What
published models keep besides is in the presets: DeepSeek quantises its latent projections and shared experts and keeps
``eh_proj`` and the indexer's ``weights_proj``, which the element counts of its files prove.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ckpttool.dtypes import CASTABLE
from ckpttool.errors import UsageError
from ckpttool.layout.names import split_numbers
from ckpttool.quant.scheme import Form, Scheme, forms
from ckpttool.select import bounded, compile_pattern, nearest_hint

_EMBEDDINGS = (
    "*embed_tokens*",
    "*embedding*",
    "*lm_head*",
    "*output_layer*",
    "*shared_head.head*",
    "*wte*",
    "*wpe*",
    "*embed_in*",
    "*embed_out*",
)
_ROUTERS = ("*.gate.weight", "*.gate.wg.weight", "*router*", "*shared_expert_gate*")
_OTHERS = ("*norm*", "*conv*", "*visual*", "*vision*", "*.eh_proj.*", "*.indexer.weights_proj.*")

PRESETS: dict[str, tuple[str, ...]] = {
    "deepseek": ("*embed_tokens*", "*lm_head*", "*shared_head.head*", *_ROUTERS, "*norm*", *_OTHERS[-2:]),
    "hf-default": (*_EMBEDDINGS, *_ROUTERS, *_OTHERS),
    "experts-only": ("re:^(?!.*\\.experts\\.)", *_EMBEDDINGS, *_ROUTERS, *_OTHERS),
    "none": (),
}
"""Patterns of tensors that stay as they are."""


class Weight(NamedTuple):
    """A tensor in high precision, as a recipe sees it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    in_out: bool = False
    """Stored [..., in, out]."""


class Treated(NamedTuple):
    """What a recipe makes of a tensor."""

    weight: Weight
    forms: tuple[Form, ...]
    """() where it stays as it is."""
    why: str = ""
    """Why it stays: ``vector``, ``no Linear``, ``--keep``, ``preset``, ``source`` (that has it so), ..."""


@dataclass(slots=True)
class Keep:
    """Decides, tensor by tensor."""

    preset: str = "hf-default"
    keep: Sequence[str] = ()
    include: Sequence[str] = ()
    ignored: Collection[str] = ()
    """Modules that the source's config names as not quantised."""
    among: Collection[str] | None = None
    """The weights that are quantised in a source that is; what it has in high precision stays so."""
    _preset: re.Pattern[str] | None = None
    _known: dict[str, bool] = field(default_factory=dict)
    """What the preset says of a name, by the name without its numbers: no preset has any."""
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
                    raise UsageError(f"{option} `{p}` matches no tensor", hint=nearest_hint(p, names))

    def why(self, w: Weight) -> str:
        """Why the tensor stays as it is; "" if it is to be quantised."""
        if len(w.shape) < 2:
            return "vector"
        if w.dtype not in CASTABLE:
            return "no float"
        experts = len(w.shape) == 3 and "experts" in w.name
        if not (len(w.shape) == 2 and w.name.endswith(".weight")) and not (experts and "bias" not in w.name):
            return "no Linear"
        if w.in_out and not experts:
            return "no Linear"  # GPT-2's Conv1D, which no quantised model replaces
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


def for_family(keep: Keep, scheme: Scheme | None, weights: Collection[Weight]) -> Keep:
    """The usual preset of a model with gpt-oss's experts, of which nobody reads MXFP4 weights beside the experts."""
    blocks = scheme is not None and scheme.recipe == "mxfp4" and any(w.in_out and len(w.shape) == 3 for w in weights)
    return replace(keep, preset="experts-only", _known={}) if blocks and keep.preset == "hf-default" else keep


def treat(weights: Iterable[Weight], scheme: Scheme | None, keep: Keep) -> list[Treated]:
    """What becomes of each tensor; ``scheme`` None is "all stay". Raises LayoutError as ``forms`` does."""
    weights = list(weights)
    if scheme is None:
        return [Treated(w, (), "no recipe") for w in weights]
    with bounded("--keep and --include, or the modules that config.json does not quantise", len(weights)):
        reasons = [keep.why(w) for w in weights]
    out = []
    for w, reason in zip(weights, reasons, strict=True):
        why = reason or ("--edge skip" if scheme.edge == "skip" and _ragged(scheme, w) else "")
        out.append(Treated(w, () if why else forms(scheme, w.name, w.shape, in_out=w.in_out), why))
    return out


def _ragged(scheme: Scheme, w: Weight) -> bool:
    return scheme.recipe == "block" and any(n % b for n, b in zip(w.shape[-2:], scheme.block, strict=True))
