"""The safetensors container: 8 bytes of header length, a JSON header, tensor data without holes.

Parsed here and not with the safetensors library, because the library gives no byte offsets and cannot write a file
piece by piece; it judges what was written (``safetensors_library.py``). Source: the format's README, and safetensors
0.8's behaviour where that says nothing (zero-element tensors and headers out of offset order are valid; holes, overlaps
and trailing bytes are not).
"""

from __future__ import annotations

import contextlib
import json
import struct
import sys
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from json.encoder import encode_basestring
from math import prod
from typing import Any, NamedTuple, overload

from ckpttool.core.activity import activity
from ckpttool.core.catalog import StoredTensor
from ckpttool.core.dtypes import DTYPES, ORDER, nbytes
from ckpttool.core.files import DataFile, Place
from ckpttool.core.words import count
from ckpttool.errors import CorruptError, IncompleteError, UnsupportedError
from ckpttool.storage.identify import identify
from ckpttool.storage.place import open_file

MAX_HEADER = 100_000_000
"""Bytes; the limit of the safetensors library."""
MAX_NAME = 16_384
"""Characters of a tensor's name; published ones have 200 at most."""
_LARGE = 1 << 16
"""Bytes of a header that is deflated until it is written."""
MAX_AXES = 64
"""The limit of numpy and torch. Without one, the size of a shape takes hours to work out."""


class HeaderError(CorruptError):
    """A file whose header cannot be used at all; ``id`` says why, in the words of ``inspect --check``."""

    def __init__(self, id_: str, what: str, *, where: str, hint: str | None = None) -> None:
        super().__init__(what, where=where, hint=hint)
        self.id = id_


class Header(NamedTuple):
    """One parsed file."""

    file: DataFile
    metadata: dict[str, str]
    tensors: list[StoredTensor]
    """Tensors in offset order; ``file`` is the index given to ``read_header``."""


class HeaderProblem(NamedTuple):
    """Something wrong with one file; ``inspect --check`` lists all, reading raises the first."""

    id: str
    text: str
    tensor: str = ""
    hint: str = ""


def read_raw(path: Place) -> tuple[DataFile, bytes]:
    """The file's identity and its header bytes. Raises CorruptError or IncompleteError."""
    try:
        with open_file(path) as f:
            info = f.info
            # One read is enough for nearly every header.
            first = f.pread(65536, 0)
            if len(first) < 8:
                raise HeaderError(
                    "header-length",
                    f"the file has {count(len(first), 'byte')}, a safetensors file has at least 8",
                    where=str(path),
                    hint="the download or save was cut off; fetch the file again",
                )
            (size,) = struct.unpack("<Q", first[:8])
            if size > MAX_HEADER or size > info.size - 8:
                # A header of 640 bytes begins as a pickle does, but no pickle goes on with a brace there.
                identified = None if first[8:9] == b"{" else identify(first)
                raise HeaderError(
                    "header-length",
                    f"this is {identified.what}"
                    if identified
                    else f"the header claims {size:,} bytes, the file has {info.size:,}",
                    where=f"{path} [bytes 0..8)",
                    hint=identified.hint if identified else "the file is cut off or is not safetensors; fetch it again",
                )
            raw = first[8 : 8 + size]
            while len(raw) < size:
                more = f.pread(size - len(raw), 8 + len(raw))
                if not more:
                    raise HeaderError("header-length", "the header is cut off", where=str(path))
                raw += more
            return info, raw
    except FileNotFoundError:
        raise IncompleteError("the file does not exist", where=str(path)) from None
    except IsADirectoryError:
        raise HeaderError("unreadable", "this is a directory, not a safetensors file", where=str(path)) from None
    except OSError as e:
        raise HeaderError("unreadable", f"the file cannot be read: {e.strerror}", where=str(path)) from None


class _TwiceError(ValueError):
    """A name that a JSON object has twice."""


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        for k, _ in pairs:
            if k in seen:
                raise _TwiceError(k)
            seen.add(k)
    return out


def parse(raw: bytes, path: Place) -> dict[str, Any]:
    """The header's JSON. Raises HeaderError."""
    where = str(path)
    try:
        text = raw.decode()
        data = json.loads(text)
        # Looking for names that occur twice takes a call for each tensor, and the text tells whether there can be any.
        if not isinstance(data, dict) or _colons(data) != text.count(":") or "\\u" in text:
            data = json.loads(text, object_pairs_hook=_no_duplicates)
            json.dumps(data, ensure_ascii=False).encode()  # half a surrogate pair, written as \ud800
    except UnicodeError:
        raise HeaderError("header-utf8", "the header is not UTF-8", where=where) from None
    except RecursionError:
        raise HeaderError("header-json", "the header is nested too deeply", where=where) from None
    except _TwiceError as e:
        raise HeaderError("duplicate-key", f"the name `{e}` occurs twice in the header", where=where) from None
    except ValueError as e:
        raise HeaderError(
            "header-json",
            f"the header is not valid JSON: {e}",
            where=where,
            hint="fetch or write the file again"
            if raw.strip(b"\0")
            else "the file begins with zeros: its space was reserved and never filled; fetch or write it again",
        ) from None
    if not isinstance(data, dict):
        raise HeaderError("header-json", "the header is not a JSON object", where=where)
    if data.get("__metadata__", data) is None:
        del data["__metadata__"]  # the library takes null for none
    return data


def _colons(data: dict[str, Any]) -> int:
    """How many colons the JSON text of a header has when no name occurs twice: one per pair, and those in strings.

    A name that occurs twice leaves a pair that ``data`` does not have, and so a higher count in the text.
    """
    count = 4 * len(data) + "".join(data).count(":")
    meta = data.get("__metadata__")
    if isinstance(meta, dict):
        texts = "".join([str(v) for v in meta.values()])
        count += len(meta) - 3 + "".join(meta).count(":") + texts.count(":")
    return count


def problems(data: Mapping[str, Any], payload: int) -> list[HeaderProblem]:
    """Everything wrong with a parsed header over ``payload`` bytes of tensor data."""
    out: list[HeaderProblem] = []
    spans: list[tuple[int, int, str]] = []
    meta = data.get("__metadata__", {})
    if not isinstance(meta, dict) or not all(isinstance(v, str) for v in meta.values()):
        out.append(HeaderProblem("metadata", "__metadata__ is not a map of strings"))
    lost = False  # the bytes of some tensor are not known, so bytes without a tensor say nothing
    for name, entry in data.items():
        if name == "__metadata__":
            continue
        if len(name) > MAX_NAME:
            out.append(
                HeaderProblem(
                    "entry", f"the name `{name[:60]}...` has {len(name):,} characters: {MAX_NAME} at most", name
                )
            )
            lost = True
            continue
        if not isinstance(entry, dict):
            out.append(HeaderProblem("entry", f"tensor `{name}` is not an object", name))
            lost = True
            continue
        dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
        span = None
        if (
            not isinstance(offsets, list)
            or len(offsets) != 2
            or not all(type(n) is int and 0 <= n < 2**63 for n in offsets)
        ):
            out.append(
                HeaderProblem("offsets", f"tensor `{name}` has no valid data_offsets: {str(offsets)[:80]}", name)
            )
        elif offsets[0] > offsets[1]:
            text = f"tensor `{name}` ends at {offsets[1]} before it starts at {offsets[0]}"
            out.append(HeaderProblem("offsets", text, name))
        else:
            span = (offsets[0], offsets[1])
            spans.append((*span, name))
        lost = lost or span is None
        if not isinstance(dtype, str) or dtype not in DTYPES:
            out.append(HeaderProblem("dtype", f"tensor `{name}` has the unknown dtype `{dtype}`", name))
        elif not isinstance(shape, list) or not all(type(n) is int and 0 <= n < 2**63 for n in shape):
            out.append(HeaderProblem("shape", f"tensor `{name}` has no valid shape: {str(shape)[:80]}", name))
        elif len(shape) > MAX_AXES:
            text = f"tensor `{name}` has {len(shape):,} axes, and no software has more than {MAX_AXES}"
            out.append(HeaderProblem("shape", text, name))
        elif span is not None:
            out += _span_problems(name, dtype, shape, span, payload)
    spans.sort()
    at, last = 0, ""
    for start, stop, name in spans:
        if start == stop:
            continue
        if start < at:
            out.append(
                HeaderProblem("overlap", f"tensors `{last}` and `{name}` overlap at byte {start:,} of the data", name)
            )
        elif start > at and not lost:
            out.append(
                HeaderProblem("hole", f"bytes {at:,}..{start:,} of the data before `{name}` belong to no tensor", name)
            )
        if stop > at:
            at, last = stop, name
    if at < payload and not lost and not any(p.id in ("hole", "overlap", "truncated") for p in out):
        out.append(HeaderProblem("trailing", f"{payload - at:,} bytes after the last tensor belong to no tensor"))
    return out


def _span_problems(name: str, dtype: str, shape: list[int], span: tuple[int, int], payload: int) -> list[HeaderProblem]:
    """Problems with the place of one tensor."""
    start, stop = span
    bits = prod(shape) * DTYPES[dtype].bits
    if bits != (stop - start) * 8:
        text = f"tensor `{name}` {dtype} {shape} needs {bits // 8:,} bytes, its data_offsets hold {stop - start:,}"
        return [HeaderProblem("size", text, name)]
    if stop > payload:
        text = f"tensor `{name}` ends at byte {stop:,} of the data, the file has {payload:,}"
        return [HeaderProblem("truncated", text, name)]
    return []


def read_header(path: Place, index: int = 0, rank: int = 0) -> Header:
    """Parse and check one file. Raises CorruptError or UnsupportedError for the first problem."""
    info, raw = read_raw(path)
    activity.done += 1
    data = parse(raw, path)
    start = 8 + len(raw)
    tensors = _fast(data, info.size - start, index, rank, start)
    if tensors is None:
        found = problems(data, info.size - start)
        first = found[0]
        more = f" (and {len(found) - 1} more problems; `ckpttool inspect --check` lists them)" if len(found) > 1 else ""
        if first.id == "dtype":
            raise UnsupportedError(first.text + more, where=str(path), hint="known dtypes: " + ", ".join(DTYPES))
        raise CorruptError(first.text + more, where=str(path), hint="fetch or write the file again")
    meta = data.get("__metadata__", {})
    return Header(info, meta, tensors)


def examine(path: Place, index: int = 0) -> tuple[Header | None, list[HeaderProblem]]:
    """Everything wrong with one file, and what can be used of it all the same: entries that are right by themselves."""
    try:
        info, raw = read_raw(path)
        data = parse(raw, path)
    except HeaderError as e:
        return None, [HeaderProblem(e.id, e.what, hint=e.hint or "")]
    start = 8 + len(raw)
    tensors = _fast(data, info.size - start, index, 0, start)
    found: list[HeaderProblem] = []
    if tensors is None:
        found = problems(data, info.size - start)
        wrong = {p.tensor for p in found if p.id not in ("hole", "overlap")}
        tensors = [
            StoredTensor(name, e["dtype"], tuple(e["shape"]), index, start + e["data_offsets"][0])
            for name, e in data.items()
            if name not in wrong and name != "__metadata__"
        ]
    meta = data.get("__metadata__")
    return Header(info, meta if isinstance(meta, dict) else {}, tensors), found


@lru_cache(maxsize=65536)
def _shared(shape: tuple[int, ...]) -> tuple[int, ...]:
    """One object for equal shapes: a checkpoint has a hundred shapes and a hundred thousand tensors."""
    return shape


def _fast(data: dict[str, Any], payload: int, index: int, rank: int, base: int) -> list[StoredTensor] | None:
    """Stored tensors in offset order, or None when anything is not as it must be."""
    out = []
    at, ordered = 0, True
    try:
        for name, entry in data.items():
            if name == "__metadata__":
                if not isinstance(entry, dict) or not all(isinstance(v, str) for v in entry.values()):
                    return None
                continue
            if len(name) > MAX_NAME:
                return None
            dtype = DTYPES[entry["dtype"]]
            shape = entry["shape"]
            if type(shape) is not list or len(shape) > MAX_AXES:
                return None
            start, stop = entry["data_offsets"]
            count = 1
            for n in shape:
                if type(n) is not int or n < 0:
                    return None
                count *= n
            if type(start) is not int or type(stop) is not int or not 0 <= start <= stop <= payload:
                return None
            if count * dtype.bits != (stop - start) * 8:
                return None
            if start == at:
                at = stop
            elif count:
                ordered = False
            known = sys.intern(name)  # ranks have the same names
            out.append((known, dtype.name, _shared(tuple(shape)), index, base + start, rank, None, "model", ""))
    except (KeyError, TypeError, ValueError):
        return None
    tensors = list(map(StoredTensor._make, out))
    if not ordered:
        tensors.sort(key=lambda t: t.offset)
        at = 0
        for t in tensors:
            size = prod(t.shape) * DTYPES[t.dtype].bits // 8
            if size and t.offset != base + at:
                return None
            at += size
    return tensors if at == payload else None


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor."""
    return nbytes(dtype, prod(shape))


def layout_file(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str] | None
) -> tuple[bytes, dict[str, int], int]:
    """Header bytes, the offset in the file of every tensor (in file order) and the file size.

    Order and padding are those of the safetensors library (dtype descending in its enum, then name; header padded with
    spaces to 8), so that a file written here is byte-identical to one that the library writes.
    """
    (literal,), offsets, size = lay_out(tensors, metadata)
    return literal[1], offsets, size


class CompressedHeader(Sequence[tuple[int, bytes]]):
    """One run of literal bytes at the beginning of a file, small while it waits: names repeat each other."""

    __slots__ = ("_deflate", "_first", "_parts")

    def __init__(self) -> None:
        self._first = b""
        self._parts: list[bytes] = []
        self._deflate = zlib.compressobj(1)

    def put(self, piece: bytes) -> None:
        """The next bytes behind the first ones."""
        if part := self._deflate.compress(piece):
            self._parts.append(part)

    def close(self, first: bytes) -> None:
        """No more will come; ``first`` are the first bytes of all."""
        self._first = first
        self._parts = [b"".join((*self._parts, self._deflate.flush()))]
        del self._deflate  # 256 KB

    def __len__(self) -> int:
        return 1

    @overload
    def __getitem__(self, at: int) -> tuple[int, bytes]: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[tuple[int, bytes]]: ...
    def __getitem__(self, at: int | slice) -> tuple[int, bytes] | Sequence[tuple[int, bytes]]:
        return ((0, self._first + zlib.decompress(self._parts[0])),)[at]


def _key(name: str) -> bytes:
    """The bytes of a tensor's name in a header."""
    with contextlib.suppress(UnicodeEncodeError):
        if name != "__metadata__":
            return name.encode()
    raise UnsupportedError(
        f"{name!a} is not a valid tensor name in a safetensors file",
        hint="--rename OLD=NEW renames it",
    )


def lay_out(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str] | None
) -> tuple[Sequence[tuple[int, bytes]], dict[str, int], int]:
    """The same, with the header as (0, its bytes), made when it is asked for, because that of a hundred thousand
    tensors is large. Raises UnsupportedError for a name that a header cannot have."""
    ordered = sorted(tensors, key=lambda t: (-ORDER[t[1]], _key(t[0])))
    header = CompressedHeader()
    header.put(b"{")
    length = 1
    comma = ""
    if metadata:
        text = json.dumps(dict(metadata), separators=(",", ":"), ensure_ascii=False)
        piece = b'"__metadata__":' + text.encode()
        del text
        length += len(piece)
        header.put(piece)
        del piece
        comma = ","
    kinds: dict[tuple[str, tuple[int, ...]], tuple[str, int]] = {}
    at = 0
    starts = array("q")
    # What is the same for all tensors of a shape is written once: a file may hold a hundred thousand.
    for name, dtype, shape in ordered:
        kind = kinds.get((dtype, shape))
        if kind is None:
            sizes = ",".join(map(str, shape))
            size = nbytes(dtype, prod(shape), where=name)
            kind = kinds[dtype, shape] = (f':{{"dtype":"{dtype}","shape":[{sizes}],"data_offsets":[', size)
        starts.append(at)
        begin, at = at, at + kind[1]
        piece = f"{comma}{encode_basestring(name)}{kind[0]}{begin},{at}]}}".encode()
        length += len(piece)
        header.put(piece)
        comma = ","
    pad = -(length + 1) % 8
    header.put(b"}" + b" " * pad)
    length += 1 + pad
    base = 8 + length
    header.close(struct.pack("<Q", length))
    offsets = {t[0]: base + start for t, start in zip(ordered, starts, strict=True)}
    return header if length > _LARGE else tuple(header), offsets, base + at
