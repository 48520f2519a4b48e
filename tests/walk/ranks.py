"""What each rank holds: equal shares of what each tensor is cut along, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm

import numpy as np

from tests.walk.bits import Array, Raw
from tests.walk.forms import Form, Join, Weave, build, leaves
from tests.walk.models import Model, Tensor
from tests.walk.names import Table, Unclear


class Indivisible(Exception):  # noqa: N818  # an answer, not an error
    """Something cannot be cut so."""


@dataclass(frozen=True)
class Grid:
    """Parallel sizes, and the layers of each chunk of the pipeline, dealt out to the stages in turn."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    chunks: tuple[int, ...] = ()
    ep_fastest: bool = False

    @property
    def width(self) -> int:
        return lcm(self.tp, self.ep * self.etp)

    @property
    def world(self) -> int:
        return self.width * self.pp

    def layers(self, count: int) -> list[list[int]]:
        """Numbers of the layers of each stage. Raises Indivisible."""
        chunks = self.chunks or (count // self.pp,) * self.pp
        if sum(chunks) != count or len(chunks) % self.pp or min(chunks) < 1:
            raise Indivisible(f"{count} layers over {self.pp} stages")
        out: list[list[int]] = [[] for _ in range(self.pp)]
        at = 0
        for i, n in enumerate(chunks):
            out[i % self.pp] += range(at, at + n)
            at += n
        return out


@dataclass(frozen=True)
class Seat:
    """Where a rank stands."""

    stage: int
    tp: int
    ep: int
    etp: int

    @classmethod
    def of(cls, grid: Grid, rank: int) -> Seat:
        stage, i = divmod(rank, grid.width)
        if grid.ep_fastest:
            return cls(stage, i % grid.tp, i % grid.ep, i // grid.ep % grid.etp)
        return cls(stage, i % grid.tp, i // grid.etp % grid.ep, i % grid.etp)


@dataclass(frozen=True)
class Habit:
    """What a format does with what does not divide."""

    multiple: int = 1
    """The vocabulary is padded with zeros to this; 0: it must divide, -1: it stays whole where it does not."""
    heads_whole: bool = False
    """Key/value heads that do not divide stay whole."""
    ragged_experts: bool = True
    """The first ranks get one more of the experts that do not divide."""
    embedding_whole: str = ""
    """Name of an embedding that every rank of the first stage has whole."""
    local_layers: bool = False
    """Every stage numbers its layers from 0."""


def _part(bits: Array, axis: int, ways: int, index: int, units: int, block: int) -> Array:
    n = bits.shape[axis]
    if ways == 1:
        return bits
    if n % ways or (units and units % ways) or n // ways % block:
        raise Indivisible(f"{n} in {ways} parts of {units or n} units and blocks of {block}")
    return np.split(bits, ways, axis)[index]


def share(tensor: Tensor, grid: Grid, seat: Seat, experts: int, habit: Habit) -> Array | None:
    """What a rank holds of a tensor, its stage left aside. Raises Indivisible."""
    bits, cut = tensor.raw.bits, tensor.cut
    ways, index = grid.tp, seat.tp
    if tensor.expert >= 0:
        if experts % grid.ep and not habit.ragged_experts:
            raise Indivisible(f"{experts} experts over {grid.ep} ranks")
        mine = np.array_split(np.arange(experts), grid.ep)[seat.ep]
        if tensor.expert not in mine:
            return None
        ways, index = grid.etp, seat.etp
    if cut.kind == "whole" or (ways == 1 and cut.kind != "vocab"):
        return bits
    if cut.kind == "vocab":
        rows = len(bits)
        if habit.multiple <= 0:
            if rows % ways == 0:
                return np.split(bits, ways)[index]
            if habit.multiple < 0:
                return bits
            raise Indivisible(f"{rows} rows in {ways} parts")
        full = -(-rows // lcm(habit.multiple, ways)) * lcm(habit.multiple, ways)
        padded = np.concatenate([bits, np.zeros((full - rows, *bits.shape[1:]), bits.dtype)])
        return np.split(padded, ways)[index]
    if cut.kind == "heads":
        if habit.heads_whole and cut.units % ways:
            return bits
        if ways > cut.units:
            if ways % cut.units:
                raise Indivisible(f"{cut.units} heads for {ways} ranks")
            return _part(bits, cut.axis, cut.units, index // (ways // cut.units), cut.units, cut.block)
    return _part(bits, cut.axis, ways, index, cut.units, cut.block)


def _dtype(model: Model, form: Form) -> str:
    found = {model.tensors[n].raw.dtype for n in leaves(form)}
    if len(found) > 1:
        raise Unclear(f"parts of {found}")
    return found.pop()


def check_blocks(model: Model, form: Form) -> None:
    """Raises Unclear where the blocks of two FP8 weights that are joined would not follow each other."""
    if isinstance(form, Join | Weave):
        for part in form.parts[:-1]:
            for name in leaves(part):
                tensor = model.tensors[name]
                if len(tensor.raw.bits) % tensor.cut.block:
                    raise Unclear("a block over two parts")
    if hasattr(form, "parts"):
        for part in form.parts:
            check_blocks(model, part)
    elif hasattr(form, "part"):
        check_blocks(model, form.part)


def whole(model: Model, table: Table) -> dict[str, Raw]:
    """The stored tensors of one rank that has everything. Raises Unclear."""
    out = {}
    for name, form in table.items():
        check_blocks(model, form)
        bits = build(form, lambda n: model.tensors[n].raw.bits)
        assert bits is not None
        out[name] = Raw(_dtype(model, form), bits)
    return out


def stages(model: Model, name: str, form: Form, grid: Grid, *, head_apart: bool = False) -> set[int]:
    """Those that hold a tensor. ``head_apart``: a tied head is stored under its own name."""
    tensor = model.tensors[leaves(form)[0]]
    last = grid.pp - 1
    if name in (model.output, "lm_head.weight"):
        return {last}
    if tensor.place == "last":
        return {last}
    if tensor.place == "first":
        both = leaves(form) == [model.embedding] and model.tied and not head_apart
        return {0, last} if both else {0}
    layers = grid.layers(model.layers)
    return {next((s for s, have in enumerate(layers) if tensor.layer in have), last)}


def held(model: Model, table: Table, grid: Grid, rank: int, habit: Habit) -> dict[str, Raw]:
    """What a rank's file must hold. Raises Indivisible and Unclear."""
    return held_at(model, table, grid, Seat.of(grid, rank), habit)


def held_at(model: Model, table: Table, grid: Grid, seat: Seat, habit: Habit) -> dict[str, Raw]:
    """What a rank holds that stands there. Raises Indivisible and Unclear."""
    layers = grid.layers(model.layers)
    out = {}

    def get(name: str) -> Array | None:
        return share(model.tensors[name], grid, seat, model.experts, habit)

    head_apart = any(leaves(table[n]) == [model.embedding] for n in (model.output, "lm_head.weight") if n in table)
    for name, form in table.items():
        check_blocks(model, form)
        if name == habit.embedding_whole and seat.stage == 0:
            out[name] = model.tensors[leaves(form)[0]].raw
            continue
        if seat.stage not in stages(model, name, form, grid, head_apart=head_apart):
            continue
        tensor = model.tensors[leaves(form)[0]]
        bits = build(form, get, first=(seat.etp if tensor.expert >= 0 else seat.tp) == 0)
        if bits is None:
            continue
        stored = name
        if habit.local_layers and tensor.layer >= 0:
            local = layers[seat.stage].index(tensor.layer)
            stored = name.replace(f".layers.{tensor.layer}.", f".layers.{local}.")
        out[stored] = Raw(_dtype(model, form), bits)
    return out


def all_ranks(model: Model, table: Table, grid: Grid, habit: Habit) -> list[dict[str, Raw]]:
    """Of every rank."""
    return [held(model, table, grid, rank, habit) for rank in range(grid.world)]


Held = Mapping[str, Raw]
