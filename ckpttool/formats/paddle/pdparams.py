"""One file that ``paddle.save`` wrote, whatever its name: .pdparams, .pdopt, .pdckpt, .distcp, .pdtensor.

    {name: array, ..., "StructuredToParameterName@@": {...}}   a state dict: every array under its own name
    {"model": {name: array}, "step": 3, ...}                   anything nested: names joined with dots
    [array, ...], array                                        numbered from 0; one array is `tensor`

What is no array is left out and said so. With ``safetensors=True`` the same suffixes hold safetensors, so the content
decides. Source: paddle 3.3.1 (framework/io.py), measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckpttool.containers.paddle_pickle import CHUNKED, STRUCTURED, read_paddle, read_pickle
from ckpttool.containers.pickle import PickledArray
from ckpttool.containers.safetensors import read_header
from ckpttool.core.catalog import SHARDED, StoredTensor
from ckpttool.core.files import DataFile, Place
from ckpttool.core.geometry import contiguous_strides
from ckpttool.core.mesh import Mesh
from ckpttool.core.words import some
from ckpttool.errors import IncompleteError, UnsupportedError
from ckpttool.formats.base import Capabilities, ReadOptions, StoredCheckpoint, companions
from ckpttool.formats.paddle.config import fp8_dtype
from ckpttool.formats.paddle.sharding import end_to_end
from ckpttool.storage.identify import sniff
from ckpttool.storage.listing import Listing

SUFFIXES = (".pdparams", ".pdopt", ".pdckpt", ".pdtensor", ".distcp", ".pd")


class PdparamsFile:
    """The arrays of one pickle, under their own names."""

    name = "pdparams"
    capabilities = Capabilities(instead="use --to hybrid, whose model_state.pdparams is such a file")

    def detect(self, listing: Listing) -> int:
        if listing.single:
            return int(listing.single.endswith(SUFFIXES))
        return int(len(_weights(listing)) == 1)

    def read(self, listing: Listing, options: ReadOptions) -> StoredCheckpoint:
        """Raises what reading a pickle raises, IncompleteError without arrays, UnsupportedError for a raw tensor."""
        names = [listing.single] if listing.single else _weights(listing)
        if len(names) != 1:
            raise IncompleteError(
                f"there are {len(names)} files of paddle.save here, and it is unclear which one to read",
                where=[str(listing.root), *names[:4]],
                hint="give the path of the file",
            )
        path = listing.path(names[0])
        carried, notes = ((), []) if listing.single else companions(listing, names)
        stored = StoredCheckpoint(self.name, listing.root, [], [], Mesh(), dialect="paddle", notes=notes)
        stored.config, stored.companions = listing.json("config.json"), carried
        kind = sniff(path)
        if kind == "safetensors":
            head = read_header(path, 0)
            stored.files, stored.metadata = [head.file], head.metadata
            stored.tensors = [t._replace(dtype="BF16") if t.dtype == "U16" else t for t in head.tensors]
        elif kind == "dense":
            raise UnsupportedError(
                "the file is a raw tensor (use_binary_format=True), which has no name",
                where=str(path),
                hint="save it with paddle.save in its usual form",
            )
        else:
            _PdparamsReader(stored, path).read()
        if not stored.tensors:
            raise IncompleteError("the file holds no arrays", where=str(path))
        return stored


def _weights(listing: Listing) -> list[str]:
    """Files of paddle.save, apart from the small ones of a trainer."""
    other = ("scheduler.pdparams", "scaler.pdparams")
    return [n for n in listing.names if n.endswith(SUFFIXES) and n not in other and not n.startswith(("__", "."))]


class _PdparamsReader:
    """Stored tensors of one pickle."""

    def __init__(self, stored: StoredCheckpoint, path: Place) -> None:
        self.stored, self.path = stored, path
        self.index: dict[DataFile, int] = {}
        self.fp8 = fp8_dtype(stored.config)

    def read(self) -> None:
        value = read_pickle(self.path)
        if isinstance(value, dict):
            if CHUNKED in value:
                file = read_paddle(self.path)
                for name, parts in file.chunks.items():
                    self._chunked(name, file.tensors[name].shape, parts)
                value = {**{k: v for k, v in file.tensors.items() if k not in file.chunks}, **file.other}
            value.pop(STRUCTURED, None)
        left = []
        for name, v in _leaves(value, ""):
            if isinstance(v, PickledArray):
                self.stored.tensors.append(self._tensor(name or "tensor", v))
            else:
                left.append(name)
        if left:
            self.stored.notes.append(f"skipped, not tensors: {some(left)}")

    def _file(self, file: DataFile) -> int:
        if file not in self.index:
            self.index[file] = len(self.stored.files)
            self.stored.files.append(file)
        return self.index[file]

    def _tensor(self, name: str, a: PickledArray) -> StoredTensor:
        strides = tuple(reversed(contiguous_strides(a.shape[::-1]))) if a.fortran and len(a.shape) > 1 else None
        dtype = "BF16" if a.dtype == "U16" else a.dtype
        if dtype == "I8" and self.fp8 and len(a.shape) > 1:
            dtype = self.fp8
        return StoredTensor(name, dtype, a.shape, self._file(a.file), a.offset, 0, strides)

    def _chunked(self, name: str, shape: tuple[int, ...], parts: tuple[PickledArray, ...]) -> None:
        runs = [self._tensor(name, a) for a in parts]
        self.stored.tensors.append(StoredTensor(name, runs[0].dtype, shape, SHARDED, len(self.stored.shards)))
        self.stored.shards.append(end_to_end(runs))


def _leaves(value: Any, at: str) -> Iterator[tuple[str, Any]]:
    """Everything that is no container, with the path to it."""
    stack = [(at, value)]
    while stack:
        name, v = stack.pop()
        items = v.items() if isinstance(v, dict) else enumerate(v) if isinstance(v, list | tuple) else None
        if items is None or isinstance(v, PickledArray):
            yield name, v
        else:
            stack += reversed([(f"{name}.{k}" if name else str(k), x) for k, x in items])
