"""Files in the subdirectories of a checkpoint: those that belong to the model are copied with it.

``1_Pooling/config.json`` of sentence-transformers, ``additional_chat_templates/``, ``original/params.json``: small
files without tensors are carried under the same relative path. Everything else is left out and reported.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from ckpttool.core.files import DataFile, Place
from ckpttool.core.words import natural
from ckpttool.storage.listing import COMPANION_LIMIT, WEIGHTS, content, homes_of, is_index
from ckpttool.storage.place import is_link, name_below, scan

DEPTH = 4
"""Directories below each other, at most."""
MOST = 1000
"""Files that are carried in all, and entries of one directory tree that are looked at."""

_HIDDEN = "hidden"
_RUN = re.compile(r"(?:(?:tmp-)?checkpoint|ckpt|global_step|step|epoch|iter|run)s?[-_]?\d+|runs|logs|wandb|tensorboard")
"""Directories of trainers: earlier states and logs of the run that made the model."""
_CONFIGS = ("config.json", "adapter_config.json", "trainer_state.json")
_MODELS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".pdparams")


class LeftOut(NamedTuple):
    """A file that is not carried, or a directory of which nothing is."""

    name: str
    """Relative; a directory ends with a slash."""
    why: str
    size: int = -1
    """Bytes; -1 if unknown."""

    def __str__(self) -> str:
        return f"{self.name} ({self.why}{f', {self.size:,} bytes' if self.size >= 0 else ''})"


class SubdirectoryFiles(NamedTuple):
    """Files in subdirectories."""

    carried: tuple[str, ...]
    """Relative paths with forward slashes, in natural order."""
    left: tuple[LeftOut, ...]


def files_below(root: Place, own: Iterable[Place] = (), known: str = "") -> SubdirectoryFiles:
    """Look through the subdirectories of ``root``. Those that hold files of ``own`` are the format's, and passed over.

    Left in ``root`` itself are the files whose names are those of weights, but not of the format (``known``).

    Links to directories are not followed, and links to files only where they stay within the checkpoint (see
    ``leads_away``). What cannot be listed or read is left.
    """
    own = list(own)
    mine = {name.partition("/")[0] for p in own if p.parent != root and (name := name_below(p, root))}
    read = {p.name for p in own if p.parent == root}
    walk = _SubdirectoryWalk(root)
    carried: list[str] = []
    left: list[LeftOut] = []
    for name in sorted(walk.names, key=natural):
        if name.endswith(WEIGHTS) and name not in read and not re.fullmatch(known, name) and (root / name).is_file():
            left.append(walk.weights(name))
        if name in mine or not (root / name).is_dir():
            continue
        found = walk.look(name, MOST - len(carried))
        carried += found.carried
        left += found.left
    return SubdirectoryFiles(tuple(carried), tuple(left))


class _SubdirectoryWalk:
    def __init__(self, root: Place) -> None:
        self.root = root
        self.names = [e.name for e in scan(root)]
        self.homes = homes_of(root, self.names)
        self.seen = 0

    def look(self, name: str, most: int) -> SubdirectoryFiles:
        """The files of one subdirectory; none of them where they are more than ``most``."""
        self.seen = 0
        found = list(self._walk(name, 1))
        if self.seen > MOST or sum(isinstance(f, str) for f in found) > most:
            return SubdirectoryFiles((), (LeftOut(f"{name}/", f"more than {MOST:,} files"),))
        return SubdirectoryFiles(
            tuple([f for f in found if isinstance(f, str)]), tuple([f for f in found if isinstance(f, LeftOut)])
        )

    def weights(self, name: str) -> LeftOut:
        """A file beside the checkpoint that has a name of weights."""
        try:
            return LeftOut(name, "weights", DataFile.at(self.root / name).size)
        except OSError as e:
            return LeftOut(name, f"cannot be read: {e.strerror}")

    def _walk(self, at: str, depth: int) -> Iterator[str | LeftOut]:
        path = self.root / at
        if why := _shunned(path, depth):
            yield LeftOut(f"{at}/", why)
            return
        try:
            names = []
            for e in scan(path):
                names.append(e.name)
                self.seen += 1
                if self.seen > MOST:
                    return
            names.sort(key=natural)
            files = [n for n in names if (path / n).is_file()]
            if _is_checkpoint(files):
                yield LeftOut(f"{at}/", "a checkpoint of its own", sum(DataFile.at(path / n).size for n in files))
                return
        except OSError as e:
            yield LeftOut(f"{at}/", f"cannot be listed: {e.strerror}")
            return
        for name in files:
            if not name.startswith("."):
                yield self._file(f"{at}/{name}")
        for name in names:
            if (path / name).is_dir():
                yield from self._walk(f"{at}/{name}", depth + 1)

    def _file(self, name: str) -> str | LeftOut:
        path = self.root / name
        if is_link(path) and not self._stays(path, name):
            return LeftOut(name, "a link out of the checkpoint")
        try:
            size = DataFile.at(path).size
        except OSError as e:
            return LeftOut(name, f"cannot be read: {e.strerror}")
        if isinstance(path, Path) and not os.access(path, os.R_OK):
            return LeftOut(name, "cannot be read")
        if name.endswith(WEIGHTS) or content(path):
            return LeftOut(name, "weights", size)
        return LeftOut(name, "large", size) if size > COMPANION_LIMIT else name

    def _stays(self, path: Path, name: str) -> bool:
        """Whether a link leads to a file of this checkpoint, or of the one that it is a view of."""
        real = Path(os.path.realpath(path))
        inside = Path(name).parent
        homes: Collection[Path] = [h for home in self.homes for h in (Path(home), Path(home) / inside)]
        return real.is_relative_to(os.path.realpath(str(self.root))) or real.parent in homes


def _shunned(path: Place, depth: int) -> str:
    """The reason to skip a directory, by its name and place alone; "" without one."""
    name = path.name
    if is_link(path):
        return "a link"
    if name.startswith("."):
        return _HIDDEN
    if name == "__pycache__" or name.endswith((".partial", ".json", *WEIGHTS)):
        return "not the model's by its name"
    if _RUN.fullmatch(name):
        return "of a training run"
    return f"more than {DEPTH} directories deep" if depth > DEPTH else ""


def _is_checkpoint(files: Collection[str]) -> bool:
    """A directory with weights and what says how they are used is carried as a whole or not at all."""
    described = any(n in _CONFIGS or is_index(n) for n in files)
    return described and any(n.endswith(_MODELS) for n in files)
