"""A disk that is really full, and a limit on the size of files.

``small_disk`` mounts a filesystem of a few megabytes in memory, in a namespace of this process alone, which needs no
root where users may have namespaces. Before a call of the run the supervisor fills it to the last byte; afterwards it
makes room again, as the user would, and the command goes on.
"""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

from tests.torture.campaign import Campaign, Case, Injector, WrongError
from tests.torture.interpose import Call, Decision, UnavailableError

SIZE = 8 << 20
"""Bytes of the small disk; what the commands write here is less."""
LIMITS = (0.1, 0.5, 0.9)
"""Largest file that a run may write, as a part of the largest one that it has to write."""


def small_disk(at: Path) -> None:
    """Mount it. Raises UnavailableError where this process may not."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(0x10000000 | 0x20000):  # CLONE_NEWUSER | CLONE_NEWNS
        raise UnavailableError(f"unshare: {os.strerror(ctypes.get_errno())}")
    try:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    except OSError as e:
        raise UnavailableError(f"a namespace of its own: {e.strerror}") from e
    if libc.mount(b"tmpfs", os.fsencode(at), b"tmpfs", 0, f"size={SIZE}".encode()):
        raise UnavailableError(f"mount: {os.strerror(ctypes.get_errno())}")


class _Filling(Injector):
    """Nothing is said to fail: the disk is filled before one call, and the kernel says the rest."""

    def __init__(self, campaign: Campaign, point: Call) -> None:
        super().__init__(campaign.scenario)
        self.filled = point.key
        self.filler = campaign.bench.home / "filler"

    def make_room(self) -> None:
        self.filler.unlink(missing_ok=True)

    def __call__(self, call: Call) -> Decision:
        if call.key == self.filled:
            self.struck = True
            fill(self.filler)
        return self.usual(call)


def fill(path: Path) -> None:
    """Leave no byte of space beside this file."""
    with path.open("wb", buffering=0) as f:
        for size in (1 << 20, 4096, 1):
            try:
                while True:
                    f.write(b"x" * size)
            except OSError as e:
                if e.errno != errno.ENOSPC:
                    raise


def fill_disk(campaign: Campaign, *, every: int) -> None:
    """The disk is full from a point on, for every ``every``-th point."""
    for call in sorted(campaign.calls, key=lambda c: c.key)[::every]:
        filling = _Filling(campaign, call)
        campaign.strike(Case("disk full", call), filling, mend=filling.make_room)


def limit_sizes(campaign: Campaign) -> None:
    """The kernel refuses files beyond a size (``ulimit -f``): nothing is left, and nothing is made."""
    bench, scenario, report = campaign.bench, campaign.scenario, campaign.report
    if scenario.edits:
        return  # nothing grows
    made = [n for n, what in campaign.golden.items() if len(what) == 64 and campaign.before.get(n) != what]
    largest = max((bench.work / n).stat().st_size for n in made)
    if largest < 16 << 10:
        return  # a limit would meet what is printed, too
    for part in LIMITS:
        bench.fresh(scenario)
        report.runs += 1
        ended = bench.run(campaign.words, Injector(scenario), limit=max(4096, int(largest * part)))
        try:
            campaign.check_end(ended, "EFBIG")
            if not ended.code:
                raise WrongError("it went on beyond the limit")
            if left := campaign.check_state(ended, "EFBIG"):
                raise WrongError(f"it leaves {left}")
        except WrongError as e:
            report.wrong.append(f"{scenario.name}: files up to {part:.0%}: {e}\n  {ended.err.strip()}")
