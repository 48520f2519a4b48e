"""Tied tensors of a model: copies of one tensor, which is merged once and written once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import reduce

from ckpttool.checkpoint import Checkpoint
from ckpttool.core.patterns import compile_pattern
from ckpttool.formats.config import EMBEDDINGS, HEADS, ties_head
from ckpttool.layout.family import Family
from ckpttool.layout.statements import Rename
from ckpttool.layout.ties import class_ties
from ckpttool.planning.relate import TensorTable

_HEADS = (
    *HEADS,
    *("predictions.decoder.weight", "lm_head.decoder.weight", "head.decoder.weight"),
    *("lm_head.out_proj.weight", "output_projection.weight"),
)
"""Ends of names of heads, those of families whose files are not all named alike, too."""


def tied_names(checkpoint: Checkpoint, names: Collection[str], *, canonical: bool) -> dict[str, str]:
    """copy -> owner, under the names that the models are merged with; ``names`` are those of all models.

    A program's parameters are its own.
    """
    family = checkpoint.family
    if checkpoint.is_program:
        return {}
    if (recorded := class_ties(checkpoint.config, names)) is not None:
        return recorded
    renames = [] if canonical else [op for op in checkpoint.ops if isinstance(op, Rename)]

    def own(name: str) -> str:
        for op in renames:
            name = op.forward(name)
        return name

    held: dict[str, str] = {}
    for copy, owner in family.ties.items():
        whole, bare = own(owner), own(owner.removeprefix(family.spec.base))
        # The bare name is that in files of a model that was saved without its head.
        held[own(copy)] = bare if bare in names and whole not in names else whole
    tied = ties_head(checkpoint.config) if family.name == "none" else family.tied
    held = {c: o for c, o in held.items() if c != o}
    return _as_stored(held, names) if tied else held


def _as_stored(ties: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    """The ties with the one embedding that is stored, or the first of those that are one, where the family's owner is
    not.

    Models of one family differ in what their names begin with, a decoder alone has no embedding that an encoder
    shares, and of an unknown family nothing but the ends of names is known.
    """
    embeddings, heads = (
        [n for n in names if f".{n}".endswith(tuple(f".{e}" for e in ends)) and not n.startswith("mtp")]
        for ends in (EMBEDDINGS, _HEADS)
    )
    known = {o for o in ties.values() if o.endswith("weight") and o in names}
    one = len(embeddings) == 1 or len({ties.get(n, n) for n in embeddings}) == 1
    if not embeddings or not one or known - {*embeddings}:
        return dict(ties)
    owner = next((n for n in embeddings if n in known), embeddings[0])
    moved = {c: owner if c.endswith("weight") and o not in names else o for c, o in ties.items() if c != owner}
    if len(heads) == 1 and heads[0] not in moved:
        moved[heads[0]] = owner
        module = heads[0].removesuffix("decoder.weight")
        if f"{module}bias" in names:
            moved[f"{module}decoder.bias"] = f"{module}bias"
    return moved


def under_one_name(ties: Mapping[str, str], family: Family) -> dict[str, str]:
    """Drop the names in memory of copies that are there under those of files."""
    other = set()
    for naming in family.spec.hf_namings:
        renames = [op for op in family.statements(naming) if isinstance(op, Rename)]
        for copy in ties:
            name = reduce(lambda n, op: op.forward(n), renames, copy)
            other |= {name} - {copy}
    return {c: o for c, o in ties.items() if c not in other}


def without_copies(views: TensorTable, ties: Mapping[str, str], removed: Sequence[str]) -> TensorTable:
    """Tied tensors once, under the owner's name, or where no owner is stored in place of the first copy.

    Copies must hold the same, which is compared before anything is written, unless the patterns of ``removed``
    name them. Where the patterns name the owner and not the copy, both stay: the copy is what is left of them.
    """
    table, notes, tied = dict(views.table), list(views.notes), list(views.tied)
    patterns = [compile_pattern(p) for p in removed]

    def goes(name: str) -> bool:
        return any(p.search(name) for p in patterns)

    for copy, owner in ties.items():
        if copy not in table:
            continue
        if owner in table and goes(owner) and not goes(copy):
            notes.append(f"`{copy}` stays, because the patterns name `{owner}` only, to which the config ties it")
        elif owner in table:
            if not goes(copy):
                tied.append((table[copy], table[owner]))
            del table[copy]
            notes.append(f"`{copy}` is merged as `{owner}`, to which the config ties it")
        elif copy.endswith("bias") or not any(n.endswith(EMBEDDINGS) and ties.get(n) != owner for n in table):
            table = {owner if n == copy else n: v.named(owner) if n == copy else v for n, v in table.items()}
            notes.append(f"`{copy}` is merged and written as `{owner}`, to which the config ties it")
    return replace(views, table=table, notes=notes, tied=tied)
