"""A server of files on 127.0.0.1 that costs little: the Hub's and S3's answers for one model, sent by sendfile.

python -m bench.sender DIRECTORY --delay 0.03 --rate 200

It prints its URL. ``hf://org/model`` with HF_ENDPOINT=URL, ``s3://bucket/model`` with AWS_ENDPOINT_URL=URL. Each answer
comes ``--delay`` seconds after its request, and all of them together at ``--rate`` MB/s, as if there were one link. The
requests that readers make are answered, and no others: nothing is signed, nothing is checked.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = 1 << 20
"""Bytes from which the Hub calls a file an LFS file."""


_STEP = 256 << 10
"""Bytes that are sent at a time where there is a rate."""
_BURST = 0.05
"""Seconds that a link may have been idle and make up for."""


@contextmanager
def sending(directory: Path, delay: float, rate: float = 0) -> Iterator[str]:
    """The server in a process of its own; gives its URL. ``rate`` is in MB/s, 0 is as fast as it can."""
    command = [sys.executable, "-m", "bench.sender", str(directory), "--delay", str(delay), "--rate", str(rate)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process.stdout.readline().strip() if process.stdout else ""
        finally:
            process.kill()


class Link:
    """What all connections share."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._free = 0.0
        self._lock = threading.Lock()

    def wait(self, nbytes: int) -> None:
        """Until so many bytes are through."""
        with self._lock:
            self._free = max(self._free, time.monotonic() - _BURST) + nbytes / self.rate
            free = self._free
        time.sleep(max(0.0, free - time.monotonic()))


class Sender:
    """What is sent."""

    def __init__(self, directory: Path, delay: float, elsewhere: str, link: Link | None = None) -> None:
        self.directory = directory
        self.delay = delay
        self.link = link
        self.elsewhere = elsewhere
        """Where the Hub sends readers to: another server, as far as they know."""
        self.sizes = {
            p.relative_to(directory).as_posix(): p.stat().st_size for p in directory.rglob("*") if p.is_file()
        }
        self.tags = {name: self._tag(name) for name in self.sizes}

    def _tag(self, name: str) -> str:
        """Git's blob id of a small file; of a large one, what looks like a checksum."""
        if self.sizes[name] >= LARGE:
            return hashlib.sha256(f"{name} {self.sizes[name]}".encode()).hexdigest()
        data = (self.directory / name).read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()

    def listen(self, server: socket.socket) -> None:
        """Take connections until the process is killed."""
        while True:
            connection, _ = server.accept()
            threading.Thread(target=self.serve, args=(connection,), daemon=True).start()

    def serve(self, connection: socket.socket) -> None:
        """Answer the requests of a connection."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection, connection.makefile("rb") as stream:
            while line := stream.readline():
                method, target, _ = line.decode("latin-1").split(" ", 2)
                headers = {}
                while (header := stream.readline().strip()) != b"":
                    key, _, value = header.decode("latin-1").partition(":")
                    headers[key.lower()] = value.strip()
                time.sleep(self.delay)
                try:
                    self._answer(connection, method, target, headers)
                except (BrokenPipeError, ConnectionResetError):
                    return

    def _answer(self, connection: socket.socket, method: str, target: str, headers: dict[str, str]) -> None:
        url = urlsplit(target)
        parts = unquote(url.path).strip("/").split("/")
        if parts[:4] == ["api", "models", "org", "model"]:
            kind = parts[4] if len(parts) > 4 else "revision"
            said = json.dumps(self._tree() if kind == "tree" else self._info()).encode()
            self._send(connection, method, "200 OK", {"Content-Type": "application/json"}, said)
        elif parts[:3] == ["org", "model", "resolve"]:
            self._resolve(connection, method, "/".join(parts[4:]), headers)
        elif len(parts) == 1 and method == "GET":
            data = self._listing(parse_qs(url.query).get("prefix", [""])[0])
            self._send(connection, method, "200 OK", {"Content-Type": "application/xml"}, data)
        else:  # bucket/model/NAME, or cdn/model/NAME
            self._file(connection, method, "/".join(parts[2:]), headers, {})

    def _info(self) -> dict[str, object]:
        siblings = [{"rfilename": name} for name in self.sizes]
        return {"id": "org/model", "sha": COMMIT, "private": False, "gated": False, "siblings": siblings}

    def _tree(self) -> list[dict[str, object]]:
        found: list[dict[str, object]] = []
        for name, size in self.sizes.items():
            entry: dict[str, object] = {"type": "file", "path": name, "size": size, "oid": self.tags[name][:40]}
            if size >= LARGE:
                entry["lfs"] = {"oid": self.tags[name], "size": size, "pointerSize": 135}
            found.append(entry)
        return found

    def _listing(self, prefix: str) -> bytes:
        found = "".join(
            f'<Contents><Key>{escape(f"model/{name}")}</Key><Size>{size}</Size><ETag>"{self.tags[name]}"</ETag>'
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for name, size in sorted(self.sizes.items())
            if f"model/{name}".startswith(prefix)
        )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{found}</ListBucketResult>".encode()

    def _resolve(self, connection: socket.socket, method: str, name: str, headers: dict[str, str]) -> None:
        if name not in self.sizes:
            extra = {"X-Error-Code": "EntryNotFound"}
            self._send(connection, method, "404 Not Found", extra, b"")
            return
        extra = {"X-Repo-Commit": COMMIT}
        if self.sizes[name] < LARGE:
            self._file(connection, method, name, headers, extra)
            return
        extra |= {"X-Linked-Size": str(self.sizes[name]), "X-Linked-ETag": f'"{self.tags[name]}"'}
        extra["Location"] = f"{self.elsewhere}/cdn/model/{name}"
        self._send(connection, method, "302 Found", extra, b"")

    def _file(
        self, connection: socket.socket, method: str, name: str, headers: dict[str, str], extra: dict[str, str]
    ) -> None:
        size = self.sizes.get(name)
        if size is None:
            self._send(connection, method, "404 Not Found", {}, b"")
            return
        start, stop, status = 0, size, "200 OK"
        extra = {**extra, "ETag": f'"{self.tags[name]}"', "Accept-Ranges": "bytes"}
        if "range" in headers:
            first, _, last = headers["range"].removeprefix("bytes=").partition("-")
            start, stop = int(first), min(size, int(last or size) + 1)
            status, extra["Content-Range"] = "206 Partial Content", f"bytes {start}-{stop - 1}/{size}"
        self._head(connection, status, extra, stop - start)
        if method == "HEAD":
            return
        with (self.directory / name).open("rb") as f:
            while start < stop:
                step = min(_STEP, stop - start) if self.link else stop - start
                if self.link:
                    self.link.wait(step)
                start += os.sendfile(connection.fileno(), f.fileno(), start, step)

    def _send(self, connection: socket.socket, method: str, status: str, headers: dict[str, str], body: bytes) -> None:
        self._head(connection, status, headers, len(body))
        if method != "HEAD":
            connection.sendall(body)

    @staticmethod
    def _head(connection: socket.socket, status: str, headers: dict[str, str], length: int) -> None:
        lines = [f"HTTP/1.1 {status}", *(f"{k}: {v}" for k, v in headers.items()), f"Content-Length: {length}", "", ""]
        connection.sendall("\r\n".join(lines).encode("latin-1"))


def main() -> None:
    """Serve until the process is killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--delay", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--rate", type=float, default=0.0, metavar="MB/S")
    args = parser.parse_args()
    listening = [socket.create_server(("127.0.0.1", 0), backlog=128) for _ in range(2)]
    url, elsewhere = (f"http://127.0.0.1:{s.getsockname()[1]}" for s in listening)
    link = Link(args.rate * 1e6) if args.rate else None
    sender = Sender(args.directory, args.delay, elsewhere, link)
    threads = [threading.Thread(target=sender.listen, args=(s,)) for s in listening]
    for thread in threads:
        thread.start()
    print(url, flush=True)


if __name__ == "__main__":
    main()
