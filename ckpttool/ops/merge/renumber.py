"""config.json of a merge whose layers have other numbers than those of its sources.

What each layer is stays as it was: fields that speak of layers by number follow, fields that say it by a rule get
values that say the same, and then each layer of the output is compared with its source. What cannot be said is refused,
because a loader fills layers of another kind with random numbers, or computes them in another way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import product
from typing import Any, NamedTuple

from ckpttool.core.words import some
from ckpttool.errors import CkptError, UnsupportedError
from ckpttool.formats.config import LAYERS, PREDICTION
from ckpttool.layout.assemble import LAYER
from ckpttool.layout.family import Family, pick_family
from ckpttool.layout.rules import varying
from ckpttool.layout.sizes import shown
from ckpttool.layout.slices import EACH, NUMBERS, LayerStack, speaks_of_tower, stack_fields, stacks_of, unknown_field
from ckpttool.ops.merge.models import Models
from ckpttool.ops.merge.stack_count import Config, CountedStack, put_value, value_at
from ckpttool.recipe.model import ModelRef, Recipe
from ckpttool.recipe.resolve import Resolved

_NUMBERS = re.compile(r"[\s,]*\d{1,9}(?:[\s,]+\d{1,9})*[\s,]*")
_STACK_PARTS = {
    "vision_config": re.compile("visi|visual|image|patch"),
    "audio_config": re.compile("audio|speech"),
    "text_config": re.compile("text|language|llm"),
    "llm_config": re.compile("text|language|llm"),
    "encoder": re.compile(r"(?<![^.])encoder\."),
    "decoder": re.compile(r"(?<![^.])decoder\."),
}
"""Parts of config.json, and what stacks are called that they are about, where the family does not say it."""
_TOWERS = ("vision_config", "audio_config")
_STACK_COUNTS = {
    "encoder.": ("encoder_layers", "num_encoder_layers", *LAYERS),
    "decoder.": ("decoder_layers", "num_decoder_layers"),
    "": (*LAYERS, "depth"),
}
"""Fields that count the layers of a stack whose name has this word, likewise."""


class OutputLayer(NamedTuple):
    """Where a layer of the output comes from."""

    config: Mapping[str, Any]
    """Config of its model."""
    number: int


def restacked(recipe: Recipe, resolved: Resolved, models: Models, donor: ModelRef, family: str) -> Mapping[str, Any]:
    """The donor's config for what the slices of a recipe have made of its layers.

    ``family`` is that of --family. Raises UnsupportedError as ``renumbered`` does.
    """
    checkpoint = models[donor].checkpoint
    config: Mapping[str, Any] = checkpoint.config
    if all(s.layers is None for piece in recipe.slices for s in piece.sources):
        return config
    known = pick_family(family, checkpoint.stored.family, config)
    depths: dict[str, int] = {}
    for name in models[donor].views:
        if m := LAYER.search(name):
            depths[name[: m.start(1)]] = max(depths.get(name[: m.start(1)], 0), int(m[1]) + 1)
    stacks = resolved.stacks or dict.fromkeys([*depths][:1], resolved.layers)
    donor_config = config
    for prefix, origins in stacks.items():
        _check_kinds(known, models, donor, prefix, [*depths], origins)
        sources = [next((o for o in origin if o[0] == donor), origin[0]) for origin in origins]
        layers = [
            OutputLayer(donor_config if ref == donor else models[ref].checkpoint.config, number)
            for ref, number in sources
        ]
        if layers != [OutputLayer(donor_config, i) for i in range(depths.get(prefix, 0))]:
            layers = [OutputLayer(config, x.number) if x.config is donor_config else x for x in layers]
            config = renumbered(known, config, prefix, layers, {p: n for p, n in depths.items() if p != prefix})
    return config


def _check_kinds(
    family: Family,
    models: Models,
    donor: ModelRef,
    prefix: str,
    prefixes: Sequence[str],
    origins: Sequence[Sequence[tuple[ModelRef, int]]],
) -> None:
    """Raises UnsupportedError for layers of different kinds that are merged into one.

    Models of which all layers differ alike (other windows, another rope) may be merged; a layer is compared with those
    beside it in its own model.
    """
    if family.name == "none" or all(len(o) < 2 for o in origins):
        return
    refs = dict.fromkeys([donor, *(ref for o in origins for ref, _ in o)])
    kinds: dict[ModelRef, list[dict[str, Any]]] = {}
    for ref in refs:
        config = models[ref].checkpoint.config
        stack = stacks_of(family, config, prefixes).get(prefix)
        described = LayerStack.of(family, config, stack or "")
        count = described.count or 0
        if stack is None or (not count and not stack):
            return
        kinds[ref] = [described.layer(n) for n in range(count)]
    for i, origin in enumerate(origins):
        first, *others = sorted(origin, key=lambda o: o[0] != donor)
        for other in others:
            if what := _differ(kinds, first, other):
                raise UnsupportedError(
                    f"layer {i} of the output is merged from layers of different kinds:"
                    f" {first[1]} of {first[0]} and {other[1]} of {other[0]} differ in {some(what)}",
                    hint="merge layers of one kind with each other",
                )


def _differ(
    kinds: Mapping[ModelRef, Sequence[Mapping[str, Any]]], a: tuple[ModelRef, int], b: tuple[ModelRef, int]
) -> list[str]:
    """In what two layers differ, other than their whole models do."""
    (ref, m), (other, n) = a, b
    mine, theirs = kinds[ref], kinds[other]
    if max(m, n) >= min(len(mine), len(theirs)):  # of multi-token prediction, or of models that differ in depth
        return [] if m >= len(mine) or n >= len(theirs) else [k for k in mine[m] if mine[m][k] != theirs[n].get(k)]
    out = []
    for k in {**mine[m], **theirs[n]}:
        here, there = ([layer.get(k, "no") for layer in layers] for layers in (mine, theirs))
        places = [[values.index(v) for v in values] for values in (here, there)]
        alike = all(x == y for x, y in zip(*places, strict=False))
        if here[n] != here[m] if alike else here[m] != there[n]:
            out.append(k)
    return out


def renumbered(
    family: Family,
    config: Mapping[str, Any],
    prefix: str,
    layers: Sequence[OutputLayer],
    others: Mapping[str, int] | None = None,
) -> Config:
    """The config for an output that has these layers in a stack, whose names begin with ``prefix``.

    ``others``: what names in the model's other stacks begin with, and how many layers these have.
    Raises UnsupportedError where no value of the config's fields says what each layer is, for fields that may speak of
    layers and are not known, and for a stack whose layers no field counts, or one that counts those of another stack
    too. Raises LayoutError for a config that the family cannot read.
    """
    others = others or {}
    stacks = stacks_of(family, config, [prefix, *others]) if family.name != "none" else {}
    stack = stacks.get(prefix)
    tower = _is_tower(prefix)
    if tower and (field := speaks_of_tower(config)):
        raise UnsupportedError(
            f"`{field}` of config.json is {shown(config[field])}, which speaks of layers of a tower by number",
            hint="merge this stack whole, with `models`",
        )
    if stack is not None or (not others and family.name != "none"):
        return _followed(family, config, stack or "", layers, LAYERS, tower=tower)
    part, counts = _by_words(config, prefix) if others else ("", LAYERS)
    if not counts:
        raise _uncounted(prefix)
    place = config[part] if part else config
    for other in (o for o in others if stacks.get(o) is None):
        found, fields = _by_words(config, other)
        if others[other] == place[counts[0]] and (not fields or (found, fields) == (part, counts)):
            raise _uncounted(prefix, f" and not those of `{other}`")
    if not part and family.name != "none" and "" in stacks.values():  # these fields count the layers of that one
        raise _uncounted(prefix)
    if not part:
        return _followed(family, config, "", layers, counts, tower=tower)
    inner = [OutputLayer(x.config.get(part) or {}, x.number) for x in layers]
    own = next((x.config for x in inner if x.config == config[part]), config[part])
    inner = [OutputLayer(own, x.number) if x.config == own else x for x in inner]
    return {**config, part: _followed(pick_family("", "", own), own, "", inner, counts, tower=tower)}


def _followed(
    family: Family,
    config: Mapping[str, Any],
    stack: str,
    layers: Sequence[OutputLayer],
    counts: Sequence[str],
    *,
    tower: bool,
) -> Config:
    least = max((x.number for x in layers), default=-1) + 1
    return _LayerFields(CountedStack(family, config, stack, counts, least), layers, tower=tower).followed()


def _uncounted(prefix: str, more: str = "") -> UnsupportedError:
    return UnsupportedError(
        f"no field of config.json is known to count the layers of `{prefix}`{more}",
        hint="merge this stack whole, with `models`",
    )


class _LayerFields:
    """The fields of one stack that speak of its layers, for an output with other layers."""

    def __init__(self, stack: CountedStack, layers: Sequence[OutputLayer], *, tower: bool) -> None:
        self.stack, self.layers, self.tower = stack, list(layers), tower
        self.family, self.config, self.before, self.count = stack.family, stack.config, stack.described, stack.count
        self.out: Config = deepcopy(dict(stack.config))
        self.places = stack.places(self.out)
        configs = {id(x.config): x.config for x in layers}
        self.sources = {key: LayerStack.of(self.family, c, stack.stack) for key, c in configs.items()}
        self.sources[id(stack.config)] = self.before
        self.regular = [x for x in layers if x.number < (self._from(x).count or self.count)]
        said = self.family.spec.slices
        own = stack_fields(self.family, stack.stack) if stack.stack else said
        self.each = {*EACH, *own.each}
        self.from_one = {*said.from_one} if not stack.stack else set()
        self.numbers = {*NUMBERS, *own.numbers}
        self.apart = {*own.apart}
        self.paths = self.each | self.numbers | self.from_one
        self._sized: Family | None = None
        """The family with the sizes of the output."""

    def followed(self) -> Config:
        """The config of the output. Raises as ``renumbered``."""
        if self.layers[: len(self.regular)] != self.regular:
            raise UnsupportedError(
                "the slices put layers of multi-token prediction before others",
                hint="name them in the last slice, or leave them out",
            )
        self.stack.set(self.out, self.places, len(self.regular))
        for path in sorted(self.paths):
            self._follow(path)
        self._refuse_unknown()
        if not self.stack.stack:
            for rule in self.family.spec.slices.rules:
                self._rule(rule)
        self._prove()
        return self.out

    # -- what follows

    def _follow(self, path: str) -> None:
        for i, place in enumerate(self.places):
            value = value_at(place, path)
            if value is None or isinstance(value, bool | int | float):
                continue
            taken = self._numbers(path, i, value) if path in self.numbers | self.from_one else None
            taken = self._each(path, i, value) if taken is None else taken
            if taken is not None:
                put_value(place, path, taken)

    def _source(self, layer: OutputLayer, path: str, place: int, default: Any) -> Any:
        """The same field of the model that a layer comes from."""
        if layer.config is self.config:
            return default
        places = self.stack.places(layer.config)
        found = value_at(places[place], path) if place < len(places) else None
        if type(found) is not type(default):
            raise UnsupportedError(
                f"config.json of another model whose layers are stacked does not have `{path}` as that of the first",
                hint="give both models config.json of the same form",
            )
        return found

    def _numbers(self, path: str, place: int, value: Any) -> Any:
        first = 1 if path in self.from_one else 0
        if isinstance(value, str) and _NUMBERS.fullmatch(value):
            listed = self._numbers(path, place, [int(n) for n in re.findall(r"\d+", value)])
            gap = re.search(r"\d([\s,]+)\d", value)
            return (gap[1] if gap else ",").join(map(str, listed))
        if not isinstance(value, list) or not all(type(n) is int for n in value):
            return None
        by_source = [
            layer.number + first in _as_numbers(self._source(layer, path, place, value)) for layer in self.regular
        ]
        beyond = [n - self.count + len(self.regular) for n in value if n - first >= self.count]
        return [i + first for i, held in enumerate(by_source) if held] + beyond

    def _each(self, path: str, place: int, value: Any) -> Any:
        """The entries of the layers; None for what does not hold an entry for each."""
        if isinstance(value, dict) and value and all(str(k).isdecimal() for k in value):
            width = (
                max(len(str(k)) for k in value) if any(str(k).startswith("0") and len(str(k)) > 1 for k in value) else 0
            )
            maps = [{int(k): v for k, v in self._source(x, path, place, value).items()} for x in self.regular]
            found = {
                str(i).zfill(width): m[x.number]
                for i, (x, m) in enumerate(zip(self.regular, maps, strict=True))
                if x.number in m
            }
            beyond = {str(int(k) - self.count + len(self.regular)): v for k, v in value.items() if int(k) >= self.count}
            return found | beyond
        apart = re.split(r"([,\s]+)", value) if isinstance(value, str) else []
        if len(apart) > 1 and len(apart[::2]) >= self.count:
            listed = self._each(path, place, apart[::2])
            return apart[1].join(listed)
        if not isinstance(value, list | str) or len(value) < self.count:
            return None
        taken = [self._source(x, path, place, value) for x in self.regular]
        if any(len(t) <= x.number for t, x in zip(taken, self.regular, strict=True)):
            return None
        got = [t[x.number] for t, x in zip(taken, self.regular, strict=True)]
        return "".join(got) + value[self.count :] if isinstance(value, str) else [*got, *value[self.count :]]

    # -- what is said by a rule

    def _rule(self, rule: Mapping[str, int | str]) -> None:
        """Give the fields of a rule the first values that say what the layers are. Nothing where they say it already,
        or where none do: what is wrong then is found later.

        Where a list says it too, and for the model that is loaded, numbers beside it still say the same if they can.
        """
        fields = [f for f in rule if f != "if"]
        texts = self.before.tests(fields)
        wanted = {t: [self._from(x).test(t, x.number) for x in self.regular] for t in texts}
        alone = all(rule[f] == "number" for f in fields) and any(f in p for f in fields for p in self.places)
        if not texts or self._says(self.out, wanted, alone=alone):
            return
        for values in self._candidates(rule):
            tried = deepcopy(self.out)
            home = self._home(self.stack.places(tried), rule)
            for field, value in values.items():
                put_value(home, field, value)
            if self._allowed(rule, tried) and self._says(tried, wanted, alone=alone):
                self.out = tried
                self.places = self.stack.places(tried)
                return

    def _home(self, places: Sequence[Any], rule: Mapping[str, Any]) -> Any:
        """The place that has the fields of a rule, or the number of layers."""
        counted = (*LAYERS, *self.before.count_fields)
        having = (p for names in (rule, counted) for p in places if any(f in p for f in names))
        return next(having, places[0])

    def _from(self, layer: OutputLayer) -> LayerStack:
        """The stack in the model that a layer comes from."""
        return self.sources[id(layer.config)]

    def _described(self, config: Mapping[str, Any]) -> LayerStack:
        return LayerStack.of(self.family, config, self.stack.stack)

    def _allowed(self, rule: Mapping[str, int | str], config: Config) -> bool:
        condition = rule.get("if")
        return not condition or bool(self._tried(config).test(str(condition), 0))

    def _tried(self, config: Config) -> LayerStack:
        """The layers as a config describes them that has other fields than ``out``, and the same number of layers."""
        if self._sized is None:
            self._sized = self._described(self.out).family
        if varying(self._sized.sizes):
            return self._described(config)
        return LayerStack(self._sized, config, self.stack.stack)

    def _says(self, config: Config, wanted: Mapping[str, Sequence[Any]], *, alone: bool) -> bool:
        """Whether a config gives expressions the wanted values; ``alone``: without its lists."""
        configs = [config]
        if alone and any(isinstance(p.get(path), list | str) for p in self.places for path in self.paths):
            configs.append(deepcopy(config))
            for place in self.stack.places(configs[1]):
                for path in self.paths & {*place}:
                    if isinstance(place[path], list | str):
                        del place[path]
        now = [self._tried(c) for c in configs]
        return all(d.test(t, i) == v for d in now for t, values in wanted.items() for i, v in enumerate(values))

    def _candidates(self, rule: Mapping[str, int | str]) -> Iterator[dict[str, Any]]:
        searched = [f for f, said in rule.items() if said == "number"]
        fixed: dict[str, Any] = {}
        for field, said in rule.items():
            if isinstance(said, int):
                fixed[field] = said
            elif field != "if" and said != "number":
                values = [self._from(x).test(said, x.number) for x in self.regular]
                if "?" in values:
                    return
                plain = [int(v) if isinstance(v, bool) else v for v in values]
                fixed[field] = [i for i, v in enumerate(plain) if v] if field in self.numbers else plain
        for numbers in product(range(len(self.regular) + 2), repeat=len(searched)):
            yield fixed | dict(zip(searched, numbers, strict=True))

    # -- what nobody has declared, and the proof

    def _refuse_unknown(self) -> None:
        stays = [x.number for x in self.layers] == list(range(self.count)) and all(
            x.config is self.config for x in self.layers
        )
        if stays:
            return
        spec = self.family.spec.tensors
        stacks = ["", *(spec.stacks if spec else ())]
        known = {*self.paths, *self.apart, *self.before.fields, *PREDICTION}
        known |= {f for s in stacks for f in LayerStack(self.family, self.config, s).count_fields}
        known |= {f for rule in self.family.spec.slices.rules for f in rule}
        for place in self.places:
            if found := unknown_field(place, known, self.count, tower=self.tower):
                path, value = found
                raise UnsupportedError(
                    f"`{path}` of config.json is {shown(value)}: it may refer to layers by number, and the slices"
                    " renumber them",
                    where=self.family.origin or (),
                    hint="declare it in a family file under `slices:` (docs/layouts/tensors.md): --family FILE",
                )

    def _prove(self) -> None:
        """Raises UnsupportedError unless each layer is what it was."""
        now = self._described(self.out)
        for i, layer in enumerate(self.layers):
            try:
                changed = self._from(layer).changes(now, i, layer.number)
            except CkptError as e:
                raise UnsupportedError(
                    f"config.json does not say what the layers of the output are: {e.what}", where=e.where, hint=e.hint
                ) from None
            if not changed:
                continue
            read = {k: v for what in changed for k, v in now.reads(what).items() if k not in self.before.count_fields}
            fields = some([f"`{k}`" for k in read]) if read else "the number of layers"
            what = changed[0].rpartition(": ")[2]
            raise UnsupportedError(
                f"config.json cannot describe the layers in this order: with {fields}, layer {i} would not be what"
                f" layer {layer.number} of its source is (`{what}`)",
                where=self.family.origin,
                hint="choose slices that leave each kind of layer where the config expects it",
            )


def _is_tower(prefix: str) -> bool:
    """Whether a stack is a vision or an audio tower, by what its names begin with."""
    return any(_STACK_PARTS[name].search(prefix) for name in _TOWERS)


def _as_numbers(value: Any) -> set[int]:
    return {int(n) for n in re.findall(r"\d+", value)} if isinstance(value, str) else set(value)


def _by_words(config: Mapping[str, Any], prefix: str) -> tuple[str, Sequence[str]]:
    """The part of the config that is about a stack of which the family knows nothing, "" for all of it, and the fields
    that count its layers, by what they are called."""
    part = next(
        (n for n, words in _STACK_PARTS.items() if isinstance(config.get(n), dict) and words.search(prefix)), ""
    )
    place = config[part] if part else config
    words = () if not part and _is_tower(prefix) else next(f for word, f in _STACK_COUNTS.items() if word in prefix)
    return part, [f for f in words if type(place.get(f)) is int]
