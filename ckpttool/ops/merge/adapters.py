"""Low-rank adapters on top of the models of a merge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from ckpttool.adapters import Change, Changes, InOut, adapt, combine, read_adapter
from ckpttool.adapters.base import Adapter, LowRankTerm
from ckpttool.core.catalog import Catalog
from ckpttool.core.dtypes import CASTABLE, itemsize
from ckpttool.core.plan import Adapted, LowRank, Operand
from ckpttool.dialects import dialect
from ckpttool.errors import UnsupportedError
from ckpttool.execute.blocks import BLOCK
from ckpttool.execute.compare import read_view
from ckpttool.execute.hashing import hash_range
from ckpttool.execute.reader import blocks
from ckpttool.formats.base import ModelForm
from ckpttool.formats.config import whole_number
from ckpttool.layout.assemble import LAYER
from ckpttool.layout.modules import model_forms
from ckpttool.layout.statements import Rename, inverse
from ckpttool.ops.merge.models import MergeInput, Models
from ckpttool.planning.planner import Operands
from ckpttool.planning.relate import DerivedTensor
from ckpttool.recipe.model import ModelRef


class Adaptations:
    """For each reference with adapters, what they change."""

    def __init__(self, models: Models, refs: Sequence[ModelRef], *, rounded: bool) -> None:
        """``rounded``: an adapted weight is rounded to its dtype before it is merged, as if it had been saved."""
        self._models = models
        self._rounded = rounded
        self._changes: dict[ModelRef, Changes] = {}
        self._hashes: dict[ModelRef, list[tuple[str, str]]] = {}
        self.apart = models.apart
        """Tied tensors that the output has by themselves: some models do, or an adapter replaces one of two."""
        for ref in refs:
            if ref.adapters:
                self._open(ref)

    def _open(self, ref: ModelRef) -> None:
        model = self._models[ref]
        shapes = {n: v.shape for n, v in model.views.items()}
        for copy, owner in model.ties.items():
            shapes[copy] = shapes[owner]
        kv_heads = whole_number(model.checkpoint.config, "num_key_value_heads") or 0
        found = []
        weights = ref.weights or (1.0,) * len(ref.adapters)
        for path, weight in zip(ref.adapters, weights, strict=True):
            adapter = read_adapter(path, self._models.options.mesh.part).resolved(shapes)
            adapter = adapter.shifted(len(self._models.files))
            self._models.files += adapter.files
            changes = adapt(
                adapter,
                shapes,
                in_out=_orientation(model, adapter),
                kv_heads=kv_heads,
                as_trained=not (dialect(adapter.dialect).in_out or model.checkpoint.dialect.in_out),
                forms=_forms(model, shapes) if not dialect(adapter.dialect).in_out else (),
            )
            changes = self._counted_once(model, changes)
            if weight != 1 or len(ref.adapters) > 1:
                changes = self._without_copies(model, changes)
            found.append((changes, weight))
            self._models.notes += [f"{path}: {n}" for n in changes.notes]
            for f in adapter.files:
                self._hashes.setdefault(ref, []).append((str(f.place), hash_range(f.place, 0, f.size)))
        self._changes[ref] = self._tied(ref, combine(found))

    def _tied(self, ref: ModelRef, changes: Changes) -> Changes:
        """What adapters do to tied tensors, as in PEFT: low-rank terms of either change the one weight that both are,
        and a tensor that was trained as a whole leaves the other one as it is, which unties them."""
        model, table, notes = self._models[ref], dict(changes.table), self._models.notes
        for copy, owner in model.ties.items():
            changed = {n: table[n] for n in (owner, copy) if n in table}
            if not changed:
                continue
            replaced = {n for n, c in changed.items() if c.whole is not None and not c.in_place}
            wholes = [c.whole for c in changed.values() if c.whole is not None]
            if len(wholes) == 2 and not self._equal(*wholes):  # PEFT was asked to tie them, and could not
                replaced = set(changed)
            elif not replaced and copy in changed and changed[copy].whole is not None:
                self._check_bias(model, copy, changes)
            terms = tuple([term for c in changed.values() for term in c.terms])
            if terms and LAYER.search(owner) and (len(changed) == 1 or changed[copy].terms):
                raise UnsupportedError(
                    f"`{owner}` and `{copy}` are one weight in the model, and the adapter changes"
                    f" {'each of them' if len(changed) == 2 else 'one of them'} by factors of its own,"
                    " which no merged model has",
                    where=model.label,
                    hint="load the adapter beside the model",
                )
            if terms and not replaced and (len(changed) == 1 or all(c.terms for c in changed.values())):
                notes.append(
                    f"{ref}: `{owner}` and `{copy}` are tied: low-rank factors of one change both, as in PEFT's"
                    " merge_and_unload; the model that was trained changed one"
                )
            shared = Change(terms, next((c.whole for c in changed.values() if c.in_place), None))
            table |= {n: table[n] if n in replaced else shared for n in (owner, copy)}
            what = f"`{owner}` and `{copy}`, which the config ties to each other"
            if replaced:
                self.apart.update(model.ties.keys() - model.checkpoint.family.spec.shared.keys())
                notes.append(f"{ref}: an adapter sets apart {what}; the output has tie_word_embeddings: false")
        return Changes(table, changes.notes)

    def _counted_once(self, model: MergeInput, changes: Changes) -> Changes:
        """Drop the second of two equal terms of tied tensors: PEFT saves both of a pair that it trained as one."""
        table = dict(changes.table)
        for copy, owner in model.ties.items():
            first, second = (table.get(n, Change()).terms for n in (owner, copy))
            left = tuple([t for t in second if not any(self._equal_terms(t, f) for f in first)])
            if len(left) < len(second):
                table[copy] = table[copy]._replace(terms=left)
        return changes._replace(table=table)

    def _without_copies(self, model: MergeInput, changes: Changes) -> Changes:
        """Drop weights that the adapter brings along unchanged: PEFT saves an embedding with its factors."""
        table = dict(changes.table)
        for name, change in changes.table.items():
            view = model.views.get(model.ties.get(name, name))
            if change.whole is not None and change.in_place and view is not None and self._equal(change.whole, view):
                table[name] = change._replace(whole=None, in_place=False)
        return changes._replace(table=table)

    def _check_bias(self, model: MergeInput, head: str, changes: Changes) -> None:
        """Raises UnsupportedError for a head that was trained without the bias that it has in the base."""
        bias = f"{head.removesuffix('.weight')}.bias"
        if bias in model.views and bias not in changes.table:
            raise UnsupportedError(
                f"the adapter has `{head}` without `{bias}`, which PEFT leaves out of a head that it ties",
                where=model.label,
                hint="train it without `ensure_weight_tying`",
            )

    def _equal_terms(self, a: LowRankTerm, b: LowRankTerm) -> bool:
        same = a[2:] == b[2:]
        return same and self._equal(a.up, b.up) and self._equal(a.down, b.down)

    def _equal(self, a: DerivedTensor, b: DerivedTensor) -> bool:
        """Whether two tensors have the same numbers, in whatever dtypes."""
        if a.shape != b.shape or not (a.parts and b.parts) or not {a.dtype, b.dtype} <= CASTABLE:
            return False
        catalog = Catalog(self._models.files, {})
        wide = "F64" if "F64" in (a.dtype, b.dtype) else "F32"
        return all(
            np.array_equal(read_view(catalog, a, box, wide), read_view(catalog, b, box, wide))
            for box in blocks(a.shape, itemsize(wide), BLOCK)
        )

    def names(self, ref: ModelRef) -> list[str]:
        """The tensors of a model; where tied ones of any model have become two, both of them."""
        model = self._models[ref]
        return [*model.views, *(c for c in model.ties if c in self.apart)]

    def dtype(self, ref: ModelRef, name: str) -> str:
        """dtype of a tensor; an adapter does not change it."""
        model = self._models[ref]
        return model.dtype(model.ties.get(name, name))

    def operand(self, ref: ModelRef, name: str, operands: Operands) -> Operand:
        """What a Compute reads for a tensor."""
        model = self._models[ref]
        change = self._changes[ref].table.get(name, Change()) if ref in self._changes else Change()
        label = f"`{name}` of {ref}"
        name = model.ties.get(name, name)
        weight = model.operand(name, operands) if change.whole is None else operands.stored(change.whole, label)
        if not change.terms:
            return weight
        shape = model.views[name].shape
        fits = all(t.column + t.down.shape[1] <= shape[-1] for t in change.terms)
        return Adapted(
            weight,
            tuple([_low_rank(t, operands, label) for t in change.terms]),
            shape[-1] if fits else prod(shape[1:]),
            model.dtype(name) if self._rounded else "F32",
        )

    def hashes(self, ref: ModelRef) -> list[tuple[str, str]]:
        """(path, hash) of each file of the adapters."""
        return self._hashes.get(ref, [])


def _forms(model: MergeInput, shapes: Mapping[str, tuple[int, ...]]) -> list[ModelForm]:
    """How transformers holds the model in memory, whose names an adapter of PEFT has."""
    if not _is_known(model) or not all(isinstance(op, Rename) for op in model.ops):
        return []
    held = dict(shapes)
    names = {n: n for n in held}
    for op in inverse(model.ops):
        if isinstance(op, Rename):
            names = {op.forward(new): n for new, n in names.items()}
    if len(names) < len(held):
        return []
    forms = model_forms(model.checkpoint.family, {new: held[n] for new, n in names.items()})[1:]
    return [
        f._replace(shares={k: tuple([s._replace(name=names[s.name]) for s in v]) for k, v in f.shares.items()})
        for f in forms
    ]


def _is_known(model: MergeInput) -> bool:
    return model.checkpoint.family.name != "none"


def _low_rank(term: LowRankTerm, operands: Operands, label: str) -> LowRank:
    up, down = (operands.stored(v, f"{v.name} for {label}") for v in (term.up, term.down))
    return LowRank(up, down, term.factor, term.row, term.column)


def _orientation(model: MergeInput, adapter: Adapter) -> InOut | None:
    """How the base stores linear layers: [out, in] if torch's format is recorded in its files and its names are Hugging
    Face's, or if it is read from another format; else as the adapter's own library does. PEFT has one fan_in_fan_out
    for layers that differ (GPT-2's and its head): of a known family the rules tell.

    Paddle, too, records torch's format at times, but then its names are its own (``llama.layers``).
    """
    stored = model.checkpoint.stored
    if model.checkpoint.dialect.in_out and not _is_known(model):
        return lambda _: True  # nothing says what the model is, so its names and orientation are still its own
    if not dialect(adapter.dialect).in_out:
        place = model.checkpoint.family.placer(model.ops)
        return (lambda n: p.rule.in_out if (p := place(n)) is not None else None) if _is_known(model) else None
    named = any(n.startswith("model.") for n in model.views)
    torch = not model.checkpoint.capabilities.keeps_form or (stored.metadata.get("format") == "pt" and named)
    return (lambda _: False) if torch else None
