"""Sources that are not on this machine: a second kind of place gives what the files on a disk give."""

from __future__ import annotations

import os
import shutil
from pathlib import Path, PurePosixPath

import pytest

import ckpttool as library
from ckpttool.errors import CorruptError
from ckpttool.ops.merge.provenance import RECORD
from ckpttool.storage.place import open_file, parse_place
from tests.helpers.command import ckpttool, refused, reshard
from tests.helpers.memory import FILES, in_memory
from tests.helpers.sample import some

FIXTURES = Path(__file__).parents[2] / "fixtures"

CASES = {
    "safetensors": ("hf_tiny_source", []),
    "ranks": ("llama_tp8", ["--tp-out", "2"]),
    "torch": ("torch/sharded", ["--to", "hf"]),
    "quantized moments": ("paddle_unified/nlp_llama_bf16_tp2_quantO1", ["--to", "hybrid"]),
    "pickles": ("paddle_zcc/ep2_tp2_sharding2_ema", ["--to", "unified"]),
}


def written(root: Path) -> dict[str, bytes]:
    """Every file of an output."""
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


QUESTIONS = [[], ["--json"], ["--ranks"], ["--stats"]]


@pytest.mark.sample("safetensors", "torch", "quantized moments")
@pytest.mark.parametrize(("at", "case"), list(enumerate(CASES)), ids=CASES)
def test_other_places_give_what_files_give(at: int, case: str, tmp_path: Path) -> None:
    name, options = CASES[case]
    src = FIXTURES / name
    reshard(src, tmp_path / "there", *options)
    with in_memory(src) as remote:
        reshard(remote, tmp_path / "here", *options, "--verify")
        for question in [*some(QUESTIONS, [QUESTIONS[at % len(QUESTIONS)]]), ["--check", "--values"]]:
            ours, files = ckpttool("inspect", remote, *question), ckpttool("inspect", src, *question)
            assert ours.out.replace(remote, str(src)) == files.out, question
            assert (ours.code, ours.err.replace(remote, str(src))) == (files.code, files.err), question
    assert written(tmp_path / "here") == written(tmp_path / "there")


def test_companions_come_along(tmp_path: Path) -> None:
    src = tmp_path / "model"
    shutil.copytree(FIXTURES / "hf_tiny_source", src)
    (src / "1_Pooling").mkdir()
    (src / "1_Pooling/config.json").write_text("{}")
    (src / "tokenizer.json").write_text('{"model": {}}')
    reshard(src, tmp_path / "there")
    with in_memory(src) as remote:
        reshard(remote, tmp_path / "here")
    assert {"1_Pooling/config.json", "tokenizer.json"} < written(tmp_path / "here").keys()
    assert written(tmp_path / "here") == written(tmp_path / "there")


def test_a_source_that_changes_is_refused(tmp_path: Path) -> None:
    """The tag tells: the new file has the size of the old one."""
    with in_memory(FIXTURES / "hf_tiny_source") as remote:
        plan = library.open(remote).reshard(tp=2)
        at = next(p for p in FILES if p.name == "model.safetensors")
        FILES[at] = FILES[at][:-1] + bytes([FILES[at][-1] ^ 1])
        with pytest.raises(CorruptError, match="a source has changed since it was planned"):
            plan.run(tmp_path / "dst")
    assert not (tmp_path / "dst").exists()


def test_what_is_not_there_is_one_error(tmp_path: Path) -> None:
    with in_memory(FIXTURES / "llama_tp8") as remote:
        assert "the source does not exist" in refused(f"{remote}x", tmp_path / "dst", code=2)
        FILES.pop(next(p for p in FILES if p.name == "model_tp3.safetensors"))
        assert "rank 3" in refused(remote, tmp_path / "dst", "--tp-out", "2")


def test_unknown_schemes_are_names_of_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with in_memory(FIXTURES / "llama_tp8") as remote:
        assert not isinstance(parse_place(remote), Path)
        assert parse_place("men:/x") == Path("men:/x")
        assert parse_place("./mem:/x") == Path("mem:/x")
    assert parse_place(remote) == Path(remote)


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(OSError, match="it is not a regular file"), open_file(tmp_path / "model.safetensors"):
        pass


def test_what_cannot_be_linked_is_copied(tmp_path: Path) -> None:
    src = tmp_path / "model"
    shutil.copytree(FIXTURES / "deepseek_v3", src)
    keys = ["model.embed_tokens.weight"]
    assert ckpttool("drop-keys", src, tmp_path / "there", *keys).code == 0
    with in_memory(src) as remote:
        done = ckpttool("drop-keys", remote, tmp_path / "here", *keys, "--link")
    assert (done.code, "linking does not work here" in done.err) == (0, True), done.err
    assert written(tmp_path / "here") == written(tmp_path / "there")


MERGES = {
    "words": ["{at}/ft1", "{at}/ft2", "--weights", "0.6,0.4"],
    "a base": ["{at}/ft1", "{at}/ft2", "--method", "ties", "--base", "{at}/base", "--weights", "1,1"],
    "an adapter": ["{at}/base+{at}/lora1"],
}


@pytest.mark.parametrize("case", MERGES)
def test_models_from_elsewhere_merge_as_from_here(case: str, tmp_path: Path) -> None:
    inputs, words = FIXTURES / "merge/inputs", MERGES[case]
    local = ckpttool("merge", *(w.format(at=inputs) for w in words), "-o", tmp_path / "there")
    with in_memory(inputs) as at:
        done = ckpttool("merge", *(w.format(at=at) for w in words), "-o", tmp_path / "here", "--verify")
    assert (local.code, done.code) == (0, 0), local.err + done.err
    ours, theirs = written(tmp_path / "here"), written(tmp_path / "there")
    assert ours.keys() == theirs.keys()
    assert [n for n in ours if ours[n] != theirs[n]] == [RECORD]  # which names the sources


def test_a_recipe_may_lie_elsewhere(tmp_path: Path) -> None:
    """Its relative paths are none of this machine's recipes."""
    src = tmp_path / "models"
    shutil.copytree(FIXTURES / "merge/inputs/ft1", src / "ft1")
    recipe = "merge_method: linear\nparameters: {{weight: 1.0}}\nmodels:\n  - model: {at}/ft1\n"
    with in_memory(src) as at:
        for name, text in (("r.yml", recipe.format(at=at)), ("beside.yml", recipe.format(at="."))):
            FILES[PurePosixPath(f"/checkpoints/models/{name}")] = text.encode()
        done = ckpttool("merge", f"{at}/r.yml", "-o", tmp_path / "dst")
        assert done.code == 0, done.err
        done = ckpttool("merge", f"{at}/beside.yml", "-o", tmp_path / "dst2")
    assert (done.code, "there is no `./ft1` here" in done.err) == (2, True), done.err
