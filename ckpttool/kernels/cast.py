"""Conversions between float types, block by block: F16, BF16, F32 and F64, rounded to nearest even.

The results are torch's, bit for bit, apart from the payload of NaNs (torch itself has two for one conversion) and from
F64 to F16 and BF16: torch goes by way of F32 and rounds twice, here every number is rounded once.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

_ELEMENTS = 64 << 10
"""Elements that are converted at a time where an intermediate type is needed."""


_U32 = np.uint32
_HALF, _SINGLE = np.dtype(np.float16), np.dtype(np.float32)
_NO_SIGN, _EXPONENT = _U32(0x7FFFFFFF), _U32(0x7F800000)
_TO_INFINITY = _U32(0x477FF000)
"""The bits of 65,520, the least number that rounds to an infinity of float16; those of NaN are larger."""
_LEAST_NORMAL = _U32(113 << 23)
"""The bits of 2^-14, the least normal number of float16: below it, steps are as long as there."""
_MAGIC = _U32(13 << 23)
"""Added to a number's exponent gives a number with a last bit as large as the step of float16 at the first one."""
_UP, _DOWN = np.float32(2.0**112), np.float32(2.0**-112)
"""Factors between the exponents of both types, whose biases are 15 and 127."""
_LEAST, _LEAST_HALF = np.float32(2.0**-149), np.float32(2.0**-24)
"""The least numbers of both types; these, times the factors, are subnormal."""


class _Scratch(threading.local):
    """Bits of two blocks, for each thread."""

    def __init__(self) -> None:
        self.blocks = np.empty((2, _ELEMENTS), np.uint32)


_scratch = _Scratch()


def cast(src: np.ndarray[Any, Any], dst: np.ndarray[Any, Any]) -> None:
    """Store ``src`` in ``dst``, which has its shape and another float type.

    What is too large becomes an infinity, NaN stays NaN; neither is worth a warning.
    """
    with np.errstate(all="ignore"):
        if src.dtype.itemsize == 8 and dst.dtype.itemsize == 2:
            _from_double(src, dst)
        elif (
            {src.dtype, dst.dtype} == {_HALF, _SINGLE}
            and src.flags.c_contiguous
            and dst.flags.c_contiguous
            and _has_subnormals()
        ):
            # numpy takes these one by one; on the bits of whole blocks it is two to three times as fast.
            pieces = _to_half if dst.dtype == _HALF else _from_half
            src, dst = src.reshape(-1), dst.reshape(-1)
            for a in range(0, src.size, _ELEMENTS):
                pieces(src[a : a + _ELEMENTS], dst[a : a + _ELEMENTS])
        else:
            np.copyto(dst, src, casting="unsafe")


def _from_double(src: np.ndarray[Any, Any], dst: np.ndarray[Any, Any]) -> None:
    """Convert to a type of 16 bits, in pieces along the first axis that keep the intermediate block small.

    The intermediate float32 is cut off, with a last bit that says whether anything was. It has 13 and more bits that
    the result does not have, so that rounding it is rounding the number itself, halfway cases included.
    """
    if src.size > _ELEMENTS:
        step = max(1, _ELEMENTS * src.shape[0] // src.size)
        for a in range(0, src.shape[0], step):
            if step == 1:
                _from_double(src[a], dst[a])
            else:
                _from_double(src[a : a + step], dst[a : a + step])
        return
    near = np.array(src, np.float32)
    bits, wide = near.view(_U32), near.astype(np.float64)
    inexact = (wide != src) & (src == src)  # noqa: PLR0124 - NaN is not
    bits -= np.abs(wide) > np.abs(src)
    bits |= inexact
    np.copyto(dst, near, casting="unsafe")


def _has_subnormals() -> bool:
    """Whether this thread computes with subnormal numbers: torch.set_flush_denormal, and libraries that are built with
    -ffast-math, make zeros of them in the whole process."""
    return bool(_LEAST * _UP) and bool(_LEAST_HALF * _DOWN)


def _from_half(src: np.ndarray[Any, Any], dst: np.ndarray[Any, Any]) -> None:
    """float16 to float32: the exponent, in its new place, is multiplied up, which makes subnormal numbers normal."""
    halves, bits = src.view(np.uint16), dst.view(_U32)
    sign = _scratch.blocks[0, : src.size]
    low = sign.view(np.uint16)[: src.size]
    np.bitwise_and(halves, np.uint16(0x7C00), out=low)
    if low.max() == 0x7C00:  # an infinity or NaN
        np.copyto(dst, src, casting="unsafe")
        return
    np.left_shift(halves, _U32(13), out=bits, dtype=_U32)
    np.bitwise_and(bits, _U32(0x10000000), out=sign)
    np.left_shift(sign, _U32(3), out=sign)
    np.bitwise_and(bits, _U32(0x0FFFFFFF), out=bits)
    np.multiply(dst, _UP, out=dst)
    np.bitwise_or(bits, sign, out=bits)


def _to_half(src: np.ndarray[Any, Any], dst: np.ndarray[Any, Any]) -> None:
    """float32 to float16: adding a number that leaves no room for what float16 does not hold rounds to nearest even."""
    bits, magic = _scratch.blocks[:, : src.size]
    np.bitwise_and(src.view(_U32), _NO_SIGN, out=bits)
    if bits.max() >= _TO_INFINITY:
        np.copyto(dst, src, casting="unsafe")
        return
    np.bitwise_and(bits, _EXPONENT, out=magic)
    np.maximum(magic, _LEAST_NORMAL, out=magic)
    np.add(magic, _MAGIC, out=magic)
    value = bits.view(np.float32)
    np.add(value, magic.view(np.float32), out=value)
    np.subtract(value, magic.view(np.float32), out=value)
    np.multiply(value, _DOWN, out=value)
    np.right_shift(bits, _U32(13), out=bits)
    np.right_shift(src.view(_U32), _U32(16), out=magic)
    np.bitwise_and(magic, _U32(0x8000), out=magic)
    np.bitwise_or(bits, magic, out=bits)
    np.copyto(dst.view(np.uint16), bits, casting="unsafe")
