"""The way people do it today: load every rank's file, concatenate, split, save.

    python bench/peers/torch_reshard.py SRC DST TP_OUT

Knows only the llama names that the benchmark uses, and holds the whole model in memory.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
ROW = ("o_proj", "down_proj")


def axis(name: str) -> int | None:
    """Axis that a llama tensor is cut on, None when it is replicated."""
    part = name.split(".")[-2]
    return 0 if part in COLUMN else 1 if part in ROW else None


def main(src: Path, dst: Path, ways: int) -> None:
    """Reshard ``src`` to ``ways`` ranks in ``dst``."""
    ranks = [load_file(f) for f in sorted(src.glob("*.safetensors"))]
    out: list[dict[str, torch.Tensor]] = [{} for _ in range(ways)]
    for name in list(ranks[0]):
        cut = axis(name)
        if cut is None:
            for r in range(ways):
                out[r][name] = ranks[0][name]
            continue
        whole = torch.cat([rank.pop(name) for rank in ranks], dim=cut) if len(ranks) > 1 else ranks[0][name]
        for r, part in enumerate(whole.chunk(ways, dim=cut)):
            out[r][name] = part.contiguous()
    dst.mkdir(parents=True)
    for r, tensors in enumerate(out):
        save_file(tensors, dst / f"rank-{r}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
