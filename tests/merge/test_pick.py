"""sce, arcee_fusion, ram and ramplus_tl against their formulas, on whole tensors in float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.kernels.merge.base import Array
from ckpttool.kernels.merge.pick import METHODS
from tests.merge.driver import run_method

SHAPES = st.sampled_from([(), (1,), (37,), (5, 1), (5, 11), (3, 4, 5)])
CHUNKS = st.sampled_from([1, 7, 64, 1 << 17])
SEEDS = st.integers(0, 1 << 16)


def models(seed: int, count: int, shape: tuple[int, ...], *, whole_numbers: bool = False) -> tuple[Array, list[Array]]:
    """A base and models near it, some of their elements equal to it. Whole numbers make many ties."""
    rng = np.random.default_rng(seed)
    base = np.round(rng.standard_normal(shape) * 4)
    steps = rng.standard_normal((count, *shape)) * (rng.random((count, *shape)) < 0.7)
    if whole_numbers:
        steps = np.round(2 * steps)
    return base.astype(np.float32), [np.asarray(base + s, np.float32) for s in steps]


def close(result: Array, expected: Array) -> None:
    np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-5)


def selected(d: Array, share: float) -> Array:
    """Which elements have the largest variances over the first axis, the first ones among equal ones."""
    variance = d.var(axis=0).reshape(-1)
    k = int(np.count_nonzero(variance) * share)
    mask = np.zeros(variance.size, np.bool_)
    mask[np.argsort(-variance, kind="stable")[:k]] = True
    return mask.reshape(d.shape[1:])


def sce(base: Array, xs: list[Array], share: float) -> Array:
    d = np.array([x - base for x in xs], np.float64)
    if share < 1:
        d = d * selected(d, share)
    energy = np.square(d).reshape(len(xs), -1).mean(1)
    w = energy / energy.sum() if energy.sum() >= 1e-6 else np.full(len(xs), 1 / len(xs))
    sign = np.where(d.sum(0) >= 0, 1, -1)
    weights = (np.sign(d) == sign) * w.reshape(-1, *[1] * base.ndim)
    return np.asarray(base + (d * weights).sum(0) / np.maximum(weights.sum(0), 1e-6))


@given(SEEDS, CHUNKS, SHAPES, st.integers(1, 4), st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
def test_sce(seed: int, chunk: int, shape: tuple[int, ...], count: int, share: float) -> None:
    base, xs = models(seed, count, shape)
    result = run_method(METHODS["sce"], xs, base, whole={"select_topk": share}, chunk=chunk)
    close(result, sce(base, xs, share))


@given(SEEDS, CHUNKS, SHAPES, st.sampled_from([2, 4]), st.sampled_from([0.1, 0.35, 0.5, 0.9]))
def test_sce_selects_the_first_of_equals(
    seed: int, chunk: int, shape: tuple[int, ...], count: int, share: float
) -> None:
    base, xs = models(seed, count, shape, whole_numbers=True)  # the variances of 2 or 4 whole numbers are exact
    result = run_method(METHODS["sce"], xs, base, whole={"select_topk": share}, chunk=chunk)
    close(result, sce(base, xs, share))


def test_sce_of_degenerate_models() -> None:
    base, (x,) = models(3, 1, (40,))
    for share in (1.0, 0.5):
        np.testing.assert_array_equal(run_method(METHODS["sce"], [base] * 3, base, whole={"select_topk": share}), base)
    close(run_method(METHODS["sce"], [x, x, x], base), x.astype(np.float64))
    # Equal models do not vary, so nothing is selected.
    np.testing.assert_array_equal(run_method(METHODS["sce"], [x, x, x], base, whole={"select_topk": 0.5}), base)


def arcee(base: Array, x: Array) -> Array:
    b, m = base.astype(np.float64), x.astype(np.float64)
    rows = [v.reshape(-1, v.shape[-1] if v.ndim else 1) for v in (m, b)]
    p, q = (np.exp(r) / np.exp(r).sum(1, keepdims=True) + 1e-8 for r in rows)
    divergence = (p * np.log(p / q)).sum(1, keepdims=True)
    importance = np.abs(rows[0] - rows[1]) * divergence
    ordered = np.sort(importance.reshape(-1))
    q1, median, q3 = (ordered[int(f * (ordered.size - 1))] for f in (0.25, 0.5, 0.75))
    mask = importance >= (median + 1.5 * (q3 - q1)) * (1 - 1e-9)
    return np.where(mask.reshape(base.shape), m, b)


@given(SEEDS, CHUNKS, SHAPES)
def test_arcee_fusion(seed: int, chunk: int, shape: tuple[int, ...]) -> None:
    base, (x,) = models(seed, 1, shape)
    close(run_method(METHODS["arcee_fusion"], [x], base, chunk=chunk), arcee(base, x))


def test_arcee_fusion_takes_few_elements_and_takes_them_whole() -> None:
    base, (x,) = models(11, 1, (64, 100))
    result = run_method(METHODS["arcee_fusion"], [x], base, chunk=1000)
    from_model = np.isclose(result, x, rtol=0, atol=1e-6)
    from_base = result == base
    assert (from_model | from_base).all()
    assert 0.01 < (~from_base).mean() < 0.3
    np.testing.assert_array_equal(run_method(METHODS["arcee_fusion"], [base], base), base)


def ram(base: Array, xs: list[Array], epsilon: float, r: float = 0, alpha: float = 0) -> Array:
    """Element by element, as it is told."""
    d = np.array([(x - base).reshape(-1) for x in xs])
    changed = np.abs(d) > np.float32(epsilon)
    out = base.reshape(-1).astype(np.float64)
    alone = changed.sum(0) == 1
    factors = [1 + r * min(alpha, (mask & ~alone).sum() / max(int((mask & alone).sum()), epsilon)) for mask in changed]
    for at in range(out.size):
        who = np.flatnonzero(changed[:, at])
        if len(who) == 1:
            out[at] += factors[who[0]] * d[who[0], at]
        elif len(who):
            out[at] += d[who, at].astype(np.float64).mean()
    return out.reshape(base.shape)


@given(SEEDS, CHUNKS, SHAPES, st.integers(1, 4), st.sampled_from([1e-5, 0.3]))
def test_ram(seed: int, chunk: int, shape: tuple[int, ...], count: int, epsilon: float) -> None:
    base, xs = models(seed, count, shape)
    result = run_method(METHODS["ram"], xs, base, whole={"epsilon": epsilon}, chunk=chunk)
    close(result, ram(base, xs, epsilon))


@given(SEEDS, CHUNKS, SHAPES, st.integers(1, 4), st.sampled_from([(0.1, 0.2), (0.5, 100.0)]))
def test_ramplus(seed: int, chunk: int, shape: tuple[int, ...], count: int, strength: tuple[float, float]) -> None:
    base, xs = models(seed, count, shape)
    r, alpha = strength
    result = run_method(METHODS["ramplus_tl"], xs, base, whole={"r": r, "alpha": alpha}, chunk=chunk)
    np.testing.assert_allclose(result, ram(base, xs, 1e-5, r, alpha), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ["ram", "ramplus_tl"])
def test_ram_of_degenerate_models(name: str) -> None:
    base, (x,) = models(12, 1, (40,))
    np.testing.assert_array_equal(run_method(METHODS[name], [base, base], base), base)
    close(run_method(METHODS[name], [x, x], base), x.astype(np.float64))
    close(run_method(METHODS[name], [x, 2 * base - x], base), base.astype(np.float64))
