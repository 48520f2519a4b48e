"""``--files``: one file a line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpttool.answers.fields import pick
from ckpttool.core.words import ranges
from ckpttool.errors import plain
from ckpttool.ops.inspect.views.base import ListingAnswer, Subject, TextTable, View, flag

if TYPE_CHECKING:
    from ckpttool.ops.inspect.listing import FileRow


@dataclass(frozen=True, kw_only=True)
class FilesView(View):
    """The data files, with their bytes, tensors and ranks."""

    name = "files"
    whole = True
    files: bool = flag("--files", "One file a line.")

    def look(self, at: Subject) -> FilesAnswer:
        from ckpttool.ops.inspect.listing import file_rows

        listing = at.tensors(stored_too=True)
        return FilesAnswer(listing, file_rows(listing))


@dataclass(frozen=True)
class FilesAnswer(ListingAnswer):
    """The data files, in reading order."""

    name = "files"
    rows: Sequence[FileRow]

    def json(self) -> tuple[dict[str, Any], int]:
        rows = [pick(f, "name bytes=nbytes tensors tensor_bytes=data ranks") for f in self.rows]
        return {**self.head(), "list": rows}, len(rows)

    def table(self) -> TextTable:
        rows = [(plain(f.name), f.nbytes, f.tensors, f.data, ranges(f.ranks, "-")) for f in self.rows]
        return TextTable(("file", "bytes", "tensors", "tensor bytes", "rank"), rows, drop=("tensor bytes", "rank"))
