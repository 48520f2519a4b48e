"""Fields of config.json that speak of what a merge changed: dtypes, numbers of tokens, and the ids of tokens."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import Any

from ckpttool.core.catalog import Key, LogicalTensor
from ckpttool.core.dtypes import CASTABLE, DTYPES, find
from ckpttool.core.files import Place
from ckpttool.formats.base import StoredCheckpoint
from ckpttool.formats.config import is_part
from ckpttool.layout.sizes import size_spec
from ckpttool.ops.merge.models import MergeInput
from ckpttool.ops.merge.words import VocabularyPlan, has_vocabulary
from ckpttool.quant.config import DTYPE_FIELDS, mapped_fields
from ckpttool.storage.json_file import indented, load_json
from ckpttool.targeting.recode import high_precision
from ckpttool.vocabulary.read import read_vocabulary

GENERATION = "generation_config.json"

TOKEN = re.compile(r"(?:\A|_)token_(?:id|ids|index)\Z")
_DEFAULTED = re.compile(r"(?:\A|_)(?:bos|eos|pad|unk|sep|cls|mask|decoder_start)_token_ids?\Z")
"""Ids that a config can do without."""

Tensors = Mapping[Key, LogicalTensor]


def in_line(
    config: Mapping[str, Any], donor: MergeInput, tensors: Tensors, words: VocabularyPlan | None, notes: list[str]
) -> tuple[dict[str, Any], list[tuple[str, bytes]]]:
    """The donor's config with the dtypes and the vocabulary of the output, and other files rewritten for them."""
    stored, spec = donor.checkpoint.stored, donor.checkpoint.family.spec
    changed = with_dtypes(config, donor, tensors)
    rows = new_rows(donor, tensors)
    said = spec.sizes.get("vocab")
    fields = {"vocab_size", *(f.rpartition(".")[2] for f in (size_spec(said).fields if said is not None else ()))}
    changed = with_vocabulary(changed, spec.places(changed), fields, rows)
    if not rows and (words is None or words.merged is None):
        return changed, []
    number = token_change(rows, words, stored.root)
    return with_tokens(changed, number, notes), renumbered_files(stored, number, notes)


def with_dtypes(config: Mapping[str, Any], donor: MergeInput, tensors: Tensors) -> dict[str, Any]:
    """The donor's config, where each dtype that it names is what the donor's tensors of this dtype have become.

    A dtype that none of them has is what most elements have become, if they have changed.
    """
    became: dict[str, Counter[str]] = {}
    for key, t in tensors.items():
        if key.name in donor.views and t.dtype in CASTABLE:
            own = high_precision(config) if key.name in donor.codes else donor.dtype(key.name)
            became.setdefault(own, Counter())[t.dtype] += prod(t.shape)
    if not became or all(found.keys() == {own} for own, found in became.items()):
        return dict(config)
    most = {own: found.most_common(1)[0][0] for own, found in became.items()}
    usual = max(became, key=lambda own: became[own].total())

    def renewed(said: Any) -> Any:
        if isinstance(said, dict):
            return {part: renewed(d) for part, d in said.items()}
        known = find(said) if isinstance(said, str) else None
        own = known.name if known is not None else ""
        if own not in CASTABLE:
            return said
        new = most.get(own, own if most[usual] == usual else most[usual])
        return said if new == own else DTYPES[new].numpy

    return mapped_fields(config, lambda name, said: renewed(said) if name in DTYPE_FIELDS else said)


def new_rows(donor: MergeInput, tensors: Tensors) -> dict[int, int]:
    """The donor's numbers of tokens -> those of the output, where they differ; that of its embedding comes first."""
    resized = {
        donor.views[k.name].shape[0]: t.shape[0]
        for k, t in tensors.items()
        if has_vocabulary(k.name) and k.name in donor.views
    }
    return {old: new for old, new in resized.items() if old != new}


def with_vocabulary(
    config: Mapping[str, Any], places: Sequence[Mapping[str, Any]], fields: Collection[str], rows: Mapping[int, int]
) -> dict[str, Any]:
    """The config with these numbers of tokens: in all parts that have the old one, and in ``places``, where the family
    looks for it, whatever they have."""
    if not rows:
        return dict(config)
    main = next(iter(rows.values()))

    def inside(part: Mapping[str, Any]) -> dict[str, Any]:
        out = {k: inside(v) if is_part(k, v) else v for k, v in part.items()}
        ours = any(part is place for place in places)
        for f in fields:
            if type(said := part.get(f)) is int:
                out[f] = rows.get(said, main if ours else said)
        return out

    return inside(config)


def token_change(rows: Mapping[int, int], words: VocabularyPlan | None, root: Place) -> Callable[[int], int | None]:
    """The number in the output of a token of the donor, whose files lie in ``root``; None where it is not there."""
    if words is not None and words.merged is not None:
        names, tokens = {i: t for t, i in read_vocabulary(root).tokens.items()}, words.merged.tokens
        return lambda i: tokens.get(names[i]) if i in names else i
    limit = min(rows.values(), default=1 << 62)
    return lambda i: i if i < limit else None


def renumbered_files(
    stored: StoredCheckpoint, number: Callable[[int], int | None], notes: list[str]
) -> list[tuple[str, bytes]]:
    """The small files that name tokens by their ids, where these change."""
    out = []
    for name in (n for n in stored.companions if n == GENERATION):
        with suppress(OSError, ValueError):
            if isinstance(said := load_json(stored.root / name), dict):
                changed = with_tokens(said, number, notes, name)
                out += [(name, indented(changed))] if changed != said else []
    return out


def with_tokens(
    config: Mapping[str, Any], number: Callable[[int], int | None], notes: list[str], label: str = "config.json"
) -> dict[str, Any]:
    """The config with the ids that its special tokens have in the output.

    One that is not there is null, or where the model needs one named in a note and left as it is.
    """
    lost: dict[str, Any] = {}

    def renewed(name: str, said: Any) -> Any:
        if not TOKEN.search(name) or isinstance(said, bool):
            return said
        ids = said if isinstance(said, list) else [said]
        if not ids or not all(type(i) is int and i >= 0 for i in ids):
            return said
        found = [number(i) for i in ids]
        kept = [i for i in found if i is not None]
        if len(kept) < len(ids):
            lost[name] = said
            if not _DEFAULTED.search(name):
                return said
        return (kept if isinstance(said, list) else kept[0]) if kept else None

    out = mapped_fields(config, renewed)
    if lost:
        what = ", ".join(f"{name} {said}" for name, said in lost.items())
        notes.append(f"{label}: {what}: no token of the output; null where the field can be")
    return out
