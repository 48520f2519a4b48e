"""Damage whose answer is known: what must be refused, what is another legal file, and what readers once got wrong."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpttool.core.patterns import compile_pattern, matching, renamer
from ckpttool.errors import CkptError
from ckpttool.execute.journal import Journal, sealed
from ckpttool.layout.family import load_family
from ckpttool.recipe.flags import recipe_of
from tests.fuzz.harness import Answers, read
from tests.fuzz.naive import whole
from tests.fuzz.subjects import FIXTURES
from tests.helpers.command import ckpttool, refused, reshard

Header = dict[str, Any]


def answer(folder: Path, **options: Any) -> Answers | None:
    """What is read, or None when it is refused."""
    try:
        return read(folder, options)
    except CkptError:
        return None


# -- one safetensors file with tensors a and b of 24 bytes, and c of 8


def file(path: Path, edit: Callable[[Header], object] = lambda _: None, payload: int = 56, more: bytes = b"") -> Path:
    header: Header = {
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "F32", "shape": [3, 2], "data_offsets": [24, 48]},
        "c": {"dtype": "BF16", "shape": [4], "data_offsets": [48, 56]},
    }
    edit(header)
    text = json.dumps(header).encode() + more
    path.mkdir()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(range(payload)))
    return path


def put(name: str, field: str, value: Any) -> Callable[[Header], object]:
    return lambda header: header[name].update({field: value})


def exchanged(header: Header) -> None:
    a, b = header["a"], header["b"]
    a["data_offsets"], b["data_offsets"] = b["data_offsets"], a["data_offsets"]


LEGAL: dict[str, Callable[[Header], object]] = {
    "nothing": lambda _: None,
    "a dtype of the same size": put("a", "dtype", "I32"),
    "a shape of the same size": put("a", "shape", [3, 2]),
    "offsets exchanged": exchanged,
    "another order": lambda header: header.update({"a": header.pop("a")}),
    "another name": lambda header: header.update({"x": header.pop("a")}),
    "a tensor without elements": lambda header: header.update(
        {"e": {"dtype": "F32", "shape": [0, 5], "data_offsets": [24, 24]}}
    ),
}
REFUSED: dict[str, Callable[[Header], object]] = {
    "overlap": put("b", "data_offsets", [23, 47]),
    "hole": lambda header: header.pop("b"),
    "bytes behind": lambda header: header.pop("c"),
    "beyond the end": put("c", "data_offsets", [49, 57]),
    "backwards": put("a", "data_offsets", [24, 0]),
    "negative": put("a", "data_offsets", [-24, 0]),
    "a size below zero twice": put("a", "shape", [-2, -3]),
    "half a row": put("a", "shape", [1.5, 4]),
    "whole, but a fraction": put("a", "shape", [2.0, 3]),
    "true": put("c", "shape", [True, 4]),
    "infinite": put("a", "data_offsets", [0, float("inf")]),
    "not a number": put("a", "shape", [float("nan"), 3]),
    "huge": put("a", "shape", [10**30, 0]),
    "a product that is huge": put("a", "shape", [2**40, 2**40]),
    "a text": put("a", "shape", "23"),
    "no dtype": lambda header: header["a"].pop("dtype"),
    "an unknown dtype": put("a", "dtype", "F31"),
    "half a character": lambda header: header.update({"\ud800": header.pop("a")}),
    "metadata that is not a string": lambda header: header.update({"__metadata__": {"format": 1}}),
}


@pytest.mark.parametrize("name", LEGAL)
def test_legal(name: str, tmp_path: Path) -> None:
    folder = file(tmp_path / "src", LEGAL[name])
    want = {k: v for k, v in whole(folder).items() if v[1] or k == "e"}
    assert answer(folder) == want


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    folder = file(tmp_path / "src", REFUSED[name])
    assert answer(folder) is None
    assert ckpttool("inspect", folder, "--check").code == 3


@pytest.mark.parametrize("more", [b"x", b"\0", b"{}", b","])
def test_something_behind_the_header(more: bytes, tmp_path: Path) -> None:
    assert answer(file(tmp_path / "src", more=more)) is None
    assert answer(file(tmp_path / "spaces", more=b" " * 8)) is not None


def test_a_name_twice(tmp_path: Path) -> None:
    folder = file(tmp_path / "src")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"b": {', b'"a": {'))
    assert answer(folder) is None


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 9, 100, -1, -8, -56])
def test_cut(cut: int, tmp_path: Path) -> None:
    folder = file(tmp_path / "src")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    assert answer(folder) is None


# -- an index is a hint


def sharded(tmp_path: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    folder = tmp_path / "src"
    shutil.copytree(FIXTURES / "merge/inputs/base", folder)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_bytes())
    edit(index)
    path.write_text(json.dumps(index))
    return folder


def all_in_one(index: dict[str, Any]) -> None:
    index["weight_map"] = dict.fromkeys(index["weight_map"], "model-00003-of-00003.safetensors")


@pytest.mark.parametrize("edit", [all_in_one, lambda index: index.pop("weight_map"), lambda index: index.clear()])
def test_an_index_that_lies_changes_nothing(edit: Callable[[dict[str, Any]], object], tmp_path: Path) -> None:
    assert answer(sharded(tmp_path, edit)) == read(FIXTURES / "merge/inputs/base", {})


# -- ranks that disagree


@pytest.fixture(scope="module")
def whole_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks") / "two"
    reshard(FIXTURES / "llama_tp8", folder, "-q", "--to", "ranks", "--tp-out", 2)
    return folder


def ranks(whole_ranks: Path, folder: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    """Two ranks, of which the last one's record is edited."""
    shutil.copytree(whole_ranks, folder)
    path = folder / "rank-00001-of-00002.safetensors"
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    record = json.loads(header["__metadata__"]["ckpttool"])
    edit(record)
    header["__metadata__"]["ckpttool"] = json.dumps(record)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])
    return folder


def box(record: dict[str, Any], name: str = "model.embed_tokens.weight") -> Any:
    """Start in the stored tensor, start in the whole one, extent."""
    return record["tensors"][name]["boxes"][0]


WRONG_RECORDS: dict[str, Callable[[dict[str, Any]], object]] = {
    "padding before the elements": lambda r: box(r)[0].__setitem__(0, 1),
    "a part of a row": lambda r: box(r)[0].__setitem__(0, 0.5),
    "another place in the tensor": lambda r: box(r)[1].__setitem__(0, 129),
    "a row less": lambda r: box(r)[2].__setitem__(0, 128),
    "below zero": lambda r: box(r)[1].__setitem__(0, -1),
    "infinite": lambda r: r["tensors"]["lm_head.weight"].update(shape=[float("inf"), 64]),
    "a fraction": lambda r: r["tensors"]["lm_head.weight"].update(shape=[259.5, 64]),
    "one row more": lambda r: r["tensors"]["lm_head.weight"].update(shape=[260, 64]),
    "a key that is not a string": lambda r: r["tensors"]["lm_head.weight"].update(key=5),
    "another mesh": lambda r: r["mesh"].update(tp=4),
    "another family": lambda r: r.update(family="qwen3"),
    "another rank": lambda r: r.update(rank=0),
}


@pytest.mark.parametrize("name", WRONG_RECORDS)
def test_ranks_that_disagree(name: str, whole_ranks: Path, tmp_path: Path) -> None:
    assert answer(ranks(whole_ranks, tmp_path / "same", lambda _: None)) is not None
    assert answer(ranks(whole_ranks, tmp_path / "src", WRONG_RECORDS[name])) is None


def with_config(tmp_path: Path, source: str, **changes: Any) -> Path:
    """A fixture with fields of its config.json changed; ``...`` removes a field."""
    folder = tmp_path / "src"
    shutil.copytree(FIXTURES / source, folder)
    config = json.loads((folder / "config.json").read_bytes()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    return folder


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("num_attention_heads", n) for n in (2, 4, "8", 8.0, None)),
        *(("num_key_value_heads", n) for n in (4, 8, "2", [2], ..., None)),
    ],
)
def test_heads_that_do_not_fit(field: str, value: Any, tmp_path: Path) -> None:
    """Query, key and value of a fused tensor lie where the numbers of heads say: a wrong number mixes them."""
    assert answer(with_config(tmp_path, "vllm_sharded_tp2", **{field: value})) is None


def test_one_head_that_copies_contradict(tmp_path: Path) -> None:
    """As one head, what are two would be two copies of it: they are compared when they are read."""
    folder = with_config(tmp_path, "vllm_sharded_tp2", num_key_value_heads=1)
    assert "differ" in refused(folder, tmp_path / "out", "--to", "hf")


# -- which way round


def test_a_unified_checkpoint_whose_writer_is_not_known(tmp_path: Path) -> None:
    """Only the version says which way round linear weights lie, where no shape does."""
    folder = tmp_path / "src"
    shutil.copytree(FIXTURES / "paddle_unified/pf12_llama_bf16_sharding2_split_param", folder)
    (folder / "config.json").write_text("{}")
    assert "which version" in refused(folder, tmp_path / "out", "--to", "hf")


def test_paddles_weights_without_a_family(tmp_path: Path) -> None:
    """They are [in, out], and were written as they are into files where [out, in] is expected."""
    folder = tmp_path / "src"
    shutil.copytree(FIXTURES / "paddle_zcc/sharding2_v1", folder)
    (folder / "config.json").write_text("{}")
    assert "which weights Paddle stores transposed depends on the model" in refused(
        folder, tmp_path / "out", "--to", "hf"
    )
    reshard(folder, tmp_path / "out", "-q", "--to", "hf", "--family", "llama")
    reshard(FIXTURES / "paddle_zcc/sharding2_v1", tmp_path / "want", "-q", "--to", "hf")
    assert whole(tmp_path / "out") == whole(tmp_path / "want")


def test_a_master_weight_without_a_name(tmp_path: Path) -> None:
    folder = tmp_path / "src"
    shutil.copytree(FIXTURES / "paddle_zcc/sharding2_v1", folder)
    path = folder / "optimizer.shard01.pdopt"
    data = path.read_bytes()
    at = data.index(b"\x8c", data.index(b"master_weights"))  # SHORT_BINUNICODE: the first name
    path.write_bytes(data[:at] + b")" + data[at + 2 + data[at + 1] :])  # EMPTY_TUPLE
    assert "is not a tensor" in refused(folder, tmp_path / "out", "--to", "hf")


# -- an interrupted run


@pytest.mark.parametrize("more", [0, 1, -1])
def test_a_journal_that_lists_other_parts_than_are_done(more: int, tmp_path: Path) -> None:
    """What it lists is not written again, so a damaged line must not be believed."""
    path = tmp_path / "journal"
    head = '{"journal": 2, "plan": "x", "parts": 30}'
    line = sealed('{"done":[[0,17]]}').replace("17", str(17 + more))
    path.write_text("\n".join([head, line, sealed('{"done":[[20,21]]}'), ""]))
    fd = os.open(path, os.O_RDWR)
    try:
        found = Journal(fd, str(path)).load("x", 30).parts
    finally:
        os.close(fd)
    assert found == (set() if more else {*range(17), 20})
    assert len(path.read_text().splitlines()) == (1 if more else 3)


# -- small files


@pytest.mark.parametrize(
    ("files", "id_"),
    [
        ({"model.safetensors": [7224]}, "manifest-json"),
        ({"model.safetensors": "7224"}, "manifest-json"),
        ({"x\ud800": 1}, "manifest-file"),
        ({"x\0": 1}, "manifest-file"),
    ],
)
def test_a_manifest_of_nonsense(files: Any, id_: str, tmp_path: Path) -> None:
    folder = tmp_path / "src"
    shutil.copytree(FIXTURES / "merge/inputs/tokA", folder)
    text = {"version": 1, "algorithm": "xxh3_128", "files": files, "tensors": {}}
    (folder / "ckpttool.manifest.json").write_text(json.dumps(text))
    done = ckpttool("inspect", folder, "--check")
    assert (done.code, id_ in done.out) == (3, True), done


@pytest.mark.parametrize("text", [b"[" * 1100, b"a: 2001-99-99", b"\xff", b"? [1]\n: 2", b"a: &x [*x]"])
def test_a_family_file_of_nonsense(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_bytes(text)
    with pytest.raises(CkptError):
        load_family(str(path), {})


@pytest.mark.parametrize("value", ["2001-99-99", "[" * 1100])
def test_a_parameter_of_nonsense(value: str) -> None:
    with pytest.raises(CkptError):
        recipe_of(["a", "b"], method="slerp", weights="", base=None, params=[f"t={value}"])


@pytest.mark.parametrize("pattern", ["a[[b]", "a[&&]", "re:[[a]", "re:[a||b]"])
def test_sets_that_a_later_python_may_read_otherwise(pattern: str) -> None:
    """Python warns of them, on the terminal of whoever uses one."""
    compile_pattern.cache_clear()
    assert compile_pattern(pattern).search("a[") or not pattern.startswith("a[[")


def test_a_hint_does_not_warn() -> None:
    with pytest.raises(CkptError, match="matches no tensor"):
        matching(["*$[[x]"], ["a.weight"], option="--remove-keys")


@pytest.mark.parametrize("rule", ["[z-a]=x", "re:[z-a]=x", "re:a{99999999999999999999}=x", "re:" + "(" * 5000 + "=x"])
def test_a_rename_of_nonsense(rule: str) -> None:
    with pytest.raises(CkptError, match="is not valid"):
        renamer([rule])
