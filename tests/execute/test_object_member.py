"""Several processes that write one prefix of a bucket: absent, or complete, whichever of them ends wherever."""

from __future__ import annotations

import itertools
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool.core.plan import Block, Fill, Output, Plan, Unit, WrittenTensor
from ckpttool.errors import AccessError, CkptError, ConflictError, CorruptError, OutputError, UsageError, VerifyError
from ckpttool.execute import RunOptions, RunResult, run
from ckpttool.execute.checks import check
from ckpttool.execute.destinations import marker, object_member, objects
from ckpttool.execute.destinations.holder import Holder
from ckpttool.execute.options import Member
from ckpttool.version import __version__
from tests.execute.merges import merge_plan
from tests.execute.plans import expected, reshard
from tests.execute.test_bytes import recipes
from tests.execute.test_chunks import small
from tests.execute.test_objects import AT, Dst, check_absent_or_whole, check_whole, plan, with_copies, write
from tests.helpers.object_store import Fault, ObjectStore
from tests.helpers.sample import examples, some

__all__ = ["plan"]  # a fixture


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """A bucket for runs with chunks of 8 KiB and parts of 4."""
    found = ObjectStore()
    small(monkeypatch, found, str(tmp_path), 4 << 10, 8 << 10)
    monkeypatch.setattr(object_member, "LOOK_EVERY", 0.01)
    return found


def member(plan: Plan, number: int, of: int, at: str = AT, **options: Any) -> RunResult:
    dst: Any = Dst(at)
    return run(plan, dst, RunOptions(connections=1, workers=1, member=Member(number, of), **options))


def at(end: int, how: str) -> Fault:
    """One request fails."""
    return lambda number, _: how if number == end else ""


def test_one_after_the_other(store: ObjectStore, plan: Plan, tmp_path: Path) -> None:
    for number, waiting in ((2, (1, 3)), (1, (3,))):
        standing = member(plan, number, 3).standing
        assert standing is not None
        assert (standing.committed, standing.waiting_for) == (False, waiting)
        assert not any("model" in k or "config" in k for k in store.files())
    standing = member(plan, 3, 3).standing
    assert standing is not None
    assert standing.committed
    check_whole(store, plan)
    sent = [r for r in store.requests if r.startswith("put_part")]
    assert len(sent) == len(set(sent))
    assert not list(tmp_path.glob("ckpttool-spool-*"))
    late = member(plan, 2, 3)
    assert late.standing is not None
    assert late.standing.committed
    assert "another part has completed DST" in late.notes[-1]


@pytest.mark.parametrize("manifest", [False, True])
def test_all_at_once(store: ObjectStore, plan: Plan, manifest: bool, tmp_path: Path) -> None:
    write(plan, AT, manifest=manifest)
    right = store.files()
    store.objects_.clear()
    results: list[Any] = [None] * 4

    def one(i: int) -> None:
        try:
            results[i] = member(plan, i + 1, 4, manifest=manifest).standing
        except BaseException as e:  # noqa: BLE001 - looked at below
            results[i] = e

    threads = [threading.Thread(target=one, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert [r for r in results if isinstance(r, BaseException)] == []
    assert store.files() == right
    assert not store.uploads_
    assert any(r.committed for r in results)
    assert not list(tmp_path.glob("ckpttool-spool-*"))


@settings(max_examples=examples(8))
@given(recipes(), st.data())
def test_any_plan(recipe: Callable[[Path], Plan], data: st.DataObject) -> None:
    """Any plan, cut anywhere, members in any order that end at any request; run again until all have ended well."""
    store, choose = ObjectStore(), st.sampled_from
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as monkeypatch:
        plan = recipe(Path(directory, "src"))
        small(monkeypatch, store, directory, data.draw(choose((64, 1000))), data.draw(choose((16, 100, 3000))))
        monkeypatch.setattr(object_member, "LOOK_EVERY", 0.01)
        of, manifest = data.draw(st.integers(1, 4)), data.draw(st.booleans())
        turns = data.draw(st.permutations(range(1, of + 1)))
        for i in turns:
            end, how = data.draw(st.integers(0, 60)), data.draw(choose(("dead before", "dead after")))
            store.fault = at(end, how)
            with suppress(AccessError):
                member(plan, i, of, "s3://bucket/d", manifest=manifest)
            store.heal()
        for i in turns:
            member(plan, i, of, "s3://bucket/d", manifest=manifest)
        found = store.files()
        assert (found.pop("d/ckpttool.manifest.json", None) is not None) == manifest
        assert found == {f"d/{n}": v for n, v in expected(plan).items()}
        assert not store.uploads_
        assert not list(Path(directory).glob("ckpttool-spool-*"))


@pytest.mark.parametrize("fault", ["dead before", "dead after", "before", "after"])
def test_a_member_that_ends_at_any_request(fault: str, store: ObjectStore, plan: Plan) -> None:
    """The first one, which begins the uploads, and the last one, which completes DST."""
    counts = []
    for number in (1, 2):
        store.heal()
        member(plan, number, 2)
        counts.append(len(store.requests))
    for first, count in zip((True, False), counts, strict=True):
        for end in some(range(count), range(len(fault) % 17, count, 17)):
            store.objects_.clear()
            store.uploads_.clear()
            store.heal()
            if not first:
                member(plan, 1, 2)
                store.heal()
            store.fault = at(end, fault)
            with suppress(AccessError):
                member(plan, 1 if first else 2, 2)
            store.heal()
            check_absent_or_whole(store, plan)
            for number in (2, 1) if first else (1, 2):
                member(plan, number, 2)
            check_whole(store, plan)


def test_tensors_that_are_computed(store: ObjectStore, tmp_path: Path) -> None:
    plan, want = merge_plan(tmp_path / "src", rows=400)
    with patch.object(objects, "CHUNK", 256), patch.object(objects, "WHOLE", 100):
        for number in (1, 2, 3):
            member(plan, number, 3, manifest=True)
    assert b"|".join(store.files()[f"run/hf/{o.name}"] for o in plan.outputs) == want


def test_a_run_without_parts_goes_on(store: ObjectStore, plan: Plan) -> None:
    """With --resume one process does what the other parts have not done."""
    member(plan, 2, 3)
    with pytest.raises(OutputError, match="left a partial destination"):
        write(plan)
    assert write(plan, resume=True).bytes_skipped > 0
    check_whole(store, plan)


def test_a_live_member_keeps_others_away(store: ObjectStore, plan: Plan, tmp_path: Path) -> None:
    """A run without --part, and one with another plan and --force."""
    other = reshard(tmp_path / "other", [((64, 768), 0), ((256, 128), 1)], 2, 2)
    leave = object_member.ObjectMember.leave
    seen: list[str] = []

    def look(self: object_member.ObjectMember, pool: Any) -> tuple[int, ...]:
        for others in (
            partial(write, plan, resume=True),
            partial(write, plan, force=True),
            partial(member, other, 2, 2, force=True),
        ):
            with patch("tempfile.tempdir", str(tmp_path / "src")), pytest.raises(OutputError) as e:
                others()
            seen.append(e.value.what)
        return leave(self, pool)

    with patch.object(object_member.ObjectMember, "leave", look):
        member(plan, 1, 2)
    assert len(seen) == 3
    assert all("another run is writing this destination: process" in what for what in seen), seen
    member(plan, 2, 2)
    check_whole(store, plan)
    member(other, 1, 2, force=True)
    member(other, 2, 2, force=True)
    check_whole(store, other)


def test_a_committer_that_died_is_followed(store: ObjectStore, plan: Plan) -> None:
    """On another machine: nobody hears of it any more."""
    member(plan, 1, 2)
    store.heal()
    store.fault = lambda _, name: "dead before" if name == "complete" else ""
    with patch.object(marker.Marker, "release", lambda self: self.end()), pytest.raises(AccessError):
        member(plan, 2, 2)
    store.heal()
    waits = iter([0.0, 30.0, 60.0, 100.0])

    def later(_: float) -> None:
        store.age = next(waits)

    with patch.object(Holder, "is_gone", lambda _: False), patch("time.sleep", later):
        member(plan, 1, 2)
    assert store.age == 100.0
    check_whole(store, plan)


def test_two_commit_at_once(store: ObjectStore, plan: Plan) -> None:
    """Both have seen that all are done: one of them completes DST, and the other one is content."""
    commit, inside = object_member.ObjectCommit.begin, threading.Barrier(2)

    def together(self: object_member.ObjectCommit, beginning: Any) -> Any:
        inside.wait()
        return commit(self, beginning)

    leave, done = object_member.ObjectMember.leave, threading.Barrier(2)

    def last(self: object_member.ObjectMember, pool: Any) -> tuple[int, ...]:
        is_done = self._is_done

        def wait(number: int) -> bool:
            if number == 1:
                done.wait()
            return is_done(number)

        with patch.object(self, "_is_done", wait):
            return leave(self, pool)

    results: list[Any] = [None, None]

    def one(i: int) -> None:
        try:
            results[i] = member(plan, i + 1, 2)
        except BaseException as e:  # noqa: BLE001 - looked at below
            results[i] = e

    with (
        patch.object(object_member.ObjectCommit, "begin", together),
        patch.object(object_member.ObjectMember, "leave", last),
    ):
        threads = [threading.Thread(target=one, args=(i,)) for i in range(2)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert all(isinstance(r, RunResult) for r in results), results
    assert all(r.standing.committed for r in results)
    assert sorted("another part has completed DST" in "".join(r.notes) for r in results) == [False, True]
    check_whole(store, plan)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"of": 3}, "the other parts are 2, this is one of 3"),
        ({"manifest": True}, "were started without --manifest"),
        ({"plan": True}, "have another plan"),
        ({"version": True}, "the other parts have ckpttool"),
    ],
)
def test_members_that_do_not_agree(
    change: dict[str, Any], said: str, store: ObjectStore, plan: Plan, tmp_path: Path
) -> None:
    member(plan, 1, 2)
    before = store.files()
    other = reshard(tmp_path / "other", [((64, 768), 0)], 2, 2) if "plan" in change else plan
    version = "0" if "version" in change else __version__
    with patch.object(object_member, "__version__", version), pytest.raises(ConflictError, match=said):
        member(other, 2, change.get("of", 2), manifest="manifest" in change)
    assert store.files() == before
    member(plan, 2, 2)
    check_whole(store, plan)


def test_a_destination_that_exists(store: ObjectStore, plan: Plan) -> None:
    store.objects_["run/hf/config.json"] = b"{}", "x"
    with pytest.raises(OutputError, match="the destination exists"):
        member(plan, 1, 2)
    assert store.files() == {"run/hf/config.json": b"{}"}
    member(plan, 1, 2, force=True)
    assert store.files()["run/hf/config.json"] == b"{}"
    member(plan, 2, 2, force=True)
    check_whole(store, plan)


def test_wrong_input_leaves_nothing(store: ObjectStore, plan: Plan) -> None:
    member(plan, 1, 2)
    source = Path(plan.sources[0].path)
    source.write_bytes(source.read_bytes()[:-1])
    with pytest.raises(CorruptError):
        member(plan, 2, 2)
    source.write_bytes(bytes(plan.sources[0].size))
    assert store.files()  # checked before anything is joined

    def fail(*_: Any) -> Any:
        raise CorruptError("bad")

    plan = replace(plan, sources=[replace(plan.sources[0], tag=str(source.stat().st_mtime_ns)), *plan.sources[1:]])
    with patch.object(object_member.ObjectMember, "leave", fail), pytest.raises(CorruptError):
        member(plan, 2, 2, force=True)
    assert not store.objects_
    assert not store.uploads_


def test_a_difference_leaves_nothing(store: ObjectStore, plan: Plan) -> None:
    """--verify, by whoever completes DST."""

    def wrong(*_: Any) -> None:
        raise CkptError("different")

    member(plan, 1, 2, verify=wrong)
    with pytest.raises(CkptError, match="different"):
        member(plan, 2, 2, verify=wrong)
    assert not store.objects_
    assert not store.uploads_


@pytest.mark.parametrize("asked", [(), (1,), (2,), (1, 2)])
@pytest.mark.usefixtures("store")
def test_what_one_part_was_asked_to_verify(plan: Plan, asked: tuple[int, ...]) -> None:
    """It is verified once, whichever part completes it; also if only its first attempt was asked."""
    seen: list[object] = []

    def check(*_: object) -> None:
        seen.append(None)

    for number, first in ((1, True), (1, False), (2, True)):
        verify = check if number in asked and first else None
        done = member(plan, number, 2, prove=check, verify=verify)
        assert done.verified == (number == 2 and bool(asked))
    assert len(seen) == bool(asked)


def test_asked_to_verify_when_it_is_made(store: ObjectStore, plan: Plan) -> None:
    """A part that runs again verifies what the others have completed without it."""

    def wrong(*_: Any) -> None:
        raise VerifyError("different", hint="nothing was kept")

    for number in (1, 2):
        assert not member(plan, number, 2).verified
    assert member(plan, 1, 2, verify=lambda *_: None).verified
    with pytest.raises(VerifyError, match="different") as e:
        member(plan, 1, 2, verify=wrong)
    assert "it stays" in str(e.value.hint)
    check_whole(store, plan)


def test_an_error_says_how_to_go_on(store: ObjectStore, plan: Plan) -> None:
    sent = iter(range(100))
    store.fault = lambda _, name: "before" if name == "put_part" and next(sent) > 4 else ""
    with pytest.raises(AccessError) as e:
        member(plan, 2, 2)
    store.heal()
    assert "run part 2 of 2 again to continue" in str(e.value.hint)
    member(plan, 2, 2)
    member(plan, 1, 2)
    check_whole(store, plan)


def test_files_with_checksums_inside_are_refused(store: ObjectStore) -> None:
    fill = Fill(Block(0, 50, (1,)), (100,), "U8")
    output = Output("a.bin", 200, ((0, b"head"),), checksums={50: (0,)})
    with pytest.raises(UsageError, match="checksums of its tensors"):
        member(Plan([], [output], [Unit("t", (fill,), (WrittenTensor("t", 0, 50, 100),))]), 1, 2)
    assert not store.objects_


def test_a_part_that_was_thought_dead(store: ObjectStore, plan: Plan) -> None:
    """It comes back when the others have completed DST, with hashes to leave and chunks to send."""
    record = object_member.ObjectMember.record
    came: list[object_member.ObjectMember] = []

    def late(self: object_member.ObjectMember, *given: Any) -> None:
        if self.member.number == 1 and not came:
            came.append(self)
            with patch.object(Holder, "is_gone", lambda _: True), patch("tempfile.tempdir", str(came_at)):
                write(plan, resume=True, manifest=True)
            self._sums["0.0"] = "taken before it fell silent"
        record(self, *given)

    came_at = Path(plan.sources[0].path).parent
    with patch.object(object_member.ObjectMember, "record", late):
        result = member(plan, 1, 2, manifest=True)
    assert came
    assert "another part has completed DST" in result.notes[-1]
    assert not [k for k in store.files() if ".ckpttool-partial" in k]
    assert not store.uploads_


def test_a_destination_that_has_lost_an_object(store: ObjectStore, plan: Plan) -> None:
    for number in (1, 2):
        member(plan, number, 2)
    del store.objects_["run/hf/rank_0.bin"]
    with pytest.raises(OutputError, match="the destination exists"):
        member(plan, 1, 2)


def test_comparisons_are_made_by_one_part(store: ObjectStore, plan: Plan, tmp_path: Path) -> None:
    """Not again by the one that completes DST; a difference ends the run, whoever finds it."""
    plan = with_copies(plan, tmp_path / "copies", b"x")
    compared: list[int] = []

    def look(step: Any, *given: Any) -> None:
        compared.append(step.a.offset)
        check(step, *given)

    with patch("ckpttool.execute.workforce.check", look):
        for number in (1, 2, 3):
            member(plan, number, 3)
    check_whole(store, plan)
    assert len(compared) == len(set(compared)) > 3
    store.objects_.clear()
    wrong = with_copies(plan, tmp_path / "wrong", b"y")
    failed = 0
    for number in (1, 2, 3):
        try:
            member(wrong, number, 3)
        except CorruptError:
            failed += 1
            break
    assert failed
    assert not store.objects_
    assert not store.uploads_


def test_hashes_that_another_part_has_taken(store: ObjectStore, plan: Plan) -> None:
    """Of a tensor at the border of two shares: chunks do not wait for them."""
    write(plan, manifest=True)
    right = store.files()
    store.objects_.clear()
    for number in (1, 2, 3):
        member(plan, number, 3, manifest=True)
    assert store.files() == right


def test_any_two_of_three(store: ObjectStore, plan: Plan) -> None:
    for order in itertools.permutations((1, 2, 3)):
        store.objects_.clear()
        for number in order:
            member(plan, number, 3)
            member(plan, order[0], 3)  # again
        check_whole(store, plan)
