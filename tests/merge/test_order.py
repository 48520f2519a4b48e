"""Exact order statistics against a stable sort of the whole, for every shape of data and every size of chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool.kernels.merge import order
from ckpttool.kernels.merge.order import RankQuery, Threshold, cuts, kth_values
from ckpttool.kernels.merge.sparse import METHODS
from tests.helpers.sample import examples
from tests.merge.driver import ArrayChunk, run_method

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from ckpttool.kernels.merge.base import Array, Chunk, Pass

T = TypeVar("T")


def chunks(arrays: Sequence[Array], step: int) -> list[ArrayChunk]:
    n = len(arrays[0])
    return [ArrayChunk(a, min(a + step, n), None, arrays) for a in range(0, n, step)]


def run(program: Generator[Pass, None, T], arrays: Sequence[Array], step: int) -> tuple[T, int]:
    """The program's result, and how many passes it took."""
    passes = 0
    while True:
        try:
            see = next(program)
        except StopIteration as done:
            return done.value, passes
        passes += 1
        for c in chunks(arrays, step):
            see(c)


def models(chunk: Chunk, wanted: Sequence[int]) -> Iterator[Array]:
    for i in wanted:
        yield chunk.model(i)


def mask(cut: Threshold, values: Array, step: int, *, first: bool) -> Array:
    out = np.full(len(values), 7, np.uint8).view(np.bool_)
    for c in chunks([values], step):
        cut.above(c.model(0), c.start, out[c.start : c.stop], first=first)
    return out


def expected(values: Array, rank: int, *, first: bool) -> Array:
    n = len(values)
    out = np.zeros(n, np.bool_)
    if first:
        out[np.argsort(-values, kind="stable")[: n - rank]] = True
    else:
        out[np.argsort(values, kind="stable")[rank:]] = True
    return out


def check(values: Array, ranks: Sequence[int], step: int) -> int:
    """Compare both kinds of cut with a sort; returns the passes of one of them."""
    passes = 0
    for first in (False, True):
        found, passes = run(cuts(len(values), models, [RankQuery(0, r) for r in ranks], first=first), [values], step)
        for cut, rank in zip(found, ranks, strict=True):
            assert np.array_equal(mask(cut, values, step, first=first), expected(values, rank, first=first))
    return passes


tied = st.sampled_from([0.0, -0.0, 1e-45, 2.0**-130, 0.5, 1.0, 1.0000001, 3e38, -1.0, -1e-45, np.inf])


@given(values=st.lists(tied | st.floats(width=32, allow_nan=False), min_size=1, max_size=60), data=st.data())
def test_cuts_are_those_of_a_stable_sort(values: list[float], data: st.DataObject) -> None:
    array = np.array(values, np.float32)
    ranks = data.draw(st.lists(st.integers(0, len(values)), min_size=1, max_size=3))
    check(array, ranks, data.draw(st.integers(1, 70)))


@given(seed=st.integers(0, 2**32 - 1), levels=st.integers(1, 200), data=st.data())
@settings(max_examples=examples(60))
def test_samples_and_overflows_do_not_change_the_result(seed: int, levels: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    array = (rng.integers(-levels, levels + 1, 2000) * rng.choice([0, 1e-3, 1, 1e30], 2000)).astype(np.float32)
    array[: data.draw(st.integers(0, 2000))] *= np.float32(1e-5)  # the head does not tell about the rest
    ranks = data.draw(st.lists(st.integers(0, 2000), min_size=1, max_size=3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order, "_SMALL", 100)
        patch.setattr(order, "KEPT", data.draw(st.sampled_from([3, 30, 300, 1 << 19])))
        patch.setattr(order, "_BINS", data.draw(st.sampled_from([4, 8, 16])))
        check(array, ranks, data.draw(st.integers(7, 2500)))


def test_all_models_share_the_passes_and_are_read_once_in_each() -> None:
    rng = np.random.default_rng(5)
    arrays = [np.abs(rng.standard_normal(3000)).astype(np.float32) for _ in range(3)]
    reads: list[tuple[int, int]] = []

    def counted(chunk: Chunk, wanted: Sequence[int]) -> Iterator[Array]:
        reads.extend((i, chunk.start) for i in wanted)
        return models(chunk, wanted)

    ranks = [RankQuery(0, 10), RankQuery(2, 2000), RankQuery(0, 2999), RankQuery(1, 3000)]
    found, passes = run(cuts(3000, counted, ranks), arrays, 1000)
    assert passes == 1
    assert sorted(reads) == [(i, start) for i in (0, 2) for start in (0, 1000, 2000)]  # rank 3000 needs no look
    for cut, r in zip(found, ranks, strict=True):
        values = arrays[r.model]
        assert np.array_equal(mask(cut, values, 1000, first=False), expected(values, r.rank, first=False))


@pytest.mark.product(one_in=2)
@pytest.mark.parametrize("kind", ["normal", "tied", "zero"])
def test_a_sample_and_one_pass_are_enough(kind: str) -> None:
    rng = np.random.default_rng(6)
    values: Array = np.abs(rng.standard_normal(300_000)).astype(np.float32)
    if kind == "tied":
        np.round(values * 8, out=values)
    if kind == "zero":
        values *= rng.random(len(values)) < 0.2
    assert check(values, [150_000, 297_000], 20_000) == 2


def test_a_misleading_sample_costs_passes_but_no_exactness() -> None:
    values = np.arange(100_000, dtype=np.float32)
    values[::31] = -1.0  # all that a sample of one chunk sees
    assert check(values, [60_000], 100_000) == 3


def test_few_values_are_kept_of_a_large_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "KEPT", 500)
    most = 0
    plain = order._Search.see

    def watched(self: order._Search, values: Array, chunk: Chunk) -> None:
        nonlocal most
        plain(self, values, chunk)
        most = max(most, self.held)

    monkeypatch.setattr(order._Search, "see", watched)
    values = np.random.default_rng(7).standard_normal(200_000).astype(np.float32)
    assert check(values, [100, 70_000, 199_999], 3000) <= 5
    assert 0 < most <= 500


@pytest.mark.parametrize("n", [1, 2, 9, 1000])
def test_values_at_ranks(n: int) -> None:
    values = np.random.default_rng(n).standard_normal(n).astype(np.float32)
    ranks = [0, n // 4, n // 2, n - 1]
    found, _ = run(kth_values(n, lambda c: c.model(0), ranks), [values], 64)
    assert found == [float(v) for v in np.sort(values)[ranks]]


def test_no_ranks_need_no_pass() -> None:
    assert run(cuts(100, models, []), [np.zeros(100, np.float32)], 10) == ([], 0)


@pytest.mark.parametrize("share", [1e-4, 0.6, 1.0])
def test_not_a_number_counts_as_the_largest(share: float) -> None:
    """It has no place in an order, and a search for one must end all the same: then it is kept, and seen."""
    values = np.random.default_rng(0).standard_normal(300_000).astype(np.float32)
    bad = max(1, int(share * values.size))
    values[:bad] = np.nan
    found = run_method(
        METHODS["ties"], [values], np.zeros_like(values), per_model=[{"weight": 1.0, "density": 0.5}], chunk=4096
    )
    assert np.isnan(found[: min(bad, values.size // 2)]).all()
