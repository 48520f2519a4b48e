"""A program's parameters as safetensors, and back: the same bytes, or nothing."""

from __future__ import annotations

import base64
import copy
import json
import os
import pickle
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from ckpttool.containers.safetensors import read_header
from ckpttool.errors import CkptError, ConflictError, CorruptError, OutputError, UsageError, VerifyError
from ckpttool.execute import NoProgress, RunOptions
from ckpttool.execute.verification import Checks
from ckpttool.ops.convert_json.convert import METADATA, PreparedConversion, execute, from_safetensors, to_safetensors
from tests.convert_json.programs import (
    ELEMENTS,
    PARAMETERS,
    Parameter,
    data_of,
    dumped,
    parameter,
    program,
    record,
    records,
    usual,
    write,
)
from tests.helpers.sample import examples

PROGRAMS = Path(__file__).parents[2] / "fixtures/paddle_programs"
ALL = {
    str(p.relative_to(PROGRAMS)): p
    for p in sorted([*PROGRAMS.rglob("*.json"), *PROGRAMS.rglob("*.pdmodel")])
    if p.with_name(p.name.removesuffix(".json").removesuffix(".pdmodel") + ".pdiparams").is_file()
}


def params_of(path: Path) -> Path:
    return path.with_name(path.name.removesuffix(".json").removesuffix(".pdmodel") + ".pdiparams")


def run(conversion: PreparedConversion, dst: Path, **options: Any) -> None:
    execute(conversion, dst, RunOptions(**options), NoProgress())


def there(src: Path, dst: Path, **how: Any) -> Path:
    run(to_safetensors(src, dst, **how), dst)
    return dst


def back(src: Path, dst: Path, path: Path, **how: Any) -> bytes:
    """The parameter file that comes of ``src``."""
    run(from_safetensors(src, dst, path, **how), dst)
    return (dst / params_of(path).name).read_bytes()


# -- there and back


@pytest.mark.sample(
    "False-inf_attr/model.json",
    "False-legacy_regions/model.pdmodel",
    "False-pir_static/nontrainable.json",
    "False-tied/model.json",
    "True-legacy/model.pdmodel",
    "True-nan_attr/model.json",
    "True-regions/model.json",
    "True-same_name/inference.json",
    "True-two_functions_combine/model.encode.json",
)
@pytest.mark.parametrize("name", [n for n in ALL if n != "two_functions_combine/model.json"])
@pytest.mark.parametrize("shards", [False, True])
def test_what_paddle_wrote(tmp_path: Path, name: str, shards: bool) -> None:
    path = ALL[name]
    dst = tmp_path / ("out" if shards else "out.safetensors")
    there(path, dst, **({"max_shard_size": 200} if shards else {}))
    assert back(dst, tmp_path / "back", path) == params_of(path).read_bytes()
    assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes()


def test_the_values(tmp_path: Path) -> None:
    expected = np.load(PROGRAMS / "expected_by_param_name.npz")
    found = load_file(there(PROGRAMS / "pir/model.json", tmp_path / "out.safetensors"))
    assert set(found) == set(expected.files)
    for name in found:
        assert np.array_equal(found[name], expected[name])


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("pir/model.json", "model.pdparams"),
        ("legacy/model.pdmodel", "legacy/model.pdiparams.info"),
        ("legacy/model.pdmodel", ""),
    ],
)
def test_structured_names(tmp_path: Path, path: str, names: str) -> None:
    """A legacy export has them beside it."""
    src = PROGRAMS / path
    how = {"names": PROGRAMS / names} if names else {}
    expected = np.load(PROGRAMS / "expected_structured.npz")
    out = there(src, tmp_path / "out.safetensors", **how)
    found = load_file(out)
    assert set(found) == set(expected.files)
    for name in found:
        assert np.array_equal(found[name], expected[name])
    assert back(out, tmp_path / "back", src) == params_of(src).read_bytes()


def test_tied_weights_have_one_of_their_names(tmp_path: Path) -> None:
    src = PROGRAMS / "tied/model.json"
    conversion = to_safetensors(src, tmp_path / "out.safetensors", names=PROGRAMS / "tied/model.pdparams")
    assert any("several names" in n for n in conversion.notes)
    run(conversion, tmp_path / "out.safetensors")
    assert back(tmp_path / "out.safetensors", tmp_path / "back", src) == params_of(src).read_bytes()


def test_tensors_from_elsewhere_need_names(tmp_path: Path) -> None:
    """What paddle.save or PaddleNLP wrote as safetensors knows nothing of the program."""
    src = PROGRAMS / "pir/model.json"
    tensors = load_file(there(src, tmp_path / "out.safetensors", names=PROGRAMS / "model.pdparams"))
    save_file(tensors, tmp_path / "bare.safetensors")
    with pytest.raises(ConflictError, match="is missing") as e:
        from_safetensors(tmp_path / "bare.safetensors", tmp_path / "back", src)
    assert "--names" in str(e.value.hint)
    given = back(tmp_path / "bare.safetensors", tmp_path / "back", src, names=PROGRAMS / "model.pdparams")
    assert given == params_of(src).read_bytes()


def test_an_edited_weight(tmp_path: Path) -> None:
    src = write(tmp_path / "src")
    out = there(src, tmp_path / "out.safetensors")
    header = read_header(out)
    tensors = load_file(out)
    tensors["linear_0.w_0"] = tensors["linear_0.w_0"].T.copy()
    save_file(tensors, tmp_path / "edited.safetensors", header.metadata)
    changed = back(tmp_path / "edited.safetensors", tmp_path / "back", src)
    before = params_of(src).read_bytes()
    assert changed != before
    assert len(changed) == len(before)


NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda n: n not in ("__metadata__", "x", "out")
)


@given(
    st.dictionaries(
        NAMES, st.tuples(st.sampled_from(sorted(ELEMENTS)), st.lists(st.integers(0, 4), max_size=4)), min_size=1
    ),
    st.booleans(),
)
@settings(max_examples=examples(20), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_program(tmp_path: Path, named: dict[str, tuple[str, list[int]]], levels: bool) -> None:
    shutil.rmtree(tmp_path / "work", ignore_errors=True)
    parameters: list[Parameter] = [(n, *rest) for n, rest in named.items()]
    rows = [
        record(d, s, data_of((n, d, s), i), levels=[bytes(16)] if levels and i % 2 else [])
        for i, (n, d, s) in enumerate(sorted(parameters))
    ]
    data = program([parameter(i + 1, *p) for i, p in enumerate(parameters)])
    src = write(tmp_path / "work", data, b"".join(rows))
    out = there(src, tmp_path / "work/out.safetensors")
    with safe_open(out, "np") as f:
        assert set(f.keys()) == set(named)
    assert back(out, tmp_path / "work/back", src) == b"".join(rows)


def test_a_parameter_that_has_a_reserved_name(tmp_path: Path) -> None:
    parameters: list[Parameter] = [("__metadata__", "F32", [1])]
    data = program([parameter(1, *parameters[0])])
    src = write(tmp_path, data, b"".join(records(parameters)))
    with pytest.raises(CkptError, match="__metadata__"):
        to_safetensors(src, tmp_path / "out.safetensors")


def test_complex_numbers_have_two_parts(tmp_path: Path) -> None:
    parameters: list[Parameter] = [("c", "C128", [3])]
    values = np.array([1 + 2j, 3 - 4j, 1e300j])
    src = write(tmp_path, program([parameter(1, *parameters[0])]), record("C128", [3], values.tobytes()))
    out = there(src, tmp_path / "out.safetensors")
    found = load_file(out)["c"]
    assert found.dtype == np.float64
    assert np.array_equal(found[:, 0] + 1j * found[:, 1], values)
    assert back(out, tmp_path / "back", src) == params_of(src).read_bytes()


def test_shards_have_an_index(tmp_path: Path) -> None:
    src = write(tmp_path / "src")
    out = there(src, tmp_path / "out", max_shard_size=90)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert sorted(index["weight_map"]) == [p[0] for p in PARAMETERS]
    assert len(set(index["weight_map"].values())) == 2
    assert back(out / "model.safetensors.index.json", tmp_path / "back", src) == params_of(src).read_bytes()


def test_the_parameter_file_keeps_its_name(tmp_path: Path) -> None:
    src = write(tmp_path / "src", params=None)
    other = tmp_path / "src/weights.pdiparams"
    other.write_bytes(b"".join(records()))
    out = there(src, tmp_path / "out.safetensors", params=other)
    run(from_safetensors(out, tmp_path / "back", src), tmp_path / "back")
    assert (tmp_path / "back/weights.pdiparams").read_bytes() == other.read_bytes()


def test_a_program_of_another_name(tmp_path: Path) -> None:
    """paddle.jit.load looks for the parameters under the program's name."""
    src = write(tmp_path / "src")
    out = there(src, tmp_path / "out.safetensors")
    other = shutil.copy(src, tmp_path / "fixed.json")
    run(from_safetensors(out, tmp_path / "back", Path(other)), tmp_path / "back")
    assert (tmp_path / "back/fixed.pdiparams").read_bytes() == params_of(src).read_bytes()


def test_a_broken_program_takes_no_parameters(tmp_path: Path) -> None:
    src = write(tmp_path / "src")
    out = there(src, tmp_path / "out.safetensors")
    src.write_bytes(src.read_bytes()[:-9])
    with pytest.raises(CorruptError, match="cannot be read as JSON"):
        from_safetensors(out, tmp_path / "back", src)


# -- what is refused


def spoiled(tmp_path: Path, change: Any) -> tuple[Path, Path]:
    """A program, and its tensors after ``change``."""
    src = write(tmp_path / "src")
    tensors: dict[str, Any] = load_file(there(src, tmp_path / "out.safetensors"))
    change(tensors)
    save_file(tensors, tmp_path / "spoiled.safetensors")
    return tmp_path / "spoiled.safetensors", src


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("steps"), "`steps` is missing"),
        (lambda t: t.update(more=np.zeros(3, np.float32)), "`more` is not in the program"),
        (lambda t: t.update({"linear_0.w_0": np.zeros((2, 8), np.float32)}), r"is \[2, 8\], the program says \[4, 4\]"),
        (lambda t: t.update({"linear_0.w_0": np.zeros((4, 4), np.float16)}), "is F16, the program says F32"),
        (lambda t: t.update({"linear_0.w_9": t.pop("linear_0.w_0")}), "`linear_0.w_0` is missing .and 1 more"),
    ],
)
def test_other_tensors_than_the_programs(tmp_path: Path, change: Any, said: str) -> None:
    src, path = spoiled(tmp_path, change)
    with pytest.raises(ConflictError, match=said):
        from_safetensors(src, tmp_path / "back", path)


def test_a_legacy_program_brings_its_names(tmp_path: Path) -> None:
    src = PROGRAMS / "legacy/model.pdmodel"
    save_file(load_file(there(src, tmp_path / "out.safetensors")), tmp_path / "bare.safetensors")
    assert back(tmp_path / "bare.safetensors", tmp_path / "back", src) == params_of(src).read_bytes()


@pytest.mark.parametrize("kind", ["equal", "other values", "another shape"])
def test_two_tensors_for_one_parameter(tmp_path: Path, kind: str) -> None:
    """Tied weights under both of their names."""
    src = write(tmp_path / "src")
    out = there(src, tmp_path / "out.safetensors")
    tensors = load_file(out)
    bias = tensors["linear_0.b_0"]
    tensors["bias"] = bias if kind == "equal" else bias + 1 if kind == "other values" else bias[:2]
    way = json.loads(read_header(out).metadata[METADATA]) | {"names": {"bias": "linear_0.b_0"}}
    save_file(tensors, out, {METADATA: json.dumps(way)})
    if kind == "equal":
        assert back(out, tmp_path / "back", src) == params_of(src).read_bytes()
        return
    with pytest.raises(CkptError, match=r"two tensors are the parameter|two copies of"):
        back(out, tmp_path / "back", src)
    assert not (tmp_path / "back").exists()


def test_a_state_dict_with_tied_weights(tmp_path: Path) -> None:
    """What paddle.save writes as safetensors has every name."""
    from ckpttool.formats.paddle.names import read_names

    src = PROGRAMS / "tied/model.json"
    names = read_names(PROGRAMS / "tied/model.pdparams")
    tensors = load_file(there(src, tmp_path / "out.safetensors"))
    every = {n: tensors[p] for p, given in names.of.items() if p in tensors for n in given}
    assert len(every) > len(tensors)
    save_file(every, tmp_path / "every.safetensors")
    given = back(tmp_path / "every.safetensors", tmp_path / "back", src, names=PROGRAMS / "tied/model.pdparams")
    assert given == params_of(src).read_bytes()


@pytest.mark.parametrize(
    "way",
    [
        "{",
        "[]",
        '{"names": 3}',
        '{"names": {"a": 1}}',
        '{"heads": {"a": "!"}}',
        '{"heads": 5}',
        "[" * 5000,
    ],
)
def test_metadata_that_cannot_be_used(tmp_path: Path, way: str) -> None:
    src = write(tmp_path / "src")
    out = there(src, tmp_path / "out.safetensors")
    save_file(load_file(out), out, {METADATA: way})
    with pytest.raises(CorruptError, match=METADATA):
        from_safetensors(out, tmp_path / "back", src)


@pytest.mark.parametrize("params", ["../../x", "..", 5, "model.json", "a\0b.pdiparams", "a" * 300, "\ud800", None])
def test_a_name_that_no_file_could_have(tmp_path: Path, params: Any) -> None:
    """The parameters are then called as the program is."""
    src = write(tmp_path / "src")
    out = there(src, tmp_path / "out.safetensors")
    save_file(load_file(out), out, {METADATA: json.dumps({"params": params})})
    assert back(out, tmp_path / "back", src) == params_of(src).read_bytes()
    assert sorted(p.name for p in (tmp_path / "back").iterdir()) == ["model.json", "model.pdiparams"]


@pytest.mark.parametrize("name", ["weights.bin", "w\u00a0x.pdiparams", "w" * 240 + ".pdiparams"])
def test_parameter_files_of_any_name(tmp_path: Path, name: str) -> None:
    src = write(tmp_path / "src", params=None)
    (tmp_path / "src" / name).write_bytes(b"".join(records()))
    out = there(src, tmp_path / "out.safetensors", params=tmp_path / "src" / name)
    run(from_safetensors(out, tmp_path / "back", src), tmp_path / "back")
    assert (tmp_path / "back" / name).read_bytes() == b"".join(records())


def test_names_that_are_no_text(tmp_path: Path) -> None:
    made = write(tmp_path / "src")
    for suffix in (".json", ".pdiparams"):
        made.with_suffix(suffix).rename(os.fsdecode(os.fsencode(tmp_path) + b"/src/mod\xffel" + suffix.encode()))
    src = Path(os.fsdecode(os.fsencode(tmp_path) + b"/src/mod\xffel.json"))
    out = there(src, tmp_path / "out.safetensors")
    assert back(out, tmp_path / "back", src) == params_of(src).read_bytes()


def test_heads_of_other_records(tmp_path: Path) -> None:
    """Metadata says how a head looks; one that is not that of the parameter is Paddle's usual one."""
    src = write(tmp_path / "src")
    out = there(src, tmp_path / "out.safetensors")
    wrong = [record("F32", [5], b""), record("F32", [4], b"1"), record("F64", [4], b""), b"", b"x" * 40]
    for i, head in enumerate([*wrong, record("F32", [4], b"", version=1)]):
        way = {"heads": {"linear_0.b_0": base64.b64encode(head).decode()}}
        save_file(load_file(out), out, {METADATA: json.dumps(way)})
        assert back(out, tmp_path / f"back{i}", src) == params_of(src).read_bytes()


def pickled(path: Path, value: Any) -> Path:
    path.write_bytes(pickle.dumps(value, protocol=4))
    return path


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ({"StructuredToParameterName@@": {"fc.weight": "linear_7.w_0"}}, "names none of the program's parameters"),
        ({"fc.weight": np.zeros(3)}, "no table"),
        (
            {"StructuredToParameterName@@": {"steps": "linear_0.w_0"}},
            "`steps` would be the name of two parameters",
        ),
        (
            {"w": np.zeros((2, 2), np.float32), "StructuredToParameterName@@": {"w": "linear_0.w_0"}},
            r"`w` is F32 \[2, 2\] in names.pdparams, and `linear_0.w_0` is F32 \[4, 4\]",
        ),
        (
            {"w": np.zeros((4, 4), np.float64), "StructuredToParameterName@@": {"w": "linear_0.w_0"}},
            r"`w` is F64 \[4, 4\] in names.pdparams, and `linear_0.w_0` is F32 \[4, 4\]",
        ),
    ],
)
def test_names_of_another_model(tmp_path: Path, names: dict[str, Any], said: str) -> None:
    src = write(tmp_path / "src")
    with pytest.raises(CkptError, match=said):
        to_safetensors(src, tmp_path / "out.safetensors", names=pickled(tmp_path / "names.pdparams", names))


def test_parameters_without_a_structured_name_keep_theirs(tmp_path: Path) -> None:
    names = {"w": np.zeros((4, 4), np.float32), "StructuredToParameterName@@": {"w": "linear_0.w_0"}}
    src = write(tmp_path / "src")
    conversion = to_safetensors(src, tmp_path / "out.safetensors", names=pickled(tmp_path / "names.pdparams", names))
    assert sorted(t.key.name for t in conversion.catalog) == ["linear_0.b_0", "steps", "w"]
    assert conversion.notes == ["without a structured name: `linear_0.b_0` and 1 more"]


def test_a_program_without_parameters(tmp_path: Path) -> None:
    src = write(tmp_path, usual([]), None)
    with pytest.raises(UsageError, match="no parameters"):
        to_safetensors(src, tmp_path / "out.safetensors")
    save_file({}, tmp_path / "empty.safetensors")
    with pytest.raises(UsageError, match="no parameters"):
        from_safetensors(tmp_path / "empty.safetensors", tmp_path / "back", src)


def test_an_edited_program_is_noted(tmp_path: Path) -> None:
    src = write(tmp_path / "src")
    out = there(src, tmp_path / "out.safetensors")
    data = usual()
    data["more"] = 1
    src.write_bytes(dumped(data))
    assert "is not the program" in from_safetensors(out, tmp_path / "back", src).notes[0]


# -- nothing half-written


def test_a_fault_of_the_disk_is_seen_before_the_name_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    src = write(tmp_path / "src")
    out = there(src, tmp_path / "out.safetensors")

    def spoil(suffix: str) -> None:
        from ckpttool.execute import engine

        write_out = engine.Run._finish

        def finish(self: Any, pool: Any) -> None:
            for path in self.outlet.paths:
                if path.endswith(suffix):
                    with Path(path).open("r+b") as f:
                        f.seek(-1, os.SEEK_END)
                        last = f.read(1)[0]
                        f.seek(-1, os.SEEK_END)
                        f.write(bytes([last ^ 1]))
            write_out(self, pool)

        monkeypatch.setattr(engine.Run, "_finish", finish)

    with monkeypatch.context():
        spoil(".safetensors")
        with pytest.raises(VerifyError, match="differ from the source"):
            run(to_safetensors(src, tmp_path / "other.safetensors"), tmp_path / "other.safetensors")
    spoil(".pdiparams")
    with pytest.raises(VerifyError, match="differ from the source"):
        run(from_safetensors(out, tmp_path / "back", src), tmp_path / "back")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.safetensors", "src"]


def test_a_single_file_beside_its_source(tmp_path: Path) -> None:
    src = write(tmp_path)
    there(src, tmp_path / "model.safetensors")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.json", "model.pdiparams", "model.safetensors"]
    before = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(OutputError, match="exists"):
        there(src, tmp_path / "model.safetensors")
    run(to_safetensors(src, tmp_path / "model.safetensors"), tmp_path / "model.safetensors", force=True)
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_a_directory_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    src = write(tmp_path / "src")
    (tmp_path / "dir.safetensors").mkdir()
    for force in (False, True):
        with pytest.raises(OutputError, match="must be a file"):
            run(to_safetensors(src, tmp_path / "dir.safetensors"), tmp_path / "dir.safetensors", force=force)


@pytest.mark.parametrize("links", [True, False])
def test_a_file_that_appears_during_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    src = write(tmp_path / "src")
    dst = tmp_path / "out.safetensors"
    if not links:

        def refused(*_: object, **__: object) -> None:
            raise PermissionError(1, "no links here")

        monkeypatch.setattr(os, "link", refused)
    conversion = to_safetensors(src, dst)
    from ckpttool.ops.convert_json import convert

    look = convert._look_at_safetensors

    def appear(conversion: PreparedConversion, written: Path) -> Checks:
        dst.write_bytes(b"mine")
        return look(conversion, written)

    with monkeypatch.context() as patch:
        patch.setattr(convert, "_look_at_safetensors", appear)
        with pytest.raises(OutputError, match="appeared during the run"):
            run(conversion, dst)
    assert dst.read_bytes() == b"mine"
    dst.unlink()
    shutil.rmtree(tmp_path / "out.safetensors.partial", ignore_errors=True)
    run(to_safetensors(src, dst), dst)  # without links it is renamed
    assert load_file(dst)


def test_a_source_is_not_its_own_destination(tmp_path: Path) -> None:
    src = write(tmp_path / "src")
    out = there(src, tmp_path / "out.safetensors")
    odd = out.rename(tmp_path / "src/model.safetensors")
    with pytest.raises(OutputError, match="inside"):
        run(from_safetensors(odd, tmp_path / "src", src), tmp_path / "src", force=True)
    assert sorted(p.name for p in (tmp_path / "src").iterdir()) == [
        "model.json",
        "model.pdiparams",
        "model.safetensors",
    ]


@pytest.mark.parametrize("name", ["model.json", "model.pdiparams", "names.pdparams", "link", "."])
def test_nothing_that_is_read_is_replaced(tmp_path: Path, name: str) -> None:
    names = {"w": np.zeros((4, 4), np.float32), "StructuredToParameterName@@": {"w": "linear_0.w_0"}}
    src = write(tmp_path / "src")
    given = pickled(tmp_path / "src/names.pdparams", names)
    (tmp_path / "src/link").symlink_to("model.json")
    before = {p.name: p.read_bytes() for p in src.parent.iterdir()}
    with pytest.raises(CkptError, match=r"inside|DST would be"):
        run(to_safetensors(src, src.parent / name, names=given), src.parent / name, force=True)
    out = there(src, tmp_path / "out.safetensors", names=given)
    if name != "model.pdiparams":  # which the way back does not read
        with pytest.raises(CkptError, match=r"inside|DST would be"):
            run(from_safetensors(out, src.parent / name, src, names=given), src.parent / name, force=True)
    assert {p.name: p.read_bytes() for p in src.parent.iterdir()} == before


@pytest.mark.parametrize("name", ["w.pdiparams", "w.json", "w.pdmodel"])
def test_names_of_files_for_directories(tmp_path: Path, name: str) -> None:
    src = write(tmp_path / "src")
    out = there(src, tmp_path / "out.safetensors")
    with pytest.raises(UsageError, match="a directory with the name"):
        to_safetensors(src, tmp_path / name)
    for other in (name, "w.safetensors"):
        with pytest.raises(UsageError, match="a directory with the name"):
            from_safetensors(out, tmp_path / other, src)


def test_large_parameters_are_streamed(tmp_path: Path) -> None:
    """16 MB with 1 MB of buffers."""
    parameters: list[Parameter] = [("w", "F32", [4096, 1024])]
    src = write(tmp_path / "src", program([parameter(1, *parameters[0])]), None)
    head = record("F32", [4096, 1024], b"")
    with params_of(src).open("wb") as f:
        f.write(head)
        f.truncate(len(head) + (16 << 20))
    out = tmp_path / "out.safetensors"
    run(to_safetensors(src, out), out, memory=1 << 20)
    run(from_safetensors(out, tmp_path / "back", src), tmp_path / "back", memory=1 << 20)
    assert params_of(src).stat().st_size == (tmp_path / "back/model.pdiparams").stat().st_size


def changed(data: dict[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    out = copy.deepcopy(data)
    at = out
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return out


def test_harmless_problems_are_noted(tmp_path: Path) -> None:
    """A program of a later version still says what its parameters are."""
    src = write(tmp_path / "src", changed(usual(), ["base_code", "version"], 9))
    conversion = to_safetensors(src, tmp_path / "out.safetensors")
    assert "version 9 is newer" in conversion.notes[0]
