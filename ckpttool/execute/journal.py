"""A journal of the finished parts of a run, in a file beside the output, so that an interrupted run can continue.

The first line identifies the plan; each further line lists parts whose bytes were made durable before the line was
written, with the checksums of tensors that they completed, and a checksum (CRC-32) of the line itself, because what it
lists is not written again:

    {"journal": 2, "plan": "<digest>", "parts": 1234, "by": {"host": ..., "pid": ..., "since": ...}}
    {"done": [[0, 17], [19, 20]], "sums": {"3.0": "<hex>"}} 1c291ca3
    {"done": [], "by": {...}} 2b01a9f0                                             whoever resumes it adds itself
    {"done": [[20, 21]], "edges": [[0, 65536, "<base64>"]]} 5d11f2ab

``edges`` are bytes that belong to the parts and are not in the files yet: [output, offset, bytes]. They lie on pages
that another machine writes, too, and whoever finishes the run writes them.

A line that a crash cut short is ignored, with everything behind it. If that is the first line, nothing had begun.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from binascii import a2b_base64, b2a_base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpttool.errors import ConflictError
from ckpttool.execute.files import write_error
from ckpttool.storage import system

VERSION = 2
"""Changes with the file's form and with the way a plan is cut into parts."""


Edge = tuple[int, int, bytes]
"""(output, offset, bytes) of a finished part that are not in the file yet."""


@dataclass(slots=True)
class Finished:
    """The finished work that a journal records."""

    parts: set[int] = field(default_factory=set)
    sums: dict[str, str] = field(default_factory=dict)
    edges: list[Edge] = field(default_factory=list)


class Journal:
    """An open journal. ``begin`` comes first, or ``load`` and ``sign``; then ``append`` for each group of parts."""

    def __init__(self, fd: int, path: str) -> None:
        self._fd = fd
        self._path = path

    def begin(self, digest: str, parts: int) -> Finished:
        """Start over: nothing is finished."""
        line = json.dumps({"journal": VERSION, "plan": digest, "parts": parts, "by": _by()})
        try:
            os.ftruncate(self._fd, 0)
            self._write(line)
        except OSError as e:
            raise write_error(e, self._path, 0, 0) from e
        return Finished()

    def load(self, digest: str, parts: int) -> Finished:
        """What was finished. Raises ConflictError when the journal belongs to another plan, OutputError when what is
        torn cannot be removed.
        """
        size = os.fstat(self._fd).st_size
        data = os.pread(self._fd, size, 0)
        lines = data.split(b"\n")[:-1]  # what follows the last newline is a torn line
        if not lines or (len(lines) == 1 and b"\0" in lines[0]):  # a loss of power leaves zeros for what was not synced
            return self.begin(digest, parts)
        head = _parse(lines[0])
        if head.get("journal") != VERSION or not isinstance(head.get("plan"), str):
            raise ConflictError(
                "cannot continue the interrupted run: its journal is unreadable",
                where=self._path,
                hint="use --force to start over",
            )
        if head["plan"] != digest or head.get("parts") != parts:
            raise ConflictError(
                "the interrupted run had a different plan: SRC, the options or the version of ckpttool changed",
                where=f"{self._path}: plan {str(head['plan'])[:12]}, now {digest[:12]}",
                hint="repeat the command of the interrupted run with --resume, or use --force to start over",
            )
        found, good = _read(lines, parts)
        if good != size:
            try:
                os.ftruncate(self._fd, good)
            except OSError as e:
                raise write_error(e, self._path, 0, 0) from e
        return found

    def sign(self) -> None:
        """Say who resumes what another process has begun. Raises OutputError."""
        self._append({"done": [], "by": _by()})

    def append(self, parts: Iterable[int], sums: Mapping[str, str], edges: Sequence[Edge] = ()) -> None:
        """Record parts whose bytes are durable, or among ``edges``, and make the record durable. Raises OutputError."""
        entry: dict[str, object] = {"done": ranges(parts)}
        if sums:
            entry["sums"] = sums
        if edges:
            entry["edges"] = [(file, at, b2a_base64(data, newline=False).decode()) for file, at, data in edges]
        self._append(entry)

    def _append(self, entry: Mapping[str, object]) -> None:
        try:
            self._write(sealed(json.dumps(entry, separators=(",", ":"))))
        except OSError as e:
            raise write_error(e, self._path, 0, 0) from e

    def _write(self, line: str) -> None:
        data = memoryview(line.encode() + b"\n")
        at = os.fstat(self._fd).st_size
        while data:
            n = os.pwrite(self._fd, data, at)
            at, data = at + n, data[n:]
        system.sync(self._fd, metadata=False)


def read(data: bytes, digest: str, parts: int) -> Finished:
    """What a journal says that another process writes; nothing where it is of another plan. What it is torn at is left
    to that process.
    """
    lines = data.split(b"\n")[:-1]
    head = _parse(lines[0]) if lines else {}
    if (head.get("journal"), head.get("plan"), head.get("parts")) != (VERSION, digest, parts):
        return Finished()
    return _read(lines, parts)[0]


def _read(lines: Sequence[bytes], parts: int) -> tuple[Finished, int]:
    """What the lines behind the first one say, and how many bytes of the journal can be read."""
    found = Finished()
    good = sum([len(line) + 1 for line in lines[:1]])
    for line in lines[1:]:
        text, _, seal = line.rpartition(b" ")
        entry = _parse(text) if seal == _seal(text) else {}
        done, sums = entry.get("done"), entry.get("sums", {})
        if done is None or not _ranges_within(done, parts):
            break
        if not isinstance(sums, dict) or not all(isinstance(v, str) for v in sums.values()):
            break
        try:
            edges = [_edge(*e) for e in entry.get("edges", ())]
        except (TypeError, ValueError):
            break
        for a, b in done:
            found.parts.update(range(a, b))
        found.sums.update(sums)
        found.edges += edges
        good += len(line) + 1
    return found, good


def _edge(file: int, at: int, data: str) -> Edge:
    """Raises TypeError and ValueError for what is none."""
    if type(file) is not int or type(at) is not int or file < 0 or at < 0:
        raise TypeError
    return file, at, a2b_base64(data, strict_mode=True)


def writer(data: bytes) -> str:
    """Who a journal says has written it last, as an error shows it; "" where it does not say."""
    lines = data.split(b"\n")[:-1]
    heads = [_parse(line) for line in lines[:1]] + [_parse(line.rpartition(b" ")[0]) for line in lines[1:]]
    for entry in reversed(heads):
        by = entry.get("by")
        if isinstance(by, dict):
            plan = f", plan {str(heads[0].get('plan'))[:12]}"
            return f"process {by.get('pid')} on {by.get('host')}, since {by.get('since')}{plan}"
    return ""


def _by() -> dict[str, object]:
    """This process, for people: the time is that of this machine."""
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return {"host": os.uname().nodename, "pid": os.getpid(), "since": now}


def sealed(text: str) -> str:
    """A line that lists parts, with its checksum."""
    return f"{text} {_seal(text.encode()).decode()}"


def _seal(text: bytes) -> bytes:
    return b"%08x" % zlib.crc32(text)


def ranges(numbers: Iterable[int]) -> list[list[int]]:
    """Sorted numbers as half-open ranges."""
    out: list[list[int]] = []
    for n in sorted(numbers):
        if out and out[-1][1] == n:
            out[-1][1] = n + 1
        else:
            out.append([n, n + 1])
    return out


def _parse(line: bytes) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return entry if isinstance(entry, dict) else {}


def _ranges_within(done: object, parts: int) -> bool:
    return isinstance(done, list) and all(
        isinstance(r, list) and [*map(type, r)] == [int, int] and 0 <= r[0] <= r[1] <= parts for r in done
    )
