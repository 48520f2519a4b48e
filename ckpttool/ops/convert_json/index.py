"""``ckpttool convert-json --index``: the index files of a directory, made or checked from the headers of its shards.

An index belongs to the files of one stem: ``model-00001-of-00004.safetensors`` and its fellows to
``model.safetensors.index.json``; the components of a unified checkpoint of Paddle's have one each. What an index says
beside ``weight_map`` and ``total_size`` stays as it is, for no header knows it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ckpttool.answers.findings import CheckResult
from ckpttool.answers.index_checks import (
    ExaminedFile,
    check_duplicates,
    check_mapping,
    check_numbers,
    counted,
    parse_index,
)
from ckpttool.containers.index import (
    LOADED,
    NUMBERED,
    IndexRules,
    Sets,
    Settled,
    gaps,
    index_name,
    is_member,
    misplaced,
    set_of,
    sets_of,
    shard_name,
    stem_of_index,
    total_size,
    weight_map,
)
from ckpttool.containers.safetensors import Header, examine, read_header
from ckpttool.core.catalog import StoredTensor
from ckpttool.core.files import Place
from ckpttool.core.words import natural
from ckpttool.errors import CkptError, ConflictError, CorruptError, IncompleteError, OutputError, UsageError
from ckpttool.formats.base import ReadOptions
from ckpttool.formats.registry import READERS, choose
from ckpttool.ops.convert_json.durable import replace_all, resolved
from ckpttool.storage.listing import Listing, list_source
from ckpttool.storage.place import local_path, read_all

WRITTEN, RIGHT, NONE_NEEDED = "written", "right", "none needed"

THREADS = 8
"""Threads that read headers: they wait for the disk, not for each other."""

_SINGLE = {*LOADED, "adapter_model", *(s for f in READERS.values() if (i := f.capabilities.indexes) for s in i.stems)}
"""Stems of which a file without a number is a whole set."""
_ANEW = "`ckpttool convert-json --index` rebuilds it"


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


@dataclass(slots=True)
class _IndexGroup:
    """An index and the files that it is, or would be, about."""

    listing: Listing
    rules: IndexRules
    stem: str
    index: str
    files: list[str] = field(default_factory=list)
    """Merged files and shards in natural order."""
    ranked: list[str] = field(default_factory=list)
    """Files of ranks, which no map speaks of."""
    raw: bytes | None = None
    """The index as it is; None when there is none."""
    data: dict[str, Any] = field(default_factory=dict)
    broken: str = ""
    """Why the index cannot be read."""
    mapped: dict[str, str] = field(default_factory=dict)
    """The map, {} where it cannot be used."""

    @property
    def numbered(self) -> Sets:
        return sets_of(self.files)

    @property
    def old(self) -> dict[str, Any] | None:
        """What the index says; None where there is none that can be read."""
        return None if self.raw is None or self.broken else self.data

    @property
    def path(self) -> Place:
        return self.listing.path(self.index)


class _Chosen(NamedTuple):
    """Which file an index names for each tensor."""

    mapping: dict[str, str]
    refused: dict[str, list[str]]
    """Tensors in several files of which none is the one."""
    copies: dict[str, list[str]]
    """Tensors in several files, understood."""


def rebuild(directory: Place, *, dry_run: bool = False) -> IndexResult:
    """Bring the indexes of a directory in line with the headers of its shards; those that are right stay untouched.

    All are planned before the first is written, and each is replaced at once. Raises UsageError (no directory),
    IncompleteError (shards are missing), CorruptError (a header is broken), UnsupportedError (a dtype is not known),
    ConflictError (a tensor in two shards, shards of two sets), OutputError; then nothing was written.
    """
    listing, _, groups, others = _look(directory)
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


def verify(directory: Place) -> CheckResult:
    """Everything that is wrong with the indexes of a directory and its shards, by the names of ``inspect --check``.

    Raises UsageError (no directory, or one without safetensors files); everything else is a finding.
    """
    listing, name, groups, others = _look(directory)
    result = CheckResult(directory, name)
    if others:
        result.notes.append(_left_alone(others))
    wanted = list(dict.fromkeys(n for g in groups for n in (*g.files, *g.ranked)))
    with ThreadPoolExecutor(THREADS) as pool:
        found = dict(zip(wanted, pool.map(lambda n: _examine(listing.path(n)), wanted), strict=True))
    files: dict[str, ExaminedFile] = {}
    for name, (head, problems) in found.items():
        for id_, text in problems:
            result.add(id_, text, listing.path(name))
        tensors = head.tensors if head is not None else []
        files[name] = ExaminedFile(name, head.file if head is not None else None, tensors, sound=not problems)
    for g in groups:
        _check_group(g, files, result)
    result.findings = [f._replace(hint=_ANEW) if "`ckpttool reshard`" in f.hint else f for f in result.findings]
    result.checked = {
        "index": sum(g.raw is not None for g in groups),
        "file": len(files),
        "tensor": sum(len({t.name for n in (*g.files, *g.ranked) for t in files[n].tensors}) for g in groups),
    }
    return result


# -- what is there


def _look(directory: Place) -> tuple[Listing, str, list[_IndexGroup], list[str]]:
    """The format that has rules of its own for its indexes, the sets of files, and the files that are in none."""
    if directory.is_file():
        raise UsageError("this is a file", where=str(directory), hint="give the directory that holds the shards")
    listing = list_source(directory)
    format_, rules = _rules(listing)
    sets: dict[str, list[str]] = {}
    ranked: dict[str, list[str]] = {}
    for n in listing.names:
        if key := set_of(n):
            sets.setdefault(key[0], []).append(n)
        elif stem := rules.of_rank(n)[0]:
            ranked.setdefault(stem, []).append(n)
    found = (_IndexGroup(listing, rules, stem, n) for n in listing.names if (stem := stem_of_index(n)))
    groups = [_indexed(g, sets, ranked) for g in found]
    taken = {n for g in groups for n in (*g.files, *g.ranked)}
    made: dict[str, _IndexGroup] = {}
    others = []
    for n in listing.safetensors():
        if n in taken or rules.of_rank(n)[0]:
            continue
        key = set_of(n)
        stem = key[0] if key else n.removesuffix(".safetensors")
        if key or stem in _SINGLE:
            made.setdefault(stem, _IndexGroup(listing, rules, stem, index_name(stem))).files.append(n)
        else:
            others.append(n)
    for stem, names in ranked.items():
        if not any(n in taken for n in names):
            made.setdefault(stem, _IndexGroup(listing, rules, stem, index_name(stem))).ranked += names
    groups += made.values()
    if not groups and not others:
        raise UsageError("there are no safetensors files here", where=str(directory))
    if not groups:
        raise UsageError(
            "there is no index here, and no shard that one could name",
            where=[str(directory), *others[:3]],
            hint="shards are called PREFIX-00001-of-00004.safetensors; `ckpttool inspect FILE --check` checks a file",
        )
    return listing, format_, sorted(groups, key=lambda g: natural(g.index)), others


def _rules(listing: Listing) -> tuple[str, IndexRules]:
    """Format and rules for indexes, by the names of the files; Hugging Face's where they show no other format's."""
    try:
        found = choose(listing, "", ReadOptions())
    except CkptError:
        return "", IndexRules()
    rules = found.capabilities.indexes
    return (found.name, rules) if rules and rules.stems else ("", IndexRules())


def _indexed(g: _IndexGroup, sets: Mapping[str, list[str]], ranked: Mapping[str, list[str]]) -> _IndexGroup:
    """An index that exists, with its own files, those that it names, and the fellows of these."""
    stem, g.ranked = g.stem, list(ranked.get(g.stem, ()))
    try:
        g.raw = read_all(g.path)
        g.data = g.listing.json(g.index)
    except CorruptError as e:
        g.broken = e.what
    except OSError as e:
        raise CorruptError(f"the index cannot be read: {e.strerror}", where=str(g.path)) from None
    mapped = weight_map(g.data) or {}
    g.mapped = mapped if not any(map(misplaced, set(mapped.values()))) else {}
    present = set(g.listing.safetensors())
    own = [*sets.get(stem, ()), *([f"{stem}.safetensors"] if f"{stem}.safetensors" in present else [])]
    named = [n for n in dict.fromkeys(g.mapped.values()) if n in present]
    same = {key for n in named if (key := set_of(n))}
    fellows = [n for s, _ in same for n in sets.get(s, ()) if set_of(n) in same]
    g.files = sorted({*own, *named, *fellows}, key=natural)
    return g


def _left_alone(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"{names[0]} is not a shard and in no index; left alone"
    return f"{len(names)} files are not shards and in no index ({names[0]}, ...); left alone"


# -- rebuilding


def _members(g: _IndexGroup) -> tuple[list[str], list[str]]:
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


def _choose(g: _IndexGroup, tensors: Mapping[str, Sequence[StoredTensor]]) -> _Chosen:
    """The file of each of the tensors, which are those of each file."""
    places: dict[str, list[str]] = {}
    for n, held in tensors.items():
        for t in held:
            places.setdefault(t.name, []).append(n)
    mapping = {name: held[0] for name, held in places.items()}
    several = {name: held for name, held in places.items() if len(held) > 1}
    chosen = g.rules.choose(g.stem, several, g.mapped, tensors) if several else {}
    refused = {name: held for name, held in several.items() if name not in chosen}
    return _Chosen(mapping | chosen, refused, {n: h for n, h in several.items() if n in chosen})


def _plan(
    g: _IndexGroup, names: Sequence[str], tensors: Mapping[str, Sequence[StoredTensor]], notes: list[str]
) -> tuple[IndexState, bytes | None]:
    """What is to become of one index, and its bytes if it is to be written. Raises ConflictError, IncompleteError.

    ``tensors`` are those of all files.
    """
    if g.ranked:
        return _plan_ranked(g, tensors, notes)
    own = {n: tensors[n] for n in names}
    chosen = _choose(g, own)
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
    g: _IndexGroup, tensors: Mapping[str, Sequence[StoredTensor]], notes: list[str]
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
    g: _IndexGroup, names: Sequence[str], tensors: int, total: int | None, new: Mapping[str, Any], notes: Sequence[str]
) -> tuple[IndexState, bytes | None]:
    changes = _changes(g, new)
    state = WRITTEN if changes else RIGHT
    found = IndexState(g.index, tuple(names), tensors, total, state, tuple(changes), tuple(notes))
    return found, _encode(g, new) if changes else None


def _refuse_lost(g: _IndexGroup, mapping: Mapping[str, str], names: Sequence[str], notes: list[str]) -> None:
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


def _new_index(g: _IndexGroup, settled: Settled) -> dict[str, Any]:
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


def _changes(g: _IndexGroup, new: Mapping[str, Any]) -> list[str]:
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


def _encode(g: _IndexGroup, new: Mapping[str, Any]) -> bytes:
    """The index in the style of the old one, else in that of its software."""
    if g.raw is None or g.broken:
        return (json.dumps(new, indent=g.rules.indent, ensure_ascii=False) + g.rules.end).encode()
    m = re.match(rb"\s*\{[^\S\n]*\n([ \t]*)\S", g.raw)
    indent = m[1].decode() if m else None
    text = json.dumps(new, indent=indent, ensure_ascii=rb"\u" in g.raw)
    return (text + ("\n" if g.raw.endswith(b"\n") else "")).encode()


def _inside(g: _IndexGroup) -> Path:
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


def _unchanged(heads: Mapping[str, Header], groups: Iterable[_IndexGroup]) -> None:
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


# -- checking


def _examine(path: Place) -> tuple[Header | None, list[tuple[str, str]]]:
    try:
        head, problems = examine(path)
    except CkptError as e:
        return None, [("unreadable", e.what)]
    return head, [(p.id, p.text) for p in problems]


def _check_group(g: _IndexGroup, found: Mapping[str, ExaminedFile], result: CheckResult) -> None:
    """One index against its files."""
    listing, rules, where = g.listing, g.rules, g.path
    if g.broken:
        result.add("index-json", g.broken, where, _ANEW)
    if g.ranked:
        _check_ranked(g, result)
        if not g.files:
            return
        text = f"merged {g.stem} files and {g.stem} files of ranks lie in one directory"
        result.add("conflict", text, listing.root, "move those away that do not belong to this save")
        return
    index = parse_index(g.data, rules, where, result) if g.old is not None else None
    wanted = dict.fromkeys(index.mapped.values() if index is not None else ())
    files = [found[n] for n in g.files]
    missing = {n for n in wanted if n not in found}
    for n in missing:
        result.add("shard-missing", f"the index names {n}, which is not there", listing.root, "fetch the file")
    sets = g.numbered
    totals = sorted(t for s, t in sets if s == g.stem)
    single = f"{g.stem}.safetensors"
    mixed = len(totals) > 1 or (single in g.files and bool(sets) and not any(n in found for n in wanted))
    if len(totals) > 1:
        shown = ", ".join(f"{g.stem}-*-of-{t:05d}" for t in totals)
        text = f"shards of {len(totals)} sets lie in one directory: {shown}"
        result.add("shard-numbering", text, listing.root, "move all but one set away")
    elif mixed:
        text = f"{single} and numbered shards of it lie in one directory"
        result.add("shard-numbering", text, listing.root, "move one of the two away")
    if rules.runs and any(n in found for n in wanted):
        # An asynchronous save writes no file for a rank that holds nothing, and its index names none.
        sets = {k: parts | set(range(1, k[1] + 1)) for k, parts in sets.items()}
    if not mixed:
        check_numbers(listing, sets, wanted, result)
    members = [f for f in files if is_member(f.name, wanted) or not any(n in found for n in wanted)]
    for f in files if not mixed else ():
        if f not in members:
            text = f"{f.name} is not part of the checkpoint that the index describes"
            result.add("orphan-shard", text, listing.path(f.name), "move it away, or rebuild the index")
    if g.raw is None and sets:
        text = f"{len(files)} shards have no index" if len(files) > 1 else f"{g.files[0]} has no index"
        result.add("no-index", text, listing.root, _ANEW)
    if mixed:
        return
    if rules.runs:
        refused = _choose(g, {f.name: f.tensors for f in members}).refused
        for name, held in refused.items():
            text = f"tensor `{name}` is in {' and in '.join(held)}"
            result.add("duplicate-tensor", text, listing.root, "remove the stale copy")
    else:
        check_duplicates(listing, members, index.mapped if index is not None else None, result)
    if index is None:
        return
    if lacks := rules.lacks(g.stem, g.data):
        result.add("index-json", f"{g.index} does not say {lacks}, and Paddle asks for it", where, _ANEW)
    if index.stands_for:
        result.notes.append(f"{g.index}: total_size is of the moments before they were quantized, and not checked")
    check_mapping(listing, members, index, missing, result, rules)


def _check_ranked(g: _IndexGroup, result: CheckResult) -> None:
    """The index of files of ranks, where these have one."""
    new = g.rules.of_ranks(g.stem, g.data, (), max(g.rules.of_rank(n)[1] for n in g.ranked))
    if new is None:
        return
    if g.raw is None:
        result.add("no-index", f"{len(g.ranked)} {g.stem} files of ranks have no index", g.path.parent, _ANEW)
    elif "weight_map" in g.data:
        text = f"{g.index} has a weight_map, and the files are those of ranks: {g.ranked[0]}"
        result.add("conflict", text, g.path, "the index is of another save: move it away")
    elif not g.broken:
        for name, value in new.items():
            if g.data.get(name) != value:
                result.add("index-json", f"{g.index} does not say that {name} is {value}", g.path, _ANEW)
