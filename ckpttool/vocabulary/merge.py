"""One vocabulary for several models, and where each of its rows comes from in every model's matrices.

A model's matrix in the order of the output gives a token

    its own row,                            if the model has the token,
    else what the recipe says of the token,
    else the row of the only model that has it, or of the base if that has it,
    else the mean of the rows of all models that have it,

and zeros to a token that no model has. An id without a token (a hole) keeps the row that the model whose tokenizer
is used has there. Rows that only pad are the mean of all others, so that their logits are never the largest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ckpttool.core.plan import Gathered, Operand, RowRun
from ckpttool.errors import ConflictError, UsageError
from ckpttool.vocabulary.read import Added, Vocabulary

Ids = npt.NDArray[np.int64]

_ZERO, _MEAN = -1, -2
"""Sources of a row that are no matrix."""


class Input(NamedTuple):
    """A model of the merge."""

    label: str
    vocabulary: Vocabulary
    rows: int
    """Rows of its embedding matrix; tokens with higher ids have no embedding and count as absent."""


class TokenRow(NamedTuple):
    """The row of a token in one model's matrix."""

    model: int
    """Place among the inputs."""
    token: str | int | None = None
    """Another token, or an id; None is the token itself."""


class RowRule(NamedTuple):
    """A recipe's rule for a token."""

    source: TokenRow | Literal["zero"] | None = None
    """Source of its row; None leaves it to the general rules."""
    force: bool = False
    """Also in models that have the token."""


class Picks(NamedTuple):
    """The rows of one matrix of the output; sources count the matrices that were given."""

    runs: tuple[RowRun, ...]
    means: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]


@dataclass(slots=True)
class MergedVocabulary:
    """The output's vocabulary."""

    inputs: Sequence[Input]
    base: int | None
    donor: Vocabulary
    """The vocabulary that the output's grew from."""
    donor_at: int
    """Its place among the inputs."""
    tokens: dict[str, int]
    new: dict[str, Added]
    """Additions to the donor's tokenizer: tokens it lacks, and settings of tokens that it had only as its own."""
    size: int
    """Highest id + 1."""
    rows: int
    """Rows of the output's matrices; ``vocab_size`` of its config."""
    rules: Mapping[str, RowRule]
    notes: list[str] = field(default_factory=list)
    _known: dict[tuple[tuple[int, int], ...], list[Picks]] = field(default_factory=dict)

    def gathered(
        self, which: Sequence[int], operands: Sequence[Operand], shapes: Sequence[tuple[int, ...]]
    ) -> list[Operand]:
        """The matrices ``operands`` of the inputs ``which`` (repeats are fine), each as [rows, columns].

        An operand that has this form already comes back as it is. Raises ConflictError when the matrices have
        different columns, or a rule asks for a row that is not there.
        """
        if len({s[1:] for s in shapes}) != 1 or any(len(s) != 2 for s in shapes):
            raise ConflictError(
                "embeddings of different widths cannot be merged",
                where=[f"{list(s)} in {self.inputs[i].label}" for i, s in zip(which, shapes, strict=True)],
            )
        columns = shapes[0][1]
        found: list[Operand] = []
        sources = tuple(operands)
        every = tuple([(0, i) for i in range(self.size if self.rows > self.size else 0)])
        for at, picks in enumerate(self.picks(which, [s[0] for s in shapes])):
            aligned: Operand = Gathered(sources, (self.size, columns), *picks)
            if picks == Picks((RowRun(0, self.size, at, 0),), ()) and shapes[at][0] == self.size:
                aligned = operands[at]
            if every:
                mean = Gathered((aligned,), (1, columns), (), ((0, every),))
                padding = [RowRun(i, i + 1, 1, 0) for i in range(self.size, self.rows)]
                aligned = Gathered((aligned, mean), (self.rows, columns), (RowRun(0, self.size, 0, 0), *padding))
            found.append(aligned)
        return found

    def picks(self, which: Sequence[int], rows: Sequence[int]) -> list[Picks]:
        """Sources of the rows ``[0, size)`` of matrices of the inputs ``which`` with these rows."""
        key = tuple(zip(which, rows, strict=True))
        if key not in self._known:
            self._known[key] = self._picks(key)
        return self._known[key]

    def _picks(self, matrices: Sequence[tuple[int, int]]) -> list[Picks]:
        first = {model: at for at, (model, _) in reversed(list(enumerate(matrices)))}
        own = {model: self._rows_of(model, matrices[at][1]) for model, at in sorted(first.items(), key=lambda p: p[1])}
        present = np.stack([a >= 0 for a in own.values()])
        count = present.sum(axis=0)
        # What a model without the token gets: the only owner's row, else the mean, and before both the base's row.
        source = np.array([first[m] for m in own], np.int64)[present.argmax(axis=0)]
        row = np.stack(list(own.values())).max(axis=0, where=present, initial=-1)
        source[count > 1], row[count > 1] = _MEAN, -1
        if self.base in own:
            has = own[self.base] >= 0
            source[has], row[has] = first[self.base], own[self.base][has]
        source[count == 0] = _ZERO
        forced = np.zeros(self.size, bool)
        for token, rule in self.rules.items():
            at = self.tokens[token]
            forced[at] = rule.force
            if rule.source == "zero":
                source[at] = _ZERO
            elif rule.source is not None:
                source[at], row[at] = self._ruled(token, rule.source, matrices, first)
        out = []
        for model, _ in matrices:
            keeps = (own[model] >= 0) & ~forced
            means = np.flatnonzero(~keeps & (source == _MEAN)).tolist()
            out.append(
                Picks(
                    _runs(np.where(keeps, first[model], source), np.where(keeps, own[model], row)),
                    tuple([(i, tuple([(first[m], int(a[i])) for m, a in own.items() if a[i] >= 0])) for i in means]),
                )
            )
        return out

    def _rows_of(self, model: int, rows: int) -> Ids:
        """The model's row for each id of the output; -1 where it has none."""
        theirs = self.inputs[model].vocabulary.within(min(rows, self.inputs[model].rows)).tokens
        found = np.full(self.size, -1, np.int64)
        ids = np.fromiter(self.tokens.values(), np.int64, len(self.tokens))
        found[ids] = np.fromiter((theirs.get(t, -1) for t in self.tokens), np.int64, len(self.tokens))
        if model == self.donor_at:
            holes = np.setdiff1d(np.arange(min(self.size, rows)), ids)
            found[holes] = holes
        return found

    def _ruled(
        self, token: str, row: TokenRow, matrices: Sequence[tuple[int, int]], first: Mapping[int, int]
    ) -> tuple[int, int]:
        """(matrix, row) of a rule. Raises ConflictError when there is no such row."""
        label = self.inputs[row.model].label
        if row.model not in first:
            raise ConflictError(f"the row of token {token!r} is to come from a model that is not merged", where=label)
        source = first[row.model]
        name = token if row.token is None else row.token
        number = self.inputs[row.model].vocabulary.tokens.get(name) if isinstance(name, str) else name
        if number is None or not 0 <= number < matrices[source][1]:
            raise ConflictError(
                f"the row of token {token!r} should be that of {name!r}, which the model does not have", where=label
            )
        return source, number


def merge_vocabularies(
    models: Sequence[Input],
    base: int | None,
    source: Literal["union", "base"] | int = "union",
    rules: Mapping[str, RowRule] | None = None,
    multiple: int = 1,
) -> MergedVocabulary:
    """Find the output's tokens and ids.

    ``base`` is the place of the base model, if the merge has one (else the first model stands for it here).
    ``source``: the base's tokens, those of one model, or all: then the tokens that the base lacks follow its own, in
    the order of the models and their ids, first those of the algorithms, then the added ones. Tokens in ``rules`` that
    are nowhere else follow last. ``multiple``: what the number of rows is padded to a multiple of.

    Raises UsageError and ConflictError.
    """
    if multiple < 1:
        raise UsageError(f"the vocabulary cannot be padded to a multiple of {multiple}")
    rules = dict(rules or {})
    at = source if isinstance(source, int) else base or 0
    donor = models[at].vocabulary.within(models[at].rows)
    notes = []
    if lost := len(models[at].vocabulary.tokens) - len(donor.tokens):
        notes.append(f"{lost} tokens of {models[at].label} have no row in its embedding and are left out")
    new: dict[str, Added] = {}
    if source == "union":
        others = [m.vocabulary.within(m.rows) for i, m in enumerate(models) if i != at]
        new, differing = _lacking(donor, others)
        if differing:
            shown = ", ".join(repr(t) for t in differing[:5])
            notes.append(f"{len(differing)} added tokens have different settings; the first model's are used ({shown})")
    for token in rules:
        if token not in donor.tokens:
            new.setdefault(token, Added(token))
    tokens = dict(donor.tokens)
    follow = donor.follow
    missing = [t for t in new if t not in tokens]
    if missing and follow <= max(tokens.values(), default=-1):
        raise ConflictError(
            f"the ids of {models[at].label} have holes: nothing can be added to its vocabulary",
            where=str(donor.directory),
            hint="put a placeholder token in each hole",
        )
    tokens |= {t: follow + i for i, t in enumerate(missing)}
    size = max(tokens.values(), default=-1) + 1
    if not size:
        raise ConflictError("the merged model would have no tokens", where=models[at].label)
    return MergedVocabulary(models, base, donor, at, tokens, new, size, -(-size // multiple) * multiple, rules, notes)


def _lacking(donor: Vocabulary, others: Iterable[Vocabulary]) -> tuple[dict[str, Added], list[str]]:
    """Tokens that a union adds to the donor, and the added tokens whose settings differ between models."""
    own: dict[str, Added] = {}
    added = dict(donor.added)
    differing: dict[str, None] = {}
    for other in others:
        own |= {t: Added(t) for t in other.tokens if t not in other.added and t not in donor.tokens}
        for token, settings in other.added.items():
            if added.setdefault(token, settings) != settings:
                differing[token] = None
    new = {t: a for t, a in own.items() if t not in added}
    new |= {t: a for t, a in added.items() if t not in donor.added}
    return new, list(differing)


def _runs(source: Ids, row: Ids) -> tuple[RowRun, ...]:
    """Rows, without means, as runs."""
    at = np.flatnonzero(source != _MEAN)
    source, row = source[at], row[at]
    if not len(at):
        return ()
    breaks = (np.diff(at) != 1) | (np.diff(source) != 0) | ((np.diff(row) != 1) & (source[1:] != _ZERO))
    starts = np.concatenate([[0], np.flatnonzero(breaks) + 1])
    lengths = np.diff(np.append(starts, len(at)))
    first = np.where(source == _ZERO, 0, row)
    return tuple([
        RowRun(start, start + n, of, begin)
        for start, n, of, begin in zip(
            at[starts].tolist(), lengths.tolist(), source[starts].tolist(), first[starts].tolist(), strict=True
        )
    ])  # fmt: skip
