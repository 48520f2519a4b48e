"""Saves of torch.distributed.checkpoint, made without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckpttool.containers.pickle_write import Hole
from ckpttool.containers.torch_write import lay_out_torch
from ckpttool.core.geometry import Box
from ckpttool.formats.torch.dcp_metadata import DcpChunk, DcpTensor, Span, write_metadata

Boxes = Sequence[tuple[tuple[int, ...], tuple[int, ...], int]]
"""(offsets, sizes, number of the file) of each chunk."""


def write_save(
    path: Path,
    tensors: Mapping[str, tuple[str, tuple[int, ...], Boxes]],
    objects: Mapping[str, Any] | None = None,
    paths: Mapping[str, tuple[str | int, ...]] | None = None,
) -> None:
    """A save of (dtype, shape, chunks) by fqn, whose elements are zeros, and of plain values in the first file."""
    path.mkdir(parents=True, exist_ok=True)
    world = 1 + max((b[2] for _, _, boxes in tensors.values() for b in boxes), default=0)
    files = [f"__{r}_0.distcp" for r in range(world)]
    runs: list[list[bytes]] = [[] for _ in files]
    sizes = [0] * world
    known: dict[Any, bytes] = {}

    def put(file: int, value: Any) -> Span:
        data = known.get(value) if isinstance(value, Hole) else None
        if data is None:
            laid = lay_out_torch(value, "archive")
            ends = [at for at, _ in laid.literals[1:]] + [laid.size]
            data = b"".join([run.ljust(b - a, b"\0") for (a, run), b in zip(laid.literals, ends, strict=True)])
            if isinstance(value, Hole):
                known[value] = data
        runs[file].append(data)
        sizes[file] += len(data)
        return file, sizes[file] - len(data), len(data)

    described: dict[str, DcpTensor] = {}
    for fqn, (dtype, shape, boxes) in tensors.items():
        chunks = []
        for offsets, size, file in boxes:
            box = Box(offsets, tuple(a + b for a, b in zip(offsets, size, strict=True)))
            chunks.append(DcpChunk(box, put(file, Hole(dtype, size))))
        described[fqn] = DcpTensor(dtype, shape, chunks)
    spans = {fqn: put(0, value) for fqn, value in (objects or {}).items()}
    all_paths = {fqn: (fqn,) for fqn in (*tensors, *spans)} if paths is None else paths
    for name, data in zip(files, runs, strict=True):
        (path / name).write_bytes(b"".join(data))
    (path / ".metadata").write_bytes(write_metadata(described, spans, all_paths, files))


def rows(shape: tuple[int, ...], ranks: int) -> Boxes:
    """The chunks of FSDP2: ``ceil(n / ranks)`` rows each, the last ranks fewer; those that hold nothing write none."""
    each = -(-shape[0] // ranks)
    out = []
    for r in range(ranks):
        begin, end = min(r * each, shape[0]), min((r + 1) * each, shape[0])
        if begin < end:
            out.append(((begin, *(0 for _ in shape[1:])), (end - begin, *shape[1:]), r))
    return out
