"""An open file of any place as what Python's own functions read, and as memory."""

from __future__ import annotations

import errno
import mmap
import os
from io import DEFAULT_BUFFER_SIZE, BufferedReader, RawIOBase
from typing import NamedTuple

from ckpttool.core.files import DataFile, OpenFile
from ckpttool.storage import system
from ckpttool.storage.place import ahead


def stream(file: OpenFile, buffering: int = -1) -> BufferedReader:
    """The file as ``open`` gives one. Closing it closes the file. Small reads of one elsewhere are read ahead."""
    return BufferedReader(_FileStream(ahead(file)), buffering if buffering > 1 else DEFAULT_BUFFER_SIZE)


def in_memory(file: OpenFile) -> mmap.mmap:
    """All bytes of a file, read into memory. Raises OSError, and ValueError for an empty one."""
    data = mmap.mmap(-1, file.info.size)
    with memoryview(data) as view:
        at = 0
        while at < len(view) and (n := file.read_into(view[at : at + (16 << 20)], at)):
            at += n
        if at < len(view):
            raise OSError(errno.EIO, f"it ends after {at:,} of {len(view):,} bytes", str(file.info.place))
    return data


class OnDisk(NamedTuple):
    """A file that lies in one of this machine, which is open."""

    info: DataFile
    fd: int
    begin: int = 0
    """Its first byte there."""

    def pread(self, n: int, at: int) -> bytes:
        return os.pread(self.fd, max(0, min(n, self.info.size - at)), self.begin + at)

    def read_into(self, buffer: memoryview, at: int) -> int:
        return system.read_into(self.fd, (buffer[: max(0, self.info.size - at)],), self.begin + at)

    def map(self) -> mmap.mmap:
        return in_memory(self) if self.begin else mmap.mmap(self.fd, self.info.size, access=mmap.ACCESS_READ)

    def close(self) -> None:
        os.close(self.fd)


class _FileStream(RawIOBase):
    def __init__(self, file: OpenFile) -> None:
        super().__init__()
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._file.info.size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # what BufferedReader gives
        n = self._file.read_into(memoryview(buffer), self._at)
        self._at += n
        return n

    def readall(self) -> bytes:
        """Reads all in one piece: requests are expensive."""
        data = bytearray(max(0, self._file.info.size - self._at))
        with memoryview(data) as view:
            done = 0
            while done < len(view) and (n := self._file.read_into(view[done:], self._at)):
                done += n
                self._at += n
        return bytes(data[:done])

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()
