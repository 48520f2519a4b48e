"""Laying out the files of a save of torch.distributed.checkpoint: each chunk is a whole file of torch.save.

    __3_0.distcp    [chunk][chunk][value]...    at bytes that ``.metadata`` says

Chunks of one dtype and shape are the same file of torch.save, but for their elements, and all is packed: there may be a
hundred chunks in each of a thousand files. Source: torch/distributed/checkpoint/filesystem.py (torch 2.13).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, overload
from zlib import crc32

from ckpttool.containers.pickle_write import Hole
from ckpttool.containers.torch_write import TorchLayout, lay_out_torch
from ckpttool.core.catalog import RankTensor
from ckpttool.core.dtypes import numpy_dtype
from ckpttool.core.geometry import Box
from ckpttool.errors import UnsupportedError
from ckpttool.formats import base
from ckpttool.formats.torch.dcp_metadata import DcpChunk, Span

_TOP = "archive"
_ALIGNMENT = 64


class _ChunkFrame(NamedTuple):
    """The bytes of a chunk without its elements."""

    size: int
    literals: tuple[tuple[int, bytes], ...]
    data: int
    """Where the elements begin."""
    checksums: tuple[int, ...]


class _DistcpFile:
    """A file that is being laid out."""

    __slots__ = ("at", "owners", "size", "slices", "tensors", "which")

    def __init__(self, slices: list[_ChunkFrame]) -> None:
        self.size = 0
        self.slices = slices
        """The distinct frames of all files."""
        self.which = array("I")
        """The number of each frame of the file in ``slices``."""
        self.at = array("q")
        """Where it begins."""
        self.tensors = array("I")
        """Numbers of the tensors that the file holds; ascending when it is complete."""
        self.owners = array("I")
        """The frame of the file that each of these has."""

    def put(self, which: int) -> int:
        """Place a slice, which is padded; where it begins."""
        at = self.size
        self.which.append(which)
        self.at.append(at)
        begin, data = self.slices[which].literals[-1]
        self.size = at + begin + len(data)
        return at

    def own(self, tensor: int) -> None:
        """The slice that was placed last holds elements of a tensor."""
        self.tensors.append(tensor)
        self.owners.append(len(self.at) - 1)

    def data(self, i: int) -> int:
        """First byte of the elements of a chunk."""
        return self.at[i] + self.slices[self.which[i]].data

    def sort(self) -> None:
        """Put the tensors in the order of their numbers."""
        tensors, owners = self.tensors, self.owners
        if any(a > b for a, b in pairwise(tensors)):
            order = sorted(range(len(tensors)), key=tensors.__getitem__)
            self.tensors, self.owners = array("I", [tensors[i] for i in order]), array("I", [owners[i] for i in order])


class _Literals(Sequence[tuple[int, bytes]]):
    """The literal bytes of a file."""

    def __init__(self, file: _DistcpFile) -> None:
        self._file = file

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        slices = self._file.slices
        for at, which in zip(self._file.at, self._file.which, strict=True):
            for begin, data in slices[which].literals:
                yield at + begin, data

    def __len__(self) -> int:
        return sum(len(self._file.slices[which].literals) for which in self._file.which)

    @overload
    def __getitem__(self, at: int) -> tuple[int, bytes]: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[tuple[int, bytes]]: ...
    def __getitem__(self, at: int | slice) -> tuple[int, bytes] | Sequence[tuple[int, bytes]]:
        return list(self)[at]


class _Checksums(Mapping[int, tuple[int, ...]]):
    """``OutFile.checksums`` of a file."""

    def __init__(self, file: _DistcpFile) -> None:
        self._file = file

    def __iter__(self) -> Iterator[int]:
        file = self._file
        return (file.data(i) for i in file.owners if file.slices[file.which[i]].checksums)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, data: int) -> tuple[int, ...]:
        file = self._file
        i = bisect_left(range(len(file.at)), data, key=file.data)
        sums = file.slices[file.which[i]].checksums if i < len(file.at) and file.data(i) == data else ()
        if not sums:
            raise KeyError(data)
        return tuple([file.at[i] + c for c in sums])


class _FilePlaces(Mapping[str, tuple[int, int]]):
    """Where the tensors of a file begin."""

    def __init__(self, number: int, file: _DistcpFile, slots: Mapping[str, int]) -> None:
        self._number, self._file, self._slots = number, file, slots

    def __iter__(self) -> Iterator[str]:
        return (slot for slot in self._slots if slot in self)

    def __len__(self) -> int:
        return len(self._file.tensors)

    def __getitem__(self, slot: str) -> tuple[int, int]:
        tensor, held = self._slots[slot], self._file.tensors
        i = bisect_left(held, tensor)
        if i == len(held) or held[i] != tensor:
            raise KeyError(slot)
        return self._number, self._file.data(self._file.owners[i])


class TensorChunks(Sequence[DcpChunk]):
    """The chunks of a tensor. ``boxes`` are (file, box) of each, also of those whose places are yet to come."""

    __slots__ = ("at", "boxes", "sizes")

    def __init__(self, boxes: Sequence[tuple[int, Box]]) -> None:
        self.boxes, self.at, self.sizes = boxes, array("q"), array("q")

    def put(self, at: int, size: int) -> None:
        """The place of the next of them."""
        self.at.append(at)
        self.sizes.append(size)

    def __len__(self) -> int:
        return len(self.boxes)

    @overload
    def __getitem__(self, at: int) -> DcpChunk: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[DcpChunk]: ...
    def __getitem__(self, at: int | slice) -> DcpChunk | Sequence[DcpChunk]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        file, box = self.boxes[at]
        return DcpChunk(box, (file, self.at[at], self.sizes[at]))


class ChunkWriter:
    """The files ``__0_0.distcp``, ``__1_0.distcp`` and so on, one for each rank, while they are laid out."""

    def __init__(self, count: int) -> None:
        self._slices: list[_ChunkFrame] = []
        self._files = [_DistcpFile(self._slices) for _ in range(count)]
        self._slots: dict[str, int] = {}
        """Numbers of tensors."""
        self._known: dict[tuple[str, tuple[int, ...]], int] = {}
        """Dtype and shape -> slice."""
        self.names = [f"__{r}_0.distcp" for r in range(count)]

    def chunk(self, file: int, t: RankTensor, shape: tuple[int, ...], name: str) -> tuple[int, int]:
        """(first byte, bytes) of a chunk of this shape with the elements of ``t``, which the save calls ``name``.

        Raises UnsupportedError for a dtype that torch does not have.
        """
        which = self._slice(t.dtype, shape, name)
        at = self._files[file].put(which)
        self._files[file].own(self._slots.setdefault(t.slot, len(self._slots)))
        return at, self._slices[which].size

    def number(self, dtype: str, value: float, name: str) -> Span:
        """A tensor of one number, whose bytes are known, in the first file."""
        import numpy as np

        data = np.array(value, numpy_dtype(dtype)).tobytes()
        slice_ = self._slices[self._slice(dtype, (), name)]
        content = bytearray(slice_.size + -slice_.size % _ALIGNMENT)
        for at, literal in (*slice_.literals, (slice_.data, data)):
            content[at : at + len(literal)] = literal
        for at in slice_.checksums:
            content[at : at + 4] = crc32(data).to_bytes(4, "little")
        return self._put(slice_._replace(literals=((0, bytes(content)),), checksums=()))

    def value(self, value: Any) -> Span:
        """A plain value, in the first file. Raises UnsupportedError for one that torch.save has no place for."""
        laid = lay_out_torch(value, _TOP)
        return self._put(_ChunkFrame(laid.size, _joined(laid), 0, ()))

    def _put(self, slice_: _ChunkFrame) -> Span:
        """Place a slice that there is once in the first file."""
        self._slices.append(slice_)
        return 0, self._files[0].put(len(self._slices) - 1), slice_.size

    def _slice(self, dtype: str, shape: tuple[int, ...], name: str) -> int:
        found = self._known.get((dtype, shape))
        if found is None:
            try:
                laid = lay_out_torch(Hole(dtype, shape), _TOP)
            except UnsupportedError as e:
                raise UnsupportedError(
                    f"tensor `{name}` is {dtype}, which torch does not have", where=name, hint=e.hint
                ) from None
            data = laid.offsets[()]
            found = self._known[dtype, shape] = len(self._slices)
            self._slices.append(_ChunkFrame(laid.size, _joined(laid), data, laid.checksums.get(data, ())))
        return found

    def out_files(self, folder: str = "") -> list[base.OutFile]:
        """The files, below ``folder`` (``DIR/``), when they are complete."""
        return [
            base.OutFile(folder + name, file.size, _Literals(file), _Checksums(file))
            for name, file in zip(self.names, self._files, strict=True)
        ]

    def places(self) -> list[Mapping[str, tuple[int, int]]]:
        """``FileLayout.places``, when the files are complete; they are the first of the layout."""
        for file in self._files:
            file.sort()
        return [_FilePlaces(r, file, self._slots) for r, file in enumerate(self._files)]


def _joined(laid: TorchLayout) -> tuple[tuple[int, bytes], ...]:
    """Its literal bytes in few runs, the last one padded: what comes next is aligned, and so are its elements."""
    out: list[tuple[int, bytearray]] = []
    for at, data in (*laid.literals, (laid.size, bytes(-laid.size % _ALIGNMENT))):
        if out and out[-1][0] + len(out[-1][1]) == at:
            out[-1][1].extend(data)
        else:
            out.append((at, bytearray(data)))
    return tuple([(at, bytes(data)) for at, data in out])
