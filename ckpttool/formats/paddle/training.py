"""What Paddle's trainers keep beside tensors: trainer_state.json and scheduler.pdparams.

Both are carried along as the small files that they are. What another trainer keeps has no place in Paddle's files.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ckpttool.containers.paddle_pickle import read_pickle
from ckpttool.errors import CkptError
from ckpttool.formats.base import Training
from ckpttool.storage.listing import Listing

SCHEDULE = "LR_Scheduler"
"""What Paddle calls the state of the learning rate in the optimizer's files."""


def read_training(listing: Listing, schedule: Mapping[str, Any] | None = None) -> Training | None:
    """The trainer's step and its learning-rate ``schedule``, which scheduler.pdparams has where files have none.

    Nothing in Paddle's files says the betas. A file that cannot be read is carried along, and says nothing here.
    """
    state: Mapping[str, Any] = {}
    with suppress(CkptError):
        state = listing.json("trainer_state.json")
    if schedule is None and "scheduler.pdparams" in listing.names:
        with suppress(CkptError):
            found = read_pickle(listing.path("scheduler.pdparams"))
            schedule = found if isinstance(found, dict) else None
    step = state.get("global_step")
    step = step if type(step) is int and step >= 0 else None
    if step is None and not schedule:
        return None
    return Training(step=step, plain={SCHEDULE: dict(schedule)} if schedule else {})


def left_out(training: Training | None) -> list[str]:
    """A note about what another trainer keeps."""
    if training is None:
        return []
    names = ["param_groups"] if any({*g.values} - {"betas"} for g in training.groups) else []
    names += [n for n in (*training.plain, *training.left) if n != SCHEDULE]
    return [f"{', '.join(names)} left out: Paddle's trainers take them from their own arguments"] if names else []
