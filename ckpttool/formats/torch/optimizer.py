"""State of torch's optimizers: ``optimizer.pt`` or ``optimizer.bin`` beside a model, or a dict in the model's own file.

    {"state": {0: {"step": tensor, "exp_avg": tensor, ...}}, "param_groups": [{"params": [0, ...], "lr": 0.001, ...}]}

Keys are names of parameters, or numbers that run through the groups. Groups may say the names of their numbers
(``param_names``, torch 2.6). Without, each group has its parameters in the order of the model. So shapes and that order
tell which is which; where they leave two ways, nothing is read: a guess would give moments to the wrong weight.
Source: torch/optim/optimizer.py, torch/distributed/checkpoint/state_dict.py (2.13); transformers/trainer.py (5.23).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from ckpttool.containers.pickle import PickledObject, printable
from ckpttool.containers.torch_pickle import TorchTensor
from ckpttool.containers.torch_zip import TorchFile, read_torch
from ckpttool.core.catalog import StoredTensor
from ckpttool.core.dtypes import itemsize
from ckpttool.core.encodings import Encoding, Given
from ckpttool.core.files import DataFile
from ckpttool.core.geometry import contiguous_strides
from ckpttool.core.optimizer_states import number_bytes
from ckpttool.core.words import some
from ckpttool.errors import CkptError, ConflictError, CorruptError, UnsupportedError
from ckpttool.formats.base import ModelForm, ParamGroup, StoredCheckpoint, TensorShare, TrainingState
from ckpttool.formats.torch.numbered import AmbiguousNumber, Groups, Number, Shape, deal, unknown
from ckpttool.formats.torch.prefixes import strip_prefixes
from ckpttool.storage.listing import Listing

COMPONENT = "optimizer"
MASTER = "the master weight"
"""State name of a parameter's master weight; no optimizer has such a name."""
FILE = re.compile(r"optimizer(_\d+)?\.(pt|bin)\Z")
"""Files of transformers' Trainer, and of accelerate, which numbers the second and those after it."""
_SCHEDULE = re.compile(r"scheduler(_\d+)?\.(pt|bin)\Z")
_OBJECTS = re.compile(r"(rng_state(_\d+)?\.pth|random_states_\d+\.pkl|scaler\.pt|custom_checkpoint_\d+\.pkl)\Z")
"""Files of a trainer that hold no plain data."""
_STATE, _GROUPS = "state", "param_groups"
_STEPS = ("global_step", "step", "iteration", "iter_num")
"""Trainers' names for the number of steps taken."""
_DEPTH = 4

_BUFFER = re.compile(r"(.*\.)?(running_mean|running_var|num_batches_tracked|inv_freq)\Z")
"""Floating-point buffers that a state dict has beside parameters."""
_FLOATS = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
_OTHER_KINDS = {
    **dict.fromkeys(("exp_avg_sq_row", "exp_avg_sq_col", "row_var", "col_var"), "Adafactor (of rows and columns)"),
    **dict.fromkeys(("qmap1", "absmax1", "__bnb_optimizer_quant_state__"), "an 8-bit optimizer of bitsandbytes"),
    **dict.fromkeys(("old_dirs", "prev_flat_grad"), "L-BFGS, which has one state for all parameters"),
}  # fmt: skip
"""States by which optimizers are known whose state is not of the shape of parameters."""
_ALONE = "omit the optimizer with --only model"
_NAMED = (
    "save it with named parameters (torch.optim.AdamW(model.named_parameters())), give the model as pytorch_model.bin"
    f" in place of safetensors, or {_ALONE}"
)


class _TorchGroup(NamedTuple):
    params: list[Number]
    names: list[str]
    """Names of the parameters; [] where unknown."""
    values: dict[str, Any]


def is_optimizer(value: Any) -> bool:
    """Whether an object is what ``Optimizer.state_dict()`` gives, or the flattened form of ``get_state_dict``."""
    if not isinstance(value, dict):
        return False
    if isinstance(value.get(_STATE), dict) and isinstance(value.get(_GROUPS), list):
        return True
    heads = {k.partition(".")[0] if isinstance(k, str) and "." in k else "" for k in value}
    return _GROUPS in heads and heads <= {_STATE, _GROUPS}


def is_plain(value: Any) -> bool:
    """Whether it is made of numbers, texts and containers of these."""
    if isinstance(value, dict):
        return all(is_plain(k) and is_plain(v) for k, v in value.items())
    if type(value) in (list, tuple):
        return all(map(is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


# -- beside a model


def read_optimizer(stored: StoredCheckpoint, listing: Listing) -> None:
    """Add the state of the optimizer whose file lies beside a model, and what else its trainer resumes from.

    Where only the model's order or its form in memory can say whose state it is, ``StoredCheckpoint.unnamed`` waits
    for what the family knows.
    What cannot be read is in ``StoredCheckpoint.refused``, with a note: the model is whole without it.
    """
    found = [n for n in listing.names if FILE.match(n)]
    known = stored.training is not None or stored.refused  # by the model's own file
    if listing.single or known:
        return
    if not found:
        if any(map(_SCHEDULE.match, listing.names)):
            stored.training = _trainer(listing)
            stored.notes += left_note(stored.training.left)
        return
    try:
        if len(found) > 1:
            raise UnsupportedError(
                f"there are {len(found)} optimizers: {some(found)}",
                where=str(listing.root),
                hint=f"move away all but one, or {_ALONE}",
            )
        file = read_torch(listing.path(found[0]))
        state = OptimizerState(file, file.value, found[0], _trainer(listing))
    except CkptError as e:
        refuse(stored, found[0], e)
    else:
        state.add_to(stored)
        stored.known += tuple(n for n in listing.names if is_trainers(n) or _OBJECTS.match(n))


def is_trainers(name: str) -> bool:
    """Whether a file beside a model is one that ``read_optimizer`` reads."""
    return FILE.match(name) is not None or _SCHEDULE.match(name) is not None


class Trainer(NamedTuple):
    """The content of a file beside the model: the states of optimizers by their paths, and anything else at its top."""

    file: TorchFile
    optimizers: list[tuple[str, Any]]

    @classmethod
    def find(cls, file: TorchFile) -> Trainer | None:
        """None for a file without optimizers."""
        found = []
        level = [("", file.value)]
        for _ in range(_DEPTH):
            inner: list[tuple[str, Any]] = []
            for path, v in level:
                if path and is_optimizer(v):
                    found.append((path, v))
                elif isinstance(v, (dict, list)):
                    items = v.items() if isinstance(v, dict) else enumerate(v)
                    inner += [(f"{path}.{k}" if path else str(k), x) for k, x in items]
            level = inner
        return cls(file, found) if found else None

    def keys(self) -> set[str]:
        """Keys at the top of the file that are read."""
        plain = {str(k) for k, v in self._top() if is_plain(v)}
        return plain | ({path.split(".")[0] for path, _ in self.optimizers} if len(self.optimizers) == 1 else set())

    def add_to(self, stored: StoredCheckpoint, model: str) -> None:
        """Add the optimizer's state to the model that was read at the path ``model``; see ``read_optimizer``."""
        paths = [printable(path) for path, _ in self.optimizers]
        if len(paths) > 1:
            what = f"there are {len(paths)} optimizers: {some(paths)}"
            refuse(stored, paths[0], UnsupportedError(what, where=str(self.file.info.place), hint=_ALONE))
            return
        ((path, value),) = self.optimizers
        used = {path.split(".", 1)[0], model.split(".", 1)[0]}
        other = {str(k): v for k, v in self._top() if str(k) not in used}
        steps = [other[k] for k in _STEPS if type(other.get(k)) is int]
        training = TrainingState(
            step=steps[0] if steps else None,
            plain={k: v for k, v in other.items() if is_plain(v)},
            left=tuple([printable(k) for k, v in other.items() if not is_plain(v)]),
        )
        OptimizerState(self.file, value, paths[0], training, trusted=True).add_to(stored)

    def _top(self) -> Iterable[tuple[Any, Any]]:
        return self.file.value.items() if isinstance(self.file.value, dict) else ()


def _trainer(listing: Listing) -> TrainingState:
    """The trainer's step and its schedule. A file that cannot be read says nothing, and is named."""
    step, plain, left = None, {}, [n for n in listing.names if _OBJECTS.match(n)]
    for name in listing.names:
        if _SCHEDULE.match(name):
            try:
                value = read_torch(listing.path(name)).value
            except CkptError:
                value = None
            if isinstance(value, dict) and is_plain(value):
                plain["lr_scheduler"] = value
            else:
                left.append(name)
    try:
        said = listing.json("trainer_state.json").get("global_step")
        step = said if type(said) is int and said >= 0 else None
    except CkptError:
        left.append("trainer_state.json")
    return TrainingState(step=step, plain=plain, left=tuple(left))


def left_note(left: Sequence[str]) -> list[str]:
    """A note about what a trainer keeps that is no plain data."""
    return [f"skipped, not plain data: {some(left)}"] if left else []


def refuse(stored: StoredCheckpoint, what: str, why: CkptError) -> None:
    """Leave the optimizer out, with a note."""
    stored.refused[COMPONENT] = why
    stored.notes.append(f"the optimizer ({what}) is not read: {why.what}")


# -- whose state it is


@dataclass(slots=True)
class OptimizerState:
    """An optimizer in a file, not yet assigned to parameters."""

    file: TorchFile
    value: Any
    """``state`` and ``param_groups``."""
    what: str
    """Its place, for messages: a file's name, or the path in it."""
    training: TrainingState = field(default_factory=TrainingState)
    """Its trainer's values, without groups."""
    trusted: bool = False
    """The same program saved model and optimizer, so that the model is in its own order."""
    buffers: Collection[str] = ()
    """Names of the model's tensors that are no parameters."""

    def add_to(self, stored: StoredCheckpoint) -> None:
        """Give the states to the parameters of ``stored``; see ``read_optimizer``."""
        try:
            groups, states = _parts(self.value, self._where)
            model = [t for t in stored.tensors if t.component == "model"]
            try:
                names = self._names(groups, states, model, None)
            except ConflictError:
                names = None  # a form of the model that its family knows may fit
            if names is None:
                stored.unnamed = lambda forms: self._fit(stored, groups, states, forms)
            else:
                self._add(stored, groups, states, names, {})
        except CkptError as e:
            refuse(stored, self.what, e)

    def _fit(
        self,
        stored: StoredCheckpoint,
        groups: Sequence[_TorchGroup],
        states: Mapping[Number, Mapping[str, Any]],
        forms: Sequence[ModelForm],
    ) -> None:
        """Give the states to the parameters of the first form of the model that they fit."""
        stored.unnamed = None
        model = [t for t in stored.tensors if t.component == "model"]
        wrong: CkptError | None = None
        for form in forms:
            try:
                names = self._names(groups, states, model, form)
                self._add(stored, groups, states, names or {}, form.shares)
            except ConflictError as e:
                wrong = wrong or e
            except CkptError as e:
                wrong = e
                break
            else:
                return
        if wrong is not None:
            refuse(stored, self.what, wrong)

    @property
    def _where(self) -> str:
        return str(self.file.info.place)

    def _names(
        self,
        groups: Sequence[_TorchGroup],
        states: Mapping[Number, Mapping[str, Any]],
        model: Sequence[StoredTensor],
        form: ModelForm | None,
    ) -> dict[Number, str] | None:
        """The parameter of each number, as ``form`` calls it; None where no form is given and one is needed.

        Raises ConflictError where shapes do not fit, UnsupportedError where it is not clear.
        """
        shapes = {n: _shape(n, state, self._where) for n, state in states.items()}
        changed = form is not None and bool(form.shares)
        candidates = dict(form.shapes) if form is not None and changed else parameters_of(model, self.buffers)
        if all(g.names or all(isinstance(n, str) for n in g.params) for g in groups):
            known = candidates if changed else {t.name: t.shape for t in model}
            return _by_name(groups, shapes, known, self._where)
        numbers = [[(n, shapes.get(n)) for n in g.params] for g in groups]
        if isinstance(found := _by_shape(numbers, candidates, self._where), dict):
            return found
        saved = list(candidates)
        if form is None:
            return None
        in_files = not changed and (self.trusted or (is_state_dict(saved) and _one_after_another(model)))
        orders = [saved] if in_files else []
        orders += [[n for n in form.order if n in candidates]] if form.order else []
        answers = [deal(numbers, [(n, candidates[n]) for n in order], {*states}) for order in orders]
        if unfit := next((a for a in answers if isinstance(a, AmbiguousNumber) and a.unfit), None):
            raise _misfit(unfit.number, unfit.shape, self._where)
        sure = [a for a in answers if isinstance(a, dict)]
        if not states and (not sure or any(a != sure[0] for a in sure)):
            return {}
        if not sure or any(a != sure[0] for a in sure):
            found = next((a for a in answers if isinstance(a, AmbiguousNumber)), found)
            raise UnsupportedError(
                f"nothing says whose the state of number {found.number} is: it fits `{printable(found.first)}` and"
                f" `{printable(found.last)}`",
                where=self._where,
                hint=_NAMED,
            )
        return sure[0]

    def _add(
        self,
        stored: StoredCheckpoint,
        groups: Sequence[_TorchGroup],
        states: Mapping[Number, Mapping[str, Any]],
        names: Mapping[Number, str],
        shares: Mapping[str, Sequence[TensorShare]],
    ) -> None:
        """``shares`` are the tensors of the files in each parameter; {} where each parameter is one of them."""
        tensors, files = self._tensors(states, names, stored.files)
        tensors = [part for t in tensors for part in _parted(t, shares)]
        if tensors:
            stored.tensors, stored.files = [*stored.tensors, *tensors], files
        else:
            stored.notes.append(f"the optimizer ({self.what}) has no state yet")
        stored.notes += unknown([n for g in groups for n in g.params if type(n) is int and not g.names], names)
        kept, left = [], list(self.training.left)
        for i, g in enumerate(groups):
            left += [f"{_GROUPS}.{i}.{k}" for k, v in g.values.items() if not is_plain(v)]
            values = {k: v for k, v in g.values.items() if is_plain(v)}
            held = [names[n] for n in g.params if n in names]
            own = [s.name for name in held for s in shares.get(name, ())] if shares else held
            kept.append(ParamGroup(tuple(own), values))
        stored.training = TrainingState(tuple(kept), self.training.step, self.training.plain, tuple(left))
        stored.notes += left_note(left)

    def _tensors(
        self, states: Mapping[Number, Mapping[str, Any]], names: Mapping[Number, str], files: Sequence[DataFile]
    ) -> tuple[list[StoredTensor], list[DataFile]]:
        """Stored tensors, and ``files`` with those that they lie in."""
        out = []
        info = self.file.info
        numbered = [*files] if info in files else [*files, info]
        number, plain = numbered.index(info), len(numbered)
        given: dict[tuple[str, bytes], Given] = {}
        for n, state in states.items():
            for key, value in state.items():
                name = f"{names[n]}/{key}"
                if isinstance(value, TorchTensor):
                    t = self.file.place(value, name, number)
                    if key == "step" and prod(t.shape) == 1:  # [1] in older files
                        t = t._replace(shape=(), strides=None)
                else:
                    dtype, data = number_bytes(value)
                    at = given.setdefault((dtype, data), Given(8 * len(given), data.ljust(8, b"\0").hex())).start
                    t = StoredTensor(name, dtype, (), plain, at)
                own = ("master_weights", "") if key == MASTER else (COMPONENT, key)
                out.append(t._replace(name=names[n], component=own[0], state=own[1]))
        if given:
            numbered.append(info._replace(encoding=Encoding("given", self._where, list(given.values()))))
        return out, numbered


def _parted(t: StoredTensor, shares: Mapping[str, Sequence[TensorShare]]) -> list[StoredTensor]:
    """Split a state of a parameter in memory into states of the tensors of the files."""
    held = shares.get(t.name, ())
    if not held:
        return [t]
    if not t.shape:  # a number, which is that of all
        return [t._replace(name=s.name) for s in held]
    steps = t.strides or contiguous_strides(t.shape)
    out = []
    for s in held:
        at = t.offset + itemsize(t.dtype) * sum([a * b for a, b in zip(s.start, steps, strict=True)])
        strides = tuple([steps[a] for a in s.axes])
        plain = strides == contiguous_strides(s.shape)
        out.append(t._replace(name=s.name, shape=s.shape, offset=at, strides=None if plain else strides))
    return out


def _parts(value: Any, where: str) -> tuple[list[_TorchGroup], dict[Number, dict[str, Any]]]:
    """Groups, and the states of each parameter that has some. Raises ConflictError, CorruptError, UnsupportedError."""
    if not is_optimizer(value):
        raise UnsupportedError(
            f"there is no `{_STATE}` with `{_GROUPS}`, so it is not the state of an optimizer", where=where, hint=_ALONE
        )
    if _STATE not in value:
        value = _nested(value)
    groups, states = [], {}
    for g in value[_GROUPS]:
        params = g.get("params") if isinstance(g, dict) else None
        if not isinstance(params, (list, tuple)) or any(type(n) not in (int, str) for n in params):
            raise CorruptError(f"a group of `{_GROUPS}` has no list of parameters", where=where, hint=_ALONE)
        names = g.get("param_names") or []
        if names and (len(names) != len(params) or any(type(n) is not str for n in names)):
            raise ConflictError(
                f"`param_names` are not one for each of {len(params)} parameters", where=where, hint=_ALONE
            )
        values = {str(k): v for k, v in g.items() if k not in ("params", "param_names")}
        groups.append(_TorchGroup(list(params), list(names), values))
    known = [n for g in groups for n in g.params]
    if len(known) != len(set(known)):
        raise ConflictError("a parameter is in two groups of the optimizer", where=where, hint=_ALONE)
    for n, state in value[_STATE].items():
        held = state if isinstance(state, dict) else {}
        for key in held:
            if type(key) is not str:
                raise CorruptError(f"a state of `{printable(str(n))}` has no name", where=where, hint=_ALONE)
            if key in _OTHER_KINDS:
                raise UnsupportedError(f"this is the state of {_OTHER_KINDS[key]} (`{key}`)", where=where, hint=_ALONE)
        if n not in known:
            raise ConflictError(
                f"there is state of `{printable(str(n))}`, which is in no group", where=where, hint=_ALONE
            )
        if held := {k: v for k, v in held.items() if v is not None}:
            states[n] = held
    return groups, states


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The usual form of ``state.NAME.exp_avg`` and ``param_groups.NAME.lr``; equal values make a group."""
    states: dict[str, dict[str, Any]] = {}
    said: dict[str, dict[str, Any]] = {}
    for key, v in flat.items():
        (head, _, rest) = key.partition(".")
        name, _, what = rest.rpartition(".")
        (states if head == _STATE else said).setdefault(name, {})[what] = v
    groups: list[dict[str, Any]] = []
    for name, values in said.items():
        for g in groups:
            if {k: v for k, v in g.items() if k != "params"} == values:
                g["params"].append(name)
                break
        else:
            groups.append({"params": [name], **values})
    return {_STATE: states, _GROUPS: groups}


def _shape(number: Number, state: Mapping[str, Any], where: str) -> Shape | None:
    """Shape of the parameter whose states these are; None where they are single numbers.

    Raises UnsupportedError for states of other kinds, or of several shapes.
    """
    shapes: dict[Shape, str] = {}
    for key, v in state.items():
        if type(key) is not str or "/" in key or not key:
            raise UnsupportedError(f"a state is called `{printable(str(key))}`", where=where, hint=_ALONE)
        if isinstance(v, TorchTensor):
            if key != "step":
                shapes.setdefault(v.shape, key)
        elif type(v) not in (int, float):
            what = v.cls if isinstance(v, PickledObject) else type(v).__name__
            raise UnsupportedError(
                f"the state `{printable(key)}` of `{number}` is of the type {printable(what)}, not a plain tensor",
                where=where,
                hint=_ALONE,
            )
    large = {s: k for s, k in shapes.items() if prod(s) != 1} or {s: k for s, k in shapes.items() if s}
    if len(large) > 1:
        (a, first), (b, second) = list(large.items())[:2]
        raise UnsupportedError(
            f"the states of `{number}` have different shapes: `{printable(first)}` {list(a)}, `{printable(second)}`"
            f" {list(b)}",
            where=where,
            hint=f"only optimizers that keep state of each element are read; {_ALONE}",
        )
    return next(iter(large or shapes), None)


def _by_name(
    groups: Sequence[_TorchGroup], shapes: Mapping[Number, Shape | None], model: Mapping[str, Shape], where: str
) -> dict[Number, str]:
    said = {n: name for g in groups for n, name in zip(g.params, g.names or map(str, g.params), strict=True)}
    called = _called(said.values(), {said[n] for n in shapes}, model)
    names = {}
    for n, name in said.items():
        found = called.get(name)
        if found is None and n in shapes:
            raise ConflictError(
                f"the optimizer has state of `{printable(name)}`, which is not among the model's tensors",
                where=where,
                hint=f"it is of another model, or names differ; {_ALONE}",
            )
        if found is None:
            continue
        shape = shapes.get(n)
        if shape is not None and shape != model[found]:
            raise ConflictError(
                f"the optimizer's state of `{printable(name)}` is {list(shape)}, and the parameter is"
                f" {list(model[found])}",
                where=where,
                hint=f"the files are not of one checkpoint; {_ALONE}",
            )
        names[n] = found
    if len(set(names.values())) < len(names):
        raise ConflictError("two states of the optimizer are of one parameter", where=where, hint=_ALONE)
    return names


def _called(names: Iterable[str], needed: Collection[str], model: Collection[str]) -> dict[str, str]:
    """The model's names for the parameters of an optimizer, of which it has those that are ``needed``.

    The two may have been wrapped differently, and names may have one prefix on top.
    """
    theirs, ours = strip_prefixes(names)[0], {plain: n for n, plain in strip_prefixes(model)[0].items()}
    best: dict[str, str] = {}
    for left_out in range(_DEPTH):
        shorter = {n: ".".join(plain.split(".")[left_out:]) for n, plain in theirs.items()}
        found = {n: name if name in model else ours.get(name, "") for n, name in shorter.items()}
        found = {n: name for n, name in found.items() if name}
        if found.keys() >= set(needed):
            return found
        best = best or found
    return best


def parameters_of(tensors: Iterable[StoredTensor], buffers: Collection[str] = ()) -> dict[str, Shape]:
    """Tensors that may be parameters of an optimizer: tied ones once, no known buffers, no integers."""
    seen = set()
    out = {}
    for t in tensors:
        place = t.file, t.offset, t.shape, t.strides
        known = _BUFFER.match(t.name) or t.name in buffers
        if t.dtype in _FLOATS and not known and (place not in seen or not prod(t.shape)):
            seen.add(place)
            out[t.name] = t.shape
    return out


def _by_shape(numbers: Groups, candidates: Mapping[str, Shape], where: str) -> dict[Number, str] | AmbiguousNumber:
    """The only parameter of each shape. Raises ConflictError where there is none."""
    of: dict[Shape | None, list[str]] = {None: list(candidates)}
    for name, own in candidates.items():
        of.setdefault(own, []).append(name)
    out: dict[Number, str] = {}
    doubt = None
    for number, shape in (pair for group in numbers for pair in group):
        names = of.get(shape, [])
        if not names:
            raise _misfit(number, shape, where)
        if len(names) > 1:
            doubt = doubt or AmbiguousNumber(number, shape, names[0], names[-1])
        out[number] = names[0]
    if doubt is None and len(set(out.values())) < len(out):
        raise _misfit(next(reversed(out)), None, where)
    return doubt or out


def _misfit(number: Number, shape: Shape | None, where: str) -> ConflictError:
    held = f"state {list(shape)}" if shape is not None else "a number"
    return ConflictError(
        f"the optimizer has {held} for its parameter {number}, and the model has no parameter left for it",
        where=where,
        hint=f"it is of another model, or holds fused parameters that the model's files hold apart; {_ALONE}",
    )


def _one_after_another(tensors: Iterable[StoredTensor]) -> bool:
    """Whether shards continue each other: writers put a tensor that is too large for one before those it came after."""
    held = list(Counter(t.file for t in tensors).values())
    return 1 not in held[:-1]


def is_state_dict(names: Sequence[str]) -> bool:
    """Whether names may be in the order in which modules have their parameters, and not in one that a program made.

    Modules follow one another whole, numbered ones count up, a weight comes before its bias. Names that are sorted tell
    nothing.
    """
    if len(names) > 2 and list(names) == sorted(names):
        return False
    open_: list[str] = [""]
    closed: set[str] = set()
    biased: set[str] = set()
    numbered: dict[str, int] = {}
    for name in names:
        *modules, last = name.split(".")
        paths = [".".join(modules[: i + 1]) for i in range(len(modules))]
        kept = 1
        while kept <= len(paths) and kept < len(open_) and open_[kept] == paths[kept - 1]:
            kept += 1
        closed.update(open_[kept:])
        open_ = ["", *paths]
        for i, path in enumerate(open_[kept:], kept):
            if path in closed:
                return False
            if (part := modules[i - 1]).isdecimal():
                if numbered.get(open_[i - 1], -1) >= int(part):
                    return False
                numbered[open_[i - 1]] = int(part)
        biased.update([open_[-1]] if last == "bias" else [])
        if last == "weight" and open_[-1] in biased:
            return False
    return True
