"""A recipe with everything that it decides, and what it makes of one weight.

==========  =================================  ==========================  =======================================
recipe      codes                              scales of [N, K]            names (method)
==========  =================================  ==========================  =======================================
tensor      F8_E4M3, as the weight             1                           fp8, compressed-tensors, modelopt
channel     F8_E4M3                            [N, 1]                      compressed-tensors, fbgemm_fp8
block       F8_E4M3                            [ceil(N/bm), ceil(K/bn)]    fp8, compressed-tensors
mxfp8       F8_E4M3                            [N, K/32] E8M0              compressed-tensors
nvfp4       two F4 in a byte, [N, K/2]         [N, K/16] F8_E4M3, and 1    compressed-tensors, modelopt
mxfp4       two F4 in a byte, [N, K/2]         [N, K/32] E8M0              compressed-tensors; gpt-oss's experts
==========  =================================  ==========================  =======================================

A weight [E, N, K] is E weights. Sources: DeepSeek-V3's README_WEIGHTS.md (block), outputs of llm-compressor 0.14 and
compressed-tensors 0.20 (tensor, channel, block, mxfp8, nvfp4, mxfp4), ModelOpt's hf_quant_config.json, gpt-oss's files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckpttool.core.dtypes import parse
from ckpttool.core.plan import Rounding
from ckpttool.errors import LayoutError, UnsupportedError, UsageError

RECIPES = ("tensor", "channel", "block", "mxfp8", "nvfp4", "mxfp4")
"""Kinds of quantization."""

METHODS = {
    "tensor": ("compressed-tensors", "fp8", "modelopt"),
    "channel": ("compressed-tensors", "fbgemm_fp8"),
    "block": ("fp8", "compressed-tensors"),
    "mxfp8": ("compressed-tensors",),
    "nvfp4": ("compressed-tensors", "modelopt"),
    "mxfp4": ("compressed-tensors",),
}
"""``quant_method`` of the software whose names and shapes are written, by recipe; the usual one first."""

GROUP = {"mxfp8": 32, "nvfp4": 16, "mxfp4": 32}
"""Elements along K that share a scale. K must be a multiple."""

EDGES = ("ceil", "skip", "error")
"""Treatments of weights whose sides are not multiples of the block."""


class Form(NamedTuple):
    """One stored tensor that a weight becomes."""

    role: str
    """``codes``, ``scales``, ``factor`` (one number by which all scales count) or ``input`` (of activations)."""
    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Scheme:
    """A quantization of weights. Make one with ``scheme``, which checks it."""

    recipe: str
    method: str
    code: str
    """dtype of a code: F8_E4M3, F8_E5M2 or F4."""
    scale: str
    """dtype in which scales are worked out: F32, BF16, F8_E8M0 or F8_E4M3."""
    stored_scale: str
    """dtype in which they are stored: where the format keeps E8M0 as bytes, U8."""
    block: tuple[int, int]
    """Elements per scale along N and K; 0 is all of the axis."""
    powers: bool = False
    """Scales are powers of two, where the recipe alone does not say so."""
    static: bool = False
    """One scale for the activations lies beside each weight."""
    edge: str = "ceil"

    @property
    def rounding(self) -> Rounding:
        """The arithmetic."""
        powers = self.powers or self.scale == "F8_E8M0"
        return Rounding(self.recipe, self.code, self.scale, self.block, powers, self.method != "modelopt")

    def __str__(self) -> str:
        text = self.recipe
        if self.recipe == "block":
            text += f" {self.block[0]}x{self.block[1]}"
        return f"{text}, {self.stored_scale} scales"


def scheme(
    recipe: str,
    *,
    method: str = "",
    block: tuple[int, int] | None = None,
    scale_dtype: str = "",
    code: str = "",
    static: bool = False,
    edge: str = "",
    powers: bool = False,
) -> Scheme:
    """Check a recipe and its options. Raises UsageError for what does not go together."""
    if recipe not in RECIPES:
        raise UsageError(
            f"unknown recipe `{recipe}`", hint="recipes: " + ", ".join(RECIPES) + "; FP8 is tensor, channel or block"
        )
    methods = METHODS[recipe]
    method = method or methods[0]
    if method not in methods:
        raise UsageError(f"--quant-method {method} has no {recipe} recipe", hint=f"for {recipe}: " + ", ".join(methods))
    if block is not None and recipe != "block":
        raise UsageError(f"--block has no effect with recipe {recipe}", hint="omit it, or use --recipe block")
    if edge and edge not in EDGES:
        raise UsageError(f"--edge is {edge}", hint="one of " + ", ".join(EDGES))
    if edge and recipe in ("tensor", "channel"):
        raise UsageError(f"--edge has no effect with recipe {recipe}, which has no blocks", hint="omit it")
    if powers and recipe == "nvfp4":
        raise UsageError("--scale-dtype pow2: the scales of nvfp4 are F8_E4M3, not powers of two", hint="omit it")
    if powers and recipe in GROUP:
        raise UsageError(
            f"--scale-dtype pow2 has no effect with recipe {recipe}, whose scales are powers of two anyway",
            hint="omit it",
        )
    wanted = _dtype(scale_dtype, "--scale-dtype") if scale_dtype else ""
    code = _code(recipe, code)
    if code == "F8_E5M2" and method in ("compressed-tensors", "modelopt"):
        raise UsageError(f"--quant-method {method} supports only E4M3 codes", hint="--quant-method fp8")
    if recipe in GROUP:
        fixed = "F8_E4M3" if recipe == "nvfp4" else "F8_E8M0"
        if wanted not in ("", fixed):
            raise UsageError(f"the scales of {recipe} are {fixed}", hint="drop --scale-dtype")
        if edge in ("ceil", "skip"):
            raise UsageError(
                f"{recipe} has no partly filled groups: K is a multiple of {GROUP[recipe]}", hint="--edge error"
            )
        stored = fixed if recipe == "nvfp4" else "U8"
        return Scheme(recipe, method, code, fixed, stored, (1, GROUP[recipe]), static=static, edge="error")
    usual = "BF16" if method == "compressed-tensors" else "F32"
    scale = wanted or usual
    allowed = {
        "fp8": ("F32", "BF16", "F8_E8M0") if recipe == "block" else ("F32",),
        "compressed-tensors": ("BF16", "F32", "F16"),
        "modelopt": ("F32",),
        "fbgemm_fp8": ("F32",),
    }[method]
    if scale not in allowed:
        raise UsageError(
            f"--quant-method {method} has no {scale} scales for recipe {recipe}",
            hint="it has " + ", ".join(allowed),
        )
    if static and method == "fbgemm_fp8":
        raise UsageError("fbgemm_fp8 has no static activation scales", hint="drop --static-act")
    sides = {"tensor": (0, 0), "channel": (1, 0), "block": block or (128, 128)}[recipe]
    return Scheme(recipe, method, code, scale, scale, sides, powers or scale == "F8_E8M0", static, edge or "ceil")


def _dtype(text: str, option: str) -> str:
    """The name of a dtype that an option has. Raises UsageError for what is none."""
    try:
        return parse(text).name
    except UnsupportedError as e:
        raise UsageError(f"{option}: {e.what}", hint=e.hint) from None


def _code(recipe: str, text: str) -> str:
    """The dtype of codes. Raises UsageError for one that the recipe does not have."""
    known = ("F4",) if recipe in ("nvfp4", "mxfp4") else ("F8_E4M3", "F8_E5M2")
    code = _dtype(text, "--code") if text else known[0]
    if code not in known:
        raise UsageError(f"codes of {recipe} are {' or '.join(known)}, not {code}", hint="drop --code")
    return code


def check_together(made: Iterable[tuple[str, Sequence[Form]]]) -> None:
    """MXFP4 as in gpt-oss's files is for experts alone: nobody reads ``weight_packed`` beside it.

    ``made`` are weights and what they become. Raises UsageError.
    """
    blocks = packed = ""
    for weight, found in made:
        for f in found:
            if f.name.endswith("_blocks"):
                blocks = blocks or weight
            elif f.name.endswith(".weight_packed"):
                packed = packed or weight
    if blocks and packed:
        raise UsageError(
            f"`{packed}` cannot be MXFP4 beside `{blocks}`: nobody reads other MXFP4 weights in a model with"
            " gpt-oss's experts",
            hint="--keep-preset experts-only, without --include, quantizes experts alone; or use another --recipe",
        )


def forms(scheme: Scheme, name: str, shape: tuple[int, ...], *, in_out: bool = False) -> tuple[Form, ...]:
    """The tensors that store the weight ``name`` [..., N, K]; ``in_out``: it is [..., K, N].

    Raises LayoutError when K is not a multiple of a group, and for blocks that do not divide with ``edge`` "error".
    """
    if in_out and scheme.recipe not in ("tensor", "block", "mxfp4"):
        raise LayoutError(
            f"`{name}` {list(shape)} is stored [in, out], but {scheme.recipe} scales run along its inputs",
            hint=f"--keep '{name}', or another recipe",
        )
    if in_out and scheme.recipe == "mxfp4":
        return _gpt_oss(name, (*shape[:-2], shape[-1], shape[-2]))
    lead, (n, k) = shape[:-2], shape[-2:]
    stem, weight = name.removesuffix(".weight"), name.endswith(".weight")
    group = GROUP.get(scheme.recipe, 0)
    if group and k % group:
        raise LayoutError(
            f"`{name}` {list(shape)} has {k} columns, not a multiple of {group} as {scheme.recipe} needs",
            hint=f"--keep '{name}'",
        )
    if scheme.recipe == "block" and scheme.edge == "error" and (n % scheme.block[0] or k % scheme.block[1]):
        raise LayoutError(
            f"`{name}` {list(shape)} is not a multiple of blocks of {scheme.block[0]}x{scheme.block[1]}",
            hint=f"--edge ceil stores partly filled blocks; --edge skip or --keep '{name}' leaves it as it is",
        )
    if not weight:
        # As transformers names the scales of experts in one tensor. With one scale for a tensor it wants two for
        # gate_up_proj, of halves that no name tells.
        if (scheme.method, scheme.recipe) != ("fp8", "block"):
            raise LayoutError(
                f"`{name}` {list(shape)} holds all experts, for which {scheme.method} has no {scheme.recipe} scales",
                hint=f"--keep '{name}', or --recipe block --quant-method fp8",
            )
        scales = Form("scales", f"{name}_scale_inv", scheme.stored_scale, (*lead, *_grid(scheme, n, k)))
        out = [Form("codes", name, scheme.code, shape), scales]
        if scheme.static:
            out.append(Form("input", f"{name}_activation_scale", scheme.stored_scale, (*lead, 1, 1)))
        return tuple(out)
    packed = scheme.code == "F4"
    codes = Form("codes", name, scheme.code, shape)
    if packed:
        there = name if scheme.method == "modelopt" else f"{stem}.weight_packed"
        codes = Form("codes", there, "U8", (*lead, n, k // 2))
    alone: tuple[int, ...] = (1,) if scheme.method == "compressed-tensors" else ()
    grid = (1, 1) if lead else alone
    if scheme.recipe != "tensor":
        grid = (n, k // group) if group else _grid(scheme, n, k)
    suffix = "weight_scale_inv" if scheme.method == "fp8" else "weight_scale"
    out = [codes, Form("scales", f"{stem}.{suffix}", scheme.stored_scale, (*lead, *grid))]
    if scheme.recipe == "nvfp4":
        factor = "weight_scale_2" if scheme.method == "modelopt" else "weight_global_scale"
        out.append(Form("factor", f"{stem}.{factor}", "F32", alone))
    if scheme.static:
        if scheme.method == "fp8":
            out.append(Form("input", f"{stem}.activation_scale", "F32", ()))
        elif scheme.recipe == "nvfp4" and scheme.method == "compressed-tensors":
            out.append(Form("input", f"{stem}.input_global_scale", "F32", (1,)))
        else:
            out.append(Form("input", f"{stem}.input_scale", "F32" if alone == () else scheme.stored_scale, alone))
    return tuple(out)


def _grid(scheme: Scheme, n: int, k: int) -> tuple[int, int]:
    """How many blocks there are along both axes."""
    return -(-n // (scheme.block[0] or n)), -(-k // (scheme.block[1] or k))


def _gpt_oss(name: str, shape: tuple[int, ...]) -> tuple[Form, ...]:
    """Experts [E, N, K] as gpt-oss's files hold them: blocks of 16 bytes, each 32 codes along K."""
    *lead, n, k = shape
    if k % 32:
        raise LayoutError(f"`{name}` {list(shape)} has {k} inputs, not a multiple of 32 as mxfp4 needs")
    return (
        Form("codes", f"{name}_blocks", "U8", (*lead, n, k // 32, 16)),
        Form("scales", f"{name}_scales", "U8", (*lead, n, k // 32)),
    )
