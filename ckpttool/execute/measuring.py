"""Measures a merge: reads its result back beside the models, tensor by tensor.

Any machine can measure a tensor by itself, as it can verify one: see ``verification``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.core.dtypes import CASTABLE, itemsize
from ckpttool.core.files import DataFile, Place
from ckpttool.core.plan import Block, Compute, Copy, Plan, Randomness, StoredOperand
from ckpttool.execute.blocks import Mover
from ckpttool.execute.compute import TensorComputer
from ckpttool.execute.draws import tensor_draws
from ckpttool.execute.options import Advance, unwatched
from ckpttool.execute.reader import Reads, in_turn, reading
from ckpttool.execute.reads import operands_at_hand
from ckpttool.kernels.merge.measure import Measured
from ckpttool.storage.place import parse_place
from ckpttool.storage.travel import SentFiles

if TYPE_CHECKING:
    from ckpttool.execute.fleets.base import Fleet

_WORKERS = 2
"""Threads that measure."""


class MeasuredTensor(NamedTuple):
    """A tensor to be measured."""

    compute: Compute
    """How it was worked out; it has no outputs here."""
    result: StoredOperand
    """The tensors that were written; their files follow those of the sources."""
    nbytes: int

    @property
    def written(self) -> Iterator[int]:
        """Numbers of the files that hold it, those of the sources counted."""
        return (c.src.file for c in self.result.copies)


def items_of(plan: Plan) -> list[MeasuredTensor]:
    """The tensors to measure. Left out are tensors that are no floats, and those that are not written whole."""
    found = []
    for unit in plan.units:
        for step in unit.steps:
            if not isinstance(step, Compute) or step.dtype not in CASTABLE:
                continue
            # Ranks may hold the same: one of them is read.
            boxes = {(c.src.offset, c.src.strides, c.shape): c for c in step.outputs}
            if sum([prod(c.shape) for c in boxes.values()]) != prod(step.shape):
                continue
            copies = tuple([_back(c, len(plan.sources)) for c in boxes.values()])
            result = StoredOperand(step.dtype, step.shape, copies, f"`{step.name}` as it was written")
            found.append(MeasuredTensor(step._replace(outputs=()), result, prod(step.shape) * itemsize(step.dtype)))
    return found


def _back(copy: Copy, first: int) -> Copy:
    src, dst = copy.src, copy.dst
    return Copy(
        Block(first + dst.file, dst.offset, dst.strides),
        Block(0, src.offset, src.strides),
        copy.shape,
        copy.dst_dtype,
        copy.src_dtype,
    )


class Measurer:
    """Measures tensors, in several threads. It can be pickled; what it has opened stays behind."""

    def __init__(
        self,
        sources: SentFiles,
        written: SentFiles,
        randomness: Randomness | None,
        memory: int,
        advance: Advance = unwatched,
        looked_for: SentFiles | None = None,
    ) -> None:
        """``looked_for`` are files that were written and are read on other machines."""
        self._looked_for = looked_for or SentFiles()
        self._sources = sources
        self._written = written
        self._randomness = randomness
        self._memory = memory
        self._advance = advance
        self._tools = threading.local()

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = (self._sources, self._written, self._randomness, self._memory, unwatched, self._looked_for)
        return Measurer, arguments

    @property
    def files(self) -> Iterable[DataFile]:
        """Files that must be the same on all machines."""
        return (*self._sources, *self._looked_for)

    def reads(self, _item: MeasuredTensor) -> Reads:
        """Operands are read ahead when their turn comes."""
        return Reads(())

    def do(self, item: MeasuredTensor) -> Measured:
        """Measure a tensor. Whoever calls has a medium open; see ``reading``."""
        computing = self._computing()
        told = 0

        def seen(elements: int, of: int) -> None:
            nonlocal told
            now = item.nbytes * elements // max(of, 1)
            self._advance(now - told)
            told = now

        all_of_it = item.compute._replace(models=(*item.compute.models, item.result))
        with operands_at_hand(all_of_it, computing.carrier):
            found = computing.measure(item.compute, item.result, seen)
        self._advance(item.nbytes - told)
        return found

    def _computing(self) -> TensorComputer:
        mine: TensorComputer | None = getattr(self._tools, "computing", None)
        if mine is None:
            with reading() as pool:
                files = [f.contents for f in (*self._sources, *self._written)]
                carrier = Mover(files, (), pool, 1 << 20, threading.Event())
                memory = self._memory - (pool.ahead if any(map(pool.is_far, files)) else 0)
                mine = TensorComputer(carrier, memory // _WORKERS, tensor_draws(self._randomness))
            self._tools.computing = mine
        return mine


class Measurement:
    """Measures the result of a plan, here or on other machines: ``RunOptions.measure``."""

    def __init__(self, plan: Plan, memory: int, connections: int | None = None) -> None:
        self._plan = plan
        self._memory = memory
        self._connections = connections
        self.found: dict[str, Measured] = {}
        """Results by tensor name."""

    def __call__(self, written: Place, advance: Advance) -> None:
        """Measure all of it. ``advance`` is told the bytes of ``written`` that are done."""
        items = items_of(self._plan)
        with reading(memory=self._memory // 2, connections=self._connections):
            self._conclude(items, self._here(items, written, advance))

    def on(
        self, fleet: Fleet, written: Place, advance: Advance, stop: threading.Event, private: Path | None = None
    ) -> None:
        """The same on other machines. What lies below ``private`` is on this machine alone, and measured here. Raises
        Stopped once ``stop`` is set, and what ``dispatch`` raises."""
        from ckpttool.execute.machines.calls import CallLimits, map_over

        items = items_of(self._plan)
        with reading(memory=self._memory // 2, connections=self._connections):
            outputs = self._outputs(written)
            first = len(self._plan.sources)
            alone = {i for i, f in enumerate(outputs, first) if private and str(f.place).startswith(f"{private}/")}
            mine = [item for item in items if not alone.isdisjoint(item.written)]
            self._conclude(mine, self._here(mine, written, advance))
        there = [item for item in items if alone.isdisjoint(item.written)]
        used = SentFiles([outputs[i - first] for i in dict.fromkeys(i for item in there for i in item.written)])
        work = Measurer(self._sources(), outputs, self._plan.randomness, self._memory, looked_for=used)
        limits = CallLimits(self._memory // 2, self._connections)
        sizes = [item.nbytes for item in there]
        self._conclude(there, map_over(fleet, work, there, sizes, limits, stop=stop, advance=advance))

    def _conclude(self, items: Sequence[MeasuredTensor], found: Iterable[Measured]) -> None:
        self.found |= {item.compute.name: one for item, one in zip(items, found, strict=True)}

    def _here(self, items: Sequence[MeasuredTensor], written: Place, advance: Advance) -> Iterator[Measured]:
        work = Measurer(self._sources(), self._outputs(written), self._plan.randomness, self._memory, advance)
        with closing(in_turn(_WORKERS, work.do, items, work.reads)) as found:
            yield from found

    def _sources(self) -> SentFiles:
        return SentFiles([DataFile(parse_place(s.path), s.size, s.tag, s.encoding) for s in self._plan.sources])

    def _outputs(self, written: Place) -> SentFiles:
        return SentFiles([DataFile(_below(written, o.name), o.size, "") for o in self._plan.outputs])


def _below(place: Place, name: str) -> Place:
    for part in name.split("/"):
        place = place / part
    return place
