"""Options, progress and result of a run. Plain data, no I/O."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ckpttool.core.files import Place
from ckpttool.storage.system import cores

if TYPE_CHECKING:
    from ckpttool.execute.fleets.base import Fleet

MIB = 1 << 20


Advance = Callable[[int], None]
"""Takes the number of bytes that somebody is done with. May be called by any thread."""


def unwatched(_nbytes: int) -> None:
    """No-op progress callback."""


@dataclass(frozen=True, slots=True)
class Member:
    """One of several processes that share a run, each of which does its part."""

    number: int
    """Number of the part, from 1."""
    of: int
    """How many there are."""

    def __str__(self) -> str:
        """``part 3 of 8``."""
        return f"part {self.number} of {self.of}"


@dataclass(frozen=True, slots=True)
class Standing:
    """State of a run of several processes when one of them is done."""

    member: Member
    committed: bool
    """DST is complete and has its name."""
    waiting_for: tuple[int, ...] = ()
    """Numbers of the members that are not done."""


class Proof(Protocol):
    """Compares an output with its sources, whole or in shares."""

    def __call__(self, written: Place, advance: Advance) -> None:
        """Do all of it. Raises VerifyError naming the first tensors that differ."""

    def share(self, written: Place, advance: Advance, number: int, of: int) -> None:
        """Do share ``number`` (from 0) of so many. Raises VerifyError naming the first tensors that differ."""


@runtime_checkable
class OnFleet(Protocol):
    """What reads a finished output, and can do so on other machines: ``Verification``, ``Measurement``."""

    def __call__(self, written: Place, advance: Advance) -> None: ...

    def on(self, fleet: Fleet, written: Place, advance: Advance, stop: Event, private: Path | None = None) -> None: ...


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of a run. None of them changes the bytes that are written."""

    memory: int = 64 * MIB
    """Bytes for all buffers together."""
    workers: int | None = None
    """Threads that move bytes, and processes that compute tensors; None is as many as suit the machine."""
    connections: int | None = None
    """Requests at a time to places on other machines; None is as many as ``memory`` allows."""
    force: bool = False
    """Replace an existing DST, and drop what an interrupted run left."""
    resume: bool = False
    """Continue an interrupted run of the same plan."""
    create_pr: bool = False
    """A DST on the Hugging Face Hub gets a pull request, and not a commit."""
    manifest: bool = False
    """Compute a checksum of every stored tensor and write them to ``ckpttool.manifest.json``."""
    verify: Callable[[Place, Advance], None] | None = None
    """Called, in a thread, with the finished, durable output and with what is to be told how many bytes of it
    have been verified; when it raises, DST does not appear."""
    measure: Callable[[Place, Advance], None] | None = None
    """Called like ``verify``, after it. What it finds out may stand in late files, which are written again then."""
    prove: Proof | None = None
    """For a run with a ``member``: compares a share of a DST that is there already with the sources, or all of one that
    this member completes, where another one was asked to verify it."""
    late_files: Mapping[str, Callable[[Mapping[str, str]], bytes]] = field(default_factory=dict)
    """Further small files, by name, that cannot be known before. Called when everything is written, with the hashes
    of the operands of computed tensors, by the keys of ``operand_keys``."""
    single: bool = False
    """DST is a file: the only output of the plan, which has its name."""
    source_roots: tuple[str, ...] = ()
    """Directories the caller named as SRC; DST may not lie inside. Empty: the directories that hold the sources."""
    on: str | Fleet = ""
    """The machines that share the run: an engine (``ray``, ``ray=HOST:PORT``) or a fleet; "" is this machine."""
    member: Member | None = None
    """This process does one part of the run, and others do the others; the last one to end makes DST complete."""
    begun: float = field(default_factory=time.perf_counter)
    """When planning began, on the clock of ``time.perf_counter``."""

    @property
    def movers(self) -> int:
        """Threads that move bytes: four keep a disk busy that is written directly, as most of them wait for it."""
        return self.workers or max(2, min(4, 2 * cores()))

    @property
    def computers(self) -> int:
        """Processes that compute: as many as there are cores."""
        return self.workers or cores()


class Progress(Protocol):
    """Receiver of progress. Called from the thread that called ``run``, at most a few times a second."""

    def start(self, total_bytes: int, files: int) -> None: ...

    def advance(self, nbytes: int) -> None: ...

    def file_done(self, name: str, nbytes: int) -> None: ...

    def note(self, text: str) -> None: ...

    def finish(self) -> None: ...


@runtime_checkable
class PhasedProgress(Progress, Protocol):
    """A receiver that hears of verification, too. Others hear of what is written."""

    def phase(self, name: str, total_bytes: int, done_bytes: int) -> None:
        """From now on ``advance`` counts the bytes of ``name``: ``write``, ``verify``, ``measure``. An earlier,
        interrupted run has done ``done_bytes`` of ``total_bytes`` already."""


class NoProgress:
    """Says nothing."""

    def start(self, total_bytes: int, files: int) -> None: ...

    def advance(self, nbytes: int) -> None: ...

    def file_done(self, name: str, nbytes: int) -> None: ...

    def note(self, text: str) -> None: ...

    def finish(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Checksum:
    """One stored tensor of the output and the hash of its bytes."""

    file: str
    """Name of the output file, relative to DST."""
    tensor: str
    nbytes: int
    digest: str
    """``xxh3_128:`` and 32 hexadecimal digits."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """Result of a run: bytes, seconds, checksums and notes."""

    bytes_read: int
    bytes_written: int
    bytes_skipped: int
    """Bytes that an earlier, interrupted run had already written."""
    seconds: float
    """Without planning."""
    peak_buffer: int
    """Most bytes of buffers in use at one time."""
    policy: str
    """How bytes were written: ``direct``, ``uncached``, ``write-behind`` or ``plain``."""
    plan_seconds: float = 0
    verify_seconds: float = 0
    measure_seconds: float = 0
    verified: bool = False
    """DST is complete, and was compared with the sources: by this process, or by the one that completed it."""
    manifest: list[Checksum] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    standing: Standing | None = None
    """State of all parts of a run with a ``member``."""

    @property
    def committed(self) -> bool:
        """DST is complete: no other process has anything left to do."""
        return self.standing is None or self.standing.committed

    @property
    def write_seconds(self) -> float:
        """All that is not planning, verification or measuring."""
        return self.seconds - self.verify_seconds - self.measure_seconds
