"""Codes and scales of a checkpoint, and their weights: the recipes seen from the other side.

What a name cannot say is taken from dtypes and shapes, what these cannot say from the config. The names are those of
``scheme.py``, and besides

- DeepSeek's inference code: ``X.scale``; its V4 files keep E8M0 scales and, in I8, two F4 codes in a byte
- Mistral: ``X.qscale_weight``
- torch without any scheme: FP8 tensors that were cast, without scales
- AMD Quark and torchao name scales as compressed-tensors does

Sources: vLLM's compressed_tensors_w4a4_nvfp4.py (the global scale divides), DeepSeek's kernel.py, transformers'
integrations/mxfp4.py (low half of a byte first).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from ckpttool.core.dtypes import CASTABLE, lookup
from ckpttool.errors import ConflictError, IncompleteError, UnsupportedError
from ckpttool.formats.config import quantization
from ckpttool.formats.paddle import fp8_dtype
from ckpttool.layout.packed import find_packing
from ckpttool.layout.scales import block_of, config_block, is_sidecar, weight_of

FP8 = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
BYTES = ("U8", "I8")

Table = Mapping[str, tuple[str, tuple[int, ...]]]
"""name -> (dtype, shape)"""


class Coded(NamedTuple):
    """One quantized weight."""

    name: str
    """Name in high precision."""
    shape: tuple[int, ...]
    """Shape in high precision."""
    codes: str
    """Name of the stored tensor."""
    code: str
    """dtype of a code."""
    scale: str = ""
    """Name of the scales; "" where the codes are the values (FP8 that was cast)."""
    scale_dtype: str = ""
    """Dtype to read scales as: F8_E8M0 where bytes are exponents."""
    block: tuple[int, ...] = ()
    """Elements per scale along each axis of what is coded; [..., out, in] where ``turned``."""
    factor: str = ""
    divides: bool = False
    turned: bool = False
    """The weight in high precision is [..., in, out], what is coded [..., out, in]."""


@dataclass(slots=True)
class Codes:
    """The quantized weights of a checkpoint."""

    weights: dict[str, Coded] = field(default_factory=dict)
    """Quantized weights by the name in high precision."""
    beside: list[str] = field(default_factory=list)
    """Scales of activations and caches, which mean nothing without the codes."""

    @property
    def parts(self) -> dict[str, str]:
        """Every tensor that belongs to a quantized weight -> that weight's name."""
        out: dict[str, str] = {}
        for c in self.weights.values():
            out |= {n: c.name for n in (c.codes, c.scale, c.factor) if n}
        return out


def is_scale(name: str, table: Table) -> str:
    """The tensor that ``name`` scales, if it is a scale; else ""."""
    if (weight := weight_of(name, table)) is not None:
        return weight if table[weight][0] in (*FP8, *BYTES) else ""
    blocks = name.removesuffix("_scales") + "_blocks"
    return blocks if name.endswith("_scales") and blocks in table else ""


def find_codes(table: Table, config: Mapping[str, Any], *, where: str = "") -> Codes:
    """Pair codes and scales.

    Raises IncompleteError for FP8 weights without scales in a model whose others have them, ConflictError for scales
    that fit no weight, UnsupportedError for codes that are none of ours.
    """
    out = Codes()
    scales: dict[str, str] = {}
    for name in table:
        if weight := is_scale(name, table):
            scales[weight] = name
    packing = find_packing(quantization(config), {n: dtype for n, (dtype, _) in table.items()})
    if packing is not None and packing.example not in scales:
        raise _foreign(f"`{packing.example}` is {packing.software}: packed integers, which are not dequantized", where)
    bare = []
    block = config_block(config)
    for name, (dtype, shape) in table.items():
        if name in scales:
            coded = _coded(name, scales[name], table, block, where, fp8_dtype(config))
            out.weights[coded.name] = coded
        elif dtype in FP8 and len(shape) > 1 and "scale" not in name:
            bare.append(name)
        elif lookup(dtype).bits < 8 or (dtype == "U8" and name.endswith(("_blocks", "_packed"))):
            raise _foreign(f"`{name}` is {dtype} {list(shape)}and has no known scales", where)
    if bare and (scales or quantization(config)):
        raise IncompleteError(
            f"FP8 weight `{bare[0]}` has no scales" + (f" (and {len(bare) - 1} more)" if len(bare) > 1 else ""),
            where=where,
            hint="FP8 codes are meaningless without scales; fetch the missing files",
        )
    for name in bare:
        dtype, shape = table[name]
        out.weights[name] = Coded(name, shape, name, dtype)
    if out.weights:
        parts = out.parts
        out.beside = [n for n, (_, shape) in table.items() if n not in parts and is_sidecar(n) and prod(shape) == 1]
    return out


def _foreign(what: str, where: str) -> UnsupportedError:
    return UnsupportedError(what, where=where, hint="use the model from before it was quantized")


def _coded(codes: str, scale: str, table: Table, block: tuple[int, int] | None, where: str, fp8: str) -> Coded:
    """``fp8`` is what bytes are by the config; "" if it does not say that they are floats."""
    dtype, shape = table[codes]
    scale_dtype, grid = table[scale]
    if codes.endswith("_blocks"):
        if dtype != "U8" or shape[-1:] != (16,) or grid != shape[:-1]:
            raise ConflictError(
                f"`{codes}` {list(shape)} and `{scale}` {list(grid)} are not MXFP4 blocks of 16 bytes", where=where
            )
        *lead, n, k = (*shape[:-2], shape[-2] * 32)
        return Coded(
            codes.removesuffix("_blocks"), (*lead, k, n), codes, "F4", scale, "F8_E8M0",
            (*[1] * len(lead), 1, 32), turned=True,
        )  # fmt: skip
    name = codes.removesuffix("_packed")
    packed = codes.endswith("_packed") or holds_pairs(dtype, shape, scale_dtype, grid)
    if packed:
        logical = (*shape[:-1], 2 * shape[-1])
        if dtype not in BYTES or len(grid) != len(shape) or not grid[-1] or logical[-1] % grid[-1]:
            raise ConflictError(f"the scales `{scale}` {list(grid)} do not fit `{codes}` {list(shape)}", where=where)
        group = logical[-1] // grid[-1]
        if group != {"F8_E8M0": 32, "U8": 32, "F8_E4M3": 16}.get(scale_dtype):
            raise _foreign(
                f"`{codes}` has {scale_dtype} scales for groups of {group}: integers, and not F4 codes", where
            )
        factor = next((f for f in (f"{name}_global_scale", f"{name}_scale_2") if f in table), "")
        as_read = "F8_E8M0" if scale_dtype == "U8" else scale_dtype
        return Coded(
            name, logical, codes, "F4", scale, as_read, (*[1] * (len(shape) - 1), group), factor,
            divides=factor.endswith("global_scale"),
        )  # fmt: skip
    if dtype in BYTES:
        if not fp8:
            raise _foreign(f"`{codes}` is {dtype} with scales: integers, and no FP8 by config.json", where)
        dtype = fp8
    if scale_dtype == "U8":
        scale_dtype = "F8_E8M0"
    if scale_dtype not in (*CASTABLE, "F8_E8M0"):
        raise UnsupportedError(f"the scales `{scale}` are {scale_dtype}, which scales no weight", where=where)
    found = block_of(shape, grid, block, name=scale)
    if found is not None and 0 in found:
        found = tuple(b or n for b, n in zip(found, shape, strict=True))
    elif found is not None and len(found) < len(shape):
        found = (*found, *shape[len(found) :])
    return Coded(name, shape, codes, dtype, scale, scale_dtype, found or shape)


def holds_pairs(dtype: str, shape: tuple[int, ...], scale_dtype: str, grid: tuple[int, ...]) -> bool:
    """Two F4 codes in a byte: scales for groups of 32 (E8M0) or 16 (F8) of twice as many columns as there are bytes."""
    if dtype not in BYTES or len(grid) != len(shape) or not shape:
        return False
    group = {"F8_E8M0": 32, "F8_E4M3": 16}.get(scale_dtype)
    return group is not None and grid[:-1] == shape[:-1] and grid[-1] * group == 2 * shape[-1]
