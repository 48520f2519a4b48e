"""Units and sources of a plan as JSON, for processes that do not share the memory of the one that planned. Pure.

A named tuple, or an encoding, is an object of one entry, its class and its fields; any other tuple is a list.
"""

from __future__ import annotations

from array import array
from typing import Any

from ckpttool.core import plan
from ckpttool.core.encodings import Blocks8, Encoding, Given, Moment, Span, Text

_CLASSES: dict[str, Any] = {name: c for name, c in vars(plan).items() if hasattr(c, "_fields")} | {
    c.__name__: c for c in (Blocks8, Encoding, Given, Moment, Span, Text)
}


def encode(value: Any) -> Any:
    """What ``json`` can write, of a named tuple of the plan and all that is in it."""
    if isinstance(value, Encoding):
        return {"Encoding": [value.name, value.path, encode(tuple(value.parts))]}
    if isinstance(value, array):
        return value.tolist()
    if not isinstance(value, tuple):
        return value
    items = [encode(v) for v in value]
    return {type(value).__name__: items} if hasattr(value, "_fields") else items


def decode(value: Any) -> Any:
    """The inverse of ``encode``, of what ``json`` has read."""
    if isinstance(value, list):
        return tuple([decode(v) for v in value])
    if isinstance(value, dict):
        ((name, items),) = value.items()
        return _CLASSES[name](*decode(items))
    return value
