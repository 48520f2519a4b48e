"""``ckpttool convert-json``: a Paddle program and its parameters to safetensors, back, and checked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from ckpttool.cli import options
from ckpttool.cli.options import argument, bytes_of, flag, value
from ckpttool.cli.process import reader_may_leave
from ckpttool.cli.values import local, place
from ckpttool.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from ckpttool.core.files import Place

_MEMORY = "64MiB"


@dataclass
class ConvertFlags(options.RunFlags, options.AccessFlags):
    """How a run goes."""

    memory: Annotated[str, value("--memory", "SIZE", f"Memory for all buffers; default: {_MEMORY}.")] = ""


@options.grouped
def convert_json(
    *,
    src: Annotated[
        str,
        argument("SRC", "A program (.json, .pdmodel), or safetensors for --program."),
    ],
    dst: Annotated[str | None, argument("DST", "FILE.safetensors, or a directory to create.")] = None,
    params: Annotated[str | None, value("--params", "FILE", "Its parameters; default: the file beside it.")] = None,
    names: Annotated[str | None, value("--names", "FILE", "Structured names: .pdparams or .pdiparams.info.")] = None,
    program: Annotated[str | None, value("--program", "FILE", "Write SRC as the parameters of this program.")] = None,
    max_shard_size: Annotated[
        str, value("--max-shard-size", "SIZE", "Largest file, if DST is a directory; default: 5GB.")
    ] = "",
    check: Annotated[bool, flag("--check", "Look for errors; exit 3 if there is one.")] = False,
    fix: Annotated[
        str | None,
        value("--fix", "OUT.json", "Write the program with NaN as Paddle reads it; check it."),
    ] = None,
    flags: Annotated[ConvertFlags, options.without("verify", "manifest", "create_pr")],
    shown: options.OutputFlags,
) -> None:
    """Convert a Paddle program and its parameters to safetensors and back, or check them."""
    if program is not None and (fix is not None or check):
        raise UsageError("--check and --program are different tasks", hint="run one at a time")
    unused: dict[str, object] = {
        "max_shard_size": max_shard_size,
        "resume": flags.resume,
        "workers": flags.workers,
        "memory": flags.memory,
        "on": flags.on,
        "part": flags.shares,
    }
    from ckpttool.storage.place import parse_place

    source = parse_place(src)
    if check or fix is not None:
        _without(dst, "--check", dry_run=flags.dry_run, **unused)
        if fix is None:
            _without(None, "--check without --fix", force=flags.force)
        _check(source, place(params), place(names), local(fix), flags, shown)
    else:
        if dst is None:
            raise UsageError("there is no DST", hint="ckpttool convert-json SRC DST, or --check")
        from ckpttool.ops.convert_json.convert import execute, from_safetensors, to_safetensors
        from ckpttool.report import convert_json as report
        from ckpttool.report.render import show

        if names_ := flags.pipeline_parts():
            raise UsageError(f"--part {names_[0]}: a program has no parts", hint="--part 3/8, or auto")
        run = replace(flags, memory=flags.memory or _MEMORY).options()
        target, own, size = parse_place(dst), place(names), bytes_of(max_shard_size)
        if program is not None:
            _without(None, "--program", params=params, max_shard_size=max_shard_size)
            conversion = from_safetensors(source, target, parse_place(program), names=own)
        else:
            conversion = to_safetensors(source, target, params=place(params), names=own, max_shard_size=size)
        if flags.dry_run:
            show(report.plan_document(conversion, target), as_json=shown.json, quiet=shown.quiet)
            return
        result = execute(conversion, target, run, shown.progress(flags))
        show(report.document(result), as_json=shown.json, quiet=shown.quiet)


def _without(dst: str | None, task: str, **others: object) -> None:
    """Raises UsageError for what a task makes no use of."""
    if dst is not None:
        raise UsageError(f"{task} takes no DST", where=dst)
    for name, given in others.items():
        if given:
            raise UsageError(f"--{name.replace('_', '-')} has no effect with {task}")


def _check(
    src: Place,
    params: Place | None,
    names: Place | None,
    fix: Path | None,
    flags: ConvertFlags,
    shown: options.OutputFlags,
) -> None:
    from ckpttool.formats.paddle import parameter_file, program_of
    from ckpttool.ops.convert_json.check import check_program, repair
    from ckpttool.report import convert_json as report
    from ckpttool.report.render import show

    repaired = repair(src, fix, force=flags.force, apart=(params, names)) if fix is not None else None
    result = check_program(fix or src, params or parameter_file(program_of(src)), names)
    with reader_may_leave():
        show(report.check_document(result, repaired), as_json=shown.json, quiet=shown.quiet)
    if not result.ok:
        raise typer.Exit(3)
