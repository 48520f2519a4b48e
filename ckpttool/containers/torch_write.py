"""Laying out a file of torch.save: every byte but those of its tensors, for any nested value of plain data.

lay_out_torch({"w": Hole("BF16", (8, 4)), "step": 7}, "archive")
  archive/data.pkl   {"w": _rebuild_tensor_v2(storage 0, ...), "step": 7}
  archive/data/0     64 bytes that are written later, at offsets[("w",)]; their CRC-32 goes where checksums says
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple
from zlib import crc32

from ckpttool.containers.pickle import Global
from ckpttool.containers.pickle_write import Hole, Instance, PickledCall
from ckpttool.containers.torch_pickle import STORAGE_CLASS, TORCH_DTYPE
from ckpttool.containers.torch_zip import ALIGNMENT, CENTRAL, END, END64, FULL, LOCAL, LOCATOR
from ckpttool.core.dtypes import itemsize, nbytes
from ckpttool.core.geometry import contiguous_strides
from ckpttool.errors import UnsupportedError

_UTF8 = 0x800
_MAX_INT = 255
"""Bytes of LONG1."""


class TorchLayout(NamedTuple):
    """A zip of one value that is to be written."""

    size: int
    literals: list[tuple[int, bytes]]
    offsets: dict[tuple[Any, ...], int]
    """Path of keys and positions to a Hole -> byte at which its elements begin."""
    checksums: Mapping[int, tuple[int, ...]]
    """Byte at which a tensor begins -> bytes where its CRC-32 belongs (4 bytes, little-endian)."""


def lay_out_torch(value: Any, top: str) -> TorchLayout:
    """The file of a nested value with Holes for tensors, below the folder ``top``; the same value gives the same bytes.

    Known are dict, list, tuple, str, int, float, bool, None, bytes, Hole, Global (a class or dtype by its name),
    Instance and PickledCall. Raises UnsupportedError for anything else, and for a dtype that torch does not have.
    """
    pickler = _Pickler()
    pickler.value(value, ())
    zip_ = _ZipLayout(top)
    zip_.put("data.pkl", bytes(pickler.run + b"."))
    zip_.put(".format_version", b"1")
    zip_.put(".storage_alignment", str(ALIGNMENT).encode())
    zip_.put("byteorder", b"little")
    offsets = {
        path: zip_.member(f"data/{i}", nbytes(hole.dtype, prod(hole.shape), where=".".join(map(str, path))))
        for i, (path, hole) in enumerate(pickler.holes.items())
    }
    zip_.put("version", b"3\n")
    return zip_.close(offsets)


class _ZipLayout:
    """Members one behind the other; every one begins at a multiple of ALIGNMENT."""

    def __init__(self, top: str) -> None:
        self.top, self.at = top, 0
        self.literals: list[tuple[int, bytes]] = []
        self.directory = bytearray()
        self.members = 0
        self.holes: list[tuple[int, int, int]] = []
        """Per tensor: offsets of its bytes, and of its checksum in its header and in the directory."""

    def put(self, name: str, data: bytes) -> None:
        """A member whose bytes are known."""
        self.literals.append((self.member(name, len(data), crc32(data), known=True), data))

    def member(self, name: str, size: int, crc: int = 0, *, known: bool = False) -> int:
        """The byte at which a member begins."""
        path = f"{self.top}/{name}".encode()
        wide = struct.pack("<2H2Q", 1, 16, size, size) if size >= FULL else b""
        begin = self.at + LOCAL.size + len(path) + len(wide) + 4
        begin += -begin % ALIGNMENT
        pad = begin - self.at - LOCAL.size - len(path) - len(wide) - 4
        extra = wide + struct.pack("<2H", 0x4246, pad) + b"Z" * pad  # "FB", as torch pads
        short = min(size, FULL)
        # Version 4.5, no flags but UTF-8, stored, 1980-01-01.
        common = (45, _UTF8, 0, 0, 33, crc, short, short, len(path))
        self.literals.append((self.at, LOCAL.pack(b"PK\x03\x04", *common, len(extra)) + path + extra))
        large = [n for n in (size, size, self.at) if n >= FULL]
        wide = struct.pack(f"<2H{len(large)}Q", 1, 8 * len(large), *large) if large else b""
        if not known and size:
            self.holes.append((begin, self.at + 14, len(self.directory) + 16))
        entry = CENTRAL.pack(b"PK\x01\x02", 45, *common, len(wide), 0, 0, 0, 0, min(self.at, FULL))
        self.directory += entry + path + wide
        self.members += 1
        self.at = begin + size
        return begin

    def close(self, offsets: dict[tuple[Any, ...], int]) -> TorchLayout:
        """The directory, and what there is."""
        start, size, count = self.at, len(self.directory), self.members
        end = END64.pack(b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, start)
        end += LOCATOR.pack(b"PK\x06\x07", 0, start + size, 1)
        few = min(count, 0xFFFF)
        end += END.pack(b"PK\x05\x06", 0, 0, few, few, size, min(start, FULL), 0)
        self.literals.append((start, bytes(self.directory) + end))
        checksums = {begin: (local, start + central) for begin, local, central in self.holes}
        return TorchLayout(start + size + len(end), self.literals, offsets, checksums)


class _Pickler:
    """Protocol 2, which ``torch.load(weights_only=True)`` reads; each tensor is the whole of a storage of its own."""

    def __init__(self) -> None:
        self.run = bytearray(b"\x80\x02")
        self.holes: dict[tuple[Any, ...], Hole] = {}
        self.memo: dict[str, bytes] = {}

    def value(self, v: Any, path: tuple[Any, ...]) -> None:
        run = self.run
        if v is None:
            run += b"N"
        elif v is True or v is False:
            run += b"\x88" if v else b"\x89"
        elif type(v) is int:
            run += _number(v)
        elif type(v) is float:
            run += b"G" + struct.pack(">d", v)
        elif type(v) is str:
            run += _text(v)
        elif type(v) is bytes:
            self.value(PickledCall("_codecs", "encode", (v.decode("latin-1"), "latin1")), path)
        elif type(v) is Hole:
            self.tensor(v, path)
        elif type(v) is Global:
            self.named(v.module, v.name)
        elif isinstance(v, Instance):
            self.named(v.module, v.cls)
            run += b")\x81}"
            self.pairs(v.fields, path)
            run += b"b"
        elif type(v) is PickledCall:
            self.named(v.module, v.name)
            self.value(v.args, path)
            run += b"R"
            if v.items:
                self.pairs(v.items, path)
        elif isinstance(v, Mapping):
            run += b"}"
            self.pairs(v, path)
        elif type(v) in (list, tuple):
            run += b"](" if type(v) is list else b"("
            for i, x in enumerate(v):
                self.value(x, (*path, i))
            run += b"e" if type(v) is list else b"t"
        else:
            raise UnsupportedError(
                f"a {type(v).__name__} cannot be written into a file of torch.save",
                where=".".join(map(str, path)) or (),
            )

    def pairs(self, v: Mapping[Any, Any], path: tuple[Any, ...]) -> None:
        self.run += b"("
        for k, x in v.items():
            self.value(k, path)
            self.value(x, (*path, k))
        self.run += b"u"

    def tensor(self, v: Hole, path: tuple[Any, ...]) -> None:
        called = ".".join(map(str, path))
        if v.dtype not in TORCH_DTYPE:
            raise UnsupportedError(
                f"tensor `{called}` is {v.dtype}, which torch.save does not write",
                where=called,
                hint="write it as another dtype, or use --to hf",
            )
        count = prod(v.shape)
        typed = v.dtype in STORAGE_CLASS
        self.named("torch._utils", "_rebuild_tensor_v2" if typed else "_rebuild_tensor_v3")
        self.run += b"((" + _text("storage")
        self.named(*(("torch", STORAGE_CLASS[v.dtype]) if typed else ("torch.storage", "UntypedStorage")))
        self.run += _text(str(len(self.holes))) + _text("cpu")
        self.run += _number(count if typed else count * itemsize(v.dtype)) + b"tQK\x00"
        self.run += _numbers(v.shape) + _numbers(contiguous_strides(v.shape)) + b"\x89"
        self.named("collections", "OrderedDict")
        self.run += b")R"
        if not typed:
            self.named("torch", TORCH_DTYPE[v.dtype])
        self.run += b"tR"
        self.holes[path] = v

    def named(self, module: str, name: str) -> None:
        """A class or function; recalled where it was named before."""
        text = f"c{module}\n{name}\n"
        if text in self.memo:
            self.run += self.memo[text]
            return
        at = len(self.memo)
        wide = struct.pack("<I", at)
        self.memo[text] = b"h" + wide[:1] if at < 256 else b"j" + wide
        self.run += text.encode() + (b"q" + wide[:1] if at < 256 else b"r" + wide)


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def _number(n: int) -> bytes:
    if 0 <= n < 256:
        return b"K" + bytes((n,))
    if -(1 << 31) <= n < 1 << 31:
        return b"J" + struct.pack("<i", n)
    data = n.to_bytes(max(9, n.bit_length() // 8 + 1), "little", signed=True)
    if len(data) > _MAX_INT:
        raise UnsupportedError(f"an integer of {len(data):,} bytes cannot be written into a pickle")
    return b"\x8a" + bytes((len(data),)) + data


def _numbers(numbers: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(map(_number, numbers)) + b"t"
