"""The family files as files: what is chosen by a head, and what one file takes from another."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from ckpttool.errors import CkptError, LayoutError, UnsupportedError
from ckpttool.layout.family import Family, find_family, load_family, pick_family
from ckpttool.layout.files import FAMILIES, HEAD, UniqueKeys, builtin, read_builtin
from ckpttool.layout.shapes import declared_tensors
from tests.helpers.sample import some

FILES = sorted(FAMILIES.rglob("*.yaml"))


def test_the_heads_of_all_files() -> None:
    """A file is chosen by its first lines, read as text: they say what YAML says."""
    assert len(builtin()) == len(FILES)
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        # What is chosen by nothing is for --family alone.
        said = yaml.load("".join(text.splitlines(keepends=True)[: len(HEAD)]), Loader=UniqueKeys)  # noqa: S506 - a safe loader
        assert tuple(said) == HEAD, path.name
        name = path.relative_to(FAMILIES).with_suffix("").as_posix()
        assert said["family"] == name
        assert builtin()[name].chosen_by == {key: frozenset(said[key]) for key in HEAD[2:]}


def test_no_two_files_of_a_kind_are_for_one_model() -> None:
    for generated in (False, True):
        for key in HEAD[2:]:
            files = [f for f in builtin().values() if ("/" in f.name) == generated]
            named = [(word, f.name) for f in files for word in f.chosen_by[key]]
            assert len({word for word, _ in named}) == len(named), sorted(named)


def test_no_key_stands_twice_in_a_family() -> None:
    """Built-in files are read by a quick loader, which does not look."""
    found = []
    for path in FILES:
        nodes = [yaml.compose(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))]
        while nodes:
            node = nodes.pop()
            if isinstance(node, yaml.SequenceNode):
                nodes += node.value
            elif isinstance(node, yaml.MappingNode):
                keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
                found += [f"{path.name}: {key}" for key, count in keys.items() if count > 1]
                nodes += [value for _, value in node.value]
    assert found == []


def test_every_file_is_valid() -> None:
    """Around a language model that a config names there is nothing to load without one."""
    for name in builtin():
        try:
            assert load_family(name, {}).spec.family == name
        except UnsupportedError as e:
            assert "the language model in it" in e.what, name  # noqa: PT017 - both are right


def test_a_file_that_is_read_again_says_the_same() -> None:
    """It is kept in JSON, and each reader has an own copy."""
    for name, file in [*builtin().items()][:: some(1, 16)]:
        read_builtin(name).clear()
        assert read_builtin(name) == yaml.load(file.path.read_text(encoding="utf-8"), Loader=UniqueKeys)  # noqa: S506 - a safe loader


def test_models_of_one_family_share_only_what_no_config_says() -> None:
    few, many = (load_family("llama", {**CONFIG, "num_attention_heads": n}) for n in (4, 8))
    said = few.spec.model_dump_json()
    ruled = many.with_overrides(["*.q_proj.weight"], ["*.k_proj.weight=1"]).with_whole(["*.v_proj.weight"])
    assert ruled.spec is few.spec
    assert (len(few.overrides), len(many.overrides), len(ruled.overrides)) == (0, 0, 3)
    assert (few.size("heads"), many.size("heads"), ruled.size("heads")) == (4, 8, 8)
    bare = load_family("bert", {}).spec.hf_namings
    assert load_family("bert", {}).spec.hf_namings == bare  # which are found once
    assert few.spec.model_dump_json() == said


CONFIG: dict[str, Any] = {
    "model_type": "orca", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32,
    "intermediate_size": 48, "vocab_size": 100, "tie_word_embeddings": False,
}  # fmt: skip


def written(tmp_path: Path, text: str, config: dict[str, Any] | None = None) -> Family:
    path = tmp_path / "orca.yaml"
    path.write_text("family: orca\n" + text, encoding="utf-8")
    return load_family(str(path), CONFIG if config is None else config)


def rule(family: Family, name: str) -> str | None:
    place = family.placement(name)
    return None if place is None else place.rule.text


def test_extends(tmp_path: Path) -> None:
    got = written(
        tmp_path,
        "extends: {family: llama, namings: [vllm]}\n"
        "layers:\n  rules:\n    self_attn.q_norm.weight: replicate\n    self_attn.o_proj.*: replicate\n"
        "tensors:\n  layers:\n    self_attn.q_norm.weight: [head_dim]\n"
        "    if attention_bias and model_type != 'mistral': null\n",
    )
    assert rule(got, "model.layers.1.self_attn.q_norm.weight") == "replicate"
    assert rule(got, "model.layers.1.self_attn.o_proj.weight") == "replicate", "its own rules come first"
    assert rule(got, "model.layers.1.self_attn.q_proj.weight") == "column heads"
    assert set(got.spec.namings) == {"vllm"}
    assert got.spec.trainer_namings == []
    names = {t.name for t in declared_tensors(got, {**CONFIG, "attention_bias": True})}
    assert "model.layers.0.self_attn.q_norm.weight" in names
    assert "model.layers.0.mlp.up_proj.weight" in names
    assert "model.layers.0.self_attn.q_proj.bias" not in names, "null takes a key away"


def test_a_size_of_its_own_has_nothing_of_the_other_one(tmp_path: Path) -> None:
    """Llama's key heads are `from` a field and `shared`; one key of a size alone is joined to them."""
    config = {**CONFIG, "num_attention_heads": 8, "num_key_value_heads": 2}
    for own, value, shared in (
        ("{expr: heads // 2}", 4, False),
        ("{from: [n_kv], default: 1}", 1, False),
        ("{plus: [num_attention_heads]}", 10, True),
    ):
        got = written(tmp_path, f"extends: {{family: llama}}\nsizes: {{kv_heads: {own}}}\n", config)
        assert (got.sizes["kv_heads"].value, got.sizes["kv_heads"].shared) == (value, shared)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("extends: {family: lama}\n", "unknown family `lama`"),
        ("extends: llama\n", "not valid at `extends`"),
        ("extends: {name: llama}\n", "not valid at `extends`: `name`"),
        ("extends: {family: llama, namings: [gpt]}\n", "family `llama` has no naming `gpt`"),
        ("inside: {family: llama, names: model}\n", "not valid at `inside`: `names`"),
        ("inside: {family: llama, names: {1: a}}\n", "not valid at `inside`: `names`"),
        ("inside: {family: llama, names: {model.: null}}\n", "not valid at `inside`: `names`"),
        ("inside: {family: llama, namings: [[vllm]]}\n", "not valid at `inside`: `namings`"),
        ("inside: {family: llama, config: [{}]}\n", "not valid at `inside`: `config`"),
        ("extends: {family: llama, namings: [{}]}\n", "not valid at `extends`: `namings`"),
        ("inside: {family: llama}\nnamings: vllm\n", "not valid at `namings`"),
        ("inside: {family: llama}\nnamings: {vllm: null}\n", "not valid at `namings`"),
    ],
)
def test_what_cannot_be_taken_over(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(CkptError, match=what.replace("[", r"\[")):
        written(tmp_path, text)


OWN = 'layers: {prefix: "blocks.{layer}.", rules: {w: row}}\n'


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (OWN + 'namings: {vllm: [{rename: {"a.{b}": "c.*"}}]}\n', "`*` is not kept"),
        (OWN + 'namings: {vllm: [{rename: {"a.{b}": "{c,d}"}}]}\n', "`{c,d}` is not kept"),
        (OWN + 'namings: {vllm: [{rename: {"a.{b}": c}}]}\n', "`a.{b}` and `c`: only one of them has {b}"),
        (OWN + 'namings: {vllm: [{stack: {"{a}.w": "{a}.0.w"}}]}\n', "only one of them has {expert}"),
        (OWN + 'fusions: {qk: {whole: "{a}.qk", parts: ["{a}.q", k]}}\n', "`{a}.qk` and `k`: only one of them has {a}"),
        (OWN + "hf_namings: [bare]\n", "`bare` is not in the namings"),
        (OWN + "trainer_namings: [meta]\n", "`meta` is not in the namings"),
        (OWN + "sizes: {heads: []}\n", "not valid at `sizes.heads"),
        ('layers: {prefix: "*", rules: {w: row}}\n', "`*` lacks {layer}"),
    ],
)
def test_names_that_do_not_follow_from_each_other(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(what)):
        written(tmp_path, text)


def test_a_dtype_that_is_no_text(tmp_path: Path) -> None:
    family = written(tmp_path, OWN + "tensors: {first: {a: {shape: [1], dtype: [F32]}}}\n")
    with pytest.raises(LayoutError, match="is not a dtype"):
        declared_tensors(family, CONFIG)


def test_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.touch()
    with pytest.raises(LayoutError, match="the family file is not valid: "):
        load_family(str(path), CONFIG)


AROUND = """
inside: {config: [text_config], names: {"model.": "model.language_model."}, namings: [vllm]}
first:
  "model.visual.*": replicate
namings:
  vllm:
    - rename: {"model.language_model.{a}": "language_model.model.{a}"}
tensors:
  first:
    model.visual.patch.weight: [vision_width, hidden_size]
"""


def test_inside(tmp_path: Path) -> None:
    """The sizes are those of the part of the config that is about the language model."""
    config = {"vision_width": 7, "text_config": {**CONFIG, "model_type": "llama"}, "num_attention_heads": 3}
    got = written(tmp_path, AROUND, config)
    assert got.size("heads") == 4
    assert rule(got, "model.language_model.layers.0.self_attn.q_proj.weight") == "column heads"
    assert rule(got, "model.layers.0.self_attn.q_proj.weight") is None
    assert rule(got, "model.visual.blocks.0.attn.qkv.weight") == "replicate"
    assert rule(got, "lm_head.weight") == "vocab"
    statements = got.statements("vllm")
    assert got.placement("language_model.model.layers.0.self_attn.qkv_proj.weight", statements) is not None
    declared = {t.name: t.shape for t in declared_tensors(got, config)}
    assert declared["model.visual.patch.weight"] == (7, 32)
    assert declared["model.language_model.layers.1.mlp.up_proj.weight"] == (48, 32)
    assert declared["lm_head.weight"] == (100, 32)


def test_a_language_model_of_no_known_family(tmp_path: Path) -> None:
    config = {"text_config": {"model_type": "kraken"}}
    with pytest.raises(UnsupportedError, match="the language model in it is a `kraken`"):
        written(tmp_path, AROUND, config)


def test_inside_goes_by_the_language_model(tmp_path: Path) -> None:
    """What that cannot be brought to, the whole cannot either; and it says which statements are for it."""
    around = AROUND.replace("visual.patch.weight: [vision_width", "visual.patch.weight: [7")
    assert "vllm" not in written(tmp_path, around, {"text_config": {**CONFIG, "model_type": "nemotron"}}).spec.namings
    config = {"model_type": "orca", "text_config": {**CONFIG, "model_type": "gemma3_text"}}
    assert written(tmp_path, around, config).model_types == {"orca", "gemma3_text"}
    around = around.replace("namings: [vllm]}", "namings: [vllm], default: qwen2}")
    unnamed = {k: v for k, v in CONFIG.items() if k != "model_type"}
    biased = written(tmp_path, around, {"tie_word_embeddings": True, "text_config": unnamed})
    names = [t.name for t in declared_tensors(biased, {"tie_word_embeddings": True, "text_config": unnamed})]
    assert "model.language_model.layers.0.self_attn.q_proj.bias" in names
    assert "lm_head.weight" not in names, "tied, says the whole, whatever the language model says"


def test_the_tensors_of_the_language_model_are_not_all(tmp_path: Path) -> None:
    """A file that says nothing of the tensors around it says nothing of tensors: a sum of the others would be wrong."""
    config = {"text_config": {**CONFIG, "model_type": "llama"}}
    assert written(tmp_path, AROUND.split("tensors:", maxsplit=1)[0], config).spec.tensors is None


def test_tensors_of_other_stacks(tmp_path: Path) -> None:
    """They stand behind `first`, numbered by themselves; a stack with rules needs no prefix of its own."""
    text = AROUND + (
        "  stacks:\n"
        "    vision: {count: depth, tensors: {qkv.weight: [3 * vision_width, layer + 1]}}\n"
        '    merger: {count: 1, prefix: "model.merger.{layer}.", tensors: {weight: [hidden_size]}}\n'
        'stacks: {vision: {prefix: "model.visual.blocks.{layer}.", rules: {"*": replicate}}}\n'
    )
    config = {"vision_width": 7, "depth": 2, "text_config": {**CONFIG, "model_type": "llama"}}
    got = declared_tensors(written(tmp_path, text, config), config)
    assert [(t.name, t.shape) for t in got[2:5]] == [
        ("model.visual.blocks.0.qkv.weight", (21, 1)),
        ("model.visual.blocks.1.qkv.weight", (21, 2)),
        ("model.merger.0.weight", (32,)),
    ]
    with pytest.raises(LayoutError, match="does not give every layer one name"):
        declared_tensors(written(tmp_path, text.replace("merger.{layer}.", "merger."), config), config)


def test_a_naming_that_shapes_tell() -> None:
    """Qwen3-VL's experts are published [expert, in, out]; transformers 5 writes [expert, out, in] under their names."""
    family = load_family("qwen3_vl_moe", {"text_config": {**CONFIG, "num_experts": 4, "moe_intermediate_size": 24}})
    name = "model.language_model.layers.1.mlp.experts.down_proj"
    assert family.published_form([name], lambda: {name: (4, 24, 32)}) == ("", "")
    assert family.published_form([name], lambda: {name: (4, 32, 24)}) == ("transformers", "")
    place = family.placement(name, family.statements("transformers"))
    assert place is not None
    assert (family.placement(name) or place).rule.in_out
    assert not place.rule.in_out


def test_base(tmp_path: Path) -> None:
    """Embedding models and classifiers are published without the head, and some without its prefix."""
    got = written(tmp_path, 'extends: {family: llama}\nbase: "model."\n')
    names = ["layers.0.self_attn.q_proj.weight", "embed_tokens.weight", "norm.weight"]
    assert got.published_form(names) == ("bare", "")
    statements = got.statements("bare")
    assert [got.placement(n, statements) is not None for n in names] == [True] * 3
    assert got.published_form([f"model.{n}" for n in names] + ["score.weight"]) == ("", "")
    assert rule(got, "score.weight") == "replicate"


def test_other_stacks_live_on_the_first_stage(tmp_path: Path) -> None:
    got = written(
        tmp_path,
        "extends: {family: llama}\nstacks:\n  encoder:\n    prefix: encoder.block.{layer}.\n"
        "    rules: {q.weight: column heads}\n",
    )
    place = got.placement("encoder.block.3.q.weight")
    assert place is not None
    assert (place.stage, place.rule.text) == ("first", "column heads")


def test_ties(tmp_path: Path) -> None:
    text = "extends: {family: llama}\nties: {head.weight: shared.weight}\ntied: true\n"
    assert written(tmp_path, text, {}).ties["head.weight"] == "shared.weight"
    assert written(tmp_path, text).ties == {}


def test_what_a_file_records_is_not_needed_to_read(tmp_path: Path) -> None:
    config = json.loads(json.dumps({"model_type": "none of them"}))
    assert find_family(config) is None
    assert pick_family("", "orca", config).name == "none"
    with pytest.raises(LayoutError):
        written(tmp_path, "layers: 3\n")
