"""What a run tells while it works, and what it reads and writes for it."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from ckpttool.core.files import Place
from ckpttool.core.plan import Block, Compute, Copy, Output, Plan, Step, Unit
from ckpttool.errors import OutputError
from ckpttool.execute import (
    Advance,
    NoProgress,
    RunOptions,
    compute,
    compute_worker,
    engine,
    files,
    quantize,
    run,
    workforce,
)
from ckpttool.execute.compute_worker import ComputeJob, ComputeWorker, order
from ckpttool.execute.destinations import local
from ckpttool.execute.draws import tensor_draws
from ckpttool.execute.schedule import computing_task
from ckpttool.execute.worker_pool import Answer
from ckpttool.kernels.merge import METHODS
from ckpttool.kernels.merge.base import MergeTensor
from ckpttool.kernels.merge.draws import CounterDraws
from tests.execute.merges import merge_plan
from tests.execute.plans import pattern, reshard, source
from tests.execute.test_quantize import plain_plan
from tests.merge.driver import ArrayChunk
from tests.unit.test_fp8_kernels import SCHEMES


class Log:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.total = self.done = self.calls = 0
        self.files: list[tuple[str, int]] = []
        self.ended = False

    def start(self, total_bytes: int, files: int) -> None:
        self.total = total_bytes
        assert files == 3

    def advance(self, nbytes: int) -> None:
        assert nbytes > 0
        self.done += nbytes
        self.calls += 1

    def file_done(self, name: str, nbytes: int) -> None:
        self.files.append((name, nbytes))

    def note(self, text: str) -> None:
        raise AssertionError(text)

    def finish(self) -> None:
        self.ended = True


@pytest.mark.parametrize("tick", [0.0, 60.0])
def test_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tick: float) -> None:
    """Totals are right whatever happens in between; calls come with the clock, not with the blocks."""
    plan = reshard(tmp_path / "src", [((512, 768), 0), ((768, 512), 1)], 4, 2)
    plan.outputs.append(Output("index.json", 2, ((0, b"{}"),)))
    monkeypatch.setattr(engine, "TICK", tick)
    monkeypatch.setattr(workforce, "TICK", tick)
    log = Log()
    run(plan, tmp_path / "dst", RunOptions(memory=100_000), log)
    assert log.total == log.done == plan.bytes_written
    assert sorted(log.files) == sorted((o.name, o.size) for o in plan.outputs)
    assert log.ended
    assert tick == 0 or log.calls <= 1


class Phases(Log):
    """Hears of phases."""

    def __init__(self) -> None:
        super().__init__()
        self.phases: list[tuple[str, int, int]] = []
        self.counted: list[list[int]] = []

    def start(self, total_bytes: int, files: int) -> None:
        self.total = total_bytes
        assert files > 0

    def phase(self, name: str, total_bytes: int, done_bytes: int) -> None:
        self.phases.append((name, total_bytes, done_bytes))
        self.counted.append([])

    def advance(self, nbytes: int) -> None:
        super().advance(nbytes)
        self.counted[-1].append(nbytes)


def test_phases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written and what is verified count from 0 to all; who hears of no phases counts what is written."""
    plan = reshard(tmp_path / "src", [((512, 768), 0), ((768, 512), 1)], 4, 2)
    monkeypatch.setattr(engine, "TICK", 0.01)
    monkeypatch.setattr(workforce, "TICK", 0.01)

    def verify(_partial: Place, advance: Advance) -> None:
        for step in range(4):
            advance(plan.bytes_written // 8)
            for _ in range(500):
                if sum(log.counted[-1]) > step * plan.bytes_written // 8:
                    break
                time.sleep(0.01)

    log, plain = Phases(), Log()
    result = run(plan, tmp_path / "dst", RunOptions(verify=verify, begun=time.perf_counter() - 100), log)
    total = plan.bytes_written
    assert log.phases == [("write", total, 0), ("verify", total, 0)]
    assert [sum(c) for c in log.counted] == [total, total]
    assert len(log.counted[1]) >= 3
    assert 100 <= result.plan_seconds < 150
    assert 0.02 <= result.verify_seconds < result.seconds
    assert result.write_seconds + result.verify_seconds == pytest.approx(result.seconds)

    def start(total_bytes: int, files: int) -> None:
        del files
        plain.total = total_bytes

    monkeypatch.setattr(plain, "start", start)
    run(plan, tmp_path / "again", RunOptions(verify=verify), plain)
    assert plain.done == plain.total == total


def test_interrupted_while_verifying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that verifies is told with its next word, and ends before the run does."""
    plan = reshard(tmp_path / "src", [((512, 768), 0), ((768, 512), 1)], 4, 2)
    monkeypatch.setattr(engine, "TICK", 0.01)
    monkeypatch.setattr(workforce, "TICK", 0.01)
    ended: list[str] = []

    def verify(_partial: Place, advance: Advance) -> None:
        try:
            for _ in range(1000):
                advance(1)
                time.sleep(0.01)
                if len(ended) == 0 and threading.current_thread() is not threading.main_thread():
                    os.kill(os.getpid(), signal.SIGINT)
                    ended.append("asked")
        finally:
            ended.append("ended")

    with pytest.raises(KeyboardInterrupt):
        run(plan, tmp_path / "dst", RunOptions(verify=verify))
    assert ended == ["asked", "ended"]
    assert not (tmp_path / "dst").exists()
    run(plan, tmp_path / "dst", RunOptions(resume=True))


def test_a_run_that_goes_on_starts_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpttool.execute.schedule._MIB", 1 << 14)
    plan = reshard(tmp_path / "src", [((512, 768), 0), ((768, 512), 1)], 4, 2)
    real, calls = files.FilePool.write, itertools.count()

    def write(pool: files.FilePool, path: str, offset: int, data: memoryview, **how: bool) -> None:
        if next(calls) == 20:
            raise OutputError("the disk is gone")
        real(pool, path, offset, data, **how)

    with monkeypatch.context() as patched:
        patched.setattr(files.FilePool, "write", write)
        with pytest.raises(OutputError):
            run(plan, tmp_path / "dst", RunOptions(workers=1))
    log = Phases()
    result = run(plan, tmp_path / "dst", RunOptions(resume=True), log)
    assert result.bytes_skipped > 0
    assert log.phases == [("write", plan.bytes_written, result.bytes_skipped)]
    assert log.done == plan.bytes_written - result.bytes_skipped


def told(plan: Plan, done: Sequence[int] = ()) -> list[int]:
    """The bytes that are done, as a worker tells them while it works out the first unit of a plan, whose parts in
    ``done`` are written already. It tells as often as it can."""
    found: list[int] = []
    outputs = [f"/proc/self/nowhere/{o.name}" for o in plan.outputs]
    job = ComputeJob([s.path for s in plan.sources], outputs, None, 64 << 20, 1 << 20, ())
    computer = ComputeWorker(job, tensor_draws(None), files.FilePool(), threading.Event())
    task = computing_task(plan.units[0], 0, 0, job.limit, ())

    def tell(answer: Answer) -> None:
        if "at" in answer:
            found.append(answer["at"])

    with (
        patch.object(compute_worker, "_TELL_EVERY", 0),
        patch.object(compute, "scatter", lambda *_: None),
        patch.object(quantize, "scatter", lambda *_: None),
    ):
        computer.serve(order(plan.units[0], 0, task, done), tell)
    total = sum(p.nbytes for p in task.parts if p.number not in done)
    assert found == sorted(found)
    assert found[-1] == total
    return found


SLERP = {"method": "slerp", "parameters": ((),), "whole": (("t", 0.3),)}
TIES = {
    "method": "ties",
    "parameters": ((("density", 0.5), ("weight", 1.0)),),
    "whole": (("int8_mask", False), ("lambda", 1.0), ("normalize", True), ("rescale", True)),
}


@pytest.mark.parametrize(("method", "passes"), [(SLERP, 2), (TIES, 4)])
def test_every_pass_counts(tmp_path: Path, method: dict[str, Any], passes: int) -> None:
    """A tensor is a good part done before the first byte of it is written, and no step is a long one."""
    plan, _ = merge_plan(tmp_path / "src", rows=12_000)
    plan.units = [plan.units[0]._replace(steps=tuple(_based(s, method) for s in plan.units[0].steps))]
    with patch.object(compute, "CHUNK", 1800):
        found = told(plan)
    total = 12_000 * 6 * 2
    assert found[-1] == total
    assert len(found) >= passes * 40
    assert max(b - a for a, b in pairwise(found)) <= total / (passes * 40) + 1
    halfway = found[len(found) // 2] / total
    assert 0.45 < halfway < 0.55


def _based(step: Step, method: dict[str, Any]) -> Step:
    assert isinstance(step, Compute)
    return step._replace(models=step.models[:1], base=step.models[1], **method)


def test_parts_that_are_written_do_not_count(tmp_path: Path) -> None:
    plan, _ = merge_plan(tmp_path / "src", rows=12_000)
    with patch.object(compute, "CHUNK", 1800), patch.object(compute, "PART", 18_000):
        found = told(plan, done=(1, 3))
    assert found[-1] == 12_000 * 6 * 2 // 2
    assert max(b - a for a, b in pairwise(found)) <= found[-1] / 40 + 1


@pytest.mark.product(one_in=3)
@pytest.mark.parametrize("name", sorted(SCHEMES))
@pytest.mark.parametrize("panel", [1 << 10, 1 << 20])
def test_what_is_quantized_counts_panel_by_panel(tmp_path: Path, name: str, panel: int) -> None:
    """Whether blocks are read once or twice, and whether a factor needs a pass of its own."""
    shape = (256, 256)
    plan, _ = plain_plan(tmp_path / "src", SCHEMES[name], shape)
    with patch.object(quantize, "_LEAST", 1 << 10), patch.object(quantize, "_PANEL", panel):
        found = told(plan)
    largest = max(b - a for a, b in pairwise([0, *found]))
    assert largest <= found[-1] / 8 if panel < 1 << 20 else largest <= found[-1]


def test_methods_say_how_many_passes_they_take() -> None:
    """With their defaults and with all that adds passes, over a tensor that is large enough to be sampled."""
    rng = np.random.default_rng(3)
    models = [rng.standard_normal((300, 200)).astype(np.float32) for _ in range(3)]
    for name, method in METHODS.items():
        for more in ({}, {"rescale": True}, {"select_topk": 0.3}, {"nuslerp_flatten": False}, {"filter_wise": True}):
            if not more.keys() <= method.whole.keys():
                continue
            whole = {k: 0.5 if p.default is None else p.default for k, p in method.whole.items()} | more
            count = min(method.models[1] or 2, 2)
            each = {k: 0.7 if p.default is None else p.default for k, p in method.per_model.items()}
            each |= {"density": 0.5} if "density" in each else {}
            tensor = MergeTensor(
                "t", (300, 200), (each,) * count, whole, method.base == "needed", CounterDraws(1, "t"), None
            )
            flat = [m.reshape(-1) for m in models]
            passes = 0
            program = method.program(tensor)
            while True:
                try:
                    see = next(program)
                except StopIteration:
                    break
                passes += 1
                step = 200 * 50
                for at in range(0, 60_000, step):
                    see(ArrayChunk(at, at + step, flat[2] if tensor.has_base else None, flat[:count]))
            assert method.passes(whole, count) == passes, (name, more)


def test_every_source_byte_is_read_once(tmp_path: Path) -> None:
    plan = reshard(tmp_path / "src", [((512, 768), 0), ((768, 512), 1), ((96, 64, 32), 2)], 4, 2)
    result = run(plan, tmp_path / "dst")
    assert result.bytes_read == result.bytes_written == 2 * (2 * 512 * 768 + 96 * 64 * 32)


def test_what_several_outputs_read_stays_in_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that drops its pages behind would fetch them from the disk once per output."""
    found = source(tmp_path / "src/s", pattern(1 << 20))
    half = 1 << 19
    copies = [Copy(Block(0, 0, (1,)), Block(f, 0, (1,)), (half,), "U8", "U8") for f in (0, 1)]
    copies.append(Copy(Block(0, half, (1,)), Block(2, 0, (1,)), (half,), "U8", "U8"))
    plan = Plan([found], [Output(f"d{f}", half) for f in range(3)], [Unit("t", tuple(copies))])
    reads: Counter[tuple[int, bool]] = Counter()
    read = files.FilePool.read

    def counted(pool: files.FilePool, path: str, offset: int, buffers: list[memoryview], *, once: bool = True) -> None:
        reads[offset, once] += 1
        read(pool, path, offset, buffers, once=once)

    monkeypatch.setattr(files.FilePool, "read", counted)
    run(plan, tmp_path / "dst")
    assert all(not once for offset, once in reads if offset < half)
    assert (0, False) in reads


def test_notes_of_the_end_are_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last step has something to say: here, that an old destination could not go."""
    plan = reshard(tmp_path / "src", [((8, 8), 0)], 1, 1)
    (tmp_path / "dst").mkdir()
    (tmp_path / "dst/old").write_text("old")

    def fails(path: Path) -> None:
        raise OSError(13, "Permission denied", str(path))

    class Told(NoProgress):
        def note(self, text: str) -> None:
            heard.append(text)

    heard: list[str] = []
    monkeypatch.setattr(local, "remove", fails)
    result = run(plan, tmp_path / "dst", RunOptions(force=True), Told())
    assert heard == result.notes
    assert "could not be removed completely" in heard[0]
