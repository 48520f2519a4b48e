"""JSON files beside a checkpoint: configs, indexes, tokenizers. Other people wrote them, so all of it is bounded."""

from __future__ import annotations

import json
from typing import Any

from ckpttool.storage.place import DataFile, Place

MAX_BYTES = 100_000_000
"""What a safetensors header may have, too: the index of a million tensors."""
MAX_DEPTH = 64
"""Containers in containers; configs have five. Indented, a value takes its depth in spaces on every line."""


def load_json(place: Place) -> Any:
    """The value of a JSON file. Raises OSError, and ValueError as ``parse_json`` does."""
    size = DataFile.at(place).size or MAX_BYTES  # room for what is asked for is made before it is read
    with place.open("rb") as f:
        return parse_json(f.read(min(size, MAX_BYTES) + 1))


def parse_json(data: bytes) -> Any:
    """The value of a JSON text. Raises ValueError, in words, for what is no JSON or beyond the limits.

    Python's own limit is 4,300 digits for a whole number.
    """
    if len(data) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES:,} bytes")
    try:
        value = json.loads(data)
    except UnicodeDecodeError:
        raise ValueError("it is no UTF-8 text") from None
    except json.JSONDecodeError:
        raise
    except (RecursionError, ValueError) as e:
        digits = isinstance(e, ValueError)
        raise ValueError("it has a number of more than 4,300 digits" if digits else _DEEP) from None
    if not shallow(value, MAX_DEPTH):
        raise ValueError(_DEEP)
    return value


_DEEP = f"it is nested deeper than {MAX_DEPTH} levels"


def shallow(value: Any, most: int) -> bool:
    """Whether no more than ``most`` containers lie in each other."""
    level = [value]
    for _ in range(most + 1):
        level = [v for v in level if type(v) is dict or type(v) is list]
        if not level:
            return True
        level = [inner for v in level for inner in (v.values() if type(v) is dict else v)]
    return False


def indented(value: Any) -> bytes:
    """The text of a config or an index. A lone surrogate leaves as the escape it came as: UTF-8 has none."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode(errors="backslashreplace")
