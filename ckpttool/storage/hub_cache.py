"""The Hugging Face Hub's cache on this machine, as huggingface_hub keeps it. It is only read here.

    models--ORG--NAME/refs/main                    the commit that a branch or tag was when it was last asked for
                      trees/COMMIT.json            all files of a commit: sizes, and what their bytes are called
                      snapshots/COMMIT/NAME        ../../blobs/BLOB, or the file itself where links cannot be made
                      blobs/BLOB                   named by what it holds: see ``HubFileInfo.blob``

``try_to_load_from_cache`` of huggingface_hub finds a file by its name in a snapshot, and believes it: it does not see
one that was cut off or that another name brought here. ``get_cached_repo_tree`` is new in 2.

Source: https://huggingface.co/docs/huggingface_hub/guides/manage-cache, and huggingface_hub 0.34 to 2.4 (``trees`` is
new in 2; a commit that an older version fetched has none).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ckpttool.errors import CorruptError

COMMIT = re.compile(r"[0-9a-f]{40}")
"""A commit's full name."""
_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
MAX_TREE = 256 << 20
"""Bytes of a listing; larger ones are asked for again."""


class HubFileInfo(NamedTuple):
    """Size and hash of a file of a commit."""

    size: int
    blob: str
    """The sha256 of its bytes where git keeps a pointer only (LFS, Xet), otherwise git's sha1."""
    large: bool = False
    """Whether git keeps a pointer only."""

    @classmethod
    def of(cls, size: Any, blob: Any, *, large: bool = False) -> HubFileInfo:
        """Checks the fields of a listing. Raises ValueError."""
        if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size < 1 << 63:
            raise ValueError("a size is not a number of bytes")
        if not isinstance(blob, str) or len(blob) != (64 if large else 40) or not _BLOB.fullmatch(blob):
            raise ValueError("the name of a file's bytes is not a hash")
        return cls(size, blob, large)


CommitFiles = Mapping[str, HubFileInfo]
"""All files of a commit, by their names with slashes."""


def checked(files: Iterable[tuple[str, HubFileInfo]], where: str) -> CommitFiles:
    """The files of a commit. Raises CorruptError for names that lead out of it or that are there twice."""
    tree: dict[str, HubFileInfo] = {}
    folders: set[str] = set()
    for name, file in files:
        parts = name.split("/")
        if any(p in ("", ".", "..") for p in parts) or "\0" in name:
            shown = ascii(name)[1:-1][:120]
            raise CorruptError(
                f"the listing of the repository has the name `{shown}`, which leads out of it",
                where=where,
                hint="do not download it: the listing may be malicious",
            )
        if name in tree:
            raise CorruptError(f"the listing of the repository has `{name}` twice", where=where)
        tree[name] = file
        folders.update("/".join(parts[:i]) for i in range(1, len(parts)))
    if both := next((n for n in folders if n in tree), None):
        raise CorruptError(f"the listing of the repository has `{both}` as a file and as a folder", where=where)
    return tree


class HubCache(NamedTuple):
    """The files of a repository on this machine."""

    root: Path

    @classmethod
    def of(cls, repo: str, home: str) -> HubCache:
        return cls(Path(home, f"models--{repo.replace('/', '--')}"))

    def commit(self, revision: str) -> str | None:
        """The commit that a branch or tag was when it was last asked for."""
        try:
            text = (self.root / "refs" / revision).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            return None
        return text if COMMIT.fullmatch(text) else None

    def tree(self, commit: str) -> CommitFiles | None:
        """All files of a commit; None where the list is not here, or of another version."""
        path = self.root / "trees" / f"{commit}.json"
        try:
            with path.open("rb") as f:
                data = json.loads(f.read(MAX_TREE))
            if data["format_version"] != 1:
                return None
            return checked(((str(n), _recorded(info)) for n, info in data["files"].items()), str(path))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, CorruptError):
            return None  # the Hub has it, too

    def find(self, commit: str, name: str, file: HubFileInfo) -> Path | None:
        """The file with these bytes, whatever commit and name brought them here."""
        for path in (self.root / "blobs" / file.blob, self.root / "snapshots" / commit / name):
            try:
                if path.stat().st_size == file.size and path.is_file() and _target(path) in ("", file.blob):
                    return path
            except OSError:
                continue
        return None

    def fetched(self, commit: str) -> CommitFiles:
        """The files in the snapshot of a commit. Links that lead nowhere are not among them."""
        root = self.root / "snapshots" / commit
        found: list[tuple[str, HubFileInfo]] = []
        for directory, _, names in os.walk(root):
            for path in (Path(directory, n) for n in names):
                try:
                    stat = path.stat()
                    blob = _target(path) or str(stat.st_mtime_ns)
                except OSError:
                    continue
                found.append((path.relative_to(root).as_posix(), HubFileInfo(stat.st_size, blob, len(blob) == 64)))
        return checked(sorted(found), str(root))


def _recorded(info: Mapping[str, Any]) -> HubFileInfo:
    if info.get("lfs_sha256"):
        return HubFileInfo.of(info.get("lfs_size", info["size"]), info["lfs_sha256"], large=True)
    return HubFileInfo.of(info["size"], info["blob_id"])


def _target(path: Path) -> str:
    """The blob that a link leads to; "" for another file or link."""
    name = path.readlink().name if path.is_symlink() else ""
    return name if _BLOB.fullmatch(name) else ""
