"""What a run tells while it works, and what it reads and writes for it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from ckpttool.execute import RunOptions, engine, files, run
from ckpttool.plan import Block, Copy, Output, Plan, Unit
from tests.execute.plans import pattern, reshard, source


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
    monkeypatch.setattr(engine, "_TICK", tick)
    log = Log()
    run(plan, tmp_path / "dst", RunOptions(memory=100_000), log)
    assert log.total == log.done == plan.bytes_written
    assert sorted(log.files) == sorted((o.name, o.size) for o in plan.outputs)
    assert log.ended
    assert tick == 0 or log.calls <= 1


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
