"""What of a run is finished and on disk, in a file beside the output, so that an interrupted run can go on.

The first line identifies the plan; each further line lists parts whose bytes were made durable before the line was
written, with the checksums of tensors that they completed, and a checksum (CRC-32) of the line itself, because what it
lists is not written again:

    {"journal": 2, "plan": "<digest>", "parts": 1234}
    {"done": [[0, 17], [19, 20]], "sums": {"3.0": "<hex>"}} 1c291ca3

A line that a crash cut short is ignored, with everything behind it. If that is the first line, nothing had begun.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpttool.errors import ConflictError
from ckpttool.execute.files import write_error

VERSION = 2
"""Changes with the file's form and with the way a plan is cut into parts."""


@dataclass(slots=True)
class Finished:
    """What a journal says."""

    parts: set[int] = field(default_factory=set)
    sums: dict[str, str] = field(default_factory=dict)


class Journal:
    """An open journal. ``load`` or ``begin`` comes first, then ``append`` for every group of finished parts."""

    def __init__(self, fd: int, path: str) -> None:
        self._fd = fd
        self._path = path

    def begin(self, digest: str, parts: int) -> Finished:
        """Start over: nothing is finished."""
        line = json.dumps({"journal": VERSION, "plan": digest, "parts": parts})
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
                "what the interrupted run left cannot be continued: its journal cannot be read",
                where=self._path,
                hint="use --force to start over",
            )
        if head["plan"] != digest or head.get("parts") != parts:
            raise ConflictError(
                "the interrupted run had another plan: the source, the options or the version of ckpttool have changed",
                where=f"{self._path}: plan {str(head['plan'])[:12]}, now {digest[:12]}",
                hint="repeat the command of the interrupted run with --resume, or use --force to start over",
            )
        found = Finished()
        good = len(lines[0]) + 1
        for line in lines[1:]:
            text, _, seal = line.rpartition(b" ")
            entry = _parse(text) if seal == _seal(text) else {}
            done, sums = entry.get("done"), entry.get("sums", {})
            if done is None or not _ranges_within(done, parts):
                break
            if not isinstance(sums, dict) or not all(isinstance(v, str) for v in sums.values()):
                break
            for a, b in done:
                found.parts.update(range(a, b))
            found.sums.update(sums)
            good += len(line) + 1
        if good != size:
            try:
                os.ftruncate(self._fd, good)
            except OSError as e:
                raise write_error(e, self._path, 0, 0) from e
        return found

    def append(self, parts: Iterable[int], sums: Mapping[str, str]) -> None:
        """Record parts whose bytes are durable, and make the record durable. Raises OutputError."""
        entry: dict[str, object] = {"done": ranges(parts)}
        if sums:
            entry["sums"] = sums
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
        os.fdatasync(self._fd)


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
