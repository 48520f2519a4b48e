"""config.json of models whose layers have got other numbers: what each layer is stays as it was, or it is refused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from ckpttool.errors import UnsupportedError
from ckpttool.layout.family import find_family, load_family, no_family
from ckpttool.ops.merge.renumber import OutputLayer, renumbered
from tests.helpers.command import ckpttool
from tests.helpers.sample import examples
from tests.merge.models import llama, llama_config, save
from tests.walk import numbered

Config = dict[str, Any]


def sliced(config: Config, layers: list[int], prefix: str = "model.layers.", **others: int) -> Config:
    """The config after slices of one model."""
    name = find_family(config)
    family = load_family(name, config) if name else no_family()
    return renumbered(family, config, prefix, [OutputLayer(config, n) for n in layers], others)


def changed(config: Config, layers: list[int]) -> Config:
    """The fields that slices have changed, without the number of layers."""
    out = sliced(config, layers)
    assert {k for k in config if k not in out} == set()
    return {k: v for k, v in out.items() if config.get(k) != v and k != "num_hidden_layers"}


DEEPSEEK = {"model_type": "deepseek_v3", "first_k_dense_replace": 2}
QWEN: Config = {"model_type": "qwen2_moe", "num_experts": 4, "decoder_sparse_step": 1, "mlp_only_layers": [0, 3]}
STEP = {**QWEN, "mlp_only_layers": [], "decoder_sparse_step": 2}
ERNIE: Config = {
    "model_type": "ernie4_5_moe",
    "moe_layer_start_index": 1,
    "moe_layer_end_index": 3,
    "moe_layer_interval": 1,
}
WINDOW = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
LLAMA4: Config = {"model_type": "llama4_text", "no_rope_layer_interval": 4, "interleave_moe_layer_step": 2}
KIMI = {
    "model_type": "kimi_linear", "first_k_dense_replace": 1,
    "linear_attn_config": {"kda_layers": [1, 2, 4], "full_attn_layers": [3], "num_heads": 4},
}  # fmt: skip
NEMOTRON = {"model_type": "nemotron_h"}
STEP3 = {"model_type": "step3_text", "moe_layers_enum": "1,3"}
FULL, NEAR = "full_attention", "sliding_attention"

FOLLOWS: list[tuple[Config, list[int], Config]] = [
    (DEEPSEEK, [0, 1, 2, 3, 3], {}),
    (DEEPSEEK, [2, 3], {"first_k_dense_replace": 0}),
    (DEEPSEEK, [0, 2, 3], {"first_k_dense_replace": 1}),
    (DEEPSEEK, [0, 1, 0, 1, 2], {"first_k_dense_replace": 4}),
    (QWEN, [0, 1], {"mlp_only_layers": [0]}),
    (QWEN, [2, 3, 0, 1], {"mlp_only_layers": [1, 2]}),
    (STEP, [0, 1, 0, 1, 2, 3], {}),
    (STEP, [1, 2, 3], {"mlp_only_layers": [1], "decoder_sparse_step": 1}),
    (ERNIE, [2, 3], {"moe_layer_start_index": 0, "moe_layer_end_index": 1}),
    (ERNIE, [0, 1, 2, 1, 2, 3], {"moe_layer_end_index": 5}),
    ({**ERNIE, "moe_layer_end_index": -1}, [0, 3], {}),
    (WINDOW, [2, 3], {"max_window_layers": 0}),
    (WINDOW, [2, 0], {"layer_types": [NEAR, FULL]}),
    ({**WINDOW, "use_sliding_window": False}, [2, 0], {}),
    (
        {**WINDOW, "layer_types": [FULL, NEAR, NEAR, FULL]}, [3, 1],
        {"layer_types": [FULL, NEAR], "max_window_layers": 1},
    ),
    ({"model_type": "gemma2"}, [0, 2], {"layer_types": [NEAR, NEAR]}),
    ({"model_type": "gemma2"}, [2, 3], {}),
    (LLAMA4, [3, 0], {"moe_layers": [0], "no_rope_layers": [0, 1]}),
    ({**LLAMA4, "moe_layers": [0, 3]}, [3, 0, 1], {"moe_layers": [0, 1], "no_rope_layers": [0, 1, 1]}),
    (
        {"model_type": "jamba", "attn_layer_period": 4, "attn_layer_offset": 1, "num_experts": 1},
        [0, 2, 1],
        {"attn_layer_period": 3, "attn_layer_offset": 2},
    ),
    ({"model_type": "bamba", "attn_layer_indices": [1, 2]}, [2, 0, 2], {"attn_layer_indices": [0, 2]}),
    ({"model_type": "lfm2", "full_attn_idxs": [1, 2, 3]}, [0, 3], {"full_attn_idxs": [1]}),
    ({**NEMOTRON, "hybrid_override_pattern": "M*E-"}, [3, 0], {"hybrid_override_pattern": "-M"}),
    ({**NEMOTRON, "layers_block_type": ["mamba", "moe", "mlp", "mamba"]}, [1], {"layers_block_type": ["moe"]}),
    (KIMI, [0, 2, 3], {"linear_attn_config": {"kda_layers": [1, 3], "full_attn_layers": [2], "num_heads": 4}}),
    (STEP3, [3, 0, 1], {"moe_layers_enum": "0,2"}),
    (
        {"model_type": "llama", "per_layer_config": {"2": {"head_dim": 4}}}, [2, 0],
        {"per_layer_config": {"0": {"head_dim": 4}}},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("said", "layers", "expected"), FOLLOWS)
def test_the_config_says_what_each_layer_is(said: Config, layers: list[int], expected: Config) -> None:
    """A loader fills layers of the other kind with random numbers."""
    config = {"num_hidden_layers": 4, **said}
    assert changed(config, layers) == expected
    assert sliced(config, layers)["num_hidden_layers"] == len(layers)


REFUSED: list[tuple[Config, list[int], str]] = [
    (DEEPSEEK, [0, 1, 2, 1, 2, 3], "`first_k_dense_replace`"),
    (ERNIE, [2, 3, 0, 1, 2], "`moe_layer_start_index`"),
    ({"model_type": "jamba", "attn_layer_period": 2, "attn_layer_offset": 0}, [0, 1, 0, 0], "`attn_layer_period`"),
    ({"model_type": "diffllama"}, [1, 2], "`depth`"),
    ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, [1], "`scale_attn_by_inverse_layer_idx`"),
    ({"model_type": "mistral", "layer_types": [FULL, NEAR]}, [1], "`kind`|layer_types"),
]


@pytest.mark.parametrize(("said", "layers", "match"), REFUSED)
def test_an_order_that_no_config_says(said: Config, layers: list[int], match: str) -> None:
    with pytest.raises(UnsupportedError, match=match):
        sliced({"num_hidden_layers": 4, **said}, layers)


UNKNOWN: list[Config] = [
    {"some_list": [7, 8, 9]},
    {"attention_period": 3},
    {"moe_every_n_layers": 2},
    {"router_layer_ids": [1]},
    {"expert_idxs": "0,2"},
    {"block_pattern": "abb"},
    {"kinds": {"0": "a", "2": "b"}},
    {"exits": [0, 1]},
    {"mixer": {"full_layers": [1, 2]}},
    {"linear_attn_config": {"kda_layers": [1, 2], "num_heads": 4}},
]


@pytest.mark.parametrize("said", UNKNOWN)
@pytest.mark.parametrize("model_type", ["llama", "somebody's"])
def test_a_field_that_nobody_declared(said: Config, model_type: str) -> None:
    """A loader that knows it would take other layers for those that it means."""
    config = {"model_type": model_type, "num_hidden_layers": 3, **said}
    (name,) = said
    with pytest.raises(UnsupportedError, match=rf"`{name}[.\w]*` of config.json"):
        sliced(config, [0, 2])
    assert sliced(config, [0, 1, 2]) == config


def test_what_speaks_of_no_layers_stays() -> None:
    """A list as long as there are layers that is one of tokens."""
    said = {
        "eos_token_id": [3, 4, 5], "bos_token_id": 1, "image_token_index": 7, "layer_norm_eps": 1e-5,
        "hidden_act": "abc", "architectures": ["LlamaForCausalLM"], "layerdrop": 0.0, "num_experts_per_tok": 2,
        "max_window_layers": None, "mtp_layer_types": ["a", "b", "c"], "id2label": {"0": "a", "1": "b"},
        "rope_scaling": {"type": "longrope", "long_factor": [1, 2, 4], "mrope_section": [2, 1, 1]},
        "task_specific_params": {"summarization": {"num_beams": 4}},
    }  # fmt: skip
    config = {"model_type": "llama", "num_hidden_layers": 3, **said}
    assert sliced(config, [2, 0]) == {**config, "num_hidden_layers": 2}


def test_a_model_of_one_layer() -> None:
    config = {"model_type": "llama", "num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]}
    assert sliced(config, [0, 0]) == {**config, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("config", "stack", "expected"),
    [
        ({"model_type": "t5", "num_layers": 6, "num_decoder_layers": 6}, "decoder.block.", {"num_decoder_layers": 2}),
        ({"model_type": "t5", "num_layers": 6}, "encoder.block.", {"num_layers": 2, "num_decoder_layers": 6}),
        ({"model_type": "t5", "num_layers": 6}, "decoder.block.", {"num_decoder_layers": 2}),
        (
            {"model_type": "bart", "encoder_layers": 6, "num_hidden_layers": 6, "decoder_layers": 6},
            "model.encoder.layers.",
            {"encoder_layers": 2, "num_hidden_layers": 2},
        ),
        (
            {"model_type": "bart", "encoder_layers": 6, "num_hidden_layers": 6, "decoder_layers": 6},
            "model.decoder.layers.",
            {"decoder_layers": 2},
        ),
        (
            {"text_config": {"num_hidden_layers": 6}, "vision_config": {"depth": 9}},
            "model.visual.blocks.",
            {"vision_config": {"depth": 2}},
        ),
        (
            {"text_config": {"num_hidden_layers": 3, "layer_types": ["a", "b", "c"]}, "vision_config": {"depth": 9}},
            "model.language_model.layers.",
            {"text_config": {"num_hidden_layers": 2, "layer_types": ["c", "a"]}},
        ),
        ({"num_hidden_layers": 6, "vision_config": {"depth": 9}}, "model.layers.", {"num_hidden_layers": 2}),
    ],
)
def test_one_stack_of_several(config: Config, stack: str, expected: Config) -> None:
    assert sliced(config, [2, 0], stack, other=7) == {**config, **expected}


def test_a_stack_that_no_field_counts() -> None:
    with pytest.raises(UnsupportedError, match=r"count the layers of `visual\.blocks\.`"):
        sliced({"num_hidden_layers": 6}, [2, 0], "visual.blocks.", other=6)


def test_layers_of_a_tower() -> None:
    vision = {"depth": 4, "fullatt_block_indexes": [1, 3]}
    config = {"model_type": "qwen2_5_vl", "text_config": {"model_type": "qwen2_5_vl_text"}, "vision_config": vision}
    out = sliced(config, [3, 0, 1], "visual.blocks.", **{"model.layers.": 6})
    assert out == {**config, "vision_config": {"depth": 3, "fullatt_block_indexes": [0, 2]}}
    llava = {"model_type": "llava", "vision_feature_layer": -2, "vision_config": {"num_hidden_layers": 4}}
    with pytest.raises(UnsupportedError, match=r"`vision_feature_layer` of config\.json is -2"):
        sliced(llava, [0, 1, 2], "vision_tower.vision_model.encoder.layers.", **{"language_model.model.layers.": 6})
    deep = {"model_type": "qwen3_vl", "vision_config": {"depth": 3, "deepstack_visual_indexes": [0, 2]}}
    with pytest.raises(UnsupportedError, match=r"`deepstack_visual_indexes` of config\.json is \[0, 2\]"):
        sliced(deep, [1, 2], "model.visual.blocks.", **{"model.language_model.layers.": 4})


def test_a_field_that_counts_two_stacks() -> None:
    config = {"text_config": {"num_hidden_layers": 6}}
    with pytest.raises(
        UnsupportedError, match=r"count the layers of `a\.text\.layers\.` and not those of `b\.text\.layers"
    ):
        sliced(config, [2, 0], "a.text.layers.", **{"b.text.layers.": 6})


def test_layers_of_another_model_are_what_they_are_there() -> None:
    """Also where their numbers stay as they are."""
    first = {"model_type": "gemma2", "num_hidden_layers": 2, "layer_types": [FULL, NEAR]}
    second = {"model_type": "gemma2", "num_hidden_layers": 2, "layer_types": [NEAR, FULL]}
    family = load_family("gemma", first)
    layers = [OutputLayer(first, 0), OutputLayer(second, 1)]
    assert renumbered(family, first, "model.layers.", layers)["layer_types"] == [FULL, FULL]
    dense = {**DEEPSEEK, "num_hidden_layers": 2}
    sparse = {**dense, "first_k_dense_replace": 0}
    family = load_family("deepseek", dense)
    assert (
        renumbered(family, dense, "model.layers.", [OutputLayer(dense, 0), OutputLayer(sparse, 1)])[
            "first_k_dense_replace"
        ]
        == 1
    )


def test_layers_of_prediction_stay_behind_the_others() -> None:
    config = {**DEEPSEEK, "num_hidden_layers": 4, "num_nextn_predict_layers": 1}
    assert sliced(config, [0, 1, 3, 4])["num_hidden_layers"] == 3
    with pytest.raises(UnsupportedError, match="multi-token prediction before others"):
        sliced(config, [0, 4, 1])


@pytest.mark.parametrize("kind", numbered.ARCHITECTURES)
def test_what_layers_are_for_code_that_shares_nothing_with_this(kind: str) -> None:
    """Slices at random; few are refused."""
    ended = Counter[str]()
    for seed in range(examples(60)):
        r = Random(f"{kind} {seed}")  # noqa: S311
        count = r.randint(3, 7)
        config = numbered.config(kind, count, r)
        kept = sorted(r.sample(range(count), r.randint(1, count)))
        order = kept if r.random() < 0.7 else [r.randrange(count) for _ in range(r.randint(1, 8))]
        prefix = numbered.layer_name(config, 0).partition("0")[0]
        try:
            out = sliced(config, order, prefix)
        except UnsupportedError:
            ended["refused"] += 1
            continue
        assert numbered.kinds(out) == [numbered.kinds(config)[n] for n in order], (config, order, out)
        assert out.get("eos_token_id") == config.get("eos_token_id")
        ended["follows"] += 1
    assert ended["follows"] > ended["refused"]


KINDS = ["sliding_attention", "full_attention"]


def mixed(root: Path, kinds: Sequence[Sequence[str]], ranges: Sequence[Sequence[int]], **fields: object) -> Any:
    """A linear merge of slices of two models of Qwen3 with these layers."""
    sources = []
    for i, (name, own, chosen) in enumerate(zip("ab", kinds, ranges, strict=True)):
        tensors = llama(layers=len(own), seed=i)
        config = {**llama_config(layers=len(own)), "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
        windows = {"use_sliding_window": "sliding_attention" in own, "sliding_window": 4 + 4 * i}
        save(root / name, tensors, {**config, **windows, "layer_types": list(own), **fields})
        sources.append({"model": str(root / name), "layer_range": list(chosen), "parameters": {"weight": 0.5}})
    recipe = {"merge_method": "linear", "slices": [{"sources": sources}]}
    (root / "recipe.yml").write_text(json.dumps(recipe))
    return ckpttool("merge", root / "recipe.yml", "-o", root / "dst")


@pytest.mark.parametrize(
    ("kinds", "ranges", "right"),
    [
        ((KINDS, KINDS), ((0, 2), (0, 2)), True),
        ((KINDS, KINDS), ((0, 1), (1, 2)), False),
        ((KINDS, KINDS[1:] * 2), ((0, 2), (0, 2)), False),
        ((KINDS * 2, KINDS * 2), ((0, 2), (2, 4)), True),
        ((KINDS[:1] * 2, KINDS[1:] * 2), ((0, 2), (0, 2)), True),  # Mistral 0.1 and 0.2
    ],
)
def test_layers_of_different_kinds_are_not_merged_into_one(
    tmp_path: Path, kinds: Sequence[Sequence[str]], ranges: Sequence[Sequence[int]], right: bool
) -> None:
    done = mixed(tmp_path, kinds, ranges)
    assert (done.code == 0) == right, done.err
    if not right:
        assert "is merged from layers of different kinds" in done.err
        assert not (tmp_path / "dst").exists()
