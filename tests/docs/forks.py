"""Runs `ckpttool` commands in forks of one process that has imported it.

Starting Python and importing takes longer than most examples; a fork has both behind it. `python -m tests.docs.forks`
reads orders from stdin, one JSON list a line: arguments, folder, file for what is printed. It answers each with the
exit status.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Forks:
    """The process, started when it is first needed."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment
        self._process: subprocess.Popen[str] | None = None

    def run(self, arguments: list[str], folder: Path) -> tuple[str, int]:
        """What the command prints, and its exit status."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.docs.forks"],
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        printed = folder.with_name(f"{folder.name}.printed")
        process.stdin.write(json.dumps([arguments, str(folder), str(printed)]) + "\n")
        process.stdin.flush()
        status = int(process.stdout.readline())
        text = printed.read_text(encoding="utf-8")
        printed.unlink()
        return text, status

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.communicate()
            self._process = None


def _command(arguments: list[str], folder: str, printed: str) -> int:
    """In a fork: what the console script does."""
    from ckpttool.cli import main

    os.chdir(folder)
    out = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (out, 1), (out, 2)):
        os.dup2(source, target)
    sys.argv = ["ckpttool", *arguments]
    sys.modules["__main__"].__package__ = None  # or usage lines would say `python -m tests.docs.forks`
    status = 1
    try:
        main()
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:  # noqa: BLE001  # as the interpreter does
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def serve() -> None:
    """Answer orders until there are no more."""
    import ckpttool.ops.drop_keys
    import ckpttool.ops.fp8_cast
    import ckpttool.ops.fp8_size
    import ckpttool.ops.inspect.answer
    import ckpttool.ops.merge
    import ckpttool.report  # noqa: F401

    for order in sys.stdin:
        child = os.fork()
        if not child:
            os._exit(_command(*json.loads(order)))
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
