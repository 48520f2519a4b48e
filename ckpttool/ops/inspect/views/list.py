"""``--list``: one tensor a line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckpttool.answers.document import Table
from ckpttool.answers.fields import pick, shape
from ckpttool.errors import plain
from ckpttool.ops.inspect.views.base import InspectedSource, ListingAnswer, View, flag


class ListView(View["ListAnswer"]):
    """Every tensor with its dtype, shape, bytes and file."""

    name = "list"
    list_: bool = flag("--list", "One tensor a line.")

    def look(self, at: InspectedSource) -> ListAnswer:
        return ListAnswer(at.tensors(self.choice, stored_too=True))


class ListAnswer(ListingAnswer):
    """The chosen tensors."""

    name = "list"

    def _file_names(self) -> list[str]:
        """Below SRC; in the order of the listing's files."""
        from ckpttool.ops.inspect.listing import relative

        return [relative(f.place, self.listing.stored.root) for f in self.listing.files]

    def entries(self) -> int:
        return len(self.listing.rows)

    def json(self) -> dict[str, Any]:
        names = self._file_names()
        found = [
            {
                **pick(r, "name dtype shape bytes=nbytes"),
                "file": names[r.file] if r.file >= 0 else None,
                "offset": r.offset if r.file >= 0 else None,
                **pick(r, "pieces component parameter state? derived"),
            }
            for r in self.listing.rows
        ]
        return {"list": found}

    def sections(self) -> Iterator[Table]:
        names = [*map(plain, self._file_names()), "-"]  # an empty tensor is in file -1
        shapes = {dims: shape(dims) for dims in {r.shape for r in self.listing.rows}}
        rows = [
            (plain(name), dtype, shapes[dims], size, pieces, names[file], offset if file >= 0 else "-")
            for name, dtype, dims, size, file, offset, pieces, *_ in self.listing.rows
        ]
        header = ("name", "dtype", "shape", "bytes", "pieces", "file", "offset")
        yield Table(header, rows, quiet=True, drop=("offset", "pieces", "file"))
