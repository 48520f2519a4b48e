"""The journal of a run: what it says of others' parts, of bytes that are not in the files, and of who writes it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ckpttool.execute.journal import Edge, Journal, read, sealed, writer

EDGES: list[Edge] = [(0, 65536, b"\0\xff edge"), (3, 0, b"")]


def journal(path: Path) -> Journal:
    return Journal(os.open(path, os.O_RDWR | os.O_CREAT), str(path))


def test_edges_come_back(tmp_path: Path) -> None:
    path = tmp_path / "j"
    made = journal(path)
    made.begin("digest", 9)
    made.append([1, 2], {"0.0": "ab"}, EDGES)
    made.append([4], {})
    for found in (journal(path).load("digest", 9), read(path.read_bytes(), "digest", 9)):
        assert found.parts == {1, 2, 4}
        assert found.sums == {"0.0": "ab"}
        assert found.edges == EDGES


@pytest.mark.parametrize(
    "edges", [1, [[0, 1]], [[0, -1, ""]], [["0", 1, ""]], [[0, 1, "!"]], [[0, 1, 5]], [[True, 1, ""]]]
)
def test_edges_that_make_no_sense_end_it(tmp_path: Path, edges: object) -> None:
    path = tmp_path / "j"
    made = journal(path)
    made.begin("digest", 9)
    made.append([1], {})
    with path.open("a") as f:
        f.write(sealed(json.dumps({"done": [[2, 3]], "edges": edges})) + "\n")
    assert read(path.read_bytes(), "digest", 9).parts == {1}


def test_a_torn_line_of_another_process_stays(tmp_path: Path) -> None:
    path = tmp_path / "j"
    made = journal(path)
    made.begin("digest", 9)
    made.append([1], {}, EDGES)
    made.append([2], {}, EDGES)
    whole = path.read_bytes()
    for n in range(len(whole)):
        assert read(whole[:n], "digest", 9).parts <= {1}
    assert path.read_bytes() == whole


@pytest.mark.parametrize(("digest", "parts"), [("other", 9), ("digest", 8)])
def test_a_journal_of_another_plan_says_nothing(tmp_path: Path, digest: str, parts: int) -> None:
    path = tmp_path / "j"
    made = journal(path)
    made.begin("digest", 9)
    made.append([1], {})
    assert not read(path.read_bytes(), digest, parts).parts


def test_who_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "j"
    made = journal(path)
    made.begin("0123456789abcdef", 9)
    assert writer(path.read_bytes()).startswith(f"process {os.getpid()} on {os.uname().nodename}, since 20")
    assert writer(path.read_bytes()).endswith(" UTC, plan 0123456789ab")
    if not (pid := os.fork()):
        try:
            again = journal(path)
            again.load("0123456789abcdef", 9)
            again.sign()
            again.append([3], {})
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert writer(path.read_bytes()).startswith(f"process {pid} on ")
    assert journal(path).load("0123456789abcdef", 9).parts == {3}
    for data in (b"", b"[]\n", b'{"journal": 2, "plan": "x", "parts": 3}\n', b"\0\0\n"):
        assert not writer(data)
