"""Boxes against numpy: an array of flags or of element numbers is the judge of every operation."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.core.geometry import Box, BoxIndex, contiguous_strides, first_overlap, from_flat, uncovered, whole

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
SOLID = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Box(tuple(a for a, _ in ends), tuple(b for _, b in ends))


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


def flags(shape: tuple[int, ...], box: Box) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    out = np.zeros(shape, bool)
    out[slices(box)] = True
    return out


@given(st.data(), SHAPES)
def test_intersection(data: st.DataObject, shape: tuple[int, ...]) -> None:
    a, b = data.draw(boxes(shape)), data.draw(boxes(shape))
    common = a.intersect(b)
    both = flags(shape, a) & flags(shape, b)
    assert (common is None) == (not both.any())
    if common is not None:
        assert np.array_equal(flags(shape, common), both)
        assert a.contains(common)
        assert b.contains(common)
        assert common.volume == both.sum()


@given(st.data(), SHAPES)
def test_shift_and_back(data: st.DataObject, shape: tuple[int, ...]) -> None:
    box = data.draw(boxes(shape))
    by = data.draw(st.lists(st.integers(-9, 9), min_size=len(shape), max_size=len(shape)))
    assert box.shift(by).shape == box.shape
    assert box.shift(by).relative_to(by) == box


@given(st.data(), SHAPES)
def test_flat_ranges(data: st.DataObject, shape: tuple[int, ...]) -> None:
    size = prod(shape)
    start, stop = sorted((data.draw(st.integers(0, size)), data.draw(st.integers(0, size))))
    found = from_flat(start, stop, shape)
    numbers = np.arange(size).reshape(shape)
    read = [int(n) for box in found for n in numbers[slices(box)].ravel()]
    assert read == list(range(start, stop))  # all of them, in order, each once
    assert len(found) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (0, 7), (3, 2)])
def test_flat_range_outside(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="outside a tensor of 6 elements"):
        from_flat(start, stop, (2, 3))


@given(st.data(), SOLID)
def test_overlap_and_coverage(data: st.DataObject, shape: tuple[int, ...]) -> None:
    found = data.draw(st.lists(boxes(shape), max_size=6))
    hits = sum((flags(shape, b).astype(int) for b in found), np.zeros(shape, int))
    clash = first_overlap(found)
    assert (clash is None) == bool((hits <= 1).all())
    if clash is not None:
        assert found[clash[0]].intersect(found[clash[1]]) is not None
        return
    gap = uncovered(shape, found)
    assert (gap is None) == bool((hits >= 1).all())
    if gap is not None:
        assert gap.volume > 0
        assert not hits[slices(gap)].any()


@given(st.data(), SOLID)
def test_gaps_complete_the_coverage(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """How padding is found: gap after gap until nothing is left."""
    held = [data.draw(boxes(shape))]
    while (gap := uncovered(shape, held)) is not None:
        held.append(gap)
    assert sum(b.volume for b in held) == prod(shape)
    assert first_overlap(held) is None


@given(st.data(), SHAPES)
def test_an_index_finds_all_that_share_elements(data: st.DataObject, shape: tuple[int, ...]) -> None:
    held, box = data.draw(st.lists(boxes(shape), max_size=9)), data.draw(boxes(shape))
    found = list(BoxIndex(held).near(box))
    assert found == sorted(set(found))
    assert {i for i, b in enumerate(held) if b.intersect(box) is not None} <= set(found)


def test_an_index_looks_at_few() -> None:
    """Sorted along the axis that is cut most."""
    held = [Box((2 * (i % 2), i), (2 * (i % 2) + 2, i + 1)) for i in range(100)]
    assert BoxIndex(held).near(Box((0, 40), (4, 43))) == [40, 41, 42]


def test_no_axes() -> None:
    scalar = whole(())
    assert scalar.volume == 1
    assert scalar.intersect(scalar) == scalar
    assert from_flat(0, 1, ()) == [scalar]
    assert uncovered((), []) == scalar
    assert uncovered((), [scalar]) is None
    assert first_overlap([scalar, scalar]) == (0, 1)


@given(SOLID)
def test_strides(shape: tuple[int, ...]) -> None:
    array = np.zeros(shape, np.int8)
    assert contiguous_strides(shape) == array.strides


def test_text() -> None:
    assert str(Box((0, 3), (2, 5))) == "[0:2, 3:5]"
