"""The files that hold the chunks of a save of torch.distributed.checkpoint: each chunk is a whole file of torch.save.

    __3_0.distcp    [chunk][chunk][value]...    at the bytes that the metadata says

Whoever writes such files may use this: torch's own savers, Megatron Core. Source: torch/distributed/checkpoint/
filesystem.py (torch 2.13).
"""

from __future__ import annotations

from typing import Any

from ckpttool.containers.pickle import PickledObject, printable
from ckpttool.containers.torch_pickle import TorchTensor
from ckpttool.containers.torch_zip import MAX_HEADS, TorchFile, TorchSlices
from ckpttool.core.catalog import Key, StoredTensor
from ckpttool.core.dtypes import itemsize, numpy_dtype
from ckpttool.core.files import DataFile, OpenFile
from ckpttool.errors import CorruptError, IncompleteError, UnsupportedError
from ckpttool.formats import base
from ckpttool.formats.torch.dcp_metadata import Span
from ckpttool.formats.torch.dcp_place import METADATA
from ckpttool.storage.listing import Listing

MAX_OBJECT = 1 << 24
"""Bytes of a value that is no tensor and is read; larger ones are left out by name."""


class ChunkFiles:
    """Those of one save, numbered as they are met."""

    def __init__(self) -> None:
        self.files: list[DataFile] = []
        self._numbers: dict[tuple[str, str], int] = {}
        self._slices = TorchSlices()
        self._placed: dict[tuple[int, int], tuple[TorchTensor, StoredTensor]] = {}
        """By identity of the value and length: slices with the same head have one value, and their tensor in one place.
        """

    def number(self, listing: Listing, name: str) -> int:
        """The number of a file that the metadata of a directory names. Raises IncompleteError where it is not there."""
        key = (str(listing.root), name)
        if key not in self._numbers:
            if name not in listing.names:
                raise IncompleteError(
                    f"the file {printable(name)} is missing, which {METADATA} names",
                    where=str(listing.root),
                    hint="copy the files of all ranks into one directory",
                    finding="rank-missing",
                )
            self._numbers[key] = len(self.files)
            self.files.append(base.file_now(listing.path(name)))
        return self._numbers[key]

    def slice(self, file: OpenFile, fqn: str, span: Span) -> TorchFile:
        """The file of torch.save that is a chunk, or another value. Raises as ``TorchSlices.read`` does."""
        number, begin, length = span
        if begin + length > file.info.size:
            raise IncompleteError(
                f"{printable(fqn)} lies at bytes {begin:,} to {begin + length:,}, and the file has {file.info.size:,}",
                where=str(self.files[number].place),
                hint="the download or save was interrupted; fetch the file again",
                finding="truncated",
            )
        return self._slices.read(file, begin, begin + length)

    def chunk(self, file: OpenFile, fqn: str, key: Key, span: Span, dtype: str, shape: tuple[int, ...]) -> StoredTensor:
        """The tensor that a chunk is, which the metadata says to have this dtype and shape.

        Raises UnsupportedError for another thing than a plain tensor, CorruptError where it is not as said.
        """
        held = self.slice(file, fqn, span)
        known = self._placed.get((id(held.value), span[2]))
        if known is not None and (known[1].dtype, known[1].shape) == (dtype, shape):
            like = known[1]
            at = like.offset + span[1]
            return StoredTensor(key.name, dtype, shape, span[0], at, 0, like.strides, key.component, key.state)
        if not isinstance(held.value, TorchTensor):
            kind = held.value.cls if isinstance(held.value, PickledObject) else type(held.value).__name__
            raise UnsupportedError(
                f"a chunk of `{printable(fqn)}` is a {printable(kind)}, not a plain tensor",
                where=f"{file.info.place} [byte {span[1]:,}]",
                hint="save plain tensors or DTensors: dequantized, and not sparse",
            )
        stored = held.place(held.value, key.name, span[0])
        if (stored.dtype, stored.shape) != (dtype, shape):
            raise CorruptError(
                f"{METADATA} says that a chunk of `{printable(fqn)}` is {dtype} {list(shape)}, and it is {stored.dtype}"
                f" {list(stored.shape)}",
                where=f"{file.info.place} [byte {span[1]:,}]",
                hint="the files are of different saves: fetch or save the checkpoint again",
                finding="chunk-size",
            )
        if len(self._placed) < MAX_HEADS:
            self._placed[id(held.value), span[2]] = held.value, stored._replace(offset=stored.offset - span[1])
        return stored._replace(component=key.component, state=key.state) if key.component != "model" else stored


class NotPlainError(Exception):
    """A value has classes or tensors inside."""


def plain_value(value: Any, file: OpenFile, held: TorchFile) -> Any:
    """The value with numbers for tensors of one. Raises NotPlainError."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str, bytes):
        return value
    if kind is dict:
        return {plain_value(k, file, held): plain_value(v, file, held) for k, v in value.items()}
    if kind in (list, tuple):
        return kind(plain_value(v, file, held) for v in value)
    if isinstance(value, TorchTensor) and not value.shape:
        stored = held.place(value, "", 0)
        import numpy as np

        data = file.pread(itemsize(stored.dtype), stored.offset)
        return np.frombuffer(data, numpy_dtype(stored.dtype))[0].item()
    raise NotPlainError
