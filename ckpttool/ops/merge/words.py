"""Embeddings of models whose tokenizers differ, and the tokenizer of the output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ckpttool.core.plan import Operand, shape_of
from ckpttool.errors import IncompleteError
from ckpttool.ops.merge.models import MergeInput, Models
from ckpttool.recipe.model import ModelRef, ModelToken, Recipe, TokenizerRecipe, TokenRule
from ckpttool.storage.place import parse_place
from ckpttool.vocabulary.chat import chat_template
from ckpttool.vocabulary.merge import Input, MergedVocabulary, RowRule, TokenRow, merge_vocabularies
from ckpttool.vocabulary.read import Vocabulary, read_vocabulary
from ckpttool.vocabulary.write import tokenizer_files

VOCABULARY = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "lm_head.weight", "embed_out.weight")
"""Ends of the names of tensors with one row per token."""


def has_vocabulary(name: str) -> bool:
    """Whether a tensor has one row per token of the vocabulary."""
    return name.endswith(VOCABULARY)


@dataclass(slots=True)
class VocabularyPlan:
    """What a recipe's ``tokenizer`` and ``chat_template`` come to."""

    files: dict[str, bytes]
    """The tokenizer files of the output; there are to be no others."""
    merged: MergedVocabulary | None
    """None when only the chat template changes."""
    refs: Sequence[ModelRef]

    @property
    def notes(self) -> list[str]:
        return self.merged.notes if self.merged is not None else []

    def gathered(self, refs: Sequence[ModelRef], operands: Sequence[Operand]) -> list[Operand]:
        """Matrices with one row per token, each in the order of the output's vocabulary."""
        if self.merged is None:
            return list(operands)
        which = [self.refs.index(r) for r in refs]
        return self.merged.gathered(which, operands, [shape_of(o) for o in operands])

    @classmethod
    def of(cls, recipe: Recipe, models: Models, donor: ModelRef) -> VocabularyPlan | None:
        """None when the recipe says nothing about words. Raises a CkptError subclass."""
        asked = recipe.tokenizer
        if asked is None and not recipe.chat_template:
            return None
        refs = list(recipe.references())
        if asked is None:
            own = _vocabulary(models[donor])
            # As many rows as there are tokens: the tokenizer itself stays what it is.
            merged = merge_vocabularies([Input(models[donor].label, own, 1 << 62)], None, 0)
            others = refs if recipe.chat_template == "auto" else []
            template = chat_template(recipe.chat_template, [_vocabulary(models[r]) for r in others])
            return cls(tokenizer_files(merged, template), None, refs)
        inputs = [_input(models[r]) for r in refs]
        base = refs.index(recipe.base) if recipe.base in refs else None
        merged = merge_vocabularies(
            inputs,
            base,
            _source(asked, refs, inputs),
            {token: _rule(rule, refs) for token, rule in asked.tokens.items()},
            asked.pad_to_multiple_of or 1,
        )
        wanted = recipe.chat_template
        template = chat_template(wanted, [i.vocabulary for i in inputs]) if wanted else None
        return cls(tokenizer_files(merged, template), merged, refs)


def _input(model: MergeInput) -> Input:
    name = next((n for n in model.views if has_vocabulary(n)), None)
    if name is None:
        raise IncompleteError(
            "the model has no embedding whose rows could be merged by token",
            where=model.label,
            hint="leave `tokenizer` out of the recipe",
        )
    return Input(model.label, _vocabulary(model), model.views[name].shape[0])


def _vocabulary(model: MergeInput) -> Vocabulary:
    return read_vocabulary(model.checkpoint.stored.root)


def _source(asked: TokenizerRecipe, refs: Sequence[ModelRef], inputs: list[Input]) -> int | Literal["union", "base"]:
    """The place of the model whose tokens are used; a model that is not merged gives only its tokenizer."""
    source = asked.source
    if not isinstance(source, ModelRef):
        return source
    if source in refs:
        return refs.index(source)
    vocabulary = read_vocabulary(parse_place(source.path))
    inputs.append(Input(source.path, vocabulary, max(vocabulary.tokens.values(), default=-1) + 1))
    return len(inputs) - 1


def _rule(rule: TokenRule, refs: Sequence[ModelRef]) -> RowRule:
    source = rule.source
    if isinstance(source, ModelToken):
        token = source.token if source.number is None else source.number
        return RowRule(TokenRow(refs.index(source.model), token), rule.force)
    if isinstance(source, ModelRef):
        return RowRule(TokenRow(refs.index(source)), rule.force)
    return RowRule(source, rule.force)
