"""Methods that follow the sphere: slerp, nuslerp, multislerp, karcher, and model_stock, which needs the same angles.

All of them are linear combinations of their inputs, and their coefficients follow from the inputs' dot products alone.
So each takes one pass that measures the Gram matrix, however often it iterates, and one that combines. Where every row
is a vector by itself, a chunk holds whole rows, and even the measuring pass goes.

Dot products, and all else that the coefficients are made of, are those of ``kernels.portable``, so that another
processor gets the same coefficients. Against float64 all the way a norm was off by at most 3e-8 of itself and a cosine
by 9e-8, which is what float32 resolves; from a million elements on both are below 8e-9. Squares of elements below
1e-19 vanish.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence

import numpy as np

from ckpttool.errors import UsageError
from ckpttool.kernels.merge.base import (
    Array,
    Chunk,
    MergeTensor,
    Method,
    Parameter,
    Pass,
    Program,
    add_base,
    one_pass,
)
from ckpttool.kernels.portable import arccosine, dot, row_dots, sine_cosine, tree_sum

Vectors = Callable[[Chunk], Sequence[Array]]


def gram(count: int, vectors: Vectors) -> Generator[Pass, None, Array]:
    """Measure all dot products of ``count`` vectors in one pass: float64 ``(count, count)``."""
    products = np.zeros((count, count))

    def measure(chunk: Chunk) -> None:
        v = vectors(chunk)
        work = chunk.scratch(0)
        for i in range(count):
            for j in range(i, count):
                products[i, j] += dot(v[i], v[j], work)

    yield measure
    return np.triu(products) + np.triu(products, 1).T


def weigh(vectors: Sequence[Array], coefficients: Sequence[Array] | Array, out: Array) -> None:
    """Write ``sum_i coefficients[i] vectors[i]`` into ``out``, in float32. The vectors are overwritten."""
    np.multiply(vectors[0], np.float32(coefficients[0]), out=out)
    for v, c in zip(vectors[1:], coefficients[1:], strict=True):
        np.multiply(v, np.float32(c), out=v)
        np.add(out, v, out=out)


def deltas(tensor: MergeTensor) -> Vectors:
    """The models of a chunk, each less the base if there is one."""
    return lambda chunk: [chunk.delta(i) for i in range(len(tensor.models))]


def _flat(tensor: MergeTensor, coefficients: Sequence[Array] | Array) -> Callable[[Chunk, Array], None]:
    """The combining pass of a method with one coefficient per model."""
    vectors = deltas(tensor)

    def combine(chunk: Chunk, out: Array) -> None:
        weigh(vectors(chunk), coefficients, out)
        add_base(tensor, chunk, out)

    return combine


def _copy(chunk: Chunk, out: Array) -> None:
    np.copyto(out, chunk.model(0))


def arc(cosine: Array, straight: Array, t: float) -> tuple[Array, Array]:
    """Coefficients of the two ends at ``t`` of the way along the arc between them; along the line where ``straight``.

    sin((1 - t) theta) / sin(theta) and sin(t theta) / sin(theta), or 1 - t and t.
    """
    theta = arccosine(np.where(straight, 0, cosine))
    whole, first, second = (sine_cosine(share * theta)[0] for share in (1, 1 - t, t))
    return np.where(straight, 1 - t, first / whole), np.where(straight, t, second / whole)


def slerp_coefficients(products: Array, t: float, *, threshold: float = 0.9995, eps: float = 1e-8) -> list[Array]:
    """Slerp's coefficients of the two vectors of a 2 x 2 Gram matrix.

    A vector no longer than ``eps`` is not normalized. Beyond a cosine of ``threshold``, in either direction, the arc
    is too flat to divide by its sine, and the way goes along the line.
    """
    norms = np.sqrt(np.diag(products))
    norms = np.where(norms > eps, norms, 1)
    cosine = np.clip(products[0, 1] / norms[0] / norms[1], -1, 1)
    return list(arc(cosine, np.abs(cosine) > threshold, t))


def slerp(tensor: MergeTensor) -> Program:
    """Spherical linear interpolation from the base, t = 0, to the model, t = 1 (Shoemake 1985).

    y = [sin((1 - t) theta) b + sin(t theta) x] / sin(theta), theta the angle between the flattened tensors;
    y = (1 - t) b + t x where |cos(theta)| > 0.9995.
    """

    def ends(chunk: Chunk) -> Sequence[Array]:
        return chunk.base(), chunk.model(0)

    products = yield from gram(2, ends)
    coefficients = slerp_coefficients(products, tensor.whole["t"])

    def combine(chunk: Chunk, out: Array) -> None:
        weigh(ends(chunk), coefficients, out)

    return combine


def nuslerp_coefficients(aa: Array, bb: Array, ab: Array, t: float) -> tuple[Array, Array]:
    """Nuslerp's coefficients of two vectors with these dot products, element by element.

    The line is taken where the squared sine is at most 1e-6. Of small angles float32 shows no difference, and of
    opposite vectors the arc would be their rounding errors, times a thousand and more (mergekit: 1e-16, and those).
    """
    cosine = np.clip(ab / np.maximum(np.sqrt(aa), 1e-7) / np.maximum(np.sqrt(bb), 1e-7), -1, 1)
    return arc(cosine, 1 - cosine * cosine <= 1e-6, t)


def _turns(start: int, stop: int, period: int) -> Iterator[tuple[slice, slice]]:
    """Cut ``[start, stop)`` into stretches that repeat one part of the period: (in the stretch, in the period).

    At most three: up to the next turn, whole turns, and the rest.
    """
    at = start
    while at < stop:
        place = at % period
        length = min(period - place, stop - at)
        if place == 0 and stop - at >= period:
            yield slice(at - start, at - start + (stop - at) // period * period), slice(0, period)
            at += (stop - at) // period * period
        else:
            yield slice(at - start, at - start + length), slice(place, place + length)
            at += length


def nuslerp(tensor: MergeTensor) -> Program:
    """Slerp of two models by weight, of the tensors or of their differences to a base (mergekit).

    t = w_2 / (w_1 + w_2), or 1/2 for weights that cancel. ``nuslerp_flatten`` takes the tensor as one vector; else
    each row along the last axis is a vector, or with ``nuslerp_row_wise`` (mergekit's word) each run along the first
    axis. y = b + slerp(x_1 - b, x_2 - b). The runs along the first axis keep three float64 for each of them.
    """
    first, second = (p["weight"] for p in tensor.models)
    total = first + second
    t = second / total if abs(total) >= 1e-6 else 0.5
    vectors = deltas(tensor)
    if tensor.whole["nuslerp_flatten"]:
        products = yield from gram(2, vectors)
        return _flat(tensor, nuslerp_coefficients(products[0, 0], products[1, 1], products[0, 1], t))

    if tensor.whole["nuslerp_row_wise"] and len(tensor.shape) > 1:
        period = max(tensor.size // max(tensor.shape[0], 1), 1)
        sums = np.zeros((3, period))

        def measure(chunk: Chunk) -> None:
            a, b = vectors(chunk)
            product = chunk.scratch(0)
            for found, x, y in zip(sums, (a, b, a), (a, b, b), strict=True):
                np.multiply(x, y, out=product)
                for part, place in _turns(chunk.start, chunk.stop, period):
                    found[place] += tree_sum(product[part].reshape(-1, place.stop - place.start))

        yield measure
        ends = [c.astype(np.float32) for c in nuslerp_coefficients(sums[0], sums[1], sums[2], t)]

        def combine(chunk: Chunk, out: Array) -> None:
            pair = vectors(chunk)
            for part, place in _turns(chunk.start, chunk.stop, period):
                shape = (-1, place.stop - place.start)
                weigh([v[part].reshape(shape) for v in pair], [c[place] for c in ends], out[part].reshape(shape))
            add_base(tensor, chunk, out)

        return combine

    def combine_rows(chunk: Chunk, out: Array) -> None:
        a, b = (v.reshape(-1, tensor.columns) for v in vectors(chunk))
        work = chunk.scratch(0).reshape(a.shape)
        ends = nuslerp_coefficients(row_dots(a, a, work), row_dots(b, b, work), row_dots(a, b, work), t)
        weigh((a, b), [c.astype(np.float32) for c in ends], out.reshape(a.shape))
        add_base(tensor, chunk, out)

    return combine_rows


def multislerp_coefficients(products: Array, weights: Array, eps: float = 1e-8) -> Array | None:
    """Multislerp's coefficient of each vector; None where the weighted unit vectors cancel.

    With u_i = x_i / (|x_i| + eps), the mean m = sum w_i u_i is normalized to e = m / |m|, and the u_i are laid into
    the plane that touches the sphere there: tau = sum w_i (u_i - <u_i, e> e) = m - <m, e> e = 0. The plane's mean is
    always the point where it touches, and the exponential map leads from there to cos(|tau| + eps) e: the result is e
    times the weighted norms. (mergekit's float32 carries out the detour, and gets e but for rounding.)
    """
    norms = np.sqrt(np.diag(products))
    shares = weights / (norms + eps)
    squared = tree_sum(tree_sum(shares[:, None] * products) * shares)
    size = tree_sum(np.abs(weights))
    if squared <= 1e-12 * size * size:  # measured products tell nothing smaller from zero
        return None
    mean: Array = shares * (tree_sum(weights * norms) / np.sqrt(squared) * sine_cosine(eps)[1])
    return mean


def multislerp(tensor: MergeTensor) -> Program:
    """Weighted mean of directions, times the weighted mean of norms (goddard.blog, "multislerp, wow what a cool idea").

    y = b + (sum w_i |d_i|) m / |m| with m = sum w_i d_i / (|d_i| + eps) and d_i = x_i - b, or x_i without a base.
    Two vectors that cancel are interpolated along the line; so are vectors that are all zero, where mergekit stops.
    Raises UsageError when more vectors cancel, or when weights to normalize sum to zero.
    """
    count = len(tensor.models)
    if count == 1:
        return _copy
    weights = np.array([p["weight"] for p in tensor.models], np.float64)
    if tensor.whole["normalize_weights"]:
        if tree_sum(weights) == 0:
            raise UsageError(f"the weights of `{tensor.name}` sum to 0", hint="set `normalize_weights: false`")
        weights /= tree_sum(weights)
    products = yield from gram(count, deltas(tensor))
    coefficients = multislerp_coefficients(products, weights, tensor.whole["eps"])
    if coefficients is None:
        if count > 2 and products.any():
            raise UsageError(
                f"the models' directions in `{tensor.name}` cancel, so that their mean has none",
                hint="change the weights, or omit a model",
            )
        coefficients = weights
    return _flat(tensor, coefficients)


def karcher_coefficients(products: Array, max_iter: int = 10, tol: float = 1e-5) -> Array:
    """The Karcher mean's coefficient of each vector: the iteration, with every point written in the unit vectors u_i.

    A point is its row of coefficients c, <point, u_i> is (R c)_i and |point|^2 is c R c, R the Gram matrix of the u_i.
    Vectors no longer than ``tol`` have no direction and add only to the mean norm. A direction opposite to the mean
    has no shortest way to it and gives no pull (mergekit: rounding errors times 1e7 or more).
    """
    norms = np.sqrt(np.diag(products))
    valid = norms > tol
    if not valid.any():
        return np.zeros(len(norms))
    lengths = norms[valid]
    cosines = products[np.ix_(valid, valid)] / lengths[:, None] / lengths
    alpha = 1 / len(lengths)

    def length(c: Array) -> float:
        return float(np.sqrt(max(tree_sum(tree_sum(c[:, None] * cosines) * c), 0)))

    point = np.full(len(lengths), alpha)
    norm = length(point)
    point = point / norm if norm >= tol else np.eye(len(lengths))[0]
    for _ in range(max_iter):
        toward = np.clip(tree_sum(cosines * point[:, None]), -1, 1)
        theta = arccosine(toward)
        bent = (theta >= tol) & (theta <= np.pi - tol)
        pull = np.where(bent, alpha * theta / np.where(bent, sine_cosine(theta)[0], 1), 0)
        tangent = pull - tree_sum(pull * toward) * point
        step = length(tangent)
        if step < tol:
            break
        sine, cosine = sine_cosine(step)
        point = cosine * point + sine / step * tangent
        norm = length(point)
        if norm > tol:
            point /= norm
    out = np.zeros(len(norms))
    out[valid] = tree_sum(norms) / len(norms) * point / lengths
    return out


def karcher(tensor: MergeTensor) -> Program:
    """Karcher mean of the models' directions, times their mean norm (arXiv:2603.04972), all models alike.

    The point m of the unit sphere with sum_i log_m(u_i) = 0, u_i = x_i / |x_i|, by at most ``max_iter`` steps along
    the mean of the logarithms, until one is shorter than ``tol``; y = m sum |x_i| / N.
    """
    count = len(tensor.models)
    if count == 1:
        return _copy
    products = yield from gram(count, deltas(tensor))
    return _flat(tensor, karcher_coefficients(products, tensor.whole["max_iter"], tensor.whole["tol"]))


def stock_ratio(products: Array) -> Array:
    """Fraction of the way from the base to the mean in model_stock, from ``(n, n, ...)`` dot products of the n
    differences.

    t = n c / (1 + (n - 1) c), c the mean cosine over all pairs; 0 where the divisor vanishes and t is not defined.
    """
    count = len(products)
    each = np.arange(count)
    norms = np.sqrt(products[each, each])
    pairs = [
        np.clip(products[i, j] / np.maximum(norms[i] * norms[j], 1e-6), -1, 1)
        for i in range(count)
        for j in range(i + 1, count)
    ]
    cosine = tree_sum(np.array(pairs)) / len(pairs)
    divisor = 1 + (count - 1) * cosine
    singular = np.abs(divisor) < 1e-6
    ratio: Array = np.where(singular, 0, count * cosine / np.where(singular, 1, divisor)).astype(np.float32)
    return ratio


def model_stock(tensor: MergeTensor) -> Program:
    """The point between base and mean of the models that is nearest to their center (arXiv:2403.19522).

    y = t mean_i(x_i) + (1 - t) b, t = n c / (1 + (n - 1) c), c the mean cosine between the differences x_i - b,
    of the whole tensor or with ``filter_wise`` of each row.
    """
    count = len(tensor.models)
    vectors = deltas(tensor)
    by_row = tensor.whole["filter_wise"]
    whole = None if by_row else stock_ratio((yield from gram(count, vectors)))

    def ratio_of_rows(chunk: Chunk) -> Array:
        rows = [v.reshape(-1, tensor.columns) for v in vectors(chunk)]
        work = chunk.scratch(0).reshape(rows[0].shape)
        products = np.zeros((count, count, len(rows[0]), 1))
        for i in range(count):
            for j in range(i, count):
                products[i, j] = row_dots(rows[i], rows[j], work)
        return stock_ratio(products)

    def combine(chunk: Chunk, out: Array) -> None:
        t = ratio_of_rows(chunk) if whole is None else whole
        np.copyto(out, chunk.model(0))
        for i in range(1, count):
            np.add(out, chunk.model(i), out=out)
        np.divide(out, count, out=out)
        base = chunk.base()
        shape = (-1, tensor.columns) if by_row else out.shape
        weigh((out.reshape(shape), base.reshape(shape)), (t, 1 - t), out.reshape(shape))

    return combine


METHODS = {
    m.name: m
    for m in (
        Method(
            "slerp",
            slerp,
            "[sin((1-t)a) b + sin(t a) x] / sin(a), a the angle between b and x",
            "https://en.wikipedia.org/wiki/Slerp",
            whole={"t": Parameter("float", None, "0 is the base, 1 the other model")},
            base="needed",
            models=(1, 1),
            passes=one_pass,
        ),
        Method(
            "nuslerp",
            nuslerp,
            "slerp of two models [of x_i - b], t = w_2 / (w_1 + w_2)",
            per_model={"weight": Parameter("float", None, "share of the model")},
            whole={
                "nuslerp_flatten": Parameter("bool", default=True, help="the tensor is one vector"),
                "nuslerp_row_wise": Parameter("bool", default=False, help="else: along the first axis, not the last"),
            },
            models=(2, 2),
            rows=True,
            passes=lambda whole, _: int(whole["nuslerp_flatten"] or whole["nuslerp_row_wise"]),
        ),
        Method(
            "multislerp",
            multislerp,
            "b + sum w_i |d_i| * m / |m|, m = sum w_i d_i / |d_i|",
            "https://goddard.blog/posts/multislerp-wow-what-a-cool-idea",
            per_model={"weight": Parameter("float", None, "share of the model")},
            whole={
                "normalize_weights": Parameter("bool", default=True, help="divide the weights by their sum"),
                "eps": Parameter("float", 1e-8, "added to each norm"),
            },
            passes=one_pass,
        ),
        Method(
            "karcher",
            karcher,
            "the Karcher mean of x_i / |x_i|, times the mean of |x_i|",
            "https://arxiv.org/abs/2603.04972",
            whole={
                "max_iter": Parameter("int", 10, "most steps"),
                "tol": Parameter("float", 1e-5, "a step, angle or norm below this counts as 0"),
            },
            base="refused",
            passes=one_pass,
        ),
        Method(
            "model_stock",
            model_stock,
            "t mean(x_i) + (1 - t) b, t = n c / (1 + (n - 1) c), c the mean cosine of x_i - b",
            "https://arxiv.org/abs/2403.19522",
            whole={"filter_wise": Parameter("bool", default=False, help="an angle for each row")},
            base="needed",
            models=(2, None),
            rows=True,
            passes=lambda whole, _: int(not whole["filter_wise"]),
        ),
    )
}
