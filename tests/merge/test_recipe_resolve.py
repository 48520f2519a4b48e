"""From recipes to tensors: parameters by filter, gradient and level, slices, bases, tensors that some models lack."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.errors import CkptError, ConflictError, UsageError
from ckpttool.kernels.merge import METHODS
from ckpttool.layout.assemble import LAYER
from ckpttool.recipe.mergekit import parse_mergekit
from ckpttool.recipe.model import Condition, ModelRef, Recipe, RecipeSlice, Setting, SliceSource
from ckpttool.recipe.resolve import Merged, Resolved, resolve

PER_LAYER = ("self_attn.q_proj.weight", "mlp.up_proj.weight", "input_layernorm.weight")


def llama(layers: int) -> list[str]:
    return [
        "model.embed_tokens.weight",
        *[f"model.layers.{i}.{w}" for i in range(layers) for w in PER_LAYER],
        "model.norm.weight",
        "lm_head.weight",
    ]


@pytest.fixture(autouse=True)
def _models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in "abcd":
        (tmp_path / name).mkdir()


def resolved(text: str, names: dict[str, list[str]] | None = None, layers: int = 5) -> Resolved:
    recipe = parse_mergekit(text)
    return resolved_recipe(recipe, names, layers)


def resolved_recipe(recipe: Recipe, names: dict[str, list[str]] | None = None, layers: int = 5) -> Resolved:
    found = {ref: (names or {}).get(ref.path, llama(layers)) for ref in recipe.references()}
    return resolve(recipe, found, layer=LAYER)


def by_name(result: Resolved) -> dict[str, Merged]:
    assert len({m.name for m in result.tensors}) == len(result.tensors)
    return {m.name: m for m in result.tensors}


def weights(result: Resolved, model: int = 0, parameter: str = "weight") -> dict[str, Any]:
    return {m.name: m.parameters[model][parameter] for m in result.tensors}


def test_models_are_one_slice_over_all_layers() -> None:
    result = resolved("merge_method: linear\nparameters: {weight: 1}\nmodels: [{model: a}, {model: b}]")
    assert [m.name for m in result.tensors] == llama(5)
    a, b = ModelRef("a"), ModelRef("b")
    assert all(m.inputs == ((a, m.name), (b, m.name)) for m in result.tensors)
    assert all((m.base, m.base_at) == (None, None) and m.whole == {"normalize": True} for m in result.tensors)
    assert result.layers == tuple(((a, i), (b, i)) for i in range(5))
    assert (result.partial, result.notes, result.unused) == ((), (), ())


def test_filters_and_gradients_of_one_model() -> None:
    result = resolved("""
models:
- model: a
  parameters:
    weight:
    - filter: mlp
      value: [0.1, 0.9]
    - {filter: norm, value: 0.25}
    - {value: 0.5}
- {model: b, parameters: {weight: 0.3}}
merge_method: task_arithmetic
base_model: c
""")
    a = weights(result)
    assert [a[f"model.layers.{i}.mlp.up_proj.weight"] for i in range(5)] == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9])
    assert {a[n] for n in llama(5) if "norm" in n} == {0.25}
    assert {a[n] for n in llama(5) if "mlp" not in n and "norm" not in n} == {0.5}
    assert set(weights(result, 1).values()) == {0.3}
    assert all(m.base == (ModelRef("c"), m.name) and m.base_at == 2 for m in result.tensors)
    assert by_name(result)["lm_head.weight"].whole == {
        "normalize": False,
        "rescale": False,
        "int8_mask": False,
        "lambda": 1.0,
    }


def test_tensors_outside_the_layers_stand_at_the_gradients_start() -> None:
    a = weights(resolved("merge_method: linear\nmodels: [{model: a, parameters: {weight: [0.2, 0.8]}}]"))
    assert [a[n] for n in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")] == [0.2] * 3
    assert a["model.layers.4.mlp.up_proj.weight"] == 0.8


def test_the_only_layer_stands_at_the_gradients_end() -> None:
    text = "merge_method: linear\nmodels: [{model: a, parameters: {weight: [0.2, 0.8]}}]"
    assert weights(resolved(text, layers=1))["model.layers.0.mlp.up_proj.weight"] == 0.8


def test_nearer_levels_win_and_lists_without_a_match_fall_through() -> None:
    a = weights(
        resolved("""
merge_method: passthrough
parameters: {scale: [{filter: lm_head, value: 4}, {filter: up_proj, value: 5}, {filter: q_proj, value: 6}]}
slices:
- sources:
  - {model: a, layer_range: [0, 1], parameters: {scale: {filter: up_proj, value: 2}}}
  parameters: {scale: [{filter: q_proj, value: 3}, {filter: up_proj, value: 9}]}
"""),
        parameter="scale",
    )
    assert [a[f"model.layers.0.{w}"] for w in PER_LAYER] == [3, 2, 1]  # the slice's, the model's, the default
    assert a["lm_head.weight"] == 4


def test_the_first_condition_that_matches_counts() -> None:
    a = weights(
        resolved("""
merge_method: linear
models: [{model: a}]
parameters: {weight: [{filter: up_proj, value: 1}, {filter: "*", value: 2}, {filter: q_proj, value: 3}]}
""")
    )
    assert [a[f"model.layers.0.{w}"] for w in PER_LAYER] == [2, 1, 2]


def test_filters_are_plain_parts_of_the_name() -> None:
    text = (
        'merge_method: linear\nmodels: [{model: a}]\nparameters: {weight: [{filter: "q.proj", value: 1}, {value: 2}]}'
    )
    result = resolved(text)
    assert set(weights(result).values()) == {2}
    assert result.unused == ("`q.proj` (weight, the whole merge)",)


def test_filters_of_a_model_see_its_own_layer_numbers_and_those_of_the_merge_the_outputs() -> None:
    result = resolved("""
merge_method: ties
base_model: a
parameters: {lambda: [{filter: layers.0., value: 7}, {value: 8}]}
slices:
- sources:
  - {model: a, layer_range: [0, 1]}
  - {model: b, layer_range: [3, 4], parameters: {weight: [{filter: layers.3., value: 1}, {value: 2}]}}
""")
    m = by_name(result)["model.layers.0.mlp.up_proj.weight"]
    assert m.inputs == ((ModelRef("b"), "model.layers.3.mlp.up_proj.weight"),)
    assert m.base == (ModelRef("a"), "model.layers.0.mlp.up_proj.weight")
    assert (m.parameters[0]["weight"], m.whole["lambda"]) == (1, 7)


def test_booleans_step_through_a_gradient() -> None:
    result = resolved(
        "merge_method: linear\nmodels: [{model: a}]\nparameters: {weight: 1, normalize: [true, false, true]}"
    )
    got = [by_name(result)[f"model.layers.{i}.mlp.up_proj.weight"].whole["normalize"] for i in range(5)]
    assert got == [True, True, False, False, True]


def test_whole_numbers_stay_whole() -> None:
    text = "merge_method: karcher\nmodels: [{{model: a}}, {{model: b}}]\nparameters: {{max_iter: {}}}"
    got = [m.whole["max_iter"] for m in resolved(text.format([2, 6])).tensors if "up_proj" in m.name]
    assert got == [2, 3, 4, 5, 6]
    assert all(isinstance(v, int) for v in got)
    with pytest.raises(UsageError, match=r"`max_iter`: a gradient of whole numbers, \[2, 3\], gives 2.25"):
        resolved(text.format([2, 3]))


def test_stacked_slices_number_their_layers_anew() -> None:
    result = resolved("""
merge_method: passthrough
slices:
- sources: [{model: a, layer_range: [0, 2]}]
- sources:
  - model: b
    layer_range: [1, 4]
    parameters: {scale: [{filter: up_proj, value: [0, 1]}, {filter: lm_head, value: 2}]}
""")
    assert [m.name for m in result.tensors] == llama(5)
    a, b = ModelRef("a"), ModelRef("b")
    assert result.layers == (((a, 0),), ((a, 1),), ((b, 1),), ((b, 2),), ((b, 3),))
    found = by_name(result)
    assert found["model.layers.2.mlp.up_proj.weight"].inputs == ((b, "model.layers.1.mlp.up_proj.weight"),)
    assert found["model.embed_tokens.weight"].inputs[0][0] == a  # before the layers: the first slice
    assert found["model.norm.weight"].inputs[0][0] == found["lm_head.weight"].inputs[0][0] == b
    scales = weights(result, parameter="scale")
    assert [scales[f"model.layers.{i}.mlp.up_proj.weight"] for i in range(5)] == [1, 1, 0, 0.5, 1]
    assert scales["lm_head.weight"] == 2


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("transformer.wte.weight", True),
        ("transformer.wpe.weight", True),
        ("transformer.word_embeddings.weight", True),
        ("gpt_neox.embed_in.weight", True),
        ("embed_out.weight", False),
        ("transformer.ln_f.bias", False),
        ("score.weight", False),
    ],
)
def test_which_tensors_come_before_the_layers(name: str, first: bool) -> None:
    names = [name, "h.0.w", "h.1.w"]
    text = (
        "merge_method: passthrough\nslices: [{sources: [{model: a, layer_range: [0, 1]}]},"
        " {sources: [{model: b, layer_range: [0, 1]}]}]"
    )
    result = resolved(text, {"a": names, "b": names})
    assert [m.name for m in result.tensors] == ([name, "h.0.w", "h.1.w"] if first else ["h.0.w", "h.1.w", name])
    assert by_name(result)[name].inputs == ((ModelRef("a" if first else "b"), name),)


def test_a_slice_may_have_a_base_of_its_own() -> None:
    result = resolved("""
merge_method: slerp
parameters: {t: 0.5}
base_model: a
slices:
- {sources: [{model: a, layer_range: [0, 1]}, {model: b, layer_range: [0, 1]}]}
- {sources: [{model: c, layer_range: [1, 2]}, {model: d, layer_range: [2, 3]}], base_model: d}
""")
    found = by_name(result)
    first, second = (found[f"model.layers.{i}.mlp.up_proj.weight"] for i in (0, 1))
    assert (first.base_at, first.inputs[0][0], first.base and first.base[0].path) == (0, ModelRef("b"), "a")
    assert (second.base_at, second.inputs[0][0]) == (1, ModelRef("c"))
    assert second.base == (ModelRef("d"), "model.layers.2.mlp.up_proj.weight")


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_gets_complete_parameters(method: str) -> None:
    m = METHODS[method]
    count = max(1, m.models[0])
    required = {n: Setting.of("float", 0.5) for s in (m.per_model, m.whole) for n, p in s.items() if p.default is None}
    sources = tuple(SliceSource(ModelRef(n)) for n in "abc"[:count])
    recipe = Recipe(method, (RecipeSlice(sources),), ModelRef("d") if m.base != "refused" else None, required)
    for merged in resolved_recipe(recipe).tensors:
        assert len(merged.inputs) == len(merged.parameters) == count
        assert (merged.base is None) == (m.base == "refused")
        assert merged.whole == {n: 0.5 if p.default is None else p.default for n, p in m.whole.items()}
        for given_ in merged.parameters:
            assert given_ == {n: 0.5 if p.default is None else p.default for n, p in m.per_model.items()}


def test_a_method_without_base_merges_every_listed_model() -> None:
    result = resolved("merge_method: linear\nbase_model: a\nparameters: {weight: 1}\nmodels: [{model: a}, {model: b}]")
    assert [ref.path for ref, _ in result.tensors[0].inputs] == ["a", "b"]
    assert result.tensors[0].base is None


def test_filters_that_decide_nothing() -> None:
    result = resolved("""
merge_method: ties
base_model: a
models:
- {model: a, parameters: {density: {filter: mlp, value: 1}}}
- {model: b, parameters: {density: [{filter: norm, value: 1}, {filter: nrom, value: 0.5}]}}
parameters: {weight: [{filter: mlp, value: 1}, {value: 1}, {filter: q_proj, value: 1}]}
""")
    assert result.unused == ("`nrom` (density, b)", "`q_proj` (weight, the whole merge)")


def test_tensors_that_only_some_models_have() -> None:
    text = "merge_method: ties\nbase_model: c\nparameters: {weight: 1}\nmodels: [{model: a}, {model: b}]"
    names = {"a": [*llama(2), "extra.bias"], "b": llama(2)[:-1], "c": [*llama(2), "model.layers.1.q_norm.weight"]}
    result = resolved(text, names)
    found = {m.name: (tuple(r.path for r, _ in m.inputs), m.base is not None) for m in result.partial}
    assert found == {
        "lm_head.weight": (("a",), True),
        "extra.bias": (("a",), False),
        "model.layers.1.q_norm.weight": ((), True),
    }
    lacking = by_name(result)["model.layers.1.q_norm.weight"].missing
    assert lacking == tuple((ModelRef(r), "model.layers.1.q_norm.weight") for r in "ab")


def test_models_of_different_depth() -> None:
    text = (
        "merge_method: linear\nmodels: [{model: a, parameters: {weight: [0, 1]}}, {model: b, parameters: {weight: 1}}]"
    )
    result = resolved(text, {"a": llama(5), "b": llama(3)})
    assert result.notes == ("the models have different numbers of layers: 5 in a, 3 in b",)
    assert {m.name for m in result.partial} == {f"model.layers.{i}.{w}" for i in (3, 4) for w in PER_LAYER}
    found = weights(result)
    assert [found[f"model.layers.{i}.mlp.up_proj.weight"] for i in range(5)] == [0, 0.5, 1, 1, 1]


def test_every_stack_of_layers_has_its_own_gradient() -> None:
    names = [f"visual.blocks.{i}.w" for i in range(3)] + [f"model.layers.{i}.w" for i in range(5)]
    result = resolved("merge_method: linear\nmodels: [{model: a, parameters: {weight: [0, 1]}}]", {"a": names})
    found = weights(result)
    assert [found[n] for n in names] == [0, 0.5, 1, 0, 0.25, 0.5, 0.75, 1]
    assert len(result.layers) == 5


def t5(encoder: int, decoder: int) -> list[str]:
    return [
        "shared.weight",
        *[f"encoder.block.{i}.layer.0.q.weight" for i in range(encoder)],
        "encoder.block.0.layer.0.relative.weight",
        "encoder.final_layer_norm.weight",
        *[f"decoder.block.{i}.layer.0.q.weight" for i in range(decoder)],
        "decoder.block.0.layer.0.relative.weight",
        "decoder.final_layer_norm.weight",
        "lm_head.weight",
    ]


TWO = {"a": t5(2, 4), "b": t5(2, 4)}


def stacked(*slices: str) -> str:
    return "merge_method: passthrough\nslices:\n" + "\n".join(f"- {{{s}}}" for s in slices)


def test_slices_of_one_of_two_stacks() -> None:
    """The other one is whole, from the first slice's models. Norms behind a stack are its last slice's."""
    first = "stack: decoder, sources: [{model: a, layer_range: [1, 3]}]"
    result = resolved(stacked(first, "stack: decoder.block, sources: [{model: b, layer_range: [0, 1]}]"), TWO)
    found = {m.name: (m.inputs[0][0].path, m.inputs[0][1]) for m in result.tensors}
    assert len(found) == len(result.tensors)
    q = "{}.block.{}.layer.0.q.weight"
    assert [found[q.format("decoder", i)] for i in range(3)] == [
        ("a", q.format("decoder", 1)), ("a", q.format("decoder", 2)), ("b", q.format("decoder", 0)),
    ]  # fmt: skip
    assert [found[q.format("encoder", i)] for i in range(2)] == [("a", q.format("encoder", i)) for i in range(2)]
    assert found["decoder.final_layer_norm.weight"][0] == "b"
    assert found["encoder.final_layer_norm.weight"][0] == "a"
    assert (found["shared.weight"][0], found["lm_head.weight"][0]) == ("a", "b")
    a, b = ModelRef("a"), ModelRef("b")
    assert (result.layers, result.stacks) == ((), {"decoder.block.": (((a, 1),), ((a, 2),), ((b, 0),))})


def test_what_only_the_first_layer_has_stays_there() -> None:
    """T5's layers all use the relative positions that are stored with the first."""
    first = "stack: decoder, sources: [{model: a, layer_range: [2, 4]}]"
    result = resolved(stacked(first, "stack: decoder, sources: [{model: b, layer_range: [0, 2]}]"), TWO)
    name = "decoder.block.0.layer.0.relative.weight"
    relative = [m for m in result.tensors if m.name.startswith("decoder") and "relative" in m.name]
    assert [(m.name, m.inputs) for m in relative] == [(name, ((ModelRef("a"), name),))]
    assert result.notes == (
        "`layer.0.relative.weight` is stored with the first layer of a only, and stays with the first",
    )
    kinds = [f"model.layers.{i}.{w}" for i in range(3) for w in (("mlp.w",) if i == 0 else ("experts.w", "gate"))]
    result = resolved(stacked("sources: [{model: a, layer_range: [1, 3]}]"), {"a": kinds})
    assert [m.name for m in result.tensors] == [n.replace(".1.", ".0.").replace(".2.", ".1.") for n in kinds[1:]]


def test_slices_of_both_stacks() -> None:
    text = stacked(*(f"stack: {s}, sources: [{{model: {m}, layer_range: [0, 2]}}]" for s, m in ("eb", "da")))
    text = text.replace("stack: e", "stack: encoder").replace("stack: d", "stack: decoder")
    found = {m.name: m.inputs[0][0].path for m in resolved(text, TWO).tensors}
    assert found["encoder.block.1.layer.0.q.weight"] == found["encoder.final_layer_norm.weight"] == "b"
    assert found["decoder.block.1.layer.0.q.weight"] == found["decoder.final_layer_norm.weight"] == "a"


@pytest.mark.parametrize(
    ("said", "what"),
    [
        ("", "2 stacks of layers, and the slice does not say which"),
        ("stack: block, ", "`stack: block` fits 2 of the stacks"),
        ("stack: coder, ", "`stack: coder` fits none of the stacks"),
    ],
)
def test_a_slice_that_does_not_say_of_which_stack_it_is(said: str, what: str) -> None:
    with pytest.raises(UsageError, match=what) as caught:
        resolved(stacked(said + "sources: [{model: a, layer_range: [0, 1]}]"), TWO)
    assert caught.value.where[1:] == ("encoder.block.{0..1}", "decoder.block.{0..3}")
    assert caught.value.hint == "add to the slice: `stack: encoder` or `stack: decoder`"


def test_layers_of_bert() -> None:
    names = [f"bert.encoder.layer.{i}.w" for i in range(3)]
    result = resolved(stacked("sources: [{model: a, layer_range: [1, 3]}]"), {"a": names})
    assert [m.name for m in result.tensors] == names[:2]


def test_layers_that_a_model_does_not_have() -> None:
    text = "merge_method: passthrough\nslices: [{sources: [{model: a, layer_range: [2, 6]}]}]"
    with pytest.raises(ConflictError, match=re.escape("a has 5 layers, and layer_range is [2, 6]")):
        resolved(text)


def test_a_required_parameter_that_no_filter_gives() -> None:
    text = "merge_method: linear\nmodels: [{model: a, parameters: {weight: [{filter: mlp, value: 1}]}}]"
    with pytest.raises(UsageError, match=r"no filter gives `weight` for `model.embed_tokens.weight` of a") as caught:
        resolved(text)
    assert "- value:" in (caught.value.hint or "")


def interpolated(values: list[float], number: int, count: int) -> Fraction:
    """The value on the line through the two points around a layer, exactly."""
    if count == 1:
        return Fraction(values[-1])
    x = Fraction(number * (len(values) - 1), count - 1)
    for i in range(len(values) - 1):
        if i <= x <= i + 1:
            return Fraction(values[i]) + (x - i) * (Fraction(values[i + 1]) - Fraction(values[i]))
    return Fraction(values[0])


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=8), st.integers(1, 90), st.data())
def test_gradients_are_lines_between_equidistant_points(values: list[float], count: int, data: st.DataObject) -> None:
    number = data.draw(st.integers(0, count - 1))
    t = number / (count - 1) if count > 1 else 1.0
    got = Condition("*", tuple(values)).at(t, "float")
    assert got == pytest.approx(float(interpolated(values, number, count)), rel=1e-9, abs=1e-9)
    assert min(values) - 1e-9 <= got <= max(values) + 1e-9


@given(st.lists(st.booleans(), min_size=1, max_size=6), st.floats(0, 1))
def test_booleans_are_never_mixed(values: list[bool], t: float) -> None:
    got = Condition("*", tuple(values)).at(t, "bool")
    assert got is values[min(int(t * (len(values) - 1)), len(values) - 1)]


@given(st.lists(st.tuples(st.sampled_from(["mlp", "norm", "layers.1.", "*", "x"]), st.floats(0, 1)), max_size=5))
def test_a_setting_is_its_first_match(conditions: list[tuple[str, float]]) -> None:
    setting = Setting("float", tuple(Condition(f, (v,)) for f, v in conditions))
    for name in llama(2):
        expected = [v for f, v in conditions if f == "*" or f in name]
        assert setting.at(name, 0.3) == (expected[0] if expected else None)


def test_errors_are_expected_ones() -> None:
    with pytest.raises(CkptError):
        Condition("*", (1, 2)).at(0.5, "int")
