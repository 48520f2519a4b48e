"""What a trainer resumes from beside tensors, under the names of the output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import ConflictError
from ckpttool.formats.base import ParamGroup, TrainingState
from ckpttool.planning.relate import TensorTable
from ckpttool.targeting.states import Betas


def training_of(source: Checkpoint, views: TensorTable, counted: set[str], betas: Betas | None) -> TrainingState | None:
    """``StoredCheckpoint.training`` with the names of ``views``, which are those of the output.

    A parameter that is gone leaves its group, one that repeats another (a tie) is in none; a parameter has its group
    whether or not it has state. ``counted`` are the parameters of the output whose steps are counted: ``betas`` are
    theirs where their groups say none, and they are a group where there is none. Raises ConflictError where tensors
    are joined whose groups differ.
    """
    training = source.stored.training
    groups = _renamed(training.groups, views) if training is not None else ()
    if betas is not None and counted:
        said = {"betas": list(betas)}
        if not groups:
            groups = (ParamGroup(tuple(n for n in views.table if n in counted)),)
        groups = tuple(replace(g, values={**said, **g.values}) if counted & {*g.parameters} else g for g in groups)
    return replace(training or TrainingState(), groups=groups) if training is not None or groups else None


def _renamed(groups: Sequence[ParamGroup], views: TensorTable) -> tuple[ParamGroup, ...]:
    place = {name: (g, i) for g, group in enumerate(groups) for i, name in enumerate(group.parameters)}
    for copy, owner in views.tied:  # the optimizer may know the one that is not written
        if copy.same is not None and owner.same is not None and copy.same.key.name in place:
            place.setdefault(owner.same.key.name, place[copy.same.key.name])
    members: list[list[tuple[int, int, str]]] = [[] for _ in groups]
    seen: set[object] = set()
    for order, (name, view) in enumerate(views.table.items()):
        parts = view.parts
        elements = [(id(p.source), p.origin, p.axes, p.stride, p.size) for p in parts]
        if seen.issuperset(elements):
            continue
        seen.update(elements)
        found = sorted({place[p.source.key.name] for p in parts if p.source.key.name in place})
        if not found:
            continue
        first, at = found[0]
        if any(dict(groups[g].values) != dict(groups[first].values) for g, _ in found):
            names = [groups[g].parameters[i] for g, i in found]
            raise ConflictError(
                f"`{name}` is made of tensors that the optimizer treats differently: `{names[0]}` and `{names[-1]}`",
                hint="keep the tensors apart (--unfuse), or omit the optimizer with --only model",
            )
        members[first].append((at, order, name))
    return tuple(
        replace(group, parameters=tuple(name for _, _, name in sorted(held)))
        for group, held in zip(groups, members, strict=True)
    )
