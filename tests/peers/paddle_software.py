"""Paddle's trainers on a machine without a GPU: what has to give way before they load a checkpoint.

Runs in ``.venv-paddle`` only. Checkpoint code stays as it is; what is replaced is the device under it:

* The sizes to which buffers are padded are known for GPUs only; the processor gets theirs.
* Tensors are moved to the GPU before they are sent; here they are where they have to be.
* gloo cannot reduce on a computation stream; it reduces without.
* What Paddle read of its rank while it was imported, which was before this process was forked, is forgotten.

``only_checkpoints`` stands in for libraries that paddlenlp 3.0.0b4 imports for tokenizers, metrics and servers.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import numpy as np

ABSENT = frozenset(
    "aistudio_sdk fastapi jieba pydantic scipy sentencepiece seqeval sklearn uvicorn visualdl".split()  # noqa: SIM905
)

Bits = np.ndarray[Any, np.dtype[Any]]


class _Nothing(MetaPathFinder, Loader):
    """Finds modules in which every name is there and does nothing."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".", maxsplit=1)[0] in ABSENT else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module: ModuleType = MagicMock(name=spec.name)
        module.__path__ = []
        module.__spec__ = spec
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def only_checkpoints() -> None:
    """Call before importing paddlenlp."""
    sys.meta_path.insert(0, _Nothing())


def on_the_processor() -> None:
    """Call before loading."""
    import paddle
    from paddle.distributed import parallel
    from paddle.distributed.fleet.utils import tensor_fusion_helper
    from paddle.optimizer import fusion_utils

    warnings.simplefilter("ignore")
    parallel._global_parallel_env = None
    for module in (tensor_fusion_helper, fusion_utils):
        module.alignment["unknown"] = module.alignment["gpu"]  # "unknown" is what they call a processor
    paddle.Tensor.cuda = lambda tensor, *_, **__: tensor
    stream = paddle.distributed.stream
    reduce = stream.all_reduce

    def all_reduce(
        tensor: Any, op: Any = paddle.distributed.ReduceOp.SUM, group: Any = None, sync_op: Any = True, **_: Any
    ) -> Any:
        return reduce(tensor, op, group, sync_op, use_calc_stream=False)

    stream.all_reduce = all_reduce


WIDTH = {"bfloat16": "u2", "float8_e4m3fn": "u1", "float8_e5m2": "u1"}
"""Dtypes that numpy does not have -> one that holds their bits."""


def bits(value: Any) -> tuple[str, Bits]:
    """Dtype by Paddle's name and elements; as unsigned integers where numpy has no such dtype."""
    if isinstance(value, np.ndarray):
        name = value.dtype.name
        return name, value.view(WIDTH[name]) if name in WIDTH else value
    name = str(value.dtype).removeprefix("paddle.")
    if name.startswith("float8"):
        return name, value.view("uint8").numpy()
    array = value.numpy()
    return name, array.view(WIDTH[name]) if name in WIDTH else array


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leaves of nested dictionaries, by keys joined with "/"."""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        out |= flatten(value, f"{prefix}{key}/") if isinstance(value, Mapping) else {prefix + key: value}
    return out


def save(path: str, tensors: Mapping[str, Any]) -> dict[str, str]:
    """Write a .npz with what is a tensor; returns its dtypes."""
    import paddle

    found = {k: bits(v) for k, v in tensors.items() if isinstance(v, (np.ndarray, paddle.Tensor))}
    arrays: dict[str, Any] = {k: v for k, (_, v) in found.items()}
    np.savez(path, **arrays)
    return {k: dtype for k, (dtype, _) in found.items()}
