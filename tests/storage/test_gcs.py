"""``gs://`` places against a server of the JSON API's answers, conditions among them."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest.mock import patch
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from ckpttool.core.files import DataFile
from ckpttool.errors import AccessError, CorruptError, IncompleteError
from ckpttool.storage import objects
from ckpttool.storage.buckets import gcs
from ckpttool.storage.http import Client, Clock, using
from ckpttool.storage.place import open_file, parse_place, read_all, scan, walk
from tests.helpers.bare_reads import bare_reads


@pytest.fixture(autouse=True)
def _bare() -> Iterator[None]:
    with bare_reads():
        yield


class _NoWait(Clock):
    def sleep(self, seconds: float, stopped: object = None) -> None:
        pass


class _Google(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, tuple[int, bytes]] = {}
        self.status = 0
        """Of every answer, if it is not 0."""
        self.deaf = False
        """Conditions are not heard."""
        self.asked: list[tuple[str, str | None]] = []


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Google

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def do_GET(self) -> None:
        google, url = self.server, urlsplit(self.path)
        query = {k: v[0] for k, v in parse_qs(url.query).items()}
        google.asked.append((self.path, self.headers["Authorization"]))
        bucket, _, key = url.path.removeprefix("/storage/v1/b/").partition("/o")
        generation, data = google.objects.get(unquote(key[1:]), (0, b""))
        if google.status or bucket != "bucket" or (key and not generation):
            return self._send(google.status or 404, b"{}")
        if not key:
            return self._send(200, json.dumps(self._page(query)).encode())
        if query.get("alt") != "media":
            return self._send(200, json.dumps({"size": str(len(data)), "generation": str(generation)}).encode())
        if query["ifGenerationMatch"] != str(generation) and not google.deaf:
            return self._send(412, b"")
        lo, hi = (int(n) for n in self.headers["Range"].removeprefix("bytes=").split("-"))
        about = {"Content-Range": f"bytes {lo}-{hi}/{len(data)}", "x-goog-generation": str(generation)}
        return self._send(206, data[lo : hi + 1], about)

    def _page(self, query: dict[str, str]) -> dict[str, object]:
        prefix, at = query["prefix"], int(query.get("pageToken", "0"))
        keys = sorted(k for k in self.server.objects if k.startswith(prefix))
        key = keys[at] if at < len(keys) else ""
        generation, data = self.server.objects.get(key, (0, b""))
        if not key:
            return {}
        folder, slash, _ = key.removeprefix(prefix).partition("/")
        found: dict[str, object] = (
            {"prefixes": [prefix + folder + "/"]}
            if slash and query.get("delimiter")
            else {"items": [{"name": key, "size": str(len(data)), "generation": str(generation)}]}
        )
        return found | ({"nextPageToken": str(at + 1)} if at + 1 < len(keys) else {})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def google() -> Iterator[_Google]:
    server = _Google()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    host = {"STORAGE_EMULATOR_HOST": f"127.0.0.1:{server.server_address[1]}"}
    objects.close()
    with patch.dict(os.environ, host), using(Client(clock=_NoWait())) as web:
        yield server
        web._connections.forget()
    objects.close()
    server.shutdown()
    server.server_close()


def test_names_identities_and_ranges(google: _Google) -> None:
    google.objects = {"run/a b%2F+ü": (7, b"0123456789"), "run/x/1": (8, b""), "run/x/2": (9, b""), "runs": (1, b"")}
    run = parse_place("gs://bucket/run")
    assert sorted((e.name, e.is_dir()) for e in scan(run)) == [("a b%2F+ü", False), ("x", True)]
    place = run / "a b%2F+ü"
    assert DataFile.at(place) == DataFile.at(place) == (place, 10, "7", None)
    with open_file(place) as file:
        assert file.pread(4, 3) == b"3456"
    assert google.asked[-1][0].endswith("?alt=media&ifGenerationMatch=7")
    with pytest.raises(FileNotFoundError):
        read_all(run / "no")


@pytest.mark.parametrize("deaf", [False, True])
def test_a_changed_object(google: _Google, deaf: bool) -> None:
    google.objects["file"], google.deaf = (1, b"before"), deaf
    with open_file(parse_place("gs://bucket/file")) as file:
        assert file.pread(6, 0) == b"before"
        google.objects["file"] = (2, b"behind")
        with pytest.raises(CorruptError) as e:
            file.pread(6, 0)
    assert e.value.where == ("gs://bucket/file",)


@pytest.mark.parametrize(
    ("status", "what"), [(401, "credentials"), (403, "refuses access"), (429, "429"), (418, "418")]
)
def test_each_error_is_told(google: _Google, status: int, what: str) -> None:
    google.status = status
    with pytest.raises(AccessError, match=what):
        parse_place("gs://bucket/run").is_dir()
    with pytest.raises(AccessError, match=what):
        parse_place("gs://bucket/run").is_file()


def test_a_bucket_that_is_not_there(google: _Google) -> None:
    with pytest.raises(IncompleteError, match="bucket does not exist"):
        parse_place("gs://nobodys/run").is_dir()
    assert google.asked


def test_the_token_goes_along(google: _Google) -> None:
    google.objects["file"] = (1, b"12345678")

    class _Credentials:
        valid, token = False, "ya29.secret"
        refreshed = 0

        def refresh(self, request: object) -> None:
            self.refreshed += 1
            self.valid = True

    credentials = _Credentials()
    with (
        patch("google.auth.default", return_value=(credentials, "project")),
        patch.object(gcs, "endpoint", lambda: ""),
    ):
        assert gcs.authorization("gs://bucket/file") == {"Authorization": "Bearer ya29.secret"}
        assert gcs.authorization("gs://bucket/file") == {"Authorization": "Bearer ya29.secret"}
        with patch.dict(os.environ, {"CKPTTOOL_ANONYMOUS": "1"}):
            assert gcs.authorization("gs://bucket/file") == {}
    assert credentials.refreshed == 1
    with patch.object(gcs, "authorization", lambda _: {"Authorization": "Bearer ya29.secret"}):
        assert read_all(parse_place("gs://bucket/file")) == b"12345678"
    assert {authorization for _, authorization in google.asked} == {"Bearer ya29.secret"}


@pytest.mark.parametrize(
    "page", [[], {"items": [{"name": "run/x"}]}, {"items": [{"name": 7, "size": 1}]}, {"items": 3}]
)
def test_a_listing_that_is_none_is_an_error(google: _Google, page: object) -> None:
    with patch.object(_Handler, "_page", lambda *_: page), pytest.raises(AccessError, match="does not come from"):
        parse_place("gs://bucket/run").is_dir()
    assert google.asked


def test_all_that_lies_below_in_one_listing(google: _Google) -> None:
    for i in range(12):
        google.objects[f"run/step-{i}/deep/a"] = (i + 1, b"x" * i)
    place = parse_place("gs://bucket/run")
    found = {name: DataFile.at(place / name)[1:3] for name in walk(place)}
    assert found == {f"step-{i}/deep/a": (i, str(i + 1)) for i in range(12)}
    listings = [path for path, _ in google.asked if path.partition("?")[0].endswith("/o") and "pageToken" not in path]
    assert [("delimiter" in path) for path in listings].count(False) == 1
