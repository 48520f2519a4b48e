"""``--check``: the problems of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpttool.answers.fields import pick
from ckpttool.errors import UsageError
from ckpttool.ops.inspect.views.base import SCHEMA, Answer, Subject, View, flag, narrows, value

if TYPE_CHECKING:
    from ckpttool.answers.findings import CheckResult

FORMS = ("sarif", "junit", "gitlab", "github")
"""Other forms of findings than text and JSON."""


@dataclass(frozen=True, kw_only=True)
class CheckView(View):
    """Every problem that headers show; with ``values`` those that elements show, too."""

    name = "check"
    check: bool = flag("--check", "Look for problems, and prove a manifest's checksums; exit 3 on an error.")
    findings: tuple[str, ...] = value(
        "--findings",
        "KIND[=FILE]",
        "With --check: write the findings as sarif, junit, gitlab (Code Quality) or github (annotations).",
        tuple,
        values=FORMS,
    )
    values: bool = False

    @property
    def slow(self) -> bool:
        return True

    @property
    def reads_elements(self) -> bool:
        return self.check

    @property
    def outside_report(self) -> str:
        return ""

    def refuse(self, asked: Sequence[View]) -> None:
        if self.findings and not self.check:
            raise UsageError("--findings belongs to --check")

    def refuse_filters(self) -> None:
        if self.choice.components and not self.values:
            raise UsageError("--only with --check says whose elements --values reads", hint="add --values")
        if narrows(self.choice):
            raise UsageError("--check looks at a whole checkpoint or at what it names; filters do not apply")

    def look(self, at: Subject) -> CheckAnswer:
        from ckpttool.ops.inspect.check import check

        only = tuple(self.choice.components)
        result = check(at.src, at.options, at.progress, values=self.values, only=only, fleet=at.fleet)
        return CheckAnswer(result, self.findings)


@dataclass(frozen=True)
class CheckAnswer(Answer):
    """Findings, and what was checked."""

    name = "check"
    result: CheckResult
    findings: tuple[str, ...]
    """Other forms to write them in, ``KIND[=FILE]``."""

    @property
    def ok(self) -> bool:
        return self.result.ok

    @property
    def notes(self) -> Sequence[str]:
        return self.result.notes

    def json(self) -> tuple[dict[str, Any], int]:
        result = self.result
        found = {"findings": [pick(f, "id severity where text hint?") for f in result.findings]}
        head = {"schema": SCHEMA, "view": self.name, "path": str(result.path), **pick(result, "format? ok checked")}
        return head | found, len(result.findings)
