"""The checkpoints of a run: which steps there are, how large, in which format and mesh, and which are complete.

Complete is a checkpoint whose headers are read and fit together, and that has what its trainer writes last. Headers
are opened of each; elsewhere than on this machine, where that takes requests, one that has the files of another, in
the same sizes, is taken to be like it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from ckpttool.answers.findings import ERROR, SEVERITY
from ckpttool.core.files import AnyPlace, DataFile, Place
from ckpttool.core.mesh import Mesh
from ckpttool.core.words import count, natural, some
from ckpttool.errors import CkptError, ConflictError, CorruptError, IncompleteError, UsageError
from ckpttool.formats.base import OpenOptions, StoredCheckpoint
from ckpttool.formats.registry import run_at
from ckpttool.formats.runs import RunSave, TrainingRun, named_saves, names_in, unwritten
from ckpttool.ops.inspect.listing import mesh_text, sharding_of
from ckpttool.ops.inspect.source import read
from ckpttool.storage.listing import WEIGHTS, list_source
from ckpttool.storage.place import FileInFolder, files_in, parse_place, scan

_BROKEN = (IncompleteError, CorruptError, ConflictError)
"""What is wrong with a checkpoint that is not complete; anything else is not known to be wrong."""
_SIGNAL = re.compile(r"saved_signal_\d{1,6}")
"""Of each rank of a trainer of Paddle."""


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint of a run."""

    name: str
    """Below the run."""
    step: int | None
    nbytes: int
    """Of all its files."""
    files: int
    saved: float | None
    """Seconds since 1970 of its last change; None where that is not known."""
    format: str = ""
    """"" where none is recognised."""
    mesh: str = ""
    """The ranks that wrote it, in words; "" for whole tensors, and where that is not known."""
    world: Mesh | None = None
    sharding: int = 1
    components: tuple[str, ...] = ()
    complete: bool | None = None
    """None where it could not be found out: a format that is not read, no permission."""
    why: str = ""
    """What is missing, or why that is not known."""

    @property
    def optimizer(self) -> bool:
        """Whether it has the optimizer's state."""
        return "optimizer" in self.components


class RunListing(NamedTuple):
    """What lies in the directory of a run."""

    path: Place
    rows: list[SavedCheckpoint]
    """By step; those whose names say none come last."""
    resume: str
    """The checkpoint from which training goes on; "" for none."""
    because: str
    """Who says so."""
    notes: list[str]
    ok: bool = True


def list_run(src: AnyPlace, options: OpenOptions) -> RunListing:
    """The checkpoints in a directory. Raises UsageError where there is no such directory, or none in it."""
    path = parse_place(src)
    run = run_at(path)
    if not run.saves:
        raise UsageError(
            "no checkpoints in this directory",
            where=str(path),
            hint="--checkpoints lists those of a run: step-1000, checkpoint-500, iter_0001000, ...",
        )
    rows, notes = [], []
    alike: dict[object, SavedCheckpoint] = {}
    for save in run.saves:
        row = _row(save, options, alike)
        if row is None:
            notes.append(f"{save.name} disappeared while the checkpoints were listed")
        else:
            rows.append(row)
    rows = _with_marks(run, rows)
    resume, because = _resume(run, rows)
    return RunListing(path, rows, resume, because, [*notes, *_warnings(run, rows, resume)])


def pick_save(src: AnyPlace, name: str) -> Place:
    """The checkpoint of a run that a name, a step or a path means. Raises UsageError for none."""
    path = parse_place(src)
    inside = path / name
    if name and inside.exists():
        return inside
    if name.isdecimal():
        same = [s.place for s in run_at(path).saves if s.step == int(name[:18])]
        if len(same) == 1:
            return same[0]
    plain = parse_place(name)
    if plain.exists():
        return plain
    names = [s.name for s in run_at(path).saves]
    raise UsageError(
        f"no checkpoint `{name}` here",
        where=str(path),
        hint=f"its checkpoints: {some(names, 6)}" if names else "give two paths: ckpttool diff A B",
    )


def sibling(src: AnyPlace, name: AnyPlace) -> Place | None:
    """The checkpoint of the run that SRC is in that a name or a step means; None where it means another place, or
    none."""
    if not isinstance(name, str) or "/" in name or parse_place(name).exists():
        return None
    try:
        return pick_save(parse_place(src).parent, name)
    except CkptError:
        return None


def _row(save: RunSave, options: OpenOptions, alike: dict[object, SavedCheckpoint]) -> SavedCheckpoint | None:
    """What is known of one; None when it has gone."""
    held = files_in(save.place)
    if not held and not save.place.exists():
        return None
    times = [h.time for h in held if h.time is not None]
    row = SavedCheckpoint(
        save.name, save.step, sum(h.size for h in held), len(held), max(times, default=None), save.format
    )
    if not held:
        return _without_files(row, save.place)
    key = None if isinstance(save.place, Path) else _form(save, held)
    if key in alike:
        like = alike[key]
        return replace(like, **{n: getattr(row, n) for n in ("name", "step", "nbytes", "files", "saved")})
    row = _opened(row, save, options)
    if row.why and not save.place.exists():
        return None
    if save.unfinished:
        row = replace(row, complete=False, why="its name says that it is being written, or was left unfinished")
    elif row.complete and key is not None:
        alike[key] = row
    return row


def _without_files(row: SavedCheckpoint, place: Place) -> SavedCheckpoint:
    try:
        list(scan(place))
    except OSError as e:
        return replace(row, why=f"it cannot be listed: {e.strerror}")
    return replace(row, complete=False, why="it is empty")


def _form(save: RunSave, held: Iterable[FileInFolder]) -> object:
    """Equal for checkpoints of one run that have the same files, those with tensors or indexes in the same sizes."""
    step = str(save.step)
    sized = (*WEIGHTS, ".metadata", ".index.json")
    return tuple((h.name.replace(step, "#"), h.size if h.name.endswith(sized) else 0) for h in held)


def _opened(row: SavedCheckpoint, save: RunSave, options: OpenOptions) -> SavedCheckpoint:
    try:
        stored = read(save.place, options)
    except _BROKEN as e:
        return replace(row, complete=False, why=_briefly(e.what))
    except CkptError as e:
        strange = not save.format and not options.format and save.place.is_dir()
        return replace(row, complete=False if strange else None, why=_briefly(e.what))
    except OSError as e:  # it goes, or changes, while it is read
        return replace(row, complete=False, why=f"it cannot be read: {e.strerror}")
    wrong = [text for name, text, _ in stored.findings if SEVERITY[name] == ERROR]
    return replace(
        row,
        format=stored.format,
        mesh=mesh_text(stored) if stored.mesh.world > 1 or stored.cut or sharding_of(stored) > 1 else "",
        world=stored.mesh,
        sharding=sharding_of(stored),
        components=_components(stored),
        complete=not wrong,
        why=wrong[0] if wrong else "",
    )


def _briefly(what: str) -> str:
    """Without how many more problems there are: they are asked for with --check."""
    return what.partition(" (and ")[0]


def _components(stored: StoredCheckpoint) -> tuple[str, ...]:
    """What it has, also what only opening it as a whole would give to its parameters, or cannot be read."""
    keys = stored.recorded.tensors if stored.recorded is not None else ()
    found = {t.component for t in stored.tensors} | {k.component for k in keys} | {k.component for k in stored.dtypes}
    found |= set(stored.refused) | ({"optimizer"} if stored.unnamed is not None else set())
    return tuple(sorted(found))


def _with_marks(run: TrainingRun, rows: list[SavedCheckpoint]) -> list[SavedCheckpoint]:
    """Steps that lack what their trainer writes last, and what others of the run have, are not complete.

    Others than steps may be models alone: the final one, or the one that training began with.
    """
    places = {s.name: s.place for s in run.saves}
    names = {r.name: names_in(places[r.name]) for r in rows if r.complete and r.step is not None}
    signals: dict[tuple[str, int], set[str]] = {}
    for row in rows:
        signals.setdefault((row.mesh, row.sharding), set()).update(filter(_SIGNAL.fullmatch, names.get(row.name, ())))
    out = []
    for row in rows:
        have = names.get(row.name, set())
        others = [n for n in names.values() if n is not have]
        lost = unwritten(have, others) + sorted(signals[row.mesh, row.sharding] - have, key=natural)
        why = f"{lost[0]} is missing, which its trainer writes last and others here have" if have and lost else ""
        out.append(replace(row, complete=False, why=why) if why else row)
    return out


def _resume(run: TrainingRun, rows: Sequence[SavedCheckpoint]) -> tuple[str, str]:
    """The checkpoint from which training goes on, and who says so."""
    if run.marked:
        return run.marked, run.pointer
    newest = [r for r in rows if r.complete and r.step is not None][-1:]
    return (newest[0].name, "the newest that is complete") if newest else ("", "")


def _warnings(run: TrainingRun, rows: Sequence[SavedCheckpoint], resume: str) -> list[str]:
    out = []
    by_name = {r.name: r for r in rows}
    if run.pointer and run.marked not in by_name:
        out.append(f"{run.pointer} names a checkpoint that is not here")
    if run.marked in by_name and by_name[run.marked].complete is False:
        whole = [r.name for r in rows if r.complete and r.step is not None]
        newest = f"; the newest that is complete is {whole[-1]}" if whole else ""
        out.append(f"{run.pointer} names {run.marked}, which is not complete{newest}")
    last = next((r for r in reversed(rows) if r.step is not None), None)
    if not run.pointer and last is not None and last.complete is False and resume:
        out.append(f"{last.name} is not complete: a trainer that takes the highest step would resume from it")
    return out


def other_saves(path: Place, read: Iterable[DataFile]) -> list[str]:
    """A note where the files that were read are one of several checkpoints at ``path``."""
    source = list_source(path)
    saves = [] if source.single else named_saves(source)
    own = any(f.place.parent == source.root for f in read)
    if len(saves) + own < 2:
        return []
    lie = "lies" if len(saves) == 1 else "lie"
    return [f"{count(len(saves), 'checkpoint')} of a run {lie} here: `ckpttool inspect RUN --checkpoints` lists them"]
