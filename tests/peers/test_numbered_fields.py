"""All fields of all configs of transformers, and what a slice does to each that speaks of layers: it follows, or the
merge is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("transformers")

from ckpttool.errors import CkptError, UnsupportedError
from ckpttool.layout.family import find_family, load_family, no_family
from ckpttool.layout.names import samples
from ckpttool.ops.merge.renumber import OutputLayer, renumbered

Config = dict[str, Any]
COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
OF_NO_LAYERS = {
    *("eos_token_id", "time_step_limit", "quantiles"),  # lists that may be as long as there are layers
    *(
        "residual_multiplier",
        "final_w_init_variance_scale",
        "moe_layer_end_index",
    ),  # numbers that stay what they are for each layer
}


def plain(config: Any) -> Config:
    found: Config = json.loads(json.dumps(config.to_dict(), default=str))
    return found


def classes() -> list[tuple[str, Any]]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    found: list[tuple[str, Any]] = []
    for model_type in CONFIG_MAPPING:
        cls = CONFIG_MAPPING[model_type]
        with suppress(Exception):  # defaults that are not valid together
            found.append((model_type, type(cls())))
    return found


def places(config: Config, path: str = "") -> Iterator[tuple[str, Config]]:
    """Parts of a config that have layers, with the paths that lead to them."""
    if any(type(config.get(f)) is int for f in COUNTS):
        yield path, config
    for name, value in config.items():
        if isinstance(value, dict) and (name.endswith("_config") or "model_type" in value):
            yield from places(value, f"{path}{name}.")


def at(config: Config, path: str) -> Config:
    for name in path.split(".")[:-1]:
        config = config[name]
    return config


def changing(cls: Any, field: str, count: int) -> set[str]:
    """Fields of a class that are others when there are other numbers of layers."""
    found: set[str] = set()
    before = plain(cls())
    for more in (1, 2, 3, 7):
        with suppress(Exception):  # a number that its class refuses
            after = plain(cls(**{field: count + more}))
            found |= {k for k in before.keys() | after.keys() if before.get(k) != after.get(k)}
    return found - {field, "transformers_version"}


def followed(before: Any, after: Any, order: list[int], count: int) -> bool:
    """Whether a field says of the new layers what it said of the old ones."""
    if isinstance(before, dict):
        numbers = {int(k): v for k, v in before.items() if str(k).isdecimal()}
        return {int(k): v for k, v in after.items()} == {i: numbers[n] for i, n in enumerate(order) if n in numbers}
    if not isinstance(before, list):
        return False
    if len(before) == count and after == [before[n] for n in order]:
        return True
    return any(after == [i + base for i, n in enumerate(order) if n + base in before] for base in (0, 1))


def left_behind(model_type: str, cls: Any) -> list[str]:
    """Fields that a slice neither changes nor is refused for, of the parts whose layers are sliced."""
    config = plain(cls())
    name = find_family(config)
    try:
        family = load_family(name, config) if name else no_family()
    except UnsupportedError:  # around a language model of no family
        return []
    prefix = samples(family.spec.layers.prefix.partition("{layer}")[0])[0] or "model.layers."
    out = []
    for path, part in places(config):
        if not any(part is p for p in family.spec.places(config)):
            continue
        field = next(f for f in COUNTS if type(part.get(f)) is int)
        count = part[field]
        order = [n for n in range(count) if n != 1]
        if count < 3:
            continue
        try:
            result = renumbered(family, config, prefix, [OutputLayer(config, n) for n in order])
        except CkptError:
            continue
        new = at(result, path)
        if new[field] == count:  # of another part or stack
            continue
        lists = {k for k, v in part.items() if isinstance(v, list) and len(v) == count}
        own = changing(cls, field, count) if not path else set()
        for k in sorted((lists | own) - OF_NO_LAYERS):
            value = part.get(k)
            if value is None or (type(value) is int and new.get(k) != value):
                continue
            if not followed(value, new.get(k), order, count):
                out.append(f"{model_type}: {path}{k} was {str(value)[:60]}, is {str(new.get(k))[:60]}")
    return out


def test_no_field_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert [w for model_type, cls in classes() for w in left_behind(model_type, cls)] == []
