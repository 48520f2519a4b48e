"""What real launchers tell their processes, read as ``--part auto`` reads it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from tests.cluster.slurm import Slurm, free_ports
from tests.cluster.tasks import MPIRUN, TORCHRUN, WHO, environment, needs_mpi


@pytest.fixture
def who(tmp_path: Path) -> tuple[str, ...]:
    """A command that prints its part."""
    (tmp_path / "who.py").write_text(WHO)
    return sys.executable, str(tmp_path / "who.py")


def started(command: Sequence[object], said: str = "auto", **more: str) -> list[list[object]]:
    """What all processes printed, in order."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words, env=environment(SAID=said, **more), capture_output=True, text=True, timeout=120, check=False
    )
    return answers(done.stdout)


def answers(printed: str) -> list[list[object]]:
    """In order. Processes that print at a time may do so on one line."""
    decode = json.JSONDecoder().raw_decode
    return sorted(decode(printed, m.start())[0] for m in re.finditer(r'\["(part|refused)"', printed))


def parts(of: int, by: str, numbers: Iterable[int] = ()) -> list[list[object]]:
    """What processes say that have all parts."""
    return [["part", i, of, by] for i in numbers or range(1, of + 1)]


def test_mpirun(who: tuple[str, ...]) -> None:
    needs_mpi()
    assert started([*MPIRUN, "-n", 4, *who]) == parts(4, "Open MPI")
    assert started([*MPIRUN, "-n", 1, *who]) == parts(1, "Open MPI")


def test_torchrun(who: tuple[str, ...]) -> None:
    assert started([*TORCHRUN, "--nproc-per-node", 3, *who]) == parts(3, "torchrun")


def test_a_loop(who: tuple[str, ...]) -> None:
    assert [started(who, f"{i}/3") for i in (1, 2, 3)] == [[["part", i, 3, ""]] for i in (1, 2, 3)]


def test_an_indexed_job_of_kubernetes(who: tuple[str, ...]) -> None:
    found = [started(who, "auto/3", JOB_COMPLETION_INDEX=str(i)) for i in range(3)]
    assert found == [[["part", i, 3, "a Kubernetes job"]] for i in (1, 2, 3)]


class TestSlurm:
    """One cluster for all."""

    @pytest.fixture(autouse=True)
    def _with(self, cluster: Slurm, who: tuple[str, ...], tmp_path: Path) -> None:
        self.cluster = cluster
        self.who = who
        self.command = shlex.join(who)
        self.output = tmp_path / "out"
        cluster.environment |= environment(SAID="auto", SLURM_CONF=cluster.environment["SLURM_CONF"])

    def test_srun(self) -> None:
        done = self.cluster.call("srun", "-N4", *self.who)
        assert answers(done.stdout) == parts(4, "Slurm (srun)"), done.stderr

    def test_several_tasks_on_a_node(self) -> None:
        done = self.cluster.call("srun", "-N2", "--ntasks-per-node=3", *self.who)
        assert answers(done.stdout) == parts(6, "Slurm (srun)"), done.stderr

    def test_srun_in_a_batch_script(self) -> None:
        said = self.cluster.batch(f"{self.command}; srun {self.command}", self.output, "-N3", "--ntasks-per-node=1")
        *found, refused = answers(said)
        assert found == parts(3, "Slurm (srun)")
        assert "this is Slurm's batch script" in str(refused[1])
        assert "srun --ntasks-per-node=1 ckpttool" in str(refused[1])

    def test_steps_that_a_script_starts_one_by_one(self) -> None:
        """A step of one task says nothing of the job's other tasks; --part I/N does."""
        loop = f"for i in 1 2 3; do SAID=$i/3 srun --exact -N1 -n1 {self.command} & done; wait"
        assert answers(self.cluster.batch(loop, self.output, "-N3", "-n3")) == parts(3, "")

    @pytest.mark.parametrize(("array", "elements"), [("0-2", "012"), ("1-3", "123"), ("2-6:2", "246")])
    @pytest.mark.parametrize("srun", ["", "srun -n1 "])
    def test_an_array(self, array: str, elements: str, srun: str) -> None:
        self.cluster.batch(srun + self.command, self.output.with_name("out-%a"), f"--array={array}")
        printed = "".join(self.output.with_name(f"out-{e}").read_text() for e in elements)
        assert answers(printed) == parts(3, "a Slurm array")

    @pytest.mark.parametrize(("array", "element", "why"), [("1,2,4", 4, "with gaps"), ("3", 3, "of one element")])
    def test_an_array_that_leaves_it_open(self, array: str, element: int, why: str) -> None:
        self.cluster.batch(self.command, self.output.with_name("out-%a"), f"--array={array}")
        printed = self.output.with_name(f"out-{element}").read_text()
        assert why in str(answers(printed)[0][1])

    def test_mpi_of_srun(self) -> None:
        done = self.cluster.call("srun", "-N3", "--mpi=pmi2", *self.who)
        assert answers(done.stdout) == parts(3, "MPI (PMI)"), done.stderr

    def test_mpirun_in_a_batch_script(self) -> None:
        """Its daemons are tasks of Slurm; its processes are not."""
        needs_mpi()
        said = self.cluster.batch(f"{shlex.join(MPIRUN)} -n 4 {self.command}", self.output, "-N2", "-n2")
        assert answers(said) == parts(4, "Open MPI"), said

    def test_torchrun_in_srun(self) -> None:
        """One on each node that knows of the others; and one in each task that does not."""
        run = shlex.join(TORCHRUN)
        alone = self.cluster.call("srun", "-N2", *TORCHRUN, "--nproc-per-node", 2, *self.who)
        refused = answers(alone.stdout)
        assert len(refused) == 4, alone.stderr
        assert all("torchrun in each has 2 processes of its own" in str(r[1]) for r in refused)
        rendezvous = f"--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{free_ports(1)[0]} --nnodes=2 --nproc-per-node=2"
        said = self.cluster.batch(f"srun {run} {rendezvous} {self.command}", self.output, "-N2", "-n2")
        assert answers(said) == parts(4, "torchrun"), said
