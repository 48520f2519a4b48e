"""``--metadata``: what the headers of the files say beside their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpttool.ops.inspect.views.base import ListingAnswer, Subject, View, flag


@dataclass(frozen=True, kw_only=True)
class MetadataView(View):
    """``__metadata__`` of each file; a pickle has none."""

    name = "metadata"
    whole = True
    metadata: bool = flag("--metadata", "Metadata in the files' headers.")

    def look(self, at: Subject) -> MetadataAnswer:
        from ckpttool.containers.safetensors import read_header
        from ckpttool.ops.inspect.listing import is_safetensors, relative

        listing = at.tensors(stored_too=True)
        metadata = {
            relative(f.place, listing.stored.root): read_header(f.place).metadata if is_safetensors(f.place) else {}
            for f in listing.files
        }
        return MetadataAnswer(listing, metadata)


@dataclass(frozen=True)
class MetadataAnswer(ListingAnswer):
    """By file, in reading order."""

    name = "metadata"
    metadata: Mapping[str, Mapping[str, str]]

    def json(self) -> tuple[dict[str, Any], int]:
        return {**self.head(), "config": self.listing.stored.config, "metadata": self.metadata}, 0
