"""The tensors that a family declares from a config alone: against recorded lists, published totals, and bad files.

The record in data/shapes/variations.json comes from transformers (``python -m tests.peers.test_shapes``); the totals
in data/shapes/published.json are those that the Hub or the authors state.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest

from ckpttool.errors import LayoutError
from ckpttool.layout.classes import ClassHead, other_head
from ckpttool.layout.family import Family, find_family, load_family
from ckpttool.layout.shapes import Declared, check_sizes, declared_tensors
from ckpttool.layout.spec import TensorsSpec
from tests.helpers.tiny_names import all_lists

LAYOUTS = Path(__file__).parents[2] / "docs" / "layouts"
DATA = Path(__file__).parent / "data" / "shapes"
PUBLIC: dict[str, dict[str, Any]] = json.loads((DATA / "published.json").read_text(encoding="utf-8"))
RECORD = json.loads((DATA / "variations.json").read_text(encoding="utf-8"))
CONFIGS: dict[str, dict[str, Any]] = RECORD["variants"]
LISTS = {variant: listed.tensors for (_, variant), listed in all_lists().items() if variant in CONFIGS}

Shapes = dict[str, list[int]]


@cache
def published(name: str) -> list[Declared]:
    return tensors_of(PUBLIC[name]["config"])


def tensors_of(config: dict[str, Any], *, mtp: bool = True) -> list[Declared]:
    return declared_tensors(load_family(find_family(config) or "", config), config, mtp=mtp)


def shapes_of(config: dict[str, Any], *, mtp: bool = False) -> Shapes:
    return {t.name: list(t.shape) for t in tensors_of(config, mtp=mtp)}


def expanded(tensors: Shapes) -> Shapes:
    """``experts.{8}.`` is one line for eight experts."""
    out: Shapes = {}
    for line, shape in tensors.items():
        at, count, rest = re.fullmatch(r"([^{]*)(?:\{(\d+)\})?(.*)", line).groups()  # type: ignore[union-attr]
        out |= {f"{at}{i}{rest}": shape for i in range(int(count))} if count else {line: shape}
    return out


# What transformers has


def test_variants() -> None:
    for variant, config in CONFIGS.items():
        assert shapes_of(config) == LISTS[variant], variant


def test_variations() -> None:
    for case in RECORD["variations"]:
        expected = dict(LISTS[case["variant"]])
        for name in expanded({line: [] for line in case["without"]}):
            del expected[name]
        expected |= expanded(case["with"])
        assert shapes_of({**CONFIGS[case["variant"]], **case["config"]}) == expected, case


def test_every_tensor_has_a_rule_and_stands_in_model_order() -> None:
    for variant, config in CONFIGS.items():
        family = load_family(find_family(config) or "", config)
        found = [family.placement(t.name) for t in declared_tensors(family, config)]
        places = [p for p in found if p is not None]
        assert len(places) == len(found), variant
        stages = ["first", "layers", "last"]
        order = [(stages.index(p.stage), p.layer or 0) for p in places]
        assert order == sorted(order), variant


def test_experts_stand_one_after_the_other() -> None:
    names = [t.name for t in tensors_of(CONFIGS["mixtral"]) if "layers.1.block_sparse_moe.experts" in t.name]
    assert names == [
        f"model.layers.1.block_sparse_moe.experts.{e}.{w}.weight" for e in range(4) for w in ("w1", "w2", "w3")
    ]


# What is published


@pytest.mark.parametrize("name", PUBLIC)
def test_published_totals(name: str) -> None:
    known = PUBLIC[name]
    found = published(name)
    assert sum(prod(t.shape) for t in found) == known["elements"]
    if "tensors" in known:
        assert len(found) == known["tensors"]
        assert {t.dtype for t in found} == {"BF16"}
        assert 2 * known["elements"] == known["bytes"]
    if "elements_without_mtp" in known:
        short = tensors_of(known["config"], mtp=False)
        assert sum(prod(t.shape) for t in short) == known["elements_without_mtp"]
        assert not [t for t in short if t.name.startswith("model.layers.61.")]


def test_deepseek_v3_by_dtype_and_number() -> None:
    """Its published files: 91,991 tensors with scale grids, and this many elements of each dtype."""
    found = published("DeepSeek-V3")
    fp8 = [t for t in found if ".layers." in t.name and t.name.endswith(("_proj.weight", "_mqa.weight"))]
    fp8 = [t for t in fp8 if "eh_proj" not in t.name]
    scales = sum(prod(-(-n // 128) for n in t.shape) for t in fp8)
    elements = {d: sum(prod(t.shape) for t in found if t.dtype == d) for d in ("BF16", "F32")}
    assert sum(prod(t.shape) for t in fp8) == 680_571_043_840
    assert elements["BF16"] - 680_571_043_840 == 3_918_786_560
    assert elements["F32"] + scales == 41_555_600
    assert len(found) + len(fp8) == 91_991


def test_deepseek_prediction_layer() -> None:
    names = {t.name: t.shape for t in published("DeepSeek-V3.2") if ".layers.61." in t.name}
    at = "model.layers.61."
    assert {n.removeprefix(at): s for n, s in names.items() if "self_attn" not in n and "mlp" not in n} == {
        "input_layernorm.weight": (7168,),
        "post_attention_layernorm.weight": (7168,),
        "enorm.weight": (7168,),
        "hnorm.weight": (7168,),
        "eh_proj.weight": (7168, 14336),
        "embed_tokens.weight": (129280, 7168),
        "shared_head.norm.weight": (7168,),
        "shared_head.head.weight": (129280, 7168),
    }
    assert names[at + "self_attn.indexer.wq_b.weight"] == (8192, 1536)
    assert names[at + "mlp.experts.255.down_proj.weight"] == (7168, 2048)


@pytest.mark.parametrize(("listed", "variant"), [("glm4_moe_mtp", "glm4_moe"), ("ernie4_5_moe_mtp", "ernie4_5_moe")])
def test_other_prediction_layers(listed: str, variant: str) -> None:
    expected = next(v.tensors for (_, name), v in all_lists().items() if name == listed)
    config = {**CONFIGS[variant], "num_nextn_predict_layers": 1}
    assert shapes_of(config, mtp=True) == expected
    assert shapes_of(config, mtp=False) == LISTS[variant]


def test_large_models_take_no_time() -> None:
    config = PUBLIC["DeepSeek-V3"]["config"]
    family = load_family("deepseek", config)
    start = time.process_time()
    assert len(declared_tensors(family, config)) == 46_183
    assert time.process_time() - start < 1


# dtypes and nested configs


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({}, "BF16"),
        ({"torch_dtype": "float16"}, "F16"),
        ({"dtype": "float32"}, "F32"),
        ({"dtype": "torch.bfloat16", "torch_dtype": "float32"}, "BF16"),
        ({"torch_dtype": None, "text_config": {"dtype": "float16"}}, "F16"),
    ],
)
def test_dtype_of_the_config(fields: dict[str, Any], dtype: str) -> None:
    found = tensors_of({**CONFIGS["deepseek_v3"], "dtype": None, **fields})
    correction = [t for t in found if t.name.endswith("e_score_correction_bias")]
    assert correction
    assert {t.dtype for t in correction} == {"F32"}
    assert {t.dtype for t in found if t not in correction} == {dtype}


@pytest.mark.parametrize(
    ("dtype", "words"), [("bf17", "unknown dtype `bf17`"), ("float8_e4m3fn", "no model is published in")]
)
def test_other_dtypes(dtype: str, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        tensors_of({**CONFIGS["llama"], "dtype": dtype})


def test_a_dtype_that_is_left_to_the_files() -> None:
    fields = {"dtype": None, "torch_dtype": "auto"}
    assert {t.dtype for t in tensors_of({**CONFIGS["llama"], **fields})} == {"BF16"}


def test_fields_in_text_config() -> None:
    config = dict(CONFIGS["llama"])
    nested = {"model_type": "llama", "text_config": config}
    assert declared_tensors(load_family("llama", nested), nested) == tensors_of(config)


def test_every_key_is_explained() -> None:
    page = (LAYOUTS / "tensors.md").read_text(encoding="utf-8").split("\n## Cache of a family\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(TensorsSpec.model_fields)


def test_the_examples_of_the_page(tmp_path: Path) -> None:
    """The orca of docs/layouts/own-family.md: the tensors that its script writes."""
    page = (LAYOUTS / "tensors.md").read_text(encoding="utf-8")
    script = (LAYOUTS / "own-family.md").read_text(encoding="utf-8")
    family = script.split("> family: orca\n")[1].split("> END")[0].replace("\n> ", "\n").replace("\n>\n", "\n\n")
    examples = re.findall(r"```yaml\n(tensors:.*?)```", page, re.DOTALL)
    assert len(examples) == 2
    path = tmp_path / "orca.yaml"
    path.write_text("family: orca\n" + family.removeprefix("> ") + examples[0], encoding="utf-8")
    config = {"n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 100, "width": 32, "mlp_width": 48}
    found = declared_tensors(load_family(str(path), config), config)
    layer = {
        "attn.wqkv.weight": (64, 32),
        "attn.wo.weight": (32, 32),
        "mlp.w13.weight": (96, 32),
        "mlp.w2.weight": (32, 48),
        "norm1.weight": (32,),
        "norm2.weight": (32,),
    }
    assert {t.name: t.shape for t in found} == {
        "embed.weight": (100, 32),
        **{f"blocks.{i}.{n}": s for i in range(2) for n, s in layer.items()},
        "norm.weight": (32,),
        "unembed.weight": (100, 32),
    }
    path.write_text('family: orca\nlayers: {prefix: "b.{layer}.", rules: {}}\n' + examples[1], encoding="utf-8")
    glm = {**CONFIGS["glm4_moe"], "num_nextn_predict_layers": 1}
    family_of_glm = load_family("glm4_moe", glm)
    own = family_of_glm.spec.model_copy(update={"tensors": load_family(str(path), glm).spec.tensors})
    family_of_glm = replace(family_of_glm, spec=own)
    names = {t.name for t in declared_tensors(family_of_glm, glm)}
    assert names <= {t.name for t in tensors_of(glm)}
    assert "model.layers.2.eh_proj.weight" in names


# Errors


@pytest.mark.parametrize(
    ("variant", "field"),
    [
        ("llama", "hidden_size"),
        ("llama", "num_hidden_layers"),
        ("llama", "vocab_size"),
        ("deepseek_v3", "moe_intermediate_size"),
        ("deepseek_v3", "n_routed_experts"),
        ("deepseek_v3", "kv_lora_rank"),
        ("qwen2_moe", "shared_expert_intermediate_size"),
        ("gpt_oss", "intermediate_size"),
    ],
)
def test_a_field_that_is_missing(variant: str, field: str) -> None:
    config = {k: v for k, v in CONFIGS[variant].items() if k != field}
    family = find_family(config) or ""
    with pytest.raises(LayoutError) as e:
        tensors_of(config)
    assert f"config.json lacks `{field}`" in e.value.what
    assert f"family `{family}`" in e.value.what
    assert e.value.where[0].startswith(f"{family}.yaml: tensors: ")


@pytest.mark.product
@pytest.mark.parametrize("value", ["8", 1.5, [], {}, True, False, 0, -8], ids=repr)
@pytest.mark.parametrize(
    ("variant", "field"),
    [
        ("llama", "num_key_value_heads"),
        ("llama", "num_hidden_layers"),
        ("llama", "hidden_size"),
        ("llama", "head_dim"),
        ("llama", "intermediate_size"),
        ("gpt_oss", "num_local_experts"),
        ("deepseek_v3", "n_routed_experts"),
        ("deepseek_v3", "kv_lora_rank"),
    ],
)
def test_a_field_that_is_no_size(variant: str, field: str, value: object) -> None:
    with pytest.raises(LayoutError) as e:
        tensors_of({**CONFIGS[variant], field: value})
    assert f"`{field}`" in str(e.value)
    assert json.dumps(value) in str(e.value)
    assert "lacks" not in e.value.what


@pytest.mark.parametrize(
    ("variant", "field", "value", "what"),
    [
        ("llama", "attention_bias", "false", 'is "false", not true or false'),
        ("llama", "mlp_bias", [], "is [], not true or false"),
        ("llama", "tie_word_embeddings", "false", 'is "false", not true or false'),
        ("deepseek_v3", "moe_layer_freq", "1", 'is "1", not a whole number'),
        ("deepseek_v3", "first_k_dense_replace", True, "is true, not a whole number"),
        ("qwen2_moe", "mlp_only_layers", "1", 'is "1", not a list'),
    ],
)
def test_a_field_of_another_type(variant: str, field: str, value: object, what: str) -> None:
    with pytest.raises(LayoutError) as e:
        tensors_of({**CONFIGS[variant], field: value})
    assert e.value.what == f"`{field}` of config.json {what}"


def test_truth_values_that_are_numbers() -> None:
    assert tensors_of({**CONFIGS["llama"], "attention_bias": 1}) == tensors_of(
        {**CONFIGS["llama"], "attention_bias": True}
    )


def test_reading_sizes_is_not_strict() -> None:
    """What is only moved needs few sizes: with a field of another type a size is not known, and not guessed."""
    config = {**CONFIGS["llama"], "num_key_value_heads": "2"}
    family = load_family("llama", config)
    assert family.size("kv_heads") is None
    assert load_family("llama", {**config, "num_key_value_heads": None}).size("kv_heads") == family.size("heads")
    with pytest.raises(LayoutError, match=r'`num_key_value_heads` of config\.json is "2", not a'):
        check_sizes(family, config)
    check_sizes(load_family("llama", CONFIGS["llama"]), CONFIGS["llama"])
    assert find_family({"architectures": 5, "model_type": "llama"}) == "llama"


@pytest.mark.parametrize(
    ("architecture", "fields", "head"),
    [
        ("LlamaForCausalLM", {}, {"lm_head.weight": (256, 64)}),
        ("LlamaModel", {}, {}),
        ("LlamaForSequenceClassification", {}, {"score.weight": (2, 64)}),
        ("LlamaForSequenceClassification", {"id2label": {"0": "a"}}, {"score.weight": (1, 64)}),
        ("LlamaForTokenClassification", {"num_labels": 5}, {"score.weight": (5, 64), "score.bias": (5,)}),
        ("LlamaForQuestionAnswering", {}, {"lm_head.weight": (256, 64)}),
        ("OrcaModel", {}, {"lm_head.weight": (256, 64)}),
        ("Llama For", {}, {"lm_head.weight": (256, 64)}),
    ],
)
def test_the_head_of_the_class_that_a_config_names(
    architecture: str, fields: dict[str, Any], head: dict[str, tuple[int, ...]]
) -> None:
    """A base model has none, a classifier another one; of other classes nothing is known."""
    config = {**CONFIGS["llama"], "vocab_size": 256, "hidden_size": 64, "architectures": [architecture], **fields}
    found = {t.name: t.shape for t in declared_tensors(load_family("llama", config), config)}
    assert {n: shape for n, shape in found.items() if not n.startswith("model.")} == head


def test_the_heads_that_single_families_have() -> None:
    known = ["GPTNeoXForCausalLM", "XLNetLMHeadModel", "GPTNeoXModel"]
    assert other_head({"architectures": ["GPTNeoXForTokenClassification"]}, known) == ClassHead("classifier", bias=True)
    assert other_head({"architectures": ["GPTNeoXForSequenceClassification"]}, known) == ClassHead("score")
    assert other_head({"architectures": ["XLNetForSequenceClassification"]}, known) is None
    assert other_head({"architectures": ["GPTNeoXModel"]}, [*known, "GPTNeoXForMaskedLM"]) is None
    assert other_head({}, known) is None


def test_a_class_without_a_model_type_leads_to_the_language_model_with_its_base() -> None:
    """TensorRT-LLM's config.json names nothing else."""
    assert find_family({"architectures": ["MistralModel"]}) == "llama"
    assert find_family({"architectures": ["LlamaForSequenceClassification"]}) == "llama"
    assert find_family({"architectures": ["GPT2ForTokenClassification"]}) == "gpt2"
    assert find_family({"architectures": ["LlamaForSequenceClassification"], "model_type": "orca"}) is None
    assert find_family({"architectures": ["Model", "For"]}) is None


def family_of(tmp_path: Path, tensors: str, **config: Any) -> tuple[Family, dict[str, Any]]:
    """A family file with this section, and a config."""
    path = tmp_path / "orca.yaml"
    head = 'family: orca\nsizes: {layers: n_layers, experts: n_experts}\nlayers: {prefix: "b.{layer}.", rules: {}}\n'
    body = "tensors:\n" + "".join(f"  {line}\n" for line in tensors.strip().splitlines())
    path.write_text(head + body, encoding="utf-8")
    config = {"n_layers": 2, "n_experts": 3, "width": 8, **config}
    return load_family(str(path), config), config


def orca(tmp_path: Path, tensors: str, **config: Any) -> dict[str, tuple[int, ...]]:
    return {t.name: t.shape for t in declared_tensors(*family_of(tmp_path, tensors, **config))}


def test_a_family_without_the_section(tmp_path: Path) -> None:
    path = tmp_path / "orca.yaml"
    path.write_text('family: orca\nlayers: {prefix: "b.{layer}.", rules: {}}\n', encoding="utf-8")
    with pytest.raises(LayoutError, match="family `orca` does not say which tensors") as e:
        declared_tensors(load_family(str(path), {}), {})
    assert "`tensors:`" in (e.value.hint or "")


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("7", 7),
        ("width", 8),
        ("n_layers * width - 3 + 10 // 3 % 2", 14),
        ("-3 + width", 5),
        ("width if flag else 2", 2),
        ("width if not flag and layers == 2 or flag else 2", 8),
        ("9 if 0 < layers <= 2 else 1", 9),
        ("widths[1] if widths else 1", 6),
        ("4 if kind in ['a', 'b'] else 1", 4),
        ("4 if kind not in ['a', 'b'] else 1", 1),
        ("4 if kind == 'b' else 1", 4),
        ("4 if pattern[2] == 'M' else 1", 4),
        ("blocks[1].attention.heads[0] + blocks[0].width", 12),
        ("blocks[1].off", 1),
        ("len(widths) + len(pattern) * len([1, 2, 3])", 14),
        ("left_out", 24),
        ("nothing", 5),
        ("absent", 7),
        ("twice + 1", 17),
        ("vision.size * 2", 22),
        ("vision.tower.depths[1]", 4),
        ("vision.patch", 14),
        ("vision.nothing", 5),
    ],
)
def test_expressions(tmp_path: Path, expression: str, value: int) -> None:
    section = f"""
defaults:
  left_out: experts * width
  nothing: {{missing: 3, none: 5}}
  absent: {{missing: 7, none: 5}}
  vision.patch: 14
  vision.nothing: {{missing: 3, none: 5}}
names: {{twice: 2 * width}}
first: {{w: ["{expression}"]}}
"""
    vision = {"size": 11, "tower": {"depths": [3, 4]}, "nothing": None}
    fields = {"flag": False, "kind": "b", "pattern": "E*M-", "widths": [5, 6], "nothing": None, "vision": vision}
    blocks = [{"width": 5, "attention": None}, {"attention": {"heads": [7, 8]}, "off": 1}]
    fields |= {"blocks": blocks}
    assert orca(tmp_path, section, **fields) == {"w": (value,)}


def test_everything_together(tmp_path: Path) -> None:
    section = """
names: {wide: layer >= 1}
mtp: 1
count: layers + mtp
prefix: "blocks.{layer}."
first: {embed: [width, 1]}
layers:
  "{up,down}.w": [width]
  if wide:
    e.{expert}.{a,b}: [layer + 1]
    e.{expert}.c: [1]
    if layer >= layers:
      more: {shape: [2], dtype: F32}
last:
  head.{mtp}: [3]
"""
    family, config = family_of(tmp_path, section)
    got = declared_tensors(family, config)
    assert [t.name for t in got if t.name.startswith("blocks.1.")] == [
        "blocks.1.up.w",
        "blocks.1.down.w",
        *(f"blocks.1.e.{i}.{n}" for i in range(3) for n in "abc"),
    ]
    by_name = {t.name: t for t in got}
    assert by_name["blocks.1.e.2.b"].shape == (2,)
    assert by_name["blocks.2.e.2.b"].shape == (3,)
    assert by_name["blocks.2.more"] == Declared("blocks.2.more", "F32", (2,))
    assert got[-1] == Declared("head.0", "BF16", (3,))
    without = declared_tensors(family, config, mtp=False)
    assert [t for t in got if not t.name.startswith(("blocks.2.", "head."))] == without


BAD = {
    "call": ("first: {w: ['int(3)']}", "`int(3)` is nothing that an expression may hold", "first: w: `int(3)`"),
    "attribute": ("first: {w: ['[1].real']}", "`[1].real` is nothing", "first: w"),
    "no part": ("first: {w: [width.real]}", "config.json lacks `width.real`", "first: w: `width.real`"),
    "power": ("first: {w: ['2 ** 9']}", "`2 ** 9` is nothing", "first: w"),
    "division": ("first: {w: ['width / 2']}", "`width / 2` is nothing", "first: w"),
    "fraction": ("first: {w: ['1.5']}", "`1.5` is nothing", "first: w"),
    "lambda": ("first: {w: ['(lambda: 1)()']}", "is nothing that", "first: w"),
    "syntax": ("first: {w: ['2 +']}", "this is not an expression", "first: w: `2 +`"),
    "empty": ("first: {w: ['']}", "this is not an expression", "first: w"),
    "deep": (f"first: {{w: ['{'(' * 5000}1{')' * 5000}']}}", "not an expression", "first: w"),
    "long": (f"first: {{w: ['{'-' * 3000}1']}}", "", "first: w"),
    "large": (f"first: {{w: ['{'9' * 60} * {'9' * 60}']}}", "is too large for any size", "first: w"),
    "zero": ("first: {w: [width - 8]}", "this comes to 0, which is not a size", "first: w: `width - 8`"),
    "negative": ("first: {w: [-1]}", "this comes to -1", "first: w"),
    "truth": ("first: {w: [width == 8]}", "this comes to True", "first: w"),
    "text": ("first: {w: [kind]}", "this comes to 'b'", "first: w"),
    "text times": ("first: {w: [3 * kind]}", "`kind` is 'b', not a whole number", "first: w"),
    "truth plus": ("first: {w: [1 + flag]}", "`flag` is True, not a whole number", "first: w"),
    "by zero": ("first: {w: [width // (width - 8)]}", "`width - 8` is 0", "first: w"),
    "modulo zero": ("first: {w: [width % 0]}", "`0` is 0", "first: w"),
    "compared": ("first: {w: ['1 if kind < 3 else 2']}", "'b' and 3 cannot be compared", "first: w"),
    "identity": ("first: {w: ['1 if kind is 3 else 2']}", "cannot be compared like this", "first: w"),
    "index": ("first: {w: ['widths[7]']}", "`widths` has no element 7", "first: w"),
    "no list": ("first: {w: ['width[0]']}", "`width` is 8, which is neither a list nor a text", "first: w"),
    "no length": ("first: {w: ['len(width)']}", "`width` is 8, which is neither a list nor a text", "first: w"),
    "length of two": ("first: {w: ['len(width, width)']}", "`len(width, width)` is nothing that", "first: w"),
    "no field": ("first: {w: ['blocks[0].wide']}", "`blocks[0]` of config.json has no `wide`", "first: w"),
    "part": ("first: {w: ['blocks[0].a']}", "this comes to ['b'], which is not a size", "first: w"),
    "null": ("first: {w: ['blocks[0].a.b']}", "`blocks[0].a.b` of config.json is null", "first: w"),
    "null part": ("first: {w: ['blocks[0].a.b.c']}", "`blocks[0].a.b` of config.json has no `c`", "first: w"),
    "field of a call": ("first: {w: ['len(blocks).a']}", "`len(blocks).a` is nothing that", "first: w"),
    "text index": ("first: {w: ['1 if kind[1] else 2']}", "`kind` has no element 1", "first: w"),
    "number for a text": (
        """defaults: {width: "'auto'"}\nfirst: {w: [width]}""",
        "`width` of config.json is 8, not a text",
        "first: w: `width`",
    ),
    "fraction field": ("first: {w: [ratio]}", "`ratio` of config.json is 0.5", "first: w: `ratio`"),
    "unknown": ("first: {w: [hidden]}", "config.json lacks `hidden`", "first: w: `hidden`"),
    "condition": ("first: {if hidden: {w: [1]}}", "config.json lacks `hidden`", "first: if hidden: `hidden`"),
    "condition alone": ("first: {if flag: [1]}", "a condition needs tensors below it", "first: if flag"),
    "circle": ("names: {a: b + 1, b: a}\nfirst: {w: [a]}", "`a` is explained by itself", "first: w: `a`"),
    "layer outside": ("last: {w: [layer]}", "`layer` has a meaning only in `layers`", "last: w: `layer`"),
    "count": ("count: 0 - 3\nlayers: {w: [1]}", "this comes to -3, which is not a count", "count: `0 - 3`"),
    "experts": (
        "first: {'e.{expert}': [1]}\nnames: {experts: \"'many'\"}",
        "which is not a count",
        "first: e.{expert}",
    ),
    "shape": ("first: {w: width}", "a tensor needs a list of its sizes", "first: w"),
    "shape entry": ("first: {w: [1.5]}", "a tensor needs a list of its sizes", "first: w"),
    "no shape": ("first: {w: {dtype: F32}}", "a tensor needs a list of its sizes", "first: w"),
    "tensor key": ("first: {w: {shape: [1], type: F32}}", "`type` is not a key of a tensor", "first: w"),
    "dtype": ("first: {w: {shape: [1], dtype: float32}}", "`float32` is not a dtype", "first: w"),
    "star": ("first: {'w.*': [1]}", "`*` cannot stand in the name of a tensor", "first: w.*"),
    "word": ("first: {'w.{name}': [1]}", "`{name}` cannot stand in the name", "first: w.{name}"),
    "brace": ("first: {'w.{': [1]}", "`{` cannot stand in the name", "first: w.{"),
    "two numbers": ("first: {'w.{expert}.{mtp}': [1]}", "a tensor has one number", "first: w"),
    "prefix": ("prefix: 'b.'\nlayers: {w: [1]}", "`b.` does not give every layer one name", "prefix"),
    "twice": ("first: {w: [1]}\nlast: {'{w,v}': [1]}", "`w` is declared twice", ""),
    "too many layers": ("count: 10 * 1000 * 1000 * 1000", "more than any model has", "count"),
    "too many": ("first: {'e.{expert}': [1]}\nnames: {experts: '10 * 1000 * 1000 * 1000'}", "more than", "first: e."),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_sections(tmp_path: Path, case: str) -> None:
    section, what, where = BAD[case]
    with pytest.raises(LayoutError) as e:
        orca(tmp_path, section, kind="b", flag=True, widths=[1], ratio=0.5, blocks=[{"a": {"b": None}}])
    assert what in e.value.what
    assert e.value.where[0].startswith("orca.yaml: tensors" + (f": {where}" if where else ""))


def test_an_error_names_the_way_to_it(tmp_path: Path) -> None:
    with pytest.raises(LayoutError) as e:
        orca(tmp_path, "defaults: {b: c * 2}\nnames: {a: b + 1}\nlayers: {w: [1, a]}")
    assert e.value.where == (
        "orca.yaml: tensors: layers: w: `a`",
        "orca.yaml: tensors: defaults: b: `c * 2`",
        "orca.yaml: tensors: names: a: `b + 1`",
    )
    with pytest.raises(LayoutError) as e:
        orca(tmp_path, "defaults: {b: c - width}\nnames: {a: b + 1}\nlayers: {w: [a]}", c=2)
    assert e.value.where == ("orca.yaml: tensors: layers: w: `a`", "config.json: `c` is 2, `width` is 8")


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ("defaults: {a: {missing: 3}}", "tensors.defaults.a"),
        ("default: {a: 3}", "tensors.default"),
        ("names: {a: [3]}", "tensors.names.a"),
        ("layers: [w]", "tensors.layers"),
    ],
)
def test_the_file_is_checked(tmp_path: Path, section: str, words: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(f"not valid at `{words}")):
        orca(tmp_path, section)


def test_a_key_that_stands_twice(tmp_path: Path) -> None:
    """YAML would take the last one, and the tensors below the first `if` would be gone."""
    with pytest.raises(LayoutError, match="`if flag` stands twice in one map"):
        orca(tmp_path, "layers:\n  if flag: {w: [1]}\n  v: [1]\n  if flag: {x: [1]}")
