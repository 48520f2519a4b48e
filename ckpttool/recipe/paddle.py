"""PaddleFormers' merge_config.json as a recipe.

That file holds every field of its tool, used or not. What only says how the work is done has no effect here and is
noted; what would change the result and is not done is refused.
"""

from __future__ import annotations

from pathlib import Path

from ckpttool.core.files import Place
from ckpttool.errors import CkptError, ConflictError, UnsupportedError
from ckpttool.kernels.merge.base import Method
from ckpttool.recipe.check import TYPES, Words, check, method_named, scalar
from ckpttool.recipe.document import Problems, Value, from_json, home, read_text
from ckpttool.recipe.model import ModelRef, ParameterType, Recipe, RecipeSlice, Scalar, Setting, SliceSource, reference

METHODS = ("linear", "slerp", "ties", "della", "della_linear", "dare_linear", "dare_ties")
"""The values of merge_method; ours are called paddle_*."""

PARAMETERS = (
    "normalize",
    "rescale",
    "reserve_p",
    "epsilon",
    "slerp_alpha",
    "slerp_normalize_eps",
    "slerp_dot_threshold",
)

IDLE = {
    "n_process": "--workers sets the number of workers",
    "max_tensor_mem": "--memory bounds the memory",
    "split_pieces": "tensors are never cut into pieces that are merged by themselves, which would change the result",
    "tensor_type": "the arithmetic is always float32",
    "device": "everything runs on the CPU",
    "merge_type": "it follows from merge_method",
    "sparsify_type": "it follows from merge_method",
    "output_path": "the output is named on the command line",
    "copy_file_list": "config, tokenizer and other small files come along by themselves",
    "convert_from_hf": "which way the weights lie is read from each checkpoint",
    "save_to_hf": "--to says how the output is written",
}
"""Fields that do not change the merged values here, each with the reason."""

FIELDS = (
    "merge_method",
    "merge_prefix",
    "model_path_list",
    "model_path_str",
    "base_model_path",
    "lora_model_path",
    "weight_list",
    "ties_elect_type",
    "remove_keys",
    "merge_with_qdq_base_model",
    *PARAMETERS,
    *IDLE,
)

WORDS = Words("`base_model_path`", "model_path_list", "give `{name}`", "give `{name}`")


def read_paddle(path: Place) -> Recipe:
    """The recipe in a file; see ``parse_paddle``."""
    return parse_paddle(read_text(path), str(path), beside=home(path))


def parse_paddle(text: str, name: str = "merge_config.json", *, beside: Path | None = None) -> Recipe:
    """The recipe that a merge_config.json describes. Relative paths count from the current directory, else ``beside``.

    Raises UsageError, ConflictError or UnsupportedError; several problems at once come as one error.
    """
    document = from_json(text, name)
    problems = document.problems
    fields = document.known(FIELDS)
    if not isinstance(document.data, dict):
        problems.check()
    notes = [f"{field} has no effect: {why}" for field, why in IDLE.items() if field in fields]
    qdq = fields.get("merge_with_qdq_base_model")
    if qdq is not None and qdq.flag():
        qdq.wrong(
            "merging into a base that keeps its quantized form is not supported",
            hint="set it to false: quantized bases are dequantized with their scales",
            error=UnsupportedError,
        )
    prefix = _text(fields, "merge_prefix") or "model"
    if prefix not in ("model", "master_weights"):
        fields["merge_prefix"].wrong(f"`{prefix}` is neither `model` nor `master_weights`")
    base = _reference(fields["base_model_path"], beside) if "base_model_path" in fields else None
    removed = [v.text() for v in fields["remove_keys"].items()] if "remove_keys" in fields else []
    parts = _adapter(fields, base, beside) if "lora_model_path" in fields else _models(fields, problems, beside, notes)
    problems.check()
    assert parts is not None  # noqa: S101 - otherwise it has been noted as a problem
    method, sources, whole = parts
    recipe = Recipe(
        method.name,
        (RecipeSlice(tuple(sources)),),
        base if "lora_model_path" not in fields else None,
        whole,
        component=prefix,
        remove_keys=tuple(k for k in removed if k is not None),
        notes=tuple(notes),
        name=name,
        text=text,
    )
    check(recipe, problems, WORDS)
    problems.check()
    return recipe


DocumentParts = tuple[Method, list[SliceSource], dict[str, Setting]]


def _text(fields: dict[str, Value], key: str) -> str | None:
    return fields[key].text() if key in fields else None


def _reference(value: Value, beside: Path | None, text: str | None = None) -> ModelRef | None:
    text = value.text() if text is None else text
    if text is None:
        return None
    try:
        found = reference(text, beside)
    except CkptError as e:
        value.wrong(e.what, hint=e.hint, error=type(e))
        return None
    if found.adapters:
        value.wrong(f"there is no `{text}`", hint="adapters are given by lora_model_path")
        return None
    return found


def _adapter(fields: dict[str, Value], base: ModelRef | None, beside: Path | None) -> DocumentParts | None:
    """An adapter that is added to its base: one model, copied."""
    value = fields["lora_model_path"]
    for key in ("model_path_list", "model_path_str"):
        if key in fields:
            fields[key].wrong("models and `lora_model_path` exclude each other", hint="drop one", error=ConflictError)
    if "base_model_path" not in fields:
        value.wrong("`lora_model_path` needs `base_model_path`, the model that the adapter belongs to")
    adapter = _reference(value, beside)
    method = method_named("passthrough", value.problems)
    if base is None or adapter is None or method is None:
        return None
    return method, [SliceSource(ModelRef(base.path, (adapter.path,)))], {}


def _models(
    fields: dict[str, Value], problems: Problems, beside: Path | None, notes: list[str]
) -> DocumentParts | None:
    word = (_text(fields, "merge_method") or "linear") if "merge_method" in fields else "linear"
    if word not in METHODS:
        fields["merge_method"].wrong(f"there is no merge method `{word}`", hint=f"known: {', '.join(METHODS)}")
        return None
    method = method_named(f"paddle_{word}", problems, at="merge_method")
    paths = _paths(fields, problems)
    models = [_reference(v, beside, t) for v, t in paths]
    weights = _weights(fields, len(paths), method)
    if method is None or weights is None or None in models:
        return None
    whole = {}
    for name, parameter in method.whole.items():
        if name in fields and (found := _number(fields[name], parameter.kind)) is not None:
            whole[name] = Setting.of(parameter.kind, found)
    if "elect_count" in method.whole and "ties_elect_type" in fields:
        elect = _text(fields, "ties_elect_type")
        if elect not in ("sum", "count"):
            fields["ties_elect_type"].wrong(f"`{elect}` is neither `sum` nor `count`")
        whole["elect_count"] = Setting.of("bool", elect == "count")
    if "weight_list" not in fields and "weight" in method.per_model:
        if "normalize" in method.whole:
            whole["normalize"] = Setting.of("bool", True)  # noqa: FBT003 - values stand as they are in a recipe
        notes.append("weight_list is not given: all models weigh the same, and the weights are normalized")
    sources = [
        SliceSource(m, None, {"weight": Setting.of("float", w)} if "weight" in method.per_model else {})
        for m, w in zip(models, weights, strict=True)
        if m is not None
    ]
    if "reserve_p" in whole and not 0 <= float(whole["reserve_p"].at("", 0) or 0) <= 1:
        fields["reserve_p"].wrong("`reserve_p` is a share, from 0 to 1")
    return method, sources, whole


def _paths(fields: dict[str, Value], problems: Problems) -> list[tuple[Value, str]]:
    """The models' paths, each with the value that it comes from."""
    if "model_path_list" in fields and "model_path_str" in fields:
        fields["model_path_str"].wrong(
            "`model_path_list` and `model_path_str` exclude each other", hint="drop one", error=ConflictError
        )
    if "model_path_list" in fields:
        listed = [(v, v.text()) for v in fields["model_path_list"].items()]
        return [(v, t) for v, t in listed if t is not None]
    if "model_path_str" in fields:
        value = fields["model_path_str"]
        return [(value, t.strip()) for t in (value.text() or "").split(",")]
    problems.add("nothing to merge: `model_path_list`, `model_path_str` or `lora_model_path` is missing")
    return []


def _weights(fields: dict[str, Value], count: int, method: Method | None) -> list[float] | None:
    if "weight_list" not in fields or (method is not None and "weight" not in method.per_model):
        return [1.0] * count
    value = fields["weight_list"]
    weights = [_number(v, "float") for v in value.items()]
    if isinstance(value.data, list) and len(weights) != count:
        value.wrong(f"{len(weights)} weights are given for {count} models", error=ConflictError)
    known = [float(w) for w in weights if w is not None]
    return known if len(known) == count else None


def _number(value: Value, kind: ParameterType) -> Scalar | None:
    """One value of a parameter's type; None after noting that it is none. Gradients do not exist here."""
    found = scalar(value.data, kind)
    if found is None:
        value.wrong(f"`{value.data}` is not {TYPES[kind]}")
    return found
