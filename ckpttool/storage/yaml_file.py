"""YAML files beside a checkpoint: configurations that trainers wrote. Plain values only, and bounded."""

from __future__ import annotations

from typing import Any

from ckpttool.core.files import DataFile, Place
from ckpttool.core.words import count
from ckpttool.errors import CorruptError
from ckpttool.storage.place import readable

MAX_BYTES = 1 << 20


def load_yaml(place: Place) -> dict[str, Any]:
    """A mapping; what has a tag of a programming language is None in it. Raises CorruptError for anything else."""
    import yaml

    class PlainValueLoader(yaml.SafeLoader):
        def flatten_mapping(self, node: yaml.MappingNode) -> None:
            if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value):  # may grow without bounds
                raise yaml.YAMLError("it has merge keys (<<)")

    PlainValueLoader.add_multi_constructor("!", lambda *_: None)
    PlainValueLoader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    hint = "fetch the file again, or put a config.json beside the save and remove this file"
    with readable(place):
        size = DataFile.at(place).size
        if size > MAX_BYTES:
            raise CorruptError(
                f"the file has {count(size, 'byte')}: this is not a configuration", where=str(place), hint=hint
            )
        with place.open("rb") as f:
            text = f.read(MAX_BYTES)
    try:
        value = yaml.load(text, PlainValueLoader)  # noqa: S506  # a safe loader
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError, TypeError) as e:
        why = "it is nested too deep" if isinstance(e, RecursionError) else " ".join(str(e).split())[:160]
        raise CorruptError(f"the file is not valid YAML: {why}", where=str(place), hint=hint) from None
    if not isinstance(value, dict):
        raise CorruptError("the file is not a YAML mapping", where=str(place), hint=hint)
    return value
