"""``--part`` under real launchers: the bytes of one run, also after a part has been killed."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster import llama
from tests.cluster.slurm import Slurm
from tests.cluster.tasks import CKPTTOOL, MPIRUN, ROOT, TORCHRUN, environment, needs_mpi

PARTS = 4
JOBS = {
    "reshard": "reshard BASE DST --to ranks --tp-out 2 --verify --manifest",
    "merge": "merge ONE TWO -o DST --base BASE --method dare_ties --weights 0.6,0.4 --param density=0.5 --tp-out 2",
}
MODELS = ("BASE", "ONE", "TWO")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {name: str(llama.save(folder / name, seed)) for seed, name in enumerate(MODELS)}


class Job:
    """A command, and what one process writes by it."""

    def __init__(self, command: str, models: dict[str, str], folder: Path) -> None:
        self.command = command
        self.models = models
        dst = folder / "dst"
        subprocess.run([*CKPTTOOL, *self.words(dst), "-q"], env=environment(), check=True, timeout=120)
        self.once = tree(dst)

    def words(self, dst: Path) -> list[str]:
        return [self.models.get(word, word).replace("DST", str(dst)) for word in self.command.split()]


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module", params=JOBS)
def job(request: pytest.FixtureRequest, models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(JOBS[request.param], models, tmp_path_factory.mktemp("once"))


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


def check(dst: Path, job: Job, ended: Ended) -> None:
    """DST is what one process writes, and nothing else is left."""
    assert ended.good, ended.said
    assert dst.is_dir(), ended.said
    found = tree(dst)
    assert found.keys() == job.once.keys()
    assert [name for name in found if found[name] != job.once[name]] == []
    assert [p.name for p in dst.parent.iterdir() if p.name.startswith(dst.name)] == [dst.name]


def test_all_parts_make_dst(launch: Launch, job: Job, tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    ended = launch([*CKPTTOOL, *job.words(dst)])
    check(dst, job, ended)
    assert "Traceback" not in ended.said
    assert ended.said.count("waiting for part") <= PARTS - 1
    assert ("--verify" in job.command) == ("verified: every element" in ended.said)


def test_a_killed_part_is_run_again(launch: Launch, job: Job, tmp_path: Path) -> None:
    """By torchrun itself, which starts all again; else by whoever repeats the command."""
    dst, mark = tmp_path / "dst", tmp_path / "mark"
    mortal = [sys.executable, "-m", "tests.cluster.mortal", "2", str(mark), *job.words(dst)]
    ended = launch(mortal)
    assert mark.exists(), ended.said
    if launch is not torchrun:
        assert not ended.good
        assert not dst.exists()
        ended = launch(mortal)
    check(dst, job, ended)


def test_the_parts_of_json(models: dict[str, str], tmp_path: Path) -> None:
    """Each part says how far the whole is."""
    dst = tmp_path / "dst"
    command = [*CKPTTOOL, "reshard", models["BASE"], str(dst), "--to", "vllm", "--verify", "--json"]
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


def test_slurm_requeues_the_job(requeued: Slurm, job: Job, tmp_path: Path) -> None:
    """The batch script of the docs, in which a part is killed: it goes back to the queue, and continues."""
    dst, mark, output = tmp_path / "dst", tmp_path / "mark", tmp_path / "out"
    mortal = [sys.executable, "-m", "tests.cluster.mortal", "3", str(mark), *job.words(dst), "--part", "auto"]
    shown = (ROOT / "docs" / "cluster" / "reshard.sbatch").read_text(encoding="utf-8")
    script = tmp_path / "script.sh"
    run = re.sub(r"(?m)^run=\(.*\)$", lambda _: f"run=({shlex.join(mortal)})", shown)
    script.write_text(run.replace("--cpus-per-task=16 ", "").replace("source ", "# "), encoding="utf-8")
    options = (f"-N{PARTS}", "--cpus-per-task=1", "--mem=0", "--open-mode=append", f"--output={output}")
    own = environment(SLURM_CONF=requeued.environment["SLURM_CONF"])
    ended = _by(["sbatch", *options, str(script)], own)
    assert ended.good, ended.said
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and requeued.call("squeue", "--noheader").stdout.strip():
        time.sleep(0.5)
    check(dst, job, Ended(good=True, said=output.read_text()))
    assert mark.exists()
