"""Servers that break the protocol, or keep to it to do harm: an error soon, and no bytes that nobody vouches for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from ckpttool.storage.http import Answer, Client, HttpError, RefusedRedirectError
from ckpttool.storage.network import nearness, shown, split
from tests.hostile.liar import Asked, Hasty, Say, answer, endless, liar

OK, PART = b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-1/2\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"


def one(*pieces: bytes) -> Say:
    return lambda _: pieces


ANSWERS: dict[str, Say] = {
    "100 for ever": endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "100 with headers for ever": endless(b"", b"HTTP/1.1 100 Continue\r\nX: y\r\n\r\n"),
    "trailers for ever": endless(OK + CHUNKED + b"2\r\nab\r\n0\r\n", b"X: y\r\n"),
    "trailers of a range": endless(PART + CHUNKED + b"2\r\nab\r\n0\r\n", b"X: y\r\n"),
    "a body for ever": endless(OK + b"\r\n", b"x"),
    "a range for ever": endless(PART + b"\r\n", b"x"),
    "chunks for ever": endless(OK + CHUNKED, b"1\r\na\r\n"),
    "headers for ever": endless(OK, b"X: y\r\n"),
    "one header for ever": endless(OK + b"X: ", b"x"),
    "a status for ever": endless(b"HTTP/1.1 200 ", b"x"),
    "a size of a chunk for ever": endless(OK + CHUNKED + b"1;", b"x"),
    "a negative chunk": one(OK + CHUNKED + b"-5\r\nabcde\r\n0\r\n\r\n"),
    "a negative chunk of a range": one(PART + CHUNKED + b"-5\r\nabcde\r\n0\r\n\r\n"),
    "a huge chunk": one(OK + CHUNKED + b"f" * 30 + b"\r\nab\r\n"),
    "a chunk without a size": one(OK + CHUNKED + b"zz\r\nab\r\n"),
    "two lengths": one(OK + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nab"),
    "a negative length": one(OK + b"Content-Length: -2\r\n\r\nab"),
    "a length in words": one(OK + b"Content-Length: two\r\n\r\nab"),
    "a length beyond all": one(OK + b"Content-Length: " + b"9" * 400 + b"\r\n\r\nab"),
    "a length that does not come": one(OK + b"Content-Length: 20\r\n\r\nab"),
    "compressed": one(OK + b"Content-Length: 2\r\nContent-Encoding: gzip\r\n\r\nab"),
    "another range": one(b"HTTP/1.1 206 P\r\nContent-Range: bytes 1-2/3\r\nContent-Length: 2\r\n\r\nab"),
    "a longer range": one(b"HTTP/1.1 206 P\r\nContent-Range: bytes 0-2/3\r\nContent-Length: 3\r\n\r\nabc"),
    "no range": one(b"HTTP/1.1 206 P\r\nContent-Length: 2\r\n\r\nab"),
    "two ranges": one(
        b"HTTP/1.1 206 P\r\nContent-Range: bytes 0-1/2\r\nContent-Range: bytes 5-6/9\r\nContent-Length: 2\r\n\r\nab"
    ),
    "ranges in parts": one(b"HTTP/1.1 206 P\r\nContent-Type: multipart/byteranges; boundary=x\r\n\r\n--x\r\n\r\nab"),
    "a range of words": one(b"HTTP/1.1 206 P\r\nContent-Range: bytes a-b/c\r\nContent-Length: 2\r\n\r\nab"),
    "a file without the range": one(b"HTTP/1.1 206 P\r\nContent-Range: bytes 0-1/1\r\nContent-Length: 2\r\n\r\nab"),
    "nothing": one(b""),
    "not HTTP": one(b"\x00\xff" * 500),
    "HTTP 0.9": one(b"<html>"),
    "a status of letters": one(b"HTTP/1.1 OK\r\n\r\n"),
    "a status of 99": one(b"HTTP/1.1 99 X\r\n\r\n"),
    "half a header": one(OK + b"X"),
    "a fold": one(OK + b'ETag: "a\r\n b"\r\nContent-Length: 2\r\n\r\nab'),
    "zeros in a header": one(OK + b'ETag: "\0\xff"\r\nContent-Length: 2\r\n\r\nab'),
    "a wait for ever": one(b"HTTP/1.1 503 X\r\nRetry-After: 99999999999999999999\r\nContent-Length: 0\r\n\r\n"),
    "a wait until the end of time": one(
        b"HTTP/1.1 503 X\r\nRetry-After: Fri, 31 Dec 9999 23:59:59 -9999\r\nContent-Length: 0\r\n\r\n"
    ),
    "a wait of words": one(b"HTTP/1.1 429 X\r\nRetry-After: \xb2\r\nRateLimit: t=\xb2\r\nContent-Length: 0\r\n\r\n"),
}  # fmt: skip


def within(seconds: float, do: Callable[[], Any]) -> object:
    """What comes of a call, or the exception; the test fails when it takes too long."""
    out: list[object] = []

    def run() -> None:
        try:
            out.append(do())
        except BaseException as e:  # noqa: BLE001 - it is what came of it
            out.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert out, f"it did not end in {seconds:.0f} s"
    return out[0]


@pytest.mark.product(one_in=8)
@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_ends(name: str) -> None:
    """A request comes to its end: with an error, or with the two bytes that the answer may be said to have."""
    clock = Hasty()
    client = Client(tries=2, patience=5, timeout=2, grace=2, clock=clock)
    into = bytearray(2)
    with liar(ANSWERS[name]) as server:
        whole = within(10, lambda: client.request("GET", server.url + "/x", limit=1 << 16))
        part = within(10, lambda: client.get_range(server.url + "/x", 0, 2, memoryview(into)))
        client.stop()
    assert isinstance(whole, HttpError | Answer), repr(whole)
    assert isinstance(part, HttpError | Answer), repr(part)
    if isinstance(whole, Answer) and whole.status == 200:
        assert len(whole.body) <= 1 << 16
    if isinstance(part, Answer):
        assert (part.status, bytes(into), part.total) == (part.status, b"ab", 2)
    assert clock.waited < 400


LEADS = {
    "metadata": "http://169.254.169.254/latest/meta-data/",
    "metadata as one number": "http://2852039166/",
    "metadata in hexadecimal": "http://0xa9fea9fe/",
    "metadata in octal": "http://0251.0376.0251.0376/",
    "metadata in IPv6": "http://[::ffff:169.254.169.254]/",
    "metadata by NAT64": "http://[64:ff9b::a9fe:a9fe]/",
    "metadata by a local NAT64": "http://[64:ff9b:1::a9fe:a9fe]/",
    "metadata by 6to4": "http://[2002:a9fe:a9fe::]/",
    "metadata of Alibaba": "http://100.100.100.200/",
    "metadata of Oracle": "http://192.0.0.192/",
    "metadata of Azure": "http://168.63.129.16/",
    "metadata of AWS in IPv6": "http://[fd00:ec2::254]/",
    "10": "http://10.0.0.1/",
    "172.16": "http://172.16.0.1/",
    "192.168": "http://192.168.1.1/",
    "link-local": "http://[fe80::1]/",
    "site-local": "http://[fec0::1]/",
    "unique local": "http://[fc00::1]/",
    "a file": "file:///etc/passwd",
    "ftp": "ftp://127.0.0.1/",
    "gopher": "gopher://127.0.0.1/",
    "data": "data:,abc",
    "a password": "http://user:geheim@127.0.0.1/",
    "a port beyond all": "http://127.0.0.1:99999/",
    "half an address": "http://[::1",
    "a backslash": "http://127.0.0.1\\@169.254.169.254/",
    "an escape": "http://127.0.0.1/\x1b[2J",
}


@pytest.mark.product(one_in=8)
@pytest.mark.parametrize("name", LEADS)
def test_where_an_answer_may_lead(name: str) -> None:
    """No connection to what lies near, though the source itself is on this machine: that is another neighbourhood."""
    client = Client(tries=2, patience=1, timeout=1, grace=1, clock=Hasty())
    with liar(lambda _: answer("302 Found", b"", f"Location: {LEADS[name]}")) as server:
        got = within(10, lambda: client.request("GET", server.url + "/x", headers={"Authorization": "geheim"}))
        client.stop()
    assert isinstance(got, RefusedRedirectError), repr(got)
    assert "geheim" not in str(got)
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:{}/", "http://localhost:{}/", "http://2130706433:{}/", "http://0x7f.1:{}/",
            "http://[::ffff:127.0.0.1]:{}/", "http://0.0.0.0:{}/"]
)  # fmt: skip
def test_a_source_of_the_internet_does_not_lead_here(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An own host takes no connection when an answer of the internet names it. Here, one says that it is of it."""
    client = Client(tries=2, patience=1, timeout=1, grace=1, clock=Hasty())
    monkeypatch.setattr(client._connections, "home", lambda _: "")
    with liar(lambda _: answer("200 OK", b"ab")) as inside:
        to = url.format(inside.port)
        with liar(lambda _: answer("302 Found", b"", f"Location: {to}")) as outside:
            got = within(10, lambda: client.request("GET", outside.url + "/x"))
        client.stop()
    assert isinstance(got, RefusedRedirectError), repr(got)
    assert not inside.asked


def test_secrets_stay_with_their_host() -> None:
    """Another port is another host; and what was left out stays out on the way back."""
    secrets = {"Authorization": "Bearer geheim", "Cookie": "geheim", "X-Api-Key": "geheim"}

    def lead(asked: Asked) -> list[bytes]:
        return answer("307 X", b"", f"Location: {second.url}/y") if asked.path == "/x" else answer("200 OK", b"ab")

    client = Client(tries=2, patience=1, timeout=2, clock=Hasty())
    with liar(lead) as first, liar(lambda _: answer("307 X", b"", f"Location: {first.url}/z")) as second:
        got = client.request("GET", first.url + "/x", headers=secrets)
        client.stop()
    assert got.body == b"ab"
    assert [a.path for a in first.asked] == ["/x", "/z"]
    assert "geheim" in str(first.asked[0].headers)
    assert "geheim" not in str(second.asked) + str(first.asked[1])


NEAR = (
    "0.0.0.0 10.1.2.3 100.64.0.1 127.0.0.1 127.9.9.9 169.254.1.1 172.31.255.255 192.0.0.1 192.0.0.192 192.168.0.1 "
    "198.18.0.1 224.0.0.1 240.0.0.1 255.255.255.255 :: ::1 ::7f00:1 fc00::1 fd00:ec2::254 fe80::1 fec0::1 ff02::1 "
    "64:ff9b::7f00:1 64:ff9b:1::1 2001:db8::1 2002:7f00:1:: ::ffff:10.0.0.1"
)


@pytest.mark.parametrize("address", NEAR.split())
def test_near_addresses(address: str) -> None:
    assert nearness(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_addresses_of_the_internet(address: str) -> None:
    assert nearness(address) == ""


URLS = (
    "https://user:geheim@host/x", "https://geheim@host/x", "https://host/x?sig=geheim", "https://host/x#geheim",
    "https:/user:geheim@host/x", "//user:geheim@host/x", "https://user:geheim@ho\u2100st/x", "https://u:geheim@[::1/x",
    "https://u:geheim@host:99999/x", "https://u:geheim@ho st/x", "https://u:geheim@h\\x", "HTTPS://u:geheim@host/x",
)  # fmt: skip


@pytest.mark.parametrize("url", URLS)
def test_no_secret_of_a_url_is_shown(url: str) -> None:
    assert "geheim" not in shown(url)
    try:
        split(url)
    except ValueError as e:
        assert "geheim" not in str(e)  # noqa: PT017
    got = within(10, lambda: Client(tries=1, timeout=1, clock=Hasty()).request("GET", url))
    assert "geheim" not in str(got)
    assert isinstance(got, HttpError), repr(got)
