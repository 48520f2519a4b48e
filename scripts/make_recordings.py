"""Record terminal sessions as SVG for README.md and docs/: python scripts/make_recordings.py

    terminal-NAME.svg in docs/images/    one for each of SESSIONS

The commands run in a pseudoterminal, so what is shown is what a person sees, colours included. A picture has the
commands with what they print, needs no script, and follows the reader's light or dark mode.
tests/docs/test_recordings.py fails when a command prints something else now.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
COLUMNS, ROWS = 80, 50

SESSIONS: dict[str, tuple[str, ...]] = {
    "reshard": (
        "ckpttool reshard llama_tp8 llama_tp2 --tp-out 2 --verify",
        "ckpttool inspect llama_tp8 --diff llama_tp2 --values",
    ),
    "inspect": (
        "ckpttool inspect llama_tp8",
        "ckpttool inspect llama_tp8 --ranks --filter '*.0.mlp.down_proj.*'",
    ),
    "merge": (
        "ckpttool merge ft1 ft2 --base base --method ties --weights 0.6,0.4 --to vllm --tp-out 2 -o merged --verify",
    ),
    "error": (
        "ckpttool reshard llama_tp8 llama_tp3 --tp-out 3",
    ),
}  # fmt: skip
INPUTS = {
    "llama_tp8": "fixtures/llama_tp8",
    **{name: f"fixtures/merge/inputs/{name}" for name in ("ft1", "ft2", "base")},
}
"""What the sessions find in their folder."""

SIZE, LINE, EDGE = 13, 18, 16
ADVANCE = 7.93
"""Pixels of a letter of the widest usual font; the others leave room at the right."""
LOOKS = {
    "light": {"ground": "#f6f8fa", "ink": "#1f2933", "faint": "#57606a",
              "31": "#b42318", "32": "#1a7031", "33": "#805400", "36": "#0b6478"},
    "dark": {"ground": "#0d1117", "ink": "#e6edf3", "faint": "#9aa7b4",
             "31": "#ff8a80", "32": "#6fdd8b", "33": "#f2cc60", "36": "#76d9f0"},
}  # fmt: skip
"""Of SGR's colours, those that ckpttool writes."""
BAR = "\u2501"
"""In a line of progress, which only a run that takes longer shows."""
_CONTROL = re.compile(r"\x1b\[(?P<numbers>[0-9;]*)(?P<kind>[mKA])|\x1b\[\?25[lh]|(?P<letter>[^\x00-\x1f\x7f])|.|\n")
TIMES = re.compile(r"; planned in [\d.]+ s, written in [\d.]+ s(?: at [\d.]+ \w+/s)?(?:, verified in [\d.]+ s)?")
"""What only runs of more than a second say."""

Run = Callable[[Sequence[str], str, Mapping[str, str], int], None]
"""Runs ckpttool with arguments, folder, environment and a file descriptor of a terminal."""


class Span(NamedTuple):
    """Letters of one colour."""

    text: str
    look: str
    """A number of SGR; "" for the usual colour."""


def in_process(arguments: Sequence[str], folder: str, environment: Mapping[str, str], terminal: int) -> None:
    """As a process of its own."""
    command = [sys.executable, "-m", "ckpttool", *arguments]
    streams = {"stdin": terminal, "stdout": terminal, "stderr": terminal}
    subprocess.run(command, cwd=folder, env=dict(environment), check=False, **streams)  # type: ignore[call-overload]


def printed(command: str, folder: str, run: Run) -> str:
    """What a command prints on a terminal."""
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")}
    environment |= {"TERM": "xterm-256color", "PYTHONPATH": str(ROOT), "LC_ALL": "C.UTF-8"}
    here, there = pty.openpty()
    fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    found: list[bytes] = []

    def listen() -> None:
        while True:
            try:
                piece = os.read(here, 65536)
            except OSError:  # the other end is closed
                return
            found.append(piece)

    listener = threading.Thread(target=listen)
    listener.start()
    try:
        run(shlex.split(command)[1:], folder, environment, there)
    finally:
        os.close(there)
        listener.join()
        os.close(here)
    return b"".join(found).decode()


def screen(text: str) -> list[list[Span]]:
    """The lines that are left of an output, by colour: a bar that was drawn in between has gone.

    Raises ValueError for what it does not know: a picture of it would be wrong.
    """
    lines: list[list[tuple[str, str]]] = [[]]
    row = column = 0
    look = ""
    for m in _CONTROL.finditer(text):
        if m["letter"]:
            lines[row][column:] = [*lines[row][column:column], (m[0], look), *lines[row][column + 1 :]]
            column += 1
        elif m[0] == "\r":
            column = 0
        elif m[0] == "\n":
            row, column = row + 1, 0
            lines += [[]] * (row == len(lines))
        elif m["kind"] == "m":
            look = next((n for n in m["numbers"].split(";") if n in LOOKS["light"]), "")
        elif m["kind"] == "K":
            lines[row] = [] if m["numbers"] == "2" else lines[row][:column]
        elif m["kind"] == "A":
            row = max(row - int(m["numbers"] or 1), 0)
        elif m[0] not in ("\x1b[?25l", "\x1b[?25h"):
            message = f"not known: {m[0]!r}"
            raise ValueError(message)
    while lines and not lines[-1]:
        lines.pop()
    return [[Span("".join(c for c, _ in run), look) for look, run in groupby(line, itemgetter(1))] for line in lines]


def record(commands: Sequence[str], run: Run = in_process) -> list[tuple[str, list[list[Span]]]]:
    """Each command with the lines that it prints."""
    with tempfile.TemporaryDirectory() as folder:
        for name, source in INPUTS.items():
            shutil.copytree(ROOT / source, Path(folder, name))
        out = []
        for command in commands:
            lines = screen(printed(command, folder, run))
            out.append((command, [line for line in lines if not any(BAR in s.text for s in line)]))
    return out


def words(session: Sequence[tuple[str, list[list[Span]]]]) -> str:
    """All that is said, without times, and however its lines are folded."""
    said = []
    for command, lines in session:
        said += [f"$ {command}", *["".join([span.text for span in line]) for line in lines]]
    return TIMES.sub("", " ".join(" ".join(said).split()))


def quiet(session: Sequence[tuple[str, list[list[Span]]]]) -> bool:
    """Whether no command took so long that it says so."""
    return all("planned in" not in span.text for _, lines in session for line in lines for span in line)


def typed(command: str) -> list[str]:
    """The lines of a prompt with a command, broken between words as people do."""
    lines, words = ["$"], re.findall(r"'[^']*'|\S+", command)
    for word in words:
        if len(lines[-1]) + 1 + len(word) > COLUMNS - 2:
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] += f" {word}"
    return lines


def _tspans(line: Sequence[Span]) -> str:
    return "".join([f'<tspan class="c{s.look}">{escape(s.text)}</tspan>' if s.look else escape(s.text) for s in line])


def picture(session: Sequence[tuple[str, list[list[Span]]]]) -> str:
    """The session as an SVG document."""
    parts: list[str] = []
    y, width = EDGE + SIZE, round(COLUMNS * ADVANCE + 2 * EDGE)
    for command, output in session:
        for line in typed(command):
            prompt, rest = (line[:1], line[1:]) if line.startswith("$") else ("", line)
            head = f'<tspan class="f">{prompt}</tspan>' if prompt else ""
            parts.append(f'<text x="{EDGE}" y="{y}"><tspan class="b">{head}{escape(rest)}</tspan></text>')
            y += LINE
        for shown in output:
            if shown:
                parts.append(f'<text x="{EDGE}" y="{y}">{_tspans(shown)}</text>')
            y += LINE
        y += LINE // 2
    height = y - LINE + EDGE
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        f' role="img">\n<title>{escape("; ".join(command for command, _ in session))}</title>\n'
        f"<style>{_style()}</style>\n"
        f'<rect class="ground" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="6"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _style() -> str:
    def of(look: Mapping[str, str]) -> str:
        colours = "".join([f".c{n}{{fill:{look[n]};font-weight:bold}}" for n in look if n.isdigit()])
        ground = f".ground{{fill:{look['ground']};stroke:{look['faint']};stroke-opacity:.4}}"
        return f"text{{fill:{look['ink']}}}.f{{fill:{look['faint']}}}{colours}{ground}"

    font = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
    return (
        f"text{{font:{SIZE}px {font};white-space:pre}}.b{{font-weight:bold}}{of(LOOKS['light'])}"
        f"@media(prefers-color-scheme:dark){{{of(LOOKS['dark'])}}}"
    )


def file_of(name: str) -> Path:
    """Where the picture of a session is."""
    return IMAGES / f"terminal-{name}.svg"


def main() -> None:
    """Record all sessions."""
    IMAGES.mkdir(exist_ok=True)
    for name, commands in SESSIONS.items():
        sessions = (record(commands) for _ in range(10))
        found = next((s for s in sessions if quiet(s)), None)
        if found is None:
            sys.exit("error: the machine is busy, and the commands say how long they took; try again")
        content = picture(found)
        file_of(name).write_text(content, encoding="utf-8")
        print(file_of(name).relative_to(ROOT), f"{len(content.encode()):,} bytes")


if __name__ == "__main__":
    main()
