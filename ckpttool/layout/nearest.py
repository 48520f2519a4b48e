"""The nearest family of a model without one, judged by the names that its rules have.

Names of a layer are compared without what stands in front of the layer's number, and other names by their ends: a model
that is built like another one often has its names under another prefix. Alike names are a hint and no rule: the matrix
of one model may lie the other way round in the next.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from ckpttool.errors import CkptError
from ckpttool.layout.family import Family, load_family
from ckpttool.layout.files import builtin
from ckpttool.layout.names import pattern_regex, split_numbers


class NameTemplate(NamedTuple):
    """Names that differ in their numbers only."""

    stack: str
    """The text in front of the layer's number, without its dot; "" for names without a layer."""
    rest: str
    """The text after it, with ``0`` for every other number (experts)."""

    @property
    def pattern(self) -> str:
        """``rest`` as a pattern of a family file."""
        words = self.rest.split(".")
        for i, word in enumerate(words):
            if word == "0":
                words[i] = "{expert}" if i and "expert" in words[i - 1] else "{n}"
        return ".".join(words)


def kind_of(name: str) -> NameTemplate:
    """The kind of tensor that a name is of."""
    template, numbers = split_numbers(name)
    if not numbers:
        return NameTemplate("", name)
    stack, _, rest = template.partition("#")
    return NameTemplate(stack.removesuffix("."), rest.removeprefix(".").replace("#", "0"))


@dataclass(frozen=True)
class _FamilyPatterns:
    """The patterns of a family with their rules."""

    family: str
    in_layers: Sequence[tuple[re.Pattern[str], str, str]]
    """(regular expression for what follows the layer's number, pattern, rule)."""
    outside: Sequence[tuple[re.Pattern[str], str, str]]

    def rule(self, kind: NameTemplate) -> tuple[str, str] | None:
        """Pattern and rule of a kind of tensor; None where it has no such name."""
        if kind.stack:
            return next(((p, rule) for regex, p, rule in self.in_layers if regex.match(kind.rest)), None)
        parts = kind.rest.split(".")
        ends = [".".join(parts[i:]) for i in range(len(parts) - 1)]
        return next(((p, rule) for regex, p, rule in self.outside if any(map(regex.match, ends))), None)


@lru_cache(maxsize=1)
def _families() -> tuple[Family, ...]:
    out = []
    for name in builtin():
        with contextlib.suppress(CkptError):  # around a language model that only a config names
            out.append(load_family(name, {}))
    return tuple(out)


@lru_cache(maxsize=1)
def _all_names() -> tuple[_FamilyPatterns, ...]:
    out = []
    for spec in (family.spec for family in _families()):
        stacks = [spec.layers.rules, *(s.rules for s in spec.stacks.values())]
        layers = [(pattern_regex(p), p, rule) for rules in stacks for p, rule in rules.items()]
        others = [
            (".".join(p.split(".")[-2:]), p, rule) for rules in (spec.first, spec.last) for p, rule in rules.items()
        ]
        outside = [(pattern_regex(end), p, rule) for end, p, rule in others if end[0] not in "*{"]
        out.append(_FamilyPatterns(spec.family, layers, outside))
    return tuple(out)


def fitting(names: Iterable[str]) -> list[str]:
    """Families whose rules name all these tensors, as they are, and not only as a tower that they hold whole.

    Those that most others are like come first.
    """
    one_of_each = {split_numbers(n)[0]: n for n in names}.values()
    out = []
    for family in _families():
        places = [place for n in one_of_each if (place := family.placement(n)) is not None]
        if len(places) == len(one_of_each) and any(p.rule.verb != "replicate" for p in places):
            out.append(family.name)
    like = _likes()
    return sorted(out, key=lambda name: (-like[name], "/" in name, name))


@lru_cache(maxsize=1)
def _likes() -> Counter[str]:
    """How many families are written on top of each."""
    return Counter(f.spec.extends.family for f in _families() if f.spec.extends)


@dataclass(frozen=True, slots=True)
class Nearest:
    """The family whose rules name most kinds of a model's tensors."""

    family: str
    named: int
    """Kinds of tensors that it names."""
    kinds: int
    """Kinds of tensors that there are."""
    rules: Mapping[NameTemplate, tuple[str, str]] = field(default_factory=dict)
    """Pattern and rule of each kind that it names."""
    others: Mapping[NameTemplate, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    """Templates that the family lacks: the rule that most families with such a name have, and those families."""


def nearest(names: Iterable[str]) -> Nearest | None:
    """The family that is nearest by its names; None where none names half of what the layers of a stack hold."""
    kinds = list(dict.fromkeys(map(kind_of, names)))
    stacks = Counter(k.stack for k in kinds if k.stack)
    best: tuple[tuple[int, ...], str, dict[NameTemplate, tuple[str, str]]] | None = None
    like = _likes()
    said: dict[NameTemplate, dict[str, list[str]]] = {k: {} for k in kinds}
    for family in _all_names():
        found = {k: rule for k in kinds if (rule := family.rule(k)) is not None}
        for kind, (_, text) in found.items():
            said[kind].setdefault(text, []).append(family.family)
        for stack, there in stacks.items():
            used = [pattern for k, (pattern, _) in found.items() if k.stack == stack]
            # Of families that name as many, the one with the fewest rules for other tensors; one written by hand; and
            # the one that most others are like.
            other = len(set(used)) - len(family.in_layers)
            score = (len(used), other, "/" not in family.family, like[family.family])
            if 2 * len(used) >= there and (best is None or score > best[0]):
                best = (score, family.family, found)
    if best is None:
        return None
    _, name, found = best
    others = {}
    for kind, rules in said.items():
        if kind not in found and rules:
            usual = max(rules, key=lambda r: len(rules[r]))
            others[kind] = (usual, tuple(rules[usual]))
    return Nearest(name, len(found), len(kinds), found, others)
