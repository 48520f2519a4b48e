"""The mesh: how many ranks along each parallel dimension, and which coordinates a rank has. Pure.

One stage of the pipeline has ``width`` ranks, and two grids lie over the same ranks: ``tp`` cuts the dense layers,
``ep x etp`` holds the experts (``ep`` by whole experts, ``etp`` cuts inside one). Neither has to be as large as the
other: the smaller grid repeats (its tensors are replicas), which is the fold of ep over dp x tp that Megatron,
DeepSpeed and vLLM use::

    width = lcm(tp, ep * etp)            rank = stage * width + i
    tp coordinate = i % tp               etp = i % etp, ep = i // etp % ep     (experts="etp-ep", Megatron)
                                         ep = i % ep, etp = i // ep % etp      (experts="ep-etp", TensorRT-LLM)

DeepSeek's inference ranks are tp = ep = n, etp = 1; Megatron's tp 2, ep 4, etp 2 has 8 ranks a stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Any, NamedTuple

from ckpttool.core.words import count
from ckpttool.errors import LayoutError, UsageError


class Coords(NamedTuple):
    """The coordinates of one rank."""

    rank: int
    pp: int
    tp: int
    ep: int
    etp: int


MAX_WORLD = 1 << 20
"""Ranks; sizes also come from the names and headers of files, and there are tables of all ranks."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Sizes of the parallel dimensions."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    layout: tuple[int, ...] = ()
    """Layers of each pipeline chunk, first to last; chunk c runs on stage c % pp (more chunks than stages are virtual
    stages). Empty: the layers divided evenly."""
    experts: str = "etp-ep"
    """The expert coordinate that changes fastest over the ranks of a stage."""

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "ep", "etp"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name} is {getattr(self, name)}", hint="parallel sizes start at 1")
        if self.world > MAX_WORLD:
            raise UsageError(
                f"{self.world:,} ranks are more than any machine has",
                hint=f"tp, pp, ep and etp make {MAX_WORLD:,} at most",
            )
        if self.layout and len(self.layout) % self.pp:
            raise UsageError(
                f"the pipeline layout has {len(self.layout)} chunks, which is not a multiple of pp {self.pp}",
                hint=f"give {self.pp} numbers, one per stage (or a multiple, for virtual stages)",
            )
        if any(n < 0 for n in self.layout):
            raise UsageError("a pipeline layout cannot have a negative number of layers")

    @property
    def width(self) -> int:
        """Ranks in one pipeline stage."""
        return lcm(self.tp, self.ep * self.etp)

    @property
    def world(self) -> int:
        return self.width * self.pp

    def coords(self, rank: int) -> Coords:
        stage, i = divmod(rank, self.width)
        if self.experts == "etp-ep":
            etp, ep = i % self.etp, i // self.etp % self.ep
        else:
            ep, etp = i % self.ep, i // self.ep % self.etp
        return Coords(rank, stage, i % self.tp, ep, etp)

    def all_coords(self) -> Iterator[Coords]:
        return (self.coords(r) for r in range(self.world))

    def rank_of(self, **coords: int) -> int:
        """The first rank that has these coordinates (``tp=1, pp=0, ...``; what is left out is 0)."""
        for c in self.all_coords():
            if all(getattr(c, k) == v for k, v in coords.items()):
                return c.rank
        raise UsageError(f"no rank has the coordinates {coords} in {self}")

    def stage_layers(self, layers: int) -> list[list[int]]:
        """Global layer numbers of each stage.

        Raises LayoutError when the layers do not divide and no layout says how.
        """
        counts = self.layout
        if not counts and self.pp > layers > 0:
            raise LayoutError(
                f"{count(layers, 'layer')} cannot fill {self.pp} pipeline stages",
                hint=f"use at most {count(layers, 'stage')}: --pp-out {layers}",
            )
        if not counts:
            if layers % self.pp:
                even, more = divmod(layers, self.pp)
                fair = ",".join(str(even + (s < more)) for s in range(self.pp))
                raise LayoutError(
                    f"{layers} layers cannot be divided evenly over {self.pp} pipeline stages",
                    hint=f"set the layers of each stage: --pp-layout {fair}",
                )
            counts = (layers // self.pp,) * self.pp
        elif sum(counts) != layers:
            raise LayoutError(
                f"the pipeline layout {','.join(map(str, counts))} places {sum(counts)} layers, the model has {layers}",
                hint="the numbers must add up to the model's layers",
            )
        stages: list[list[int]] = [[] for _ in range(self.pp)]
        at = 0
        for chunk, n in enumerate(counts):
            stages[chunk % self.pp] += range(at, at + n)
            at += n
        return stages

    def to_json(self) -> dict[str, Any]:
        out: dict[str, Any] = {"tp": self.tp, "pp": self.pp, "ep": self.ep, "etp": self.etp, "experts": self.experts}
        if self.layout:
            out["layout"] = list(self.layout)
        return out

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Mesh:
        """The inverse of ``to_json``. Raises TypeError for anything else than whole numbers, UsageError as ever."""
        mesh = cls(**{**data, "layout": tuple(data.get("layout", ()))})
        if not all(type(n) is int for n in (mesh.tp, mesh.pp, mesh.ep, mesh.etp, *mesh.layout)):
            raise TypeError("the sizes of a mesh are whole numbers")
        return mesh

    def with_layout(self, layout: Sequence[int]) -> Mesh:
        return replace(self, layout=tuple(layout))

    def __str__(self) -> str:
        parts = [f"tp {self.tp}"]
        if self.pp > 1:
            parts.append(f"pp {self.pp}")
        if self.ep > 1 or self.etp != self.tp:
            parts.append(f"ep {self.ep}, etp {self.etp}")
        if self.layout:
            parts.append("layers " + ",".join(map(str, self.layout)))
        return ", ".join(parts)


def default_etp(source: Mesh, tp: int, ep: int, *, ep_asked: bool) -> int:
    """How many ranks cut one expert when nobody asks for a number.

    With ``ep_asked`` experts are whole, so that tp 8 with ep 8 is 8 ranks. Else ``ep`` is that of ``source``, whose
    experts stay as they are, but are cut no further than fewer tp ranks do; without expert parallelism they are cut
    like the dense layers, unless those of ``source`` are not.
    """
    if ep > 1:
        return 1 if ep_asked else min(source.etp, tp) if tp < source.tp else source.etp
    return tp if ep_asked or source.etp == source.tp or source.ep > 1 else source.etp


def share(total: int, ways: int, index: int) -> tuple[int, int]:
    """[start, stop) of part ``index`` when ``total`` items go to ``ways`` owners; the first owners take the rest."""
    each, more = divmod(total, ways)
    start = index * each + min(index, more)
    return start, start + each + (index < more)
