"""``python -m tests.torture.remote``: every fault at every request of commands that read or write an object store.

A first run, with nothing wrong, lists the requests. Then the command runs once for each request and fault, and each
time these must hold:

    whenever a reader looks (before each request, and after the last): config.json and indexes are absent, or DST is as
    it was before, or complete and right
    a run that was not killed either made DST, or says in one error why not, and leaves no file on this machine
    one fault that a retry helps against is no error at all
    the same command with --resume makes DST as the first run did, to the byte
    no upload stays open then, and no marker
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

from ckpttool.execute.destinations import objects
from ckpttool.storage.network import Clock
from tests.torture import campaign
from tests.torture.campaign import Tree, WrongError, command, tree
from tests.torture.scenarios import FIXTURES
from tests.torture.store import DST, SRC, Call, Objects, Plan, Seen, Store, visible

FAULTS = ("killed", "killed after", "gone", "gone after", "denied", "lost", "reset", "refused", "short", "slow", "500",
          "503", "429", "200 error", "changed")  # fmt: skip
"""What is done at a request; ``tests/helpers/s3_server.py`` says how.

    killed        SIGKILL for the client, before the server does what it was asked, or after
    gone          the network is gone from here on, before or after
    denied        403 from here on: a key that has expired
    lost, ...     once; a retry helps
    changed       the source's files are others from here on
"""
FINAL = ("killed", "killed after", "gone", "gone after", "denied", "changed")
PART = 32 << 10
"""Bytes of a part of an upload: the files here are small."""
LIMIT = 60.0
"""Seconds that a command may take, on a busy machine."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A command line; ``{s}`` and ``{d}`` are prefixes in S3, ``{f}`` the fixtures, ``{w}`` a directory."""

    name: str
    command: str
    sources: tuple[str, ...] = ()
    """Fixtures that lie below ``{s}``."""
    old: bool = False
    """DST exists, and is to be replaced."""
    local: bool = False
    """DST is ``{w}/dst``."""
    part: int = 0
    """Of two processes that make DST together, the one that meets the fault; the first of them comes before the other
    one. 0: there is one process."""

    def words(self, work: Path, part: int = 0) -> list[str]:
        places = {"s": f"s3://{SRC}/in", "d": f"s3://{DST}/out", "f": FIXTURES, "w": work}
        words = [w.format(**places) for w in self.command.split()] + ["--workers", "1"]
        return [*words, "--part", f"{part}/2"] if part else words


SCENARIOS = (
    Scenario("reshard to ranks", "reshard {f}/hf_tiny_source {d} --tp-out 2"),
    Scenario(
        "reshard s3 to s3, shards and index",
        "reshard {s}/hf_tiny_source {d} --to hf --max-shard-size 90000 --manifest",
        ("hf_tiny_source",),
    ),
    Scenario("reshard --force", "reshard {f}/hf_tiny_source {d} --to hf --force", old=True),
    Scenario("reshard --verify", "reshard {f}/hf_tiny_source {d} --to vllm --tp-out 2 --verify"),
    Scenario(
        "merge",
        "merge {s}/merge/inputs/ft1 {f}/merge/inputs/ft2 --weights 0.6,0.4 -o {d} --card --manifest",
        ("merge/inputs/ft1",),
    ),
    Scenario("drop-keys", "drop-keys {s}/merge/inputs/ft1 {d} *.0.mlp.* --manifest", ("merge/inputs/ft1",)),
    Scenario("reshard, part 1 of 2, the first", "reshard {f}/hf_tiny_source {d} --tp-out 2 --manifest", part=1),
    Scenario("reshard, part 2 of 2, the last", "reshard {f}/hf_tiny_source {d} --tp-out 2 --manifest", part=2),
    Scenario("reshard s3 to disk", "reshard {s}/hf_tiny_source {w}/dst --tp-out 2", ("hf_tiny_source",), local=True),
)
OLD = {
    "out/config.json": b"{}",
    "out/model.safetensors": b"old" * 100,
    "out/model-00001-of-00007.safetensors": b"old" * 10,
    "out/model.safetensors.index.json": b"{}",
    "out/inner/notes.txt": b"old",
    "outside/config.json": b"{}",
}


class Case(NamedTuple):
    """A fault at a request."""

    fault: str
    at: Call


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    err: str
    seen: Seen


@dataclass(slots=True)
class Report:
    """What a scenario has been through."""

    name: str
    requests: int = 0
    runs: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    resumed: int = 0
    """Commands repeated with --resume that went on with something."""
    wrong: list[str] = field(default_factory=list)

    def __iadd__(self, other: Report) -> Self:
        self.requests = max(self.requests, other.requests)
        self.runs += other.runs
        self.ends += other.ends
        self.resumed += other.resumed
        self.wrong += other.wrong
        return self


class Running(NamedTuple):
    """A command that has been started, in a group of processes of its own."""

    pid: int
    log: Path
    go: int
    """It begins when something is written here."""

    def wait(self) -> int:
        """Its exit code, when it has ended."""
        try:
            return _wait(self.pid)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)  # processes that compute

    def begin(self) -> None:
        """Let it go."""
        os.write(self.go, b".")
        os.close(self.go)

    def said(self) -> str:
        return self.log.read_text(errors="replace")


class Bench:
    """A store, a directory for files, one for temporary ones; and running commands there."""

    def __init__(self, root: Path) -> None:
        self.store = Store()
        self.home, self.work, self.scratch = root, root / "work", root / "tmp"
        self.store.let(0)
        for name in {n for s in SCENARIOS for n in s.sources}:
            for path in sorted((FIXTURES / name).rglob("*")):
                if path.is_file():
                    self.store.put(f"in/{path.relative_to(FIXTURES).as_posix()}", path.read_bytes())
        self.environment = {**self.store.environment(), "CKPTTOOL_CONNECTIONS": "1"}
        self._started = 0

    def fresh(self, scenario: Scenario) -> None:
        for directory in (self.work, self.scratch):
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
        self.store.fresh(OLD if scenario.old else {})

    def run(self, words: Sequence[str], plan: Plan = Plan()) -> Ended:  # noqa: B008 - a tuple
        """One command, in a fork of this process, with one fault."""
        started = self.start(words)
        self.store.begin(plan._replace(pid=started.pid))
        started.begin()
        return Ended(started.wait(), started.said(), self.store.end())

    def start(self, words: Sequence[str]) -> Running:
        """A command that waits to be let go."""
        go, went = os.pipe()
        self._started += 1
        log = self.home / f"log-{self._started}"
        pid = os.fork()
        if not pid:
            os.setsid()
            os.read(go, 1)
            _child(self, words, log)
        os.close(go)
        return Running(pid, log, went)

    def close(self) -> None:
        self.store.close()


def _child(bench: Bench, words: Sequence[str], log: Path) -> None:
    code = 99
    try:
        atexit._clear()
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.environ.update(bench.environment, TMPDIR=str(bench.scratch), HOME=str(bench.home))
        os.chdir(bench.home)
        tempfile.tempdir = None
        _small_steps()
        code = command(words)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001 - it is judged by what it says
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _small_steps() -> None:
    """Files of kilobytes have several parts, and waiting before a retry takes next to no time."""
    campaign.small_steps()
    for name, value in (("CHUNK", PART), ("WHOLE", PART // 2)):
        assert hasattr(objects, name)
        setattr(objects, name, value)
    sleep = time.sleep
    time.sleep = lambda seconds: sleep(0.01 if float(seconds) > 0.001 else seconds)  # an outage takes 0.03
    Clock.sleep = _hurried  # type: ignore[assignment, method-assign]


def _hurried(_: Clock, seconds: float, stopped: threading.Event) -> None:
    stopped.wait(min(seconds, 0.01))


def _wait(pid: int) -> int:
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise WrongError(f"it did not end in {LIMIT:.0f} s")


class Campaign:
    """One scenario on one bench."""

    def __init__(self, scenario: Scenario, bench: Bench) -> None:
        self.scenario, self.bench = scenario, bench
        self.words = scenario.words(bench.work, scenario.part)
        self._fresh()
        bench.store.allow([])
        first = last = bench.run(self.words)
        self.calls = sorted(set(first.seen.calls))
        if scenario.part == 1:
            last = bench.run(scenario.words(bench.work, 2))
        for ended in (first, last):
            if ended.code or "Traceback" in ended.err:
                raise WrongError(f"{scenario.name} fails without a fault: {ended.code} {ended.err}")
        self.golden = last.seen.objects
        self.files = self.changed_files = tree(bench.work)
        self._check_done(last.seen)
        self._check_equal()
        self.changed, self.changed_files = self._changed() if scenario.sources else (self.golden, self.files)
        self.report = Report(scenario.name, requests=len(self.calls))

    def _fresh(self) -> None:
        """What there is when the command that meets a fault begins."""
        self.bench.fresh(self.scenario)
        if self.scenario.part == 2:
            self.bench.run(self.scenario.words(self.bench.work, 1))

    def _check_equal(self) -> None:
        """The command makes the same of files, or in a directory."""
        here = self.bench.work / "local" / "out"
        here.parent.mkdir()
        was, now = (f"s3://{SRC}/in", FIXTURES) if self.scenario.local else (f"s3://{DST}/out", here)
        plain = self.scenario.words(self.bench.work)
        words = [w.replace(str(was), str(now)).replace(str(self.bench.work / "dst"), str(here)) for w in plain]
        ended = self.bench.run(words)
        if ended.code:
            raise WrongError(f"{self.scenario.name} fails on this machine: {ended.err}")
        local = {n: v for n, v in tree(here).items() if v != "directory"}
        golden = self.files if self.scenario.local else self.golden
        made = {n.partition("/")[2]: v for n, v in golden.items() if n.startswith(("out/", "dst/"))}
        if local != made:
            different = sorted(n for n in local.keys() | made.keys() if local.get(n) != made.get(n))
            raise WrongError(f"{self.scenario.name}: not what a directory gets: {different}")

    def _changed(self) -> tuple[Objects, Tree]:
        """What is made of sources that have changed before anybody looked at them."""
        self.bench.fresh(self.scenario)
        self.bench.store.change()
        seen = self.bench.run(self.words).seen
        return seen.objects, tree(self.bench.work)

    def cases(self) -> Iterator[Case]:
        """Every fault at every request."""
        for call in self.calls:
            for fault in FAULTS:
                if fault == "200 error" and call.operation != "CompleteMultipartUpload":
                    continue
                if fault != "changed" or self.scenario.sources:
                    yield Case(fault, call)

    def strike(self, case: Case) -> None:
        """One run with a fault, and what must hold then."""
        self.bench.store.allow([])
        self._fresh()
        self.bench.store.allow([self.golden, self.changed] if case.fault == "changed" else [self.golden])
        self.report.runs += 1
        ended = None
        try:
            ended = self.bench.run(self.words, Plan(*case))
            if case.at.operation == "GetObject" and not (ended.seen.struck or ended.code):
                self.report.runs -= 1  # which ranges are joined is a matter of time
                return
            self._check_end(ended, case.fault)
            self._check_reader(ended.seen)
            if self.scenario.part:
                self._run_again()
            elif case.fault == "changed" and ended.code:
                self._check_nothing(ended)
            elif ended.code or self._is_left(ended):
                self._recover(ended)
            elif case.fault != "changed" or ended.seen.objects != self.changed:
                self._check_done(ended.seen)
        except WrongError as e:
            said = f"\n  exit code {ended.code}\n  {ended.err.strip()}" if ended else ""
            self.report.wrong.append(f"{self.scenario.name}: {case.fault} at {case.at}: {e}{said}")

    def _check_end(self, ended: Ended, fault: str) -> None:
        if not ended.seen.struck:
            raise WrongError("the run did not come to this request")
        if "Traceback" in ended.err:
            raise WrongError("a traceback")
        if fault.startswith("killed"):
            if ended.code not in (-9, 0):
                raise WrongError("it outlived kill -9")
            self.report.ends["killed"] += 1
            return
        if list(self.bench.scratch.iterdir()) and (not ended.code or not _may_stay(self.bench.scratch)):
            raise WrongError(f"temporary files stay: {sorted(tree(self.bench.scratch))}")
        if not ended.code:
            self.report.ends["done"] += 1
            return
        if ended.code not in (1, 3) or ended.err.count("error: ") != 1:
            raise WrongError("not one clean error")
        if fault not in FINAL:
            raise WrongError("a retry would have helped")
        self.report.ends["error"] += 1

    def _check_reader(self, seen: Seen) -> None:
        if seen.wrong:
            raise WrongError(seen.wrong[0])
        if self.scenario.local and (self.bench.work / "dst").exists():
            self._check_files()

    def _check_files(self) -> None:
        if (now := tree(self.bench.work)) not in (self.files, self.changed_files):
            raise WrongError(f"there is something else: {sorted(n for n in now if now[n] != self.files.get(n))}")

    def _check_done(self, seen: Seen) -> None:
        """DST is complete, and nothing else is there."""
        if self.scenario.local:
            self._check_files()
            return
        if not seen.objects:
            raise WrongError("nothing is there")
        if marks := [k for k in seen.objects if k not in visible(seen.objects)]:
            raise WrongError(f"the run's own stays: {marks}")
        if seen.uploads:
            raise WrongError(f"uploads stay: {seen.uploads}")
        if seen.objects != self.golden:
            different = [
                k for k in seen.objects.keys() | self.golden.keys() if seen.objects.get(k) != self.golden.get(k)
            ]
            raise WrongError(f"afterwards there is something else: {sorted(different)}")

    def _check_nothing(self, ended: Ended) -> None:
        """A run whose source has changed leaves nothing, and DST as it was."""
        left = tree(self.bench.work) or ended.seen.uploads or ended.seen.objects
        if left:
            raise WrongError(f"something stays: {sorted(left)}")

    def _is_left(self, ended: Ended) -> bool:
        """Whether DST is complete, and a note says what could not be removed beside it."""
        return "could not be removed" in ended.err and visible(ended.seen.objects) == self.golden

    def _recover(self, ended: Ended) -> None:
        """What the user does next makes what an undisturbed run would have made."""
        again = self.bench.run([*self.words, *self._flag(ended.seen)])
        if "already written by the interrupted run" in again.err:
            self.report.resumed += 1
        if again.code or "Traceback" in again.err:
            raise WrongError(f"repeated with {self._flag(ended.seen)} it fails: {again.code} {again.err}")
        self._check_reader(again.seen)
        self._check_done(again.seen)

    def _run_again(self) -> None:
        """All members run again, also those that have ended well, as a launcher does it."""
        again: Ended | None = None
        for part in (2, 1) if self.scenario.part == 1 else (1, 2):
            again = self.bench.run(self.scenario.words(self.bench.work, part))
            if again.code or "Traceback" in again.err:
                raise WrongError(f"part {part} fails when it is run again: {again.code} {again.err}")
            self._check_reader(again.seen)
            self.report.resumed += 1
        assert again is not None
        self._check_done(again.seen)
        if left := sorted(tree(self.bench.scratch)):
            raise WrongError(f"temporary files stay: {left}")

    def _flag(self, seen: Seen) -> list[str]:
        """--resume; where DST is complete, there is nothing to go on with."""
        if self.scenario.local:
            return ["--resume"] if (self.bench.work / "dst.partial").exists() else []
        complete = visible(seen.objects) == self.golden and not self.scenario.old
        return ["--force"] if complete and seen.objects == self.golden else ["--resume"]


def _may_stay(scratch: Path) -> bool:
    """What a run that failed has sent nowhere may stay for --resume."""
    return not any(scratch.iterdir())


RACES = {
    "the same twice": ("reshard {f}/hf_tiny_source {d} --tp-out 2", "reshard {f}/hf_tiny_source {d} --tp-out 2"),
    "two ways": ("reshard {f}/hf_tiny_source {d} --tp-out 2", "reshard {f}/hf_tiny_source {d} --to vllm --tp-out 2"),
    "two ways with --force": (
        "reshard {f}/hf_tiny_source {d} --to hf --force",
        "reshard {f}/hf_tiny_source {d} --to hf --max-shard-size 90000 --force",
    ),
}
"""Two commands at once on one DST."""
MEETING = "three parts at once, one of them killed"


def race(name: str, bench: Bench, times: int) -> Report:
    """Start two commands within a moment, over and over: DST is what one of them makes, and the other says so."""
    report = Report(f"two at once: {name}")
    words = [Scenario(name, w).words(bench.work) for w in RACES[name]]
    alone = []
    for each in words:
        bench.fresh(Scenario(name, ""))
        bench.store.allow([])
        alone.append(visible(bench.run(each).seen.objects))
    for i in range(times):
        bench.fresh(Scenario(name, ""))
        bench.store.allow(alone)
        report.runs += 1
        bench.store.begin(Plan())
        both = [bench.start(w) for w in words]
        for one in both:
            one.begin()
            time.sleep(0.02 * (i % 25))
        codes = [one.wait() for one in both]
        said = "\n".join(one.said() for one in both)
        try:
            _check_race(codes, [one.said() for one in both], bench.store.end(), alone)
            report.ends["done" if 0 in codes and 1 not in codes else "error"] += 1
        except WrongError as e:
            report.wrong.append(f"two at once: {name}, {i}: {e}\n  {codes}\n  {said}")
    return report


def meet(bench: Bench, times: int) -> Report:
    """Start three members within a moment, over and over, and kill one of them at some time; then run them again."""
    report = Report(MEETING)
    scenario = Scenario(MEETING, "reshard {f}/hf_tiny_source {d} --tp-out 2 --manifest")
    words = [[*scenario.words(bench.work), "--part", f"{i}/3"] for i in (1, 2, 3)]
    bench.fresh(scenario)
    bench.store.allow([])
    golden = visible(bench.run(scenario.words(bench.work)).seen.objects)
    for i in range(times):
        bench.fresh(scenario)
        bench.store.allow([golden])
        report.runs += 1
        bench.store.begin(Plan())
        three = [bench.start(w) for w in words]
        for one in three:
            one.begin()
            time.sleep(0.01 * (i % 3))
        if i % 2:
            time.sleep(0.03 * (i % 23))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(three[i % 3].pid, signal.SIGKILL)
        codes = [one.wait() for one in three]
        seen = bench.store.end()
        said = "\n".join(one.said() for one in three)
        try:
            if any(code not in (0, -signal.SIGKILL) for code in codes) or (not i % 2 and any(codes)):
                raise WrongError("a member has failed")
            report.ends["killed" if any(codes) else "done"] += 1
            if not any(codes) and seen.objects != golden:
                raise WrongError("all members have ended, and DST is not there")
            again = [bench.run(w) for w in words]
            said += "\n".join(e.err for e in again)
            if wrong := [*seen.wrong, *(w for e in again for w in e.seen.wrong)]:
                raise WrongError(wrong[0])
            if any(e.code for e in again) or again[-1].seen.objects != golden or again[-1].seen.uploads:
                raise WrongError(f"run again they leave {sorted(again[-1].seen.objects)}, {again[-1].seen.uploads}")
        except WrongError as e:
            report.wrong.append(f"{MEETING}, {i}: {e}\n  {codes}\n  {said}")
    return report


def _check_race(codes: list[int], said: list[str], seen: Seen, alone: list[Objects]) -> None:
    if seen.wrong:
        raise WrongError(seen.wrong[0])
    if 0 not in codes:
        raise WrongError("neither has done its work")
    for code, err in zip(codes, said, strict=True):
        if code not in (0, 1) or "Traceback" in err or (code and err.count("error: ") != 1):
            raise WrongError("not one clean error")
    if seen.objects not in alone or seen.uploads:
        raise WrongError(f"there is something else: {sorted(seen.objects)}, {seen.uploads}")
    if codes.count(0) == 1 and seen.objects != alone[codes.index(0)]:
        raise WrongError("DST is not of the one that succeeded")


# -- all of it


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torture.remote", description=__doc__)
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="only scenarios with this in them")
    parser.add_argument("--fault", action="append", choices=FAULTS, default=[], help="only this (repeatable)")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every Nth case")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the first case of these")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    parser.add_argument("--calls", action="store_true", help="show the requests, and try nothing")
    given = parser.parse_args(words)
    campaign.warm_up()
    names = [*[s.name for s in SCENARIOS], *[f"two at once: {name}" for name in RACES], MEETING]
    chosen = [i for i, name in enumerate(names) if not given.only or any(t in name for t in given.only)]
    began = time.monotonic()
    reports = [Report(name) for name in names]
    with campaign.place() as root:
        if given.calls:
            bench = Bench(root)
            for i in [i for i in chosen if i < len(SCENARIOS)]:
                print(f"\n{SCENARIOS[i].name}")  # noqa: T201
                print(*Campaign(SCENARIOS[i], bench).calls, sep="\n")  # noqa: T201
            bench.close()
            return 0
        tasks = [
            Task(root, i, j, given.jobs, given.every, given.first, tuple(given.fault))
            for i in chosen
            for j in range(given.jobs if i < len(SCENARIOS) else 1)
        ]
        with multiprocessing.get_context("fork").Pool(given.jobs, maxtasksperchild=1) as pool:
            for which, report in pool.imap_unordered(_work, tasks, 1):
                reports[which] += report
                for text in report.wrong:
                    print(f"WRONG {text}", file=sys.stderr, flush=True)  # noqa: T201
    _show([reports[i] for i in chosen])
    wrong = sum(len(r.wrong) for r in reports)
    print(f"\n{time.monotonic() - began:.0f} s, {wrong} wrong")  # noqa: T201
    return bool(wrong)


class Task(NamedTuple):
    """What one process does in one go: a part of the cases of a scenario."""

    root: Path
    which: int
    """Number of the scenario; those of the races come behind."""
    part: int
    parts: int
    every: int
    first: int
    faults: tuple[str, ...]


def _work(task: Task) -> tuple[int, Report]:
    home = task.root / f"bench-{os.getpid()}"
    home.mkdir()
    bench = Bench(home)
    if task.which >= len(SCENARIOS):
        names, times = [*RACES, MEETING], max(1, 60 // task.every)
        name = names[task.which - len(SCENARIOS)]
        report = meet(bench, times) if name == MEETING else race(name, bench, times)
        bench.close()
        return task.which, report
    report = Report(SCENARIOS[task.which].name)
    try:
        tried = Campaign(SCENARIOS[task.which], bench)
        report = tried.report
        cases = [c for c in tried.cases() if not task.faults or c.fault in task.faults]
        for case in cases[task.first + task.part * task.every :: task.parts * task.every]:
            tried.strike(case)
    except WrongError as e:
        report.wrong.append(str(e))
    finally:
        bench.close()
    return task.which, report


def _show(reports: Sequence[Report]) -> None:
    total = Report("all")
    for r in reports:
        requests = total.requests + r.requests
        total += r
        total.requests = requests
    rows: list[tuple[str, ...]] = [("", "requests", "runs", "killed", "failed", "done", "resumed", "wrong")]
    for r in [*reports, total]:
        counts = (r.requests, r.runs, *(r.ends[e] for e in ("killed", "error", "done")), r.resumed, len(r.wrong))
        rows.append((r.name, *[f"{n:,}" for n in counts]))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        print("  ".join([name.ljust(widths[0]), *[c.rjust(w) for c, w in zip(cells, widths[1:], strict=True)]]))  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
