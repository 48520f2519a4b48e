"""A prefix in an object store that several processes write together (``--part I/N``); nobody is in charge.

They have nothing in common but the store. While DST is being made there are

    .ckpttool-partial.json             the marker: the plan, how many members, and the uploads. Nobody holds it but
                                       the member that begins the uploads, and the one that completes DST
    .ckpttool-partial/part-I-N.json    of each member: it is at work, or done, and whether it was asked to verify DST.
                                       Written again every ``marker.BEAT`` s
    .ckpttool-partial/RUN-...json      hashes that members have taken

The steps:

    join      whoever puts the marker first begins the uploads; the others wait until it says that they have begun.
              Another plan, number of members or version is an error
    work      each sends the chunks of its share (``owners``) that the store does not have
    leave     the member says that it is done, then looks at all others. Not all done: they will see to the rest
    commit    whoever has seen all done puts himself into the marker, on the condition that it is the one he has read,
              and resumes the run as if it had been one of one process: all parts are there. It makes what is put whole,
              and completes, verifies and publishes DST

A chunk has one owner, and whoever sends it again sends the same bytes. So a member may be killed and run again, or be
thought dead and come back: what it sends is there already, or its upload is gone. Two that think they are the last put
different names into the marker, and the store takes one of them; the other one waits, and follows when that one has not
been heard of for ``marker.SILENT`` seconds by the clock of the store.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from ckpttool.core.files import Place, Remote
from ckpttool.core.plan import Plan
from ckpttool.errors import CkptError, ConflictError, OutputError
from ckpttool.execute.destinations import objects
from ckpttool.execute.destinations.base import Beginning
from ckpttool.execute.destinations.chunks import Chunks
from ckpttool.execute.destinations.marker import WRITING, HeldError, Marker, MarkerState
from ckpttool.execute.destinations.members import CommittedError
from ckpttool.execute.destinations.object_branch import ObjectBranch
from ckpttool.execute.destinations.objects import PART, REMEMBER, SENDERS, ObjectDestination, bucket_of
from ckpttool.execute.destinations.outbox import Upload, rank
from ckpttool.execute.destinations.owners import claims
from ckpttool.execute.files import Medium, Stopped
from ckpttool.execute.journal import Finished, ranges
from ckpttool.execute.options import Member, RunOptions
from ckpttool.execute.schedule import Part
from ckpttool.execute.shares import TaskSurvey
from ckpttool.storage.buckets.base import Bucket, GoneError, ObjectContent
from ckpttool.version import __version__

DONE = "done"
"""MarkerState of a member whose chunks the store has."""
LOOK_EVERY = 0.5
"""Seconds between two looks at something that another member does."""
_DIGITS = 16
"""Digits of the plan's digest at the beginning of the name of a run: an object says which plan it was made by."""


def destination(dst: Remote, options: RunOptions) -> ObjectMember:
    """The destination of a member. Raises as ``objects.destination``."""
    assert options.member is not None  # noqa: S101 - who asks for this one has it
    threads = options.connections or SENDERS
    return ObjectMember(dst, bucket_of(dst), options.member, single=options.single, threads=threads)


def _spool_of(member: Member) -> str:
    return f"part-{member.number}-of-{member.of}"


class ObjectMember(ObjectDestination):
    """DST for a process that does its part; ``committer`` is what it is for the one that completes it."""

    def __init__(self, dst: Place, bucket: Bucket, member: Member, *, single: bool, threads: int) -> None:
        super().__init__(dst, bucket, single=single, threads=threads, one_of=_spool_of(member))
        self.member = member
        self.own: list[int] = []
        """Numbers of the tasks that this part does."""
        self.finished: set[int] = set()
        """Parts that need not be done again, by anybody."""
        self.wrong = False
        """The input is: nothing that there is can be of use."""
        self.verify_is_known = False
        """The part that completes DST knows that this one was asked to verify it."""
        self._digest = ""
        self._branch: ObjectBranch | None = None
        self._part = Marker(bucket, self._part_key(member.number), self._text)
        self._mine: MarkerState | None = None
        """The content of the own marker."""

    def _part_key(self, number: int) -> str:
        return f"{self._keys.notes}{PART}{number}-{self.member.of}.json"

    def _note_key(self) -> str:
        return f"{self._keys.notes}{self._run}-{self.member.number}-{self._part.me.token}-{self._notes:06}.json"

    def check(self, sources: Sequence[str], roots: Sequence[str], *, force: bool, carried: Sequence[str] = ()) -> None:
        """A DST that is there may be the one that the others have completed: ``begin`` finds out."""
        self._check_place([*sources, *carried], [r.rstrip("/") for r in roots])

    # -- joining

    def begin(self, beginning: Beginning) -> Finished:
        """Join the others, and hear what all have finished. Raises CommittedError when DST is made already."""
        plan = self._plan = beginning.plan
        self._asked, self._force, self._digest = beginning.stop, beginning.force, plan.digest()
        self._names = [*(o.name for o in plan.outputs), *beginning.late]
        self._check_names()
        self._refuse_summed()
        self._spool.open()
        try:
            state = self._state = self._join(beginning)
            self._cut(plan, state.chunk)
            for o in self._objects.values():
                o.upload = state.uploads.get(o.name, "")
            self._mine = self._take_part(state, verify=beginning.verify)
            self.verify_is_known = beginning.verify and not self._is_being_completed()
            sums = self._noted_sums()
            self._each(self._ask, self._objects.values())
            return self._choose(beginning, state, sums)
        except BaseException:
            self.close()
            raise

    def _ask(self, o: Upload) -> None:
        """Look which chunks of an object have been sent: all where a member has begun to complete DST."""
        try:
            self._outbox.ask(o)
        except GoneError:
            o.is_done = self._is_written(o)
            if not o.is_done:
                self.check_running()
                hint = "continue with --resume and without --part, or start over with --force"
                what = "an upload is gone, with everything sent so far"
                raise OutputError(what, where=self._keys.where(o.name), hint=hint) from None

    def _choose(self, beginning: Beginning, state: MarkerState, sums: dict[str, str]) -> Finished:
        """Find out what this part is to do."""
        plan, tasks = beginning.plan, beginning.tasks
        sizes = self._outbox.sizes(len(plan.outputs))
        sent = [self._outbox.sent(i) for i in range(len(plan.outputs))]
        finished = Finished(Chunks(plan, tasks, sizes).finished(sent, sums), sums)
        survey = TaskSurvey(plan, tasks)
        claim = claims(survey, survey.cut(self.member.of), sizes, sent, finished)[self.member.number - 1]
        self.own, self.finished = claim.tasks, finished.parts
        cut = [[i, o.chunk, o.upload] for i, o in self._objects.items() if not o.is_done]
        said = {"dst": self._text, "single": self.single, "run": state.run, "cut": cut, "threads": self._threads}
        self._branch = branch = ObjectBranch(said, plan, tasks, self._bucket, self._spool)
        parts = {p.number for t in claim.tasks for p in tasks[t].parts}
        parts.difference_update(claim.spared)
        order = {"tasks": claim.tasks, "done": claim.spared, "parts": ranges(parts), "chunks": claim.chunks}
        branch.begin(order, sums)
        return Finished(set(claim.spared), sums)

    def _join(self, beginning: Beginning) -> MarkerState:
        """The state of the run that all members belong to."""
        parts = sum([len(t.parts) for t in beginning.tasks])
        hashes = sorted({k.partition(":")[2] for t in beginning.tasks for k, _ in t.targets})
        mine = MarkerState(
            self._digest[:_DIGITS] + uuid.uuid4().hex[_DIGITS:], self._digest, parts, objects.CHUNK,
            members=self.member.of, version=__version__, hashes=hashes,
        )  # fmt: skip
        while True:
            found = self._marker.find()
            if found is None:
                if self._is_made():
                    raise CommittedError
                self.check_absent(force=beginning.force)
            else:
                state = self._read(found, mine, force=beginning.force)
                if state is not None and state.state == WRITING:
                    return state
            try:
                self._begin_uploads(mine, found)
            except HeldError:  # by who is about to begin them
                self._wait()

    def _read(self, found: ObjectContent, mine: MarkerState, *, force: bool) -> MarkerState | None:
        """The content of a marker; None if it must be replaced. Raises ConflictError for one of another run."""
        try:
            state = MarkerState.read(found.data, self._text)
            if state.state != WRITING:
                mine.uploads = state.uploads
                return state
            self._agree(state, mine)
        except ConflictError:
            if not force:
                raise
            with suppress(ConflictError):
                theirs = MarkerState.read(found.data, self._text)
                mine.uploads = theirs.uploads
                self._check_members(theirs)
            return None
        return state

    def _agree(self, theirs: MarkerState, mine: MarkerState) -> None:
        """Raises ConflictError unless all members make the same of the same in the same way."""
        if not theirs.members:
            what = "a run without --part writes this destination, or left it incomplete"
            raise ConflictError(what, where=self._text, hint="continue that run with --resume and without --part")
        has = "with" if theirs.hashes else "without"
        texts = {
            "members": f"the other parts are {theirs.members}, this is one of {mine.members}",
            "version": f"the other parts have ckpttool {theirs.version}, this is {mine.version}",
            "plan": "the other parts have another plan: the source, or the options, or what is at the same path there,"
            " differ",
            "parts": "the other parts cut the same plan in another way",
            "hashes": f"the other parts were started {has} --manifest",
        }
        for key, text in texts.items():
            if getattr(theirs, key) != getattr(mine, key):
                hint = "give all parts the same command; to start over, end them all and use --force"
                raise ConflictError(text, where=self._text, hint=hint)

    def _begin_uploads(self, state: MarkerState, found: ObjectContent | None) -> None:
        """Hold DST until there are uploads, and then no longer. Raises HeldError when another member does it."""
        self._marker.take(state, found)
        self._state = state
        self._cut(self._plan, state.chunk)
        try:
            self._clear(state)
        finally:
            self._objects.clear()
            self._marker.release()

    def _wait(self) -> None:
        if self._asked.is_set():
            raise Stopped
        time.sleep(LOOK_EVERY)

    def _is_made(self) -> bool:
        """Whether DST was made by members with this plan: the object that comes last says so, and all are there."""
        last = max(self._plan.outputs, key=lambda o: (rank(o.name), o.size))
        written = self._head(self._keys.at(last.name))
        if written is None or not written.run.startswith(self._digest[:_DIGITS]):
            return False
        sizes = dict(self._there(self._keys.prefix))
        return all(sizes.get(self._keys.at(o.name)) == o.size for o in self._plan.outputs)

    def _take_part(self, state: MarkerState, *, verify: bool) -> MarkerState:
        """Say that this part is at work. Raises HeldError when another process does it."""
        verify = verify or self._is_to_verify(self.member.number)
        mine = replace(state, state=WRITING, uploads={}, holder=None, verify=verify)
        seen = ""
        while True:
            found = self._part.find()
            try:
                self._part.take(mine, found)
            except HeldError as e:
                if found is None or found.tag != (seen or found.tag):  # it lives
                    what = f"another process does {self.member}"
                    raise HeldError(what, where=self._text, hint="wait until it ends, or end it") from e
                seen = found.tag
                self._wait()
            else:
                return mine

    # -- work

    def beat(self) -> None:
        """From now on this process has threads, and one of them says that it lives."""
        self._part.beat()

    def make(self, path: str, size: int) -> bool:
        """The branch has done it."""
        return True

    def record(self, pool: Medium, parts: Sequence[Part], sums: Mapping[str, str]) -> None:
        assert self._branch is not None  # noqa: S101 - begin has made it
        self._branch.record(pool, parts, sums)
        self._sums |= sums
        if self._sums and time.monotonic() - self._noted > REMEMBER:
            self._note()

    def _note(self) -> None:
        """Not beside a DST that others have completed."""
        self._part.check()
        super()._note()

    def check_running(self) -> None:
        """Raises CommittedError when DST is complete, OutputError when the run has been given up."""
        found = self._marker.find()
        if found is not None and MarkerState.read(found.data, self._text).run == self._run:
            return
        if found is None and self._is_made():
            raise CommittedError
        what = "another part gave up, or another run has taken over this destination"
        raise OutputError(what, where=self._text, hint="see the messages of the other parts")

    def leave(self, pool: Medium) -> tuple[int, ...]:
        """This part is done. Returns the numbers of those that are not; if there are any, this was all."""
        assert self._mine is not None  # noqa: S101 - begin has made both
        assert self._branch is not None  # noqa: S101
        self._branch.finish(pool)
        if self._sums:
            self._note()
        self._mine.state = DONE
        self._part.put()
        self._part.release()
        waiting = [i for i in range(1, self.member.of + 1) if not self._is_done(i)]
        if waiting:
            self.check_running()
            self.close()
        return tuple(waiting)

    def _is_done(self, number: int) -> bool:
        state = self._said_by(number)
        return state is not None and state.state == DONE

    def _said_by(self, number: int) -> MarkerState | None:
        """The content of a member's marker; None where there is none of this run."""
        found = self._bucket.get(self._part_key(number))
        state = None if found is None else MarkerState.read(found.data, self._text)
        return state if state is not None and state.run == self._run else None

    def _is_to_verify(self, number: int) -> bool:
        state = self._said_by(number)
        return state is not None and state.verify

    def is_to_verify(self) -> bool:
        """Whether a member was asked to verify DST."""
        return any(self._is_to_verify(i) for i in range(1, self.member.of + 1))

    def _is_being_completed(self) -> bool:
        """Whether a member is at it, or was: it has looked what the others were asked."""
        found = self._marker.find()
        return found is None or MarkerState.read(found.data, self._text).holder is not None

    def committer(self) -> ObjectCommit:
        """All parts are done: what completes DST."""
        self._stop_sending()
        self._part.end()
        self._spool.close()
        return ObjectCommit(self.given, self._bucket, self, self._threads)

    # -- leaving

    def failed(self, error: BaseException, *, wrong: bool) -> None:
        """Note whether the input is wrong: then ``discard`` keeps nothing."""
        self.wrong = wrong

    def _stop_sending(self) -> None:
        if self._branch is not None:
            self._branch.stop()

    def close(self) -> None:
        self._stop_sending()
        if self._sums and self._mine is not None:
            with suppress(CkptError):
                self._note()
        self._part.release()
        self._part.end()
        super().close()

    def discard(self) -> None:
        """Leave nothing if the input is wrong: then no part has any use for what there is."""
        if not self.wrong or self._state is None:
            self.close()
            return
        self._stop_sending()
        self._part.end()
        with suppress(CkptError):
            found = self._marker.find()
            if found is not None and MarkerState.read(found.data, self._text).run == self._run:
                self._marker.take(self._state, found)
        super().discard()


class ObjectCommit(ObjectDestination):
    """DST for the member that completes it: a run of one process that is resumed, of which all parts were sent."""

    def __init__(self, dst: Place, bucket: Bucket, member: ObjectMember, threads: int) -> None:
        super().__init__(dst, bucket, single=member.single, threads=threads, one_of=_spool_of(member.member))
        self._ours = member
        self.is_to_verify = False
        """A member was asked to verify DST."""

    def check(self, sources: Sequence[str], roots: Sequence[str], *, force: bool, carried: Sequence[str] = ()) -> None:
        """The part has done it."""

    def check_space(self, plan: Plan) -> None:
        """It holds small objects."""

    def begin(self, beginning: Beginning) -> Finished:
        """Take over what the members have done: all that was to be sent, and all comparisons."""
        found = super().begin(beginning)
        found.parts |= {p.number for t in beginning.tasks for p in t.parts if not p.files}
        return found

    def _take(self, digest: str, parts: int, beginning: Beginning) -> tuple[MarkerState, bool]:
        """Wait until no other member is at it. Raises CommittedError when one of them has done it."""
        while True:
            self._ours.check_running()
            found = self._marker.find()
            if found is None:
                continue
            state = MarkerState.read(found.data, self._text)
            try:
                self._marker.take(state, found)
            except HeldError:
                if beginning.stop.is_set():
                    raise Stopped from None
                time.sleep(LOOK_EVERY)
                continue
            self._state = state
            self.is_to_verify = self._ours.is_to_verify()
            return state, True

    def failed(self, error: BaseException, *, wrong: bool) -> None:
        """The others have ended."""
