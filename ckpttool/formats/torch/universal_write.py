"""Writing DeepSpeed's universal checkpoints, so that ``load_universal`` of every ZeRO stage loads them.

Stages 1 and 2 look for ``mp_rank_00_model_states.pt``, stage 3 for ``zero_pp_rank_0_mp_rank_00_model_states.pt``: both
are written. All restore parameters, frozen ones and buffers excepted, from ``zero/``, whatever else is in these files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import Any

from ckpttool.containers.pickle_write import Hole, PickledCall
from ckpttool.containers.torch_write import lay_out_torch
from ckpttool.core.catalog import RankTensor
from ckpttool.core.optimizer_states import STEP
from ckpttool.core.words import count, some
from ckpttool.errors import UnsupportedError
from ckpttool.formats import base
from ckpttool.formats.torch.zero_files import STRUCTURE

POINTER = "latest_universal"
OPTIMIZER = "optimizer_state.pt"
MASTER = "fp32"
"""The file of a parameter's master weights."""
VERSION = "0.19.8"
"""DeepSpeed's, whose files these are."""
_COUNTERS = ("global_steps", "global_samples", "skipped_steps", "lr_scheduler", "loss_scaler")
_TAKEN = STRUCTURE | {"optimizer"}
"""Keys that a trainer's own values cannot have beside DeepSpeed's."""
_WIDENED = frozenset({"F32", "BF16", "F16"})
"""Dtypes of which every number is one of float32."""
_STAGE3 = frozenset({"exp_avg", "exp_avg_sq", STEP})
"""States that stage 3 asks for."""
_MOST_GROUPS = 64
_LEAVE = "omit the optimizer: --only model --only master_weights"


def write_universal(request: base.WriteRequest) -> base.FileLayout:
    """A directory for each parameter that is trained, model states, and the groups of the optimizer.

    Raises UnsupportedError for a source without master weights, and for names that are no names of directories.
    """
    files = _Files(request)
    held = list(request.ranks[0])
    model = {t.name: t for t in held if t.component == "model"}
    masters = {t.name: t for t in held if t.component == "master_weights"}
    states: dict[str, list[RankTensor]] = {}
    for t in held:
        if t.component == "optimizer":
            states.setdefault(t.name, []).append(t)
    grouped = {n for g in (request.training.groups if request.training else ()) for n in g.parameters}
    # Where others have masters, a narrow weight that has neither them nor states is frozen, whatever group names it.
    grouped &= {n for n, t in model.items() if t.dtype == "F32" or (t.dtype in _WIDENED and not masters)}
    trained = [n for n in dict.fromkeys((*model, *masters, *states)) if n in states or n in masters or n in grouped]
    for name in trained:
        own = model.get(name)
        if name not in masters and own is not None and own.dtype in _WIDENED:
            masters[name] = own._replace(dtype="F32", part=1)  # the parameter is its own master, and is written twice
            held.append(masters[name])
    made = any(model[n].dtype != "F32" for n, t in masters.items() if t.part)
    _check(trained, masters, states)
    groups = _groups(request.training, trained)
    common = _model_states(request.training, [{n: masters[n].whole for n in names} for names, _ in groups])
    tag = files.tag
    files.add("mp_rank_00_model_states.pt", {"module": {n: Hole(t.dtype, t.shape) for n, t in model.items()}} | common,
              {("module", n): t for n, t in model.items()})  # fmt: skip
    files.add("zero_pp_rank_0_mp_rank_00_model_states.pt", {"module": {}} | common, {})
    for name in trained:
        for t in (masters[name], *states.get(name, ())):
            if t.component == "optimizer" and t.state == STEP:
                files.add(f"zero/{name}/{STEP}.pt", Hole(t.dtype, t.shape), {(): t})
            else:
                state = t.state if t.component == "optimizer" else MASTER
                files.add(f"zero/{name}/{state}.pt", {"cat_dim": 0, "param": Hole(t.dtype, t.shape)}, {("param",): t})
    step = next((t for of in states.values() for t in of if t.state == STEP), None)
    if step is not None:
        step = step._replace(part=1)  # stage 3 takes it from the file of the groups
        held.append(step)
    _optimizer_state(files, groups, step)
    notes = [_MASTERS_MADE] if made else []
    lost = [k for k in (request.training.plain if request.training else ()) if k in _TAKEN]
    notes += [f"left out, because DeepSpeed calls its own values so: {some(lost)}"] if lost else []
    notes += [] if request.training and request.training.groups else [_NO_GROUPS]
    notes += _what_loads(trained, states)
    return base.FileLayout(
        files.files,
        [files.places],
        notes,
        [list(range(len(files.files)))],
        ranks=[held],
        generated=((POINTER, tag.encode()),),
        usage='engine.load_checkpoint({text})  # "load_universal": true in "checkpoint" of DeepSpeed\'s config',
    )


_MASTERS_MADE = "master weights that the source does not have are float32 of the model weights (exact)"
_NO_GROUPS = "the source has no param_groups: DeepSpeed's engine keeps those that it is started with"


class _Files:
    """The files of one tag, and where each tensor goes."""

    def __init__(self, request: base.WriteRequest) -> None:
        step = request.training.step if request.training else None
        self.tag = f"global_step{step}_universal" if step is not None else "universal"
        self.files: list[base.OutFile] = []
        self.places: dict[str, tuple[int, int]] = {}

    def add(self, name: str, value: Any, holes: Mapping[tuple[Any, ...], RankTensor]) -> None:
        """A file of torch.save; ``holes`` are the tensors at paths of the value."""
        laid = lay_out_torch(value, "archive")
        at = len(self.files)
        self.files.append(base.OutFile(f"{self.tag}/{name}", laid.size, laid.literals, laid.checksums))
        self.places |= {t.slot: (at, laid.offsets[path]) for path, t in holes.items()}


def _check(
    trained: Sequence[str], masters: Mapping[str, RankTensor], states: Mapping[str, Sequence[RankTensor]]
) -> None:
    if lacking := [n for n in trained if n not in masters]:
        raise UnsupportedError(
            f"there is no master weight of `{lacking[0]}`, which DeepSpeed trains on from",
            hint="a universal checkpoint needs the master weights of the source: omit --only, or name"
            " master_weights too",
        )
    if not trained:
        raise UnsupportedError(
            "a universal checkpoint is the state of training, and the source has only a model",
            hint="--to hf writes a model; DeepSpeed starts training from that",
        )
    for name in trained:
        if not _is_file_name(name) or name == OPTIMIZER:
            raise UnsupportedError(f"`{name}` cannot be the name of a directory", hint="rename it: --rename OLD=NEW")
    for name, of in states.items():
        for t in of:
            if t.state in ("", MASTER) or not _is_file_name(f"{t.state}.pt"):
                raise UnsupportedError(f"the state `{t.state}` of `{name}` cannot be the name of a file", hint=_LEAVE)


def _what_loads(trained: Sequence[str], states: Mapping[str, Sequence[RankTensor]]) -> list[str]:
    """A note where DeepSpeed does not load it in every stage, or every run."""
    if not states:
        return ["there is no state of the optimizer: stages 1 and 2 of DeepSpeed load that, stage 3 does not"]
    if lacking := [n for n in trained if n not in states]:
        which = f"{count(len(lacking), 'parameter')} without state of the optimizer ({some(lacking)})"
        return [f"{which}: DeepSpeed only loads a run in which they are frozen"]
    held = [{t.state for t in of} for of in states.values()]
    return [] if all(of >= _STAGE3 for of in held) else ["stage 3 of DeepSpeed only loads the state of Adam"]


def _is_file_name(name: str) -> bool:
    try:
        size = len(name.encode("utf-8"))
    except UnicodeEncodeError:  # half a character
        return False
    return 0 < size < 256 and name not in (".", "..") and not {"/", "\0"} & set(name)


def _groups(training: base.TrainingState | None, trained: Iterable[str]) -> list[tuple[list[str], dict[str, Any]]]:
    """Trained parameters of each group in its order, and the group's values; what is in none comes last."""
    left = dict.fromkeys(trained)
    out = []
    for group in training.groups if training else ():
        names = [n for n in group.parameters if n in left]
        for name in names:
            del left[name]
        out.append((names, dict(group.values)))
    return [*out, (list(left), {})] if left else out


def _model_states(
    training: base.TrainingState | None, shapes: Sequence[Mapping[str, tuple[int, ...]]]
) -> dict[str, Any]:
    plain = dict(training.plain) if training else {}
    steps = training.step if training else None
    if steps is None:  # no trainer says it: as many as the optimizer took
        taken = training.steps.values() if training else ()
        steps = int(max((n for n in taken if isfinite(n)), default=0))
    own = {
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [{n: PickledCall("torch", "Size", (shape,)) for n, shape in group.items()} for group in shapes],
        "frozen_param_shapes": None,
        "shared_params": {},
        "frozen_param_fragments": None,
        "data_sampler": None,
        "random_ltd": None,
        "sparse_tensor_module_names": [],
        "lr_scheduler": plain.get("lr_scheduler"),
        "skipped_steps": plain.get("skipped_steps", 0),
        "global_steps": plain.get("global_steps", steps),
        **({"global_samples": plain["global_samples"]} if "global_samples" in plain else {}),
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": VERSION,
    }
    return own | {k: v for k, v in plain.items() if k not in _COUNTERS and k not in _TAKEN}


def _optimizer_state(
    files: _Files, groups: Sequence[tuple[list[str], dict[str, Any]]], step: RankTensor | None
) -> None:
    """Stages 1 and 2 read ``param_groups`` and ``ds_version``, stage 3 ``optimizer_state_dict``."""
    written = [{**values, "params": [i]} for i, (_, values) in enumerate(groups)]
    # Stages 1 and 2 restore as many groups as are listed, and no others, whatever is in the parameters' files.
    spare: list[dict[str, Any]] = [{"params": []} for _ in range(_MOST_GROUPS - len(written))]
    state = {} if step is None else {0: {STEP: Hole(step.dtype, step.shape)}}
    value = {
        "ds_version": VERSION,
        "param_groups": [*written, *spare],
        "optimizer_state_dict": {"state": state, "param_groups": written},
    }
    holes = {} if step is None else {("optimizer_state_dict", "state", 0, STEP): step}
    files.add(f"zero/{OPTIMIZER}", value, holes)
