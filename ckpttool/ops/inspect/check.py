"""Is this checkpoint sound? Every problem by name, in the order in which one would repair them.

    files      each file's header and bytes by themselves
    set        index, shards and tensor names against each other
    opening    whatever the format, the mesh and the layout rules object to
    tensors    scale grids and their weights; config.json and the tensors
    code       files beside the weights that can run code
    manifest   sizes and checksums that were written with the files
    mixed      files of several saves in one directory
    values     copies, padding, scales, masters and checksums of members; only when values may be read

A step works with whatever the steps before it could read, and does not report again what follows from an earlier
finding. The identifiers are stable: scripts may rely on them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpttool.answers.findings import ERROR, CheckResult, Finding
from ckpttool.answers.index_checks import (
    ANEW,
    ExaminedFile,
    Index,
    check_duplicates,
    check_mapping,
    check_mixture,
    check_numbers,
    parse_index,
)
from ckpttool.checkpoint import Checkpoint
from ckpttool.containers.index import IndexRules, is_member, set_of, sets_of
from ckpttool.containers.safetensors import examine
from ckpttool.core.catalog import StoredTensor
from ckpttool.core.files import AnyPlace, DataFile, Place, source_files
from ckpttool.errors import CkptError, ConflictError, CorruptError, IncompleteError, LayoutError, UnsupportedError
from ckpttool.execute import Progress
from ckpttool.execute.hashing import ALGORITHM, hash_range
from ckpttool.execute.machines.each import each
from ckpttool.execute.reader import Reads
from ckpttool.formats.base import ChecksItself, OpenOptions, Reader, StoredCheckpoint
from ckpttool.formats.hf import NOT_WEIGHTS, indexes_of
from ckpttool.formats.parts import parts_of
from ckpttool.formats.registry import choose, is_multi_part, reader
from ckpttool.formats.runs import RunError
from ckpttool.ops.inspect.code import code_findings
from ckpttool.ops.inspect.index_groups import check_groups
from ckpttool.ops.inspect.listing import check_components, is_safetensors, relative, runs
from ckpttool.ops.inspect.runs import other_saves
from ckpttool.ops.inspect.soundness import NamedShape, tensor_findings
from ckpttool.ops.inspect.source import PEFT, join, read
from ckpttool.storage.listing import Listing, content, list_source
from ckpttool.storage.place import parse_place
from ckpttool.storage.travel import SentFiles

if TYPE_CHECKING:
    from ckpttool.execute.fleets.base import Fleet

MANIFEST = "ckpttool.manifest.json"
_PICKLES = re.compile(r"(?!\.|__).*\.(?:pdparams|pdopt|distcp|metadata)")
"""Paddle's; those of torch.distributed.checkpoint begin in another way."""
_SMALL = re.compile(r"(?:scheduler|scaler)\.\w+")
"""Pickles of a trainer that hold no tensors of the model."""


def check(
    src: AnyPlace,
    options: OpenOptions,
    progress: Progress,
    *,
    values: bool = False,
    only: tuple[str, ...] = (),
    fleet: Fleet | None = None,
    sums: bool = True,
) -> CheckResult:
    """Find every problem. ``only`` are the components of which ``values`` are read, () for all. ``sums``: prove the
    checksums of a manifest, which reads everything that it lists.

    Raises UsageError when there is no such source or component; everything else is a finding.
    """
    path = parse_place(src)
    if is_multi_part(path, options):
        return _check_parts(path, options, progress, values=values, only=only, fleet=fleet, sums=sums)
    listing = list_source(path)
    chosen = _choose(listing, options)
    if isinstance(chosen, ChecksItself):
        try:
            checked = chosen.check(listing)
            problems = [Finding(*f) for f in checked.found]
            return CheckResult(path, chosen.name, problems, checked.counts, unread="values not checked")
        except CkptError:
            pass  # reported as for any other source
    result = CheckResult(path)
    stored = _read(path, options)
    rules = IndexRules() if isinstance(chosen, CkptError) else chosen.capabilities.indexes
    places = _places(listing, stored, rules)
    proven = isinstance(stored, StoredCheckpoint)  # by its reader, which reads pickles as a whole
    files = [_examine(name, at, i, result, proven=proven) for i, (name, at) in enumerate(places.items())]
    if isinstance(stored, StoredCheckpoint):
        _check_pickles(stored, files, result)
        for said in stored.findings:
            result.add(*said)
        if others := other_saves(path, stored.files):
            result.notes += [*stored.notes, *others]  # which of them was checked
    result.checked["file"] = len(files)
    result.format = stored.format if isinstance(stored, StoredCheckpoint) else _format(chosen, result)
    complete = all(f.sound for f in files)
    config = _config(listing, stored, result)
    if isinstance(stored, StoredCheckpoint):
        rules = None if result.format == PEFT else reader(result.format).capabilities.indexes
    whole = rules is not None and not rules.stems
    mapped: Mapping[str, str] | None = None
    if rules is not None and rules.stems:
        check_groups(listing, rules, files, result)
    elif rules is not None:
        found = _check_set(listing, files, stored, result, rules)
        complete, mapped = complete and found[0], found[1]
    elif result.format == PEFT:
        _check_adapter(path, result)
    checkpoint = _open(path, stored, options, result)
    named = _named(checkpoint, files, mapped) if checkpoint is not None or whole else {}
    tensors = len(named) if checkpoint is None else len(checkpoint.catalog)
    result.checked["tensor"] = tensors or sum(len(f.tensors) for f in files)
    vocab = partial(_vocab_axis, checkpoint) if checkpoint is not None else None
    for finding in tensor_findings(named, config, complete=complete, vocab_axis=vocab):
        result.findings.append(Finding(*finding))
    result.findings += code_findings(listing, {f.info.place for f in files if f.sound and f.info})
    padded = _padded(checkpoint) if checkpoint is not None else set()
    _check_manifest(listing, files, result, progress, padded, fleet, sums=sums)
    if checkpoint is not None:
        from ckpttool.targeting.mixed import doubts  # reads steps, which needs numpy

        result.findings += [Finding(*doubt) for doubt in doubts(checkpoint.catalog)]
    result.unread = "values not checked" + ("" if values else " (--values)")
    if values and checkpoint is not None:
        from ckpttool.ops.inspect.values_check import value_findings  # reads tensor data, which needs numpy

        check_components(only, checkpoint.components, path)
        for finding in value_findings(checkpoint, result.checked, progress, only, fleet):
            result.findings.append(Finding(*finding))
        left = [c for c in checkpoint.components if only and c not in only]
        result.values, result.unread = True, f"values of {', '.join(left)} not checked" if left else ""
    return result


def _check_parts(path: Place, options: OpenOptions, progress: Progress, **how: Any) -> CheckResult:
    """Of a directory of several models: each part by itself, and whether the directory can be opened."""
    result = CheckResult(path)
    stored = _read(path, options)
    if isinstance(stored, CkptError):
        result.add(_class_id(stored), stored.what, next(iter(stored.where), path), stored.hint)
        return result
    result.format, parts = stored.format, parts_of(stored)
    assert parts is not None  # noqa: S101 - that is what it was chosen by
    for part in parts.chosen:
        one = check(part.place, parts.options(part), progress, **how)
        result.findings += one.findings
        result.unread = one.unread or result.unread
        for noun, number in one.checked.items():
            result.checked[noun] = result.checked.get(noun, 0) + number
    listing, seen = list_source(path), CheckResult(path)  # what is wrong with a file is among the findings already
    named = [(n, f.place) for f in source_files(stored.files) if "/" in (n := relative(f.place, path))]
    files = [_examine(name, at, i, seen, proven=True) for i, (name, at) in enumerate(named)]
    _check_manifest(listing, files, result, progress, set(), how["fleet"], sums=how["sums"])
    result.findings = list(dict.fromkeys(result.findings))
    result.values = not result.unread
    return result


def _vocab_axis(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> int:
    """The axis of an embedding or head that the vocabulary is on: Paddle keeps some heads [hidden, vocab]."""
    names = (k.name for k in checkpoint.catalog.tensors)
    return checkpoint.dialect.vocab_axis(name, shape, names, checkpoint.config, tied=checkpoint.family.tied)


def _choose(listing: Listing, options: OpenOptions) -> Reader | CkptError:
    """The format of a source, or why it has none."""
    try:
        return choose(listing, options.format, options.mesh)
    except RunError:
        raise
    except CkptError as e:
        return e


# -- files


def _read(path: Place, options: OpenOptions) -> StoredCheckpoint | CkptError:
    try:
        return read(path, options)
    except RunError:
        raise
    except CkptError as e:
        return e


def _places(listing: Listing, stored: StoredCheckpoint | CkptError, rules: IndexRules | None) -> dict[str, Place]:
    """Files to examine, by name: those that make up the checkpoint, and others beside them that look like a part."""
    held: dict[str, Place] = {}
    out: dict[str, None] = {}
    if isinstance(stored, StoredCheckpoint):
        held = {relative(f.place, listing.root): f.place for f in source_files(stored.files)}
        out = dict.fromkeys(held)
    elif not listing.single:
        out = dict.fromkeys(n for n in listing.names if _PICKLES.fullmatch(n) and not _SMALL.fullmatch(n))
        if rules is not None and rules.stems:
            out |= dict.fromkeys(n for n in listing.names if ".safetensors" in n and not n.endswith(".json"))
    if not listing.single.endswith(".safetensors"):
        beside = NOT_WEIGHTS.match if "adapter_config.json" not in listing.names or out else lambda _: None
        out |= dict.fromkeys(n for n in listing.safetensors() if not beside(n))
    elif listing.single:
        out[listing.single] = None
    return {name: held.get(name) or listing.path(name) for name in out}


def _examine(name: str, path: Place, index: int, result: CheckResult, *, proven: bool) -> ExaminedFile:
    try:
        if proven and content(path) != "safetensors":
            return ExaminedFile(name, DataFile.at(path), [], sound=True)
        if not is_safetensors(path):
            return _read_pickle(name, path, result)
        head, problems = examine(path, index)
    except IncompleteError as e:
        result.add("unreadable", e.what, path)
        return ExaminedFile(name, None, [], sound=False)
    for p in problems:
        result.add(p.id, p.text, path, p.hint)
    if head is None:
        return ExaminedFile(name, None, [], sound=False)
    return ExaminedFile(name, head.file, head.tensors, sound=not problems)


def _read_pickle(name: str, path: Place, result: CheckResult) -> ExaminedFile:
    """A pickle of Paddle's. Whether one is sound shows only when it is read: no header says what is in it."""
    from ckpttool.containers.paddle_pickle import read_pickle

    try:
        read_pickle(path)
    except CkptError as e:
        result.add(_class_id(e), e.what, path, e.hint)
        return ExaminedFile(name, None, [], sound=False)
    return ExaminedFile(name, DataFile.at(path), [], sound=True)


def _check_pickles(stored: StoredCheckpoint, files: Iterable[ExaminedFile], result: CheckResult) -> None:
    """Tensors of pickles lie inside their files and not on each other; decoding has shown the others."""
    sound = {f.info.place: f for f in files if f.info is not None and not f.tensors}
    held: dict[int, list[StoredTensor]] = {}
    for t in runs(stored):
        if stored.files[t.file].encoding is None and stored.files[t.file].place in sound:
            held.setdefault(t.file, []).append(t)
    for number, tensors in held.items():
        info = stored.files[number]
        sound[info.place].tensors = tensors
        if reader(stored.format).capabilities.views:
            continue
        at, last = 0, tensors[0]
        for t in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
            if not t.nbytes:
                continue
            if t.offset + t.nbytes > info.size:
                text = f"tensor `{t.key}` ends at byte {t.offset + t.nbytes:,}, the file has {info.size:,}"
                result.add("truncated", text, info.place)
            if t.offset < at:
                text = f"tensors `{last.key}` and `{t.key}` overlap at byte {t.offset:,}"
                result.add("overlap", text, info.place)
            if t.offset + t.nbytes > at:
                at, last = t.offset + t.nbytes, t


# -- index and shards


def _check_set(
    listing: Listing,
    files: list[ExaminedFile],
    stored: StoredCheckpoint | CkptError,
    result: CheckResult,
    rules: IndexRules,
) -> tuple[bool, Mapping[str, str] | None]:
    """Index, shard names and tensor names. Returns whether all tensors are known, and the usable index."""
    names = {f.name for f in files}
    index = None if listing.single.endswith(".safetensors") else _index(listing, result, rules)
    mapped = index.mapped if index is not None else None
    wanted = dict.fromkeys((mapped or {}).values())
    missing = [n for n in wanted if n not in names]
    for name in missing:
        result.add("shard-missing", f"{name} is missing; the index lists it", listing.root, "fetch the file")
    if not listing.single.endswith(".safetensors"):
        sets = sets_of(f.name for f in files)
        stems = dict.fromkeys(stem for stem, _ in sets)
        # All are reported: sum reads to the end, where any would stop.
        if not sum(check_mixture(listing, stem, names, wanted, result) for stem in stems):
            check_numbers(listing, sets, wanted, result)
    if isinstance(stored, StoredCheckpoint):
        mine = {f.place for f in stored.files}
        members = [f for f in files if listing.path(f.name) in mine]
    else:
        members = [f for f in files if is_member(f.name, wanted)]
    mixed = any(f.id == "shard-numbering" for f in result.findings)
    maker = "the index describes" if wanted else "the other files make up"
    for f in files:
        if f not in members and not mixed:
            result.add(
                "orphan-shard",
                f"{f.name} is not part of the checkpoint that {maker}",
                listing.path(f.name),
                "move it away, or rebuild the index if it belongs to the checkpoint",
            )
    if not mixed:
        check_duplicates(listing, members, mapped, result)
    if index is not None:
        check_mapping(listing, members, index, missing, result, rules)
    return not missing and not any(f.id == "shard-missing" for f in result.findings), mapped


def _check_adapter(path: Place, result: CheckResult) -> None:
    """Factors against their config: pairs, ranks, shapes."""
    from ckpttool.adapters import read_adapter

    try:
        read_adapter(path)
    except UnsupportedError as e:
        result.add("adapter-kind", f"ckpttool cannot merge this adapter: {e.what}", "; ".join(e.where), e.hint)
    except CkptError as e:
        result.add(_class_id(e), e.what, "; ".join(e.where), e.hint)


def _index(listing: Listing, result: CheckResult, rules: IndexRules) -> Index | None:
    """The index, its findings reported; None when there is none that can be used."""
    names = indexes_of(listing)
    if not names:
        shards = [key for n in listing.safetensors() if (key := set_of(n)) and not NOT_WEIGHTS.match(n)]
        if len(shards) > 1 and len(set(shards)) == 1:
            result.add("no-index", f"{len(shards)} shards have no index", listing.root, ANEW)
        return None
    data = _json(listing, names[0], "index-json", result)
    return None if data is None else parse_index(data, rules, listing.path(names[0]), result)


def _json(listing: Listing, name: str, finding: str, result: CheckResult) -> dict[str, Any] | None:
    """A JSON file beside the weights; None, and the finding of this name, where it is none."""
    try:
        return listing.json(name)
    except CorruptError as e:
        result.add(finding, e.what, listing.path(name))
        return None


# -- opening


def _format(chosen: Reader | CkptError, result: CheckResult) -> str:
    """The format of a source that cannot be read."""
    if not isinstance(chosen, CkptError):
        return chosen.name
    if not any(f.severity == ERROR for f in result.findings):
        result.add("format", chosen.what, "; ".join(chosen.where), chosen.hint)
    return ""


_CLASSES: tuple[tuple[type[CkptError], str], ...] = (
    (CorruptError, "corrupt"),
    (IncompleteError, "incomplete"),
    (LayoutError, "layout"),
    (UnsupportedError, "unsupported"),
    (ConflictError, "conflict"),
)


def _class_id(error: CkptError) -> str:
    return next((i for c, i in _CLASSES if isinstance(error, c)), "conflict")


def _open(
    path: Place, stored: StoredCheckpoint | CkptError, options: OpenOptions, result: CheckResult
) -> Checkpoint | None:
    """The catalog, or a finding that says why there is none, unless that follows from an earlier one."""
    if isinstance(stored, StoredCheckpoint):
        try:
            checkpoint = join(stored, path, options)
        except CkptError as e:
            error = e
        else:
            for why in stored.refused.values():
                broken = isinstance(why, (CorruptError, IncompleteError))
                id_ = why.finding or _class_id(why) if broken else "component-refused"
                result.add(id_, why.what, "; ".join(why.where), why.hint)
            return checkpoint
    else:
        error = stored
    if not any(f.severity == ERROR for f in result.findings):
        result.add(error.finding or _class_id(error), error.what, "; ".join(error.where), error.hint)
    return None


def _named(
    checkpoint: Checkpoint | None, files: list[ExaminedFile], mapped: Mapping[str, str] | None
) -> dict[str, NamedShape]:
    """Dtype, shape and file of each model weight: whole ones where there is a catalog, else those in the files.

    The config speaks of the model; what else there is has the shapes of the model's weights, or is not read at all.
    """
    if checkpoint is not None:
        return {
            t.key.name: NamedShape(t.dtype, t.shape, tuple({p.stored.file for p in t.pieces}))
            for t in checkpoint.catalog
            if t.key.component == "model"
        }
    out: dict[str, NamedShape] = {}
    for f in files:
        for t in f.tensors:
            if t.name not in out or (mapped or {}).get(t.name) == f.name:
                out[t.name] = NamedShape(t.dtype, t.shape, (t.file,))
    return out


def _config(listing: Listing, stored: StoredCheckpoint | CkptError, result: CheckResult) -> dict[str, Any]:
    if isinstance(stored, StoredCheckpoint) and stored.config:
        return stored.config
    if "config.json" not in listing.names:
        if not listing.single and "adapter_config.json" not in listing.names:
            text = "no config.json: tensors were not checked against it"
            result.add("config-missing", text, listing.root)
        return {}
    return _json(listing, "config.json", "config-json", result) or {}


# -- manifest


def _check_manifest(
    listing: Listing,
    files: list[ExaminedFile],
    result: CheckResult,
    progress: Progress,
    padded: set[tuple[Place, int]],
    fleet: Fleet | None,
    *,
    sums: bool,
) -> None:
    """Prove files against what was noted when they were written: sizes and names and, with ``sums``, checksums."""
    if MANIFEST not in listing.names or listing.single.endswith(".safetensors"):
        return
    where = listing.path(MANIFEST)
    data = _json(listing, MANIFEST, "manifest-json", result)
    if data is None:
        return
    sizes, digests = data.get("files"), data.get("tensors")
    if (
        not isinstance(sizes, dict)
        or not all(type(n) is int for n in sizes.values())
        or not isinstance(digests, dict)
        or not all(isinstance(v, dict) for v in digests.values())
    ):
        result.add("manifest-json", "the manifest has no `files` and `tensors`", where)
        return
    if data.get("version") != 1 or data.get("algorithm") != ALGORITHM:
        text = f"the manifest is of version {data.get('version')} and algorithm {data.get('algorithm')}"
        result.add("manifest-json", text, where, f"this ckpttool knows version 1 and {ALGORITHM}")
        return
    wrong = _check_sizes(listing, sizes, result)
    by_name = {f.name: f for f in files}
    todo: list[tuple[ExaminedFile, StoredTensor, str]] = []
    for name, tensors in digests.items():
        f = by_name.get(name)
        if f is None or name in wrong or not f.sound:
            continue
        there = _manifest_names(f.tensors)
        several = Path(name).name.startswith("optimizer") or any(t.component != "model" for t in f.tensors)
        if several and set(there) != set(tensors):
            result.notes.append(f"the manifest cannot tell the tensors of {name} apart; only its size was checked")
            continue
        for tensor, digest in tensors.items():
            if tensor in there:
                if (listing.path(name), there[tensor].offset) not in padded:
                    todo.append((f, there[tensor], str(digest)))
            else:
                text = f"tensor `{tensor}` is missing from {name}; the manifest lists it"
                result.add("manifest-tensor", text, listing.path(name))
        for tensor in there:
            if tensor not in tensors:
                text = f"tensor `{tensor}` of {name} is not in the manifest"
                result.add("manifest-tensor", text, listing.path(name))
    if not sums:
        return
    result.checked["checksum"] = len(todo)
    _prove(todo, listing, result, progress, fleet)


def _padded(checkpoint: Checkpoint) -> set[tuple[Place, int]]:
    """(file, offset) of flat shards with padding, which a manifest knows as several blocks under one name."""
    files = checkpoint.catalog.files
    pads = (pad.stored for t in checkpoint.catalog for pad in t.pads if t.key.component != "model")
    return {(files[stored.file].place, stored.offset) for stored in pads}


def _manifest_names(tensors: Iterable[StoredTensor]) -> dict[str, StoredTensor]:
    """What a manifest calls the tensors of a file: optimizer states are ``parameter/state``, and blocks numbered."""
    out: dict[str, StoredTensor] = {}
    seen: dict[str, int] = {}
    for t in sorted(tensors, key=lambda t: t.offset):
        name = f"{t.name}/{t.state}" if t.state else t.name
        n = seen[name] = seen.get(name, -1) + 1
        out[f"{name}#{n}" if n else name] = t
    return out


def _check_sizes(listing: Listing, sizes: Mapping[str, Any], result: CheckResult) -> set[str]:
    """Files that are missing or have another size."""
    wrong = set()
    for name, size in sizes.items():
        try:
            real = DataFile.at(listing.path(name)).size
        except (OSError, ValueError):  # ValueError: no file can have such a name
            wrong.add(name)
            result.add("manifest-file", f"{name} is missing; the manifest lists it", listing.root)
            continue
        if real != size:
            wrong.add(name)
            text = f"{name} has {real:,} bytes, the manifest says {size:,}"
            result.add("manifest-size", text, listing.path(name))
    return wrong


@dataclass(frozen=True, slots=True)
class _ManifestWork:
    """See ``Work``. An item is a range of a file: its number, the first byte, and how many."""

    files: SentFiles

    def reads(self, item: tuple[int, int, int]) -> Reads:
        file, at, nbytes = item
        return Reads([(str(self.files[file].place), at, at + nbytes)])

    def do(self, item: tuple[int, int, int]) -> str:
        file, at, nbytes = item
        return hash_range(self.files[file].place, at, nbytes)


def _prove(
    todo: list[tuple[ExaminedFile, StoredTensor, str]],
    listing: Listing,
    result: CheckResult,
    progress: Progress,
    fleet: Fleet | None,
) -> None:
    names = list(dict.fromkeys(f.name for f, _, _ in todo))
    number = {name: i for i, name in enumerate(names)}
    work = _ManifestWork(SentFiles([DataFile.at(listing.path(name)) for name in names]))
    ranges = [(number[f.name], t.offset, t.nbytes) for f, t, _ in todo]
    progress.start(sum(t.nbytes for _, t, _ in todo), len(names))
    for (f, t, wanted), taken in zip(todo, each(work, ranges, lambda r: r[2], fleet), strict=True):
        found = taken.removeprefix(f"{ALGORITHM}:")
        progress.advance(t.nbytes)
        if found != wanted:
            text = f"tensor `{t.name}` has changed since it was written: checksum {found}, expected {wanted}"
            result.add("manifest-checksum", text, listing.path(f.name), "fetch or write the file again")
    progress.finish()
