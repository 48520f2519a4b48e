"""An index and its files against each other."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from ckpttool.answers.findings import CheckResult
from ckpttool.containers.index import IndexRules, Sets, gaps, misplaced, sets_of, total_size, weight_map
from ckpttool.core.catalog import StoredTensor
from ckpttool.core.files import DataFile, Place
from ckpttool.core.words import ranges
from ckpttool.storage.listing import Listing

ANEW = "rebuild the index: `ckpttool inspect DIR --write-index`"


@dataclass(slots=True)
class ExaminedFile:
    """One file as far as it can be read."""

    name: str
    info: DataFile | None
    tensors: list[StoredTensor]
    sound: bool


class Index(NamedTuple):
    """The contents of an index."""

    mapped: dict[str, str]
    total: float | None
    """Its total_size; None where it has none, or where that is not of the tensors in the files."""
    stands_for: bool
    """Whether it names tensors that are computed from the stored ones."""


def parse_index(data: Mapping[str, Any], rules: IndexRules, where: Place, result: CheckResult) -> Index | None:
    """Parse an index, with findings about its form; None when it has no usable weight_map."""
    mapped = weight_map(data)
    if mapped is None:
        result.add("index-json", f"{where.name} has no weight_map of names", where)
        return None
    outside = {v for v in mapped.values() if misplaced(v)}
    for v in sorted(outside):
        result.add("index-json", f"the index names `{v}`, {misplaced(v)}", where)
    stands_for = rules.stands_for(data)
    total = None if stands_for else total_size(data)
    return Index({k: v for k, v in mapped.items() if v not in outside}, total, stands_for)


def check_numbers(listing: Listing, sets: Sets, wanted: Mapping[str, None], result: CheckResult) -> None:
    """Gaps and mixtures in ``stem-00001-of-00004``."""
    if len(sets) > 1 and not wanted:
        shown = ", ".join(f"{s}-*-of-{t:05d}" for s, t in sets)
        text = f"shards of {len(sets)} sets are in one directory: {shown}"
        result.add("shard-numbering", text, listing.root, "keep one set and move the others away")
        return
    named = sets_of(wanted)
    for (stem, total), parts in sets.items():
        if wanted and (stem, total) not in named:
            continue
        # Those that the index names are reported already.
        lost = gaps(total, parts.union(*(p for (s, _), p in named.items() if s == stem)))
        if lost:
            result.add(
                "shard-missing",
                f"{len(lost)} of {total} shards are missing: {stem}-{{{ranges(lost)}}}-of-{total:05d}.safetensors",
                listing.root,
                "fetch the files",
            )
        beyond = sorted(p for p in parts if p > total or p < 1)
        if beyond:
            text = f"shard {beyond[-1]} of {total}: the number is not from 1 to {total}"
            result.add("shard-numbering", text, f"{listing.root}/{stem}-*-of-{total:05d}.safetensors")


def check_mixture(
    listing: Listing, stem: str, files: Collection[str], wanted: Collection[str], result: CheckResult
) -> bool:
    """Report files of one stem that are those of several saves, where the index, which names the files ``wanted``, does
    not say which of them count. Returns whether there are any.
    """
    if any(f in files for f in wanted):
        return False
    totals = sorted(total for s, total in sets_of(files) if s == stem)
    single = f"{stem}.safetensors"
    if len(totals) > 1:
        shown = ", ".join(f"{stem}-*-of-{total:05d}" for total in totals)
        text = f"shards of {len(totals)} sets are in one directory: {shown}"
    elif totals and single in files:
        text = f"{single} and numbered shards of it are in one directory"
    else:
        return False
    result.add("shard-numbering", text, listing.root, "keep one set and move the others away")
    return True


def check_duplicates(
    listing: Listing, files: Iterable[ExaminedFile], mapped: Mapping[str, str] | None, result: CheckResult
) -> None:
    """Tensors that are in two of the files."""
    seen: dict[str, str] = {}
    for f in files:
        for t in f.tensors:
            if t.name in seen:
                said = (mapped or {}).get(t.name)
                says = f"; the index says {said}" if said in (seen[t.name], f.name) else ""
                text = f"tensor `{t.name}` is in {seen[t.name]} and in {f.name}{says}"
                result.add("duplicate-tensor", text, listing.root, "remove the stale copy")
            else:
                seen[t.name] = f.name


def check_mapping(
    listing: Listing,
    files: list[ExaminedFile],
    index: Index,
    missing: Collection[str],
    result: CheckResult,
    rules: IndexRules,
) -> None:
    """The index against the headers."""
    unknown = {*missing, *(f.name for f in files if not f.sound)}
    places: dict[str, list[str]] = {}
    for f in files:
        for t in f.tensors:
            places.setdefault(t.name, []).append(f.name)
    mapped = index.mapped
    for name, shard in mapped.items():
        held = places.get(name)
        if held is None:
            if shard not in unknown and not index.stands_for:
                text = f"the index maps tensor `{name}` to {shard}, but no shard has it"
                result.add(
                    "index-missing", text, listing.path(shard), "the model lacks a tensor, or the index is stale"
                )
        elif shard not in held and shard not in unknown:
            text = f"the index maps tensor `{name}` to {shard}, but it is in {held[0]}"
            result.add("index-shard", text, listing.path(shard), ANEW)
    for name, held in places.items():
        if name not in mapped and not (index.stands_for and "@" in name):
            result.add(
                "index-extra",
                f"tensor `{name}` of {held[0]} is not in the index; loaders skip it",
                listing.path(held[0]),
                ANEW,
            )
    said = index.total
    if said is not None and not unknown:
        tensors = counted({f.name: f.tensors for f in files}, rules)
        real = sum(t.nbytes for t in tensors)
        if said != real:
            why = explain_total(said, tensors, sum(f.info.size for f in files if f.info is not None))
            text = f"the index says total_size {said:,}, the tensors have {real:,} bytes{why}"
            result.add("total-size", text, listing.root)


def counted(files: Mapping[str, Iterable[StoredTensor]], rules: IndexRules) -> list[StoredTensor]:
    """The tensors that a total_size counts: each name once, but all runs of it."""
    return list({(t.name, n if rules.runs else ""): t for n, held in files.items() for t in held}.values())


def explain_total(said: float, tensors: list[StoredTensor], file_bytes: int) -> str:
    """What a wrong total_size counted instead, as ` (...)`; "" where that is not known."""
    real = sum(t.nbytes for t in tensors)

    def of(dtypes: tuple[str, ...]) -> int:
        return sum(t.nbytes for t in tensors if t.dtype in dtypes)

    e5m2, bools = of(("F8_E5M2",)), of(("BOOL",))
    fp8 = of(("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"))
    named = "the size of an element was taken from the digits at the end of its dtype's name"
    guesses: list[tuple[float, str]] = [
        (real - e5m2, f"F8_E5M2 was counted as nothing: {named}"),
        (real - bools + bools // 8, f"BOOL was counted as one bit: {named}"),
        (real - e5m2 - bools + bools // 8, f"F8_E5M2 was counted as nothing and BOOL as one bit: {named}"),
        (real - fp8, "FP8 tensors were not counted"),
        (real + fp8, "FP8 tensors were counted with two bytes an element, as before they were quantized"),
        (sum(prod(t.shape) for t in tensors), "this is the number of elements"),
        (file_bytes, "this is the size of the files, headers included"),
    ]
    for value, why in guesses:
        if said == value != real:
            return f" ({why})"
    return ""
