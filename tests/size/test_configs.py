"""What a config.json says of a recipe, and which options a recipe has."""

from __future__ import annotations

import copy
import random
import time
from typing import Any

import pytest

from ckpttool.errors import ConflictError, UnsupportedError, UsageError
from ckpttool.quant.config import ConfigScheme, config_scheme, hf_quant_config, quantization_config
from ckpttool.quant.keep import Keep, Weight
from ckpttool.quant.scheme import EDGES, METHODS, scheme

MADE = {
    f"{recipe} {method}{' static' if static else ''}": quantization_config(
        scheme(recipe, method=method, static=static), ["lm_head"]
    )
    for recipe, methods in METHODS.items()
    for method in methods
    for static in (False, True)
    if (method, static) != ("fbgemm_fp8", True)
}
KNOWN: dict[str, dict[str, Any]] = {
    **MADE,
    "gpt-oss": quantization_config(scheme("mxfp4"), ["model.layers.*.self_attn"], blocks=True),
    "DeepSeek-V3": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "DeepSeek-V3.1": {"fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]},
    "Kimi": {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head", "re:.*mlp"]},
    "modelopt": {"quant_algo": "NVFP4", "producer": {"name": "modelopt"}, "exclude_modules": ["lm_head"]},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128},
}


def of(quant: Any) -> ConfigScheme:
    return config_scheme({"model_type": "llama", "quantization_config": quant})


@pytest.mark.parametrize("name", MADE)
def test_what_is_written_is_read_again(name: str) -> None:
    recipe, method, *_ = name.split()
    found = of(MADE[name])
    assert found.scheme is not None
    assert (found.scheme.recipe, found.scheme.method) == (recipe, method)
    assert found.ignored == ("lm_head",)
    own = hf_quant_config(found.scheme, ["lm_head"])
    assert (own is not None) == (method == "modelopt")


def block(sides: object) -> dict[str, Any]:
    """compressed-tensors with blocks."""
    made = copy.deepcopy(MADE["block compressed-tensors"])
    made["config_groups"]["group_0"]["weights"]["block_structure"] = sides
    return made


def test_sides_of_blocks() -> None:
    for sides, expected in (([64, 32], (64, 32)), ("64x32", (64, 32))):
        found = of(block(sides)).scheme
        assert found is not None
        assert found.block == expected
    found = of({"quant_method": "fp8", "weight_block_size": None}).scheme
    assert found is not None
    assert found.recipe == "tensor"


ODD: dict[str, tuple[Any, str]] = {
    **{
        f"weight_block_size {v!r}": ({"quant_method": "fp8", "weight_block_size": v}, "weight_block_size")
        for v in ([128], "x", 5, [0, 128], ["x", 1], [], False)
    },
    **{
        f"modules_to_not_convert {v!r}": (
            {"quant_method": "fp8", "modules_to_not_convert": v},
            "modules_to_not_convert",
        )
        for v in (5, {"a": 1}, "lm_head", [5])
    },
    **{
        f"block_structure {v!r}": (block(v), "config_groups.group_0.weights.block_structure")
        for v in (["x", 1], None, "128", "0x1", [128, -1])
    },
    "groups": ({"quant_method": "compressed-tensors", "config_groups": [1]}, "config_groups"),
    "group": ({"quant_method": "compressed-tensors", "config_groups": {"g": 5}}, "config_groups.g"),
    "weights": (
        {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": "fp8"}}},
        "config_groups.g.weights",
    ),
    "inputs": (
        {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"a": 1}, "input_activations": 5}}},
        "config_groups.g.input_activations",
    ),
    "format": ({**MADE["channel compressed-tensors"], "format": 5}, "format"),
    "method": ({"quant_method": ["fp8"]}, "quant_method"),
    "algo": ({"quant_method": "modelopt", "quant_algo": {}}, "quant_algo"),
    "fmt": ({"quant_method": "fp8", "fmt": 5}, "fmt"),
}


@pytest.mark.parametrize("case", ODD)
def test_fields_that_are_not_what_they_should_be(case: str) -> None:
    quant, field = ODD[case]
    with pytest.raises(ConflictError) as e:
        of(quant)
    assert e.value.what.startswith(f"`{field}` of config.json's quantization_config is ")
    assert e.value.where == (f"config.json: quantization_config: {field}",)
    assert e.value.hint


@pytest.mark.parametrize("quant", ["fp8", 5, [], True], ids=repr)
def test_a_section_that_is_none(quant: object) -> None:
    with pytest.raises(ConflictError, match=r"`quantization_config` of config\.json is"):
        of(quant)
    with pytest.raises(ConflictError, match=r"`compression_config` of config\.json is"):
        config_scheme({"text_config": {"compression_config": quant}})


def test_the_group_that_has_weights_counts() -> None:
    made = copy.deepcopy(MADE["tensor compressed-tensors static"])
    made["config_groups"] = {"cache": {"weights": None}, **made["config_groups"]}
    found = of(made).scheme
    assert found is not None
    assert found.static


VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 8, 1.5, 10**30, "", "x", "fp8", "e5m2", "static", "block", "channel", "128x128",
    "NVFP4", [], [1], ["x"],
    [128, 128], [0, 128], ["x", 1], [[]], [None, {}], {}, {"a": 1}, {"group_0": 5}, {"weights": []},
)  # fmt: skip


def mutated(rng: random.Random, quant: dict[str, Any]) -> dict[str, Any]:
    """A copy in which one to three things anywhere are replaced, removed or added."""
    out = copy.deepcopy(quant)
    for _ in range(rng.randint(1, 3)):
        place: Any = out
        while True:
            deeper = [
                v for v in (place.values() if isinstance(place, dict) else place) if v and type(v) in (dict, list)
            ]
            if not deeper or rng.random() < 0.4:
                break
            place = rng.choice(deeper)
        value = copy.deepcopy(rng.choice(VALUES))
        if isinstance(place, list):
            place[rng.randrange(len(place))] = value
        elif rng.random() < 0.2:
            place.pop(rng.choice(list(place)))
        else:
            place[rng.choice([*place, "quant_method", "weight_block_size", "ignore", "config_groups", "format"])] = (
                value
            )
        if not out:
            break
    return out


def test_only_clear_errors() -> None:
    rng = random.Random(20261121)  # noqa: S311 - nothing secret
    names = list(KNOWN)
    read = 0
    start = time.process_time()
    for _ in range(5000):
        quant = mutated(rng, KNOWN[rng.choice(names)])
        try:
            found = of(quant)
        except UsageError:
            pytest.fail(f"a config is not an option: {quant}")
        except (ConflictError, UnsupportedError):
            continue
        read += 1
        assert all(type(x) is str for x in found.ignored)
        assert found.scheme is None or all(type(n) is int and n >= 0 for n in found.scheme.block)
    assert 1000 < read < 4500
    assert time.process_time() - start < 2


# -- options


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"recipe": "nvfp4", "powers": True}, "--scale-dtype pow2: the scales of nvfp4"),
        ({"recipe": "mxfp8", "powers": True}, "--scale-dtype pow2 has no effect with recipe mxfp8"),
        ({"recipe": "mxfp4", "powers": True}, "--scale-dtype pow2 has no effect with recipe mxfp4"),
        ({"recipe": "nvfp4", "code": "e4m3"}, "codes of nvfp4 are F4"),
        ({"recipe": "mxfp4", "code": "f8_e5m2"}, "codes of mxfp4 are F4"),
        ({"recipe": "mxfp8", "code": "bf16"}, "codes of mxfp8 are F8_E4M3 or F8_E5M2"),
        ({"recipe": "block", "code": "xx"}, "--code: unknown dtype `xx`"),
        ({"recipe": "block", "scale_dtype": "xx"}, "--scale-dtype: unknown dtype `xx`"),
        ({"recipe": "nvfp4", "scale_dtype": "xx"}, "--scale-dtype: unknown dtype `xx`"),
        *[({"recipe": r, "edge": e}, "--edge has no effect") for r in ("tensor", "channel") for e in EDGES],
        ({"recipe": "nvfp4", "edge": "ceil"}, "no partly filled groups"),
        ({"recipe": "nvfp4", "edge": "x"}, "--edge is x"),
    ],
    ids=str,
)
def test_options_that_do_nothing(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as e:
        scheme(**options)
    assert words in e.value.what
    assert e.value.hint


def test_powers_of_two_are_what_the_recipe_says() -> None:
    assert scheme("mxfp8").rounding.powers
    assert scheme("mxfp4").rounding.powers
    assert not scheme("nvfp4").rounding.powers
    assert scheme("block", powers=True).rounding.powers
    assert scheme("block", scale_dtype="e8m0").rounding.powers
    assert not scheme("block").rounding.powers


@pytest.mark.parametrize(
    ("entry", "module", "named"),
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "model.lm_head", True),
        ("model.layers.0.self_attn", "model.layers.0.self_attn.q_proj", True),
        ("self_attn.q_proj", "model.layers.0.self_attn.q_proj", True),
        ("layers.0", "model.layers.0.self_attn.q_proj", False),
        ("model.layers.1", "model.layers.11.mlp.up_proj", False),
        ("head", "lm_head", False),
        ("*q_proj", "model.layers.0.self_attn.q_proj", True),
        ("re:.*k_proj", "model.layers.0.self_attn.q_proj", False),
        ("", "lm_head", False),
    ],
)
def test_what_an_entry_of_the_list_names(entry: str, module: str, named: bool) -> None:
    """The module itself, what is inside it, and modules that end so."""
    weight = Weight(f"{module}.weight", "BF16", (8, 8))
    assert (Keep("none", ignored=["mlp.none", entry]).why(weight) == "config") == named
