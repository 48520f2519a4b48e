"""One file of ``torch.save``: a zip, or five pickles and bytes before torch 1.6. Read and laid out, never unpickled.

    pytorch_model/data.pkl      the object; a tensor names a storage       magic, version, system    three pickles
    pytorch_model/byteorder     little                                     the object                a pickle
    pytorch_model/data/0        the bytes of storage 0,                    keys of storages          a pickle
    pytorch_model/data/1        each at a multiple of 64                   n, n elements, ...        of each, in order
    central directory

The zip's directory is read here and not with ``zipfile``, because what counts is where members lie: they are stored, so
a tensor is a byte range of the file. Source: torch/serialization.py, caffe2/serialize/inline_container.cc (torch 2.13).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, NoReturn
from zlib import crc32

from ckpttool.catalog import StoredTensor
from ckpttool.containers.pickle import interpret, opened, printable
from ckpttool.containers.torch_pickle import OTHER_SIZES, STORAGE_CLASS, TORCH_DTYPE, Storage, Tensor, vocabulary
from ckpttool.dtypes import DTYPES, itemsize, nbytes
from ckpttool.errors import ConflictError, CorruptError, IncompleteError, UnsupportedError
from ckpttool.geometry import contiguous_strides
from ckpttool.storage.place import DataFile, OpenFile, Place

MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_VERSION = 1001
ALIGNMENT = 64
"""Of the bytes of a storage in a zip."""
MAX_MEMBERS = 1 << 21
MAX_DIRECTORY = 1 << 28
"""Bytes of the central directory."""
MAX_STRETCH = 1 << 30
"""Bytes that a view may have beyond 64 times its storage: expanded tensors repeat elements, but not a few for ever."""

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_FULL = 0xFFFFFFFF
_STEP = 1 << 20
"""Bytes that are in memory while a CRC is taken."""
_UTF8 = 0x800
_OLD_PROTOCOLS = f"L{MAGIC}L\n".encode()
"""How protocols 0 and 1 write MAGIC, before torch 1.6."""
_AGAIN = "the download or save was interrupted; fetch or write the file again"


@dataclass(frozen=True, slots=True)
class TorchFile:
    """What a file of torch.save holds."""

    info: DataFile
    value: Any
    """Plain values, Records, and a Tensor for every tensor."""
    storages: Mapping[str, tuple[int, int]]
    """Where the bytes of each storage lie: (byte offset, bytes)."""

    def place(self, tensor: Tensor, name: str, file: int) -> StoredTensor:
        """The bytes of a tensor. Raises UnsupportedError for a dtype, CorruptError for a view that leaves its storage.

        ``name`` is what the result and errors call it, ``file`` the number of this file.
        """
        where = f"{self.info.place} `{printable(name)}`"
        if tensor.dtype not in DTYPES:
            raise UnsupportedError(
                f"tensor `{printable(name)}` is of torch's type {printable(tensor.dtype)}",
                where=where,
                hint="convert it (.to(torch.float32), .dequantize(), ...) and save the file again",
            )
        if min((tensor.offset, *tensor.shape, *tensor.strides)) < 0:
            raise CorruptError("a tensor has a negative size, stride or offset", where=where)
        begin, held = self.storages[tensor.storage.key]
        size, count = itemsize(tensor.dtype), prod(tensor.shape)
        if not count:
            return StoredTensor(name, tensor.dtype, tensor.shape, file, begin)
        last = tensor.offset + sum([(n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True)])
        if (last + 1) * size > held:
            raise CorruptError(
                f"a tensor {list(tensor.shape)} ends at byte {(last + 1) * size:,} of its storage, which has {held:,}",
                where=where,
            )
        if count * size > MAX_STRETCH + 64 * held:
            raise UnsupportedError(
                f"a tensor repeats the {held:,} bytes of its storage until it has {count * size:,}",
                where=where,
                hint="no checkpoint known does this; save tensor.clone()",
            )
        plain = tensor.strides == contiguous_strides(tensor.shape)
        at = begin + tensor.offset * size
        return StoredTensor(name, tensor.dtype, tensor.shape, file, at, 0, None if plain else tensor.strides)


def is_torch(head: bytes) -> bool:
    """Whether a file that begins so may be one of torch.save: a zip or a pickle."""
    return head.startswith((b"PK\x03\x04", _OLD_PROTOCOLS)) or (
        head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")
    )


def read_torch(path: Place, begin: int = 0, end: int | None = None) -> TorchFile:
    """The file of torch.save at bytes ``begin`` to ``end`` of a file.

    Raises IncompleteError for one that is cut off or not there, CorruptError and ConflictError for one that contradicts
    itself, UnsupportedError for what is not a file of torch.save, is compressed, or asks for code.
    """
    with opened(path) as file:
        source = _Source(file, begin, file.info.size if end is None else end)
        legacy = source.pread(begin, min(4, source.end - begin)) != b"PK\x03\x04"
        return _read_legacy(source) if legacy else _read_zip(source)


class _Source(NamedTuple):
    file: OpenFile
    begin: int
    end: int

    @property
    def info(self) -> DataFile:
        return self.file.info

    def pread(self, at: int, n: int) -> bytes:
        """Exactly ``n`` bytes. Raises IncompleteError when they are not there."""
        inside = self.begin <= at <= at + n <= self.end
        data = self.file.pread(n, at) if inside else b""
        if len(data) != n or not inside:
            raise IncompleteError(
                f"the file is cut off: it needs at least {at + n:,} bytes, it has {self.end - self.begin:,}",
                where=str(self.info.place),
                hint=_AGAIN,
            )
        return data

    def corrupt(self, what: str) -> NoReturn:
        raise CorruptError(what, where=str(self.info.place), hint="fetch or write the file again")

    def begins_pickle(self, at: int) -> None:
        """Refuse a pickle of protocol 0 or 1, which does not say so."""
        if self.pread(at, 1) != b"\x80":
            self.unsupported(
                "this is not a pickle of protocol 2 to 5; protocols 0 and 1 are not read",
                "save the file again with torch's default protocol: torch.save without pickle_protocol",
            )

    def unsupported(self, what: str, hint: str) -> NoReturn:
        raise UnsupportedError(what, where=str(self.info.place), hint=hint)

    def checked(self, storages: Mapping[str, Storage], places: Mapping[str, tuple[int, int]]) -> None:
        """Refuse storages that are not there, or have another size than the pickle says."""
        for s in storages.values():
            if s.key not in places:
                self.corrupt(f"the storage `{printable(s.key)}` is not in the file")
            size = s.elements * (itemsize(s.dtype) if s.dtype in DTYPES else 0)
            if size > places[s.key][1]:
                self.corrupt(
                    f"the storage `{printable(s.key)}` should have {size:,} bytes, it has {places[s.key][1]:,}"
                )


# -- the zip


class _Member(NamedTuple):
    header: int
    size: int
    crc: int
    """CRC-32; 0 where the writer did not take it."""
    packed: bool
    """Compressed or encrypted."""


def _read_zip(source: _Source) -> TorchFile:
    members, limit = _members(source)
    pickles = [name for name in members if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1:
        source.unsupported(
            f"this zip holds {len(pickles)} data.pkl, so it is not a file of torch.save",
            "give the file of weights itself; an archive has to be unpacked first",
        )
    top = pickles[0].removesuffix("data.pkl")
    if top + "constants.pkl" in members:
        source.unsupported(
            "this is a TorchScript module (torch.jit.save), a program and not a dict of tensors",
            "write its weights: torch.save(torch.jit.load(FILE).state_dict(), 'pytorch_model.bin')",
        )

    def place(name: str) -> tuple[int, int]:
        m = members[name]
        if m.packed:
            source.unsupported(
                f"`{printable(name)}` is compressed (deflated) in the zip: torch.save stores all members as they are",
                "unpack the archive and pack it again with `zip -0 -r`, or load and save it with torch",
            )
        local = _LOCAL.unpack(source.pread(source.begin + m.header, _LOCAL.size))
        at = source.begin + m.header + _LOCAL.size + local[9] + local[10]
        called = source.pread(source.begin + m.header + _LOCAL.size, local[9])
        if local[0] != b"PK\x03\x04" or called != name.encode("utf-8", "surrogateescape"):
            source.corrupt(f"the zip's directory and the member `{printable(name)}` contradict each other")
        if at + m.size > limit:
            source.corrupt(f"the member `{printable(name)}` reaches beyond the data of the zip")
        return at, m.size

    if top + "byteorder" in members:
        at, n = place(top + "byteorder")
        order = source.pread(at, min(n, 16))
        if order != b"little":
            source.unsupported(
                f"the tensors are {printable(order.decode('latin-1'))}-endian", "save them on x86 or ARM"
            )
    at, n = place(pickles[0])
    if (said := members[pickles[0]].crc) and (crc := _crc(source, at, n)) != said:
        source.corrupt(f"`{printable(pickles[0])}` is damaged: its CRC-32 is {crc:08x}, the zip says {said:08x}")
    source.begins_pickle(at)
    storages: dict[str, Storage] = {}
    value, _ = interpret(source.file, vocabulary(storages), begin=at, end=at + n)
    places = {key: place(f"{top}data/{key}") for key in storages if f"{top}data/{key}" in members}
    source.checked(storages, places)
    return TorchFile(source.info, value, places)


def _crc(source: _Source, at: int, n: int) -> int:
    crc = 0
    for i in range(at, at + n, _STEP):
        crc = crc32(source.pread(i, min(_STEP, at + n - i)), crc)
    return crc


def _members(source: _Source) -> tuple[dict[str, _Member], int]:
    """The members of a zip by name, and the byte where their data ends."""
    tail_at = max(source.begin, source.end - _END.size - 0xFFFF)
    tail = source.pread(tail_at, source.end - tail_at)
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or at + _END.size > len(tail):
        raise IncompleteError("the zip is cut off: its directory is missing", where=str(source.info.place), hint=_AGAIN)
    *_, count, size, start, _ = _END.unpack_from(tail, at)
    if at >= _LOCATOR.size and tail[at - _LOCATOR.size :][:4] == b"PK\x06\x07":
        _, _, place, _ = _LOCATOR.unpack_from(tail, at - _LOCATOR.size)
        end = _END64.unpack(source.pread(source.begin + place, _END64.size))
        if end[0] != b"PK\x06\x06":
            source.corrupt("the zip64 directory is not where the zip says")
        count, size, start = end[7:]
    if size > MAX_DIRECTORY or count > MAX_MEMBERS:
        source.unsupported(f"the zip has {count:,} members", "no checkpoint known has so many")
    data = source.pread(source.begin + start, size)
    found: dict[str, _Member] = {}
    at = 0
    for _ in range(count):
        if at + _CENTRAL.size > size or data[at : at + 4] != b"PK\x01\x02":
            source.corrupt("the zip's directory is damaged")
        fields = _CENTRAL.unpack_from(data, at)
        flags, method, (packed, full, n, extra, comment), header = fields[3], fields[4], fields[8:13], fields[16]
        at += _CENTRAL.size
        name = data[at : at + n].decode("utf-8", "surrogateescape")
        full, packed, header = _zip64(data[at + n : at + n + extra], full, packed, header)
        at += n + extra + comment
        if name in found:
            raise ConflictError(
                f"the zip has two members called `{printable(name)}`",
                where=str(source.info.place),
                hint="write the file again: it is undefined which of them counts",
            )
        found[name] = _Member(header, full, fields[7], method != 0 or flags & 1 != 0 or packed != full)
    return found, source.begin + start


def _zip64(extra: bytes, *numbers: int) -> Iterator[int]:
    """Size, packed size and offset of a member; those that do not fit 32 bits are in its extra field."""
    at, large = 0, b""
    while at + 4 <= len(extra):
        tag, n = struct.unpack_from("<2H", extra, at)
        if tag == 1:
            large = extra[at + 4 : at + 4 + n]
        at += 4 + n
    for number in numbers:
        if number == _FULL and len(large) >= 8:
            yield int.from_bytes(large[:8], "little")
            large = large[8:]
        else:
            yield number


# -- before torch 1.6


def _read_legacy(source: _Source) -> TorchFile:
    storages: dict[str, Storage] = {}
    words = vocabulary(storages)
    at = source.begin

    def value() -> Any:
        nonlocal at
        found, at = interpret(source.file, words, begin=at, end=source.end, whole=False)
        return found

    source.begins_pickle(at)
    if value() != MAGIC:
        source.unsupported(
            "this is a pickle, but not one of torch.save", "give the file of weights; nothing in it was executed"
        )
    if value() != LEGACY_VERSION:
        source.unsupported("this file of torch.save has an unknown version", "load and save it with a newer torch")
    system = value()
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        source.unsupported("the tensors are not little-endian", "save them on x86 or ARM")
    held, keys = value(), value()
    if not isinstance(keys, list) or not all(isinstance(k, str) for k in keys) or len(set(keys)) != len(keys):
        source.corrupt("the list of storages is not a list of different names")
    places = {}
    for key in keys:
        if key not in storages:
            source.corrupt(f"the storage `{printable(key)}` is in the file, but not in the pickle")
        dtype = storages[key].dtype
        size = itemsize(dtype) if dtype in DTYPES else OTHER_SIZES.get(dtype)
        if size is None:
            source.unsupported(
                f"the storage `{printable(key)}` is of torch's type {printable(dtype)}, whose size is not known",
                "save the file with a newer torch",
            )
        count = int.from_bytes(source.pread(at, 8), "little", signed=True)
        if count != storages[key].elements:
            source.corrupt(f"the storage `{printable(key)}` has {count:,} elements, not {storages[key].elements:,}")
        places[key] = (at + 8, count * size)
        at += 8 + places[key][1]
        source.pread(at, 0)
    source.checked(storages, places)
    return TorchFile(source.info, held, places)


# -- writing


class TorchLayout(NamedTuple):
    """A zip of one dict of tensors that is to be written."""

    size: int
    literals: list[tuple[int, bytes]]
    offsets: dict[str, int]
    """Byte at which each tensor begins."""
    checksums: Mapping[int, tuple[int, ...]]
    """Byte at which a tensor begins -> bytes where its CRC-32 belongs (4 bytes, little-endian)."""


def lay_out_torch(tensors: Iterable[tuple[str, str, tuple[int, ...]]], top: str) -> TorchLayout:
    """Place (name, dtype, shape) in the order given. Raises UnsupportedError for a dtype that torch does not have."""
    described = list(tensors)
    zip_ = _ZipLayout(top)
    zip_.put("data.pkl", _pickle(described))
    zip_.put(".format_version", b"1")
    zip_.put(".storage_alignment", str(ALIGNMENT).encode())
    zip_.put("byteorder", b"little")
    offsets = {
        name: zip_.member(f"data/{i}", nbytes(dtype, prod(shape), where=name))
        for i, (name, dtype, shape) in enumerate(described)
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
        """Of each tensor: where it begins, and where its checksum is in its header and in the directory."""

    def put(self, name: str, data: bytes) -> None:
        """A member whose bytes are known."""
        self.literals.append((self.member(name, len(data), crc32(data), known=True), data))

    def member(self, name: str, size: int, crc: int = 0, *, known: bool = False) -> int:
        """The byte at which a member begins."""
        path = f"{self.top}/{name}".encode()
        wide = struct.pack("<2H2Q", 1, 16, size, size) if size >= _FULL else b""
        begin = self.at + _LOCAL.size + len(path) + len(wide) + 4
        begin += -begin % ALIGNMENT
        pad = begin - self.at - _LOCAL.size - len(path) - len(wide) - 4
        extra = wide + struct.pack("<2H", 0x4246, pad) + b"Z" * pad  # "FB", as torch pads
        short = min(size, _FULL)
        # Version 4.5, no flags but UTF-8, stored, 1980-01-01.
        common = (45, _UTF8, 0, 0, 33, crc, short, short, len(path))
        self.literals.append((self.at, _LOCAL.pack(b"PK\x03\x04", *common, len(extra)) + path + extra))
        large = [n for n in (size, size, self.at) if n >= _FULL]
        wide = struct.pack(f"<2H{len(large)}Q", 1, 8 * len(large), *large) if large else b""
        if not known and size:
            self.holes.append((begin, self.at + 14, len(self.directory) + 16))
        entry = _CENTRAL.pack(b"PK\x01\x02", 45, *common, len(wide), 0, 0, 0, 0, min(self.at, _FULL))
        self.directory += entry + path + wide
        self.members += 1
        self.at = begin + size
        return begin

    def close(self, offsets: dict[str, int]) -> TorchLayout:
        """The directory, and what there is."""
        start, size, count = self.at, len(self.directory), self.members
        end = _END64.pack(b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, start)
        end += _LOCATOR.pack(b"PK\x06\x07", 0, start + size, 1)
        few = min(count, 0xFFFF)
        end += _END.pack(b"PK\x05\x06", 0, 0, few, few, size, min(start, _FULL), 0)
        self.literals.append((start, bytes(self.directory) + end))
        checksums = {begin: (local, start + central) for begin, local, central in self.holes}
        return TorchLayout(start + size + len(end), self.literals, offsets, checksums)


def _pickle(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """Protocol 2: a dict of tensors, each the whole of a storage of its own."""
    out = bytearray(b"\x80\x02}(")
    memo: dict[str, bytes] = {}

    def name(module: str, attribute: str) -> bytes:
        text = f"c{module}\n{attribute}\n"
        if text not in memo:
            memo[text] = b"h" + bytes((len(memo),))
            return text.encode() + b"q" + memo[text][1:]
        return memo[text]

    for i, (called, dtype, shape) in enumerate(tensors):
        if dtype not in TORCH_DTYPE:
            raise UnsupportedError(
                f"tensor `{called}` is {dtype}, which torch.save does not write",
                where=called,
                hint="write it as another dtype, or use --to hf",
            )
        count = prod(shape)
        typed = dtype in STORAGE_CLASS
        out += _text(called) + name("torch._utils", "_rebuild_tensor_v2" if typed else "_rebuild_tensor_v3")
        out += b"((" + _text("storage")
        out += name("torch", STORAGE_CLASS[dtype]) if typed else name("torch.storage", "UntypedStorage")
        out += _text(str(i)) + _text("cpu") + _number(count if typed else count * itemsize(dtype)) + b"tQK\x00"
        out += _numbers(shape) + _numbers(contiguous_strides(shape)) + b"\x89"
        out += name("collections", "OrderedDict") + b")R"
        out += (b"" if typed else name("torch", TORCH_DTYPE[dtype])) + b"tR"
    return bytes(out) + b"u."


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def _number(n: int) -> bytes:
    if n < 256:
        return b"K" + bytes((n,))
    if n < 1 << 31:
        return b"J" + struct.pack("<i", n)
    data = n.to_bytes(9, "little")
    return b"\x8a" + bytes((len(data),)) + data


def _numbers(numbers: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(map(_number, numbers)) + b"t"
