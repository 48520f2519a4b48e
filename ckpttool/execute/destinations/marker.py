"""The marker beside outputs in an object store: who writes this DST, what, and with which uploads.

    {"ckpttool-partial": 1, "state": "writing", "run": "<id>", "plan": "<digest>", "parts": 1234, "chunk": 16777216,
     "uploads": {"model.safetensors": "<upload>"}, "holder": {"token": "<id>", "host": ..., "pid": ..., "machine": ...}}

There is one while DST is being made. Whoever puts it where there was none, or in the place of the version that it has
read, holds DST; a holder writes it again every ``BEAT`` seconds. One that has let go (``holder`` is null), whose
process is gone from this machine, or who has not been heard of for ``SILENT`` seconds by the clock of the store, can be
followed by another.

Members (``--part``) have one marker for all of them, and a smaller one each.

``clearing`` is the state in which uploads of other runs are aborted and new ones begun; what it finds is never
continued.
``run`` stays the same as long as a run is resumed. ``token`` is another one for each process that holds DST.
"""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from ckpttool.errors import CkptError, ConflictError, OutputError
from ckpttool.execute.destinations.holder import HERE, Holder
from ckpttool.storage.buckets.base import Bucket, ObjectContent, TakenError

VERSION = 1
BEAT = 20.0
SILENT = 90.0
CLEARING, WRITING = "clearing", "writing"


class HeldError(OutputError):
    """Another process is writing this DST."""


@dataclass(slots=True)
class MarkerState:
    """The content of a marker."""

    run: str
    plan: str
    parts: int
    chunk: int
    """Bytes from which the chunks of each object follow."""
    state: str = CLEARING
    uploads: dict[str, str] = field(default_factory=dict)
    """The upload of each object that is sent in chunks, by the name below DST; "" before it has one."""
    holder: Holder | None = None
    members: int = 0
    """Processes that write this DST together; 0 for a run of one process. Between the first steps and the last one
    nobody holds it then."""
    version: str = ""
    """The version of ckpttool that all members have."""
    hashes: list[str] = field(default_factory=list)
    """Algorithms of the checksums that all members take."""
    verify: bool = False
    """This member was asked to verify DST, now or in an earlier attempt; for markers of members only."""

    def to_json(self) -> bytes:
        return json.dumps({"ckpttool-partial": VERSION, **asdict(self)}).encode()

    @classmethod
    def read(cls, data: bytes, where: str) -> MarkerState:
        """Raises ConflictError for what is no marker of this version."""
        try:
            said = json.loads(data)
            if said.pop("ckpttool-partial") != VERSION:
                raise ValueError
            held = said.pop("holder")
            state = cls(**said, holder=Holder(**held) if held else None)
            state.check()
            if not state.chunk:
                raise ValueError
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise ConflictError(
                "cannot continue the interrupted run: its marker is unreadable",
                where=where,
                hint="use --force to start over",
            ) from None
        return state

    def check(self) -> None:
        """Raises TypeError where a value is none of its kind."""
        texts: list[Any] = [self.run, self.plan, self.state, *self.uploads, *self.uploads.values(), self.version]
        texts += self.hashes
        numbers: list[Any] = [self.parts, self.chunk, self.members]
        if self.holder is not None:
            self.holder.check()
        if not all(type(t) is str for t in texts) or not all(type(n) is int and n >= 0 for n in numbers):
            raise TypeError
        if type(self.verify) is not bool:
            raise TypeError


class Marker:
    """The marker of one DST, as this process holds it."""

    def __init__(self, bucket: Bucket, key: str, where: str) -> None:
        self._bucket = bucket
        self._key = key
        self._where = where
        self._tag = ""
        self._state: MarkerState | None = None
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._lost: CkptError | None = None
        self.me = Holder.here()

    @property
    def is_held(self) -> bool:
        """Whether it is ours, as far as is known."""
        return self._state is not None and self._lost is None

    def find(self) -> ObjectContent | None:
        """Read the marker; None where there is none."""
        return self._bucket.get(self._key)

    def take(self, state: MarkerState, instead_of: ObjectContent | None) -> None:
        """Put it where there is none, or in the place of one whose holder is gone.

        Raises HeldError when somebody else is writing this DST.
        """
        if instead_of is not None:
            self.check_gone(instead_of)
        state.holder = self.me
        HERE.add(self.me.token)
        try:
            tag = instead_of.tag if instead_of else ""
            self._tag = self._bucket.put(self._key, state.to_json(), state.run, new=not tag, replaces=tag)
        except (TakenError, FileNotFoundError):
            pass  # or the answer to a request that was done has been lost
        found = self.find()  # some stores do not know conditions
        if found is None or not self._is_mine(found):
            raise self._busy("it has just begun")
        self._tag = found.tag
        self._state = state

    def put(self) -> None:
        """Write what has been changed in the state. Raises OutputError when somebody else has taken DST over."""
        with self._lock:
            self._put()

    def _put(self) -> None:
        if self._state is None:
            return
        self._raise()
        try:
            self._tag = self._bucket.put(self._key, self._state.to_json(), self._state.run, replaces=self._tag)
        except (TakenError, FileNotFoundError):
            self._look()

    def check(self) -> None:
        """Raises OutputError when somebody else has taken DST over."""
        with self._lock:
            if self._state is not None:
                self._raise()
                self._look()

    def _look(self) -> None:
        found = self.find()
        if found is not None and self._is_mine(found):
            self._tag = found.tag
            return
        what = "the marker of this run is gone" if found is None else "another run has taken this destination over"
        self._lost = OutputError(
            f"{what}, so this one ends", where=self._where, hint="find out which of them should continue"
        )
        raise self._lost

    def _raise(self) -> None:
        if self._lost is not None:
            raise self._lost

    def _is_mine(self, found: ObjectContent) -> bool:
        try:
            holder = MarkerState.read(found.data, self._where).holder
        except ConflictError:
            return False
        return holder is not None and holder.token == self.me.token

    def check_gone(self, found: ObjectContent) -> None:
        """Raises HeldError when the process that put it may still be writing."""
        try:
            holder = MarkerState.read(found.data, self._where).holder
        except ConflictError:
            return  # --force: there is nobody to ask
        if holder is not None and not holder.is_gone() and found.age < SILENT:
            raise self._busy(
                f"process {holder.pid} on {holder.host}, last seen {max(0, round(found.age))} s ago",
                wait=round(SILENT - found.age),
            )

    def _busy(self, who: str, wait: int = 0) -> HeldError:
        hint = "wait until it has finished, or choose another DST"
        if wait:
            hint += f"; if it was killed, repeat the command in {wait} s"
        return HeldError(f"another run is writing this destination: {who}", where=self._where, hint=hint)

    def beat(self) -> None:
        """Start to write it again every ``BEAT`` seconds."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._beat, name="marker", daemon=True)
            self._thread.start()

    def _beat(self) -> None:
        while not self._end.wait(BEAT):
            # Out of reach: who sends parts will say so. Lost: who asks next hears of it.
            with suppress(CkptError), self._lock:
                if self._end.is_set():
                    return
                self._put()

    def end(self) -> None:
        """Do not write it any more."""
        self._end.set()
        HERE.discard(self.me.token)

    def release(self) -> None:
        """Let go of DST, which stays to be continued."""
        self._end.set()
        with self._lock:
            if self._state is not None and self._lost is None:
                self._state.holder = None
                with suppress(CkptError, TakenError, FileNotFoundError):
                    self._bucket.put(self._key, self._state.to_json(), self._state.run, replaces=self._tag)
            self._state = None

    def delete(self) -> None:
        """DST is made, or nothing of it is left."""
        self._end.set()
        with self._lock:
            if self._state is not None and self._lost is None:
                self._look()
                self._bucket.delete(self._key)
            self._state = None
