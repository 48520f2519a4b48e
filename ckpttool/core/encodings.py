"""Elements that files hold in another form; they are decoded while they are read.

    DataFile.encoding   Encoding   the bytes that its file stands for; stored tensors are strided blocks of these
      parts             Text       characters in UTF-8 whose code points are the bytes (pickles of protocol 2)
                        Moment     8-bit codes with scales (quantized optimizer state)
                        Blocks8    8-bit codes in blocks of 32 behind their scale (Q8_0 of GGUF)
                        Given      bytes that are in no file (a step, worked out from what the file says)

Any byte can be asked for, in any order: a part says where it may be cut, and little more than what is wanted is
decoded. Opening a checkpoint decodes nothing to a file, nor does anything else.
"""

from __future__ import annotations

import codecs
import threading
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple

from ckpttool.errors import CorruptError

Read = Callable[[str, int, Sequence[memoryview]], None]
"""(path, offset, buffers): fill the buffers with consecutive bytes of a file."""

BLOCK = 1 << 18
"""Most bytes that are decoded at once."""

TEXT_STEP = 1 << 12
"""Decoded bytes from one place where a text may be cut to the next."""

ROWS_PER_SCALE = 32
"""Rows of packed moments that share a scale."""
Q8_ELEMENTS, Q8_BYTES = 32, 34
"""Elements and bytes of a block of Q8_0."""


class Span(NamedTuple):
    """A run of bytes in a file."""

    path: str
    offset: int
    nbytes: int

    def load(self, read: Read, lo: int, hi: int) -> bytearray:
        """Bytes ``[lo, hi)`` of it."""
        out = bytearray(hi - lo)
        read(self.path, self.offset + lo, (memoryview(out),))
        return out

    def cut(self, lo: int, hi: int) -> Span:
        """Bytes ``[lo, hi)`` of it."""
        return self._replace(offset=self.offset + lo, nbytes=hi - lo)


class Text(NamedTuple):
    """Characters that stand for bytes."""

    start: int
    """First and last + 1 of the decoded bytes."""
    stop: int
    text: Span
    marks: Sequence[int]
    """Where in the text each ``TEXT_STEP`` of decoded bytes begins."""

    @classmethod
    def scan(cls, start: int, text: Span, pread: Callable[[int, int], bytes]) -> Text:
        """Count what a text stands for, and where it may be cut; ``pread`` takes offset and bytes.

        Raises UnicodeDecodeError for what is not UTF-8, UnicodeEncodeError for characters beyond U+00FF.
        """
        import numpy as np

        at = size = 0
        marks = array("Q")
        while at < text.nbytes:
            raw = pread(text.offset + at, min(BLOCK, text.nbytes - at))
            data, used = latin1(raw, final=at + len(raw) == text.nbytes)
            firsts = np.flatnonzero((np.frombuffer(raw, np.uint8, used) & 0xC0) != 0x80)[-size % TEXT_STEP :: TEXT_STEP]
            marks.extend((firsts + at).tolist())
            at, size = at + used, size + len(data)
        return cls(start, start + size, text, marks)

    def block(self, at: int, want: int) -> tuple[int, int]:
        """What to decode for the bytes ``[at, at + want)``: a run with the first of them in it."""
        lo = self.start + (at - self.start) // TEXT_STEP * TEXT_STEP
        steps = min(BLOCK // 2, at + want - lo + TEXT_STEP - 1) // TEXT_STEP
        return lo, min(self.stop, lo + steps * TEXT_STEP)

    def decode(self, lo: int, hi: int, read: Read) -> bytes:
        """The bytes of such a run. Raises UnicodeError."""
        return latin1(self.text.load(read, *self._marked(lo, hi)))[0]

    def _marked(self, lo: int, hi: int) -> tuple[int, int]:
        first, last = (lo - self.start) // TEXT_STEP, -(-(hi - self.start) // TEXT_STEP)
        return self.marks[first], self.marks[last] if last < len(self.marks) else self.text.nbytes

    def spans(self, lo: int, hi: int) -> Iterator[Span]:
        """What of the file is read for these bytes, at least."""
        yield self.text.cut(*self._marked(lo, hi))


def latin1(text: bytes | bytearray, *, final: bool = True) -> tuple[bytes, int]:
    """(the bytes that a text stands for, how many bytes of text they are: fewer where a character is cut off)."""
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

    def block(self, at: int, want: int) -> tuple[int, int]:
        """See ``Text``: whole rows, or a stretch of one."""
        first, width = (at - self.start) // 4, prod(self.shape[1:])
        count = min(BLOCK // 4, -(-(at + want - self.start) // 4) - first, prod(self.shape) - first)
        column = first % width
        count = min(count, width - column) if column or count < width else count // width * width
        return self.start + 4 * first, self.start + 4 * (first + count)

    def decode(self, lo: int, hi: int, read: Read) -> memoryview:
        """See ``Text``."""
        import numpy as np

        first, last, width = (lo - self.start) // 4, (hi - self.start) // 4, prod(self.shape[1:])
        row, column = divmod(first, width)
        codes = np.frombuffer(self.codes.load(read, first, last), np.uint8).reshape(-1, min(last - first, width))
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

    def spans(self, lo: int, hi: int) -> Iterator[Span]:
        """See ``Text``."""
        yield self.codes.cut((lo - self.start) // 4, -(-(hi - self.start) // 4))
        yield from self.scales

    def _spread(self, scales: Span, row: int, column: int, shape: tuple[int, ...], read: Read) -> Any:
        """The scales of a box of codes, so that they can be multiplied with it."""
        import numpy as np

        def load(lo: int, hi: int) -> Any:
            return np.frombuffer(scales.load(read, 4 * lo, 4 * hi), "<f4")

        rows, columns = shape
        if self.packed:
            width, first, last = prod(self.shape[1:]), row // ROWS_PER_SCALE, (row + rows - 1) // ROWS_PER_SCALE
            # More than a row of scales only where the codes are whole rows.
            found = load(first * width + column, last * width + column + columns).reshape(-1, columns)
            return np.repeat(found, ROWS_PER_SCALE, axis=0)[row % ROWS_PER_SCALE :][:rows]
        if len(self.shape) < 2:
            return load(0, 1)
        inner = prod(self.shape[2:])
        first = column // inner
        return np.repeat(load(first, -(-(column + columns) // inner)), inner)[column - first * inner :][:columns]


class Blocks8(NamedTuple):
    """Q8_0 of GGUF as float32: blocks of 32 elements, each a scale (float16) and 32 codes (int8); value = scale * code.

    Source: block_q8_0 and dequantize_row_q8_0 of ggml.
    """

    start: int
    blocks: Span

    @property
    def stop(self) -> int:
        return self.start + self.blocks.nbytes // Q8_BYTES * 4 * Q8_ELEMENTS

    def block(self, at: int, want: int) -> tuple[int, int]:
        """See ``Text``."""
        step = 4 * Q8_ELEMENTS
        lo = self.start + (at - self.start) // step * step
        return lo, min(self.stop, lo + min(BLOCK, -(-(at + want - lo) // step) * step))

    def decode(self, lo: int, hi: int, read: Read) -> memoryview:
        """See ``Text``."""
        import numpy as np

        step = 4 * Q8_ELEMENTS
        raw = self.blocks.load(read, (lo - self.start) // step * Q8_BYTES, (hi - self.start) // step * Q8_BYTES)
        found = np.frombuffer(raw, [("scale", "<f2"), ("codes", "i1", Q8_ELEMENTS)])
        with np.errstate(all="ignore"):
            values = found["scale"].astype(np.float32)[:, None] * found["codes"].astype(np.float32)
        return np.ascontiguousarray(values, "<f4").reshape(-1).view(np.uint8).data

    def spans(self, lo: int, hi: int) -> Iterator[Span]:
        """See ``Text``."""
        step = 4 * Q8_ELEMENTS
        yield self.blocks.cut((lo - self.start) // step * Q8_BYTES, -(-(hi - self.start) // step) * Q8_BYTES)


class Given(NamedTuple):
    """Few bytes that are known already."""

    start: int
    data: str
    """Hexadecimal, as worker processes get it."""

    @property
    def stop(self) -> int:
        return self.start + len(self.data) // 2

    def block(self, at: int, want: int) -> tuple[int, int]:
        """See ``Text``."""
        del at, want
        return self.start, self.stop

    def decode(self, lo: int, hi: int, read: Read) -> bytes:
        """See ``Text``."""
        del read
        return bytes.fromhex(self.data)[lo - self.start : hi - self.start]

    def spans(self, lo: int, hi: int) -> Iterator[Span]:
        """See ``Text``."""
        del lo, hi
        return iter(())


@dataclass(eq=False, slots=True)
class Encoding:
    """The bytes that a file is decoded to."""

    name: str
    """The encoding: ``text``, ``moments``, ``blocks`` or ``given``."""
    path: str
    """The file's path, for errors."""
    parts: list[Text | Moment | Blocks8 | Given] = field(default_factory=list)
    """One behind the other."""

    def __str__(self) -> str:
        return f"{self.path} decoded"

    @property
    def size(self) -> int:
        """Bytes after decoding."""
        return self.parts[-1].stop if self.parts else 0

    def spans(self, lo: int, hi: int) -> Iterator[Span]:
        """What of the file is read, at least, to decode these bytes."""
        for part in self.parts:
            first, last = max(lo, part.start), min(hi, part.stop)
            if first < last:
                yield from part.spans(first, last)


Contents = str | Encoding
"""The source: a file by its path, or its decoded bytes."""


_Held = tuple[Encoding | None, int, int, bytes | memoryview]


class Decoder(threading.local):
    """Reads decoded bytes; each thread keeps what it decoded last."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._held: _Held = (None, 0, 0, b"")

    def read(self, encoding: Encoding, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill ``buffers`` with consecutive decoded bytes. Raises CorruptError when they cannot be decoded any more."""
        for buffer in buffers:
            done = 0
            while done < buffer.nbytes:
                if self._held[0] is not encoding or not self._held[1] <= offset < self._held[2]:
                    self._held = self._decode(encoding, offset, buffer.nbytes - done)
                _, lo, hi, block = self._held
                n = min(buffer.nbytes - done, hi - offset)
                buffer[done : done + n] = block[offset - lo : offset - lo + n]
                offset, done = offset + n, done + n

    def _decode(self, encoding: Encoding, at: int, want: int) -> _Held:
        part = encoding.parts[bisect_right(encoding.parts, at, key=attrgetter("start")) - 1]
        lo, hi = part.block(at, want)
        with suppress(UnicodeError):
            block = part.decode(lo, hi, self._read) if lo <= at < hi else b""
            if len(block) == hi - lo > 0:
                return encoding, lo, hi, block
        raise CorruptError("a source changed while it was read", where=encoding.path, hint="repeat the command")
