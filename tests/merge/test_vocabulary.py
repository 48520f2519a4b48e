"""Vocabularies of merged models: the ids of the output, and the row that every token gets in every matrix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.core.plan import Gathered, Operand, RowRun, StoredOperand
from ckpttool.errors import ConflictError, UsageError
from ckpttool.vocabulary.merge import Input, MergedVocabulary, RowRule, TokenRow, merge_vocabularies
from ckpttool.vocabulary.read import Added, Vocabulary

Matrix = npt.NDArray[np.float32]


def vocabulary(own: str | list[str], added: str | list[str] = "", **settings: Any) -> Vocabulary:
    """Tokens by rising id; words of a string."""
    words = own.split() if isinstance(own, str) else own
    extra = added.split() if isinstance(added, str) else added
    tokens = {t: i for i, t in enumerate([*words, *extra])}
    return Vocabulary(Path("m"), (), tokens, frozenset(words), {t: Added(t, **settings) for t in extra})


def inputs(*vocabularies: Vocabulary, rows: int | None = None) -> list[Input]:
    return [Input(f"m{i}", v, rows or max(v.tokens.values()) + 1) for i, v in enumerate(vocabularies)]


def matrix(model: int, rows: int) -> Matrix:
    """Each row says where it comes from: [100 * (model + 1) + row, 1]."""
    return np.stack([np.arange(rows) + 100.0 * (model + 1), np.ones(rows)], 1).astype(np.float32)


def value(operand: Operand, matrices: dict[Operand, Matrix]) -> Matrix:
    """What a Gathered means, written as plainly as can be."""
    if not isinstance(operand, Gathered):
        return matrices[operand]
    sources = [value(s, matrices) for s in operand.sources]
    out = np.full(operand.shape, np.nan, np.float32)
    for run in operand.runs:
        for i in range(run.start, run.stop):
            assert np.isnan(out[i]).all()
            out[i] = 0 if run.source < 0 else sources[run.source][run.first + i - run.start]
    for row, picks in operand.means:
        assert np.isnan(out[row]).all()
        out[row] = np.mean([sources[s][r] for s, r in picks], axis=0)
    assert not np.isnan(out).any()
    return out


def aligned(merged: MergedVocabulary, which: list[int] | None = None, rows: list[int] | None = None) -> list[Matrix]:
    """The models' matrices in the order of the output."""
    which = list(range(len(merged.inputs))) if which is None else which
    rows = [merged.inputs[i].rows for i in which] if rows is None else rows
    operands = [StoredOperand("F32", (n, 2), (), f"m{i}") for i, n in zip(which, rows, strict=True)]
    matrices: dict[Operand, Matrix] = {o: matrix(i, n) for o, i, n in zip(operands, which, rows, strict=True)}
    found = merged.gathered(which, operands, [o.shape for o in operands])
    return [value(o, matrices) for o in found]


def first(merged: MergedVocabulary, token: str, **how: Any) -> list[float]:
    """The first number of a token's row in every model's matrix."""
    return [float(m[merged.tokens[token], 0]) for m in aligned(merged, **how)]


# -- which tokens


def test_union_appends_what_the_base_lacks() -> None:
    models = inputs(vocabulary("a b", "<s>"), vocabulary("c a d", "<t> <s>"), vocabulary("e c", "<u>"))
    merged = merge_vocabularies(models, 0)
    assert list(merged.tokens) == ["a", "b", "<s>", "c", "d", "e", "<t>", "<u>"]
    assert list(merged.tokens.values()) == list(range(8))
    assert merged.size == merged.rows == 8
    assert list(merged.new) == ["c", "d", "e", "<t>", "<u>"]


def test_union_grows_from_the_base_wherever_it_stands() -> None:
    models = inputs(vocabulary("a b"), vocabulary("c a"))
    assert list(merge_vocabularies(models, 1).tokens) == ["c", "a", "b"]
    assert list(merge_vocabularies(models, None).tokens) == ["a", "b", "c"]


def test_union_of_equal_vocabularies_adds_nothing() -> None:
    merged = merge_vocabularies(inputs(vocabulary("a b", "<s>"), vocabulary("a b", "<s>")), 0)
    assert not merged.new
    assert not merged.notes


def test_a_token_that_is_added_anywhere_is_added_in_the_union() -> None:
    models = inputs(vocabulary("a b"), vocabulary("a c"), vocabulary("a", "b c", special=True))
    merged = merge_vocabularies(models, 0)
    assert merged.new == {"b": Added("b", special=True), "c": Added("c", special=True)}
    assert merged.tokens == {"a": 0, "b": 1, "c": 2}


def test_different_settings_of_an_added_token_are_noted() -> None:
    models = inputs(vocabulary("a"), vocabulary("a", "<t>", lstrip=True), vocabulary("a", "<t>"))
    merged = merge_vocabularies(models, 0)
    assert merged.new["<t>"].lstrip
    assert "'<t>'" in merged.notes[0]


@pytest.mark.parametrize(("source", "tokens"), [("base", "b c x"), (0, "a b x"), (1, "b c x")])
def test_one_models_tokens_and_those_of_the_recipe(source: Any, tokens: str) -> None:
    models = inputs(vocabulary("a b"), vocabulary("b c"))
    merged = merge_vocabularies(models, 1, source, {"x": RowRule("zero"), "b": RowRule("zero")})
    assert list(merged.tokens) == tokens.split()


def test_tokens_without_a_row_are_left_out() -> None:
    models = inputs(vocabulary("a b", "<s> <t>"), vocabulary("a b x y"), rows=3)
    merged = merge_vocabularies(models, 0)
    assert list(merged.tokens) == ["a", "b", "<s>", "x"]
    assert merged.notes == ["1 tokens of m0 have no row in its embedding and are left out"]


def test_nothing_is_added_where_ids_have_holes() -> None:
    holed = Vocabulary(Path("m"), (), {"a": 0, "b": 5}, frozenset("ab"), {})
    with pytest.raises(ConflictError, match="holes"):
        merge_vocabularies(inputs(holed, vocabulary("c")), 0)


@pytest.mark.parametrize("multiple", [0, -8])
def test_a_multiple_is_positive(multiple: int) -> None:
    with pytest.raises(UsageError):
        merge_vocabularies(inputs(vocabulary("a")), 0, multiple=multiple)


def test_there_is_at_least_one_token() -> None:
    with pytest.raises(ConflictError, match="no tokens"):
        merge_vocabularies([Input("m", vocabulary("a"), 0)], 0)


# -- which rows


def test_own_rows_come_first_and_the_base_fills_in() -> None:
    models = inputs(vocabulary("a b c"), vocabulary("c a"), vocabulary("c"))
    merged = merge_vocabularies(models, 0)
    assert first(merged, "a") == [100, 201, 100]
    assert first(merged, "b") == [101, 101, 101]
    assert first(merged, "c") == [102, 200, 300]


def test_the_only_owner_fills_in() -> None:
    merged = merge_vocabularies(inputs(vocabulary("a"), vocabulary("a x"), vocabulary("a")), 0)
    assert first(merged, "x") == [201, 201, 201]


def test_several_owners_without_the_base_are_averaged() -> None:
    models = inputs(vocabulary("a"), vocabulary("a x"), vocabulary("x a"))
    assert first(merge_vocabularies(models, 0), "x") == [250.5, 201, 300]
    # Without a base, the first model is like any other.
    assert first(merge_vocabularies(models[1:] + models[:1], None), "x") == [101, 200, 150.5]


def test_only_models_of_the_tensor_count() -> None:
    models = inputs(vocabulary("a b"), vocabulary("a x"), vocabulary("x a"))
    merged = merge_vocabularies(models, 0)
    assert first(merged, "x", which=[2, 0]) == [300, 300]
    assert first(merged, "b", which=[1, 2]) == [0, 0]


def test_a_model_that_is_listed_twice_counts_once() -> None:
    models = inputs(vocabulary("a"), vocabulary("a x"), vocabulary("x a"))
    merged = merge_vocabularies(models, 0)
    assert first(merged, "x", which=[0, 1, 2, 1]) == [250.5, 201, 300, 201]


def test_a_matrix_with_fewer_rows_lacks_the_tokens_behind_them() -> None:
    merged = merge_vocabularies(inputs(vocabulary("a b"), vocabulary("a b")), 0)
    assert first(merged, "b", rows=[1, 2]) == [201, 201]
    assert first(merged, "b", rows=[2, 2]) == [101, 201]


def test_a_rule_is_for_models_that_lack_the_token() -> None:
    models = inputs(vocabulary("a b"), vocabulary("a x"), vocabulary("x a"))
    merged = merge_vocabularies(models, 0, rules={"b": RowRule(TokenRow(2, "x")), "x": RowRule(TokenRow(2))})
    assert first(merged, "b") == [101, 300, 300]
    assert first(merged, "x") == [300, 201, 300]


def test_force_is_for_all_models() -> None:
    models = inputs(vocabulary("a b"), vocabulary("b a"))
    rules = {"a": RowRule(TokenRow(1), force=True), "b": RowRule(force=True)}
    merged = merge_vocabularies(models, 0, rules=rules)
    assert first(merged, "a") == [201, 201]
    assert first(merged, "b") == [101, 101]


def test_forced_means_are_for_all_models() -> None:
    models = inputs(vocabulary("a"), vocabulary("a x"), vocabulary("x a"))
    merged = merge_vocabularies(models, 0, rules={"x": RowRule(force=True)})
    assert first(merged, "x") == [250.5, 250.5, 250.5]


def test_zeros() -> None:
    models = inputs(vocabulary("a b"), vocabulary("a"))
    merged = merge_vocabularies(models, 0, rules={"b": RowRule("zero"), "new": RowRule("zero")})
    assert first(merged, "b") == [101, 0]
    assert first(merged, "new") == [0, 0]


def test_a_token_of_a_model_by_name_and_by_id() -> None:
    models = inputs(vocabulary("a b"), vocabulary("c d a b"), rows=6)
    rules = {"x": RowRule(TokenRow(1, "d")), "y": RowRule(TokenRow(1, 5)), "a": RowRule(TokenRow(0, 1), force=True)}
    merged = merge_vocabularies(models, 0, "base", rules)
    assert first(merged, "x") == [201, 201]
    assert first(merged, "y") == [205, 205]  # a row that no token has
    assert first(merged, "a") == [101, 101]


@pytest.mark.parametrize("row", [TokenRow(1), TokenRow(1, "zzz"), TokenRow(1, 2), TokenRow(1, -1), TokenRow(2, "a")])
def test_a_rule_names_a_row_that_is_there(row: TokenRow) -> None:
    models = inputs(vocabulary("a b"), vocabulary("a c"), vocabulary("a"))
    merged = merge_vocabularies(models, 0, rules={"b": RowRule(row)})
    with pytest.raises(ConflictError, match="token 'b'"):
        aligned(merged, which=[0, 1])


def test_padding_is_the_mean_of_all_rows() -> None:
    merged = merge_vocabularies(inputs(vocabulary("a b c"), vocabulary("a")), 0, multiple=4)
    assert (merged.size, merged.rows) == (3, 4)
    one, other = aligned(merged)
    assert one[:, 0].tolist() == [100, 101, 102, 101]
    assert other[:, 0].tolist() == [200, 101, 102, pytest.approx(403 / 3)]
    assert merge_vocabularies(inputs(vocabulary("a b c d")), 0, multiple=4).rows == 4


def test_holes_keep_the_rows_of_the_tokenizers_model() -> None:
    holed = Vocabulary(Path("m"), (), {"a": 0, "b": 3}, frozenset("ab"), {})
    merged = merge_vocabularies(inputs(vocabulary("a b"), holed), 0, 1)
    assert [m[:, 0].tolist() for m in aligned(merged)] == [[100, 201, 202, 101], [200, 201, 202, 203]]
    assert [m[:, 0].tolist() for m in aligned(merged, which=[0])] == [[100, 0, 0, 101]]


def test_widths_must_agree() -> None:
    merged = merge_vocabularies(inputs(vocabulary("a"), vocabulary("a")), 0)
    operands = [StoredOperand("F32", (1, n), (), "") for n in (2, 3)]
    with pytest.raises(ConflictError, match="widths"):
        merged.gathered([0, 1], operands, [o.shape for o in operands])


words = st.lists(st.sampled_from("abcdefghij"), unique=True, min_size=1)


@given(st.lists(st.tuples(words, words), min_size=1, max_size=4), st.integers(1, 8), st.booleans())
def test_every_token_has_its_own_row_wherever_it_can(
    models: list[tuple[list[str], list[str]]], multiple: int, based: bool
) -> None:
    given = inputs(*[vocabulary(own, [t for t in added if t not in own]) for own, added in models])
    merged = merge_vocabularies(given, 0 if based else None, multiple=multiple)
    assert sorted(merged.tokens.values()) == list(range(merged.size))
    assert set(merged.tokens) == {t for m in given for t in m.vocabulary.tokens}
    for i, (model, found) in enumerate(zip(given, aligned(merged), strict=True)):
        assert found.shape == (merged.rows, 2)
        for token, number in model.vocabulary.tokens.items():
            assert found[merged.tokens[token], 0] == 100 * (i + 1) + number
        assert np.allclose(found[:, 1], 1)


@given(words, st.integers(0, 3))
def test_a_vocabulary_that_is_the_outputs_is_one_run(tokens: list[str], more: int) -> None:
    model = Input("m", vocabulary(tokens), len(tokens) + more)
    merged = merge_vocabularies([model, model], 0)
    assert [p.runs for p in merged.picks([0, 1], [model.rows] * 2)] == [(RowRun(0, len(tokens), i, 0),) for i in (0, 1)]
    operands = [StoredOperand("F32", (model.rows, 2), (), str(i)) for i in (0, 1)]
    found = merged.gathered([0, 1], operands, [o.shape for o in operands])
    assert (found == operands) == (more == 0)


def test_data_of_a_recipe_is_plain() -> None:
    """Rules can be put into a record of the merge."""
    assert json.loads(json.dumps(RowRule(TokenRow(1, "x"), force=True))) == [[1, "x"], True]
