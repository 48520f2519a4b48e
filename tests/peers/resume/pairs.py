"""Runs that move from each framework to each other one, beside runs that stay."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tests.helpers.command import ckpttool
from tests.peers.rank_group import groups
from tests.peers.resume import task
from tests.peers.resume.frameworks import FRAMEWORKS, Framework, Machines, options
from tests.peers.resume.held import Ran, differences
from tests.peers.resume.task import Job

UNIT = {True: 2.0**-8, False: 2.0**-20}
"""What a difference of losses of about 5 may be for nothing: half a unit of bfloat16's last place; float32's, twice."""


@dataclass(frozen=True, eq=False)
class Move:
    """What became of a run that moved; ``error`` where it could not."""

    sender: Framework
    receiver: Framework
    model: str
    bf16: bool
    options: Sequence[str]
    error: str = ""
    held: int = 0
    """Tensors and numbers that were compared."""
    wrong: Sequence[str] = ()
    """Those that the receiver holds otherwise than the sender."""
    whole: Sequence[float] = ()
    """Losses of all ten steps of the run that never moved."""
    moved: Sequence[float] = ()
    """Of the steps after the move."""
    alone: float = 0.0
    """Largest difference of the losses where both begin with the same weights and never move, ten steps long."""
    counters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def apart(self) -> float:
        """The largest difference of losses after the move."""
        return max(abs(a - b) for a, b in zip(self.whole[task.STEPS :], self.moved, strict=True))

    @property
    def limit(self) -> float:
        """What the arithmetic of the two frameworks alone may give."""
        return 2 * max(self.alone, UNIT[self.bf16])

    @property
    def right(self) -> bool:
        return not self.error and not self.wrong and self.apart <= self.limit

    def __str__(self) -> str:
        about = f"{self.model} {'bf16' if self.bf16 else 'f32'}, {self.sender.name} to {self.receiver.name}"
        if self.error:
            return f"{about}: {self.error}"
        wrong = f", {len(self.wrong)} differ: {', '.join(self.wrong[:3])}" if self.wrong else ""
        far = "" if self.apart <= self.limit else "  TOO FAR APART"
        return f"{about}: {self.held} held{wrong}, losses {self.apart:.1e} apart ({self.alone:.1e} without a move){far}"


class Lab:
    """Trains each framework once, and moves its run."""

    def __init__(self, machines: Machines) -> None:
        self.machines = machines
        self.folder = machines.folder
        self.stayed = cache(self._stayed)
        self.fresh = cache(self._fresh)
        self.first = cache(self._first)

    def _first(self, model: str) -> Path:
        return task.first_weights(model, self.folder / f"first-{model}")

    def _stayed(self, framework: Framework, model: str, bf16: bool) -> tuple[Ran, Path]:
        """Ten steps without a pause, and the checkpoint of the fifth."""
        place = self.folder / f"run{len([*self.folder.iterdir()])}"
        job = Job(model, bf16, str(self.first(model)), save=str(place))
        return framework.sends[model].runs(job, self.machines), framework.saved(place)

    def _fresh(self, framework: Framework, model: str, bf16: bool) -> Ran:
        """Ten steps in the mesh in which it receives, from the first weights."""
        job = Job(model, bf16, str(self.first(model)))
        return framework.receives[model].runs(job, self.machines)

    def move(self, sender: Framework, receiver: Framework, model: str, *, bf16: bool) -> Move:
        asked = options(sender, receiver, model, bf16=bf16)
        stayed, checkpoint = self.stayed(sender, model, bf16)
        theirs = self.fresh(receiver, model, bf16)
        written = self.folder / f"moved{len([*self.folder.iterdir()])}"
        done = ckpttool("reshard", checkpoint, written, *asked, "--verify")
        about = Move(sender, receiver, model, bf16, asked)
        if done.code:
            return _failed(about, done.err[done.err.index("error:") :])
        job = Job(model, bf16, str(self.first(model)), load=str(written), first=task.STEPS)
        try:
            ran = receiver.receives[model].runs(job, self.machines)
        except RuntimeError as e:
            return _failed(about, _error(str(e)))
        return Move(
            sender,
            receiver,
            model,
            bf16,
            asked,
            held=len(stayed.saved),
            wrong=differences(stayed.saved, ran.begun),
            whole=stayed.losses,
            moved=ran.losses,
            counters=ran.counters,
            alone=max(abs(a - b) for a, b in zip(stayed.losses, theirs.losses, strict=True)),
        )


def _error(said: str) -> str:
    """What was raised, of the log of ranks."""
    found = re.findall(r"^(?:[\w.]+(?:Error|Exception)\b.*)$", said, re.MULTILINE)
    return found[-1] if found else said[-500:]


def _failed(move: Move, said: str) -> Move:
    return Move(move.sender, move.receiver, move.model, move.bf16, move.options, error=said)


def possible(model: str) -> list[tuple[Framework, Framework]]:
    """All pairs of frameworks that train this model."""
    here = [f for f in FRAMEWORKS if model not in f.without]
    return [(a, b) for a in here for b in here]


@contextlib.contextmanager
def lab(folder: Path) -> Iterator[Lab]:
    work = folder / "work"
    work.mkdir(parents=True)
    with groups(folder / "ranks") as ranks:
        yield Lab(Machines(ranks, work))
