"""The values of the words of a family file's expressions for one config.json, and the sizes that come of them.

A word is the first of these that there is: ``layer``, a name of the section ``tensors``, a size of the family, a field
of config.json (or of its ``text_config``; ``a.b`` is field b of its part a), its default. What ``per_layer_config``
says of a field holds in that layer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ckpttool.errors import LayoutError
from ckpttool.formats.config import TIED, values_at
from ckpttool.layout.expressions import Expressions, Refused, Value, checked, words
from ckpttool.layout.rules import CutSize, Sizes, in_layer, varying

HINT = "correct it in config.json, as the authors of the model publish it"

_LAYER = re.compile("[0-9]{1,9}")
_MOST_LAYERS = 10_000
"""More than any model has; a config that asks for more is wrong."""


class SizeSpec(BaseModel):
    """The source of a size: the first config field that is there, else the default; or an expression."""

    model_config = ConfigDict(extra="forbid")

    fields: list[str] = Field(default=[], alias="from")
    """Names of fields, or dotted paths (``vision_config.hidden_size``)."""
    expr: str = ""
    plus: list[str] = []
    """Config fields that are added to it."""
    default: int | str | None = None
    """A number or an expression."""
    shared: bool = False

    @field_validator("expr", "default")
    @classmethod
    def _is_expression(cls, text: int | str | None) -> int | str | None:
        try:
            return checked(text) if isinstance(text, str) and text else text
        except Refused as e:
            raise ValueError(f"`{str(text)[:60]}`: {e.why}") from None

    @model_validator(mode="after")
    def _has_one_source(self) -> SizeSpec:
        if bool(self.fields) == bool(self.expr):
            raise ValueError("a size comes `from` fields of config.json or is an `expr`, one of the two")
        if self.expr and (self.plus or self.default is not None):
            raise ValueError("a size that is an `expr` says all in it: no `plus` and no `default` beside it")
        return self


class DefaultSpec(BaseModel):
    """The default of a config field, where that is not null."""

    model_config = ConfigDict(extra="forbid")

    missing: bool | int | str | list[int | str]
    none: bool | int | str | list[int | str]
    """The field is null."""


Default = bool | int | str | list[int | str] | DefaultSpec


def size_spec(short: SizeSpec | str | list[str]) -> SizeSpec:
    """The full form of what a family file says of a size."""
    if isinstance(short, SizeSpec):
        return short
    return SizeSpec.model_validate({"from": [short] if isinstance(short, str) else short})


@dataclass(frozen=True, slots=True)
class SizeVocabulary:
    """The words of a family file's expressions."""

    family: str
    origin: str
    """File name, for messages."""
    specs: Mapping[str, SizeSpec]
    """The sizes, in the order of the file."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Expressions that are used more than once."""
    defaults: Mapping[str, Default] = field(default_factory=dict)
    """Defaults of fields. A text is an expression."""
    count: int | str = "layers"
    """How many layers are numbered."""
    mtp: int | str = 0
    """How many of them are for multi-token prediction."""
    tied: bool = False
    """tie_word_embeddings of a config that does not say it."""
    inside: bool = False
    """The first place is that of the language model in the model of the last."""


class Scope(Expressions):
    """The values of words for one config, and in one layer."""

    def __init__(
        self, vocabulary: SizeVocabulary, places: Sequence[Mapping[str, Any]], sizes: Sizes, reading: str = ""
    ) -> None:
        """``places``: where fields are looked up, as ``FamilySpec.places`` has them; ``sizes``: what is known.

        While a size is read its own name, ``reading``, is that of a field.
        """
        super().__init__()
        self.vocabulary = vocabulary
        self.places = places
        self.sizes = sizes
        self._reading = reading
        self._varying = varying(sizes)
        self._exceptions = [_exceptions(p) for p in places]

    def read(self, text: str) -> dict[str, Any]:
        """The fields of config.json that an expression comes from, as far as they are there."""
        out: dict[str, Any] = {}
        seen: set[str] = set()
        todo: list[object] = [text]
        while todo:
            following = todo.pop(0)
            if isinstance(following, DefaultSpec):
                todo += [following.missing, following.none]
            if not isinstance(following, str):
                continue
            for name in (n for n in words(following) if n not in seen):
                seen.add(name)
                if name in self.vocabulary.names:
                    todo.append(self.vocabulary.names[name])
                    continue
                spec = self.vocabulary.specs.get(name)
                fields = [name] if spec is None else [*spec.fields, *spec.plus]
                found = {f: v for f in fields for v in reversed(values_at(self.places, f))}
                out |= found
                if spec is not None and spec.expr:
                    todo.append(spec.expr)
                elif not any(v is not None for v in found.values()):
                    todo.append(self.vocabulary.defaults.get(name))
        return out

    def meaning(self, name: str) -> Value:
        own = self.vocabulary
        if name in own.names:
            return self._explained("tensors: names", name, own.names[name])
        spec = own.specs.get(name) if name != self._reading else None
        if spec is not None:
            self.refuse_other_fields(spec)
        size = self.size(name)
        if size is not None:
            return size.value
        if spec is not None and spec.expr:
            return self._explained("sizes", name, spec.expr)
        said = self.values(name)
        if name == TIED and own.inside:  # a matter of the whole model, and not of the language model in it
            said = said[::-1]
        found = next((s for s in said if s is not None), None)
        if found is not None:
            return _field(name, found, self._kind(name))
        if name in own.defaults:
            default = own.defaults[name]
            if isinstance(default, DefaultSpec):
                default = default.none if said else default.missing
            return self._explained("tensors: defaults", name, default)
        if name == TIED:
            return not said and own.tied
        lacking = name
        if spec is not None:
            lacking = spec.fields[0]
            if wrong := self.present(spec.fields)[:1]:
                raise Refused(f"`{wrong[0][0]}` of config.json is {shown(wrong[0][1])}, which is not a size", hint=HINT)
        raise Refused(
            f"config.json lacks `{lacking}`, on which the tensors of family `{own.family}` depend",
            hint="give the complete config.json of the model; a family file can have a default in `tensors: defaults:`",
            lacks=True,
        )

    def size(self, name: str) -> CutSize | None:
        """A size of the family, in the layer that was entered if it has another value in each."""
        if (size := self.sizes.get(name)) is not None:
            return size
        return self.sizes.get(in_layer(name, self.layer(name))) if name in self._varying else None

    def values(self, path: str) -> list[Any]:
        """The values in config.json under a name or path, in each place that has it, null included.

        Raises Refused outside of layers for what is something else in some of them.
        """
        out = []
        for place, layers in zip(self.places, self._exceptions, strict=True):
            if any(path in fields for fields in layers.values()):
                out += values_at([layers.get(self.layer(path), {})], path)
            out += values_at([place], path)
        return out

    @property
    def skips(self) -> bool:
        """Whether layers lack modules that others have."""
        return any(fields.get("skip") for layers in self._exceptions for fields in layers.values())

    def present(self, fields: Iterable[str]) -> list[tuple[str, Any]]:
        """The fields that are there and not null, with their values."""
        return [(f, v) for f in fields for v in self.values(f) if v is not None]

    def refuse_other_fields(self, spec: SizeSpec) -> None:
        """Raises Refused when a field that a size comes from is there and is no size."""
        for name, value in (*self.present(spec.fields)[:1], *self.present(spec.plus)):
            if type(value) is not int:
                raise Refused(f"`{name}` of config.json is {shown(value)}, not a whole number", hint=HINT)

    def element(self, of: str, value: object) -> Value:
        return _field(of, value)

    def _kind(self, name: str) -> type | None:
        """The type that a field must have, that of its default; None where there is none."""
        if name == TIED:
            return bool
        default = self.vocabulary.defaults.get(name)
        if isinstance(default, DefaultSpec):
            default = default.missing
        if default is None:
            return None
        try:
            return type(self._explained("tensors: defaults", name, default))
        except Refused:
            return None

    def _explained(self, key: str, name: str, text: Value) -> Value:
        """The meaning that the family file gives a name."""
        if not isinstance(text, str):
            return text
        try:
            return self.work_out(text)
        except Refused as e:
            e.through.append(f"{self.vocabulary.origin}: {key}: {name}: `{text}`")
            raise


def _exceptions(place: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """Fields that are something else in some layers, as transformers 5 writes them for models of all kinds."""
    said = place.get("per_layer_config")
    items = said.items() if isinstance(said, Mapping) else ()
    return {int(n): fields for n, fields in items if _LAYER.fullmatch(str(n)) and isinstance(fields, Mapping)}


def read_sizes(vocabulary: SizeVocabulary, places: Sequence[Mapping[str, Any]]) -> dict[str, CutSize]:
    """The sizes of a model; one that differs from layer to layer is there as ``heads[3]``.

    ``places`` are where fields are looked up, as ``FamilySpec.places`` has them. A size without field or default is
    left out, and an error only if a rule needs it. Raises LayoutError for sizes that are explained by each other.
    """
    reader = _SizeReader(vocabulary, places)
    reader.run()
    if reader.varies:  # the number of layers may be explained by sizes, too
        reader = _SizeReader(vocabulary, places, _layers(Scope(vocabulary, places, reader.sizes)))
        reader.run()
    return reader.sizes


class _SizeReader:
    """Reads sizes, each after those that explain it."""

    def __init__(self, vocabulary: SizeVocabulary, places: Sequence[Mapping[str, Any]], layers: int = 0) -> None:
        self.sizes: dict[str, CutSize] = {}
        self.varies = False
        """Some size differs from layer to layer."""
        self._vocabulary = vocabulary
        self._places = places
        self._layers = layers
        self._read: set[str] = set()
        self._open: list[str] = []
        """Names that are being read, outermost first."""

    def run(self) -> None:
        for name in self._vocabulary.specs:
            self._one(name)

    def _one(self, name: str) -> None:
        if name in self._read:
            return
        if name in self._open:
            raise LayoutError(
                f"the size `{name}` is explained by itself",
                where=f"{self._vocabulary.origin}: sizes: {' -> '.join([*self._open, name])}",
            )
        self._open.append(name)
        spec = self._vocabulary.specs[name]
        for other in _explaining(self._vocabulary, name):
            self._one(other)
        self._open.pop()
        self._read.add(name)
        scope = Scope(self._vocabulary, self._places, self.sizes, name)
        if not scope.depends(partial(_value, spec, scope)):
            _put(self.sizes, name, spec, scope)
            return
        self.varies = True
        for layer in range(self._layers):
            scope.enter(layer)
            _put(self.sizes, in_layer(name, layer), spec, scope)


def _explaining(vocabulary: SizeVocabulary, name: str) -> list[str]:
    """The sizes that explain one. Its own name is that of a field there."""
    spec = vocabulary.specs[name]
    todo: list[object] = [spec.expr or spec.default]
    seen = {name}
    out = []
    while todo:
        text = todo.pop()
        if isinstance(text, DefaultSpec):
            todo += [text.missing, text.none]
        for word in words(text) if isinstance(text, str) else ():
            if word in seen:
                continue
            seen.add(word)
            if word in vocabulary.names:
                todo.append(vocabulary.names[word])
            elif word in vocabulary.specs:
                out.append(word)
            else:
                todo.append(vocabulary.defaults.get(word))
    return out


def check_size(scope: Scope, name: str) -> None:
    """Raises Refused when what config.json says of a size is no size; what it does not say is no error."""
    spec = scope.vocabulary.specs[name]
    try:
        if not scope.depends(partial(scope.refuse_other_fields, spec)):
            scope.refuse_other_fields(spec)
        if spec.expr and not scope.depends(partial(_value, spec, scope)):
            _value(spec, scope)
    except Refused as e:
        if not e.lacks:
            raise


def _put(out: dict[str, CutSize], name: str, spec: SizeSpec, scope: Scope) -> None:
    try:
        value = _value(spec, scope)
    except Refused:
        return
    if value >= 1:
        out[name] = CutSize(value, spec.shared)


def _value(spec: SizeSpec, scope: Scope) -> int:
    """A size, in the layer that the scope is in. Raises Refused."""
    said = scope.present(spec.fields)
    text: int | str | None = next((n for _, n in said if type(n) is int), None)
    if text is None and said:
        raise Refused("something is said, and it is not a number: the default would be a guess")
    if text is None:
        text = spec.expr or spec.default
    if text is None:
        raise Refused("config.json does not say it", lacks=True)
    try:
        value = scope.work_out(text) if isinstance(text, str) else text
    except RecursionError:
        raise Refused("this expression is too deep") from None
    if type(value) is not int:
        raise Refused(f"`{text}` comes to {value!r}, which is not a size")
    return value + sum(next((v for _, v in scope.present([f]) if type(v) is int), 0) for f in spec.plus)


def _layers(scope: Scope) -> int:
    """How many layers are numbered, as far as config.json says it."""

    def number(text: int | str) -> int:
        try:
            value = scope.work_out(text) if isinstance(text, str) else text
        except (Refused, RecursionError):
            return 0
        return min(value, _MOST_LAYERS) if type(value) is int else 0

    scope.given["mtp"] = number(scope.vocabulary.mtp)
    return number(scope.vocabulary.count) or number("layers")


_WORDS: dict[type, str] = {bool: "true or false", int: "a whole number", str: "a text", list: "a list"}


def shown(value: object) -> str:
    """A value as config.json has it."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."


def _field(name: str, value: object, kind: type | None = None) -> Value:
    """A value of config.json that an expression can use; ``kind`` is what it has to be. 3.0 is a whole number, and 0.5
    the text ``0.5`` where the default is a text, to be compared with it."""
    if type(value) is float:
        value = int(value) if value.is_integer() else repr(value) if kind is str else value
    if kind is bool and type(value) is int and value in (0, 1):
        return value
    if isinstance(value, dict) and kind in (None, list):
        return list(value)  # its keys: `len(id2label)`
    if kind is not None and type(value) is not kind:
        raise Refused(f"`{name}` of config.json is {shown(value)}, not {_WORDS[kind]}", hint=HINT)
    if isinstance(value, int | str | list):
        return value
    raise Refused(f"`{name}` of config.json is {shown(value)}, which is not a whole number, a text or a list")
