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
from ckpttool.core.words import count, either
from ckpttool.errors import UsageError
from ckpttool.report.text import width

_HERE = Path(__file__).parent
CLASSES = ("usage", "corrupt", "incomplete", "conflict", "layout", "unsupported", "access", "output", "verify")
"""Of errors, as ``--json`` calls them: each has a page."""
FINDINGS = ("findings", "findings-of-programs")
"""Tables with a row for each finding."""
PAGES = {**dict.fromkeys(CLASSES, "docs/errors.md"), **dict.fromkeys(FINDINGS, "docs/findings.md")}
"""The page of docs/ that has each as a section; links are relative to docs/."""
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_WORDS = ("severity", "meaning", "what to do")


def document(name: str) -> Document:
    """The explanation of a name; all names where ``name`` is "". Raises UsageError."""

    def text(columns: int = 0) -> str:
        return (explain(name, columns) if name else listed(columns)).removesuffix("\n")

    def json() -> dict[str, str | None]:
        return {"schema": "ckpttool.explain/1", "name": name or None, "text": text() + "\n"}

    return Document(json, lambda: [PerMedium(lambda: [Paragraph(text(width()))], lambda: [Paragraph(text())])])


def page(name: str) -> str:
    """The Markdown of a page."""
    return _HERE.joinpath(f"{name}.md").read_text(encoding="utf-8")


def explain(name: str, columns: int = 0) -> str:
    """What a class of errors, a finding or a merge method is, as plain text, broken to fit so many columns if there are
    any. Raises UsageError for any other name.
    """
    wanted = name.strip().lower().removesuffix("error").strip("[]")
    if wanted in CLASSES:
        return plain_text(page(wanted), columns)
    if wanted == "methods":
        return _methods(columns)
    found = [_rows(said, _entry(wanted, table), columns) for table, said in explanations(wanted).items()]
    if found:
        return "\n".join(found)
    from ckpttool.kernels.merge import METHODS  # with numpy

    if wanted in METHODS:
        return _rows(_method(wanted), f"{wanted}: a merge method", columns)
    from difflib import get_close_matches

    close = get_close_matches(wanted[:100], {"methods", *CLASSES, *SEVERITY, *METHODS}, n=3)
    meant = f"did you mean {either(close)}? " if close else ""
    raise UsageError(f"nothing is called `{name}`", hint=f"{meant}`ckpttool explain` lists all names")


def listed(columns: int = 0) -> str:
    """All names that have an explanation."""
    classes = "\n".join(f"  {name:12} {page(name).splitlines()[0].lstrip('# ')}" for name in CLASSES)
    names = {
        "Findings of checks": list(SEVERITY),
        "Merge methods (`ckpttool explain methods` lists their uses)": list(_cells("methods")),
    }
    return f"Classes of errors:\n{classes}\n" + "".join(
        f"\n{title}:\n{_broken('  ' + ' '.join(found), columns or 100, 2)}\n" for title, found in names.items()
    )


def explanations(finding: str) -> dict[str, dict[str, str]]:
    """By table, what it says of a finding: severity, meaning, and mostly what to do; {} for none."""
    tables = {name: _cells(name).get(finding) for name in FINDINGS}
    return {
        name: {title: cells[title] for title in _WORDS if title in cells} for name, cells in tables.items() if cells
    }


def _entry(finding: str, table: str) -> str:
    return f"{finding}: a finding{' of Paddle programs' if table == FINDINGS[1] else ''}"


def _cells(name: str) -> dict[str, dict[str, str]]:
    """The rows of a page's table by their first cell, which is code, and then by column."""
    header: list[str] = []
    out: dict[str, dict[str, str]] = {}
    for line in page(name).splitlines():
        cells = [c.strip() for c in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if cells and cells[0] in ("identifier", "method"):
            header = cells
        elif cells and header and cells[0].startswith("`"):
            out[cells[0].strip("`")] = dict(zip(header, map(_without_links, cells), strict=True))
    return out


def _methods(columns: int) -> str:
    """All merge methods, and when to use them."""
    rows = {name: said["when to use it"] for name, said in _cells("methods").items()}
    return _rows(rows, "Merge methods (`ckpttool explain METHOD` has formula and parameters)", columns)


def _method(name: str) -> dict[str, str]:
    """What there is to say of a merge method."""
    from ckpttool.kernels.merge import METHODS

    m = METHODS[name]
    low, high = m.models
    models = count(low, "model") if low == high else f"{low} or more models" if high is None else f"{low} to {high}"
    base = {"needed": "and a base", "allowed": "with or without a base", "refused": "no base"}[m.base]
    out = {
        "use it for": _cells("methods")[name]["when to use it"],
        "formula": m.formula,
        "symbols": "b the base, x_i the models, d_i = x_i - b, t_i = d_i or x_i without a base, w_i weights, N models",
        "takes": f"{models}, {base}",
    }
    for schema, of in ((m.per_model, ", for each model"), (m.whole, "")):
        for parameter, p in schema.items():
            value = "must be given" if p.default is None else f"default {str(p.default).lower()}"
            out[parameter] = f"{value}{of}{': ' if p.help else ''}{p.help}"
    return out | ({"paper": m.paper} if m.paper else {})


def _rows(said: dict[str, str], title: str, columns: int) -> str:
    """A title, and below it a line for each label."""
    wide = max(map(len, said)) + 3
    lines = [f"  {label + ':':{wide}}{text}" for label, text in said.items()]
    return "\n".join([_broken(title, columns, 2), *(_broken(line, columns, wide + 2) for line in lines)]) + "\n"


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
