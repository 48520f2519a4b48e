"""What the tensors of every architecture with a family are called: a record that transformers is not needed for.

``python -m tests.peers.families --names tests/layout/stored_names.json`` writes it. Of names that differ only in the
numbers of layers and experts it has the first. Names are sorted, and each is written as the number of parts between
dots that it shares with the one before, and its own rest.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).parents[1] / "layout" / "stored_names.json"


class Stored(NamedTuple):
    """One architecture: what of its config.json chooses rules, the family that is chosen, and its names."""

    config: dict[str, Any]
    family: str
    names: list[str]

    @property
    def label(self) -> str:
        classes = self.config.get("architectures") or [self.config.get("_class_name")]
        return f"{self.config.get('model_type', '')}-{classes[0]}"


def pack(names: Iterable[str]) -> str:
    """One text for a list of names."""
    out = []
    before: list[str] = []
    for name in sorted(names):
        parts = name.split(".")
        shared = next((i for i, (a, b) in enumerate(zip(before, parts, strict=False)) if a != b), len(before))
        out.append(f"{shared}:{'.'.join(parts[shared:])}")
        before = parts
    return " ".join(out)


def unpack(text: str) -> list[str]:
    """The other way."""
    out: list[str] = []
    before: list[str] = []
    for word in text.split(" "):
        shared, _, rest = word.partition(":")
        before = [*before[: int(shared)], *rest.split(".")]
        out.append(".".join(before))
    return out


def kept(config: Mapping[str, Any]) -> dict[str, Any]:
    """What of a config.json chooses a family: types of the model and of its parts."""
    out: dict[str, Any] = {}
    for name, value in config.items():
        if name in ("model_type", "architectures", "_class_name"):
            out[name] = value
        elif isinstance(value, dict) and (inner := kept(value)):
            out[name] = inner
    return out


def write(found: Iterable[Stored], file: Path = FILE, *, anew: bool = False) -> None:
    """Into what the record has already, or without it; lists that several have stand once."""
    rest = {s.label: s for s in (read(file) if file.exists() and not anew else ())}
    found = [*(rest | {s.label: s for s in found}).values()]
    lists: dict[str, int] = {}
    rows = []
    for one in sorted(found, key=lambda s: s.label):
        at = lists.setdefault(pack(one.names), len(lists))
        rows.append(json.dumps([one.config, one.family, at], separators=(",", ":")))
    texts = ",\n".join(json.dumps(t) for t in lists)
    file.write_text(
        '{"names": [\n' + texts + '\n],\n"architectures": [\n' + ",\n".join(rows) + "\n]}\n", encoding="utf-8"
    )


def read(file: Path = FILE) -> Iterator[Stored]:
    """All of the record."""
    data = json.loads(file.read_text(encoding="utf-8"))
    lists = [unpack(t) for t in data["names"]]
    for config, family, at in data["architectures"]:
        yield Stored(config, family, lists[at])
