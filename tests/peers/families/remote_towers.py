"""Models with towers in code of their own: the tower is whole, so the language model alone is run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.peers.families.remote import REMOTE, Remote

_SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 272, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_RANK = 8
"""Of adapters."""
_PROJECTIONS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")


def _text_model(kind: str, fields: dict[str, Any]) -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from tests.peers.families.tiny import random_weights

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**fields), attn_implementation="eager")
    random_weights(model)
    return model.float().eval()


def _random(shape: tuple[int, ...], seed: int) -> Any:
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, Any]) -> int:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({n: t.contiguous().clone() for n, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    return sum(t.numel() for t in tensors.values())


def _read(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    out: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        out |= load_file(path)
    return out


def _logits(kind: str, fields: dict[str, Any], tensors: dict[str, Any]) -> Any:
    import torch

    model = _text_model(kind, fields)
    model.load_state_dict(tensors)
    tokens = torch.randint(100, 270, (2, 24), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False).logits.flatten()


# InternVL in its own code


def _internvl(folder: Path) -> int:
    width, inner, side = 64, 128, 4
    language = _text_model("qwen2", {**_SIZES, "tie_word_embeddings": False}).state_dict()
    tensors = {f"language_model.{n}": t for n, t in language.items()}
    shapes: dict[str, tuple[int, ...]] = {
        "vision_model.embeddings.class_embedding": (1, 1, width),
        "vision_model.embeddings.patch_embedding.weight": (width, 3, 8, 8),
        "vision_model.embeddings.patch_embedding.bias": (width,),
        "vision_model.embeddings.position_embedding": (1, side * side + 1, width),
        "mlp1.0.weight": (4 * width,), "mlp1.0.bias": (4 * width,),
        "mlp1.1.weight": (64, 4 * width), "mlp1.1.bias": (64,), "mlp1.3.weight": (64, 64), "mlp1.3.bias": (64,),
    }  # fmt: skip
    for i in range(2):
        at = f"vision_model.encoder.layers.{i}."
        shapes |= {at + n: (width,) for n in ("ls1", "ls2")}
        shapes |= {f"{at}{n}.{kind}": (width,) for n in ("norm1", "norm2") for kind in ("weight", "bias")}
        sizes = {"attn.qkv": (3 * width, width), "attn.proj": (width, width)}
        for n, shape in {**sizes, "mlp.fc1": (inner, width), "mlp.fc2": (width, inner)}.items():
            shapes |= {f"{at}{n}.weight": shape, f"{at}{n}.bias": shape[:1]}
    tensors |= {n: _random(shape, i) for i, (n, shape) in enumerate(shapes.items())}
    config = {
        "architectures": ["InternVLChatModel"],
        "model_type": "internvl_chat",
        "downsample_ratio": 0.5,
        "torch_dtype": "float32",
        "llm_config": {
            **_SIZES, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": False,
            "torch_dtype": "float32",
        },
        "vision_config": {
            "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": 2, "num_attention_heads": 4,
            "image_size": 8 * side, "patch_size": 8, "norm_type": "layer_norm", "qkv_bias": True,
            "qk_normalization": False,
        },
    }  # fmt: skip
    return _write(folder, config, tensors)


def _internvl_logits(folder: Path) -> Any:
    language = {
        n.removeprefix("language_model."): t for n, t in _read(folder).items() if n.startswith("language_model.")
    }
    return _logits("qwen2", {**_SIZES, "tie_word_embeddings": False}, language)


# Phi-4-multimodal, whose adapters stay beside the weights


def _phi4mm(folder: Path) -> int:
    fields = {**_SIZES, "tie_word_embeddings": True}
    tensors: dict[str, Any] = {}
    for name, tensor in _text_model("phi3", fields).state_dict().items():
        module = name.removesuffix(".weight")
        if not module.endswith(_PROJECTIONS):
            if name != "lm_head.weight":
                tensors[name] = tensor
            continue
        tensors[f"{module}.base_layer.weight"] = tensor
        for seed, adapter in enumerate(("vision", "speech")):
            tensors[f"{module}.lora_A.{adapter}.weight"] = _random((_RANK, tensor.shape[1]), seed)
            tensors[f"{module}.lora_B.{adapter}.weight"] = _random((tensor.shape[0], _RANK), seed + 2)
    tower = "model.embed_tokens_extend.image_embed.img_processor.encoder.layers.0.self_attn."
    tensors |= {f"{tower}{n}.weight": _random((64, 64), i) for i, n in enumerate(("q_proj", "k_proj", "out_proj"))}
    config = {
        **fields, "architectures": ["Phi4MMForCausalLM"], "model_type": "phi4mm", "torch_dtype": "float32",
        "vision_lora": {"r": _RANK}, "speech_lora": {"r": _RANK},
    }  # fmt: skip
    return _write(folder, config, tensors)


def _phi4mm_logits(folder: Path) -> Any:
    """With both adapters added to the weights."""
    tensors = {n: t for n, t in _read(folder).items() if "embed_tokens_extend" not in n}
    merged = {n: t for n, t in tensors.items() if "_proj." not in n}
    for name, weight in tensors.items():
        if name.endswith(".base_layer.weight"):
            module = name.removesuffix(".base_layer.weight")
            for adapter in ("vision", "speech"):
                inner, outer = (tensors[f"{module}.lora_{side}.{adapter}.weight"] for side in "AB")
                weight = weight + outer @ inner  # noqa: PLW2901 - their sum
            merged[f"{module}.weight"] = weight
    merged.setdefault("lm_head.weight", merged["model.embed_tokens.weight"])
    return _logits("phi3", {**_SIZES, "tie_word_embeddings": True}, merged)


REMOTE["InternVLChatModel"] = Remote("internvl_chat", _internvl, _internvl_logits)
REMOTE["Phi4MMForCausalLM"] = Remote("phi4mm", _phi4mm, _phi4mm_logits)
