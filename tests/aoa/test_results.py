"""What AOA text makes of tensors: one test for each kind of statement, with the exact elements."""

from __future__ import annotations

import numpy as np
import pytest

from ckpttool.aoa import apply_aoa, parse_aoa
from tests.helpers.aoa import Array, count, run, table, value, values

A = count(2, 2)
B = count(2, 2, start=1000)
AB = {"a": A, "b": B}
ROW = {"ffn": count(1, 8)}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a -> c", {"c": A, "b": B}),
        ("a -> c\na -> d", {"c": A, "d": A, "b": B}),
        ("a -> a\na -> tied", {"a": A, "tied": A, "b": B}),
        ("a -> tied\na -> a", {"a": A, "tied": A, "b": B}),
        ("a -> _", {"b": B}),
        ("a -> c\na -> _", {"c": A, "b": B}),
        ("a -> _\nb -> a", {"a": B}),
        ("a, b -> c, axis=0", {"c": np.concatenate([A, B], 0)}),
        ("a, b -> c, axis=1", {"c": np.concatenate([A, B], 1)}),
        ("a, a -> c, axis=0", {"c": np.concatenate([A, A], 0), "b": B}),
        ("a -> c, d, axis=1", {"c": A[:, :1], "d": A[:, 1:], "b": B}),
        ("a -> c, d, axis=0", {"c": A[:1], "d": A[1:], "b": B}),
        ("a^T -> c", {"c": A.T, "b": B}),
        ("a^T -> a", {"a": A.T, "b": B}),
        ("a^T, b -> c, axis=0", {"c": np.concatenate([A.T, B], 0)}),
        ('a -> c, permute="[1,0]"', {"c": A.T, "b": B}),
        ("a -> c, permute='[]'", {"c": A.T, "b": B}),
        ("a -> t[0:2], axis=1", {"t_0": A[:, :1], "t_1": A[:, 1:], "b": B}),
        ("a -> t[3:5], axis=1\nt[3:5] -> c, axis=0", {"c": A.T.reshape(4, 1), "b": B}),
        ("a -> t[0:1], axis=1", {"t_0": A, "b": B}),
        # A name of one's own is not written once it is used.
        ("a -> mine\nmine, b -> c, axis=0", {"c": np.concatenate([A, B], 0)}),
        ("a -> mine\nmine -> c\nb -> mine\nmine^T -> d", {"c": A, "d": B.T}),
    ],
)
def test_examples(text: str, expected: dict[str, Array]) -> None:
    assert run(text, AB) == {k: v.tolist() for k, v in expected.items()}


def test_three_axes() -> None:
    x = {"x": count(2, 3, 4), "v": count(5)}
    assert run('x -> y, permute="[2,0,1]"', x)["y"] == x["x"].transpose(2, 0, 1).tolist()
    got = run("x^T -> y\nv^T -> w", x)
    assert got == {"y": x["x"].T.tolist(), "w": x["v"].tolist()}


def test_fused_ffn() -> None:
    assert run("ffn -> ffn, fused_ffn", ROW) == {"ffn": [[0, 1, 2, 3, 4, 5, 6, 7]]}
    assert run("ffn -> gate, up, fused_ffn", ROW) == {"gate": [[0, 1, 2, 3]], "up": [[4, 5, 6, 7]]}
    parts = {"gate": count(1, 4), "up": count(1, 4, start=100)}
    assert run("gate, up -> ffn, fused_ffn", parts) == {"ffn": [[0, 1, 2, 3, 100, 101, 102, 103]]}
    assert run("gate, up -> ffn, axis=0, fused_ffn", parts) == {"ffn": [[0, 1, 2, 3], [100, 101, 102, 103]]}


HEADS = {"q": count(1, 4), "k": count(1, 2, start=100), "v": count(1, 2, start=200)}
GROUPED = [[0, 1, 100, 200, 2, 3, 101, 201]]


def test_fused_qkv() -> None:
    text = "q, k, v -> qkv, fused_qkv, num_heads=4, num_key_value_groups=2"
    assert run(text, HEADS) == {"qkv": GROUPED}
    back = "qkv -> q, k, v, fused_qkv, num_heads = 4, num_key_value_groups=2"
    assert run(back, {"qkv": np.array(GROUPED)}) == {k: v.tolist() for k, v in HEADS.items()}
    bias = {k: v[0] for k, v in HEADS.items()}
    assert run(text + ", axis=0", bias) == {"qkv": GROUPED[0]}


def test_fused_qkv_of_wider_heads() -> None:
    wide = {"q": count(3, 8), "k": count(3, 4, start=100), "v": count(3, 4, start=200)}
    got = run("q, k, v -> x, fused_qkv, num_heads=4, num_key_value_groups=2", wide)["x"]
    q, k, v = wide.values()
    groups = [
        part for g in (0, 1) for part in (q[:, 4 * g : 4 * g + 4], k[:, 2 * g : 2 * g + 2], v[:, 2 * g : 2 * g + 2])
    ]
    assert got == np.concatenate(groups, 1).tolist()


def test_fused_qkv_old() -> None:
    sizes = "fused_qkv_old, num_heads=4, num_key_value_groups=2"
    x = {"x": np.array([[0, 1, 2, 3, 100, 101, 200, 201]])}
    assert run(f"x -> x, {sizes}", x) == {"x": x["x"].tolist()}
    assert run(f"x -> q, k, v, {sizes}", x) == {k: v.tolist() for k, v in HEADS.items()}
    assert run(f"q, k, v -> x, {sizes}", HEADS) == {"x": x["x"].tolist()}


def test_placeholder_finds_its_numbers_in_the_names() -> None:
    x = {f"x.{i}.w": count(2, 3, start=10 * i) for i in (0, 2, 10)}
    got = run("x.$LAYER_ID.w^T -> y.$LAYER_ID.w", x)
    assert got == {f"y.{i}.w": x[f"x.{i}.w"].T.tolist() for i in (0, 2, 10)}


def test_placeholders_are_found_together() -> None:
    """Ragged experts: Paddle asks for every combination and finds `l.1.e.1.w` missing."""
    names = ["l.0.e.0", "l.0.e.1", "l.1.e.0", "l.2.e.3"]
    x = {f"{n}.{part}": count(1, 2, start=i) for i, n in enumerate(names) for part in ("gate", "up")}
    text = "l.$LAYER_ID.e.$EXPERT_ID.gate, l.$LAYER_ID.e.$EXPERT_ID.up -> l.$LAYER_ID.e.$EXPERT_ID.ffn, axis=1"
    got = run(text, x)
    assert got == {f"{n}.ffn": [[i, i + 1, i, i + 1]] for i, n in enumerate(names)}


def test_placeholder_in_a_drop() -> None:
    """Paddle asks for the placeholder in `_` too."""
    x = {"l.0.rope": A, "l.1.rope": A, "w": B}
    assert list(run("l.$LAYER_ID.rope -> _", x)) == ["w"]


def test_placeholder_finds_what_statements_made() -> None:
    """Paddle looks for numbers in the names of the source only."""
    x = {"l.0.x": A, "l.1.x": B}
    got = run("l.$LAYER_ID.x -> t.$LAYER_ID\nt.$LAYER_ID^T -> l.$LAYER_ID.y", x)
    assert got == {"l.0.y": A.T.tolist(), "l.1.y": B.T.tolist()}


def test_layer_offset() -> None:
    x = {f"l.{i}.w": count(1, 1, start=i) for i in (1, 2, 3)}
    assert run("l.$LAYER_ID_OFFSET.w -> l.$LAYER_ID_OFFSET.w", x) == {f"l.{i}.w": [[i + 1]] for i in (0, 1, 2)}
    x["l.0.w"] = count(1, 1)
    text = "l.0.w -> embed\nl.0.w -> _\nl.$LAYER_ID_OFFSET.w^T -> l.$LAYER_ID_OFFSET.w"
    assert run(text, x) == {"embed": [[0]]} | {f"l.{i}.w": [[i + 1]] for i in (0, 1, 2)}


def test_star_is_in_numeric_order() -> None:
    x = {f"e.{i}.w": count(1, 2, start=10 * i) for i in (10, 2, 1, 0, 3, 4, 5, 6, 7, 8, 9)}
    assert run("e.*.w -> all, axis=0", x) == {"all": [[10 * i, 10 * i + 1] for i in range(11)]}
    assert run("e.*.w^T -> all, axis=1", x)["all"][1] == [10 * i + 1 for i in range(11)]
    assert run("e.*.w -> all, axis=0", {"e.0.w": A}) == {"all": A.tolist()}


@pytest.mark.parametrize("how", ["dtype='bfloat16'", "src_dtype='float32', dst_dtype='bfloat16'"])
def test_cast(how: str) -> None:
    out = apply_aoa(table(AB), parse_aoa(f"a^T -> c, {how}"))
    view = out.table["c"]
    assert (view.dtype, view.same) == ("BF16", None)
    assert {p.source.dtype for p in view.parts} == {"F32"}
    assert value(view, AB).tolist() == A.T.tolist()
    assert out.table["b"].same is not None


def test_cast_to_what_it_is_changes_nothing() -> None:
    assert apply_aoa(table(AB), parse_aoa("a -> a, dtype='float32'")).table["a"].same is not None


def test_cast_by_way_of_float32_is_one_cast() -> None:
    out = apply_aoa(table(AB, "BF16"), parse_aoa("a -> c, dtype='float32'\nc -> d, dtype='bfloat16'"))
    assert out.table["d"].dtype == "BF16"


def test_what_no_statement_names_passes_through_in_place() -> None:
    x = {n: count(2, 2) for n in ("first", "q", "middle", "k", "last")}
    out = apply_aoa(table(x), parse_aoa("k, q -> kq, axis=0\nlast -> z"))
    assert list(out.table) == ["first", "kq", "middle", "z"]
    assert out.table["middle"].same is not None
    assert out.notes == []


def test_drops_are_noted() -> None:
    out = apply_aoa(table(AB), parse_aoa("a -> _\nb -> _"))
    assert out.notes == ["2 tensors are dropped by the AOA text (32 bytes): a, ..."]


def test_long_tables_are_fast_enough() -> None:
    """A statement looks at names that differ from its own in numbers only."""
    x = {f"model.layers.{i}.mlp.experts.{e}.{p}.weight": A for i in range(5) for e in range(64) for p in ("gate", "up")}
    layer = "model.layers.$LAYER_ID.mlp.experts.$EXPERT_ID"
    out = apply_aoa(table(x), parse_aoa(f"{layer}.gate.weight^T, {layer}.up.weight^T -> {layer}.ffn.weight, fused_ffn"))
    assert len(out) == 5 * 64
    some = "model.layers.4.mlp.experts.63.ffn.weight"
    assert values(type(out)({some: out.table[some]}), x)[some].tolist() == np.concatenate([A.T, A.T], 1).tolist()
