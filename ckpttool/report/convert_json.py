"""What ``convert-json`` converted, checked and wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpttool.core.files import Place
from ckpttool.core.words import count, short
from ckpttool.errors import plain
from ckpttool.report import text
from ckpttool.report.tables import table, wrapped
from ckpttool.report.text import dump, message, pick

if TYPE_CHECKING:
    from ckpttool.answers.findings import CheckResult
    from ckpttool.core.files import Place
    from ckpttool.formats.paddle import Program
    from ckpttool.ops.convert_json.check import Repaired
    from ckpttool.ops.convert_json.convert import Conversion, Converted
    from ckpttool.ops.convert_json.header import HeaderResult
    from ckpttool.ops.convert_json.index import IndexResult

SCHEMA = "ckpttool.convert/1"
CHECK_SCHEMA = "ckpttool.program-check/1"
INDEX_SCHEMA = "ckpttool.index/1"
HEADER_SCHEMA = "ckpttool.header/1"


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


def _conversion(conversion: Conversion, dst: Place) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
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


def show_conversion_plan(conversion: Conversion, dst: Place, *, as_json: bool, quiet: bool = False) -> None:
    """``--dry-run``: the files and the tensors with both of their names."""
    other = conversion.names if conversion.back else {n: p for p, n in conversion.names.items()}
    rows = []
    for t in conversion.catalog:
        pair = (t.key.name, other.get(t.key.name, t.key.name))
        name, parameter = reversed(pair) if conversion.back else pair
        rows.append((name, parameter, t.dtype, t.shape, t.nbytes))
    if as_json:
        tensors = [dict(zip(("name", "parameter", "dtype", "shape", "bytes"), row, strict=True)) for row in rows]
        dump({**_conversion(conversion, dst), "list": tensors}, entries=len(tensors))
        return
    if not quiet:
        text.notes(conversion.notes)
        message(_summary(conversion, dst))
    table(
        ("tensor", "parameter", "dtype", "shape", "bytes"),
        [(plain(n), plain(p), dtype, text.shape(dims), size_) for n, p, dtype, dims, size_ in rows],
        drop=("dtype", "bytes", "shape", "parameter"),
    )


def _summary(conversion: Conversion, dst: Place) -> str:
    files = conversion.plan.outputs
    renamed = f", {len(conversion.names):,} renamed" if conversion.names else ""
    return (
        f"{plain(str(dst))}: {count(len(conversion.catalog), 'tensor')}, {short(conversion.nbytes)}"
        f" in {count(len(files), 'file')}{renamed}"
    )


@text.of_a_result()
def show_conversion(done: Converted, *, as_json: bool, quiet: bool) -> None:
    """What was written and read again."""
    conversion, run = done.conversion, done.run
    notes = list(dict.fromkeys([*conversion.notes, *run.notes]))
    if as_json:
        more = {**pick(run, "bytes_written bytes_resumed=bytes_skipped"), "verified": run.committed, **text.done(run)}
        dump({**_conversion(conversion, done.dst), **more, "notes": notes}, entries=len(conversion.plan.outputs))
        return
    if quiet:
        return
    text.notes(notes)
    if text.show_waiting(str(done.dst), run):
        return
    text.write(wrapped(f"{_summary(conversion, done.dst)}{text.times(run)}\n"))
    text.write("verified: every tensor was read again and is equal to the source\n")


# -- checks


def show_program_check(result: CheckResult, repaired: Repaired | None, *, as_json: bool, quiet: bool) -> None:
    """A line for each finding, and one that counts them."""
    if as_json:
        dump(
            {
                "schema": CHECK_SCHEMA,
                "path": str(result.path),
                **pick(result, "format? ok checked"),
                "repaired": None if repaired is None else {"path": str(repaired.path), "attributes": repaired.count},
                "findings": [pick(f, "id severity where text hint?") for f in result.findings],
                "notes": result.notes,
            },
            entries=len(result.findings),
        )
        return
    if repaired is not None and not quiet:
        message(f"{plain(str(repaired.path))}: {count(repaired.count, 'attribute')} repaired")
    for f in result.findings:
        where = f"{plain(f.where)}: " if f.where else ""
        hint = f" ({plain(f.hint)})" if f.hint else ""
        text.write(f"{f.severity} {f.id}: {where}{plain(f.text)}{hint}\n")
    if quiet:
        return
    text.notes(result.notes)
    checked = ", ".join(count(n, what, _PLURALS.get(what, "")) for what, n in result.checked.items())
    text.write(f"{plain(str(result.path))}: {result.counts}" + (f" in {checked}\n" if checked else "\n"))


_PLURALS = {"index": "indexes"}

# -- safetensors


def show_index(result: IndexResult, *, as_json: bool, quiet: bool) -> None:
    """A line for each index."""
    if as_json:
        indexes = [pick(i, "name state shards tensors total_size changes notes") for i in result.indexes]
        said = {"schema": INDEX_SCHEMA, "path": str(result.path), **pick(result, "dry_run written")}
        dump({**said, "indexes": indexes, "notes": result.notes}, entries=len(indexes))
        return
    if quiet:
        return
    text.notes([*result.notes, *(f"{i.name}: {n}" for i in result.indexes for n in i.notes)])
    for i in result.indexes:
        state = f"would be {i.state}" if result.dry_run and i.state == "written" else i.state
        total = f", {short(i.total_size)}" if i.total_size is not None else ""
        what = f"{count(i.tensors, 'tensor')} in {count(len(i.shards), 'shard')}{total}"
        text.write(f"{plain(i.name)}: {state}; {what}\n")
        for c in i.changes:
            text.write(f"  {plain(c)}\n")


def show_header(result: HeaderResult, *, as_json: bool, quiet: bool) -> None:
    """What an edited header changed, and how it came into the file."""
    if as_json:
        dump(
            {
                "schema": HEADER_SCHEMA,
                "file": str(result.file),
                "path": str(result.out),
                **pick(result, "how dry_run tensors header_bytes bytes_written renamed"),
                "changed": [c._asdict() for c in result.changed],
                **pick(result, "added removed"),
                "metadata": [c._asdict() for c in result.metadata],
                "notes": result.notes,
            },
            entries=len(result.renamed) + len(result.changed),
        )
        return
    if quiet:
        return
    text.notes(result.notes)
    how = _HOW[result.how]
    if result.dry_run and result.how != "unchanged":
        how = f"would be {how}"
    written = f", {short(result.bytes_written)} written" if result.bytes_written and not result.dry_run else ""
    text.write(f"{plain(str(result.out))}: {how}, {count(result.tensors, 'tensor')}{written}\n")
    lines = [f"{plain(a)} -> {plain(b)}" for a, b in result.renamed]
    lines += [f"{plain(c.name)}: {c.what} {c.before} -> {c.after}" for c in result.changed]
    lines += [f"+ {plain(n)}" for n in result.added] + [f"- {plain(n)}" for n in result.removed]
    lines += [f"metadata {plain(c.key)}: {_said(c.before)} -> {_said(c.after)}" for c in result.metadata]
    for line in lines[:_LINES]:
        text.write(f"  {line}\n")
    if len(lines) > _LINES:
        text.write(f"  and {len(lines) - _LINES} more changes (--json lists all)\n")


_LINES = 20
_HOW = {"unchanged": "unchanged", "in place": "changed in place", "copied": "rewritten", "restored": "restored"}


def _said(value: str | None) -> str:
    return "none" if value is None else repr(plain(value))
