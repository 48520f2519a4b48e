"""PaddleNLP and PaddleFormers: ``lora_config.json`` and ``peft_model-0000i-of-0000N.safetensors`` with an index.

Source: paddlenlp 3.0, paddleformers 1.2 (peft/lora, mergekit/merge_model.py). A linear layer's W [in, out] becomes
W + factor * A @ B with A [in, r] and B [r, out], named ``X.lora_A`` and ``X.lora_B`` beside ``X.weight``; a parameter
``X`` that is no layer's weight has ``X_lora_A`` and ``X_lora_B``, with a first axis for the experts when they are
stacked. bfloat16 is stored as U16. LoRA-GA stores twice the rank, so that the original base fits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ckpttool.adapters.base import (
    Adapter,
    FactorKind,
    Factors,
    Pair,
    both_sides,
    check_dtypes,
    check_rank,
    number,
    scaling,
)
from ckpttool.core.catalog import Catalog, whole_tensor
from ckpttool.errors import ConflictError, UnsupportedError
from ckpttool.planning.relate import unstack

CONFIG = "lora_config.json"
STEM = "peft_model"

REFUSED = {
    "do_qat": "it was trained for a quantized base",
    "lora_use_mixer": "its mixer is a third factor",
    "use_mora": "MoRA has one square matrix",
    "pissa": "PiSSA changes the base",
    "enable_lora_list": "merged layers adapt parts of a weight",
    "nola": "NoLA's factors are sums of random ones",
}
"""Fields of the config that, when set, ask for more than a sum of low-rank products."""

_FACTOR = re.compile(r"(?P<name>.+)(?P<dot>[._])lora_(?P<side>[AB])\Z")


class PaddleAdapter(Adapter):
    """A is [in, rank] and B [rank, out]."""

    dialect = "paddle"
    in_out_everywhere = True
    interleaves_qkv = True

    def factors(self, pair: Pair) -> Factors:
        return Factors(self.view(pair.a), self.view(pair.b), pair.factor).transposed()

    def experts(self, pair: Pair) -> list[Factors]:
        a, b = self.view(pair.a), self.view(pair.b)
        return [
            Factors(unstack(a.name, a, e), unstack(b.name, b, e), pair.factor).transposed() for e in range(a.shape[0])
        ]


def adapter(where: str, config: Mapping[str, Any], catalog: Catalog) -> Adapter:
    """Raises UnsupportedError for what is no plain LoRA, ConflictError and IncompleteError for what does not fit."""
    path = f"{where}/{CONFIG}"
    for field, why in REFUSED.items():
        if config.get(field):
            raise UnsupportedError(f"the adapter has `{field}`: {why}", where=path)
    catalog = _with_bfloat16(catalog)
    check_dtypes(catalog)
    rank = int(number(config, "r", path))
    factor = scaling(number(config, "lora_alpha", path), rank, root=bool(config.get("rslora")))
    rank *= 2 if config.get("loraga") else 1
    sides: dict[str, dict[str, str]] = {}
    whole: dict[str, str] = {}
    for key in catalog.tensors:
        found = _FACTOR.match(key.name)
        if found is not None:
            target = f"{found['name']}.weight" if found["dot"] == "." else found["name"]
            sides.setdefault(target, {})[found["side"]] = key.name
        elif re.search(r"[._]lora_", key.name):
            raise UnsupportedError(f"`{key.name}` is nothing that plain LoRA has", where=path)
        else:
            whole[key.name] = key.name
    pairs = [_pair(target, found, rank, factor, catalog, path) for target, found in sides.items()]
    return PaddleAdapter(where, catalog, tuple(pairs), whole, in_out=True)


def _with_bfloat16(catalog: Catalog) -> Catalog:
    """The same with U16 tensors as the bfloat16 that they are: Paddle has no numbers of that type."""
    tensors = dict(catalog.tensors)
    for key, t in tensors.items():
        if t.dtype == "U16":
            tensors[key] = whole_tensor(t.pieces[0].stored._replace(dtype="BF16"), key)
    return Catalog(catalog.files, tensors)


def _pair(target: str, sides: Mapping[str, str], rank: int, factor: float, catalog: Catalog, path: str) -> Pair:
    a, b = both_sides(sides, path)
    shapes = catalog[a].shape, catalog[b].shape
    kinds: dict[int, FactorKind] = {2: "linear", 3: "stacked"}
    kind = kinds.get(len(shapes[0]))
    if kind is None or len(shapes[1]) != len(shapes[0]) or shapes[0][:-2] != shapes[1][:-2]:
        raise ConflictError(
            f"`{a}` {list(shapes[0])} and `{b}` {list(shapes[1])} cannot be multiplied",
            where=path,
            hint="only linear layers and stacked experts are merged",
        )
    check_rank(catalog, a, b, (shapes[0][-1], shapes[1][-2]), rank, path)
    return Pair(target, kind, a, b, rank, factor)
