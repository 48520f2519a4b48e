"""What Paddle has for GPUs only and training needs: collectives of tensor parallelism, AdamW for bfloat16.

Runs in ``.venv-paddle`` only, beside ``paddle_software``, which has what loading and saving need.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import paddle
from paddle.autograd import PyLayer


def without_paddlefleet() -> None:
    """PaddleFormers 1.2 builds Qwen3-MoE of paddlefleet, for GPUs only; its own layers import it, too."""
    for name, value in (
        ("paddlefleet_ops", {"is_deep_ep_available": lambda: False}),
        ("paddleformers.transformers.gpt_provider", {"GPTModelProvider": object}),
    ):
        sys.modules[name] = module = ModuleType(name)
        vars(module).update(value)


class _Sum(PyLayer):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Any, group: Any) -> Any:  # noqa: ARG004  # Paddle's signature
        total = x.clone()
        paddle.distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:  # noqa: ARG004  # Paddle's signature
        return dy


class _Identity(PyLayer):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Any, group: Any) -> Any:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        total = dy.clone()
        paddle.distributed.all_reduce(total, group=ctx.group)
        return total


class _Concat(PyLayer):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Any, group: Any) -> Any:
        ctx.group = group
        parts: list[Any] = []
        paddle.distributed.all_gather(parts, x.contiguous(), group=group)
        return paddle.concat(parts, axis=-1)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        return paddle.split(dy, ctx.group.nranks, axis=-1)[ctx.group.rank]


class _Done:
    def wait(self) -> None:
        pass


def _reduce_scatter(out: Any, whole: Any, op: Any = None, group: Any = None, **_: Any) -> _Done:
    total = whole.clone()
    paddle.distributed.all_reduce(total, group=group)
    if op == paddle.distributed.ReduceOp.AVG:
        total.scale_(1 / group.nranks)
    paddle.assign(paddle.split(total, group.nranks)[group.rank], out)
    return _Done()


def collectives() -> None:
    """Those of tensor-parallel layers and of sharded optimizers that gloo does not have."""
    from paddle.distributed import collective
    from paddle.distributed.fleet.layers.mpu import mp_ops
    from paddle.distributed.fleet.meta_parallel import tensor_parallel

    # The first rank would hand its batch to the others; here all have the same.
    tensor_parallel.broadcast_input_data = lambda _, *inputs, **named: (inputs, named)
    paddle.distributed.reduce_scatter = _reduce_scatter
    for module in (mp_ops, collective):
        module._mp_allreduce = lambda x, group=None, **_: _Sum.apply(x, group)
        module._c_identity = lambda x, group=None, **_: _Identity.apply(x, group)
        module._c_concat = lambda x, group=None: _Concat.apply(x, group)


class Twin:
    """A model of float32 that computes for one of bfloat16, with its weights."""

    def __init__(self, model: Any, twin: Any) -> None:
        self.model, self.twin = model, twin

    def refresh(self) -> Any:
        """The twin, with the weights that the model has now."""
        for ours, theirs in self._pairs():
            ours.set_value(theirs.astype("float32"))
        return self.twin

    def hand_over(self) -> None:
        """The twin's gradients become the model's, through all that happens to gradients of the model."""
        pairs = [(p, t.grad) for t, p in self._pairs() if t.grad is not None]
        paddle.add_n([(p.astype("float32") * g).sum() for p, g in pairs]).backward()
        self.twin.clear_gradients()

    def _pairs(self) -> Any:
        return zip(self.twin.parameters(), self.model.parameters(), strict=True)


def adamw_of_masters() -> None:
    """AdamW's kernel for bfloat16 works on the masters and rounds them; that for float32 does the first half."""
    from paddle.optimizer import adamw

    kernels = adamw._C_ops

    class Kernels:
        def __getattr__(self, name: str) -> Any:
            return getattr(kernels, name)

        @staticmethod
        def adamw_(parameter: Any, gradient: Any, *rest: Any) -> Any:
            before, (master, *behind) = rest[:6], rest[6:]
            if master is None or parameter.dtype == paddle.float32:
                return kernels.adamw_(parameter, gradient, *rest)
            behind[-3] = False  # no multi_precision
            done = kernels.adamw_(master, gradient.astype("float32"), *before, None, *behind)
            parameter.set_value(master.astype(parameter.dtype))
            return done

    adamw._C_ops = Kernels()
