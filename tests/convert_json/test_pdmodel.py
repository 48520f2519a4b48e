"""Programs of before PIR, built byte by byte here: what is read of them, and what is found wrong."""

from __future__ import annotations

import os
import random
import shutil
import time
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.errors import CkptError, CorruptError, IncompleteError
from ckpttool.formats.paddle import pdmodel as _pdmodel
from ckpttool.formats.paddle.pdmodel import PROBLEMS, VERSION, read_pdmodel
from ckpttool.formats.paddle.program_parts import BY_NUMBER, Program, ProgramTensor
from tests.helpers.sample import examples, some

FIXTURE = Path(__file__).parents[2] / "fixtures" / "paddle_programs" / "legacy" / "model.pdmodel"

TENSOR, FEED, FETCH, RAW, SCOPES, ARRAY, VOCAB = 7, 9, 10, 17, 11, 13, 27
INT, FLOATS, STRING, STRINGS, BLOCK, BLOCKS, SCALARS = 0, 4, 2, 5, 8, 10, 17


# -- protobuf, written


def varint(n: int) -> bytes:
    n &= (1 << 64) - 1
    out = bytearray()
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    return bytes([*out, n])


def number(field: int, n: int) -> bytes:
    return varint(field << 3) + varint(n)


def message(field: int, *parts: bytes) -> bytes:
    body = b"".join(parts)
    return varint(field << 3 | 2) + varint(len(body)) + body


def tensor(dims: tuple[int, ...], dtype: int) -> bytes:
    return message(1, number(1, dtype), *(number(2, d) for d in dims))


def var(
    name: str,
    dims: tuple[int, ...] = (4, 4),
    dtype: int = 5,
    *,
    saved: bool = False,
    kind: int = TENSOR,
    fed: bool = False,
) -> bytes:
    described = {TENSOR: 3, ARRAY: 4}
    said = message(described[kind], tensor(dims, dtype)) if kind in described else b""
    return message(
        3,
        message(1, name.encode()),
        message(2, number(1, kind), said),
        number(3, saved),
        number(4, fed) if fed else b"",
    )


def arguments(field: int, slots: dict[str, list[str]]) -> bytes:
    return b"".join(
        message(field, message(1, k.encode()), *(message(2, n.encode()) for n in names)) for k, names in slots.items()
    )


def attr(name: str, kind: int, *parts: bytes) -> bytes:
    return message(4, message(1, name.encode()), number(2, kind), *parts)


def op(kind: str, takes: list[str], gives: list[str], *attrs: bytes) -> bytes:
    return message(4, arguments(1, {"X": takes}), arguments(2, {"Out": gives}), message(3, kind.encode()), *attrs)


def feed(name: str, column: int = 0) -> bytes:
    return op("feed", ["feed"], [name], attr("col", INT, number(3, column)))


def fetch(name: str, column: int = 0) -> bytes:
    return op("fetch", [name], ["fetch"], attr("col", INT, number(3, column)))


def block(place: int, parent: int, *parts: bytes) -> bytes:
    return message(1, number(1, place), number(2, parent), *parts)


def version(n: int = VERSION) -> bytes:
    return message(4, number(1, n))


ENDS = (var("feed", saved=True, kind=FEED), var("fetch", saved=True, kind=FETCH))
VARS = (*ENDS, var("x", (-1, 4)), var("w", saved=True), var("y", (-1, 4)))
OPS = (feed("x"), op("matmul_v2", ["x", "w"], ["y"]), fetch("y"))


def program(*blocks: bytes, of: int = VERSION) -> bytes:
    return b"".join(blocks) + version(of)


SOUND = program(block(0, -1, *VARS, *OPS))


Read = Callable[[bytes], Program]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    path = tmp_path / "model.pdmodel"

    def of(data: bytes) -> Program:
        path.write_bytes(data)
        return read_pdmodel(path)

    return of


def ids(found: Program) -> list[str]:
    return [p.id for p in found.problems]


# -- what is read


def test_program_of_paddle() -> None:
    found = read_pdmodel(FIXTURE)
    assert found.problems == []
    assert (found.kind, found.version, found.blocks, found.trainable) == ("pdmodel", 3_003_001, 1, None)
    assert found.parameters == [
        ProgramTensor("batch_norm1d_1.b_0", "F32", (16,)),
        ProgramTensor("batch_norm1d_1.w_0", "F32", (16,)),
        ProgramTensor("batch_norm1d_1.w_1", "F32", (16,)),
        ProgramTensor("batch_norm1d_1.w_2", "F32", (16,)),
        ProgramTensor("eager_tmp_1", "I64", (4,)),
        ProgramTensor("embedding_1.w_0", "F32", (20, 8)),
        ProgramTensor("linear_2.b_0", "F32", (16,)),
        ProgramTensor("linear_2.w_0", "F32", (8, 16)),
        ProgramTensor("linear_3.w_0", "F32", (16, 4)),
    ]
    assert found.inputs == [ProgramTensor("x", "I64", (-1, 5))]
    assert [p.dtype for p in found.outputs] == ["F32"]
    assert found.operators["matmul_v2"] == 2
    assert found.operators["feed"] == found.operators["fetch"] == 1
    assert found.operators.total() == 11


def test_sound_program(read: Read) -> None:
    found = read(SOUND)
    assert found.problems == []
    assert found.parameters == [ProgramTensor("w", "F32", (4, 4))]
    assert found.inputs == [ProgramTensor("x", "F32", (-1, 4))]
    assert found.outputs == [ProgramTensor("y", "F32", (-1, 4))]
    assert found.operators == {"feed": 1, "matmul_v2": 1, "fetch": 1}


@pytest.mark.parametrize("dtype", BY_NUMBER)
def test_every_dtype(dtype: int, read: Read) -> None:
    found = read(program(block(0, -1, *VARS, var("p", (2, 0, 3), dtype, saved=True), *OPS)))
    assert found.problems == []
    assert found.parameters[0] == ProgramTensor("p", BY_NUMBER[dtype].dtype, (2, 0, 3))


def test_parameters_are_sorted_as_python_does(read: Read) -> None:
    names = ["l_10", "l_2", "Z", "a", "_", "ß", "\U0001f600", "\uffff", "l_1"]
    found = read(program(block(0, -1, *ENDS, *(var(n, (), saved=True) for n in names), op("f", names, ["Z"]))))
    assert found.problems == []
    assert [p.name for p in found.parameters] == sorted(names)


def test_parameters_of_inner_blocks_count_once(read: Read) -> None:
    inner = (var("w", saved=True), var("v", (3,), saved=True), op("f", ["w", "v"], []))
    loop = op("while", ["x"], [], attr("sub_block", BLOCK, number(12, 1)))
    found = read(program(block(0, -1, *VARS, *OPS, loop), block(1, 0, *inner)))
    assert found.problems == []
    assert found.parameters == [ProgramTensor("v", "F32", (3,)), ProgramTensor("w", "F32", (4, 4))]
    assert found.blocks == 2
    assert found.operators == {"feed": 1, "matmul_v2": 1, "fetch": 1, "while": 1, "f": 1}


def test_only_what_is_saved_is_a_parameter(read: Read) -> None:
    others = [var(f"o{k}", saved=True, kind=k) for k in (RAW, SCOPES, 15)]
    found = read(program(block(0, -1, *VARS, *others, *OPS)))
    assert found.problems == []
    assert [p.name for p in found.parameters] == ["w"]


def test_ends_stand_in_the_order_of_their_columns(read: Read) -> None:
    ends = (*ENDS, var("a", (1,)), var("b", (2,), 3), var("c", (-1,), 36), var("s", kind=26))
    fed = (feed("c", 2), feed("b", 1), feed("a", 0), feed("s", 10))
    found = read(program(block(0, -1, *ends, *fed, fetch("b", 1), fetch("a", 0))))
    assert found.problems == []
    assert found.inputs == [
        ProgramTensor("a", "F32", (1,)),
        ProgramTensor("b", "I64", (2,)),
        ProgramTensor("c", "data_type 36", (-1,)),
        ProgramTensor("s", "STRINGS", ()),
    ]
    assert [p.name for p in found.outputs] == ["a", "b"]


def test_order_of_fields_does_not_matter(read: Read) -> None:
    body = b"".join((*OPS, *VARS, number(2, -1), number(1, 0)))
    found = read(version() + message(1, body))
    assert found.problems == []
    assert (found.parameters, found.inputs) == (read(SOUND).parameters, read(SOUND).inputs)


def test_fields_of_later_versions_are_passed_over(read: Read) -> None:
    more = number(99, 1) + message(98, b"text") + varint(97 << 3 | 1) + b"8 bytes." + varint(96 << 3 | 5) + b"four"
    kind = message(2, number(1, TENSOR), message(3, tensor((2,), 5), more), more)
    v = message(3, message(1, b"p"), kind, number(3, 1), more)
    o = message(4, arguments(1, {"X": ["p"]}), message(3, b"f"), more, attr("a", INT, number(3, 1), more))
    found = read(program(block(0, -1, *VARS, v, *OPS, o, more)) + more)
    assert found.problems == []
    assert found.parameters[0] == ProgramTensor("p", "F32", (2,))


def test_packed_numbers(read: Read) -> None:
    kind = message(2, number(1, TENSOR), message(3, message(1, number(1, 5), message(2, varint(3), varint(300)))))
    v = message(3, message(1, b"p"), kind, number(3, 1))
    o = op("f", [], [], attr("blocks", BLOCKS, message(14, varint(0), varint(1))))
    found = read(program(block(0, -1, *VARS, v, *OPS, o)))
    assert found.parameters[0] == ProgramTensor("p", "F32", (3, 300))
    assert [p.text for p in found.problems] == ["the operator has block 1 inside, and the program has 1"]


@pytest.mark.parametrize(
    "attribute",
    [
        attr("floats", FLOATS, *[b"\x3d....\x3d\x3d\x3d\x3d\x3d"] * 5000),
        attr("floats", FLOATS, message(7, b"...." * 5000)),
        attr("ints", 3, *(number(6, n) for n in range(-9, 9000))),
        attr("longs", 11, *(number(15, n << 40) for n in range(-9, 9000))),
        attr("bools", 7, *[number(11, 1)] * 9000),
        attr("float64s", 12, *[varint(16 << 3 | 1) + b"8 bytes."] * 9000),
        attr("scalars", SCALARS, *(message(21, number(1, 2), number(3, n)) for n in range(-9, 9000))),
        attr("strings", STRINGS, *(message(8, b"x" * n) for n in range(300))),
        attr("text", STRING, message(5, b"\xff" * 300)),  # Paddle puts bytes here
    ],
    ids=["floats", "packed", "ints", "longs", "bools", "float64s", "scalars", "strings", "text"],
)
def test_attributes_of_every_kind(attribute: bytes, read: Read) -> None:
    o = op("f", ["y"], ["y"], attribute, attr("z", INT, number(3, 1)))
    assert read(program(block(0, -1, *VARS, *OPS, o))).problems == []
    # One byte less is found wherever it lies.
    short = op("f", ["y"], ["y"], message(4, attribute[len(attribute) - len(attribute[3:]) : -1]))
    assert ids(read(program(block(0, -1, *VARS, *OPS, short)))) == ["protobuf"]


# -- what is wrong, one thing at a time


def one(*parts: bytes, of: int = VERSION) -> bytes:
    """A program with one block."""
    return program(block(0, -1, *parts), of=of)


LOOP = op("while", ["x", "later"], [], attr("sub_block", BLOCK, number(12, 1)))
LIST = op("pylayer", ["x"], [], attr("blocks", BLOCKS, number(14, 1), number(14, 2)))
WRONG = {
    "protobuf": {
        "cut": SOUND[: len(SOUND) * 2 // 3],
        "cut behind": SOUND[:-1],
        "length": one(*VARS, message(3, varint(1 << 3 | 2) + varint(1000) + b"name")),
        "endless number": one(*VARS, *OPS, b"\x08" + b"\x80" * 11),
        "group": one(*VARS, *OPS, varint(9 << 3 | 3)),
        "end of a group": one(*VARS, *OPS, varint(9 << 3 | 4)),
        "wire type 7": one(*VARS, *OPS, varint(9 << 3 | 7)),
        "field 0": one(*VARS, *OPS, b"\x00\x00"),
        "other wire type": one(*VARS, *OPS, number(3, 1)),
        "name is not a string": one(*VARS, message(3, message(1, b"\xff\xfe"), message(2, number(1, TENSOR)))),
        "argument is not a string": one(*VARS, *OPS, message(4, message(1, message(1, b"X"), message(2, b"\xc3")))),
        "operator without type": one(*VARS, *OPS, message(4, arguments(1, {"X": ["x"]}))),
        "variable without name": one(*VARS, *OPS, message(3, message(2, number(1, TENSOR)))),
        "variable without type": one(*VARS, *OPS, message(3, message(1, b"n"))),
        "block without number": message(1, *VARS, *OPS),
        "version of an operator": SOUND + message(5, message(1, message(1, b"f"), message(2, b"\x0a"))),
        "attribute": one(*VARS, *OPS, op("f", [], [], message(4, message(1, b"name"), number(2, 0), b"\x19"))),
    },
    "program-empty": {
        "no blocks": version(),
        "no operators": one(*VARS),
        "two blocks": program(block(0, -1), block(1, 0)),
    },
    "version-newer": {
        "minor": one(*VARS, *OPS, of=VERSION + 1),
        "major": one(*VARS, *OPS, of=4_000_000),
    },
    "block": {
        "number": program(block(3, -1, *VARS, *OPS)),
        "parent of the first": program(block(0, 0, *VARS, *OPS)),
        "parent of the second": program(block(0, -1, *VARS, *OPS, LOOP), block(1, -1, op("f", ["y"], ["later"]))),
        "parent is itself": program(block(0, -1, *VARS, *OPS, LOOP), block(1, 1, op("f", ["y"], ["later"]))),
        "parent after it": program(block(0, -1, *VARS, *OPS, LIST), block(1, 2, op("f", ["y"], [])), block(2, 0)),
        "parent of the operator": program(
            block(0, -1, *VARS, var("later"), *OPS, LOOP, op("conditional_block", [], [], attr("b", 8, number(12, 2)))),
            block(1, 0, op("f", ["y"], ["later"])),
            block(2, 1, op("f", ["y"], [])),
        ),
        "forward": program(block(0, -1, *VARS, *OPS), block(1, 0, number(5, 2))),
        "inside": one(*VARS, *OPS, op("while", ["x"], [], attr("sub_block", BLOCK, number(12, 1)))),
        "inside, negative": one(*VARS, *OPS, op("while", ["x"], [], attr("sub_block", BLOCK, number(12, -1)))),
        "list": program(block(0, -1, *VARS, *OPS, LIST), block(1, 0)),
    },
    "value-undefined": {
        "argument": one(*VARS, *OPS, op("f", ["x", "other"], ["y"]), op("g", ["other"], ["y"])),
        "fetched": one(*VARS, *OPS, fetch("other", 1)),
        "inside": program(
            block(0, -1, *VARS, *OPS, var("later"), LOOP), block(1, 0, op("f", ["other"], []), op("f", ["other"], []))
        ),
        "of a sibling": program(
            block(0, -1, *VARS, *OPS, LIST), block(1, 0, var("local")), block(2, 0, op("f", ["local"], []))
        ),
    },
    "value-order": {
        "later": one(*VARS, var("z"), feed("x"), op("f", ["z"], ["y"]), op("g", ["x"], ["z"]), op("h", ["z"], ["y"])),
        "never": one(*VARS, var("z"), *OPS, op("f", ["z"], ["y"])),
        "undeclared": one(*VARS, *OPS, op("f", ["z"], ["y"]), op("g", ["x"], ["z"])),
        "not fed": one(*VARS, var("z"), *OPS, fetch("z", 1)),
    },
    "parameter-twice": {
        "same": one(*VARS, var("w", saved=True), *OPS),
        "differs": one(*VARS, var("w", (1,)), *OPS),
    },
    "parameter-shape": {
        "batch": one(*VARS, var("p", (-1, 4), saved=True), *OPS),
        "least": one(*VARS, var("p", (3, -(1 << 63)), saved=True), *OPS),
        "none": one(*VARS, message(3, message(1, b"p"), message(2, number(1, TENSOR)), number(3, 1)), *OPS),
    },
    "type": {
        "unknown": one(*VARS, var("p", dtype=99, saved=True), *OPS),
        "no element": one(*VARS, var("p", dtype=TENSOR, saved=True), *OPS),
        "negative": one(*VARS, var("p", dtype=-1, saved=True), *OPS),
        "vocabulary": one(*VARS, var("p", saved=True, kind=VOCAB), *OPS),
    },
}


def test_every_problem_has_a_test() -> None:
    assert WRONG.keys() == PROBLEMS.keys()


@pytest.mark.parametrize(("id_", "case"), [(k, c) for k, cases in WRONG.items() for c in cases])
def test_problem_comes_alone(id_: str, case: str, read: Read) -> None:
    found = read(WRONG[id_][case])
    assert [(p.id, p.text) for p in found.problems if p.id != id_] == []
    assert len(found.problems) == 1, found.problems
    assert not found.more


@pytest.mark.parametrize(
    ("id_", "case", "text", "where"),
    [
        ("protobuf", "cut", "field 1 of the program has 239 bytes, and 163 are left", "byte 0"),
        ("protobuf", "group", "field 9 of block 0 has the wire type 3, which is not in use", "byte 242"),
        ("protobuf", "other wire type", "field 3 of block 0 has the wire type 0, not 2", "byte 242"),
        ("program-empty", "no operators", "the program has no operators", ""),
        ("version-newer", "major", "the version is 4.0.0, and 3.3.1 is the newest known here", "version"),
        ("block", "number", "block 0 says that it is block 3", "block 0"),
        (
            "block",
            "inside",
            "the operator has block 1 inside, and the program has 1",
            "block 0, operator 3 (while)",
        ),
        (
            "value-undefined",
            "argument",
            "`other` is taken, and neither declared nor defined",
            "block 0, operator 3 (f)",
        ),
        ("value-order", "later", "`z` is taken before an operator defines it", "block 0, operator 1 (f)"),
        (
            "value-order",
            "never",
            "`z` is taken, and is neither fed nor defined by an operator",
            "block 0, operator 3 (f)",
        ),
        ("parameter-twice", "same", "`w` is declared twice, and is saved with the parameters", "block 0"),
        ("parameter-shape", "batch", "parameter `p` has the shape [-1, 4], whose length is not known", "block 0"),
        ("type", "unknown", "parameter `p` has the unknown data_type 99", "block 0"),
        ("type", "vocabulary", "parameter `p` is not a tensor but VOCAB", "block 0"),
    ],
)
def test_text_of_problem(id_: str, case: str, text: str, where: str, read: Read) -> None:
    assert read(WRONG[id_][case]).problems == [(id_, text, where)]


def test_names_are_printed_safely(read: Read) -> None:
    found = read(one(*VARS, *OPS, op("f\x1b[31m", ["bad\nname" + "x" * 1000], ["y"])))
    (problem,) = found.problems
    assert problem.text.isprintable()
    assert problem.where.isprintable()
    assert len(problem.text) < 200


def test_parameter_that_is_wrong_is_left_out(read: Read) -> None:
    found = read(one(*VARS, var("p", dtype=99, saved=True), var("q", (-1,), saved=True), *OPS))
    assert ids(found) == ["type", "parameter-shape"]
    assert [p.name for p in found.parameters] == ["w"]


def test_cut_program_keeps_what_was_read(read: Read) -> None:
    found = read(SOUND[: len(SOUND) * 2 // 3])
    assert [p.name for p in found.parameters] == ["w"]
    assert found.operators == {"feed": 1}


# -- what is not wrong


@pytest.mark.parametrize(
    "data",
    [
        one(*VARS, *OPS, op("f", ["", "@EMPTY@"], ["@EMPTY@"])),
        one(*VARS, var("array", kind=ARRAY), *OPS, op("write_to_array", ["x", "array"], ["array"])),
        # A loop lists what its body is the first to define; what that leaves may be taken behind it.
        program(
            block(0, -1, *VARS, var("later"), *OPS, LOOP, op("f", ["later"], ["y"])),
            block(1, 0, op("g", ["later"], []), op("f", ["y"], ["later"])),
        ),
        # A value of a block inside a block.
        program(
            block(0, -1, *VARS, var("deep"), *OPS, LIST, op("f", ["deep"], ["y"])),
            block(1, 0, op("conditional_block", [], [], attr("sub_block", BLOCK, number(12, 3)))),
            block(2, 0),
            block(3, 1, op("f", ["y"], ["deep"])),
        ),
        # The second turn of a loop takes what the first has left.
        program(
            block(0, -1, *VARS, var("later"), *OPS, LOOP),
            block(1, 0, var("t"), op("f", ["t"], []), op("g", ["y"], ["t", "later"])),
        ),
        # `paddle.static.save` writes no operators that feed; data is fed by name.
        one(var("x", fed=True), var("w", saved=True), var("y"), op("mul", ["x", "w"], ["y"])),
        one(var("x"), var("w", saved=True), var("y"), op("mul", ["x", "w"], ["y"])),
        one(*VARS, var("late", fed=True), *OPS, op("f", ["late"], ["y"])),
        # In place.
        one(*VARS, *OPS, op("batch_norm", ["y", "w"], ["y", "w"])),
        # The block of a backward pass takes from the block that it goes back through.
        program(
            block(0, -1, *VARS, *OPS, LIST),
            block(1, 0, var("t"), op("f", ["x"], ["t"])),
            block(2, 0, number(5, 1), op("f_grad", ["t"], [])),
        ),
        one(*VARS, *OPS, op("run_program", ["x"], ["y"], attr("global_block", BLOCK, number(12, 0)))),
        one(*VARS, var("reserve"), *OPS, op("batch_norm_grad", ["reserve"], [])),
        one(*VARS, *OPS) + message(5, message(1, message(1, b"f"), message(2, number(1, 3)))),
        one(*VARS, *OPS, of=0),
        one(*VARS, *OPS, of=1_008_005),
        block(0, -1, *VARS, *OPS),  # no version
    ],
)
def test_sound_programs(data: bytes, read: Read) -> None:
    assert read(data).problems == []


# -- files that are none


def test_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(IncompleteError, match="does not exist"):
        read_pdmodel(tmp_path / "no.pdmodel")


def test_directory(tmp_path: Path) -> None:
    with pytest.raises(CorruptError, match="directory"):
        read_pdmodel(tmp_path)


def test_device() -> None:
    with pytest.raises(CorruptError):
        read_pdmodel(Path("/dev/null"))


@pytest.mark.parametrize(
    ("data", "hint"),
    [
        (b"", "again"),
        (b"\n", "again"),
        (b"\n\nsome text\n", "again"),
        (b'{"base_code": {"magic": "pir"}}', "JSON"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n", "git lfs pull"),
        (b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x00}.", "again"),
        (b"PK\x03\x04" + bytes(100), "again"),
        (bytes(1000), "again"),
        (b"\xff" * 1000, "again"),
        (b"P\x01", "again"),
    ],
)
def test_file_of_another_kind(data: bytes, hint: str, read: Read) -> None:
    with pytest.raises(CorruptError) as e:
        read(data)
    assert hint in str(e.value.hint)


# -- hostile files


def test_cut_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "model.pdmodel"
    shutil.copy(FIXTURE, path)
    path.chmod(0o600)
    kept = [9]
    for stop in reversed(range(0, path.stat().st_size, some(5, 61))):
        os.truncate(path, stop)
        try:
            found = read_pdmodel(path)
        except CorruptError:
            assert stop < 200
            continue
        # Between the fields of a program nothing tells that some are missing.
        assert ids(found) in (["protobuf"], []), stop
        kept.append(len(found.parameters))
    assert kept == sorted(kept, reverse=True)
    assert kept[-1] <= 1


def _survives(read: Read, data: bytes) -> None:
    try:
        found = read(data)
    except CkptError:
        return
    assert all(p.id in PROBLEMS for p in found.problems)
    assert all(p.nbytes >= 0 for p in found.parameters)


def test_flipped_bytes(read: Read) -> None:
    data = FIXTURE.read_bytes()
    rng = random.Random(3)  # noqa: S311
    for _ in range(examples(300)):
        changed = bytearray(data)
        for _ in range(rng.choice((1, 1, 1, 4))):
            changed[rng.randrange(len(data))] = rng.randrange(256)
        _survives(read, bytes(changed))


@given(st.binary(max_size=200), st.sampled_from([b"", SOUND, WRONG["block"]["list"]]), st.integers(0, 400))
def test_any_bytes(tmp_path_factory: pytest.TempPathFactory, junk: bytes, around: bytes, at: int) -> None:
    path = tmp_path_factory.mktemp("any") / "model.pdmodel"
    path.write_bytes(around[:at] + junk + around[at:])
    try:
        _survives(lambda _: read_pdmodel(path), b"")
    finally:
        shutil.rmtree(path.parent)


def test_many_blocks_end(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pdmodel, "MAX_BLOCKS", 1000)
    found = read(b"".join(block(n, n - 1) for n in range(1001)))
    assert ids(found) == ["protobuf"]
    assert "1,000 blocks" in found.problems[0].text


def test_search_through_blocks_ends(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that is nowhere costs a step for each ancestor, and there may be as many as ancestors."""
    monkeypatch.setattr(_pdmodel, "_STEPS", 10_000)
    blocks = [block(n, n - 1, op("f", [f"t{n}"], [])) for n in range(1000)]
    found = read(b"".join(blocks))
    assert set(ids(found)) == {"value-undefined"}
    assert found.more["value-undefined"] == 120


def test_deep_blocks(read: Read) -> None:
    inside = [op("while", [], [], attr("sub_block", BLOCK, number(12, n + 1))) for n in range(3000)]
    blocks = [block(n, n - 1, o) for n, o in enumerate(inside)]
    assert read(program(*blocks, block(3000, 2999, op("f", ["none"], [])))).problems == [
        ("value-undefined", "`none` is taken, and neither declared nor defined", "block 3000, operator 0 (f)")
    ]


# -- size


def test_large_program(tmp_path: Path) -> None:
    n = some(29_999, 2_999)
    same = [attr(f"a{i}", STRING, message(5, b"value")) for i in range(6)]
    constant = attr("values", FLOATS, b"\x3d\x00\x00\x80\x3f" * some(2_000_000, 200_000))
    step = var("t<next>") + op("mul", ["t<last>", "w<any>"], ["t<next>"], *same)
    numbers = [f"{i:05}_".encode() for i in range(n + 1)]
    parts = [*ENDS, var(f"t{0:05}_"), *(var(f"w{i:04}_", saved=True) for i in range(min(n + 1, 10_000))), var("c")]
    parts.append(feed(f"t{0:05}_"))
    for last, after in pairwise(numbers):
        parts.append(step.replace(b"<next>", after).replace(b"<last>", last).replace(b"<any>", last[1:]))
    path = tmp_path / "model.pdmodel"
    path.write_bytes(one(*parts, op("assign_value", [], ["c"], constant), fetch(f"t{n:05}_")))
    del parts
    start = time.process_time()
    found = read_pdmodel(path)
    took = time.process_time() - start
    assert found.problems == []
    assert found.operators["mul"] == n
    assert len(found.parameters) == min(n + 1, 10_000)
    assert took < some(10, 3), "seconds, on any machine; 0.4 for all on two cores of 2024"


def test_memory_does_not_grow_with_constants(tmp_path: Path) -> None:
    path = tmp_path / "model.pdmodel"
    constants = [attr("values", FLOATS, b"\x3d\x00\x00\x80\x3f" * 1_000_000)] * 3
    stack = attr("op_callstack", STRINGS, *(message(8, b"x" * 100) for _ in range(10_000)))
    path.write_bytes(one(*VARS, *OPS, *(op("assign_value", [], ["y"], c, stack) for c in constants)))
    assert path.stat().st_size > 15_000_000
    tracemalloc.start()
    try:
        found = read_pdmodel(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.problems == []
    assert peak < 3_000_000
