"""Adapters on a tied base that stores one tensor. tests/peers/test_adapters.py compares with PEFT itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.helpers.command import ckpttool
from tests.reshard.test_tied import EMBEDDING, HEAD, model

RNG = np.random.default_rng(3)


def base(folder: Path) -> Path:
    model(folder, same=True)
    tensors = load_file(folder / "model.safetensors")
    del tensors[HEAD]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def adapter(folder: Path, tensors: dict[str, np.ndarray[Any, np.dtype[Any]]], *, kept_tied: bool = False) -> Path:
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "ensure_weight_tying": kept_tied}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    named = {f"base_model.model.{n}": t.astype(np.float32) for n, t in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.product(one_in=2)
@pytest.mark.parametrize("name", [EMBEDDING, HEAD])
def test_one_that_is_replaced_is_set_apart(tmp_path: Path, name: str) -> None:
    source, trained = base(tmp_path / "base"), RNG.standard_normal((19, 8))
    one = adapter(tmp_path / "adapter", {name: trained})
    before = load_file(source / "model.safetensors")[EMBEDDING]
    for options in ([], ["--to", "vllm"]):
        dst = tmp_path / f"dst{len(options)}"
        done = ckpttool("merge", f"{source}+{one}", "-o", dst, "--verify", *options)
        assert done.code == 0, done.err
        assert "sets apart `model.embed_tokens.weight` and `lm_head.weight`" in done.err
        assert json.loads((dst / "config.json").read_text())["tie_word_embeddings"] is False
        written = load_file(next(dst.glob("model*part-0.safetensors" if options else "model.safetensors")))
        for n in (EMBEDDING, HEAD):
            assert np.array_equal(written[n][:19], trained.astype(np.float32) if n == name else before)


@pytest.mark.product(one_in=2)
@pytest.mark.parametrize("stored", [(EMBEDDING,), (HEAD,), (EMBEDDING, HEAD)])
def test_kept_tied_where_the_adapter_has_both(tmp_path: Path, stored: tuple[str, ...]) -> None:
    """``ensure_weight_tying`` is a wish: PEFT saves both of a pair that it tied, and one where it could not (GPT-2)."""
    source, trained = base(tmp_path / "base"), RNG.standard_normal((19, 8)).astype(np.float32)
    one = adapter(tmp_path / "adapter", dict.fromkeys(stored, trained), kept_tied=True)
    done = ckpttool("merge", f"{source}+{one}", "-o", tmp_path / "dst", "--verify")
    assert done.code == 0, done.err
    before, after = (load_file(tmp_path / d / "model.safetensors") for d in ("base", "dst"))
    apart = len(stored) == 1
    assert json.loads((tmp_path / "dst/config.json").read_text())["tie_word_embeddings"] is not apart
    for name in (EMBEDDING, HEAD) if apart else (EMBEDDING,):
        assert np.array_equal(after[name], trained if name in stored else before[EMBEDDING])


def test_factors_of_a_head_that_is_not_stored(tmp_path: Path) -> None:
    source = base(tmp_path / "base")
    a, b = RNG.standard_normal((2, 8)).astype(np.float32), RNG.standard_normal((19, 2)).astype(np.float32)
    one = adapter(tmp_path / "adapter", {"lm_head.lora_A.weight": a, "lm_head.lora_B.weight": b})
    done = ckpttool("merge", f"{source}+{one}", "-o", tmp_path / "dst", "--verify")
    assert done.code == 0, done.err
    before, after = (load_file(tmp_path / d / "model.safetensors") for d in ("base", "dst"))
    assert after.keys() == before.keys()
    np.testing.assert_allclose(after[EMBEDDING], before[EMBEDDING] + 2 * b @ a, rtol=1e-5, atol=1e-5)
    assert json.loads((tmp_path / "dst/config.json").read_text())["tie_word_embeddings"] is True


def test_merged_with_a_model_that_is_still_tied(tmp_path: Path) -> None:
    """The head of the other model is its embeddings."""
    source, other, trained = base(tmp_path / "base"), base(tmp_path / "other"), RNG.standard_normal((19, 8))
    one = adapter(tmp_path / "adapter", {"lm_head.weight": trained})
    done = ckpttool("merge", f"{source}+{one}", other, "--weights", "0.5,0.5", "-o", tmp_path / "dst", "--verify")
    assert done.code == 0, done.err
    before, after = (load_file(tmp_path / d / "model.safetensors") for d in ("base", "dst"))
    np.testing.assert_allclose(after[EMBEDDING], before[EMBEDDING], rtol=1e-6)
    np.testing.assert_allclose(after[HEAD], (before[EMBEDDING] + trained) / 2, rtol=1e-5, atol=1e-6)


def test_factors_are_not_averaged(tmp_path: Path) -> None:
    """Files of adapters, where nothing but the names of tensors says what they are."""
    for folder in "ab":
        a, b = RNG.standard_normal((2, 8)), RNG.standard_normal((8, 2))
        adapter(tmp_path / folder, {"q_proj.lora_A.weight": a, "q_proj.lora_B.weight": b})
    files = [tmp_path / folder / "adapter_model.safetensors" for folder in "ab"]
    done = ckpttool("merge", *files, "-o", tmp_path / "dst")
    assert done.code == 1, done
    assert "BASE+ADAPTER" in done.err or "MODEL+" in done.err
    for i, file in enumerate(files):
        file.rename(tmp_path / f"style{i}.safetensors")
    done = ckpttool("merge", tmp_path / "style0.safetensors", tmp_path / "style1.safetensors", "-o", tmp_path / "dst")
    assert done.code == 1, done
    assert "merging its factors one by one" in done.err
    assert not (tmp_path / "dst").exists()
