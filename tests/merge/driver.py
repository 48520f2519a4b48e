"""Runs a merge method's program over arrays in memory, the way the executor runs it over files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ckpttool.kernels.merge.base import CHUNK, Array, Combine, Draws, MergeTensor, Method, Program

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class ArrayChunk:
    """A chunk of arrays in memory."""

    def __init__(self, start: int, stop: int, base: Array | None, models: Sequence[Array]) -> None:
        self.start, self.stop = start, stop
        self._base, self._models = base, models

    def model(self, i: int) -> Array:
        return self._models[i][self.start : self.stop].astype(np.float32)

    def base(self) -> Array:
        assert self._base is not None, "the method asked for a base that it does not have"
        return self._base[self.start : self.stop].astype(np.float32)

    def delta(self, i: int) -> Array:
        return self.model(i) if self._base is None else self.model(i) - self.base()

    def scratch(self, i: int, dtype: Any = np.float32) -> Array:
        return np.full(self.stop - self.start, 99, dtype)  # not zero: nobody may count on what is in there


class NoDraws:
    """For methods that draw nothing."""

    def bernoulli(self, model: int, start: int, probability: float | Array, out: Array) -> None:
        raise AssertionError("a method that is not random has drawn")


def run_method(
    method: Method,
    models: Sequence[Array],
    base: Array | None = None,
    *,
    per_model: Sequence[Mapping[str, Any]] = (),
    whole: Mapping[str, Any] | None = None,
    draws: Draws | None = None,
    name: str = "model.layers.0.mlp.up_proj.weight",
    base_at: int | None = None,
    chunk: int = CHUNK,
) -> Array:
    """The float32 result. ``per_model`` and ``whole`` may leave out what has a default."""
    shape = models[0].shape
    columns = shape[-1] if shape else 1
    step = max(chunk // columns, 1) * columns if method.rows else chunk

    def complete(schema: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        return {k: given.get(k, p.default) for k, p in schema.items()}

    tensor = MergeTensor(
        name,
        tuple(shape),
        tuple(complete(method.per_model, per_model[i] if per_model else {}) for i in range(len(models))),
        complete(method.whole, whole or {}),
        base is not None,
        draws or NoDraws(),
        base_at,
    )
    flat = [np.ascontiguousarray(m).reshape(-1) for m in models]
    flat_base = None if base is None else np.ascontiguousarray(base).reshape(-1)
    n = tensor.size
    out = np.empty(n, np.float32)

    def chunks() -> list[ArrayChunk]:
        return [ArrayChunk(a, min(a + step, n), flat_base, flat) for a in range(0, n, step)]

    def finish(program: Program) -> Combine:
        """Let every pass see all chunks; return what writes the result."""
        while True:
            try:
                see = next(program)
            except StopIteration as done:
                combine: Combine = done.value
                return combine
            for c in chunks():
                see(c)

    combine = finish(method.program(tensor))
    for c in chunks():
        combine(c, out[c.start : c.stop])
    return out.reshape(shape)
