"""Low-rank adapters on top of the models of a merge."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ckpttool.adapters import Change, Changes, InOut, adapt, combine, read_adapter
from ckpttool.adapters.base import Adapter, Term
from ckpttool.dialects import dialect
from ckpttool.execute.hashing import hash_range
from ckpttool.ops.merge.models import Model, Models
from ckpttool.plan import Adapted, LowRank, Operand
from ckpttool.planner import Operands
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
        kv_heads = model.checkpoint.config.get("num_key_value_heads", 0)
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
                kv_heads=kv_heads if isinstance(kv_heads, int) else 0,
            )
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
            terms = tuple([term for c in changed.values() for term in c.terms])
            shared = Change(terms, next((c.whole for c in changed.values() if c.in_place), None))
            table |= {n: table[n] if n in replaced else shared for n in (owner, copy)}
            what = f"`{owner}` and `{copy}`, which the config ties to each other"
            if replaced:
                self.apart.update(model.ties.keys() - model.checkpoint.family.spec.shared.keys())
                notes.append(f"{ref}: an adapter sets apart {what}; the output has tie_word_embeddings: false")
        return Changes(table, changes.notes)

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


def _low_rank(term: Term, operands: Operands, label: str) -> LowRank:
    up, down = (operands.stored(v, f"{v.name} for {label}") for v in (term.up, term.down))
    return LowRank(up, down, term.factor, term.row, term.column)


def _orientation(model: Model, adapter: Adapter) -> InOut | None:
    """How the base stores linear layers: [out, in] if torch's format is recorded in its files and its names are Hugging
    Face's, or if it is read from another format; else as the adapter's own library does.

    Paddle, too, records torch's format at times, but then its names are its own (``llama.layers``).
    """
    stored = model.checkpoint.stored
    if model.checkpoint.dialect.in_out and model.checkpoint.family.name == "none":
        return lambda _: True  # nothing says what the model is, so its names and orientation are still its own
    if not dialect(adapter.dialect).in_out:
        return None
    named = any(n.startswith("model.") for n in model.views)
    torch = not model.checkpoint.capabilities.keeps_form or (stored.metadata.get("format") == "pt" and named)
    return (lambda _: False) if torch else None
