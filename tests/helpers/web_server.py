"""A small web server on 127.0.0.1: ranges, ETags, any answer on demand, and a record of every request.

::

    with web_server({"model/config.json": b"{}"}) as server:
        server.on("/model/config.json", status(503), times=2)       # the next two requests of it; "" is any
        ...
        server.asked[-1].headers["range"], server.asked[-1].status
        server.connections                                          # how many there were

A fault is a function of the request and its right answer: it gives another answer, or None to break the connection off.
"""

from __future__ import annotations

import hashlib
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

MODIFIED = formatdate(1_700_000_000, usegmt=True)


class Asked(NamedTuple):
    """A request that came."""

    method: str
    path: str
    """As it came, without the query."""
    query: str
    headers: dict[str, str]
    """By names in lower case."""
    body: bytes
    status: int
    """Of the answer; 0 where there was none."""


@dataclass(frozen=True)
class Reply:
    """An answer, with exactly these headers and bytes."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes | Iterable[bytes] = b""
    then: str = "keep"
    """What becomes of the connection: "keep", or "close"."""

    def but(
        self,
        changed: Mapping[str, str] | None = None,
        *,
        status: int | None = None,
        body: bytes | Iterable[bytes] | None = None,
        then: str | None = None,
        **headers: str,
    ) -> Reply:
        """The same with other headers (``Content_Range="..."``; "" drops one)."""
        names = {
            k.replace("_", "-").lower(): (k.replace("_", "-"), v) for k, v in {**(changed or {}), **headers}.items()
        }
        kept = [(k, v) for k, v in self.headers if k.lower() not in names]
        return Reply(
            self.status if status is None else status,
            kept + [(k, v) for k, v in names.values() if v],
            self.body if body is None else body,
            then or self.then,
        )

    @property
    def data(self) -> bytes:
        """The body, where it is in one piece."""
        assert isinstance(self.body, bytes)
        return self.body


Fault = Callable[[Asked, Reply], Reply | None]


def status(code: int, body: bytes = b"no", **headers: str) -> Fault:
    """Another status."""
    said = {k.replace("_", "-"): v for k, v in headers.items()}
    return lambda *_: Reply(code, [("Content-Length", str(len(body))), *said.items()], body)


def redirect(to: str, code: int = 302) -> Fault:
    return status(code, b"", Location=to)


def reset(*_: object) -> None:
    """The connection is reset."""


def cut(n: int) -> Fault:
    """Only the first bytes of the body come, and then the end."""
    return lambda _, reply: replace(reply, body=reply.data[:n], then="close")


def raw(data: bytes | Iterable[bytes]) -> Fault:
    """These bytes are all that comes, status line and all."""
    return lambda *_: Reply(0, [], data, "close")


@dataclass
class WebServer:
    """What the server has, and what came."""

    files: dict[str, bytes]
    asked: list[Asked] = field(default_factory=list)
    connections: int = 0
    tags: bool = True
    """Whether files have ETags."""
    ranges: bool = True
    url: str = ""
    faults: list[tuple[str, Fault, int]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def on(self, path: str, fault: Fault, times: int = 1 << 30) -> None:
        """What becomes of the next requests of a path; of all paths where it is ""."""
        self.faults.append((path, fault, times))

    def clear(self) -> None:
        """No faults, nothing asked."""
        self.asked.clear()
        self.faults.clear()
        self.connections = 0
        self.tags = self.ranges = True

    def count(self, method: str = "GET") -> int:
        return sum(a.method == method for a in self.asked)

    def fault_for(self, path: str) -> Fault | None:
        with self.lock:
            for i, (where, fault, times) in enumerate(self.faults):
                if where in ("", path) and times:
                    self.faults[i] = where, fault, times - 1
                    return fault
        return None

    def right(self, asked: Asked) -> Reply:
        """The answer of a server that works."""
        name = unquote(asked.path).lstrip("/")
        if asked.method == "PUT":
            self.files[name] = asked.body
            return Reply(201, [("Content-Length", "0")])
        if asked.method == "POST":
            return Reply(200, [("Content-Length", str(len(asked.body)))], asked.body)
        if name not in self.files:
            return Reply(404, [("Content-Length", "9")], b"not found")
        data = self.files[name]
        tag = f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'
        headers = [("Last-Modified", MODIFIED)]
        headers += [("Accept-Ranges", "bytes")] if self.ranges else []
        headers += [("ETag", tag)] if self.tags else []
        if asked.headers.get("if-match", tag) != tag and self.tags:
            return Reply(412, [("Content-Length", "0"), *headers])
        if asked.headers.get("range") is None or not self.ranges:
            return Reply(200, [("Content-Length", str(len(data))), *headers], data)
        first, _, last = asked.headers["range"].removeprefix("bytes=").partition("-")
        start, stop = int(first), min(int(last) + 1, len(data))
        if start >= stop:
            return Reply(416, [("Content-Length", "0"), ("Content-Range", f"bytes */{len(data)}"), *headers])
        where = f"bytes {start}-{stop - 1}/{len(data)}"
        return Reply(206, [("Content-Length", str(stop - start)), ("Content-Range", where), *headers], data[start:stop])


def _handler(server: WebServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with server.lock:
                server.connections += 1

        def answer(self) -> None:
            path, _, query = self.path.partition("?")
            headers = {k.lower(): v for k, v in self.headers.items()}
            body = self.rfile.read(int(headers.get("content-length", 0))) if self.command in ("PUT", "POST") else b""
            asked = Asked(self.command, path, query, headers, body, 0)
            fault = server.fault_for(path)
            right = server.right(asked)
            with server.lock:
                number = len(server.asked)
                server.asked.append(asked)
            reply = fault(asked, right) if fault else right
            if number < len(server.asked):
                server.asked[number] = asked._replace(status=reply.status if reply else 0)
            if reply is None:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.close_connection = True
                return
            head = "".join(f"{k}: {v}\r\n" for k, v in reply.headers)
            if reply.status:
                self.wfile.write(f"HTTP/1.1 {reply.status} said\r\n{head}\r\n".encode("latin-1"))
            if self.command != "HEAD" or not reply.status:
                for piece in [reply.body] if isinstance(reply.body, bytes) else reply.body:
                    self.wfile.write(piece)
            self.close_connection = self.close_connection or reply.then == "close"

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_CONNECT = answer  # noqa: N815

        def handle(self) -> None:
            with suppress(OSError):
                super().handle()

        def log_message(self, *_: object) -> None:
            pass

        def finish(self) -> None:
            with suppress(OSError):
                super().finish()

    return Handler


class _Server(ThreadingHTTPServer):
    request_queue_size = 128

    def handle_error(self, *_: object) -> None:
        """A client that goes is nothing to print."""

    def shutdown_request(self, request: object) -> None:
        """Close at once: a reset is a reset, and not the end of a body."""
        assert isinstance(request, socket.socket)
        request.close()


@contextmanager
def web_server(files: Mapping[str, bytes] | Path, tls: ssl.SSLContext | None = None) -> Iterator[WebServer]:
    """The files, by names without a leading slash, or those of a directory."""
    if isinstance(files, Path):
        files = {p.relative_to(files).as_posix(): p.read_bytes() for p in files.rglob("*") if p.is_file()}
    served = WebServer(dict(files))
    server = _Server(("127.0.0.1", 0), _handler(served))
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    served.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.005}, daemon=True)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
