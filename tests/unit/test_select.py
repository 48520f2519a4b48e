"""Patterns and renaming rules."""

from __future__ import annotations

import pytest

from ckpttool.core.patterns import compile_pattern, matching, renamer
from ckpttool.errors import UsageError

NAMES = [
    "model.embed_tokens.weight",
    *(f"model.layers.{i}.{n}.weight" for i in (0, 1, 10) for n in ("self_attn.q_proj", "mlp.up_proj")),
    "lm_head.weight",
]


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("*", 8),
        ("lm_head.weight", 1),
        ("lm_head", 0),
        ("*.weight", 8),
        ("model.layers.*", 6),
        ("model.layers.1.*", 2),
        ("model.layers.1?.*", 2),
        ("model.layers.[01].*", 4),
        ("model.layers.[!0].*", 2),
        ("*.{q_proj,up_proj}.weight", 6),
        ("{lm_head,model.embed_tokens}.weight", 2),
        ("********.*****.*****weight", 7),
        ("re:layers\\.1\\.", 2),
        ("re:^lm", 1),
        ("re:proj", 6),
        ("model,layers", 0),
        ("a+b(c|d)$", 0),
    ],
)
def test_patterns(pattern: str, count: int) -> None:
    regex = compile_pattern(pattern)
    assert sum(bool(regex.search(n)) for n in NAMES) == count


def test_stars_in_a_row_are_one() -> None:
    assert not compile_pattern("*" * 40 + ".").search("a." * 30 + "a")


@pytest.mark.parametrize("text", ["a.b", "a+b", "a(b)", "a|b", "a^b$", "a\\b", "a b", "a]b", "é.\U0001f600"])
def test_everything_else_stands_for_itself(text: str) -> None:
    assert compile_pattern(text).search(text)
    assert not compile_pattern(text).search(text.replace(text[1], "_"))


@pytest.mark.parametrize("pattern", ["", "re:", "re:(", "a{b", "[]"])
def test_patterns_that_mean_nothing(pattern: str) -> None:
    if pattern == "[]":
        assert compile_pattern(pattern).search("[]")
        return
    with pytest.raises(UsageError):
        compile_pattern(pattern)


def test_a_typo_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(UsageError, match=r"--keep-keys `model\.embed_token\.weight` matches no tensor") as caught:
        matching(["*", "model.embed_token.weight"], NAMES, option="--keep-keys")
    assert "did you mean `model.embed_tokens.weight`?" in caught.value.render()
    assert matching(["lm_*", "re:embed"], NAMES, option="x") == {"lm_head.weight", "model.embed_tokens.weight"}


@pytest.mark.parametrize(
    ("rule", "name", "new"),
    [
        ("model.*=x.*", "model.a.b", "x.a.b"),
        ("*.mlp.*=*.ffn.*", "model.0.mlp.w.weight", "model.0.ffn.w.weight"),
        ("a=b", "a", "b"),
        ("a=b", "aa", "aa"),
        ("*=pre.*", "x", "pre.x"),
        (r"re:layers\.(\d+)=h.\1", "m.layers.12.w", "m.h.12.w"),
        ("re:a=b", "banana", "bbnbnb"),
        ("x.*=y\\.*", "x.1", "y\\.1"),
        ("model.{a,b}.*=z.*", "model.b.w", "z.w"),
    ],
)
def test_renaming(rule: str, name: str, new: str) -> None:
    ((regex, replacement, text),) = renamer([rule])
    assert regex.sub(replacement, name) == new
    assert text == rule


@pytest.mark.parametrize("rule", ["a", "=b", "a=", "*=b", "re:(=b", r"re:a=\1", r"re:a=\g<x>", r"re:(a)=\g<+1>"])
def test_rules_that_mean_nothing(rule: str) -> None:
    with pytest.raises(UsageError):
        renamer([rule])
