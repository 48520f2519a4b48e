"""``gs://`` as a destination: what is sent to Google's XML API, and what its answers mean."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from ckpttool.errors import AccessError, OutputError
from ckpttool.execute import RunOptions, run
from ckpttool.execute.destinations import objects
from ckpttool.storage.buckets import base, gcs
from ckpttool.storage.buckets.base import FileSlice, GoneError, TakenError
from ckpttool.storage.buckets.gcs import GcsBucket
from ckpttool.storage.place import parse_place
from tests.execute.plans import expected, reshard
from tests.execute.test_objects import with_small_files
from tests.helpers.google_server import GoogleServer, google_server


@pytest.fixture(scope="module")
def running() -> Iterator[GoogleServer]:
    with (
        google_server() as server,
        patch.dict(os.environ, {"STORAGE_EMULATOR_HOST": server.url, "AWS_CONFIG_FILE": "/nowhere"}),
        patch.object(gcs, "authorization", lambda _: {"Authorization": "Bearer ya29.token"}),
    ):
        yield server


@pytest.fixture
def server(running: GoogleServer) -> Iterator[GoogleServer]:
    running.buckets["bucket"].clear()
    running.uploads.clear()
    running.clear()
    running.min_part = 4
    yield running
    for r in running.requests:
        assert r.headers["authorization"] == "Bearer ya29.token"
        assert not [h for h in r.headers if h.startswith(("x-amz-", "amz-", "if-"))]


@pytest.fixture
def store(server: GoogleServer) -> GcsBucket:
    assert server.buckets == {"bucket": {}}
    return GcsBucket("bucket", writes=True)


def piece(path: Path, data: bytes) -> FileSlice:
    path.write_bytes(b"before" + data + b"behind")
    return FileSlice(path, 6, len(data), threading.Event())


def test_conditions_are_generations(store: GcsBucket, server: GoogleServer) -> None:
    tag = store.put("a/marker", b"1", "run1", new=True)
    assert tag == str(server.buckets["bucket"]["a/marker"].generation)
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
    assert server.buckets["bucket"]["a/marker"].headers["x-goog-meta-ckpttool-run"] == "run2"
    assert [p.files for p in store.pages("a/", deep=True)] == [[("a/marker", (1, second, ""))]]
    store.delete("a/marker")
    assert store.get("a/marker") is None
    with pytest.raises(FileNotFoundError):
        store.head("a/marker")


def test_uploads(store: GcsBucket, server: GoogleServer, tmp_path: Path) -> None:
    upload = store.create("b/model", "run1")
    tags = {}
    for number, data in ((2, b"efgh"), (1, b"abcd"), (3, b"i")):
        with piece(tmp_path / "file", data) as part:
            tags[number] = store.put_part("b/model", upload, number, part)
    assert {n: (p.size, p.tag) for n, p in store.parts("b/model", upload).items()} == {
        n: (size, tags[n]) for n, size in ((1, 4), (2, 4), (3, 1))
    }
    assert list(store.uploads("b/")) == [("b/model", upload)]
    store.complete("b/model", upload, tags, "run1")
    assert server.get("bucket", "b/model") == b"abcdefghi"
    held = store.head("b/model")
    assert held
    assert held.run == "run1"
    with pytest.raises(GoneError):
        store.complete("b/model", upload, tags, "run1")
    store.abort("b/model", upload)


def test_bytes_that_change_on_their_way_are_refused(store: GcsBucket, server: GoogleServer, tmp_path: Path) -> None:
    upload = store.create("b/model", "run1")
    with (
        patch.object(base, "md5", lambda _: "AAAAAAAAAAAAAAAAAAAAAA=="),
        piece(tmp_path / "file", b"abcd") as part,
        pytest.raises(OutputError, match="BadDigest"),
    ):
        store.put_part("b/model", upload, 1, part)
    assert not server.uploads[upload].parts


def test_errors_name_the_place_and_the_role(store: GcsBucket, server: GoogleServer) -> None:
    server.choose = lambda *_: "403"
    with pytest.raises(AccessError) as e:
        store.put("a", b"1", "run")
    assert e.value.where == ("gs://bucket/a",)
    assert "Storage Object User" in (e.value.hint or "")


def test_a_run_writes_what_a_directory_gets(server: GoogleServer, tmp_path: Path) -> None:
    plan = with_small_files(reshard(tmp_path / "src", [((64, 768), 0), ((256, 128), 1), ((512,), None)], 2, 2))
    server.min_part = 5 << 10
    with patch.object(objects, "CHUNK", 64 << 10), patch.object(objects, "WHOLE", 16 << 10):
        run(plan, parse_place("gs://bucket/run/hf"), RunOptions(workers=1))
        assert {k: s.data for k, s in server.buckets["bucket"].items()} == {
            f"run/hf/{n}": data for n, data in expected(plan).items()
        }
        assert server.operations()["CompleteMultipartUpload"] == 2
        assert not server.uploads
        with pytest.raises(OutputError, match="exists"):
            run(plan, parse_place("gs://bucket/run/hf"), RunOptions(workers=1))
