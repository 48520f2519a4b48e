"""Command-line words as recipes, with errors in the words of the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpttool.errors import CkptError, ConflictError, UsageError
from ckpttool.recipe.flags import recipe_of
from ckpttool.recipe.mergekit import parse_mergekit
from ckpttool.recipe.model import ModelRef


@pytest.fixture(autouse=True)
def _models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "base", "lora"):
        (tmp_path / name).mkdir()


def test_the_same_as_the_recipe_in_a_file() -> None:
    words = recipe_of(
        ["a", "b+lora"],
        method="ties",
        weights="0.6,0.4",
        base="base",
        params=["density=0.5,0.7", "normalize=false", "lambda=2"],
    )
    text = parse_mergekit("""
merge_method: ties
base_model: base
models:
- {model: a, parameters: {weight: 0.6, density: 0.5}}
- {model: b+lora, parameters: {weight: 0.4, density: 0.7}}
parameters: {normalize: false, lambda: 2}
""")
    assert words.record() == text.record()
    assert words.references() == (ModelRef("a"), ModelRef("b", ("lora",)), ModelRef("base"))


def test_one_value_is_for_all_models() -> None:
    recipe = recipe_of(["a", "b"], method="ties", base="base", params=["weight=1", "density=0.5"])
    assert recipe.record()["parameters"] == {"weight": 1, "density": 0.5}


def test_one_source_takes_one_weight() -> None:
    assert recipe_of(["a"], method="linear", weights="2").record()["parameters"] == {"weight": 2}


@pytest.mark.parametrize(
    ("sources", "words", "error", "what", "hint"),
    [
        ("a b", {"method": "lerp"}, UsageError, "no merge method `lerp`", "slerp"),
        ("a b", {"method": None}, UsageError, "no merge method is given", "known: "),
        (
            "a b",
            {"method": "linear"},
            UsageError,
            "needs the parameter `weight`, which is missing for a, b",
            "--weights",
        ),
        ("a b", {"method": "linear", "weights": "1,2,3"}, ConflictError, "has 3 values for 2 sources", ""),
        ("a b", {"method": "linear", "weights": "1"}, ConflictError, "has 1 value for 2 sources", ""),
        ("a b", {"method": "linear", "weights": "1,x"}, UsageError, "`x` in `weight=1,x` is not a finite number", ""),
        ("a b", {"method": "linear", "weights": "1,nan"}, UsageError, "not a finite number", ""),
        ("a b", {"method": "average", "weights": "1,2"}, UsageError, "`average` has no weights", ""),
        (
            "a b",
            {"method": "linear", "weights": "1,2", "params": ["weight=1"]},
            ConflictError,
            "given twice",
            "keep one",
        ),
        ("a b", {"method": "linear", "weights": "1,2", "params": ["norm"]}, UsageError, "not NAME=VALUE", ""),
        ("a b", {"method": "ties", "weights": "1,2"}, UsageError, "needs a base", "--base"),
        ("a b", {"method": "slerp", "base": "a"}, UsageError, "needs the parameter `t`", "--param t=VALUE"),
        ("a b", {"method": "slerp", "base": "a", "params": ["t=1,2"]}, UsageError, "one value for the whole", "recipe"),
        (
            "a b",
            {"method": "linear", "weights": "1,2", "params": ["normalise=no"]},
            UsageError,
            "no parameter",
            "normalize",
        ),
        ("a x.yml", {"method": "average"}, UsageError, "is a recipe", "alone"),
        ("a nowhere", {"method": "average"}, UsageError, "there is no `nowhere`", ""),
        ("a org/model", {"method": "average"}, UsageError, "there is no `org/model`", "hf://org/model"),
        ("a a", {"method": "average"}, ConflictError, "`a` is listed twice", ""),
    ],
)
def test_refused(sources: str, words: dict[str, object], error: type[CkptError], what: str, hint: str) -> None:
    with pytest.raises(error, match=what) as caught:
        recipe_of(sources.split(), **words)  # type: ignore[arg-type]
    assert type(caught.value) is error
    assert hint in (caught.value.hint or "")


def test_several_problems_at_once() -> None:
    with pytest.raises(UsageError, match="3 things are wrong with the recipe") as caught:
        recipe_of(["a", "nowhere"], method="ties", weights="1,x", params=["densty=1"])
    assert len(caught.value.where) == 3
