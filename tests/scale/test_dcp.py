"""A save of torch.distributed.checkpoint has a chunk for each tensor and rank: 100,000 of them are common."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from ckpttool.checkpoint import OpenOptions, open_checkpoint
from ckpttool.containers import pickle_imports, torch_zip
from ckpttool.core.geometry import Box
from ckpttool.ops.reshard import prepare
from ckpttool.planning.relate import Region
from ckpttool.targeting.target import Target
from tests.helpers.command import ckpttool
from tests.helpers.dcp import rows, write_save

RANKS, TENSORS = 64, 30
CHUNKS = TENSORS // 2 * (44 + 64)
"""44 ranks have three rows of 130."""


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 tensors of two shapes over 64 ranks, of which the last have fewer rows or none."""
    path = tmp_path_factory.mktemp("dcp") / "save"
    shapes = ((130, 4), (64, 6))
    names = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(TENSORS)]
    write_save(path, {n: ("BF16", shapes[i % 2], rows(shapes[i % 2], RANKS)) for i, n in enumerate(names)})
    return path


def test_a_chunk_is_one_access(save: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file is opened once; only chunks of a form that was not seen before are read in full."""
    full, opened, reads = [0], [0], [0]
    read, open_, pread = torch_zip._read_zip, torch_zip.TorchSlices.read, torch_zip._ZipSource.pread

    def count_full(source: torch_zip._ZipSource) -> tuple[torch_zip.TorchFile, torch_zip._ZipHead | None]:
        full[0] += 1
        return read(source)

    def count(self: torch_zip.TorchSlices, *place: object) -> torch_zip.TorchFile:
        opened[0] += 1
        return open_(self, *place)  # type: ignore[arg-type]

    def count_reads(self: torch_zip._ZipSource, at: int, n: int) -> bytes:
        reads[0] += 1
        return pread(self, at, n)

    monkeypatch.setattr(torch_zip, "_read_zip", count_full)
    monkeypatch.setattr(torch_zip.TorchSlices, "read", count)
    monkeypatch.setattr(torch_zip._ZipSource, "pread", count_reads)
    catalog = open_checkpoint(save).catalog
    assert len(catalog) == TENSORS
    assert opened[0] == CHUNKS
    assert full[0] <= 5
    assert reads[0] <= CHUNKS + 40 * full[0]


def test_metadata_is_read_once(save: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is all that takes long, and who has read it in full need not look for code in it."""

    def again(path: Path) -> tuple[str, ...]:
        raise AssertionError(path)

    monkeypatch.setattr(pickle_imports, "imports", again)
    assert ckpttool("inspect", save).code == 0


@pytest.mark.thorough  # calls and the memory of a plan
def test_memory_of_a_chunk(save: Path) -> None:
    """100,000 chunks stay below 300 MB: so do the records of the metadata, and the pieces."""
    open_checkpoint(save)
    tracemalloc.start()
    open_checkpoint(save)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2_400 * CHUNKS + 1_000_000


def test_chunks_that_do_not_overlap_are_not_compared(save: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk of the output is made of those near it, and tensors that are cut alike are worked out once."""
    looked = [0]
    clip = Region.clip_source

    def count(self: Region, box: Box) -> Region | None:
        looked[0] += 1
        return clip(self, box)

    monkeypatch.setattr(Region, "clip_source", count)
    plan = prepare(save, OpenOptions(), Target(format="dcp", sharding=RANKS)).plan
    assert plan.boxes == CHUNKS
    assert looked[0] <= 2 * CHUNKS / (TENSORS / 2)


@pytest.mark.thorough  # calls and the memory of a plan
def test_memory_of_a_chunk_that_is_written(save: Path) -> None:
    """100,000 chunks that become 100,000 others stay below 300 MB."""
    target = Target(format="dcp", sharding=RANKS)
    prepare(save, OpenOptions(), target)
    tracemalloc.start()
    prepare(save, OpenOptions(), target)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_200 * CHUNKS, peak / CHUNKS
