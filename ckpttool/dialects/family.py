"""``FamilyDialect``: names that a family file describes: the published ones, and those of its ``namings:``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ckpttool.dialects.base import Dialect, NamingContext, Shapes, Statements
from ckpttool.layout.family import Family
from ckpttool.layout.statements import Fuse
from ckpttool.layout.unknown import unknown_model

PUBLISHED = "hf"
"""The names that the rules of a family file are for."""
PACKING = (PUBLISHED, "vllm")
"""Dialects of software that reads packed weights (GPTQ, AWQ, bitsandbytes, ...) under their names."""

_MEMORY = "transformers"
"""Naming of its models in memory; the published one where a family has no other."""


class FamilyDialect(Dialect):
    """One of the ``namings:`` of the family files."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.published = self.whole_alone = name == PUBLISHED
        self.packs = name in PACKING

    def check_known(self, context: NamingContext, shapes: Shapes, root: str) -> None:
        if context.family.name == "none" and not self._is_published_by(context.family):
            raise unknown_model(f"the names of {self.name} depend on the model", shapes, context.config, root)

    def target(self, context: NamingContext, shapes: Callable[[], Shapes]) -> Statements:
        """The statements of the family file, plus all its fusions if ``fused``.

        A version whose files are cut in another way has a naming of its own, called NAME-VERSION.
        """
        del shapes
        family = context.family
        versioned = f"{self.name}-{context.version}"
        of_version = FamilyDialect(versioned) if versioned in family.spec.namings else self
        ops = list(of_version.statements(family, staged=context.mesh.pp > 1))
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

    def version_called(self, name: str) -> str:
        own = f"{self.name}-"
        return name.removeprefix(own) if name.startswith(own) else ""

    def reads(self, context: NamingContext) -> bool:
        return self.target(context, dict) == self.target(context._replace(fused=""), dict)

    def statements(self, family: Family, *, staged: bool = False) -> Statements:
        """The statements of the family file; ``staged``: over pipeline stages. Raises UnsupportedError without any."""
        return () if self._is_published_by(family) else family.statements(self.name, staged=staged)

    def _is_published_by(self, family: Family) -> bool:
        return self.published or (self.name == _MEMORY and _MEMORY not in family.spec.namings)
