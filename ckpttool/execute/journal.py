"""What of a run is finished and on disk, in a file beside the output, so that an interrupted run can go on.

The first line identifies the plan; each further line lists parts whose bytes were made durable before the line was
written, with the checksums of tensors that they completed:

    {"journal": 1, "plan": "<digest>", "parts": 1234}
    {"done": [[0, 17], [19, 20]], "sums": {"3.0": "<hex>"}}

A line that a crash cut short is ignored, with everything behind it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ckpttool.errors import ConflictError
from ckpttool.execute.files import write_error

VERSION = 1
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
        """What was finished. Raises ConflictError when the journal belongs to another plan."""
        size = os.fstat(self._fd).st_size
        data = os.pread(self._fd, size, 0)
        lines = data.split(b"\n")[:-1]  # what follows the last newline is a torn line
        head = _parse(lines[0]) if lines else {}
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
            entry = _parse(line)
            done, sums = entry.get("done"), entry.get("sums", {})
            if done is None or not _ranges_within(done, parts) or not isinstance(sums, dict):
                break
            for a, b in done:
                found.parts.update(range(a, b))
            found.sums.update(sums)
            good += len(line) + 1
        if good != size:
            os.ftruncate(self._fd, good)
        return found

    def append(self, parts: Iterable[int], sums: dict[str, str]) -> None:
        """Record parts whose bytes are durable, and make the record durable. Raises OutputError."""
        entry: dict[str, object] = {"done": ranges(parts)}
        if sums:
            entry["sums"] = sums
        try:
            self._write(json.dumps(entry, separators=(",", ":")))
        except OSError as e:
            raise write_error(e, self._path, 0, 0) from e

    def _write(self, line: str) -> None:
        data = memoryview(line.encode() + b"\n")
        at = os.fstat(self._fd).st_size
        while data:
            n = os.pwrite(self._fd, data, at)
            at, data = at + n, data[n:]
        os.fdatasync(self._fd)


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
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) else {}


def _ranges_within(done: object, parts: int) -> bool:
    return isinstance(done, list) and all(
        isinstance(r, list) and len(r) == 2 and 0 <= r[0] <= r[1] <= parts for r in done
    )
