"""Write the checkpoints of fixtures/ that no other software wrote: ``python scripts/make_fixtures.py``.

``llama_tp8`` is what a training framework leaves behind: one file per tensor-parallel rank with the rank's slices, no
metadata, the config and the tokenizer beside them. ``deepseek_v3`` is a model as published: FP8 weights with their
scale grids and a prediction layer. Everything is cut with plain numpy slices and written without ckpttool, so a fault
of ckpttool cannot be in both places. The values follow from tensor names and positions alone: every run writes the
same bytes, on every machine and with every numpy.
"""

from __future__ import annotations

import json
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np

FIXTURES = Path(__file__).parents[1] / "fixtures"
Array = np.ndarray[Any, np.dtype[Any]]

TP = 8
HIDDEN, INTER, LAYERS, HEADS, KV_HEADS, HEAD = 64, 176, 4, 8, 2, 8
VOCAB = 259  # the 256 bytes and three special tokens; it does not divide by 8, so the last rank's rows are padded

LLAMA_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INTER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "bos_token_id": 257,
    "eos_token_id": 258,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

BLOCK = 128
DEEPSEEK_CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "vocab_size": 258,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
    },
}


def noise(name: str, count: int) -> Array:
    """``count`` numbers around 0, most of them between -1 and 1, that follow from the name alone."""
    x = np.arange(count, dtype=np.uint64) + (np.uint64(zlib.crc32(name.encode())) << np.uint64(24))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    x ^= x >> np.uint64(31)
    parts = np.stack([(x >> np.uint64(16 * i)).astype(np.uint16) for i in range(4)])
    out: Array = (parts.sum(0, np.int64) - 2 * 65535).astype(np.float32) / np.float32(65535)
    return out


def bf16(values: Array) -> Array:
    """The bits of the nearest bfloat16 numbers."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def save(path: Path, tensors: dict[str, tuple[str, Array]], metadata: dict[str, str] | None = None) -> None:
    """A safetensors file of (dtype name, bits) in the order given."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for name, (dtype, bits) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(bits.shape), "data_offsets": [at, at + bits.nbytes]}
        at += bits.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    body = b"".join(np.ascontiguousarray(bits).tobytes() for _, bits in tensors.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def dump(path: Path, data: object) -> None:
    """A JSON file as people's tools write it."""
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# -- llama_tp8


def llama() -> dict[str, Array]:
    """The whole model in bfloat16."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        shapes[at + "self_attn.q_proj.weight"] = (HEADS * HEAD, HIDDEN)
        shapes[at + "self_attn.k_proj.weight"] = (KV_HEADS * HEAD, HIDDEN)
        shapes[at + "self_attn.v_proj.weight"] = (KV_HEADS * HEAD, HIDDEN)
        shapes[at + "self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD)
        shapes[at + "mlp.gate_proj.weight"] = (INTER, HIDDEN)
        shapes[at + "mlp.up_proj.weight"] = (INTER, HIDDEN)
        shapes[at + "mlp.down_proj.weight"] = (HIDDEN, INTER)
        shapes[at + "input_layernorm.weight"] = (HIDDEN,)
        shapes[at + "post_attention_layernorm.weight"] = (HIDDEN,)
    shapes["model.norm.weight"] = (HIDDEN,)
    shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    out = {}
    for name, shape in shapes.items():
        values = noise(name, int(np.prod(shape))).reshape(shape)
        norm = len(shape) == 1
        out[name] = bf16(1 + values / 16 if norm else values / 16)
    return out


def llama_slice(name: str, whole: Array, rank: int) -> Array:
    """What one of eight ranks holds."""
    if name.endswith(("embed_tokens.weight", "lm_head.weight")):
        rows = -(-VOCAB // TP)
        padded = np.zeros((rows * TP, HIDDEN), whole.dtype)
        padded[:VOCAB] = whole
        return padded[rank * rows : (rank + 1) * rows]
    if name.endswith(("q_proj.weight", "gate_proj.weight", "up_proj.weight")):
        rows = whole.shape[0] // TP
        return whole[rank * rows : (rank + 1) * rows]
    if name.endswith(("k_proj.weight", "v_proj.weight")):
        head = rank // (TP // KV_HEADS)  # four ranks share a key/value head, neighbours first
        return whole[head * HEAD : (head + 1) * HEAD]
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        columns = whole.shape[1] // TP
        return whole[:, rank * columns : (rank + 1) * columns]
    return whole


def write_llama(folder: Path) -> None:
    """The ranks, the config and the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = llama()
    for rank in range(TP):
        mine = {name: ("BF16", llama_slice(name, bits, rank)) for name, bits in whole.items()}
        save(folder / f"model_tp{rank}.safetensors", mine)
    dump(folder / "config.json", LLAMA_CONFIG)
    dump(folder / "generation_config.json", {"bos_token_id": 257, "eos_token_id": 258, "do_sample": True})
    write_tokenizer(folder)


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer without merges: one token per byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shown = {b: chr(b) for b in plain}
    shown |= {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in shown)}
    special = {"<pad>": 256, "<s>": 257, "</s>": 258}
    dump(
        folder / "tokenizer.json",
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {
                    "id": i,
                    "content": text,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": True,
                }
                for text, i in special.items()
            ],
            "normalizer": None,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            "post_processor": None,
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "vocab": {shown[b]: b for b in range(256)} | special,
                "merges": [],
            },
        },
    )
    dump(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": 2048,
            "pad_token": "<pad>",
            "bos_token": "<s>",
            "eos_token": "</s>",
        },
    )


# -- deepseek_v3


def deepseek_shapes() -> dict[str, tuple[int, ...]]:
    """Every tensor of the published form but the scale grids, in model order."""
    hidden, heads, inter, width = 128, 4, 256, 128
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (258, hidden)}
    for i in range(2):
        at = f"model.layers.{i}."
        out |= {
            at + "self_attn.q_a_proj.weight": (64, hidden),
            at + "self_attn.q_a_layernorm.weight": (64,),
            at + "self_attn.q_b_proj.weight": (heads * 128, 64),
            at + "self_attn.kv_a_proj_with_mqa.weight": (32 + 64, hidden),
            at + "self_attn.kv_a_layernorm.weight": (32,),
            at + "self_attn.kv_b_proj.weight": (heads * 128, 32),
            at + "self_attn.o_proj.weight": (hidden, heads * 64),
            at + "input_layernorm.weight": (hidden,),
            at + "post_attention_layernorm.weight": (hidden,),
        }
        if i == 0:
            groups = {"mlp.": inter}
        else:
            groups = {f"mlp.experts.{e}.": width for e in range(4)} | {"mlp.shared_experts.": 2 * width}
            out |= {at + "mlp.gate.weight": (4, hidden), at + "mlp.gate.e_score_correction_bias": (4,)}
        for group, n in groups.items():
            out[at + group + "gate_proj.weight"] = (n, hidden)
            out[at + group + "up_proj.weight"] = (n, hidden)
            out[at + group + "down_proj.weight"] = (hidden, n)
    out |= {"model.norm.weight": (hidden,), "lm_head.weight": (258, hidden)}
    # DeepSeek's converter knows the prediction layer by the number it has in the published model.
    mtp = "model.layers.61."
    return out | {mtp + "eh_proj.weight": (hidden, 2 * hidden), mtp + "enorm.weight": (hidden,)}


def deepseek() -> dict[str, tuple[str, Array]]:
    """The published form: FP8 with a scale for each block of 128 x 128, the rest bfloat16 and float32."""
    out: dict[str, tuple[str, Array]] = {}
    for name, shape in deepseek_shapes().items():
        values = noise(name, int(np.prod(shape))).reshape(shape)
        linear = name.endswith(("_proj.weight", "_mqa.weight")) and "eh_proj" not in name
        if linear:
            # Any byte but the two that are not a number (0x7F and 0xFF) is a value of E4M3.
            bits = (values * 255).astype(np.int64).astype(np.uint8)
            out[name] = ("F8_E4M3", np.where(bits & 0x7F == 0x7F, np.uint8(0), bits))
            grid = tuple(-(-n // BLOCK) for n in shape)
            scales = np.abs(noise(name + "_scale_inv", int(np.prod(grid)))).reshape(grid) / 64 + np.float32(2**-9)
            out[name + "_scale_inv"] = ("F32", scales.astype(np.float32).view(np.uint32))
        elif name.endswith("e_score_correction_bias"):
            out[name] = ("F32", values.view(np.uint32))
        else:
            out[name] = ("BF16", bf16(values / 16))
    return out


def write_deepseek(folder: Path) -> None:
    """Two shards with an index, and the config."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = deepseek()
    names = list(tensors)
    half = names.index("model.layers.1.mlp.experts.1.up_proj.weight")  # inside an expert, as in the published model
    shards = {"model-00001-of-00002.safetensors": names[:half], "model-00002-of-00002.safetensors": names[half:]}
    weight_map: dict[str, str] = {}
    for shard, held in shards.items():
        save(folder / shard, {n: tensors[n] for n in held}, {"format": "pt"})
        weight_map |= dict.fromkeys(held, shard)
    total = sum(bits.nbytes for _, bits in tensors.values())
    dump(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))},
    )
    dump(folder / "config.json", DEEPSEEK_CONFIG)
    dump(folder / "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizerFast", "model_max_length": 131072})


def main(folder: Path = FIXTURES) -> None:
    """Write both checkpoints below ``folder``."""
    write_llama(folder / "llama_tp8")
    write_deepseek(folder / "deepseek_v3")


if __name__ == "__main__":
    main(*(Path(a) for a in sys.argv[1:2]))
