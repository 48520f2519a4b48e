"""mergekit's YAML as it is, read strictly: what has no effect there is an error here.

mergekit drops keys that it does not know without a word, so that a typo changes the result and nobody learns of it.
Everything else means what it means there: filters are parts of tensor names, gradients run over the layers of a
slice, and a parameter is looked up at the model, then the slice, then the top.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from ckpttool.core.files import Place
from ckpttool.errors import CkptError, ConflictError, UnsupportedError, UsageError
from ckpttool.kernels.merge import METHODS
from ckpttool.kernels.merge.base import Method
from ckpttool.recipe.check import Words, check, dtype_named, merged, method_named, settings
from ckpttool.recipe.document import Problems, Value, from_yaml, home, nearest, read_text
from ckpttool.recipe.model import (
    ModelRef,
    ModelToken,
    Recipe,
    RecipeSlice,
    SliceSource,
    TokenizerRecipe,
    TokenRule,
    reference,
)
from ckpttool.storage.place import scheme_of

TOP = (
    "merge_method",
    "models",
    "slices",
    "base_model",
    "parameters",
    "dtype",
    "out_dtype",
    "tokenizer",
    "tokenizer_source",
    "chat_template",
)
TEMPLATES = ("alpaca", "chatml", "exaone", "llama3", "mistral")
"""Chat templates that mergekit has by name."""

WORDS = Words(
    "`base_model`",
    "models",
    "write `{name}` under `parameters` at the top",
    "write `{name}` under `parameters` of the model, or at the top as the default for all",
)

UNSUPPORTED = {
    "modules": "slices for each part of a model of several parts are not supported; `models` merges all parts of such"
    " models, and filters tell the parts apart",
    "experts": "building a mixture of experts out of dense models is not supported",
    "gate_mode": "building a mixture of experts out of dense models is not supported",
    "genome": "searching for the best merge is not supported",
}
"""Keys of recipes for something else, each with the reason to refuse it."""


def read_mergekit(path: Place) -> Recipe:
    """The recipe in a file; see ``parse_mergekit``."""
    return parse_mergekit(read_text(path), str(path), beside=home(path))


def parse_mergekit(text: str, name: str = "recipe", *, beside: Path | None = None) -> Recipe:
    """The recipe that a text describes. Relative paths count from the current directory, else from ``beside``.

    Raises UsageError, ConflictError or UnsupportedError; several problems at once come as one error.
    """
    document = from_yaml(text, name)
    problems = document.problems
    recipe = _MergekitParser(problems, beside).recipe(document, name, text)
    problems.check()
    assert recipe is not None  # noqa: S101 - what is missing has been noted as a problem
    return recipe


class _MergekitParser:
    def __init__(self, problems: Problems, beside: Path | None) -> None:
        self.problems, self.beside = problems, beside
        self.notes: list[str] = []

    def recipe(self, document: Value, name: str, text: str) -> Recipe | None:
        given = document.data.get("merge_method") if isinstance(document.data, dict) else None
        method = METHODS.get(given) if isinstance(given, str) else None
        for key, field in document.fields().items():
            if key in UNSUPPORTED and field.data is not None:
                field.wrong(UNSUPPORTED[key], error=UnsupportedError)
        if self.problems.found:
            return None
        hints = {n: f"it belongs under `parameters`: `parameters: {{{n}: ...}}`" for n in _parameters(method)}
        top = document.known(TOP, hints)
        if "merge_method" not in top:
            self.problems.add("`merge_method` is missing", hint=nearest("", METHODS))
        elif (word := top["merge_method"].text()) is not None:
            method = method_named(word, self.problems, at="merge_method")
        base = self._model(top["base_model"]) if "base_model" in top else None
        slices = self._slices(top, method)
        whole = settings(top["parameters"], method, of_model=False) if "parameters" in top else {}
        tokenizer = self._tokenizer(top)
        dtype, out_dtype = (dtype_named(top[k]) if k in top else "" for k in ("dtype", "out_dtype"))
        template = self._template(top["chat_template"]) if "chat_template" in top else ""
        if method is None or (self.problems.found and not slices):
            return None
        recipe = Recipe(method.name, slices, base, whole, dtype, out_dtype, tokenizer, template, name=name, text=text)
        if not self.problems.found:
            check(recipe, self.problems, WORDS)
            self._donor(recipe, method)
            self._tokens(recipe)
        self._idle(recipe, method)
        return replace(recipe, notes=tuple(dict.fromkeys(self.notes)))

    def _slices(self, top: dict[str, Value], method: Method | None) -> tuple[RecipeSlice, ...]:
        if "models" in top and "slices" in top:
            self.problems.add(
                "`models` and `slices` exclude each other", at="slices", hint="drop one", error=ConflictError
            )
        if "models" in top:
            sources = [self._source(v, method, ("model", "parameters")) for v in top["models"].items()]
            if not top["models"].data:
                top["models"].wrong("no models are listed")
            return (RecipeSlice(tuple(s for s in sources if s is not None)),)
        if "slices" in top:
            slices = [self._slice(v, method) for v in top["slices"].items()]
            if not slices:
                top["slices"].wrong("no slices are listed")
            return tuple(slices)
        self.problems.add("nothing to merge: `models` or `slices` is missing")
        return ()

    def _slice(self, value: Value, method: Method | None) -> RecipeSlice:
        if isinstance(value.data, dict) and value.data.get("residual_weight") is not None:
            value.fields()["residual_weight"].wrong(
                "`residual_weight` is not supported (mergekit reads it and does nothing with it)",
                hint="drop it",
                error=UnsupportedError,
            )
        fields = value.known(("sources", "stack", "base_model", "parameters", "residual_weight"))
        listed = fields["sources"].items() if "sources" in fields else []
        if not listed:
            value.wrong("a slice needs `sources`")
        sources = [self._source(v, method, ("model", "layer_range", "parameters")) for v in listed]
        return RecipeSlice(
            tuple(s for s in sources if s is not None),
            self._model(fields["base_model"]) if "base_model" in fields else None,
            settings(fields["parameters"], method, of_model=False) if "parameters" in fields else {},
            (fields["stack"].text() or "") if "stack" in fields else "",
        )

    def _source(self, value: Value, method: Method | None, keys: tuple[str, ...]) -> SliceSource | None:
        hints = {k: f"it belongs under `parameters` of the model: `{{{k}: ...}}`" for k in _parameters(method)}
        if "layer_range" not in keys:
            hints["layer_range"] = "`models` merges all layers; ranges are for `slices`"
        fields = value.known(keys, hints)
        if "model" not in fields:
            if isinstance(value.data, dict | None):
                value.wrong("`model` is missing")
            return None
        model = self._model(fields["model"])
        layers = None
        if "layer_range" in keys:
            if "layer_range" not in fields:
                value.wrong("`layer_range` is missing", hint="`[0, 4]` is the first four layers")
                return None
            layers = self._range(fields["layer_range"])
            if layers is None:
                return None
        given = settings(fields["parameters"], method, of_model=True) if "parameters" in fields else {}
        return None if model is None else SliceSource(model, layers, given)

    def _range(self, value: Value) -> range | None:
        ends = [v.whole() for v in value.items()]
        if None in ends or not isinstance(value.data, list):
            return None
        if len(ends) != 2 or not ends[0] < ends[1]:  # type: ignore[operator]  # no None is left
            value.wrong(f"`{value.data}` is not a range of layers", hint="`[0, 4]` is layers 0, 1, 2 and 3")
            return None
        return range(*ends)  # type: ignore[arg-type]

    def _model(self, value: Value) -> ModelRef | None:
        """A model: a text, or a mapping with an adapter."""
        if not isinstance(value.data, dict):
            text = value.text()
            return None if text is None else self._reference(value, text)
        fields = value.known(("model", "lora", "override_architecture"))
        if "override_architecture" in fields:
            fields["override_architecture"].wrong(
                "`override_architecture` is not supported: tensors are taken by their names, whatever the architecture",
                hint="drop it",
                error=UnsupportedError,
            )
        if "model" not in fields:
            value.wrong("`model` is missing")
            return None
        model = self._path(fields["model"])
        adapter = self._path(fields["lora"]) if "lora" in fields else None
        if model is None or adapter is None:
            return model
        return ModelRef(model.path, (*model.adapters, adapter.path, *adapter.adapters))

    def _path(self, value: Value) -> ModelRef | None:
        """A path, as a text or as ``{path:, revision:}``."""
        if not isinstance(value.data, dict):
            text = value.text()
        else:
            fields = value.known(("path", "revision"))
            text = fields["path"].text() if "path" in fields else None
            if "path" not in fields:
                value.wrong("`path` is missing")
            if text is not None and "revision" in fields:
                text = f"{text}@{fields['revision'].data}"
        return None if text is None else self._reference(value, text)

    def _reference(self, value: Value, text: str) -> ModelRef | None:
        """A model in the current directory, beside the recipe, or on the Hub."""
        try:
            return self._find(text)
        except CkptError as e:
            value.wrong(e.what, hint=e.hint, error=type(e))
            return None

    def _find(self, text: str) -> ModelRef:
        try:
            return reference(text, hub=False)
        except (UsageError, UnsupportedError):
            if scheme_of(text):
                raise
        with suppress(CkptError):
            found = reference(text, self.beside, hub=False)
            self.notes.append(f"`{text}` is not in the current directory; it was found beside the recipe, as {found}")
            return found
        return reference(text, self.beside)

    def _tokenizer(self, top: dict[str, Value]) -> TokenizerRecipe | None:
        if "tokenizer" in top and "tokenizer_source" in top:
            top["tokenizer_source"].wrong(
                "`tokenizer` and `tokenizer_source` exclude each other",
                hint="`tokenizer: {source: ...}` says the same",
                error=ConflictError,
            )
        if "tokenizer" not in top:
            source = self._vocabulary(top["tokenizer_source"]) if "tokenizer_source" in top else None
            return None if source is None else TokenizerRecipe(source)
        fields = top["tokenizer"].known(("source", "tokens", "pad_to_multiple_of"))
        source = self._vocabulary(fields["source"]) if "source" in fields else "union"
        rules = {t: self._rule(v) for t, v in fields["tokens"].fields().items()} if "tokens" in fields else {}
        multiple = fields["pad_to_multiple_of"].whole(1) if "pad_to_multiple_of" in fields else None
        return TokenizerRecipe(source or "union", rules, multiple)

    def _vocabulary(self, value: Value) -> ModelRef | Literal["union", "base"] | None:
        if value.data in ("union", "base"):
            return "union" if value.data == "union" else "base"
        return self._model(value)

    def _rule(self, value: Value) -> TokenRule:
        inside = dict.fromkeys(("kind", "model", "token", "token_id"), "it belongs into `source: {...}`")
        fields = value.known(("source", "force"), inside)
        force = fields["force"].flag() if "force" in fields else False
        if "source" not in fields:
            return TokenRule(None, bool(force))
        source = fields["source"]
        kind = source.data.get("kind") if isinstance(source.data, dict) else None
        if kind is None:
            return TokenRule(self._model(source), bool(force))
        if kind == "zero":
            source.known(("kind",))
            return TokenRule("zero", bool(force))
        if kind != "model_token":
            source.fields()["kind"].wrong(f"unknown kind `{kind}`", hint=nearest(str(kind), ("zero", "model_token")))
            return TokenRule(None, bool(force))
        return TokenRule(self._token(source), bool(force))

    def _token(self, value: Value) -> ModelToken | None:
        fields = value.known(("kind", "model", "token", "token_id"))
        if "model" not in fields:
            value.wrong("`model` is missing")
        if ("token" in fields) == ("token_id" in fields):
            value.wrong("exactly one of `token` and `token_id` must be given")
            return None
        model = self._model(fields["model"]) if "model" in fields else None
        token = fields["token"].text() if "token" in fields else None
        number = fields["token_id"].whole() if "token_id" in fields else None
        return None if model is None else ModelToken(model, token, number)

    def _template(self, value: Value) -> str:
        text = value.text() or ""
        if text and text != "auto" and text not in TEMPLATES and "{" not in text:
            value.wrong(
                f"`{text}` is neither the name of a chat template nor one", hint=nearest(text, (*TEMPLATES, "auto"))
            )
        return text

    def _donor(self, recipe: Recipe, method: Method) -> None:
        """A base that is not listed, for a method that subtracts none: mergekit adds it to the models."""
        piece = recipe.slices[0]
        listed = {s.model for p in recipe.slices for s in p.sources}
        if method.base != "refused" or recipe.base is None or recipe.base in listed:
            return
        if piece.sources[0].layers is None and all(
            p.default is not None or name in recipe.parameters for name, p in method.per_model.items()
        ):
            self.problems.add(
                f"`{method.name}` has no base: is `{recipe.base}` to be merged, or only to give config and tokenizer?",
                at="base_model",
                hint="list it under `models` to merge it, as mergekit would; drop `base_model` otherwise",
                error=ConflictError,
            )
        self.notes.append(f"`base_model` {recipe.base} gives config and tokenizer only: `{method.name}` has no base")

    def _idle(self, recipe: Recipe, method: Method) -> None:
        """Parameters given to the base, which has none; published recipes do it often."""
        for piece in recipe.slices:
            taking_part = merged(recipe, method, piece)
            for source in piece.sources:
                if source.parameters and source not in taking_part:
                    names = ", ".join(f"`{name}`" for name in source.parameters)
                    self.notes.append(f"{source.model} is the base, where parameters have no effect: {names}")

    def _tokens(self, recipe: Recipe) -> None:
        """Tokenizer settings that name models the merge does not have."""
        if recipe.tokenizer is None:
            return
        if recipe.tokenizer.source == "base" and recipe.base is None:
            at = "tokenizer_source" if "tokenizer_source" in self.problems.lines else "tokenizer.source"
            self.problems.add("the vocabulary of the base is asked for, and there is no `base_model`", at=at)
        known = recipe.references()
        for token, rule in recipe.tokenizer.tokens.items():
            model = rule.source.model if isinstance(rule.source, ModelToken) else rule.source
            if isinstance(model, ModelRef) and model not in known:
                self.problems.add(
                    f"`{model}` is not a model of this merge, so that it has no embedding to give",
                    at=f"tokenizer.tokens.{token}",
                )


def _parameters(method: Method | None) -> dict[str, Any]:
    return {} if method is None else {**method.per_model, **method.whole}
