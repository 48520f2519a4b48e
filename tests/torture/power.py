"""What a loss of power leaves: at every point of a run, the states of the disk that it may have come to.

What POSIX promises is little: the bytes of a file are on disk after fsync of the file, its name after fsync of the
directory. All else may have reached the disk, or not, in any order. Here the supervised run never syncs; it is noted
what each sync would have made durable, and before each call four disks are made of that and of what there is now:

    strict    only what was synced
    names     all names, as after a journal commit; bytes that were not synced are gone (zeros, the size is there)
    data      all bytes, but only the names that were synced
    mixed     each directory and each file either way, each half of a file for itself (drawn by number of the call)

On each of them DST must be absent, as before, or complete, and the command must go on from there. When the run has
said that it is done, DST must be complete on the strictest of them.
"""

from __future__ import annotations

import os
import random
import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.torture.campaign import Campaign, Injector, Tree, WrongError, below, tree
from tests.torture.interpose import WRITES, Call, Decision, Outcome

CHANGES_BYTES = (*WRITES, "ftruncate", "fallocate", "copy_file_range")
MAKES_NAMES = ("openat", "mkdir", "link", "linkat")
MODES = ("strict", "names", "data", "mixed")
Listing = dict[str, int]
"""Name -> inode."""


@dataclass(slots=True)
class Disk:
    """All directories and files by inode."""

    listings: dict[int, Listing] = field(default_factory=dict)
    contents: dict[int, bytes] = field(default_factory=dict)
    modes: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, root: Path) -> Disk:
        disk = cls()
        waiting = [root]
        while waiting:
            directory = waiting.pop()
            listing = disk.listings[directory.stat().st_ino] = {}
            for entry in os.scandir(directory):
                st = entry.stat(follow_symlinks=False)
                listing[entry.name] = st.st_ino
                disk.modes[st.st_ino] = st.st_mode
                if stat.S_ISDIR(st.st_mode):
                    waiting.append(Path(entry.path))
                else:
                    disk.contents[st.st_ino] = Path(entry.path).read_bytes()
        return disk

    def build(self, root: Path, number: int) -> None:
        """Make the directory ``number`` at ``root``."""
        root.mkdir()
        for name, inode in self.listings.get(number, {}).items():
            if stat.S_ISDIR(self.modes[inode]):
                self.build(root / name, inode)
            else:
                (root / name).write_bytes(self.contents.get(inode, b""))
                (root / name).chmod(stat.S_IMODE(self.modes[inode]))


class PowerLoss:
    """The disks that a run of a campaign's command may leave, made while it runs."""

    def __init__(self, campaign: Campaign, found: Callable[[int, str, Disk], None]) -> None:
        self.work = campaign.bench.work
        self.root = self.work.stat().st_ino
        self.found = found
        self.usual = Injector(campaign.scenario)
        self.durable = Disk.of(self.work)

    def __call__(self, call: Call) -> Decision:
        now = Disk.of(self.work)
        for mode in MODES:
            self.found(call.number, mode, self.state(now, mode, call.number))
        if call.name in ("fsync", "fdatasync"):
            number = Path(f"/proc/{call.pid}/fd/{call.fd}").stat().st_ino
            if number in now.listings:
                self.durable.listings[number] = now.listings[number]
            elif number in now.contents:
                self.durable.contents[number] = now.contents[number]
        return self.usual(call)

    def state(self, now: Disk, mode: str, seed: int) -> Disk:
        draw = random.Random(seed)  # noqa: S311 - it has to be the same each time

        def current(kind: str) -> bool:
            return draw.random() < 0.5 if mode == "mixed" else mode == kind

        disk = Disk(modes={**self.durable.modes, **now.modes})
        self.durable.modes = disk.modes
        for number in sorted(now.listings.keys() | self.durable.listings.keys()):
            newest = now.listings.get(number, self.durable.listings.get(number, {}))
            disk.listings[number] = newest if current("names") else self.durable.listings.get(number, {})
        for number in sorted(now.contents.keys() | self.durable.contents.keys()):
            old = self.durable.contents.get(number, b"")
            new = now.contents.get(number, old)
            kept = old[: len(new)].ljust(len(new), b"\0")  # the size may have come with the name
            half = len(new) // 2
            head = new[:half] if current("data") else kept[:half]
            disk.contents[number] = head + (new[half:] if current("data") else kept[half:])
        return disk


def lose_power(campaign: Campaign, *, every: int, start: int = 0) -> None:
    """One run, every state of it checked, and the command repeated on every ``every``-th different one."""
    bench, scenario, report = campaign.bench, campaign.scenario, campaign.report
    bench.fresh(scenario)
    root = bench.work.stat().st_ino
    seen: dict[str, tuple[int, str, Disk]] = {}
    if not scenario.prepared and scenario.targets == ("dst",):
        check_order(campaign.calls, str(bench.work / "dst"))

    def found(number: int, mode: str, disk: Disk) -> None:
        seen.setdefault(_identity(disk, root), (number, mode, disk))

    power = PowerLoss(campaign, found)
    ended = bench.run(campaign.words, power)
    if ended.code:
        raise WrongError(f"{scenario.name} fails without a fault: {ended.err}")
    end = power.state(Disk.of(bench.work), "strict", 0)
    states = [*seen.values(), (len(campaign.calls) + 1, "the end, strict", end)]
    for i, (number, mode, disk) in enumerate(states):
        last = disk is end
        report.runs += 1
        report.ends["killed"] += 1
        shutil.rmtree(bench.work)
        disk.build(bench.work, root)
        shutil.rmtree(bench.scratch)
        bench.scratch.mkdir()
        try:
            left = campaign.check_state(Outcome(-9, "", ""), "kill -9")
            if last and not all(_whole(campaign, t) for t in scenario.targets):
                raise WrongError("the run has ended, and its output is not durable")
            if (i + start) % every == 0 or last:
                campaign.recover(left)
        except WrongError as e:
            at = campaign.calls[number - 1] if number <= len(campaign.calls) else "the end"
            report.wrong.append(f"{scenario.name}: power lost ({mode}) before {campaign.shown(at)}: {e}")


def check_order(calls: list[Call], target: str) -> None:
    """The order that docs/robustness/crashes.md promises for a DST that is a new directory. Raises WrongError."""
    partial = target + ".partial"
    published = next(c.number for c in calls if c.name.startswith("rename") and c.path == partial)
    inside = [c for c in calls if c.path.startswith(partial + "/") and c.number < published]
    journal = f"{partial}/.journal"
    sealed = next(c.number for c in inside if c.name == "unlink" and c.path == journal)
    for path in {c.path for c in inside} - {journal}:
        last = max((c.number for c in inside if c.path == path and c.name in CHANGES_BYTES), default=0)
        if last and not any(c.name == "fsync" and last < c.number < sealed for c in inside if c.path == path):
            raise WrongError(f"{path} is not synced after its last write")
    made = {}
    for c in inside:
        if c.name in MAKES_NAMES:
            made[str(Path(c.path).parent)] = c.number
    for directory, named in made.items():
        after = [c.number for c in calls if c.name == "fsync" and c.path == directory]
        if not any(named < n < published for n in after):
            raise WrongError(f"the names in {directory} are not synced before the rename")
    if not any(c.name == "fsync" and c.path == partial and sealed < c.number < published for c in calls):
        raise WrongError("the journal may come back under DST")
    if not any(c.name == "fsync" and c.path == str(Path(target).parent) and c.number > published for c in calls):
        raise WrongError("the name of DST is not synced")
    for line in [c.number for c in inside if c.path == journal and c.name in WRITES][1:]:
        synced = [c for c in inside if c.name == "fdatasync" and c.number < line]
        dirty = {c.path for c in inside if c.name in CHANGES_BYTES and c.number < line} - {journal}
        recorded = [c.path for c in synced if c.path != journal]
        if dirty and not recorded:
            raise WrongError("the journal speaks of parts that nobody has synced")


def _whole(campaign: Campaign, target: str) -> bool:
    found: Tree = tree(campaign.bench.work)
    return below(found, target) == below(campaign.golden, target)


def _identity(disk: Disk, number: int) -> str:
    """The same for disks that hold the same files."""
    parts = []
    for name, inode in sorted(disk.listings.get(number, {}).items()):
        inside = stat.S_ISDIR(disk.modes[inode])
        what = _identity(disk, inode) if inside else str(hash(disk.contents.get(inode, b"")))
        parts.append(f"{name}:{what}")
    return "{" + ",".join(parts) + "}"
