"""The number of this process and their count, for ``--part``: as written, or from the launcher's variables.

Launchers lie inside each other: torchrun in a task of Slurm, which may be an element of an array. The innermost that
split the work counts. What contradicts is refused with what to write instead: two processes that take the same part
for their own, or a part that nobody does, would be found out only when the run never ends.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations

from ckpttool.errors import UsageError
from ckpttool.execute.options import Member

MOST = 1 << 16
"""Most parts."""
_WRITTEN = re.compile(r"(?P<number>-?\d+)/(?P<of>-?\d+)|auto(?:/(?P<auto>-?\d+))?", re.ASCII)
_EXAMPLE = "--part 3/8 is the third of eight, counted from 1"


@dataclass(frozen=True, slots=True)
class Launcher:
    """A program that starts many processes, and the variables in which it tells them who they are."""

    name: str
    depth: int
    """A launcher runs inside those of less depth. At 0 are systems that start jobs: a job may split its work anew."""
    rank: str
    """The variable with the number of this process, from 0 on or from ``first``."""
    size: str = ""
    """The variable with how many there are; "" where none has it, and only who wrote the job knows."""
    beside: tuple[str, ...] = ()
    """One of these is set, too; else ``rank`` was set by something else."""
    void: tuple[str, ...] = ()
    """Values of those that are no better than none."""
    spans: str = ""
    """The variable with how many tasks of an outer launcher it lies in, where it can be less than all."""
    loose: bool = False
    """Anybody may have set these variables, so they have to agree with what else there is."""
    first: str = ""
    last: str = ""
    step: str = ""
    """Variables with the numbers of the first and last process, and from one to the next, where users choose them."""


_NO_STEP = (str(0xFFFFFFFB), str(0xFFFFFFFA))

LAUNCHERS = (
    # https://docs.pytorch.org/docs/stable/elastic/run.html, "Environment Variables"
    Launcher("torchrun", 3, "RANK", "WORLD_SIZE", ("TORCHELASTIC_RUN_ID",), spans="GROUP_WORLD_SIZE"),
    # torch.distributed's init_method env://, which Kubeflow and many scripts set
    Launcher("torch.distributed", 3, "RANK", "WORLD_SIZE", ("LOCAL_RANK", "MASTER_ADDR"), loose=True),
    # Open MPI's FAQ "Running MPI jobs", environment variables
    Launcher("Open MPI", 2, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    # Hydra of MPICH and Intel MPI, Cray's PALS, and srun --mpi=pmi2
    Launcher("MPI (PMI)", 2, "PMI_RANK", "PMI_SIZE"),
    Launcher("MPI (PMIx)", 2, "PMIX_RANK", beside=("PMIX_NAMESPACE",)),
    Launcher("MVAPICH2", 2, "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    # srun(1), "OUTPUT ENVIRONMENT VARIABLES". A batch script has SLURM_PROCID=0 as well, and is in no step, or like the
    # shell that salloc opens on a node in one that no srun has started: SLURM_BATCH_SCRIPT and SLURM_INTERACTIVE_STEP
    # of slurm.h.
    Launcher("Slurm (srun)", 1, "SLURM_PROCID", "SLURM_NTASKS", ("SLURM_STEP_ID", "SLURM_STEPID"), _NO_STEP),
    # Flux's page of the manual flux-environment, section 7
    Launcher("Flux", 1, "FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    # Slurm's pages on sbatch and on job arrays
    Launcher(
        "a Slurm array",
        0,
        "SLURM_ARRAY_TASK_ID",
        "SLURM_ARRAY_TASK_COUNT",
        first="SLURM_ARRAY_TASK_MIN",
        last="SLURM_ARRAY_TASK_MAX",
        step="SLURM_ARRAY_TASK_STEP",
    ),
    # https://docs.aws.amazon.com/batch/latest/userguide/job_env_vars.html
    Launcher("an array of AWS Batch", 0, "AWS_BATCH_JOB_ARRAY_INDEX", "AWS_BATCH_JOB_ARRAY_SIZE"),
    # https://cloud.google.com/run/docs/container-contract#jobs-env-vars
    Launcher("Cloud Run", 0, "CLOUD_RUN_TASK_INDEX", "CLOUD_RUN_TASK_COUNT"),
    # https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode
    Launcher("a Kubernetes job", 0, "JOB_COMPLETION_INDEX"),
)
"""The launchers, the innermost first."""

_ALLOCATIONS = (
    (
        "SLURM_JOB_ID",
        "Slurm's batch script or shell, which runs once",
        "srun --ntasks-per-node=1 ckpttool ... --part auto",
    ),
    ("PBS_JOBID", "a script of PBS, which runs once", "mpirun ckpttool ... --part auto"),
    ("LSB_JOBID", "a script of LSF, which runs once", "mpirun ckpttool ... --part auto"),
)
"""A variable that says that a job began but no launcher in it; what this is then, and how to start the launcher."""


@dataclass(frozen=True, slots=True)
class Membership:
    """The number of this process and of all, and where they come from."""

    member: Member
    source: str = ""
    """The source of these numbers: ``Slurm (srun): SLURM_PROCID=2, SLURM_NTASKS=8``; "" where it was written."""


@dataclass(frozen=True, slots=True)
class _LauncherVariables:
    """The values of a launcher's variables."""

    by: Launcher
    rank: int
    """Number of this process, from 0."""
    size: int | None
    spans: int | None
    said: str
    """The variables as they are set."""

    def __str__(self) -> str:
        return f"{self.by.name}: {self.said}"


def is_membership(text: str) -> bool:
    """Whether a value of ``--part`` says which process this is; other values name a part of a pipeline."""
    return "/" in text or text == "auto"


def membership(said: str, environment: Mapping[str, str]) -> Membership:
    """``3/8``; ``auto`` or ``auto/8`` with the variables of the launcher.

    Raises UsageError for what is written wrong, where there is no launcher, and where launchers contradict.
    """
    match = _WRITTEN.fullmatch(said)
    if match is None:
        raise UsageError(f"--part `{said}` is not I/N, auto or auto/N", hint=_EXAMPLE)
    if match["number"] is not None:
        return Membership(_member(int(match["number"]), int(match["of"]), f"--part {said}"))
    wanted = None if match["auto"] is None else int(match["auto"])
    if wanted is not None and not 1 <= wanted <= MOST:
        raise UsageError(f"--part {said}: the number of parts is from 1 to {MOST:,}", hint=_EXAMPLE)
    found = _innermost([f for row in LAUNCHERS if (f := _read(row, environment))], environment)
    if found.size is None and wanted is None:
        raise UsageError(
            f"--part auto: {found.by.name} does not tell its processes how many they are",
            where=found.said,
            hint="write it: --part auto/8 where there are eight",
        )
    if found.size is not None and wanted not in (None, found.size):
        raise UsageError(
            f"--part {said}: the launcher counts {found.size}",
            where=str(found),
            hint=f"--part auto, or --part I/{wanted} with the number of this process: {_EXAMPLE}",
        )
    of = found.size or wanted or 1
    return Membership(_member(found.rank + 1, of, f"--part {said}", found), str(found))


def _member(number: int, of: int, option: str, found: _LauncherVariables | None = None) -> Member:
    where = () if found is None else str(found)
    if not 1 <= of <= MOST:
        raise UsageError(f"{option}: the number of parts is from 1 to {MOST:,}", where=where, hint=_EXAMPLE)
    if not 1 <= number <= of:
        if found is not None:
            raise UsageError(
                f"{option}: process {found.rank:,} of {of:,}, counted from 0, cannot be",
                where=where,
                hint=f"set it yourself: {_EXAMPLE}",
            )
        raise UsageError(f"{option}: parts are counted from 1 to {of:,}", hint=_EXAMPLE)
    return Member(number, of)


def _innermost(found: list[_LauncherVariables], environment: Mapping[str, str]) -> _LauncherVariables:
    """The launcher that counts, of those that left variables. Raises UsageError where there is none, or no telling."""
    inner = [f for f in found if f.by.depth and f.size is not None]
    for one, other in permutations(inner, 2):
        _compare(one, other)
    if split := [f for f in inner if f.size != 1]:
        return split[0]
    _refuse_lone(found)
    _refuse_allocation(found, environment)
    jobs = [f for f in found if f.size != 1 and not (f.by.depth and inner)]
    for one, other in pairwise(jobs):
        if (one.rank, one.size) != (other.rank, other.size):
            raise _contradiction(one, other)
    if jobs:
        return jobs[0]
    if found:
        return found[0]
    raise UsageError(
        "--part auto: no launcher has left its variables",
        hint="srun ckpttool ... --part auto (also torchrun --no-python, mpirun), or --part 3/8 from a loop",
    )


def _compare(inner: _LauncherVariables, outer: _LauncherVariables) -> None:
    """Raises UsageError where two launchers of processes cannot both be right."""
    if inner.by.depth < outer.by.depth or outer.size is None:
        return
    same = (inner.rank, inner.size) == (outer.rank, outer.size)
    if not same and (inner.by.depth == outer.by.depth or inner.by.loose):
        raise _contradiction(inner, outer)
    if outer.size > 1 and (inner.size == 1 or (inner.spans is not None and inner.spans < outer.size)):
        own = "one process" if inner.size == 1 else f"{inner.size} processes of its own"
        raise UsageError(
            f"--part auto: {outer.by.name} started {outer.size} tasks, and {inner.by.name} in each has {own}",
            where=(str(inner), str(outer)),
            hint=f"start ckpttool by {outer.by.name} alone, or tell {inner.by.name} of all nodes (torchrun --nnodes)",
        )


def _contradiction(one: _LauncherVariables, other: _LauncherVariables) -> UsageError:
    return UsageError(
        f"--part auto: {one.by.name} and {other.by.name} disagree about which process this is",
        where=(str(one), str(other)),
        hint=f"unset the variables that are left over, or set it yourself: {_EXAMPLE}",
    )


def _refuse_lone(found: Sequence[_LauncherVariables]) -> None:
    """Raises UsageError for an array of one, which may be the one of many that is done again."""
    for f in found:
        if f.by.first and f.size == 1:
            raise UsageError(
                f"--part auto: {f.by.name} of one element splits nothing",
                where=f.said,
                hint=f"to do one part of a run again, say which: {_EXAMPLE}",
            )


def _refuse_allocation(found: Sequence[_LauncherVariables], environment: Mapping[str, str]) -> None:
    """Raises UsageError in a job in which no launcher was started: there is one process, and many are wanted."""
    several = any(environment.get(name, "1") != "1" for name in ("SLURM_NTASKS", "SLURM_JOB_NUM_NODES"))
    if any(f.by.depth or (f.size != 1 and not several) for f in found):
        return
    for variable, what, hint in _ALLOCATIONS:
        if environment.get(variable):
            said = _shown(environment, variable, "SLURM_NTASKS", "SLURM_JOB_NUM_NODES", "SLURM_ARRAY_TASK_COUNT")
            raise UsageError(f"--part auto: this is {what}", where=said, hint=hint)


def _read(row: Launcher, environment: Mapping[str, str]) -> _LauncherVariables | None:
    """The values of a launcher's variables; None where they are not set."""
    if not environment.get(row.rank) or (row.beside and not _is_there(row, environment)):
        return None
    if row.loose and any(r.rank == row.rank and _is_there(r, environment) for r in LAUNCHERS if not r.loose):
        return None
    said = _shown(environment, row.rank, row.size, row.first, row.last, row.step)
    numbers = [_number(environment, name, row, said) for name in (row.rank, row.first, row.last, row.step)]
    rank, first, last, step = numbers
    size = _number(environment, row.size, row, said) if row.size else None
    spans = _number(environment, row.spans, row, said) if environment.get(row.spans) else None
    if row.first:
        rank = (rank - first) // max(1, step)
        if last - first != max(1, step) * ((size or 1) - 1):
            raise UsageError(
                f"--part auto: {row.name} with gaps does not tell which of its elements this is",
                where=said,
                hint=f"number them without gaps (--array=1-8), or set it yourself: {_EXAMPLE}",
            )
    return _LauncherVariables(row, rank, size, spans, said)


def _is_there(row: Launcher, environment: Mapping[str, str]) -> bool:
    return any(environment.get(name, "") not in ("", *row.void) for name in row.beside)


def _number(environment: Mapping[str, str], name: str, row: Launcher, said: str) -> int:
    if not name:
        return 0
    text = environment.get(name, "")
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII):
        what = f"{name} is `{text}`" if text else f"{name} is not set"
        raise UsageError(f"--part auto: {what}", where=f"{row.name}: {said}", hint=f"set it yourself: {_EXAMPLE}")
    return int(text)


def _shown(environment: Mapping[str, str], *names: str) -> str:
    return ", ".join(f"{name}={environment[name]}" for name in names if environment.get(name))
