"""GGUF files written with struct and numpy, from the specification."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.helpers.tensorfile import Array, Raw, unsigned

TYPES = {"F32": 0, "F16": 1, "BF16": 30}
Q8_0 = 8


class Blocks(NamedTuple):
    """Q8_0."""

    scales: Array
    """float16, [blocks]."""
    codes: Array
    """int8, the tensor's shape."""


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value_of(value: Any) -> bytes:
    """A type and a value: u32, float32, text, bool, or an array of one of these."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    parts = [value_of(v) for v in value]
    return struct.pack("<I4sQ", 9, parts[0][:4], len(parts)) + b"".join(p[4:] for p in parts)


def encode(
    keys: Mapping[str, Any], tensors: Mapping[str, Raw | Blocks], *, version: int = 3, alignment: int = 32,
    changed: Mapping[str, Mapping[str, int]] | None = None,
) -> bytes:  # fmt: skip
    """The bytes of a file; ``changed`` are fields of tensors (``type``, ``offset``) that say something else."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys))
    head += b"".join(text(k) + value_of(v) for k, v in keys.items())
    body = b""
    for name, t in tensors.items():
        body += bytes(-len(body) % alignment)
        kind, shape, data = described(t)
        said = {"type": kind, "offset": len(body), **(changed or {}).get(name, {})}
        head += text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head += struct.pack("<IQ", said["type"], said["offset"])
        body += data
    return head + bytes(-len(head) % alignment) + body


def described(tensor: Raw | Blocks) -> tuple[int, Sequence[int], bytes]:
    """(type, shape, data)."""
    if isinstance(tensor, Raw):
        return TYPES[tensor.dtype], tensor.bits.shape, np.ascontiguousarray(tensor.bits).tobytes()
    scales, codes = tensor
    blocks = np.empty(scales.size, [("scale", "<f2"), ("codes", "i1", 32)])
    blocks["scale"], blocks["codes"] = scales, codes.reshape(-1, 32)
    return Q8_0, codes.shape, blocks.tobytes()


def values(tensor: Blocks) -> Raw:
    """What the codes stand for, as F32."""
    scales, codes = tensor
    with np.errstate(invalid="ignore"):  # a scale may be infinite, and a code 0
        floats = np.repeat(scales.astype(np.float32), 32) * codes.reshape(-1).astype(np.float32)
    return Raw("F32", floats.reshape(codes.shape).view(np.uint32))


def decode(data: bytes) -> dict[str, Raw]:
    """The tensors of a file, slowly; Q8_0 as F32. Raises (anything) for what is none."""
    at = 4

    def take(code: str) -> Any:
        nonlocal at
        value = struct.unpack_from("<" + code, data, at)[0]
        at += struct.calcsize("<" + code)
        return value

    def word() -> str:
        nonlocal at
        n = take("Q")
        raw, at = data[at : at + n], at + n
        if len(raw) != n:
            raise ValueError
        return raw.decode()

    def value(kind: int) -> Any:
        if kind == 8:
            return word()
        if kind == 9:
            inner, n = take("I"), take("Q")
            return [value(inner) for _ in range(n)]
        return take({0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}[kind])

    if data[:4] != b"GGUF" or take("I") not in (2, 3):
        raise ValueError
    tensors, count = take("Q"), take("Q")
    said = {}
    for _ in range(count):
        key = word()
        said[key] = value(take("I"))
    infos = [(word(), [take("Q") for _ in range(take("I"))][::-1], take("I"), take("Q")) for _ in range(tensors)]
    base = -(-at // said.get("general.alignment", 32)) * said.get("general.alignment", 32)
    dtypes = {kind: dtype for dtype, kind in TYPES.items()}
    out = {}
    for name, shape, kind, offset in infos:
        size = int(np.prod(shape, dtype=object))
        if kind == Q8_0:
            raw = np.frombuffer(data, [("scale", "<f2"), ("codes", "i1", 32)], size // 32, base + offset)
            out[name] = values(Blocks(raw["scale"], raw["codes"].reshape(shape)))
        else:
            bits = np.frombuffer(data, unsigned(dtypes[kind]), size, base + offset)
            out[name] = Raw(dtypes[kind], bits.reshape(shape))
    return out


def write(path: Path, keys: Mapping[str, Any], tensors: Mapping[str, Raw | Blocks], **more: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode(keys, tensors, **more))
    return path
