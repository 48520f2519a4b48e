"""What came from where: the tensors of a merge, gathered by how they come about."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from ckpttool.core.dtypes import nbytes
from ckpttool.core.plan import Compute, Gathered, Operand, Plan
from ckpttool.core.tensor_names import fold
from ckpttool.core.words import count
from ckpttool.kernels.merge import METHODS
from ckpttool.kernels.merge.base import Parameter
from ckpttool.recipe.model import ModelRef
from ckpttool.storage.place import parse_place

_SHOWN = 6
"""Names of tensors that are shown of a group."""

Parameters = Sequence[tuple[str, Any]]


class TensorOrigin(NamedTuple):
    """Tensors that are made of the same sources, in the same way."""

    method: str
    """``copy`` for what is one model's, unchanged but for its dtype."""
    models: Sequence[tuple[str, Parameters]]
    """(label, parameters that are not what they are by default)"""
    base: str
    whole: Parameters
    by_token: bool
    """Rows are those of the output's tokens, wherever they are in the models."""
    names: list[str]
    sizes: list[tuple[int, int]]
    """(elements, bytes) of each."""

    @property
    def elements(self) -> int:
        return sum([n for n, _ in self.sizes])

    @property
    def nbytes(self) -> int:
        return sum([n for _, n in self.sizes])

    @property
    def how(self) -> str:
        """``ties, lambda 0.5``; ``copy``."""
        return ", ".join([self.method, *_said(self.whole), *["rows by token"] * self.by_token])

    def sources(self, names: Mapping[str, str] | None = None) -> list[tuple[str, str]]:
        """(label, ``weight 0.6, density 0.5``) of each model, then of the base; ``names`` are shorter labels."""
        found = [*((label, ", ".join(_said(p))) for label, p in self.models), *[(self.base, "base")] * bool(self.base)]
        return [((names or {}).get(label, label), said) for label, said in found]


def _said(parameters: Parameters) -> list[str]:
    """In words, the weight first."""
    ordered = sorted(parameters, key=lambda p: p[0] != "weight")
    return [f"{name} {str(v).lower() if isinstance(v, bool) else f'{v:g}'}" for name, v in ordered]


def computed(plan: Plan) -> Iterator[Compute]:
    """How each tensor of the output is worked out."""
    for unit in plan.units:
        yield from (step for step in unit.steps if isinstance(step, Compute))


def short_names(refs: Sequence[ModelRef]) -> dict[str, str]:
    """What people call the sources, by label: the shortest ends of their paths that tell them apart. Models of the Hub
    keep their names."""
    paths = {p: _steps(p) for r in refs for p in (r.path, *r.adapters)}
    short = {}
    for path, steps in paths.items():
        others = [s for p, s in paths.items() if p != path]
        ends = (n for n in range(1, len(steps)) if all(s[-n:] != steps[-n:] for s in others))
        n = next(ends, len(steps))
        short[path] = path if path.startswith("hf://") else "/".join(steps[-n:])
    return {str(r): "+".join(short[p] for p in (r.path, *r.adapters)) for r in refs}


def _steps(path: str) -> tuple[str, ...]:
    place = parse_place(path)
    return place.absolute().parts if isinstance(place, Path) else tuple(path.rstrip("/").split("/"))


def came_from(plan: Plan, operands: Mapping[str, Sequence[tuple[str, str]]], method: str) -> list[TensorOrigin]:
    """The tensors of a plan by how they come about, those with most elements first.

    ``operands`` are (label, tensor there) of each tensor's operands; ``method`` is the recipe's.
    """
    found: dict[object, TensorOrigin] = {}
    for c in computed(plan):
        labels = [label for label, _ in operands[c.name]]
        copied = c.method == "passthrough" and method != "passthrough"
        schema = METHODS[c.method]
        each = () if copied else tuple([_other(p, schema.per_model) for p in c.parameters])
        whole = () if copied else _other(c.whole, schema.whole)
        by_token = any(map(_is_gathered, c.operands))
        key = (c.method, copied, tuple(labels), each, whole, by_token)
        group = found.get(key)
        if group is None:
            n = len(c.models)
            models = [(label, p) for label, p in zip(labels[:n], each or [()] * n, strict=True)]
            base = labels[n] if c.base is not None else ""
            group = found[key] = TensorOrigin("copy" if copied else c.method, models, base, whole, by_token, [], [])
        elements = prod(c.shape)
        group.names.append(c.name)
        group.sizes.append((elements, nbytes(c.dtype, elements)))
    return sorted(found.values(), key=lambda g: -g.elements)


def parameters_of(groups: Sequence[TensorOrigin], label: str) -> str:
    """What the recipe gives a model: ``weight 0.6, density 0.5 to 0.7``; "" where that is nothing."""
    values: dict[str, list[Any]] = {}
    for group in groups:
        for name, value in (p for who, found in group.models if who == label for p in found):
            values.setdefault(name, []).append(value)
    out = []
    for name, some in sorted(values.items(), key=lambda found: found[0] != "weight"):
        low, high = min(some), max(some)
        out.append(_said([(name, low)])[0] + (f" to {high:g}" if low != high else ""))
    return ", ".join(out)


def _other(parameters: Parameters, schema: Mapping[str, Parameter]) -> tuple[tuple[str, Any], ...]:
    """Those that are not what they are by default."""
    return tuple([(n, v) for n, v in parameters if n not in schema or v != schema[n].default])


def _is_gathered(operand: Operand) -> bool:
    return isinstance(operand, Gathered)


def some_names(names: Sequence[str], shown: Callable[[str], str] = str, most: int = _SHOWN) -> str:
    """``30 tensors: model.embed_tokens.weight, model.layers.{0..2}.mlp.up_proj.weight, and 10 more``."""
    folded = fold(names)
    more = len(folded) - most
    texts = [shown(name) for name, _ in folded[:most]]
    return f"{count(len(names), 'tensor')}: " + ", ".join([*texts, *([f"and {more} more"] if more > 0 else [])])
