"""DST on a directory that several processes share, each of which does its part (``--part I/N``); nobody is in charge.

They have nothing in common but the directory that DST is to be in. All of this lies in DST.partial/ until DST is there:

    .members               what is made, in how many parts, by which version; made once, by whoever comes first
    .claim-NAME-K          claims (``claims``): part-I, prepare, commit
    .journal.I-N.TOKEN     what one attempt at a part has finished; another attempt has another one
    .failed.I-N            why the last attempt at a part failed
    .making-TOKEN/         outputs that are being made at their full size
    output/files/          the outputs. output/linked says which of them are links to a source
    output-TOKEN/files/    the same, while a part completes them
    .verify                a part was asked to verify DST: whoever completes it does
    .committing            what is about to get the name DST: its files, their sizes and times

The steps, each of which ends with what it has done on disk:

    join       take the claim of the part; another plan, number of parts or version is an error
    prepare    one of them makes the outputs in .making-TOKEN, and renames that to output: all of it, or nothing
    work       each does its share (``shares.cut``) of what no journal has, and appends to its own journal
    leave      read all journals. Not complete: done, the others will see to the rest
    commit     one of them takes the claim, renames output to output-TOKEN, writes what the journals hold of pages that
               two parts share, sums and small files, verifies, renames output-TOKEN/files to DST, and removes the rest

What holds when a process is killed, or stopped for so long that it is thought dead and comes back:

    Parts write the same bytes to the same places, so doing one again, or twice at a time, changes nothing.
    Whoever prepares works in a directory of its own, and a rename onto an output that is there fails.
    Whoever commits works in a directory of its own, too: one who was thought dead has a name that is no more, and so
    has a part that would open an output again. Of several commits one rename succeeds; the others find DST to be what
    they have worked on, and are content.

Pages of a file are written by one machine alone: see ``shares``. A failure is a file as well. The others look for it
when they record, and stop.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import shutil
import stat
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpttool.core.plan import Plan
from ckpttool.errors import ConflictError, OutputError, plain
from ckpttool.execute import journal as journals
from ckpttool.execute.destinations.base import Beginning
from ckpttool.execute.destinations.claims import PREFIX, TEMPORARY, Claim, Claims, ClaimWatch, Folder
from ckpttool.execute.destinations.holder import machine
from ckpttool.execute.destinations.local import JOURNAL, MEMBERS, LocalDestination, remove, sync_directory
from ckpttool.execute.files import SHARED, Medium, sync_all, write_error
from ckpttool.execute.journal import Edge, Finished, Journal
from ckpttool.execute.options import Member
from ckpttool.execute.schedule import Part, Task, operand_keys
from ckpttool.execute.shares import TaskSurvey
from ckpttool.version import __version__

COMMITTING = ".committing"
VERIFY = ".verify"
_FAILED = ".failed."
_MAKING = ".making-"
_OUTPUT = "output"
_FILES = "files"
_LINKED = "linked"
_LOOK_EVERY = 2.0
"""Seconds between two looks for failures of others."""
_AS_IT_IS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_OWN = (MEMBERS, COMMITTING, VERIFY, PREFIX, TEMPORARY, f"{JOURNAL}.", _FAILED, _MAKING, _OUTPUT)


class PeerError(OutputError):
    """Another part has failed, so this one ends as well."""

    def __init__(self, failure: PartFailure, where: str) -> None:
        super().__init__(f"{failure.part} failed on {failure.host}: {failure.what}", where=where)
        self.wrong = failure.wrong


class CommittedError(Exception):
    """Another part has completed DST: ends the work of this one."""


@dataclass(frozen=True, slots=True)
class PartFailure:
    """Why an attempt at a part has failed."""

    token: str
    part: str
    host: str
    what: str
    wrong: bool
    """The input is wrong: trying again would not help."""

    @classmethod
    def read(cls, data: bytes) -> PartFailure | None:
        try:
            said = json.loads(data)
            part, host, what = said["part"][:80], said["host"][:80], said["what"][:1000]  # other people's, to be shown
            failure = cls(said["token"], part, host, what, said["wrong"])
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        texts = failure.token, failure.part, failure.host, failure.what
        return failure if all(type(t) is str for t in texts) else None


class SharedPartial:
    """DST.partial/ as all members of a run share it: who takes part, what failed, what is finished."""

    def __init__(self, destination: LocalDestination, member: Member) -> None:
        self.member = member
        self.dst = destination.path
        self.single = destination.single
        self.path = destination.partial
        self.folder = Folder(-1, str(self.path))
        self.claims = Claims(self.folder, "")
        self.parts = 0
        self._made = -1
        """What becomes DST: a descriptor that stays the same whatever its name is."""
        self._committing: dict[str, list[int]] = {}
        """The files of what was about to become DST when this process came."""
        self._agreed = False
        self._identity: dict[str, Any] = {}
        self._known: set[str] = set()
        self._looked = 0.0

    # -- joining

    def enter(self, share: Callable[[], int]) -> None:
        """Make the directory, or find it; ``share`` opens it.

        Raises OutputError when a run that is no member holds it, or has left it.
        """
        for _ in range(10):
            with contextlib.suppress(FileExistsError):
                self.path.mkdir()
            with contextlib.suppress(FileNotFoundError):  # somebody else has removed it
                self.folder.fd = share()
                break
        else:
            raise OutputError(
                "other processes keep removing the partial destination", where=str(self.path), hint="repeat the command"
            )
        self.watch_made()
        strange = sorted(n for n in self.folder.names() if not n.startswith(_OWN))
        if strange:
            what = "a run without --part left a partial destination"
            way = f"remove it: rm -r {shlex.quote(str(self.path))}"
            hint = f"continue that run with --resume and without --part, or {way}"
            raise OutputError(what, where=str(self.path / strange[0]), hint=hint)

    def agree(self, plan: Plan, parts: int, hashes: Sequence[str]) -> None:
        """Raises ConflictError unless all members make the same of the same in the same way."""
        digest, of = plan.digest(), self.member.of
        mine = {"plan": digest, "parts": parts, "of": of, "version": __version__, "hashes": [*hashes]}
        by = {"host": os.uname().nodename, "pid": os.getpid(), "part": self.member.number}
        self._identity = {"members": 1, **mine, **by}
        self.claims.plan, self.parts = digest, parts
        found = self.folder.read(MEMBERS) or self.folder.read(COMMITTING)
        if found is None:
            self.folder.put_new(MEMBERS, json.dumps(self._identity).encode() + b"\n")
            found = self.folder.read(MEMBERS)
        said: Any = None
        with contextlib.suppress(ValueError, RecursionError):
            said = json.loads(found or b"")
        if not isinstance(said, dict) or said.get("members") != 1:
            raise self._conflict("cannot continue the run of the other parts: their record is unreadable")
        shown = {key: str(value)[:80] for key, value in said.items()}
        who = f"part {shown.get('part')} on {shown.get('host')}"
        texts = {
            "of": f"{who} is one of {shown.get('of')}, this is one of {self.member.of}",
            "version": f"{who} has ckpttool {shown.get('version')}, this is {__version__}",
            "plan": f"{who} has a different plan: SRC, the options, or the files at the same path differ",
            "parts": f"{who} cuts the same plan into other parts",
            "hashes": f"{who} was started {'with' if 'xxh3_128' in shown.get('hashes', '') else 'without'} --manifest",
        }
        for key, text in texts.items():
            if said.get(key) != mine[key]:
                raise self._conflict(text)
        self._agreed = True

    def _conflict(self, what: str) -> ConflictError:
        hint = f"give all parts the same command; to start over, end them all and rm -r {shlex.quote(str(self.path))}"
        return ConflictError(plain(what), where=str(self.path), hint=hint)

    def take_part(self) -> Claim:
        """Raises OutputError when another process does this part."""

        def refuse(watch: ClaimWatch) -> bool:
            found = watch.holder.holder
            if watch.beats or (found is not None and found.machine == machine()):
                raise OutputError(
                    f"another process does {self.member}: {watch.holder}",
                    where=str(self.path),
                    hint="wait until it ends, or end it",
                )
            return False

        claim = self.claims.take(f"part-{self.member.number}", refuse)
        assert claim is not None  # noqa: S101 - it waits, or raises
        return claim

    def ask_verify(self) -> bool:
        """Ask the part that completes DST to verify it. False if that part has begun already, and no longer looks."""
        self.folder.put_new(VERIFY, b"")
        # One look: all of it may be removed at any time, this request before the record of DST.
        names = self.fresh_names()
        begun = COMMITTING in names or any(n.startswith(f"{_OUTPUT}-") for n in names)
        return VERIFY in names and (_OUTPUT in names or not begun)

    # -- what there is

    def fresh_names(self) -> list[str]:
        """All names, also those that another machine has made just now: a change of one's own makes the cache of a
        network filesystem read them anew."""
        self.folder.touch()
        return self.folder.names()

    def output(self) -> str:
        """The name of the directory of outputs; "" before they are made, and when they are DST."""
        return next((n for n in self.fresh_names() if n == _OUTPUT or n.startswith(_OUTPUT + "-")), "")

    def union(self) -> Finished:
        """The finished work of all journals together."""
        found = Finished()
        for name in sorted(self.fresh_names()):
            if name.startswith(f"{JOURNAL}."):
                said = journals.read(self.folder.read(name, sys.maxsize) or b"", self.claims.plan, self.parts)
                found.parts |= said.parts
                found.sums.update(said.sums)
                found.edges += said.edges
        return found

    def came(self) -> set[int]:
        """Numbers of the parts that have a journal."""
        names = [n.removeprefix(f"{JOURNAL}.") for n in self.folder.names() if n.startswith(f"{JOURNAL}.")]
        return {int(number) for name in names if (number := name.partition("-")[0]).isdecimal()}

    def watch_made(self) -> None:
        """Remember what is to become DST, whatever name it gets.

        What has its place when it is DST already may be what was DST before; so its files decide.
        """
        opened = False
        if self._made < 0 and (name := self.output()):
            made = f"{name}/{_FILES}"
            if self.single:
                made += f"/{self.dst.name}"
            with contextlib.suppress(FileNotFoundError):
                self._made = os.open(made, _AS_IT_IS, dir_fd=self.folder.fd)
                opened = True
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            self._committing = dict(json.loads(self.folder.read(COMMITTING) or b"{}")["files"])
        if opened and self._committing and not self._is_committing(self._made):
            os.close(self._made)
            self._made = -1

    def _is_committing(self, fd: int) -> bool:
        """Whether this is what was about to become DST, by its files: the inode of a DST that was removed is given to
        the next directory."""
        try:
            return bool(self._committing) and _files(fd) == self._committing
        except OSError:  # it is being removed
            return False

    def say_committing(self) -> None:
        """Record the files that are about to become DST, and their plan."""
        said = self._identity | {"files": _files(self._made)}
        self.folder.put(COMMITTING, json.dumps(said).encode() + b"\n")

    def is_committed(self) -> bool:
        """Whether DST is what the members made."""
        try:
            fd = os.open(self.dst, _AS_IT_IS)
        except OSError:
            return False
        try:
            same = os.path.samestat(os.fstat(self._made), os.fstat(fd)) if self._made >= 0 else self._is_committing(fd)
        finally:
            os.close(fd)
        return self._agreed and same

    def check_known(self) -> None:
        """Raises ConflictError when what was about to get the name DST is nowhere."""
        if self._committing and self._made < 0:
            raise self._conflict("a part was stopped in its last step, and its output is gone")

    # -- failures

    def know_failures(self) -> None:
        """Forget the failure of an earlier attempt at this part; those of others are no news."""
        self.folder.remove(f"{_FAILED}{self._own}")
        self._known = {f.token for f in self._failures()}

    def check_failures(self) -> None:
        """Raises PeerError when another part has failed since this one began. Looks now and then only."""
        if time.monotonic() - self._looked < _LOOK_EVERY:
            return
        self._looked = time.monotonic()
        for failure in self._failures():
            if failure.token not in self._known:
                raise PeerError(failure, str(self.path))

    def fail(self, error: BaseException, *, wrong: bool) -> None:
        """Tell the others."""
        what = error.what if isinstance(error, OutputError | ConflictError) else str(error).split("\n")[0]
        said = {"token": uuid.uuid4().hex, "part": str(self.member), "host": os.uname().nodename}
        with contextlib.suppress(OSError):
            self.folder.put(
                f"{_FAILED}{self._own}", json.dumps(said | {"what": what or repr(error), "wrong": wrong}).encode()
            )

    def _failures(self) -> list[PartFailure]:
        names = [n for n in self.folder.names() if n.startswith(_FAILED) and n != f"{_FAILED}{self._own}"]
        found = [PartFailure.read(self.folder.read(n) or b"") for n in sorted(names)]
        return [f for f in found if f is not None]

    @property
    def _own(self) -> str:
        return f"{self.member.number}-{self.member.of}"

    # -- leaving

    def close(self) -> None:
        for fd in (self._made, self.folder.fd):
            if fd >= 0:
                os.close(fd)
        self._made = self.folder.fd = -1

    def is_pointless(self) -> bool:
        """Whether nothing was begun here that could be continued, and nothing is anybody else's."""
        with contextlib.suppress(OSError):
            return all(n.startswith((MEMBERS, VERIFY, PREFIX, TEMPORARY)) for n in self.folder.names())
        return False

    def clear_if_last(self) -> None:
        """Remove everything, unless somebody else is there. The own claims are let go."""
        with contextlib.suppress(OSError, OutputError):
            holders = [f.holder for f in self.claims.all()]
            if not all(h is not None and h.is_gone() for h in holders):
                return
            try:
                fcntl.flock(self.folder.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            except OSError:
                pass  # a filesystem without locks: the claims have to do
            self.remove_all()

    def remove_all(self) -> None:
        """What says what has become DST goes last: until then it is known what the rest is."""
        if not os.path.samestat(os.fstat(self.folder.fd), self.path.lstat()):
            return  # another run's by now
        last = (MEMBERS, COMMITTING)
        for name in [*(n for n in self.folder.names() if n.startswith(_OWN) and n not in last), *last]:
            with contextlib.suppress(FileNotFoundError):
                remove(self.path / name)
        self.path.rmdir()


class _SharedDestination(LocalDestination, ABC):
    """A destination at which others are, too: how a process leaves it."""

    common: SharedPartial
    wrong = False
    """Whether the input is wrong: then what has been written is of no use to a later run."""

    @abstractmethod
    def _take_claims(self) -> Sequence[Claim | None]:
        """The claims of this process, which forgets them: the caller releases them."""

    @property
    def locks(self) -> list[int]:
        return [fd for fd in (self.common.folder.fd,) if fd >= 0]

    def failed(self, error: BaseException, *, wrong: bool) -> None:
        """Tell the other members that this one failed: they stop. ``wrong``: the input is wrong (``discard``)."""
        self.wrong = wrong
        if self.common.folder.fd >= 0:
            self.common.fail(error, wrong=wrong)

    def close(self) -> None:
        self._leave(clear=False)

    def discard(self) -> None:
        """Leave nothing if the input is wrong and nobody else is there; the work of others stays."""
        self._leave(clear=self.wrong)

    def _leave(self, *, clear: bool) -> None:
        self._close_journal()
        for claim in self._take_claims():
            if claim is not None:
                claim.release()
        if self.common.folder.fd >= 0:
            if clear:
                self.common.clear_if_last()
            self.common.close()

    def _close_journal(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class MemberDestination(_SharedDestination):
    """DST for a process that does its part; ``committer`` is what it is for the one that completes it."""

    def __init__(self, dst: Path, member: Member, *, single: bool = False) -> None:
        super().__init__(dst, single=single)
        self.member = member
        self.common = SharedPartial(self, member)
        self.pages: dict[int, list[int]] = {}
        """The pages of each output that this part must not write."""
        self.edges: Callable[[], Sequence[Edge]] = list
        """What it has kept instead since this was last called."""
        self.verify_is_known = False
        """The part that completes DST knows that this one was asked to verify it."""
        self._plan: Plan
        self._tasks: Sequence[Task] = ()
        self._shares: list[list[int]] = []
        self._part: Claim | None = None
        self._prepare: Claim | None = None
        self._linked: dict[int, str] = {}

    def share(self) -> int:
        """A descriptor of the directory that all members lock together, and a run that is no member does not get."""
        self._directory = self._locked(self.partial, os.O_RDONLY | os.O_DIRECTORY, fcntl.LOCK_SH)
        self._check_owner()
        fd, self._directory = self._directory, -1
        return fd

    def check_absent(self, *, force: bool, appeared: bool = False) -> None:
        if self.common.path.exists() and self.common.folder.fd < 0:
            return  # parts may have ended while they gave it its name: `begin` finds out
        super().check_absent(force=force, appeared=appeared)

    def check_space(self, plan: Plan) -> None:
        """Does nothing: the part that prepares the outputs checks for all."""

    def begin(self, beginning: Beginning) -> Finished:
        """Join the others, and hear what all have finished. Raises CommittedError when DST is made already."""
        self._plan, self._tasks = beginning.plan, beginning.tasks
        hashes = sorted({k.partition(":")[2] or "xxh3_128" for t in self._tasks for k, _ in t.targets})
        parts = sum([len(t.parts) for t in self._tasks])
        common = self.common
        try:
            common.enter(self.share)
            common.agree(self._plan, parts, hashes)
            self._part = common.take_part()
            self._settle_committing(force=beginning.force)
            super().check_absent(force=beginning.force)
            common.know_failures()
            self.verify_is_known = beginning.verify and common.ask_verify()
            survey = TaskSurvey(self._plan, self._tasks)
            self._shares = survey.cut(self.member.of)
            self.pages = survey.shared_pages(self._shares)[self.member.number - 1]
            self.partial = common.path / _OUTPUT / _FILES
            self._paths = [self.partial / o.name for o in self._plan.outputs]
            return self._to_continue(common.union())
        except BaseException as e:
            committed = isinstance(e, OSError) and common.is_committed()
            self._close_journal()
            self._leave(clear=common.is_pointless())
            if committed:
                raise CommittedError from None
            if isinstance(e, OSError):
                raise gone(e, self.common.path) from e
            raise

    def _to_continue(self, found: Finished) -> Finished:
        """What of this is not to be done again. A tensor that is hashed, or computed, is done whole where it touches
        pages that are kept: what is there of it is not in the files, from which it would be read.
        """
        for number in self.own:
            task = self._tasks[number]
            kept = any(file in self.pages for p in task.parts for file in p.files)
            if kept and (task.targets or task.computing >= 0) and not self._is_done([number], found):
                found.parts -= {p.number for p in task.parts}
        return found

    def _settle_committing(self, *, force: bool) -> None:
        """Find out what became of a commit whose process ended in its last step."""
        common = self.common
        if not common.is_committed():
            common.check_known()
            return
        with contextlib.suppress(OSError):  # who has done it removes it as well
            if common.claims.take("commit", lambda _: not common.path.exists()):
                self._put_back(force=force)
                common.remove_all()
        raise CommittedError

    def _begin_journal(self) -> None:
        parts = sum([len(t.parts) for t in self._tasks])
        assert self._part is not None  # noqa: S101 - begin has taken it
        name = f"{JOURNAL}.{self.member.number}-{self.member.of}.{self._part.me.token[:16]}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._fd = os.open(name, flags, 0o666, dir_fd=self.common.folder.fd)
        self._journal = Journal(self._fd, str(self.common.path / name))
        self._journal.begin(self._plan.digest(), parts)

    # -- work

    @property
    def own(self) -> list[int]:
        """Numbers of this part's tasks."""
        return self._shares[self.member.number - 1]

    def beat(self) -> None:
        """Start the thread that reports that this process is alive; threads are allowed from now on."""
        if self._part is not None:
            self._part.beat()

    def check_lately(self) -> None:
        """Raises TakenOverError in a process that was stopped for so long that another one does its part."""
        if self._part is not None:
            self._part.check_lately()

    def prepare(self, make: Callable[[Path], Mapping[int, str]]) -> dict[int, str]:
        """Have the outputs made by one of the parts. ``make`` makes them below a directory and says which of them it
        could link, and how; that is returned, whoever has done it.
        """
        common = self.common
        try:
            if not common.output():
                self._prepare = common.claims.take("prepare", self._is_prepared)
            if self._prepare is not None:
                self._prepare.beat()
                if not common.output():
                    super().check_space(self._plan)
                    self._make(make)
                self._prepare.release()
                self._prepare = None
            name = common.output()
            if not name and common.is_committed():
                raise CommittedError
            common.watch_made()
            # Not before: with a journal, a part that has nothing to do is no longer waited for, and has to know DST.
            self._begin_journal()
            self._linked = self._read_linked(common.folder.read(f"{name}/{_LINKED}") or b"[]")
        except OSError as e:
            raise gone(e, self.common.path) from e
        for i, output in enumerate(self._plan.outputs):
            path = str(common.path / name / _FILES / output.name)
            check_made(path, output.size, common.path, linked=i in self._linked)
        return self._linked

    def _read_linked(self, data: bytes) -> dict[int, str]:
        """The outputs that share their bytes with a source, and how."""
        outputs = self._plan.outputs
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            found = [(i, how) for i, how in json.loads(data)]
            if all(type(i) is int and 0 <= i < len(outputs) and outputs[i].link and how in SHARED for i, how in found):
                return dict(found)
        raise _changed("the output of the parts cannot be read", self.common.path / _OUTPUT / _LINKED, self.common.path)

    def _is_prepared(self, _watch: ClaimWatch) -> bool:
        self.common.check_failures()
        return bool(self.common.output())

    def _make(self, make: Callable[[Path], Mapping[int, str]]) -> None:
        """Make the outputs where nobody else looks, then give them their name."""
        common, claim = self.common, self._prepare
        assert claim is not None  # noqa: S101 - the caller has it
        if common.union().parts:
            what = "the output of the parts is gone, although they recorded it"
            raise _changed(what, common.path / _OUTPUT, common.path)
        for name in common.folder.names():
            if name.startswith(_MAKING):
                shutil.rmtree(common.path / name, ignore_errors=True)
        making = common.path / f"{_MAKING}{claim.me.token}"
        files = making / _FILES
        files.mkdir(parents=True)
        linked = make(files)
        inside = Folder(os.open(making, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), str(making))
        try:
            inside.put(_LINKED, json.dumps([*linked.items()]).encode())
        finally:
            os.close(inside.fd)
        for directory in [Path(d) for d, _, _ in os.walk(making, topdown=False)]:
            sync_directory(directory)
        claim.check()
        with contextlib.suppress(FileExistsError, OSError):
            making.rename(common.path / _OUTPUT)
        common.folder.sync()
        if not common.output():
            raise OutputError("cannot rename the outputs", where=str(making))
        shutil.rmtree(making, ignore_errors=True)  # somebody who took this process for dead was first

    def record(self, pool: Medium, parts: Sequence[Part], sums: Mapping[str, str]) -> None:
        """Sync the files, then say so in the own journal, with the bytes that were kept back."""
        with shared_errors(self.common.path):
            self.common.check_failures()
        if self._part is not None:
            self._part.check()
        edges = self.edges()
        sync_all(pool, [str(self._paths[file]) for file in sorted({file for p in parts for file in p.files})])
        self._journal.append([p.number for p in parts], sums, edges)

    def leave(self) -> tuple[int, ...]:
        """This part is done. Returns the numbers of those that are not; if there are any, this was all.

        A part that has nothing to do is waited for as well: it would come when DST is there, and find it in its way.
        """
        with shared_errors(self.common.path):
            found, came = self.common.union(), self.common.came()
        done = {i for i, share in enumerate(self._shares, 1) if i in came and self._is_done(share, found)}
        waiting = tuple(i for i in range(1, self.member.of + 1) if i not in done)
        if self.member.number in waiting:
            what = "the record of this part is gone"
            raise OutputError(what, where=str(self.common.path), hint="find out what removed it")
        if waiting:
            self.close()
        return waiting

    def _is_done(self, share: Sequence[int], found: Finished) -> bool:
        for number in share:
            task = self._tasks[number]
            keys = [key for key, _ in task.targets]
            if task.computing >= 0:
                keys += operand_keys(self._plan, task.computing)
            if any(p.number not in found.parts and p.carried not in self._linked for p in task.parts):
                return False
            if any(k not in found.sums for k in keys):
                return False
        return True

    def committer(self) -> CommitDestination:
        """All parts are done: what completes DST."""
        self._close_journal()
        linked = {p.number for t in self._tasks for p in t.parts if p.carried in self._linked}
        made = CommitDestination(self.given, self.common, self._part, linked)
        made.linked_outputs = {self._plan.outputs[i].name for i in self._linked}
        self.common, self._part = SharedPartial(self, self.member), None
        return made

    def _take_claims(self) -> Sequence[Claim | None]:
        claims = self._prepare, self._part
        self._prepare = self._part = None
        return claims


class CommitDestination(_SharedDestination):
    """DST for the part that completes it: all is written, in all journals together."""

    def __init__(self, dst: Path, common: SharedPartial, part: Claim | None, linked: set[int]) -> None:
        super().__init__(dst, single=common.single)
        self.common = common
        self._part = part
        self._linked = linked
        self.linked_outputs: set[str] = set()
        """The outputs that share their bytes with a source."""
        self.is_to_verify = False
        """A part was asked to verify DST."""
        self._commit: Claim | None = None
        self._edges: list[Edge] = []

    def check(self, sources: Sequence[str], roots: Sequence[str], *, force: bool, carried: Sequence[str] = ()) -> None:
        """The part has done it."""

    def check_space(self, plan: Plan) -> None:
        """There is what there will be."""

    def begin(self, beginning: Beginning) -> Finished:
        """Wait until no other part is at it. Raises CommittedError when one of them has done it."""
        common = self.common
        try:
            self._commit = common.claims.take("commit", self._is_over)
            if self._commit is None or common.is_committed():
                raise CommittedError
            self._commit.beat()
            name, mine = common.output(), f"{_OUTPUT}-{self._commit.me.token}"
            (common.path / name).rename(common.path / mine)
            common.folder.sync()
            self.is_to_verify = VERIFY in common.fresh_names()
            self.partial = common.path / mine / _FILES
            self._paths = [self.partial / o.name for o in beginning.plan.outputs]
            self._put_back(force=beginning.force)
            found = common.union()
            self._check_edges(beginning.plan, found.edges)
        except BaseException as e:
            committed = isinstance(e, CommittedError | OSError) and common.is_committed()
            if committed and self._commit is not None:
                with contextlib.suppress(OSError):  # whoever has done it was killed before this
                    common.remove_all()
            self.close()
            if committed:
                raise CommittedError from None
            if isinstance(e, OSError):
                raise gone(e, common.path) from e
            raise
        self._edges = found.edges
        return Finished(found.parts | self._linked, found.sums)

    def _is_over(self, _watch: ClaimWatch) -> bool:
        if self.common.is_committed():
            return True
        self.common.check_failures()
        return False

    def _check_edges(self, plan: Plan, edges: Sequence[Edge]) -> None:
        """Raises ConflictError for bytes that no part of this plan can have kept."""
        outputs = plan.outputs
        for file, at, data in edges:
            if file >= len(outputs) or at + len(data) > outputs[file].size or outputs[file].name in self.linked_outputs:
                raise _changed("the record of a part does not match its output", self.common.path, self.common.path)

    def make(self, path: str, size: int) -> bool:
        """Does nothing: the output exists."""
        name = Path(path).relative_to(self.partial).as_posix()
        check_made(path, size, self.common.path, linked=name in self.linked_outputs)
        return True

    def record(self, pool: Medium, parts: Sequence[Part], sums: Mapping[str, str]) -> None:
        """All of it is in the journals."""

    def settle(self, pool: Medium, paths: Sequence[str]) -> None:
        """Write the bytes of pages that several parts share, then sync everything."""
        for file, at, data in self._edges:
            pool.write(paths[file], at, memoryview(data))
        super().settle(pool, paths)

    def seal(self) -> None:
        """Only the rename is missing; should it fail half way, what is renamed is known again."""
        common = self.common
        assert self._commit is not None  # noqa: S101 - begin has taken it
        try:
            self._commit.check()
            for directory in self._directories():
                sync_directory(directory)
            common.say_committing()
        except OSError as e:
            raise write_error(e, str(common.path), 0, 0) from e

    def publish(self, *, force: bool) -> str | None:
        common, note = self.common, None
        try:
            try:
                note = self._put_in_place(force=force)
            except OutputError:
                if not common.is_committed():
                    if self._commit is not None:
                        self._commit.check()
                    raise
            try:
                common.remove_all()
            except OSError as e:
                left = f"cannot remove the shared files of the parts: {common.path}: {e.strerror}"
                note = f"{note}; {left}" if note else left
        finally:
            self.close()
        return note

    @property
    def can_record(self) -> bool:
        return False

    def _take_claims(self) -> Sequence[Claim | None]:
        claims = self._commit, self._part
        self._commit = self._part = None
        return claims


def _files(fd: int) -> dict[str, list[int]]:
    """Size and time of the last change (ns) of every file below an open directory, or of an open file."""
    info = os.fstat(fd)
    if not stat.S_ISDIR(info.st_mode):
        return {"": [info.st_size, info.st_mtime_ns]}
    found = {}
    for directory, _, names, at in os.fwalk(".", dir_fd=fd):
        for name in names:
            info = os.stat(name, dir_fd=at, follow_symlinks=False)
            found[os.path.normpath(f"{directory}/{name}")] = [info.st_size, info.st_mtime_ns]
    return found


def check_made(path: str, size: int, shared: Path, *, linked: bool) -> None:
    """Raises ConflictError when an output is not what was prepared: another size, or a way to a file elsewhere."""
    inside = Path(path).relative_to(shared).parents
    own = all(stat.S_ISDIR(_status(shared / p)[0]) for p in inside)
    mode, found, names = _status(Path(path))
    if not own or not stat.S_ISREG(mode) or found != size or (names > 1 and not linked):
        raise _changed("something else changed an output of the parts", path, shared)


def _status(path: Path) -> tuple[int, int, int]:
    """Mode, size and number of names of a file itself, no link followed; zeros where there is none."""
    try:
        found = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return 0, 0, 0
    return found.st_mode, found.st_size, found.st_nlink


def _changed(what: str, where: str | Path, shared: Path) -> ConflictError:
    hint = f"remove the output and run all parts again: rm -r {shlex.quote(str(shared))}"
    return ConflictError(what, where=str(where), hint=hint)


@contextlib.contextmanager
def shared_errors(directory: Path) -> Iterator[None]:
    """Turn OSErrors on the shared directory into OutputErrors."""
    try:
        yield
    except OSError as e:
        raise gone(e, directory) from e


def gone(e: OSError, directory: Path) -> OutputError:
    """The OutputError for an OSError on the shared directory."""
    if isinstance(e, FileNotFoundError):
        what = "the partial destination is gone: another part or another user removed it"
        return OutputError(what, where=str(directory), hint="see why, and repeat the command")
    return write_error(e, str(directory), 0, 0)
