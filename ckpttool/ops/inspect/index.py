"""``ckpttool inspect DIR --write-index``: the index files of a directory, made from the headers of its shards.

What an index says beside ``weight_map`` and ``total_size`` stays as it is, for no header knows it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpttool.answers.index_checks import counted
from ckpttool.containers.index import (
    NUMBERED,
    IndexRules,
    Settled,
    gaps,
    set_of,
    shard_name,
    total_size,
)
from ckpttool.containers.safetensors import Header, read_header
from ckpttool.core.catalog import StoredTensor
from ckpttool.core.files import Place
from ckpttool.core.words import natural
from ckpttool.errors import CkptError, ConflictError, IncompleteError, OutputError, UsageError
from ckpttool.execute.durable import replace_all, resolved
from ckpttool.formats.base import ReadOptions
from ckpttool.formats.registry import choose
from ckpttool.ops.inspect.index_groups import IndexGroup, chosen_files, find_groups
from ckpttool.storage.listing import Listing, list_source
from ckpttool.storage.place import local_path, read_all

WRITTEN, RIGHT, NONE_NEEDED = "written", "right", "none needed"

THREADS = 8
"""Threads that read headers: they wait for the disk, not for each other."""


@dataclass(frozen=True, slots=True)
class IndexState:
    """One index, or a set of files that has none."""

    name: str
    """File name, also of one that is not needed."""
    shards: tuple[str, ...]
    tensors: int
    """Names that the shards hold."""
    total_size: int | None
    """As the index says it; None where it says none."""
    state: str
    """``written``, ``right`` or ``none needed``."""
    changes: tuple[str, ...] = ()
    """What was wrong with the old one."""
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class IndexResult:
    """All indexes of a directory."""

    path: Place
    dry_run: bool
    """Nothing was written; ``written`` is what would be."""
    indexes: list[IndexState] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def written(self) -> int:
        """How many were written, or would be."""
        return sum(i.state == WRITTEN for i in self.indexes)


def rebuild(directory: Place, *, dry_run: bool = False) -> IndexResult:
    """Bring the indexes of a directory in line with the headers of its shards; those that are right stay untouched.

    All are planned before the first is written, and each is replaced at once. Raises UsageError (no directory),
    IncompleteError (shards are missing), CorruptError (a header is broken), UnsupportedError (a dtype is not known),
    ConflictError (a tensor in two shards, shards of two sets), OutputError; then nothing was written.
    """
    listing, groups, others = _look(directory)
    result = IndexResult(directory, dry_run)
    if others:
        result.notes.append(_left_alone(others))
    kept, notes = [], []
    for g in groups:
        names, said = _members(g)
        kept.append(names)
        notes.append(said)
    wanted = list(dict.fromkeys(n for g, names in zip(groups, kept, strict=True) for n in (*names, *g.ranked)))
    with ThreadPoolExecutor(THREADS) as pool:
        heads = dict(zip(wanted, pool.map(lambda n: read_header(listing.path(n)), wanted), strict=True))
    tensors = {n: head.tensors for n, head in heads.items()}
    files: dict[Path, bytes] = {}
    for g, names, said in zip(groups, kept, notes, strict=True):
        state, data = _plan(g, names, tensors, said)
        result.indexes.append(state)
        if data is not None:
            files[_inside(g)] = data
    if files and not dry_run:
        _unchanged(heads, groups)
        replace_all(files)
    return result


def _look(directory: Place) -> tuple[Listing, list[IndexGroup], list[str]]:
    """The sets of files, and the files that are in none. Raises UsageError when there is nothing to index."""
    if directory.is_file():
        raise UsageError("this is a file", where=str(directory), hint="give the directory that holds the shards")
    listing = list_source(directory)
    groups, others = find_groups(listing, _rules(listing))
    if not groups and not others:
        raise UsageError("there are no safetensors files here", where=str(directory))
    if not groups:
        raise UsageError(
            "there is no index here, and no shard that one could name",
            where=[str(directory), *others[:3]],
            hint="shards are called PREFIX-00001-of-00004.safetensors; `ckpttool check FILE` checks a file",
        )
    return listing, groups, others


def _rules(listing: Listing) -> IndexRules:
    """The rules for indexes, by the names of the files; Hugging Face's where they show no other format's."""
    try:
        found = choose(listing, "", ReadOptions()).capabilities.indexes
    except CkptError:
        return IndexRules()
    return found if found and found.stems else IndexRules()


def _left_alone(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"{names[0]} is not a shard and in no index; left alone"
    return f"{len(names)} files are not shards and in no index ({names[0]}, ...); left alone"


def _members(g: IndexGroup) -> tuple[list[str], list[str]]:
    """The files that an index is to speak of, and notes. Raises IncompleteError, ConflictError."""
    listing, root = g.listing, str(g.listing.root)
    named = set(g.mapped.values())
    notes: list[str] = []
    if g.files and g.ranked:
        raise ConflictError(
            f"merged {g.stem} files and {g.stem} files of ranks lie in one directory",
            where=[str(listing.path(g.files[0])), str(listing.path(g.ranked[0]))],
            hint="move those away that do not belong to this save",
        )
    sets = g.numbered
    totals = sorted(t for s, t in sets if s == g.stem)
    if len(totals) > 1:
        raise ConflictError(
            f"shards of {len(totals)} sets lie in one directory",
            where=[root, *(f"{g.stem}-*-of-{t:05d}.safetensors" for t in totals)],
            hint="move all but one set away",
        )
    names = g.files
    single = [n for n in names if not NUMBERED.match(n)]
    own = f"{g.stem}.safetensors"
    if own in single and sets:
        if own in named and not any(NUMBERED.match(n) for n in named):
            left, names = [n for n in names if NUMBERED.match(n)], single
            sets = {}
        elif named & set(names) and own not in named:
            left, names = [own], [n for n in names if n != own]
        else:
            raise ConflictError(
                f"{own} and numbered shards of it lie in one directory",
                where=[str(listing.path(own)), str(listing.path(next(n for n in names if NUMBERED.match(n))))],
                hint="move one of the two away",
            )
        notes.append(f"{left[0]}{' and others are' if len(left) > 1 else ' is'} not in the index; left out")
    for (stem, total), parts in sets.items():
        beyond = [p for p in parts if not 1 <= p <= total]
        if beyond:
            raise ConflictError(
                f"there is a shard {max(beyond)} of {total}",
                where=str(listing.path(shard_name(stem, max(beyond), total))),
                hint="move it away, or give it its number",
            )
        lost = gaps(total, parts)
        # An asynchronous save writes no file for a rank that holds nothing, and its index names none.
        if g.rules.runs and named & set(names):
            empty = [i for i in lost if shard_name(stem, i, total) not in named]
            if empty:
                notes.append(f"{len(empty)} of {total} files are not there, and the index names none of them")
            lost = [i for i in lost if i not in empty]
        if lost:
            raise IncompleteError(
                f"{len(lost)} of {total} shards are missing: {shard_name(stem, lost[0], total)}",
                where=root,
                hint="fetch the missing files; an index is only made of a whole set",
            )
    if not names and not g.ranked:
        what = f"none of the {len(named)} files that {g.index} names is there: {min(named)}" if named else ""
        raise IncompleteError(
            what or f"there is {g.index}, and no file that it could be of",
            where=root,
            hint="fetch the missing files, or remove the index",
        )
    return names, notes


def _plan(
    g: IndexGroup, names: Sequence[str], tensors: Mapping[str, Sequence[StoredTensor]], notes: list[str]
) -> tuple[IndexState, bytes | None]:
    """What is to become of one index, and its bytes if it is to be written. Raises ConflictError, IncompleteError.

    ``tensors`` are those of all files.
    """
    if g.ranked:
        return _plan_ranked(g, tensors, notes)
    own = {n: tensors[n] for n in names}
    chosen = chosen_files(g, own)
    if chosen.refused:
        name, held = next(iter(chosen.refused.items()))
        more = f" (and {len(chosen.refused) - 1} more)" if len(chosen.refused) > 1 else ""
        raise ConflictError(
            f"tensor `{name}` is in {len(held)} shards{more}",
            where=[str(g.listing.path(n)) for n in held],
            hint="remove the stale shard, or the stale copies with `ckpttool drop-keys`",
        )
    if chosen.copies:
        name, held = next(iter(chosen.copies.items()))
        text = f"{len(chosen.copies)} tensors are in several files: `{name}` in {' and '.join(held)}"
        notes.append(f"{text}; the index names {chosen.mapping[name]}")
    if g.raw is None and not any(map(set_of, names)):
        return IndexState(g.index, tuple(names), len(chosen.mapping), None, NONE_NEEDED, (), tuple(notes)), None
    _refuse_lost(g, chosen.mapping, names, notes)
    settled = Settled(chosen.mapping, sum(t.nbytes for t in counted(own, g.rules)), {}, [])
    settled = g.rules.settle(g.listing, g.stem, g.old, settled, names, tensors)
    return _state(g, names, len(chosen.mapping), settled.total, _new_index(g, settled), [*notes, *settled.notes])


def _plan_ranked(
    g: IndexGroup, tensors: Mapping[str, Sequence[StoredTensor]], notes: list[str]
) -> tuple[IndexState, bytes | None]:
    """Files of ranks, of whose index the rules know."""
    names = {t.name for n in g.ranked for t in tensors[n]}
    new = g.rules.of_ranks(g.stem, g.old, names, max(g.rules.of_rank(n)[1] for n in g.ranked))
    if new is None:
        state = NONE_NEEDED if g.old is None else RIGHT
        return IndexState(g.index, tuple(g.ranked), len(names), None, state, (), tuple(notes)), None
    if "weight_map" in g.data:
        raise ConflictError(
            f"{g.index} has a weight_map, and the files are those of ranks: {g.ranked[0]}",
            where=str(g.path),
            hint="the index is of another save: move it away",
        )
    notes.append("each rank wrote files of its own: the index has no weight_map")
    return _state(g, g.ranked, len(names), None, new, notes)


def _state(
    g: IndexGroup, names: Sequence[str], tensors: int, total: int | None, new: Mapping[str, Any], notes: Sequence[str]
) -> tuple[IndexState, bytes | None]:
    changes = _changes(g, new)
    state = WRITTEN if changes else RIGHT
    found = IndexState(g.index, tuple(names), tensors, total, state, tuple(changes), tuple(notes))
    return found, _encode(g, new) if changes else None


def _refuse_lost(g: IndexGroup, mapping: Mapping[str, str], names: Sequence[str], notes: list[str]) -> None:
    """A file that the index names and that is not there may hold what no other file does."""
    missing = sorted({f for f in g.mapped.values() if f not in names and f not in g.listing.names}, key=natural)
    if not missing:
        return
    lost = [n for n, f in g.mapped.items() if f in missing and n not in mapping]
    if lost:
        raise IncompleteError(
            f"{missing[0]} is missing: the index names it for `{lost[0]}`"
            + (f" and {len(lost) - 1} more tensors" if len(lost) > 1 else "")
            + ", which no shard holds",
            where=str(g.path),
            hint="fetch the file; or remove the index, when these tensors are really gone",
        )
    notes.append(f"the index named {missing[0]}, which is not there; all of its tensors are in other files")


def _new_index(g: IndexGroup, settled: Settled) -> dict[str, Any]:
    """The index as it should be, in the order of the old one."""
    old, mapping = g.mapped, settled.mapping
    listed = list(old)
    if listed and listed != sorted(listed):
        order = [*(n for n in old if n in mapping), *sorted(n for n in mapping if n not in old)]
    else:
        order = sorted(mapping)
    metadata = g.data.get("metadata")
    new = {
        **g.data,
        "metadata": {**(metadata if isinstance(metadata, dict) else {}), "total_size": settled.total},
        "weight_map": {n: mapping[n] for n in order},
        **settled.fields,
    }
    if g.data.keys() & {"metadata", "weight_map"}:
        return new
    return {"metadata": new.pop("metadata"), "weight_map": new.pop("weight_map"), **new}


def _changes(g: IndexGroup, new: Mapping[str, Any]) -> list[str]:
    """What is to be mended; [] when the old index says the same."""
    if g.raw is None:
        return ["there was none"]
    if g.broken:
        return [g.broken]
    if dict(g.data) == dict(new):
        return []
    out = []
    old, mapping = g.data.get("weight_map"), new.get("weight_map", {})
    if mapping and not g.mapped:
        out.append("it had no weight_map" if old is None else "its weight_map could not be used")
    elif isinstance(old, dict):
        for text, found in (
            ("{} not in it", [n for n in mapping if n not in old]),
            ("{} in no shard", [n for n in old if n not in mapping]),
            ("{} in another shard", [n for n in mapping if n in old and old[n] != mapping[n]]),
        ):
            if found:
                some = f"{len(found)} tensors were" if len(found) > 1 else "1 tensor was"
                out.append(text.format(some) + f": `{found[0]}`")
    if g.data.get("metadata") != new.get("metadata"):
        said, real = total_size(g.data), total_size(new)
        out.append(f"total_size was {'missing' if said is None else f'{said:,}'}, it is {real:,}")
    out += [
        f"{k} was {json.dumps(g.data[k]) if k in g.data else 'missing'}"
        for k in new
        if k not in ("metadata", "weight_map") and g.data.get(k, new) != new[k]
    ]
    return out


def _encode(g: IndexGroup, new: Mapping[str, Any]) -> bytes:
    """The index in the style of the old one, else in that of its software."""
    if g.raw is None or g.broken:
        return (json.dumps(new, indent=g.rules.indent, ensure_ascii=False) + g.rules.end).encode()
    m = re.match(rb"\s*\{[^\S\n]*\n([ \t]*)\S", g.raw)
    indent = m[1].decode() if m else None
    text = json.dumps(new, indent=indent, ensure_ascii=rb"\u" in g.raw)
    return (text + ("\n" if g.raw.endswith(b"\n") else "")).encode()


def _inside(g: IndexGroup) -> Path:
    """The index, or the file of this directory that it is a link to. Raises OutputError for one of another place."""
    path = local_path(g.path)
    real = resolved(path)
    if not real.is_relative_to(resolved(path.parent)):
        raise OutputError(
            "the index is a link out of the directory, and what it leads to is not written",
            where=[str(path), str(real)],
            hint="remove the link",
        )
    return path


def _unchanged(heads: Mapping[str, Header], groups: Iterable[IndexGroup]) -> None:
    """Raises ConflictError when a file is no longer the one that was read."""
    for head in heads.values():
        if not head.file.is_unchanged():
            raise ConflictError("a shard changed while it was read", where=str(head.file.place), hint="try again")
    for g in groups:
        try:
            raw = read_all(g.path)
        except OSError:
            raw = None
        if raw != g.raw:
            raise ConflictError("the index changed during the run", where=str(g.path), hint="try again")
