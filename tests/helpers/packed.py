"""Packed weights made and taken apart with numpy, as the software that owns each format does it.

Nothing of the package is used: integers go into words one at a time, and a weight is what comes out of its words,
scales and zero points.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.helpers.tensorfile import Array, Raw, Tensors

GROUP = 16
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbours lies in each nibble of a word, lowest first."""


@dataclass(frozen=True)
class Kind:
    """One way to pack."""

    name: str
    bits: int
    group: int = GROUP
    """-1: one for all inputs."""
    act_order: bool = False
    zeros: bool = True

    @property
    def config(self) -> dict[str, Any]:
        """quantization_config."""
        if self.name == "gptq":
            return {
                "quant_method": "gptq", "bits": self.bits, "group_size": self.group, "desc_act": self.act_order,
                "sym": False, "checkpoint_format": "gptq",
            }  # fmt: skip
        if self.name == "awq":
            return {"quant_method": "awq", "bits": 4, "group_size": self.group, "version": "gemm", "zero_point": True}
        weights = {
            "num_bits": self.bits, "type": "int", "strategy": "channel" if self.group < 0 else "group",
            "group_size": None if self.group < 0 else self.group, "symmetric": not self.zeros,
            "actorder": "group" if self.act_order else None,
        }  # fmt: skip
        return {
            "quant_method": "compressed-tensors", "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        }  # fmt: skip

    def __str__(self) -> str:
        text = f"{self.name}-{self.bits}" + ("-channel" if self.group < 0 else "")
        return text + ("-act" if self.act_order else "") + ("" if self.zeros else "-sym")


KINDS = (
    Kind("gptq", 4),
    Kind("gptq", 8),
    Kind("gptq", 2, group=-1),
    Kind("gptq", 4, act_order=True),
    Kind("awq", 4),
    Kind("awq", 4, group=-1),
    Kind("compressed", 4),
    Kind("compressed", 8, group=-1, zeros=False),
    Kind("compressed", 4, zeros=False),
    Kind("compressed", 4, act_order=True),
)


def _pack(values: Array, bits: int, axis: int, order: tuple[int, ...] = ()) -> Raw:
    """Neighbours along ``axis`` in words of 32 bits, the first in the lowest bits."""
    moved = np.moveaxis(values, axis, -1).astype(np.uint32)
    each = 32 // bits
    groups = moved.reshape(*moved.shape[:-1], -1, each)
    words = np.zeros(groups.shape[:-1], np.uint32)
    for place in range(each):
        words |= groups[..., order[place] if order else place] << np.uint32(bits * place)
    return Raw("I32", np.moveaxis(words, -1, axis))


def _unpack(words: Array, bits: int, axis: int, order: tuple[int, ...] = ()) -> Array:
    moved = np.moveaxis(words, axis, -1)
    each = 32 // bits
    out = np.zeros((*moved.shape, each), np.int64)
    for place in range(each):
        out[..., order[place] if order else place] = moved >> np.uint32(bits * place) & np.uint32(2**bits - 1)
    return np.moveaxis(out.reshape(*moved.shape[:-1], -1), -1, axis)


def packed(kind: Kind, out: int, inputs: int, rng: np.random.Generator, inputs_groups: Array | None = None) -> Tensors:
    """A random weight [out, inputs], by the end of each tensor's name."""
    groups = 1 if kind.group < 0 else inputs // kind.group
    codes = rng.integers(0, 2**kind.bits, (inputs, out))
    zeros = rng.integers(0, 2**kind.bits - 1, (groups, out))
    scales = Raw("F16", rng.uniform(0.01, 0.1, (groups, out)).astype("<f2").view("<u2"))
    which = np.arange(inputs) // (inputs // groups)
    if kind.act_order:
        which = inputs_groups if inputs_groups is not None else rng.permutation(which)
    index = Raw("I32", which.astype("<i4").view("<u4"))
    if kind.name == "gptq":
        return {
            "qweight": _pack(codes, kind.bits, 0), "qzeros": _pack(zeros, kind.bits, 1), "scales": scales,
            "g_idx": index,
        }  # fmt: skip
    if kind.name == "awq":
        return {
            "qweight": _pack(codes, 4, 1, AWQ_ORDER), "qzeros": _pack(zeros, 4, 1, AWQ_ORDER), "scales": scales,
        }  # fmt: skip
    found = {
        "weight_packed": _pack(codes.T, kind.bits, 1),
        "weight_scale": Raw("F16", scales.bits.T.copy()),
        "weight_shape": Raw("I64", np.array([out, inputs], "<i8").view("<u8")),
    }
    if kind.zeros:
        found["weight_zero_point"] = _pack(zeros.T, kind.bits, 0)
    if kind.act_order:
        found["weight_g_idx"] = index
    return found


def unpacked(kind: Kind, tensors: Mapping[str, Raw]) -> Array:
    """The weight [out, inputs] that these tensors are."""
    if kind.name == "compressed":
        codes = _unpack(tensors["weight_packed"].bits, kind.bits, 1).T
        scales = tensors["weight_scale"].bits.view("<f2").T.astype(float)
        zeros = np.full(scales.shape, 2 ** (kind.bits - 1))
        if kind.zeros:
            zeros = _unpack(tensors["weight_zero_point"].bits, kind.bits, 0).T
        index = tensors.get("weight_g_idx")
    else:
        order = AWQ_ORDER if kind.name == "awq" else ()
        codes = _unpack(tensors["qweight"].bits, kind.bits, 1 if order else 0, order)
        zeros = _unpack(tensors["qzeros"].bits, kind.bits, 1, order) + (kind.name == "gptq")
        scales = tensors["scales"].bits.view("<f2").astype(float)
        index = tensors.get("g_idx")
    which = np.arange(len(codes)) // (len(codes) // len(scales))
    if kind.act_order:
        assert index is not None
        which = index.bits.view("<i4")
    weight: Array = (scales[which] * (codes - zeros[which])).T
    return weight
