"""The state of Megatron's distributed optimizer in legacy files.

    model_optim_rng.pt   optimizer: {"optimizer": {"param_groups": [...]}}, the step in each group, and no parameters
    distrib_optim.pt     {0: {(bfloat16, float32): {"param", "exp_avg", "exp_avg_sq", "numel_unpadded"}}, ...}: for each
                         virtual stage and dtype of parameters three flat vectors of float32, laid out by buffers.py

With expert parallelism there are two optimizers: both files have a list, first what all of data parallelism shares,
then the experts. Of the ranks that hold the same parameters the first one has their vectors, the others have None.

Source: optimizer/distrib_optimizer.py (``load_parameter_state_from_dp_zero``, ``load_state_dict``), optimizer.py
(``ChainedOptimizer``) and distributed/distributed_data_parallel.py of Megatron
Core 0.16.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from ckpttool.containers.pickle import Global
from ckpttool.containers.pickle_write import Hole
from ckpttool.containers.torch_pickle import TORCH_DTYPE
from ckpttool.core.catalog import RankTensor
from ckpttool.core.mesh import Coords
from ckpttool.errors import UnsupportedError
from ckpttool.formats import base
from ckpttool.formats.megatron.buffers import offsets
from ckpttool.formats.megatron.common_state import groups_of
from ckpttool.formats.megatron.groups import is_expert

_MOMENTS = ("exp_avg", "exp_avg_sq")
_VECTORS = ("param", *_MOMENTS)
_LEAVE = "omit the optimizer: --only model"
_NAMED = f"write --to megatron-dist, whose files name the parameters that have state; or {_LEAVE}"
_ONE_BUCKET = {"overlap_grad_reduce": False, "ddp_bucket_size": None, "ddp_num_buckets": None}
"""Layout of the vectors; with parameters of other sizes than multiples of 64 elements it makes a difference."""
_WIDENED = "master weights that the source does not have are float32 of the model weights (exact)"


class Vectors(NamedTuple):
    """The content of a rank's ``distrib_optim.pt``."""

    value: Any
    inside: list[tuple[tuple[Any, ...], RankTensor, int]]
    """(path of a vector in the value, tensor, element of the vector at which it begins)."""
    sizes: dict[tuple[Any, ...], int]
    """Bytes of each vector."""


class LegacyOptimizerWriter:
    """The optimizer of a save."""

    def __init__(
        self, request: base.WriteRequest, shapes: Mapping[str, tuple[int, ...]], args: Mapping[str, Any]
    ) -> None:
        """``shapes`` are those of all parameters that are trained, by canonical name; ``args`` are the arguments of the
        save.

        Raises UnsupportedError for parameters whose steps differ, or are not known.
        """
        self.mesh = request.mesh
        self.chained = self.mesh.ep > 1 and any(map(is_expert, shapes))
        self.wide = bool(args.get("accumulate_allreduce_grads_in_fp32", not args["fp16"]))
        """Gradients are summed in float32, which is what --bf16 does."""
        groups = groups_of(request.training, shapes, experts_apart=self.chained, args=args)
        states = [{"optimizer": {"param_groups": of}} for of in groups.optimizers]
        self.plain = states if self.chained else states[0]
        """The optimizer's part of ``model_optim_rng.pt``."""
        self.args = {"accumulate_allreduce_grads_in_fp32": self.wide, **_ONE_BUCKET}
        """Arguments of a run that loads it."""
        self.notes = [*groups.notes, "random number generators are not written: load with --no-load-rng"]
        self.made = False

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
        """Build the content of a rank's file; ``order`` are the parameters of each of its chunks, in the model's order,
        ``alone`` those that another stage has, too.

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
                mine = [n for n in names if expert is None or is_expert(n) is expert]
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
        """The dtypes of a buffer's parameters and of their summed gradients."""
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
            why = "some of them have none (frozen?)" if found is None else f"this is {found.dtype}"
            raise UnsupportedError(
                f"`{name}`: Megatron's optimizer keeps `{moment}` of all parameters in float32, and {why}",
                where=name,
                hint=_NAMED if found is None else _LEAVE,
            )
        return found
