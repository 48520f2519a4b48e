"""Headers of GGUF files, which llama.cpp and its relatives write.

    magic GGUF, u32 version, u64 tensors, u64 keys
    for each key:     name, u32 type, value
    for each tensor:  name, u32 axes, u64 size of each (the fastest first), u32 type, u64 offset
    padding to a multiple of ``general.alignment`` (32), where the tensors' offsets count from; each is such a multiple

Texts are a u64 length and UTF-8. Little-endian. Source: docs/gguf.md of ggml, versions 2 and 3; gguf-py.
"""

from __future__ import annotations

import struct
from math import prod
from typing import Any, NamedTuple, NoReturn

from ckpttool.core.encodings import Q8_BYTES, Q8_ELEMENTS
from ckpttool.core.files import DataFile, OpenFile, Place
from ckpttool.errors import CorruptError, IncompleteError, UnsupportedError
from ckpttool.storage.place import open_file, readable

MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Type of a value: how ``struct`` reads it."""
_TEXT, _ARRAY = 8, 9
_KEPT = 256
"""Elements of an array up to which it is kept; longer ones are tokens and merges."""
_MOST = 1 << 23
"""Elements of an array, keys and tensors: no file has as many."""
_LONGEST = 1 << 24
"""Bytes of a text (chat templates are some thousands)."""
_WINDOW = 1 << 18
_DTYPES = {0: "F32", 1: "F16", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 30: "BF16"}
Q8_0 = 8
_CODED = {
    2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K",
    15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S",
    23: "IQ4_XS", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
"""Block types that are not read."""
_SIZES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2, "I8": 1}


class GgufTensor(NamedTuple):
    """A tensor of the file."""

    name: str
    dtype: str
    """Dtype of its elements; F32 where they are Q8_0."""
    shape: tuple[int, ...]
    offset: int
    """Byte offset in the file."""
    nbytes: int
    """Bytes in the file."""
    coded: bool
    """Its elements are Q8_0."""


class GgufFile(NamedTuple):
    """The parsed header."""

    info: DataFile
    keys: dict[str, Any]
    """Metadata without long arrays, which are None."""
    tensors: list[GgufTensor]


def read_gguf(path: Place) -> GgufFile:
    """The header of a file.

    Raises CorruptError for what is no GGUF or contradicts itself, IncompleteError for a file that ends too early,
    UnsupportedError for big-endian files, versions and types that are not read.
    """
    with readable(path), open_file(path) as file:
        return _GgufHeader(file, path).read()


class _GgufHeader:
    """A header that is being read."""

    def __init__(self, file: OpenFile, path: Place) -> None:
        self.file, self.path = file, path
        self.at = 0
        self._window, self._begin = b"", 0

    def corrupt(self, what: str) -> NoReturn:
        raise CorruptError(what, where=str(self.path), hint="fetch or convert the file again")

    def take(self, n: int) -> bytes:
        """The next bytes. Raises IncompleteError where there are fewer."""
        lo = self.at - self._begin
        if lo + n > len(self._window):
            if self.at + n > self.file.info.size:
                raise IncompleteError(
                    f"the file ends at byte {self.file.info.size:,}, within its header",
                    where=str(self.path),
                    hint="the download or copy was interrupted; fetch the file again",
                    finding="truncated",
                )
            self._window, self._begin, lo = self.file.pread(max(n, _WINDOW), self.at), self.at, 0
            if len(self._window) < n:
                self.corrupt("the file changed while it was read")
        self.at += n
        return self._window[lo : lo + n]

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def count(self, what: str) -> int:
        n: int = self.number("Q")
        if n > _MOST:
            self.corrupt(f"the header says {n:,} {what}")
        return n

    def text(self, *, skip: bool = False) -> str:
        n = self.number("Q")
        if n > _LONGEST:
            self.corrupt(f"the header says a text of {n:,} bytes")
        raw = self.take(n)
        try:
            return "" if skip else raw.decode()
        except UnicodeDecodeError:
            self.corrupt("a text of the header is not UTF-8")

    def value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self.text()
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind != _ARRAY:
            self.corrupt(f"a value of the header has the unknown type {kind}")
        inner, n = self.number("I"), self.count("elements of an array")
        if inner in _SCALARS:
            each = struct.calcsize("<" + _SCALARS[inner])
            if n <= _KEPT:
                return list(struct.unpack(f"<{n}{_SCALARS[inner]}", self.take(n * each)))
            self.skip(n * each)
            return None
        if inner != _TEXT:
            self.corrupt(f"an array of the header has elements of the unknown type {inner}")
        found = [self.text(skip=n > _KEPT) for _ in range(n)] if n <= _KEPT else None
        for _ in range(n if found is None else 0):
            self.text(skip=True)
        return found

    def skip(self, n: int) -> None:
        self.at += n - 1
        self.take(1)

    def read(self) -> GgufFile:
        if self.take(4) != MAGIC:
            self.corrupt("this is not a GGUF file: its first bytes are not GGUF")
        version = self.number("I")
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "big"), "little")
            raise UnsupportedError(
                "this GGUF file is big-endian" if swapped in (2, 3) else f"GGUF of version {version} is not read",
                where=str(self.path),
                hint="convert it again with a current llama.cpp",
            )
        tensors, keys = self.count("tensors"), self.count("keys")
        said: dict[str, Any] = {}
        for _ in range(keys):
            name = self.text()
            if name in said:
                self.corrupt(f"the key `{name[:80]}` occurs twice")
            said[name] = self.value(self.number("I"))
        described = [self.tensor() for _ in range(tensors)]
        alignment = said.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment > 1 << 20:
            self.corrupt(f"general.alignment is {alignment}")
        base = -(-self.at // alignment) * alignment
        placed = [t._replace(offset=base + t.offset) for t in described]
        self.check(placed, base, alignment)
        return GgufFile(self.file.info, said, placed)

    def tensor(self) -> GgufTensor:
        name, axes = self.text(), self.number("I")
        if axes > 8:
            self.corrupt(f"tensor `{name[:80]}` has {axes} axes")
        shape = tuple([self.number("Q") for _ in range(axes)][::-1])
        kind, offset = self.number("I"), self.number("Q")
        if kind in _CODED:
            raise UnsupportedError(
                f"tensor `{name[:80]}` is {_CODED[kind]}: of quantized GGUF only Q8_0 is read",
                where=str(self.path),
                hint="give the model's safetensors, or a GGUF of F32, F16, BF16 or Q8_0",
            )
        elements = prod(shape)
        if prod(n or 1 for n in shape) >= 1 << 60:  # strides of an empty tensor are counted in 64 bits, too
            self.corrupt(f"tensor `{name[:80]}` has the shape {list(shape)}, which is too large")
        if kind == Q8_0:
            if not shape or shape[-1] % Q8_ELEMENTS:
                self.corrupt(
                    f"tensor `{name[:80]}` {list(shape)} is Q8_0, and its rows are not whole blocks of {Q8_ELEMENTS}"
                )
            return GgufTensor(name, "F32", shape, offset, elements // Q8_ELEMENTS * Q8_BYTES, coded=True)
        if kind not in _DTYPES:
            self.corrupt(f"tensor `{name[:80]}` has the unknown type {kind}")
        dtype = _DTYPES[kind]
        return GgufTensor(name, dtype, shape, offset, elements * _SIZES[dtype], coded=False)

    def check(self, tensors: list[GgufTensor], base: int, alignment: int) -> None:
        """Tensors lie in the file, aligned, and not on each other; each name is there once."""
        names: set[str] = set()
        end, last, size = base, "", self.file.info.size
        for t in sorted(tensors, key=lambda t: t.offset):
            if t.name in names:
                self.corrupt(f"tensor `{t.name[:80]}` occurs twice")
            names.add(t.name)
            if (t.offset - base) % alignment:
                self.corrupt(f"tensor `{t.name[:80]}` does not begin at a multiple of {alignment}")
            if t.offset < end and t.nbytes:
                self.corrupt(f"tensors `{last[:80]}` and `{t.name[:80]}` overlap")
            if t.offset + t.nbytes > size:
                raise IncompleteError(
                    f"tensor `{t.name[:80]}` ends at byte {t.offset + t.nbytes:,}, and the file has {size:,}",
                    where=str(self.path),
                    hint="the download or copy was interrupted; fetch the file again",
                    finding="truncated",
                )
            end, last = max(end, t.offset + t.nbytes), t.name
