"""What the options say, in the types that ops take. An invalid value is a UsageError naming its option."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from ckpttool.core.files import Place
    from ckpttool.targeting.recode import Recoding


def place(text: str | None) -> Place | None:
    """Where a path or URL is; None where the option is not given."""
    from ckpttool.storage.place import parse_place

    return None if text is None else parse_place(text)


def local(text: str | None) -> Path | None:
    """A file that is written or changed on this machine. Raises UsageError for one that is elsewhere."""
    from ckpttool.storage.place import local_path

    found = place(text)
    return None if found is None else local_path(found)


def numbers(text: str, option: str, *, runs: bool = False) -> tuple[int, ...]:
    """Ranks, or layers of each stage: ``10,11,11``; with ``runs`` also ``0-3,7``."""
    from ckpttool.core.mesh import MAX_WORLD
    from ckpttool.core.words import parse_numbers

    return parse_numbers(text, option, MAX_WORLD, runs=runs)


def sides(text: str, option: str) -> tuple[int, int] | None:
    """``128x128``; None where the option is not given."""
    from ckpttool.core.words import parse_sides

    return parse_sides(text, option) if text else None


def powers_of_two(text: str) -> tuple[str, bool]:
    """``f32:pow2`` or ``pow2``: a dtype of scales, "" where it is not given, and whether scales are powers of two."""
    dtype, colon, last = text.rpartition(":")
    powers = last == "pow2"
    if colon and not powers:
        raise UsageError(f"--scale-dtype is `{text}`", hint="--scale-dtype f32, or f32:pow2 for powers of two")
    return dtype if powers else last, powers


def precision(dtype: str, option: str) -> str:
    """A dtype for dequantized weights, as the table has it."""
    from ckpttool.targeting.recode import high

    return high(dtype, option) if dtype else ""


def recoding(dequant: str, requant: str) -> Recoding | None:
    """What becomes of quantized weights, None where they stay."""
    from ckpttool.quant.scheme import scheme
    from ckpttool.targeting.recode import Recoding

    if dequant and requant:
        raise UsageError("--dequant and --requant exclude each other")
    if requant:
        recipe, colon, block = requant.partition(":")
        if colon and not block:
            raise UsageError(f"--requant `{requant}` has no block behind its colon", hint="--requant block:64x128")
        return Recoding(scheme(recipe, block=sides(block, "--requant")), like_source=True)
    return Recoding(None, precision(dequant, "--dequant")) if dequant else None
