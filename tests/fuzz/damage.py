"""Damage to files, enumerated: for each structure, every way that it is cut, flipped, doubled, extended or exchanged.

An enumeration is deterministic, and its cases are made only when somebody asks for them, so that a sample costs what
the sample costs.
"""

from __future__ import annotations

import json
import pickletools
import struct
from collections.abc import Callable, Iterator, Sequence

import yaml

from tests.fuzz.damage_torch import archive, slices
from tests.fuzz.trees import Case, structures, texts

Span = tuple[int, int]


def _at(data: bytes, start: int, stop: int, new: bytes) -> Callable[[], bytes]:
    return lambda: data[:start] + new + data[stop:]


def cuts(data: bytes, spans: Sequence[Span]) -> Iterator[Case]:
    """The file ends early: at each byte of the spans, and in the middle of what lies between."""
    points = {n for a, b in spans for n in range(a, b)} | {len(data) // 2, len(data) - 1, len(data) - 7}
    for n in sorted(p for p in points if 0 <= p < len(data)):
        yield f"cut at {n}", _at(data, n, len(data), b"")


def flips(data: bytes, spans: Sequence[Span]) -> Iterator[Case]:
    """One byte of the spans is another."""
    for n in sorted({n for a, b in spans for n in range(a, min(b, len(data)))}):
        for name, value in (("^1", data[n] ^ 1), ("^128", data[n] ^ 128), ("0", 0), ("255", 255), ("+1", data[n] + 1)):
            if value % 256 != data[n]:
                yield f"byte {n} {name}", _at(data, n, n + 1, bytes([value % 256]))


def shifts(data: bytes, spans: Sequence[Span]) -> Iterator[Case]:
    """Bytes of the spans are missing, doubled, new or exchanged."""
    for n in sorted({n for a, b in spans for n in range(a, min(b, len(data)))}):
        yield f"byte {n} missing", _at(data, n, n + 1, b"")
        yield f"byte {n} doubled", _at(data, n, n, data[n : n + 1])
        yield f"byte {n} exchanged", _at(data, n, n + 2, data[n : n + 2][::-1])
        if n % 4 == 0:
            yield f"bytes {n}..+8 missing", _at(data, n, n + 8, b"")
            yield f"bytes {n}..+8 doubled", _at(data, n, n, data[n : n + 8])
            yield f"bytes {n}..+8 zero", _at(data, n, n + 8, bytes(8))
            yield f"bytes {n}..+8 ones", _at(data, n, n + 8, b"\xff" * 8)


def ends(data: bytes) -> Iterator[Case]:
    """The file goes on, or is another."""
    for name, damaged in (
        ("one byte more", data + b"\0"),
        ("eight bytes more", data + b"x" * 8),
        ("a page more", data + bytes(4096)),
        ("doubled", data + data),
        ("empty", b""),
        ("zeros", bytes(len(data))),
        ("shifted by one", b"\0" + data),
        ("backwards", data[::-1]),
        ("git-lfs pointer", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
    ):
        yield name, lambda damaged=damaged: damaged  # type: ignore[misc]


def raw(data: bytes, spans: Sequence[Span]) -> Iterator[Case]:
    """All that can be done to bytes without knowing what they are."""
    yield from ends(data)
    yield from cuts(data, spans)
    yield from flips(data, spans)
    yield from shifts(data, spans)


# -- safetensors: 8 bytes of length, JSON, tensors


def safetensors(data: bytes) -> Iterator[Case]:
    """The length, the header as JSON (with the length made right) and as bytes, and how the file ends."""
    (size,) = struct.unpack("<Q", data[:8])
    header, payload = data[8 : 8 + size], data[8 + size :]

    def joined(text: bytes, body: bytes = payload) -> bytes:
        return struct.pack("<Q", len(text)) + text + body

    for n in (0, 1, 2, 7, size - 1, size + 1, size + 8, size * 2, len(data), len(data) - 8, len(data) - 7):
        yield f"length {n}", _at(data, 0, 8, struct.pack("<Q", n))
    for n in (100_000_000, 100_000_001, 2**31, 2**32 + size, 2**63 - 1, 2**63, 2**64 - 1, 2**64 - 8):
        yield f"length {n}", _at(data, 0, 8, struct.pack("<Q", n))
    for name, text in (("spaces", header + b" " * 8), ("NULs", header + bytes(8)), ("tabs", b"\t" + header)):
        yield f"header and {name}", lambda text=text: joined(text)  # type: ignore[misc]
    for n in (1, 7, 8, len(payload) // 2, len(payload)):
        yield f"payload without its last {n}", _at(data, len(data) - n, len(data), b"")
    for name, make in (*structures(header), *texts(header)):
        yield f"header {name}", lambda make=make: joined(make())  # type: ignore[misc]
    yield from raw(data, [(0, 8 + size)])


# -- pickles


def _payloads(data: bytes) -> list[Span]:
    """Where the elements of arrays lie."""
    out = []
    for op, arg, at in pickletools.genops(data):
        if isinstance(arg, bytes) and len(arg) > 64 and at is not None:
            head = 1 + (4 if op.name == "BINBYTES" else 8 if op.name == "BINBYTES8" else 1)
            out.append((at + head, at + head + len(arg)))
        elif isinstance(arg, str) and len(arg) > 256 and at is not None:
            out.append((at + 5, at + 5 + len(arg.encode("utf-8", "surrogatepass"))))
    return out


def _between(data: bytes, holes: Sequence[Span]) -> list[Span]:
    """What is not in the holes."""
    out, at = [], 0
    for a, b in holes:
        out.append((at, a))
        at = b
    return [*out, (at, len(data))]


INTS = (0, 1, 2, 3, 127, 128, 255)


def pickle(data: bytes) -> Iterator[Case]:
    """Opcodes dropped, doubled, exchanged and replaced, their numbers changed; and bytes."""
    ops = [(op, arg, at) for op, arg, at in pickletools.genops(data) if at is not None]
    ends_at = [*(at for _, _, at in ops[1:]), len(data)]
    for i, ((op, arg, at), stop) in enumerate(zip(ops, ends_at, strict=True)):
        said = f"{op.name} at {at}"
        yield f"{said} dropped", _at(data, at, stop, b"")
        yield f"{said} doubled", _at(data, at, at, data[at:stop])
        if i + 1 < len(ops):
            after = ends_at[i + 1]
            yield f"{said} after the next", _at(data, at, after, data[stop:after] + data[at:stop])
        for new in (b"N", b"]", b"}", b")", b"K\x05", b"G" + bytes(8), b"\x88", b"(", b"0", b"2", b"."):
            yield f"{said} is {new!r}", _at(data, at, stop, new)
        if isinstance(arg, int) and stop - at in (2, 3, 5, 9):
            form = {2: "<B", 3: "<H", 5: "<I", 9: "<Q"}[stop - at]
            top = 256 ** (stop - at - 1)
            for n in {*INTS, arg + 1, arg - 1, arg * 2, top - 1, top // 2, top // 2 - 1}:
                if 0 <= n < top and n != arg:
                    yield f"{said} {n}", _at(data, at + 1, stop, struct.pack(form, n))
        if isinstance(arg, str) and len(arg) < 256:
            for text in ("", arg + "x", arg[:-1], arg.upper(), "f8", "O", "V1", "<", ">", "|", "C", "\0"):
                encoded = text.encode("utf-8", "surrogatepass")
                if op.name == "SHORT_BINUNICODE":
                    yield f"{said} {text!r}", _at(data, at + 1, stop, bytes([len(encoded)]) + encoded)
                elif op.name == "BINUNICODE":
                    yield f"{said} {text!r}", _at(data, at + 1, stop, struct.pack("<I", len(encoded)) + encoded)
    yield from raw(data, _between(data, _payloads(data)))


# -- protobuf: nested fields of (tag, varint | 8 bytes | length and bytes | 4 bytes)


def varint(n: int) -> bytes:
    """A number as protobuf writes it."""
    n %= 1 << 64
    out = bytearray()
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    out.append(n)
    return bytes(out)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def fields(data: bytes) -> list[tuple[int, int, int, int, int]] | None:
    """(number, wire type, start, start of the value, stop) of a message; None when the bytes are none."""
    out, at = [], 0
    try:
        while at < len(data):
            start = at
            tag, at = _varint(data, at)
            kind, number = tag & 7, tag >> 3
            value = at
            if kind == 0:
                _, at = _varint(data, at)
            elif kind == 2:
                n, value = _varint(data, at)
                at = value + n
            elif kind in (1, 5):
                at += 8 if kind == 1 else 4
            else:
                return None
            if number == 0 or at > len(data):
                return None
            out.append((number, kind, start, value, at))
    except IndexError:
        return None
    return out


def protobuf(data: bytes, depth: int = 7) -> Iterator[Case]:
    """Fields dropped, doubled, exchanged and renumbered, numbers changed, at every level; lengths around made right."""
    found = fields(data) or []
    for i, (number, kind, start, value, stop) in enumerate(found):
        said = f"field {number}#{i}"
        body = data[value:stop]
        yield f"{said} dropped", _at(data, start, stop, b"")
        yield f"{said} doubled", _at(data, start, start, data[start:stop])
        yield (
            f"{said} renumbered",
            _at(data, start, value if kind != 2 else start + 1, varint((number + 1) << 3 | kind)),
        )
        if i + 1 < len(found):
            after = found[i + 1][4]
            yield f"{said} after the next", _at(data, start, after, data[stop:after] + data[start:stop])
        if kind == 0:
            n = _varint(body, 0)[0]
            for new in {0, 1, 2, n + 1, n - 1, n * 2, 2**31, 2**32 - 1, 2**63, 2**64 - 1, -n} - {n}:
                yield f"{said} = {new}", _at(data, value, stop, varint(new))
        if kind == 2:
            tag = varint(number << 3 | 2)

            def wrapped(inner: bytes, tag: bytes = tag, start: int = start, stop: int = stop) -> bytes:
                return data[:start] + tag + varint(len(inner)) + inner + data[stop:]

            for name, other in (("empty", b""), ("cut", body[:-1]), ("extended", body + b"x"), ("not UTF-8", b"\xff")):
                yield f"{said} {name}", lambda other=other, wrapped=wrapped: wrapped(other)  # type: ignore[misc]
            for n in (len(body) + 1, max(0, len(body) - 1), 2**31, 2**63, 2**64 - 1):
                yield f"{said} says {n} bytes", _at(data, start + len(tag), value, varint(n))
            if depth and len(body) > 1 and fields(body):
                for name, make in protobuf(body, depth - 1):
                    yield f"{said}/{name}", lambda make=make, wrapped=wrapped: wrapped(make())  # type: ignore[misc]


def pdmodel(data: bytes) -> Iterator[Case]:
    """A program as protobuf, and as bytes."""
    yield from protobuf(data)
    yield from raw(data, [(0, len(data))])


# -- pdiparams: records of (version, levels, version, size of the description, description, elements)


def records(data: bytes) -> list[tuple[int, int, int]]:
    """(start, start of the elements, stop) of each record of a parameter file."""
    sizes = {0: 1, 1: 2, 2: 4, 3: 8, 4: 2, 5: 4, 6: 8, 20: 1, 21: 1, 22: 2, 23: 8, 24: 16, 32: 1, 33: 1}
    out, at = [], 0
    while at < len(data):
        start = at
        (size,) = struct.unpack_from("<i", data, at + 16)
        description = data[at + 20 : at + 20 + size]
        dtype, count = 0, 1
        for number, kind, _, value, stop in fields(description) or []:
            if number == 1:
                dtype = _varint(description, value)[0]
            elif kind == 0:
                count *= _varint(description, value)[0]
            else:
                inner = value
                while inner < stop:
                    n, inner = _varint(description, inner)
                    count *= n
        body = at + 20 + size
        at = body + count * sizes[dtype]
        out.append((start, body, at))
    return out


def pdiparams(data: bytes) -> Iterator[Case]:
    """Records dropped, doubled, exchanged; their fields and bytes."""
    found = records(data)
    for i, (start, body, stop) in enumerate(found):
        said = f"record {i}"
        yield f"{said} dropped", _at(data, start, stop, b"")
        yield f"{said} doubled", _at(data, start, start, data[start:stop])
        if i + 1 < len(found):
            after = found[i + 1][2]
            yield f"{said} after the next", _at(data, start, after, data[stop:after] + data[start:stop])
        for at, form in ((0, "<I"), (4, "<Q"), (12, "<I"), (16, "<i")):
            size = struct.calcsize(form)
            (n,) = struct.unpack_from(form, data, start + at)
            for new in (0, 1, n + 1, n + 8, n - 1, 2**31 - 1, -1):
                packed = (new % 256**size).to_bytes(size, "little")
                if new != n:
                    yield f"{said} byte {at} = {new}", _at(data, start + at, start + at + size, packed)
        description = data[start + 20 : body]

        def described(inner: bytes, start: int = start, body: int = body) -> bytes:
            return data[: start + 16] + struct.pack("<i", len(inner)) + inner + data[body:]

        for name, make in protobuf(description):
            yield f"{said} {name}", lambda make=make, described=described: described(make())  # type: ignore[misc]
    for start, body, _ in found[:3]:
        yield from flips(data, [(start, body)])
        yield from cuts(data, [(start, body + 1)])
        yield from shifts(data, [(start, body)])
    yield from ends(data)


# -- texts


def document(data: bytes) -> Iterator[Case]:
    """A JSON file: its tree, its text, its bytes."""
    yield from structures(data)
    yield from texts(data)
    edge = [(0, min(len(data), 200)), (max(0, len(data) - 100), len(data))]
    yield from cuts(data, edge)
    yield from flips(data, edge)
    yield from shifts(data, edge)


def lines(data: bytes) -> Iterator[Case]:
    """A text of lines (YAML, AOA): lines and characters dropped, doubled, exchanged, indented."""
    rows = data.splitlines(keepends=True)
    for i, row in enumerate(rows):
        for name, new in (
            ("dropped", b""),
            ("doubled", row + row),
            ("indented", b"  " + row),
            ("to the left", row.lstrip()),
            ("with a tab", b"\t" + row),
            ("after the next", (rows[i + 1] if i + 1 < len(rows) else b"") + row),
            ("a value of null", row.split(b":")[0] + b": null\n"),
            ("a list", row.split(b":")[0] + b": [1, 2]\n"),
            ("a map", row.split(b":")[0] + b": {a: 1}\n"),
            ("a number", row.split(b":")[0] + b": -1\n"),
            ("not a number", row.split(b":")[0] + b": .nan\n"),
            ("infinite", row.split(b":")[0] + b": .inf\n"),
            ("a date", row.split(b":")[0] + b": 2001-01-01\n"),
            ("a tag", row.split(b":")[0] + b": !!python/object:os.system {}\n"),
            ("an anchor", row.split(b":")[0] + b": &a [*a]\n"),
            ("a merge", b"<<: {a: 1}\n" + row),
            ("a key of another type", b"? [1]\n: 2\n"),
        ):
            skip = 2 if name == "after the next" and i + 1 < len(rows) else 1
            yield f"line {i} {name}", lambda i=i, new=new, skip=skip: b"".join([*rows[:i], new, *rows[i + skip :]])  # type: ignore[misc]
    yield from texts(data)
    span = [(0, min(len(data), 600))]
    yield from cuts(data, span)
    yield from flips(data, span)
    yield from shifts(data, span)


def yaml_tree(data: bytes) -> Iterator[Case]:
    """A YAML file as its tree: what is written is JSON, which is YAML too; and as lines."""
    tree = yaml.safe_load(data)
    yield from structures(json.dumps(tree))
    yield from lines(data)


def json_lines(data: bytes) -> Iterator[Case]:
    """One JSON document a line: a journal."""
    rows = data.splitlines(keepends=True)
    for i in sorted({0, 1, len(rows) - 1} & set(range(len(rows)))):
        for name, make in structures(rows[i]):
            whole = lambda i=i, make=make: b"".join([*rows[:i], make() + b"\n", *rows[i + 1 :]])  # noqa: E731
            yield f"line {i} {name}", whole
    for i in range(min(len(rows), 4)):
        yield f"line {i} dropped", lambda i=i: b"".join([*rows[:i], *rows[i + 1 :]])  # type: ignore[misc]
        yield f"line {i} doubled", lambda i=i: b"".join([*rows[: i + 1], *rows[i:]])  # type: ignore[misc]
    yield from texts(data)
    span = [(0, min(len(data), 300))]
    yield from cuts(data, span)
    yield from flips(data, span)


def record(data: bytes) -> Iterator[Case]:
    """The JSON that software keeps as a text in the metadata of a safetensors file."""
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    key = next(k for k in ("ckpttool", "DCP_SHARDING_INFO") if k in header["__metadata__"])
    for name, make in (*structures(header["__metadata__"][key]), *texts(b"{}")):

        def whole(make: Callable[[], bytes] = make) -> bytes:
            metadata = header["__metadata__"] | {key: make().decode("utf-8", "surrogateescape")}
            text = json.dumps(header | {"__metadata__": metadata}).encode()
            return struct.pack("<Q", len(text)) + text + data[8 + size :]

        yield f"record {name}", whole


def in_parts(data: bytes) -> Iterator[Case]:
    """Bytes that are pickles and zips in part."""
    yield from raw(data, [(0, min(len(data), 1500)), (max(0, len(data) - 2500), len(data))])


def pointer(data: bytes) -> Iterator[Case]:
    """A file that names a directory."""
    names = (b"", b".", b"..", b"/", b"/etc", b"../../x", b"a/b", b"\0", b"~", b"x" * 300, b"x" * 5000, b"1" * 5000)
    for name in (*names, data.upper(), data + b"/", b"/" + data, data + b"\nx", b"./" + data, data[::-1], b"9" * 256):
        yield f"names {name[:20]!r}", lambda name=name: name  # type: ignore[misc]
    yield from texts(data)
    yield from raw(data, [(0, len(data))])


KINDS: dict[str, Callable[[bytes], Iterator[Case]]] = {
    "safetensors": safetensors,
    "record": record,
    "json": document,
    "pickle": pickle,
    "pdmodel": pdmodel,
    "pdiparams": pdiparams,
    "yaml": yaml_tree,
    "lines": lines,
    "journal": json_lines,
    "torch": archive(pickle, raw),
    "slices": slices(archive(pickle, raw)),
    "torch tail": in_parts,
    "legacy": in_parts,
    "pointer": pointer,
}
"""Kind of a file -> its damage."""
