"""``--metadata``: what the headers of the files say beside their tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ckpttool.answers.document import Document, Paragraph
from ckpttool.core.words import count
from ckpttool.errors import plain
from ckpttool.ops.inspect.views.base import InspectedSource, ListingAnswer, View, flag


@dataclass(frozen=True, kw_only=True)
class MetadataView(View):
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


@dataclass(frozen=True)
class MetadataAnswer(ListingAnswer):
    """By file, in reading order."""

    name = "metadata"
    metadata: Mapping[str, Mapping[str, str]]

    def document(self) -> Document:
        json = {"config": self.listing.stored.config, "metadata": self.metadata}
        return self.shown(lambda: json, lambda: map(_paragraph, self._alike()), 0)

    def _alike(self) -> Iterable[tuple[list[str], list[tuple[str, str]]]]:
        """Names of files, and the metadata that all of them have."""
        groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
        for name, found in self.metadata.items():
            groups.setdefault(tuple(sorted(found.items())), []).append(name)
        return [(names, list(items)) for items, names in groups.items()]


def _paragraph(alike: tuple[list[str], list[tuple[str, str]]]) -> Paragraph:
    (first, *others), items = alike
    lines = [plain(first) + (f" and {count(len(others), 'other file')}" if others else "")]
    lines += [f"  {plain(key)}: {plain(said)}" for key, said in items] or ["  no metadata"]
    return Paragraph("\n".join(lines), quiet=True)
