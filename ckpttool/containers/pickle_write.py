"""Pickles as literal bytes with holes where the arrays' elements go (protocol 4, as ``paddle.save`` writes them).

A file is described before it is written: ``layout_pickle`` gives its exact size, the byte runs between the payloads,
and where each payload lies.

    {"fc.w_0": Hole("F32", (4, 3))}  ->  literal  80 04 } ( 8c "fc.w_0" <_reconstruct> ... 43 30
                                         hole     48 bytes, places[("fc.w_0",)]
                                         literal  t b u .

An array is what numpy's ``ndarray.__reduce__`` makes of it, and inside nested values what Paddle makes of a tensor:
``tuple((name, array))`` (python/paddle/framework/io.py). bfloat16 is stored as uint16 and FP8 as int8, which is how
Paddle hands such arrays to numpy. Names that occur for every array are written once and recalled afterwards (MEMOIZE,
BINGET), as picklers do; protocol 4 permits frames to be absent, and without them no payload can cross one.

``_reconstruct`` is written with its module's old name, numpy.core.multiarray: numpy 1 knows no other (1.24 and 1.25
have no numpy._core at all), and numpy 2 keeps it for old pickles without a warning (numpy/core/multiarray.py there:
"these must import without warning or error"). Loaded with numpy 1.24.4 and 2.4.6.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, islice
from math import prod
from typing import Any, NamedTuple

from ckpttool.containers.pickle import Global
from ckpttool.core.dtypes import nbytes
from ckpttool.errors import UnsupportedError

_CODES = {
    "BF16": "u2",
    "F8_E4M3": "i1",
    "F8_E5M2": "i1",
    "F8_E8M0": "u1",
    "BOOL": "b1",
    "U8": "u1",
    "I8": "i1",
    "I16": "i2",
    "U16": "u2",
    "I32": "i4",
    "U32": "u4",
    "I64": "i8",
    "U64": "u8",
    "F16": "f2",
    "F32": "f4",
    "F64": "f8",
    "C64": "c8",
}
"""numpy's codes for the elements that a file holds."""

_BATCH = 1000
"""Items that one opcode puts into a container: what CPython's pickler takes, and loaders are tested with."""
_MAX_INT = 255
"""Bytes of LONG1."""


class Hole(NamedTuple):
    """An array whose elements are written later."""

    dtype: str
    shape: tuple[int, ...]
    name: str | None = None
    """Name of the tensor, where Paddle stores ``(name, array)``."""


class Instance(NamedTuple):
    """An instance of a class, made by NEWOBJ and filled by BUILD."""

    module: str
    cls: str
    fields: Mapping[str, Any]

    def __hash__(self) -> int:
        # By what it holds: as keys of storage_metadata there are as many as shards. Lists cannot be in a key.
        return hash((self.module, self.cls, *self.fields.values()))


class Stateful(NamedTuple):
    """An instance of a class that sets its own state."""

    module: str
    cls: str
    state: tuple[Any, ...]


class PickledCall(NamedTuple):
    """A call of a function or class, and the pairs that are then put into its result.

    ``layout_pickle`` has it made once for equal arguments, so there they are hashable, and what is made of them cannot
    be changed: a million chunks have few shapes.
    """

    module: str
    name: str
    args: tuple[Any, ...] = ()
    items: Mapping[Any, Any] | tuple[()] = ()


class Once(NamedTuple):
    """An instance that is written once for equal ones, and is one object wherever it stands."""

    value: Instance


class Pairs(NamedTuple):
    """A dict whose keys and values are made while it is written."""

    make: Callable[[], Iterable[tuple[Any, Any]]]


class PickleSkeleton(NamedTuple):
    """A pickle file before its payloads are there."""

    size: int
    literals: tuple[tuple[int, bytes], ...]
    """(byte offset, bytes), in order; what lies between them are the payloads."""
    places: dict[tuple[Any, ...], int]
    """Path of keys and positions to a Hole -> byte offset of its elements."""


class _PickleWriter:
    """One file."""

    def __init__(self) -> None:
        self.run = bytearray()
        self.start = 0
        """Byte of the file at which ``run`` begins."""
        self.literals: list[tuple[int, bytes]] = []
        self.places: dict[tuple[Any, ...], int] = {}
        self.memo: dict[Any, bytes] = {}
        """The bytes that recall a value."""

    def hole(self, size: int, path: tuple[Any, ...]) -> None:
        at = self.start + len(self.run)
        self.places[path] = at
        if size:
            self.literals.append((self.start, bytes(self.run)))
            self.start, self.run = at + size, bytearray()

    def done(self) -> PickleSkeleton:
        self.run += b"."
        self.literals.append((self.start, bytes(self.run)))
        return PickleSkeleton(self.start + len(self.run), tuple(self.literals), self.places)

    def recalled(self, what: Any) -> bool:
        """Recall a value by what it is remembered as, if it was written before."""
        code = self.memo.get(what)
        if code is None:
            return False
        self.run += code
        return True

    def remember(self, what: Any) -> None:
        at = len(self.memo)
        self.memo[what] = b"h" + bytes([at]) if at < 256 else b"j" + struct.pack("<I", at)
        self.run += b"\x94"

    # Values.

    def value(self, v: Any, path: tuple[Any, ...]) -> None:
        run = self.run
        if v is None:
            run += b"N"
        elif v is True or v is False:
            run += b"\x88" if v else b"\x89"
        elif type(v) is int:
            self.integer(v, path)
        elif type(v) is float:
            run += b"G" + struct.pack(">d", v)
        elif type(v) is str:
            self.text(v)
        elif type(v) is bytes:
            self.blob(len(v))
            run += v
        elif type(v) is Hole:
            self.array(v, path)
        elif isinstance(v, Instance):
            self.instance(v, path)
        elif type(v) is Once:
            if not self.recalled(v):
                self.instance(v.value, path)
                self.remember(v)
        elif type(v) is Global:
            self.named(v.module, v.name)
        elif type(v) is Stateful:
            self.named(v.module, v.cls)
            self.run += b")\x81"
            self.sequence(v.state, path)
            self.run += b"b"
        elif type(v) is PickledCall:
            if not self.recalled(v):
                self.named(v.module, v.name)
                self.sequence(v.args, path)
                self.run += b"R"
                self.remember(v)
        elif isinstance(v, Mapping):
            self.mapping(v.items(), path)
        elif type(v) is Pairs:
            self.mapping(v.make(), path)
        elif type(v) is list:
            self.items(v, path)
        elif type(v) is tuple:
            self.sequence(v, path)
        else:
            raise UnsupportedError(
                f"a {type(v).__name__} cannot be written into a pickle", where=".".join(map(str, path)) or ()
            )

    def mapping(self, v: Iterable[tuple[Any, Any]], path: tuple[Any, ...]) -> None:
        self.run += b"}"
        pairs = iter(v)
        for first in pairs:  # one after the other: a batch of those that Pairs makes may be large
            self.run += b"("
            for k, x in chain((first,), islice(pairs, _BATCH - 1)):
                self.value(k, path)
                self.value(x, (*path, k))
            self.run += b"u"

    def items(self, v: list[Any], path: tuple[Any, ...]) -> None:
        self.run += b"]"
        for start in range(0, len(v), _BATCH):
            self.run += b"("
            for i, x in enumerate(v[start : start + _BATCH], start):
                self.value(x, (*path, i))
            self.run += b"e"

    def sequence(self, v: tuple[Any, ...], path: tuple[Any, ...]) -> None:
        if not v:
            self.run += b")"
            return
        if len(v) > 3:
            self.run += b"("
        for i, x in enumerate(v):
            self.value(x, (*path, i))
        self.run += {1: b"\x85", 2: b"\x86", 3: b"\x87"}.get(len(v), b"t")

    def integer(self, v: int, path: tuple[Any, ...]) -> None:
        if 0 <= v < 256:
            self.run += b"K" + bytes([v])
        elif 0 <= v < 65536:
            self.run += b"M" + struct.pack("<H", v)
        elif -(2**31) <= v < 2**31:
            self.run += b"J" + struct.pack("<i", v)
        else:
            data = v.to_bytes(v.bit_length() // 8 + 1, "little", signed=True)
            if len(data) > _MAX_INT:
                raise UnsupportedError(
                    f"an integer of {len(data):,} bytes cannot be written into a pickle",
                    where=".".join(map(str, path)) or (),
                )
            self.run += b"\x8a" + bytes([len(data)]) + data

    def text(self, v: str) -> None:
        data = v.encode("utf-8", "surrogatepass")
        self.run += b"\x8c" + bytes([len(data)]) if len(data) < 256 else b"X" + struct.pack("<I", len(data))
        self.run += data

    def blob(self, size: int) -> None:
        if size < 256:
            self.run += b"C" + bytes([size])
        elif size < 2**32:
            self.run += b"B" + struct.pack("<I", size)
        else:
            self.run += b"\x8e" + struct.pack("<Q", size)

    def word(self, v: str) -> None:
        """A text that occurs often."""
        if not self.recalled(v):
            self.text(v)
            self.remember(v)

    def named(self, module: str, name: str) -> None:
        """A class or function."""
        if not self.recalled((module, name)):
            self.word(module)
            self.word(name)
            self.run += b"\x93"
            self.remember((module, name))

    def instance(self, v: Instance, path: tuple[Any, ...]) -> None:
        self.named(v.module, v.cls)
        self.run += b")\x81}("
        for k, x in v.fields.items():
            self.word(k)
            # Keys of tensors and dtypes stand in many instances.
            if type(x) is str:
                self.word(x)
            else:
                self.value(x, (*path, k))
        self.run += b"ub"

    def array(self, v: Hole, path: tuple[Any, ...]) -> None:
        code = _CODES.get(v.dtype)
        if code is None:
            raise UnsupportedError(
                f"Paddle has no arrays of {v.dtype}",
                where=".".join(map(str, path)) or (),
                hint="known dtypes: " + ", ".join(_CODES),
            )
        if v.name is not None:
            self.named("builtins", "tuple")
            self.text(v.name)
        self.named("numpy.core.multiarray", "_reconstruct")
        self.named("numpy", "ndarray")
        self.run += b"K\x00\x85C\x01b\x87R(K\x01"
        self.sequence(v.shape, path)
        if not self.recalled(("dtype", code)):
            self.named("numpy", "dtype")
            self.text(code)
            self.run += b"\x89\x88\x87R(K\x03"
            self.text("|" if code[1:] == "1" else "<")
            self.run += b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
            self.remember(("dtype", code))
        self.run += b"\x89"
        size = nbytes(v.dtype, prod(v.shape))
        self.blob(size)
        self.hole(size, path)
        self.run += b"tb"
        if v.name is not None:
            self.run += b"\x86\x85R"


def layout_pickle(value: Any) -> PickleSkeleton:
    """The file of a nested value with Holes for arrays; the same value gives the same bytes.

    Known are dict, list, tuple, str, int, float, bool, None, bytes, Hole, Instance, Once, Stateful, Global, Call and
    Pairs.
    Raises UnsupportedError for anything else, and for dtypes that Paddle cannot hold.
    """
    w = _PickleWriter()
    w.run += b"\x80\x04"
    w.value(value, ())
    return w.done()


def plain_pickle(value: Any) -> bytes:
    """The pickle of a value without arrays. Raises UnsupportedError as ``layout_pickle`` does, and for a Hole."""
    written = layout_pickle(value)
    if written.places:
        path = ".".join(map(str, next(iter(written.places))))
        raise UnsupportedError("an array has no place in this file", where=path or ())
    return b"".join(data for _, data in written.literals)
