"""Checks of every recipe, whatever its syntax: its parameters' types, its numbers of models, its base."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from ckpttool.core.dtypes import parse
from ckpttool.errors import CkptError, ConflictError, UnsupportedError, UsageError
from ckpttool.kernels.merge import METHODS
from ckpttool.kernels.merge.base import Method
from ckpttool.recipe.document import Problems, Value, nearest
from ckpttool.recipe.model import Condition, ParameterType, Recipe, RecipeSlice, Scalar, Setting, SliceSource

DTYPES = ("F32", "F16", "BF16", "F64")
"""Dtypes that a merge can write."""
LARGEST = float.fromhex("0x1.fffffep127")
"""Number of a recipe: methods compute with float32."""


@dataclass(frozen=True, slots=True)
class Words:
    """The terms of the recipe's syntax, for messages."""

    base: str
    models: str
    whole: str
    """Syntax of a parameter of the merge; ``{name}`` is its name."""
    each: str
    """Syntax of a parameter of a model."""


def method_named(name: str, problems: Problems, *, at: str = "") -> Method | None:
    """The method; None after noting that there is none of that name."""
    method = METHODS.get(name)
    if method is None:
        problems.add(f"there is no merge method `{name}`", at=at, hint=nearest(name, METHODS))
    return method


def dtype_named(value: Value) -> str:
    """safetensors' name of a dtype that merges can write; "" after noting that it is none."""
    text = value.text()
    if text is None:
        return ""
    try:
        kind = parse(text)
    except UnsupportedError as e:
        value.wrong(e.what, hint="float32, float16 or bfloat16", error=UnsupportedError)
        return ""
    if kind.name in DTYPES:
        return kind.name
    value.wrong(
        f"a merge does not write {text}",
        hint="merge to bfloat16, and quantize the result with a tool for that"
        if kind.name.startswith("F8")
        else "float32, float16 or bfloat16",
        error=UnsupportedError,
    )
    return ""


def scalar(data: Any, kind: ParameterType) -> Scalar | None:
    """A value of a parameter's type; None when it is not. Numbers may be texts: YAML takes ``1e-5`` for one."""
    if kind == "bool":
        return bool(data) if data in (True, False) and not isinstance(data, str) else None
    if isinstance(data, bool) or not isinstance(data, int | float | str):
        return None
    try:
        number = float(data)
        if not abs(number) <= LARGEST or (kind == "int" and number != int(number)):
            return None
    except (ValueError, OverflowError):
        return None
    return int(number) if kind == "int" else number


TYPES = {"float": "a finite number", "int": "a whole number", "bool": "true or false"}


def values(value: Value, kind: ParameterType) -> tuple[Scalar, ...]:
    """One value or a gradient; () after noting what is wrong."""
    listed = value.items() if isinstance(value.data, list) else [value]
    if not listed:
        value.wrong("an empty list gives no value")
    out = []
    for one in listed:
        found = scalar(one.data, kind)
        if found is None:
            one.wrong(f"`{one.data}` is not {TYPES[kind]}")
        else:
            out.append(found)
    return tuple(out)


def setting(value: Value, kind: ParameterType) -> Setting | None:
    """A scalar, a gradient, or a list of ``{filter:, value:}``; None after noting what is wrong."""
    entries = value.items() if isinstance(value.data, list) else [value]
    conditional = [isinstance(e.data, dict) for e in entries]
    if not any(conditional):
        found = values(value, kind)
        return Setting.of(kind, *found) if found else None
    if not all(conditional):
        value.wrong("this list mixes values and `{filter:, value:}` entries", hint="write each as `{value: ...}`")
        return None
    conditions = []
    for entry in entries:
        fields = entry.known(("filter", "value"))
        found = values(fields["value"], kind) if "value" in fields else ()
        if "value" not in fields:
            entry.wrong("`value` is missing")
        text = fields["filter"].data if "filter" in fields else "*"
        if not isinstance(text, str):
            fields["filter"].wrong("a filter is a part of tensor names", hint="quote it")
        elif found:
            conditions.append(Condition(text, found))
    return Setting(kind, tuple(conditions)) if conditions else None


def settings(value: Value, method: Method | None, *, of_model: bool) -> dict[str, Setting]:
    """The parameters given to a model or, with their names as defaults for all models, to a slice or the whole."""
    if method is None:
        return {}
    known = dict(method.per_model) if of_model else {**method.whole, **method.per_model}
    here = [n for n in method.whole if of_model]
    hints = dict.fromkeys(here, "it is one for the whole merge: write it under `parameters` at the top or of a slice")
    out = {}
    for name, given in value.fields().items():
        if name not in known:
            value.problems.add(
                f"unknown parameter `{name}` of {'a model in ' if name in hints else ''}`{method.name}`",
                at=given.path,
                hint=hints.get(name) or nearest(name, known) or f"`{method.name}` has no parameters",
            )
        elif (found := setting(given, known[name].kind)) is not None:
            out[name] = found
    return out


def check(recipe: Recipe, problems: Problems, words: Words) -> None:
    """Note what the method does not allow: models, base, missing parameters, uneven slices."""
    method = METHODS[recipe.method]
    for i, piece in enumerate(recipe.slices):
        whole = any(s.layers is None for s in piece.sources)
        _check_slice(recipe, method, piece, problems, words, "" if whole else f"slices[{i}]")


def merged(recipe: Recipe, method: Method, piece: RecipeSlice) -> list[SliceSource]:
    """The sources of a slice without its base."""
    base = recipe.base_of(piece) if method.base != "refused" else None
    return [s for s in piece.sources if s.model != base]


def _check_slice(recipe: Recipe, method: Method, piece: RecipeSlice, problems: Problems, words: Words, at: str) -> None:
    def wrong(what: str, hint: str | None = None, error: type[CkptError] = UsageError) -> None:
        problems.add(what, at=at or words.models, hint=hint, error=error)

    least, most = method.models
    base = recipe.base_of(piece)
    sources = merged(recipe, method, piece)
    twice = [str(m) for m, n in Counter(s.model for s in piece.sources).items() if n > 1]
    for model in twice:
        wrong(f"`{model}` is listed twice", "give it once, with the sum of its weights", ConflictError)
    if method.base == "needed" and base is None:
        spare = most is not None and len(sources) == most + 1
        which = f"; `{sources[0].model}` for example" if spare else ""
        wrong(f"`{method.name}` needs a base model", f"name it with {words.base}{which}")
    elif at and method.base != "refused" and base is not None and all(s.model != base for s in piece.sources):
        wrong(f"the base `{base}` is not a source of this slice", "list it, so that its `layer_range` is known")
    if method.base == "refused" and piece.base is not None:
        wrong(f"`{method.name}` has no base, so that a slice's `base_model` has no effect", None, ConflictError)
    lacks_base = method.base == "needed" and base is None and most is not None and len(sources) == most + 1
    if not twice and not lacks_base and (len(sources) < least or (most is not None and len(sources) > most)):
        count = f"exactly {least}" if least == most else f"at least {least}" if most is None else f"{least} to {most}"
        beside = " beside the base" if base is not None and method.base != "refused" else ""
        wrong(f"`{method.name}` merges {count} model{'' if most == 1 else 's'}{beside}; there are {len(sources)}")
    lengths = {len(s.layers) for s in piece.sources if s.layers is not None}
    if len(lengths) > 1:
        wrong(f"the sources of a slice must have equally many layers, not {sorted(lengths)}", None, ConflictError)
    levels = (piece.parameters, recipe.parameters)
    for name, parameter in method.whole.items():
        if parameter.default is None and not any(name in level for level in levels):
            wrong(f"`{method.name}` needs the parameter `{name}`", words.whole.format(name=name))
    for name, parameter in method.per_model.items():
        without = [str(s.model) for s in sources if not any(name in level for level in (s.parameters, *levels))]
        if parameter.default is None and without:
            wrong(
                f"`{method.name}` needs the parameter `{name}`, which is missing for {', '.join(without)}",
                words.each.format(name=name),
            )
