"""What a family says of the tensors that an adapter of PEFT changes: orientation, ties, names in memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.helpers.command import ckpttool

RNG = np.random.default_rng(11)
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "intermediate_size": 12,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 19,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 8, "n_layer": 1, "n_head": 2,
    "vocab_size": 19, "n_positions": 6,
}  # fmt: skip
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
Tensors = dict[str, "np.ndarray[Any, np.dtype[np.float32]]"]


def random(**shapes: tuple[int, ...]) -> Tensors:
    return {name: RNG.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def model(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def adapter(folder: Path, tensors: Tensors, **config: object) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2, **config}))
    save_file({f"base_model.model.{n}": t for n, t in tensors.items()}, folder / "adapter_model.safetensors")
    return folder


def pair(name: str, out: int, width: int) -> Tensors:
    return random(**{f"{name}.lora_A.weight": (2, width), f"{name}.lora_B.weight": (out, 2)})


def delta(tensors: Tensors, name: str) -> Any:
    return tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]


def merged(root: Path, source: Path, *adapters: Path, weights: str = "") -> Tensors:
    sources = "+".join(map(str, (source, *adapters)))
    dst = root / "dst"
    done = ckpttool("merge", sources, "-o", dst, "--verify", *(["--weights", weights] if weights else []))
    assert done.code == 0, done.err
    return load_file(dst / "model.safetensors")


def same(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def gpt2(prefix: str) -> Tensors:
    return random(**{
        f"{prefix}wte.weight": (19, 8), f"{prefix}wpe.weight": (6, 8), f"{prefix}h.0.attn.c_attn.weight": (8, 24),
        f"{prefix}h.0.attn.c_attn.bias": (24,), f"{prefix}h.0.attn.c_proj.weight": (8, 8),
        f"{prefix}h.0.attn.c_proj.bias": (8,), f"{prefix}h.0.mlp.c_fc.weight": (8, 32),
        f"{prefix}h.0.mlp.c_fc.bias": (32,), f"{prefix}h.0.mlp.c_proj.weight": (32, 8),
        f"{prefix}h.0.mlp.c_proj.bias": (8,), f"{prefix}h.0.ln_1.weight": (8,), f"{prefix}h.0.ln_1.bias": (8,),
        f"{prefix}h.0.ln_2.weight": (8,), f"{prefix}h.0.ln_2.bias": (8,), f"{prefix}ln_f.weight": (8,),
        f"{prefix}ln_f.bias": (8,),
    })  # fmt: skip


@pytest.mark.parametrize("prefix", ["transformer.", ""], ids=["with its head", "saved without its head"])
@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("targets", [("attn.c_proj",), ("attn.c_proj", "attn.c_attn")], ids=["square", "both"])
def test_conv1d_beside_a_linear_head(tmp_path: Path, prefix: str, flag: bool, targets: tuple[str, ...]) -> None:
    """PEFT saves one ``fan_in_fan_out``, that of the last layer; the shape of a square weight says nothing."""
    base = gpt2(prefix)
    values = pair("lm_head", 19, 8)
    for t in targets:
        values |= pair(f"transformer.h.0.{t}", 24 if "c_attn" in t else 8, 8)
    one = adapter(tmp_path / "adapter", values, fan_in_fan_out=flag)
    found = merged(tmp_path, model(tmp_path / "base", GPT2, base), one)
    assert found.keys() == base.keys()
    for name, before in base.items():
        t = name.removeprefix(f"{prefix}h.0.").removesuffix(".weight")
        change = delta(values, f"transformer.h.0.{t}").T if t in targets and name.endswith("weight") else 0
        same(found[name], before + (delta(values, "lm_head") if name.endswith("wte.weight") else change))


def tied(folder: Path, *, stored: bool = False, **fields: object) -> tuple[Path, Tensors]:
    tensors = random(**{
        EMBEDDING: (19, 8), "model.norm.weight": (8,), "model.layers.0.self_attn.q_proj.weight": (8, 8),
        "model.layers.0.self_attn.k_proj.weight": (4, 8), "model.layers.0.self_attn.v_proj.weight": (4, 8),
        "model.layers.0.self_attn.o_proj.weight": (8, 8), "model.layers.0.mlp.gate_proj.weight": (12, 8),
        "model.layers.0.mlp.up_proj.weight": (12, 8), "model.layers.0.mlp.down_proj.weight": (8, 12),
        "model.layers.0.input_layernorm.weight": (8,), "model.layers.0.post_attention_layernorm.weight": (8,),
    })  # fmt: skip
    if stored:
        tensors[HEAD] = tensors[EMBEDDING].copy()
    return model(folder, {**LLAMA, "tie_word_embeddings": True, **fields}, tensors), tensors


def both(values: Tensors) -> Tensors:
    """Factors of a head, and the same as those of the embeddings."""
    return values | {
        "model.embed_tokens.lora_embedding_A": np.ascontiguousarray(values["lm_head.lora_B.weight"].T),
        "model.embed_tokens.lora_embedding_B": np.ascontiguousarray(values["lm_head.lora_A.weight"].T),
    }


@pytest.mark.parametrize("stored", [False, True])
def test_equal_factors_of_tied_tensors_count_once(tmp_path: Path, stored: bool) -> None:
    """Two adapters do not count as one, though, even if all of their factors are equal."""
    source, base = tied(tmp_path / "base", stored=stored)
    values = pair("lm_head", 19, 8)
    one = adapter(tmp_path / "one", both(values), ensure_weight_tying=True)
    found = merged(tmp_path, source, one)
    assert found.keys() == base.keys() - {HEAD}  # written once, whichever copies the base stores
    same(found[EMBEDDING], base[EMBEDDING] + delta(values, "lm_head"))
    (tmp_path / "twice").mkdir()
    twice = merged(tmp_path / "twice", source, one, adapter(tmp_path / "two", both(values)))
    same(twice[EMBEDDING], base[EMBEDDING] + 2 * delta(values, "lm_head"))


def test_factors_of_one_of_two_tied_tensors_are_told(tmp_path: Path) -> None:
    """The trained model added them to one, and the output, as PEFT's, has them in both."""
    source, _ = tied(tmp_path / "base")
    values = pair("lm_head", 19, 8)
    for i, (factors, told) in enumerate([(values, 1), (both(pair("lm_head", 19, 8)) | values, 1), (both(values), 0)]):
        one = adapter(tmp_path / f"adapter{i}", factors)
        done = ckpttool("merge", f"{source}+{one}", "-o", tmp_path / f"dst{i}")
        assert done.err.count("factors of one change both") == told


def test_other_factors_of_tied_tensors_are_added(tmp_path: Path) -> None:
    source, base = tied(tmp_path / "base")
    head, other = pair("lm_head", 19, 8), pair("lm_head", 19, 8)
    values = both(other) | head
    found = merged(tmp_path, source, adapter(tmp_path / "one", values, ensure_weight_tying=True))
    same(found[EMBEDDING], base[EMBEDDING] + delta(head, "lm_head") + delta(other, "lm_head"))


def test_two_that_peft_could_not_tie_are_set_apart(tmp_path: Path) -> None:
    source, _ = tied(tmp_path / "base")
    values = random(**{EMBEDDING: (19, 8), HEAD: (19, 8)})
    found = merged(tmp_path, source, adapter(tmp_path / "one", values, ensure_weight_tying=True))
    for name, wanted in values.items():
        assert np.array_equal(found[name], wanted)
    assert json.loads((tmp_path / "dst/config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("name", [HEAD, EMBEDDING])
def test_weights_of_factors_that_come_with_their_embeddings(tmp_path: Path, name: str, stored: bool) -> None:
    """PEFT saves the weight below the factors of an embedding or a head, which is the base's."""
    source, base = tied(tmp_path / "base", stored=stored)
    values = pair("lm_head", 19, 8)
    below = {f"{name.removesuffix('.weight')}.base_layer.weight": base[EMBEDDING]}
    factors = values if name == HEAD else {n: t for n, t in both(values).items() if n not in values}
    ones = [adapter(tmp_path / x, factors | below) for x in "ab"]
    found = merged(tmp_path, source, *ones, weights="0.5,0.25")
    same(found[EMBEDDING], base[EMBEDDING] + 0.75 * delta(values, "lm_head"))
    below = {n: t + 1 for n, t in below.items()}
    changed = adapter(tmp_path / "c", factors | below)
    refused = ckpttool("merge", f"{source}+{changed}", "--weights", "0.5", "-o", tmp_path / "none")
    assert refused.code == 1
    assert "cannot be done with weight 0.5" in refused.err


def mixtral(experts: int) -> Tensors:
    at = "model.layers.0."
    shapes = {
        EMBEDDING: (19, 8), HEAD: (19, 8), "model.norm.weight": (8,), f"{at}self_attn.q_proj.weight": (8, 8),
        f"{at}self_attn.k_proj.weight": (4, 8), f"{at}self_attn.v_proj.weight": (4, 8),
        f"{at}self_attn.o_proj.weight": (8, 8), f"{at}input_layernorm.weight": (8,),
        f"{at}post_attention_layernorm.weight": (8,), f"{at}block_sparse_moe.gate.weight": (experts, 8),
    }  # fmt: skip
    for e in range(experts):
        expert = f"{at}block_sparse_moe.experts.{e}."
        shapes |= {f"{expert}w1.weight": (6, 8), f"{expert}w2.weight": (8, 6), f"{expert}w3.weight": (6, 8)}
    return random(**shapes)


def test_names_in_memory(tmp_path: Path) -> None:
    """PEFT saves the names of transformers' modules; files have the published ones, and experts apart."""
    experts, at, there = 3, "model.layers.0.mlp", "model.layers.0.block_sparse_moe"
    base = mixtral(experts)
    config = {**LLAMA, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "intermediate_size": 6}
    source = model(tmp_path / "base", {**config, "num_local_experts": experts, "tie_word_embeddings": False}, base)
    values = random(**{
        f"{at}.experts.base_layer.lora_A.weight": (experts * 2, 8),
        f"{at}.experts.base_layer.lora_B.weight": (12, experts * 2),
        f"{at}.experts.lora_A.weight": (experts * 2, 6), f"{at}.experts.lora_B.weight": (8, experts * 2),
    }) | pair(f"{at}.gate", experts, 8)  # fmt: skip
    targets = ["experts.gate_up_proj", "down_proj", "gate.weight"]
    found = merged(tmp_path, source, adapter(tmp_path / "adapter", values, target_parameters=targets))

    def expert(module: str, e: int) -> Any:
        a, b = (values[f"{module}.lora_{side}.weight"] for side in "AB")
        return b.reshape(b.shape[0], 2, experts)[:, :, e] @ a.reshape(experts, 2, -1)[e]

    same(found[f"{there}.gate.weight"], base[f"{there}.gate.weight"] + delta(values, f"{at}.gate"))
    for e in range(experts):
        joined, down = expert(f"{at}.experts.base_layer", e), expert(f"{at}.experts", e)
        for name, change in (("w1", joined[:6]), ("w3", joined[6:]), ("w2", down)):
            weight = f"{there}.experts.{e}.{name}.weight"
            same(found[weight], base[weight] + change)
    whole = random(**{f"{at}.experts.gate_up_proj": (experts, 12, 8)})
    refused = ckpttool("merge", f"{source}+{adapter(tmp_path / 'whole', whole)}", "-o", tmp_path / "none")
    assert refused.code == 1
    assert "which is 6 tensors in the base" in refused.err


NEOX = {
    "model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], "hidden_size": 8, "intermediate_size": 12,
    "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 19,
}  # fmt: skip


@pytest.mark.parametrize("stored", [(), ("embed_out.weight",), ("lm_head.weight",)], ids=["once", "twice", "renamed"])
def test_a_tied_head_that_has_two_names_is_set_apart_once(tmp_path: Path, stored: tuple[str, ...]) -> None:
    """The name that transformers has in memory is PEFT's; one head is written, under the name of files."""
    base = random(**{"gpt_neox.embed_in.weight": (19, 8), "gpt_neox.final_layer_norm.weight": (8,)})
    held = {**base, **{n: base["gpt_neox.embed_in.weight"].copy() for n in stored}}
    source = model(tmp_path / "base", {**NEOX, "tie_word_embeddings": True}, held)
    trained = random(**{"lm_head.weight": (19, 8)})
    found = merged(tmp_path, source, adapter(tmp_path / "adapter", trained))
    head = "lm_head.weight" if "lm_head.weight" in stored else "embed_out.weight"
    assert found.keys() == base.keys() | {head}
    assert np.array_equal(found[head], trained["lm_head.weight"])
    assert np.array_equal(found["gpt_neox.embed_in.weight"], base["gpt_neox.embed_in.weight"])
    assert json.loads((tmp_path / "dst/config.json").read_text())["tie_word_embeddings"] is False


def experts(kind: str) -> tuple[dict[str, Any], Tensors]:
    """The config of a family, and its experts, as square as OLMoE's [1024 + 1024, 2048]."""
    config = {
        **LLAMA,
        "architectures": [],
        "model_type": kind,
        "num_experts": 2,
        "num_local_experts": 2,
        "intermediate_size": 4,
    }
    at = "model.layers.0.mlp."
    if kind == "gpt_oss":  # [in, out]
        return config, random(**{f"{at}experts.gate_up_proj": (2, 8, 8), f"{at}router.weight": (2, 8)})
    names = [f"{at}experts.{e}.{part}_proj.weight" for e in range(2) for part in ("gate", "up")]
    return config, random(**dict.fromkeys(names, (4, 8)), **{f"{at}gate.weight": (2, 8)})


@pytest.mark.parametrize("kind", ["olmoe", "gpt_oss"])
def test_a_family_says_how_square_experts_lie(tmp_path: Path, kind: str) -> None:
    config, base = experts(kind)
    at, r = "model.layers.0.mlp.experts", 2
    values = random(**{f"{at}.lora_A.weight": (2 * r, 8), f"{at}.lora_B.weight": (8, r * 2)})
    one = adapter(tmp_path / "adapter", values, target_parameters=["experts.gate_up_proj"])
    found = merged(tmp_path, model(tmp_path / "base", config, base), one)
    a, b = values[f"{at}.lora_A.weight"], values[f"{at}.lora_B.weight"]
    for e in range(2):
        change = b.reshape(8, r, 2)[:, :, e] @ a.reshape(2, r, 8)[e]  # [out, in]
        if kind == "gpt_oss":
            same(found[f"{at}.gate_up_proj"][e], base[f"{at}.gate_up_proj"][e] + change.T)
        else:
            for part, rows in (("gate", change[:4]), ("up", change[4:])):
                name = f"{at}.{e}.{part}_proj.weight"
                same(found[name], base[name] + rows)


def test_square_experts_that_no_rule_knows(tmp_path: Path) -> None:
    at = "model.layers.0.some.experts"
    base = model(tmp_path / "base", LLAMA, random(**{f"{at}.gate_up_proj": (2, 8, 8)}))
    values = random(**{f"{at}.lora_A.weight": (4, 8), f"{at}.lora_B.weight": (8, 4)})
    one = adapter(tmp_path / "adapter", values, target_parameters=["experts.gate_up_proj"])
    refused = ckpttool("merge", f"{base}+{one}", "-o", tmp_path / "dst")
    assert refused.code == 1
    assert "shapes do not tell whether the experts" in refused.err


def test_a_head_is_no_other_tensor(tmp_path: Path) -> None:
    """Names may begin otherwise in a base, but a module keeps its own."""
    source = model(tmp_path / "base", {}, random(**{"embed.weight": (19, 8)}))
    one = adapter(tmp_path / "adapter", pair("lm_head", 19, 8))
    refused = ckpttool("merge", f"{source}+{one}", "-o", tmp_path / "dst")
    assert refused.code == 1
    assert "1 of the 1 tensors that the adapter changes are not in the base" in refused.err
