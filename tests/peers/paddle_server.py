"""Does jobs of one module: ``python -m tests.peers.paddle_server MODULE``, in ``.venv-paddle``.

Paddle and its trainers take seconds to import, which happens once: every rank of every job is a fork of this process.
A job is a line of JSON, ``{"argument": ..., "ranks": [{"log": FILE, "environment": {...}}, ...]}``; the answer is a
line with the ranks' exit codes. A rank runs ``MODULE.main()`` in the folder of the argument.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def forked(main: Callable[[], None], argument: str, rank: Mapping[str, Any]) -> int:
    """Start a rank."""
    child = os.fork()
    if child:
        return child
    log = os.open(rank["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(rank["environment"])
    os.chdir(Path(argument).parent)
    sys.argv = [sys.argv[0], argument]
    code = 1
    try:
        main()
        code = 0
    except BaseException:  # noqa: BLE001 - whatever it is, the test that asked shows it
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def ended(ranks: list[int]) -> list[int]:
    """The exit codes. Where one fails the others may wait for it, and are killed."""
    codes: dict[int, int] = {}
    while len(codes) < len(ranks):
        child, status = os.wait()
        codes[child] = os.waitstatus_to_exitcode(status)
        if codes[child]:
            for other in set(ranks) - codes.keys():
                os.kill(other, signal.SIGKILL)
    return [codes[child] for child in ranks]


def main() -> None:
    """Serve until the end of stdin."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries talk while they are imported
    run = importlib.import_module(sys.argv[1]).main
    for line in sys.stdin:
        job = json.loads(line)
        sys.stdout.flush()
        codes = ended([forked(run, job["argument"], rank) for rank in job["ranks"]])
        print(json.dumps(codes), file=answers, flush=True)


if __name__ == "__main__":
    main()
