"""Quantised optimizer state of unified checkpoints (``ckpt_quant_stage`` O1 and O2), decoded into a scratch file.

    O1  moment1_0  int8:  q / 127 * scale                    @scales: one for each index of axis 1, or one in all
        moment2_0  uint8: r = q / 255 * (max - min) + min    @min_scales, @max_scales alike; moment2 = (1/r - 1e-8)^2
    O2  one int8 tensor under moment2_0, no moment1_0: the high nibble is moment1 (signed, q / 7 * scale), the low one
        the ratio r (q / 15 * (max - min) + min); scales are [rows / 32, columns], each for 32 rows
        (of the ratio: @min_scales and @max_scales; of moment1: @scales under moment1_0 or moment2_0)

Neither is a strided view of what it stands for, so the values are worked out once, a block of rows at a time, into a
file that is removed at the end. Source: paddlenlp 3.0.0b4 and paddleformers 1.2.0
(quantization/unified_checkpoint_quantization.py), measured on their checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, BinaryIO

from ckpttool.catalog import Key, StoredTensor
from ckpttool.containers.scratch import decoded
from ckpttool.errors import ConflictError, CorruptError, IncompleteError
from ckpttool.storage.place import DataFile

BLOCK = 1 << 20
"""Elements that are decoded at once."""


def dequantise(
    stored: Mapping[Key, Sequence[StoredTensor]], files: list[DataFile]
) -> tuple[dict[Key, StoredTensor], list[Key], str]:
    """(the decoded tensors, the keys that they replace, a note). A scratch file is added to ``files``.

    Raises IncompleteError for scales that are missing, ConflictError for shapes that do not fit.
    """
    index = len(files)
    out: dict[Key, StoredTensor] = {}
    gone: list[Key] = []

    def write(f: BinaryIO) -> None:
        for key in [k for k in stored if k.state.endswith("@max_scales")]:
            name, second = key.name, key.state.split("@")[0]
            first = second.replace("moment2", "moment1")
            codes = _one(stored, Key(name, "optimizer", second), files)
            group = {s: Key(name, "optimizer", s) for s in (first, second)}
            scales = {
                which: _numbers(stored, name, states, files)
                for which, states in (
                    ("one", (f"{first}@scales", f"{second}@scales")),
                    ("low", (f"{second}@min_scales",)),
                    ("high", (f"{second}@max_scales",)),
                )
            }
            packed = group[first] not in stored
            sources = {second: codes, first: codes if packed else _one(stored, group[first], files)}
            for state, t in sources.items():
                at = f.tell()
                _decode(f, t, files, first=state == first, packed=packed, scales=scales)
                out[group[state]] = StoredTensor(name, "F32", t.shape, index, at, 0, None, "optimizer", state)
            gone.extend(k for k in stored if k.name == name and k.state.split("@")[0] in (first, second))

    first_file = next(t.file for found in stored.values() for t in found)
    files.append(decoded(files[first_file], "moments", write))
    gone = list(dict.fromkeys(gone))
    return (
        out,
        gone,
        f"the moments of {len(out) // 2} parameters are quantised; they are written as the F32 they stand for",
    )


def _one(stored: Mapping[Key, Sequence[StoredTensor]], key: Key, files: Sequence[DataFile]) -> StoredTensor:
    found = stored.get(key)
    if not found:
        raise IncompleteError(f"`{key}` is missing, but its scales are there", where=str(files[0].place.parent))
    return found[0]


def _numbers(
    stored: Mapping[Key, Sequence[StoredTensor]], name: str, states: Sequence[str], files: Sequence[DataFile]
) -> Any:
    """A scale tensor as float32."""
    import numpy as np

    found = next((stored[k][0] for s in states if (k := Key(name, "optimizer", s)) in stored), None)
    if found is None:
        raise IncompleteError(f"`{name}/{states[0]}` is missing", where=str(files[0].place.parent))
    with files[found.file].place.open("rb") as f:
        return np.frombuffer(_read(f, found.offset, found.nbytes, files[found.file]), "<f4").reshape(found.shape)


def _read(f: BinaryIO, offset: int, nbytes: int, file: DataFile) -> bytes:
    """Raises CorruptError when the file has become shorter than its header said."""
    f.seek(offset)
    data = f.read(nbytes)
    if len(data) != nbytes:
        raise CorruptError("a source has changed while it was read", where=str(file.place), hint="repeat the command")
    return data


def _decode(
    out: BinaryIO,
    t: StoredTensor,
    files: Sequence[DataFile],
    *,
    first: bool,
    packed: bool,
    scales: Mapping[str, Any],
) -> None:
    """Write the float32 values of one moment, row by row in blocks."""
    import numpy as np

    rows = t.shape[0] if t.shape else 1
    width = prod(t.shape[1:]) if t.shape else 1
    group = 32 if packed else 0
    for which, s in scales.items():
        need = (rows // 32, *t.shape[1:]) if packed else t.shape[1:2] if len(t.shape) > 1 else ()
        if s.size != prod(need):
            raise ConflictError(
                f"the {which} scales of `{t.key}` are {list(s.shape)}, its shape is {list(t.shape)}",
                where=str(files[t.file].place),
            )
    step = max(1, BLOCK // max(1, width))
    step = -(-step // group) * group if group else step
    kind = np.int8 if (first or packed) else np.uint8
    with files[t.file].place.open("rb") as f:
        for row in range(0, rows, step):
            n = min(step, rows - row)
            data = _read(f, t.offset + row * width, n * width, files[t.file])
            q = np.frombuffer(data, kind).reshape(n, *t.shape[1:])

            def part(which: str, row: int = row, n: int = n) -> Any:
                s = scales[which]
                if packed:
                    return np.repeat(s[row // 32 : -(-(row + n) // 32)], 32, axis=0)[:n]
                return s.reshape(s.size, *(1,) * (len(t.shape) - 2)) if len(t.shape) > 1 else s.reshape(())

            code = q.astype(np.float32)
            if packed:
                code = (q >> 4 if first else q.view(np.uint8) & 15).astype(np.float32)
            with np.errstate(all="ignore"):
                if first:
                    value = code / np.float32(7 if packed else 127) * part("one")
                else:
                    a, b = part("low"), part("high")
                    r = code / np.float32(15 if packed else 255) * (b - a) + a
                    value = np.square(np.float32(1) / r - np.float32(1e-8))
            out.write(np.ascontiguousarray(value, np.float32).tobytes())
