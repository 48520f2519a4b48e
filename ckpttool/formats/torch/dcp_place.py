"""Find a save of torch.distributed.checkpoint: a directory, several that make up one, or the run above them.

run/step-100/.metadata                            run/checkpoint-500/pytorch_model_fsdp_0/.metadata
run/step-200/.metadata       the highest step     run/checkpoint-500/optimizer_0/.metadata     one save in two parts
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from ckpttool.core.files import Place
from ckpttool.core.words import count, some
from ckpttool.errors import ConflictError, IncompleteError, UsageError
from ckpttool.storage.listing import Listing, list_source
from ckpttool.storage.place import open_file

METADATA = ".metadata"
_COMMON = "common.pt"
"""File beside the chunks of Megatron's saves."""
_OF_MEGATRON = re.compile(r"iter_\d{7,18}")
_POINTER = "latest_checkpointed_iteration.txt"
_OF_RANK = re.compile(r"__\d+\.metadata")
"""Metadata file of one rank, in a save without collectives."""
_CHUNKS = re.compile(r"__\d+_\d+\.distcp")
_MARK = re.compile(r"latest\w*(\.txt)?")
_NUMBER = re.compile(r"(?P<stem>.*?)(?P<number>\d+)")
_MOST = 1000
"""Directories that are looked at."""


class ChunkDirectory(NamedTuple):
    """A directory with chunks."""

    listing: Listing
    metadata: tuple[str, ...]
    """Names of its files of metadata; () where the save was not finished."""


class DcpSave(NamedTuple):
    """All that belongs to one save."""

    listing: Listing
    """The directory that holds it."""
    parts: list[ChunkDirectory]
    config: dict[str, Any]
    notes: list[str]


def find(listing: Listing) -> DcpSave | None:
    """The save at a source, or the newest of the run there; None where there is none.

    Raises ConflictError where it is unclear which one is meant, IncompleteError for a mark that leads nowhere,
    UsageError for one file of several.
    """
    if listing.single == METADATA:
        return find(list_source(listing.root))
    if _CHUNKS.fullmatch(listing.single):
        if (listing.root / _COMMON).is_file():
            return None
        raise UsageError(
            "this is one of the files of a checkpoint",
            where=str(listing.path(listing.single)),
            hint=f"give their directory: {listing.root}",
        )
    if listing.single or any(n.endswith((".safetensors", ".index.json")) for n in listing.names):
        return None
    part = _part(listing)
    if part is None and _POINTER in listing.names:  # Megatron's, verl's
        return None
    found = DcpSave(listing, [part], listing.json("config.json"), []) if part else _below(listing, 2)
    if found is None:
        return None
    config, note = config_of(listing)
    if found.config:
        config, note = found.config, ""
    return found._replace(config=config, notes=[*found.notes, note] if note else found.notes)


def config_of(listing: Listing) -> tuple[dict[str, Any], str]:
    """config.json of a directory, or of the one above and a note about that."""
    above = listing.root.parent
    config = listing.json("config.json")
    if config or not (above / "config.json").is_file():
        return config, ""
    return list_source(above).json("config.json"), "config.json is read from the parent directory"


def _part(listing: Listing) -> ChunkDirectory | None:
    """The directory itself, where it has chunks and they are torch's: others use the names, too."""
    names = listing.names
    if _COMMON in names or (_OF_MEGATRON.fullmatch(listing.root.name) and (listing.root.parent / _POINTER).is_file()):
        return None
    metadata = (METADATA,) if METADATA in names else tuple(n for n in names if _OF_RANK.fullmatch(n))
    if metadata and b"bytecheckpoint" in _head(listing.path(metadata[0])):
        return None
    return ChunkDirectory(listing, metadata) if metadata or any(_CHUNKS.fullmatch(n) for n in names) else None


def _head(path: Place) -> bytes:
    try:
        with open_file(path) as f:
            return f.pread(256, 0)
    except OSError:
        return b""


def _below(listing: Listing, depth: int) -> DcpSave | None:
    """The save in the directories of one that has no chunks itself."""
    found: dict[str, DcpSave] = {}
    for name in listing.folders()[:_MOST]:
        inner = listing.inside(name)
        if part := _part(inner):
            found[name] = DcpSave(inner, [part], inner.json("config.json"), [])
        elif depth > 1 and (deeper := _below(inner, depth - 1)):
            found[name] = deeper
    whole = {n: s for n, s in found.items() if all(p.metadata for p in s.parts)}
    found = whole or found
    if not found:
        return None
    config = listing.json("config.json")
    stems = {_stem(n) for n in found}
    # A note says that a run is in between: a part beside a run is not part of the same save.
    alike = len({bool(s.notes) for s in found.values()}) == 1
    if len(found) > 1 and alike and len(stems) == len(found) and all(len(s.parts) == 1 for s in found.values()):
        parts = [p for s in found.values() for p in s.parts]
        return DcpSave(listing, parts, next((s.config for s in found.values() if s.config), config), [])
    chosen, why = _newest(listing, list(found))
    save = found[chosen]
    note = f"{chosen} is read{why}"
    return save._replace(config=save.config or config, notes=[note, *save.notes])


def _stem(name: str) -> str:
    m = _NUMBER.fullmatch(name)
    return m["stem"] if m else name


def _newest(listing: Listing, names: Sequence[str]) -> tuple[str, str]:
    """The save that is marked, the only one, or that with the highest number; and why."""
    if marks := [n for n in listing.names if _MARK.fullmatch(n)]:
        said = _head(listing.path(marks[0])).decode("utf-8", "replace").strip().rstrip("/").rpartition("/")[2]
        if meant := [n for n in names if n == said or (said.isdecimal() and _number(n) == int(said))]:
            return meant[0], f": {marks[0]} names it"
        raise IncompleteError(
            f"{marks[0]} names `{said[:60]}`, which is not a finished save here",
            where=str(listing.path(marks[0])),
            hint=f"give the directory of a save: {some(names)}",
            finding="latest",
        )
    if len(names) == 1:
        return names[0], ", the only save here"
    if "latest" in names:
        return "latest", f", one of {count(len(names), 'save')}"
    if len({_stem(n) for n in names}) > 1:
        raise ConflictError(
            f"there are {len(names)} saves here, and it is unclear which one to read",
            where=str(listing.root),
            hint=f"give the directory of one: {some(names)}",
        )
    return max(names, key=_number), f", the highest number of {count(len(names), 'finished save')}"


def _number(name: str) -> int:
    m = _NUMBER.fullmatch(name)
    return int(m["number"][:18]) if m else -1
