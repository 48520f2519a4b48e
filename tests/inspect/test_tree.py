"""Names with numbers collapsed say exactly which tensors there are."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.core.tensor_names import fold, natural_order, templates
from ckpttool.core.words import ranges
from ckpttool.ops.inspect.listing import TensorRow
from ckpttool.ops.inspect.tree import TreeNode, collapse, lines


def rows(*names: str, shape: tuple[int, ...] = (2,)) -> list[TensorRow]:
    return [TensorRow(n, "F32", shape, 4 * prod(shape), 0, 0, 1) for n in names]


def leaves(root: TreeNode) -> list[str]:
    return [line.name for line in lines(root) if line.node.dtype]


def expand(name: str) -> list[str]:
    """All names that a collapsed name stands for."""
    parts: list[list[str]] = []
    while "{" in name:
        head, _, rest = name.partition("{")
        inside, _, name = rest.partition("}")
        numbers: list[str] = []
        for item in inside.split(","):
            first, _, last = item.partition("..")
            numbers += map(str, range(int(first), int(last or first) + 1))
        parts += [[head], numbers]
    return ["".join(p) for p in product(*parts, [name])]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a.0.w", "a.1.w", "a.2.w"], ["a.{0..2}.w"]),
        (["a.0.w", "a.2.w", "a.3.w", "a.7.w"], ["a.{0,2..3,7}.w"]),
        (["a.0.w"], ["a.0.w"]),
        (["a.0.w", "a.1.w", "a.1.b"], ["a.0.w", "a.1.b", "a.1.w"]),
        (["a.0.x.0.w", "a.0.x.1.w", "a.1.x.0.w", "a.1.x.1.w"], ["a.{0..1}.x.{0..1}.w"]),
        (["a.0.x.0.w", "a.0.x.1.w", "a.1.x.0.w"], ["a.0.x.{0..1}.w", "a.1.x.0.w"]),
        (["0.w", "1.w"], ["{0..1}.w"]),
        (["a.0.1", "a.0.2", "a.1.1", "a.1.2"], ["a.{0..1}.{1..2}"]),
        (["a.0", "a.1", "a"], ["a", "a.{0..1}"]),
        (["w1.x", "w2.x"], ["w1.x", "w2.x"]),
        (["a.01.w", "a.1.w"], ["a.1.w", "a.01.w"]),
        (["a.2.w", "a.10.w", "b.w"], ["a.{2,10}.w", "b.w"]),
        (["a.0.1.w", "a.0.2.w", "a.3.4.w"], ["a.0.{1..2}.w", "a.3.4.w"]),
        ([], []),
    ],
)
def test_collapses(names: list[str], expected: list[str]) -> None:
    assert leaves(collapse(rows(*names))) == expected


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a.1.w", "b", "a.0.w"], {"a.{0..1}.w": [0, 2], "b": [1]}),
        (["a.0.x.0", "a.0.x.1", "a.1.x.0", "a.1.x.1"], {"a.{0..1}.x.{0..1}": [0, 1, 2, 3]}),
        (["a.0.x.0", "a.0.x.1", "a.1.x.0"], {"a.0.x.{0..1}": [0, 1], "a.1.x.0": [2]}),
        ([], {}),
    ],
)
def test_folded_names_stand_for_every_combination(names: list[str], expected: dict[str, list[int]]) -> None:
    assert {name: sorted(places) for name, places in fold(names)} == expected


def test_what_differs_is_not_collapsed() -> None:
    mixed = [*rows("a.0.w", "a.1.w"), *rows("a.2.w", shape=(3,)), TensorRow("a.3.w", "BF16", (2,), 4, 0, 0, 1)]
    assert leaves(collapse(mixed)) == ["a.{0..1}.w", "a.2.w", "a.3.w"]


def test_order_of_the_tensors_does_not_matter() -> None:
    names = ["a.0.w", "a.0.b", "a.1.b", "a.1.w", "c"]
    assert (
        leaves(collapse(rows(*names))) == leaves(collapse(rows(*reversed(names)))) == ["a.{0..1}.b", "a.{0..1}.w", "c"]
    )


def test_names_that_would_break_lines_are_escaped() -> None:
    assert leaves(collapse(rows("a\n.0.w", "a\n.1.w", "b\x00"))) == ["a\\n.{0..1}.w", "b\\x00"]


COMPONENT = st.sampled_from(["a", "b", "w", "0", "1", "2", "10", "00", "w1"])
NAMES = st.lists(st.lists(COMPONENT, min_size=1, max_size=5).map(".".join), unique=True, max_size=14)


@given(NAMES, st.data())
def test_every_tensor_is_in_exactly_one_line(names: list[str], data: st.DataObject) -> None:
    """Expanding the lines gives the names back, and the sums are those of the rows."""
    shapes = [data.draw(st.sampled_from([(2,), (3, 1), ()])) for _ in names]
    given_rows = [TensorRow(n, "F32", s, 4 * prod(s), 0, 0, 1) for n, s in zip(names, shapes, strict=True)]
    root = collapse(given_rows)
    found = [(name, line.node.shape) for line in lines(root) if line.node.dtype for name in expand(line.name)]
    assert sorted(found) == sorted(zip(names, shapes, strict=True))
    assert (root.count, root.nbytes) == (len(names), sum(r.nbytes for r in given_rows))
    assert root.elements == sum(prod(s) for s in shapes)
    for line in lines(root):
        below = {n for n in names if any(n == e or n.startswith(e + ".") for e in expand(line.name))}
        if line.node.dtype:
            assert line.times * line.node.count == len(expand(line.name))
        else:
            assert line.times * line.node.count <= len(below)


def test_depth_cuts_the_tree() -> None:
    root = collapse(rows("a.0.x.w", "a.1.x.w", "a.0.x.b", "a.1.x.b", "c"))
    assert [(line.name, line.times * line.node.count) for line in lines(root, 1)] == [("a.{0..1}.x", 4), ("c", 1)]


def test_ranges() -> None:
    assert ranges([]) == ""
    assert ranges([3, 1, 2, 9, 5, 6]) == "1..3,5..6,9"


def test_templates_keep_leading_zeros_and_inner_digits() -> None:
    assert templates(["a.0.w2.12", "x.007"]) == [("a.\0.w2.\0", (0, 12)), ("x.007", ())]


@given(NAMES)
def test_natural_order_is_an_order_by_components(names: list[str]) -> None:
    assert sorted(natural_order(names)) == list(range(len(names)))


def test_natural_order_puts_2_before_10() -> None:
    names = ["a.10.w", "a.2.w", "a.2.b", "b10", "b9"]
    assert [names[i] for i in natural_order(names)] == ["a.2.b", "a.2.w", "a.10.w", "b9", "b10"]
