"""``ckpttool convert-json``: a Paddle program and its parameters to safetensors, back, and checked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ckpttool.cli import options
from ckpttool.cli.options import argument, bytes_of, flag, value
from ckpttool.errors import UsageError

_MEMORY = "64MiB"


@dataclass
class ConvertFlags(options.RunFlags):
    """How a run goes."""

    memory: Annotated[str, value("--memory", "SIZE", f"Memory for all buffers together; default: {_MEMORY}.")] = ""


def _file(name: str, metavar: str, about: str) -> Any:
    return value(name, metavar, about, readable=False)


@options.grouped
def convert_json(
    *,
    src: Annotated[
        Path,
        argument("SRC", "A program (.json, .pdmodel); with --program safetensors; what --index and --header work on."),
    ],
    dst: Annotated[Path | None, argument("DST", "FILE.safetensors, or a directory to create.")] = None,
    params: Annotated[
        Path | None, _file("--params", "FILE", "Parameters of the program, when they are not beside it.")
    ] = None,
    names: Annotated[
        Path | None, _file("--names", "FILE", "Structured names: .pdparams of the same run, or .pdiparams.info.")
    ] = None,
    program: Annotated[
        Path | None, _file("--program", "FILE", "The way back: write SRC as the parameters of this program.")
    ] = None,
    max_shard_size: Annotated[
        str, value("--max-shard-size", "SIZE", "Largest file, when DST is a directory; default: 5GB.")
    ] = "",
    check: Annotated[bool, flag("--check", "Find what is wrong; exit 3 when there is an error.")] = False,
    fix: Annotated[
        Path | None,
        _file("--fix", "OUT.json", "Write the program with NaN spelled as Paddle reads it, and check that."),
    ] = None,
    index: Annotated[bool, flag("--index", "Write the index of the shards in SRC; with --check verify it.")] = False,
    header: Annotated[
        bool, flag("--header", "Header of SRC as JSON, to DST or stdout; from SRC.json into DST.safetensors.")
    ] = False,
    output: Annotated[
        Path | None, _file("-o --output", "FILE", "With --header: write the file with its new header here.")
    ] = None,
    flags: Annotated[ConvertFlags, options.without("verify", "manifest")],
    shown: options.OutputFlags,
) -> None:
    """Convert a Paddle program and its parameters to safetensors and back, or check them; JSON of safetensors."""
    tasks = (index, header, program is not None, fix is not None or (check and not index))
    if sum(tasks) > 1:
        raise UsageError("--check, --index, --header and --program are different tasks", hint="ask for one at a time")
    if output is not None and not header:
        raise UsageError("--output has no effect without --header", hint="pass DST")
    unused: dict[str, object] = {
        "max_shard_size": max_shard_size,
        "resume": flags.resume,
        "workers": flags.workers,
        "memory": flags.memory,
    }
    if index:
        _without(dst, "--index", params=params, names=names, force=flags.force, **unused)
        _index(src, flags, shown, check=check)
    elif header:
        _without(None, "--header", params=params, names=names, **unused)
        _header(src, dst, output, flags, shown)
    elif check or fix is not None:
        _without(dst, "--check", dry_run=flags.dry_run, **unused)
        if fix is None:
            _without(None, "--check without --fix", force=flags.force)
        _check(src, params, names, fix, flags, shown)
    else:
        if dst is None:
            raise UsageError("there is no DST", hint="ckpttool convert-json SRC DST, or --check, --index, --header")
        from ckpttool.ops.convert_json.convert import execute, from_safetensors, to_safetensors
        from ckpttool.report import convert_json as report

        run = replace(flags, memory=flags.memory or _MEMORY).options()
        if program is not None:
            _without(None, "--program", params=params, max_shard_size=max_shard_size)
            conversion = from_safetensors(src, dst, program, names=names)
        else:
            conversion = to_safetensors(src, dst, params=params, names=names, max_shard_size=bytes_of(max_shard_size))
        if flags.dry_run:
            report.show_conversion_plan(conversion, dst, as_json=shown.json, quiet=shown.quiet)
            return
        result = execute(conversion, dst, run, shown.progress())
        report.show_conversion(result, as_json=shown.json, quiet=shown.quiet)


def _without(dst: Path | None, task: str, **others: object) -> None:
    """Raises UsageError for what a task makes no use of."""
    if dst is not None:
        raise UsageError(f"{task} takes no DST", where=str(dst))
    for name, given in others.items():
        if given:
            raise UsageError(f"--{name.replace('_', '-')} has no effect with {task}")


def _check(
    src: Path,
    params: Path | None,
    names: Path | None,
    fix: Path | None,
    flags: ConvertFlags,
    shown: options.OutputFlags,
) -> None:
    from ckpttool.formats.paddle import beside, program_of
    from ckpttool.ops.convert_json.check import check_program, repair
    from ckpttool.report import convert_json as report

    repaired = repair(src, fix, force=flags.force, apart=(params, names)) if fix is not None else None
    result = check_program(fix or src, params or beside(program_of(src)), names)
    report.show_program_check(result, repaired, as_json=shown.json, quiet=shown.quiet)
    if not result.ok:
        raise typer.Exit(3)


def _index(src: Path, flags: ConvertFlags, shown: options.OutputFlags, *, check: bool) -> None:
    from ckpttool.ops.convert_json import index
    from ckpttool.report import convert_json as report

    if check:
        result = index.verify(src)
        report.show_program_check(result, None, as_json=shown.json, quiet=shown.quiet)
        if not result.ok:
            raise typer.Exit(3)
        return
    report.show_index(index.rebuild(src, dry_run=flags.dry_run), as_json=shown.json, quiet=shown.quiet)


def _header(src: Path, dst: Path | None, output: Path | None, flags: ConvertFlags, shown: options.OutputFlags) -> None:
    from ckpttool.ops.convert_json import header
    from ckpttool.report import convert_json as report
    from ckpttool.report.text import write

    if dst is None:
        if src.suffix == ".json":
            raise UsageError(
                "there is no file for this header",
                where=str(src),
                hint=f"ckpttool convert-json {src} FILE.safetensors --header",
            )
        _without(None, "--header without OUT.json", output=output, dry_run=flags.dry_run, force=flags.force)
        write(header.dump(src))
    elif src.name.endswith(header.BACKUP) and dst.suffix != ".json":
        _without(None, "--header with a backup", output=output, force=flags.force)
        report.show_header(header.restore(src, dst, dry_run=flags.dry_run), as_json=shown.json, quiet=shown.quiet)
    elif dst.suffix == ".json" and src.suffix != ".json":
        _without(None, "--header with OUT.json", output=output, dry_run=flags.dry_run, json=shown.json)
        header.write_dump(src, dst, force=flags.force)
    else:
        result = header.apply(src, dst, out=output, dry_run=flags.dry_run, force=flags.force)
        report.show_header(result, as_json=shown.json, quiet=shown.quiet)
