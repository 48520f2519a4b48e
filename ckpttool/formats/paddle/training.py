"""The files that Paddle's trainers keep beside tensors: trainer_state.json and scheduler.pdparams.

Both are carried along as the small files that they are. A schedule that came through a format of another software
(dcp, universal, ranks) becomes a file again, and so do another trainer's step and learning rate. What else that one
keeps has no place in Paddle's files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from ckpttool.containers.paddle_pickle import read_pickle
from ckpttool.containers.pickle_write import plain_pickle
from ckpttool.core.files import DataFile
from ckpttool.core.words import some
from ckpttool.errors import CkptError
from ckpttool.formats.base import TrainingState, WriteRequest, companions
from ckpttool.storage.listing import COMPANION_LIMIT, Listing

SCHEDULE = "LR_Scheduler"
"""Paddle's name for the state of the learning rate in the optimizer's files."""
SCHEDULE_FILE = "scheduler.pdparams"
"""The same, beside them."""
_TRAINER = "trainer_state.json"
_STEPS = frozenset({"global_steps", "global_step", "step", "iteration"})
"""Other trainers' names for the number of steps."""

TRAINER_FILES = re.compile(
    r"rng_state.*\.pth|training_args\.bin|trainer_state\.bin|scheduler\.(?:pdparams|pdopt)|scaler\.pdparams"
)
"""Small files of the trainer whose names end as weights do."""


def small_files(listing: Listing, own: Iterable[str]) -> tuple[tuple[str, ...], list[str]]:
    """Small files of a checkpoint, those of the trainer included; and a note about those too large to carry."""
    carried, notes = companions(listing, own)
    trainer = [n for n in listing.names if TRAINER_FILES.fullmatch(n)]
    small = {n for n in trainer if DataFile.at(listing.path(n)).size <= COMPANION_LIMIT}
    return tuple([n for n in listing.names if n in small or n in carried]), notes


def read_training(listing: Listing, schedule: Mapping[str, Any] | None = None) -> TrainingState | None:
    """The trainer's step and its learning-rate ``schedule``, which scheduler.pdparams has where files have none.

    Nothing in Paddle's files says the betas. A file that cannot be read is carried along, and says nothing here.
    """
    state: Mapping[str, Any] = {}
    with suppress(CkptError):
        state = listing.json(_TRAINER)
    if schedule is None and SCHEDULE_FILE in listing.names:
        with suppress(CkptError):
            found = read_pickle(listing.path(SCHEDULE_FILE))
            schedule = found if isinstance(found, dict) else None
    step = state.get("global_step")
    step = step if type(step) is int and step >= 0 else None
    if step is None and not schedule:
        return None
    return TrainingState(step=step, plain={SCHEDULE: dict(schedule)} if schedule else {})


def schedule_of(training: TrainingState | None) -> Mapping[str, Any] | None:
    """The state of a schedule of Paddle's, wherever it came from.

    Another trainer's step and learning rate are one: Paddle's schedules are functions of the step, and no trainer of
    Paddle resumes without.
    """
    if training is None:
        return None
    schedule = training.plain.get(SCHEDULE)
    if isinstance(schedule, dict):
        return schedule
    rates = {float(rate) for g in training.groups if isinstance(rate := g.values.get("lr"), (int, float))}
    if training.step is None or len(rates) != 1:
        return None
    return {"last_epoch": training.step, "last_lr": rates.pop()}


def schedule_file(request: WriteRequest) -> tuple[tuple[str, bytes], ...]:
    """(name, bytes) of the schedule's file, where the source has it in no such file."""
    schedule = schedule_of(request.training)
    if schedule is None or SCHEDULE_FILE in request.companions:
        return ()
    return ((SCHEDULE_FILE, plain_pickle(schedule)),)


def left_out(request: WriteRequest) -> list[str]:
    """A note about what another trainer keeps."""
    training = request.training
    if training is None:
        return []
    names = ["param_groups"] if any({*g.values} - {"betas"} for g in training.groups) else []
    names += [n for n in (*training.plain, *training.left) if n != SCHEDULE]
    if training.step is not None and schedule_of(training) is None and _TRAINER not in request.companions:
        counted = any(t.component == "optimizer" for rank in request.ranks for t in rank)
        names += [] if counted or _STEPS & training.plain.keys() else ["step"]
    return [f"{some(names, 12)} left out: Paddle's trainers take them from their own arguments"] if names else []
