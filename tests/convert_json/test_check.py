"""``--check`` and ``--fix``: what is reported besides the findings of the readers, and the repair of NaN."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from ckpttool.answers.findings import PROGRAM, CheckResult
from ckpttool.errors import CkptError, IncompleteError, OutputError, UnsupportedError, UsageError
from ckpttool.formats.paddle.pir import read_pir
from ckpttool.ops.convert_json.check import check_program, repair
from tests.convert_json.programs import Parameter, dumped, find, ops_of, parameter, program, records, usual, write

PROGRAMS = Path(__file__).parents[2] / "fixtures/paddle_programs"


def ids(result: CheckResult) -> list[str]:
    return [f.id for f in result.findings]


def test_a_sound_program(tmp_path: Path) -> None:
    result = check_program(write(tmp_path))
    assert result.ok
    assert result.findings == []
    assert result.checked == {"operator": 12, "parameter": 3, "record": 3}


def test_patches_are_said(tmp_path: Path) -> None:
    data = usual()
    data["base_code"]["version"] = 3
    result = check_program(write(tmp_path, data))
    assert result.ok
    assert [(f.id, f.text) for f in result.findings] == [
        ("version-patched", "version 3: Paddle changes pd_op.leaky_relu: negative_slope f64 (patch 4)")
    ]


def test_infinities_are_said() -> None:
    """They are right for the Paddle that is known here."""
    result = check_program(PROGRAMS / "inf.json")
    assert result.ok
    assert [f.id for f in result.findings] == ["attribute-inf"]
    assert result.findings[0].text.startswith("an attribute is infinite")


def test_float8_is_said(tmp_path: Path) -> None:
    parameters: list[Parameter] = [("w", "F8_E4M3", [4]), ("v", "F8_E5M2", [4])]
    data = program([parameter(i + 1, *p) for i, p in enumerate(parameters)])
    result = check_program(write(tmp_path, data, b"".join(records(parameters))))
    assert result.ok
    assert [(f.id, f.text) for f in result.findings] == [
        ("float8", "1 value in F8_E4M3 and 1 value in F8_E5M2, 2 of them parameters (`v`)")
    ]


def test_structured_names(tmp_path: Path) -> None:
    names = {
        "w": np.zeros((2, 8), np.float32),
        "b": np.zeros(4, np.float32),
        "StructuredToParameterName@@": {"w": "linear_0.w_0", "b": "linear_0.b_0", "gone": "pruned_0"},
    }
    path = tmp_path / "names.pdparams"
    path.write_bytes(pickle.dumps(names))
    src = write(tmp_path)
    result = check_program(src, names=path)
    assert sorted(ids(result)) == ["names-missing", "names-shape"]
    assert not result.ok
    path.write_bytes(pickle.dumps({"StructuredToParameterName@@": {"w": "other_0"}}))
    assert ids(check_program(src, names=path)) == ["names-none"]
    path.write_bytes(pickle.dumps({"StructuredToParameterName@@": {"steps": "linear_0.w_0"}}))
    assert sorted(ids(check_program(src, names=path))) == ["names-missing", "names-twice"]
    path.write_bytes(b"")
    assert ids(check_program(src, names=path)) == ["unreadable"]
    assert ids(check_program(src, names=tmp_path / "none")) == ["unreadable"]
    os.mkfifo(tmp_path / "pipe.info")
    assert ids(check_program(src, names=tmp_path / "pipe.info")) == ["unreadable"]


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    path = write(tmp_path, params=None)
    (tmp_path / "dir").mkdir()
    assert ids(check_program(path, tmp_path / "dir")) == ["unreadable"]
    (tmp_path / "empty.pdmodel").write_bytes(b"")
    assert ids(check_program(tmp_path / "empty.pdmodel")) == ["unreadable"]


@pytest.mark.parametrize("name", ["none.json", "model.safetensors", "model.pdparams", "README", "."])
def test_what_is_no_program_at_all(tmp_path: Path, name: str) -> None:
    for other in ("model.safetensors", "model.pdparams", "README"):
        (tmp_path / other).write_bytes(b"")
    with pytest.raises(UsageError if name != "." else IncompleteError):
        check_program(tmp_path / name)


def test_pipes_are_not_waited_for(tmp_path: Path) -> None:
    src = write(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert ids(check_program(src, tmp_path / "pipe")) == ["unreadable"]


def test_findings_beyond_the_first_are_counted(tmp_path: Path) -> None:
    data = usual()
    for op in ops_of(data):
        op["O"] = op["O"] if op["#"] != "1.leaky_relu" else []
    ops_of(data).extend([dict(find(data, "1.fetch"), I=[{"%": 500 + i}], O=[]) for i in range(50)])
    result = check_program(write(tmp_path, data))
    assert ids(result).count("structure") + ids(result).count("value-undefined") >= 21
    assert "more of this kind" in result.findings[-1].text


def test_every_identifier_has_a_severity() -> None:
    assert set(PROGRAM.values()) == {"error", "warning", "info"}


# -- repair


def spelled(text: str, indent: int | None = None) -> bytes:
    data = usual()
    data["base_code"]["note"] = '"VD":"NaN" in a text stays'
    for op in ops_of(data):
        if op["#"] == "1.leaky_relu":
            op["A"][0]["AT"] = {"#": "0.a_array", "D": [{"#": "0.a_f64", "VD": text}, {"#": "0.a_f32", "VD": "-INF"}]}
            op["A"].append({"N": "again", "AT": {"#": "0.a_f32", "VD": text}})
    return dumped(data) if indent is None else json.dumps(data, indent=indent, ensure_ascii=False).encode()


@pytest.mark.product
@pytest.mark.parametrize("indent", [None, 0, 4])
@pytest.mark.parametrize("chunk", [1, 10, 1 << 20])
def test_only_the_spelling_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, indent: int | None, chunk: int
) -> None:
    from ckpttool.ops.convert_json import check

    monkeypatch.setattr(check, "_CHUNK", chunk)
    src = write(tmp_path, spelled("NaN", indent))
    assert ids(check_program(src)) == ["attribute-nan", "attribute-nan", "attribute-inf"]
    done = repair(src, tmp_path / "fixed.json")
    assert done.count == 2
    assert (tmp_path / "fixed.json").read_bytes() == spelled("NAN", indent)
    assert read_pir(tmp_path / "fixed.json").problems == []


def test_what_paddle_wrote(tmp_path: Path) -> None:
    assert repair(PROGRAMS / "nan.json", tmp_path / "fixed.json").count == 1
    assert (tmp_path / "fixed.json").read_bytes() == (PROGRAMS / "nan_fixed.json").read_bytes()


def test_nothing_to_repair_is_a_copy(tmp_path: Path) -> None:
    src = write(tmp_path)
    assert repair(src, tmp_path / "copy.json").count == 0
    assert (tmp_path / "copy.json").read_bytes() == src.read_bytes()


def test_a_value_beside_the_spelling_stays(tmp_path: Path) -> None:
    """Paddle takes the value then, and would take NaN once the spelling is right."""
    data = usual()
    find(data, "1.leaky_relu")["A"][0]["AT"] = {"#": "0.a_f64", "D": 0.5, "VD": "NaN"}
    src = write(tmp_path, data)
    with pytest.raises(UnsupportedError, match="only the value counts"):
        repair(src, tmp_path / "out.json")
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize("written", [b'"VD":' + b" " * 70 + b'"NaN"', b'"VD":"N\\u0061N"'])
def test_other_ways_to_write_it(tmp_path: Path, written: bytes) -> None:
    src = write(tmp_path, spelled("NaN").replace(b'"VD":"NaN"', written, 1))
    assert "attribute-nan" in ids(check_program(src))
    with pytest.raises(UnsupportedError, match="in a way that is not repaired"):
        repair(src, tmp_path / "out.json")


def test_permissions_stay(tmp_path: Path) -> None:
    src = write(tmp_path, spelled("NaN"))
    src.chmod(0o640)
    repair(src, tmp_path / "out.json")
    assert (tmp_path / "out.json").stat().st_mode & 0o777 == 0o640
    (tmp_path / "out.json").chmod(0o600)
    repair(src, tmp_path / "out.json", force=True)
    assert (tmp_path / "out.json").stat().st_mode & 0o777 == 0o600


def test_many_are_repaired(tmp_path: Path) -> None:
    """More than are listed."""
    data = usual()
    nan = {"N": "n", "AT": {"#": "0.a_f32", "VD": "NaN"}}
    find(data, "1.leaky_relu")["A"] += [nan] * 100
    assert repair(write(tmp_path, data), tmp_path / "out.json").count == 100


def test_what_is_not_repaired(tmp_path: Path) -> None:
    src = write(tmp_path, spelled("NaN"))
    (tmp_path / "names.json").write_text("x")
    with pytest.raises(UsageError, match="is the program itself"):
        repair(src, src)
    with pytest.raises(UsageError, match="is the program itself"):
        repair(src, src, force=True)
    with pytest.raises(UsageError, match="goes with it"):
        repair(src, tmp_path / "names.json", force=True, apart=(None, tmp_path / "names.json"))
    (tmp_path / "names.json").unlink()
    for other in ("model.pdiparams", "new.safetensors", "new.pdmodel"):
        with pytest.raises(UsageError, match="PIR"):
            repair(src, tmp_path / other, force=True)
    (tmp_path / "there.json").write_text("mine")
    with pytest.raises(OutputError, match="exists"):
        repair(src, tmp_path / "there.json")
    repair(src, tmp_path / "there.json", force=True)
    assert (tmp_path / "there.json").read_bytes() == spelled("NAN")
    with pytest.raises(CkptError):
        repair(src, tmp_path / "none/out.json")
    with pytest.raises(UsageError, match="PIR"):
        repair(PROGRAMS / "legacy/model.pdmodel", tmp_path / "out.json")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.json", "model.pdiparams", "there.json"]


def test_broken_json_is_not_copied_in_silence(tmp_path: Path) -> None:
    src = write(tmp_path, spelled("NaN")[:-3])
    with pytest.raises(CkptError):
        repair(src, tmp_path / "out.json")
    assert not (tmp_path / "out.json").exists()
