"""What AOA text is refused for: above all, everything that Paddle does without a word."""

from __future__ import annotations

import re

import pytest

from ckpttool.aoa import apply_aoa, parse_aoa
from ckpttool.errors import CkptError, ConflictError, IncompleteError, LayoutError, UnsupportedError, UsageError
from ckpttool.layout.rules import CutSize
from tests.helpers.aoa import Array, count, run, table

SOURCES: dict[str, Array] = {
    "a": count(2, 2),
    "b": count(2, 2),
    "wide": count(2, 3),
    "v": count(6),
    "l.0.w": count(2, 2),
    "l.1.w": count(2, 2),
    "l.1.u": count(2, 2),
    "e.0.w": count(2, 2),
    "e.1.w": count(2, 2),
    "e.3.w": count(2, 2),
    "l.0.e.0.w": count(2, 2),
}


def refusal(text: str, sources: dict[str, Array] = SOURCES) -> CkptError:
    try:
        run(text, sources)
    except CkptError as error:
        return error
    raise AssertionError(f"{text} is not refused")


# What Paddle does with each is said beside it.
SILENT = [
    # placeholder, * or name that matches nothing: the statement vanishes
    ("x.$LAYER_ID.w -> y.$LAYER_ID.w", UsageError, "no tensor matches `x.$LAYER_ID.w`"),
    ("x.*.w -> y, axis=0", UsageError, "no tensor matches `x.*.w`"),
    ("nope -> _", UsageError, "there is no tensor `nope`"),
    ("nope -> c", UsageError, "there is no tensor `nope`"),
    # the regular expression escapes *: the statement vanishes
    ("l.$LAYER_ID.e.*.w -> l.$LAYER_ID.all, axis=0", UsageError, "drops the statement"),
    # a tensor of the first one's shape, with wrong rows
    ("a, wide -> c, axis=0", LayoutError, "`a` [2, 2] and `wide` [2, 3] differ besides axis 0"),
    ("a, v -> c, axis=0", LayoutError, "cannot be joined"),
    # the last one wins
    ("a -> c\nb -> c", ConflictError, "two tensors would be named `c`: `a -> c` already makes it"),
    ("a -> c\nb -> c, dtype='float16'", ConflictError, "two tensors would be named `c`"),
    ("a -> b", ConflictError, "the source has a tensor of this name"),
    ("a -> a\nb -> a", ConflictError, "`a -> a` keeps the tensor"),
    ("l.$LAYER_ID.w -> b.$LAYER_ID\na -> b.1", ConflictError, "two tensors would be named `b.1`"),
    ("a -> b\nb -> a", ConflictError, "two tensors would be named `b`"),
    # no order among drops and reads
    ("a -> _\na -> c", ConflictError, "`a` is read after it was dropped"),
    ("a -> a\na -> _", ConflictError, "is kept by `a -> a` and dropped here"),
    # what is there is joined, and the result is shorter
    ("e.*.w -> all, axis=0", IncompleteError, "matches 3 tensors, and `e.2.w` is not among them"),
    # name[a:b] of nothing
    ("a -> t[2:2], axis=0", UsageError, "stands for no name"),
    # taken for a name
    ("a -> _, c, axis=0", UsageError, "`_` must stand alone"),
    ("a, _ -> c, axis=0", UsageError, "`_` must stand alone"),
    # axis without effect
    ("a -> c, axis=0", UsageError, "`axis` has no effect"),
    # attributes without effect
    ("a -> c, num_heads=4", UsageError, "`num_heads` belongs to fused_qkv"),
    ("a -> b.0, b.1, fused_ffn, num_heads=4", UsageError, "`num_heads` belongs to fused_qkv"),
    ("a -> _, axis=0", UsageError, "a statement with `_` has no attributes"),
]


def test_silent_in_paddle() -> None:
    for text, error, what in SILENT:
        got = refusal(text)
        assert type(got) is error, text
        assert what in got.what, text
        assert got.where[0].startswith("<text>:"), text


ODD = [
    # an exception of Python, or an assertion, in Paddle
    ("a, b -> c, axis=3", LayoutError, "`a` [2, 2] has no axis 3"),
    ("v -> c, d, axis=1", LayoutError, "`v` [6] has no axis 1"),
    ("v -> v, fused_ffn", LayoutError, "`v` [6] has no axis 1, which fused_ffn takes where none is said"),
    ("a, b -> c, axis=-1", UsageError, "cannot be negative"),
    ("wide -> c, d, axis=1", LayoutError, "does not divide into 2 equal parts on axis 1"),
    ("wide -> wide, fused_ffn", LayoutError, "which 1 ranks cannot share as gate and up"),
    ("a, wide -> c, fused_ffn", LayoutError, "fused_ffn joins two equal halves"),
    ("a, b, wide -> c, fused_qkv, num_heads=2, num_key_value_groups=1", LayoutError, "heads of one size"),
    ("a, b -> c", UsageError, "need `axis=`"),
    ("a -> c, d", UsageError, "need `axis=`"),
    ("a, b -> c, d, axis=0", UsageError, "2 sources and 2 targets"),
    ("e.*.w -> c, d, axis=0", UsageError, "several sources and 2 targets"),
    ("a -> c, c, axis=0", UsageError, "`c` is a target twice"),
    ("a -> b^T", UsageError, "`b^T` cannot be a target"),
    ("_ -> c", UnsupportedError, "`c` would need a value"),
    ("_ -> _", UsageError, "says nothing"),
    ("l.$LAYER_ID.w -> c", UsageError, "`c` lacks $LAYER_ID"),
    ("l.$LAYER_ID.w, l.$LAYER_ID.u -> l.$LAYER_ID.x, axis=0", IncompleteError, "no `l.0.u` beside `l.0.w`"),
    ("l.$LAYER_ID_OFFSET.w -> l.$LAYER_ID_OFFSET.w", LayoutError, "`l.0.w` would become layer -1"),
    ("l.$LAYER_ID.w -> l.$LAYER_ID_OFFSET.w", UsageError, "cannot stand in one statement"),
    ("l.$LAYER.w -> c", UsageError, "`$LAYER` is not a placeholder"),
    ("a -> e.*.x, axis=0", UnsupportedError, "nothing says how many targets * stands for"),
    ("e.*.*.w -> c, axis=0", UsageError, "has two *"),
    ("e.*.w -> _", UsageError, "* stands for the sources of a join"),
    ("a -> c, permute='[0,2]'", UsageError, "not an order of axes"),
    ("a -> c, permute='[2,1,0]'", LayoutError, "has 2 axes, and permute names 3"),
    ("a -> c, permute='[1,0]', dtype='float16'", UsageError, "cannot be combined"),
    ("a, b -> c, axis=0, dtype='float16'", UsageError, "cannot be combined"),
    ("a -> c, fused_ffn, dtype='float16'", UsageError, "cannot be combined"),
    ("a -> c, dtype='float8_e4m3fn'", UnsupportedError, "cannot cast to or from `float8_e4m3fn`"),
    ("a -> c, dtype='int32'", UnsupportedError, "cannot cast to or from `int32`"),
    ("a -> c, dst_dtype='float16'", UsageError, "a cast says `dtype`, or `src_dtype` and `dst_dtype`"),
    ("a -> c, src_dtype='bfloat16', dst_dtype='float16'", ConflictError, "`a` is F32, and src_dtype says bfloat16"),
    ("a -> c, dtype='float16'\nc -> d, dtype='float32'", UnsupportedError, "cannot be cast again to F32"),
    ("a -> c, dtype='float16'\nc, b -> d, axis=0", ConflictError, "`c` is F16 and `b` is F32"),
    ("a -> c, fused_qkv, num_heads=2, num_key_value_groups=1", UsageError, "fused_qkv cannot join 1 and 1 names"),
    ("a, b, v -> c, fused_ffn", UsageError, "its forms are"),
    ("e.*.w -> c, fused_ffn", UsageError, "fused_ffn cannot join"),
    ("a, b, v -> c, fused_qkv, num_heads=2", UsageError, "needs `num_key_value_groups=`"),
    ("a, b, v -> c, fused_qkv, num_heads=0, num_key_value_groups=1", UsageError, "a number above 0"),
    ("a, b, v -> c, fused_qkv, num_heads=3, num_key_value_groups=2", UsageError, "is not a multiple of"),
    ("a -> c, fused_ffn, fused_qkv", UsageError, "one fused_... only"),
]


def test_odd() -> None:
    for text, error, what in ODD:
        got = refusal(text)
        assert type(got) is error, text
        assert what in f"{got.what} {got.hint}", text


SYNTAX = [
    ("a b -> c", 3, "`b` stands where `->` should stand"),
    ("a -> c d", 8, "`d` stands where `,` should stand"),
    ("a -> ", 5, "the statement ends where a name should stand"),
    ("a -> c,", 7, "the statement ends with `,`"),
    ("a", 2, "a statement needs `->`"),
    ("a -> bc -> d", 9, "two statements are glued together"),
    ("a, b -> c, fused_ffnd -> e", 23, "two statements are glued together"),
    ("a <- b", 3, "`<-` is not AOA"),
    ("a-b -> c", 2, "`-` cannot stand here"),
    ("0.w -> c", 2, "`.` cannot stand here"),
    ("a/b -> c", 2, "`/` cannot stand here"),
    ("a -> c, axis=", 14, "the statement ends where a value should stand"),
    ("a -> c, axis='0'", 14, "`axis` needs a number"),
    ("a -> c, dtype=float16", 15, "`dtype` needs a string"),
    ("a -> c, dtype='float16", 15, "the string that starts with ' has no end"),
    ("a -> c, axes=0", 9, "`axes` is not an attribute"),
    ("a -> c, axis=0, axis=1", 17, "`axis` is given twice"),
    ("a -> c, axis=0, d", 17, "`d` stands behind the attributes"),
    ("a -> t[0-2], axis=0", 9, "`-` cannot stand here"),
    ("a -> t[0:x], axis=0", 10, "`x` stands where a number should stand"),
    ("a -> t[:2], axis=0", 9, "`2` stands where `:`"),
    ("a^T^T -> c", 1, "^T can only stand at the end"),
    ("a^T[0:2] -> c, axis=0", 1, "neither ^T nor *"),
]


def test_syntax() -> None:
    for text, column, what in SYNTAX:
        try:
            parse_aoa(f"\n# a comment\n  {text}", "rules.txt")
        except UsageError as error:
            found = error
        else:
            raise AssertionError(f"{text} is read")
        assert what in found.what, text
        place, shown, mark = found.where
        assert place == f"rules.txt:3:{column + 2}", text
        assert shown == text.strip()
        assert re.fullmatch(r" *\^+", mark), text
        assert mark.index("^") == column - 1, text


def test_glued_statements_as_in_qwen2_moe() -> None:
    """A missing comma between two strings of a Python list."""
    glued = [
        "model.layers.$LAYER_ID.mlp.gate.weight^T -> model.layers.$LAYER_ID.mlp.gate.weight",
        "model.layers.$LAYER_ID.input_layernorm.weight -> model.layers.$LAYER_ID.input_layernorm.weight",
    ]
    with pytest.raises(UsageError, match="glued") as e:
        parse_aoa('["a -> b", "' + "".join(glued) + '"]', "rules.json")
    assert e.value.where[0] == "rules.json, statement 2, column 129"
    assert e.value.where[2].index("^") == e.value.where[1].rindex("->")
    assert "comma is missing" in str(e.value.hint)


def test_message() -> None:
    got = refusal("a -> c # fine\n  l.$LAYER_ID.w, l.$LAYER_ID.u -> l.$LAYER_ID.x, axis=0")
    assert got.render().splitlines() == [
        "error: there is no `l.0.u` beside `l.0.w`",
        "  --> <text>:2",
        "      l.$LAYER_ID.w, l.$LAYER_ID.u -> l.$LAYER_ID.x, axis=0",
        "      here: l.0.w, l.0.u -> l.0.x",
    ]


def test_nearest_name() -> None:
    assert "did you mean `wide`" in str(refusal("wid -> c").hint)
    assert "did you mean `l.0.w`" in str(refusal("l.$LAYER_ID.weight -> c.$LAYER_ID").hint)


def test_no_tensors() -> None:
    assert refusal("x.$LAYER_ID.w -> y.$LAYER_ID.w", {}).hint == "the checkpoint has no tensors"


def test_heads_that_are_not_the_models() -> None:
    """Both numbers fit the sizes, and the heads would be interleaved otherwise."""
    sources = {"attn.qkv": count(2, 16), "vision.qkv": count(2, 16)}
    sizes = {"heads": CutSize(4), "kv_heads": CutSize(2, shared=True)}
    text = "{}.qkv -> {}.q, {}.k, {}.v, fused_qkv, num_heads=2, num_key_value_groups=1"
    with pytest.raises(ConflictError, match="the model's config has 4 and 2 heads"):
        apply_aoa(table(sources), parse_aoa(text.replace("{}", "attn")), sizes=sizes)
    apply_aoa(table(sources), parse_aoa(text.replace("{}", "vision")), sizes=sizes)


def test_scales_follow_no_statement() -> None:
    sources = {"w.weight": count(2, 2), "w.weight_scale_inv": count(1, 1)}
    for text in ("w.weight^T -> w.weight", "w.weight -> x.weight", "w.weight -> _"):
        with pytest.raises(UnsupportedError, match="holds the scales of `w"):
            apply_aoa(table(sources, "F8_E4M3"), parse_aoa(text))
    both = "w.weight^T -> w.weight\nw.weight_scale_inv^T -> w.weight_scale_inv"
    assert len(apply_aoa(table(sources, "F8_E4M3"), parse_aoa(both))) == 2
    assert len(apply_aoa(table(sources, "F8_E4M3"), parse_aoa("w.weight -> w.weight"))) == 2
