"""Small checkpoints for which vLLM's own files are known, and what is recorded of such files.

model    fields of config.json
ranks    for each rank a checksum of all tensors: names, dtypes, shapes and elements
held     tensors of rank 0, one for each kind (the numbers of layers left out): dtype and shape
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from ckpttool.layout.family import find_family, load_family
from ckpttool.layout.shapes import declared_tensors
from tests.helpers.tensorfile import Raw, Tensors, write

CACHE_SCALES = ("._k_scale", "._v_scale", "._q_scale", "._prob_scale")
"""Of vLLM's attention: no numbers of the model."""


def numbers(name: str, shape: tuple[int, ...]) -> Raw:
    """F32 elements that differ from tensor to tensor and from place to place."""
    at = np.arange(prod(shape), dtype=np.uint64) * np.uint64(2_654_435_761) + np.uint64(crc32(name.encode()))
    values = (at % np.uint64(65_521)).astype(np.float32) / np.float32(256)
    return Raw("F32", values.reshape(shape).view("<u4"))


def write_source(config: Mapping[str, Any], folder: Path) -> None:
    """A checkpoint as Hugging Face has it, with the tensors that the family declares."""
    family = find_family(config)
    assert family is not None
    declared = declared_tensors(load_family(family, config), config, mtp=False)
    folder.mkdir(parents=True)
    write(folder / "model.safetensors", {t.name: numbers(t.name, t.shape) for t in declared}, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def recorded(ranks: Iterable[Tensors]) -> dict[str, Any]:
    """What is compared of the files of all ranks."""
    sums, held = [], {}
    for rank, tensors in enumerate(ranks):
        total = 0
        for name in sorted(n for n in tensors if not n.endswith(CACHE_SCALES)):
            raw = tensors[name]
            total = crc32(f"{name} {raw.dtype} {list(raw.bits.shape)}".encode(), total)
            total = crc32(np.ascontiguousarray(raw.bits).tobytes(), total)
            if rank == 0:
                held[re.sub(r"(?<=\.)\d+(?=\.)", "#", name)] = f"{raw.dtype} {list(raw.bits.shape)}"
        sums.append(f"{total:08x}")
    return {"ranks": sums, "held": held}
