"""Inference programs that the real Paddle exports: converted, edited, merged, and loaded by it again.

J, S and I are `paddle.jit.load`, `paddle.static.load_inference_model` and the predictor of `paddle.inference`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from safetensors.numpy import load_file, save_file

from ckpttool.formats.paddle.program import examine
from tests.convert_json.accepted import CASES, recorded
from tests.helpers.command import ckpttool
from tests.peers import paddle_side, programs_side
from tests.peers.paddle_side import Bits
from tests.peers.programs_side import LOADERS, same, task

MODELS = {
    "dtypes": "JSI",
    "regions": "JSI",
    "linears": "JSI",
    "shapes": "JS",  # the predictor cannot feed on a tensor without elements
    "names": "JSI",
    "tied": "JSI",
    "inference": "JSI",
    "adam": "S",  # a program that trains is none for the others
    "legacy": "JSI",
    "legacy_static": "JSI",
}
"""Those that go to safetensors and back, and who loads them as Paddle wrote them."""
STRUCTURED = ("dtypes", "regions", "linears", "shapes", "names", "tied")
"""Those that have names in a .pdparams."""
OTHERS = ("nan", "edited", "one", "other")


def run(*arguments: object) -> None:
    """The command line, which must succeed; in this process, where it starts in no time."""
    done = ckpttool(*arguments)
    assert done.code == 0, done.err


class Model:
    """One export."""

    def __init__(self, folder: Path, said: Mapping[str, Any]) -> None:
        self.folder, self.said = folder, said
        self.program = folder / ("model.pdmodel" if folder.name.startswith("legacy") else "model.json")
        self.params = folder / "model.pdiparams"
        held = paddle_side.load(folder / "values.npz")
        self.values = {n: held[str(i)] for i, n in enumerate(said["values"])}
        """By parameter; those too that the program does not use."""

    @property
    def inputs(self) -> Path:
        return self.folder / "inputs.npz"

    def outputs(self, name: str = "outputs") -> dict[str, Bits]:
        return paddle_side.load(self.folder / f"{name}.npz")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    folder = tmp_path_factory.mktemp("exported")
    names = (*MODELS, *OTHERS)
    told = programs_side.job([{"do": "export", "folder": str(folder / n)} for n in names], folder)
    return {n: Model(folder / n, said) for n, said in zip(names, told, strict=False)}


Written = dict[str, Path]


@pytest.fixture(scope="module")
def written(models: dict[str, Model], tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Every model there and back: one file, shards, and with structured names; `MODEL/WAY` -> the new program."""
    folder = tmp_path_factory.mktemp("written")
    out: Written = {}
    for name in MODELS:
        m, at = models[name], folder / name
        at.mkdir()
        ways: dict[str, tuple[Path, tuple[str | Path, ...]]] = {
            "file": (at / "one.safetensors", ()),
            "shards": (at / "sharded", ("--max-shard-size", "4B")),
        }
        if name in STRUCTURED:
            ways["names"] = (at / "named.safetensors", ("--names", m.folder / "model.pdparams"))
        for way, (dst, options) in ways.items():
            run("convert-json", m.program, dst, *options)
            run("convert-json", dst, at / way, "--program", m.program)
            out[f"{name}/{way}"] = at / way / m.program.name
    return out


@pytest.fixture(scope="module")
def loaded(models: dict[str, Model], written: Written, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """`MODEL/WAY/LOADER` -> what came out, of Paddle's own files (`MODEL/paddle/LOADER`) and of those from ckpttool."""
    folder = tmp_path_factory.mktemp("loaded")
    programs = {f"{n}/paddle": models[n].program for n in MODELS} | {
        n: p for n, p in written.items() if not n.endswith("/shards")
    }
    tasks = {
        f"{n}/{loader}": task(p, loader, models[n.split("/")[0]].inputs, folder / f"{i}.{loader}.npz")
        for i, (n, p) in enumerate(programs.items())
        for loader in MODELS[n.split("/")[0]]
    }
    *told, _ = programs_side.job(list(tasks.values()), folder)
    assert {n: t for n, t in zip(tasks, told, strict=True) if t["said"] != "accepted"} == {}
    return {n: paddle_side.load(t["out"]) for n, t in tasks.items()}


# -- tensors


def tensors(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """dtype, shape and bytes of the tensors of a file or a directory of them, as safetensors itself reads them."""
    found: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        read: list[tuple[str, dict[str, Any]]] = safetensors.deserialize(file.read_bytes())  # type: ignore[no-untyped-call]
        for name, t in read:
            assert name not in found
            found[name] = (t["dtype"], tuple(t["shape"]), bytes(t["data"]))
    return found


DTYPES = {"?": "BOOL", "b": "I8", "B": "U8", "h": "I16", "i": "I32", "l": "I64", "e": "F16", "f": "F32", "d": "F64"}
SPECIAL = {"p_bfloat16": "BF16", "b_bfloat16": "BF16", "b_float8_e4m3fn": "F8_E4M3", "b_float8_e5m2": "F8_E5M2"}


def expected(model: Model) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """The real values of the parameters that the program uses, as safetensors has them."""
    found = {}
    used = {p.name for p in examine(model.program).program.parameters}
    for name, value in model.values.items():
        if name in used:
            structured = model.said.get("structured", {}).get(name, [""])[0]
            dtype, shape = SPECIAL.get(structured) or DTYPES.get(value.dtype.char, ""), value.shape
            if value.dtype.kind == "c":
                dtype, shape = ("C64", shape) if value.dtype.itemsize == 8 else ("F64", (*shape, 2))
            found[name] = (dtype, shape, value.tobytes())
    assert found.keys() == used
    return found


@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_is_what_paddle_held(name: str, models: dict[str, Model], written: Written) -> None:
    held = expected(models[name])
    at = written[f"{name}/file"].parents[1]
    found = tensors(at / "one.safetensors")
    # A legacy export says the names in its .info: of a tied weight the last one.
    names = {p: n for p, (*_, n) in models[name].said.get("structured", {}).items()} | {"eager_tmp_6": "moved"}
    assert found == ({names[n]: t for n, t in held.items()} if name == "legacy" else held)
    shards = tensors(at / "sharded")
    assert shards == found
    assert len(list((at / "sharded").glob("*.safetensors"))) > 1


def test_models_have_what_they_are_for(models: dict[str, Model]) -> None:
    held = {n: expected(models[n]) for n in MODELS}
    assert len({(d, len(s)) for d, s, _ in held["dtypes"].values()} - {("F32", 1)}) == 14
    assert len(held["linears"]) == 26
    assert {s for _, s, _ in held["shapes"].values()} == {(), (0, 3), (1,) * 7}
    assert () in {s for _, s, _ in held["regions"].values()}
    assert any(ord(c) > 0xFFFF for n in held["names"] for c in n)
    assert sum("moment" in n or "pow" in n for n in held["adam"]) == 8
    assert models["tied"].values.keys() > held["tied"].keys()
    assert examine(models["regions"].program).program.blocks > 5


@pytest.mark.parametrize("name", STRUCTURED)
def test_structured_names(name: str, models: dict[str, Model], written: Written) -> None:
    structured = models[name].said["structured"]
    found = tensors(written[f"{name}/file"].parents[1] / "named.safetensors")
    assert found == {structured[n][0]: t for n, t in expected(models[name]).items()}


@pytest.mark.parametrize("name", [*MODELS, "nan"])
def test_nothing_is_wrong_with_what_paddle_writes(name: str, models: dict[str, Model]) -> None:
    done = ckpttool("convert-json", models[name].program, "--check", "--json")
    found = {f["id"] for f in json.loads(done.out)["findings"]}
    assert found == {"dtypes": {"float8"}, "nan": {"attribute-nan"}}.get(name, set())


# -- and back


def test_files_are_paddles_own(models: dict[str, Model], written: Written) -> None:
    for name, program in written.items():
        m = models[name.split("/")[0]]
        assert program.read_bytes() == m.program.read_bytes(), name
        assert (program.parent / "model.pdiparams").read_bytes() == m.params.read_bytes(), name
    assert (written["legacy/file"].parent / "model.pdiparams.info").is_file()


@pytest.mark.parametrize("name", MODELS)
def test_paddle_computes_the_same(name: str, models: dict[str, Model], loaded: dict[str, Any]) -> None:
    for loader in MODELS[name]:
        own = loaded[f"{name}/paddle/{loader}"]
        ways = ["file", "names"] if name in STRUCTURED else ["file"]
        if name == "dtypes" and loader != "J":
            # These cast FP8 wrongly, of Paddle's own files too, and not always alike; the bytes are compared above.
            assert all(loaded[f"{name}/{way}/{loader}"].keys() == own.keys() for way in ways), loader
            continue
        assert all(same(loaded[f"{name}/{way}/{loader}"], own) for way in ways), loader
        for y, value in zip(own.values(), models[name].outputs().values(), strict=True):
            np.testing.assert_allclose(y, value, rtol=1e-5, atol=1e-6)


# -- other values


def loads(programs: Mapping[str, Path], inputs: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """`NAME/LOADER` -> what Paddle told, and what came out."""
    tasks = {
        f"{n}/{loader}": task(p, loader, inputs, folder / f"{n}.{loader}.npz")
        for n, p in programs.items()
        for loader in LOADERS
    }
    *told, _ = programs_side.job(list(tasks.values()), folder)
    out = {}
    for (n, t), said in zip(tasks.items(), told, strict=True):
        out[n] = said | ({"outputs": paddle_side.load(t["out"])} if said["said"] == "accepted" else {})
    return out


def close(found: Mapping[str, Any], right: Mapping[str, Bits]) -> None:
    for loader in LOADERS:
        said = found[f"program/{loader}"]
        assert said["said"] == "accepted", (loader, said)
        (y,), (value,) = said["outputs"].values(), right.values()
        assert y.dtype == value.dtype == np.float32
        np.testing.assert_allclose(y, value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("structured", [False, True])
def test_an_edited_weight(structured: bool, models: dict[str, Model], tmp_path: Path) -> None:
    """Edited with safetensors' own library, which drops what ckpttool had noted in the file."""
    m = models["edited"]
    file, name = tmp_path / "model.safetensors", "weight" if structured else m.said["weight"]
    names = ("--names", m.folder / "model.pdparams") if structured else ()
    run("convert-json", m.program, file, *names)
    weights = load_file(file)
    weights[name] = weights[name] * 2
    save_file(weights, file)
    run("convert-json", file, tmp_path / "back", "--program", m.program, *names)
    assert (tmp_path / "back/model.pdiparams").read_bytes() != m.params.read_bytes()
    found = loads({"program": tmp_path / "back/model.json"}, m.inputs, tmp_path / "loads")
    close(found, m.outputs("doubled"))
    assert not np.allclose(m.outputs("doubled")["y0"], m.outputs()["y0"])


@pytest.mark.parametrize("name", ["model", "ckpt"])
def test_a_merge(name: str, models: dict[str, Model], tmp_path: Path) -> None:
    """`paddle.jit.load("DIR/ckpt")` takes every `DIR/ckpt*.WORD.json` for a program."""
    one, other = models["one"], models["other"]
    assert one.values.keys() == other.values.keys()
    sources = [tmp_path / "one" / f"{name}.json", tmp_path / "other" / f"{name}.json"]
    for m, source in zip((one, other), sources, strict=True):
        source.parent.mkdir()
        source.write_bytes(m.program.read_bytes())
        source.with_suffix(".pdiparams").write_bytes(m.params.read_bytes())
    run("merge", *sources, "-o", tmp_path / "out", "--method", "linear", "--weights", "0.5,0.5")
    program = tmp_path / "out" / f"{name}.json"
    assert program.read_bytes() == one.program.read_bytes()
    found = loads({"program": program}, one.inputs, tmp_path / "loads")
    close(found, one.outputs("mean"))
    assert not np.allclose(one.outputs("mean")["y0"], one.outputs()["y0"])


def test_a_nan(models: dict[str, Model], tmp_path: Path) -> None:
    m = models["nan"]
    fixed = tmp_path / "fixed" / "model.json"
    fixed.parent.mkdir()
    run("convert-json", m.program, "--fix", fixed)
    (fixed.parent / "model.pdiparams").write_bytes(m.params.read_bytes())
    found = loads({"own": m.program, "program": fixed}, m.inputs, tmp_path / "loads")
    for loader in LOADERS:
        assert "key 'D' not found" in found[f"own/{loader}"]["error"]
        y, nan = found[f"program/{loader}"]["outputs"].values()
        np.testing.assert_allclose(y, m.outputs()["y0"], rtol=1e-5, atol=1e-6)
        assert np.isnan(nan).all()


# -- broken programs

EVERY = 3


def some() -> list[tuple[str, str]]:
    """A third of the cases, and not those that the next or last one resembles most."""
    return [(table, name) for table, cases in CASES.items() for name in list(cases)[1::EVERY]]


def test_what_paddle_accepts(tmp_path: Path) -> None:
    known = recorded()
    found = programs_side.measure(some(), tmp_path / "measured", known)
    assert found.pop("paddle") == known["paddle"]
    for table, name in some():
        told, want = found[table][name], known[table][name]
        # Where a loader reads memory that is not its own, it crashes or not by chance. It may not accept, though.
        kinds = {k for k, what in want.items() if what == "crash or hang" and told[k] == "refused"}
        assert told | {k: want[k] for k in kinds} == want, (table, name, json.dumps(told))
