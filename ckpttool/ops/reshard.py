"""``ckpttool reshard``: the same tensors for another mesh, another format or another dialect."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

from ckpttool.checkpoint import OpenOptions, open_checkpoint
from ckpttool.core.files import AnyPlace, Place
from ckpttool.errors import UsageError
from ckpttool.execute import Progress, RunOptions, RunResult, run
from ckpttool.execute.verification import Verification
from ckpttool.storage.place import parse_place
from ckpttool.targeting.build import Prepared
from ckpttool.targeting.parts import plan_parts
from ckpttool.targeting.recode import Recoding
from ckpttool.targeting.select import Selection
from ckpttool.targeting.target import Target
from ckpttool.targeting.verify import look_through


@dataclass(slots=True)
class ReshardResult:
    """What ``reshard`` reports."""

    prepared: Prepared
    dst: Place
    run: RunResult
    verified: bool
    notes: list[str] = field(default_factory=list)


def prepare(
    src: AnyPlace,
    options: OpenOptions,
    target: Target,
    selection: Selection | None = None,
    recoding: Recoding | None = None,
) -> Prepared:
    """Plan a reshard. Raises a CkptError subclass; nothing is written."""
    source = open_checkpoint(src, options)
    prepared = plan_parts(source, target, selection or Selection(), recoding)
    if recoding is None and target == Target() and selection in (None, Selection()) and source.mesh.world > 1:
        prepared.notes.append(f"same parallelism as SRC ({source.mesh}); change it with --tp-out")
    return prepared


def execute(
    prepared: Prepared, dst: AnyPlace, options: RunOptions, progress: Progress, *, verify: bool = False
) -> ReshardResult:
    """Write DST. Raises OutputError, CorruptError, or VerifyError when ``verify`` finds a difference."""
    place = parse_place(dst)
    options = replace(options, source_roots=(str(prepared.source.path),))
    check = Verification(partial(look_through, prepared), options.memory, options.connections)
    if prepared.target.ranks is None:
        options = replace(options, prove=check)
    if verify:
        if prepared.target.ranks is not None:
            raise UsageError(
                "--verify needs all ranks, --ranks-out writes only some",
                hint="verify when all ranks are there: ckpttool inspect SRC --diff DST --values",
            )
        options = replace(options, verify=check)
    result = run(prepared.plan, place, options, progress)
    return ReshardResult(prepared, place, result, result.verified)
