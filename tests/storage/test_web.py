"""Sources on web servers: one file, or a directory whose files its indexes name."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import ckpttool as library
from ckpttool.core.files import DataFile
from ckpttool.errors import AccessError, CkptError, CorruptError, UnsupportedError, UsageError
from ckpttool.execute import worker_pool
from ckpttool.execute.compute_worker import ComputeJob
from ckpttool.storage import caches, http, web
from ckpttool.storage.access import ANONYMOUS, QUERIES
from ckpttool.storage.place import ahead, parse_place, read_all, scan
from ckpttool.storage.web import WebPlace
from tests.helpers.command import ckpttool, refused, reshard
from tests.helpers.web_server import Asked, Reply, WebServer, redirect, reset, status, web_server
from tests.storage.test_http import Fast

FIXTURES = Path(__file__).parents[2] / "fixtures"
SECRET = "s3cr3t"  # noqa: S105 - what must not be seen
MODEL = {
    "model.safetensors.index.json": {
        "weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    },
    "config.json": {"model_type": "llama"},
}


@pytest.fixture(scope="module")
def _server() -> Iterator[WebServer]:
    with web_server({}) as server:
        yield server


@pytest.fixture
def server(_server: WebServer) -> Iterator[WebServer]:
    _server.clear()
    _server.files = {f"m/{n}": json.dumps(v).encode() for n, v in MODEL.items()}
    _server.files |= {f"m/model-0000{i}-of-00002.safetensors": bytes([i]) * 1000 for i in (1, 2)}
    _server.files["large"] = os.urandom(400_000)
    caches.forget()
    QUERIES.clear()
    with http.using(http.Client(clock=Fast())):
        yield _server


def at(server: WebServer, path: str) -> WebPlace:
    place = parse_place(f"{server.url}/{path}")
    assert isinstance(place, WebPlace)
    return place


def files_of(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_the_text_of_a_place() -> None:
    place = parse_place(f"https:/Host:443/a%20b/model.safetensors/?sig={SECRET}#x")
    assert isinstance(place, WebPlace)
    assert str(place) == "https://host/a%20b/model.safetensors"
    assert SECRET not in f"{place} {place!r} {place / 'x'}"
    assert (place.name, place.suffix, place.parent.name) == ("model.safetensors", ".safetensors", "a b")
    assert str(place.parent / "c d?e/é") == "https://host/a%20b/c%20d%3Fe/%C3%A9"
    assert (place.parent / "c d?e/é").name == "é"
    assert parse_place(str(place)) == place
    assert parse_place("http://h") != parse_place("https://h")
    assert str(parse_place("http://h:80/")) == "http://h"
    assert str(parse_place("http://h").parent) == "http://h"


@pytest.mark.parametrize(
    "text", ["https://u:p@h/f", "https:///f", "https://h:x/f", "https://h/a/../b", "https://h/%2e%2e/b"]
)
def test_what_is_no_place(text: str) -> None:
    with pytest.raises(UsageError) as e:
        parse_place(f"{text}?{SECRET}")
    assert SECRET not in str(e.value)
    assert "p@" not in str(e.value)


def test_a_directory_is_what_its_index_names(server: WebServer) -> None:
    server.files["m/README.md"] = b"hi"
    place = at(server, "m/")
    assert place.is_dir()
    assert not place.is_file()
    assert {e.name for e in scan(place)} == {
        *MODEL, "README.md", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
    }  # fmt: skip
    asked = Counter(a.method for a in server.asked)
    assert asked["HEAD"] < 55
    assert asked["GET"] == 1
    assert max(Counter((a.method, a.path) for a in server.asked).values()) == 1
    for name in ("optimizer", "model_state"):
        assert not (place / name).is_dir()
    assert sum(asked.values()) == len(server.asked)


def test_the_directories_of_a_pipeline(server: WebServer) -> None:
    server.files = {
        "p/model_index.json": json.dumps(
            {"_class_name": "X", "unet": ["d", "U"], "vae": ["d", "V"], "no": [None, None]}
        ).encode(),
        "p/unet/config.json": b"{}",
    }
    place = at(server, "p")
    assert {e.name for e in scan(place) if e.is_dir()} == {"unet", "vae"}
    assert (place / "unet").is_dir()
    assert not (place / "vae").is_dir()
    assert not (place / "no").exists()


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "..", ".", "", "a\\b", "a\0b", 5, None, "x" * 300])
def test_an_index_names_files_beside_it(server: WebServer, name: object) -> None:
    server.files["m/model.safetensors.index.json"] = json.dumps({"weight_map": {"a": name}}).encode()
    assert {e.name for e in scan(at(server, "m"))} == set(MODEL)


@pytest.mark.parametrize("index", [b"", b"[", b"[]", b'{"weight_map": 5}', b"[" * 100_000, b"\xff"])
def test_an_index_that_is_none(server: WebServer, index: bytes) -> None:
    server.files["m/model.safetensors.index.json"] = index
    assert {e.name for e in scan(at(server, "m"))} == set(MODEL)


def test_what_is_not_there(server: WebServer) -> None:
    place = at(server, "nothing")
    assert not place.exists()
    with pytest.raises(FileNotFoundError):
        place.identity()
    with pytest.raises(FileNotFoundError):
        place.open_file()
    with pytest.raises(FileNotFoundError):
        list(place.scan())
    done = ckpttool("inspect", f"{server.url}/nothing?{SECRET}")
    assert done.code == 2
    assert "the source does not exist" in done.err
    assert "or give the URL of one file" in done.err
    assert SECRET not in done.err


def test_pages_of_the_hub() -> None:
    assert (
        str(parse_place("https://huggingface.co/org/model/blob/v1/a.safetensors?x"))
        == "hf://org/model@v1/a.safetensors"
    )
    assert str(parse_place("https:/huggingface.co/org/model")) == "hf://org/model"


def test_pages_are_not_files(server: WebServer) -> None:
    """A server that has a page for every name has no files."""
    page = status(200, b"<html>", Content_Type="text/html; charset=utf-8")
    server.on("", page)
    assert not at(server, "m").exists()
    server.clear()
    caches.forget()
    server.on("/m", redirect("/m/"))
    server.on("/m/", status(200, b"listing", Content_Type="text/plain"))
    assert not at(server, "m").is_file()
    assert at(server, "m").is_dir()


def test_an_open_file(server: WebServer) -> None:
    data = server.files["large"]
    place = at(server, "large")
    size, tag = place.identity()
    file = place.open_file()
    assert file.info == DataFile(place, size, tag)
    assert size == len(data)
    assert file.pread(10, 5) == data[5:15]
    assert file.pread(10, size - 4) == data[-4:]
    assert file.pread(10, size) == file.pread(0, 0) == b""
    into = bytearray(20)
    assert file.read_into(memoryview(into), size - 5) == 5
    assert into[:5] == data[-5:]
    assert all(a.headers["if-match"] == tag for a in server.asked if a.method == "GET")
    assert file.map()[:] == read_all(place) == data
    server.asked.clear()
    small = ahead(at(server, "m/config.json").open_file())
    assert [small.pread(3, i) for i in (0, 3, 6)] == [b'{"m', b"ode", b"l_t"]
    assert server.count("GET") == 1


def test_an_empty_file(server: WebServer) -> None:
    server.files["empty"] = b""
    assert at(server, "empty").identity()[0] == 0
    assert read_all(at(server, "empty")) == b""
    server.on("/empty", status(405), times=1)
    assert at(server, "empty").identity()[0] == 0


def test_a_server_that_says_to_head_that_all_is_empty(server: WebServer) -> None:
    server.on("/large", lambda asked, r: r.but(Content_Length="0") if asked.method == "HEAD" else r)
    assert read_all(at(server, "large")) == server.files["large"]


def test_what_is_usual_may_lead_away(server: WebServer) -> None:
    """A host may send who asks for what is not there to a place that is refused; the file itself can be read."""
    server.files |= {f"n/{n}": b for n, b in files_of(FIXTURES / "hf_tiny_source").items()}
    for name in web.USUAL:
        if name != "config.json":
            server.on(f"/n/{name}", redirect("http://169.254.169.254/login"))
    assert ckpttool("inspect", f"{server.url}/n/model.safetensors").code == 0


def test_a_file_that_changes_while_it_is_read(server: WebServer) -> None:
    file = at(server, "large").open_file()
    server.files["large"] = bytes(400_000)
    with pytest.raises(CorruptError, match="the file has changed"):
        file.pread(10, 0)
    assert not file.info.is_unchanged()


def test_without_tags_it_is_the_time(server: WebServer) -> None:
    server.tags = False
    file = at(server, "large").open_file()
    assert file.info.tag.endswith("GMT")
    assert file.pread(10, 0) == server.files["large"][:10]
    assert server.asked[-1].headers["if-unmodified-since"] == file.info.tag
    server.on("/large", lambda _, r: r.but(Last_Modified="Wed, 21 Oct 2015 07:28:00 GMT"))
    with pytest.raises(CorruptError, match="the file has changed"):
        file.pread(10, 0)


@pytest.mark.parametrize("code", [403, 405, 501])
def test_servers_that_answer_no_head(server: WebServer, code: int) -> None:
    def no_head(asked: Asked, reply: Reply) -> Reply:
        return Reply(code, [("Content-Length", "0")]) if asked.method == "HEAD" else reply

    server.on("/large", no_head)
    place = at(server, "large?signed=for-get")
    assert place.identity()[0] == 400_000
    assert read_all(place) == server.files["large"]


def test_servers_that_send_no_ranges(server: WebServer) -> None:
    server.ranges = False
    assert json.loads(read_all(at(server, "m/config.json"))) == MODEL["config.json"]
    with pytest.raises(UnsupportedError, match="sends the whole file where a range was asked for") as e:
        at(server, "large").open_file().pread(10, 5)
    assert "download the file and give its path" in str(e.value)


@pytest.mark.parametrize(
    ("fault", "error", "said"),
    [
        ({"Content_Encoding": "gzip"}, UnsupportedError, "the server compresses the file"),
        ({"Content_Range": "bytes 8-17/400000"}, AccessError, "sends bytes 8 to 17 where 0 to 9 were asked for"),
        ({"Content_Range": "bytes 0-9/7"}, AccessError, "sends bytes 0 to 9 and says that the file has 7 bytes"),
        ({"Content_Range": "bytes 0-9/400007"}, CorruptError, "it has 400,007 bytes, not 400,000"),
        ({"ETag": '"other"'}, CorruptError, 'its ETag is "other"'),
    ],
    ids=["compressed", "other bytes", "a file too small", "another size", "another tag"],
)
def test_answers_of_a_server_that_will_not_do_better(
    server: WebServer, fault: dict[str, Any], error: type[CkptError], said: str
) -> None:
    """Repeating the command, or looking at the network, would not help: the hint says what does."""
    file = at(server, "large").open_file()
    server.on("/large", lambda _, r: r.but(**fault))
    with pytest.raises(error, match=re.escape(said)) as e:
        file.pread(10, 0)
    assert "download the file and give its path" in (e.value.hint or "")
    assert "HTTPS_PROXY" not in str(e.value)


@pytest.mark.parametrize("code", [401, 403, 429, 500, 503])
def test_what_may_not_be_read(server: WebServer, code: int) -> None:
    server.on("", status(code))
    with pytest.raises(AccessError, match=f"127.0.0.1:[0-9]+ answers {code}") as e:
        at(server, f"x/model.safetensors?{SECRET}").is_file()
    assert SECRET not in str(e.value)
    assert ("~/.netrc" in str(e.value)) == (code in (401, 403))
    assert ckpttool("inspect", f"{server.url}/x").code == (2 if code in (401, 403) else 1)


@pytest.mark.parametrize("quiet", [[], ["-q"]])
def test_the_command_line_says_why_it_waits(server: WebServer, quiet: list[str]) -> None:
    server.files = {f"m/{p.name}": p.read_bytes() for p in (FIXTURES / "hf_tiny_source").iterdir()}
    server.on("/m/config.json", status(429, Retry_After="60"), times=1)
    done = ckpttool("inspect", f"{server.url}/m", *quiet)
    assert done.code == 0
    assert ("answers 429 Too Many Requests; trying again in 60 s" in done.err) == (not quiet)


def test_a_host_that_is_not_there() -> None:
    caches.forget()
    with (
        http.using(http.Client(clock=Fast())),
        pytest.raises(AccessError, match=r"127.0.0.1:1 refuses connections \(4 tries in"),
    ):
        parse_place("http://127.0.0.1:1/model.safetensors").exists()


def test_where_a_redirect_led_is_asked_until_it_expires(server: WebServer) -> None:
    expired: set[str] = set()
    count = iter(range(100))

    def sign(*_: object) -> Reply:
        return Reply(302, [("Location", f"/large?{SECRET}{next(count)}"), ("Content-Length", "0")])

    def check(asked: Asked, reply: Reply) -> Reply:
        return Reply(403, [("Content-Length", "0")]) if asked.query in expired else reply

    server.on("/file", sign)
    server.on("/large", check)
    place = at(server, "file")
    file = place.open_file()
    for i in range(5):
        assert file.pread(10, i) == server.files["large"][i : i + 10]
    assert sum(a.path == "/file" for a in server.asked) == 1
    expired.add(server.asked[-1].query)
    assert file.pread(10, 7) == server.files["large"][7:17]
    assert sum(a.path == "/file" for a in server.asked) == 2
    server.on("/large", reset)
    expired.update(f"{SECRET}{i}" for i in range(100))
    with pytest.raises(AccessError, match="answers 403") as e:
        file.pread(10, 7)
    assert SECRET not in str(e.value)


def test_a_redirect_that_was_looked_at_once_leads_nowhere_else(server: WebServer) -> None:
    """The address that a HEAD led to is one that an answer named: it may not be near."""
    place = at(server, "large")
    assert isinstance(place, WebPlace)
    file = place.open_file()
    web._files.put(place, web._seen(place)._replace(location="http://169.254.169.254/large"))
    with pytest.raises(AccessError, match=r"a redirect from .* to http://169.254.169.254 is refused"):
        file.pread(10, 0)


def test_signatures_go_to_their_own_files(server: WebServer) -> None:
    place = at(server, f"m?{SECRET}=1")
    for name in ("config.json", "model-00001-of-00002.safetensors"):
        read_all(place / name)
    assert {a.query for a in server.asked} == {f"{SECRET}=1"}
    server.asked.clear()
    read_all(at(server, "large"))
    assert {a.query for a in server.asked} == {""}
    # What a process that computes is told: the text, and with its job what stood behind the question mark.
    said = json.loads(json.dumps(ComputeJob([str(place)], [], None, 1, 1, []).to_json()))
    assert SECRET not in json.dumps(said["sources"])
    QUERIES.clear()
    assert ComputeJob.from_json(said).sources == (str(place),)
    assert parse_place(f"{place}/config.json") == place / "config.json"
    # A newer signature of the same file.
    assert at(server, "m?x=2").query == "x=2"
    assert str(at(server, "m?x=3")) == str(place)


def test_logins_of_netrc(tmp_path: Path) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine host.example login me password pass\n")
    with patch.dict(os.environ, {"NETRC": str(netrc)}):
        said = web._login("https://host.example/f", "https://host.example/x")
        assert said == {"Authorization": "Basic bWU6cGFzcw=="}
        assert not web._login("https://other.example/f", "https://host.example/x")
        assert not web._login("http://host.example/f", "http://host.example/f")
        assert not web._login("https://host.example:8443/f", "https://host.example/f")
        with patch.dict(os.environ, {ANONYMOUS: "1"}):
            assert not web._login("https://host.example/f", "https://host.example/x")
        netrc.write_text("default login me password pass\n")
        assert not web._login("https://host.example/f", "https://host.example/x")
        netrc.write_text("machine what is this")
        assert not web._login("https://host.example/f", "https://host.example/x")


def test_a_newer_signature_is_the_same_plan(server: WebServer) -> None:
    """So --resume goes on after the first one has expired."""
    server.files = {f"m/{n}": b for n, b in files_of(FIXTURES / "hf_tiny_source").items()}
    plans = [library.open(f"{server.url}/m?sig={i}").reshard(tp=2).plan for i in (1, 2)]
    assert plans[0].digest() == plans[1].digest()
    assert {a.query for a in server.asked} == {"sig=1", "sig=2"}


@pytest.mark.parametrize("name", ["hf_tiny_source", "hf_tiny_source/model.safetensors"])
def test_reshard_gives_what_files_give(server: WebServer, tmp_path: Path, name: str) -> None:
    server.files = {f"hf_tiny_source/{n}": b for n, b in files_of(FIXTURES / "hf_tiny_source").items()}
    reshard(FIXTURES / name, tmp_path / "here", "--tp-out", "2")
    server.on("", status(503), times=3)
    reshard(f"{server.url}/{name}?{SECRET}", tmp_path / "there", "--tp-out", "2", "--verify", "--manifest")
    there = files_of(tmp_path / "there")
    assert not any(SECRET.encode() in data for data in there.values())
    there.pop("ckpttool.manifest.json")
    assert there == files_of(tmp_path / "here")


@pytest.mark.sample("fresh")
@pytest.mark.parametrize("how", ["forked", "fresh"])
def test_merge_in_other_processes(server: WebServer, tmp_path: Path, how: str) -> None:
    """A fresh interpreter makes places of texts that have no signature."""
    one, two = tmp_path / "one", FIXTURES / "hf_tiny_source"
    shutil.copytree(two, one)
    data = bytearray((one / "model.safetensors").read_bytes())
    data[-1000:] = data[-2000:-1000]
    (one / "model.safetensors").write_bytes(data)
    server.files = {f"m/{n}": b for n, b in files_of(one).items()}
    server.on("", lambda asked, r: r if asked.query == SECRET else Reply(403, [("Content-Length", "0")]))
    with patch.object(worker_pool, "can_fork", lambda: how == "forked"):
        for dst, first in (("here", one), ("there", f"{server.url}/m?{SECRET}")):
            done = ckpttool("merge", first, two, "--method", "linear", "--weights", "0.3,0.7", "-o", tmp_path / dst)
            assert done.code == 0, done.err
    here, there = files_of(tmp_path / "here"), files_of(tmp_path / "there")
    assert here["model.safetensors"] == there["model.safetensors"] != bytes(data)
    assert not any(SECRET.encode() in data for data in there.values())


def test_what_an_interrupted_run_leaves_has_no_signature(server: WebServer, tmp_path: Path) -> None:
    server.files = {f"m/{n}": b for n, b in files_of(FIXTURES / "hf_tiny_source").items()}
    url = f"{server.url}/m"
    left: list[dict[str, bytes]] = []

    def broken(asked: Asked, reply: Reply) -> Reply:
        if asked.headers.get("range", "bytes=0-").startswith("bytes=0-"):
            return reply
        left.append(files_of(tmp_path))
        return Reply(404, [("Content-Length", "0")])

    server.on("/m/model.safetensors", broken)
    done = ckpttool("reshard", f"{url}?sig={SECRET}", tmp_path / "dst", "--tp-out", "2")
    assert done.code == 1
    assert any(left)
    assert SECRET not in done.err + done.out
    assert not any(SECRET.encode() in data for files in [*left, files_of(tmp_path)] for data in files.values())


def test_an_index_that_names_no_files_is_refused(tmp_path: Path) -> None:
    """Its shards could not be found, and a checkpoint without its optimizer would look whole."""
    save = FIXTURES / "paddle_unified/pf12_llama_bf16_sharding2_nonmerge_optimshard2"
    with web_server(save) as server:
        assert "this index names no files" in refused(f"{server.url}/", tmp_path / "dst", "--to", "unified")
    with web_server(FIXTURES / "hf_tiny_source") as server:
        assert "the web has no listings: only files" in ckpttool("reshard", f"{server.url}/", tmp_path / "dst").err


def test_a_signed_file_is_found_again_from_where_it_lies() -> None:
    """Formats name the files of a directory; the signature is that of one file."""
    place = parse_place("https://signed.example/models/w.safetensors?sig=abc")
    assert isinstance(place, WebPlace)
    assert place.parent / "w.safetensors" == place
    assert (place.parent / "w.safetensors").query == "sig=abc"
    assert not (place.parent / "config.json").query
