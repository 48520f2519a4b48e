"""``--verify`` reads safetensors headers with the library, too: what writer and reader have wrong alike is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckpttool.checkpoint import OpenOptions
from ckpttool.containers import safetensors
from ckpttool.containers.safetensors_library import confirm_headers, read_by_library
from ckpttool.core.files import DataFile
from ckpttool.errors import VerifyError
from ckpttool.execute import run
from ckpttool.execute.verification import Verification
from ckpttool.formats import base
from ckpttool.ops.reshard import prepare
from ckpttool.storage.place import open_local
from ckpttool.targeting.target import Target
from ckpttool.targeting.verify import look_through

SOURCE = Path(__file__).parents[2] / "fixtures/llama_tp8"
PAIR = "model.layers.0.input_layernorm.weight", "model.layers.0.post_attention_layernorm.weight"
"""Of one shape."""


def verified(dst: Path) -> None:
    prepared = prepare(SOURCE, OpenOptions(), Target(format="hf"))
    run(prepared.plan, dst)
    Verification(lambda place: look_through(prepared, place), 4 << 20)(dst, lambda _: None)


def exchanged(tensors: Any) -> Any:
    """Two tensors under each other's names."""
    other = dict(zip(PAIR, reversed(PAIR), strict=True))
    return [t._replace(name=other.get(t.name, t.name)) for t in tensors]


def exchange_writer(written: tuple[Any, dict[str, int], int]) -> tuple[Any, dict[str, int], int]:
    literals, offsets, size = written
    a, b = PAIR
    return literals, {**offsets, a: offsets[b], b: offsets[a]}, size


def shift_writer(written: tuple[Any, dict[str, int], int]) -> tuple[Any, dict[str, int], int]:
    literals, offsets, size = written
    return literals, {n: at + 8 for n, at in offsets.items()}, size + 8


def shifted(tensors: Any) -> Any:
    return [t._replace(offset=t.offset + 8) for t in tensors]


@pytest.mark.parametrize(
    ("writer", "reader", "payload", "wrong"),
    [
        (exchange_writer, exchanged, 0, "reads the entry of `model.layers.0.input_layernorm.weight` differently"),
        (shift_writer, shifted, 8, "the safetensors library refuses the file"),
    ],
)
def test_a_writer_and_a_reader_that_are_wrong_alike(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    writer: Callable[[Any], Any],
    reader: Callable[[Any], Any],
    payload: int,
    wrong: str,
) -> None:
    verified(tmp_path / "right")
    lay_out, fast = safetensors.lay_out, safetensors._fast

    def read(data: Any, size: int, *more: Any) -> Any:
        if "model.norm.weight" not in data or PAIR[0] not in data or "__metadata__" not in data:
            return fast(data, size, *more)  # of the source
        return reader(fast(data, size - payload, *more))

    monkeypatch.setattr(base, "lay_out", lambda *given: writer(lay_out(*given)))
    monkeypatch.setattr(safetensors, "_fast", read)
    with pytest.raises(VerifyError, match=wrong):
        verified(tmp_path / "wrong")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.safetensors"
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "b": np.arange(6, dtype=np.int8),
        "a": np.ones((2, 3), np.float32),
        "empty": np.ones((0, 3), np.float16),
    }
    save_file(arrays, path, {"format": "pt"})
    return path


def test_the_library_reads_what_we_read(file: Path) -> None:
    own, other = safetensors.read_header(file), read_by_library(file)
    assert {t for t in own.tensors if t.nbytes} == {t for t in other.tensors if t.nbytes}
    assert own.metadata == other.metadata == {"format": "pt"}
    confirm_headers([DataFile.at(file)])


def test_a_header_on_another_machine(file: Path) -> None:
    """The library is given the header alone, in a file as large as the real one."""
    place: Any = SimpleNamespace(
        name=file.name, open_file=lambda: open_local(file), on_disk=lambda: None, identity=lambda: (0, "")
    )
    assert read_by_library(place).tensors == read_by_library(file).tensors
    data = bytearray(file.read_bytes())
    file.write_bytes(bytes(data) + b"\0")
    for where in (place, file):
        with pytest.raises(VerifyError, match="refuses the file"):
            read_by_library(where)
