"""torch itself: it writes what tests/formats/test_torch_bin.py reads, and loads what the tool writes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from ckpttool.containers.pickle_write import Hole
from ckpttool.containers.torch_write import lay_out_torch
from ckpttool.containers.torch_zip import read_torch
from tests.helpers.command import ckpttool, reshard
from tests.peers.torch_files import WRITTEN, written

FIXTURES = WRITTEN.parent


def raw(t: torch.Tensor) -> bytes:
    flat = t.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert {k: (t.dtype, t.shape, raw(t)) for k, t in got.items()} == {
        k: (t.dtype, t.shape, raw(t)) for k, t in want.items()
    }


def load(folder: Path) -> dict[str, torch.Tensor]:
    """With the strictest settings, from the file and in place."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("pytorch_model*.bin")):
        tensors = torch.load(path, weights_only=True)
        same(torch.load(path, weights_only=True, mmap=True), tensors)
        found |= tensors
    return found


def test_what_this_torch_writes_is_read_as_the_fixtures_are(tmp_path: Path) -> None:
    def told(folder: Path, name: str) -> tuple[int, str, str]:
        done = ckpttool("inspect", folder / name, "--hash", "--list", "--json")
        out = json.dumps(json.loads(done.out)["list"]) if done.code == 0 else done.out
        return done.code, out, done.err.replace(str(folder), "")

    made = written()
    assert made.keys() == {path.name for path in WRITTEN.glob("*.bin")}
    for name, data in made.items():
        (tmp_path / name).write_bytes(data)
        assert told(tmp_path, name) == told(WRITTEN, name), name


@pytest.mark.parametrize("options", [(), ("--max-shard-size", "20KB"), ("--workers", 1, "--manifest")])
@pytest.mark.parametrize("source", ["sharded", "dtypes"])
def test_torch_loads_what_is_written(source: str, options: tuple[object, ...], tmp_path: Path) -> None:
    reshard(FIXTURES / source, tmp_path / "out", "--to", "torch-bin", *options)
    same(load(tmp_path / "out"), load_file(FIXTURES / f"{source}.safetensors"))


def test_torch_loads_what_is_merged_and_tied(tmp_path: Path) -> None:
    reshard(FIXTURES / "sharded", tmp_path / "hf", "--to", "hf")
    done = ckpttool("merge", FIXTURES / "sharded", tmp_path / "hf", "-o", tmp_path / "merged", "--to", "torch-bin")
    assert done.code == 0, done.err
    same(load(tmp_path / "merged"), load_file(FIXTURES / "sharded.safetensors"))
    src = tmp_path / "src"
    src.mkdir()
    fields = {"model_type": "qwen2", "num_hidden_layers": 1, "hidden_size": 2, "vocab_size": 4}
    (src / "config.json").write_text(json.dumps({**fields, "tie_word_embeddings": True}))
    (src / "pytorch_model.bin").write_bytes((WRITTEN / "tied.bin").read_bytes())
    reshard(src, tmp_path / "tied", "--to", "torch-bin")
    same(load(tmp_path / "tied"), {"model.embed_tokens.weight": torch.arange(8.0).reshape(4, 2)})


def test_beyond_4_gib(tmp_path: Path) -> None:
    """Sizes and offsets of zip64; the bytes of the tensors are a hole in the file."""
    laid = lay_out_torch(
        {"a": Hole("F32", (1 << 30, 1)), "b": Hole("I8", (3,)), "c": Hole("F8_E4M3", (5 << 30,))}, "big"
    )
    path = tmp_path / "big.bin"
    with path.open("wb") as f:
        f.truncate(laid.size)
        for at, data in laid.literals:
            f.seek(at)
            f.write(data)
    found = torch.load(path, weights_only=True, mmap=True)
    assert [(t.shape, t.dtype) for t in found.values()] == [
        *(((1 << 30, 1), torch.float32), ((3,), torch.int8), ((5 << 30,), torch.float8_e4m3fn)),
    ]


def views() -> st.SearchStrategy[torch.Tensor]:
    """Any view of a storage: offsets, strides of 0, overlaps, no elements."""

    def make(shape: list[int], strides: list[int], offset: int, dtype: torch.dtype) -> torch.Tensor:
        reach = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=False)) + 1
        base = torch.arange(max(reach, 1)).to(dtype)
        return base.as_strided(shape, strides[: len(shape)], offset) if 0 not in shape else torch.empty(shape)

    return st.builds(
        make,
        st.lists(st.integers(0, 4), max_size=4),
        st.lists(st.integers(0, 9), min_size=4, max_size=4),
        st.integers(0, 9),
        st.sampled_from([torch.float32, torch.int64, torch.bfloat16, torch.int8, torch.uint16]),
    )


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("views")


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(min_size=1, max_size=8), views(), min_size=1, max_size=4), st.booleans())
def test_any_views(scratch: Path, tensors: dict[str, torch.Tensor], zipped: bool) -> None:
    path = scratch / "a.bin"
    torch.save(tensors, path, _use_new_zipfile_serialization=zipped)
    file = read_torch(path)
    data = np.fromfile(path, np.uint8)
    for name, tensor in file.value.items():
        t = file.place(tensor, name, 0)
        size = tensors[name].element_size()
        strides = [s * size for s in t.element_strides]
        cells = np.ndarray(t.shape, f"V{size}", data, t.offset, strides) if 0 not in t.shape else np.empty(0, "V1")
        assert (t.shape, cells.tobytes()) == (tuple(tensors[name].shape), raw(tensors[name]))
