"""The values that a save of Megatron-LM holds beside tensors: its arguments, counters, and the groups of the optimizer.

Megatron's loader finds the group of a save for each of its own by four values (``wd_mult``, ``lr_mult``,
``is_expert_parallel``, ``is_decoupled_lr``), and counts the steps of an optimizer once. Experts have an optimizer of
their own only where they are shared out (ep > 1): a save of one kind is not loaded as the other.

Sources: megatron/core/optimizer/__init__.py and distrib_optimizer.py (``load_state_dict``) of Megatron Core 0.16;
megatron/training/checkpointing.py of Megatron-LM (``load_checkpoint``).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from ckpttool.containers.pickle_write import Instance
from ckpttool.containers.plain import is_plain
from ckpttool.core.words import some
from ckpttool.errors import UnsupportedError
from ckpttool.formats import base
from ckpttool.formats.megatron.args import options
from ckpttool.formats.megatron.groups import CONSUMED, COUNTERS, is_expert
from ckpttool.formats.megatron.models import NULL_TOKENIZER

CHECKPOINT_VERSION = 3.0
"""Since when query, key and value are interleaved by group."""
_DEFAULTS = {"lr": 0.0, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
"""Megatron-LM's own for what a source does not say; its scheduler sets ``lr`` and ``weight_decay`` before it steps.

Without ``max_lr`` and ``min_lr`` in a group it does so by the run's arguments.
"""
_OF_ARGS = {
    "lr": ("lr",),
    "betas": ("adam_beta1", "adam_beta2"),
    "eps": ("adam_eps",),
    "weight_decay": ("weight_decay",),
}
"""Fields of parameter groups, by the run's arguments that set them."""
_OF_RUN = frozenset({"args", "load", "save", "no_save_optim", "no_save_rng", "no_load_optim", "no_load_rng"})
"""Arguments of a source that are about its run, not about the model."""
_NOT_VALUES = frozenset({"params", "param_names", "step"})
_SCHEDULE = ("max_lr", "min_lr", "lr_warmup_steps", "lr_decay_steps", "lr_decay_style")
_LEAVE = "omit the optimizer: --only model"


class GroupIdentity(NamedTuple):
    """The values by which Megatron's loader finds a group."""

    is_expert_parallel: bool
    wd_mult: float
    lr_mult: float
    is_decoupled_lr: bool


class Groups(NamedTuple):
    """The groups of the optimizer."""

    optimizers: list[list[dict[str, Any]]]
    """``param_groups`` of each optimizer, without parameters: those of the dense layers first."""
    step: int
    notes: list[str]


def own_args(request: base.WriteRequest) -> dict[str, Any]:
    """Arguments of a source that is a save of Megatron's, too: what is plain and not about its run; {} of others."""
    source = request.source
    if source is None or source.dialect != request.dialect or not isinstance(source.native, Mapping):
        return {}
    return {k: v for k, v in source.native.items() if k not in _OF_RUN and is_plain(v) and v != NULL_TOKENIZER}


def iteration_of(request: base.WriteRequest) -> int:
    """After how many iterations the training stopped; 0 where nothing says that."""
    training = request.training or base.TrainingState()
    said = training.plain.get("iteration")
    if type(said) is int and said >= 0:
        return said
    steps = [s for s in training.steps.values() if s >= 0 and float(s).is_integer()]
    return int(max(steps)) if steps else max(training.step or 0, 0)


def groups_of(
    training: base.TrainingState | None,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    experts_apart: bool,
    args: Mapping[str, Any] = MappingProxyType({}),
) -> Groups:
    """The groups of the parameters in ``shapes`` (canonical name -> shape of the whole).

    ``experts_apart``: the experts have an optimizer of their own. ``args`` are those of the save: what groups do not
    say, they may. Raises UnsupportedError for parameters whose steps differ, or are not known.
    """
    training = training or base.TrainingState()
    step = _step(training, shapes)
    said = {name: group.values for group in training.groups for name in group.parameters}
    found: dict[GroupIdentity, dict[str, Any]] = {}
    differ: dict[str, None] = {}
    missing: dict[str, None] = {}
    of_args = _of_args(args)
    for name, shape in shapes.items():
        values = {**of_args, **said.get(name, {})}
        identity = _identity(values, name, shape, apart=experts_apart)
        mine = {k: tuple(v) if k == "betas" else v for k, v in values.items() if k not in _NOT_VALUES}
        mine.update(identity._asdict())
        missing.update((k, None) for k in _DEFAULTS if k not in mine)
        first = found.setdefault(identity, mine)
        if first is not mine and first != mine:
            differ.update((k, None) for k in {*first, *mine} if first.get(k) != mine.get(k))
    notes = []
    if differ:
        notes.append(
            f"Megatron has one group where the source has several with different {some(sorted(differ))}: each group is"
            " written with the values of its first parameter"
        )
    if missing:
        kept = ", ".join(f"{k} {_DEFAULTS[k]}" for k in missing)
        notes.append(f"the source does not say {some(list(missing))} of the optimizer: {kept} is written")
    apart = (False, True) if experts_apart else (False,)
    order = sorted(found, key=lambda i: (-i.wd_mult, i.is_decoupled_lr, -i.lr_mult))
    optimizers = [[_group(found[i], step) for i in order if i.is_expert_parallel == which] for which in apart]
    return Groups(optimizers, step, notes)


def _of_args(args: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that the run's arguments set in all its groups."""
    said = {k: tuple([args.get(n) for n in names]) for k, names in _OF_ARGS.items()}
    return {k: v if len(v) > 1 else v[0] for k, v in said.items() if all(type(n) in (int, float) for n in v)}


def _identity(values: Mapping[str, Any], name: str, shape: tuple[int, ...], *, apart: bool) -> GroupIdentity:
    """The group that Megatron puts a parameter into: that of the source where it was Megatron's, too."""
    vector = len(shape) == 1 or name.endswith(".bias")
    decay = values.get("wd_mult", values.get("pre_wd_mult", 0.0 if vector else 1.0))
    rate = values.get("lr_mult", values.get("pre_lr_mult", 1.0))
    return GroupIdentity(apart and is_expert(name), decay, rate, bool(values.get("is_decoupled_lr")))


def _group(values: Mapping[str, Any], step: int) -> dict[str, Any]:
    # Transformer Engine's and Apex's Adam ask for bias_correction, and torch's, which always does it, has no such key.
    return {"default_config": True, "bias_correction": True, **_DEFAULTS, **values, "step": step}


def _step(training: base.TrainingState, names: Mapping[str, Any]) -> int:
    steps = {name: training.steps[name] for name in names if name in training.steps}
    if not steps:
        if training.step is None:
            raise UnsupportedError("nothing says how many steps the optimizer has taken", hint=_LEAVE)
        steps = {"": training.step}
    (first, step), *others = steps.items()
    for s in steps.values():
        if s < 0 or not float(s).is_integer():
            raise UnsupportedError(f"{s} is not a number of steps", hint=_LEAVE)
    for name, s in others:
        if s != step:
            raise UnsupportedError(
                f"Megatron counts the steps once for all parameters, and they differ: {step:g} of `{first}`,"
                f" {s:g} of `{name}`",
                hint=_LEAVE,
            )
    return int(step)


def common(request: base.WriteRequest, args: Mapping[str, Any], *, optimizer: bool) -> tuple[dict[str, Any], list[str]]:
    """(what lies beside model and optimizer in a save, notes); ``optimizer``: it has the state of one."""
    training = request.training or base.TrainingState()
    plain = training.plain
    said = {
        **args,
        **{k: plain[k] for k in CONSUMED if type(plain.get(k)) is int},
        "iteration": iteration_of(request),
        "no_save_optim": not optimizer,
        "no_save_rng": True,
        "use_distributed_optimizer": optimizer,
    }
    out = {
        "args": Instance("argparse", "Namespace", said),
        "checkpoint_version": CHECKPOINT_VERSION,
        "num_floating_point_operations_so_far": 0,
        **{k: plain[k] for k in COUNTERS if k in plain},
        "iteration": said["iteration"],
    }
    notes = []
    if optimizer and not isinstance(plain.get("opt_param_scheduler"), dict):
        # Without one the loader stops; it takes num_steps, and compares the others with its own arguments.
        samples = said.get("consumed_train_samples", 0)
        out["opt_param_scheduler"] = {**dict.fromkeys(_SCHEDULE), "num_steps": samples}
        notes.append(
            "the source has no learning-rate schedule of Megatron's: load it with --override-opt-param-scheduler; it"
            f" starts your schedule at sample {samples:,}"
        )
    if (request.source is None or request.source.dialect != request.dialect) and (needed := options(args)):
        notes.append(f"Megatron-LM's --use-checkpoint-args does not take all of them: pass also {' '.join(needed)}")
    left = ["param_groups"] if training.groups and not optimizer else []
    if left := [*left, *(k for k in plain if k not in (*COUNTERS, *CONSUMED))]:
        notes.append(f"left out, because Megatron has no place for it: {some(left, 12)}")
    return out, notes
