"""``FamilyDialect``: names that a family file describes: the published ones, and those of its ``namings:``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from ckpttool.dialects.base import Dialect, NamingContext, Shapes, Statements
from ckpttool.errors import UnsupportedError
from ckpttool.layout.family import (
    Drop,
    DropCopy,
    DropLayers,
    Family,
    Fuse,
    OverrideRules,
    Refuse,
    Rename,
    Squeeze,
    Stack,
    Tie,
    Transform,
    Transpose,
    matches,
)
from ckpttool.layout.names import split_numbers
from ckpttool.layout.rules import parse_rule

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
                where=family.origin,
                hint=f"it has: {known}. Add a `namings: {self.name}:` section in a file given with --family",
            )
        out: list[Transform] = []
        for spec in family.spec.namings[self.name]:
            if spec.only_for and family.model_type not in spec.only_for:
                continue
            if spec.rename is not None:
                out.append(Rename(tuple(spec.rename.items())))
            elif spec.fuse is not None:
                out.append(family.fusion(spec.fuse))
            elif spec.unfuse is not None:
                out.append(replace(family.fusion(spec.unfuse), inverse=True))
            elif spec.stack is not None:
                out += [Stack(w, p) for w, p in spec.stack.items()]
            elif spec.transpose is not None:
                out.append(Transpose(tuple(spec.transpose)))
            elif spec.squeeze is not None:
                out.append(Squeeze(tuple(spec.squeeze)))
            elif spec.rules is not None:
                where = f"{family.origin}: namings: {self.name}: "
                out.append(OverrideRules(tuple((p, parse_rule(t, origin=where + p)) for p, t in spec.rules.items())))
            elif spec.refuse is not None:
                out.append(Refuse(tuple(spec.refuse.items())))
            elif spec.drop_layers_from is not None:
                out.append(DropLayers(spec.drop_layers_from))
            elif spec.drop is not None:
                out.append(Drop(tuple(spec.drop)))
            elif spec.tie is not None:
                out += [Tie(n, owner) for n, owner in spec.tie.items()]
            elif spec.tie_as is not None and family.tied:
                pairs = tuple(spec.tie_as.items())
                if staged:
                    out += [Tie(n, owner) for n, owner in pairs]
                else:
                    # Some checkpoints store the tied name as well.
                    out += [*(DropCopy(n, owner) for n, owner in pairs), Rename(tuple((o, n) for n, o in pairs))]
        return tuple(out)

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
