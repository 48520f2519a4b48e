"""What torch, safetensors and transformers read from written files is what they read from the source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.tiny_models import TOKENS, save_tiny
from tests.peers.tool import reshard


def torch_state(folder: Path) -> dict[str, Any]:
    """All tensors of a folder, as safetensors gives them to torch."""
    from safetensors.torch import load_file

    out: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        state = load_file(path)
        assert not out.keys() & state.keys()
        out |= state
    return out


def same(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Names, dtypes, shapes and bytes."""
    import torch

    assert a.keys() == b.keys()
    for name, tensor in a.items():
        other = b[name]
        assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape), name
        assert torch.equal(
            tensor.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
        ), name


def logits(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), report
    with torch.no_grad():
        return model(torch.tensor(TOKENS), use_cache=False).logits


@pytest.mark.parametrize("variant", ["llama_tied", "qwen3_moe", "gpt_oss", "phi3"])
@pytest.mark.parametrize("published", [True, False])
def test_a_sharded_checkpoint_loads_in_transformers(variant: str, published: bool, tmp_path: Path) -> None:
    import torch

    source = save_tiny(variant, tmp_path / "source", published=published)
    reshard(source, tmp_path / "out", "--max-shard-size", "60KB")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text(encoding="utf-8"))
    files = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert sorted(set(index["weight_map"].values())) == files
    same(torch_state(source), torch_state(tmp_path / "out"))
    assert torch.equal(logits(source), logits(tmp_path / "out"))


@pytest.mark.parametrize("variant", ["llama", "qwen3_moe", "deepseek_v32", "gpt_neox", "gpt2"])
@pytest.mark.parametrize("published", [True, False])
def test_out_through_every_size_and_back(variant: str, published: bool, tmp_path: Path) -> None:
    """1 -> 4 -> 2, with stages and experts shared out where there are experts, -> 1."""
    source = save_tiny(variant, tmp_path / "source", published=published, dtype="bfloat16")
    experts = ("--ep-out", 2, "--etp-out", 1) if "moe" in variant or "deepseek" in variant else ()
    reshard(source, tmp_path / "four", "--tp-out", 4)
    reshard(tmp_path / "four", tmp_path / "two", "--tp-out", 2, "--pp-out", 2, *experts)
    back = ("--ep-out", 1) if experts else ()
    reshard(tmp_path / "two", tmp_path / "one", "--tp-out", 1, "--pp-out", 1, *back, "--to", "hf", "--verify")
    same(torch_state(source), torch_state(tmp_path / "one"))


def test_ranks_hold_what_torch_cuts(tmp_path: Path) -> None:
    """The same cut written down with torch.chunk, for a model with fewer key/value heads than ranks."""
    import torch
    from safetensors import safe_open

    source = torch_state(save_tiny("llama", tmp_path / "source"))
    reshard(tmp_path / "source", tmp_path / "cut", "--tp-out", 4, "--to", "ranks")
    for rank in range(4):
        with safe_open(tmp_path / "cut" / f"rank-{rank:05d}-of-00004.safetensors", framework="pt") as f:
            assert set(f.keys()) == set(source)
            for name in f.keys():  # noqa: SIM118
                whole = source[name]
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    want = whole.chunk(4, 1)[rank]
                elif name.endswith(("k_proj.weight", "v_proj.weight")):
                    want = whole.chunk(2, 0)[rank // 2]
                elif name.endswith(("q_proj.weight", "gate_proj.weight", "up_proj.weight")) or name in (
                    "lm_head.weight",
                    "model.embed_tokens.weight",
                ):
                    want = whole.chunk(4, 0)[rank]
                else:
                    want = whole
                assert torch.equal(f.get_tensor(name), want), name
                assert f.get_slice(name).get_shape() == list(want.shape)


def test_fused_is_what_torch_joins(tmp_path: Path) -> None:
    import torch

    source = torch_state(save_tiny("qwen2", tmp_path / "source"))
    reshard(tmp_path / "source", tmp_path / "fused", "--fuse")
    fused = torch_state(tmp_path / "fused")
    for layer in range(2):
        at = f"model.layers.{layer}."
        for kind in ("weight", "bias"):
            parts = [source[f"{at}self_attn.{p}_proj.{kind}"] for p in "qkv"]
            assert torch.equal(fused[f"{at}self_attn.qkv_proj.{kind}"], torch.cat(parts))
        parts = [source[f"{at}mlp.{p}_proj.weight"] for p in ("gate", "up")]
        assert torch.equal(fused[f"{at}mlp.gate_up_proj.weight"], torch.cat(parts))
    reshard(tmp_path / "fused", tmp_path / "apart", "--unfuse")
    same(source, torch_state(tmp_path / "apart"))


def test_unfused_is_what_torch_splits(tmp_path: Path) -> None:
    """GPT-NeoX goes head by head, Phi-3 part by part, GPT-2 has its parts in columns."""
    import torch

    for variant, prefix, whole, heads in (
        ("gpt_neox", "gpt_neox.layers.1.attention.", "query_key_value", 4),
        ("phi3", "model.layers.1.self_attn.", "qkv_proj", 0),
        ("gpt2", "transformer.h.1.attn.", "c_attn", 0),
    ):
        source = torch_state(save_tiny(variant, tmp_path / variant))
        reshard(tmp_path / variant, tmp_path / f"{variant}-apart", "--unfuse")
        apart = torch_state(tmp_path / f"{variant}-apart")
        tensor = source[f"{prefix}{whole}.weight"]
        if heads:
            q, k, v = (t.flatten(0, 1) for t in tensor.view(heads, 3, -1, tensor.shape[1]).unbind(1))
        elif variant == "gpt2":
            q, k, v = tensor.chunk(3, 1)
        else:
            q, k, v = tensor.split([64, 32, 32])
        for name, want in (("q_proj", q), ("k_proj", k), ("v_proj", v)):
            assert torch.equal(apart[f"{prefix}{name}.weight"], want), (variant, name)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_cast_is_the_one_of_torch(dtype: str, tmp_path: Path) -> None:
    import torch

    source = torch_state(save_tiny("qwen3", tmp_path / "source"))
    reshard(tmp_path / "source", tmp_path / "out", "--dtype", dtype)
    same({n: t.to(getattr(torch, dtype)) for n, t in source.items()}, torch_state(tmp_path / "out"))


def test_every_dtype_that_torch_writes(tmp_path: Path) -> None:
    """Also without axes and without elements."""
    import torch
    from safetensors.torch import save_file

    names = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]
    names += ["float8_e4m3fn", "float8_e5m2"]
    bits = torch.arange(8 * 24, dtype=torch.uint8).view(8, 24)
    state: dict[str, Any] = {}
    for name in names:
        dtype = getattr(torch, name)
        state[f"{name}.matrix"] = bits % 2 == 0 if name == "bool" else bits.clone().view(-1).view(dtype).view(8, -1)
        state[f"{name}.scalar"] = state[f"{name}.matrix"][0, 0].clone()
        state[f"{name}.empty"] = torch.empty(0, 8, dtype=dtype)
    (tmp_path / "source").mkdir()
    save_file(state, tmp_path / "source" / "model.safetensors")
    cut = ("--split", "*.matrix=0", "--split", "*.scalar=none", "--split", "*.empty=none")
    reshard(tmp_path / "source", tmp_path / "two", "--tp-out", 2, *cut)
    for rank in range(2):
        got = torch_state_of(tmp_path / "two" / f"rank-{rank:05d}-of-00002.safetensors")
        same(got, {n: t.chunk(2)[rank] if n.endswith("matrix") else t for n, t in state.items()})
    reshard(tmp_path / "two", tmp_path / "one", "--tp-out", 1, "--to", "hf")
    same(state, torch_state(tmp_path / "one"))


def torch_state_of(path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    state: dict[str, Any] = load_file(path)
    return state


@pytest.mark.parametrize("variant", ["llama_tied", "qwen3_moe"])
@pytest.mark.parametrize("options", [(), ("--max-shard-size", "60KB")])
def test_files_of_torch_load_in_transformers(variant: str, options: tuple[str, ...], tmp_path: Path) -> None:
    """Both ways: what is written is loaded, what transformers' state dicts are in is read."""
    import torch

    source = save_tiny(variant, tmp_path / "source")
    reshard(source, tmp_path / "out", "--to", "torch-bin", *options)
    assert not list((tmp_path / "out").glob("*.safetensors"))
    assert (len(list((tmp_path / "out").glob("*.bin"))) > 1) == bool(options)
    assert torch.equal(logits(tmp_path / "out"), logits(source))
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved/config.json").write_bytes((source / "config.json").read_bytes())
    torch.save(torch_state(source), tmp_path / "saved/pytorch_model.bin")
    reshard(tmp_path / "saved", tmp_path / "back", "--to", "hf")
    same(torch_state(tmp_path / "back"), torch_state(source))
