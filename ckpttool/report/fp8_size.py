"""The document of ``fp8-size``."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, TypeVar

from ckpttool.answers.document import BarCell, Document, DocumentCell, Paragraph, Section, Table
from ckpttool.answers.fields import pick, shape
from ckpttool.core.words import count, short
from ckpttool.errors import plain
from ckpttool.report.text import ranks

if TYPE_CHECKING:
    from ckpttool.ops.fp8_size import SizeReport
    from ckpttool.ops.fp8_size.cache import KvCache
    from ckpttool.ops.fp8_size.resident import RankLoads
    from ckpttool.ops.fp8_size.training import TrainingSetup

UNITS = {"B": 1, "GB": 10**9, "GiB": 1 << 30}
_LAST = ("GB", "GiB", "tensors")
"""What a narrow terminal loses last: one size in bytes stays."""
_TOTAL = "tensors parameters elements bytes=nbytes"

H = TypeVar("H", bound=Hashable)


def document(report: SizeReport, *, by: str, unit: str = "") -> Document:
    """``by`` names the rows of the table; sizes are in ``unit`` or, where it is "", in GB and GiB. --quiet leaves the
    verdict, or without one the total."""

    def sections() -> Iterator[Section]:
        units = [u for u in ([unit] if unit else ["GB", "GiB"]) if u != "B"]
        parts: list[Sequence[Section]] = []
        if verdict := _verdict(report):
            parts.append([Paragraph(verdict, wrap=True, quiet=True)])
        parts.append([Paragraph(_head(report), wrap=True, quiet=not verdict)])
        parts += [[_table(report, by, units)], [_files(report, units)]]
        if report.ranks is not None:
            parts += _ranks(report, report.ranks, units)
        for i, part in enumerate(parts):
            yield from [Paragraph("")] if i else []
            yield from part

    entries = report.applied.total.tensors if by == "tensor" else 0
    return Document(lambda: _json(report, by), sections, report.notes, entries)


# -- people


def _sizes(n: int, units: Sequence[str]) -> list[DocumentCell]:
    """Exact bytes, and the same in the units."""
    return [n, *(f"{n / UNITS[u]:,.3f}" for u in units)]


def _aligned(
    header: Sequence[str], rows: Sequence[Sequence[DocumentCell]], first: int = 1, drop: Sequence[str] = _LAST
) -> Table:
    """Columns of numbers from ``first`` on."""
    return Table(header, rows, drop=drop, right=range(first, len(header)), tabs=False)


def _recipe(report: SizeReport) -> str:
    applied = report.applied
    if report.model.packing is not None:
        return f"{applied.recipe}: {report.model.packing.software}, packed integers"
    if applied.scheme is not None and applied.quantized:
        static = ", static activations" if applied.scheme.static else ""
        said = f"{applied.recipe}: " if applied.recipe == "as-is" else ""
        return f"{said}{applied.scheme}{static} ({applied.scheme.method})"
    if applied.recipe == "bf16" or not applied.quantized:
        return f"{applied.recipe}: in high precision"
    return "as-is: what is stored"


def _verdict(report: SizeReport) -> str:
    """What was asked with yes or no, before all numbers; "" where nothing was."""
    lines = []
    if found := report.total_size:
        lines.append(
            f"{found.index}: total_size {found.real:,} is right"
            if found.ok
            else f"{found.index}: total_size says {found.said:,}, the tensors have {found.real:,} bytes{found.why}"
        )
    ranks = report.ranks
    if ranks and ranks.misfits:
        n = len(ranks.misfits)
        lines.append(f"not possible: {count(n, 'kind')} of weights cannot be cut for {ranks.mesh}; {_possible(ranks)}")
    if (f := report.fit) and not (ranks and ranks.misfits):
        left = f.memory - f.needed
        on = f" on {f.device}" if f.device else ""
        needs = f"rank {f.rank} needs {short(f.needed)} of {short(f.memory)}"
        lines.append(
            f"fits{on}: {needs}, {short(left)} left" if f.ok else f"does not fit{on}: {needs}, {short(-left)} too much"
        )
        if f.tokens is not None:
            lines.append(f"room for {f.tokens:,} tokens of keys and values")
        if not f.ok:
            lines += [f"would fit: {r.options} ({short(r.needed)})" for r in report.remedies]
            if not report.remedies:
                lines.append("nothing that was tried fits: more ranks, 4-bit weights, an FP8 cache")
    return "\n".join(lines)


def _possible(found: RankLoads) -> str:
    """The ways to cut that would do."""
    works = ", ".join(map(str, found.works))
    hint = f"possible: --tp-out {works}" if works else "no other tp is possible"
    if found.mesh.ep == 1 and all(m.expert for m in found.misfits):
        hint += "; or --ep-out N, with whole experts on each rank"
    return hint


def _head(report: SizeReport) -> str:
    model, applied, total = report.model, report.applied, report.applied.total
    lines = [
        f"{plain(str(model.path))}: {short(total.nbytes)}",
        f"{model.format}, family {model.family.name}, recipe {_recipe(report)}",
        f"{total.parameters:,} parameters, {total.elements:,} stored elements, {total.nbytes:,} bytes",
    ]
    if applied.kept and applied.quantized:
        why = ", ".join(f"{n:,} {w}" for w, n in applied.kept.items())
        lines.append(f"{count(sum(applied.kept.values()), 'tensor')} in high precision ({why})")
    return "\n".join(lines)


def _table(report: SizeReport, by: str, units: Sequence[str]) -> Table:
    from ckpttool.ops.fp8_size.stored import in_order

    applied = report.applied
    rows: list[list[DocumentCell]] = []
    if by == "tensor":
        for r in in_order(report.model, applied):
            numbers: list[DocumentCell] = [r.parameters, r.elements, *_sizes(r.nbytes, units)]
            rows.append([plain(r.name), r.kind, r.dtype, shape(r.shape), *numbers])
        header = ("tensor", "class", "dtype", "shape", "parameters", "elements", "bytes", *units)
        return _aligned(header, rows, 4, ("elements", "class", "shape", *_LAST))
    found = {"class": applied.classes, "dtype": applied.dtypes, "module": applied.modules}[by]
    largest = max((t.nbytes for t in found.values()), default=0)
    for name, t in (*found.items(), ("total", applied.total)):
        bar = BarCell(None if t is applied.total or not largest else t.nbytes / largest)
        rows.append([plain(name), t.tensors, t.parameters, t.elements, *_sizes(t.nbytes, units), bar])
    header = (by, "tensors", "parameters", "elements", "bytes", *units, "")
    table = _aligned(header, rows, 1, ("elements", "GiB", "", "parameters", "GB", "tensors"))
    return replace(table, right=range(1, len(header) - 1))


def _files(report: SizeReport, units: Sequence[str]) -> Table:
    disk = report.disk
    rows = [("tensors (total_size)", disk.payload), ("headers", disk.headers), (count(disk.files, "file"), disk.size)]
    rows += [("index.json, besides", disk.index)] if disk.index else []
    return _aligned(("on disk", "bytes", *units), [[name, *_sizes(n, units)] for name, n in rows])


def _ranks(report: SizeReport, found: RankLoads, units: Sequence[str]) -> Iterator[Sequence[Section]]:
    """Everything about ranks: whether they can be, what they hold, whether it fits."""
    lines = [f"per rank: {found.mesh}"]
    rows, padded = found.vocabulary
    if padded > rows:
        lines.append(f"vocabulary of {rows:,} padded to {padded:,}")
    if any(g.coding is not None and g.coding.sides[0] for g in report.applied.groups):
        lines.append("scales of blocks are held as F32")
    if found.misfits:
        lines += [f"not possible: `{plain(m.name)}` {shape(m.shape)}: {m.why}" for m in found.misfits]
    elif found.checked:
        lines.append("every cut and every joined part is a multiple of the block")
    yield [Paragraph("\n".join(lines), wrap=True)]
    if report.training is not None:
        yield _training(report.training, units)
    elif found.held:
        yield [_serving(report, found, units)]
    if report.cache is not None:
        yield [Paragraph(_cache(report.cache), wrap=True)]
    yield [Paragraph("not modelled: " + ", ".join(report.not_modelled), wrap=True)]


def _groups(rows: Iterable[H]) -> dict[H, list[int]]:
    """RankLoads with equal rows."""
    out: dict[H, list[int]] = {}
    for rank, row in enumerate(rows):
        out.setdefault(row, []).append(rank)
    return out


def _serving(report: SizeReport, found: RankLoads, units: Sequence[str]) -> Table:
    cache = report.cache
    used = [cache.used(at.pp) if cache else 0 for at in found.mesh.all_coords()]
    held = [(w.experts, w.dense, n) for w, n in zip(found.held, used, strict=True)]
    # A part that no rank has is left out.
    shown = [i for i in range(3) if any(row[i] for row in held)]
    header = ("ranks", *(("experts", "other weights", "KV")[i] for i in shown), "bytes", *units)
    groups = _groups(held).items()
    rows = [[ranks(numbers), *(row[i] for i in shown), *_sizes(sum(row), units)] for row, numbers in groups]
    return _aligned(header, rows)


def _cache(c: KvCache) -> str:
    what = "latents" if c.latent else "keys and values"
    if c.even:
        each = f"{c.per_layer:,} bytes a token and layer on a rank, {c.per_token:,} in all layers"
    else:
        each = f"{c.per_token:,} bytes a token on a rank in all layers, at most {c.per_layer:,} in one"
    lines = [f"KV cache, {c.dtype}: {what}, {each}"] if c.layers else ["no layer keeps keys and values"]
    if len(c.kinds) > 1:
        lines.append("layers: " + ", ".join(f"{n} {plain(kind)}" for kind, n in sorted(c.kinds.items())))
    if c.sliding:
        lines.append(f"{c.sliding} of {c.layers} layers keep a window of {c.window:,} tokens")
    if c.per_sequence:
        size = f"{c.per_sequence:,} bytes a sequence on a rank in all layers"
        lines.append(f"{count(c.state_layers, 'layer')} with a state: {size}, whatever its length")
    if c.tokens:
        used = max(c.used(s) for s in range(len(c.stages)))
        reserved = max(c.reserved(s) for s in range(len(c.stages)))
        lines.append(f"{c.batch:,} x {c.tokens:,} tokens: {used:,} bytes on a rank")
        if reserved != used:
            lines.append(
                f"engine reserve, {c.batch:,} x {c.length or c.tokens:,} tokens in every layer: {reserved:,} bytes"
            )
    return "\n".join(lines)


def _training(t: TrainingSetup, units: Sequence[str]) -> list[Section]:
    head = f"training: ZeRO-{t.zero}, dp {t.dp}"
    if t.expert_dp != t.dp:
        head += f" (experts {t.expert_dp})"
    head += f", gradients {t.gradient}, master weights {t.master}, moments {t.moment}"
    if t.transposed:
        head += ", codes twice (transposed)"
    groups = _groups(tuple(s) for s in t.held).items()
    rows = [[ranks(numbers), *state, *_sizes(sum(state), units)] for state, numbers in groups]
    header = ("ranks", "weights", "gradients", "masters", "moments", "bytes", *units)
    return [Paragraph(head, wrap=True), _aligned(header, rows)]


# -- programs


def _json(report: SizeReport, by: str) -> dict[str, Any]:
    """The whole report; whole numbers are exact."""
    from ckpttool.ops.fp8_size.stored import in_order

    model, applied, disk = report.model, report.applied, report.disk
    chosen = applied.scheme
    out: dict[str, Any] = {
        "schema": "ckpttool.fp8-size/1",
        "path": str(model.path),
        "format": model.format,
        "family": model.family.name,
        "ok": report.ok,
        "recipe": {
            "name": applied.recipe,
            "quantized": applied.quantized or report.model.packing is not None,
            "scheme": None
            if chosen is None
            else {
                **pick(chosen, "recipe quant_method=method code scale_dtype=stored_scale block static_act=static edge"),
                "keep_preset": applied.preset,
            },
            "kept": applied.kept,
        },
        "mtp": not model.without_mtp,
        **pick(applied.total, "tensors_stored=tensors parameters elements"),
        "elements_unpacked": applied.unpacked(),
        "bytes": applied.total.nbytes,
        "dtypes": {d: pick(t, _TOTAL) for d, t in applied.dtypes.items()},
        "classes": {c: pick(t, _TOTAL) for c, t in applied.classes.items()},
        "disk": pick(disk, "payload headers files bytes=size index real"),
    }
    if by == "module":
        out["modules"] = {m: pick(t, _TOTAL) for m, t in applied.modules.items()}
    if by == "tensor":
        names = "name class=kind dtype shape parameters elements bytes=nbytes"
        out["tensors"] = [pick(r, names) for r in in_order(report.model, report.applied)]
    if report.total_size is not None:
        out["total_size"] = {**asdict(report.total_size), "ok": report.total_size.ok}
    if report.ranks is not None:
        out |= _ranks_json(report, report.ranks)
    return {**out, "not_modelled": list(report.not_modelled), "notes": report.notes}


def _ranks_json(report: SizeReport, found: RankLoads) -> dict[str, Any]:
    cache, training, fit = report.cache, report.training, report.fit
    held = _groups((w, at.pp) for w, at in zip(found.held, found.mesh.all_coords(), strict=False))
    groups = []
    for (w, stage), numbers in held.items():
        group = {"ranks": numbers, "stage": stage, "bytes": w.nbytes, "experts": w.experts, "other": w.dense}
        if cache is not None and cache.tokens:
            group |= {"kv": cache.used(stage), "kv_reserve": cache.reserved(stage)}
        groups.append(group)
    out: dict[str, Any] = {
        "ranks": {
            "mesh": found.mesh.to_json(),
            "vocabulary": {"rows": found.vocabulary[0], "padded": found.vocabulary[1]},
            "feasible": not found.misfits,
            "misfits": [pick(m, "tensor=name shape why expert") for m in found.misfits],
            "possible_tp": found.works,
            "most_loaded": found.most if found.held else None,
            "groups": groups,
        }
    }
    if cache is not None:
        out["kv"] = {
            **pick(cache, "dtype latent bytes_per_token_and_layer=per_layer bytes_per_token=per_token layers"),
            "sliding_layers": cache.sliding,
            "window": cache.window,
            "not_modelled": {},
            **pick(cache, "tokens batch max_model_len=length"),
            "kinds": dict(sorted(cache.kinds.items())),
            **pick(cache, "state_layers state_bytes_per_sequence=per_sequence"),
        }
    if training is not None:
        states = _groups(tuple(s) for s in training.held)
        out["training"] = {
            **pick(training, "zero dp expert_dp grad=gradient master moment fp8_transposed=transposed"),
            "most_loaded": training.most if training.held else None,
            "groups": [
                {
                    "ranks": numbers,
                    "bytes": sum(state),
                    **dict(zip(("weights", "gradients", "masters", "moments"), state, strict=True)),
                }
                for state, numbers in states.items()
            ],
        }
    if fit is not None:
        remedies = [asdict(r) for r in report.remedies]
        out["fit"] = {**asdict(fit), "ok": fit.ok, "left": fit.memory - fit.needed, "would_fit": remedies}
    return out
