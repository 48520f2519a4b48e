"""``ckpttool convert-json --check``: does this program say what it should, and are these its parameters?

Paddle compares nothing: it reads a parameter file that is cut off, or another program's, without a word. Every finding
has an identifier that scripts may rely on; docs/findings.md lists them, with what Paddle
does in each case.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ckpttool.answers.findings import CheckResult, Finding
from ckpttool.core.files import DataFile, Place
from ckpttool.errors import CkptError, CorruptError, OutputError, UnsupportedError, UsageError, VerifyError
from ckpttool.execute.durable import Replacement, resolved, sync_names, write_all
from ckpttool.execute.files import write_error
from ckpttool.formats import paddle
from ckpttool.storage.place import is_same

_WRITTEN = f'"{paddle.VOID_WRITTEN}"'.encode()
_READ = f'"{paddle.VOID_WRITTEN.upper()}"'.encode()
_KEY = b'"VD"'
_CHUNK = 1 << 20


@dataclass(slots=True)
class Repaired:
    """What ``--fix`` wrote."""

    path: Path
    count: int
    """Attributes whose spelling was changed."""


def check_program(src: Place, params: Place | None = None, names: Place | None = None) -> CheckResult:
    """Everything that is wrong with a program and its parameter file. Raises what ``program_of`` raises.

    ``params`` and ``names`` as in converting.
    """
    src = paddle.program_of(src)
    checked, program = paddle.check_artifact(src, params)
    result = CheckResult(src, "program", [Finding(*f) for f in checked.found], checked.counts)
    if names is not None and program and not any(f.id in ("json", "magic", "protobuf") for f in result.findings):
        _check_names(program, names, result)
    return result


def _check_names(program: paddle.Program, path: Place, result: CheckResult) -> None:
    """Structured names that are to be given to the parameters."""
    try:
        problems = paddle.match_names(program.parameters, paddle.read_names(path))[1]
    except CkptError as e:
        result.add("unreadable", e.what, ", ".join(e.where), e.hint)
        return
    for p in problems:
        result.add(p.id, p.text, path)


def repair(src: Place, out: Path, *, force: bool = False, apart: Sequence[Place | None] = ()) -> Repaired:
    """Write a PIR program with every NaN spelled as Paddle reads it; every other byte stays.

    ``apart`` are files that belong to the program, none of which ``out`` may be.

    Raises UsageError for what is not a PIR program, CorruptError for broken JSON, OutputError when ``out`` exists or
    cannot be written, and UnsupportedError where the spelling stands beside a value, which alone counts.
    """
    src = paddle.program_of(src)
    if src.suffix != ".json" or out.suffix != ".json":
        raise UsageError("--fix repairs PIR programs, which are JSON", where=str(out if src.suffix == ".json" else src))
    if out.exists() and is_same(out, src):
        raise UsageError("--fix writes another file, and OUT.json is the program itself", where=str(out))
    for other in (paddle.parameter_file(src), *apart):
        if other is not None and out.exists() and other.exists() and is_same(out, other):
            raise UsageError("--fix writes a program, and OUT.json is a file that goes with it", where=str(out))
    if os.path.lexists(out) and not force:
        raise OutputError("the destination exists", where=str(out), hint="use --force to replace it")
    was = _identity(src)
    before = paddle.read_pir(src)
    for p in before.problems:
        if p.id in ("json", "magic"):
            raise CorruptError(p.text, where=[str(src), p.where] if p.where else str(src))
    given, out = out, resolved(out)
    with Replacement(out) as new:
        count = _respell(src, new.fd, out)
        expected = _nans(before)
        if count > expected:
            raise UnsupportedError(
                'an attribute has a value and `"VD": "NaN"` besides, and only the value counts', where=str(src)
            )
        if count < expected:
            raise UnsupportedError(
                f"{expected - count} NaN are written in a way that is not repaired: with escapes, or far from `VD`",
                where=str(src),
            )
        if left := _nans(paddle.read_pir(new.temporary)):
            raise VerifyError(f"{left} NaN are left that Paddle cannot read", where=str(src))
        model = out if out.exists() else src
        if isinstance(model, Path):
            new.keep_mode(model.stat())
        new.sync()
        if _identity(src) != was:
            raise CorruptError("the program changed while it was read", where=str(src), hint="repeat the command")
        new.publish(force=force)
        sync_names([out.parent])
    return Repaired(given, count)


def _identity(path: Place) -> DataFile | None:
    try:
        return DataFile.at(path)
    except OSError:
        return None


def _nans(program: paddle.Program) -> int:
    return sum(p.id == "attribute-nan" for p in program.problems) + program.more["attribute-nan"]


def _respell(src: Place, fd: int, out: Path) -> int:
    """Copy a text in which ``"VD": "NaN"`` becomes ``"VD": "NAN"``. Returns how often.

    In a JSON text these bytes are never part of a string: a quote within one has a backslash before it.
    """
    pattern = re.compile(_KEY + rb"(\s{0,64}):(\s{0,64})" + _WRITTEN)
    longest = len(_KEY) + 64 + 1 + 64 + len(_WRITTEN)
    count, at, rest = 0, 0, b""
    try:
        os.ftruncate(fd, 0)
        with src.open("rb") as f:
            while True:
                data = f.read(_CHUNK)
                text, n = pattern.subn(_KEY + rb"\1:\2" + _READ, rest + data)
                count += n
                keep = min(len(text), longest - 1) if data else 0
                write_all(fd, text[: len(text) - keep], at)
                at += len(text) - keep
                rest = text[len(text) - keep :]
                if not data:
                    return count
    except OSError as e:
        raise write_error(e, str(out), 0, 0) from e
