"""``--part`` and ``--on`` on the command line and in the API: what is asked of the run, and what is said of it."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import ckpttool as api
from ckpttool.core.files import Place
from ckpttool.core.plan import Plan
from ckpttool.core.words import short
from ckpttool.errors import UsageError
from ckpttool.execute import Progress, RunOptions, RunResult
from ckpttool.execute.options import Member, Standing
from tests.helpers.command import ckpttool

FIXTURES = Path(__file__).parents[2] / "fixtures"
FT1, FT2 = (FIXTURES / "merge" / "inputs" / n for n in ("ft1", "ft2"))
PROGRAM = FIXTURES / "paddle_programs" / "pir" / "model.json"

COMMANDS: dict[str, tuple[object, ...]] = {
    "reshard": ("reshard", FT1, "dst", "--to", "vllm"),
    "merge": ("merge", FT1, FT2, "-o", "dst"),
    "drop-keys": ("drop-keys", FT1, "dst", "*.0.*"),
    "quantize": ("quantize", FT1, "dst", "--recipe", "channel"),
    "convert-json": ("convert-json", PROGRAM, "dst.safetensors"),
}
RUNS = [import_module(f"ckpttool.ops.{name}") for name in ("reshard", "merge.prepare", "convert_json.convert")]


class Runs:
    """Stands in for the engine: keeps what it was asked, and answers with a standing."""

    def __init__(self) -> None:
        self.asked: list[RunOptions] = []
        self.waiting: tuple[int, ...] = (4, 5, 6, 8)
        self.committed = False

    def __call__(self, plan: Plan, dst: Place, options: RunOptions, progress: Progress | None = None) -> RunResult:
        self.asked.append(options)
        member = options.member
        standing = Standing(member, self.committed, self.waiting) if member else None
        verified = self.committed and options.verify is not None
        return RunResult(10, plan.bytes_written, 0, 0.1, 0, "plain", verified=verified, standing=standing)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory, where no launcher is."""
    monkeypatch.chdir(tmp_path)
    for variable in ("SLURM_PROCID", "SLURM_JOB_ID", "RANK", "OMPI_COMM_WORLD_RANK", "JOB_COMPLETION_INDEX"):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path


@pytest.fixture
def runs(here: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:  # noqa: ARG001
    found = Runs()
    for module in RUNS:
        monkeypatch.setattr(module, "run", found)
    return found


def srun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be the third of eight tasks."""
    for name, value in (("JOB_ID", "7"), ("STEP_ID", "0"), ("PROCID", "2"), ("NTASKS", "8")):
        monkeypatch.setenv(f"SLURM_{name}", value)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_part_says_for_whom_it_waits(command: str, runs: Runs) -> None:
    done = ckpttool(*COMMANDS[command], "--part", "3/8", merged=True)
    assert done.code == 0, done.out
    assert runs.asked[-1].member == Member(3, 8)
    dst = "dst.safetensors" if command == "convert-json" else "dst"
    assert done.out.splitlines()[-1] == f"{dst}: part 3 of 8 is done; waiting for parts 4-6,8"
    assert "verified" not in done.out


@pytest.mark.sample("reshard", "convert-json")
@pytest.mark.parametrize("command", COMMANDS)
def test_json_of_a_part(command: str, runs: Runs) -> None:
    verify = () if command == "convert-json" else ("--verify",)
    said = json.loads(ckpttool(*COMMANDS[command], *verify, "--part", "3/8", "--json").out)
    wanted = {"part": 3, "of": 8, "committed": False, "waiting_for": [4, 5, 6, 8], "verified": False}
    assert {name: said[name] for name in wanted} == wanted
    assert not said.get("next_step")
    runs.committed, runs.waiting = True, ()
    said = json.loads(ckpttool(*COMMANDS[command], *verify, "--part", "3/8", "--json").out)
    assert (said["committed"], said["waiting_for"], said["verified"]) == (True, [], True)
    assert "part" not in json.loads(ckpttool(*COMMANDS[command], "--json").out)


def test_the_last_part_tells_of_the_whole(runs: Runs) -> None:
    runs.committed, runs.waiting = True, ()
    done = ckpttool(*COMMANDS["reshard"], "--part", "8/8", "--verify")
    assert "dst: vllm" in done.out
    assert "verified: every element" in done.out
    assert "next: vllm serve" in done.err


def test_another_process_may_be_completing_it(runs: Runs) -> None:
    runs.waiting = ()
    done = ckpttool(*COMMANDS["reshard"], "--part", "1/2")
    assert done.out == "dst: part 1 of 2 is done; all parts are done, and another process completes it\n"


def test_auto_says_which_launcher_it_took(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    srun(monkeypatch)
    done = ckpttool(*COMMANDS["reshard"], "--part", "auto")
    note = "note: part 3 of 8, as the launcher says (Slurm (srun): SLURM_PROCID=2, SLURM_NTASKS=8)\n"
    assert done.err.startswith(note)
    assert runs.asked[-1].member == Member(3, 8)
    assert ckpttool(*COMMANDS["reshard"], "--part", "auto", "-q") == (0, "", "")


def test_parts_of_a_pipeline_and_of_the_work_go_together(runs: Runs) -> None:
    done = ckpttool(*COMMANDS["reshard"], "--part", "3/8", "--part", "vae")
    assert "--part vae: SRC is one model" in done.err
    assert not runs.asked


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--part", "auto"), "no launcher has left its variables"),
        (("--part", "9/8"), "counted from 1 to 8"),
        (("--part", "1/8", "--part", "2/8"), "a process does one part"),
        (("--part", "1/8", "--on", "ray"), "--on and --part exclude each other"),
        (("--on", "dask"), "--on `dask` is not one of ray"),
    ],
)
@pytest.mark.parametrize("command", ["reshard", "convert-json"])
def test_refusals(command: str, options: tuple[str, ...], said: str, runs: Runs) -> None:
    done = ckpttool(*COMMANDS[command], *options)
    assert (done.code, done.out) == (2, "")
    assert said in done.err
    assert not runs.asked


@pytest.mark.parametrize("options", [("--part", "1/8"), ("--on", "ray")])
@pytest.mark.parametrize("task", [("--check",)])
def test_what_is_done_in_place_is_not_shared_out(task: tuple[str, ...], options: tuple[str, ...]) -> None:
    done = ckpttool("convert-json", PROGRAM, *task, *options)
    assert (done.code, done.out) == (2, "")
    assert f"{options[0]} has no effect with {task[0]}" in done.err


def test_a_program_has_no_parts(runs: Runs) -> None:
    assert "a program has no parts" in ckpttool(*COMMANDS["convert-json"], "--part", "vae").err
    assert not runs.asked


def test_what_a_cluster_does(runs: Runs) -> None:
    ckpttool(*COMMANDS["reshard"], "--on", "ray=head:6379")
    assert (runs.asked[-1].on, runs.asked[-1].member) == ("ray=head:6379", None)


def resharding() -> Any:
    return api.open(FT1).reshard(to="vllm")


@pytest.mark.parametrize("part", [(3, 8), "3/8", [3, 8]])
def test_the_api_takes_a_part(part: Any, runs: Runs) -> None:
    written = resharding().run("dst", part=part, verify=True)
    assert runs.asked[-1].member == Member(3, 8)
    assert (written.part, written.committed, written.waiting_for, written.verified) == (
        (3, 8),
        False,
        (4, 5, 6, 8),
        False,
    )
    assert repr(written) == "<Written dst: part 3 of 8, waiting for 4-6,8>"
    runs.committed, runs.waiting = True, ()
    written = resharding().run("dst", part=part, verify=True)
    assert (written.committed, written.verified) == (True, True)
    assert repr(written).startswith("<Written dst: vllm, ")


def test_the_api_takes_an_engine(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    resharding().run("dst", on="ray")
    assert runs.asked[-1].on == "ray"
    srun(monkeypatch)
    resharding().run("dst", part="auto")
    assert runs.asked[-1].member == Member(3, 8)
    assert resharding().run("dst").part is None


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"part": (9, 8)}, "counted from 1 to 8"),
        ({"part": (3,)}, "part is (3,)"),
        ({"part": (0, 8)}, "part is 0"),
        ({"part": "x"}, "not I/N"),
        ({"part": (1, 8), "on": "ray"}, "exclude each other"),
    ],
)
def test_the_api_refuses(how: dict[str, Any], said: str, runs: Runs) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        resharding().run("dst", **how)
    assert not runs.asked


@pytest.mark.sample("quantize")
@pytest.mark.parametrize("command", ["reshard", "merge", "quantize"])
def test_dry_runs_show_the_share(command: str, runs: Runs) -> None:
    """What all parts write together is what one writes that does all."""

    def share(part: str) -> int:
        plan = json.loads(ckpttool(*COMMANDS[command], "--dry-run", "--part", part, "--json").out)
        assert f"{plan['part']}/{plan['of']}" == part
        return int(plan["part_bytes"])

    shares = [share(f"{i}/3") for i in (1, 2, 3)]
    assert sum(shares) == share("1/1")
    done = ckpttool(*COMMANDS[command], "--dry-run", "--part", "2/3", merged=True)
    assert f"part 2 of 3: {short(shares[1])} of " in done.out
    assert "part 2" not in ckpttool(*COMMANDS[command], "--dry-run", merged=True).out
    assert not runs.asked


@pytest.mark.parametrize("more", [[], ["--manifest"]])
@pytest.mark.parametrize("form", ["dcp", "hf"])
def test_a_dry_run_counts_what_the_part_writes(form: str, more: list[str], here: Path) -> None:
    """DCP's files hold checksums of tensors: one of 5 MiB is hashed, and so written, by one part."""
    held = {f"a{n}.weight": np.full((1024, 256 * n), n, np.float32) for n in (5, 3, 1)}
    save_file(held, here / "model.safetensors")
    for i in (1, 2, 3):
        words = ("reshard", "model.safetensors", "dst", "--to", form, "--part", f"{i}/3", "--json", *more)
        shown = json.loads(ckpttool(*words, "--dry-run").out)["part_bytes"]
        assert json.loads(ckpttool(*words).out)["bytes_written"] == shown


# -- a part that is started again when DST is there


@pytest.mark.sample("merge", "convert-json")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_part_that_comes_late_proves_that_dst_is_what_it_makes(command: str, here: Path) -> None:
    """Launchers start all processes again when one has died."""
    words = COMMANDS[command]
    for part in ("1/2", "2/2"):
        assert ckpttool(*words, "--part", part).code == 0
    dst = here / ("dst.safetensors" if command == "convert-json" else "dst")
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in [dst, *dst.rglob("*")] if p.is_file()}
    for part in ("1/2", "2/2"):
        done = ckpttool(*words, "--part", part)
        assert done.code == 0, done.err
        assert f"DST exists already, and the share of part {part[0]} of 2 in it matches" in done.err
    assert {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in [dst, *dst.rglob("*")] if p.is_file()} == before
    assert [p.name for p in here.iterdir()] == [dst.name]


@pytest.mark.sample("element", "config.json", "generation_config.json")
@pytest.mark.parametrize("change", ["element", "file", "name", "config.json", "generation_config.json"])
def test_another_dst_is_not_taken_for_it(change: str, here: Path) -> None:
    """Another source of the same shapes makes the same names and sizes."""
    words = COMMANDS["reshard"]
    assert ckpttool(*words, "--part", "1/1").code == 0
    largest = max((here / "dst").glob("*.safetensors"), key=lambda p: p.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[-1] ^= 1
    if change == "element":
        largest.write_bytes(data)
    elif change == "file":
        largest.write_bytes(data[:-1])
    elif change.endswith(".json"):
        companion = here / "dst" / change
        text = companion.read_text().replace("1e-06", "2e-06") if change == "config.json" else "other"
        assert text != companion.read_text()
        companion.write_text(text.ljust(companion.stat().st_size))
    else:
        (here / "dst" / "more.safetensors").touch()
    done = ckpttool(*words, "--part", "1/1")
    assert done.code == 1
    assert "the destination exists" in done.err
    assert ckpttool(*words, "--part", "1/1", "--force").code == 0


def test_with_verify_all_of_a_dst_is_proven(here: Path) -> None:
    """What is called verified is so as a whole, and not in the part of whoever says it."""
    words = COMMANDS["reshard"]
    assert ckpttool(*words, "--part", "1/1").code == 0
    largest = max((here / "dst").glob("*.safetensors"), key=lambda p: p.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[-1] ^= 1
    largest.write_bytes(data)
    assert sorted(ckpttool(*words, "--part", f"{i}/2").code for i in (1, 2)) == [0, 1]
    assert [ckpttool(*words, "--part", f"{i}/2", "--verify").code for i in (1, 2)] == [1, 1]
