"""Random numbers: the same however they are asked for, with the right probability; mergekit's where wanted."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.kernels.merge.base import Array, Draws
from ckpttool.kernels.merge.draws import CounterDraws, DrawnTensor, Working, mergekit_draws, rounded

if TYPE_CHECKING:
    from collections.abc import Callable


def draw(
    draws: Draws, model: int, n: int, probability: float | Array, step: int | None = None, start: int = 0
) -> Array:
    out = np.full(n, 7, np.uint8).view(np.bool_)
    step = step or n
    for a in range(0, n, step):
        b = min(a + step, n)
        p = probability[a:b] if isinstance(probability, np.ndarray) else probability
        draws.bernoulli(model, start + a, p, out[a:b])
    return out


def one_tensor(n: int, models: int = 1, working: Working = "F32", seed: int = 42) -> Draws:
    return mergekit_draws(seed, [DrawnTensor("x", n, [True] * models, working)])("x")


@given(step=st.integers(1, 700), p=st.sampled_from([0.0, 0.3, 0.5, 0.7, 1.0]), each=st.booleans())
def test_chunks_do_not_matter(step: int, p: float, each: bool) -> None:
    chance = np.linspace(0, p, 600, dtype=np.float32) if each else p
    for draws in (CounterDraws(1, "x"), one_tensor(600, 2)):
        whole = [draw(draws, i, 600, chance) for i in (0, 1)]
        again = np.empty((2, 600), np.bool_)
        for a in range(0, 600, step):  # the models take turns, as in a pass
            for i in (0, 1):
                part = chance[a : a + step] if isinstance(chance, np.ndarray) else chance
                draws.bernoulli(i, a, part, again[i, a : a + step])
        assert np.array_equal(again, whole)


@pytest.mark.parametrize("make", [lambda: CounterDraws(1, "x"), lambda: one_tensor(1000)])
def test_any_place_can_be_asked_for(make: Callable[[], Draws]) -> None:
    whole = draw(make(), 0, 1000, 0.5)
    draws = make()
    for start in (700, 3, 3, 0, 999, 64):
        assert np.array_equal(draw(draws, 0, 1000 - start, 0.5, start=start), whole[start:])


@pytest.mark.parametrize("p", [0.0, 2.0**-12, 0.1, 0.25, 1 / 3, 0.999, 1.0])
@pytest.mark.parametrize("each", [False, True])
def test_counter_draws_have_the_probability(p: float, each: bool) -> None:
    n = 1 << 21
    chance = np.full(n, p, np.float32) if each else p
    count = int(np.count_nonzero(draw(CounterDraws(3, "x"), 0, n, chance, 1 << 17)))
    assert abs(count - n * p) <= 5 * (n * p * (1 - p)) ** 0.5


@pytest.mark.parametrize("p", [0.3, 0.5])
def test_one_probability_and_the_same_for_each_draw_the_same(p: float) -> None:
    exact = float(np.float32(p))
    a = draw(CounterDraws(4, "x"), 0, 100_000, exact)
    assert np.array_equal(a, draw(CounterDraws(4, "x"), 0, 100_000, np.full(100_000, p, np.float32)))


def test_a_higher_probability_keeps_what_a_lower_one_keeps() -> None:
    draws = CounterDraws(4, "x")
    masks = [draw(draws, 0, 100_000, p) for p in (0.3, 0.3001, 0.301, 0.5)]
    for less, more in pairwise(masks):
        assert not (less & ~more).any()
        assert (more & ~less).any()


def test_seed_name_and_model_tell_counter_draws_apart() -> None:
    masks = [
        draw(CounterDraws(seed, name), model, 100_000, 0.5)
        for seed, name, model in [(1, "x", 0), (2, "x", 0), (1, "y", 0), (1, "x", 1), (11, "x", 0), (1, "1 x", 0)]
    ]
    for i, a in enumerate(masks):
        for b in masks[:i]:
            assert abs(np.mean(a == b) - 0.5) < 0.01  # independent, neither equal nor opposite
        shifted = np.mean(a[1:] == a[:-1])
        assert abs(shifted - 0.5) < 0.01


def test_counter_draws_never_change() -> None:
    """Outputs of a seed are the same in every release."""
    assert np.packbits(draw(CounterDraws(42, "model.norm.weight"), 1, 64, 0.5)).tobytes().hex() == "36c50eabf6ca7415"


# Written by torch 2.13: manual_seed(42), then bernoulli(full((40,), 0.3)), bernoulli(linspace(0, 1, 40)),
# bernoulli(full((40,), 0.7, dtype=bfloat16)), bernoulli(linspace(0, 1, 40).bfloat16()).
TORCH = [
    "0000001001000000001010101101010100000000",
    "0000000001101000000101010101110101111111",
    "1101010111110011011111111111110111111111",
    "0000000100001001110101011100011111011111",
]


def test_mergekit_draws_are_those_of_torch() -> None:
    ramp = np.linspace(0, 1, 40, dtype=np.float32)
    give = mergekit_draws(42, [DrawnTensor(n, 40, [True, True], w) for n, w in (("a", "F32"), ("b", "BF16"))])  # type: ignore[arg-type]
    found = [draw(give(n), i, 40, p, 7) for n in "ab" for i, p in ((0, 0.7 if n == "b" else 0.3), (1, ramp))]
    assert ["".join("01"[int(v)] for v in mask) for mask in found] == TORCH


def raw(seed: int, n: int) -> Array:
    """The fractions that torch compares, from MT19937 as its authors wrote it down."""
    state = [seed & 0xFFFFFFFF]
    for i in range(1, 624):
        state.append((1812433253 * (state[-1] ^ (state[-1] >> 30)) + i) & 0xFFFFFFFF)
    for i in range(n):
        y = (state[i] & 0x80000000) | (state[i + 1] & 0x7FFFFFFF)
        state.append(state[i + 397] ^ (y >> 1) ^ (0x9908B0DF if y & 1 else 0))
    out = np.empty(n)
    for i, number in enumerate(state[624:]):
        y = number ^ (number >> 11)
        y ^= (y << 7) & 0x9D2C5680
        y ^= (y << 15) & 0xEFC60000
        out[i] = ((y ^ (y >> 18)) & 0xFFFFFF) / (1 << 24)
    return out


@pytest.mark.parametrize("seed", [0, 42, 2**32 + 42, 2**63])
def test_tensors_draw_one_after_the_other(seed: int) -> None:
    fractions = raw(seed, 2000)
    tensors = [
        DrawnTensor("embed", 50, [False, True, True]),
        DrawnTensor("layers.10", 300, [True, True, True]),
        DrawnTensor("layers.2", 100, [True, False, True]),
    ]
    give = mergekit_draws(seed, tensors)
    starts = {"embed": [0, 0, 50], "layers.10": [100, 400, 700], "layers.2": [1000, 1100, 1100]}
    for t in tensors:
        for i in (2, 0, 1):
            if t.models[i]:
                at = starts[t.name][i]
                assert np.array_equal(draw(give(t.name), i, t.size, 0.4, 64), fractions[at : at + t.size] < 0.4)


def test_long_streams_are_skipped_through() -> None:
    n = 3 << 20
    give = mergekit_draws(7, [DrawnTensor(f"{i}", n, [True]) for i in range(3)])
    generator = np.random.Generator(np.random.MT19937())
    generator.bit_generator._legacy_seeding(7)  # type: ignore[attr-defined]
    numbers = generator.integers(0, 1 << 32, 3 * n, np.uint32) & np.uint32(0xFFFFFF)
    for i in (2, 0, 1):
        assert np.array_equal(draw(give(f"{i}"), 0, 1000, 0.25), numbers[i * n : i * n + 1000] < (1 << 22))


def test_bf16_rounds_probabilities() -> None:
    assert rounded(0.7, "BF16") == 0.69921875
    assert rounded(0.7, "F16") == np.float32(0.7)
    ramp = np.linspace(0, 1, 99, dtype=np.float32)
    assert np.array_equal(rounded(ramp, "BF16"), ramp.astype(ml_dtypes.bfloat16).astype(np.float32))
    fractions = raw(42, 20_000)
    assert np.array_equal(draw(one_tensor(20_000, working="BF16"), 0, 20_000, 0.7), fractions < 0.69921875)
    assert np.array_equal(draw(one_tensor(20_000), 0, 20_000, 0.7), fractions < np.float32(0.7))
