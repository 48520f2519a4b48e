"""What ``reshard`` is going to write, and what it wrote."""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ckpttool.core.words import count, short
from ckpttool.errors import plain
from ckpttool.report import text
from ckpttool.report.tables import table, wrapped
from ckpttool.report.text import dump, message, pick

if TYPE_CHECKING:
    from ckpttool.core.mesh import Mesh
    from ckpttool.core.plan import Output, Plan
    from ckpttool.execute import RunOptions
    from ckpttool.ops.merge import MergeResult
    from ckpttool.ops.reshard import ReshardResult
    from ckpttool.targeting.build import Prepared

PLAN_SCHEMA = "ckpttool.plan/1"
RESHARD_SCHEMA = "ckpttool.reshard/1"


def _source(prepared: Prepared) -> dict[str, Any]:
    src = prepared.source
    return {
        "path": str(src.path),
        "format": src.format,
        "mesh": src.mesh.to_json(),
        "family": src.family.name,
        "files": len(src.catalog.files),
        "bytes": sum(f.size for f in src.catalog.files),
        "tensors": len(src.catalog),
        "tensor_bytes": src.catalog.nbytes,
    }


def target_of(prepared: Prepared) -> dict[str, Any]:
    """DST as JSON shows it."""
    plan = prepared.plan
    return {
        "format": prepared.format,
        "mesh": prepared.mesh.to_json(),
        "files": len(plan.outputs),
        "bytes": plan.bytes_written,
        "tensors": len(prepared.views),
        "removed_tensors": prepared.removed[0],
        "removed_bytes": prepared.removed[1],
        "dtype": prepared.dtype or None,
    }


def _ranks_of(plan: Plan) -> list[list[int]]:
    """Ranks of each output file."""
    out: list[list[int]] = [[] for _ in plan.outputs]
    for rank, files in enumerate(plan.ranks):
        for f in files:
            out[f].append(rank)
    return out


def _kind(output: Output, ranks: Sequence[int]) -> str:
    if output.carried:
        return "carried"
    return "tensors" if ranks else "generated"


def files_of(plan: Plan) -> list[dict[str, Any]]:
    """Every output file: name, bytes, kind and ranks."""
    ranks = _ranks_of(plan)
    return [
        {"name": o.name, "bytes": o.size, "kind": _kind(o, ranks[i]), "ranks": ranks[i]}
        for i, o in enumerate(plan.outputs)
    ]


def plan_files(plan: Plan) -> None:
    """The same as a table."""
    ranks = _ranks_of(plan)
    table(
        ("file", "bytes", "kind", "ranks"),
        [(plain(o.name), o.size, _kind(o, ranks[i]), text.ranks(ranks[i])) for i, o in enumerate(plan.outputs)],
        drop=("kind",),
    )


def ranked(mesh: Mesh, sharding: int = 1) -> str:
    """``tp 2, pp 2 (4 ranks)``; with the optimizer state shared out ``tp 2, sharding 2 (4 ranks)``."""
    ranks = mesh.world * sharding
    shared = f", sharding {sharding}" if sharding > 1 else ""
    return f"{mesh}{shared} ({ranks:,} ranks)" if ranks > 1 else str(mesh)


def peak_memory(run: RunOptions) -> int:
    """Bytes that the run will need at most: what this process has used to make the plan, and all buffers."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return (used if sys.platform == "darwin" else used << 10) + run.memory


def show_plan(prepared: Prepared, run: RunOptions, *, as_json: bool, quiet: bool = False) -> None:
    """``--dry-run``: the files that would be written, and what that takes."""
    plan = prepared.plan
    if as_json:
        dump(
            {
                "schema": PLAN_SCHEMA,
                "source": _source(prepared),
                "target": target_of(prepared),
                "boxes": plan.boxes,
                "units": len(plan.units),
                "buffers": run.memory,
                "peak_memory_estimate": peak_memory(run),
                **text.share_of(plan, run),
                "files": files_of(plan),
                "notes": prepared.notes,
            },
            entries=len(plan.outputs),
        )
        return
    if quiet:
        plan_files(plan)
        return
    text.notes(prepared.notes)
    src = _source(prepared)
    text.overview(
        [
            (
                "source",
                f"{src['path']}: {src['format']}, {ranked(prepared.source.mesh, prepared.source.stored.sharding)}",
            ),
            ("", f"{count(src['tensors'], 'tensor')} in {count(src['files'], 'file')}, {short(src['bytes'])}"),
            ("target", f"{prepared.format}, {ranked(prepared.mesh, prepared.sharding)}"),
            ("", held(prepared)),
            ("work", f"{count(plan.boxes, 'slice')} to copy"),
            *[("", line) for line in [text.share_line(plan, run)] if line],
            ("memory", f"{short(peak_memory(run))} at most, of which {short(run.memory)} are buffers (--memory)"),
        ]
    )
    plan_files(plan)


def held(target: Prepared) -> str:
    """``39 tensors in 4 files, 440.00 kB``: what DST has."""
    files = count(len(target.plan.outputs), "file")
    return f"{count(len(target.views), 'tensor')} in {files}, {short(target.plan.bytes_written)}"


def show_written(result: ReshardResult | MergeResult, said: str, proven: str) -> None:
    """The last lines about DST: what it is and how fast it was written, and what ``--verify`` has proven."""
    text.write(wrapped(f"{plain(str(result.dst))}: {said}{text.times(result.run)}\n"))
    if result.verified:
        text.write(f"verified: {proven}\n")


@text.of_a_result()
def show_reshard(result: ReshardResult, *, as_json: bool, quiet: bool, verbose: bool) -> None:
    """What was written, how fast, and whether it was verified."""
    prepared, run = result.prepared, result.run
    plan = prepared.plan
    notes = list(dict.fromkeys([*prepared.notes, *result.notes, *run.notes]))
    if as_json:
        dump(
            {
                "schema": RESHARD_SCHEMA,
                "path": str(result.dst),
                "source": _source(prepared),
                "target": target_of(prepared),
                "bytes_read": run.bytes_read,
                **text.done(run),
                "bytes_per_second": round(run.bytes_written / run.seconds) if run.seconds else None,
                "peak_buffers": run.peak_buffer,
                "write_policy": run.policy,
                "verified": result.verified,
                "files": files_of(plan),
                "checksums": [pick(c, "file tensor bytes=nbytes digest") for c in run.manifest],
                "next_step": (run.committed and prepared.next_step(result.dst)) or None,
                "notes": notes,
            },
            entries=len(plan.outputs) + len(run.manifest),
        )
        return
    if quiet:
        return
    text.notes(notes)
    if run.bytes_skipped:
        message(f"note: {short(run.bytes_skipped)} were already written by the interrupted run")
    if verbose:
        message(f"read {short(run.bytes_read)}; {count(plan.boxes, 'slice')}; writes: {run.policy};")
        message(f"at most {short(run.peak_buffer)} of buffers")
    if text.show_waiting(str(result.dst), run):
        return
    recoded = prepared.recoded is not None
    proven = "every tensor was worked out again and is equal" if recoded else "every element is equal to the source"
    show_written(result, f"{prepared.format}, {ranked(prepared.mesh, prepared.sharding)}, {held(prepared)}", proven)
    text.next_step(prepared.next_step(result.dst))
