"""Layout rules: the verbs of tensor parallelism and the one function that gives them meaning.

===============  =========================================================================================
verb             what a rank holds
===============  =========================================================================================
replicate        all of it
column [UNITS]   an equal share of the output axis, cut between UNITS (heads) so that no unit is torn
row [UNITS]      an equal share of the input axis; a bias is replicated
vocab            an equal share of the output axis, padded up to a multiple of the ranks
fused A:U B:V    an equal share of each part of the output axis, one after the other: [A_r; B_r]
                 A:LENGTH/UNITS is as long as LENGTH and cut between UNITS; A:LENGTH/whole is held whole
... groups=N     the axis goes group by group, and each group has all the parts: [A_0; B_0; A_1; B_1; ...]. Up to N
                 ranks hold whole groups; above, several ranks share a group: A is cut, B is copied if it is shared
grouped VERB     experts stacked on axis 0, shared out by expert, each cut by VERB over expert-TP
... rows         the same, where the rows of all experts lie one after the other on axis 0
===============  =========================================================================================

UNITS names a size of the family (``heads``, ``kv_heads``). A size that is marked ``shared`` may be copied: with more
ranks than key/value heads, several ranks hold the same head. The output axis is the last but one for weights stored
[out, in] (torch) and the last for [in, out] (Paddle, GPT-2's Conv1D); a bias has only an output axis.
``axis=N`` names it outright. ``once`` behind a rule: what is not cut is held by the first rank, and zeros by the
others, because what they compute with it is summed (some engines' bias of row-parallel layers).

``local_boxes`` is used both ways: ``assemble`` asks where a stored tensor belongs, ``partition`` what to store.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import gcd, lcm
from typing import NamedTuple

from ckpttool.core.geometry import Box, whole
from ckpttool.core.mesh import Coords, Mesh, share
from ckpttool.errors import LayoutError

VERBS = ("replicate", "column", "row", "vocab", "fused")


class CutSize(NamedTuple):
    """A number of the model that a cut must respect."""

    value: int
    shared: bool = False
    """More ranks than this: several hold the same one (key/value heads)."""


Sizes = Mapping[str, CutSize]


EXPERTS = "experts"
"""The size that counts them."""
WHOLE = "whole"
"""In place of a part's units: every rank holds all of it."""


def in_layer(size: str, layer: int) -> str:
    """The name of a size in one layer, for a size that differs by layer."""
    return f"{size}[{layer}]"


def size_name(units: str) -> str:
    """The name in the family file of what ``in_layer`` may have made of it."""
    return units.partition("[")[0]


def varying(sizes: Sizes) -> frozenset[str]:
    """The sizes that differ from layer to layer."""
    return frozenset(size_name(s) for s in sizes if s != size_name(s))


class PartSpec(NamedTuple):
    """One part of a fused output axis."""

    name: str
    length: str = ""
    """Size that gives its weight among the parts; "" is weight 1."""
    units: str = ""
    """Size that gives its granularity, "" is none; or ``WHOLE``."""

    @property
    def text(self) -> str:
        """The rule's text, as ``parse_rule`` reads it."""
        if not self.length and not self.units:
            return self.name
        apart = "" if self.units == self.length else f"/{self.units}"
        return f"{self.name}:{self.length or 1}{apart}"


@dataclass(frozen=True, slots=True)
class Rule:
    """A parsed rule; ``text`` and ``origin`` are for messages."""

    verb: str
    units: str = ""
    parts: tuple[PartSpec, ...] = ()
    groups: str = ""
    """Size that counts the groups in which the parts lie; "" is part after part."""
    grouped: bool = False
    rows: str = ""
    """Size that counts the experts whose rows lie one after the other on axis 0; "": the experts have an axis."""
    axis: int | None = None
    in_out: bool = False
    """Stored [in, out]."""
    expert: bool = False
    """Belongs to one expert: cut over expert-TP, not TP."""
    once: bool = False
    """Held by the first rank; zeros on the others, because what they compute is summed."""
    text: str = ""
    origin: str = ""

    @property
    def place(self) -> str:
        """The rule's place, for an error's ``where``."""
        return f"{self.origin}: `{self.text}`" if self.origin else f"rule `{self.text}`"


def parse_rule(text: str, *, origin: str = "", in_out: bool = False, expert: bool = False) -> Rule:
    """Read one rule. Raises LayoutError naming the word that is wrong."""
    words = str(text).split()
    grouped = bool(words) and words[0] == "grouped"
    words = words[1:] if grouped else words
    axis = None
    once = False
    groups = ""
    rows = EXPERTS if "rows" in words else ""
    rest = []
    for w in words:
        if w.startswith("axis="):
            try:
                axis = int(w[5:])
            except ValueError:
                raise LayoutError(f"`{w}` is not an axis", where=origin) from None
        elif w.startswith("groups="):
            groups = w[7:]
            if not groups.strip("0"):
                raise LayoutError(f"`{w}` is not a number of groups", where=origin, hint="groups=kv_heads")
        elif w in ("in_out", "out_in"):
            in_out = w == "in_out"
        elif w == "rows":
            if not grouped or any(o.startswith("axis=") for o in words):
                raise LayoutError(f"`{text}`: `rows` is for grouped experts, and says their axis", where=origin)
        elif w == "once":
            once = True
        else:
            rest.append(w)
    verb, args = (rest[0], rest[1:]) if rest else ("", [])
    if verb not in VERBS:
        raise LayoutError(f"`{text}` is not a layout rule", where=origin, hint=f"the verbs are {', '.join(VERBS)}")
    if (verb in ("replicate", "vocab") and args) or (verb in ("column", "row") and len(args) > 1):
        raise LayoutError(f"`{text}`: too many words after {verb}", where=origin)
    if rows and verb == "vocab":
        raise LayoutError(f"`{text}`: experts have no vocabulary", where=origin)
    if verb == "fused":
        if len(args) < 2:
            raise LayoutError(f"`{text}`: fused needs at least two parts", where=origin, hint="fused gate up")
        parts = tuple(_part(a, str(text), origin) for a in args)
        if groups and any(p.units == WHOLE for p in parts):
            raise LayoutError(f"`{text}`: a part of groups cannot be held whole", where=origin)
        return Rule(verb, "", parts, groups, grouped, rows, axis, in_out, expert or grouped, once, str(text), origin)
    if groups:
        raise LayoutError(f"`{text}`: only the parts of a fused tensor lie in groups", where=origin)
    units = args[0] if args else ""
    return Rule(verb, units, (), "", grouped, rows, axis, in_out, expert or grouped, once, str(text), origin)


def _part(word: str, text: str, origin: str) -> PartSpec:
    """``name``, ``name:LENGTH``, ``name:LENGTH/UNITS`` or ``name:LENGTH/whole``. Raises LayoutError."""
    name, colon, sizes = word.partition(":")
    length, slash, units = sizes.partition("/")
    missing = not name or (colon and not length) or (slash and not units)
    zero = any(n and not n.strip("0") for n in (length, units))
    if missing or zero or "/" in name + units or ":" in sizes or length == WHOLE:
        raise LayoutError(
            f"`{text}`: `{word}` is not a part of a fused tensor",
            where=origin,
            hint="a part is NAME, NAME:LENGTH, NAME:LENGTH/UNITS or NAME:LENGTH/whole",
        )
    return PartSpec(name, length, units or length)


class Segment(NamedTuple):
    """``length`` elements at ``local`` of the stored axis are those at ``logical`` of the whole axis."""

    local: int
    logical: int
    length: int


class AxisShare(NamedTuple):
    """One rank's share of one axis."""

    size: int
    """Length of the stored axis, padding included."""
    segments: tuple[Segment, ...]


class RankShare(NamedTuple):
    """One rank's share of one tensor."""

    shape: tuple[int, ...]
    """Shape of the stored tensor, padding included."""
    boxes: tuple[tuple[Box, Box], ...]
    """(box in the stored tensor, box in the logical tensor)."""


@dataclass(frozen=True, slots=True)
class PartitionContext:
    """Everything besides a rule and a shape that decides a cut."""

    mesh: Mesh
    sizes: Sizes
    vocab_multiple: int = 1
    """The padded vocabulary is a multiple of this and of the ranks."""
    vocab_rows: int = 0
    """Rows of the padded vocabulary when they are known from the files; 0 computes them."""
    optional: frozenset[str] = frozenset()
    """Sizes that only guard against torn units; a source whose config lacks them is still read."""
    pad_vocab: bool = True
    """False refuses a vocabulary that does not divide instead of padding it."""
    ragged_experts: bool = True
    """Experts that do not divide go to the first ranks; False refuses them (engines that assume equal shares)."""


def cut_axis(rule: Rule, ndim: int, *, bias: bool) -> int | None:
    """The axis that the rule cuts, or None when the tensor is held whole (row bias, replicate, scalars).

    Raises LayoutError for a rule that names an axis which the tensor does not have.
    """
    if rule.rows and ndim:  # as if the experts had an axis of their own
        cut = cut_axis(replace(rule, rows=""), ndim + 1, bias=bias)
        return cut and cut - 1
    first = 1 if rule.grouped else 0
    if rule.verb == "replicate" or ndim <= first:
        return None
    if rule.axis is not None:
        if not -ndim <= rule.axis < ndim:
            raise LayoutError(f"the rule cuts axis {rule.axis} of a tensor with {ndim} axes", where=rule.place)
        return rule.axis % ndim
    if ndim - first == 1 or bias:
        return None if rule.verb == "row" else ndim - 1
    output = rule.verb != "row"
    return ndim - 1 if output == rule.in_out else ndim - 2


class UnknownSizeError(LayoutError):
    """A size of the model (heads, layers) is needed, and config.json does not give it."""

    def __init__(self, size: str, where: str | Iterable[str] = (), *, of: str = "") -> None:
        self.size = f"the size `{size}`{of}"
        super().__init__(f"config.json does not give {self.size}", where=where, hint="add it to config.json")


def unit_count(units: str, sizes: Sizes, rule: Rule) -> CutSize | None:
    """The size behind a units word. Raises LayoutError when the model's config does not give it."""
    if not units:
        return None
    if units.isdigit():
        return CutSize(int(units))
    if units not in sizes:
        if units in varying(sizes):
            raise LayoutError(
                f"the size `{units}` differs from layer to layer, and this tensor is of none", where=rule.place
            )
        layer = f" of layer {units[len(size_name(units)) + 1 : -1]}" if units != size_name(units) else ""
        raise UnknownSizeError(size_name(units), rule.place, of=layer)
    return sizes[units]


def size_words(rule: Rule) -> list[str]:
    """The sizes that a rule names."""
    units = [w for part in rule.parts for w in (part.length, part.units) if w != WHOLE]
    return [w for w in (rule.units, *units, rule.groups, rule.rows) if w and not w.isdigit()]


def rule_in_layer(rule: Rule, layer: int, varies: Collection[str]) -> Rule:
    """The rule with the sizes of one layer; ``varies`` are those that differ from layer to layer."""

    def word(size: str) -> str:
        return in_layer(size, layer) if size in varies else size

    parts = tuple(PartSpec(p.name, word(p.length), word(p.units)) for p in rule.parts)
    return replace(rule, units=word(rule.units), parts=parts, groups=word(rule.groups), rows=word(rule.rows))


def _guard(rule: Rule, cutting: PartitionContext) -> CutSize | None:
    """The size that a plain cut must respect, or None when nothing is known that it could tear."""
    return _granularity(rule.units, rule, cutting)


def _granularity(units: str, rule: Rule, cutting: PartitionContext) -> CutSize | None:
    """The size that cuts fall between, or None when nothing is known that they could tear."""
    if size_name(units) in cutting.optional and units not in cutting.sizes:
        return None
    return unit_count(units, cutting.sizes, rule)


def _even(n: int, units: CutSize | None, ways: int, index: int, word: str) -> AxisShare:
    """Equal shares of an axis of what ``word`` names. Raises IndivisibleError with the divisors that would work."""
    count = units.value if units else n
    if n % max(count, 1):
        raise IndivisibleError(f"an axis of {n} does not divide into {count} {word}", ())
    if units and units.shared and ways > count:
        if ways % count:
            raise IndivisibleError(f"{ways} ranks cannot share {count} {word} evenly", _divisors(count, shared=True))
        unit = n // count
        return AxisShare(unit, (Segment(0, index * count // ways * unit, unit),))
    if count % ways:
        raise IndivisibleError(
            f"{count} {word} cannot be split evenly across {ways} ranks",
            _divisors(count, shared=bool(units and units.shared)),
        )
    each = n // ways
    return AxisShare(each, (Segment(0, index * each, each),))


class IndivisibleError(Exception):
    """A share that does not come out even; becomes a LayoutError once the tensor's name is known."""

    def __init__(self, why: str, works: tuple[int, ...], inside: int = 0) -> None:
        """``inside``: the cut falls inside a scale block, and blocks of so many elements would end there."""
        super().__init__(why)
        self.why = why
        self.works = works
        self.inside = inside


def _divisors(n: int, *, shared: bool = False) -> tuple[int, ...]:
    found = [d for d in range(1, min(n, 256) + 1) if n % d == 0]
    if shared:
        found += [n * k for k in (2, 4, 8) if n * k <= 256]
    return tuple(found)


def _weights(rule: Rule, sizes: Sizes) -> list[int]:
    """Sizes of the parts of a fused axis, in a common unit."""
    found = [unit_count(part.length, sizes, rule) for part in rule.parts]
    return [size.value if size else 1 for size in found]


def part_lengths(rule: Rule, n: int, sizes: Sizes) -> list[int]:
    """Lengths of the parts of a fused axis of ``n`` elements."""
    weights = _weights(rule, sizes)
    unit, rest = divmod(n, sum(weights))
    if rest:
        raise IndivisibleError(f"{n} does not divide into parts {':'.join(map(str, weights))}", ())
    return [w * unit for w in weights]


def _part_share(part: PartSpec, rule: Rule, n: int, ways: int, index: int, cutting: PartitionContext) -> AxisShare:
    """One rank's share of a part of ``n`` elements."""
    if part.units == WHOLE:
        return whole_axis(n)
    units = _granularity(part.units, rule, cutting)
    return _even(n, units, ways, index, size_name(part.units) or f"elements of {part.name}")


def _group_share(rule: Rule, n: int, ways: int, index: int, cutting: PartitionContext) -> AxisShare:
    """One rank's share of a fused axis that goes group by group."""
    groups, lengths = _groups(rule, cutting), part_lengths(rule, n, cutting.sizes)
    word = size_name(rule.groups)
    for part, length in zip(rule.parts, lengths, strict=True):
        if length % groups:
            raise IndivisibleError(f"{length} elements of {part.name} do not divide into {groups} {word}", ())
    if ways <= groups:
        return _even(n, CutSize(groups), ways, index, "groups of heads" if word.isdigit() else word)
    sharing = _sharing(ways, groups, word)
    segments, local, logical = [], 0, index // sharing * (n // groups)
    for part, length in zip(rule.parts, lengths, strict=True):
        units = _of_group(part, rule, groups, cutting)
        got = _even(length // groups, units, sharing, index % sharing, f"{size_name(part.units)} of a group")
        segments += [Segment(local + s.local, logical + s.logical, s.length) for s in got.segments]
        local += got.size
        logical += length // groups
    return AxisShare(local, tuple(segments))


def _groups(rule: Rule, cutting: PartitionContext) -> int:
    found = unit_count(rule.groups, cutting.sizes, rule)
    return found.value if found else 1


def _sharing(ways: int, groups: int, word: str) -> int:
    """How many ranks share a group."""
    if ways % groups:
        raise IndivisibleError(f"{ways} ranks cannot share {groups} {word} evenly", _divisors(groups, shared=True))
    return ways // groups


def _of_group(part: PartSpec, rule: Rule, groups: int, cutting: PartitionContext) -> CutSize | None:
    """The units of a part in one group."""
    units = _granularity(part.units, rule, cutting)
    if units and units.value % groups:
        raise IndivisibleError(f"{units.value} {part.units} do not divide into {groups} {rule.groups}", ())
    return units and CutSize(units.value // groups, units.shared)


def axis_share(rule: Rule, n: int, ways: int, index: int, cutting: PartitionContext) -> AxisShare:
    """The share of rank ``index`` of ``ways`` of an axis of ``n`` elements. Raises IndivisibleError."""
    if rule.verb == "vocab":
        if not cutting.pad_vocab and n % ways:
            raise IndivisibleError(f"{n} rows are not a multiple of {ways}, and this format does not pad", _divisors(n))
        multiple = lcm(cutting.vocab_multiple, ways)
        each = (cutting.vocab_rows or -(-n // multiple) * multiple) // ways
        start = min(index * each, n)
        length = min(start + each, n) - start
        return AxisShare(each, (Segment(0, start, length),) if length else ())
    if rule.groups:
        return _group_share(rule, n, ways, index, cutting)
    if rule.verb == "fused":
        segments, local, logical = [], 0, 0
        lengths = part_lengths(rule, n, cutting.sizes)
        for part, length in zip(rule.parts, lengths, strict=True):
            got = _part_share(part, rule, length, ways, index, cutting)
            segments += [Segment(local + s.local, logical + s.logical, s.length) for s in got.segments]
            local += got.size
            logical += length
        return AxisShare(local, tuple(segments))
    word = "groups of heads" if rule.units.isdigit() else size_name(rule.units) or "elements"
    return _even(n, _guard(rule, cutting), ways, index, word)


def whole_axis(n: int) -> AxisShare:
    """All of an axis."""
    return AxisShare(n, (Segment(0, 0, n),))


def blocked(got: AxisShare, n: int, block: int) -> AxisShare:
    """The share of a scale axis, given the share of the weight's axis of ``n`` elements in blocks of ``block``.

    A block of 0 is all of the axis. Raises IndivisibleError when a cut does not fall between two blocks: one scale
    would belong to two ranks.
    """
    if not block:
        return whole_axis(1)
    segments = []
    for local, logical, length in got.segments:
        at_end = logical + length == n
        if logical % block or local % block or (length % block and not at_end):
            raise IndivisibleError(
                f"the cut at {logical if logical % block else logical + length} of {n} falls inside a scale block"
                f" of {block}",
                (),
                gcd(block, logical, local, 0 if at_end else length),
            )
        segments.append(Segment(local // block, logical // block, -(-length // block)))
    return AxisShare(-(-got.size // block), tuple(segments))


def _shares(
    rule: Rule, shape: tuple[int, ...], cutting: PartitionContext, at: Coords, *, bias: bool
) -> list[AxisShare]:
    """The share of each axis that the rank at ``at`` stores. Raises IndivisibleError."""
    mesh = cutting.mesh
    if rule.rows and shape:
        stacked = _with_experts(rule, shape, cutting)
        experts, inner, *others = _shares(replace(rule, rows=""), stacked, cutting, at, bias=bias)
        return [_one_after_the_other(experts, inner, stacked[1]), *others]
    ways, index = (mesh.etp, at.etp) if rule.expert else (mesh.tp, at.tp)
    cut = cut_axis(rule, len(shape), bias=bias)
    shares = []
    for axis, n in enumerate(shape):
        if axis == cut:
            got = axis_share(rule, n, ways, index, cutting)
        elif axis == 0 and rule.grouped:
            if n % mesh.ep and not cutting.ragged_experts:
                raise IndivisibleError(f"{n} experts cannot be shared evenly by {mesh.ep} ranks", _divisors(n))
            start, stop = share(n, mesh.ep, at.ep)
            got = AxisShare(stop - start, (Segment(0, start, stop - start),))
        else:
            got = whole_axis(n)
        shares.append(got)
    return shares


def _with_experts(rule: Rule, shape: tuple[int, ...], cutting: PartitionContext, ranks: int = 1) -> tuple[int, ...]:
    """The shape of what one of ``ranks`` holds of all experts, whose rows lie on axis 0, with an axis of experts.

    The shares must be equal, because nothing but the number of its rows says how many experts a rank has.
    """
    found = unit_count(rule.rows, cutting.sizes, rule)
    experts, ep = found.value if found else 1, cutting.mesh.ep
    if experts % ep:
        raise IndivisibleError(f"{experts} experts cannot be shared evenly by {ep} ranks", _divisors(experts))
    held = experts // ranks
    if shape[0] % held:
        raise IndivisibleError(f"{shape[0]} rows do not divide into those of {held} experts", ())
    return (held, shape[0] // held, *shape[1:])


def _one_after_the_other(experts: AxisShare, inner: AxisShare, rows: int) -> AxisShare:
    """The shares of two axes as that of one, on which every expert has ``rows``."""
    (held,) = experts.segments
    if inner == whole_axis(rows):
        return AxisShare(held.length * rows, (Segment(0, held.logical * rows, held.length * rows),))
    return AxisShare(
        experts.size * inner.size,
        tuple(
            Segment(e * inner.size + s.local, (held.logical + e) * rows + s.logical, s.length)
            for e in range(held.length)
            for s in inner.segments
        ),
    )


def local_boxes(
    rule: Rule,
    shape: tuple[int, ...],
    cutting: PartitionContext,
    at: Coords,
    *,
    bias: bool = False,
    blocks: tuple[int, ...] = (),
) -> RankShare:
    """The share and the boxes of a logical tensor of ``shape`` that the rank at ``at`` stores.

    With ``blocks`` the tensor is a weight's scale grid: ``shape`` is the weight's, blocks[i] its elements per scale
    along axis i (0: the whole axis has one), and the result is in scales. Raises IndivisibleError; which pipeline
    stage and which single expert a rank holds is not decided here.
    """
    shares = _shares(rule, shape, cutting, at, bias=bias)
    if blocks:
        shares = [blocked(got, n, block) for got, n, block in zip(shares, shape, blocks, strict=True)]
    if rule.once and (at.etp if rule.expert else at.tp) and cut_axis(rule, len(shape), bias=bias) is None:
        return RankShare(tuple(s.size for s in shares), ())
    if all(len(s.segments) == 1 and s.size == s.segments[0].length for s in shares):
        # By far the most common: one box, no padding.
        segs = [s.segments[0] for s in shares]
        size = tuple([s.length for s in segs])
        return RankShare(
            size,
            ((whole(size), Box(tuple([s.logical for s in segs]), tuple([s.logical + s.length for s in segs]))),),
        )
    boxes = []
    for combo in product(*(s.segments for s in shares)):
        boxes.append(
            (
                Box(tuple(s.local for s in combo), tuple(s.local + s.length for s in combo)),
                Box(tuple(s.logical for s in combo), tuple(s.logical + s.length for s in combo)),
            )
        )
    return RankShare(tuple(s.size for s in shares), tuple(boxes))


def global_axis(rule: Rule, local: int, ways: int, cutting: PartitionContext) -> int:
    """Length of the whole cut axis from one rank's share (files that do not record it). Raises IndivisibleError."""
    sizes = cutting.sizes
    if rule.verb == "vocab":
        vocab = sizes.get("vocab")
        padded = local * ways
        return vocab.value if cutting.pad_vocab and vocab and vocab.value <= padded else padded
    if rule.verb == "fused":
        groups = _groups(rule, cutting) if rule.groups else 1
        if rule.groups and groups >= ways:
            return local * ways
        sharing = _sharing(ways, groups, size_name(rule.groups))
        weights = _weights(rule, sizes)
        pieces = [1 if p.units == WHOLE else _pieces(_of_group(p, rule, groups, cutting), sharing) for p in rule.parts]
        # local = unit * (the sum of every part's weight / pieces) / groups, an integer; multiplied to stay in integers
        common = lcm(*pieces)
        held = sum(w * common // p for w, p in zip(weights, pieces, strict=True))
        unit, rest = divmod(local * common * groups, held)
        if rest:
            raise IndivisibleError(f"{local} does not divide into the parts of {ways} ranks", ())
        return unit * sum(weights)
    return local * _pieces(_guard(rule, cutting), ways)


def _pieces(units: CutSize | None, ways: int) -> int:
    """How many different shares of an axis the ranks hold: fewer than there are ranks where units are copied."""
    return units.value if units and units.shared and ways > units.value else ways


def global_shape(
    rule: Rule, shape: tuple[int, ...], experts: int, cutting: PartitionContext, *, bias: bool = False
) -> tuple[int, ...]:
    """Shape of the logical tensor from one rank's stored shape; ``experts`` is the stacked total (0: unknown)."""
    mesh = cutting.mesh
    if rule.rows and shape:
        held = _with_experts(rule, shape, cutting, mesh.ep)
        total = held[0] * mesh.ep
        _, inner, *others = global_shape(replace(rule, rows=""), held, total, cutting, bias=bias)
        return (total * inner, *others)
    cut = cut_axis(rule, len(shape), bias=bias)
    out = list(shape)
    if cut is not None:
        out[cut] = global_axis(rule, shape[cut], mesh.etp if rule.expert else mesh.tp, cutting)
    if rule.grouped and shape:
        out[0] = experts or shape[0] * mesh.ep
    return tuple(out)


def fused_rule(parts: list[tuple[str, Rule]], lengths: Sequence[str] = (), groups: str = "") -> Rule:
    """The rule of a tensor made by joining tensors with these rules on their output axis, in so many ``groups``.

    ``lengths`` are the sizes that the parts are multiples of, "" for parts of the length 1; without them a part's units
    are its length. Raises LayoutError when the parts are not all cut on the output axis, or held whole.
    """
    verbs = {r.verb for _, r in parts}
    rows = {r.rows for _, r in parts}
    if rows != {""}:
        if rows != {groups}:
            raise LayoutError(
                "rows of experts are joined expert by expert", where=parts[0][1].place, hint="groups: experts"
            )
        groups = ""
    first = next((r for _, r in parts if r.verb == "column"), parts[0][1])
    if verbs == {"replicate"}:
        return first
    if not verbs <= {"column", "replicate"} or ("replicate" in verbs and (groups or not lengths)):
        raise LayoutError(
            f"{', '.join(n for n, _ in parts)} cannot be fused: their rules are {', '.join(sorted(verbs))}",
            where=first.place,
        )
    specs = []
    for (name, rule), length in zip(parts, lengths or [r.units for _, r in parts], strict=True):
        units = rule.units if rule.verb == "column" else WHOLE
        specs.append(PartSpec(name, length if length or not units else "1", units))
    text = " ".join(["fused", *(p.text for p in specs), *([f"groups={groups}"] if groups else [])])
    return replace(first, verb="fused", units="", parts=tuple(specs), groups=groups, text=text)


def part_rule(rule: Rule, index: int) -> Rule:
    """The rule of one part of a fused tensor, stored on its own. Raises LayoutError where there is no such part."""
    if rule.verb == "replicate":
        return rule
    if rule.verb != "fused":
        raise LayoutError("only a fused tensor can be taken apart", where=rule.place)
    if index >= len(rule.parts):
        raise LayoutError(f"a fusion takes {index + 1} parts out of a tensor of {len(rule.parts)}", where=rule.place)
    units = rule.parts[index].units
    verb, units = ("replicate", "") if units == WHOLE else ("column", units)
    return replace(rule, verb=verb, units=units, parts=(), groups="", text=f"{verb} {units}".strip())
