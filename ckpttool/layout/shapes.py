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
defaults come from transformers, they are those of its configuration classes. An expression may be

==============================  ================================================================================
``2``, ``'text'``, ``[0, 1]``   a number, a text, a list
``hidden_size``                 the first of these that there is: ``layer`` (number of the layer) and ``mtp`` (how many
                                prediction layers there are), a name of the section, a size of the family, a field of
                                config.json (or of its ``text_config``), its default
``+ - * // %``                  whole numbers only
``== != < <= > >= in not in``   comparisons
``and or not``, ``a if b else c``, ``list[i]``
==============================  ================================================================================

and nothing else: no calls, no attributes. An expression is worked out once, or once for each layer if it depends on
the layer; never for each expert.
"""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

from ckpttool.dtypes import CASTABLE, DTYPES, parse
from ckpttool.errors import LayoutError, UnsupportedError
from ckpttool.formats.config import TIED
from ckpttool.layout.family import DefaultSpec, Family, SizeSpec, TensorsSpec

Value = int | str | list[Any]
"""What an expression can come to. A truth value is a number, as in Python."""

_ALTERNATIVES = re.compile(r"\{([^{}]*,[^{}]*)\}")
_CAPTURE = re.compile(r"\{([^{}]*)\}|[{}*]")
_COUNTED = {"expert": "experts", "mtp": "mtp"}
"""Words in braces that stand for every number from 0 on, and what says how many there are."""
_MOST = 2_000_000
"""More tensors than any model has; a config that asks for more is wrong, and would only fill the memory."""

_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}


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
    that cannot be worked out.
    """
    spec = family.spec.tensors
    if spec is None:
        raise LayoutError(
            f"family `{family.name}` does not say which tensors a model has",
            where=family.origin or (),
            hint="add a `tensors:` section to the file given with --family",
        )
    scope = _Scope(family, spec, config)
    scope.mtp = scope.number(spec.mtp, ("mtp",)) if mtp else 0
    count = scope.number(spec.count, ("count",))
    if count > _MOST:
        raise scope.wrong(f"{count:,} layers are more than any model has", ("count",), str(spec.count))
    prefix = _prefix(spec, family)
    out = _Tensors(scope, _config_dtype(family.spec.places(config)))
    out.add(_entries(spec.first, "first", family))
    in_layers = _entries(spec.layers, "layers", family)
    for layer in range(count):
        scope.enter(layer)
        out.add(in_layers, prefix.replace("{layer}", str(layer)))
    scope.enter(None)
    out.add(_entries(spec.last, "last", family))
    out.check()
    return out.found


def check_sizes(family: Family, config: Mapping[str, Any]) -> None:
    """Raises LayoutError for a field of the config that a size of the family comes from, and that is no whole number.

    Reading sizes takes such a field for one that is not there, as what is only moved needs few of them.
    """
    for name in family.spec.sizes:
        try:
            _sized(family, family.spec.places(config), name)
        except _Refused as e:
            raise LayoutError(e.why, where=f"{family.origin}: sizes: {name}", hint=e.hint) from None


@dataclass(frozen=True, slots=True)
class _Entry:
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
    """For each choice among the pattern's alternatives, what stands before and after the number."""


def _wrong(family: Family, path: Sequence[str], why: str, *, hint: str | None = None) -> LayoutError:
    return LayoutError(why, where=f"{family.origin}: tensors: {': '.join(path)}", hint=hint)


def _entries(tree: Mapping[Any, Any], section: str, family: Family) -> list[_Entry]:
    """The lines of one part of the section, each with the conditions that it stands under."""
    return list(_walk(tree, (section,), (), family))


def _walk(
    tree: Mapping[Any, Any], path: tuple[str, ...], conditions: tuple[tuple[str, tuple[str, ...]], ...], family: Family
) -> Iterator[_Entry]:
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
            if dtype and dtype not in DTYPES:
                raise _wrong(family, here, f"`{dtype}` is not a dtype", hint=f"one of {', '.join(DTYPES)}")
        if not isinstance(shape, list) or not all(type(n) in (int, str) for n in shape):
            raise _wrong(
                family,
                here,
                "a tensor needs a list of its sizes",
                hint="[hidden_size] or {shape: [experts], dtype: F32}",
            )
        counted, names = _names(str(key), here, family)
        yield _Entry(here, conditions, tuple(shape), dtype, counted, names)


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


def _prefix(spec: TensorsSpec, family: Family) -> str:
    """What stands before the names of a layer's tensors, with {layer}."""
    prefix = spec.prefix or family.spec.layers.prefix
    if spec.layers and _CAPTURE.findall(prefix) != ["layer"]:
        raise _wrong(
            family,
            ("prefix",),
            f"`{prefix}` does not give every layer one name",
            hint='give the names of a layer\'s tensors a `prefix` with {layer}: prefix: "model.layers.{layer}."',
        )
    return prefix


def _config_dtype(places: Sequence[Mapping[str, Any]]) -> str:
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


def _fields(spec: SizeSpec | str | list[str]) -> tuple[list[str], list[str]]:
    """The config fields of a size: those of which the first counts, and those that are added."""
    if isinstance(spec, SizeSpec):
        return spec.fields, spec.plus
    return [spec] if isinstance(spec, str) else spec, []


def _sized(family: Family, places: Sequence[Mapping[str, Any]], name: str) -> None:
    """Raises _Refused when a field that a size comes from is there and is no size."""
    fields, plus = _fields(family.spec.sizes[name])
    first = [(f, p[f]) for f in fields for p in places if p.get(f) is not None]
    added = [(f, p[f]) for f in plus for p in places if p.get(f) is not None]
    for field, value in (*first[:1], *added):
        if type(value) is not int:
            raise _Refused(f"`{field}` of config.json is {_shown(value)}, not a whole number", hint=_HINT)


class _Tensors:
    """The list in the making."""

    def __init__(self, scope: _Scope, dtype: str) -> None:
        self.found: list[Declared] = []
        self._scope = scope
        self._dtype = dtype

    def add(self, entries: Sequence[_Entry], prefix: str = "") -> None:
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

    def check(self) -> None:
        """Raises LayoutError when two lines declare the same tensor."""
        seen: set[str] = set()
        for name, _, _ in self.found:
            if name in seen:
                raise self._scope.wrong(f"`{name}` is declared twice", ())
            seen.add(name)


_HINT = "correct it in config.json, as the authors of the model publish it"


def _shown(value: object) -> str:
    """A value as config.json has it."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."


class _Refused(Exception):  # noqa: N818 - why an expression has no value; users see LayoutError
    """Becomes a LayoutError once it is known which tensor the expression belongs to."""

    def __init__(self, why: str, *, hint: str | None = None) -> None:
        super().__init__(why)
        self.why = why
        self.hint = hint
        self.through: list[str] = []
        """The names through which it was reached, from near to far."""


@cache
def _parsed(text: str) -> ast.expr:
    """The tree of an expression; what it may hold is checked when it is worked out."""
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _Refused("this is not an expression") from None


class _Scope:
    """What the names of a section mean for one config, and in one layer."""

    def __init__(self, family: Family, spec: TensorsSpec, config: Mapping[str, Any]) -> None:
        self._family = family
        self._spec = spec
        self._places = family.spec.places(config)
        self._layer: int | None = None
        self.mtp = 0
        """How many prediction layers the model has."""
        self._known: dict[str, Value] = {}
        """By name or, in backquotes, by expression."""
        self._in_layer: dict[str, Value] = {}
        """The same for what depends on the layer."""
        self._depends = False
        """Whether what is being worked out has asked for the layer."""
        self._open: list[str] = []
        """Names that are being worked out, outermost first."""

    def enter(self, layer: int | None) -> None:
        self._layer = layer
        self._in_layer.clear()

    def wrong(self, why: str, path: Sequence[str], text: str = "", hint: str | None = None) -> LayoutError:
        at = [": ".join([self._family.origin, "tensors", *path, *([f"`{text}`"] if text else [])])]
        if text and (read := self._read(text)):
            at.append("config.json: " + ", ".join(f"`{name}` is {_shown(value)}" for name, value in read.items()))
        return LayoutError(why, where=at, hint=hint)

    def _read(self, text: str) -> dict[str, Any]:
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
            try:
                names = [n.id for n in ast.walk(_parsed(following)) if isinstance(n, ast.Name)]
            except (_Refused, RecursionError):
                continue
            for name in (n for n in names if n not in seen):
                seen.add(name)
                if name in self._spec.names:
                    todo.append(self._spec.names[name])
                    continue
                size = self._family.spec.sizes.get(name)
                fields = [name] if size is None else [f for found in _fields(size) for f in found]
                found = {f: p[f] for f in fields for p in reversed(self._places) if f in p}
                out |= found
                if not any(v is not None for v in found.values()):
                    todo.append(self._spec.defaults.get(name))
        return out

    def value(self, text: str, path: Sequence[str]) -> Value:
        """What an expression comes to. Raises LayoutError naming file, tensor and expression."""
        try:
            return self._remembered(f"`{text}`", lambda: self._evaluate(_parsed(text)))
        except _Refused as e:
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

    def shape(self, entry: _Entry) -> tuple[int, ...]:
        out = []
        for text in entry.shape:
            got = text if isinstance(text, int) else self.value(text, entry.path)
            if type(got) is not int or not 1 <= got < 1 << 63:
                raise self.wrong(f"this comes to {got!r}, which is not a size", entry.path, str(text))
            out.append(got)
        return tuple(out)

    def _remembered(self, key: str, work: Callable[[], Value]) -> Value:
        """The result of ``work``, done once, or once for each layer if it asks for the layer."""
        if key in self._known:
            return self._known[key]
        if key in self._in_layer:
            self._depends = True
            return self._in_layer[key]
        outer, self._depends = self._depends, False
        try:
            got = work()
            (self._in_layer if self._depends else self._known)[key] = got
        finally:
            self._depends = self._depends or outer
        return got

    def _name(self, name: str) -> Value:
        if name == "layer":
            if self._layer is None:
                raise _Refused("`layer` has a meaning only in `layers`")
            self._depends = True
            return self._layer
        if name == "mtp":
            return self.mtp
        if name in self._open:
            raise _Refused(f"`{name}` is explained by itself")
        self._open.append(name)
        try:
            return self._remembered(name, lambda: self._look_up(name))
        finally:
            self._open.pop()

    def _look_up(self, name: str) -> Value:
        if name in self._spec.names:
            return self._explained("names", name, self._spec.names[name])
        if name in self._family.spec.sizes:
            _sized(self._family, self._places, name)
        size = self._family.size(name)
        if size is not None:
            return size
        # Whether the head is tied is a matter of the whole model, and not of the language model in it.
        places = reversed(self._places) if name == TIED and self._family.spec.inside else self._places
        said = [p[name] for p in places if name in p]
        found = next((s for s in said if s is not None), None)
        if found is not None:
            return _field(name, found, self._kind(name))
        if name in self._spec.defaults:
            default = self._spec.defaults[name]
            if isinstance(default, DefaultSpec):
                default = default.none if said else default.missing
            return self._explained("defaults", name, default)
        if name == TIED:
            return not said and self._family.spec.tied
        field = name
        if name in self._family.spec.sizes:
            fields, _ = _fields(self._family.spec.sizes[name])
            field = fields[0]
            if found := next(((f, p[f]) for f in fields for p in self._places if p.get(f) is not None), None):
                raise _Refused(f"`{found[0]}` of config.json is {_shown(found[1])}, which is not a size", hint=_HINT)
        raise _Refused(
            f"config.json lacks `{field}`, on which the tensors of family `{self._family.name}` depend",
            hint="give the complete config.json of the model; a family file can have a default in `tensors: defaults:`",
        )

    def _kind(self, name: str) -> type | None:
        """What a field has to be, as its default is; None where that does not say it."""
        if name == TIED:
            return bool
        default = self._spec.defaults.get(name)
        if isinstance(default, DefaultSpec):
            default = default.missing
        if default is None:
            return None
        try:
            return type(self._explained("defaults", name, default))
        except _Refused:
            return None

    def _explained(self, key: str, name: str, text: Value) -> Value:
        """The meaning that the section gives a name."""
        if not isinstance(text, str):
            return text
        try:
            return self._evaluate(_parsed(text))
        except _Refused as e:
            e.through.append(f"{self._family.origin}: tensors: {key}: {name}: `{text}`")
            raise

    def _evaluate(self, node: ast.expr) -> Value:
        match node:
            case ast.Constant(value=int() | str() as value):
                return value
            case ast.Name(id=name):
                return self._name(name)
            case ast.List(elts=elements):
                return [self._evaluate(e) for e in elements]
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                a, b = self._whole(left), self._whole(right)
                if b == 0 and isinstance(op, ast.FloorDiv | ast.Mod):
                    raise _Refused(f"`{ast.unparse(right)}` is 0, and nothing divides by it")
                return _ARITHMETIC[type(op)](a, b)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._whole(operand)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return not self._truth(operand)
            case ast.BoolOp(op=op, values=values):
                holds = all if isinstance(op, ast.And) else any
                return holds(self._truth(v) for v in values)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self._evaluate(body if self._truth(test) else orelse)
            case ast.Compare(left=left, ops=ops, comparators=others):
                return self._compared(left, ops, others)
            case ast.Subscript(value=value, slice=index):
                return self._element(value, index)
        raise _Refused(
            f"`{ast.unparse(node)}` is nothing that an expression may hold",
            hint="names, whole numbers, + - * // %, comparisons, and, or, not, `a if b else c`, list[i]",
        )

    def holds(self, text: str, path: Sequence[str]) -> bool:
        """Whether a condition is met."""
        got = self.value(text, path)
        if isinstance(got, str):
            raise self.wrong(f"this comes to {got!r}, which is neither true nor false", path, text)
        return bool(got)

    def _truth(self, node: ast.expr) -> bool:
        got = self._evaluate(node)
        if isinstance(got, str):
            raise _Refused(f"`{ast.unparse(node)}` is {got!r}, which is neither true nor false")
        return bool(got)

    def _whole(self, node: ast.expr) -> int:
        got = self._evaluate(node)
        if type(got) is not int:
            raise _Refused(f"`{ast.unparse(node)}` is {got!r}, not a whole number")
        return got

    def _compared(self, left: ast.expr, ops: Sequence[ast.cmpop], others: Sequence[ast.expr]) -> bool:
        a = self._evaluate(left)
        for op, other in zip(ops, others, strict=True):
            b = self._evaluate(other)
            try:
                holds = _COMPARISONS[type(op)](a, b)
            except (KeyError, TypeError):
                raise _Refused(f"{a!r} and {b!r} cannot be compared like this") from None
            if not holds:
                return False
            a = b
        return True

    def _element(self, value: ast.expr, index: ast.expr) -> Value:
        elements, at = self._evaluate(value), self._whole(index)
        if not isinstance(elements, list) or not 0 <= at < len(elements):
            raise _Refused(f"`{ast.unparse(value)}` has no element {at}")
        return _field(ast.unparse(value), elements[at])


_WORDS: dict[type, str] = {bool: "true or false", int: "a whole number", list: "a list"}


def _field(name: str, value: object, kind: type | None = None) -> Value:
    """A value of config.json that an expression can use; ``kind`` is what it has to be."""
    if kind is bool and type(value) is int and value in (0, 1):
        return value
    if kind is not None and type(value) is not kind:
        raise _Refused(f"`{name}` of config.json is {_shown(value)}, not {_WORDS[kind]}", hint=_HINT)
    if isinstance(value, int | str | list):
        return value
    raise _Refused(f"`{name}` of config.json is {_shown(value)}, which is not a whole number, a text or a list")
