"""``--imports``: what pickles would import when somebody loads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpttool.answers.fields import pick
from ckpttool.ops.inspect.views.base import SCHEMA, Answer, Subject, View, flag

if TYPE_CHECKING:
    from ckpttool.answers.findings import ImportsResult


@dataclass(frozen=True, kw_only=True)
class ImportsView(View):
    """Globals that pickles name, and whether they are dangerous."""

    name = "imports"
    whole = True
    imports: bool = flag("--imports", "What the pickles in SRC would import; exit 3 when one is dangerous.")

    def look(self, at: Subject) -> ImportsAnswer:
        from ckpttool.ops.inspect.imports import list_imports

        return ImportsAnswer(list_imports(at.src))


@dataclass(frozen=True)
class ImportsAnswer(Answer):
    """Globals by file."""

    name = "imports"
    result: ImportsResult

    @property
    def ok(self) -> bool:
        return self.result.ok

    @property
    def notes(self) -> Sequence[str]:
        return self.result.notes

    def json(self) -> tuple[dict[str, Any], int]:
        result = self.result
        found = [pick(i, "file member? offset global=name times verdict") for i in result.found]
        head = {"schema": SCHEMA, "view": self.name, "path": str(result.path), **pick(result, "ok files notes")}
        return {**head, "imports": found}, len(found)
