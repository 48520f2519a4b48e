"""Elements of each parameter on each rank of a ZeRO optimizer.

    stages 1, 2   a group's vector: its parameters one behind the other, alignment padding behind some of them;
                  rank r holds the r-th of equal runs of it, and what is missing at the end is padding
    stage 3       rank r holds the r-th of equal runs of each parameter, laid end to end in the order of parameters

A unit is a group of the optimizer, in stage 3 a sub-group: what the optimizer sees as one parameter. Everything is
checked against the lengths that files have: a length that does not fit would shift all elements behind it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from ckpttool.containers.pickle import PickledObject, printable
from ckpttool.containers.torch_pickle import TorchTensor
from ckpttool.containers.torch_zip import TorchFile
from ckpttool.core.catalog import FlatShard, StoredTensor
from ckpttool.core.files import Place
from ckpttool.core.optimizer_states import STEP
from ckpttool.errors import ConflictError, CorruptError, UnsupportedError
from ckpttool.formats.base import ParamGroup
from ckpttool.formats.torch.zero_files import ElementRun, cut, list_of, values_of
from ckpttool.storage.place import read_each

_ORDER = {"exp_avg": 0, "exp_avg_sq": 1}
_ONE_SAVE = "the files are not of one save, or this kind of save is not known"

FlatTensor = tuple[str, tuple[int, ...], list[FlatShard]]
"""A parameter, its shape, and what holds its elements."""


class OptimizerFile(NamedTuple):
    """The optimizer's file of a rank, and what it says."""

    file: int
    torch: TorchFile
    state: Mapping[str, Any]

    @property
    def path(self) -> str:
        return str(self.torch.info.place)


class _FlatUnit(NamedTuple):
    """Parameters, and which of a rank's flat vectors hold them."""

    shapes: Mapping[str, tuple[int, ...]]
    flats: tuple[int, ...]


def stage_of(state: Mapping[str, Any]) -> int | None:
    """1, 2 or 3; None where the file does not say (BF16_Optimizer)."""
    stage = state.get("zero_stage")
    if isinstance(stage, PickledObject):  # an enum
        stage = next(iter(stage.fields.get("args", ())), None)
    if stage is None and "fp32_flat_groups" in state:
        return 3
    return stage if type(stage) is int else None


def partitions_of(
    ranks: Sequence[OptimizerFile], groups: Sequence[Mapping[str, tuple[int, ...]]], *, stage3: bool
) -> Partitions:
    """Raises ConflictError where lengths and shapes do not fit together, UnsupportedError and CorruptError."""
    kind = Stage3 if stage3 else Stages12
    partitions = kind(ranks, groups)
    partitions.measure()
    return partitions


@dataclass
class Partitions(ABC):
    """The parts that all stages have in common."""

    ranks: Sequence[OptimizerFile]
    groups_: Sequence[Mapping[str, tuple[int, ...]]]
    key = ""
    """Key of the masters in the optimizer's state."""
    base = ""
    """Key of the state of the wrapped optimizer."""
    flats: list[list[StoredTensor]] = field(default_factory=list)
    """Masters of each unit, by rank."""
    units: list[_FlatUnit] = field(default_factory=list)

    def measure(self) -> None:
        """Take the masters, and check that parameters fit them."""
        for rank in self.ranks:
            found = rank.state.get(self.key)
            if not isinstance(found, (list, tuple)) or not all(isinstance(t, TorchTensor) for t in found):
                raise UnsupportedError(
                    f"there is no list of tensors `{self.key}` in the optimizer's state",
                    where=rank.path,
                    hint="this kind of optimizer is not known; save_16bit_model of DeepSpeed writes the weights alone",
                )
            self.flats.append([self._flat(rank, t, f"{self.key}[{i}]") for i, t in enumerate(found)])
            if len(found) != len(self.flats[0]):
                raise ConflictError(
                    f"one rank has {len(self.flats[0])} groups of parameters, another one {len(found)}",
                    where=[self.ranks[0].path, rank.path],
                    hint=_ONE_SAVE,
                )

    def _flat(self, rank: OptimizerFile, tensor: TorchTensor, name: str) -> StoredTensor:
        stored = rank.torch.place(tensor, name, rank.file)
        if len(stored.shape) != 1 or stored.strides is not None:
            raise CorruptError(f"`{name}` is {list(stored.shape)}, not a flat vector", where=rank.path)
        return stored

    def length(self, rank: int, flat: int) -> tuple[int, int]:
        """Elements of parameters that a rank holds of a flat vector, and elements with its padding."""
        n = self.flats[rank][flat].shape[0]
        return n, n

    @abstractmethod
    def pieces(self, unit: _FlatUnit, vectors: Sequence[Sequence[StoredTensor]]) -> Iterator[FlatTensor]:
        """Find the elements of a unit's parameters lie; ``vectors`` are the unit's flat vectors of each rank."""

    def masters(self) -> Iterator[FlatTensor]:
        for unit in self.units:
            yield from self.pieces(unit, [[flats[i] for i in unit.flats] for flats in self.flats])

    # The optimizer's own state.

    def _inner(self, rank: OptimizerFile) -> tuple[dict[int, dict[str, Any]], list[dict[str, Any]]]:
        """(state by the numbers of flat vectors, groups) of the wrapped optimizer."""
        inner = rank.state.get(self.base)
        if isinstance(inner, list):  # elastic: a state for each group, without padding
            return {i: state for i, state in enumerate(inner) if isinstance(state, dict)}, []
        if not isinstance(inner, dict):
            return {}, []
        groups = [g for g in list_of(inner.get("param_groups")) if isinstance(g, dict)]
        numbers = [n for g in groups for n in list_of(g.get("params")) if type(n) is int]
        state = inner.get("state") or {}
        if not isinstance(state, dict):
            return {}, groups
        return {i: state[n] for i, n in enumerate(numbers) if isinstance(state.get(n), dict)}, groups

    def states(self) -> tuple[list[str], list[str]]:
        """(states with one number for each element, names of others that are no single number either)."""
        flat: set[str] = set()
        left: set[str] = set()
        for r, rank in enumerate(self.ranks):
            for i, state in self._inner(rank)[0].items():
                for name, value in state.items():
                    if name != STEP and self._is_flat(r, i, value):
                        flat.add(str(name))
                    elif not _is_number(str(name), value) and value is not None:
                        left.add(str(name))
        for name in flat & left:
            raise ConflictError(
                f"the optimizer's `{printable(name)}` has a number for each element in some groups, and not in others",
                where=self.ranks[0].path,
                hint=_ONE_SAVE,
            )
        return sorted(flat, key=lambda n: (_ORDER.get(n, 2), n)), sorted(left)

    def _is_flat(self, rank: int, flat: int, value: Any) -> bool:
        if not isinstance(value, TorchTensor) or flat >= len(self.flats[rank]) or len(value.shape) != 1:
            return False
        return value.shape[0] in self.length(rank, flat)

    def state(self, name: str) -> Iterator[FlatTensor]:
        """One state of all parameters that have it."""
        inner = [self._inner(rank)[0] for rank in self.ranks]
        for unit in self.units:
            has = [[name in of.get(i, ()) for i in unit.flats] for of in inner]
            if not any(map(any, has)):
                continue  # no gradient has come to these parameters yet
            for r, found in enumerate(has):
                if not all(found) and any(self.length(r, i)[0] for i in unit.flats):
                    raise ConflictError(
                        f"the optimizer's `{printable(name)}` of a group of parameters is missing in some ranks",
                        where=self.ranks[r].path,
                        hint=_ONE_SAVE,
                    )
            vectors = []
            for r, rank in enumerate(self.ranks):
                vectors.append(
                    [
                        self._flat(rank, inner[r][i][name], name)._replace(shape=(self.length(r, i)[0],))
                        for i in unit.flats
                        if name in inner[r].get(i, ())
                    ]
                )
            yield from self.pieces(unit, vectors)

    def numbers(self) -> Iterator[tuple[str, str, Any, OptimizerFile]]:
        """(parameter, state, a number or a tensor of one, who says it): steps."""
        for unit in self.units:
            for rank in self.ranks:
                state, groups = self._inner(rank)
                said = {str(k): v for k, v in state.get(unit.flats[0], {}).items() if _is_number(str(k), v)}
                if STEP not in said and (step := self._step(rank, groups, unit.flats[0])) is not None:
                    said[STEP] = step
                if said:
                    yield from ((name, s, v, rank) for name in unit.shapes for s, v in said.items())
                    break

    def steps(self) -> list[int]:
        """How many steps were taken with each unit, where that is counted. Four bytes of each rank's file say it.

        Raises ConflictError for ranks of different steps: files of several saves that were put together.
        """
        every = list(read_each(self._steps, [rank.torch.info.place for rank in self.ranks], self.ranks))
        said = []
        for counts in zip(*every, strict=True):
            known = {r: n for r, n in enumerate(counts) if n is not None}
            first = next(iter(known), 0)
            other = next((r for r, n in known.items() if n != known[first]), first)
            if other != first:
                raise ConflictError(
                    f"a rank's optimizer has taken {known[first]:,g} steps, another's {known[other]:,g}",
                    where=[self.ranks[first].path, self.ranks[other].path],
                    hint="files of several saves were put together: take those of all ranks from one",
                    finding="ranks-differ",
                )
            said += [int(known[first])] if known else []
        return said

    def _steps(self, _: Place, rank: OptimizerFile) -> list[float | None]:
        """Steps of each unit on a rank."""
        state, groups = self._inner(rank)
        out: list[float | None] = []
        for unit in self.units:
            value = state.get(unit.flats[0], {}).get(STEP)
            if isinstance(value, TorchTensor):
                out.append(rank.torch.number(value, STEP))
            else:
                out.append(value if type(value) in (int, float) else self._step(rank, groups, unit.flats[0]))
        return out

    def _step(self, rank: OptimizerFile, groups: Sequence[dict[str, Any]], flat: int) -> int | None:
        """The step of an optimizer that counts steps in its groups (FusedAdam)."""
        counts = [g.get(STEP) for g in groups for _ in list_of(g.get("params"))]
        found = counts[flat] if flat < len(counts) else rank.state.get("base_optimizer_state_step")
        return found if type(found) is int else None

    def groups(self) -> list[ParamGroup]:
        """The optimizer's groups with the names of parameters."""
        _, groups = self._inner(self.ranks[0])
        by_flat = {i: unit for unit in self.units for i in unit.flats}
        out, at = [], 0
        for group in groups:
            numbers = range(at, at + len(list_of(group.get("params"))))
            at = numbers.stop
            units = list(dict.fromkeys(i for i in numbers if i in by_flat and by_flat[i].flats[0] == i))
            out.append(ParamGroup(tuple(n for i in units for n in by_flat[i].shapes), values_of(group)))
        return out or [ParamGroup(tuple(u.shapes)) for u in self.units]


def _is_number(name: str, value: Any) -> bool:
    if isinstance(value, TorchTensor):
        return prod(value.shape) == 1 and (not value.shape or name == STEP)
    return name == STEP and type(value) in (int, float)


class Stages12(Partitions):
    """Vectors of groups, of which each rank has a run."""

    key = "single_partition_of_fp32_groups"
    base = "base_optimizer_state"

    def length(self, rank: int, flat: int) -> tuple[int, int]:
        n, padding = self.flats[rank][flat].shape[0], self._padding(rank, flat)
        # BF16_Optimizer, which does not say its stage, saves the padding as well.
        return (n - padding, n) if stage_of(self.ranks[rank].state) is None else (n, n + padding)

    def _padding(self, rank: int, flat: int) -> int:
        said = self.ranks[rank].state.get("group_paddings")
        n = said[flat] if isinstance(said, list) and flat < len(said) else 0
        if type(n) is not int or n < 0:
            raise CorruptError("`group_paddings` are not numbers", where=self.ranks[rank].path)
        return n

    def measure(self) -> None:
        super().measure()
        if len(self.flats[0]) != len(self.groups_):
            raise ConflictError(
                f"`param_shapes` has {len(self.groups_)} groups of parameters, the optimizer {len(self.flats[0])}",
                where=self.ranks[0].path,
                hint=_ONE_SAVE,
            )
        self.units = [_FlatUnit(shapes, (i,)) for i, shapes in enumerate(self.groups_)]
        for unit in self.units:
            self._fits(unit)
            if not self._round_robin():
                self._agrees(unit)

    def _round_robin(self) -> bool:
        """Whether parameters were dealt out to the ranks in turn, which ``param_slice_mappings`` knows nothing of."""
        return bool(_settings(self.ranks[0]).get("round_robin_gradients"))

    def _fits(self, unit: _FlatUnit) -> None:
        """Raises ConflictError unless the ranks' runs are the whole vector."""
        (i,) = unit.flats
        lengths = [self.length(r, i) for r in range(len(self.ranks))]
        here, wanted = sum(n for n, _ in lengths), self._spans(unit)[-1][1] if unit.shapes else 0
        padded = [r for r, (n, full) in enumerate(lengths) if full > n]
        behind = [r for r, (n, _) in enumerate(lengths) if padded and r > padded[0] and n]
        known = isinstance(self.ranks[0].state.get("group_paddings"), list)
        # Old versions leave the padding of the end in, and do not say how much it is.
        fits = here == wanted if known else wanted <= here < wanted + 2 * len(self.ranks)
        if not fits or behind or (known and len({full for _, full in lengths}) > 1):
            raise ConflictError(
                f"the ranks hold {here:,} elements of group {i}, its {len(unit.shapes):,} parameters have {wanted:,}"
                if not fits
                else f"the ranks' parts of group {i} have different lengths: "
                + ", ".join(f"{full:,}" for _, full in lengths[:8]),
                where=[rank.path for rank in self.ranks[:4]],
                hint=_ONE_SAVE,
            )

    def _spans(self, unit: _FlatUnit) -> list[tuple[int, int]]:
        """First element and last + 1 of each parameter in the group's vector."""
        (i,) = unit.flats
        said = self.ranks[0].state.get("param_alignment_paddings")
        paddings = list_of(said[i]) if isinstance(said, list) and i < len(said) else [0] * len(unit.shapes)
        if len(paddings) != len(unit.shapes) or any(type(n) is not int or n < 0 for n in paddings):
            raise CorruptError("`param_alignment_paddings` are not those of the parameters", where=self.ranks[0].path)
        spans, at = [], 0
        for shape, padding in zip(unit.shapes.values(), paddings, strict=True):
            spans.append((at, at + prod(shape)))
            at = spans[-1][1] + padding
        return spans

    def _starts(self, unit: _FlatUnit) -> list[int]:
        starts = [0]
        for r in range(len(self.ranks)):
            starts.append(starts[-1] + self.length(r, unit.flats[0])[0])
        return starts

    def _agrees(self, unit: _FlatUnit) -> None:
        """Raises ConflictError where a rank's own table puts a parameter elsewhere than the shapes do."""
        (i,) = unit.flats
        spans, starts = dict(zip(unit.shapes, self._spans(unit), strict=True)), self._starts(unit)
        for r, rank in enumerate(self.ranks):
            tables = rank.state.get("param_slice_mappings")
            table = tables[i] if isinstance(tables, list) and i < len(tables) else None
            if not isinstance(table, dict):
                continue
            for name, address in table.items():
                span = spans.get(str(name))
                fields = address.fields if isinstance(address, PickledObject) else {}
                first, n = fields.get("start"), fields.get("numel")
                lo, hi = (max(span[0], starts[r]), min(span[1], starts[r + 1])) if span else (0, 0)
                if span is None or (n, n and first) != (max(0, hi - lo), n and lo - starts[r]):
                    raise ConflictError(
                        f"`param_slice_mappings` puts `{printable(str(name))}` in another place than the shapes of the"
                        " parameters do",
                        where=rank.path,
                        hint=_ONE_SAVE,
                    )

    def pieces(self, unit: _FlatUnit, vectors: Sequence[Sequence[StoredTensor]]) -> Iterator[FlatTensor]:
        runs = []
        for start, found, (r, _) in zip(self._starts(unit), vectors, enumerate(self.ranks), strict=False):
            n = self.length(r, unit.flats[0])[0]
            runs += [ElementRun(start, t._replace(shape=(n,))) for t in found if n]
        for (name, shape), (start, stop) in zip(unit.shapes.items(), self._spans(unit), strict=True):
            yield name, shape, list(cut(runs, start, stop))


def _settings(rank: OptimizerFile) -> dict[str, Any]:
    """``zero_optimization`` of the trainer's configuration, where the save has it."""
    value = rank.torch.value
    config = value.get("ds_config") if isinstance(value, dict) else None
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    return zero if isinstance(zero, dict) else {}


class Stage3(Partitions):
    """Runs of each parameter."""

    key = "fp32_flat_groups"
    base = "optimizer_state_dict"

    def measure(self) -> None:
        super().measure()
        world = len(self.ranks)
        mics = _settings(self.ranks[0]).get("mics_shard_size")
        if type(mics) is int and 0 < mics < world:
            raise UnsupportedError(
                f"parameters are shared out within groups of {mics} ranks (MiCS)",
                where=self.ranks[0].path,
                hint="save the model with DeepSpeed's save_16bit_model, and give what it writes",
            )
        parts = [sum(-(-prod(s) // world) for s in shapes.values()) for shapes in self.groups_]
        for flats, rank in zip(self.flats, self.ranks, strict=True):
            held = [t.shape[0] for t in flats]
            if sum(held) != sum(parts):
                swapped = not sum(held)
                raise (UnsupportedError if swapped else ConflictError)(
                    "the optimizer's state is on NVMe (offload_optimizer), and not in the checkpoint's files"
                    if swapped
                    else f"the rank holds {sum(held):,} elements, its parts of the parameters have {sum(parts):,}",
                    where=rank.path,
                    hint="load the checkpoint without offload to NVMe, and save it again" if swapped else _ONE_SAVE,
                )
        if all([t.shape[0] for t in flats] == parts for flats in self.flats):
            self.units = [_FlatUnit(shapes, (i,)) for i, shapes in enumerate(self.groups_)]
        else:  # shapes by groups, vectors by sub-groups
            everything = {name: shape for shapes in self.groups_ for name, shape in shapes.items()}
            self.units = [_FlatUnit(everything, tuple(range(len(self.flats[0]))))]

    def pieces(self, unit: _FlatUnit, vectors: Sequence[Sequence[StoredTensor]]) -> Iterator[FlatTensor]:
        world, runs = len(self.ranks), []
        for found in vectors:
            mine, at = [], 0
            for t in found:
                mine.append(ElementRun(at, t))
                at += t.shape[0]
            runs.append(mine)
        at = 0
        for name, shape in unit.shapes.items():
            size = prod(shape)
            part = -(-size // world)
            pieces = []
            for r, mine in enumerate(runs):
                have = min(part, size - r * part)
                if have > 0:
                    pieces += [FlatShard(r * part + s.start, s.stored) for s in cut(mine, at, at + have)]
            yield name, shape, pieces
            at += part
