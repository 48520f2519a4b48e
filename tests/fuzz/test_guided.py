"""That guided fuzzing finds what it looks for, and keeps it. `make fuzz` runs this: only there is atheris installed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz import guided
from tests.fuzz.targets import Target

pytest.importorskip("atheris")
if "PYTEST_XDIST_WORKER" in os.environ:
    pytest.skip("libFuzzer limits the whole process", allow_module_level=True)


def _raise(_: bytes) -> None:
    raise KeyError("dtype")


def _hang(_: bytes) -> None:
    while True:
        pass


def _grow(_: bytes) -> None:
    bytes(bytearray(b"x") * ((guided.MEMORY + 200) << 20))
    raise MemoryError  # for a machine on which that was done before libFuzzer looked


def _run(
    target: Callable[[bytes], Any], tmp_path: Path, limits: tuple[str, ...] = ("-max_total_time=1",)
) -> guided.Ran:
    seeds = (b"abc", b"abcdefg")
    only_long = Target(lambda data: target(data) if len(data) > 3 else None, seeds)
    return guided.Run("any", only_long, limits, tmp_path, tmp_path / "log").came_to()


@pytest.mark.parametrize(
    ("broken", "what"), [(_raise, "KeyError: 'dtype'"), (_hang, "timeout"), (_grow, "out-of-memory|MemoryError")]
)
def test_what_breaks_a_reader_is_found_and_kept(
    broken: Callable[[bytes], None], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guided, "SECONDS", 1)
    found = _run(broken, tmp_path)
    assert re.search(what, found.finding), found
    (kept,) = tmp_path.glob("broken-any-*")
    assert len(kept.read_bytes()) > 3


def test_a_seed_stands_for_its_inputs(tmp_path: Path) -> None:
    """What passes in one run of .ci/run passes in the next."""
    tried = []
    for i, seed in enumerate((1, 1, 2)):
        folder = tmp_path / str(i)
        folder.mkdir()

        def keep(data: bytes, folder: Path = folder) -> None:
            with (folder / "tried").open("ab") as file:
                file.write(data + b"\n")

        assert _run(keep, folder, ("-runs=300", f"-seed={seed}")).runs == 300
        tried.append((folder / "tried").read_bytes())
    assert tried[0] == tried[1] != tried[2]


def test_a_process_that_is_gone_is_found(tmp_path: Path) -> None:
    assert "exit code 7" in _run(lambda _: os._exit(7), tmp_path).finding


def test_a_reader_that_answers_is_no_finding(tmp_path: Path) -> None:
    found = _run(len, tmp_path)
    assert not found.finding
    assert found.runs > 100
    assert not list(tmp_path.glob("broken-*"))
