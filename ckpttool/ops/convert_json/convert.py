"""``ckpttool convert-json``: the parameters of a Paddle program as safetensors, and back, byte for byte.

    model.json + model.pdiparams  ->  model.safetensors, or a directory of shards
                                      header: names as they are in the program, what is unusual about the records
    model.safetensors + model.json  ->  DIR/model.json, DIR/model.pdiparams

Both directions read their output again before it gets its name: through the reader of its format, every byte.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ckpttool.answers.findings import ERROR, PROGRAM
from ckpttool.containers.safetensors import read_header
from ckpttool.containers.safetensors_library import confirm_headers
from ckpttool.core.catalog import Catalog, Key, RankTensor, StoredTensor, whole_tensor
from ckpttool.core.files import Place
from ckpttool.core.geometry import whole
from ckpttool.core.plan import Plan
from ckpttool.errors import CkptError, ConflictError, CorruptError, UnsupportedError, UsageError, VerifyError
from ckpttool.execute import Progress, RunOptions, RunResult, run
from ckpttool.execute.verification import Checks, Verification
from ckpttool.formats import paddle
from ckpttool.formats.base import FileLayout, ReadOptions, build_files, file_now
from ckpttool.formats.hf import layout_published
from ckpttool.formats.registry import read_source
from ckpttool.planning.planner import build_plan
from ckpttool.planning.relate import EqualPair, identity

METADATA = "ckpttool.program"
"""Key of the safetensors metadata that keeps the way back, as JSON."""
_LONGEST = 255
"""Bytes of the name of a file."""


@dataclass(slots=True)
class PreparedConversion:
    """A planned conversion, before a byte is written."""

    program: paddle.Program
    source: Place
    plan: Plan
    catalog: Catalog
    names: dict[str, str]
    """Name in the parameter file -> name in safetensors, where they differ."""
    native: paddle.Native
    roots: tuple[str, ...]
    """Files that are read."""
    back: bool = False
    """From safetensors to parameters."""
    single: bool = False
    """DST is one file."""

    @property
    def notes(self) -> list[str]:
        return self.plan.notes

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.catalog)


@dataclass(slots=True)
class Converted:
    """What was written, and read again."""

    conversion: PreparedConversion
    dst: Place
    run: RunResult


def to_safetensors(
    src: Place,
    dst: Place,
    *,
    params: Place | None = None,
    names: Place | None = None,
    max_shard_size: int | None = None,
) -> PreparedConversion:
    """Plan a program's parameters as safetensors; one file when ``dst`` ends in .safetensors, else a directory.

    Raises IncompleteError and CorruptError for a program or parameter file that is not right, ConflictError for names
    that are another program's, UnsupportedError for a dtype that safetensors lacks.
    """
    single = dst.name.endswith(".safetensors")
    _refuse_name(dst, _OWN)
    if single and max_shard_size:
        raise UsageError(
            "--max-shard-size makes several files, and DST is one", hint="give a directory: a DST without .safetensors"
        )
    src = paddle.program_of(src)
    artifact = paddle.open_program(src, params)
    program = artifact.program
    _refuse_empty(program)
    notes = [f"{p.text} ({p.id})" for p in program.problems]
    given = _given_names(program, names, notes)
    catalog = Catalog([artifact.file] if artifact.file else [], {})
    for p, r in artifact.tensors:
        _add(catalog, given.get(p.name, p.name), paddle.stored_tensor(p, r))
    tensors = [_whole(t.key.name, t.dtype, t.shape) for t in catalog]
    native = paddle.native_of(artifact)
    parameter_of = {new: old for old, new in given.items()}
    digest = _digest(program.path)

    def metadata(group: Sequence[RankTensor]) -> Mapping[str, str]:
        return {"format": "pt", METADATA: _way_back(native, digest, [t.name for t in group], parameter_of)}

    file_layout = (
        build_files([(dst.name, 0, tensors, metadata(tensors))], 1)
        if single
        else layout_published(tensors, max_shard_size, metadata)
    )
    plan = _plan(catalog, tensors, file_layout, notes)
    roots = _roots(src, params, names, *(f.place for f in catalog.files))
    return PreparedConversion(program, src, plan, catalog, given, native, roots, single=single)


def from_safetensors(src: Place, dst: Place, program: Place, *, names: Place | None = None) -> PreparedConversion:
    """Plan the parameter file of ``program`` with the tensors of ``src`` (a file, a directory of shards, an index).

    Raises ConflictError for tensors that are missing, unexpected, or of another shape or dtype than in the program.
    """
    _refuse_name(dst, (*_OWN, ".safetensors"))
    program = paddle.program_of(program)
    artifact = paddle.open_alone(program)
    found = artifact.program
    _refuse_empty(found)
    stored = read_source(src, "hf", ReadOptions())
    ways = [_read_way_back(f.place) for f in stored.files]
    parameter_of: dict[str, str] = {}
    heads: dict[str, bytes] = {}
    for way in ways:
        parameter_of |= way.names
        heads |= way.heads
    notes = [*(f"{p.text} ({p.id})" for p in found.problems), *stored.notes]
    names = names or (None if parameter_of else _own_names(found))
    if names is not None:
        own = _set(found)
        parameter_of |= {s: p for p, structured in paddle.read_names(names).of.items() for s in structured if p in own}
    digests = {way.digest for way in ways if way.digest}
    if digests and digests != {_digest(program)}:
        notes.append(f"{program.name} is not the program that the tensors came from, or it has been edited")
    catalog = Catalog(list(stored.files), {})
    given: dict[str, str] = {}
    equal: list[EqualPair] = []
    for t in stored.tensors:
        parameter = parameter_of.get(t.name, t.name)
        first = catalog.tensors.get(Key(parameter))
        if first is None:
            _add(catalog, parameter, t)
            given[parameter] = t.name
            continue
        # A layer that is used twice has several names, and a saved state dict all of them.
        if (first.dtype, first.shape) != (t.dtype, t.shape):
            raise ConflictError(
                f"two tensors are the parameter `{parameter}`: `{given[parameter]}` and `{t.name}`",
                where=str(src),
                hint="they are not of one shape and dtype, so one of them has a name that is another's",
            )
        equal.append((first, whole_tensor(t, Key(t.name))))
    tensors = [_whole(t.key.name, t.dtype, t.shape) for t in catalog]
    try:
        paddle.refuse_others(found, tensors, str(src))
    except ConflictError as e:
        _explain(e, found, given, named=bool(digests or parameter_of))
        raise
    native = _with_own_names(paddle.native_of(artifact), ways, heads)
    file_layout = paddle.layout_program(native, tensors)
    renamed = {p: n for p, n in given.items() if p != n}
    plan = _plan(catalog, tensors, file_layout, notes, native.beside, equal)
    roots = _roots(src, program, names, *(f.place for f in catalog.files))
    return PreparedConversion(found, src, plan, catalog, renamed, native, roots, back=True)


def _refuse_empty(program: paddle.Program) -> None:
    if not program.parameters:
        raise UsageError(
            "the program has no parameters, so there is nothing to convert",
            where=str(program.path),
            hint=f"`ckpttool convert-json {program.path} --check` checks it all the same",
        )


_OWN = (".json", ".pdmodel", ".pdiparams")


def _refuse_name(dst: Place, suffixes: tuple[str, ...]) -> None:
    """Raises UsageError for a directory with the name of a file: something else was meant."""
    if dst.name.endswith(suffixes):
        raise UsageError(
            f"DST would be a directory with the name `{dst.name}`",
            where=str(dst),
            hint="give a directory; what lies in it has the names that Paddle gives it",
        )


def execute(conversion: PreparedConversion, dst: Place, options: RunOptions, progress: Progress) -> Converted:
    """Write, read again, compare, and only then give DST its name. Raises OutputError, CorruptError, VerifyError."""
    look = partial(_look_at_program if conversion.back else _look_at_safetensors, conversion)
    verify = Verification(look, options.memory, options.connections)
    options = replace(options, single=conversion.single, source_roots=conversion.roots, verify=verify, prove=verify)
    return Converted(conversion, dst, run(conversion.plan, dst, options, progress))


# -- what both directions share


def _add(catalog: Catalog, name: str, stored: StoredTensor) -> None:
    if name == "__metadata__":
        raise UnsupportedError(
            "safetensors has no room for a tensor with the name `__metadata__`", hint="--names may give it another"
        )
    key = Key(name)
    catalog.tensors[key] = whole_tensor(stored, key)


def _whole(name: str, dtype: str, shape: tuple[int, ...]) -> RankTensor:
    box = whole(shape)
    return RankTensor(name, dtype, shape, name, shape, ((box, box),))


def _plan(
    catalog: Catalog,
    tensors: Sequence[RankTensor],
    file_layout: FileLayout,
    notes: list[str],
    beside: Sequence[Place] = (),
    equal: Sequence[EqualPair] = (),
) -> Plan:
    carried = [(p.name, file_now(p)) for p in beside]
    plan = build_plan(catalog, identity(catalog).table, [tensors], file_layout, carried=carried, equal=equal)
    plan.notes = [*notes, *plan.notes]
    return plan


def _roots(*paths: Place | None) -> tuple[str, ...]:
    return tuple([str(p) for p in paths if p is not None])


def _digest(path: Place) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _set(program: paddle.Program) -> set[str]:
    return {p.name for p in program.parameters}


# -- the way back


@dataclass(slots=True)
class _WayBack:
    """What one safetensors file says about the program that its tensors came from."""

    digest: str = ""
    file: str = ""
    """Name of the program."""
    params: str = ""
    """Name of the parameter file."""
    names: dict[str, str] = field(default_factory=dict)
    """Name here -> parameter."""
    heads: dict[str, bytes] = field(default_factory=dict)


def _way_back(native: paddle.Native, digest: str, names: Sequence[str], parameter_of: Mapping[str, str]) -> str:
    said: dict[str, Any] = {"file": _text(native.program.path.name), "sha256": digest}
    if _is_name(native.params):
        said["params"] = native.params
    renamed = {n: parameter_of[n] for n in names if n in parameter_of}
    heads = {p: native.heads[p] for n in names if (p := parameter_of.get(n, n)) in native.heads}
    if renamed:
        said["names"] = renamed
    if heads:
        said["heads"] = {p: base64.b64encode(h).decode() for p, h in heads.items()}
    return json.dumps(said, ensure_ascii=False, separators=(",", ":"))


def _read_way_back(path: Place) -> _WayBack:
    """Raises CorruptError when the metadata is ours and cannot be used."""
    text = read_header(path).metadata.get(METADATA)
    if text is None:
        return _WayBack()
    try:
        said = json.loads(text)
        names, params = dict(said.get("names", {})), said.get("params")
        heads = {k: base64.b64decode(v, validate=True) for k, v in dict(said.get("heads", {})).items()}
        if not all(isinstance(v, str) for v in names.values()):
            raise ValueError
        name = params if _is_name(params) else ""
        return _WayBack(str(said.get("sha256", "")), str(said.get("file", "")), name, names, heads)
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise CorruptError(
            f"the metadata `{METADATA}` is not what ckpttool writes",
            where=str(path),
            hint="`ckpttool convert-json --header` takes it out; --names gives the names then",
        ) from None


def _is_name(params: Any) -> bool:
    """Whether a parameter file in DST could have this name; what cannot is called as the program is."""
    if not isinstance(params, str) or params in ("", ".", "..") or "/" in params or "\0" in params:
        return False
    return _text(params) == params and len(params.encode()) <= _LONGEST


def _text(name: str) -> str:
    """A file's name as a text that can be written, whatever bytes it is made of."""
    return name.encode(errors="replace").decode()


def _with_own_names(native: paddle.Native, ways: Sequence[_WayBack], heads: Mapping[str, bytes]) -> paddle.Native:
    """As the tensors' files say it: unusual heads of records, and the parameter file's name where that was one."""
    names = {way.params for way in ways if way.params and way.params != paddle.params_name(Path(way.file))}
    name = names.pop() if len(names) == 1 else ""
    if not name or name in [p.name for p in native.beside]:
        name = paddle.params_name(native.program.path)
    fit = {
        p.name: h for p in native.program.parameters if (h := heads.get(p.name)) is not None and paddle.head_fits(h, p)
    }
    return native._replace(params=name, heads=fit)


def _explain(e: CkptError, program: paddle.Program, given: Mapping[str, str], *, named: bool) -> None:
    """Names are the commonest reason. ``named``: SRC or --names says which parameters its tensors are."""
    e.hint = "only values may change: names, dtypes and shapes are the program's"
    if not given.keys() <= _set(program):
        e.hint = (
            "these are the tensors of another program, or their names were changed"
            if named
            else "give the file that has the structured names: --names model.pdparams"
        )


# -- structured names


def _given_names(program: paddle.Program, path: Place | None, notes: list[str]) -> dict[str, str]:
    """Parameter -> structured name, where one is known."""
    path = path or _own_names(program)
    if path is None:
        return {}
    try:
        said = paddle.read_names(path)
    except CorruptError as e:
        e.hint = "names are in a .pdparams of the same run (--names model.pdparams), or in .pdiparams.info"
        raise
    out, problems = paddle.match_names(program.parameters, said)
    for problem in problems:
        if PROGRAM[problem.id] == ERROR:
            raise ConflictError(
                problem.text,
                where=[str(path), str(program.path)],
                hint="these are names of another model or another run",
            )
        notes.append(problem.text)
    if shared := [p for p in out if len(said.of[p]) > 1]:
        p = shared[0]
        notes.append(f"`{p}` has several names: {', '.join(said.of[p])}; the first is taken")
    return {p: n for p, n in out.items() if p != n}


def _own_names(program: paddle.Program) -> Place | None:
    """The file that a legacy export has beside it."""
    path = program.path.parent / (program.path.name.removesuffix(paddle.LEGACY) + paddle.INFO)
    return path if program.kind == "pdmodel" and path.is_file() else None


# -- reading again


def _look_at_safetensors(conversion: PreparedConversion, written: Place) -> Checks:
    """Every file is read through its own header."""
    names = [o.name for o in conversion.plan.outputs if o.name.endswith(".safetensors")]
    found = Catalog([], {})
    for i, name in enumerate(names):
        head = read_header(written / name, i)
        found.files.append(head.file)
        for t in head.tensors:
            _add(found, t.name, t)
    confirm_headers(found.files)
    return _checks(conversion, found, written)


def _look_at_program(conversion: PreparedConversion, written: Place) -> Checks:
    """The parameters are read as the program in DST says."""
    path = written / conversion.program.path.name
    again = paddle.open_program(path, written / conversion.native.params)
    if again.program.parameters != conversion.program.parameters or again.file is None:
        raise VerifyError("the program that was written is not the one that was given", where=str(path))
    found = Catalog([again.file], {})
    for p, r in again.tensors:
        _add(found, p.name, paddle.stored_tensor(p, r))
    return _checks(conversion, found, written)


def _checks(conversion: PreparedConversion, found: Catalog, written: Place) -> Checks:
    views = identity(conversion.catalog).table
    if set(found.tensors) != set(conversion.catalog.tensors):
        raise VerifyError("the output does not have the tensors of the source", where=str(written))
    checks = Checks()
    checks.add_views(conversion.catalog, [(v, v.dtype) for v in views.values()], found)
    return checks
