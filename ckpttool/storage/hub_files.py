"""The files of one revision of a model on the Hugging Face Hub: which there are, and their bytes.

    GET  /api/models/ORG/NAME/revision/main?blobs=true   the commit and all its files: names, sizes, hashes; not asked
                                                         when the cache has all of it
    GET  /api/models/ORG/NAME/tree/COMMIT                the files, a thousand an answer; only where they are very many
    GET  /ORG/NAME/resolve/COMMIT/config.json            a small file, once; its hash is checked
    HEAD /ORG/NAME/resolve/COMMIT/model.safetensors      where a large file is: a URL of another host, signed for an
                                                         hour or so, which gets no token and sends ranges

What the cache of huggingface_hub has is read there. A branch is asked for once in a process, and is a commit from then
on: a push in the meantime changes nothing. Sources: https://huggingface.co/docs/hub/api, and what huggingface_hub 0.34
to 2.4 asks for and takes from the answers.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urljoin

from ckpttool.core.files import DataFile
from ckpttool.core.words import some
from ckpttool.errors import AccessError, CkptError, CorruptError
from ckpttool.storage.caches import BYTES
from ckpttool.storage.http import REDIRECTS, Answer, ChangedError, HttpError, client, shown
from ckpttool.storage.hub_access import HubRepo, cache_home, endpoint, headers, is_offline, origin
from ckpttool.storage.hub_cache import COMMIT, CommitFiles, HubCache, HubFileInfo, checked
from ckpttool.storage.remote import RangedFile

SMALL, SMALL_LARGE = 16 << 20, 1 << 20
"""Bytes of a file that is fetched whole: of one that git keeps, and of one that it has a pointer of."""
MAX_WHOLE = 50_000
"""Files of a list in one answer; a longer one may lack some (``VERY_LARGE_REPO_THRESHOLD`` of huggingface_hub)."""
MAX_FILES, MAX_PAGES = 1 << 18, 1000
MAX_HOPS = 5
_NEXT = re.compile(r'<[^<>]*[?&]cursor=([^<>&\s]+)[^<>]*>\s*;[^,<]*\brel="?next\b')
_ABOUT = {".gitattributes", ".gitignore", "README.md"}
"""Files of a repository that say something about it: a checkpoint lacks nothing without them."""


class HubRevision:
    """A branch, a tag or a commit of a model, by the user's name for it; the commit is found with the first look."""

    def __init__(self, repo: HubRepo, name: str) -> None:
        self.repo, self.name = repo, name
        self.found = _commit(repo, name) if COMMIT.fullmatch(name) else None
        self.note = ""
        """Says which commit of the cache it is, where the Hub was not asked."""

    def __str__(self) -> str:
        return self.repo.text(self.found.name if self.found else self.name)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HubRevision) or self.repo != other.repo:
            return False
        return self.name == other.name or (self.found is not None and self.found is other.found)

    def __hash__(self) -> int:
        return hash(self.repo)

    @property
    def commit(self) -> HubCommit:
        """Raises AccessError, CorruptError, and UsageError for a revision that does not exist."""
        with _lock:
            if self.found is None:
                self.found = self._look()
            return self.found

    def _look(self) -> HubCommit:
        """The commit of the cache if all its files are there, or when offline; otherwise that of the Hub."""
        repo = self.repo
        name = HubCache.of(repo.repo, repo.home).commit(self.name or "main")
        if name and (is_offline() or _commit(repo, name).is_here()):
            what, again = f"{self.name or 'main'} of {repo.repo}", repo.download(self.name)
            self.note = f"{what} is commit {name[:12]}, as the Hub's cache has it; {again} again"
            return _commit(repo, name)
        if is_offline():
            raise _not_here(repo, self.name)
        return _ask(repo, self.name)


class HubCommit:
    """The files of one commit. One object for all who read them."""

    def __init__(self, repo: HubRepo, name: str) -> None:
        self.repo, self.name = repo, name
        self.cache = HubCache.of(repo.repo, repo.home)
        self.listing: CommitFiles | None = None
        self._absent: CommitFiles | None = {}
        """Files that are not in the cache, when only that is read; None where nobody knows."""
        self.opened: dict[str, HubFile] = {}

    def __str__(self) -> str:
        return self.repo.text(self.name)

    @property
    def files(self) -> CommitFiles:
        """All files, by their paths. Raises AccessError, CorruptError, UsageError for a commit that is not there."""
        with _lock:
            if self.listing is None and not self.is_here():
                if is_offline():
                    self.listing = self._read_cache()
                elif (tree := self.cache.tree(self.name)) is not None:
                    self.listing = tree
                else:
                    _ask(self.repo, self.name)
            return self.listing or {}

    def is_here(self) -> bool:
        """Whether all of it is known to be in the cache: then nobody is asked."""
        with _lock:
            tree = None if self.listing else self.cache.tree(self.name)
            if tree and all(self.cached(n, f) for n, f in tree.items()):
                self.listing = tree
            return bool(self.listing)

    @cached_property
    def folders(self) -> Mapping[str, Mapping[str, bool]]:
        """The names in each folder, and whether they are folders."""
        folders: dict[str, dict[str, bool]] = {"": {}}
        for path in self.files:
            parts = path.split("/")
            for i in range(1, len(parts)):
                above, here = "/".join(parts[: i - 1]), "/".join(parts[:i])
                folders[above][parts[i - 1]] = True
                folders.setdefault(here, {})
            folders["/".join(parts[:-1])][parts[-1]] = False
        return folders

    def cached(self, path: str, file: HubFileInfo) -> Path | None:
        """The file of this machine that has the bytes of a file."""
        return self.cache.find(self.name, path, file)

    def stored(self, path: str) -> HubFile:
        """A file on the Hub, one object for all who read it."""
        with _lock:
            if path not in self.opened:
                self.opened[path] = HubFile(self, path, self.files[path])
            return self.opened[path]

    def lost(self, path: str) -> str:
        """A hint on a path that does not exist."""
        folders, absent = self.folders, self._absent
        if is_offline() and (absent is None or any(f"{n}/".startswith(f"{path}/") for n in absent)):
            what = "if the model has it, " if absent is None else ""
            which = [path] if absent is None or path in absent else ["--include", f"{path}/*"]
            return f"only the Hub's cache is read (offline); {what}{self.repo.download(self.name, which)}"
        above = next(a for a in (path.rpartition("/")[0], "") if a in folders)
        return f"{'/'.join(filter(None, (self.repo.repo, above)))} has {some(sorted(folders[above]))}"

    def lacks(self, folder: str) -> str:
        """Names the files of a folder that an offline cache lacks, such as a tokenizer; "" where there are none."""
        below = f"{folder}/" if folder else ""
        names = sorted(n for n in self._absent or () if n.startswith(below) and "/" not in n[len(below) :])
        names = [n for n in names if n[len(below) :] not in _ABOUT]
        if not names:
            return ""
        again = self.repo.download(self.name, names if len(names) <= 3 else ())
        return f"the Hub's cache lacks {some(names)}: {again}"

    def _read_cache(self) -> CommitFiles:
        """The files that can be read without the network."""
        if (tree := self.cache.tree(self.name)) is not None:
            here = {n: f for n, f in tree.items() if self.cached(n, f)}
            self._absent = {n: f for n, f in tree.items() if n not in here}
        else:
            here, self._absent = dict(self.cache.fetched(self.name)), None
        if not here:
            raise _not_here(self.repo, self.name)
        return here


def _ask(repo: HubRepo, revision: str) -> HubCommit:
    """The commit that a revision is on the Hub, with its files."""
    url = f"{repo.hub}/api/models/{repo.repo}/revision/{quote(revision or 'main', safe='')}?blobs=true"
    answer = repo.ask("GET", url, revision)
    try:
        found: Any = answer.json()
    except HttpError:
        found = None
    name = found.get("sha") if isinstance(found, dict) else None
    if not isinstance(name, str) or not COMMIT.fullmatch(name) or (COMMIT.fullmatch(revision) and name != revision):
        raise repo.not_the_hub(answer, revision)
    commit = _commit(repo, name)
    try:
        entries = found["siblings"]
        if len(entries) < MAX_WHOLE:
            files = [(str(e["rfilename"]), _listed(e, "blobId", "sha256")) for e in entries]
        else:
            files = [(str(e["path"]), _listed(e, "oid", "oid")) for e in _pages(commit) if e["type"] == "file"]
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise CorruptError(f"the Hub's list of files is invalid: {e}", where=str(commit)) from None
    commit.listing = checked(files, str(commit))
    return commit


def _pages(commit: HubCommit) -> list[Mapping[str, Any]]:
    """All names in a commit, of which an answer has some. Raises CorruptError for a list without an end.

    The link to the next answer may name any host, which would get the token: only its cursor is used.
    """
    repo, entries, cursor = commit.repo, list[Mapping[str, Any]](), ""
    for _ in range(MAX_PAGES):
        url = f"{repo.hub}/api/models/{repo.repo}/tree/{commit.name}?recursive=true{cursor}"
        answer = repo.ask("GET", url, commit.name)
        try:
            entries += answer.json()
        except HttpError:
            raise repo.not_the_hub(answer, commit.name) from None
        following = _NEXT.search(", ".join(answer.headers.get_all("Link", [])))
        if not following:
            return entries
        if len(entries) > MAX_FILES:
            break
        cursor = f"&cursor={following[1]}"
    raise CorruptError(
        f"the repository has more than {min(len(entries), MAX_FILES):,} files",
        where=str(commit),
        hint="download the folder that you need (hf download --include) and give its path",
    )


def _listed(entry: Mapping[str, Any], blob: str, sha256: str) -> HubFileInfo:
    """Of a large file the size and hash are under ``lfs``: git's own are those of the pointer."""
    if lfs := entry.get("lfs"):
        return HubFileInfo.of(lfs["size"], lfs[sha256], large=True)
    return HubFileInfo.of(entry["size"], entry[blob])


def _not_here(repo: HubRepo, revision: str) -> AccessError:
    return AccessError(
        f"{repo.repo} is not in the Hub's cache, and only that is read (offline)",
        where=[repo.text(revision), str(HubCache.of(repo.repo, repo.home).root)],
        hint=f"{repo.download(revision)}; or unset HF_HUB_OFFLINE",
    )


class _SignedUrl(NamedTuple):
    """A URL that ranges of a file are read from."""

    url: str
    etag: list[str]
    """The storage's own ETag, as soon as an answer has had it."""


class HubFile:
    """A file on the Hub. It is resolved once, and again when its signature has expired."""

    def __init__(self, commit: HubCommit, path: str, file: HubFileInfo) -> None:
        self.commit, self.path, self.file = commit, path, file
        self.lock = threading.Lock()
        self._signed: _SignedUrl | None = None
        self.hub, self.where = commit.repo.hub, f"{commit}/{path}"
        self.url = f"{self.hub}/{commit.repo.repo}/resolve/{commit.name}/{quote(path)}"

    def open(self, info: DataFile) -> RangedFile:
        """A reader: of bytes in memory for a small file, which are checked, else of ranges."""
        if self.file.size > (SMALL_LARGE if self.file.large else SMALL):
            return RangedFile(info, self._read)
        data = memoryview(self._whole())

        def copy(at: int, into: memoryview) -> None:
            into[:] = data[at : at + len(into)]

        return RangedFile(info, copy)

    def _whole(self) -> bytes:
        """All bytes. Raises AccessError, CorruptError."""
        key = (*self.commit.repo, self.file.blob)
        with self.lock:
            if (data := BYTES.get(key)) is None:
                answer = self._ask("GET", self.url, limit=max(1, self.file.size))
                data = answer.body
                if len(data) != self.file.size or _hash(data, self.file) != self.file.blob:
                    raise CorruptError(
                        "the bytes do not match the Hub's list of files",
                        where=[self.where, shown(answer.url)],
                        hint="try again; where HF_ENDPOINT names a mirror, its copy may be damaged",
                    )
                BYTES.put(key, data)
            return data

    def _read(self, start: int, into: memoryview) -> None:
        """Fill memory with the bytes from ``start`` on. Raises AccessError, CorruptError."""
        signed = self._locate(None)
        try:
            self._range(signed, start, into)
        except HttpError as e:
            if not isinstance(e, ChangedError) and e.status not in (400, 401, 403, 404, 410):
                raise self._failed(e) from None
            try:
                self._range(self._locate(signed), start, into)
            except HttpError as again:
                raise self._failed(again) from None

    def _ask(self, method: str, url: str, *, follow: bool = True, limit: int = 1 << 20) -> Answer:
        return self.commit.repo.ask(method, url, self.commit.name, follow=follow, limit=limit)

    def _range(self, signed: _SignedUrl, start: int, into: memoryview) -> None:
        answer = client().get_range(
            signed.url,
            start,
            start + len(into),
            into,
            headers=headers(signed.url, self.hub),
            if_match=signed.etag[0] if signed.etag else None,
            total=self.file.size,
            origin=self.hub,
        )
        if not signed.etag and (etag := answer.headers.get("ETag")):
            signed.etag.append(etag)

    def _failed(self, e: HttpError) -> CkptError:
        """The error to raise for a request to the Hub or its storage that failed."""
        where = [self.where, shown(e.filename)]
        if isinstance(e, ChangedError):
            return CorruptError(f"the Hub's storage has a different file than the Hub lists: {e.strerror}", where=where)
        if e.answer is not None and e.status < 500 and origin(e.answer.url) == origin(self.hub):
            return self.commit.repo.refused(e.answer, self.commit.name)
        hint = e.hint or "check the network, then run it again"
        return AccessError(f"the Hub's storage cannot be read: {e.strerror}", where=where, hint=hint)

    def _locate(self, stale: _SignedUrl | None) -> _SignedUrl:
        """The URL of the bytes; a new one if it is ``stale``."""
        with self.lock:
            if self._signed is None or self._signed is stale:
                self._signed = self._resolve()
            return self._signed

    def _resolve(self) -> _SignedUrl:
        url = self.url
        for _ in range(MAX_HOPS):
            answer = self._ask("HEAD", url, follow=False)
            self._check(answer)
            to = answer.headers.get("Location")
            if answer.status not in REDIRECTS or not to:
                return _SignedUrl(url, [])
            try:
                url = urljoin(url, to)
            except ValueError:
                raise AccessError("the Hub redirects to an invalid URL", where=self.where) from None
            if origin(url) != origin(self.hub):
                return _SignedUrl(url, [])
        raise AccessError("the Hub redirects in a circle", where=[self.where, shown(url)])

    def _check(self, answer: Answer) -> None:
        """The Hub must say of a file what it has listed."""
        size = answer.headers.get("X-Linked-Size", str(self.file.size))
        blob = answer.headers.get("X-Linked-ETag", self.file.blob).removeprefix("W/").strip('"')
        commit = answer.headers.get("X-Repo-Commit", self.commit.name)
        if (size, blob, commit) != (str(self.file.size), self.file.blob, self.commit.name):
            raise CorruptError(
                "the Hub's answer for this file contradicts its list of files",
                where=[self.where, f"listed: {self.file.size} bytes, {self.file.blob}", f"now: {size} bytes, {blob}"],
                hint="try again; where HF_ENDPOINT names a mirror, its copy may be damaged",
            )


_revisions: dict[tuple[HubRepo, str], HubRevision] = {}
_commits: dict[tuple[HubRepo, str], HubCommit] = {}
_lock = threading.RLock()
"""Held while a repository is listed."""


def revision(repo: str, name: str) -> HubRevision:
    """A revision of a repository; the same one for the same names."""
    key = HubRepo(repo, endpoint(), cache_home()), name
    with _lock:
        return _revisions.setdefault(key, _revisions.get(key) or HubRevision(*key))


def _commit(repo: HubRepo, name: str) -> HubCommit:
    """A commit; the same one for all revisions that are it."""
    with _lock:
        return _commits.setdefault((repo, name), _commits.get((repo, name)) or HubCommit(repo, name))


def forget(repo: str) -> None:
    """Ask again for a repository's branches, which have changed."""
    with _lock:
        for key in [k for k in _revisions if k[0].repo == repo and not COMMIT.fullmatch(k[1])]:
            del _revisions[key]


def _after_fork() -> None:
    global _lock  # noqa: PLW0603
    _lock = threading.RLock()
    for commit in _commits.values():
        for file in commit.opened.values():
            file.lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def _hash(data: bytes, file: HubFileInfo) -> str:
    if file.large:
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
