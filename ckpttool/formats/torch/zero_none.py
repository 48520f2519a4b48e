"""The optimizer of a DeepSpeed save without ZeRO, which lies in the file of the model states.

    optimizer
      state, param_groups                float32: the optimizer's own, see ``optimizer``
      optimizer_state_dict               float16 or bfloat16: that of the optimizer inside, of which masters are the
                                         parameters
      fp32_groups       [[tensor, ...]]  of FP16_UnfusedOptimizer: masters of each group, in the order of its numbers
      fp32_groups_flat  [1-D, ...]       of FP16_Optimizer, around a fused optimizer: those of a group end to end, not
                                         padded, with states as long; which parameters are in it is not said
      dynamic_loss_scale, cur_scale, ... scaling of the loss

Source: deepspeed/runtime/engine.py, runtime/fp16/unfused_optimizer.py, runtime/fp16/fused_optimizer.py (0.19.8).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from ckpttool.containers.torch_pickle import TorchTensor
from ckpttool.containers.torch_zip import TorchFile
from ckpttool.core.geometry import contiguous_strides
from ckpttool.errors import UnsupportedError
from ckpttool.formats.base import StoredCheckpoint, TrainingState
from ckpttool.formats.torch.optimizer import (
    MASTER,
    OptimizerState,
    is_optimizer,
    is_plain,
    parameters_of,
    refuse,
)

KEY = "optimizer"
_INNER, _MASTERS, _FLAT = "optimizer_state_dict", "fp32_groups", "fp32_groups_flat"


def add_optimizer(stored: StoredCheckpoint, file: TorchFile, value: Any, buffers: frozenset[str]) -> None:
    """Give the state to the parameters of ``stored``, whose tensors are in the order of the model's modules.

    What cannot be given is in ``StoredCheckpoint.refused``, with a note.
    """
    training = stored.training or TrainingState()
    inner: Any = value.get(_INNER) if isinstance(value, dict) else None
    found: Any = value
    if is_optimizer(inner) and isinstance(inner.get("state"), dict):
        scale = {k: v for k, v in value.items() if is_plain(v)}
        more = {"loss_scaler": scale} if scale.get("dynamic_loss_scale") else {}
        training = TrainingState(training.groups, training.step, {**training.plain, **more}, training.left)
        if _FLAT in value:
            shapes = parameters_of([t for t in stored.tensors if t.component == "model"], buffers)
            found = _of_vector(inner, value[_FLAT], shapes)
        else:
            found = _with_masters(inner, value.get(_MASTERS))
    if found is None:
        refuse(
            stored,
            "of a save without ZeRO",
            UnsupportedError(
                "the save does not record which of the parameters are in the vectors of its groups",
                where=str(file.info.place),
                hint="train with ZeRO, whose files say it; or omit the optimizer with --only model",
            ),
        )
        return
    left = tuple([n for n in training.left if n != KEY])
    training = TrainingState(training.groups, training.step, training.plain, left)
    OptimizerState(file, found, "of a save without ZeRO", training, trusted=True, buffers=buffers).add_to(stored)


def _with_masters(inner: Mapping[str, Any], masters: Any) -> dict[str, Any]:
    """The optimizer's state, with a master for each number."""
    states = {n: dict(s) if isinstance(s, dict) else s for n, s in inner["state"].items()}
    groups = inner["param_groups"]
    for group, held in zip(groups, masters if isinstance(masters, (list, tuple)) else (), strict=False):
        numbers = group.get("params") if isinstance(group, dict) else None
        if isinstance(numbers, list) and isinstance(held, (list, tuple)) and len(numbers) == len(held):
            states |= {n: {**_dict(states.get(n)), MASTER: m} for n, m in zip(numbers, held, strict=True) if _key(n)}
    return {"state": states, "param_groups": groups}


def _dict(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {}


def _key(value: Any) -> bool:
    return type(value) in (int, str)


def _of_vector(inner: Mapping[str, Any], flat: Any, shapes: Mapping[str, Sequence[int]]) -> dict[str, Any] | None:
    """The state of each parameter, by its name, where one group has all of them; else None."""
    total = sum(prod(s) for s in shapes.values())
    groups = inner["param_groups"]
    one = isinstance(flat, (list, tuple)) and len(flat) == len(groups) == 1 and isinstance(groups[0], dict)
    if not one or not isinstance(flat[0], TorchTensor) or flat[0].shape != (total,):
        return None
    own: Any = next(iter(inner["state"].values()), {})
    if not isinstance(own, dict):
        return None
    held = {**own, MASTER: flat[0]}
    if any(isinstance(v, TorchTensor) and v.shape not in ((total,), (), (1,)) for v in held.values()):
        return None
    states: dict[str, dict[str, Any]] = {}
    at = 0
    for name, shape in shapes.items():
        states[name] = {key: _part(v, at, tuple(shape), total) for key, v in held.items()}
        at += prod(shape)
    return {"state": states, "param_groups": [{**groups[0], "params": [*shapes]}]}


def _part(value: Any, at: int, shape: tuple[int, ...], total: int) -> Any:
    if not isinstance(value, TorchTensor) or value.shape != (total,):
        return value
    return value._replace(offset=value.offset + at * value.strides[0], shape=shape, strides=contiguous_strides(shape))
