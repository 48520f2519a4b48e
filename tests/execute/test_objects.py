"""A destination in an object store: absent, or complete, at whichever request a run ends."""

from __future__ import annotations

import errno
import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from zlib import crc32

import pytest

from ckpttool.core.plan import AssertEqual, Block, Output, Plan, SourceFile, Unit
from ckpttool.errors import AccessError, ConflictError, CorruptError, OutputError, VerifyError
from ckpttool.execute import NoProgress, RunOptions, RunResult, files, run, workforce
from ckpttool.execute.destinations import holder, marker, objects, spool
from ckpttool.execute.workforce import CompletionQueue
from tests.execute.plans import expected, reshard
from tests.helpers.object_store import ObjectStore
from tests.helpers.sample import some

AT = "s3://bucket/run/hf"


class Dst(str):
    """The text of a place; a run asks nothing else of it."""

    __slots__ = ()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ObjectStore]:
    """A bucket for runs with chunks of 64 KiB."""
    found = ObjectStore()
    with (
        patch.object(objects, "open_bucket", lambda _scheme, _bucket, **_: found),
        patch.object(objects, "CHUNK", 64 << 10),
        patch.object(objects, "WHOLE", 16 << 10),
        patch("tempfile.tempdir", str(tmp_path)),
        patch.object(workforce, "CompletionQueue", lambda _, most: CompletionQueue(1, most)),  # all is recorded at once
    ):
        yield found


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return with_small_files(reshard(tmp_path / "src", [((64, 768), 0), ((256, 128), 1), ((512,), None)], 2, 2))


def with_small_files(plan: Plan) -> Plan:
    """The same with a config, an index and an empty file."""
    small = [("config.json", b"{}"), ("model.safetensors.index.json", b'{"weight_map": {}}'), ("sub/empty", b"")]
    return replace(plan, outputs=[*plan.outputs, *[Output(n, len(d), ((0, d),) if d else ()) for n, d in small]])


def write(plan: Plan, at: str = AT, **options: Any) -> RunResult:
    dst: Any = Dst(at)
    return run(plan, dst, RunOptions(connections=1, workers=1, **options))


def wanted(plan: Plan, at: str = AT) -> dict[str, bytes]:
    prefix = at.removeprefix("s3://bucket").lstrip("/")
    return {f"{prefix}/{n}" if prefix else n: data for n, data in expected(plan).items()}


def check_whole(store: ObjectStore, plan: Plan, at: str = AT) -> None:
    assert store.files() == wanted(plan, at)
    assert not store.uploads_


def check_absent_or_whole(store: ObjectStore, plan: Plan, old: dict[str, bytes] | None = None) -> None:
    """What a reader can see: every object that is there is right; with config.json, all of them are there."""
    right, there = wanted(plan), {k: v for k, v in store.files().items() if "/.ckpttool-partial" not in k}
    if old is not None and "run/hf/config.json" in there and there["run/hf/config.json"] == old["run/hf/config.json"]:
        assert there == old
        return
    assert all(v in (right.get(k), (old or {}).get(k)) for k, v in there.items())
    if "run/hf/config.json" in there:
        assert there == right


def test_what_is_written(store: ObjectStore, plan: Plan, tmp_path: Path) -> None:
    result = write(plan)
    check_whole(store, plan)
    assert result.bytes_skipped == 0
    assert not list(tmp_path.glob("ckpttool-spool-*"))
    made = [r for r in store.requests if r.startswith(("create", "complete"))]
    assert len(made) == 4  # two objects in chunks
    puts = [r for r in store.requests if r.startswith("put ") and ".ckpttool" not in r]
    assert puts[-2:] == ["put run/hf/model.safetensors.index.json", "put run/hf/config.json"]
    assert store.requests.index("put run/hf/.ckpttool-partial.json") < store.requests.index(made[0])


FAULTS = ("dead before", "dead after", "before", "after")


def count_requests(store: ObjectStore, plan: Plan, **options: Any) -> int:
    write(plan, **options)
    return len(store.requests)


def end_at(store: ObjectStore, number: int, fault: str, plan: Plan, **options: Any) -> bool:
    """A run in which one request fails; whether it ended by that."""
    store.heal()
    store.fault = lambda i, _: fault if i == number else ""
    try:
        write(plan, **options)
    except AccessError:
        return True
    finally:
        store.heal()
    return False


def test_a_note_names_what_could_not_be_removed(store: ObjectStore, plan: Plan) -> None:
    """The store does not answer to the very last request, which deletes the marker."""
    last = count_requests(store, plan) - 1
    store.objects_.clear()
    store.heal()
    store.fault = lambda i, _: "dead before" if i == last else ""
    (note,) = [n for n in write(plan).notes if "could not be removed" in n]
    store.heal()
    assert note.startswith("DST is complete; s3://bucket/run/hf/.ckpttool-partial.json could not be removed (")
    assert store.files().keys() - wanted(plan).keys() == {"run/hf/.ckpttool-partial.json"}
    write(plan, resume=True)
    check_whole(store, plan)


@pytest.mark.product
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("manifest", [False, True])
def test_a_run_that_ends_at_any_request(fault: str, manifest: bool, store: ObjectStore, plan: Plan) -> None:
    count = count_requests(store, plan, manifest=manifest)
    right = store.files()
    for i in some(range(count), range(crc32(fault.encode()) % 7, count, 7)):
        store.objects_.clear()
        end_at(store, i, fault, plan, manifest=manifest)
        check_absent_or_whole(store, plan) if not manifest else None
        if store.files() != right:
            write(plan, resume=True, manifest=manifest)
        assert store.files() == right, i
        assert not store.uploads_, i


@pytest.mark.parametrize("fault", ["dead before", "dead after"])
def test_a_run_that_ends_twice(fault: str, store: ObjectStore, plan: Plan) -> None:
    count = count_requests(store, plan)
    for i in some(range(5, count - 1, 2), range(5, count, 23)):  # after the last request, DST is there
        for j in some(range(i % 2, count, 2), range(i % 7, count, 9)):
            store.objects_.clear()
            store.uploads_.clear()
            end_at(store, i, fault, plan)
            end_at(store, j, fault, plan, resume=True)
            check_absent_or_whole(store, plan)
            if store.files() != wanted(plan):
                write(plan, resume=True)
            check_whole(store, plan)


@pytest.mark.parametrize("fault", FAULTS)
def test_force_over_a_destination(fault: str, store: ObjectStore, plan: Plan, tmp_path: Path) -> None:
    other = with_small_files(reshard(tmp_path / "other", [((64, 768), 0), ((256, 128), 1), ((512,), None)], 2, 2))
    assert [o.size for o in other.outputs] == [o.size for o in plan.outputs]
    other.outputs[2] = replace(other.outputs[2], literals=((0, b"[]"),))
    Path(other.sources[0].path).write_bytes(bytes(other.sources[0].size))
    st = Path(other.sources[0].path).stat()
    other.sources[0] = replace(other.sources[0], tag=str(st.st_mtime_ns))
    write(other)
    store.objects_["run/hf/left/over.safetensors"] = b"old", "x"
    old = dict(store.objects_)
    seen = {k: v for k, (v, _) in old.items()}
    store.heal()
    count = count_requests(store, plan, force=True)
    check_whole(store, plan)
    for i in some(range(count), range(crc32(fault.encode()) % 7, count, 7)):
        store.objects_ = dict(old)
        store.uploads_.clear()
        end_at(store, i, fault, plan, force=True)
        check_absent_or_whole(store, plan, seen)
        if store.files() != wanted(plan):
            write(plan, resume=True, force=True)
        check_whole(store, plan)


# -- what an interrupted run has left


def interrupted(store: ObjectStore, plan: Plan, name: str = "complete", **options: Any) -> None:
    """A run that does not get beyond the first request of this name."""
    store.heal()
    store.fault = lambda _, request: "dead before" if request == name else ""
    with pytest.raises(AccessError) as e:
        write(plan, **options)
    assert e.value.hint == "rerun with --resume to continue"
    store.heal()


def test_what_has_been_sent_is_not_sent_again(store: ObjectStore, plan: Plan) -> None:
    interrupted(store, plan)
    result = write(plan, resume=True)
    check_whole(store, plan)
    assert not [r for r in store.requests if r.startswith(("put_part", "create"))]
    # A part that also writes into an object that is put whole is done again; there is one here.
    assert result.bytes_skipped > 0.5 * plan.bytes_written


def test_neither_resume_nor_force(store: ObjectStore, plan: Plan) -> None:
    interrupted(store, plan)
    before = store.files(), store.uploads_.keys()
    with pytest.raises(OutputError, match="an interrupted run left a partial destination") as e:
        write(plan)
    assert e.value.hint == "--resume continues it, --force starts over"
    assert (store.files(), store.uploads_.keys()) == before


def test_the_remains_of_another_plan(store: ObjectStore, plan: Plan, tmp_path: Path) -> None:
    other = reshard(tmp_path / "other", [((64, 768), 0), ((256, 128), 1)], 2, 2)
    other.outputs[0] = replace(other.outputs[0], name="another.bin")
    interrupted(store, other)
    before = store.files()
    with pytest.raises(ConflictError, match="the interrupted run had a different plan"):
        write(plan, resume=True)
    assert store.files() == before
    write(plan, force=True)  # and its upload under another name goes, too
    check_whole(store, plan)


def test_a_marker_that_cannot_be_read(store: ObjectStore, plan: Plan) -> None:
    for data in (b"", b"[]", b'{"ckpttool-partial": 1}', b'{"ckpttool-partial": 2, "run": 3}', b"\xff" * 9):
        store.objects_["run/hf/.ckpttool-partial.json"] = data, ""
        with pytest.raises(ConflictError, match="its marker is unreadable"):
            write(plan, resume=True)
        with pytest.raises(OutputError, match="an interrupted run left"):
            write(plan)
        assert store.files()["run/hf/.ckpttool-partial.json"] == data
    write(plan, force=True)
    check_whole(store, plan)


def test_an_object_of_the_same_size_is_not_taken_for_one_of_the_run(store: ObjectStore, plan: Plan) -> None:
    interrupted(store, plan)
    for upload in store.uploads_.values():
        store.objects_[upload.key] = bytes(sum(map(len, upload.parts.values()))), "another run"
    store.uploads_.clear()
    with pytest.raises(OutputError, match="the destination exists"):
        write(plan, resume=True)
    write(plan, resume=True, force=True)
    check_whole(store, plan)


def test_uploads_that_the_marker_does_not_name_are_not_continued(store: ObjectStore, plan: Plan) -> None:
    interrupted(store, plan)
    for upload in list(store.uploads_.values()):
        strange = store.create(upload.key, upload.run)
        store.uploads_[strange].parts = {n: bytes(len(p)) for n, p in upload.parts.items()}
    write(plan, resume=True)
    check_whole(store, plan)


def test_a_part_of_another_size_is_sent_again(store: ObjectStore, plan: Plan) -> None:
    interrupted(store, plan)
    upload = next(iter(store.uploads_.values()))
    upload.parts[1] = upload.parts[1][:-1]
    del upload.parts[2]
    store.heal()
    write(plan, resume=True)
    check_whole(store, plan)
    assert len([r for r in store.requests if r.startswith("put_part")]) == 2


def test_an_upload_that_a_rule_has_aborted(store: ObjectStore, plan: Plan) -> None:
    interrupted(store, plan)
    del store.uploads_[min(store.uploads_)]
    write(plan, resume=True)
    check_whole(store, plan)


@pytest.mark.parametrize("moment", ["put_part", "parts", "complete"])
def test_an_upload_that_goes_while_it_is_needed(moment: str, store: ObjectStore, plan: Plan) -> None:
    def lose(_: int, name: str) -> str:
        if name == moment:
            store.uploads_.clear()
        return ""

    store.fault = lose
    with pytest.raises(OutputError, match=r"an upload (is gone|disappeared)"):
        write(plan)
    store.heal()
    write(plan, resume=True)
    check_whole(store, plan)


def test_a_part_that_the_store_has_lost(store: ObjectStore, plan: Plan) -> None:
    def lose(_: int, name: str) -> str:
        if name == "parts":
            for upload in store.uploads_.values():
                upload.parts.pop(2, None)
        return ""

    store.fault = lose
    with pytest.raises(OutputError, match="part 2 of an upload is missing, or has another size"):
        write(plan)
    assert not any("config.json" in k for k in store.objects_)


# -- several runs


def test_another_run_is_writing(store: ObjectStore, plan: Plan) -> None:
    with patch("os.getpid", os.getppid):
        interrupted(store, plan)
    every: list[dict[str, Any]] = [{}, {"resume": True}, {"force": True}]
    for options in every:
        before = store.files()
        with pytest.raises(OutputError, match=r"another run is writing this destination: process \d+ on ") as e:
            write(plan, **options)
        assert e.value.hint is not None
        assert "if it was killed, repeat the command in 90 s" in e.value.hint
        assert store.files() == before
    store.age = marker.SILENT + 1
    write(plan, resume=True)
    check_whole(store, plan)


def test_a_run_that_has_let_go(store: ObjectStore, plan: Plan) -> None:
    store.fault = lambda _, name: "before" if name == "complete" else ""
    with pytest.raises(AccessError):
        write(plan)
    assert json.loads(store.files()["run/hf/.ckpttool-partial.json"])["holder"] is None
    store.heal()
    write(plan, resume=True)
    check_whole(store, plan)


@pytest.mark.parametrize("moment", ["complete", "put run/hf/config.json"])
def test_a_run_that_another_one_has_followed(moment: str, store: ObjectStore, plan: Plan) -> None:
    key = "run/hf/.ckpttool-partial.json"

    def follow(number: int, name: str) -> str:
        if name == "parts" or (moment != "complete" and number and store.requests[-1] == "put run/hf/sub/empty"):
            said = json.loads(store.objects_[key][0])
            said["holder"] |= {"token": "another"}
            store.objects_[key] = json.dumps(said).encode(), "x"
        return ""

    store.fault = follow
    with pytest.raises(OutputError, match="another run has taken this destination over"):
        write(plan)
    assert key in store.objects_
    assert store.uploads_
    assert "run/hf/config.json" not in store.objects_


def test_two_that_begin_at_once(store: ObjectStore, plan: Plan) -> None:
    real = store.put

    def late(key: str, data: Any, run: str, **conditions: Any) -> str:
        if conditions.get("new"):
            store.objects_[key] = marker.MarkerState("r", "p", 1, 1, holder=holder.Holder.here()).to_json(), "r"
        return real(key, data, run, **conditions)

    with patch.object(store, "put", late), pytest.raises(OutputError, match="another run is writing this destination"):
        write(plan)
    assert list(store.objects_) == ["run/hf/.ckpttool-partial.json"]


def test_the_spool_is_locked(store: ObjectStore, plan: Plan) -> None:
    held = spool.Spool(AT)
    held.open()
    with patch.object(spool, "PATIENCE", 0.0), pytest.raises(OutputError, match="another run is writing"):
        write(plan)
    assert not store.objects_
    held.close()
    held.path.mkdir(mode=0o700)
    (held.path / "sub").mkdir()
    (held.path / "rank_0.bin").write_bytes(b"left by a killed run")
    write(plan)
    check_whole(store, plan)
    assert not held.path.exists()


@pytest.mark.parametrize("what", ["link", "file", "open"])
def test_what_lies_where_the_spool_is_to_be(what: str, store: ObjectStore, plan: Plan, tmp_path: Path) -> None:
    path = spool.Spool(AT).path
    (tmp_path / "mine").mkdir()
    if what == "link":
        path.symlink_to(tmp_path / "mine")
    elif what == "file":
        path.touch()
    else:
        path.mkdir()
        path.chmod(0o777)
    with pytest.raises(OutputError, match="the directory for outputs that wait to be sent"):
        write(plan)
    assert not store.objects_


# -- refused, and wrong input


def test_what_is_there_stays(store: ObjectStore, plan: Plan) -> None:
    for key in ("run/hf/config.json", "run/hf", "run/hf/sub/x"):
        store.objects_ = {key: (b"mine", "")}
        with pytest.raises(OutputError, match="the destination exists") as e:
            write(plan)
        assert e.value.where == (AT, f"s3://bucket/{key}")
        assert store.files() == {key: b"mine"}
    store.objects_ = {"run/hf/": (b"", ""), "run/hf2/x": (b"mine", ""), "run/hf.json": (b"mine", "")}
    write(plan)  # a folder as consoles make them, and neighbours
    assert store.files() == wanted(plan) | {"run/hf/": b"", "run/hf2/x": b"mine", "run/hf.json": b"mine"}


def test_a_destination_that_appears(store: ObjectStore, plan: Plan) -> None:
    def appear(_: int, name: str) -> str:
        if name == "parts":
            store.objects_["run/hf/mine"] = b"mine", ""
        return ""

    store.fault = appear
    with pytest.raises(OutputError, match="the destination appeared during the run"):
        write(plan)
    assert sorted(store.objects_) == ["run/hf/.ckpttool-partial.json", "run/hf/mine"]
    write(plan, resume=True, force=True)
    check_whole(store, plan)


def test_a_whole_bucket(store: ObjectStore, plan: Plan) -> None:
    write(plan, "s3://bucket")
    check_whole(store, plan, "s3://bucket")
    store.objects_["mine"] = b"mine", ""
    with pytest.raises(OutputError, match="--force would delete everything in the bucket"):
        write(plan, "s3://bucket", force=True)
    assert "mine" in store.objects_


@pytest.mark.parametrize(
    ("source", "at", "what"),
    [
        ("s3://bucket/run/hf/x.bin", AT, "SRC and DST are the same"),
        ("s3://bucket/run/hf/a/x.bin", AT, "SRC is inside DST"),
        ("s3://bucket/run/x.bin", AT, "DST is inside SRC"),
        ("s3://bucket/x.bin", AT, "DST is inside SRC"),
        ("s3://bucket/run/hf", AT, "SRC is inside DST"),
        ("s3://bucket/run/hfx/x.bin", AT, ""),
        ("s3://other/run/hf/x.bin", AT, ""),
        ("/run/hf/x.bin", AT, ""),
    ],
)
@pytest.mark.usefixtures("store")
def test_source_and_destination_apart(source: str, at: str, what: str) -> None:
    dst: Any = Dst(at)
    found = objects.destination(dst, RunOptions())
    if not what:
        found.check([source], [], force=False)
        return
    for force in (False, True):
        with pytest.raises(OutputError, match=what):
            found.check([source], [], force=force)


def test_names_that_are_no_keys(store: ObjectStore, plan: Plan) -> None:
    for name, what in (("a\udcff", "a name is not UTF-8"), ("ä" * 600, "a name is longer than 1,024 bytes")):
        bad = replace(plan, outputs=[*plan.outputs, Output(name, 0)])
        with pytest.raises(OutputError, match=what):
            write(bad)
        assert not store.objects_
    odd = replace(plan, outputs=[*plan.outputs, Output("a b/%2F+ü\x01?#", 3, ((0, b"odd"),))])
    write(odd)
    assert store.files()["run/hf/a b/%2F+ü\x01?#"] == b"odd"


@pytest.mark.parametrize("force", [False, True])
def test_a_source_that_changes(force: bool, store: ObjectStore, plan: Plan) -> None:
    if force:
        store.objects_["run/hf/config.json"] = b"old", ""
    before = store.files()

    def change(_: int, name: str) -> str:
        if name == "parts":
            Path(plan.sources[0].path).touch()
        return ""

    store.fault = change
    with pytest.raises(CorruptError, match="a source has changed"):
        write(plan, force=force)
    assert store.files() == before
    assert not store.uploads_


def test_a_verification_that_fails(store: ObjectStore, plan: Plan) -> None:
    def verify(_place: Any, _advance: Any) -> None:
        assert "run/hf/rank_0.bin" in store.objects_
        assert "run/hf/config.json" not in store.objects_
        raise VerifyError("wrong")

    with patch.object(objects, "Overlay"), pytest.raises(VerifyError):
        write(plan, verify=verify)
    assert not store.objects_
    assert not store.uploads_


def test_interrupted_by_the_user(store: ObjectStore, plan: Plan) -> None:
    class Impatient(NoProgress):
        def file_done(self, name: str, nbytes: int) -> None:
            if name == "rank_1.bin":
                raise KeyboardInterrupt

    dst: Any = Dst(AT)
    with pytest.raises(KeyboardInterrupt, match="rerun with --resume"):
        run(plan, dst, RunOptions(connections=1, workers=1), Impatient())
    write(plan, resume=True)
    check_whole(store, plan)


def test_one_file(store: ObjectStore) -> None:
    """convert-json writes a DST that is an object, small or in chunks."""
    for size in (5, 200_000):
        one = Plan([], [Output("m.json", size, ((0, bytes(range(256)) * (size // 256) + b"x" * (size % 256)),))], [])
        write(one, "s3://bucket/a/m.json", single=True)
        assert store.files() == {"a/m.json": one.outputs[0].literals[0][1]}
        store.objects_["a/m.json.bak"] = b"mine", ""
        with pytest.raises(OutputError, match="the destination exists"):
            write(one, "s3://bucket/a/m.json", single=True)
        write(one, "s3://bucket/a/m.json", single=True, force=True)
        assert store.files().pop("a/m.json.bak") == b"mine"
        store.objects_ = {"a/m.json/x": (b"mine", "")}
        with pytest.raises(OutputError, match="the destination exists"):
            write(one, "s3://bucket/a/m.json", single=True)
        store.objects_ = {}


def test_nothing_to_write(store: ObjectStore) -> None:
    write(Plan([], [], []))
    assert not store.objects_
    write(Plan([], [Output("zeros", 300_000)], []))  # chunks that no part writes into
    assert store.files() == {"run/hf/zeros": bytes(300_000)}


# -- the spool


def test_bytes_that_have_been_sent_leave_the_disk(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * (1 << 20))
    blocks = file.stat().st_blocks
    spool.Spool.forget(str(file), 0, 1 << 19)
    if file.stat().st_blocks == blocks:
        pytest.skip("this filesystem makes no holes")
    assert file.read_bytes() == bytes(1 << 19) + b"x" * (1 << 19)


def test_a_second_name_of_a_file_is_not_emptied(tmp_path: Path) -> None:
    file, source = tmp_path / "file", tmp_path / "source"
    source.write_bytes(b"x" * (1 << 20))
    file.hardlink_to(source)
    spool.Spool.forget(str(file), 0, 1 << 20)
    assert source.read_bytes() == b"x" * (1 << 20)


def test_a_full_spool_disk(store: ObjectStore, plan: Plan) -> None:
    with patch("shutil.disk_usage", lambda _: SimpleNamespace(free=100)), pytest.raises(OutputError) as e:
        write(plan)
    assert e.value.what.startswith("not enough space for data that waits to be sent")
    assert e.value.hint == "free space there, or set TMPDIR to a directory on a larger disk"
    assert not store.objects_


def test_a_marker_that_goes_while_it_is_taken_over(store: ObjectStore, plan: Plan) -> None:
    """The other run has just finished."""
    interrupted(store, plan)

    def finish(*_: object, **conditions: object) -> str:
        assert conditions["replaces"]
        store.objects_.pop("run/hf/.ckpttool-partial.json")
        raise FileNotFoundError

    with patch.object(store, "put", finish), pytest.raises(OutputError, match="another run is writing"):
        write(plan, resume=True)


def test_a_spool_disk_that_fills_up(store: ObjectStore, plan: Plan) -> None:
    real, calls = files.FilePool.write, itertools.count()

    def full(self: files.FilePool, path: str, offset: int, data: memoryview, **how: bool) -> None:
        if "rank_1" in path and next(calls) > 0:
            raise files.write_error(OSError(errno.ENOSPC, "No space left on device"), path, offset, data.nbytes)
        real(self, path, offset, data, **how)

    with patch.object(files.FilePool, "write", full), pytest.raises(OutputError, match="no space left") as e:
        write(plan)
    assert e.value.hint is not None
    assert e.value.hint.startswith("free space there, or set TMPDIR to a directory on a larger disk")
    write(plan, resume=True)
    check_whole(store, plan)


def with_copies(plan: Plan, path: Path, last: bytes) -> Plan:
    """The same with two copies of a large tensor to compare; the last byte of one of them is x."""
    size = 3 << 20
    path.write_bytes(bytes(size - 1) + b"x" + bytes(size - 1) + last)
    sources = [*plan.sources, SourceFile(str(path), 2 * size, str(path.stat().st_mtime_ns))]
    one, other = (Block(len(plan.sources), at, (1,)) for at in (0, size))
    unit = Unit("copies", (AssertEqual(one, other, (size,), "U8", "copies"),))
    return replace(plan, sources=sources, units=[*plan.units, unit])


@pytest.mark.parametrize("resume", [False, True])
def test_copies_that_disagree(store: ObjectStore, plan: Plan, tmp_path: Path, resume: bool) -> None:
    """Comparisons of large tensors are parts that write nothing: no chunk says that they were made."""
    plan = with_copies(plan, tmp_path / "copies", b"y")
    if resume:
        with patch("ckpttool.execute.workforce.check", lambda *_: None):
            interrupted(store, plan)
    with pytest.raises(CorruptError):
        write(plan, resume=resume)
    assert not store.objects_


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"sums": []}', b'{"sums": {"1.0": 5}}', b"[" * 10**5, b"\xff"])
def test_hashes_that_somebody_has_put_there(data: bytes) -> None:
    """They are taken again."""
    found = {"n/R-000007.json": data, "n/R-x.json": b'{"sums": {}}', "n/R-000002.json": b'{"sums": {"0.0": "ab"}}'}
    bucket = SimpleNamespace(get=lambda key: SimpleNamespace(data=found[key]))
    notes = SimpleNamespace(notes="n/")
    said: Any = SimpleNamespace(
        _bucket=bucket, _there=lambda _: [(key, 0) for key in found], _keys=notes, _run="R", _notes=0
    )
    assert objects.ObjectDestination._noted_sums(said) == {"0.0": "ab"}
