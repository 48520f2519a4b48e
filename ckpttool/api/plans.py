"""Plans: everything that will be written. Look at one, then ``run`` it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ckpttool.api.arguments import member, nbytes, whole
from ckpttool.api.border import notes_in_arguments, public
from ckpttool.api.results import Written
from ckpttool.api.show import table
from ckpttool.core.files import AnyPlace, Place
from ckpttool.core.mesh import Mesh
from ckpttool.core.plan import Plan as Steps
from ckpttool.core.words import count, short
from ckpttool.errors import UsageError
from ckpttool.execute import NoProgress, Progress, RunOptions, RunResult
from ckpttool.ops import reshard as _reshard
from ckpttool.ops.convert_json import convert as _convert
from ckpttool.ops.drop_keys import PreparedDrop
from ckpttool.ops.merge import PreparedMerge, check_measurable
from ckpttool.ops.merge import execute as _merge
from ckpttool.storage.place import parse_place
from ckpttool.targeting.build import Prepared

LEAST_MEMORY = 4 << 20


@contextmanager
def watching(progress: Progress | bool | None) -> Iterator[Progress]:  # noqa: FBT001 - a receiver, or the wish for one
    """Whoever watches a run. A bar of ours is gone when the run ends, however it ends."""
    if progress is True:
        from ckpttool.report import bars  # with rich, which nothing else of the API needs

        bar = bars.progress(quiet=False)
        try:
            yield bar
        finally:
            bar.finish()
    elif progress is None or progress is False:
        yield NoProgress()
    else:
        methods = ("start", "advance", "file_done", "note", "finish")
        if lacking := [m for m in methods if not callable(getattr(progress, m, None))]:
            hint = f"give True for a bar, or an object with {', '.join(methods)}"
            raise UsageError(f"progress is {progress!r}, which has no method `{lacking[0]}`", hint=hint)
        yield progress


class Plan(ABC):
    """Base of all plans."""

    __slots__ = ()

    @property
    @abstractmethod
    def plan(self) -> Steps:
        """Every file and every step."""

    @property
    @abstractmethod
    def notes(self) -> list[str]:
        """What was inferred, omitted or derived, in sentences."""

    @abstractmethod
    def _execute(self, dst: Place, options: RunOptions, progress: Progress, *, verify: bool) -> Written: ...

    @public
    def run(
        self,
        dst: AnyPlace,
        *,
        force: bool = False,
        resume: bool = False,
        verify: bool = False,
        manifest: bool = False,
        memory: int | str = 64 << 20,
        workers: int | None = None,
        connections: int | None = None,
        create_pr: bool = False,
        on: str = "",
        part: str | Sequence[int] | None = None,
        progress: Progress | bool | None = None,
    ) -> Written:
        """Write ``dst``, whole or not at all.

        Args:
            dst: where the output goes; it must not exist. A path, or a text such as ``s3://bucket/model``.
            force: replace an existing ``dst``.
            resume: continue an interrupted run of the same plan.
            verify: read the output back, without the plan, and compare it with the sources.
            manifest: write a checksum of every stored tensor to ``ckpttool.manifest.json``.
            memory: bytes of all buffers together, or ``"256MiB"``.
            workers: threads that move bytes, and processes that compute.
            connections: requests at a time to other machines; by ``memory`` by default.
            create_pr: a ``dst`` on the Hugging Face Hub gets a pull request, and not a commit.
            on: let a cluster do the work: ``"ray"``, or ``"ray=HOST:PORT"``.
            part: do one part, beside processes that do the others: ``(3, 8)`` is the third of eight, counted from 1;
                ``"auto"`` is the part that Slurm, torchrun or MPI give this process.
            progress: True for a bar, in a terminal or a notebook; or an object that hears how far the run is.

        Raises:
            UsageError: an option that makes no sense.
            OutputError: ``dst`` cannot be written.
            CorruptError: a source is damaged or has changed.
            ConflictError: copies on different ranks differ.
            VerifyError: the output differs from the sources; nothing is kept.
        """
        options = RunOptions(
            memory=nbytes(memory, "memory", LEAST_MEMORY),
            workers=whole(workers, "workers"),
            connections=whole(connections, "connections"),
            force=force,
            resume=resume,
            manifest=manifest,
            create_pr=create_pr,
            on=on,
            member=member(part),
        )
        if options.on and options.member:
            raise UsageError("on and part exclude each other", hint="a cluster does all parts")
        with watching(progress) as watch:
            return self._execute(parse_place(dst), options, watch, verify=verify)

    def _repr_html_(self) -> str:
        """For notebooks: the files, the largest first."""
        outputs = sorted(self.plan.outputs, key=lambda o: -o.size)
        return table(repr(self)[1:-1], [(o.name, short(o.size)) for o in outputs], self.notes, ("file", "size"))


class Resharding(Plan):
    """The same tensors for other ranks, another format, other names or another precision."""

    __slots__ = ("prepared",)

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared

    @property
    def plan(self) -> Steps:
        return self.prepared.plan

    @property
    def mesh(self) -> Mesh:
        """Parallel sizes of the output."""
        return self.prepared.mesh

    @property
    def format(self) -> str:
        """The output's format."""
        return self.prepared.format

    @property
    def notes(self) -> list[str]:
        return notes_in_arguments(self.prepared.notes, "reshard")

    def __repr__(self) -> str:
        """``<Resharding to ranks, tp 2: 39 tensors in 6 files, 441.21 kB>``."""
        prepared = self.prepared
        return (
            f"<{type(self).__name__} to {prepared.format}, {prepared.mesh}: {count(len(prepared.views), 'tensor')} in"
            f" {count(len(self.plan.outputs), 'file')}, {short(self.plan.bytes_written)}>"
        )

    def _execute(self, dst: Place, options: RunOptions, progress: Progress, *, verify: bool) -> Written:
        done = _reshard.execute(self.prepared, dst, options, progress, verify=verify)
        return self._written(dst, done.run, verified=done.verified)

    def _written(self, dst: Place, run: RunResult, *, verified: bool) -> Written:
        return _written(dst, self.format, len(self.prepared.views), self, run, verified=verified)


class Dropping(Resharding):
    """A checkpoint without some of its tensors."""

    __slots__ = ("dropped",)

    def __init__(self, dropped: PreparedDrop) -> None:
        super().__init__(dropped.target)
        self.dropped = dropped

    @property
    def removed(self) -> tuple[str, ...]:
        """Names of the tensors that are removed."""
        return tuple(g.name for g in self.dropped.gone)

    @property
    def notes(self) -> list[str]:
        """What was inferred, omitted or derived, and what a loader may miss."""
        return notes_in_arguments([*self.dropped.warnings, *self.prepared.notes], "drop_keys")


class Merging(Resharding):
    """One model out of several."""

    __slots__ = ("merge", "report")

    def __init__(self, merge: PreparedMerge, report: Path | None = None) -> None:
        """Raises UsageError for a ``report`` about anything but a merge of several models."""
        super().__init__(merge.target)
        self.merge = merge
        self.report = report
        """The HTML page that ``run`` also writes."""
        if report is not None:
            check_measurable(merge, RunOptions())

    @property
    def method(self) -> str:
        """Name of the merge method."""
        return self.merge.method

    def _execute(self, dst: Place, options: RunOptions, progress: Progress, *, verify: bool) -> Written:
        if self.report is None:
            done = _merge(self.merge, dst, options, progress, verify=verify)
            return self._written(dst, done.run, verified=done.verified)
        from ckpttool.report.merge import check_report, write_report  # with the page, which few merges need

        check_report(self.merge, dst, options, self.report)
        done = _merge(self.merge, dst, options, progress, verify=verify, measure=True)
        write_report(done, self.report)
        written = self._written(dst, done.run, verified=done.verified)
        return replace(written, distances=done.distances.summary() if done.distances else None)


class Conversion(Plan):
    """A Paddle program's parameters as safetensors, or the way back. Always verified."""

    __slots__ = ("conversion", "dst")

    def __init__(self, conversion: _convert.PreparedConversion, dst: Place) -> None:
        self.conversion = conversion
        self.dst = dst
        """Destination; its name is part of the plan."""

    @property
    def plan(self) -> Steps:
        return self.conversion.plan

    @property
    def notes(self) -> list[str]:
        return notes_in_arguments(self.conversion.notes, "convert")

    def __repr__(self) -> str:
        """``<Conversion: 12 parameters in 1 file, 441.21 kB>``."""
        held = count(len(self.conversion.catalog), "parameter")
        return f"<Conversion: {held} in {count(len(self.plan.outputs), 'file')}, {short(self.plan.bytes_written)}>"

    def _execute(self, dst: Place, options: RunOptions, progress: Progress, *, verify: bool) -> Written:
        if dst != self.dst:
            raise UsageError(f"this plan is for `{self.dst}`", where=str(dst), hint="plan again: convert(src, dst)")
        run = _convert.execute(self.conversion, dst, options, progress).run
        kind = "program" if self.conversion.back else "safetensors"
        return _written(dst, kind, len(self.conversion.catalog), self, run, verified=run.committed)


def _written(dst: Place, kind: str, tensors: int, plan: Plan, run: RunResult, *, verified: bool) -> Written:
    return Written(
        path=dst,
        format=kind,
        tensors=tensors,
        files=len(plan.plan.outputs),
        nbytes=plan.plan.bytes_written,
        bytes_read=run.bytes_read,
        bytes_written=run.bytes_written,
        seconds=run.seconds,
        verify_seconds=run.verify_seconds,
        verified=verified,
        part=(run.standing.member.number, run.standing.member.of) if run.standing else None,
        committed=run.committed,
        waiting_for=run.standing.waiting_for if run.standing else (),
        notes=tuple(dict.fromkeys((*plan.notes, *notes_in_arguments(run.notes, "run")))),
    )
