"""How long a run on many machines takes, from what its parts were measured to take.

    python -m scripts.simulate_cluster [--write]        print the tables, or put them into the page,
                                                        docs/cluster/parts.md

Each machine works off shares one after the other, as ``--on ray`` has it: it has its next order before it has answered,
the one that started the run takes the answers one by one, and shares that are lost are done again by others. A share
takes what its bytes take on the narrowest way (link, CPU, disk, requests that a bucket answers), and what is measured
beside. What is not here: a filesystem that is slower than the links of all machines together, links that others use,
and what one Python process can move at most, which is more than was measured (4 GB/s without TLS) but not known.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckpttool.execute.machines.fleetwork import waning

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "cluster" / "parts.md"
BEGIN, END = "<!-- python -m scripts.simulate_cluster -->", "<!-- end -->"
GB = 1e9


@dataclass(frozen=True)
class Model:
    """What is moved."""

    name: str
    nbytes: float
    plan: float
    """CPU seconds of planning, measured with a hollow checkpoint of these names (``bench/scale.py``)."""
    plan_bytes: float
    """Of the plan on its way to a node."""


V3 = Model("671B in FP8, 700 GB", 700 * GB, 5.8, 2.7e6)
KIMI = Model("1T in bf16, 2 TB", 2000 * GB, 5.8, 2.7e6)


@dataclass(frozen=True)
class Machine:
    """What each node has."""

    name: str
    link: float
    """Bytes a second, each way: nine tenths of the line."""
    disk: float = 0.0
    """Bytes a second that are written to a disk of the node's own; 0 where all goes through the link."""
    cores: int = 16


MACHINES = (
    Machine("10 Gbit/s", 1.1 * GB),
    Machine("25 Gbit/s", 2.8 * GB),
    Machine("100 Gbit/s", 11 * GB),
    Machine("100 Gbit/s, NVMe of 3 GB/s", 11 * GB, 3 * GB),
)
NODES = (1, 8, 16, 32, 64)


@dataclass(frozen=True)
class Costs:
    """What was measured (``make bench-cluster``, ``bench/jobs/remote.py``), and what others say."""

    tls: float = 1.15 / GB
    """CPU seconds a byte that comes over https."""
    move: float = 0.35 / GB
    """CPU seconds a byte that is moved and written."""
    requests: float = 5500 * (16 << 20)
    """Bytes a second that S3 answers for one prefix: 5,500 requests of 16 MiB (Amazon's documentation)."""
    start: float = 3.0
    """Until a process works on each node."""
    open: float = 0.6
    """Of a node, with a plan of 92,000 tensors: unpickle, digest, schedule."""
    share: float = 0.0012
    """Of a node, for each share."""
    answer: float = 0.0057
    """Of the process that started the run, for each answer: 0.7 ms, and 5 ms to sync a line of the journal."""
    edges: int = 10
    """Pieces of 64 KiB in each answer (512 shares of DeepSeek-V3)."""
    finish: float = 1.0
    """Sync, look at the sources again, rename."""
    silence: float = 65.0
    """Until Ray gives up a machine that does not answer: five checks of 10 s, 3 s apart (its defaults)."""
    shares: int = 8
    """A share is such a part of what is left for each node; see ``waning`` in ``execute/machines/fleetwork.py``."""
    finest: int = 4
    least: float = 16 << 20
    """Bytes of the smallest share."""


COSTS = Costs()
DEPTH = 2
"""Orders that a node has at a time."""


def rate(machine: Machine, nodes: int, costs: Costs = COSTS) -> tuple[float, str]:
    """Bytes a second of one of so many nodes, and what limits them."""
    ways = {
        "link": machine.link,
        "CPU": machine.cores / (costs.tls + costs.move),
        "requests": costs.requests / nodes,
    }
    if machine.disk:
        ways["disk"] = machine.disk
    least = min(ways, key=lambda way: ways[way])
    return ways[least], least


@dataclass(frozen=True)
class Trouble:
    """What happens to the first node."""

    slow: float = 1.0
    """Its speed, by that of the others."""
    lost_at: float = float("inf")
    """Second of the work at which it is gone."""
    noticed: float = 0.0
    """Seconds until somebody knows."""


WELL = Trouble()


def shares(nbytes: float, nodes: int, costs: Costs = COSTS) -> list[float]:
    """Bytes of all shares; the last one is given out first."""
    pieces = max(1, min(costs.finest * costs.shares * nodes, max(nodes, int(nbytes / costs.least))))
    sizes = [len(s) for s in waning([[0]] * pieces, costs.shares * nodes)]
    return [nbytes / pieces * size for size in reversed(sizes)]


def work(nbytes: float, machine: Machine, nodes: int, trouble: Trouble = WELL, costs: Costs = COSTS) -> float:
    """Seconds from the first order to the last answer."""
    speed, _ = rate(machine, nodes, costs)
    coming = shares(nbytes, nodes, costs)
    count = len(coming)
    answer = costs.answer + costs.edges * (64 << 10) / machine.link
    free = [0.0] * nodes
    """When each node has done what it has."""
    held: list[list[float]] = [[] for _ in range(nodes)]
    events: list[tuple[float, int, int]] = []
    """(second, what, node): 0 is a share that is done, 1 an answer that is taken, 2 the loss."""
    driver = now = 0.0
    done = 0
    gone = False
    if trouble.lost_at < float("inf"):
        heapq.heappush(events, (trouble.lost_at + trouble.noticed, 2, 0))

    def fill(node: int, at: float, depth: int = DEPTH) -> None:
        while coming and len(held[node]) < depth and not (gone and node == 0):
            size = coming.pop()
            held[node].append(size)
            pace = speed * (trouble.slow if node == 0 else 1.0)
            free[node] = max(free[node], at) + size / pace + costs.share
            if node or free[node] < trouble.lost_at:
                heapq.heappush(events, (free[node], 0, node))

    for depth in range(1, DEPTH + 1):
        for node in range(nodes):
            fill(node, 0.0, depth)
    while done < count:
        now, what, node = heapq.heappop(events)
        if what == 0:
            driver = max(driver, now) + answer
            heapq.heappush(events, (driver, 1, node))
        elif what == 1:
            done += 1
            held[node].pop(0)
            fill(node, now)
        else:
            gone = True
            coming += held[0]
            held[0] = []
            for other in range(1, nodes):
                fill(other, now)
    return now


def whole(model: Model, machine: Machine, nodes: int, costs: Costs = COSTS) -> tuple[float, str]:
    """Seconds of a run, and what takes most of them."""
    busy = work(model.nbytes, machine, nodes, costs=costs)
    before = model.plan + costs.finish
    if nodes > 1:
        before += costs.start + costs.open + nodes * model.plan_bytes / machine.link
    _, limit = rate(machine, nodes, costs)
    answers = len(shares(model.nbytes, nodes, costs)) * costs.answer
    if before > busy:
        limit = "start"
    elif answers > busy / 2:
        limit = "answers"
    return before + busy, limit


def table(model: Model) -> str:
    """Seconds, by nodes and machines."""
    lines = [f"| {model.name} | {' | '.join(m.name for m in MACHINES)} |", "| --- " * (1 + len(MACHINES)) + "|"]
    for nodes in NODES:
        cells = [f"{seconds:,.0f} s, {limit}" for seconds, limit in (whole(model, m, nodes) for m in MACHINES)]
        lines.append(f"| {nodes} node{'s' * (nodes > 1)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def troubles(model: Model, nodes: int, machine: Machine) -> str:
    """What a bad node costs."""
    well = work(model.nbytes, machine, nodes)
    cases = {
        "all is well": Trouble(),
        "a node at half speed": Trouble(slow=0.5),
        "the same, with one share for each node": Trouble(slow=0.5),
        "a node's process is killed in the middle": Trouble(lost_at=well / 2, noticed=0.1),
        "a node falls silent in the middle": Trouble(lost_at=well / 2, noticed=COSTS.silence),
    }
    lines = [f"| {model.name}, {nodes} nodes, {machine.name} | work |", "| --- | --- |"]
    for name, trouble in cases.items():
        costs = replace(COSTS, shares=1, finest=1) if "one share" in name else COSTS
        lines.append(f"| {name} | {work(model.nbytes, machine, nodes, trouble, costs):,.0f} s |")
    return "\n".join(lines)


def text() -> str:
    """All tables."""
    return "\n\n".join([table(V3), table(KIMI), troubles(V3, 16, MACHINES[1])])


def with_tables(page: str) -> str:
    """The page with these tables."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{text()}\n\n{END}{after}"


def main(arguments: Sequence[str]) -> None:
    """Print, or write."""
    if "--write" in arguments:
        PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(text())


if __name__ == "__main__":
    main(sys.argv[1:])
