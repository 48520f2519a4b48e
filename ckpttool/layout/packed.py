"""Packed weights: several integers in a word, beside their scales and zero points, in place of one tensor ``weight``.

What each stored tensor is to its weight, along the two axes in the order in which it has them (W integers in a word,
G elements that share a scale):

=====================  ================================================  ===========  =============================
software               tensors                                           axes         config
=====================  ================================================  ===========  =============================
GPTQ, 2, 4 or 8 bits   qweight [in/W, out], qzeros [in/G, out/W],        [in, out]    bits, group_size, desc_act
                       scales [in/G, out], g_idx [in]
AWQ (GEMM), 4 bits     qweight [in, out/W], qzeros [in/G, out/W],        [in, out]    bits, group_size, version
                       scales [in/G, out]
compressed-tensors     weight_packed [out, in/W],                        [out, in]    num_bits, group_size, actorder
(pack-quantized,       weight_zero_point [out/W, in/G],
4 or 8 bits)           weight_scale [out, in/G], weight_g_idx [in],
                       weight_shape [2], of the uncut weight
=====================  ================================================  ===========  =============================

Such a tensor is a grid over its weight, as scales are: it is cut where the weight is, between two words and two
groups. With act-order (``g_idx``) an input's group can be any, so every rank keeps all groups, as vLLM does. What the
config does not say, or software whose bytes have no such axes, is refused by name before anything is cut, joined,
cast or merged. Sources: AutoGPTQ's and AutoAWQ's packers, compressed-tensors' ``pack_to_int32``, bitsandbytes'
``QuantState.as_dict``, vLLM's gptq_marlin.py, awq.py and compressed_tensors_wNa16.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from ckpttool.errors import LayoutError, UnsupportedError
from ckpttool.layout.rules import Rule

INPUTS = "inputs"
"""One number for each input."""
GLOBAL = "global"
"""One number for the uncut weight; every rank holds it."""

PlaceInPacked = tuple[int, int] | str
"""Elements of the weight for each stored one along both axes (0: all of them have one); or INPUTS, or GLOBAL."""

INTEGERS = ("I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64")

_MARKS = ("qweight", "qzeros", "g_idx", "weight_zero_point", "absmax", "quant_map", "SCB", "W_q")
"""Ends of names that only packed weights have."""

_CODES = ("qweight", "weight_packed")

_BUFFERS = ("position_ids", "token_type_ids", "num_batches_tracked", "relative_position_index", "bias", "masked_bias")
"""Integers that are no weights."""

_FLOATS = ("", "fp8", "fbgemm_fp8", "mxfp4", "modelopt", "compressed-tensors", "quark")
"""``quant_method`` of software whose integer tensors have the axes of their weight."""


class PackedTensor(NamedTuple):
    """A stored tensor of a packed weight."""

    weight: str
    """The weight's name if it were not packed."""
    codes: str
    """Name of the tensor with the integers."""
    place: PlaceInPacked


@dataclass(frozen=True, slots=True)
class Packing:
    """A checkpoint's way to pack its weights."""

    software: str
    why: str = ""
    """Reason why these weights cannot be cut or joined; "" where they can."""
    in_out: bool = False
    """The tensors are [in, out]."""
    places: tuple[tuple[str, PlaceInPacked], ...] = ()
    """Places by the end of a name; that of the integers comes first."""
    any_group: bool = False
    """Act-order: an input may be of any group."""
    beside: tuple[str, ...] = ()
    """Ends of names of what lies beside integers that cannot be cut: scales, tables, states."""
    pairs: str = ""
    """An end of ``beside``: with such a tensor behind its name, a weight holds two integers in a byte."""
    example: str = ""
    """One of the tensors, for messages."""

    def part(self, name: str, names: Collection[str]) -> PackedTensor | None:
        """The part of a packed weight that ``name`` is; None for any other tensor of the checkpoint."""
        for end, place in self.places:
            stem = name[: -len(end)]
            if name.endswith(end) and stem[-1:] in ("", ".", "_") and (codes := stem + self.places[0][0]) in names:
                return PackedTensor(f"{stem}weight", codes, place)
        return None

    def parts(self, names: Collection[str]) -> dict[str, PackedTensor]:
        """All tensors of packed weights."""
        return {n: part for n in names if (part := self.part(n, names)) is not None}

    def check(self, rule: Rule, name: str, dtype: str) -> None:
        """A tensor beside the packed ones. Raises UnsupportedError for integers that are cut without being known."""
        if rule.verb != "replicate" and (self.why or dtype in INTEGERS or name.endswith(_MARKS)):
            raise (self if self.why else replace(self, why="this tensor is none that is known", example=name)).refuse(
                "cut"
            )

    def refuse(self, what: str) -> UnsupportedError:
        """The error for ``what`` ("cut", "cast", ...), which these weights do not allow."""
        return UnsupportedError(
            f"{self.software} weights cannot be {what}" + (f": {self.why}" if self.why else ""),
            where=f"tensor `{self.example}`",
            hint="they can be copied as they are; for anything else take the model as it was before it was quantized",
        )

    def rule(self, rule: Rule, name: str, part: PackedTensor) -> Rule:
        """The rule of a stored tensor, from that of its weight. Raises UnsupportedError."""
        if rule.verb == "replicate":
            return rule
        if self.why:
            raise self.refuse("cut")
        if rule.verb == "vocab" or rule.axis is not None or rule.rows:
            raise UnsupportedError(
                f"`{part.codes}` is packed by {self.software} and cannot be cut by `{rule.text}`", where=rule.place
            )
        whole = self.any_group and name != part.codes and part.place != INPUTS
        return _rule(rule, part.place, self.in_out, whole)

    def blocks(self, part: PackedTensor, ndim: int) -> tuple[int, ...]:
        """Elements of the weight for each stored one, along each axis; () where the tensor is no grid over it."""
        return () if isinstance(part.place, str) else (*[1] * (ndim - 2), *part.place)

    def weight_shape(self, codes: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the weight, in the order of the stored axes, from that of its integers."""
        block = self.places[0][1]
        if isinstance(block, str) or len(codes) < 2:
            return codes
        return (*codes[:-2], codes[-2] * block[0], codes[-1] * block[1])

    def whole(self, part: PackedTensor, codes: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of what a tensor is a grid over, when that of the integers is known; else ()."""
        return () if isinstance(part.place, str) else self.weight_shape(codes)

    def base(self, part: PackedTensor, name: str, shape: tuple[int, ...], codes: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the weight, seen from one of its tensors: [in] of those that have one number for each input.

        Raises LayoutError when the tensor does not fit the integers, whose shape is ``codes``.
        """
        weight = self.weight_shape(codes)
        if part.place == GLOBAL or len(codes) < 2:
            return shape
        if part.place == INPUTS:
            base = wanted = (*weight[:-2], weight[-2] if self.in_out else weight[-1])
        else:
            base = weight
            blocks = self.blocks(part, len(weight))
            wanted = tuple(-(-n // b) if b else 1 for n, b in zip(weight, blocks, strict=True))
        if shape != wanted:
            raise LayoutError(
                f"`{name}` {list(shape)} does not fit `{part.codes}` {list(codes)}:"
                f" by config.json's quantization_config it should be {list(wanted)}",
                hint="bits and group_size of config.json must be those of the tensors; a mixture of them is not known",
            )
        return base


@lru_cache(maxsize=1024)
def _rule(rule: Rule, place: PlaceInPacked, in_out: bool, whole: bool) -> Rule:  # noqa: FBT001 - cached by position
    """``whole``: where the inputs are cut, every rank needs all of it."""
    by_rows = rule.verb == "row"
    if place == INPUTS and by_rows:
        return replace(rule, verb="column", axis=-1)
    if isinstance(place, str) or (by_rows and whole):
        return replace(rule, verb="replicate")
    return replace(rule, in_out=in_out)


def find_packing(quant: Mapping[str, Any], dtypes: Mapping[str, str]) -> Packing | None:
    """The packing of the tensors (name -> dtype), or None for a checkpoint without packed integers.

    ``quant`` is what the config says of quantization.
    """
    method = _text(quant, "quant_method")
    example = next((n for n, d in dtypes.items() if n.endswith(_MARKS) or (d == "I32" and n.endswith(_CODES))), "")
    if not example and method not in _FLOATS:
        example = next((n for n, d in dtypes.items() if d in INTEGERS and n.rpartition(".")[2] not in _BUFFERS), "")
    return replace(_described(method, quant), example=example) if example else None


def _described(method: str, quant: Mapping[str, Any]) -> Packing:
    """The packing that a config says, or one that says why it cannot be cut."""
    if method == "bitsandbytes":
        if quant.get("load_in_4bit") or _text(quant, "_load_in_4bit"):
            why = "their bytes are flattened, without rows and columns"
            beside = ("absmax", "quant_map", "bitsandbytes__nf4", "bitsandbytes__fp4")
            return Packing("bitsandbytes 4-bit", why, beside=beside, pairs=".absmax")
        why = "the order of their rows depends on the GPU that wrote them"
        return Packing("bitsandbytes 8-bit", why, beside=("SCB", "weight_format"))
    if method == "auto-round" and (inner := _text(quant, "packing_format").rpartition("auto_")[2]) in ("gptq", "awq"):
        method = inner
    if (described := {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed}.get(method)) is not None:
        return described(quant)
    if not method:
        return Packing("packed integer", "no quantization_config in config.json says how they are packed")
    return Packing(method, "what their integers are to the weight is not known")


def _gptq(quant: Mapping[str, Any]) -> Packing:
    bits, group = quant.get("bits"), quant.get("group_size")
    form = _text(quant, "checkpoint_format") or "gptq"
    if form not in ("gptq", "gptq_v2"):
        return Packing("GPTQ", f"`checkpoint_format` {form} is for one kernel, which has an order of its own")
    if bits not in (2, 4, 8):
        return Packing("GPTQ", f"with `bits` {bits} an integer may lie in two words")
    if not isinstance(group, int) or not _is_group(group):
        return Packing("GPTQ", f"`group_size` {group} of quantization_config is not known")
    word, side = 32 // bits, max(group, 0)
    places: tuple[tuple[str, PlaceInPacked], ...]
    places = (("qweight", (word, 1)), ("qzeros", (side, word)), ("scales", (side, 1)), ("g_idx", INPUTS))
    return Packing("GPTQ", in_out=True, places=places, any_group=bool(quant.get("desc_act")))


def _awq(quant: Mapping[str, Any]) -> Packing:
    bits = quant.get("bits", quant.get("w_bit"))
    group = quant.get("group_size", quant.get("q_group_size"))
    version = (_text(quant, "version") or _text(quant, "backend") or "gemm").lower()
    # What auto-round writes is GEMM's.
    if version not in ("gemm", "autoawq") and not version.startswith("auto"):
        return Packing("AWQ", f"`version` {version} has an order of its own; that of gemm is known")
    if bits != 4 or not isinstance(group, int) or not _is_group(group):
        return Packing("AWQ", f"`bits` {bits} with `group_size` {group} is not known")
    side = max(group, 0)
    return Packing("AWQ", in_out=True, places=(("qweight", (1, 8)), ("qzeros", (side, 8)), ("scales", (side, 1))))


def _compressed(quant: Mapping[str, Any]) -> Packing:
    groups = quant.get("config_groups")
    found = set()
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        form = (_text(group, "format") if isinstance(group, Mapping) else "") or _text(quant, "format")
        if isinstance(weights, Mapping) and form == "pack-quantized":
            found.add(tuple(str(weights.get(k)) for k in ("num_bits", "strategy", "group_size", "actorder", "type")))
    if len(found) != 1:
        return Packing(
            "compressed-tensors", f"config.json names {len(found)} kinds of `pack-quantized` weights, not one"
        )
    bits, strategy, group_size, order, kind = found.pop()
    sides = {"channel": 0, "group": int(group_size) if group_size.isdigit() else 0}
    if bits not in ("4", "8") or kind != "int" or not (strategy == "channel" or sides.get(strategy)):
        return Packing("compressed-tensors", f"{kind} of {bits} bits by {strategy} {group_size} is not known")
    word, side = 32 // int(bits), sides[strategy]
    places = (
        ("weight_packed", (1, word)),
        ("weight_scale", (1, side)),
        ("weight_zero_point", (word, side)),
        ("weight_g_idx", INPUTS),
        ("weight_shape", GLOBAL),
    )
    return Packing("compressed-tensors", places=places, any_group=order.lower().endswith(("group", "dynamic")))


def _text(quant: Mapping[str, Any], key: str) -> str:
    value = quant.get(key)
    return value if isinstance(value, str) else ""


def _is_group(size: int) -> bool:
    return size > 0 or size == -1
