"""A destination in an object store: a prefix that is absent, or complete, without a rename.

Complete means that a reader who begins at config.json, or at an index, finds all that they speak of. Outputs are made
in a spool on this machine; what is finished of them is sent as parts of multipart uploads, which nobody sees, and
leaves the spool. The uploads are the journal.

    begin     the marker is put where there is none: this run holds DST. Uploads of other runs are aborted, new ones
              begun and named in the marker. A run that is resumed takes the marker over and asks which parts were sent
    record    chunks to which nothing more is written are sent. Hashes that a resumed run needs lie beside the marker
    settle    the rest is sent; the store lists every part, with its size
    complete  an old DST goes, its config.json and index first; tensors become visible: uploads are completed
    seal      companions, manifest, index, and config.json last
    publish   uploads that are left are aborted, the marker goes

docs/robustness/object-stores.md says what a crash leaves at each of them.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ckpttool.core.files import Place, Remote
from ckpttool.core.plan import Output, Plan
from ckpttool.errors import CkptError, ConflictError, OutputError, UsageError
from ckpttool.execute.destinations.base import Beginning
from ckpttool.execute.destinations.chunks import Chunks
from ckpttool.execute.destinations.local import MANIFEST
from ckpttool.execute.destinations.marker import WRITING, Marker, MarkerState
from ckpttool.execute.destinations.object_branch import BACKLOG, ObjectBranch
from ckpttool.execute.destinations.outbox import LAST, LATE, MARK, ObjectKeys, Outbox, Upload, rank
from ckpttool.execute.destinations.overlay import Overlay
from ckpttool.execute.destinations.owners import claims
from ckpttool.execute.destinations.spool import Spool
from ckpttool.execute.files import Medium, Stopped, write_error
from ckpttool.execute.fleets.base import Answer, Order
from ckpttool.execute.journal import Finished, ranges
from ckpttool.execute.options import RunOptions
from ckpttool.execute.schedule import Part, Task
from ckpttool.execute.shares import TaskSurvey
from ckpttool.storage.buckets import open_bucket
from ckpttool.storage.buckets.base import Bucket, FileSlice, GoneError, ObjectInfo, SliceStoppedError
from ckpttool.storage.objects import forget
from ckpttool.storage.readahead import at_once

CHUNK = 16 << 20
"""Bytes of a part of an upload; more for objects that would have too many."""
WHOLE = 1 << 20
"""Objects of fewer bytes are put whole, at the end: an upload takes three requests. Until then they are spooled."""
SENDERS = 8
"""Threads that send, by default."""
REMEMBER = 5.0
"""Seconds between two objects with hashes."""
PART = "part-"
"""The beginning of the names of members' markers."""
LEAST_SHARE = 4 << 30
"""Bytes. Where two shares meet, a part or a tensor is made twice: a few percent of a share of this size."""

_LONGEST = 1024
"""Bytes of a key."""

_T = TypeVar("_T")


def destination(dst: Remote, options: RunOptions) -> ObjectDestination:
    """The destination that a place is. Raises UsageError, AccessError when its store cannot be reached."""
    return ObjectDestination(dst, bucket_of(dst), single=options.single, threads=options.connections or SENDERS)


def bucket_of(dst: Remote) -> Bucket:
    """The bucket of a place. Raises UsageError, AccessError when it cannot be reached."""
    scheme, _, rest = str(dst).partition("://")
    if not {"", ".", ".."}.isdisjoint(rest.split("/")):  # stores take them as they are; few tools can read that again
        raise UsageError(
            "object stores have no `.`, `..` or empty folders", where=str(dst), hint="write the path without them"
        )
    return open_bucket(scheme, rest.partition("/")[0], writes=True)


def branch(said: Mapping[str, Any], plan: Plan, tasks: Sequence[Task]) -> ObjectBranch:
    """The side of a run on another machine that is on this one. Raises AccessError when its store cannot be reached."""
    bucket = str(said["dst"]).partition("://")[2].partition("/")[0]
    return ObjectBranch(said, plan, tasks, open_bucket(said["scheme"], bucket, writes=True))


def chunk_size(output: Output, chunk: int, bucket: Bucket) -> int:
    """Bytes of each part but the last of an output's upload; 0 for one that is put whole, at the end."""
    size = output.size
    if size < WHOLE or rank(output.name) >= LATE:
        return 0
    if size <= chunk * bucket.most_parts:
        return chunk
    return -(-size // bucket.most_parts // bucket.part_step) * bucket.part_step


class ObjectDestination:
    """See ``Destination``."""

    spools = True
    proposes = False
    shared = True
    resumes = True

    def __init__(self, dst: Place, bucket: Bucket, *, single: bool, threads: int, one_of: str = "") -> None:
        """``one_of`` tells the spools of several processes of this machine apart."""
        self.given: Place = dst
        self.single = single
        self._threads = threads
        self._text = str(dst)
        self._keys = ObjectKeys(self._text, single=single)
        self._bucket = bucket
        self._spool = Spool(self._text, one_of)
        self._marker = Marker(self._bucket, self._keys.marker, self._text)
        self._state: MarkerState | None = None
        self._names: list[str] = []
        """The names of all objects that DST will have."""
        self._own: set[str] = set()
        """ObjectKeys of objects that this run has written, or has begun to."""
        self._stop = threading.Event()
        self._asked = threading.Event()
        self._force = False
        self._outbox = Outbox(bucket, self._keys, self._spool, threads, self._stop, self._marker.check)
        self._objects = self._outbox.objects
        self._recording = threading.Lock()
        self._sums: dict[str, str] = {}
        """Hashes that are not in the store yet."""
        self._notes = 0
        """Objects with hashes."""
        self._noted = time.monotonic()
        self._replaced = False
        self._owed: set[tuple[int, int]] = set()
        """Chunks that other machines have been asked for: (output, chunk)."""

    # -- names

    @property
    def partial(self) -> Path:
        return self._spool.path

    @property
    def locks(self) -> Sequence[int]:
        return self._spool.locks

    @property
    def can_record(self) -> bool:
        return self._marker.is_held

    # -- checks, before anything is written

    def check(self, sources: Sequence[str], roots: Sequence[str], *, force: bool, carried: Sequence[str] = ()) -> None:
        self._check_place([*sources, *carried], [r.rstrip("/") for r in roots])
        if self._marker.find() is None:
            self.check_absent(force=force)

    def _check_place(self, sources: Sequence[str], roots: Sequence[str]) -> None:
        if self._keys.bucket.endswith("://"):
            raise OutputError("the destination has no bucket", where=self._text)
        if self.single and not self._keys.key:
            raise OutputError("the destination has no name", where=self._text)
        text = self._text.rstrip("/")
        for s in sources:
            if s == text or s.startswith(f"{text}/"):
                same = text in (roots or [s.rpartition("/")[0]])
                what = "SRC and DST are the same" if same else "SRC is inside DST"
                raise OutputError(what, where=[self._text, s], hint="choose another DST")
        for holder in roots or sorted({s.rpartition("/")[0] for s in sources}):
            if text == holder:
                raise OutputError("SRC and DST are the same", where=[self._text, holder], hint="choose another DST")
            if text.startswith(f"{holder}/"):
                what = "DST is inside SRC"
                raise OutputError(what, where=[self._text, holder], hint="choose a DST outside")

    def check_absent(self, *, force: bool, appeared: bool = False) -> None:
        """Raises OutputError for an object that is not this run's, and for a bucket that would be emptied."""
        if force and self._keys.key:
            return
        strange = next(self._strange(), None)
        if strange is None:
            return
        if force:
            what, hint = "--force would delete everything in the bucket", "choose a DST below it: a prefix"
            raise OutputError(what, where=[self._text, f"{self._keys.bucket}/{strange}"], hint=hint)
        what = "the destination appeared during the run" if appeared else "the destination exists"
        where = [self._text, f"{self._keys.bucket}/{strange}"]
        raise OutputError(what, where=where, hint="choose another DST, or use --force to replace it")

    def _strange(self) -> Iterator[str]:
        """ObjectKeys of objects at DST that are not this run's."""
        folder = f"{self._keys.key}/"
        if not self.single and self._keys.key and self._head(self._keys.key) is not None:
            yield self._keys.key
        for key, size in self._there(self._keys.prefix):
            if self.single and key != self._keys.key and not key.startswith(folder):
                continue  # another name that begins so
            mine = key in self._own or key == self._keys.marker or key.startswith(self._keys.notes)
            if not mine and not (key == folder and not size):  # consoles make folders so
                yield key

    def _there(self, prefix: str) -> Iterator[tuple[str, int]]:
        """ObjectKeys and sizes of all objects whose keys begin so."""
        for page in self._bucket.pages(prefix, deep=True):
            yield from [(key, info.size) for key, info in page.files]

    def _head(self, key: str) -> ObjectInfo | None:
        try:
            return self._bucket.head(key)
        except FileNotFoundError:
            return None

    def _is_written(self, o: Upload) -> bool:
        """Whether this run has made the object."""
        found = self._head(self._keys.at(o.name))
        return found is not None and (found.run, found.size) == (self._run, o.size)

    def check_space(self, plan: Plan) -> None:
        """Count what is certain to be in the spool: objects that are put whole, and a chunk for each thread."""
        sizes = [o.size for o in plan.outputs]
        held = sum(s for s in sizes if s < WHOLE)
        for o in plan.outputs:
            if o.summed:  # chunks with checksums among their bytes wait for the end
                held += min(o.size, CHUNK * len({at // CHUNK for at, _ in o.literals}))
        self._spool.check_space(min(sum(sizes), held + self._threads * CHUNK))

    # -- begin

    def begin(self, beginning: Beginning) -> Finished:
        self._asked, self._force = beginning.stop, beginning.force
        self._names = [*(o.name for o in beginning.plan.outputs), *beginning.late]
        self._check_names()
        plan = self._plan = beginning.plan
        self._spool.open()
        left = False
        try:
            state, left = self._take(plan.digest(), sum([len(t.parts) for t in beginning.tasks]), beginning)
            self._cut(plan, state.chunk)
            if left:
                sums = self._continue(state)
                self.check_absent(force=beginning.force)
            else:
                sums = {}
                self.check_absent(force=beginning.force)  # another run may have made it since the check
                self._clear(state)
            self._chunks = Chunks(plan, beginning.tasks, self._outbox.sizes(len(plan.outputs)))
            sent = [self._outbox.sent(i) for i in range(len(plan.outputs))]
            return Finished(self._chunks.finished(sent, sums), sums)
        except BaseException:
            if left:
                self.close()
            else:
                self.discard()
            raise

    def _check_names(self) -> None:
        for name in self._names:
            where = f"{self._text}: {name}"
            try:
                size = len(self._keys.at(name).encode())
            except UnicodeEncodeError:
                raise OutputError("a name is not UTF-8, as names in object stores are", where=where) from None
            if size > _LONGEST - len(f"/{MARK}.json"):
                raise OutputError(f"a name is longer than {_LONGEST:,} bytes, the limit of object stores", where=where)

    def _take(self, digest: str, parts: int, beginning: Beginning) -> tuple[MarkerState, bool]:
        """Hold DST. Returns the marker's state, and whether it is that of a run to be continued."""
        found = self._marker.find()
        fresh = MarkerState(uuid.uuid4().hex, digest, parts, CHUNK)
        if found is None:
            self.check_absent(force=beginning.force)
        elif beginning.resume:
            state = MarkerState.read(found.data, self._text)
            self._check_members(state)
            if state.state == WRITING and (state.plan, state.parts) != (digest, parts):
                raise ConflictError(
                    "the interrupted run had a different plan: the source, the options or the version of ckpttool have"
                    " changed",
                    where=f"{self._text}: plan {state.plan[:12]}, now {digest[:12]}",
                    hint="repeat the command of the interrupted run with --resume, or use --force to start over",
                )
            fresh.uploads = state.uploads
            fresh = state if state.state == WRITING else fresh
        elif beginning.force:
            with suppress(ConflictError):
                state = MarkerState.read(found.data, self._text)
                fresh.uploads = state.uploads
                self._check_members(state)
        else:
            self._marker.check_gone(found)
            what = "an interrupted run left a partial destination"
            raise OutputError(what, where=self._text, hint="--resume continues it, --force starts over")
        self._marker.take(fresh, found)
        self._state = fresh
        return fresh, fresh.state == WRITING

    def _check_members(self, state: MarkerState) -> None:
        """Raises HeldError while one of several members still writes."""
        for key, _ in list(self._there(self._keys.notes)) if state.members else ():
            if key.removeprefix(self._keys.notes).startswith(PART):
                found = self._bucket.get(key)
                if found is not None:
                    self._marker.check_gone(found)

    def _cut(self, plan: Plan, chunk: int) -> None:
        for i, o in enumerate(plan.outputs):
            size = chunk_size(o, chunk, self._bucket)
            if size:
                self._objects[i] = Upload(o.name, o.size, size)

    def _clear(self, state: MarkerState) -> None:
        """Abort what others have begun, and begin the uploads of this run. The marker names them before anything is
        sent: an upload that it does not name is never continued."""
        ours = {self._keys.at(o.name) for o in self._objects.values()} | {self._keys.at(n) for n in state.uploads}
        self._abort(ours)
        for key, _ in list(self._there(self._keys.notes)):
            self._bucket.delete(key)
        self._create(self._objects.values())
        state.uploads = {o.name: o.upload for o in self._objects.values()}
        state.state = WRITING
        self._marker.put()

    def _abort(self, keys: Iterable[str]) -> None:
        """Abort all uploads of objects with these keys."""
        wanted = set(keys)
        if wanted:
            found = [u for u in self._bucket.uploads(self._keys.prefix) if u[0] in wanted]
            self._each(lambda u: self._bucket.abort(*u), found)

    def _create(self, objects: Iterable[Upload]) -> None:
        def create(o: Upload) -> None:
            o.upload = self._bucket.create(self._keys.at(o.name), self._run)

        self._each(create, objects)

    def _continue(self, state: MarkerState) -> dict[str, str]:
        """Ask what the interrupted run has sent. Returns the hashes that it has left."""
        keys = {self._keys.at(n) for n in [*self._names, MANIFEST]}  # that one may have been wanted, and be no more
        there = [key for key, _ in self._there(self._keys.prefix) if key in keys]
        sizes: dict[str, int] = {}

        def look(key: str) -> None:
            written = self._head(key)
            if written is not None and written.run == self._run:
                sizes[key] = written.size

        self._each(look, there)
        self._own |= sizes.keys()

        def ask(o: Upload) -> None:
            if sizes.get(self._keys.at(o.name)) == o.size:
                o.is_done = True
                return
            o.upload = state.uploads.get(o.name, "")
            try:
                self._outbox.ask(o)
            except GoneError:
                o.upload = ""

        self._each(ask, self._objects.values())
        missing = [o for o in self._objects.values() if not o.upload and not o.is_done]
        if missing:
            self._create(missing)
            state.uploads |= {o.name: o.upload for o in missing}
            self._marker.put()
        return self._noted_sums()

    def _noted_sums(self) -> dict[str, str]:
        sums: dict[str, str] = {}
        for key, _ in list(self._there(self._keys.notes)):
            found = self._bucket.get(key)
            name = key.removeprefix(self._keys.notes)
            if found is not None and name.startswith(self._run):
                with suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
                    said = json.loads(found.data)["sums"]
                    sums |= {k: v for k, v in said.items() if isinstance(v, str)}
                    self._notes = max(self._notes, int(name[len(self._run) + 1 :].removesuffix(".json")))
        return sums

    @property
    def _run(self) -> str:
        return self._state.run if self._state else ""

    # -- work

    def make(self, path: str, size: int) -> bool:
        """Make an output in the spool. Chunks that an earlier run sent count, wherever its spool was."""
        self._start()
        self._spool.make(path, size)
        return True

    def _start(self) -> None:
        """Not in ``begin``: processes are forked behind that, and before there are threads."""
        self._outbox.sender.start()
        self._marker.beat()

    def record(self, pool: Medium, parts: Sequence[Part], sums: Mapping[str, str]) -> None:
        """Send what is ready, and wait while too much is waiting. The bytes need not be durable here."""
        if self._asked.is_set():
            return
        self._start()
        with self._recording:
            for output, chunk in self._chunks.done([p.number for p in parts], sums):
                self._outbox.put(output, chunk)
            self._sums |= sums
        if self._sums and time.monotonic() - self._noted > REMEMBER:
            self._note()
        self._outbox.sender.wait(BACKLOG * self._threads, self._asked)

    # -- other machines

    @property
    def least_share(self) -> int:
        return LEAST_SHARE

    def branch(self) -> Mapping[str, Any]:
        self._refuse_summed()
        cut = [[i, o.chunk, o.upload] for i, o in self._objects.items() if not o.is_done]
        said = {"scheme": self._text.partition("://")[0], "dst": self._text, "single": self.single}
        return said | {"run": self._run, "cut": cut, "threads": self._threads}

    def _refuse_summed(self) -> None:
        """Their first and last chunk depend on bytes that all machines write."""
        summed = next((o.name for o in self._plan.outputs if o.summed), "")
        if summed:
            raise UsageError(
                "several machines cannot write a file with checksums of its tensors into a bucket",
                where=f"{self._text}: {summed}",
                hint="use one machine, a DST that all machines share, or --to hf",
            )

    def orders(self, survey: TaskSurvey, shares: Sequence[Sequence[int]], finished: Finished) -> list[Order]:
        """An object that is put whole is one chunk: the machine that makes it answers with its bytes."""
        outputs = self._plan.outputs
        sizes = [size or o.size for size, o in zip(self._outbox.sizes(len(outputs)), outputs, strict=True)]
        sent = [self._outbox.sent(i) for i in range(len(outputs))]
        found = [c for c in claims(survey, shares, sizes, sent, finished) if c.tasks]
        self._owed = {(f, chunk) for c in found for f, first, stop in c.chunks for chunk in range(first, stop)}
        orders: list[Order] = []
        for c in found:
            parts = {p.number for t in c.tasks for p in survey.tasks[t].parts}
            parts.difference_update(c.spared)
            orders.append({"tasks": c.tasks, "done": c.spared, "parts": ranges(parts), "chunks": c.chunks})
        return orders

    def remember(self, parts: Sequence[Part], answer: Answer) -> None:
        for output, chunk, tag in answer["sent"]:
            self._objects[output].sent[chunk] = tag
            self._owed.discard((output, chunk))
        for output, data in answer["whole"]:
            path = self._spool.path / self._plan.outputs[output].name
            try:
                with path.open("r+b") as f:
                    f.write(data)
            except OSError as e:
                raise write_error(e, str(path), 0, len(data)) from e
            self._owed.discard((output, 0))
        with self._recording:
            self._sums |= answer["sums"]
        if self._sums and time.monotonic() - self._noted > REMEMBER:
            self._note()

    def _note(self) -> None:
        """Put hashes beside the marker, for a run that goes on."""
        with self._recording:
            sums, self._sums = self._sums, {}
            self._noted = time.monotonic()
            self._notes += 1
        self._bucket.put(self._note_key(), json.dumps({"sums": sums}).encode(), self._run)

    def _note_key(self) -> str:
        return f"{self._keys.notes}{self._run}-{self._notes:06}.json"

    # -- the end

    def settle(self, pool: Medium, paths: Sequence[str]) -> None:
        self._start()
        if self._sums:
            self._note()
        if self._owed:
            output, chunk = min(self._owed)
            what = f"part {chunk + 1:,} of an upload was not sent by the machine that was asked to"
            raise OutputError(what, where=self._keys.where(self._plan.outputs[output].name))
        self._drain()
        # The last parts, which were not worth a record, checksums, and chunks that no part writes into.
        for output, o in self._objects.items():
            for chunk in () if o.is_done else o.chunks:
                if chunk not in o.sent:
                    self._outbox.put(output, chunk)
        self._drain()
        self._each(self._check_sent, [o for o in self._objects.values() if not o.is_done])

    def _drain(self) -> None:
        self._outbox.sender.wait(0, self._asked)
        if self._asked.is_set():
            raise Stopped

    def _check_sent(self, o: Upload) -> None:
        """Raises OutputError when the store does not have all of an object, as it was sent."""
        where = self._keys.where(o.name)
        try:
            there = self._bucket.parts(self._keys.at(o.name), o.upload)
        except GoneError:
            raise OutputError("an upload is gone, with everything sent so far", where=where) from None
        for chunk in o.chunks:
            part = there.get(chunk + 1)
            if part is None or not o.has(chunk, part.size):
                raise OutputError(f"part {chunk + 1:,} of an upload is missing, or has another size", where=where)
            if not _is_same(o.sent[chunk], part.tag):
                raise OutputError(f"part {chunk + 1:,} of an upload differs from the one that was sent", where=where)
            o.sent[chunk] = part.tag

    def complete(self) -> None:
        self._marker.check()
        self._delete(sorted(self._own - {self._keys.at(n) for n in self._names}))
        strange = list(self._strange())
        if strange:
            self.check_absent(force=self._force, appeared=True)
            self._delete(strange)
            self._replaced = True
        self._complete()

    def _delete(self, keys: Iterable[str]) -> None:
        """Delete objects of DST: without those at which readers begin, it is absent."""
        by_rank: dict[int, list[str]] = {}
        for key in keys:
            by_rank.setdefault(rank(key.removeprefix(self._keys.prefix)), []).append(key)
        for _, some in sorted(by_rank.items(), reverse=True):
            self._each(self._bucket.delete, some)

    def _complete(self) -> None:
        """Complete the uploads."""

        def complete(o: Upload) -> None:
            key = self._keys.at(o.name)
            self._own.add(key)
            try:
                self._bucket.complete(key, o.upload, {c + 1: tag for c, tag in o.sent.items()}, self._run)
            except GoneError:  # it was done, and the answer has been lost
                if not self._is_written(o):
                    what = "an upload disappeared before it was completed"
                    raise OutputError(what, where=f"{self._keys.bucket}/{key}") from None
            o.is_done = True

        self._each(complete, [o for o in self._objects.values() if not o.is_done])

    def readable(self) -> Place:
        """Objects that are there, and what is put at the end from the spool."""
        if self.single:
            (name,) = self._names
            return self.given if self._objects else self._spool.path / name
        forget()  # what is there has been looked at before
        return Overlay.of(self.given, self._spool.path, self._small)

    @property
    def _small(self) -> list[str]:
        """Names of what is put whole, at the end."""
        sent = {o.name for o in self._objects.values()}
        return [n for n in self._names if n not in sent]

    def seal(self) -> None:
        self._marker.check()
        small = self._small
        self._each(self._put, [n for n in small if rank(n) < LATE])
        self._check_there()
        self._marker.check()
        for number in range(LATE, LAST + 1):
            self._each(self._put, [n for n in small if rank(n) == number])

    def _put(self, name: str) -> None:
        key, path = self._keys.at(name), self._spool.path / name
        self._own.add(key)
        size = path.stat().st_size
        try:
            with FileSlice(path, 0, size, self._stop) as data:
                self._bucket.put(key, data if size else b"", self._run)
        except SliceStoppedError:
            raise Stopped from None

    def _check_there(self) -> None:
        """Raises OutputError when an object of those that come first is not there, or has another size."""
        there = dict(self._there(self._keys.prefix))
        for o in self._objects.values():
            if there.get(self._keys.at(o.name)) != o.size:
                what = "a written object is missing or has a different size"
                raise OutputError(what, where=self._keys.where(o.name))

    def publish(self, *, force: bool) -> str | None:
        notes = []
        if self._replaced:
            notes.append("the old destination was deleted before the new one was complete: objects have no rename")
        try:
            self._tidy()
            self._marker.delete()
        except (CkptError, FileNotFoundError) as e:
            said = e.what if isinstance(e, CkptError) else "not found"
            left = f"{self._keys.bucket}/{self._keys.marker}"
            notes.append(f"DST is complete; {left} could not be removed ({said}): --resume removes it")
            self._marker.release()
        self._end()
        return "; ".join(notes) or None

    def _tidy(self) -> None:
        """Abort uploads that are left, and delete the hashes."""
        uploads = self._state.uploads if self._state else {}
        self._abort({self._keys.at(o.name) for o in self._objects.values()} | {self._keys.at(n) for n in uploads})
        for key, _ in list(self._there(self._keys.notes)):
            self._bucket.delete(key)

    def close(self) -> None:
        self._stop.set()
        self._outbox.sender.end()
        if self._sums and self._marker.is_held:
            with suppress(CkptError):
                self._note()
        self._marker.release()
        self._end()

    def discard(self) -> None:
        self._stop.set()
        self._outbox.sender.end()
        if self._marker.is_held:
            with suppress(CkptError, FileNotFoundError):
                self._marker.check()
                self._delete(sorted(self._own))
                self._tidy()
                self._marker.delete()
        self._end()

    def _end(self) -> None:
        self._stop.set()
        self._marker.end()
        self._outbox.sender.end()
        self._spool.close()
        forget()

    def _each(self, do: Callable[[_T], object], items: Iterable[_T]) -> None:
        """Do it for all, some at a time. The first failure is raised, and what has not begun is left."""
        for _ in at_once([partial(do, item) for item in items], self._threads):
            pass


def _is_same(one: str, other: str) -> bool:
    """Whether tags are of the same bytes: by the checksum where there is one. A machine that was given up may have sent
    them again, and a store that encrypts gives each upload of them another name."""
    a, b = one.split(), other.split()
    return a[-1] == b[-1] if len(a) == len(b) else a[0] == b[0]
