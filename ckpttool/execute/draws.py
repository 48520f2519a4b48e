"""The random numbers of computed tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from ckpttool.core.plan import Compute, Randomness
from ckpttool.kernels.merge.base import Draws
from ckpttool.kernels.merge.draws import CounterDraws, DrawnTensor, Working, mergekit_draws


def tensor_draws(randomness: Randomness | None) -> Callable[[Compute], Draws]:
    """The random numbers of each computed tensor."""
    if randomness is None or randomness.stream == "counter":
        seed = randomness.seed if randomness else 0
        return lambda compute: CounterDraws(seed, compute.name)
    order = [
        DrawnTensor(name, size, models, cast("Working", working)) for name, size, models, working in randomness.order
    ]
    stream = mergekit_draws(randomness.seed, order)
    drawing = {t.name for t in order}
    return lambda compute: stream(compute.name) if compute.name in drawing else CounterDraws(0, compute.name)
