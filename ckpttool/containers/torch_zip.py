"""One file of ``torch.save``: a zip, or five pickles and bytes before torch 1.6. Read, never unpickled.

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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, NoReturn
from zlib import crc32

from ckpttool.containers.pickle import interpret, opened, printable
from ckpttool.containers.torch_pickle import OTHER_SIZES, Storage, TorchTensor, vocabulary
from ckpttool.core.catalog import StoredTensor
from ckpttool.core.dtypes import DTYPES, itemsize
from ckpttool.core.files import DataFile, OpenFile, Place
from ckpttool.core.geometry import contiguous_strides
from ckpttool.errors import ConflictError, CorruptError, IncompleteError, UnsupportedError
from ckpttool.storage.place import expect

MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_VERSION = 1001
ALIGNMENT = 64
"""Alignment of a storage in a zip, in bytes."""
MAX_MEMBERS = 1 << 21
MAX_DIRECTORY = 1 << 28
"""Bytes of the central directory."""
MAX_STRETCH = 1 << 30
"""Bytes that a view may have beyond 64 times its storage: expanded tensors repeat elements, but not a few for ever."""

MAX_HEADS = 1 << 13
"""Forms of slices that are remembered; a head has about 700 bytes."""

LOCAL = struct.Struct("<4s5H3I2H")
CENTRAL = struct.Struct("<4s6H3I5H2I")
END = struct.Struct("<4s4H2IH")
END64 = struct.Struct("<4sQ2H2I4Q")
LOCATOR = struct.Struct("<4sIQI")
FULL = 0xFFFFFFFF
_CRC_AT = 14
"""Offset of the checksum in a local header."""
_STEP = 1 << 20
"""Bytes that are in memory while a CRC is taken."""
_OLD_PROTOCOLS = f"L{MAGIC}L\n".encode()
"""MAGIC in protocols 0 and 1, before torch 1.6."""
_COUNTING = {"F32": "<f", "F64": "<d", "I32": "<i", "I64": "<q"}
"""Dtypes of steps -> formats of ``struct``."""
_AGAIN = "the download or save was interrupted; fetch or write the file again"


@dataclass(frozen=True, slots=True)
class TorchFile:
    """The content of a file of torch.save."""

    info: DataFile
    value: Any
    """Plain values, PickledObjects, and a TorchTensor for every tensor."""
    storages: Mapping[str, tuple[int, int]]
    """Places of the bytes of each storage: (byte offset, bytes)."""

    def place(self, tensor: TorchTensor, name: str, file: int) -> StoredTensor:
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
                hint="no known checkpoint does this; save tensor.clone()",
            )
        plain = tensor.strides == contiguous_strides(tensor.shape)
        at = begin + tensor.offset * size
        return StoredTensor(name, tensor.dtype, tensor.shape, file, at, 0, None if plain else tensor.strides)

    def number(self, tensor: TorchTensor, name: str) -> float | None:
        """The one element of a tensor; None for several, or a dtype that counts nothing. Raises as ``place`` does."""
        stored = self.place(tensor, name, 0)
        if prod(stored.shape) != 1 or stored.dtype not in _COUNTING:
            return None
        with opened(self.info.place) as file:
            (value,) = struct.unpack(_COUNTING[stored.dtype], file.pread(stored.nbytes, stored.offset))
        return float(value)


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
        return _read(_ZipSource(file, begin, file.info.size if end is None else end))[0]


def member_sums(path: Place) -> Iterator[tuple[str, int, int]]:
    """(name, the CRC-32 that the zip says, that of the bytes) of each member of files of torch.save that has one.

    There may be several files, one behind the other. Reads all of it. There are none before torch 1.6. Raises what
    ``read_torch`` raises.
    """
    with opened(path) as file:
        end = file.info.size
        while end and file.pread(4, 0) == b"PK\x03\x04":
            begin = _begin(_ZipSource(file, 0, end))
            source = _ZipSource(file, begin, end)
            for name, m in _members(source)[0].items():
                if m.crc and not m.packed:
                    local = LOCAL.unpack(source.pread(begin + m.header, LOCAL.size))
                    at = begin + m.header + LOCAL.size + local[9] + local[10]
                    yield printable(name), m.crc, _crc(source, at, m.size)
            end = begin


def _begin(source: _ZipSource) -> int:
    """Offset of the last zip of several."""
    tail_at = max(source.begin, source.end - END.size - LOCATOR.size)
    tail = source.pread(tail_at, source.end - tail_at)
    at = source.end - END.size
    *_, size, start, _ = END.unpack(tail[-END.size :])
    if tail[:4] == b"PK\x06\x07":
        at -= LOCATOR.size + END64.size
        size, start = END64.unpack(source.pread(max(source.begin, at), END64.size))[8:]
    begin = at - size - start
    if not source.begin <= begin < source.end:
        source.corrupt("the zip's directory is not where the zip says")
    return int(begin)


class TorchSlices:
    """Many files of torch.save that lie one behind the other in larger ones, each read with one access where it can be.

    What a slice holds is in its head, all that lies before its one storage. So slices of one length with the same head
    hold the same value, but for the bytes of its tensor and their checksum.
    """

    def __init__(self) -> None:
        self._heads: dict[int, dict[_ZipHead, None]] = {}
        """Heads by their length, the longest first."""
        self._known: dict[tuple[int, bytes], TorchFile] = {}

    def read(self, file: OpenFile, begin: int, end: int) -> TorchFile:
        """The file of torch.save at bytes ``begin`` to ``end``. Raises what ``read_torch`` raises."""
        source = _ZipSource(file, begin, end)
        if heads := self._heads.get(end - begin):
            data = source.pread(begin, next(iter(heads)).size)
            for head in heads:
                if known := self._known.get((end - begin, head.masked(data))):
                    places = {key: (at + begin, n) for key, (at, n) in known.storages.items()}
                    return TorchFile(file.info, known.value, places)
        found, own = _read(source)
        if own is not None and len(self._known) < MAX_HEADS:
            heads = {**self._heads.get(end - begin, {}), own: None}
            self._heads[end - begin] = dict.fromkeys(sorted(heads, reverse=True))
            places = {key: (at - begin, n) for key, (at, n) in found.storages.items()}
            known = TorchFile(file.info, found.value, places)
            self._known[end - begin, own.masked(source.pread(begin, own.size))] = known
        return found


class _ZipHead(NamedTuple):
    """The part of a file that says all but what its one tensor holds."""

    size: int
    crc: int
    """Offset of the tensor's checksum, in the storage's local header; -1 without a tensor."""

    def masked(self, data: bytes) -> bytes:
        """The head without that checksum."""
        return data[: self.size] if self.crc < 0 else data[: self.crc] + data[self.crc + 4 : self.size]


def _read(source: _ZipSource) -> tuple[TorchFile, _ZipHead | None]:
    legacy = source.pread(source.begin, min(4, source.end - source.begin)) != b"PK\x03\x04"
    return (_read_legacy(source), None) if legacy else _read_zip(source)


class _ZipSource(NamedTuple):
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


class _ZipMember(NamedTuple):
    header: int
    size: int
    crc: int
    """CRC-32; 0 where the writer did not take it."""
    packed: bool
    """Compressed or encrypted."""


def _read_zip(source: _ZipSource) -> tuple[TorchFile, _ZipHead | None]:
    """The content of the zip, and its head where that lies before all storages."""
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
        local = LOCAL.unpack(source.pread(source.begin + m.header, LOCAL.size))
        at = source.begin + m.header + LOCAL.size + local[9] + local[10]
        called = source.pread(source.begin + m.header + LOCAL.size, local[9])
        if local[0] != b"PK\x03\x04" or called != name.encode("utf-8", "surrogateescape"):
            source.corrupt(f"the zip's directory and the member `{printable(name)}` contradict each other")
        if at + m.size > limit:
            source.corrupt(f"the member `{printable(name)}` reaches beyond the data of the zip")
        return at, m.size

    told = 0
    """End of everything that is not a storage."""
    if top + "byteorder" in members:
        at, n = place(top + "byteorder")
        told = at + n
        order = source.pread(at, min(n, 16))
        if order != b"little":
            source.unsupported(
                f"the tensors are {printable(order.decode('latin-1'))}-endian", "save them on x86 or ARM"
            )
    at, n = place(pickles[0])
    if (said := members[pickles[0]].crc) and (crc := _crc(source, at, n)) != said:
        source.corrupt(f"`{printable(pickles[0])}` is damaged: its CRC-32 is {crc:08x}, the zip says {said:08x}")
    source.begins_pickle(at)
    told = max(told, at + n)
    storages: dict[str, Storage] = {}
    value, _ = interpret(source.file, vocabulary(storages), begin=at, end=at + n)
    expect(source.file, [source.begin + members[m].header for k in storages if (m := f"{top}data/{k}") in members])
    places = {key: place(f"{top}data/{key}") for key in storages if f"{top}data/{key}" in members}
    source.checked(storages, places)
    head = None
    if not storages:
        head = _ZipHead(told - source.begin, -1)
    elif len(storages) == 1:
        (key,) = storages
        if places[key][0] >= told:
            head = _ZipHead(places[key][0] - source.begin, members[f"{top}data/{key}"].header + _CRC_AT)
    return TorchFile(source.info, value, places), head


def _crc(source: _ZipSource, at: int, n: int) -> int:
    crc = 0
    for i in range(at, at + n, _STEP):
        crc = crc32(source.pread(i, min(_STEP, at + n - i)), crc)
    return crc


def _members(source: _ZipSource) -> tuple[dict[str, _ZipMember], int]:
    """The members of a zip by name, and the byte where their data ends."""
    tail_at = max(source.begin, source.end - END.size - 0xFFFF)
    tail = source.pread(tail_at, source.end - tail_at)
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or at + END.size > len(tail):
        raise IncompleteError("the zip is cut off: its directory is missing", where=str(source.info.place), hint=_AGAIN)
    *_, count, size, start, _ = END.unpack_from(tail, at)
    if at >= LOCATOR.size and tail[at - LOCATOR.size :][:4] == b"PK\x06\x07":
        _, _, place, _ = LOCATOR.unpack_from(tail, at - LOCATOR.size)
        end = END64.unpack(source.pread(source.begin + place, END64.size))
        if end[0] != b"PK\x06\x06":
            source.corrupt("the zip64 directory is not where the zip says")
        count, size, start = end[7:]
    if size > MAX_DIRECTORY or count > MAX_MEMBERS:
        source.unsupported(f"the zip has {count:,} members", "no known checkpoint has so many")
    data = source.pread(source.begin + start, size)
    found: dict[str, _ZipMember] = {}
    at = 0
    for _ in range(count):
        if at + CENTRAL.size > size or data[at : at + 4] != b"PK\x01\x02":
            source.corrupt("the zip's directory is damaged")
        fields = CENTRAL.unpack_from(data, at)
        flags, method, (packed, full, n, extra, comment), header = fields[3], fields[4], fields[8:13], fields[16]
        at += CENTRAL.size
        name = data[at : at + n].decode("utf-8", "surrogateescape")
        full, packed, header = _zip64(data[at + n : at + n + extra], full, packed, header)
        at += n + extra + comment
        if name in found:
            raise ConflictError(
                f"the zip has two members called `{printable(name)}`",
                where=str(source.info.place),
                hint="write the file again: programs differ in which one they read",
            )
        found[name] = _ZipMember(header, full, fields[7], method != 0 or flags & 1 != 0 or packed != full)
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
        if number == FULL and len(large) >= 8:
            yield int.from_bytes(large[:8], "little")
            large = large[8:]
        else:
            yield number


# -- before torch 1.6


def _read_legacy(source: _ZipSource) -> TorchFile:
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
            "this pickle was not written by torch.save", "give the file of weights; nothing in it was run"
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
