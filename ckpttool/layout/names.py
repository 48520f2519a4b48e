"""Tensor name patterns with captures, and a cache that works on name templates.

A pattern is a name in which ``{layer}`` and ``{expert}`` stand for a number, any other ``{word}`` for any text
(dots included), ``{a,b}`` for alternatives and ``*`` for any text that is not kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

from ckpttool.errors import UnsupportedError

_NUMBER = re.compile(r"(?<![^.])(\d{1,18})(?![^.])")
"""A number that is a whole dot-separated component, as layer and expert numbers are (``w1`` is not)."""
_TOKEN = re.compile(r"\{([^{}]*)\}|\*")


@cache
def pattern_regex(pattern: str) -> re.Pattern[str]:
    """The compiled regular expression; a capture that occurs twice must match the same text twice."""
    out, at, seen = [], 0, set()
    for m in _TOKEN.finditer(pattern):
        out.append(re.escape(pattern[at : m.start()]))
        at = m.end()
        word = m[1]
        if word is None:
            out.append(".*")
        elif "," in word:
            out.append("(?:" + "|".join(re.escape(w) for w in word.split(",")) + ")")
        elif not word.isidentifier():
            raise UnsupportedError(f"pattern `{pattern}`: `{{{word}}}` is not a capture", hint="use a word: {layer}")
        elif word in seen:
            out.append(f"(?P={word})")
        else:
            seen.add(word)
            out.append(f"(?P<{word}>{r'[0-9]{1,18}' if word in ('layer', 'expert') else '.*'})")
    out.append(re.escape(pattern[at:]))
    return re.compile("".join(out) + r"\Z", re.DOTALL)


def samples(pattern: str) -> list[str]:
    """Names that the pattern matches, one for each choice among its alternatives; a capture becomes ``0``."""
    out, at = [""], 0
    for m in _TOKEN.finditer(pattern):
        choices = m[1].split(",") if m[1] and "," in m[1] else ["0"]
        out = [start + pattern[at : m.start()] + choice for start in out for choice in choices]
        at = m.end()
    return [start + pattern[at:] for start in out]


def captures(pattern: str) -> frozenset[str]:
    """The groups that a pattern keeps of a name. Raises UnsupportedError for one that matches more than it keeps
    (``*``)."""
    found = frozenset(m[1] or "*" for m in _TOKEN.finditer(pattern))
    if loose := next((word for word in found if word == "*" or "," in word), None):
        raise UnsupportedError(
            f"pattern `{pattern}`: `{loose if loose == '*' else f'{{{loose}}}'}` is not kept for another name",
            hint="use a word: {a}",
        )
    return found


def expand(pattern: str, captures: dict[str, str]) -> str:
    """The name that a pattern gives with these captures."""
    return _TOKEN.sub(lambda m: captures[m[1]], pattern)


def split_numbers(name: str) -> tuple[str, tuple[str, ...]]:
    """``a.3.b.17.c`` -> (``a.#.b.#.c``, (``3``, ``17``))."""
    parts = _NUMBER.split(name)
    return "#".join(parts[::2]), tuple(parts[1::2])


def pattern_of(name: str) -> str:
    """The pattern of all names that differ from this one in their numbers only."""
    template, numbers = split_numbers(name)
    first, *rest = template.split("#")
    words = ("layer", "expert", *(f"n{i}" for i in range(len(numbers))))
    return first + "".join([f"{{{w}}}{text}" for w, text in zip(words, rest, strict=False)])


def has_literal_number(pattern: str) -> bool:
    """Whether a pattern names one number (``layers.0.x``), so that names of one template may differ in it."""
    return re.search(r"(?<![^.{,])\d+(?![^.},])", pattern) is not None


def has_inner_number(pattern: str) -> bool:
    """Whether a number is only a part of a name's component (``expert_{expert}``): templates keep it as it is."""
    return re.search(r"[^.]\{(?:layer|expert)\}|\{(?:layer|expert)\}[^.]", pattern) is not None


class Renamer:
    """A name -> name function, evaluated once per template.

    Only for functions that treat all numbers alike (see ``has_literal_number``). The result for a template is reused
    when the function keeps the numbers of a name in order, which is checked on two names that differ in every number.
    """

    def __init__(self, function: Callable[[str], str | None]) -> None:
        self._function = function
        self._known: dict[str, tuple[str | None] | None] = {}

    def __call__(self, name: str) -> str | None:
        if "#" in name:  # it would look like a template
            return self._function(name)
        template, numbers = split_numbers(name)
        if template not in self._known:
            self._known[template] = self._learn(template, numbers)
        known = self._known[template]
        if known is None:
            return self._function(name)
        result = known[0]
        if result is None or not numbers:
            return result
        head, *tail = result.split("#")
        return head + "".join([n + t for n, t in zip(numbers, tail, strict=True)])

    def _learn(self, template: str, numbers: tuple[str, ...]) -> tuple[str | None] | None:
        results: list[str | None] = []
        for probe in (numbers, tuple(str(700001 + i) for i in range(len(numbers)))):
            parts = template.split("#")
            name = parts[0] + "".join(n + t for n, t in zip(probe, parts[1:], strict=True))
            out = self._function(name)
            if out is None:
                results.append(None)
                continue
            shape, kept = split_numbers(out)
            if kept != probe or "#" in out:
                return None
            results.append(shape)
        return (results[0],) if results[0] == results[1] else None
