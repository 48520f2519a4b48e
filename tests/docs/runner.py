"""Runs the examples of a Markdown page as a reader would, in one folder, and compares what they print.

A `console` block holds commands and what they print:

    $ ckpttool inspect fixtures/llama_tp8 \\
        --json
    {"tensors": 12, ...}
    $ ckpttool inspect nowhere
    error: ...
    [exit 1]

- A command starts with `$ `. A trailing backslash continues it on the next line; so does `> ` in front of the next
  line, for a here-document.
- A line that is just `...` stands for any lines, `...` inside a line for any text of that line. No output expected
  means that there must be none. stderr is merged into stdout.
- A trailing `[exit N]` says that the command must end with that status; otherwise it must be 0.

Each command is a bash of its own, started in the page's folder, which holds a copy of the fixtures that the page names.
A line that is nothing but a ckpttool command runs in this process, and the `ckpttool` that a bash finds on its PATH in
forks of a process that has it imported (forks.py), which is faster; limits of a shell do not reach there, so a line
that sets some has the console script on its PATH. A `python` block runs in one namespace per page, in the same folder
and in order with the commands; it must not raise.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

from tests.docs.forks import FIXED, forks
from tests.helpers.command import ckpttool

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]

# What the examples may name of the repository, each copied so that no example can change the original.
SHOWN = re.compile(r"\bfixtures/[\w.]+")

ELLIPSIS = "..."
COMMAND_TIMEOUT_S = 120

FENCE = re.compile(r"^(?P<indent> *)(?P<marks>`{3,}|~{3,})(?P<info>[^`]*)$")
EXIT_LINE = re.compile(r"^\[exit (?P<status>\d+)\]$")
QUOTED = re.compile(r"'[^']*'|\"[^\"$`\\]*\"")
SHELL = re.compile(r"[|&;<>()$`\\\"'*?\[\]{}~#!\n]")
"""What means something to a shell outside of quotes."""
SHELL_LANGUAGES = {"bash", "sh", "shell", "shell-session", "zsh"}


class PageError(Exception):
    """A page that cannot be run as it is written; says where."""


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    info: str
    """What follows the opening fence, as written."""
    line: int
    """Number of its first line inside the fence."""
    lines: tuple[str, ...]
    indent: int = 0
    """Columns in front of the fence, cut off from the lines."""

    @property
    def language(self) -> str:
        return self.info.split()[0].lower() if self.info.split() else ""


@dataclass(frozen=True, slots=True)
class Command:
    """One command of a console block, with what it is expected to print."""

    text: str
    line: int
    shown: tuple[str, ...]
    """The lines of the page that make up the command."""
    expected: tuple[str, ...]
    status: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What running a command gave."""

    output: tuple[str, ...]
    status: int


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page."""
    found: list[Block] = []
    opened: re.Match[str] | None = None
    start = 0
    lines: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        fence = FENCE.match(line)
        if opened is None:
            if fence:
                opened, start, lines = fence, number, []
        elif fence and fence["marks"].startswith(opened["marks"]) and not fence["info"].strip():
            indent = len(opened["indent"])
            content = tuple(line[min(indent, len(line) - len(line.lstrip(" "))) :] for line in lines)
            found.append(Block(opened["info"].strip(), start + 1, content, indent))
            opened = None
        else:
            lines.append(line)
    if opened is not None:
        message = f"line {start}: this block is never closed"
        raise PageError(message)
    return found


def commands(block: Block) -> list[Command]:
    """The commands of a console block."""
    found: list[Command] = []
    rest = list(enumerate(block.lines, block.line))
    while rest:
        line, first = rest.pop(0)
        if not first.startswith("$ "):
            message = f"line {line}: a console block starts with a command, `$ ...`"
            raise PageError(message)
        shown = [first]
        text = first[2:]
        while rest and (text.endswith("\\") or rest[0][1].startswith("> ") or rest[0][1] == ">"):
            shown.append(rest.pop(0)[1])
            text += "\n" + (shown[-1] if text.endswith("\\") else shown[-1][2:])
        expected: list[str] = []
        while rest and not rest[0][1].startswith("$ "):
            expected.append(rest.pop(0)[1].rstrip())
        status = 0
        expected = without_blank_end(expected)
        if expected and (exit_line := EXIT_LINE.match(expected[-1])):
            status = int(exit_line["status"])
            expected = without_blank_end(expected[:-1])
        found.append(Command(text, line, tuple(shown), tuple(expected), status))
    return found


def printed(text: str) -> tuple[str, ...]:
    """The lines of what a command prints."""
    return tuple(without_blank_end([line.rstrip() for line in text.splitlines()]))


def without_blank_end(lines: list[str]) -> list[str]:
    """The lines up to the last one that is not blank."""
    while lines and not lines[-1].strip():
        lines = lines[:-1]
    return lines


def problems(text: str) -> Iterator[str]:
    """What keeps the examples of a page from being checked: blocks that would not run."""
    for block in blocks(text):
        if block.language == "console":
            if block.info != "console":
                yield f"line {block.line}: every console block runs; `{block.info}` asks for something else"
            continue
        for number, line in enumerate(block.lines, block.line):
            in_shell = block.language in SHELL_LANGUAGES and re.search(r"(^|[\s;&|(])ckpttool\s", line)
            if in_shell or re.match(r"\$ ckpttool\b", line):
                yield f"line {number}: a ckpttool command in a `{block.language}` block never runs; use `console`"


def line_matches(expected: str, actual: str) -> bool:
    """Whether a line is the expected one, where `...` stands for any text."""
    pattern = ".*".join(re.escape(part) for part in expected.split(ELLIPSIS))
    return re.fullmatch(pattern, actual) is not None


def output_matches(expected: tuple[str, ...], actual: tuple[str, ...]) -> bool:
    """Whether lines are the expected ones, where a line `...` stands for any number of lines."""
    want = have = 0
    # Where to go on when a line differs: after the last `...`, with one more line given to it.
    star: tuple[int, int] | None = None
    while have < len(actual):
        if want < len(expected) and expected[want] == ELLIPSIS:
            want += 1
            star = (want, have)
        elif want < len(expected) and line_matches(expected[want], actual[have]):
            want += 1
            have += 1
        elif star:
            want, have = star[0], star[1] + 1
            star = (want, have)
        else:
            return False
    return all(line == ELLIPSIS for line in expected[want:])


def plain_arguments(text: str) -> list[str] | None:
    """The arguments of a line that is one ckpttool command and needs no shell to be understood; else None."""
    text = text.replace("\\\n", " ")
    if not text.startswith("ckpttool ") or SHELL.search(QUOTED.sub("", text)):
        return None
    return shlex.split(text)[1:]


class Session:
    """The folder and the Python namespace that the blocks of one page share."""

    def __init__(self, folder: Path, *, root: Path = ROOT) -> None:
        self.folder = folder
        self.namespace: dict[str, object] = {"__name__": "__page__"}
        self.root = root
        self.copied: set[str] = set()
        path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
        self.environment = {"PATH": path, "HOME": str(folder), "TERM": "dumb", **FIXED}

    def copy_shown(self, text: str) -> None:
        """Copy what an example names of the repository, unless an earlier one had it copied."""
        for name in set(SHOWN.findall(text)) - self.copied:
            self.copied.add(name)
            source, copy = self.root / name, self.folder / name
            copy.parent.mkdir(exist_ok=True)
            if source.exists():
                (shutil.copytree if source.is_dir() else shutil.copy)(source, copy)

    def run(self, command: Command) -> Outcome:
        """Run a command in the page's folder."""
        self.copy_shown(command.text)
        if (arguments := plain_arguments(command.text)) is not None:
            with contextlib.chdir(self.folder), patch.dict(os.environ, self.environment, clear=True):
                done = ckpttool(*arguments, merged=True)
            return Outcome(printed(done.out), done.code)
        environment = self.environment
        if "ulimit" not in command.text:
            environment = environment | {"PATH": f"{forks().bin}{os.pathsep}{environment['PATH']}"}
        run = subprocess.run(
            ["bash", "-c", command.text],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
        return Outcome(printed(run.stdout), run.returncode)

    def run_python(self, block: Block, page: str) -> None:
        """Run a Python block in the page's folder and namespace; what it prints is dropped."""
        # The blank lines make a traceback name the lines of the page.
        source = "\n" * (block.line - 1) + "\n".join(block.lines)
        self.copy_shown(source)
        with contextlib.chdir(self.folder), contextlib.redirect_stdout(io.StringIO()):
            exec(compile(source, page, "exec"), self.namespace)  # noqa: S102  # running the page is the point

    def check(self, text: str, page: str) -> Iterator[str]:
        """Run a page and say what differs from what it shows. An example in Python that raises ends it."""
        for block in blocks(text):
            if block.language == "python":
                self.run_python(block, page)
            elif block.language == "console":
                for command in commands(block):
                    yield from self.differences(command, page)

    def differences(self, command: Command, page: str) -> Iterator[str]:
        """Run one command and say what differs."""
        outcome = self.run(command)
        agrees = output_matches(command.expected, outcome.output)
        if agrees and outcome.status == command.status:
            return
        report = [f"{page}:{command.line}: $ {command.text}"]
        if outcome.status != command.status:
            report.append(f"exit status: expected {command.status}, got {outcome.status}")
        if not agrees:
            report += ["expected:", *indented(command.expected)]
        yield "\n".join([*report, "got:", *indented(outcome.output)])


def indented(lines: tuple[str, ...]) -> list[str]:
    """Lines set off from the text around them; says so where there are none."""
    return [textwrap.indent(line, "  ", lambda _: True) for line in lines] or ["  (nothing)"]


def updated(text: str, session: Session, page: str) -> str:
    """The page with the output of each command that differs replaced by what the command prints now.

    A command that still does what the page shows keeps its lines, so `...` survives where it still fits.
    """
    lines = text.splitlines()
    result: list[str] = []
    copied = 0
    for block in blocks(text):
        if block.language == "python":
            session.run_python(block, page)
        if block.language != "console":
            continue
        start = block.line - 1
        result += lines[copied:start]
        copied = start + len(block.lines)
        margin = " " * block.indent
        parsed = commands(block)
        ends = [command.line for command in parsed[1:]] + [block.line + len(block.lines)]
        for command, end in zip(parsed, ends, strict=True):
            outcome = session.run(command)
            if output_matches(command.expected, outcome.output) and outcome.status == command.status:
                result += lines[command.line - 1 : end - 1]
                continue
            status = [f"[exit {outcome.status}]"] if outcome.status else []
            result += [(margin + line).rstrip() for line in (*command.shown, *outcome.output, *status)]
    result += lines[copied:]
    return "\n".join(result) + "\n"


def pages(root: Path = ROOT) -> list[Path]:
    """The pages whose examples run."""
    return [path for path in (root / "README.md", *sorted((root / "docs").rglob("*.md"))) if path.exists()]
