"""Methods that weigh each element by itself: linear, passthrough, nearswap, average, ema.

None of them measures anything, so each reads its models once.
"""

from __future__ import annotations

import numpy as np

from ckpttool.errors import UsageError
from ckpttool.kernels.merge.base import Array, Chunk, Combine, MergeTensor, Method, Parameter, Program


def total_weight(tensor: MergeTensor, weights: Array) -> np.float32:
    """The sum of float32 ``weights``, to divide by. Raises UsageError when it is zero."""
    total = np.cumsum(weights, dtype=np.float32)[-1]  # one by one in float32, as mergekit's sum of a few weights is
    if total == 0:
        raise UsageError(
            f"the weights of `{tensor.name}` sum to 0, so that they cannot be normalized",
            hint="give other weights, or do not normalize (--param normalize=false; in a recipe normalize: false)",
        )
    return np.float32(total)


def linear(tensor: MergeTensor) -> Program:
    """Weighted mean of the models (Model Soups, arXiv:2203.05482).

    y = sum_i w_i x_i, divided by sum_i w_i with ``normalize``. Each product is added without being rounded, as a fused
    multiply-add does: numpy has none, but the product of two float32 is exact in float64, so that product and sum
    are taken there and rounded to float32 once per model. This gives the bits of mergekit's ``addcmul_``.
    Raises UsageError for weights that sum to zero.
    """
    yield from ()
    weights = np.array([p["weight"] for p in tensor.models], np.float32)
    total = total_weight(tensor, weights) if tensor.whole["normalize"] else None

    def combine(chunk: Chunk, out: Array) -> None:
        wide = chunk.scratch(0, np.float64)
        np.multiply(chunk.model(0), weights[0], out=out)
        np.add(out, 0, out=out)  # the sum starts at +0, which a product of -0 leaves alone
        for i in range(1, len(weights)):
            np.multiply(chunk.model(i), np.float64(weights[i]), out=wide, dtype=np.float64)
            np.add(wide, out, out=wide)
            np.copyto(out, wide, casting="same_kind")
        if total is not None:
            np.divide(out, total, out=out)

    return combine


def passthrough(tensor: MergeTensor) -> Program:
    """One model's tensor times ``scale``: y = scale x, for layers that are stacked, repeated or damped."""
    yield from ()
    scale = np.float32(tensor.models[0]["scale"])

    def combine(chunk: Chunk, out: Array) -> None:
        np.multiply(chunk.model(0), scale, out=out)

    return combine


def nearswap(tensor: MergeTensor) -> Program:
    """The base, moved towards the model where the two are near (alchemonaut/QuartetAnemoi-70B-t0.0001).

    y = w x + (1 - w) b with w = min(1, max(0, t / max(|b - x|, 1e-6))): up to a distance of t the model's element is
    taken, beyond it the step from the base is t long.
    """
    yield from ()
    t = np.float32(tensor.whole["t"])

    def combine(chunk: Chunk, out: Array) -> None:
        base, model, w = chunk.base(), chunk.model(0), chunk.scratch(0)
        np.subtract(base, model, out=w)
        np.abs(w, out=w)
        np.maximum(w, 1e-6, out=w)
        np.divide(t, w, out=w)
        np.clip(w, 0, 1, out=w)
        np.multiply(w, model, out=out)
        np.subtract(1, w, out=w)
        np.multiply(w, base, out=w)
        np.add(out, w, out=out)

    return combine


def _weighted(weights: Array, divisor: float) -> Combine:
    """``sum_i weights[i] x_i / divisor`` in float64, rounded to float32 once at the end, one model at a time."""

    def combine(chunk: Chunk, out: Array) -> None:
        total, term = chunk.scratch(0, np.float64), chunk.scratch(1, np.float64)
        np.multiply(chunk.model(0), weights[0], out=total, dtype=np.float64)
        for i in range(1, len(weights)):
            np.multiply(chunk.model(i), weights[i], out=term, dtype=np.float64)
            np.add(total, term, out=total)
        np.divide(total, divisor, out=total)
        np.copyto(out, total, casting="same_kind")

    return combine


def average(tensor: MergeTensor) -> Program:
    """Uniform mean of the models, usually checkpoints of one run (arXiv:1803.05407): y = sum_i x_i / N.

    Sums are float64: hundreds of checkpoints lose nothing that float32 could show.
    """
    yield from ()
    n = len(tensor.models)
    return _weighted(np.ones(n), n)


def ema(tensor: MergeTensor) -> Program:
    """Exponential moving average over the models in the order they are listed, the oldest first.

    e_0 = x_0, e_i = decay e_(i-1) + (1 - decay) x_i, y = e_(N-1). Written out, x_0 weighs decay^(N-1) and every later
    x_i weighs (1 - decay) decay^(N-1-i); the sum is float64. Raises UsageError for a decay outside [0, 1].
    """
    yield from ()
    decay = tensor.whole["decay"]
    if not 0 <= decay <= 1:
        raise UsageError(f"ema: a decay of {decay} is not in [0, 1]")
    # A power is the last bit of a library, a product is the same everywhere.
    weights = np.multiply.accumulate([1.0, *[float(decay)] * (len(tensor.models) - 1)])[::-1].copy()
    weights[1:] *= 1 - decay
    return _weighted(weights, 1)


METHODS = {
    m.name: m
    for m in (
        Method(
            "linear",
            linear,
            "sum w_i x_i [/ sum w_i]",
            "https://arxiv.org/abs/2203.05482",
            per_model={"weight": Parameter("float", None, "share of the model")},
            whole={"normalize": Parameter("bool", default=True, help="divide by the sum of the weights")},
            base="refused",
            one_at_a_time=True,
        ),
        Method(
            "passthrough",
            passthrough,
            "scale x",
            per_model={"scale": Parameter("float", 1.0, "factor of the tensor")},
            base="refused",
            models=(1, 1),
        ),
        Method(
            "nearswap",
            nearswap,
            "w x + (1 - w) b, w = clamp(t / |b - x|, 0, 1)",
            "https://huggingface.co/alchemonaut/QuartetAnemoi-70B-t0.0001",
            whole={"t": Parameter("float", None, "distance up to which the model's element is taken")},
            base="needed",
            models=(1, 1),
        ),
        Method(
            "average",
            average,
            "sum x_i / N",
            "https://arxiv.org/abs/1803.05407",
            base="refused",
            one_at_a_time=True,
        ),
        Method(
            "ema",
            ema,
            "e_0 = x_0, e_i = decay e_(i-1) + (1 - decay) x_i",
            whole={"decay": Parameter("float", None, "share of the average so far, 0 to 1")},
            base="refused",
            one_at_a_time=True,
        ),
    )
}
