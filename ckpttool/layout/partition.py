"""Logical tensors -> what each rank of a mesh stores. The inverse of ``assemble``, through the same local_boxes()."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import gcd
from typing import Any, NamedTuple, Protocol

from ckpttool.core.catalog import RankTensor, RankTensors
from ckpttool.core.geometry import Box, whole
from ckpttool.core.mesh import Coords, Mesh, share
from ckpttool.core.words import either
from ckpttool.errors import ConflictError, LayoutError
from ckpttool.formats.config import quantization
from ckpttool.layout.assemble import LAYER, cannot_cut, is_bias, no_rule, overridden, pad_boxes, shift_layer
from ckpttool.layout.family import Family, Placement
from ckpttool.layout.packed import find_packing
from ckpttool.layout.rules import IndivisibleError, PartitionContext, RankShare, Rule, local_boxes
from ckpttool.layout.scales import block_of, config_block, is_per_tensor_scale, weight_of
from ckpttool.layout.statements import Transform


class WholeTensor(Protocol):
    """A tensor to partition: a logical tensor, or a view of one."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class _CutTensor(NamedTuple):
    """A tensor and how it is cut."""

    tensor: WholeTensor
    place: Placement
    base: tuple[int, ...]
    """Shape of the weight that it is a grid over; its own where it is none."""
    blocks: tuple[int, ...]
    """Elements of that weight for each of its own along each axis; () where it is none."""


@dataclass(slots=True)
class _Placements:
    """The placements of all tensors."""

    tensors: list[_CutTensor] = field(default_factory=list)
    published: dict[str, Placement | None] = field(default_factory=dict)
    """The placement of each name by the family's rules, without --replicate and the like."""
    packed: Collection[str] = ()
    """Names of the parts of packed weights."""
    scaled: dict[tuple[int, tuple[int, ...]], Rule] = field(default_factory=dict)
    """Rules of the weights that have scales, by rule and shape."""


@dataclass(slots=True)
class Partitioner:
    """Cuts tensors for one target mesh."""

    family: Family
    ops: tuple[Transform, ...]
    cutting: PartitionContext
    config: Mapping[str, Any]
    dtypes: Mapping[str, str] = field(default_factory=dict)
    """Stored dtypes by name, where they are not the tensors' own."""
    local_layers: bool = False
    tied: bool = False
    """The last stage needs the input embedding too, as its output head."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Names in the output (--rename) where they differ; rules go by the name."""
    flag: str = "out"
    """Flags that a hint names: --tp-out, or --tp."""
    root: str = ""
    """The directory of the source, where config.json belongs."""
    _locals: dict[Any, tuple[RankShare, tuple[Box, ...]]] = field(default_factory=dict)

    def run(self, tensors: Sequence[WholeTensor], ranks: Iterable[int] | None = None) -> list[RankTensors]:
        """Per rank what it stores, in the order of ``tensors``; other ranks than ``ranks`` stay empty.

        Raises LayoutError when a tensor has no rule or cannot be cut, with the sizes that would work.
        """
        mesh = self.cutting.mesh
        first = RankTensors()
        out = [first, *[RankTensors(share_index_with=first) for _ in range(1, mesh.world)]]
        if mesh.world == 1 and self.cutting.vocab_multiple == 1:
            for t in tensors:
                box = whole(t.shape)
                name = self.names.get(t.name, t.name)
                out[0].append(RankTensor(name, self.dtypes.get(t.name, t.dtype), t.shape, name, t.shape, ((box, box),)))
            return out
        if mesh.pp > 1 and self.family.spec.no_pipeline:
            why = f"models of family `{self.family.name}` have no pipeline stages: {self.family.spec.no_pipeline}"
            raise LayoutError(why, where=self.family.origin, hint="omit --pp-out")
        chosen = set(range(mesh.world) if ranks is None else ranks)
        coords = [c for c in mesh.all_coords() if c.rank in chosen]
        by_stage: dict[int, list[Coords]] = {}
        by_owner: dict[tuple[int, int], list[Coords]] = {}
        for c in coords:
            by_stage.setdefault(c.pp, []).append(c)
            by_owner.setdefault((c.pp, c.ep), []).append(c)
        found = self._place(tensors)
        stages = self.stages((t.name for t in tensors), mesh)
        owner = self._owners(found.tensors)
        first_layer = {s: min((n for n, at in stages.items() if at == s), default=0) for s in range(mesh.pp)}
        for t, place, base, blocks in found.tensors:
            stage = self._stage(place, stages)
            holders = (
                by_stage.get(stage, ()) if place.expert is None else by_owner.get((stage, owner[place.expert]), ())
            )
            # Also an embedding that every rank has whole, because its vocabulary does not divide.
            if self.tied and mesh.pp > 1 and place.stage == "first" and _is_vocab(place, found.published[t.name]):
                holders = [*holders, *by_stage.get(mesh.pp - 1, ())]
            name = logical = self.names.get(t.name, t.name)
            if self.local_layers and place.layer is not None:
                name = shift_layer(name, -first_layer[stage])
            bias, dtype = is_bias(t.name), self.dtypes.get(t.name, t.dtype)
            mine = mesh.ep > 1 and (place.expert is not None or place.rule.grouped)
            for at in holders:
                key = (id(place.rule), base, blocks, bias, at.tp, at.ep, at.etp)
                known = self._locals.get(key)
                if known is None:
                    known = self._locals[key] = self._cut(_CutTensor(t, place, base, blocks), at, found)
                local, pads = known
                out[at.rank].append(
                    RankTensor(name, dtype, local.shape, logical, t.shape, local.boxes, pads, expert=mine)
                )
        return out

    def _place(self, tensors: Sequence[WholeTensor]) -> _Placements:
        """The placement of each tensor by the rules. Raises LayoutError where there is none."""
        shapes = {t.name: t.shape for t in tensors}
        packing = find_packing(quantization(self.config), {t.name: t.dtype for t in tensors})
        packed = packing.parts(shapes) if packing is not None else {}
        weights = {n: w for n in shapes if n not in packed and (w := weight_of(n, shapes)) is not None}
        out = _Placements(packed=packed)
        missing = []
        place_of = self.family.placer(self.ops)
        block_size = config_block(self.config)
        published = out.published
        for t in tensors:
            published[t.name] = place_of(t.name)
            place = overridden(self.family, t.name, published[t.name])
            base: tuple[int, ...] = t.shape
            blocks: tuple[int, ...] = ()
            part = packed.get(t.name)
            if packing is not None and part is not None:
                place = overridden(self.family, t.name, place_of(part.weight) or published[t.name])
                base = packing.base(part, t.name, t.shape, shapes[part.codes])
                blocks = packing.blocks(part, len(t.shape))
                place = place and place._replace(rule=packing.rule(place.rule, t.name, part))
            elif t.name in weights:
                weight = weights[t.name]
                place = (published[weight] if weight in published else place_of(weight)) or place
                block = block_of(shapes[weight], t.shape, block_size, name=t.name)
                if place is not None:
                    out.scaled[id(place.rule), shapes[weight]] = place.rule
                if place is not None and block is None:
                    place = place._replace(rule=replace(place.rule, verb="replicate"))
                elif block is not None and len(block) == len(shapes[weight]):
                    base, blocks = shapes[weight], block
            elif place is not None and is_per_tensor_scale(t.name, t.shape):
                place = place._replace(rule=replace(place.rule, verb="replicate"))
            elif packing is not None and place is not None:
                packing.check(place.rule, t.name, t.dtype)
            if place is None:
                missing.append(t.name)
            else:
                out.tensors.append(_CutTensor(t, place, base, blocks))
        if missing:
            raise no_rule(missing, self.family, self.config, self.root)
        return out

    def _owners(self, placed: Sequence[_CutTensor]) -> dict[int, int]:
        """The expert-parallel rank that holds each expert.

        Raises LayoutError when they cannot be shared out, ConflictError for an expert that config.json does not count.
        """
        mesh = self.cutting.mesh
        if mesh.ep > 1 and self.family.varies("experts"):
            raise LayoutError(
                "the number of experts differs from layer to layer, and ranks cannot share them out",
                hint=f"use --ep-{self.flag} 1",
            )
        experts = self.family.size("experts") or 1 + max((p.expert or 0 for _, p, _, _ in placed), default=0)
        if experts % mesh.ep and not self.cutting.ragged_experts and any(p.expert is not None for _, p, _, _ in placed):
            raise LayoutError(
                f"{experts} experts cannot be shared evenly by {mesh.ep} ranks",
                # Where ep is tp, one flag sets both.
                hint=f"use --{'tp' if (mesh.tp, mesh.etp) == (mesh.ep, 1) else 'ep'}-{self.flag}"
                f" {either(_first(d for d in range(1, experts + 1) if experts % d == 0))}",
            )
        if above := next((t.name for t, p, _, _ in placed if (p.expert or 0) >= experts), None):
            raise ConflictError(
                f"tensor `{above}` is of an expert that config.json does not count: it says {experts}",
                hint="correct the number of experts in config.json",
            )
        said = self.family.size("experts")
        stacked = [t for t, p, _, _ in placed if p.rule.grouped and not p.rule.rows and t.shape]
        if other := next((t for t in stacked if said and t.shape[0] != said), None):
            raise ConflictError(
                f"tensor `{other.name}` holds {other.shape[0]} experts, config.json says {said}",
                hint="correct the number of experts in config.json",
            )
        return {e: r for r in range(mesh.ep) for e in range(*share(experts, mesh.ep, r))}

    def _cut(self, placed: _CutTensor, at: Coords, among: _Placements) -> tuple[RankShare, tuple[Box, ...]]:
        """One rank's share of a tensor, and its boxes of padding. Raises LayoutError."""
        t, place, base, blocks = placed
        try:
            local = local_boxes(place.rule, base, self.cutting, at, bias=is_bias(t.name), blocks=blocks)
        except IndivisibleError as e:
            valid_sizes = self._works(among.tensors, expert=place.rule.expert)
            if t.name in among.packed:
                e.why = e.why.replace("a scale block of", "a packed word or a group of")
            elif e.inside and self.flag == "out":
                side = self._finer(among.scaled, e.inside)
                valid_sizes += f", or reshard with other scales (--requant block:{side}x{side})"
                valid_sizes += " or none (--dequant bf16)"
            raise cannot_cut(t.name, t.shape, place.rule.place, e, str(self.cutting.mesh), valid_sizes) from None
        return local, tuple(pad_boxes(local))

    def stages(self, names: Iterable[str], mesh: Mesh) -> dict[int, int]:
        """Stage of each layer number, given the names of all tensors.

        Raises LayoutError when the layers cannot be divided.
        """
        if mesh.pp == 1 and not mesh.layout:
            return {}
        seen = 1 + max((int(m[1]) for n in names if (m := LAYER.search(n))), default=-1)
        layers = self.family.size("layers") or seen
        if seen and seen < layers:
            layers = seen
        stages = mesh.stage_layers(layers)
        return {n: s for s, numbers in enumerate(stages) for n in numbers}

    def _stage(self, place: Placement, stages: dict[int, int]) -> int:
        last = self.cutting.mesh.pp - 1
        if place.stage == "layers" and place.layer is not None:
            return stages.get(place.layer, last)  # a layer after the last one is multi-token prediction
        return 0 if place.stage == "first" else last

    def _finer(self, scaled: Mapping[tuple[int, tuple[int, ...]], Rule], side: int) -> int:
        """Side of the largest square blocks, of at most ``side`` elements, between which every cut falls.

        ``scaled`` are the rules of quantized weights, by rule and shape.
        """
        mesh = self.cutting.mesh
        for (_, shape), rule in scaled.items():
            leading = (1,) * (len(shape) - 2)
            for rank in (0, mesh.world - 1):
                try:
                    local_boxes(rule, shape, self.cutting, mesh.coords(rank), blocks=(*leading, side, side))
                except IndivisibleError as e:
                    side = gcd(side, e.inside)
        return side

    def _works(self, placed: Sequence[_CutTensor], *, expert: bool) -> str:
        """The hint: sizes with which every tensor can be cut."""
        distinct = {
            (id(p.rule), base, blocks, is_bias(t.name)): (p.rule, base, blocks, is_bias(t.name))
            for t, p, base, blocks in placed
            if p.rule.expert == expert
        }
        good = []
        for n in [*range(1, 17), 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 128]:
            mesh = replace(self.cutting.mesh, **({"etp": n} if expert else {"tp": n}))
            cutting = replace(self.cutting, mesh=mesh)
            try:
                for rule, base, blocks, bias in distinct.values():
                    local_boxes(rule, base, cutting, mesh.coords(0), bias=bias, blocks=blocks)
                    local_boxes(rule, base, cutting, mesh.coords(mesh.world - 1), bias=bias, blocks=blocks)
            except IndivisibleError:
                continue
            good.append(n)
        if not good:
            return "no number of ranks divides these sizes: look at them in config.json"
        return f"use --{'etp' if expert else 'tp'}-{self.flag} {either(_first(good))}"


def _is_vocab(*places: Placement | None) -> bool:
    return any(p is not None and p.rule.verb == "vocab" for p in places)


def _first(numbers: Iterable[int]) -> list[str]:
    """The first numbers, as many as a hint shows."""
    return list(map(str, islice(numbers, 16)))
