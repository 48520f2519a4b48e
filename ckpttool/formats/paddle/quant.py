"""Quantized optimizer state of unified checkpoints (``ckpt_quant_stage`` O1 and O2), decoded while it is read.

    O1  moment1_0  int8:  q / 127 * scale                    @scales: one for each index of axis 1, or one in all
        moment2_0  uint8: r = q / 255 * (max - min) + min    @min_scales, @max_scales alike; moment2 = (1/r - 1e-8)^2
    O2  one int8 tensor under moment2_0, no moment1_0: the high nibble is moment1 (signed, q / 7 * scale), the low one
        the ratio r (q / 15 * (max - min) + min); scales are [rows / 32, columns], each for 32 rows
        (of the ratio: @min_scales and @max_scales; of moment1: @scales under moment1_0 or moment2_0)

Source: paddlenlp 3.0.0b4 and paddleformers 1.2.0 (quantization/unified_checkpoint_quantization.py), measured on their
checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from ckpttool.core.catalog import Key, StoredTensor
from ckpttool.core.encodings import ROWS_PER_SCALE, Encoding, Moment, Span
from ckpttool.core.files import DataFile
from ckpttool.errors import ConflictError, IncompleteError


def dequantize(
    stored: Mapping[Key, Sequence[StoredTensor]], files: list[DataFile]
) -> tuple[dict[Key, StoredTensor], list[Key], str]:
    """(the moments, the keys that they replace, a note). The file that they are decoded from is added to ``files``.

    Raises IncompleteError for scales that are missing, ConflictError for shapes that do not fit.
    """

    def tensor(name: str, *states: str, missing: str = "") -> StoredTensor:
        found = next((stored[k] for s in states if stored.get(k := Key(name, "optimizer", s))), None)
        if found is None:
            raise IncompleteError(missing or f"`{name}/{states[0]}` is missing", where=str(files[0].place.parent))
        return found[0]

    first_file = files[next(t.file for found in stored.values() for t in found)]
    encoding = Encoding("moments", str(first_file.place))
    out: dict[Key, StoredTensor] = {}
    gone: dict[Key, None] = {}
    for name, _, last in [k for k in stored if k.state.endswith("@max_scales")]:
        second = last.split("@")[0]
        first = second.replace("moment2", "moment1")
        packed = Key(name, "optimizer", first) not in stored
        wanted: dict[str, dict[str, tuple[str, ...]]] = {
            second: {"low": (f"{second}@min_scales",), "high": (f"{second}@max_scales",)},
            first: {"one": (f"{first}@scales", f"{second}@scales")},
        }
        for state, which in wanted.items():
            key = Key(name, "optimizer", second if packed else state)
            codes = tensor(name, key.state, missing=f"`{key}` is missing, but its scales are there")
            scales = {k: tensor(name, *states) for k, states in which.items()}
            _check(codes, scales, str(files[codes.file].place), packed=packed)
            spans = [Span(str(files[t.file].place), t.offset, t.nbytes) for t in (codes, *scales.values())]
            made = StoredTensor(name, "F32", codes.shape, len(files), encoding.size, 0, None, "optimizer", state)
            encoding.parts.append(Moment(encoding.size, codes.shape, spans[0], tuple(spans[1:]), packed))
            out[made.key] = made
        gone |= dict.fromkeys(k for k in stored if k.name == name and k.state.split("@")[0] in (first, second))
    files.append(first_file._replace(encoding=encoding))
    note = f"the moments of {len(out) // 2} parameters are quantized; they are written as the F32 they stand for"
    return out, list(gone), note


def _check(codes: StoredTensor, scales: Mapping[str, StoredTensor], where: str, *, packed: bool) -> None:
    rows = codes.shape[0] if packed and codes.shape else 0
    need = (rows // ROWS_PER_SCALE, *codes.shape[1:]) if packed else codes.shape[1:2]
    for which, s in scales.items():
        text = ""
        if prod(s.shape) != prod(need) or rows % ROWS_PER_SCALE:
            text = f"the {which} scales of `{codes.key}` are {list(s.shape)}, its shape is {list(codes.shape)}"
        elif (codes.dtype, s.dtype) not in (("I8", "F32"), ("U8", "F32")):
            text = f"`{codes.key}` is {codes.dtype} and its {which} scales {s.dtype}, not codes of 8 bits and F32"
        if text:
            raise ConflictError(text, where=where)
