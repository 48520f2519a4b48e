"""Object stores: ``s3://bucket/key``, ``gs://bucket/key`` and ``az://container/key``.

A store has no directories. One is what several keys begin with, up to a slash, as every tool for object stores has it.
The libraries of the clouds log in, list and sign (``buckets``); the bytes come through the HTTP client of ``http``,
each range with the condition that the object is still the one that was listed.
"""

from __future__ import annotations

import errno
import math
import re
import threading
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple, NoReturn, Self

from ckpttool.core.files import DataFile, OpenFile
from ckpttool.errors import AccessError, CorruptError, UsageError
from ckpttool.storage import buckets
from ckpttool.storage.buckets.base import Bucket, ObjectInfo
from ckpttool.storage.caches import TimedCache
from ckpttool.storage.http import ChangedError, HttpError, RefusedRedirectError, client
from ckpttool.storage.network import is_signed
from ckpttool.storage.remote import NamedEntry, RangedFile, RemotePlace, parts

LISTED_SECONDS = 5.0
"""Seconds that a listing holds: a command looks for a dozen names in one directory."""
_LOOKED_OVER_SECONDS = 60.0
"""Seconds that a listing of everything below a directory holds longer: hundreds of directories are looked into."""
MOST_PAGES = 1000
"""Pages of a directory's listing at most, of a thousand names or so each."""
_MANY = 8
"""Directories beside each other that are listed one by one; from then on all that lies below their parent is."""
_TREE_PAGES = 20
"""Pages of such a listing at most: a run of hundreds of checkpoints has fewer, a whole bucket may have millions."""

_TEXT = re.compile(r"([a-z0-9]+):/{1,2}([^/]*)/?(.*)", re.DOTALL)
_BUCKET = re.compile(r"[A-Za-z0-9$][A-Za-z0-9._-]{0,254}")
_AGAIN = (400, 401, 403)
"""Statuses that answer an expired signature."""


class KeyListing(NamedTuple):
    """Names directly below a prefix that ends with a slash."""

    files: Mapping[str, ObjectInfo]
    folders: Collection[str]
    exists: bool
    """Whether any key begins with the prefix; that of an empty folder may be its own."""


def parse(text: str) -> ObjectPlace:
    """The place that a text names; one slash after the colon will do. Raises UsageError."""
    m = _TEXT.fullmatch(text)
    scheme, bucket, key = m.groups() if m else (text.partition(":")[0], "", "")
    if "@" in bucket:
        raise UsageError("a URL must not contain credentials or an account", where=f"{scheme}://", hint=_LOGIN[scheme])
    if is_signed(key):
        raise UsageError(
            "this kind of URL must not contain a signature",
            where=text.partition("?")[0],
            hint=f"give the https:// URL that it was made for; or {_LOGIN[scheme]}",
        )
    if not _BUCKET.fullmatch(bucket):
        what = "container" if scheme == "az" else "bucket"
        raise UsageError(
            f"this is not the name of a {what}: {bucket!r}", where=text, hint=f"write {scheme}://{what}/folder"
        )
    buckets.check_installed(scheme)
    return ObjectPlace(scheme, bucket, key.rstrip("/"))


_LOGIN = {
    "s3": "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`",
    "az": "set AZURE_STORAGE_ACCOUNT and AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN, or "
    "AZURE_STORAGE_CONNECTION_STRING",
}


@dataclass(frozen=True, slots=True, repr=False)
class ObjectPlace(RemotePlace):
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
    def parent(self) -> Self:
        return replace(self, key=self.key.rpartition("/")[0])

    def __truediv__(self, name: str, /) -> Self:
        return replace(self, key="/".join([self.key] * bool(self.key) + parts(name)))

    def is_file(self) -> bool:
        if not self.key:
            return False
        listing = _recent(self.parent)
        if listing:
            return self.name in listing.files
        if _absent.get(self) is not None:
            return False
        try:
            _known.put(self, _bucket(self).head(self.key))
        except FileNotFoundError:
            _absent.put(self, answer=True)
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

    def scan(self) -> list[NamedEntry]:
        listing = self._list()
        if not listing.exists:
            raise self.error(errno.ENOTDIR if self.is_file() else errno.ENOENT)
        _known.update({self / name: info for name, info in listing.files.items()})
        return [*map(NamedEntry, listing.files), *(NamedEntry(n, is_folder=True) for n in listing.folders)]

    def identity(self) -> tuple[int, str]:
        # What a listing said is taken once, so whoever asks again hears of a change. A GET has it as its condition.
        return (_known.pop(self) or _bucket(self).head(self.key))[:2]

    def open_file(self) -> OpenFile:
        try:
            info = DataFile.at(self)
        except FileNotFoundError:
            if self._list().exists:
                raise self.error(errno.EISDIR) from None
            raise
        return RangedFile(info, _ObjectRanges(info, self.key, _bucket(self)).fill)

    def lost(self) -> str:
        return f"`{_bucket(self).lister.format(self.parent)}` lists what is there"

    def _list(self) -> KeyListing:
        listing = _recent(self)
        if listing is None and self.key:
            _siblings[self.parent] += 1
            if _siblings[self.parent] == _MANY:
                with suppress(AccessError):  # it is very much: one directory after the other, then
                    _listed.update(_listings(self.parent, deep=True), longer=_LOOKED_OVER_SECONDS)
                listing = _recent(self)
        if listing is None:
            listing = _listings(self, deep=False)[self]
            _listed.put(self, listing)
        return listing

    @property
    def prefix(self) -> str:
        """The beginning of the keys of all files below."""
        return f"{self.key}/" if self.key else ""


def forget() -> None:
    """Forget what was listed: this process has changed something there."""
    for cache in (_known, _absent, _listed, _siblings):
        cache.clear()


def close() -> None:
    """Close all connections and forget logins: the environment may be another one."""
    forget()
    with _lock:
        _buckets.clear()
    buckets.close()


_buckets: dict[tuple[str, str], Bucket] = {}
_lock = threading.Lock()
_known: TimedCache[ObjectPlace, ObjectInfo] = TimedCache(math.inf, 1 << 20)
"""Objects that were listed, and that nobody has asked for since."""
_absent: TimedCache[ObjectPlace, bool] = TimedCache(LISTED_SECONDS)
_listed: TimedCache[ObjectPlace, KeyListing] = TimedCache(LISTED_SECONDS)
_siblings: Counter[ObjectPlace] = Counter()
"""The number of directories in one that were listed by themselves."""


def _is_name(name: str) -> bool:
    return name not in ("", ".", "..") and "\0" not in name


def _recent(place: ObjectPlace) -> KeyListing | None:
    """The listing of a moment ago, of a directory or of one above that has no such directory."""
    if found := _listed.get(place):
        return found
    above = _recent(place.parent) if place.key else None
    return None if above is None or place.name in above.folders else KeyListing({}, (), exists=False)


def _bucket(place: ObjectPlace) -> Bucket:
    with _lock:
        found = _buckets.get((place.scheme, place.bucket))
        if found is None:
            found = _buckets[place.scheme, place.bucket] = buckets.open_bucket(place.scheme, place.bucket)
        return found


def _listings(place: ObjectPlace, *, deep: bool) -> dict[ObjectPlace, KeyListing]:
    """The listing of this directory; ``deep``: those of each one below it, too.

    Names that no file on this machine could have are left out: they are nobody's checkpoint. Raises AccessError for
    a listing that does not end.
    """
    held: dict[ObjectPlace, tuple[dict[str, ObjectInfo], dict[str, None]]] = {place: ({}, {})}
    most, exists = (_TREE_PAGES if deep else MOST_PAGES), not place.key
    for number, page in enumerate(_bucket(place).pages(place.prefix, deep=deep)):
        if number == most:
            raise AccessError(f"the listing does not end after {most:,} pages", where=f"{place}/")
        exists = exists or bool(page.files or page.folders)
        for key, info in (*page.files, *((folder, None) for folder in page.folders)):
            *folders, name = key.removeprefix(place.prefix).split("/")
            if not all(map(_is_name, folders)) or (name and not _is_name(name)) or (folders and name and not deep):
                continue
            at = place
            for folder in folders:
                held[at][1][folder] = None
                at = at / folder
                if deep:
                    held.setdefault(at, ({}, {}))
            if name and info is not None:
                held[at][0][name] = info
    return {at: KeyListing(files, folders.keys(), exists or at != place) for at, (files, folders) in held.items()}


class _ObjectRanges(NamedTuple):
    """The bytes of an object as it was when it was opened."""

    info: DataFile
    key: str
    bucket: Bucket

    def fill(self, at: int, into: memoryview) -> None:
        """Raises AccessError, CorruptError, and what ``Bucket.explain`` raises."""
        try:
            self._get(at, into, renew=False)
        except HttpError as e:
            if e.status not in _AGAIN:
                self._explain(e)
            try:
                self._get(at, into, renew=True)
            except HttpError as again:
                self._explain(again)

    def _explain(self, e: HttpError) -> NoReturn:
        if isinstance(e, ChangedError):
            what = "the object has changed since it was opened"
            raise CorruptError(what, where=str(self.info.place), hint="repeat the command") from None
        if isinstance(e, RefusedRedirectError):
            raise AccessError(str(e.strerror), where=str(self.info.place), hint=e.hint) from None
        self.bucket.explain(e, self.key)

    def _get(self, at: int, into: memoryview, *, renew: bool) -> None:
        sent = self.bucket.signed(self.key, self.info.tag, renew=renew)
        answer = client().get_range(
            sent.url, at, at + len(into), into, headers=sent.headers, if_match=sent.if_match, total=self.info.size
        )
        for name, value in sent.expected.items():
            if answer.headers.get(name, value) != value:
                raise ChangedError("the object has changed", sent.url, answer)
