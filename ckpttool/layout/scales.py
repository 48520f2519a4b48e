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
from ckpttool.formats.config import quantization

_SUFFIXES = (
    ("_scale_inv", ""),
    ("weight_scale", "weight"),
    (".weight_scale", ".weight_packed"),
    (".qscale_weight", ".weight"),
    (".scale", ".weight"),
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


def is_sidecar(name: str) -> bool:
    """Numbers that mean something only beside quantized weights, activations or caches."""
    return name.endswith(_BESIDE)


def is_per_tensor_scale(name: str, shape: tuple[int, ...]) -> bool:
    """One number for a whole tensor (``input_scale``, ``k_scale``): every rank holds it."""
    return name.endswith("scale") and prod(shape) == 1


def config_block(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Sides of the blocks of quantized weights, if the config names them: ``weight_block_size``, or what
    compressed-tensors says of its weights. Of 4-bit codes they are sides in bytes, two codes each."""
    quant = quantization(config)
    block = quant.get("weight_block_size")
    groups = quant.get("config_groups")
    for group in groups.values() if block is None and isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            continue
        block, size = weights.get("block_structure"), weights.get("group_size")
        if block is None and isinstance(size, int) and str(weights.get("strategy")) in ("group", "tensor_group"):
            block = [1, size // 2 if weights.get("num_bits") == 4 else size]
    if isinstance(block, list) and len(block) == 2 and all(type(b) is int and b > 0 for b in block):
        return (block[0], block[1])
    return None


def block_of(
    weight: tuple[int, ...], scale: tuple[int, ...], config: tuple[int, int] | None, *, name: str
) -> tuple[int, ...] | None:
    """Elements per scale along each axis, or None for a scale that is one number for the whole weight.

    0 is "all of the axis, however long": one scale for each output, stored [out, 1], or for each of several matrices.
    Other grids are in the config's blocks; where it names none, in blocks of 128, or of an exact division. Raises
    LayoutError for what fits none of these.
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
    wrong = f"the scales {list(scale)} do not fit their weight {list(weight)}"
    if len(scale) != len(weight):
        raise LayoutError(wrong)
    one = (1,) * (len(weight) - 2)
    # Of a matrix that is stored [in, out] the sides are the other way round.
    for sides in (config, config[::-1]) if config else ():
        block = (*one, *sides)
        if all(-(-n // b) == s for n, s, b in zip(weight, scale, block, strict=True)):
            return block
    for sides in ((1, 0), (0, 1), (0, 0)):
        if scale == (*weight[:-2], *(n if side else 1 for n, side in zip(weight[-2:], sides, strict=True))):
            return (*one, *sides)
    if config:
        raise LayoutError(
            f"{wrong} in blocks of {config[0]}x{config[1]}",
            hint="these are the blocks that quantization_config of config.json names",
        )
    out = []
    for n, s in zip(weight, scale, strict=True):
        for side in (128, n // s if s and n % s == 0 else 0):
            if side and -(-n // side) == s:
                out.append(side)
                break
        else:
            if s != 1:
                raise LayoutError(
                    f"{wrong} in blocks of 128",
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
