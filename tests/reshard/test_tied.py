"""Tied embeddings: a head that is left out because the config ties it must hold what the embeddings hold."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ckpttool.checkpoint import OpenOptions
from ckpttool.errors import VerifyError
from ckpttool.execute import NoProgress, RunOptions
from ckpttool.ops.reshard import execute, prepare
from ckpttool.planning.relate import TensorTable
from ckpttool.targeting.target import Target
from tests.helpers.command import ckpttool, refused, reshard

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
ROOT = Path(__file__).parents[2]


def model(path: Path, *, same: bool, tied: bool = True, dtype: Any = np.float32, **fields: object) -> Path:
    """A tied Llama of one layer that stores its head, too; ``same`` as the embeddings, or different in one element."""
    rng = np.random.default_rng(5)
    shapes = {
        EMBEDDING: (19, 8), "model.norm.weight": (8,), "model.layers.0.self_attn.q_proj.weight": (8, 8),
        "model.layers.0.self_attn.k_proj.weight": (4, 8), "model.layers.0.self_attn.v_proj.weight": (4, 8),
        "model.layers.0.self_attn.o_proj.weight": (8, 8), "model.layers.0.mlp.gate_proj.weight": (12, 8),
        "model.layers.0.mlp.up_proj.weight": (12, 8), "model.layers.0.mlp.down_proj.weight": (8, 12),
        "model.layers.0.input_layernorm.weight": (8,), "model.layers.0.post_attention_layernorm.weight": (8,),
    }  # fmt: skip
    tensors = {n: rng.standard_normal(s).astype(dtype) for n, s in shapes.items()}
    tensors[HEAD] = tensors[EMBEDDING].copy()
    if not same:
        tensors[HEAD][18, 7] += 1
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "intermediate_size": 12,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 19,
        "tie_word_embeddings": tied, "torch_dtype": "float32", **fields,
    }  # fmt: skip
    path.mkdir()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    return path


TARGETS = [
    ("--to", "vllm"),
    ("--to", "vllm", "--tp-out", "2"),
    ("--to", "vllm", "--pp-out", "1", "--dtype", "bf16"),
    ("--to", "vllm", "--rename", "lm_head.weight=head.weight"),
    ("--to", "trtllm", "--tp-out", "2"),
]


@pytest.mark.parametrize("options", TARGETS, ids=" ".join)
def test_a_different_head_is_refused(tmp_path: Path, options: tuple[str, ...]) -> None:
    error = refused(model(tmp_path / "src", same=False), tmp_path / "dst", *options)
    assert f"`{HEAD}` and `{EMBEDDING}`, which the config ties to each other, differ" in error
    assert "first at element 151" in error
    assert "--remove-keys" in error


@pytest.mark.parametrize("options", [o for o in TARGETS if "--rename" not in o], ids=" ".join)
def test_an_equal_head_is_one_tensor(tmp_path: Path, options: tuple[str, ...]) -> None:
    reshard(model(tmp_path / "src", same=True), tmp_path / "dst", *options, "--verify")


def test_the_head_of_a_trtllm_checkpoint(tmp_path: Path) -> None:
    """Rank files and back: the head is cut there, the embedding is not."""
    source = model(tmp_path / "src", same=True)
    reshard(source, tmp_path / "trt", "--to", "trtllm", "--tp-out", "2")
    reshard(tmp_path / "trt", tmp_path / "hf", "--to", "hf", "--tp-out", "1", "--verify")
    assert HEAD not in load_file(tmp_path / "hf" / "model.safetensors")
    rank = tmp_path / "trt" / "rank1.safetensors"
    tensors = load_file(rank)
    tensors[HEAD] = tensors[HEAD].copy()
    tensors[HEAD][2, 3] += 0.5
    save_file(tensors, rank)
    error = refused(tmp_path / "trt", tmp_path / "other", "--to", "hf", "--tp-out", "1")
    assert "differ, first at element" in error
    reshard(tmp_path / "trt", tmp_path / "kept", "--to", "hf", "--tp-out", "1", "--remove-keys", HEAD, "--verify")


def test_untied_keeps_both(tmp_path: Path) -> None:
    source = model(tmp_path / "src", same=False, tied=False)
    reshard(source, tmp_path / "vllm", "--to", "vllm", "--tp-out", "2", "--verify")
    reshard(tmp_path / "vllm", tmp_path / "hf", "--to", "hf", "--tp-out", "1", "--verify")
    before, after = (load_file(tmp_path / d / "model.safetensors") for d in ("src", "hf"))
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[n], after[n]) for n in before)


def test_shapes_and_dtypes_that_differ(tmp_path: Path) -> None:
    source = model(tmp_path / "src", same=True)
    tensors = load_file(source / "model.safetensors")
    save_file({**tensors, HEAD: tensors[HEAD][:17]}, source / "model.safetensors")
    assert "are [17, 8] and [19, 8]" in refused(source, tmp_path / "dst", "--to", "vllm")
    save_file({**tensors, HEAD: tensors[HEAD].astype(np.float16)}, source / "model.safetensors")
    assert "differ, first at element 0" in refused(source, tmp_path / "dst", "--to", "vllm")
    rounded = tensors[EMBEDDING].astype(np.float16)
    save_file({**tensors, HEAD: rounded, EMBEDDING: rounded.astype(np.float32)}, source / "model.safetensors")
    reshard(source, tmp_path / "dst", "--to", "vllm", "--verify")


def other(path: Path, source: Path, *, same: bool) -> Path:
    shutil.copytree(source, path)
    tensors = {n: t * 0.75 for n, t in load_file(path / "model.safetensors").items()}
    if not same:
        tensors[HEAD][3, 3] = 9
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("method", [("linear",), ("dare_ties", "--base", "0")], ids=lambda m: m[0])
def test_merged_heads(tmp_path: Path, method: tuple[str, ...]) -> None:
    """A computed head: what it is worked out from must be the same, of every model."""
    a = model(tmp_path / "a", same=True)
    b, c = (other(tmp_path / n, a, same=n == "b") for n in "bc")
    base = (
        ()
        if method == ("linear",)
        else ("--base", a, "--method", method[0], "--weights", "0.5,0.7", "--param", "density=0.5")
    )
    models = (a, b) if not base else (b, other(tmp_path / "d", b, same=True))
    done = ckpttool("merge", *models, *base, "-o", tmp_path / "dst", "--to", "vllm", "--tp-out", "2", "--verify")
    assert done.code == 0, done.err
    models = (a, c) if not base else (b, c)
    done = ckpttool("merge", *models, *base, "-o", tmp_path / "no", "--to", "vllm", "--tp-out", "2")
    assert done.code == 1
    assert f"`{HEAD}` and `{EMBEDDING}`, which the config ties to each other, differ" in done.err
    assert not (tmp_path / "no").exists()


def test_merged_from_trtllm(tmp_path: Path) -> None:
    """The heads are left out where the models are read, and compared all the same."""
    a = model(tmp_path / "a", same=True)
    b = other(tmp_path / "b", a, same=True)
    reshard(a, tmp_path / "trt", "--to", "trtllm", "--tp-out", "2")
    rank = tmp_path / "trt" / "rank0.safetensors"
    tensors = {n: t.copy() for n, t in load_file(rank).items()}
    (tmp_path / "b" / "config.json").write_text((a / "config.json").read_text())
    done = ckpttool("merge", tmp_path / "trt", b, "-o", tmp_path / "dst", "--missing", "skip")
    assert done.code == 0, done.err
    tensors[HEAD][0, 0] += 1
    save_file(tensors, rank)
    done = ckpttool("merge", tmp_path / "trt", b, "-o", tmp_path / "no", "--missing", "skip")
    assert done.code == 1
    assert "differ, first at element 0" in done.err


def test_requantized_and_tied(tmp_path: Path) -> None:
    source = model(tmp_path / "src", same=False)
    for options in (["--to", "vllm", "--requant", "channel"], ["--to", "trtllm", "--dtype", "f16"]):
        done = ckpttool("reshard", source, tmp_path / "dst", *options)
        assert done.code == 1
        assert "which the config ties to each other" in done.err


@pytest.mark.parametrize("lost", [HEAD, "model.norm.weight"])
def test_verify_finds_what_a_plan_leaves_out(tmp_path: Path, lost: str) -> None:
    """A naming that drops a tensor for no reason: both the plan and what it expects lack it."""
    source = model(tmp_path / "src", same=False)
    prepared = prepare(source, OpenOptions(), Target(format="hf"))
    table = {n: v for n, v in prepared.views.table.items() if n != lost}
    prepared.views = TensorTable(table)
    reshard(source, tmp_path / "less", "--remove-keys", lost)
    wrong = prepare(tmp_path / "less", OpenOptions(), Target(format="hf"))
    prepared.plan = wrong.plan
    with pytest.raises(VerifyError, match=f"1 tensor of the source would be lost: `{lost}`"):
        execute(prepared, tmp_path / "dst", RunOptions(), NoProgress(), verify=True)
    assert not (tmp_path / "dst").exists()


def test_quantize_leaves_nothing_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = model(tmp_path / "src", same=True)
    done = ckpttool("quantize", source, tmp_path / "dst", "--recipe", "channel", "--verify")
    assert done.code == 0, done.err
    from ckpttool.targeting import recode

    told = recode._Recoder._copy
    monkeypatch.setattr(
        recode._Recoder, "_copy", lambda self, name, view: None if "norm" in name else told(self, name, view)
    )
    done = ckpttool("quantize", source, tmp_path / "no", "--recipe", "channel", "--verify")
    assert done.code == 3
    assert "3 tensors of the source would be lost: `model.layers.0.input_layernorm.weight`" in done.err
