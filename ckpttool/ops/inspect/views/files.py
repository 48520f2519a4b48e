"""``--files``: one file a line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ckpttool.answers.document import Table
from ckpttool.answers.fields import pick
from ckpttool.core.words import ranges
from ckpttool.errors import plain
from ckpttool.ops.inspect.views.base import InspectedSource, ListingAnswer, View, flag

if TYPE_CHECKING:
    from ckpttool.ops.inspect.listing import FileRow


class FilesView(View["FilesAnswer"]):
    """The data files, with their bytes, tensors and ranks."""

    name = "files"
    whole = True
    files: bool = flag("--files", "One file a line.")

    def look(self, at: InspectedSource) -> FilesAnswer:
        from ckpttool.ops.inspect.listing import file_rows

        listing = at.tensors(stored_too=True)
        return FilesAnswer(listing, file_rows(listing))


class FilesAnswer(ListingAnswer):
    """The data files, in reading order."""

    name = "files"
    rows: Sequence[FileRow]

    def entries(self) -> int:
        return len(self.rows)

    def json(self) -> dict[str, Any]:
        return {"list": [pick(f, "name bytes=nbytes tensors tensor_bytes=data ranks") for f in self.rows]}

    def sections(self) -> Iterator[Table]:
        rows = [(plain(f.name), f.nbytes, f.tensors, f.data, ranges(f.ranks, "-")) for f in self.rows]
        header = ("file", "bytes", "tensors", "tensor bytes", "rank")
        yield Table(header, rows, quiet=True, drop=("tensor bytes", "rank"))
