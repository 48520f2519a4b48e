"""Every fault at every point: what a command leaves behind when one of its system calls goes wrong.

A first run, with nothing wrong, lists the points: each call that changes a file, a name, or makes such a change
durable. Then the command runs once for each point and each fault that fits the call, and each time these must hold:

    the sources are what they were, to the byte and to the time
    DST is absent, or as it was before, or complete; never anything else
    a run that was not killed either made DST, or says in one error why not (and exits with a code that is not 0)
    the same command again, with --resume where something was left, makes DST as the first run did, to the byte
    nothing stays beside DST, nor where temporary files are made
"""

from __future__ import annotations

import contextlib
import errno
import gc
import hashlib
import os
import resource
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

from ckpttool.cli.app import _command, main
from ckpttool.execute import files, schedule, workforce
from ckpttool.execute.destinations import local
from ckpttool.layout.family import family_names
from ckpttool.ops.inspect import header
from tests.helpers.modules import import_all
from tests.torture.interpose import SYNCS, WRITES, Call, Decision, Fail, Give, Kill, Outcome, Short, run
from tests.torture.scenarios import Scenario

Tree = dict[str, str]
"""Relative path -> what is there: a hash, a link's target, or "directory"."""

_CREATES = ("open", "openat", "creat", "mkdir", "mkdirat", "link", "linkat", "symlink", "symlinkat")
_RENAMES = ("rename", "renameat", "renameat2")
_REMOVES = ("unlink", "unlinkat", "rmdir")
_SIZES = ("ftruncate", "truncate", "fallocate", "copy_file_range", "sendfile")
_TAKES_SPACE = (*_CREATES, *_RENAMES, *_SIZES, *WRITES)

FAULTS = ("kill -9", "EIO", "EACCES", "ENOSPC", "short", "short, full", "full", "dead")
"""What is done at a point.

    kill -9        the process and its workers, before the call, and after it where it changes a name
    EIO, ...       the call fails so, once; ``EACCES`` only where a name is used, ``ENOSPC`` where space is needed
    short          half of the bytes are written, and the call says so
    short, full    the same, and the disk is full from then on
    full           the disk is full from here on: nothing grows, nothing new is made; removing works
    dead           the device is gone from here on: every call fails with EIO
"""


def fits(fault: str, call: Call) -> bool:
    """Whether a fault can happen to a call."""
    name = call.name
    if fault in ("ENOSPC", "full"):
        return name in _TAKES_SPACE or (fault == "ENOSPC" and name in ("fsync", "fdatasync"))
    if fault == "EACCES":
        return name in (*_CREATES, *_RENAMES, *_REMOVES) or name.startswith(("chmod", "fchmod", "utime"))
    if fault.startswith("short"):
        return name in WRITES and call.nbytes > 1
    return True


class Injector:
    """Decides about the calls of one run: one fault, at one point."""

    def __init__(self, scenario: Scenario, fault: str = "", point: Call | None = None, *, after: bool = False) -> None:
        self.scenario = scenario
        self.fault = fault
        self.key = point.key if point else None
        self.after = after
        self.struck = False
        self._durable: dict[int, bytes] = {}
        """By inode: what a file held when it was last synced."""

    def remember(self, root: Path) -> None:
        """What lies there before the run is on disk."""
        for name, what in tree(root, read=False).items():
            if what == "file":
                self._durable[(root / name).stat().st_ino] = (root / name).read_bytes()

    def __call__(self, call: Call) -> Decision:
        decision = self._decide(call)
        if call.name in ("fsync", "fdatasync", "sync_file_range"):
            self._sync(call, done=decision == Give(0))
        return decision

    def _sync(self, call: Call, *, done: bool) -> None:
        """A sync that fails has lost the pages that were to be written, and no later one says so again."""
        at = Path(f"/proc/{call.pid}/fd/{call.fd}")
        if at.is_dir() or at.stat().st_nlink > 1:  # a file of the source that was linked, and not written
            return
        number = at.stat().st_ino
        if done and call.name != "sync_file_range":
            self._durable[number] = at.read_bytes()
        elif not done:
            kept, size = self._durable.get(number, b""), at.stat().st_size
            at.write_bytes(kept[:size].ljust(size, b"\0"))

    def _decide(self, call: Call) -> Decision:
        if self.key == call.key:
            self.struck = True
            return self._strike(call)
        if self.struck:
            if self.fault in ("full", "short, full") and call.name in _TAKES_SPACE:
                return Fail(errno.ENOSPC)
            if self.fault == "dead":
                return Fail(errno.EIO)
        return self.usual(call)

    def usual(self, call: Call) -> Decision:
        """What this filesystem does when nothing is wrong."""
        if call.name == "renameat2" and not self.scenario.exchange:
            return Fail(errno.EINVAL)
        if call.name == "pwritev2" and not self.scenario.uncached:
            return Fail(errno.EOPNOTSUPP)
        if call.flags & os.O_DIRECT and not self.scenario.uncached:
            return Fail(errno.EINVAL)
        if call.name in SYNCS:
            return Give(0)  # a crash of the process loses nothing; waiting for the disk would only take time
        return None

    def _strike(self, call: Call) -> Decision:
        match self.fault:
            case "kill -9":
                return Kill(self.after)
            case "EIO" | "dead":
                return Fail(errno.EIO)
            case "EACCES":
                return Fail(errno.EACCES)
            case "ENOSPC" | "full":
                return Fail(errno.ENOSPC)
            case _:
                usual = self.usual(call)
                return Short(0.5) if usual is None else usual


# -- a place to work in


def warm_up() -> None:
    """Import all that a command may import, so that each run is a fork of this process and starts at once."""
    import_all()
    _command()
    family_names()
    gc.freeze()  # a collection would touch every page that is shared with this process


def small_steps(*, serial: bool = True) -> None:
    """In a forked process: what takes megabytes and seconds in real runs shall happen with these small files, too.

    ``serial``: a part is recorded in the journal before the next is begun, so that every run makes the same calls.
    """
    steps: list[tuple[Any, str, Any]] = [
        (schedule, "_MIB", 64 << 10),
        (schedule, "_BATCH", 64 << 10),
        (files, "UNCACHED_FROM", 8 << 10),
        (files, "PIECE", 32 << 10),
        (header, "PIECE", 64 << 10),
        (local, "SLACK", 0),
        (header, "SLACK", 0),
    ]
    if serial:
        steps.append((workforce, "CompletionQueue", _SerialLedger))
    for module, name, value in steps:
        assert hasattr(module, name)
        setattr(module, name, value)


class _SerialLedger(workforce.CompletionQueue):
    def __init__(self, _batch: int, _most: int) -> None:
        super().__init__(1, 0)


def command(words: Iterable[str]) -> int:
    """Run the command line in this process. Returns its exit code."""
    sys.argv = ["ckpttool", *words]
    code: object = 0
    try:
        main()
    except SystemExit as e:
        code = e.code
    return code if isinstance(code, int) else 1


@contextlib.contextmanager
def place() -> Iterator[Path]:
    """A directory in memory, where there is one: nothing here depends on the disk."""
    memory = "/dev/shm"  # noqa: S108 - a fresh directory is made in it
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None, prefix="torture-") as made:
        yield Path(os.path.realpath(made))


def tree(root: Path, *, read: bool = True) -> Tree:
    """What lies below a directory, with the hashes of files unless they are not to be ``read``."""
    found: Tree = {}
    for base, folders, names in os.walk(root):
        at = os.path.relpath(base, root)
        for name in [*folders, *names]:
            path = os.path.join(base, name)  # noqa: PTH118
            relative = name if at == "." else f"{at}/{name}"
            if os.path.islink(path):  # noqa: PTH114
                found[relative] = "-> " + os.readlink(path)  # noqa: PTH115
            elif name in folders:
                found[relative] = "directory"
            elif read:
                with open(path, "rb") as f:  # noqa: PTH123
                    found[relative] = hashlib.sha256(f.read()).hexdigest()
            else:
                found[relative] = "file"
    return found


def _names(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir())


def below(found: Tree, target: str) -> Tree:
    """The part of a tree that a name stands for."""
    return {n: v for n, v in found.items() if n == target or n.startswith(target + "/")}


class Bench:
    """Sources, a work directory, a directory for temporary files; and running commands there."""

    def __init__(self, root: Path, sources: Path) -> None:
        self.sources = sources
        self.work = root / "work"
        self.scratch = root / "tmp"
        self.home = root
        root.mkdir(exist_ok=True)

    def fresh(self, scenario: Scenario) -> None:
        for directory in (self.work, self.scratch):
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
        scenario.before(self.work, self.sources)

    def run(
        self, words: Iterable[str], decide: Callable[[Call], Decision], *, serial: bool = True, limit: int = 0
    ) -> Outcome:
        """One command, in a fork of this process. ``limit``: bytes that a file may have."""

        def work() -> int:
            small_steps(serial=serial)
            if limit:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            os.chdir(self.home)
            tempfile.tempdir = str(self.scratch)
            return command(words)

        return run(work, [self.work, self.scratch, self.sources], decide)

    def source_state(self) -> dict[str, tuple[int, ...]]:
        """What changes with every write: times, sizes, inodes; a link that is made to a file changes its ctime."""
        state: dict[str, tuple[int, ...]] = {}
        for name, what in tree(self.sources, read=False).items():
            st = (self.sources / name).lstat()
            state[name] = (st.st_mtime_ns, st.st_size, st.st_ino, st.st_ctime_ns) if what != "directory" else ()
        return state


class Case(NamedTuple):
    """A fault at a point."""

    fault: str
    point: Call
    after: bool = False


class WrongError(Exception):
    """What a run left is not allowed."""


@dataclass(slots=True)
class Report:
    """What a scenario has been through."""

    name: str
    points: int = 0
    runs: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    """How the runs with a fault ended: ``killed``, ``error``, ``done``."""
    resumed: int = 0
    """Runs with --resume that went on with something."""
    wrong: list[str] = field(default_factory=list)

    def __iadd__(self, other: Report) -> Self:
        self.runs += other.runs
        self.points = max(self.points, other.points)
        self.ends += other.ends
        self.resumed += other.resumed
        self.wrong += other.wrong
        return self


class Campaign:
    """One scenario on one bench."""

    def __init__(self, scenario: Scenario, bench: Bench) -> None:
        self.scenario = scenario
        self.bench = bench
        self.words = scenario.words(bench.work, bench.sources)
        bench.fresh(scenario)
        self.sources = bench.source_state()
        self.contents = tree(bench.sources)
        self.before = tree(bench.work)
        first = bench.run(self.words, Injector(scenario))
        if first.code or first.err.count("Traceback"):
            raise WrongError(f"{scenario.name} fails without a fault: {first.code} {first.err}")
        self.calls = first.calls
        self.golden = tree(bench.work)
        if below(self.golden, scenario.targets[0]) == below(self.before, scenario.targets[0]):
            raise WrongError(f"{scenario.name} changes nothing")
        self._check_sources()
        self.report = Report(scenario.name, points=len(self.calls))

    def cases(self, *, thorough: bool) -> list[Case]:
        """What to try: every fault that fits at every point, and kill -9 after what changes a name.

        Unless ``thorough``, a point gets kill -9 and one of the other faults, which take turns; and where the same call
        comes on the same file over and over, as a program makes it that writes part after part, only the first two and
        the last of them do, and those between get one fault each.
        """
        series = Counter((c.name, c.path, c.other) for c in self.calls)
        found = []
        for n, call in enumerate(sorted(self.calls, key=lambda c: c.key)):
            faults = [f for f in FAULTS if fits(f, call)]
            if not thorough:
                between = 2 < call.nth < series[call.name, call.path, call.other]
                faults = [faults[n % len(faults)]] if between else [faults[0], faults[1 + n % (len(faults) - 1)]]
            found += [Case(fault, call) for fault in faults]
            if call.name in (*_RENAMES, *_REMOVES, *_CREATES[2:]) or call is self.calls[-1]:
                found.append(Case("kill -9", call, after=True))
        return found

    def strike(self, case: Case, injector: Injector | None = None, mend: Callable[[], None] = lambda: None) -> None:
        """One run with a fault, and what must hold then. ``mend`` takes away what caused it."""
        fault, point, after = case
        scenario, bench, report = self.scenario, self.bench, self.report
        bench.fresh(scenario)
        injector = injector or Injector(scenario, fault, point, after=after)
        injector.remember(bench.work)
        report.runs += 1
        try:
            ended = bench.run(self.words, injector)
            try:
                if not injector.struck:
                    raise WrongError("the run did not come to this point")
                self.check_end(ended, fault, after=after)
                mend()
                left = self.check_state(ended, fault)
                self.recover(left)
            except WrongError as e:
                raise WrongError(f"{e}\n  exit code {ended.code}\n  {ended.err.strip()}") from e
        except (WrongError, TimeoutError) as e:
            when = "after" if after else "at"
            report.wrong.append(f"{scenario.name}: {fault} {when} {self.shown(point)}: {e}")

    def shown(self, call: object) -> str:
        return str(call).replace(f"{self.bench.home}/", "")

    def _check_sources(self) -> None:
        now = self.bench.source_state()
        if now == self.sources:
            return
        if {n: s[:3] for n, s in now.items()} != {n: s[:3] for n, s in self.sources.items()} or (
            tree(self.bench.sources) != self.contents
        ):
            raise WrongError("a source has changed")
        self.sources = now

    def check_end(self, ended: Outcome, fault: str, *, after: bool = False) -> None:
        self._check_sources()
        if "Traceback" in ended.err or "Error ignored" in ended.err:
            raise WrongError("a traceback")
        if fault == "kill -9":
            if ended.code != -9 and not after:  # after its last call a run may end before it is hit
                raise WrongError("it outlived kill -9")
            self.report.ends["killed"] += 1
        elif ended.code:
            if ended.code not in (1, 3) or ended.err.count("error: ") != 1:
                raise WrongError("not one clean error")
            self.report.ends["error"] += 1
        else:
            self.report.ends["done"] += 1

    def check_state(self, ended: Outcome, fault: str) -> list[str]:
        """Raises WrongError unless DST is absent, old or new. Returns the names beside it that should not be there."""
        now = tree(self.bench.work)
        stale = any(name.endswith(".header-backup") for name in now)
        for target in self.scenario.targets:
            found = below(now, target)
            if found not in ({}, below(self.before, target), below(self.golden, target)):
                if target == self.scenario.edits and stale:
                    continue
                raise WrongError(f"{target} is neither as before nor complete: {sorted(found)}")
            if not found and below(self.before, target) and self.scenario.exchange:
                raise WrongError(f"{target} has gone")
        known = self.before.keys() | self.golden.keys()
        inside = tuple(t + "/" for t in self.scenario.targets)
        # Only the topmost of what lies there: a directory stands for all that is in it.
        strange = [n for n in now if n not in known and not n.startswith(inside)]
        left = sorted(n for n in strange if n.rpartition("/")[0] not in strange)
        if ended.code >= 0 and fault != "dead" and _names(self.bench.scratch):
            raise WrongError(f"temporary files stay: {_names(self.bench.scratch)}")
        complete = all(below(now, t) == below(self.golden, t) for t in self.scenario.targets)
        if ended.code == 0:
            if not complete:
                raise WrongError("it says that all is well, and the output is not there")
            if any(Path(n).name not in ended.err for n in left):
                raise WrongError(f"it says nothing about {left}")
        return left

    def recover(self, left: list[str]) -> None:
        """What the user does next makes what an undisturbed run would have made."""
        scenario, bench = self.scenario, self.bench
        decide = Injector(scenario)
        for name in left:
            if name.endswith(".header-backup"):
                words = ["inspect", str(bench.work / scenario.edits), "--set-header", str(bench.work / name)]
                back = bench.run(words, decide)
                if back.code:
                    raise WrongError(f"the backup cannot be put back: {back.err}")
                now = tree(bench.work)
                if below(now, scenario.edits) != below(self.before, scenario.edits):
                    raise WrongError("the backup is not the old header")
        now = tree(bench.work)
        complete = all(below(now, t) == below(self.golden, t) for t in scenario.targets)
        words = list(self.words)
        if complete and not left:
            again = None
        elif scenario.resumes:
            flag = (
                "--force" if complete or "dst.partial" not in "".join(left).replace(".safetensors", "") else "--resume"
            )
            again = [*words, flag] if flag not in words else words
        else:
            again = [*words, "--force"] if complete and scenario.forces else words
        if again is not None:
            ended = bench.run(again, decide)
            if "--resume" in again and "already written by the interrupted run" in ended.err:
                self.report.resumed += 1
            if ended.code or "Traceback" in ended.err:
                raise WrongError(f"`{' '.join(again[:1] + again[3:])}` afterwards fails: {ended.code} {ended.err}")
        now = tree(bench.work)
        if now != self.golden:
            different = sorted({n for n in now.keys() | self.golden.keys() if now.get(n) != self.golden.get(n)})
            raise WrongError(f"afterwards there is something else: {different}")
        self._check_sources()


def make_safetensors(root: Path, sources: Path) -> None:
    """The converted program, which some scenarios read."""
    bench = Bench(root / "first", sources)
    for directory in (bench.work, bench.scratch):
        directory.mkdir()
    program, made = sources / "paddle_programs/pir/model.json", sources / "pir.safetensors"
    ended = bench.run(["convert-json", str(program), str(made), "--quiet"], lambda _: None)
    if ended.code:
        raise WrongError(ended.err)
