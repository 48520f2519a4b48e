"""Task arithmetic and what became of it: the models' deltas are thinned out, then summed or put to a vote of signs.

With d_i = x_i - b, each method is a way of choosing the elements m_i of d_i that stay, and one of two ways of adding up
what is left, p_i = w_i (m_i d_i):

    sum       y = b + lambda (sum_i p_i) / D,              D = sum_i w_i
    election  y = b + lambda (sum_{i agreeing} p_i) / D,   D = sum_{i agreeing} w_i

where an element of model i agrees when the sign of p_i is that of sum_i p_i (a sum of 0 counts as positive), and D is 1
without ``normalize`` and where it is 0 (in the sum: less than 1e-8 away from it). With ``rescale``, m_i d_i is first
multiplied by sum |d_i| / sum |m_i d_i|, over the tensor, unless one of the two is less than 1e-7.

All products, sums and quotients are float32, rounded one by one in the order written above, as mergekit 0.1.5 does with
``dtype: float32``; its seeded results come out bit for bit, but for two things. It leaves it to torch which of several
equal magnitudes stay: here those with the lowest positions do. And it sums magnitudes for ``rescale`` in float32: here
they are summed in float64 and rounded at the end, unless the draws repeat mergekit's: then torch's sum is repeated, too
(``cascade``). A density of 1 chooses all and skips ``rescale``, at no cost.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from ckpttool.errors import UsageError
from ckpttool.kernels.merge.base import Array, Chunk, Contributions, MergeTensor, Method, Parameter, Pass, Program
from ckpttool.kernels.merge.order import RankQuery, Threshold, cuts
from ckpttool.kernels.portable import tree_sum

Keep = Callable[[Chunk, Array, Array], None]
"""Fills the boolean third argument with the elements of a chunk that stay; the second is the chunk of the delta."""

Keeps = Generator[Pass, None, list[Keep | None]]
"""A pass that chooses the elements of each model; None where all of them stay."""


def task_arithmetic(tensor: MergeTensor) -> Program:
    """Task vectors are added as they are (Ilharco et al. 2023, arXiv:2212.04089).

    y = b + lambda sum_i w_i d_i, divided by sum_i w_i with ``normalize``.
    """
    return (yield from _merge(tensor, [None] * len(tensor.models), elect=False))


def ties(tensor: MergeTensor) -> Program:
    """Trim, elect sign, merge (Yadav et al. 2023, arXiv:2306.01708).

    m_i are the k = max(1, floor(density n)) elements of largest |d_i|, over the tensor's n elements; election.
    """
    return (yield from _merge(tensor, (yield from _largest(tensor)), elect=True))


def dare_linear(tensor: MergeTensor) -> Program:
    """Drop and rescale (Yu et al. 2024, arXiv:2311.03099): each element stays with probability ``density``; sum.

    The paper's factor 1 / density is mergekit's sum |d| / sum |m d|.
    """
    return (yield from _merge(tensor, (yield from _drawn(tensor)), elect=False))


def dare_ties(tensor: MergeTensor) -> Program:
    """Each element stays with probability ``density``, as in ``dare_linear``; election, as in ``ties``."""
    return (yield from _merge(tensor, (yield from _drawn(tensor)), elect=True))


def della(tensor: MergeTensor) -> Program:
    """Drop by rank (Deep et al. 2024, arXiv:2406.11617): what is larger in its row is likelier to stay; election.

    An element whose |d_i| has rank r = 0 ... c - 1 in its row of c elements (ascending; equals by position) stays with
    probability density - epsilon + r / (c - 1) 2 epsilon. Rows are along the last axis: a 1-D tensor is one row, and
    of stacked matrices each has its own rows (mergekit 0.1.5 ranks a 3-D tensor along its middle axis instead). In a
    row of one element, where mergekit divides by zero, the probability is ``density``. Draws that repeat mergekit's
    rank equals as torch's unstable sort does on the machine at hand, which is part of its results.
    """
    return (yield from _merge(tensor, (yield from _drawn_by_rank(tensor)), elect=True))


def della_linear(tensor: MergeTensor) -> Program:
    """Elements stay as in ``della``; sum."""
    return (yield from _merge(tensor, (yield from _drawn_by_rank(tensor)), elect=False))


def breadcrumbs(tensor: MergeTensor) -> Program:
    """Both tails are masked (Davari and Belilovsky 2023, arXiv:2312.06795).

    In the stable ascending order of |d_i|, floor(density n) elements stay: those below the floor(gamma n) largest, or
    reaching into these where there are too few below. Sum.
    """
    return (yield from _merge(tensor, (yield from _between(tensor)), elect=False))


def breadcrumbs_ties(tensor: MergeTensor) -> Program:
    """Elements stay as in ``breadcrumbs``; election, as in ``ties``."""
    return (yield from _merge(tensor, (yield from _between(tensor)), elect=True))


def drawing(method: str, models: Sequence[Mapping[str, Any]]) -> list[bool]:
    """The models that draw a random number for every element in mergekit, given their parameters.

    DARE: those with a density below 1, be it 0. DELLA: those with a density between 0 and 1.
    """
    if method.startswith("dare_"):
        return [p["density"] < 1 for p in models]
    return [method.startswith("della") and 0 < p["density"] < 1 for p in models]


# Choosing what stays


def _densities(tensor: MergeTensor) -> list[float]:
    found = [float(p["density"]) for p in tensor.models]
    for density in found:
        if not 0 <= density <= 1:
            raise UsageError(f"`{tensor.name}`: a density of {density} is not between 0 and 1")
    return found


def _nothing(_chunk: Chunk, _delta: Array, out: Array) -> None:
    out.fill(0)


def _deltas(chunk: Chunk, models: Sequence[int]) -> Iterator[Array]:
    """The deltas of some models; the base is converted once."""
    base = chunk.base()
    for i in models:
        delta = chunk.model(i)
        yield np.subtract(delta, base, out=delta)


def _magnitudes(chunk: Chunk, models: Sequence[int]) -> Iterator[Array]:
    for delta in _deltas(chunk, models):
        yield np.abs(delta, out=delta)


def _largest(tensor: MergeTensor) -> Keeps:
    densities = _densities(tensor)
    n = tensor.size
    ranks = [RankQuery(i, n - max(1, int(d * n))) for i, d in enumerate(densities) if 0 < d < 1]
    found = iter((yield from cuts(n, _magnitudes, ranks, first=True)))

    def keep(cut: Threshold) -> Keep:
        def above(chunk: Chunk, delta: Array, out: Array) -> None:
            cut.above(_absolute(chunk, delta), chunk.start, out, first=True)

        return above

    return [None if d == 1 else keep(next(found)) if d else _nothing for d in densities]


def _between(tensor: MergeTensor) -> Keeps:
    densities = _densities(tensor)
    n = tensor.size
    ranks = []
    for i, (density, p) in enumerate(zip(densities, tensor.models, strict=True)):
        if not 0 <= p["gamma"] <= 1:
            raise UsageError(f"`{tensor.name}`: a gamma of {p['gamma']} is not between 0 and 1")
        kept = int(density * n)
        lowest = max(0, n - kept - int(p["gamma"] * n))
        if 0 < density < 1:
            ranks += [RankQuery(i, lowest), RankQuery(i, lowest + kept)]
    found = iter((yield from cuts(n, _magnitudes, ranks)))

    def keep(lower: Threshold, upper: Threshold) -> Keep:
        def between(chunk: Chunk, delta: Array, out: Array) -> None:
            size, beyond = _absolute(chunk, delta), chunk.scratch(2, np.bool_)
            lower.above(size, chunk.start, out, first=False)
            upper.above(size, chunk.start, beyond, first=False)
            np.logical_xor(out, beyond, out=out)

        return between

    return [None if d == 1 else keep(next(found), next(found)) if d else _nothing for d in densities]


def _absolute(chunk: Chunk, delta: Array) -> Array:
    out = chunk.scratch(0)
    np.abs(delta, out=out)
    return out


def _drawn(tensor: MergeTensor) -> Keeps:
    yield from ()

    def keep(i: int, density: float) -> Keep:
        def draw(chunk: Chunk, _delta: Array, out: Array) -> None:
            tensor.draws.bernoulli(i, chunk.start, density, out)

        return draw

    return [None if d == 1 else keep(i, d) if d else _nothing for i, d in enumerate(_densities(tensor))]


_RADIX = 1024
"""Number of columns from which on two radix sorts of 16 bits are faster than one sort of 64."""


def _order(rows: Array, keys: Array) -> Array:
    """Columns of each row by rising value, equal ones by position; ``keys`` (uint64) is overwritten."""
    # A float that is not negative is ordered as its bits are; below them the column orders equals.
    np.left_shift(rows.view(np.uint32), np.uint64(32), out=keys, dtype=np.uint64)
    np.bitwise_or(keys, np.arange(rows.shape[1], dtype=np.uint64), out=keys)
    keys.sort(axis=1)
    np.bitwise_and(keys, np.uint64(0xFFFFFFFF), out=keys)
    return keys.view(np.int64)


def _order_of_row(row: Array) -> Array:
    """The same for one row: a stable sort by the lower half of the bits, then one by the upper half."""
    bits = row.view(np.uint32)
    order = bits.astype(np.uint16).argsort(kind="stable")
    upper: Array = (bits >> np.uint32(16)).astype(np.uint16)[order].argsort(kind="stable")
    return order[upper]


def _drawn_by_rank(tensor: MergeTensor) -> Keeps:
    yield from ()
    working = getattr(tensor.draws, "working", "F32")
    columns = tensor.columns

    def keep(i: int, density: float, epsilon: float) -> Keep:
        if density - epsilon <= 0 or density + epsilon >= 1:
            raise UsageError(
                f"`{tensor.name}`: density {density} -/+ epsilon {epsilon} is not inside (0, 1)",
                hint="choose a smaller `epsilon`",
            )
        chances = _chances(columns, density, epsilon, working)

        def draw(chunk: Chunk, delta: Array, out: Array) -> None:
            size = _absolute(chunk, delta)
            if working == "BF16":
                np.copyto(size, size.astype(ml_dtypes.bfloat16))
            elif working == "F16":
                np.copyto(size, size.astype(np.float16))
            # torch sorts float32 in a way that leaves equals in any order; what repeats its draws repeats that, too.
            order = getattr(tensor.draws, "order", None) if working == "F32" else None
            if order is not None:
                rows = size.reshape(-1, columns)
                np.put_along_axis(rows, order(rows), chances[None], axis=1)
                tensor.draws.bernoulli(i, chunk.start, size, out)
                return
            rows = size.reshape(-1, columns)
            if columns < _RADIX:
                keys = chunk.scratch(0, np.uint64).reshape(rows.shape)
                np.put_along_axis(rows, _order(rows, keys), chances[None], axis=1)
            else:
                for row in rows:
                    row[_order_of_row(row)] = chances
            tensor.draws.bernoulli(i, chunk.start, size, out)

        return draw

    return [
        None if d == 1 else keep(i, d, p["epsilon"]) if d else _nothing
        for i, (d, p) in enumerate(zip(_densities(tensor), tensor.models, strict=True))
    ]


def _chances(columns: int, density: float, epsilon: float, working: str) -> Array:
    """The probability of every rank in a row, float32, worked out as mergekit does in the working dtype.

    In BF16 each step is rounded to 8 bits, the ranks as well: they begin at 1, and from 256 on several are one.
    """
    dtype = ml_dtypes.bfloat16 if working == "BF16" else np.float32
    if columns == 1:
        return np.full(1, density, dtype).astype(np.float32)
    ranks = np.arange(columns).astype(dtype) + np.array(1, dtype)
    share = (ranks - ranks[0]) / (ranks[-1] - ranks[0])
    # Of a Python number, torch's product takes the float32 value, and its sum the value rounded to the working dtype.
    spread = (share.astype(np.float32) * 2 * np.float32(epsilon)).astype(dtype)
    chances: Array = (spread + np.array(density - epsilon, np.float32).astype(dtype)).astype(np.float32)
    return chances


# Adding up what is left


def _weights(tensor: MergeTensor) -> list[np.float32]:
    return [np.float32(p["weight"]) for p in tensor.models]


def _products(
    weights: Sequence[np.float32], keeps: Sequence[Keep | None], factors: Mapping[int, np.float32]
) -> Callable[[Chunk, Array, int], Array]:
    """A function to p_i of a chunk, in the model's own buffer; its second argument is the base."""

    def product(chunk: Chunk, base: Array, i: int) -> Array:
        p = chunk.model(i)
        np.subtract(p, base, out=p)
        if (keep := keeps[i]) is not None:
            kept = chunk.scratch(0, np.bool_)
            keep(chunk, p, kept)
            np.multiply(p, kept, out=p)
        if (factor := factors.get(i)) is not None:
            np.multiply(p, factor, out=p)
        np.multiply(p, weights[i], out=p)
        return p

    return product


def _parts(
    choose: Callable[[MergeTensor], Keeps], *, elect: bool
) -> Callable[[MergeTensor], Generator[Pass, None, Contributions]]:
    """The p_i of a method; those of an election vote with what they are."""

    def parts(tensor: MergeTensor) -> Generator[Pass, None, Contributions]:
        keeps = yield from choose(tensor)
        # Without an election nobody asks how large they are.
        factors = (yield from _factors(tensor, keeps)) if elect and tensor.whole["rescale"] else {}
        product = _products(_weights(tensor), keeps, factors)

        def of(chunk: Chunk) -> Iterator[Array]:
            base = chunk.base()
            for i in range(len(tensor.models)):
                yield product(chunk, base, i)

        return Contributions(of, (lambda _, part, out: np.copyto(out, part)) if elect else None)

    return parts


def _merge(tensor: MergeTensor, keeps: Sequence[Keep | None], *, elect: bool) -> Program:
    """The rest of every method, once it is known what stays."""
    weights = _weights(tensor)
    factors = (yield from _factors(tensor, keeps)) if tensor.whole["rescale"] else {}
    product = _products(weights, keeps, factors)
    scale = np.float32(tensor.whole["lambda"])
    normalize = bool(tensor.whole["normalize"])
    weight = np.cumsum(weights, dtype=np.float32)[-1]
    if abs(weight) < 1e-8:
        weight = np.float32(1)

    def add(chunk: Chunk, base: Array, out: Array) -> None:
        np.add(product(chunk, base, 0), 0, out=out)  # a sum begins with +0, which takes up -0
        for i in range(1, len(weights)):
            np.add(out, product(chunk, base, i), out=out)
        if normalize:
            np.divide(out, weight, out=out)

    def vote(chunk: Chunk, base: Array, out: Array) -> None:
        products = [product(chunk, base, i) for i in range(len(weights))]
        np.add(products[0], 0, out=out)
        for p in products[1:]:
            np.add(out, p, out=out)
        # Where the sum is negative, every sign is turned over: then what is positive agrees.
        turned, zero = chunk.scratch(0, np.int32), chunk.scratch(0)
        np.bitwise_and(out.view(np.int32), np.int32(-(1 << 31)), out=turned)
        zero.fill(0)
        agrees, divisor = chunk.scratch(0, np.bool_), chunk.scratch(1)
        for i, p in enumerate(products):
            np.bitwise_xor(p.view(np.int32), turned, out=p.view(np.int32))
            np.maximum(p, zero, out=p)
            np.add(out if i else zero, p, out=out)
            if normalize:
                np.greater(p, 0, out=agrees)
                np.multiply(agrees, weights[i], out=p)
                np.add(divisor if i else zero, p, out=divisor)
        if normalize:
            np.equal(divisor, 0, out=agrees)
            np.add(divisor, agrees, out=divisor)
            np.divide(out, divisor, out=out)
        np.bitwise_xor(out.view(np.int32), turned, out=out.view(np.int32))

    def combine(chunk: Chunk, out: Array) -> None:
        base = chunk.base()
        (vote if elect else add)(chunk, base, out)
        if scale != 1:
            np.multiply(out, scale, out=out)
        np.add(base, out, out=out)

    return combine


class _Accumulator(Protocol):
    def add(self, values: Array) -> None: ...

    def result(self) -> np.floating[Any]: ...


class _WideSum:
    """A sum of float32 values in float64."""

    def __init__(self) -> None:
        self._total = np.float64(0)

    def add(self, values: Array) -> None:
        self._total += tree_sum(values)

    def result(self) -> np.float64:
        return self._total


def _factors(tensor: MergeTensor, keeps: Sequence[Keep | None]) -> Generator[Pass, None, dict[int, np.float32]]:
    """sum |d_i| / sum |m_i d_i| of the models that lose elements but not all, unless a sum is next to nothing."""
    models = {i: keep for i, keep in enumerate(keeps) if keep not in {None, _nothing}}
    # mergekit 0.1.5 (sparsify.py, rescaled_masked_tensor) takes delta.abs().sum() / masked.abs().sum(), before weights.
    # Where it works in 16 bits, its deltas are rounded to these, too, and no order of adding up gives its sums.
    repeated = getattr(tensor.draws, "float_sum", None) if getattr(tensor.draws, "working", "F32") == "F32" else None

    def sums() -> dict[int, _Accumulator]:
        return {i: repeated(tensor.size) if repeated else _WideSum() for i in models}

    before, after = sums(), sums()

    def measure(chunk: Chunk) -> None:
        for (i, keep), delta in zip(models.items(), _deltas(chunk, list(models)), strict=True):
            kept = chunk.scratch(0, np.bool_)
            keep(chunk, delta, kept)
            np.abs(delta, out=delta)
            before[i].add(delta)
            np.multiply(delta, kept, out=delta)
            after[i].add(delta)

    if models:
        yield measure
    totals = {i: (before[i].result(), after[i].result()) for i in models}
    return {i: np.float32(a) / np.float32(b) for i, (a, b) in totals.items() if min(a, b) >= 1e-7}


_WHOLE = {
    "normalize": Parameter("bool", default=False, help="divide by the sum of the weights"),
    "lambda": Parameter("float", 1.0, "factor of the summed deltas"),
    "rescale": Parameter(
        "bool", default=False, help="restore the sum of magnitudes that a delta had before it was thinned out"
    ),
    "int8_mask": Parameter(
        "bool", default=False, help="no effect: in mergekit it saves memory and does not change the result"
    ),
}
_MODEL = {
    "weight": Parameter("float", None, "factor of the delta"),
    "density": Parameter("float", 1.0, "share of the delta's elements that stay; task_arithmetic keeps them all"),
}
_GAMMA = {"gamma": Parameter("float", 0.01, "share of the elements, the largest, that is dropped")}
_EPSILON = {"epsilon": Parameter("float", 0.15, "how far the probability goes up and down from `density`")}


def _method(
    program: Callable[[MergeTensor], Program],
    stays: str,
    paper: str,
    more: Mapping[str, Parameter] | None = None,
    *,
    choose: Callable[[MergeTensor], Keeps] | None = None,
    elect: bool = False,
    normalize: bool = False,
    random: bool = False,
    searches: int = 0,
) -> Method:
    formula = f"b + lambda sum w_i {'m_i ' if stays else ''}d_i [/ sum w_i]"
    if elect:
        formula += ", both sums over the models with the sum's sign"
    return Method(
        program.__name__,
        program,
        formula + (f"; m_i: {stays}" if stays else ""),
        f"https://arxiv.org/abs/{paper}",
        per_model={**_MODEL, **(more or {})},
        whole={
            **_WHOLE,
            "normalize": replace(_WHOLE["normalize"], default=normalize),
            "rescale": replace(_WHOLE["rescale"], default=random),
        },
        base="needed",
        rows=more is _EPSILON,
        random=random,
        sorts_with_torch=more is _EPSILON,
        passes=lambda whole, _: searches + int(whole["rescale"]) if stays else 0,
        one_at_a_time=not elect,
        parts=_parts(choose, elect=elect) if choose else None,
    )


_RANKED = "drawn by rank"
_BETWEEN = "neither the largest nor the smallest |d_i|"

METHODS = {
    m.name: m
    for m in (
        _method(task_arithmetic, "", "2212.04089"),
        _method(ties, "the largest |d_i|", "2306.01708", choose=_largest, elect=True, normalize=True, searches=2),
        _method(dare_linear, "drawn", "2311.03099", choose=_drawn, random=True),
        _method(dare_ties, "drawn", "2311.03099", choose=_drawn, elect=True, random=True),
        _method(della, _RANKED, "2406.11617", _EPSILON, choose=_drawn_by_rank, elect=True, normalize=True, random=True),
        _method(della_linear, _RANKED, "2406.11617", _EPSILON, choose=_drawn_by_rank, random=True),
        _method(breadcrumbs, _BETWEEN, "2312.06795", _GAMMA, choose=_between, searches=2),
        _method(breadcrumbs_ties, _BETWEEN, "2312.06795", _GAMMA, choose=_between, elect=True, searches=2),
    )
}
"""The methods by name; parameters and defaults are those of mergekit 0.1.5's registry."""
