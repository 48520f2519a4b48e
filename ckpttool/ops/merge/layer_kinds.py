"""Fields of config.json that tell layers apart by their numbers, when layers have got other numbers.

They say which layers have experts, and which a sliding window. Each model type has a rule of its own; what the output
needs must be said by the same rule, because a loader fills layers of the other kind with random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from ckpttool.errors import UnsupportedError

Fields = Mapping[str, Any]


def renumbered(config: Fields, count: int, layers: Sequence[int]) -> dict[str, Any]:
    """The fields to change in a config of ``count`` layers when its ``layers`` become 0, 1, 2, ...

    Raises UnsupportedError where no value of a rule's fields says which layers are which.
    """
    changed: dict[str, Any] = {}
    for field, holds, choices in _RULES:
        if not isinstance(config.get(field), int):
            continue
        try:
            wanted = [holds(config, layer, count) for layer in layers]
            tried = chain([{}], choices(wanted))  # the fields as they are come first
            found = next((c for c in tried if _says({**config, **c}, holds, wanted)), None)
        except (TypeError, ValueError, ZeroDivisionError):  # another model's field of this name
            continue
        if found is None:
            raise UnsupportedError(
                f"the slices put layers in an order that `{field}` of config.json cannot say: layers"
                f" {', '.join(str(i) for i, kind in enumerate(wanted) if kind)} of the output would be of one kind, the"
                " others of another",
                hint="choose slices that keep the order of both kinds",
            )
        changed |= {k: v for k, v in found.items() if config.get(k) != v}
    return changed


def _says(config: Fields, holds: Callable[[Fields, int, int], bool], wanted: Sequence[bool]) -> bool:
    return [holds(config, layer, len(wanted)) for layer in range(len(wanted))] == list(wanted)


def _deepseek(config: Fields, layer: int, _: int) -> bool:
    every = config.get("moe_layer_freq", 1)
    return bool(layer >= config["first_k_dense_replace"] and (isinstance(every, list) or layer % every == 0))


def _qwen(config: Fields, layer: int, _: int) -> bool:
    return bool(layer not in (config.get("mlp_only_layers") or ()) and (layer + 1) % config["decoder_sparse_step"] == 0)


def _ernie(config: Fields, layer: int, count: int) -> bool:
    last = config.get("moe_layer_end_index", -1)
    inside = config["moe_layer_start_index"] <= layer <= (count - 1 if last in (-1, None) else last)
    return bool(inside and (layer + 1) % config.get("moe_layer_interval", 1) == 0)


def _window(config: Fields, layer: int, _: int) -> bool:
    return bool(
        config.get("use_sliding_window") and "layer_types" not in config and layer >= config["max_window_layers"]
    )


def _first(field: str) -> Callable[[Sequence[bool]], Iterator[dict[str, Any]]]:
    """Every layer as the first one."""
    return lambda wanted: ({field: first} for first in range(len(wanted) + 1))


def _listed(wanted: Sequence[bool]) -> Iterator[dict[str, Any]]:
    yield {"mlp_only_layers": [i for i, sparse in enumerate(wanted) if not sparse], "decoder_sparse_step": 1}


def _ends(wanted: Sequence[bool]) -> Iterator[dict[str, Any]]:
    for first in range(len(wanted) + 1):
        for last in range(first, len(wanted)):
            yield {"moe_layer_start_index": first, "moe_layer_end_index": last}


_RULES = (
    ("first_k_dense_replace", _deepseek, _first("first_k_dense_replace")),
    ("decoder_sparse_step", _qwen, _listed),
    ("moe_layer_start_index", _ernie, _ends),
    ("max_window_layers", _window, _first("max_window_layers")),
)
"""A rule: the field by which it is known, whether a layer is of the one kind, and values to try for the output."""
