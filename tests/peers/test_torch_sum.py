"""``CascadeSum`` is torch's sum of a contiguous float32 tensor on one thread, bit for bit, whatever its size and shape.

The merges of test_mergekit.py have small tensors; here are sizes from nothing to 20 million.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from ckpttool.kernels.merge.cascade import CascadeSum

if TYPE_CHECKING:
    from ckpttool.kernels.merge.base import Array


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def noise(rng: np.random.Generator, n: int) -> Array:
    """Normal values; in turns as they are, over wide magnitudes, and as thinned out magnitudes."""
    values: Array = rng.standard_normal(n, dtype=np.float32)
    kind = rng.integers(3)
    if kind == 1:
        np.ldexp(values, rng.integers(-50, 50, n, np.int32), out=values)
    elif kind == 2:
        np.multiply(np.abs(values), rng.random(n) < 0.5, out=values)
    return values


def check(rng: np.random.Generator, shape: tuple[int, ...]) -> None:
    n = int(np.prod(shape))
    values = noise(rng, n)
    total, at = CascadeSum(n), 0
    piece = int(rng.integers(1, max(n, 2))) if rng.random() < 0.5 else 1 << 17
    while at < n:
        step = int(rng.integers(piece // 2, piece) + 1)
        total.add(values[at : at + step])
        at += step
    wanted = torch.from_numpy(values).reshape(shape).sum().numpy()
    assert total.result().tobytes() == wanted.tobytes(), shape


def test_small_sizes() -> None:
    rng = np.random.default_rng(1)
    for n in range(1200):
        check(rng, (n,))


def test_any_size_and_shape() -> None:
    rng = np.random.default_rng(2)
    for _ in range(1000):
        axes = int(rng.integers(1, 4))
        check(rng, tuple(int(2**power) for power in rng.uniform(0, 21.5 / axes, axes)))


@pytest.mark.parametrize("n", [32768, 32769, 1 << 21, (1 << 24) - 1, (1 << 24) + 32, 20_000_003])
def test_large_sizes(n: int) -> None:
    """Above torch's grain for threads (32768), and where the registers spill later (2^24)."""
    check(np.random.default_rng(n), (n,))


def test_a_scalar() -> None:
    check(np.random.default_rng(4), ())
