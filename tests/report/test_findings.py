"""Findings in the forms that other software shows, read back by what knows nothing of how they were written."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from email.message import Message
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.answers.findings import CHECKPOINT, SEVERITY, CheckResult, Finding
from ckpttool.cli import choices
from ckpttool.errors import OutputError, UsageError
from ckpttool.report.explained import CLASSES, explain
from ckpttool.report.findings import KINDS, github, gitlab, junit, parsed, sarif, write_findings
from tests.helpers.command import Done, ckpttool

HOSTILE = "a <b> & \"c\" ::error::% ,=\x00\x1b[31m\r\n\u202e \ud800 'd'"


def result(*findings: Finding) -> CheckResult:
    return CheckResult(Path("model"), "hf", list(findings), {"file": 2, "tensor": 39})


FOUND = result(
    Finding("truncated", "tensor `a` ends at byte 9", "model/x.safetensors [bytes 0..9)"),
    Finding("truncated", "tensor `b` ends at byte 19", "model/x.safetensors [bytes 9..19)"),
    Finding("no-index", "2 shards have no index", "model", "`ckpttool reshard` writes one"),
    Finding("config-missing", "there is no config.json", "model"),
)


def test_the_command_line_knows_all_kinds() -> None:
    assert tuple(KINDS) == choices.FINDINGS


def read_xml(text: str) -> ET.Element:
    return ET.fromstring(text)  # noqa: S314 - written a line before


def test_sarif_says_where_and_how_bad() -> None:
    (run,) = json.loads(sarif(FOUND))["runs"]
    assert [r["level"] for r in run["results"]] == ["error", "warning", "note"]
    first = run["results"][0]
    assert first["message"]["text"] == "tensor `a` ends at byte 9, and 1 more like it"
    assert first["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "model/x.safetensors"
    for r in run["results"]:
        assert run["tool"]["driver"]["rules"][r["ruleIndex"]]["id"] == r["ruleId"]


def test_sarif_explains_its_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``ckpttool explain`` does, with a link where the package says where its documentation is."""
    every = result(*[Finding(id_, "text") for id_ in SEVERITY])
    driver = json.loads(sarif(every))["runs"][0]["tool"]["driver"]
    assert [r["id"] for r in driver["rules"]] == list(SEVERITY)
    for rule in driver["rules"]:
        assert rule["fullDescription"]["text"] in explain(rule["id"]) or rule["id"] in CLASSES
        assert rule["help"]["text"].startswith(rule["fullDescription"]["text"])
        assert "](" not in rule["help"]["markdown"]
        assert "helpUri" not in rule
    said = Message()
    said["Project-URL"] = "Documentation, https://example.org/docs/"
    monkeypatch.setattr("importlib.metadata.metadata", lambda _: said)
    driver = json.loads(sarif(every))["runs"][0]["tool"]["driver"]
    uris = {r["id"]: r["helpUri"] for r in driver["rules"]}
    assert driver["informationUri"] == "https://example.org/docs"
    assert uris["truncated"] == "https://example.org/docs/findings.html"
    assert uris["params-count"] == "https://example.org/docs/findings.html"


def test_a_fingerprint_is_of_the_problem_alone() -> None:
    def prints(found: CheckResult) -> list[str]:
        results = json.loads(sarif(found))["runs"][0]["results"]
        return [r["partialFingerprints"]["primaryLocationLineHash"] for r in results]

    assert prints(result(*reversed(FOUND.findings)))[0] == prints(FOUND)[2]
    assert len(set(prints(FOUND))) == 3
    assert [e["fingerprint"] for e in json.loads(gitlab(FOUND))] == prints(FOUND)


def test_junit_fails_for_errors_only() -> None:
    root = read_xml(junit(FOUND))
    (suite,) = root
    assert (suite.get("tests"), suite.get("failures")) == ("5", "1")
    cases = suite.findall("testcase")
    assert len(cases) == 5
    assert [c.get("name") for c in cases if c.find("failure") is not None] == ["truncated: model/x.safetensors"]
    assert cases[1].get("name") == "39 tensors checked"
    assert "warning: 2 shards have no index (hint: `ckpttool" in (cases[3].findtext("system-out") or "")


def test_junit_skips_what_was_not_read() -> None:
    unread = result()
    unread.unread = "values not checked (--values)"
    cases = read_xml(junit(unread))[0].findall("testcase")
    assert [c.get("name") for c in cases if c.find("skipped") is not None] == ["values not checked (--values)"]
    assert read_xml(junit(unread)).get("tests") == "3"


def test_github_annotates_files() -> None:
    assert github(FOUND).splitlines()[:2] == [
        "::error file=model/x.safetensors,title=ckpttool truncated::tensor `a` ends at byte 9, and 1 more like it",
        "::warning file=model,title=ckpttool no-index::2 shards have no index (hint: `ckpttool reshard` writes one)",
    ]


def test_paths_are_below_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    inside = result(Finding("size", "x", str(tmp_path / "a b" / "ü.safetensors")))
    assert json.loads(gitlab(inside))[0]["location"]["path"] == "a b/ü.safetensors"
    uri = json.loads(sarif(inside))["runs"][0]["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]
    assert uri == {"uri": "a%20b/%C3%BC.safetensors"}
    outside = result(Finding("size", "x", str(tmp_path.parent / "m")), Finding("size", "y", "s3://b/m/x y.safetensors"))
    found = json.loads(sarif(outside))["runs"][0]["results"]
    uris = [r["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for r in found]
    assert uris == [f"file://{tmp_path.parent}/m", "s3://b/m/x%20y.safetensors"]


@given(
    st.sampled_from(sorted(CHECKPOINT)),
    st.text() | st.just(HOSTILE),
    st.text() | st.just(HOSTILE),
    st.text() | st.just(HOSTILE),
)
def test_hostile_texts_stay_texts(id_: str, text: str, where: str, hint: str) -> None:
    found = result(Finding(id_, text, where.replace("\0", ""), hint))
    assert len(json.loads(sarif(found))["runs"][0]["results"]) == 1
    assert len(json.loads(gitlab(found))) == 1
    assert len(read_xml(junit(found))[0]) == 3
    (line,) = github(found).split("\n")[:-1]
    assert re.fullmatch(r"::(error|warning|notice) file=[^,:]*,title=ckpttool [a-z0-9-]+::.*", line)
    assert all("\x1b" not in kind(found) for kind in KINDS.values())


def check(*more: str) -> Done:
    return ckpttool("inspect", "fixtures/llama_tp8", "--check", *more)


def test_files_and_stdout(tmp_path: Path) -> None:
    files = ["--findings", f"junit={tmp_path}/j.xml", "--findings", f"sarif={tmp_path}/s.json"]
    done = check(*files, "--findings", "github")
    assert (done.code, done.out) == (0, "")
    assert json.loads((tmp_path / "s.json").read_text())["runs"][0]["results"] == []
    assert read_xml((tmp_path / "j.xml").read_text()).get("failures") == "0"
    assert "checked" in check("--findings", f"gitlab={tmp_path}/q.json").out


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["sarf"], "did you mean|not one of"),
        ([""], "the kind is missing"),
        (["junit="], "the file name is missing"),
        (["junit", "github"], "only one kind can go to stdout"),
    ],
)
def test_wrong_ones_are_named(asked: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parsed(asked)


def test_what_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="the findings cannot be written"):
        write_findings(FOUND, parsed([f"junit={tmp_path}/no/j.xml"]))


def test_without_junit_no_xml_is_loaded() -> None:
    code = "import sys, ckpttool.report.findings; print({'xml.sax', 'urllib.request', 'ssl'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
