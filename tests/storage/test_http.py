"""The HTTP client: whole answers or errors, never other bytes, whatever the server does."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from ckpttool.storage import access
from ckpttool.storage.http import ChangedError, Client, Clock, HttpError, RefusedRedirectError, shown
from ckpttool.storage.network import nearness, proxy_for, split
from tests.helpers.web_server import Asked, Fault, Reply, WebServer, cut, raw, redirect, reset, status, web_server

DATA = random.Random(1).randbytes(3 << 20)  # noqa: S311 - not for secrets
SECRET = "s3cr3t"  # noqa: S105 - what must not be seen


class Fast(Clock):
    """Time in which waits take none; what was waited is kept."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    def now(self) -> float:
        return time.monotonic() + sum(self.slept)

    def sleep(self, seconds: float, stopped: threading.Event) -> None:
        self.slept.append(seconds)


@pytest.fixture(scope="module")
def _server() -> Iterator[WebServer]:
    with web_server({}) as server:
        yield server


@pytest.fixture
def server(_server: WebServer) -> WebServer:
    _server.clear()
    _server.files = {"f": DATA, "small": b"0123456789"}
    return _server


@pytest.fixture
def clock() -> Fast:
    return Fast()


@pytest.fixture
def client(clock: Fast) -> Client:
    return Client(clock=clock, timeout=5)


def get(client: Client, url: str, start: int = 100, stop: int = 2_000_100, **known: Any) -> bytes:
    into = bytearray(stop - start)
    client.get_range(url, start, stop, memoryview(into), **known)
    return bytes(into)


def test_ranges_come_into_memory_over_one_connection(server: WebServer, client: Client) -> None:
    into = bytearray(b"-" * 12)
    for at in range(5):
        answer = client.get_range(f"{server.url}/f", at, at + 10, memoryview(into)[1:11])
        assert (answer.status, answer.total) == (206, len(DATA))
        assert into == b"-" + DATA[at : at + 10] + b"-"
    assert (server.count(), server.connections) == (5, 1)
    tag = client.request("HEAD", f"{server.url}/f").headers["etag"]
    assert get(client, f"{server.url}/f", if_match=tag, total=len(DATA)) == DATA[100:2_000_100]
    assert server.asked[-1].headers["if-match"] == tag
    assert server.asked[-1].headers["accept-encoding"] == "identity"


def test_threads_share_a_client(server: WebServer, client: Client) -> None:
    def one(i: int) -> bool:
        return get(client, f"{server.url}/f", i * 1000, i * 1000 + 50_000) == DATA[i * 1000 : i * 1000 + 50_000]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(40)))
    assert server.connections <= 8


def drip(_: Asked, reply: Reply) -> Reply:
    def pieces() -> Iterator[bytes]:
        for b in reply.data[:1000]:
            yield bytes([b])
            time.sleep(0.01)

    return replace(reply, body=pieces(), then="close")


def slow_head(*_: object) -> Reply:
    def pieces() -> Iterator[bytes]:
        for i in range(1000):
            yield b"HTTP/1.1 206 fine\r\n" if not i else b"X"
            time.sleep(0.01)

    return Reply(0, [], pieces(), "close")


def stalled(_: Asked, reply: Reply) -> Reply:
    def pieces() -> Iterator[bytes]:
        yield reply.data[:100]
        time.sleep(10)

    return replace(reply, body=pieces(), then="close")


SLOW: dict[str, Fault] = {"drip": drip, "slow head": slow_head, "stalled": stalled}
PASSING: dict[str, Fault] = {
    "reset": reset,
    "no answer": raw(b""),
    "half a status line": raw(b"HTTP/1.1 20"),
    "half of the headers": raw(b"HTTP/1.1 206 fine\r\nContent-Le"),
    "short": cut(1_000_000),
    "no body": cut(0),
    **{str(code): status(code) for code in (408, 429, 500, 502, 503, 504, 529)},
    "not HTTP": raw(b"SSH-2.0-OpenSSH_9.6\r\n"),
    "whole file": lambda _, reply: reply.but(status=200, body=DATA, Content_Length=str(len(DATA)), Content_Range=""),
}


@pytest.mark.sample("reset", "no answer", "short", "429", "503", "whole file")
@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING)
def test_what_fails_in_passing_is_tried_again(server: WebServer, client: Client, clock: Fast, fault: Fault) -> None:
    server.on("/f", fault, times=2)
    assert get(client, f"{server.url}/f") == DATA[100:2_000_100]
    assert server.count() == 3
    assert len(clock.slept) == 2


@pytest.mark.sample("drip")
@pytest.mark.parametrize("fault", SLOW.values(), ids=SLOW)
def test_what_comes_too_slowly_is_asked_for_again(server: WebServer, clock: Fast, fault: Fault) -> None:
    client = Client(clock=clock, timeout=0.15, grace=0.15)
    server.on("/f", fault, times=1)
    began = time.monotonic()
    assert get(client, f"{server.url}/f") == DATA[100:2_000_100]
    assert server.count() > 1
    assert time.monotonic() - began < 8, "the whole answer takes 10"


def test_a_range_goes_on_where_it_broke_off(server: WebServer, client: Client) -> None:
    tag = client.request("HEAD", f"{server.url}/f").headers["ETag"]
    server.on("/f", cut(1_500_000), times=1)
    assert get(client, f"{server.url}/f", if_match=tag) == DATA[100:2_000_100]
    assert [a.headers.get("range") for a in server.asked[1:]] == [
        "bytes=100-2000099",
        "bytes=1500100-2000099",
    ]


def test_a_range_begins_again_where_the_file_may_be_another_one(server: WebServer, client: Client) -> None:
    server.on("/f", cut(1_500_000), times=1)
    assert get(client, f"{server.url}/f") == DATA[100:2_000_100]
    assert {a.headers["range"] for a in server.asked} == {"bytes=100-2000099"}


def test_ten_tries_within_two_minutes(server: WebServer, client: Client, clock: Fast) -> None:
    server.on("/f", status(503))
    with pytest.raises(HttpError, match=r"answers 503 Service Unavailable \(10 tries in \d+ s\)") as e:
        get(client, f"{server.url}/f")
    assert (e.value.status, server.count()) == (503, 10)
    assert 1 < sum(clock.slept) < 120
    assert client.request("GET", f"{server.url}/f").status == 503


def test_waits_grow_and_differ(server: WebServer) -> None:
    server.on("/f", reset)
    waits = []
    for _ in range(8):
        clock = Fast()
        client = Client(clock=clock)
        client._connections._near[split(server.url)[0][1:]] = "loopback"
        with pytest.raises(HttpError, match="closed the connection"):
            get(client, f"{server.url}/f", 0, 1)
        waits.append(clock.slept)
    assert len({w[0] for w in waits}) == 8
    assert max(w[0] for w in waits) <= 0.5 < max(w[4] for w in waits) <= 8
    assert max(max(w) for w in waits) <= 20


def test_a_server_that_never_answers_takes_as_long_as_patience(server: WebServer, clock: Fast) -> None:
    client = Client(clock=clock, timeout=0.1, patience=0.6)

    def late(_: Asked, reply: Reply) -> Reply:
        time.sleep(0.2)
        return reply

    server.on("/f", late)
    with (
        patch.object(client._random, "uniform", return_value=0.0),
        pytest.raises(HttpError, match="does not answer in time"),
    ):
        get(client, f"{server.url}/f")
    assert 2 <= server.count() < 9  # 6 where the machine has time


@pytest.mark.parametrize(
    ("headers", "least"),
    [
        ({"Retry-After": "7"}, 7),
        ({"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0),
        ({"RateLimit": '"resolvers";r=0;t=55'}, 55),
        ({"RateLimit": "limit=10, remaining=0, reset=3"}, 0),
        ({"Retry-After": "soon"}, 0),
        ({"Retry-After": "-1"}, 0),
    ],
)
def test_what_the_server_asks_for_is_waited(
    server: WebServer, client: Client, clock: Fast, headers: dict[str, str], least: float
) -> None:
    said: list[str] = []
    server.on("/f", lambda *_: Reply(429, [("Content-Length", "0"), *headers.items()]), times=1)
    with patch.object(access, "on_wait", said.append):
        assert get(client, f"{server.url}/f", 0, 5) == DATA[:5]
    assert least <= clock.slept[0] <= least + 0.5
    assert len(said) == (least > 10)


def test_long_waits_are_told_once_in_a_while(server: WebServer, client: Client, clock: Fast) -> None:
    said: list[str] = []
    server.on("/f", status(503, Retry_After="20"))
    with patch.object(access, "on_wait", said.append), pytest.raises(HttpError):
        get(client, f"{server.url}/f?{SECRET}")
    assert len(clock.slept) == 9
    assert 3 <= len(said) <= 6
    assert "answers 503 Service Unavailable; trying again in 2" in said[0]
    assert SECRET not in said[0]


def test_nobody_waits_for_an_hour(server: WebServer, client: Client, clock: Fast) -> None:
    server.on("/f", status(429, b"", Retry_After="3600"))
    with pytest.raises(HttpError, match="answers 429 Too Many Requests; it asks to wait 3600 s"):
        get(client, f"{server.url}/f")
    assert (server.count(), clock.slept) == (1, [])


def changed(**headers: str) -> Fault:
    return lambda _, reply: reply.but(headers)


def chunked(data: bytes, coding: str = "chunked") -> Fault:
    body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data)
    return lambda _, reply: reply.but(body=body, Content_Length="", Transfer_Encoding=coding)


def endless(head: bytes, again: bytes) -> Fault:
    def pieces() -> Iterable[bytes]:
        yield head
        for _ in range(5000):
            yield again

    return lambda *_: Reply(0, [], pieces(), "close")


LIES: dict[str, Fault] = {
    "another start": changed(Content_Range="bytes 101-2000099/3145728"),
    "another end": changed(Content_Range="bytes 100-2000100/3145728"),
    "fewer bytes": lambda _, r: r.but(Content_Range="bytes 100-199/3145728", Content_Length="100", body=DATA[100:200]),
    "shorter file": changed(Content_Range="bytes 100-2000099/2000000"),
    "no range": changed(Content_Range=""),
    "another unit": changed(Content_Range="items 100-2000099/3145728"),
    "two ranges": lambda _, r: replace(r, headers=[*r.headers, ("Content-Range", "bytes 100-2000099/3145728")]),
    "several parts": changed(Content_Type="multipart/byteranges; boundary=x", Content_Range=""),
    "another coding": chunked(DATA[100:2_000_100], "gzip, chunked"),
    "framing as the file": lambda _, r: r.but(
        body=(b"1e8480\r\n" + DATA)[:2_000_000], then="close", Content_Length="", Transfer_Encoding="gzip, chunked"
    ),
    "a part of several": changed(Content_Type="multipart/byteranges; boundary=x"),
    "huge numbers": changed(Content_Range="bytes 100-2000099/" + "9" * 5000),
    "negative length": changed(Content_Length="-1"),
    "length in words": changed(Content_Length="many"),
    "another length": changed(Content_Length="1999999"),
    "two lengths": lambda _, r: replace(r, headers=[*r.headers, ("Content-Length", "5")]),
    "whole file": PASSING["whole file"],
    "an empty 200": lambda _, r: r.but(status=200, Content_Length="0", Content_Range="", body=b""),
    "more chunks": chunked(DATA[100:2_000_101]),
    "not HTTP": PASSING["not HTTP"],
    "endless headers": endless(b"HTTP/1.1 206 fine\r\n", b"X-A: b\r\n"),
    "endless line": endless(b"HTTP/1.1 206 fine\r\nX: ", b"x" * 1000),
    "endless chunk size": endless(
        b"HTTP/1.1 206 fine\r\nTransfer-Encoding: chunked\r\nContent-Range: bytes 100-2000099/3145728\r\n\r\n",
        b"0" * 500,
    ),
}


@pytest.mark.parametrize("fault", LIES.values(), ids=LIES)
def test_a_server_that_lies_is_an_error(server: WebServer, client: Client, fault: Fault) -> None:
    server.on("/f", fault)
    with pytest.raises(HttpError) as e:
        get(client, f"{server.url}/f?sig={SECRET}")
    assert not isinstance(e.value, ChangedError)
    assert server.count() == 3
    assert SECRET not in str(e.value)
    assert "127.0.0.1" in (e.value.strerror or "")


def test_a_length_that_never_comes_is_an_error(server: WebServer, client: Client) -> None:
    server.on("/f", cut(2000))
    with pytest.raises(HttpError, match=r"closed the connection before the end of its answer \(10 tries"):
        get(client, f"{server.url}/f")


def test_endless_continue_is_an_error(server: WebServer) -> None:
    client = Client(clock=Fast(), grace=0.03, timeout=1, tries=2)
    stop = threading.Event()

    def pieces() -> Iterator[bytes]:
        while not stop.is_set():
            yield b"HTTP/1.1 100 Continue\r\n\r\n"
            time.sleep(0.001)

    server.on("/f", lambda *_: Reply(0, [], pieces(), "close"))
    with pytest.raises(HttpError):
        get(client, f"{server.url}/f")
    stop.set()


@pytest.mark.parametrize("fault", [lambda _, r: r, chunked(DATA[100:2_000_100])], ids=["length", "chunks"])
def test_what_is_right_is_read(server: WebServer, client: Client, fault: Fault) -> None:
    server.on("/f", fault)
    assert get(client, f"{server.url}/f") == DATA[100:2_000_100]


def test_a_compressed_file_is_refused(server: WebServer, client: Client) -> None:
    server.on("/f", changed(Content_Encoding="gzip"))
    with pytest.raises(HttpError, match="compresses"):
        get(client, f"{server.url}/f")
    with pytest.raises(HttpError, match="sends a compressed answer"):
        client.request("GET", f"{server.url}/f")
    assert server.count() == 2


def test_the_whole_file_may_come_as_such(server: WebServer, client: Client) -> None:
    server.ranges = False
    assert get(client, f"{server.url}/small", 0, 10) == b"0123456789"
    with pytest.raises(HttpError, match="sends the whole file where a range was asked for"):
        get(client, f"{server.url}/small", 0, 9)


def test_bytes_behind_an_answer_are_not_the_next_one(server: WebServer, client: Client) -> None:
    other = b"HTTP/1.1 206 ok\r\nContent-Length: 10\r\nContent-Range: bytes 0-9/10\r\n\r\nABCDEFGHIJ"
    server.on("/small", lambda _, r: replace(r, body=r.data + other), times=1)
    for _ in range(2):
        assert get(client, f"{server.url}/small", 0, 10) == b"0123456789"


@pytest.mark.parametrize(
    ("known", "fault"),
    [
        ({"if_match": '"x"'}, None),
        ({"if_match": 'W/"x"'}, None),
        ({"if_match": '"TAG"'}, changed(ETag="")),
        ({"if_match": '"TAG"'}, changed(ETag='"x"')),
        ({"if_match": '"TAG"'}, status(412)),
        ({"total": 4_000_000}, None),
        ({"total": len(DATA)}, changed(Content_Range="bytes 100-2000099/3145729")),
        ({"total": len(DATA)}, status(416)),
        ({"modified": "Wed, 21 Oct 2015 07:28:00 GMT"}, None),
        ({"modified": "Wed, 21 Oct 2015 07:28:00 GMT"}, changed(Last_Modified="")),
    ],
)
def test_a_file_that_has_changed(server: WebServer, client: Client, known: dict[str, Any], fault: Fault | None) -> None:
    tag = server.right(Asked("GET", "/f", "", {}, b"", 0)).headers[-1][1]
    known = {k: v.replace('"TAG"', tag) if isinstance(v, str) else v for k, v in known.items()}
    if fault:
        server.on("/f", fault)
    with pytest.raises(ChangedError, match="the file has changed"):
        get(client, f"{server.url}/f", **known)
    assert server.count() == 1


def test_a_weak_tag_is_compared_and_not_sent(server: WebServer, client: Client) -> None:
    server.on("/f", changed(ETag='W/"x"'))
    assert get(client, f"{server.url}/f", if_match='W/"x"') == DATA[100:2_000_100]
    assert "if-match" not in server.asked[0].headers


@pytest.mark.parametrize("code", [400, 401, 403, 404, 410, 501])
def test_what_stays_wrong_is_not_tried_again(server: WebServer, client: Client, code: int) -> None:
    server.on("/f", status(code, b"because"))
    with pytest.raises(HttpError, match=f"answers {code}") as e:
        get(client, f"{server.url}/f")
    assert e.value.answer is not None
    assert (e.value.status, e.value.answer.body) == (code, b"because")
    answer = client.request("GET", f"{server.url}/f")
    assert (answer.status, answer.body, server.count()) == (code, b"because", 2)


def test_half_a_head_is_no_answer(server: WebServer, client: Client, clock: Fast) -> None:
    """``Content-Length: 10`` of ``1000``, and half of an ETag, look like others."""
    server.on("/f", raw(b'HTTP/1.1 200 OK\r\nETag: "a"\r\nContent-Length: 31'), times=1)
    answer = client.request("HEAD", f"{server.url}/f")
    assert (answer.total, len(clock.slept)) == (len(DATA), 1)


def test_a_small_answer_is_whole_and_small(server: WebServer, client: Client) -> None:
    server.files["j"] = b'{"a": 1}'
    assert client.request("GET", f"{server.url}/j").json() == {"a": 1}
    with pytest.raises(HttpError, match="not JSON"):
        client.request("GET", f"{server.url}/small?x={SECRET}").json() and client.request(
            "GET", f"{server.url}/f"
        ).json()
    with pytest.raises(HttpError, match=r"3,145,728 bytes, more than 1000000"):
        client.request("GET", f"{server.url}/f", limit=1_000_000)
    server.on("/f", lambda _, r: replace(r.but(Content_Length=""), then="close"))
    with pytest.raises(HttpError, match="more than 1,000,000 bytes"):
        client.request("GET", f"{server.url}/f", limit=1_000_000)
    server.on("/j", cut(3), times=1)
    assert client.request("GET", f"{server.url}/j").body == b'{"a": 1}'
    head = client.request("HEAD", f"{server.url}/small")
    assert (head.status, head.total, head.body) == (200, 10, b"")


def test_an_endless_error_is_cut(server: WebServer, client: Client) -> None:
    server.on("/f", endless(b"HTTP/1.1 404 no\r\n\r\n", b"x" * 1000))
    answer = client.request("GET", f"{server.url}/f")
    assert (answer.status, len(answer.body)) == (404, 64 << 10)


def test_bodies_are_sent_whole_each_time(server: WebServer, client: Client) -> None:
    server.on("/new", reset, times=1)
    server.on("/new", status(500), times=1)
    body = memoryview(bytearray(DATA))
    assert client.request("PUT", f"{server.url}/new", body=body, headers={"X-A": "b"}).status == 201
    assert [a.body == DATA for a in server.asked] == [True] * 3
    assert server.files["new"] == DATA


def test_posts_are_not_repeated(server: WebServer, client: Client) -> None:
    client.request("HEAD", f"{server.url}/small")  # a connection that was used is no reason
    server.on("/p", reset, times=1)
    with pytest.raises(HttpError, match="closed the connection"):
        client.request("POST", f"{server.url}/p", body=b"x")
    server.on("/p", status(500), times=1)
    assert client.request("POST", f"{server.url}/p", body=b"x").status == 500
    server.on("/p", status(429), times=1)
    assert client.request("POST", f"{server.url}/p", body=b"x").status == 200
    server.on("/p", reset, times=1)
    assert client.request("POST", f"{server.url}/p", body=b"x", repeat=True).body == b"x"
    assert server.count("POST") == 6


def test_a_refusal_before_the_body_is_read_is_heard(client: Client) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            conn, _ = listening.accept()
            conn.recv(1000)
            conn.sendall(b"HTTP/1.1 403 no\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            time.sleep(0.02)
            conn.close()  # with bytes that nobody has read: the client's next ones are answered with a reset

        thread = threading.Thread(target=serve)
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/x"
        assert client.request("PUT", url, body=DATA).status == 403
        thread.join()


def test_bytes_that_come_later_are_not_the_next_answer(server: WebServer, client: Client) -> None:
    other = b"HTTP/1.1 206 ok\r\nContent-Length: 10\r\nContent-Range: bytes 0-9/10\r\n\r\nABCDEFGHIJ"
    came = threading.Event()

    def pieces() -> Iterator[bytes]:
        yield b"0123456789"
        time.sleep(0.02)
        yield other
        came.set()

    server.on("/small", lambda _, r: replace(r, body=pieces()), times=1)
    assert get(client, f"{server.url}/small", 0, 10) == b"0123456789"
    came.wait(5)
    time.sleep(0.01)
    assert get(client, f"{server.url}/small", 0, 10) == b"0123456789"
    assert server.connections == 2


def test_the_answer_behind_an_interim_one_is_not_the_next_one(server: WebServer, client: Client) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
        time.sleep(0.05)
        yield b"HTTP/1.1 206 ok\r\nContent-Length: 10\r\nContent-Range: bytes 0-9/10\r\n\r\nABCDEFGHIJ"

    server.on("/small", lambda *_: Reply(0, [], pieces()), times=3)
    with pytest.raises(HttpError, match="103"):
        get(client, f"{server.url}/small", 0, 10)
    assert get(client, f"{server.url}/small", 0, 10) == b"0123456789"


@pytest.mark.parametrize("said", ["", "close"])
def test_a_connection_that_was_closed_while_idle_costs_nothing(
    server: WebServer, client: Client, clock: Fast, said: str
) -> None:
    for _ in range(3):
        server.on("/f", lambda _, r: replace(r.but(Connection=said), then="close"), times=1)
        assert get(client, f"{server.url}/f") == DATA[100:2_000_100]
    assert clock.slept == []
    assert server.connections == 3


def test_a_host_that_was_never_there_gets_a_few_tries(client: Client, clock: Fast) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    with pytest.raises(HttpError, match=r"refuses connections \(4 tries in") as e:
        get(client, f"http://127.0.0.1:{port}/f?{SECRET}")
    assert SECRET not in f"{e.value!r} {e.value}"
    assert len(clock.slept) == 3


def test_a_name_without_an_address(client: Client) -> None:
    with (
        patch("ckpttool.storage.network.getaddrinfo", side_effect=socket.gaierror(-2, "Name or service not known")),
        pytest.raises(HttpError, match=r"no address found for nowhere\.example: check the name and the network"),
    ):
        get(client, "https://nowhere.example/f")
    with pytest.raises(HttpError, match="is not a host name"):
        get(client, f"https://{'a' * 70}.example/f")


@pytest.mark.parametrize(
    "url",
    [
        "ftp://h/f", "file:///etc/passwd", "http:///f", "https://u:p@h/f", "http://h:x/f", "http://h:99999/f",
        "http://h/a b", "http://h/a\r\nX: y", "h/f", "", "http://h\\@other/f", "http://[::1/f",
    ],
)  # fmt: skip
def test_what_is_no_url(client: Client, url: str) -> None:
    with pytest.raises(HttpError, match=r"the URL|URL"):
        client.request("GET", url)


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_redirects_are_followed(server: WebServer, client: Client, code: int) -> None:
    server.on("/a", redirect("b/../f?x=1#frag", code))
    assert get(client, f"{server.url}/a", headers={"Authorization": "Bearer t"}) == DATA[100:2_000_100]
    assert (server.asked[-1].path, server.asked[-1].query) == ("/f", "x=1")
    assert server.asked[-1].headers["authorization"] == "Bearer t"
    assert client.request("GET", f"{server.url}/a").url == f"{server.url}/f?x=1"
    answer = client.request("HEAD", f"{server.url}/a", follow=False)
    assert (answer.status, answer.headers["location"]) == (code, "b/../f?x=1#frag")
    assert client.request("PUT", f"{server.url}/a", body=b"").status == code


def test_secrets_stay_with_their_host(server: WebServer, client: Client) -> None:
    with web_server({"f": DATA}) as other:
        server.on("/a", redirect(f"{other.url}/f"))
        headers = {"authorization": "Bearer t", "Cookie": "c", "X-Amz-Security-Token": "s", "User-Agent": "me"}
        assert get(client, f"{server.url}/a", headers=headers) == DATA[100:2_000_100]
        assert {"authorization", "cookie", "x-amz-security-token"} <= server.asked[0].headers.keys()
        assert other.asked[0].headers.keys() == {"host", "user-agent", "accept-encoding", "range"}
        # What was taken away does not come back with the second redirect.
        other.on("/f", redirect(f"{server.url}/f"))
        get(client, f"{server.url}/a", headers=headers)
        assert "authorization" not in server.asked[-1].headers


def test_redirects_in_utf8(server: WebServer, client: Client) -> None:
    server.files["\u00e9 \u00fc"] = DATA
    server.on("/a", redirect("/\u00e9 \u00fc".encode().decode("latin-1")))
    assert get(client, f"{server.url}/a") == DATA[100:2_000_100]


@pytest.mark.parametrize("token", [f"{SECRET}\r\nX: y", f"{SECRET}\n", f"{SECRET}\u20ac", f"{SECRET}\0"])
def test_headers_that_cannot_be_sent_are_not_shown(server: WebServer, client: Client, token: str) -> None:
    with pytest.raises(HttpError, match="the value of Authorization has characters") as e:
        client.request("GET", f"{server.url}/f", headers={"Authorization": token})
    assert SECRET not in f"{e.value} {e.value!r}"
    assert e.value.__suppress_context__ or e.value.__context__ is None
    assert server.connections == 0


def test_redirects_end(server: WebServer, client: Client) -> None:
    server.on("/a", redirect("/a"))
    with pytest.raises(RefusedRedirectError, match="more than 5 redirects"):
        get(client, f"{server.url}/a")
    assert server.count() == 6


@pytest.mark.parametrize(
    "to", ["ftp://h/f", "file:///etc/passwd", "http://u:p@127.0.0.1/", "gopher:x", "http://[::1/", "//:80/"]
)
def test_redirects_lead_to_urls(server: WebServer, client: Client, to: str) -> None:
    server.on("/a", redirect(to))
    with pytest.raises(RefusedRedirectError, match="redirects, but the URL"):
        get(client, f"{server.url}/a")
    assert server.count() == 1


NEAR = {
    "loopback": [
        "127.0.0.1", "localhost", "[::1]", "127.1", "2130706433", "0x7f.1", "0177.0.0.1", "0", "0.0.0.0", "[::]",  # noqa: S104
        "[::ffff:127.0.0.1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "[::127.0.0.1]",
    ],
    "private": [
        "10.0.0.1", "192.168.1.1", "172.16.0.1", "100.100.100.200", "[fd00:ec2::254]", "167772161", "224.0.0.1",
    ],
    "link-local": ["169.254.169.254", "[fe80::1]", "[::ffff:a9fe:a9fe]", "0xa9fea9fe", "168.63.129.16"],
}  # fmt: skip


@pytest.mark.sample("169.254.169.254", "localhost", "[::ffff:127.0.0.1]", "2130706433", "10.0.0.1")
@pytest.mark.parametrize("host", [h for near in NEAR.values() for h in near])
def test_what_the_internet_names_is_not_near(server: WebServer, client: Client, host: str) -> None:
    """``origin`` is a host of the internet, which names one that is not."""
    url = f"http://{host}:{split(server.url)[0].port}/f?{SECRET}"
    with pytest.raises(RefusedRedirectError, match=r"from 8.8.8.8 to http:.* is refused: it leads to .* address") as e:
        get(client, url, origin="http://8.8.8.8/model")
    assert SECRET not in str(e.value)
    assert server.connections == 0


@pytest.mark.sample("169.254.169.254", "10.0.0.1")
@pytest.mark.parametrize("host", NEAR["private"] + NEAR["link-local"])
def test_what_this_machine_names_is_on_this_machine_or_the_internet(
    server: WebServer, client: Client, host: str
) -> None:
    server.on("/a", redirect(f"http://{host}/f"))
    with pytest.raises(RefusedRedirectError, match=r"a redirect from .* is refused"):
        get(client, f"{server.url}/a")


def answers(names: dict[str, list[str]]) -> Callable[..., Any]:
    real = socket.getaddrinfo

    def look_up(name: str, port: int, **options: Any) -> Any:
        return [found for address in names.get(name, [name]) for found in real(address, port, **options)]

    return look_up


def test_names_are_judged_by_their_addresses(server: WebServer, client: Client) -> None:
    port = split(server.url)[0].port
    names = {"cdn.example": ["10.0.0.1", "127.0.0.1"], "hub.example": ["8.8.8.8"], "here.example": ["127.0.0.1"]}
    with patch("ckpttool.storage.network.getaddrinfo", side_effect=answers(names)) as look_up:
        for name in ("here.example", "cdn.example"):
            with pytest.raises(RefusedRedirectError, match=f"leads to {name}"):
                get(client, f"http://{name}:{port}/f", origin="http://hub.example/")
        assert server.connections == 0
        # From this machine, those of its addresses that are on this machine; and the one that was looked at is used.
        look_up.reset_mock()
        assert get(client, f"http://cdn.example:{port}/f", 0, 9, origin=server.url) == DATA[:9]
        assert [c.args[0] for c in look_up.call_args_list] == ["127.0.0.1", "cdn.example"]


def test_an_address_that_works_is_tried_first(server: WebServer, client: Client) -> None:
    port = split(server.url)[0].port
    tried: list[str] = []
    connect = socket.socket.connect

    def record(sock: socket.socket, address: tuple[str, int]) -> None:
        tried.append(address[0])
        connect(sock, address)

    with (
        patch("ckpttool.storage.network.getaddrinfo", side_effect=answers({"both.example": ["::1", "127.0.0.1"]})),
        patch.object(socket.socket, "connect", record),
    ):
        for _ in range(2):
            server.on("/small", lambda _, r: replace(r, then="close"), times=1)
            assert get(client, f"http://both.example:{port}/small", 0, 3) == b"012"
    assert tried == ["::1", "127.0.0.1", "127.0.0.1"]


def test_a_kept_connection_is_no_way_around(server: WebServer, client: Client) -> None:
    assert get(client, f"{server.url}/f", 0, 9) == DATA[:9]
    with pytest.raises(RefusedRedirectError, match="loopback"):
        get(client, f"{server.url}/f", origin="http://8.8.8.8/")
    assert server.count() == 1


def test_never_from_https_to_http(server: WebServer, client: Client) -> None:
    with pytest.raises(RefusedRedirectError, match="redirects from https to http"):
        get(client, f"{server.url}/f", origin="https://127.0.0.1/")
    assert server.connections == 0


@pytest.mark.parametrize("near", NEAR)
def test_nearness(near: str) -> None:
    for host in NEAR[near]:
        try:
            found = socket.getaddrinfo(host.strip("[]"), 80, type=socket.SOCK_STREAM)
        except socket.gaierror:  # a machine without such addresses
            continue
        assert {nearness(str(address[0])) for *_, address in found} == {near}, host


def test_far_addresses() -> None:
    assert [nearness(a) for a in ("8.8.8.8", "2606:4700::1", "::ffff:8.8.8.8")] == [""] * 3


def test_urls_are_shown_without_secrets() -> None:
    assert shown("https://u:p@h:80/a/b@c?sig=1#x") == "https://h:80/a/b@c"
    assert shown("https://h?sig=1") == "https://h"
    assert shown("https://u:p?@h/") == "https://..."
    assert shown("https://h/a?b=c@d/e") == "https://h/a"
    assert shown("u:p@h") == "h"
    assert shown("/path?x") == "/path"


def test_a_proxy_of_the_environment_is_asked(
    server: WebServer, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", server.url.replace("://", "://me:pass%40word%E2%82%AC@"))
    monkeypatch.setenv("no_proxy", "")
    server.on("http://files.example/f", lambda _, r: r.but(status=200, body=b"proxied", Content_Length="7"))
    with patch("ckpttool.storage.network.getaddrinfo", side_effect=answers({"files.example": ["8.8.8.8"]})):
        assert client.request("GET", "http://files.example/f?q=1").body == b"proxied"
        asked = server.asked[0]
        assert (asked.path, asked.query) == ("http://files.example/f", "q=1")
        assert (asked.headers["host"], asked.headers["proxy-authorization"]) == (
            "files.example",
            "Basic bWU6cGFzc0B3b3Jk4oKs",
        )
        # What the proxy would look up for others is looked at here first.
        server.on("http://files.example/g", redirect("http://169.254.169.254/latest"))
        with pytest.raises(RefusedRedirectError, match="link-local"):
            client.request("GET", "http://files.example/g")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert client.request("GET", f"{server.url}/small").body == b"0123456789"
    assert server.asked[-1].path == "/small"
    monkeypatch.setenv("http_proxy", f"socks5://u:{SECRET}@h:1")
    monkeypatch.setenv("no_proxy", "")
    with pytest.raises(HttpError, match=r"proxy in the environment is not http://HOST:PORT: socks5://h:1") as e:
        client.request("GET", "http://others.example/f")
    assert SECRET not in str(e.value)


@pytest.mark.parametrize(
    ("url", "no_proxy", "expected"),
    [
        ("http://10.1.2.3/", "10.0.0.0/8", None),
        ("http://11.1.2.3/", "10.0.0.0/8", "http://p:1"),
        ("http://[::1]:8/", "[::1]", None),
        ("http://[::1]:8/", "::1", None),
        ("http://a.example.com/", ".example.com", None),
        ("http://a.example.com/", "*", None),
        ("http://example.org/", "example.com, 10.0.0.0/8", "http://p:1"),
    ],
)
def test_no_proxy(url: str, no_proxy: str, expected: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "p:1")
    monkeypatch.setenv("no_proxy", no_proxy)
    assert proxy_for(split(url)[0]) == expected


def test_a_proxy_that_refuses_a_tunnel(server: WebServer, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", server.url)
    monkeypatch.setenv("no_proxy", "")
    server.on("files.example:443", status(407))
    with (
        patch("ckpttool.storage.network.getaddrinfo", side_effect=answers({"files.example": ["8.8.8.8"]})),
        pytest.raises(HttpError, match=r"answers 407 when asked for files.example:443"),
    ):
        client.request("GET", "https://files.example/f")
    assert (server.asked[0].method, server.asked[0].path) == ("CONNECT", "files.example:443")


def test_stop_ends_who_waits(server: WebServer) -> None:
    client = Client()
    go = threading.Event()

    def late(_: Asked, reply: Reply) -> Reply:
        go.wait(30)
        return reply

    server.on("/f", late)
    server.on("/b", status(503, Retry_After="60"))
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(get, client, f"{server.url}/{n}") for n in "fb"]
        while server.count() < 2:
            time.sleep(0.001)
        time.sleep(0.02)
        began = time.monotonic()
        client.stop()
        for future in both:
            with pytest.raises(HttpError, match="stopped"):
                future.result(timeout=20)
        assert time.monotonic() - began < 20
    go.set()
    assert get(client, f"{server.url}/small", 0, 3) == b"012"


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_begins_with_no_connections(server: WebServer, client: Client) -> None:
    assert get(client, f"{server.url}/f", 0, 9) == DATA[:9]
    pid = os.fork()
    if not pid:
        try:
            os._exit(0 if get(client, f"{server.url}/f", 5, 9) == DATA[5:9] else 1)
        finally:
            os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    assert server.connections == 2
    assert get(client, f"{server.url}/f", 1, 9) == DATA[1:9]
    assert server.connections == 2
