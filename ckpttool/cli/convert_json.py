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
        argument("SRC", "A program (.json, .pdmodel), or safetensors for --program, --index and --header."),
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
    index: Annotated[bool, flag("--index", "Write the index of the shards in SRC; --check: verify.")] = False,
    header: Annotated[bool, flag("--header", "Header of SRC as JSON, or SRC.json as the header of DST.")] = False,
    output: Annotated[
        str | None, value("-o --output", "FILE", "With --header: write a copy with the new header here.")
    ] = None,
    flags: Annotated[ConvertFlags, options.without("verify", "manifest", "create_pr")],
    shown: options.OutputFlags,
) -> None:
    """Convert a Paddle program and its parameters to safetensors and back; check programs, indexes and headers."""
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
        "on": flags.on,
        "part": flags.shares,
    }
    from ckpttool.storage.place import parse_place

    source = parse_place(src)
    if index:
        _without(dst, "--index", params=params, names=names, force=flags.force, **unused)
        _index(source, flags, shown, check=check)
    elif header:
        _without(None, "--header", params=params, names=names, **unused)
        _header(source, place(dst), local(output), flags, shown)
    elif check or fix is not None:
        _without(dst, "--check", dry_run=flags.dry_run, **unused)
        if fix is None:
            _without(None, "--check without --fix", force=flags.force)
        _check(source, place(params), place(names), local(fix), flags, shown)
    else:
        if dst is None:
            raise UsageError("there is no DST", hint="ckpttool convert-json SRC DST, or --check, --index, --header")
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


def _index(src: Place, flags: ConvertFlags, shown: options.OutputFlags, *, check: bool) -> None:
    from ckpttool.ops.convert_json import index
    from ckpttool.report import convert_json as report
    from ckpttool.report.render import show

    if check:
        result = index.verify(src)
        with reader_may_leave():
            show(report.check_document(result), as_json=shown.json, quiet=shown.quiet)
        if not result.ok:
            raise typer.Exit(3)
        return
    show(report.index_document(index.rebuild(src, dry_run=flags.dry_run)), as_json=shown.json, quiet=shown.quiet)


def _header(
    src: Place, dst: Place | None, output: Path | None, flags: ConvertFlags, shown: options.OutputFlags
) -> None:
    from ckpttool.ops.convert_json import header
    from ckpttool.report import convert_json as report
    from ckpttool.report.render import show
    from ckpttool.report.text import write
    from ckpttool.storage.place import local_path

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
        restored = header.restore(local_path(src), local_path(dst), dry_run=flags.dry_run)
        show(report.header_document(restored), as_json=shown.json, quiet=shown.quiet)
    elif dst.suffix == ".json" and src.suffix != ".json":
        _without(None, "--header with OUT.json", output=output, dry_run=flags.dry_run, json=shown.json)
        header.write_dump(src, local_path(dst), force=flags.force)
    else:
        file = local_path(dst)
        result = header.apply(local_path(src), file, out=output, dry_run=flags.dry_run, force=flags.force)
        show(report.header_document(result), as_json=shown.json, quiet=shown.quiet)
