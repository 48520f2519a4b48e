"""``az://`` as a destination, against Azurite: what ``Store`` promises, and runs that are stopped."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import ckpttool
from ckpttool.errors import AccessError, OutputError
from ckpttool.execute import RunOptions, run, workforce
from ckpttool.execute.destinations import holder
from ckpttool.execute.destinations import objects as execute_objects
from ckpttool.execute.workforce import CompletionQueue
from ckpttool.storage import objects
from ckpttool.storage.buckets import azure
from ckpttool.storage.buckets.azure import AzureBucket
from ckpttool.storage.buckets.base import FileSlice, GoneError, TakenError
from ckpttool.storage.http import client
from ckpttool.storage.place import parse_place, read_all, walk
from tests.execute.plans import expected, reshard
from tests.execute.test_objects import with_small_files
from tests.helpers.sample import some
from tests.peers.storage import servers
from tests.peers.storage.servers import Server

SOURCE = Path("fixtures/llama_tp8")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with servers.azurite(tmp_path_factory.mktemp("azurite")) as found:
        yield found
    client()._connections.forget()


@pytest.fixture
def store(server: Server) -> AzureBucket:
    return azure.open_bucket(server.root.removeprefix("az://"), writes=True)


def keys(store: AzureBucket, prefix: str) -> dict[str, int]:
    """What a listing says: sizes by key."""
    return {key: info.size for page in store.pages(prefix, deep=True) for key, info in page.files}


def is_there(store: AzureBucket, key: str) -> bool:
    """Whether a blob is."""
    with suppress(FileNotFoundError):
        return store.head(key).size >= 0
    return False


def piece(path: Path, data: bytes) -> FileSlice:
    path.write_bytes(b"before" + data + b"behind")
    return FileSlice(path, 6, len(data), threading.Event())


def test_objects_and_conditions(store: AzureBucket) -> None:
    tag = store.put("a/marker", b"1", "run1", new=True)
    with pytest.raises(TakenError):
        store.put("a/marker", b"2", "run2", new=True)
    second = store.put("a/marker", b"2", "run2", replaces=tag)
    with pytest.raises(TakenError):
        store.put("a/marker", b"3", "run3", replaces=tag)
    found = store.get("a/marker")
    assert found
    assert (found.data, found.tag) == (b"2", second)
    assert -5 < found.age < 60
    held = store.head("a/marker")
    assert held
    assert (held.size, held.run) == (1, "run2")
    store.put("a/empty", b"", "run")
    assert keys(store, "a/") == {"a/empty": 0, "a/marker": 1}
    for key in ("a/marker", "a/marker", "a/empty"):
        store.delete(key)
    assert (keys(store, "a/"), store.get("a/marker"), is_there(store, "a/marker")) == ({}, None, False)


@pytest.mark.parametrize("size", [1, 100, 250])
def test_a_file_is_put_in_blocks(
    store: AzureBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(azure, "BLOCK", 100)
    monkeypatch.setattr("ckpttool.storage.buckets.base._MIB", 30)
    data = bytes(range(size))
    with piece(tmp_path / "file", data) as part:
        tag = store.put("late/file", part, "run", new=False)
        with pytest.raises(TakenError):
            store.put("late/file", part, "run", new=True)
    found = store.get("late/file")
    assert found
    assert (found.data, found.tag) == (data, tag)
    store.delete("late/file")


def test_an_upload_is_seen_when_it_is_complete(store: AzureBucket, tmp_path: Path) -> None:
    upload = store.create("b/model", "run1")
    assert store.parts("b/model", upload) == {}
    tags = {}
    for number, data in ((2, b"efgh"), (1, b"ab"), (1, b"abcd"), (3, b"i")):
        with piece(tmp_path / "file", data) as part:
            tags[number] = store.put_part("b/model", upload, number, part)
    there = store.parts("b/model", upload)
    assert {n: (p.size, p.tag) for n, p in there.items()} == {n: (s, tags[n]) for n, s in ((1, 4), (2, 4), (3, 1))}
    assert store.parts("b/model", "ckpttool-" + "0" * 16) == {}
    assert list(store.uploads("b/")) == [("b/model", upload)]
    assert (keys(store, "b/"), is_there(store, "b/model")) == ({}, False)
    for _ in range(2):  # the answer to the first may have been lost
        store.complete("b/model", upload, tags, "run1")
    assert store.get("b/model").data == b"abcdefghi"  # type: ignore[union-attr]
    assert store.head("b/model").run == "run1"
    assert list(store.uploads("b/")) == []
    with pytest.raises(GoneError):
        store.complete("b/other", upload, tags, "run1")
    store.delete("b/model")


def test_an_upload_is_aborted(store: AzureBucket, tmp_path: Path) -> None:
    upload = store.create("c/model", "run")
    with piece(tmp_path / "file", b"abc") as part:
        store.put_part("c/model", upload, 1, part)
    (left,) = store.uploads("c/")
    for _ in range(2):
        store.abort(*left)
    assert (list(store.uploads("c/")), keys(store, "c/"), store.parts("c/model", upload)) == ([], {}, {})


def test_an_old_object_goes_with_the_commit_and_keeps_its_blocks_until_then(store: AzureBucket, tmp_path: Path) -> None:
    store.put("d/model", b"old", "run1")
    upload = store.create("d/model", "run2")
    with piece(tmp_path / "file", b"new") as part:
        tag = store.put_part("d/model", upload, 1, part)
    store.delete("d/model")
    store.complete("d/model", upload, {1: tag}, "run2")
    assert store.get("d/model").data == b"new"  # type: ignore[union-attr]
    store.abort("d/model", upload)  # of a blob that is there: nothing happens to it
    assert store.get("d/model").data == b"new"  # type: ignore[union-attr]
    store.delete("d/model")
    assert not is_there(store, "d/model")


@pytest.mark.usefixtures("server")
def test_a_container_that_is_not_there() -> None:
    with pytest.raises(OutputError, match="container does not exist"):
        azure.open_bucket("nobodys", writes=True).put("a", b"", "run")


def test_resharding_to_azure_gives_what_a_directory_gets(server: Server, tmp_path: Path) -> None:
    text = server.fill(SOURCE, "run")
    plan = ckpttool.open(text).reshard(tp=2)
    plan.run("az://box/out")
    ckpttool.open(SOURCE).reshard(tp=2).run(tmp_path / "near")
    objects.forget()
    out = parse_place("az://box/out")
    near = {p.name: p.read_bytes() for p in (tmp_path / "near").iterdir()}
    assert {n: read_all(out / n) for n in walk(out)} == near
    assert list(azure.open_bucket("box", writes=True).uploads("out")) == []
    with pytest.raises(OutputError, match="the destination exists"):
        plan.run("az://box/out")
    plan.run("az://box/out", force=True)
    objects.forget()
    assert {n: read_all(out / n) for n in walk(out)} == near


class Mortal:
    """A store whose client ends before or after a request."""

    def __init__(self, store: AzureBucket, at: int, fault: str) -> None:
        self.store, self.at, self.fault, self.count, self.lock = store, at, fault, 0, threading.Lock()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.store, name)
        return functools.partial(self._call, found) if callable(found) else found

    def _call(self, method: Callable[..., Any], *args: Any, **named: Any) -> Any:
        with self.lock:
            number, self.count = self.count, self.count + 1
        if number > self.at or (number == self.at and self.fault == "before"):
            raise AccessError("the client has ended")
        answer = method(*args, **named)
        if number == self.at:
            raise AccessError("the client has ended")
        return list(answer) if isinstance(answer, Iterator) else answer


def blobs(store: AzureBucket) -> dict[str, bytes]:
    return {key: store.get(key).data for key in keys(store, "run/hf/")}  # type: ignore[union-attr]


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("fault", ["before", "after"])
def test_a_run_that_ends_at_any_request(
    server: Server, store: AzureBucket, tmp_path: Path, fault: str, force: bool
) -> None:
    plan = with_small_files(reshard(tmp_path / "src", [((64, 768), 0), ((256, 128), 1), ((512,), None)], 2, 2))
    right = {f"run/hf/{n}": data for n, data in expected(plan).items()}
    old = dict.fromkeys([*right, "run/hf/left-over"], b"old") if force else {}
    dst = parse_place("az://box/run/hf")
    with (
        patch.object(execute_objects, "CHUNK", 64 << 10),
        patch.object(execute_objects, "WHOLE", 16 << 10),
        patch.object(holder.Holder, "is_gone", lambda _: True),
        patch.object(workforce, "CompletionQueue", lambda _, most: CompletionQueue(1, most)),
    ):

        def write(at: int, **options: Any) -> int:
            mortal = Mortal(azure.open_bucket("box", writes=True), at, fault)
            with patch.object(execute_objects, "open_bucket", lambda *_, **__: mortal), suppress(AccessError):
                run(plan, dst, RunOptions(connections=1, workers=1, **options))
            return mortal.count

        def clear() -> None:
            for key in blobs(store):
                store.delete(key)
            for key, data in old.items():
                server.put(key, data)

        clear()
        count = write(1 << 30, force=force)
        assert blobs(store) == right
        for i in some(range(count), range(len(fault), count, 9)):
            clear()
            write(i, force=force)
            there = blobs(store)
            objects_there = {k: v for k, v in there.items() if ".ckpttool-partial" not in k}
            config = there.get("run/hf/config.json")
            assert objects_there in (right, old) if config else config is None, i
            if there != right:
                write(1 << 30, resume="run/hf/.ckpttool-partial.json" in there, force=force)
            assert blobs(store) == right, i
            assert list(store.uploads("run/")) == [], i
