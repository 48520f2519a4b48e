"""Reading Paddle's pickles without unpickling: an interpreter of opcodes that builds inert values.

Interim version.
"""

from __future__ import annotations

import os
import struct
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from ckpttool.catalog import DataFile
from ckpttool.errors import CorruptError, IncompleteError, UnsupportedError


class Array(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    path: Path
    fortran: bool = False
    name: str = ""


class Record:
    __slots__ = ("cls", "fields")

    def __init__(self, cls: str, fields: dict[str, Any]) -> None:
        self.cls, self.fields = cls, fields

    def __repr__(self) -> str:
        return f"{self.cls}({self.fields})"


class Scratch:
    pass


class _Bytes(NamedTuple):
    offset: int
    nbytes: int
    data: bytes | None


class _Global(NamedTuple):
    name: str


class _Nd:
    def __init__(self) -> None:
        self.array: Array | None = None


_KINDS = {
    "f4": "F32",
    "f8": "F64",
    "f2": "F16",
    "u2": "U16",
    "i1": "I8",
    "u1": "U8",
    "i2": "I16",
    "i4": "I32",
    "i8": "I64",
    "u4": "U32",
    "u8": "U64",
    "b1": "BOOL",
    "c8": "C64",
    "c16": "C128",
}
_META = {
    f"paddle.distributed.{m}.metadata.{c}"
    for m in ("flex_checkpoint.dcp", "checkpoint")
    for c in ("Metadata", "LocalTensorMetadata", "LocalTensorIndex")
}
_OK = {
    "numpy.ndarray",
    "numpy.dtype",
    "_codecs.encode",
    "collections.OrderedDict",
    "builtins.tuple",
    "__builtin__.tuple",
    "builtins.slice",
    *_META,
    *(f"numpy.{c}.multiarray.{f}" for c in ("core", "_core") for f in ("_reconstruct", "scalar")),
}


def read_pickle(path: Path, scratch: Scratch | None = None) -> Any:
    with path.open("rb") as f:
        size = os.fstat(f.fileno()).st_size
        return _run(f, path, size)


def _run(f: Any, path: Path, size: int) -> Any:
    stack: list[Any] = []
    marks: list[list[Any]] = []
    memo: dict[int, Any] = {}

    def take(n: int) -> bytes:
        data = f.read(n)
        if len(data) != n:
            raise IncompleteError("the pickle is cut off", where=str(path))
        return data

    def blob(n: int) -> _Bytes:
        at = f.tell()
        if at + n > size:
            raise IncompleteError(f"the pickle is cut off: {at + n:,} bytes needed, {size:,} there", where=str(path))
        if n > 4096:
            f.seek(n, 1)
            return _Bytes(at, n, None)
        return _Bytes(at, n, take(n))

    def done(x: Any) -> Any:
        if isinstance(x, _Nd):
            return x.array
        if isinstance(x, _Bytes):
            return x.data if x.data is not None else b""
        return x

    def call(fn: Any, args: Any) -> Any:
        name = fn.name
        args = tuple(args)
        if name.endswith("_reconstruct"):
            return _Nd()
        if name == "numpy.dtype":
            return {"dtype": args[0]}
        if name.endswith("multiarray.scalar"):
            import numpy as np

            return np.frombuffer(args[1].data, args[0]["dtype"])[0].item()
        if name.endswith("tuple"):
            inner = args[0]
            if len(inner) == 2 and isinstance(inner[0], str) and isinstance(inner[1], _Nd):
                return inner[1].array._replace(name=inner[0])
            return tuple(done(x) for x in inner)
        if name == "collections.OrderedDict":
            return {}
        if name == "builtins.slice":
            return slice(*args)
        raise UnsupportedError(f"`{name}` cannot be called", where=str(path))

    take_short = lambda: struct.unpack("<B", take(1))[0]  # noqa: E731
    while True:
        op = take(1)
        if op == b"\x80":
            take(1)
        elif op == b"\x95":
            take(8)
        elif op == b".":
            return done(stack.pop())
        elif op == b"(":
            marks.append(stack)
            stack = []
        elif op == b"}":
            stack.append({})
        elif op == b"]":
            stack.append([])
        elif op == b")":
            stack.append(())
        elif op in (b"\x8c", b"X", b"\x8d"):
            n = struct.unpack(
                {b"\x8c": "<B", b"X": "<I", b"\x8d": "<Q"}[op], take({b"\x8c": 1, b"X": 4, b"\x8d": 8}[op])
            )[0]
            if n > 1 << 24:
                raise CorruptError("a string is too long", where=str(path))
            stack.append(take(n).decode("utf-8", "surrogatepass"))
        elif op in (b"C", b"B", b"\x8e"):
            n = struct.unpack({b"C": "<B", b"B": "<I", b"\x8e": "<Q"}[op], take({b"C": 1, b"B": 4, b"\x8e": 8}[op]))[0]
            stack.append(blob(n))
        elif op == b"\x94":
            memo[len(memo)] = stack[-1]
        elif op == b"q":
            memo[take_short()] = stack[-1]
        elif op == b"r":
            memo[struct.unpack("<I", take(4))[0]] = stack[-1]
        elif op == b"h":
            stack.append(memo[take_short()])
        elif op == b"j":
            stack.append(memo[struct.unpack("<I", take(4))[0]])
        elif op == b"K":
            stack.append(take_short())
        elif op == b"M":
            stack.append(struct.unpack("<H", take(2))[0])
        elif op == b"J":
            stack.append(struct.unpack("<i", take(4))[0])
        elif op == b"\x8a":
            stack.append(int.from_bytes(take(take_short()), "little", signed=True))
        elif op == b"G":
            stack.append(struct.unpack(">d", take(8))[0])
        elif op == b"N":
            stack.append(None)
        elif op in (b"\x88", b"\x89"):
            stack.append(op == b"\x88")
        elif op in (b"\x93", b"c"):
            if op == b"c":
                name = f.readline().strip().decode() + "." + f.readline().strip().decode()
            else:
                b = stack.pop()
                name = f"{stack.pop()}.{b}"
            if name not in _OK:
                raise UnsupportedError(f"the pickle asks for `{name}`, which is not allowed", where=str(path))
            stack.append(_Global(name))
        elif op in (b"R", b"\x81"):
            args = stack.pop()
            fn = stack.pop()
            if op == b"\x81":
                stack.append(Record(fn.name.rsplit(".", 1)[1], {}))
            else:
                stack.append(call(fn, args))
        elif op == b"b":
            state = stack.pop()
            target = stack[-1]
            if isinstance(target, _Nd):
                _, shape, dt, fortran, data = state
                kind = _KINDS[dt["dtype"].lstrip("<|=")]
                shape = tuple(shape)
                item = int(dt["dtype"].lstrip("<|=bfiuc") or 1)
                if data.nbytes != prod(shape) * item:
                    raise CorruptError("array size", where=str(path))
                target.array = Array(kind, shape, data.offset, data.nbytes, path, bool(fortran))
            elif isinstance(target, Record):
                target.fields.update({k: done(v) for k, v in state.items()})
            # a dtype's state says nothing that its name does not
        elif op in (b"s", b"u"):
            if op == b"s":
                v = stack.pop()
                k = stack.pop()
                stack[-1][k] = done(v)
            else:
                items, stack = stack, marks.pop()
                stack[-1].update({k: done(v) for k, v in zip(items[::2], items[1::2], strict=True)})
        elif op in (b"a", b"e"):
            if op == b"a":
                v = stack.pop()
                stack[-1].append(done(v))
            else:
                items, stack = stack, marks.pop()
                stack[-1].extend(done(v) for v in items)
        elif op == b"t":
            items, stack = stack, marks.pop()
            stack.append(tuple(items))
        elif op in (b"\x85", b"\x86", b"\x87"):
            n = op[0] - 0x84
            items = stack[-n:]
            del stack[-n:]
            stack.append(tuple(items))
        else:
            raise UnsupportedError(f"opcode {op!r} is not allowed", where=str(path))


class PaddleFile(NamedTuple):
    tensors: dict[str, Array]
    chunks: dict[str, tuple[Array, ...]]
    structured: dict[str, str]
    other: dict[str, Any]
    info: DataFile


def read_paddle(path: Path, scratch: Scratch | None = None) -> PaddleFile:
    st = path.stat()
    value = read_pickle(path)
    structured = value.pop("StructuredToParameterName@@", {})
    tensors = {k: v for k, v in value.items() if isinstance(v, Array)}
    other = {k: v for k, v in value.items() if not isinstance(v, Array)}
    return PaddleFile(tensors, {}, structured, other, DataFile(path, st.st_size, st.st_mtime_ns))


def sniff(path: Path) -> str:
    with path.open("rb") as f:
        return "pickle" if f.read(1) == b"\x80" else ""
