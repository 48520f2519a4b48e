"""Files that other software wrote, read, and written again byte for byte."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.command import refused, reshard
from tests.helpers.tensorfile import assert_same, read, read_all

FIXTURES = Path(__file__).parents[2] / "fixtures"
MP1 = "cbfad8e26b68cccd40450049b80d7b021c494ae117190f55748d1b757b2629a2"
"""sha256 of the one file that DeepSeek's converter writes for one rank."""


def weights(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.glob("*.safetensors"))}


def test_deepseek_converter(tmp_path: Path) -> None:
    """What inference/convert.py writes: the same files, and the tokenizer beside them."""
    done = reshard(FIXTURES / "deepseek_v3", tmp_path / "mp2", "--to", "deepseek", "--tp-out", 2, "--verify")
    assert weights(tmp_path / "mp2") == weights(FIXTURES / "deepseek_v3_mp2")
    assert {p.name for p in (tmp_path / "mp2").iterdir()} == {
        *(p.name for p in (FIXTURES / "deepseek_v3_mp2").iterdir()),
        "config.json",
    }
    assert "no multi-token-prediction layer" in done.err


def test_deepseek_converter_one_rank(tmp_path: Path) -> None:
    reshard(FIXTURES / "deepseek_v3", tmp_path / "mp1", "-q", "--to", "deepseek", "--tp-out", 1)
    (found,) = weights(tmp_path / "mp1").items()
    assert (found[0], hashlib.sha256(found[1]).hexdigest()) == ("model0-mp1.safetensors", MP1)


def test_deepseek_files_back(tmp_path: Path) -> None:
    """The converter has no way back; everything but the prediction layer, which it leaves out, is as published."""
    published = {n: r for n, r in read_all(FIXTURES / "deepseek_v3").items() if ".61." not in n}
    src = tmp_path / "src"
    src.mkdir()
    for path in (FIXTURES / "deepseek_v3_mp2").iterdir():
        (src / path.name).symlink_to(path)
    reshard(src, tmp_path / "bare", "-q", "--to", "hf")  # as they are, without a config
    assert_same(read_all(tmp_path / "bare"), published)
    (src / "config.json").write_bytes((FIXTURES / "deepseek_v3" / "config.json").read_bytes())
    reshard(src, tmp_path / "hf", "-q", "--to", "hf", "--verify")
    assert_same(read_all(tmp_path / "hf"), published)
    reshard(src, tmp_path / "mp1", "-q", "--tp-out", 1, "--to", "deepseek")
    assert hashlib.sha256(weights(tmp_path / "mp1")["model0-mp1.safetensors"]).hexdigest() == MP1


def test_deepseek_cut_that_its_converter_gets_wrong(tmp_path: Path) -> None:
    """o_proj has 256 inputs in two blocks: four ranks would share them. The converter stops, or mixes scales up."""
    error = refused(FIXTURES / "deepseek_v3", tmp_path / "mp4", "--to", "deepseek", "--tp-out", 4)
    assert "inside a scale block of 128" in error or "not a multiple of 4" in error


def test_vllm_saver(tmp_path: Path) -> None:
    reshard(
        FIXTURES / "hf_tiny_source", tmp_path / "v", "-q", "--to", "vllm", "--tp-out", 2, "--max-shard-size", 60_000
    )
    theirs = FIXTURES / "vllm_sharded_tp2"
    found = weights(tmp_path / "v")
    # The sample was saved by layers without attention caches; vLLM loads nothing without the four scales of each.
    more = {n: found.pop(n) for n in ("model-rank-0-part-3.safetensors", "model-rank-1-part-3.safetensors")}
    assert found == weights(theirs)
    for name in more:
        scales = read(tmp_path / "v" / name)
        assert scales.keys() == {
            f"model.layers.{i}.self_attn.attn._{n}_scale" for i in range(2) for n in ("k", "v", "q", "prob")
        }
        assert {(r.dtype, r.bits.shape, float(r.bits.view(np.float32))) for r in scales.values()} == {("F32", (), 1.0)}
    assert (tmp_path / "v" / "config.json").read_bytes() == (theirs / "config.json").read_bytes()


def test_vllm_state_back(tmp_path: Path) -> None:
    reshard(FIXTURES / "vllm_sharded_tp2", tmp_path / "hf", "-q", "--to", "hf", "--verify")
    source = FIXTURES / "hf_tiny_source"
    assert_same(read_all(tmp_path / "hf"), read_all(source))
    assert weights(tmp_path / "hf").keys() == weights(source).keys()


@pytest.mark.product(one_in=3)
@pytest.mark.parametrize("tp", [1, 4, 8])
def test_vllm_state_for_other_ranks(tp: int, tmp_path: Path) -> None:
    """From vLLM's two ranks and from the source, the same."""
    for name in ("vllm_sharded_tp2", "hf_tiny_source"):
        reshard(FIXTURES / name, tmp_path / name, "-q", "--to", "vllm", "--tp-out", tp)
    assert weights(tmp_path / "vllm_sharded_tp2") == weights(tmp_path / "hf_tiny_source")


def test_safetensors_file(tmp_path: Path) -> None:
    """A file that the safetensors library wrote, in its order of tensors: the same bytes."""
    reshard(FIXTURES / "hf_tiny_source", tmp_path / "hf", "-q")
    assert weights(tmp_path / "hf") == weights(FIXTURES / "hf_tiny_source")


def test_llama_of_a_training_run(tmp_path: Path) -> None:
    """The first example of the README; the sizes need not be said."""
    src = FIXTURES / "llama_tp8"
    said = reshard(src, tmp_path / "said", "--tp", 8, "--tp-out", 2, "--verify")
    reshard(src, tmp_path / "unsaid", "-q", "--tp-out", 2)
    assert weights(tmp_path / "said") == weights(tmp_path / "unsaid")
    assert "note: written as ranks" in said.err
    reshard(tmp_path / "said", tmp_path / "hf", "-q", "--to", "hf")
    got = read_all(tmp_path / "hf")
    assert got["lm_head.weight"].bits.shape == (259, 64)
    assert got["model.layers.3.self_attn.k_proj.weight"].bits.shape == (16, 64)
    assert {p.name for p in (tmp_path / "hf").iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"
    }  # fmt: skip
    reshard(tmp_path / "hf", tmp_path / "again", "-q", "--tp-out", 8)
    for rank in range(8):
        ours = read(tmp_path / "again" / f"rank-{rank:05d}-of-00008.safetensors")
        assert_same(ours, read(src / f"model_tp{rank}.safetensors"))


def test_what_the_safetensors_library_reads(tmp_path: Path) -> None:
    """Its own reader, on every kind of file that is written."""
    from safetensors import safe_open

    src = FIXTURES / "llama_tp8"
    reshard(src, tmp_path / "ranks", "-q", "--tp-out", 2, "--pp-out", 2)
    reshard(src, tmp_path / "hf", "-q", "--to", "hf", "--max-shard-size", "200KB")
    for folder in (tmp_path / "ranks", tmp_path / "hf"):
        paths = sorted(folder.glob("*.safetensors"))
        assert len(paths) > 1
        for path in paths:
            with safe_open(path, framework="np") as f:
                assert f.metadata()["format"] == "pt"
                names = list(f.keys())
                slices = {n: (f.get_slice(n).get_dtype(), f.get_slice(n).get_shape()) for n in names}
            assert slices == {n: (r.dtype, list(r.bits.shape)) for n, r in read(path).items()}


@pytest.mark.thorough  # importing torch takes long; test_contents.py and the two libraries above say the same
def test_what_torch_reads(tmp_path: Path) -> None:
    """The tensors of the source as torch sees them, cut by torch: what our rank files hold."""
    import torch
    from safetensors.torch import load_file

    reshard(FIXTURES / "hf_tiny_source", tmp_path / "dst", "-q", "--tp-out", 2)
    whole = load_file(FIXTURES / "hf_tiny_source" / "model.safetensors")
    for rank in (0, 1):
        mine = load_file(tmp_path / "dst" / f"rank-{rank:05d}-of-00002.safetensors")
        assert mine.keys() == whole.keys()
        for name, tensor in whole.items():
            if "norm" in name:
                want = tensor
            elif "embed" in name or "head" in name:
                want = torch.nn.functional.pad(tensor, (0, 0, 0, 1)).chunk(2, 0)[rank]
            else:
                want = tensor.chunk(2, 1 if "o_proj" in name or "down" in name else 0)[rank]
            assert mine[name].dtype == torch.bfloat16
            assert torch.equal(mine[name], want), name
