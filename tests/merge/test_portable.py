"""Merged bytes and statistics do not depend on the processor, and what makes them so is right."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from fractions import Fraction
from math import acos, cos, exp, log, sin
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckpttool
from ckpttool.kernels.merge.base import Array
from ckpttool.kernels.portable import Factor, arccosine, dot, logarithm, row_dots, sine_cosine, softmax, tree_sum
from tests.helpers.tensorfile import read_all
from tests.merge import processors
from tests.merge.models import finetuned, llama, merge, save

SEEDS = st.integers(0, 1 << 16)


def forced(*words: object) -> str:
    """What a Python process prints that takes this processor for an old one."""
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, env=processors.older(), check=True, capture_output=True, text=True).stdout


def test_every_method_and_statistic_gives_the_same_bits_with_other_kernels() -> None:
    here, there = processors.everything(), json.loads(forced("-m", "tests.merge.processors"))
    if here.pop("BLAS") == there.pop("BLAS"):
        pytest.skip("this BLAS has one kernel for all processors")
    assert {k for k in here if here[k] != there[k]} == set()


def test_parts_by_other_kernels_are_verified(tmp_path: Path) -> None:
    """Two machines make one DST, and the second one computes all of it once more."""
    base = llama(layers=2)
    sources = [save(tmp_path / n, finetuned(base, i)) for i, n in enumerate("abc")]
    words = (*sources, "--method", "karcher", "--dtype", "f32", "--max-shard-size", "10KB")
    merge(*words, "-o", tmp_path / "here")
    forced("-m", "ckpttool", "merge", *words, "-o", tmp_path / "both", "--part", "1/2")
    merge(*words, "-o", tmp_path / "both", "--part", "2/2", "--verify")
    one, other = read_all(tmp_path / "here"), read_all(tmp_path / "both")
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[n].bits, other[n].bits) for n in one)


PACKAGE = Path(ckpttool.__file__).parent
CHOOSES_AN_ORDER = {"sum", "mean", "std", "var", "dot", "vdot", "vecdot", "inner", "matmul", "einsum", "linalg"}
CHOOSES_A_LAST_BIT = {"sin", "cos", "tan", "arcsin", "arccos", "arctan", "arctan2", "exp", "log", "tanh", "power"}
ALLOWED = {
    ("merge/order.py", "var"),  # where to look first for what is found exactly
    ("merge/order.py", "mean"),
    ("merge/paddle.py", "sum"),  # of whole numbers
    ("stats.py", "sum"),  # the same
    ("portable.py", "matmul"),  # of factors that leave nothing to round
}


def test_nothing_on_the_way_to_a_file_or_a_figure_is_left_to_the_processor() -> None:
    found = set()
    for path in [*(PACKAGE / "kernels").rglob("*.py"), PACKAGE / "execute/operands.py", PACKAGE / "execute/permute.py"]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = node.attr if isinstance(node, ast.Attribute) else ""
            name = "matmul" if isinstance(node, ast.MatMult) else name
            if name in CHOOSES_AN_ORDER | CHOOSES_A_LAST_BIT:
                found.add((path.relative_to(PACKAGE / path.relative_to(PACKAGE).parts[0]).as_posix(), name))
    assert found == ALLOWED


# -- sums


def added(terms: list[Any], lanes: int) -> list[Any]:
    """The tree, element by element."""
    while len(terms) > lanes:
        half = len(terms) // 2
        middle = terms[half : len(terms) - half]
        terms = [a + b for a, b in zip(terms[:half], terms[len(terms) - half :], strict=True)] + middle
    return terms


@given(SEEDS, st.integers(0, 90))
def test_dot_products_are_added_in_the_order_that_is_told(seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((2, size)).astype(np.float32)
    wanted = 0.0
    for lane in added([x * y for x, y in zip(a, b, strict=True)], 16):
        wanted += float(lane)
    assert dot(a, b, np.empty_like(a)) == wanted
    rows = np.stack([a, b])
    assert row_dots(rows, np.stack([b, b]), np.empty_like(rows))[0, 0] == wanted
    wide = a.astype(np.float64)
    assert tree_sum(wide) == (added(list(wide), 1) or [0])[0]
    assert tree_sum(np.stack([wide, wide], axis=1)).tolist() == [tree_sum(wide)] * 2


# -- products of matrices


@given(SEEDS, st.integers(1, 70), st.booleans())
def test_low_rank_products(seed: int, rank: int, uneven: bool) -> None:
    """Against exact sums, also where the columns of one factor and the rows of the other differ in size."""
    rng = np.random.default_rng(seed)
    sizes = 10.0 ** rng.uniform(-9, 9, rank) if uneven else np.ones(rank)
    left = (rng.standard_normal((3, rank)) / sizes).astype(np.float32)
    right = (rng.standard_normal((rank, 5)) * sizes[:, None]).astype(np.float32)
    found = Factor(right).product(left)
    assert found.dtype == np.float32
    largest = np.abs(right).max(axis=1)
    for i in range(3):
        # The largest product that the row can have, times what float32 resolves.
        bound = rank * 2.0**-22 * float((np.abs(left[i]) * largest).max())
        for j in range(5):
            exact = sum(Fraction(float(x)) * Fraction(float(y)) for x, y in zip(left[i], right[:, j], strict=True))
            assert abs(float(exact) - float(found[i, j])) <= bound


@given(SEEDS, st.integers(1, 300))
def test_no_low_rank_product_is_rounded_on_the_way(seed: int, rank: int) -> None:
    """Adding up the other way round is the same, and so is any order."""
    rng = np.random.default_rng(seed)
    left = (rng.standard_normal((3, rank)) * 10 ** rng.uniform(-6, 6, (3, rank))).astype(np.float32)
    right = (rng.standard_normal((rank, 5)) * 10 ** rng.uniform(-6, 6, (rank, 5))).astype(np.float32)
    shuffled = rng.permutation(rank)
    np.testing.assert_array_equal(Factor(right).product(left), Factor(right[shuffled]).product(left[:, shuffled]))


def test_low_rank_products_of_narrow_factors_are_exact() -> None:
    left, right = np.arange(-60, 60, dtype=np.float32).reshape(3, 40), np.arange(200, dtype=np.float32).reshape(40, 5)
    np.testing.assert_array_equal(Factor(right).product(left), left.astype(np.int64) @ right.astype(np.int64))
    zero = np.zeros((40, 5), np.float32)
    np.testing.assert_array_equal(Factor(zero).product(left), np.zeros((3, 5)))


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_low_rank_products_show_what_is_not_finite(wrong: float) -> None:
    left, right = np.ones((3, 2), np.float32), np.ones((2, 4), np.float32)
    right[1, 2] = wrong
    assert not np.isfinite(Factor(right).product(left)[:, 2]).any()
    left[1, 0] = wrong
    assert not np.isfinite(Factor(np.ones((2, 4), np.float32)).product(left)[1]).any()


# -- functions


def off(found: Array, wanted: list[float]) -> float:
    return float(np.abs(found - np.array(wanted)).max(initial=0))


@given(st.lists(st.floats(-100, 100), max_size=20))
def test_sine_and_cosine(angles: list[float]) -> None:
    sine, cosine = sine_cosine(np.array(angles))
    assert off(sine, [sin(a) for a in angles]) <= 2e-15
    assert off(cosine, [cos(a) for a in angles]) <= 2e-15
    for a in angles:
        assert sine_cosine(a)[0] == pytest.approx(sin(a), abs=2e-15)
    small = 1e-9 * np.array(angles)
    np.testing.assert_allclose(sine_cosine(small)[0], [sin(a) for a in small], rtol=1e-14, atol=1e-300)


@given(st.lists(st.one_of(st.floats(-1, 1), st.floats(0, 1e-6).map(lambda x: 1 - x)), max_size=20))
def test_arccosine(cosines: list[float]) -> None:
    np.testing.assert_allclose(arccosine(np.array(cosines)), [acos(c) for c in cosines], rtol=4e-15)
    assert [arccosine(1.0), arccosine(-1.0)] == [0, pytest.approx(np.pi, rel=1e-15)]


@given(st.lists(st.floats(1e-9, 1e9), max_size=20), st.lists(st.floats(-0.01, 0.01), max_size=20))
def test_logarithm(values: list[float], steps: list[float]) -> None:
    assert off(logarithm(np.array(values)), [log(v) for v in values]) <= 5e-13
    assert off(logarithm(1 + np.array(steps)), [log(1 + s) for s in steps]) <= 2e-17


@given(SEEDS, st.sampled_from([0.01, 1.0, 100.0, 1e30]))
def test_softmax(seed: int, reach: float) -> None:
    rows = (np.random.default_rng(seed).uniform(-reach, reach, (3, 17))).astype(np.float32)
    found = softmax(rows)
    for row, mine in zip(rows, found, strict=True):
        powers = [exp(float(x) - float(row.max())) for x in row]
        np.testing.assert_allclose(mine, np.array(powers) / sum(powers), rtol=1e-12, atol=1e-26)
