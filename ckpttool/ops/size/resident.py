"""The weights of each rank of a mesh, and whether blocks of scales can be cut that way.

A weight is cut in high precision by the family's rule, as reshard cuts it, and the recipe is applied to the share: a
block that is partly filled has a scale. Tensors of one kind (shape, rule, recipe) are worked out once and counted, so
that a model of a hundred thousand tensors on a thousand ranks takes no longer than one layer of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

from ckpttool.core.dtypes import nbytes
from ckpttool.core.mesh import Coords, Mesh, share
from ckpttool.errors import LayoutError
from ckpttool.layout.assemble import is_bias, no_rule
from ckpttool.layout.family import Family
from ckpttool.layout.names import split_numbers
from ckpttool.layout.rules import IndivisibleError, PartitionContext, RankShare, Rule, local_boxes, parse_rule
from ckpttool.layout.statements import matches
from ckpttool.ops.size.coding import Coding
from ckpttool.ops.size.model import SizedModel
from ckpttool.ops.size.stored import Applied

_WHOLE = parse_rule("replicate")
SIZES = (*range(1, 17), 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 128)
"""Numbers of ranks that are tried when those asked for are not possible."""
SHARED = -1
"""No expert-parallel rank has it alone."""


class _ResidentKind(NamedTuple):
    """Tensors that every rank holds alike."""

    rule: Rule
    shape: tuple[int, ...]
    dtype: str
    coding: Coding | None
    bias: bool
    merged: str
    """How engines join it with others on its output axis: ``inner``, ``last`` or "" (not at all)."""
    stages: tuple[int, ...]
    owner: int
    """The expert-parallel rank that has it, or SHARED."""
    name: str
    """Name of the first of them, for messages."""
    template: str
    """Its name without numbers."""
    blocks: tuple[int, ...] = ()
    """Elements of a packed weight for each stored one along each axis."""
    parameters: int = 1
    """Parameters of the weight for each stored element."""


_Counted = Sequence[tuple[_ResidentKind, int]]
"""Kinds, and how many tensors there are of each."""


_Sizes = dict[tuple[int, int, int], tuple[int, int, int]]
"""(number of a kind, place on its cut axis, place among grouped experts) -> elements, bytes, bytes if coded."""


class Weights(NamedTuple):
    """Weights of one rank: all others, and those of routed experts."""

    dense: int
    experts: int
    codes: int
    """Bytes of ``dense`` that are codes and scales."""
    expert_codes: int
    parameters: int
    """Elements in high precision that ``dense`` stands for, padding of the vocabulary included."""
    expert_parameters: int

    @property
    def nbytes(self) -> int:
        return self.dense + self.experts


class Misfit(NamedTuple):
    """A weight that cannot be cut as asked."""

    name: str
    shape: tuple[int, ...]
    why: str
    expert: bool


@dataclass(slots=True)
class RankLoads:
    """Bytes that each rank holds."""

    mesh: Mesh
    vocabulary: tuple[int, int]
    """Rows of the embedding, and rows of all ranks after padding; (0, 0) when there is none."""
    held: list[Weights]
    """Weights by rank; empty when a weight cannot be cut at all."""
    misfits: list[Misfit]
    """Empty when the weights can be cut that way."""
    works: tuple[int, ...] = ()
    """Tensor-parallel sizes that would be possible, looked for when there are misfits."""
    checked: bool = False
    """There are blocks of scales, and cuts were checked against them."""

    @property
    def most(self) -> int:
        """The rank with the most bytes."""
        return max(range(len(self.held)), key=lambda r: self.held[r].nbytes, default=0)


def partition(
    model: SizedModel, applied: Applied, mesh: Mesh, vocab_multiple: int, *, blocks: bool, follows: bool
) -> RankLoads:
    """Share the weights out.

    ``blocks``: cuts must fall between blocks of scales. ``follows``: etp is tp, so that another tp brings another etp.
    Raises LayoutError for tensors without a rule and layers that do not divide into stages.
    """
    if model.packing is not None and model.packing.why and mesh.world > 1:
        refused = Misfit(
            model.packing.example, model.stored[model.packing.example].shape, model.packing.why, expert=False
        )
        return RankLoads(mesh, (0, 0), [], [refused], (1,))
    kinds = _kinds(model, applied, mesh)
    cutting = PartitionContext(mesh, model.family.sizes, vocab_multiple=vocab_multiple)
    out = RankLoads(mesh, _vocabulary(kinds, cutting), [], _misfits(kinds, cutting, blocks=blocks))
    out.checked = blocks and any(k.coding is not None and k.coding.sides[0] for k, _ in kinds)
    if out.misfits:
        out.works = tuple(_works(kinds, cutting, blocks=blocks, follows=follows))
    with suppress(IndivisibleError):  # a misfit says so
        out.held = _held(kinds, cutting)
    return out


def tensor_parallel_loads(
    model: SizedModel, applied: Applied, sizes: Iterable[int], vocab_multiple: int
) -> dict[int, int]:
    """Bytes of weights on the fullest rank by tensor-parallel size, for the sizes with which an engine can cut them."""
    if model.packing is not None and model.packing.why:
        return {1: applied.total.nbytes}
    try:
        kinds = _kinds(model, applied, Mesh(tp=2, etp=2))
    except LayoutError:  # no rules: one rank holds everything
        kinds, sizes = _kinds(model, applied, Mesh()), (1,)
    out = {}
    for n in sizes:
        cutting = PartitionContext(Mesh(tp=n, etp=n), model.family.sizes, vocab_multiple=vocab_multiple)
        if not _misfits(kinds, cutting, blocks=n > 1):
            out[n] = max(w.nbytes for w in _held(kinds, cutting))
    return out


def _kinds(model: SizedModel, applied: Applied, mesh: Mesh) -> _Counted:
    """Tensors by kind. Raises LayoutError for one that has no rule and has to be cut."""
    family = model.family
    place_of = family.placer(model.ops)
    merging = _merging(family)
    stage_of = _stages(model, mesh)
    last = mesh.pp - 1
    experts = family.size("experts") or 0
    if mesh.ep > 1 and family.varies("experts"):
        raise LayoutError(
            "the number of experts differs from layer to layer, and ranks cannot share them out", hint="use --ep-out 1"
        )
    owners = {e: r for r in range(mesh.ep) for e in range(*share(experts, mesh.ep, r))}
    found: dict[tuple[Any, ...], _ResidentKind] = {}
    counts: dict[tuple[Any, ...], int] = {}
    missing = []
    for number, g in enumerate(applied.groups):
        w = g.weight
        for name in g.names:
            part = model.packed.get(name)
            place = place_of(part.weight if part is not None else name)
            rule, owner = _WHOLE, SHARED
            stages: tuple[int, ...] = (0,)
            if place is None:
                missing.append(name)
            else:
                rule = place.rule
                if place.stage == "first":
                    # The last stage needs a tied embedding as its head.
                    stages = (0, last) if family.tied and rule.verb == "vocab" and last else (0,)
                elif place.stage == "layers" and place.layer is not None:
                    stages = (stage_of.get(place.layer, last),)  # a layer after the last is multi-token prediction
                else:
                    stages = (last,)
                if place.expert is not None:
                    owner = owners.get(place.expert, 0)
            key = (number, stages, owner, rule.units, rule.parts)  # sizes may differ from layer to layer
            if key not in found:
                blocks: tuple[int, ...] = ()
                parameters = 1
                if model.packing is not None and part is not None:
                    rule = model.packing.rule(rule, name, part)
                    blocks = model.packing.blocks(part, len(w.shape))
                    parameters = prod(blocks) if name == part.codes else 0
                bias, merged, template = is_bias(name), _merged(merging, name), split_numbers(name)[0]
                found[key] = _ResidentKind(
                    rule, w.shape, w.dtype, g.coding, bias, merged, stages, owner, name, template, blocks, parameters
                )
            counts[key] = counts.get(key, 0) + 1
    if missing and mesh.world > 1:
        raise no_rule(missing, family, model.config)
    return [(kind, counts[key]) for key, kind in found.items()]


def _stages(model: SizedModel, mesh: Mesh) -> dict[int, int]:
    """Stage of each layer."""
    if mesh.pp == 1:
        return {}
    layers = model.family.size("layers")
    if layers is None:
        raise LayoutError(
            "the config does not say how many layers there are", where=str(model.path), hint="--config FILE gives one"
        )
    return {n: s for s, numbers in enumerate(mesh.stage_layers(layers)) for n in numbers}


def _merging(family: Family) -> list[tuple[str, ...]]:
    """The parts of each tensor that engines make of several by joining them: those of the vLLM naming, else all."""
    fusions = family.spec.fusions
    named = [op.fuse for op in family.spec.namings.get("vllm", ()) if op.fuse]
    return [tuple(f.parts) for n, f in fusions.items() if (n in named if named else not f.only_named)]


def _merged(merging: Iterable[tuple[str, ...]], name: str) -> str:
    for parts in merging:
        for i, part in enumerate(parts):
            if matches((part,), name):
                return "last" if i == len(parts) - 1 else "inner"
    return ""


def _local(kind: _ResidentKind, cutting: PartitionContext, at: Coords) -> RankShare:
    return local_boxes(kind.rule, kind.shape, cutting, at, bias=kind.bias, blocks=kind.blocks)


def _held(kinds: _Counted, cutting: PartitionContext) -> list[Weights]:
    """Weights by rank. Raises IndivisibleError."""
    mesh = cutting.mesh
    known: dict[tuple[int, int, int, int], Weights] = {}
    sizes: _Sizes = {}
    out = []
    for at in mesh.all_coords():
        key = (at.pp, at.tp, at.ep, at.etp)
        if key not in known:
            known[key] = _of_rank(kinds, cutting, at, sizes)
        out.append(known[key])
    return out


def _of_rank(kinds: _Counted, cutting: PartitionContext, at: Coords, sizes: _Sizes) -> Weights:
    dense, experts = [0, 0, 0], [0, 0, 0]  # bytes, those of codes and scales, parameters
    for number, (kind, count) in enumerate(kinds):
        if at.pp not in kind.stages or kind.owner not in (SHARED, at.ep):
            continue
        rule = kind.rule
        where = (number, at.etp if rule.expert else at.tp, at.ep if rule.grouped else 0)
        if where not in sizes:
            shape = _local(kind, cutting, at).shape
            coded = kind.coding.resident(shape) if kind.coding else 0
            elements = prod(shape)
            sizes[where] = (elements, coded or nbytes(kind.dtype, elements, where=kind.name), coded)
        elements, size, coded = sizes[where]
        held = experts if rule.expert else dense
        held[0] += count * size
        held[1] += count * coded
        held[2] += count * elements * kind.parameters
    return Weights(dense[0], experts[0], dense[1], experts[1], dense[2], experts[2])


def _vocabulary(kinds: _Counted, cutting: PartitionContext) -> tuple[int, int]:
    """Rows of the vocabulary, and rows of all ranks together."""
    for kind, _ in kinds:
        if kind.rule.verb == "vocab":
            return kind.shape[0], _local(kind, cutting, cutting.mesh.coords(0)).shape[0] * cutting.mesh.tp
    return 0, 0


def _misfits(kinds: _Counted, cutting: PartitionContext, *, blocks: bool) -> list[Misfit]:
    """Weights that cannot be cut, each kind once."""
    out: dict[tuple[str, str], Misfit] = {}
    for kind, _ in kinds:
        if why := _misfit(kind, cutting, blocks=blocks):
            out.setdefault((kind.template, why), Misfit(kind.name, kind.shape, why, kind.rule.expert))
    return list(out.values())


def _misfit(kind: _ResidentKind, cutting: PartitionContext, *, blocks: bool) -> str:
    """Why a weight cannot be cut; "" if it can.

    The rule for blocks is that of vLLM's ``validate_fp8_block_shape`` and ``validate_fp8_block_shape_moe``: what is cut
    on an axis, and what is joined with others on the output axis, is a multiple of the block there. Of parts that are
    joined without being cut the last may end inside a block.
    """
    try:
        share = _local(kind, cutting, cutting.mesh.coords(0))
    except IndivisibleError as e:
        return e.why
    if not blocks or kind.coding is None or not kind.coding.sides[0]:
        return ""
    (rows, columns), (all_rows, all_columns), (n, k) = kind.coding.sides, kind.shape[-2:], share.shape[-2:]
    cut = n != all_rows
    joined = kind.merged == "inner" or kind.rule.verb == "fused" or (bool(kind.merged) and kind.rule.expert)
    parts = [n]
    if kind.rule.verb == "fused":
        parts = [inner.stop[-2] - inner.start[-2] for inner, _ in share.boxes][: None if cut else -1]
    if (cut or joined) and (odd := next((m for m in parts if m % rows), 0)):
        has = f"a rank has {odd:,} of its {all_rows:,} rows" if cut else f"it is joined to others with {odd:,} rows"
        return f"{has}, not a multiple of {rows}"
    if k != all_columns and k % columns:
        return f"a rank has {k:,} of its {all_columns:,} columns, not a multiple of {columns}"
    return ""


def _works(kinds: _Counted, cutting: PartitionContext, *, blocks: bool, follows: bool) -> Iterable[int]:
    """Tensor-parallel sizes with which everything can be cut."""
    for n in SIZES:
        mesh = replace(cutting.mesh, tp=n, etp=n if follows else cutting.mesh.etp)
        tried = replace(cutting, mesh=mesh)
        if not any(_misfit(kind, tried, blocks=blocks) for kind, _ in kinds):
            yield n
