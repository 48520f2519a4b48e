"""The merge methods of PaddleFormers and PaddleNLP, in the arithmetic of their ``tensor_type`` "pd".

A base may be given to all of them: t_i = x_i - b, and b is added to the result; without one t_i = x_i. The parameters
have the names of ``merge_config.json``. A method thins each t_i (not at all, by trim, dare or magprune) and then adds
the models up (linear or ties); paddle_slerp does neither. Where its own code works piece by piece (``split_pieces``)
norms and quantiles are those of the pieces; here they are the tensor's.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from math import ceil, floor

import numpy as np

from ckpttool.errors import UsageError
from ckpttool.kernels.merge.base import (
    Array,
    Chunk,
    Combine,
    Contributions,
    MergeTensor,
    Method,
    Parameter,
    Pass,
    Passes,
    Program,
    add_base,
    one_pass,
)
from ckpttool.kernels.merge.order import RankQuery, cuts
from ckpttool.kernels.merge.sphere import deltas, gram, slerp_coefficients, weigh
from ckpttool.kernels.portable import tree_sum

Take = Callable[[Chunk, int], Array]
"""The thinned difference of a model in a chunk, in the model's own buffer."""

Thin = Callable[[MergeTensor], Generator[Pass, None, Take]]
Merge = Callable[[MergeTensor, Take], Combine]

CODE_BITS = 20
"""How many of a magnitude's 31 bits tell ranks apart: the exponent and 12 bits of mantissa."""


def _all(_: MergeTensor) -> Generator[Pass, None, Take]:
    yield from ()
    return lambda chunk, i: chunk.delta(i)


def _trim(tensor: MergeTensor) -> Generator[Pass, None, Take]:
    """Zero where |t| is below its quantile 1 - ``reserve_p``; ``rescale`` restores sum |t| (TIES, arXiv:2306.01708).

    The quantile is interpolated between the order statistics around it, both exact; all elements equal to it stay.
    """
    reserve = _reserve(tensor)
    every = range(len(tensor.models))
    place = (1 - reserve) * max(tensor.size - 1, 0)
    below = floor(place)

    def magnitudes(chunk: Chunk, models: Iterable[int]) -> Iterator[Array]:
        for i in models:
            d = chunk.delta(i)
            yield np.abs(d, out=d)

    ranks = [RankQuery(i, rank) for i in every for rank in (below, ceil(place))]
    found = [float(c.value) for c in (yield from cuts(tensor.size, magnitudes, ranks))]
    limits = [np.float32(lo + (hi - lo) * (place - below)) for lo, hi in zip(found[::2], found[1::2], strict=True)]
    sums = np.zeros((len(every), 2))

    def add_up(chunk: Chunk) -> None:
        for i, m in enumerate(magnitudes(chunk, every)):
            sums[i, 0] += tree_sum(m)
            sums[i, 1] += tree_sum(np.multiply(m, m >= limits[i], out=m))

    if tensor.whole["rescale"]:
        yield add_up
    factors = [np.float32(before / after if min(before, after) >= 1e-8 else 1) for before, after in sums]

    def take(chunk: Chunk, i: int) -> Array:
        d = chunk.delta(i)
        m = np.abs(d, out=chunk.scratch(0))
        np.multiply(d, m >= limits[i], out=d)
        return np.multiply(d, factors[i], out=d)

    return take


def _reserve(tensor: MergeTensor) -> float:
    """``reserve_p``. Raises UsageError when it is no probability."""
    reserve = float(tensor.whole["reserve_p"])
    if not 0 <= reserve <= 1:
        raise UsageError(f"a reserve_p of {reserve} is not in [0, 1]")
    return reserve


def _dare(tensor: MergeTensor) -> Generator[Pass, None, Take]:
    """Keep each element with probability ``reserve_p``; ``rescale`` divides by it (DARE, arXiv:2311.03099)."""
    yield from ()
    reserve = _reserve(tensor)

    def take(chunk: Chunk, i: int) -> Array:
        d = chunk.delta(i)
        keep = chunk.scratch(1, np.bool_)
        tensor.draws.bernoulli(i, chunk.start, reserve, keep)
        np.multiply(d, keep, out=d)
        return np.divide(d, np.float32(reserve), out=d) if tensor.whole["rescale"] and reserve else d

    return take


def _codes(d: Array) -> Array:
    """The leading ``CODE_BITS`` of the elements' magnitudes, which sort as the magnitudes do."""
    np.abs(d, out=d)
    return d.view(np.uint32) >> (31 - CODE_BITS)


def keep_probabilities(counts: Array, reserve: float, epsilon: float) -> Array:
    """Probability that magprune keeps an element of each code: float32, from how many elements have each code.

    reserve + epsilon / 2 - epsilon r / n, r the rank by falling magnitude, 0 for the largest. Elements of one code
    share the mean of their ranks.
    """
    n = max(int(counts.sum()), 1)
    larger = n - np.cumsum(counts)
    rank = larger + (counts - 1) / 2
    keep: Array = (reserve + epsilon / 2 - epsilon / n * rank).astype(np.float32)
    return keep


def _magprune(tensor: MergeTensor) -> Generator[Pass, None, Take]:
    """Drop with p_i = 1 - ``reserve_p`` - ``epsilon`` / 2 + ``epsilon`` r_i / n; ``rescale`` divides by 1 - p_i
    (DELLA, arXiv:2406.11617).

    r_i is the rank of |t_i| in the whole tensor, 0 for the largest. Where a sort gives equal magnitudes different ranks
    by chance, here elements whose magnitudes share their exponent and 12 bits of mantissa share their mean rank. So as
    many elements are expected to stay, bfloat16 values are told apart exactly, no p_i is off by more than epsilon / 2
    times the share of the elements that agree so far, and tables of 4 MB a model (32 MB while one is made) are enough
    for a tensor of any size. Raises UsageError when some p_i would be no probability.
    """
    reserve, epsilon = _reserve(tensor), float(tensor.whole["epsilon"])
    if not epsilon / 2 < reserve <= 1 - epsilon / 2:
        raise UsageError(
            f"a reserve_p of {reserve} with an epsilon of {epsilon} gives probabilities outside (0, 1]",
            hint="reserve_p must lie between epsilon / 2 and 1 - epsilon / 2",
        )
    tables = []
    for i in range(len(tensor.models)):
        counts = np.zeros(1 << CODE_BITS, np.int64)

        def measure(chunk: Chunk, i: int = i, counts: Array = counts) -> None:
            np.add.at(counts, _codes(chunk.delta(i)), 1)

        yield measure
        tables.append(keep_probabilities(counts, reserve, epsilon))

    def take(chunk: Chunk, i: int) -> Array:
        probability = chunk.scratch(0)
        np.take(tables[i], _codes(chunk.delta(i)), out=probability)
        keep = chunk.scratch(1, np.bool_)
        tensor.draws.bernoulli(i, chunk.start, probability, keep)
        d = chunk.delta(i)
        np.multiply(d, keep, out=d)
        return np.divide(d, probability, out=d) if tensor.whole["rescale"] else d

    return take


def _weights(tensor: MergeTensor) -> Array:
    return np.array([p["weight"] for p in tensor.models], np.float64)


def _linear(tensor: MergeTensor, take: Take) -> Combine:
    """sum w_i t_i, over sum w_i with ``normalize``. Raises UsageError for weights that sum to zero."""
    weights = _weights(tensor)
    if tensor.whole["normalize"]:
        if tree_sum(weights) == 0:
            raise UsageError(f"the weights of `{tensor.name}` sum to 0", hint="set `normalize: false`")
        weights /= tree_sum(weights)

    def combine(chunk: Chunk, out: Array) -> None:
        np.multiply(take(chunk, 0), np.float32(weights[0]), out=out)
        for i in range(1, len(weights)):
            t = take(chunk, i)
            np.multiply(t, np.float32(weights[i]), out=t)
            np.add(out, t, out=out)
        add_base(tensor, chunk, out)

    return combine


def _vote(tensor: MergeTensor, weights: Array) -> Callable[[int, Array, Array], None]:
    """The vote of a model's t_i: w_i t_i, or its sign with ``elect_count``."""

    def vote(i: int, t: Array, out: Array) -> None:
        if tensor.whole["elect_count"]:
            np.sign(t, out=out)
        else:
            np.multiply(t, weights[i], out=out)

    return vote


def _parts(thin: Thin, *, elect: bool) -> Callable[[MergeTensor], Generator[Pass, None, Contributions]]:
    """The thinned t_i, whatever they weigh."""

    def parts(tensor: MergeTensor) -> Generator[Pass, None, Contributions]:
        take = yield from thin(tensor)

        def of(chunk: Chunk) -> Iterator[Array]:
            for i in range(len(tensor.models)):
                yield take(chunk, i)

        return Contributions(of, _vote(tensor, _weights(tensor).astype(np.float32)) if elect else None)

    return parts


def _ties(tensor: MergeTensor, take: Take) -> Combine:
    """sum w_i t_i over the t_i of the elected sign; with ``normalize`` over their sum of weights (below 1e-8: 1).

    Elected is the sign of sum w_i t_i, or with ``elect_count`` of sum sign(t_i); 0 counts as +. The sign compared with
    it is that of t_i, even where w_i is negative. Zeros have no sign and are left out.
    """
    weights = _weights(tensor).astype(np.float32)
    vote = _vote(tensor, weights)

    def combine(chunk: Chunk, out: Array) -> None:
        thinned = [take(chunk, i) for i in range(len(weights))]
        term, divisor = chunk.scratch(0), chunk.scratch(1)
        out.fill(0)
        for i, t in enumerate(thinned):
            vote(i, t, term)
            np.add(out, term, out=out)
        positive = out >= 0
        out.fill(0)
        divisor.fill(0)
        for w, t in zip(weights, thinned, strict=True):
            np.multiply(((t > 0) & positive) | ((t < 0) & ~positive), w, out=term)
            np.add(divisor, term, out=divisor)
            np.multiply(term, t, out=term)
            np.add(out, term, out=out)
        if tensor.whole["normalize"]:
            divisor[np.abs(divisor) < 1e-8] = 1
            np.divide(out, divisor, out=out)
        add_base(tensor, chunk, out)

    return combine


def paddle_slerp(tensor: MergeTensor) -> Program:
    """Spherical interpolation from the first t_i to the second, ``slerp_alpha`` of the way; weights have no part in it.

    As ``slerp``, with ``slerp_dot_threshold`` and ``slerp_normalize_eps`` for its two constants.
    """
    vectors = deltas(tensor)
    coefficients = slerp_coefficients(
        (yield from gram(2, vectors)),
        tensor.whole["slerp_alpha"],
        threshold=tensor.whole["slerp_dot_threshold"],
        eps=tensor.whole["slerp_normalize_eps"],
    )

    def combine(chunk: Chunk, out: Array) -> None:
        weigh(vectors(chunk), coefficients, out)
        add_base(tensor, chunk, out)

    return combine


_WEIGHT = {"weight": Parameter("float", 1.0, "share of the model")}
_NORMALIZE = {"normalize": Parameter("bool", default=True, help="divide by the sum of the weights that take part")}
_COUNT = {"elect_count": Parameter("bool", default=False, help="elect signs by number (ties_elect_type count)")}
_THIN = {
    "reserve_p": Parameter("float", 0.7, "share of the elements that is kept"),
    "rescale": Parameter("bool", default=True, help="rescale for the dropped elements"),
}
_PRUNE = _THIN | {"epsilon": Parameter("float", 0.14, "range of the probabilities, from the largest to the smallest")}

_PASSES: dict[Thin, Passes] = {
    _trim: lambda whole, _: 2 + int(whole["rescale"]),
    _magprune: lambda _, models: models,
}


def _method(
    name: str,
    thin: Thin,
    merge: Merge,
    formula: str,
    paper: str,
    whole: dict[str, Parameter],
    *,
    random: bool = False,
) -> Method:
    def program(tensor: MergeTensor) -> Program:
        return merge(tensor, (yield from thin(tensor)))

    program.__name__ = program.__qualname__ = name
    program.__doc__ = f"{merge.__doc__}\n\nof differences thinned so: {thin.__doc__}" if thin.__doc__ else merge.__doc__
    passes = _PASSES.get(thin, lambda _whole, _models: 0)
    return Method(
        name,
        program,
        formula,
        paper,
        per_model=_WEIGHT,
        whole=_NORMALIZE | whole,
        random=random,
        parts=None if thin is _all else _parts(thin, elect=merge is _ties),
        passes=passes,
    )


_SUM = "b + sum w_i t_i / sum w_i"
_ELECTED = "b + sum w_i t_i / sum w_i over the t_i of the elected sign"
_DRAWN = ", t_i kept with reserve_p"
_RANKED = f"{_DRAWN} +- epsilon / 2 by rank"
_TIES, _DARE, _DELLA = (f"https://arxiv.org/abs/{n}" for n in ("2306.01708", "2311.03099", "2406.11617"))

METHODS = {
    m.name: m
    for m in (
        _method("paddle_linear", _all, _linear, _SUM, "", {}),
        _method(
            "paddle_ties", _trim, _ties, f"{_ELECTED}, |t_i| from its quantile 1 - reserve_p on", _TIES, _COUNT | _THIN
        ),
        _method("paddle_dare_linear", _dare, _linear, _SUM + _DRAWN, _DARE, _THIN, random=True),
        _method("paddle_dare_ties", _dare, _ties, _ELECTED + _DRAWN, _DARE, _COUNT | _THIN, random=True),
        _method("paddle_della_linear", _magprune, _linear, _SUM + _RANKED, _DELLA, _PRUNE, random=True),
        _method("paddle_della", _magprune, _ties, _ELECTED + _RANKED, _DELLA, _COUNT | _PRUNE, random=True),
        Method(
            "paddle_slerp",
            paddle_slerp,
            "b + [sin((1-alpha)a) t_1 + sin(alpha a) t_2] / sin(a), a the angle between t_1 and t_2",
            "https://en.wikipedia.org/wiki/Slerp",
            whole={
                "slerp_alpha": Parameter("float", 0.5, "0 is the first model, 1 the second"),
                "slerp_dot_threshold": Parameter("float", 0.9995, "cosine beyond which the way is straight"),
                "slerp_normalize_eps": Parameter("float", 1e-8, "norm up to which a tensor is not normalized"),
            },
            models=(2, 2),
            passes=one_pass,
        ),
    )
}
