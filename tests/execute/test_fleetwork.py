"""Runs whose work is done by other machines: the bytes are those of a run on one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckpttool.checkpoint import OpenOptions
from ckpttool.core.files import DataFile
from ckpttool.core.plan import Output, Plan
from ckpttool.errors import AccessError, CkptError, OutputError
from ckpttool.execute import NoProgress, RunOptions, run, schedule, shares
from ckpttool.execute.destinations import local
from ckpttool.execute.files import FilePool
from ckpttool.execute.machines import fleetwork
from ckpttool.execute.machines.node import NodeWorker
from ckpttool.ops import reshard
from ckpttool.targeting.target import Target
from tests.execute.merges import merge_plan
from tests.helpers.fleet import CALM, WILD, FakeFleet, Trouble

FIXTURES = Path(__file__).parents[2] / "fixtures"


@pytest.fixture(autouse=True)
def small_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "LEAST_SHARE", 1 << 10)
    monkeypatch.setattr(schedule, "_BATCH_UNITS", 2)


def files_of(directory: Path) -> dict[str, bytes]:
    """Every file, however hidden."""
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def reshards(dst: Path, options: RunOptions, *, verify: bool = False) -> reshard.ReshardResult:
    prepared = reshard.prepare(FIXTURES / "llama_tp8", OpenOptions(), Target(tp=2))
    return reshard.execute(prepared, dst, options, NoProgress(), verify=verify)


@pytest.mark.parametrize("manifest", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_reshard(seed: int, tmp_path: Path, *, manifest: bool) -> None:
    reshards(tmp_path / "one", RunOptions(manifest=manifest))
    fleet = FakeFleet(3, seed, CALM if not seed else WILD)
    done = reshards(tmp_path / "dst", RunOptions(manifest=manifest, on=fleet), verify=True)
    assert files_of(tmp_path / "dst") == files_of(tmp_path / "one")
    assert len(fleet.sent) >= 8
    assert done.run.bytes_written >= done.prepared.plan.bytes_written // 2


def test_tensors_that_are_computed(tmp_path: Path) -> None:
    plan, _ = merge_plan(tmp_path / "src")
    run(plan, tmp_path / "one")
    run(plan, tmp_path / "dst", RunOptions(on=FakeFleet(2, 1, WILD)))
    assert files_of(tmp_path / "dst") == files_of(tmp_path / "one")


def test_a_killed_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reshards(tmp_path / "one", RunOptions())
    remember, told = local.LocalDestination.remember, 0

    def killed(self: local.LocalDestination, *args: object) -> None:
        nonlocal told
        told += 1
        if told > 3:
            raise KeyboardInterrupt
        remember(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(local.LocalDestination, "remember", killed)
    with pytest.raises(KeyboardInterrupt, match="--resume"):
        reshards(tmp_path / "dst", RunOptions(on=FakeFleet()))
    monkeypatch.setattr(local.LocalDestination, "remember", remember)
    fleet = FakeFleet()
    done = reshards(tmp_path / "dst", RunOptions(on=fleet, resume=True))
    assert done.run.bytes_skipped > 0
    assert files_of(tmp_path / "dst") == files_of(tmp_path / "one")


def changed(job: object, field: str, value: object) -> object:
    return replace(job, **{field: value})  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda job: replace(job, version="0"), "another version of ckpttool"),
        (lambda job: replace(job, planned="x"), "the plan of this machine"),
        (lambda job: replace(job, branch=job.branch | {"run": "x"}), "does not see the destination"),
        (lambda job: replace(job, branch=job.branch | {"partial": "/nowhere"}), "does not see the destination"),
    ],
)
def test_a_node_that_is_unfit(
    change: Callable[[object], object], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = FakeFleet.start
    monkeypatch.setattr(FakeFleet, "start", lambda self, job: start(self, change(job)))  # type: ignore[arg-type]
    with pytest.raises(CkptError, match=said) as e:
        reshards(tmp_path / "dst", RunOptions(on=FakeFleet()))
    assert any("on node-" in w for w in e.value.where)
    assert not (tmp_path / "dst").exists()


def test_sources_that_a_node_does_not_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, _ = merge_plan(tmp_path / "src")
    start = FakeFleet.start

    def change(self: FakeFleet, job: object) -> None:
        start(self, job)  # type: ignore[arg-type]
        path = Path(plan.sources[0].path)
        path.rename(path.with_suffix(".away"))

    monkeypatch.setattr(FakeFleet, "start", change)
    with pytest.raises(AccessError, match="cannot read a source of the run"):
        run(plan, tmp_path / "dst", RunOptions(on=FakeFleet()))
    assert not list(tmp_path.glob("dst*"))


def test_all_nodes_die(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpttool.execute.fleets.dispatch.PATIENCE", 0.0)
    with pytest.raises(OutputError, match="no working node is left"):
        reshards(tmp_path / "dst", RunOptions(on=FakeFleet(1, 0, Trouble(deaths={3: 0}))))


def test_no_page_is_written_by_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by two shares, nor by a share and the run itself, which writes headers and what shares keep back."""
    monkeypatch.setattr(shares, "PAGE", 512)
    writers: dict[tuple[str, int], set[int]] = {}
    write, share = FilePool.write, 0
    do = NodeWorker._do

    def one(self: NodeWorker, order: Any) -> Any:
        nonlocal share
        share = order["tasks"][0] + 1
        try:
            return do(self, order)
        finally:
            share = 0

    def noted(self: FilePool, path: str, offset: int, data: memoryview, *, scattered: bool = False) -> None:
        for page in range(offset // 512, -(-(offset + data.nbytes) // 512)):
            writers.setdefault((path, page), set()).add(share)
        write(self, path, offset, data, scattered=scattered)

    monkeypatch.setattr(NodeWorker, "_do", one)
    monkeypatch.setattr(FilePool, "write", noted)
    reshards(tmp_path / "dst", RunOptions(on=FakeFleet()))
    assert {len(found) for found in writers.values()} == {1}
    assert len({s for found in writers.values() for s in found}) > 8
    assert sum(found == {0} for found in writers.values()) > 8


def test_files_that_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run itself links them: a file that is linked anew is away for a moment. Nodes copy what cannot be linked."""
    source = tmp_path / "src"
    source.mkdir()
    (source / "a").write_bytes(b"a" * 5000)
    size, tag = DataFile.at(source / "a")[1:3]
    plan = Plan([], [Output("a", size, carried=str(source / "a"), tag=tag, link=True)], [])
    done = run(plan, tmp_path / "linked", RunOptions(on=FakeFleet(2, 1, WILD)))
    assert done.notes[0] in ("1 file hard-linked", "1 file reflinked")
    monkeypatch.setattr("ckpttool.execute.machines.fleetwork.share", lambda *_: "")
    done = run(plan, tmp_path / "copied", RunOptions(on=FakeFleet(2, 2, WILD)))
    assert done.notes == ["1 file copied: linking does not work here"]
    assert files_of(tmp_path / "copied") == files_of(tmp_path / "linked") == {"a": b"a" * 5000}


@pytest.mark.parametrize("workers", [0, 2])
def test_another_run_has_begun_amid_an_order(workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that was given up does not open what a new run has made by the same names."""
    plan, _ = merge_plan(tmp_path / "src")
    begin = local.LocalBranch.begin

    def late(self: local.LocalBranch, order: Any) -> None:
        begin(self, order)
        (self.partial / local.RUN).write_text("another")

    monkeypatch.setattr(local.LocalBranch, "begin", late)
    with pytest.raises(OutputError, match="or the run has ended"):
        run(plan, tmp_path / "dst", RunOptions(on=FakeFleet(), workers=workers or None))
    assert not (tmp_path / "dst").exists()


def test_shares_become_smaller_towards_the_end() -> None:
    pieces = [[i] for i in range(32 * 4)]
    waned = fleetwork.waning(pieces, 8 * 4)
    assert [t for share in waned for t in share] == list(range(32 * 4))
    sizes = [len(share) for share in waned]
    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0], sizes[-1]) == (4, 1)
    assert fleetwork.waning([[0], [], [2, 1]], 1) == [[0, 1, 2]]
    assert fleetwork.waning([], 8) == []
