"""Quantizing and dequantizing as people script it: load_file, a few lines of torch for each tensor, save_file.

    python bench/peers/torch_fp8.py block|channel|dequantize SRC DST [--panels]

``--panels``: 128 rows at a time, which keeps what torch works on in the cache.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

FP8 = torch.float8_e4m3fn
LARGEST = 448.0


def by_channel(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, and a scale in the weight's dtype for each row."""
    scale = w.abs().amax(1, keepdim=True) / LARGEST
    return (w / scale).clamp(-LARGEST, LARGEST).to(FP8), scale


def by_block(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, and a float32 scale for each 128x128 elements; the sides are multiples of 128."""
    blocks = w.float().view(len(w) // 128, 128, -1, 128)
    scale = blocks.abs().amax((1, 3), keepdim=True) / LARGEST
    scale[scale == 0] = 1
    q = (blocks / scale).clamp(-LARGEST, LARGEST).to(FP8)
    return q.view(w.shape), scale[:, 0, :, 0]


def back(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The bf16 values of codes with a scale for each 128x128 of them."""
    blocks = q.float().view(len(q) // 128, 128, -1, 128)
    return (blocks * scale[:, None, :, None]).view(q.shape).to(torch.bfloat16)


def main(job: str, src: Path, dst: Path, *, panels: bool) -> None:
    """One job."""
    tensors = load_file(src / "model.safetensors")
    suffix = "_scale" if job == "channel" else "_scale_inv"
    out: dict[str, torch.Tensor] = {}
    for name in [n for n in tensors if n.endswith(".weight")]:
        w = tensors.pop(name)
        starts = range(0, len(w), 128 if panels else len(w))
        parts = [w[a : a + starts.step] for a in starts]
        if job == "dequantize":
            scale = tensors.pop(name + suffix)
            scales = [scale[a // 128 : (a + starts.step) // 128] for a in starts]
            out[name] = torch.cat([back(p, s) for p, s in zip(parts, scales, strict=True)])
            continue
        made = [by_channel(p) if job == "channel" else by_block(p) for p in parts]
        out[name] = torch.cat([q for q, _ in made])
        out[name + suffix] = torch.cat([s for _, s in made])
    dst.mkdir(parents=True)
    save_file(out, dst / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    words = [a for a in sys.argv[1:] if a != "--panels"]
    main(words[0], Path(words[1]), Path(words[2]), panels=len(words) < len(sys.argv) - 1)
