"""Flat shards that are packed become the pieces that they would have become one by one."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.core.catalog import (
    SHARDED,
    Catalog,
    FlatShard,
    FlatShards,
    Key,
    LogicalTensor,
    Pieces,
    StoredTensor,
    packed_shards,
    whole_tensor,
)
from ckpttool.core.files import DataFile
from ckpttool.errors import ConflictError, IncompleteError
from ckpttool.layout.shards import join_shards

FILES = [DataFile(Path(f"rank{i}"), 1 << 20, "0") for i in range(8)]


def run(file: int, start: int, length: int, offset: int = 0) -> FlatShard:
    return FlatShard(start, StoredTensor("flat", "F32", (length,), file, offset))


def joined(shape: tuple[int, ...], *shards: FlatShard, packed: bool) -> LogicalTensor:
    tensor = whole_tensor(StoredTensor("w", "F32", shape, SHARDED, 0), Key("w"))
    catalog = Catalog(FILES, {tensor.key: tensor})
    held = packed_shards(shards)
    assert isinstance(held, FlatShards)
    assert list(held) == list(shards)
    return join_shards(catalog, [held if packed else shards])["w"]


@given(st.data(), st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple), st.integers(0, 3))
def test_packed_pieces_are_the_same(data: st.DataObject, shape: tuple[int, ...], padding: int) -> None:
    size = prod(shape)
    cuts = data.draw(st.lists(st.integers(0, size), max_size=4))
    ends = sorted({0, *cuts, size})
    spans = data.draw(st.permutations(list(pairwise(ends))))
    shards = [run(i, a, b - a + padding * (b == size), 100 * i) for i, (a, b) in enumerate(spans)]
    one, other = (joined(shape, *shards, packed=packed) for packed in (True, False))
    assert isinstance(one.pieces, Pieces)
    assert one == other
    assert (*one.pieces,) == (*other.pieces,)
    assert one.pieces[-1:] == tuple(other.pieces)[-1:]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("second", "error"), [((5, 3), IncompleteError), ((3, 5), ConflictError), ((4, 3), IncompleteError)]
)
def test_shards_that_do_not_fit(second: tuple[int, int], error: type[Exception], *, packed: bool) -> None:
    with pytest.raises(error):
        joined((2, 4), run(0, 0, 4), run(1, *second), packed=packed)
