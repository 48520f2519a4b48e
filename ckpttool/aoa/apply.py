"""Carrying AOA statements out on a table of views: metadata only.

Statements run in the order of the text. Each reads names of the table as it is then, the sources' own and those that
earlier statements made. A name that is read is used up; the outputs are the names that are left. ``a -> a`` says that
``a`` is left even if other statements read it too, as a tied embedding needs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Never

from ckpttool.aoa.statement import DTYPES, NOTHING, PLACEHOLDER, Cast, Statement, Var
from ckpttool.core.patterns import nearest_hint
from ckpttool.errors import CkptError, ConflictError, IncompleteError, LayoutError, UnsupportedError, UsageError
from ckpttool.layout.rules import CutSize
from ckpttool.layout.scales import weight_of
from ckpttool.planning.relate import DerivedTensor, TensorTable, concat, deinterleave, interleave, permute, take

_NUMBER = r"\d+"
_OTHER_TOWERS = re.compile(r"vis(ion|ual)|audio|image", re.IGNORECASE)
"""Names with attention of their own, whose heads config.json's first numbers do not count."""


@dataclass(slots=True)
class _TableEntry:
    """A name of the table."""

    view: DerivedTensor
    place: int
    """Position of its first source, in the order of the source."""
    by: Statement | None = None
    """The statement that wrote it; None for a tensor of the source."""
    used: bool = False
    """Read by a statement since it was written."""
    kept: Statement | None = None
    """The ``a -> a`` that makes it an output all the same."""

    @property
    def is_output(self) -> bool:
        return not self.used or self.kept is not None


class _NameIndex:
    """All names that a statement may read, found by pattern."""

    def __init__(self, names: Iterator[str] | Sequence[str]) -> None:
        self.all: dict[str, None] = {}
        # Names that differ only in numbers stand together, so that a pattern is tried on few of them.
        self._alike: dict[str, dict[str, None]] = {}
        for name in names:
            self.add(name)

    def add(self, name: str) -> None:
        if name not in self.all:
            self.all[name] = None
            self._alike.setdefault(re.sub(_NUMBER, "#", name), {})[name] = None

    def remove(self, name: str) -> None:
        """A dropped name is none that a pattern stands for."""
        self.all.pop(name, None)
        self._alike[re.sub(_NUMBER, "#", name)].pop(name, None)

    def find(self, pattern: str) -> list[dict[str, str]]:
        """For each name that ``pattern`` (placeholders, or one ``*``) matches: what each placeholder stands for."""
        marks = re.compile(rf"{PLACEHOLDER.pattern}|\*")
        alike = re.sub(_NUMBER, "#", marks.sub("0", pattern))
        out, at, seen = [], 0, dict[str, str]()
        for m in marks.finditer(pattern):
            out.append(re.escape(pattern[at : m.start()]))
            group = seen.get(m.group())
            if group:
                out.append(f"(?P={group})")
            else:
                seen[m.group()] = f"g{len(seen)}"
                out.append(f"(?P<{seen[m.group()]}>{_NUMBER})")
            at = m.end()
        regex = re.compile("".join(out) + re.escape(pattern[at:]))
        hits = [hit for name in self._alike.get(alike, ()) if (hit := regex.fullmatch(name))]
        return [{mark: hit[group] for mark, group in seen.items()} for hit in hits]


@dataclass(frozen=True, slots=True)
class _Bound:
    """A statement with numbers for its placeholders and names for its ``*``."""

    statement: Statement
    left: tuple[Var, ...]
    right: tuple[Var, ...]

    @property
    def where(self) -> list[str]:
        """The statement's place and text, and below what it stands for in this case."""
        s = self.statement
        if self.left == s.left and self.right == s.right:
            return s.where
        left = [str(v) for v in self.left]
        if len(left) > 6:
            left[3:-2] = [f"... ({len(left)} in all) ..."]
        return [*s.where, f"here: {', '.join(left)} -> {', '.join(map(str, self.right))}"]

    def wrong(self, error: type[CkptError], what: str, hint: str | None = None) -> Never:
        raise error(what, where=self.where, hint=hint)


def apply_aoa(
    views: TensorTable, statements: Sequence[Statement], *, sizes: Mapping[str, CutSize] | None = None
) -> TensorTable:
    """The views after ``statements``; tensors that no statement names pass through.

    Views are whole tensors, put together part by part from their ranks: fused_ffn is [G U], fused_qkv_old [Q K V].
    ``sizes`` are the model's, to hold ``num_heads`` against.

    Raises UsageError for a name that is not there, IncompleteError for a gap in numbered names, ConflictError for two
    tensors of one name and for dtypes and head counts that are not so, LayoutError for shapes that do not fit and
    UnsupportedError for what only Paddle can do. All name file, statement and the names it stood for.
    """
    run = _Interpreter(views, sizes or {})
    for statement in statements:
        for bound in run.expand(statement):
            run.carry_out(bound)
    return run.result()


class _Interpreter:
    """The table while statements are carried out."""

    def __init__(self, views: TensorTable, sizes: Mapping[str, CutSize]) -> None:
        self.before = views
        self.sizes = sizes
        self.slots = {v.name: _TableEntry(v, i) for i, v in enumerate(views)}
        self.dropped: dict[str, _Bound] = {}
        self.gone: list[str] = []
        """Dropped while no other tensor had been made of it."""
        self.lost = 0
        """Bytes of those."""
        self.names = _NameIndex(list(self.slots))

    # -- which names a statement stands for

    def expand(self, s: Statement) -> list[_Bound]:
        """One bound statement for each number that its placeholders stand for together, in numeric order.

        Numbers are found together: where layer 0 has experts 0 and 1 and layer 1 only expert 0, there are three.
        """
        if s.left[0].name == NOTHING:
            raise UnsupportedError(
                f"`{s.right[0].name}` would need a value: `_ -> name` keeps what the model was initialised with",
                where=s.where,
                hint="remove the statement; what the source does not hold is not written",
            )
        marks = s.placeholders
        if not marks:
            return [self._stars(s, s.left, s.right)]
        found = {tuple(hit[m] for m in marks) for v in s.left for hit in self.names.find(v.name)}
        if not found:
            name = s.left[0].name
            known = self.names.all
            hint = nearest_hint(PLACEHOLDER.sub("0", name), known) if known else "the checkpoint has no tensors"
            raise UsageError(f"no tensor matches `{name}`", where=s.where, hint=hint)
        out = []
        # With an offset, each layer moves to the number that the one before it has left.
        for numbers in sorted(found, key=lambda t: [int(n) for n in t], reverse=s.inverted):
            values = dict(zip(marks, numbers, strict=True))
            left = tuple(_fill(v, values, 0) for v in s.left)
            # The offset: layer i becomes layer i - 1, and i + 1 on the way back.
            shift = 1 if s.inverted else -1
            if (offset := values.get("$LAYER_ID_OFFSET")) is not None and int(offset) + shift < 0:
                raise LayoutError(
                    f"`{left[0].name}` would become layer {int(offset) + shift}",
                    where=s.where,
                    hint="$LAYER_ID_OFFSET takes layer i to layer i - 1; end what layer 0 had before: `name -> _`",
                )
            right = tuple(_fill(v, values, shift) for v in s.right)
            bound = _Bound(s, left, right)
            for v in left:
                if v.name not in self.names.all:
                    there = next(w.name for w in left if w.name in self.names.all)
                    bound.wrong(IncompleteError, f"there is no `{v.name}` beside `{there}`")
            out.append(bound)
        return out

    def _stars(self, s: Statement, left: Sequence[Var], right: Sequence[Var]) -> _Bound:
        """``*`` written out in numeric order, with every number between the first and the last."""
        out: list[Var] = []
        for v in left:
            if "*" not in v.name:
                out.append(v)
                continue
            numbers = sorted((hit["*"] for hit in self.names.find(v.name)), key=int)
            if not numbers:
                hint = nearest_hint(v.name, self.names.all)
                raise UsageError(f"no tensor matches `{v.name}`", where=s.where, hint=hint)
            there = {int(n) for n in numbers}
            gap = next((n for n in range(min(there), max(there)) if n not in there), None)
            if gap is not None or len(there) < len(numbers):
                missing = f"{v.name} (a number with leading zeros)" if gap is None else v.name.replace("*", str(gap))
                what = f"`{v.name}` matches {len(numbers)} tensors, and `{missing}` is not among them"
                raise IncompleteError(what, where=s.where)
            out += [Var(v.name.replace("*", n), v.transposed, v.column) for n in numbers]
        return _Bound(s, tuple(out), tuple(right))

    # -- one statement

    def carry_out(self, bound: _Bound) -> None:
        """Read the left names, write the right ones."""
        s = bound.statement
        read = [self._get(bound, v.name) for v in bound.left]
        if bound.right[0].name == NOTHING:
            self._drop(bound, read[0])
            return
        if s.is_plain and bound.left[0].name == bound.right[0].name:
            read[0].kept = s
            return
        sources = [
            _transposed(slot.view) if v.transposed else slot.view for v, slot in zip(bound.left, read, strict=True)
        ]
        made = self._make(bound, sources)
        for slot in read:
            slot.used = True
        place = min(slot.place for slot in read)
        for v, view in zip(bound.right, made, strict=True):
            self._put(bound, v.name, _transposed(view) if v.transposed else view, place)

    def _get(self, bound: _Bound, name: str) -> _TableEntry:
        if name in self.dropped:
            hint = f"it was dropped by `{self.dropped[name].statement.text}`"
            bound.wrong(ConflictError, f"`{name}` is read after it was dropped", hint)
        slot = self.slots.get(name)
        if slot is None:
            bound.wrong(UsageError, f"there is no tensor `{name}`", nearest_hint(name, self.slots))
        return slot

    def _drop(self, bound: _Bound, slot: _TableEntry) -> None:
        name = bound.left[0].name
        if slot.kept is not None:
            bound.wrong(ConflictError, f"`{name}` is kept by `{slot.kept.text}` and dropped here")
        if slot.is_output:
            self.lost += slot.view.nbytes
            self.gone.append(name)
        del self.slots[name]
        self.dropped[name] = bound
        self.names.remove(name)

    def _put(self, bound: _Bound, name: str, view: DerivedTensor, place: int) -> None:
        old = self.slots.get(name)
        if old is not None and old.is_output:
            if old.kept is not None:
                other = f"`{old.kept.text}` keeps the tensor that has this name"
            elif old.by is not None:
                other = f"`{old.by.text}` already makes it"
            else:
                other = "the source has a tensor of this name, which nothing has used up"
            bound.wrong(
                ConflictError,
                f"two tensors would be named `{name}`: {other}",
                f"what reads the other `{name}` must stand before; to drop it: `{name} -> _`",
            )
        self.dropped.pop(name, None)
        # Taken out and put in anew: of names with one place, the last written stands last.
        self.slots.pop(name, None)
        self.slots[name] = _TableEntry(view.named(name), place, bound.statement)
        self.names.add(name)

    def _make(self, bound: _Bound, sources: Sequence[DerivedTensor]) -> list[DerivedTensor]:
        """The views of the right names, in their order."""
        s = bound.statement
        names = [v.name for v in bound.right]
        if s.macro:
            return self._fused(bound, sources)
        if len(names) > 1:
            return _split(bound, sources[0], names, self._axis(bound, sources[0]))
        if len(sources) > 1:
            return [_join(bound, sources, self._axis(bound, sources[0]))]
        if s.axis is not None:
            self._axis(bound, sources[0])  # a join of one, from * or name[a:b]
        if s.permute is not None:
            view = sources[0]
            if s.permute and len(s.permute) != len(view.shape):
                what = (
                    f"`{view.name}` {list(view.shape)} has {len(view.shape)} axes, and permute names {len(s.permute)}"
                )
                bound.wrong(LayoutError, what)
            return [permute(view.name, view, s.permute) if s.permute else _transposed(view)]
        if s.cast is not None:
            return [_cast(bound, sources[0], s.cast)]
        return [sources[0]]

    def _axis(self, bound: _Bound, view: DerivedTensor) -> int:
        s = bound.statement
        axis = 1 if s.axis is None else s.axis
        if axis >= len(view.shape):
            where = f"`{view.name}` {list(view.shape)} has no axis {axis}"
            if s.axis is None:
                what = f"{where}, which {s.macro} takes where none is said"
                bound.wrong(LayoutError, what, "for a bias write `axis=0`")
            bound.wrong(LayoutError, where, "axes count from 0")
        return axis

    # -- fused tensors

    def _fused(self, bound: _Bound, sources: Sequence[DerivedTensor]) -> list[DerivedTensor]:
        """The three macros: blocks of several tensors, interleaved on one axis."""
        s = bound.statement
        axis = self._axis(bound, sources[0])
        for view in sources[1:]:
            _require_same(bound, sources[0], view, axis)
        weights = (1, 1) if s.macro == "fused_ffn" else self._heads(bound, sources, axis)
        # fused_qkv: a group is some query heads with their key and value head
        groups = s.num_key_value_groups if s.macro == "fused_qkv" else 1
        names = [v.name for v in bound.right]
        if len(sources) > 1:
            a, b = sources[:2]
            if s.macro == "fused_ffn" and a.shape != b.shape:
                what = f"`{a.name}` {list(a.shape)} and `{b.name}` {list(b.shape)} differ"
                bound.wrong(LayoutError, f"{what}: fused_ffn joins two equal halves")
            return [concat(names[0], sources, axis) if groups == 1 else interleave(names[0], sources, axis, groups)]
        (view,) = sources
        length = view.shape[axis]
        if s.macro == "fused_ffn" and length % 2:
            what = f"`{view.name}` has {length} on the axis of fused_ffn, which 1 ranks cannot share as gate and up"
            bound.wrong(LayoutError, what)
        if len(names) == 1:
            return [view]
        out, at, period = [], 0, length // groups
        for name, weight in zip(names, weights, strict=True):
            n = period * weight // sum(weights)
            part = take(name, view, axis, at, at + n)
            out.append(part if groups == 1 else deinterleave(name, view, axis, groups, at, n, period))
            at += n
        return out

    def _heads(self, bound: _Bound, sources: Sequence[DerivedTensor], axis: int) -> tuple[int, ...]:
        """Query, key and value heads; the tensors' sizes must be of that proportion."""
        s = bound.statement
        weights = (s.num_heads, s.num_key_value_groups, s.num_key_value_groups)
        lengths = [v.shape[axis] for v in sources]
        total = sum(lengths)
        size = total // sum(weights)
        if total % sum(weights) or (len(sources) == 3 and lengths != [size * w for w in weights]):
            what = ", ".join(f"`{v.name}` {list(v.shape)}" for v in sources)
            bound.wrong(
                LayoutError,
                f"{what} on axis {axis}: not {s.num_heads} query, {weights[1]} key and {weights[2]} value heads"
                " of one size",
                "num_heads and num_key_value_groups are num_attention_heads and num_key_value_heads of config.json",
            )
        known = tuple(self.sizes[k].value for k in ("heads", "kv_heads") if k in self.sizes)
        if (
            len(known) == 2
            and known != weights[:2]
            and total % (known[0] + 2 * known[1]) == 0
            and (len(sources) == 1 or lengths[0] * known[1] == lengths[1] * known[0])
            and not any(_OTHER_TOWERS.search(v.name) for v in (*bound.left, *bound.right))
        ):
            # The sizes allow both, and the heads would be put in another order.
            bound.wrong(
                ConflictError,
                f"num_heads={weights[0]}, num_key_value_groups={weights[1]}, and the model's config has {known[0]}"
                f" and {known[1]} heads",
            )
        return weights

    # -- the end

    def result(self) -> TensorTable:
        """The remaining tensors, each at the position of its first source."""
        for name, old in self.slots.items():
            weight = weight_of(name, self.before.table)
            if weight is None or not old.is_output or old.by is not None:
                continue
            of = self.slots.get(weight)
            if of is None or of.used or of.by is not None:
                raise UnsupportedError(
                    f"`{name}` holds the scales of `{weight}`, which the AOA text changes, and no statement names it",
                    hint="dequantize first, or state what becomes of the scales",
                )
        left = sorted((s for s in self.slots.values() if s.is_output), key=lambda s: s.place)
        if self.gone:
            n = len(self.gone)
            self.before.notes.append(
                f"{n} tensor{'s are' if n > 1 else ' is'} dropped by the AOA text ({self.lost:,} bytes): {self.gone[0]}"
                + (", ..." if n > 1 else "")
            )
        return replace(self.before, table={s.view.name: s.view for s in left})


def _fill(v: Var, values: Mapping[str, str], shift: int) -> Var:
    """The name with numbers for placeholders; ``shift`` is added to $LAYER_ID_OFFSET."""

    def number(m: re.Match[str]) -> str:
        text = values[m.group()]
        return str(int(text) + shift) if m.group() == "$LAYER_ID_OFFSET" and shift else text

    return Var(PLACEHOLDER.sub(number, v.name), v.transposed, v.column)


def _transposed(view: DerivedTensor) -> DerivedTensor:
    """All axes in reverse, as Paddle's ^T; one axis or none stays as it is."""
    n = len(view.shape)
    return view if n < 2 else permute(view.name, view, tuple(range(n - 1, -1, -1)))


def _require_same(bound: _Bound, first: DerivedTensor, other: DerivedTensor, axis: int) -> None:
    """Require that two tensors can be concatenated: Paddle would make one of the first one's shape with wrong rows."""
    if other.dtype != first.dtype:
        what = f"`{first.name}` is {first.dtype} and `{other.name}` is {other.dtype}: cast one of them first"
        bound.wrong(ConflictError, what)
    fits = len(first.shape) == len(other.shape) and all(
        a == b or i == axis for i, (a, b) in enumerate(zip(first.shape, other.shape, strict=True))
    )
    if not fits:
        bound.wrong(
            LayoutError,
            f"`{first.name}` {list(first.shape)} and `{other.name}` {list(other.shape)} differ besides axis {axis}:"
            " they cannot be joined",
        )


def _join(bound: _Bound, parts: Sequence[DerivedTensor], axis: int) -> DerivedTensor:
    for p in parts[1:]:
        _require_same(bound, parts[0], p, axis)
    return concat(bound.right[0].name, parts, axis)


def _split(bound: _Bound, view: DerivedTensor, names: Sequence[str], axis: int) -> list[DerivedTensor]:
    n, rest = divmod(view.shape[axis], len(names))
    if rest:
        bound.wrong(
            LayoutError,
            f"`{view.name}` {list(view.shape)} does not divide into {len(names)} equal parts on axis {axis}",
            "AOA text has equal parts only: take it apart into more of them and join some again",
        )
    return [take(name, view, axis, i * n, (i + 1) * n) for i, name in enumerate(names)]


def _cast(bound: _Bound, view: DerivedTensor, cast: Cast) -> DerivedTensor:
    """The view with another dtype; what it is made of keeps its own, and copying converts."""
    to = DTYPES[cast.to]
    if cast.of is not None and DTYPES[cast.of] != view.dtype:
        hint = "the two ends of the text were perhaps meant for another checkpoint"
        bound.wrong(ConflictError, f"`{view.name}` is {view.dtype}, and src_dtype says {cast.of}", hint)
    if view.dtype not in DTYPES.values():
        what = f"`{view.name}` is {view.dtype}, which AOA text cannot cast"
        bound.wrong(UnsupportedError, what, f"it can cast between {', '.join(DTYPES)}")
    if to == view.dtype:
        return view
    # A copy converts once, from the stored dtype. By way of F32 that is the same; by way of less it is not.
    if view.dtype != "F32" and any(p.source.dtype != view.dtype for p in view.parts):
        what = f"`{view.name}` is already cast to {view.dtype} and cannot be cast again to {to}"
        bound.wrong(UnsupportedError, what, "cast once, to the last dtype")
    return DerivedTensor(view.name, to, view.shape, None, view.parts)
