"""A destination on this machine: a directory that is absent, or complete.

Everything is written in ``DST.partial/``. One rename makes it DST; when DST is to be replaced, the two exchange their
names and the old one is deleted last. A crash leaves

    before the rename   DST.partial/ with a journal: ``--resume`` goes on, ``--force`` starts over; DST is untouched
    after the rename    DST complete; what was DST.partial/ holds the old DST, and ``--force`` clears it

Where the filesystem cannot exchange names (NFS, FUSE), the old DST is called ``.DST.ckpttool-replaced`` in between.
When a crash leaves it so, and no DST, the next run first gives it its name back.

The journal is also the lock: whoever holds it writes this destination.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shlex
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.core.files import Place
from ckpttool.core.plan import Plan
from ckpttool.core.words import short
from ckpttool.errors import OutputError
from ckpttool.execute.destinations.base import Beginning
from ckpttool.execute.files import Fence, Medium, create, sync_all, write_error
from ckpttool.execute.journal import Finished, Journal, writer
from ckpttool.execute.schedule import Part
from ckpttool.storage import system
from ckpttool.storage.place import parse_place

if TYPE_CHECKING:  # a run on one machine needs neither
    from ckpttool.execute.fleets.base import Answer, Order
    from ckpttool.execute.shares import TaskSurvey

JOURNAL = ".journal"
RUN = ".run"
"""In it the name of a run to which other machines belong; they look whether it is still there."""
LEAST_SHARE = 16 << 20
"""Bytes."""
MEMBERS = ".members"
"""Is there when parts (--part) make DST: see ``members``."""
MANIFEST = "ckpttool.manifest.json"
SLACK = 16 << 20
"""Free space that stays beside the output: directories, journal, the filesystem's own records."""
PATIENCE = 5.0
"""Seconds to wait for a lock. Workers of a run that was killed hold it until they are gone too: they could write."""


class DiskSpace(NamedTuple):
    """What a run adds to the file system of DST; to another machine it uploads as much."""

    needed: int
    """Bytes."""
    free: int | None
    """Bytes; None where it is not known: on another machine, and without a parent directory of DST."""
    replaces: bool
    """Whether there is a DST, which stays until the new one is complete."""

    @property
    def fits(self) -> bool | None:
        """Whether a run would begin; None where it is not known."""
        return None if self.free is None else self.needed <= 0 or self.free >= self.needed + SLACK


def disk_space(plan: Plan, dst: Place) -> DiskSpace:
    """The space that a run needs at ``dst``, before it writes anything."""
    if isinstance(dst, Path):
        return LocalDestination(dst).space(plan)
    return DiskSpace(_written_bytes(plan), None, replaces=False)


def _written_bytes(plan: Plan) -> int:
    return sum(o.size for o in plan.outputs if not o.link)


class LocalDestination:
    """DST and the directory it is built in. ``single``: DST is to be the only file of that directory."""

    spools = False
    proposes = False
    shared = True
    resumes = True

    def __init__(self, dst: Path, *, single: bool = False) -> None:
        self.given = dst
        self.single = single
        parent = Path(os.path.realpath(dst.parent))
        if dst.name in ("", ".", ".."):
            resolved = Path(os.path.realpath(dst))
            parent, name = resolved.parent, resolved.name
        else:
            name = dst.name
        self.path = parent / name
        self.partial, self.replaced = self.path, self.path
        if name:
            self.partial = system.beside(self.path, after=".partial")
            self.replaced = system.beside(self.path, ".", ".ckpttool-replaced")
        self._fd = -1
        self._directory = -1

    # -- checks, before anything is written

    def check(self, sources: Sequence[str], roots: Sequence[str], *, force: bool, carried: Sequence[str] = ()) -> None:
        """Raises OutputError when DST must not or cannot be written.

        It may not hold a source or a companion, nor lie in one of ``roots`` (by default where the sources are).
        """
        parent = self.path.parent
        if not self.path.name:
            raise OutputError("the destination has no name", where=str(self.given))
        if not parent.is_dir():
            if parent.exists():
                raise OutputError("the parent of DST is a file, not a directory", where=str(parent))
            what = "the parent directory of DST does not exist"
            raise OutputError(what, where=str(parent), hint=f"mkdir -p {shlex.quote(str(parent))}")
        if not os.access(parent, os.W_OK | os.X_OK):
            what = "the parent directory of DST is not writable"
            raise OutputError(what, where=str(parent), hint="choose a DST in a directory that you may write")
        longest = system.longest_name(parent)
        if len(os.fsencode(self.path.name)) > longest:
            what = f"the name of the destination is longer than the {longest} bytes that the filesystem allows"
            raise OutputError(what, where=str(self.given), hint="choose a shorter name")
        resolved = [os.path.realpath(s) for s in _local(sources)]
        holders = [os.path.realpath(r) for r in _local(roots)] or sorted({str(Path(s).parent) for s in resolved})
        self._check_apart([*resolved, *[os.path.realpath(c) for c in _local(carried)]], holders)
        if self.single and self.path.is_dir():
            raise OutputError("DST must be a file, but is a directory", where=str(self.given))
        self.check_absent(force=force)
        if os.path.lexists(self.path) and not self._is_empty_directory():
            if not (self.path.is_symlink() or self.path.is_dir() or self.path.is_file()):
                what = "the destination is a device, a pipe or a socket, and is not replaced"
                raise OutputError(what, where=str(self.given))
            here = Path(os.path.realpath(Path.cwd()))
            if here.is_relative_to(self.path):
                what = "the destination holds the current directory and is not replaced"
                raise OutputError(what, where=str(self.given))

    def check_absent(self, *, force: bool, appeared: bool = False) -> None:
        """Raises OutputError when there is a DST that is not to be replaced; ``appeared`` since the run began."""
        if force or not os.path.lexists(self.path) or (not self.single and self._is_empty_directory()):
            return
        what = "the destination appeared during the run" if appeared else "the destination exists"
        raise OutputError(what, where=str(self.given), hint="choose another DST, or use --force to replace it")

    def _check_apart(self, sources: Sequence[str], holders: Sequence[str]) -> None:
        for target in {self.path, self.partial, Path(os.path.realpath(self.path))}:
            for s in [*sources, *holders]:
                if Path(s).is_relative_to(target):
                    same = str(target) in holders and target.is_dir()
                    what = "SRC and DST are the same" if same else "SRC is inside DST"
                    raise OutputError(what, where=[str(self.given), s], hint="choose another DST")
            for holder in holders:
                if Path(holder).is_dir() and target.is_relative_to(holder):
                    what = "DST is inside SRC"
                    raise OutputError(what, where=[str(self.given), holder], hint="choose a DST outside")

    def _is_empty_directory(self) -> bool:
        try:
            return not self.path.is_symlink() and not any(self.path.iterdir())
        except OSError:
            return False

    def check_space(self, plan: Plan) -> None:
        """Raises OutputError when the filesystem has less room than the outputs need."""
        space = self.space(plan)
        if space.fits is False:
            raise OutputError(
                f"not enough space: {short(space.needed)} and {SLACK >> 20} MiB to spare are needed,"
                f" {short(space.free or 0)} are free",
                where=str(self.path.parent),
                hint="free some space, or choose a DST on another disk",
            )

    def space(self, plan: Plan) -> DiskSpace:
        """The space that a plan needs; what an interrupted run has written is there already."""
        needed = _written_bytes(plan) - allocated(self.partial)
        try:
            st = os.statvfs(self.path.parent)
        except OSError:
            return DiskSpace(needed, None, replaces=False)
        replaces = os.path.lexists(self.path) and not self._is_empty_directory()
        return DiskSpace(needed, st.f_bavail * st.f_frsize, replaces)

    # -- other machines

    @property
    def least_share(self) -> int:
        return LEAST_SHARE

    def branch(self) -> Mapping[str, Any]:
        token = uuid.uuid4().hex
        path = self.partial / RUN
        try:
            path.write_text(token, encoding="ascii")
        except OSError as e:
            raise write_error(e, str(path), 0, len(token)) from e
        return {"scheme": "", "partial": str(self.partial), "run": token}

    def orders(self, survey: TaskSurvey, shares: Sequence[Sequence[int]], finished: Finished) -> list[Order]:
        orders: list[Order] = []
        for share, pages in zip(shares, survey.shared_pages(shares), strict=True):
            parts = [p.number for t in share for p in survey.tasks[t].parts]
            done = [n for n in parts if n in finished.parts]
            orders.append({"tasks": list(share), "done": done, "hold": [[f, some] for f, some in pages.items()]})
        return orders

    def remember(self, parts: Sequence[Part], answer: Answer) -> None:
        self._journal.append([p.number for p in parts], answer["sums"])

    # -- the partial directory

    def begin(self, beginning: Beginning) -> Finished:
        """Lock the partial directory; read or start its journal. Raises as ``_open`` and ``Journal.load`` do."""
        plan, resume = beginning.plan, beginning.resume
        names = [*(o.name for o in plan.outputs), *beginning.late, MANIFEST]
        left = self._open({Path(n).parts[0] for n in names}, force=beginning.force, resume=resume)
        digest, parts = plan.digest(), sum([len(t.parts) for t in beginning.tasks])
        self._journal = Journal(self._fd, str(self.partial))
        self._paths = [self.partial / o.name for o in plan.outputs]
        try:
            if not left:
                return self._journal.begin(digest, parts)
            finished = self._journal.load(digest, parts)
            self._journal.sign()
        except BaseException:
            if left:
                self.close()
            else:
                self.discard()
            raise
        return finished

    def make(self, path: str, size: int) -> bool:
        """A file that was not there at its full size cannot hold what the journal says."""
        return create(path, size)

    def record(self, pool: Medium, parts: Sequence[Part], sums: Mapping[str, str]) -> None:
        """Sync the files, then say so in the journal."""
        for file in sorted({file for p in parts for file in p.files}):
            pool.sync(str(self._paths[file]))
        self._journal.append([p.number for p in parts], sums)

    def settle(self, pool: Medium, paths: Sequence[str]) -> None:
        sync_all(pool, paths, metadata=True)

    def complete(self) -> None:
        """All of it is where it becomes DST."""

    def readable(self) -> Path:
        return self.partial

    def _open(self, own: Collection[str], *, force: bool, resume: bool) -> bool:
        """Lock the partial directory, making or emptying it as asked. ``own``: the names that this run makes in it.

        Returns whether there is something to resume.
        Raises OutputError when another run holds it, or when neither force nor resume says what to do with it.
        """
        fresh = False
        try:
            with contextlib.suppress(FileExistsError):
                self.partial.mkdir()
                fresh = True
            self._lock(fresh=fresh)
            left = not fresh and os.fstat(self._fd).st_size > 0
            if not fresh:
                self._check_left(own, left=left, force=force, resume=resume)
            self._put_back(force=force)
            self.check_absent(force=force)  # another run may have made it since the check
            if not fresh and not (resume and left):
                self._clear()
                left = False
        except BaseException as e:
            if fresh and self._directory >= 0:
                self.discard()
            elif fresh:
                with contextlib.suppress(OSError):  # not empty: another run has it by now
                    self.partial.rmdir()
            self.close()
            if isinstance(e, OSError):
                raise write_error(e, str(self.partial), 0, 0) from e
            raise
        return left

    def _check_owner(self) -> None:
        """Raises OutputError for a directory that somebody else has made where anybody can, as in /tmp.

        Its owner could exchange the files in it for links while they are written.
        """
        owner = os.fstat(self._directory).st_uid
        if owner == os.geteuid() or not self.path.parent.stat().st_mode & stat.S_IWOTH:
            return
        with tempfile.TemporaryFile(dir=self.partial) as own:  # NFS gives root's files to nobody, FUSE to who mounted
            mapped = os.fstat(own.fileno()).st_uid
        if owner != mapped:
            hint = "choose a DST in a directory that only you can write"
            raise OutputError("the partial destination belongs to another user", where=str(self.partial), hint=hint)

    def _check_left(self, own: Collection[str], *, left: bool, force: bool, resume: bool) -> None:
        """Raises OutputError when what is in the partial directory is not to be touched."""
        if (self.partial / MEMBERS).exists():
            self._check_members(force=force)
            return
        if force or (resume and left):
            return
        strange = sorted(e.name for e in os.scandir(self.partial) if e.name not in own and e.name not in (JOURNAL, RUN))
        # A run that died before its journal began, or after it was removed, leaves nothing but its own files.
        if resume and not strange:
            return
        if not left:
            (self.partial / JOURNAL).unlink()  # this run has made it
        if resume:
            raise OutputError(
                "nothing to resume: this directory has no journal, but files that this command does not write",
                where=str(self.partial / strange[0]),
                hint="move it away, or use --force to remove it",
            )
        what = "an interrupted run left a partial destination"
        raise OutputError(what, where=str(self.partial), hint="--resume continues it, --force starts over")

    def _check_members(self, *, force: bool) -> None:
        """Raises OutputError unless what parts of a run have left is to go, and none of them is there any more."""
        from ckpttool.execute.destinations import claims

        try:
            if not force:
                what = "parts of a run (--part) left a partial destination"
                raise OutputError(what, where=str(self.partial), hint="run the parts again to continue, or use --force")
            there = claims.Claims(claims.Folder(self._directory, str(self.partial)), "")
            for found in there.all():  # its lock may not reach this machine
                watch = claims.ClaimWatch(there, found.name)
                while not watch.look():
                    if watch.beats:
                        what = f"a part of another run is writing this destination: {watch.holder}"
                        raise OutputError(what, where=str(self.partial), hint="wait until it ends, or end it")
                    time.sleep(claims.LOOK)
        except BaseException:
            if not os.fstat(self._fd).st_size:
                (self.partial / JOURNAL).unlink()  # this run has made it
            raise

    def _put_back(self, *, force: bool) -> None:
        """Undo the first of two renames that a crash came between; remove an old DST that was to go."""
        if not os.path.lexists(self.replaced):
            return
        if not os.path.lexists(self.path):
            self.replaced.rename(self.path)
            sync_directory(self.path.parent)
        elif force:
            remove(self.replaced)

    def _lock(self, *, fresh: bool) -> None:
        """The directory first: its lock goes with it when it is renamed, the journal is gone by then."""
        self._directory = self._locked(self.partial, os.O_RDONLY | os.O_DIRECTORY)
        if not fresh:
            self._check_owner()
        self._fd = self._locked(self.partial / JOURNAL, os.O_RDWR | os.O_CREAT)

    def _locked(self, path: Path, flags: int, lock: int = fcntl.LOCK_EX) -> int:
        if path.is_symlink():
            what, where = "the output path is a link, which is not followed", os.path.realpath(path)
            raise OutputError(what, where=[str(path), where], hint="remove the link, or choose another DST")
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        info = os.fstat(fd)
        if not stat.S_ISDIR(info.st_mode) and (not stat.S_ISREG(info.st_mode) or info.st_nlink > 1):
            os.close(fd)
            raise OutputError(
                "this is not the journal of a run, or it has a second name (a hard link)",
                where=str(path),
                hint="remove its directory, or choose another DST",
            )
        what, hint = "another run has just finished with this destination", "repeat the command"
        try:
            _flock(fd, lock)
            if os.path.samestat(os.fstat(fd), path.lstat()):
                return fd
        except BlockingIOError:
            what, hint = self._busy(), "wait until it has finished, or choose another DST"
        except FileNotFoundError:
            pass
        except OSError as e:
            if e.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF):
                return fd  # a filesystem without locks: the partial directory alone has to do
            os.close(fd)
            raise
        os.close(fd)
        raise OutputError(what, where=str(self.partial), hint=hint)

    def _busy(self) -> str:
        """The error for a run that holds the lock."""
        who = ""
        with contextlib.suppress(OSError):
            who = writer((self.partial / JOURNAL).read_bytes())
        with contextlib.suppress(OSError, ValueError, RecursionError, TypeError, KeyError):
            said = json.loads((self.partial / MEMBERS).read_bytes())
            who = f"--part, begun by part {said['part']} on {said['host']}, plan {said['plan'][:12]}"
        return "another run is writing this destination" + (f": {who}" if who else "")

    def _clear(self) -> None:
        """Remove everything but the journal, which is locked."""
        for entry in os.scandir(self.partial):
            if entry.name != JOURNAL:
                remove(Path(entry.path))
        os.ftruncate(self._fd, 0)

    def close(self) -> None:
        """Let go of the lock; what was written stays for ``--resume``."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._directory >= 0:
            os.close(self._directory)
            self._directory = -1

    def discard(self) -> None:
        """Leave nothing."""
        shutil.rmtree(self.partial, ignore_errors=True)
        self.close()

    @property
    def locks(self) -> list[int]:
        """Descriptors that hold the lock: it is kept as long as any process has one of each open."""
        return [fd for fd in (self._directory, self._fd) if fd >= 0]

    @property
    def can_record(self) -> bool:
        """Whether the journal is open."""
        return self._fd >= 0

    def _directories(self) -> list[Path]:
        """Every directory of the output, the deepest first."""
        found = {self.partial}
        for path in self._paths:
            parent = path.parent
            while parent not in found:
                found.add(parent)
                parent = parent.parent
        return sorted(found, key=lambda p: -len(p.parts))

    def seal(self) -> None:
        """Make the names durable and drop the journal."""
        try:
            for d in self._directories():
                sync_directory(d)
            # Network filesystems keep a file that is open under another name. The directory's lock stays.
            os.close(self._fd)
            self._fd = -1
            (self.partial / RUN).unlink(missing_ok=True)
            (self.partial / JOURNAL).unlink()
            sync_directory(self.partial)
        except OSError as e:
            raise write_error(e, str(self.partial), 0, 0) from e

    def publish(self, *, force: bool) -> str | None:
        """Rename the partial directory, or its only file, to DST. Returns a note when an old DST could not go."""
        try:
            return self._put_in_place(force=force)
        finally:
            self.close()

    def _put_in_place(self, *, force: bool) -> str | None:
        note = None
        try:
            if self.single:
                note = self._publish_file(force=force)
            elif force and os.path.lexists(self.path) and not self._is_empty_directory():
                note = self._replace()
            else:
                self.partial.rename(self.path)
            sync_directory(self.path.parent)
        except OSError as e:
            if e.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                error = OutputError("the destination appeared during the run", where=str(self.given))
            else:
                error = write_error(e, str(self.path), 0, 0)
            if self.partial.is_dir():
                error.hint = f"what is in {self.partial} is complete: rename it, or repeat the command with --force"
            raise error from e
        return note

    def _publish_file(self, *, force: bool) -> str | None:
        made = self.partial / self.path.name
        second = name_file(made, self.path, force=force)
        try:
            if second:
                made.unlink()
            self.partial.rmdir()
        except OSError as e:
            return f"the directory that DST was made in could not be removed: {self.partial}: {e.strerror}"
        return None

    def _replace(self) -> str | None:
        old = self.partial
        if not system.exchange(self.partial, self.path):
            # No atomic exchange here: DST is away for a moment, and back if the second rename fails.
            old = self.replaced
            self.path.rename(old)
            try:
                self.partial.rename(self.path)
            except OSError:
                old.rename(self.path)
                raise
        sync_directory(self.path.parent)
        try:
            remove(old)
        except OSError as e:
            return f"the old destination could not be removed completely: {old}: {e.strerror}"
        return None


class LocalBranch:
    """DST.partial/ of a run on another machine, which both see."""

    spools = False
    locks = ()

    def __init__(self, said: Mapping[str, Any], plan: Plan) -> None:
        self.partial = Path(said["partial"])
        self.fence = Fence(str(self.partial / RUN), said["run"])
        self._paths = [str(self.partial / o.name) for o in plan.outputs]

    def begin(self, order: Order) -> None:
        """A machine that was given up may come back when the run has ended, and another one has begun."""
        self.fence.check()

    def record(self, pool: Medium, parts: Sequence[Part], sums: Mapping[str, str]) -> None:
        sync_all(pool, [self._paths[file] for file in sorted({file for p in parts for file in p.files})])

    def finish(self, pool: Medium) -> Answer:
        return {}

    def close(self) -> None:
        """Does nothing: nothing is open."""


def _local(texts: Iterable[str]) -> list[str]:
    """The sources that are paths of this machine."""
    return [t for t in texts if isinstance(parse_place(t), Path)]


def name_file(made: Path, path: Path, *, force: bool) -> bool:
    """Give a file its name; returns whether ``made`` is still there, as a second one.

    Raises FileExistsError when there is a file of that name and not ``force``.
    """
    if not force:
        try:
            os.link(made, path)  # a rename would replace a file that has appeared meanwhile
        except OSError as e:
            if e.errno == errno.EEXIST or os.path.lexists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(path)) from e
            # a filesystem without links
        else:
            return True
    made.replace(path)
    return False


def allocated(directory: Path) -> int:
    """Bytes of disk that the files of a directory take."""
    total = 0
    for root, _, files in os.walk(directory):
        for name in files:
            try:
                total += Path(root, name).lstat().st_blocks * 512
            except OSError:
                continue
    return total


def remove(path: Path) -> None:
    """Delete a file, a link or a whole directory."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        system.sync(fd)
    finally:
        os.close(fd)


def _flock(fd: int, lock: int) -> None:
    """Raises BlockingIOError when another run holds the lock for longer than a killed one would."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(fd, lock | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            return
