"""mergekit's YAML: every shape in use is read, what would have no effect is an error, what is not done is refused."""

from __future__ import annotations

import re
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from ckpttool.errors import AccessError, CkptError, ConflictError, UnsupportedError, UsageError
from ckpttool.recipe.document import BYTES, from_yaml
from ckpttool.recipe.mergekit import parse_mergekit, read_mergekit
from ckpttool.recipe.model import (
    Condition,
    ModelRef,
    ModelToken,
    Recipe,
    Setting,
    TokenizerRecipe,
    TokenRule,
    reference,
)
from tests.helpers.sample import some

TWO = "models: [{model: a}, {model: b}]\n"
LINEAR = f"merge_method: linear\n{TWO}parameters: {{weight: 1}}\n"


@pytest.fixture(autouse=True)
def _models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "c", "base", "lora", "org/one", "org/two", "org/three", "org/base"):
        (tmp_path / name).mkdir(parents=True)


def parsed(text: str) -> Recipe:
    return parse_mergekit(textwrap.dedent(text), "r.yml")


def listed(*models: str, **each: Any) -> str:
    """A ``models`` section: the same parameters for every model."""
    inside = ", ".join(f"{k}: {v}" for k, v in each.items())
    return "models:\n" + "".join(f"- {{model: ./{m}, parameters: {{{inside}}}}}\n" for m in models)


SHAPES = {
    "arcee_fusion": listed("a") + "base_model: ./base",
    "breadcrumbs": listed("a", "b", weight=0.6, density=0.9, gamma=0.02) + "base_model: ./base",
    "breadcrumbs_ties": listed("a", "b", weight=0.6, density=0.9, gamma=0.02) + "base_model: ./base",
    "dare_linear": listed("a", "b", weight=0.6, density=0.5) + "base_model: ./base",
    "dare_ties": listed("a", "b", weight=0.6, density=0.5) + "base_model: ./base",
    "dare_ties norescale": listed("a", "b", weight=0.6) + "base_model: ./base\nparameters: {rescale: false}",
    "della": listed("a", "b", weight=0.6, density=0.5, epsilon=0.1) + "base_model: ./base",
    "della_linear": listed("a", "b", weight=0.6, density=0.5, epsilon=0.1) + "base_model: ./base",
    "karcher": listed("a", "b", "c") + "parameters: {max_iter: 10, tol: 1.0e-05}",
    "karcher text": listed("a", "b", "c") + "parameters: {max_iter: 10, tol: 1e-5}",
    "linear": listed("a", "b", weight=0.6),
    "linear three": listed("a", "b", "c", weight=0.3),
    "linear unnormalized": listed("a", "b", weight=0.7) + "parameters: {normalize: false}",
    "linear with a donor": listed("a", "b", weight=0.5) + "base_model: ./a\ntokenizer: {source: base}",
    "linear union": listed("a", "b", weight=0.5) + "base_model: ./a\ntokenizer: {source: union}",
    "model_stock": listed("a", "b", "c") + "base_model: ./base",
    "model_stock filterwise": listed("a", "b", "c") + "base_model: ./base\nparameters: {filter_wise: true}",
    "multislerp": listed("a", "b", "c", weight=0.3),
    "multislerp base": listed("a", "b", "c", weight=0.3) + "base_model: ./base",
    "nearswap": listed("a") + "base_model: ./base\nparameters: {t: 0.001}",
    "nuslerp": listed("a", "b", weight=0.6),
    "nuslerp base": listed("a", "b", weight=0.6) + "base_model: ./base",
    "nuslerp columns": listed("a", "b", weight=0.6) + "parameters: {nuslerp_flatten: false}",
    "passthrough slices": """
slices:
- sources: [{model: ./a, layer_range: [0, 2]}]
- sources:
  - model: ./b
    layer_range: [1, 3]
    parameters: {scale: [{filter: o_proj, value: 0.0}, {filter: down_proj, value: 0.5}, {value: 1.0}]}
""",
    "ram": listed("a", "b", "c") + "base_model: ./base",
    "ramplus_tl": listed("a", "b", "c") + "base_model: ./base",
    "sce": listed("a", "b", "c") + "base_model: ./base\nparameters: {select_topk: 0.4}",
    "slerp": listed("a", "b") + "base_model: ./a\nparameters: {t: 0.35}",
    "task_arithmetic": listed("a", "b", weight=0.6) + "base_model: ./base",
    "task_arithmetic gradient": listed("a", "b", weight="[{filter: mlp, value: [0.1, 0.9]}, {value: 0.5}]")
    + "base_model: ./base",
    "task_arithmetic adapter": listed("base+./lora", "b", weight=0.5) + "base_model: ./base",
    "ties": listed("a", "b", weight=0.6, density=0.5) + "base_model: ./base",
    "ties whole": listed("a", "b", weight=0.6) + "base_model: ./base",
    "ties rescaled": listed("a", "b", weight=0.6, density=0.5) + "base_model: ./base\nparameters: {rescale: true}",
}

DTYPES = {
    "dtype: bfloat16": ("BF16", ""),
    "dtype: float32": ("F32", ""),
    "dtype: torch.float32\nout_dtype: float16": ("F32", "F16"),
    "": ("", ""),
}


@pytest.mark.product
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_in_use(shape: str, dtype: str) -> None:
    method = shape.partition(" ")[0]
    recipe = parsed(f"{SHAPES[shape]}\nmerge_method: {method}\n{dtype}\n")
    assert recipe.method == method
    assert (recipe.dtype, recipe.out_dtype) == DTYPES[dtype]
    assert recipe.notes == ()
    assert all(set(r.path) & set("abc") for r in recipe.references())
    again = parsed(yaml.safe_dump(recipe.record()))
    assert replace(again, text="") == replace(recipe, text="")


def test_there_are_shapes_for_every_method_that_mergekit_has() -> None:
    assert len(SHAPES) == 34
    assert len({s.split(" ")[0] for s in SHAPES}) == 20


EXAMPLES = {
    "arcee_fusion": """
        models: [{model: a}, {model: b}]
        merge_method: arcee_fusion
        base_model: a
        dtype: bfloat16
    """,
    "bio-merge": """
        models:
        - model: org/one
          parameters: {density: 0.5, weight: 0.5}
        - model: org/two
          parameters: {density: 0.5, weight: 0.5}
        merge_method: ties
        base_model: org/base
        parameters: {normalize: false, int8_mask: true}
        dtype: float16
    """,
    "gradient-slerp": """
        slices:
        - sources:
          - {model: org/one, layer_range: [0, 40]}
          - {model: org/two, layer_range: [0, 40]}
        merge_method: slerp
        base_model: org/one
        parameters:
          t:
          - {filter: self_attn, value: [0, 0.5, 0.3, 0.7, 1]}
          - {filter: mlp, value: [1, 0.5, 0.7, 0.3, 0]}
          - value: 0.5 # for all others
        dtype: float16
    """,
    "linear": """
        models:
        - {model: org/one, parameters: {weight: 1.0}}
        - {model: org/two, parameters: {weight: 0.3}}
        - {model: org/three, parameters: {weight: 0.5}}
        merge_method: linear
        dtype: float16
    """,
    "stacked": """
        slices:
        - sources: [{model: org/one, layer_range: [0, 24]}]
        - sources: [{model: org/two, layer_range: [20, 40]}]
        merge_method: passthrough
        dtype: float16
    """,
    "ties": """
        models:
        - model: org/one
          parameters: {density: [1, 0.7, 0.1], weight: 1.0}
        - model: org/two
          parameters: {density: 0.5, weight: [0, 0.3, 0.7, 1]}
        - model: org/three
          parameters:
            density: 0.33
            weight: [{filter: mlp, value: 0.5}, {value: 0}]
        merge_method: ties
        base_model: org/base
        parameters: {normalize: true, int8_mask: true}
        dtype: float16
    """,
    "default weight": """
        merge_method: linear
        models: [{model: org/one}, {model: org/two}]
        parameters: {weight: 0.5}
    """,
    "tokens": """
        merge_method: linear
        models: [{model: a}, {model: b}]
        parameters: {weight: 0.5}
        tokenizer:
          source: union
          tokens:
            <|im_start|>: {source: a}
            <|special|>: {source: b, force: true}
            <|renamed|>: {source: {kind: model_token, model: a, token: "<|old|>"}}
            <|unused|>: {source: {kind: zero}}
          pad_to_multiple_of: null
        chat_template: auto
    """,
    "chain": """
        name: first
        merge_method: linear
        models: [{model: org/one}, {model: org/two}]
        parameters: {weight: 0.5}
        ---
        merge_method: slerp
        base_model: first
        models: [{model: org/three}]
        parameters: {t: 0.5}
    """,
    "experts": """
        base_model: org/one
        gate_mode: hidden
        dtype: bfloat16
        experts: [{source_model: org/one}, {source_model: org/two}]
    """,
    "genome": "genome: {models: [a, b], merge_method: dare_ties}\ntasks: [{name: x}]",
    "modules": """
        merge_method: linear
        modules: {text: {models: [{model: a}]}, vision: {models: [{model: b}]}}
        parameters: {weight: 1}
    """,
}
REFUSED = {
    "chain": "several recipes",
    "experts": "mixture of experts",
    "genome": "searching",
    "modules": "several parts",
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name: str) -> None:
    if name in REFUSED:
        with pytest.raises(UnsupportedError, match=f"{REFUSED[name]}|things are wrong") as caught:
            parsed(EXAMPLES[name])
        assert REFUSED[name] in caught.value.render()
    else:
        recipe = parsed(EXAMPLES[name])
        assert recipe.text == textwrap.dedent(EXAMPLES[name])
        assert not recipe.notes


def test_examples_are_read_but_for_four() -> None:
    assert (len(EXAMPLES), len(REFUSED)) == (12, 4)


def test_everything_that_is_unknown_is_listed_at_once() -> None:
    with pytest.raises(UsageError, match="8 things are wrong") as caught:
        parsed("""\
            merge_method: ties
            normalize: true
            models:
            - {model: a, densty: 1}
            - model: b
              parameters: {weight: 1, densty: 0.1, normalize: true, sparsity: 2}
            parametrs: {lambda: .1}
            base_model: base
            unknown_key: 1
            tokenizer: {sauce: union}
        """)
    expected = [
        ("r.yml:2: `normalize`: unknown key", "it belongs under `parameters`: `parameters: {normalize: ...}`"),
        (
            "r.yml:4: `models[0].densty`: unknown key",
            "did you mean `density`? it belongs under `parameters` of the model",
        ),
        ("r.yml:6: `models[1].parameters.densty`: unknown parameter", "did you mean `density`?"),
        ("r.yml:6: `models[1].parameters.normalize`: unknown parameter", "it is one for the whole merge"),
        ("r.yml:6: `models[1].parameters.sparsity`: unknown parameter", "known: density, weight"),
        ("r.yml:7: `parametrs`: unknown key", "did you mean `parameters`?"),
        ("r.yml:9: `unknown_key`: unknown key", "known: base_model, chat_template, dtype"),
        ("r.yml:10: `tokenizer.sauce`: unknown key", "did you mean `source`?"),
    ]
    for line, (start, words) in zip(caught.value.where, expected, strict=True):
        assert line.startswith(start)
        assert words in line


@pytest.mark.parametrize(
    ("text", "error", "words", "place"),
    [
        ("", UsageError, "`merge_method` is missing", "r.yml"),
        ("- a", UsageError, "not a mapping", "r.yml:1"),
        (TWO, UsageError, "`merge_method` is missing", "r.yml"),
        (f"merge_method: tis\n{TWO}", UsageError, "no merge method `tis`", "r.yml:1: `merge_method`"),
        (f"merge_method: [linear]\n{TWO}", UsageError, "not a string", "r.yml:1"),
        ("merge_method: linear", UsageError, "nothing to merge", "r.yml"),
        ("merge_method: linear\nmodels: []", UsageError, "no models are listed", "r.yml:2: `models`"),
        ("merge_method: linear\nmodels: a", UsageError, "not a list", "r.yml:2"),
        ("merge_method: linear\nmodels: [a]", UsageError, "not a mapping", r"models\[0\]"),
        ("merge_method: linear\nmodels: [{}]", UsageError, "`model` is missing", r"models\[0\]"),
        ("merge_method: linear\nslices: []", UsageError, "no slices are listed", "slices"),
        ("merge_method: linear\nslices: [{}]", UsageError, "needs `sources`", r"slices\[0\]"),
        (f"{LINEAR}slices: [{{sources: [{{model: a, layer_range: [0, 1]}}]}}]", ConflictError, "exclude", "slices"),
        (f"merge_method: linear\n{TWO}", UsageError, "needs the parameter `weight`.*for a, b", "models"),
        (f"merge_method: slerp\nbase_model: a\n{TWO}", UsageError, "needs the parameter `t`", "models"),
        (f"merge_method: ties\nparameters: {{weight: 1}}\n{TWO}", UsageError, "needs a base model", "models"),
        (
            f"merge_method: slerp\nbase_model: c\nparameters: {{t: 1}}\n{TWO}",
            UsageError,
            "merges exactly 1 model beside the base; there are 2",
            "models",
        ),
        ("merge_method: model_stock\nbase_model: c\nmodels: [{model: a}]", UsageError, "at least 2 models", "models"),
        ("merge_method: karcher\nmodels: [{model: a}, {model: ./a}]", ConflictError, "`a` is listed twice", "models"),
        (f"merge_method: karcher\nbase_model: c\n{TWO}", ConflictError, "to be merged, or only", "base_model"),
        (f"{LINEAR}base_model: c", ConflictError, "to be merged, or only", "r.yml:4: `base_model`"),
        (f"{LINEAR}dtype: float8_e4m3fn", UnsupportedError, "does not write float8_e4m3fn", "r.yml:4: `dtype`"),
        (f"{LINEAR}out_dtype: int8", UnsupportedError, "does not write int8", "out_dtype"),
        (f"{LINEAR}dtype: float23", UnsupportedError, "float23", "dtype"),
        (f"{LINEAR}tokenizer: {{}}\ntokenizer_source: union", ConflictError, "exclude", "tokenizer_source"),
        (f"{LINEAR}tokenizer_source: base", UsageError, "no `base_model`", "tokenizer_source"),
        (f"{LINEAR}tokenizer: {{source: base}}", UsageError, "no `base_model`", "tokenizer.source"),
        (f"{LINEAR}tokenizer: {{pad_to_multiple_of: 0}}", UsageError, "not a whole number from 1", "tokenizer.pad"),
        (f"{LINEAR}tokenizer: {{tokens: {{x: {{source: c}}}}}}", UsageError, "`c` is not a model of this", "tokens.x"),
        (f"{LINEAR}tokenizer: {{tokens: {{x: {{kind: zero}}}}}}", UsageError, "unknown key `kind`", "tokens.x.kind"),
        (f"{LINEAR}tokenizer: {{tokens: {{x: {{source: {{kind: nul}}}}}}}}", UsageError, "unknown kind `nul`", "kind"),
        (
            f"{LINEAR}tokenizer: {{tokens: {{x: {{source: {{kind: model_token, model: a, token: y, token_id: 1}}}}}}}}",
            UsageError,
            "exactly one of",
            "tokens.x.source",
        ),
        (f"{LINEAR}tokenizer: {{tokens: {{x: {{force: 1}}}}}}", UsageError, "neither true nor false", "force"),
        (f"{LINEAR}chat_template: chatmll", UsageError, "neither the name", "r.yml:4: `chat_template`"),
        (f"merge_method: linear\n{TWO}parameters: {{weight: true}}", UsageError, "not a finite number", "weight"),
        (f"merge_method: linear\n{TWO}parameters: {{weight: .inf}}", UsageError, "not a finite number", "weight"),
        (f"merge_method: linear\n{TWO}parameters: {{weight: x}}", UsageError, "`x` is not a finite number", "weight"),
        (f"merge_method: linear\n{TWO}parameters: {{weight: []}}", UsageError, "empty list", "weight"),
        (f"merge_method: linear\n{TWO}parameters: {{weight: [1, {{value: 2}}]}}", UsageError, "mixes", "weight"),
        (
            f"merge_method: linear\n{TWO}parameters: {{weight: [{{filter: x}}]}}",
            UsageError,
            "`value` is missing",
            "weight",
        ),
        (
            f"merge_method: linear\n{TWO}parameters: {{weight: [{{filter: 3, value: 1}}]}}",
            UsageError,
            "part of tensor names",
            r"weight\[0\].filter",
        ),
        (
            f"merge_method: linear\n{TWO}parameters: {{weight: [{{fliter: x, value: 1}}]}}",
            UsageError,
            "unknown key `fliter`",
            r"weight\[0\].fliter",
        ),
        (f"{LINEAR}  # \nbase_model: {{lora: lora}}", UsageError, "`model` is missing", "base_model"),
        (f"merge_method: karcher\n{TWO}parameters: {{max_iter: 1.5}}", UsageError, "not a whole number", "max_iter"),
        (
            f"merge_method: linear\n{TWO}parameters: {{weight: 1, normalize: sure}}",
            UsageError,
            "not true or false",
            "normalize",
        ),
        (f"merge_method: linear\n{TWO}parameters: 3", UsageError, "not a mapping", "parameters"),
        (
            "merge_method: linear\nmodels: [{model: {model: a, override_architecture: X}, parameters: {weight: 1}}]",
            UnsupportedError,
            "override_architecture",
            r"models\[0\].model.override_architecture",
        ),
    ],
)
def test_refused(text: str, error: type[CkptError], words: str, place: str) -> None:
    with pytest.raises(error) as caught:
        parsed(text)
    assert type(caught.value) is error
    shown = "\n".join([caught.value.what, *caught.value.where])
    assert re.search(words, shown), shown
    assert re.search(place, shown), shown


def sliced(*sources: str, method: str = "linear", more: str = "", top: str = "parameters: {weight: 1}") -> str:
    return f"merge_method: {method}\n{top}\nslices:\n- {{sources: [{', '.join(sources)}]{more}}}\n"


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        (sliced("{model: a}"), UsageError, "`layer_range` is missing"),
        (sliced("{model: a, layer_range: [2, 1]}"), UsageError, "not a range of layers"),
        (sliced("{model: a, layer_range: [1, 1]}"), UsageError, "not a range of layers"),
        (sliced("{model: a, layer_range: [1]}"), UsageError, "not a range of layers"),
        (sliced("{model: a, layer_range: [-1, 2]}"), UsageError, "not a whole number"),
        (sliced("{model: a, layer_range: [0, 1.5]}"), UsageError, "not a whole number"),
        (sliced("{model: a, layer_range: 3}"), UsageError, "not a list"),
        (
            sliced("{model: a, layer_range: [0, 2]}", "{model: b, layer_range: [0, 3]}"),
            ConflictError,
            r"equally many layers, not \[2, 3\]",
        ),
        (sliced("{model: a, layer_range: [0, 2]}", more=", residual_weight: 1"), UnsupportedError, "residual_weight"),
        (sliced("{model: a, layer_range: [0, 2]}", more=", base_model: b"), ConflictError, "has no effect"),
        (
            sliced("{model: a, layer_range: [0, 2]}", method="ties", more=", base_model: b"),
            UsageError,
            "the base `b` is not a source of this slice",
        ),
        (sliced("{model: a, layer_range: [0, 2]}", "{model: a, layer_range: [1, 3]}"), ConflictError, "listed twice"),
        (
            sliced("{model: a, layer_range: [0, 2]}", "{model: b, layer_range: [0, 2]}", method="passthrough", top=""),
            UsageError,
            "merges exactly 1 model; there are 2",
        ),
    ],
)
def test_refused_slices(text: str, error: type[CkptError], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        parsed(text)
    assert type(caught.value) is error
    assert "slices[0]" in caught.value.where[0]


def test_ranges_are_for_slices() -> None:
    with pytest.raises(UsageError, match="unknown key `layer_range`") as caught:
        parsed("merge_method: linear\nmodels: [{model: a, layer_range: [0, 2], parameters: {weight: 1}}]")
    assert "ranges are for `slices`" in (caught.value.hint or "")


def test_settings() -> None:
    recipe = parsed(
        "merge_method: ties\nbase_model: base\n"
        + TWO
        + "parameters:\n  weight: 1e-3\n  density: [1, 0.5]\n"
        + "  lambda: {filter: mlp, value: 2}\n  normalize: [{filter: x, value: [true, false]}, {value: true}]"
    )
    assert recipe.parameters == {
        "weight": Setting.of("float", 0.001),
        "density": Setting.of("float", 1, 0.5),
        "lambda": Setting("float", (Condition("mlp", (2,)),)),
        "normalize": Setting("bool", (Condition("x", (True, False)), Condition("*", (True,)))),
    }


def test_parameters_of_the_base_are_noted() -> None:
    recipe = parsed("merge_method: ties\nbase_model: a\nparameters: {weight: 1}\n" + listed("a", "b", density=0.3))
    assert recipe.notes == ("a is the base, where parameters have no effect: `density`",)


def test_a_donor_of_config_and_tokenizer() -> None:
    recipe = parsed(listed("a", "b", weight=1) + "merge_method: linear\nbase_model: c")
    assert recipe.base == ModelRef("c")
    assert recipe.references() == (ModelRef("a"), ModelRef("b"), ModelRef("c"))
    assert "gives config and tokenizer only" in recipe.notes[0]


def test_tokenizer() -> None:
    recipe = parsed(
        LINEAR
        + """\
tokenizer:
  source: b
  pad_to_multiple_of: 64
  tokens:
    one: {source: a}
    two: {source: {kind: model_token, model: b, token_id: 7}, force: true}
    three: {source: {kind: model_token, model: b, token: x}}
    four: {source: {kind: zero}}
    five: {force: true}
    6: {source: a}
"""
    )
    a, b = ModelRef("a"), ModelRef("b")
    assert recipe.tokenizer == TokenizerRecipe(
        b,
        {
            "one": TokenRule(a),
            "two": TokenRule(ModelToken(b, number=7), force=True),
            "three": TokenRule(ModelToken(b, "x")),
            "four": TokenRule("zero"),
            "five": TokenRule(None, force=True),
            "6": TokenRule(a),
        },
        64,
    )
    again = recipe.record()["tokenizer"]
    assert again["source"] == "b"
    assert again["tokens"]["two"] == {
        "source": {"kind": "model_token", "model": "b", "token_id": 7},
        "force": True,
    }
    assert parsed(LINEAR + "tokenizer_source: union").tokenizer == TokenizerRecipe("union")


@pytest.mark.parametrize("template", ["auto", "chatml", "{% for m in messages %}{{ m }}{% endfor %}"])
def test_chat_templates(template: str) -> None:
    assert parsed(f"{LINEAR}chat_template: '{template}'").chat_template == template


def test_models_with_adapters(tmp_path: Path) -> None:
    for name in ("odd+name", "at@home", "odd"):
        (tmp_path / name).mkdir()
    assert reference("./a") == ModelRef("a")
    assert reference("a+lora") == ModelRef("a", ("lora",))
    assert reference("a+lora+./b") == ModelRef("a", ("lora", "b"))
    assert reference("odd+name") == ModelRef("odd+name")
    assert reference("odd+name+lora") == ModelRef("odd+name", ("lora",))
    assert reference("odd+lora") == ModelRef("odd", ("lora",))
    assert reference("at@home+at@home") == ModelRef("at@home", ("at@home",))
    assert str(reference("a+lora")) == "a+lora"
    recipe = parsed("merge_method: passthrough\nmodels: [{model: {model: {path: a}, lora: lora}}]")
    assert recipe.references() == (ModelRef("a", ("lora",)),)


@pytest.mark.parametrize(
    ("text", "error", "words", "hint"),
    [
        ("org/none", AccessError, "there is no `org/none` here, and org/none is not in", "hf download org/none"),
        ("org/none@main", AccessError, "there is no `org/none@main` here", "hf download org/none --revision main"),
        ("a+org/none", AccessError, "there is no `org/none` here", "hf download org/none"),
        ("./a/../a@main", UnsupportedError, "revision `main`", "drop `@main`"),
        ("a@main", UnsupportedError, "revision `main`", "drop `@main`"),
        ("a+lora@v2", UnsupportedError, "revision `v2`", "drop"),
        ("a+nowhere", UsageError, "there is no `nowhere`", ""),
        ("a+", UsageError, "empty part", "PATH+ADAPTER"),
        ("x" * 5000, UsageError, "there is no", ""),
        ("a\0", UsageError, "there is no", ""),
    ],
)
def test_what_is_not_here(text: str, error: type[CkptError], words: str, hint: str) -> None:
    with pytest.raises(error, match=words) as caught:
        reference(text)
    assert hint in (caught.value.hint or "")


def test_revision_in_a_mapping() -> None:
    with pytest.raises(UnsupportedError, match="revision `main`"):
        parsed("merge_method: passthrough\nmodels: [{model: {model: {path: a, revision: main}}}]")


def test_paths_count_from_here_then_from_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "r.yml").write_text(LINEAR, encoding="utf-8")
    (tmp_path / "sub" / "a").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "sub")
    recipe = read_mergekit(tmp_path / "r.yml")
    assert recipe.references() == (ModelRef("a"), ModelRef(str(tmp_path / "b")))
    assert recipe.notes == (
        f"`b` is not in the current directory; it was found beside the recipe, as {tmp_path / 'b'}",
    )
    assert (recipe.name, recipe.text) == (str(tmp_path / "r.yml"), LINEAR)


@pytest.mark.parametrize(
    ("data", "words"),
    [(b"\xff\xfe\xff", "not valid UTF-8"), (b"#" * (BYTES + 1), "at most 1 MiB"), (None, "cannot be read")],
    ids=["bytes", "long", "absent"],
)
def test_files_that_are_no_recipes(tmp_path: Path, data: bytes | None, words: str) -> None:
    if data is not None:
        (tmp_path / "r.yml").write_bytes(data)
    with pytest.raises(UsageError, match=words):
        read_mergekit(tmp_path / "r.yml")


LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)
)
MERGES = "a0: &a0 {x: 1}\n" + "".join(
    f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}], y{i}: 1}}\n" for i in range(1, 9)
)


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("a: 1\nb:\n  c: 1\n  c: 2", ConflictError, "`c` comes twice"),
        ("a: [", UsageError, "not YAML"),
        ("a: \0", UsageError, "not YAML"),
        ("a: *b", UsageError, "not YAML"),
        ("a: !!python/object/apply:os.system [x]", UsageError, "the YAML tag"),
        ("a: !!binary aGVsbG8=", UsageError, "the YAML tag"),
        ("a: !!int x", UsageError, "not a value of the type"),
        ("? [a]\n: 1", UsageError, "a key must be a text"),
        ("a: {<<: 3}", UsageError, "merges only mappings"),
        ("a: " + "1" * 5000, UsageError, "not a value of the type"),
        ("a: &a [*a]", UsageError, "aliases written out"),
        ("[" * some(30_000, 1000), UsageError, "deeper than|no YAML"),
        ("[" * 60 + "]" * 60, UsageError, "levels deep"),
        (LAUGHS, UsageError, "at most 100,000 values"),
        (MERGES, UsageError, "at most 100,000 values"),
        ("a: 1\n---\nb: 1", UnsupportedError, "several recipes"),
        ("#" * (BYTES + 1), UsageError, "at most 1 MiB"),
    ],
    ids=lambda v: v[:12] if isinstance(v, str) else "",
)
def test_hostile_yaml(text: str, error: type[CkptError], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        from_yaml(text, "r.yml")
    assert caught.value.where[0].startswith("r.yml")


def test_the_second_of_two_keys_is_named_with_both_lines() -> None:
    with pytest.raises(ConflictError) as caught:
        from_yaml("x: 1\na: 1\nb: 2\na: 3\n", "r.yml")
    assert caught.value.where == ("r.yml:4", "r.yml:2")


def test_yaml_values() -> None:
    text = "a: &a {x: 1, y: 2}\nb: {<<: [*a, {x: 5, z: 6}], y: 3}\nc: 2024-01-01\n1: null\ntrue: yes\nd: [1, 2.5, 'x']"
    assert from_yaml(text, "r.yml").data == {
        "a": {"x": 1, "y": 2},
        "b": {"x": 1, "y": 3, "z": 6},
        "c": "2024-01-01",
        "1": None,
        "true": True,
        "d": [1, 2.5, "x"],
    }
