"""A Paddle inference program with its parameters: ``model.json`` or ``model.pdmodel`` beside ``model.pdiparams``.

The program gives names, dtypes and shapes, the parameter file gives bytes (``_program.py``). What is read are the
parameters under the names that the program has; what is written is the same program with new bytes, so that tensors
may change their values and nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ckpttool.core.catalog import RankTensor, StoredTensor
from ckpttool.core.files import DataFile, Place
from ckpttool.core.mesh import Mesh
from ckpttool.errors import CkptError, ConflictError, CorruptError, IncompleteError, UnsupportedError, UsageError
from ckpttool.formats import base
from ckpttool.formats.paddle.pdiparams import TensorRecord, match_records, record_head
from ckpttool.formats.paddle.pdmodel import read_pdmodel
from ckpttool.formats.paddle.pir import looks_like_pir, read_pir
from ckpttool.formats.paddle.pir_patches import patched
from ckpttool.formats.paddle.program_parts import FLOAT8, Program, ProgramTensor
from ckpttool.storage.listing import Listing, leads_away, list_source

PARAMS = ".pdiparams"
INFO = ".pdiparams.info"
LEGACY = ".pdmodel"
PICKLES = (".pdparams", ".pdopt", ".distcp")
"""Weights of other formats, which may lie in the same directory."""

HARMLESS = frozenset(
    {
        "version-newer",
        "value-undefined",
        "value-order",
        "value-scope",
        "value-twice",
        "operator",
        "parameter-flags",
        "parameter-shared",
        "attribute",
        "attribute-nan",
        "attribute-void",
        "block",
    }
)
"""Problems of a program that leave no doubt about its parameters: reading notes them and goes on."""


@dataclass(slots=True)
class Artifact:
    """A program and its parameter file, as far as they can be read."""

    program: Program
    params: Place | None
    """None when there is no parameter file."""
    file: DataFile | None = None
    records: list[TensorRecord] = field(default_factory=list)
    """Records of the program's parameters, in their order; fewer where the file is cut off."""

    @property
    def tensors(self) -> list[tuple[ProgramTensor, TensorRecord]]:
        return list(zip(self.program.parameters, self.records, strict=False))


class Native(NamedTuple):
    """The data that writing the same program again needs."""

    program: Program
    params: str
    """Name of the parameter file."""
    heads: Mapping[str, bytes]
    """Heads of records that are not as Paddle 3 writes them, by parameter."""
    beside: tuple[Place, ...]
    """Files that go with the program: its own and, of a legacy one, the .info with the structured names."""


def is_program(path: Place) -> bool:
    """Whether a file is a program, by its name and the first bytes of a JSON file."""
    return path.name.endswith(LEGACY) or (path.suffix == ".json" and looks_like_pir(path))


def examine(path: Place, params: Place | None = None) -> Artifact:
    """A program and its parameters with everything that is wrong with them, in ``program.problems``.

    ``params`` is the parameter file where it is not the one that lies beside the program. Raises IncompleteError when
    a file that is named does not exist, CorruptError when one cannot be read at all.
    """
    program = _read(path)
    found = params or parameter_file(path)
    artifact = Artifact(program, found)
    if any(p.id not in HARMLESS for p in program.problems):
        return artifact  # without the list of parameters there is nothing to compare a file with
    if found is not None and not program.parameters:
        text = f"the program has no parameters, and {found.name} lies beside it: paddle.jit.load fails"
        program.report("params-count", text)
    elif found is not None:
        artifact.file, artifact.records = match_records(program, found)
    elif program.parameters:
        n = len(program.parameters)
        text = f"the program has {n} parameter{'s' if n > 1 else ''}, and there is no {params_name(path)} beside it"
        program.report("params-missing", text)
    return artifact


def parameter_file(path: Place) -> Place | None:
    """The parameter file of a program, when it lies where Paddle writes it."""
    name = path.name.removesuffix(LEGACY).removesuffix(".json")
    found = path.parent / (name + PARAMS)
    return found if found.is_file() else None


def open_program(path: Place, params: Place | None = None) -> Artifact:
    """As ``examine``, but raises CorruptError or IncompleteError for the first problem that is not ``HARMLESS``."""
    artifact = examine(path, params)
    _refuse(artifact)
    return artifact


def open_alone(path: Place) -> Artifact:
    """A program without its parameter file, which is about to be written. Raises as ``open_program`` does."""
    artifact = Artifact(_read(path), None)
    _refuse(artifact)
    return artifact


def _read(path: Place) -> Program:
    return read_pdmodel(path) if path.name.endswith(LEGACY) else read_pir(path)


def _refuse(artifact: Artifact) -> None:
    path = artifact.program.path
    wrong = [p for p in artifact.program.problems if p.id not in HARMLESS]
    if not wrong:
        return
    first = wrong[0]
    kind = IncompleteError if first.id == "params-missing" else CorruptError
    about = artifact.params if first.id.startswith("params-") and artifact.params else path
    more = f" (and {len(wrong) - 1} more problems)" if len(wrong) > 1 else ""
    raise kind(
        first.text + more,
        where=[str(about), first.where] if first.where else str(about),
        hint="give the file with --params"
        if first.id == "params-missing"
        else f"`ckpttool convert-json {path} --check` lists all problems",
    )


_HINTS: Mapping[str, str] = {
    "attribute-nan": "--fix OUT.json writes it as Paddle reads it",
    "params-missing": "`ckpttool convert-json --params` names another file",
    "params-truncated": "copy or export the file again",
    "params-count": "is it the parameter file of this program? --params names another; what combine_params=True writes"
    " fits no program, and Paddle cannot load it",
}


def check_artifact(path: Place, params: Place | None = None) -> tuple[base.FormatCheck, Program | None]:
    """Check a program and its parameter file; returns errors, and notes for those who serve the model.

    The program is None where it cannot be read. ``params`` as in ``examine``.
    """
    try:
        artifact = examine(path, params)
    except CkptError as e:
        return base.FormatCheck([("unreadable", e.what, ", ".join(e.where), e.hint or "")], {}), None
    program = artifact.program
    found: list[tuple[str, str, str, str]] = []

    def add(id_: str, text: str, where: object = program.path) -> None:
        found.append((id_, text, str(where), _HINTS.get(id_, "")))

    for p in program.problems:
        about = artifact.params if p.id.startswith("params-") and artifact.params else program.path
        add(p.id, p.text, f"{about}: {p.where}" if p.where else about)
    for id_, n in program.more.items():
        add(id_, f"and {n:,} more of this kind")
    for change in patched(program):
        add("version-patched", f"version {program.version}: Paddle changes {change} (patch {change.version})")
    if program.infinite:
        many = f"{program.infinite} attributes are" if program.infinite > 1 else "an attribute is"
        text = (
            "infinite: before its pull request 71339, Paddle read the largest number for INF and a small one for -INF"
        )
        add("attribute-inf", f"{many} {text}")
    # A .pdmodel is only asked for its parameters.
    elements = program.elements or Counter(p.dtype for p in program.parameters)
    if coded := {e: n for e, n in elements.items() if e in FLOAT8}:
        held = [p.name for p in program.parameters if p.dtype in FLOAT8]
        text = " and ".join(f"{n} value{'s' if n > 1 else ''} in {e}" for e, n in coded.items())
        text += f", {len(held)} of them parameters (`{held[0]}`)" if held else ""
        add("float8", text)
    counts = {
        "operator": program.operators.total(),
        "parameter": len(program.parameters),
        "record": len(artifact.records),
    }
    return base.FormatCheck(found, counts), program


class PaddleProgram:
    """The parameters of one inference program, under their own names."""

    name = "program"
    dialect = ""
    capabilities = base.Capabilities(default_target=True)

    def detect(self, listing: Listing) -> int:
        if listing.single:
            return 2 * (listing.single.endswith(PARAMS) or is_program(listing.path(listing.single)))
        others = any(n.endswith((".safetensors", *PICKLES)) for n in listing.names)
        if any(n.endswith((LEGACY, PARAMS)) for n in listing.names):
            return 1 if others else 2
        # A program without parameters is nothing but a JSON file.
        return 0 if others else int(any(is_program(listing.path(n)) for n in listing.names))

    def read(self, listing: Listing, options: base.ReadOptions) -> base.StoredCheckpoint:
        """Raises what ``open_program`` raises, and ConflictError when it is not clear which program is meant."""
        said = options.from_flags()
        if any(n > 1 for n in said.values()):
            raise UsageError("a Paddle program holds whole tensors: --tp, --pp and --ep cannot be used with it")
        artifact = open_program(find_program(listing))
        program = artifact.program
        native = native_of(artifact)
        stored = base.StoredCheckpoint(self.name, listing.root, [], [], Mesh(), dialect="paddle", native=native)
        stored.notes += [f"{p.text} ({p.id})" for p in program.problems]
        if artifact.file is not None:
            stored.files = [artifact.file]
            stored.tensors = [stored_tensor(p, r) for p, r in artifact.tensors]
        return stored

    def check(self, listing: Listing) -> base.FormatCheck:
        """Raises what ``find_program`` raises."""
        return check_artifact(find_program(listing))[0]

    def target_mesh(self, asked: Mesh, said: Mapping[str, int]) -> Mesh:
        return base.whole_mesh(said, "program: a program holds whole tensors", hint=None)

    def write(self, request: base.WriteRequest) -> base.FileLayout:
        """Raises UnsupportedError without a program in the source, ConflictError for tensors that are not its own."""
        native = request.native
        if not isinstance(native, Native):
            raise UnsupportedError(
                "--to program needs a program, and the source has none",
                hint="ckpttool convert-json SRC DST --program model.json writes the parameters of a given program",
            )
        refuse_others(native.program, request.ranks[0])
        return layout_program(native, request.ranks[0])


def find_program(listing: Listing) -> Place:
    """The program that SRC means. Raises IncompleteError for none, ConflictError for several."""
    if listing.single and not listing.single.endswith(PARAMS):
        return listing.path(listing.single)
    names = [n for n in listing.names if is_program(listing.path(n))]
    if listing.single:
        stem = listing.single.removesuffix(PARAMS)
        names = [n for n in names if n in (stem + ".json", stem + LEGACY)]
    if not names:
        orphan = any(n.endswith(PARAMS) for n in (listing.single, *listing.names))
        raise IncompleteError(
            "there are parameters and no program that names them" if orphan else "there is no program here",
            where=str(listing.path(listing.single) if listing.single else listing.root),
            hint="give the program: its .json or .pdmodel; `ckpttool reshard` converts what has none",
        )
    if len(names) > 1:
        raise ConflictError(
            f"there are {len(names)} programs here, and it is unclear which one to read",
            where=[str(listing.root), *names[:4]],
            hint="give the path of the program",
        )
    return listing.path(names[0])


def program_of(path: Place) -> Place:
    """The program that a path of the command line means: its file, its parameter file, or their directory.

    Raises UsageError for what is none and what is not there, and what ``find_program`` raises.
    """
    listing = list_source(path)
    if listing.single.endswith(".safetensors"):
        raise UsageError(
            "this is not a program but tensors",
            where=str(path),
            hint="the way back needs one: --program model.json; to check tensors: ckpttool inspect SRC --check",
        )
    if listing.single and not listing.single.endswith((".json", LEGACY, PARAMS)):
        names = listing.single.endswith((".pdparams", INFO))
        raise UsageError(
            "this is not a program by its name, which ends in .json or .pdmodel",
            where=str(path),
            hint="structured names are given with --names" if names else None,
        )
    return find_program(listing)


def native_of(artifact: Artifact) -> Native:
    """The data that is kept for writing the program again."""
    program = artifact.program
    info = program.path.parent / (program.path.name.removesuffix(LEGACY) + INFO)
    whole = program.kind == "pdmodel" and info.is_file() and not leads_away(info)
    files = (program.path, info) if whole else (program.path,)
    name = artifact.params.name if artifact.params else params_name(program.path)
    heads = {p.name: r.head for p, r in artifact.tensors if r.head}
    return Native(program, name, heads, files)


def params_name(path: Place) -> str:
    """Name of the parameter file that Paddle looks for beside a program."""
    return path.name.removesuffix(LEGACY).removesuffix(".json") + PARAMS


def stored_form(parameter: ProgramTensor) -> tuple[str, tuple[int, ...]]:
    """dtype and shape under which a parameter is known outside Paddle.

    complex128, which safetensors does not have, is F64 with a last axis of two: real and imaginary part.
    """
    if parameter.dtype == "C128":
        return "F64", (*parameter.shape, 2)
    return parameter.dtype, parameter.shape


def stored_tensor(parameter: ProgramTensor, record: TensorRecord) -> StoredTensor:
    """The stored tensor of a parameter, in its ``stored_form``."""
    return StoredTensor(parameter.name, *stored_form(parameter), 0, record.offset)


def refuse_others(program: Program, tensors: Sequence[RankTensor], label: str = "the output") -> None:
    """Raises ConflictError unless ``tensors`` are the parameters of the program: names, dtypes and shapes."""
    have = {t.name: t for t in tensors}
    want = {p.name: p for p in program.parameters}
    wrong = [f"`{n}` is missing" for n in want if n not in have]
    wrong += [f"`{n}` is not in the program" for n in have if n not in want]
    for n, p in want.items():
        t = have.get(n)
        dtype, shape = stored_form(p)
        if t is not None and t.dtype != dtype:
            wrong.append(f"`{n}` is {t.dtype}, the program says {dtype}")
        elif t is not None and t.shape != shape:
            wrong.append(f"`{n}` is {list(t.shape)}, the program says {list(shape)}")
    if wrong:
        raise ConflictError(
            f"{label} does not have the tensors of the program: {wrong[0]}"
            + (f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""),
            where=[str(program.path), *wrong[1:5]],
            hint="only values may change; `ckpttool reshard SRC DST --to hf` writes tensors without a program",
        )


def layout_program(native: Native, tensors: Sequence[RankTensor]) -> base.FileLayout:
    """The parameter file, and the program's own files beside it."""
    slots = {t.name: t.slot for t in tensors}
    literals: list[tuple[int, bytes]] = []
    places: dict[str, tuple[int, int]] = {}
    at = 0
    for p in native.program.parameters:
        head = native.heads.get(p.name) or record_head(p.dtype, p.shape)
        literals.append((at, head))
        places[slots[p.name]] = (0, at + len(head))
        at += len(head) + p.nbytes
    files = [base.OutFile(native.params, at, tuple(literals))]
    return base.FileLayout(files, [places], [], [[0]], copied=native.beside)
