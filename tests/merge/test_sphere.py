"""The spherical methods against their formulas, carried out on whole vectors in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.errors import UsageError
from ckpttool.kernels.merge.base import Array
from ckpttool.kernels.merge.sphere import METHODS
from ckpttool.kernels.portable import dot, row_dots
from tests.merge.driver import run_method

SHAPES = st.sampled_from([(), (1,), (37,), (5, 11), (3, 4, 5), (2, 5000)])
CHUNKS = st.sampled_from([1, 7, 64, 1 << 17])
SEEDS = st.integers(0, 1 << 16)


def models(seed: int, count: int, shape: tuple[int, ...]) -> list[Array]:
    rng = np.random.default_rng(seed)
    common = rng.standard_normal(shape)
    return [np.asarray(common + rng.standard_normal(shape), np.float32) for _ in range(count)]


def weights(*values: float) -> list[dict[str, float]]:
    return [{"weight": v} for v in values]


def close(result: Array, expected: Array) -> None:
    """Equal but for float32 rounding, beside the size of the tensor's elements."""
    np.testing.assert_allclose(result, expected, rtol=2e-6, atol=4e-6 * float(np.abs(expected).max(initial=1e-30)))


def slerped(a: Array, b: Array, t: float, *, straight: float = 1 - 1e-14) -> Array:
    """Along the arc between two float64 vectors, or along the line from this cosine on."""
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    cosine = float(np.vdot(a, b)) / lengths if lengths else 0.0
    if abs(cosine) >= straight:
        return (1 - t) * a + t * b
    theta = np.arccos(cosine)
    return np.asarray((np.sin((1 - t) * theta) * a + np.sin(t * theta) * b) / np.sin(theta))


@given(SEEDS, st.integers(1, 20000))
def test_dot_products_are_exact_to_1e_7(seed: int, size: int) -> None:
    a, b = models(seed, 2, (size,))
    exact = np.dot(a.astype(np.float64), b.astype(np.float64))
    scale = np.linalg.norm(a) * np.linalg.norm(b)
    assert abs(dot(a, b, np.empty_like(a)) - exact) <= 2e-7 * scale
    pair = np.stack([a, b])
    rows = row_dots(pair, np.stack([b, b]), pair)
    assert rows.shape == (2, 1)
    assert abs(rows[0, 0] - exact) <= 2e-7 * scale


@given(SEEDS, CHUNKS, SHAPES, st.floats(-0.5, 1.5))
def test_slerp(seed: int, chunk: int, shape: tuple[int, ...], t: float) -> None:
    base, x = models(seed, 2, shape)
    result = run_method(METHODS["slerp"], [x], base, whole={"t": t}, chunk=chunk)
    close(result, slerped(base.astype(np.float64), x.astype(np.float64), t, straight=0.9995))


@given(SEEDS, CHUNKS)
def test_slerp_of_unit_vectors_is_one(seed: int, chunk: int) -> None:
    a, b = (x / np.linalg.norm(x) for x in models(seed, 2, (40,)))
    result = run_method(METHODS["slerp"], [b], a, whole={"t": 0.3}, chunk=chunk)
    assert np.linalg.norm(result) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(("a", "b"), [(1, 1), (1, -1), (0, 0), (1, 2)])
def test_slerp_of_parallel_vectors_goes_straight(a: float, b: float) -> None:
    (x,) = models(3, 1, (30,))
    result = run_method(METHODS["slerp"], [np.float32(b) * x], np.float32(a) * x, whole={"t": 0.25})
    close(result, (0.75 * a + 0.25 * b) * x.astype(np.float64))


@given(SEEDS, CHUNKS, SHAPES, st.booleans(), st.sampled_from(["flatten", "last", "first"]))
def test_nuslerp(seed: int, chunk: int, shape: tuple[int, ...], based: bool, vectors: str) -> None:
    base, *steps = models(seed, 3, shape)
    # Sharp angles: of vectors that are nearly opposite the formula is mostly rounding errors.
    xs = [np.asarray(np.abs(step) + 0.5 + (base if based else 0), np.float32) for step in steps]
    origin = base.astype(np.float64) if based else np.zeros(shape)
    a, b = (x.astype(np.float64) - origin for x in xs)
    expected = np.empty(shape)
    axis = {"flatten": None, "last": -1, "first": 0}[vectors] if shape else None
    if axis is None:
        expected[...] = slerped(a, b, 0.75)
    else:
        lines = [np.moveaxis(v, axis, -1) for v in (a, b, expected)]
        for at in np.ndindex(lines[0].shape[:-1]):
            lines[2][at] = slerped(lines[0][at], lines[1][at], 0.75)
    whole = {"nuslerp_flatten": vectors == "flatten", "nuslerp_row_wise": vectors == "first"}
    result = run_method(
        METHODS["nuslerp"], xs, base if based else None, per_model=weights(0.5, 1.5), whole=whole, chunk=chunk
    )
    close(result, expected + origin)


def test_nuslerp_of_cancelling_weights_takes_the_middle() -> None:
    xs = models(1, 2, (50,))
    result = run_method(METHODS["nuslerp"], xs, per_model=weights(0.5, -0.5))
    close(result, slerped(xs[0].astype(np.float64), xs[1].astype(np.float64), 0.5))


@pytest.mark.parametrize(
    "whole", [{}, {"nuslerp_flatten": False}, {"nuslerp_flatten": False, "nuslerp_row_wise": True}]
)
@pytest.mark.parametrize("shape", [(), (1,), (6, 1), (1, 6), (6, 70), (2, 3, 7)])
def test_nuslerp_of_opposite_vectors_goes_straight(whole: dict[str, Any], shape: tuple[int, ...]) -> None:
    (x,) = models(4, 1, shape)
    result = run_method(METHODS["nuslerp"], [x, -x], per_model=weights(3, 1), whole=whole)
    close(result, 0.5 * x.astype(np.float64))
    zero = run_method(METHODS["nuslerp"], [0 * x, 0 * x], per_model=weights(3, 1), whole=whole)
    assert not zero.any()


def tangent_mean(vectors: list[Array], w: Array) -> Array:
    """multislerp as it is described, detour through the tangent plane and all."""
    v = np.array([x.reshape(-1) for x in vectors], np.float64)
    norms = np.linalg.norm(v, axis=1)
    units = v / norms[:, None]
    mean = w @ units
    mean /= np.linalg.norm(mean)
    tangent = w @ (units - (units @ mean)[:, None] * mean)
    length = np.linalg.norm(tangent) + 1e-30
    point = np.cos(length) * mean + np.sin(length) / length * tangent
    result: Array = (w @ norms) * point
    return result.reshape(vectors[0].shape)


@given(SEEDS, CHUNKS, SHAPES, st.booleans(), st.booleans(), st.integers(2, 5))
def test_multislerp(seed: int, chunk: int, shape: tuple[int, ...], based: bool, normalize: bool, count: int) -> None:
    base, *xs = models(seed, count + 1, shape)
    if np.prod(shape) < 30:  # few elements may cancel
        xs = [np.abs(x) + 1 for x in xs]
        base = np.zeros(shape, np.float32)
    w = np.linspace(0.5, 1.5, count)
    origin = base.astype(np.float64) if based else np.zeros(shape)
    expected = origin + tangent_mean([x - origin for x in xs], w / w.sum() if normalize else w)
    result = run_method(
        METHODS["multislerp"],
        xs,
        base if based else None,
        per_model=weights(*w),
        whole={"normalize_weights": normalize},
        chunk=chunk,
    )
    close(result, expected)


def test_multislerp_where_directions_cancel() -> None:
    (x,) = models(5, 1, (60,))
    assert not run_method(METHODS["multislerp"], [x, -x], per_model=weights(1, 1)).any()
    close(run_method(METHODS["multislerp"], [2 * x, -x], per_model=weights(1, 1)), x.astype(np.float64) / 2)
    with pytest.raises(UsageError, match=r"cancel"):
        run_method(METHODS["multislerp"], [x, -x, x], per_model=weights(1, 2, 1))
    with pytest.raises(UsageError, match=r"sum to 0"):
        run_method(METHODS["multislerp"], [x, x], per_model=weights(1, -1))


def test_multislerp_of_frozen_tensors_is_the_base() -> None:
    (x,) = models(6, 1, (60,))
    np.testing.assert_array_equal(run_method(METHODS["multislerp"], [x, x, x], x, per_model=weights(1, 2, 3)), x)
    np.testing.assert_array_equal(run_method(METHODS["multislerp"], [x], x + 1, per_model=weights(1)), x)


def karcher_mean(vectors: list[Array], steps: int) -> Array:
    """The iteration on the sphere itself."""
    v = np.array([x.reshape(-1) for x in vectors], np.float64)
    norms = np.linalg.norm(v, axis=1)
    units = v / norms[:, None]
    point = units.mean(0)
    point /= np.linalg.norm(point)
    for _ in range(steps):
        cosines = np.clip(units @ point, -1, 1)
        pulls = [
            np.arccos(c) / np.sqrt(1 - c * c) * (u - c * point)
            for c, u in zip(cosines, units, strict=True)
            if np.arccos(c) >= 1e-5
        ]
        tangent = np.sum(pulls, axis=0) / len(units)
        length = np.linalg.norm(tangent)
        if not length > 1e-5:
            break
        point = np.cos(length) * point + np.sin(length) / length * tangent
        point /= np.linalg.norm(point)
    result: Array = norms.mean() * point
    return result.reshape(vectors[0].shape)


@given(SEEDS, CHUNKS, st.sampled_from([(37,), (5, 11), (3, 4, 5)]), st.integers(2, 5), st.integers(0, 12))
def test_karcher(seed: int, chunk: int, shape: tuple[int, ...], count: int, steps: int) -> None:
    xs = models(seed, count, shape)
    result = run_method(METHODS["karcher"], xs, whole={"max_iter": steps}, chunk=chunk)
    close(result, karcher_mean(xs, steps))


@given(SEEDS)
def test_karcher_mean_is_where_the_logarithms_cancel(seed: int) -> None:
    xs = models(seed, 4, (400,))
    point = run_method(METHODS["karcher"], xs, whole={"max_iter": 100}).astype(np.float64)
    point /= np.linalg.norm(point)
    pull = np.zeros(400)
    for x in xs:
        unit = x / np.linalg.norm(x.astype(np.float64))
        cosine = unit @ point
        pull += np.arccos(cosine) / np.sqrt(1 - cosine**2) * (unit - cosine * point)
    assert np.linalg.norm(pull) < 1e-4


def test_karcher_of_degenerate_vectors() -> None:
    (x,) = models(7, 1, (6, 10))
    wide = x.astype(np.float64)
    np.testing.assert_array_equal(run_method(METHODS["karcher"], [x]), x)
    close(run_method(METHODS["karcher"], [x, x, x]), wide)
    close(run_method(METHODS["karcher"], [x, 3 * x]), 2 * wide)
    close(run_method(METHODS["karcher"], [x, 0 * x]), wide / 2)  # no direction, but part of the mean norm
    close(run_method(METHODS["karcher"], [x, -x]), wide)  # no mean direction: the first model's
    assert not run_method(METHODS["karcher"], [0 * x, 0 * x]).any()


def stock(base: Array, xs: list[Array]) -> Array:
    """Model Stock of float64 vectors."""
    d = [x - base for x in xs]
    n = len(d)
    cosines = [
        np.vdot(d[i], d[j]) / max(np.linalg.norm(d[i]) * np.linalg.norm(d[j]), 1e-6)
        for i in range(n)
        for j in range(i + 1, n)
    ]
    cosine = np.clip(cosines, -1, 1).mean()
    divisor = 1 + (n - 1) * cosine
    t = n * cosine / divisor if abs(divisor) >= 1e-6 else 0
    return np.asarray(t * np.mean(xs, axis=0) + (1 - t) * base)


@given(SEEDS, CHUNKS, st.sampled_from([(37,), (5, 11), (3, 4, 50)]), st.integers(2, 4), st.booleans())
def test_model_stock(seed: int, chunk: int, shape: tuple[int, ...], count: int, by_row: bool) -> None:
    base, *xs = (x.astype(np.float64) for x in models(seed, count + 1, shape))
    expected = stock(base, xs)
    if by_row:
        rows = [v.reshape(-1, shape[-1]) for v in (base, *xs)]
        expected = np.stack([stock(r[0], list(r[1:])) for r in zip(*rows, strict=True)]).reshape(shape)
    result = run_method(
        METHODS["model_stock"],
        [x.astype(np.float32) for x in xs],
        base.astype(np.float32),
        whole={"filter_wise": by_row},
        chunk=chunk,
    )
    assert np.median(np.abs(result - expected)) <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("by_row", [False, True])
def test_model_stock_of_degenerate_models(by_row: bool) -> None:
    base, d = (np.round(8 * x) for x in models(8, 2, (4, 30)))  # whole numbers, so that opposites are opposite
    opposite = run_method(METHODS["model_stock"], [base + d, base - d], base, whole={"filter_wise": by_row})
    np.testing.assert_array_equal(opposite, base)
    equal = run_method(METHODS["model_stock"], [base + d, base + d], base, whole={"filter_wise": by_row})
    close(equal, (base + d).astype(np.float64))
    frozen = run_method(METHODS["model_stock"], [base, base], base, whole={"filter_wise": by_row})
    np.testing.assert_array_equal(frozen, base)


def test_model_stock_of_a_scalar() -> None:
    base, a, b = (np.array(v, np.float32) for v in (1, 2, 4))
    for by_row in (False, True):
        result = run_method(METHODS["model_stock"], [a, b], base, whole={"filter_wise": by_row})
        assert result == pytest.approx(3)
