"""``--files``: one file a line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpttool.answers.document import Document, Table
from ckpttool.answers.fields import pick
from ckpttool.core.words import ranges
from ckpttool.errors import plain
from ckpttool.ops.inspect.views.base import InspectedSource, ListingAnswer, View, flag

if TYPE_CHECKING:
    from ckpttool.ops.inspect.listing import FileRow


@dataclass(frozen=True, kw_only=True)
class FilesView(View):
    """The data files, with their bytes, tensors and ranks."""

    name = "files"
    whole = True
    files: bool = flag("--files", "One file a line.")

    def look(self, at: InspectedSource) -> FilesAnswer:
        from ckpttool.ops.inspect.listing import file_rows

        listing = at.tensors(stored_too=True)
        return FilesAnswer(listing, file_rows(listing))


@dataclass(frozen=True)
class FilesAnswer(ListingAnswer):
    """The data files, in reading order."""

    name = "files"
    rows: Sequence[FileRow]

    def document(self) -> Document:
        names = "name bytes=nbytes tensors tensor_bytes=data ranks"
        return self.shown(
            lambda: {"list": [pick(f, names) for f in self.rows]}, lambda: [self._table()], len(self.rows)
        )

    def _table(self) -> Table:
        rows = [(plain(f.name), f.nbytes, f.tensors, f.data, ranges(f.ranks, "-")) for f in self.rows]
        header = ("file", "bytes", "tensors", "tensor bytes", "rank")
        return Table(header, rows, quiet=True, drop=("tensor bytes", "rank"))
