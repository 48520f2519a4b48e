"""Steps that write nothing: replicas and padding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.core.plan import AssertEqual, AssertPadding, Block, Copy, Output, Plan, Unit
from ckpttool.errors import CorruptError
from ckpttool.execute import RunOptions, run, schedule
from ckpttool.execute.checks import agree
from tests.execute.plans import pattern, source


def check(directory: Path, step: AssertEqual | AssertPadding, *data: bytes, memory: int = 1 << 20) -> None:
    found = [source(directory / f"src/{i}", d) for i, d in enumerate(data)]
    copy = Copy(Block(0, 0, (1,)), Block(0, 0, (1,)), (4,), "U8", "U8")
    run(Plan(found, [Output("x", 4)], [Unit("t", (copy, step))]), directory / "dst", RunOptions(memory=memory))


def replicas(shape: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...], dtype: str = "BF16") -> AssertEqual:
    return AssertEqual(Block(0, 0, a), Block(1, 0, b), shape, dtype, "model.norm.weight")


def test_equal_replicas(tmp_path: Path) -> None:
    data = pattern(1 << 20)
    check(tmp_path, replicas((1 << 19,), (2,), (2,)), data, data, memory=1 << 16)
    nan = np.array([np.nan, 1], "f4").tobytes()
    check(tmp_path / "nan", replicas((2,), (4,), (4,), "F32"), nan, nan)
    check(tmp_path / "packed", replicas((7, 2), (0, 0), (0, 0), "F4"), b"1234567", b"1234567")
    check(tmp_path / "empty", replicas((0, 3), (2, 2), (2, 2)), b"12345", b"12345")


@pytest.mark.product
@pytest.mark.parametrize("memory", [1 << 16, 1 << 26])
@pytest.mark.parametrize("cut", [False, True])
def test_different_replicas(tmp_path: Path, memory: int, cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the tensor, the first element that differs, both files and both values."""
    if cut:
        monkeypatch.setattr(schedule, "_MIB", 1 << 16)
    a = np.arange(600 * 500, dtype="u4").reshape(600, 500)
    b = a.T.copy()
    b[123, 456] = 7  # element [456, 123] of a
    with pytest.raises(CorruptError) as e:
        check(tmp_path, replicas((600, 500), (2000, 4), (4, 2400), "I32"), a.tobytes(), b.tobytes(), memory=memory)
    at = 456 * 500 + 123
    assert e.value.what == f"two copies of `model.norm.weight` differ, first at element {at:,}: {at} and 7"
    near, far = at * 4, (123 * 600 + 456) * 4
    assert e.value.where == (
        f"{tmp_path}/src/0 [bytes {near:,}..{near + 4:,})",
        f"{tmp_path}/src/1 [bytes {far:,}..{far + 4:,})",
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["src"]


ROW = np.arange(100, 112, dtype="u2")
ZERO = np.zeros(12, "u2")


@given(st.lists(st.sampled_from(("row", "zero", "other")), min_size=1, max_size=9), st.booleans(), st.booleans())
def test_padding(tmp_path_factory: pytest.TempPathFactory, kinds: list[str], like: bool, tight: bool) -> None:
    """Zeros throughout, or copies of the stated row throughout."""
    rows = {"row": ROW, "zero": ZERO, "other": np.append(ROW[:-1], [5]).astype("u2")}
    data = np.stack([ROW, *[rows[k] for k in kinds]]).tobytes()
    step = AssertPadding(
        Block(0, 24, (24, 12, 2)),
        (len(kinds), 2, 6),
        "BF16",
        Block(0, 0, (12, 2)) if like else None,
        "model.embed_tokens.weight",
    )
    directory = tmp_path_factory.mktemp("padding")
    good = set(kinds) == {"zero"} or (like and set(kinds) == {"row"})
    with pytest.MonkeyPatch.context() as patch:
        if tight:  # less than a row at a time
            patch.setattr("ckpttool.execute.checks._BLOCK", 16)
        if good:
            check(directory, step, data)
            return
        with pytest.raises(CorruptError, match=r"padding of `model.embed_tokens.weight` is not") as e:
            check(directory, step, data)
    assert e.value.what.endswith("zeros or copies of the last row" if like else "is not zeros")


def test_agreement_is_an_answer_and_a_cut_off_file_is_an_error(tmp_path: Path) -> None:
    """A source that cannot be read is not one whose blocks differ."""
    path = tmp_path / "a"
    path.write_bytes(b"abcdabcdxxxx")

    def same(at: int) -> AssertEqual:
        return AssertEqual(Block(0, 0, (1,)), Block(0, at, (1,)), (4,), "U8", "a")

    assert agree([same(4)], [str(path)])
    assert not agree([same(4), same(8)], [str(path)])
    with pytest.raises(CorruptError):
        agree([same(10)], [str(path)])
