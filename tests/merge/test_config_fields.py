"""config.json beside a merge: dtypes, numbers of tokens and their ids are those of what was written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.command import ckpttool
from tests.helpers.tensorfile import Raw, read
from tests.merge.models import HIDDEN, bf16, f32, floats, llama, llama_config, merge, save

EMBEDDING = "model.embed_tokens.weight"


def f16(values: np.ndarray[Any, Any]) -> Raw:
    return Raw("F16", np.ascontiguousarray(values, np.float16).view(np.uint16))


CAST = {"bfloat16": bf16, "float16": f16, "float32": f32}


def model(folder: Path, dtype: str, /, **fields: Any) -> Path:
    tensors = {n: CAST[dtype](floats(r)) for n, r in llama(layers=1, seed=len(dtype)).items()}
    return save(folder, tensors, llama_config(layers=1, **fields))


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


@pytest.mark.parametrize(
    ("one", "other", "options", "wanted"),
    [
        ("float16", "bfloat16", [], "float32"),
        ("float32", "bfloat16", [], "float32"),
        ("bfloat16", "bfloat16", [], "bfloat16"),
        ("float16", "bfloat16", ["--dtype", "bf16"], "bfloat16"),
    ],
    ids=lambda v: "".join(v) if isinstance(v, list) else v,
)
def test_dtypes_of_every_part(tmp_path: Path, one: str, other: str, options: list[str], wanted: str) -> None:
    said = {"torch_dtype": one, "vision_config": {"torch_dtype": one}, "decoder": {"model_type": "x", "dtype": one}}
    parts = {"dtype": {"": one, "text_config": one}}
    first = model(tmp_path / "a", one, **said, **parts)
    second = model(tmp_path / "b", other)
    merge(first, second, *options, "-o", tmp_path / "dst")
    config = config_of(tmp_path / "dst")
    assert {r.dtype for r in read(tmp_path / "dst" / "model.safetensors").values()} == {
        {"float32": "F32", "bfloat16": "BF16"}[wanted]
    }
    assert config["torch_dtype"] == wanted
    assert config["vision_config"]["torch_dtype"] == wanted
    assert config["decoder"]["dtype"] == wanted
    assert config["dtype"] == {"": wanted, "text_config": wanted}


def test_a_part_in_another_dtype(tmp_path: Path) -> None:
    """Norms in float32 stay what they are, and so does the part of the config that says so."""
    for name, dtype in (("a", f16), ("b", bf16)):
        tensors = {n: (f32 if "norm" in n else dtype)(floats(r)) for n, r in llama(layers=1, seed=ord(name)).items()}
        fields: dict[str, Any] = {"torch_dtype": "float16", "vision_config": {"torch_dtype": "float32"}}
        save(tmp_path / name, tensors, llama_config(layers=1, **fields))
    merge(tmp_path / "a", tmp_path / "b", "-o", tmp_path / "dst")
    config = config_of(tmp_path / "dst")
    assert config["torch_dtype"] == config["vision_config"]["torch_dtype"] == "float32"


PLACES = {
    "internvl": ({"model_type": "internvl_chat", "llm_config": {"model_type": "qwen2"}}, "llm_config"),
    "omni": (
        {
            "model_type": "qwen2_5_omni",
            "thinker_config": {"model_type": "t", "text_config": {"model_type": "qwen2"}},
            "talker_config": {"vocab_size": 8448},
        },
        "thinker_config.text_config",
    ),
    "llava": ({"model_type": "llava", "text_config": {"model_type": "llama"}}, "text_config"),
    "decoder": ({"model_type": "vision-encoder-decoder", "decoder": {"model_type": "gpt2"}}, "decoder"),
}


@pytest.mark.parametrize("which", ["min", "max"])
@pytest.mark.parametrize("place", PLACES)
def test_the_number_of_tokens_wherever_it_is(tmp_path: Path, place: str, which: str) -> None:
    for name, rows in (("a", 32), ("b", 40)):
        config = json.loads(json.dumps(PLACES[place][0]))
        part = config
        for step in PLACES[place][1].split("."):
            part = part[step]
        part |= {**llama_config(layers=1, vocab=rows, model_type=part["model_type"]), "pad_token_id": rows - 1}
        save(tmp_path / name, llama(layers=1, vocab=rows), config)
    for order in (("a", "b"), ("b", "a")):
        dst = tmp_path / "".join(order)
        merge(*[tmp_path / n for n in order], "--vocab", which, "-o", dst)
        rows = {"min": 32, "max": 40}[which]
        assert read(dst / "model.safetensors")[EMBEDDING].bits.shape == (rows, HIDDEN)
        part = config_of(dst)
        assert part.get("talker_config", {"vocab_size": 8448}) == {"vocab_size": 8448}
        for step in PLACES[place][1].split("."):
            part = part[step]
        assert part["vocab_size"] == rows
        pad = {"a": 31, "b": 39}[order[0]]
        assert part["pad_token_id"] == (pad if pad < rows else None)


def test_ids_that_a_smaller_vocabulary_lacks(tmp_path: Path) -> None:
    ids = {"bos_token_id": 1, "eos_token_id": [2, 38], "pad_token_id": 39, "image_token_id": 37}
    save(tmp_path / "a", llama(layers=1, vocab=40), llama_config(layers=1, vocab=40, **ids))
    save(tmp_path / "b", llama(layers=1), llama_config(layers=1))
    said = {"pad_token_id": 39, "eos_token_id": 38, "temperature": 0.5}
    (tmp_path / "a" / "generation_config.json").write_text(json.dumps(said))
    done = merge(tmp_path / "a", tmp_path / "b", "--vocab", "min", "-o", tmp_path / "dst")
    config = config_of(tmp_path / "dst")
    wanted = {"bos_token_id": 1, "eos_token_id": [2], "pad_token_id": None, "image_token_id": 37}
    assert {k: config[k] for k in wanted} == wanted
    assert "config.json: eos_token_id [2, 38], pad_token_id 39, image_token_id 37: no token of the output" in done.err
    generation = json.loads((tmp_path / "dst" / "generation_config.json").read_text())
    assert generation == {"pad_token_id": None, "eos_token_id": None, "temperature": 0.5}


@pytest.mark.parametrize("verb", ["merge", "reshard", "drop-keys"])
def test_what_the_config_still_counts_is_said(tmp_path: Path, verb: str) -> None:
    """transformers fills a layer that is not in the files with random numbers."""
    sources = [save(tmp_path / n, llama(seed=i)) for i, n in enumerate("ab" if verb == "merge" else "a")]
    patterns = ["model.layers.2.*", "lm_head.weight", "*layers.0.mlp.up_proj.weight"]
    command = [*sources, "-o", tmp_path / "dst"] if verb == "merge" else [*sources, tmp_path / "dst"]
    chosen = patterns if verb == "drop-keys" else [w for p in patterns for w in ("--remove-keys", p)]
    done = ckpttool(verb, *command, *chosen)
    assert done.code == 0, done.err
    for said in (
        "layer 0 loses some of its tensors",
        "layer 2 is gone, and config.json still counts 3",
        "`lm_head.weight` is required: the config does not tie it to the embeddings",
    ):
        assert done.err.count(said) == 1
