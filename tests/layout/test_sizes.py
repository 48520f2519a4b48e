"""Sizes of a family: fields and paths of config.json, expressions, and what differs from layer to layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckpttool.errors import LayoutError
from ckpttool.layout.family import Family, load_family
from ckpttool.layout.shapes import check_sizes, declared_tensors


def family_of(tmp_path: Path, sizes: str, config: dict[str, Any], rest: str = "") -> Family:
    """A family file with these sizes."""
    path = tmp_path / "orca.yaml"
    body = "".join(f"  {line}\n" for line in sizes.strip().splitlines())
    path.write_text(f'family: orca\nsizes:\n{body}layers: {{prefix: "b.{{layer}}.", rules: {{}}}}\n{rest}', "utf-8")
    return load_family(str(path), config)


def sizes_of(tmp_path: Path, sizes: str, config: dict[str, Any], rest: str = "") -> dict[str, int]:
    return {name: size.value for name, size in family_of(tmp_path, sizes, config, rest).sizes.items()}


CONFIG = {
    "layers": 2,
    "width": 64,
    "text_config": {"heads": 8, "vision": {"heads": 3}},
    "vision_config": {"heads": 5, "tower": {"heads": 7}, "name": "x"},
    "dotted.name": 9,
    "size": [5, 6],
}


@pytest.mark.parametrize(
    ("size", "value"),
    [
        ("vision_config.heads", 5),
        ("text_config.heads", 8),
        ("vision_config.tower.heads", 7),
        ("vision.heads", 3),
        ("dotted.name", 9),
        ("{expr: 'size[1]'}", 6),
        ("[vision_config.depth, vision_config.heads]", 5),
        ("{from: [vision_config.heads], plus: [vision_config.tower.heads]}", 12),
        ("{from: [vision_config.depth], default: 4}", 4),
        ("{from: [head_dim], default: width // heads}", 8),
        ("{expr: 2 * width}", 128),
        ("{expr: '(width + vision_config.heads) // 2'}", 34),
        ("{expr: 1 if width == 64 and not tie_word_embeddings else 2}", 1),
        ("{expr: expand * width}", 192),
        ("{expr: wide}", 256),
        ("{from: [other], default: len(vision_config.name) + len(size)}", 3),
    ],
)
def test_where_a_size_comes_from(tmp_path: Path, size: str, value: int) -> None:
    rest = "tensors: {defaults: {expand: 3}, names: {wide: 4 * width}}\n"
    assert sizes_of(tmp_path, f"size: {size}", CONFIG, rest) == {"size": value}


def test_sizes_may_stand_in_any_order(tmp_path: Path) -> None:
    """In a file that extends another one its own sizes come first; also one of layers, before the number of layers."""
    sizes = """
outer: {from: [o], default: 2 * inner}
inner: {expr: heads * twice}
heads: {expr: "heads[layer]"}
layers: {expr: blocks - 1}
blocks: n
"""
    config = {"n": 3, "heads": [8, 4], "width": 5}
    assert sizes_of(tmp_path, sizes, config, "tensors: {names: {twice: 2 * wide}, defaults: {wide: width}}\n") == {
        "blocks": 3, "layers": 2,
        "heads[0]": 8, "heads[1]": 4, "inner[0]": 80, "inner[1]": 40, "outer[0]": 160, "outer[1]": 80,
    }  # fmt: skip


def test_an_expression_knows_the_other_sizes(tmp_path: Path) -> None:
    sizes = "heads: {from: [heads], shared: true}\ninner: {expr: heads * width, shared: true}\nouter: {expr: 2 * inner}"
    family = family_of(tmp_path, sizes, CONFIG)
    assert {n: (s.value, s.shared) for n, s in family.sizes.items()} == {
        "heads": (8, True),
        "inner": (512, True),
        "outer": (1024, False),
    }


@pytest.mark.parametrize(
    "size",
    [
        "vision_config.depth",
        "vision_config.name.length",
        "{expr: depth * 2}",
        "{expr: width - 64}",
        "{expr: vision_config.name}",
        "{expr: width == 64}",
        "{from: [vision_config.name], default: 3}",
        "{from: [head_dim], default: width // depth}",
        "{expr: 2 * size}",
    ],
)
def test_a_size_that_the_config_does_not_give_is_left_out(tmp_path: Path, size: str) -> None:
    assert sizes_of(tmp_path, f"size: {size}", CONFIG) == {}


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ("size: {expr: 2 +}", "`2 +`: this is not an expression"),
        ("size: {expr: max(x)}", "`max(x)` is nothing that an expression may hold"),
        ("size: {expr: len(x).y}", "`len(x).y` is nothing that an expression may hold"),
        ("size: {expr: 'x[0 ** 1].y'}", "`0 ** 1` is nothing that an expression may hold"),
        ("size: {expr: len(x ** 2)}", "`x ** 2` is nothing that an expression may hold"),
        ("size: {expr: '[1].real'}", "`[1].real` is nothing that an expression may hold"),
        ("size: {expr: width ** 2}", "`width ** 2` is nothing that an expression may hold"),
        ("size: {expr: 1.5 * width}", "`1.5` is nothing that an expression may hold"),
        ("size: {from: [a], default: width /}", "`width /`: this is not an expression"),
        ("size: {from: [a], expr: width}", "a size comes `from` fields of config.json or is an `expr`"),
        ("size: {shared: true}", "a size comes `from` fields of config.json or is an `expr`"),
        ("size: {expr: width, default: 3}", "a size that is an `expr` says all in it"),
        ("size: {expr: other}\nother: {expr: 2 * size}", "the size `size` is explained by itself"),
        ("size: {expr: width is 3}", "`width is 3` is nothing that an expression may hold"),
        (
            "size: {from: [a], default: b}\nb: {from: [c], default: d}\nd: {expr: size + b}",
            "is explained by itself",
        ),
    ],
)
def test_a_wrong_size_is_refused_at_once(tmp_path: Path, sizes: str, says: str) -> None:
    with pytest.raises(LayoutError) as e:
        family_of(tmp_path, sizes, CONFIG)
    assert says in e.value.what
    assert "orca.yaml" in str(e.value.where)


@pytest.mark.parametrize(
    ("size", "says"),
    [
        ("vision_config.name", '`vision_config.name` of config.json is "x", not a whole number'),
        ("{expr: 2 * vision_config.name}", "`vision_config.name` is 'x', not a whole number"),
        ("{expr: vision_config.name}", "comes to 'x', which is not a size"),
        ("vision_config.depth", ""),
        ("{expr: depth * 2}", ""),
        ("{expr: layer + depth}", ""),
    ],
)
def test_what_contradicts_a_size_is_said_where_sizes_must_be_right(tmp_path: Path, size: str, says: str) -> None:
    family = family_of(tmp_path, f"size: {size}", CONFIG)
    if not says:
        check_sizes(family, CONFIG)
        return
    with pytest.raises(LayoutError) as e:
        check_sizes(family, CONFIG)
    assert says in e.value.what
    assert e.value.where[0] == "orca.yaml: sizes: size"


def test_a_size_for_each_layer(tmp_path: Path) -> None:
    """A list of config.json, a kind of layer, and what follows from such sizes; the last layer predicts tokens."""
    config = {"n": 3, "heads": [8, 4, None, 2], "kinds": ["full", "linear", "full", "full"], "kv": 2, "extra": 1}
    sizes = """
layers: n
heads: {expr: "heads[layer]"}
kv_heads: {expr: "kv if kinds[layer] == 'full' else heads", shared: true}
inner: {from: [inner], default: 2 * heads}
same: {expr: kv if n == 3 else layer}
"""
    found = sizes_of(tmp_path, sizes, config, "tensors: {mtp: extra, count: layers + mtp}\n")
    assert found == {
        "layers": 3,
        "heads[0]": 8, "heads[1]": 4, "heads[3]": 2,
        "kv_heads[0]": 2, "kv_heads[1]": 4, "kv_heads[2]": 2, "kv_heads[3]": 2,
        "inner[0]": 16, "inner[1]": 8, "inner[3]": 4,
        "same": 2,
    }  # fmt: skip


EXCEPTIONS = {
    "n": 3,
    "width": 8,
    "text_config": {
        "kv": 4,
        "head": 2,
        "per_layer_config": {
            "01": {"kv": 1, "head": 6}, "2": {"head": None}, "x": {"width": 3}, "9" * 5000: {"width": 3},
        },
    },
}  # fmt: skip


def test_fields_that_are_something_else_in_some_layers(tmp_path: Path) -> None:
    """transformers 5 writes such exceptions for models of all kinds."""
    sizes = """
layers: n
kv: {from: [kv], shared: true}
width: width
head: {from: [head], default: 3}
wide: {expr: kv * head}
"""
    assert sizes_of(tmp_path, sizes, EXCEPTIONS) == {
        "layers": 3, "width": 8,
        "kv[0]": 4, "kv[1]": 1, "kv[2]": 4,
        "head[0]": 2, "head[1]": 6, "head[2]": 2,
        "wide[0]": 8, "wide[1]": 6, "wide[2]": 8,
    }  # fmt: skip
    tensors = "tensors:\n  first: {e: [width]}\n  layers: {w: [kv, wide * head]}\n"
    family = family_of(tmp_path, sizes, EXCEPTIONS, tensors)
    assert [t.shape for t in declared_tensors(family, EXCEPTIONS)] == [(8,), (4, 16), (1, 36), (4, 16)]
    check_sizes(family, EXCEPTIONS)


def test_sizes_of_layers_that_are_parts_of_a_list(tmp_path: Path) -> None:
    """DeciLM: a layer without attention has no heads, and is not asked for them."""
    config = {"n": 3, "heads": 8, "blocks": [{"a": {"of": 4}}, {"a": {"of": None}}, {"a": {"of": 2}}]}
    sizes = "layers: n\nheads: heads\nkv: {expr: 'heads // blocks[layer].a.of', shared: true}"
    assert sizes_of(tmp_path, sizes, config) == {"layers": 3, "heads": 8, "kv[0]": 2, "kv[2]": 4}


def test_what_differs_from_layer_to_layer_is_not_known_outside_of_layers(tmp_path: Path) -> None:
    family = family_of(tmp_path, "layers: n", EXCEPTIONS, "tensors: {last: {e: [head]}}\n")
    with pytest.raises(LayoutError, match="`head` differs from layer to layer, and has a meaning only in `layers`"):
        declared_tensors(family, EXCEPTIONS)


def test_layers_that_lack_modules_are_not_declared(tmp_path: Path) -> None:
    config = {"n": 2, "per_layer_config": {"1": {"skip": ["attention"]}}}
    family = family_of(tmp_path, "layers: n", config, "tensors: {layers: {w: [1]}}\n")
    with pytest.raises(LayoutError, match="some layers of the model lack modules"):
        declared_tensors(family, config)
