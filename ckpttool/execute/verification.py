"""``--verify`` as a list of checks, each of which any machine can do by itself.

    look      what needs no tensor: that all are there, and nothing else. Gives the checks; once, on one machine
    checks    a stretch of a tensor that was copied, or a tensor that is worked out once more
    share     those of one machine of several, by bytes: every check is in one share

No check knows of the plan of moves: each has its tensors' pieces, on both sides, and works the addresses out by itself.
What a check needs besides are the files of both sides, which all have in common.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.core.catalog import Catalog, Key, LogicalTensor, StoredTensor, whole_tensor
from ckpttool.core.dtypes import itemsize
from ckpttool.core.files import DataFile, Place
from ckpttool.core.plan import Compute, Plan, Quantize, Randomness
from ckpttool.core.words import count
from ckpttool.errors import VerifyError
from ckpttool.execute.blocks import Mover
from ckpttool.execute.compare import Comparison, Difference, catalog_of, comparisons, joined
from ckpttool.execute.compute import TensorComputer
from ckpttool.execute.draws import tensor_draws
from ckpttool.execute.options import Advance, unwatched
from ckpttool.execute.quantize import Quantizer
from ckpttool.execute.reader import Reads, in_turn, reading
from ckpttool.execute.reads import operands_at_hand
from ckpttool.execute.strided import compare
from ckpttool.planning.relate import DerivedTensor
from ckpttool.storage.place import parse_place
from ckpttool.storage.travel import SentFiles

if TYPE_CHECKING:
    from ckpttool.execute.fleets.base import Fleet

_WORKERS = 2
"""Threads that compare."""


@dataclass(frozen=True, slots=True)
class Sides:
    """The files that checks have in common."""

    source: SentFiles
    written: SentFiles
    randomness: Randomness | None = None
    """Draws of what is recomputed."""
    total: int = 0
    """Tensors that were written, 0 where another side counts them."""
    carried: bool = False
    """Files that stay as they are, each taken for one tensor."""


class VerifyCheck(NamedTuple):
    """One check."""

    side: int
    """Index of its files."""
    what: Comparison | Compute | Quantize

    @property
    def nbytes(self) -> int:
        """Bytes of what was written that are checked."""
        if isinstance(self.what, Comparison):
            return self.what.nbytes
        return sum([prod(c.shape) * itemsize(c.dst_dtype) for c in self.what.outputs])

    @property
    def written(self) -> Iterable[int]:
        """Numbers of the written files that it reads."""
        return self.what.files if isinstance(self.what, Comparison) else (c.dst.file for c in self.what.outputs)


class Fault(NamedTuple):
    """A tensor that comes out otherwise when it is worked out once more."""

    name: str
    where: tuple[str, ...]


@dataclass(slots=True)
class Checks:
    """Checks, in an order that is the same on all machines, and what was found on the way to them."""

    sides: list[Sides] = field(default_factory=list)
    checks: list[VerifyCheck] = field(default_factory=list)
    found: list[tuple[int, Difference]] = field(default_factory=list)
    """Side, and a tensor of another shape or dtype."""

    def add_views(
        self,
        source: Catalog,
        wanted: Sequence[tuple[DerivedTensor, str]],
        written: Catalog,
        *,
        total: int | None = None,
    ) -> None:
        """Check tensors of ``written``, and the copies of their boxes, against views of ``source`` in these dtypes.

        ``total`` is how many tensors were written.
        """
        side = len(self.sides)
        for view, dtype in wanted:
            made = comparisons(view, written[view.name], dtype)
            if isinstance(made, Difference):
                self.found.append((side, made))
            else:
                self.checks += [VerifyCheck(side, c) for c in made]
        self.sides.append(Sides(SentFiles(source.files), SentFiles(written.files), total=total or len(wanted)))

    def add_computed(self, plan: Plan, written: Place) -> None:
        """Work out every computed or quantized tensor once more, and compare it with what is below ``written``."""
        steps = [s for unit in plan.units for s in unit.steps if isinstance(s, Compute | Quantize)]
        self.checks += [VerifyCheck(len(self.sides), step) for step in steps]
        sources = [DataFile(parse_place(s.path), s.size, s.tag, s.encoding) for s in plan.sources]
        outputs = [DataFile(_below(written, o.name), o.size, "") for o in plan.outputs]
        self.sides.append(Sides(SentFiles(sources), SentFiles(outputs), plan.randomness))

    def add_carried(self, plan: Plan, written: Place) -> None:
        """Compare files that stay as they are with those of the source. Raises VerifyError for one of another size."""
        carried = [o for o in plan.outputs if o.carried]
        one = [DataFile(parse_place(o.carried), o.size, o.tag) for o in carried]
        two = [DataFile.at(_below(written, o.name)) for o in carried]
        for i, (a, b) in enumerate(zip(one, two, strict=True)):
            if a.size != b.size:
                raise _other_file(a, b)
            tensor = _bytes_of(i, a.size)
            made = comparisons(DerivedTensor(str(i), tensor.dtype, tensor.shape, tensor), tensor, tensor.dtype)
            assert isinstance(made, list)  # noqa: S101 - of equal sizes
            self.checks += [VerifyCheck(len(self.sides), c) for c in made]
        self.sides.append(Sides(SentFiles(one), SentFiles(two), total=len(carried), carried=True))

    def share(self, number: int, of: int) -> Sequence[VerifyCheck]:
        """Those of machine ``number`` (from 0) of so many: checks that lie one behind the other."""
        ends = accumulate([c.nbytes for c in self.checks])
        middles = [2 * end - c.nbytes for end, c in zip(ends, self.checks, strict=True)]
        total = 2 * sum([c.nbytes for c in self.checks])
        first, last = (bisect_left(middles, total * n // of) for n in (number, number + 1))
        return self.checks[first : last if number < of - 1 else None]

    def is_below(self, check: VerifyCheck, directory: Path | None) -> bool:
        """Whether what a check reads of the output lies in a directory of this machine."""
        files = self.sides[check.side].written
        return directory is not None and any(str(files[i].place).startswith(f"{directory}/") for i in check.written)

    def conclude(self, done: Iterable[tuple[VerifyCheck, Difference | Fault | None]]) -> None:
        """Hear what became of checks, in order. Raises VerifyError for what differs."""
        wrong: dict[tuple[int, str], dict[int, list[Difference]]] = {}
        for side, difference in self.found:
            wrong.setdefault((side, difference.name), {})[-1] = [difference]
        for check, found in done:
            if isinstance(found, Fault):
                raise VerifyError(f"`{found.name}` was not written as it was computed", where=found.where)
            if found is not None and isinstance(check.what, Comparison):
                copies = wrong.setdefault((check.side, found.name), {})
                copies.setdefault(check.what.copy, []).append(found)
        tensors = {key: copies for key, copies in sorted(wrong.items()) if not self.sides[key[0]].carried}
        if tensors:
            total = sum([side.total for side in self.sides if not side.carried])
            raise VerifyError(
                f"{len(tensors)} of {total} tensors differ from the source",
                where=[_described(copies) for copies in list(tensors.values())[:5]],
                hint="nothing was kept. This is a bug in ckpttool or a faulty disk:"
                " please report it with the command line",
            )
        for side, number in sorted((side, int(name)) for side, name in wrong):
            raise _other_file(self.sides[side].source[number], self.sides[side].written[number])


def _described(copies: Mapping[int, Sequence[Difference]]) -> str:
    """A tensor that differs, by the first of its copies that does, and how many others do."""
    first, *others = [joined(found) for _, found in sorted(copies.items())]
    more = f", and in {count(len(others), 'more copy', 'more copies')}" if others else ""
    return f"{first}{more}"


def _below(place: Place, name: str) -> Place:
    for part in name.split("/"):
        place = place / part
    return place


def _other_file(source: DataFile, written: DataFile) -> VerifyError:
    return VerifyError("the file differs from that of the source", where=[str(written.place), str(source.place)])


def _bytes_of(file: int, size: int) -> LogicalTensor:
    """A file, as a tensor of its bytes."""
    return whole_tensor(StoredTensor("", "U8", (size,), file, 0), Key(""))


class Checker:
    """Does checks, in several threads. It can be pickled; what it has opened stays behind."""

    def __init__(
        self, sides: Sequence[Sides], memory: int, advance: Advance = unwatched, outputs: SentFiles | None = None
    ) -> None:
        """``outputs`` are files that were written and are read on other machines."""
        self._sides = tuple(sides)
        self._outputs = outputs or SentFiles()
        self._memory = memory
        self._advance = advance
        self._catalogs = [(catalog_of(s.source), catalog_of(s.written)) for s in sides]
        self._recomputing: dict[int, tuple[Mover, TensorComputer, Quantizer]] = {}
        self._one = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return Checker, (self._sides, self._memory, unwatched, self._outputs)

    @property
    def files(self) -> Iterator[DataFile]:
        """Settings that must be equal on all machines that check."""
        for side in self._sides:
            yield from side.source
        yield from self._outputs

    def reads(self, check: VerifyCheck) -> Reads:
        """What a check reads from other machines. Operands are read ahead when their turn comes."""
        return check.what.reads(*self._catalogs[check.side]) if isinstance(check.what, Comparison) else Reads(())

    def do(self, check: VerifyCheck) -> Difference | Fault | None:
        """Do a check. Whoever calls has a medium open; see ``reading``."""
        if isinstance(check.what, Comparison):
            return check.what.do(*self._catalogs[check.side], self._advance)
        with self._one:  # one at a time has all of the memory
            return self._work_out(check.side, check.what, check.nbytes)

    def _work_out(self, side: int, step: Compute | Quantize, nbytes: int) -> Fault | None:
        if side not in self._recomputing:
            self._recomputing[side] = self._tools(self._sides[side])
        carrier, computing, quantizing = self._recomputing[side]
        reported = 0

        def seen(elements: int, of: int) -> None:
            nonlocal reported
            now = nbytes * elements // max(of, 1)
            self._advance(now - reported)
            reported = now

        again = computing.run(step, (), seen) if isinstance(step, Compute) else quantizing.run(step, (), seen)
        try:
            with operands_at_hand(step, carrier):
                for _ in again:
                    pass
        except VerifyError as e:
            return Fault(step.name, e.where)
        self._advance(nbytes - reported)
        return None

    def _tools(self, side: Sides) -> tuple[Mover, TensorComputer, Quantizer]:
        with reading() as pool:
            paths = [str(f.place) for f in side.written]
            carrier = Mover([f.contents for f in side.source], paths, pool, 1 << 20, threading.Event())
            memory = self._memory - (pool.ahead if any(map(pool.is_far, carrier.sources)) else 0)
            draws = tensor_draws(side.randomness)
            return carrier, TensorComputer(carrier, memory, draws, compare), Quantizer(carrier, memory, compare)


@dataclass(frozen=True, slots=True)
class Verification:
    """How an output is verified: here, in shares, or on other machines.

    ``look`` is given the place of the output, and raises VerifyError for what is wrong without reading tensors. Of
    ``memory`` bytes, half are for what is on other machines, and so are ``connections``.
    """

    look: Callable[[Place], Checks]
    memory: int
    connections: int | None = None

    def __call__(self, written: Place, advance: Advance) -> None:
        """Verify all of it. ``advance`` gets the bytes of ``written`` that are verified.

        Raises VerifyError naming the first tensors that differ.
        """
        self.share(written, advance, 0, 1)

    def share(self, written: Place, advance: Advance, number: int, of: int) -> None:
        """Verify what machine ``number`` (from 0) of so many has to, as ``__call__`` does."""
        with reading(memory=self.memory // 2, connections=self.connections):
            checks = self.look(written)
            # Closed also when a check fails: a medium that stays open would be read in the next verification, too.
            with closing(self._done(checks, checks.share(number, of), advance)) as done:
                checks.conclude(done)

    def on(
        self, fleet: Fleet, written: Place, advance: Advance, stop: threading.Event, private: Path | None = None
    ) -> None:
        """Verify all of it on other machines, as ``__call__`` does.

        What lies below ``private`` is on this machine alone, and verified here. Raises Stopped once ``stop`` is set,
        and what ``dispatch`` raises.
        """
        from ckpttool.execute.machines.calls import CallLimits, map_over

        with reading(memory=self.memory // 2, connections=self.connections):
            checks = self.look(written)
            here = [checks.is_below(c, private) for c in checks.checks]
            mine = self._done(checks, [c for c, is_here in zip(checks.checks, here, strict=True) if is_here], advance)
            found = [f for _, f in mine]
        there = [c for c, is_here in zip(checks.checks, here, strict=True) if not is_here]
        used = dict.fromkeys((c.side, i) for c in there for i in c.written)
        outputs = SentFiles([checks.sides[side].written[i]._replace(tag="", encoding=None) for side, i in used])
        work = Checker(checks.sides, self.memory, outputs=outputs)
        limits = CallLimits(self.memory // 2, self.connections)
        done = map_over(fleet, work, there, [c.nbytes for c in there], limits, stop=stop, advance=advance)
        first = iter(found)
        checks.conclude((c, next(first if is_here else done)) for c, is_here in zip(checks.checks, here, strict=True))

    def _done(
        self, checks: Checks, mine: Sequence[VerifyCheck], advance: Advance
    ) -> Generator[tuple[VerifyCheck, Difference | Fault | None], None, None]:
        work = Checker(checks.sides, self.memory, advance)
        with closing(in_turn(_WORKERS, work.do, mine, work.reads)) as found:
            yield from zip(mine, found, strict=True)
