"""Two runs at once, and sources that change under a run.

``race`` starts two commands on one destination within milliseconds of each other, many times over. ``shift`` changes a
source at a chosen point of a run: the supervisor does it while the run stands still there.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.torture.campaign import (
    Bench,
    Campaign,
    Injector,
    Report,
    Tree,
    WrongError,
    below,
    command,
    small_steps,
    tree,
)
from tests.torture.interpose import Call, Decision, Outcome
from tests.torture.scenarios import Scenario, nothing

# -- two runs


@dataclass(frozen=True, slots=True)
class Race:
    """Two commands that want the same destination."""

    name: str
    words: tuple[Sequence[str], Sequence[str]]
    before: Callable[[Path, Path], None] = nothing
    target: str = "dst"
    both: bool = False
    """Both may end well, one after the other."""
    interrupted: bool = False
    """Both find what the first left when it was killed half way, and resume it."""


def _reshard(model: str, *more: str) -> list[str]:
    return ["reshard", f"{{s}}/merge/inputs/{model}", "{w}/dst", "--tp-out", "2", "--to", "ranks", *more]


def _old(w: Path, s: Path) -> None:
    shutil.copytree(s / "merge/inputs/tokA", w / "dst")


def _file(w: Path, s: Path) -> None:
    shutil.copyfile(s / "merge/inputs/ft2/model.safetensors", w / "m.safetensors")
    for name in ("one", "two"):
        text = f'{{"__metadata__": {{"format": "{name}"}}'
        ended = _header(w / "m.safetensors")
        rest = ended[ended.index('},"') + 1 :] if '"__metadata__"' in ended else "," + ended[1:]
        (w / f"{name}.json").write_text(text + rest)


def _header(path: Path) -> str:
    with path.open("rb") as f:
        return f.read(int.from_bytes(f.read(8), "little")).decode()


RACES = (
    Race("one command twice", (_reshard("ft1"), _reshard("ft1"))),
    Race("two sources", (_reshard("ft1"), _reshard("ft2"))),
    Race("--force", (_reshard("ft1", "--force"), _reshard("ft2", "--force")), _old, both=True),
    Race("--force, computed", (
        ["merge", "{s}/merge/inputs/ft1", "{s}/merge/inputs/ft2", "--weights", "0.6,0.4", "-o", "{w}/dst", "--force"],
        _reshard("ft2", "--force")), _old, both=True),
    Race("--resume", (_reshard("ft1", "--resume"), _reshard("ft1", "--resume")), interrupted=True),
    Race("--resume against --force", (_reshard("ft1", "--resume"), _reshard("ft1", "--force")), interrupted=True,
         both=True),
    Race("convert-json", (
        ["convert-json", "{s}/paddle_programs/pir/model.json", "{w}/dst.safetensors"],
        ["convert-json", "{s}/paddle_programs/pir/model.json", "{w}/dst.safetensors"]), target="dst.safetensors"),
    Race("inspect --set-header, two edits", (
        ["inspect", "{w}/m.safetensors", "--set-header", "{w}/one.json"],
        ["inspect", "{w}/m.safetensors", "--set-header", "{w}/two.json"]), _file, target="m.safetensors", both=True),
    Race("convert-json --fix", (
        ["convert-json", "{s}/paddle_programs/nan_attr/model.json", "--fix", "{w}/fixed.json"],
        ["convert-json", "{s}/paddle_programs/nan_attr/model.json", "--fix", "{w}/fixed.json"]), target="fixed.json"),
)  # fmt: skip


def race(contest: Race, bench: Bench, times: int, seed: int = 0) -> Report:
    """Run it ``times`` times. DST must be what one of the two makes, and who did not make it must say so."""
    draw = random.Random(seed)  # noqa: S311 - delays
    words = [[w.format(w=bench.work, s=bench.sources) for w in side] for side in contest.words]
    report = Report(contest.name)

    def begin() -> None:
        for directory in (bench.work, bench.scratch):
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
        contest.before(bench.work, bench.sources)
        if contest.interrupted:
            shutil.copytree(bench.home / "interrupted", bench.work, dirs_exist_ok=True)

    if contest.interrupted:
        _interrupt(bench, [w for w in words[0] if w != "--resume"])
    golden: list[Tree] = []
    for side in words:
        begin()
        alone = bench.run(side, Injector(_PLAIN))
        if alone.code:
            raise WrongError(f"{contest.name}: {alone.err}")
        golden.append(below(tree(bench.work), contest.target))
    rest = {n for n in tree(bench.work) if n.split("/")[0] != contest.target}
    for _ in range(times):
        begin()
        report.runs += 2
        delay = draw.choice((0, 0, draw.random() * 0.02, draw.random() * 0.1))
        first = _start(bench, words[0])
        time.sleep(delay)
        second = _start(bench, words[1])
        ended = [_end(first), _end(second)]
        won = sum(not e.code for e in ended)
        report.ends["error"] += 2 - won
        report.ends["done"] += won
        found = tree(bench.work)
        wrong = ""
        if below(found, contest.target) not in golden:
            wrong = f"what is there, neither of them has made: {sorted(below(found, contest.target))}"
        elif not won or (won == 2 and not contest.both):
            wrong = f"{won} of them made it"
        elif won == 1 and below(found, contest.target) != golden[[not e.code for e in ended].index(True)]:
            wrong = "it is not the winner's"
        elif {n for n in found if n.split("/")[0] != contest.target} != rest:
            wrong = f"something is left: {sorted(found)}"
        elif any("Traceback" in e.err or (e.code and (e.code != 1 or e.err.count("error: ") != 1)) for e in ended):
            wrong = "not one clean error"
        if wrong:
            said = "".join(f"\n  exit code {e.code}: {e.err.strip()[-400:]}" for e in ended)
            report.wrong.append(f"{report.name}: second after {delay * 1000:.0f} ms: {wrong}{said}")
    return report


_PLAIN = Scenario("plain", "")


def _interrupt(bench: Bench, words: list[str]) -> None:
    """Keep what a run leaves that is killed when half of its bytes are recorded."""
    shutil.rmtree(bench.work, ignore_errors=True)
    shutil.rmtree(bench.scratch, ignore_errors=True)
    bench.work.mkdir()
    bench.scratch.mkdir()
    journal = [c for c in bench.run(words, Injector(_PLAIN)).calls if c.path.endswith(".journal") and "write" in c.name]
    shutil.rmtree(bench.work)
    bench.work.mkdir()
    bench.run(words, Injector(_PLAIN, "kill -9", journal[len(journal) // 2]))
    shutil.rmtree(bench.home / "interrupted", ignore_errors=True)
    shutil.copytree(bench.work, bench.home / "interrupted")


@dataclass(slots=True)
class _Started:
    pid: int
    streams: list[int]


def _start(bench: Bench, words: Sequence[str]) -> _Started:
    """A command on its own, which nobody supervises."""
    streams = [os.memfd_create(name) for name in ("stdout", "stderr")]
    pid = os.fork()
    if pid:
        return _Started(pid, streams)
    code = 70
    try:
        for number, fd in enumerate(streams, 1):
            os.dup2(fd, number)
        sys.stdout, sys.stderr = (open(n, "w", encoding="utf-8", closefd=False) for n in (1, 2))  # noqa: SIM115
        small_steps(serial=False)
        os.chdir(bench.home)
        tempfile.tempdir = str(bench.scratch)
        code = command(words)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _end(started: _Started) -> Outcome:
    _, status = os.waitpid(started.pid, 0)
    out, err = (os.pread(fd, os.fstat(fd).st_size, 0).decode() for fd in started.streams)
    for fd in started.streams:
        os.close(fd)
    return Outcome(os.waitstatus_to_exitcode(status), out, err)


# -- sources that change


def _same_size(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for i in range(len(data) // 2, len(data), 64):
        data[i] ^= 0xFF
    path.write_bytes(data)


def _appended(path: Path) -> None:
    with path.open("ab") as f:
        f.write(b"more")


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _touched(path: Path) -> None:
    os.utime(path)


def _exchanged(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(bytes(path.stat().st_size))
    other.replace(path)


CHANGES: dict[str, Callable[[Path], None]] = {
    "other bytes": _same_size,
    "longer": _appended,
    "shorter": _cut,
    "touched": _touched,
    "another file": _exchanged,
    "gone": lambda path: path.unlink(),
}


class Shift:
    """Changes a source at one point of a run."""

    def __init__(self, point: Call, path: Path, change: Callable[[Path], None]) -> None:
        self.usual = Injector(_PLAIN)
        self.key = point.key
        self.path = path
        self.change = change

    def __call__(self, call: Call) -> Decision:
        if call.key == self.key:
            self.change(self.path)
        return self.usual(call)


def shift(campaign: Campaign, original: Path, *, points: int) -> None:
    """Every change to every source at ``points`` points. The run refuses, or has made what it would have made."""
    bench, scenario, report = campaign.bench, campaign.scenario, campaign.report
    step = max(1, len(campaign.calls) // points)
    files = [n for n, what in campaign.contents.items() if what != "directory" and _reads(campaign, n)]
    # The largest, which holds tensors, and the smallest, which says what they are.
    files.sort(key=lambda n: (bench.sources / n).stat().st_size)
    for call in campaign.calls[::step]:
        for name in dict.fromkeys((files[-1], files[0])):
            for what, change in CHANGES.items():
                bench.fresh(scenario)
                report.runs += 1
                ended = bench.run(campaign.words, Shift(call, bench.sources / name, change))
                wrong = _shifted(campaign, ended)
                if wrong:
                    said = f"\n  exit code {ended.code}\n  {ended.err.strip()[-500:]}"
                    at = campaign.shown(call)
                    report.wrong.append(f"{scenario.name}: {name} {what} at {at}: {wrong}{said}")
                shutil.rmtree(bench.sources)
                shutil.copytree(original, bench.sources)


def _reads(campaign: Campaign, name: str) -> bool:
    roots = [w for w in campaign.words if w.startswith(f"{campaign.bench.sources}/")]
    return any(
        str(campaign.bench.sources / name) == r or f"{campaign.bench.sources}/{name}".startswith(r + "/") for r in roots
    )


def _shifted(campaign: Campaign, ended: Outcome) -> str:
    found = tree(campaign.bench.work)
    target = campaign.scenario.targets[0]
    now = below(found, target)
    if not ended.code or (ended.code == 3 and found == campaign.golden):  # 3: what --fix checks afterwards
        campaign.report.ends["done"] += 1
        return "" if found == campaign.golden else "a mixture is published"
    campaign.report.ends["error"] += 1
    if ended.code not in (1, 3) or ended.err.count("error: ") != 1 or "Traceback" in ended.err:
        return "not one clean error"
    if now != below(campaign.before, target):
        return f"it fails, and there is {sorted(now)}"
    if found != campaign.before and "--resume" not in ended.err:
        return f"something is left: {sorted(found)}"
    return ""


# -- a reader


READING = "inspect while --force replaces"


def read(bench: Bench, times: int) -> Report:
    """``inspect`` while DST is replaced over and over: it shows one of the two, or says that it cannot."""
    report = Report(READING)
    for directory in (bench.work, bench.scratch):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
    dst = str(bench.work / "dst")
    look = ["inspect", dst, "--hash", "--json"]
    writes = [[w.format(w=bench.work, s=bench.sources) for w in _reshard(m, "--force")] for m in ("ft1", "ft2")]
    golden = []
    for side in writes:
        if (made := bench.run(side, Injector(_PLAIN))).code:
            raise WrongError(made.err)
        golden.append(bench.run(look, Injector(_PLAIN)).out)
    if not all(golden) or golden[0] == golden[1]:
        raise WrongError("inspect shows no difference")
    for n in range(times):
        writer = _start(bench, writes[n % 2])
        while True:
            reader = _end(_start(bench, look))
            report.runs += 1
            if reader.code:
                report.ends["error"] += 1
                if reader.code != 1 or reader.err.count("error: ") != 1 or "Traceback" in reader.err:
                    report.wrong.append(f"{report.name}: not one clean error: {reader.err[-500:]}")
            else:
                report.ends["done"] += 1
                if reader.out not in golden:
                    report.wrong.append(f"{report.name}: what it shows was never there")
            if os.waitid(os.P_PID, writer.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                break
        if (ended := _end(writer)).code:
            report.wrong.append(f"{report.name}: the writer fails: {ended.err[-500:]}")
    return report
