"""``ckpttool convert-json``: a Paddle program and its parameters to safetensors, back, and checked."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckpttool.cli import options
from ckpttool.cli.values import run_options
from ckpttool.errors import UsageError
from ckpttool.ops.values import parse_size

Src = Annotated[
    Path,
    typer.Argument(
        metavar="SRC",
        readable=False,
        help="A program (.json, .pdmodel); with --program safetensors; what --index and --header work on.",
        show_default=False,
    ),
]
Dst = Annotated[
    Path | None,
    typer.Argument(
        metavar="DST", readable=False, help="FILE.safetensors, or a directory to create.", show_default=False
    ),
]
Params = Annotated[
    Path | None,
    typer.Option(
        "--params",
        metavar="FILE",
        readable=False,
        help="Parameters of the program, when they are not beside it.",
        show_default=False,
    ),
]
Names = Annotated[
    Path | None,
    typer.Option(
        "--names",
        metavar="FILE",
        readable=False,
        help="Structured names: .pdparams of the same run, or .pdiparams.info.",
        show_default=False,
    ),
]
Program = Annotated[
    Path | None,
    typer.Option(
        "--program",
        metavar="FILE",
        readable=False,
        help="The way back: write SRC as the parameters of this program.",
        show_default=False,
    ),
]
MaxShard = Annotated[
    str,
    typer.Option(
        "--max-shard-size",
        metavar="SIZE",
        help="Largest file, when DST is a directory; default: 5GB.",
        show_default=False,
    ),
]
Check = Annotated[bool, typer.Option("--check", help="Find what is wrong; exit 3 when there is an error.")]
Fix = Annotated[
    Path | None,
    typer.Option(
        "--fix",
        metavar="OUT.json",
        readable=False,
        help="Write the program with NaN spelled as Paddle reads it, and check that.",
        show_default=False,
    ),
]
Index = Annotated[bool, typer.Option("--index", help="Write the index of the shards in SRC; with --check verify it.")]
Header = Annotated[
    bool, typer.Option("--header", help="Header of SRC as JSON, to DST or stdout; from SRC.json into DST.safetensors.")
]
_MEMORY = "64MiB"
Memory = Annotated[
    str,
    typer.Option(
        "--memory",
        metavar="SIZE",
        help=f"Memory for all buffers together; default: {_MEMORY}.",
        show_default=False,
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        metavar="FILE",
        readable=False,
        help="With --header: write the file with its new header here.",
        show_default=False,
    ),
]


def convert_json(
    src: Src,
    dst: Dst = None,
    params: Params = None,
    names: Names = None,
    program: Program = None,
    max_shard_size: MaxShard = "",
    check: Check = False,
    fix: Fix = None,
    index: Index = False,
    header: Header = False,
    output: Output = None,
    dry_run: options.DryRun = False,
    force: options.Force = False,
    resume: options.Resume = False,
    workers: options.Workers = None,
    memory: Memory = "",
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Convert a Paddle program and its parameters to safetensors and back, or check them; JSON of safetensors."""
    tasks = (index, header, program is not None, fix is not None or (check and not index))
    if sum(tasks) > 1:
        raise UsageError("--check, --index, --header and --program are different tasks", hint="ask for one at a time")
    if output is not None and not header:
        raise UsageError("--output has no effect without --header", hint="pass DST")
    unused: dict[str, object] = {
        "max_shard_size": max_shard_size,
        "resume": resume,
        "workers": workers,
        "memory": memory,
    }
    if index:
        _without(dst, "--index", params=params, names=names, force=force, **unused)
        _index(src, check=check, dry_run=dry_run, as_json=json, quiet=quiet)
    elif header:
        _without(None, "--header", params=params, names=names, **unused)
        _header(src, dst, output, dry_run=dry_run, force=force, as_json=json, quiet=quiet)
    elif check or fix is not None:
        _without(dst, "--check", dry_run=dry_run, **unused)
        if fix is None:
            _without(None, "--check without --fix", force=force)
        _check(src, params, names, fix, force=force, as_json=json, quiet=quiet)
    else:
        if dst is None:
            raise UsageError("there is no DST", hint="ckpttool convert-json SRC DST, or --check, --index, --header")
        from ckpttool import report
        from ckpttool.ops.convert_json.convert import execute, from_safetensors, to_safetensors

        run = run_options(memory=memory or _MEMORY, workers=workers, force=force, resume=resume, manifest=False)
        if program is not None:
            _without(None, "--program", params=params, max_shard_size=max_shard_size)
            conversion = from_safetensors(src, dst, program, names=names)
        else:
            size = parse_size(max_shard_size, "--max-shard-size") if max_shard_size else None
            conversion = to_safetensors(src, dst, params=params, names=names, max_shard_size=size)
        if dry_run:
            report.show_conversion_plan(conversion, dst, as_json=json, quiet=quiet)
            return
        report.show_conversion(
            execute(conversion, dst, run, report.progress(quiet=quiet or json)), as_json=json, quiet=quiet
        )


def _without(dst: Path | None, task: str, **others: object) -> None:
    """Raises UsageError for what a task makes no use of."""
    if dst is not None:
        raise UsageError(f"{task} takes no DST", where=str(dst))
    for name, value in others.items():
        if value:
            raise UsageError(f"--{name.replace('_', '-')} has no effect with {task}")


def _check(
    src: Path, params: Path | None, names: Path | None, fix: Path | None, *, force: bool, as_json: bool, quiet: bool
) -> None:
    from ckpttool import report
    from ckpttool.formats.paddle.program import beside, program_of
    from ckpttool.ops.convert_json.check import check_program, repair

    repaired = repair(src, fix, force=force, apart=(params, names)) if fix is not None else None
    result = check_program(fix or src, params or beside(program_of(src)), names)
    report.show_program_check(result, repaired, as_json=as_json, quiet=quiet)
    if not result.ok:
        raise typer.Exit(3)


def _index(src: Path, *, check: bool, dry_run: bool, as_json: bool, quiet: bool) -> None:
    from ckpttool import report
    from ckpttool.ops.convert_json import index

    if check:
        result = index.verify(src)
        report.show_program_check(result, None, as_json=as_json, quiet=quiet)
        if not result.ok:
            raise typer.Exit(3)
        return
    report.show_index(index.rebuild(src, dry_run=dry_run), as_json=as_json, quiet=quiet)


def _header(
    src: Path, dst: Path | None, output: Path | None, *, dry_run: bool, force: bool, as_json: bool, quiet: bool
) -> None:
    from ckpttool import report
    from ckpttool.ops.convert_json import header

    if dst is None:
        if src.suffix == ".json":
            raise UsageError(
                "there is no file for this header",
                where=str(src),
                hint=f"ckpttool convert-json {src} FILE.safetensors --header",
            )
        _without(None, "--header without OUT.json", output=output, dry_run=dry_run, force=force)
        report.show_text(header.dump(src))
    elif src.name.endswith(header.BACKUP) and dst.suffix != ".json":
        _without(None, "--header with a backup", output=output, force=force)
        report.show_header(header.restore(src, dst, dry_run=dry_run), as_json=as_json, quiet=quiet)
    elif dst.suffix == ".json" and src.suffix != ".json":
        _without(None, "--header with OUT.json", output=output, dry_run=dry_run, json=as_json)
        header.write_dump(src, dst, force=force)
    else:
        result = header.apply(src, dst, out=output, dry_run=dry_run, force=force)
        report.show_header(result, as_json=as_json, quiet=quiet)
