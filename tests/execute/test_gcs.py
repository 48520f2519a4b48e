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
from ckpttool.execute.destinations import gcs, objects
from ckpttool.execute.destinations.gcs import GcsStore
from ckpttool.execute.destinations.store import GoneError, Slice, TakenError
from ckpttool.storage import gcs as source
from ckpttool.storage.place import parse_place
from tests.execute.plans import expected, reshard
from tests.execute.test_objects import with_small_files
from tests.helpers.s3_server import S3Server, s3_server


@pytest.fixture(scope="module")
def running() -> Iterator[S3Server]:
    with (
        s3_server() as server,
        patch.dict(os.environ, {"STORAGE_EMULATOR_HOST": server.url, "AWS_CONFIG_FILE": "/nowhere"}),
        patch.object(source, "authorization", lambda _: {"Authorization": "Bearer ya29.token"}),
    ):
        yield server


@pytest.fixture(scope="module")
def shared(running: S3Server) -> Iterator[GcsStore]:
    found = gcs.store(next(iter(running.buckets)))
    yield found
    found.close()


@pytest.fixture
def server(running: S3Server) -> Iterator[S3Server]:
    running.buckets["bucket"].clear()
    running.uploads.clear()
    running.clear()
    running.min_part = 4
    yield running
    for r in running.requests:
        assert r.headers["authorization"] == "Bearer ya29.token"
        assert not [h for h in r.headers if h.startswith(("x-amz-", "amz-", "if-"))]


@pytest.fixture
def store(server: S3Server, shared: GcsStore) -> GcsStore:
    assert server.buckets == {"bucket": {}}
    return shared


def piece(path: Path, data: bytes) -> Slice:
    path.write_bytes(b"before" + data + b"behind")
    return Slice(path, 6, len(data), threading.Event())


def test_conditions_are_generations(store: GcsStore, server: S3Server) -> None:
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
    assert list(store.objects("a/")) == [("a/marker", 1)]
    store.delete("a/marker")
    assert (store.head("a/marker"), store.get("a/marker")) == (None, None)


def test_uploads(store: GcsStore, server: S3Server, tmp_path: Path) -> None:
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


def test_bytes_that_change_on_their_way_are_refused(store: GcsStore, server: S3Server, tmp_path: Path) -> None:
    upload = store.create("b/model", "run1")
    with (
        patch.object(gcs, "_md5", lambda _: "AAAAAAAAAAAAAAAAAAAAAA=="),
        piece(tmp_path / "file", b"abcd") as part,
        pytest.raises(OutputError, match="BadDigest"),
    ):
        store.put_part("b/model", upload, 1, part)
    assert not server.uploads[upload].parts


def test_errors_name_the_place_and_the_role(store: GcsStore, server: S3Server) -> None:
    server.choose = lambda *_: "403"
    with pytest.raises(AccessError) as e:
        store.put("a", b"1", "run")
    assert e.value.where == ("gs://bucket/a",)
    assert "Storage Object User" in (e.value.hint or "")


def test_a_run_writes_what_a_directory_gets(server: S3Server, tmp_path: Path) -> None:
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
