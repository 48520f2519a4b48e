"""A server on 127.0.0.1 that answers with whatever bytes a test makes up."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from ckpttool.storage.http import Client, using
from ckpttool.storage.network import Clock


class Asked(NamedTuple):
    """A request."""

    method: str
    path: str
    """With its query."""
    headers: dict[str, str]
    """By names in lower case."""

    @property
    def span(self) -> tuple[int, int] | None:
        """First and last byte of a range."""
        first, _, last = self.headers.get("range", "").removeprefix("bytes=").partition("-")
        return (int(first), int(last)) if last else None


Say = Callable[[Asked], Iterable[bytes]]
"""The bytes that answer a request: status line, headers, and whatever follows. The connection ends behind them."""


class Liar:
    """``say`` may be changed at any time."""

    def __init__(self, say: Say) -> None:
        self.say = say
        self.asked: list[Asked] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._socket.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stop, in the middle of endless answers, too."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for connection in list(self._open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                self._open.add(connection)
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            head = b""
            while b"\r\n\r\n" not in head:
                if not (more := connection.recv(65536)):
                    return
                head += more
            first, *rest = head.split(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")
            method, path, _ = first.split(" ")
            asked = Asked(method, path, {k.lower(): v.strip() for k, _, v in (r.partition(":") for r in rest)})
            self.asked.append(asked)
            for piece in self.say(asked):
                connection.sendall(piece)


@contextmanager
def liar(say: Say) -> Iterator[Liar]:
    """A server that says this."""
    server = Liar(say)
    try:
        yield server
    finally:
        server.close()


def answer(status: str, body: bytes = b"", *headers: str) -> list[bytes]:
    """An answer that is right: ``status`` is code and words, each header a line."""
    lines = [f"HTTP/1.1 {status}", *headers, f"Content-Length: {len(body)}", "Connection: close"]
    return ["\r\n".join(lines).encode("latin-1") + b"\r\n\r\n", body]


def endless(head: bytes, piece: bytes) -> Say:
    """A beginning, and then the same for ever."""

    def say(_: Asked) -> Iterator[bytes]:
        yield head
        while True:
            yield piece * (1 + 65536 // len(piece))

    return say


class Hasty(Clock):
    """Waiting takes no time, and is remembered."""

    def __init__(self) -> None:
        self.waited = 0.0

    def now(self) -> float:
        return super().now() + self.waited

    def sleep(self, seconds: float, stopped: threading.Event) -> None:
        self.waited += seconds


@contextmanager
def hasty(seconds: int = 30) -> Iterator[Client]:
    """Let this process wait for no server; TimeoutError when what it does takes too long nevertheless."""

    def late(*_: object) -> None:
        raise TimeoutError(f"it did not end in {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    client = Client(tries=3, patience=5, timeout=2, grace=2, clock=Hasty())
    try:
        with using(client):
            yield client
    finally:
        client.stop()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
