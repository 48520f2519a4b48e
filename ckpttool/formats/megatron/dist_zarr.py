"""Tensors of dist_checkpointing's old backend, zarr: a directory for each key, a file for each chunk.

    model_weights/model.decoder.layers.mlp.linear_fc2.weight/.zarray     {"shape": [96, 18432, 73728], "chunks": ...}
    model_weights/model.decoder.layers.mlp.linear_fc2.weight/95.0.7      elements of one chunk, in C order

Megatron wrote the chunks without compression, so each is a run of bytes. All have the size of ``chunks``: those at
the end of an axis reach beyond the tensor, and what they hold there counts for nothing.

Source: megatron/core/dist_checkpointing/strategies/zarr.py (Megatron Core 0.3 to 0.12), and the zarr specification,
version 2.
"""

from __future__ import annotations

import re
from itertools import product
from math import ceil, prod
from typing import Any, NoReturn

from ckpttool.containers.pickle import printable
from ckpttool.core.catalog import StoredTensor
from ckpttool.core.dtypes import nbytes
from ckpttool.core.files import DataFile
from ckpttool.core.geometry import Box, contiguous_strides
from ckpttool.errors import CorruptError, IncompleteError, UnsupportedError
from ckpttool.formats import base
from ckpttool.formats.megatron.dist_names import DistTensor, StoredChunk
from ckpttool.storage.listing import Listing

BACKEND = "zarr"
ARRAY = ".zarray"
_DTYPES = {
    "bfloat16": "BF16",
    "<f2": "F16",
    "<f4": "F32",
    "<f8": "F64",
    "<i8": "I64",
    "<i4": "I32",
    "<i2": "I16",
    "|i1": "I8",
    "|u1": "U8",
    "|b1": "BOOL",
}
_CHUNK = re.compile(r"\d+(\.\d+)*")
_MOST_CHUNKS = 1 << 22
_MOST_AXES = 32


def read_arrays(listing: Listing, files: list[DataFile]) -> dict[str, DistTensor]:
    """The tensors of a save by key; their chunks are added to ``files``.

    Raises IncompleteError for files that are missing or cut off, CorruptError for metadata that contradicts itself,
    UnsupportedError for compressed chunks, another version of zarr and other types.
    """
    out = {}
    for key in listing.folders():
        inside = listing.inside(key)
        if ARRAY in inside.names:
            out[key] = _ZarrArray(inside, key).read(files)
        elif chunk := next((n for n in inside.names if _CHUNK.fullmatch(n)), ""):
            raise IncompleteError(
                f"{ARRAY} of `{printable(key)}` is missing, and its chunks are here ({chunk}, ...)",
                where=str(inside.path(ARRAY)),
                hint="fetch the files again: many tools leave out names that begin with a dot",
                finding="chunk-missing",
            )
    return out


class _ZarrArray:
    def __init__(self, listing: Listing, key: str) -> None:
        self.listing, self.key = listing, key
        self.where = str(listing.path(ARRAY))

    def corrupt(self, what: str) -> NoReturn:
        raise CorruptError(f"{ARRAY} {what}", where=self.where, hint="fetch the checkpoint again")

    def refuse(self, what: str) -> NoReturn:
        hint = "load it with NeMo or Megatron-LM, and save it with dist_ckpt_format torch_dist"
        raise UnsupportedError(f"tensor `{printable(self.key)}` {what}", where=self.where, hint=hint)

    def read(self, files: list[DataFile]) -> DistTensor:
        said = self.listing.json(ARRAY)
        if said.get("zarr_format") != 2:
            self.refuse(f"is of version {printable(str(said.get('zarr_format')), 20)} of zarr, and only 2 is read")
        if compressor := said.get("compressor"):
            name = compressor.get("id") if isinstance(compressor, dict) else compressor
            self.refuse(f"is compressed ({printable(str(name), 40)})")
        if said.get("filters"):
            self.refuse("goes through filters of zarr")
        if said.get("order") != "C":
            self.refuse(f"lies in the order {printable(str(said.get('order')), 20)}, not C")
        dtype = said.get("dtype")
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            self.refuse(f"is of zarr's type {printable(str(dtype), 40)}")
        if (separator := said.get("dimension_separator", ".")) != ".":
            self.refuse(f"has chunks in directories (dimension_separator {printable(str(separator), 20)})")
        shape, chunks = self.sizes(said, "shape", 0), self.sizes(said, "chunks", 1)
        if len(shape) != len(chunks):
            self.corrupt(f"says the shape {list(shape)} and chunks of {list(chunks)}")
        return DistTensor(_DTYPES[dtype], shape, self.chunks(_DTYPES[dtype], shape, chunks, files))

    def sizes(self, said: dict[str, Any], name: str, least: int) -> tuple[int, ...]:
        value = said.get(name)
        if (
            not isinstance(value, list)
            or len(value) > _MOST_AXES
            or any(type(n) is not int or n < least for n in value)
        ):
            self.corrupt(f"says the {name} {value!s:.60}")
        return tuple(value)

    def chunks(
        self, dtype: str, shape: tuple[int, ...], chunks: tuple[int, ...], files: list[DataFile]
    ) -> list[StoredChunk]:
        counts = [ceil(n / c) for n, c in zip(shape, chunks, strict=True)]
        if prod(counts) > _MOST_CHUNKS:
            self.refuse(f"has {prod(counts):,} chunks")
        size, strides = nbytes(dtype, prod(chunks)), contiguous_strides(chunks)
        here = set(self.listing.names)
        names = {".".join(map(str, at)) or "0": at for at in product(*map(range, counts))}
        missing = [n for n in names if n not in here]
        if missing:
            raise IncompleteError(
                f"{len(missing)} of {prod(counts):,} chunks of `{printable(self.key)}` are missing: {missing[0]}",
                where=str(self.listing.root),
                hint="fetch the files again; zarr would take zeros or noise for them",
                finding="chunk-missing",
            )
        out = []
        for name, at in names.items():
            info = base.file_now(self.listing.path(name))
            if info.size != size:
                raise (IncompleteError if info.size < size else CorruptError)(
                    f"a chunk of `{printable(self.key)}` has {info.size:,} bytes, not {size:,}",
                    where=str(info.place),
                    hint="fetch the file again",
                    finding="chunk-size",
                )
            start = tuple([i * c for i, c in zip(at, chunks, strict=True)])
            box = Box(start, tuple([min(a + c, n) for a, c, n in zip(start, chunks, shape, strict=True)]))
            cut = None if contiguous_strides(box.shape) == strides else strides
            out.append((box, StoredTensor(self.key, dtype, box.shape, len(files), 0, 0, cut)))
            files.append(info)
        return out
