"""ckpttool, killed once: python -m tests.cluster.mortal NUMBER MARK COMMAND ... --part PART ...

The process that does part NUMBER is killed when it is about to record what it has finished, unless MARK is there. It is
made before, so it happens once, however often a launcher starts it again.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from ckpttool.cli.app import main
from ckpttool.execute.journal import Journal
from ckpttool.execute.parts.launchers import membership


def die_once(mark: Path) -> None:
    """Be killed at the next line of a journal, unless that was done before."""
    append = Journal.append

    def mortal(self: Journal, *given: Any, **more: Any) -> None:
        try:
            mark.touch(exist_ok=False)
        except FileExistsError:
            append(self, *given, **more)
        else:
            os.kill(os.getpid(), signal.SIGKILL)

    Journal.append = mortal  # type: ignore[method-assign]


if __name__ == "__main__":
    _, number, mark, *words = sys.argv
    if membership(words[words.index("--part") + 1], os.environ).member.number == int(number):
        die_once(Path(mark))
    sys.argv = ["ckpttool", *words]
    main()
