"""Layers of multi-token prediction: what config.json counts, and what the output has of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ckpttool.core.words import some
from ckpttool.formats.config import LAYERS, PREDICTION, config_places, whole_number
from ckpttool.layout.assemble import LAYER
from ckpttool.quant.config import with_fields

_OWN = re.compile(r"(?<![^.])mtp(?:_\w+)?\.(?:layers\.)?(?P<number>\d{1,9})?")
"""Names of prediction layers that are numbered by themselves: ``mtp.layers.0``, ``model.mtp_block.0``."""


class _NamedLayers(NamedTuple):
    """Layers by the names of their tensors."""

    complete: bool
    """Whether all layers are there that come before those of prediction."""
    predicting: frozenset[int]
    """Prediction layers, from 0; -1 is what they share."""


def settled(
    config: Mapping[str, Any],
    before: Iterable[str],
    after: Iterable[str],
    default: str = "",
    *,
    was: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """The config with as many prediction layers as are left, and notes about it.

    ``before`` and ``after`` are names of the source: of what it has, and of what is written. ``default`` is the field
    that may mean a prediction layer where the config has none. ``was``: the config of ``before``, where that is
    another one.
    """
    same = dict(config)
    fields = {f: n for f in PREDICTION if (n := whole_number(config, f)) is not None}
    counted = {f: n for f, n in fields.items() if n}
    layers = whole_number(config, *LAYERS)
    if layers is None or (not counted and (fields or not default)):
        return same, []
    here = _found(before, layers if was is None else whole_number(was, *LAYERS) or layers)
    left = _found(after, layers).predicting
    said = _shown(counted)
    if not here.predicting:
        lacks = counted and here.complete and not left
        return same, [f"config.json says {said}, and the source has no such layer"] if lacks else []
    if left == here.predicting:
        return same, []
    numbers = left - {-1}
    if not left:
        most = 0
    elif {*counted.values()} == {len(here.predicting - {-1})} and numbers == {*range(len(numbers))}:
        most = len(numbers)
    else:
        return same, [f"config.json says {said or default}, and only a part of these layers is written"]
    values = dict.fromkeys(counted or [default], most)
    *_, inner = config_places(config)
    out = with_fields(config, values) if counted else _with(config, inner, values)
    return out, [f"config.json: {f} is {n} now; it was {counted.get(f, 'missing')}" for f, n in values.items()]


def _shown(values: Mapping[str, int]) -> str:
    return some([f"{f} {n}" for f, n in values.items()])


def _with(config: Mapping[str, Any], inner: Mapping[str, Any], values: Mapping[str, int]) -> dict[str, Any]:
    if inner is config:
        return {**config, **values}
    return {**config, "text_config": {**inner, **values}}


def _found(names: Iterable[str], layers: int) -> _NamedLayers:
    numbered: dict[str, set[int]] = {}
    own: set[int] = set()
    for name in names:
        if m := _OWN.search(name):
            own.add(int(m["number"] or -1))
        elif m := LAYER.search(name):
            numbered.setdefault(name[: m.start(1)], set()).add(int(m[1]))
    # A model may have towers with layers of their own.
    found = max(numbered.values(), key=lambda s: (sum(n < layers for n in s), -len(s)), default=set[int]())
    beyond = {n - layers for n in found if n >= layers}
    return _NamedLayers(found.issuperset(range(layers)), frozenset(own | beyond))
