"""Parts of a run that have nothing in common but the destination (--part): the bytes are those of one run.

Real processes, and what happens when they are killed at any point, are in tests/torture/members.py.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpttool.core.files import Place
from ckpttool.core.plan import Output, Plan
from ckpttool.errors import ConflictError, CorruptError, OutputError, VerifyError
from ckpttool.execute import (
    Advance,
    NoProgress,
    RunOptions,
    RunResult,
    engine,
    files,
    journal,
    run,
    schedule,
    shares,
    workforce,
)
from ckpttool.execute.destinations import claims, local, members
from ckpttool.execute.destinations.holder import HERE
from ckpttool.execute.options import Member, Standing
from ckpttool.execute.parts import member as member_module
from ckpttool.execute.workforce import CompletionQueue
from ckpttool.storage import system
from tests.execute.merges import merge_plan
from tests.execute.plans import expected, reshard, source, written


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many parts, and many pages that two of them share."""
    monkeypatch.setattr(schedule, "_BATCH_UNITS", 2)
    monkeypatch.setattr(shares, "PAGE", 512)
    monkeypatch.setattr(claims, "LOOK", 0.002)
    monkeypatch.setattr(local, "PATIENCE", 0.02)
    monkeypatch.setattr(local, "SLACK", 0)


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    shapes: list[tuple[tuple[int, ...], int | None]] = [((32 + 8 * i, 24), i % 2) for i in range(9)]
    plan = reshard(tmp_path / "src", [*shapes, ((40,), None)], 4, 2)
    for i, output in enumerate(plan.outputs):  # headers, so that literals and tensors share pages
        assert output.size > 700
        plan.outputs[i] = output
    return plan


def part(plan: Plan, dst: Path, number: int, of: int, **options: Any) -> RunResult:
    return run(plan, dst, RunOptions(member=Member(number, of), **options))


def left(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir())


def no_good_bye(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who ends is killed: it cleans nothing up, and to others its process is gone."""
    for run_of in (engine.Run, member_module._MemberRun, member_module._MemberCommit):
        monkeypatch.setattr(run_of, "_give_up", lambda _self, error, _pool: error)
    monkeypatch.setattr(claims.Claim, "release", lambda self: HERE.discard(self.me.token))
    monkeypatch.setattr(members.MemberDestination, "close", lambda self: HERE.discard(self._part.me.token))
    monkeypatch.setattr(members.CommitDestination, "close", lambda self: _forget(self._commit, self._part))


def _forget(*held: claims.Claim | None) -> None:
    HERE.difference_update({claim.me.token for claim in held if claim})


def dies(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """A part is killed when it has so many lines in its journal."""
    no_good_bye(monkeypatch)
    record, told = members.MemberDestination.record, 0

    def killed(self: members.MemberDestination, *args: Any) -> None:
        nonlocal told
        if told == after:
            assert self._part is not None
            assert self._prepare is None
            HERE.discard(self._part.me.token)
            raise SystemExit
        told += 1
        record(self, *args)

    monkeypatch.setattr(members.MemberDestination, "record", killed)


def record_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the plan is in the journal before the next is begun."""
    monkeypatch.setattr(workforce, "CompletionQueue", lambda *_: CompletionQueue(1, 0))


# -- the same bytes


@pytest.mark.parametrize("manifest", [False, True])
def test_tensors_that_are_computed(tmp_path: Path, *, manifest: bool) -> None:
    made, _ = merge_plan(tmp_path / "src")
    run(made, tmp_path / "one", RunOptions(manifest=manifest))
    for number in (2, 3, 1):
        part(made, tmp_path / "dst", number, 3, manifest=manifest)
    for name in left(tmp_path / "one"):
        assert (tmp_path / "dst" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()


@pytest.mark.product
@pytest.mark.parametrize("manifest", [False, True])
@pytest.mark.parametrize("order", [(1,), (2, 1), (1, 2, 3), (3, 1, 4, 2), (5, 12, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11)])
def test_all_parts_make_what_one_run_makes(
    tmp_path: Path, plan: Plan, order: tuple[int, ...], *, manifest: bool
) -> None:
    dst, one = tmp_path / "dst", tmp_path / "one"
    told = run(plan, one, RunOptions(manifest=manifest))
    written_bytes = 0
    for number in order[:-1]:
        done = part(plan, dst, number, len(order), manifest=manifest)
        assert done.standing is not None
        assert not done.standing.committed
        assert set(done.standing.waiting_for) == set(order[order.index(number) + 1 :])
        written_bytes += done.bytes_written
        assert not dst.exists()
    done = part(plan, dst, order[-1], len(order), manifest=manifest)
    assert done.standing is not None
    assert done.standing.committed
    assert written(dst, plan) == expected(plan)
    assert left(dst) == left(one)
    assert all((dst / n).read_bytes() == (one / n).read_bytes() for n in left(dst))
    assert done.manifest == told.manifest
    assert written_bytes + done.bytes_written == told.bytes_written
    assert left(tmp_path) == ["dst", "one", "src"]


def test_no_page_is_written_by_two(tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    writers: dict[tuple[str, int], set[str]] = {}
    now = ""
    write = files.FilePool.write

    def noted(self: files.FilePool, path: str, offset: int, data: memoryview, *, scattered: bool = False) -> None:
        for page in range(offset // 512, -(-(offset + data.nbytes) // 512)):
            writers.setdefault((Path(path).name, page), set()).add(now)
        write(self, path, offset, data, scattered=scattered)

    monkeypatch.setattr(files.FilePool, "write", noted)
    for number in (1, 2, 3):
        now = str(number)
        part(plan, tmp_path / "dst", number, 3)
    assert written(tmp_path / "dst", plan) == expected(plan)
    shared = [page for page, who in writers.items() if len(who) > 1]
    assert not shared  # pages that are shared are written by the third alone, which completes DST
    assert {n for who in writers.values() for n in who} == {"1", "2", "3"}


@pytest.mark.parametrize("link", [True, False])
def test_companions(tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch, *, link: bool) -> None:
    other = source(tmp_path / "src/tokenizer.json", b"words")
    plan.outputs.append(Output("tokenizer.json", 5, carried=other.path, tag=other.tag, link=True))
    if not link:
        monkeypatch.setattr(member_module, "share", lambda *_: "")
    notes = [part(plan, tmp_path / "dst", number, 2).notes for number in (1, 2)]
    assert (tmp_path / "dst/tokenizer.json").read_text() == "words"
    assert any("1 file" in n for n in notes[0]) == link
    assert written(tmp_path / "dst", plan) == expected(plan)


def test_all_at_once(tmp_path: Path, plan: Plan) -> None:
    """In threads of one process: some see all done at the same time; one of them completes DST."""
    for attempt in range(3):
        dst, ended = tmp_path / f"dst{attempt}", list[RunResult]()

        def work(number: int, dst: Path = dst, ended: list[RunResult] = ended) -> None:
            ended.append(part(plan, dst, number, 4))

        threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 5)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        standings = [e.standing for e in ended if e.standing]
        assert len(standings) == 4
        assert any(s.committed for s in standings)
        assert written(dst, plan) == expected(plan)
    assert left(tmp_path) == ["dst0", "dst1", "dst2", "src"]


# -- again


@pytest.mark.product
@pytest.mark.parametrize("manifest", [False, True])
@pytest.mark.parametrize("after", [0, 1])
def test_a_part_that_ended_runs_again(
    tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch, after: int, *, manifest: bool
) -> None:
    run(plan, tmp_path / "one", RunOptions(manifest=manifest))
    record_each(monkeypatch)
    part(plan, tmp_path / "dst", 1, 2, manifest=manifest)
    with monkeypatch.context() as m:
        dies(m, after)
        with pytest.raises(SystemExit):
            part(plan, tmp_path / "dst", 2, 2, manifest=manifest)
    assert left(tmp_path) == ["dst.partial", "one", "src"]
    again = part(plan, tmp_path / "dst", 2, 2, manifest=manifest, resume=True)
    assert again.standing is not None
    assert again.standing.committed
    for name in left(tmp_path / "one"):
        assert (tmp_path / "dst" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()
    assert left(tmp_path) == ["dst", "one", "src"]


@pytest.mark.sample("1")
@pytest.mark.parametrize("after", range(1, 12))
def test_a_tensor_that_was_hashed_half_way(
    tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """What is there of it is in the journal alone where others write into the same page: its hash would lack that."""
    monkeypatch.setattr(schedule, "_MIB", 512)
    record_each(monkeypatch)
    run(plan, tmp_path / "one", RunOptions(manifest=True))
    dst = tmp_path / "dst"
    with monkeypatch.context() as m:
        dies(m, after)
        with pytest.raises(SystemExit):
            part(plan, dst, 2, 2, manifest=True)
    part(plan, dst, 1, 2, manifest=True)
    part(plan, dst, 2, 2, manifest=True)
    for name in left(tmp_path / "one"):
        assert (dst / name).read_bytes() == (tmp_path / "one" / name).read_bytes()


def test_a_part_that_is_done_may_run_again(tmp_path: Path, plan: Plan) -> None:
    part(plan, tmp_path / "dst", 1, 2)
    again = part(plan, tmp_path / "dst", 1, 2)
    assert (again.bytes_written, again.bytes_read) == (0, 0)
    assert again.standing == Standing(Member(1, 2), committed=False, waiting_for=(2,))
    part(plan, tmp_path / "dst", 2, 2)
    with pytest.raises(OutputError, match="the destination exists"):
        part(plan, tmp_path / "dst", 2, 2)


@pytest.mark.product
@pytest.mark.parametrize("step", ["settle", "complete", "seal", "_put_in_place", "remove_all"])
@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("atomic", [True, False])
def test_who_completes_it_ends_in_the_middle(
    tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch, step: str, *, force: bool, atomic: bool
) -> None:
    """Before each step, and after it: another part, or the same, goes on."""
    if not atomic:
        monkeypatch.setattr(system, "exchange", lambda *_: False)
    whose: Any = members.SharedPartial if step == "remove_all" else members.CommitDestination
    real = getattr(whose, step)
    for after in (False, True):
        dst = tmp_path / f"dst{after}"
        if force:
            dst.mkdir()
            (dst / "old").write_text("old")
        part(plan, dst, 1, 2, force=force)

        def killed(self: Any, *args: Any, after: bool = after, **more: Any) -> None:
            if after:
                real(self, *args, **more)
            HERE.clear()
            raise SystemExit

        with monkeypatch.context() as m:
            m.setattr(whose, step, killed)
            no_good_bye(m)
            with pytest.raises(SystemExit):
                part(plan, dst, 2, 2, force=force)
        if step == "remove_all" and after:
            assert written(dst, plan) == expected(plan)
            continue
        done = part(plan, dst, 1, 2, force=force)
        assert done.standing is not None
        assert done.standing.committed
        assert written(dst, plan) == expected(plan)
        assert left(dst) == sorted(o.name for o in plan.outputs)
    assert left(tmp_path) == ["dstFalse", "dstTrue", "src"]


def test_an_old_destination_is_not_taken_for_the_new_one(
    tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lies where the outputs were when who exchanged the two was killed before it was deleted."""
    dst = tmp_path / "dst"
    run(plan, dst)
    (dst / "rank_0.bin").write_bytes(bytes(plan.outputs[0].size))
    part(plan, dst, 1, 2, force=True)

    def killed(_: Path) -> None:
        HERE.clear()
        raise SystemExit

    with monkeypatch.context() as m:
        m.setattr(local, "remove", killed)
        no_good_bye(m)
        with pytest.raises(SystemExit):
            part(plan, dst, 2, 2, force=True)
    assert written(dst, plan) == expected(plan)
    done = part(plan, dst, 1, 2, force=True)
    assert done.standing == Standing(Member(1, 2), committed=True)
    assert done.bytes_written == 0
    assert written(dst, plan) == expected(plan)
    assert left(tmp_path) == ["dst", "src"]


def test_a_part_that_was_thought_dead_writes_nothing_any_more(
    tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes back in the middle of its share, when another process has done it."""
    record_each(monkeypatch)
    dst, came_back = tmp_path / "dst", False
    record = members.MemberDestination.record

    def stopped(self: members.MemberDestination, *args: Any) -> None:
        nonlocal came_back
        if not came_back:
            came_back = True
            assert self._part is not None
            HERE.discard(self._part.me.token)  # to others it is gone
            part(plan, dst, 1, 2)
        record(self, *args)

    with monkeypatch.context() as m:
        m.setattr(members.MemberDestination, "record", stopped)
        with pytest.raises(OutputError, match="has taken over") as e:
            part(plan, dst, 1, 2)
    assert not isinstance(e.value, members.PeerError)
    assert part(plan, dst, 2, 2).standing == Standing(Member(2, 2), committed=True)
    assert written(dst, plan) == expected(plan)


def test_a_committer_that_was_thought_dead_comes_back(
    tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right before its rename. Another part has completed DST, or is about to."""
    for step in ("seal", "_put_in_place"):
        dst = tmp_path / step
        part(plan, dst, 1, 2)
        real, came_back = getattr(members.CommitDestination, step), list[int]()

        def stopped(
            self: members.CommitDestination,
            real: Any = real,
            came_back: list[int] = came_back,
            dst: Path = dst,
            **more: Any,
        ) -> Any:
            if not came_back:
                came_back.append(1)
                assert self._commit is not None
                assert self._part is not None
                HERE.difference_update({self._commit.me.token, self._part.me.token})
                other = part(plan, dst, 1, 2)
                assert other.standing is not None
                assert other.standing.committed
            return real(self, **more)

        with monkeypatch.context() as m:
            m.setattr(members.CommitDestination, step, stopped)
            done = part(plan, dst, 2, 2)
        assert done.standing is not None
        assert done.standing.committed
        assert written(dst, plan) == expected(plan)
    assert left(tmp_path) == ["_put_in_place", "seal", "src"]


# -- contradictions


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("of", "part 1 on HOST is one of 2, this is one of 3"),
        ("plan", "part 1 on HOST has a different plan"),
        ("version", "part 1 on HOST has ckpttool 0.0.1, this is "),
        ("hashes", "part 1 on HOST was started without --manifest"),
    ],
)
def test_parts_that_do_not_fit(
    tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch, what: str, said: str
) -> None:
    dst = tmp_path / "dst"
    with monkeypatch.context() as m:
        if what == "version":
            m.setattr(members, "__version__", "0.0.1")
        part(plan, dst, 1, 2)
    if what == "plan":
        plan.outputs[0] = Output("another.bin", plan.outputs[0].size)
    with pytest.raises(ConflictError, match=said.replace("HOST", os.uname().nodename)) as e:
        part(plan, dst, 2, 3 if what == "of" else 2, manifest=what == "hashes", force=True)
    assert "give all parts the same command" in str(e.value.hint)
    assert not dst.exists()


def test_the_same_part_twice(tmp_path: Path, plan: Plan) -> None:
    def meanwhile(_partial: Place, _advance: Advance) -> None:
        with pytest.raises(OutputError, match=rf"another process does part 2 of 2: process {os.getpid()} on "):
            part(plan, tmp_path / "dst", 2, 2)

    part(plan, tmp_path / "dst", 1, 2)
    part(plan, tmp_path / "dst", 2, 2, verify=meanwhile)


def test_a_run_without_parts_keeps_off(tmp_path: Path, plan: Plan) -> None:
    def meanwhile(_partial: Place, _advance: Advance) -> None:
        for options in (RunOptions(), RunOptions(force=True), RunOptions(resume=True)):
            with pytest.raises(OutputError, match=r"another run is writing this destination: --part, begun by part 1"):
                run(plan, tmp_path / "dst", options)

    part(plan, tmp_path / "dst", 1, 2)
    for options in (RunOptions(), RunOptions(resume=True)):
        with pytest.raises(OutputError, match=r"parts of a run \(--part\) left a partial destination"):
            run(plan, tmp_path / "dst", options)
    part(plan, tmp_path / "dst", 2, 2, verify=meanwhile)
    assert written(tmp_path / "dst", plan) == expected(plan)


def test_force_without_parts_starts_over(tmp_path: Path, plan: Plan) -> None:
    part(plan, tmp_path / "dst", 1, 2)
    run(plan, tmp_path / "dst", RunOptions(force=True))
    assert written(tmp_path / "dst", plan) == expected(plan)
    assert left(tmp_path) == ["dst", "src"]


def test_force_waits_for_parts_that_a_lock_does_not_show(
    tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part on another machine, whose locks are not seen here, lives as long as it beats."""
    part(plan, tmp_path / "dst", 1, 2)
    claim = tmp_path / "dst.partial/.claim-part-2-1"
    said = {"token": "t", "host": "node7", "pid": 4711, "machine": "another boot", "plan": ""}
    claim.write_text(f"{json.dumps(said)}\n{1:016d}")
    look, looks = claims.ClaimWatch.look, 0

    def beating(self: claims.ClaimWatch) -> bool:
        nonlocal looks
        looks += 1
        claim.write_text(f"{json.dumps(said)}\n{looks:016d}")
        return look(self)

    with monkeypatch.context() as m:
        m.setattr(claims.ClaimWatch, "look", beating)
        with pytest.raises(
            OutputError, match="a part of another run is writing this destination: process 4711 on node7"
        ):
            run(plan, tmp_path / "dst", RunOptions(force=True))
    monkeypatch.setattr(claims, "SILENT", 0.01)
    run(plan, tmp_path / "dst", RunOptions(force=True))
    assert written(tmp_path / "dst", plan) == expected(plan)


@pytest.mark.parametrize("member", [False, True])
def test_what_a_run_without_parts_has_left(tmp_path: Path, plan: Plan, *, member: bool) -> None:
    (tmp_path / "dst.partial").mkdir()
    (tmp_path / "dst.partial" / ("thesis.tex" if member else ".journal")).write_text("mine")
    with pytest.raises(OutputError, match="a run without --part left a partial destination"):
        part(plan, tmp_path / "dst", 1, 2, force=True)
    assert len(left(tmp_path / "dst.partial")) == 1


# -- failures


def fails(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def record(*_: object) -> None:
        raise error

    monkeypatch.setattr(members.MemberDestination, "record", record)


def test_others_stop_when_one_fails(tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "_LOOK_EVERY", 0.0)
    dst, record = tmp_path / "dst", members.MemberDestination.record
    failed = False

    def one_fails(self: members.MemberDestination, *args: Any) -> None:
        nonlocal failed
        if self.member.number == 2:
            raise OutputError("no space left on the destination")
        if not failed:
            failed = True
            with pytest.raises(OutputError, match="no space left") as e:
                part(plan, dst, 2, 2)
            assert e.value.hint is None or "run part 2 of 2 again" in e.value.hint
        record(self, *args)

    with monkeypatch.context() as m:
        m.setattr(members.MemberDestination, "record", one_fails)
        who = rf"^part 2 of 2 failed on {os.uname().nodename}: no space left on the destination$"
        with pytest.raises(members.PeerError) as e:
            part(plan, dst, 1, 2)
        assert re.match(who, e.value.what)
    assert left(tmp_path) == ["dst.partial", "src"]
    part(plan, dst, 1, 2)  # an old failure is no news
    part(plan, dst, 2, 2)
    assert written(dst, plan) == expected(plan)
    assert left(tmp_path) == ["dst", "src"]


@pytest.mark.parametrize("others", [0, 1])
def test_wrong_input_leaves_nothing_when_the_last_part_has_gone(
    tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    if others:
        part(plan, tmp_path / "dst", 1, 2)
    fails(monkeypatch, CorruptError("two copies differ"))
    with pytest.raises(CorruptError):
        part(plan, tmp_path / "dst", 2, 2)
    assert left(tmp_path) == ["src"]


def test_wrong_input_leaves_alone_who_is_still_there(
    tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    dst, record, failed = tmp_path / "dst", members.MemberDestination.record, list[int]()
    monkeypatch.setattr(members, "_LOOK_EVERY", 0.0)

    def one_fails(self: members.MemberDestination, *args: Any) -> None:
        if self.member.number == 2:
            raise CorruptError("two copies differ")
        if not failed:
            failed.append(1)
            with pytest.raises(CorruptError):
                part(plan, dst, 2, 2)
            assert left(tmp_path) == ["dst.partial", "src"]
        record(self, *args)

    monkeypatch.setattr(members.MemberDestination, "record", one_fails)
    with pytest.raises(OutputError, match=r"part 2 of 2 failed on .*: two copies differ"):
        part(plan, dst, 1, 2)
    assert left(tmp_path) == ["src"]


@pytest.mark.parametrize("number", [1, 2])
def test_a_part_without_work_is_not_overtaken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Others that are done do not make DST before it can tell it from another one, whoever has the work."""
    plan, dst = reshard(tmp_path / "src", [((8, 8), None)], 1, 1), tmp_path / "dst"
    prepare = members.MemberDestination.prepare
    seen: list[RunResult] = []

    def overtaken(self: members.MemberDestination, make: Any) -> Any:
        if self.member.number == number:
            seen.append(part(plan, dst, 3 - number, 2))
        return prepare(self, make)

    monkeypatch.setattr(members.MemberDestination, "prepare", overtaken)
    ended = part(plan, dst, number, 2)
    assert [r.standing for r in seen] == [Standing(Member(3 - number, 2), committed=False, waiting_for=(number,))]
    assert ended.committed
    assert left(tmp_path) == ["dst", "src"]


def test_an_output_that_does_not_verify(tmp_path: Path, plan: Plan) -> None:
    def verify(_partial: Place, _advance: Advance) -> None:
        raise VerifyError("not equal")

    part(plan, tmp_path / "dst", 1, 2)
    with pytest.raises(VerifyError):
        part(plan, tmp_path / "dst", 2, 2, verify=verify)
    assert left(tmp_path) == ["src"]


@pytest.mark.parametrize("asked", [(), (1,), (2,), (3,), (1, 3), (1, 2, 3)])
def test_what_one_part_was_asked_to_verify(tmp_path: Path, plan: Plan, asked: tuple[int, ...]) -> None:
    """It is verified once, whichever part completes it, and all that come after that say so if they were asked."""
    seen: list[Place] = []
    check: Any = Seeing(seen)
    for number in (1, 2, 3):
        done = part(plan, tmp_path / "dst", number, 3, prove=check, verify=check if number in asked else None)
        assert done.verified == (number == 3 and bool(asked))
    assert len(seen) == bool(asked)


class Seeing:
    """Verifies by taking down what."""

    def __init__(self, seen: list[Place], *, wrong: bool = False) -> None:
        self.seen, self.wrong = seen, wrong

    def __call__(self, place: Place, _advance: Advance) -> None:
        self.seen.append(place)
        if self.wrong:
            raise VerifyError("not equal", where=str(place), hint="nothing was kept")

    def share(self, place: Place, advance: Advance, _number: int, _of: int) -> None:
        self(place, advance)


def test_a_part_that_runs_again_is_asked_to_verify(tmp_path: Path, plan: Plan) -> None:
    """What an earlier attempt was asked is not forgotten; what a later one is asked is not too late."""
    for first, second in ((True, False), (False, True)):
        dst, seen = tmp_path / f"dst{first}", list[Place]()
        check: Any = Seeing(seen)
        for verify in (first, second):
            part(plan, dst, 1, 2, prove=check, verify=check if verify else None)
        assert part(plan, dst, 2, 2, prove=check).verified
        assert len(seen) == 1


@pytest.mark.parametrize("wrong", [False, True])
def test_asked_to_verify_when_another_part_completes_it(
    tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch, *, wrong: bool
) -> None:
    """It does so itself: the other one had looked before."""
    dst, seen = tmp_path / "dst", list[Place]()
    check: Any = Seeing(seen, wrong=wrong)
    part(plan, dst, 1, 2)
    seal, errors, results = members.CommitDestination.seal, list[Exception](), list[RunResult]()

    def again() -> None:
        try:
            results.append(part(plan, dst, 1, 2, prove=check, verify=check))
        except VerifyError as e:
            errors.append(e)

    late = threading.Thread(target=again)

    def joined(self: members.CommitDestination) -> None:
        late.start()
        while not any(n == members.VERIFY for n in self.common.folder.names()):
            time.sleep(0.001)
        seal(self)

    with monkeypatch.context() as m:
        m.setattr(members.CommitDestination, "seal", joined)
        assert not part(plan, dst, 2, 2).verified
    late.join()
    assert seen == [dst]
    assert [r.verified for r in results] == [True] * (not wrong)
    assert ["it stays" in str(e) for e in errors] == [True] * wrong
    # Two that leave at the same moment may each take the other for the last one: records stay, and no outputs.
    assert not [*dst.parent.glob("dst.partial/output*")]


def test_an_output_that_was_changed_from_outside(tmp_path: Path, plan: Plan) -> None:
    part(plan, tmp_path / "dst", 1, 2)
    (tmp_path / "dst.partial/output/files/rank_0.bin").write_bytes(b"")
    with pytest.raises(ConflictError, match="something else changed an output of the parts"):
        part(plan, tmp_path / "dst", 2, 2)
    assert not (tmp_path / "dst").exists()


@pytest.mark.sample("link", "bytes", "hashes")
@pytest.mark.parametrize(
    ("change", "text"),
    [
        pytest.param(
            lambda d: elsewhere(d / "output/files/rank_0.bin", "link"), "something else changed an output", id="link"
        ),
        pytest.param(
            lambda d: elsewhere(d / "output/files/rank_0.bin", "name"), "something else changed an output", id="name"
        ),
        pytest.param(lambda d: elsewhere(d / "output/files", "link"), "symbolic links", id="files"),
        pytest.param(lambda d: elsewhere(d / "output", "link"), "something else changed an output", id="output"),
        pytest.param(lambda d: (d / "output/linked").write_text('[[0, "linked"]]'), "cannot be read", id="linked"),
        pytest.param(lambda d: (d / "output/linked").write_text("[5"), "cannot be read", id="torn"),
        pytest.param(lambda d: record(d, edges=[[99, 0, "AAAA"]]), "does not match its output", id="file"),
        pytest.param(lambda d: record(d, edges=[[0, 2**70, "AAAA"]]), "does not match its output", id="bytes"),
        pytest.param(lambda d: said(d, hashes=None), "was started without --manifest", id="hashes"),
        pytest.param(lambda d: said(d, of="\x1b" + "9" * 10**6), "is one of .{,90}, this is one of 2", id="long"),
        pytest.param(lambda d: os.mkfifo(d / ".failed.7-9"), "no part of the run made this", id="pipe"),
    ],
)
def test_what_somebody_has_put_there(tmp_path: Path, plan: Plan, change: Callable[[Path], object], text: str) -> None:
    """It is one error, and no file outside is written."""
    part(plan, tmp_path / "dst", 1, 2)
    change(tmp_path / "dst.partial")
    before = {p: p.read_bytes() for p in (tmp_path / "other").rglob("*") if p.is_file()}
    with pytest.raises((ConflictError, OutputError), match=text):
        part(plan, tmp_path / "dst", 2, 2)
    assert not (tmp_path / "dst").exists()
    assert before == {p: p.read_bytes() for p in (tmp_path / "other").rglob("*") if p.is_file()}


def elsewhere(path: Path, how: str) -> None:
    """Move it out of the directory that the parts share, and let its name lead there."""
    other = next(p for p in path.parents if p.name == "dst.partial").with_name("other")
    other.mkdir()
    path.rename(other / path.name)
    if how == "link":
        path.symlink_to(other / path.name)
    else:
        os.link(other / path.name, path)


def record(directory: Path, **entry: Any) -> None:
    """Add a line to the journal of a part."""
    [path] = directory.glob(".journal.*")
    with path.open("a") as f:
        f.write(journal.sealed(json.dumps({"done": [], **entry})) + "\n")


def said(directory: Path, **values: Any) -> None:
    path = directory / ".members"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_outputs_that_are_gone_are_not_made_again(tmp_path: Path, plan: Plan) -> None:
    """They would be zeros, where the journals say that all is there."""
    part(plan, tmp_path / "dst", 1, 2)
    shutil.rmtree(tmp_path / "dst.partial/output")
    with pytest.raises(ConflictError, match="the output of the parts is gone"):
        part(plan, tmp_path / "dst", 2, 2)
    assert not (tmp_path / "dst").exists()
    assert not (tmp_path / "dst.partial/output").exists()


def test_no_room(tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "SLACK", 1 << 60)
    with pytest.raises(OutputError, match="not enough space"):
        part(plan, tmp_path / "dst", 1, 2)


def test_who_prepares_is_killed(tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object, **__: object) -> None:
        HERE.clear()
        raise SystemExit

    for step, whose in (("settle", members.MemberDestination), ("put", claims.Folder)):
        dst = tmp_path / step
        with monkeypatch.context() as m:
            m.setattr(whose, step, killed)
            no_good_bye(m)
            with pytest.raises(SystemExit):
                part(plan, dst, 1, 2)
        assert any(n.startswith(".making-") for n in left(dst.with_name(step + ".partial")))
        part(plan, dst, 2, 2)
        part(plan, dst, 1, 2)
        assert written(dst, plan) == expected(plan)
    assert left(tmp_path) == ["put", "settle", "src"]


def test_progress_counts_the_share_alone(tmp_path: Path, plan: Plan) -> None:
    class Told(NoProgress):
        def __init__(self) -> None:
            self.total = self.done = 0
            self.notes: list[str] = []

        def start(self, total_bytes: int, files: int) -> None:
            assert not self.total
            assert files == 2
            self.total = total_bytes

        def advance(self, nbytes: int) -> None:
            self.done += nbytes

        def note(self, text: str) -> None:
            self.notes.append(text)

    totals = []
    for number in (1, 2):
        told = Told()
        run(plan, tmp_path / "dst", RunOptions(member=Member(number, 2)), told)
        assert told.done == told.total
        totals.append(told.total)
        assert told.notes == []
    assert all(totals)
    assert abs(sum(totals) - plan.bytes_written) < 100


def killed(_: object) -> None:
    """In place of the end of a part."""
    HERE.clear()
    raise SystemExit


def completed_but_left(tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> Path:
    """DST, made by a part that was killed before it removed what the parts had in common."""
    dst = tmp_path / "dst"
    part(plan, dst, 1, 2)
    with monkeypatch.context() as m:
        m.setattr(members.SharedPartial, "remove_all", killed)
        no_good_bye(m)
        with pytest.raises(SystemExit):
            part(plan, dst, 2, 2)
    assert written(dst, plan) == expected(plan)
    return dst


@pytest.mark.parametrize("there", ["empty", "other", "nothing"])
def test_a_directory_with_the_inode_of_dst_is_not_dst(
    tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch, there: str
) -> None:
    """Filesystems give the inode of a directory that was removed to the next one; emptying one keeps it."""
    dst = completed_but_left(tmp_path, plan, monkeypatch)
    inode = dst.stat().st_ino
    for path in dst.iterdir():
        if there == "other":
            path.write_bytes(bytes(path.stat().st_size))
        else:
            path.unlink()
    if there == "nothing":
        dst.rmdir()
    else:
        assert dst.stat().st_ino == inode
    with pytest.raises(ConflictError, match="and its output is gone"):
        part(plan, dst, 1, 2)
    shutil.rmtree(tmp_path / "dst.partial")
    if there == "other":
        shutil.rmtree(dst)
    for number in (1, 2):
        part(plan, dst, number, 2)
    assert written(dst, plan) == expected(plan)


def test_who_completed_it_was_killed_afterwards(tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    dst = completed_but_left(tmp_path, plan, monkeypatch)
    assert part(plan, dst, 2, 2).standing == Standing(Member(2, 2), committed=True)
    assert written(dst, plan) == expected(plan)
    assert left(tmp_path) == ["dst", "src"]
