"""Casts between float types, with torch as the judge in ``make test-all`` and numpy in ``make test``."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ckpttool.core.dtypes import CASTABLE, numpy_dtype
from ckpttool.kernels import cast as module
from ckpttool.kernels.cast import cast
from tests.helpers.sample import some

BITS = {2: np.uint16, 4: np.uint32, 8: np.uint64}
Array = np.ndarray[Any, np.dtype[Any]]


def every(dtype: str) -> Array:
    """All patterns of 16 bits; around all of those for wider types, where rounding and overflow happen."""
    short = np.arange(1 << 16, dtype=np.uint32)
    if dtype in ("F16", "BF16"):
        return short.astype(np.uint16).view(numpy_dtype(dtype))
    low = np.array([0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    wide = ((short << 16)[:, None] | low).ravel().view(np.float32)
    if dtype == "F32":
        return wide
    with np.errstate(all="ignore"):
        exact = wide.astype(np.float64).view(np.uint64)
    rest = np.random.default_rng(0).integers(0, 1 << 63, 100_000, dtype=np.uint64)
    return np.concatenate([exact - np.uint64(1), exact, exact + np.uint64(1), rest]).view(np.float64)


def torch_cast(src: Array, src_dtype: str, dst_dtype: str) -> Array:
    import torch  # takes longer than these tests, and not every worker runs one

    tensor = torch.from_numpy(src.view(np.int16) if src_dtype == "BF16" else src)
    if src_dtype == "BF16":
        tensor = tensor.view(torch.bfloat16)
    types = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
    out = tensor.to(types[dst_dtype])
    return (out.view(torch.int16) if dst_dtype == "BF16" else out).numpy().view(numpy_dtype(dst_dtype))


def numpy_cast(src: Array, _src_dtype: str, dst_dtype: str) -> Array:
    """One number after the other, and not how ``cast`` does it. Importing torch takes longer than these tests."""
    with np.errstate(all="ignore"):
        return src.astype(numpy_dtype(dst_dtype))


def nearest(value: float, precision: int, least: int, most: int) -> Fraction | float:
    """``value`` to ``precision`` bits, half to even; steps are at least 2^least, what reaches 2^most is infinite."""
    if not math.isfinite(value):
        return value
    exact = Fraction(value)
    step = Fraction(2) ** max(math.frexp(value)[1] - precision, least)
    steps = round(exact / step)  # half to even, as fractions round
    return math.copysign(math.inf, value) if abs(steps * step) >= 2**most else steps * step


@pytest.mark.parametrize(("dtype", "precision", "least", "most"), [("F16", 11, -24, 16), ("BF16", 8, -133, 128)])
def test_doubles_are_rounded_once(dtype: str, precision: int, least: int, most: int) -> None:
    """Beside every halfway case, at distances that float32 does not hold, and where subnormals and infinities begin."""
    rng = np.random.default_rng(4)
    exponents = [*range(least - 3, least + 12), *range(-3, 4), *range(most - 3, most + 2)]
    halves = [(2 * n + 1) * 2.0 ** (e - precision) for e in exponents for n in rng.integers(0, 1 << precision, 12)]
    halves += [2.0**most - 2.0 ** (most - precision - 1), 2.0 ** (least - 1), 3 * 2.0 ** (least - 1)]
    near = [h * (1 + d * 2.0**-52) for h in halves for d in (-(2**22), -1, 0, 1, 3, 2**22, 2**30)]
    values = [*near, 0.0, 5e-324, 1.7976931348623157e308, math.inf, *rng.standard_normal(500)]
    src = np.array([*values, *(-v for v in values)])
    out = np.empty(src.shape, numpy_dtype(dtype))
    cast(src, out)
    found = out.astype(np.float64)
    for value, got in zip(src.tolist(), found.tolist(), strict=True):
        wanted = nearest(value, precision, least, most)
        assert (Fraction(got) if math.isfinite(got) else got) == wanted, (value.hex(), got, wanted)
        assert math.copysign(1, got) == math.copysign(1, value)
    cast(np.array([math.nan]), out[:1])
    assert np.isnan(out[:1].astype(np.float64)).all()


def narrows_twice(src_dtype: str, dst_dtype: str) -> bool:
    """Of these torch makes float32 first."""
    return src_dtype == "F64" and dst_dtype in ("F16", "BF16")


@pytest.mark.sample("F16-F16", "F16-F32", "F32-F16", "F16-F64", "BF16-F64")
@pytest.mark.parametrize("src_dtype", sorted(CASTABLE))
@pytest.mark.parametrize("dst_dtype", sorted(CASTABLE))
def test_every_pattern(src_dtype: str, dst_dtype: str) -> None:
    src = every(src_dtype)
    if narrows_twice(src_dtype, dst_dtype):
        with np.errstate(all="ignore"):
            src = src.astype(np.float32).astype(np.float64)
    want = some(torch_cast, numpy_cast)(src, src_dtype, dst_dtype)
    found = np.empty_like(want)
    cast(src, found)
    with np.errstate(all="ignore"):
        nan = np.isnan(want.astype(np.float64))
        assert np.array_equal(np.isnan(found.astype(np.float64)), nan)
    bits = BITS[found.itemsize]
    assert np.array_equal(found.view(bits)[~nan], want.view(bits)[~nan])


@pytest.mark.parametrize(("src_dtype", "dst_dtype"), [("F16", "F32"), ("F32", "F16")])
def test_every_number_of_float16(src_dtype: str, dst_dtype: str) -> None:
    """Without those that are handed to numpy, a whole block at a time, because one of them is not finite then."""
    src = every(src_dtype)
    with np.errstate(all="ignore"):
        src = src[np.abs(src.astype(np.float64)) < 65520]
    want = some(torch_cast, numpy_cast)(src, src_dtype, dst_dtype)
    found = np.empty_like(want)
    cast(src, found)
    bits = BITS[found.itemsize]
    assert np.array_equal(found.view(bits), want.view(bits))


@pytest.mark.parametrize(("src_dtype", "dst_dtype"), [("F16", "F32"), ("F32", "F16")])
def test_numpy_casts_where_subnormal_numbers_are_zero(
    src_dtype: str, dst_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    src = every(src_dtype)
    want, found = np.empty_like(src, numpy_dtype(dst_dtype)), np.empty_like(src, numpy_dtype(dst_dtype))
    cast(src, want)
    monkeypatch.setattr(module, "_has_subnormals", lambda: False)
    monkeypatch.setattr(module, "_to_half", None)
    monkeypatch.setattr(module, "_from_half", None)
    cast(src, found)
    assert np.array_equal(found, want, equal_nan=True)


@pytest.mark.thorough  # in short, without importing torch: the test above
@pytest.mark.parametrize(("src_dtype", "dst_dtype"), [("F16", "F32"), ("F32", "F16")])
def test_where_subnormal_numbers_are_zero(src_dtype: str, dst_dtype: str) -> None:
    """A program that uses this one may have told the processor so; F16 has numbers of models there."""
    import torch

    src = np.arange(1, 1 << 10, dtype=np.uint16).view(np.float16).astype(numpy_dtype(src_dtype))
    want = src.astype(numpy_dtype(dst_dtype))
    found = np.empty_like(want)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot")
    try:
        cast(src, found)
    finally:
        torch.set_flush_denormal(False)
    assert np.array_equal(found.view(BITS[found.itemsize]), want.view(BITS[want.itemsize]))


def test_too_large_is_infinite_without_a_warning() -> None:
    out = np.empty(3, np.float16)
    cast(np.array([70000.0, -1e30, 65519.0], np.float32), out)
    assert out.tolist() == [np.inf, -np.inf, 65504.0]


@pytest.mark.parametrize("shape", [(), (7,), (5, 4), (2, 3, 5), (1, 1, 30)])
def test_strided_views(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ELEMENTS", 4)
    values = np.random.default_rng(1).standard_normal([2 * n for n in shape] or [])
    src = np.asarray(values)[tuple(slice(None, None, 2) for _ in shape)]
    room = np.zeros([*shape[:-1], 3 * shape[-1]] if shape else [], ml_dtypes.bfloat16)
    dst = room[..., ::3] if shape else room
    cast(src, dst)
    assert np.array_equal(dst.astype(np.float32), src.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32))
