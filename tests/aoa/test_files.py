"""Files of AOA text: lines, JSON, and texts that are turned round."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.aoa import Statement, apply_aoa, invert, parse_aoa, parse_statement, read_aoa
from ckpttool.errors import UnsupportedError, UsageError
from tests.helpers.aoa import Array, count, table, values

LINES = ["a^T -> b", "c, d -> e, axis=0"]


def texts(statements: list[Statement]) -> list[str]:
    return [str(s) for s in statements]


@pytest.mark.parametrize(
    "content",
    [
        "\n".join(LINES),
        "\ufeff# rules\n\n  a^T -> b   # transposed\r\n\tc, d -> e, axis=0\r\n",
        json.dumps(LINES),
        json.dumps(["a^T -> b \n", "c, d -> e ,axis = 0"]),
        json.dumps(["a^T -> b\nc, d -> e, axis=0"]),
        json.dumps({"aoa_statements": LINES}),
        json.dumps({"aoa_statements": LINES, "aoa_config_reverse": False, "enable_traceback": True}),
        json.dumps({"aoa_config": {"aoa_statements": LINES}}),
    ],
)
def test_forms(tmp_path: Path, content: str) -> None:
    path = tmp_path / "rules"
    path.write_bytes(content.encode())
    assert texts(read_aoa(path)) == LINES


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("", "has no statement"),
        ("# nothing\n", "has no statement"),
        ("[]", "has no statement"),
        ('["a -> b", ""]', "an empty string is not a statement"),
        ('["a -> b", 1]', "a statement must be a string"),
        ('["a -> b",]', "this is not JSON"),
        ('{"aoa_statement": []}', "`aoa_statement` is not a key of an AOA config"),
        ('{"aoa_config_reverse": true}', "has no `aoa_statements`"),
        ('{"aoa_statements": "a -> b"}', "must be a list of strings"),
        ('{"aoa_statements": ["a -> b"], "aoa_config_reverse": 1}', "must be true or false"),
        ('{"aoa_statements": ["a -> b"], "aoa_statements": ["c -> d"]}', "a key is given twice"),
        ("[" * 100_000, "this is not JSON"),
    ],
)
def test_refused_forms(content: str, what: str) -> None:
    with pytest.raises(UsageError, match="rules") as e:
        parse_aoa(content, "rules.json")
    assert what in e.value.what


def test_unreadable(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_aoa(tmp_path / "none")
    (tmp_path / "bytes").write_bytes(b"a -> \xff")
    with pytest.raises(UsageError, match="not UTF-8"):
        read_aoa(tmp_path / "bytes")


def reverse(*statements: str) -> list[Statement]:
    return parse_aoa(json.dumps({"aoa_statements": statements, "aoa_config_reverse": True}))


def test_reverse_runs_backwards() -> None:
    got = reverse("a^T -> b", "b, c -> d, axis=0", "e -> t[0:2], axis=1", "_ -> extra")
    assert texts(got) == ["extra -> _", "t_0, t_1 -> e, axis=1", "d -> b, c, axis=0", "b -> a^T"]
    assert texts(invert(got[1:])) == ["a^T -> b", "b, c -> d, axis=0", "e -> t_0, t_1, axis=1"]


@pytest.mark.parametrize(
    ("statements", "what"),
    [
        (["a -> _"], "what `a` held is dropped"),
        (["a -> b, dtype='float32'"], "does not say what the dtype was before"),
        (["e.*.w -> b, axis=0"], "how many names \\* stands for"),
        (["a -> b", "a -> c"], "`a` is also read by `a -> b`"),
        (["a -> a", "a -> tied"], "`a` is also read by `a -> a`"),
        (["a, a -> c, axis=0"], "also read by"),
    ],
)
def test_no_way_back(statements: list[str], what: str) -> None:
    with pytest.raises(UnsupportedError, match=f"cannot be turned round: .*{what}") as e:
        reverse("x -> y", *statements)
    assert e.value.where[0] == f"<text>, statement {len(statements) + 1}"


def test_errors_of_turned_statements_show_both_forms() -> None:
    with pytest.raises(UsageError) as e:
        apply_aoa(table({"a": count(2, 2)}), reverse("a^T -> b"))
    assert e.value.where == ("<text>, statement 1", "a^T -> b", "turned round: b -> a^T")


SHAPES = {"a": (4, 6), "b": (4, 6), "q": (3, 8), "k": (3, 4), "v": (3, 4), "x": (2, 3, 4), "f": (3, 8)}
SHAPES |= {f"l.{i}.{n}": (4, 6) for i in (0, 1, 2) for n in ("g", "u")} | {f"m.{i}": (2,) for i in (1, 2)}

# Each uses names of its own, so that any choice of them in any order is a text.
INVERTIBLE = [
    "a, b -> ab, axis=0",
    "q, k, v -> qkv, fused_qkv, num_heads=4, num_key_value_groups=2",
    "x -> y, permute='[2,0,1]'",
    "f -> f, fused_ffn",
    "l.$LAYER_ID.g^T, l.$LAYER_ID.u^T -> l.$LAYER_ID.gu, fused_ffn",
    "m.$LAYER_ID_OFFSET -> m.$LAYER_ID_OFFSET",
]
MORE = {
    "a, b -> ab, axis=0": [
        "ab^T -> ab",
        "ab -> part[0:4], axis=0",
        "ab -> ab, src_dtype='float32', dst_dtype='float16'",
    ],
    "q, k, v -> qkv, fused_qkv, num_heads=4, num_key_value_groups=2": ["qkv^T -> z", "qkv -> qkv, fused_ffn"],
    "x -> y, permute='[2,0,1]'": ["y^T -> y", "y -> y0, y1, axis=1"],
    "l.$LAYER_ID.g^T, l.$LAYER_ID.u^T -> l.$LAYER_ID.gu, fused_ffn": ["l.$LAYER_ID.gu -> l.$LAYER_ID.w"],
}


@st.composite
def programs(draw: st.DrawFn) -> list[str]:
    out = []
    for text in draw(st.lists(st.sampled_from(INVERTIBLE), unique=True, min_size=1)):
        out.append(text)
        more = draw(st.sampled_from([None, *MORE.get(text, [])]))
        if more:
            out.append(more)
    return out


@given(programs())
def test_there_and_back(program: list[str]) -> None:
    source = {n: count(*s, start=100 * i) for i, (n, s) in enumerate(SHAPES.items())}
    views = apply_aoa(table(source), parse_aoa(json.dumps(program)))
    middle = values(views, source)
    kinds = {v.name: v.dtype for v in views}
    turned = apply_aoa(table(middle, kinds), reverse(*program))
    got = values(turned, middle)
    assert sorted(got) == sorted(source)
    assert all(v.dtype == "F32" for v in turned)
    for name, expected in source.items():
        assert np.array_equal(got[name], expected), name


@given(programs())
def test_no_element_is_lost(program: list[str]) -> None:
    """The elements of all outputs are those of all sources."""
    source: dict[str, Array] = {}
    start = 0
    for name, shape in SHAPES.items():
        source[name] = count(*shape, start=start)
        start += source[name].size
    views = apply_aoa(table(source), parse_aoa(json.dumps(program)))
    every = np.concatenate([a.ravel() for a in values(views, source).values()])
    assert sorted(every.tolist()) == sorted(np.concatenate([a.ravel() for a in source.values()]).tolist())


@given(st.text(alphabet="ab.$_*^T[]:=,->0123'\" axisduFfnLAYERID", max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    got: list[Statement] = []
    with contextlib.suppress(UsageError, UnsupportedError):
        got = parse_aoa(text)
    for s in got:
        assert str(parse_statement(str(s))) == str(s)
