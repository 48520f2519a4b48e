"""PIR programs: what is read of them, and everything that can be wrong with one, each with its own identifier."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpttool.containers import json_stream as _json_stream
from ckpttool.errors import CorruptError, IncompleteError
from ckpttool.formats.paddle.pir import NEWEST, PROBLEMS, looks_like_pir, read_pir
from ckpttool.formats.paddle.pir_patches import patched
from ckpttool.formats.paddle.program_parts import Program, ProgramTensor
from tests.convert_json.programs import (
    attribute,
    block,
    dense,
    dumped,
    find,
    operator,
    ops_of,
    parameter,
    program,
    region,
    usual,
    write,
)

PROGRAMS = Path(__file__).parents[2] / "fixtures/paddle_programs"
Data = dict[str, Any]


def read(tmp_path: Path, data: Any) -> Program:
    return read_pir(write(tmp_path, data, None))


def ids(program: Program) -> set[str]:
    return {p.id for p in program.problems}


# -- right programs


def test_what_is_read(tmp_path: Path) -> None:
    found = read(tmp_path, usual())
    assert found.problems == []
    assert (found.kind, found.version, found.trainable, found.blocks) == ("pir", 4, True, 3)
    assert found.parameters == [
        ProgramTensor("linear_0.b_0", "F32", (4,)),
        ProgramTensor("linear_0.w_0", "F32", (4, 4)),
        ProgramTensor("steps", "I64", (3,)),
    ]
    assert found.inputs == [ProgramTensor("x", "F32", (-1, 4))]
    assert found.outputs == [ProgramTensor("out", "F32", (-1, 4))]
    assert found.operators["builtin.parameter"] == 3
    assert found.operators["pd_op.if"] == 1
    assert found.operators["cf.yield"] == 2
    assert found.elements == {"F32": 8, "I64": 1, "BOOL": 1}


WRITTEN = {str(p.relative_to(PROGRAMS)): p for p in sorted(PROGRAMS.rglob("*.json")) if looks_like_pir(p)}
MISTAKES = {
    "nan.json": {"attribute-nan"},
    "nan_attr/model.json": {"attribute-nan"},
    "pir_static/nontrainable.json": {"parameter-flags"},
    "same_name/inference.json": {"parameter-shared"},
}
"""Of Paddle's own."""


@pytest.mark.parametrize("name", WRITTEN)
def test_what_paddle_wrote(name: str) -> None:
    found = read_pir(WRITTEN[name])
    assert ids(found) == MISTAKES.get(name, set())
    assert found.version == NEWEST


@pytest.mark.sample("7", "64", "1000")
@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_the_size_of_a_chunk_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """Operators that are longer than what is read at a time are read part by part."""
    data = usual()
    find(data, "1.data")["A"].append(attribute("text", "0.a_str", 'ä€🙂"\\VD"' * 20))
    whole = read(tmp_path, data)
    monkeypatch.setattr(_json_stream.JsonStream.__init__, "__defaults__", (chunk,))
    for text in (dumped(data), json.dumps(data, indent=4).encode()):
        parts = read(tmp_path, text)
        assert parts.problems == []
        assert (parts.parameters, parts.operators, parts.blocks) == (whole.parameters, whole.operators, whole.blocks)
        assert parts.elements == whole.elements


def test_large_regions_are_read_in_passing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_json_stream.JsonStream.__init__, "__defaults__", (4096,))
    data = usual()
    body = [operator("1.relu", [5], [1000])]
    body += [operator("1.relu", [i], [i + 1]) for i in range(1000, 3000)]
    body += [operator("2.yield", [3000], []), operator("1.relu", [999_999], [3001])]
    branch = find(data, "1.if")
    branch["regions"] = [region(block(body)), region(block([operator("1.abs", [2000], [4000])]))]
    found = read(tmp_path, data)
    assert found.operators.total() == 8 + len(body) + 1
    assert [(p.id, p.where) for p in found.problems] == [
        ("value-scope", "block 0 operator 6, region 1 block 0 operator 0 (pd_op.abs)"),
        ("value-undefined", "block 0 operator 6, block 0 operator 2002 (pd_op.relu)"),
    ]


@pytest.mark.parametrize("chunk", [64, 1000, 1 << 20])
def test_long_lists_are_read_in_passing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """The constants of an operator may be most of a program."""
    monkeypatch.setattr(_json_stream.JsonStream.__init__, "__defaults__", (chunk,))
    data = usual()
    values: list[Data] = [{"#": "0.a_f64", "D": i / 7} for i in range(900)]
    leaky = find(data, "1.leaky_relu")
    leaky["A"] += [attribute("values", "0.a_array", values), attribute("dims", "1.a_intarray", list(range(2000)))]
    leaky["A"] += [
        attribute("texts", "0.a_array", [{"#": "0.a_str", "D": "},{,]"}] * 200),
        attribute("none", "0.a_array", []),
    ]
    assert read(tmp_path, data).problems == []
    values[700] = {"#": "0.a_f64", "VD": "NaN"}
    values[899] = {"#": "0.a_f64", "D": "0"}
    assert [p.id for p in read(tmp_path, data).problems] == ["attribute-nan", "attribute"]
    values[1] = {"D": 1}
    assert ids(read(tmp_path, data)) == {"structure"} | ({"attribute", "attribute-nan"} if chunk < 1 << 20 else set())
    text = dumped(data)
    assert ids(read(tmp_path, text.replace(b"1999]", b"1999"))) == {"json"}
    assert ids(read(tmp_path, text.replace(b"1998,1999", b"1998,,1999"))) == {"json"}


@pytest.mark.parametrize(("depth", "chunk"), [(100, 1 << 20), (5000, 1 << 20), (100, 512), (5000, 512)])
def test_blocks_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int, chunk: int) -> None:
    monkeypatch.setattr(_json_stream.JsonStream.__init__, "__defaults__", (chunk,))
    text = dumped(usual())
    mark = b'{"#":"1.abs","A":[],"I":[{"%":5}]'
    open_, close = text[: text.index(mark)], text[text.index(mark) :]
    inner = b'{"#":"1.if","A":[],"I":[{"%":6}],"O":[],"OA":[],"regions":[{"#":"r","blocks":[{"#":"b","args":[],"ops":['
    found = read(tmp_path, open_ + inner * depth + b"]}]}]}" * depth + b"," + close)
    assert ids(found) == (set() if depth == 100 else {"json"})


def test_arguments_of_blocks(tmp_path: Path) -> None:
    data = usual()
    loop = operator("1.while", [4], [50])
    inner = operator("1.while", [-1], [51])
    inner["regions"] = [region(block([operator("1.relu", [-1], [52]), operator("1.relu", [-3], [53])], [-3]))]
    loop["regions"] = [region(block([operator("1.relu", [-2], [54]), inner], [-1, -2]))]
    ops_of(data).insert(-1, loop)
    assert read(tmp_path, data).problems == []
    loop["regions"][0]["blocks"][0]["args"].pop()
    assert [(p.id, p.text) for p in read(tmp_path, data).problems] == [
        ("value-undefined", "value -2 is taken, and no operator defines it")
    ]


def test_arguments_may_stand_behind_the_operators(tmp_path: Path) -> None:
    """The order of names in a JSON object means nothing, also not to Paddle."""
    data = usual()
    loop = operator("1.while", [4], [50])
    inside = block([operator("1.relu", [-1], [51])], [-1])
    loop["regions"] = [region({k: inside[k] for k in ("ops", "args", "#")})]
    ops_of(data).insert(-1, loop)
    text = json.dumps(data).encode()
    assert text.index(b'"ops": [{"#": "1.relu", "A": [], "I": [{"%": -1}]') < text.index(b'"args": [{"#": -1')
    assert read(tmp_path, text).problems == []


def test_data_that_persists_is_in_the_parameter_file(tmp_path: Path) -> None:
    """The moments of a training program are not parameters by their operator."""
    data = usual()
    moment = find(data, "1.data")
    state = copy.deepcopy(moment)
    state["A"][0]["AT"]["D"] = "linear_0.w_0_moment1_0"
    state["O"] = [{"%": 90, "TT": dense("F32", [4, 4])}]
    state["OA"] = [attribute("persistable", "0.a_array", [{"#": "0.a_bool", "D": True}])]
    ops_of(data).insert(0, state)
    found = read(tmp_path, data)
    assert found.problems == []
    assert ProgramTensor("linear_0.w_0_moment1_0", "F32", (4, 4)) in found.parameters
    assert [p.name for p in found.inputs] == ["x"]


def test_parameters_that_are_not_saved(tmp_path: Path) -> None:
    data = usual()
    find(data, "p")["OA"][0] = 0
    assert len(read(tmp_path, data).parameters) == 2


def test_a_parameter_in_the_long_form(tmp_path: Path) -> None:
    data = usual()
    p = find(data, "p")
    booleans = zip(("is_distributed", "is_parameter", "need_clip"), p["A"], strict=False)
    flags = zip(("persistable", "stop_gradient", "trainable"), p["OA"], strict=True)

    def array(value: int) -> list[Data]:
        return [{"#": "0.a_bool", "D": bool(value)}]

    long = {
        "#": "0.parameter",
        "A": [*(attribute(n, "0.a_array", array(v)) for n, v in booleans), attribute("parameter_name", "0.a_str", "w")],
        "I": [],
        "O": [p["O"]],
        "OA": [attribute(n, "0.a_array", array(v)) for n, v in flags],
    }
    ops_of(data)[ops_of(data).index(p)] = long
    found = read(tmp_path, data)
    assert found.problems == []
    assert ProgramTensor("w", "I64", (3,)) in found.parameters


@pytest.mark.parametrize("text", [b"\xef\xbb\xbf" + dumped(usual()), b"\n \t" + dumped(usual()) + b" \r\n"])
def test_what_paddle_reads_too(tmp_path: Path, text: bytes) -> None:
    assert read(tmp_path, text).problems == []


# -- wrong programs: one mistake, one identifier

Change = Callable[[Data], object]
WRONG: dict[str, tuple[str, Change]] = {}


def base(key: str, value: Any) -> Change:
    return lambda d: d["base_code"].update({key: value})


def without(key: str) -> Change:
    return lambda d: find(d, "1.leaky_relu").pop(key)


def valued(kind: str, value: Any) -> Change:
    return lambda d: find(d, "1.leaky_relu")["A"][0].update(AT={"#": kind, "D": value})


def void(spelled: str, kind: str, inside: str = "") -> Change:
    value: Data = {"#": kind, "VD": spelled}
    if inside:
        value = {"#": "0.a_array", "D": [value]}
    return lambda d: find(d, "1.leaky_relu")["A"][0].update(AT=value)


def typed(place: int, item: Any) -> Change:
    return lambda d: find(d, "1.leaky_relu")["O"][0]["TT"]["D"].__setitem__(place, item)


def prepend(op: Any) -> Change:
    return lambda d: ops_of(d).insert(0, op)


def append(op: Any) -> Change:
    return lambda d: ops_of(d).append(op)


def wrong(id_: str, name: str) -> Callable[[Change], Change]:
    def add(change: Change) -> Change:
        WRONG[name] = (id_, change)
        return change

    return add


wrong("magic", "other magic")(lambda d: d["base_code"].update(magic="PIR"))
wrong("magic", "no magic")(lambda d: d["base_code"].pop("magic"))
wrong("magic", "no base_code")(lambda d: d.pop("base_code"))
for value in (0, -1, 4.0, 1.5, "4", True, None):
    wrong("version", f"version {value!r}")(base("version", value))
wrong("version", "no version")(lambda d: d["base_code"].pop("version"))
for number in (5, 99, 2**63):
    wrong("version-newer", f"version {number}")(base("version", number))
wrong("structure", "trainable 1")(base("trainable", 1))
wrong("structure", "no program")(lambda d: d.pop("program"))
wrong("structure", "program is a list")(lambda d: d.update(program=[]))
wrong("structure", "no region")(lambda d: d["program"].update(regions=[]))
wrong("structure", "two regions")(lambda d: d["program"]["regions"].append(region(block([]))))
wrong("structure", "two blocks")(lambda d: d["program"]["regions"][0]["blocks"].append(block([])))
wrong("structure", "a block without args")(lambda d: d["program"]["regions"][0]["blocks"][0].pop("args"))
wrong("structure", "an inner block without args")(lambda d: find(d, "1.if")["regions"][0]["blocks"][0].pop("args"))
wrong("structure", "an argument without a number")(
    lambda d: d["program"]["regions"][0]["blocks"][0].update(args=[{"TT": dense("F32", [1])}])
)
for key in ("#", "I", "O", "A"):
    wrong("structure", f"an operator without {key}")(without(key))
wrong("structure", "an operator that is a text")(prepend("relu"))
wrong("structure", "a result without a number")(lambda d: find(d, "1.leaky_relu")["O"][0].pop("%"))
wrong("structure", "a result without a type")(lambda d: find(d, "1.leaky_relu")["O"][0].pop("TT"))
wrong("structure", "an operand that is a text")(lambda d: find(d, "1.leaky_relu")["I"][0].update({"%": "4"}))
wrong("structure", "a type cut short")(lambda d: find(d, "1.leaky_relu")["O"][0]["TT"]["D"].pop())
wrong("structure", "an attribute without a type")(lambda d: find(d, "1.leaky_relu")["A"][0].pop("AT"))
wrong("structure", "a parameter of three attributes")(lambda d: find(d, "p")["A"].pop(0))
wrong("structure", "a parameter of five attributes")(lambda d: find(d, "p")["A"].append(1))
wrong("structure", "a parameter of two flags")(lambda d: find(d, "p")["OA"].pop())
wrong("structure", "a parameter without flags")(lambda d: find(d, "p").pop("OA"))
wrong("structure", "a parameter without a name")(lambda d: find(d, "p")["A"].__setitem__(3, None))
wrong("structure", "a parameter without a shape")(lambda d: find(d, "p")["O"]["TT"]["D"].__setitem__(1, [-1, 3]))
wrong("structure", "a parameter that is no tensor")(lambda d: find(d, "p")["O"].update(TT={"#": "0.t_vec", "D": []}))
wrong("structure", "attributes that are no list")(lambda d: find(d, "1.leaky_relu").update(A={}))
wrong("structure", "an attribute without a name")(lambda d: find(d, "1.leaky_relu")["A"][0].update(N=None))
wrong("structure", "an element type that is a number")(
    lambda d: find(d, "1.leaky_relu")["O"][0]["TT"]["D"][0].update({"#": 7})
)
wrong("structure", "a parameter of ten axes")(lambda d: find(d, "p")["O"]["TT"]["D"].__setitem__(1, [1] * 10))
for place, item in ((1, 3), (1, [1, "x"]), (2, "FOO"), (2, 7), (3, 3), (3, ["a"]), (4, "a")):
    wrong("structure", f"{item} at place {place} of a type")(typed(place, item))
wrong("attribute", "0.a_f32 that is infinite as such")(
    lambda d: find(d, "1.leaky_relu")["A"].append(attribute("more", "0.a_f32", 1e39))
)
wrong("type", "a result of an unknown element type")(
    lambda d: find(d, "1.leaky_relu")["O"][0]["TT"]["D"].__setitem__(0, {"#": "0.t_f7"})
)
wrong("type", "a parameter of an unknown element type")(
    lambda d: find(d, "p")["O"]["TT"]["D"].__setitem__(0, {"#": "0.t_ui64"})
)
wrong("type", "a result of an unknown type")(lambda d: find(d, "1.leaky_relu")["O"][0].update(TT={"#": "0.t_foo"}))
wrong("value-undefined", "an operand that nobody defines")(lambda d: find(d, "1.leaky_relu")["I"][0].update({"%": 999}))
wrong("value-undefined", "an argument that no block has")(lambda d: find(d, "1.leaky_relu")["I"][0].update({"%": -7}))
wrong("value-order", "an operand of later")(lambda d: find(d, "1.leaky_relu")["I"][0].update({"%": 9}))


@wrong("value-order", "parameters at the end")
def _late(d: Data) -> None:
    ops_of(d).append(ops_of(d).pop(0))
    find(d, "1.leaky_relu")["I"].append({"%": 3})


wrong("value-scope", "an operand from inside")(lambda d: find(d, "1.fetch")["I"][0].update({"%": 7}))
wrong("value-scope", "an operand from the other branch")(
    lambda d: find(d, "1.if")["regions"][1]["blocks"][0]["ops"][0]["I"][0].update({"%": 7})
)
wrong("value-twice", "a value again")(append(operator("1.relu", [5], [5])))
wrong("value-twice", "the value that means none")(append(operator("1.relu", [5], [0])))
wrong("value-twice", "a value that was inside")(append(operator("1.relu", [5], [7])))
wrong("value-twice", "the input again")(
    lambda d: ops_of(d).insert(ops_of(d).index(find(d, "1.data")) + 1, operator("1.relu", [4], [4]))
)
wrong("operator", "a dialect in full")(lambda d: find(d, "1.leaky_relu").update({"#": "pd_op.leaky_relu"}))
wrong("operator", "no dialect")(lambda d: find(d, "1.leaky_relu").update({"#": "leaky_relu"}))
wrong("operator", "an unknown dialect")(lambda d: find(d, "1.leaky_relu").update({"#": "9.leaky_relu"}))
wrong("parameter-twice", "two parameters, one name")(lambda d: find(d, "p")["A"].__setitem__(3, "linear_0.w_0"))
wrong("parameter-shared", "a parameter twice")(prepend(parameter(70, "steps", "I64", [3])))
wrong("parameter-nested", "a parameter in a branch")(
    lambda d: find(d, "1.if")["regions"][0]["blocks"][0]["ops"].insert(0, parameter(71, "inside", "F32", [1]))
)
for kind, data in (
    ("0.a_f64", None),
    ("0.a_f32", "0.25"),
    ("0.a_f64", True),
    ("0.a_bool", 1),
    ("0.a_i32", "3"),
    ("0.a_i64", [1]),
    ("0.a_str", 1),
    ("0.a_array", 1),
    ("0.a_array", [{"#": "0.a_bool", "D": 0}]),
    ("1.a_intarray", 3),
    ("1.a_dtype", 5),
    ("0.a_foo", 1),
    ("1.a_foo", 1),
):
    wrong("attribute", f"{kind} {data}")(valued(kind, data))
for where, kind in (("", "0.a_f32"), ("", "0.a_f64"), (" in a list", "0.a_f64")):
    wrong("attribute-nan", f"{kind}{where} NaN")(void("NaN", kind, where))
    for spelled in ("nan", "Infinity", "inf", "+INF", "1.5", ""):
        wrong("attribute-void", f"{kind}{where} {spelled}")(void(spelled, kind, where))
wrong("attribute-void", "no number at all")(void("INF", "0.a_i32"))
wrong("attribute-void", "a scalar")(void("INF", "1.a_scalar"))
wrong("attribute-void", "no value")(lambda d: find(d, "1.leaky_relu")["A"][0].update(AT={"#": "0.a_f32"}))


@wrong("parameter-flags", "saved as not trainable")
def _not_trainable(d: Data) -> None:
    d["base_code"]["trainable"] = False
    for op in ops_of(d):
        op.pop("OA", None)


def test_every_problem_has_a_case() -> None:
    assert {id_ for id_, _ in WRONG.values()} | {"json"} == PROBLEMS.keys()


@pytest.mark.parametrize("name", WRONG)
def test_one_mistake_is_one_identifier(tmp_path: Path, name: str) -> None:
    data = usual()
    id_, change = WRONG[name]
    change(data)
    assert ids(read(tmp_path, data)) == {id_}


@pytest.mark.parametrize("spelled", ["NAN", "INF", "-INF"])
def test_spellings_that_paddle_reads(tmp_path: Path, spelled: str) -> None:
    data = usual()
    find(data, "1.leaky_relu")["A"][0]["AT"] = {"#": "0.a_f64", "VD": spelled}
    assert read(tmp_path, data).problems == []


def test_a_value_beside_the_spelling_counts(tmp_path: Path) -> None:
    data = usual()
    find(data, "1.leaky_relu")["A"][0]["AT"] = {"#": "0.a_f64", "VD": "NaN", "D": 0.5}
    assert read(tmp_path, data).problems == []


TEXT = dumped(usual())


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"   ",
        TEXT[: len(TEXT) // 2],
        TEXT[:-1],
        TEXT + b"x",
        TEXT + b"{}",
        TEXT + b"\0",
        TEXT[:-1] + b",}",
        b"\n\xef\xbb\xbf" + TEXT,
        b"{/* */" + TEXT[1:],
        TEXT.decode().encode("utf-16"),
        TEXT.replace(b"NCHW", b"NC\xff\xfe", 1),
        TEXT.replace(b"0.25", b"NaN"),
        TEXT.replace(b"0.25", b"Infinity"),
        TEXT.replace(b"0.25", b"1e400"),
        TEXT.replace(b"0.25", b"9" * 5000),
        TEXT.replace(b"0.25", b"[" * 100_000),
        TEXT.replace(b'"linear_0.w_0"', b'"linear\n"'),
        b'{"base_code":' * 3,
    ],
    ids=lambda t: str(t[-20:]),
)
def test_what_is_not_json(tmp_path: Path, text: bytes) -> None:
    found = read(tmp_path, text)
    assert ids(found) == {"json"}
    assert "byte" in found.problems[0].where


@pytest.mark.parametrize("text", [b"[]", b"4", b'"pir"', b"null", b"{}", b'{"a": 1}', b'{"base_code": []}'])
def test_json_that_is_no_program(tmp_path: Path, text: bytes) -> None:
    assert ids(read(tmp_path, text)) == {"magic"}


def test_a_section_twice(tmp_path: Path) -> None:
    """Paddle takes the last one; whoever wrote two did not mean that."""
    text = TEXT[:-1] + b',"program":{}}'
    assert ids(read(tmp_path, text)) == {"structure"}


@pytest.mark.parametrize("cut", range(0, len(TEXT), 97))
def test_a_file_that_is_cut_off(tmp_path: Path, cut: int) -> None:
    assert ids(read(tmp_path, TEXT[:cut])) == {"json"}


def test_many_findings_are_counted(tmp_path: Path) -> None:
    data = program([operator("1.relu", [1000 + i], [i]) for i in range(1, 100)])
    found = read(tmp_path, data)
    assert len(found.problems) == 20
    assert found.more == {"value-undefined": 79}


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(IncompleteError, match="does not exist"):
        read_pir(tmp_path / "none.json")
    with pytest.raises(CorruptError, match="cannot be read"):
        read_pir(tmp_path)


# -- versions


def test_patches_of_earlier_versions(tmp_path: Path) -> None:
    data = usual()
    ops_of(data).append(operator("1.pool2d", [5], [80]))
    ops_of(data).append(operator("1.pool2d", [5], [81]))
    ops_of(data).append(operator("1.kthvalue", [5], [82]))
    said = {}
    for version in (1, 2, 3, 4):
        data["base_code"]["version"] = version
        found = read(tmp_path, data)
        assert found.problems == []
        said[version] = [str(p) for p in patched(found)]
    pools = "2 pd_op.pool2d: strides i64[], paddings i64[]"
    assert said[2] == said[1] == [pools, "pd_op.kthvalue: k i64", "pd_op.leaky_relu: negative_slope f64"]
    assert said[3] == said[2][1:]
    assert said[4] == []
