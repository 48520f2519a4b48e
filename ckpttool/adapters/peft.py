"""PEFT: ``adapter_config.json`` and ``adapter_model.safetensors``.

Source: PEFT 0.21 (tuners/lora/config.py, layer.py, utils/save_and_load.py, utils/other.py). A linear layer's W
[out, in] becomes W + factor * B @ A with A [r, in] and B [out, r]. An embedding's W [rows, dim] becomes
W + factor * (B @ A)^T with A [r, rows] and B [dim, r]. The names of tensors begin with ``base_model.model.``.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from ckpttool.adapters.base import (
    ANOTHER_MODEL,
    Adapter,
    CandidateParameter,
    FactorKind,
    Factors,
    Pair,
    both_sides,
    check_dtypes,
    check_rank,
    number,
    positive,
    scaling,
)
from ckpttool.core.catalog import Catalog
from ckpttool.errors import ConflictError, CorruptError, UnsupportedError
from ckpttool.planning.relate import deinterleave, take

CONFIG = "adapter_config.json"
STEM = "adapter_model"
PREFIX = "base_model.model."

REFUSED = {
    "use_dora": "DoRA scales the columns of the sum, which is not a low-rank term",
    "lora_bias": "its layers bring biases of their own",
    "layer_replication": "it repeats layers of the base",
    "alora_invocation_tokens": "aLoRA is only active after certain tokens, so there is no merged model",
    "trainable_token_indices": "it replaces single rows of the embeddings",
    "megatron_config": "it was trained on Megatron's parallel layers",
    "use_qalora": "QALoRA pools the inputs of quantized layers",
    "use_bdlora": "BD-LoRA's factors are block-diagonal",
    "arrow_config": "Arrow chooses among adapters for each token",
    "kasa_config": "KaSA changes the base and has a third factor",
    "monteclora_config": "MonteCLoRA samples its factors",
    "velora_config": "VeLoRA's factors are not known",
}
"""Fields of the config that, when set, ask for more than a sum of low-rank products."""
HARMLESS = {"loftq_config", "eva_config", "corda_config", "lora_ga_config", "use_rslora"}
"""Fields that look as if they did; the first ones only count together with ``init_lora_weights``."""
STARTS = {"gaussian", "eva", "orthogonal", "mica"}
"""Values of ``init_lora_weights`` that leave the base as it is; pissa, olora, corda, lora_ga and loftq change it."""

_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(?P<rest>(?:\.[^.]+){0,2})\Z")
_WRAPPER = re.compile(r"\.(?:modules_to_save(?:\.default)?|base_layer)(?=\.)")
"""Infix in the names of wrapped modules that the base's names lack."""


class _FactorName(NamedTuple):
    module: str
    kind: FactorKind
    side: str


class PeftAdapter(Adapter):
    """A is [rank, in] and B [out, rank]."""

    dialect = "hf"
    # fan_in_fan_out is reset for layers that are plain nn.Linear, and the config keeps the last layer's flag.
    in_out_everywhere = False
    interleaves_qkv = False

    def factors(self, pair: Pair) -> Factors:
        return Factors(self.view(pair.b), self.view(pair.a), pair.factor)

    def experts(self, pair: Pair) -> list[Factors]:
        """A [experts * rank, in] has the ranks of an expert together, B [out, rank * experts] the experts of a rank."""
        a, b, r = self.view(pair.a), self.view(pair.b), pair.rank
        n, rest = divmod(a.shape[0], r)
        if rest or not n or len(a.shape) != 2 or len(b.shape) != 2 or b.shape[1] != a.shape[0]:
            raise ConflictError(
                f"`{pair.a}` {list(a.shape)} and `{pair.b}` {list(b.shape)} are not a stack of factors of rank {r}",
                where=self.path,
                hint=ANOTHER_MODEL,
            )
        return [
            Factors(
                deinterleave(b.name, b, 1, r, e, 1, n) if n > 1 else b,
                take(a.name, a, 0, e * r, e * r + r),
                pair.factor,
            )
            for e in range(n)
        ]


def adapter(where: str, config: Mapping[str, Any], catalog: Catalog) -> Adapter:
    """Raises UnsupportedError for what is no plain LoRA, ConflictError and IncompleteError for what does not fit."""
    path = f"{where}/{CONFIG}"
    check(config, path)
    check_dtypes(catalog)
    factors: dict[tuple[str, FactorKind], dict[str, str]] = {}
    whole: dict[str, str] = {}
    in_place = set()
    notes = []
    for key in catalog.tensors:
        name = key.name.removeprefix(PREFIX)
        factor = _factor(name, path)
        if factor is not None:
            sides = factors.setdefault((factor.module, factor.kind), {})
            if factor.side in sides:
                raise ConflictError(f"`{sides[factor.side]}` and `{key.name}` are one factor twice", where=where)
            sides[factor.side] = key.name
        elif ".original_module." in name:
            notes.append(f"`{key.name}` is left out: it is the base's tensor as it was before training")
        else:
            plain = _WRAPPER.sub("", name)
            if plain in whole:
                raise ConflictError(f"`{whole[plain]}` and `{key.name}` both stand for `{plain}`", where=where)
            whole[plain] = key.name
            # The weight below factors, which is saved with them where it is an embedding's or the head's.
            if ".base_layer." in name:
                in_place.add(plain)
    if config.get("ensure_weight_tying"):
        # PEFT saves both tensors of a pair that it tied. One that it saves alone it could not tie, and sets apart.
        shapes = Counter(catalog[name].shape for name in whole.values())
        in_place |= {plain for plain, name in whole.items() if shapes[catalog[name].shape] > 1}
    pairs = [_pair(module, kind, sides, config, catalog, path) for (module, kind), sides in factors.items()]
    return PeftAdapter(
        where, catalog, tuple(pairs), whole, bool(config.get("fan_in_fan_out")), tuple(notes), frozenset(in_place)
    )


def check(config: Mapping[str, Any], path: str) -> None:
    """Refuse what the config asks for and is not done."""
    kind = str(config.get("peft_type"))
    if kind.upper() != "LORA":
        raise UnsupportedError(f"the adapter is {kind}: only LoRA is merged", where=path)
    for field, why in REFUSED.items():
        if config.get(field):
            raise UnsupportedError(f"the adapter has `{field}`: {why}", where=path, hint="merge it with PEFT")
    start = config.get("init_lora_weights", True)
    if not isinstance(start, bool) and str(start).lower() not in STARTS | {"true", "false"}:
        raise UnsupportedError(
            f"the adapter was started with `init_lora_weights: {start}`, which changes the base",
            where=path,
            hint="save it with path_initial_model_for_weight_conversion, so that it fits the original base",
        )
    for field, value in config.items():
        if value and field not in HARMLESS and (field.startswith("use_") or field.endswith("_config")):
            raise UnsupportedError(f"the adapter has `{field}`, which is not known", where=path)


def _factor(name: str, path: str) -> _FactorName | None:
    """The factor that a tensor is by its name; None for a tensor that was trained in full."""
    found = _FACTOR.fullmatch(name)
    if found is None:
        if re.search(r"(?:^|\.)lora_", name) or ".token_adapter." in name:
            raise UnsupportedError(f"`{name}` is nothing that plain LoRA has", where=path)
        return None
    rest = found["rest"].split(".")[1:]
    weight = bool(rest) and rest[-1] == "weight"
    if rest and rest[-1] == "bias":
        raise UnsupportedError(f"`{name}`: {REFUSED['lora_bias']}", where=path)
    if len(rest) - weight > 1 or (not found["embedding"] and not weight):
        raise UnsupportedError(f"`{name}` is nothing that plain LoRA has", where=path)
    return _FactorName(found["module"], "embedding" if found["embedding"] else "linear", found["side"])


def _pair(
    module: str, kind: FactorKind, sides: Mapping[str, str], config: Mapping[str, Any], catalog: Catalog, path: str
) -> Pair:
    a, b = both_sides(sides, path)
    plain = module.replace(".base_layer", "")
    shapes = catalog[a].shape, catalog[b].shape
    if min(map(len, shapes)) < 2:
        raise ConflictError(f"`{a}` {list(shapes[0])} and `{b}` {list(shapes[1])} are not matrices", where=path)
    if parameters := _parameters(plain, config, path) if kind == "linear" else ():
        choices = tuple([CandidateParameter(p, *rank_of(f"{plain}.{p}", config, path)) for p in parameters])
        return Pair(plain, "stacked", a, b, 0, 0.0, choices)
    rank, factor = rank_of(plain, config, path)
    check_rank(catalog, a, b, (shapes[0][0], shapes[1][1]), rank, path)
    return Pair(f"{plain}.weight", kind, a, b, rank, factor)


def _parameters(module: str, config: Mapping[str, Any], path: str) -> tuple[str, ...]:
    """Names of the module's parameters that ``target_parameters`` means; PEFT compares the ends of names.

    A name alone means a parameter of any module, but a module that ``target_modules`` means is a layer of its own.
    """
    targets = config.get("target_parameters") or []
    if not isinstance(targets, list) or not all(isinstance(t, str) for t in targets):
        raise CorruptError("`target_parameters` is not a list of names", where=path)
    layer = _is_target(module, config.get("target_modules"), path)
    return tuple(
        dict.fromkeys(
            parameter
            for holder, _, parameter in (t.rpartition(".") for t in targets)
            if (f".{module}".endswith(f".{holder}") if holder else not layer)
        )
    )


def _is_target(module: str, targets: object, path: str) -> bool:
    """Whether ``target_modules``, which is a list of ends of names or a regular expression, means a module."""
    if isinstance(targets, str):
        return targets == "all-linear" or _regex(targets, "target_modules", path).fullmatch(module) is not None
    return isinstance(targets, list) and any(f".{module}".endswith(f".{t}") for t in targets)


def rank_of(name: str, config: Mapping[str, Any], path: str) -> tuple[int, float]:
    """Rank and factor of a module or of a parameter. Raises ConflictError."""
    rank = _pattern(config, "rank_pattern", name, path) or number(config, "r", path)
    alpha = _pattern(config, "alpha_pattern", name, path) or number(config, "lora_alpha", path)
    if rank != int(rank):
        raise ConflictError(f"the rank of `{name}` is {rank}, which is not a whole number", where=path)
    return int(rank), scaling(alpha, rank, root=bool(config.get("use_rslora")))


def _pattern(config: Mapping[str, Any], field: str, module: str, path: str) -> float | None:
    """The first entry whose regular expression is the end of the module's name, from the start of a component."""
    patterns = config.get(field) or {}
    if not isinstance(patterns, dict):
        raise CorruptError(f"`{field}` is not a table", where=path)
    for pattern, value in patterns.items():
        if _regex(rf"(.*\.)?({pattern})$", field, path, shown=pattern).match(module):
            return positive(value, f"{field}: {pattern}", path)
    return None


def _regex(pattern: str, field: str, path: str, shown: str = "") -> re.Pattern[str]:
    """Raises CorruptError for one that is not a regular expression."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of sets that a later Python may read otherwise
            return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as e:
        raise CorruptError(
            f"`{field}` has `{shown or pattern}`, which is not a regular expression: {e}", where=path
        ) from None
