"""The checkpoints that are moved and merged: shaped like a Llama, in bf16, written without holding them in memory."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

KV_HEADS = 8
"""In all of them, so that eight ranks have one each."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Llama."""

    hidden: int
    inter: int
    vocab: int
    heads: int

    def tensors(self, layers: int) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes, [out, in]."""
        h, kv = self.hidden, self.hidden // self.heads * KV_HEADS
        out: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (self.vocab, h))]
        for n in range(layers):
            p = f"model.layers.{n}."
            out += [
                (p + "self_attn.q_proj.weight", (h, h)),
                (p + "self_attn.k_proj.weight", (kv, h)),
                (p + "self_attn.v_proj.weight", (kv, h)),
                (p + "self_attn.o_proj.weight", (h, h)),
                (p + "mlp.gate_proj.weight", (self.inter, h)),
                (p + "mlp.up_proj.weight", (self.inter, h)),
                (p + "mlp.down_proj.weight", (h, self.inter)),
                (p + "input_layernorm.weight", (h,)),
                (p + "post_attention_layernorm.weight", (h,)),
            ]
        return [*out, ("model.norm.weight", (h,)), ("lm_head.weight", (self.vocab, h))]

    def bytes(self, layers: int) -> int:
        """In bf16."""
        return 2 * sum(prod(s) for _, s in self.tensors(layers))

    def config(self, layers: int) -> dict[str, Any]:
        """What tools need to know the architecture."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.inter,
            "num_attention_heads": self.heads,
            "num_key_value_heads": KV_HEADS,
            "num_hidden_layers": layers,
            "vocab_size": self.vocab,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        }


SHAPES = (Shape(4096, 14336, 128256, 32), Shape(2048, 5632, 32000, 32), Shape(512, 1408, 4000, 8))
"""Llama 3 8B's, TinyLlama's, and a small one to try the programs with."""


@dataclass(frozen=True, slots=True)
class Size:
    """A shape with so many layers."""

    shape: Shape
    layers: int

    @classmethod
    def of(cls, gb: float) -> Size:
        """The largest shape of which one layer fits in ``gb``, with as many layers as make about that."""
        shape = next((s for s in SHAPES if s.bytes(1) <= gb * 1e9), SHAPES[-1])
        each = shape.bytes(1) - shape.bytes(0)
        return cls(shape, max(1, round((gb * 1e9 - shape.bytes(0)) / each)))

    @property
    def bytes(self) -> int:
        """In bf16."""
        return self.shape.bytes(self.layers)

    @property
    def name(self) -> str:
        """For a directory."""
        return f"{self.shape.hidden}x{self.layers}"


def round_bf16(values: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """The bits of the nearest bfloat16."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write_models(folder: Path, size: Size, blocks: dict[str, Callable[[int], bytes]]) -> None:
    """A model in each directory ``folder/name``; ``blocks[name](n)`` gives the next ``n`` bytes of its elements."""
    tensors = size.shape.tensors(size.layers)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in tensors:
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + 2 * prod(shape)]}
        at += 2 * prod(shape)
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    files = []
    for name in blocks:
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(size.shape.config(size.layers), indent=2))
        files.append((folder / name / "model.safetensors").open("wb"))
        files[-1].write(struct.pack("<Q", len(raw)) + raw)
    for start in range(0, at, 8 << 20):
        for file, block in zip(files, blocks.values(), strict=True):
            file.write(block(min(8 << 20, at - start)))
    for file in files:
        file.close()


def write_noise(folder: Path, name: str, size: Size) -> None:
    """A model of random bits."""
    noise = np.random.default_rng(0).integers(0, 1 << 16, 8 << 20, dtype=np.uint16).tobytes()
    write_models(folder, size, {name: lambda n: noise[:n]})


def write_finetuned(folder: Path, size: Size) -> None:
    """``base``, ``ft1`` and ``ft2``. A third of the elements of each ft differ from base, by little.

    That is what a finetuning in bf16 leaves: differences of numbers that are close together are a few units in the last
    place. Most magnitudes are equal to many others, which is what makes sorting them hard.
    """
    rng = np.random.default_rng(0)
    block = 4 << 20
    pool = (round_bf16((0.02 * rng.standard_normal(2 * block)).astype(np.float32)).astype(np.uint32) << 16).view(
        np.float32
    )
    noise = [
        np.where(rng.random(2 * block) < 0.35, 3e-4 * rng.standard_t(4, 2 * block), 0).astype(np.float32)
        for _ in range(2)
    ]
    here = np.zeros(3, np.int64)

    def base(n: int) -> bytes:
        here[:] = rng.integers(0, block, 3)
        return round_bf16(pool[here[0] : here[0] + n // 2]).tobytes()

    def tuned(which: int) -> Callable[[int], bytes]:
        def take(n: int) -> bytes:
            a, b = here[0], here[1 + which]
            return round_bf16(pool[a : a + n // 2] + noise[which][b : b + n // 2]).tobytes()

        return take

    write_models(folder, size, {"base": base, "ft1": tuned(0), "ft2": tuned(1)})
