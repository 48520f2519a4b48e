"""Names that each software gives to the states of Adam and its relatives. Pure.

    torch         Paddle          what
    exp_avg       moment1_0       the average of the gradients
    exp_avg_sq    moment2_0       the average of their squares
    max_exp_avg_sq  moment2_max_0 the largest of those (AMSGrad)
    momentum_buffer velocity_0    of SGD with momentum
    step          beta1_pow_acc_0, beta2_pow_acc_0    how many steps were taken; Paddle has beta ** (steps + 1)

A step is one number (torch: float32, no axes); a power of beta is one float32 with the shape [1], which Paddle's
kernels multiply by beta once in each step, in float32, beginning with beta itself.
Source: torch/optim/adam.py (torch 2.13); paddle/phi/kernels/funcs/adam_functors.h and python/paddle/optimizer/adam.py.
"""

from __future__ import annotations

import struct

from ckpttool.errors import UnsupportedError

PADDLE = {
    "exp_avg": "moment1_0",
    "exp_avg_sq": "moment2_0",
    "max_exp_avg_sq": "moment2_max_0",
    "momentum_buffer": "velocity_0",
}
"""torch's name -> Paddle's, of the states that hold the same."""
TORCH = {theirs: ours for ours, theirs in PADDLE.items()}
STEP = "step"
BETA_POWERS = ("beta1_pow_acc_0", "beta2_pow_acc_0")
SCALARS = frozenset({STEP, *BETA_POWERS})
"""States that are one number, whatever shape the parameter has."""


def number_bytes(value: float) -> tuple[str, bytes]:
    """(dtype, bytes) of a plain number as a tensor: float32, as torch's optimizers keep their step, where it is exact.

    Otherwise it is as wide as Python's own number. Raises UnsupportedError for an integer of more than 64 bits.
    """
    try:
        data = struct.pack("<f", value)
        if struct.unpack("<f", data)[0] == value:
            return "F32", data
    except (OverflowError, struct.error):  # too large for a float of either size
        pass
    try:
        return ("I64", struct.pack("<q", value)) if isinstance(value, int) else ("F64", struct.pack("<d", value))
    except struct.error as e:
        raise UnsupportedError(
            f"{value!s:.40} has more than 64 bits", hint="omit the optimizer with --only model"
        ) from e
