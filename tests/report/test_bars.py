"""Progress: silent, a line per file, or a bar that is drawn at most five times a second."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import pytest

from ckpttool.execute import NoProgress
from ckpttool.report import bars as module
from ckpttool.report.bars import Bar, Lines, progress
from tests.helpers.command import ckpttool


class Terminal:
    """A stderr that says whether it is a terminal, and remembers."""

    encoding = "utf-8"

    def __init__(self, *, tty: bool) -> None:
        self.tty = tty
        self.written = ""

    def isatty(self) -> bool:
        return self.tty

    def write(self, text: str) -> int:
        self.written += text
        return len(text)

    def flush(self) -> None:
        pass


def test_chooses_by_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal(tty=True))
    assert isinstance(progress(quiet=False), Bar)
    assert isinstance(progress(quiet=True), NoProgress)
    monkeypatch.setattr(sys, "stderr", Terminal(tty=False))
    assert isinstance(progress(quiet=False), Lines)


def test_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(tty=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    lines = Lines()
    lines.start(3000, 2)
    lines.advance(1000)
    lines.file_done("a.safetensors", 1000)
    lines.note("something\nodd")
    lines.file_done("b.safetensors", 2000)
    lines.finish()
    assert terminal.written == "[1/2] a.safetensors 1.00 kB\nnote: something\\nodd\n[2/2] b.safetensors 2.00 kB\n"


def test_the_bar_is_drawn_five_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.progress import Progress

    now = [100.0]
    drawn = []
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(Progress, "refresh", lambda self: drawn.append((now[0], self.tasks[0].completed)))
    monkeypatch.setattr(sys, "stderr", Terminal(tty=True))
    bar = Bar()
    bar.start(1000, 1)
    for _ in range(1000):
        now[0] += 0.01
        bar.advance(1)
    bar.finish()
    times = [t for t, _ in drawn]
    assert times[0] >= 100.5  # not for what is done at once
    assert 40 <= len(times) <= 52
    assert all(b - a > 0.19 for a, b in pairwise(times[1:-1]))  # the first and the last are rich's own
    assert drawn[-1][1] >= 980


def test_the_bar_leaves_a_clean_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(tty=True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(module, "PATIENCE_S", 0)
    monkeypatch.setenv("TERM", "xterm")
    bar = Bar()
    bar.start(1000, 1)
    bar.advance(500)
    bar.note("a [bold] note")
    bar.file_done("x", 1)
    bar.finish()
    bar.finish()
    assert "a [bold] note" in terminal.written
    assert "\x1b[?25l" in terminal.written  # the cursor goes
    assert terminal.written.rindex("\x1b[?25h") > terminal.written.rindex("\x1b[?25l")  # and comes back


def test_a_quick_run_shows_no_bar_and_loads_no_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = Terminal(tty=True)
    monkeypatch.setattr(sys, "stderr", terminal)
    bar = Bar()
    bar.start(10, 1)
    bar.advance(10)
    bar.note("said")
    bar.finish()
    assert terminal.written == "note: said\n"


FIXTURE = Path(__file__).parents[2] / "fixtures" / "llama_tp8"


def test_a_line_for_every_file_of_a_run(tmp_path: Path) -> None:
    done = ckpttool("reshard", FIXTURE, tmp_path / "out", "--tp-out", 2)
    files = sorted(p.name for p in (tmp_path / "out").iterdir())
    lines = [line for line in done.err.splitlines() if line.startswith("[")]
    assert sorted(line.split()[1] for line in lines) == files
    assert [line.split()[0] for line in lines] == [f"[{i + 1}/{len(files)}]" for i in range(len(files))]


@pytest.mark.parametrize("option", ["-q", "--json"])
def test_no_lines_when_quiet_or_json(tmp_path: Path, option: str) -> None:
    done = ckpttool("reshard", FIXTURE, tmp_path / "out", "--tp-out", 2, option)
    assert (done.code, done.err) == (0, "")
