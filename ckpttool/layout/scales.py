"""Scale grids: which tensor scales which weight, and how many elements share a scale along each axis.

A scale grid is cut where its weight is cut, so a cut must fall between two blocks. Sources of the names: DeepSeek and
Hugging Face finegrained FP8 (``weight_scale_inv``), compressed-tensors and ModelOpt (``weight_scale``, also of
``weight_packed``), DeepSeek's inference code (``scale``), transformers' fused experts (``gate_up_proj_scale_inv``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache
from math import prod
from typing import Any

from ckpttool.errors import LayoutError

_SUFFIXES = (
    ("weight_scale_inv", "weight"),
    ("weight_scale", "weight"),
    (".weight_scale", ".weight_packed"),
    (".qscale_weight", ".weight"),
    (".scale", ".weight"),
    ("_proj_scale_inv", "_proj"),
)

_BESIDE = (
    ".weight_scale_2",
    ".weight_global_scale",
    ".input_scale",
    ".output_scale",
    ".activation_scale",
    "_activation_scale",
    ".input_global_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".prob_scale",
    ".kv_scale",
)


def weight_of(name: str, names: Collection[str]) -> str | None:
    """The weight that ``name`` scales, if it is a scale by its name and that weight exists."""
    for suffix, weight in _SUFFIXES:
        if name.endswith(suffix):
            partner = name[: -len(suffix)] + weight
            if partner in names:
                return partner
    return None


def is_beside(name: str) -> bool:
    """Numbers that mean something only beside quantised weights, activations or caches."""
    return name.endswith(_BESIDE)


def is_lone(name: str, shape: tuple[int, ...]) -> bool:
    """One number for a whole tensor (``input_scale``, ``k_scale``): every rank holds it."""
    return name.endswith("scale") and prod(shape) == 1


def config_block(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Sides of the blocks of FP8 weights, if the config names them: ``weight_block_size``, or compressed-tensors'
    ``block_structure``."""
    quant = config.get("quantization_config")
    if not isinstance(quant, dict):
        return None
    block = quant.get("weight_block_size")
    groups = quant.get("config_groups")
    for group in groups.values() if block is None and isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        block = weights.get("block_structure") if isinstance(weights, dict) else None
    if isinstance(block, list) and len(block) == 2 and all(isinstance(b, int) and b > 0 for b in block):
        return (block[0], block[1])
    return None


def block_of(
    weight: tuple[int, ...], scale: tuple[int, ...], config: tuple[int, int] | None, *, name: str
) -> tuple[int, ...] | None:
    """Elements per scale along each axis, or None for a scale that is one number for the whole weight.

    0 is "all of the axis, however long": one scale for each output, stored [out, 1]. Otherwise the config's block
    counts when it explains the shape, then 128, then an exact division. Raises LayoutError when nothing explains it.
    """
    try:
        return _block(weight, scale, config)
    except LayoutError as e:
        raise LayoutError(e.what.replace("the scales", f"the scales `{name}`"), hint=e.hint) from None


@lru_cache(maxsize=4096)
def _block(weight: tuple[int, ...], scale: tuple[int, ...], config: tuple[int, int] | None) -> tuple[int, ...] | None:
    if all(s == 1 for s in scale):
        return None
    if len(scale) == 1 and len(weight) == 2 and scale[0] == weight[0]:
        return (1,)
    if len(scale) != len(weight):
        raise LayoutError(f"the scales {list(scale)} do not fit their weight {list(weight)}")
    if scale == (*weight[:-1], 1):
        return (*[1] * (len(weight) - 1), 0)
    out = []
    for i, (n, s) in enumerate(zip(weight, scale, strict=True)):
        named = config[i - len(weight)] if config and i >= len(weight) - 2 else 0
        for block in (named, 128, n // s if s and n % s == 0 else 0):
            if block and -(-n // block) == s:
                out.append(block)
                break
        else:
            if s != 1:
                raise LayoutError(
                    f"the scales {list(scale)} do not fit their weight {list(weight)} in blocks of 128",
                    hint="give the block in config.json: quantization_config.weight_block_size",
                )
            out.append(n)
    return tuple(out)


def single_block(
    local: tuple[int, ...], whole: tuple[int, ...], scale: tuple[int, ...], config: tuple[int, int] | None
) -> tuple[int, ...] | None:
    """The block of a rank's scale grid that has one element, or None when that is the scale of the whole weight.

    It is one block of a larger grid exactly if the rank's share of the weight is one block long wherever it is cut.
    """
    if local == whole or len(scale) != len(local):
        return None
    block = (1,) * (len(local) - 2) + (config or (128, 128))
    fits = all(n == b if n != total else n <= b for n, total, b in zip(local, whole, block, strict=True))
    return block if fits else None
