"""Paddle's safetensors as numpy arrays, by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tests.helpers.tensorfile import Raw, read, write

Array = np.ndarray[Any, np.dtype[Any]]

KINDS = {"BF16": ml_dtypes.bfloat16, "U16": ml_dtypes.bfloat16, "F32": np.float32, "I8": np.int8, "U8": np.uint8}
NAMES = {np.dtype(v).name: k for k, v in KINDS.items()} | {"bfloat16": "BF16"}


def read_folder(folder: Path, pattern: str) -> dict[str, Array]:
    """The tensors of all files that match; U16 is the bfloat16 that Paddle means by it."""
    out = {}
    for path in sorted(folder.glob(pattern)):
        for name, raw in read(path).items():
            out[name] = raw.bits.view(KINDS[raw.dtype])
    return out


def write_file(path: Path, tensors: Mapping[str, Array], metadata: Mapping[str, str] | None = None) -> None:
    """One file with these tensors."""
    path.unlink(missing_ok=True)
    write(path, {n: Raw(NAMES[a.dtype.name], a.view(f"u{a.dtype.itemsize}")) for n, a in tensors.items()}, metadata)
