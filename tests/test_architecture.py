"""The shape of the package: who may import whom, what stays out of a start, and what is never called.

Everything but the last part reads the sources with `ast` and imports nothing of them.
"""

from __future__ import annotations

import ast
import gc
import json
import os
import re
import shutil
import subprocess
import sys
import tokenize
from collections import Counter
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT = Path(__file__).parents[1]
PACKAGE = "ckpttool"

# The hourglass: a module imports only from rows above its own. The public API may use report, for its bar alone.
ROWS: tuple[tuple[str, ...], ...] = (
    ("errors", "version"),
    ("core",),
    ("storage",),
    ("containers",),
    ("formats",),
    ("layout",),
    ("dialects",),
    ("checkpoint",),
    ("planning",),
    ("aoa",),
    ("adapters", "quant", "vocabulary"),
    ("kernels",),
    ("recipe",),
    ("execute",),
    ("targeting",),
    ("answers",),
    ("ops",),
    ("report",),
    ("api", "__init__"),
    ("cli",),
    ("__main__",),
)
ROW_OF = {name: number for number, row in enumerate(ROWS) for name in row}

# What a format may share with the other formats. A package of formats is one piece of software's: its files share all.
SHARED_FORMATS = {"base", "config"}
# Packages of formats that other software builds on: Megatron saves through torch. Others see the face only.
SHARED_FACES = {f"{PACKAGE}.formats.torch"}

# Handing out torch tensors, and repeating what torch makes of equal magnitudes (merge --rng mergekit).
TORCH_MODULES = {"ckpttool", "ckpttool.api.checkpoint", "ckpttool.kernels.merge.draws"}

# A source need not be on this machine: files and directories are opened, listed and looked at through
# `storage/place.py`. Beside what reads and writes for it, these modules do without: rewriting a file in place, DST,
# what the package itself or the command line brings along, standard streams, and hints on paths of this machine.
LOCAL_ROWS = {"storage", "execute", "cli", "report", "recipe"}
LOCAL_MODULES = {
    "ckpttool.core.files",
    "ckpttool.formats.registry",
    "ckpttool.layout.files",
    "ckpttool.layout.ties",
    "ckpttool.ops.convert_json.check",
    "ckpttool.execute.durable",
    "ckpttool.ops.inspect.header",
}
LOCAL_OS = {"open", "pread", "preadv", "scandir", "listdir", "walk", "stat", "lstat", "fstat", "access", "readlink"}
LOCAL_METHODS = {"read_bytes", "read_text", "stat", "lstat", "iterdir", "glob", "rglob", "samefile", "fileno"}

# Each of these runs what it reads.
BANNED_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
BANNED_CALLS = {"eval", "exec"}

# `ckpttool --help` and a reshard have no use for these. (pydantic is not among them: Typer itself loads it to read a
# command's parameters.)
# What reaches other machines is loaded when there is one.
NETWORK = (
    "huggingface_hub",
    "http.client",
    "urllib3",
    "ssl",
    "boto3",
    "botocore",
    "google.auth",
    "azure.storage.blob",
    "httpx2",
)
# And engines, and what several machines or processes need, where there are several: all of these folders but this.
SHARED_FOLDERS = tuple(f"ckpttool.execute.{name}" for name in ("destinations", "fleets", "machines", "parts"))
ALONE = tuple(f"ckpttool.execute.destinations{name}" for name in ("", ".base", ".local"))


def modules_below(root: Path, *folders: str) -> set[str]:
    """The folders of a checkout and all modules in them, by dotted name."""
    names = set()
    for folder in folders:
        base = root.joinpath(*folder.split("."))
        for path in [base, *base.rglob("*.py")]:
            names.add(".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"))
    return names


SHARED = ("ray", *sorted(modules_below(ROOT, *SHARED_FOLDERS) - set(ALONE)))
HEAVY_FOR_HELP = ("torch", "numpy", "yaml", "safetensors", "ml_dtypes", "rich", *NETWORK, *SHARED)
REPORT = ("ckpttool.execute.measuring", "ckpttool.ops.merge.card", "ckpttool.report.page")
"""What is loaded for a report or a model card only."""
HEAVY_FOR_RESHARD = ("torch", "transformers", "safetensors", *NETWORK, *SHARED, *REPORT)


@dataclass(frozen=True, slots=True)
class Source:
    """One file of the package."""

    module: str
    """Dotted name; a package is named like its folder."""
    path: Path
    tree: ast.Module


@dataclass(frozen=True, slots=True)
class Import:
    """One name that a file imports."""

    target: str
    """Absolute dotted name of a module, or of a name inside one."""
    line: int
    at_start: bool
    """Whether it runs when the module is imported (not in a function, not under TYPE_CHECKING)."""


@cache
def sources(root: Path) -> list[Source]:
    """Every module of the package below `root`."""
    found = []
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = list(path.relative_to(root).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        found.append(Source(".".join(parts), path, ast.parse(path.read_text(encoding="utf-8"), str(path))))
    return found


def is_type_checking(test: ast.expr) -> bool:
    """Whether the condition of an `if` is `TYPE_CHECKING` or `typing.TYPE_CHECKING`."""
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", None)
    return name == "TYPE_CHECKING"


@cache
def walked(source: Source) -> list[tuple[ast.AST, bool]]:
    """Every node of a file, and whether it runs when the module is imported. The file is walked once for all checks."""
    found: list[tuple[ast.AST, bool]] = [(source.tree, True)]
    for node, at_start in found:  # it grows meanwhile
        # Decorators and defaults run at import; nobody imports there, so the whole function counts as later.
        below = at_start and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(node, ast.If) and is_type_checking(node.test):
            found += [(child, False) for child in node.body]
            found += [(child, below) for child in (node.test, *node.orelse)]
        else:
            children = ast.iter_child_nodes(node)
            found += [(child, below) for child in children if not isinstance(child, ast.expr_context)]
    return found


@cache
def nodes(source: Source) -> list[ast.AST]:
    """Every node of a file."""
    return [node for node, _ in walked(source)]


@cache
def imports(source: Source) -> list[Import]:
    """Every import of a file, wherever it stands, with relative ones made absolute."""
    package = source.module.split(".")
    if source.path.name != "__init__.py":
        package.pop()
    found: list[Import] = []
    for node, at_start in walked(source):
        if isinstance(node, ast.Import):
            found += [Import(name.name, node.lineno, at_start) for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            found += [Import(f"{prefix}.{name.name}", node.lineno, at_start) for name in node.names]
        elif isinstance(node, ast.Call) and node.args:
            function = getattr(node.func, "attr", getattr(node.func, "id", None))
            target = getattr(node.args[0], "value", None)
            if function in {"import_module", "__import__"} and isinstance(target, str):
                found.append(Import(target, node.lineno, at_start))
    return sorted(found, key=lambda i: i.line)


def top(dotted: str) -> str:
    """The first part of a dotted name."""
    return dotted.partition(".")[0]


def row_name(module: str) -> str:
    """The name by which a module of the package stands in ROWS."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def resolve(target: str, modules: set[str]) -> str:
    """The module that an imported name belongs to: the name itself, or what it is a member of."""
    while target not in modules and "." in target:
        target = target.rpartition(".")[0]
    return target


def order_problems(found: list[Source]) -> Iterator[str]:
    """Imports against the order of ROWS, and modules that have no row."""
    modules = {source.module for source in found}
    for source in found:
        own = row_name(source.module)
        if own not in ROW_OF:
            yield f"{source.module}: has no row in the order"
            continue
        for imported in imports(source):
            if top(imported.target) != PACKAGE:
                continue
            target = resolve(imported.target, modules)
            row = row_name(target)
            if ROW_OF.get(row, len(ROWS)) > ROW_OF[own]:
                yield f"{source.module}:{imported.line}: imports {imported.target}, which stands below it"
            elif row != own and ROW_OF.get(row) == ROW_OF[own] and {row, own} != {"api", "__init__"}:
                yield f"{source.module}:{imported.line}: imports {imported.target}, which stands beside it"


def format_problems(found: list[Source]) -> Iterator[str]:
    """Formats that import another format, or the registry that lists them all."""
    modules = {source.module for source in found}
    prefix = f"{PACKAGE}.formats"
    for source in found:
        if not source.module.startswith(prefix + "."):
            continue
        own = source.module.split(".")[2]
        if own == "registry":
            continue
        for imported in imports(source):
            target = resolve(imported.target, modules)
            if target in (prefix, f"{prefix}.registry"):
                yield f"{source.module}:{imported.line}: a format imports the registry of formats"
            elif target.startswith(prefix + "."):
                other = target.split(".")[2]
                if other != own and other not in SHARED_FORMATS and target not in SHARED_FACES:
                    yield f"{source.module}:{imported.line}: a format imports another format, {target}"


# Fields of ``formats.base.Capabilities`` that one format alone sets. The set may only shrink: what one format does
# differently is a method of its class.
ONE_SETTER = {
    "keeps_form",
    "local_layers",
    "ragged_experts",
}

# Names without leading underscores that more than one class has. It may only fall, below 30 at last: lower it to what
# `python scripts/count_class_names.py` prints whenever that is less.
MOST_SHARED_NAMES = 5

# Statements of a function, without its signature and docstring, and its parameters.
LONGEST_BODY = 80
MOST_PARAMETERS = 10


def size_problems(found: list[Source]) -> Iterator[str]:
    """Functions of too many lines (comments and blank lines count), and with too many parameters.

    Options of the command line and the keyword arguments of the Python API are as many as they are.
    """
    for source in found:
        for node in nodes(source):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            first = node.body[1 if ast.get_docstring(node) and len(node.body) > 1 else 0]
            lines = (node.end_lineno or 0) - first.lineno + 1
            if lines > LONGEST_BODY:
                yield f"{source.module}:{node.lineno}: {node.name} has {lines} lines"
            given = node.args
            keywords = given.kwonlyargs if row_name(source.module) != "api" else []
            parameters = len([*given.posonlyargs, *given.args, *keywords])
            if parameters > MOST_PARAMETERS and row_name(source.module) != "cli":
                yield f"{source.module}:{node.lineno}: {node.name} has {parameters} parameters"


def command_problems(found: list[Source]) -> Iterator[str]:
    """Commands that import another command: what two of them need stands below both."""
    modules = {source.module for source in found}
    prefix = f"{PACKAGE}.ops."
    for source in found:
        for imported in imports(source):
            target = resolve(imported.target, modules)
            if not (source.module.startswith(prefix) and target.startswith(prefix)):
                continue
            if source.module.split(".")[2] != target.split(".")[2]:
                yield f"{source.module}:{imported.line}: a command imports another command, {target}"


def circle_problems(found: list[Source]) -> Iterator[str]:
    """Modules of one room that import each other, directly or over others. Between rooms the order leaves none."""
    modules = {source.module for source in found}
    room: dict[str, set[str]] = {}
    for module in modules:
        room.setdefault(row_name(module), set()).add(module)
    graph = {
        s.module: {resolve(i.target, modules) for i in imports(s)} & room[row_name(s.module)] - {s.module}
        for s in found
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as e:
        yield f"a circle of imports: {' <- '.join(e.args[1])}"


def folder_circle_problems(found: list[Source]) -> Iterator[str]:
    """Folders inside one room that import each other, directly or over modules beside them.

    Imports of ``a.b.c`` by ``a.d.e`` count for ``a.b`` and ``a.d``. Circles of modules alone are said by
    ``circle_problems``.
    """
    modules = {source.module for source in found}
    folders = {module.rpartition(".")[0] for module in modules}
    graphs: dict[str, dict[str, set[str]]] = {}
    for source in found:
        own = source.module.split(".")
        for imported in imports(source):
            target = resolve(imported.target, modules).split(".")
            depth = next((i for i, (a, b) in enumerate(zip(own, target, strict=False)) if a != b), len(own))
            if 2 <= depth < min(len(own), len(target)):
                graph = graphs.setdefault(".".join(own[:depth]), {})
                graph.setdefault(".".join(own[: depth + 1]), set()).add(".".join(target[: depth + 1]))
    for graph in graphs.values():
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as e:
            if not folders.isdisjoint(e.args[1]):
                yield f"a circle of folders: {' <- '.join(e.args[1])}"


def single_setters(found: list[Source]) -> set[str]:
    """The fields of ``Capabilities`` that one format alone gives: each is the name of that format in disguise."""
    formats = [source for source in found if row_name(source.module) == "formats"]
    calls = [n for source in formats for n in nodes(source) if isinstance(n, ast.Call)]
    given = [
        keyword.arg
        for call in calls
        if getattr(call.func, "attr", getattr(call.func, "id", None)) == "Capabilities"
        for keyword in call.keywords
    ]
    return {name for name in given if name is not None and given.count(name) == 1}


def capability_problems(found: list[Source]) -> Iterator[str]:
    """Capabilities of one format, other than those that are known."""
    for name in sorted(single_setters(found) - ONE_SETTER):
        yield f"{PACKAGE}.formats: the capability {name} has one setter: make it a method of that format"


def class_name_problems(found: list[Source]) -> Iterator[str]:
    """More names for several classes than there were."""
    names = Counter(name for source in found for name, _ in count_class_names().classes(nodes(source), ""))
    shared = [name for name, classes in names.items() if classes > 1]
    if len(shared) > MOST_SHARED_NAMES:
        yield (
            f"{len(shared)} names stand for several classes, {MOST_SHARED_NAMES} at most:"
            " rename new ones (python scripts/count_class_names.py -v)"
        )


@cache
def count_class_names() -> ModuleType:
    """The script of that name."""
    spec = spec_from_file_location("count_class_names", ROOT / "scripts/count_class_names.py")
    assert spec is not None
    assert spec.loader is not None
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def rich_problems(found: list[Source]) -> Iterator[str]:
    """Uses of rich outside report."""
    for source in found:
        for imported in imports(source):
            if top(imported.target) == "rich" and row_name(source.module) != "report":
                yield f"{source.module}:{imported.line}: only report imports rich"


def torch_problems(found: list[Source]) -> Iterator[str]:
    """Imports of torch when a module is loaded, or outside the Python API."""
    for source in found:
        for imported in imports(source):
            if top(imported.target) != "torch":
                continue
            if imported.at_start:
                yield f"{source.module}:{imported.line}: imports torch when it is loaded"
            elif source.module not in TORCH_MODULES:
                yield f"{source.module}:{imported.line}: torch belongs to the Python API only"


def execution_problems(found: list[Source]) -> Iterator[str]:
    """Modules and calls that run what they read."""
    for source in found:
        for imported in imports(source):
            if top(imported.target) in BANNED_MODULES:
                yield f"{source.module}:{imported.line}: imports {top(imported.target)}, which runs what it reads"
        for node in nodes(source):
            if not isinstance(node, ast.Call):
                continue
            if isinstance(node.func, ast.Name) and node.func.id in BANNED_CALLS:
                yield f"{source.module}:{node.lineno}: calls {node.func.id}"
            for keyword in node.keywords:
                allowed = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg == "allow_pickle" and not allowed:
                    yield f"{source.module}:{node.lineno}: lets numpy unpickle"


def declared_names(found: list[Source], row: str) -> set[str]:
    """What the classes of a row are called: the constants that they assign to `name`."""
    return {
        node.value.value
        for source in found
        if row_name(source.module) == row
        for owner in nodes(source)
        if isinstance(owner, ast.ClassDef)
        for node in owner.body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        and [getattr(t, "id", "") for t in node.targets] == ["name"]
    } - {""}


def name_problems(found: list[Source]) -> Iterator[str]:
    """Comparisons with the name of a format or a dialect, where the format or the dialect itself should be asked."""
    names = {kind: declared_names(found, f"{kind}s") for kind in ("format", "dialect")}
    for source in found:
        if row_name(source.module) in {"formats", "dialects", "cli"}:
            continue
        for node in nodes(source):
            if isinstance(node, ast.Compare):
                sides: list[ast.AST] = [node]
            elif isinstance(node, ast.Match):
                sides = [node.subject, *(case.pattern for case in node.cases)]
            else:
                continue
            inside = [part for side in sides for part in ast.walk(side)]
            texts = {part.value for part in inside if isinstance(part, ast.Constant) and isinstance(part.value, str)}
            of_dialect = any("dialect" in (getattr(part, "attr", ""), getattr(part, "id", "")) for part in inside)
            for kind, own in names.items():
                if texts & own or (of_dialect and texts and kind == "dialect"):
                    yield f"{source.module}:{node.lineno}: compares with the name of a {kind}"
                    break


def face_problems(found: list[Source]) -> Iterator[str]:
    """Imports from outside of what lies below the face of a package of formats."""
    modules = {source.module for source in found}
    for source in found:
        if row_name(source.module) == "formats":
            continue
        for imported in imports(source):
            target = resolve(imported.target, modules).split(".")
            if target[:2] == [PACKAGE, "formats"] and len(target) > 3:
                yield f"{source.module}:{imported.line}: imports {imported.target}, below the face of {target[2]}"


def place_problems(found: list[Source]) -> Iterator[str]:
    """Sources that are taken for files of this machine. (mypy sees to the rest: a `Remote` has no such methods.)"""
    for source in found:
        if row_name(source.module) in LOCAL_ROWS or source.module in LOCAL_MODULES:
            continue
        for node in nodes(source):
            match node:
                case ast.Call(func=ast.Name(id="open")):
                    called = "open"
                case ast.Attribute(value=ast.Name(id="os"), attr=attr) if attr in LOCAL_OS:
                    called = f"os.{attr}"
                case ast.Call(func=ast.Attribute(attr=attr)) if attr in LOCAL_METHODS:
                    called = attr
                case ast.ImportFrom(module="os", names=names) if not LOCAL_OS.isdisjoint(n.name for n in names):
                    called = "os"
                case _:
                    continue
            yield f"{source.module}:{node.lineno}: {called} goes past storage/place.py"


CHECKS = (
    order_problems,
    format_problems,
    command_problems,
    face_problems,
    name_problems,
    circle_problems,
    folder_circle_problems,
    capability_problems,
    class_name_problems,
    size_problems,
    rich_problems,
    torch_problems,
    execution_problems,
    place_problems,
)


def test_package() -> None:
    """One test: several processes of a run would each parse the whole package."""
    gc.disable()  # a million nodes and no garbage
    try:
        found = sources(ROOT)
        assert len(found) > 1, "the package was not found"
        problems = [f"{check.__name__}: {problem}" for check in CHECKS for problem in check(found)]
        mended = ONE_SETTER - single_setters(found)
    finally:
        for remembered in (sources, walked, imports, nodes):
            remembered.cache_clear()  # or all later tests would have them in memory
        gc.enable()
    assert not problems, "\n".join(problems)
    assert not mended, "they have no or several setters now: take them out of ONE_SETTER"


def missing_modules(root: Path, named: Iterable[str]) -> list[str]:
    """Of dotted names those of the package that name none of its modules: they moved, and guard nothing."""
    modules = modules_below(root, PACKAGE)
    return sorted(name for name in named if top(name) == PACKAGE and name not in modules)


def test_every_module_named_here_exists() -> None:
    found = [
        *(f"{PACKAGE}.{row}" for row in (*ROW_OF, *LOCAL_ROWS) if row != "__init__"),
        *(f"{PACKAGE}.formats.{name}" for name in SHARED_FORMATS),
        *(*SHARED_FACES, *TORCH_MODULES, *LOCAL_MODULES, *NETWORK, *SHARED, *ALONE, *SHARED_FOLDERS, *REPORT),
    ]
    assert missing_modules(ROOT, found) == []


def test_a_module_that_moved_is_found(tmp_path: Path) -> None:
    write_tree(tmp_path, GOOD)
    named = ["ckpttool.core.plan", "ckpttool.execute.fleetwork", "ray"]
    assert missing_modules(tmp_path, named) == ["ckpttool.execute.fleetwork"]


def has_docstring(path: Path) -> bool:
    """Whether a text is the first thing in a file. Looks no further: parsing every file takes seconds."""
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type not in {tokenize.ENCODING, tokenize.COMMENT, tokenize.NL}:
                return token.type == tokenize.STRING and token.string.startswith('"""') and token.string != '""""""'
    return False


def files_without_docstring(root: Path) -> list[str]:
    """Python files of the project that do not say what they are for."""
    paths = [path for folder in (PACKAGE, "tests", "scripts", "bench") for path in (root / folder).rglob("*.py")]
    return sorted(str(path.relative_to(root)) for path in paths if not has_docstring(path))


def test_every_file_has_a_docstring() -> None:
    assert files_without_docstring(ROOT) == []


# Each bad file, with words that one of the checks must say about it. The files around it are good.
BAD = {
    "order": ("core/geometry.py", "from ckpttool import storage", "stands below it"),
    "order relative": ("core/mesh.py", "from ..planning import Step", "stands below it"),
    "order relative in a folder": ("layout/rules.py", "from ..ops import inspect", "stands below it"),
    "order in a function": ("core/plan.py", "def f():\n    from ckpttool.execute import run", "stands below it"),
    "order for types": (
        "core/dtypes.py",
        "if TYPE_CHECKING:\n    from ckpttool.planning import relate",
        "stands below it",
    ),
    "order by importlib": ("core/mesh.py", "importlib.import_module('ckpttool.ops')", "stands below it"),
    "order of the root": ("ops/merge.py", "import ckpttool", "stands below it"),
    "order of the version": ("execute/__init__.py", "from ckpttool import __version__", "stands below it"),
    "beside": ("adapters.py", "import ckpttool.quant", "stands beside it"),
    "the API": ("report.py", "import ckpttool.api", "stands below it"),
    "no row": ("helpers.py", "X = 1", "has no row"),
    "format": ("formats/hf.py", "from ckpttool.formats import paddle", "imports another format"),
    "format relative": ("formats/hf.py", "def f():\n    from .paddle import read", "imports another format"),
    "format registry": ("formats/vllm.py", "from ckpttool.formats import detect", "the registry"),
    "container": ("containers/torch_zip.py", "from ckpttool.formats.base import File", "stands below it"),
    "package of formats": ("formats/paddle/flex.py", "from ..hf import read", "imports another format"),
    "face": ("ops/merge.py", "from ckpttool.formats.paddle.names import read", "below the face of paddle"),
    "face of a module": (
        "layout/rules.py",
        "def f():\n    from ..formats.paddle import pir",
        "below the face of paddle",
    ),
    "name of a format": ("ops/merge.py", "def f(x):\n    return x.format == 'unified'", "name of a format"),
    "name of several": ("ops/merge.py", "X = [x for x in y if x.format in ('unified', '')]", "name of a format"),
    "name matched": ("ops/merge.py", "match x:\n    case 'unified': y()", "name of a format"),
    "dialect": ("ops/merge.py", "def f(x):\n    return x == 'paddle'", "name of a dialect"),
    "dialect of several": ("checkpoint.py", "X = [x for x in y if x.format not in ('paddle', '')]", "of a dialect"),
    "dialect of a family": ("targeting.py", "X = 1 if stored.dialect == 'vllm' else 2", "name of a dialect"),
    "dialect by its object": ("ops/merge.py", "X = 'hf' != x.dialect.name", "name of a dialect"),
    "dialect matched": ("ops/merge.py", "match x:\n    case 'paddle' | 'hf': y()", "name of a dialect"),
    "command": ("ops/inspect/check.py", "def f():\n    from ..merge import prepare", "imports another command"),
    "command in one file": ("ops/reshard.py", "from ckpttool.ops import merge", "imports another command"),
    "circle": ("ops/inspect/check.py", "def f():\n    from .listing import rows", "a circle of imports"),
    "circle of folders": (
        "execute/machines/node.py",
        "def f():\n    from ..destinations import local",
        "a circle of folders",
    ),
    "circle of a folder and a module": ("execute/machines/node.py", "from .. import engine", "a circle of folders"),
    "capability": (
        "formats/vllm.py",
        "X = base.Capabilities(odd=True, keeps_form=True)",
        "capability odd has one setter",
    ),
    "class names": (
        "core/plan.py",
        "".join(f"class A{i}: pass\nclass _A{i}: pass\n" for i in range(MOST_SHARED_NAMES + 1)),
        "names stand for several classes",
    ),
    "circle for types": ("cli/options.py", "if TYPE_CHECKING:\n    from ckpttool.cli.app import X", "a circle"),
    "long": ("planning/relate.py", 'def f():\n    """Docstring."""\n' + "    f()\n" * 81, "f has 81 lines"),
    "long method": (
        "planning/relate.py",
        "class A:\n    async def f(self):\n" + "        f()\n" * 81,
        "f has 81 lines",
    ),
    "parameters": ("planning/relate.py", "def f(a, b, c, /, d, e, f, *, g, h, i, j, k): pass", "f has 11 parameters"),
    "parameters of the API": ("api/checkpoint.py", "def f(a, b, c, d, e, f, g, h, i, j, k): pass", "11 parameters"),
    "rich": ("ops/inspect/code.py", "def f():\n    import rich.table", "only report imports rich"),
    "torch at start": ("api/checkpoint.py", "import torch.nn", "imports torch when it is loaded"),
    "torch in a class": (
        "api/checkpoint.py",
        "class A:\n    try:\n        import torch\n    except E: pass",
        "when it is loaded",
    ),
    "torch elsewhere": ("ops/merge.py", "def f():\n    import torch", "belongs to the Python API"),
    "torch by name": ("core/plan.py", "def f():\n    __import__('torch')", "belongs to the Python API"),
    "open": ("formats/hf.py", "def f(path):\n    return open(path, 'rb')", "goes past storage/place.py"),
    "os.open": ("containers/safetensors.py", "import os\nfd = os.open('x', os.O_RDONLY)", "os.open goes past"),
    "os by name": ("formats/ranks.py", "from os import scandir", "os goes past"),
    "os under another name": ("formats/ranks.py", "import os\nlist_names = os.listdir", "os.listdir goes past"),
    "read_bytes": ("vocabulary.py", "def f(root):\n    return (root / 'x').read_bytes()", "read_bytes goes past"),
    "stat": ("ops/inspect.py", "size = [p.stat().st_size for p in paths]", "stat goes past"),
    "fileno": ("formats/hf.py", "def f(place):\n    return place.open('rb').fileno()", "fileno goes past"),
    "pickle": ("formats/hf.py", "import pickle", "imports pickle"),
    "marshal": ("formats/hf.py", "def f():\n    from marshal import loads", "imports marshal"),
    "eval": ("planning/relate.py", "def f(x):\n    return eval(x)", "calls eval"),
    "exec": ("planning/relate.py", "exec('x')", "calls exec"),
    "numpy": ("formats/hf.py", "numpy.load(f, allow_pickle=True)", "lets numpy unpickle"),
}

GOOD = {
    "__init__.py": "from .version import V\ndef __getattr__(name):\n    from ckpttool import api\n    import torch",
    "errors.py": "class Error(Exception): pass",
    "version.py": "V = '1'",
    "core/dtypes.py": "from ckpttool.errors import Error",
    "core/geometry.py": "from .. import errors",
    "core/mesh.py": "import ckpttool.errors",
    "core/catalog.py": "from .geometry import Box",
    "formats/__init__.py": "def read():\n    from . import hf, paddle",
    "formats/base.py": "from ckpttool.core.catalog import Catalog\nfrom ckpttool.version import V",
    "storage/listing.py": "from ckpttool.errors import Error",
    "containers/safetensors.py": "from ckpttool.storage.listing import Listing",
    "formats/dcp.py": "X = Capabilities(keeps_form=True)",
    "formats/config.py": "from re import compile",
    "formats/hf.py": "from ckpttool.containers.safetensors import read\nfrom .config import field",
    "formats/paddle/__init__.py": "from . import names",
    "formats/paddle/names.py": "from .. import base\nfrom . import pir",
    "formats/paddle/pir.py": "class Unified:\n    name = 'unified'\nX = x.format == 'unified'",
    "layout/rules.py": "from ..formats.base import File",
    "dialects/paddle.py": "class Paddle:\n    name = 'paddle'\nX = x.dialect == 'paddle'",
    "targeting.py": "X = a.dialect.name == b.dialect.name",
    "planning/relate.py": "from re import compile",
    "core/plan.py": "from ckpttool.core.geometry import Box",
    "quant.py": "from ckpttool.core.geometry import Box",
    "execute/__init__.py": "from ..core.plan import Plan",
    "execute/destinations/local.py": "from ckpttool.execute.machines.shares import cut",
    "execute/engine.py": "from ckpttool.execute.destinations import local",
    "execute/machines/shares.py": "from ckpttool.core.plan import Plan",
    "targeting/build.py": "from ckpttool.core.plan import Plan",
    "ops/inspect/check.py": "from ckpttool.core.plan import Plan",
    "ops/inspect/listing.py": "from .check import check",
    "ops/merge.py": "from ckpttool.targeting.build import plan\nnumpy.load(f, allow_pickle=False)",
    "report.py": "from ckpttool.ops.inspect.check import Result\ndef f():\n    import rich",
    "api/checkpoint.py": "from ckpttool.ops import merge\nif TYPE_CHECKING:\n    import torch\ndef f(): import torch",
    "api/commands.py": 'def merge(*, a, b, c, d, e, f, g, h, i, j, k):\n    """Docstring."""\n' + "    f()\n" * 80,
    "cli/__init__.py": "from ckpttool.cli.app import main",
    "cli/app.py": "from ckpttool.cli.reshard import reshard\nfrom ckpttool.version import V",
    "cli/reshard.py": "from ckpttool.cli import options\ndef f():\n    from ckpttool import report",
    "cli/options.py": "FORMATS = ''\ndef f(a, b, c, d, e, f, g, h, i, j, k): pass",
    "__main__.py": "from ckpttool.cli import main",
}


def write_tree(root: Path, files: dict[str, str]) -> None:
    """A package of these files."""
    for name, text in files.items():
        path = root / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def problems_of(root: Path) -> list[str]:
    """What all checks say about the package below `root`."""
    found = sources(root)
    return [problem for check in CHECKS for problem in check(found)]


def test_checks_accept_a_good_package(tmp_path: Path) -> None:
    write_tree(tmp_path, GOOD)
    assert problems_of(tmp_path) == []


@pytest.mark.parametrize("case", BAD)
def test_checks_find_a_bad_import(tmp_path: Path, case: str) -> None:
    name, text, words = BAD[case]
    write_tree(tmp_path, GOOD | {name: text})
    problems = problems_of(tmp_path)
    assert len(problems) == 1, problems
    assert words in problems[0]


def test_docstring_check_finds_a_bare_file(tmp_path: Path) -> None:
    write_tree(tmp_path, {"good.py": '"""Says why."""\n', "bad.py": "# a comment is none\nX = 1\n"})
    assert files_without_docstring(tmp_path) == ["ckpttool/bad.py"]


# Runs the tool as its console script does and says which of the given modules that has loaded.
PROBE = """
import json, sys
from ckpttool.cli import main

heavy, runs = json.loads(sys.argv[1])
for arguments in runs:
    sys.argv = ["ckpttool", *arguments]
    try:
        status = main()
    except SystemExit as stop:
        status = stop.code
    print(json.dumps([arguments, status or 0, [name for name in heavy if name in sys.modules]]), file=sys.stderr)
"""


def loaded_by(heavy: tuple[str, ...], runs: list[list[str]], cwd: Path) -> list[tuple[list[str], int, list[str]]]:
    """For each run of the tool, in one process: its arguments, exit status and which heavy modules are there after."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps([heavy, runs])],
        cwd=cwd,
        # Without this a machine's own setting could hide what the tool does by itself.
        env={name: value for name, value in os.environ.items() if not name.startswith(("TYPER_", "PYTHON"))}
        | {"PYTHONPATH": str(ROOT)},  # this checkout, wherever the package is installed from
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("[[")]
    assert len(lines) == len(runs), done.stderr
    return [tuple(json.loads(line)) for line in lines]


def test_help_loads_nothing_heavy(tmp_path: Path) -> None:
    from typer.main import get_command

    from ckpttool.cli.app import app

    commands = getattr(get_command(app), "commands", {})
    assert {"reshard", "merge", "drop-keys", "inspect", "quantize", "size"} <= commands.keys()
    runs = [["--help"], *([name, "--help"] for name in commands)]
    for arguments, status, heavy in loaded_by(HEAVY_FOR_HELP, runs, tmp_path):
        assert (status, heavy) == (0, []), f"ckpttool {' '.join(arguments)}"


def test_writers_load_neither_torch_nor_what_reaches_other_machines(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "fixtures" / "llama_tp8", tmp_path / "src")
    for name in ("ft1", "ft2", "base"):
        shutil.copytree(ROOT / "fixtures/merge/inputs" / name, tmp_path / name)
    ties = ["--method", "dare_ties", "--weights", "1,1", "--param", "density=0.5", "--base", "base"]
    runs = [
        ["reshard", "src", "dst1", "--tp-out", "2"],
        ["merge", "ft1", "ft2", "-o", "dst2", *ties],
        ["drop-keys", "ft1", "dst3", "lm_head.weight"],
        ["quantize", "ft1", "dst4", "--recipe", "nvfp4"],
        ["quantize", "dst4", "dst5", "--to", "bf16"],
        ["size", "dst4", "--tp-out", "2"],
    ]
    # Seen from the inside (what is loaded after the run) and from the effect (there is an output).
    assert loaded_by(HEAVY_FOR_RESHARD, runs, tmp_path) == [(arguments, 0, []) for arguments in runs]
    for i in (1, 2, 3, 4, 5):
        assert any((tmp_path / f"dst{i}").iterdir())


MOST_RETURNS = {"llama_tp8 --tp-out 2": 14, "paddle_zcc/ep2_tp2_sharding2_ema --to unified --tp-out 1": 19}
"""How often a reshard of a fixture returns to a room that it was in before. The numbers may only fall;
`python scripts/count_room_moves.py -v -- ARGUMENTS` has stars at them. Group what is asked of one room."""


@pytest.mark.parametrize("command", MOST_RETURNS)
def test_a_reshard_goes_only_down_and_seldom_back(tmp_path: Path, command: str) -> None:
    """Until its plan is made, no room calls one that stands below it in ROWS: nothing is handed down to be called."""
    script = ROOT / "scripts/count_room_moves.py"
    source, *flags = command.split()
    arguments: list[Path | str] = [
        sys.executable,
        script,
        "-v",
        "--",
        ROOT / "fixtures" / source,
        tmp_path / "dst",
        *flags,
    ]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    found = re.search(r" moves between rooms, (\d+) of them upwards, (\d+) returns\n$", done.stdout)
    assert found, done.stdout + done.stderr
    assert int(found[1]) == 0, done.stdout
    assert 0 < int(found[2]) <= MOST_RETURNS[command], done.stdout
