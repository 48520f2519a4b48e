"""A part of a run (``--part``) that comes when DST is there already: made by the other parts, and by this one before.

A launcher that starts all processes again when one has died, and a queue that does so with a job, start some of them
when the others have made DST. Nothing in DST says who made it, and another source of the same shapes has the same names
and sizes. So it is proven: such a part compares its share of DST with the sources, or all of it with ``--verify``.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from ckpttool.core.files import Place
from ckpttool.core.plan import Output, Plan
from ckpttool.errors import CkptError, VerifyError
from ckpttool.execute.destinations.local import MANIFEST
from ckpttool.execute.engine import filled
from ckpttool.execute.options import Member, RunOptions, unwatched
from ckpttool.execute.reader import stop_reading
from ckpttool.execute.verification import Checks, Verification


def is_made(plan: Plan, dst: Path, member: Member, options: RunOptions) -> bool:
    """Whether DST is what the run makes: the files, their sizes, what no tensor decides (headers, configurations, an
    index), and every element and companion file of this part's share (of all shares, where the run verifies)."""
    if options.force or options.prove is None:
        return False
    sizes = {o.name: o.size for o in plan.outputs}
    more = {*options.late_files, *[MANIFEST] * options.manifest}
    folder = dst.parent if options.single else dst
    try:
        paths = [folder / name for name in sizes] if options.single else [p for p in folder.rglob("*") if p.is_file()]
        found = {str(p.relative_to(folder)): p.stat().st_size for p in paths}
        if found.keys() != sizes.keys() | more or any(found[name] != size for name, size in sizes.items()):
            return False
        if not all(_has_literals(folder, o) for o in plan.outputs):
            return False
        whole = options.verify is not None  # what is said of a verified DST is said of all of it
        mine = (0, 1) if whole else (member.number - 1, member.of)
        companions = Verification(lambda written: _companions(plan, written), options.memory, options.connections)
        for proof in (companions, options.prove):
            proof.share(folder, unwatched, *mine)
    except (CkptError, OSError):
        return False
    except BaseException:
        stop_reading()
        raise
    return True


def verifying(options: RunOptions) -> RunOptions:
    """The options of a run that completes DST, where another part was asked to verify it."""
    return replace(options, verify=options.verify or options.prove)


def verify_made(dst: Place, options: RunOptions) -> float:
    """Verify DST, which a part has completed that was not asked to, and could not know that this one is.

    Returns the seconds it took. Raises VerifyError.
    """
    assert options.verify is not None  # noqa: S101 - the caller has looked
    began = time.perf_counter()
    try:
        options.verify(dst.parent if options.single else dst, unwatched)
    except VerifyError as e:
        hint = "another part has completed DST, without --verify, and it stays: remove it, and run all parts again"
        raise VerifyError(e.what, where=e.where, hint=hint) from None
    return time.perf_counter() - began


def _has_literals(folder: Path, output: Output) -> bool:
    """Whether the bytes of a file that no tensor decides are those of the plan, whatever checksums are among them."""
    sums = [*output.checksums.values(), *(into for _, _, into in output.shared)]
    with (folder / output.name).open("rb") as f:

        def read(offset: int, size: int) -> bytes:
            f.seek(offset)
            return f.read(size)

        found = {at: int.from_bytes(read(at, 4), "little") for into in sums for at in into}
        return all(read(at, len(data)) == data for at, data in filled(output.literals, found))


def _companions(plan: Plan, written: Place) -> Checks:
    checks = Checks()
    checks.add_carried(plan, written)
    return checks
