"""Paddle's parameter files (``.pdiparams``): records without names, one after another, and nothing else.

    u32 0 | u64 levels of detail | per level: u64 bytes, data | u32 0 | i32 bytes of TensorDesc | TensorDesc | data

TensorDesc is protobuf: field 1 the element type, field 2 a dimension, repeated. Everything is little-endian, data is
row-major. There is no count and no footer: which record is which tensor, and where the file should end, only the
program says. Source: paddle 3.3.1 (phi/core/framework/dense_tensor_tostream.cc), measured.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from ckpttool.core.files import DataFile, OpenFile, Place
from ckpttool.errors import CorruptError, IncompleteError
from ckpttool.formats.paddle.program_parts import BY_DTYPE, BY_NUMBER, Program, ProgramTensor
from ckpttool.storage.place import open_file

PROBLEMS = {
    "params-missing": "the program has parameters, and there is no parameter file",
    "params-record": "the head of a record is not as Paddle writes it",
    "params-truncated": "the file ends within a record",
    "params-count": "the file has more or fewer tensors than the program",
    "params-dtype": "a tensor has another element type than in the program",
    "params-shape": "a tensor has another shape than in the program",
    "params-trailing": "bytes after the last tensor",
}
"""Findings of ``match_records``."""

_FIRST = 256
"""Bytes that are read at the place of a head; enough unless there are levels of detail or very many axes."""
_MOST_LEVELS = 64
_MOST_DESC = 128
"""Bytes; nine dimensions, the most that Paddle has, take 101."""


class TensorRecord(NamedTuple):
    """One tensor of the file."""

    dtype: str
    """safetensors' name where there is one; "" for a number that Paddle does not have."""
    shape: tuple[int, ...]
    start: int
    """Byte of the head."""
    offset: int
    """Byte of the data."""
    head: bytes
    """The head as it is in the file, where ``record_head`` would write another; else empty."""
    wrong: str
    """The defect of the head, or ""."""

    @property
    def nbytes(self) -> int:
        return BY_DTYPE[self.dtype].bits // 8 * prod(self.shape) if self.dtype else 0


class _EndError(Exception):
    """The file ends before the head does."""


class _HeadError(Exception):
    """The head says nothing that could be used."""


def record_head(dtype: str, shape: Sequence[int]) -> bytes:
    """The bytes before a tensor's data, as Paddle writes them."""
    desc = b"\x08" + _varint(BY_DTYPE[dtype].number) + b"".join([b"\x10" + _varint(n) for n in shape])
    return struct.pack("<IQIi", 0, 0, 0, len(desc)) + desc


def _varint(n: int) -> bytes:
    out = bytearray()
    while n > 0x7F:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    out.append(n)
    return bytes(out)


def match_records(program: Program, path: Place) -> tuple[DataFile, list[TensorRecord]]:
    """The records of a parameter file, in order. What does not fit the program goes to its ``problems``.

    A record whose type or shape is not the program's is stepped over by the length that leads to another record, so
    that one mistake is one finding. Raises IncompleteError when there is no such file, CorruptError when it cannot be
    read.
    """
    try:
        with open_file(path) as f:
            return f.info, _Matcher(program, f).run()
    except FileNotFoundError:
        raise IncompleteError("the parameter file does not exist", where=str(path)) from None
    except OSError as e:
        raise CorruptError(f"the parameter file cannot be read: {e.strerror}", where=str(path)) from None


class _Matcher:
    def __init__(self, program: Program, file: OpenFile) -> None:
        self.program, self.file, self.size = program, file, file.info.size
        self.records: list[TensorRecord] = []

    def run(self) -> list[TensorRecord]:
        wanted = self.program.parameters
        at = 0
        for i, p in enumerate(wanted):
            if at == self.size:
                self._fewer(i)
                return self.records
            where, label = f"byte {at:,}", f"tensor {i + 1} of {len(wanted)}, `{p.name}`"
            try:
                r = self._head(at)
            except _EndError:
                self._report("truncated", f"the file ends in the head of {label}", where)
                return self.records
            except _HeadError as e:
                self._report("record", f"{label}: {e}", where)
                r = TensorRecord(p.dtype, p.shape, at, at + len(record_head(p.dtype, p.shape)), b"", "unreadable")
                if not self._follows(r.offset + p.nbytes, i):
                    return self.records
            else:
                self._compare(r, p, label, where)
            end = r.offset + r.nbytes
            if (r.dtype, r.shape, r.wrong) != (p.dtype, p.shape, "") and not self._follows(end, i):
                others = (r.offset + p.nbytes, at + len(record_head(p.dtype, p.shape)) + p.nbytes)
                end = next((o for o in others if self._follows(o, i)), end)
            if end > self.size:
                self.program.problems = [q for q in self.program.problems if q.where != where]
                text = f"{label}, needs {end - at:,} bytes, and there are {self.size - at:,}"
                self._report("truncated", text, where)
                return self.records
            self.records.append(r)
            at = end
        if at < self.size:
            self._rest(at)
        elif len(wanted) > 1:
            self._align()
        return self.records

    def _report(self, kind: str, text: str, where: str) -> None:
        self.program.report(f"params-{kind}", text, where)

    def _compare(self, r: TensorRecord, p: ProgramTensor, label: str, where: str) -> None:
        if r.wrong:
            self._report("record", f"{label}, {r.wrong}", where)
        elif r.dtype != p.dtype:
            self._report("dtype", f"{label}, is {r.dtype} in the file and {p.dtype} in the program", where)
        elif r.shape != p.shape:
            self._report("shape", f"{label}, is {list(r.shape)} in the file and {list(p.shape)} in the program", where)

    def _follows(self, at: int, number: int) -> bool:
        """Whether a record begins at ``at``, or the file ends there with the last parameter."""
        if at >= self.size:
            return at == self.size and number == len(self.program.parameters) - 1
        try:
            return not self._head(at).wrong
        except (_EndError, _HeadError):
            return False

    def _fewer(self, count: int) -> None:
        self._forget()
        text = f"the file has {_tensors(count)}, the program {len(self.program.parameters)}"
        self._report("count", text + self._from(), f"byte {self.size:,}")

    def _rest(self, at: int) -> None:
        """Bytes beyond the last parameter: tensors, or anything else."""
        start, more = at, 0
        try:
            while at < self.size:
                r = self._head(at)
                at = r.offset + r.nbytes
                more += 1
                if r.wrong or at > self.size:
                    raise _HeadError
        except (_EndError, _HeadError):
            text = f"{self.size - start:,} bytes follow the last tensor"
            self._report("trailing", text, f"byte {start:,}")
            return
        self._forget()
        count = len(self.program.parameters)
        text = f"the file has {_tensors(count + more)}, the program {count}"
        self._report("count", text + self._from(), f"byte {start:,}")

    def _forget(self) -> None:
        """Where tensors are too many or too few, those behind do not fit, and that is no finding of its own."""
        self.program.problems = [p for p in self.program.problems if p.id not in ("params-dtype", "params-shape")]
        for kind in ("params-dtype", "params-shape"):
            self.program.more.pop(kind, None)

    def _from(self) -> str:
        """The first tensor that is not the program's."""
        pairs = zip(self.records, self.program.parameters, strict=False)
        for i, (r, p) in enumerate(pairs):
            if (r.dtype, r.shape) != (p.dtype, p.shape):
                return f"; from tensor {i + 1} on they are not the same (`{p.name}` is expected)"
        return ""

    def _align(self) -> None:
        """Tensors in another order than by name: the set is right, and the places are not."""
        found = sum(p.id in ("params-dtype", "params-shape") for p in self.program.problems)
        if found < 2:
            return
        have = sorted((r.dtype, r.shape) for r in self.records)
        want = sorted((p.dtype, p.shape) for p in self.program.parameters)
        if have == want:
            self._forget()
            text = f"the file has the tensors of the program in another order{self._from()}"
            self._report("shape", text, "")

    def _head(self, at: int) -> TensorRecord:
        """The record at a byte. Raises _EndError or _HeadError."""
        return _read_head(_HeadCursor(self.file, at, self.size))


def _tensors(n: int) -> str:
    return f"{n} tensor" if n == 1 else f"{n} tensors"


class _HeadCursor:
    """A cursor in the file that reads a head in one go where that is enough."""

    def __init__(self, file: OpenFile | bytes, at: int, size: int) -> None:
        self.file, self.size = file, size
        self.start = self.at = at
        self.first = self._pread(_FIRST, at)

    def _pread(self, n: int, at: int) -> bytes:
        return self.file[at : at + n] if isinstance(self.file, bytes) else self.file.pread(n, at)

    def take(self, n: int) -> bytes:
        if self.at + n > self.size:
            raise _EndError
        begin = self.at - self.start
        data = self.first[begin : begin + n]
        if len(data) < n:
            data = self._pread(n, self.at)
        self.at += n
        return data

    def since_start(self) -> bytes:
        """The bytes read so far."""
        n = self.at - self.start
        return self.first[:n] if n <= len(self.first) else self._pread(n, self.start)

    def skip(self, n: int) -> None:
        if self.at + n > self.size:
            raise _EndError
        self.at += n

    def unpack(self, code: str) -> tuple[int, ...]:
        return struct.unpack(code, self.take(struct.calcsize(code)))


def _read_head(raw: _HeadCursor) -> TensorRecord:
    at = raw.at
    version, levels = raw.unpack("<IQ")
    wrong = f"has the record version {version}, and 0 is known" if version else ""
    if levels > _MOST_LEVELS:
        raise _HeadError(f"there is no record here: {levels:,} levels of detail")
    for _ in range(levels):
        (size,) = raw.unpack("<Q")
        if size % 8:
            raise _HeadError(f"a level of detail has {size:,} bytes, which are not 64-bit numbers")
        raw.skip(size)
    version, length = raw.unpack("<Ii")
    if version:
        wrong = wrong or f"has the tensor version {version}, and 0 is known"
    if not 0 <= length <= _MOST_DESC:
        raise _HeadError(f"there is no record here: a TensorDesc of {length:,} bytes")
    number, dims = _desc(raw.take(length))
    element = BY_NUMBER.get(number)
    if element is None:
        wrong = wrong or f"has the element type {number}, which is not known"
    if any(n < 0 for n in dims):
        wrong = wrong or f"has the shape {list(dims)}"
        dims = tuple([max(n, 0) for n in dims])
    dtype = "" if element is None else element.dtype
    head = b""
    if element is not None:
        read = raw.since_start()
        head = b"" if read == record_head(dtype, dims) else read
    return TensorRecord(dtype, dims, at, raw.at, head, wrong)


def head_fits(head: bytes, parameter: ProgramTensor) -> bool:
    """Whether bytes are the head of a record of this parameter, and nothing else."""
    try:
        found = _read_head(_HeadCursor(head, 0, len(head)))
    except (_EndError, _HeadError):
        return False
    return found.offset == len(head) and not found.wrong and (found.dtype, found.shape) == parameter[1:]


def _desc(data: bytes) -> tuple[int, tuple[int, ...]]:
    """Element type and dimensions of a TensorDesc. Raises _HeadError."""
    number, dims, at = -1, [], 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        if tag == 0x08:
            number, at = _read_varint(data, at)
        elif tag == 0x10:
            n, at = _read_varint(data, at)
            dims.append(n)
        elif tag == 0x12:  # packed, as other writers of protobuf do it
            length, at = _read_varint(data, at)
            end = at + length
            if end > len(data):
                raise _HeadError("its TensorDesc is cut off")
            while at < end:
                n, at = _read_varint(data, at)
                dims.append(n)
        elif tag & 7 == 0:  # a field that Paddle does not have either, and skips
            _, at = _read_varint(data, at)
        elif tag & 7 == 2:
            length, at = _read_varint(data, at)
            at += length
        else:
            raise _HeadError("its TensorDesc is not protobuf")
    if at > len(data):
        raise _HeadError("its TensorDesc is cut off")
    if number < 0:
        raise _HeadError("its TensorDesc has no element type")
    return number, tuple([n - (1 << 64) if n >> 63 else n for n in dims])


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise _HeadError("its TensorDesc is cut off")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at
