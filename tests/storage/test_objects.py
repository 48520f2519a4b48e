"""``s3://`` places against a server on this machine: names, identities, ranges, errors and how often they ask."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

import pytest

from ckpttool.core.files import DataFile, Place
from ckpttool.errors import AccessError, CkptError, CorruptError, IncompleteError, UsageError
from ckpttool.storage import caches, objects
from ckpttool.storage.buckets import s3
from ckpttool.storage.http import Client, Clock, HttpError, using
from ckpttool.storage.place import open_file, parse_place, read_all, scan, walk
from tests.helpers.bare_reads import bare_reads
from tests.helpers.command import ckpttool
from tests.helpers.s3_server import Answer, S3Server, s3_server


@pytest.fixture(autouse=True)
def _bare() -> Iterator[None]:
    with bare_reads():
        yield


class _NoWait(Clock):
    def sleep(self, seconds: float, stopped: object = None) -> None:
        pass


@pytest.fixture(scope="module")
def running() -> Iterator[S3Server]:
    with s3_server() as server, patch.dict(os.environ, server.environment()), using(Client(clock=_NoWait())) as web:
        yield server
        objects.close()
        web._connections.forget()


@pytest.fixture
def server(running: S3Server) -> S3Server:
    running.buckets["bucket"].clear()
    running.clear()
    running.page = 1000
    objects.forget()
    return running


def names(place: Place) -> list[str]:
    return sorted(e.name + "/" * e.is_dir() for e in scan(place))


def test_a_text_is_a_place_with_one_slash_or_two(server: S3Server) -> None:
    place = parse_place("s3:/bucket/run/step-1")
    for text in ("s3://bucket/run/step-1", str(Path("s3://bucket/run/step-1/"))):
        assert parse_place(text) == place
    assert str(place) == "s3://bucket/run/step-1"
    assert (place.name, str(place.parent), str(place / "a.b"), (place / "a.b").suffix) == (
        "step-1", "s3://bucket/run", "s3://bucket/run/step-1/a.b", ".b",
    )  # fmt: skip
    root = parse_place("s3://bucket")
    assert (str(root), root.name, str(root.parent), str(root / "x")) == (
        "s3://bucket",
        "bucket",
        "s3://bucket",
        "s3://bucket/x",
    )
    assert not server.requests


SIGNED = ["az://c/x?sv=2024&sig=pass", "s3://bucket/x?X-Amz-Signature=pass", "gs://bucket/x?a=b&X-Goog-Signature=pass"]


@pytest.mark.parametrize(
    "text", ["s3://", "s3:///key", "s3://a b/key", "s3://user:pass@bucket/key", "s3://b\n/key", *SIGNED]
)
def test_what_is_no_bucket_is_an_error_without_its_secrets(text: str) -> None:
    with pytest.raises(UsageError) as e:
        parse_place(text)
    assert "pass" not in e.value.render()


def test_keys_with_odd_characters_are_files(server: S3Server) -> None:
    odd = ["a b", "a+b", "a%2Fb", "ü€", "q?x=1#y", "~!*'()", "a&b=c;d", "e\\f", "..x", "x.."]
    for k in odd:
        server.put("bucket", f"run/{k}", k.encode())
        server.put("bucket", f"run/in/{k}/f", k.encode())
    run = parse_place("s3://bucket/run")
    assert names(run) == sorted([*odd, "in/"])
    for k in odd:
        assert read_all(run / k) == k.encode()
        assert read_all(run / "in" / k / "f") == k.encode()
    assert sorted(walk(run)) == sorted([*odd, *(f"in/{k}/f" for k in odd)])


def test_names_that_lead_out_of_a_directory_are_nobodys_files(server: S3Server) -> None:
    for k in ("../up", "..", ".", "./x", "/rooted", "//x", "sub//x", "sub/../x", "ok"):
        server.put("bucket", f"run/{k}", b"x")
    assert sorted(walk(parse_place("s3://bucket/run"))) == ["ok"]


def test_directories(server: S3Server) -> None:
    server.put("bucket", "run/", b"")
    server.put("bucket", "run/model/a", b"1")
    server.put("bucket", "running", b"2")
    run = parse_place("s3://bucket/run")
    assert (run.is_dir(), run.is_file(), run.exists()) == (True, False, True)
    assert names(run) == ["model/"]
    assert names(parse_place("s3://bucket")) == ["run/", "running"]
    for missing in (run / "no", run / "mod"):
        assert not missing.exists()
        with pytest.raises(FileNotFoundError):
            list(scan(missing))
        with pytest.raises(FileNotFoundError):
            DataFile.at(missing)
    with pytest.raises(NotADirectoryError):
        list(scan(run / "model" / "a"))
    with pytest.raises(IsADirectoryError):
        read_all(run / "model")


def test_a_directory_of_many_pages(server: S3Server) -> None:
    server.page = 3
    for i in range(10):
        server.put("bucket", f"run/{i}", b"")
        server.put("bucket", f"run/d{i}/x", b"")
    assert len(names(parse_place("s3://bucket/run"))) == 20


def test_requests_of_a_directory_and_its_files(server: S3Server) -> None:
    for i in range(5):
        server.put("bucket", f"run/{i}", bytes(range(100)))
    run = parse_place("s3://bucket/run")
    assert run.is_dir()
    assert not (run / "config.json").is_file()
    assert not (run / "optimizer").is_dir()
    assert not (run / "optimizer/deep/file").exists()
    assert run / "" == run / "." == run
    assert [DataFile.at(run / n).size for n in names(run)] == [100] * 5
    assert server.operations() == {"ListObjectsV2": 1}  # whoever asks again wants to know whether it has changed
    assert [DataFile.at(run / str(i)).size for i in range(5)] == [100] * 5
    assert server.operations() == {"ListObjectsV2": 1, "HeadObject": 5}
    with open_file(run / "3") as file:
        assert (file.pread(5, 10), file.pread(50, 90), file.pread(5, 100), file.pread(0, 0)) == (
            bytes(range(10, 15)), bytes(range(90, 100)), b"", b"",
        )  # fmt: skip
        buffer = bytearray(8)
        assert file.read_into(memoryview(buffer), 96) == 4
        assert buffer == bytes([96, 97, 98, 99, 0, 0, 0, 0])
        with closing(file.map()) as data:
            assert data[:] == bytes(range(100))
    gets = [r for r in server.requests if r.operation == "GetObject"]
    assert [r.headers["range"] for r in gets] == [f"bytes={r}" for r in ("10-14", "90-99", "96-99", "0-99")]
    assert {r.headers["if-match"] for r in gets} == {server.buckets["bucket"]["run/3"].etag}
    assert "X-Amz-Signature" in gets[0].query
    assert len({r.query["X-Amz-Signature"] for r in gets}) == 1


def test_an_empty_file(server: S3Server) -> None:
    server.put("bucket", "empty", b"")
    place = parse_place("s3://bucket/empty")
    assert (read_all(place), DataFile.at(place).size) == (b"", 0)
    assert "GetObject" not in server.operations()


def test_a_changed_object_is_seen_by_its_tag_and_by_every_read(server: S3Server) -> None:
    server.put("bucket", "file", b"before")
    place = parse_place("s3://bucket/file")
    was = DataFile.at(place)
    assert was.is_unchanged()
    with open_file(place) as file:
        assert file.pread(3, 0) == b"bef"
        server.put("bucket", "file", b"behind")
        with pytest.raises(CorruptError, match="changed") as e:  # and no OSError: --resume could not go on
            file.pread(3, 0)
    assert e.value.where == ("s3://bucket/file",)
    assert not was.is_unchanged()


def test_a_changed_object_is_seen_where_the_listing_was_older(server: S3Server) -> None:
    server.put("bucket", "run/file", b"before")
    (place,) = [parse_place("s3://bucket/run") / e.name for e in scan(parse_place("s3://bucket/run"))]
    server.put("bucket", "run/file", b"behind")
    with pytest.raises(CorruptError):
        read_all(place)


@pytest.mark.parametrize("fault", ["reset", "lost", "short", "500", "503", "429", "other range"])
def test_a_read_that_fails_once_is_done_again(server: S3Server, fault: str) -> None:
    server.put("bucket", "file", bytes(range(200)))
    with open_file(parse_place("s3://bucket/file")) as file:
        server.on("GetObject", fault)
        assert file.pread(100, 50) == bytes(range(50, 150))
    assert server.faults == 1


@pytest.mark.parametrize("fault", ["other etag", "other range", "200 range", "long"])
def test_a_server_that_answers_wrongly_is_an_error(server: S3Server, fault: str) -> None:
    server.put("bucket", "file", bytes(range(200)))
    with open_file(parse_place("s3://bucket/file")) as file:
        server.on("GetObject", fault, times=100)
        with pytest.raises((HttpError, CorruptError)) as e:
            file.pread(100, 50)
    assert "X-Amz" not in str(e.value)


def test_a_signature_that_has_expired_is_renewed(server: S3Server) -> None:
    server.put("bucket", "file", b"0123456789")
    with open_file(parse_place("s3://bucket/file")) as file:
        server.on("GetObject", "403")
        assert file.pread(4, 2) == b"2345"
        server.on("GetObject", "403", times=2)
        with pytest.raises(AccessError, match="refuses access") as e:
            file.pread(4, 2)
    assert e.value.where == ("s3://bucket/file",)


def test_a_signature_is_renewed_in_time(server: S3Server) -> None:
    server.put("bucket", "file", b"0123456789")
    objects.close()
    signed = patch.object(s3.client(), "generate_presigned_url", wraps=s3.client().generate_presigned_url)
    with signed as signs, open_file(parse_place("s3://bucket/file")) as file:
        for seconds, calls in ((0, 1), (s3.SIGNED_SECONDS / 2 - 1, 1), (s3.SIGNED_SECONDS / 2 + 1, 2)):
            with patch.object(caches, "time", SimpleNamespace(monotonic=lambda now=1000 + seconds: now)):
                assert file.pread(4, 2) == b"2345"
            assert signs.call_count == calls
    objects.close()


@pytest.mark.sample("my.bucket")
@pytest.mark.parametrize(
    ("bucket", "host"),
    [pytest.param("bucket", "bucket.s3.", id="bucket"), pytest.param("my.bucket", "s3.", id="my.bucket")],
)
def test_urls_are_signed_for_the_region_of_the_bucket(server: S3Server, bucket: str, host: str) -> None:
    told = {"ResponseMetadata": {"HTTPHeaders": {"x-amz-bucket-region": "eu-central-1"}}}
    asked = patch.object(s3.S3Bucket, "_look", return_value=told)
    with asked as head, patch.object(s3, "_AMAZON", re.compile(".*")), patch.dict(os.environ):
        del os.environ["AWS_ENDPOINT_URL"]
        found = s3.S3Bucket(bucket)
        urls = [urlsplit(found.signed(k, "tag", renew=False).url) for k in ("a", "b")]
    assert {u.hostname for u in urls} == {f"{host}eu-central-1.amazonaws.com"}
    assert all("%2Feu-central-1%2Fs3%2F" in u.query for u in urls)
    assert head.call_count == 1
    s3.close()
    with patch.object(s3, "_AMAZON", re.compile(server.url)):
        s3.S3Bucket("bucket").signed("a", "tag", renew=False)
    assert server.operations() == {"HeadBucket": 1}
    objects.close()


def test_each_error_has_its_way_out(server: S3Server) -> None:
    with pytest.raises(IncompleteError, match="bucket does not exist"):
        parse_place("s3://no-bucket/run").is_dir()
    server.choose = lambda *_: "403"
    with pytest.raises(AccessError, match="refuses access") as e:
        parse_place("s3://bucket/run").is_dir()
    assert "may not read" in (e.value.hint or "")
    with pytest.raises(AccessError, match="refuses access"):
        parse_place("s3://bucket/run").is_file()
    secret = server.environment()["AWS_SECRET_ACCESS_KEY"]
    assert secret not in e.value.render()


def test_without_permission_to_list_one_file_can_still_be_read(server: S3Server) -> None:
    server.put("bucket", "model.safetensors", b"12345678")
    server.choose = lambda _, r: "403" if r.operation == "ListObjectsV2" else None
    place = parse_place("s3://bucket/model.safetensors")
    assert (place.is_file(), place.exists(), place.is_dir()) == (True, True, False)
    assert read_all(place) == b"12345678"


def error(text: str) -> CkptError:
    with pytest.raises(AccessError) as e:
        parse_place(text).is_dir()
    return e.value


def test_no_credentials_and_anonymous(server: S3Server) -> None:
    server.put("bucket", "file", b"1")
    without = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
    with patch.dict(os.environ, without):
        objects.close()
        assert "no S3 credentials" in error("s3://bucket/run").what
        with patch.dict(os.environ, {"CKPTTOOL_ANONYMOUS": "1"}):
            objects.close()
            assert read_all(parse_place("s3://bucket/file")) == b"1"
            assert "authorization" not in server.requests[-2].headers
            assert not server.requests[-1].query
            server.choose = lambda *_: "403"
            objects.close()
            assert "drop --anonymous" in (error("s3://bucket/run").hint or "")
    objects.close()


@pytest.mark.usefixtures("server")
def test_a_profile_that_does_not_exist() -> None:
    with patch.dict(os.environ, {"AWS_PROFILE": "nobody"}):
        objects.close()
        assert "nobody" in error("s3://bucket/run").what
        objects.close()


def test_nobody_listens() -> None:
    with s3_server() as server:
        environment = server.environment()
    with patch.dict(os.environ, environment), patch.object(s3, "TRIES", 1):
        objects.close()
        found = error("s3://bucket/run")
        assert (found.what, "AWS_ENDPOINT_URL" in (found.hint or "")) == ("S3 does not answer", True)
        objects.close()


def test_a_fork_has_connections_of_its_own(server: S3Server) -> None:
    server.put("bucket", "file", bytes(range(100)))
    place = parse_place("s3://bucket/file")
    with open_file(place) as file:
        assert file.pread(1, 0) == b"\0"
        child = os.fork()
        if not child:
            try:
                assert file.pread(1, 7) == b"\7"
                assert DataFile.at(place).size == 100
                os._exit(0)
            finally:
                traceback.print_exc()
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert file.pread(1, 9) == b"\t"


def lie(server: S3Server, body: str) -> Any:
    """A listing with this in it, whatever is asked."""
    answer = f'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{body}</ListBucketResult>'.encode()
    return patch.object(server, "answer", lambda *_: Answer(200, answer, {"Content-Type": "application/xml"}))


def test_a_listing_that_leads_elsewhere_names_nothing(server: S3Server) -> None:
    keys = ("other/x", "run/../../up", "run/a/b", "/etc/passwd", "run/")
    rows = "".join(f"<Contents><Key>{k}</Key><Size>1</Size><ETag>e</ETag></Contents>" for k in keys)
    with lie(server, rows + "<CommonPrefixes><Prefix>run/../</Prefix></CommonPrefixes>"):
        assert names(parse_place("s3://bucket/run")) == []


@pytest.mark.parametrize(
    "body",
    [
        "<Contents><Key>run/x</Key><Size>1</Size></Contents>",
        "<Contents><Key>run/x</Key><Size>-1</Size><ETag>e</ETag></Contents>",
        "<Contents><Key>run/x</Key><Size>many</Size><ETag>e</ETag></Contents>",
        "<Contents><Size>1</Size><ETag>e</ETag></Contents>",
        "<IsTruncated>true</IsTruncated><NextContinuationToken>again</NextContinuationToken>",
    ],
)
def test_a_listing_that_is_none_is_an_error(server: S3Server, body: str) -> None:
    with lie(server, body), pytest.raises(AccessError, match="does not come from") as e:
        parse_place("s3://bucket/run").is_dir()
    assert e.value.where == ("s3://bucket/run/",)


def test_a_listing_that_never_ends_is_an_error(server: S3Server) -> None:
    server.page = 1
    for i in range(5):
        server.put("bucket", f"run/{i}", b"")
    with patch.object(objects, "MOST_PAGES", 4), pytest.raises(AccessError, match="does not end"):
        parse_place("s3://bucket/run").is_dir()


def test_a_prefix_without_weights_names_its_folders(server: S3Server) -> None:
    server.put("bucket", "runs/step-1/model.safetensors", b"")
    server.put("bucket", "runs/notes.txt", b"")
    done = ckpttool("inspect", "s3://bucket/runs", "--list")
    assert (done.code, "checkpoints: step-1" in done.err) == (2, True), done.err
    server.put("bucket", "models/llama/model.safetensors", b"")
    done = ckpttool("inspect", "s3://bucket/models")
    assert (done.code, "directories: llama" in done.err) == (1, True), done.err


@pytest.mark.parametrize("path", ["a/../b", "./b", "a//b"])
def test_odd_paths_are_not_written(path: str, server: S3Server) -> None:
    done = ckpttool(
        "reshard", Path(__file__).parents[2] / "fixtures/hf_tiny_source", f"s3://bucket/{path}", "--to", "hf"
    )
    assert (done.code, "`..` or empty folders" in done.err, server.names("bucket")) == (2, True, []), done.err


def scanned(place: Place) -> dict[str, tuple[int, str]]:
    """All files below, each directory by itself, and what identifies them."""
    return {name: (place / name).identity() for name in walk(place) if not isinstance(place, Path)}


@pytest.mark.parametrize("pages", [20, 1])
def test_many_directories_beside_each_other_are_listed_at_once(
    pages: int, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of hundreds of checkpoints takes a few listings; where it would be a great many pages, one for each."""
    monkeypatch.setattr(objects, "_TREE_PAGES", pages)
    keys = [f"run/step-{i}/{name}" for i in range(50) for name in ("a.bin", "deep/er/b.bin", "deep/c.bin")]
    for i, key in enumerate([*keys, "run/step-3//x", "run/step-3/../y", "running/z", "run/step-3/empty/"]):
        server.put("bucket", key, b"x" * i)
    server.page = 100
    found = scanned(parse_place("s3://bucket/run"))
    assert sorted(found) == sorted(k.removeprefix("run/") for k in keys)
    assert {n: size for n, (size, _) in found.items()} == {k.removeprefix("run/"): i for i, k in enumerate(keys)}
    asked = server.operations()["ListObjectsV2"]
    assert (asked < 30) == (pages == 20), asked
    server.clear()
    assert parse_place("s3://bucket/run/step-49/deep/no").exists() is False


def test_checkpoints_of_a_run_that_are_alike_are_opened_once(server: S3Server) -> None:
    """One that has the same files in the same sizes; one in another size is looked into, and found cut off."""
    source = Path(__file__).parents[2] / "fixtures/hf_tiny_source"
    for step in range(1, 41):
        for file in source.iterdir():
            data = file.read_bytes()
            cut = len(data) // 2 if (step, file.suffix) == (30, ".safetensors") else len(data)
            server.put("bucket", f"run/checkpoint-{step}/{file.name}", data[:cut])
    done = ckpttool("inspect", "s3://bucket/run")
    assert done.code == 0, done.err
    rows = [line.split("\t") for line in done.out.splitlines()[1:]]
    assert [int(r[1]) for r in rows] == list(range(1, 41))
    assert [r[1] for r in rows if r[8] != "yes"] == ["30"]
    assert {r[7] for r in rows} == {"-"}  # the time is not known
    assert sum(server.operations().values()) < 30
