"""``--metadata``: what the headers of the files say beside their tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckpttool.answers.document import Paragraph
from ckpttool.core.words import count
from ckpttool.errors import plain
from ckpttool.ops.inspect.views.base import InspectedSource, ListingAnswer, View, flag


class MetadataView(View["MetadataAnswer"]):
    """``__metadata__`` of each file; a pickle has none."""

    name = "metadata"
    whole = True
    metadata: bool = flag("--metadata", "Metadata in the files' headers.")

    def look(self, at: InspectedSource) -> MetadataAnswer:
        from ckpttool.containers.safetensors import read_header
        from ckpttool.ops.inspect.listing import is_safetensors, relative

        listing = at.tensors(stored_too=True)
        metadata = {
            relative(f.place, listing.stored.root): read_header(f.place).metadata if is_safetensors(f.place) else {}
            for f in listing.files
        }
        return MetadataAnswer(listing, metadata)


class MetadataAnswer(ListingAnswer):
    """By file, in reading order."""

    name = "metadata"
    metadata: Mapping[str, Mapping[str, str]]

    def json(self) -> dict[str, Any]:
        return {"config": self.listing.stored.config, "metadata": self.metadata}

    def sections(self) -> Iterator[Paragraph]:
        """Files with the same metadata together."""
        alike: dict[tuple[tuple[str, str], ...], list[str]] = {}
        for name, found in self.metadata.items():
            alike.setdefault(tuple(sorted(found.items())), []).append(name)
        for items, (first, *others) in alike.items():
            lines = [plain(first) + (f" and {count(len(others), 'other file')}" if others else "")]
            lines += [f"  {plain(key)}: {plain(said)}" for key, said in items] or ["  no metadata"]
            yield Paragraph("\n".join(lines), quiet=True)
