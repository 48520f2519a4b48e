"""Models of the Hugging Face Hub: ``hf://ORG/NAME[@REVISION][/FOLDER or FILE]``.

A branch is a commit as soon as somebody has looked into it, and the text of a place names that commit from then on.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from ckpttool.core.files import DataFile, OpenFile
from ckpttool.errors import UsageError
from ckpttool.storage.hub_access import OWN_REF, endpoint, origin
from ckpttool.storage.hub_cache import HubFileInfo
from ckpttool.storage.hub_files import HubRevision, forget
from ckpttool.storage.hub_files import revision as find_revision
from ckpttool.storage.network import is_signed
from ckpttool.storage.remote import NamedEntry, RemotePlace, parts
from ckpttool.storage.stream import OnDisk

SCHEME = "hf"
_REVISION = re.compile(r"[^\s~^:?*\[\\\x00-\x1f\x7f]+")
_NAME = re.compile(r"\b[\w.-]{1,96}\b", re.ASCII)
_HOSTS = {"huggingface.co", "www.huggingface.co", "hf.co"}
_VIEWS = {"", "tree", "blob", "resolve", "raw"}
_NOT_MODELS = {"api", "docs", "blog", "papers", "collections", "settings", "organizations", "models"}
_OTHERS = {"datasets": "a dataset", "spaces": "a Space", "buckets": "a bucket", "kernels": "a kernel"}


class HubPlace(RemotePlace):
    """A file or folder of a model repository. Nothing is asked before somebody looks into it."""

    __slots__ = ("_revision", "path")

    def __init__(self, revision: HubRevision, path: str = "") -> None:
        self._revision = revision
        self.path = path
        """The path in the repository, with slashes; "" is the repository itself."""

    @property
    def repo(self) -> str:
        """ORG/NAME."""
        return self._revision.repo.repo

    @property
    def revision(self) -> str:
        """The revision as the user wrote it; "" without one."""
        return self._revision.name

    def written(self, revision: str) -> None:
        """Let the place name this commit or pull request, which has just been written."""
        forget(self.repo)
        self._revision = find_revision(self.repo, revision)

    def __str__(self) -> str:
        return str(self._revision) + (f"/{self.path}" if self.path else "")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HubPlace) and self.path == other.path and self._revision == other._revision

    def __hash__(self) -> int:
        return hash((self.repo, self.path))

    def __reduce__(self) -> tuple[Any, ...]:
        return parse, (str(self),)

    @property
    def name(self) -> str:
        return PurePosixPath(self.path or self.repo).name

    @property
    def parent(self) -> HubPlace:
        return HubPlace(self._revision, self.path.rpartition("/")[0])

    def __truediv__(self, name: str, /) -> HubPlace:
        return HubPlace(self._revision, "/".join([self.path] * bool(self.path) + parts(name)))

    def is_file(self) -> bool:
        return self.path in self._revision.commit.files

    def is_dir(self) -> bool:
        return self.path in self._revision.commit.folders

    def scan(self) -> Iterator[NamedEntry]:
        if not self.is_dir():
            raise self.error(errno.ENOTDIR if self.is_file() else errno.ENOENT)
        for name, is_folder in self._revision.commit.folders[self.path].items():
            yield NamedEntry(name, is_folder)

    def identity(self) -> tuple[int, str]:
        return self._listed()[:2]

    def open_file(self) -> OpenFile:
        file = self._listed()
        info = DataFile(self, file.size, file.blob)
        if path := self._revision.commit.cached(self.path, file):
            return OnDisk(info, os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        return self._revision.commit.stored(self.path).open(info)

    def on_disk(self) -> tuple[Path, int] | None:
        path = self._revision.commit.cached(self.path, self._listed())
        return (path, 0) if path else None

    def note(self) -> str:
        revision = self._revision
        return "; ".join(filter(None, (revision.note, revision.commit.lacks(self.path))))

    def lost(self) -> str:
        return self._revision.commit.lost(self.path)

    def _listed(self) -> HubFileInfo:
        if not self.is_file():
            raise self.error(errno.EISDIR if self.is_dir() else errno.ENOENT)
        return self._revision.commit.files[self.path]


def parse(text: str) -> HubPlace:
    """The place that a text names, without a request. Raises UsageError."""
    names = parts(text.removeprefix(f"{SCHEME}:"))
    if is_signed(text) or (names and not {"@", ":"}.isdisjoint(names[0])):
        raise UsageError(
            "a URL must not contain a login",
            where="hf://ORG/NAME",
            hint="hf auth login, or set HF_TOKEN; a revision follows the name: hf://ORG/NAME@REVISION",
        )
    if names and names[0] in _OTHERS:
        raise UsageError(
            f"this is {_OTHERS[names[0]]} of the Hub, not a model", where=text, hint="models are hf://ORG/NAME"
        )
    if names and names[0] == "models":
        names = names[1:]
    if len(names) < 2:
        raise UsageError(
            "a model on the Hub is named ORG/NAME",
            where=text,
            hint="hf://ORG/NAME[@REVISION][/FOLDER]; models that once had one name have moved, such as gpt2 to "
            "openai-community/gpt2: their pages say where",
        )
    name, at, revision = names[1].partition("@")
    repo, path = f"{names[0]}/{name}", "/".join(names[2:])
    if not all(_NAME.fullmatch(p) and "--" not in p and ".." not in p for p in (names[0], name)):
        raise UsageError(
            f"{repo} is not a valid model name on the Hub",
            where=text,
            hint="letters, digits, `-`, `_` and `.` are possible; hf://ORG/NAME[@REVISION][/FOLDER]",
        )
    if m := OWN_REF.match(f"{revision}/{path}"):
        revision, path = m[0], f"{revision}/{path}"[m.end() + 1 :]
    revision = unquote(revision)
    if at and (not _REVISION.fullmatch(revision) or not {"", ".", ".."}.isdisjoint(revision.split("/"))):
        raise UsageError(
            f"{revision!r} is not a valid revision" if revision else "the revision after @ is missing",
            where=text,
            hint="a branch, a tag or a commit; a slash in its name is %2F",
        )
    return HubPlace(find_revision(repo, revision), path)


def from_page(url: str) -> HubPlace | None:
    """The place of a page about a model, or of a download of its files; None for other URLs. Raises UsageError.

    A download is read by ranges, each of which would count as a download for itself.
    """
    hub = endpoint()
    if origin(url)[1:] != origin(hub)[1:] and urlsplit(url).hostname not in _HOSTS:
        return None
    names = parts(urlsplit(url).path.removeprefix(urlsplit(hub).path))
    if names and names[0] in _OTHERS:
        return parse(f"{SCHEME}://{'/'.join(names)}")
    if len(names) < 2 or names[0] in _NOT_MODELS or "".join(names[2:3]) not in _VIEWS:
        return None
    revision = names[3:] and unquote(names[3])
    below = [unquote(n) for n in names[4:]]
    if revision == "refs" and len(below) > 1:
        revision, below = "/".join(["refs", *below[:2]]), below[2:]
    shown = revision and (revision if OWN_REF.fullmatch(revision) else quote(revision, safe=""))
    return parse(f"{SCHEME}://{names[0]}/{names[1]}" + "/".join([f"@{shown}" if shown else "", *below]))
