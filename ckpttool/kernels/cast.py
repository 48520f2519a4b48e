"""Conversions between float types, block by block."""

from __future__ import annotations

from typing import Any

import numpy as np


def cast(src: np.ndarray[Any, Any], dst: np.ndarray[Any, Any]) -> None:
    """Store ``src`` in ``dst``, rounded to nearest even."""
    with np.errstate(all="ignore"):
        if src.dtype.itemsize == 8 and dst.dtype.itemsize == 2:
            src = src.astype(np.float32)
        np.copyto(dst, src, casting="unsafe")
