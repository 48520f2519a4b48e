"""How pieces become a logical tensor: they tile it, repeat each other, or are an error that names the files."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpttool.core.catalog import Catalog, Key, Piece, StoredTensor, logical_tensor, whole_tensor
from ckpttool.core.files import DataFile
from ckpttool.core.geometry import Box, whole
from ckpttool.errors import ConflictError, IncompleteError

FILES = [DataFile(Path(f"rank{r}.safetensors"), 4096, "0") for r in range(4)]
KEY = Key("w")


def piece(rank: int, start: tuple[int, ...], stop: tuple[int, ...], dtype: str = "F32") -> Piece:
    box = Box(start, stop)
    return Piece(StoredTensor("w", dtype, box.shape, rank, 64, rank), whole(box.shape), box)


def test_halves_and_copies() -> None:
    top, bottom, again = piece(0, (0, 0), (2, 3)), piece(1, (2, 0), (4, 3)), piece(2, (0, 0), (2, 3))
    got = logical_tensor(KEY, (4, 3), [top, bottom, again], files=FILES)
    assert got.pieces == (top, bottom)
    assert got.replicas == (again,)
    assert (got.dtype, got.nbytes, got.box) == ("F32", 48, whole((4, 3)))


def test_partial_overlap() -> None:
    with pytest.raises(ConflictError, match=r"overlap without being equal: \[0:3\] and \[2:4\]") as caught:
        logical_tensor(KEY, (4,), [piece(0, (0,), (3,)), piece(1, (2,), (4,))], files=FILES)
    assert "rank0.safetensors [bytes 64..76) `w` [3]" in caught.value.render()
    assert "rank1.safetensors" in caught.value.render()


def test_hole() -> None:
    with pytest.raises(IncompleteError, match=r"no file holds \[1:2, 0:3\]"):
        logical_tensor(KEY, (3, 3), [piece(0, (0, 0), (1, 3)), piece(1, (2, 0), (3, 3))], files=FILES)


def test_dtypes_differ() -> None:
    with pytest.raises(ConflictError, match="is F32 in one file and BF16 in another"):
        logical_tensor(KEY, (4,), [piece(0, (0,), (2,)), piece(1, (2,), (4,), "BF16")], files=FILES)


def test_scalar_on_every_rank() -> None:
    got = logical_tensor(KEY, (), [piece(r, (), ()) for r in range(3)], files=FILES)
    assert len(got.pieces) == 1
    assert len(got.replicas) == 2


def test_empty_tensor_has_no_pieces() -> None:
    got = logical_tensor(KEY, (0, 4), [piece(0, (0, 0), (0, 4))], files=FILES)
    assert (got.pieces, got.shape, got.nbytes) == ((), (0, 4), 0)


def test_keys() -> None:
    assert str(Key("a.b")) == "a.b"
    assert str(Key("a.b", "optimizer", "moment1_0")) == "optimizer/a.b/moment1_0"
    assert str(Key("a.b", "master_weights")) == "master_weights/a.b"


def test_catalog() -> None:
    tensors = [whole_tensor(StoredTensor(n, "BF16", (2, 3), 0, 8), Key(n)) for n in "ab"]
    tensors.append(whole_tensor(StoredTensor("a", "F32", (2, 3), 0, 8), Key("a", "master_weights")))
    catalog = Catalog(FILES, {t.key: t for t in tensors})
    assert [str(t.key) for t in catalog] == ["a", "b", "master_weights/a"]
    assert catalog["a"].dtype == "BF16"
    assert catalog[Key("a", "master_weights")].dtype == "F32"
    assert (len(catalog), catalog.nbytes) == (3, 12 + 12 + 24)
    assert catalog.place(tensors[0].pieces[0].stored) == "rank0.safetensors [bytes 8..20) `a` [2, 3]"


def test_strides_of_a_stored_tensor() -> None:
    assert StoredTensor("a", "F32", (2, 3), 0, 0).element_strides == (3, 1)
    assert StoredTensor("a", "F32", (2, 3), 0, 0, strides=(1, 2)).element_strides == (1, 2)
