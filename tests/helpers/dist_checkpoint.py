"""Saves of torch.distributed.checkpoint, as Megatron Core writes them, as numpy arrays: by Python's own unpickler."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.helpers.paddle import Array
from tests.helpers.torch_load import Dtype, torch_load


class Thing:
    """An instance of any class: its state is its attributes."""

    offset = None
    state: Any
    size: tuple[int, ...]
    chunks: list[Any]

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


class _Metadata(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch":
            return Dtype(name)
        if name in ("_get_layout", "_MEM_FORMAT_ENCODING"):
            return lambda *_: None
        assert module.startswith("torch.distributed.checkpoint."), module
        return type(name, (Thing,), {})


class Saved(NamedTuple):
    """What a save holds."""

    tensors: dict[str, Array]
    """Every element of them is in exactly one chunk."""
    objects: dict[str, Any]
    planner: Any
    """``planner_data``."""
    files: dict[str, set[str]]
    """Names of the tensors that each file holds some of."""


def read_dist(folder: Path) -> Saved:
    """The save in a directory with ``.metadata``."""
    with (folder / ".metadata").open("rb") as file:
        metadata: Any = _Metadata(file).load()
    places = {(i.fqn, i.offset): s for i, s in metadata.storage_data.items()}
    contents = {p.name: p.read_bytes() for p in folder.glob("*.distcp")}
    out = Saved({}, {}, metadata.planner_data, {n: set() for n in contents})

    def held(fqn: str, at: tuple[int, ...] | None) -> Any:
        place = places.pop((fqn, at))
        if at is not None:
            out.files[place.relative_path].add(fqn)
        return torch_load(io.BytesIO(contents[place.relative_path][place.offset : place.offset + place.length]))

    for fqn, about in metadata.state_dict_metadata.items():
        if not hasattr(about, "chunks"):
            out.objects[fqn] = held(fqn, None)
            continue
        array, times = None, np.zeros(about.size, np.uint8)
        for chunk in about.chunks:
            found = held(fqn, chunk.offsets)
            assert found.shape == chunk.sizes
            array = np.zeros(about.size, found.dtype) if array is None else array
            box = tuple(slice(a, a + n) for a, n in zip(chunk.offsets, chunk.sizes, strict=True))
            array[box] = found
            times[box] += 1
        assert array is not None
        assert (times == 1).all(), fqn
        assert about.properties.state[0] == str(array.dtype), fqn
        out.tensors[fqn] = array
    assert not places
    return out
