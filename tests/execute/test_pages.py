"""Shares of a run on machines whose page caches know nothing of each other: the bytes are those of one run.

A page that two machines write would lose what one of them wrote.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool.core.plan import Output, Plan
from ckpttool.execute import RunOptions, blocks, engine, moves, run, schedule, shares, workforce
from ckpttool.execute.destinations import claims, local, members
from ckpttool.execute.fleets import dispatch
from ckpttool.execute.machines import fleetwork, node
from ckpttool.execute.options import Member
from ckpttool.execute.workforce import CompletionQueue
from tests.execute.plans import expected, reshard, written
from tests.execute.test_bytes import recipes
from tests.helpers.command import ckpttool
from tests.helpers.fleet import CALM, WILD, FakeFleet
from tests.helpers.machines import Disk
from tests.helpers.sample import examples

FIXTURES = Path(__file__).parents[2] / "fixtures"


def apart(patch: pytest.MonkeyPatch, directory: Path, page: int) -> Disk:
    """Every node is a machine, and so is whoever has started the run; shares are small."""
    disk = Disk(directory)
    patch.setattr(shares, "PAGE", page)
    patch.setattr(node, "open_medium", disk.machine)
    patch.setattr(engine, "open_medium", disk.machine)
    patch.setattr(local, "LEAST_SHARE", 1)
    patch.setattr(dispatch, "TRIES", 100)
    patch.setattr(workforce, "spawn", lambda *_: None)  # a process would be a machine of its own
    return disk


def check_pages(disk: Disk, dst: Path, plan: Plan) -> None:
    """No page has two writers."""
    found = [machines for o in plan.outputs for machines in disk.writers_of(dst / o.name)]
    assert found
    assert all(len(machines) == 1 for machines in found)


@settings(max_examples=examples(60))
@given(recipes(), st.data())
def test_any_plan(recipe: Callable[[Path], Plan], data: st.DataObject) -> None:
    """Any cut, order, repetition and overlap of shares, by any number of machines."""
    choose = st.sampled_from
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        plan = recipe(Path(directory, "src"))
        head = Output("head", 120, ((0, b"x" * 20), (118, b"y")))
        plan = replace(plan, outputs=[replace(o, literals=((o.size, b"end"),), size=o.size + 3) for o in plan.outputs])
        plan.outputs.append(head)
        part = data.draw(choose((64, 1000, 1 << 20)))
        patch.setattr(schedule, "_MIB", part)
        patch.setattr(schedule, "_BATCH_UNITS", data.draw(choose((1, 2, 256))))
        patch.setattr(moves, "TURNED_PART", part)
        patch.setattr(blocks, "BLOCK", data.draw(choose((512, 4 << 20))))
        patch.setattr(fleetwork, "_SHARES", data.draw(st.integers(1, 6)))
        calm = data.draw(st.booleans())
        fleet = FakeFleet(data.draw(st.integers(1, 4)), data.draw(st.integers(0, 1 << 16)), CALM if calm else WILD)
        disk = apart(patch, Path(directory, "out"), data.draw(choose((4, 16, 100, 4096))))
        options = RunOptions(workers=data.draw(st.integers(1, 3)), manifest=data.draw(st.booleans()), on=fleet)
        Path(directory, "out").mkdir()
        result = run(plan, Path(directory, "out", "dst"), options)
        assert written(Path(directory, "out", "dst"), plan) == expected(plan)
        assert len(result.manifest) == options.manifest * sum(len(u.stored_tensors) for u in plan.units)
        if calm:
            check_pages(disk, Path(directory, "out", "dst"), plan)


@settings(max_examples=examples(30))
@given(recipes(), st.data())
def test_any_interruption(recipe: Callable[[Path], Plan], data: st.DataObject) -> None:
    """Other machines go on, with other shares and other pages between them, where a run was killed."""
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        plan = recipe(Path(directory, "src"))
        patch.setattr(schedule, "_MIB", 64)
        patch.setattr(schedule, "_BATCH_UNITS", 1)
        out = Path(directory, "out")
        out.mkdir()
        apart(patch, out, data.draw(st.sampled_from((16, 100))))
        options = RunOptions(workers=1, manifest=data.draw(st.booleans()))
        remember, left = local.LocalDestination.remember, data.draw(st.integers(0, 6))

        def killed(self: local.LocalDestination, *args: Any) -> None:
            nonlocal left
            left -= 1
            if not left:
                raise KeyboardInterrupt
            remember(self, *args)

        patch.setattr(local.LocalDestination, "remember", killed)
        for resume in (False, True):
            patch.setattr(fleetwork, "_SHARES", data.draw(st.integers(1, 6)))
            fleet = FakeFleet(data.draw(st.integers(1, 3)), data.draw(st.integers(0, 1 << 16)), WILD)
            with suppress(KeyboardInterrupt):
                run(plan, out / "dst", replace(options, on=fleet, resume=resume))
                break
        assert written(out / "dst", plan) == expected(plan)


@settings(max_examples=examples(60))
@given(recipes(), st.data())
def test_any_members(recipe: Callable[[Path], Plan], data: st.DataObject) -> None:
    """Parts on machines of their own, in any order, some of them killed and started again elsewhere."""
    choose = st.sampled_from
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        plan = recipe(Path(directory, "src"))
        plan = replace(plan, outputs=[replace(o, literals=((o.size, b"end"),), size=o.size + 3) for o in plan.outputs])
        patch.setattr(schedule, "_MIB", data.draw(choose((64, 1000))))
        patch.setattr(schedule, "_BATCH_UNITS", 1)
        patch.setattr(claims, "LOOK", 0.002)
        patch.setattr(local, "SLACK", 0)
        patch.setattr(workforce, "CompletionQueue", lambda *_: CompletionQueue(1, 0))  # records each part by itself
        out = Path(directory, "out")
        out.mkdir()
        apart(patch, out, data.draw(choose((16, 100, 4096))))
        of = data.draw(st.integers(1, 4))
        options = RunOptions(workers=1, manifest=data.draw(st.booleans()))
        record, left = members.MemberDestination.record, 0

        def killed(self: members.MemberDestination, *args: Any) -> None:
            nonlocal left
            left -= 1
            if not left:
                raise KeyboardInterrupt
            record(self, *args)

        patch.setattr(members.MemberDestination, "record", killed)
        for number in data.draw(st.permutations(range(1, of + 1))):
            left = data.draw(st.integers(0, 4))
            for _ in range(2):
                with suppress(KeyboardInterrupt):
                    run(plan, out / "dst", replace(options, member=Member(number, of)))
                    break
        assert written(out / "dst", plan) == expected(plan)


@pytest.mark.parametrize("manifest", [False, True])
def test_members_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, manifest: bool) -> None:
    """Each has read what it needs of the files before any of them writes."""
    plan = reshard(tmp_path / "src", [((40 + 8 * i, 24), i % 2) for i in range(9)], 4, 2)
    run(plan, tmp_path / "one", RunOptions(manifest=manifest))
    (tmp_path / "out").mkdir()
    apart(monkeypatch, tmp_path / "out", 512)
    monkeypatch.setattr(schedule, "_BATCH_UNITS", 1)
    monkeypatch.setattr(claims, "LOOK", 0.002)
    monkeypatch.setattr(local, "SLACK", 0)
    record, barrier, came = members.MemberDestination.record, threading.Barrier(3, timeout=60), set()

    def together(self: members.MemberDestination, *args: Any) -> None:
        if self.member not in came:
            came.add(self.member)
            barrier.wait()
        record(self, *args)

    monkeypatch.setattr(members.MemberDestination, "record", together)
    with ThreadPoolExecutor(3) as threads:
        options = [RunOptions(workers=1, manifest=manifest, member=Member(i, 3)) for i in (1, 2, 3)]
        done = [threads.submit(run, plan, tmp_path / "out" / "dst", o) for o in options]
        standings = [d.result().standing for d in done]
    assert any(s is not None and s.committed for s in standings)
    for path in (tmp_path / "one").iterdir():
        assert (tmp_path / "out" / "dst" / path.name).read_bytes() == path.read_bytes()


LLAMA = FIXTURES / "llama_tp8"
MODELS = FIXTURES / "merge" / "inputs"
RANDOM = ("--method", "dare_ties", "--base", MODELS / "base", "--param", "density=0.5")
COMMANDS = {
    "hf": ("reshard", LLAMA, "DST", "--to", "hf", "--max-shard-size", "100KB"),
    "tp2": ("reshard", LLAMA, "DST", "--tp-out", "2", "--manifest"),
    "torch-bin": ("reshard", LLAMA, "DST", "--to", "torch-bin"),
    "dcp": ("reshard", LLAMA, "DST", "--to", "dcp", "--manifest"),
    "megatron-dist": ("reshard", LLAMA, "DST", "--to", "megatron-dist"),
    "unified": ("reshard", LLAMA, "DST", "--to", "unified"),
    "cast": ("reshard", LLAMA, "DST", "--to", "hf", "--dtype", "f32"),
    "quantize": ("quantize", LLAMA, "DST", "--manifest"),
    "merge": ("merge", MODELS / "ft1", MODELS / "ft2", "-o", "DST", "--weights", "0.6,0.4", *RANDOM),
    "drop-keys": ("drop-keys", LLAMA, "DST", "lm_head.weight"),
}


@pytest.mark.sample("tp2", "torch-bin", "quantize")
@pytest.mark.parametrize("name", COMMANDS)
def test_commands(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What commands write, with nodes that are lost, repeat and come back."""
    found = []
    fleet = FakeFleet(3, sorted(COMMANDS).index(name), WILD)
    for on in ((), ("--on", "ray=fake", "--verify")):
        directory = tmp_path / str(len(on))
        directory.mkdir()
        dst = directory / "dst"
        if on:
            monkeypatch.setattr("ckpttool.execute.fleets.fleet_for", lambda _: fleet)
            monkeypatch.setattr(schedule, "_BATCH_UNITS", 2)
            apart(monkeypatch, directory, 256)
        done = ckpttool(*[dst if a == "DST" else a for a in COMMANDS[name]], *on)
        assert done.code == 0, done.err
        found.append({str(p.relative_to(dst)): p.read_bytes() for p in dst.rglob("*") if p.is_file()})
    assert len(fleet.sent) > 8
    assert found[0] == found[1]
