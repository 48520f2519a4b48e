"""What a cluster of one node costs beside no cluster, and one machine's work in several parts.

A whole process each time, with the start of Python, of Ray's client and of the node's process; the cluster itself runs
by then. How runs scale with machines is measured by ``bench.cluster``, where each has a link of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec

from bench.jobs.reshard import compare_outputs, prepare_sources
from bench.measure import OURS, OUT, URL, Job, Program, copy_of
from bench.models import Size
from bench.setting import TOOL, Setting

PARTS = (1, 2, 4)
_ALL = 'n=$1 && shift && for i in $(seq "$n"); do "$@" --part "$i/$n" & done && wait'
"""All parts of a run at a time."""


def jobs(setting: Setting) -> list[Job]:
    """On a node of Ray where there is Ray, and in parts."""
    size = Size.of(setting.gb)
    work = setting.work / f"reshard-{size.name}"
    path = work / "hf"
    command = (TOOL, "reshard", str(path), OUT, "-q", "--tp-out", "8")
    prepare = partial(prepare_sources, work, size, ("hf",))
    alone = Program("no cluster", command)
    found = []
    if find_spec("ray") is not None:
        programs = (Program(OURS, (*command, "--on", f"ray={URL}")), copy_of(path), alone)
        name = "reshard TP1 -> TP8, cluster: one node of Ray"
        found.append(Job(name, (path,), programs, prepare, compare=compare_outputs, serve=_node, usual=False))
    for parts in PARTS:
        programs = (Program(OURS, ("sh", "-c", _ALL, "sh", str(parts), *command)), copy_of(path), alone)
        name = f"reshard TP1 -> TP8, cluster: {parts} part{'s' * (parts > 1)} of one machine"
        found.append(Job(name, (path,), programs, prepare, compare=compare_outputs, usual=False))
    return found


@contextmanager
def _node() -> Iterator[str]:
    """A Ray cluster of one node; gives its address."""
    from tests.cluster.ray_nodes import RayNodes

    with RayNodes(("node",)) as nodes:
        yield nodes.address
