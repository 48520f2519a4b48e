"""Elements as bit patterns, safetensors files, and casts: with numpy and the standard library alone.

An element is an unsigned integer as wide as its dtype, so that nothing is rounded by looking at it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

WIDTH = {"U8": 1, "I8": 1, "F8_E4M3": 1, "F16": 2, "BF16": 2, "F32": 4, "I32": 4, "F64": 8, "I64": 8}
FLOATS = ("F64", "F32", "BF16", "F16")


class Raw(NamedTuple):
    """One tensor."""

    dtype: str
    bits: Array


class Wrong(Exception):  # noqa: N818  # it is no error of the walk, but what the walk is for
    """Something is not as it must be; the message is the report."""


def made(ident: int, dtype: str, shape: tuple[int, ...]) -> Raw:
    """A tensor whose elements say where they belong: by number from 32 bits on, else by a hash.

    Floats are finite, of both signs, between 2**-15 and 2, so that every cast between them rounds and none overflows.
    """
    place = np.arange(prod(shape), dtype=np.uint64)
    tag = np.uint64(ident) << np.uint64(16) | place
    mixed = (tag + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ mixed >> np.uint64(29)) * np.uint64(0xBF58476D1CE4E5B9) >> np.uint64(24)
    width = 8 * WIDTH[dtype]
    if dtype in ("F32", "F64"):
        # Sign, four bits of exponent and the mantissa are 28 bits: twelve say which tensor, sixteen which element.
        sign, exponent, mantissa = tag >> np.uint64(27) & np.uint64(1), tag & np.uint64(15), tag >> np.uint64(4)
        bits = (sign << np.uint64(31)) | ((exponent | np.uint64(112)) << np.uint64(23)) | mantissa & np.uint64(0x7FFFFF)
        if dtype == "F64":
            low = bits.astype("<u4").view("<f4").astype("<f8").view("<u8")
            bits = low | mixed & np.uint64(0x1FFFFFFF)
    elif dtype == "BF16":
        bits = mixed & np.uint64(0x87FF) | np.uint64(0x3800)
    elif dtype == "F16":
        bits = mixed & np.uint64(0xBFFF)
        bits = np.where(bits & np.uint64(0x7FFF) == 0, np.uint64(0x2011), bits)  # sums know no negative zero
    elif dtype == "F8_E4M3":
        bits = mixed & np.uint64(0xFF)
        bits = np.where(bits & np.uint64(0x7F) == 0x7F, np.uint64(0x31), bits)  # no NaN
    else:
        bits = mixed & np.uint64((1 << min(width, 32)) - 1)
    return Raw(dtype, bits.astype(f"<u{width // 8}").reshape(shape))


def cast(raw: Raw, dtype: str) -> Raw:
    """To another float, rounded once, half to even."""
    if raw.dtype not in FLOATS or raw.dtype == dtype:
        return raw
    if raw.dtype == "BF16":
        wide = (raw.bits.astype("<u4") << 16).view("<f4").astype("<f8")
    else:
        wide = raw.bits.view(f"<f{WIDTH[raw.dtype]}").astype("<f8")
    if dtype != "BF16":
        return Raw(dtype, wide.astype(f"<f{WIDTH[dtype]}").view(f"<u{WIDTH[dtype]}"))
    # 45 of F64's 52 bits of mantissa go; what is left is one of F32's numbers and has no bits below BF16's.
    bits = wide.view("<u8")
    bits = (bits + np.uint64((1 << 44) - 1) + (bits >> np.uint64(45) & np.uint64(1))) >> np.uint64(45) << np.uint64(45)
    return Raw("BF16", (bits.view("<f8").astype("<f4").view("<u4") >> 16).astype("<u2"))


def write(path: Path, tensors: Mapping[str, Raw]) -> None:
    """A safetensors file as Hugging Face's library writes it."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at, body = 0, b""
    for name, raw in tensors.items():
        data = raw.bits.tobytes()
        header[name] = {"dtype": raw.dtype, "shape": list(raw.bits.shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
        body += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def read(path: Path) -> dict[str, Raw]:
    """The tensors of a file. Raises Wrong where its header lies."""
    return read_with_metadata(path)[0]


def read_with_metadata(path: Path) -> tuple[dict[str, Raw], dict[str, str]]:
    """The tensors of a file, and its ``__metadata__``."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    metadata = header.pop("__metadata__", {})
    out, ends = {}, [0]
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        dtype, shape = entry["dtype"], entry["shape"]
        if stop - start != prod(shape) * WIDTH[dtype] or start not in ends:
            raise Wrong(f"{path.name}: `{name}` has impossible offsets")
        ends.append(stop)
        body = data[8 + size + start : 8 + size + stop]
        out[name] = Raw(dtype, np.frombuffer(body, f"<u{WIDTH[dtype]}").reshape(shape))
    if 8 + size + max(ends) != len(data):
        raise Wrong(f"{path.name}: {len(data) - 8 - size - max(ends)} bytes behind the last tensor")
    return out, metadata


def difference(found: Mapping[str, Raw], wanted: Mapping[str, Raw], where: str) -> None:
    """Raises Wrong unless names, dtypes, shapes and bits are the same."""
    missing, extra = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if missing or extra:
        raise Wrong(f"{where}: missing {len(missing)} {missing[:4]}, unexpected {len(extra)} {extra[:4]}")
    for name, want in wanted.items():
        have = found[name]
        if (have.dtype, have.bits.shape) != (want.dtype, want.bits.shape):
            raise Wrong(f"{where}: `{name}` is {have.dtype} {have.bits.shape}, must be {want.dtype} {want.bits.shape}")
        if not np.array_equal(have.bits, want.bits):
            different = np.argwhere(have.bits != want.bits)
            raise Wrong(
                f"{where}: `{name}` {want.dtype} {want.bits.shape} has other bits in {len(different)} elements,"
                f" the first at {different[0].tolist()}"
            )
