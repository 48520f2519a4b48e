"""Random numbers of a tensor's elements: one kind of its own, and one that repeats mergekit's.

``CounterDraws`` gives an element draws that depend on the seed, the tensor's name, the model and the element's place
alone: tensors may be worked out in any order and number. ``MergekitDraws`` are stretches of the one stream that
mergekit 0.1.5 draws from, so that the masks of its seeded runs come out again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate
from typing import Any, Literal

import ml_dtypes
import numpy as np
import xxhash

from ckpttool.errors import not_installed
from ckpttool.kernels.merge.base import Array
from ckpttool.kernels.merge.cascade import CascadeSum

Working = Literal["F32", "F16", "BF16"]
"""Dtype that mergekit computes in: its ``dtype:``, or else the common dtype of a tensor's operands."""


def rounded(values: float | Array, working: str) -> Any:
    """float32 values, rounded as mergekit's sparsification does: to BF16 when it works in that, else not at all."""
    wide = np.asarray(values, np.float32)
    return wide.astype(ml_dtypes.bfloat16).astype(np.float32) if working == "BF16" else wide


def require_torch(method: str) -> None:
    """Raise UsageError if torch, with which ``MergekitDraws.order`` sorts, is not installed. It is not imported."""
    if find_spec("torch") is None:
        raise not_installed(f"--method {method} with --rng mergekit", "torch", "torch")


class CounterDraws:
    """Draws that any element can be asked for without those before it.

    An element has one byte of the stream of a PCG64DXSM generator, whose state and increment are hashes (XXH3, 128
    bits) of seed, model and tensor name. The byte is compared with the first 8 bits of the probability; where it equals
    them, once in 256 elements, 53 more bits decide: a hash of the element's place (SplitMix64). P(True) is therefore
    the probability asked for within 2^-60.
    """

    working: Working = "F32"

    def __init__(self, seed: int, tensor: str) -> None:
        self._seed, self._tensor = seed, tensor
        self._bits = np.random.PCG64DXSM(0)
        self._keys: dict[int, tuple[int, int]] = {}

    def bernoulli(self, model: int, start: int, probability: float | Array, out: Array) -> None:
        """See ``ckpttool.kernels.merge.base.Draws``."""
        state, increment = self._key(model)
        self._bits.state = {
            "bit_generator": "PCG64DXSM",
            "state": {"state": state, "inc": increment},
            "has_uint32": 0,
            "uinteger": 0,
        }
        self._bits.advance(start // 8)
        skip = start % 8
        words = self._bits.random_raw((skip + len(out) + 7) // 8).astype("<u8", copy=False)
        lanes = words.view(np.uint8)[skip : skip + len(out)]
        if isinstance(probability, np.ndarray):
            scaled = probability.astype(np.float32, copy=False) * np.float32(256)
            whole = np.minimum(scaled, 255).astype(np.uint8)
            np.less(lanes, whole, out=out)
            at = np.flatnonzero(lanes == whole)
            rest = scaled[at] - whole[at]
        else:
            rest = probability * 256 - (byte := min(int(probability * 256), 255))
            np.less(lanes, byte, out=out)
            at = np.flatnonzero(lanes == byte) if rest else np.empty(0, np.intp)
        out[at] = _uniform(at + start, state & 0xFFFFFFFFFFFFFFFF) < rest

    def _key(self, model: int) -> tuple[int, int]:
        if model not in self._keys:
            state, increment = (
                xxhash.xxh3_128_intdigest(f"{self._seed} {model} {part} {self._tensor}".encode())
                for part in ("state", "increment")
            )
            self._keys[model] = state, increment | 1
        return self._keys[model]


def _uniform(places: Array, key: int) -> Array:
    """Numbers in [0, 1), multiples of 2^-53: SplitMix64 (Steele et al., OOPSLA 2014) from the state ``key``."""
    z = (places.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    uniform: Array = (z >> np.uint64(11)) * 2.0**-53
    return uniform


@dataclass(frozen=True, slots=True)
class DrawnTensor:
    """A tensor of a merge and who draws for it."""

    name: str
    size: int
    """Elements."""
    models: Sequence[bool]
    """Whether each model draws, the base not counted, in the recipe's order; see ``sparse.drawing``."""
    working: Working = "F32"


def mergekit_draws(seed: int, tensors: Iterable[DrawnTensor]) -> Callable[[str], MergekitDraws]:
    """A function from a tensor's name to its draws in a merge that mergekit 0.1.5 would run with ``--random-seed
    seed``.

    mergekit seeds torch's CPU generator once and takes the tensors one by one, for each the models in the recipe's
    order, for each as many numbers as elements. ``tensors`` are all tensors of the output in mergekit's order: that of
    the names in the models, as strings (``layers.10`` before ``layers.2``). Nothing is drawn before it is asked for.
    """
    places: dict[str, tuple[list[int], Working]] = {}
    start = 0
    for t in tensors:
        starts = list(accumulate((t.size if draws else 0 for draws in t.models), initial=start))
        start = starts.pop()
        places[t.name] = starts, t.working
    stream = _TorchGenerator(seed, max(start // _SAVED, 1 << 20))

    def draws(name: str) -> MergekitDraws:
        return MergekitDraws(stream, *places[name])

    return draws


_SAVED = 512
"""States of the generator kept on the way through the stream, 2.5 KB each."""


class _TorchGenerator:
    """torch's CPU generator: MT19937 (Matsumoto and Nishimura 1998), seeded as in the authors' 2002 code.

    numpy's legacy seeding is that code, and torch's ``mt19937`` too. The generator only steps forwards, 2.6 ns a
    number; states saved on the way serve who asks for tensors in another order.
    """

    def __init__(self, seed: int, spacing: int) -> None:
        first = np.random.MT19937()
        first._legacy_seeding(seed & 0xFFFFFFFF)  # noqa: SLF001  # torch cuts it, too
        self._spacing = spacing
        self._places = [0]
        self._states: list[Any] = [first.state]

    def at(self, place: int) -> np.random.MT19937:
        """A generator whose next number is number ``place`` of the stream."""
        generator = np.random.MT19937()
        nearest = bisect_right(self._places, place) - 1
        generator.state = self._states[nearest]
        now = self._places[nearest]
        while place - now > self._spacing:
            generator.random_raw(self._spacing, output=False)
            now += self._spacing
            self._places.append(now)
            self._states.append(generator.state)
        generator.random_raw(place - now, output=False)
        return generator


class MergekitDraws:
    """The stretches of mergekit's stream that one tensor's models draw from.

    ``torch.bernoulli`` of a tensor of probabilities (float32 or bfloat16, torch 2.13) takes one 32-bit number for each
    element, in row-major order, and gives True where its low 24 bits, as a fraction, are less than the probability.
    Working in BF16, the probability itself is rounded to that: 0.7 is 0.69921875.

    Chunks asked for in ascending order cost their own draws; going back to the first one is free.
    """

    def __init__(self, stream: _TorchGenerator, starts: Sequence[int], working: Working = "F32") -> None:
        self.working = working
        self._stream, self._starts = stream, starts
        self._first: dict[int, Any] = {}
        self._now: dict[int, tuple[int, np.random.Generator]] = {}

    def bernoulli(self, model: int, start: int, probability: float | Array, out: Array) -> None:
        """See ``ckpttool.kernels.merge.base.Draws``."""
        place, generator = self._now.get(model) or (start + 1, self._open(model))
        if place > start:
            place, generator.bit_generator.state = 0, self._first[model]
        generator.bit_generator.random_raw(start - place, output=False)
        numbers = generator.integers(0, 1 << 32, len(out), np.uint32)
        self._now[model] = start + len(out), generator
        np.bitwise_and(numbers, 0xFFFFFF, out=numbers)
        np.less(numbers * np.float32(2**-24), rounded(probability, self.working), out=out)

    def order(self, rows: Array) -> Array:
        """Columns of each row by rising value, equal ones as torch's unstable sort leaves them on this machine."""
        import torch

        torch.set_num_threads(1)
        found: Array = torch.from_numpy(rows).argsort(dim=1).numpy()
        return found

    def float_sum(self, size: int) -> CascadeSum:
        """A sum of ``size`` float32 values that comes out as torch's does."""
        return CascadeSum(size)

    def _open(self, model: int) -> np.random.Generator:
        bits = self._stream.at(self._starts[model])
        self._first[model] = bits.state
        return np.random.Generator(bits)
