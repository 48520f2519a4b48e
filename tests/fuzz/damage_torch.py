"""Damage to files of torch.save: to their zips, with checksums made right or not, and to the pickles inside."""

from __future__ import annotations

import io
import pickletools
import random
import struct
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from zlib import compressobj, crc32

from tests.fuzz.trees import Case

Members = Sequence[tuple[str, bytes]]
Damage = Callable[[bytes], Iterator[Case]]

_LOCAL, _CENTRAL, _END = struct.Struct("<4s5H3I2H"), struct.Struct("<4s6H3I5H2I"), struct.Struct("<4s4H2IH")


def members(data: bytes) -> list[tuple[str, bytes]]:
    """The members of a zip, whatever their checksums. Raises BadZipFile."""
    out = []
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for info in archive.infolist():
            with archive.open(info) as member:
                member._expected_crc = None  # type: ignore[attr-defined]
                out.append((info.filename, member.read()))
    return out


def zipped(found: Members, size: int = 0, *, deflated: str = "") -> bytes:
    """A zip of them with true checksums; ``size`` bytes long where that is enough, ``deflated`` is compressed."""
    out, central = bytearray(), bytearray()
    tail = sum(_CENTRAL.size + len(n.encode()) for n, _ in found) + _END.size
    heads = sum(_LOCAL.size + len(n.encode()) + len(d) for n, d in found)
    spare = min(max(0, size - tail - heads), 0xFFFF)
    for i, (name, data) in enumerate(found):
        method, stored = 0, data
        if name == deflated:
            packer = compressobj(9, wbits=-15)
            method, stored = 8, packer.compress(data) + packer.flush()
        extra = bytes(spare if i == len(found) - 1 else 0)
        common = (0, method, 0, 0, crc32(data), len(stored), len(data), len(name.encode()))
        at = len(out)
        out += _LOCAL.pack(b"PK\x03\x04", 20, *common, len(extra)) + name.encode() + extra + stored
        central += _CENTRAL.pack(b"PK\x01\x02", 20, 20, *common, 0, 0, 0, 0, 0, at) + name.encode()
    end = _END.pack(b"PK\x05\x06", 0, 0, len(found), len(found), len(central), len(out), 0)
    return bytes(out + central + end)


def _pickle_of(found: Members) -> int:
    return next(i for i, (n, _) in enumerate(found) if n.endswith("data.pkl"))


def with_pickle(data: bytes, new: bytes) -> bytes:
    """The file with another pickle, and the true checksum of that."""
    found = members(data)
    at = _pickle_of(found)
    return zipped([*found[:at], (found[at][0], new), *found[at + 1 :]])


def pickle_of(data: bytes) -> bytes:
    """The pickle in a file."""
    found = members(data)
    return found[_pickle_of(found)][1]


def archive(inner: Damage, raw: Callable[[bytes, Sequence[tuple[int, int]]], Iterator[Case]]) -> Damage:
    """The damage to a file of torch.save: ``inner`` is done to its pickle, ``raw`` to bytes of the zip."""

    def every(data: bytes) -> Iterator[Case]:
        found = members(data)
        at = _pickle_of(found)
        for name, make in inner(found[at][1]):
            yield f"pickle {name}", lambda make=make: zipped([*found[:at], (found[at][0], make()), *found[at + 1 :]])  # type: ignore[misc]
        yield from _of_members(found)
        yield from raw(data, _zip_spans(data))

    return every


def _of_members(found: Members) -> Iterator[Case]:
    for i, (name, body) in enumerate(found):
        after = found[(i + 1) % len(found)]
        for what, new in (
            ("dropped", []),
            ("doubled", [found[i], found[i]]),
            ("twice, other bytes", [found[i], (name, body[::-1])]),
            ("renamed", [(name + "x", body)]),
            ("elsewhere", [("../../" + name, body)]),
            ("empty", [(name, b"")]),
            ("cut", [(name, body[:-1])]),
            ("longer", [(name, body + b"x")]),
            ("that of the next", [(name, after[1])]),
            ("a small file", [(name, body), ("../../../CANARY", b"x")]),
        ):
            yield f"member {name} {what}", lambda i=i, new=new: zipped([*found[:i], *new, *found[i + 1 :]])  # type: ignore[misc]
        yield f"member {name} deflated", lambda name=name: zipped(found, deflated=name)  # type: ignore[misc]


def _zip_spans(data: bytes) -> list[tuple[int, int]]:
    """Local headers, the directory and its end."""
    at = data.rfind(b"PK\x05\x06")
    *_, size, start, _ = _END.unpack_from(data, at)
    out: list[tuple[int, int]] = []
    place = start
    while data[place : place + 4] == b"PK\x01\x02" and len(out) < 6:
        fields = _CENTRAL.unpack_from(data, place)
        out += [(place, place + _CENTRAL.size), (fields[16], fields[16] + _LOCAL.size)]
        place += _CENTRAL.size + sum(fields[10:13])
    return sorted([*out, (start + size, len(data))])


def slices(every: Damage) -> Damage:
    """The damage to files of torch.save one behind the other: to some of them, with its length as it was."""

    def damage(data: bytes) -> Iterator[Case]:
        ends, at = [0], data.find(b"PK\x05\x06")
        while at >= 0:
            ends.append(at + _END.size)
            at = data.find(b"PK\x05\x06", at + 4)
        for i in sorted({0, 1, (len(ends) - 1) // 2, len(ends) - 2} & set(range(len(ends) - 1))):
            a, b = ends[i], ends[i + 1]
            for name, make in every(data[a:b]):

                def whole(make: Callable[[], bytes] = make, a: int = a, b: int = b) -> bytes:
                    new = make()
                    if new[:2] == b"PK" and len(new) < b - a:
                        with suppress(Exception):  # it is to be broken
                            new = zipped(members(new), b - a)
                    return data[:a] + new[: b - a].ljust(b - a, b"\0") + data[b:]

                yield f"slice {i} {name}", whole

    return damage


# -- by chance

_OPS = b"NK]})(0.2\x88\x89\x85\x86\x87RtbsuaeQ\x94h\x8f\x90\x81"


def pickle_change(data: bytes, rng: random.Random) -> bytes:
    """A pickle with one of its opcodes dropped, doubled, moved, replaced, or with another number or text."""
    try:
        ops = [(op, arg, at) for op, arg, at in pickletools.genops(data) if at is not None]
    except Exception as e:
        raise ValueError from e
    i = rng.randrange(len(ops))
    op, arg, at = ops[i]
    stop = ops[i + 1][2] if i + 1 < len(ops) else len(data)
    if stop is None:
        raise ValueError
    body, kind = data[at:stop], rng.randrange(6)
    if isinstance(arg, int) and stop - at in (2, 3, 5) and kind < 4:
        form = {2: "<B", 3: "<H", 5: "<I"}[stop - at]
        n = rng.choice([0, 1, 2, 3, 7, arg + 1, max(0, arg - 1), arg * 2, rng.randrange(256)])
        new = body[:1] + struct.pack(form, n % 256 ** (stop - at - 1))
    elif isinstance(arg, int) and kind == 4 and op.name.startswith("BININT"):
        new = b"\x8a\x08" + struct.pack("<q", rng.choice([2**31, 2**40, 2**62, -1, 10**12]))
    elif kind == 0:
        new = b""
    elif kind == 1:
        new = body + body
    elif kind == 2:
        other = rng.randrange(len(ops) - 1)
        a, b = ops[other][2], ops[other + 1][2]
        new = data[a:b]
    elif kind == 3:
        new = bytes([rng.choice(_OPS)])
    else:
        j = rng.randrange(len(ops))
        k = ops[j][2] or 0
        return data[:k] + body + data[k:]
    return data[:at] + new + data[stop:]
