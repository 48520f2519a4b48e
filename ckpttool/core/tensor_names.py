"""What the names of tensors say: which differ only in their numbers, in which order people read them, and which layer
and module of the model each belongs to.

What is left of a hundred thousand names when their numbers are taken out is a few dozen texts: templates.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from ckpttool.core.words import natural, ranges

_NUMBER = re.compile(r"\.(0|[1-9][0-9]{0,17})(?=[.\n])")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
SLOT = "\0"
"""Stands for a number in a template."""


def printable(name: str) -> str:
    """The name with control characters (and broken UTF-16) written as escapes, so that one tensor is one line."""
    return _CONTROL.sub(lambda m: m[0].encode("unicode_escape").decode(), name)


def templates(names: Sequence[str]) -> list[tuple[str, tuple[int, ...]]]:
    """(template, numbers) of each name; a number is a whole component between dots, as layers and experts are."""
    blob = "".join([f".{n}\n" for n in names])
    if blob.count("\n") != len(names) or _CONTROL.search(blob.replace("\n", "")):
        names = [printable(n) for n in names]
        blob = "".join([f".{n}\n" for n in names])
    # One pass of the regular expression over all names is several times faster than one for each name.
    numbers = list(map(int, _NUMBER.findall(blob)))
    out, at = [], 0
    for text in _NUMBER.sub("." + SLOT, blob).split("\n")[:-1]:
        end = at + text.count(SLOT)
        out.append((text[1:], tuple(numbers[at:end])))
        at = end
    return out


def fold(names: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Names that differ only in numbers, as one: (``layers.{0..3}.up_proj.weight``, positions of the names).

    A line stands for every combination of its numbers.
    """
    found: dict[str, dict[tuple[tuple[int, ...], ...], list[int]]] = {}
    for at, (template, numbers) in enumerate(templates(names)):
        found.setdefault(template, {})[tuple((n,) for n in numbers)] = [at]
    out = []
    for template, single in found.items():
        groups = single
        for slot in reversed(range(template.count(SLOT))):
            merged: dict[tuple[tuple[int, ...], ...], tuple[list[int], list[int]]] = {}
            for key, places in groups.items():
                mine, held = merged.setdefault(key[:slot] + key[slot + 1 :], ([], []))
                mine += key[slot]
                held += places
            groups = {(*rest[:slot], tuple(sorted(mine)), *rest[slot:]): held for rest, (mine, held) in merged.items()}
        texts = template.split(SLOT)
        for key, places in groups.items():
            shown = [f"{{{ranges(n)}}}" if len(n) > 1 else str(n[0]) for n in key]
            out.append(("".join(t + n for t, n in zip(texts, [*shown, ""], strict=True)), places))
    return out


def natural_order(names: Sequence[str]) -> list[int]:
    """Positions of the names in natural order: numbers as numbers, and ``layers.2`` before ``layers.10``."""
    known: dict[str, list[Any]] = {}
    keys = []
    for template, numbers in templates(names):
        texts = known.get(template)
        if texts is None:
            texts = known[template] = [natural(text) for text in template.split(SLOT)]
        key = [texts[0]]
        for number, text in zip(numbers, texts[1:], strict=True):
            key += (number, text)
        keys.append(key)
    return sorted(range(len(keys)), key=keys.__getitem__)


class Location(NamedTuple):
    """The place of a tensor in the model, as far as its name says."""

    stack: str
    """What is in front of the layer's number: ``model.layers``; "" outside layers."""
    layer: int | None
    """The number of the layer, None outside layers."""
    module: str
    """The rest without its numbers and without ``weight`` at its end: ``mlp.experts.up_proj``, ``lm_head``."""


def locate(name: str) -> Location:
    """The layer and the module that a tensor's name speaks of. The first number between dots is the layer's."""
    (template, numbers), *_ = templates([name])
    stack, slot, rest = template.partition("." + SLOT)
    module = rest.removeprefix(".") if slot else template
    module = ".".join([part for part in module.split(".") if part != SLOT])
    module = module.removesuffix(".weight")
    return Location(stack, numbers[0], module) if slot else Location("", None, module)
