"""The tensors of a document in few bytes: about ten for each, with statistics and a histogram.

Most columns have few different values, so they are stored as a table of values and an index for each tensor. Names
become templates and numbers. Numbers are stored in decimal, as a whole number of three to six digits and a power of
ten. Whole numbers are split into planes, all lowest bytes first: bytes that are alike stand together, which is what
deflate needs to find them. Where differences between neighbours deflate better (offsets), those are stored.

The script of the page reads this. All integers are little-endian.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpttool.core.tensor_names import SLOT, locate, templates
from ckpttool.errors import plain

if TYPE_CHECKING:
    from ckpttool.report.page.document import Column, OtherHistograms, PageTensors

Array = np.ndarray[Any, np.dtype[Any]]

_FIDELITY = ((20_000, 6, 15), (50_000, 4, 7), (math.inf, 3, 7))
"""Up to how many tensors; significant digits of their numbers; height of a histogram's highest bin."""
_NO, _NAN, _INF, _NEGATIVE_INF = -512, 511, 510, -510
"""Exponents that stand for no number, and for those that are not finite; those of float64 lie between."""
_DICTIONARY = ("text", "code", "shape")
_WHOLE = ("bytes", "count")
_WIDEST = 1 << 53
"""Whole numbers below this are exact in JavaScript."""


class Pool:
    """Bytes that the JSON refers to."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._length = 0

    def add(self, data: bytes) -> int:
        """Where the bytes are."""
        at = self._length
        self._parts.append(data)
        self._length += len(data)
        return at

    def contents(self) -> bytes:
        return b"".join(self._parts)

    def whole(self, values: Array) -> dict[str, Any]:
        """Whole numbers from 0 to below 2^53, as planes of bytes, or differences of neighbours as such."""
        ways = {"plain": values.astype(np.uint64)}
        if values.size > 1:
            steps: Array = np.diff(values.astype(np.int64), prepend=np.int64(0))
            ways["steps"] = ((steps << 1) ^ (steps >> 63)).astype(np.uint64)
        packed = {way: _planes(numbers) for way, numbers in ways.items()}
        best = min(packed, key=lambda way: len(zlib.compress(packed[way], 1)))
        data = packed[best]
        return {"at": self.add(data), "n": values.size, "planes": len(data) // max(values.size, 1), "way": best}


def _planes(values: Array) -> bytes:
    """All lowest bytes, then all second ones, as far as there is one that is not zero."""
    width = (int(values.max(initial=0)).bit_length() + 7) // 8
    return values.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :width].T.tobytes()


def pack(tensors: PageTensors, pool: Pool) -> dict[str, Any]:
    """What page.js makes names, columns and histograms of. The bytes go to ``pool``."""
    names = [plain(name) for name in tensors["names"]]
    _, digits, levels = next(f for f in _FIDELITY if len(names) <= f[0])
    return {
        "count": len(names),
        "digits": digits,
        **_names(names, tensors.get("parameters", names), pool),
        "columns": [_column(column, len(names), digits, pool) for column in tensors["columns"]],
        "histograms": _histograms(tensors.get("histograms"), levels, pool),
        "others": _others(tensors.get("others"), levels, pool),
    }


def _names(names: Sequence[str], parameters: Sequence[str], pool: Pool) -> dict[str, Any]:
    found: dict[str, int] = {}
    kinds: list[dict[str, Any]] = []
    which: list[int] = []
    numbers: list[int] = []
    for name, parameter, (template, slots) in zip(names, parameters, templates(names), strict=True):
        # A number too long for the page's 53 bits stays part of the name.
        if any(n >= _WIDEST for n in slots):
            template, slots = name, ()  # noqa: PLW2901
        kind = found.get(template)
        if kind is None:
            kind = found[template] = len(kinds)
            place = locate(plain(parameter))
            kinds.append({"text": template.split(SLOT), "stack": place.stack, "module": place.module})
        which.append(kind)
        numbers += slots
    return {"templates": kinds, "template": pool.whole(_array(which)), "numbers": pool.whole(_array(numbers))}


def _array(values: Iterable[int]) -> Array:
    return np.fromiter(values, np.int64)


def _column(column: Column, n: int, digits: int, pool: Pool) -> dict[str, Any]:
    kind, values = column["kind"], column["values"]
    if len(values) != n:
        raise ValueError(f"column {column['id']}: {len(values)} values for {n} tensors")
    said: dict[str, Any] = {k: plain(v) if isinstance(v, str) else v for k, v in column.items() if k != "values"}
    if kind in _DICTIONARY:
        return {**said, **_dictionary(values, pool)}
    if kind in _WHOLE:
        # 0 stands for None.
        return {**said, "whole": pool.whole(_array(0 if v is None else int(v) + 1 for v in values))}  # type: ignore[arg-type]
    return {**said, "decimal": _decimal(values, digits, pool)}  # type: ignore[arg-type]


def _dictionary(values: Sequence[Any], pool: Pool) -> dict[str, Any]:
    found: dict[Hashable, int] = {}
    which = [found.setdefault(v if v is None or isinstance(v, str) else tuple(v), len(found)) for v in values]
    texts = [plain(v) if isinstance(v, str) else v for v in found]
    return {"values": texts, "index": pool.whole(_array(which))}


def _decimal(values: Sequence[float | None], digits: int, pool: Pool) -> dict[str, Any]:
    """Numbers as ``m * 10^e``, where m has ``digits`` digits or is 0."""
    mantissas, exponents = [], []
    special = {math.inf: _INF, -math.inf: _NEGATIVE_INF}
    for v in values:
        m, e = 0, 0
        if v is None:
            e = _NO
        elif not math.isfinite(v):
            e = special.get(v, _NAN)
        elif v:
            text = f"{v:.{digits - 1}e}"  # Python rounds it right; the same text comes from the page's own numbers
            head, _, tail = text.partition("e")
            m, e = int(head.replace(".", "")), int(tail) - digits + 1
        mantissas.append(m)
        exponents.append(e - _NO)
    return {
        "m": pool.whole(np.asarray([(m << 1) ^ (m >> 63) for m in mantissas], np.int64)),
        "e": pool.whole(_array(exponents)),
    }


def _others(others: OtherHistograms | None, levels: int, pool: Pool) -> dict[str, Any] | None:
    packed = _histograms(others["counts"], levels, pool) if others is not None else None
    return packed and others and {**packed, "names": [plain(name) for name in others["names"]]}


def _histograms(counts: Sequence[Sequence[int] | None] | None, levels: int, pool: Pool) -> dict[str, Any] | None:
    """Heights of bins; a bin that holds anything has at least height 1. Tensors without have heights of 0."""
    bins = max((len(c) for c in counts or () if c), default=0)
    if not bins or counts is None:
        return None
    heights = np.zeros((len(counts), bins), np.uint8)
    for at, found in enumerate(counts):
        if found and max(found) > 0:
            of_one = np.asarray(found, np.float64)
            heights[at] = np.ceil(of_one * levels / of_one.max())
    return {"bins": bins, "levels": levels, "at": pool.add(heights.tobytes())}
