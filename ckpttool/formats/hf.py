"""Hugging Face: ``model.safetensors``, or ``model-00001-of-000NN.safetensors`` with an index. Whole tensors.

Headers are the truth and the index is only a hint: a missing, stale or wrong index is rebuilt and said so. What is
refused is a checkpoint of which a shard is missing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ckpttool.containers import index as index_files
from ckpttool.containers.safetensors import tensor_bytes
from ckpttool.core.catalog import Catalog, RankTensor, StoredTensor
from ckpttool.core.mesh import Mesh
from ckpttool.errors import ConflictError, CorruptError, IncompleteError
from ckpttool.formats import base
from ckpttool.formats.config import auto_class
from ckpttool.storage.json_file import indented
from ckpttool.storage.listing import INDEX, Listing, is_index, list_source, lost

NOT_WEIGHTS = re.compile(r"(adapter_model|optimizer|master_weights|scheduler|training_args|consolidated)[-.]")
"""Files that lie beside a model and are not part of it."""

_STEM = r"(?P<base>[^/.]+?)(?:-\d{5}-of-\d{5})?(?:\.(?P<variant>[A-Za-z]\w*?))?(?:-\d{5}-of-\d{5})?"
_WEIGHTS_FILE = re.compile(_STEM + r"\.safetensors\Z")


@dataclass(frozen=True, slots=True)
class FileNames:
    """File names of one set of tensors."""

    stem: str = "model"
    """One of ``LOADED``, of a variant with its word: ``model.fp16``."""
    found: str = ""
    """The index that the files came with; "" if they had none that could be used."""

    @property
    def single(self) -> str:
        """Name of a single file."""
        return f"{self.stem}.safetensors"

    @property
    def index(self) -> str:
        """Name of the index of several files."""
        return index_files.index_name(self.stem)


def _set_of(name: str) -> tuple[str, str]:
    """(stem, variant) of a file that libraries look for, index or weights; ("", "") for any other."""
    if m := INDEX.match(name):
        stem, variant = m["stem"], m["variant"] or ""
    elif m := _WEIGHTS_FILE.match(name):
        stem, variant = m["base"], m["variant"] or ""
    else:
        return "", ""
    return (stem, variant) if stem in index_files.LOADED else ("", "")


_DIFFUSERS = "diffusion_pytorch_model"
_PARAMETERS = "total_parameters"
"""Elements of all tensors, in indexes that transformers 5 writes."""
SHARD_LIMIT = 5 * 10**9
"""Default for the bytes of tensors in a file; the figure that transformers used for years."""


class HuggingFace:
    """One set of whole tensors."""

    name = "hf"
    dialect = "hf"
    capabilities = base.Capabilities(
        shards=True, keeps_form=True, optimizer_beside=True, indexes=index_files.IndexRules()
    )

    def detect(self, listing: Listing) -> int:
        names = listing.safetensors()
        if listing.single:
            return int(listing.single.endswith(".safetensors") or INDEX.match(listing.single) is not None)
        return int(
            any(
                n == "model.safetensors" or index_files.NUMBERED.match(n) or INDEX.match(n)
                for n in (*names, *(x for x in listing.names if x.endswith(".json")))
            )
        )

    def read(self, listing: Listing, options: base.ReadOptions) -> base.StoredCheckpoint:
        """Raises IncompleteError (a shard is missing), ConflictError (a tensor twice, two checkpoints in one place)."""
        wrong = {k: v for k, v in options.from_flags().items() if v != 1}
        if wrong:
            k, v = next(iter(wrong.items()))
            raise ConflictError(
                f"--{k} {v} contradicts the checkpoint: Hugging Face files hold whole tensors",
                where=str(listing.root),
                hint=f"did you mean --{k}-out {v}? --{k} describes SRC; for files of one rank each, add --rank-pattern",
            )
        names, found, index, notes = _shards(listing)
        stored = base.read_files(self.name, listing, [(n, 0) for n in names], Mesh())
        mapped: Mapping[str, str] = index or {}
        shards = [f.place.name for f in stored.files]
        seen: dict[str, int] = {}
        keep = []
        for t in stored.tensors:
            other = seen.get(t.name)
            if other is None:
                seen[t.name] = t.file
                keep.append(t)
                continue
            a, b = shards[other], shards[t.file]
            if mapped.get(t.name) not in (a, b):
                raise ConflictError(
                    f"tensor `{t.name}` is in two shards",
                    where=[str(stored.files[other].place), str(stored.files[t.file].place)],
                    hint="remove the stale shard; or drop --from and pass the number of ranks: --tp N",
                )
            notes.append(f"`{t.name}` is in {a} and {b}; the index says {mapped[t.name]}")
            if mapped[t.name] == b:
                keep = [k for k in keep if k.name != t.name] + [t]
        if index is not None:
            if len(keep) < len(stored.tensors):
                _refuse_copies(listing, index, seen)
            notes += _index_notes(index, {t.name: shards[t.file] for t in keep})
        stored.tensors, stored.notes = keep, notes + stored.notes
        stored.native = _file_names(names, found, stored.config)
        return stored

    def target_mesh(self, asked: Mesh, said: Mapping[str, int]) -> Mesh:
        return base.whole_mesh(said, "hf: Hugging Face files hold whole tensors")

    def write(self, request: base.WriteRequest) -> base.FileLayout:
        named = request.native if isinstance(request.native, FileNames) else _usual_names(request.config)
        file_layout = layout_published(request.ranks[0], request.max_shard_size, lambda _: {"format": "pt"}, named)
        return file_layout._replace(usage=_usage(request.config, named, request.ranks[0]))

    def without(self, stored: base.StoredCheckpoint, catalog: Catalog, lost: Collection[str]) -> base.Remainder:
        held: list[list[StoredTensor]] = [[] for _ in stored.files]
        loses = [False] * len(held)
        for t in stored.tensors:
            if t.name in lost:
                loses[t.file] = True
            else:
                held[t.file].append(t)
        kept = [i for i, tensors in enumerate(held) if tensors]
        names = _renumbered([stored.files[i].place.name for i in kept], len(held))
        files = [base.KeptFile(stored.files[i], n, held[i], loses[i]) for i, n in zip(kept, names, strict=True)]
        index = stored.native.found or stored.native.index
        old = list_source(stored.root).json(index) if (stored.root / index).is_file() else None
        if len(files) == 1 and old is None:
            return base.Remainder(files, [])
        return base.Remainder(files, [(index, _index_without(old or {}, files, stored.tensors))])


def _usual_names(config: Mapping[str, Any]) -> FileNames:
    """File names of the library that wrote the config: diffusers has a name of its own."""
    return FileNames(_DIFFUSERS) if "_class_name" in config else FileNames()


def _renumbered(kept: Sequence[str], before: int) -> list[str]:
    """Names of the files that stay; numbered shards are renumbered when one of them goes."""
    stems = [key[0] for n in kept if (key := index_files.set_of(n))]
    if len(kept) == before or len(stems) < len(kept):
        return list(kept)
    if len(kept) == 1:
        return [f"{stems[0]}.safetensors"]
    return [index_files.shard_name(stem, i, len(kept)) for i, stem in enumerate(stems, 1)]


def _elements(tensors: Iterable[StoredTensor]) -> int:
    return sum(prod(t.shape) for t in tensors)


def _index_without(old: Mapping[str, Any], files: Iterable[base.KeptFile], before: Iterable[StoredTensor]) -> bytes:
    """The index of what is left; what the old one said besides stays. ``before`` are the tensors of the source."""
    left = {t.name: (k.name, t) for k in files for t in k.tensors}
    metadata = old.get("metadata")
    if isinstance(metadata, dict) and _PARAMETERS in metadata:
        # A number that did not count elements (packed weights) cannot be brought in line.
        counted = metadata[_PARAMETERS] == _elements(before)
        now = {_PARAMETERS: _elements(t for _, t in left.values())} if counted else {}
        metadata = {k: v for k, v in metadata.items() if k != _PARAMETERS or counted} | now
    size = sum(t.nbytes for _, t in left.values())
    index: dict[str, Any] = {
        **old,
        "metadata": {**(metadata if isinstance(metadata, dict) else {}), "total_size": size},
        "weight_map": {n: file for n, (file, _) in sorted(left.items())},
    }
    return indented(index)


def _usage(config: Mapping[str, Any], named: FileNames, tensors: Iterable[RankTensor]) -> str:
    """The line of Python that loads the files; "" where config.json does not say what they are."""
    stem, _, variant = named.stem.partition(".")
    if stem == "model" and isinstance(config.get("model_type"), str):
        name = auto_class(config, [t.name for t in tensors])
        if not name:
            return ""
    elif stem == _DIFFUSERS and re.fullmatch(r"\w+", str(config.get("_class_name", ""))):
        name = f"diffusers.{config['_class_name']}"
    else:
        return ""
    return f"{name}.from_pretrained({{text}}" + (f', variant="{variant}")' if variant else ")")


def layout_published(
    tensors: Sequence[RankTensor],
    max_shard_size: int | None,
    metadata: Callable[[Sequence[RankTensor]], Mapping[str, str]],
    called: FileNames = FileNames(),
) -> base.FileLayout:
    """``model.safetensors``, or numbered shards and their index; ``metadata`` is what each file's header says."""
    groups = base.fill_files(tensors, max_shard_size or SHARD_LIMIT)
    if len(groups) == 1:
        return base.build_files([(called.single, 0, groups[0], metadata(groups[0]))], 1)
    n = len(groups)
    named = [(index_files.shard_name(called.stem, i + 1, n), 0, g, metadata(g)) for i, g in enumerate(groups)]
    file_layout = base.build_files(named, 1)
    total = sum(tensor_bytes(t.dtype, t.shape) for t in tensors)
    mapping = {t.name: name for name, _, group, _ in named for t in group}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(mapping.items()))}
    text = indented(index)
    file_layout.files.append(base.OutFile(called.index, len(text), ((0, text),)))
    return file_layout


def _file_names(names: Sequence[str], found: str, config: Mapping[str, Any]) -> FileNames:
    stems = {".".join(filter(None, _set_of(n))) for n in names}
    stem = stems.pop() if len(stems) == 1 else ""
    return FileNames(stem or _usual_names(config).stem, found)


def indexes_of(listing: Listing) -> list[str]:
    """Indexes of model weights; the usual one alone where there is one."""
    if listing.single:
        return [listing.single] if is_index(listing.single) else []
    found = [n for n in listing.names if INDEX.match(n) and not NOT_WEIGHTS.match(n)]
    return [n for n in found if n == FileNames().index] or found


def _one_variant(listing: Listing, present: list[str], notes: list[str]) -> list[str]:
    """The files of the variant that is meant: that of SRC, or the one without a word, or the only one.

    Raises ConflictError when there are several, none of which loaders would take before the others.
    """
    variants: dict[str, dict[str, list[str]]] = {}
    for n in present:
        stem, variant = _set_of(n)
        variants.setdefault(stem, {}).setdefault(variant, []).append(n)
    variants.pop("", None)
    asked = _set_of(listing.single)
    left: set[str] = set()
    for stem, found in variants.items():
        if len(found) == 1:
            continue
        chosen = asked[1] if asked[0] == stem else ""
        if chosen not in found:
            raise ConflictError(
                f"there are {len(found)} variants of {stem} here: {', '.join(sorted(found))}",
                where=[str(listing.root), *(names[0] for names in found.values())],
                hint="give the path of one: of its only file, or of its index",
            )
        for variant, names in found.items():
            if variant != chosen:
                notes.append(f"{names[0]}{' and others are' if names[1:] else ' is'} another variant: skipped")
                left |= set(names)
    return [n for n in present if n not in left]


def _shards(listing: Listing) -> tuple[list[str], str, dict[str, str] | None, list[str]]:
    """The files that make up the checkpoint, their index and its map, and notes."""
    if listing.single.endswith(".safetensors"):
        return [listing.single], "", None, []
    notes: list[str] = []
    present = _one_variant(listing, [n for n in listing.safetensors() if not NOT_WEIGHTS.match(n)], notes)
    sets = index_files.sets_of(present)
    complete = [k for k, parts in sets.items() if parts == set(range(1, k[1] + 1))]
    indexes = indexes_of(listing)
    meant = {_set_of(n) for n in present}
    alone = [n for n in present if _set_of(n)[0] and not index_files.NUMBERED.match(n)]
    alone = [n for n in alone if n == FileNames().single] or alone
    if len(indexes) > 1:  # of other variants, too
        indexes = [n for n in indexes if _set_of(n) in meant] or indexes
    if len(indexes) > 1:
        raise ConflictError(f"there are {len(indexes)} index files: {', '.join(indexes)}", where=str(listing.root))
    if indexes:
        mapping = _weight_map(listing, indexes[0], notes)
        if mapping is not None:
            named = sorted(set(mapping.values()))
            missing = [n for n in named if n not in present]
            if not missing:
                same = {key for n in named if (key := index_files.set_of(n))}
                for n in present:
                    if n not in named and index_files.set_of(n) in same:
                        notes.append(f"{n} is not in the index; it is read, and the index rebuilt")
                        named.append(n)
                    elif n not in named:
                        notes.append(f"{n} is not part of the checkpoint that {indexes[0]} describes; left out")
                for key in same:
                    _refuse_gaps(listing, key, sets[key])
                return sorted(named), indexes[0], mapping, notes
            if len(complete) != 1 and not alone:
                raise IncompleteError(
                    f"{len(missing)} of {len(named)} shards that the index names are missing: {missing[0]}",
                    where=str(listing.path(indexes[0])),
                    hint=lost(listing, missing[0]) or "fetch the missing files; a checkpoint is only read whole",
                )
            notes.append(f"{indexes[0]} is stale (it names {missing[0]}, which is not there); rebuilt from the headers")
    if len(alone) == 1 and not sets:
        names = alone
        notes += [f"{n} is not part of {alone[0]}; left out" for n in present if n not in names]
    elif len(complete) == 1 and not alone:
        stem, total = complete[0]
        names = [index_files.shard_name(stem, i, total) for i in range(1, total + 1)]
        others = [k for k in sets if k != complete[0]]
        notes += [f"{len(sets[k])} shards of another set of {k[1]} are left out: it is not complete" for k in others]
        if not indexes:
            notes.append("the index is missing: built from the headers")
    elif sets and not complete:
        key = max(sets, key=lambda k: len(sets[k]))
        _refuse_gaps(listing, key, sets[key])
        names = []
    elif sets or alone:
        raise ConflictError(
            "there is more than one checkpoint in this directory",
            where=[str(listing.root), *alone, *(f"{s}-*-of-{t:05d}.safetensors" for s, t in sets)],
            hint="give the path of the index or of the only file of one, or remove the stale files",
        )
    else:
        names = present
    if not names:
        raise IncompleteError(
            "there are no model weights here",
            where=str(listing.root),
            hint=_instead(listing),
        )
    return names, "", None, notes


def _instead(listing: Listing) -> str:
    """A hint for a directory without a model's weights."""
    unused = listing.safetensors()
    if not unused and (indexes := indexes_of(listing)):
        return f"{indexes[0]} is here, and no file that it could be of: fetch the shards"
    if "adapter_config.json" in listing.names:
        return f"this is an adapter: `ckpttool merge MODEL+{listing.root} -o DST` adds it to its model"
    if unused:
        return f"{unused[0]} is not a model's weights by its name; give its path to read it all the same"
    return "give the directory that holds the .safetensors files"


def _refuse_gaps(listing: Listing, key: tuple[str, int], parts: set[int]) -> None:
    stem, total = key
    if missing := index_files.gaps(total, parts):
        first = index_files.shard_name(stem, missing[0], total)
        raise IncompleteError(
            f"{len(missing)} of {total} shards are missing: {first}",
            where=str(listing.root),
            hint=lost(listing, first) or "fetch the missing files; a checkpoint is only read whole",
        )


def _weight_map(listing: Listing, name: str, notes: list[str]) -> dict[str, str] | None:
    try:
        data = listing.json(name)
    except CorruptError as e:
        notes.append(f"{name} is not usable ({e.what}); rebuilt from the headers")
        return None
    found = index_files.weight_map(data)
    if not found:
        notes.append(f"{name} has no weight_map; rebuilt from the headers")
        return None
    for tensor, file in found.items():
        if why := index_files.misplaced(file):
            raise ConflictError(
                f"the index says that `{tensor}` is in `{file}`, {why}",
                where=str(listing.path(name)),
                hint=f"`ckpttool inspect {listing.root} --write-index` rebuilds it from the shards",
            )
    return found


def _refuse_copies(listing: Listing, index: Mapping[str, str], held: Collection[str]) -> None:
    """Raises ConflictError where shards hold the same tensors and no shard has what one of them should hold."""
    meant: dict[str, list[str]] = {}
    for name, file in index.items():
        meant.setdefault(file, []).append(name)
    for file, names in meant.items():
        if not any(n in held for n in names):
            raise ConflictError(
                f"{file} holds tensors of another shard, and none of the {len(names)} that the index puts there"
                f" (`{names[0]}`)",
                where=str(listing.path(file)),
                hint="a shard was copied under the name of another one: fetch this one again",
            )


def _index_notes(index: Mapping[str, str], real: Mapping[str, str]) -> list[str]:
    notes = []
    if gone := [n for n in index if n not in real]:
        notes.append(f"the index names {len(gone)} tensors that no shard holds (`{gone[0]}`); rebuilt")
    if extra := [n for n in real if n not in index]:
        notes.append(f"{len(extra)} tensors are in shards but not in the index (`{extra[0]}`); rebuilt")
    if moved := [n for n in real if n in index and index[n] != real[n]]:
        notes.append(f"the index puts {len(moved)} tensors in the wrong shard (`{moved[0]}`); rebuilt")
    return notes
