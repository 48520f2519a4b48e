"""One digest of everything that a checkpoint holds, the same for every way to cut, fuse, name and shard it.

    line of a tensor    name TAB dtype TAB shape TAB digest LF      model.norm.weight  BF16  64  0123...cdef
    total               xxh3 with 128 bits over all lines, sorted by their bytes

Names are Hugging Face's where the naming is known. docs/inspect/tensors.md says exactly what a line has.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from ckpttool.core.catalog import Catalog, Key
from ckpttool.core.dtypes import itemsize, lookup
from ckpttool.errors import UnsupportedError
from ckpttool.execute import Progress
from ckpttool.execute.compare import BLOCK, catalog_of, read_view, view_reads
from ckpttool.execute.hashing import ALGORITHM, hasher
from ckpttool.execute.machines.each import each
from ckpttool.execute.reader import Reads, blocks
from ckpttool.ops.inspect.diff import ComparedTensor, side
from ckpttool.ops.inspect.listing import TensorListing
from ckpttool.ops.inspect.soundness import NamedShape, heads
from ckpttool.ops.inspect.values import Array, digest
from ckpttool.planning.relate import DerivedTensor
from ckpttool.storage.travel import SentFiles

if TYPE_CHECKING:
    from ckpttool.execute.fleets.base import Fleet


@dataclass(frozen=True, slots=True)
class TotalDigest:
    """The digest, and what it is of."""

    digest: str
    """``xxh3_128:`` and 32 hexadecimal digits."""
    lines: tuple[str, ...]
    """One for each tensor, sorted, without the LF."""


@dataclass(frozen=True, slots=True)
class _TotalWork:
    """See ``Work``."""

    files: SentFiles

    def reads(self, view: DerivedTensor) -> Reads:
        return view_reads(catalog_of(self.files), view)

    def do(self, view: DerivedTensor) -> str:
        return _digest(catalog_of(self.files), view)


def total(listing: TensorListing, progress: Progress, fleet: Fleet | None = None) -> TotalDigest:
    """Read the components that the listing has chosen. Notes of bringing names to Hugging Face's go to the listing.

    Raises LayoutError and UnsupportedError for what cannot be brought to the common names.
    """
    checkpoint = listing.checkpoint()
    found = side(checkpoint, listing.components, listing.notes, renamed=bool(checkpoint.ops))
    for component, why in found.failed.items():
        raise UnsupportedError(f"{component} cannot be brought to Hugging Face names: {why}", hint="use --only model")
    views = [v for v in found.views(listing.components).values() if v.view.name not in found.aliases]
    views = [v for v in views if not _repeats_model(checkpoint.catalog, v, found.tables.get("model", {}))]
    progress.start(sum(v.view.nbytes for v in views), len(listing.files))
    digests = {}
    only = [v.view for v in views]
    work = _TotalWork(SentFiles(checkpoint.catalog.files))
    read = each(work, only, lambda v: v.nbytes, fleet)
    for v, d in zip(only, read, strict=True):
        digests[v.name] = d
        progress.advance(v.nbytes)
    progress.finish()
    kinds = {v.view.name: NamedShape(v.view.dtype, v.view.shape, ()) for v in views}
    embedding, head = heads({n: k for n, k in kinds.items() if n in found.tables.get("model", {})})
    if embedding and head and (kinds[head], digests[head]) == (kinds[embedding], digests[embedding]):
        del kinds[head]  # tied: some formats store it twice, others once
    lines = [f"{n}\t{k.dtype}\t{','.join(map(str, k.shape))}\t{digests[n]}" for n, k in kinds.items()]
    lines.sort(key=lambda line: line.encode("utf-8", "surrogatepass"))
    h = hasher()
    for line in lines:
        h.update(f"{line}\n".encode("utf-8", "surrogatepass"))
    return TotalDigest(f"{ALGORITHM}:{h.hexdigest()}", tuple(lines))


def _repeats_model(catalog: Catalog, found: ComparedTensor, model: dict[str, ComparedTensor]) -> bool:
    """Whether it is the master weight of a float32 weight, which some formats store and others do not."""
    if found.component != "master_weights":
        return False
    weight = model.get(found.parameter)
    stored = catalog.tensors.get(Key(found.parameter))
    return found.lone or "F32" in (weight.view.dtype if weight else "", stored.dtype if stored else "")


def _digest(catalog: Catalog, view: DerivedTensor) -> str:
    """Of the elements in row-major order, as they are stored; 32 hexadecimal digits."""
    if view.same is not None:
        known = digest(catalog, view.same)
        if known is not None:
            return known.partition(":")[2]
    if lookup(view.dtype).bits % 8:
        raise UnsupportedError(f"`{view.name}` is {view.dtype} and cut or fused; its elements share bytes")
    h = hasher()
    for box in blocks(view.shape, itemsize(view.dtype), BLOCK) if prod(view.shape) else ():
        data: Array = read_view(catalog, view, box)
        h.update(data.tobytes())
    return h.hexdigest()
