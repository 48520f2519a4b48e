"""Findings in the forms that other software shows: SARIF, JUnit, GitLab's Code Quality and GitHub's annotations.

A kind is a function from a CheckResult to text, and a row in ``KINDS``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ckpttool.answers.findings import ERROR, INFO, WARNING, file_of, folded
from ckpttool.core.words import count, one_of
from ckpttool.errors import UsageError, plain
from ckpttool.report.explained import PAGES, explanations
from ckpttool.report.files import refuse_others, save
from ckpttool.report.text import write
from ckpttool.version import __version__

if TYPE_CHECKING:
    from ckpttool.answers.findings import CheckResult, Finding


def _message(finding: Finding, also: str) -> str:
    text = plain(finding.text) + also
    return f"{text} (hint: {plain(finding.hint)})" if finding.hint else text


def _file(finding: Finding, result: CheckResult) -> str:
    """The file or directory of a finding, below the current directory where it lies there; "/" between names.

    Both GitHub and GitLab want paths below the repository, in which a pipeline runs its commands.
    """
    where = file_of(finding).split("; ")[0] or str(result.path)
    if "://" in where:
        return where
    path = os.path.abspath(where)  # noqa: PTH100 - a link in the repository is the file that people know
    here = os.path.abspath(".")  # noqa: PTH100
    return os.path.relpath(path, here) if os.path.commonpath([path, here]) == here else path


def _uri(finding: Finding, result: CheckResult) -> str:
    file = _file(finding, result)
    if "://" in file:
        return quote(file, safe=":/@%?=&", errors="surrogatepass")
    return ("file://" if file.startswith("/") else "") + quote(file, errors="surrogatepass")


def _fingerprint(finding: Finding, result: CheckResult) -> str:
    """The same for the same problem in the next run, so that it is shown as known."""
    said = "\0".join([finding.id, finding.text, _file(finding, result)])
    return sha256(said.encode(errors="surrogatepass")).hexdigest()[:32]


def sarif(result: CheckResult) -> str:
    """SARIF 2.1.0 (OASIS), with what GitHub's code scanning asks for beside it: a line and a fingerprint.

    A checkpoint has no lines, so each result is at line 1 of its file.
    """
    found = folded(result.findings)
    rules = list(dict.fromkeys(f.id for f, _ in found))
    levels = {ERROR: "error", WARNING: "warning", INFO: "note"}
    results = [
        {
            "ruleId": f.id,
            "ruleIndex": rules.index(f.id),
            "level": levels[f.severity],
            "message": {"text": _message(f, also)},
            "locations": [
                {
                    "physicalLocation": {
                        "artifactLocation": {"uri": _uri(f, result)},
                        "region": {"startLine": 1},
                    }
                }
            ],
            "partialFingerprints": {"primaryLocationLineHash": _fingerprint(f, result)},
        }
        for f, also in found
    ]
    severity, site = {f.id: f.severity for f, _ in found}, _documentation()
    driver = {
        "name": "ckpttool",
        "semanticVersion": __version__,
        **({"informationUri": site} if site else {}),
        "rules": [
            {
                "id": id_,
                "shortDescription": {"text": id_.replace("-", " ")},
                **_help(id_, site),
                "defaultConfiguration": {"level": levels[severity[id_]]},
            }
            for id_ in rules
        ],
    }
    document = {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": driver},
                "invocations": [{"executionSuccessful": True}],
                "results": results,
            }
        ],
    }
    return json.dumps(document, indent=2) + "\n"


def _help(id_: str, site: str) -> dict[str, Any]:
    """What ``ckpttool explain`` says of a finding, and the page of the documentation that says it."""
    table, said = next(iter(explanations(id_).items()))
    meaning, remedy = said["meaning"], said.get("what to do", "")
    plain_text = f"{meaning}. What to do: {remedy}." if remedy else f"{meaning}."
    markdown = f"{meaning}.\n\n**What to do:** {remedy}." if remedy else f"{meaning}."
    page = PAGES[table].removeprefix("docs/").removesuffix(".md")
    return {
        "fullDescription": {"text": meaning},
        "help": {"text": plain_text, "markdown": markdown},
        **({"helpUri": f"{site}/{page}.html"} if site else {}),
    }


def _documentation() -> str:
    """The address of the documentation, as the installed package states it; "" for none."""
    from importlib.metadata import PackageNotFoundError, metadata

    try:
        urls = metadata("ckpttool").get_all("Project-URL") or []
    except PackageNotFoundError:
        return ""
    return next((u.partition(", ")[2].rstrip("/") for u in urls if u.startswith("Documentation, ")), "")


def junit(result: CheckResult) -> str:
    """JUnit's XML as Jenkins, GitLab and GitHub's actions read it: a failed test for each error.

    A warning passes, and says what it is in its output; what was checked is a passed test for each noun.
    """
    from xml.sax.saxutils import escape, quoteattr  # which loads HTTP and TLS

    found = folded(result.findings)
    suite = quoteattr(_xml(f"ckpttool check {result.path}"))
    cases = []
    for noun, number in result.checked.items():
        cases.append(f'    <testcase classname={suite} name="{escape(count(number, noun, f"{noun}s"))} checked"/>')
    if result.unread:
        cases.append(f"    <testcase classname={suite} name={quoteattr(_xml(result.unread))}><skipped/></testcase>")
    for f, also in found:
        file = _xml(_file(f, result))
        name = quoteattr(f"{f.id}: {file}")
        said = _xml(_message(f, also))
        if f.severity == ERROR:
            inside = f"<failure type={quoteattr(f.id)} message={quoteattr(said)}>{escape(said)}</failure>"
        else:
            inside = f"<system-out>{escape(f'{f.severity}: {said}')}</system-out>"
        cases.append(f"    <testcase classname={suite} name={name} file={quoteattr(file)}>{inside}</testcase>")
    failures = sum(f.severity == ERROR for f, _ in found)
    counts = f'tests="{len(cases)}" failures="{failures}" errors="0"'
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        f'<testsuites name="ckpttool" {counts}>',
        f"  <testsuite name={suite} {counts}>",
        *cases,
        "  </testsuite>",
        "</testsuites>",
    ]
    return "\n".join(lines) + "\n"


def _xml(text: str) -> str:
    """Replaces the characters that XML 1.0 cannot hold in any form."""
    return re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\N{REPLACEMENT CHARACTER}", text)


def gitlab(result: CheckResult) -> str:
    """GitLab's Code Quality report, which merge requests show: https://docs.gitlab.com/ci/testing/code_quality."""
    severity = {ERROR: "critical", WARNING: "minor", INFO: "info"}
    entries = [
        {
            "description": _message(f, also),
            "check_name": f"ckpttool/{f.id}",
            "fingerprint": _fingerprint(f, result),
            "severity": severity[f.severity],
            "location": {"path": plain(_file(f, result)), "lines": {"begin": 1}},
        }
        for f, also in folded(result.findings)
    ]
    return json.dumps(entries, indent=2) + "\n"


def github(result: CheckResult) -> str:
    """Workflow commands, which become annotations of a pull request where a step prints them.

    https://docs.github.com/actions/reference/workflows-and-actions/workflow-commands
    """
    levels = {ERROR: "error", WARNING: "warning", INFO: "notice"}
    lines = []
    for f, also in folded(result.findings):
        properties = {"file": _file(f, result), "title": f"ckpttool {f.id}"}
        said = ",".join(f"{key}={_property(text)}" for key, text in properties.items())
        lines.append(f"::{levels[f.severity]} {said}::{_data(_message(f, also))}\n")
    return "".join(lines)


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(plain(text)).replace(":", "%3A").replace(",", "%2C")


KINDS: dict[str, Callable[[CheckResult], str]] = {
    "sarif": sarif,
    "junit": junit,
    "gitlab": gitlab,
    "github": github,
}

BEGINS = {"sarif": '{\n  "$schema"', "junit": "<?xml", "gitlab": "[", "github": "::"}
"""The first characters of every file of a kind, unless it is empty."""


def parsed(asked: Sequence[str]) -> list[tuple[str, Path | None]]:
    """(kind, file or None for stdout) of each ``KIND[=FILE]``. Raises UsageError; OutputError for a file of others."""
    out: list[tuple[str, Path | None]] = []
    for text in asked:
        kind, given, file = text.partition("=")
        if not kind:
            raise UsageError(f"--findings `{text}`: the kind is missing", hint=f"one of {', '.join(KINDS)}")
        one_of(kind, "--findings", *KINDS)
        if given and not file:
            raise UsageError(
                f"--findings {text}: the file name is missing", hint=f"--findings {kind}=FILE, or {kind} for stdout"
            )
        place = Path(file) if file not in ("", "-") else None
        if place is not None:
            refuse_others(place, "the findings", BEGINS[kind])
        out.append((kind, place))
    if sum(file is None for _, file in out) > 1:
        raise UsageError("--findings: only one kind can go to stdout", hint=f"name a file: --findings {out[0][0]}=FILE")
    return out


def write_findings(result: CheckResult, asked: Sequence[tuple[str, Path | None]]) -> bool:
    """Write each of them. Returns whether one of them went to stdout."""
    for kind, file in asked:
        text = KINDS[kind](result)
        if file is None:
            write(text)
        else:
            save(file, text, "the findings", BEGINS[kind])
    return any(file is None for _, file in asked)
