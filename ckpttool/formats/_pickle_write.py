"""Pickles as literal bytes with holes where the arrays' elements go (protocol 4, as ``paddle.save`` writes them).

A file is described before it is written: ``layout_pickle`` gives its exact size, the byte runs between the payloads,
and where each payload lies. An array is what numpy's ``ndarray.__reduce__`` makes of it, and inside nested values what
Paddle makes of a tensor: ``tuple((name, array))``. bfloat16 is stored as uint16 and FP8 as int8, which is how Paddle
hands such arrays to numpy (python/paddle/framework/io.py).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from ckpttool.dtypes import nbytes
from ckpttool.errors import UnsupportedError

_CODES = {
    **{"BF16": "u2", "F8_E4M3": "i1", "F8_E5M2": "i1", "F8_E8M0": "u1", "BOOL": "b1"},
    **{"U8": "u1", "I8": "i1", "I16": "i2", "U16": "u2", "I32": "i4", "U32": "u4", "I64": "i8", "U64": "u8"},
    **{"F16": "f2", "F32": "f4", "F64": "f8", "C64": "c8"},
}
"""numpy's codes for the elements that a file holds."""


class Hole(NamedTuple):
    """An array whose elements are written later."""

    dtype: str
    shape: tuple[int, ...]
    name: str | None = None
    """Of the tensor, where Paddle stores ``(name, array)``."""


class Instance(NamedTuple):
    """An instance of a class, made by NEWOBJ and filled by BUILD."""

    module: str
    cls: str
    fields: Mapping[str, Any]

    def __hash__(self) -> int:
        return hash((self.module, self.cls, tuple(self.fields)))


class Written(NamedTuple):
    """A pickle file before its payloads are there."""

    size: int
    literals: tuple[tuple[int, bytes], ...]
    places: dict[tuple[Any, ...], int]
    """Path of keys and positions to a Hole -> byte offset of its elements."""


@dataclass(slots=True)
class _Writer:
    runs: list[tuple[int, bytearray]] = field(default_factory=lambda: [(0, bytearray())])
    at: int = 0
    places: dict[tuple[Any, ...], int] = field(default_factory=dict)

    def put(self, data: bytes) -> None:
        self.runs[-1][1].extend(data)
        self.at += len(data)

    def skip(self, size: int) -> None:
        if size:
            self.at += size
            self.runs.append((self.at, bytearray()))

    def value(self, v: Any, path: tuple[Any, ...]) -> None:
        if v is None:
            self.put(b"N")
        elif v is True or v is False:
            self.put(b"\x88" if v else b"\x89")
        elif isinstance(v, int):
            self.integer(v)
        elif isinstance(v, float):
            self.put(b"G" + struct.pack(">d", v))
        elif isinstance(v, str):
            self.text(v)
        elif isinstance(v, bytes):
            self.blob(len(v))
            self.put(v)
        elif isinstance(v, Hole):
            self.array(v, path)
        elif isinstance(v, Instance):
            self.name(v.module, v.cls)
            self.put(b")\x81")
            self.value(dict(v.fields), path)
            self.put(b"b")
        elif isinstance(v, Mapping):
            self.put(b"}")
            for start in range(0, len(v), 1000):
                self.put(b"(")
                for k in list(v)[start : start + 1000]:
                    self.value(k, (*path, k))
                    self.value(v[k], (*path, k))
                self.put(b"u")
        elif isinstance(v, list):
            self.put(b"](")
            for i, x in enumerate(v):
                self.value(x, (*path, i))
            self.put(b"e")
        elif isinstance(v, tuple):
            self.sequence(v, path)
        else:
            raise UnsupportedError(f"a {type(v).__name__} cannot be written into a pickle")

    def sequence(self, v: tuple[Any, ...], path: tuple[Any, ...]) -> None:
        if not v:
            self.put(b")")
            return
        if len(v) > 3:
            self.put(b"(")
        for i, x in enumerate(v):
            self.value(x, (*path, i))
        self.put({1: b"\x85", 2: b"\x86", 3: b"\x87"}.get(len(v), b"t"))

    def integer(self, v: int) -> None:
        if 0 <= v < 256:
            self.put(b"K" + bytes([v]))
        elif 0 <= v < 65536:
            self.put(b"M" + struct.pack("<H", v))
        elif -(2**31) <= v < 2**31:
            self.put(b"J" + struct.pack("<i", v))
        else:
            data = v.to_bytes(v.bit_length() // 8 + 1, "little", signed=True)
            self.put(b"\x8a" + bytes([len(data)]) + data)

    def text(self, v: str) -> None:
        data = v.encode("utf-8", "surrogatepass")
        self.put((b"\x8c" + bytes([len(data)]) if len(data) < 256 else b"X" + struct.pack("<I", len(data))) + data)

    def blob(self, size: int) -> None:
        if size < 256:
            self.put(b"C" + bytes([size]))
        elif size < 2**32:
            self.put(b"B" + struct.pack("<I", size))
        else:
            self.put(b"\x8e" + struct.pack("<Q", size))

    def name(self, module: str, cls: str) -> None:
        self.text(module)
        self.text(cls)
        self.put(b"\x93")

    def array(self, v: Hole, path: tuple[Any, ...]) -> None:
        if v.dtype not in _CODES:
            raise UnsupportedError(f"Paddle has no arrays of {v.dtype}", where=".".join(map(str, path)))
        if v.name is not None:
            self.name("builtins", "tuple")
            self.text(v.name)
        # The old name of the module: numpy 1 knows only this one, and numpy 2 still does.
        self.name("numpy.core.multiarray", "_reconstruct")
        self.name("numpy", "ndarray")
        self.put(b"K\x00\x85C\x01b\x87R(K\x01")
        self.sequence(v.shape, path)
        code = _CODES[v.dtype]
        self.name("numpy", "dtype")
        self.text(code)
        self.put(b"\x89\x88\x87R(K\x03")
        self.text("|" if code[1:] == "1" else "<")
        self.put(b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89")
        size = nbytes(v.dtype, prod(v.shape))
        self.blob(size)
        self.places[path] = self.at
        self.skip(size)
        self.put(b"tb")
        if v.name is not None:
            self.put(b"\x86\x85R")


def layout_pickle(value: Any) -> Written:
    """The file of a nested value with Holes for arrays. Raises UnsupportedError for what Paddle cannot hold."""
    w = _Writer()
    w.put(b"\x80\x04")
    w.value(value, ())
    w.put(b".")
    return Written(w.at, tuple((a, bytes(d)) for a, d in w.runs if d), w.places)


def plain_pickle(value: Any) -> bytes:
    """The pickle of a value without arrays."""
    written = layout_pickle(value)
    return b"".join(d for _, d in written.literals)
