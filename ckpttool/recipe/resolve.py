"""Resolve a recipe with the models' tensor names: the inputs of every tensor of the output.

Layers are numbered anew where slices stack them. A tensor without a layer is taken from the first slice's models when
it embeds tokens or positions (what comes before the layers), from the last slice's otherwise. Of a model with several
stacks (encoder and decoder, two towers) each slice says which it is of; a tensor without a layer goes by the slices of
the stack whose name is most like its own, and a stack without slices is taken whole from the first slice's models.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ckpttool.errors import CkptError, ConflictError, UsageError
from ckpttool.kernels.merge import METHODS
from ckpttool.kernels.merge.base import Method, Parameter
from ckpttool.recipe.check import merged
from ckpttool.recipe.model import ModelRef, Recipe, RecipeSlice, Scalar, Settings, SliceSource

BEFORE = re.compile(r"embed|wte|wpe|word_embeddings|(?<![^.])shared\.")
AFTER = re.compile(r"embed_out")
"""An output layer that is called an embedding (GPT-NeoX)."""

NamedTensor = tuple[ModelRef, str]
"""A model and the name of a tensor there."""


@dataclass(frozen=True, slots=True)
class Merged:
    """One tensor of the output."""

    name: str
    inputs: tuple[NamedTensor, ...]
    """The models that have it, without the base."""
    base: NamedTensor | None
    """None where the method has no base, and where the base lacks the tensor."""
    base_at: int | None
    """Place of the base among the slice's models; after the last one when it is not listed."""
    parameters: tuple[Mapping[str, Scalar], ...]
    """All parameters of each input."""
    whole: Mapping[str, Scalar]
    """Parameters of the merge, complete."""
    missing: tuple[NamedTensor, ...] = ()
    """Models that lack it, the base included."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """The output of a merge."""

    tensors: tuple[Merged, ...]
    """Tensors in the order of the output: before the layers, the layers, after them."""
    layers: tuple[tuple[tuple[ModelRef, int], ...], ...]
    """For each layer of the output, the models and their layers that it comes from; () where slices name stacks."""
    stacks: Mapping[str, tuple[tuple[tuple[ModelRef, int], ...], ...]] = field(default_factory=dict)
    """The same for each stack that slices name, by what its names begin with."""
    notes: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    """Filters that decided about no tensor."""

    @property
    def partial(self) -> tuple[Merged, ...]:
        """The tensors that only some of the models have."""
        return tuple(m for m in self.tensors if m.missing)


def resolve(recipe: Recipe, names: Mapping[ModelRef, Collection[str]], *, layer: re.Pattern[str]) -> Resolved:
    """Every tensor of the output. ``layer`` finds the layer's number in a name, as its first group.

    Raises ConflictError for a layer range that a model does not have, UsageError for slices that do not say of which
    of several stacks they are, and for a required parameter that no filter gives to some tensor.
    """
    return _Resolver(recipe, {ref: _NamesByLayer(n, layer) for ref, n in names.items()}).run()


class _NamesByLayer:
    """The tensor names of one model, by stack and layer."""

    def __init__(self, names: Iterable[str], layer: re.Pattern[str]) -> None:
        self.loose: dict[str, str] = {}
        self.layers: dict[tuple[str, int], dict[str, str]] = {}
        """Name by what follows the number, for (what precedes it, the number)."""
        self._first: dict[str, Mapping[str, str]] = {}
        for name in names:
            if m := layer.search(name):
                self.layers.setdefault((name[: m.start(1)], int(m[1])), {})[name[m.end(1) :]] = name
            else:
                self.loose[name] = name

    def layer(self, stack: str, number: int, place: int) -> Mapping[str, str]:
        """The tensors of a layer that becomes the one at ``place``; what only the first may have stays the first's."""
        table = self.layers.get((stack, number), {})
        firsts = self._firsts(stack)
        if not firsts or place == number:
            return table
        return {**table, **firsts} if place == 0 else {k: v for k, v in table.items() if k not in firsts}

    def _firsts(self, stack: str) -> Mapping[str, str]:
        """Tensors that only the first layer has: T5's relative positions, which all of them use."""
        if stack not in self._first:
            first = self.layers.get((stack, 0), {})
            others = [set(t) for (s, n), t in self.layers.items() if s == stack and n > 0]
            shared = others[0] if others and all(o == others[0] for o in others) else set(first)
            self._first[stack] = {k: v for k, v in first.items() if k not in shared} if shared < set(first) else {}
        return self._first[stack]

    def depths(self) -> dict[str, int]:
        """Number of layers of each stack."""
        out: dict[str, int] = {}
        for stack, number in self.layers:
            out[stack] = max(out.get(stack, 0), number + 1)
        return out


@dataclass(frozen=True, slots=True)
class _TensorModels:
    """The models of one tensor: a slice's sources, and its base."""

    piece: RecipeSlice
    sources: Sequence[SliceSource]
    """Sources without the base."""
    base: ModelRef | None
    base_at: int | None
    models: tuple[ModelRef, ...] = field(default=())
    """All of them, in the order of the recipe."""
    stack: str = ""
    """Prefix of the names of its layers; "" for all layers of all stacks."""


class _Resolver:
    def __init__(self, recipe: Recipe, index: Mapping[ModelRef, _NamesByLayer]) -> None:
        self.recipe, self.index = recipe, index
        self.method: Method = METHODS[recipe.method]
        self.depths = {ref: i.depths() for ref, i in index.items()}
        self.stacks = _union(self.depths.values())
        self.parts = [self._part(i, piece) for i, piece in enumerate(recipe.slices)]
        self.used: set[int] = set()
        self.notes: list[str] = []

    def _part(self, number: int, piece: RecipeSlice) -> _TensorModels:
        base = self.recipe.base_of(piece) if self.method.base != "refused" else None
        listed = [s.model for s in piece.sources]
        models = listed if base is None or base in listed else [*listed, base]
        base_at = None if base is None else models.index(base)
        stack = "" if piece.sources[0].layers is None else self._stack(piece.stack, f"slices[{number}]")
        return _TensorModels(piece, merged(self.recipe, self.method, piece), base, base_at, tuple(models), stack)

    def _stack(self, said: str, at: str) -> str:
        """The stack that a slice is of. Raises UsageError when it does not say which of several."""
        fitting = [s for s in self.stacks if f".{said}." in f".{s}" or not said]
        if len(fitting) == 1:
            return fitting[0]
        if not self.stacks:
            return ""
        counts = {s: max(d.get(s, 0) for d in self.depths.values()) for s in self.stacks}
        words = _telling(list(self.stacks))
        what = (
            f"`stack: {said}` fits {len(fitting) or 'none'} of the stacks of layers"
            if said
            else (f"the models have {len(self.stacks)} stacks of layers, and the slice does not say which it is of")
        )
        raise UsageError(
            what,
            where=[f"{self.recipe.name}: `{at}`", *(f"{s}{{0..{n - 1}}}" for s, n in counts.items())],
            hint=f"add to the slice: {' or '.join(f'`stack: {w}`' for w in words[:4])}",
        )

    def run(self) -> Resolved:
        """All tensors in order."""
        origins: list[tuple[tuple[ModelRef, int], ...]] = []
        stacks: dict[str, tuple[tuple[tuple[ModelRef, int], ...], ...]] = {}
        tensors = list(self._loose(before=True))
        if self.recipe.slices[0].sources[0].layers is None:
            tensors += self._whole(self.parts[0], origins)
        elif len(self.stacks) < 2:
            tensors += self._sliced(self.parts, origins)
        else:
            tensors += self._by_stack(stacks)
        tensors += self._loose(before=False)
        bases = {str(part.base) for part in self.parts}
        unused = [
            f"`{c.filter}` ({name}, {where})"
            for where, name, setting in self.recipe.settings()
            for c in setting.conditions
            if c.filter != "*" and id(c) not in self.used and where not in bases
        ]
        return Resolved(tuple(tensors), tuple(origins), stacks, tuple(self.notes), tuple(dict.fromkeys(unused)))

    def _loose(self, *, before: bool) -> Iterator[Merged]:
        for part in self.parts:
            tables = {ref: self.index[ref].loose for ref in part.models}
            for name in _union(tables.values()):
                first = bool(BEFORE.search(name) and not AFTER.search(name))
                if before == first and self._part_of(name, before=before) is part:
                    yield self._tensor(part, name, {ref: (name, name in table) for ref, table in tables.items()}, 0)

    def _part_of(self, name: str, *, before: bool) -> _TensorModels:
        """The slice that a tensor without a layer goes by."""
        alike = {s: _common(name, s) for s in self.stacks}
        most = max(alike.values(), default=0)
        nearest = [s for s, n in alike.items() if n == most]
        if len(nearest) > 1 or not self.parts[0].stack:
            return self.parts[0 if before else -1]
        parts = [p for p in self.parts if [p.stack] == nearest] or self.parts[:1]
        return parts[0 if before else -1]

    def _by_stack(self, stacks: dict[str, tuple[tuple[tuple[ModelRef, int], ...], ...]]) -> Iterator[Merged]:
        """One stack after the other: its slices, or all of it from the models of the first slice."""
        for stack in self.stacks:
            origins: list[tuple[tuple[ModelRef, int], ...]] = []
            if parts := [p for p in self.parts if p.stack == stack]:
                yield from self._sliced(parts, origins)
                stacks[stack] = tuple(origins)
            else:
                yield from self._whole(self.parts[0], origins, only=stack)

    def _whole(
        self, part: _TensorModels, origins: list[tuple[tuple[ModelRef, int], ...]], only: str | None = None
    ) -> Iterator[Merged]:
        """All layers of models whose layers correspond; each stack has a first and a last layer of its own."""
        depths = {ref: self.depths[ref] for ref in part.models}
        stacks = _union(depths.values()) if only is None else {only: None}
        main = max(stacks, key=lambda s: max(d.get(s, 0) for d in depths.values()), default="")
        counts = {ref: d.get(main, 0) for ref, d in depths.items()}
        if len(set(counts.values())) > 1:
            each = ", ".join(f"{n} in {ref}" for ref, n in counts.items())
            self.notes.append(f"the models have different numbers of layers: {each}")
        for stack in stacks:
            common = min((d[stack] for d in depths.values() if stack in d), default=0)
            for number in range(max(d.get(stack, 0) for d in depths.values())):
                at = min(1.0, _place(number, common))
                here = dict.fromkeys(part.models, number)
                yield from self._layer(part, stack, number, here, at)
                if stack == main:
                    origins.append(tuple((ref, number) for ref in part.models if number < counts[ref]))

    def _sliced(
        self, parts: Sequence[_TensorModels], origins: list[tuple[tuple[ModelRef, int], ...]]
    ) -> Iterator[Merged]:
        for part in parts:
            ranges = {s.model: s.layers for s in part.piece.sources if s.layers is not None}
            for ref, layers in ranges.items():
                if layers.stop > (count := self.depths[ref].get(part.stack, 0)):
                    raise ConflictError(
                        f"{ref} has {count} layers, and layer_range is [{layers.start}, {layers.stop}]",
                        where=f"{self.recipe.name}: `slices[{self.parts.index(part)}]`",
                        hint=f"layers are numbered from 0, and the end is exclusive: [0, {count}] takes all",
                    )
            depth = min(len(layers) for layers in ranges.values())
            for offset in range(depth):
                here = {ref: layers[offset] for ref, layers in ranges.items()}
                yield from self._layer(part, part.stack, len(origins), here, _place(offset, depth))
                origins.append(tuple(here.items()))

    def _layer(
        self, part: _TensorModels, stack: str, number: int, here: Mapping[ModelRef, int], t: float
    ) -> Iterator[Merged]:
        """The tensors of one layer of the output; ``here`` are the layers that it comes from."""
        tables = {ref: self.index[ref].layer(stack, n, number) for ref, n in here.items()}
        self.notes += [
            f"`{rest.removeprefix('.')}` is stored with the first layer of {ref} only, and stays with the first"
            for ref, n in here.items()
            if number == 0 and n
            for rest in tables[ref].keys() - self.index[ref].layers.get((stack, n), {}).keys()
        ]
        for rest in _union(tables.values()):
            found = {
                ref: (table.get(rest, f"{stack}{here[ref]}{rest}"), rest in table) for ref, table in tables.items()
            }
            yield self._tensor(part, f"{stack}{number}{rest}", found, t)

    def _tensor(self, part: _TensorModels, name: str, found: Mapping[ModelRef, tuple[str, bool]], t: float) -> Merged:
        """``found``: the tensor's name in each model, and whether it is there."""
        levels = (part.piece.parameters, self.recipe.parameters)
        inputs = []
        parameters = []
        for source in part.sources:
            there, present = found[source.model]
            if present:
                inputs.append((source.model, there))
                own = (source.parameters, *levels)
                parameters.append(self._values(self.method.per_model, own, there, t, f"`{there}` of {source.model}"))
        base = (part.base, found[part.base][0]) if part.base is not None and found[part.base][1] else None
        return Merged(
            name,
            tuple(inputs),
            base,
            part.base_at,
            tuple(parameters),
            self._values(self.method.whole, levels, name, t, f"`{name}`"),
            tuple((ref, there) for ref, (there, present) in found.items() if not present),
        )

    def _values(
        self, schema: Mapping[str, Parameter], levels: Sequence[Settings], name: str, t: float, label: str
    ) -> dict[str, Scalar]:
        """The complete parameters of a tensor: for each, the first level that says something about it."""
        out: dict[str, Scalar] = {}
        for parameter, known in schema.items():
            value: Scalar | None = known.default
            for level in levels:
                setting = level.get(parameter)
                condition = setting.find(name) if setting is not None else None
                if setting is None or condition is None:
                    continue
                self.used.add(id(condition))
                try:
                    value = condition.at(t, setting.kind)
                except CkptError as e:
                    raise type(e)(f"`{parameter}`: {e.what}", where=label, hint=e.hint) from None
                break
            if value is None:
                raise UsageError(
                    f"no filter gives `{parameter}` for {label}",
                    hint=f"end the list with an entry without a filter: `- value: ...` under `{parameter}`",
                )
            out[parameter] = value
        return out


def _place(number: int, count: int) -> float:
    """Position of a layer from the first (0) to the last (1); the only one counts as the last."""
    return number / (count - 1) if count > 1 else 1.0


def _common(name: str, stack: str) -> int:
    """How many words both begin with."""
    pairs = zip(name.split("."), stack.split("."), strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(name.count("."), stack.count(".")) + 1)


def _telling(stacks: Sequence[str]) -> list[str]:
    """For each stack a word of its name that no other one has; all of it where there is none."""
    words = [s.rstrip(".").split(".") for s in stacks]
    others = [{w for j, other in enumerate(words) if j != i for w in other} for i in range(len(words))]
    return [
        next((w for w in mine if w not in theirs), ".".join(mine)) for mine, theirs in zip(words, others, strict=True)
    ]


def _union(tables: Iterable[Iterable[str]]) -> dict[str, None]:
    """All keys once, in the order in which they are first seen."""
    return {key: None for table in tables for key in table}
