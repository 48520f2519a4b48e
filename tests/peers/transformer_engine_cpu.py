"""What megatron-core asks Transformer Engine for, on CPU: the same parameters, computed with by torch.

megatron-core wraps these modules: it names, cuts and stores what they hold by its own lines. Names, order and shapes of
the parameters here are those of Transformer Engine 2.8 (transformer_engine/pytorch: linear.py, layernorm_linear.py,
grouped_linear.py, layernorm.py, rmsnorm.py, dot_product_attention.py, optimizers/fused_adam.py), and nothing else of it
is here. Without FP8 an ``_extra_state`` is an empty tensor.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.optim.adamw import adamw

VERSION = "2.8.0"


class Module(nn.Module):
    """TransformerEngineBaseModule."""

    def __init__(self) -> None:
        super().__init__()
        self.fp8 = self.fp8_calibration = False
        self.fp8_meta = {"fp8_checkpoint": False}

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        pass

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        pass


def parameter(size: Sequence[int], options: dict[str, Any], fill: Callable[[torch.Tensor], Any]) -> nn.Parameter:
    out = nn.Parameter(torch.empty(*size, dtype=options["params_dtype"]))
    with torch.no_grad():
        fill(out)
    return out


class Norm(Module):
    """LayerNorm and RMSNorm."""

    rms = False

    def __init__(self, hidden_size: int, eps: float = 1e-5, *, zero_centered_gamma: bool = False, **options: Any):
        super().__init__()
        self.eps, self.zero_centered = eps, zero_centered_gamma
        self.weight = parameter([hidden_size], options, lambda t: t.fill_(0 if zero_centered_gamma else 1))
        if not self.rms:
            self.bias = parameter([hidden_size], options, lambda t: t.zero_())
        for p in self.parameters():
            p.sequence_parallel = options["sequence_parallel"]  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return normed(x, self.weight, None if self.rms else self.bias, self.eps, zero_centered=self.zero_centered)


class LayerNorm(Norm):
    pass


class RMSNorm(Norm):
    rms = True


def normed(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, *, zero_centered: bool
) -> torch.Tensor:
    weight = weight + 1 if zero_centered else weight
    if bias is None:
        return functional.rms_norm(x, weight.shape, weight, eps)
    return functional.layer_norm(x, weight.shape, weight, bias, eps)


class Linear(Module):
    def __init__(
        self, in_features: int, out_features: int, *, tp_size: int, tp_group: Any, bias: bool, return_bias: bool,
        parallel_mode: str | None, init_method: Any, sequence_parallel: bool, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.in_features, self.out_features, self.use_bias, self.return_bias = (
            in_features,
            out_features,
            bias,
            return_bias,
        )
        self.parallel_mode, self.tp_size, self.group = parallel_mode, tp_size, tp_group
        self.sequence_parallel = sequence_parallel
        self.before(options)
        rows = out_features // tp_size if parallel_mode == "column" else out_features
        columns = in_features // tp_size if parallel_mode == "row" else in_features
        self.weight = parameter([rows, columns], options, init_method or (lambda _: None))
        self.bias = parameter([rows], options, lambda t: t.zero_()) if bias else torch.Tensor()
        if parallel_mode:
            cut = [self.weight, self.bias] if bias and parallel_mode == "column" else [self.weight]
            for p in cut:
                vars(p).update(
                    tensor_model_parallel=True, partition_dim=int(parallel_mode == "row"), partition_stride=1
                )

    def before(self, options: dict[str, Any]) -> None:
        """What comes before the weight."""

    def forward(self, x: torch.Tensor, *, is_first_microbatch: bool | None = None) -> Any:
        from megatron.core import tensor_parallel as tp

        if self.parallel_mode == "column" and self.sequence_parallel:
            x = tp.gather_from_sequence_parallel_region(x, group=self.group)
        elif self.parallel_mode == "column":
            x = tp.copy_to_tensor_model_parallel_region(x, group=self.group)
        x = functional.linear(x, self.weight)
        if self.parallel_mode == "row" and self.sequence_parallel:
            x = tp.reduce_scatter_to_sequence_parallel_region(x, group=self.group)
        elif self.parallel_mode == "row":
            x = tp.reduce_from_tensor_model_parallel_region(x, group=self.group)
        if self.return_bias:
            return x, self.bias
        return x + self.bias if self.use_bias else x


class LayerNormLinear(Linear):
    def before(self, options: dict[str, Any]) -> None:
        self.eps, self.zero_centered = options["eps"], options["zero_centered_gamma"]
        size = [self.in_features]
        self.layer_norm_weight = parameter(size, options, lambda t: t.fill_(0 if self.zero_centered else 1))
        self.layer_norm_bias = None
        if options["normalization"] != "RMSNorm":
            self.layer_norm_bias = parameter(size, options, lambda t: t.zero_())
        for p in self.parameters():
            p.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor, *, is_first_microbatch: bool | None = None) -> Any:
        x = normed(x, self.layer_norm_weight, self.layer_norm_bias, self.eps, zero_centered=self.zero_centered)
        return super().forward(x)


class GroupedLinear(Module):
    def __init__(
        self, num_gemms: int, in_features: int, out_features: int, *, tp_size: int, bias: bool, return_bias: bool,
        parallel_mode: str | None, init_method: Any, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_gemms, self.use_bias, self.return_bias = num_gemms, bias, return_bias
        rows = out_features // tp_size if parallel_mode == "column" else out_features
        columns = in_features // tp_size if parallel_mode == "row" else in_features
        for i in range(num_gemms):
            self.register_parameter(f"weight{i}", parameter([rows, columns], options, init_method))
            if bias:
                self.register_parameter(f"bias{i}", parameter([rows], options, lambda t: t.zero_()))

    def forward(self, x: torch.Tensor, m_splits: Any, *, is_first_microbatch: bool | None = None) -> Any:
        parts = torch.split(x, [int(n) for n in m_splits])
        added = self.use_bias and not self.return_bias
        out = [
            functional.linear(part, self.get_parameter(f"weight{i}"), self.get_parameter(f"bias{i}") if added else None)
            for i, part in enumerate(parts)
        ]
        if self.return_bias:
            return torch.cat(out), [self.get_parameter(f"bias{i}") for i in range(self.num_gemms)]
        return torch.cat(out)


class DotProductAttention(Module):
    """Causal; [sequence, batch, heads, channels]."""

    softmax_offset: torch.Tensor

    def __init__(
        self, num_attention_heads: int, kv_channels: Any, *, tp_size: int, softmax_scale: float | None = None,
        window_size: tuple[int, int] | None = None, softmax_type: str = "vanilla", **_: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        width = kv_channels[0] if isinstance(kv_channels, tuple) else kv_channels
        self.scale = softmax_scale or width**-0.5
        self.window = window_size
        self.sinks = softmax_type == "learnable"
        if self.sinks:
            self.softmax_offset = nn.Parameter(torch.zeros(num_attention_heads // tp_size))

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        length, batch, heads = query.shape[:3]
        key, value = (t.repeat_interleave(heads // t.shape[2], 2) for t in (key, value))
        scores = torch.einsum("sbhd,tbhd->bhst", query, key).float() * self.scale
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        if self.window is not None:
            seen = seen.triu(-self.window[0])
        scores = scores.masked_fill(~seen, -torch.inf)
        if self.sinks:
            scores = torch.cat([scores, self.softmax_offset[None, :, None, None].expand(batch, -1, length, 1)], -1)
        weights = scores.softmax(-1)[..., :length].to(value.dtype)
        return torch.einsum("bhst,tbhd->sbhd", weights, value).flatten(2)


class FusedAdam(torch.optim.Optimizer):
    """AdamW with the numbers of torch's; a group counts the steps, and no parameter does."""

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: Any = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0,
        **options: Any,
    ) -> None:  # fmt: skip
        adam = {"lr": lr, "bias_correction": True, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, adam)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for p in trained:
                if not self.state[p]:
                    self.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            adamw(
                trained,
                [p.grad for p in trained if p.grad is not None],
                [self.state[p]["exp_avg"] for p in trained],
                [self.state[p]["exp_avg_sq"] for p in trained],
                [],
                [torch.tensor(float(group["step"] - 1)) for _ in trained],
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


THERE: dict[str, dict[str, Any]] = {
    "": {"__version__": VERSION},
    "pytorch": {
        c.__name__: c for c in (DotProductAttention, GroupedLinear, LayerNorm, LayerNormLinear, Linear, RMSNorm)
    },
    "pytorch.optimizers": {"FusedAdam": FusedAdam, "FusedSGD": torch.optim.SGD},
}
"""The modules of the package; another one has any class, of which nothing is an instance."""


CLOSED = {"pytorch.attention", "pytorch.cpp_extensions", "pytorch.cpu_offload", "pytorch.optimizers"}
"""Modules that have nothing but this, if anything: the rest megatron-core does by itself."""


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        top, _, inside = name.partition(".")
        if top != "transformer_engine":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=inside not in CLOSED)

    def exec_module(self, module: types.ModuleType) -> None:
        inside = module.__name__.partition(".")[2]
        vars(module).update(THERE.get(inside, {}))
        if inside not in CLOSED:
            vars(module)["__getattr__"] = _some_class


class _Any(type):
    """Of a class that has any attribute."""

    def __getattr__(cls, name: str) -> type:
        return _some_class(name)


def _some_class(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Any(name, (), {})


@contextlib.contextmanager
def importable() -> Iterator[None]:
    """``transformer_engine`` can be imported; what asks for it later finds that it is not installed."""
    finder = Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [n for n in sys.modules if n.partition(".")[0] == "transformer_engine"]:
            del sys.modules[name]
