"""What --dtype and parallel sizes do to the sections of config.json, and forms that engines cannot read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckpttool.formats.registry import WRITERS
from tests.helpers.command import ckpttool, refused, reshard
from tests.helpers.families import MODELS
from tests.helpers.tensorfile import assert_same, read_all, save_hf
from tests.reshard.test_tied import model

SECTIONS: dict[str, Any] = {
    "text_config": {"dtype": "float32", "torch_dtype": "float32", "hidden_size": 8, "tensor_parallel_size": 4},
    "vision_config": {"torch_dtype": "float32", "depth": 3},
    "thinker_config": {"audio_config": {"dtype": "float32"}, "dtype": "float32"},
    "quantization_config": {"dtype": "float32"},
    "rope_scaling": {"dtype": "float32"},
}


def sections(dst: Path) -> Any:
    return json.loads((dst / "config.json").read_text())


@pytest.mark.parametrize("command", ["reshard", "merge", "recipe"])
def test_a_cast_reaches_every_section(tmp_path: Path, command: str) -> None:
    source, dst = model(tmp_path / "src", same=True, **SECTIONS), tmp_path / "dst"
    if command == "recipe":
        (tmp_path / "r.yml").write_text(
            f"merge_method: linear\nmodels: [{{model: {source}, parameters: {{weight: 1}}}}]\ndtype: bfloat16\n"
        )
        done = ckpttool("merge", tmp_path / "r.yml", "-o", dst)
    elif command == "merge":
        done = ckpttool("merge", source, "-o", dst, "--dtype", "bf16")
    else:
        done = ckpttool("reshard", source, dst, "--to", "hf", "--dtype", "bf16")
    assert done.code == 0, done.err
    found = sections(dst)
    assert found["torch_dtype"] == "bfloat16"
    assert found["text_config"] == {
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "hidden_size": 8,
        "tensor_parallel_size": 1,
    }
    assert found["vision_config"] == {"torch_dtype": "bfloat16", "depth": 3}
    assert found["thinker_config"] == {"audio_config": {"dtype": "bfloat16"}, "dtype": "bfloat16"}
    assert found["rope_scaling"] == {"dtype": "float32"}
    assert found.get("quantization_config", SECTIONS["quantization_config"]) == {"dtype": "float32"}


def test_parallel_sizes_of_sections(tmp_path: Path) -> None:
    source = model(tmp_path / "src", same=True, **SECTIONS)
    reshard(source, tmp_path / "dst", "--tp-out", "2")
    assert sections(tmp_path / "dst")["text_config"]["tensor_parallel_size"] == 2


def test_dequantized_sections(tmp_path: Path) -> None:
    source = model(tmp_path / "src", same=True, text_config=SECTIONS["text_config"], vision_config={"dtype": "float32"})
    assert ckpttool("quantize", source, tmp_path / "fp8", "--recipe", "channel").code == 0
    done = ckpttool("quantize", tmp_path / "fp8", tmp_path / "dst", "--to", "bf16")
    assert done.code == 0, done.err
    found = sections(tmp_path / "dst")
    assert (found["text_config"]["dtype"], found["vision_config"]["dtype"]) == ("bfloat16", "bfloat16")


@pytest.mark.parametrize(
    ("target", "flag"),
    [
        ("vllm", "--unfuse"),
        ("trtllm", "--fuse"),
        ("trtllm", "--unfuse"),
        ("deepseek", "--fuse"),
        ("deepseek", "--unfuse"),
    ],
)
def test_forms_that_an_engine_cannot_read(tmp_path: Path, target: str, flag: str) -> None:
    error = refused(model(tmp_path / "src", same=True), tmp_path / "dst", "--to", target, flag, code=2)
    assert f"{flag} is not possible with --to {target}" in error


VOCABULARIES: list[dict[str, Any]] = [
    {"vocab_size": None},
    {"vocab_size": "19"},
    {"vocab_size": 17},
    {"vocab_size": 23},
]


@pytest.mark.parametrize("said", VOCABULARIES, ids=str)
@pytest.mark.parametrize("options", [("--to", "vllm"), ("--to", "trtllm", "--tp-out", "2")], ids=" ".join)
def test_a_vocabulary_that_would_be_lost_in_padding(tmp_path: Path, said: Any, options: tuple[str, ...]) -> None:
    error = refused(model(tmp_path / "src", same=True, **said), tmp_path / "dst", *options)
    assert "has 19 rows, and config.json " in error
    assert "set vocab_size to 19" in error


@pytest.mark.parametrize("vocab_size", [17, 23])
def test_a_vocabulary_that_divides_and_would_be_read_as_another(tmp_path: Path, vocab_size: int) -> None:
    """TensorRT-LLM pads to a multiple of the ranks: 19 rows on one rank need no padding, and would be read as 17."""
    source = model(tmp_path / "src", same=False, vocab_size=vocab_size, tie_word_embeddings=False)
    error = refused(source, tmp_path / "dst", "--to", "trtllm")
    assert f"has 19 rows, and config.json says a vocabulary of {vocab_size}" in error


@pytest.mark.sample("{'vocab_size': None}", "{'vocab_size': 17}")
@pytest.mark.parametrize("said", VOCABULARIES, ids=str)
def test_rank_files_record_the_rows(tmp_path: Path, said: Any) -> None:
    reshard(model(tmp_path / "src", same=True, **said), tmp_path / "dst", "--to", "ranks", "--tp-out", "2", "--verify")


def test_a_nested_vocabulary(tmp_path: Path) -> None:
    source = model(tmp_path / "src", same=True, vocab_size=None, text_config={"vocab_size": 19})
    reshard(source, tmp_path / "dst", "--to", "vllm", "--verify")
    other = model(tmp_path / "other", same=True, vocab_size=None, text_config={"vocab_size": 18})
    assert "says a vocabulary of 18" in refused(other, tmp_path / "no", "--to", "vllm")


NESTED = ("gemma2", "glm4_moe", "gpt2", "gpt_oss", "llama", "mixtral", "qwen2", "qwen3_moe", "deepseek_v3")


@pytest.mark.product(one_in=8)
@pytest.mark.parametrize("target", [n for n, w in WRITERS.items() if "model" in w.capabilities.components])
@pytest.mark.parametrize("name", NESTED)
def test_sizes_of_a_section_count(tmp_path: Path, name: str, target: str) -> None:
    """A text model whose fields are in `text_config` goes through every format as one that has them outside."""
    plain = MODELS[name]
    outside = ("architectures", "model_type", "torch_dtype", "dtype")
    inner = {k: v for k, v in plain.config.items() if k != "architectures"}
    nested = {**{k: v for k, v in plain.config.items() if k in outside}, "text_config": inner}
    ended = []
    for folder, config in (("plain", plain.config), ("nested", nested)):
        save_hf(tmp_path / folder, plain.tensors(), config)
        tp = ("--tp-out", 2) if WRITERS[target].capabilities.meshes else ()
        ended.append(ckpttool("reshard", tmp_path / folder, tmp_path / f"{folder}1", "--to", target, *tp).code)
        if not ended[-1]:
            reshard(tmp_path / f"{folder}1", tmp_path / f"{folder}2", "--to", "hf")
    assert ended[0] == ended[1]
    if not ended[0]:
        assert_same(read_all(tmp_path / "nested2"), read_all(tmp_path / "plain2"))
