"""The documents of ``convert-json``: what it is going to write, what it has written, and what its checks found."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ckpttool.answers.document import Document, Message, Paragraph, Section, Table
from ckpttool.answers.fields import pick, shape
from ckpttool.answers.findings import folded
from ckpttool.core.words import count, short
from ckpttool.errors import plain
from ckpttool.report import target

if TYPE_CHECKING:
    from ckpttool.answers.findings import CheckResult
    from ckpttool.core.files import Place
    from ckpttool.formats.paddle import Program
    from ckpttool.ops.convert_json.check import Repaired
    from ckpttool.ops.convert_json.convert import Converted, PreparedConversion


# -- programs


def program_lines(program: Program) -> list[str]:
    """A few lines for people: version, operators, what goes in and out."""
    most = [f"{n} {op}" for op, n in program.operators.most_common(_MOST)]
    more = len(program.operators) - len(most)
    kind = "PIR" if program.kind == "pir" else "ProgramDesc"
    version = f" version {program.version}" if program.version is not None else ""
    total = count(program.operators.total(), "operator")
    kinds = ", ".join(most) + (f" and {more} other kinds" if more else "")
    lines = [f"{kind}{version}, {total} in {count(program.blocks, 'block')}: {kinds}"]
    for word, ports in (("in", program.inputs), ("out", program.outputs)):
        if ports:
            shown = ", ".join(f"{plain(p.name)} {p.dtype} {list(p.shape)}" for p in ports[:_MOST])
            lines.append(f"  {word:4}{shown}{' ...' if len(ports) > _MOST else ''}")
    return lines


_MOST = 5


# -- conversion


def _conversion(conversion: PreparedConversion, dst: Place) -> dict[str, Any]:
    return {
        "schema": "ckpttool.convert/1",
        "source": str(conversion.source),
        "program": str(conversion.program.path),
        "path": str(dst),
        "direction": "to program" if conversion.back else "to safetensors",
        "tensors": len(conversion.catalog),
        "bytes": conversion.nbytes,
        "renamed": len(conversion.names),
        "files": [{"name": o.name, "bytes": o.size} for o in conversion.plan.outputs],
        "notes": conversion.notes,
    }


def plan_document(conversion: PreparedConversion, dst: Place) -> Document:
    """``--dry-run``: the files and the tensors with both of their names."""
    other = conversion.names if conversion.back else {n: p for p, n in conversion.names.items()}
    rows = []
    for t in conversion.catalog:
        pair = (t.key.name, other.get(t.key.name, t.key.name))
        name, parameter = reversed(pair) if conversion.back else pair
        rows.append((name, parameter, t.dtype, t.shape, t.nbytes))
    header = ("parameter", "dtype", "shape", "bytes")

    def json() -> dict[str, Any]:
        tensors = [dict(zip(("name", *header), row, strict=True)) for row in rows]
        return {**_conversion(conversion, dst), "list": tensors}

    def sections() -> Iterator[Section]:
        yield Message(_summary(conversion, dst))
        shown = [(plain(n), plain(p), dtype, shape(dims), size) for n, p, dtype, dims, size in rows]
        yield Table(("tensor", *header), shown, drop=("dtype", "bytes", "shape", "parameter"), quiet=True)

    return Document(json, sections, conversion.notes, len(rows))


def _summary(conversion: PreparedConversion, dst: Place) -> str:
    return f"{plain(str(dst))}: {_details(conversion)}"


def _details(conversion: PreparedConversion) -> str:
    renamed = f", {len(conversion.names):,} renamed" if conversion.names else ""
    files = count(len(conversion.plan.outputs), "file")
    return f"{count(len(conversion.catalog), 'tensor')}, {short(conversion.nbytes)} in {files}{renamed}"


def document(done: Converted) -> Document:
    """What was written and read again."""
    conversion, run = done.conversion, done.run
    notes = target.all_notes(conversion.notes, run.notes)

    def json() -> dict[str, Any]:
        wrote = {**pick(run, "bytes_written bytes_resumed=bytes_skipped"), "verified": run.committed}
        return {**_conversion(conversion, done.dst), **wrote, **target.run_json(run), "notes": notes}

    def sections() -> Iterator[Section]:
        proven = "every tensor was read again and is equal to the source"
        yield from target.written(done.dst, run, _details(conversion), proven)

    return Document(json, sections, notes, len(conversion.plan.outputs), of_files=True)


# -- checks


def check_document(result: CheckResult, repaired: Repaired | None = None) -> Document:
    """A line for each finding, and one that counts them."""

    def json() -> dict[str, Any]:
        return {
            "schema": "ckpttool.program-check/1",
            "path": str(result.path),
            **pick(result, "format? ok checked"),
            "repaired": None if repaired is None else {"path": str(repaired.path), "attributes": repaired.count},
            "findings": [pick(f, "id severity where text hint?") for f in result.findings],
            "notes": result.notes,
        }

    def sections() -> Iterator[Section]:
        if repaired is not None:
            yield Message(f"{plain(str(repaired.path))}: {count(repaired.count, 'attribute')} repaired")
        for f, also in folded(result.findings):
            where = f"{plain(f.where)}: " if f.where else ""
            hint = f" ({plain(f.hint)})" if f.hint else ""
            yield Paragraph(f"{f.severity} {f.id}: {where}{plain(f.text)}{also}{hint}", quiet=True)
        yield from [Message(f"note: {plain(note)}") for note in result.notes]
        checked = ", ".join(count(n, what) for what, n in result.checked.items())
        yield Paragraph(f"{plain(str(result.path))}: {result.counts}" + (f" in {checked}" if checked else ""))

    return Document(json, sections, entries=len(result.findings))
