"""Methods that pick elements: sce, arcee_fusion, ram, ramplus_tl. All work on differences to a base.

What two of them ask of the sorted tensor is answered exactly, whatever its size.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence

import numpy as np

from ckpttool.kernels.merge.base import (
    Array,
    Chunk,
    Contributions,
    MergeTensor,
    Method,
    Parameter,
    Pass,
    Program,
    one_pass,
)
from ckpttool.kernels.merge.order import RankQuery, Threshold, cuts, kth_values
from ckpttool.kernels.portable import dot, logarithm, softmax, tree_sum


def _spread(count: int) -> Callable[[Chunk], Array]:
    """The variance of the models, element by element, which is that of their differences to a base: float32.

    The models are taken relative to the first, so that equal elements vary by exactly zero and the rest is exact to
    a few units in the last place.
    """

    def variance(chunk: Chunk) -> Array:
        first = chunk.model(0)
        others = [chunk.model(i) for i in range(1, count)]
        mean, total = chunk.scratch(0), chunk.scratch(1)
        mean.fill(0)
        for x in others:
            np.subtract(x, first, out=x)
            np.add(mean, x, out=mean)
        np.divide(mean, count, out=mean)
        np.multiply(mean, mean, out=total)
        for x in others:
            np.subtract(x, mean, out=x)
            np.multiply(x, x, out=x)
            np.add(total, x, out=total)
        return np.divide(total, count, out=total)

    return variance


def sce(tensor: MergeTensor) -> Program:
    """Select, calculate, erase (FuseChat, arXiv:2408.07990).

    Selected are the elements where the d_i = x_i - b differ most between the models: the k = int(``select_topk`` * m)
    largest variances, m the number that are not zero, exactly, and among equal ones the first. The others count as
    zero from here on. e_i is the mean square of d_i, w_i = e_i / sum e (1 / N where that sum is below 1e-6). Elements
    whose sign is not that of sum_i d_i (0 counts as +) are erased, and of those that are left
    y = b + sum w_i d_i / max(sum w_i, 1e-6).
    """
    count = len(tensor.models)
    selected = yield from _selection(tensor)
    if selected is None:
        return _base
    squares = np.zeros(count)

    def weigh(chunk: Chunk) -> None:
        for i, d in enumerate(selected(chunk)):
            squares[i] += dot(d, d, d)

    yield weigh
    energies = squares / max(tensor.size, 1)
    energy = tree_sum(energies)
    weights = (energies / energy if energy >= 1e-6 else np.full(count, 1 / count)).astype(np.float32)

    def combine(chunk: Chunk, out: Array) -> None:
        vectors = selected(chunk)
        divisor, term = chunk.scratch(0), chunk.scratch(1)
        np.copyto(out, vectors[0])
        for d in vectors[1:]:
            np.add(out, d, out=out)
        positive = out >= 0
        out.fill(0)
        divisor.fill(0)
        for w, d in zip(weights, vectors, strict=True):
            np.multiply(((d > 0) & positive) | ((d < 0) & ~positive), w, out=term)
            np.add(divisor, term, out=divisor)
            np.multiply(d, term, out=d)
            np.add(out, d, out=out)
        np.maximum(divisor, 1e-6, out=divisor)
        np.divide(out, divisor, out=out)
        np.add(out, chunk.base(), out=out)

    return combine


def _selection(tensor: MergeTensor) -> Generator[Pass, None, Callable[[Chunk], list[Array]] | None]:
    """A function to the differences of a chunk, zero where ``sce`` does not select them; None if it selects nothing."""
    count = len(tensor.models)
    share = tensor.whole["select_topk"]
    variance = _spread(count)
    cut: Threshold | None = None
    if share < 1:
        nonzero = 0

        def survey(chunk: Chunk) -> None:
            nonlocal nonzero
            nonzero += int(np.count_nonzero(variance(chunk)))

        def variances(chunk: Chunk, _: Sequence[int]) -> Iterator[Array]:
            yield variance(chunk)

        yield survey
        k = int(nonzero * share) if share > 0 else 0
        if k == 0:
            return None
        (cut,) = yield from cuts(tensor.size, variances, [RankQuery(0, tensor.size - k)], first=True)

    def selected(chunk: Chunk) -> list[Array]:
        if cut is None:
            return [chunk.delta(i) for i in range(count)]
        keep = chunk.scratch(2, np.bool_)
        cut.above(variance(chunk), chunk.start, keep, first=True)
        return [np.multiply(d, keep, out=d) for d in (chunk.delta(i) for i in range(count))]

    return selected


def _sce_parts(tensor: MergeTensor) -> Generator[Pass, None, Contributions]:
    selected = yield from _selection(tensor)

    def of(chunk: Chunk) -> Iterator[Array]:
        if selected is not None:
            yield from selected(chunk)
            return
        for i in range(len(tensor.models)):
            nothing = chunk.model(i)
            nothing.fill(0)
            yield nothing

    return Contributions(of, lambda _, part, out: np.copyto(out, part))


def _base(chunk: Chunk, out: Array) -> None:
    np.copyto(out, chunk.base())


_DIVERGING = 32 << 10
"""Elements whose softmax is taken at a time: some float64 arrays of them lie in the second-level cache."""


def _divergence(model: Array, base: Array) -> Array:
    """sum p ln(p / q) of each row, with p and q the rows' softmax plus 1e-8: float32 ``(rows, 1)``.

    Taken in float64: rows of weights are so much alike that in float32 the sum is mostly rounding errors.
    """
    p, q = softmax(model), softmax(base)
    p += 1e-8
    q += 1e-8
    p *= logarithm(np.divide(p, q, out=q))
    divergence: Array = tree_sum(p.T)[:, None].astype(np.float32)
    return divergence


def arcee_fusion(tensor: MergeTensor) -> Program:
    """The model's element where it matters, else the base's (Arcee Fusion, arcee.ai).

    An element matters by |x - b| KL(softmax(row of x) + 1e-8 || softmax(row of b) + 1e-8), and it is taken from the
    threshold median + 1.5 (q3 - q1) on, where the quartiles are the elements floor(q (n - 1)) of all n in order.
    They are exact; mergekit estimates them from a million random elements where a tensor has more.
    One float32 is kept for each row.
    """
    if not tensor.size:
        return _base
    taken = yield from _fused(tensor)

    def combine(chunk: Chunk, out: Array) -> None:
        np.add(taken(chunk), chunk.base(), out=out)

    return combine


def _fused(tensor: MergeTensor) -> Generator[Pass, None, Callable[[Chunk], Array]]:
    """A function to the difference of a chunk, zero where ``arcee_fusion`` does not take it."""
    columns = tensor.columns
    divergences = np.empty((tensor.size // columns, 1), np.float32)
    together = max(1, _DIVERGING // columns)

    def survey(chunk: Chunk) -> None:
        model, base = chunk.model(0).reshape(-1, columns), chunk.base().reshape(-1, columns)
        found = divergences[chunk.start // columns : chunk.stop // columns]
        for at in range(0, len(found), together):
            rows = slice(at, at + together)
            found[rows] = _divergence(model[rows], base[rows])

    def importance(chunk: Chunk) -> Array:
        d = chunk.delta(0)
        np.abs(d, out=d)
        rows = d.reshape(-1, columns)
        np.multiply(rows, divergences[chunk.start // columns : chunk.stop // columns], out=rows)
        return d

    yield survey
    quartiles = yield from kth_values(tensor.size, importance, [(tensor.size - 1) * q // 4 for q in (1, 2, 3)])
    q1, median, q3 = np.array(quartiles, np.float32)
    threshold = median + np.float32(1.5) * (q3 - q1)

    def taken(chunk: Chunk) -> Array:
        keep = importance(chunk) >= threshold
        d = chunk.delta(0)
        np.multiply(d, keep, out=d)
        return d

    return taken


def _fused_parts(tensor: MergeTensor) -> Generator[Pass, None, Contributions]:
    taken = yield from _fused(tensor)

    def of(chunk: Chunk) -> Iterator[Array]:
        yield taken(chunk)

    return Contributions(of)


def _changed(tensor: MergeTensor, chunk: Chunk) -> tuple[list[Array], list[Array], Array]:
    """The differences, where each is more than ``epsilon``, and in how many models that is so."""
    deltas = [chunk.delta(i) for i in range(len(tensor.models))]
    changed: list[Array] = [np.abs(d) > tensor.whole["epsilon"] for d in deltas]
    models: Array = np.add.reduce(changed, axis=0, dtype=np.float32)
    return deltas, changed, models


def _ram(tensor: MergeTensor, factors: Sequence[np.float32]) -> Callable[[Chunk, Array], None]:
    """Add to the base what one model alone changes, times the model's factor, and the mean of what several change."""

    def combine(chunk: Chunk, out: Array) -> None:
        deltas, changed, models = _changed(tensor, chunk)
        alone, term = models == 1, chunk.scratch(0)
        np.maximum(models, 1, out=models)
        out.fill(0)
        for factor, d, mask in zip(factors, deltas, changed, strict=True):
            np.multiply(d, mask, out=d)
            np.divide(d, models, out=term)
            np.multiply(d, factor, out=term, where=alone)
            np.add(out, term, out=out)
        np.add(out, chunk.base(), out=out)

    return combine


def ram(tensor: MergeTensor) -> Program:
    """Reinforced Agent Merging (arXiv:2601.13572): y = b + sum_i m_i d_i / max(1, sum_i m_i), m_i 1 or 0.

    m_i is 1 where |d_i| > ``epsilon``: what one model changes is added whole, what several change is averaged.
    """
    yield from ()
    return _ram(tensor, [np.float32(1)] * len(tensor.models))


def _ram_parts(tensor: MergeTensor) -> Generator[Pass, None, Contributions]:
    yield from ()

    def of(chunk: Chunk) -> Iterator[Array]:
        deltas, changed, _ = _changed(tensor, chunk)
        for d, mask in zip(deltas, changed, strict=True):
            yield np.multiply(d, mask, out=d)

    return Contributions(of)


def ramplus_tl(tensor: MergeTensor) -> Program:
    """RAM with stronger unique changes, tensor by tensor (arXiv:2601.13572).

    What model i alone changes is multiplied by 1 + r min(alpha, s_i / u_i): u_i elements of the tensor are changed by
    it alone and s_i by it and others.
    """
    count = len(tensor.models)
    shared, alone = np.zeros(count), np.zeros(count)

    def measure(chunk: Chunk) -> None:
        _, changed, models = _changed(tensor, chunk)
        unique = models == 1
        for i, mask in enumerate(changed):
            single = np.count_nonzero(mask & unique)
            alone[i] += single
            shared[i] += np.count_nonzero(mask) - single

    yield measure
    ratio = shared / np.maximum(alone, tensor.whole["epsilon"])
    return _ram(tensor, list((1 + tensor.whole["r"] * np.clip(ratio, 0, tensor.whole["alpha"])).astype(np.float32)))


_EPSILON = Parameter("float", 1e-5, "a difference up to this counts as 0")

METHODS = {
    m.name: m
    for m in (
        Method(
            "sce",
            sce,
            "b + sum w_i d_i / sum w_i over the d_i of the elected sign, w_i their mean squares",
            "https://arxiv.org/abs/2408.07990",
            whole={
                "select_topk": Parameter("float", 1.0, "share of the elements, by variance, that are merged"),
                "int8_mask": Parameter("bool", default=False, help="no effect: masks are always small"),
            },
            base="needed",
            parts=_sce_parts,
            passes=lambda whole, _: 4 if whole["select_topk"] < 1 else 1,
        ),
        Method(
            "arcee_fusion",
            arcee_fusion,
            "x where |x - b| KL(x || b) >= median + 1.5 IQR, else b",
            "https://arcee.ai",
            base="needed",
            models=(1, 1),
            rows=True,
            parts=_fused_parts,
            passes=lambda _whole, _models: 3,
        ),
        Method(
            "ram",
            ram,
            "b + sum m_i d_i / max(1, sum m_i), m_i = |d_i| > epsilon",
            "https://arxiv.org/abs/2601.13572",
            whole={"epsilon": _EPSILON},
            base="needed",
            parts=_ram_parts,
        ),
        Method(
            "ramplus_tl",
            ramplus_tl,
            "ram, with what only model i changes times 1 + r min(alpha, s_i / u_i)",
            "https://arxiv.org/abs/2601.13572",
            whole={
                "r": Parameter("float", 0.1, "strength of the factor"),
                "alpha": Parameter("float", 0.2, "upper limit of s_i / u_i"),
                "epsilon": _EPSILON,
            },
            base="needed",
            parts=_ram_parts,
            passes=one_pass,
        ),
    )
}
