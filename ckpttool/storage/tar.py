"""Files inside of a tar, read where they lie: a ``.nemo`` is one. Nothing is unpacked.

    tar:/models/llama.nemo!/model_weights/.metadata        of /models/llama.nemo
    tar:/hf://org/llama/llama.nemo!/model_config.yaml      of one on another machine

Only headers are read to list it: 512 bytes before those of each member, and what describes members with long names or
large sizes. Source: POSIX.1-2017, pax ("ustar Interchange Format", "pax Extended Header"), and the manual of GNU tar
("Basic Tar Format"). Python's tarfile, which packs a ``.nemo``, writes the first since 3.8 and the second before.

``tarfile`` reads each header here. The way from one to the next is our own: tarfile's takes a damaged header for the
end, follows sizes below zero, and accepts descriptions that contradict themselves.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple, NoReturn, Self

from ckpttool.core.files import DataFile, OpenFile, Place
from ckpttool.errors import ConflictError, CorruptError, IncompleteError, UnsupportedError
from ckpttool.storage.place import open_file, parse_place, readable, scheme_of
from ckpttool.storage.remote import NamedEntry, RemotePlace
from ckpttool.storage.stream import OnDisk, in_memory

if TYPE_CHECKING:
    from collections.abc import Mapping

SCHEME = "tar"
BLOCK = 512
"""Bytes of a header; the bytes of a member are filled up to a multiple."""
MAX_MEMBERS = 1 << 20
MAX_DESCRIPTION = 1 << 20
"""Bytes of a long name or a pax header."""
_REGULAR, _DIRECTORY = (b"0", b"\0", b"7"), b"5"
_LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL = b"L", b"K", b"x", b"g"
_LINKS = {b"1": "a hard link", b"2": "a symbolic link"}
_DESCRIPTIONS = (_LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL)


@dataclass(frozen=True, slots=True, repr=False)
class TarPlace(RemotePlace):
    """A file or directory in a tar, here or elsewhere; the tar itself is one, too."""

    archive: Place
    at: str = ""
    """Its name, with slashes; "" is the tar."""

    def __str__(self) -> str:
        archive = f"/{self.archive}"
        if isinstance(self.archive, Path):
            archive = str(self.archive.absolute())
            archive = f"//{archive}" if scheme_of(archive[1:]) else archive  # a directory called `s3:`, say
        return f"{SCHEME}:{archive}!" + (f"/{self.at}" if self.at else "")

    @property
    def name(self) -> str:
        return PurePosixPath(self.at).name or self.archive.name

    @property
    def parent(self) -> Self:
        return replace(self, at=self.at.rpartition("/")[0])

    def __truediv__(self, name: str, /) -> Self:
        return replace(self, at=f"{self.at}/{name}" if self.at else name)

    def is_file(self) -> bool:
        return self.archive.is_file() and self.at in self._tar().files

    def is_dir(self) -> bool:
        return self.archive.is_file() and self.at in self._tar().folders

    def scan(self) -> Iterator[NamedEntry]:
        tar = self._tar(None if self.at else DataFile.at(self.archive))
        if self.at not in tar.folders:
            raise self.error(errno.ENOENT)
        for name in tar.folders[self.at]:
            yield NamedEntry(name, is_folder=(self / name).at in tar.folders)

    def identity(self) -> tuple[int, str]:
        now = DataFile.at(self.archive)
        return self.span(now)[1], now.tag

    def open_file(self) -> OpenFile:
        if not isinstance(self.archive, Path):
            inside = self.archive.open_file()
            try:
                begin, size = self.span(inside.info)
            except BaseException:
                inside.close()
                raise
            return _TarMember(DataFile(self, size, inside.info.tag), inside, begin)
        begin, size = self.span()
        fd = os.open(self.archive, os.O_RDONLY | os.O_CLOEXEC)
        return OnDisk(DataFile(self, size, DataFile.at(self.archive, os.fstat(fd)).tag), fd, begin)

    def on_disk(self) -> tuple[Path, int] | None:
        here = (self.archive, 0) if isinstance(self.archive, Path) else self.archive.on_disk()
        return None if here is None else (here[0], here[1] + self.span()[0])

    def span(self, now: DataFile | None = None) -> tuple[int, int]:
        """The first byte of a file in the tar, and its bytes. Raises OSError for what is no file."""
        tar = self._tar(now)
        if self.at not in tar.files:
            raise self.error(errno.EISDIR if self.at in tar.folders else errno.ENOENT)
        return tar.files[self.at]

    def _tar(self, now: DataFile | None = None) -> _TarContents:
        """The members of the tar; ``now`` is its current state."""
        if not isinstance(self.archive, Path):
            archive = now or _known.get(self.archive) or DataFile.at(self.archive)
            _known[self.archive] = archive
        else:
            archive = DataFile.at(self.archive)
        return _read(self.archive, archive.size, archive.tag)


_known: dict[Place, DataFile] = {}
"""Tars on other machines as they were when somebody looked: each question would be a request."""


def is_tar(place: Place) -> bool:
    """Whether a file begins as one. Raises OSError."""
    with open_file(place) as file:
        head = file.pread(BLOCK, 0)
    return _header(head) is not None


def parse(text: str) -> TarPlace:
    """The place that the text of one names."""
    text = text.removeprefix(f"{SCHEME}:")
    text = text[1:] if scheme_of(text[1:]) else text
    ends = [m.start() for m in re.finditer(r"!(?=/|\Z)", text)] or [len(text)]
    end = next((i for i in ends if parse_place(text[:i]).is_file()), ends[0]) if len(ends) > 1 else ends[0]
    return TarPlace(parse_place(text[:end]), text[end + 1 :].strip("/"))


class _TarMember(NamedTuple):
    """A file in another one, which is open."""

    info: DataFile
    file: OpenFile
    begin: int

    def pread(self, n: int, at: int) -> bytes:
        return self.file.pread(max(0, min(n, self.info.size - at)), self.begin + at)

    def read_into(self, buffer: memoryview, at: int) -> int:
        part = buffer[: max(0, self.info.size - at)]
        return self.file.read_into(part, self.begin + at) if part else 0

    def map(self) -> mmap.mmap:
        return in_memory(self)

    def close(self) -> None:
        self.file.close()


# -- the headers


class _TarContents(NamedTuple):
    files: Mapping[str, tuple[int, int]]
    """Name -> (first byte, bytes)."""
    folders: Mapping[str, list[str]]
    """Name -> what lies directly in it."""


@lru_cache(maxsize=8)
def _read(archive: Place, _size: int, _tag: str) -> _TarContents:
    """The members of a tar. Raises IncompleteError for one that is cut off, CorruptError for one that contradicts
    itself or has names that lead out of it, ConflictError for two members of one name, UnsupportedError for what is
    not a plain tar.
    """
    with readable(archive, "a tar"), open_file(archive) as file:
        return _TarHeaderReader(archive, file).read()


class _TarHeaderReader:
    def __init__(self, archive: Place, file: OpenFile) -> None:
        self.archive, self.file = archive, file
        self.files: dict[str, tuple[int, int]] = {}
        self.folders: dict[str, list[str]] = {"": []}

    def corrupt(self, what: str, hint: str = "fetch or write the file again") -> NoReturn:
        raise CorruptError(what, where=str(self.archive), hint=hint)

    def refuse(self, what: str, hint: str = "") -> NoReturn:
        unpack = f"mkdir DIR && tar xf {self.archive.name} -C DIR, and give the directory"
        raise UnsupportedError(what, where=str(self.archive), hint=hint or f"unpack it: {unpack}")

    def pread(self, n: int, at: int) -> bytes:
        data = self.file.pread(n, at)
        if len(data) < n:
            self.cut_off(at + n)
        return data

    def cut_off(self, needed: int) -> NoReturn:
        raise IncompleteError(
            f"the tar is cut off: it needs at least {needed:,} bytes, it has {self.file.info.size:,}",
            where=str(self.archive),
            hint="the download or save was interrupted; fetch the file again",
            finding="truncated",
        )

    def read(self) -> _TarContents:
        head = self.pread(min(BLOCK, self.file.info.size), 0)
        if head.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")):
            self.refuse("the tar is compressed, so its members cannot be read in place")
        at = count = 0
        said: dict[str, str] = {}
        """Of the next member, by what is before it."""
        while at < self.file.info.size:
            head = self.pread(BLOCK, at)
            if not any(head):
                break
            member = _header(head)
            if member is None:
                self.corrupt("this is not a tar" if not at else f"the header of a member at byte {at:,} is damaged")
            count += 1
            if count > MAX_MEMBERS:
                self.refuse(f"the tar has more than {MAX_MEMBERS:,} members")
            describes = member.type in _DESCRIPTIONS
            size = self.size(member, {} if describes else said)
            at += BLOCK
            if size > self.file.info.size - at:
                self.cut_off(at + size)
            if describes:
                self.describe(member.type, at, size, said)
            else:
                self.add(member.type, self.name(member, said), at, size)
                said = {}
            at += size + -size % BLOCK
        else:
            self.cut_off(at + BLOCK)  # two blocks of zeros end every tar
        return _TarContents(self.files, self.folders)

    def size(self, member: tarfile.TarInfo, said: Mapping[str, str]) -> int:
        if "size" in said and not (said["size"].isdecimal() and len(said["size"]) <= 19):
            self.corrupt("a pax header has a size that is not a number")
        size = int(said.get("size", member.size))
        if size < 0:
            self.corrupt("a member has a size that is not a number")
        return size

    def describe(self, kind: bytes, at: int, size: int, said: dict[str, str]) -> None:
        """The fields that a description sets for the member after it."""
        if size > MAX_DESCRIPTION:
            self.corrupt(f"the description of a member has {size:,} bytes")
        data = self.pread(size, at)
        if kind == _LONG_NAME:
            said["path"] = _text(data.split(b"\0", 1)[0])
        elif kind == _PAX:
            said |= self.records(data)
        elif kind == _PAX_GLOBAL and self.records(data).keys() & {"path", "size"}:
            self.refuse("a global pax header names or sizes all members")

    def records(self, data: bytes) -> dict[str, str]:
        """``LENGTH KEY=VALUE\\n`` each; LENGTH counts all of it."""
        out = {}
        while data:
            length, _, _ = data.partition(b" ")
            end = int(length) if length.isdigit() and len(length) < 9 else 0
            key, equals, value = data[len(length) + 1 : end - 1].partition(b"=")
            if not len(length) < end <= len(data) or not equals or data[end - 1 : end] != b"\n":
                self.corrupt("a pax header is damaged")
            out[_text(key)] = _text(value)
            data = data[end:]
        return out

    def name(self, member: tarfile.TarInfo, said: Mapping[str, str]) -> str:
        if any(key.startswith("GNU.sparse.") for key in said):
            self.refuse("a member of the tar is sparse: it has holes that are not in the file")
        return said.get("path", member.name)

    def add(self, kind: bytes, name: str, at: int, size: int) -> None:
        shown = ascii(name)[1:-1]
        parts = [p for p in name.split("/") if p not in ("", ".")]
        if name.startswith("/") or ".." in parts or "\0" in name:
            self.corrupt(
                f"the member `{shown[:120]}` leads out of the tar", "do not unpack it: the file may be malicious"
            )
        if kind in _LINKS:
            self.refuse(
                f"the member `{shown[:120]}` is {_LINKS[kind]}",
                "NeMo itself skips links; pack the files themselves (tar --dereference --hard-dereference)",
            )
        if kind not in (*_REGULAR, _DIRECTORY):
            what = "sparse" if kind == b"S" else f"of the kind {ascii(kind)[2:-1]!r}, not a file or a directory"
            self.refuse(f"the member `{shown[:120]}` is {what}")
        whole = "/".join(parts)
        if kind == _DIRECTORY or name.endswith("/"):
            if size:
                self.corrupt(f"the directory `{shown[:120]}` has {size:,} bytes")
            self.folder(parts)
            return
        if whole in self.files or whole in self.folders:
            raise ConflictError(
                f"the tar has two members called `{shown[:120]}`",
                where=str(self.archive),
                hint="write it again: programs differ in which one they unpack",
            )
        self.folder(parts[:-1])
        self.files[whole] = (at, size)
        self.folders["/".join(parts[:-1])].append(parts[-1])

    def folder(self, parts: list[str]) -> None:
        """A directory and all above it."""
        for i in range(len(parts)):
            name = "/".join(parts[: i + 1])
            if name in self.files:
                self.corrupt(f"the member `{ascii(name)[1:-1][:120]}` is a file and a directory")
            if name not in self.folders:
                self.folders[name] = []
                self.folders["/".join(parts[:i])].append(parts[i])


def _header(head: bytes) -> tarfile.TarInfo | None:
    """The member that a block describes; None where it is not a header."""
    try:
        return tarfile.TarInfo.frombuf(head, "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError):
        return None


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")
