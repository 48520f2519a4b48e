"""``--part``: which of how many processes this is, by what launchers leave in the environment.

The variables are those that the launchers themselves set: seen with Slurm 22.05, Open MPI 4.1 and torchrun 2.13.
"""

from __future__ import annotations

import pytest

from ckpttool.errors import UsageError
from ckpttool.execute.options import Member
from ckpttool.execute.parts.launchers import LAUNCHERS, MOST, is_membership, membership

STEPS = ("SLURM_STEP_ID", "SLURM_STEPID")
BATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}
ARRAY = {
    "SLURM_ARRAY_JOB_ID": "7",
    "SLURM_ARRAY_TASK_ID": "5",
    "SLURM_ARRAY_TASK_COUNT": "4",
    "SLURM_ARRAY_TASK_MIN": "1",
    "SLURM_ARRAY_TASK_MAX": "7",
    "SLURM_ARRAY_TASK_STEP": "2",
}


def step(rank: int, size: int) -> dict[str, str]:
    """In a task of srun."""
    return BATCH | {"SLURM_PROCID": str(rank), "SLURM_NTASKS": str(size), "SLURM_STEP_ID": "0", "SLURM_STEPID": "0"}


def mpi(rank: int, size: int) -> dict[str, str]:
    """In a process of Open MPI."""
    said = {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(size)}
    return said | {"PMIX_RANK": str(rank), "PMIX_NAMESPACE": "1129250817"}


def torchrun(rank: int, size: int, nodes: int = 1) -> dict[str, str]:
    said = {"RANK": str(rank), "WORLD_SIZE": str(size), "GROUP_WORLD_SIZE": str(nodes)}
    return said | {"LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "TORCHELASTIC_RUN_ID": "none"}


def own(rank: int, size: int) -> dict[str, str]:
    """What a script sets for torch."""
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "n1"}


@pytest.mark.parametrize(
    ("said", "environment", "number", "of", "by"),
    [
        ("3/8", {}, 3, 8, ""),
        ("1/1", {}, 1, 1, ""),
        ("3/8", step(0, 4), 3, 8, ""),
        ("auto", step(2, 8), 3, 8, "Slurm (srun): SLURM_PROCID=2, SLURM_NTASKS=8"),
        ("auto/8", step(2, 8), 3, 8, "Slurm (srun): SLURM_PROCID=2, SLURM_NTASKS=8"),
        ("auto", step(2, 8) | {"PMI_RANK": "2", "PMI_SIZE": "8"}, 3, 8, "MPI (PMI): PMI_RANK=2, PMI_SIZE=8"),
        ("auto", step(2, 8) | {"PMIX_RANK": "2", "PMIX_NAMESPACE": "slurm.pmix.7.0"}, 3, 8, "Slurm (srun)"),
        ("auto", mpi(3, 4), 4, 4, "Open MPI: OMPI_COMM_WORLD_RANK=3, OMPI_COMM_WORLD_SIZE=4"),
        # mpirun in a job of Slurm starts one daemon on each node, by srun
        ("auto", step(1, 2) | mpi(3, 4), 4, 4, "Open MPI"),
        ("auto", BATCH | {"SLURM_NTASKS": "8"} | mpi(0, 1), 1, 1, "Open MPI"),
        ("auto", {"PMI_RANK": "0", "PMI_SIZE": "4"}, 1, 4, "MPI (PMI)"),
        ("auto", {"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"}, 2, 2, "MVAPICH2"),
        ("auto", {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2"}, 2, 2, "Flux"),
        ("auto/4", {"PMIX_RANK": "1", "PMIX_NAMESPACE": "prte"}, 2, 4, "MPI (PMIx): PMIX_RANK=1"),
        ("auto", torchrun(1, 4), 2, 4, "torchrun: RANK=1, WORLD_SIZE=4"),
        ("auto", step(0, 2) | torchrun(5, 8, nodes=2), 6, 8, "torchrun"),
        ("auto", step(0, 1) | torchrun(1, 4), 2, 4, "torchrun"),
        ("auto", own(1, 4), 2, 4, "torch.distributed"),
        ("auto", step(1, 4) | own(1, 4), 2, 4, "torch.distributed"),
        ("auto", BATCH | ARRAY | {"SLURM_JOB_NUM_NODES": "1"}, 3, 4, "a Slurm array: SLURM_ARRAY_TASK_ID=5"),
        ("auto", ARRAY | step(0, 1), 3, 4, "a Slurm array"),
        ("auto", ARRAY | step(1, 8), 2, 8, "Slurm (srun)"),
        ("auto", {"AWS_BATCH_JOB_ARRAY_INDEX": "9", "AWS_BATCH_JOB_ARRAY_SIZE": "10"}, 10, 10, "an array of AWS Batch"),
        ("auto", {"CLOUD_RUN_TASK_INDEX": "0", "CLOUD_RUN_TASK_COUNT": "1"}, 1, 1, "Cloud Run"),
        ("auto/8", {"JOB_COMPLETION_INDEX": "7"}, 8, 8, "a Kubernetes job: JOB_COMPLETION_INDEX=7"),
        ("auto", {"JOB_COMPLETION_INDEX": "0"} | mpi(1, 2), 2, 2, "Open MPI"),
        # of no launcher: RANK alone says nothing
        ("auto", {"RANK": "5", "WORLD_SIZE": "6"} | step(0, 2), 1, 2, "Slurm (srun)"),
    ],
)
def test_the_innermost_launcher_that_splits_the_work_counts(
    said: str, environment: dict[str, str], number: int, of: int, by: str
) -> None:
    found = membership(said, environment)
    assert found.member == Member(number, of)
    assert found.source.startswith(by)
    assert bool(found.source) == bool(by)


@pytest.mark.parametrize(
    ("said", "environment", "what", "hint"),
    [
        ("0/8", {}, "counted from 1 to 8", "--part 3/8"),
        ("9/8", {}, "counted from 1 to 8", "--part 3/8"),
        ("1/0", {}, "number of parts", "--part 3/8"),
        ("-1/8", {}, "counted from 1 to 8", "--part 3/8"),
        (f"1/{MOST + 1}", {}, "number of parts", "--part 3/8"),
        ("3/x", {}, "not I/N, auto or auto/N", "--part 3/8"),
        ("٣/٨", {}, "not I/N", "--part 3/8"),
        ("auto/0", {}, "number of parts", "--part 3/8"),
        ("auto", {}, "no launcher", "srun ckpttool"),
        ("auto/8", {}, "no launcher", "torchrun --no-python"),
        ("auto", {"RANK": "3", "WORLD_SIZE": "8"}, "no launcher", "--part 3/8"),
        ("auto", step(8, 8), "process 8 of 8, counted from 0", "--part 3/8"),
        ("auto/8", {"JOB_COMPLETION_INDEX": "8"}, "process 8 of 8, counted from 0", "--part 3/8"),
        ("auto/8", step(2, 4), "the launcher counts 4", "--part I/8"),
        ("auto", {"JOB_COMPLETION_INDEX": "2"}, "does not tell its processes how many", "--part auto/8"),
        ("auto", mpi(1, 4) | {"OMPI_COMM_WORLD_SIZE": ""}, "OMPI_COMM_WORLD_SIZE is not set", "--part 3/8"),
        ("auto", step(1, 4) | {"SLURM_NTASKS": "four"}, "SLURM_NTASKS is `four`", "--part 3/8"),
        ("auto", step(1, 4) | {"SLURM_PROCID": "-1"}, "SLURM_PROCID is `-1`", "--part 3/8"),
        # the batch script of sbatch, and the shell of salloc
        ("auto", BATCH | {"SLURM_NTASKS": "8", "SLURM_JOB_NUM_NODES": "8"}, "batch script", "srun --ntasks-per-node"),
        ("auto", BATCH | {"SLURM_JOB_NUM_NODES": "8"}, "batch script", "srun --ntasks-per-node=1 ckpttool"),
        ("auto", {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"}, "batch script or shell", "srun"),
        ("auto", step(0, 8) | dict.fromkeys(STEPS, "4294967290"), "batch script or shell", "srun"),
        ("auto", step(0, 8) | dict.fromkeys(STEPS, "4294967291"), "batch script or shell", "srun"),
        ("auto", BATCH | ARRAY | {"SLURM_NTASKS": "8"}, "batch script", "srun"),
        ("auto", {"PBS_JOBID": "12.server"}, "script of PBS", "mpirun"),
        # elements of an array that were submitted again, and those that have no order
        ("auto", BATCH | ARRAY | {"SLURM_ARRAY_TASK_COUNT": "3"}, "with gaps", "--array=1-8"),
        (
            "auto",
            BATCH
            | ARRAY
            | dict.fromkeys(("SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_MAX"), "5")
            | {"SLURM_ARRAY_TASK_COUNT": "1"},
            "of one element",
            "--part 3/8",
        ),
        # launchers that know nothing of each other
        ("auto", step(3, 8) | torchrun(1, 4), "torchrun in each has 4 processes of its own", "--nnodes"),
        ("auto", step(1, 2) | torchrun(1, 2), "torchrun in each has 2 processes of its own", "--nnodes"),
        ("auto", step(3, 8) | torchrun(0, 1), "in each has one process", "by Slurm (srun) alone"),
        ("auto", step(3, 8) | mpi(0, 1), "in each has one process", "by Slurm (srun) alone"),
        ("auto", step(3, 8) | own(0, 8), "disagree", "unset the variables"),
        ("auto", step(0, 1) | own(3, 8), "disagree", "unset the variables"),
        ("auto", mpi(1, 4) | {"PMI_RANK": "0", "PMI_SIZE": "4"}, "disagree", "--part 3/8"),
    ],
)
def test_what_contradicts_is_refused_with_what_to_write(
    said: str, environment: dict[str, str], what: str, hint: str
) -> None:
    with pytest.raises(UsageError) as caught:
        membership(said, environment)
    assert what in caught.value.what
    assert hint in str(caught.value.hint)


def test_an_error_shows_the_variables() -> None:
    with pytest.raises(UsageError) as caught:
        membership("auto", step(3, 8) | torchrun(1, 4))
    assert caught.value.where == ("torchrun: RANK=1, WORLD_SIZE=4", "Slurm (srun): SLURM_PROCID=3, SLURM_NTASKS=8")


def test_every_process_of_a_launcher_has_a_part_of_its_own() -> None:
    for row in (row for row in LAUNCHERS if row.size and not row.first):
        beside = dict.fromkeys(row.beside[:1], "0")
        found = [membership("auto", beside | {row.rank: str(i), row.size: "5"}).member for i in range(5)]
        assert found == [Member(i, 5) for i in range(1, 6)], row.name


def test_names_of_parts_of_a_pipeline_are_no_memberships() -> None:
    assert all(map(is_membership, ("3/8", "auto", "auto/8", "x/y")))
    assert not any(map(is_membership, ("transformer", "text_encoder_2", "8")))
