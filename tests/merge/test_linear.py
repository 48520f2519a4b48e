"""linear, passthrough, nearswap, average and ema against their formulas, in exact numbers or float64."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.errors import UsageError
from ckpttool.kernels import merge
from ckpttool.kernels.merge.base import Array
from ckpttool.kernels.merge.linear import METHODS
from tests.merge.driver import run_method

SHAPES = [(), (1,), (37,), (5, 11), (3, 4, 5)]
CHUNKS = st.sampled_from([1, 7, 64, 1 << 17])
SEEDS = st.integers(0, 1 << 16)


class Half:
    """Draws that come true at every second element."""

    def bernoulli(self, model: int, start: int, probability: float | Array, out: Array) -> None:
        out[...] = (np.arange(start, start + len(out)) + model) % 2 == 0


def models(seed: int, count: int, shape: tuple[int, ...]) -> list[Array]:
    rng = np.random.default_rng(seed)
    return [np.asarray(rng.standard_normal(shape), np.float32) for _ in range(count)]


def weights(*values: float) -> list[dict[str, float]]:
    return [{"weight": v} for v in values]


def nearest(exact: Fraction) -> set[np.float32]:
    """The float32 that are as near to a number as any: two at a tie, and at what float64 cannot tell from one."""
    middle = np.float32(float(exact))
    candidates = [np.nextafter(middle, np.float32(-np.inf)), middle, np.nextafter(middle, np.float32(np.inf))]
    distances = [abs(Fraction(float(c)) - exact) for c in candidates]
    return {c for c, d in zip(candidates, distances, strict=True) if d <= min(distances) * (1 + Fraction(1, 1 << 20))}


@given(SEEDS, CHUNKS, st.lists(st.floats(-2, 2, width=32), min_size=1, max_size=3))
def test_linear_rounds_once_for_each_model(seed: int, chunk: int, w: list[float]) -> None:
    """Every step must be acc + x w, rounded once: checked against exact numbers, one model more at a time."""
    xs = models(seed, len(w), (9,))
    sums = [np.zeros(9, np.float32)] + [
        run_method(METHODS["linear"], xs[:n], per_model=weights(*w[:n]), whole={"normalize": False}, chunk=chunk)
        for n in range(1, len(w) + 1)
    ]
    for (before, after), x, factor in zip(pairwise(sums), xs, w, strict=True):
        for a, b, element in zip(before, after, x, strict=True):
            exact = Fraction(float(a)) + Fraction(float(element)) * Fraction(factor)
            assert b in nearest(exact)


@given(SEEDS, CHUNKS, st.sampled_from(SHAPES))
def test_linear_divides_by_the_weights(seed: int, chunk: int, shape: tuple[int, ...]) -> None:
    xs = models(seed, 3, shape)
    w = weights(0.6, 0.3, 1.5)
    plain = run_method(METHODS["linear"], xs, per_model=w, whole={"normalize": False}, chunk=chunk)
    total = np.float32(0.6) + np.float32(0.3) + np.float32(1.5)
    result = run_method(METHODS["linear"], xs, per_model=w, chunk=chunk)
    np.testing.assert_array_equal(result, plain / total, strict=True)


def test_linear_starts_at_plus_zero() -> None:
    zero = np.array([-0.0, 0.0], np.float32)
    for count in (1, 2):
        result = run_method(METHODS["linear"], [zero] * count, per_model=weights(1, 1)[:count])
        assert not np.signbit(result).any()


def test_linear_refuses_weights_without_a_sum() -> None:
    xs = models(0, 2, (3,))
    with pytest.raises(UsageError, match=r"sum to 0"):
        run_method(METHODS["linear"], xs, per_model=weights(0.5, -0.5))
    result = run_method(METHODS["linear"], xs, per_model=weights(0.5, -0.5), whole={"normalize": False})
    np.testing.assert_allclose(result, (xs[0] - xs[1]) / 2, rtol=1e-6)


@given(SEEDS, CHUNKS, st.sampled_from(SHAPES))
def test_passthrough(seed: int, chunk: int, shape: tuple[int, ...]) -> None:
    (x,) = models(seed, 1, shape)
    np.testing.assert_array_equal(run_method(METHODS["passthrough"], [x], chunk=chunk), x, strict=True)
    halved = run_method(METHODS["passthrough"], [x], per_model=[{"scale": 0.5}], chunk=chunk)
    np.testing.assert_array_equal(halved, x / 2)


@given(SEEDS, CHUNKS, st.sampled_from(SHAPES), st.sampled_from([0.0, 1e-4, 0.3, 10.0]))
def test_nearswap(seed: int, chunk: int, shape: tuple[int, ...], t: float) -> None:
    base, x = models(seed, 2, shape)
    result = run_method(METHODS["nearswap"], [x], base, whole={"t": t}, chunk=chunk)
    b, m = base.astype(np.float64), x.astype(np.float64)
    step = m - b  # at most t long, and the whole way when it is shorter
    expected = b + np.sign(step) * np.minimum(np.abs(step), t)
    np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6)


def test_nearswap_of_equal_models() -> None:
    (x,) = models(1, 1, (20,))
    np.testing.assert_array_equal(run_method(METHODS["nearswap"], [x], x, whole={"t": 0.1}), x)


@given(SEEDS, CHUNKS, st.sampled_from(SHAPES), st.sampled_from([1, 2, 3, 100]))
def test_average(seed: int, chunk: int, shape: tuple[int, ...], count: int) -> None:
    xs = models(seed, count, shape)
    expected = np.mean(np.array(xs, np.float64), axis=0).astype(np.float32)
    result = run_method(METHODS["average"], xs, chunk=chunk)
    np.testing.assert_array_max_ulp(result, expected, maxulp=1)


def test_average_of_equal_models_is_the_model() -> None:
    (x,) = models(2, 1, (50,))
    np.testing.assert_array_equal(run_method(METHODS["average"], [x] * 300), x)


@given(SEEDS, CHUNKS, st.sampled_from(SHAPES), st.integers(1, 9), st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_ema_is_its_recursion(seed: int, chunk: int, shape: tuple[int, ...], count: int, decay: float) -> None:
    xs = models(seed, count, shape)
    expected = xs[0].astype(np.float64)
    for x in xs[1:]:
        expected = decay * expected + (1 - decay) * x
    result = run_method(METHODS["ema"], xs, whole={"decay": decay}, chunk=chunk)
    np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("decay", [-0.1, 1.5, float("nan")])
def test_ema_refuses_a_decay_that_is_none(decay: float) -> None:
    with pytest.raises(UsageError, match=r"not in \[0, 1\]"):
        run_method(METHODS["ema"], models(0, 2, (3,)), whole={"decay": decay})


@pytest.mark.parametrize("name", ["linear", "average", "ema"])
def test_one_model_at_a_time(name: str) -> None:
    """These may run with hundreds of models that share one buffer."""
    assert METHODS[name].one_at_a_time
    assert METHODS[name].models == (1, None)


def test_methods_are_found_by_name() -> None:
    for name, found in merge.METHODS.items():
        assert merge.method(name) is found
        assert found.name == name
        assert found.formula
        assert found.program.__doc__
    with pytest.raises(UsageError, match=r"did you mean `nuslerp`") as error:
        merge.method("nuslrp")
    assert "karcher" in str(error.value)


@pytest.mark.parametrize("name", sorted(merge.METHODS))
def test_methods_take_what_they_say(name: str) -> None:
    """Fewest models, any shape that a checkpoint may hold, and every parameter at its default or at 0.5."""
    method = merge.METHODS[name]
    count = max(method.models[0], 1)
    rng = np.random.default_rng(5)
    for shape in [(), (1,), (0, 5), (9,), (4, 5), (2, 3, 4)]:
        xs = [np.asarray(rng.standard_normal(shape), np.float32) for _ in range(count + 1)]
        result = run_method(
            method,
            xs[1:],
            None if method.base == "refused" else xs[0],
            per_model=[{k: 0.5 for k, p in method.per_model.items() if p.default is None}] * count,
            whole={k: 0.5 for k, p in method.whole.items() if p.default is None},
            draws=Half(),
            chunk=8,
        )
        assert result.shape == shape
        assert np.isfinite(result).all()
