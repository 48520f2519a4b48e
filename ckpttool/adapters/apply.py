"""Resolve an adapter with the names and shapes of a base: the terms that are added to each base tensor.

Everything is worked out for layers that are stored as [out, in], as torch has them: ``up`` is [out, rank], ``down`` is
[rank, in]. Where the base stores a layer as [in, out], both are transposed and change places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, count, permutations
from math import prod
from typing import NamedTuple, NoReturn

from ckpttool.adapters.base import (
    ANOTHER_MODEL,
    Adapter,
    CandidateParameter,
    Change,
    Changes,
    Factors,
    LowRankTerm,
    Pair,
    transposed,
)
from ckpttool.adapters.forms import in_files
from ckpttool.core.catalog import LogicalTensor, whole_tensor
from ckpttool.core.patterns import nearest_hint
from ckpttool.errors import ConflictError, UnsupportedError
from ckpttool.formats.base import ModelForm
from ckpttool.planning.relate import DerivedTensor, deinterleave, take

InOut = Callable[[str], bool | None]
"""Whether the base stores the weight of that name, of a linear layer, as [in, out]; None where no rule says it, which
is [out, in] for a layer and open for experts in one tensor."""

FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "up_gate_proj": ("gate_proj", "up_proj"),
    "gate_up_fused_proj": ("gate_proj", "up_proj"),
    "to_qkv": ("to_q", "to_k", "to_v"),
    "add_qkv_proj": ("add_q_proj", "add_k_proj", "add_v_proj"),
    "linear1": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
}
"""Layers that are one in some models and several in others; the parts follow each other along the output."""

_TABLES = ("embed_tokens.weight", "word_embeddings.weight", "wte.weight", "wpe.weight", "lm_head.weight")
"""Ends of the names of matrices with a row per token, which nobody stores transposed."""

_SHOWN = 5


class Spot(NamedTuple):
    """A place in the base for outputs of a trained layer."""

    name: str
    size: int
    """Outputs that lie there."""
    offset: int = 0
    """First of them among the outputs of the base's tensor."""


class StackedWeight(NamedTuple):
    """A stacked weight in the base."""

    name: str
    size: tuple[int, int]
    """The last two axes; [out, in] where the base has a tensor for each expert."""
    stacked: bool
    """Whether the base has one tensor for all experts."""

    def expert(self, e: int) -> str:
        """The weight of one expert, where it is a tensor of its own."""
        module, _, layer = self.name.rpartition(".")
        return f"{module}.{e}.{layer}.weight"


def adapt(
    adapter: Adapter,
    base: Mapping[str, tuple[int, ...]],
    *,
    in_out: InOut | None = None,
    kv_heads: int = 0,
    as_trained: bool = False,
    forms: Sequence[ModelForm] = (),
) -> Changes:
    """The changes of an adapter to a base of these names and shapes.

    ``in_out`` says how the base stores the weights of linear layers; None: as the library that wrote the adapter does
    (Paddle [in, out]; PEFT [out, in], and [in, out] for the layers for which it has fan_in_fan_out). ``kv_heads`` is
    the base's number of key and value heads; Paddle orders a fused qkv_proj by them. ``as_trained``: the base holds
    whole tensors in the orientation in which they were trained. ``forms`` are those that the base has in memory, whose
    names count where those of its files do not tell every place.

    Raises ConflictError for a tensor of the adapter that has no place in the base, with the nearest name, and for
    shapes that do not fit; UnsupportedError for what names and shapes leave open.
    """
    match = _Match(adapter, base, in_out, kv_heads, as_trained=as_trained)
    for form in forms if match.lost() else ():
        held = _Match(adapter, form.shapes, _in_memory(in_out, form), kv_heads, as_trained=as_trained)
        if not held.lost():
            found = in_files(held.run(), form, adapter.path)
            return found._replace(table={n: found.table[n] for n in base if n in found.table})
    return match.run()


def _in_memory(in_out: InOut | None, form: ModelForm) -> InOut | None:
    """The orientation of tensors in memory, which is that of their shares."""
    return None if in_out is None else lambda name: in_out(form.shares[name][0].name)


def combine(changes: Iterable[tuple[Changes, float]]) -> Changes:
    """Several adapters on one base, each with a weight: all terms are added.

    Raises ConflictError when a tensor would be replaced twice, or by a share other than 1.
    """
    table: dict[str, Change] = {}
    notes: list[str] = []
    for one, weight in changes:
        notes += one.notes
        for name, change in one.table.items():
            before = table.get(name, Change())
            if change.whole is not None and (weight != 1 or before.whole is not None):
                raise ConflictError(
                    f"an adapter replaces `{name}` as a whole, which "
                    + ("another one replaces too" if weight == 1 else f"cannot be done with weight {weight:g}"),
                    where=change.whole.name,
                )
            terms = [t._replace(factor=t.factor * weight) for t in change.terms]
            table[name] = Change(
                (*before.terms, *terms), before.whole or change.whole, before.in_place or change.in_place
            )
    return Changes(table, tuple(dict.fromkeys(notes)))


class _Match:
    """One adapter and one base."""

    def __init__(
        self,
        adapter: Adapter,
        base: Mapping[str, tuple[int, ...]],
        in_out: InOut | None,
        kv_heads: int,
        *,
        as_trained: bool,
    ) -> None:
        self.adapter = adapter
        self.base = base
        self.said = in_out
        """``in_out``, as ``adapt`` got it."""
        self.as_trained = as_trained
        self.in_out: Callable[[str], bool] = lambda n: adapter.in_out if in_out is None else bool(in_out(n))
        self.kv_heads = kv_heads
        self.table: dict[str, Change] = {}
        self.notes = list(adapter.notes)
        self._moved = ("", "")
        """Beginnings of names in the adapter and in the base."""
        self._choices = {c.name for p in adapter.pairs if p.kind == "stacked" for c in _choices(p)}
        self._trained: dict[str, int] = {}
        """Outputs of each trained linear layer, by its weight's name as the base has it."""
        self._square: list[str] = []
        self._against: list[str] = []
        """Layers that show that the config's fan_in_fan_out does not hold for all of them."""

    def run(self) -> Changes:
        self._align()
        linear = [(self._rename(p.target), p) for p in self.adapter.pairs if p.kind == "linear"]
        self._trained = {target: self.adapter.factors(p).up.shape[0] for target, p in linear}
        for tensor, name in self.adapter.whole.items():
            self._whole(self._rename(tensor), self.adapter.view(name), in_place=tensor in self.adapter.in_place)
        for target, pair in linear:
            if self._is_convolution(pair):
                self._convolution(target, pair)
            else:
                self._linear(target, self.adapter.factors(pair))
        stacks: dict[str, list[Pair]] = {}
        for pair in self.adapter.pairs:
            if pair.kind == "embedding":
                self._embedding(self._rename(pair.target), pair)
            elif pair.kind == "stacked":
                stacks.setdefault(self._rename(pair.target), []).append(pair)
        for target, pairs in stacks.items():
            self._stack(target, pairs)
        if self._against and self._square:
            raise UnsupportedError(
                f"it is open whether `{self._square[0]}` is stored as [in, out]: the config's fan_in_fan_out does not"
                f" hold for `{self._against[0]}`",
                where=self.adapter.path,
                hint="PEFT records this flag for the last layer only: merge this adapter with PEFT",
            )
        return Changes({n: self.table[n] for n in self.base if n in self.table}, tuple(self.notes))

    # -- names

    def _rename(self, name: str) -> str:
        old, new = self._moved
        return new + name.removeprefix(old) if name.startswith(old) and not self._known(name) else name

    def _known(self, name: str) -> bool:
        """Whether the base has a place for a trained tensor of that name."""
        if self._spots(name, 0):
            return True
        return any(self._holder(name, c) is not None for c in self._choices)

    def _wanted(self) -> dict[str, None]:
        """The names of all that the adapter changes."""
        return dict.fromkeys([*(p.target for p in self.adapter.pairs), *self.adapter.whole])

    def lost(self) -> list[str]:
        """Names of tensors without a place in the base."""
        return [name for name in self._wanted() if not self._known(name)]

    def _align(self) -> None:
        """Find the beginning that names have in the base where they have another one in the adapter.

        Raises ConflictError listing the tensors that have no place in the base.
        """
        wanted, lost = self._wanted(), self.lost()
        if not lost:
            return
        found: dict[tuple[str, ...], tuple[str, str]] = {}
        starts = sorted({start for name in self.base for start in _starts(name)}, key=len)
        for old in [s for s in _starts(lost[0]) if "." in lost[0].removeprefix(s)]:  # what is renamed keeps its module
            for new in starts:
                moved = [new + n.removeprefix(old) for n in lost if n.startswith(old)]
                if len(moved) == len(lost) and all(map(self._known, moved)):
                    found.setdefault(tuple(moved), (old, new))
        if len(found) != 1:
            shown = [f"`{n}`: {nearest_hint(n, self.base)}" for n in lost[:_SHOWN]]
            if len(lost) > _SHOWN:
                shown.append(f"and {len(lost) - _SHOWN} more")
            raise ConflictError(
                f"{len(lost)} of the {len(wanted)} tensors that the adapter changes "
                + ("have more than one place in the base" if found else "are not in the base"),
                where=[self.adapter.path, *shown],
                hint=f"{ANOTHER_MODEL} (One whose lm_head is tied has none.)",
            )
        (self._moved,) = found.values()
        old, new = self._moved
        self.notes.append(f"names that begin with `{old}` in the adapter begin with `{new}` in the base")

    def _spots(self, target: str, out: int) -> list[Spot]:
        """The places of a trained weight's outputs; [] when the base has no place for it."""
        if target in self.base:
            return [Spot(target, out)]
        stem, _, layer = target.removesuffix(".weight").rpartition(".")
        if not target.endswith(".weight"):
            return []
        parts = [f"{stem}.{p}.weight" for p in FUSED.get(layer, ())]
        if parts and all(p in self.base for p in parts):
            return [Spot(p, self._rows(p)) for p in parts]
        for fused, names in FUSED.items():
            whole = f"{stem}.{fused}.weight"
            if layer in names and whole in self.base:
                return [Spot(whole, out, self._offset(whole, stem, names, names.index(layer), out) if out else 0)]
        return []

    def _rows(self, name: str) -> int:
        """Outputs of a linear layer of the base."""
        shape = self.base[name]
        if len(shape) != 2:
            self._misfit(f"`{name}` of the base is {list(shape)}, which is not a linear layer")
        return shape[int(self.in_out(name))]

    def _offset(self, whole: str, stem: str, names: Sequence[str], part: int, out: int) -> int:
        """First output of a part of a fused layer; all parts but the first are of one size."""
        if len(names) > 2 and self.adapter.interleaves_qkv and self.in_out(whole):
            raise UnsupportedError(
                f"the adapter changes parts of `{whole}`, whose outputs are ordered by key and value heads",
                where=self.adapter.path,
                hint="convert the base to Hugging Face's format first",
            )
        total = self._rows(whole)
        sizes = [self._trained.get(f"{stem}.{n}.weight") for n in names]
        later = {s for s in sizes[1:] if s is not None}
        even = len(names) == 2 and 2 * out != total
        if even or len(later) > 1 or (sizes[0] and later and sizes[0] + max(later) * (len(names) - 1) != total):
            known = ", ".join(f"{n}: {s}" for n, s in zip(names, sizes, strict=True) if s is not None)
            self._misfit(f"the adapter has {known} outputs, `{whole}` of the base has {total}")
        return total - out * (len(names) - part) if part else 0

    def _misfit(self, what: str, hint: str = ANOTHER_MODEL) -> NoReturn:
        raise ConflictError(what, where=self.adapter.path, hint=hint)

    # -- what is put where

    def _put(self, name: str, term: LowRankTerm) -> None:
        before = self.table.get(name, Change())
        self.table[name] = before._replace(terms=(*before.terms, term))

    def _whole(self, name: str, view: DerivedTensor, *, in_place: bool) -> None:
        shape = self.base.get(name, ())
        turned = not self.as_trained and self.said is not None and self.in_out(name) != self.adapter.in_out
        if turned and len(view.shape) == 2 and name.endswith(".weight") and not name.endswith(_TABLES):
            view = transposed(view)
        if name not in self.base or view.shape != shape:
            self._misfit(
                f"`{view.name}` {list(view.shape)} of the adapter replaces `{name}`, which is {list(shape)} in the base"
                if name in self.base
                else f"`{view.name}` of the adapter replaces a part of a fused tensor of the base",
            )
        self.table[name] = self.table.get(name, Change())._replace(whole=view, in_place=in_place)

    def _linear(self, target: str, f: Factors) -> None:
        """Add to a layer, which the base may have in parts, or as a part of one."""
        out, width = f.size
        spots = self._spots(target, out)
        parts = [f]
        if len(spots) > 1:
            if sum(s.size for s in spots) != out:
                sizes = ", ".join(f"`{s.name}` {list(self.base[s.name])}" for s in spots)
                self._misfit(f"`{f.up.name}` has {out} outputs, but the base has {sizes}")
            parts = [f._replace(up=up) for up in self._split(target, f.up, [s.size for s in spots])]
        for spot, part in zip(spots, parts, strict=True):
            shape = self.base[spot.name]
            turned = self._turned(spot.name, part, whole=spot.name == target)
            rows, columns = (0, 0) if len(shape) != 2 else shape[::-1] if turned else shape
            if columns != width or spot.offset + spot.size > rows or (spot.name == target and rows != out):
                this, other = ("[in, out]", "[out, in]") if turned else ("[out, in]", "[in, out]")
                what = (
                    f"`{f.down.name}` and `{f.up.name}` change a weight with {width} inputs and {out} outputs;"
                    f" `{spot.name}` of the base is {list(shape)}, {this}"
                )
                if shape == (part.size if turned else part.size[::-1]):
                    self._misfit(what, f"it would fit if the base stored it as {other}")
                self._misfit(what)
            g = part.transposed() if turned else part
            at = (0, spot.offset) if turned else (spot.offset, 0)
            self._put(spot.name, LowRankTerm(g.up, g.down, g.factor, *at))

    def _turned(self, name: str, f: Factors, *, whole: bool) -> bool:
        """Whether the base stores this weight as [in, out]."""
        flag = self.in_out(name)
        if self.said is not None or self.adapter.in_out_everywhere or not whole:
            return flag
        if f.size[0] == f.size[1]:
            self._square.append(name)
        elif flag and self.base[name] == f.size:
            self._against.append(name)
            return False
        return flag

    def _split(self, target: str, up: DerivedTensor, sizes: Sequence[int]) -> list[DerivedTensor]:
        """``up`` [out, rank] of a fused layer, in parts."""
        if len(sizes) != 3 or not self.adapter.interleaves_qkv:
            stops = list(accumulate(sizes))
            return [take(up.name, up, 0, stop - n, stop) for n, stop in zip(sizes, stops, strict=True)]
        heads = self.kv_heads
        if not heads:
            raise UnsupportedError(
                f"the adapter changes `{target}`, whose order depends on the base's number of key and value heads",
                where=self.adapter.path,
                hint="the base's config.json has no num_key_value_heads",
            )
        if any(n % heads for n in sizes):
            self._misfit(f"{list(sizes)} outputs of q, k and v do not divide among {heads} key and value heads")
        each = [n // heads for n in sizes]
        starts = [stop - n for n, stop in zip(each, accumulate(each), strict=True)]
        return [deinterleave(up.name, up, 0, heads, start, n, sum(each)) for n, start in zip(each, starts, strict=True)]

    def _embedding(self, name: str, pair: Pair) -> None:
        """A is [rank, rows] and B is [columns, rank], whoever wrote the base: nobody stores embeddings transposed."""
        up, down = transposed(self.adapter.view(pair.a)), transposed(self.adapter.view(pair.b))
        if self.base.get(name) != (up.shape[0], down.shape[1]):
            self._misfit(
                f"`{pair.a}` {[*up.shape[::-1]]} and `{pair.b}` {[*down.shape[::-1]]} change an embedding of"
                f" {[up.shape[0], down.shape[1]]}; `{name}` of the base is {list(self.base.get(name, ()))}",
            )
        self._put(name, LowRankTerm(up, down, pair.factor))

    def _is_convolution(self, pair: Pair) -> bool:
        return len(self.adapter.catalog[pair.a].shape) > 2 or len(self.adapter.catalog[pair.b].shape) > 2

    def _convolution(self, name: str, pair: Pair) -> None:
        """A is a convolution [rank, in, ...] and B one of 1 x 1 [out, rank, 1, ...]."""
        a, b = self.adapter.catalog[pair.a], self.adapter.catalog[pair.b]
        expected = (b.shape[0], *a.shape[1:])
        if self.base.get(name) != expected or any(n != 1 for n in b.shape[2:]) or len(a.shape) != len(b.shape):
            self._misfit(
                f"`{pair.a}` {list(a.shape)} and `{pair.b}` {list(b.shape)} change a convolution of {list(expected)};"
                f" `{name}` of the base is {list(self.base.get(name, ()))}",
            )
        self._put(name, LowRankTerm(_matrix(b), _matrix(a), pair.factor))

    # -- stacked experts

    def _holder(self, target: str, choice: str) -> StackedWeight | None:
        """The stacked weight of the base for a trained one, if there is one."""
        name = f"{target}.{choice}" if choice else target
        shape = self.base.get(name)
        if shape is not None:
            return StackedWeight(name, (shape[-2], shape[-1]), stacked=True) if len(shape) in (2, 3) else None
        first = StackedWeight(name, (0, 0), stacked=False).expert(0)
        spots = self._spots(first, 0)
        if not spots or any(len(self.base[s.name]) != 2 for s in spots):
            return None
        width = self.base[spots[0].name][int(not self.in_out(spots[0].name))]
        return StackedWeight(name, (sum(self._rows(s.name) for s in spots), width), stacked=False)

    def _stack(self, target: str, pairs: Sequence[Pair]) -> None:
        """Add to the stacked weights of one module."""
        choices = _choices(pairs[0])
        there = [(c, holder) for c in choices if (holder := self._holder(target, c.name)) is not None]
        ranks_tell = len({c[1:] for c in choices}) > 1
        fitting = []
        for chosen in permutations(there, len(pairs)):
            if ranks_tell and not all(self._has_rank(p, c, h) for p, (c, h) in zip(pairs, chosen, strict=True)):
                continue
            made = [self.adapter.experts(p.of(c)) for p, (c, _) in zip(pairs, chosen, strict=True)]
            if all(h.size in (e[0].size, e[0].size[::-1]) for e, (_, h) in zip(made, chosen, strict=True)):
                fitting.append((made, [h for _, h in chosen]))
        if len(fitting) != 1:
            shapes = ", ".join(f"`{h.name}` {list(h.size)}" for _, h in there) or "none"
            held = self.adapter.catalog
            factors = ", ".join(f"`{n}` {list(held[n].shape)}" for p in pairs for n in (p.b, p.a))
            if fitting:
                raise UnsupportedError(
                    f"shapes do not tell which parameter of `{target}` the factors belong to: {factors}; {shapes}",
                    where=self.adapter.path,
                )
            self._misfit(f"the factors {factors} fit no weight that each expert has in the base: {shapes}")
        ((each, holders),) = fitting
        turned = self._stack_turned(target, [e[0].size for e in each], holders)
        for experts, holder in zip(each, holders, strict=True):
            self._check_count(holder, experts)
            for e, f in enumerate(experts):
                g = f.transposed() if turned and not self._is_flat(holder) else f
                if holder.stacked:
                    self._put(holder.name, LowRankTerm(g.up, g.down, g.factor, e * holder.size[0]))
                else:
                    self._linear(holder.expert(e), g)

    def _is_flat(self, holder: StackedWeight) -> bool:
        """Whether a parameter that is no layer's weight has no experts; PEFT takes such a one for [out, in]."""
        return len(self.base.get(holder.name, ())) == 2

    def _check_count(self, holder: StackedWeight, experts: Sequence[Factors]) -> None:
        if len(experts) != self._count(holder):
            self._misfit(f"`{experts[0].up.name}` is for {len(experts)} experts, the base has another number of them")

    def _count(self, holder: StackedWeight) -> int:
        """The number of experts of the base."""
        if holder.stacked:
            shape = self.base[holder.name]
            return shape[0] if len(shape) == 3 else 1
        return next(e for e in count() if not self._spots(holder.expert(e), 0))

    def _has_rank(self, pair: Pair, choice: CandidateParameter, holder: StackedWeight) -> bool:
        """Whether a factor has the rank of a parameter of PEFT, once for each expert."""
        return self.adapter.catalog[pair.a].shape[0] == choice.rank * self._count(holder)

    def _stack_turned(self, target: str, sizes: Sequence[tuple[int, int]], holders: Sequence[StackedWeight]) -> bool:
        """Whether factors [out, in] are for weights [in, out]; one answer for all parameters of a module."""
        if self.adapter.in_out_everywhere:
            (size,), (holder,) = sizes, holders
            turned = holder.stacked and self.in_out(holder.name)
            if holder.size != (size[::-1] if turned else size):
                self._misfit(f"the adapter changes experts of {list(size)}, [out, in]; the base's differ")
            return turned
        # PEFT takes a module's own word for it, which is not in the files.
        experts = [(s, h.size) for s, h in zip(sizes, holders, strict=True) if not self._is_flat(h)]
        found = {size != held for size, held in experts if size[0] != size[1]} if experts else {False}
        if not found and self.said is not None:
            # Experts that are square in one tensor: those of a family lie as its rules say.
            told = {self.said(h.name if h.stacked else self._spots(h.expert(0), 0)[0].name) for h in holders}
            found = {turned for turned in told if turned is not None} if None not in told else set()
        if len(found) != 1:
            raise UnsupportedError(
                f"shapes do not tell whether the experts of `{target}` are stored as [in, out] or as [out, in]",
                where=self.adapter.path,
                hint="merge this adapter with PEFT",
            )
        return found.pop()


def _choices(pair: Pair) -> tuple[CandidateParameter, ...]:
    """The parameters that the factors of a stacked weight may belong to; of Paddle's, the weight itself."""
    return pair.choices or (CandidateParameter("", pair.rank, pair.factor),)


def _starts(name: str) -> list[str]:
    """Beginnings of a name, up to its first number, that end at a dot; the empty one first."""
    parts = name.split(".")[:-1]
    out = [""]
    for part in parts:
        if part.isdecimal():
            break
        out.append(f"{out[-1]}{part}.")
    return out


def _matrix(t: LogicalTensor) -> DerivedTensor:
    """A stored tensor [n, ...] as [n, the rest]."""
    flat = whole_tensor(t.pieces[0].stored._replace(shape=(t.shape[0], prod(t.shape[1:]))), t.key)
    return DerivedTensor(t.key.name, t.dtype, flat.shape, flat)
