"""An S3 server in a process of its own, where one request of a run goes wrong and a reader looks at every moment.

The reader begins where readers begin: at ``config.json`` or an index. Where one of them is, all that it speaks of must
be there and right, before each request as after the last one.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
from collections import Counter
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from tests.helpers.s3_server import Request, S3Server

SRC, DST = "source", "target"
"""The buckets."""
MARKERS = ".ckpttool-"
"""How names begin that a run keeps for itself in DST until it ends."""

_RANDOM = re.compile("[0-9a-f]{32}")
"""What names a run."""
LASTING = {"gone": "reset", "gone after": "reset", "denied": "403"}
"""What each request meets after the one that began it."""

Objects = dict[str, str]
"""Key -> SHA-256."""


class Call(NamedTuple):
    """A request, as it is in every run; ``nth`` counts those that are alike."""

    operation: str
    key: str
    detail: str
    nth: int

    @property
    def changes(self) -> bool:
        """It may change what is stored."""
        return not self.operation.startswith(("Get", "Head", "List"))

    def __str__(self) -> str:
        return " ".join(w for w in (self.operation, self.key, self.detail, f"({self.nth})") if w)


class Plan(NamedTuple):
    """One fault at one request."""

    fault: str = ""
    at: Call | None = None
    pid: int = 0
    """The group of processes that a fault may kill."""


class Seen(NamedTuple):
    """What there is after a run."""

    calls: list[Call]
    struck: bool
    objects: Objects
    uploads: list[str]
    wrong: list[str]
    """What a reader found in DST that it must not find."""


def is_readable(now: Objects, whole: Objects) -> bool:
    """Whether a reader finds nothing, or all that the file speaks of with which it begins.

    With ``config.json`` all of DST is there; with an index, all but what readers may begin with.
    """
    if any(k.startswith("out/") and k.endswith("/config.json") for k in now):
        return now == whole
    if any(k.endswith(".index.json") for k in now):
        return all(now.get(k) == v for k, v in whole.items() if not k.endswith((".json", "/README.md")))
    return all(now.get(k) == v for k, v in whole.items() if not k.startswith("out/"))


def visible(objects: Objects) -> Objects:
    """Without what a run keeps for itself."""
    return {k: v for k, v in objects.items() if f"/{MARKERS}" not in k}


class _Service:
    """In the process of the server: what it is told through the pipe."""

    def __init__(self) -> None:
        self.server = S3Server([SRC, DST])
        self.server.page = 20  # listings have pages
        self.server.slowness = 0.05
        self.server.outage = 0.02
        self.sources: dict[str, bytes] = {}
        self.allowed: list[Objects] = []
        """DST as it may be when there is an entry. Empty: not known yet."""
        self.before: Objects = {}
        self.calls: list[Call] = []
        self.struck = False
        self.wrong: list[str] = []

    def environment(self) -> dict[str, str]:
        return self.server.environment()

    def put(self, key: str, data: bytes) -> None:
        """An object of the sources."""
        self.sources[key] = data
        self.server.put(SRC, key, data)

    def let(self, min_part: int) -> None:
        """The smallest part that an upload may have."""
        self.server.min_part = min_part

    def fresh(self, old: dict[str, bytes]) -> None:
        """DST as it is at the start."""
        self.server.clear()
        self.server.uploads.clear()
        self.server.buckets[DST].clear()
        for key, data in self.sources.items():
            if self.server.get(SRC, key) != data:
                self.server.put(SRC, key, data)
        for key, data in old.items():
            self.server.put(DST, key, data)
        self.before = visible(self.objects())

    def allow(self, golden: list[Objects]) -> None:
        """DST may be one of these when a reader finds an entry, or what it was at the start; []: anything."""
        self.allowed = [*golden, self.before] if golden else []

    def begin(self, plan: Plan) -> None:
        """The next requests are those of a run."""
        server = self.server
        server.clear()
        self.calls, self.struck, self.wrong = [], False, []
        seen: Counter[tuple[str, str, str]] = Counter()

        def choose(_: int, request: Request) -> str | None:
            self.look()
            named = _named(request)
            seen[named] += 1
            self.calls.append(call := Call(*named, seen[named]))
            if self.struck:
                return LASTING.get(plan.fault)
            if call != plan.at:
                return None
            self.struck = True
            if plan.fault == "changed":
                self.change()
                return None
            return {"gone": "reset", "gone after": "lost", "denied": "403"}.get(plan.fault, plan.fault)

        server.choose = choose
        server.kill = lambda: os.killpg(plan.pid, signal.SIGKILL) if plan.pid else None

    def change(self) -> None:
        """The last element of every file of weights becomes another one."""
        for key, data in self.sources.items():
            if key.endswith(".safetensors"):
                self.server.put(SRC, key, data[:-1] + bytes([data[-1] ^ 1]))

    def look(self) -> None:
        """As a reader."""
        now = visible(self.objects())
        if self.allowed and not any(is_readable(now, whole) for whole in self.allowed):
            last = self.calls[-1] if self.calls else "the start"
            self.wrong.append(f"after {last} a reader finds only {sorted(now)}")

    def objects(self) -> Objects:
        """All that is in DST."""
        return {key: hashlib.sha256(stored.data).hexdigest() for key, stored in self.server.buckets[DST].items()}

    def end(self) -> Seen:
        """What there is now."""
        with self.server.lock:
            self.look()
            uploads = [u.key for u in self.server.uploads.values()]
            return Seen(self.calls, self.struck, self.objects(), uploads, self.wrong)


def _named(request: Request) -> tuple[str, str, str]:
    q = request.query
    detail = q.get("partNumber") or request.headers.get("range") or q.get("delimiter", "")
    return request.operation, _RANDOM.sub("*", request.key or q.get("prefix", "")), detail


class Store:
    """The server, from outside: what ``_Service`` does, over a pipe."""

    def __init__(self) -> None:
        self._pipe, theirs = Pipe()
        self._pid = os.fork()
        if not self._pid:
            self._pipe.close()
            _serve(theirs)
        theirs.close()

    def __getattr__(self, name: str) -> Any:
        def ask(*arguments: Any) -> Any:
            self._pipe.send((name, arguments))
            answer = self._pipe.recv()
            if isinstance(answer, Exception):
                raise answer
            return answer

        return ask

    def close(self) -> None:
        self._pipe.close()
        os.waitpid(self._pid, 0)


def _serve(pipe: Connection) -> None:
    service = _Service()
    try:
        while True:
            name, arguments = pipe.recv()
            try:
                pipe.send(getattr(service, name)(*arguments))
            except Exception as e:  # noqa: BLE001 - whoever asked gets it
                pipe.send(e)
    except EOFError:
        pass
    finally:
        os._exit(0)
