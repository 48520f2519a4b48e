"""Progress: silent, a line every ten seconds, or a bar that is drawn at most ten times a second."""

from __future__ import annotations

import errno
import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from ckpttool.execute import NoProgress
from ckpttool.report import bars as module
from ckpttool.report.bars import ProgressLines, TerminalBar, progress
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
    assert isinstance(progress(quiet=False), TerminalBar)
    assert isinstance(progress(quiet=True), NoProgress)
    assert isinstance(progress(quiet=False, label="part 3 of 8"), ProgressLines)
    monkeypatch.setattr(sys, "stderr", Terminal(tty=False))
    assert isinstance(progress(quiet=False), ProgressLines)


class Clock:
    """Time that passes when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)


def test_a_line_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """With percent, rate and the time that is left; none for what takes less, and none for each file."""
    terminal, clock = Terminal(tty=False), Clock(monkeypatch)
    monkeypatch.setattr(sys, "stderr", terminal)
    lines = ProgressLines()
    lines.start(4_000_000_000, 2)
    lines.phase("write", 4_000_000_000, 0)
    for _ in range(200):
        clock.now += 0.125
        lines.advance(12_500_000)
        lines.file_done("a.safetensors", 1000)
    lines.note("something\nodd")
    lines.phase("verify", 4_000_000_000, 0)
    for _ in range(56):
        clock.now += 0.125
        lines.advance(50_000_000)
    lines.finish()
    assert terminal.written.splitlines() == [
        "write 25%, 1.00 GB of 4.00 GB, 100.00 MB/s, 0:30 left",
        "write 50%, 2.00 GB of 4.00 GB, 100.00 MB/s, 0:20 left",
        "note: something\\nodd",
        "verify 50%, 2.00 GB of 4.00 GB, 400.00 MB/s, 0:05 left",
    ]


def test_a_run_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts at the percent that is done, and the rate counts only what this run did."""
    terminal, clock = Terminal(tty=False), Clock(monkeypatch)
    monkeypatch.setattr(sys, "stderr", terminal)
    for label in ("", "part 3 of 8"):
        terminal.written = ""
        lines = ProgressLines(label)
        lines.start(10_000_000_000, 1)
        lines.phase("write", 10_000_000_000, 8_000_000_000)
        clock.now += 10.5
        lines.advance(105_000_000)
        assert terminal.written.removeprefix(f"{label}: ") == "write 81%, 8.11 GB of 10.00 GB, 10.00 MB/s, 3:10 left\n"
        assert terminal.written.startswith(label)


def test_the_rate_is_smoothed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that stands still for a moment changes the estimate a little; a new pace shows after half a minute."""
    terminal, clock = Terminal(tty=False), Clock(monkeypatch)
    monkeypatch.setattr(sys, "stderr", terminal)
    lines = ProgressLines()
    lines.phase("write", 10_000, 0)
    rates = []
    for pace in [100] * 4 + [0, 200] + [20] * 4:
        clock.now += 10
        lines.advance(pace * 10)
        rates.append(int(terminal.written.splitlines()[-1].split(", ")[2].split()[0]))
    assert rates[:4] == [100] * 4
    assert 20 < rates[4] < 60
    assert 20 < rates[-1] < 30


def test_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, clock = Terminal(tty=False), Clock(monkeypatch)
    monkeypatch.setattr(sys, "stderr", terminal)
    lines = ProgressLines()
    lines.start(0, 0)
    clock.now += 11
    lines.advance(0)
    assert terminal.written == "read 100%, 0 bytes of 0 bytes, 0 bytes/s\n"


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.4, "0:00"), (9, "0:09"), (59.6, "1:00"), (754, "12:34"), (3723, "1:02:03")]
)
def test_clock(seconds: float, said: str) -> None:
    assert module.clock(seconds) == said


def test_the_bar_is_drawn_ten_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.progress import Progress

    drawn = []
    clock = Clock(monkeypatch)
    monkeypatch.setattr(Progress, "refresh", lambda self: drawn.append((clock.now, self.tasks[0].completed)))
    monkeypatch.setattr(sys, "stderr", Terminal(tty=True))
    bar = TerminalBar()
    bar.start(1000, 1)
    for _ in range(1000):
        clock.now += 0.01
        bar.advance(1)
    bar.finish()
    times = [t for t, _ in drawn]
    assert times[0] >= 100.3  # not for what is done at once
    assert 80 <= len(times) <= 100
    assert all(b - a > 0.09 for a, b in pairwise(times[1:-1]))  # the first and the last are rich's own
    assert drawn[-1][1] >= 980


@pytest.mark.parametrize("columns", [80, 200])
def test_the_bar_fits_a_line(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """Phase, percent, bytes, rate and time left in 80 columns; one line, whatever the phase."""
    terminal, clock = Terminal(tty=True), Clock(monkeypatch)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    bar = TerminalBar()
    bar.phase("write", 688_570_000_000, 100_000_000_000)
    clock.now += 2
    bar.advance(1_234_560_000)
    bar.phase("verify", 688_570_000_000, 0)
    clock.now += 2
    bar.advance(123_456_000_000)
    bar.finish()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.written)
    lines = [line.strip() for line in re.split(r"[\r\n]+", shown) if line.strip()]
    assert all(len(line) <= columns for line in lines)
    assert any(re.match(r"write +\S+ +14% 101.23 GB of 688.57 GB, 617.28 MB/s, 15:51 left$", line) for line in lines)
    assert any(re.match(r"verify +\S+ +17% 123.46 GB of 688.57 GB, 61.73 GB/s, 0:09 left$", line) for line in lines)


def test_the_bar_leaves_a_clean_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(tty=True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(module, "PATIENCE_S", 0)
    monkeypatch.setenv("TERM", "xterm")
    bar = TerminalBar()
    bar.start(1000, 1)
    bar.advance(500)
    bar.note("a [bold] note")
    bar.file_done("x", 1)
    bar.finish()
    bar.finish()
    assert "a [bold] note" in terminal.written
    assert "\x1b[?25l" in terminal.written  # the cursor goes
    assert terminal.written.rindex("\x1b[?25h") > terminal.written.rindex("\x1b[?25l")  # and comes back


@pytest.mark.parametrize("when", ["drawing", "noting", "finishing"])
def test_a_terminal_that_goes_away_ends_the_bar_and_not_the_run(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    terminal = Terminal(tty=True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(module, "PATIENCE_S", 0)
    monkeypatch.setattr(module, "REFRESH_S", 0)
    monkeypatch.setenv("TERM", "xterm")
    tries = []

    def gone(text: str) -> int:
        tries.append(text)
        raise OSError(errno.EIO, "Input/output error")

    bar = TerminalBar()
    bar.start(1000, 1)
    bar.advance(100)
    assert terminal.written
    monkeypatch.setattr(terminal, "write", gone)
    if when == "drawing":
        bar.advance(100)
    if when == "noting":
        bar.note("lost")
    if when != "finishing":
        before = len(tries)
        bar.advance(800)
        assert len(tries) == before  # nothing is drawn from then on
    bar.finish()
    assert tries


def test_a_quick_run_shows_no_bar_and_loads_no_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = Terminal(tty=True)
    monkeypatch.setattr(sys, "stderr", terminal)
    bar = TerminalBar()
    bar.start(10, 1)
    bar.advance(10)
    bar.note("said")
    bar.finish()
    assert terminal.written == "note: said\n"


FIXTURE = Path(__file__).parents[2] / "fixtures" / "llama_tp8"


@pytest.mark.parametrize("command", ["reshard", "merge", "quantize", "drop-keys"])
def test_a_short_run_in_a_pipe_prints_no_progress(tmp_path: Path, command: str) -> None:
    source, inputs = FIXTURE.parent / "hf_tiny_source", FIXTURE.parent / "merge/inputs"
    arguments: dict[str, list[object]] = {
        "reshard": [source, tmp_path / "out"],
        "merge": [inputs / "ft1", inputs / "ft2", "-o", tmp_path / "out"],
        "quantize": [source, tmp_path / "out"],
        "drop-keys": [source, tmp_path / "out", "*.mlp.*"],
    }
    done = ckpttool(command, *arguments[command], *["--verify"] * (command != "drop-keys"))
    assert done.code == 0, done.err
    assert "%" not in done.err
    assert not [line for line in done.err.splitlines() if line.startswith("[")]


@pytest.mark.parametrize("option", ["-q", "--json"])
def test_no_lines_when_quiet_or_json(tmp_path: Path, option: str) -> None:
    done = ckpttool("reshard", FIXTURE, tmp_path / "out", "--tp-out", 2, option)
    assert (done.code, done.err) == (0, "")
