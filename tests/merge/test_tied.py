"""Tied tensors are one tensor: merged once and written once, whatever the files of each model hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.kernels.merge import METHODS
from ckpttool.layout.family import family_names, load_family
from tests.helpers.tensorfile import Tensors, read, write
from tests.merge.models import bf16, finetuned, floats, llama, llama_config, merge, refused, save

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
CONFIG = llama_config(layers=1, tie_word_embeddings=True)


def tied(seed: int, *stored: str, like: Tensors | None = None) -> Tensors:
    """A tied model whose file holds these of its two names."""
    tensors = llama(layers=1, seed=seed) if like is None else finetuned(like, seed)
    embedding = tensors.pop(EMBEDDING)
    tensors.pop(HEAD, None)
    return {**dict.fromkeys(stored, embedding), **tensors}


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


DARE = ("--method", "dare_linear", "--weights", "0.7", "--param", "density=0.5")
STORED = [(EMBEDDING, HEAD), (EMBEDDING,), (HEAD,)]


VALUES = {"weight": 0.5, "density": 0.5, "epsilon": 0.1, "gamma": 0.05, "scale": 0.9, "t": 0.3, "decay": 0.4}


def recipe(file: Path, method: str, models: list[Path], base: Path) -> Path:
    """With a filter on each of two tied names, in every parameter of a method that a filter may decide."""
    known = METHODS[method]

    def filtered(value: float) -> list[dict[str, Any]]:
        other = [{"filter": "lm_head", "value": value / 2}, {"filter": "embed_tokens", "value": value * 0.8}]
        return [*other, {"value": value}]

    each = {p: filtered(VALUES[p]) for p in known.per_model}
    every = {p: filtered(VALUES[p]) for p, said in known.whole.items() if said.default is None}
    used = models[: known.models[1] or 2]
    said = {"models": [{"model": str(m), "parameters": each} for m in used], "parameters": every}
    with_base = {"base_model": str(base)} if known.base == "needed" else {}
    file.write_text(json.dumps({"merge_method": method, **said, **with_base}))
    return file


@pytest.mark.product(one_in=16)
@pytest.mark.parametrize("first", STORED, ids=len)
@pytest.mark.parametrize("second", STORED, ids=len)
@pytest.mark.parametrize("method", METHODS)
def test_every_method(tmp_path: Path, method: str, first: tuple[str, ...], second: tuple[str, ...]) -> None:
    """As if all files held the embedding alone."""
    base = tied(0, EMBEDDING)
    for name, stored in (("a", first), ("b", second), ("base", second)):
        for folder, held in ((name, stored), (name + "1", (EMBEDDING,))):
            values = tied(0, *held) if name == "base" else tied(ord(name), *held, like=base)
            save(tmp_path / folder, values, CONFIG)
    for dst, end in (("dst", ""), ("judge", "1")):
        models = [tmp_path / f"{m}{end}" for m in "ab"]
        file = recipe(tmp_path / f"{dst}.yml", method, models, tmp_path / f"base{end}")
        merge(file, "-o", tmp_path / dst)
    ours, judge = (read(tmp_path / d / "model.safetensors") for d in ("dst", "judge"))
    assert HEAD not in ours
    assert ours.keys() == judge.keys()
    assert all(np.array_equal(ours[n].bits, judge[n].bits) for n in ours)
    assert config_of(tmp_path / "dst")["tie_word_embeddings"] is True


def test_a_head_that_differs_is_refused(tmp_path: Path) -> None:
    """Versions of transformers take one or the other."""
    one = tied(0, EMBEDDING, HEAD)
    save(tmp_path / "a", one, CONFIG)
    save(tmp_path / "b", {**tied(1, EMBEDDING, like=one), HEAD: one[HEAD]}, CONFIG)
    error = refused(tmp_path / "dst", tmp_path / "a", tmp_path / "b")
    assert "which the config ties to each other, differ" in error
    merge(tmp_path / "a", tmp_path / "b", "--remove-keys", HEAD, "-o", tmp_path / "dst")
    assert HEAD not in read(tmp_path / "dst" / "model.safetensors")


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")], ids="".join)
@pytest.mark.parametrize("target", ["hf", "vllm"])
def test_with_a_model_that_is_not_tied(tmp_path: Path, order: tuple[str, str], target: str) -> None:
    one = tied(0, EMBEDDING)
    save(tmp_path / "a", one, CONFIG)
    save(tmp_path / "b", llama(layers=1, seed=1), llama_config(layers=1))
    folders = [tmp_path / n for n in order]
    done = merge(*folders, "--weights", "0.5,0.5", "--dtype", "f32", "--to", target, "-o", tmp_path / "dst", "--verify")
    assert f"by themselves in others and in the output: {HEAD}" in done.err
    assert config_of(tmp_path / "dst")["tie_word_embeddings"] is False
    other = llama(layers=1, seed=1)
    file = min((tmp_path / "dst").glob("model*.safetensors"))  # vLLM's has more files beside its part 0
    written = read(file)
    for name in (EMBEDDING, HEAD):
        wanted = (floats(one[EMBEDDING]) + floats(other[name])) / 2
        np.testing.assert_allclose(floats(written[name])[: len(wanted)], wanted, rtol=1e-6, atol=1e-6)


def test_a_recipe_for_the_head_alone(tmp_path: Path) -> None:
    """A filter that names a tensor which is none, and slices whose last models are others than the first."""
    for name in "ab":
        save(tmp_path / name, tied(ord(name), EMBEDDING, HEAD), CONFIG)
    recipe = {
        "merge_method": "linear",
        "models": [
            {"model": str(tmp_path / n), "parameters": {"weight": [{"filter": "lm_head", "value": w}, {"value": 0.5}]}}
            for n, w in (("a", 1), ("b", 0))
        ],
    }
    (tmp_path / "recipe.yml").write_text(json.dumps(recipe))
    done = merge(tmp_path / "recipe.yml", "-o", tmp_path / "dst")
    assert "the filter `lm_head` (weight" in done.err
    assert "decides about no tensor" in done.err
    assert HEAD not in read(tmp_path / "dst" / "model.safetensors")
    recipe = {
        "merge_method": "passthrough",
        "slices": [{"sources": [{"model": str(tmp_path / n), "layer_range": [0, 1]}]} for n in "ab"],
    }
    (tmp_path / "stack.yml").write_text(json.dumps(recipe))
    merge(tmp_path / "stack.yml", "-o", tmp_path / "stack")
    written = read(tmp_path / "stack" / "model.safetensors")
    assert HEAD not in written
    assert np.array_equal(written[EMBEDDING].bits, read(tmp_path / "a" / "model.safetensors")[EMBEDDING].bits)


@pytest.mark.parametrize("stored", STORED[:2], ids=len)
def test_patterns_for_either(tmp_path: Path, stored: tuple[str, ...]) -> None:
    for name in "ab":
        save(tmp_path / name, tied(ord(name), *stored), CONFIG)
    sources = [tmp_path / "a", tmp_path / "b"]
    merge(*sources, "-o", tmp_path / "all")
    everything = read(tmp_path / "all" / "model.safetensors")
    everything[HEAD] = everything[EMBEDDING]
    body = everything.keys() - {EMBEDDING, HEAD}
    for i, (option, pattern, names) in enumerate(
        [
            ("--remove-keys", HEAD, {*body, EMBEDDING}),
            ("--remove-keys", EMBEDDING, {*body, *stored} - {EMBEDDING}),
            ("--remove-keys", f"re:{EMBEDDING}|{HEAD}", body),
            ("--keep-keys", HEAD, {EMBEDDING}),
            ("--keep-keys", EMBEDDING, {EMBEDDING}),
        ]
    ):
        merge(*sources, option, pattern, "-o", tmp_path / f"{i}")
        left = read(tmp_path / f"{i}" / "model.safetensors")
        assert left.keys() == names
        assert all(np.array_equal(left[n].bits, everything[n].bits) for n in left)


def test_the_head_that_is_left_of_both(tmp_path: Path) -> None:
    """The head stays, as `reshard` leaves it; where a model has none, there is nothing to merge it with."""
    for name, stored in (("a", (EMBEDDING, HEAD)), ("b", (EMBEDDING, HEAD)), ("c", (EMBEDDING,))):
        save(tmp_path / name, tied(ord(name), *stored), CONFIG)
    out = ("--remove-keys", EMBEDDING, "-o", tmp_path / "dst")
    done = merge(tmp_path / "a", tmp_path / "b", "--dtype", "f32", *out, "--verify")
    assert f"`{HEAD}` stays, because the patterns name `{EMBEDDING}` only" in done.err
    assert config_of(tmp_path / "dst")["tie_word_embeddings"] is True
    wanted = (floats(tied(ord("a"), HEAD)[HEAD]) + floats(tied(ord("b"), HEAD)[HEAD])) / 2
    np.testing.assert_array_equal(floats(read(tmp_path / "dst" / "model.safetensors")[HEAD]), wanted)
    error = refused(tmp_path / "other", tmp_path / "a", tmp_path / "c", "--remove-keys", EMBEDDING)
    assert HEAD in error


def family_model(folder: Path, ties: dict[str, str], config: dict[str, Any], seed: int) -> list[Path]:
    """All names of tied tensors, and a file with those that own them alone."""
    rng = np.random.default_rng(seed)
    owners = {o: bf16(rng.standard_normal((6, 4) if o.endswith("weight") else 6)) for o in ties.values()}
    other = {"some.norm.weight": bf16(rng.standard_normal(4))}
    out = []
    for name, tensors in (("both", {**{c: owners[o] for c, o in ties.items()}, **owners}), ("owners", owners)):
        (folder / f"{name}{seed}").mkdir(parents=True)
        (folder / f"{name}{seed}" / "config.json").write_text(json.dumps(config))
        write(folder / f"{name}{seed}" / "model.safetensors", {**tensors, **other}, {"format": "pt"})
        out.append(folder / f"{name}{seed}")
    return out


def _families() -> dict[str, tuple[dict[str, Any], dict[str, str]]]:
    """Families that are known by one field, and what they tie."""
    out = {}
    for name in family_names():
        try:
            spec = load_family(name, {}).spec
            config = {"model_type": spec.model_types[0] if spec.model_types else name, "tie_word_embeddings": True}
            ties = load_family(name, config).ties
        except Exception:  # noqa: BLE001, S112  (sizes that a config must have)
            continue
        out[name] = (config, ties)
    return out


FAMILIES = _families()


def test_most_families_are_tried() -> None:
    assert len(FAMILIES) > 100


@pytest.mark.product(one_in=8)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(tmp_path: Path, family: str) -> None:
    config, ties = FAMILIES[family]
    method = [*METHODS][[*FAMILIES].index(family) % len(METHODS)]  # all of them, with several families each
    pairs = list(zip(*[family_model(tmp_path, ties, config, s) for s in range(3)], strict=True))
    for models, dst in zip(pairs, ("dst", "judge"), strict=True):
        base, *tuned = models
        file = recipe(tmp_path / f"{dst}.yml", method, tuned, base)
        merge(file, "--family", family, "-o", tmp_path / dst)
    ours, judge = ((tmp_path / d / "model.safetensors").read_bytes() for d in ("dst", "judge"))
    assert ours == judge


@pytest.mark.parametrize("flag", [True, False])
def test_the_embeddings_of_t5_are_one_whatever_the_config_says_of_the_head(tmp_path: Path, *, flag: bool) -> None:
    config = {"model_type": "t5", "tie_word_embeddings": flag, "num_layers": 1, "num_heads": 1}
    names = ["shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
    rng = np.random.default_rng(0)
    for folder in "ab":
        shared = bf16(rng.standard_normal((6, 4)))
        head = shared if flag else bf16(rng.standard_normal((6, 4)))
        save(tmp_path / folder, {**dict.fromkeys(names, shared), HEAD: head}, config)
    merge(tmp_path / "a", "--base", tmp_path / "b", *DARE, "-o", tmp_path / "dst")
    assert set(read(tmp_path / "dst" / "model.safetensors")) == {"shared.weight"} | (set() if flag else {HEAD})
    assert config_of(tmp_path / "dst")["tie_word_embeddings"] is flag


STORED_OF_BART = [(), (HEAD,), ("model.encoder.embed_tokens.weight",), ("model.shared.weight",)]


@pytest.mark.parametrize("stored", STORED_OF_BART, ids=["alone", "and head", "and encoder", "and shared"])
def test_a_decoder_of_bart_alone_has_no_shared_embedding(tmp_path: Path, stored: tuple[str, ...]) -> None:
    """BartForCausalLM: written under the name that its class has, unless a model stores the shared one."""
    config = {"model_type": "bart", "architectures": ["BartForCausalLM"], "tie_word_embeddings": True}
    embedding = "model.decoder.embed_tokens.weight"
    rng = np.random.default_rng(0)
    values = {folder: rng.standard_normal((6, 4)) for folder in "ab"}
    for folder, names in (("a", (embedding,)), ("b", (embedding, *stored))):
        save(tmp_path / folder, dict.fromkeys(names, bf16(values[folder])), config)
    merge(tmp_path / "a", tmp_path / "b", "--weights", "0.5,0.5", "--dtype", "f32", "-o", tmp_path / "dst", "--verify")
    written = read(tmp_path / "dst" / "model.safetensors")
    assert set(written) == {"model.shared.weight" if "model.shared.weight" in stored else embedding}
    wanted = sum(0.5 * floats(bf16(v)) for v in values.values())
    np.testing.assert_allclose(floats(next(iter(written.values()))), wanted, atol=1e-6)


NAMES = [
    ("ernie", "ernie.embeddings.word_embeddings", "cls.predictions.decoder"),
    ("data2vec-text", "data2vec_text.embeddings.word_embeddings", "lm_head.decoder"),
    ("gemma4_text", "model.embed_tokens", "lm_head"),
    ("git", "git.embeddings.word_embeddings", "output"),
    ("fuyu", "language_model.model.embed_tokens", "language_model.lm_head"),
    ("blip", "text_decoder.bert.embeddings.word_embeddings", "text_decoder.cls.predictions.decoder"),
]
"""model_type, embedding and head as transformers saves them."""


@pytest.mark.parametrize(("kind", "embedding", "head"), NAMES, ids=[n[0] for n in NAMES])
@pytest.mark.parametrize("stored", [1, 2])
def test_whatever_the_names_of_a_family_begin_with(
    tmp_path: Path, kind: str, embedding: str, head: str, stored: int
) -> None:
    config = {"model_type": kind, "tie_word_embeddings": True, "num_hidden_layers": 1, "num_attention_heads": 1}
    own, values = head.removesuffix("decoder"), Tensors()
    for i, folder in enumerate("ab"):
        rng = np.random.default_rng(i)
        values = {n: bf16(rng.standard_normal((6, 4))) for n in (f"{embedding}.weight", "vision_embed_tokens.weight")}
        copies = {f"{head}.weight": values[f"{embedding}.weight"]}
        if own != head:
            values[f"{own}bias"] = bf16(rng.standard_normal(6))
            copies[f"{head}.bias"] = values[f"{own}bias"]
        save(tmp_path / folder, {**values, **(copies if i < stored else {})}, config)
    for options in (["a", "b"], ["a", "--base", "b", *DARE]):
        merge(*[tmp_path / o if o in ("a", "b") else o for o in options], "-o", tmp_path / f"{len(options)}")
        assert set(read(tmp_path / f"{len(options)}" / "model.safetensors")) == set(values)


def test_an_unknown_family(tmp_path: Path) -> None:
    config = {"model_type": "nobody_knows", "tie_word_embeddings": True}
    for folder in "ab":
        raw = bf16(np.random.default_rng(ord(folder)).standard_normal((6, 4)))
        save(tmp_path / folder, dict.fromkeys(["x.lm_head.weight", "x.embed_tokens.weight"], raw), config)
    merge(tmp_path / "a", "--base", tmp_path / "b", *DARE, "-o", tmp_path / "dst")
    assert set(read(tmp_path / "dst" / "model.safetensors")) == {"x.embed_tokens.weight"}
