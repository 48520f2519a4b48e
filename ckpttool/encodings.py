"""Elements that files hold in another form; they are decoded while they are read.

    DataFile.encoding   Encoding   the bytes that its file stands for; stored tensors are strided blocks of these
      parts             Text       characters in UTF-8 whose code points are the bytes (pickles of protocol 2)
                        Moment     8-bit codes with scales (quantised optimizer state)

A part is decoded a block at a time. Each says where it may be cut: any byte can be asked for, in any order, and costs
one block at most. Opening a checkpoint decodes nothing, and nothing is ever decoded to a file.
"""

from __future__ import annotations

import codecs
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple

from ckpttool.errors import CorruptError

Read = Callable[[str, int, Sequence[memoryview]], None]
"""(path, offset, buffers): fill the buffers with consecutive bytes of a file."""

TEXT_BLOCK = 1 << 17
"""Bytes of text that are decoded at once."""

MOMENT_BLOCK = 1 << 17
"""Elements of a moment that are decoded at once."""

ROWS_PER_SCALE = 32
"""Of packed moments."""


class Span(NamedTuple):
    """A run of bytes in a file."""

    path: str
    offset: int
    nbytes: int

    def cut(self, lo: int, hi: int) -> Span:
        """Bytes ``[lo, hi)`` of it."""
        return Span(self.path, self.offset + lo, hi - lo)

    def load(self, read: Read) -> bytearray:
        """Its bytes."""
        out = bytearray(self.nbytes)
        read(self.path, self.offset, (memoryview(out),))
        return out


class Text(NamedTuple):
    """Whole characters: one block."""

    start: int
    """First and last + 1 of the decoded bytes."""
    stop: int
    text: Span

    def block(self, at: int) -> tuple[int, int]:
        """What is decoded together with a byte."""
        del at
        return self.start, self.stop

    def decode(self, lo: int, hi: int, read: Read) -> bytes:
        """The bytes ``[lo, hi)``, which are a block. Raises UnicodeError."""
        del lo, hi
        return latin1(self.text.load(read))[0]


def latin1(text: bytes | bytearray, *, final: bool = True) -> tuple[bytes, int]:
    """(the bytes that a text stands for, how many bytes of text they are: fewer where a character is cut off).

    Raises UnicodeDecodeError for what is not UTF-8, UnicodeEncodeError for characters beyond U+00FF.
    """
    characters, used = codecs.utf_8_decode(text, "strict", final)
    return characters.encode("latin-1"), used


class Moment(NamedTuple):
    """One moment of a parameter as float32, row-major.

    first moment:  code / 127 * scale                                  packed: high nibble (signed) / 7
    second moment: (1 / r - 1e-8)^2, r = code / 255 * (max - min) + min     packed: low nibble / 15

    There is a scale for each index of axis 1 (one in all where there is one axis). Packed codes have one for each
    column of ``ROWS_PER_SCALE`` rows.
    """

    start: int
    shape: tuple[int, ...]
    codes: Span
    scales: tuple[Span, ...]
    """(scales,) of the first moment, (minima, maxima) of the second; float32."""
    packed: bool

    @property
    def stop(self) -> int:
        return self.start + 4 * prod(self.shape)

    @property
    def _width(self) -> int:
        return prod(self.shape[1:])

    def block(self, at: int) -> tuple[int, int]:
        """What is decoded together with a byte: whole rows, or a stretch of one."""
        width = self._width
        row, column = divmod((at - self.start) // 4, width)
        if width > MOMENT_BLOCK:
            first = column // MOMENT_BLOCK * MOMENT_BLOCK
            lo, hi = row * width + first, row * width + min(width, first + MOMENT_BLOCK)
        else:
            rows = MOMENT_BLOCK // width
            lo, hi = row // rows * rows * width, min(prod(self.shape), (row // rows + 1) * rows * width)
        return self.start + 4 * lo, self.start + 4 * hi

    def decode(self, lo: int, hi: int, read: Read) -> memoryview:
        """The bytes ``[lo, hi)``, which are a block."""
        import numpy as np

        first, last = (lo - self.start) // 4, (hi - self.start) // 4
        codes = np.frombuffer(self.codes.cut(first, last).load(read), np.uint8)
        row, column = divmod(first, self._width)
        codes = codes.reshape(-1, min(len(codes), self._width))
        scales = [self._spread(s, row, column, codes.shape, read) for s in self.scales]
        with np.errstate(all="ignore"):
            if len(scales) == 1:
                signed = codes.view(np.int8)
                values = (signed >> 4 if self.packed else signed).astype(np.float32)
                values = values / np.float32(7 if self.packed else 127) * scales[0]
            else:
                low, high = scales
                values = (codes & 15 if self.packed else codes).astype(np.float32)
                values = values / np.float32(15 if self.packed else 255) * (high - low) + low
                values = np.square(np.float32(1) / values - np.float32(1e-8))
        return np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint8).data

    def _spread(self, scales: Span, row: int, column: int, shape: tuple[int, ...], read: Read) -> Any:
        """The scales of a box of codes, so that they can be multiplied with it."""
        import numpy as np

        def load(lo: int, hi: int) -> Any:
            return np.frombuffer(scales.cut(4 * lo, 4 * hi).load(read), "<f4")

        rows, columns = shape
        if self.packed:
            first, last = row // ROWS_PER_SCALE, -(-(row + rows) // ROWS_PER_SCALE)
            # More than a row of scales only where the codes are whole rows.
            found = load(first * self._width + column, (last - 1) * self._width + column + columns)
            return np.repeat(found.reshape(-1, columns), ROWS_PER_SCALE, axis=0)[row % ROWS_PER_SCALE :][:rows]
        if len(self.shape) < 2:
            return load(0, 1)
        inner = prod(self.shape[2:])
        first, last = column // inner, -(-(column + columns) // inner)
        return np.repeat(load(first, last), inner)[column - first * inner :][:columns]


@dataclass(eq=False, slots=True)
class Encoding:
    """The bytes that a file is decoded to."""

    name: str
    """What is decoded: ``text`` or ``moments``."""
    path: str
    """Of the file, for errors."""
    parts: list[Text | Moment] = field(default_factory=list)
    """One behind the other."""

    def __str__(self) -> str:
        return f"{self.path} decoded"

    @property
    def size(self) -> int:
        """Bytes after decoding."""
        return self.parts[-1].stop if self.parts else 0


class Decoder(threading.local):
    """Reads decoded bytes; each thread keeps the block that it decoded last."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._held: tuple[Encoding | None, int, int, memoryview] = (None, 0, 0, memoryview(b""))

    def read(self, encoding: Encoding, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill ``buffers`` with consecutive decoded bytes. Raises CorruptError when they cannot be decoded any more."""
        for buffer in buffers:
            done = 0
            while done < buffer.nbytes:
                lo, hi, block = self._block(encoding, offset)
                n = min(buffer.nbytes - done, hi - offset)
                buffer[done : done + n] = block[offset - lo : offset - lo + n]
                offset, done = offset + n, done + n

    def _block(self, encoding: Encoding, at: int) -> tuple[int, int, memoryview]:
        held, lo, hi, block = self._held
        if held is not encoding or not lo <= at < hi:
            part = encoding.parts[bisect_right(encoding.parts, at, key=attrgetter("start")) - 1]
            lo, hi = part.block(at)
            try:
                block = memoryview(part.decode(lo, hi, self._read))
            except UnicodeError:
                block = memoryview(b"")
            if len(block) != hi - lo or not lo <= at < hi:
                raise CorruptError(
                    "a source has changed while it was read", where=encoding.path, hint="repeat the command"
                )
            self._held = encoding, lo, hi, block
        return lo, hi, block
