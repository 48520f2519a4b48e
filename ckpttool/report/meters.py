"""Small charts of text: a share as a bar, a few numbers as a row of columns, counts as a histogram.

A histogram and the norms of layers are rows of columns, with the numbers at both ends of their axis.

Eighths of a block, where the encoding of stdout and the terminal have them; elsewhere signs of ASCII.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence

LONGEST = 16
"""Characters of the longest bar, and of a row of columns."""
_ACROSS = "▏▎▍▌▋▊▉█"
_UP = "▁▂▃▄▅▆▇█"
_UP_ASCII = "._-=+*#@"
_FEW_GLYPHS = ("dumb", "unknown", "linux", "vt100", "vt102", "vt220", "ansi", "cons25")
"""What TERM says of terminals whose fonts have no eighths."""


def has_blocks() -> bool:
    """Whether stdout can show eighths of a block."""
    if os.environ.get("TERM", "") in _FEW_GLYPHS:
        return False
    try:
        (_ACROSS + _UP).encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def bar(share: float | None, columns: int) -> str:
    """A bar of up to so many columns for a share of 0 to 1; whatever is more than nothing can be seen. "" for what is
    not a number."""
    if share is None or math.isnan(share) or share <= 0:
        return ""
    share = min(share, 1.0)
    if not has_blocks():
        return "#" * max(1, round(share * columns))
    whole, rest = divmod(max(1, round(share * columns * 8)), 8)
    return _ACROSS[-1] * whole + (_ACROSS[rest - 1] if rest else "")


def spark(values: Sequence[float | None], columns: int) -> str:
    """A column for each value, from the smallest (lowest) to the largest; for several neighbours together the largest,
    where there are more values than ``columns``. What is not a number is a question mark."""
    if not values:
        return ""
    steps = _UP if has_blocks() else _UP_ASCII
    n = min(len(values), columns)
    groups = [values[i * len(values) // n : (i + 1) * len(values) // n] for i in range(n)]
    tops = [
        None if any(v is None or not math.isfinite(v) for v in g) else max(v for v in g if v is not None)
        for g in groups
    ]
    known = [t for t in tops if t is not None]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    # Nearly equal values look equal: noise of a percent must not look like a mountain.
    scale = max(high - low, 0.05 * abs(high))
    middle = (low + high - scale) / 2
    return "".join(
        "?" if t is None else steps[min(len(steps) - 1, int((t - middle) / scale * len(steps))) if scale else 0]
        for t in tops
    )


HEIGHT = 4
"""Lines of a histogram, without its axis."""
BIN = 2
"""Characters of a bin of a histogram."""


def histogram(counts: Sequence[int], first: str, last: str) -> list[str]:
    """Lines of columns ``BIN`` characters wide, the largest count ``HEIGHT`` lines high, above an axis from ``first``
    to ``last``. Whatever is more than nothing can be seen."""
    most, width = max(counts, default=0), BIN * len(counts)
    blocks = has_blocks()
    levels = len(_UP) if blocks else 1
    label = f"{most:,}"
    lines = []
    for line in reversed(range(HEIGHT)):
        columns = ""
        for n in counts:
            filled = (max(1, round(n / most * HEIGHT * levels)) if n else 0) - line * levels
            sign = " " if filled <= 0 else _UP[min(filled, levels) - 1] if blocks else "#"
            columns += sign * BIN
        tick = label if line == HEIGHT - 1 else "0" if not line else ""
        lines.append(f"  {tick:>{len(label)}} {'│' if blocks else '|'}{columns}".rstrip())
    axis = "└" + "─" * width if blocks else "+" + "-" * width
    gap = " " * max(width - len(first) - len(last) + 1, 1)
    margin = " " * (len(label) + 3)
    return [*lines, margin + axis, f"{margin}{first}{gap}{last}"]
