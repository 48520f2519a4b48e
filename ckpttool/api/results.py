"""Results of the API: flat, typed, immutable, with a short repr and a table in notebooks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ckpttool.api.border import in_arguments, notes_in_arguments
from ckpttool.api.show import frame, table
from ckpttool.core.files import Place
from ckpttool.core.words import count, ranges, short
from ckpttool.errors import UsageError
from ckpttool.ops.size.answer import SizeReport


@dataclass(frozen=True, slots=True)
class Written:
    """An output that is complete and has its name; or, where several processes share the work, will be."""

    path: Place
    """DST."""
    format: str
    """Name of its format."""
    tensors: int
    """Logical tensors in it."""
    files: int
    """All files, companions included."""
    nbytes: int
    """Bytes of all files."""
    bytes_read: int
    bytes_written: int
    """Bytes written by this run; an interrupted one may have written the rest."""
    seconds: float
    """Seconds of the run, planning excluded."""
    verify_seconds: float
    """The part of ``seconds`` that verified."""
    verified: bool
    """It was read back and compared with the source."""
    notes: tuple[str, ...] = ()
    """What was inferred, omitted or derived, in sentences."""
    part: tuple[int, int] | None = None
    """Which part of how many this process did, where ``run`` was given one."""
    committed: bool = True
    """It is complete. False while other parts are not done: the last of them makes it so."""
    waiting_for: tuple[int, ...] = ()
    """Numbers of these parts."""
    distances: Mapping[str, Any] | None = None
    """For a merge with a report, how far it is from each source, as ``merge --json`` has it."""

    def __fspath__(self) -> str:
        """So that it can be opened, merged or compared as it is."""
        return str(self.path)

    def __repr__(self) -> str:
        """``<Written dst: hf, 39 tensors in 4 files, 440.00 kB, verified>``."""
        if self.part and not self.committed:
            left = f", waiting for {ranges(self.waiting_for, '-')}" if self.waiting_for else ""
            return f"<Written {self.path}: part {self.part[0]} of {self.part[1]}{left}>"
        verified = ", verified" if self.verified else ""
        held = f"{count(self.tensors, 'tensor')} in {count(self.files, 'file')}"
        return f"<Written {self.path}: {self.format}, {held}, {short(self.nbytes)}{verified}>"

    def _repr_html_(self) -> str:
        """For notebooks."""
        shown = {k: v for k, v in asdict(self).items() if v not in (None, ()) and k not in ("notes", "distances")}
        return table(repr(self)[1:-1], [(k.replace("_", " "), v) for k, v in shown.items()], self.notes)


@dataclass(frozen=True, slots=True)
class Report:
    """A report on a checkpoint: one HTML page, which a notebook shows where it is the last value of a cell."""

    html: str = field(repr=False)
    """The page."""
    path: Path | None = None
    """Where it was written, if a file was given."""

    def __fspath__(self) -> str:
        """The file. Raises UsageError where there is none."""
        if self.path is None:
            raise UsageError("this report was not written to a file", hint="name one: report('report.html')")
        return str(self.path)

    def _repr_html_(self) -> str:
        """For notebooks: the page in a frame that reaches nothing outside itself."""
        return frame(self.html)


@dataclass(frozen=True, slots=True)
class Size:
    """Size of a model under a recipe, in bytes; fields that were not asked for are None."""

    path: Place
    family: str
    recipe: str
    parameters: int
    """Elements in high precision: what people call the size of a model."""
    nbytes: int
    """Bytes of the tensors: an index's ``total_size``."""
    file_bytes: int
    """Bytes of all files, headers and index included."""
    rank_bytes: tuple[int, ...] | None
    """Weights of each rank; None when no rank was asked for, or when the weights cannot be cut that way."""
    possible_tp: tuple[int, ...] | None
    """Tensor-parallel sizes that would be possible, where the one that was asked for is not."""
    misfits: tuple[str, ...]
    """Why it is not: a sentence for each kind of weight."""
    cache_bytes: int | None
    """Keys and values on the rank that holds most of them."""
    needed: int | None
    """What the fullest rank needs of its device."""
    memory: int | None
    """Bytes of the device's memory."""
    would_fit: tuple[str, ...]
    """Arguments of ``size`` that make it fit, where it does not: ``tp=2``."""
    ok: bool
    """It can be cut and it fits, as far as these were asked."""
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, report: SizeReport) -> Size:
        """The flat form of a report."""
        ranks, cache, fit, disk = report.ranks, report.cache, report.fit, report.disk
        return cls(
            path=report.model.path,
            family=report.model.family.name,
            recipe=report.applied.recipe,
            parameters=report.applied.total.parameters,
            nbytes=report.applied.total.nbytes,
            file_bytes=disk.size + disk.index,
            rank_bytes=tuple(w.nbytes for w in ranks.held) or None if ranks else None,
            possible_tp=ranks.works if ranks and ranks.misfits else None,
            misfits=tuple(f"`{m.name}` {list(m.shape)}: {m.why}" for m in ranks.misfits) if ranks else (),
            cache_bytes=max(map(cache.used, range(len(cache.stages)))) if cache and cache.tokens else None,
            needed=fit.needed if fit else None,
            memory=fit.memory if fit else None,
            would_fit=tuple(in_arguments(r.options, "size") for r in report.remedies),
            ok=report.ok,
            notes=tuple(notes_in_arguments(report.notes, "size")),
        )

    def __repr__(self) -> str:
        """``<Size llama.json: 1.50 GB as block, fits>``."""
        verdict = "" if self.memory is None else ", fits" if self.ok else ", does not fit"
        if self.possible_tp is not None:
            verdict = ", cannot be cut that way"
        return f"<Size {self.path}: {short(self.nbytes)} as {self.recipe}{verdict}>"

    def _repr_html_(self) -> str:
        """For notebooks."""
        shown: dict[str, Any] = {k: v for k, v in asdict(self).items() if v not in (None, ()) and k != "notes"}
        if self.rank_bytes:
            shown["rank_bytes"] = max(self.rank_bytes)
        return table(repr(self)[1:-1], [(k.replace("_", " "), v) for k, v in shown.items()], self.notes)
