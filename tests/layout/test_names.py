"""Patterns with captures, and the cache that renames by template."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.dialects.family import FamilyDialect
from ckpttool.errors import UnsupportedError
from ckpttool.layout.family import load_family
from ckpttool.layout.names import Renamer, expand, has_literal_number, pattern_regex, split_numbers
from ckpttool.layout.statements import Rename
from tests.helpers.tiny_names import all_lists


@pytest.mark.parametrize(
    ("pattern", "name", "captures"),
    [
        ("a.{layer}.b", "a.3.b", {"layer": "3"}),
        ("a.{layer}.b", "a.x.b", None),
        ("a.{layer}.b", "a.3.b.c", None),
        ("a.{layer}.b", "za.3.b", None),
        ("{a}.w.{b}", "x.y.w.z", {"a": "x.y", "b": "z"}),
        ("{a}.{a}", "x.x", {"a": "x"}),
        ("{a}.{a}", "x.y", None),
        ("{x,y}.w", "y.w", {}),
        ("{x,y}.w", "z.w", None),
        ("{x.,}w", "w", {}),
        ("{x.,}w", "x.w", {}),
        ("a.*", "a.b.c", {}),
        ("a.*", "aXb", None),
        ("m.{layer}.e.{expert}.w", "m.1.e.22.w", {"layer": "1", "expert": "22"}),
    ],
)
def test_patterns(pattern: str, name: str, captures: dict[str, str] | None) -> None:
    m = pattern_regex(pattern).match(name)
    assert (m and m.groupdict()) == captures


def test_a_pattern_with_a_bad_capture_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="is not a capture"):
        pattern_regex("a.{1x}.b")


def test_expanding_puts_captures_back() -> None:
    assert expand("{a}.layers.{layer}.w", {"a": "model", "layer": "7"}) == "model.layers.7.w"


@given(st.lists(st.sampled_from(["a", "w1", "3", "17", "0", "experts", "1x"]), min_size=1, max_size=7))
def test_splitting_numbers_loses_nothing(parts: list[str]) -> None:
    name = ".".join(parts)
    template, numbers = split_numbers(name)
    assert list(numbers) == [p for p in parts if p.isdigit()]
    at = iter(numbers)
    assert "".join(next(at) if c == "#" else c for c in template) == name


FUNCTIONS: list[Callable[[str], str | None]] = [
    lambda n: n,
    lambda _: None,
    lambda n: n.replace("layers", "h"),
    lambda n: n.split(".", 1)[1] if n.startswith("model.") else n,
    lambda n: (
        n.replace("experts.", "experts") if "down" in n else n
    ),  # the number is not a component of its own any more
    lambda n: ".".join(reversed(n.split("."))),  # the numbers change places
    lambda _: "fixed",  # the numbers are gone
    lambda n: n + ".0",  # a number comes in
]

NAMES = [
    f"{model}layers.{layer}.mlp.experts.{expert}.{w}.weight"
    for model in ("model.", "")
    for layer in (0, 3, 7, 61)
    for expert in (0, 3, 7)
    for w in ("down", "up", "w1")
] + ["model.norm.weight", "lm_head.weight", "7", "a#b.3.c"]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_cache_gives_what_the_function_gives(function: Callable[[str], str | None]) -> None:
    cached = Renamer(function)
    for names in (NAMES, reversed(NAMES)):
        for name in names:
            assert cached(name) == function(name)


@pytest.mark.parametrize(
    ("pattern", "literal"),
    [
        ("model.layers.{layer}.w1.*", False),
        ("model.layers.0.w", True),
        ("{0,1}.w", True),
        ("{a}.7", True),
        ("w{a}1.x2", False),
    ],
)
def test_patterns_that_name_one_number(pattern: str, literal: bool) -> None:
    assert has_literal_number(pattern) is literal


def test_the_cache_asks_once_for_each_template() -> None:
    asked = []

    def function(name: str) -> str:
        asked.append(name)
        return name.replace("model", "m")

    cached = Renamer(function)
    assert [cached(f"model.layers.{i}.w") for i in range(1000)] == [f"m.layers.{i}.w" for i in range(1000)]
    assert len(asked) == 2


@pytest.mark.parametrize("family", sorted({family for family, _ in all_lists()}))
def test_the_renames_of_a_family_are_the_same_cached_and_plain(family: str) -> None:
    names = [n for (f, _), listed in all_lists().items() if f == family for n in listed.tensors]
    for naming in load_family(family, {}).spec.namings:
        for op in FamilyDialect(naming).statements(load_family(family, {})):
            if isinstance(op, Rename):
                assert op.by_template
                cached = Renamer(op.forward)
                assert [cached(n) for n in names] == [op.forward(n) for n in names]
