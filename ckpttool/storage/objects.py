"""Object stores: ``s3://bucket/key``, ``gs://bucket/key`` and ``az://container/key``.

A store has no directories. One is what several keys begin with, up to a slash, as every tool for object stores has it.
The libraries of the clouds log in, list and sign (``s3``, ``gcs`` and ``azure`` beside this module); the bytes come
through the HTTP client of ``http``, each range with the condition that the object is still the one that was listed.
"""

from __future__ import annotations

import errno
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Literal, NamedTuple, NoReturn, Protocol, Self, TypeVar

from ckpttool.core.files import DataFile, OpenFile
from ckpttool.errors import AccessError, CkptError, CorruptError, UsageError
from ckpttool.storage.http import ChangedError, HttpError, RefusedRedirectError, client
from ckpttool.storage.network import is_signed
from ckpttool.storage.stream import in_memory, stream

if TYPE_CHECKING:
    import mmap

LISTED_SECONDS = 5.0
"""How long a listing says what is there: a command looks for a dozen names in one directory."""
_LOOKED_OVER_SECONDS = 60.0
"""How much longer one of everything does: hundreds of directories are looked into."""
MOST_PAGES = 1000
"""Of a directory, of a thousand names or so each."""
_LISTINGS = 4096
_MANY = 8
"""Directories beside each other that are listed one by one; from then on all that lies below their parent is."""
_TREE_PAGES = 20
"""Of such a listing: a run of hundreds of checkpoints has fewer, a whole bucket may have millions."""
_T = TypeVar("_T")

_TEXT = re.compile(r"([a-z0-9]+):/{1,2}([^/]*)/?(.*)", re.DOTALL)
_BUCKET = re.compile(r"[A-Za-z0-9$][A-Za-z0-9._-]{0,254}")
_AGAIN = (400, 401, 403)
"""What a signature that has expired is answered with."""


class Found(NamedTuple):
    """An object."""

    size: int
    """Bytes."""
    tag: str
    """Another one when the bytes are others: the ETag with its quotes, or a generation."""


class Listing(NamedTuple):
    """What lies directly below a prefix that ends with a slash."""

    files: Mapping[str, Found]
    folders: frozenset[str]
    exists: bool
    """Whether any key begins with the prefix; that of an empty folder may be its own."""


class Signed(NamedTuple):
    """A GET that a store will answer. The URL and the headers are secrets."""

    url: str
    headers: Mapping[str, str]
    if_match: str | None
    said: Mapping[str, str] = {}
    """Headers of the answer that must have these values, if they are there: for stores that have other conditions."""


class Store(Protocol):
    """A bucket, and who may read it. Safe to use from several threads.

    All methods raise FileNotFoundError for an object that is not there, IncompleteError for a bucket that is not, and
    AccessError for what may not be read or cannot be reached.
    """

    @property
    def lister(self) -> str:
        """The command that shows users what is there."""

    def list(self, prefix: str, *, deep: bool = False) -> Listing:
        """``deep``: all files below, with slashes in their names; AccessError where these are too many pages."""

    def head(self, key: str) -> Found: ...
    def get(self, key: str, tag: str, *, renew: bool) -> Signed:
        """How to read an object, if it is still the one with this tag. ``renew``: the last answer did not work."""

    def explain(self, e: HttpError, key: str) -> NoReturn:
        """Raise what an answer to such a GET means."""


def parse(text: str) -> ObjectPlace:
    """The place that a text names; one slash after the colon will do. Raises UsageError."""
    m = _TEXT.fullmatch(text)
    scheme, bucket, key = m.groups() if m else (text.partition(":")[0], "", "")
    if "@" in bucket:
        raise UsageError(
            "credentials and accounts do not belong in an address", where=f"{scheme}://", hint=_LOGIN[scheme]
        )
    if is_signed(key):
        raise UsageError(
            "a signature does not belong in such an address",
            where=text.partition("?")[0],
            hint=f"give the https:// URL that it was made for; or {_LOGIN[scheme]}",
        )
    if not _BUCKET.fullmatch(bucket):
        what = "container" if scheme == "az" else "bucket"
        raise UsageError(
            f"this is not the name of a {what}: {bucket!r}", where=text, hint=f"write {scheme}://{what}/folder"
        )
    import_module(_MODULES[scheme])  # a package that is missing is an error now
    return ObjectPlace(scheme, bucket, key.rstrip("/"))


_LOGIN = {
    "s3": "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`",
    "az": "set AZURE_STORAGE_ACCOUNT and AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN, or "
    "AZURE_STORAGE_CONNECTION_STRING",
}


class Entry(NamedTuple):
    """A name in a directory."""

    name: str
    found: Found | None
    """None for a directory."""

    def is_file(self) -> bool:
        return self.found is not None

    def is_dir(self) -> bool:
        return self.found is None


class ObjectPlace(NamedTuple):
    """An object, or what the keys of several begin with."""

    scheme: str
    bucket: str
    key: str
    """Without a slash at its end; "" is the whole bucket."""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}" + (f"/{self.key}" if self.key else "")

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2] or self.bucket

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> Self:
        return self._replace(key=self.key.rpartition("/")[0])

    def __truediv__(self, name: str, /) -> Self:
        parts = [p for p in name.split("/") if p not in ("", ".")]  # as a Path has it
        return self._replace(key="/".join([self.key, *parts] if self.key else parts))

    def is_file(self) -> bool:
        if not self.key:
            return False
        listing = _recent(self.parent)
        if listing:
            return self.name in listing.files
        if time.monotonic() - _absent.get(self, -LISTED_SECONDS) < LISTED_SECONDS:
            return False
        try:
            _known[self] = self._store().head(self.key)
        except FileNotFoundError:
            _absent[self] = time.monotonic()
            return False
        return True

    def is_dir(self) -> bool:
        try:
            return self._list().exists
        except AccessError:  # there are buckets whose files may be read and not listed
            with suppress(AccessError):
                if self.is_file():
                    return False
            raise

    def exists(self) -> bool:
        return self.is_file() or self.is_dir()

    def scan(self) -> list[Entry]:
        listing = self._list()
        if not listing.exists:
            raise _missing(self)
        _known.update((self / name, found) for name, found in listing.files.items())
        return [Entry(n, f) for n, f in listing.files.items()] + [Entry(n, None) for n in listing.folders]

    def identity(self) -> tuple[int, str]:
        # What a listing said is taken once, so whoever asks again hears of a change. A GET has it as its condition.
        return _known.pop(self, None) or self._store().head(self.key)

    def open(self, mode: Literal["rb"] = "rb", buffering: int = -1) -> BufferedReader:
        return stream(self.open_file(), buffering)

    def open_file(self) -> OpenFile:
        try:
            return _ObjectFile(DataFile.at(self), self.key, self._store())
        except FileNotFoundError:
            if self._list().exists:
                raise IsADirectoryError(errno.EISDIR, "Is a directory", str(self)) from None
            raise

    def on_disk(self) -> tuple[Path, int] | None:
        return None

    def note(self) -> str:
        return ""

    def lost(self) -> str:
        return f"`{self._store().lister.format(self.parent)}` lists what is there"

    def _list(self) -> Listing:
        listing = _recent(self)
        if listing is None and self.key:
            _siblings[self.parent] += 1
            if _siblings[self.parent] == _MANY:
                _list_below(self.parent)
                listing = _recent(self)
        if listing is None:
            listing = self._store().list(self.prefix)
            if len(_listed) >= _LISTINGS:
                forget()
            _listed[self] = (time.monotonic(), listing)
        return listing

    @property
    def prefix(self) -> str:
        """What the keys of all files below begin with."""
        return f"{self.key}/" if self.key else ""

    def _store(self) -> Store:
        return open_store(self.scheme, self.bucket)


def open_store(scheme: str, bucket: str) -> Store:
    """The one store of this process for a bucket."""
    with _lock:
        store = _stores.get((scheme, bucket))
        if store is None:
            store = _stores[scheme, bucket] = import_module(_MODULES[scheme]).Bucket(bucket)
        return store


def forget() -> None:
    """Forget what was listed: this process has changed something there."""
    _known.clear()
    _absent.clear()
    _listed.clear()
    _siblings.clear()


def close() -> None:
    """Close all connections and forget logins: the environment may be another one."""
    forget()
    with _lock:
        for name in _MODULES.values():
            if name in sys.modules:  # by what writes, too
                sys.modules[name].close()
        _stores.clear()


def listing(files: Mapping[str, Found], folders: Iterable[str], *, exists: bool, deep: bool = False) -> Listing:
    """Names below a prefix, without those that no file on this machine could have: they are nobody's checkpoint."""

    def is_name(name: str) -> bool:
        if deep:
            return all(map(is_part, name.removesuffix("/").split("/")))
        return is_part(name)

    def is_part(name: str) -> bool:
        return name not in ("", ".", "..") and "/" not in name and "\0" not in name

    return Listing({n: f for n, f in files.items() if is_name(n)}, frozenset(filter(is_name, folders)), exists)


def bounded(pages: Iterable[_T], where: str, *, deep: bool = False) -> Iterator[_T]:
    """Pages of a listing. Raises AccessError instead of listing for ever."""
    most = _TREE_PAGES if deep else MOST_PAGES
    for i, page in enumerate(pages):
        if i == most:
            raise AccessError(f"the listing does not end after {most:,} pages", where=where)
        yield page


def listed(e: OSError | CkptError, where: str, address: str) -> OSError | CkptError:
    """What an answer to a listing means: a store that lists nothing says so, and does not know no listing."""
    if not isinstance(e, FileNotFoundError):
        return e
    return AccessError(
        "the answer is not one of an object store: 404 to a listing", where=where, hint=f"check {address}"
    )


@contextmanager
def understood(where: str) -> Iterator[None]:
    """Raises AccessError for an answer that lacks what every answer has."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError):
        raise AccessError("the answer is not one of an object store", where=where) from None


_MODULES = {"s3": "ckpttool.storage.s3", "gs": "ckpttool.storage.gcs", "az": "ckpttool.storage.azure"}
_stores: dict[tuple[str, str], Store] = {}
_lock = threading.Lock()
_known: dict[ObjectPlace, Found] = {}
_absent: dict[ObjectPlace, float] = {}
_listed: dict[ObjectPlace, tuple[float, Listing]] = {}
_siblings: Counter[ObjectPlace] = Counter()
"""How many directories in one have been listed by themselves."""


def _recent(place: ObjectPlace) -> Listing | None:
    """What was listed a moment ago, of a directory or of one above that has no such directory."""
    at, found = _listed.get(place, (0.0, None))
    if found and time.monotonic() - at < LISTED_SECONDS:
        return found
    above = _recent(place.parent) if place.key else None
    return None if above is None or place.name in above.folders else Listing({}, frozenset(), exists=False)


def _list_below(place: ObjectPlace) -> None:
    """List all that lies below at once, unless it is very much: somebody looks into one directory after the other,
    as into the checkpoints of a run."""
    try:
        files = open_store(place.scheme, place.bucket).list(place.prefix, deep=True).files
    except AccessError:
        return
    held: dict[ObjectPlace, tuple[dict[str, Found], set[str]]] = {place: ({}, set())}
    for name, found in files.items():
        *folders, last = name.split("/")
        at = place
        for folder in folders:
            held[at][1].add(folder)
            at = at / folder
            held.setdefault(at, ({}, set()))
        if last:  # a name that ends with a slash is that of a folder
            held[at][0][last] = found
    if len(_listed) + len(held) < _LISTINGS:
        now = time.monotonic() + _LOOKED_OVER_SECONDS
        _listed.update({at: (now, Listing(f, frozenset(d), exists=True)) for at, (f, d) in held.items()})


def _missing(place: ObjectPlace) -> OSError:
    if place.is_file():
        return NotADirectoryError(errno.ENOTDIR, "Not a directory", str(place))
    return FileNotFoundError(errno.ENOENT, "No such file or directory", str(place))


class _ObjectFile:
    """An object as it was when it was opened. There is nothing to close."""

    __slots__ = ("_key", "_store", "info")

    def __init__(self, info: DataFile, key: str, store: Store) -> None:
        self.info, self._key, self._store = info, key, store

    def pread(self, n: int, at: int) -> bytes:
        data = bytearray(max(0, min(n, self.info.size - at)))
        return bytes(data) if self.read_into(memoryview(data), at) else b""

    def read_into(self, buffer: memoryview, at: int) -> int:
        n = min(len(buffer), self.info.size - at)
        if n <= 0:
            return 0
        try:
            self._get(buffer[:n], at, renew=False)
        except HttpError as e:
            if e.status not in _AGAIN:
                self._explain(e)
            try:
                self._get(buffer[:n], at, renew=True)
            except HttpError as again:
                self._explain(again)
        return n

    def _explain(self, e: HttpError) -> NoReturn:
        if isinstance(e, ChangedError):
            what = "the object is not the one that was opened: it has changed"
            raise CorruptError(what, where=str(self.info.place), hint="repeat the command") from None
        if isinstance(e, RefusedRedirectError):
            raise AccessError(str(e.strerror), where=str(self.info.place), hint=e.hint) from None
        self._store.explain(e, self._key)

    def _get(self, into: memoryview, at: int, *, renew: bool) -> None:
        sent = self._store.get(self._key, self.info.tag, renew=renew)
        answer = client().get_range(
            sent.url, at, at + len(into), into, headers=sent.headers, if_match=sent.if_match, total=self.info.size
        )
        for name, value in sent.said.items():
            if answer.headers.get(name, value) != value:
                raise ChangedError("the object has changed", sent.url, answer)

    def map(self) -> mmap.mmap:
        return in_memory(self)

    def close(self) -> None:
        pass
