"""Tied tensors of a model: copies of one tensor, which is merged once and written once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import reduce

from ckpttool.checkpoint import Checkpoint
from ckpttool.formats.config import EMBEDDINGS, HEADS, ties_head
from ckpttool.layout.family import Family
from ckpttool.layout.statements import Rename
from ckpttool.relate import TensorTable
from ckpttool.select import compile_pattern


def tied_names(checkpoint: Checkpoint, names: Mapping[str, object], *, canonical: bool) -> dict[str, str]:
    """copy -> owner, under the names that the model is merged with.

    A program's parameters are its own. Of an unknown family, the head and the embedding are told by their names.
    """
    family = checkpoint.family
    if checkpoint.capabilities.exact:
        return {}
    if family.name == "none":
        found = ([n for n in names if n.endswith(ends)] for ends in (HEADS, EMBEDDINGS))
        heads, embeddings = ([n for n in f if not n.startswith("mtp")] for f in found)
        tied = bool(ties_head(checkpoint.config)) and len(heads) == len(embeddings) == 1
        return {heads[0]: embeddings[0]} if tied else {}
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
    return {c: o for c, o in held.items() if c != o}


def under_one_name(ties: Mapping[str, str], family: Family) -> dict[str, str]:
    """Without the names in memory of copies that are there under those of files."""
    other = set()
    for naming in family.spec.hf_namings:
        renames = [op for op in family.statements(naming) if isinstance(op, Rename)]
        for copy in ties:
            name = reduce(lambda n, op: op.forward(n), renames, copy)
            other |= {name} - {copy}
    return {c: o for c, o in ties.items() if c not in other}


def with_stored_owners(ties: Mapping[str, str], tables: Collection[Collection[str]]) -> dict[str, str]:
    """The ties of models with these names, where an embedding owns the others if no model stores the owner.

    A decoder of its own has no embedding that an encoder shares.
    """
    owners = dict(ties)
    for owner in {*ties.values()}:
        copies = [c for c, o in ties.items() if o == owner]
        stored = [n for n in (owner, *copies) if any(n in t for t in tables)]
        embeddings = [n for n in stored if n.endswith(EMBEDDINGS)]
        if owner not in stored and len(embeddings) == 1:
            owners |= {c: embeddings[0] for c in copies if c != embeddings[0]}
            del owners[embeddings[0]]
    return owners


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
