"""The tasks of a run, and the share of a part: a run does what its dry run shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ckpttool.core.plan import Plan
from ckpttool.execute.files import Medium
from ckpttool.execute.hashing import ALGORITHM, CRC32
from ckpttool.execute.options import Member
from ckpttool.execute.remote import open_medium
from ckpttool.execute.schedule import Task, schedule


class RunTasks(NamedTuple):
    """The tasks of a run, on one or several machines."""

    hashes: Sequence[str]
    """Algorithms of the checksums that are taken of each tensor."""
    far: frozenset[int]
    """Sources on other machines."""
    tasks: Sequence[Task]


def run_tasks(plan: Plan, medium: Medium, *, manifest: bool) -> RunTasks:
    """The tasks of a plan whose sources are read through ``medium``."""
    hashes = [ALGORITHM] * manifest + [CRC32] * any(o.summed for o in plan.outputs)
    far = frozenset(i for i, s in enumerate(plan.sources) if medium.is_far(s.contents))
    return RunTasks(hashes, far, schedule(plan, hashes, far))


def bytes_of_part(plan: Plan, member: Member, *, manifest: bool) -> int:
    """Bytes that a part writes when no part has written anything before."""
    from ckpttool.execute.shares import cut

    with open_medium() as medium:
        tasks = run_tasks(plan, medium, manifest=manifest).tasks
    return sum([tasks[t].nbytes for t in cut(plan, tasks, member.of)[member.number - 1]])
