"""``FamilyDialect``: names that a family file describes: the published ones, and those of its ``namings:``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from ckpttool.dialects.base import Dialect, NamingContext, Shapes, Statements
from ckpttool.errors import UnsupportedError
from ckpttool.layout.family import Family, Fuse, Rename, Stack, matches
from ckpttool.layout.names import split_numbers

PUBLISHED = "hf"
"""The names that the rules of a family file are for."""
PACKING = (PUBLISHED, "vllm")
"""Dialects of software that reads packed weights (GPTQ, AWQ, bitsandbytes, ...) under their names."""


class FamilyDialect(Dialect):
    """One of the ``namings:`` of the family files."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.published = self.whole_alone = name == PUBLISHED
        self.packs = name in PACKING

    def target(self, context: NamingContext, shapes: Callable[[], Shapes]) -> Statements:
        """What the family file says, plus all its fusions where ``fused`` says so."""
        del shapes
        family = context.family
        if family.name == "none" and self.published:
            return ()
        ops = list(self.statements(family, staged=context.mesh.pp > 1))
        if context.fused:
            apart = context.fused == "unfuse"
            for name in family.spec.fusions:
                # What is published in the wanted form needs no statement, and one would be undone on the way back.
                if family.spec.fusions[name].only_named:
                    continue
                known = any(isinstance(o, Fuse) and o.name == name for o in ops)
                if family.publishes_fused(name) == apart and not known:
                    ops.append(replace(family.fusion(name), inverse=apart))
        return tuple(ops)

    def reads(self, context: NamingContext) -> bool:
        return self.target(context, dict) == self.target(context._replace(fused=""), dict)

    def statements(self, family: Family, *, staged: bool = False) -> Statements:
        """The statements of the family file; ``staged``: over pipeline stages. Raises UnsupportedError without any."""
        if self.published:
            return ()
        if self.name not in family.spec.namings:
            known = ", ".join([PUBLISHED, *family.spec.namings])
            raise UnsupportedError(
                f"family `{family.name}` has no {self.name} naming",
                where=family.origin or (),
                hint=f"it has: {known}. Add a `namings: {self.name}:` section in a file given with --family",
            )
        return family.statements(self.name, staged=staged)

    def form(self, family: Family, names: Iterable[str]) -> tuple[str, str]:
        samples = {split_numbers(n)[0].replace("#", "0") for n in names}
        return _published_form(family, samples), _fused_form(family, samples)


def _published_form(family: Family, samples: Collection[str]) -> str:
    """Which of the forms that are published too (``hf_namings``) the names have, else the usual one."""
    for naming in family.spec.hf_namings:
        ops = FamilyDialect(naming).statements(family)
        pairs = [pair for op in ops if isinstance(op, Rename) for pair in op.pairs]
        pairs += [(op.part, op.whole) for op in ops if isinstance(op, Stack)]
        before, after = ([pair[i] for pair in pairs] for i in (0, 1))
        if any(matches(after, s) for s in samples) and not any(matches(before, s) for s in samples):
            return naming
    return PUBLISHED


def _fused_form(family: Family, samples: Collection[str]) -> str:
    for name, spec in family.spec.fusions.items():
        wholes = any(matches((spec.whole,), s) for s in samples)
        parts = any(matches(spec.parts, s) for s in samples)
        if not spec.only_named and wholes != parts and wholes != family.publishes_fused(name):
            return "fuse" if wholes else "unfuse"
    return ""
