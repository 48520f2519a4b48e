"""Safetensors files read and written with json, struct and numpy: what the tests hold against ckpttool's own reader.

Elements are bit patterns, arrays of unsigned integers as wide as the dtype, so that every dtype can be cut, joined and
compared with plain numpy and nothing is ever rounded.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


class Raw(NamedTuple):
    """One stored tensor: its dtype by name and the bits of its elements."""

    dtype: str
    bits: Array


Tensors = dict[str, Raw]


def unsigned(dtype: str) -> np.dtype[Any]:
    """The numpy type that holds the bits of one element."""
    return np.dtype(f"<u{BYTES[dtype]}")


def encode(
    tensors: Mapping[str, Raw], metadata: Mapping[str, str] | None = None, *, order: Iterable[str] | None = None
) -> bytes:
    """The bytes of a file; ``order`` is that of the data, the header keeps the order of ``tensors``."""
    at, offsets, body = 0, {}, b""
    for name in tensors if order is None else order:
        data = np.ascontiguousarray(tensors[name].bits).tobytes()
        offsets[name] = [at, at + len(data)]
        at += len(data)
        body += data
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata is not None else {}
    for name, raw in tensors.items():
        header[name] = {"dtype": raw.dtype, "shape": list(raw.bits.shape), "data_offsets": offsets[name]}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def write(path: Path, tensors: Mapping[str, Raw], metadata: Mapping[str, str] | None = None) -> Path:
    """Write one file, making its directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode(tensors, metadata))
    return path


def header(path: Path) -> dict[str, Any]:
    """The header of a file, ``__metadata__`` included."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    found: dict[str, Any] = json.loads(data[8 : 8 + size])
    return found


def read(path: Path) -> Tensors:
    """All tensors of one file."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    out: Tensors = {}
    for name, entry in json.loads(data[8 : 8 + size]).items():
        if name == "__metadata__":
            continue
        start, stop = (8 + size + n for n in entry["data_offsets"])
        dtype, shape = entry["dtype"], entry["shape"]
        assert stop - start == prod(shape) * BYTES[dtype], (path, name)
        out[name] = Raw(dtype, np.frombuffer(data[start:stop], unsigned(dtype)).reshape(shape))
    return out


def read_all(folder: Path, pattern: str = "*.safetensors") -> Tensors:
    """The tensors of all files of a directory; one that is in two files is an error."""
    out: Tensors = {}
    for path in sorted(folder.glob(pattern)):
        found = read(path)
        assert not out.keys() & found.keys(), (path, out.keys() & found.keys())
        out |= found
    return out


def save_hf(folder: Path, tensors: Mapping[str, Raw], config: Mapping[str, Any] | None = None) -> Path:
    """A checkpoint of one file with its config."""
    write(folder / "model.safetensors", tensors, {"format": "pt"})
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def assert_same(found: Mapping[str, Raw], wanted: Mapping[str, Raw]) -> None:
    """Equal names, dtypes, shapes and bits; the message names the first tensor and element that is not."""
    missing, extra = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    assert not missing + extra, f"missing {missing[:5]}, unexpected {extra[:5]}"
    for name, want in wanted.items():
        have = found[name]
        assert have.dtype == want.dtype, f"{name}: {have.dtype}, not {want.dtype}"
        assert have.bits.shape == want.bits.shape, f"{name}: {have.bits.shape}, not {want.bits.shape}"
        if not np.array_equal(have.bits, want.bits):
            at = tuple(int(i) for i in np.argwhere(have.bits != want.bits)[0])
            raise AssertionError(f"{name}{list(at)}: {have.bits[at]:#x}, not {want.bits[at]:#x}")


def origin(ident: int, dtype: str, shape: tuple[int, ...]) -> Raw:
    """A tensor whose every element says where it comes from: the number of its tensor and its place in it.

    From 32 bits on this is literal; narrower elements hold a hash of both, in which neighbours differ.
    """
    width = BYTES[dtype]
    place = np.arange(prod(shape), dtype=np.uint64)
    if width >= 4:
        shift = 20 if width == 4 else 40
        bits = place | np.uint64(ident << shift)
    else:
        bits = (place + np.uint64(ident * 7919)) * np.uint64(0x9E3779B97F4A7C15)
        bits >>= np.uint64(64 - 8 * width)
        if dtype == "BOOL":
            bits &= np.uint64(1)
    return Raw(dtype, bits.astype(unsigned(dtype)).reshape(shape))
