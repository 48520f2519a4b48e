"""Distributed tensors in one rank's pickle: a local tensor, and where its boxes belong in the whole.

    DTensor          _rebuild_from_type_v2(_rebuild_wrapper_subclass, DTensor, (class, dtype, size, stride, ...),
                         (None, {_local_tensor, _spec: DTensorSpec(mesh, placements, ...)}))
    ShardedTensor    _rebuild_from_type_v2(_rebuild_wrapper_subclass, ShardedTensor, (class, dtype, size, stride, ...),
                         ([Shard(tensor, ShardMetadata(shard_offsets, shard_sizes))], metadata, ...))

A DTensor's box follows from the sizes of its mesh, the rank's coordinates in it and a placement for each axis of the
mesh. ``n`` rows over ``k`` ranks are ``ceil(n / k)`` each, so the last ranks have fewer, or none. Axes that cut the
same axis of the tensor follow one another from left to right. FSDP on top of tensor parallelism is the other way
round: the right axis (TP) cuts first. The left one, a ``_StridedShard`` whose split factor is the size of TP, then
cuts what each of these has.

Source: torch/distributed/tensor/{_utils,placement_types}.py and device_mesh.py of torch 2.1 to 2.13, and
torch/distributed/_shard/sharded_tensor/api.py. Modules were renamed (``_tensor`` to ``tensor``) and a mesh was a tensor
before it was a layout, so classes go by their names and only what is needed is looked at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any, NamedTuple

from ckpttool.containers.pickle import Global, PickledObject, printable
from ckpttool.containers.torch_pickle import TorchTensor
from ckpttool.core.geometry import Box, whole
from ckpttool.errors import ConflictError, CorruptError, UnsupportedError

Boxes = tuple[tuple[Box, Box], ...]
"""(box in a rank's tensor, box in the whole one)."""


class LocalPart(NamedTuple):
    """The boxes of a tensor that one rank holds."""

    tensor: TorchTensor
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    boxes: Boxes
    cut: bool
    """False: a plain tensor, of which every rank has a copy."""


class AxisPlacement(NamedTuple):
    """The placement of a tensor over one axis of the mesh."""

    dim: int = -1
    """Axis of the tensor that it cuts; -1: none, its ranks have copies."""
    split: int = 1
    """For a strided placement: parts that the axis was in before."""


_MOST_BOXES = 1 << 14
"""Most boxes of a rank's tensor: as many as there are ranks that cut an axis before."""
_REBUILD = "torch._tensor._rebuild_from_type_v2"
_KINDS = ("DTensor", "ShardedTensor")


def parts_of(value: Any, name: str, where: str) -> list[LocalPart] | None:
    """The parts of the tensor ``value`` that a rank holds; None if it is not a tensor.

    Raises UnsupportedError for other subclasses of tensors and unfinished reductions, ConflictError when the local
    tensor has not the shape that its placements give it, CorruptError.
    """
    if isinstance(value, TorchTensor):
        box = whole(value.shape)
        return [LocalPart(value, value.shape, ((box, box),), cut=False)]
    if not isinstance(value, PickledObject) or not value.cls.startswith(
        ("torch._tensor._rebuild_", "torch._utils._rebuild_")
    ):
        return None
    made = value.fields.get("args", ())
    kind = made[1] if value.cls == _REBUILD and len(made) == 4 and type(made[1]) is Global else None
    if kind is None or kind.name not in _KINDS or not kind.module.startswith("torch.distributed."):
        raise UnsupportedError(
            f"`{printable(name)}` is not a plain tensor or a DTensor ({printable(str(kind or value.cls))})",
            where=where,
            hint="save plain tensors: .full_tensor(), .dequantize() or .to_dense()",
        )
    try:
        shape = _sizes(made[2][2])
        if kind.name == "ShardedTensor":
            return _shards(made[3][0], shape)
        return [_local(_state(made[3]), shape, name, where, old="._tensor." in f"{kind.module}.")]
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        raise CorruptError(
            f"the description of `{printable(name)}` is not that of a {kind.name}",
            where=where,
            hint="it was written by a torch that ckpttool does not know, or by no torch",
        ) from None


def _shards(shards: Sequence[PickledObject], shape: tuple[int, ...]) -> list[LocalPart]:
    out = []
    for shard in shards:
        held = _fields(shard)
        said = _fields(held["metadata"])
        start, size = _sizes(said["shard_offsets"]), _sizes(said["shard_sizes"])
        local = held["tensor"]
        if not isinstance(local, TorchTensor) or local.shape != size or len(start) != len(shape):
            raise ValueError
        stop = tuple([a + n for a, n in zip(start, size, strict=True)])
        if any(z > n for z, n in zip(stop, shape, strict=True)):
            raise ValueError
        out.append(LocalPart(local, shape, ((whole(size), Box(start, stop)),) if prod(size) else (), cut=True))
    return out


def _local(state: Mapping[str, Any], shape: tuple[int, ...], name: str, where: str, *, old: bool) -> LocalPart:
    local, spec = state["_local_tensor"], _fields(state["_spec"])
    if not isinstance(local, TorchTensor):
        raise UnsupportedError(
            f"the local part of `{printable(name)}` is not a plain tensor",
            where=where,
            hint="save plain tensors: .dequantize() or .to_dense()",
        )
    placements = tuple([_placement(p, len(shape), name, where) for p in spec["placements"]])
    mesh = _fields(spec["mesh"])
    sizes, coordinates = _mesh_sizes(mesh), mesh["_coordinate_on_dim"]
    if coordinates is None:  # the rank has no part in this mesh
        return LocalPart(local, shape, (), cut=True)
    coordinates = _sizes(coordinates)
    if not len(sizes) == len(coordinates) == len(placements) or any(
        c >= n for c, n in zip(coordinates, sizes, strict=True)
    ):
        raise ValueError
    cuts = [p.dim for p in placements if p.dim >= 0]
    if old and len(set(cuts)) < len(cuts) and not any(p.split > 1 for p in placements):
        raise UnsupportedError(
            f"two mesh axes cut the same axis of `{printable(name)}`, and torch before 2.5 does not say in which order",
            where=where,
            hint="save it again with a newer torch, or with full_state_dict=True",
        )
    order = tuple([(int(dim), _sizes(axes)) for dim, axes in map(_items, spec.get("shard_order") or ())])
    expected, boxes = boxes_of(shape, sizes, coordinates, placements, order)
    if expected != local.shape:
        raise ConflictError(
            f"a rank holds {list(local.shape)} of `{printable(name)}` {list(shape)}, its placements say"
            f" {list(expected)}",
            where=where,
            finding="chunk-size",
            hint="the tensor was put together by hand (DTensor.from_local); save it with torch's own shards",
        )
    return LocalPart(local, shape, boxes, cut=True)


@lru_cache(maxsize=1 << 16)
def boxes_of(
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
    coordinates: tuple[int, ...],
    placements: tuple[AxisPlacement, ...],
    order: tuple[tuple[int, tuple[int, ...]], ...] = (),
) -> tuple[tuple[int, ...], Boxes]:
    """Shape of the rank's tensor, and what its boxes are.

    ``order`` has the mesh axes that cut an axis of the tensor, first cut first, where that is not from left to right.
    """
    said = dict(order)
    runs = []
    for dim, n in enumerate(shape):
        held = [(0, n)]
        for a, split in _steps(dim, sizes, placements, said.get(dim)):
            parts = min(split, max(1, n))  # those behind have nothing
            if parts * len(held) > _MOST_BOXES:
                raise ValueError
            held = [r for i in range(parts) for r in _chunk(_chunk(held, split, i), sizes[a], coordinates[a])]
        runs.append(_joined(held))
    local = tuple([sum([b - a for a, b in r]) for r in runs])
    if not prod(local):
        return local, ()
    if prod(map(len, runs)) > _MOST_BOXES:
        raise ValueError
    boxes = []
    for chosen in product(*[_placed(r) for r in runs]):
        at = Box(tuple([p for p, _, _ in chosen]), tuple([p + b - a for p, a, b in chosen]))
        boxes.append((at, Box(tuple([a for _, a, _ in chosen]), tuple([b for _, _, b in chosen]))))
    return local, tuple(boxes)


def _steps(
    dim: int, sizes: Sequence[int], placements: Sequence[AxisPlacement], order: Sequence[int] | None
) -> list[tuple[int, int]]:
    """Mesh axes that cut an axis of the tensor, first cut first, and in how many parts each finds it."""
    axes = [a for a, p in enumerate(placements) if p.dim == dim]
    if all(placements[a].split == 1 for a in axes):
        if order is not None and sorted(order) != axes:
            raise ValueError
        return [(a, 1) for a in order or axes]
    steps: list[int] = []
    for a in reversed(axes):
        split = placements[a].split
        if split == 1:
            steps.insert(0, a)
        elif split == prod([sizes[i] for i in axes if i > a]):  # FSDP: all that is on the right has cut before
            steps.append(a)
        else:
            return [(i, placements[i].split) for i in axes]
    return [(a, 1) for a in steps]


Runs = list[tuple[int, int]]


def _chunk(runs: Runs, parts: int, i: int) -> Runs:
    """Part ``i`` of torch.chunk, with empty parts where there are too few elements."""
    total = sum([b - a for a, b in runs])
    size = -(-total // parts)
    return _slice(runs, i * size, (i + 1) * size)


def _slice(runs: Runs, lo: int, hi: int) -> Runs:
    out, at = [], 0
    for a, b in runs:
        first, last = max(lo, at), min(hi, at + b - a)
        if first < last:
            out.append((a + first - at, a + last - at))
        at += b - a
    return out


def _joined(runs: Runs) -> Runs:
    out: Runs = []
    for a, b in runs:
        if out and out[-1][1] == a:
            out[-1] = (out[-1][0], b)
        else:
            out.append((a, b))
    return out


def _placed(runs: Runs) -> list[tuple[int, int, int]]:
    """(where a run begins in the rank's tensor, its start, its stop)."""
    out, at = [], 0
    for a, b in runs:
        out.append((at, a, b))
        at += b - a
    return out


def _placement(record: PickledObject, axes: int, name: str, where: str) -> AxisPlacement:
    kind = record.cls.rpartition(".")[2]
    fields = {**dict(zip(("dim", "split_factor"), record.fields.get("args", ()), strict=False)), **_fields(record)}
    if kind == "Replicate":
        return AxisPlacement()
    if kind in ("Shard", "_StridedShard", "StridedShard"):
        dim, split = fields["dim"], fields["split_factor"] if kind != "Shard" else 1
        if type(dim) is not int or type(split) is not int or not 0 <= dim < axes or not 0 < split < 1 << 20:
            raise ValueError
        return AxisPlacement(dim, split)
    raise UnsupportedError(
        f"`{printable(name)}` is placed as {printable(kind)}: its ranks hold no boxes of it",
        where=where,
        hint="redistribute it to Shard or Replicate before it is saved",
    )


def _mesh_sizes(mesh: Mapping[str, Any]) -> tuple[int, ...]:
    if isinstance(mesh.get("mesh"), TorchTensor):  # before torch 2.10
        shape: tuple[int, ...] = mesh["mesh"].shape
        return shape
    layout = _fields(mesh["_layout"])
    if "axes" in layout:
        return tuple([prod(_sizes(_flat(_fields(axis)["shape"]))) for axis in layout["axes"]])
    said = layout["shape"]
    return tuple([prod(_sizes(_flat(n))) for n in (said if isinstance(said, tuple) else (said,))])


def _flat(value: Any) -> tuple[Any, ...]:
    return tuple([x for v in value for x in _flat(v)]) if isinstance(value, tuple) else (value,)


def _fields(record: PickledObject) -> Mapping[str, Any]:
    """Attributes of an instance, whether its class has slots or not."""
    return {**record.fields, **_state(record.fields.get("state") or {})}


def _state(state: Any) -> Mapping[str, Any]:
    """The state that ``copyreg`` makes of an object: its attributes, or a pair of these and its slots."""
    if isinstance(state, tuple):
        first, second = state
        return {**(first or {}), **(second or {})}
    if not isinstance(state, dict):
        raise TypeError
    return state


def _items(record: Any) -> tuple[Any, Any]:
    """The items of a named tuple."""
    first, second = record.fields["args"] if isinstance(record, PickledObject) else record
    return first, second


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or any(type(n) is not int or not 0 <= n < 1 << 48 for n in value):
        raise TypeError
    return tuple(value)
