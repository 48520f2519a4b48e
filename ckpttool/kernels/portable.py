"""Sums, products and functions of floats that have the same bits on every processor.

IEEE 754 fixes the result of one addition, multiplication, division and square root, and numpy's loops over elements do
one of these to each. It does not fix the order of a sum, which BLAS and numpy choose by the width of their vectors, nor
the last bits of a sine. What merges and statistics need of both is made of such loops here:

* A sum is a tree that the number of its terms decides: the second half is added to the first, until few are left.
* A product of matrices is left to BLAS, but with factors that are cut to so few bits that no sum is rounded. What is
  exact is the same in any order, and with fused multiply-adds.
* Functions are series, of arguments that halving and roots have made small. They are off by some 1e-15.

``sum()`` is not used: Python 3.12 changed how it adds floats.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import factorial
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

_LANES = 16
"""Partial sums of a dot product that are added in float64."""


# -- sums


def _folded(terms: Array, lanes: int) -> Array:
    """Sum over the first axis until at most ``lanes`` terms are left. They are overwritten."""
    n = len(terms)
    while n > lanes:
        half = n // 2
        np.add(terms[:half], terms[n - half : n], out=terms[:half])
        n -= half
    return terms[:n]


def tree_sum(terms: Array) -> Any:
    """The sum over the first axis in float64, ``[n, ...]`` to ``[...]``: a number for one axis."""
    return _folded(np.array(terms, np.float64), 1)[0] if len(terms) else np.zeros(terms.shape[1:])[()]


def dot(a: Array, b: Array, work: Array) -> float:
    """The dot product of two vectors, float32 or float64. ``work`` is one like them, and may be one of them."""
    found = 0.0
    for lane in _folded(np.multiply(a, b, out=work), _LANES).tolist():
        found += lane
    return found


def row_dots(a: Array, b: Array, work: Array) -> Array:
    """The dot products of the rows of two float32 matrices, float64 ``(rows, 1)``; ``work`` is as for ``dot``."""
    lanes = _folded(np.multiply(a, b, out=work).T, _LANES)
    found = np.zeros(lanes.shape[1])
    for lane in lanes:
        found += lane
    return found[:, None]


# -- products of matrices


class Factor:
    """The right-hand factor of products of float32 matrices, [rank, columns].

    Both factors are rounded to multiples of a power of two, for each row of the left one and each column of this one,
    that leave sums of ``rank`` products 53 bits at most: float64 holds them exactly. That is 23 and 24 bits for a rank
    of 64. Before, each row of this factor is given a largest magnitude of about 1, and the other factor's column what
    that takes. An element is off by at most rank 2^-23 times the largest product that its row can have, which is what
    float32 resolves.
    """

    def __init__(self, factor: Array) -> None:
        rank = len(factor)
        bits = 53 - max(rank - 1, 0).bit_length()
        self._left = bits // 2
        with np.errstate(invalid="ignore"):
            wide = factor.astype(np.float64)
            self._exponents = _exponents(wide, axis=1)
            self._factor = _cut(np.ldexp(wide, -self._exponents), bits - self._left, axis=0)

    def product(self, left: Array) -> Array:
        """``left`` [rows, rank] times the factor, float32. What is not finite makes NaN of its row or column."""
        with np.errstate(invalid="ignore", over="ignore"):
            wide = np.ldexp(left.astype(np.float64), self._exponents.T)
            found: Array = (_cut(wide, self._left, axis=1) @ self._factor).astype(np.float32)
        return found


def _exponents(x: Array, axis: int) -> Array:
    """Binary exponents of the largest magnitudes along an axis, which is kept."""
    exponents: Array = np.frexp(np.abs(x).max(axis, keepdims=True, initial=0))[1]
    return exponents


def _cut(x: Array, bits: int, axis: int) -> Array:
    """Rounded to ``bits`` bits, counted from those of the largest magnitude along the axis."""
    # To this, float64 can add nothing smaller than a unit of the last bit.
    above = np.ldexp(1.5, 52 - bits + _exponents(x, axis))
    out: Array = x + above
    out -= above
    return out


# -- functions


def _series(t: Any, coefficients: Sequence[float]) -> Any:
    """``c_0 + c_1 t + c_2 t^2 ...`` of a number or an array, which is kept."""
    found = coefficients[-1] * t
    for c in coefficients[-2:0:-1]:
        found += c
        found *= t
    found += coefficients[0]
    return found


_TURN = (6.2831853069365025, 2.4308402025215864e-10, 8.089064995183803e-21)
"""2 pi as a sum, of which the first two have 33 bits: a million times these is exact."""
_SINE = tuple(1 / (-1) ** k / factorial(2 * k + 1) for k in range(7))
_VERSINE = tuple(1 / (-1) ** k / factorial(2 * k + 2) for k in range(7))
_ARCTANGENT = tuple(1 / (-1) ** k / (2 * k + 1) for k in range(9))


def sine_cosine(angle: Any) -> tuple[Any, Any]:
    """The sine and the cosine of a float64 number or array, in radians."""
    turns = np.rint(angle * (1 / _TURN[0]))
    eighth = angle
    for part in _TURN:
        eighth = eighth - turns * part
    eighth = eighth * 0.125
    square = eighth * eighth
    sine = eighth * _series(square, _SINE)
    versine = square * _series(square, _VERSINE)  # 1 - cos, which loses nothing where the angle is small
    for _ in range(3):  # of twice the angle
        sine, versine = 2 * sine * (1 - versine), 2 * sine * sine
    return sine, 1 - versine


def arccosine(cosine: Any) -> Any:
    """The angle in [0, pi] of a float64 number or array in [-1, 1]."""
    tangent = np.sqrt((1 - cosine) / 2) / (1 + np.sqrt((1 + cosine) / 2))  # of a quarter of the angle
    for _ in range(3):  # of half the angle
        tangent = tangent / (1 + np.sqrt(1 + tangent * tangent))
    return 32 * tangent * _series(tangent * tangent, _ARCTANGENT)


_FAR = 64.0
"""Beside 1, e to minus this is nothing: 1.6e-28."""


def softmax(rows: Array) -> Array:
    """exp(x) by the sum of exp(x) in each row of a float32 matrix: float64."""
    most, least = (f(1, keepdims=True).astype(np.float64) for f in (rows.max, rows.min))
    # Any number may be subtracted; from the middle, powers are small.
    x: Array = np.subtract(rows, np.where(most - least > _FAR, most, (most + least) / 2), dtype=np.float64)
    np.maximum(x, -_FAR, out=x)
    power = _exponential(x)
    power /= tree_sum(power.T)[:, None]
    return power


def _exponential(x: Array) -> Array:
    """exp(x) of a float64 array, which is overwritten."""
    halvings = 0
    reach = max(float(x.max(initial=0)), -float(x.min(initial=0)))
    while reach > 0.25:
        reach /= 2
        halvings += 1
    if halvings:
        x *= 0.5**halvings
    # The Pade approximant of 5 and 5 degrees, (even + odd) / (even - odd), which up to 1/4 is off by 2e-17.
    square = x * x
    odd = square + 420
    odd *= square
    odd += 15120
    odd *= x
    even = np.multiply(square, 30, out=x)
    even += 3360
    even *= square
    even += 30240
    np.add(even, odd, out=square)
    even -= odd
    square /= even
    for _ in range(halvings):
        square *= square
    return square


def logarithm(x: Array) -> Array:
    """The natural logarithm of a float64 array of positive numbers, which is overwritten; best near 1."""
    roots = 0
    while x.size and max(float(x.max()) - 1, 1 - float(x.min())) > 0.06:  # so that NaN ends it
        np.sqrt(x, out=x)
        roots += 1
    z = x - 1
    x += 1
    z /= x
    square = np.multiply(z, z, out=x)
    z *= _series(square, [2.0 ** (roots + 1) / (2 * k + 1) for k in range(5)])
    return z
