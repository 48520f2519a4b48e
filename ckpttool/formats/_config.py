"""Fields of config.json. A model with other towers has those of its text model in ``text_config``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def config_places(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Where the fields of a text model are looked up, the first that has one counts."""
    text = config.get("text_config")
    return [config, *([text] if isinstance(text, Mapping) else [])]


def config_field(config: Mapping[str, Any], name: str) -> Any:
    """What the config says under this name; None where it says nothing."""
    return next((p[name] for p in config_places(config) if p.get(name) is not None), None)


def whole_number(config: Mapping[str, Any], name: str) -> int | None:
    """The first whole number under this name."""
    return next((p[name] for p in config_places(config) if type(p.get(name)) is int), None)


def config_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """All that it says of the text model, in one."""
    outer, *inner = config_places(config)
    return {**(inner[0] if inner else {}), **{k: v for k, v in outer.items() if k != "text_config"}}
