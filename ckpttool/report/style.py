"""Colour and weight on a terminal: headers and labels bold, verdicts in green, red and yellow, dtypes by their width,
notes and places dim. Every colour says what a word says, too.

Of the 16 colours of ANSI those are used that can be read on light and dark backgrounds alike. Bold is for red only:
many terminals make bold colours bright, and bright green, yellow and cyan vanish on white.

`NO_COLOR`, `FORCE_COLOR`, `CLICOLOR_FORCE` and `CLICOLOR=0` (https://no-color.org, https://force-color.org,
https://bixense.com/clicolors) decide before the terminal does, in this order; each counts when it is not empty. Stdout
and stderr are looked at separately.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import TextIO

RED, GREEN, YELLOW, CYAN, BOLD, DIM = "1;31", "32", "33", "36", "1", "2"
_NARROW, _HALF, _WIDE = "35", "36", "94"
"""Dtypes of at most 8 bits, floats of 16 and of more."""
_COLOURS = {
    RED: "error|different|does not fit|not possible|not equal|interrupted",
    GREEN: "verified|equal|fits|right",
    YELLOW: "warning",
    CYAN: "note|hint|info|would fit|next",
}
_OF = {word: colour for colour, words in _COLOURS.items() for word in words.split("|")}
_VERDICTS = {
    RED: "incomplete|different|dangerous|wrong|error|only|values|shape|dtype|no-longer|refused",
    GREEN: "complete|ok|equal|same|fits|right",
    YELLOW: "missing|slow|unknown|warning",
}
_OF_CELL = {word: colour for colour, words in _VERDICTS.items() for word in words.split("|")}
_DTYPE = r"(?:BF16|F16|F32|F64|C64|BOOL|[IU](?:8|16|32|64)|F4|F[68]_\w+)"
_IS_DTYPES = re.compile(rf"{_DTYPE}(?:, {_DTYPE})*")
_LINE = re.compile(
    r"(?P<note>^note: .*(?:\n {6}\S.*)*)"
    rf"|(?P<label>^ *(?:{'|'.join(_OF)})(?: [\w-]+)*:)"
    r"|(?P<place>^ +--> .*)"
    r"|(?P<verdict>(?<=^  )(?:ok|slow|missing|wrong)(?= {2,}\S))"
    r"|(?P<counted>\b(?P<number>\d[\d,]*) (?P<what>error|warning)s?\b)"
    r"|(?P<changed>\b[1-9][\d,]*(?= of [\d,]+ tensors? changed))"
    rf"|(?P<dtype>(?<=[ (]){_DTYPE}(?=[ ,)\n]|$))",
    re.MULTILINE,
)
_COLUMNS_BOLD = ("relative", "changed")
_COLUMNS_DIM = ("file", "where", "saved", "offset", "kind")
_COLUMNS_VERDICT = ("state", "verdict", "difference")
_COLUMNS_ALARM = ("nan", "inf")
"""Columns of numbers that should all be 0."""


def coloured(stream: TextIO) -> bool:
    """Whether what is written to the stream may have colours."""
    environment = os.environ
    if environment.get("NO_COLOR"):
        return False
    if environment.get("FORCE_COLOR") or environment.get("CLICOLOR_FORCE", "0") not in ("", "0"):
        return True
    return stream.isatty() and environment.get("TERM") != "dumb" and environment.get("CLICOLOR") != "0"


def styled(text: str, code: str) -> str:
    """The text in a colour or weight; as it is with ``code`` "" """
    return f"\x1b[{code}m{text}\x1b[0m" if code and text else text


def painted(text: str, stream: TextIO) -> str:
    """Prose with colour for what its lines begin with (``error:``, ``warning no-index:``, ``verified:``), for counts
    of errors and changes, and for dtypes."""
    return _LINE.sub(_paint, text) if coloured(stream) else text


def _paint(found: re.Match[str]) -> str:
    kind, text = found.lastgroup, found[0]
    if kind == "note":
        return styled("note:", CYAN) + styled(text[5:], DIM)
    if kind == "label":
        words = text.lstrip().removesuffix(":")
        code = next(code for word, code in _OF.items() if words == word or words.startswith(f"{word} "))
        return text[: len(text) - len(words) - 1] + styled(f"{words}:", code)
    if kind == "place":
        return styled(text, DIM)
    if kind == "verdict":
        return styled(text, _OF_CELL[text])
    if found["counted"]:
        none, error = found["number"] == "0", found["what"] == "error"
        return styled(text, (GREEN if error else "") if none else RED if error else YELLOW)
    return styled(text, BOLD if kind == "changed" else dtype_colour(text))


def dtype_colour(name: str) -> str:
    """The colour of a dtype's name; "" for integers of more than 8 bits, and for what is not a dtype."""
    first = name.partition(",")[0]
    if first.startswith(("F4", "F6_", "F8_")) or first in ("I8", "U8", "BOOL"):
        return _NARROW
    return _HALF if first in ("F16", "BF16") else _WIDE if first in ("F32", "F64", "C64") else ""


def column_colours(header: Sequence[str], names: int = 0) -> Callable[[int, int, str], str]:
    """A function from the number of a row (0 is the header), that of a column and a cell's text to its colour."""

    def colour(row: int, column: int, text: str) -> str:
        if not row:
            return BOLD
        title = header[column]
        if title == "dtype" or (column != names and _IS_DTYPES.fullmatch(text)):
            return dtype_colour(text)
        if title in _COLUMNS_VERDICT:
            return _OF_CELL.get(text.partition(" ")[0], "")
        if title in _COLUMNS_ALARM:
            return RED if text not in ("0", "-", "") else ""
        return BOLD if title in _COLUMNS_BOLD else DIM if title in _COLUMNS_DIM and column != names else ""

    return colour
