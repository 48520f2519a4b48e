"""Files of torch.save with any nested value: what is laid out is what the reader finds."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from ckpttool.containers.pickle import Global, PickledObject
from ckpttool.containers.pickle_write import Hole, Instance, PickledCall
from ckpttool.containers.torch_pickle import TorchTensor
from ckpttool.containers.torch_write import TorchLayout, lay_out_torch
from ckpttool.containers.torch_zip import TorchFile, read_torch
from ckpttool.errors import UnsupportedError


def test_values_of_every_kind(tmp_path: Path) -> None:
    value = {
        "state": {0: {"step": Hole("F32", ()), "exp_avg": Hole("BF16", (2, 3)), "none": Hole("I64", (0, 4))}},
        "param_groups": [{"lr": -1e-3, "betas": (0.9, 0.999), "params": [0, -5, 300, 1 << 40, -(1 << 80)]}],
        "fused": None,
        "flags": [True, False, [], {}, ()],
        "text": "ünïcode",
        "rng": b"\x00\xff\x80",
        "shapes": PickledCall(
            "collections", "OrderedDict", (), {"w": PickledCall("torch", "Size", ((2, 3),)), "x": Hole("U8", (5,))}
        ),
    }
    laid = lay_out_torch(value, "archive")
    data = _filled(laid, tmp_path / "x.pt")
    assert zipfile.ZipFile(io.BytesIO(data)).testzip() is None
    file = read_torch(tmp_path / "x.pt")
    found: dict[tuple[Any, ...], int] = {}
    assert _plain(file, file.value, (), found) == {
        **value,
        "state": {0: {"step": ("F32", ()), "exp_avg": ("BF16", (2, 3)), "none": ("I64", (0, 4))}},
        "shapes": {"w": (2, 3), "x": ("U8", (5,))},
    }
    assert {p: at for p, at in found.items() if p[-1] != "none"} == {
        p: at for p, at in laid.offsets.items() if p[-1] != "none"
    }
    assert all(at % 64 == 0 for at in laid.offsets.values())


def test_instances(tmp_path: Path) -> None:
    fields = {"num_layers": 2, "betas": (0.9, 0.95), "w": Hole("F32", (2,))}
    laid = lay_out_torch({"args": Instance("argparse", "Namespace", fields)}, "archive")
    _filled(laid, tmp_path / "x.pt")
    found = read_torch(tmp_path / "x.pt").value["args"]
    assert isinstance(found, PickledObject)
    assert found.cls == "argparse.Namespace"
    assert {**found.fields, "w": found.fields["w"].shape} == {"args": (), **fields, "w": (2,)}
    assert laid.offsets[("args", "w")] % 64 == 0


def test_a_tensor_alone(tmp_path: Path) -> None:
    laid = lay_out_torch(Hole("F8_E4M3", (4, 2)), "archive")
    _filled(laid, tmp_path / "x.pt")
    value = read_torch(tmp_path / "x.pt").value
    assert (value.dtype, value.shape, value.strides) == ("F8_E4M3", (4, 2), (2, 1))
    assert list(laid.offsets) == [()]


def test_many_names_are_recalled(tmp_path: Path) -> None:
    names = [f"T{i}" for i in range(300)] * 2
    laid = lay_out_torch({i: Global("torch", n) for i, n in enumerate(names)}, "archive")
    _filled(laid, tmp_path / "x.pt")
    assert [g.name for g in read_torch(tmp_path / "x.pt").value.values()] == names


@pytest.mark.parametrize("value", [{"a": {1, 2}}, {"a": object()}, {"a": Hole("F4", (2,))}, {"a": 1 << 3000}])
def test_what_cannot_be_written(value: Any) -> None:
    with pytest.raises(UnsupportedError):
        lay_out_torch(value, "archive")


def _filled(laid: TorchLayout, path: Path) -> bytes:
    """The file with bytes for its tensors, and their checksums."""
    data = bytearray(laid.size)
    for at, run in laid.literals:
        data[at : at + len(run)] = run
    ends = sorted([at for at, _ in laid.literals] + [laid.size])
    for at, places in laid.checksums.items():
        end = next(e for e in ends if e > at)
        data[at:end] = bytes(i % 251 for i in range(end - at))
        for p in places:
            data[p : p + 4] = crc32(data[at:end]).to_bytes(4, "little")
    path.write_bytes(data)
    return bytes(data)


def _plain(file: TorchFile, value: Any, path: tuple[Any, ...], found: dict[tuple[Any, ...], int]) -> Any:
    if isinstance(value, TorchTensor):
        found[path] = file.place(value, "t", 0).offset
        return value.dtype, value.shape
    if type(value) is dict:
        return {k: _plain(file, v, (*path, k), found) for k, v in value.items()}
    return value
