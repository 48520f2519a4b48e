"""The Python API: everything that the commands do, its objects in a console and in a notebook, and its errors."""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import ckpttool
from ckpttool.errors import LayoutError, OutputError, UsageError, VerifyError
from tests.helpers.command import ckpttool as command
from tests.helpers.tensorfile import Raw, read, save_hf

FIXTURES = Path(__file__).parents[2] / "fixtures"
LLAMA = FIXTURES / "llama_tp8"
MERGE = FIXTURES / "merge" / "inputs"


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def same_as(written: ckpttool.Written, *words: object, at: Path) -> None:
    """What the command line writes has the same bytes."""
    done = command(*words)
    assert done.code == 0, done.err
    assert files(written.path) == files(at)


# -- what the commands do


def test_reshard(tmp_path: Path) -> None:
    with ckpttool.open(LLAMA) as source:
        plan = source.reshard(tp=2, to="vllm")
        assert (plan.mesh.tp, plan.format) == (2, "vllm")
        written = plan.run(tmp_path / "a", verify=True)
    assert written.verified
    assert written.files == len(files(tmp_path / "a"))
    assert written.nbytes == sum(map(len, files(tmp_path / "a").values()))
    same_as(written, "reshard", LLAMA, tmp_path / "b", "--tp-out", 2, "--to", "vllm", at=tmp_path / "b")


def test_merge(tmp_path: Path) -> None:
    plan = ckpttool.merge(
        [MERGE / "ft1", MERGE / "ft2"],
        base=MERGE / "base",
        method="ties",
        weights=[0.6, 0.4],
        params={"density": [0.5, 0.75], "normalize": False},
    )
    assert plan.method == "ties"
    written = plan.run(tmp_path / "a", verify=True, workers=2)
    words = ("--base", MERGE / "base", "--method", "ties", "--weights", "0.6,0.4")
    params = ("--param", "density=0.5,0.75", "--param", "normalize=false")
    same_as(written, "merge", MERGE / "ft1", MERGE / "ft2", *words, *params, "-o", tmp_path / "b", at=tmp_path / "b")


def test_merge_by_a_recipe_and_of_shards(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(
        json.dumps(
            {
                "merge_method": "linear",
                "models": [{"model": str(MERGE / n), "parameters": {"weight": 1}} for n in ("ft1", "ft2")],
                "dtype": "bfloat16",
            }
        )
    )
    assert ckpttool.merge(recipe).method == "linear"
    written = ckpttool.merge(LLAMA).run(tmp_path / "one")
    assert written.tensors == len(ckpttool.open(LLAMA))
    with pytest.raises(UsageError, match="no parameter `desity`"):
        ckpttool.merge([MERGE / "ft1", MERGE / "ft2"], method="ties", base=MERGE / "base", params={"desity": 1})


def test_drop_keys(tmp_path: Path) -> None:
    plan = ckpttool.drop_keys(FIXTURES / "hf_tiny_source", "*.0.mlp.*", "lm_head.*")
    assert "lm_head.weight" in plan.removed
    written = plan.run(tmp_path / "a", verify=True)
    patterns = ("*.0.mlp.*", "lm_head.*")
    same_as(written, "drop-keys", FIXTURES / "hf_tiny_source", tmp_path / "b", *patterns, at=tmp_path / "b")
    with pytest.raises(UsageError, match="matches no tensor"):
        ckpttool.open(LLAMA).drop_keys("nothing")


def test_fp8_cast_and_back(tmp_path: Path) -> None:
    with ckpttool.open(FIXTURES / "hf_tiny_source") as weights:
        weights.fp8_cast("tensor").run(tmp_path / "fp8", verify=True)
    with ckpttool.open(tmp_path / "fp8") as quantised:
        assert quantised["model.layers.0.mlp.up_proj.weight"].dtype == "F8_E4M3"
        quantised.fp8_cast(to="bf16").run(tmp_path / "bf16")
    assert ckpttool.open(tmp_path / "bf16")["model.layers.0.mlp.up_proj.weight"].dtype == "BF16"


def test_check(tmp_path: Path) -> None:
    assert ckpttool.check(LLAMA, values=True).ok
    assert ckpttool.open(LLAMA).check().ok
    shutil.copytree(FIXTURES / "hf_tiny_source", tmp_path / "src")
    file = tmp_path / "src" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    found = ckpttool.check(tmp_path / "src")
    assert not found.ok
    assert found.findings[0].severity == "error"
    assert "1 error" in repr(found)


def test_diff(tmp_path: Path) -> None:
    source = ckpttool.open(LLAMA)
    source.reshard(tp=1, to="hf").run(tmp_path / "hf")
    assert ckpttool.diff(LLAMA, tmp_path / "hf").ok
    assert source.diff(ckpttool.open(tmp_path / "hf")).ok
    file = tmp_path / "hf" / "model.safetensors"
    tensors = dict(read(file))
    bits = tensors["model.norm.weight"].bits.copy()
    bits[3] += 1
    save_hf(tmp_path / "hf", {**tensors, "model.norm.weight": Raw("BF16", bits)}, source.config)
    found = source.diff(tmp_path / "hf")
    assert not found.ok
    assert [e.name for e in found.elements] == ["model.norm.weight"]
    assert source.diff(tmp_path / "hf", values=False).ok
    assert source.diff(tmp_path / "hf", rtol=0.5).ok


def test_convert(tmp_path: Path) -> None:
    program, there, again = FIXTURES / "paddle_programs/pir/model.json", tmp_path / "p.safetensors", tmp_path / "again"
    written = ckpttool.convert(program, there).run(there)
    assert written.verified
    assert written.tensors == len(read(there))
    assert ckpttool.convert(there, again, program=program).run(again).format == "program"
    assert (again / "model.pdiparams").read_bytes() == program.with_name("model.pdiparams").read_bytes()


def test_size() -> None:
    found = ckpttool.size(FIXTURES / "hf_tiny_source", "bf16", tp=2, kv="bf16", tokens=100, gpu="h100")
    said = command("fp8-size", FIXTURES / "hf_tiny_source", "--recipe", "bf16", "--tp-out", 2, "--kv", "bf16",
                   "--tokens", 100, "--gpu", "h100", "--json")  # fmt: skip
    data = json.loads(said.out)
    assert found.ok
    assert (found.parameters, found.nbytes) == (data["parameters"], data["bytes"])
    assert found.rank_bytes is not None
    assert len(found.rank_bytes) == 2
    assert (found.needed, found.memory) == (data["fit"]["needed"], data["fit"]["memory"])
    assert found.needed is not None
    small = ckpttool.size(ckpttool.open(FIXTURES / "hf_tiny_source"), "bf16", device_mem=found.needed)
    assert not small.ok
    with pytest.raises(UsageError, match="exclude"):
        ckpttool.size(FIXTURES / "hf_tiny_source", gpu="h100", device_mem=1)


# -- a mapping


def test_a_mapping() -> None:
    source = ckpttool.open(LLAMA)
    assert list(source) == source.keys() == [n for n, _ in source.items()]
    assert len(list(source.values())) == len(source) == 39
    assert "lm_head" not in source
    assert source.identity.layers == 4


def test_tensors_one_after_the_other() -> None:
    source = ckpttool.open(LLAMA)
    found = dict(source.tensors())
    assert found.keys() == {*source}
    assert all(np.array_equal(found[n], source.read(n)) for n in source)
    norms = dict(source.tensors("*norm.weight", framework="pt"))
    assert {n for n in source if n.endswith("norm.weight")} == norms.keys()
    assert {str(t.dtype) for t in norms.values()} == {"torch.bfloat16"}
    with pytest.raises(UsageError, match="framework `tf`"):
        next(source.tensors(framework="tf"))  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="matches no tensor"):
        next(source.tensors("nothing"))


def test_tied_names_find_their_owner() -> None:
    tied = ckpttool.open(FIXTURES / "vllm" / "llama_tied")
    assert tied.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" in tied
    assert "lm_head.weight" not in list(tied)
    assert tied["lm_head.weight"] is tied["model.embed_tokens.weight"]
    assert np.array_equal(tied.read("lm_head.weight"), tied.read("model.embed_tokens.weight"))


def test_closing_gives_back_scratch_files() -> None:
    from ckpttool.formats._scratch import DEFAULT

    before = set(DEFAULT.files)
    with ckpttool.open(FIXTURES / "paddle_pickles" / "model_proto2.pdparams") as source:
        made = set(DEFAULT.files) - before
        assert made
        name = next(iter(source))
        source.read(name)
    assert not any(p.exists() for p in made)
    with pytest.raises(UsageError, match="is closed"):
        source.read(name)
    source.close()


# -- consoles and notebooks


def test_reprs_are_one_short_line(tmp_path: Path) -> None:
    source = ckpttool.open(LLAMA)
    plan = source.reshard(tp=2)
    written = plan.run(tmp_path / "dst")
    size = ckpttool.size(FIXTURES / "hf_tiny_source", gpu="h100")
    objects = (source, source["lm_head.weight"], source.catalog, plan, plan.plan, written, size, source.check())
    for thing in objects:
        assert "\n" not in repr(thing)
        assert len(repr(thing)) < 100 + len(str(tmp_path)) + len(str(FIXTURES))
    for thing in (source, plan, written, size):
        assert "<table>" in thing._repr_html_()


def test_html_is_escaped(tmp_path: Path) -> None:
    save_hf(tmp_path / "src", {"<script>alert(1)</script>.weight": Raw("F32", np.zeros(4, np.uint32))}, {})
    shown = ckpttool.open(tmp_path / "src")._repr_html_()
    assert "<script>" not in shown
    assert "&lt;script&gt;" in shown


# -- errors and docs


def test_errors(tmp_path: Path) -> None:
    source = ckpttool.open(LLAMA)
    with pytest.raises(LayoutError):
        source.reshard(tp=3)
    with pytest.raises(UsageError, match="there is no tensor `lm_head"):
        source["lm_head.wieght"]
    source.reshard(tp=2).run(tmp_path / "there")
    with pytest.raises(OutputError, match="exists"):
        source.reshard(tp=2).run(tmp_path / "there")
    assert issubclass(VerifyError, ckpttool.CkptError)


@pytest.mark.parametrize("name", [n for n in ckpttool.__all__ if not n.startswith("__")])
def test_everything_public_is_documented(name: str) -> None:
    """Every argument of a public function and method stands in its docstring, and every name on the page."""
    thing = getattr(ckpttool, name)
    assert inspect.getdoc(thing), name
    page = (Path(__file__).parents[2] / "docs" / "python.md").read_text(encoding="utf-8")
    assert name in page
    module = inspect.getmodule(thing)
    if module is None or not module.__name__.startswith("ckpttool.api"):
        return
    functions = [thing] if inspect.isfunction(thing) else [
        f for n, f in vars(thing).items() if inspect.isfunction(f) and not n.startswith("_")
    ]  # fmt: skip
    for function in functions:
        text = inspect.getdoc(function)
        assert text, function
        arguments = [p for p in inspect.signature(function).parameters if p != "self"]
        if len(arguments) > 1:
            missing = [a for a in arguments if a not in text]
            assert not missing, (function, missing)
