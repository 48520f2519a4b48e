"""How sharding stage 1 shares parameters out, against plain numpy on whole buffers and against Paddle's own tables."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.core.catalog import RankTensor
from ckpttool.core.geometry import Box, whole
from ckpttool.formats.paddle.sharding import ITEMSIZE, TrainableParam, buffers, flat_slices, owners, padded
from tests.helpers.arrays import index

LLAMA = [2048, 1024, 512, 512, 1024, 2560, 2560, 2560, 32, 32, 1024, 512, 512, 1024, 2560, 2560, 2560, 32, 32, 32, 2048]
"""Elements of the parameters of a Llama with two layers."""


def test_owners_are_those_of_a_checkpoint_that_paddle_wrote() -> None:
    # param2rank of two sharding ranks, written by paddleformers 1.2.0 with paddle 3.3.1.
    first = [0, 1, 2, 5, 7, 8, 10, 11, 15, 17, 19]
    assert [i for i, rank in enumerate(owners(LLAMA, 2)) if rank == 0] == first


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 6))
def test_the_least_loaded_rank_takes_the_next_largest(numels: list[int], ranks: int) -> None:
    got = owners(numels, ranks)
    load = np.zeros(ranks, int)
    for i in sorted(range(len(numels)), key=lambda i: (-numels[i], i)):
        assert got[i] == int(np.argmin(load))
        load[got[i]] += numels[i]


@pytest.mark.parametrize(
    ("numel", "dtype", "ranks", "size"),
    [(1, "BF16", 2, 256), (256, "BF16", 2, 256), (257, "BF16", 2, 512), (32, "F32", 2, 128), (32, "BF16", 4, 512)],
)
def test_a_parameter_is_padded_to_256_bytes_for_every_rank(numel: int, dtype: str, ranks: int, size: int) -> None:
    assert padded(numel, dtype, ranks) == size


PARAMS = st.lists(st.tuples(st.integers(1, 3000), st.sampled_from(sorted(ITEMSIZE))), max_size=12).map(
    lambda found: [TrainableParam(f"p{i}", dtype, n) for i, (n, dtype) in enumerate(found)]
)


@given(PARAMS, st.integers(1, 5), st.integers(1, 20000))
def test_ranks_hold_even_parts_of_buffers(params: list[TrainableParam], ranks: int, limit: int) -> None:
    made = buffers(params, ranks, limit)
    assert sorted(n for b in made for n in b.starts) == sorted(p.name for p in params)
    by_name = {p.name: p for p in params}
    for b in made:
        assert len({by_name[n].dtype for n in b.starts}) == 1
        # Whose element each one of the buffer is, and which: cut evenly, as the trainer cuts it.
        owner = np.concatenate(
            [np.full(padded(by_name[n].numel, by_name[n].dtype, ranks), int(n[1:])) for n in b.starts]
        )
        inside = np.concatenate([np.arange(padded(by_name[n].numel, by_name[n].dtype, ranks)) for n in b.starts])
        assert b.size == owner.size
        for rank, (whose, which) in enumerate(zip(np.split(owner, ranks), np.split(inside, ranks), strict=True)):
            for n in b.starts:
                mine = which[whose == int(n[1:])]
                span = dict(b.spans(n)).get(rank)
                assert span == ((mine[0], mine[-1] + 1) if mine.size else None)


@given(PARAMS, st.integers(1, 20000))
def test_a_buffer_is_closed_when_it_has_the_limit(params: list[TrainableParam], limit: int) -> None:
    for dtype in ITEMSIZE:
        mine = [p for p in params if p.dtype == dtype]
        groups: list[list[str]] = []
        size = limit
        for p in mine:
            if size >= limit:
                groups.append([])
                size = 0
            groups[-1].append(p.name)
            size += p.numel * ITEMSIZE[dtype]
        made = buffers(params, 3, limit)
        assert [list(b.starts) for b in made if b.starts.keys() <= {p.name for p in mine}] == groups


def test_a_buffer_of_just_the_limit_is_closed() -> None:
    made = buffers(
        [TrainableParam("a", "BF16", 64), TrainableParam("b", "BF16", 64), TrainableParam("c", "BF16", 64)],
        2,
        limit=256,
    )
    assert [list(b.starts) for b in made] == [["a", "b"], ["c"]]


def test_buffers_come_by_dtype() -> None:
    made = buffers(
        [
            TrainableParam("a", "F32", 1),
            TrainableParam("b", "F16", 1),
            TrainableParam("c", "BF16", 1),
            TrainableParam("d", "F32", 1),
        ],
        2,
    )
    assert [list(b.starts) for b in made] == [["c"], ["b"], ["a", "d"]]


def test_an_empty_parameter_is_held_by_nobody() -> None:
    (made,) = buffers([TrainableParam("a", "BF16", 0), TrainableParam("b", "BF16", 5)], 2)
    assert made.spans("a") == []
    (empty,) = buffers([TrainableParam("a", "BF16", 0)], 2)
    assert empty.spans("a") == []


@st.composite
def rank_tensors(draw: st.DrawFn) -> RankTensor:
    """A rank's part of a tensor: two blocks of a fused one, or one with padded rows."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    if not shape:
        return RankTensor("t", "F32", (), "t", (), ((whole(()), whole(())),))
    rest = shape[1:]

    def rows(a: int, b: int) -> Box:
        return Box((a, *(0 for _ in rest)), (b, *rest))

    n, pad = shape[0], draw(st.integers(0, 3))
    if draw(st.booleans()):
        boxes = ((rows(0, n), rows(3, 3 + n)), (rows(n, 2 * n), rows(20, 20 + n)))
        return RankTensor("t", "F32", (2 * n, *rest), "t", (40, *rest), boxes)
    pads = (rows(n, n + pad),) if pad else ()
    return RankTensor("t", "F32", (n + pad, *rest), "t", (40, *rest), ((rows(0, n), rows(7, 7 + n)),), pads)


@given(rank_tensors(), st.data())
def test_slices_hold_the_flat_elements(t: RankTensor, data: st.DataObject) -> None:
    size = prod(t.shape)
    start = data.draw(st.integers(0, size + 4))
    stop = data.draw(st.integers(start, size + 9))
    logical = np.arange(1, prod(t.whole) + 1).reshape(t.whole)

    def stored(x: RankTensor) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        out = np.full(x.shape, -1)
        for local, box in x.boxes:
            out[index(local)] = logical[index(box)]
        for pad in x.pads:
            out[index(pad)] = 0
        return out

    flat = np.concatenate([stored(t).ravel(), np.zeros(stop, int)])
    got = flat_slices(t, start, stop)
    assert [x.part for x in got] == list(range(len(got)))
    joined = np.concatenate([np.zeros(0, int), *(stored(x).ravel() for x in got)])
    assert joined.tolist() == flat[start:stop].tolist()
