"""What the layers of a model keep of the tokens that they have read: ``cache:`` of a family file, for one config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckpttool.errors import ConflictError, LayoutError, UnsupportedError
from ckpttool.layout.expressions import Refused, Value
from ckpttool.layout.family import Family
from ckpttool.layout.sizes import HINT, Default, DefaultSpec, Scope, shown
from ckpttool.layout.spec import CacheSpec

UNKNOWN = "unknown"
"""What ``kinds`` comes to where the config does not tell."""
_DEFAULTS: dict[str, Default] = {
    "sliding_window": DefaultSpec(missing=0, none=0),
    "use_sliding_window": DefaultSpec(missing=True, none=True),
    "head_dim": "hidden_size // heads",
}
"""What fields mean that are not there, where a family says nothing else."""
_WORDS = {
    "attention": "full_attention",
    "mamba": "linear_attention",
    "deepseek_sparse_attention": "indexed_attention",
    "qwen_sparse_attention": "indexed_attention",
}
"""Older words of transformers' for the same kinds."""


class CacheScope(Scope):
    """What the words of the section mean; what is wrong is said with the line that it stands in."""

    def __init__(self, family: Family, spec: CacheSpec, config: Mapping[str, Any]) -> None:
        own = family.vocabulary
        defaults = _DEFAULTS | dict(own.defaults) | spec.defaults
        names = dict(own.names) | {"window": spec.window} | spec.names
        super().__init__(replace(own, names=names, defaults=defaults), family.spec.places(config), family.sizes)
        self.family = family

    def _kind(self, name: str) -> type | None:
        """Fields may be something else than their default: ``LLLG`` for 4. What cannot use it refuses it."""
        return None

    def value(self, text: str, path: str) -> Value:
        """What an expression of the section comes to. Raises LayoutError naming file, key and expression."""
        try:
            return self.work_out(text)
        except Refused as e:
            at = [f"{self.family.origin}: cache: {path}: `{text}`", *e.through]
            if read := self.read(text):
                at.append("config.json: " + ", ".join(f"`{name}` is {shown(value)}" for name, value in read.items()))
            raise LayoutError(e.why, where=at, hint=e.hint) from None
        except RecursionError:
            raise LayoutError("this expression is too deep", where=f"{self.family.origin}: cache: {path}") from None


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
    count = family.size("layers")
    if count is None:
        raise UnsupportedError(
            "the config does not say how many layers the model has",
            where=family.origin,
            hint="give the complete config.json of the model",
        )
    said = _listed(scope, spec, count)
    if said is None:
        said = []
        for layer in range(count):
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


def _listed(scope: CacheScope, spec: CacheSpec, count: int) -> list[str] | None:
    """A word for each layer, as a field of the config lists them; None where none does."""
    for name in spec.listed:
        said = next((v for v in scope.values(name) if v is not None), None)
        if said is None:
            continue
        if not isinstance(said, list) or not all(isinstance(word, str) for word in said):
            what = "a list with a word for each layer"
        elif len(said) < count:
            what = f"long enough: it has {len(said)} entries for {count} layers"
        else:
            return said[:count]
        raise ConflictError(
            f"`{name}` of config.json is {shown(said)}, not {what}", where=scope.family.origin, hint=HINT
        )
    return None
