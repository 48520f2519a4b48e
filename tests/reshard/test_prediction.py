"""Layers of multi-token prediction: config.json counts those that are there, whatever left them out."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ckpttool.errors import UnsupportedError
from ckpttool.formats.config import PREDICTION
from ckpttool.formats.registry import WRITERS
from ckpttool.layout.family import family_names, load_family
from ckpttool.targeting.prediction import settled
from tests.helpers.command import ckpttool, reshard
from tests.helpers.families import LAYERS, MODELS
from tests.helpers.tensorfile import Tensors, assert_same, read_all, save_hf

PREDICTING = [n for n, m in MODELS.items() if any(m.config.get(f) for f in PREDICTION)]
OF_LAYERS = re.compile(rf"model\.layers\.{LAYERS}\.|(?:.*\.)?mtp[._]")


def source(name: str, at: Path) -> Tensors:
    """A model whose prediction layer has the embedding and the head of the model, as published."""
    model = MODELS[name]
    tensors = model.tensors()
    for n in tensors:
        if n.endswith(f".{LAYERS}.embed_tokens.weight"):
            tensors[n] = tensors["model.embed_tokens.weight"]
        if n.endswith("shared_head.head.weight"):
            tensors[n] = tensors["lm_head.weight"]
    save_hf(at, tensors, model.config)
    return tensors


def config(at: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((at / "config.json").read_text())
    return found


def counted(at: Path) -> list[int]:
    return [config(at)[f] for f in PREDICTION if f in config(at)]


@pytest.mark.parametrize("target", [n for n, w in WRITERS.items() if "model" in w.capabilities.components])
@pytest.mark.parametrize("name", PREDICTING)
def test_formats_count_what_they_hold(tmp_path: Path, name: str, target: str) -> None:
    tensors = source(name, tmp_path / "src")
    done = ckpttool("reshard", tmp_path / "src", tmp_path / "out", "--to", target, "--verify")
    if done.code:
        assert done.code in (1, 2)
        assert "would be lost" not in done.err
        return
    reshard(tmp_path / "out", tmp_path / "back", "--to", "hf")
    back = read_all(tmp_path / "back")
    held = any(map(OF_LAYERS.match, back))
    assert counted(tmp_path / "back") == [int(held)]
    if held:
        assert_same(back, {n: r for n, r in tensors.items() if "inv_freq" not in n})
    else:
        assert f"{LAYERS} on left out" in done.err or "which the target does not store" in done.err
        assert "is 0 now; it was 1" in done.err


COMMANDS: dict[str, tuple[object, ...]] = {
    "reshard": ("reshard", "{src}", "{dst}", "--remove-keys", f"model.layers.{LAYERS}.*"),
    "reshard, kept": ("reshard", "{src}", "{dst}", "--keep-keys", "re:^(?!model\\.layers\\.3\\.).*"),
    "drop-keys": ("drop-keys", "{src}", "{dst}", f"model.layers.{LAYERS}.*"),
    "reshard without": ("reshard", "{src}", "{dst}", "--remove-keys", f"model.layers.{LAYERS}.*", "--to", "torch-bin"),
    "merge": (
        "merge",
        "{src}",
        "{src}2",
        "-o",
        "{dst}",
        "--remove-keys",
        f"model.layers.{LAYERS}.*",
        "--allow-nonfinite",
    ),
    "unified": ("reshard", "{src}", "{dst}", "--to", "unified", "--remove-keys", f"model.layers.{LAYERS}.*"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_count_what_they_leave(tmp_path: Path, command: str) -> None:
    source("glm4_moe", tmp_path / "src")
    source("glm4_moe", tmp_path / "src2")
    words = [str(w).format(src=tmp_path / "src", dst=tmp_path / "dst") for w in COMMANDS[command]]
    done = ckpttool(*words)
    assert done.code == 0, done.err
    assert config(tmp_path / "dst")["num_nextn_predict_layers"] == 0
    assert "config.json: num_nextn_predict_layers is 0 now; it was 1" in done.err
    done = reshard(tmp_path / "dst", tmp_path / "again", "--to", "hf")
    assert "num_nextn_predict_layers" not in done.err


@pytest.mark.parametrize(
    ("ranges", "wanted"), [([(0, 3)], 0), ([(0, 2)], 0), ([(0, 2), (1, 3)], 0), ([(0, 2), (1, 4)], 1)]
)
def test_slices_count_what_they_take(tmp_path: Path, ranges: list[tuple[int, int]], wanted: int) -> None:
    source("glm4_moe", tmp_path / "src")
    slices = [{"sources": [{"model": str(tmp_path / "src"), "layer_range": [*r]}]} for r in ranges]
    recipe = {"merge_method": "passthrough", "slices": slices}
    (tmp_path / "recipe.yml").write_text(json.dumps(recipe))
    done = ckpttool("merge", tmp_path / "recipe.yml", "-o", tmp_path / "dst", "--allow-nonfinite", "--verify")
    assert done.code == 0, done.err
    said = config(tmp_path / "dst")
    assert (said["num_nextn_predict_layers"], said["num_hidden_layers"]) == (
        wanted,
        sum(b - a for a, b in ranges) - wanted,
    )
    assert ("num_nextn_predict_layers is 0 now; it was 1" in done.err) is not bool(wanted)
    assert "has no such layer" not in done.err


def test_a_merge_with_a_model_without_them(tmp_path: Path) -> None:
    tensors = source("glm4_moe", tmp_path / "src")
    less = {n: r for n, r in tensors.items() if not OF_LAYERS.match(n)}
    save_hf(tmp_path / "less", less, MODELS["glm4_moe"].config)
    options = ("-o", tmp_path / "dst", "--missing", "skip", "--allow-nonfinite")
    done = ckpttool("merge", tmp_path / "src", tmp_path / "less", *options)
    assert done.code == 0, done.err
    assert config(tmp_path / "dst")["num_nextn_predict_layers"] == 0
    assert "num_nextn_predict_layers is 0 now; it was 1" in done.err
    assert "has no such layer" not in done.err


def test_a_source_without_them_is_named(tmp_path: Path) -> None:
    """transformers leaves them out when it saves a model, and its config counts them still."""
    model = MODELS["glm4_moe"]
    tensors = {n: r for n, r in model.tensors().items() if not OF_LAYERS.match(n)}
    save_hf(tmp_path / "src", tensors, model.config)
    done = reshard(tmp_path / "src", tmp_path / "dst", "--tp-out", 2)
    assert "config.json says num_nextn_predict_layers 1, and the source has no such layer" in done.err
    assert (tmp_path / "dst/config.json").read_bytes() == (tmp_path / "src/config.json").read_bytes()


NAMES = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(4)]


@pytest.mark.parametrize("field", PREDICTION)
@pytest.mark.parametrize(
    "own",
    [
        ["model.layers.4.eh_proj.weight"],
        ["mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight"],
        ["model.mtp_block.0.mlp.up_proj.weight", "model.mtp_emb_norm.0.weight"],
        ["model.mtp_layers.0.input_proj.weight"],
        ["model.mtp.embed_tokens.weight", "model.mtp.layers.0.eh_proj.weight"],
        ["mtp.layers.0.norm.weight", "mtp.layers.1.norm.weight"],
    ],
    ids=lambda own: own[0],
)
def test_names_of_prediction_layers(own: list[str], field: str) -> None:
    towers = [f"visual.blocks.{i}.attn.qkv.weight" for i in range(6)]
    inner: dict[str, object] = {"num_hidden_layers": 4, field: 1}
    for said in (inner, {"text_config": inner}):
        for more in ([], towers):
            every = [*NAMES, *own, *more]
            assert settled(said, every, every) == (said, [])
            out, notes = settled(said, every, [*NAMES, *more])
            assert out.get("text_config", out) == {**inner, field: 0}
            assert notes == [f"config.json: {field} is 0 now; it was 1"]


def test_some_of_several() -> None:
    said = {"num_hidden_layers": 4, "num_nextn_predict_layers": 3}
    every = [*NAMES, *(f"model.layers.{i}.eh_proj.weight" for i in (4, 5, 6))]
    out, notes = settled(said, every, every[:-1])
    assert out["num_nextn_predict_layers"] == 2
    assert notes == ["config.json: num_nextn_predict_layers is 2 now; it was 3"]
    out, notes = settled(said, every, [*every[:4], *every[5:]])
    assert out == said
    assert "only a part of these layers" in notes[0]


def test_a_count_that_is_not_said_is_written() -> None:
    """DeepSeek-V3's config means one prediction layer where it has no field."""
    said = {"num_hidden_layers": 4}
    every = [*NAMES, "model.layers.4.eh_proj.weight"]
    out, _ = settled(said, every, NAMES, "num_nextn_predict_layers")
    assert out["num_nextn_predict_layers"] == 0
    assert settled(said, every, NAMES) == (said, [])
    assert settled(said, NAMES, NAMES, "num_nextn_predict_layers") == (said, [])


def test_every_field_of_the_families_is_known() -> None:
    seen = set()
    for name in family_names():
        with suppress(UnsupportedError):  # a family around that of a language model
            family = load_family(name, {})
        if family.prediction_field:
            seen.add(name)
            fields = {family.prediction_field}
            todo = [family.prediction_field]
            while todo:
                default = family.vocabulary.defaults.get(todo.pop())
                if isinstance(default, str) and default.isidentifier():
                    fields.add(default)
                    todo.append(default)
            assert fields <= {*PREDICTION}, name
    assert len(seen) >= 10
