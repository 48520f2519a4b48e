"""The directory of a run of Megatron-LM, and which of its saves is meant.

    run/latest_checkpointed_iteration.txt    1000, or release
    run/iter_0000500/, run/iter_0001000/     a save of each kind has its own files in it
    run/release/                             one that a converter wrote

Source: megatron/training/checkpointing.py of Megatron-LM.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from ckpttool.containers.pickle import printable
from ckpttool.core.files import Place
from ckpttool.core.words import some
from ckpttool.errors import IncompleteError
from ckpttool.formats import base
from ckpttool.storage.listing import Listing, list_source
from ckpttool.storage.place import open_file

POINTER = "latest_checkpointed_iteration.txt"
_SAVE = re.compile(r"iter_(?P<number>\d{1,18})|release")


class MegatronSave(NamedTuple):
    """A save of a run."""

    listing: Listing
    """Its own directory."""
    beside: Listing
    """The directory of config.json and other small files: the run's, or the save's own."""
    notes: list[str]


def saves(listing: Listing) -> list[str]:
    """Names of the saves of any kind directly below a directory, ``release`` first."""
    found = {n: int(m["number"] or -1) for n in listing.folders() if (m := _SAVE.fullmatch(n))}
    return sorted(found, key=lambda n: found[n])


def other_iteration(listing: Listing, said: Any) -> list[str]:
    """A note where the directory of a save is called by another iteration than its files are of: somebody renamed it,
    or put files of two saves together."""
    m = _SAVE.fullmatch(listing.root.name)
    if m is None or m["number"] is None or type(said) is not int or int(m["number"]) == said:
        return []
    return [f"the directory is called {listing.root.name}, and its files are of iteration {said}"]


def chosen(listing: Listing) -> Listing | None:
    """The save of the run at ``listing`` that is meant: the one that is marked, else the last; None where there is
    none, or the mark leads nowhere."""
    here = saves(listing)
    name = _marked(listing, here) if POINTER in listing.names else here[-1] if here else ""
    return listing.inside(name) if name else None


def find(listing: Listing, *, is_save: bool) -> MegatronSave:
    """The save at a source, which ``is_save`` says is one itself, or the one of the run there that is meant.

    Raises IncompleteError for a mark that leads nowhere, and where there is no save.
    """
    if is_save:
        above = listing.root.parent
        if "config.json" not in listing.names and (above / "config.json").is_file():
            return MegatronSave(listing, list_source(above), ["config.json is read from the parent directory"])
        return MegatronSave(listing, listing, [])
    here = saves(listing)
    found = chosen(listing)
    if found is None:
        raise IncompleteError(
            f"{POINTER} names `{printable(_pointer_text(listing), 60)}`, which is not here"
            if POINTER in listing.names
            else "there is no save here",
            where=[str(listing.path(POINTER) if POINTER in listing.names else listing.root)],
            hint=f"give the directory of a save: {some([str(listing.root / n) for n in reversed(here)], 2)}"
            if here
            else "fetch the directories beside it (iter_0001000)",
            finding="latest",
        )
    name, others = found.root.name, [n for n in here if n != found.root.name]
    why = f"`{POINTER}` names the save: {name}" if POINTER in listing.names else f"{name} is read, the only save here"
    if others and POINTER in listing.names:
        why += f"; {some(others)} {'is' if len(others) == 1 else 'are'} here too"
    elif others:
        why = f"{name} is read, the last of {len(here)} saves; there is no `{POINTER}`"
    own = "config.json" in found.names and "config.json" not in listing.names
    return MegatronSave(found, found if own else listing, [why])


def small_files(save: MegatronSave, own: Iterable[str]) -> tuple[Place, tuple[str, ...], list[str]]:
    """The directory of the small files beside a save, their names, and notes about what is not carried.

    ``own`` are names of the save's own files and directories.
    """
    skip = {*own, POINTER}
    carried, notes = base.companions(save.beside, skip)
    if save.listing.root != save.beside.root:
        inner, more = base.companions(save.listing, skip)
        notes += more
        folders = [f"{n}/" for n in save.listing.folders() if n not in skip]
        if left := [f"{save.listing.root.name}/{n}" for n in (*inner, *folders)]:
            notes.append(f"not copied, they belong to one save: {some(left)}")
    return save.beside.root, carried, notes


def config_of(save: MegatronSave) -> dict[str, Any]:
    """config.json beside a save; {} where there is none."""
    return save.beside.json("config.json")


def _marked(listing: Listing, here: list[str]) -> str:
    """The save that the mark names; "" where it is not there."""
    said = _pointer_text(listing)
    name = f"iter_{int(said):07d}" if said.isdecimal() and said.isascii() else said
    return name if name in here else ""


def _pointer_text(listing: Listing) -> str:
    with open_file(listing.path(POINTER)) as f:
        return f.pread(64, 0).decode("utf-8", "replace").strip()
