"""The words of a command line as a recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import yaml

from ckpttool.errors import CkptError, ConflictError, UsageError
from ckpttool.kernels.merge import METHODS
from ckpttool.kernels.merge.base import Method
from ckpttool.recipe.check import TYPES, Words, check, method_named, scalar
from ckpttool.recipe.document import Problems, nearest
from ckpttool.recipe.model import ModelRef, Recipe, RecipeSlice, Setting, SliceSource, reference
from ckpttool.recipe.read import is_recipe, read_recipe

_WHOLE = "give --param {name}=VALUE"
WORDS = Words("--base", "sources", _WHOLE, f"{_WHOLE}, or one value per source: --param {{name}}=A,B")
WEIGHT = Words("--base", "sources", _WHOLE, "give --weights, one number per source: --weights 0.6,0.4")


def recipe_of(
    sources: Sequence[str],
    *,
    method: str | None,
    weights: str | None = None,
    base: str | None = None,
    params: Sequence[str] = (),
) -> Recipe:
    """The recipe that command-line words mean.

    ``sources`` are PATH or PATH+ADAPTER. ``params`` are NAME=VALUE, for all models or the whole merge, or NAME=A,B,...
    with one value for each source. A base among the sources is not merged, but counts where values are per source.
    Raises UsageError, ConflictError or UnsupportedError; several problems at once come as one error.
    """
    problems = Problems("")
    found = method_named(method, problems, at="--method") if method else None
    if not method:
        problems.add("no merge method is given", at="--method", hint=f"known: {', '.join(METHODS)}")
    models = [_model(text, problems, "sources") for text in sources]
    donor = _model(base, problems, "--base") if base else None
    words = ([f"weight={weights}"] if weights else []) + list(params)
    per_model, whole = _parameters(words, found, sources, problems, weights=bool(weights))
    problems.check()
    assert found is not None  # noqa: S101 - otherwise it has been noted as a problem
    listed = tuple(SliceSource(m, None, {n: v[i] for n, v in per_model.items()}) for i, m in enumerate(models) if m)
    recipe = Recipe(found.name, (RecipeSlice(listed),), donor, whole)
    check(recipe, problems, WEIGHT if "weight" in found.per_model and "weight" not in per_model else WORDS)
    problems.check()
    return recipe


def asked(
    sources: Sequence[str], *, method: str = "", weights: str = "", base: str = "", params: Sequence[str] = ()
) -> Recipe | None:
    """The recipe that a merge is asked for: in a file, in words, or None for the shards of one model.

    Raises what ``read_recipe``, ``adapted`` and ``recipe_of`` raise.
    """
    if is_recipe(sources):
        return read_recipe(sources[0])
    if len(sources) == 1 and not (method or base or params):
        return adapted(sources[0], weights) if weights or "+" in sources[0] else None
    method = method or ("linear" if weights else "average")
    return recipe_of(sources, method=method, weights=weights, base=base, params=params)


def adapted(source: str, weights: str = "") -> Recipe:
    """The recipe that adds adapters to one model: ``PATH+ADAPTER...`` with a weight for each adapter; default: 1.

    Raises UsageError, also for a source without adapters.
    """
    model = reference(source, hub=False)
    if not model.adapters:
        raise UsageError(
            f"`{source}` is one model without adapters, which has no weights",
            hint="name the models to merge, or PATH+ADAPTER to add an adapter to a model",
        )
    try:
        numbers = tuple(float(w) for w in weights.split(",")) if weights else ()
    except ValueError:
        raise UsageError(f"--weights `{weights}` is not a list of numbers", hint="for example 0.7,0.3") from None
    if numbers and len(numbers) != len(model.adapters):
        raise UsageError(
            f"there are {len(numbers)} weights for {len(model.adapters)} adapters",
            hint="give one for each, in their order",
        )
    return Recipe("passthrough", (RecipeSlice((SliceSource(replace(model, weights=numbers)),)),))


def _model(text: str, problems: Problems, at: str) -> ModelRef | None:
    if text.endswith((".yml", ".yaml")):
        problems.add(f"`{text}` is a recipe", at=at, hint="a recipe stands alone and names all models itself")
        return None
    try:
        return reference(text, hub=False)
    except CkptError as e:
        problems.add(e.what, at=at, hint=e.hint, error=type(e))
        return None


def _parameters(
    words: Sequence[str], method: Method | None, sources: Sequence[str], problems: Problems, *, weights: bool
) -> tuple[Mapping[str, Sequence[Setting]], dict[str, Setting]]:
    """Settings for each source by name, and those of the whole merge."""
    models, names = len(sources), ", ".join(sources)
    per_model: dict[str, list[Setting]] = {}
    whole: dict[str, Setting] = {}
    for i, word in enumerate(words):
        of_weights = weights and i == 0
        at = "--weights" if of_weights else "--param"
        name, equals, text = word.partition("=")
        if not equals or not name or not text:
            problems.add(f"`{word}` is not NAME=VALUE", at=at, hint=f"--param {name or 'density'}=0.5, for example")
            continue
        if method is None:
            continue
        known = {**method.per_model, **method.whole}
        if name not in known:
            what = "has no weights" if of_weights else f"has no parameter `{name}`"
            hint = f"drop --weights; {_takes(method)}" if of_weights else nearest(name, known) or "it has none"
            problems.add(f"`{method.name}` {what}", at=at, hint=hint)
            continue
        if name in per_model or name in whole:
            problems.add(f"`{name}` is given twice", at=at, hint="keep one of the two", error=ConflictError)
            continue
        kind = known[name].kind
        values = []
        for one in text.split(","):
            value = scalar(_plain(one), kind)
            if value is None:
                problems.add(f"`{one}` in `{name}={text}` is not {TYPES[kind]}", at=at)
            else:
                values.append(value)
        if len(values) != text.count(",") + 1:
            continue
        if name in method.whole:
            if len(values) == 1:
                whole[name] = Setting.of(kind, values[0])
            else:
                problems.add(
                    f"`{name}` is one value for the whole merge", at=at, hint="gradients over layers need a recipe file"
                )
        elif len(values) == 1 and (not of_weights or models == 1):
            whole[name] = Setting.of(kind, values[0])
        elif len(values) == models:
            per_model[name] = [Setting.of(kind, v) for v in values]
        else:
            problems.add(
                f"`{name}={text}` has {len(values)} value{'' if len(values) == 1 else 's'} for {models} sources",
                at=at,
                hint=f"give {models}, in the order of the sources: {names}; a --base that is not among them has none",
                error=ConflictError,
            )
    return per_model, whole


def _takes(method: Method) -> str:
    """The parameters that a method takes instead of weights."""
    names = [*method.per_model, *method.whole]
    return f"it has --param {names[0]}=VALUE" if names else "it has no parameters"


def _plain(text: str) -> object:
    """A number or a boolean as recipes write them."""
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):  # ValueError: a date that is none
        return text
