"""Parts of one run (``--part I/N``): each killed, failed or starved at each of its calls; and all of them at once.

    python -m tests.torture.members [--every N] [--only TEXT] [--kind calls|full|crowd] [--rounds N]

``calls``: parts run one after the other. A first round lists the calls of each; then each part meets each fault at each
call (see ``campaign``). After that DST is absent, or complete; a part that was not killed has said in one error why
not; and when all parts have run again, there is what one run without parts makes, to the byte, and nothing else.

``full``: the same with a disk that is really full from a call on, and has room again afterwards.

``crowd``: all parts at once, as on machines of their own: none can see whether another's process lives, and their
clocks, of the day and since the start, differ by years. Some are killed at random moments, some are stopped for longer
than it takes to be thought dead, and come back beside those that have taken their place.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ckpttool.execute import shares
from ckpttool.execute.destinations import claims, holder, members
from ckpttool.execute.parts import member
from tests.torture import campaign, interpose
from tests.torture.campaign import Bench, Case, Injector, Report, Tree, WrongError, below, fits, tree
from tests.torture.contest import _end, _start
from tests.torture.full import fill, small_disk
from tests.torture.interpose import Call, Decision, Outcome
from tests.torture.scenarios import Scenario, _old, prepare

_PROGRAM = "{s}/paddle_programs/pir/model.json"
_MERGE = "merge {s}/merge/inputs/ft1 {s}/merge/inputs/ft2"

SCENARIOS = (
    (3, Scenario("reshard", "reshard {s}/hf_tiny_source {w}/dst --tp-out 2 --to ranks")),
    (2, Scenario("reshard --manifest --verify", "reshard {s}/llama_tp8 {w}/dst --tp-out 2 --manifest --verify")),
    (2, Scenario("reshard --force", "reshard {s}/hf_tiny_source {w}/dst --tp-out 2 --to ranks --force", _old)),
    (2, Scenario("reshard --force, no exchange", "reshard {s}/hf_tiny_source {w}/dst --tp-out 2 --to ranks --force",
                 _old, exchange=False)),
    (2, Scenario("reshard --to torch-bin", "reshard {s}/torch/train {w}/dst --to torch-bin")),
    (2, Scenario("reshard --to dcp", "reshard {s}/dcp/uneven/checkpoint {w}/dst --to dcp --sharding-out 2")),
    (2, Scenario("merge --manifest --card", f"{_MERGE} --weights 0.6,0.4 -o {{w}}/dst --card --manifest")),
    (2, Scenario("merge, mergekit's numbers",
                 f"{_MERGE} --base {{s}}/merge/inputs/ft1 --method dare_linear --weights 0.6,0.4 --param density=0.5"
                 " --rng mergekit -o {w}/dst")),
    (2, Scenario("quantize --manifest", "quantize {s}/hf_tiny_source {w}/dst --block 32x32 --manifest")),
    (2, Scenario("drop-keys --link", "drop-keys {s}/merge/inputs/ft1 {w}/dst lm_head.* --link --manifest")),
    (2, Scenario("convert-json", f"convert-json {_PROGRAM} {{w}}/dst.safetensors", targets=("dst.safetensors",))),
    (2, Scenario("convert-json, shards", f"convert-json {_PROGRAM} {{w}}/dst --max-shard-size 800")),
)  # fmt: skip

_KINDS = ("calls", "full", "crowd")
_FAULTS = ("kill -9", "EIO", "ENOSPC", "short", "full", "dead")


def _small() -> None:
    """In a process that is forked: pages that parts share, with these small files, too; and no long waiting."""
    shares.PAGE = 1024
    claims.LOOK = 0.02


class _Bench(Bench):
    def run(self, words: Sequence[str], decide: object, **more: object) -> Outcome:  # type: ignore[override]
        _small()  # in this process, which does nothing else
        return super().run(words, decide, **more)  # type: ignore[arg-type]


class Parts:
    """One command in parts, on one bench."""

    def __init__(self, of: int, scenario: Scenario, bench: Bench) -> None:
        self.of, self.scenario, self.bench = of, scenario, bench
        self.words = scenario.words(bench.work, bench.sources)
        self.target = scenario.targets[0]
        self.snapshots = bench.home / "before"
        self.report = Report(scenario.name)
        bench.fresh(scenario)
        self.before = tree(bench.work)
        if (one := bench.run(self.words, Injector(scenario))).code:
            raise WrongError(f"{scenario.name} fails without parts: {one.err}")
        self.golden = tree(bench.work)
        bench.fresh(scenario)
        shutil.rmtree(self.snapshots, ignore_errors=True)
        self.calls: list[list[Call]] = []
        for number in range(1, of + 1):
            shutil.copytree(bench.work, self.snapshots / str(number), symlinks=True)
            ended = self.run(number, Injector(scenario))
            if ended.code or "Traceback" in ended.err:
                raise WrongError(f"{scenario.name}, part {number} fails without a fault: {ended.code} {ended.err}")
            self.calls.append(ended.calls)
        if (now := tree(bench.work)) != self.golden:
            raise WrongError(f"{scenario.name} in parts makes something else: {_different(now, self.golden)}")
        self.report.points = sum(map(len, self.calls))

    def run(self, number: int, decide: Injector) -> Outcome:
        return self.bench.run([*self.words, "--part", f"{number}/{self.of}"], decide)

    def cases(self) -> list[tuple[int, Case]]:
        """Each call of each part: killed before it, after it where it changes a name, and one other fault in turn."""
        found = []
        for number, calls in enumerate(self.calls, 1):
            for n, call in enumerate(sorted(calls, key=lambda c: c.key)):
                others = [f for f in _FAULTS[1:] if fits(f, call)]
                found.append((number, Case("kill -9", call)))
                found += [(number, Case(others[n % len(others)], call))] if others else []
                if call.name.startswith(("rename", "link", "unlink", "mkdir", "rmdir")):
                    found.append((number, Case("kill -9", call, after=True)))
        return found

    def strike(self, number: int, case: Case, injector: Injector | None = None) -> None:
        bench, report = self.bench, self.report
        for directory in (bench.work, bench.scratch):
            shutil.rmtree(directory)
        shutil.copytree(self.snapshots / str(number), bench.work, symlinks=True)
        bench.scratch.mkdir()
        injector = injector or Injector(self.scenario, case.fault, case.point, after=case.after)
        injector.remember(bench.work)
        report.runs += 1
        ended = self.run(number, injector)
        (bench.home / "filler").unlink(missing_ok=True)
        try:
            if not injector.struck:
                raise WrongError("the part did not come to this point")
            self._check(ended, case)
            self._again(number)
        except (WrongError, TimeoutError) as e:
            at = str(case.point).replace(f"{bench.home}/", "")
            when = "after" if case.after else "at"
            said = f"\n  exit code {ended.code}\n  {ended.err.strip()[-600:]}"
            report.wrong.append(f"{self.scenario.name}, part {number}: {case.fault} {when} {at}: {e}{said}")

    def fill(self, number: int, case: Case) -> None:
        """The disk is full from this call on."""
        self.strike(number, case, _Filling(self, case.point))

    def _check(self, ended: Outcome, case: Case) -> None:
        found = below(tree(self.bench.work), self.target)
        if found not in ({}, below(self.before, self.target), below(self.golden, self.target)):
            raise WrongError(f"DST is neither as before nor complete: {sorted(found)}")
        if not found and below(self.before, self.target) and self.scenario.exchange:
            raise WrongError("DST has gone")
        if "Traceback" in ended.err:
            raise WrongError("a traceback")
        if case.fault == "kill -9":
            if ended.code != -9 and not case.after:
                raise WrongError("it outlived kill -9")
            self.report.ends["killed"] += 1
        elif ended.code:
            if ended.code not in (1, 3) or ended.err.count("error: ") != 1:
                raise WrongError("not one clean error")
            self.report.ends["error"] += 1
        else:
            self.report.ends["done"] += 1

    def _again(self, number: int) -> None:
        """Run this part again, then all that DST waits for."""
        for again in (number, *range(1, self.of + 1), *range(1, self.of + 1)):
            now = tree(self.bench.work)
            if now == self.golden:
                return
            ended = self.run(again, Injector(self.scenario))
            if ended.code == 1 and "the destination exists" in ended.err and tree(self.bench.work) == self.golden:
                return  # all that was left was an empty directory
            if ended.code or "Traceback" in ended.err:
                raise WrongError(f"part {again} afterwards fails: {ended.code} {ended.err}")
        if (now := tree(self.bench.work)) != self.golden:
            raise WrongError(f"afterwards there is something else: {_different(now, self.golden)}")


class _Filling(Injector):
    """Nothing is said to fail: the disk is filled before one call, and the kernel says the rest."""

    def __init__(self, parts: Parts, point: Call) -> None:
        super().__init__(parts.scenario)
        self._point, self._filler = point.key, parts.bench.home / "filler"

    def __call__(self, call: Call) -> Decision:
        if call.key == self._point:
            self.struck = True
            fill(self._filler)
        return self.usual(call)


def _different(a: Tree, b: Tree) -> list[str]:
    return sorted({n for n in a.keys() | b.keys() if a.get(n) != b.get(n)})


# -- all at once


class _Time:
    """What ``time`` is on another machine."""

    def __init__(self, offset: float) -> None:
        self._offset = offset

    def monotonic(self) -> float:
        return time.monotonic() + self._offset

    def time(self) -> float:
        return time.time() - self._offset

    def __getattr__(self, name: str) -> object:
        return getattr(time, name)


class _Crowd(Bench):
    """Starts parts as on machines of their own."""

    def start(self, words: Sequence[str], machine: str, offset: float) -> object:
        """Patches this process before the fork, which is told apart by what it says of its machine."""
        _small()
        claims.BEAT, claims.SILENT = 0.05, 0.6
        holder.machine = members.machine = lambda: machine  # type: ignore[attr-defined]
        claims.time = members.time = member.time = _Time(offset)  # type: ignore[attr-defined, assignment]
        return _start(self, words)


def crowd(of: int, scenario: Scenario, bench: _Crowd, rounds: int, seed: int) -> Report:
    """All parts at once, some of them killed or stopped; then those again that have not ended well."""
    draw, report = random.Random(seed), Report(f"{scenario.name}, {of} at once")  # noqa: S311 - delays
    words = scenario.words(bench.work, bench.sources)
    bench.fresh(scenario)
    before = below(tree(bench.work), scenario.targets[0])
    _end(bench.start(words, "one", 0.0))  # type: ignore[arg-type]
    golden, number = tree(bench.work), 0
    for nth in range(rounds):
        bench.fresh(scenario)
        waiting, said = list(range(1, of + 1)), ""
        for attempt in range(12):
            trouble = draw.choice(("", "kill", "stop")) if attempt < 3 else ""
            running = []
            for part in waiting:
                number += 1
                part_words = [*words, "--part", f"{part}/{of}"]
                running.append((part, bench.start(part_words, f"machine {number}", draw.uniform(-1e8, 1e8))))
                time.sleep(draw.choice((0.0, 0.0, 0.02, 0.1)))
            report.runs += len(running)
            extra = _trouble(trouble, running, bench, words, of, draw)
            report.runs += len(extra)
            ended = [(part, _end(started)) for part, started in [*running, *extra]]  # type: ignore[arg-type]
            for part, end in ended:
                said += f"\n  {attempt}: part {part}, {trouble or 'quiet'}: {end.code} {end.err.strip()[-300:]}"
                report.ends["killed" if end.code < 0 else "error" if end.code else "done"] += 1
                if "Traceback" in end.err or (end.code > 0 and (end.code != 1 or end.err.count("error: ") != 1)):
                    report.wrong.append(f"{report.name}, round {nth}: not one clean error{said}")
            found = below(tree(bench.work), scenario.targets[0])
            if found not in ({}, before, below(golden, scenario.targets[0])):
                report.wrong.append(
                    f"{report.name}, round {nth}: DST is not complete: {_different(found, golden)}{said}"
                )
            if tree(bench.work) == golden:
                break
        else:
            left = _different(tree(bench.work), golden)
            report.wrong.append(f"{report.name}, round {nth}: DST is not made in the end: {left}{said}")
    return report


def _trouble(
    trouble: str, running: list[tuple[int, object]], bench: _Crowd, words: Sequence[str], of: int, draw: random.Random
) -> list[tuple[int, object]]:
    """Kill some, or stop one and start another one for the same part meanwhile. Returns those that were started."""
    extra: list[tuple[int, object]] = []
    for part, started in draw.sample(running, draw.randint(1, len(running))) if trouble else ():
        time.sleep(draw.random() * 0.25)
        pid: int = started.pid  # type: ignore[attr-defined]
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL if trouble == "kill" else signal.SIGSTOP)
        if trouble == "stop":
            extra.append(
                (part, bench.start([*words, "--part", f"{part}/{of}"], f"again {pid}", draw.uniform(-1e8, 1e8)))
            )
            time.sleep(draw.choice((0.1, 1.5, 2.5)))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    return extra


# -- the whole


class _Task(NamedTuple):
    kind: str
    which: int
    numbers: range
    root: str


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torture.members", description=__doc__.partition("\n")[0])
    parser.add_argument("--kind", choices=_KINDS)
    parser.add_argument("--only", default="", metavar="TEXT", help="only commands with this in their name")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every Nth case")
    parser.add_argument("--rounds", type=int, default=10, help="of all parts at once, for each command")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    given = parser.parse_args(words)
    if why := interpose.available():
        print(f"the calls of a process cannot be supervised here: {why}", file=sys.stderr)  # noqa: T201
        return 2
    campaign.warm_up()
    wrong = 0
    with campaign.place() as root:
        sources = root / "sources"
        sources.mkdir()
        prepare(sources)
        chosen = [i for i, (_, s) in enumerate(SCENARIOS) if given.only in s.name]
        tasks = []
        for kind in [given.kind] if given.kind else _KINDS:
            for i in chosen:
                numbers = range(given.rounds) if kind == "crowd" else range(i % given.every, 10**6, given.every)
                tasks.append(_Task(kind, i, numbers, str(root)))
        with multiprocessing.get_context("fork").Pool(given.jobs, maxtasksperchild=1) as pool:
            print(f"{'':44}{'points':>8}{'runs':>8}{'killed':>8}{'failed':>8}{'done':>8}{'wrong':>8}")  # noqa: T201
            for report in pool.imap_unordered(_work, tasks):
                ends: Counter[str] = report.ends
                counts = (report.points, report.runs, ends["killed"], ends["error"], ends["done"], len(report.wrong))
                print(f"{report.name:44}" + "".join(f"{n:8,}" for n in counts), flush=True)  # noqa: T201
                for text in report.wrong[:5]:
                    print(f"  {text}")  # noqa: T201
                wrong += len(report.wrong)
    return bool(wrong)


def _work(task: _Task) -> Report:
    of, scenario = SCENARIOS[task.which]
    home = Path(task.root) / f"{task.kind}{task.which}"
    sources = Path(task.root) / "sources"
    try:
        if task.kind == "crowd":
            return crowd(max(of, 4), scenario, _Crowd(home, sources), len(task.numbers), task.which)
        if task.kind == "full":
            home.mkdir()
            small_disk(home)
            scenario = replace(scenario, name=f"{scenario.name}, a full disk")
        parts = Parts(of, scenario, _Bench(home, sources))
        do: Callable[[int, Case], None] = parts.strike
        cases = parts.cases()
        if task.kind == "full":
            points = [(i, call) for i, calls in enumerate(parts.calls, 1) for call in calls]
            do, cases = parts.fill, [(i, Case("disk full", call)) for i, call in points]
        for n in task.numbers:
            if n >= len(cases):
                break
            do(*cases[n])
    except (WrongError, TimeoutError, interpose.UnavailableError) as e:
        return Report(scenario.name, wrong=[str(e)])
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return parts.report


if __name__ == "__main__":
    sys.exit(main())
