"""FP8 and FP4 codes and the arithmetic of every scheme, against ml_dtypes and what others have written.

The folder ``fixtures/fp8/oracle`` holds torch's and compressed-tensors' own results.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.core.dtypes import numpy_dtype
from ckpttool.core.plan import Rounding
from ckpttool.errors import UnsupportedError
from ckpttool.kernels import fp8, quantize
from ckpttool.kernels.quantize import NotFiniteError, Rounder

Array = np.ndarray[Any, np.dtype[Any]]
ORACLE = Path(__file__).parents[2] / "fixtures/fp8/oracle"
BF16 = np.dtype(ml_dtypes.bfloat16)
NAMES = {
    "e4m3fn": "F8_E4M3", "e5m2": "F8_E5M2", "e8m0fnu": "F8_E8M0", "e4m3fnuz": "F8_E4M3FNUZ", "e5m2fnuz": "F8_E5M2FNUZ",
}  # fmt: skip
KINDS = {
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2, "F4": ml_dtypes.float4_e2m1fn,
}  # fmt: skip


def load_file(path: Path) -> dict[str, Array]:
    """The tensors of a safetensors file; its own reader for numpy knows no FP8."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    return {
        name: np.frombuffer(data[start + e["data_offsets"][0] : start + e["data_offsets"][1]], numpy_dtype(e["dtype"]))
        .reshape(e["shape"])
        for name, e in json.loads(data[8:start]).items()
        if name != "__metadata__"
    }  # fmt: skip


def same_bits(a: Array, b: Array) -> None:
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.mark.parametrize("theirs", NAMES)
def test_every_code_means_what_torch_says(theirs: str) -> None:
    values = json.loads((ORACLE / "decode_tables.json").read_text())[theirs]
    want = np.array([np.nan if v is None else float(v) for v in values], np.float32)
    np.testing.assert_array_equal(fp8.table(NAMES[theirs]), want)
    codes = np.arange(256, dtype=np.uint8)
    out = np.empty(256, np.float32)
    fp8.decode(NAMES[theirs], codes, out)
    np.testing.assert_array_equal(out, want)
    finite = codes[np.isfinite(want)]
    out = np.empty(finite.size, np.float32)
    fp8.decode(NAMES[theirs], finite, out)
    same_bits(out, want[finite])
    for code in range(256):  # alone, so that it cannot hide behind others
        out = np.empty(1, np.float32)
        fp8.decode(NAMES[theirs], codes[code : code + 1], out)
        np.testing.assert_array_equal(out, want[code : code + 1])


def test_two_f4_codes_lie_in_a_byte() -> None:
    codes = np.arange(256, dtype=np.uint8)
    want = np.stack([codes & 15, codes >> 4], 1).reshape(-1).view(KINDS["F4"]).astype(np.float32)
    out = np.empty(512, np.float32)
    fp8.decode("F4", codes, out)
    same_bits(out, want)


def numbers(code: str) -> Array:
    """All bf16 and f16, random float32, and everything at and beside the middles between codes; finite."""
    table = fp8.table(code)
    values = np.sort(table[np.isfinite(table)])
    middles = ((values[1:].astype(np.float64) + values[:-1]) / 2).astype(np.float32)
    every = np.arange(1 << 16, dtype=np.uint16)
    rng = np.random.default_rng(0)
    parts = [
        every.view(BF16).astype(np.float32),
        every.view(np.float16).astype(np.float32),
        rng.integers(0, 1 << 32, 1_000_000, dtype=np.uint32).view(np.float32),
        rng.standard_normal(500_000).astype(np.float32) * np.float32(values[-1] / 4),
        np.concatenate([np.nextafter(m, np.float32(s)) for m in (values, middles) for s in (-np.inf, np.inf)]),
        values,
        middles,
        np.array([0.0, -0.0, 1e-45, -1e-45, 2.0**-126], np.float32),
    ]
    x: Array = np.concatenate(parts)
    finite: Array = x[np.isfinite(x)]
    return finite


@pytest.mark.parametrize("code", KINDS)
def test_codes_are_the_nearest(code: str) -> None:
    x = numbers(code)
    largest = np.float32(fp8.FORMATS[code].largest)
    want = np.clip(x, -largest, largest).astype(KINDS[code]).view(np.uint8)
    np.testing.assert_array_equal(fp8.encode(code, x), want)


def test_codes_at_the_edges_are_those_written_down() -> None:
    edges = json.loads((ORACLE / "encode_edges.json").read_text())
    checked = 0
    for name in ("e4m3fn", "e5m2"):
        for edge in edges:
            x = np.array([float(edge["x"])], np.float32)
            if f"{name}_clamped" in edge and np.isfinite(x[0]):
                assert fp8.encode(NAMES[name], x)[0] == int(edge[f"{name}_clamped"], 16), edge
                checked += 1
    assert checked > 40


def test_other_dtypes_are_no_codes() -> None:
    with pytest.raises(UnsupportedError, match="F32"):
        fp8.format_of("F32")
    with pytest.raises(UnsupportedError, match="FNUZ"):
        fp8.Encoder("F8_E4M3FNUZ")


# -- schemes

BLOCK = Rounding("block", "F8_E4M3", "F32", (128, 128))
UE8M0 = Rounding("block", "F8_E4M3", "F8_E8M0", (128, 128), powers=True)
MXFP8 = Rounding("mxfp8", "F8_E4M3", "F8_E8M0", (1, 32), powers=True)
MXFP4 = Rounding("mxfp4", "F4", "F8_E8M0", (1, 32), powers=True)
NVFP4 = Rounding("nvfp4", "F4", "F8_E4M3", (1, 16))
TENSOR = Rounding("tensor", "F8_E4M3", "F32", (0, 0))
CHANNEL = Rounding("channel", "F8_E4M3", "F32", (1, 0))
ITEM = {"F32": 4, "BF16": 2, "F16": 2}


def rounded(r: Rounding, x: Array, kind: str = "BF16") -> tuple[Array, Array, float]:
    """(codes, bytes of the scales, factor)."""
    rounder = Rounder(r, kind, *x.shape)
    factor = rounder.factor(rounder.largest(x)) if rounder.two_passes else 1.0
    tall, wide = rounder.block
    scales = np.zeros((-(-x.shape[0] // tall), -(-x.shape[1] // wide), ITEM.get(r.scale, 1)), np.uint8)
    codes = np.zeros((x.shape[0], x.shape[1] // (2 if rounder.packed else 1)), np.uint8)
    rounder.local(x, factor, codes, scales)
    return codes, scales, factor


ORACLES: list[tuple[str, str, Rounding, str]] = [
    ("aligned", "channel_bf16", CHANNEL._replace(scale="BF16"), "weight_scale"),
    ("aligned", "mxfp8_ceil", MXFP8, "weight_scale"),
    ("aligned", "ct.block", BLOCK._replace(scale="BF16"), "weight_scale"),
    ("edge", "block128.div", BLOCK, "weight_scale_inv"),
    ("zeroblock", "block128.div", BLOCK, "weight_scale_inv"),
    ("zeroblock", "block128_ue8m0", UE8M0, "weight_scale_inv"),
    ("zeroblock", "mxfp8_ceil", MXFP8, "weight_scale"),
    ("tiny", "block128.div", BLOCK, "weight_scale_inv"),
    ("tiny", "block128_ue8m0", UE8M0, "weight_scale_inv"),
    ("tiny", "block128_ue8m0", UE8M0._replace(scale="F32"), "weight_scale_inv_f32"),
    ("tiny", "tensor", TENSOR, "weight_scale"),
    ("tiny", "channel_f32", CHANNEL, "weight_scale"),
    ("tiny", "channel_bf16", CHANNEL._replace(scale="BF16"), "weight_scale"),
    ("tiny", "mxfp8_ceil", MXFP8, "weight_scale"),
]


@pytest.mark.parametrize(("case", "recipe", "r", "scale"), ORACLES, ids=lambda v: v if isinstance(v, str) else "")
def test_bytes_are_the_oracles(case: str, recipe: str, r: Rounding, scale: str) -> None:
    """Byte by byte, from bf16 and, where the arithmetic is in float32 anyway, from float32."""
    data = load_file(ORACLE / f"case_{case}.safetensors")
    x = data["input"]
    assert x.dtype == BF16
    for array, kind in ((x, "BF16"), (x.astype(np.float32), "F32")):
        if kind == "F32" and r.scale == "BF16":
            continue
        codes, scales, _ = rounded(r, array, kind)
        np.testing.assert_array_equal(scales.reshape(-1), data[f"{recipe}.{scale}"].reshape(-1).view(np.uint8))
        if f"{recipe}.weight" in data:
            np.testing.assert_array_equal(codes, data[f"{recipe}.weight"].view(np.uint8))


def test_codes_times_scales_are_the_oracles() -> None:
    data = load_file(ORACLE / "case_tiny.safetensors")
    values = np.empty(data["block128.div.weight"].shape, np.float32)
    fp8.decode("F8_E4M3", data["block128.div.weight"].view(np.uint8), values)
    got = (values * data["block128.div.weight_scale_inv"]).astype(BF16)
    np.testing.assert_array_equal(got.view(np.uint16), data["block128.div.dequant_bf16"].view(np.uint16))


def blocks(x: Array, tall: int, wide: int) -> Array:
    """[bands, tall, blocks, wide], filled up with zeros."""
    rows, columns = x.shape
    full = np.zeros((-(-rows // tall) * tall, -(-columns // wide) * wide), np.float32)
    full[:rows, :columns] = x
    return full.reshape(len(full) // tall, tall, -1, wide)


def plainly(r: Rounding, x: Array, kind: str) -> tuple[Array, Array, float]:
    """The table in the kernel's docstring, with whole arrays and ml_dtypes' casts: codes (not packed), scales."""
    narrow = {"BF16": BF16, "F16": np.dtype(np.float16)}
    rows, columns = x.shape
    tall, wide = r.block[0] or rows, r.block[1] or columns
    split = blocks(x.astype(np.float32), tall, wide)
    amax = np.abs(split).max(axis=(1, 3), initial=0)
    largest = np.float32(fp8.FORMATS[r.code].largest)

    def as_kind(v: Array) -> Array:
        return v.astype(narrow[kind]).astype(np.float32) if kind in narrow else v

    factor = 1.0
    with np.errstate(all="ignore"):
        if r.scheme == "mxfp4":
            exponent = np.floor(np.log2(amax.astype(np.float64)))
            exponent += amax.astype(np.float64) / 2.0**exponent >= 1.75
            byte = np.where(amax > 0, np.maximum(exponent - 2 + 127, 0), 0).astype(np.uint8)
            scales: Array = byte
            s = fp8.table("F8_E8M0")[byte]
        elif r.scheme == "nvfp4":
            top = np.maximum(amax.max(initial=0), np.float32(2.0**-126))
            if r.divides:
                g = as_kind(as_kind(np.ones(1, np.float32) / top) * np.float32(2688))[0]
                factor = float(g) if np.isfinite(g) else 1.0
                wanted = as_kind(amax / np.float32(6)) * np.float32(factor)
            else:
                factor = float(top / np.float32(2688))
                wanted = amax / (np.float32(6) * np.float32(factor))
            eight = np.minimum(wanted, np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
            if r.divides:
                eight[eight == 0] = 0.125
            else:
                eight[eight == 0] = 2.0**-9
                eight[wanted == 0] = 1
            scales = eight
            f = eight.astype(np.float32)
            s = f / np.float32(factor) if r.divides else f * np.float32(factor)
        else:
            s = amax / largest
            if r.powers:
                s = np.where(s > 0, 2.0 ** np.maximum(np.ceil(np.log2(s.astype(np.float64))), -127), 2.0**-127)
                s = s.astype(np.float32)
                if r.scheme != "mxfp8":
                    s[amax == 0] = 1
            elif r.scale in narrow:
                s = s.astype(narrow[r.scale]).astype(np.float32)
                s[s == 0] = {"BF16": 2.0**-7, "F16": 2.0**-10}[r.scale]
            else:
                s[s == 0] = 1
            if r.scale == "F8_E8M0":
                scales = (np.log2(s.astype(np.float64)) + 127).astype(np.uint8)
            else:
                scales = s.astype(narrow.get(r.scale, np.dtype(np.float32)))
        y = split / s[:, None, :, None]
        if r.scheme in ("tensor", "channel", "block") and not r.powers and r.scale == kind:
            y = as_kind(y)
        y = np.clip(y, -largest, largest)
        codes = y.astype(KINDS[r.code]).view(np.uint8)
        if r.code == "F4":
            codes[y == 0] = 0
    codes = codes.reshape(split.shape[0] * tall, -1)[:rows, :columns]
    return codes, np.ascontiguousarray(scales), factor


SCHEMES = {
    "tensor": TENSOR,
    "tensor bf16": TENSOR._replace(scale="BF16"),
    "channel": CHANNEL,
    "channel bf16": CHANNEL._replace(scale="BF16"),
    "channel f16": CHANNEL._replace(scale="F16"),
    "block": BLOCK._replace(block=(4, 8)),
    "block e5m2": BLOCK._replace(block=(3, 5), code="F8_E5M2"),
    "block bf16": BLOCK._replace(block=(128, 128), scale="BF16"),
    "row block": BLOCK._replace(block=(1, 128)),
    "ue8m0": UE8M0._replace(block=(4, 8)),
    "powers": BLOCK._replace(block=(4, 8), powers=True),
    "powers bf16": BLOCK._replace(block=(4, 8), powers=True, scale="BF16"),
    "mxfp8": MXFP8,
    "mxfp8 e5m2": MXFP8._replace(code="F8_E5M2"),
    "mxfp4": MXFP4,
    "nvfp4": NVFP4,
    "nvfp4 modelopt": NVFP4._replace(divides=False),
}


@given(data=st.data())
def test_panels_are_what_whole_arrays_give(data: st.DataObject) -> None:
    """Any shape, any tile, and numbers as they are not seen every day."""
    r = SCHEMES[data.draw(st.sampled_from(sorted(SCHEMES)))]
    kind = data.draw(st.sampled_from(("BF16", "F16", "F32", "F64")))
    rows = data.draw(st.sampled_from((1, 2, 5, 9, 130)))
    columns = data.draw(st.sampled_from((1, 7, 16, 32, 40, 96, 260)))
    if r.code == "F4":
        columns += columns % 2
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    x = rng.standard_normal((rows, columns))
    match data.draw(st.sampled_from(("usual", "outliers", "wide", "tiny", "smallest", "zeros"))):
        case "outliers":
            x[rng.random(x.shape) < 0.05] *= 1e4
        case "wide":
            x *= 10.0 ** rng.uniform(-38, 4, x.shape)
        case "tiny":
            x *= 1e-30
        case "smallest":
            x *= 10.0 ** rng.uniform(-45, -36, (rows, 1))
        case "zeros":
            x[:, : columns // 2] = 0
            x[rng.random(x.shape) < 0.3] = -0.0
    dtype = {"BF16": BF16, "F16": np.dtype(np.float16), "F32": np.dtype(np.float32), "F64": np.dtype(np.float64)}[kind]
    with np.errstate(all="ignore"):
        x = x.astype(dtype)
    x = np.where(np.isfinite(x.astype(np.float32)), x, np.ones_like(x)).astype(dtype)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(quantize, "TILE", data.draw(st.sampled_from((64, 512, 1 << 16))))
        codes, scales, factor = rounded(r, x, kind)
    want, want_scales, want_factor = plainly(r, x.astype(np.float32), kind)
    assert factor == want_factor
    np.testing.assert_array_equal(scales.reshape(-1), want_scales.reshape(-1).view(np.uint8))
    if r.code == "F4":
        codes = np.stack([codes & 15, codes >> 4], 2).reshape(rows, columns)
    np.testing.assert_array_equal(codes, want)


@pytest.mark.product
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float16), np.dtype(np.float32)], ids=str)
@pytest.mark.parametrize("r", [BLOCK, CHANNEL, NVFP4], ids=lambda r: r.scheme)
def test_what_is_not_finite_is_found(value: float, dtype: np.dtype[Any], r: Rounding) -> None:
    x = np.ones((200, 1000), dtype)
    x[150, 777] = value
    kind = {2: "BF16", 4: "F32"}[dtype.itemsize]
    rounder = Rounder(r, kind, *x.shape)
    codes = np.zeros((200, 1000 // (2 if rounder.packed else 1)), np.uint8)
    grid = -(-200 // rounder.block[0]), -(-1000 // rounder.block[1])
    scales = np.zeros((*grid, ITEM.get(r.scale, 1)), np.uint8)
    for find in (rounder.largest, rounder.maxima, lambda x: rounder.local(x, 1.0, codes, scales)):
        with pytest.raises(NotFiniteError) as caught:
            find(x)
        assert (caught.value.row, caught.value.column) == (150, 777)
