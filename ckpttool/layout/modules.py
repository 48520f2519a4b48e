"""Tensors of a model in memory that its files hold as several: experts, as transformers 5 stacks them.

An optimizer numbers and shapes its state by the tensors in memory. A family says how these come from those in files:
a naming in ``hf_namings``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ckpttool.formats.base import ModelForm, TensorShare
from ckpttool.layout.family import Family
from ckpttool.layout.names import expand, pattern_regex
from ckpttool.layout.statements import Fuse, Rename, Stack, Transform

Shape = tuple[int, ...]


class _Made(NamedTuple):
    shape: Shape
    shares: tuple[TensorShare, ...]


def model_forms(family: Family, shapes: Mapping[str, Shape]) -> list[ModelForm]:
    """The model with tensors of these names and shapes: as it is, then as each of ``hf_namings`` holds it in memory."""
    forms = [ModelForm(tuple(family.parameter_order([*shapes])), dict(shapes))]
    for naming in family.spec.hf_namings:
        made = {n: _Made(s, (TensorShare(n, (0,) * len(s), s, tuple(range(len(s)))),)) for n, s in shapes.items()}
        for op in family.statements(naming):
            made = _applied(made, op, family) or {}
        if made and made.keys() != shapes.keys():
            shares = {n: m.shares for n, m in made.items()}
            order = tuple(family.parameter_order([*made]))
            forms.append(ModelForm(order, {n: m.shape for n, m in made.items()}, shares))
    return forms


def _applied(made: Mapping[str, _Made], op: Transform, family: Family) -> dict[str, _Made] | None:
    """The tensors after a statement; None for one that does other things than to rename, join and stack."""
    if isinstance(op, Rename):
        renamed = {op.forward(n): m for n, m in made.items()}
        return renamed if len(renamed) == len(made) else None
    if isinstance(op, Fuse) and not op.inverse and not op.groups:
        return _fused(made, op, family)
    return _stacked(made, op) if isinstance(op, Stack) and not op.inverse else None


def _fused(made: Mapping[str, _Made], op: Fuse, family: Family) -> dict[str, _Made] | None:
    """Parts joined along the rows of matrices that are [out, in], or of kernels that are [out, ...]."""
    out = dict(made)
    first = pattern_regex(op.parts[0])
    for name in made:
        if not (m := first.match(name)):
            continue
        names = [expand(p, m.groupdict()) for p in op.parts]
        parts = [out.pop(n) for n in names if n in out]
        place = family.placement(name)
        rows = place is not None and (place.rule.axis == 0 or all(len(p.shape) == 2 for p in parts))
        plain = place is not None and rows and not place.rule.in_out
        if len(parts) < len(names) or not plain or len({p.shape[1:] for p in parts}) > 1:
            return None
        at, shares = 0, []
        for part in parts:
            shares += [s._replace(start=(s.start[0] + at, *s.start[1:])) for s in part.shares]
            at += part.shape[0]
        out[expand(op.whole, m.groupdict())] = _Made((at, *parts[0].shape[1:]), tuple(shares))
    return out


def _stacked(made: Mapping[str, _Made], op: Stack) -> dict[str, _Made] | None:
    """The tensors of all experts behind a new first axis."""
    part, out = pattern_regex(op.part), {}
    experts: dict[str, dict[int, _Made]] = {}
    for name, one in made.items():
        if m := part.match(name):
            experts.setdefault(expand(op.whole, m.groupdict()), {})[int(m["expert"])] = one
        else:
            out[name] = one
    for name, held in experts.items():
        if set(held) != set(range(len(held))) or len({m.shape for m in held.values()}) > 1:
            return None
        shares = [
            s._replace(start=(e, *s.start), axes=tuple([a + 1 for a in s.axes]))
            for e in range(len(held))
            for s in held[e].shares
        ]
        out[name] = _Made((len(held), *held[0].shape), tuple(shares))
    return out
