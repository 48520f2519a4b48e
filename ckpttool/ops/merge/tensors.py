"""From resolved tensors to computations: operands, dtypes, and what to do where the models disagree."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from math import prod
from typing import Any, Literal

from ckpttool.core.catalog import Catalog, Key, LogicalTensor, StoredTensor, whole_tensor
from ckpttool.core.dtypes import CASTABLE, lookup
from ckpttool.core.patterns import compile_pattern
from ckpttool.core.plan import Compute, Gathered, Operand, RowRun, shape_of
from ckpttool.errors import ConflictError
from ckpttool.execute.compare import compare_one, read_view
from ckpttool.kernels.merge import METHODS
from ckpttool.kernels.merge.base import MergeTensor
from ckpttool.kernels.merge.draws import CounterDraws
from ckpttool.ops.merge.adapters import Adaptations
from ckpttool.ops.merge.models import Models
from ckpttool.ops.merge.words import VocabularyPlan, has_vocabulary
from ckpttool.planning.planner import Operands
from ckpttool.recipe.model import ModelRef
from ckpttool.recipe.resolve import Merged, Resolved

Missing = Literal["", "base", "skip"]
Vocab = Literal["", "min", "max", "base"]

_SHOWN = 5


class MergeBuilder:
    """Makes the catalog of the output; its tensors are stored in files that the plan computes."""

    def __init__(
        self,
        models: Models,
        adaptations: Adaptations,
        *,
        method: str,
        dtype: str,
        vocab: Vocab,
        finite: bool,
        words: VocabularyPlan | None,
        removed: Sequence[str] = (),
    ) -> None:
        """``removed``: patterns of tensors that will be left out, which may differ where all models must agree."""
        self.models = models
        self.removed = [compile_pattern(p) for p in removed]
        self.adaptations = adaptations
        self.method = METHODS[method]
        self.dtype = dtype
        self.vocab = vocab
        self.finite = finite
        self.words = words
        self.operands = Operands()
        self.operands.tied = models.tied
        self.computed: list[Compute] = []
        self.tensors: dict[Key, LogicalTensor] = {}
        self.common: dict[str, str] = {}
        """Name of a computed tensor -> the dtype that its operands have in common."""
        self.names: dict[str, list[tuple[str, str]]] = {}
        """Name of a computed tensor -> (label of the model, name there) of each operand."""
        self.notes: list[str] = []
        self._wrong: dict[str, str] = {}
        self._tried: set[object] = set()
        self._shared: dict[Any, Any] = {}

    def run(self, resolved: Resolved, missing: Missing) -> None:
        """Raises ConflictError listing the tensors that some models lack, or whose shapes differ."""
        partial = resolved.partial
        if partial and not missing:
            raise _lacking(partial, self.models)
        left = copied = 0
        for one in resolved.tensors:
            if not one.missing:
                self._tensor(one)
            elif missing == "skip" or (one.base is None and one.base_at is not None):  # the base decides what there is
                left += 1
            else:
                copied += 1
                ref, name = one.base or one.inputs[0]
                self.copy(one.name, ref, name)
        if partial:
            lack = f"{len(partial)} tensors are not in all models"
            self.notes.append(f"{lack}: {copied} are copied, {left} left out (--missing {missing})")
        self.notes += resolved.notes
        self.notes += [f"the filter {u} decides about no tensor" for u in resolved.unused]
        if not self._wrong:
            return
        raise ConflictError(
            f"the models have different shapes in {len(self._wrong)} tensors",
            where=_first(list(self._wrong.values())),
            hint="choose the rows with --vocab: min (of the smallest vocabulary), max (missing rows from the base, or"
            " the first model that has them) or base; or set `tokenizer:` in a recipe"
            if all(has_vocabulary(n) for n in self._wrong)
            else "only models of one architecture and size can be merged",
        )

    def copy(self, name: str, ref: ModelRef, of: str) -> None:
        """A tensor of the output that is one model's, unchanged but for the dtype."""
        operand = self._operand(ref, of)
        dtype = self._dtype([self.adaptations.dtype(ref, of)])
        as_it_is = Merged(name, ((ref, of),), None, None, ({"scale": 1.0},), {})
        self._put(as_it_is, dtype, (operand,), None, "passthrough", as_it_is.inputs)

    def _tensor(self, m: Merged) -> None:
        everything = [*m.inputs, *([m.base] if m.base is not None else [])]
        found = [self._operand(ref, name) for ref, name in everything]
        if self.words is not None and has_vocabulary(m.name):
            found = self.words.gathered([ref for ref, _ in everything], found)
        shapes = [shape_of(o) for o in found]
        dtypes = [self.adaptations.dtype(ref, name) for ref, name in everything]
        if len(set(shapes)) > 1:
            found = self._same_rows(m, everything, found, shapes)
            if not found:
                return
        if not all(d in CASTABLE for d in dtypes):
            self._equal(m.name, everything, dtypes)
            ref, name = m.base or m.inputs[0]
            self.copy(m.name, ref, name)
            return
        self.common[m.name] = _common(dtypes)
        models = tuple(found[: len(m.inputs)])
        base = found[-1] if m.base is not None else None
        self._put(m, self._dtype(dtypes), models, base, self.method.name, everything)

    def _put(
        self,
        m: Merged,
        dtype: str,
        models: tuple[Operand, ...],
        base: Operand | None,
        method: str,
        sources: Sequence[tuple[ModelRef, str]],
    ) -> None:
        """Add a tensor of the output.

        The method's program begins here, as far as its first pass: wrong parameters show before anything is written.
        """
        name, shape = m.name, shape_of(models[0])
        tried = (method, repr(m.parameters), repr(m.whole), base is None, len(shape))
        if tried not in self._tried:
            self._tried.add(tried)
            draws = CounterDraws(0, name)
            tensor = MergeTensor(name, shape, m.parameters, m.whole, base is not None, draws, m.base_at)
            with contextlib.suppress(StopIteration):
                next(METHODS[method].program(tensor))
        key = Key(name, self.models.component)
        if not prod(shape):
            self.tensors[key] = LogicalTensor(key, dtype, shape, ())
            return
        stored = StoredTensor(name, dtype, shape, len(self.models.files) + len(self.computed), 0)
        self.tensors[key] = whole_tensor(stored, key)
        self.names[name] = [(str(ref), of) for ref, of in sources]
        each = self._one([tuple(sorted(p.items())) for p in m.parameters])
        every = self._one(sorted(m.whole.items()))
        self.computed.append(Compute(name, shape, dtype, method, models, base, each, every, m.base_at, self.finite))

    def _one(self, items: Sequence[Any]) -> Any:
        """Equal parameters as one object: most tensors have the same."""
        found = tuple(items)
        return self._shared.setdefault(found, found)

    def _operand(self, ref: ModelRef, name: str) -> Operand:
        return self.adaptations.operand(ref, name, self.operands)

    def _dtype(self, dtypes: Sequence[str]) -> str:
        """What is asked for, else the common dtype of the inputs."""
        if not set(dtypes) <= CASTABLE:
            return dtypes[0]
        return self.dtype or _common(dtypes)

    def _same_rows(
        self,
        m: Merged,
        everything: Sequence[tuple[ModelRef, str]],
        found: list[Operand],
        shapes: Sequence[tuple[int, ...]],
    ) -> list[Operand]:
        """All operands with one number of rows, by --vocab; [] after noting that they differ."""
        columns = {s[1:] for s in shapes}
        if not (has_vocabulary(m.name) and self.vocab and len(columns) == 1):
            each = dict.fromkeys(
                f"{list(s)} in {self.models[ref].label}" for (ref, _), s in zip(everything, shapes, strict=True)
            )
            self._wrong[m.name] = f"`{m.name}`: " + ", ".join(each)
            return []
        counts = [s[0] for s in shapes]
        donor = len(counts) - 1 if m.base is not None else 0
        rows = {"min": min(counts), "max": max(counts), "base": counts[donor]}[self.vocab]
        longest = [donor, *range(len(counts))]
        full = next(i for i in longest if counts[i] >= rows)
        out: list[Operand] = []
        for i, operand in enumerate(found):
            if counts[i] == rows:
                out.append(operand)
                continue
            runs = [RowRun(0, min(rows, counts[i]), 0, 0)]
            if rows > counts[i]:
                runs.append(RowRun(counts[i], rows, 1, counts[i]))
            out.append(Gathered((operand, found[full]), (rows, *shapes[i][1:]), tuple(runs)))
        self.notes.append(f"`{m.name}` has {rows:,} rows (--vocab {self.vocab}); the models have {sorted(set(counts))}")
        return out

    def _equal(self, name: str, everything: Sequence[tuple[ModelRef, str]], dtypes: Sequence[str]) -> None:
        """Integers and bools are not merged: all models must hold the same."""
        if any(rx.search(name) for rx in self.removed):
            return
        catalog = Catalog(self.models.files, {})
        first, *rest = [self.models[ref].views[of] for ref, of in everything]
        for (ref, _), dtype, view in zip(everything[1:], dtypes[1:], rest, strict=True):
            differs = dtype != dtypes[0] or lookup(dtype).bits % 8
            if differs or compare_one(
                name,
                first.shape,
                dtype,
                lambda box: read_view(catalog, first, box),
                lambda box, view=view: read_view(catalog, view, box),  # type: ignore[misc]
            ):
                raise ConflictError(
                    f"`{name}` is {dtype}, which is not merged, and the models do not hold the same",
                    where=[self.models[everything[0][0]].label, self.models[ref].label],
                    hint=f"leave it out: --remove-keys '{name}'"
                    + (" --to hf (a program needs all of its parameters)" if self.models[ref].is_program else ""),
                )


def _common(dtypes: Sequence[str]) -> str:
    """The smallest dtype that holds what all of these hold."""
    return dtypes[0] if len(set(dtypes)) == 1 else "F64" if "F64" in dtypes else "F32"


def _first(texts: Sequence[str]) -> list[str]:
    more = len(texts) - _SHOWN
    return [*texts[:_SHOWN], *([f"and {more} more"] if more > 0 else [])]


def _lacking(partial: Sequence[Merged], models: Models) -> ConflictError:
    """The error for models with different tensors."""
    without = {m.name: ", ".join(dict.fromkeys(models[ref].label for ref, _ in m.missing)) for m in partial}
    return ConflictError(
        f"the models do not have the same tensors: {len(partial)} are not in all of them",
        where=_first([f"`{name}` is not in {labels}" for name, labels in without.items()]),
        hint="--missing base takes them from the base or the first model that has them, skip leaves them out",
    )
