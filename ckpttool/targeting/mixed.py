"""What gives away that files of several saves, or of several ranks, were put together wrongly, where no header does.

    files-equal     two files hold other boxes of the tensors, and the same bytes
    steps-differ    the optimizer has taken another number of steps with some parameters than with others

Neither is proof: ranks may begin with the same random numbers, and a parameter without a gradient takes no step. So
they are doubts, which a run notes and a check finds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from math import prod
from typing import NamedTuple

from ckpttool.core.catalog import Catalog, LogicalTensor, StoredTensor
from ckpttool.core.dtypes import itemsize, lookup
from ckpttool.core.files import DataFile, source_files
from ckpttool.core.optimizer_states import STEP
from ckpttool.core.words import count, some
from ckpttool.errors import CkptError
from ckpttool.execute.compare import tensor_reads
from ckpttool.execute.remote import open_medium
from ckpttool.storage.place import is_here, open_file, readable
from ckpttool.targeting.states import read_number

_SAMPLES, _SAMPLE, _BLOCK = 4, 4096, 1 << 20


class MixedSave(NamedTuple):
    """A sign that files of two saves lie together."""

    id: str
    text: str
    where: str = ""
    hint: str = ""


def doubts(catalog: Catalog) -> list[MixedSave]:
    """All signs of mixed saves.

    Of files that are alike a few kilobytes are read, and all of those whose samples are equal.
    """
    out: list[MixedSave] = []
    for look in (_equal_files, _steps):
        with suppress(CkptError):  # a file that cannot be read: what reads it says so
            out += look(catalog)
    return out


# -- files


def _equal_files(catalog: Catalog) -> Iterator[MixedSave]:
    files = {i: f for i, f in enumerate(catalog.files) if f.encoding is None and is_here(f.place)}
    sizes: dict[int, list[int]] = {}
    for i, f in files.items():
        sizes.setdefault(f.size, []).append(i)
    alike = {i for group in sizes.values() if len({files[i].place for i in group}) > 1 for i in group}
    if not alike:
        return
    largest = _largest(catalog, alike)
    for group in sizes.values():
        held = next((largest[i] for i in group if i in largest), ())
        seen: dict[tuple[bytes, ...], DataFile] = {}
        for file in source_files([files[i] for i in group if i in largest]):
            first = seen.setdefault(_samples(file, held), file)
            if first is not file and _same_bytes(first, file):
                yield _copied(first, file)


def _copied(first: DataFile, other: DataFile) -> MixedSave:
    names = [f.place.name for f in (first, other)]
    if names[0] == names[1]:
        names = [f"{f.place.parent.name}/{f.place.name}" for f in (first, other)]
    return MixedSave(
        "files-equal",
        f"{names[0]} and {names[1]} are identical: one may be a copy under the other's name",
        f"{first.place}; {other.place}",
        "compare them with the original save: ranks normally hold different values",
    )


def _largest(catalog: Catalog, files: set[int]) -> dict[int, list[StoredTensor]]:
    """The few largest tensors with a piece in each file: a catalog may have millions of pieces."""
    found: dict[int, list[StoredTensor]] = {}
    for tensor in catalog:
        if lookup(tensor.dtype).bits % 8:
            continue
        for piece in tensor.pieces:
            stored = piece.stored
            if stored.file not in files or prod(stored.shape) < 2:
                continue
            held = found.setdefault(stored.file, [])
            if len(held) < _SAMPLES or _rank(stored) < _rank(held[-1]):
                held.append(stored)
                held.sort(key=_rank)
                del held[_SAMPLES:]
    return found


def _rank(stored: StoredTensor) -> tuple[int, int]:
    return -stored.nbytes, stored.offset


def _samples(file: DataFile, tensors: Sequence[StoredTensor]) -> tuple[bytes, ...]:
    """A run of elements of each tensor that has more than one value there; the file's own name where none has."""
    out = []
    with readable(file.place), open_file(file.place) as f:
        for t in tensors:
            size = itemsize(t.dtype)
            n = min(t.nbytes, _SAMPLE) // size * size
            data = f.pread(n, t.offset + (t.nbytes - n) // (2 * size) * size)
            if data != data[:size] * (n // size):
                out.append(data)
    return tuple(out) or (str(file.place).encode(),)


def _same_bytes(one: DataFile, other: DataFile) -> bool:
    with readable(one.place), open_file(one.place) as a, readable(other.place), open_file(other.place) as b:
        return all(a.pread(_BLOCK, at) == b.pread(_BLOCK, at) for at in range(0, one.size, _BLOCK))


# -- steps


def _steps(catalog: Catalog) -> Iterator[MixedSave]:
    """From files of this machine: a request for each of thousands of numbers takes its time elsewhere."""
    tensors = [t for t in catalog if t.key.component == "optimizer" and t.key.state == STEP and _is_near(catalog, t)]
    taken: dict[float, list[str]] = {}
    with open_medium() as medium:
        medium.announce([r for t in tensors for r in tensor_reads(catalog, t, replicas=True).ranges])
        for t in tensors:
            taken.setdefault(read_number(medium, catalog, t), []).append(t.key.name)
    if len(taken) > 1:
        (most, names), *others = sorted(taken.items(), key=lambda item: -len(item[1]))
        rest = ", ".join(f"{n:,g} with {len(of):,} ({some(of)})" for n, of in others[:3])
        yield MixedSave(
            "steps-differ",
            f"the optimizer has taken {most:,g} steps with {count(len(names), 'parameter')}, and {rest}: files of two"
            " saves, or parameters that had no gradient",
            hint="if every parameter gets a gradient in every step, use an earlier save",
        )


def _is_near(catalog: Catalog, tensor: LogicalTensor) -> bool:
    return all(is_here(catalog.files[p.stored.file].place) for p in (*tensor.pieces, *tensor.replicas))
