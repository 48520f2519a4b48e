"""Low-rank adapters on top of the models of a merge."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ckpttool.adapters import Change, Changes, InOut, adapt, combine, read_adapter
from ckpttool.adapters.base import Adapter, Term
from ckpttool.execute.hashing import hash_range
from ckpttool.ops.merge.form import is_paddle
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
        for ref in refs:
            if ref.adapters:
                self._open(ref)

    def _open(self, ref: ModelRef) -> None:
        model = self._models[ref]
        shapes = {n: v.shape for n, v in model.views.items()}
        kv_heads = model.checkpoint.config.get("num_key_value_heads", 0)
        found = []
        weights = ref.weights or (1.0,) * len(ref.adapters)
        for path, weight in zip(ref.adapters, weights, strict=True):
            adapter = read_adapter(path).shifted(len(self._models.files))
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
                self._hashes.setdefault(ref, []).append((str(f.path), hash_range(f.path, 0, f.size)))
        self._changes[ref] = self._tied(model, combine(found))

    def _tied(self, model: Model, changes: Changes) -> Changes:
        """A head that the config ties to the embeddings and that is stored all the same changes with them."""
        pair = ("model.embed_tokens.weight", "lm_head.weight")
        changed = [n for n in pair if n in changes.table]
        if not model.checkpoint.family.tied or len(changed) != 1 or not all(n in model.views for n in pair):
            return changes
        other = pair[1 - pair.index(changed[0])]
        self._models.notes.append(f"`{other}` changes as `{changed[0]}` does, to which the config ties it")
        return Changes({**changes.table, other: changes.table[changed[0]]}, changes.notes)

    def names(self, ref: ModelRef) -> list[str]:
        """The tensors of a model."""
        return list(self._models[ref].views)

    def dtype(self, ref: ModelRef, name: str) -> str:
        """dtype of a tensor; an adapter does not change it."""
        return self._models[ref].dtype(name)

    def operand(self, ref: ModelRef, name: str, operands: Operands) -> Operand:
        """What a Compute reads for a tensor."""
        model = self._models[ref]
        change = self._changes[ref].table.get(name, Change()) if ref in self._changes else Change()
        label = f"`{name}` of {ref}"
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
    if is_paddle(model.checkpoint) and model.checkpoint.family.name == "none":
        return lambda _: True  # nothing says what the model is, so names and orientation still are Paddle's
    if adapter.format != "paddle":
        return None
    named = any(n.startswith("model.") for n in model.views)
    torch = stored.format != "hf" or (stored.metadata.get("format") == "pt" and named)
    return (lambda _: False) if torch else None
