"""The core of the benchmark, so that it still runs when somebody wants it: measuring, the table, the lists of jobs."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from bench.__main__ import all_jobs, chosen
from bench.measure import COPY, OURS, OUT, Job, Program, Row, Run, copy_of, measure
from bench.setting import Setting
from bench.table import BEGIN, END, save, table


@pytest.fixture(autouse=True)
def _no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for what the whole machine has to write."""
    monkeypatch.setattr(os, "sync", lambda: None)


def nothing() -> None:
    """A job whose sources are there."""


def a_job(source: Path, ours: str, theirs: str, **more: object) -> Job:
    """Programs of the shell; ``$0`` is what they write."""
    programs = (
        Program(OURS, ("sh", "-c", ours, OUT)),
        copy_of(source),
        Program("peer", ("sh", "-c", theirs, OUT)),
    )
    return Job("a job", (source,), programs, nothing, **more)  # type: ignore[arg-type]


def test_programs_take_turns_and_are_compared_once(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(1000))
    compared = []

    def compare(ours: Path, theirs: Path, peer: str) -> str:
        compared.append((ours.read_text(), theirs.read_text(), peer))
        return "other words"

    turns = tmp_path / "turns"
    job = a_job(
        source, f"echo o >> {turns}; echo a > $0", f"echo p >> {turns}; echo b > $0; sleep 0.5", compare=compare
    )
    rows = measure([job], 3, tmp_path, lambda _: None)
    assert compared == [("a\n", "b\n", "peer")]
    assert turns.read_text().split() == ["o", "p", "p", "o", "p", "o"]
    assert [(r.program.name, len(r.runs)) for r in rows] == [(OURS, 3), (COPY, 3), ("peer", 3)]
    assert all(run.wall >= 0.5 and 0 < run.cpu < run.wall and run.peak > 0 for run in rows[2].runs)
    assert rows[2].differs == "other words"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log", "source", "turns"]


def test_a_program_that_fails_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no such luck"):
        measure([a_job(tmp_path / "source", "echo no such luck; exit 3", "true")], 1, tmp_path, lambda _: None)


def test_the_table_judges(tmp_path: Path) -> None:
    job = a_job(tmp_path, "true", "true", of_copy=0.5, of_copy_cpu=0.5, times_as_fast=4)
    rows = [Row(job, p) for p in job.programs]
    for row, wall, cpu in zip(rows, (1.0, 2.0, 6.0), (3.0, 4.0, 5.0), strict=True):
        row.runs[:] = [Run(wall, cpu, 50), Run(wall * 2, cpu, 70)]
    lines = [[c.strip() for c in line.strip("|").split("|")] for line in table(rows).splitlines()[2:]]
    assert lines == [
        ["a job", OURS, "1.50", "3.00", "0.50 [0.50-0.50]", "3.00", "0.75", "70", "",
         "0.5 cp: met, 0.5 CPU: **missed**"],
        ["", "peer", "9.00", "", "3.00 [3.00-3.00]", "5.00", "1.25", "70", "6.0 [6.0-6.0] x as fast", "4 x: met"],
    ]  # fmt: skip


def test_the_table_is_saved_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    save("new", page)
    assert page.read_text() == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
    page.write_text("no marks\n")
    with pytest.raises(SystemExit, match="no place"):
        save("new", page)


def test_the_lists_of_jobs(tmp_path: Path) -> None:
    """They can be made, and every job has its own name, ckpttool first and cp, or a download, second."""
    jobs = all_jobs(Setting(tmp_path, 4.3, torch=True, mergekit="mergekit-yaml", paddle="python"))
    assert [n for n, count in Counter(j.name for j in jobs).items() if count > 1] == []
    remote = [j for j in jobs if "remote" in j.name]
    near = [j for j in jobs if j not in remote]
    assert all(j.serve is not None for j in remote)
    assert {tuple(p.name for p in j.programs[:2]) for j in near} == {(OURS, COPY)}
    downloads = {(OURS, "hf download"), (OURS, "boto3 download")}
    assert {tuple(p.name for p in j.programs[:2]) for j in remote} == downloads
    peers = {p.name for j in near for p in j.programs[2:]}
    script = {"torch script", "torch script, 128 rows", "torch DCP", "torch DCP, FSDP"}
    own = {"dcp_to_torch_save", "torch_save_to_dcp"}
    assert peers == {*script, *own, "mergekit", "Paddle", "json.load", "no cluster"}
    assert [j.name for j in chosen(jobs, ["linear", "slerp"], cold=False, judged=True)][:2] == [
        "merge linear",
        "merge slerp",
    ]
    assert all(j.cold for j in chosen(jobs, [], cold=True, judged=True))
    with pytest.raises(SystemExit, match="no job has nonsense"):
        chosen(jobs, ["nonsense"], cold=False, judged=True)
