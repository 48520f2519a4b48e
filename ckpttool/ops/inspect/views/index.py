"""``--write-index``: the index files of a directory of shards, written from the shards' headers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ckpttool.answers.document import Paragraph, Section
from ckpttool.answers.fields import pick
from ckpttool.core.words import count, short
from ckpttool.errors import plain
from ckpttool.ops.inspect.views.base import InspectedSource, PrintedAnswer, View, flag
from ckpttool.ops.inspect.views.header import refuse_source_options

if TYPE_CHECKING:
    from ckpttool.ops.inspect.index import IndexResult


class IndexView(View["IndexAnswer"]):
    """Write the indexes that are missing or wrong."""

    name = "write-index"
    whole = True
    writes = True
    write_index: bool = flag("--write-index", "Write or repair the index of the shards in SRC.")
    dry_run: bool = False

    def look(self, at: InspectedSource) -> IndexAnswer:
        from ckpttool.ops.inspect.index import rebuild
        from ckpttool.storage.place import parse_place

        refuse_source_options(at, self.label)
        return IndexAnswer(rebuild(parse_place(at.src), dry_run=self.dry_run))


class IndexAnswer(PrintedAnswer):
    """A line for each index."""

    name = "write-index"
    result: IndexResult

    @property
    def notes(self) -> Sequence[str]:
        return [*self.result.notes, *(f"{i.name}: {n}" for i in self.result.indexes for n in i.notes)]

    def entries(self) -> int:
        return len(self.result.indexes)

    def json(self) -> dict[str, Any]:
        indexes = [pick(i, "name state shards tensors total_size changes notes") for i in self.result.indexes]
        said = {"path": str(self.result.path), **pick(self.result, "dry_run written")}
        return {**said, "indexes": indexes, "notes": self.result.notes}

    def sections(self) -> Iterator[Section]:
        for i in self.result.indexes:
            state = f"would be {i.state}" if self.result.dry_run and i.state == "written" else i.state
            total = f", {short(i.total_size)}" if i.total_size is not None else ""
            what = f"{count(i.tensors, 'tensor')} in {count(len(i.shards), 'shard')}{total}"
            yield Paragraph("\n".join([f"{plain(i.name)}: {state}; {what}", *(f"  {plain(c)}" for c in i.changes)]))
