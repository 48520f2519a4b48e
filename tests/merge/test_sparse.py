"""Sparse task arithmetic against references that hold whole tensors and are written straight from the formulas."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool.errors import UsageError
from ckpttool.kernels.merge.base import CHUNK, MergeTensor
from ckpttool.kernels.merge.draws import CounterDraws, DrawnTensor, Working, mergekit_draws
from ckpttool.kernels.merge.sparse import _RADIX, METHODS, _chances, _order, _order_of_row, drawing
from tests.helpers.sample import examples, some
from tests.merge.driver import run_method

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpttool.kernels.merge.base import Array

F = np.float32
SUMS = ("task_arithmetic", "dare_linear", "della_linear", "breadcrumbs")


class Uniform:
    """Draws from numbers that the reference sees as well."""

    def __init__(self, models: int, size: int, seed: int) -> None:
        self.numbers = np.random.default_rng(seed).random((models, size))

    def bernoulli(self, model: int, start: int, probability: float | Array, out: Array) -> None:
        out[...] = self.numbers[model, start : start + len(out)] < probability


def chosen(name: str, delta: Array, p: Mapping[str, Any], uniform: Array) -> Array:
    """Which elements of a delta stay."""
    flat, n, density = np.abs(delta).ravel(), delta.size, p["density"]
    mask = np.zeros(n, np.bool_)
    if density == 1 or name == "task_arithmetic":
        mask[:] = True
    elif density == 0:
        pass
    elif name == "ties":
        mask[(-flat).argsort(kind="stable")[: max(1, int(density * n))]] = True
    elif name.startswith("breadcrumbs"):
        kept = int(density * n)
        lowest = max(0, n - kept - int(p["gamma"] * n))
        mask[flat.argsort(kind="stable")[lowest : lowest + kept]] = True
    elif name.startswith("dare"):
        mask[:] = uniform < density
    else:
        columns = delta.shape[-1] if delta.ndim else 1
        share = np.arange(columns, dtype=F) / F(max(columns - 1, 1))
        chances = share * 2 * F(p["epsilon"]) + F(density - p["epsilon"]) if columns > 1 else np.full(1, density, F)
        for a in range(0, n, columns):
            order = a + flat[a : a + columns].argsort(kind="stable")
            mask[order] = uniform[order] < chances
    return mask.reshape(delta.shape)


def reference(
    name: str, models: Sequence[Array], base: Array, per_model: Sequence[Mapping[str, Any]], whole: Mapping[str, Any],
    uniform: Array,
) -> Array:  # fmt: skip
    products: list[Array] = []
    for x, p, u in zip(models, per_model, uniform, strict=True):
        delta = x - base
        mask = chosen(name, delta, p, u)
        left = np.where(mask, delta, F(0))
        before, after = np.abs(delta).sum(dtype=np.float64), np.abs(left).sum(dtype=np.float64)
        thinned = name != "task_arithmetic" and 0 < p["density"] < 1
        if whole["rescale"] and thinned and before >= 1e-7 and after >= 1e-7:
            left = left * (F(before) / F(after))
        products.append(F(p["weight"]) * left)
    total: Array = np.zeros(base.shape, F)
    for product in products:
        total = total + product
    if name in SUMS:
        mixed = total
        divisor: Array = np.zeros((), F)
        for m in per_model:
            divisor = divisor + F(m["weight"])
        divisor = np.where(np.abs(divisor) < 1e-8, F(1), divisor)
    else:
        mixed, divisor = np.zeros(base.shape, F), np.zeros(base.shape, F)
        for product, m in zip(products, per_model, strict=True):
            agrees = np.where(total >= 0, product > 0, product < 0)
            mixed = mixed + np.where(agrees, product, F(0))
            divisor = divisor + np.where(agrees, F(m["weight"]), F(0))
        divisor = np.where(divisor == 0, F(1), divisor)
    if whole["normalize"]:
        mixed = mixed / divisor
    return np.asarray(base + mixed * F(whole["lambda"]), F)


def same(a: Array, b: Array) -> bool:
    """Equal in every bit, but for the sign of zeros."""
    return a.shape == b.shape and a.dtype == b.dtype and bool(np.array_equal(a + F(0), b + F(0)))


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    name = draw(st.sampled_from(sorted(METHODS)))
    shape = draw(st.sampled_from([(), (1,), (2,), (37,), (5, 1), (1, 6), (8, 9), (3, 4, 5), (2, 3, 1), (64, 33)]))
    count = draw(st.integers(1, 4))
    weight = st.sampled_from([0.6, 0.4, 1.0, -0.5, 0.0, 0.5, 1e-3])
    whole = {
        "normalize": draw(st.booleans()),
        "rescale": draw(st.booleans()),
        "lambda": draw(st.sampled_from([1.0, 0.7, -2.0])),
        "int8_mask": draw(st.booleans()),
    }
    per_model = []
    for _ in range(count):
        p = {"weight": draw(weight), "density": draw(st.sampled_from([0.0, 0.2, 0.5, 0.77, 0.8, 1.0]))}
        if "gamma" in METHODS[name].per_model:
            p["gamma"] = draw(st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]))
        if "epsilon" in METHODS[name].per_model:
            p["epsilon"] = draw(st.sampled_from([0.05, 0.15]))
        per_model.append(p)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    grid = draw(st.sampled_from([1, 3, 1000]))  # few distinct values: equals everywhere
    base = (rng.integers(-grid, grid + 1, shape) / 8).astype(ml_dtypes.bfloat16).astype(F)
    models = []
    for _ in range(count):
        step = rng.integers(-grid, grid + 1, shape) / 64 * (rng.random(shape) < 0.7)
        models.append((base + step).astype(ml_dtypes.bfloat16).astype(F))
    return name, {
        "models": models, "base": base, "per_model": per_model, "whole": whole,
        "draws": Uniform(count, prod(shape), draw(st.integers(0, 9))), "chunk": draw(st.integers(1, 200)),
    }  # fmt: skip


@given(case=cases())
@settings(max_examples=examples(400))
def test_results_are_those_of_the_formulas(case: tuple[str, dict[str, Any]]) -> None:
    name, given = case
    found = run_method(METHODS[name], **given)
    wanted = reference(name, given["models"], given["base"], given["per_model"], given["whole"], given["draws"].numbers)
    assert same(found, wanted)


@pytest.mark.product(one_in=2)
@pytest.mark.parametrize("name", sorted(METHODS))
def test_large_tensors_in_chunks_of_the_executor(name: str) -> None:
    rng = np.random.default_rng(1)
    shape = (3, CHUNK // some(512, 1024), 500)
    base = rng.standard_normal(shape).astype(ml_dtypes.bfloat16).astype(F)
    models = [(base + rng.standard_normal(shape) * 0.03).astype(ml_dtypes.bfloat16).astype(F) for _ in range(2)]
    per_model = [{"weight": 0.6, "density": 0.5}, {"weight": 0.4, "density": 0.7}]
    method = METHODS[name]
    whole = {k: p.default for k, p in method.whole.items()} | {"rescale": True}
    draws = Uniform(2, base.size, 1)
    found = run_method(method, models, base, per_model=per_model, whole=whole, draws=draws)
    complete = [{k: p.get(k, s.default) for k, s in method.per_model.items()} for p in per_model]
    assert same(found, reference(name, models, base, complete, whole, draws.numbers))


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_density_of_one_or_zero_needs_no_pass_before_the_last(name: str) -> None:
    method = METHODS[name]
    models = [np.ones((4, 5), F)] * 2

    class Draws:
        def bernoulli(self, model: int, start: int, probability: float | Array, out: Array) -> None:
            raise AssertionError

    for density in (0.0, 1.0):
        per_model = tuple({"weight": 1.0, "density": density, "gamma": 0.1, "epsilon": 0.1} for _ in models)
        whole = {"normalize": True, "rescale": True, "lambda": 1.0, "int8_mask": False}
        program = method.program(MergeTensor("x", (4, 5), per_model, whole, True, Draws()))
        assert not list(program)


def test_the_registry_has_mergekits_names_and_defaults() -> None:
    shared = {"weight": None, "density": 1.0}
    for name, method in METHODS.items():
        assert method.name == name
        assert method.base == "needed"
        extra = {"gamma": 0.01} if "breadcrumbs" in name else {"epsilon": 0.15} if "della" in name else {}
        assert {k: p.default for k, p in method.per_model.items()} == shared | extra
        assert {k: p.default for k, p in method.whole.items()} == {
            "normalize": name in {"ties", "della"},
            "lambda": 1.0,
            "rescale": "dare" in name or "della" in name,
            "int8_mask": False,
        }
        assert method.random == ("dare" in name or "della" in name)
        assert method.rows == ("della" in name)
        assert method.one_at_a_time == (name in SUMS)


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("ties", {"density": 1.5}, "a density of 1.5"),
        ("dare_ties", {"density": -0.1}, "a density of -0.1"),
        ("breadcrumbs", {"density": 0.5, "gamma": 2.0}, "a gamma of 2.0"),
        ("della", {"density": 0.9, "epsilon": 0.1}, "density 0.9 -/[+] epsilon 0.1"),
        ("della_linear", {"density": 0.1, "epsilon": 0.15}, "density 0.1 -/[+] epsilon 0.15"),
    ],
)
def test_impossible_parameters_are_refused(name: str, parameters: dict[str, float], message: str) -> None:
    x = np.ones((2, 3), F)
    with pytest.raises(UsageError, match=message):
        run_method(METHODS[name], [x], x, per_model=[{"weight": 1.0} | parameters], draws=CounterDraws(0, "x"))


def test_who_draws() -> None:
    densities = [{"density": d} for d in (0.0, 0.5, 1.0)]
    assert drawing("dare_ties", densities) == [True, True, False]
    assert drawing("dare_linear", densities) == [True, True, False]
    assert drawing("della", densities) == drawing("della_linear", densities) == [False, True, False]
    assert drawing("ties", densities) == drawing("breadcrumbs", densities) == [False, False, False]


MERGEKIT = json.loads((Path(__file__).parents[2] / "fixtures/merge/sparse.json").read_text(encoding="utf-8"))


def small() -> tuple[list[Array], Array]:
    i = np.arange(24).reshape(3, 8)
    base = (((i * 7) % 11 - 5) / 8).astype(F)
    return [base + (((i * m) % 13 - 6) / 64).astype(F) for m in (5, 8)], base


@pytest.mark.parametrize("name", sorted(METHODS))
def test_mergekit_gives_the_same(name: str) -> None:
    models, base = small()
    per_model = [{"weight": 0.6, "density": 0.5}, {"weight": 0.4, "density": 0.7}]
    draws = mergekit_draws(42, [DrawnTensor("x", 24, drawing(name, per_model))])("x")
    assert run_method(METHODS[name], models, base, per_model=per_model, draws=draws).ravel().tolist() == MERGEKIT[name]


def test_chances_in_bf16_are_those_of_mergekit() -> None:
    assert (_chances(300, 0.7, 0.1, "BF16") * 256).tolist() == MERGEKIT["della_chances"]


@pytest.mark.parametrize(("working", "kind"), [("F32", F), ("F16", np.float16), ("BF16", ml_dtypes.bfloat16)])
def test_della_ranks_what_the_working_dtype_tells_apart(working: Working, kind: type) -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((20, 300)).astype(F)
    per_model = [{"weight": 1.0, "density": 0.7, "epsilon": 0.1}]
    draws = mergekit_draws(42, [DrawnTensor("x", x.size, [True], working)])
    found = run_method(
        METHODS["della_linear"], [x], x * 0, per_model=per_model, whole={"rescale": False}, draws=draws("x")
    )
    ranks = np.argsort(np.argsort(np.abs(x.astype(kind)).astype(F), axis=1, kind="stable"), axis=1)
    mask = np.empty(x.size, np.bool_)
    draws("x").bernoulli(0, 0, _chances(300, 0.7, 0.1, working)[ranks].ravel(), mask)
    assert np.array_equal(found.ravel() != 0, mask)


def test_ties_keeps_one_element_at_least() -> None:
    found = run_method(
        METHODS["ties"], [np.array([1, 3, 3], F)], np.zeros(3, F), per_model=[{"weight": 1.0, "density": 0.2}]
    )
    assert found.tolist() == [0, 3, 0]


@pytest.mark.parametrize("columns", [1, 7, _RADIX - 1, _RADIX, 5000])
def test_rows_are_ordered_as_a_stable_sort_orders_them(columns: int) -> None:
    """Equal magnitudes by position, in rows of every length: bfloat16 differences have many."""
    rng = np.random.default_rng(columns)
    rows = np.abs(rng.standard_normal((3, columns)).astype(ml_dtypes.bfloat16).astype(F) * F(1e-3))
    rows[:, ::3] = 0
    want = rows.argsort(axis=1, kind="stable")
    assert np.array_equal(_order(rows, np.empty(rows.shape, np.uint64)), want)
    assert all(np.array_equal(_order_of_row(r), w) for r, w in zip(rows, want, strict=True))
