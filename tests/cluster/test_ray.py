"""Every command that writes a checkpoint, with ``--on ray`` and without: the same bytes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ckpttool.kernels.merge import METHODS
from tests.cluster.ray_fleet import LastingFleet
from tests.helpers.command import ckpttool

FIXTURES = Path(__file__).parents[2] / "fixtures"
MERGE = FIXTURES / "merge"
PROGRAMS = FIXTURES / "paddle_programs"


def contents(directory: Path) -> dict[str, bytes]:
    if directory.is_file():
        return {"": directory.read_bytes()}
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def same(fleet: LastingFleet, tmp_path: Path, command: str, *words: object, dst: str = "out", least: int = 2) -> None:
    """Run a command here and on the cluster. ``{}`` in the words is DST; ``least``: so many machines have worked."""
    found = []
    for where in ("here", "there"):
        (tmp_path / where).mkdir()
        given = [tmp_path / where / dst if w == "{}" else w for w in words]
        done = ckpttool(command, *given, *(["--on", "ray"] if where == "there" else []))
        assert done.code == 0, done.err
        found.append(contents(tmp_path / where))
    assert found[0].keys() == found[1].keys()
    assert found[0]
    assert [name for name, data in found[0].items() if data != found[1][name]] == []
    assert len({r.node for r in fleet.answered}) >= least
    assert fleet.lost == []


RESHARDS: dict[str, list[object]] = {
    "llama": ["llama_tp8", "--tp-out", 2],
    "whole": ["llama_tp8", "--to", "hf", "--dtype", "float32"],
    "experts": ["deepseek_v3_mp2", "--to", "hf"],
    "cut": ["hf_tiny_source", "--to", "ranks", "--tp-out", 4, "--pp-out", 2],
    "optimizer": ["paddle_zcc/ep2_tp2_sharding2_ema", "--to", "unified"],
    "moments": ["paddle_unified/nlp_llama_bf16_tp2_quantO1", "--to", "unified", "--tp-out", 1],
    "dcp": ["dcp/titan_llama3", "--to", "hf"],
    "to-dcp": ["hf_tiny_source", "--to", "dcp"],
    "to-torch": ["hf_tiny_source", "--to", "torch-bin"],
    "megatron": ["hf_tiny_source", "--to", "megatron", "--tp-out", 2],
    "pickles": ["torch/sharded", "--to", "hf"],
    "gguf": ["gguf/llama_q8_0", "--to", "hf"],
}


@pytest.mark.parametrize("case", RESHARDS)
def test_reshard(case: str, ray_fleet: LastingFleet, tmp_path: Path) -> None:
    source, *options = RESHARDS[case]
    same(ray_fleet, tmp_path, "reshard", FIXTURES / str(source), "{}", *options)


@pytest.mark.parametrize("case", ["llama", "whole", "optimizer", "to-dcp", "to-torch", "gguf"])
def test_reshard_with_checksums_and_verified(case: str, ray_fleet: LastingFleet, tmp_path: Path) -> None:
    source, *options = RESHARDS[case]
    same(ray_fleet, tmp_path, "reshard", FIXTURES / str(source), "{}", *options, "--manifest", "--verify")


def flags(name: str) -> list[str]:
    """Models, base and parameters that a method takes."""
    method = METHODS[name]
    most = method.models[1] or 3
    given = [str(MERGE / "inputs" / f"ft{i + 1}") for i in range(most)]
    out = ["--method", name]
    if method.base != "refused":
        out += ["--base", str(MERGE / "inputs/base")]
    values = {"t": "0.3", "decay": "0.5"}
    out += [f"--param={k}={values.get(k, '0.4')}" for k, p in method.whole.items() if p.default is None and k in values]
    for key, value in (("weight", ["0.6", "0.3", "0.5"]), ("density", ["0.6", "0.7", "0.5"])):
        if key in method.per_model and not (key == "weight" and method.per_model["weight"].default is not None):
            out.append(f"--param={key}={','.join(value[:most])}")
    return [*given, *out]


@pytest.mark.parametrize("name", METHODS)
def test_merge(name: str, ray_fleet: LastingFleet, tmp_path: Path) -> None:
    same(ray_fleet, tmp_path, "merge", *flags(name), "-o", "{}", "--seed", 7)


@pytest.mark.parametrize("name", [n for n, m in METHODS.items() if m.random and not n.startswith("paddle")])
def test_merge_with_draws_of_mergekit(name: str, ray_fleet: LastingFleet, tmp_path: Path) -> None:
    same(ray_fleet, tmp_path, "merge", *flags(name), "-o", "{}", "--seed", 7, "--rng", "mergekit")


@pytest.mark.parametrize("recipe", sorted((MERGE / "configs").glob("*.yml")), ids=lambda p: p.stem)
def test_merge_by_recipe(
    recipe: Path, ray_fleet: LastingFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(MERGE)  # paths in recipes are relative, and the nodes work in the same directory
    same(ray_fleet, tmp_path, "merge", recipe, "-o", "{}", "--manifest")


def test_merge_into_ranks_verified(ray_fleet: LastingFleet, tmp_path: Path) -> None:
    words = [*flags("ties"), "-o", "{}", "--to", "ranks", "--tp-out", 2, "--manifest"]
    same(ray_fleet, tmp_path, "merge", *words)


CASTS: dict[str, list[str]] = {
    "fp8": ["hf_tiny_source"],
    "nvfp4": ["hf_tiny_source", "--recipe", "nvfp4"],
    "back": ["deepseek_v3", "--to", "bf16"],
    "checksums": ["hf_tiny_source", "--manifest", "--verify"],
}


@pytest.mark.parametrize("case", CASTS)
def test_quantize(case: str, ray_fleet: LastingFleet, tmp_path: Path) -> None:
    source, *options = CASTS[case]
    same(ray_fleet, tmp_path, "quantize", FIXTURES / source, "{}", *options)


@pytest.mark.parametrize("options", [[], ["--link"], ["--verify", "--manifest"]], ids=["plain", "link", "verify"])
def test_drop_keys(options: list[str], ray_fleet: LastingFleet, tmp_path: Path) -> None:
    src = tmp_path / "src"
    done = ckpttool("reshard", FIXTURES / "llama_tp8", src, "--to", "hf", "--max-shard-size", "50kB")
    assert done.code == 0, done.err
    same(ray_fleet, tmp_path, "drop-keys", src, "{}", "model.layers.0.*", *options, least=1)


def test_convert_json(ray_fleet: LastingFleet, tmp_path: Path) -> None:
    program = PROGRAMS / "pir/model.json"
    same(ray_fleet, tmp_path, "convert-json", program, "{}", "--names", PROGRAMS / "model.pdparams", least=1)
    one, back = tmp_path / "one", tmp_path / "back"
    one.mkdir()
    back.mkdir()
    words = ["convert-json", program, "{}", "--names", PROGRAMS / "model.pdparams"]
    same(ray_fleet, one, *map(str, words), dst="m.safetensors", least=1)
    words = ["convert-json", one / "here/m.safetensors", "{}", "--program", program]
    same(ray_fleet, back, *map(str, words), least=1)


def test_paths_may_be_relative(ray_fleet: LastingFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(FIXTURES / "llama_tp8", "src")
    assert ckpttool("reshard", "src", "here", "--tp-out", 2).code == 0
    ray_fleet.dismiss()  # nodes that begin now work here
    done = ckpttool("reshard", "src", "there", "--tp-out", 2, "--on", "ray", "--verify")
    assert done.code == 0, done.err
    assert contents(Path("there")) == contents(Path("here"))
    ray_fleet.dismiss()


def test_json_of_a_run(ray_fleet: LastingFleet, tmp_path: Path) -> None:
    done = ckpttool("reshard", FIXTURES / "llama_tp8", tmp_path / "out", "--tp-out", 2, "--on", "ray", "--json")
    assert done.code == 0, done.err
    said = json.loads(done.out)
    assert said["bytes_written"] == sum(said_["written"] for r in ray_fleet.answered if (said_ := r.answer or {}))
