"""Bytes of training on one rank: weights, gradients, master weights and the two moments of Adam.

====================  =================================  ==============================================
what                  bytes a parameter                  shared out over the data-parallel ranks from
====================  =================================  ==============================================
weights               as the recipe stores them          ZeRO-3
gradients             2 or 4                             ZeRO-2
master weights        4 or none                          ZeRO-1
moments               2 or 4, twice                      ZeRO-1
====================  =================================  ==============================================

Routed experts have fewer copies: ``world / (etp * ep * pp)`` instead of dp, world being ``tp * pp * dp``. Source:
Megatron's theoretical_memory_usage.py (18 bytes a parameter, or 6 + 12/dp), which ZeRO-0 and ZeRO-1 repeat.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ckpttool.core.mesh import Mesh
from ckpttool.errors import UsageError
from ckpttool.ops.size.resident import Weights

BYTES = {"bf16": 2, "fp32": 4, "none": 0}


class TrainingBytes(NamedTuple):
    """Bytes of a training run on one rank."""

    weights: int
    gradients: int
    masters: int
    moments: int

    @property
    def nbytes(self) -> int:
        return sum(self)


@dataclass(frozen=True, slots=True)
class TrainingSetup:
    """A training run's sharding, and bytes on each rank."""

    zero: int
    dp: int
    expert_dp: int
    gradient: str
    master: str
    moment: str
    transposed: bool
    """Codes and scales are there a second time, transposed for the backward pass."""
    held: list[TrainingBytes]
    """Bytes by model-parallel rank."""

    @property
    def most(self) -> int:
        """The rank with the most bytes."""
        return max(range(len(self.held)), key=lambda r: self.held[r].nbytes, default=0)


def training_of(
    held: list[Weights], mesh: Mesh, *, zero: int, dp: int, gradient: str, master: str, moment: str, transposed: bool
) -> TrainingSetup:
    """Work it out. Raises UsageError for sizes and dtypes that do not go together."""
    for option, value, known in (
        ("--grad", gradient, ("bf16", "fp32")),
        ("--master", master, ("fp32", "none")),
        ("--moment", moment, ("fp32", "bf16")),
    ):
        if value not in known:
            raise UsageError(f"{option} `{value}` is not known", hint="one of " + ", ".join(known))
    folded = mesh.ep * mesh.etp
    expert_dp, rest = divmod(mesh.tp * dp, folded)
    if rest and any(w.experts for w in held):
        raise UsageError(
            f"tp {mesh.tp} x dp {dp} ranks a stage are not a multiple of ep {mesh.ep} x etp {mesh.etp}",
            hint=f"for example --dp {folded}" if mesh.tp == 1 else "give another --dp, --ep-out or --etp-out",
        )
    expert_dp = max(1, expert_dp)

    def shared(amount: int, experts: int, stage: int) -> int:
        # ZeRO pads its buffers, so that all ranks hold equally much.
        if zero < stage:
            return amount + experts
        return -(-amount // dp) + -(-experts // expert_dp)

    states = []
    for w in held:
        dense, experts = w.dense, w.experts
        if transposed:
            dense, experts = dense + w.codes, experts + w.expert_codes
        amounts = [
            (w.parameters * size, w.expert_parameters * size)
            for size in (BYTES[gradient], BYTES[master], 2 * BYTES[moment])
        ]
        states.append(
            TrainingBytes(
                shared(dense, experts, 3), shared(*amounts[0], 2), shared(*amounts[1], 1), shared(*amounts[2], 1)
            )
        )
    return TrainingSetup(zero, dp, expert_dp, gradient, master, moment, transposed, states)
