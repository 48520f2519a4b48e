"""Directories of several models: pipelines of diffusers, and the modules of sentence-transformers.

diffusers: ``model_index.json`` names a directory for each component (``transformer/``, ``vae/``, ``text_encoder/``,
``scheduler/``, ...), and those with weights are checkpoints of their own, each with its config.json. Source: diffusers
0.42, ``pipelines/pipeline_utils.py``. sentence-transformers: ``modules.json`` names the modules in their order; the
first one may lie in the directory itself (``path`` is ""), others in ``2_Dense/``. Source: sentence-transformers 6.2,
``SentenceTransformer._load_sbert_model``.

A part is a component with weights. The parts are read together here, each tensor behind the name of its part
(``transformer.proj_out.weight``); what is written is planned part by part (``targeting/parts.py``).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckpttool.core.catalog import StoredTensor
from ckpttool.core.files import Place
from ckpttool.core.mesh import Mesh
from ckpttool.errors import ConflictError, CorruptError, IncompleteError, UsageError
from ckpttool.formats import base
from ckpttool.storage.json_file import load_json
from ckpttool.storage.listing import WEIGHTS, Listing, is_index, linked_away
from ckpttool.storage.place import is_link

ROOT = "."
"""The name of a part that lies in the directory itself."""
_TRAINING = ("training_args.bin", "optimizer.pt", "optimizer.bin", "scheduler.pt", "scheduler.bin")
"""A trainer's, and no part by themselves."""

_VARIANT = re.compile(r"\.[A-Za-z]\w*(-\d{5}-of-\d{5})?\.safetensors\Z")
"""Ends of the names of a variant: ``model.fp16.safetensors``."""

ReadPart = Callable[[Listing], base.StoredCheckpoint]


@dataclass(frozen=True, slots=True)
class PipelinePart:
    """A component with weights."""

    name: str
    """Its directory; ``ROOT`` for the one around the others."""
    place: Place
    is_model: bool
    """Whether its config.json says what model it is: that of a dense layer of sentence-transformers does not."""
    format: str = ""

    @property
    def prefix(self) -> str:
        """Prefix of its tensors' names."""
        return "" if self.name == ROOT else f"{self.name}."

    @property
    def folder(self) -> str:
        """Prefix of its files' names."""
        return "" if self.name == ROOT else f"{self.name}/"


@dataclass(frozen=True, slots=True)
class PipelineParts:
    """All parts of a directory; ``StoredCheckpoint.native``."""

    all: tuple[PipelinePart, ...]
    chosen: tuple[PipelinePart, ...]
    """Parts that are read."""
    named: bool
    """Whether they were asked for by name (``ReadOptions.parts``)."""
    label: str = ""
    """Class name in its software: ``FluxPipeline``."""
    usage: str = ""
    """The line of Python that loads the directory, as in ``FileLayout``."""

    def options(self, part: PipelinePart) -> base.OpenOptions:
        """Options that open one part by itself."""
        beside = tuple([p.name for p in self.all if p.name not in (ROOT, part.name)]) if part.name == ROOT else ()
        return base.OpenOptions(part.format, base.ReadOptions(part=part.name, beside=beside))


class MultiPart(ABC):
    """A directory of several models."""

    name: str
    capabilities: base.Capabilities

    def __init__(self, read_part: ReadPart) -> None:
        self._read = read_part

    @abstractmethod
    def components(self, listing: Listing) -> list[str]:
        """Directories that the index names, ``ROOT`` among them; [] when this is no such directory."""

    @abstractmethod
    def label(self, listing: Listing) -> str:
        """The class name of a directory in its software."""

    def detect(self, listing: Listing) -> int:
        if listing.single:
            return 0
        names = [n for n in self.components(listing) if _has_weights(listing, n)]
        return 2 if names and names != [ROOT] else 0

    def read(self, listing: Listing, options: base.ReadOptions) -> base.StoredCheckpoint:
        """Raises UsageError (no part of that name, flags that are for one model), IncompleteError (a part without
        its weights), ConflictError (a part is cut over ranks), and what reading a part raises."""
        if wrong := options.from_flags():
            raise UsageError(
                f"--{next(iter(wrong))} is for one model, and this is a directory of several",
                where=str(listing.root),
                hint=f"give one part as SRC: {listing.root / self._parts(listing)[0].name}",
            )
        found = self._parts(listing)
        chosen = _chosen(found, options.parts, listing)
        stored = base.StoredCheckpoint(self.name, listing.root, [], [], Mesh())
        chosen = tuple([replace(part, format=self._add(stored, part, listing)) for part in chosen])
        read = {part.name: part for part in chosen}
        every = tuple([read.get(p.name, p) for p in found])
        only = any(_is_variant(_of(listing, p.name)) for p in found)
        usage = "" if only else self._usage  # a loader wants the word of a variant
        stored.native = PipelineParts(every, chosen, bool(options.parts), self.label(listing), usage)
        own = {part.name for part in found}
        for name in self.components(listing):
            if name not in (*own, ROOT) and name not in listing.folders():
                stored.notes.append(f"{name}/ is not here, which {self._index} names")
        if ROOT not in own:
            stored.companions, notes = base.companions(listing, [])
            stored.notes += notes
            stored.notes += [
                f"{n} is not copied: it belongs to no part" for n in listing.names if n.endswith(WEIGHTS) or is_index(n)
            ]
        return stored

    _index: str
    _usage: str

    def _parts(self, listing: Listing) -> tuple[PipelinePart, ...]:
        """Raises ConflictError for one that is a link out of the directory: its small files would be carried."""
        names = [n for n in self.components(listing) if _has_weights(listing, n)]
        for n in names:
            if n != ROOT and is_link(listing.root / n) and (away := linked_away(listing.root, n)):
                raise ConflictError(
                    f"{n} is a link to a directory outside of the checkpoint",
                    where=[str(listing.root / n), away],
                    hint="put a copy of the directory in its place, or give it alone as SRC",
                )
        places = {n: listing.root if n == ROOT else listing.root / n for n in names}
        return tuple(PipelinePart(n, place, _is_model(_of(listing, n))) for n, place in places.items())

    def _add(self, stored: base.StoredCheckpoint, part: PipelinePart, listing: Listing) -> str:
        """Read one; its format."""
        one = self._read(_of(listing, part.name))
        if one.mesh.world > 1 or one.recorded is not None or one.shards:
            raise ConflictError(
                f"the part {part.name} is a {one.format} checkpoint of {one.mesh}, and parts are read whole",
                where=str(part.place),
                hint="give this part alone as SRC",
            )
        first = len(stored.files)
        stored.files += one.files
        stored.tensors += [_renamed(t, part.prefix, first) for t in one.tensors]
        stored.notes += [f"{part.name}: {n}" for n in one.notes]
        return one.format


class Diffusers(MultiPart):
    """A pipeline."""

    name = "diffusers"
    capabilities = base.Capabilities(instead="--to hf writes a pipeline as it was read")
    _index = "model_index.json"
    _usage = "diffusers.DiffusionPipeline.from_pretrained({text})"

    def components(self, listing: Listing) -> list[str]:
        if self._index not in listing.names:
            return []
        try:
            said = listing.json(self._index)
        except CorruptError:
            return []
        there = said.items() if "_class_name" in said else ()
        return [n for n, v in there if isinstance(v, list) and len(v) == 2 and v[1] is not None and _is_name(n)]

    def label(self, listing: Listing) -> str:
        return str(listing.json(self._index)["_class_name"])

    def _parts(self, listing: Listing) -> tuple[PipelinePart, ...]:
        lacking = [
            n
            for n in self.components(listing)
            if n in listing.folders() and _is_model(listing.inside(n)) and not _has_weights(listing, n)
        ]
        if lacking:
            raise IncompleteError(
                f"the part {lacking[0]} has a config.json and no weights",
                where=str(listing.root / lacking[0]),
                hint="fetch the missing files, or give one part as SRC",
            )
        return super()._parts(listing)


class SentenceTransformers(MultiPart):
    """Modules, one behind the other."""

    name = "sentence-transformers"
    capabilities = base.Capabilities(instead="--to hf writes such a directory as it was read")
    _index = "modules.json"
    _usage = "sentence_transformers.SentenceTransformer({text})"

    def components(self, listing: Listing) -> list[str]:
        if self._index not in listing.names:
            return []
        try:
            modules = load_json(listing.path(self._index))
            routed = listing.json("router_config.json").get("types")
        except (OSError, ValueError, CorruptError):
            return []
        paths = [m.get("path") for m in modules if isinstance(m, dict)] if isinstance(modules, list) else []
        paths += list(routed) if isinstance(routed, dict) else []
        names = [p.strip("/") or ROOT for p in paths if isinstance(p, str)]
        return list(dict.fromkeys(n for n in names if n == ROOT or _is_name(n)))

    def label(self, listing: Listing) -> str:
        return "SentenceTransformer"


def _is_name(name: str) -> bool:
    """Whether this is the name of a directory right below."""
    return name not in ("", ".", "..") and not name.startswith("_") and not {"/", "\\", "\0"} & set(name)


def _of(listing: Listing, name: str) -> Listing:
    return listing if name == ROOT else listing.inside(name)


def _has_weights(listing: Listing, name: str) -> bool:
    if name != ROOT and name not in listing.folders():
        return False
    names = _of(listing, name).names
    return any((n.endswith(WEIGHTS) and n not in _TRAINING) or is_index(n) for n in names)


def _is_variant(listing: Listing) -> bool:
    """Whether all weights have the word of a variant in their names."""
    return all(_VARIANT.search(n) for n in listing.names if n.endswith(WEIGHTS))


def _is_model(listing: Listing) -> bool:
    try:
        config = listing.json("config.json")
    except CorruptError:
        return False
    return any(config.get(field) for field in ("model_type", "architectures", "_class_name"))


def _chosen(found: Sequence[PipelinePart], asked: Sequence[str], listing: Listing) -> tuple[PipelinePart, ...]:
    names = [p.name for p in found]
    if wrong := [n for n in asked if n.rstrip("/") not in names]:
        raise UsageError(
            f"--part {wrong[0]}: there is no part of that name",
            where=str(listing.root),
            hint="parts with weights: " + ", ".join(names),
        )
    wanted = {n.rstrip("/") for n in asked} or set(names)
    return tuple(p for p in found if p.name in wanted)


def _renamed(t: StoredTensor, prefix: str, first: int) -> StoredTensor:
    return t._replace(name=prefix + t.name, file=t.file + first)


def parts_of(stored: Any) -> PipelineParts | None:
    """The parts of a checkpoint that has been read; None for one of a single model."""
    return stored.native if isinstance(stored.native, PipelineParts) else None
