"""What every command that writes a checkpoint says: the files that a plan would write, and what a run has written."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpttool.answers.document import Message, Paragraph, Section, Table
from ckpttool.answers.fields import pick
from ckpttool.core.words import count, short
from ckpttool.errors import plain
from ckpttool.report.text import ranks

if TYPE_CHECKING:
    from ckpttool.core.files import AnyPlace, Place
    from ckpttool.core.mesh import Mesh
    from ckpttool.core.plan import Plan
    from ckpttool.execute import RunOptions, RunResult
    from ckpttool.targeting.build import Prepared

EQUAL = "every element is equal to the source"
RECOMPUTED = "every tensor was recomputed and matches"


def target_json(target: Prepared) -> dict[str, Any]:
    """DST."""
    plan = target.plan
    return {
        "format": target.format,
        "mesh": target.run_mesh.to_json(),
        "files": len(plan.outputs),
        "bytes": plan.bytes_written,
        "tensors": len(target.views),
        "removed_tensors": target.removed[0],
        "removed_bytes": target.removed[1],
        "dtype": target.dtype or None,
    }


def files_json(plan: Plan) -> list[dict[str, Any]]:
    """Every file of DST."""
    return [dict(zip(("name", "bytes", "kind", "ranks"), file, strict=True)) for file in _files(plan)]


def files_table(plan: Plan) -> Table:
    """The same for people; it is all that --quiet leaves of a plan."""
    rows = [(plain(name), size, kind, ranks(owners)) for name, size, kind, owners in _files(plan)]
    return Table(("file", "bytes", "kind", "ranks"), rows, drop=("kind",), quiet=True)


def _files(plan: Plan) -> Iterator[tuple[str, int, str, list[int]]]:
    """Name, bytes, kind and ranks of each file."""
    owners: list[list[int]] = [[] for _ in plan.outputs]
    for rank, files in enumerate(plan.ranks):
        for file in files:
            owners[file].append(rank)
    for output, mine in zip(plan.outputs, owners, strict=True):
        yield output.name, output.size, "carried" if output.carried else "tensors" if mine else "generated", mine


def ranked(mesh: Mesh, sharding: int = 1) -> str:
    """``tp 2, pp 2 (4 ranks)``; with the optimizer state shared out ``tp 2, sharding 2 (4 ranks)``."""
    ranks = mesh.world * sharding
    shared = f", sharding {sharding}" if sharding > 1 else ""
    return f"{mesh}{shared} ({ranks:,} ranks)" if ranks > 1 else str(mesh)


def contents(target: Prepared) -> str:
    """``39 tensors in 4 files, 440.00 kB``."""
    files = count(len(target.plan.outputs), "file")
    return f"{count(len(target.views), 'tensor')} in {files}, {short(target.plan.bytes_written)}"


# -- before a run


def peak_memory(run: RunOptions) -> int:
    """Bytes that the run will need at most: what this process has used to make the plan, and all buffers."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return (used if sys.platform == "darwin" else used << 10) + run.memory


def share_json(plan: Plan, run: RunOptions) -> dict[str, int]:
    """The share of this process, where it does one part of the plan."""
    if run.member is None:
        return {}
    from ckpttool.execute.tasks import bytes_of_part

    size = bytes_of_part(plan, run.member, manifest=run.manifest)
    return {"part": run.member.number, "of": run.member.of, "part_bytes": size}


def share_lines(plan: Plan, run: RunOptions) -> list[str]:
    """The same for people; no line where the process does all."""
    share = share_json(plan, run)
    return [f"{run.member}: {short(share['part_bytes'])} of {short(plan.bytes_written)} to write"] if share else []


def target_rows(target: Prepared) -> list[tuple[str, str]]:
    """DST."""
    return [("target", f"{target.format}, {ranked(target.run_mesh, target.sharding)}"), ("", contents(target))]


def memory_row(run: RunOptions) -> tuple[str, str]:
    """Memory of the process that makes the plan and carries it out."""
    return ("memory", f"{short(peak_memory(run))} at most, of which {short(run.memory)} are buffers (--memory)")


def space_json(plan: Plan, dst: AnyPlace) -> dict[str, Any]:
    """The disk space that DST needs, and whether it is there."""
    from ckpttool.execute.destinations.local import disk_space
    from ckpttool.storage.place import parse_place

    space = disk_space(plan, parse_place(dst))
    return {"disk": {"needed": space.needed, "free": space.free, "fits": space.fits, "replaces": space.replaces}}


def space_row(plan: Plan, dst: AnyPlace) -> tuple[str, str]:
    """The same for people."""
    from ckpttool.storage.place import parse_place

    disk = space_json(plan, dst)["disk"]
    need, free = short(max(disk["needed"], 0)), disk["free"]
    if not isinstance(parse_place(dst), Path):
        return ("upload", need)
    text = f"needs {need}" + ("" if free is None else f", {short(free)} free")
    return ("disk", text + ("; the old DST stays until the new one is complete" if disk["replaces"] else ""))


def space_warning(plan: Plan, dst: AnyPlace) -> list[Section]:
    """A warning where DST does not fit; nothing otherwise."""
    disk = space_json(plan, dst)["disk"]
    if disk["fits"] is not False:
        return []
    need, free = short(disk["needed"]), short(disk["free"])
    return [
        Message(f"warning: not enough disk space: DST needs {need}, {free} are free; this run would fail", quiet=True)
    ]


# -- after a run


def run_json(run: RunResult) -> dict[str, Any]:
    """Bytes, seconds, and what other processes have still to do."""
    took = {"plan": run.plan_seconds, "write": run.write_seconds, "verify": run.verify_seconds}
    at = run.standing
    return {
        **({} if at is None else {"part": at.member.number, "of": at.member.of, **pick(at, "committed waiting_for")}),
        **pick(run, "bytes_written bytes_resumed=bytes_skipped"),
        "seconds": round(run.seconds, 6),
        "phases": {name: round(seconds, 6) for name, seconds in took.items()},
    }


def next_json(target: Prepared, dst: Place, run: RunResult) -> str | None:
    """How to use DST; None while it is not complete."""
    return (run.committed and target.next_step(dst)) or None


def checksums_json(run: RunResult) -> list[dict[str, Any]]:
    """The checksums of a manifest."""
    return [pick(c, "file tensor bytes=nbytes digest") for c in run.manifest]


def all_notes(*lists: Sequence[str]) -> list[str]:
    """Notes of plan and run, each once."""
    return list(dict.fromkeys([note for notes in lists for note in notes]))


def times(run: RunResult) -> str:
    """``; planned in 0.2 s, written in 3.1 s at 1.20 GB/s, verified in 2.0 s``; "" for what took less than a second."""
    if run.plan_seconds + run.seconds < 1:
        return ""
    rate = f" at {short(round(run.bytes_written / run.write_seconds))}/s" if run.bytes_written else ""
    said = f"; planned in {run.plan_seconds:.1f} s, written in {run.write_seconds:.1f} s{rate}"
    return said + (f", verified in {run.verify_seconds:.1f} s" if run.verify_seconds else "")


def resumed(run: RunResult) -> Iterator[Section]:
    """What an interrupted run had already done."""
    if run.bytes_skipped:
        yield Message(f"note: {short(run.bytes_skipped)} were already written by the interrupted run")


def written(
    dst: Place, run: RunResult, summary: str, proven: str, *after: Section, next_step: str = ""
) -> list[Section]:
    """DST: what it is and how fast it was written, what ``--verify`` has proven, then ``after`` and how to use it.

    While other parts of it are missing, only which.
    """
    place, at = plain(str(dst)), run.standing
    if at is not None and not at.committed:
        left = f"waiting for {'part' if len(at.waiting_for) == 1 else 'parts'} {ranks(at.waiting_for)}"
        if not at.waiting_for:
            left = "all parts are done, and another process completes it"
        return [Paragraph(f"{place}: {at.member} is done{times(run)}; {left}")]
    out: list[Section] = [Paragraph(f"{place}: {summary}{times(run)}", wrap=True)]
    out += [Paragraph(f"verified: {proven}")] if run.verified else []
    return [*out, *after, *([Message(f"next: {plain(next_step)}")] if next_step else [])]
