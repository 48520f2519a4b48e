"""Names as long as the filesystem allows: what lies beside DST while it is made has a name, too."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from ckpttool.core.plan import Plan
from ckpttool.errors import OutputError
from ckpttool.execute import RunOptions, run
from ckpttool.execute.options import Member
from ckpttool.storage import system
from tests.execute.plans import expected, reshard, written
from tests.execute.test_destination import failing_writes, left, small_parts
from tests.helpers.command import ckpttool

__all__ = ["small_parts"]  # a fixture

FIXTURES = Path(__file__).parents[2] / "fixtures"
PIR = FIXTURES / "paddle_programs/pir/model.json"
MODEL = FIXTURES / "merge/inputs/ft1"
LONG = {
    "247": "n" * 247,
    "248": "n" * 248,
    "255": "n" * 255,
    "two-byte": "ü" * 127 + "n",
    "three-byte": "語" * 85,
    "four-byte": "n" * 3 + "😀" * 63,
    "no-text": os.fsdecode(b"\xff" * 255),
}


@pytest.fixture(params=LONG)
def name(request: pytest.FixtureRequest) -> str:
    return LONG[request.param]


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return reshard(tmp_path / "src", [((512, 768), 0), ((768, 512), 1), ((4096,), None)], 4, 2)


def ending(name: str, suffix: str) -> str:
    """The name, as long, with a suffix."""
    cut = os.fsencode(name)[: 255 - len(suffix)].decode(errors="ignore")
    return cut + suffix


def test_names_beside(tmp_path: Path, name: str) -> None:
    """They are names of this filesystem, the same each time, and others beside another DST."""
    before, after = ".", ".ckpttool-replaced"
    found = system.beside(tmp_path / name, before, after)
    found.touch()
    assert found == system.beside(tmp_path / name, before, after)
    kept, mark, _ = found.name.removeprefix(before).removesuffix(after).rpartition("~")
    assert mark
    assert len(kept) > 50
    assert name.startswith(kept)
    assert system.beside(tmp_path / (name[:-1] + "m"), before, after) != found
    assert system.beside(tmp_path / "short", before, after).name == ".short.ckpttool-replaced"


@pytest.mark.usefixtures("small_parts")
def test_a_directory(tmp_path: Path, plan: Plan, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made, replaced (with and without an exchange of names), interrupted and continued."""
    dst = tmp_path / name
    run(plan, dst)
    run(plan, dst, RunOptions(force=True))
    monkeypatch.setattr(system, "exchange", lambda *_: False)
    run(plan, dst, RunOptions(force=True))
    assert written(dst, plan) == expected(plan)
    with failing_writes(errno.EIO, 900_000), pytest.raises(OutputError, match="Input/output"):
        run(plan, dst, RunOptions(force=True))
    assert len(left(tmp_path)) == 3
    assert run(plan, dst, RunOptions(force=True, resume=True)).bytes_skipped > 0
    assert written(dst, plan) == expected(plan)
    assert left(tmp_path) == sorted(["src", name])


def test_parts(tmp_path: Path, plan: Plan, name: str) -> None:
    dst = tmp_path / name
    results: list[Any] = []
    parts = [
        threading.Thread(target=lambda i=i: results.append(run(plan, dst, RunOptions(member=Member(i, 2)))))
        for i in (1, 2)
    ]
    for one in parts:
        one.start()
    for one in parts:
        one.join()
    assert len(results) == 2
    assert written(dst, plan) == expected(plan)
    assert left(tmp_path) == sorted(["src", name])


def edited(dump: Path) -> Path:
    """The header that was saved, with metadata, so that it needs more room."""
    said = json.loads(dump.read_text())
    dump.write_text(json.dumps(said | {"__metadata__": {"more": "x" * 5000}}))
    return dump


@pytest.mark.parametrize("many", [256, 300, 5000])
@pytest.mark.parametrize("options", [(), ("--force",), ("--resume",), ("--part", "1/2"), ("--dry-run",)])
def test_what_no_file_can_be_called(tmp_path: Path, many: int, options: tuple[str, ...]) -> None:
    """Refused, before anything is made."""
    commands = [
        ("reshard", MODEL, tmp_path / ("n" * many)),
        ("drop-keys", MODEL, tmp_path / ("n" * many), "lm_head.weight"),
        ("convert-json", PIR, tmp_path / ("n" * (many - 12) + ".safetensors")),
    ]
    for command in commands:
        done = ckpttool(*command, *options)
        if "--dry-run" in options and done.code == 0:
            continue  # it makes nothing, and looks at no destination
        assert done.code == 1
        assert done.err.count("error: ") == 1
        assert "longer than the 255 bytes" in done.err or "name too long" in done.err
        assert not left(tmp_path)


def test_files(tmp_path: Path, name: str) -> None:
    """A single file, one in place of another, reports and pictures."""
    if name.startswith("\udcff"):
        pytest.skip("names of reports are text")
    single, page, picture, saved = (tmp_path / ending(name, s) for s in (".safetensors", ".html", ".svg", ".json"))
    for force in ((), ("--force",)):
        done = ckpttool("convert-json", PIR, single, "--names", PIR.parents[1] / "model.pdparams", *force)
        assert done.code == 0, done.err
    saved.write_text(ckpttool("inspect", single, "--header").out)
    for command in (
        ("inspect", MODEL, "--html", page),
        ("inspect", FIXTURES / "llama_tp8", "--ranks", "--svg", picture),
        ("inspect", single, "--set-header", edited(saved)),
        ("drop-keys", MODEL, tmp_path / name, "lm_head.weight", "--manifest", "--verify"),
        (
            "merge",
            MODEL,
            FIXTURES / "merge/inputs/ft2",
            "-o",
            tmp_path / "merged",
            "--report",
            tmp_path / ending(name, ".htm"),
        ),
    ):
        done = ckpttool(*command)
        assert done.code == 0, (command, done.err)
    assert len(left(tmp_path)) == 7
