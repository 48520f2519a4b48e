"""``--header`` and ``--set-header``: the header of a safetensors file as JSON, and an edited one in its place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpttool.answers.document import Paragraph, Section
from ckpttool.answers.fields import pick
from ckpttool.core.words import count, short
from ckpttool.errors import UsageError, plain
from ckpttool.ops.inspect.views.base import InspectedSource, PrintedAnswer, View, ViewAnswer, flag, value

if TYPE_CHECKING:
    from ckpttool.ops.inspect.header import HeaderResult


class HeaderView(View["HeaderText"]):
    """One line for each tensor and each entry of the metadata."""

    name = "header"
    whole = True
    header: bool = flag("--header", "Print the header of a safetensors file as JSON.")

    def look(self, at: InspectedSource) -> HeaderText:
        from ckpttool.ops.inspect.header import dump
        from ckpttool.storage.place import parse_place

        refuse_source_options(at, self.label)
        src = parse_place(at.src)
        return HeaderText(str(src), dump(src))


class HeaderText(PrintedAnswer):
    """The header as text: one that is broken may have a name twice."""

    name = "header"
    path: str
    text: str

    def json(self) -> dict[str, Any]:
        return {"path": self.path, "text": self.text}

    def sections(self) -> list[Section]:
        return [Paragraph(self.text.removesuffix("\n"), wrap=False, quiet=True)]


class SetHeaderView(View["HeaderEdit"]):
    """Replace the header of SRC, or write a copy with another one."""

    name = "set-header"
    whole = True
    writes = True
    set_header: Path | None = value("--set-header", "FILE", "Replace the header of SRC by this JSON or backup.", Path)
    copy: Path | None = value("-o --output", "FILE", "With --set-header: write a copy, and leave SRC.", Path)
    dry_run: bool = flag("-n --dry-run", "With --set-header or --write-index: only say what would change.")
    write_index: bool = False

    def refuse(self, asked: Sequence[View[ViewAnswer]]) -> None:
        if self.copy is not None and self.set_header is None:
            raise UsageError("--output belongs to --set-header", hint="add --set-header FILE.json")
        if self.dry_run and self.set_header is None and not self.write_index:
            raise UsageError("--dry-run has no effect: inspect only reads", hint="drop it")

    def look(self, at: InspectedSource) -> HeaderEdit:
        from ckpttool.ops.inspect.header import apply
        from ckpttool.storage.place import local_path, parse_place

        refuse_source_options(at, self.label)
        assert self.set_header is not None  # noqa: S101 - that is what the view was chosen by
        edited, out = (None if p is None else local_path(parse_place(p)) for p in (self.set_header, self.copy))
        assert edited is not None  # noqa: S101
        return HeaderEdit(apply(edited, local_path(parse_place(at.src)), out=out, dry_run=self.dry_run))


class HeaderEdit(PrintedAnswer):
    """What an edited header changed, and how it came into the file."""

    name = "set-header"
    result: HeaderResult

    @property
    def notes(self) -> Sequence[str]:
        return self.result.notes

    def entries(self) -> int:
        return len(self.result.renamed) + len(self.result.changed)

    def json(self) -> dict[str, Any]:
        result = self.result
        return {
            "file": str(result.file),
            "path": str(result.out),
            **pick(result, "how dry_run tensors header_bytes bytes_written renamed"),
            "changed": [c._asdict() for c in result.changed],
            **pick(result, "added removed"),
            "metadata": [c._asdict() for c in result.metadata],
            "notes": result.notes,
        }

    def sections(self) -> Iterator[Section]:
        result = self.result
        how = _HOW[result.how]
        if result.dry_run and result.how != "unchanged":
            how = f"would be {how}"
        size = f", {short(result.bytes_written)} written" if result.bytes_written and not result.dry_run else ""
        yield Paragraph(f"{plain(str(result.out))}: {how}, {count(result.tensors, 'tensor')}{size}")
        lines = [f"{plain(a)} -> {plain(b)}" for a, b in result.renamed]
        lines += [f"{plain(c.name)}: {c.what} {c.before} -> {c.after}" for c in result.changed]
        lines += [f"+ {plain(n)}" for n in result.added] + [f"- {plain(n)}" for n in result.removed]
        lines += [f"metadata {plain(c.key)}: {_value(c.before)} -> {_value(c.after)}" for c in result.metadata]
        yield from [Paragraph(f"  {line}") for line in lines[:_LINES]]
        if len(lines) > _LINES:
            yield Paragraph(f"  and {len(lines) - _LINES} more changes (--json lists all)")


_LINES = 20
_HOW = {"unchanged": "unchanged", "in place": "changed in place", "copied": "rewritten", "restored": "restored"}


def _value(value: str | None) -> str:
    return "none" if value is None else repr(plain(value))


def refuse_source_options(at: InspectedSource, label: str) -> None:
    """Raises UsageError for options that say how a checkpoint is read, where only headers are."""
    from ckpttool.formats.base import OpenOptions

    if at.options != OpenOptions():
        raise UsageError(f"{label} reads headers alone: options of the source have no effect", hint="drop them")
