"""Places of sources: paths of this machine and addresses of others.

A place on this machine is a ``Path``. Bytes elsewhere are an addition: a class with what ``Remote`` asks for, in a
module with ``parse``, and its scheme in ``SCHEMES``.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import NamedTuple, TypeGuard, TypeVar, overload

from ckpttool.core.activity import activity
from ckpttool.core.files import AnyPlace, DataFile, Entry, Mapped, OpenFile, Place, Remote
from ckpttool.errors import CorruptError, IncompleteError, UsageError, not_installed
from ckpttool.storage import system
from ckpttool.storage.readahead import BLOCK, STRAIGHT, Windows, at_once

T = TypeVar("T")


def _module(name: str, *, sent: bool = True) -> Callable[[str], Remote]:
    """``parse`` of a module beside this one, which is imported when there is something to parse.

    ``sent``: the text goes over a network, so it has to be one.
    """

    def parse(text: str) -> Remote:
        if sent and any("\ud800" <= c <= "\udfff" for c in text):
            raise UsageError("the address has bytes that are not UTF-8", where=text)
        try:
            found: Remote = import_module(f"ckpttool.storage.{name}").parse(text)
        except ModuleNotFoundError as e:  # parse() imports, too: what one of several schemes needs
            if e.name is None or e.name.partition(".")[0] == "ckpttool":
                raise
            raise not_installed(f"{text.partition(':')[0]}://", e.name, "remote") from None
        return found

    return parse


SCHEMES: dict[str, Callable[[str], Remote]] = {
    "tar": _module("tar", sent=False),
    "hf": _module("hub"),
    **dict.fromkeys(("s3", "gs", "az"), _module("objects")),
    **dict.fromkeys(("https", "http"), _module("web")),
}
"""Parsers of texts that begin with a scheme, a colon and a slash. The text of a ``Path`` has one slash where
people write two."""

_SCHEME = re.compile(r"([a-z][a-z0-9+]+):/")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://([^/@]*@)?([^?#]*)")
"""Scheme, user and password, and what may be shown."""
_UNCUT = re.compile(r"([A-Za-z0-9]+):/?(?!/)([^/@]*@)?([^?#]*)")
"""``_URL`` without two slashes."""
_OTHERS = {"s3a": "s3", "s3n": "s3", "gcs": "gs", "huggingface": "hf", "hub": "hf"}
"""Other tools' names for a scheme."""
_SENT = SCHEMES.keys() - {"tar"}
_AZURE = ("abfs", "abfss", "adl", "azure", "wasb", "wasbs")


def parse_place(text: AnyPlace) -> Place:
    """The place that a text names. ``x:/y`` with a scheme that nobody knows is a path.

    Raises UsageError for ``x://y`` and ``s3:y``, which nobody means as a path, and what a storage raises for a text.
    """
    if not isinstance(text, str | os.PathLike):
        if not hasattr(text, "name"):  # from Python, where nothing else says so
            raise UsageError(f"{text!r} is not a path", hint="pass a str or a Path")
        return text
    name = os.fspath(text)
    if scheme := scheme_of(name):
        return SCHEMES[scheme](name)
    url = _URL.match(name)
    if url and not os.path.lexists(name):
        hint = _meant(url[1].lower(), url[3])
        raise UsageError(f"unknown URL scheme {url[1]}://", where=f"{url[1]}://{url[3]}", hint=hint)
    m = _UNCUT.match(name)
    if m and m[1].lower() in _SENT and not os.path.lexists(name):
        hint = f"did you mean {m[1].lower()}://{m[3]}?"
        raise UsageError(f"an address begins with {m[1].lower()}://", where=f"{m[1]}:{m[3]}", hint=hint)
    return Path(name)


def _meant(scheme: str, rest: str) -> str:
    if scheme == "file":
        return f"give the path: /{rest.partition('/')[2]}"
    if scheme in _AZURE:
        return "Azure blobs are az://CONTAINER/PATH, with the account in AZURE_STORAGE_ACCOUNT"
    if scheme in _OTHERS or scheme in SCHEMES:
        return f"did you mean {_OTHERS.get(scheme, scheme)}://{rest}?"
    return "places on other machines are hf://ORG/MODEL, s3://, gs:// or az:// with BUCKET/PREFIX, and https://"


def scheme_of(text: str) -> str:
    """The scheme of a text that names no path; "" for a path."""
    m = _SCHEME.match(text)
    return m[1] if m and m[1] in SCHEMES else ""


def scan(place: Place) -> Iterator[Entry]:
    """The entries of a directory, in no order. Raises OSError."""
    if not isinstance(place, Path):
        yield from place.scan()
        return
    with os.scandir(place) as entries:
        yield from entries


def walk(place: Place) -> Iterator[str]:
    """Names of all files in a directory and below, with slashes. Directories that are links, or cannot be listed, have
    none."""
    try:
        entries = list(scan(place))
    except OSError:
        return
    for e in entries:
        if not e.is_dir():
            yield e.name
        elif not is_link(place / e.name):
            yield from (f"{e.name}/{n}" for n in walk(place / e.name))


class FileInFolder(NamedTuple):
    """A file in a directory, or further down."""

    name: str
    """The path, with slashes."""
    size: int
    time: float | None
    """Seconds since 1970 at which it was changed last; None where that is not known."""


def files_in(place: Place) -> list[FileInFolder]:
    """The files in a directory and below, or the file itself. Without what has gone meanwhile."""
    names = [""] if place.is_file() else sorted(walk(place))
    out = []
    for name in names:
        at = place / name if name else place
        try:
            if isinstance(at, Path):
                stat = at.stat()
                out.append(FileInFolder(name, stat.st_size, stat.st_mtime))
            else:
                out.append(FileInFolder(name, at.identity()[0], None))
        except OSError:
            continue
    return out


def name_below(place: Place, root: Place) -> str | None:
    """The name of a place below another one, with slashes; None where it is not below."""
    if isinstance(place, Path) and isinstance(root, Path):
        return place.relative_to(root).as_posix() if place.is_relative_to(root) else None
    return str(place).removeprefix(f"{root}/") if str(place).startswith(f"{root}/") else None


def resolved(place: Place) -> Place:
    """The place by its full name, without links."""
    return place.resolve() if isinstance(place, Path) else place


def local_path(place: Place) -> Path:
    """The path of a place that is to be changed. Raises UsageError for one that is not on this machine."""
    if isinstance(place, Path):
        return place
    raise UsageError("remote files cannot be changed in place", where=str(place))


def number(place: Place) -> tuple[int, int]:
    """Device and inode of a path, which change when ``--force`` of another run replaces it; zeros elsewhere."""
    try:
        stat = place.stat() if isinstance(place, Path) else None
    except OSError:
        stat = None
    return (stat.st_dev, stat.st_ino) if stat else (0, 0)


def is_same(first: Place, second: Place) -> bool:
    """Whether two places are one file. Raises OSError."""
    if isinstance(first, Path) and isinstance(second, Path):
        return first.samefile(second)
    return first == second


@contextmanager
def open_file(place: Place) -> Iterator[OpenFile]:
    """Open a file of a source. Raises OSError; for a directory when the first bytes are read."""
    with closing(open_local(place) if isinstance(place, Path) else ahead(place.open_file())) as file:
        yield file


def open_local(path: Path) -> OpenFile:
    """Open a file of this machine, as ``Remote.open_file`` does elsewhere. Raises OSError."""
    return _LocalFile(path)


def ahead(file: OpenFile) -> OpenFile:
    """A file on another machine, of which small reads are answered from memory; as it is when it lies on this one."""
    place = file.info.place
    return file if isinstance(place, Path) or place.on_disk() else _ReadAhead(file)


@contextmanager
def readable(place: Place, kind: str = "") -> Iterator[None]:
    """Raises IncompleteError for a file that does not exist and CorruptError for one that cannot be read.

    ``kind`` completes "this is a directory, not ...".
    """
    try:
        yield
    except FileNotFoundError:
        hint = None if isinstance(place, Path) else place.lost() or None
        raise IncompleteError("the file does not exist", where=str(place), hint=hint) from None
    except OSError as e:
        directory = kind and isinstance(e, IsADirectoryError)
        what = f"this is a directory, not {kind}" if directory else f"the file cannot be read: {e.strerror}"
        raise CorruptError(what, where=str(place)) from None


def is_link(place: Place) -> TypeGuard[Path]:
    """Whether a place is only another name of a file or directory of this machine."""
    return isinstance(place, Path) and place.is_symlink()


def read_all(place: Place) -> bytes:
    """A small file. Raises OSError."""
    with place.open("rb") as f:
        return f.read()


def expect(file: OpenFile, places: Iterable[int]) -> None:
    """Say where small reads of a file will begin, in any order. One on another machine asks for them at once."""
    if isinstance(file, _ReadAhead):
        file.expect(places)


def read_each(read: Callable[..., T], places: Sequence[Place], *more: Iterable[object]) -> Iterator[T]:
    """Calls a function for each of several files, in order. Those on other machines are read several at a time.

    ``more`` are further arguments, one for each file.
    """
    activity.begin("reading headers", len(places))
    if len(places) < 2 or all(map(is_here, places)):
        return map(read, places, *more)
    return at_once(partial(read, *given) for given in zip(places, *more, strict=True))


def is_here(place: Place) -> bool:
    """Whether the bytes of a file are on this machine."""
    try:
        return isinstance(place, Path) or place.on_disk() is not None
    except OSError:  # a directory
        return False


class _ReadAhead:
    __slots__ = ("_file", "_windows", "info")

    def __init__(self, file: OpenFile) -> None:
        self._file, self.info = file, file.info
        self._windows = Windows((str(self.info.place), *self.info[1:3]), self.info.size, file.read_into)

    def pread(self, n: int, at: int) -> bytes:
        return self._windows.pread(n, at)

    def read_into(self, buffer: memoryview, at: int) -> int:
        if len(buffer) >= STRAIGHT:
            return self._file.read_into(buffer, at)
        data = self._windows.pread(len(buffer), at)
        buffer[: len(data)] = data
        return len(data)

    def expect(self, places: Iterable[int]) -> None:
        self._windows.expect(places)

    def map(self) -> Mapped:
        return _RemoteBytes(self)

    def close(self) -> None:
        self._file.close()


class _RemoteBytes:
    """The bytes of a file on another machine, of which a window is here."""

    __slots__ = ("_begin", "_file", "_window")

    def __init__(self, file: OpenFile) -> None:
        self._file, self._begin, self._window = file, 0, b""

    @overload
    def __getitem__(self, at: int, /) -> int: ...
    @overload
    def __getitem__(self, part: slice, /) -> bytes: ...
    def __getitem__(self, at: int | slice, /) -> int | bytes:
        if isinstance(at, slice):
            start, stop, _ = at.indices(self._file.info.size)
            inside = self._begin <= start and stop <= self._begin + len(self._window)
            return self._window[start - self._begin : stop - self._begin] if inside else self._read(start, stop - start)
        if not self._begin <= at < self._begin + len(self._window):
            self._begin, self._window = at, self._read(at, BLOCK)
        return self._window[at - self._begin]

    def _read(self, at: int, n: int) -> bytes:
        return self._file.pread(n, at) if n > 0 else b""

    def madvise(self, option: int, start: int = 0, length: int = 0, /) -> None:
        pass

    def close(self) -> None:
        pass


class _LocalFile:
    __slots__ = ("_fd", "info")

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            stat = os.fstat(self._fd)
            if not (S_ISREG(stat.st_mode) or S_ISDIR(stat.st_mode)):  # a pipe, or a device: one would wait for ever
                raise OSError(errno.EINVAL, "it is not a regular file", str(path))
            self.info = DataFile.at(path, stat)
        except BaseException:
            os.close(self._fd)
            raise

    def pread(self, n: int, at: int) -> bytes:
        return os.pread(self._fd, n, at)

    def read_into(self, buffer: memoryview, at: int) -> int:
        return system.read_into(self._fd, (buffer,), at)

    def map(self) -> mmap.mmap:
        return mmap.mmap(self._fd, self.info.size, access=mmap.ACCESS_READ)

    def close(self) -> None:
        os.close(self._fd)
