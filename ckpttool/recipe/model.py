"""The data of a recipe: models, slices, and settings that depend on the tensor and its layer."""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

from ckpttool.errors import CkptError, UnsupportedError, UsageError
from ckpttool.storage.listing import near
from ckpttool.storage.place import parse_place, scheme_of

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+(@[^+\s]+)?")
"""Pattern of a model's name on the Hugging Face Hub, with a revision or without."""

Scalar = float | int | bool
ParameterType = Literal["float", "int", "bool"]


@dataclass(frozen=True, slots=True)
class ModelRef:
    """A model, here or elsewhere, with the low-rank adapters that are added to it first."""

    path: str
    adapters: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    """Weights of the adapters; () is 1 for each."""

    def __str__(self) -> str:
        return "+".join((self.path, *self.adapters))


@dataclass(frozen=True, slots=True)
class Condition:
    """Values for the tensors whose name contains ``filter``; ``*`` is every tensor."""

    filter: str
    values: tuple[Scalar, ...]
    """One value, or several that stand at equal distances from the first layer to the last."""

    def at(self, t: float, kind: ParameterType) -> Scalar:
        """The value at ``t``, from 0 (first layer) to 1 (last layer): numbers are interpolated, booleans are not.

        Raises UsageError when a number that must be whole is not.
        """
        last = len(self.values) - 1
        if kind == "bool":
            return self.values[int(t * last)]
        place = t * last
        before = int(place)
        share = place - before
        value = (1 - share) * self.values[before] + share * self.values[min(last, before + 1)]
        if kind == "float":
            return float(value)
        if value != int(value):
            raise UsageError(f"a gradient of whole numbers, {list(self.values)}, gives {value:g} for one of the layers")
        return int(value)


@dataclass(frozen=True, slots=True)
class Setting:
    """The values of one parameter in one place of a recipe: the first condition that matches a tensor counts."""

    kind: ParameterType
    conditions: tuple[Condition, ...]

    @classmethod
    def of(cls, kind: ParameterType, *values: Scalar) -> Setting:
        """The same for every tensor: one value, or a gradient over the layers."""
        return cls(kind, (Condition("*", values),))

    def find(self, name: str) -> Condition | None:
        """The condition that counts for a tensor, if any."""
        return next((c for c in self.conditions if c.filter == "*" or c.filter in name), None)

    def at(self, name: str, t: float) -> Scalar | None:
        """The value for a tensor; None where no condition matches."""
        found = self.find(name)
        return None if found is None else found.at(t, self.kind)


Settings = Mapping[str, Setting]
"""Settings by the parameter's name."""


@dataclass(frozen=True, slots=True)
class SliceSource:
    """A model's part in a slice."""

    model: ModelRef
    layers: range | None = None
    """None: all that it has."""
    parameters: Settings = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RecipeSlice:
    """A run of the output's layers, and the layers that are merged into it."""

    sources: tuple[SliceSource, ...]
    base: ModelRef | None = None
    """None: the recipe's."""
    parameters: Settings = field(default_factory=dict)
    stack: str = ""
    """Words of the names of its layers, which tell several stacks of a model apart; "" where there is one."""


@dataclass(frozen=True, slots=True)
class ModelToken:
    """The embedding that one model has for one token, named by its text or by its number."""

    model: ModelRef
    token: str | None = None
    number: int | None = None


@dataclass(frozen=True, slots=True)
class TokenRule:
    """The source of a token's embedding."""

    source: ModelRef | ModelToken | Literal["zero"] | None = None
    """A model (its own embedding of that token), a certain embedding, zeros; None: as for any other token."""
    force: bool = False
    """Whether it replaces the embedding of models that know the token, too."""


@dataclass(frozen=True, slots=True)
class TokenizerRecipe:
    """The vocabulary of the output."""

    source: ModelRef | Literal["union", "base"] = "union"
    tokens: Mapping[str, TokenRule] = field(default_factory=dict)
    pad_to_multiple_of: int | None = None


@dataclass(frozen=True, slots=True)
class Recipe:
    """A merge, whoever described it. What it says has been checked; only the models have not been looked at."""

    method: str
    slices: tuple[RecipeSlice, ...]
    base: ModelRef | None = None
    """Subtracted by methods that know a base. Others only take its config and tokenizer."""
    parameters: Settings = field(default_factory=dict)
    dtype: str = ""
    """safetensors' name of the dtype to merge in; "": that of the models."""
    out_dtype: str = ""
    """safetensors' name of the output's dtype; "": ``dtype``."""
    tokenizer: TokenizerRecipe | None = None
    chat_template: str = ""
    """A Jinja text, the name of a well-known one, or ``auto`` for the one that most models have."""
    component: str = "model"
    remove_keys: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """Notes about how the recipe was understood."""
    name: str = ""
    """File that it was read from."""
    text: str = ""
    """The recipe as it was written; "" for command-line words."""

    def references(self) -> tuple[ModelRef, ...]:
        """Every model whose tensors are merged, once: as they are listed, then bases that are not listed."""
        listed = (s.model for piece in self.slices for s in piece.sources)
        bases = (b for b in (self.base, *(piece.base for piece in self.slices)) if b is not None)
        return tuple(dict.fromkeys(chain(listed, bases)))

    def mapped(self, change: Callable[[ModelRef], ModelRef]) -> Recipe:
        """The same with other models in the place of these."""

        def source(s: SliceSource) -> SliceSource:
            return replace(s, model=change(s.model))

        slices = [
            replace(p, sources=tuple(map(source, p.sources)), base=p.base and change(p.base)) for p in self.slices
        ]
        return replace(self, slices=tuple(slices), base=self.base and change(self.base))

    def base_of(self, piece: RecipeSlice) -> ModelRef | None:
        """The base of one slice."""
        return piece.base or self.base

    def settings(self) -> Iterator[tuple[str, str, Setting]]:
        """Every setting with the place and the name of its parameter."""
        for i, piece in enumerate(self.slices):
            for source in piece.sources:
                yield from ((str(source.model), name, s) for name, s in source.parameters.items())
            yield from ((f"slice {i}", name, s) for name, s in piece.parameters.items())
        yield from (("the whole merge", name, s) for name, s in self.parameters.items())

    def record(self) -> dict[str, Any]:
        """The recipe as plain data, in mergekit's words where it has them."""
        whole = len(self.slices) == 1 and all(s.layers is None for s in self.slices[0].sources)
        slices = [
            _filled(
                stack=piece.stack,
                sources=[_source(s) for s in piece.sources],
                base_model=piece.base and str(piece.base),
                parameters=_settings(piece.parameters),
            )
            for piece in self.slices
        ]
        return _filled(
            merge_method=self.method,
            models=slices[0]["sources"] if whole else None,
            slices=None if whole else slices,
            base_model=self.base and str(self.base),
            parameters=_settings({**self.parameters, **self.slices[0].parameters} if whole else self.parameters),
            dtype=self.dtype,
            out_dtype=self.out_dtype,
            tokenizer=_tokenizer(self.tokenizer),
            chat_template=self.chat_template,
            component=self.component if self.component != "model" else "",
            remove_keys=list(self.remove_keys),
        )


def _filled(**fields: Any) -> dict[str, Any]:
    return {k: v for k, v in fields.items() if v not in (None, "", [], {})}


def _source(source: SliceSource) -> dict[str, Any]:
    layers = source.layers and [source.layers.start, source.layers.stop]
    weights = list(source.model.weights)
    return _filled(
        model=str(source.model), adapter_weights=weights, layer_range=layers, parameters=_settings(source.parameters)
    )


def _settings(settings: Settings) -> dict[str, Any]:
    def plain(values: tuple[Scalar, ...]) -> Any:
        return values[0] if len(values) == 1 else list(values)

    out: dict[str, Any] = {}
    for name, setting in settings.items():
        first = setting.conditions[0]
        out[name] = (
            plain(first.values)
            if first.filter == "*"
            else [{"filter": c.filter, "value": plain(c.values)} for c in setting.conditions]
        )
    return out


def _tokenizer(tokenizer: TokenizerRecipe | None) -> dict[str, Any] | None:
    if tokenizer is None:
        return None

    def rule(r: TokenRule) -> dict[str, Any]:
        source: Any = r.source and str(r.source)
        if isinstance(r.source, ModelToken):
            source = {"kind": "model_token", "model": str(r.source.model)}
            source |= {"token": r.source.token} if r.source.number is None else {"token_id": r.source.number}
        elif r.source == "zero":
            source = {"kind": "zero"}
        return _filled(source=source) | ({"force": True} if r.force else {})

    return _filled(
        source=str(tokenizer.source),
        tokens={token: rule(r) for token, r in tokenizer.tokens.items()},
        pad_to_multiple_of=tokenizer.pad_to_multiple_of,
    )


def reference(text: str, beside: Path | None = None, *, hub: bool = True) -> ModelRef:
    """The model that ``MODEL[+ADAPTER...]`` names.

    A path that exists is taken as it is, ``+`` and ``@`` included; otherwise the longest part that exists before a
    ``+`` is the model. Relative paths count from the current directory or, where nothing is there, from ``beside``.
    What is no path may be a name on the Hugging Face Hub, ``ORG/NAME[@REVISION]``, if ``hub`` says so. Raises
    UsageError for what is neither, UnsupportedError for a ``@revision`` of a path, AccessError.
    """
    known = _ModelLookup(beside, hub)
    parts = known.split(text)
    if parts is not None:
        return ModelRef(parts[0], tuple(parts[1:]))
    for part in text.split("+"):
        if not part:
            raise UsageError(
                f"`{text}` has an empty part beside a +", hint="PATH, or PATH+ADAPTER for an adapter on it"
            )
        if known.locate(part):
            continue
        path, at, revision = part.rpartition("@")
        if at and not scheme_of(part) and (known.here(path) or not HUB_NAME.fullmatch(part)):
            raise UnsupportedError(
                f"`{part}` names the revision `{revision}`, and folders have none", hint=f"drop `@{revision}`"
            )
        here = "" if scheme_of(part) else " here"
        raise UsageError(f"there is no `{part}`{here}", hint=known.lost(part))
    raise UsageError(f"`{text}` cannot be taken apart into a model and adapters that exist")


class _ModelLookup(NamedTuple):
    """The places where models' names are looked up."""

    beside: Path | None
    hub: bool

    def locate(self, text: str) -> str | None:
        """The path or URL that a name stands for. Raises AccessError where nobody can know."""
        if scheme_of(text):
            return _there(text)
        if (path := self.here(text)) is not None:
            return path
        if not self.hub or not HUB_NAME.fullmatch(text) or self.here(text.partition("@")[0]):
            return None
        try:
            return _there(_on_the_hub(text))
        except CkptError as e:
            raise type(e)(f"there is no `{text}` here, and {e.what}", where=e.where, hint=e.hint) from None

    def here(self, text: str) -> str | None:
        """The path of this machine that a name stands for."""
        # Path.exists raises for a name that is too long.
        for place in (text,) if self.beside is None else (text, os.path.join(self.beside, text)):  # noqa: PTH118
            if os.path.exists(place):  # noqa: PTH110
                return os.path.normpath(place)
        return None

    def split(self, text: str) -> list[str] | None:
        """The places in ``A+B+C``, all of which exist; the first one as long as possible.

        On another machine as short as possible: hardly any name there has a +, and each question is a request.
        """
        far = bool(scheme_of(text))
        ends = [m.start() for m in re.finditer(r"\+", text)]
        for at in ends if far else (len(text), *reversed(ends)):
            first = self.locate(text[:at])
            if first is None:
                continue
            if at == len(text):
                return [first]
            rest = self.split(text[at + 1 :])
            if far or rest is not None:
                return None if rest is None else [first, *rest]
        whole = self.locate(text) if far else None
        return None if whole is None else [whole]

    def lost(self, text: str) -> str | None:
        """A hint on a name that stands for nothing."""
        if scheme_of(text):
            place = parse_place(text)
            return (near(place) if isinstance(place, Path) else place.lost()) or None
        if re.fullmatch(r"[\d.]+", text):
            return "the values of an option are one word: --weights 0.6,0.4"
        if HUB_NAME.fullmatch(text):
            return f"a model of the Hugging Face Hub is {_on_the_hub(text)}"
        if self.beside is not None:
            return "relative paths count from the current directory or, failing that, from the recipe's"
        return near(Path(text)) or None


def _on_the_hub(name: str) -> str:
    repository, at, revision = name.partition("@")
    return f"hf://{repository}" + (f"@{quote(revision, safe='')}" if at else "")


def _there(text: str) -> str | None:
    """The text of a place on another machine that exists. A branch of the Hub is a commit by then."""
    place = parse_place(text)
    return str(place) if place.exists() else None
