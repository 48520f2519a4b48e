"""Plain values of a pickle: those that may go to another format, and numbers that become tensors."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

from ckpttool.core.catalog import StoredTensor
from ckpttool.core.encodings import Encoding, Given
from ckpttool.core.files import DataFile
from ckpttool.errors import CorruptError

_MOST_STEPS = 1 << 24
"""A float32 number counts no further."""
_DEPTH = 32
_MOST = 1 << 20
"""Values that are looked at before something is taken for no plain value."""


def is_plain(value: Any) -> bool:
    """Whether a value consists of numbers, texts, lists and dicts alone."""
    stack, seen = [(value, 0)], 0
    while stack:
        v, depth = stack.pop()
        seen += 1
        if seen > _MOST or depth > _DEPTH:
            return False
        if isinstance(v, dict):
            stack += [(x, depth + 1) for item in v.items() for x in item]
        elif type(v) in (list, tuple):
            stack += [(x, depth + 1) for x in v]
        elif v is not None and type(v) not in (bool, int, float, str):
            return False
    return True


@dataclass(slots=True)
class Numbers:
    """Steps that are plain numbers in a pickle: files of decoded bytes, of which each says one number."""

    files: list[DataFile]
    _known: dict[tuple[str, float], StoredTensor] = field(default_factory=dict)

    def place(self, value: float, said_by: DataFile) -> StoredTensor:
        """A float32 number without axes that ``said_by`` has in its pickle. Raises CorruptError for no such number."""
        if not abs(value) <= _MOST_STEPS:
            raise CorruptError(f"the step is {value!s:.40}", where=str(said_by.place))
        key = str(said_by.place), float(value)
        if key not in self._known:
            data = struct.pack("<f", value)
            encoding = Encoding("given", key[0], [Given(0, data.hex())])
            self.files.append(said_by._replace(encoding=encoding))
            self._known[key] = StoredTensor("step", "F32", (), len(self.files) - 1, 0)
        return self._known[key]
