"""PaddleFormers' merge methods against their formulas, on whole tensors in float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.errors import UsageError
from ckpttool.kernels.merge.base import Array
from ckpttool.kernels.merge.paddle import METHODS, keep_probabilities
from tests.merge.driver import run_method

SHAPES = st.sampled_from([(), (1,), (37,), (5, 11), (3, 4, 5)])
CHUNKS = st.sampled_from([1, 7, 64, 1 << 17])
SEEDS = st.integers(0, 1 << 16)
WEIGHTS = (0.5, 0.875, -0.25)  # exact in float32, and no signs make them cancel
RANDOM = ["paddle_dare_linear", "paddle_dare_ties", "paddle_della_linear", "paddle_della"]


class Lots:
    """The same draws however they are asked for."""

    def __init__(self, seed: int, count: int, size: int) -> None:
        self.lots = np.random.default_rng(seed).random((count, size))
        self.asked = np.zeros((count, size))

    def bernoulli(self, model: int, start: int, probability: float | Array, out: Array) -> None:
        here = slice(start, start + len(out))
        self.asked[model, here] = probability
        out[...] = self.lots[model, here] < probability


def models(seed: int, count: int, shape: tuple[int, ...], *, based: bool = True) -> tuple[Array | None, list[Array]]:
    """A base and models whose differences to it are exact, and of magnitudes that all differ by 1 % or more."""
    rng = np.random.default_rng(seed)
    size = int(np.prod(shape))
    magnitudes = np.array([rng.permutation(1.03 ** np.arange(size)) for _ in range(count)])
    steps = magnitudes * rng.choice([-1, 1], (count, size))
    steps = np.round(steps * 512) / 512
    base = np.round(rng.standard_normal(shape) * 64) if based else None
    origin = 0 if base is None else base
    xs = [np.asarray(origin + s.reshape(shape), np.float32) for s in steps]
    return None if base is None else np.asarray(base, np.float32), xs


def weighted(*values: float) -> list[dict[str, float]]:
    return [{"weight": v} for v in values]


def differences(base: Array | None, xs: list[Array]) -> Array:
    return np.array(xs, np.float64) - (0 if base is None else base.astype(np.float64))


def summed(t: Array, w: Array, *, normalize: bool) -> Array:
    if normalize:
        w = w / w.sum()
    return np.tensordot(w, t, 1)


def elected(t: Array, w: Array, *, normalize: bool, count: bool) -> Array:
    u = w.reshape(-1, *[1] * (t.ndim - 1)) * t
    votes = np.sign(t).sum(0) if count else u.sum(0)
    keep = np.sign(t) == np.where(votes >= 0, 1, -1)
    total = (u * keep).sum(0)
    if normalize:
        shares = np.tensordot(w, keep.astype(np.float64), 1)
        total = total / np.where(np.abs(shares) < 1e-8, 1, shares)
    return np.asarray(total)


def close(result: Array, base: Array | None, expected: Array) -> None:
    full = expected + (0 if base is None else base)
    np.testing.assert_allclose(result, full, rtol=1e-5, atol=1e-5 * float(np.abs(expected).max(initial=1)))


@given(SEEDS, CHUNKS, SHAPES, st.booleans(), st.booleans(), st.integers(1, 3))
def test_linear(seed: int, chunk: int, shape: tuple[int, ...], based: bool, normalize: bool, count: int) -> None:
    base, xs = models(seed, count, shape, based=based)
    w = WEIGHTS[:count]
    result = run_method(
        METHODS["paddle_linear"], xs, base, per_model=weighted(*w), whole={"normalize": normalize}, chunk=chunk
    )
    close(result, base, summed(differences(base, xs), np.array(w), normalize=normalize))


def test_linear_weighs_all_alike_by_default() -> None:
    base, xs = models(1, 4, (20,))
    close(run_method(METHODS["paddle_linear"], xs, base), base, differences(base, xs).mean(0))
    with pytest.raises(UsageError, match=r"sum to 0"):
        run_method(METHODS["paddle_linear"], xs, base, per_model=weighted(1, -1, 1, -1))


@given(SEEDS, CHUNKS, SHAPES, st.booleans(), st.floats(0, 1), st.sampled_from([0.9995, 0.1, 2.0]))
def test_slerp(seed: int, chunk: int, shape: tuple[int, ...], based: bool, alpha: float, threshold: float) -> None:
    base, xs = models(seed, 2, shape, based=based)
    a, b = differences(base, xs)
    cosine = float(np.vdot(a, b) / np.linalg.norm(a) / np.linalg.norm(b))
    if abs(cosine) > min(threshold, 1 - 1e-9):
        threshold = min(threshold, 0.9995)
        expected = (1 - alpha) * a + alpha * b
    else:
        theta = np.arccos(cosine)
        expected = (np.sin((1 - alpha) * theta) * a + np.sin(alpha * theta) * b) / np.sin(theta)
    whole = {"slerp_alpha": alpha, "slerp_dot_threshold": threshold}
    result = run_method(METHODS["paddle_slerp"], xs, base, whole=whole, chunk=chunk)
    close(result, base, expected)


def trimmed(t: Array, reserve: float, *, rescale: bool) -> Array:
    out = np.empty_like(t)
    for i, x in enumerate(t):
        out[i] = x * (np.abs(x) >= np.quantile(np.abs(x), 1 - reserve) * (1 - 1e-9))
        if rescale and np.abs(out[i]).sum() >= 1e-8:
            out[i] *= np.abs(x).sum() / np.abs(out[i]).sum()
    return out


@given(
    SEEDS, CHUNKS, SHAPES, st.booleans(), st.booleans(), st.booleans(), st.booleans(), st.sampled_from([0, 0.2, 0.5, 1])
)
def test_ties(
    seed: int,
    chunk: int,
    shape: tuple[int, ...],
    based: bool,
    normalize: bool,
    count: bool,
    rescale: bool,
    reserve: float,
) -> None:
    base, xs = models(seed, 3, shape, based=based)
    whole = {"normalize": normalize, "elect_count": count, "rescale": rescale, "reserve_p": reserve}
    result = run_method(METHODS["paddle_ties"], xs, base, per_model=weighted(*WEIGHTS), whole=whole, chunk=chunk)
    t = trimmed(differences(base, xs), reserve, rescale=rescale)
    close(result, base, elected(t, np.array(WEIGHTS), normalize=normalize, count=count))


def test_ties_keeps_all_elements_at_the_quantile() -> None:
    x = np.array([1, 2, 2, -2, 2, 5], np.float32)
    result = run_method(METHODS["paddle_ties"], [x], whole={"reserve_p": 0.4, "rescale": False})
    np.testing.assert_array_equal(result, [0, 2, 2, -2, 2, 5])


@given(SEEDS, CHUNKS, SHAPES, st.sampled_from(RANDOM), st.booleans(), st.booleans(), st.sampled_from([0.3, 0.7]))
def test_random_methods(
    seed: int, chunk: int, shape: tuple[int, ...], name: str, based: bool, rescale: bool, reserve: float
) -> None:
    base, xs = models(seed, 2, shape, based=based)
    t = differences(base, xs)
    size = max(int(np.prod(shape)), 1)
    draws = Lots(seed, 2, size)
    whole = {"reserve_p": reserve, "rescale": rescale} | ({"epsilon": 0.4} if "della" in name else {})
    w = np.array(WEIGHTS[:2])
    result = run_method(METHODS[name], xs, base, per_model=weighted(*w), whole=whole, draws=draws, chunk=chunk)
    keep = np.full(t.shape, reserve)
    if "della" in name:
        for p, x in zip(keep.reshape(2, -1), t.reshape(2, -1), strict=True):
            p[np.argsort(-np.abs(x))] = reserve + 0.2 - 0.4 * np.arange(size) / size
        np.testing.assert_allclose(draws.asked, keep.reshape(2, -1), rtol=1e-6)
    thinned = t * (draws.lots < keep.reshape(2, -1)).reshape(t.shape)
    if rescale:
        thinned /= keep
    merge = summed(thinned, w, normalize=True)
    if name in {"paddle_dare_ties", "paddle_della"}:
        merge = elected(thinned, w, normalize=True, count=False)
    close(result, base, merge)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.sampled_from([(0.5, 0.4), (0.7, 0.14)]))
def test_elements_of_one_magnitude_share_their_ranks(counts: list[int], p: tuple[float, float]) -> None:
    reserve, epsilon = p
    held = np.array(counts)
    n = int(held.sum())
    magnitudes = np.repeat(np.arange(len(counts)), held)
    ranks = np.arange(n)[::-1]  # of the ascending magnitudes
    keep = keep_probabilities(held, reserve, epsilon)
    for code in np.flatnonzero(held):
        expected = np.mean(reserve + epsilon / 2 - epsilon * ranks[magnitudes == code] / n)
        assert keep[code] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_zeros_stay_zeros(name: str) -> None:
    base = np.arange(12, dtype=np.float32).reshape(3, 4)
    result = run_method(METHODS[name], [base, base], base, draws=Lots(0, 2, 12))
    np.testing.assert_array_equal(result, base)


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("paddle_dare_linear", {"reserve_p": 1.5}),
        ("paddle_ties", {"reserve_p": -0.1}),
        ("paddle_della", {"reserve_p": 0.99, "epsilon": 0.14}),
        ("paddle_della_linear", {"reserve_p": 0.05, "epsilon": 0.14}),
    ],
)
def test_probabilities_that_are_none(name: str, whole: dict[str, float]) -> None:
    _, xs = models(0, 2, (6,))
    with pytest.raises(UsageError, match=r"reserve_p"):
        run_method(METHODS[name], xs, whole=whole, draws=Lots(0, 2, 6))
