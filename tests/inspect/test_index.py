"""Indexes made and checked from headers: those of other software come out as they were, wrong ones are mended."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool.answers.findings import ERROR, SEVERITY
from ckpttool.errors import CkptError, ConflictError, CorruptError, IncompleteError, OutputError, UsageError
from ckpttool.execute import NoProgress
from ckpttool.formats.base import OpenOptions
from ckpttool.ops.inspect.check import check
from ckpttool.ops.inspect.index import NONE_NEEDED, RIGHT, WRITTEN, IndexResult, IndexState, rebuild
from tests.helpers.command import ckpttool
from tests.helpers.paddle import write_file
from tests.helpers.sample import examples, some
from tests.helpers.tensorfile import Raw, origin, write
from tests.inspect.models import CONFIG, FIRST, INDEX, SECOND, edit_header, edit_json, llama, save_shards

ROOT = Path(__file__).parents[2]
UNIFIED = ROOT / "fixtures" / "paddle_unified"
CHECKPOINTS = sorted(p.name for p in UNIFIED.iterdir() if p.is_dir() and any(p.glob("*.index.json")))
OPTIMIZER = "optimizer.safetensors.index.json"
NORM = "model.norm.weight"
Stamp = dict[str, tuple[int, int, int]]


def load(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return data


def stamps(folder: Path) -> Stamp:
    """What tells whether a file was touched."""
    found = {p.name: p.stat() for p in folder.iterdir()}
    return {n: (s.st_ino, s.st_mtime_ns, s.st_size) for n, s in found.items()}


def only(result: IndexResult) -> IndexState:
    (state,) = result.indexes
    return state


ASIDE = {"config-missing", "config-tied-copy", "files-equal"}
"""Findings that are not about indexes."""


def ids(folder: Path) -> set[str]:
    return {f.id for f in check(folder, OpenOptions(), NoProgress()).findings} - ASIDE


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return save_shards(tmp_path / "m", llama(), CONFIG)


def refused(folder: Path, error: type[CkptError], *words: str) -> CkptError:
    """A rebuild that must fail, leaving everything as it is; what is wrong is a finding, too."""
    before = stamps(folder)
    with pytest.raises(error) as caught:
        rebuild(folder)
    assert stamps(folder) == before
    text = str(caught.value)
    assert caught.value.where
    assert caught.value.hint
    for word in words:
        assert word in text, text
    assert not check(folder, OpenOptions(), NoProgress()).ok
    return caught.value


# -- Hugging Face


def test_a_right_index_is_not_touched(shards: Path) -> None:
    before = stamps(shards)
    state = only(rebuild(shards))
    assert stamps(shards) == before
    assert (state.name, state.shards, state.state) == (INDEX, (FIRST, SECOND), RIGHT)
    assert state.tensors == len(llama())
    assert state.total_size == sum(t.bits.nbytes for t in llama().values())
    assert state.changes == state.notes == ()
    assert ids(shards) == set()


def test_an_index_is_made(shards: Path) -> None:
    wanted = load(shards / INDEX)
    (shards / INDEX).unlink()
    assert ids(shards) == {"no-index"}
    dry = only(rebuild(shards, dry_run=True))
    assert not (shards / INDEX).exists()
    state = only(rebuild(shards))
    assert dry == state
    assert state.state == WRITTEN
    assert state.changes == ("there was none",)
    assert load(shards / INDEX) == wanted
    assert (shards / INDEX).read_text(encoding="utf-8").startswith('{\n  "metadata": {\n    "total_size"')
    assert ids(shards) == set()
    assert not list(shards.glob(".*"))
    assert ckpttool("inspect", "--check", shards).code == 0


WRONG: dict[str, tuple[Callable[[dict[str, Any]], object], str, str]] = {
    "total": (lambda d: d["metadata"].update(total_size=5), "total-size", "total_size was 5"),
    "no total": (lambda d: d["metadata"].pop("total_size"), "", "total_size was missing"),
    "no metadata": (lambda d: d.pop("metadata"), "", "total_size was missing"),
    "extra": (lambda d: d["weight_map"].pop(NORM), "index-extra", "1 tensor was not in it"),
    "missing": (lambda d: d["weight_map"].update(x=FIRST), "index-missing", "1 tensor was in no shard"),
    "moved": (lambda d: d["weight_map"].update({NORM: FIRST}), "index-shard", "1 tensor was in another shard"),
    "no map": (lambda d: d.pop("weight_map"), "index-json", "it had no weight_map"),
    "outside": (lambda d: d["weight_map"].update(x="../a.safetensors"), "index-json", "could not be used"),
    "numbers": (lambda d: d["weight_map"].update(x=1), "index-json", "could not be used"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_index_is_mended(shards: Path, case: str) -> None:
    change, finding, words = WRONG[case]
    wanted = load(shards / INDEX)
    edit_json(shards / INDEX, change)
    assert ids(shards) == {finding} - {""}
    state = only(rebuild(shards))
    assert state.state == WRITTEN
    assert words in " ".join(state.changes)
    assert load(shards / INDEX) == wanted
    assert ids(shards) == set()
    assert only(rebuild(shards)).state == RIGHT


@pytest.mark.parametrize("text", ["", "{", "[]", '"a"', "[" * 100000, "\xff"])
def test_an_index_that_is_no_json(shards: Path, text: str) -> None:
    wanted = load(shards / INDEX)
    (shards / INDEX).write_bytes(text.encode("latin-1"))
    assert ids(shards) == {"index-json"}
    assert only(rebuild(shards)).state == WRITTEN
    assert load(shards / INDEX) == wanted


def test_what_else_an_index_says_stays(shards: Path) -> None:
    def change(data: dict[str, Any]) -> None:
        data["metadata"] |= {"mergekit_version": "0.1.5", "total_parameters": 7, "total_size": 1}
        data["extra"] = {"a": [1, None]}

    edit_json(shards / INDEX, change)
    rebuild(shards)
    data = load(shards / INDEX)
    assert data["metadata"]["mergekit_version"] == "0.1.5"
    assert data["metadata"]["total_parameters"] == 7
    assert data["metadata"]["total_size"] > 1
    assert data["extra"] == {"a": [1, None]}
    assert list(data) == ["metadata", "weight_map", "extra"]


@pytest.mark.parametrize(("indent", "end"), [(4, ""), (2, "\n"), (None, ""), ("\t", "\n")])
def test_the_style_of_an_index_stays(shards: Path, indent: int | str | None, end: str) -> None:
    data = load(shards / INDEX)
    right = json.dumps(data, indent=indent) + end
    data["metadata"]["total_size"] += 1
    (shards / INDEX).write_text(json.dumps(data, indent=indent) + end, encoding="utf-8")
    rebuild(shards)
    assert (shards / INDEX).read_text(encoding="utf-8") == right


def test_names_beyond_ascii(tmp_path: Path) -> None:
    write(tmp_path / "model-00001-of-00001.safetensors", {"größe.重み": origin(0, "F32", (2,))})
    rebuild(tmp_path)
    assert "größe.重み" in (tmp_path / INDEX).read_text(encoding="utf-8")


def test_mode_and_links_stay(shards: Path) -> None:
    real = shards / "real.json"
    (shards / INDEX).rename(real)
    (shards / INDEX).symlink_to(real.name)
    edit_json(real, lambda d: d["metadata"].update(total_size=5))
    real.chmod(0o640)
    rebuild(shards)
    assert (shards / INDEX).is_symlink()
    assert real.stat().st_mode & 0o777 == 0o640
    assert load(real)["metadata"]["total_size"] > 5


def test_one_file_needs_no_index(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"a": origin(0, "F32", (2,))})
    state = only(rebuild(tmp_path))
    assert (state.state, state.tensors, state.total_size) == (NONE_NEEDED, 1, None)
    assert not (tmp_path / INDEX).exists()
    assert ids(tmp_path) == set()
    data = {"metadata": {"total_size": 7}, "weight_map": {"a": "model.safetensors"}}
    (tmp_path / INDEX).write_text(json.dumps(data), encoding="utf-8")
    assert ids(tmp_path) == {"total-size"}
    assert only(rebuild(tmp_path)).state == WRITTEN
    assert load(tmp_path / INDEX)["metadata"]["total_size"] == 8


def test_any_stem(tmp_path: Path) -> None:
    for stem in ("diffusion_pytorch_model", "adapter_model", "Llama-3.1-8B", "model.fp16"):
        for i in (1, 2):
            write(tmp_path / f"{stem}-{i:05d}-of-00002.safetensors", {f"{stem}.{i}": origin(i, "F32", (i,))})
    result = rebuild(tmp_path)
    assert [i.name for i in result.indexes] == [
        "Llama-3.1-8B.safetensors.index.json",
        "adapter_model.safetensors.index.json",
        "diffusion_pytorch_model.safetensors.index.json",
        "model.safetensors.index.fp16.json",
    ]
    assert result.written == 4
    for state in result.indexes:
        data = load(tmp_path / state.name)
        assert set(data["weight_map"].values()) == set(state.shards)
        assert data["metadata"] == {"total_size": 12}
    assert {i.state for i in rebuild(tmp_path).indexes} == {RIGHT}


def test_an_index_of_files_with_other_names(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / f"{name}.safetensors", {name: origin(0, "F32", (1,))})
    write(tmp_path / "c.safetensors", {"c": origin(0, "F32", (1,))})
    data = {"metadata": {}, "weight_map": {"a": "a.safetensors", "b": "a.safetensors", "x": "b.safetensors"}}
    (tmp_path / INDEX).write_text(json.dumps(data), encoding="utf-8")
    result = rebuild(tmp_path)
    assert only(result).shards == ("a.safetensors", "b.safetensors")
    assert load(tmp_path / INDEX)["weight_map"] == {"a": "a.safetensors", "b": "b.safetensors"}
    assert "c.safetensors" in result.notes[0]


def test_rank_files_are_no_shards() -> None:
    with pytest.raises(UsageError, match="no shard that one could name"):
        rebuild(ROOT / "fixtures" / "llama_tp8")


def test_files_that_are_no_shards_are_left_alone(shards: Path) -> None:
    shutil.copy(ROOT / "fixtures/llama_tp8/model_tp0.safetensors", shards)
    result = rebuild(shards, dry_run=True)
    assert "model_tp0.safetensors" in result.notes[0]


# -- refusals


def test_missing_shards(shards: Path) -> None:
    (shards / SECOND).unlink()
    refused(shards, IncompleteError, "1 of 2 shards are missing", SECOND)
    assert "shard-missing" in ids(shards)
    (shards / INDEX).unlink()
    refused(shards, IncompleteError, SECOND)


def test_a_tensor_in_two_shards(shards: Path) -> None:
    write(shards / SECOND, dict(list(llama().items())[-2:]) | {NORM: llama()[NORM]})
    write(shards / FIRST, llama())
    refused(shards, ConflictError, "is in 2 shards", FIRST, SECOND)
    assert "duplicate-tensor" in ids(shards)
    (shards / INDEX).unlink()
    refused(shards, ConflictError, "is in 2 shards")


def test_shards_of_two_sets(shards: Path) -> None:
    shutil.copy(shards / FIRST, shards / "model-00001-of-00003.safetensors")
    with pytest.raises(ConflictError, match="shards of 2 sets"):
        rebuild(shards)
    assert ids(shards) == {"orphan-shard"}  # readers follow the index
    (shards / INDEX).unlink()
    refused(shards, ConflictError, "shards of 2 sets")
    assert "shard-numbering" in ids(shards)


def test_a_number_beyond_the_total(shards: Path) -> None:
    shutil.copy(shards / FIRST, shards / "model-00003-of-00002.safetensors")
    refused(shards, ConflictError, "a shard 3 of 2")


def test_a_broken_header(shards: Path) -> None:
    edit_header(shards / FIRST, lambda h: h[next(n for n in h if n != "__metadata__")].update(dtype="F64"))
    refused(shards, CorruptError, FIRST)
    assert "size" in ids(shards)


def test_a_shard_that_is_no_safetensors_file(shards: Path) -> None:
    (shards / FIRST).write_bytes(b"\x01")
    before = stamps(shards)
    with pytest.raises(CorruptError):
        rebuild(shards)
    assert stamps(shards) == before
    assert "header-length" in ids(shards)


def test_a_single_file_beside_its_shards(shards: Path) -> None:
    write(shards / "model.safetensors", llama())
    assert any("left out" in n for n in only(rebuild(shards)).notes)  # the index says which
    assert ids(shards) == {"orphan-shard"}
    (shards / INDEX).unlink()
    refused(shards, ConflictError, "numbered shards of it")


def test_a_stale_index(shards: Path) -> None:
    """An index of an earlier save, whose tensors are all in the new files."""
    wanted = load(shards / INDEX)
    stale = "model-00001-of-00001.safetensors"
    edit_json(shards / INDEX, lambda d: d.update(weight_map=dict.fromkeys(d["weight_map"], stale)))
    assert "shard-missing" in ids(shards)
    state = only(rebuild(shards))
    assert any(stale in n for n in state.notes)
    assert load(shards / INDEX) == wanted


def test_a_named_file_that_held_more(shards: Path) -> None:
    edit_json(shards / INDEX, lambda d: d["weight_map"].update({"mtp.weight": "mtp.safetensors"}))
    refused(shards, IncompleteError, "mtp.safetensors is missing", "mtp.weight")


def test_an_index_without_files(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "a.safetensors"}}', encoding="utf-8")
    refused(tmp_path, IncompleteError, "none of the 1 files")
    (tmp_path / INDEX).write_text("{}", encoding="utf-8")
    refused(tmp_path, IncompleteError, "no file that it could be of")


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        rebuild(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="no safetensors files"):
        rebuild(tmp_path)
    with pytest.raises(UsageError, match="is a file"):
        rebuild(write(tmp_path / "a" / "model.safetensors", {}))


def test_all_are_planned_before_the_first_is_written(shards: Path) -> None:
    (shards / INDEX).unlink()
    write(shards / "zz-00001-of-00002.safetensors", {"a": origin(0, "F32", (2,))})
    refused(shards, IncompleteError, "zz-00002")


def test_a_shard_that_changes_meanwhile(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shards / INDEX).unlink()
    from ckpttool.ops.inspect import index

    real = index._encode

    def change(*arguments: Any, **more: Any) -> bytes:
        os.utime(shards / FIRST, ns=(1, 1))
        return real(*arguments, **more)

    monkeypatch.setattr(index, "_encode", change)
    with pytest.raises(ConflictError, match="changed"):
        rebuild(shards)
    assert not (shards / INDEX).exists()


@pytest.mark.parametrize("call", ["fsync", "replace", "pwrite", "fchmod"])
def test_a_write_that_fails(shards: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    edit_json(shards / INDEX, lambda d: d["metadata"].update(total_size=5))
    before = stamps(shards)

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OutputError, match="no space left"):
        rebuild(shards)
    monkeypatch.undo()
    assert stamps(shards) == before


@pytest.mark.parametrize("call", ["fsync", "replace", "pwrite"])
def test_killed(shards: Path, call: str) -> None:
    """Whenever a run dies, each index is the old or the new one."""
    edit_json(shards / INDEX, lambda d: d["metadata"].update(total_size=5))
    before = (shards / INDEX).read_bytes()
    child = os.fork()
    if not child:
        setattr(os, call, lambda *_, **__: os._exit(7))
        try:
            rebuild(shards)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert (shards / INDEX).read_bytes() == before
    assert only(rebuild(shards)).state == WRITTEN  # writes over what is left
    assert not list(shards.glob(".*"))


def test_another_run_writes(shards: Path) -> None:
    import fcntl

    (shards / INDEX).unlink()
    with (shards / f".{INDEX}.partial").open("w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        with pytest.raises(OutputError, match="another run"):
            rebuild(shards)
    rebuild(shards)


# -- unified checkpoints


@pytest.fixture
def unified(tmp_path: Path) -> Callable[[str], Path]:
    def copy(name: str) -> Path:
        return Path(shutil.copytree(UNIFIED / name, tmp_path / name))

    return copy


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_indexes_of_paddle_are_right(unified: Callable[[str], Path], name: str) -> None:
    folder = unified(name)
    before = stamps(folder)
    result = rebuild(folder)
    assert {i.state for i in result.indexes} <= {RIGHT, NONE_NEEDED}
    assert stamps(folder) == before
    assert ids(folder) == set()


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_indexes_of_paddle_are_made_anew(unified: Callable[[str], Path], name: str) -> None:
    """Without its indexes a checkpoint gets the same ones, but for what only the trainer knew."""
    folder = unified(name)
    wanted = {p.name: load(p) for p in folder.glob("*.index.json")}
    for index in wanted:
        (folder / index).unlink()
    rebuild(folder)
    made = {p.name: load(p) for p in folder.glob("*.index.json")}
    for data in (*wanted.values(), *made.values()):
        data.pop("quant_ckpt_resume_times", None)  # single cards do not write it
    assert made == wanted
    assert ids(folder) == set()


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_indexes_of_paddle_are_mended(unified: Callable[[str], Path], name: str) -> None:
    folder = unified(name)
    wanted = {p.name: p.read_bytes() for p in folder.glob("*.index.json")}
    wrong = 0
    for index in wanted:
        data = load(folder / index)
        if "weight_map" not in data or "ckpt_quant_stage" in data:
            continue
        tensor = next(iter(data["weight_map"]))
        data["weight_map"].pop(tensor)
        data["metadata"]["total_size"] += 1
        (folder / index).write_text(json.dumps(data, indent=4), encoding="utf-8")
        wrong += 1
    assert rebuild(folder).written == wrong
    for index, text in wanted.items():
        assert load(folder / index) == json.loads(text), index


def test_split_parameters(unified: Callable[[str], Path]) -> None:
    folder = unified("pf12_llama_bf16_sharding2_split_param")
    name = "model.layers.1.self_attn.q_proj.weight/moment1_0"
    states = {i.name: i for i in rebuild(folder).indexes}
    (note,) = states[OPTIMIZER].notes
    assert note.startswith("4 tensors are in several files")
    # The index may name either file.
    edit_json(folder / OPTIMIZER, lambda d: d["weight_map"].update({name: "optimizer-00001-of-00002.safetensors"}))
    assert {i.state for i in rebuild(folder).indexes} == {RIGHT}
    assert ids(folder) == set()


def test_whole_tensors_in_two_files(unified: Callable[[str], Path]) -> None:
    """What an index names counts (replicas of experts' ranks); without one nobody knows."""
    folder = unified("nlp_llamafused_bf16_tp2")
    shutil.copy(folder / "model-00001-of-00002.safetensors", folder / "model-00002-of-00002.safetensors")
    data = load(folder / INDEX)
    data["weight_map"] = {n: f for n, f in data["weight_map"].items() if f.startswith("model-00001")}
    (folder / INDEX).write_text(json.dumps(data), encoding="utf-8")
    assert any("in several files" in n for i in rebuild(folder).indexes for n in i.notes)
    (folder / INDEX).unlink()
    refused(folder, ConflictError, "is in 2 shards")
    assert "duplicate-tensor" in ids(folder)


def test_quantized_moments_keep_their_total(unified: Callable[[str], Path]) -> None:
    folder = unified("nlp_llama_bf16_tp2_quantO1")
    wanted = load(folder / OPTIMIZER)
    states = {i.name: i for i in rebuild(folder).indexes}
    assert any("before they were quantized" in n for n in states[OPTIMIZER].notes)
    edit_json(folder / OPTIMIZER, lambda d: d["weight_map"].popitem())
    rebuild(folder)
    assert load(folder / OPTIMIZER) == wanted


def test_packed_moments(tmp_path: Path) -> None:
    """O2: both moments in one tensor, and the index has both."""
    codes, scales = np.zeros((32, 4), np.int8), np.zeros((1, 4), np.float32)
    write_file(tmp_path / "model-00001-of-00001.safetensors", {"w": np.zeros((32, 4), ml_dtypes.bfloat16)})
    write_file(
        tmp_path / "optimizer-00001-of-00001.safetensors",
        {
            "w/moment2_0": codes,
            "w/moment2_0@min_scales": scales,
            "w/moment2_0@max_scales": scales,
            "w/moment1_0@scales": scales,
            "w/beta1_pow_acc_0": np.zeros(1, np.float32),
        },
    )
    rebuild(tmp_path)
    data = load(tmp_path / OPTIMIZER)
    assert set(data["weight_map"]) == {"w/moment1_0", "w/moment2_0", "w/beta1_pow_acc_0"}
    assert data["metadata"]["total_size"] == 2 * 32 * 4 * 4 + 4
    assert data["ckpt_quant_stage"] == "O2"
    assert data["master_weights"] is False
    assert ids(tmp_path) == set()
    assert {i.state for i in rebuild(tmp_path).indexes} == {RIGHT}


def test_an_optimizer_index_says_whether_there_are_master_weights(unified: Callable[[str], Path]) -> None:
    folder = unified("nlp_llamafused_bf16_tp2")
    edit_json(folder / OPTIMIZER, lambda d: d.pop("master_weights"))
    assert ids(folder) == {"index-json"}
    rebuild(folder)
    assert load(folder / OPTIMIZER)["master_weights"] is True


def test_files_of_ranks(unified: Callable[[str], Path]) -> None:
    """Their index has no map: that is how Paddle knows them."""
    folder = unified("pf12_llama_bf16_sharding2_nonmerge_optimshard2")
    edit_json(folder / OPTIMIZER, lambda d: d.pop("optim_shard_num"))
    assert ids(folder) == {"index-json"}
    rebuild(folder)
    assert load(folder / OPTIMIZER) == {"quant_ckpt_resume_times": 0, "optim_shard_num": 2}
    edit_json(folder / OPTIMIZER, lambda d: d.update(weight_map={}))
    refused(folder, ConflictError, "those of ranks")
    (folder / OPTIMIZER).unlink()
    assert ids(folder) == {"no-index"}
    write(folder / "optimizer-00001-of-00001.safetensors", {})
    refused(folder, ConflictError, "files of ranks")


def test_a_rank_that_holds_nothing_writes_no_file(unified: Callable[[str], Path]) -> None:
    folder = unified("nlp_llamafused_bf16_tp2")
    for i in (1, 2):
        old = f"master_weights-{i:05d}-of-00002.safetensors"
        (folder / old).rename(folder / old.replace("-of-00002", "-of-00003"))
    name = "master_weights.safetensors.index.json"
    text = (folder / name).read_text(encoding="utf-8").replace("-of-00002", "-of-00003")
    (folder / name).write_text(text, encoding="utf-8")
    states = {i.name: i for i in rebuild(folder).indexes}
    assert states[name].state == RIGHT
    assert "1 of 3 files are not there" in states[name].notes[0]
    assert ids(folder) == set()
    (folder / name).unlink()
    refused(folder, IncompleteError, "master_weights-00003-of-00003")


# -- anything


@settings(max_examples=examples(40))
@given(
    st.dictionaries(st.text(min_size=1, max_size=8), st.integers(0, 2), max_size=8).filter(
        lambda d: "__metadata__" not in d
    ),
    st.dictionaries(st.text(max_size=4), st.sampled_from(["a", "model-00001-of-00003.safetensors"]), max_size=4),
)
def test_any_names(tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, int], old: dict[str, str]) -> None:
    """Whatever the tensors are called and the index says of them: afterwards it is right, and stays."""
    folder = tmp_path_factory.mktemp("any")
    names = [f"model-{i + 1:05d}-of-00003.safetensors" for i in range(3)]
    for i, file in enumerate(names):
        write(folder / file, {n: Raw("U8", np.zeros(3, np.uint8)) for n, at in tensors.items() if at == i})
    (folder / INDEX).write_text(json.dumps({"weight_map": old}), encoding="utf-8")
    if any(f == "a" and n not in tensors for n, f in old.items()):
        with pytest.raises(IncompleteError):
            rebuild(folder)
        return
    rebuild(folder)
    data = load(folder / INDEX)
    assert data["weight_map"] == {n: names[at] for n, at in tensors.items()}
    assert data["metadata"]["total_size"] == 3 * len(tensors)
    assert only(rebuild(folder)).state == RIGHT
    assert ids(folder) == set()


def test_every_finding_is_one_of_inspect() -> None:
    source = (ROOT / "ckpttool/ops/inspect/index_groups.py").read_text(encoding="utf-8")
    said = {line.split('result.add("')[1].split('"')[0] for line in source.splitlines() if 'result.add("' in line}
    assert said
    assert said <= SEVERITY.keys()
    assert SEVERITY["index-json"] == ERROR


def test_large_checkpoints_are_quick(tmp_path: Path) -> None:
    """300 shards of 100 tensors: a tenth of the time that is granted here, which is for machines that are shared."""
    count = some(300, 100)
    for i in range(count):
        part = {f"model.layers.{i}.mlp.experts.{j}.w": Raw("U8", np.zeros(1, np.uint8)) for j in range(100)}
        write(tmp_path / f"model-{i + 1:05d}-of-{count:05d}.safetensors", part)
    start = time.process_time()
    assert only(rebuild(tmp_path)).tensors == 100 * count
    assert time.process_time() - start < some(5, 2)
