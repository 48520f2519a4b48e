"""Colour where it means something: what a line begins with (error, warning, note, verdict), on a terminal.

`NO_COLOR` and `FORCE_COLOR` (https://no-color.org, https://force-color.org) decide before the terminal does, and
NO_COLOR before FORCE_COLOR; either counts when it is not empty. Stdout and stderr are looked at separately.
"""

from __future__ import annotations

import os
import re
from typing import TextIO

RED, GREEN, YELLOW, CYAN = 31, 32, 33, 36
_COLOURS = {
    RED: "error|different|does not fit|not possible|not equal",
    GREEN: "verified|equal|fits|right",
    YELLOW: "warning",
    CYAN: "note|hint|info|would fit",
}
_OF = {word: colour for colour, words in _COLOURS.items() for word in words.split("|")}
_LABEL = re.compile(rf"^( *)({'|'.join(_OF)})((?: [\w-]+)*:)", re.MULTILINE)


def coloured(stream: TextIO) -> bool:
    """Whether what is written to the stream may have colours."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def painted(text: str, stream: TextIO) -> str:
    """The text with colour for what its lines begin with: ``error:``, ``warning no-index:``, ``verified:``."""
    if not coloured(stream):
        return text
    return _LABEL.sub(lambda m: f"{m[1]}\x1b[1;{_OF[m[2]]}m{m[2]}{m[3]}\x1b[0m", text)
