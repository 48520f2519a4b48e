"""The tensors of a model from its config.json alone: the ``tensors:`` section of a family file, worked out.

The section says for every tensor its shape, and under which condition a model has it, in the words of config.json:

    tensors:
      defaults:
        head_dim: hidden_size // num_attention_heads
        attention_bias: false
      layers:
        self_attn.q_proj.weight: [heads * head_dim, hidden_size]
        if attention_bias:
          self_attn.q_proj.bias: [heads * head_dim]

Names, shapes and orientation are those of the checkpoints that Hugging Face publishes in high precision; where
defaults come from transformers, they are those of its configuration classes. Expressions are those of
layout/expressions.py, words those of layout/sizes.py and ``mtp`` (how many prediction layers there are); each is worked
out once, or once for each layer if it depends on the layer, never for each expert.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

from ckpttool.core.dtypes import CASTABLE, DTYPES, parse
from ckpttool.errors import LayoutError, UnsupportedError
from ckpttool.layout.classes import other_head
from ckpttool.layout.expressions import Refused, Value
from ckpttool.layout.family import Family
from ckpttool.layout.sizes import Scope, check_size, shown
from ckpttool.layout.spec import TensorsSpec

_ALTERNATIVES = re.compile(r"\{([^{}]*,[^{}]*)\}")
_CAPTURE = re.compile(r"\{([^{}]*)\}|[{}*]")
_COUNTED = {"expert": "experts", "mtp": "mtp"}
"""Words in braces that stand for every number from 0 on, and what says how many there are."""
_MOST = 2_000_000
"""More tensors than any model has; a config that asks for more is wrong, and would only fill the memory."""


class Declared(NamedTuple):
    """A tensor that the published checkpoint of a model holds."""

    name: str
    dtype: str
    """Name of the safetensors format."""
    shape: tuple[int, ...]
    """Before any quantization, oriented as Hugging Face stores it."""


def declared_tensors(family: Family, config: Mapping[str, Any], *, mtp: bool = True) -> list[Declared]:
    """All tensors of the model that ``config`` describes, in the order in which a model holds them.

    ``mtp=False`` leaves the multi-token-prediction layers out. Raises LayoutError for a family that does not say which
    tensors its models have, a field that the config lacks or has with a value that it cannot have, and an expression
    that cannot be worked out, and for what the family refuses.
    """
    spec = family.spec.tensors
    if spec is None:
        raise LayoutError(
            f"family `{family.name}` does not say which tensors a model has",
            where=family.origin or (),
            hint="add a `tensors:` section to the file given with --family",
        )
    scope = _ShapeScope(family, spec, config)
    scope.given["mtp"] = scope.number(spec.mtp, ("mtp",)) if mtp else 0
    if scope.skips:
        raise LayoutError(
            "some layers of the model lack modules (`skip` in `per_layer_config` of config.json), which"
            f" family `{family.name}` does not know",
            hint="give the checkpoint itself in place of its config.json",
        )
    for condition, why in spec.refuse.items():
        if scope.holds(condition, ("refuse",)):
            raise scope.wrong(why, ("refuse",), condition, "give the checkpoint itself in place of its config.json")
    out = _TensorList(scope, config_dtype(family.spec.places(config)))
    out.add(_entries(spec.first, ("first",), family))
    for name, stack in spec.stacks.items():
        rules = family.spec.stacks.get(name)
        prefix = stack.prefix or (rules.prefix if rules else "")
        out.add_layers(_LayerLines(("stacks", name), stack.count, prefix, stack.tensors), family)
    prefix = spec.prefix or family.spec.layers.prefix
    out.add_layers(_LayerLines((), spec.count, prefix, spec.layers), family)
    behind = len(out.found)
    out.add(_entries(spec.last, ("last",), family))
    if "architectures" not in str(spec):  # else the family knows its classes itself
        out.found[behind:] = _with_head_of_class(out.found, behind, family, config)
    out.check()
    return out.found


UNKNOWN = "?"
"""Stands for a line that the config does not determine, the same for every layer."""


def layer_tensors(
    family: Family, config: Mapping[str, Any], stack: str = ""
) -> tuple[list[dict[str, Any]], dict[str, tuple[list[str], list[str]]]]:
    """The tensors of each layer of a stack: the lines of the section that hold for it, and the shape of each.

    ``stack`` "" is the main one. A line is ``UNKNOWN`` where the config lacks what it needs for every layer alike.
    Also returns for each line the fields of the config from which the conditions that differ from layer to layer, and
    its shape, are read.
    Raises LayoutError as ``declared_tensors`` does, for what differs from layer to layer.
    """
    spec = family.spec.tensors
    assert spec is not None  # noqa: S101 - asked before
    scope = _ShapeScope(family, spec, config)
    with suppress(LayoutError):  # how many there are beyond the others
        scope.given["mtp"] = scope.number(spec.mtp, ("mtp",))
    count, lines = (spec.count, spec.layers) if not stack else (spec.stacks[stack].count, spec.stacks[stack].tensors)
    path = ("stacks", stack) if stack else ()
    entries = _entries(lines, (*path, "tensors" if stack else "layers"), family)
    out: list[dict[str, Any]] = []
    for layer in range(min(scope.number(count, (*path, "count")), _MOST)):
        scope.enter(layer)
        found = {": ".join(e.path): _line(scope, e) for e in entries}
        out.append({line: shape for line, shape in found.items() if shape is not None})
    scope.enter(None)

    def fields(texts: Iterable[str]) -> list[str]:
        return list(dict.fromkeys(n for t in texts for n in scope.read(t)))

    def decides(text: str) -> bool:
        return scope.depends(partial(scope.work_out, text))

    read = {
        ": ".join(e.path): (fields(t for t, _ in e.conditions if decides(t)), fields(map(str, e.shape)))
        for e in entries
    }
    return out, read


def _line(scope: _ShapeScope, entry: _ShapeLine) -> tuple[int | str, ...] | str | None:
    """The shape of a line in the layer that the scope is in; None where its conditions do not hold."""
    for text, path in entry.conditions:
        try:
            if not scope.holds(text, path):
                return None
        except LayoutError:
            if scope.depends(partial(scope.work_out, text)):
                raise
            return UNKNOWN
    out: list[int | str] = []
    for size in entry.shape:
        try:
            out.append(scope.number(size, entry.path))
        except LayoutError:
            if scope.depends(partial(scope.work_out, str(size))):
                raise
            out.append(UNKNOWN)
    return tuple(out)


def _with_head_of_class(
    found: Sequence[Declared], behind: int, family: Family, config: Mapping[str, Any]
) -> list[Declared]:
    """The tensors from ``behind`` on, with the head that the class of config.json has in place of an output head."""
    last = list(found[behind:])
    head = other_head(config, family.spec.architectures)
    embedding = next((t for t in found if _is_vocab(family, t.name, "first")), None)
    if head is None or embedding is None:
        return last
    last = [t for t in last if not _is_vocab(family, t.name, "last")]
    if head.name:
        weight, bias = f"{head.name}.weight", f"{head.name}.bias"
        said = next((n for p in family.spec.places(config) for n in (p.get("id2label"), p.get("num_labels")) if n), 2)
        labels = said if type(said) is int else len(said) if isinstance(said, dict) else 2
        last.append(Declared(weight, embedding.dtype, (labels, embedding.shape[-1])))
        last += [Declared(bias, embedding.dtype, (labels,))] if head.bias else []
    return last


def _is_vocab(family: Family, name: str, stage: str) -> bool:
    place = family.placement(name)
    return place is not None and place.stage == stage and place.rule.verb == "vocab"


def check_sizes(family: Family, config: Mapping[str, Any]) -> None:
    """Raises LayoutError for a field of the config that a size of the family comes from, and that is no whole number.

    Reading sizes takes such a field for one that is not there, as what is only moved needs few of them.
    """
    scope = Scope(family.vocabulary, family.spec.places(config), family.sizes)
    for name in family.vocabulary.specs:
        try:
            check_size(scope, name)
        except Refused as e:
            raise LayoutError(e.why, where=(f"{family.origin}: sizes: {name}", *e.through), hint=e.hint) from None


@dataclass(frozen=True, slots=True)
class _ShapeLine:
    """One line of the section."""

    path: tuple[str, ...]
    """The keys that lead to it, for messages."""
    conditions: tuple[tuple[str, tuple[str, ...]], ...]
    """Expressions that must all hold, and the keys that lead to each."""
    shape: tuple[int | str, ...]
    dtype: str
    """"" is that of the config."""
    counted: str
    """The word of ``_COUNTED`` that its names have, or ""."""
    names: tuple[tuple[str, str], ...]
    """Prefix and suffix of the number, for each choice among the pattern's alternatives."""


def _wrong(family: Family, path: Sequence[str], why: str, *, hint: str | None = None) -> LayoutError:
    return LayoutError(why, where=f"{family.origin}: tensors: {': '.join(path)}", hint=hint)


@dataclass(frozen=True, slots=True)
class _LayerLines:
    """The lines of a stack of layers."""

    path: tuple[str, ...]
    """The keys that lead to it, for messages."""
    count: int | str
    prefix: str
    """Prefix of the names of a layer's tensors, with {layer}."""
    lines: Mapping[Any, Any]


def _entries(tree: Mapping[Any, Any], path: tuple[str, ...], family: Family) -> list[_ShapeLine]:
    """The lines of one part of the section, each with the conditions that it stands under."""
    return list(_walk(tree, path, (), family))


def _walk(
    tree: Mapping[Any, Any], path: tuple[str, ...], conditions: tuple[tuple[str, tuple[str, ...]], ...], family: Family
) -> Iterator[_ShapeLine]:
    for key, value in tree.items():
        here = (*path, str(key))
        if str(key).startswith("if "):
            if not isinstance(value, dict):
                raise _wrong(family, here, "a condition needs tensors below it")
            yield from _walk(value, here, (*conditions, (str(key)[3:], here)), family)
            continue
        shape, dtype = value, ""
        if isinstance(value, dict):
            shape, dtype = value.get("shape"), value.get("dtype", "")
            if other := sorted(set(map(str, value)) - {"shape", "dtype"}):
                raise _wrong(
                    family, here, f"`{other[0]}` is not a key of a tensor", hint="a tensor has `shape` and `dtype`"
                )
            if dtype != "" and not (isinstance(dtype, str) and dtype in DTYPES):
                raise _wrong(family, here, f"`{dtype}` is not a dtype", hint=f"one of {', '.join(DTYPES)}")
        if not isinstance(shape, list) or not all(type(n) in (int, str) for n in shape):
            raise _wrong(
                family,
                here,
                "a tensor needs a list of its sizes",
                hint="[hidden_size] or {shape: [experts], dtype: F32}",
            )
        counted, names = _names(str(key), here, family)
        yield _ShapeLine(here, conditions, tuple(shape), dtype, counted, names)


def _names(pattern: str, path: Sequence[str], family: Family) -> tuple[str, tuple[tuple[str, str], ...]]:
    """The counted word of a pattern, and for each choice among its alternatives what stands around it."""
    counted, whole = "", [""]
    for i, part in enumerate(_ALTERNATIVES.split(pattern)):
        if i % 2:
            whole = [start + choice for start in whole for choice in part.split(",")]
            continue
        for m in _CAPTURE.finditer(part):
            if m[1] not in _COUNTED or counted:
                raise _wrong(
                    family,
                    path,
                    f"`{m[0]}` cannot stand in the name of a tensor" if not counted else "a tensor has one number",
                    hint="{expert}, {mtp} or alternatives: {q_proj,k_proj}",
                )
            counted = m[1]
        whole = [start + part for start in whole]
    split = [name.partition(f"{{{counted}}}") if counted else (name, "", "") for name in whole]
    return counted, tuple((head, tail) for head, _, tail in split)


def _check_prefix(layers: _LayerLines, family: Family) -> None:
    """Raises LayoutError for a prefix that gives a layer no name, or several."""
    if layers.lines and _CAPTURE.findall(layers.prefix) != ["layer"]:
        raise _wrong(
            family,
            (*layers.path, "prefix"),
            f"`{layers.prefix}` does not give every layer one name",
            hint='give the names of a layer\'s tensors a `prefix` with {layer}: prefix: "model.layers.{layer}."',
        )


def config_dtype(places: Sequence[Mapping[str, Any]]) -> str:
    """Dtype of the weights: ``dtype`` or ``torch_dtype`` of the config, BF16 if it has neither."""
    for place in places:
        for key in ("dtype", "torch_dtype"):
            said = place.get(key)
            if said is None or said == "auto":  # whatever the files have, which a config alone does not say
                continue
            try:
                dtype = parse(str(said)).name
            except UnsupportedError as e:
                raise LayoutError(f"`{key}` of config.json: {e.what}", hint=e.hint) from None
            if dtype not in CASTABLE:
                raise LayoutError(
                    f"`{key}` of config.json is {said}, which no model is published in before quantization",
                    hint=f"use one of {', '.join(sorted(CASTABLE))}",
                )
            return dtype
    return "BF16"


class _TensorList:
    """The list in the making."""

    def __init__(self, scope: _ShapeScope, dtype: str) -> None:
        self.found: list[Declared] = []
        self._scope = scope
        self._dtype = dtype

    def add(self, entries: Sequence[_ShapeLine], prefix: str = "") -> None:
        """The tensors of these lines, as far as their conditions hold. Neighbours with {expert} go expert by expert."""
        scope = self._scope
        there = [e for e in entries if all(scope.holds(text, path) for text, path in e.conditions)]
        for counted, run in groupby(there, key=lambda e: e.counted):
            group = [(e, e.dtype or self._dtype, scope.shape(e)) for e in run]
            count = scope.number(_COUNTED[counted], group[0][0].path) if counted else 1
            if len(self.found) + count * len(group) > _MOST:
                raise scope.wrong(f"the config asks for more than {_MOST:,} tensors", group[0][0].path)
            for i in range(count):
                number = str(i) if counted else ""
                self.found += [
                    Declared(f"{prefix}{head}{number}{tail}", dtype, shape)
                    for entry, dtype, shape in group
                    for head, tail in entry.names
                ]

    def add_layers(self, layers: _LayerLines, family: Family) -> None:
        """The tensors of a stack, layer by layer."""
        scope = self._scope
        count = scope.number(layers.count, (*layers.path, "count"))
        if count > _MOST:
            what = f"{count:,} layers are more than any model has"
            raise scope.wrong(what, (*layers.path, "count"), str(layers.count))
        _check_prefix(layers, family)
        entries = _entries(layers.lines, (*layers.path, "tensors" if layers.path else "layers"), family)
        for layer in range(count):
            scope.enter(layer)
            self.add(entries, layers.prefix.replace("{layer}", str(layer)))
        scope.enter(None)

    def check(self) -> None:
        """Raises LayoutError when two lines declare the same tensor."""
        seen: set[str] = set()
        for name, _, _ in self.found:
            if name in seen:
                raise self._scope.wrong(f"`{name}` is declared twice", ())
            seen.add(name)


class _ShapeScope(Scope):
    """The meaning of a section's words; errors name the line."""

    def __init__(self, family: Family, spec: TensorsSpec, config: Mapping[str, Any]) -> None:
        super().__init__(family.vocabulary, family.spec.places(config), family.sizes)
        self._origin = family.origin
        self.given["mtp"] = 0

    def wrong(self, why: str, path: Sequence[str], text: str = "", hint: str | None = None) -> LayoutError:
        at = [": ".join([self._origin, "tensors", *path, *([f"`{text}`"] if text else [])])]
        if text and (read := self.read(text)):
            at.append("config.json: " + ", ".join(f"`{name}` is {shown(value)}" for name, value in read.items()))
        return LayoutError(why, where=at, hint=hint)

    def value(self, text: str, path: Sequence[str]) -> Value:
        """The value of an expression. Raises LayoutError naming file, tensor and expression."""
        try:
            return self.work_out(text)
        except Refused as e:
            first, *more = self.wrong(e.why, path, text).where
            raise LayoutError(e.why, where=(first, *e.through, *more), hint=e.hint) from None
        except RecursionError:
            raise self.wrong("this expression is too deep", path) from None

    def number(self, text: str | int, path: Sequence[str]) -> int:
        """An expression that counts something."""
        got = text if isinstance(text, int) else self.value(text, path)
        if type(got) is not int or got < 0:
            raise self.wrong(f"this comes to {got!r}, which is not a count", path, str(text))
        return got

    def shape(self, entry: _ShapeLine) -> tuple[int, ...]:
        out = []
        for text in entry.shape:
            got = text if isinstance(text, int) else self.value(text, entry.path)
            if type(got) is not int or not 1 <= got < 1 << 63:
                raise self.wrong(f"this comes to {got!r}, which is not a size", entry.path, str(text))
            out.append(got)
        return tuple(out)

    def holds(self, text: str, path: Sequence[str]) -> bool:
        """Whether a condition is met."""
        got = self.value(text, path)
        if isinstance(got, str):
            raise self.wrong(f"this comes to {got!r}, which is neither true nor false", path, text)
        return bool(got)
