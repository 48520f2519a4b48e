"""Places of parameters in a flat buffer of Megatron Core's distributed optimizer.

A buffer has the parameters of one rank and one dtype in the reverse of the model's order, cut into buckets:

    bucket 0 | output_layer | gap | fc2 | gap | fc1 |    bucket 1 | linear_qkv | gap | ...

Each parameter begins at a multiple of 64 elements of its bucket (before July 2024: right behind the one before it). A
bucket ends with the first parameter that makes it as large as the trainer's bucket size, which only
``--overlap-grad-reduce`` has, and only the first stage of a pipeline; and a weight that two stages share is a bucket of
its own. What pads the end of a bucket in memory is in no file: there a bucket begins where the last one ends.

Source: megatron/core/distributed/param_and_grad_buffer.py and distributed_data_parallel.py of Megatron Core 0.16.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

ALIGNMENT = 64
"""Elements."""
SMALLEST_BUCKET = 40_000_000
"""Elements of a bucket, unless more ranks share it, or the trainer says another number."""
PER_RANK = 1_000_000
"""Elements of a bucket for each rank that shares it, where that is more."""

Parameters = Iterable[tuple[str, tuple[int, ...]]]
"""(name, shape on the rank), in the order of ``named_parameters()``."""


class ParameterBucket(NamedTuple):
    """A run of parameters that ranks reduce together."""

    offsets: dict[str, int]
    """Name -> first element in the bucket."""
    elements: int
    """Elements without the padding at its end."""


def buckets(
    parameters: Parameters, *, size: int | None = None, alone: Collection[str] = (), alignment: int = ALIGNMENT
) -> list[ParameterBucket]:
    """The buckets of a buffer, in its order; ``size`` is the trainer's bucket size (None: all in one), ``alone`` are
    parameters that get one of their own.
    """
    out: list[ParameterBucket] = []
    held: dict[str, int] = {}
    at = 0
    for name, shape in reversed(list(parameters)):
        at += -at % alignment
        if name in alone and held:
            out.append(ParameterBucket(held, at))
            held, at = {}, 0
        held[name] = at
        at += prod(shape)
        if name in alone or (size is not None and at >= size):
            out.append(ParameterBucket(held, at))
            held, at = {}, 0
    return [*out, ParameterBucket(held, at)] if held else out


def offsets(
    parameters: Parameters, *, size: int | None = None, alone: Collection[str] = (), alignment: int = ALIGNMENT
) -> tuple[dict[str, int], int]:
    """(name -> first element, elements) of a buffer whose buckets lie one behind the other without padding, as they do
    in files.
    """
    out: dict[str, int] = {}
    at = 0
    for bucket in buckets(parameters, size=size, alone=alone, alignment=alignment):
        out.update({name: at + offset for name, offset in bucket.offsets.items()})
        at += bucket.elements
    return out, at


class BufferFit(NamedTuple):
    """The places of parameters that fit the number of elements in a file."""

    offsets: Mapping[str, int]
    """{} where nothing fits, or several that differ do."""
    several: bool
    """Whether there is more than one way."""
    expected: int
    """Elements of the usual way."""


def fit(
    parameters: Parameters, elements: int, *, sizes: Sequence[int | None] = (), alone: Iterable[Collection[str]] = ((),)
) -> BufferFit:
    """The offsets of parameters in a buffer of so many elements.

    ``sizes`` are the bucket sizes that the trainer had, () where nothing says them; ``alone`` the sets of parameters
    that may have had buckets of their own. What is said and fits is believed; otherwise all that Megatron may have done
    is tried, and only one way may fit.
    """
    known = tuple(parameters)
    names, counts = tuple([n for n, _ in known]), tuple([prod(s) for _, s in known])
    apart = tuple([tuple([i for i, n in enumerate(names) if n in group]) for group in alone])
    found, several, expected = _fit(counts, elements, tuple(sizes), apart)
    return BufferFit(dict(zip(names, found, strict=True)) if found else {}, several, expected)


@lru_cache(maxsize=256)
def _fit(
    counts: tuple[int, ...], elements: int, sizes: tuple[int | None, ...], alone: tuple[tuple[int, ...], ...]
) -> tuple[tuple[int, ...], bool, int]:
    """``fit`` by positions; cached, because tensor-parallel ranks are alike."""
    parameters = [(str(i), (n,)) for i, n in enumerate(counts)]
    found: set[tuple[int, ...]] = set()

    def look(size: int | None, group: Collection[int], alignment: int) -> int:
        """Note where parameters lie with a bucket size, if they fill the buffer; the elements of its smallest full
        bucket, 0 where there is none."""
        apart = {str(i) for i in group}
        made = buckets(parameters, size=size, alone=apart, alignment=alignment)
        if sum(b.elements for b in made) == elements:
            at, _ = offsets(parameters, size=size, alone=apart, alignment=alignment)
            found.add(tuple([at[str(i)] for i in range(len(counts))]))
        return min((b.elements for b in made if size is not None and b.elements >= size), default=0)

    ways = [(group, alignment) for group in alone for alignment in (ALIGNMENT, 1)]
    for size in sizes:
        for way in ways:
            look(size, *way)
    if len(found) != 1:
        found.clear()
        for way in ways:
            look(None, *way)
            # Without gaps buckets move nothing. Else every bucket size is tried that makes other buckets than the last.
            size = 0 if all(n % way[1] == 0 for n in counts) else 1
            for _ in range(_MOST // max(1, len(counts))):
                if not size or not (full := look(size, *way)):
                    break
                size = full + 1
            else:
                return (), True, 0
    _, expected = offsets(parameters, size=sizes[0] if sizes else None)
    return (next(iter(found)) if len(found) == 1 else ()), len(found) > 1, expected


_MOST = 1 << 20
"""Parameters that are laid out before it counts as unclear how they lie."""
