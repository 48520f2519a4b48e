"""JSON files beside a checkpoint: configs, indexes, tokenizers. Other people wrote them, so all of it is bounded."""

from __future__ import annotations

import json
import re
from typing import Any

from ckpttool.core.files import DataFile, Place

MAX_BYTES = 100_000_000
"""The limit of a safetensors header, too: the index of a million tensors."""
MAX_CONFIG = 8_000_000
"""Bytes of a config; the largest known, with 22,000 names of classes, has 2 MB."""
MAX_VALUES = 8_000_000
"""Commas and opening brackets. A value of three bytes takes 64 in memory; no index or tokenizer of MAX_BYTES has more
than 4 million."""
_CONFIG = re.compile(r"(?!tokenizer_config)(.*_)?config\.json\Z")
"""Tokens that speech was cut into are in tokenizer_config.json, 65,000 of them in 12 MB."""
MAX_DEPTH = 64
"""Containers in containers; configs have five. Indented, a value takes its depth in spaces on every line."""


class TooLargeError(ValueError):
    """A text is larger than any that is what its name says; str() is ``it has more than 8,000,000 bytes``."""


def load_json(place: Place) -> Any:
    """The value of a JSON file. Raises OSError, and ValueError as ``parse_json`` does.

    A config has MAX_CONFIG bytes at most, other files have MAX_BYTES.
    """
    most = MAX_CONFIG if _CONFIG.match(place.name) else MAX_BYTES
    size = DataFile.at(place).size or most  # room for what is asked for is made before it is read
    with place.open("rb") as f:
        return parse_json(f.read(min(size, most) + 1), most)


def parse_json(data: bytes, most: int = 0) -> Any:
    """The value of a JSON text of ``most`` bytes, by default MAX_BYTES.

    Raises TooLargeError beyond the limits, and ValueError, in words, for what is not JSON. Python's own limit is 4,300
    digits for a whole number.
    """
    if len(data) > (most or MAX_BYTES):
        raise TooLargeError(f"it has more than {most or MAX_BYTES:,} bytes")
    if sum(map(data.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise TooLargeError(f"it has more than {MAX_VALUES:,} values")
    try:
        value = json.loads(data)
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8 text") from None
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
