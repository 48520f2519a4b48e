"""Directories of several checkpoints: the saves of a training run, by step.

    run/step-1000/, run/step-2000/, run/latest     one save for each step, perhaps a file or a link that names one
    run/checkpoints/epoch=3-step=1000.ckpt         ... or files, or all of it one level further down

Names and small files alone: what a save holds, and whether it is complete, is for those who open it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from ckpttool.core.files import Place
from ckpttool.core.words import natural
from ckpttool.errors import UsageError
from ckpttool.storage.listing import Listing
from ckpttool.storage.place import is_link, open_file, scan

_STEPS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"(?:global_?)?steps?[-_=]?(\d{1,18})",
        r"iter(?:ation)?s?[-_=]?(\d{1,18})",
        r"(?:\A|[-_])ba(\d{1,18})(?=[-_.]|\Z)",
        r"(?:checkpoint|ckpt)_\d{1,9}_(\d{1,18})",
        r"(?:checkpoint|ckpt)[-_=]?(\d{1,18})",
        r"epochs?[-_=]?(\d{1,18})",
        r"\A(\d{1,18})\Z",
    )
)
"""Patterns of the step in a name, the surest first: Lightning's and NeMo's have the epoch in front of it."""
_SAVE = re.compile(
    r"(?:tmp[-_.])?(?:checkpoint|ckpt|(?:global_?)?step|iter|epoch)[-_=]?\d{1,18}(?:[-_.].*)?|.*(?:step|epoch)=\d{1,18}.*",
    re.IGNORECASE,
)
"""Names that nobody but a trainer gives to directories."""
_RANK = re.compile(r".*(?:rank|tp|pp|ep|mp|node|shard|part|stage)[-_]?\d+", re.IGNORECASE)
_UNFINISHED = re.compile(r"(?:\A|[-_.])(?:tmp|temp|partial|incomplete|unfinished)(?:[-_.]|\Z)", re.IGNORECASE)
_FILES = (".ckpt", ".pt", ".pth", ".nemo", ".pdparams", ".gguf")
_INSIDE = ("checkpoints", "checkpoint", "ckpts", "ckpt")
_POINTER = re.compile(r"latest\w*(?:\.txt)?|last_checkpoint(?:\.txt)?")
_LAST = re.compile(r"(?:latest|last)(?:[-_.].*)?|.*[-_]last(?:\.\w+)?")
_MOST = 10_000
"""Directories that are looked at by their names."""
_STRANGERS = 200
"""Directories without a save's name that are looked into at most: SRC may be somebody's home."""


_LAST_WRITTEN = ("trainer_state.json", ".checkpoint_done")
"""Files that trainers (transformers, PaddleFormers) write last."""


class RunSave(NamedTuple):
    """One checkpoint of several."""

    name: str
    """Below the run, with slashes."""
    place: Place
    step: int | None
    format: str
    """The one that its names show; "" where they show none."""
    unfinished: bool
    """Its name says so."""


class TrainingRun(NamedTuple):
    """The saves in one directory."""

    root: Place
    saves: tuple[RunSave, ...]
    """Saves by step; those without one come last."""
    pointer: str = ""
    """The file, or the link, that names the save from which a trainer goes on."""
    marked: str = ""
    """The name of that save; "" where it is not here."""


class RunError(UsageError):
    """A directory of several checkpoints where one is needed."""


def step_of(name: str) -> int | None:
    """The step that the name of a save says; the epoch where it says nothing else, None where it says neither."""
    for pattern in _STEPS:
        if found := pattern.findall(name):
            return int(found[-1])
    return None


def names_in(place: Place) -> set[str]:
    """The files directly in a checkpoint; none where it is a file itself, or has gone."""
    try:
        return {e.name for e in scan(place) if e.is_file()} if place.is_dir() else set()
    except OSError:
        return set()


def unwritten(names: Collection[str], others: Sequence[Collection[str]]) -> list[str]:
    """Last-written files that a save lacks and another save of its run has."""
    return [m for m in _LAST_WRITTEN if m not in names and any(m in n for n in others)]


def named_saves(listing: Listing) -> list[str]:
    """The directories that are saves by their names alone."""
    return [f for f in listing.folders() if _SAVE.fullmatch(f)]


def find(listing: Listing, recognise: Callable[[Listing], str]) -> TrainingRun:
    """The checkpoints in a directory, whether or not it is one itself; ``recognise`` says the format of one."""
    run = _here(listing, recognise)
    if run.saves or listing.single:
        return run
    for inner in [f for f in listing.folders() if f in _INSIDE]:
        below = _here(listing.inside(inner), recognise)
        if below.saves:
            saves = [s._replace(name=f"{inner}/{s.name}") for s in below.saves]
            return TrainingRun(listing.root, tuple(saves), *(f"{inner}/{x}" if x else "" for x in below[2:]))
    return run


def is_run(run: TrainingRun) -> bool:
    """Whether these are checkpoints of their own, and not the ranks of one, or empty directories."""
    if not any(s.format for s in run.saves):
        return False
    names = [s.name.rpartition("/")[2] for s in run.saves]
    if any(map(_SAVE.fullmatch, names)):
        return True
    ranks = all(map(_RANK.fullmatch, names)) or sorted(names) == sorted(map(str, range(len(names))))
    return not ranks and (len(names) > 1 or any(s.step is not None for s in run.saves))


def _here(listing: Listing, recognise: Callable[[Listing], str]) -> TrainingRun:
    if listing.single:
        return TrainingRun(listing.root, ())
    folders = listing.folders()[:_MOST]
    links = {f: to for f in folders if (to := _link_target(listing.root, f)) in folders}
    own = {f: None for f in folders if f not in links and _SAVE.fullmatch(f.lstrip("."))}
    others = [f for f in folders if f not in links and f not in own and not f.startswith(".")][:_STRANGERS]
    found = []
    for name in (*own, *others):
        kind = recognise(listing.inside(name))
        if kind or name in own:
            found.append(RunSave(name, listing.root / name, step_of(name), kind, bool(_UNFINISHED.search(name))))
    found += _files(listing, recognise)
    found.sort(key=lambda s: (s.step is None, s.step or 0, natural(s.name)))
    return TrainingRun(listing.root, tuple(found), *_marked(listing, found, links))


def _files(listing: Listing, recognise: Callable[[Listing], str]) -> list[RunSave]:
    """Files that are a checkpoint each: Lightning's, NeMo's. One alone may be the weights of the directory itself."""
    names = [n for n in listing.names if n.endswith(_FILES) and not _RANK.search(n)]
    if sum(step_of(n) is not None for n in names) < 2:
        return []
    return [
        RunSave(n, listing.path(n), step_of(n), recognise(Listing(listing.root, (n,), n)), bool(_UNFINISHED.search(n)))
        for n in names
        if step_of(n) is not None or _LAST.fullmatch(n)
    ]


def _link_target(root: Place, name: str) -> str:
    """The name in the same directory to which a link leads; "" for anything else."""
    place = root / name
    if not is_link(place):
        return ""
    real = Path(os.path.realpath(place))
    return real.name if str(real.parent) == os.path.realpath(str(root)) else ""


def _marked(listing: Listing, saves: Sequence[RunSave], links: dict[str, str]) -> tuple[str, str]:
    """The file or link that says from which save a trainer goes on, and the name of that save."""
    for file in [n for n in listing.names if _POINTER.fullmatch(n)]:
        try:
            with open_file(listing.path(file)) as f:
                said = f.pread(4096, 0).decode("utf-8", "replace").strip().rstrip("/").rpartition("/")[2]
        except OSError:
            continue
        meant = [s.name for s in saves if s.name == said or (said.isdecimal() and s.step == int(said[:18]))]
        return file, meant[0] if meant else ""
    for link, to in links.items():
        if _LAST.fullmatch(link):
            return link, to
    if lasts := [s.name for s in saves if _LAST.fullmatch(s.name)]:
        return lasts[-1], lasts[-1]
    return "", ""
