"""PaddleFormers' merge_config.json: read whole, what has no effect noted, what is not done refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckpttool.errors import CkptError, ConflictError, UnsupportedError, UsageError
from ckpttool.kernels.merge import METHODS
from ckpttool.recipe.model import ModelRef, Recipe, Setting
from ckpttool.recipe.paddle import IDLE, parse_paddle, read_paddle

FULL: dict[str, Any] = {
    "base_model_path": None,
    "convert_from_hf": True,
    "copy_file_list": ["config.json"],
    "epsilon": 0.14,
    "lora_model_path": None,
    "max_tensor_mem": 0.5,
    "merge_method": "linear",
    "merge_prefix": "model",
    "merge_type": "linear",
    "merge_with_qdq_base_model": False,
    "model_path_list": ["a", "b"],
    "model_path_str": None,
    "n_process": 1,
    "normalize": True,
    "output_path": "out",
    "rescale": True,
    "reserve_p": 0.7,
    "save_to_hf": True,
    "slerp_alpha": 0.3,
    "slerp_dot_threshold": 0.9995,
    "slerp_normalize_eps": 1e-08,
    "sparsify_type": None,
    "split_pieces": 8,
    "tensor_type": "pd",
    "ties_elect_type": "sum",
    "weight_list": [0.7, 0.3],
}
"""Every field, as the tool itself writes them."""


@pytest.fixture(autouse=True)
def _models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "base", "lora"):
        (tmp_path / name).mkdir()


def parsed(**changes: Any) -> Recipe:
    return parse_paddle(json.dumps(FULL | changes))


def values(recipe: Recipe) -> dict[str, Any]:
    return {n: s.conditions[0].values[0] for n, s in recipe.parameters.items()}


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("linear", {"normalize"}),
        ("slerp", {"slerp_alpha", "slerp_dot_threshold", "slerp_normalize_eps"}),
        ("ties", {"normalize", "elect_count", "reserve_p", "rescale"}),
        ("dare_linear", {"normalize", "reserve_p", "rescale"}),
        ("dare_ties", {"normalize", "elect_count", "reserve_p", "rescale"}),
        ("della_linear", {"normalize", "reserve_p", "rescale", "epsilon"}),
        ("della", {"normalize", "elect_count", "reserve_p", "rescale", "epsilon"}),
    ],
)
@pytest.mark.parametrize("base", [None, "base"])
def test_methods(method: str, parameters: set[str], base: str | None) -> None:
    recipe = parsed(merge_method=method, base_model_path=base)
    assert recipe.method == f"paddle_{method}"
    assert recipe.base == (ModelRef(base) if base else None)
    assert [s.model for s in recipe.slices[0].sources] == [ModelRef("a"), ModelRef("b")]
    found = values(recipe)
    assert set(found) == parameters == set(METHODS[recipe.method].whole)
    assert all(v == FULL[n] for n, v in found.items() if n != "elect_count")
    assert found.get("elect_count", False) is False
    weights = [dict(s.parameters) for s in recipe.slices[0].sources]
    expected = [{"weight": Setting.of("float", w)} for w in (0.7, 0.3)]
    assert weights == (expected if "weight" in METHODS[recipe.method].per_model else [{}, {}])
    assert (recipe.component, recipe.remove_keys) == ("model", ())


def test_signs_elected_by_number() -> None:
    assert values(parsed(merge_method="ties", ties_elect_type="count"))["elect_count"] is True
    with pytest.raises(UsageError, match="neither `sum` nor `count`"):
        parsed(merge_method="ties", ties_elect_type="majority")


def test_no_weights_means_equal_and_normalized() -> None:
    recipe = parsed(weight_list=None, normalize=False)
    assert [s.parameters["weight"].at("x", 0) for s in recipe.slices[0].sources] == [1, 1]
    assert values(recipe) == {"normalize": True}
    assert any("weight_list is not given" in n for n in recipe.notes)


def test_a_short_file_has_the_tools_defaults() -> None:
    recipe = parse_paddle('{"model_path_str": "a, b"}')
    assert recipe.method == "paddle_linear"
    assert [str(r) for r in recipe.references()] == ["a", "b"]


def test_what_has_no_effect_is_noted_with_its_reason() -> None:
    notes = parsed(device="cpu", merge_type="x", sparsify_type="trim").notes
    assert {n.split(" ")[0] for n in notes} == set(IDLE)
    assert all(": " in n for n in notes)
    assert not parse_paddle('{"model_path_list": ["a", "b"], "weight_list": [1, 2]}').notes


def test_an_adapter_on_its_base() -> None:
    recipe = parsed(
        model_path_list=None,
        weight_list=None,
        base_model_path="base",
        lora_model_path="lora",
        remove_keys=["lm_head.weight"],
        merge_prefix="master_weights",
    )
    assert (recipe.method, recipe.references()) == ("passthrough", (ModelRef("base", ("lora",)),))
    assert (recipe.component, recipe.remove_keys) == ("master_weights", ("lm_head.weight",))
    assert recipe.base is None


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"merge_method": "slrep"}, UsageError, "no merge method `slrep`"),
        ({"merge_with_qdq_base_model": True}, UnsupportedError, "quantized form"),
        ({"merge_prefix": "optimizer"}, UsageError, "neither `model` nor `master_weights`"),
        ({"weight_list": [1]}, ConflictError, "1 weights are given for 2 models"),
        ({"weight_list": [1, "x"]}, UsageError, "`x` is not a finite number"),
        ({"weight_list": 1}, UsageError, "`1` is not a list"),
        ({"model_path_str": "a,b"}, ConflictError, "exclude each other"),
        ({"model_path_list": None}, UsageError, "nothing to merge"),
        ({"model_path_list": ["a", "a"]}, ConflictError, "`a` is listed twice"),
        ({"model_path_list": ["a", "nowhere"]}, UsageError, "there is no `nowhere` here"),
        ({"model_path_list": ["a", "b+lora"]}, UsageError, "there is no `b"),
        ({"lora_model_path": "lora", "base_model_path": "base"}, ConflictError, "exclude each other"),
        ({"lora_model_path": "lora", "model_path_list": None}, UsageError, "needs `base_model_path`"),
        ({"merge_method": "slerp", "model_path_list": ["a", "b", "base"]}, UsageError, "merges exactly 2 models"),
        ({"merge_method": "ties", "reserve_p": 1.5}, UsageError, "from 0 to 1"),
        ({"merge_method": "ties", "reserve_p": [0.1, 0.2]}, UsageError, "not a finite number"),
        ({"normalize": "yes"}, UsageError, "not true or false"),
        ({"merge_with_qdq_base_model": "no"}, UsageError, "neither true nor false"),
        ({"remove_keys": "lm_head.weight"}, UsageError, "is not a list"),
    ],
)
def test_refused(changes: dict[str, Any], error: type[CkptError], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        parsed(**changes)
    assert type(caught.value) is error
    assert "merge_config.json" in caught.value.where[0]


def test_all_unknown_keys_are_listed() -> None:
    with pytest.raises(UsageError, match="2 things are wrong") as caught:
        parsed(wieght_list=[1], reserve=0.5)
    assert "did you mean `weight_list`?" in caught.value.render()
    assert "`reserve`" in caught.value.render()


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("[]", UsageError, "not a mapping"),
        ("{", UsageError, "not JSON"),
        ('{"normalize": true, "normalize": false}', ConflictError, "`normalize` comes twice"),
        ("[" * 100_000, UsageError, "too deep"),
        ('{"reserve_p": ' + "1" * 5000 + "}", UsageError, "too long"),
    ],
    ids=["list", "cut", "twice", "deep", "long"],
)
def test_not_a_config(text: str, error: type[CkptError], words: str) -> None:
    with pytest.raises(error, match=words):
        parse_paddle(text)


def test_paths_beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "merge_config.json").write_text(json.dumps(FULL), encoding="utf-8")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    recipe = read_paddle(tmp_path / "merge_config.json")
    assert [r.path for r in recipe.references()] == [str(tmp_path / n) for n in "ab"]
