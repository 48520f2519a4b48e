"""``--diff``: how SRC differs from another checkpoint."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from ckpttool.answers.fields import finite, pick
from ckpttool.errors import UsageError
from ckpttool.ops.inspect.views.base import SCHEMA, Answer, Subject, View, flag, value

if TYPE_CHECKING:
    from ckpttool.core.files import AnyPlace, DataFile
    from ckpttool.ops.inspect.diff import DiffResult, Tolerance


@dataclass(frozen=True, kw_only=True)
class Comparison(View):
    """What a view has that compares SRC with another checkpoint."""

    diff: AnyPlace | None = None
    second: str = ""
    """Another checkpoint of the run that SRC is, as ``diff`` is one: by name, step or path."""
    values: bool = False
    atol: float | None = None
    rtol: float | None = None

    @property
    def tolerance(self) -> Tolerance | None:
        """How far elements may differ; None where they are compared bit for bit."""
        if self.atol is None and self.rtol is None:
            return None
        from ckpttool.ops.inspect.diff import Tolerance

        return Tolerance(self.atol or 0.0, self.rtol or 0.0)

    @property
    def compares_elements(self) -> bool:
        """Whether elements are compared, too."""
        return self.diff is not None and (self.values or self.atol is not None or self.rtol is not None)

    def opened(self, src: AnyPlace) -> tuple[AnyPlace, Self]:
        if not self.second:
            return src, self
        from ckpttool.ops.inspect.runs import pick_save

        first, second = pick_save(src, str(self.diff)), pick_save(src, self.second)
        if first == second:
            raise UsageError(f"--diff names one checkpoint twice: {self.diff}", where=str(first))
        return first, replace(self, diff=second, second="")

    @property
    def others(self) -> Sequence[AnyPlace]:
        return () if self.diff is None else (self.diff,)

    def refuse_filters(self) -> None:
        if self.diff is not None and (self.choice.dtypes or self.choice.min_size):
            raise UsageError("--dtype and --min-size do not apply to --diff", hint="use --filter")

    def compared(self, at: Subject) -> DiffResult:
        """SRC and the other checkpoint. Raises what ``diff`` raises."""
        from ckpttool.ops.inspect.diff import diff

        return diff(
            at.src,
            self.others[0],
            at.options,
            at.progress,
            patterns=tuple(self.choice.patterns),
            values=self.compares_elements,
            tolerance=self.tolerance,
            only=tuple(self.choice.components),
            fleet=at.fleet,
        )


@dataclass(frozen=True, kw_only=True)
class DiffView(Comparison):
    """Names, dtypes and shapes; with ``values`` or a tolerance the elements, too."""

    name = "diff"
    diff: AnyPlace | None = value("--diff", "OTHER", "Compare with OTHER; exit 3 when they differ.")
    values: bool = flag("--values", "With --diff and --check: also read the elements.")
    atol: float | None = value("--atol", "X", "With --diff: absolute tolerance, dtypes may differ.", float, least=0)
    rtol: float | None = value("--rtol", "X", "With --diff: tolerance relative to OTHER.", float, least=0)
    check: bool = False

    @property
    def label(self) -> str:
        return "--diff"

    @property
    def asked(self) -> bool:
        return self.diff is not None

    @property
    def slow(self) -> bool:
        return True

    @property
    def reads_elements(self) -> bool:
        return self.compares_elements

    @property
    def outside_report(self) -> str:
        return ""

    def refuse(self, asked: Sequence[View]) -> None:
        if self.second and self.diff is None:
            raise UsageError(
                f"unexpected argument `{self.second}`", hint=f"to compare: --diff {shlex.quote(self.second)}"
            )
        if self.diff == "":
            raise UsageError("--diff names no checkpoint", hint="is a variable of the shell not set?")
        if self.values and not (self.check or self.diff):
            raise UsageError(
                "--values belongs to --diff and --check", hint="--stats and --show read values by themselves"
            )
        if (self.atol is not None or self.rtol is not None) and self.diff is None:
            raise UsageError("--atol and --rtol belong to --diff")

    def look(self, at: Subject) -> DiffAnswer:
        return DiffAnswer(self.compared(at))


@dataclass(frozen=True)
class DiffAnswer(Answer):
    """Every difference, and how far both are apart."""

    name = "diff"
    result: DiffResult

    @property
    def ok(self) -> bool:
        return self.result.ok

    @property
    def notes(self) -> Sequence[str]:
        return self.result.notes

    @property
    def files(self) -> Sequence[DataFile]:
        from ckpttool.core.files import source_files

        return [f for side in (self.result.left, self.result.right) for f in source_files(side.stored.files)]

    def json(self) -> tuple[dict[str, Any], int]:
        result = self.result
        opened = {
            side: {"path": str(source.path), "format": source.format, "mesh": source.mesh.to_json()}
            for side, source in (("left", result.left), ("right", result.right))
        }
        components = "only_left_components=components_left only_right_components=components_right"
        elements = [
            {
                **pick(d, "name different=elements of=total first"),
                **{name: finite(number) for name, number in pick(d, "max_abs relative cosine").items()},
            }
            for d in result.elements
        ]
        found = {
            "schema": SCHEMA,
            "view": self.name,
            **opened,
            "equal": result.ok,
            "values": result.values,
            "tolerance": None if result.tolerance is None else pick(result.tolerance, "atol rtol"),
            **pick(result, f"compared changed components=by_component {components} renamed only_left only_right"),
            "shapes": [pick(m, "name left right") for m in result.shapes],
            "dtypes": [pick(m, "name left right") for m in result.dtypes],
            "elements": elements,
            "notes": result.notes,
            **({"drift": self._drift()} if result.values else {}),
        }
        return found, len(result.only_left) + len(result.only_right) + len(elements)

    def _drift(self) -> dict[str, Any] | None:
        """How far layers and modules are apart; None where nothing differs."""
        drift = self.result.drift
        if drift is None:
            return None
        lists = {"layers": drift.layers, "modules": drift.modules}
        return {"component": drift.component} | {
            key: [pick(d, "name tensors changed") | {"relative": finite(d.relative)} for d in found]
            for key, found in lists.items()
        }
