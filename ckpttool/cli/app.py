"""The command line itself: its commands, how each of them ends, and the process that runs one."""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import os
import sys
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TextIO

import typer
from typer.core import TyperGroup

from ckpttool import __version__
from ckpttool.cli.convert_json import convert_json
from ckpttool.cli.drop_keys import drop_keys
from ckpttool.cli.fp8_cast import fp8_cast
from ckpttool.cli.fp8_size import fp8_size
from ckpttool.cli.help import TASKS, Command
from ckpttool.cli.inspect import inspect
from ckpttool.cli.merge import merge
from ckpttool.cli.mistakes import reworded
from ckpttool.cli.reshard import reshard
from ckpttool.errors import CkptError, UsageError, plain

if TYPE_CHECKING:
    from collections.abc import Callable


_OF_THE_PATH = (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.ENOTDIR)
"""What is wrong with a path as it was given, or with the directories on the way."""


class _Commands(TyperGroup):
    """Ends every command alike: an expected failure is one clear error and an exit code, never a traceback."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, self.commands))
        for task, names in TASKS:
            with formatter.section(task):
                formatter.write_dl([(f"{n:{width}}", self.commands[n].get_short_help_str(60)) for n in names])
        with formatter.section("More"):
            formatter.write_text("ckpttool COMMAND --help shows examples and options of a command.")

    def format_options(self, ctx: Any, formatter: Any) -> None:
        self.format_commands(ctx, formatter)
        parameters: list[Any] = self.get_params(ctx)
        rows = [(", ".join(p.opts), p.help or "") for p in parameters]
        with formatter.section("Options"):
            formatter.write_dl(rows)

    def make_context(self, *args: Any, **extra: Any) -> Any:
        try:
            with reworded():
                words = list(args[1])  # of the command line, behind the program's name
                if "" in words[1:3] and not words[words.index("") - 1].startswith("-"):
                    raise UsageError("a path is empty", hint="is a variable of the shell not set?")
                return super().make_context(*args, **extra)
        except CkptError as e:
            sys.stderr.write(e.render() + "\n")
            raise typer.Exit(e.exit_code) from None

    def invoke(self, ctx: Any) -> Any:
        try:
            try:
                with reworded():
                    return super().invoke(ctx)
            finally:
                sys.stdout.flush()
        except CkptError as e:
            sys.stderr.write(e.render() + "\n")
            raise typer.Exit(e.exit_code) from None
        except KeyboardInterrupt as e:
            sys.stderr.write(f"{str(e) or 'interrupted'}\n")  # says how to go on when something was finished
            raise typer.Exit(130) from None
        except MemoryError:
            sys.stderr.write("error: there is not enough memory\n\nhint: a smaller --memory leaves more for the plan\n")
            raise typer.Exit(1) from None
        except BrokenPipeError:
            # The reader of our output is gone (`| head`); that is no failure. Keep Python from writing to it at exit.
            _silence(sys.stdout)
            raise typer.Exit(0) from None
        except OSError as e:
            if e.filename is not None and e.errno in _OF_THE_PATH:
                path = plain(os.fsdecode(e.filename))
                sys.stderr.write(f"error: {e.strerror}\n  --> {path if len(path) < 1000 else path[:1000] + '...'}\n")
                raise typer.Exit(1) from None
            if e.filename is not None:  # of a file: whoever opened it should have said so
                raise
            if e.errno == errno.ENOENT:
                sys.stderr.write("error: the current directory is not there any more\n\nhint: cd to another one\n")
                raise typer.Exit(1) from None
            _silence(sys.stdout)
            with contextlib.suppress(OSError):
                sys.stderr.write(f"error: what was to be printed cannot be written: {e.strerror}\n  --> stdout\n")
            raise typer.Exit(1) from None


def _silence(stream: TextIO) -> None:
    """What is left in a stream goes nowhere, and Python does not complain about that when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


app = typer.Typer(
    name="ckpttool",
    cls=_Commands,
    help="Reshard, merge and inspect checkpoints of large models, on a single machine, in bounded memory.",
    rich_markup_mode=None,  # rich costs more than the whole rest of --help
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"ckpttool {__version__}")
        raise typer.Exit


@app.callback()
def _app(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Reshard, merge and inspect checkpoints of large models, on a single machine, in bounded memory."""


# --help lists them in this order. Decorators would make it the order of imports.
app.command("reshard", cls=Command, short_help="Change a checkpoint's parallelism, format or names.")(reshard)
app.command("merge", cls=Command, short_help="Write one checkpoint out of several, or of shards.")(merge)
app.command("drop-keys", cls=Command, short_help="Write SRC without some of its tensors.")(drop_keys)
app.command("convert-json", cls=Command, short_help="Convert or check Paddle programs; indexes, headers.")(convert_json)
app.command("inspect", cls=Command, short_help="Show, check and compare what is inside SRC.")(inspect)
app.command("fp8-cast", cls=Command, short_help="Quantise to FP8, MXFP4, NVFP4; dequantise.")(fp8_cast)
app.command("fp8-size", cls=Command, short_help="Estimate disk and GPU memory; does it fit?")(fp8_size)


@cache
def _command() -> Callable[[], object]:
    """The commands with their options, which take 40 ms to make: once for a process that runs many."""
    from typer.main import get_command

    return get_command(app)


def main() -> NoReturn:
    """Run the command line."""
    # A plan is a million small objects without a cycle; collecting them costs a third of planning and frees nothing.
    # Nor is there anything to gain from a last look at all of them when the process ends.
    gc.disable()
    atexit.register(gc.freeze)
    # Work is shared out to processes; threads of a library below them would only get in each other's way.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    _command()()
    sys.exit(0)
