"""What quantized weights are, in plain numpy and ml_dtypes: the judge of ``quantize``. Shares nothing with ckpttool.

``quantized`` says what a recipe makes of a weight, ``dequantized`` what codes and scales stand for.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from tests.helpers.tensorfile import Array, Raw, Tensors

KINDS: dict[str, Any] = {
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
    "F32": np.float32,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}
E4M3, E5M2, BF16 = 448.0, 57344.0, ml_dtypes.bfloat16


def floats(raw: Raw) -> Array:
    """The numbers of a tensor, float32."""
    out: Array = raw.bits.view(KINDS[raw.dtype]).astype(np.float32)
    return out


def stored(dtype: str, values: Any) -> Raw:
    """Numbers rounded to a dtype, as its bits."""
    with np.errstate(all="ignore"):
        a = np.asarray(values).astype(KINDS[dtype])
    return Raw(dtype, a.view(f"u{a.dtype.itemsize}"))


def grown(scales: Array, block: tuple[int, int], shape: tuple[int, ...]) -> Array:
    """One number for every element, from one for every block of the last two axes."""
    out = scales.reshape(scales.shape if scales.ndim > 1 else (1, 1)).repeat(block[0], -2).repeat(block[1], -1)
    return out[..., : shape[-2], : shape[-1]]


def pairs(packed: Array) -> Array:
    """The codes of bytes that hold two, the low half first."""
    return np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)


def halves(packed: Array) -> Array:
    """The numbers of bytes that hold two F4 codes."""
    out: Array = pairs(packed).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    return out


def exponents(raw: Raw) -> Array:
    """Scales stored as E8M0 bytes."""
    out: Array = raw.bits.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    return out


class Case(NamedTuple):
    """A recipe as the command line asks for it, and as it is to be stored."""

    recipe: str
    method: str
    scale: str
    """dtype of scales; "" where the recipe fixes it."""
    powers: bool = False
    code: str = "F8_E4M3"

    @property
    def options(self) -> list[object]:
        out: list[object] = ["--recipe", self.recipe, "--quant-method", self.method]
        powers = self.powers and self.scale != "F8_E8M0"
        if self.scale or powers:
            out += ["--scale-dtype", ":".join(filter(None, (self.scale, "pow2" * powers)))]
        if self.code != "F8_E4M3":
            out += ["--code", self.code]
        return out


CASES = [
    Case("tensor", "compressed-tensors", "BF16"),
    Case("tensor", "compressed-tensors", "F32"),
    Case("tensor", "fp8", "F32"),
    Case("tensor", "modelopt", "F32"),
    Case("channel", "compressed-tensors", "BF16"),
    Case("channel", "compressed-tensors", "F16"),
    Case("channel", "fbgemm_fp8", "F32"),
    Case("block", "fp8", "F32"),
    Case("block", "fp8", "BF16"),
    Case("block", "fp8", "F8_E8M0", powers=True),
    Case("block", "fp8", "F32", powers=True),
    Case("block", "fp8", "F32", code="F8_E5M2"),
    Case("block", "compressed-tensors", "BF16"),
    Case("mxfp8", "compressed-tensors", ""),
    Case("nvfp4", "compressed-tensors", ""),
    Case("nvfp4", "modelopt", ""),
    Case("mxfp4", "compressed-tensors", ""),
]


def _maxima(x: Array, block: tuple[int, int]) -> Array:
    """The largest magnitude of every block, partly filled ones included."""
    n, k = x.shape
    padded = np.zeros((-n % block[0] + n, -k % block[1] + k), np.float32)
    padded[:n, :k] = np.abs(x)
    out: Array = padded.reshape(-(-n // block[0]), block[0], -(-k // block[1]), block[1]).max((1, 3))
    return out


def _power_above(s: Array) -> Array:
    """The next power of two."""
    mantissa, exponent = np.frexp(s)
    out: Array = np.ldexp(np.float32(1), np.where(mantissa == 0.5, exponent - 1, exponent))
    return np.where(s > 0, out, np.float32(0)).astype(np.float32)


def _codes(x: Array, code: str) -> Array:
    most = {"F8_E4M3": E4M3, "F8_E5M2": E5M2}[code]
    out: Array = np.clip(x, -most, most).astype(KINDS[code]).view(np.uint8)
    return out


def _packed(x: Array) -> Array:
    """F4 codes in pairs; what is rounded to 0 keeps its sign, -0 does not."""
    codes = np.minimum(np.abs(x), 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) | (x < 0).astype(np.uint8) << 3
    out: Array = codes[:, 0::2] | codes[:, 1::2] << 4
    return out


def together(tensors: Tensors) -> dict[str, np.float32]:
    """The largest magnitude among the weights that engines hold as one (q, k and v; gate and up), for each of them."""
    groups: dict[str, list[str]] = {}
    for name in tensors:
        held = re.sub(r"\b[qkv]_proj", "qkv_proj", re.sub(r"\b(gate|up)_proj", "gate_up_proj", name))
        groups.setdefault(held, []).append(name)
    return {n: np.float32(max(np.abs(floats(tensors[m])).max() for m in g)) for g in groups.values() for n in g}


def quantized(case: Case, name: str, raw: Raw, block: tuple[int, int], most: np.float32 | None = None) -> Tensors:
    """What becomes of the weight ``name`` [N, K]; ``most`` is the largest magnitude that NVFP4 goes by."""
    x = floats(raw)
    stem = name.removesuffix(".weight")
    alone: tuple[int, ...] = (1,) if case.method == "compressed-tensors" else ()
    with np.errstate(all="ignore"):
        if case.recipe in ("tensor", "channel", "block"):
            sides = {"tensor": x.shape, "channel": (1, x.shape[1]), "block": block}[case.recipe]
            s = _maxima(x, sides) / np.float32({"F8_E4M3": E4M3, "F8_E5M2": E5M2}[case.code])
            if case.powers:
                s = _power_above(s)
                s[s == 0] = 1
            kind = KINDS[case.scale]
            zero = {"BF16": 2.0**-7, "F16": 2.0**-10}.get(case.scale, 1.0)
            scale = s.astype(kind)
            scale[scale.astype(np.float32) == 0] = zero
            q = x / grown(scale.astype(np.float32), sides, x.shape)
            if raw.dtype == case.scale and case.scale in ("BF16", "F16") and not case.powers:
                q = q.astype(kind).astype(np.float32)
            suffix = "weight_scale_inv" if case.method == "fp8" else "weight_scale"
            scales = stored(case.scale, scale.reshape(alone) if case.recipe == "tensor" else scale)
            return {name: Raw(case.code, _codes(q, case.code)), f"{stem}.{suffix}": scales}
        if case.recipe == "mxfp8":
            s = _power_above(_maxima(x, (1, 32)) / np.float32(E4M3))
            bytes_ = np.where(s > 0, np.frexp(s)[1] - 1 + 127, 0).astype(np.uint8)
            s = exponents(Raw("U8", bytes_))
            q = _codes(x / grown(s, (1, 32), x.shape), "F8_E4M3")
            return {name: Raw("F8_E4M3", q), f"{stem}.weight_scale": Raw("U8", bytes_)}
        if case.recipe == "mxfp4":
            mantissa, exponent = np.frexp(_maxima(x, (1, 32)))
            up = exponent - 1 + (mantissa >= 1.75 / 2)
            bytes_ = np.where(mantissa > 0, up - 2 + 127, 0).astype(np.uint8)
            q = x / grown(exponents(Raw("U8", bytes_)), (1, 32), x.shape)
            return {f"{stem}.weight_packed": Raw("U8", _packed(q)), f"{stem}.weight_scale": Raw("U8", bytes_)}
        amax, most = _maxima(x, (1, 16)), np.abs(x).max() if most is None else most
        if case.method == "modelopt":
            f = np.float32(most) / np.float32(2688)
            scale = np.minimum(amax / (np.float32(6) * f), np.float32(E4M3)).astype(KINDS["F8_E4M3"])
            scale[scale.astype(np.float32) == 0] = 1
            q = x / grown(scale.astype(np.float32) * f, (1, 16), x.shape)
            factor = stored("F32", np.float32(f).reshape(()))
            return {
                name: Raw("U8", _packed(q)),
                f"{stem}.weight_scale": stored("F8_E4M3", scale),
                f"{stem}.weight_scale_2": factor,
            }
        kind = KINDS[raw.dtype]
        inverse = (np.float32(1) / most).astype(kind).astype(np.float32)
        g = (inverse * np.float32(2688)).astype(kind).astype(np.float32)
        sixth = (amax / np.float32(6)).astype(kind).astype(np.float32)
        scale = np.minimum(sixth * g, np.float32(E4M3)).astype(KINDS["F8_E4M3"])
        scale[scale.astype(np.float32) == 0] = 0.125
        q = x / grown(scale.astype(np.float32) / g, (1, 16), x.shape)
        return {
            f"{stem}.weight_packed": Raw("U8", _packed(q)),
            f"{stem}.weight_scale": stored("F8_E4M3", scale),
            f"{stem}.weight_global_scale": stored("F32", g.reshape(1)),
        }


def dequantized(tensors: Tensors, block: tuple[int, int] = (128, 128), *, dtype: str = "BF16") -> Tensors:
    """Every weight of a checkpoint with Hugging Face's names: code * scale in float32, rounded once."""
    out: Tensors = {}
    for name, raw in tensors.items():
        stem = name.removesuffix("_packed").removesuffix(".weight")
        scale = next((s for s in _SCALES if stem + s in tensors), None)
        if scale is None and name.endswith(_BESIDE):
            continue
        if scale is None or name.endswith(_BESIDE) or not name.endswith((".weight", "_packed")):
            if not name.endswith(_BESIDE):
                out[name] = raw
            continue
        s = tensors[stem + scale]
        four = raw.dtype in ("U8", "I8")
        x = halves(raw.bits) if four else floats(raw)
        numbers = exponents(s) if s.dtype == "U8" else floats(s)
        if f"{stem}.weight_scale_2" in tensors:
            numbers = numbers * floats(tensors[f"{stem}.weight_scale_2"])
        if f"{stem}.weight_global_scale" in tensors:
            numbers = numbers / floats(tensors[f"{stem}.weight_global_scale"])
        if numbers.size == 1:
            sides = x.shape
        elif numbers.shape[-2] == x.shape[-2] and numbers.shape[-1] == 1 and block[0] != 1:
            sides = (1, x.shape[-1])
        elif numbers.shape[-2] == x.shape[-2]:
            sides = (1, x.shape[-1] // numbers.shape[-1])
        else:
            sides = block
        out[f"{stem}.weight"] = stored(dtype, x * grown(numbers, sides, x.shape))
    return out


_SCALES = (".weight_scale_inv", ".weight_scale", ".scale")
_BESIDE = ("_scale_inv", "_scale", ".scale", "_scale_2", "_global_scale", "input_scale")
