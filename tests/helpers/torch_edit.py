"""Files of torch.save with something changed: what a fixture holds, and what a careless or older writer would have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpttool.containers.pickle import PickledObject
from ckpttool.containers.pickle_write import Hole, Instance
from ckpttool.containers.torch_pickle import TorchTensor
from ckpttool.containers.torch_write import lay_out_torch
from ckpttool.containers.torch_zip import TorchFile, read_torch
from tests.helpers.tensorfile import BYTES


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    """Write a file anew with what ``change`` makes of its value, or gives back.

    Of objects only enums and arguments (argparse.Namespace) are kept.
    """
    file = read_torch(path)
    changed = change(file.value)
    data: dict[tuple[Any, ...], bytes] = {}
    value = _plain(file, path.read_bytes(), file.value if changed is None else changed, (), data)
    laid = lay_out_torch(value, "archive")
    out = bytearray(laid.size)
    for at, known in laid.literals:
        out[at : at + len(known)] = known
    for where, elements in data.items():
        out[laid.offsets[where] : laid.offsets[where] + len(elements)] = elements
    path.write_bytes(out)


def _plain(file: TorchFile, content: bytes, value: Any, at: tuple[Any, ...], data: dict[tuple[Any, ...], bytes]) -> Any:
    if isinstance(value, TorchTensor):
        stored = file.place(value, "tensor", 0)
        assert stored.strides is None
        data[at] = content[stored.offset : stored.offset + stored.nbytes]
        assert stored.nbytes == BYTES[value.dtype] * (len(data[at]) // BYTES[value.dtype])
        return Hole(value.dtype, value.shape)
    if isinstance(value, PickledObject) and value.cls == "argparse.Namespace":
        return Instance("argparse", "Namespace", _plain(file, content, value.fields, at, data))
    if isinstance(value, PickledObject):
        return next(iter(value.fields.get("args", ())), None)
    if isinstance(value, dict):
        return {k: _plain(file, content, v, (*at, k), data) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(file, content, v, (*at, i), data) for i, v in enumerate(value))
    return value
