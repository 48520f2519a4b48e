"""Values of Megatron's arguments and of config.json, of which nothing is believed: types and ranges are checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from ckpttool.containers.pickle import Global, PickledObject, printable
from ckpttool.errors import CorruptError, IncompleteError, UnsupportedError

_MOST = 1 << 40
"""A whole number beyond it is no size of a model."""
_HINT = "put the model's config.json beside the checkpoint"


class Fields:
    """Arguments (``args.x``) or fields of config.json, by name. None stands for what is not there."""

    def __init__(self, values: Mapping[str, Any], called: str) -> None:
        self.values = values
        self.called = called
        """Prefix of a name in messages: ``args.`` or ``config.json: ``."""

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def name(self, name: str) -> str:
        """The full name of a field, for messages."""
        return f"`{self.called}{name}`"

    def shown(self, name: str) -> str:
        """A value for a message."""
        return f"{self.name(name)} is {shown(self.values.get(name))}"

    def wrong(self, name: str, what: str) -> CorruptError:
        """The error of a value that is none of the kind that the name asks for."""
        return CorruptError(f"{self.shown(name)}, and must be {what}")

    def missing(self, name: str) -> IncompleteError:
        """The error of a value that decides what the model is."""
        return IncompleteError(f"{self.name(name)} is not there, and the model depends on it", hint=_HINT)

    def no(self, name: str, why: str) -> UnsupportedError:
        """The error of a value that the other side has no counterpart for."""
        return UnsupportedError(f"{self.shown(name)}: {why}")

    def whole(self, name: str, *, least: int = 0) -> int | None:
        """A whole number, if it is there."""
        value = self.values.get(name)
        if value is None:
            return None
        if type(value) is float and value.is_integer() and abs(value) < _MOST:
            value = int(value)
        if type(value) is not int or not least <= value < _MOST:
            raise self.wrong(name, f"a whole number from {least} on")
        return value

    def size(self, name: str) -> int:
        """A whole number from 1 on. Raises IncompleteError where it is not there."""
        value = self.whole(name, least=1)
        if value is None:
            raise self.missing(name)
        return value

    def number(self, name: str) -> float | None:
        """A number, if it is there."""
        value = self.values.get(name)
        if value is None:
            return None
        if type(value) not in (int, float) or abs(value) > _MOST or not isfinite(value):
            raise self.wrong(name, "a number")
        return float(value)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """A truth value."""
        value = self.values.get(name)
        if value is None:
            return default
        if value is not True and value is not False:
            raise self.wrong(name, "true or false")
        return bool(value)

    def text(self, name: str) -> str | None:
        """A text, if it is there."""
        value = self.values.get(name)
        if value is not None and type(value) is not str:
            raise self.wrong(name, "a text")
        return value

    def inner(self, name: str) -> Fields:
        """A dict, empty if it is not there."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.wrong(name, "a dict")
        return Fields(value or {}, f"{self.called}{name}.")

    def numbers(self, name: str, count: int) -> list[int] | None:
        """``count`` whole numbers, if they are there."""
        value = self.values.get(name)
        if value is None:
            return None
        fine = isinstance(value, Sequence) and len(value) == count and all(type(v) in (int, bool) for v in value)
        if not fine or isinstance(value, str):
            raise self.wrong(name, f"{count} whole numbers")
        return [int(v) for v in value]


def shown(value: Any) -> str:
    """A value of a file, for a message: short, whatever it is."""
    if value is None or isinstance(value, (bool, int, float, str, list, tuple)):
        return printable(repr(value) if not isinstance(value, int) or abs(value) < _MOST else "a huge number", 60)
    if isinstance(value, Global):
        return f"{value}"
    return f"of type {printable(value.cls, 60) if isinstance(value, PickledObject) else type(value).__name__}"
