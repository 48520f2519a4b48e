"""The one table of element types: name, bits, the numpy type that holds it, and the other names people use.

Names and bit widths are those of the safetensors format (22 dtypes, in the order of its enum, which is also the order
in which its writers sort tensors). Nothing here guesses: an unknown name is an error that says which tensor has it.
numpy and ml_dtypes are imported on first use, because ``--help`` and header listings do not need them.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.errors import CorruptError, UnsupportedError

if TYPE_CHECKING:
    import numpy as np


class DType(NamedTuple):
    """One element type."""

    name: str
    bits: int
    numpy: str
    """Attribute of ``numpy`` or, where numpy lacks it, of ``ml_dtypes``, and the name in a config and in Paddle."""
    kind: str
    """``float``, ``int``, ``bool`` or ``complex``; ``scale`` for the exponent-only E8M0."""
    aliases: tuple[str, ...]
    """Further names, of torch, Paddle and Hugging Face's configs."""


_TABLE = (
    DType("BOOL", 8, "bool", "bool", ()),
    DType("F4", 4, "float4_e2m1fn", "float", ("float4_e2m1fn_x2",)),
    DType("F6_E2M3", 6, "float6_e2m3fn", "float", ()),
    DType("F6_E3M2", 6, "float6_e3m2fn", "float", ()),
    DType("U8", 8, "uint8", "int", ()),
    DType("I8", 8, "int8", "int", ()),
    DType("F8_E5M2", 8, "float8_e5m2", "float", ("fp8_e5m2", "e5m2")),
    DType("F8_E4M3", 8, "float8_e4m3fn", "float", ("fp8", "fp8_e4m3", "e4m3", "e4m3fn")),
    DType("F8_E8M0", 8, "float8_e8m0fnu", "scale", ("ue8m0", "e8m0")),
    DType("F8_E4M3FNUZ", 8, "float8_e4m3fnuz", "float", ()),
    DType("F8_E5M2FNUZ", 8, "float8_e5m2fnuz", "float", ()),
    DType("I16", 16, "int16", "int", ("short",)),
    DType("U16", 16, "uint16", "int", ()),
    DType("F16", 16, "float16", "float", ("fp16", "half")),
    DType("BF16", 16, "bfloat16", "float", ()),
    DType("I32", 32, "int32", "int", ("int",)),
    DType("U32", 32, "uint32", "int", ()),
    DType("F32", 32, "float32", "float", ("fp32", "float")),
    DType("C64", 64, "complex64", "complex", ()),
    DType("F64", 64, "float64", "float", ("fp64", "double")),
    DType("I64", 64, "int64", "int", ("long",)),
    DType("U64", 64, "uint64", "int", ()),
)

DTYPES: dict[str, DType] = {d.name: d for d in _TABLE}
ORDER: dict[str, int] = {d.name: i for i, d in enumerate(_TABLE)}
"""Position in safetensors' enum; its writers put the highest first."""

_BY_ALIAS = {alias: d.name for d in _TABLE for alias in (d.name.lower(), d.numpy, *d.aliases)}

CASTABLE = frozenset({"F16", "BF16", "F32", "F64"})
"""Dtypes that ``--dtype`` converts from and to; FP8 needs a scale and is not a cast."""


def lookup(name: str, *, where: str = "") -> DType:
    """The entry for a safetensors dtype name. Raises UnsupportedError naming ``where``."""
    try:
        return DTYPES[name]
    except KeyError:
        known = ", ".join(DTYPES)
        raise UnsupportedError(f"unknown dtype `{name}`", where=where or (), hint=f"known dtypes: {known}") from None


def find(text: str) -> DType | None:
    """The entry for a name as people write it: ``bf16``, ``bfloat16``, ``torch.bfloat16``, ``F32``; None if unknown."""
    key = text.strip().lower().removeprefix("torch.").removeprefix("paddle.")
    return DTYPES[_BY_ALIAS[key]] if key in _BY_ALIAS else None


def parse(text: str) -> DType:
    """Finds a dtype by name. Raises UnsupportedError for an unknown one."""
    found = find(text)
    if found is None:
        raise UnsupportedError(
            f"unknown dtype `{text}`", hint="use one of " + ", ".join(sorted({d.name.lower() for d in _TABLE}))
        )
    return found


def nbytes(dtype: str, count: int, *, where: str = "") -> int:
    """Bytes that ``count`` elements take. Raises CorruptError when sub-byte elements do not fill whole bytes."""
    bits = count * lookup(dtype, where=where).bits
    if bits % 8:
        raise CorruptError(f"{count} elements of {dtype} do not fill whole bytes", where=where or ())
    return bits // 8


@cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype that holds these elements (ml_dtypes registers what numpy lacks). Sub-byte types have none."""
    import numpy as np

    entry = lookup(name)
    if entry.bits < 8:
        raise UnsupportedError(f"{name} has {entry.bits} bits an element and cannot be addressed one by one")
    if hasattr(np, entry.numpy):
        found: np.dtype[Any] = np.dtype(getattr(np, entry.numpy))
    else:
        import ml_dtypes

        found = np.dtype(getattr(ml_dtypes, entry.numpy))
    return found


@cache
def itemsize(name: str) -> int:
    """Bytes of one element. Raises UnsupportedError for sub-byte types, which can only be moved whole."""
    entry = lookup(name)
    if entry.bits % 8:
        raise UnsupportedError(
            f"{name} elements are smaller than a byte; such a tensor can be copied whole but not cut",
        )
    return entry.bits // 8
