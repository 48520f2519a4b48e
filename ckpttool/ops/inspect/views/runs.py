"""``--checkpoints``: the checkpoints of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpttool.answers.fields import pick, utc
from ckpttool.errors import UsageError
from ckpttool.ops.inspect.views.base import SCHEMA, Answer, Subject, View, flag, narrows

if TYPE_CHECKING:
    from ckpttool.ops.inspect.runs import RunListing


@dataclass(frozen=True, kw_only=True)
class RunView(View):
    """Those that lie in SRC, even if SRC can be read as one."""

    name = "checkpoints"
    checkpoints: bool = flag("--checkpoints", "List the checkpoints of a run: step, size, format, complete or not.")

    def refuse_filters(self) -> None:
        if self.choice.components or narrows(self.choice):
            raise UsageError("--checkpoints is about whole checkpoints; filters do not apply")

    def look(self, at: Subject) -> RunAnswer:
        return RunAnswer.of(at)


@dataclass(frozen=True)
class RunAnswer(Answer):
    """Checkpoints by step."""

    name = "checkpoints"
    run: RunListing

    @classmethod
    def of(cls, at: Subject) -> RunAnswer:
        """The checkpoints in SRC. Raises UsageError where there is none."""
        from ckpttool.ops.inspect.runs import list_run

        return cls(list_run(at.src, at.options))

    @property
    def notes(self) -> Sequence[str]:
        return self.run.notes

    def json(self) -> tuple[dict[str, Any], int]:
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
        head = {"schema": SCHEMA, "view": self.name, "path": str(run.path), **pick(run, "resume? because? notes")}
        return {**head, "checkpoints": found}, len(found)
