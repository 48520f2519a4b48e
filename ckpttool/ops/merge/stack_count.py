"""Fields of config.json that count the layers of one stack, and the parts that speak of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckpttool.errors import UnsupportedError
from ckpttool.formats.config import LAYERS, is_part
from ckpttool.layout.family import Family
from ckpttool.layout.slices import LayerStack, stack_fields

Config = dict[str, Any]


class CountedStack:
    """One stack of layers, as a config counts it."""

    def __init__(
        self, family: Family, config: Mapping[str, Any], stack: str, counts: Sequence[str], least: int
    ) -> None:
        """``counts``: fields that count the layers, beside those that the family names. ``least``: how many layers
        there are where no field counts them."""
        self.family, self.config, self.stack, self.counts = family, config, stack, counts
        self.described = LayerStack.of(family, config, stack)
        count = self.described.count
        if count is None:
            found = self.places(config)
            count = next((p[f] for p in found for f in counts if type(p.get(f)) is int), None)
        self.count: int = least if count is None else count

    def places(self, config: Mapping[str, Any]) -> list[Any]:
        """The parts of a config that speak of the stack: those in which its layers are counted, or the family's."""
        parts = [f.rpartition(".")[0] for f in self.described.count_fields if type(value_at(self.config, f)) is int]
        found = [p for path in dict.fromkeys(parts) if path and isinstance(p := value_at(config, path), dict)]
        if found and self.stack:
            return found
        places = [*found, *(p for p in self.family.spec.places(config) if not any(p is f for f in found))]
        if self.family.name == "none" and not any(type(p.get(f)) is int for p in places for f in LAYERS):
            places += [v for k, v in config.items() if is_part(k, v) and any(f in v for f in LAYERS)][:1]
        return places

    def set(self, out: Config, places: Sequence[Any], number: int) -> None:
        """Let the fields of ``out`` that count the layers say ``number``; those of other stacks keep their values.

        ``places`` are those of ``out``. Raises UnsupportedError where no field counts the layers.
        """
        family, spec = self.family, self.family.spec.tensors
        others = [s for s in ("", *(spec.stacks if spec else ())) if s != self.stack]
        known = {s: LayerStack.of(family, self.config, s) for s in others}
        kept = {s: d.count for s, d in known.items() if d.count}
        shared = {f for s in kept for f in known[s].count_fields}
        own = self.described.count_fields
        roots = [*places, *([] if any(p is out for p in places) else [out])]
        there = [f for f in own if f not in shared and any(type(value_at(p, f)) is int for p in roots)]
        if self.stack:
            more: Sequence[str] = stack_fields(family, self.stack).counts
        else:
            more = [] if {*own} - {*LAYERS} else self.counts
        done = False
        for path in dict.fromkeys([*(there or own[:1]), *more]):
            for place in roots:
                if type(value_at(place, path)) is int and value_at(place, path) == self.count:
                    put_value(place, path, number)
                    done = True
        if not done and own and "." not in own[0] and not self._is_listed(places):
            places[0][own[0]] = number
        for stack, count in kept.items():
            if LayerStack.of(family, out, stack).count != count:
                plain = (f for f in known[stack].count_fields if "." not in f)
                roots[-1][next(plain, LAYERS[0])] = count
        now = LayerStack.of(family, out, self.stack).count
        if (now is not None or not done) and now != number and not self._is_listed(places):
            raise UnsupportedError(
                f"no field of config.json is known to count the layers, of which there are {number} now",
                hint="merge this stack whole, with `models`",
            )

    def _is_listed(self, places: Sequence[Any]) -> bool:
        """Whether a list of kinds says how many layers there are."""
        return any(isinstance(v, list) for f in self.described.count_fields for p in places if (v := value_at(p, f)))


def value_at(place: Any, path: str) -> Any:
    """What stands under a name or a path; None where nothing does."""
    for key in path.split("."):
        place = place.get(key) if isinstance(place, Mapping) else None
    return place


def put_value(place: Config, path: str, value: Any) -> None:
    """Put a value under a name or a path; the parts on the way must be there."""
    *parts, last = path.split(".")
    for part in parts:
        place = place[part]
    place[last] = value
