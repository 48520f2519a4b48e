"""``--check``: the problems of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ckpttool.answers.document import Paragraph, Section
from ckpttool.answers.fields import pick
from ckpttool.core.words import count
from ckpttool.errors import UsageError, plain
from ckpttool.ops.inspect.views.base import InspectedSource, ResultAnswer, View, ViewAnswer, flag, narrows, value

if TYPE_CHECKING:
    from ckpttool.answers.findings import CheckResult

FORMS = ("sarif", "junit", "gitlab", "github")
"""Other forms of findings than text and JSON."""


class CheckView(View["CheckAnswer"]):
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

    def refuse(self, asked: Sequence[View[ViewAnswer]]) -> None:
        if self.findings and not self.check:
            raise UsageError("--findings belongs to --check", hint="add --check")

    def refuse_filters(self) -> None:
        if self.choice.components and not self.values:
            raise UsageError("--only with --check needs --values", hint="add --values")
        if narrows(self.choice):
            raise UsageError("--check does not take filters: it checks the whole checkpoint")

    def look(self, at: InspectedSource) -> CheckAnswer:
        from ckpttool.ops.inspect.check import check

        only = tuple(self.choice.components)
        result = check(at.src, at.options, at.progress, values=self.values, only=only, fleet=at.fleet)
        return CheckAnswer(result, self.findings)


class CheckAnswer(ResultAnswer):
    """Findings, and what was checked."""

    name = "check"
    result: CheckResult
    findings: tuple[str, ...] = ()
    """Other forms to write them in, ``KIND[=FILE]``."""

    def entries(self) -> int:
        return len(self.result.findings)

    def json(self) -> dict[str, Any]:
        found = [pick(f, "id severity where text hint?") for f in self.result.findings]
        return {"path": str(self.result.path), **pick(self.result, "format? ok checked values"), "findings": found}

    def sections(self) -> Iterator[Section]:
        from ckpttool.answers.findings import folded

        result = self.result
        for f, also in folded(result.findings):
            hang = len(f.severity) + 2
            yield Paragraph(f"{f.severity}: {plain(f.text)}{also} [{f.id}]", quiet=True, wrap=True, hang=hang)
            if f.where:
                yield Paragraph(f"  --> {plain(f.where)}", quiet=True, wrap=True, hang=6)
            if f.hint:
                yield Paragraph(f"  hint: {plain(f.hint)}", quiet=True, wrap=True, hang=8)
        gap = "\n" if result.findings else ""
        checked = ", ".join(count(n, what, f"{what}s") for what, n in result.checked.items())
        unread = f"; {result.unread}" if result.unread else ""
        yield Paragraph(f"{gap}{plain(str(result.path))}: {result.counts}\nchecked {checked}{unread}", wrap=True)
