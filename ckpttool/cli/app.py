"""The command line itself: its commands, and how each of them ends."""

from __future__ import annotations

import atexit
import errno
import gc
import os
import sys
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup
from typer.main import get_command

from ckpttool.cli.failure import failed
from ckpttool.cli.help import ALIASES, TASKS, Command, in_order
from ckpttool.cli.mistakes import reworded
from ckpttool.cli.process import flush, interrupts, say, silence
from ckpttool.errors import CkptError, UsageError, plain, unprinted
from ckpttool.report import status
from ckpttool.storage import access
from ckpttool.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


_OF_THE_PATH = (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.ENOTDIR)
"""What is wrong with a path as it was given, or with the directories on the way."""


_COMMANDS = {
    "reshard": ("reshard.reshard", "Change a checkpoint's parallelism, format or names."),
    "merge": ("merge.merge", "Merge several models into one, or the shards of one."),
    "convert-json": ("convert_json.convert_json", "Convert or check Paddle programs."),
    "quantize": ("quantize.quantize", "Quantize to FP8, MXFP4, NVFP4; dequantize."),
    "size": ("size.size", "Estimate disk and GPU memory; does it fit?"),
    "inspect": ("inspect.inspect", "Show what is inside a checkpoint."),
    "diff": ("diff.diff", "Compare two checkpoints."),
    "check": ("check.check", "Look for problems in a checkpoint."),
    "drop-keys": ("drop_keys.drop_keys", "Write a checkpoint without some of its tensors."),
    "doctor": ("doctor.doctor", "Show what works here, and what is missing."),
    "explain": ("explain.explain", "Explain an error, or a finding of a check."),
    "help": ("manual.help_", "Show all options of a command."),
}
"""The function below this package that is the command, and what it does; in the order of ``--help``."""


class _LoadedCommands(Mapping[str, Any]):
    """The commands by name, each imported and made when it is asked for: all of them take 70 ms, and one is run."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            where, about = _COMMANDS[name]
            module, _, function = where.partition(".")
            single = typer.Typer(add_completion=False, rich_markup_mode=None)
            run = getattr(import_module(f"ckpttool.cli.{module}"), function)
            single.command(name, cls=Command, short_help=about)(run)
            self._made[name] = get_command(single)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_COMMANDS)

    def __len__(self) -> int:
        return len(_COMMANDS)


class _Commands(TyperGroup):
    """Ends every command alike: an expected failure is one clear error and an exit code, never a traceback."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.commands: Any = _LoadedCommands()

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        word, *rest = args
        return super().resolve_command(ctx, [*ALIASES.get(word, word).split(), *rest])

    def get_help_option_names(self, ctx: Any) -> list[str]:
        return in_order(super().get_help_option_names(ctx))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, _COMMANDS))
        for task, names in TASKS:
            with formatter.section(task):
                formatter.write_dl([(f"{n:{width}}", _COMMANDS[n][1]) for n in names])
        with formatter.section("More"):
            formatter.write_text("ckpttool help COMMAND shows examples and options of a command.")

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
            raise failed(e) from None

    def invoke(self, ctx: Any) -> Any:
        interrupts.allow()
        access.on_wait = _waits
        if interrupts.answers_timer and status.start():
            interrupts.tick = status.tick
        try:
            try:
                with reworded():
                    result = super().invoke(ctx)
            except BaseException as e:  # how the command ends is more than whether all of its output is read
                unread = flush(sys.stdout)
                if unread is not None and isinstance(e, typer.Exit):
                    raise typer.Exit(_unprinted(unread, e.exit_code)) from None
                raise
            sys.stdout.flush()
        except CkptError as e:
            raise failed(e) from None
        except KeyboardInterrupt as e:
            interrupts.ignore()  # it is being answered
            said = str(e) or "interrupted"  # says how to continue when something was finished
            raise failed(CkptError(said), kind="interrupted", code=130, text=said) from None
        except MemoryError:
            error = CkptError("there is not enough memory", hint="a smaller --memory leaves more for the plan")
            raise failed(error, kind="memory") from None
        except OSError as e:
            if e.filename is not None and e.errno in _OF_THE_PATH:
                path = plain(os.fsdecode(e.filename))
                error = CkptError(str(e.strerror), where=path if len(path) < 1000 else path[:1000] + "...")
                raise failed(error, kind="path") from None
            if e.filename is not None:  # of a file: whoever opened it should have said so
                raise
            if e.errno == errno.ENOENT:
                gone = CkptError("the current directory is not there any more", hint="cd to another one")
                raise failed(gone, kind="path") from None
            raise typer.Exit(_unprinted(e)) from None
        finally:
            interrupts.ignore()
            status.stop()
        return result


def _waits(why: str) -> None:
    """Say why a request waits."""
    status.clear()
    say(f"note: {plain(why)}")


def _unprinted(e: OSError, code: int = 0) -> int:
    """Say that stdout cannot be written. Returns the exit code of a command that would have ended with ``code``."""
    silence(sys.stdout)
    why = unprinted(e)
    if why:
        say(f"error: {why}")
    return code or bool(why)


app = typer.Typer(
    name="ckpttool",
    cls=_Commands,
    help="Reshard, merge and inspect checkpoints of large models, on one machine or many, in bounded memory.",
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
    """Reshard, merge and inspect checkpoints of large models, on one machine or many, in bounded memory."""


@cache
def _command() -> Callable[[], object]:
    """The commands: once for a process that runs many."""
    return get_command(app)


def main() -> NoReturn:
    """Run the command line."""
    # A plan is a million small objects without a cycle; collecting them costs a third of planning and frees nothing.
    # Nor is there anything to gain from a last look at all of them when the process ends.
    gc.disable()
    atexit.register(gc.freeze)
    # Work is shared out to processes; threads of a library below them would only get in each other's way.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        _command()()
    except OSError as e:  # --help and --version are no command
        if e.filename is not None:
            raise
        sys.exit(_unprinted(e))
    except SystemExit as e:
        if isinstance(e.__context__, BrokenPipeError):  # Typer's answer to it, where --help has no reader
            sys.exit(0)
        raise
    sys.exit(0)
