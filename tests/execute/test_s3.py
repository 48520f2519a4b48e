"""Writing to S3 through boto3: what is asked, answers that are lost, and every command from end to end."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from botocore.awsrequest import AWSResponse

from ckpttool.errors import AccessError, OutputError
from ckpttool.execute import fleets, schedule
from ckpttool.execute.destinations import objects as destination
from ckpttool.execute.machines import calls
from ckpttool.storage import objects
from ckpttool.storage.buckets import s3
from ckpttool.storage.buckets.base import FileSlice, GoneError, TakenError
from ckpttool.storage.buckets.s3 import S3Bucket
from tests.helpers.command import ckpttool
from tests.helpers.fleet import WILD, FakeFleet
from tests.helpers.s3_server import S3Server, s3_server

FIXTURES = Path(__file__).parents[2] / "fixtures"
KEY = "a b/%2F+ü//x.bin"


@pytest.fixture(scope="module")
def running() -> Iterator[S3Server]:
    with s3_server("bucket") as server, patch.dict(os.environ, server.environment()):
        server.min_part = 1
        objects.close()
        yield server
        objects.close()


@pytest.fixture
def server(running: S3Server, tmp_path: Path) -> Iterator[S3Server]:
    running.clear()
    running.buckets["bucket"].clear()
    running.uploads.clear()
    objects.forget()
    with (
        patch.object(destination, "CHUNK", 64 << 10),
        patch.object(destination, "WHOLE", 16 << 10),
        patch("tempfile.tempdir", str(tmp_path)),
        patch("time.sleep", lambda seconds, sleep=time.sleep: sleep(min(seconds, 0.05))),
    ):
        yield running


@pytest.fixture
def store(server: S3Server) -> S3Bucket:  # noqa: ARG001 - it is there
    return S3Bucket("bucket", writes=True)


def keys(store: S3Bucket, prefix: str) -> dict[str, int]:
    """What a listing says: sizes by key."""
    return {key: info.size for page in store.pages(prefix, deep=True) for key, info in page.files}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.write_bytes(bytes(range(250)) * 100)
    return path


def send(store: S3Bucket, path: Path, upload: str, number: int, start: int, size: int) -> str:
    with FileSlice(path, start, size, threading.Event()) as data:
        return store.put_part(KEY, upload, number, data)


def test_an_upload(store: S3Bucket, server: S3Server, data: Path) -> None:
    upload = store.create(KEY, "the run")
    assert list(store.uploads("a b/")) == [(KEY, upload)]
    tags = {n: send(store, data, upload, n, start, 10_000) for n, start in ((2, 10_000), (1, 0))}
    tags[3] = send(store, data, upload, 3, 20_000, 5_000)
    there = store.parts(KEY, upload)
    assert {n: p.size for n, p in there.items()} == {1: 10_000, 2: 10_000, 3: 5_000}
    assert {n: p.tag for n, p in there.items()} == tags
    assert all(len(tag.split()) == 2 for tag in tags.values())  # the checksum is there
    with pytest.raises(FileNotFoundError):
        store.head(KEY)
    store.complete(KEY, upload, tags, "the run")
    assert server.get("bucket", KEY) == data.read_bytes()
    assert store.head(KEY)[::2] == (25_000, "the run")
    assert keys(store, "a b/") == {KEY: 25_000}
    for ask in (lambda: store.parts(KEY, upload), lambda: store.complete(KEY, upload, tags, "the run")):
        with pytest.raises(GoneError):
            ask()
    store.abort(KEY, upload)
    store.delete(KEY)
    assert not server.names("bucket")


def test_conditions(store: S3Bucket) -> None:
    tag = store.put("m", b"1", "r", new=True)
    with pytest.raises(TakenError):
        store.put("m", b"2", "r", new=True)
    other = store.put("m", b"3", "r", replaces=tag)
    with pytest.raises(TakenError):
        store.put("m", b"4", "r", replaces=tag)
    found = store.get("m")
    assert found is not None
    assert (found.data, found.tag, found.age < 5) == (b"3", other, True)
    assert store.get("n") is None


def test_a_store_without_conditions(store: S3Bucket, server: S3Server) -> None:
    def refuse(_: int, request: object) -> str | None:
        headers = getattr(request, "headers", {})
        return "501" if {"if-none-match", "if-match"} & set(headers) else None

    real = server.answer
    from tests.helpers.s3_server import Answer, Request, S3Error

    def answer(request: Request, body: bytes, fault: str | None = None) -> Answer:
        if request.method == "PUT" and refuse(0, request):
            raise S3Error(501, "NotImplemented")
        return real(request, body, fault)

    with patch.object(server, "answer", answer):
        tag = store.put("m", b"1", "r", new=True)
        with pytest.raises(TakenError):
            store.put("m", b"2", "r", new=True)
        store.put("m", b"3", "r", replaces=tag)
        with pytest.raises(TakenError):
            store.put("m", b"4", "r", replaces=tag)
    assert server.get("bucket", "m") == b"3"


@pytest.mark.sample("lost")
@pytest.mark.parametrize("fault", ["refused", "reset", "lost", "500", "503", "200 error", "short"])
def test_faults(fault: str, store: S3Bucket, server: S3Server, data: Path) -> None:
    """Each request meets the fault once, and all goes well."""
    server.page = 1
    try:
        for operation in ("CreateMultipartUpload", "UploadPart", "ListParts", "ListMultipartUploads", "ListObjectsV2"):
            server.on(operation, fault)
            upload = store.create(KEY, "run")
            tags = {n: send(store, data, upload, n, n * 10_000 - 10_000, 10_000) for n in (1, 2)}
            assert {n: p.tag for n, p in store.parts(KEY, upload).items()} == tags
            assert (KEY, upload) in list(store.uploads("a b/"))
            assert keys(store, "a b/") == {}
            for key, name in list(store.uploads("")):
                store.abort(key, name)
            assert server.faults
            server.clear()
        for operation in ("PutObject", "GetObject", "DeleteObject"):
            if (operation, fault) == ("GetObject", "200 error"):
                continue
            server.on(operation, fault)
            store.put("m", b"1", "run")
            found = store.get("m")
            assert found is not None
            assert found.data == b"1"
            store.delete("m")
            assert not server.names("bucket")
            server.clear()
    finally:
        server.page = 1000


def test_a_lost_answer_to_a_condition(store: S3Bucket, server: S3Server) -> None:
    server.on("PutObject", "lost")
    with pytest.raises(TakenError):  # by itself: the caller looks who it was
        store.put("m", b"1", "r", new=True)
    assert server.get("bucket", "m") == b"1"


def test_refusals(store: S3Bucket, server: S3Server) -> None:
    server.on("PutObject", "403", times=99)
    with pytest.raises(AccessError, match="refuses access") as denied:
        store.put("m", b"1", "r")
    assert denied.value.where == ("s3://bucket/m",)
    assert "s3:PutObject" in (denied.value.hint or "")
    server.clear()
    with pytest.raises(OutputError, match="the bucket does not exist"):
        S3Bucket("nowhere", writes=True).put("m", b"1", "r")


@pytest.mark.thorough
def test_a_store_that_is_out_of_reach(store: S3Bucket, server: S3Server) -> None:
    server.on("PutObject", "503", times=99)
    with pytest.raises(AccessError, match="S3 answers 503"):
        store.put("m", b"1", "r")
    with (
        patch.dict(os.environ, {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}),
        patch.object(s3, "TRIES", 2),
    ):
        objects.close()
        with pytest.raises(AccessError, match="S3 does not answer"):
            store.put("m", b"1", "r")
    objects.close()


def test_what_is_signed(server: S3Server) -> None:
    """Over TLS not the bytes: their checksum is."""
    sent: list[Any] = []

    def answer(request: Any, **_: Any) -> AWSResponse:
        sent.append(request.headers)
        return AWSResponse(request.url, 200, {"ETag": '"x"'}, SimpleNamespace(stream=list))

    for url in ("https://127.0.0.1:9", server.url):
        client = s3.new_client(signed=True, endpoint=url)
        client.meta.events.register("before-send.s3", answer)
        with patch.object(S3Bucket, "_client", lambda _, made=client: made):
            S3Bucket("bucket", writes=True).put("m", b"123456789", "r")
    assert [h["X-Amz-Content-SHA256"] == b"UNSIGNED-PAYLOAD" for h in sent] == [True, False]
    assert all(h["x-amz-checksum-crc32"] == b"y/Q5Jg==" for h in sent)
    assert all(b"x-amz-checksum-crc32" in h["Authorization"] for h in sent)


@pytest.mark.thorough
def test_no_credentials(store: S3Bucket, server: S3Server) -> None:
    without = {k: v for k, v in os.environ.items() if not k.startswith("AWS_ACCESS") and not k.startswith("AWS_SECRET")}
    with patch.dict(os.environ, without, clear=True):
        objects.close()
        with pytest.raises(AccessError, match="no S3 credentials"):
            store.put("m", b"1", "r")
    objects.close()
    assert not server.requests


# -- commands


def read(directory: Path) -> dict[str, bytes]:
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def stored(server: S3Server, prefix: str) -> dict[str, bytes]:
    return {k.removeprefix(prefix): server.get("bucket", k) for k in server.names("bucket", prefix)}


COMMANDS = {
    "hf": ("reshard", "{}", "--to", "hf"),
    "verify": ("reshard", "{}", "--to", "hf", "--verify", "--manifest"),
    "vllm": ("reshard", "{}", "--to", "vllm", "--tp-out", "2", "--verify"),
    "torch-bin": ("reshard", "{}", "--to", "torch-bin", "--verify"),
    "drop-keys": ("drop-keys", "{}", "lm_head.weight"),
    "quantize": ("quantize", "{}", "--manifest", "--workers", "1"),
}


@pytest.mark.sample("hf")
@pytest.mark.parametrize("command", [pytest.param(c, id=name) for name, c in COMMANDS.items()])
def test_commands(command: tuple[str, ...], server: S3Server, tmp_path: Path) -> None:
    name, _, *options = command
    source = FIXTURES / "llama_tp8"
    local = tmp_path / "local"
    before = ckpttool(name, source, local, *options)
    assert before.code == 0, before.err
    done = ckpttool(name, source, "s3://bucket/run/hf", *options)
    assert done.code == 0, done.err
    assert stored(server, "run/hf/") == read(local)
    assert not server.uploads
    assert not list(tmp_path.glob("ckpttool-spool*"))
    again = ckpttool(name, source, "s3://bucket/run/hf", *options)
    assert again.code == 1
    assert "error: the destination exists\n  --> s3://bucket/run/hf\n" in again.err
    assert "a-secret-that-nobody-may-see" not in done.out + done.err + again.err


@pytest.mark.thorough
def test_from_s3_to_s3(server: S3Server, tmp_path: Path) -> None:
    for name, data in read(FIXTURES / "llama_tp8").items():
        server.put("bucket", f"run/step 1/{name}", data)
    done = ckpttool("reshard", "s3://bucket/run/step 1", "s3://bucket/hf", "--to", "hf", "--verify")
    assert done.code == 0, done.err
    assert ckpttool("reshard", FIXTURES / "llama_tp8", tmp_path / "local", "--to", "hf").code == 0
    assert stored(server, "hf/") == read(tmp_path / "local")
    inside = ckpttool("reshard", "s3://bucket/hf", "s3://bucket/hf/ranks", "--to", "ranks", "--tp-out", "2", "--force")
    assert inside.code == 1
    assert "DST is inside SRC" in inside.err
    assert stored(server, "hf/") == read(tmp_path / "local")


@pytest.mark.thorough  # tests/execute/test_verification.py has the same with files, in less time
def test_verified_on_a_fleet(server: S3Server, tmp_path: Path) -> None:
    """Nodes read the objects that are there; the machine that runs the command what is still to be put."""
    for name, data in read(FIXTURES / "llama_tp8").items():
        server.put("bucket", f"src/{name}", data)
    assert ckpttool("reshard", FIXTURES / "llama_tp8", tmp_path / "local", "--to", "hf").code == 0
    fleet = FakeFleet(2, 1, WILD)
    command = ("reshard", "s3://bucket/src", "s3://bucket/hf", "--to", "hf", "--verify", "--on", "ray")
    with (
        patch.object(fleets, "fleet_for", lambda _: fleet),
        patch.object(calls, "SMALLEST", 10_000),
        patch.object(destination, "LEAST_SHARE", 10_000),
    ):
        done = ckpttool(*command)
        assert done.code == 0, done.err
        assert "verified: every element is equal" in done.out
        assert stored(server, "hf/") == read(tmp_path / "local")
        assert len([o for o in fleet.sent if "items" in o]) > 5
        server.buckets["bucket"] = {k: v for k, v in server.buckets["bucket"].items() if k.startswith("src/")}
        readable = destination.ObjectDestination.readable

        def damaged(self: destination.ObjectDestination) -> Any:
            found = server.buckets["bucket"]["hf/model.safetensors"]
            data = bytearray(found.data)
            data[-5] ^= 1
            server.buckets["bucket"]["hf/model.safetensors"] = found._replace(data=bytes(data))
            return readable(self)

        fleet = FakeFleet(2, 2, WILD)
        with patch.object(destination.ObjectDestination, "readable", damaged):
            done = ckpttool(*command)
    assert done.code == 3
    assert "1 of 39 tensors differ from the source" in done.err
    assert stored(server, "hf/") == {}


@pytest.mark.thorough  # test_object_branch.py and test_object_member.py have more of it, in less time
@pytest.mark.parametrize("how", ["fleet", "parts"])
def test_many_machines_from_a_bucket_to_a_bucket(how: str, server: S3Server, tmp_path: Path) -> None:
    """Each has its own client and finds its own credentials: no secret travels, nor lies beside DST."""
    secret = os.environ["AWS_SECRET_ACCESS_KEY"]
    for path in (FIXTURES / "llama_tp8").iterdir():
        server.put("bucket", f"in/{path.name}", path.read_bytes())
    one = tmp_path / "one"
    assert ckpttool("reshard", "s3://bucket/in", one, "--tp-out", 2, "--manifest").code == 0
    words = ("reshard", "s3://bucket/in", "s3://bucket/out", "--tp-out", 2, "--manifest", "--verify")
    if how == "fleet":
        fleet = FakeFleet(2)
        with (
            patch.object(fleets, "fleet_for", lambda _: fleet),
            patch.object(destination, "LEAST_SHARE", 1 << 10),
            patch.object(schedule, "_BATCH_UNITS", 2),
        ):
            assert ckpttool(*words, "--on", "ray").code == 0
        assert len(fleet.sent) > 3
        assert secret.encode() not in fleet._job
        assert secret not in repr(fleet.sent)
    else:
        for part in ("2/3", "1/3", "3/3"):
            assert "out/config.json" not in server.buckets["bucket"]
            done = ckpttool(*words, "--part", part)
            assert done.code == 0, done.err
            beside = [s.data for k, s in server.buckets["bucket"].items() if ".ckpttool" in k]
            assert secret.encode() not in b"".join(beside)
    made = {k.removeprefix("out/"): s.data for k, s in server.buckets["bucket"].items() if k.startswith("out/")}
    assert made == {p.relative_to(one).as_posix(): p.read_bytes() for p in one.rglob("*") if p.is_file()}
    assert not server.uploads


@pytest.mark.parametrize("where", ["here", pytest.param("fleet", marks=pytest.mark.thorough)])
def test_a_merge_is_measured_in_the_bucket(where: str, server: S3Server, tmp_path: Path) -> None:
    """What was written is read where it is; the card with the numbers is put at the end."""
    inputs = FIXTURES / "merge/inputs"
    words = ("merge", inputs / "ft1", inputs / "ft2", "--weights", "0.8,0.2", "--card", "-q", "--report")
    assert ckpttool(*words, tmp_path / "local.html", "-o", tmp_path / "merged").code == 0
    fleet = FakeFleet(2)
    with patch.object(fleets, "fleet_for", lambda _: fleet), patch.object(destination, "WHOLE", 1 << 10):
        on = ("--on", "ray") if where == "fleet" else ()
        done = ckpttool(*words, tmp_path / "far.html", "-o", "s3://bucket/merged", *on)
    assert done.code == 0, done.err
    assert stored(server, "merged/") == read(tmp_path / "merged")
    assert b"## How far it is from its sources" in stored(server, "merged/")["README.md"]
    assert (tmp_path / "far.html").is_file()
