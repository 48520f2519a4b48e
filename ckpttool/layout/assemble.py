"""Stored tensors of ranks -> logical tensors with pieces.

For files that do not record where they belong: the rule of a name and the mesh say which box of the whole tensor each
rank holds. What the rules expect is compared with every stored shape, so a wrong --tp or family is an error, not a
wrong tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from ckpttool.core.catalog import (
    SHAPE_FROM_RULES,
    Catalog,
    Key,
    LogicalTensor,
    Pad,
    Piece,
    StoredTensor,
    logical_tensor,
)
from ckpttool.core.catalog import whole_tensor as whole_logical
from ckpttool.core.files import DataFile
from ckpttool.core.geometry import Box, uncovered, whole
from ckpttool.core.mesh import Coords, share
from ckpttool.core.optimizer_states import SCALARS
from ckpttool.core.words import count
from ckpttool.errors import ConflictError, LayoutError
from ckpttool.formats.config import quantization
from ckpttool.layout.family import Family, Placement
from ckpttool.layout.names import split_numbers
from ckpttool.layout.packed import find_packing
from ckpttool.layout.rules import (
    IndivisibleError,
    PartitionContext,
    RankShare,
    Rule,
    cut_axis,
    global_shape,
    local_boxes,
    part_lengths,
)
from ckpttool.layout.scales import block_of, config_block, is_per_tensor_scale, single_block, weight_of
from ckpttool.layout.statements import Transform
from ckpttool.layout.unknown import unknown_model

LAYER = re.compile(r"(?<![^.])(?:layers?|h|blocks?|blk)\.(\d{1,18})(?![^.])")
"""The layer number of a name in any naming."""
EXPERT = re.compile(r"(?<![^.])(?:local_)?experts\.(\d{1,18})(?![^.])")
"""The expert number of a name that has one."""

_UNPACKED = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
"""Dtypes of which an element is one number of the weight."""


def shift_layer(name: str, by: int) -> str:
    """The name with its layer number changed."""
    return LAYER.sub(lambda m: m[0][: m.start(1) - m.start()] + str(int(m[1]) + by), name, count=1)


def is_bias(name: str) -> bool:
    """A bias has only an output axis (names end with ``.bias`` or ``_bias``)."""
    return name.endswith("bias")


def cannot_cut(
    name: str, shape: Sequence[int], rule_place: str, why: IndivisibleError, ways: str, works: str
) -> LayoutError:
    """The one error for every uneven cut."""
    return LayoutError(
        f"tensor `{name}` {list(shape)} cannot be cut for {ways}: {why.why}", where=rule_place, hint=works or None
    )


def no_rule(names: Iterable[str], family: Family, config: Mapping[str, Any], root: str = "") -> LayoutError:
    """The error that lists tensors without a rule, one line per name template; ``root`` is the directory of SRC."""
    names = list(names)
    templates = sorted({split_numbers(n)[0].replace("#", "{n}") for n in names})
    shown = templates[:12] + ([f"... and {len(templates) - 12} more"] if len(templates) > 12 else [])
    first = templates[0].replace("{n}", "*")
    specify = f"specify how they are held: --replicate '{first}' or --split '{first}=0' (the axis that is cut)"
    kinds = count(len(templates), "kind")
    if family.name == "none":
        why = f"how {kinds} of tensor {'is' if len(templates) == 1 else 'are'} cut depends on the model"
        return unknown_model(why, names, config, root, shown, specify)
    return LayoutError(
        f"no layout rule names {kinds} of tensor",
        where=[f"family `{family.name}`", *shown],
        hint=f"{specify}, or --family NAME|FILE.yaml",
    )


@dataclass(slots=True)
class Assembler:
    """Builds the catalog of one sharded source; ``notes`` collects what was inferred."""

    files: list[DataFile]
    family: Family
    ops: tuple[Transform, ...]
    cutting: PartitionContext
    config: Mapping[str, Any]
    local_layers: bool = False
    notes: list[str] = field(default_factory=list)
    free_padding: bool = False
    """The rows that pad the vocabulary may hold anything."""
    wholes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of logical tensors that are known already, for stored tensors of ``SHAPE_FROM_RULES``."""
    root: str = ""
    """The directory of the source, where config.json belongs."""
    _locals: dict[Any, RankShare] = field(default_factory=dict)
    _coords: list[Coords] = field(default_factory=list)

    def run(self, stored: Iterable[StoredTensor]) -> Catalog:
        """Raises LayoutError (no rule, uneven), ConflictError (shapes that contradict), IncompleteError (holes)."""
        self._coords = list(self.cutting.mesh.all_coords())
        named = self._global_names(list(stored))
        place_of = self.family.placer(self.ops)
        placements = {name: overridden(self.family, name, place_of(name)) for name in named}
        known = {n: p for n, p in placements.items() if p is not None}
        packing = find_packing(quantization(self.config), {n: group[0].dtype for n, group in named.items()})
        packed = packing.parts(named) if packing is not None else {}
        weights = {n: w for n in named if n not in packed and (w := weight_of(n, named)) is not None}
        missing = [n for n in named if n not in known and n not in weights]
        if missing:
            raise no_rule(missing, self.family, self.config, self.root)
        tensors: dict[str, LogicalTensor] = {}
        for name, group in named.items():
            if name not in weights and name not in packed:
                place = known[name]
                first = group[0]
                if packing is not None and self.cutting.mesh.world > 1 and name not in weights.values():
                    packing.check(place.rule, name, first.dtype)
                if is_per_tensor_scale(name, first.shape) or self._is_number(name, first, place.rule):
                    place = _replicated(place)
                tensors[name] = self._one(name, group, place)
        for name, weight in weights.items():
            tensors[name] = self._scales(name, named[name], known.get(weight) or known[name], tensors[weight])
        if packing is not None:
            # The integers first: they say how large their weight is.
            for name, part in sorted(packed.items(), key=lambda item: item[0] != item[1].codes):
                place = overridden(self.family, name, place_of(part.weight)) or known[name]
                place = place._replace(rule=packing.rule(place.rule, name, part))
                unit = packing.blocks(part, len(named[name][0].shape))
                codes = tensors[part.codes].shape if name != part.codes else ()
                tensors[name] = self._one(name, named[name], place, unit, packing.whole(part, codes))
                packing.base(part, name, tensors[name].shape, tensors[part.codes].shape)
        self._check_heads(tensors, {n: p for n, p in known.items() if n not in packed and n not in weights})
        return Catalog(self.files, {Key(n): tensors[n] for n in named})

    def _is_number(self, name: str, first: StoredTensor, rule: Rule) -> bool:
        """Whether a state is one number for its parameter, however that is cut: a step count, a power of beta.

        A moment has one element, too, where a rank's share of its parameter has one.
        """
        if not first.state or prod(first.shape) != 1:
            return False
        base = self.wholes.get(name, ())
        if first.state in SCALARS or len(base) != len(first.shape) or prod(base) == 1:
            return True
        try:
            share = local_boxes(rule, base, self.cutting, self._coords[first.rank], bias=is_bias(name))
        except IndivisibleError:
            return True
        return share.shape != first.shape

    def _check_heads(self, tensors: Mapping[str, LogicalTensor], known: Mapping[str, Placement]) -> None:
        """Query, key and value of a fused tensor are told apart by numbers of heads that the config alone has.

        The output projection takes what the query's heads give, so its columns are the query's rows. Raises
        ConflictError.
        """
        rows: dict[tuple[int | None, str], tuple[str, int]] = {}
        for fused in (False, True):
            for name, place in known.items():
                tensor, rule = tensors.get(name), place.rule
                # A part of a length of its own may hold more than the query.
                part = rule.parts[0] if fused and rule.parts else None
                units = rule.units if part is None else part.units if part.units == part.length else ""
                if tensor is None or len(tensor.shape) != 2 or not units or tensor.dtype not in _UNPACKED:
                    continue
                axis = cut_axis(rule, 2, bias=False)
                if axis is None or rule.verb != ("fused" if fused else "row"):
                    continue
                if not fused:
                    rows[place.layer, units] = name, tensor.shape[axis]
                    continue
                length = part_lengths(rule, tensor.shape[axis], self.cutting.sizes)[0]
                output, columns = rows.get((place.layer, units), ("", length))
                if length != columns:
                    raise ConflictError(
                        f"{length} of the {tensor.shape[axis]} rows of `{name}` would be those of the query, by the"
                        f" numbers of heads in config.json, but `{output}` takes {columns}",
                        where=[
                            place.rule.place,
                            *sorted({str(self.files[p.stored.file].place) for p in tensor.pieces}),
                        ],
                        hint="check num_attention_heads and num_key_value_heads in config.json",
                    )

    def _global_names(self, stored: list[StoredTensor]) -> dict[str, list[StoredTensor]]:
        """Group by name after giving layers and experts that a rank numbers from 0 their global numbers."""
        mesh = self.cutting.mesh
        layer_offset = self._layer_offsets(stored) if mesh.pp > 1 else {}
        expert_offset = self._expert_offsets(stored) if mesh.ep > 1 else {}
        out: dict[str, list[StoredTensor]] = {}
        for t in stored:
            name = t.name
            at = self._coords[t.rank]
            if by := layer_offset.get(at.pp):
                name = shift_layer(name, by)
            if by := expert_offset.get(at.ep):
                name = EXPERT.sub(lambda m, by=by: f"{m[0][: m.start(1) - m.start()]}{int(m[1]) + by}", name, count=1)  # type: ignore[misc]
            out.setdefault(name, []).append(t)
        return out

    def _layer_offsets(self, stored: list[StoredTensor]) -> dict[int, int]:
        """First layer of each stage, when the stages number their layers from 0."""
        seen: dict[int, set[int]] = {}
        for t in stored:
            if m := LAYER.search(t.name):
                seen.setdefault(self._coords[t.rank].pp, set()).add(int(m[1]))
        if not self.local_layers and (len(seen) < 2 or not all(0 in s for s in seen.values())):
            return {}
        out, at = {}, 0
        for stage in range(self.cutting.mesh.pp):
            out[stage] = at
            at += max(seen.get(stage, {-1})) + 1
        self.notes.append("layers are numbered from 0 in every pipeline stage; renumbered globally")
        return out

    def _expert_offsets(self, stored: list[StoredTensor]) -> dict[int, int]:
        """First expert of each ep rank, when the ranks number their experts from 0."""
        total = self.family.size("experts")
        seen: dict[int, set[int]] = {}
        for t in stored:
            if m := EXPERT.search(t.name):
                seen.setdefault(self._coords[t.rank].ep, set()).add(int(m[1]))
        ep = self.cutting.mesh.ep
        if not total or len(seen) < 2 or any(max(s) + 1 > -(-total // ep) for s in seen.values()):
            return {}
        self.notes.append("experts are numbered from 0 on every ep rank; renumbered globally")
        return {r: share(total, ep, r)[0] for r in range(ep)}

    def _one(
        self,
        name: str,
        group: list[StoredTensor],
        place: Placement,
        unit: tuple[int, ...] = (),
        base: tuple[int, ...] = (),
    ) -> LogicalTensor:
        """One logical tensor. Of a grid ``unit`` are the elements of its weight for each of its own, and ``base`` is
        the weight's shape, () where only the grid says it."""
        rule, bias, cutting = place.rule, is_bias(name), self.cutting
        mesh = self.cutting.mesh
        try:
            if group[0].shape == SHAPE_FROM_RULES:
                group = self._shaped(name, group, rule)
            first = group[0]
            if not base:
                experts = 0
                if rule.grouped and not rule.rows:
                    per_rank = {self._coords[t.rank].ep: t.shape[0] for t in group if t.shape}
                    experts = sum(per_rank.values()) if len(per_rank) == mesh.ep else self.family.size("experts") or 0
                held = tuple(n * b for n, b in zip(first.shape, unit, strict=True)) if unit else first.shape
                base = global_shape(rule, held, experts, self.cutting, bias=bias)
                expected = self.family.size("experts")
                if rule.grouped and not rule.rows and expected and base and base[0] != expected:
                    raise ConflictError(
                        f"tensor `{name}` holds {base[0]} experts in all, config.json says {expected}",
                        where=[str(self.files[first.file].place), rule.place],
                        hint="check --ep of the source: the ranks may each hold a share of the experts",
                    )
                if rule.verb == "vocab" and cutting.pad_vocab and base:
                    # How far the writer padded is in the files; formats and versions differ.
                    rows = first.shape[cut_axis(rule, len(base), bias=bias) or 0] * mesh.tp
                    cutting = replace(cutting, vocab_rows=rows)
                    vocab = self.family.size("vocab") or 0
                    if rows < vocab:
                        raise ConflictError(
                            f"tensor `{name}` has {rows} rows on {mesh.tp} ranks, config.json says {vocab}",
                            where=[str(self.files[first.file].place), rule.place],
                            hint="check --tp of the source and vocab_size in config.json",
                        )
            shape = tuple(-(-n // b) if b else 1 for n, b in zip(base, unit, strict=True)) if unit else base
            pieces, pads = [], []
            for t in group:
                at = self._coords[t.rank]
                key = (id(rule), base, unit, bias, cutting.vocab_rows, at.tp, at.ep, at.etp)
                local = self._locals.get(key)
                if local is None:
                    local = self._locals[key] = local_boxes(rule, base, cutting, at, bias=bias, blocks=unit)
                if local.shape != t.shape:
                    raise self._wrong_shape(name, t, first, local, shape, place)
                for inner, outer in local.boxes:
                    pieces.append(Piece(t, inner, outer))
                pads += [Pad(t, box, self.free_padding) for box in pad_boxes(local)]
        except IndivisibleError as e:
            raise cannot_cut(name, group[0].shape, rule.place, e, str(mesh), "") from None
        if len(pieces) == 1 and not pads and pieces[0].logical_box == whole(shape):
            return LogicalTensor(Key(name), first.dtype, shape, tuple(pieces))
        if not pieces:
            return LogicalTensor(Key(name), first.dtype, shape, ())
        return logical_tensor(Key(name), shape, pieces, pads, files=self.files)

    def _shaped(self, name: str, group: list[StoredTensor], rule: Rule) -> list[StoredTensor]:
        """The tensors with their ranks' shares of a known whole shape. Raises LayoutError and IndivisibleError."""
        if name not in self.wholes:
            raise LayoutError(
                f"the shape of `{name}` is not known: its files hold runs of elements, and there is no such weight",
                where=str(self.files[0].place.parent),
            )
        base, bias = self.wholes[name], is_bias(name)
        return [
            t._replace(shape=local_boxes(rule, base, self.cutting, self._coords[t.rank], bias=bias).shape)
            for t in group
        ]

    def _scales(self, name: str, group: list[StoredTensor], place: Placement, weight: LogicalTensor) -> LogicalTensor:
        first = group[0]
        if not weight.pieces:
            return self._one(name, group, _replicated(place))
        same_rank = [p.stored.shape for p in weight.pieces if p.stored.rank == first.rank]
        local = same_rank[0] if same_rank else weight.pieces[0].stored.shape
        if all(n == 1 for n in first.shape):
            block = single_block(local, weight.shape, first.shape, config_block(self.config))
        else:
            block = block_of(local, first.shape, config_block(self.config), name=name)
        if block is None:
            return self._one(name, group, _replicated(place))
        if len(block) == 1:
            return self._one(name, group, place)
        return self._one(name, group, place, block, weight.shape)

    def _wrong_shape(
        self,
        name: str,
        t: StoredTensor,
        first: StoredTensor,
        local: RankShare,
        shape: tuple[int, ...],
        place: Placement,
    ) -> ConflictError:
        mesh = self.cutting.mesh
        return ConflictError(
            f"tensor `{name}` of rank {t.rank} is {list(t.shape)}, but {mesh} of a {list(shape)} tensor is"
            f" {list(local.shape)}",
            where=[
                str(self.files[t.file].place),
                place.rule.place,
                f"(the whole shape follows from rank {first.rank}'s {list(first.shape)})",
            ],
            hint="check --tp, --ep and --etp of the source, the family, and the sizes in config.json",
        )


def _replicated(place: Placement) -> Placement:
    text = "replicate (one number for the tensor)"
    return place._replace(rule=replace(place.rule, verb="replicate", grouped=False, rows="", text=text))


def overridden(family: Family, name: str, base: Placement | None) -> Placement | None:
    """``base``, with the rule that --replicate, --split or the format says where one of them names the tensor."""
    for regex, rule in family.overrides:
        if regex.search(name):
            if base is not None:
                return base._replace(rule=replace(rule, expert=base.rule.expert))
            m, e = LAYER.search(name), EXPERT.search(name)
            layer, expert = int(m[1]) if m else None, int(e[1]) if e else None
            return Placement(replace(rule, expert=e is not None), "layers" if m else "first", layer, expert)
    return base


def pad_boxes(local: RankShare) -> list[Box]:
    """Boxes of a stored tensor that hold padding."""
    held = [inner for inner, _ in local.boxes]
    out: list[Box] = []
    while (gap := uncovered(local.shape, held + out)) is not None:
        out.append(gap)
    return out


def whole_catalog(files: list[DataFile], stored: Iterable[StoredTensor], *, copies: bool = False) -> Catalog:
    """The catalog of a source whose stored tensors are whole; needs no rules.

    With ``copies`` a tensor may be in several files, which then must hold the same.
    """
    tensors: dict[Key, LogicalTensor] = {}
    for t in stored:
        key = t.key
        if key not in tensors:
            tensors[key] = whole_logical(t, key)
            continue
        first = tensors[key].pieces[0]
        if not copies or first.stored.shape != t.shape:
            raise ConflictError(
                f"tensor `{t.name}` is in two files",
                where=[str(files[first.stored.file].place), str(files[t.file].place)],
                hint="remove the stale file, or keep an index that says which one counts",
            )
        tensors[key].replicas = (*tensors[key].replicas, Piece(t, first.stored_box, first.logical_box))
    return Catalog(files, tensors)
