"""Optimizer state in the words of the software that will read it.

    torch    exp_avg    exp_avg_sq   step              F32 []
    Paddle   moment1_0  moment2_0    beta1_pow_acc_0   F32 [1], and beta2_pow_acc_0

The averages are the same tensors under other names, where they are Adam's: others have one of them (Adamax, Lion), or
another kind of momentum (RMSprop, Muon). A step is worked out from the powers of the betas and the other
way round, while planning: what comes out is a number in no file (``encodings.Given``). The power after n steps is beta
multiplied n times with beta, each product rounded, so the step is the one n that gives exactly the stored bits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ckpttool.checkpoint import Checkpoint
from ckpttool.core.catalog import Catalog, Key, LogicalTensor, StoredTensor, whole_tensor
from ckpttool.core.dtypes import itemsize, numpy_dtype
from ckpttool.core.encodings import Encoding, Given
from ckpttool.core.files import DataFile
from ckpttool.core.optimizer_states import BETA_POWERS, PADDLE, STEP, TORCH
from ckpttool.core.words import count, some
from ckpttool.errors import ConflictError, IncompleteError, UnsupportedError, VerifyError
from ckpttool.execute.compare import tensor_reads
from ckpttool.execute.files import Medium
from ckpttool.execute.remote import open_medium
from ckpttool.formats.base import Capabilities, TrainingState
from ckpttool.planning.relate import DerivedTensor
from ckpttool.targeting.target import Target

Betas = tuple[float, float]
"""Adam's betas: how fast its two averages forget."""

MOST_STEPS = 1 << 24
"""Up to which torch counts in float32."""

USUAL = ((0.9, 0.999), (0.9, 0.95), (0.9, 0.98), (0.9, 0.99), (0.95, 0.999))
"""Betas that an error may suggest, where they explain the powers exactly."""

_ADAM = frozenset({"exp_avg", "exp_avg_sq"})
"""What a parameter has both of, if its optimizer is Adam or a relative whose state means the same."""
_MOMENTUM = "momentum_buffer"
_SGD = "dampening"
"""What groups of torch's SGD say, and those of no other optimizer with a momentum."""

_ACCUMULATOR = re.compile(r"\w+_\d+")
"""Names that Paddle's optimizers give to their state."""

_LEAVE = "omit the optimizer with --only model --only master_weights"


class Powers:
    """A beta's power after 0, 1, 2, ... steps, as Paddle's kernels have it."""

    def __init__(self, beta: float, dtype: str) -> None:
        kind = numpy_dtype(dtype).type
        self._beta = kind(beta)
        self._known: np.ndarray[Any, np.dtype[Any]] = np.array([self._beta])
        self._smallest_normal = np.finfo(kind).smallest_normal

    @property
    def _final(self) -> bool:
        """Whether all further powers are the last one that is known."""
        last = self._known[-1]
        return bool(last * self._beta == last)

    def _grow(self) -> bool:
        if self._final or len(self._known) > MOST_STEPS:
            return False
        factors = np.full(max(1024, len(self._known)) + 1, self._beta)
        factors[0] = self._known[-1]
        with np.errstate(under="ignore"):
            self._known = np.concatenate([self._known, np.multiply.accumulate(factors)[1:]])
        return True

    def after(self, steps: int) -> Any:
        """The power, of numpy's type. Raises UnsupportedError for more steps than are counted."""
        while len(self._known) <= steps:
            if not self._grow():
                if not self._final:
                    raise UnsupportedError(f"{steps:,} steps are more than {MOST_STEPS:,}")
                return self._known[-1]
        return self._known[steps]

    def steps(self, power: float) -> tuple[int, float] | None:
        """The least and the largest number of steps after which this is the power; None where there is none."""
        if not power:  # some devices have no numbers below the normal ones
            power, least = 0.0, self._smallest_normal
        else:
            least = power
        while self._known[-1] >= min(power, least) and self._grow():
            pass
        rising = self._known[::-1]
        if not power:
            first = len(rising) - int(np.searchsorted(rising, least, "left"))
            return first, math.inf
        first, stop = (len(rising) - int(np.searchsorted(rising, power, side)) for side in ("right", "left"))
        if first == stop:
            return None
        return first, math.inf if stop == len(rising) else stop - 1


@dataclass(slots=True)
class Translation:
    """How optimizer state was translated."""

    before: Catalog
    file: int
    """Number of the file of what was worked out."""
    betas: Mapping[str, Betas]
    """Betas of the computed states, by parameter."""
    moved: dict[str, str] = field(default_factory=dict)
    """Parameter -> the one whose state it got, which is tied to it."""

    def check(self, views: Mapping[str, DerivedTensor], written: Catalog) -> None:
        """Compare what was worked out with the source, by logarithms. ``written`` has the names of ``views``.

        Raises VerifyError.
        """
        with open_medium() as medium:
            for name, view in views.items():
                made = view.same
                if made is None or not made.pieces or made.pieces[0].stored.file != self.file:
                    continue
                parameter, state = self.moved.get(made.key.name, made.key.name), made.key.state
                found = read_number(medium, written, written[name])
                for beta, power in zip(self.betas[parameter], BETA_POWERS, strict=True):
                    other = self.before.tensors.get(Key(parameter, "optimizer", STEP if state != STEP else power))
                    if other is None or state not in (STEP, power):
                        continue
                    value = read_number(medium, self.before, other)
                    steps, held = (found, value) if state == STEP else (value, found)
                    if not _agree(float(np.float32(beta)), steps, held):
                        raise VerifyError(
                            f"`{name}` is {found} in the output, and `{other.key}` is {value} in the source"
                            f" with beta {beta}",
                            hint="nothing was kept. This is a fault of ckpttool: please report it with the command",
                        )


def _agree(beta: float, steps: float, power: float) -> bool:
    """Whether a power is beta ** (steps + 1), but for what rounding may have done."""
    smallest = 2.0**-126
    if power < smallest or not 0 < beta < 1:
        return beta ** (steps + 1) < 2 * smallest if power < smallest else beta == power
    rounding = (steps + 1) * 2.0**-24 / (1 - beta)
    return abs(math.log(power) / math.log(beta) - (steps + 1)) <= 0.5 + rounding


def translated(
    source: Checkpoint, target: Target, capabilities: Capabilities, notes: list[str]
) -> tuple[Checkpoint, Translation | None]:
    """The checkpoint with its optimizer's state as ``capabilities.states`` calls it, and what was done for that.

    Raises IncompleteError where nothing says the betas, ConflictError where the powers are of others, UnsupportedError
    where they have become too small to tell the step.
    """
    if not capabilities.states or not target.resumes(capabilities):
        return source, None
    with open_medium() as medium:
        work = _Translator(source, target.betas, medium)
        tensors = work.run(capabilities.states)
    notes += work.notes
    before = source.catalog
    source = _counted(source, work.counted)
    if not work.files:
        return replace(source, catalog=Catalog(before.files, tensors, before.aliases)), None
    file = len(before.files)
    tensors = {k: t if k in work.made else _behind(t, file) for k, t in tensors.items()}
    changed = replace(source, catalog=Catalog([*before.files, *work.files], tensors, before.aliases))
    return changed, Translation(before, file, work.used)


def _counted(source: Checkpoint, steps: set[int]) -> Checkpoint:
    """The checkpoint with the step of its trainer, where only its optimizer says it."""
    training = source.stored.training
    if len(steps) != 1 or (training is not None and training.step is not None):
        return source
    training = replace(training or TrainingState(), step=next(iter(steps)))
    return replace(source, stored=replace(source.stored, training=training))


def _behind(t: LogicalTensor, file: int) -> LogicalTensor:
    """The tensor behind one more file: what is computed has the numbers from ``file`` on."""
    if all(p.stored.file < file for p in t.pieces):
        return t
    pieces = [p._replace(stored=p.stored._replace(file=p.stored.file + 1)) for p in t.pieces]
    return replace(t, pieces=tuple(pieces))


@dataclass(slots=True)
class _Translator:
    source: Checkpoint
    asked: Betas | None
    medium: Medium
    used: dict[str, Betas] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    files: list[DataFile] = field(default_factory=list)
    """One, where something was worked out."""
    made: set[Key] = field(default_factory=set)
    """Those of the tensors that it holds."""
    left: list[str] = field(default_factory=list)
    counted: set[int] = field(default_factory=set)
    """Steps that became powers."""
    _held: dict[str, set[str]] = field(default_factory=dict)
    """States of each parameter."""
    _no_sgd: set[str] = field(default_factory=set)
    """Parameters of groups of other optimizers."""
    _betas: dict[str, Betas] = field(default_factory=dict)
    _powers: dict[tuple[float, str], Powers] = field(default_factory=dict)
    _given: dict[bytes, Given] = field(default_factory=dict)

    def run(self, wanted: str) -> dict[Key, LogicalTensor]:
        """The tensors, in their order."""
        self._betas = betas_of(self.source.stored.training, self.asked, str(self.source.path))
        for key in self.source.catalog.tensors:
            if key.component == "optimizer":
                self._held.setdefault(key.name, set()).add(TORCH.get(key.state, key.state))
        training = self.source.stored.training
        for group in training.groups if training is not None else ():
            if group.values and _SGD not in group.values:  # universal checkpoints have groups that say nothing
                self._no_sgd.update(group.parameters)
        out: dict[Key, LogicalTensor] = {}
        become = {"paddle": self._for_paddle, "torch": self._for_torch}[wanted]
        for key, t in self.source.catalog.tensors.items():
            for new in become(key, t) if key.component == "optimizer" else (t,):
                if out.setdefault(new.key, new) is not new:
                    raise ConflictError(
                        f"`{key.name}` has both torch's and Paddle's state: `{new.key.state}` is there twice",
                        where=str(self.source.path),
                    )
        if self.left:
            self.notes.append(f"left out, because Paddle's optimizers have no such state: {some(self.left)}")
        return out

    def _for_paddle(self, key: Key, t: LogicalTensor) -> Iterator[LogicalTensor]:
        if (key.state == STEP or key.state in PADDLE) and not self._means_the_same(key):
            self.left.append(str(key))
        elif key.state == STEP:
            steps, dtype = self._number(t), self._dtype(key)
            if not math.isfinite(steps) or steps != int(steps) or steps < 0:
                raise ConflictError(
                    f"`{key}` is {steps}, which is not a number of steps", where=str(self.source.path), hint=_LEAVE
                )
            self.counted.add(int(steps))
            for state, beta in zip(BETA_POWERS, self._known_betas(key, {}), strict=True):
                power = self._of(beta, dtype).after(int(steps))
                yield self._worked_out(t, state, dtype, (1,), power.tobytes())
        elif key.state in PADDLE:
            yield replace(t, key=key._replace(state=PADDLE[key.state]))
        elif not key.state or _ACCUMULATOR.fullmatch(key.state):
            yield t
        else:
            self.left.append(str(key))

    def _means_the_same(self, key: Key) -> bool:
        """Whether a state of torch's is what Paddle's of the same kind is."""
        held = self._held[key.name]
        if key.state != _MOMENTUM:
            return held >= _ADAM
        return held <= {_MOMENTUM, STEP} and key.name not in self._no_sgd

    def _for_torch(self, key: Key, t: LogicalTensor) -> Iterator[LogicalTensor]:
        if key.state in BETA_POWERS:
            first = next(s for s in BETA_POWERS if key._replace(state=s) in self.source.catalog.tensors)
            if key.state == first:
                yield self._step(key, t)
        else:
            yield replace(t, key=key._replace(state=TORCH.get(key.state, key.state)))

    def _step(self, key: Key, t: LogicalTensor) -> LogicalTensor:
        """The step of a parameter, from those of its powers that there are."""
        found = {s: self.source.catalog.tensors.get(key._replace(state=s)) for s in BETA_POWERS}
        powers = {s: (self._number(p), p.dtype) for s, p in found.items() if p is not None}
        betas = dict(zip(BETA_POWERS, self._known_betas(key, powers), strict=True))
        first, last = self._steps(betas, powers)
        training = self.source.stored.training
        if first < last and training is not None and training.step is not None and first <= training.step <= last:
            first = last = training.step  # what the trainer itself says, and its powers allow
        said = ", ".join(f"{s} {v:.9g}" for s, (v, _) in powers.items())
        where = [str(self.source.path), f"{key.name}: {said}"]
        if first > last:
            raise ConflictError(
                "the powers of the betas are not those of betas"
                f" {','.join(f'{b:g}' for b in betas.values())} after any number of steps",
                where=where,
                hint=self._suggest(powers) or f"give the betas of the training run with --betas; or {_LEAVE}",
            )
        if first < last:
            raise UnsupportedError(
                f"the powers of the betas have become too small to tell the step: it is {first:,} or more",
                where=where,
                hint=_LEAVE,
            )
        return self._worked_out(t, STEP, "F32", (), np.float32(first).tobytes())

    def _steps(self, betas: Mapping[str, float], powers: Mapping[str, tuple[float, str]]) -> tuple[int, float]:
        """The least and the largest number of steps that explain all of the powers; the least is larger for none."""
        first, last = 0, math.inf
        for state, (power, dtype) in powers.items():
            low, high = self._of(betas[state], dtype).steps(power) or (1, 0)
            first, last = max(first, low), min(last, high)
        return first, last

    def _suggest(self, powers: Mapping[str, tuple[float, str]]) -> str:
        for betas in USUAL:
            first, last = self._steps(dict(zip(BETA_POWERS, betas, strict=True)), powers)
            if powers and first == last:
                return f"pass --betas {betas[0]:g},{betas[1]:g}, which fits {count(first, 'step')}"
        return ""

    def _known_betas(self, key: Key, powers: Mapping[str, tuple[float, str]]) -> Betas:
        betas = self.asked or self._betas.get(key.name)
        if betas is None:
            raise IncompleteError(
                f"the checkpoint does not say the betas of Adam, and `{key.state}` cannot be translated without them",
                where=[str(self.source.path), key.name],
                hint=f"{self._suggest(powers) or 'pass them: --betas 0.9,0.999'}; or {_LEAVE}",
            )
        return self.used.setdefault(key.name, betas)

    def _of(self, beta: float, dtype: str) -> Powers:
        if (beta, dtype) not in self._powers:
            self._powers[beta, dtype] = Powers(beta, dtype)
        return self._powers[beta, dtype]

    def _dtype(self, key: Key) -> str:
        """Dtype of Paddle's powers: float64 for float64 parameters."""
        moment = self.source.catalog.tensors.get(key._replace(state="exp_avg"))
        return "F64" if moment is not None and moment.dtype == "F64" else "F32"

    def _number(self, t: LogicalTensor) -> float:
        return read_number(self.medium, self.source.catalog, t)

    def _worked_out(
        self, was: LogicalTensor, state: str, dtype: str, shape: tuple[int, ...], data: bytes
    ) -> LogicalTensor:
        if not self.files:
            file = self.source.catalog.files[was.pieces[0].stored.file]
            self.files.append(file._replace(encoding=Encoding("given", str(file.place))))
        (file,) = self.files
        encoding = file.encoding
        if data not in self._given and encoding is not None:
            self._given[data] = Given(encoding.size, data.hex())
            encoding.parts.append(self._given[data])
        key = was.key._replace(state=state)
        self.made.add(key)
        number, offset = len(self.source.catalog.files), self._given[data].start
        return whole_tensor(StoredTensor(key.name, dtype, shape, number, offset, 0, None, *key[1:]), key)


def betas_of(training: TrainingState | None, asked: Betas | None, where: str) -> dict[str, Betas]:
    """The betas of each parameter that has some by its group. Raises ConflictError where ``asked`` are others."""
    out: dict[str, Betas] = {}
    for group in training.groups if training is not None else ():
        said = group.values.get("betas")
        if not isinstance(said, (tuple, list)) or len(said) != len(BETA_POWERS):
            continue
        if any(type(b) not in (int, float) or not 0 <= b < 1 for b in said):  # no betas of anything
            continue
        betas = float(said[0]), float(said[1])
        if asked not in (None, betas):
            raise ConflictError(
                f"--betas {asked[0]:g},{asked[1]:g} contradicts the checkpoint, whose optimizer has"
                f" {betas[0]:g},{betas[1]:g}",
                where=where,
                hint="drop --betas: they are read from the checkpoint",
            )
        out |= dict.fromkeys(group.parameters, betas)
    return out


def steps_of(catalog: Catalog, views: Mapping[str, DerivedTensor]) -> dict[str, float]:
    """The step of each parameter, read while planning. Raises what ``read_number`` raises."""
    tensors = {name: view.parts[0].source for name, view in views.items()}
    with open_medium() as medium:
        medium.announce([r for t in tensors.values() for r in tensor_reads(catalog, t, replicas=True).ranges])
        return {name: read_number(medium, catalog, tensor) for name, tensor in tensors.items()}


def read_number(medium: Medium, catalog: Catalog, tensor: LogicalTensor) -> float:
    """The one element of a tensor. Raises ConflictError where its copies differ, and for a tensor of several."""
    found: set[bytes] = set()
    for piece in (*tensor.pieces, *tensor.replicas):
        stored = piece.stored
        buffer = bytearray(itemsize(stored.dtype))
        if stored.nbytes != len(buffer):
            break
        medium.read(catalog.files[stored.file].contents, stored.offset, (memoryview(buffer),), once=False)
        found.add(bytes(buffer))
    if len(found) != 1:
        what = "is different on different ranks" if found else f"has the shape {list(tensor.shape)}, and is one number"
        raise ConflictError(f"`{tensor.key}` {what}", where=[catalog.place(p.stored) for p in tensor.pieces[:1]])
    value: float = np.frombuffer(found.pop(), numpy_dtype(tensor.dtype))[0].item()
    return value
