"""The Hugging Face Hub's cache on this machine, as huggingface_hub keeps it. It is only read here.

    models--ORG--NAME/refs/main                    the commit that a branch or tag was when it was last asked for
                      trees/COMMIT.json            all files of a commit: sizes, and what their bytes are called
                      snapshots/COMMIT/NAME        ../../blobs/BLOB, or the file itself where links cannot be made
                      blobs/BLOB                   named by what it holds: see ``Listed.blob``

Source: https://huggingface.co/docs/huggingface_hub/guides/manage-cache, and huggingface_hub 0.34 to 2.4 (``trees`` is
new in 2; a commit that an older version fetched has none).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ckpttool.errors import CorruptError

COMMIT = re.compile(r"[0-9a-f]{40}")
"""A commit's full name."""
_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_TREE_FORMAT = 1
MAX_TREE = 256 << 20
"""Bytes of a listing; larger ones are asked for again."""


class Listed(NamedTuple):
    """A file of a commit."""

    size: int
    blob: str
    """What its bytes are called: their sha256 where git keeps a pointer only (LFS, Xet), otherwise git's sha1."""
    large: bool = False
    """Whether git keeps a pointer only."""


Tree = Mapping[str, Listed]
"""All files of a commit, by their names with slashes."""


def listed(entry: Mapping[str, Any], lfs: Mapping[str, Any] | None) -> Listed:
    """A file as a listing has it. Raises ValueError for one that makes no sense.

    Git's own size and sha1 are those of the pointer, where there is one: what is said of the file counts.
    """
    size, blob = (lfs["size"], lfs["oid"]) if lfs else (entry["size"], entry["oid"])
    if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size < 1 << 63:
        raise ValueError("a size is not a number of bytes")
    if not isinstance(blob, str) or len(blob) != (64 if lfs else 40) or not _BLOB.fullmatch(blob):
        raise ValueError("what its bytes are called is not a hash")
    return Listed(size, blob, large=bool(lfs))


def checked(files: Iterable[tuple[str, Listed]], where: str) -> Tree:
    """The files of a commit. Raises CorruptError for names that lead out of it or that are there twice."""
    tree: dict[str, Listed] = {}
    folders: set[str] = set()
    for name, file in files:
        parts = name.split("/")
        if any(p in ("", ".", "..") for p in parts) or "\0" in name:
            shown = ascii(name)[1:-1][:120]
            raise CorruptError(
                f"the listing of the repository has the name `{shown}`, which leads out of it",
                where=where,
                hint="do not download it: such a listing was made to do harm",
            )
        if name in tree:
            raise CorruptError(f"the listing of the repository has `{name}` twice", where=where)
        tree[name] = file
        folders.update("/".join(parts[:i]) for i in range(1, len(parts)))
    if both := next((n for n in folders if n in tree), None):
        raise CorruptError(f"the listing of the repository has `{both}` as a file and as a folder", where=where)
    return tree


class Cache(NamedTuple):
    """What of a repository is on this machine."""

    root: Path

    @classmethod
    def of(cls, repo: str, home: str) -> Cache:
        return cls(Path(home, f"models--{repo.replace('/', '--')}"))

    def commit(self, revision: str) -> str | None:
        """The commit that a branch or tag was when it was last asked for."""
        try:
            text = (self.root / "refs" / revision).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            return None
        return text if COMMIT.fullmatch(text) else None

    def tree(self, commit: str) -> Tree | None:
        """All files of a commit; None where the list is not here, or of another version."""
        path = self.root / "trees" / f"{commit}.json"
        try:
            with path.open("rb") as f:
                data = json.loads(f.read(MAX_TREE))
            if data["format_version"] != _TREE_FORMAT:
                return None
            return checked(((str(n), _cached(info)) for n, info in data["files"].items()), str(path))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, CorruptError):
            return None  # the Hub has it, too

    def find(self, commit: str, name: str, file: Listed) -> Path | None:
        """Where the bytes of a file are: whatever commit brought them here, and under whatever name."""
        for path in (self.root / "blobs" / file.blob, self.root / "snapshots" / commit / name):
            try:
                if path.stat().st_size == file.size and path.is_file() and _target(path) in ("", file.blob):
                    return path
            except OSError:
                continue
        return None

    def fetched(self, commit: str) -> Tree:
        """The files of a commit that are here, by what is here alone."""
        root = self.root / "snapshots" / commit
        return checked(((n, f) for n in _files(root) if (f := _on_disk(root / n))), str(root))


def _cached(info: Mapping[str, Any]) -> Listed:
    lfs = {"size": info.get("lfs_size", info["size"]), "oid": info["lfs_sha256"]} if info.get("lfs_sha256") else None
    return listed({"size": info["size"], "oid": info["blob_id"]}, lfs)


def _files(root: Path, below: str = "") -> Iterator[str]:
    try:
        entries = sorted(os.scandir(root / below), key=lambda e: e.name)
    except OSError:
        return
    for e in entries:
        if e.is_dir(follow_symlinks=False):
            yield from _files(root, f"{below}{e.name}/")
        else:
            yield below + e.name


def _on_disk(path: Path) -> Listed | None:
    """A file of a snapshot; None for a link that leads nowhere."""
    try:
        stat = path.stat()
        blob = _target(path) or f"{stat.st_mtime_ns}"
    except OSError:
        return None
    return Listed(stat.st_size, blob, large=len(blob) == 64)


def _target(path: Path) -> str:
    """Which blob a link leads to; empty for what is no link, or leads to something else."""
    name = os.path.basename(os.readlink(path)) if path.is_symlink() else ""  # noqa: PTH115, PTH119
    return name if _BLOB.fullmatch(name) else ""
