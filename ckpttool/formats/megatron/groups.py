"""Groups of parameters in Megatron's optimizers, and what else a trainer resumes from.

A save has the values of each group, but with the distributed optimizer not the names of its parameters. How Megatron
puts parameters into groups says them: experts have an optimizer of their own, vectors and biases are not decayed
(``wd_mult`` 0), and embeddings and the head may have a learning rate of their own (``is_decoupled_lr``).
Source: megatron/core/optimizer/__init__.py (``_get_param_groups``) of Megatron Core 0.16.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ckpttool.formats import base

_EXPERT = re.compile(r"\.mlp\.experts\.")
_ENDS = ("embedding.", "output_layer.")
_STEP = "step"
COUNTERS = ("iteration", "num_floating_point_operations_so_far", "opt_param_scheduler", "rerun_state_machine")
"""Counters that a save and ``TrainingState.plain`` have under the same name."""
CONSUMED = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples")
"""The same of its arguments."""


class SavedOptimizer(NamedTuple):
    """One of the optimizers of a save."""

    groups: tuple[Mapping[str, Any], ...]
    step: float | None
    """The step of all its parameters, where it is not in the groups."""


def optimizers_of(value: Any) -> list[SavedOptimizer]:
    """The optimizers in a save's ``optimizer``: one, or a list or dict of several (plain values)."""
    if isinstance(value, list):
        return [o for v in value for o in optimizers_of(v)]
    if not isinstance(value, dict):
        return []
    inner = value.get("optimizer", value)
    if isinstance(inner, dict) and isinstance(groups := inner.get("param_groups"), list):
        state = inner.get("state")
        step = state.get("common_step") if isinstance(state, dict) else None
        return [SavedOptimizer(tuple(g for g in groups if isinstance(g, dict)), step if _is_number(step) else None)]
    if value and all(type(k) is int for k in value):
        return [o for _, v in sorted(value.items()) for o in optimizers_of(v)]
    return []


def is_expert(name: str) -> bool:
    """Whether a parameter belongs to the optimizer of the experts."""
    return _EXPERT.search(name) is not None


def placed(
    optimizers: Sequence[SavedOptimizer], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[list[base.ParamGroup], dict[str, float], bool]:
    """(groups with names, step of each parameter that has one, whether every parameter has its group).

    ``shapes`` are those of the whole parameters by canonical name.
    """
    groups = [g for o in optimizers for g in o.groups]
    common = {o.step for o in optimizers if o.step is not None}
    members: list[list[str]] = [[] for _ in groups]
    steps: dict[str, float] = {}
    every = bool(groups)
    alone = common.union(*(_step_of(g) for g in groups))
    for name, shape in shapes.items():
        fitting = _fitting(groups, name, shape)
        if len(fitting) == 1:
            members[fitting[0]].append(name)
        every = every and len(fitting) == 1
        said = set[float]().union(*(_step_of(groups[i]) for i in fitting)) or (alone if len(alone) == 1 else set())
        if len(said) == 1:
            (steps[name],) = said
    named = [
        base.ParamGroup(tuple(names), {k: v for k, v in g.items() if k != "params"})
        for g, names in zip(groups, members, strict=True)
        if names
    ]
    return (named if every else []), steps, every


def _fitting(groups: Sequence[Mapping[str, Any]], name: str, shape: Sequence[int]) -> list[int]:
    """Numbers of the groups that may have a parameter."""
    found: Iterable[int] = range(len(groups))
    if any(g.get("is_expert_parallel") for g in groups):
        found = [i for i in found if bool(groups[i].get("is_expert_parallel")) == is_expert(name)]
    found = list(found)
    decayed = {i: _decay(groups[i]) for i in found}
    if len(set(decayed.values())) > 1:
        vector = len(shape) == 1 or name.endswith(".bias")
        found = [i for i in found if (decayed[i] == 0) == vector]
    if len({bool(groups[i].get("is_decoupled_lr")) for i in found}) > 1:
        found = [i for i in found if bool(groups[i].get("is_decoupled_lr")) == name.startswith(_ENDS)]
    return found


def _step_of(group: Mapping[str, Any]) -> set[float]:
    said = group.get(_STEP)
    return {said} if isinstance(said, (int, float)) else set()


def _decay(group: Mapping[str, Any]) -> Any:
    return group.get("wd_mult", group.get("pre_wd_mult"))  # NeMo's


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def counters(common: Mapping[str, Any], args: Mapping[str, Any]) -> dict[str, Any]:
    """Plain counters beside the optimizer: iteration, samples, the learning rate's schedule."""
    out = {k: common[k] for k in COUNTERS if k in common}
    return out | {k: args[k] for k in CONSUMED if _is_number(args.get(k))}
