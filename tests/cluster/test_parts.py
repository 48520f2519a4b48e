"""``--part`` under real launchers: the bytes of one run, also after a part has been killed."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.slurm import Slurm
from tests.cluster.tasks import CKPTTOOL, MPIRUN, ROOT, TORCHRUN, environment, needs_mpi

PARTS = 4
FIXTURES = ROOT / "fixtures"
FT1, FT2, BASE = (FIXTURES / "merge" / "inputs" / n for n in ("ft1", "ft2", "base"))
JOBS: dict[str, tuple[object, ...]] = {
    "reshard": ("reshard", FIXTURES / "llama_tp8", "DST", "--tp-out", 2, "--verify", "--manifest"),
    "merge": (
        *("merge", FT1, FT2, "--base", BASE, "--method", "dare_ties", "--weights", "0.6,0.4", "--param", "density=0.5"),
        *("--to", "vllm", "--tp-out", 2, "-o", "DST", "--verify"),
    ),
}


def words(job: str, dst: Path) -> list[str]:
    return [str(dst if word == "DST" else word) for word in JOBS[job]]


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module", params=JOBS)
def job(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def once(job: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What one process writes."""
    dst = tmp_path_factory.mktemp("once") / "dst"
    subprocess.run([*CKPTTOOL, *words(job, dst), "-q"], env=environment(), check=True, timeout=120)
    return tree(dst)


@dataclass(frozen=True, slots=True)
class Ended:
    """What processes have printed, and whether all went well."""

    good: bool
    said: str


Launch = Callable[[Sequence[str]], Ended]
"""Starts PARTS processes that do all parts; the option --part is added."""


def _together(commands: Sequence[tuple[Sequence[str], dict[str, str]]]) -> Ended:
    started = [
        subprocess.Popen(command, env=environment(**more), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command, more in commands
    ]
    said = [process.communicate(timeout=180)[0] for process in started]
    return Ended(not any(process.returncode for process in started), "".join(said))


def _by(command: Sequence[str], environment: dict[str, str]) -> Ended:
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=180, check=False
    )
    return Ended(not done.returncode, done.stdout)


def loop(command: Sequence[str]) -> Ended:
    return _together([([*command, "--part", f"{i}/{PARTS}"], {}) for i in range(1, PARTS + 1)])


def kubernetes(command: Sequence[str]) -> Ended:
    """What a pod of an indexed Job gets."""
    return _together([([*command, "--part", f"auto/{PARTS}"], {"JOB_COMPLETION_INDEX": str(i)}) for i in range(PARTS)])


def mpirun(command: Sequence[str]) -> Ended:
    return _by([*MPIRUN, "-n", str(PARTS), *command, "--part", "auto"], environment())


def torchrun(command: Sequence[str]) -> Ended:
    run = [*TORCHRUN, "--nproc-per-node", str(PARTS), "--max-restarts", "2"]
    return _by([*run, *command, "--part", "auto"], environment())


LAUNCHES: dict[str, Launch] = {"loop": loop, "kubernetes": kubernetes, "mpirun": mpirun, "torchrun": torchrun}


@pytest.fixture(params=[*LAUNCHES, "srun"])
def launch(request: pytest.FixtureRequest) -> Launch:
    if request.param == "srun":
        cluster: Slurm = request.getfixturevalue("cluster")
        own = environment(SLURM_CONF=cluster.environment["SLURM_CONF"])
        return lambda command: _by(["srun", f"-N{PARTS}", *command, "--part", "auto"], own)
    if request.param == "mpirun":
        needs_mpi()
    return LAUNCHES[request.param]


def check(dst: Path, once: dict[str, bytes], ended: Ended) -> None:
    """DST is what one process writes, and nothing else is left."""
    assert ended.good, ended.said
    assert dst.is_dir(), ended.said
    assert tree(dst) == once
    assert [p.name for p in dst.parent.iterdir() if p.name.startswith(dst.name)] == [dst.name]


def test_all_parts_make_dst(launch: Launch, job: str, once: dict[str, bytes], tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    ended = launch([*CKPTTOOL, *words(job, dst)])
    check(dst, once, ended)
    assert ended.said.count("verified: ") >= 1
    assert "Traceback" not in ended.said


def test_a_killed_part_is_run_again(launch: Launch, job: str, once: dict[str, bytes], tmp_path: Path) -> None:
    """By torchrun itself, which starts all again; else by whoever repeats the command."""
    dst, mark = tmp_path / "dst", tmp_path / "mark"
    mortal = [sys.executable, "-m", "tests.cluster.mortal", "2", str(mark), *words(job, dst)]
    ended = launch(mortal)
    assert mark.exists(), ended.said
    if launch is not torchrun:
        assert not ended.good
        assert not dst.exists()
        ended = launch(mortal)
    check(dst, once, ended)


def test_the_parts_of_json(tmp_path: Path) -> None:
    """Each part says how far the whole is."""
    dst = tmp_path / "dst"
    command = [*CKPTTOOL, *words("reshard", dst), "--json"]
    said = []
    for i in (3, 1, 2):
        done = subprocess.run(
            [*command, "--part", f"{i}/3"], env=environment(), capture_output=True, text=True, check=True, timeout=60
        )
        answer = json.loads(done.stdout)
        said.append((answer["part"], answer["committed"], answer["waiting_for"], answer["verified"]))
        assert dst.exists() == answer["committed"]
    assert said == [(3, False, [1, 2], False), (1, False, [2], False), (2, True, [], True)]


@pytest.fixture
def requeued(cluster: Slurm) -> Iterator[Slurm]:
    yield cluster
    cluster.call("scancel", "--user=root", "--full")


def test_slurm_requeues_the_job(requeued: Slurm, job: str, once: dict[str, bytes], tmp_path: Path) -> None:
    """A batch job in which a part is killed: it goes back to the queue, and continues."""
    dst, mark, output = tmp_path / "dst", tmp_path / "mark", tmp_path / "out"
    mortal = [sys.executable, "-m", "tests.cluster.mortal", "3", str(mark), *words(job, dst), "--part", "auto"]
    again = "[ ${SLURM_RESTART_COUNT:-0} -lt 3 ] && scontrol requeue $SLURM_JOB_ID && sleep 60"
    script = tmp_path / "script.sh"
    script.write_text(f"#!/bin/bash\nsrun --kill-on-bad-exit=1 {shlex.join(mortal)} || {{ {again}; }}\n")
    options = (f"-N{PARTS}", "--ntasks-per-node=1", "--requeue", "--open-mode=append", f"--output={output}")
    own = environment(SLURM_CONF=requeued.environment["SLURM_CONF"])
    ended = _by(["sbatch", *options, str(script)], own)
    assert ended.good, ended.said
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and requeued.call("squeue", "--noheader").stdout.strip():
        time.sleep(0.5)
    check(dst, once, Ended(good=True, said=output.read_text()))
    assert mark.exists()
