"""Measure how a run on many machines scales, and what sharing it out costs.

    python -m bench.cluster [--nodes 1 2 4 8] [--gb 1.6] [--rate 200] [--rounds 1] [--quick] [--work DIR] [--json FILE]

The machines are raylets of a Ray cluster on this one, and processes of ``--part``. Each has a link of its own: a server
on 127.0.0.1 that sends the source's bytes at ``--rate`` MB/s, as S3 would. So the figures show what the shares, the
orders and the one journal cost, and nothing of filesystems or switches. What is timed is the work, from the first order
to the last answer (of parts: from the first one that begins to the last one that ends, without Python's start).

A share's overhead is that of many shares of hardly anything, on one node. A plan's way is that of DeepSeek-V3 (671B,
FP8, to tp 8 and ep 8) from the driver to nodes that have worked before, until the last one has opened it.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.jobs.remote import KEYS
from bench.measure import URL
from bench.models import Size, write_noise
from bench.sender import sending
from bench.setting import ROOT, TOOL, made
from bench.table import machine
from tests.cluster.ray_nodes import RayNodes

SHM = Path("/dev/shm")  # noqa: S108 - the default on Linux; --work is another one
SHARES = 200
"""Of hardly anything, to see what one costs."""
PLAN = "v3"
"""The source of ``bench/scale.py`` whose plan is sent."""


# -- in processes of their own


class Watched:
    """A fleet, with a clock."""

    def __init__(self, fleet: Any, expected: int) -> None:
        self.fleet = fleet
        self.expected = expected
        self.started = self.first = self.last = 0.0
        self.busy = 0.0
        """Seconds of CPU of this process while others work."""
        self.answers: list[float] = []
        self._cpu = 0.0

    def start(self, job: Any) -> None:
        began = time.monotonic()
        self.fleet.start(job)
        while self.fleet.nodes() < self.expected:  # a run begins with those that are there
            self.fleet.replies(0.1)
        self.started = time.monotonic() - began

    def nodes(self) -> int:
        return int(self.fleet.nodes())

    def slots(self) -> int:
        return int(self.fleet.slots())

    def send(self, ticket: int, order: Any) -> None:
        if not self.first:
            self.first, self._cpu = time.monotonic(), time.process_time()
        self.fleet.send(ticket, order)

    def replies(self, timeout: float) -> Any:
        found = self.fleet.replies(timeout)
        if found:
            self.last, self.busy = time.monotonic(), time.process_time() - self._cpu
            self.answers += [self.last] * len(found)
        return found

    def end(self, *, now: bool) -> None:
        self.fleet.end(now=now)


def _repeat(destination: Any, times: int) -> None:
    """Have the smallest order of a run given so often, which changes nothing in what is written."""
    orders = destination.orders

    def repeated(self: Any, survey: Any, shares: Any, finished: Any) -> list[Any]:
        smallest = min((t for share in shares for t in share), key=lambda t: survey.tasks[t].nbytes)
        given: list[Any] = orders(self, survey, shares, finished)
        return [*orders(self, survey, [[smallest]], finished) * times, *given]

    destination.orders = repeated


def drive(spec: dict[str, Any]) -> dict[str, Any]:
    """A run on a Ray cluster, or one part of a run."""
    from ckpttool.checkpoint import OpenOptions
    from ckpttool.execute import RunOptions, run
    from ckpttool.execute.destinations import local
    from ckpttool.execute.fleets import fleet_for
    from ckpttool.execute.options import Member
    from ckpttool.ops.reshard import prepare
    from ckpttool.storage.place import parse_place
    from ckpttool.targeting.target import Target

    if "again" in spec:
        _repeat(local.LocalDestination, spec["again"])
    plan = prepare(parse_place(spec["src"]), OpenOptions(), Target(tp=8)).plan
    dst = parse_place(spec["dst"])
    if "part" in spec:
        began = time.time()
        result = run(plan, dst, RunOptions(member=Member(spec["part"], spec["of"])))
        return {"began": began, "ended": time.time(), "seconds": result.seconds}
    fleet = Watched(fleet_for(spec["on"]), spec["nodes"])
    result = run(plan, dst, RunOptions(on=fleet))
    return {
        "work": fleet.last - fleet.first,
        "start": fleet.started,
        "seconds": result.seconds,
        "answers": len(fleet.answers),
        "driver": fleet.busy,
        "bytes": result.bytes_written,
    }


def cpu_seconds(pids: Sequence[int]) -> float:
    """What processes have used so far."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum([int(f[11]) + int(f[12]) for f in fields]) / os.sysconf("SC_CLK_TCK")


def deliver(spec: dict[str, Any]) -> dict[str, Any]:
    """Send a large plan to all nodes of a cluster, as often as asked."""
    from ckpttool.checkpoint import OpenOptions
    from ckpttool.core.plan import Plan
    from ckpttool.execute.fleets import fleet_for
    from ckpttool.execute.machines.node import NodeJob
    from ckpttool.execute.schedule import large_units, schedule
    from ckpttool.ops.reshard import prepare
    from ckpttool.targeting.target import Target

    def job(plan: Plan) -> NodeJob:
        large = large_units(schedule(plan, ()))
        branch = {"scheme": "", "partial": spec["src"], "run": ""}
        return NodeJob(os.urandom(8).hex(), plan, plan.digest(), (), frozenset(), large, branch, 64 << 20, None, None)

    fleet = fleet_for(spec["on"])
    fleet.start(job(Plan([], [], [])))
    while fleet.nodes() < spec["nodes"]:
        fleet.replies(0.1)
    plan = prepare(Path(spec["src"]), OpenOptions(), Target(format="ranks", tp=8, pp=1, ep=8, etp=1)).plan
    nodes = RayNodes(())
    nodes.raylets = spec["raylets"]
    workers = [pid for name in nodes.raylets for pid in nodes.workers(name)]
    sent, seconds, cpu = job(plan), [], []
    for _ in range(spec["rounds"]):
        began, used, ours = time.monotonic(), cpu_seconds(workers), time.process_time()
        fleet.start(sent)
        if fleet.nodes() < spec["nodes"]:
            sys.exit("a node has not opened the plan")
        seconds.append(time.monotonic() - began)
        cpu.append([time.process_time() - ours, (cpu_seconds(workers) - used) / len(workers)])
    fleet.end(now=False)
    return {"seconds": seconds, "cpu": cpu, "bytes": len(pickle.dumps(sent, 5)), "units": len(plan.units)}


TASKS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"drive": drive, "deliver": deliver}


@contextmanager
def started(task: str, spec: dict[str, Any], environment: dict[str, str]) -> Iterator[Callable[[], dict[str, Any]]]:
    """A process of this module; what is called in the end waits for what it found."""
    command = [sys.executable, "-m", "bench.cluster", "--task", task, json.dumps(spec)]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment, "PYTHONPATH": path}
    )

    def found() -> dict[str, Any]:
        said, _ = process.communicate()
        if process.returncode:
            sys.exit(f"bench.cluster --task {task} failed: {spec}")
        return dict(json.loads(said.splitlines()[-1]))

    try:
        yield found
    finally:
        if process.poll() is None:
            process.kill()


def asked(task: str, spec: dict[str, Any], environment: dict[str, str] | None = None) -> dict[str, Any]:
    """What a process found."""
    with started(task, spec, environment or {}) as found:
        return found()


# -- here


def keys(url: str) -> dict[str, str]:
    """Variables of a machine whose S3 is at ``url``."""
    return dict(word.replace(URL, url).split("=", 1) for word in KEYS)


class Bench:
    """One measurement, in one directory."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.work: Path = args.work.resolve()
        self.nodes: Sequence[int] = sorted(args.nodes)
        self.rate: float = args.rate
        self.rounds: int = args.rounds
        self.size = Size.of(args.gb)
        self.source = self.work / f"cluster-{self.size.name}" / "model"
        self.found: dict[str, Any] = {}

    def prepare(self) -> None:
        """Make the source."""
        with made(self.source) as missing:
            if missing:
                whole = self.source.with_name("whole")
                write_noise(whole.parent, whole.name, self.size)
                subprocess.run([TOOL, "reshard", whole, self.source, "-q", "--force", "--to", "hf"], check=True)
                shutil.rmtree(whole)

    @contextmanager
    def out(self) -> Iterator[str]:
        """A place to write to."""
        path = self.work / "cluster-out"
        for p in (path, path.with_name(f"{path.name}.partial")):
            shutil.rmtree(p, ignore_errors=True)
        try:
            yield str(path)
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def on_ray(self) -> None:
        """So many nodes of a cluster, each with a link of its own."""
        with ExitStack() as stack:
            servers = [stack.enter_context(sending(self.source, 0, self.rate)) for _ in range(max(self.nodes))]
            ours = keys(stack.enter_context(sending(self.source, 0)))
            nodes = stack.enter_context(RayNodes(("node0",), keys(servers[0])))
            self._overhead(nodes)
            for count in self.nodes:
                for n in range(len(nodes.raylets), count):
                    nodes.add(f"node{n}", environment=keys(servers[n]))
                runs = []
                for _ in range(self.rounds):
                    with self.out() as out:
                        spec = {"src": "s3://bucket/model", "dst": out, "on": nodes.on, "nodes": count}
                        runs.append(asked("drive", spec, ours))
                self.found[f"ray {count}"] = best(runs, "work")
                print(f"{count} nodes: {self.found[f'ray {count}']}", file=sys.stderr, flush=True)
            self._plan(nodes)

    def _overhead(self, nodes: RayNodes) -> None:
        """What a share costs that has hardly anything in it; on a disk, and where a sync costs nothing."""
        small = Size.of(0.02)
        source = self.work / f"cluster-{small.name}"
        with made(source / "model") as missing:
            if missing:
                write_noise(source, "model", small)
        for where, place in (("memory", self.work), ("disk", ROOT / "build" / "bench")):
            place.mkdir(parents=True, exist_ok=True)
            runs = {}
            for again in (SHARES // 10, SHARES):
                out = place / "cluster-small"
                spec = {"src": str(source / "model"), "dst": str(out), "on": nodes.on, "nodes": 1, "again": again}
                runs[again] = best([self._small(spec, out) for _ in range(3)], "work")
            few, many = runs.values()
            self.found[f"share {where}"] = {
                "ms": 1000 * (many["work"] - few["work"]) / (many["answers"] - few["answers"]),
                "driver ms": 1000 * (many["driver"] - few["driver"]) / (many["answers"] - few["answers"]),
                "shares": many["answers"] - few["answers"],
            }
            print(f"share, {where}: {self.found[f'share {where}']}", file=sys.stderr, flush=True)

    def _small(self, spec: dict[str, Any], out: Path) -> dict[str, Any]:
        shutil.rmtree(out, ignore_errors=True)
        try:
            return asked("drive", spec)
        finally:
            shutil.rmtree(out, ignore_errors=True)

    def _plan(self, nodes: RayNodes) -> None:
        """A large plan to the nodes that there are."""
        import bench.scale as sizes

        sizes.prepare_sources(self.work / "cluster-hollow", [PLAN])
        source = self.work / "cluster-hollow" / PLAN
        spec = {"src": str(source), "on": nodes.on, "nodes": len(nodes.raylets), "rounds": 3, "raylets": nodes.raylets}
        self.found["plan"] = asked("deliver", spec) | {"nodes": len(nodes.raylets)}

    def in_parts(self) -> None:
        """So many processes with ``--part``, each with a link of its own."""
        with ExitStack() as stack:
            count = min(4, max(self.nodes))
            servers = [stack.enter_context(sending(self.source, 0, self.rate)) for _ in range(count)]
            for many in [n for n in self.nodes if n <= count]:
                runs = []
                for _ in range(self.rounds):
                    with self.out() as out, ExitStack() as parts:
                        specs = [
                            {"src": "s3://bucket/model", "dst": out, "part": n + 1, "of": many} for n in range(many)
                        ]
                        each = [
                            parts.enter_context(started("drive", spec, keys(url)))
                            for spec, url in zip(specs, servers, strict=False)
                        ]
                        found = [wait() for wait in each]
                        work = max(f["ended"] for f in found) - max(f["began"] for f in found)
                        runs.append({"work": work})
                self.found[f"parts {many}"] = best(runs, "work")
                print(f"{many} parts: {self.found[f'parts {many}']}", file=sys.stderr, flush=True)

    def text(self) -> str:
        """What was found."""
        lines = [
            f"{self.size.bytes / 1e9:.2f} GB from S3 to TP8, links of {self.rate:g} MB/s; {machine()}",
            "",
            "| machines | Ray nodes, s | times one | of linear | --part, s | times one | of linear |",
            "| --- | --- | --- | --- | --- | --- | --- |",
        ]
        for count in self.nodes:
            cells = [str(count)]
            for kind in ("ray", "parts"):
                here, one = self.found.get(f"{kind} {count}"), self.found.get(f"{kind} {self.nodes[0]}")
                if not here or not one:
                    cells += ["", "", ""]
                    continue
                times = one["work"] * self.nodes[0] / here["work"]
                cells += [f"{here['work']:.2f}", f"{times:.2f}", f"{times / count:.2f}"]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
        for where in ("memory", "disk"):
            if share := self.found.get(f"share {where}"):
                lines.append(
                    f"A share costs {share['ms']:.1f} ms, {share['driver ms']:.1f} ms of them the driver's CPU"
                    f" ({share['shares']} shares, {where})."
                )
        if plan := self.found.get("plan"):
            driver, node = (statistics.median([c[i] for c in plan["cpu"]]) for i in (0, 1))
            lines.append(
                f"A plan of {plan['units']:,} tensors ({plan['bytes'] / 1e6:.1f} MB) reaches {plan['nodes']} nodes in"
                f" {statistics.median(plan['seconds']):.2f} s: {driver:.2f} s of the driver's CPU,"
                f" {node:.2f} s of each node's."
            )
        return "\n".join(lines)


def best(runs: Sequence[dict[str, Any]], what: str) -> dict[str, Any]:
    """The quickest: a busy machine only adds."""
    return min(runs, key=lambda run: float(run[what]))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--gb", type=float, default=1.6)
    parser.add_argument("--rate", type=float, default=200.0, metavar="MB/S", help="of each machine's link")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="--gb 0.4 --nodes 1 2")
    parser.add_argument("--no-parts", action="store_true", help="Ray alone")
    parser.add_argument("--no-ray", action="store_true", help="--part alone")
    parser.add_argument(
        "--work", type=Path, default=SHM / "ckpttool-bench" if SHM.is_dir() else ROOT / "build" / "bench"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--task", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.task:
        print(json.dumps(TASKS[args.task[0]](json.loads(args.task[1]))))
        return
    if args.quick:
        args.gb, args.nodes = 0.4, [1, 2]
    bench = Bench(args)
    bench.prepare()
    if not args.no_ray:
        bench.on_ray()
    if not args.no_parts:
        bench.in_parts()
    print(bench.text())
    if args.json:
        args.json.write_text(json.dumps(bench.found))


if __name__ == "__main__":
    main()
