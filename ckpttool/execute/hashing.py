"""Checksums of stored tensors, taken while their bytes pass on the way to the disk: for a manifest, and for files that
have checksums inside.

A hash needs a tensor's bytes in order. Parts of one unit run on one thread in order when a manifest is wanted, and
nearly all of them write in order; what does not is read back, at the end of the part while it is still in memory, or
at the end of the unit.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import numpy as np
import xxhash

from ckpttool.core.encodings import Contents, Encoding
from ckpttool.core.files import Place
from ckpttool.core.plan import WrittenTensor
from ckpttool.execute.reader import reading

ALGORITHM = "xxh3_128"
CRC32 = "crc32"
_CHUNK = 4 << 20
_ZEROS = bytes(1 << 16)

ReadBack = Callable[[int, int, memoryview], None]
"""(output file, offset, buffer): fill the buffer with what was written there."""


def hasher() -> xxhash.xxh3_128:
    """A running hash of the same algorithm, for bytes that lie in no single range."""
    return xxhash.xxh3_128()


def hash_range(contents: Contents | Place, offset: int, nbytes: int) -> str:
    """``xxh3_128:<hex>`` of a byte range of a file, or of what it is decoded to.

    Raises CorruptError when the file is too short.
    """
    h = xxhash.xxh3_128()
    name = contents if isinstance(contents, Encoding) else str(contents)
    buffer = np.empty(max(1, min(_CHUNK, nbytes)), np.uint8).data
    with reading(1) as pool:
        for at in range(0, nbytes, _CHUNK):
            piece = buffer[: min(_CHUNK, nbytes - at)]
            pool.read(name, offset + at, (piece,), once=False)
            h.update(piece)
    return f"{ALGORITHM}:{h.hexdigest()}"


class _Crc32:
    """The checksum of zip and gzip, in the form of hashlib's hashes."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def update(self, data: memoryview) -> None:
        self.value = zlib.crc32(data, self.value)

    def hexdigest(self) -> str:
        return f"{self.value:08x}"


_POLYNOMIAL = 0xEDB88320
"""The polynomial of CRC-32, the lowest power of x in the highest bit."""


def _times(a: int, b: int) -> int:
    """The product of two polynomials modulo that of CRC-32."""
    product, bit = 0, 1 << 31
    while a:
        if a & bit:
            product ^= b
            a ^= bit
        bit >>= 1
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@lru_cache(maxsize=4096)
def _behind(nbytes: int) -> int:
    """What a checksum is multiplied with when so many bytes come after it: x to the power of their bits."""
    power, square = 1 << 31, 1 << 23  # x**0, x**8
    while nbytes:
        if nbytes & 1:
            power = _times(square, power)
        square = _times(square, square)
        nbytes >>= 1
    return power


def joined_crc32(first: int, size: int, parts: Iterable[tuple[int, int, int]]) -> int:
    """CRC-32 of ``size`` bytes from ``first`` on. ``parts`` are (offset, bytes, CRC-32) in order; zeros lie between."""
    sum_, at = 0, first
    for offset, nbytes, crc in (*parts, (first + size, 0, 0)):
        zeros = offset - at
        while zeros:
            some = min(zeros, len(_ZEROS))
            sum_ = zlib.crc32(_ZEROS[:some], sum_)
            zeros -= some
        sum_ = _times(_behind(nbytes), sum_) ^ crc
        at = offset + nbytes
    return sum_


class _RunningHash:
    """The hash of one target so far."""

    __slots__ = ("at", "hash", "key", "start", "stop", "top", "written")

    def __init__(self, key: str, target: WrittenTensor) -> None:
        self.key = key
        self.hash = _Crc32() if key.endswith(CRC32) else xxhash.xxh3_128()
        self.start = self.at = target.offset
        self.stop = target.offset + target.nbytes
        self.written = 0
        """Bytes written beyond ``at``, out of order."""
        self.top = 0
        """End of the last of them."""


class TensorHashes:
    """The hashes of the targets of the units that one task works on."""

    def __init__(self, targets: Sequence[tuple[str, WrittenTensor]]) -> None:
        self._files: dict[int, tuple[list[int], list[_RunningHash]]] = {}
        for key, target in sorted(targets, key=lambda t: (t[1].file, t[1].offset)):
            starts, sums = self._files.setdefault(target.file, ([], []))
            starts.append(target.offset)
            sums.append(_RunningHash(key, target))

    def feed(self, file: int, offset: int, data: memoryview) -> None:
        """These bytes are being written there."""
        entry = self._files.get(file)
        if entry is None:
            return
        starts, sums = entry
        end = offset + data.nbytes
        i = bisect_left(starts, starts[max(0, bisect_right(starts, offset) - 1)])  # a target may have two hashes
        while i < len(sums) and sums[i].start < end:
            s = sums[i]
            a, b = max(offset, s.start), min(end, s.stop)
            if a < b:
                if a == s.at and not s.written:
                    s.hash.update(data[a - offset : b - offset])
                    s.at = b
                else:
                    s.written += b - a
                    s.top = max(s.top, b)
            i += 1

    def part_done(self, read: ReadBack, buffer: memoryview) -> None:
        """Read back what was written out of order and left no gap, while it is still in the page cache."""
        for file, (_, sums) in self._files.items():
            for s in sums:
                if s.written and s.at + s.written == s.top:
                    self._read_back(s, file, s.top, read, buffer)
                    s.written = 0

    def finish(self, read: ReadBack, buffer: memoryview) -> dict[str, str]:
        """The hashes by key, reading back what has not been hashed on the way."""
        out: dict[str, str] = {}
        for file, (_, sums) in self._files.items():
            for s in sums:
                if s.at < s.stop:
                    self._read_back(s, file, s.stop, read, buffer)
                out[s.key] = s.hash.hexdigest()
        return out

    @staticmethod
    def _read_back(s: _RunningHash, file: int, stop: int, read: ReadBack, buffer: memoryview) -> None:
        while s.at < stop:
            piece = buffer[: min(buffer.nbytes, stop - s.at)]
            read(file, s.at, piece)
            s.hash.update(piece)
            s.at += piece.nbytes
