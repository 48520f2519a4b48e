"""The state of Megatron's distributed optimizer in legacy files.

    model_optim_rng.pt   optimizer: {"optimizer": {"param_groups": [...]}}, the step in each group, and no parameters
    distrib_optim.pt     {0: {(bfloat16, float32): {"param", "exp_avg", "exp_avg_sq", "numel_unpadded"}}, ...}: for each
                         virtual stage and dtype of parameters three flat vectors of float32, laid out by buffers.py

With expert parallelism there are two optimizers: both files have a list, first what all of data parallelism shares,
then the experts. Of the ranks that hold the same parameters the first one has their vectors, the others have None.

Source: optimizer/distrib_optimizer.py (``load_parameter_state_from_dp_zero``, ``load_state_dict``), optimizer.py
(``ChainedOptimizer``), __init__.py (``_get_param_groups``) and distributed/distributed_data_parallel.py of Megatron
Core 0.16.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from ckpttool.catalog import RankTensor
from ckpttool.containers.pickle import Global
from ckpttool.containers.pickle_write import Hole
from ckpttool.containers.torch_pickle import TORCH_DTYPE
from ckpttool.errors import ConflictError, UnsupportedError
from ckpttool.formats import base
from ckpttool.formats.megatron.buffers import offsets
from ckpttool.mesh import Coords
from ckpttool.states import STEP
from ckpttool.words import some

_MOMENTS = ("exp_avg", "exp_avg_sq")
_VECTORS = ("param", *_MOMENTS)
_IDENTITY = ("is_expert_parallel", "wd_mult", "lr_mult", "is_decoupled_lr")
"""By which Megatron tells the groups of a save apart."""
_ADAM = {"betas": (0.9, 0.999), "eps": 1e-8}
"""What a group needs, and Megatron's own defaults."""
_OF_ARGS = {
    "betas": ("adam_beta1", "adam_beta2"),
    "eps": ("adam_eps",),
    "lr": ("lr",),
    "weight_decay": ("weight_decay",),
}
"""What the arguments of a run say of its groups."""
_TORCHS = ("lr", "betas", "eps", "weight_decay", "max_lr", "min_lr")
"""What the groups of other trainers have in common with Megatron's."""
_SCHEDULE = "opt_param_scheduler"
_COUNTERS = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples")
_OPERATIONS = "num_floating_point_operations_so_far"
_LEAVE = "leave the optimizer out: --only model"
_ONE_BUCKET = {"overlap_grad_reduce": False, "ddp_bucket_size": None, "ddp_num_buckets": None}
"""How the vectors are laid out; with parameters of other sizes than multiples of 64 elements it makes a difference."""
_EXPERTS = ".experts.local_experts."
_WIDENED = "master weights that the source does not have are float32 of the model weights (exact)"


class Vectors(NamedTuple):
    """What ``distrib_optim.pt`` of a rank holds."""

    value: Any
    inside: list[tuple[tuple[Any, ...], RankTensor, int]]
    """(path of a vector in the value, tensor, element of the vector at which it begins)."""
    sizes: dict[tuple[Any, ...], int]
    """Bytes of each vector."""


class Optimizer:
    """The optimizer of a save."""

    def __init__(
        self, request: base.WriteRequest, shapes: Mapping[str, tuple[int, ...]], args: dict[str, Any], notes: list[str]
    ) -> None:
        """``shapes`` are those of all parameters that are trained, by canonical name; ``args`` gets what a run resumes
        from, and ``notes`` what is not carried.

        Raises UnsupportedError for an optimizer that is not Adam, ConflictError for steps that differ.
        """
        self.mesh, self.args = request.mesh, args
        self.training = request.training or base.Training()
        self.megatron = any({"wd_mult", "pre_wd_mult"} & {*g.values} for g in self.training.groups)
        self.chained = self.mesh.ep > 1 and any(_EXPERTS in n for n in shapes)
        self.step = self._one_step()
        told = self.training.plain.get("iteration")
        self.iteration = told if type(told) is int and told >= 0 else self.training.step or self.step
        args["use_distributed_optimizer"] = True
        args["iteration"] = self.iteration
        args |= _ONE_BUCKET
        args["accumulate_allreduce_grads_in_fp32"] = bool(
            args.get("accumulate_allreduce_grads_in_fp32", not args["fp16"])
        )
        self.wide = args["accumulate_allreduce_grads_in_fp32"]
        args |= {k: self.training.plain[k] for k in _COUNTERS if k in self.training.plain}
        self.made = False
        self.notes = notes
        groups = self._groups(shapes)
        split = [[g for g in groups if g["is_expert_parallel"] is e] for e in (False, True)]
        states = [{"optimizer": {"param_groups": of}} for of in (split if self.chained else [groups])]
        self.plain = {
            "optimizer": states if self.chained else states[0],
            _SCHEDULE: self._schedule(),
            _OPERATIONS: self.training.plain.get(_OPERATIONS, 0),
        }
        notes.append("random number generators are not carried: load with --no-load-rng")
        known = {"iteration", _SCHEDULE, _OPERATIONS, *_COUNTERS}
        if left := [k for k in self.training.plain if k not in known]:
            notes.append(f"left out, because Megatron has no place for it: {some(left)}")

    def vectors(
        self,
        at: Coords,
        order: Sequence[Sequence[str]],
        model: Mapping[str, RankTensor],
        masters: Mapping[str, RankTensor],
        states: Mapping[tuple[str, str], RankTensor],
        *,
        alone: Collection[str],
    ) -> Vectors:
        """What a rank's file holds; ``order`` are the parameters of each of its chunks, in the model's order, ``alone``
        those that another stage has, too.

        Raises UnsupportedError for a parameter without moments.
        """
        out = Vectors([], [], {})
        at_stage = at.rank % self.mesh.width
        for expert in (False, True) if self.chained else (None,):
            path: tuple[Any, ...] = (len(out.value),) if self.chained else ()
            others = self.mesh.ep * self.mesh.etp if expert else self.mesh.tp
            if self.chained and at_stage >= others:
                out.value.append(None)  # another rank has the same
                continue
            buffers: dict[Any, Any] = {"buckets_coalesced": True}
            for names in order:
                mine = [n for n in names if expert is None or (_EXPERTS in n) is expert]
                for dtype in dict.fromkeys(model[n].dtype for n in mine):
                    alike = [n for n in mine if model[n].dtype == dtype]
                    key = self._key(dtype)
                    begins, total = offsets([(n, model[n].shape) for n in alike], alone=alone)
                    here = (*path, len(buffers) - 1, key)
                    buffers[len(buffers) - 1] = {
                        key: {**{v: Hole("F32", (total,)) for v in _VECTORS}, "numel_unpadded": total}
                    }
                    out.sizes.update({(*here, v): 4 * total for v in _VECTORS})
                    for n in alike:
                        held = (self._master(model[n], masters), *(self._moment(n, m, states) for m in _MOMENTS))
                        out.inside.extend(((*here, v), t, begins[n]) for v, t in zip(_VECTORS, held, strict=True))
            out.value.append(buffers)
        return out if self.chained else out._replace(value=out.value[0])

    def _key(self, dtype: str) -> tuple[Global, Global]:
        """Of a buffer: what its parameters are, and what their gradients are summed in."""
        return Global("torch", TORCH_DTYPE[dtype]), Global("torch", TORCH_DTYPE["F32" if self.wide else dtype])

    def _master(self, own: RankTensor, masters: Mapping[str, RankTensor]) -> RankTensor:
        """A parameter that has no master weight is its own, and is written twice."""
        if own.name in masters:
            return masters[own.name]
        if own.dtype != "F32" and not self.made:
            self.made = True
            self.notes.append(_WIDENED)
        return own._replace(dtype="F32", part=1)

    @staticmethod
    def _moment(name: str, moment: str, states: Mapping[tuple[str, str], RankTensor]) -> RankTensor:
        found = states.get((name, moment))
        if found is None or found.dtype != "F32":
            why = "has none" if found is None else f"has it in {found.dtype}"
            raise UnsupportedError(
                f"Megatron's optimizer keeps `{moment}` of every parameter in float32; of `{name}` the source {why}",
                where=name,
                hint=_LEAVE,
            )
        return found

    def _one_step(self) -> int:
        """How many steps were taken: the groups of Megatron's optimizer have one number."""
        steps = self.training.steps
        if not steps:
            raise UnsupportedError("nothing says how many steps the optimizer has taken", hint=_LEAVE)
        first = next(iter(steps))
        odd = next((n for n, s in steps.items() if s != steps[first]), None)
        if odd is not None:
            raise ConflictError(
                f"`{first}` has taken {steps[first]:g} steps and `{odd}` {steps[odd]:g}: Megatron's optimizer has one"
                " number for all parameters",
                hint=_LEAVE,
            )
        if not math.isfinite(steps[first]) or steps[first] != int(steps[first]) or steps[first] < 0:
            raise ConflictError(f"the step of `{first}` is {steps[first]}, which is not a number of steps", hint=_LEAVE)
        return int(steps[first])

    def _groups(self, shapes: Mapping[str, tuple[int, ...]]) -> list[dict[str, Any]]:
        """Groups as Megatron makes them: experts apart, and no weight decay for biases and what has one axis."""
        of = {n: g for g in self.training.groups for n in g.parameters}
        found: dict[tuple[Any, ...], list[str]] = {}
        for name, shape in shapes.items():
            said = of[name].values if name in of else {}
            plain = len(shape) == 1 or name.endswith(".bias")
            usual = {"wd_mult": 0.0 if plain else 1.0, "lr_mult": 1.0, "is_decoupled_lr": False}
            usual["is_expert_parallel"] = self.chained and _EXPERTS in name
            key = tuple([usual[k] if k == "is_expert_parallel" else said.get(k, usual[k]) for k in _IDENTITY])
            found.setdefault(key, []).append(name)
        out = []
        for key in sorted(found, key=lambda k: (k[0], -float(k[1]), k[2:])):
            out.append(self._group(dict(zip(_IDENTITY, key, strict=True)), found[key], of))
        return out

    def _group(
        self, identity: dict[str, Any], members: Sequence[str], of: Mapping[str, base.ParamGroup]
    ) -> dict[str, Any]:
        """A group of Megatron's with what the source says of its members."""
        said: list[tuple[int, dict[str, Any]]] = []
        for name in members:
            values = self._taken(of[name].values) if name in of else {}
            known = next((i for i, (_, v) in enumerate(said) if v == values), None)
            if known is None:
                said.append((1, values))
            else:
                said[known] = (said[known][0] + 1, values)
        values = max(said, key=lambda s: s[0])[1]
        if len(said) > 1:
            self._note(
                "the source's optimizer treats parameters differently that are one group of Megatron's; the group has"
                " the values of most of them"
            )
        values = self._of_args() | values
        if lacking := [k for k in _ADAM if k not in values]:
            self._note(
                f"the source does not say {' and '.join(lacking)} of its optimizer: written are Megatron's defaults,"
                f" {', '.join(str(_ADAM[k]) for k in lacking)}"
            )
        return {"default_config": True, "bias_correction": True, **_ADAM, **values, **identity, "step": self.step}

    def _of_args(self) -> dict[str, Any]:
        """What the arguments of a source say."""
        said = {k: tuple([self.args.get(n) for n in names]) for k, names in _OF_ARGS.items()}
        known = {k: v for k, v in said.items() if all(type(n) in (int, float) for n in v)}
        return {k: v if k == "betas" else v[0] for k, v in known.items()}

    def _taken(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """What of a group is written."""
        left = ("params", STEP, *_IDENTITY)
        taken = {k: v for k, v in values.items() if k not in left and (self.megatron or k in _TORCHS)}
        if "betas" in taken:
            taken["betas"] = tuple(taken["betas"])
        if not self.megatron and "lr" in taken:
            top = values.get("initial_lr", taken["lr"])
            taken = {"max_lr": top, "min_lr": 0.0, **taken}
            self._note(f"groups have max_lr {top:g} and min_lr 0: start Megatron with --lr {top:g} --min-lr 0")
        return taken

    def _schedule(self) -> Mapping[str, Any]:
        """The state of Megatron's learning-rate schedule.

        Without one it would not load the optimizer at all; what is None is taken from the arguments of the run.
        """
        own = self.training.plain.get(_SCHEDULE)
        if isinstance(own, Mapping):
            return own
        samples = self.training.plain.get("consumed_train_samples", 0)
        self._note(
            "the source has no learning-rate schedule of Megatron's: load with --override-opt-param-scheduler;"
            f" the schedule begins at sample {samples}"
        )
        keys = ("max_lr", "min_lr", "lr_warmup_steps", "lr_decay_steps", "lr_decay_style")
        return {**dict.fromkeys(keys), "num_steps": samples}

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
