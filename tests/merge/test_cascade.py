"""torch's order of adding up: against a slow reference, and against sums that torch gave.

tests/peers/test_torch_sum.py asks torch itself.
"""

from __future__ import annotations

from itertools import pairwise
from math import ceil, log2
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.kernels.merge.cascade import CascadeSum
from ckpttool.kernels.merge.draws import DrawnTensor, Working, mergekit_draws
from ckpttool.kernels.merge.sparse import METHODS
from tests.merge.driver import run_method

if TYPE_CHECKING:
    from ckpttool.kernels.merge.base import Array

F = np.float32
LEVELS = 4


def reference(values: Array, lanes: int = 8) -> np.float32:
    """The sum of a row, as torch's C++ says it: line by line, with the registers to spill found from the line number.

    After ``vectorized_inner_sum``, ``row_sum`` and ``multi_row_sum`` in SumKernel.cpp.
    """
    lanes = lanes if len(values) >= lanes else 1
    vectors = values[: len(values) // lanes * lanes].reshape(-1, lanes)
    lines = len(vectors) // 4
    power = max(4, ceil(log2(lines)) // 4 if lines else 0)
    step = 1 << power
    registers = np.zeros((LEVELS, 4, lanes), F)
    for i in range(lines):
        registers[0] += vectors[4 * i : 4 * i + 4]
        done = i + 1
        if done % step:
            continue
        for lower, upper in pairwise(range(LEVELS)):
            registers[upper] += registers[lower]
            registers[lower] = 0
            if done & ((step - 1) << (upper * power)):
                break
    for upper in registers[1:]:
        registers[0] += upper
    first, *others = registers[0]
    for vector in (*vectors[4 * lines :], *others):
        first += vector
    total = F(0)
    for value in (*values[len(vectors) * lanes :], *first):
        total = total + value
    return total


def noise(n: int, seed: int) -> Array:
    """Values of magnitudes far apart, where any other order is likely to give another sum."""
    rng = np.random.default_rng(seed)
    return np.ldexp(rng.standard_normal(n), rng.integers(-20, 20, n)).astype(F)


def hashed(n: int) -> Array:
    """Values that are not negative, worked out with whole numbers: the same in every version of numpy."""
    bits = (np.arange(n, dtype=np.uint64) * np.uint64(2654435761) + np.uint64(12345)) & np.uint64(0xFFFFFFFF)
    values: Array = np.ldexp((bits & np.uint64(0xFFFFFF)).astype(F), -(bits >> np.uint64(28)).astype(np.int32))
    return values


def summed(values: Array, cuts: list[int], lanes: int = 8) -> np.float32:
    total = CascadeSum(len(values), lanes)
    for a, b in pairwise([0, *sorted(cuts), len(values)]):
        total.add(values[a:b])
    return total.result()


@given(data=st.data(), lanes=st.sampled_from([1, 4, 8]), seed=st.integers(0, 99))
def test_pieces_add_up_in_the_order_of_the_reference(data: st.DataObject, lanes: int, seed: int) -> None:
    n = data.draw(st.integers(0, 200) | st.integers(0, 12_000))
    values = noise(n, seed)
    cuts = data.draw(st.lists(st.integers(0, n), max_size=12))
    assert summed(values, cuts, lanes).tobytes() == reference(values, lanes).tobytes()


@pytest.mark.product
@pytest.mark.parametrize("more", [-4, -1, 0, 1, 5])
@pytest.mark.parametrize("lines", [16, 256, 4096, 8192])
def test_every_register_spills_in_time(lines: int, more: int) -> None:
    values = noise(lines * 4 + more, 5)
    assert summed(values, [], 1) == summed(values, [*range(0, len(values), 333)], 1) == reference(values, 1)


@pytest.mark.parametrize(
    ("n", "times", "wanted"),
    [
        (1, 1, "0x1.81c8p+13"),
        (7, 1, "0x1.ac3dc8p+20"),
        (31, 1, "0x1.ed0384p+24"),
        (100, 1, "0x1.865942p+26"),
        (4099, 1, "0x1.ff2c26p+31"),
        (5000, 1, "0x1.375740p+32"),
        (524305, 1, "0x1.fffbf0p+38"),
        (1000, 787, "0x1.79bb9cp+39"),
        (131072, 129, "0x1.020398p+44"),  # the registers spill after 32 lines
    ],
)
def test_sums_that_torch_gave(n: int, times: int, wanted: str) -> None:
    """torch 2.13, one thread: ``torch.from_numpy(np.tile(hashed(n), times)).sum()``."""
    total, values = CascadeSum(n * times), hashed(n)
    for _ in range(times):
        total.add(values)
    assert float(total.result()) == float.fromhex(wanted)


def test_a_chunk_may_be_overwritten_once_it_is_added() -> None:
    values = noise(100, 1)
    total, buffer = CascadeSum(200), values.copy()
    total.add(buffer)
    buffer[:] = values[::-1]
    total.add(buffer)
    assert total.result() == reference(np.concatenate([values, values[::-1]]))


def test_a_sum_of_too_little_is_refused() -> None:
    total = CascadeSum(10)
    total.add(np.ones(9, F))
    with pytest.raises(ValueError, match="1 of the values"):
        total.result()


@pytest.mark.parametrize("chunk", [1000, 1 << 17])
@pytest.mark.parametrize("working", ["F32", "F16", "BF16"])
def test_rescale_sums_as_mergekit_does_in_float32(working: Working, chunk: int) -> None:
    x = noise(4099, 8)
    draws = mergekit_draws(42, [DrawnTensor("x", x.size, [True], working)])
    mask = np.empty(x.size, np.bool_)
    draws("x").bernoulli(0, 0, 0.5, mask)
    left = np.where(mask, x, F(0))
    exact = F(np.abs(x).sum(dtype=np.float64)) / F(np.abs(left).sum(dtype=np.float64))
    repeated = reference(np.abs(x)) / reference(np.abs(left))
    assert repeated != exact
    per_model = [{"weight": 1.0, "density": 0.5}]
    found = run_method(METHODS["dare_linear"], [x], x * 0, per_model=per_model, draws=draws("x"), chunk=chunk)
    assert np.array_equal(found, left * (repeated if working == "F32" else exact))
