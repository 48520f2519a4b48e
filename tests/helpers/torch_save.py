"""Files of torch.save made without torch: any nested value, numpy arrays become tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ckpttool.containers.pickle_write import Hole
from ckpttool.containers.torch_write import lay_out_torch

_DTYPES = {"<f4": "F32", "<f8": "F64", "<f2": "F16", "<i8": "I64", "<i4": "I32", "|u1": "U8", "|i1": "I8"}


def torch_save(value: Any, path: Path) -> Path:
    """Write ``value`` as torch.save does, with true checksums or none."""
    arrays: dict[tuple[Any, ...], np.ndarray[Any, np.dtype[Any]]] = {}

    def holes(v: Any, at: tuple[Any, ...]) -> Any:
        if isinstance(v, np.ndarray):
            arrays[at] = v
            return Hole(_DTYPES[v.dtype.str], v.shape)
        if isinstance(v, dict):
            return {k: holes(x, (*at, k)) for k, x in v.items()}
        if type(v) in (list, tuple):
            return type(v)([holes(x, (*at, i)) for i, x in enumerate(v)])
        return v

    laid = lay_out_torch(holes(value, ()), "archive")
    data = bytearray(laid.size)
    for offset, literal in laid.literals:
        data[offset : offset + len(literal)] = literal
    for at, array in arrays.items():
        raw = array.tobytes()
        data[laid.offsets[at] : laid.offsets[at] + len(raw)] = raw
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path
