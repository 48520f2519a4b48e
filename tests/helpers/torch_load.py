"""Files of torch.save as numpy arrays, by Python's own unpickler: what the package's reader says is not asked."""

from __future__ import annotations

import argparse
import collections
import pickle
import zipfile
from pathlib import Path
from typing import IO, Any

import ml_dtypes
import numpy as np

_STORAGES = {
    "FloatStorage": np.float32,
    "BFloat16Storage": ml_dtypes.bfloat16,
    "HalfStorage": np.float16,
    "LongStorage": np.int64,
    "ByteStorage": np.uint8,
}


class Dtype(str):
    """``torch.bfloat16`` and so on."""

    __slots__ = ()


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: zipfile.ZipFile, top: str) -> None:
        super().__init__(file.open(f"{top}/data.pkl"))
        self.file, self.top = file, top

    def find_class(self, module: str, name: str) -> Any:
        if name in _STORAGES:
            return np.dtype(_STORAGES[name])
        if module == "torch":
            return Dtype(name)
        known = {"_rebuild_tensor_v2": _tensor, "Namespace": argparse.Namespace, "OrderedDict": collections.OrderedDict}
        return known[name]

    def persistent_load(self, pid: Any) -> Any:
        _, dtype, key, _, count = pid
        data = self.file.read(f"{self.top}/data/{key}")  # which checks the CRC-32
        assert len(data) == count * dtype.itemsize
        return np.frombuffer(data, dtype)


def _tensor(storage: Any, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any) -> Any:
    assert offset == 0
    array = storage.reshape(shape)
    assert array.size < 2 or tuple(s // array.itemsize for s in array.strides) == strides
    return array


def torch_load(path: Path | IO[bytes]) -> Any:
    """The value of a file."""
    with zipfile.ZipFile(path) as file:
        top = next(n for n in file.namelist() if n.endswith("/data.pkl")).removesuffix("/data.pkl")
        return _Unpickler(file, top).load()
