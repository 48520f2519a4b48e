"""The line of a terminal while a command has nothing to show yet."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckpttool.core.activity import Activity, activity
from ckpttool.report import status
from tests.helpers.command import Terminal, ckpttool

ROOT = Path(__file__).parents[2]
SLOW = """
import contextlib, io, sys, time
import ckpttool.cli, ckpttool.cli.app
from ckpttool.storage import place
from ckpttool.containers import safetensors
quick = place.open_file
def slow(*arguments, **named):
    time.sleep(0.1)
    return quick(*arguments, **named)
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    ckpttool.cli.app.main()
safetensors.open_file = slow
print("ready", flush=True)
sys.stdin.readline()
ckpttool.cli.main()
"""
"""``ckpttool`` on a storage that takes 0.1 s for each file, once it is loaded."""


def session(*arguments: str, **environment: str) -> list[tuple[float, str]]:
    """What a terminal gets, with the seconds since the command began."""
    here, there = pty.openpty()
    env = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=there,
        cwd=ROOT,
        env={**env, "TERM": "xterm", "PYTHONPATH": str(ROOT), **environment},
    )
    os.close(there)
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == b"ready\n"
    begun = time.monotonic()
    process.stdin.write(b"\n")
    process.stdin.flush()
    found = []
    while True:
        try:
            piece = os.read(here, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        found.append((time.monotonic() - begun, piece.decode()))
    os.close(here)
    with process:
        out = process.stdout.read().decode()
    assert out.startswith("Llama"), "stdout has the answer alone"
    assert "\x1b" not in out
    return found


def test_the_timer_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its signal may come while a module is imported, and an import within an import fails."""
    drawn: list[bytes] = []

    def refuse(name: str, *_: object) -> None:
        raise AssertionError(f"imports {name}")

    line = status._StatusLine()
    line.on = True
    activity.begin("starting")
    monkeypatch.setattr("os.get_terminal_size", lambda _: os.terminal_size((80, 24)))
    monkeypatch.setattr("os.write", lambda _, piece: drawn.append(piece))
    with monkeypatch.context() as patch:
        patch.setattr("builtins.__import__", refuse)
        line.tick()
    activity.begin("")
    assert drawn[0].startswith(b"\r\x1b[Kstarting ... ")


def test_a_slow_storage_has_a_line_within_a_moment_that_goes() -> None:
    found = session("inspect", "fixtures/llama_tp8")
    when, first = found[0]
    assert re.search(r"reading headers: \d of 8 \.\.\. \d s", first), first
    assert when < 0.6, "0.3 s, and as much for a busy machine"
    whole = "".join(text for _, text in found)
    assert len(re.findall(r"reading headers: (\d)", whole)) > 3
    assert whole.endswith("\r\x1b[K"), "it is erased"
    assert "\n" not in whole


@pytest.mark.thorough
@pytest.mark.parametrize(("arguments", "environment"), [(["-q"], {}), ([], {"TERM": "dumb"})])
def test_nobody_asked_for_it(arguments: list[str], environment: dict[str, str]) -> None:
    assert session("inspect", "fixtures/llama_tp8", *arguments, **environment) == []


def test_nothing_starts_in_a_pipe_or_without_a_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert not status.start()
    done = ckpttool("inspect", ROOT / "fixtures/llama_tp8", terminal=True)  # in a process whose signals are not ours
    assert done.code == 0
    assert "reading" not in done.out


def test_what_is_printed_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[bytes] = []
    monkeypatch.setattr(os, "write", lambda _, data: drawn.append(data))
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((30, 24)))
    monkeypatch.setattr(signal, "setitimer", lambda *_: None)
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(status, "AFTER_S", 0)
    assert status.start()
    status.tick()
    activity.begin("a long phrase that is longer than a line", 7)
    status.tick()
    status.clear()
    status.clear()
    status.stop()
    status.tick()
    assert drawn == [b"\r\x1b[Kstarting ... 0 s", b"\r\x1b[Ka long phrase that is longer th"[:33], b"\r\x1b[K"]


def test_the_timer_imports_nothing_and_never_draws_before_what_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may interrupt an import, which leaves half a module, and ``clear`` at any place."""
    drawn: list[bytes] = []

    def write(_: int, data: bytes) -> None:
        drawn.append(data)
        if data == b"\r\x1b[K":  # the timer, while this was written
            status.tick()

    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((30, 24)))
    monkeypatch.setattr(signal, "setitimer", lambda *_: None)
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(status, "AFTER_S", 0.05)
    assert status.start()
    time.sleep(0.06)
    monkeypatch.setitem(sys.modules, "ckpttool.report.style", None)  # as a module of which nothing is there yet
    status.tick()
    status.clear()
    status.stop()
    assert [len(drawn), drawn[-1]] == [2, b"\r\x1b[K"]


def test_what_goes_on() -> None:
    now = Activity()
    now.begin("reading headers", 1200)
    now.done += 3
    assert str(now) == "reading headers: 3 of 1,200"
    now.begin("planning")
    assert str(now) == "planning"
