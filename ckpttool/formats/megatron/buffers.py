"""Where parameters lie in a flat buffer of Megatron Core's distributed optimizer.

A buffer has the parameters of one rank and one dtype in the reverse of the model's order, each at a multiple of 64
elements. Source: megatron/core/distributed/param_and_grad_buffer.py of Megatron Core 0.16.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

ALIGNMENT = 64
"""Elements."""


def offsets(parameters: Iterable[tuple[str, tuple[int, ...]]]) -> tuple[dict[str, int], int]:
    """(name -> first element, elements of the buffer) of ``parameters``, (name, shape on the rank) in the order of
    ``named_parameters()``, in a buffer of one bucket."""
    out, at = {}, 0
    for name, shape in reversed(list(parameters)):
        at += -at % ALIGNMENT
        out[name] = at
        at += prod(shape)
    return out, at
