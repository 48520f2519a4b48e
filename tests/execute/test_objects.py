"""A destination in an object store: absent, or complete, at whichever request a run ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch
from zlib import crc32

import pytest

from ckpttool.errors import AccessError
from ckpttool.execute import RunOptions, RunResult, engine, marker, objects, run
from ckpttool.execute.engine import CompletionQueue
from ckpttool.plan import Output, Plan
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
        patch.object(objects, "open_store", lambda _scheme, _bucket: found),
        patch.object(objects, "CHUNK", 64 << 10),
        patch.object(objects, "WHOLE", 16 << 10),
        patch("tempfile.tempdir", str(tmp_path)),
        patch.object(engine, "CompletionQueue", lambda _, most: CompletionQueue(1, most)),  # all is recorded at once
    ):
        yield found


@pytest.fixture
def gone() -> Iterator[None]:
    """Whoever holds a marker has ended: what is killed here is a run of this process."""
    with patch.object(marker.Holder, "is_gone", lambda _: True):
        yield


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


@pytest.mark.usefixtures("gone")
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


@pytest.mark.usefixtures("gone")
@pytest.mark.parametrize("fault", ["dead before", "dead after"])
def test_a_run_that_ends_twice(fault: str, store: ObjectStore, plan: Plan) -> None:
    count = count_requests(store, plan)
    for i in some(range(5, count, 2), range(5, count, 13)):
        for j in some(range(i % 2, count, 2), range(i % 7, count, 7)):
            store.objects_.clear()
            store.uploads_.clear()
            end_at(store, i, fault, plan)
            end_at(store, j, fault, plan, resume=True)
            check_absent_or_whole(store, plan)
            if store.files() != wanted(plan):
                write(plan, resume=True)
            check_whole(store, plan)


@pytest.mark.usefixtures("gone")
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
