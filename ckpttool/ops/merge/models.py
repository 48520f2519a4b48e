"""The models of a merge, opened: one table of files, one dialect, one view of every tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

from ckpttool.checkpoint import Checkpoint, OpenOptions, open_checkpoint
from ckpttool.core.catalog import Catalog, Key
from ckpttool.core.files import DataFile
from ckpttool.core.plan import Operand
from ckpttool.core.words import some
from ckpttool.errors import ConflictError, IncompleteError, UnsupportedError
from ckpttool.formats.registry import reader
from ckpttool.layout.assemble import LAYER
from ckpttool.layout.statements import Transform, inverse
from ckpttool.ops.merge.ties import tied_names, under_one_name, without_copies
from ckpttool.planning.planner import Operands
from ckpttool.planning.relate import (
    DerivedTensor,
    TensorTable,
    Tied,
    apply_transforms,
    identity,
    parameters,
    propagate_to_component,
)
from ckpttool.quant.coded import Coded, find_codes
from ckpttool.recipe.model import ModelRef
from ckpttool.storage.place import parse_place
from ckpttool.targeting.recode import high_precision, scaled


@dataclass(slots=True)
class MergeInput:
    """One input of a merge: its label, its checkpoint and its tensors."""

    label: str
    checkpoint: Checkpoint
    views: dict[str, DerivedTensor]
    """Tensors by name, in high precision: without the scales of quantized weights."""
    stored: Mapping[str, DerivedTensor] = field(default_factory=dict)
    """Tensors by name, codes and scales as they lie in the files."""
    codes: dict[str, Coded] = field(default_factory=dict)
    """The quantized weights, by name."""
    ties: dict[str, str] = field(default_factory=dict)
    """Names of tied tensors, none of which it has, and of the tensors that are in their place."""
    twice: frozenset[str] = frozenset()
    """Names of tied tensors that it has beside their owners, which are left out."""
    ops: tuple[Transform, ...] = ()
    """Statements that lead from Hugging Face's names to those of ``views``."""
    derived: tuple[int, str] = (0, "")
    """How many of its tensors are elements of another dtype, rounded, and that dtype: model weights that a trainer
    stores as master weights only."""

    @property
    def holds_bits(self) -> bool:
        """Whether U16 tensors are bfloat16 by another name, as PaddleNLP wrote them: the config says so."""
        config = self.checkpoint.config
        return "bfloat16" in (config.get("dtype"), config.get("torch_dtype"))

    @property
    def layers(self) -> int:
        """How many layers the names count up to."""
        return max((int(m[1]) for n in self.views if (m := LAYER.search(n))), default=-1) + 1

    def operand(self, name: str, operands: Operands) -> Operand:
        """What a Compute reads for a tensor; dequantized where it is quantized."""
        if name in self.codes:
            return scaled(self.codes[name], self.stored, operands, self.label)
        view = self.views[name]
        stored = operands.stored(view, f"`{name}` of {self.label}")
        return stored if view.dtype == self.dtype(name) else stored._replace(dtype=self.dtype(name))

    def dtype(self, name: str) -> str:
        """dtype of a tensor as a merge sees it: quantized weights count as what they stand for."""
        stored = self.views[name].dtype
        return "BF16" if stored == "U16" and self.holds_bits else stored

    @property
    def quantized(self) -> bool:
        return bool(self.codes)

    @property
    def is_program(self) -> bool:
        return self.checkpoint.is_program


class Models:
    """All models of a merge; each path is opened once."""

    def __init__(
        self, options: OpenOptions, component: str = "model", dequant: str = "", removed: Sequence[str] = ()
    ) -> None:
        """``component`` is what is merged: the model weights, or the master weights. ``dequant`` is the dtype that
        quantized weights count as; "" is what each model's config says. ``removed``: patterns of tensors that will be
        left out."""
        self.dequant = dequant
        self.removed = removed
        self.options = options
        self.component = component
        self.files: list[DataFile] = []
        self.notes: list[str] = []
        self.tied: list[Tied] = []
        """TensorTable of the sources of which one was left out because it is tied to the other."""
        self._by_path: dict[str, MergeInput] = {}

    def open(self, refs: Iterable[ModelRef]) -> None:
        """Open what is not open yet, then give all models the same naming.

        Names stay as they are while every model has the Hugging Face form of one naming; otherwise all of them get
        Hugging Face's published names. Raises ConflictError when that is not possible.
        """
        checkpoints: dict[str, Checkpoint] = {}
        for ref in refs:
            if ref.path in checkpoints:
                continue
            found = open_checkpoint(ref.path, self.options)
            found.catalog = found.catalog.shifted(len(self.files))
            found.stored.tensors = []  # the catalog has them; of large models they are many
            self.files += found.catalog.files
            self.notes += [f"{ref.path}: {n}" for n in found.notes]
            checkpoints[ref.path] = found
        _check_names(checkpoints)
        forms = {(c.format, c.ops) for c in checkpoints.values()}
        as_they_are = len(forms) == 1 and reader(next(iter(forms))[0]).capabilities.keeps_form
        left: dict[str, None] = {}
        weights = {p: _weights(p, c, self.component, canonical=not as_they_are) for p, c in checkpoints.items()}
        names = dict.fromkeys(n for views in weights.values() for n in views.table)
        for path, checkpoint in checkpoints.items():
            ties = tied_names(checkpoint, names, canonical=not as_they_are)
            views = without_copies(weights[path], ties, self.removed)
            self.notes += [f"{path}: {n}" for n in views.notes]
            self.tied += views.tied
            model = _model(path, checkpoint, views.table, self.dequant, self.notes)
            model.derived = _derived(checkpoint, self.component)
            known = under_one_name(ties, checkpoint.family)
            model.ties = {c: o for c, o in known.items() if c not in model.views and o in model.views}
            model.twice = frozenset(c for c, o in ties.items() if c in model.views and o in model.views)
            model.ops = checkpoint.ops if as_they_are else ()
            self._by_path[path] = model
            left |= dict.fromkeys(c for c in checkpoint.components if c != self.component)
        if left:
            what = "model weights" if self.component == "model" else "master weights"
            self.notes.append(f"{', '.join(left)} of the sources left out: {what} are merged, and nothing else")
        self.as_they_are = as_they_are
        if apart := self.apart:
            what = some(sorted(apart))
            self.notes.append(f"tied in some models, tensors by themselves in others and in the output: {what}")

    @property
    def apart(self) -> set[str]:
        """Tensors that are tied in some models and by themselves in others."""
        others = [other.views.keys() - other.twice for other in self]
        return {copy for model in self for copy in model.ties if any(copy in names for names in others)}

    def __getitem__(self, ref: ModelRef) -> MergeInput:
        return self._by_path[ref.path]

    def __iter__(self) -> Iterator[MergeInput]:
        return iter(self._by_path.values())


def _check_names(checkpoints: Mapping[str, Checkpoint]) -> None:
    """Raises ConflictError for models whose names and orientation cannot be brought together.

    Without a family nobody knows which way round Paddle's linear weights lie, and square ones would be merged with
    their transposes unnoticed.
    """
    unknown = {p: c for p, c in checkpoints.items() if c.dialect.in_out and c.family.name == "none"}
    if not unknown or len(unknown) == len(checkpoints):
        return
    raise ConflictError(
        "it is not known how the weights of some models lie, and others have another form",
        where=list(unknown),
        hint="put the model's config.json beside them, or name the family: --family",
    )


def _weights(path: str, checkpoint: Checkpoint, component: str, *, canonical: bool) -> TensorTable:
    """The tensors of a component by name; under Hugging Face's names if ``canonical``.

    Raises IncompleteError when there are none.
    """
    if component not in checkpoint.components:
        _refuse(path, checkpoint, component)
    catalog = checkpoint.catalog
    views = identity(catalog) if component == "model" else parameters(catalog)
    if canonical and checkpoint.ops:
        views = apply_transforms(views, inverse(checkpoint.ops), checkpoint.family, checkpoint.ops)
    if component == "model":
        return views
    # A parameter that is float32 itself has no master weight beside it: it is its own.
    own = {
        Key(k.name, component): t
        for k, t in catalog.tensors.items()
        if k.component == "model" and t.dtype == "F32" and Key(k.name, component) not in catalog.tensors
    }
    full = Catalog(catalog.files, {**catalog.tensors, **own})
    return replace(views, table=propagate_to_component(views, full, component, "", []))


def _refuse(path: str, checkpoint: Checkpoint, component: str) -> NoReturn:
    have = checkpoint.components
    held = ", ".join(have) or "nothing"
    if component == "model" and "adapter" in have:
        raise IncompleteError(
            f"the source is an adapter and holds no model weights (it has {held})",
            where=path,
            hint=f"add it to the model that it belongs to: BASE+{path}",
        )
    dtypes = {t.dtype for t in checkpoint.catalog if t.key.component == "model"}
    raise IncompleteError(
        f"the source has no {component.replace('_', ' ')} (it has {held})",
        where=path,
        hint="its model weights are float32 themselves: merge those, with merge_prefix `model`"
        if dtypes == {"F32"}
        else "merge the model weights, with merge_prefix `model`"
        if component != "model"
        else "leave it out, or give the directory that holds the weights",
    )


def _derived(checkpoint: Checkpoint, component: str) -> tuple[int, str]:
    found = [
        t.pieces[0].stored.dtype
        for t in checkpoint.catalog
        if t.key.component == component and t.pieces and t.pieces[0].stored.dtype != t.dtype
    ]
    return len(found), found[0] if found else ""


def _model(
    path: str, checkpoint: Checkpoint, table: Mapping[str, DerivedTensor], dequant: str, notes: list[str]
) -> MergeInput:
    """Set codes and scales apart. Raises for weights that cannot be dequantized."""
    config = checkpoint.config
    codes = find_codes({n: (v.dtype, v.shape) for n, v in table.items()}, config, where=path)
    if turned := next((c.name for c in codes.weights.values() if c.turned), None):
        raise UnsupportedError(
            f"`{turned}` is quantized the other way round than it is merged",
            where=path,
            hint=f"dequantize the model first: ckpttool quantize {path} DST --to bf16",
        )
    parts, beside = codes.parts, set(codes.beside)
    dtype = dequant or high_precision(config)
    views: dict[str, DerivedTensor] = {}
    for name, view in table.items():
        if name in beside:
            continue
        weight = codes.weights.get(parts.get(name, ""))
        if weight is None:
            views[name] = view
        elif weight.name not in views:
            views[weight.name] = DerivedTensor(weight.name, dtype, weight.shape)
    if codes.weights:
        notes.append(f"{path}: {len(codes.weights)} quantized weights are dequantized")
    if beside:
        shown = codes.beside[0]
        notes.append(f"{path}: {len(beside)} scales of activations or caches are left out (`{shown}`)")
    return MergeInput(str(parse_place(path)), checkpoint, views, table, codes.weights)
