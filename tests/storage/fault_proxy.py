"""A proxy between a client and a server that works, which spoils answers; and a file whose truth is known.

The proxy is a server of its own on 127.0.0.1 (or ::1): it passes each request on, takes the whole right answer, and
sends what a fault makes of it: the pieces that go over the wire, status line and all. The connection ends behind them.
"""

from __future__ import annotations

import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from typing import NamedTuple

from ckpttool.errors import CkptError
from ckpttool.storage.http import Client, HttpError, using
from ckpttool.storage.network import Clock
from ckpttool.storage.place import open_file, parse_place


class Right(NamedTuple):
    """The answer of the server."""

    status: int
    headers: dict[str, str]
    body: bytes
    method: str
    draw: random.Random
    is_conditional: bool = False
    """Whether the client said which file it means: only then can it see that this is another one."""

    def pieces(self, *, body: bytes | None = None, version: str = "1.1", **changed: str) -> list[bytes]:
        """Its bytes, with another body or headers (``Content_Range=""`` drops one)."""
        names = {k.replace("_", "-").lower(): v for k, v in changed.items()}
        headers = {**{k.lower(): v for k, v in self.headers.items()}, **names}
        lines = "".join(f"{k}: {v}\r\n" for k, v in headers.items() if v)
        data = self.body if body is None else body
        status = names.pop("status", str(self.status))
        return [
            f"HTTP/{version} {status} said\r\n{lines}\r\n".encode("latin-1"),
            data if self.method != "HEAD" else b"",
        ]


Spoil = Callable[[Right], Iterator[bytes] | list[bytes]]


def _cut(right: Right) -> list[bytes]:
    head, body = right.pieces()
    whole = head + body
    return [whole[: right.draw.randrange(len(whole))]]


def _drip(right: Right) -> Iterator[bytes]:
    for byte in b"".join(right.pieces())[:400]:
        yield bytes([byte])
        time.sleep(0.002)


def _endless(right: Right) -> Iterator[bytes]:
    yield right.pieces()[0][:-2]
    for _ in range(20_000):
        yield b"X-Y: " + b"z" * 200 + b"\r\n"


def _shifted(right: Right) -> list[bytes]:
    """Another range, of the same length, which says what it is."""
    m = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", right.headers.get("Content-Range", "bytes 0-0/1"))
    start, stop, total = map(int, m.groups()) if m else (0, 0, 1)
    by = right.draw.choice((-1, 1, 512))
    said = f"bytes {max(0, start + by)}-{stop + by}/{total}"
    return right.pieces(body=right.body[::-1], Content_Range=said)


def _chunked(right: Right) -> list[bytes]:
    body, out = right.body, b""
    while body:
        n = right.draw.randint(1, len(body))
        out, body = out + b"%x\r\n%s\r\n" % (n, body[:n]), body[n:]
    head = right.pieces(Content_Length="", Transfer_Encoding="chunked")[0]
    return [head, out + b"0\r\n\r\n" if right.method != "HEAD" else b""]


def _cut_chunks(right: Right) -> list[bytes]:
    head, body = _chunked(right)
    return [head, body[: right.draw.randrange(len(body) + 1)]]


SPOILS: dict[str, Spoil] = {
    "cut": _cut,
    "cut chunks": _cut_chunks,
    "nothing": lambda _: [],
    "another range": _shifted,
    "no range": lambda r: r.pieces(Content_Range=""),
    # (A 200 for the first byte alone says that there is one: nobody can know better.)
    "200 for 206": lambda r: r.pieces(status="206" if len(r.body) == 1 else "200", Content_Range=""),
    "longer": lambda r: r.pieces(body=r.body + b"!", Content_Length=str(int(r.headers.get("Content-Length", 0)) + 1)),
    "behind": lambda r: r.pieces(body=r.body + b"HTTP/1.1 206 ok\r\nContent-Length: 0\r\n\r\n"),
    "changed": lambda r: r.pieces(body=r.body[::-1], ETag='"another"') if r.is_conditional else r.pieces(),
    "no tag": lambda r: r.pieces(body=r.body[::-1], ETag="") if r.is_conditional else r.pieces(),
    "another total": lambda r: r.pieces(
        body=r.body[::-1], Content_Range=r.headers.get("Content-Range", "").rpartition("/")[0] + "/99999999"
    ),
    "1.0": lambda r: r.pieces(version="1.0", Connection=""),
    "0.9": lambda r: [r.body],
    "gzip": lambda r: r.pieces(body=r.body[::-1], Content_Encoding="gzip"),
    "gzip in chunks": lambda r: r.pieces(body=r.body[::-1], Content_Length="", Transfer_Encoding="gzip, chunked"),
    "chunked": _chunked,
    "garbage": lambda r: [b"HTTP/1.1 206 \xff\r\n\xff\xfe: \0\r\nno colon\r\n", *r.pieces()],
    "folded": lambda r: [r.pieces()[0][:-2] + b"X: a\r\n b\r\n\r\n", r.body if r.method != "HEAD" else b""],
    "continue": lambda r: [b"HTTP/1.1 100 Continue\r\n\r\n", *r.pieces()],
    "early hints": lambda r: [b"HTTP/1.1 103 Hints\r\nLink: </a>\r\n\r\n", *r.pieces()],
    "drip": _drip,
    "endless headers": _endless,
    "busy": lambda _: [b"HTTP/1.1 503 busy\r\nContent-Length: 0\r\nRetry-After: 1\r\n\r\n"],
    "to the metadata": lambda _: [b"HTTP/1.1 302 x\r\nLocation: http://169.254.169.254/\r\nContent-Length: 0\r\n\r\n"],
    "to a file": lambda _: [b"HTTP/1.1 307 x\r\nLocation: file:///etc/passwd\r\nContent-Length: 0\r\n\r\n"],
    "in a circle": lambda _: [b"HTTP/1.1 302 x\r\nLocation: ?again\r\nContent-Length: 0\r\n\r\n"],
}  # fmt: skip
HARMLESS = {"chunked", "continue", "1.0", "folded"}
"""What a client has to take: the bytes are the right ones."""


class FaultProxy:
    """``choose`` names the fault of the next request; None for none."""

    def __init__(self, to: tuple[str, int], choose: Callable[[], str | None], seed: int, *, v6: bool = False) -> None:
        self.choose, self._to, self._draw = choose, to, random.Random(seed)  # noqa: S311 - not for secrets
        self.heard: list[Mapping[str, str]] = []
        family = socket.AF_INET6 if v6 else socket.AF_INET
        self._socket = socket.create_server(("::1" if v6 else "127.0.0.1", 0), family=family)
        self.port = int(self._socket.getsockname()[1])
        self.url = f"http://{'[::1]' if v6 else '127.0.0.1'}:{self.port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                conn, _ = self._socket.accept()
                threading.Thread(target=self._serve, args=(conn,), daemon=True).start()

    def _serve(self, conn: socket.socket) -> None:
        with conn, suppress(OSError):
            conn.settimeout(20)
            conn.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                head = b""
                while b"\r\n\r\n" not in head:
                    if not (more := conn.recv(65536)):
                        return
                    head += more
                head, _, body = head.partition(b"\r\n\r\n")
                first, *lines = head.decode("latin-1").split("\r\n")
                method, path, _ = first.split(" ")
                headers = {k: v.strip() for k, _, v in (line.partition(":") for line in lines)}
                while len(body) < int(headers.get("Content-Length", 0)):
                    body += conn.recv(65536)
                self.heard.append({k.lower(): v for k, v in headers.items()})
                right, fault = self._ask(method, path, headers, body), self.choose()
                for piece in SPOILS[fault](right) if fault else right.pieces():
                    conn.sendall(piece)
                if fault:
                    return

    def _ask(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Right:
        conn = HTTPConnection(*self._to, timeout=20)
        conn.request(method, path, body or None, headers)
        answer = conn.getresponse()
        dropped = ("transfer-encoding", "connection", "date")
        said = {k.title(): v for k, v in answer.getheaders() if k.lower() not in dropped}
        data = answer.read()
        conn.close()
        if method != "HEAD":
            said["Content-Length"] = str(len(data))
        is_conditional = "If-Match" in headers
        return Right(answer.status, said, data, method, self._draw, is_conditional)


@contextmanager
def fault_proxy(
    to: str, choose: Callable[[], str | None] = lambda: None, seed: int = 0, *, v6: bool = False
) -> Iterator[FaultProxy]:
    """A proxy before the server at a URL."""
    host, _, port = to.partition("://")[2].rpartition(":")
    proxy = FaultProxy((host, int(port)), choose, seed, v6=v6)
    try:
        yield proxy
    finally:
        proxy.close()


def random_choice(seed: int, rate: float) -> Callable[[], str | None]:
    """``choose`` for a proxy: any fault, at this share of the requests."""
    draw = random.Random(seed)  # noqa: S311 - not for secrets
    return lambda: draw.choice(list(SPOILS)) if draw.random() < rate else None


def read_place(text: str, data: bytes, forget: Callable[[], object], seed: int, seconds: float) -> tuple[int, int]:
    """Random reads of the file at a place, each within ``seconds``: how many were right, and how many were errors.

    Raises:
        AssertionError: bytes are others than ``data`` has there, or a read took too long.
    """
    draw = random.Random(seed)  # noqa: S311 - not for secrets
    right = errors = 0
    for i in range(6):
        start = draw.randrange(len(data) - 1)
        stop = draw.randint(start + 1, len(data))
        began = time.monotonic()
        try:
            with using(Client(clock=Quick(), timeout=0.5, grace=0.2, tries=5)) as client:
                try:
                    forget()
                    with open_file(parse_place(text)) as file:
                        got = file.pread(stop - start, start)
                finally:
                    client.stop()
            assert got == data[start:stop], (text, seed, i)
            right += 1
        except (HttpError, CkptError, OSError):
            errors += 1
        assert time.monotonic() - began < seconds, (text, seed, i)
    return right, errors


class Quick(Clock):
    """Waits take no time; they count."""

    def __init__(self) -> None:
        self.waited = 0.0

    def now(self) -> float:
        return time.monotonic() + self.waited

    def sleep(self, seconds: float, stopped: threading.Event) -> None:
        self.waited += seconds
