"""The interface of a merge method: a generator that reads the tensor as often as it must, and then says how to combine
it.

A method is written top to bottom, as its formula is:

    def slerp(tensor: Tensor) -> Program:
        sums = np.zeros(3)                                  # float64

        def measure(chunk: Chunk) -> None:                  # a pass: called for every chunk, in order
            a, b = chunk.model(0), chunk.model(1)
            work = chunk.scratch(0)
            sums[:] += dot(a, a, work), dot(b, b, work), dot(a, b, work)

        yield measure                                       # "let this see the whole tensor"
        x, y = coefficients(sums)

        def combine(chunk: Chunk, out: Array) -> None:      # the last pass writes the result
            np.multiply(chunk.model(0), x, out=out)
            out += y * chunk.model(1)

        return combine

One worker runs one tensor's program, and chunks come in the order of the row-major tensor, so a pass may keep
running sums in its closure. The chunks' size is fixed (``CHUNK`` elements, or whole rows): a reduction gives the same
value whatever ``--memory`` and however many workers. No method sees a whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

CHUNK = 128 << 10
"""Elements of a chunk: its float32 arrays stay in a core's cache."""


class Chunk(Protocol):
    """A stretch ``[start, stop)`` of the row-major tensor. All arrays are float32, of one dimension, and the method's
    own: it may overwrite them. Each call converts anew, into the same buffer as the call before."""

    start: int
    stop: int

    def model(self, i: int) -> Array:
        """The elements of model ``i``, counted without the base."""

    def base(self) -> Array:
        """The elements of the base model."""

    def delta(self, i: int) -> Array:
        """``model(i) - base()``, in model ``i``'s buffer; the base is subtracted as zero when there is none."""

    def scratch(self, i: int, dtype: Any = np.float32) -> Array:
        """A buffer of the chunk's length that keeps nothing from one chunk to the next."""


class Draws(Protocol):
    """The random numbers of one tensor."""

    def bernoulli(self, model: int, start: int, probability: float | Array, out: Array) -> None:
        """Fill the boolean ``out`` with draws for the elements from ``start`` on; the same call gives the same draws.

        ``probability`` of True is one number or one per element.
        """


@dataclass(frozen=True, slots=True)
class MergeTensor:
    """The tensor that a program is for."""

    name: str
    shape: tuple[int, ...]
    models: tuple[Mapping[str, Any], ...]
    """Parameters of each model but the base, complete: defaults are filled in."""
    whole: Mapping[str, Any]
    """Parameters of the merge, complete."""
    has_base: bool
    draws: Draws
    base_at: int | None = None
    """Place of the base in the recipe's list of models, for the methods where the order means something."""

    @property
    def size(self) -> int:
        """Elements."""
        return prod(self.shape)

    @property
    def columns(self) -> int:
        """Elements of a row (the last axis); 1-D and 0-D tensors are one row."""
        return self.shape[-1] if self.shape else 1


Pass = Callable[[Chunk], None]
Combine = Callable[[Chunk, Array], None]
Program = Generator[Pass, None, Combine]
"""Yields what must see every chunk, returns what writes the float32 result of a chunk into its second argument."""


class Contributions(NamedTuple):
    """Each model's contribution in a method that picks elements, before they are summed: for reports."""

    of: Callable[[Chunk], Iterator[Array]]
    """Yields, model by model, what it adds in a chunk: zero where the method drops the element. An array stays until
    the end of the chunk, but for methods that are ``one_at_a_time``."""
    vote: Callable[[int, Array, Array], None] | None = None
    """Puts what model ``i`` votes with, given what it adds, into the third argument: the sign of the sum of all votes
    is elected (0 counts as positive), and what has another sign is left out. None: nothing is elected."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a method."""

    kind: Literal["float", "int", "bool"]
    default: float | int | bool | None = None
    """None: must be given."""
    help: str = ""


Passes = Callable[[Mapping[str, Any], int], int]
"""A number of passes, of the parameters of the merge and the number of models."""


@dataclass(frozen=True, slots=True)
class Method:
    """A merge method and what recipes may say to it."""

    name: str
    program: Callable[[MergeTensor], Program]
    formula: str
    """One line, for docs and --help."""
    paper: str = ""
    per_model: Mapping[str, Parameter] = field(default_factory=dict)
    whole: Mapping[str, Parameter] = field(default_factory=dict)
    base: Literal["needed", "allowed", "refused"] = "allowed"
    """Whether a base model is subtracted or stands apart from the others."""
    models: tuple[int, int | None] = (1, None)
    """Fewest and most models, the base not counted."""
    rows: bool = False
    """Chunks hold whole rows of the last axis, however long."""
    random: bool = False
    """Draws random numbers, so that the seed matters."""
    sorts_with_torch: bool = False
    """Computing in float32 with draws that repeat mergekit's, it ranks rows as torch does, and so needs torch."""
    one_at_a_time: bool = False
    """Uses a model's array only until it asks for the next one, so that hundreds of models share one buffer."""
    parts: Callable[[MergeTensor], Generator[Pass, None, Contributions]] | None = None
    """In a method that picks elements: finds them, in as many passes as it needs."""
    passes: Passes = lambda _whole, _models: 0
    """Usual number of passes over a large tensor before it is combined: for the progress that is shown."""


def add_base(tensor: MergeTensor, chunk: Chunk, out: Array) -> None:
    """Add the base to a chunk of the result, if there is one."""
    if tensor.has_base:
        np.add(out, chunk.base(), out=out)


def one_pass(_whole: Mapping[str, Any], _models: int) -> int:
    """``Passes`` of a program that measures once."""
    return 1
