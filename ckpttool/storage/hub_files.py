"""The files of one revision of a model on the Hugging Face Hub: which there are, and their bytes.

    GET  /api/models/ORG/NAME/revision/main          the commit; not asked when the name has one, or the cache all of it
    GET  /api/models/ORG/NAME/tree/COMMIT            all its files: names, sizes, hashes; 1,000 an answer
    GET  /ORG/NAME/resolve/COMMIT/config.json        a small file, once; its hash is checked
    HEAD /ORG/NAME/resolve/COMMIT/model.safetensors  where a large file is: a signed URL, good for an hour or so, of
                                                     another host, which gets no token and from which ranges are read

What the cache of huggingface_hub has is read there. A branch is asked for once in a process, and is a commit from then
on: a push in the meantime changes nothing. Sources: https://huggingface.co/docs/hub/api, and what huggingface_hub 0.34
to 2.4 asks for and takes from the answers.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import shlex
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import parse_qs, quote, urljoin

from ckpttool.core.files import DataFile
from ckpttool.core.words import some
from ckpttool.errors import AccessError, CkptError, CorruptError
from ckpttool.storage.http import Answer, ChangedError, HttpError, RefusedRedirectError, client, shown
from ckpttool.storage.hub_access import Asked, cache_home, endpoint, headers, is_offline, origin, refused, stranger
from ckpttool.storage.hub_cache import COMMIT, Cache, Listed, Tree, checked, listed
from ckpttool.storage.stream import in_memory

if TYPE_CHECKING:
    from mmap import mmap

T = TypeVar("T", dict[str, Any], list[Any])
SMALL, SMALL_LARGE = 16 << 20, 1 << 20
"""Bytes of a file that is fetched whole: of one that git keeps, and of one that it has a pointer of."""
KEPT = 64 << 20
"""Bytes of small files that are kept in memory."""
MAX_FILES, MAX_PAGES = 1 << 18, 1000
MAX_HOPS = 5
_ABOUT = {".gitattributes", ".gitignore", "README.md"}
"""Files of a repository that say something about it: a checkpoint lacks nothing without them."""
_REDIRECTS = {301, 302, 303, 307, 308}
ONES_OWN = re.compile(r"refs/(?:pr/\d+|convert/[\w.-]+)(?=/|\Z)")
"""Revisions with slashes that need not be escaped."""


class Model(NamedTuple):
    """A model repository, and where it is looked for."""

    repo: str
    """ORG/NAME."""
    hub: str
    home: str
    """Where the Hub's cache is."""

    @property
    def cache(self) -> Cache:
        return Cache.of(self.repo, self.home)

    def text(self, revision: str) -> str:
        """The text of a place."""
        shown = revision if ONES_OWN.fullmatch(revision) else quote(revision, safe="+=,@")
        return f"hf://{self.repo}" + (f"@{shown}" if shown else "")

    def asked(self, revision: str) -> Asked:
        """For errors."""
        return Asked(self.hub, self.repo, revision, self.text(revision))

    def ask(self, method: str, url: str, revision: str, *, follow: bool = True, limit: int = 16 << 20) -> Answer:
        """A small request to the Hub, with the token. Raises what its answer means, unless it is a success."""
        where = [self.text(revision), shown(url)]
        try:
            answer = client().request(method, url, headers=headers(url, self.hub), follow=follow, limit=limit)
        except RefusedRedirectError as e:
            raise AccessError(f"the Hub cannot be asked: {e.strerror}", where=where, hint=e.hint) from None
        except HttpError as e:
            raise AccessError(
                f"the Hub did not answer: {e.strerror}",
                where=where,
                hint="check the network and HF_ENDPOINT; with --offline (HF_HUB_OFFLINE=1) the Hub's cache is read",
            ) from None
        if answer.status >= 400 or answer.status < 200:
            raise refused(answer, self.asked(revision))
        return answer

    def ask_json(self, url: str, revision: str, kind: type[T]) -> tuple[T, Answer]:
        """What the Hub says in JSON."""
        answer = self.ask("GET", url, revision)
        try:
            found = answer.json()
        except HttpError:
            found = None
        if not isinstance(found, kind):
            raise stranger(answer, self.asked(revision))
        return found, answer

    def own(self, url: str) -> str:
        """A link of an answer, at the Hub that was asked: mirrors pass on what the Hub says that they mirror."""
        scheme, host = self.hub.split("//", 1)
        query = url.partition("?")[2]
        path = re.sub(r"^[a-z]+://[^/?]*", "", url.partition("?")[0])
        return f"{scheme}//{host.partition('/')[0]}/{path.lstrip('/')}?{query}"

    def download(self, revision: str, which: Sequence[str] = ()) -> str:
        """The command that brings files into the cache, as a hint has it."""
        words = [self.repo, *which, *(["--revision", revision] if revision else [])]
        return f"`hf download {shlex.join(words)}` fetches it"


class Revision:
    """A branch, a tag or a commit of a model, as somebody wrote it. It is a commit as soon as somebody has looked."""

    def __init__(self, model: Model, said: str) -> None:
        self.model, self.said = model, said
        self.found = _commit(model, said) if COMMIT.fullmatch(said) else None
        self.note = ""
        """Where nobody was asked what the revision is now."""
        self.lock = threading.RLock()

    def __str__(self) -> str:
        return self.model.text(self.found.name if self.found else self.said)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Revision) or self.model != other.model:
            return False
        return self.said == other.said or (self.found is not None and self.found is other.found)

    def __hash__(self) -> int:
        return hash(self.model)

    @property
    def commit(self) -> Commit:
        """Raises AccessError, and UsageError for a revision that does not exist."""
        with self.lock:
            if self.found is None:
                self.found = self._look()
            return self.found

    def _look(self) -> Commit:
        """What the cache has the whole of is taken for what the branch is; so is anything it has, when offline."""
        model = self.model
        name = model.cache.commit(self.said or "main")
        if name and (is_offline() or _commit(model, name).is_here()):
            what, again = f"{self.said or 'main'} of {model.repo}", model.download(self.said)
            self.note = f"{what} is commit {name[:12]}, as the Hub's cache has it; {again} again"
            return _commit(model, name)
        if is_offline():
            raise _not_here(model, self.said)
        url = f"{model.hub}/api/models/{model.repo}/revision/{quote(self.said or 'main', safe='')}"
        found, answer = model.ask_json(url, self.said, dict)
        name = found.get("sha")
        if not isinstance(name, str) or not COMMIT.fullmatch(name):
            raise stranger(answer, model.asked(self.said))
        return _commit(model, name)


class Commit:
    """The files of one commit. One object for all who read them."""

    def __init__(self, model: Model, name: str) -> None:
        self.model, self.name = model, name
        self._files: Tree | None = None
        self._absent: Tree | None = {}
        """Files that are not in the cache, when only that is read; None where nobody knows."""
        self._stored: dict[str, Stored] = {}
        self.lock = threading.RLock()

    def renew_locks(self) -> None:
        """Threads that a fork left behind may hold the old ones."""
        self.lock = threading.RLock()
        for file in list(self._stored.values()):
            file.lock = threading.Lock()

    def __str__(self) -> str:
        return self.model.text(self.name)

    @property
    def files(self) -> Tree:
        """All files, by their paths. Raises AccessError, CorruptError, UsageError for a commit that is not there."""
        with self.lock:
            if self._files is None and not self.is_here():
                self._files = self._read_cache() if is_offline() else self._ask()
            return self._files or {}

    def is_here(self) -> bool:
        """Whether all of it is known to be in the cache: then nobody is asked."""
        with self.lock:
            tree = None if self._files else self.model.cache.tree(self.name)
            if tree and all(self.cached(n, f) for n, f in tree.items()):
                self._files = tree
            return bool(self._files)

    @cached_property
    def folders(self) -> Mapping[str, Mapping[str, bool]]:
        """What is directly in each folder, and whether it is one."""
        folders: dict[str, dict[str, bool]] = {"": {}}
        for path in self.files:
            parts = path.split("/")
            for i in range(1, len(parts)):
                above, here = "/".join(parts[: i - 1]), "/".join(parts[:i])
                folders[above][parts[i - 1]] = True
                folders.setdefault(here, {})
            folders["/".join(parts[:-1])][parts[-1]] = False
        return folders

    def cached(self, path: str, file: Listed) -> Path | None:
        """Where on this machine the bytes of a file are."""
        return self.model.cache.find(self.name, path, file)

    def stored(self, path: str) -> Stored:
        """A file on the Hub, one object for all who read it."""
        with self.lock:
            if path not in self._stored:
                self._stored[path] = Stored(self, path, self.files[path])
            return self._stored[path]

    def lost(self, path: str) -> str:
        """A hint on a path that there is not."""
        folders, absent = self.folders, self._absent
        if is_offline() and (absent is None or any(f"{n}/".startswith(f"{path}/") for n in absent)):
            what = "if the model has it, " if absent is None else ""
            which = [path] if absent is None or path in absent else ["--include", f"{path}/*"]
            return f"only the Hub's cache is read (offline); {what}{self.model.download(self.name, which)}"
        above = next(a for a in (path.rpartition("/")[0], "") if a in folders)
        return f"{'/'.join(filter(None, (self.model.repo, above)))} has {some(sorted(folders[above]))}"

    def lacks(self, folder: str) -> str:
        """Which files of a folder the cache lacks when only that is read: a tokenizer, which no one would miss."""
        below = f"{folder}/" if folder else ""
        names = sorted(n for n in self._absent or () if n.startswith(below) and "/" not in n[len(below) :])
        names = [n for n in names if n[len(below) :] not in _ABOUT]
        if not names:
            return ""
        again = self.model.download(self.name, names if len(names) <= 3 else ())
        return f"the Hub's cache lacks {some(names)}: {again}"

    def _read_cache(self) -> Tree:
        """What can be read without the network."""
        if (tree := self.model.cache.tree(self.name)) is not None:
            here = {n: f for n, f in tree.items() if self.cached(n, f)}
            self._absent = {n: f for n, f in tree.items() if n not in here}
        else:
            here, self._absent = dict(self.model.cache.fetched(self.name)), None
        if not here:
            raise _not_here(self.model, self.name)
        return here

    def _ask(self) -> Tree:
        if tree := self.model.cache.tree(self.name):
            return tree
        url = f"{self.model.hub}/api/models/{self.model.repo}/tree/{self.name}?recursive=true"
        files: list[tuple[str, Listed]] = []
        for _ in range(MAX_PAGES):
            page, answer = self.model.ask_json(url, self.name, list)
            try:
                files += [(str(e["path"]), listed(e, e.get("lfs"))) for e in page if e["type"] != "directory"]
            except (ValueError, KeyError, TypeError, AttributeError) as e:
                raise CorruptError(f"the Hub's list of files makes no sense: {e}", where=str(self)) from None
            following = _next_page(answer)
            if not following:
                return checked(files, str(self))
            if len(files) > MAX_FILES:
                break
            url = self.model.own(following)
        raise CorruptError(
            f"the list of files of the repository does not end: {len(files):,} so far",
            where=str(self),
            hint="download the folder that you need (hf download --include) and give its path",
        )


def _not_here(model: Model, revision: str) -> AccessError:
    return AccessError(
        f"{model.repo} is not in the Hub's cache, and only that is read (offline)",
        where=[model.text(revision), str(model.cache.root)],
        hint=f"{model.download(revision)}; or go online: unset HF_HUB_OFFLINE, no --offline",
    )


class _Location(NamedTuple):
    """Where ranges of a file are read."""

    url: str
    expires: float
    """By ``time.monotonic``."""
    etag: list[str]
    """What the storage itself calls the file, as soon as it has said so."""


class Stored:
    """A file on the Hub. It is resolved once, and again when its signature has expired."""

    def __init__(self, commit: Commit, path: str, file: Listed) -> None:
        self.commit, self.path, self.file = commit, path, file
        self.lock = threading.Lock()
        self._location: _Location | None = None
        self.hub, self.where = commit.model.hub, f"{commit}/{path}"
        self.url = f"{self.hub}/{commit.model.repo}/resolve/{commit.name}/{quote(path)}"

    @property
    def is_small(self) -> bool:
        """Whether it is fetched whole."""
        return self.file.size <= (SMALL_LARGE if self.file.large else SMALL)

    def whole(self) -> bytes:
        """All bytes of a small file, which are checked. Raises AccessError, CorruptError."""
        key = (*self.commit.model, self.file.blob)
        with self.lock:
            if (data := _kept.get(key)) is None:
                answer = self._ask("GET", self.url, limit=max(1, self.file.size))
                data = answer.body
                if len(data) != self.file.size or _hash(data, self.file) != self.file.blob:
                    raise CorruptError(
                        "the Hub sends other bytes than it lists",
                        where=[self.where, shown(answer.url)],
                        hint="try again; where HF_ENDPOINT names a mirror, its copy may be damaged",
                    )
                _kept.put(key, data)
            return data

    def read(self, start: int, into: memoryview) -> None:
        """Fill memory with the bytes from ``start`` on. Raises AccessError, CorruptError."""
        location = self._locate(None)
        try:
            self._read(location, start, into)
        except HttpError as e:
            if not isinstance(e, ChangedError) and e.status not in (400, 401, 403, 404, 410):
                raise self._failed(e) from None
            try:
                self._read(self._locate(location), start, into)
            except HttpError as again:
                raise self._failed(again) from None

    def _ask(self, method: str, url: str, *, follow: bool = True, limit: int = 16 << 20) -> Answer:
        return self.commit.model.ask(method, url, self.commit.name, follow=follow, limit=limit)

    def _read(self, location: _Location, start: int, into: memoryview) -> None:
        answer = client().get_range(
            location.url,
            start,
            start + len(into),
            into,
            headers=headers(location.url, self.hub),
            if_match=location.etag[0] if location.etag else None,
            total=self.file.size,
            origin=self.hub,
        )
        if not location.etag and (etag := answer.headers.get("ETag")):
            location.etag.append(etag)

    def _failed(self, e: HttpError) -> CkptError:
        where = [self.where, shown(e.filename)]
        if isinstance(e, ChangedError):
            return CorruptError(f"the Hub's storage has another file than the Hub lists: {e.strerror}", where=where)
        if e.answer is not None and e.status < 500 and origin(e.answer.url) == origin(self.hub):
            return refused(e.answer, self.commit.model.asked(self.commit.name))
        hint = e.hint or "check the network, then run it again"
        return AccessError(f"the Hub's storage cannot be read: {e.strerror}", where=where, hint=hint)

    def _locate(self, stale: _Location | None) -> _Location:
        """Where the file is; asked for again if it is where it was, or its signature has expired."""
        with self.lock:
            found = self._location
            if found is None or found is stale or found.expires < time.monotonic():
                found = self._location = self._resolve()
            return found

    def _resolve(self) -> _Location:
        url = self.url
        for _ in range(MAX_HOPS):
            asked = time.monotonic()
            answer = self._ask("HEAD", url, follow=False)
            self._check(answer)
            to = answer.headers.get("Location")
            if answer.status not in _REDIRECTS or not to:
                return _Location(url, math.inf, [])
            try:
                url = urljoin(url, to)
            except ValueError:
                raise AccessError("the Hub redirects to what is not a URL", where=self.where) from None
            if origin(url) != origin(self.hub):
                return _Location(url, asked + _lifetime(url, answer), [])
        raise AccessError("the Hub redirects in a circle", where=[self.where, shown(url)])

    def _check(self, answer: Answer) -> None:
        """What the Hub says of a file when it is asked for must be what it has listed."""
        size = answer.headers.get("X-Linked-Size", str(self.file.size))
        blob = answer.headers.get("X-Linked-ETag", self.file.blob).removeprefix("W/").strip('"')
        commit = answer.headers.get("X-Repo-Commit", self.commit.name)
        if (size, blob, commit) != (str(self.file.size), self.file.blob, self.commit.name):
            raise CorruptError(
                "the Hub says of this file something else than in its list of files",
                where=[self.where, f"listed: {self.file.size} bytes, {self.file.blob}", f"now: {size} bytes, {blob}"],
                hint="try again; where HF_ENDPOINT names a mirror, its copy may be damaged",
            )


class Whole(NamedTuple):
    """A small file."""

    info: DataFile
    data: bytes

    def pread(self, n: int, at: int) -> bytes:
        return self.data[at : at + n]

    def read_into(self, buffer: memoryview, at: int) -> int:
        part = memoryview(self.data)[at : at + len(buffer)]
        buffer[: len(part)] = part
        return len(part)

    def map(self) -> mmap:
        return in_memory(self)

    def close(self) -> None:
        pass


class Ranges(NamedTuple):
    """A file of which ranges are read."""

    info: DataFile
    stored: Stored

    def pread(self, n: int, at: int) -> bytes:
        data = bytearray(max(0, min(n, self.info.size - at)))
        self.read_into(memoryview(data), at)
        return bytes(data)

    def read_into(self, buffer: memoryview, at: int) -> int:
        n = max(0, min(len(buffer), self.info.size - at))
        if n:
            self.stored.read(at, buffer[:n])
        return n

    def map(self) -> mmap:
        return in_memory(self)

    def close(self) -> None:
        pass


class _Kept:
    """Small files of models by what they hold, the last ones that were read."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._files: OrderedDict[tuple[str, ...], bytes] = OrderedDict()
        self._bytes = 0

    def get(self, key: tuple[str, ...]) -> bytes | None:
        with self.lock:
            if key in self._files:
                self._files.move_to_end(key)
            return self._files.get(key)

    def put(self, key: tuple[str, ...], data: bytes) -> None:
        with self.lock:
            self._bytes += len(data) - len(self._files.pop(key, b""))
            self._files[key] = data
            while self._bytes > KEPT:
                self._bytes -= len(self._files.popitem(last=False)[1])


_kept = _Kept()
_revisions: dict[tuple[Model, str], Revision] = {}
_commits: dict[tuple[Model, str], Commit] = {}
_lock = threading.Lock()


def revision(repo: str, said: str) -> Revision:
    """A revision of a repository; the same one for the same names."""
    key = Model(repo, endpoint(), cache_home()), said
    found = _revisions.get(key) or Revision(*key)
    with _lock:
        return _revisions.setdefault(key, found)


def _commit(model: Model, name: str) -> Commit:
    """A commit; the same one for all revisions that are it."""
    with _lock:
        return _commits.setdefault((model, name), _commits.get((model, name)) or Commit(model, name))


def forget(repo: str) -> None:
    """What was asked of a repository's branches does not hold any more."""
    with _lock:
        for key in [k for k in _revisions if k[0].repo == repo and not COMMIT.fullmatch(k[1])]:
            del _revisions[key]


def _after_fork() -> None:
    global _lock
    _lock, _kept.lock = threading.Lock(), threading.Lock()
    for found in _revisions.values():
        found.lock = threading.RLock()
    for commit in _commits.values():
        commit.renew_locks()


os.register_at_fork(after_in_child=_after_fork)


def _hash(data: bytes, file: Listed) -> str:
    if file.large:
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _next_page(answer: Answer) -> str:
    links = ", ".join(answer.headers.get_all("Link", []))
    m = re.search(r'<([^<>]*)>\s*;[^,<]*\brel="?next\b', links)
    return m[1] if m else ""


def _lifetime(url: str, answer: Answer) -> float:
    """Seconds that a signed URL is good for, by the server's own clock; infinite where it does not say."""
    query = {k: v[0] for k, v in parse_qs(url.partition("?")[2]).items()}
    seconds = math.inf
    try:
        if "X-Amz-Expires" in query:
            seconds = float(query["X-Amz-Expires"])
        elif "Expires" in query:
            from email.utils import parsedate_to_datetime

            date = answer.headers.get("Date")
            seconds = float(query["Expires"]) - (parsedate_to_datetime(date).timestamp() if date else time.time())
    except (ValueError, TypeError, OverflowError):
        return math.inf
    # One that seems to have expired as it came is tried all the same: clocks differ.
    return seconds - min(30.0, seconds / 10) if seconds > 1 else math.inf
