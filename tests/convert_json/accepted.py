"""Broken programs to give to Paddle: those of the tables in test_pir.py and test_params.py, and some that are not JSON
or are of before PIR. ``fixtures/paddle_programs/accepted.json`` has what paddle 3.3.1 says about each of them."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.convert_json import test_params, test_pir
from tests.convert_json.programs import attribute, dense, dumped, find, operator, ops_of, record, usual
from tests.convert_json.test_pdmodel import (
    BLOCK,
    ENDS,
    INT,
    SCOPES,
    STRING,
    TENSOR,
    VOCAB,
    arguments,
    attr,
    block,
    feed,
    fetch,
    message,
    number,
    var,
    varint,
    version,
)

FIXTURE = Path(__file__).parents[2] / "fixtures/paddle_programs/accepted.json"


class Case(NamedTuple):
    """One program, and what is wrong with it."""

    id: str
    """Empty where nothing is."""
    program: bytes
    params: bytes | None
    suffix: str = ".json"

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True)
        path = folder / f"model{self.suffix}"
        path.write_bytes(self.program)
        if self.params is not None:
            (folder / "model.pdiparams").write_bytes(self.params)
        return path


def measured() -> dict[str, Any]:
    """``usual``, where every parameter and every attribute makes a difference in what comes out."""
    data = usual()
    ops = ops_of(data)
    at = ops.index(find(data, "1.leaky_relu"))
    turned = (attribute("transpose_x", "0.a_bool", False), attribute("transpose_y", "0.a_bool", False))
    steps = operator("1.add", [3, 3], [22])
    steps["O"][0]["TT"] = dense("I64", [3])
    ops[at:at] = [operator("1.matmul", [4, 2], [20], *turned), operator("1.add", [20, 1], [21]), steps]
    find(data, "1.leaky_relu")["I"][0]["%"] = 21
    for column, value in ((1, 5), (2, 22)):
        fetched = operator("1.fetch", [value], [30 + column])
        fetched["A"] = [attribute("name", "0.a_str", f"out{column}"), attribute("col", "0.a_i32", column)]
        fetched["O"][0]["TT"] = copy.deepcopy(steps["O"][0]["TT"] if value == 22 else fetched["O"][0]["TT"])
        ops.append(fetched)
    return data


def _changed(change: Callable[[dict[str, Any]], object]) -> bytes:
    data = measured()
    change(data)
    return dumped(data)


TEXT = dumped(measured())
TEXTS: dict[str, tuple[str, bytes]] = {
    "empty": ("json", b""),
    "cut in half": ("json", TEXT[: len(TEXT) // 2]),
    "without the last byte": ("json", TEXT[:-1]),
    "a letter behind": ("json", TEXT + b"x"),
    "an object behind": ("json", TEXT + b"{}"),
    "a zero byte behind": ("json", TEXT + b"\0"),
    "a comma too many": ("json", TEXT[:-1] + b",}"),
    "a comment": ("json", b"{/* */" + TEXT[1:]),
    "UTF-16": ("json", TEXT.decode().encode("utf-16")),
    "not UTF-8": ("json", TEXT.replace(b"NCHW", b"NC\xff\xfe", 1)),
    "a bare NaN": ("json", TEXT.replace(b"0.25", b"NaN")),
    "a bare Infinity": ("json", TEXT.replace(b"0.25", b"Infinity")),
    "1e400": ("json", TEXT.replace(b"0.25", b"1e400")),
    "a line break in a text": ("json", TEXT.replace(b'"linear_0.w_0"', b'"linear\n"')),
    "a list": ("magic", b"[]"),
    "an empty object": ("magic", b"{}"),
    "program twice": ("structure", TEXT[:-1] + b',"program":{}}'),
}


# -- programs of before PIR

W, B = struct.pack("<16f", *((n * 7 % 16 - 7.5) / 3 for n in range(16))), struct.pack("<4f", 0.25, -1.5, 3, 0.125)
LEGACY_PARAMS = record("F32", [4], B) + record("F32", [4, 4], W)


def op(kind: str, takes: dict[str, list[str]], gives: dict[str, list[str]], *attrs: bytes) -> bytes:
    return message(4, arguments(1, takes), arguments(2, gives), message(3, kind.encode()), *attrs)


def unary(kind: str, takes: str, gives: str) -> bytes:
    return op(kind, {"X": [takes]}, {"Out": [gives]})


VARS = (
    *ENDS,
    var("b", (4,), saved=True),
    var("w", saved=True),
    *(var(n, (-1, 4), fed=n == "x") for n in "xtuy"),
    var("c", (1,), 0),
    var("s", kind=SCOPES),
)
BODY = (
    op(
        "matmul_v2",
        {"X": ["x"], "Y": ["w"]},
        {"Out": ["t"]},
        *(attr(n, 6, number(10, 0)) for n in ("trans_x", "trans_y")),
    ),
    op("elementwise_add", {"X": ["t"], "Y": ["b"]}, {"Out": ["u"]}, attr("axis", INT, number(3, -1))),
    op(
        "fill_constant",
        {},
        {"Out": ["c"]},
        attr("shape", 11, number(15, 1)),
        attr("dtype", INT, number(3, 0)),
        attr("value", 1, varint(4 << 3 | 5) + struct.pack("<f", 1)),
        attr("str_value", STRING, message(5, b"")),
    ),
)


def branch(inside: int = 1) -> bytes:
    return op(
        "conditional_block",
        {"Cond": ["c"], "Input": ["u"]},
        {"Out": ["y"], "Scope": ["s"]},
        attr("sub_block", BLOCK, number(12, inside)),
        attr("is_scalar_condition", 6, number(10, 1)),
    )


INSIDE = unary("relu", "u", "y")


def legacy(
    *parts: bytes,
    vars_: Sequence[bytes] = VARS,
    body: Sequence[bytes] = BODY,
    ends: Sequence[bytes] = (fetch("y"), fetch("u", 1)),
    inner: bytes = block(1, 0, INSIDE),
    of: bytes = version(),
) -> bytes:
    return block(0, -1, *vars_, feed("x"), *body, branch(), *parts, *ends) + inner + of


def others(*names: str) -> list[bytes]:
    """The variables without some."""
    known = ("feed", "fetch", "b", "w", "x", "t", "u", "y", "c", "s")
    return [v for n, v in zip(known, VARS, strict=True) if n not in names]


SOUND = legacy()
Z, MORE = var("z", (-1, 4)), LEGACY_PARAMS
# Not here: a block that is missing, for which Paddle looks in memory that is not its own, so that it crashes or not.
LEGACY: dict[str, tuple[str, bytes, bytes | None]] = {
    "cut in half": ("protobuf", SOUND[: len(SOUND) // 2], MORE),
    "without the last byte": ("protobuf", SOUND[:-1], MORE),
    "a zero byte behind": ("protobuf", SOUND + b"\0", MORE),
    "an operator without a type": ("protobuf", legacy(message(4, arguments(1, {"X": ["y"]}))), MORE),
    "a variable without a type": ("protobuf", legacy(vars_=[*VARS, message(3, message(1, b"n"))]), MORE),
    "a name that is no text": (
        "protobuf",
        legacy(vars_=[*VARS, message(3, message(1, b"\xff\xfe"), message(2, number(1, TENSOR)))]),
        MORE,
    ),
    "a version only": ("program-empty", version(), MORE),
    "no operators": ("program-empty", block(0, -1, *VARS) + version(), MORE),
    "minor version": ("version-newer", legacy(of=version(3_003_002)), MORE),
    "major version": ("version-newer", legacy(of=version(9_999_999)), MORE),
    "another number": ("block", legacy(inner=block(5, 0, INSIDE)), MORE),
    "the parent is itself": ("block", legacy(inner=block(1, 1, INSIDE)), MORE),
    "an argument that nobody declares": ("value-undefined", legacy(unary("relu", "nope", "y")), MORE),
    "an argument inside that nobody declares": (
        "value-undefined",
        legacy(inner=block(1, 0, unary("relu", "nope", "y"))),
        MORE,
    ),
    "fetched, and nobody declares it": ("value-undefined", legacy(fetch("nope", 2)), MORE),
    "taken before it is defined": (
        "value-order",
        legacy(vars_=[*VARS, Z], body=[*BODY, unary("relu", "z", "t"), unary("relu", "x", "z")]),
        MORE,
    ),
    "fetched and never defined": ("value-order", legacy(fetch("z", 2), vars_=[*VARS, Z]), MORE),
    "taken and never defined": ("value-order", legacy(unary("relu", "z", "t"), vars_=[*VARS, Z]), MORE),
    "operators in another order": ("value-order", legacy(body=[BODY[1], BODY[0], BODY[2]]), MORE),
    "a parameter twice": ("parameter-twice", legacy(vars_=[*VARS, var("w", saved=True)]), MORE),
    "a parameter twice, another shape": ("parameter-twice", legacy(vars_=[*VARS, var("w", (1,), saved=True)]), MORE),
    "an axis without length": ("parameter-shape", legacy(vars_=[*others("w"), var("w", (-1, 4), saved=True)]), MORE),
    "data_type 99": ("type", legacy(vars_=[*others("w"), var("w", dtype=99, saved=True)]), MORE),
    "a vocabulary": ("type", legacy(vars_=[*VARS, var("p", saved=True, kind=VOCAB)]), MORE),
    "no file": ("params-missing", SOUND, None),
    "the last is missing": ("params-count", SOUND, record("F32", [4], B)),
    "one more": ("params-count", SOUND, MORE + record("F32", [4], B)),
    "five bytes less": ("params-truncated", SOUND, MORE[:-5]),
    "one byte more": ("params-trailing", SOUND, MORE + b"\0"),
    "wider dtype": ("params-dtype", SOUND, record("F32", [4], B) + record("F64", [4, 4], bytes(128))),
    "other name of the same bits": ("params-dtype", SOUND, record("F32", [4], B) + record("I32", [4, 4], W)),
    "turned": ("params-shape", SOUND, record("F32", [4], B) + record("F32", [2, 8], W)),
    "flat": ("params-shape", SOUND, record("F32", [4], B) + record("F32", [16], W)),
    "record version": ("params-record", SOUND, record("F32", [4], B) + record("F32", [4, 4], W, version=1)),
    "a negative dimension": ("params-record", SOUND, record("F32", [4], B) + record("F32", [-4, -4], W)),
}

RIGHT = b"".join(test_params.RIGHT)
CASES: dict[str, dict[str, Case]] = {
    "test_pir": {n: Case(id_, _changed(change), RIGHT) for n, (id_, change) in test_pir.WRONG.items()},
    "test_params": {n: Case(id_, TEXT, data) for n, (id_, data) in test_params.WRONG.items()},
    "texts": {n: Case(id_, text, RIGHT) for n, (id_, text) in TEXTS.items()},
    "pdmodel": {n: Case(id_, data, params, ".pdmodel") for n, (id_, data, params) in LEGACY.items()},
}
"""By table and name."""
RIGHTS = {
    table: Case("", *((SOUND, LEGACY_PARAMS, ".pdmodel") if table == "pdmodel" else (TEXT, RIGHT))) for table in CASES
}
"""The program of each table before something was done to it."""


def recorded() -> dict[str, Any]:
    """What the fixture says."""
    said: dict[str, Any] = json.loads(FIXTURE.read_bytes())
    return said
