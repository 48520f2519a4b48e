"""Small programs and parameter files, written here byte by byte as paddle 3.3.1 writes them."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ELEMENTS = {"F32": ("t_f32", 5, 4), "F64": ("t_f64", 6, 8), "I64": ("t_i64", 3, 8), "BF16": ("t_bf16", 22, 2)}
ELEMENTS |= {"F8_E4M3": ("t_f8e4m3fn", 32, 1), "F8_E5M2": ("t_f8e5m2", 33, 1), "C128": ("t_c128", 24, 16)}
ELEMENTS |= {"F16": ("t_f16", 4, 2), "I8": ("t_i8", 21, 1), "U8": ("t_ui8", 20, 1), "BOOL": ("t_bool", 0, 1)}
ELEMENTS |= {"I16": ("t_i16", 1, 2), "I32": ("t_i32", 2, 4), "C64": ("t_c64", 23, 8)}

Parameter = tuple[str, str, list[int]]
"""Name, dtype, shape."""


def dense(dtype: str, dims: Sequence[int]) -> dict[str, Any]:
    return {"#": "0.t_dtensor", "D": [{"#": f"0.{ELEMENTS[dtype][0]}"}, list(dims), "NCHW", [], 0]}


def parameter(value: int, name: str, dtype: str, dims: Sequence[int]) -> dict[str, Any]:
    return {
        "#": "p",
        "A": [0, 1, 1, name],
        "DA": [],
        "O": {"%": value, "TT": dense(dtype, dims)},
        "OA": [1, 0, 1],
        "QA": [],
    }


def attribute(name: str, kind: str, value: Any) -> dict[str, Any]:
    return {"N": name, "AT": {"#": kind, "D": value}}


def operator(name: str, takes: Sequence[int], gives: Sequence[int], *attributes: dict[str, Any]) -> dict[str, Any]:
    return {
        "#": name,
        "A": list(attributes),
        "I": [{"%": i} for i in takes],
        "O": [{"%": i, "TT": dense("F32", [-1, 4])} for i in gives],
        "OA": [attribute("stop_gradient", "0.a_array", [{"#": "0.a_bool", "D": False}]) for _ in gives],
    }


def block(ops: Sequence[dict[str, Any]], arguments: Sequence[int] = ()) -> dict[str, Any]:
    args = [{"#": i, "TT": dense("F32", [-1, 4])} for i in arguments]
    return {"#": "block_0", "args": args, "ops": list(ops)}


def region(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"#": "region_0", "blocks": list(blocks)}


def program(ops: Sequence[dict[str, Any]]) -> dict[str, Any]:
    base = {"magic": "pir", "trainable": True, "version": 4}
    return {"base_code": base, "program": {"regions": [region(block(ops))]}}


PARAMETERS: list[Parameter] = [("linear_0.b_0", "F32", [4]), ("linear_0.w_0", "F32", [4, 4]), ("steps", "I64", [3])]


def usual(parameters: Sequence[Parameter] = PARAMETERS) -> dict[str, Any]:
    """x -> leaky_relu(x @ w) -> fetch, with an `if` of two blocks on the way."""
    n = len(parameters)
    ops = [parameter(i + 1, *p) for i, p in reversed(list(enumerate(parameters)))]
    then = block([operator("1.relu", [n + 2], [n + 4]), operator("2.yield", [n + 4], [])])
    other = block([operator("1.abs", [n + 2], [n + 5]), operator("2.yield", [n + 5], [])])
    empty = operator("1.is_empty", [n + 2], [n + 3])
    empty["O"][0]["TT"] = dense("BOOL", [])
    branch = operator("1.if", [n + 3], [n + 6])
    branch["regions"] = [region(then), region(other)]
    ops += [
        operator(
            "1.data",
            [],
            [n + 1],
            attribute("name", "0.a_str", "x"),
            attribute("shape", "1.a_intarray", [-1, 4]),
            attribute("dtype", "1.a_dtype", "float32"),
            attribute("place", "1.a_place", [0, 0, ""]),
        ),
        operator("1.leaky_relu", [n + 1], [n + 2], attribute("negative_slope", "0.a_f64", 0.25)),
        empty,
        branch,
        operator("1.fetch", [n + 6], [n + 7], attribute("name", "0.a_str", "out"), attribute("col", "0.a_i32", 0)),
    ]
    return program(ops)


def ops_of(data: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = data["program"]["regions"][0]["blocks"][0]["ops"]
    return found


def find(data: dict[str, Any], name: str) -> dict[str, Any]:
    """The first operator of that name in the outermost block."""
    return next(op for op in ops_of(data) if op["#"] == name)


def dumped(data: Any) -> bytes:
    """As Paddle writes it: names sorted, nothing between."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def varint(n: int) -> bytes:
    n &= (1 << 64) - 1
    out = bytearray()
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    return bytes([*out, n])


def record(
    dtype: str | int,
    dims: Sequence[int],
    data: bytes,
    *,
    version: int = 0,
    levels: Sequence[bytes] = (),
    tensor_version: int = 0,
    desc: bytes | None = None,
    length: int | None = None,
) -> bytes:
    """One tensor of a parameter file."""
    number = dtype if isinstance(dtype, int) else ELEMENTS[dtype][1]
    if desc is None:
        desc = b"\x08" + varint(number) + b"".join(b"\x10" + varint(d) for d in dims)
    head = struct.pack("<IQ", version, len(levels)) + b"".join(struct.pack("<Q", len(x)) + x for x in levels)
    return head + struct.pack("<Ii", tensor_version, len(desc) if length is None else length) + desc + data


def data_of(p: Parameter, seed: int = 0) -> bytes:
    """Bytes for a parameter, different for each."""
    count = ELEMENTS[p[1]][2]
    for d in p[2]:
        count *= d
    data = bytes([(seed * 37 + i * 11 + len(p[0])) % 256 for i in range(count)])
    # Numbers that Paddle can compute with, and no byte of them is zero.
    return struct.pack(f"<{count // 4}f", *((n - 127.5) / 97 for n in data[::4])) if p[1] == "F32" else data


def records(parameters: Sequence[Parameter] = PARAMETERS) -> list[bytes]:
    """By name, as they lie in the file."""
    return [record(p[1], p[2], data_of(p, i)) for i, p in enumerate(sorted(parameters))]


def write(
    directory: Path, data: Any = None, params: bytes | None = b"".join(records()), *, name: str = "model"
) -> Path:
    """A program and its parameter file; ``data`` may be bytes, ``params`` None for no file."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.json"
    path.write_bytes(data if isinstance(data, bytes) else dumped(usual() if data is None else data))
    if params is not None:
        (directory / f"{name}.pdiparams").write_bytes(params)
    return path
