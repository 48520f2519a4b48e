"""The destination for each kind of place. Another one is an addition: a module with ``destination(dst, options)``, and
with ``branch(said, plan, tasks)`` if several machines can write there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from ckpttool.core.files import Place, Remote
from ckpttool.core.plan import Plan
from ckpttool.errors import UsageError, not_installed
from ckpttool.execute.destinations.base import Branch, Destination
from ckpttool.execute.destinations.local import LocalBranch, LocalDestination
from ckpttool.execute.options import RunOptions
from ckpttool.execute.schedule import Task

MODULES = {"hf": "hub", **dict.fromkeys(("s3", "gs", "az"), "objects")}
"""Scheme -> module beside this one, imported when there is something to write there."""
MEMBERS = dict.fromkeys(("s3", "gs", "az"), "object_member")
"""The same for a process that does its part of a run."""


def destination_for(dst: Place, options: RunOptions) -> Destination:
    """The destination that a place is.

    Raises UsageError for places that cannot be written, when a package is missing, and for options that make no sense
    there.
    """
    found = _local(dst, options) if isinstance(dst, Path) else _remote(dst, options)
    if (options.on or options.member) and not found.shared:
        how = "--on" if options.on else "--part"
        raise UsageError(
            f"{how} does not write to {str(dst).partition(':')[0]}://: one machine makes a commit",
            where=str(dst),
            hint=f"run without {how}, or write to a bucket or a directory that all machines share, and upload that",
        )
    if options.create_pr and not found.proposes:
        raise UsageError("--create-pr is for a DST on the Hugging Face Hub", where=str(dst), hint="hf://org/model")
    return found


def _local(dst: Path, options: RunOptions) -> Destination:
    if options.member is None:
        return LocalDestination(dst, single=options.single)
    from ckpttool.execute.destinations.members import MemberDestination

    return MemberDestination(dst, options.member, single=options.single)


def _remote(dst: Remote, options: RunOptions) -> Destination:
    scheme = str(dst).partition(":")[0]
    if scheme not in MODULES:
        known = ", ".join(f"{s}://" for s in MODULES)
        raise UsageError(
            f"{scheme}:// is read-only", where=str(dst), hint=f"write to a directory, or to one of {known}"
        )
    name = MEMBERS.get(scheme, MODULES[scheme]) if options.member else MODULES[scheme]
    found: Destination = _module(scheme, name).destination(dst, options)
    return found


def _module(scheme: str, name: str) -> Any:
    try:
        return import_module(f"ckpttool.execute.destinations.{name}")
    except ModuleNotFoundError as e:
        if e.name is None or e.name.partition(".")[0] == "ckpttool":
            raise
        raise not_installed(f"{scheme}://", e.name, "remote") from None


def branch_for(said: Mapping[str, Any], plan: Plan, tasks: Sequence[Task]) -> Branch:
    """The side of a destination that is on this machine, by what ``Destination.branch`` has said on another one.

    Raises OutputError where this machine does not see it, UsageError when a package is missing.
    """
    if not said["scheme"]:
        return LocalBranch(said, plan)
    found: Branch = _module(said["scheme"], MODULES[said["scheme"]]).branch(said, plan, tasks)
    return found
