"""What reads and does not write, on the nodes of a Ray cluster: the answers of one machine."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from pathlib import Path

import pytest

from ckpttool.checkpoint import OpenOptions
from ckpttool.errors import AccessError
from ckpttool.execute import compare, run
from ckpttool.execute.machines import calls
from ckpttool.execute.verification import Verification
from ckpttool.ops.reshard import prepare
from ckpttool.targeting.target import Target
from ckpttool.targeting.verify import look_through
from tests.cluster.ray_fleet import LastingFleet
from tests.cluster.ray_nodes import RayNodes
from tests.execute.merges import merge_plan, working_out
from tests.execute.test_verification import SAMPLES, Output, Telling, flipped, told
from tests.helpers.command import Done, ckpttool
from tests.inspect.test_on_a_fleet import SAMPLES as SOURCES
from tests.inspect.test_on_a_fleet import VIEWS

FIXTURES = Path(__file__).parents[2] / "fixtures"


@pytest.fixture(autouse=True)
def _many_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "SMALLEST", 1000)
    monkeypatch.setattr(compare, "STRETCH", 5000)


def same(fleet: LastingFleet, *arguments: object) -> Done:
    """What ``inspect`` says here; it says the same on the cluster."""
    fleet.begin()
    here = ckpttool("inspect", *arguments)
    there = ckpttool("inspect", *arguments, "--on", "ray")
    assert there == here
    assert len({r.node for r in fleet.answered}) >= (2 if len(fleet.sent) > 8 else 1)
    return here


@pytest.mark.parametrize("source", list(SOURCES))
def test_inspect(source: str, ray_fleet: LastingFleet) -> None:
    for view in VIEWS.values():
        done = same(ray_fleet, FIXTURES / SOURCES[source], *view)
        assert done.code in (0, 3), done.err


def test_inspect_where_this_process_is(
    tmp_path: Path, ray_fleet: LastingFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path that is relative here leads to the same file there; elements that are encoded, too."""
    shutil.copytree(FIXTURES / "gguf/llama_q8_0", tmp_path / "model")
    ckpttool("reshard", tmp_path / "model", tmp_path / "other", "--to", "hf")
    same(ray_fleet, tmp_path / "model", "--hash")  # workers are in the directory of their first job
    monkeypatch.chdir(tmp_path)
    assert same(ray_fleet, "model", "--hash", "--stats").code == 0
    assert same(ray_fleet, "model", "--diff", "other", "--values").code == 0


def test_a_worker_that_is_killed(ray_fleet: LastingFleet, ray_nodes: RayNodes) -> None:
    source = FIXTURES / SOURCES["zcc"]
    here = ckpttool("inspect", source, "--stats", "--hash", "--json")

    def kill() -> None:
        for pid in ray_nodes.workers("one"):
            os.kill(pid, signal.SIGKILL)

    ray_fleet.at[3] = kill
    assert ckpttool("inspect", source, "--stats", "--hash", "--json", "--on", "ray") == here
    assert ray_fleet.lost


@pytest.mark.parametrize("name", ["hf", "zcc", "deepspeed", "gguf", "quantized-optimizer"])
def test_verification(name: str, ray_fleet: LastingFleet, tmp_path: Path) -> None:
    """Shares on nodes find what one machine finds, in the same words."""
    source, target = SAMPLES[name]
    output = Output(prepare(FIXTURES / source, OpenOptions(), target), tmp_path / "dst")
    whole = told(output.whole())
    assert told(on(ray_fleet, output)) == whole
    assert len({r.node for r in ray_fleet.answered}) > 1
    path, offset, nbytes = max(output.tensors(), key=lambda t: t[2])
    flipped(path, offset + nbytes // 2)
    error = told(output.whole())[1]
    assert "differ from the source" in error
    assert told(on(ray_fleet, output))[1] == error


def on(fleet: LastingFleet, output: Output) -> Telling:
    stop = threading.Event()
    return lambda advance: output.verification().on(fleet, output.dst, advance, stop)


def test_verification_of_what_is_worked_out(ray_fleet: LastingFleet, tmp_path: Path) -> None:
    plan, _ = merge_plan(tmp_path / "src", rows=4000)
    run(plan, tmp_path / "dst")
    verification, stop = working_out(plan), threading.Event()
    verification.on(ray_fleet, tmp_path / "dst", lambda _: None, stop)
    flipped(tmp_path / "dst/1.bin", 777)
    error = told(lambda advance: verification(tmp_path / "dst", advance))
    assert "`t1` was not written as it was computed" in error[1]
    assert told(lambda advance: verification.on(ray_fleet, tmp_path / "dst", advance, stop))[1] == error[1]


def test_a_source_that_a_node_cannot_see(ray_fleet: LastingFleet, tmp_path: Path) -> None:
    """It is named, with the node."""
    shutil.copytree(FIXTURES / "hf_tiny_source", tmp_path / "src")
    prepared = prepare(tmp_path / "src", OpenOptions(), Target(format="ranks", tp=2))
    run(prepared.plan, tmp_path / "dst")
    checks = look_through(prepared, tmp_path / "dst")
    (tmp_path / "src").rename(tmp_path / "away")
    with pytest.raises(AccessError, match="cannot read a source of the run") as e:
        Verification(lambda _: checks, 1 << 20).on(ray_fleet, tmp_path / "dst", lambda _: None, threading.Event())
    assert "on " in e.value.where[-1]
