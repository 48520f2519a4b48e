"""A source directory, listed once: its files in natural order, and links that lead out of it."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

from ckpttool.core.files import Place
from ckpttool.core.words import natural
from ckpttool.errors import CkptError, ConflictError, CorruptError, UsageError
from ckpttool.storage.identify import identify, sniff
from ckpttool.storage.json_file import TooLargeError, load_json
from ckpttool.storage.place import is_link, scan

COMPANION_LIMIT = 64 << 20
"""Bytes; larger files beside a checkpoint that are not its tensors are left where they are, and said so."""

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pdparams", ".pdopt", ".pdckpt", ".pdtensor", ".pd", ".distcp")
"""Suffixes of files of tensors that loaders unpickle."""
WEIGHTS = (".safetensors", ".gguf", ".onnx", ".h5", *PICKLES)
"""Suffixes of files that hold tensors."""


INDEX = re.compile(r"(?P<stem>.+)\.safetensors\.index(?:\.(?P<variant>[A-Za-z]\w*))?\.json\Z")
"""Names of indexes; that of a variant has its word before ``.json``: ``model.safetensors.index.fp16.json``."""


@dataclass(frozen=True, slots=True)
class Listing:
    """A source directory (or single file), listed once."""

    root: Place
    names: tuple[str, ...]
    """Plain files directly in it, sorted by natural order."""
    single: str = ""
    """The file that SRC names, when it is a weight file or an index and not a directory."""
    away: Mapping[str, str] = field(default_factory=dict)
    """Links that lead out of the directory to files without tensors, and where: these are not read (``leads_away``)."""

    _inside: dict[str, Listing] = field(default_factory=dict, repr=False, compare=False)
    """The listings that ``inside`` has made: every format asks for the same directories."""

    def path(self, name: str) -> Place:
        return self.root / name

    def folders(self) -> list[str]:
        """The directories directly in it, in natural order; [] when SRC is a file, or where it cannot be listed."""
        if self.single:
            return []
        try:
            return sorted((e.name for e in scan(self.root) if e.is_dir()), key=natural)
        except OSError:  # a directory inside SRC that is not ours to read, or that has gone since
            return []

    def inside(self, folder: str) -> Listing:
        """The listing of a directory in it; without files where that fails (a link to itself, no permission)."""
        if folder not in self._inside:
            try:
                self._inside[folder] = list_source(self.root / folder)
            except UsageError:
                self._inside[folder] = Listing(self.root / folder, ())
        return self._inside[folder]

    def safetensors(self) -> list[str]:
        return [n for n in self.names if n.endswith(".safetensors")]

    def match(self, pattern: str) -> list[tuple[str, re.Match[str]]]:
        """Files whose whole name the regular expression matches."""
        rx = re.compile(pattern + r"\Z")
        return [(n, m) for n in self.names if (m := rx.match(n))]

    def json(self, name: str) -> dict[str, Any]:
        """A JSON object beside the weights; {} when there is none.

        Raises CorruptError when it is not valid, ConflictError for a link that leads away.
        """
        if name in self.away:
            refuse_away(self.path(name), self.away[name])
        if name not in self.names:
            return {}
        path = self.path(name)
        try:
            data = load_json(path)
        except OSError as e:
            raise CorruptError(f"{name} cannot be read: {e.strerror}", where=str(path)) from None
        except ValueError as e:
            with path.open("rb") as f:
                start = f.read(200)
            unknown = identify(start)
            too_large = isinstance(e, TooLargeError)
            is_what = "is too large" if too_large else "is not valid JSON" if start.strip() else "is empty"
            is_what = f"is {unknown.what}" if unknown else f"{is_what}: {e}" if start.strip() else is_what
            hint = unknown.hint if unknown else "fetch the file again, or correct it"
            raise CorruptError(f"{name} {is_what}", where=str(path), hint=hint) from None
        if not isinstance(data, dict):
            raise CorruptError(f"{name} is not a JSON object", where=str(path))
        return data


def is_index(name: str) -> bool:
    """Whether a file says which tensor is in which other file."""
    return name.endswith(".index.json") or INDEX.match(name) is not None


def list_source(path: Place) -> Listing:
    """List SRC. Raises UsageError when it does not exist."""
    if path.is_file():
        try:
            siblings = _files(path.parent)
        except OSError:
            siblings = [path.name]
        index = is_index(path.name)
        names = [n for n in siblings if index or n == path.name or not n.endswith(WEIGHTS)]
        return _listing(path.parent, names, path.name)
    if not path.exists():
        raise UsageError(
            "the source does not exist", where=str(path), hint=near(path) if isinstance(path, Path) else path.lost()
        )
    try:
        return _listing(path, _files(path))
    except OSError as e:
        hint = None if path.is_dir() else "give a directory or a file; pipes are not read"
        raise UsageError(f"the source cannot be listed: {e.strerror}", where=str(path), hint=hint) from None


def _files(path: Place) -> list[str]:
    return [e.name for e in scan(path) if e.is_file()]


def _listing(root: Place, names: Iterable[str], single: str = "") -> Listing:
    """``single`` is what the user named, wherever it leads."""
    names = sorted(names, key=natural)
    homes = homes_of(root, names)
    away = {n: real for n in names if n != single and (real := _away(root / n, homes))}
    return Listing(root, tuple(n for n in names if n not in away), single, away)


def leads_away(path: Place) -> str:
    """Where a link leads that must not be followed; "" for any other file.

    A checkpoint that came as an archive or a repository may hold ``tokenizer.json -> ~/.ssh/id_rsa``, and what lies
    beside weights is carried into DST, which is then published. So a link that leads out of its directory is followed
    to files of tensors, and to files that lie where the directory's safetensors really are: the blobs of a
    Hugging Face cache, or a checkpoint of which somebody made a second view.
    """
    return _away(path, homes_of(path.parent, _files(path.parent)) if is_link(path) else set())


def refuse_away(path: Place, target: str) -> NoReturn:
    """Raise ConflictError for a link that leads away."""
    raise ConflictError(
        f"{path.name} is a link to a file outside of the checkpoint",
        where=[str(path), target],
        hint="put a copy of the file in its place, if it belongs to the checkpoint",
    )


def _away(path: Place, homes: Collection[str]) -> str:
    if not is_link(path):
        return ""
    real = os.path.realpath(path)
    inside = Path(real).is_relative_to(os.path.realpath(path.parent))
    return "" if inside or str(Path(real).parent) in homes or content(path) else real


def linked_away(root: Place, name: str) -> str:
    """Where a directory in ``root`` really is when that is not below ``root``; "" when it is."""
    real = os.path.realpath(str(root / name))
    return "" if Path(real).is_relative_to(os.path.realpath(str(root))) else real


def homes_of(root: Place, names: Iterable[str]) -> set[str]:
    """The directories in which the safetensors lie that ``root`` has links to, and the blobs of its own hub cache."""
    if not isinstance(root, Path):
        return set()
    links = [root / n for n in names if n.endswith(".safetensors") and (root / n).is_symlink()]
    homes = {str(Path(os.path.realpath(p)).parent) for p in links if content(p) == "safetensors"}
    # models--x/snapshots/<revision>/config.json -> ../../blobs/<hash>, whatever else has been fetched
    snapshots = next((p for p in Path(os.path.realpath(root)).parents if p.name == "snapshots"), None)
    if snapshots is not None and not (blobs := snapshots.parent / "blobs").is_symlink():
        homes.add(str(blobs))
    return homes


def content(path: Place) -> str:
    """The kind of tensors in a file, by its first bytes ("safetensors", "pickle", ...); "" for none that is known."""
    try:
        return sniff(path)
    except CkptError:
        return ""


_UNFINISHED = (".part", ".download", ".incomplete", ".tmp", ".crdownload", ".aria2")


def lost(listing: Listing, name: str = "") -> str:
    """A hint on what became of the weight file ``name``, or of any: a link that leads nowhere, half a download."""
    root = listing.root
    if not isinstance(root, Path) and name and (hint := (root / name).lost()):
        return hint
    for at in ([root / name] if name else sorted(root.glob("*.safetensors"))) if isinstance(root, Path) else ():
        if at.is_symlink() and not at.exists():
            return f"{at.name} is a link to {at.readlink()}, which does not exist: fetch it again"
    for n in listing.names:
        if n.endswith(_UNFINISHED) and n.startswith(name) and ".safetensors" in n:
            return f"the download of {n} has not finished: let it finish, or start it again"
    return ""


def near(path: Place) -> str:
    """A hint on what may have been meant by a path that does not exist; "" where nothing is known."""
    try:
        return _near(path) if isinstance(path, Path) else ""
    except (OSError, ValueError):  # a name that is too long or has a zero byte, a directory that may not be listed
        return ""


def _near(path: Path) -> str:
    import difflib

    text = str(path)
    repository = re.fullmatch(r"(?:huggingface\.co/)?([\w.-]+/[\w.-]+)", text)
    if path.suffix in (".json", ".safetensors", ".yml", ".yaml", *WEIGHTS):
        repository = None
    if text.startswith("~"):
        return "the shell expands ~ only at the start of a word and outside of quotes; or write $HOME"
    if path.is_symlink():
        return f"this is a link to {path.readlink()}, which does not exist"
    if re.search(r"[*?\[]", path.name) and any(path.parent.glob(path.name)):
        return f"give one path: the directory {path.parent}, for example"
    # The first part of the path that does not exist, and what is beside it.
    missing = next(p for p in (*reversed(path.parents), path) if not p.exists())
    if missing == path:
        repository = None  # the directory that should hold it is here
    beside = [p.name for p in islice(missing.parent.iterdir(), 5000)] if missing.parent.is_dir() else []
    if close := difflib.get_close_matches(missing.name, beside, n=1):
        meant = missing.parent / close[0]
        whole = meant / path.relative_to(missing)
        if whole.exists() or not repository:
            return f"did you mean {whole}?" if whole.exists() else f"{missing} does not exist; there is {meant}"
    if repository:
        return f"a model of the Hugging Face Hub is hf://{repository[1]}"
    if missing != path:
        return f"{missing} does not exist either"
    shown = sorted((n for n in beside if not n.startswith(".")), key=natural)
    holder = "the current directory" if missing.parent == Path() else str(missing.parent)
    return f"{holder} holds {', '.join(shown[:5])}{' ...' if len(shown) > 5 else ''}" if shown else f"{holder} is empty"
