"""Sets of safetensors files and their indexes: how both are named, and what an index says.

An index belongs to the files of one stem: ``model-00001-of-00004.safetensors`` and its fellows to
``model.safetensors.index.json``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from ckpttool.core.catalog import StoredTensor
from ckpttool.storage.listing import INDEX, Listing

NUMBERED = re.compile(r"(?P<stem>(?!rank-)[^/]+)-(?P<part>\d{5})-of-(?P<total>\d{5})\.safetensors\Z")
"""Names of shards: stem, part and total."""
LOADED = ("model", "diffusion_pytorch_model", "pytorch_lora_weights")
"""Stems that libraries look for: transformers, the models of diffusers, its LoRAs."""

Sets = dict[tuple[str, int], set[int]]
"""Parts of the numbered sets, by stem and total."""


def shard_name(stem: str, part: int, total: int) -> str:
    """Numbers start at 1."""
    return f"{stem}-{part:05d}-of-{total:05d}.safetensors"


def index_name(stem: str) -> str:
    """The index of a stem. ``model.fp16`` is a variant of ``model``, and its word stands elsewhere in the index's."""
    base, dot, variant = stem.rpartition(".")
    if base in (*LOADED, "adapter_model") and re.fullmatch(r"[A-Za-z]\w*", variant):
        return f"{base}.safetensors.index{dot}{variant}.json"
    return f"{stem}.safetensors.index.json"


def stem_of_index(name: str) -> str:
    """The stem whose index this is; "" for a file that is none."""
    m = INDEX.match(name)
    return ".".join(filter(None, (m["stem"], m["variant"]))) if m else ""


def set_of(name: str) -> tuple[str, int] | None:
    """(stem, total) of a shard; None for a file without a number."""
    m = NUMBERED.match(name)
    return (m["stem"], int(m["total"])) if m else None


def sets_of(names: Iterable[str]) -> Sets:
    """The numbered sets that these files are of."""
    sets: Sets = {}
    for n in names:
        if m := NUMBERED.match(n):
            sets.setdefault((m["stem"], int(m["total"])), set()).add(int(m["part"]))
    return sets


def gaps(total: int, parts: Collection[int]) -> list[int]:
    """Parts that a set lacks."""
    return [i for i in range(1, total + 1) if i not in parts]


def is_member(name: str, named: Collection[str]) -> bool:
    """Whether a file is part of what an index describes: named by it, or a shard of the same set."""
    own = set_of(name)
    return not named or name in named or (own is not None and own in map(set_of, named))


def misplaced(file: str) -> str:
    """Reason why an index's entry cannot be a file beside it; "" if it can."""
    if not file:
        return "which is not a name"
    if "/" in file or "\\" in file or file == "..":
        return "which is outside of the checkpoint"
    return "which is a directory" if file == "." else ""


def weight_map(data: Mapping[str, Any]) -> dict[str, str] | None:
    """The file of each tensor as an index says it; None where that is no map of names."""
    found = data.get("weight_map")
    return found if isinstance(found, dict) and all(isinstance(v, str) for v in found.values()) else None


def total_size(data: Mapping[str, Any]) -> int | float | None:
    """The bytes of all tensors as an index says them; None where it says none."""
    metadata = data.get("metadata")
    said = metadata.get("total_size") if isinstance(metadata, dict) else None
    return said if isinstance(said, int | float) else None


class Settled(NamedTuple):
    """The content of an index to write."""

    mapping: dict[str, str]
    total: int
    fields: dict[str, Any]
    """Fields besides the map and the total."""
    notes: list[str]


class IndexRules:
    """A format's rules for indexes; the defaults are Hugging Face's."""

    stems: Mapping[str, str] = MappingProxyType({})
    """Stems of the sets that have an index each -> what they hold. None: a checkpoint is one set, of any stem."""
    runs = False
    """A tensor may be in several files that hold runs of it, and a file without tensors need not be there."""
    indent = 2
    end = "\n"
    """Line end of a file that is written."""

    def of_rank(self, name: str) -> tuple[str, int]:
        """(stem, part) of a file that one rank wrote for itself, which no map names; ("", 0) for any other."""
        return "", 0

    def stands_for(self, data: Mapping[str, Any]) -> bool:
        """Whether map and total are those of tensors that the stored ones stand for."""
        return False

    def choose(
        self,
        stem: str,
        several: Mapping[str, Sequence[str]],
        mapped: Mapping[str, str],
        tensors: Mapping[str, Sequence[StoredTensor]],
    ) -> dict[str, str]:
        """The file that an index names for tensors that are in several; those that contradict each other are left out.

        ``tensors`` are those of each file, ``mapped`` is what the old index says.
        """
        return {}

    def settle(
        self,
        listing: Listing,
        stem: str,
        old: Mapping[str, Any] | None,
        settled: Settled,
        files: Iterable[str],
        tensors: Mapping[str, Sequence[StoredTensor]],
    ) -> Settled:
        """The index of a stem for these merged files.

        ``old`` is None where there is none that can be read; ``tensors`` are those of all files of the directory.
        """
        return settled

    def of_ranks(
        self, stem: str, old: Mapping[str, Any] | None, names: Collection[str], parts: int
    ) -> dict[str, Any] | None:
        """The index of files that ranks wrote; None where such files have none.

        ``names`` are those of their tensors, ``parts`` is how many files each rank has.
        """
        return None

    def lacks(self, stem: str, data: Mapping[str, Any]) -> str:
        """The entry that readers of an index need and it lacks; "" for none."""
        return ""
