"""Conversions between float types, block by block: F16, BF16, F32 and F64, rounded to nearest even.

The results are torch's, bit for bit, apart from the payload of NaNs (torch itself has two for one conversion). That
includes F64 to F16 and BF16, which torch rounds twice, by way of F32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_ELEMENTS = 64 << 10
"""Elements that are converted at a time where an intermediate type is needed."""


def cast(src: np.ndarray[Any, Any], dst: np.ndarray[Any, Any]) -> None:
    """Store ``src`` in ``dst``, which has its shape and another float type.

    What is too large becomes an infinity, NaN stays NaN; neither is worth a warning.
    """
    with np.errstate(all="ignore"):
        if src.dtype.itemsize == 8 and dst.dtype.itemsize == 2:
            _twice(src, dst)
        else:
            np.copyto(dst, src, casting="unsafe")


def _twice(src: np.ndarray[Any, Any], dst: np.ndarray[Any, Any]) -> None:
    """By way of float32, in pieces along the first axis that keep the intermediate block small."""
    if src.size <= _ELEMENTS:
        np.copyto(dst, src.astype(np.float32), casting="unsafe")
        return
    step = max(1, _ELEMENTS * src.shape[0] // src.size)
    for a in range(0, src.shape[0], step):
        if step == 1:
            _twice(src[a], dst[a])
        else:
            _twice(src[a : a + step], dst[a : a + step])
