"""The directory of a run: one save for each step, and a file that names the last finished one.

run/latest_checkpointed_iteration.txt    200
run/global_step_100/, run/global_step_200/
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from ckpttool.containers.pickle import printable
from ckpttool.core.words import some
from ckpttool.errors import IncompleteError
from ckpttool.storage.listing import Listing
from ckpttool.storage.place import open_file

_STEP = re.compile(r"global_step_(\d{1,18})\Z")
_MARK = "latest_checkpointed_iteration.txt"


def steps_of(listing: Listing, is_save: Callable[[Listing], bool]) -> dict[int, str]:
    """Step -> the directory of its save."""
    found = {int(m[1]): name for name in listing.folders() if (m := _STEP.match(name))}
    return {step: name for step, name in sorted(found.items()) if is_save(listing.inside(name))}


def newest(listing: Listing, steps: Mapping[int, str]) -> tuple[str, str]:
    """The directory of the step that is marked, or of the last one, and a note.

    Raises IncompleteError for a mark that leads nowhere.
    """
    if _MARK not in listing.names:
        name = steps[max(steps)]
        return name, f"{name} is read: the last of {len(steps)}"
    with open_file(listing.path(_MARK)) as f:
        said = f.pread(32, 0).decode("utf-8", "replace").strip()
    if not said.isdecimal() or int(said) not in steps:
        raise IncompleteError(
            f"{_MARK} says `{printable(said)}`, and there is no such save",
            where=str(listing.path(_MARK)),
            hint=f"give the directory of a save: {some(list(steps.values()))}",
        )
    name = steps[int(said)]
    return name, f"{name} is read: {_MARK} names it"
