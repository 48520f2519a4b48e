"""Tied tensors of a model: copies of one tensor, which is merged once and written once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckpttool.checkpoint import Checkpoint
from ckpttool.formats.config import EMBEDDINGS, HEADS, ties_head
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
