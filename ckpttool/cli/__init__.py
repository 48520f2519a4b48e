"""The command line: options and help only. Heavy imports happen inside the commands, so that --help is instant.

    process.py    the process: its streams, Ctrl-C at any moment
    app.py        the commands in the order of --help, how each ends
    help.py       what --help shows
    mistakes.py   errors of a command line that cannot be read
    failure.py    how a command ends that fails
    choices.py    values of options that have a fixed set, for help and completion
    options.py    options that several commands have
    values.py     what options say, in the types that ops take
    reshard.py    one file per command: the options that it alone has, and what it calls
    merge.py
    drop_keys.py
    convert_json.py
    quantize.py
    size.py
    views.py      what inspect, diff and check share: options and answers of the views of ops.inspect
    inspect.py
    diff.py
    check.py
    manual.py     ckpttool help

A command is a function in a file of its own, and a line of app.py. In its signature ``options.`` marks what others have
too; a name without it is the command's own. No command imports another.
"""

from __future__ import annotations

import sys
from typing import NoReturn

from ckpttool.cli import process


def main() -> NoReturn:
    """Run the command line. What the console script and ``python -m ckpttool`` call."""
    process.open_streams()
    process.interrupts.install()
    code: int | str | None = 1
    try:
        from ckpttool.cli.app import main as run

        run()
    except SystemExit as e:
        code = e.code
    except KeyboardInterrupt:  # outside of the command itself
        process.say("interrupted")
        code = 130
    process.interrupts.ignore()
    process.flush(sys.stdout)
    process.flush(sys.stderr)
    sys.exit(code)
