"""Running ckpttool on one damaged file, and telling what came of it.

An answer is ``refused`` (a CkptError, a clean exit code, one message), ``same`` (what the undamaged files hold) or
``told`` (something else, and another reader says the same of the damaged files). Everything else is a finding.
"""

from __future__ import annotations

import resource
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpttool.checkpoint import Checkpoint, open_checkpoint
from ckpttool.core.geometry import whole
from ckpttool.errors import CkptError
from ckpttool.execute.compare import read_tensor
from ckpttool.formats.base import OpenOptions, ReadOptions
from tests.fuzz.damage import KINDS
from tests.fuzz.naive import Bits, bits, library, skeleton, unpickled
from tests.fuzz.trees import Case
from tests.helpers.command import Done, ckpttool

SECONDS = 8.0
"""Longest that anything may compute on these files of kilobytes."""
WAITING = 60.0
"""Longest that it may take, whatever else the machine does."""
STUCK = 60.0
"""After this on the processor the process ends, wherever it is."""
MEMORY = 300 << 20
"""Bytes that one case may add to the process."""

Answers = dict[str, Bits]


class HungError(BaseException):
    """Took longer than ``SECONDS`` or ``WAITING``. No handler of the program may take it for its own."""


class FindingError(Exception):
    """An answer that must not be; its text says why."""


@contextmanager
def watched() -> Iterator[None]:
    """Ends what hangs, and finds what takes memory. Raises FindingError."""

    def ring(_signum: int, _frame: Any) -> None:
        raise HungError

    before = _peak(reset=True)
    handlers = [signal.signal(n, ring) for n in (signal.SIGALRM, signal.SIGVTALRM)]
    signal.setitimer(signal.ITIMER_REAL, WAITING)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    # A loop in C looks at no signals: this one kills the process, and the campaign says at which case. A watchdog
    # thread would do it, too, but no command could fork its workers beside it.
    signal.setitimer(signal.ITIMER_PROF, STUCK)
    try:
        yield
    except HungError as e:
        frame = "".join(traceback.format_tb(e.__traceback__)[-4:])
        raise FindingError(f"still at it after {SECONDS:g} s of computing, or {WAITING:g} s\n{frame}") from None
    finally:
        for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
            signal.setitimer(timer, 0)
        for number, handler in zip((signal.SIGALRM, signal.SIGVTALRM), handlers, strict=True):
            signal.signal(number, handler)
    if (grown := _peak() - before) > MEMORY:
        raise FindingError(f"took {grown >> 20} MiB of memory")


def _peak(*, reset: bool = False) -> int:
    """Largest resident size in bytes; since the last reset, where the kernel can do that."""
    if reset:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


@dataclass(frozen=True)
class Subject:
    """A checkpoint (or another set of files), and what is damaged of it."""

    name: str
    make: Callable[[Path], None]
    """Puts the undamaged files into an empty folder."""
    damaged: Mapping[str, str]
    """File -> kind of its structure (a key of KINDS)."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of ReadOptions."""
    naive: Callable[[Path], Answers] | None = None
    """Another reader of the files; None takes what is unchanged only."""
    commands: tuple[tuple[str, ...], ...] = (("inspect", "{src}", "--check"),)
    """Run on every case, whether it can be opened or not. {src} is the folder, {out} a path that does not exist."""
    readable: tuple[tuple[str, ...], ...] = (("reshard", "{src}", "{out}", "--to", "hf", "--workers", "1", "-q"),)
    """Run on cases that can be opened."""
    opened: bool = True
    """Whether the folder is a checkpoint to open; otherwise only the commands are run."""
    checked: Callable[[Path, Done], None] | None = None
    """Raises FindingError for what a command printed or wrote in {out}."""


def read(folder: Path, options: Mapping[str, Any]) -> Answers:
    """Every tensor of a checkpoint by its key, as ckpttool reads it."""
    checkpoint = opened(folder, options)
    out = {}
    for key, tensor in checkpoint.catalog.tensors.items():
        out[str(key)] = bits(read_tensor(checkpoint.catalog, tensor, whole(tensor.shape)))
    return out


def opened(folder: Path, options: Mapping[str, Any]) -> Checkpoint:
    """A checkpoint with these options of ReadOptions."""
    return open_checkpoint(folder, OpenOptions(mesh=ReadOptions(**options)))


class Bench:
    """One subject in a folder of its own, ready to be damaged."""

    def __init__(self, subject: Subject, scratch: Path) -> None:
        self.subject = subject
        self.folder, self.out = scratch / subject.name.replace("/", "_"), scratch / "out"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        subject.make(self.folder)
        self.files = {n: (self.folder / n).read_bytes() for n in subject.damaged}
        self.damaged = next(iter(self.files.items()))
        self.golden = read(self.folder, subject.options) if subject.opened else {}
        self.written = {c: self._written(c) for c in subject.readable} if subject.opened else {}
        naive = subject.naive
        if naive is not None and subject.opened:
            plain = naive(self.folder)
            if any(plain[k] != v for k, v in self.golden.items() if k in plain):
                raise AssertionError(f"{subject.name}: the other reader disagrees with ckpttool on undamaged files")

    def cases(self) -> dict[str, Iterator[Case]]:
        """Everything that is done to each of the files."""
        return {file: KINDS[kind](self.files[file]) for file, kind in self.subject.damaged.items()}

    def run(self, file: str, damaged: bytes, *, thorough: bool) -> str:
        """``refused``, ``same`` or ``told``. Raises FindingError."""
        path = self.folder / file
        self.damaged = file, damaged
        try:
            path.write_bytes(damaged)
            return self._judge(thorough=thorough)
        finally:
            path.write_bytes(self.files[file])

    def _judge(self, *, thorough: bool) -> str:
        subject = self.subject
        verdict, got = "refused", None
        if subject.opened:
            verdict, got = self._read()
        for command in subject.commands:
            done = self._command(command)
            if command[0] == "inspect" and "--check" in command and subject.opened and got is None and done.code == 0:
                raise FindingError("cannot be opened, and `inspect --check` finds nothing")
            if not subject.opened and done.code == 0:
                verdict = "answered"
        if got is not None and thorough:
            for command in subject.readable:
                written = self._written(command)
                if verdict == "same" and written and written != self.written[command]:
                    raise FindingError(f"{' '.join(command)} writes other tensors than were read")
        return verdict

    def _read(self) -> tuple[str, Answers | None]:
        try:
            with watched():
                got = read(self.folder, self.subject.options)
        except CkptError as e:
            if not e.what:
                raise FindingError("an error without a text") from e
            return "refused", None
        except FindingError:
            raise
        except BaseException as e:
            raise FindingError("".join(traceback.format_exception(e)[-6:])) from e
        if got == self.golden:
            return "same", got
        return self._told(got), got

    def _told(self, got: Answers) -> str:
        """What differs from the undamaged files is what another reader says."""
        changed = [k for k in got if self.golden.get(k) != got[k]]
        gone = [k for k in self.golden if k not in got]
        new = {got[k] for k in changed if k not in self.golden}
        if (
            not any(k in self.golden for k in changed)
            and new <= set(self.golden.values())
            and ({self.golden[k] for k in gone} <= new)
        ):
            return "told"  # a tensor of one rank, or a copy of one, has another name
        file, damaged = self.damaged
        if (
            self.subject.damaged[file] == "pickle"
            and self.subject.naive is None
            and _only_elements(self.files[file], damaged)
        ):
            return "told"
        why = "there is no other reader"
        if self.subject.naive is not None:
            try:
                with watched():
                    said = self.subject.naive(self.folder)
            except BaseException as e:  # noqa: BLE001 - a naive reader fails as it likes
                why = f"the other reader refuses: {type(e).__name__}: {str(e)[:200]}"
            else:
                wrong = [k for k in changed if said.get(k) != got[k]] + [k for k in gone if k in said]
                if not wrong:
                    return "told"
                why = f"the other reader says otherwise of {wrong[:3]}"
        if any(command[0] == "reshard" and self._command(command).code for command in self.subject.readable):
            return "refused"  # copies that differ, or padding that holds something, show when elements are read
        raise FindingError(f"WRONG DATA? other: {changed[:3]}, gone: {gone[:3]}; {why}")

    def _command(self, template: Sequence[str]) -> Done:
        self._clear()
        arguments = [a.format(src=self.folder, out=self.out) for a in template]
        try:
            with watched():
                done = ckpttool(*arguments)
                done.out.encode()
        except FindingError:
            raise
        except BaseException as e:
            raise FindingError(f"{' '.join(template)}\n" + "".join(traceback.format_exception(e)[-6:])) from e
        said = f"{' '.join(template)}: exit {done.code}\n{done.err[-600:]}"
        if done.code not in (0, 1, 2, 3):
            raise FindingError(f"an exit code of its own: {said}")
        if "Traceback" in done.err or (done.code in (1, 2)) != (done.err.count("error: ") >= 1):
            raise FindingError(f"not one clean message: {said}")
        if done.code in (1, 2) and self.out.exists():
            raise FindingError(f"an error, and something written: {said}")
        if self.subject.checked is not None:
            self.subject.checked(self.out, done)
        return done

    def _clear(self) -> None:
        for path in (self.out, self.out.with_name(self.out.name + ".partial")):
            if path.is_file():
                path.unlink()
            else:
                shutil.rmtree(path, ignore_errors=True)

    def _written(self, command: Sequence[str]) -> dict[str, Any]:
        """What a command writes as safetensors; {} when it refuses."""
        done = self._command(command)
        if done.code:
            return {}
        return {p.name: library(p.read_bytes()) for p in sorted(self.out.glob("**/*.safetensors"))}


def _only_elements(golden: bytes, damaged: bytes) -> bool:
    """Whether two pickles differ in nothing but elements of arrays, by CPython's unpickler."""
    try:
        with watched():
            return bool(skeleton(unpickled(golden)) == skeleton(unpickled(damaged)))
    except BaseException:  # noqa: BLE001 - it fails as it likes
        return False
