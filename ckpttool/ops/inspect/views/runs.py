"""``--checkpoints``: the checkpoints of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ckpttool.answers.document import Paragraph, PerMedium, Section, Table
from ckpttool.answers.fields import pick, utc
from ckpttool.core.words import count, short
from ckpttool.errors import UsageError, plain
from ckpttool.ops.inspect.views.base import InspectedSource, PrintedAnswer, View, flag, narrows

if TYPE_CHECKING:
    from ckpttool.ops.inspect.runs import RunListing, SavedCheckpoint


class RunView(View["RunAnswer"]):
    """Those that lie in SRC, even if SRC can be read as one."""

    name = "checkpoints"
    checkpoints: bool = flag("--checkpoints", "List the checkpoints of a run: step, size, format, complete or not.")

    @property
    def outside_report(self) -> str:
        return ""

    def refuse_filters(self) -> None:
        if self.choice.components or narrows(self.choice):
            raise UsageError("--checkpoints does not take filters")

    def look(self, at: InspectedSource) -> RunAnswer:
        return RunAnswer.of(at)


class RunAnswer(PrintedAnswer):
    """Checkpoints by step."""

    name = "checkpoints"
    run: RunListing

    @classmethod
    def of(cls, at: InspectedSource) -> RunAnswer:
        """The checkpoints in SRC. Raises UsageError where there is none."""
        from ckpttool.ops.inspect.runs import list_run

        return cls(list_run(at.src, at.options))

    @property
    def notes(self) -> Sequence[str]:
        return self.run.notes

    def entries(self) -> int:
        return len(self.run.rows)

    def sections(self) -> Iterator[Section]:
        yield PerMedium(lambda: [self._short_table()], lambda: [self._table()], quiet=True)
        yield PerMedium(lambda: [self._summary()], list)

    def json(self) -> dict[str, Any]:
        run = self.run
        found = [
            {
                **pick(r, "name step bytes=nbytes files format?"),
                "mesh": None if r.world is None else r.world.to_json(),
                "sharding": r.sharding,
                "components": list(r.components),
                "optimizer": r.optimizer if r.components else None,
                "saved": utc(r.saved),
                **pick(r, "complete why?"),
                "resume": r.name == run.resume,
            }
            for r in run.rows
        ]
        return {"path": str(run.path), **pick(run, "resume? because? notes"), "checkpoints": found}

    def _table(self) -> Table:
        header = ("name", "step", "bytes", "files", "format", "mesh", "optimizer", "saved", "complete", "resume", "why")
        complete = {True: "yes", False: "no", None: "unknown"}
        rows = [
            (
                plain(r.name),
                "-" if r.step is None else r.step,
                r.nbytes,
                r.files,
                r.format or "-",
                r.mesh or "-",
                _has_optimizer(r),
                utc(r.saved) or "-",
                complete[r.complete],
                "yes" if r.name == self.run.resume else "no",
                plain(r.why) or "-",
            )
            for r in self.run.rows
        ]
        return Table(header, rows)

    def _short_table(self) -> Table:
        from datetime import datetime

        run, states = self.run, {True: "complete", False: "incomplete", None: "unknown"}
        header = ("checkpoint", "step", "size", "state", "format", "mesh", "optimizer", "saved")
        rows = [
            (
                plain(r.name),
                "-" if r.step is None else f"{r.step:,}",
                short(r.nbytes),
                states[r.complete] + (" <" if r.name == run.resume else ""),
                r.format or "-",
                r.mesh,
                _has_optimizer(r),
                datetime.fromtimestamp(r.saved).astimezone().strftime("%Y-%m-%d %H:%M") if r.saved else "-",
            )
            for r in run.rows
        ]
        empty = {"step": all(r.step is None for r in run.rows), "mesh": not any(r.mesh for r in run.rows)}
        keep = [i for i, name in enumerate(header) if not empty.get(name)]
        names = [header[i] for i in keep]
        right = [i for i, name in enumerate(names) if name in ("step", "size")]
        drop = ("saved", "mesh", "format", "optimizer", "step")
        return Table(names, [[row[i] for i in keep] for row in rows], drop=drop, right=right)

    def _summary(self) -> Paragraph:
        """What is missing, and from where training goes on."""
        run = self.run
        lines = [f"{plain(r.name)}: {plain(r.why)}" for r in run.rows if r.why]
        if run.resume:
            lines.append(f"< training resumes from {plain(run.resume)} ({plain(run.because)})")
        total = sum(r.nbytes for r in run.rows)
        lines.append(f"{plain(str(run.path))}: {count(len(run.rows), 'checkpoint')}, {short(total)}")
        return Paragraph("\n" + "\n".join(lines), wrap=True)


def _has_optimizer(row: SavedCheckpoint) -> str:
    return "yes" if row.optimizer else "no" if row.components else "-"
