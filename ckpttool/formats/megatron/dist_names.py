"""From the keys of a save of dist_checkpointing to logical tensors under canonical names.

A key may hold many tensors: equal layers lie one behind the other along a first axis, experts along the next one. What
a key holds is boxes of a global shape, each a stored tensor, whatever container these lie in.

    decoder.layers.self_attention.linear_proj.weight       [layers, out, in]
    decoder.layers.mlp.experts.experts.linear_fc1.weight   [layers, experts, 2 x inner, in]
    decoder.layers.3.mlp.experts.experts.linear_fc1.weight [experts, 2 x inner, in]    layers that differ
    decoder.layers.3.mlp.experts.experts.7.linear_fc1.weight_w, ..._v    [inner, in]   with singleton_local_shards

Norms have the names of Transformer Engine where all layers are alike, whoever trained. Source: sharded_state_dict of
megatron/core/transformer/transformer_block.py, mlp.py and moe/experts.py (Megatron Core 0.6 to 0.16).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

from ckpttool.containers.pickle import printable
from ckpttool.core.catalog import Key, LogicalTensor, Pad, Piece, StoredTensor, logical_tensor
from ckpttool.core.dtypes import itemsize
from ckpttool.core.files import DataFile
from ckpttool.core.geometry import Box, whole
from ckpttool.errors import CkptError, ConflictError, CorruptError, found_as
from ckpttool.formats.megatron.names import canonical
from ckpttool.formats.megatron.stages import layer_of

StoredChunk = tuple[Box, StoredTensor]
"""A box of the global shape, and what holds it: a tensor of the same shape."""


class DistTensor(NamedTuple):
    """A tensor of a save."""

    dtype: str
    shape: tuple[int, ...]
    """Global, with the axes of layers and experts in front."""
    chunks: list[StoredChunk]


class KeyPart(NamedTuple):
    """The tensors of the model that one key holds."""

    names: tuple[str, ...]
    """Canonical, along the axes in front: all experts of the first layer, then those of the next one."""
    counts: tuple[int, ...]
    """Numbers of layers and experts along the axes in front; () where there are none."""
    half: str = ""
    """``w`` or ``v``: only the first or second half of the rows."""


_LAYERS = re.compile(r"(?P<before>(?:.*\.)?layers\.)(?P<number>\d{1,9}\.)?(?P<rest>.+)")
_STACKED = re.compile(r"(?:^|\.)decoder\.layers\.(?!\d)")
_EXPERTS = re.compile(r"(?P<before>(?:.*\.)?mlp\.experts\.)experts\.(?P<number>\d{1,9}\.)?(?P<rest>linear_fc[12]\..+)")
_MOST = 1 << 20
"""Tensors of one key."""
_HALVES = re.compile(r"(?P<whole>.*linear_fc1\.(?:weight|bias)\d*)_(?P<half>[wv])")
VOCABULARY = frozenset(("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias"))
"""Tensors with a row for each token, behind which there are rows of no token."""


def part_of(key: str, shape: tuple[int, ...], layers: int) -> KeyPart:
    """The tensors that a key of this global shape holds in a model with so many layers. Raises CorruptError for too few
    axes, or more tensors than any model has."""
    half = ""
    if m := _HALVES.fullmatch(key):
        key, half = m["whole"], m["half"]
    layer = _LAYERS.fullmatch(key)
    before, rest = (layer["before"], layer["rest"]) if layer else ("", key)
    expert = _EXPERTS.fullmatch(rest)
    stacked = (layer is not None and not layer["number"]) + (expert is not None and not expert["number"])
    counts = shape[:stacked]
    if len(counts) < stacked or prod(counts) > _MOST:
        raise CorruptError(f"`{printable(key)}` {list(shape)} does not have a tensor for each layer or expert")
    names = []
    for at in product(*map(range, counts)):
        numbers = iter(at)
        name = key
        if layer is not None:
            name = f"{before}{layer['number'] or f'{next(numbers)}.'}"
            if expert is not None:
                which = expert["number"] or f"{next(numbers)}."
                name += f"{expert['before']}local_experts.{which}{expert['rest']}"
            else:
                name += rest
        names.append(canonical(name, layers))
    return KeyPart(tuple(names), counts, half)


def check_layers(parts: Mapping[str, KeyPart], layers: int, where: str) -> None:
    """Raises ConflictError where the keys hold other layers than the ``layers`` of the model's configuration."""
    for key, part in parts.items():
        if "mtp.layers." in key or not part.names or not layers:
            continue
        held = layer_of(part.names[-1]) + 1
        if held > layers or (held != layers and _STACKED.search(key)):
            raise ConflictError(
                f"`{printable(key)}` is of {held} layers, and the model's configuration says {layers}",
                where=where,
                hint="put the config.json of this model beside the save",
            )


class DistCatalogBuilder:
    """Puts the chunks of all keys together."""

    def __init__(self, files: list[DataFile], vocabulary: int) -> None:
        self.files, self.vocabulary = files, vocabulary
        """Rows of tokens; 0 where nobody knows how many are true."""
        self._pieces: dict[Key, list[Piece]] = {}
        self._about: dict[Key, tuple[str, tuple[int, ...]]] = {}
        self._boxes: dict[Box, Box] = {}
        """Tensors are cut in few ways: each box is kept once."""

    def add(self, component: str, state: str, part: KeyPart, held: DistTensor) -> None:
        """The tensors of a key. Raises ConflictError where two keys say different things of a tensor."""
        axes = len(part.counts)
        shape = held.shape[axes:]
        rows = shape[0] if shape else 0
        full = (2 * rows, *shape[1:]) if part.half else shape
        keys = [Key(name, component, state) for name in part.names]
        for key in keys:
            if self._about.setdefault(key, (held.dtype, full)) != (held.dtype, full):
                raise ConflictError(f"two entries of the save hold `{key}`, with different dtypes or shapes")
            self._pieces.setdefault(key, [])
        by = (rows, *(0 for _ in shape[1:])) if part.half == "v" else None
        for box, stored in held.chunks:
            strides = stored.strides and stored.strides[axes:]
            inner = Box(box.start[axes:], box.stop[axes:]) if axes else box
            place = inner.shift(by) if by else inner
            place = self._boxes.setdefault(place, place)
            local = whole(place.shape)
            for at, offset in slabs(box, stored, part.counts):
                key = keys[at]
                named = StoredTensor(
                    key.name, stored.dtype, local.stop, stored.file, offset, stored.rank, strides, component, state
                )
                self._pieces[key].append(Piece(named, local, place))

    def put(self, key: Key, piece: Piece) -> None:
        """A piece of a component that has the shape of the model's tensor."""
        self._pieces.setdefault(key, []).append(piece)
        self._about.setdefault(key, (piece.stored.dtype, self._about[Key(key.name)][1]))

    def model(self) -> dict[str, tuple[str, tuple[int, ...], list[Box]]]:
        """(dtype, shape, boxes of the chunks in order) of each tensor of the model."""
        return {
            k.name: (*self._about[k], sorted({p.logical_box for p in found}))
            for k, found in self._pieces.items()
            if k.component == "model"
        }

    def tensors(self, order: Iterable[Key] | None = None) -> dict[Key, LogicalTensor]:
        """All of them, without the rows that pad the vocabulary. Raises IncompleteError and ConflictError."""
        out = {}
        for key in order or self._pieces:
            dtype, shape = self._about[key]
            pieces = self._pieces.pop(key)
            pads: list[Pad] = []
            if key.name in VOCABULARY and shape and 0 < self.vocabulary < shape[0]:
                shape = (self.vocabulary, *shape[1:])
                pieces, pads = _cut(pieces, self.vocabulary)
            try:
                with found_as(incomplete="chunk-missing", conflict="chunk-overlap"):
                    out[key] = logical_tensor(key, shape, pieces, pads, files=self.files)
            except CkptError as e:
                e.hint = "the metadata and the files contradict each other: save the checkpoint again"
                raise
            out[key].dtype = dtype
        return out

    @property
    def keys(self) -> list[Key]:
        """Keys of all tensors, in the order in which they came."""
        return list(self._pieces)


def slabs(box: Box, stored: StoredTensor, counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The slices of a chunk by layer and expert: (number among all of them, byte at which it begins)."""
    axes = len(counts)
    if not axes:
        yield 0, stored.offset
        return
    if stored.shape[:axes] == (1,) * axes:  # Megatron's own saves
        at = 0
        for n, start in zip(counts, box.start, strict=False):
            at = at * n + start
        yield at, stored.offset
        return
    strides, item = stored.element_strides, itemsize(stored.dtype)
    for index in product(*(range(n) for n in stored.shape[:axes])):
        at = 0
        for n, i, start in zip(counts, index, box.start, strict=False):
            at = at * n + start + i
        yield at, stored.offset + item * sum([i * s for i, s in zip(index, strides, strict=False)])


def _cut(pieces: Sequence[Piece], rows: int) -> tuple[list[Piece], list[Pad]]:
    """The pieces above a row, and what is below it."""
    kept: list[Piece] = []
    pads: list[Pad] = []
    for p in pieces:
        begin, end = p.logical_box.start[0], p.logical_box.stop[0]
        if end <= rows:
            kept.append(p)
            continue
        inside = max(0, rows - begin)
        stop = p.stored_box.stop
        if inside:
            local = Box(p.stored_box.start, (inside, *stop[1:]))
            kept.append(Piece(p.stored, local, Box(p.logical_box.start, (rows, *p.logical_box.stop[1:]))))
        pads.append(Pad(p.stored, Box((inside, *p.stored_box.start[1:]), stop), free=True))
    return kept, pads


_PLACE = re.compile(r"(?P<before>.*?\.?layers\.)(?P<layer>\d+)\.(?P<rest>.*)")


def natural_order(keys: Iterable[Key]) -> list[Key]:
    """Keys of all components, layer by layer: embeddings, layers, what follows them."""
    order: dict[str, int] = {}

    def place(item: tuple[int, Key]) -> tuple[Any, ...]:
        number, key = item
        component = order.setdefault(f"{key.component}/{key.state}", len(order))
        m = _PLACE.match(key.name)
        if m is None:
            return component, 0 if key.name.startswith("embedding") else 2, 0, number
        return component, 1, int(m["layer"]), number

    return [key for _, key in sorted(enumerate(keys), key=place)]
