"""One save in several directories (``--also``): what lies in two of them must say the same in both."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from ckpttool.core.files import DataFile, Place
from ckpttool.errors import ConflictError, CorruptError
from ckpttool.storage.json_file import load_json
from ckpttool.storage.listing import Listing
from ckpttool.storage.place import is_same

_CHUNK = 1 << 20
"""Bytes that are compared at a time."""

_SETTINGS = re.compile(
    r"(?:.*_)?config\.json|model_meta\.json|tokenizer.*\.json|special_tokens_map\.json|added_tokens\.json"
    r"|vocab\.(?:json|txt)|merges\.txt|.*\.model|chat_template\.(?:json|jinja)"
)
"""Small files that say what the model is; a trainer's own state may differ from node to node."""

_OF_A_NODE = re.compile(
    r"(?:(?:local|global|node|world)|\w+_parallel)_rank|node_\w+|_name_or_path|transformers_version"
)
"""Fields that each rank or node may fill in for itself."""

_HINT = "the directories must belong to one save: omit the one that does not"


def shared_config(listings: Sequence[Listing]) -> dict[str, Any]:
    """config.json of a save, from the first directory that has one; {} when none has.

    Raises ConflictError where it, or another small file of the model, says something else in another directory, and
    CorruptError for one that cannot be read.
    """
    first: dict[str, Place] = {}
    for at in listings:
        for name in filter(_SETTINGS.fullmatch, at.names):
            _check_settings(first.setdefault(name, at.path(name)), at.path(name))
    return next((c for at in listings if (c := at.json("config.json"))), {})


def _check_settings(first: Place, second: Place) -> None:
    """Two copies of a small file must agree, field by field where they are JSON."""
    try:
        if _are_same(first, second):
            return
        ours, others = load_json(first), load_json(second)
    except OSError as e:
        raise _unreadable(e, first, second) from None
    except ValueError:  # they have no fields
        check_copies(first, second)
        return
    for field, a, b in _contradictions(ours, others):
        raise ConflictError(
            f"`{field}` of {first.name} is {_shown(a)} in one directory and {_shown(b)} in another",
            where=[str(first), str(second)],
            hint=_HINT,
        )


def _contradictions(ours: Any, others: Any, field: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(path of the field, value here, value there). A field that is null says as little as one that is not there."""
    if isinstance(ours, dict) and isinstance(others, dict):
        for key in dict.fromkeys((*ours, *others)):
            if not _OF_A_NODE.fullmatch(key):
                yield from _contradictions(ours.get(key), others.get(key), f"{field}.{key}" if field else key)
    elif isinstance(ours, list) and isinstance(others, list) and len(ours) == len(others):
        for i, (a, b) in enumerate(zip(ours, others, strict=True)):
            yield from _contradictions(a, b, f"{field}[{i}]")
    elif ours != others:
        yield field, ours, others


def _shown(value: Any) -> str:
    if value is None:
        return "not set"
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


def check_copies(first: Place, second: Place) -> None:
    """A file that is in two directories of one save must be the same in both.

    Raises ConflictError where they differ, CorruptError where one cannot be read. This is the one place where opening
    a checkpoint reads its data: which of two files counts is not said anywhere else.
    """
    try:
        if is_same(first, second):
            return
        sizes = DataFile.at(first).size, DataFile.at(second).size
        if sizes[0] != sizes[1]:
            how = f"with {sizes[0]:,} and {sizes[1]:,} bytes"
        elif (at := _difference(first, second)) is not None:
            how = f"and differs from byte {at:,} on"
        else:
            return
    except OSError as e:
        raise _unreadable(e, first, second) from None
    raise ConflictError(f"{first.name} is in two directories {how}", where=[str(first), str(second)], hint=_HINT)


def _are_same(first: Place, second: Place) -> bool:
    if is_same(first, second):
        return True
    return DataFile.at(first).size == DataFile.at(second).size and _difference(first, second) is None


def _unreadable(e: OSError, *paths: Place) -> CorruptError:
    return CorruptError(f"a source cannot be read: {e.strerror}", where=[str(p) for p in paths])


def _difference(first: Place, second: Place) -> int | None:
    """The first byte in which two files of one size differ."""
    with first.open("rb") as f, second.open("rb") as g:
        at = 0
        while a := f.read(_CHUNK):
            b = g.read(_CHUNK)
            if a != b:
                return at + next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            at += len(a)
    return None
