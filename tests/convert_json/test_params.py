"""Parameter files: every way in which one does not fit its program has its own identifier."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpttool.errors import CkptError, CorruptError
from ckpttool.formats.paddle.pdiparams import PROBLEMS, record_head
from ckpttool.formats.paddle.program import Artifact, examine, open_program
from tests.convert_json.programs import ELEMENTS, PARAMETERS, data_of, parameter, record, records, usual, varint, write
from tests.convert_json.programs import program as program_of

RIGHT = records()
FILE = b"".join(RIGHT)
DTYPES: list[tuple[str, str, list[int]]] = [(f"p_{d.lower()}", d, [2, 3]) for d in ELEMENTS]


def look(tmp_path: Path, params: bytes | None) -> Artifact:
    return examine(write(tmp_path, params=params))


def ids(artifact: Artifact) -> set[str]:
    return {p.id for p in artifact.program.problems}


def test_records_in_order(tmp_path: Path) -> None:
    found = look(tmp_path, FILE)
    assert found.program.problems == []
    assert [(p.name, r.dtype, r.shape) for p, r in found.tensors] == [(n, d, tuple(s)) for n, d, s in PARAMETERS]
    assert [r.start for r in found.records] == [0, len(RIGHT[0]), len(RIGHT[0]) + len(RIGHT[1])]
    for (_, r), p, seed in zip(found.tensors, PARAMETERS, range(3), strict=True):
        assert FILE[r.offset : r.offset + r.nbytes] == data_of(p, seed)
        assert FILE[r.start : r.offset] == record_head(r.dtype, r.shape)
        assert r.head == b""


def test_every_dtype(tmp_path: Path) -> None:
    data = program_of([parameter(i + 1, *p) for i, p in enumerate(DTYPES)])
    found = examine(write(tmp_path, data, b"".join(records(DTYPES))))
    assert found.program.problems == []
    assert {r.dtype for r in found.records} == set(ELEMENTS)


def test_scalars_and_empty_tensors(tmp_path: Path) -> None:
    parameters: list[tuple[str, str, list[int]]] = [("a", "F32", []), ("b", "F32", [0, 3]), ("c", "I64", [1])]
    data = program_of([parameter(i + 1, *p) for i, p in enumerate(parameters)])
    found = examine(write(tmp_path, data, b"".join(records(parameters))))
    assert found.program.problems == []
    assert [r.nbytes for r in found.records] == [4, 0, 8]


def test_names_are_sorted_as_texts(tmp_path: Path) -> None:
    parameters: list[tuple[str, str, list[int]]] = [(f"linear_{i}.w_0", "F32", [i + 1]) for i in range(12)]
    data = program_of([parameter(i + 1, *p) for i, p in enumerate(parameters)])
    found = examine(write(tmp_path, data, b"".join(records(parameters))))
    assert found.program.problems == []
    assert [r.shape for r in found.records][:4] == [(1,), (2,), (11,), (12,)]


W = PARAMETERS[1]
HEADS = {
    "levels of detail": record("F32", [4, 4], data_of(W, 1), levels=[b"\0" * 8 + b"\x04" + b"\0" * 7]),
    "two levels": record("F32", [4, 4], data_of(W, 1), levels=[b"", b"\0" * 16]),
    "packed dimensions": record("F32", [], data_of(W, 1), desc=b"\x08\x05\x12\x02\x04\x04"),
    "dtype behind": record("F32", [], data_of(W, 1), desc=b"\x10\x04\x10\x04\x08\x05"),
    "long varint": record("F32", [], data_of(W, 1), desc=b"\x08\x05\x10\x84\x00\x10\x04"),
    "unknown fields": record("F32", [], data_of(W, 1), desc=b"\x08\x05\x10\x04\x10\x04\x78\x07\x7a\x02ab"),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_that_paddle_reads_and_does_not_write(tmp_path: Path, name: str) -> None:
    """They are kept, so that the way back gives the same bytes."""
    found = look(tmp_path, RIGHT[0] + HEADS[name] + RIGHT[2])
    assert found.program.problems == []
    assert found.records[1].head == HEADS[name][: -len(data_of(W, 1))]


def changed(**how: object) -> bytes:
    """The file with another record in the middle."""
    settings = {"dtype": "F32", "dims": [4, 4], "data": data_of(W, 1)} | how
    return RIGHT[0] + record(**settings) + RIGHT[2]  # type: ignore[arg-type]


WRONG: dict[str, tuple[str, bytes | None]] = {
    "no file": ("params-missing", None),
    "empty": ("params-count", b""),
    "the last is missing": ("params-count", RIGHT[0] + RIGHT[1]),
    "the first is missing": ("params-count", RIGHT[1] + RIGHT[2]),
    "one in the middle is missing": ("params-count", RIGHT[0] + RIGHT[2]),
    "one more": ("params-count", FILE + RIGHT[0]),
    "one more in front": ("params-count", RIGHT[2] + FILE),
    "another order": ("params-shape", RIGHT[2] + RIGHT[1] + RIGHT[0]),
    "one byte more": ("params-trailing", FILE + b"\0"),
    "a hundred bytes more": ("params-trailing", FILE + b"\0" * 100),
    "the head of a record more": ("params-trailing", FILE + RIGHT[0][:20]),
    "five bytes less": ("params-truncated", FILE[:-5]),
    "one byte": ("params-truncated", FILE[:1]),
    "cut in the last head": ("params-truncated", FILE[: -len(RIGHT[2]) + 15]),
    "cut in the last desc": ("params-truncated", FILE[: -len(RIGHT[2]) + 22]),
    "cut in the middle": ("params-truncated", FILE[: len(RIGHT[0]) + 40]),
    "wider dtype": ("params-dtype", changed(dtype="F64", data=bytes(128))),
    "narrower dtype": ("params-dtype", changed(dtype="BF16", data=bytes(32))),
    "other name of the same bits": ("params-dtype", changed(dtype="I32")),
    "wider dtype, same data": ("params-dtype", changed(dtype="F64")),
    "narrower dtype, same data": ("params-dtype", changed(dtype="I8")),
    "turned": ("params-shape", changed(dims=[2, 8])),
    "flat": ("params-shape", changed(dims=[16])),
    "one more axis": ("params-shape", changed(dims=[1, 4, 4])),
    "more rows": ("params-shape", changed(dims=[5, 4], data=bytes(80))),
    "no rows": ("params-shape", changed(dims=[0, 4], data=b"")),
    "more rows, same data": ("params-shape", changed(dims=[1 << 40, 4])),
    "record version": ("params-record", changed(version=1)),
    "tensor version": ("params-record", changed(tensor_version=1)),
    "too many levels": ("params-record", RIGHT[0] + b"\0\0\0\0" + b"\xff" * 8 + RIGHT[1][12:] + RIGHT[2]),
    "a level of seven bytes": ("params-record", changed(levels=[b"1234567"])),
    "desc of -1 bytes": ("params-record", changed(length=-1)),
    "desc of no bytes": ("params-record", changed(length=0)),
    "desc of three bytes": ("params-record", changed(length=3)),
    "desc of 200 bytes": ("params-record", changed(length=200)),
    "desc of 2 GB": ("params-record", changed(length=2**31 - 1)),
    "a negative dimension": ("params-record", changed(dims=[-4, 4])),
    "data_type 99": ("params-record", changed(dtype=99)),
    "data_type 7": ("params-record", changed(dtype=7)),
    "no data_type": ("params-record", changed(desc=b"\x10\x04\x10\x04")),
    "garbage": ("params-record", changed(desc=b"\xff" * 6)),
    "an endless varint": ("params-record", changed(desc=b"\x08" + b"\x80" * 20)),
}


def test_every_problem_has_a_case() -> None:
    assert {id_ for id_, _ in WRONG.values()} == PROBLEMS.keys()


@pytest.mark.parametrize("name", WRONG)
def test_one_mistake_is_one_identifier(tmp_path: Path, name: str) -> None:
    id_, data = WRONG[name]
    found = look(tmp_path, data)
    assert ids(found) == {id_}
    assert len(found.program.problems) == 1


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_not_converted(tmp_path: Path, name: str) -> None:
    with pytest.raises(CkptError) as e:
        open_program(write(tmp_path, params=WRONG[name][1]))
    assert e.value.hint


def test_two_tensors_of_the_same_kind_cannot_be_told_apart(tmp_path: Path) -> None:
    """Nothing in the file says which is which."""
    parameters: list[tuple[str, str, list[int]]] = [("a", "F32", [4]), ("b", "F32", [4])]
    data = program_of([parameter(i + 1, *p) for i, p in enumerate(parameters)])
    found = examine(write(tmp_path, data, b"".join(reversed(records(parameters)))))
    assert found.program.problems == []


@pytest.mark.parametrize("cut", range(0, len(FILE), 3))
def test_a_file_that_is_cut_off(tmp_path: Path, cut: int) -> None:
    edges = (0, len(RIGHT[0]), len(RIGHT[0]) + len(RIGHT[1]))
    assert ids(look(tmp_path, FILE[:cut])) == {"params-count" if cut in edges else "params-truncated"}


def test_another_file(tmp_path: Path) -> None:
    path = write(tmp_path, params=None)
    other = tmp_path / "weights.bin"
    other.write_bytes(FILE)
    assert ids(examine(path)) == {"params-missing"}
    assert ids(examine(path, other)) == set()
    with pytest.raises(CkptError, match="does not exist"):
        examine(path, tmp_path / "none")
    with pytest.raises(CorruptError, match="cannot be read"):
        examine(path, tmp_path)


def test_a_program_without_parameters(tmp_path: Path) -> None:
    assert ids(examine(write(tmp_path / "a", usual([]), None))) == set()
    # paddle.jit.load refuses any file beside such a program, also an empty one.
    assert ids(examine(write(tmp_path / "b", usual([]), b""))) == {"params-count"}


def test_parameters_of_a_broken_program_are_not_compared(tmp_path: Path) -> None:
    assert ids(examine(write(tmp_path, b"{", FILE[:-1]))) == {"json"}


def test_varints() -> None:
    assert varint(300) == b"\xac\x02"
    assert record_head("F32", (300,))[-5:] == b"\x08\x05\x10\xac\x02"
