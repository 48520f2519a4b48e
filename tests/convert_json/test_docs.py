"""docs/findings.md lists every finding, and every finding is raised by some test."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpttool.answers.findings import CHECKPOINT, PROGRAM
from ckpttool.ops.convert_json.check import check_program
from tests.convert_json import test_params, test_pdmodel, test_pir
from tests.convert_json.accepted import recorded
from tests.convert_json.programs import Parameter, parameter, program, records, usual, write
from tests.docs.runner import ROOT

PAGES = ROOT / "docs"
PROGRAMS = ROOT / "fixtures" / "paddle_programs"

TABLES = {id_ for id_, _ in test_pir.WRONG.values()} | {id_ for id_, _ in test_params.WRONG.values()}
TABLES |= test_pdmodel.WRONG.keys()
"""What the tables of the readers' tests raise."""


def rows() -> list[list[str]]:
    """The cells of the table of findings."""
    page = (PAGES / "findings.md").read_text(encoding="utf-8")
    table = page.split("<!-- begin findings -->\n")[1].split("<!-- end findings -->")[0].strip().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def test_every_finding_is_explained() -> None:
    assert [(row[0], row[1]) for row in rows()] == [(f"`{id_}`", severity) for id_, severity in PROGRAM.items()]


def test_rows_are_complete() -> None:
    assert {len(row) for row in rows()} == {4}
    assert all(cell for row in rows() for cell in row)


WORDS = {
    "refused": "refuses",
    "crash or hang": "crashes",
    "accepted, same output": "loads",
    "accepted, other output": "wrong",
}
"""What the page calls the answers in fixtures/paddle_programs/accepted.json."""
LOADERS = ("`jit.load`", "`load_inference_model`", "predictor")


def test_what_paddle_does_was_measured() -> None:
    """A row has every answer that Paddle gave; it may have more, of files that were not measured here."""
    said: dict[str, list[set[str]]] = {}
    for name, table in recorded().items():
        for case in table.values() if name != "paddle" else ():
            answers = said.setdefault(case["id"], [set(), set(), set()])
            for answer, loader in zip(answers, "JSI", strict=True):
                answer.add(WORDS[case[loader]])
    for row in rows():
        for loader, answer in zip(LOADERS, said.get(row[0].strip("`"), [set()] * 3), strict=True):
            own = [part.partition(": ")[2] for part in row[3].split("; ") if loader in part]
            assert answer <= set(re.findall(r"\w+", "; ".join(own) or row[3])), row


# -- raised by no table: what only the whole check can tell


def unreadable(folder: Path) -> set[str]:
    return {f.id for f in check_program(write(folder), folder / "none.pdiparams").findings}


def cut_off(folder: Path) -> set[str]:
    path = write(folder)
    path.write_bytes(path.read_bytes()[:-1])
    return {f.id for f in check_program(path).findings}


def patched(folder: Path) -> set[str]:
    data = usual()
    data["base_code"]["version"] = 3
    return {f.id for f in check_program(write(folder, data)).findings}


def float8(folder: Path) -> set[str]:
    p: Parameter = ("w", "F8_E4M3", [4])
    path = write(folder, program([parameter(1, *p)]), b"".join(records([p])))
    return {f.id for f in check_program(path).findings}


def infinite(folder: Path) -> set[str]:  # noqa: ARG001
    return {f.id for f in check_program(PROGRAMS / "inf.json").findings}


def other_names(folder: Path) -> set[str]:  # noqa: ARG001
    return {f.id for f in check_program(PROGRAMS / "tied/model.json", names=PROGRAMS / "model.pdparams").findings}


def names_of_another_run(folder: Path) -> set[str]:
    (folder / "names.pdparams").write_bytes(pickle.dumps({"StructuredToParameterName@@": {"w": "other_0"}}))
    return {f.id for f in check_program(write(folder), names=folder / "names.pdparams").findings}


def one_name_for_two(folder: Path) -> set[str]:
    (folder / "names.pdparams").write_bytes(pickle.dumps({"StructuredToParameterName@@": {"steps": "linear_0.w_0"}}))
    return {f.id for f in check_program(write(folder), names=folder / "names.pdparams").findings}


WHOLE: dict[Callable[[Path], set[str]], set[str]] = {
    unreadable: {"unreadable"},
    cut_off: {"json"},
    patched: {"version-patched"},
    float8: {"float8"},
    infinite: {"attribute-inf"},
    other_names: {"names-missing", "names-shape"},
    names_of_another_run: {"names-none"},
    one_name_for_two: {"names-missing", "names-twice"},
}


@pytest.mark.parametrize("make", WHOLE, ids=lambda f: f.__name__)
def test_found_by_the_whole_check(make: Callable[[Path], set[str]], tmp_path: Path) -> None:
    assert make(tmp_path) == WHOLE[make]


def test_every_finding_is_raised() -> None:
    raised = TABLES.union(*WHOLE.values())
    assert PROGRAM.keys() - raised == set()
    assert raised - PROGRAM.keys() - CHECKPOINT.keys() == set()
