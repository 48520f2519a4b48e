"""Programs of before PIR that Paddle wrote, read by ckpttool and by protobuf."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest

from ckpttool.formats.paddle.pdmodel import VERSION, read_pdmodel
from ckpttool.formats.paddle.program_parts import BY_DTYPE, BY_NUMBER, ProgramTensor
from tests.peers import paddle_side

NAMES = ("convolution", "dtypes", "loop", "static")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def written(folder: Path) -> Mapping[str, Any]:
    (told,) = paddle_side.start("tests.peers.paddle_legacy", folder / "job")
    return {one["name"]: one for one in told}


def tensors(said: list[Any]) -> list[ProgramTensor]:
    return [ProgramTensor(name, BY_NUMBER[number].dtype, tuple(dims)) for name, number, dims in said]


def records(path: Path) -> list[tuple[str, tuple[int, ...]]]:
    """Types and shapes in a parameter file, whose records say both."""
    data = path.read_bytes()
    at, found = 0, []
    while at < len(data):
        assert data[at : at + 16] == bytes(16)  # version, no levels, version
        size = int.from_bytes(data[at + 16 : at + 20], "little")
        at += 20
        desc = data[at : at + size]
        at += size
        assert desc[::2] == b"\x08" + b"\x10" * (size // 2 - 1)  # small numbers, a byte each
        dtype, *shape = desc[1::2]
        at += BY_NUMBER[dtype].bits // 8 * prod(shape)
        found.append((BY_NUMBER[dtype].dtype, tuple(shape)))
    assert at == len(data)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_program(name: str, written: Mapping[str, Any], folder: Path) -> None:
    found, said = read_pdmodel(folder / f"{name}.pdmodel"), written[name]
    assert found.problems == []
    assert found.version == said["version"] == VERSION
    assert found.blocks == said["blocks"]
    assert found.operators == said["operators"]
    assert found.parameters == tensors(said["parameters"])
    assert found.inputs == tensors(said["inputs"])
    assert found.outputs == tensors(said["outputs"])
    assert [(p.dtype, p.shape) for p in found.parameters] == records(folder / f"{name}.pdiparams")
    assert all(p.dtype in BY_DTYPE for p in found.parameters)


def test_programs_are_what_they_should_be(written: Mapping[str, Any]) -> None:
    assert set(written) == set(NAMES)
    assert written["loop"]["blocks"] > 2
    assert len(written["convolution"]["parameters"]) == 8
    assert len({number for _, number, _ in written["dtypes"]["parameters"]}) == 10
