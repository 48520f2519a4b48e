"""The index files of a directory and the files that each is about: what is rebuilt, and what is checked.

An index belongs to the files of one stem: ``model-00001-of-00004.safetensors`` and the other shards to
``model.safetensors.index.json``; each component of a unified checkpoint of Paddle's has its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckpttool.answers.findings import CheckResult
from ckpttool.answers.index_checks import (
    ANEW,
    ExaminedFile,
    check_duplicates,
    check_mapping,
    check_mixture,
    check_numbers,
    parse_index,
)
from ckpttool.containers.index import (
    LOADED,
    IndexRules,
    Sets,
    index_name,
    is_member,
    misplaced,
    set_of,
    sets_of,
    stem_of_index,
    weight_map,
)
from ckpttool.core.catalog import StoredTensor
from ckpttool.core.files import Place
from ckpttool.core.words import natural
from ckpttool.errors import CorruptError
from ckpttool.formats.registry import READERS
from ckpttool.storage.listing import Listing
from ckpttool.storage.place import read_all

_SINGLE = {*LOADED, "adapter_model", *(s for f in READERS.values() if (i := f.capabilities.indexes) for s in i.stems)}
"""Stems of which a file without a number is a whole set."""


@dataclass(slots=True)
class IndexGroup:
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


class ChosenFiles(NamedTuple):
    """Which file an index names for each tensor."""

    mapping: dict[str, str]
    refused: dict[str, list[str]]
    """Tensors in several files of which none is the one."""
    copies: dict[str, list[str]]
    """Tensors in several files, understood."""


def find_groups(listing: Listing, rules: IndexRules) -> tuple[list[IndexGroup], list[str]]:
    """Each index of a directory with its files, in natural order; and the safetensors files that belong to none.

    Raises CorruptError when an index cannot be read from its disk.
    """
    sets: dict[str, list[str]] = {}
    ranked: dict[str, list[str]] = {}
    for n in listing.names:
        if key := set_of(n):
            sets.setdefault(key[0], []).append(n)
        elif stem := rules.of_rank(n)[0]:
            ranked.setdefault(stem, []).append(n)
    found = (IndexGroup(listing, rules, stem, n) for n in listing.names if (stem := stem_of_index(n)))
    groups = [_indexed(g, sets, ranked) for g in found]
    taken = {n for g in groups for n in (*g.files, *g.ranked)}
    made: dict[str, IndexGroup] = {}
    others = []
    for n in listing.safetensors():
        if n in taken or rules.of_rank(n)[0]:
            continue
        key = set_of(n)
        stem = key[0] if key else n.removesuffix(".safetensors")
        if key or stem in _SINGLE:
            made.setdefault(stem, IndexGroup(listing, rules, stem, index_name(stem))).files.append(n)
        else:
            others.append(n)
    for stem, names in ranked.items():
        if not any(n in taken for n in names):
            made.setdefault(stem, IndexGroup(listing, rules, stem, index_name(stem))).ranked += names
    groups += made.values()
    return sorted(groups, key=lambda g: natural(g.index)), others


def _indexed(g: IndexGroup, sets: Mapping[str, list[str]], ranked: Mapping[str, list[str]]) -> IndexGroup:
    """An index that exists, with its own files, those that it names, and the other shards of their sets."""
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
    siblings = [n for s, _ in same for n in sets.get(s, ()) if set_of(n) in same]
    g.files = sorted({*own, *named, *siblings}, key=natural)
    return g


def chosen_files(g: IndexGroup, tensors: Mapping[str, Sequence[StoredTensor]]) -> ChosenFiles:
    """The file of each of the tensors, which are those of each file."""
    places: dict[str, list[str]] = {}
    for n, held in tensors.items():
        for t in held:
            places.setdefault(t.name, []).append(n)
    mapping = {name: held[0] for name, held in places.items()}
    several = {name: held for name, held in places.items() if len(held) > 1}
    chosen = g.rules.choose(g.stem, several, g.mapped, tensors) if several else {}
    refused = {name: held for name, held in several.items() if name not in chosen}
    return ChosenFiles(mapping | chosen, refused, {n: h for n, h in several.items() if n in chosen})


def check_groups(listing: Listing, rules: IndexRules, files: Sequence[ExaminedFile], result: CheckResult) -> None:
    """Every index of a directory against its files."""
    try:
        groups, _ = find_groups(listing, rules)
    except CorruptError as e:
        result.add("unreadable", e.what, ", ".join(e.where), e.hint)
        return
    found = {f.name: f for f in files}
    for g in groups:
        _check_group(g, found, result)


def _check_group(g: IndexGroup, found: Mapping[str, ExaminedFile], result: CheckResult) -> None:
    """One index against its files."""
    listing, rules, where = g.listing, g.rules, g.path
    if g.broken:
        result.add("index-json", g.broken, where, ANEW)
    if g.ranked:
        _check_ranked(g, result)
        if not g.files:
            return
        text = f"merged {g.stem} files and {g.stem} files of ranks lie in one directory"
        result.add("conflict", text, listing.root, "move those away that do not belong to this save")
        return
    index = parse_index(g.data, rules, where, result) if g.old is not None else None
    wanted = dict.fromkeys(index.mapped.values() if index is not None else ())
    files = [found[n] for n in g.files if n in found]
    missing = {n for n in wanted if n not in listing.names}
    for n in missing:
        result.add("shard-missing", f"the index names {n}, which is not there", listing.root, "fetch the file")
    sets = g.numbered
    mixed = check_mixture(listing, g.stem, g.files, wanted, result)
    if rules.runs and any(n in g.files for n in wanted):
        # An asynchronous save writes no file for a rank that holds nothing, and its index names none.
        sets = {k: parts | set(range(1, k[1] + 1)) for k, parts in sets.items()}
    if not mixed:
        check_numbers(listing, sets, wanted, result)
    mine = [n for n in g.files if is_member(n, wanted) or not any(w in g.files for w in wanted)]
    members = [f for f in files if f.name in mine]
    for n in g.files if not mixed else ():
        if n not in mine:
            text = f"{n} is not part of the checkpoint that {g.index} describes"
            result.add("orphan-shard", text, listing.path(n), "move it away, or rebuild the index")
    if g.raw is None and sets:
        text = f"{len(g.files)} shards have no index" if len(g.files) > 1 else f"{g.files[0]} has no index"
        result.add("no-index", text, listing.root, ANEW)
    if mixed:
        return
    refused = chosen_files(g, {f.name: f.tensors for f in members}).refused if rules.runs else {}
    for name, held in refused.items():
        text = f"tensor `{name}` is in {' and in '.join(held)}"
        result.add("duplicate-tensor", text, listing.root, "remove the stale copy")
    if not rules.runs:
        check_duplicates(listing, members, index.mapped if index is not None else None, result)
    if index is None:
        return
    if lacks := rules.lacks(g.stem, g.data):
        result.add("index-json", f"{g.index} does not say {lacks}, and Paddle asks for it", where, ANEW)
    if index.stands_for:
        result.notes.append(f"{g.index}: total_size is of the moments before they were quantized, and not checked")
    check_mapping(listing, members, index, missing, result, rules)


def _check_ranked(g: IndexGroup, result: CheckResult) -> None:
    """The index of files of ranks, where these have one."""
    new = g.rules.of_ranks(g.stem, g.data, (), max(g.rules.of_rank(n)[1] for n in g.ranked))
    if new is None:
        return
    if g.raw is None:
        result.add("no-index", f"{len(g.ranked)} {g.stem} files of ranks have no index", g.path.parent, ANEW)
    elif "weight_map" in g.data:
        text = f"{g.index} has a weight_map, and the files are those of ranks: {g.ranked[0]}"
        result.add("conflict", text, g.path, "the index is of another save: move it away")
    elif not g.broken:
        for name, value in new.items():
            if g.data.get(name) != value:
                result.add("index-json", f"{g.index} does not say that {name} is {value}", g.path, ANEW)
