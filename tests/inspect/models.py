"""Small checkpoints for the tests of inspect, sound until a test breaks them."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.tensorfile import Raw, Tensors, origin, write

HIDDEN, INTER, VOCAB = 16, 24, 32
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INTER,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
}
FP8_CONFIG = {**CONFIG, "quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 8]}}


def shapes(layers: int = 2) -> dict[str, tuple[int, ...]]:
    """The tensors of a llama and their shapes."""
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for i in range(layers):
        at = f"model.layers.{i}."
        out |= {
            at + "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            at + "self_attn.k_proj.weight": (HIDDEN // 2, HIDDEN),
            at + "self_attn.v_proj.weight": (HIDDEN // 2, HIDDEN),
            at + "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            at + "mlp.gate_proj.weight": (INTER, HIDDEN),
            at + "mlp.up_proj.weight": (INTER, HIDDEN),
            at + "mlp.down_proj.weight": (HIDDEN, INTER),
            at + "input_layernorm.weight": (HIDDEN,),
            at + "post_attention_layernorm.weight": (HIDDEN,),
        }
    return out | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}


def llama(dtype: str = "BF16", layers: int = 2) -> Tensors:
    """A llama whose elements are different numbers."""
    return {name: numbers(origin(i, dtype, shape)) for i, (name, shape) in enumerate(shapes(layers).items())}


def numbers(tensor: Raw) -> Raw:
    """Without the highest bit of the exponents, so that no element is NaN or infinite."""
    highest = 1 << 8 * tensor.bits.itemsize - 2
    return Raw(tensor.dtype, tensor.bits & ~tensor.bits.dtype.type(highest))


def fp8_llama() -> Tensors:
    """The same with quantized projections and their scales, in blocks of 8 x 8."""
    out: Tensors = {}
    for i, (name, shape) in enumerate(shapes().items()):
        if "_proj" in name:
            out[name] = numbers(origin(i, "F8_E4M3", shape))
            grid = tuple(-(-n // 8) for n in shape)
            ones = np.full(grid, np.float32(0.5).view(np.uint32), np.uint32)
            out[name + "_scale_inv"] = Raw("F32", ones)
        else:
            out[name] = numbers(origin(i, "BF16", shape))
    return out


def save_shards(folder: Path, tensors: Mapping[str, Raw], config: Mapping[str, Any], shards: int = 2) -> Path:
    """Shards with an index, each with its part of the tensors in order; a scale lies with its weight."""
    weights = [n for n in tensors if not n.endswith("_scale_inv")]
    each = -(-len(weights) // shards)
    weight_map: dict[str, str] = {}
    total = 0
    for i in range(shards):
        mine = weights[i * each : (i + 1) * each]
        part = {n: tensors[n] for n in tensors if n.removesuffix("_scale_inv") in mine}
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        write(folder / file, part, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
        total += sum(t.bits.nbytes for t in part.values())
    save_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    save_json(folder / "config.json", config)
    return folder


INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def save_json(path: Path, data: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data), encoding="utf-8")


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a JSON file."""
    data = json.loads(path.read_text(encoding="utf-8"))
    change(data)
    save_json(path, data)


def edit_header(path: Path, change: Callable[[dict[str, Any]], object], *, more: bytes = b"") -> None:
    """Change the header of a file and nothing of its data, or add bytes behind them."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    change(header)
    replace_header(path, json.dumps(header).encode(), more=more)


def replace_header(path: Path, text: bytes, *, more: bytes = b"") -> None:
    """Put another header before the data of a file."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :] + more)


def header_text(path: Path) -> bytes:
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    return data[8 : 8 + size]


def place(path: Path, tensor: str) -> tuple[int, int]:
    """The first and the last byte of a tensor in its file."""
    text = header_text(path)
    start, stop = json.loads(text)[tensor]["data_offsets"]
    return 8 + len(text) + start, 8 + len(text) + stop - 1


def flip(path: Path, offset: int) -> None:
    """Change one byte."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
