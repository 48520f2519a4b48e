"""Strided blocks of files as arrays, and the cutting of tensors into blocks."""

from __future__ import annotations

import os
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.errors import CorruptError, UnsupportedError
from ckpttool.execute import reader
from ckpttool.execute.files import FilePool
from ckpttool.execute.reader import blocks, read_block
from tests.execute.plans import Array, pattern

DATA = pattern(200_000)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("reader") / "data"
    file.write_bytes(DATA)
    return file


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], int, str]:
    """(shape, strides, offset, dtype): axes in any order, gaps, and repeats."""
    dtype, size = draw(st.sampled_from((("U8", 1), ("BF16", 2), ("F32", 4), ("C64", 8))))
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    strides = [0] * len(shape)
    step = size
    for axis in draw(st.permutations(range(len(shape)))):
        step *= draw(st.sampled_from((1, 1, 1, 2, 3)))
        strides[axis] = step if draw(st.integers(0, 15)) else 0
        step *= shape[axis]
    return shape, tuple(strides), draw(st.integers(0, 50)), dtype


@given(layouts(), st.sampled_from((0, 16, 1 << 15)), st.sampled_from((8, 100, 1 << 20)))
def test_any_block(
    path: Path, layout: tuple[tuple[int, ...], tuple[int, ...], int, str], bridge: int, room: int
) -> None:
    shape, strides, offset, dtype = layout
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "BRIDGE", bridge)
        patch.setattr(reader, "_SCRATCH", room)
        patch.setattr(reader, "_CHUNK", room)
        found = read_block(path, offset, strides, shape, dtype)
    bits = f"u{found.itemsize}"
    want: Array = np.ndarray(shape, bits, DATA, offset, strides)
    assert found.shape == shape
    assert found.flags.c_contiguous
    assert np.array_equal(found.view(bits), want)


def test_an_open_pool(path: Path) -> None:
    with FilePool() as files:
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        for i in range(3):
            assert read_block(path, i, (1,), (5,), "U8", files=files).tobytes() == DATA[i : i + 5]
        assert len(os.listdir("/proc/self/fd")) == before + 1  # noqa: PTH208


def test_blocks_that_cannot_be_read(path: Path) -> None:
    assert read_block(path, 1 << 40, (8,), (0,), "I64").shape == (0,)
    with pytest.raises(CorruptError, match="shorter than its index says"):
        read_block(path, len(DATA) - 3, (1,), (4,), "U8")
    with pytest.raises(CorruptError, match="vanished"):
        read_block(path / "x", 0, (1,), (4,), "U8")
    with pytest.raises(CorruptError, match="cannot read a source"):
        read_block(path.parent, 0, (1,), (4,), "U8")
    with pytest.raises(UnsupportedError):
        read_block(path, 0, (1,), (4,), "F4")


@given(st.lists(st.integers(0, 7), max_size=4), st.sampled_from((1, 2, 8)), st.integers(1, 300))
def test_blocks(shape: list[int], itemsize: int, limit: int) -> None:
    """Together they are the flat tensor, in order; each is one run of it and within the limit."""
    flat = np.arange(prod(shape)).reshape(shape)
    found = [
        flat[tuple(slice(a, b) for a, b in zip(*box, strict=True))].ravel() for box in blocks(shape, itemsize, limit)
    ]
    assert np.array_equal(np.concatenate([*found, []]), flat.ravel())
    assert all(f.size * itemsize <= max(limit, itemsize) for f in found)
