"""Carry out a plan: bounded blocks, worker threads, a partial directory, a journal, one rename at the end."""

from ckpttool.core.files import Place
from ckpttool.core.plan import Plan
from ckpttool.execute import engine
from ckpttool.execute.options import Advance, Checksum, NoProgress, PhasedProgress, Progress, RunOptions, RunResult

__all__ = ["Advance", "Checksum", "NoProgress", "PhasedProgress", "Progress", "RunOptions", "RunResult", "run"]


def run(plan: Plan, dst: Place, options: RunOptions | None = None, progress: Progress | None = None) -> RunResult:
    """Write the outputs of ``plan`` to the directory ``dst``, here or elsewhere, whole or not at all; with
    ``options.member`` one part of them, and DST when that was the last one. See ``engine.run`` and ``member.run``.
    """
    if options is None or options.member is None:
        return engine.run(plan, dst, options, progress)
    from ckpttool.execute.parts import member  # with all that a run of one process does not need

    return member.run(plan, dst, options.member, options, progress or NoProgress())
