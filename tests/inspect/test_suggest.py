"""A family file for a model that none is for: a start, in which what could not be known is marked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.layout.nearest import fitting
from tests.helpers.command import ckpttool
from tests.helpers.tensorfile import Raw, write

CONFIG = {
    "model_type": "foo", "architectures": ["FooForCausalLM"], "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100,
}  # fmt: skip


def raw(array: np.ndarray[Any, Any]) -> Raw:
    return Raw("F32", array)


def model(folder: Path, extra: dict[str, tuple[int, ...]] | None = None, **config: Any) -> Path:
    """A model like Llama under other prefixes, with a tower, a mixer of its own, and biases as GPT-2 has them."""
    random = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "foo.embed_tokens.weight": (100, 32), "foo.norm.weight": (32,), "lm_head.weight": (100, 32),
        "foo.magic": (4, 4), **(extra or {}),
    }  # fmt: skip
    for i in range(2):
        inside = {
            "self_attn.q_proj.weight": (32, 32), "self_attn.k_proj.weight": (16, 32),
            "self_attn.v_proj.weight": (16, 32), "self_attn.o_proj.weight": (32, 32), "mixer.strange": (32, 32),
            "mlp.gate_proj.weight": (48, 32), "mlp.up_proj.weight": (48, 32), "mlp.down_proj.weight": (32, 48),
            "input_layernorm.weight": (32,), "post_attention_layernorm.weight": (32,),
            "mlp.experts.0.down_proj.weight": (32, 48),
        }  # fmt: skip
        shapes |= {f"foo.layers.{i}.{name}": shape for name, shape in inside.items()}
        shapes[f"vision.blocks.{i}.attn.proj.weight"] = (32, 32)
    tensors = {n: raw(random.standard_normal(s, dtype=np.float32)) for n, s in shapes.items()}
    folder.mkdir()
    write(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}), encoding="utf-8")
    return folder


def test_it_can_be_used_at_once(tmp_path: Path) -> None:
    src = model(tmp_path / "src")
    done = ckpttool("inspect", src, "--suggest-family")
    assert "the nearest family is " in done.err
    assert "not known: [32, 32]. Whole on every rank" in done.out
    family = tmp_path / "foo.yaml"
    family.write_text(done.out, encoding="utf-8")
    done_too = ckpttool("reshard", src, tmp_path / "out", "--tp-out", 2, "--pp-out", 2, "--family", family, "--verify")
    assert done_too.code == 0, done_too.err
    ranks = json.loads(ckpttool("inspect", tmp_path / "out", "--list", "--json").out)
    assert ranks["mesh"]["pp"] == 2
    lines = done.out.splitlines()
    assert "    self_attn.k_proj.weight: column kv_heads" in lines
    assert '  prefix: "foo.layers.{layer}."' in lines
    assert '    prefix: "vision.blocks.{layer}."' in lines, "a tower is no stack of the decoder's layers"
    assert '    "mlp.experts.{expert}.down_proj.weight": row' in lines


def test_what_is_not_known_is_said(tmp_path: Path) -> None:
    """Where config.json has no such field, no rule is taken over that needs it."""
    src = model(tmp_path / "src", num_attention_heads=None, num_key_value_heads=None)
    said = json.loads(ckpttool("inspect", src, "--suggest-family", "--json").out)
    assert said["view"] == "family"
    assert "  # heads: not known; which field of config.json counts them?" in said["text"]
    assert {"foo.layers.{layer}.self_attn.q_proj.weight", "foo.magic"} <= set(said["doubts"])
    assert "column heads\n" not in said["text"].replace("`column heads`", "")


def test_names_cannot_write_lines(tmp_path: Path) -> None:
    src = model(tmp_path / "src", {'a"\n  b: vocab #': (3, 3)}, model_type="x]\nfamily: llama", architectures=["a, b"])
    family = tmp_path / "foo.yaml"
    family.write_text(ckpttool("inspect", src, "--suggest-family").out, encoding="utf-8")
    done = ckpttool("reshard", src, tmp_path / "out", "--tp-out", 2, "--family", family, "--verify")
    assert done.code == 0, done.err


def test_the_refusal_names_the_nearest(tmp_path: Path) -> None:
    done = ckpttool("reshard", model(tmp_path / "src"), tmp_path / "out", "--tp-out", "2")
    assert done.code == 1
    assert "the nearest family is `" in done.err
    assert "ckpttool inspect SRC --suggest-family" in done.err


@pytest.mark.parametrize("other", ["--list", "--ranks", "--check"])
def test_one_question_at_a_time(tmp_path: Path, other: str) -> None:
    done = ckpttool("inspect", model(tmp_path / "src"), "--suggest-family", other)
    assert done.code == 2
    assert "cannot be combined" in done.err


def test_names_of_no_model(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", {"x": raw(np.zeros(3, np.float32))})
    done = ckpttool("inspect", tmp_path / "a.safetensors", "--suggest-family")
    assert "no family is near" in done.err
    assert "x: replicate" in done.out


def test_a_tower_that_a_family_holds_whole_is_no_resemblance() -> None:
    """`blocks.*: replicate` fits a vision tower, and every other model with such names."""
    assert fitting(["blocks.0.attn.q.weight", "blocks.0.b.weight"]) == []
    assert "llama" in fitting(["model.layers.0.self_attn.q_proj.weight", "model.norm.weight"])
