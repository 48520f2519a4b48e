"""What the elements say: statistics, histograms, checksums, and the elements themselves.

Tensors are read in blocks, so memory does not depend on how large they are, and put together from their pieces, so
the answers do not depend on how they are sharded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ckpttool.checkpoint import refuse_empty
from ckpttool.core.catalog import Catalog, Key, LogicalTensor
from ckpttool.core.dtypes import itemsize, lookup
from ckpttool.core.files import source_files
from ckpttool.core.geometry import Box
from ckpttool.core.patterns import nearest_hint
from ckpttool.errors import UnsupportedError, UsageError
from ckpttool.execute import Progress
from ckpttool.execute.compare import BLOCK, catalog_of, read_tensor, tensor_reads
from ckpttool.execute.hashing import ALGORITHM, hash_range, hasher
from ckpttool.execute.machines.each import each
from ckpttool.execute.reader import Reads, blocks
from ckpttool.kernels.stats import Binning, Collector, Histogram, Stats, collector
from ckpttool.ops.inspect.listing import TensorListing, TensorRow
from ckpttool.storage.travel import SentFiles

if TYPE_CHECKING:
    from ckpttool.execute.fleets.base import Fleet

BINS = 20
SHOWN = 64 << 20
"""Most bytes that --show reads."""

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Values:
    """What was asked about one tensor; None for what was not, and for what its dtype does not have."""

    row: TensorRow
    stats: Stats | None = None
    histogram: Histogram | None = None
    digest: str | None = None
    """``xxh3_128:`` of the elements in row-major order."""


@dataclass(frozen=True, slots=True)
class WantedValues:
    """What to find out."""

    stats: bool = False
    histogram: bool = False
    digest: bool = False


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Elements of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    index: str
    """As given, "" for all of it."""
    values: Array

    @property
    def printable(self) -> Array:
        """The same values in a dtype that numpy prints by itself."""
        data = np.asarray(self.values)
        return data.astype(np.float32) if data.dtype.kind == "V" or data.dtype.name not in np.sctypeDict else data


class _MeasuredTensor(NamedTuple):
    """What there is to know of one tensor."""

    stats: Stats | None = None
    histogram: Histogram | None = None
    digest: str | None = None


@dataclass(frozen=True, slots=True)
class _ValuesWork:
    """See ``Work``."""

    files: SentFiles
    wanted: WantedValues

    def reads(self, tensor: LogicalTensor) -> Reads:
        return tensor_reads(catalog_of(self.files), tensor)

    def do(self, tensor: LogicalTensor) -> _MeasuredTensor:
        return _measure_one(catalog_of(self.files), tensor, self.wanted)


def measure(
    listing: TensorListing, wanted: WantedValues, progress: Progress, fleet: Fleet | None = None
) -> list[Values]:
    """Read the listed tensors once (twice for a histogram of wide elements), in order of the listing.

    Raises LayoutError when ranks' tensors cannot be put together.
    """
    return measure_rows(listing.checkpoint().catalog, listing.rows, wanted, progress, fleet)


def measure_rows(
    catalog: Catalog, rows: Sequence[TensorRow], wanted: WantedValues, progress: Progress, fleet: Fleet | None = None
) -> list[Values]:
    """The same for some tensors of a catalog."""
    named = {str(key): t for key, t in catalog.tensors.items()}
    tensors = [named[row.name] for row in rows]
    progress.start(sum(row.nbytes for row in rows), len(source_files(catalog.files)))
    out = []
    work = _ValuesWork(SentFiles(catalog.files), wanted)
    found = each(work, tensors, lambda t: t.nbytes, fleet)
    for row, values in zip(rows, found, strict=True):
        out.append(Values(row, *values))
        progress.advance(row.nbytes)
    progress.finish()
    return out


def _measure_one(catalog: Catalog, tensor: LogicalTensor, wanted: WantedValues) -> _MeasuredTensor:
    """One tensor. Elements smaller than a byte have a checksum where they lie in one run, and no statistics."""
    counted = (wanted.stats or wanted.histogram) and lookup(tensor.dtype).bits >= 8
    if not counted:
        return _MeasuredTensor(digest=digest(catalog, tensor) if wanted.digest else None)
    numbers = collector(tensor.dtype)
    h = hasher() if wanted.digest else None
    for block in read_blocks(catalog, tensor):
        numbers.add(block)
        if h is not None:
            h.update(block.data.cast("B") if block.dtype.kind in "iufb" else block.view(np.uint8).data)
    stats = numbers.stats()
    histogram = _histogram(catalog, tensor, numbers, stats) if wanted.histogram else None
    taken = f"{ALGORITHM}:{h.hexdigest()}" if h is not None else None
    return _MeasuredTensor(stats if wanted.stats else None, histogram, taken)


def _histogram(catalog: Catalog, tensor: LogicalTensor, numbers: Collector, stats: Stats) -> Histogram:
    found = numbers.histogram(BINS)
    if found is None:
        binning = Binning(float(stats.minimum or 0), float(stats.maximum or 0), BINS)
        for block in read_blocks(catalog, tensor):
            binning.add(block)
        found = binning.result()
    return found


def read_blocks(catalog: Catalog, tensor: LogicalTensor) -> Iterator[Array]:
    """The elements in row-major order, in blocks that are the same for every sharding."""
    for box in blocks(tensor.shape, itemsize(tensor.dtype), BLOCK):
        yield read_tensor(catalog, tensor, box)


def digest(catalog: Catalog, tensor: LogicalTensor) -> str | None:
    """The checksum of a tensor's elements in row-major order, or None for a cut tensor of elements below a byte."""
    first = tensor.pieces[0] if tensor.pieces else None
    plain = first is not None and first.stored.strides is None and first.stored.dtype == tensor.dtype
    if first is not None and plain and first.stored.shape == first.stored_box.shape == tensor.shape:
        return hash_range(catalog.files[first.stored.file].contents, first.stored.offset, tensor.nbytes)
    if lookup(tensor.dtype).bits % 8 and prod(tensor.shape):
        return None
    h = hasher()
    if prod(tensor.shape):
        for block in read_blocks(catalog, tensor):
            h.update(block.view(np.uint8).data if block.shape else block.tobytes())
    return f"{ALGORITHM}:{h.hexdigest()}"


# -- elements


def show(listing: TensorListing, wanted: Sequence[str]) -> list[TensorSlice]:
    """The elements that ``NAME`` or ``NAME[index]`` name.

    Raises UsageError for an unknown name or index.
    """
    refuse_empty(listing.checkpoint())
    catalog = listing.checkpoint().catalog
    return [_show(catalog, text) for text in wanted]


def _show(catalog: Catalog, text: str) -> TensorSlice:
    tensors = {str(key): t for key, t in catalog.tensors.items()}
    for alias, owner in catalog.aliases.items():
        tensors[str(alias)] = catalog.tensors[Key(owner.name)]
    name, index = text, ""
    brackets = [m.start() for m in re.finditer(r"\[", text)][::-1]
    if text not in tensors and (at := next((i for i in brackets if text[:i] in tensors), 0)):
        name, index = text[:at], text[at + 1 :].removesuffix("]").strip()
        if not text.endswith("]") or set(index) & set("[](){}"):
            raise UsageError(
                f"--show `{text}`: behind the name comes one index in brackets, without lists in it",
                hint=f"for example '{name}[:2, -1]'; --show may be given several times",
            )
    elif text not in tensors and (m := re.fullmatch(r"(.*)\[([^\[\]]*)\]", text, re.DOTALL)):
        name = m[1]  # of no tensor; what may have been meant is like it
    if name not in tensors:
        raise UsageError(f"--show `{name}`: no such tensor", hint=nearest_hint(name, list(tensors)))
    tensor = tensors[name]
    if lookup(tensor.dtype).bits % 8:
        raise UnsupportedError(f"`{name}` is {tensor.dtype}: its elements are smaller than a byte and cannot be shown")
    box, picks = parse_index(index, tensor.shape, name)
    size = box.volume * itemsize(tensor.dtype)
    if size > SHOWN:
        raise UsageError(
            f"--show `{text}` is {size:,} bytes, too much to read as text",
            hint=f"show part of it, for example '{name}[{', '.join([':4'] * len(tensor.shape))}]'",
        )
    return TensorSlice(name, tensor.dtype, tensor.shape, index, read_tensor(catalog, tensor, box)[picks])


def parse_index(index: str, shape: tuple[int, ...], name: str) -> tuple[Box, tuple[slice | int, ...]]:
    """The box to read and what to pick from it, for an index as numpy writes it: integers, slices and ``...``.

    Raises UsageError, naming what is wrong.
    """
    items = [i.strip() for i in index.split(",")] if index else []
    if items and items[-1] == "" and len(items) > 1:
        items.pop()
    if items.count("...") > 1:
        raise UsageError(f"`{name}[{index}]` has more than one ...")
    given = len(items) - items.count("...")
    if given > len(shape):
        raise UsageError(f"`{name}` has {len(shape)} axes, the index [{index}] has {given}")
    at = items.index("...") if "..." in items else len(items)
    items = [*items[:at], *[":"] * (len(shape) - given), *items[at + 1 :]]
    start, stop, picks = [], [], []
    for item, n in zip(items, shape, strict=True):
        a, b, pick = _parse_item(item, n, f"{name}[{index}]")
        start.append(a)
        stop.append(b)
        picks.append(pick)
    return Box(tuple(start), tuple(stop)), tuple(picks)


def _parse_item(item: str, n: int, text: str) -> tuple[int, int, slice | int]:
    """[start, stop) on an axis of n elements, and what to pick of that."""
    try:
        parts = [int(p) if p.strip() else None for p in item.split(":")]
    except ValueError:
        parts = []
    if not 1 <= len(parts) <= 3 or parts == [None]:
        raise UsageError(f"`{text}`: `{item}` is not an index", hint="write 3, -1, 2:8, ::4 or ...")
    if len(parts) == 1:
        i = parts[0] or 0
        if not -n <= i < n:
            raise UsageError(f"`{text}`: {i} is outside an axis of {n} elements")
        return i % n, i % n + 1, 0
    a, b, step = slice(*parts).indices(n) if parts[2:] != [0] else (0, 0, 0)
    if step < 1:
        raise UsageError(f"`{text}`: the step {step} is not positive")
    # Whole steps only, so that nothing is read which is not shown.
    count = max(0, -(-(b - a) // step))
    return (a, a + (count - 1) * step + 1, slice(None, None, step)) if count else (0, 0, slice(None))
