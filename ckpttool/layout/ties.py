"""Tensors that a class of transformers ties to each other, where the family and the ends of names do not say it.

``ties.yaml`` is what transformers' own models tie (``python -m tests.peers.test_ties`` compares all of them): class ->
copy -> owner, where ``*`` stands for the same number in both. Layers that repeat the blocks of earlier ones are
``repeated``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from ckpttool.formats.config import TIED

FILE = Path(__file__).with_name("ties.yaml")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@cache
def _recorded() -> dict[str, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    found: dict[str, Any] = yaml.load(FILE.read_text(encoding="utf-8"), Loader=loader)  # noqa: S506 - a safe one
    return found


def class_ties(config: Mapping[str, Any], names: Collection[str]) -> dict[str, str] | None:
    """copy -> owner, all ties of the class that a config names; None for a class that has no record.

    ``names`` are those of copies or owners.
    """
    said = config.get("architectures")
    name = str(said[0]) if isinstance(said, list) and said else ""
    recorded = _recorded()
    if name not in recorded["ties"]:
        return None
    flags = [*_flags(config)]
    if not (any(flags) if flags else name not in recorded["untied_by_default"]):
        return {}
    pairs: dict[str, str] = recorded["ties"][name]
    numbered: dict[str, set[tuple[str, ...]]] = {}
    for n in names:
        numbered.setdefault(n, set()).add(())
        numbered.setdefault(_NUMBER.sub("*", n), set()).add(tuple(_NUMBER.findall(n)))
    out: dict[str, str] = {}
    for copy, owner in pairs.items():
        for numbers in sorted(numbered.get(copy, set()) | numbered.get(owner, set())):
            out[_filled(copy, numbers)] = _filled(owner, numbers)
    if repeated := recorded["repeated"].get(name):
        out |= _repeated(config, names, **repeated)
    return None if pairs and not out else out  # None: a composite of other parts than those of the record


def _filled(template: str, numbers: Sequence[str]) -> str:
    first, *rest = template.split("*")
    return first + "".join(n + r for n, r in zip(numbers, rest, strict=False))


def _repeated(config: Mapping[str, Any], names: Collection[str], blocks: str, under: str) -> dict[str, str]:
    """Layer after layer has the next of so many ``blocks`` (a field; 1 without it), and then the first again."""
    pattern = re.compile(rf"(.*\blayers\.)(\d+)(\.{re.escape(under)}\..+)")
    found = [m for n in names if (m := pattern.fullmatch(n))]
    layers = dict(zip(sorted({int(m[2]) for m in found}), count(), strict=False))
    first = {k: layer for layer, k in layers.items()}
    period = config.get(blocks)
    period = period if type(period) is int and period > 0 else 1
    owners = {m[0]: f"{m[1]}{first[layers[int(m[2])] % period]}{m[3]}" for m in found}
    return {copy: owner for copy, owner in owners.items() if copy != owner}


def _flags(config: Mapping[str, Any]) -> Iterator[bool]:
    """The tie flags of a config and its parts."""
    if TIED in config:
        yield bool(config[TIED])
    for part in config.values():
        if isinstance(part, Mapping):
            yield from _flags(part)
