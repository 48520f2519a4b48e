"""The document of ``size``."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar

from ckpttool.answers.document import BarCell, Document, DocumentCell, Paragraph, Section, Table
from ckpttool.answers.fields import pick, shape
from ckpttool.core.words import count, either
from ckpttool.errors import plain
from ckpttool.quant.keep import kept_words
from ckpttool.report.text import ranks

if TYPE_CHECKING:
    from ckpttool.ops.size import SizeReport
    from ckpttool.ops.size.answer import DeviceFit
    from ckpttool.ops.size.cache import KvCache
    from ckpttool.ops.size.resident import RankLoads
    from ckpttool.ops.size.training import TrainingSetup

UNITS = {"B": 1, "GB": 10**9, "GiB": 1 << 30}
"""Values of --unit."""
_DEFAULTS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}
"""Units where none is chosen: the largest that a number fills."""
_TOTAL = "tensors parameters elements bytes=nbytes"

H = TypeVar("H", bound=Hashable)


@dataclass(frozen=True, slots=True)
class _SizeUnit:
    """The unit of all sizes in one table or sentence."""

    name: str
    size: int

    @classmethod
    def of(cls, chosen: str, largest: int) -> _SizeUnit:
        """The unit of --unit, else the one for the largest size that is shown."""
        name = chosen or next(n for n in reversed(_DEFAULTS) if largest >= _DEFAULTS[n] or n == "B")
        return cls("bytes" if name == "B" else name, {**UNITS, **_DEFAULTS}[name])

    def cell(self, n: int) -> DocumentCell:
        """A size in a column that is headed by the unit."""
        return n if self.size == 1 else f"{n / self.size:,.3f}"

    def number(self, n: int, digits: int = 1) -> str:
        return f"{n:,}" if self.size == 1 else f"{n / self.size:,.{digits}f}"

    def say(self, n: int) -> str:
        """``61.2 GB``; more digits where one would say nothing."""
        if self.size == 1:
            return count(n, "byte")
        return f"{self.number(n, 1 if 20 * n >= self.size else 3)} {self.name}"


def document(report: SizeReport, *, by: str, unit: str = "") -> Document:
    """The verdict, then the tables. ``by`` names the rows of the first; ``unit`` is one of ``UNITS``, "" for the one
    that suits each table. --quiet leaves the verdict.
    """

    def sections() -> Iterator[Section]:
        parts: list[Sequence[Section]] = [[Paragraph(_verdict(report, unit), wrap=True, quiet=True)]]
        parts += [[Paragraph(_head(report, unit), wrap=True)], [_table(report, by, unit)], [_files(report, unit)]]
        if report.ranks is not None:
            parts += _ranks(report, report.ranks, unit)
        for i, part in enumerate(parts):
            yield from [Paragraph("")] if i else []
            yield from part

    entries = report.applied.total.tensors if by == "tensor" else 0
    return Document(lambda: _json(report, by), sections, report.notes, entries)


# -- people


def _aligned(
    header: Sequence[str], rows: Sequence[Sequence[DocumentCell]], first: int = 1, drop: Sequence[str] = ()
) -> Table:
    """Columns of numbers from ``first`` on."""
    return Table(header, rows, drop=drop, right=range(first, len(header)), tabs=False)


def _recipe(report: SizeReport) -> str:
    applied = report.applied
    if report.model.packing is not None:
        return f"{report.model.packing.software}, packed integers"
    if applied.scheme is not None and applied.quantized:
        static = ", static activations" if applied.scheme.static else ""
        return f"{applied.scheme}{static} ({applied.scheme.method})"
    return "quantized" if applied.quantized else "not quantized"


def _verdict(report: SizeReport, unit: str) -> str:
    """The answer: whether the index is right, the model can be cut and fits, where that was asked; else its size."""
    lines = []
    ranks = report.ranks
    if found := report.total_size:
        lines.append(
            f"{found.index}: total_size {found.real:,} is right"
            if found.ok
            else f"{found.index}: total_size says {found.said:,}, the tensors have {found.real:,} bytes{found.why}"
        )
    if ranks and ranks.misfits:
        n = len(ranks.misfits)
        lines.append(f"not possible: {count(n, 'kind')} of weights cannot be cut for {ranks.mesh}; {_possible(ranks)}")
    elif report.fit:
        lines += _fit(report, report.fit, unit)
    elif not report.total_size:
        lines += _needs(report, unit)
    return "\n".join(lines)


def _fit(report: SizeReport, f: DeviceFit, unit: str) -> Iterator[str]:
    """``fits: 61.2 of 77.0 GB on each of 8 GPUs (H100: 85.5 GB x 0.9), 15.8 GB left``, and what would fit if not."""
    used = _SizeUnit.of(unit, f.memory)
    left = abs(f.budget - f.needed)
    # One digit, or as many as tell the two sizes apart.
    apart = (d for d in (1, 2, 3) if used.number(f.needed, d) not in (used.number(0, d), used.number(f.budget, d)))
    digits = next(apart, 0)
    if not digits and left:
        used, digits = _SizeUnit.of("B", left), 1
    sizes = f"{used.number(f.needed, digits)} of {used.number(f.budget, digits)} {used.name}"
    difference = _SizeUnit.of(unit, left).say(left)
    gpus = _gpus(f.gpus)
    of = f"{f.device}: " if f.device else ""
    device = f"({of}{used.say(f.memory)} x {f.utilization:g})"
    most = "" if f.even else "at most "
    if f.ok:
        yield f"fits: {most}{sizes} on {gpus} {device}, {difference} left"
    else:
        yield f"does not fit: needs {difference} more on {gpus}: {most}{sizes} {device}"
        tried = []
        for r in report.remedies:
            size = _SizeUnit.of(unit, r.needed).say(r.needed)
            tried.append(f"{r.options} ({size if r.gpus == f.gpus else f'{size} on {_gpus(r.gpus)}'})")
        yield f"would fit: {either(tried)}" if tried else "no change tried fits: try several nodes, or a larger GPU"
    if f.tokens:
        yield f"room for {f.tokens:,} tokens of KV cache"


def _stored(report: SizeReport, unit: str) -> str:
    disk = report.disk
    size = _SizeUnit.of(unit, disk.size).say(disk.size)
    recipe = report.applied.recipe
    how = f" with recipe {recipe}" if recipe != "as-is" else ""
    return f"{plain(str(report.model.path))}: {size} on disk in {count(disk.files, 'file')}{how}"


def _needs(report: SizeReport, unit: str) -> Iterator[str]:
    """``config.json: 72.7 GB on disk in 15 files, 9.1 GB on each of 8 GPUs``, and which GPUs have room for that."""
    from ckpttool.ops.size.answer import UTILIZATION
    from ckpttool.ops.size.devices import COMMON

    choices, needed = report.choices, report.needed
    line = _stored(report, unit)
    if needed:
        most = "" if min(needed) == max(needed) else "at most "
        line += f", {most}{_SizeUnit.of(unit, max(needed)).say(max(needed))} on {_gpus(len(needed))}"
    yield line
    if not choices:
        return
    by_number = groupby(sorted(choices, key=lambda c: c.gpus), lambda c: c.gpus)
    groups = [(n, either([c.device.label for c in of])) for n, of in by_number]
    if len(groups) == 1 and len(choices) == len(COMMON):
        fits = f"any GPU from {choices[0].device.label} up"
    else:
        fits = "; ".join(names if needed else f"{n} x {names}" for n, names in groups)
    yield f"{'that fits' if needed else 'the weights fit'} on {fits} (in {UTILIZATION:.0%} of the memory)"


def _gpus(n: int) -> str:
    return f"each of {n:,} GPUs" if n > 1 else "one GPU"


def _possible(found: RankLoads) -> str:
    """The ways to cut that would do."""
    works = ", ".join(map(str, found.works))
    hint = f"possible: --tp-out {works}" if works else "no other tp is possible"
    if found.mesh.ep == 1 and all(m.expert for m in found.misfits):
        hint += "; or --ep-out N, with whole experts on each rank"
    return hint


def _head(report: SizeReport, unit: str) -> str:
    model, applied, total = report.model, report.applied, report.applied.total
    asked = report.fit or report.total_size or (report.ranks and report.ranks.misfits)
    lines = [
        *([_stored(report, unit)] if asked else []),
        f"{model.format}, family {model.family.name}, {_recipe(report)}",
        f"{total.parameters:,} parameters, {total.elements:,} stored elements, {total.nbytes:,} bytes",
    ]
    if applied.kept and applied.quantized:
        lines.append(kept_words(applied.kept))
    return "\n".join(lines)


def _table(report: SizeReport, by: str, unit: str) -> Table:
    from ckpttool.ops.size.stored import in_order

    applied = report.applied
    used = _SizeUnit.of(unit, applied.total.nbytes)
    rows: list[list[DocumentCell]] = []
    if by == "tensor":
        for r in in_order(report.model, applied):
            numbers = (r.parameters, r.elements, used.cell(r.nbytes))
            rows.append([plain(r.name), r.kind, r.dtype, shape(r.shape), *numbers])
        columns = ("tensor", "class", "dtype", "shape", "parameters", "elements", used.name)
        return _aligned(columns, rows, 4, ("elements", "class", "shape"))
    found = {"class": applied.classes, "dtype": applied.dtypes, "module": applied.modules}[by]
    largest = max((t.nbytes for t in found.values()), default=0)
    for name, t in (*found.items(), ("total", applied.total)):
        bar = BarCell(None if t is applied.total or not largest else t.nbytes / largest)
        rows.append([plain(name), t.tensors, t.parameters, t.elements, used.cell(t.nbytes), bar])
    header = (by, "tensors", "parameters", "elements", used.name, "")
    table = _aligned(header, rows, 1, ("elements", "", "parameters", "tensors"))
    return replace(table, right=range(1, len(header) - 1))


def _files(report: SizeReport, unit: str) -> Table:
    disk = report.disk
    used = _SizeUnit.of(unit, disk.size)
    rows = [("tensors (total_size)", disk.payload), ("headers", disk.headers), (count(disk.files, "file"), disk.size)]
    rows += [("index.json (extra)", disk.index)] if disk.index else []
    return _aligned(("on disk", used.name), [[name, used.cell(n)] for name, n in rows])


def _ranks(report: SizeReport, found: RankLoads, unit: str) -> Iterator[Sequence[Section]]:
    """What each rank holds, and why not where the model cannot be cut that way."""
    lines = [f"per rank: {found.mesh}"]
    rows, padded = found.vocabulary
    if padded > rows:
        lines.append(f"vocabulary of {rows:,} padded to {padded:,}")
    if any(g.coding is not None and g.coding.sides[0] for g in report.applied.groups):
        lines.append("block scales count as F32, as engines hold them")
    if found.misfits:
        lines += [f"not possible: `{plain(m.name)}` {shape(m.shape)}: {m.why}" for m in found.misfits]
    elif found.checked:
        lines.append("all cuts fall on block boundaries")
    yield [Paragraph("\n".join(lines), wrap=True)]
    if report.training is not None:
        yield _training(report.training, unit)
    elif found.held:
        yield [_serving(report, found, unit)]
    if report.cache is not None:
        yield [Paragraph(_cache(report.cache, unit), wrap=True)]
    last = "not counted: " + ", ".join(report.not_modelled)
    if f := report.fit:
        rest = f.memory - f.budget
        last += (
            f"; {_SizeUnit.of(unit, rest).say(rest)} of each GPU is reserved for them (--utilization {f.utilization:g})"
        )
    yield [Paragraph(last, wrap=True)]


def _groups(rows: Iterable[H]) -> dict[H, list[int]]:
    """Ranks by row: those with equal rows together."""
    out: dict[H, list[int]] = {}
    for rank, row in enumerate(rows):
        out.setdefault(row, []).append(rank)
    return out


def _serving(report: SizeReport, found: RankLoads, unit: str) -> Table:
    cache = report.cache
    kept = [cache.needed(at.pp) if cache else 0 for at in found.mesh.all_coords()]
    held = [(w.experts, w.dense, n) for w, n in zip(found.held, kept, strict=True)]
    # A column of zeros is omitted.
    shown = [i for i in range(3) if any(row[i] for row in held)]
    return _per_rank(
        [("experts", "other weights" if 0 in shown else "weights", "KV cache")[i] for i in shown],
        [[r[i] for i in shown] for r in held],
        unit,
    )


def _per_rank(parts: Sequence[str], held: Iterable[Sequence[int]], unit: str) -> Table:
    """Sizes of the parts on each rank, and their sum."""
    groups = _groups(map(tuple, held))
    used = _SizeUnit.of(unit, max(map(sum, groups)))
    rows = [[ranks(numbers), *map(used.cell, (*row, sum(row)))] for row, numbers in groups.items()]
    return _aligned((f"{used.name} on ranks", *parts, "total"), rows)


def _cache(c: KvCache, unit: str) -> str:
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
        lines.append(f"{c.batch:,} x {c.tokens:,} tokens: {_SizeUnit.of(unit, used).say(used)} on a rank")
        if reserved != used:
            size = _SizeUnit.of(unit, reserved).say(reserved)
            lines.append(f"engine reserve, {c.batch:,} x {c.length or c.tokens:,} tokens in every layer: {size}")
    return "\n".join(lines)


def _training(t: TrainingSetup, unit: str) -> list[Section]:
    head = f"training: ZeRO-{t.zero}, dp {t.dp}"
    if t.expert_dp != t.dp:
        head += f" (experts {t.expert_dp})"
    head += f", gradients {t.gradient}, master weights {t.master}, moments {t.moment}"
    if t.transposed:
        head += ", codes twice (transposed)"
    return [Paragraph(head, wrap=True), _per_rank(("weights", "gradients", "masters", "moments"), t.held, unit)]


# -- programs


def _json(report: SizeReport, by: str) -> dict[str, Any]:
    """The whole report; whole numbers are exact."""
    from ckpttool.ops.size.stored import in_order

    model, applied, disk = report.model, report.applied, report.disk
    chosen = applied.scheme
    out: dict[str, Any] = {
        "schema": "ckpttool.size/1",
        "path": str(model.path),
        "format": model.format,
        "family": model.family.name,
        "ok": report.ok,
        "fits": report.fits,
        "budget_bytes": report.fit.budget if report.fit else None,
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
    out["gpu_choices"] = [
        {"gpu": c.device.label, "gpus": c.gpus, "needed": c.needed, "memory": c.device.memory} for c in report.choices
    ]
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
        out["fit"] = {
            **pick(fit, "rank needed memory utilization budget_bytes=budget gpus tokens device ok"),
            "left": fit.budget - fit.needed,
            "would_fit": remedies,
        }
    return out
