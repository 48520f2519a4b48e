"""What an error or a finding of a check means: texts that ``ckpttool explain`` prints, and that are sections in docs/.

A text is Markdown. ``NAME.md`` is about a class of errors, the other two have a table with a row for each finding.
scripts/make_reference.py puts them into docs/errors.md and docs/findings.md.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from ckpttool.answers.document import Document, Paragraph, PerMedium
from ckpttool.answers.findings import SEVERITY
from ckpttool.errors import UsageError
from ckpttool.report.tables import width

_HERE = Path(__file__).parent
CLASSES = ("usage", "corrupt", "incomplete", "conflict", "layout", "unsupported", "access", "output", "verify")
"""Of errors, as ``--json`` calls them: each has a page."""
PAGES = {
    **dict.fromkeys(CLASSES, "docs/errors.md"),
    "findings": "docs/findings.md",
    "findings-of-programs": "docs/findings.md",
}
"""The page of docs/ that has each as a section; links are relative to docs/."""
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_WORDS = ("severity", "meaning", "what to do")


def document(name: str) -> Document:
    """What a class of errors or a finding means; the names of all where ``name`` is "". Raises UsageError."""

    def text(columns: int = 0) -> str:
        return (explain(name, columns) if name else listed(columns)).removesuffix("\n")

    def json() -> dict[str, str | None]:
        return {"schema": "ckpttool.explain/1", "name": name or None, "text": text() + "\n"}

    return Document(json, lambda: [PerMedium(lambda: [Paragraph(text(width()))], lambda: [Paragraph(text())])])


def page(name: str) -> str:
    """The Markdown of a page."""
    return _HERE.joinpath(f"{name}.md").read_text(encoding="utf-8")


def explain(name: str, columns: int = 0) -> str:
    """What a class of errors or a finding means, as plain text, broken to fit so many columns if there are any.

    Raises UsageError for what is neither.
    """
    wanted = name.strip().lower().removesuffix("error").strip("[]")
    if wanted in CLASSES:
        return plain_text(page(wanted), columns)
    found = [text for p in ("findings", "findings-of-programs") if (text := _row(p, wanted, columns))]
    if not found:
        from difflib import get_close_matches

        close = get_close_matches(wanted[:100], [*CLASSES, *SEVERITY], n=1)
        meant = f"did you mean {close[0]}? " if close else ""
        hint = f"{meant}`ckpttool explain` lists all"
        raise UsageError(f"`{name}` is not a class of errors, and not a finding", hint=hint)
    return "\n".join(found)


def listed(columns: int = 0) -> str:
    """All classes of errors, and all findings."""
    findings = textwrap.fill(
        " ".join(SEVERITY), columns or 100, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
    )
    classes = "\n".join(f"  {name:12} {page(name).splitlines()[0].lstrip('# ')}" for name in CLASSES)
    return f"Classes of errors:\n{classes}\n\nFindings of checks:\n{findings}\n"


def _row(name: str, finding: str, columns: int) -> str:
    """The row of a finding, a line for each cell."""
    header: list[str] = []
    for line in page(name).splitlines():
        cells = [c.strip() for c in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if cells and cells[0] == "identifier":
            header = cells
        elif cells and header and cells[0] == f"`{finding}`":
            of = " of Paddle programs" if name != "findings" else ""
            said = dict(zip(header, map(_without_links, cells), strict=True))
            lines = [f"{finding}: a finding{of}"]
            lines += [f"  {title + ':':12} {said[title]}" for title in _WORDS if title in said]
            return "\n".join(_broken(line, columns, 15) for line in lines) + "\n"
    return ""


def _broken(line: str, columns: int, indent: int) -> str:
    """A long line in several, below its own text; as it is without columns."""
    if len(line) <= columns or not columns:
        return line
    return textwrap.fill(line, columns, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def _paragraphs(text: str) -> list[str]:
    """Lines of Markdown, those of one paragraph or item as one line."""
    out: list[str] = []
    for line in text.splitlines():
        if line and out and out[-1] and not line.startswith(("#", "- ", "|")) and not out[-1].startswith(("#", "|")):
            out[-1] += " " + line.strip()
        else:
            out.append(line)
    return out


def plain_text(markdown: str, columns: int = 0) -> str:
    """A page for a terminal: no marks of Markdown, blocks indented, links as their words, paragraphs refilled."""
    out: list[str] = []
    for number, part in enumerate(re.split(r"^```.*\n", markdown.partition("\n**Next:**")[0], flags=re.MULTILINE)):
        if number % 2:
            out += [f"    {line}".rstrip() for line in part.splitlines()]
            continue
        prose = _without_links(part)
        for line in _paragraphs(prose) if columns else prose.splitlines():
            if line.startswith("#"):
                title = line.lstrip("# ")
                out += [title, ("=" if line.startswith("# ") else "-") * len(title)]
            elif not line.startswith("| ---"):
                out.append(_broken(line, columns, 2 if line.startswith("- ") else 0))
    return "\n".join(out).strip("\n") + "\n"


def _without_links(text: str) -> str:
    return _LINK.sub(r"\1", text)
